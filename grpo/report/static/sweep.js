// The page of a sweep. `data` is made by grpo/report/sweep.py.
"use strict";

const QUANTITIES = [
  ["result", "result", (arm) => arm.result?.mean, fixed, 1],
  ["seconds", "training time", (arm) => arm.seconds?.mean, duration, -1],
  ["tokens_per_s", "tokens/s", (arm) => arm.tokens_per_s, fmt, 1],
  ["trained_share", "trained share", (arm) => arm.trained_share, (x) => percent(x, 1), 1],
  ["idle_trainer", "trainer idle", (arm) => arm.idle_trainer, percent, -1],
  ["idle_sampler", "sampler idle", (arm) => arm.idle_sampler, percent, -1],
  ["lag_mean", "mean lag", (arm) => arm.lag_mean, fmt, -1],
  ["ess", "ESS", (arm) => arm.ess, fmt, 1],
];

function sweepPage(data) {
  const short = shortNames(data.knobs);
  data.short = short;
  data.arms.forEach((arm, i) => {
    arm.index = i;
    arm.label = data.knobs.map((knob) => `${short[knob]}=${arm.values[knob]}`).join(" ") || "all jobs";
  });
  frame(
    document.getElementById("page"),
    sweepHead(data),
    [
      ["overview", "Overview", [sweepTiles(data), notesBox(data)]],
      ["arms", "Arms", armsSection(data)],
      ["differences", "Differences", differencesSection(data)],
      ...(data.knobs.length > 1 ? [["map", "Map", mapSection(data)]] : []),
      ["curves", "Curves", curvesSection(data)],
      ["tradeoff", "Trade-off", tradeoffSection(data)],
      ["jobs", "Jobs", jobsSection(data)],
    ],
    data,
    [],
  );
}

