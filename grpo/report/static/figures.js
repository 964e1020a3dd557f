// Figures that are no curves: bars, shares of a whole, a timeline, a heat map, a scatter plot.
"use strict";

// One horizontal bar cut into shares, with a table of them below. parts: [{name, value, color}].
function shareBar({ parts, format, label, total = null }) {
  const whole = total ?? parts.reduce((sum, part) => sum + part.value, 0);
  const svg = el("svg", {
    height: 26,
    viewBox: "0 0 1000 26",
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": `${label}: ${parts.map((part) => `${part.name} ${percent(part.value / whole, 1)}`).join(", ")}`,
  });
  let x = 0;
  for (const part of parts) {
    const width = whole ? (1000 * part.value) / whole : 0;
    if (width > 0)
      svg.append(
        el(
          "rect.bar",
          { x, y: 0, width: Math.max(width - 1, 0.7), height: 26, c: part.color },
          el("title", {}, `${part.name}: ${format(part.value)}`),
        ),
      );
    x += width;
  }
  return el(
    "div",
    {},
    svg,
    el(
      "div.legend",
      {},
      parts.map((part) =>
        swatch(
          part.color,
          part.name,
          el("span.value", { "data-value": part.value }, format(part.value)),
          ` ${whole ? percent(part.value / whole, 1) : ""}`,
        ),
      ),
    ),
  );
}

// Vertical bars. bars: [{name, value, title}]; mark: index after which the bound is drawn.
function barChart({ title, note, bars, color: c, format = fmt, mark = null, markName = "", height = 190 }) {
  const legend = el("div.legend", {});
  const svg = el("svg", { height, "aria-hidden": "true" });
  const plot = el(
    "div.plot",
    { tabindex: 0, role: "group", "aria-label": `${title}: bar chart. Left and right arrow keys read out values.` },
    svg,
  );
  const readout = el("div.readout", { "aria-live": "polite" });
  const box = el("div.card.chart", {}, el("h3", {}, title), note && el("p.note", {}, note), legend, plot, readout);
  let chosen = null;
  const show = (i) => {
    chosen = i;
    legend.replaceChildren(
      i === null
        ? mark !== null
          ? el("span.muted", {}, `┄ ${markName}`)
          : ""
        : swatch(
            c,
            bars[i].name,
            el("span.value", { "data-value": bars[i].value }, format(bars[i].value)),
            ` ${bars[i].title || ""}`,
          ),
    );
    [...svg.querySelectorAll(".bar")].forEach((bar, k) => bar.classList.toggle("dim", i !== null && k !== i));
    if (i !== null) readout.textContent = legend.textContent;
  };
  const index = (event) =>
    Math.max(
      0,
      Math.min(
        bars.length - 1,
        Math.floor(
          ((event.clientX - svg.getBoundingClientRect().left - MARGIN.left) /
            (svg.clientWidth - MARGIN.left - MARGIN.right)) *
            bars.length,
        ),
      ),
    );
  plot.addEventListener("pointermove", (event) => show(index(event)));
  plot.addEventListener("pointerleave", () => show(null));
  plot.addEventListener("blur", () => show(null));
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(Math.max(0, Math.min(bars.length - 1, chosen === null ? (step > 0 ? 0 : bars.length - 1) : chosen + step)));
  });
  function draw() {
    const full = plot.clientWidth || 340,
      width = full - MARGIN.left - MARGIN.right,
      inner = height - MARGIN.top - MARGIN.bottom;
    const high = Math.max(...bars.map((bar) => bar.value || 0)) || 1;
    const slot = width / bars.length,
      every = Math.ceil(34 / slot);
    svg.setAttribute("viewBox", `0 0 ${full} ${height}`);
    svg.replaceChildren();
    for (const mark_ of ticks(0, high, 4)) {
      const y = MARGIN.top + (1 - mark_ / high) * inner;
      svg.append(
        el("line.gridline", { x1: MARGIN.left, x2: full - MARGIN.right, y1: y, y2: y }),
        el("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, format(mark_)),
      );
    }
    bars.forEach((bar, i) => {
      const size = ((bar.value || 0) / high) * inner;
      svg.append(
        el("rect.bar", {
          x: MARGIN.left + i * slot + slot * 0.12,
          width: slot * 0.76,
          y: MARGIN.top + inner - size,
          height: size,
          c,
        }),
      );
      if (i % every === 0)
        svg.append(el("text", { x: MARGIN.left + (i + 0.5) * slot, y: height - 6, "text-anchor": "middle" }, bar.name));
    });
    svg.append(
      el("line.axis", {
        x1: MARGIN.left,
        x2: full - MARGIN.right,
        y1: height - MARGIN.bottom,
        y2: height - MARGIN.bottom,
      }),
    );
    if (mark !== null && mark + 1 <= bars.length) {
      const x = MARGIN.left + (mark + 1) * slot;
      svg.append(el("line.ref", { x1: x, x2: x, y1: MARGIN.top, y2: height - MARGIN.bottom }));
    }
    show(null);
  }
  charts.push({ box, draw, cursor() {}, axis: null });
  return box;
}

// Cells of two knobs. cell(row, column) -> {value, text, title} or null.
function heatMap({ rows, columns, rowName, columnName, cell, better = 1 }) {
  const values = rows.flatMap((r) => columns.map((c) => cell(r, c)?.value)).filter(known);
  const [low, high] = extent(values);
  const box = el(
    "table.heat",
    {},
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        el("th.corner", { scope: "col" }, `${rowName} ↓`, el("br", {}), `${columnName} →`),
        columns.map((c) => el("th.num", { scope: "col" }, c)),
      ),
    ),
    el(
      "tbody",
      {},
      rows.map((r) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, r),
          columns.map((c) => {
            const found = cell(r, c);
            if (!found || !known(found.value)) return el("td.num.muted", { title: found?.title }, found?.text ?? "–");
            const share = high > low ? (found.value - low) / (high - low) : 0.5;
            const td = el("td.num.cell", { title: found.title, "data-value": found.value }, found.text);
            td.style.setProperty("--share", `${Math.round(6 + 38 * (better < 0 ? 1 - share : share))}%`);
            return td;
          }),
        ),
      ),
    ),
  );
  return scroller(`${rowName} by ${columnName}`, box);
}

