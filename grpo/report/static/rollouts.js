// The rollouts explorer: a table to sort, filter and search, and the chosen completion beside its siblings.
"use strict";

function rolloutsExplorer(groups, traces) {
  const rows = groups.flatMap((group) =>
    group.rows.map((row) => ({ ...row, group: group.group, prompt: group.prompt, siblings: group.rows })),
  );
  for (const row of rows) row.haystack = `${plain(row.prompt)}\n${plain(row.completion)}`.toLowerCase();
  // The notable ones first: best, worst, longest, strange, then the rest in the order of training.
  const rank = (row) =>
    row.why ? Math.min(...row.why.map((why) => ["best", "worst", "longest"].indexOf(why) >>> 0)) : Infinity;
  const notableFirst = rows
    .map((row, i) => [rank(row), i, row])
    .sort((a, b) => a[0] - b[0] || a[1] - b[1])
    .map((triple) => triple[2]);

  const state = { text: "", outcome: "", finish: "", why: "", step0: null, step1: null, reward0: null, reward1: null };
  const counter = el("span.muted", { role: "status" });
  const view = el("div.groupview", {});
  const list = table({
    label: "Rollouts",
    rows: notableFirst,
    page: 15,
    onpick: (row) => showGroup(row),
    columns: [
      { name: "step", num: true, value: (row) => row.step },
      { name: "group", num: true, value: (row) => row.group, cell: (row) => `${row.group}.${row.index ?? "–"}` },
      { name: "reward", num: true, value: (row) => row.reward },
      { name: "advantage", num: true, value: (row) => row.advantage },
      { name: "lag", num: true, value: (row) => row.lag },
      { name: "tokens", num: true, value: (row) => row.tokens },
      { name: "end", value: (row) => row.finish },
      { name: "outcome", value: (row) => row.outcome },
      {
        name: "completion",
        cell: (row) =>
          el(
            "span.excerpt.mono",
            {},
            row.why && el("span.flag.warn", {}, row.why.join(", ")),
            row.why && " ",
            excerpt(row),
          ),
      },
    ],
  });

  // Around the searched text if there is one, else the beginning.
  function excerpt(row) {
    const text = plain(row.completion);
    const at = state.text ? text.toLowerCase().indexOf(state.text) : 0;
    const from = Math.max(0, at - 40);
    return visible((from ? "…" : "") + text.slice(from, from + 160).replaceAll("\n", " "), state.text);
  }

  const within = (x, low, high) =>
    (low === null || (known(x) && x >= low)) && (high === null || (known(x) && x <= high));
  function filter() {
    const found = notableFirst.filter(
      (row) =>
        (!state.text || row.haystack.includes(state.text)) &&
        (!state.outcome || row.outcome === state.outcome) &&
        (!state.finish || row.finish === state.finish) &&
        (!state.why || row.why?.some((why) => why.startsWith(state.why))) &&
        within(row.step, state.step0, state.step1) &&
        within(row.reward, state.reward0, state.reward1),
    );
    counter.textContent = `${count(found.length)} of ${count(rows.length)} shown here`;
    list.show(found);
  }

  const options = (key) => [...new Set(rows.map((row) => row[key]))].filter(Boolean).sort();
  const choose = (name, key, values) =>
    el(
      "label",
      {},
      name,
      el(
        "select",
        {
          id: `filter-${key}`,
          onchange: (event) => {
            state[key] = event.target.value;
            filter();
          },
        },
        el("option", { value: "" }, "any"),
        values.map((value) => el("option", { value }, value)),
      ),
    );
  const bound = (name, key) =>
    el("input", {
      type: "number",
      step: "any",
      id: `filter-${key}`,
      "aria-label": name,
      placeholder: name.split(" ").pop(),
      oninput: (event) => {
        state[key] = event.target.value === "" ? null : Number(event.target.value);
        filter();
      },
    });
  const bounds = (name) =>
    el(
      "div.bounds",
      {},
      el("span", {}, name),
      el("div", {}, bound(`${name} from`, `${name}0`), bound(`${name} to`, `${name}1`)),
    );
  const controls = el(
    "div.controls",
    {},
    el(
      "label",
      {},
      "search prompts and completions",
      el("input", {
        type: "search",
        id: "search",
        oninput: (event) => {
          state.text = event.target.value.toLowerCase();
          filter();
        },
      }),
    ),
    choose("show", "why", ["best", "worst", "longest", "strange"]),
    choose("outcome", "outcome", options("outcome")),
    choose("end", "finish", options("finish")),
    bounds("step"),
    bounds("reward"),
    counter,
  );

  const inOrder = groups.map((group) => group.rows);
  const special = new Set(traces?.special);
  const advantages = rows.filter((row) => row.trace).map((row) => Math.abs(row.advantage || 0));
  const scales = { ratio: traces?.scale, advantage: advantages.reduce((a, b) => Math.max(a, b), 0) || 1 };
  let kind = "ratio";
  function showGroup(picked, moved = false, atStart = false) {
    const first = picked.siblings;
    const at = inOrder.indexOf(first);
    const go = (to) => {
      const row = rows.find((candidate) => candidate.siblings === inOrder[to]);
      if (row) showGroup(row, true);
    };
    const traced = first.some((row) => row.trace);
    const facts = el("p.tokenfacts", { "aria-live": "polite" }, "Point at a token for its numbers, or use the arrow keys.");
    const observed = first.some((row) => row.turns || row.trace?.observed);
    const rewards = first.map((row) => row.reward).filter(known);
    const mean = rewards.reduce((sum, x) => sum + x, 0) / rewards.length;
    view.replaceChildren(
      el(
        "div.card",
        { tabindex: -1, "aria-label": `Group ${picked.group}` },
        el(
          "div.controls",
          {},
          el("h3", {}, `Group ${picked.group}, step ${picked.step ?? "–"}`),
          el(
            "span.muted",
            {},
            `${plural(first.length, "completion")}${rewards.length ? `, mean reward ${fmt(mean)}` : ""}`,
          ),
          el("button", { type: "button", disabled: at <= 0 ? "" : null, onclick: () => go(at - 1) }, "← group before"),
          el(
            "button",
            { type: "button", disabled: at >= inOrder.length - 1 ? "" : null, onclick: () => go(at + 1) },
            "group after →",
          ),
          traced &&
            segments(
              "Colour tokens",
              [
                ["ratio", "log-ratio"],
                ["advantage", "advantage"],
                ["plain", "plain"],
              ],
              kind,
              (value) => {
                kind = value;
                showGroup(picked, true);
              },
            ),
        ),
        traced && kind !== "plain" && tokenLegend(kind, scales[kind]),
        traces && !traced && el("p.note", {}, "The tokens of this group are not on the page."),
        observed &&
          el(
            "p.note",
            {},
            el("span.observation", {}, "observation"),
            " of the environment: read by the model, not sampled, not trained",
          ),
        el("p.note", {}, "prompt"),
        el("pre.sample.mono", { tabindex: 0 }, visible(picked.prompt, state.text)),
        el(
          "div.siblings",
          {},
          first.map((row) => sibling(row, row.index === picked.index, facts)),
        ),
        traced && facts,
      ),
    );
    if (atStart) return;
    view.firstChild.focus({ preventScroll: true });
    if (!moved || view.getBoundingClientRect().top > innerHeight) view.scrollIntoView({ block: "nearest" });
  }

  function sibling(row, isPicked, facts) {
    const versions = !known(row.versions[0])
      ? "no version"
      : row.versions[0] === row.versions[1]
        ? `version ${row.versions[0]}`
        : `versions ${row.versions[0]} to ${row.versions[1]}`;
    return el(
      isPicked ? "div.sibling.picked" : "div.sibling",
      {},
      el(
        "div.facts",
        {},
        el("span", {}, `#${row.index ?? "–"}`),
        el("span", {}, "reward ", el("b", {}, fmt(row.reward))),
        el(
          "span",
          {},
          "advantage ",
          el(row.advantage > 0 ? "b.flag.good" : row.advantage < 0 ? "b.flag.bad" : "b", {}, fmt(row.advantage)),
        ),
        el("span", {}, `lag ${row.lag ?? "–"}`),
        el("span", {}, versions),
        el("span", {}, plural(row.tokens ?? 0, "token")),
        el("span", {}, row.finish),
        row.outcome !== "trained" && el("span.flag.warn", {}, row.outcome || "unknown outcome"),
        row.rewards &&
          el(
            "span",
            {},
            Object.entries(row.rewards)
              .map(([name, value]) => `${name} ${fmt(value)}`)
              .join(", "),
          ),
        row.why && el("span.flag.warn", {}, row.why.join(", ")),
      ),
      row.trace
        ? tokenText(row, kind, scales[kind], special, state.text, facts)
        : el("pre.sample.mono", { tabindex: 0 }, completionText(row, state.text)),
    );
  }

  filter();
  showGroup(notableFirst[0], false, true);
  return el("div", {}, controls, list.box, view);
}
