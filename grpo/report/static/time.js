// Where the time of a run went: shares, and a timeline that shows generation beside training.
"use strict";

const PARTS = [
  ["wait_rollouts", "waiting for rollouts", "var(--wait)"],
  ["train", "training", "var(--train)"],
  ["sync", "weight sync", "var(--sync)"],
  ["other", "other", "var(--other)"],
];
// Parts of the whole run have the colours of the steps' parts, all others (server start, evaluation, ...) those left over.
const REST = [3, 4, 5, 7, 2, 6];
const WHOLE = { wait_rollouts: "var(--wait)", train: "var(--train)", sync: "var(--sync)", other: "var(--other)" };

function timeSection(data) {
  const seconds = Object.values(data.time).reduce((sum, x) => sum + x, 0);
  const parts = PARTS.map(([key, name, c]) => ({ name, value: data.time[key] || 0, color: c }));
  const idle = Object.entries(data.idle)
    .map(([who, share]) => `; ${who} idle ${percent(share)}`)
    .join("");
  const overlap =
    data.overlap_s > 0 && data.time.train > 0
      ? `; generation went on during at least ${percent(data.overlap_s / data.time.train)} of the training time`
      : "";
  const whole = Object.entries(data.whole_time);
  const rest = whole.map(([key]) => key).filter((key) => !WHOLE[key]);
  const sum = whole.reduce((total, [, value]) => total + value, 0);
  return [
    sum > 0 &&
      el(
        "div.card.wide",
        {},
        el("h3", {}, `The whole run: ${duration(sum)}`),
        shareBar({
          parts: whole.map(([key, value]) => ({
            name: PARTS.find(([part]) => part === key)?.[1] || key.replaceAll("_", " "),
            value,
            color: WHOLE[key] || color(REST[rest.indexOf(key) % REST.length]),
          })),
          format: duration,
          label: "Time of the run",
        }),
      ),
    seconds > 0 &&
      el(
        "div.card.wide",
        {},
        el("h3", {}, `The steps: ${duration(seconds)}`),
        el("p.note", {}, `What the trainer did${idle}${overlap}.`),
        shareBar({ parts, format: duration, label: "Time of the trainer" }),
      ),
    timeline(data.timeline),
    grid(
      curve(data, {
        title: "Seconds per step",
        keys: PARTS.slice(0, 3).map(([key, name, c]) => [`time/${key}_s`, name, c]),
        stacked: true,
        format: duration,
      }),
      curve(data, {
        title: "Throughput",
        note: "tokens per second",
        keys: [
          ["throughput/generated_tokens_per_s", "generated"],
          ["throughput/trained_tokens_per_s", "trained"],
        ],
        zero: true,
      }),
      curve(data, {
        title: "Open requests",
        note: "mean over the step, all servers",
        keys: [["sampler/open_requests_mean", "open"]],
        zero: true,
      }),
    ),
  ];
}

// 47.3 s, 47:03, 1:47:03: also late in a long run neighbouring marks differ.
function clock(s, digits) {
  if (s < 100) return `${s.toFixed(digits)} s`;
  const minutes = Math.floor(s / 60);
  const two = (x, after = 0) => x.toFixed(after).padStart(after ? 3 + after : 2, "0");
  const rest = two(s - 60 * minutes, digits);
  return minutes < 60 ? `${minutes}:${rest}` : `${Math.floor(minutes / 60)}:${two(minutes % 60)}:${rest}`;
}

// Two lanes over the wall-clock: what the trainer did, and how much was generated meanwhile.
function timeline(rows) {
  const byRequests = rows.some((row) => known(row[6]));
  const spans = rows
    .map(([step, end, length, wait, train, sync, open, generated], i) => {
      if (!known(end) || !known(length) || !known(step)) return null;
      const before = i ? rows[i - 1][7] : null;
      const rate = known(generated) && known(before) && length > 0 ? Math.max(0, generated - before) / length : null;
      return {
        step,
        start: end - length,
        end,
        parts: [wait || 0, train || 0, sync || 0],
        level: byRequests ? open : rate,
      };
    })
    .filter(Boolean);
  if (spans.length < 2) return null;
  const unit = byRequests ? "open requests" : "tokens/s generated";
  const most = Math.max(...spans.map((span) => span.level || 0)) || 1;
  let width = Math.min(20, spans.length),
    first = Math.max(0, Math.floor((spans.length - width) / 2));
  const svg = el("svg", { height: 104, role: "img" });
  const slider = el("input", {
    type: "range",
    min: 0,
    max: spans.length - width,
    value: first,
    "aria-label": "First step of the timeline",
    oninput: () => {
      first = Number(slider.value);
      draw();
    },
  });
  const widths = [
    [5, "5"],
    [20, "20"],
    [60, "60"],
    [200, "200"],
  ].filter(([n], i, all) => !i || n < spans.length || all[i - 1][0] < spans.length);
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
    const full = svg.clientWidth || 700,
      left = 78,
      t0 = view[0].start,
      t1 = view.at(-1).end;
    const px = (t) => left + ((t - t0) / (t1 - t0)) * (full - left - 8);
    svg.setAttribute("viewBox", `0 0 ${full} 104`);
    svg.replaceChildren(
      el("text", { x: 0, y: 24 }, "trainer"),
      el("text", { x: 0, y: 62 }, "generation"),
      el("line.axis", { x1: left, x2: full - 8, y1: 80, y2: 80 }),
    );
    const label = view.map(
      (span) =>
        `step ${span.step}: ${PARTS.slice(0, 3)
          .map(([, name], i) => `${name} ${duration(span.parts[i])}`)
          .join(", ")}${known(span.level) ? `, ${fmt(span.level)} ${unit}` : ""}`,
    );
    view.forEach((span, k) => {
      let t = span.start;
      const box = (y, height, from, to, c, opacity) =>
        el(
          "rect.bar",
          { x: px(from), y, width: Math.max(0.5, px(to) - px(from) - 0.4), height, c, opacity },
          el("title", {}, label[k]),
        );
      svg.append(box(8, 26, span.start, span.end, "var(--other)"));
      span.parts.forEach((part, i) => {
        svg.append(box(8, 26, t, Math.min(span.end, t + part), PARTS[i][2]));
        t += part;
      });
      if (known(span.level)) {
        const h = 26 * (span.level / most);
        svg.append(box(44 + 26 - h, h, span.start, span.end, "var(--generate)"));
      }
    });
    const marks = ticks(t0, t1, Math.max(2, full / 140));
    const digits = marks.length > 1 && marks[1] - marks[0] < 1 ? 1 : 0;
    for (const mark of marks)
      svg.append(el("text", { x: px(mark), y: 97, "text-anchor": "middle" }, clock(mark, digits)));
    svg.setAttribute("aria-label", `Timeline. ${label.slice(0, 5).join("; ")}`);
    where.textContent = `steps ${view[0].step} to ${view.at(-1).step}`;
  }
  charts.push({ box: svg, draw, cursor() {}, axis: null });
  return el(
    "div.card.wide",
    { id: "timeline" },
    el("h3", {}, "Timeline"),
    el(
      "p.note",
      {},
      `Above: what the trainer did; a gap is an evaluation or a checkpoint. Below: ${unit}, mean of the step (full height: ${fmt(most)}). Green under blue is generation while the trainer trains.`,
    ),
    el(
      "div.legend",
      {},
      PARTS.slice(0, 3).map(([, name, c]) => swatch(c, name)),
      swatch("var(--generate)", "generation"),
    ),
    svg,
    el("div.controls", {}, el("label", {}, "scroll", slider), el("label", {}, "steps in view", zoom), where),
  );
}
