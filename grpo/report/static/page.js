// What both pages share: navigation, sections, the start.
"use strict";

// sections: [[id, title, content]]; tools stand at the right of the navigation.
function frame(page, header, sections, data, tools) {
  const nav = el(
    "nav",
    { "aria-label": "Sections" },
    el(
      "div",
      {},
      sections.map(([id, title]) => el("a", { href: `#${id}` }, title)),
      el("span.spring", {}),
      tools,
    ),
  );
  add(page, [el("header", {}, header)]);
  for (const [id, title, content] of sections) {
    add(page, [
      el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), content),
    ]);
  }
  add(page, [el("footer", {}, `Built ${data.built} by python -m grpo.report.`)]);
  page.before(nav);
}

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  if (data.kind === "run") runPage(data);
  else sweepPage(data);
  drawAll();
  watchWidth();
  document.documentElement.dataset.ready = "true";
})();
