// The sections of a sweep's page that draw: map of two knobs, curves by arm, trade-off; and the table of jobs.
"use strict";

const MAX_LINES = 10; // in one panel of curves

// ---- two knobs ----
function mapSection(data) {
  let [rowKnob, columnKnob] = data.knobs;
  let chosen = QUANTITIES[0];
  const place = el("div", {});
  const distinct = (knob) =>
    [...new Set(data.arms.map((arm) => arm.values[knob]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  function draw() {
    const [, , of, text, better] = chosen;
    place.replaceChildren(
      heatMap({
        rows: distinct(rowKnob),
        columns: distinct(columnKnob),
        rowName: rowKnob,
        columnName: columnKnob,
        better,
        cell: (r, c) => {
          const arms = data.arms.filter((arm) => arm.values[rowKnob] === r && arm.values[columnKnob] === c);
          const values = arms.map(of).filter(known);
          if (!values.length)
            return arms.length ? { value: null, text: arms.flatMap((arm) => arm.flags).join(", ") || "–" } : null;
          const mean = values.reduce((sum, x) => sum + x, 0) / values.length;
          const seeds = arms.reduce((sum, arm) => sum + (arm.result?.n || 0), 0);
          return {
            value: mean,
            text: text(mean),
            title: `${plural(seeds, "job")}${arms.length > 1 ? `, mean of ${arms.length} arms` : ""}`,
          };
        },
      }),
    );
  }
  const pick = (name, options, start, onpick) =>
    el(
      "label",
      {},
      name,
      el(
        "select",
        {
          onchange: (event) => {
            onpick(event.target.value);
            draw();
          },
        },
        options.map(([value, text]) => el("option", { value, selected: value === start ? "" : null }, text)),
      ),
    );
  const knobs = data.knobs.map((knob) => [knob, knob]);
  draw();
  return [
    el(
      "p.lead",
      {},
      `The stronger the colour the better. Each cell is the mean of its arm${data.knobs.length > 2 ? "s, over the other knobs" : ""}; neighbours may differ by chance, see Differences.`,
    ),
    el(
      "div.controls",
      {},
      pick("rows", knobs, rowKnob, (value) => {
        rowKnob = value;
      }),
      pick("columns", knobs, columnKnob, (value) => {
        columnKnob = value;
      }),
      pick(
        "shown",
        QUANTITIES.filter(([, , of]) => data.arms.some((arm) => known(of(arm)))).map(([key, name]) => [key, name]),
        "result",
        (value) => {
          chosen = QUANTITIES.find(([key]) => key === value);
        },
      ),
    ),
    el("div.card", { id: "heat" }, place),
  ];
}

// ---- curves by arm ----
function curvesSection(data) {
  const keys = Object.keys(data.curves);
  if (!keys.length) return el("p.muted", {}, "No finished job recorded a curve.");
  let key = keys[0],
    axis = "step";
  // Panels by the knob with the fewest values, colours by the rest.
  const values = (knob) => [...new Set(data.arms.map((arm) => arm.values[knob]))];
  const panelKnob =
    data.knobs.length > 1 ? data.knobs.reduce((a, b) => (values(b).length < values(a).length ? b : a)) : null;
  const place = el("div", {});
  const label = (arm) =>
    data.knobs
      .filter((knob) => knob !== panelKnob)
      .map((knob) => `${data.short[knob]}=${arm.values[knob]}`)
      .join(" ") || "all jobs";
  const labels = [...new Set(data.arms.map(label))];
  function draw() {
    for (let i = charts.length - 1; i >= 0; i--) if (place.contains(charts[i].box)) charts.splice(i, 1);
    const { title } = data.curves[key];
    const everything = [];
    const panels = (panelKnob ? values(panelKnob).sort((a, b) => a.localeCompare(b, "en", { numeric: true })) : [null])
      .map((value) => {
        const inPanel = data.arms
          .filter((arm) => value === null || arm.values[panelKnob] === value)
          .filter((arm) => data.curves[key][axis][arm.index]);
        const shown =
          inPanel.length > MAX_LINES
            ? [...inPanel]
                .sort((a, b) => (b.result?.mean ?? -Infinity) - (a.result?.mean ?? -Infinity))
                .slice(0, MAX_LINES)
            : inPanel;
        const lines = shown.map((arm) => {
          const { x, y, lo, hi } = data.curves[key][axis][arm.index];
          everything.push(...y);
          return { name: label(arm), color: color(labels.indexOf(label(arm))), x, y, lo, hi, dots: x.length <= 12 };
        });
        return {
          title: value === null ? title : `${panelKnob}=${value}`,
          note: shown.length < inPanel.length ? `the ${shown.length} best of ${inPanel.length} arms` : null,
          lines,
        };
      })
      .filter((panel) => panel.lines.length);
    const [low, high] = extent(everything),
      pad = (high - low) * 0.06 || 0.05;
    // One scale for all panels, so that they can be compared.
    const made = panels.map((panel) =>
      chart({
        ...panel,
        axis,
        range: panels.length > 1 ? [low - pad, high + pad] : null,
        height: panels.length > 1 ? 210 : 300,
      }),
    );
    place.replaceChildren(
      made.length
        ? el(
            made.length > 1 ? "div.grid" : "div",
            {},
            made.map((each) => each.box),
          )
        : el("p.muted", {}, "No data over this axis."),
    );
    for (const each of made) if (each.box.isConnected) each.draw();
  }
  draw();
  return [
    el(
      "p.lead",
      {},
      "Mean over the finished seeds of each arm, over the range that all of them reached; the band goes from the lowest to the highest seed. The clock starts with the first step, so that a server that was already there gives no job an advantage.",
    ),
    el(
      "div.controls",
      {},
      el(
        "label",
        {},
        "quantity",
        el(
          "select",
          {
            id: "curve-key",
            onchange: (event) => {
              key = event.target.value;
              draw();
            },
          },
          keys.map((name) => el("option", { value: name }, data.curves[name].title)),
        ),
      ),
      el(
        "label",
        {},
        "over",
        segments(
          "Horizontal axis",
          [
            ["step", "step"],
            ["seconds", "wall-clock"],
          ],
          axis,
          (value) => {
            axis = value;
            draw();
          },
        ),
      ),
    ),
    place,
  ];
}

function tradeoffSection(data) {
  const arms = data.arms.filter((arm) => arm.result && arm.seconds);
  if (!arms.length) return el("p.muted", {}, "No finished job has both a result and a clock.");
  const points = [
    ...data.jobs
      .filter((job) => job.state === "finished" && known(job.after?.value) && known(job.seconds))
      .map((job) => ({ x: job.seconds, y: job.after.value, color: armColor(data.arms[job.arm]), faint: true })),
    ...arms.map((arm) => ({
      x: arm.seconds.mean,
      y: arm.result.mean,
      color: armColor(arm),
      name: arm.label,
      front: arm.front,
    })),
  ];
  return scatter({
    title: "Result against training time",
    note: "large: means of arms, the largest those of the Pareto front (no other arm is as fast and as good); small: single jobs",
    points,
    xFormat: axisText.seconds,
    yFormat: fmt,
    xName: "training time",
    yName: data.result,
  });
}

function jobsSection(data) {
  const counter = el("span.muted", { role: "status" });
  const text = (job) =>
    `${job.path} ${job.state} ${Object.entries(job.overrides)
      .map(([key, value]) => `${key}=${value}`)
      .join(" ")} ${job.error || ""} ${job.flags.join(" ")}`.toLowerCase();
  const list = table({
    label: "Jobs",
    rows: data.jobs,
    columns: [
      {
        name: "job",
        value: (job) => job.path,
        cell: (job) => (job.href ? el("a", { href: job.href }, prose(job.path)) : prose(job.path)),
      },
      {
        name: "state",
        value: (job) => job.state,
        cell: (job) => el(`span.flag.${{ finished: "good", failed: "bad" }[job.state] || "warn"}`, {}, job.state),
      },
      {
        name: "remarks",
        value: (job) => job.error || job.flags.join(),
        cell: (job) => [
          job.flags.map((flag) => el("span.flag.bad", {}, flag)),
          job.damage.map((line) => el("span.flag.bad", {}, prose(line))),
          job.error && el("span.excerpt.mono", {}, prose(job.error)),
        ],
      },
      ...data.knobs.map((knob) => ({
        name: data.short[knob],
        title: knob,
        value: (job) => data.arms[job.arm].values[knob],
      })),
      { name: "seed", value: (job) => job.seed },
      { name: "before", num: true, value: (job) => job.before?.value, cell: (job) => fixed(job.before?.value) },
      {
        name: "after",
        num: true,
        value: (job) => job.after?.value,
        title: "the last evaluation; of an unfinished job, with its step",
        cell: (job) =>
          job.state === "finished"
            ? [
                el("b", {}, fixed(job.after?.value)),
                known(job.after?.low) ? ` (${interval(job.after.low, job.after.high)})` : "",
              ]
            : el(
                "span.muted",
                {},
                known(job.after?.value) ? `${fixed(job.after.value)} at step ${job.after.step ?? "–"}` : "–",
              ),
      },
      { name: "steps", num: true, value: (job) => job.step, cell: (job) => `${count(job.step)} / ${count(job.steps)}` },
      {
        name: "training",
        num: true,
        value: (job) => job.seconds,
        cell: (job) => duration(job.seconds),
        title: "from the first step on",
      },
      {
        name: "wall-clock",
        num: true,
        value: (job) => job.wall_clock,
        cell: (job) => duration(job.wall_clock),
        title: "set-up included",
      },
      { name: "tokens", num: true, value: (job) => job.tokens, cell: (job) => count(job.tokens) },
      { name: "trainer idle", num: true, value: (job) => job.idle_trainer, cell: (job) => percent(job.idle_trainer) },
      { name: "sampler idle", num: true, value: (job) => job.idle_sampler, cell: (job) => percent(job.idle_sampler) },
    ],
  });
  const filter = (needle) => {
    const found = data.jobs.filter((job) => text(job).includes(needle.toLowerCase()));
    counter.textContent = `${count(found.length)} of ${plural(data.jobs.length, "job")}`;
    list.show(found);
  };
  filter("");
  return [
    el(
      "div.controls",
      {},
      el(
        "label",
        {},
        "search jobs",
        el("input", { type: "search", id: "job-search", oninput: (event) => filter(event.target.value) }),
      ),
      counter,
    ),
    list.box,
  ];
}
