// A table to sort and page. Filtering is the caller's: `show(rows)` takes what is left.
"use strict";

const PAGE = 50;

// columns: [{name, value: row => number|string, cell: row => node|string, num: true, title}]. onpick: row is chosen.
function table({ label, columns, rows, sort = null, onpick = null, page = PAGE }) {
  let current = rows;
  let order = sort; // {column: index, down: bool}, or null for the given order
  let shown = page;
  let picked = null;
  const body = el("tbody", {});
  const heads = columns.map((column, i) =>
    el(
      column.num ? "th.num" : "th",
      { scope: "col", "aria-sort": "none", title: column.title },
      column.value
        ? el("button", { type: "button", onclick: () => sortBy(i) }, column.name, el("span", { "aria-hidden": "true" }))
        : column.name,
    ),
  );
  const more = el("button.more", {
    type: "button",
    onclick: () => {
      shown += 4 * page;
      draw();
    },
  });
  const box = el("div", {}, scroller(label, el("table", {}, el("thead", {}, el("tr", {}, heads)), body)), more);

  function sortBy(i) {
    order =
      order && order.column === i ? { column: i, down: !order.down } : { column: i, down: Boolean(columns[i].num) };
    draw();
  }

  // Missing values come last in both directions.
  function compare(a, b) {
    if (!known(a) || !known(b)) return known(a) ? -1 : known(b) ? 1 : 0;
    const order_ =
      typeof a === "number" && typeof b === "number"
        ? a - b
        : String(a).localeCompare(String(b), "en", { numeric: true });
    return order.down ? -order_ : order_;
  }

  function draw() {
    const value = order && columns[order.column].value;
    const sorted = value
      ? current
          .map((row) => [value(row), row])
          .sort((a, b) => compare(a[0], b[0]))
          .map((pair) => pair[1])
      : current;
    heads.forEach((head, i) => {
      const on = order && order.column === i;
      head.setAttribute("aria-sort", on ? (order.down ? "descending" : "ascending") : "none");
      const arrow = head.querySelector("span");
      if (arrow) arrow.textContent = on ? (order.down ? " ↓" : " ↑") : "";
    });
    body.replaceChildren(
      ...sorted.slice(0, shown).map((row) => {
        const line = el(
          onpick ? "tr.pick" : "tr",
          onpick ? { tabindex: 0, "aria-selected": row === picked } : {},
          columns.map((column) =>
            el(column.num ? "td.num" : "td", {}, column.cell ? column.cell(row) : text(column.value(row), column.num)),
          ),
        );
        if (onpick) {
          const pick = () => {
            picked = row;
            for (const other of body.children) other.setAttribute("aria-selected", other === line);
            onpick(row);
          };
          line.addEventListener("click", pick);
          line.addEventListener("keydown", (event) => {
            if (event.key === "Enter" || event.key === " ") {
              event.preventDefault();
              pick();
            }
            const next =
              event.key === "ArrowDown" ? line.nextSibling : event.key === "ArrowUp" ? line.previousSibling : null;
            if (next) {
              event.preventDefault();
              next.focus();
            }
          });
        }
        return line;
      }),
    );
    if (!sorted.length) body.append(el("tr", {}, el("td.muted", { colspan: columns.length }, "Nothing matches.")));
    more.hidden = sorted.length <= shown;
    more.textContent = `Show more (${count(sorted.length - shown)} left)`;
  }

  const text = (value, num) => (num ? fmt(value) : known(value) ? String(value) : "–");
  draw();
  return {
    box,
    show(rows_, { order: order_ } = {}) {
      current = rows_;
      shown = page;
      if (order_ !== undefined) order = order_;
      draw();
    },
  };
}
