// The page of one run. `data` is made by grpo/report/run.py.
"use strict";

const PARTS = [["wait_rollouts", "waiting for rollouts", "var(--wait)"], ["train", "training", "var(--train)"],
  ["sync", "weight sync", "var(--sync)"], ["other", "other", "var(--other)"]];
const WHOLE = { wait_rollouts: "var(--wait)", train: "var(--train)", sync: "var(--sync)", other: "var(--other)" };
const ACCOUNTS = [["trained", "trained", "var(--c0)"], ["masked", "masked", "var(--c4)"], ["discarded", "discarded", "var(--c1)"], ["in_flight", "in flight", "var(--wait)"]];

function runPage(data) {
  const page = document.getElementById("page");
  const sections = [
    ["overview", "Overview", [tiles(data), findingsBox(data)]],
    ["learning", "Learning", learning(data)],
    ["time", "Time", timeSection(data)],
    ["staleness", "Staleness", staleness(data)],
    ["update", "Update", update(data)],
    ["completions", "Completions", completions(data)],
    ["ledger", "Tokens", ledger(data)],
    ["rollouts", "Rollouts", rolloutsSection(data)],
    ["settings", "Settings", settings(data)],
  ];
  frame(page, head(data), sections, data, [
    segments("Horizontal axis", [["step", "step"], ["seconds", "wall-clock"]], "step", (axis) => redrawCurves({ axis })),
    el("label.check", {}, el("input", { type: "checkbox", onchange: (event) => redrawCurves({ smooth: event.target.checked }) }), "smooth"),
  ]);
}

// ---- curves of metrics.jsonl ----
const curves = []; // [chart, keys] that follow the axis and smoothing switches

function curve(data, { title, note, keys, refs, zero, format, range, stacked }) {
  const here = keys.filter(([key]) => data.series.columns[key]?.some(known));
  if (!here.length) return null;
  const make = (axis) => here.map(([key, name], i) => line(data, key, name, here[i][2] || color(i), axis));
  const made = chart({ title, note, lines: make("step"), refs, zero, format, range, stacked });
  curves.push((change) => made.update(change.axis ? { ...change, lines: make(change.axis) } : change));
  return made.box;
}

function line(data, key, name, c, axis) {
  const { columns, lo, hi } = data.series;
  return { name, color: c, x: axis === "step" ? columns.step : columns["time/elapsed_s"] || [], y: columns[key], lo: lo[key], hi: hi[key] };
}

function redrawCurves(change) { for (const each of curves) each(change); }

function head(data) {
  const { status } = data;
  const kind = { finished: "good", failed: "bad", interrupted: "warn", running: "warn" }[status.state] || "warn";
  const meta = [
    known(status.steps) ? `${count(status.step)} of ${count(status.steps)} steps` : plural(data.series.lines, "step"),
    known(data.seconds) && duration(data.seconds), status.started && `started ${status.started}`, status.git && `revision ${status.git}`,
  ].filter(Boolean).join(" · ");
  return [
    el("div.title", {}, el("h1", {}, prose(data.name)), el(`span.state.${kind}`, {}, status.state)),
    el("p.meta", {}, meta),
    status.command && el("div.command", {}, el("pre.mono", { tabindex: 0 }, prose(status.command))),
    el("div.chips", { "aria-label": "Overrides against the defaults" }, data.overrides.length
      ? data.overrides.map(([key, value]) => el("span.chip.mono", {}, prose(`${key}=${value}`))) : el("span.muted", {}, "no overrides: the defaults")),
    status.error && el("div.card.error", { id: "error" }, el("h3", { tabindex: 0 }, prose(`${status.error.type}: ${status.error.message}`)),
      status.error.traceback && el("details", { open: "" }, el("summary", {}, "traceback"), el("pre.mono", { tabindex: 0 }, prose(status.error.traceback)))),
  ];
}