function sweepHead(data) {
  return [
    el("div.title", {}, el("h1", {}, prose(data.name)), el("span.state.plain", {}, "sweep")),
    el(
      "p.meta",
      {},
      data.knobs.length
        ? ["Varied: ", data.knobs.map((knob, i) => [i ? ", " : "", el("code", {}, knob)])]
        : "No setting was varied but the seed.",
    ),
    data.command && el("div.command", {}, el("pre.mono", { tabindex: 0 }, prose(data.command))),
    data.shared.length > 0 &&
      el(
        "div.chips",
        { "aria-label": "Overrides of all jobs" },
        data.shared.map(([key, value]) => el("span.chip.mono", {}, prose(`${key}=${value}`))),
      ),
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
  const tile = (id, name, big, sub) =>
    el("div.card.tile", { id }, el("div.name", {}, name), el("div.big", {}, big), el("div.sub", {}, sub));
  const finished = data.jobs.filter((job) => job.state === "finished").length;
  const best = known(data.best) ? data.arms[data.best] : null;
  const rivals = best ? data.arms.filter((arm) => arm !== best && arm.result) : [];
  const tied = rivals.filter((arm) => !difference(data, best.index, arm.index)?.separated);
  const seconds = data.jobs.reduce((sum, job) => sum + (job.wall_clock || 0), 0);
  return el(
    "div.tiles",
    {},
    tile(
      "tile-best",
      `best arm by ${data.result}`,
      best ? fixed(best.result.mean) : "–",
      best
        ? [
            el("code", {}, best.label),
            known(best.result.low) ? `, 95 % ${interval(best.result.low, best.result.high)}` : "",
            `, n = ${best.result.n}`,
          ]
        : "no finished job with a result",
    ),
    tile(
      "tile-tied",
      "arms that the seeds cannot separate from it",
      best ? `${tied.length} of ${rivals.length}` : "–",
      !best
        ? ""
        : !rivals.length
          ? "there is no other arm"
          : tied.length
            ? "their paired 95 % interval contains zero, or there is none: calling the best one better than these is not supported"
            : "every other arm is lower by more than its paired 95 % interval",
    ),
    tile(
      "tile-jobs",
      "jobs finished",
      `${finished} of ${data.jobs.length}`,
      `${duration(seconds)} of wall-clock in all, set-up included`,
    ),
  );
}

function notesBox(data) {
  return el(
    "div.card",
    { id: "warnings" },
    el("h3", {}, "What stands out"),
    data.notes.length
      ? el(
          "ul.findings",
          {},
          data.notes.map((note) => el(`li.${note.level}-level`, {}, prose(note.text))),
        )
      : el("p.muted", {}, "Nothing: every job finished, every arm moved and had data, all from one revision."),
  );
}

// ---- arms: seeds aggregated ----
function armsSection(data) {
  const jobsOf = (arm) => data.jobs.filter((job) => job.arm === arm.index && job.state === "finished");
  const results = data.jobs.map((job) => job.after?.value);
  const bounds = extent([...results, ...data.arms.flatMap((arm) => [arm.result?.mean])]);
  const columns = [
    ...data.knobs.map((knob) => ({ name: data.short[knob], title: knob, value: (arm) => arm.values[knob] })),
    {
      name: "mean",
      num: true,
      value: (arm) => arm.result?.mean,
      cell: (arm) => el("b", { "data-value": arm.result?.mean }, fixed(arm.result?.mean)),
    },
    {
      name: "95 % interval",
      value: (arm) => arm.result?.low,
      cell: (arm) =>
        arm.result ? (known(arm.result.low) ? interval(arm.result.low, arm.result.high) : "one seed: none") : "–",
    },
    {
      name: "n",
      num: true,
      value: (arm) => arm.result?.n,
      cell: (arm) => [
        String(arm.result?.n ?? 0),
        " ",
        arm.missing ? el("span.flag.warn", {}, `${arm.missing} missing`) : "",
      ],
    },
    { name: "mean, interval and seeds", cell: (arm) => forest(arm, jobsOf(arm), bounds) },
    ...QUANTITIES.slice(1)
      .filter(([, , of]) => data.arms.some((arm) => known(of(arm))))
      .map(([, name, of, text]) => ({ name, num: true, value: of, cell: (arm) => text(of(arm)) })),
    {
      name: "flags",
      value: (arm) => arm.flags.join(", "),
      cell: (arm) => [
        arm.flags.map((flag) => el("span.flag.bad", {}, flag)),
        arm.front ? el("span.flag.good", {}, "Pareto front") : "",
      ],
    },
  ];
  return [
    el(
      "p.lead",
      {},
      `Mean over the seeds of each arm: ${data.result}. Intervals are Student's t over seeds; they say how much a new seed may differ, not how exact one evaluation is.`,
    ),
    table({ label: "Arms", rows: data.arms, columns }).box,
  ];
}

function forest(arm, jobs, [low, high]) {
  if (!arm.result) return "–";
  const pad = (high - low) * 0.15 || 0.05,
    width = 190;
  const px = (x) => 4 + Math.max(0, Math.min(1, (x - low + pad) / (high - low + 2 * pad))) * (width - 8);
  const svg = el("svg", {
    viewBox: `0 0 ${width} 20`,
    width,
    height: 20,
    role: "img",
    "aria-label": `${fixed(arm.result.mean)} ${interval(arm.result.low, arm.result.high)}`,
  });
  svg.style.width = `${width}px`;
  if (known(arm.result.low))
    svg.append(el("line.whisker", { x1: px(arm.result.low), x2: px(arm.result.high), y1: 10, y2: 10, c: "var(--c0)" }));
  for (const job of jobs)
    if (known(job.after?.value))
      svg.append(el("circle", { cx: px(job.after.value), cy: 10, r: 2, fill: "currentColor", opacity: 0.45 }));
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
  const list = table({
    label: "Differences",
    rows: others(base),
    columns: [
      { name: "arm", value: (arm) => arm.name, cell: (arm) => el("code", {}, arm.label) },
      {
        name: "difference",
        num: true,
        value: (arm) => difference(data, base, arm.index)?.mean,
        cell: (arm) => {
          const d = difference(data, base, arm.index);
          return d ? el("b", { "data-value": d.mean }, (d.mean > 0 ? "+" : "") + fixed(d.mean)) : "–";
        },
      },
      {
        name: "95 % interval",
        cell: (arm) => {
          const d = difference(data, base, arm.index);
          return d ? interval(d.low, d.high) || "–" : "–";
        },
      },
      {
        name: "pairs",
        num: true,
        value: (arm) => difference(data, base, arm.index)?.n,
        cell: (arm) => String(difference(data, base, arm.index)?.n ?? 0),
      },
      {
        name: "what the seeds say",
        value: (arm) => verdict(difference(data, base, arm.index))[0],
        cell: (arm) => {
          const [text, kind] = verdict(difference(data, base, arm.index));
          return el(`span.flag.${kind}`, {}, text);
        },
      },
    ],
  });
  const choose = el(
    "select",
    {
      id: "baseline",
      disabled: partial ? "" : null,
      onchange: (event) => {
        base = Number(event.target.value);
        list.show(others(base));
      },
    },
    armsIn.map((arm) => el("option", { value: arm.index, selected: arm.index === start ? "" : null }, arm.label)),
  );
  const n = armsIn.length - 1;
  return [
    el(
      "p.lead",
      {},
      `Each arm minus the chosen one, paired by seed, ${data.result}. Intervals are not corrected for looking at ${plural(n, "arm")}: ${n > 1 ? `of ${n} arms that do not differ, about ${fmt(n * 0.05, 2)} would look different by chance` : "one in twenty such intervals misses"}.`,
    ),
    el(
      "div.controls",
      {},
      el(
        "label",
        {},
        partial ? "compared with the best arm only (too many arms for all pairs)" : "compared with",
        choose,
      ),
    ),
    list.box,
  ];
}