// points: [{x, y, color, name, front, faint, low, high}].
function scatter({ title, note, points, xFormat, yFormat, xName, yName, height = 320 }) {
  const legend = el("div.legend", {});
  const svg = el("svg", { height, "aria-hidden": "true" });
  const plot = el(
    "div.plot",
    {
      tabindex: 0,
      role: "group",
      "aria-label": `${title}: scatter plot. Left and right arrow keys go through the points.`,
    },
    svg,
  );
  const readout = el("div.readout", { "aria-live": "polite" });
  const box = el("div.card.chart", {}, el("h3", {}, title), note && el("p.note", {}, note), legend, plot, readout);
  const main = points.filter((point) => !point.faint).sort((a, b) => a.x - b.x);
  let places = [],
    chosen = null;
  const show = (i) => {
    chosen = i;
    svg.querySelector(".cursor")?.remove();
    if (i === null) {
      legend.replaceChildren(el("span.muted", {}, `${xName} across, ${yName} up; the line joins the Pareto front`));
      return;
    }
    const point = main[i];
    legend.replaceChildren(
      swatch(
        point.color,
        point.name,
        el("span.value", {}, `${yFormat(point.y)}`),
        ` in ${xFormat(point.x)}${point.front ? ", on the front" : ""}`,
      ),
    );
    readout.textContent = legend.textContent;
    svg.append(
      el(
        "g.cursor",
        {},
        el("circle", { cx: places[i][0], cy: places[i][1], r: 9, fill: "none", stroke: "currentColor" }),
      ),
    );
  };
  plot.addEventListener("pointermove", (event) => {
    const at = svg.getBoundingClientRect();
    const distance = places.map(([x, y]) => Math.hypot(x - event.clientX + at.left, y - event.clientY + at.top));
    show(distance.length ? distance.indexOf(Math.min(...distance)) : null);
  });
  plot.addEventListener("pointerleave", () => show(null));
  plot.addEventListener("blur", () => show(null));
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !main.length) return;
    event.preventDefault();
    show(Math.max(0, Math.min(main.length - 1, chosen === null ? (step > 0 ? 0 : main.length - 1) : chosen + step)));
  });
  function draw() {
    const full = plot.clientWidth || 340,
      width = full - MARGIN.left - MARGIN.right,
      inner = height - MARGIN.top - MARGIN.bottom;
    svg.setAttribute("viewBox", `0 0 ${full} ${height}`);
    svg.replaceChildren();
    places = [];
    if (!main.length) {
      svg.append(el("text", { x: MARGIN.left, y: height / 2 }, "no data"));
      return show(null);
    }
    let [x0, x1] = extent(points.map((point) => point.x));
    let [y0, y1] = extent(points.flatMap((point) => [point.y, point.low, point.high].filter(known)));
    const padX = (x1 - x0) * 0.05 || 1,
      padY = (y1 - y0) * 0.08 || 0.05;
    x0 = Math.max(0, x0 - padX);
    x1 += padX;
    y0 -= padY;
    y1 += padY;
    const px = (x) => MARGIN.left + ((x - x0) / (x1 - x0)) * width,
      py = (y) => MARGIN.top + (1 - (y - y0) / (y1 - y0)) * inner;
    for (const mark of ticks(y0, y1, 5))
      svg.append(
        el("line.gridline", { x1: MARGIN.left, x2: full - MARGIN.right, y1: py(mark), y2: py(mark) }),
        el("text", { x: MARGIN.left - 6, y: py(mark) + 4, "text-anchor": "end" }, yFormat(mark)),
      );
    for (const mark of ticks(x0, x1, Math.max(2, width / 100)))
      svg.append(el("text", { x: px(mark), y: height - 6, "text-anchor": "middle" }, xFormat(mark)));
    const front = main.filter((point) => point.front);
    svg.append(
      el("path.curve", {
        d: path(
          front.map((p) => p.x),
          front.map((p) => p.y),
          px,
          py,
        ),
        c: "var(--muted)",
        "stroke-dasharray": "3 3",
      }),
    );
    for (const point of points.filter((p) => p.faint))
      svg.append(el("circle.dot", { cx: px(point.x), cy: py(point.y), r: 2.5, c: point.color, opacity: 0.5 }));
    for (const point of main) {
      if (known(point.low))
        svg.append(
          el("line.whisker", {
            x1: px(point.x),
            x2: px(point.x),
            y1: py(point.low),
            y2: py(point.high),
            c: point.color,
            opacity: 0.6,
          }),
        );
      svg.append(el("circle.dot", { cx: px(point.x), cy: py(point.y), r: point.front ? 6 : 4.5, c: point.color }));
      places.push([px(point.x), py(point.y)]);
      // Names of the front only: they are few and lie apart.
      if (point.front && front.length <= 8) {
        const left = px(point.x) > full * 0.6;
        svg.append(
          el(
            "text",
            {
              x: px(point.x) + (left ? -10 : 10),
              y: py(point.y) + (left ? -8 : 14),
              "text-anchor": left ? "end" : "start",
            },
            point.name,
          ),
        );
      }
    }
    show(null);
  }
  charts.push({ box, draw, cursor() {}, axis: null });
  return box;
}