function tiles(data) {
  const { before, after } = data.headline;
  const tile = (id, name, big, sub, extra) => el("div.card.tile", { id }, el("div.name", {}, name), el("div.big", {}, big), el("div.sub", {}, sub), extra);
  const evaluation = after || before;
  const range = (e) => (known(e.low) ? ` (${interval(e.low, e.high)})` : "");
  const l = data.ledger;
  return el("div.tiles", {},
    tile("tile-eval", evaluation ? `evaluation ${evaluation.name}` : "evaluation",
      before && after ? `${fixed(before.value)} → ${fixed(after.value)}` : evaluation ? fixed(evaluation.value) : "–",
      before && after ? `step ${count(before.step)}${range(before)} → step ${count(after.step)}${range(after)}${known(after.n) ? `, n = ${count(after.n)}` : ""}; brackets: 95 %`
        : evaluation ? `step ${count(evaluation.step)}${range(evaluation)}, one evaluation only` : "no evaluation recorded"),
    tile("tile-speed", "generated tokens per second", fmt(data.headline.tokens_per_s),
      l ? `${count(l.generated)} tokens over ${duration(data.headline.working_s)} of waiting, training and sync` : "not recorded"),
    tile("tile-trained", "of the generated tokens trained", l?.generated ? percent(l.trained / l.generated, 1) : "–",
      l ? `${count(l.trained)} trained, ${count(l.masked)} masked, ${count(l.discarded)} discarded, ${count(l.in_flight)} in flight` : "not recorded"));
}

function findingsBox(data) {
  const items = [
    ...data.notes.filter((note) => note.level !== "note").map((note) => el(`li.${note.level}-level`, {}, el("b", {}, "data"), prose(note.text))),
    ...data.findings.map((found) => el(`li.${found.level}-level`, {}, el("b", {}, found.number), prose(found.text),
      el("div.knobs", {}, el("a", { href: `#${found.plot}` }, "see the plot"), found.knobs.length ? "turn:" : "", found.knobs.map((knob) => el("code.chip", {}, knob))))),
    ...data.notes.filter((note) => note.level === "note").map((note) => el("li.note-level", {}, el("b", {}, "data"), prose(note.text))),
  ];
  return el("div.card", { id: "warnings" }, el("h3", {}, "What stands out"),
    items.length ? el("ul.findings", {}, items) : el("p.muted", {}, data.series.lines ? `Nothing, by the ${data.rules} rules that this page knows.` : "No step is recorded yet: there is nothing to judge."));
}

function learning(data) {
  const names = Object.keys(data.evals);
  const make = (axis) => names.map((name, i) => {
    const points = data.evals[name].filter((e) => known(axis === "step" ? e.step : e.seconds));
    return { name, color: color(i), dots: true, x: points.map((e) => (axis === "step" ? e.step : e.seconds)), y: points.map((e) => e.value),
      lo: points.map((e) => e.low), hi: points.map((e) => e.high) };
  });
  let evals = null;
  if (names.length) {
    evals = chart({ title: "Evaluation", note: "held-out; band: 95 % interval", lines: make("step") });
    curves.push((change) => evals.update(change.axis ? { axis: change.axis, lines: make(change.axis) } : {}));
  }
  return grid(evals?.box,
    curve(data, { title: "Reward", note: "mean of the batch", keys: [["reward/mean", "mean"]] }),
    curve(data, { title: "Spread of rewards", note: "standard deviation", keys: [["reward/std", "std"]], zero: true }));
}

const grid = (...cards) => {
  const there = cards.flat().filter(Boolean);
  return there.length ? el("div.grid", {}, there) : el("p.muted", {}, "Nothing recorded.");
};

function timeSection(data) {
  const seconds = Object.values(data.time).reduce((sum, x) => sum + x, 0);
  const parts = PARTS.map(([key, name, c]) => ({ name, value: data.time[key] || 0, color: c }));
  const idle = Object.entries(data.idle).map(([who, share]) => `; ${who} idle ${percent(share)}`).join("");
  const overlap = data.overlap_s > 0 && data.time.train > 0 ? `; generation went on during at least ${percent(data.overlap_s / data.time.train)} of the training time` : "";
  const whole = Object.entries(data.whole_time);
  const sum = whole.reduce((total, [, value]) => total + value, 0);
  return [
    sum > 0 && el("div.card.wide", {}, el("h3", {}, `The whole run: ${duration(sum)}`),
      shareBar({ parts: whole.map(([key, value], i) => ({ name: PARTS.find(([part]) => part === key)?.[1] || key.replaceAll("_", " "), value, color: WHOLE[key] || color(i + 3) })), format: duration, label: "Time of the run" })),
    seconds > 0 && el("div.card.wide", {}, el("h3", {}, `The steps: ${duration(seconds)}`), el("p.note", {}, `What the trainer did${idle}${overlap}.`),
      shareBar({ parts, format: duration, label: "Time of the trainer" })),
    timeline(data.timeline),
    grid(
      curve(data, { title: "Seconds per step", keys: PARTS.slice(0, 3).map(([key, name, c]) => [`time/${key}_s`, name, c]), stacked: true, format: duration }),
      curve(data, { title: "Throughput", note: "tokens per second", keys: [["throughput/generated_tokens_per_s", "generated"], ["throughput/trained_tokens_per_s", "trained"]], zero: true }),
      curve(data, { title: "Open requests", note: "mean over the step, all servers", keys: [["sampler/open_requests_mean", "open"]], zero: true })),
  ];
}

