// The page of a sweep. `data` is made by grpo/report/sweep.py.
"use strict";

const QUANTITIES = [
  ["result", "result", (arm) => arm.result?.mean, fixed, 1], ["seconds", "training time", (arm) => arm.seconds?.mean, duration, -1],
  ["tokens_per_s", "tokens/s", (arm) => arm.tokens_per_s, fmt, 1], ["trained_share", "trained share", (arm) => arm.trained_share, (x) => percent(x, 1), 1],
  ["idle_trainer", "trainer idle", (arm) => arm.idle_trainer, percent, -1], ["idle_sampler", "sampler idle", (arm) => arm.idle_sampler, percent, -1],
  ["lag_mean", "mean lag", (arm) => arm.lag_mean, fmt, -1], ["ess", "ESS", (arm) => arm.ess, fmt, 1],
];
const MAX_LINES = 10; // in one panel of curves

function sweepPage(data) {
  const short = shortNames(data.knobs);
  data.short = short;
  data.arms.forEach((arm, i) => {
    arm.index = i;
    arm.label = data.knobs.map((knob) => `${short[knob]}=${arm.values[knob]}`).join(" ") || "all jobs";
  });
  frame(document.getElementById("page"), sweepHead(data), [
    ["overview", "Overview", [sweepTiles(data), notesBox(data)]],
    ["arms", "Arms", armsSection(data)],
    ["differences", "Differences", differencesSection(data)],
    ...(data.knobs.length > 1 ? [["map", "Map", mapSection(data)]] : []),
    ["curves", "Curves", curvesSection(data)],
    ["tradeoff", "Trade-off", tradeoffSection(data)],
    ["jobs", "Jobs", jobsSection(data)],
  ], data, []);
}

function sweepHead(data) {
  return [
    el("div.title", {}, el("h1", {}, prose(data.name)), el("span.state.plain", {}, "sweep")),
    el("p.meta", {}, data.knobs.length ? ["Varied: ", data.knobs.map((knob, i) => [i ? ", " : "", el("code", {}, knob)])] : "No setting was varied but the seed."),
    data.command && el("div.command", {}, el("pre.mono", { tabindex: 0 }, prose(data.command))),
    data.shared.length > 0 && el("div.chips", { "aria-label": "Overrides of all jobs" }, data.shared.map(([key, value]) => el("span.chip.mono", {}, prose(`${key}=${value}`)))),
  ];
}

const armColor = (arm) => color(arm.index);

// The difference "other - base", from whichever order it was stored in.
function difference(data, base, other) {
  const found = data.differences.find((d) => (d.a === base && d.b === other) || (d.a === other && d.b === base));
  if (!found?.interval) return null;
  const { mean, low, high, n } = found.interval;
  const sign = found.a === base ? 1 : -1;
  const ends = known(low) ? (sign > 0 ? [low, high] : [-high, -low]) : [null, null];
  return { mean: sign * mean, low: ends[0], high: ends[1], n, separated: found.separated };
}

function sweepTiles(data) {
  const tile = (id, name, big, sub) => el("div.card.tile", { id }, el("div.name", {}, name), el("div.big", {}, big), el("div.sub", {}, sub));
  const finished = data.jobs.filter((job) => job.state === "finished").length;
  const best = known(data.best) ? data.arms[data.best] : null;
  const rivals = best ? data.arms.filter((arm) => arm !== best && arm.result) : [];
  const tied = rivals.filter((arm) => !difference(data, best.index, arm.index)?.separated);
  const seconds = data.jobs.reduce((sum, job) => sum + (job.wall_clock || 0), 0);
  return el("div.tiles", {},
    tile("tile-best", `best arm by ${data.result}`, best ? fixed(best.result.mean) : "–",
      best ? [el("code", {}, best.label), known(best.result.low) ? `, 95 % ${interval(best.result.low, best.result.high)}` : "", `, n = ${best.result.n}`] : "no finished job with a result"),
    tile("tile-tied", "arms that the seeds cannot separate from it", best ? `${tied.length} of ${rivals.length}` : "–",
      !best ? "" : !rivals.length ? "there is no other arm" : tied.length ? "their paired 95 % interval contains zero, or there is none: calling the best one better than these is not supported" : "every other arm is lower by more than its paired 95 % interval"),
    tile("tile-jobs", "jobs finished", `${finished} of ${data.jobs.length}`, `${duration(seconds)} of wall-clock in all, set-up included`));
}

