// The page of one run. `data` is made by grpo/report/run.py.
"use strict";

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
    ["settings", "Details", settings(data)],
  ];
  frame(page, head(data), sections, data, [
    segments(
      "Horizontal axis",
      [
        ["step", "step"],
        ["seconds", "wall-clock"],
      ],
      "step",
      (axis) => redrawCurves({ axis }),
    ),
    el(
      "label.check",
      {},
      el("input", { type: "checkbox", onchange: (event) => redrawCurves({ smooth: event.target.checked }) }),
      "smooth",
    ),
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
  return {
    name,
    color: c,
    x: axis === "step" ? columns.step : columns["time/elapsed_s"] || [],
    y: columns[key],
    lo: lo[key],
    hi: hi[key],
  };
}

function redrawCurves(change) {
  for (const each of curves) each(change);
}

function head(data) {
  const { status } = data;
  const kind = { finished: "good", failed: "bad", interrupted: "warn", running: "warn" }[status.state] || "warn";
  const meta = [
    known(status.steps) ? `${count(status.step)} of ${count(status.steps)} steps` : plural(data.series.lines, "step"),
    known(data.seconds) && duration(data.seconds),
    status.started && `started ${status.started}`,
    status.git && `revision ${status.git}`,
  ]
    .filter(Boolean)
    .join(" · ");
  return [
    el("div.title", {}, el("h1", {}, prose(data.name)), el(`span.state.${kind}`, {}, status.state)),
    el("p.meta", {}, meta),
    status.command && el("div.command", {}, el("pre.mono", { tabindex: 0 }, prose(status.command))),
    el(
      "div.chips",
      { "aria-label": "Overrides against the defaults" },
      data.overrides.length
        ? data.overrides.map(([key, value]) => el("span.chip.mono", {}, prose(`${key}=${value}`)))
        : el("span.muted", {}, "no overrides: the defaults"),
    ),
    status.error &&
      el(
        "div.card.error",
        { id: "error" },
        el("h3", { tabindex: 0 }, prose(`${status.error.type}: ${status.error.message}`)),
        status.error.traceback &&
          el(
            "details",
            { open: "" },
            el("summary", {}, "traceback"),
            el("pre.mono", { tabindex: 0 }, prose(status.error.traceback)),
          ),
      ),
  ];
}

function tiles(data) {
  const { before, after } = data.headline;
  const tile = (id, name, big, sub, extra) =>
    el("div.card.tile", { id }, el("div.name", {}, name), el("div.big", {}, big), el("div.sub", {}, sub), extra);
  const evaluation = after || before;
  const range = (e) => (known(e.low) ? ` (${interval(e.low, e.high)})` : "");
  const l = data.ledger;
  return el(
    "div.tiles",
    {},
    tile(
      "tile-eval",
      evaluation ? `evaluation ${evaluation.name}` : "evaluation",
      before && after ? `${fixed(before.value)} → ${fixed(after.value)}` : evaluation ? fixed(evaluation.value) : "–",
      before && after
        ? `step ${count(before.step)}${range(before)} → step ${count(after.step)}${range(after)}${known(after.n) ? `, n = ${count(after.n)}` : ""}; brackets: 95 %`
        : evaluation
          ? `step ${count(evaluation.step)}${range(evaluation)}, one evaluation only`
          : "no evaluation recorded",
    ),
    tile(
      "tile-speed",
      "generated tokens per second",
      fmt(data.headline.tokens_per_s),
      l
        ? `${count(l.generated)} tokens over ${duration(data.headline.working_s)} of waiting, training and sync`
        : "not recorded",
    ),
    tile(
      "tile-trained",
      "of the generated tokens trained, after the last step",
      l?.generated ? percent(l.trained / l.generated, 1) : "–",
      l
        ? `${count(l.trained)} trained, ${count(l.masked)} masked, ${count(l.discarded)} discarded, ${count(l.in_flight)} in flight`
        : "not recorded",
    ),
  );
}

function findingsBox(data) {
  const items = [
    ...data.notes
      .filter((note) => note.level !== "note")
      .map((note) => el(`li.${note.level}-level`, {}, el("b", {}, "data"), prose(note.text))),
    ...data.findings.map((found) =>
      el(
        `li.${found.level}-level`,
        {},
        el("b", {}, found.number),
        prose(found.text),
        el(
          "div.knobs",
          {},
          el("a", { href: `#${found.plot}` }, "see the plot"),
          found.knobs.length ? "turn:" : "",
          found.knobs.map((knob) => el("code.chip", {}, knob)),
        ),
      ),
    ),
    ...data.notes
      .filter((note) => note.level === "note")
      .map((note) => el("li.note-level", {}, el("b", {}, "data"), prose(note.text))),
  ];
  return el(
    "div.card",
    { id: "warnings" },
    el("h3", {}, "What stands out"),
    items.length
      ? el("ul.findings", {}, items)
      : el(
          "p.muted",
          {},
          data.series.lines
            ? `Nothing, by the ${data.rules} rules that this page knows.`
            : "No step is recorded yet: there is nothing to judge.",
        ),
  );
}

const grid = (...cards) => {
  const there = cards.flat().filter(Boolean);
  return there.length ? el("div.grid", {}, there) : el("p.muted", {}, "Nothing recorded.");
};