// Two lanes over the wall-clock: what the trainer did, and how much was generated meanwhile.
function timeline(rows) {
  const byRequests = rows.some((row) => known(row[6]));
  const spans = rows.map(([step, end, length, wait, train, sync, open, generated], i) => {
    if (!known(end) || !known(length) || !known(step)) return null;
    const before = i ? rows[i - 1][7] : null;
    const rate = known(generated) && known(before) && length > 0 ? Math.max(0, generated - before) / length : null;
    return { step, start: end - length, end, parts: [wait || 0, train || 0, sync || 0], level: byRequests ? open : rate };
  }).filter(Boolean);
  if (spans.length < 2) return null;
  const unit = byRequests ? "open requests" : "tokens/s generated";
  const most = Math.max(...spans.map((span) => span.level || 0)) || 1;
  let width = Math.min(20, spans.length), first = Math.max(0, Math.floor((spans.length - width) / 2));
  const svg = el("svg", { height: 104, role: "img" });
  const slider = el("input", { type: "range", min: 0, max: spans.length - width, value: first, "aria-label": "First step of the timeline", oninput: () => { first = Number(slider.value); draw(); } });
  const widths = [[5, "5"], [20, "20"], [60, "60"], [200, "200"]].filter(([n], i, all) => !i || n < spans.length || all[i - 1][0] < spans.length);
  const where = el("span.muted", {});
  const zoom = segments("Steps in view", widths, widths.findLast(([n]) => n <= 20)[0], (n) => {
    width = Math.min(n, spans.length);
    slider.max = spans.length - width;
    first = Math.min(first, spans.length - width);
    slider.value = first;
    draw();
  });
  function draw() {
    const view = spans.slice(first, first + width);
    const full = svg.clientWidth || 700, left = 78, t0 = view[0].start, t1 = view.at(-1).end;
    const px = (t) => left + ((t - t0) / (t1 - t0)) * (full - left - 8);
    svg.setAttribute("viewBox", `0 0 ${full} 104`);
    svg.replaceChildren(el("text", { x: 0, y: 24 }, "trainer"), el("text", { x: 0, y: 62 }, "generation"), el("line.axis", { x1: left, x2: full - 8, y1: 80, y2: 80 }));
    const label = view.map((span) => `step ${span.step}: ${PARTS.slice(0, 3).map(([, name], i) => `${name} ${duration(span.parts[i])}`).join(", ")}${known(span.level) ? `, ${fmt(span.level)} ${unit}` : ""}`);
    view.forEach((span, k) => {
      let t = span.start;
      const box = (y, height, from, to, c, opacity) => el("rect.bar", { x: px(from), y, width: Math.max(0.5, px(to) - px(from) - 0.4), height, c, opacity }, el("title", {}, label[k]));
      svg.append(box(8, 26, span.start, span.end, "var(--other)"));
      span.parts.forEach((part, i) => { svg.append(box(8, 26, t, Math.min(span.end, t + part), PARTS[i][2])); t += part; });
      if (known(span.level)) { const h = 26 * (span.level / most); svg.append(box(44 + 26 - h, h, span.start, span.end, "var(--generate)")); }
    });
    for (const mark of ticks(t0, t1, Math.max(2, full / 140))) svg.append(el("text", { x: px(mark), y: 97, "text-anchor": "middle" }, axisText.seconds(mark)));
    svg.setAttribute("aria-label", `Timeline. ${label.slice(0, 5).join("; ")}`);
    where.textContent = `steps ${view[0].step} to ${view.at(-1).step}`;
  }
  charts.push({ box: svg, draw, cursor() {}, axis: null });
  return el("div.card.wide", { id: "timeline" }, el("h3", {}, "Timeline"),
    el("p.note", {}, `Above: what the trainer did; a gap is an evaluation or a checkpoint. Below: ${unit}, mean of the step (full height: ${fmt(most)}). Green under blue is generation while the trainer trains.`),
    el("div.legend", {}, PARTS.slice(0, 3).map(([, name, c]) => swatch(c, name)), swatch("var(--generate)", "generation")),
    svg, el("div.controls", {}, el("label", {}, "scroll", slider), el("label", {}, "steps in view", zoom), where));
}