function notesBox(data) {
  return el("div.card", { id: "warnings" }, el("h3", {}, "What stands out"), data.notes.length
    ? el("ul.findings", {}, data.notes.map((note) => el(`li.${note.level}-level`, {}, prose(note.text))))
    : el("p.muted", {}, "Nothing: every job finished, every arm moved and had data, all from one revision."));
}

// ---- arms: seeds aggregated ----
function armsSection(data) {
  const jobsOf = (arm) => data.jobs.filter((job) => job.arm === arm.index && job.state === "finished");
  const results = data.jobs.map((job) => job.after?.value);
  const bounds = extent([...results, ...data.arms.flatMap((arm) => [arm.result?.mean])]);
  const columns = [
    ...data.knobs.map((knob) => ({ name: data.short[knob], title: knob, value: (arm) => arm.values[knob] })),
    { name: "n", num: true, value: (arm) => arm.result?.n, cell: (arm) => [String(arm.result?.n ?? 0), arm.missing ? el("span.flag.warn", {}, ` ${arm.missing} missing`) : ""] },
    { name: "mean", num: true, value: (arm) => arm.result?.mean, cell: (arm) => el("b", { "data-value": arm.result?.mean }, fixed(arm.result?.mean)) },
    { name: "95 % interval", value: (arm) => arm.result?.low, cell: (arm) => (arm.result ? (known(arm.result.low) ? interval(arm.result.low, arm.result.high) : "one seed: none") : "–") },
    { name: "mean, interval and seeds", cell: (arm) => forest(arm, jobsOf(arm), bounds) },
    ...QUANTITIES.slice(1).filter(([, , of]) => data.arms.some((arm) => known(of(arm)))).map(([, name, of, text]) => ({ name, num: true, value: of, cell: (arm) => text(of(arm)) })),
    { name: "flags", value: (arm) => arm.flags.join(", "), cell: (arm) => [arm.flags.map((flag) => el("span.flag.bad", {}, flag)), arm.front ? el("span.flag.good", {}, "Pareto front") : ""] },
  ];
  return [el("p.lead", {}, `Mean over the seeds of each arm: ${data.result}. Intervals are Student's t over seeds; they say how much a new seed may differ, not how exact one evaluation is.`),
    table({ label: "Arms", rows: data.arms, columns }).box];
}

function forest(arm, jobs, [low, high]) {
  if (!arm.result) return "–";
  const pad = (high - low) * 0.15 || 0.05, width = 190;
  const px = (x) => 4 + Math.max(0, Math.min(1, (x - low + pad) / (high - low + 2 * pad))) * (width - 8);
  const svg = el("svg", { viewBox: `0 0 ${width} 20`, width, height: 20, role: "img", "aria-label": `${fixed(arm.result.mean)} ${interval(arm.result.low, arm.result.high)}` });
  svg.style.width = `${width}px`;
  if (known(arm.result.low)) svg.append(el("line.whisker", { x1: px(arm.result.low), x2: px(arm.result.high), y1: 10, y2: 10, c: "var(--c0)" }));
  for (const job of jobs) if (known(job.after?.value)) svg.append(el("circle", { cx: px(job.after.value), cy: 10, r: 2, fill: "currentColor", opacity: 0.45 }));
  svg.append(el("circle.dot", { cx: px(arm.result.mean), cy: 10, r: 4.5, c: "var(--c0)" }));
  return svg;
}

