// Curves and stacked areas. Every chart reads out the values at the cursor in its legend; cursors of charts that share
// an x axis move together, by pointer or by the arrow keys.
"use strict";

const MARGIN = { left: 50, right: 10, top: 8, bottom: 22 };
const charts = []; // all on the page, to redraw on resize and to move cursors together

function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.999) * power;
  const list = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    list.push(Number((i * step).toPrecision(12)));
  return list;
}

const logTicks = (low, high) => {
  const first = Math.floor(Math.log10(low)),
    last = Math.ceil(Math.log10(high));
  const every = Math.ceil((last - first) / 4) || 1;
  return Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, i) => 10 ** (first + i * every));
};

function extent(values) {
  let low = Infinity,
    high = -Infinity;
  for (const v of values)
    if (known(v)) {
      if (v < low) low = v;
      if (v > high) high = v;
    }
  return [low, high];
}

// Index of the point nearest to x in an increasing list (unknown entries skipped).
function nearest(xs, x) {
  let best = -1;
  for (let i = 0; i < xs.length; i++)
    if (known(xs[i]) && (best < 0 || Math.abs(xs[i] - x) < Math.abs(xs[best] - x))) best = i;
  return best;
}

const axisText = {
  step: (x) => count(x),
  seconds: (x) => (x >= 6000 ? `${fmt(x / 3600)} h` : x >= 300 ? `${fmt(x / 60)} min` : `${fmt(x)} s`),
};

// Centred moving average over 4 % of the points: for the eye; read-outs stay those of the data.
function smoothed(ys) {
  const half = Math.max(1, Math.round(ys.length / 50));
  return ys.map((y, i) => {
    if (!known(y)) return null;
    let sum = 0,
      n = 0;
    for (let j = Math.max(0, i - half); j <= Math.min(ys.length - 1, i + half); j++)
      if (known(ys[j])) {
        sum += ys[j];
        n++;
      }
    return sum / n;
  });
}