function staleness(data) {
  const lags = Object.entries(data.lags).map(([lag, figures]) => ({ lag: Number(lag), ...figures }));
  const bound = data.bound;
  const total = lags.reduce((sum, row) => sum + (row.tokens || 0), 0);
  // Lag 0 and the lags with the most tokens, as many as there are colours.
  const shown = [...lags].sort((a, b) => (a.lag !== 0) - (b.lag !== 0) || (b.tokens || 0) - (a.tokens || 0)).slice(0, 8).sort((a, b) => a.lag - b.lag);
  const byStep = (name) => [[name === "kl" ? "kl/sampler" : name === "ess" ? "ess" : "clip/fraction", "all", "var(--ink)"],
    ...shown.map((row, i) => [`lag_${row.lag}/${name}`, `lag ${row.lag}`, color(i)])];
  return [
    grid(
      lags.length && barChart({ title: "Trained tokens by lag", note: "lag: trainer's version minus the version that sampled the token", color: "var(--c0)",
        bars: filledLags(lags, bound).map((row) => ({ name: String(row.lag), value: row.tokens || 0, title: percent((row.tokens || 0) / total, 1) })),
        mark: known(bound) && bound < 200 ? bound : null, markName: `rollout.max_staleness ${bound}` }),
      curve(data, { title: "Lag by step", keys: [["lag/mean", "mean"], ["lag/max", "oldest"]], zero: true, refs: known(bound) ? [{ y: bound, name: "bound" }] : [] }),
      curve(data, { title: "Importance ratio", note: "policy / sampler, per token", keys: [["ratio/mean", "mean"], ["ratio/min", "lowest"], ["ratio/max", "highest"]], format: (x) => fmt(x, 5) }),
      curve(data, { title: "KL(sampler ‖ policy)", note: "k3 estimate, nats per token", keys: byStep("kl") }),
      curve(data, { title: "Effective sample size", note: "share of the tokens that the batch is worth", keys: byStep("ess"), format: (x) => fmt(x, 4) }),
      curve(data, { title: "Clipped tokens", note: "share whose gradient is cut", keys: byStep("clip_fraction"), zero: true, format: (x) => percent(x, 1) })),
    lags.length ? [el("p.lead", {}, "By lag, over the whole run (means weighted by tokens). Lag 0 is the numerical floor of the engine; what is above it is policy lag."),
      table({ label: "Figures by lag", rows: lags, columns: [
        { name: "lag", num: true, value: (row) => row.lag, cell: (row) => String(row.lag) },
        { name: "tokens", num: true, value: (row) => row.tokens, cell: (row) => count(row.tokens) },
        { name: "share", num: true, value: (row) => row.tokens / total, cell: (row) => percent(row.tokens / total, 1) },
        ...[["ratio_mean", "ratio"], ["ratio_min", "lowest"], ["ratio_max", "highest"], ["kl", "KL"], ["ess", "ESS"], ["clip_fraction", "clipped"]]
          .filter(([key]) => lags.some((row) => known(row[key]))).map(([key, name]) => ({ name, num: true, value: (row) => row[key], cell: (row) => fmt(row[key], 4) })),
      ] }).box] : null,
  ];
}

// All lags from 0 to the bound, so that an empty one shows as empty.
function filledLags(lags, bound) {
  const top = Math.min(200, Math.max(...lags.map((row) => row.lag), bound ?? 0));
  const byLag = new Map(lags.map((row) => [row.lag, row]));
  return Array.from({ length: top + 1 }, (_, lag) => byLag.get(lag) || { lag, tokens: 0 });
}

const update = (data) => grid(
  curve(data, { title: "Entropy", note: "nats per token", keys: [["entropy", "entropy"]], zero: true }),
  curve(data, { title: "Gradient norm", note: "before clipping", keys: [["grad_norm", "norm"]], zero: true, refs: known(data.max_grad_norm) ? [{ y: data.max_grad_norm, name: "clipped at" }] : [] }),
  curve(data, { title: "Loss", note: "its value says little in policy gradient", keys: [["loss", "loss"]] }),
  // A constant rate needs no plot.
  new Set((data.series.columns.lr || []).filter(known)).size > 1 ? curve(data, { title: "Learning rate", keys: [["lr", "lr"]], zero: true }) : null);