function verdict(d) {
  if (!d) return ["no seed in common", "warn"];
  if (!known(d.low)) return ["one seed in common: cannot tell", "warn"];
  if (!d.separated) return [`${d.n} seeds cannot separate them`, "warn"];
  return d.mean > 0 ? ["higher", "good"] : ["lower", "bad"];
}

function differencesSection(data) {
  const armsIn = data.arms.filter((arm) => arm.result);
  if (armsIn.length < 2) return el("p.muted", {}, "There are no two arms with results to compare.");
  const start = data.best ?? armsIn[0].index;
  const partial = data.differences.length < (data.arms.length * (data.arms.length - 1)) / 2;
  const others = (base) => armsIn.filter((arm) => arm.index !== base);
  let base = start;
  const list = table({ label: "Differences", rows: others(base), columns: [
    { name: "arm", value: (arm) => arm.name, cell: (arm) => el("code", {}, arm.label) },
    { name: "difference", num: true, value: (arm) => difference(data, base, arm.index)?.mean, cell: (arm) => { const d = difference(data, base, arm.index); return d ? el("b", { "data-value": d.mean }, (d.mean > 0 ? "+" : "") + fixed(d.mean)) : "–"; } },
    { name: "95 % interval", cell: (arm) => { const d = difference(data, base, arm.index); return d ? interval(d.low, d.high) || "–" : "–"; } },
    { name: "pairs", num: true, value: (arm) => difference(data, base, arm.index)?.n, cell: (arm) => String(difference(data, base, arm.index)?.n ?? 0) },
    { name: "what the seeds say", value: (arm) => verdict(difference(data, base, arm.index))[0], cell: (arm) => { const [text, kind] = verdict(difference(data, base, arm.index)); return el(`span.flag.${kind}`, {}, text); } },
  ] });
  const choose = el("select", { id: "baseline", disabled: partial ? "" : null, onchange: (event) => { base = Number(event.target.value); list.show(others(base)); } },
    armsIn.map((arm) => el("option", { value: arm.index, selected: arm.index === start ? "" : null }, arm.label)));
  const n = armsIn.length - 1;
  return [el("p.lead", {}, `Each arm minus the chosen one, paired by seed, ${data.result}. Intervals are not corrected for looking at ${plural(n, "arm")}: ${n > 1 ? `of ${n} arms that do not differ, about ${fmt(n * 0.05, 2)} would look different by chance` : "one in twenty such intervals misses"}.`),
    el("div.controls", {}, el("label", {}, partial ? "compared with the best arm only (too many arms for all pairs)" : "compared with", choose)), list.box];
}