// lines: [{name, color, x, y, lo, hi, dots}], x increasing, lo and hi the band. axis: "step" or "seconds".
// refs: [{y, name}] horizontal marks. stacked: areas on top of each other. Options may change through `update`.
function chart({
  id,
  title,
  note,
  lines,
  axis = "step",
  refs = [],
  zero = false,
  stacked = false,
  format = fmt,
  height = 190,
  smooth = false,
  range = null,
}) {
  let state = { lines, axis, smooth, range };
  let scale = null;
  let at = null; // x of the cursor
  const legend = el("div.legend", {});
  const readout = el("div.readout", { "aria-live": "polite" });
  const svg = el("svg", { height, "aria-hidden": "true" });
  const plot = el(
    "div.plot",
    {
      tabindex: 0,
      role: "group",
      "aria-label": `${title}: chart. Left and right arrow keys read out values.`,
      onpointermove: (event) => move(invert(event)),
      onpointerdown: (event) => move(invert(event)),
      onpointerleave: () => move(null),
      onblur: () => move(null),
      onkeydown: onkey,
    },
    svg,
  );
  const box = el("div.card.chart", { id }, el("h3", {}, title), note && el("p.note", {}, note), legend, plot, readout);
  const self = {
    box,
    draw,
    cursor,
    get axis() {
      return state.axis;
    },
    update(change) {
      state = { ...state, ...change };
      at = null;
      draw();
    },
  };
  charts.push(self);

  const invert = (event) => {
    if (!scale) return null;
    const box_ = svg.getBoundingClientRect();
    return scale.x0 + ((event.clientX - box_.left - MARGIN.left) / scale.width) * (scale.x1 - scale.x0);
  };

  function onkey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
    if (!step || !scale) return;
    event.preventDefault();
    const xs = longest().x;
    const from = at === null ? (step > 0 ? -1 : xs.length) : nearest(xs, at);
    move(xs[Math.max(0, Math.min(xs.length - 1, from + step))]);
    readout.textContent = legend.textContent;
  }

  const longest = () => state.lines.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  const move = (x) => {
    for (const other of charts) if (other.axis === state.axis && other.box.isConnected) other.cursor(x);
  };

  function cursor(x) {
    at = x;
    svg.querySelector(".cursor")?.remove();
    const here = x !== null && scale && x >= scale.x0 - 1e-9 && x <= scale.x1 + 1e-9;
    const group = el("g.cursor", {});
    legend.replaceChildren(
      here
        ? el(
            "span.key.muted",
            {},
            `${state.axis === "step" ? "step " : ""}${axisText[state.axis](longest().x[nearest(longest().x, x)])}`,
          )
        : null || "",
    );
    let base = 0;
    for (const line of state.lines) {
      const i = here ? nearest(line.x, x) : lastKnown(line.y);
      const y = i < 0 ? null : line.y[i];
      const range_ =
        i >= 0 && line.lo && known(line.lo[i]) && line.lo[i] !== line.hi[i]
          ? ` (${format(line.lo[i])} to ${format(line.hi[i])})`
          : "";
      legend.append(
        swatch(
          line.color,
          line.name,
          el("span.value", { "data-value": y, "data-x": i < 0 ? null : line.x[i] }, format(y)),
          here ? range_ : "",
        ),
      );
      if (here && known(y)) {
        const top = stacked ? (base += y) : y;
        group.append(el("circle.dot", { cx: scale.px(line.x[i]), cy: scale.py(top), r: 3.5, c: line.color }));
      }
    }
    for (const ref of refs) if (known(ref.y)) legend.append(el("span.key.muted", {}, `┄ ${ref.name} ${format(ref.y)}`));
    if (here) {
      group.prepend(el("line.cross", { x1: scale.px(x), x2: scale.px(x), y1: MARGIN.top, y2: height - MARGIN.bottom }));
      svg.append(group);
    }
  }

  const lastKnown = (ys) => {
    for (let i = ys.length - 1; i >= 0; i--) if (known(ys[i])) return i;
    return -1;
  };

  function draw() {
    const full = plot.clientWidth || 340;
    const width = Math.max(60, full - MARGIN.left - MARGIN.right),
      inner = height - MARGIN.top - MARGIN.bottom;
    svg.setAttribute("viewBox", `0 0 ${full} ${height}`);
    svg.replaceChildren();
    scale = null;
    const filled = state.lines.filter((line) => line.y.some(known) && line.x.some(known));
    if (!filled.length) {
      svg.append(el("text", { x: MARGIN.left, y: height / 2 }, "no data"));
      return cursor(null);
    }
    let [x0, x1] = extent(filled.flatMap((line) => extent(line.x)));
    if (x0 === x1) {
      x0 -= 0.5;
      x1 += 0.5;
    }
    const stacks = stacked ? stack(filled) : null;
    let [y0, y1] = stacked
      ? [0, Math.max(...stacks.flatMap((s) => s.top))]
      : extent([
          ...filled.flatMap((line) => [...line.y, ...(line.lo || []), ...(line.hi || [])]),
          ...refs.map((ref) => ref.y),
        ]);
    const positive = extent(filled.flatMap((line) => line.y.filter((y) => y > 0)));
    const log = !stacked && !zero && y0 >= 0 && positive[1] / positive[0] > 1000;
    if (log)
      [y0, y1] = [Math.max(positive[0], positive[1] * 1e-6), positive[1]]; // below six decades a curve lies on the floor
    else {
      if (zero) y0 = Math.min(0, y0);
      if (state.range) [y0, y1] = state.range;
      else if (y0 === y1) {
        y1 += Math.abs(y1) * 0.1 || 1;
        y0 -= zero ? 0 : Math.abs(y0) * 0.1;
      } else {
        const pad = (y1 - y0) * 0.06;
        y1 += pad;
        if (!(y0 >= 0 && y0 < pad * 1.01)) y0 -= y0 === 0 ? 0 : pad;
      }
    }
    const marks = log ? logTicks(y0, y1) : ticks(y0, y1, 4);
    if (log) {
      y0 = Math.min(y0, marks[0]);
      y1 = Math.max(y1, marks.at(-1));
    }
    const f = log ? Math.log10 : (v) => v;
    const px = (x) => MARGIN.left + ((x - x0) / (x1 - x0)) * width;
    const py = (y) => MARGIN.top + (1 - (f(Math.max(y, log ? y0 : y)) - f(y0)) / (f(y1) - f(y0))) * inner;
    scale = { x0, x1, width, px, py };
    for (const mark of marks) {
      svg.append(
        el("line.gridline", { x1: MARGIN.left, x2: full - MARGIN.right, y1: py(mark), y2: py(mark) }),
        el("text", { x: MARGIN.left - 6, y: py(mark) + 4, "text-anchor": "end" }, format(mark)),
      );
    }
    for (const mark of ticks(x0, x1, Math.max(2, width / 90)).filter(
      (x) => state.axis !== "step" || Number.isInteger(x),
    )) {
      svg.append(
        el(
          "text",
          { x: Math.min(px(mark), full - MARGIN.right - 6), y: height - 6, "text-anchor": "middle" },
          axisText[state.axis](mark),
        ),
      );
    }
    svg.append(
      el("line.axis", {
        x1: MARGIN.left,
        x2: full - MARGIN.right,
        y1: height - MARGIN.bottom,
        y2: height - MARGIN.bottom,
      }),
    );
    filled.forEach((line, k) => {
      if (stacked)
        return svg.append(el("path.area", { d: band(line.x, stacks[k].base, stacks[k].top, px, py), c: line.color }));
      if (line.lo) svg.append(el("path.band", { d: band(line.x, line.lo, line.hi, px, py), c: line.color }));
      if (state.smooth && !line.dots)
        svg.append(el("path.curve.faint", { d: path(line.x, line.y, px, py), c: line.color }));
      const ys = state.smooth && !line.dots ? smoothed(line.y) : line.y;
      svg.append(
        el("path.curve", {
          d: path(line.x, ys, px, py),
          c: line.color,
        }),
      );
      line.y.forEach((y, i) => {
        if (!known(y) || !known(line.x[i])) return;
        // A value without neighbours has no line: it would not be seen.
        const alone = !known(line.y[i - 1]) && !known(line.y[i + 1]);
        if (line.dots || alone) {
          svg.append(el("circle.dot", { cx: px(line.x[i]), cy: py(y), r: line.dots ? 3.5 : 2.5, c: line.color }));
        }
      });
    });
    for (const ref of refs)
      if (known(ref.y))
        svg.append(el("line.ref", { x1: MARGIN.left, x2: full - MARGIN.right, y1: py(ref.y), y2: py(ref.y) }));
    cursor(at); // a window that gets another width keeps it
  }

  return self;
}