function completions(data) {
  const groups = data.counts.groups;
  return [
    groups > 0 && el("p.lead", {}, `${plural(groups, "group")} of ${plural(data.counts.completions, "completion")} in all; in ${count(data.counts.zero_variance)} (${percent(data.counts.zero_variance / groups, 1)}) all rewards are equal.`),
    grid(
      curve(data, { title: "Completion length", note: "tokens, mean of the batch", keys: [["completion/length_mean", "mean"]], zero: true }),
      curve(data, { title: "Truncated completions", note: "cut at data.max_tokens", keys: [["completion/truncated_fraction", "share"]], zero: true, format: (x) => percent(x, 1) }),
      curve(data, { title: "Groups without signal", note: "all rewards equal, per step", keys: [["groups/zero_variance", "equal"], ["groups/all_right", "all right"], ["groups/all_wrong", "all wrong"]], zero: true })),
  ];
}

function ledger(data) {
  const l = data.ledger;
  const broken = data.ledger_broken;
  const outcomes = Object.entries(data.counts.outcomes).map(([outcome, n]) => ({ outcome, n, tokens: data.counts.outcome_tokens[outcome] || 0 }));
  return [
    l && el("div.card.wide", { id: "ledger-bar" }, el("h3", {}, `${count(l.generated)} generated tokens`),
      shareBar({ parts: ACCOUNTS.map(([key, name, c]) => ({ name, value: l[key], color: c })), format: count, label: "Token ledger", total: Math.max(l.generated, l.generated - l.missing) }),
      l.missing === 0 && !broken && data.ledger_lines
        ? el("p.note", {}, `The accounts add up: ${ACCOUNTS.map(([key]) => count(l[key])).join(" + ")} = ${count(l.generated)}, and so they do in all ${plural(data.ledger_lines, "line")} of metrics.jsonl.`)
        : el("p", {}, el("span.flag.bad", {}, "does not add up"), l.missing !== 0 ? ` ${count(Math.abs(l.missing))} tokens ${l.missing > 0 ? "are in no account" : "are in an account but were never generated"} after the last step;` : "",
          ` ${count(broken)} of ${plural(data.ledger_lines, "line")} of metrics.jsonl are wrong.`)),
    outcomes.length > 0 && table({ label: "Completions by outcome", rows: outcomes, sort: { column: 2, down: true }, columns: [
      { name: "outcome of the completion (rollouts.jsonl)", value: (row) => row.outcome },
      { name: "completions", num: true, value: (row) => row.n, cell: (row) => count(row.n) },
      { name: "tokens", num: true, value: (row) => row.tokens, cell: (row) => count(row.tokens) },
    ] }).box,
    !l && !outcomes.length && el("p.muted", {}, "Nothing recorded."),
  ];
}

function rolloutsSection(data) {
  if (!data.counts.completions) return el("p.muted", {}, "No rollouts recorded.");
  const all = data.rollout_rows === data.counts.completions;
  return [
    el("p.lead", { id: "sampled" }, all ? `All ${plural(data.counts.completions, "completion")}.`
      : `A sample: ${count(data.rollout_rows)} of ${plural(data.counts.completions, "completion")} (whole groups, chosen at random, and the groups of the best, worst, longest and strangest of all). Counts elsewhere on the page are over all of them; rollouts.jsonl has every one.`,
      " Choose a row to read its group side by side."),
    rolloutsExplorer(data.groups),
  ];
}

function settings(data) {
  const keys = Object.keys(data.series.columns).filter((key) => key !== "step");
  const any = keys.length && el("div.card.wide", {});
  if (any) {
    const start = keys.includes("reward/mean") ? "reward/mean" : keys[0];
    const made = chart({ title: "Any metric", lines: [line(data, start, start, "var(--c0)", "step")] });
    let key = start, axis = "step";
    const change = (more) => { if (more.axis) axis = more.axis; made.update({ ...more, lines: [line(data, key, key, "var(--c0)", axis)] }); };
    curves.push(change);
    any.append(el("div.controls", {}, el("label", {}, "metric", el("select", { id: "any-metric", onchange: (event) => { key = event.target.value; change({}); } },
      keys.map((name) => el("option", { value: name, selected: name === start ? "" : null }, name))))), made.box);
  }
  const facts = (label, pairs) => pairs.length > 0 && [el("h3", {}, label), scroller(label, el("table.facts-table", {}, el("tbody", {}, pairs.map(([key, value]) => el("tr", {}, el("td", {}, prose(key)), el("td.mono", {}, prose(value)))))))];
  return [any, el("div.grid", {}, el("div", {}, facts("Environment", data.environment)), el("div", {}, facts("Config groups", data.choices))),
    data.config && el("details", {}, el("summary", {}, "Composed config"), el("pre.card.mono", { tabindex: 0 }, prose(data.config)))];
}