// ---- two knobs ----
function mapSection(data) {
  let [rowKnob, columnKnob] = data.knobs;
  let chosen = QUANTITIES[0];
  const place = el("div", {});
  const distinct = (knob) => [...new Set(data.arms.map((arm) => arm.values[knob]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  function draw() {
    const [, , of, text, better] = chosen;
    place.replaceChildren(heatMap({
      rows: distinct(rowKnob), columns: distinct(columnKnob), rowName: rowKnob, columnName: columnKnob, better,
      cell: (r, c) => {
        const arms = data.arms.filter((arm) => arm.values[rowKnob] === r && arm.values[columnKnob] === c);
        const values = arms.map(of).filter(known);
        if (!values.length) return arms.length ? { value: null, text: arms.flatMap((arm) => arm.flags).join(", ") || "–" } : null;
        const mean = values.reduce((sum, x) => sum + x, 0) / values.length;
        const seeds = arms.reduce((sum, arm) => sum + (arm.result?.n || 0), 0);
        return { value: mean, text: text(mean), title: `${plural(seeds, "job")}${arms.length > 1 ? `, mean of ${arms.length} arms` : ""}` };
      } }));
  }
  const pick = (name, options, start, onpick) => el("label", {}, name, el("select", { onchange: (event) => { onpick(event.target.value); draw(); } }, options.map(([value, text]) => el("option", { value, selected: value === start ? "" : null }, text))));
  const knobs = data.knobs.map((knob) => [knob, knob]);
  draw();
  return [el("p.lead", {}, `The stronger the colour the better. Each cell is the mean of its arm${data.knobs.length > 2 ? "s, over the other knobs" : ""}; neighbours may differ by chance, see Differences.`),
    el("div.controls", {}, pick("rows", knobs, rowKnob, (value) => { rowKnob = value; }), pick("columns", knobs, columnKnob, (value) => { columnKnob = value; }),
      pick("shown", QUANTITIES.filter(([, , of]) => data.arms.some((arm) => known(of(arm)))).map(([key, name]) => [key, name]), "result", (value) => { chosen = QUANTITIES.find(([key]) => key === value); })),
    el("div.card", { id: "heat" }, place)];
}

// ---- curves by arm ----
function curvesSection(data) {
  const keys = Object.keys(data.curves);
  if (!keys.length) return el("p.muted", {}, "No finished job recorded a curve.");
  let key = keys[0], axis = "step";
  // Panels by the knob with the fewest values, colours by the rest.
  const values = (knob) => [...new Set(data.arms.map((arm) => arm.values[knob]))];
  const panelKnob = data.knobs.length > 1 ? data.knobs.reduce((a, b) => (values(b).length < values(a).length ? b : a)) : null;
  const place = el("div", {});
  const label = (arm) => data.knobs.filter((knob) => knob !== panelKnob).map((knob) => `${data.short[knob]}=${arm.values[knob]}`).join(" ") || "all jobs";
  const labels = [...new Set(data.arms.map(label))];
  function draw() {
    for (let i = charts.length - 1; i >= 0; i--) if (place.contains(charts[i].box)) charts.splice(i, 1);
    const { title } = data.curves[key];
    const everything = [];
    const panels = (panelKnob ? values(panelKnob).sort((a, b) => a.localeCompare(b, "en", { numeric: true })) : [null]).map((value) => {
      const inPanel = data.arms.filter((arm) => value === null || arm.values[panelKnob] === value).filter((arm) => data.curves[key][axis][arm.index]);
      const shown = inPanel.length > MAX_LINES ? [...inPanel].sort((a, b) => (b.result?.mean ?? -Infinity) - (a.result?.mean ?? -Infinity)).slice(0, MAX_LINES) : inPanel;
      const lines = shown.map((arm) => {
        const { x, y, lo, hi } = data.curves[key][axis][arm.index];
        everything.push(...y);
        return { name: label(arm), color: color(labels.indexOf(label(arm))), x, y, lo, hi, dots: x.length <= 12 };
      });
      return { title: value === null ? title : `${panelKnob}=${value}`, note: shown.length < inPanel.length ? `the ${shown.length} best of ${inPanel.length} arms` : null, lines };
    }).filter((panel) => panel.lines.length);
    const [low, high] = extent(everything), pad = (high - low) * 0.06 || 0.05;
    // One scale for all panels, so that they can be compared.
    const made = panels.map((panel) => chart({ ...panel, axis, range: panels.length > 1 ? [low - pad, high + pad] : null, height: panels.length > 1 ? 210 : 300 }));
    place.replaceChildren(made.length ? el(made.length > 1 ? "div.grid" : "div", {}, made.map((each) => each.box)) : el("p.muted", {}, "No data over this axis."));
    for (const each of made) if (each.box.isConnected) each.draw();
  }
  draw();
  return [el("p.lead", {}, "Mean over the finished seeds of each arm, over the range that all of them reached; the band goes from the lowest to the highest seed. The clock starts with the first step, so that a server that was already there gives no job an advantage."),
    el("div.controls", {},
      el("label", {}, "quantity", el("select", { id: "curve-key", onchange: (event) => { key = event.target.value; draw(); } }, keys.map((name) => el("option", { value: name }, data.curves[name].title)))),
      el("label", {}, "over", segments("Horizontal axis", [["step", "step"], ["seconds", "wall-clock"]], axis, (value) => { axis = value; draw(); }))), place];
}

function tradeoffSection(data) {
  const arms = data.arms.filter((arm) => arm.result && arm.seconds);
  if (!arms.length) return el("p.muted", {}, "No finished job has both a result and a clock.");
  const points = [
    ...data.jobs.filter((job) => job.state === "finished" && known(job.after?.value) && known(job.seconds)).map((job) => ({ x: job.seconds, y: job.after.value, color: armColor(data.arms[job.arm]), faint: true })),
    ...arms.map((arm) => ({ x: arm.seconds.mean, y: arm.result.mean, color: armColor(arm), name: arm.label, front: arm.front })),
  ];
  return scatter({ title: "Result against training time", note: "large: means of arms, ringed by the Pareto front (no arm is both faster and better); small: single jobs", points,
    xFormat: axisText.seconds, yFormat: fmt, xName: "training time", yName: data.result });
}

function jobsSection(data) {
  const counter = el("span.muted", { role: "status" });
  const text = (job) => `${job.path} ${job.state} ${Object.entries(job.overrides).map(([key, value]) => `${key}=${value}`).join(" ")} ${job.error || ""} ${job.flags.join(" ")}`.toLowerCase();
  const list = table({ label: "Jobs", rows: data.jobs, columns: [
    { name: "job", value: (job) => job.path, cell: (job) => (job.href ? el("a", { href: job.href }, prose(job.path)) : prose(job.path)) },
    { name: "state", value: (job) => job.state, cell: (job) => el(`span.flag.${{ finished: "good", failed: "bad" }[job.state] || "warn"}`, {}, job.state) },
    ...data.knobs.map((knob) => ({ name: data.short[knob], title: knob, value: (job) => data.arms[job.arm].values[knob] })),
    { name: "seed", value: (job) => job.seed },
    { name: "before", num: true, value: (job) => job.before?.value, cell: (job) => fixed(job.before?.value) },
    { name: "after", num: true, value: (job) => job.after?.value, title: "the last evaluation; of an unfinished job, with its step", cell: (job) => (job.state === "finished"
      ? [el("b", {}, fixed(job.after?.value)), known(job.after?.low) ? ` (${interval(job.after.low, job.after.high)})` : ""]
      : el("span.muted", {}, known(job.after?.value) ? `${fixed(job.after.value)} at step ${job.after.step ?? "–"}` : "–")) },
    { name: "steps", num: true, value: (job) => job.step, cell: (job) => `${count(job.step)} / ${count(job.steps)}` },
    { name: "training", num: true, value: (job) => job.seconds, cell: (job) => duration(job.seconds), title: "from the first step on" },
    { name: "wall-clock", num: true, value: (job) => job.wall_clock, cell: (job) => duration(job.wall_clock), title: "set-up included" },
    { name: "tokens", num: true, value: (job) => job.tokens, cell: (job) => count(job.tokens) },
    { name: "trainer idle", num: true, value: (job) => job.idle_trainer, cell: (job) => percent(job.idle_trainer) },
    { name: "sampler idle", num: true, value: (job) => job.idle_sampler, cell: (job) => percent(job.idle_sampler) },
    { name: "remarks", value: (job) => job.error || job.flags.join(), cell: (job) => [job.flags.map((flag) => el("span.flag.bad", {}, flag)), job.damage.map((line) => el("span.flag.bad", {}, prose(line))), job.error && el("span.excerpt.mono", {}, prose(job.error))] },
  ] });
  const filter = (needle) => {
    const found = data.jobs.filter((job) => text(job).includes(needle.toLowerCase()));
    counter.textContent = `${count(found.length)} of ${plural(data.jobs.length, "job")}`;
    list.show(found);
  };
  filter("");
  return [el("div.controls", {}, el("label", {}, "search jobs", el("input", { type: "search", id: "job-search", oninput: (event) => filter(event.target.value) })), counter), list.box];
}