function path(xs, ys, px, py) {
  let d = "",
    pen = false;
  for (let i = 0; i < xs.length; i++) {
    if (!known(xs[i]) || !known(ys[i])) {
      pen = false;
      continue;
    }
    d += `${pen ? "L" : "M"}${px(xs[i]).toFixed(1)} ${py(ys[i]).toFixed(1)}`;
    pen = true;
  }
  return d;
}

function band(xs, lows, highs, px, py) {
  const ok = xs.map((x, i) => i).filter((i) => known(xs[i]) && known(lows[i]) && known(highs[i]));
  if (!ok.length) return "";
  const there = ok.map((i) => `${px(xs[i]).toFixed(1)} ${py(highs[i]).toFixed(1)}`);
  const back = ok.reverse().map((i) => `${px(xs[i]).toFixed(1)} ${py(lows[i]).toFixed(1)}`);
  return `M${there.join("L")}L${back.join("L")}Z`;
}

function stack(lines) {
  let base = lines[0].x.map(() => 0);
  return lines.map((line) => {
    const top = base.map((b, i) => b + (line.y[i] || 0));
    const layer = { base, top };
    base = top;
    return layer;
  });
}

function drawAll() {
  for (const each of charts) if (each.box.isConnected) each.draw();
}

let drawnWidth = 0;
function watchWidth() {
  new ResizeObserver(() => {
    if (document.body.clientWidth !== drawnWidth) {
      drawnWidth = document.body.clientWidth;
      drawAll();
    }
  }).observe(document.body);
}
