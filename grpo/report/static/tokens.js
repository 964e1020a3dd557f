// A completion token by token: coloured by log-ratio or by advantage, read out by pointer, touch or the arrow keys.
"use strict";

const FULL = 50; // per cent of the colour at full scale: text on it keeps its contrast
const signed = (x) => (known(x) && x > 0 ? `+${fmt(x)}` : fmt(x).replace("-", "−"));

function tint(node, x, scale) {
  node.style.setProperty("--c", x > 0 ? "var(--c0)" : "var(--c1)");
  node.style.setProperty("--share", `${(FULL * Math.min(1, Math.abs(x || 0) / scale)).toFixed(1)}%`);
  return node;
}

// Numbers beside the colours. kind: "ratio" or "advantage".
function tokenLegend(kind, scale) {
  const words =
    kind === "ratio"
      ? "log-ratio = log p(policy) − log p(sampler), before the step's first update; the ratio in brackets."
      : "advantage of the completion: blue is made more likely, orange less.";
  return el(
    "div.tokenlegend",
    { role: "img", "aria-label": `${words} Full colour at ${fmt(scale)}` },
    [-1, -0.5, 0, 0.5, 1].map((share) => {
      const x = share * scale;
      const edge = share === -1 ? "≤ " : share === 1 ? "≥ " : "";
      return tint(el("span.token", {}, `${edge}${signed(x)}${kind === "ratio" ? ` (${fmt(Math.exp(x))})` : ""}`), x, scale);
    }),
    el("span.note", {}, words),
  );
}

// A token in numbers. row.trace: grpo/report/tokens.py.
function tokenFacts(row, i) {
  const t = row.trace;
  const at = t.cut && i >= t.cut[0] ? i + t.cut[1] : i;
  const parts = [`token ${at + 1}: id ${t.ids[i]}`];
  if (t.texts[i] === "") parts.push("no text of its own (part of a character)");
  if (t.observed?.[i]) return [...parts, "observation: put in by the environment, not sampled, not trained"].join(" · ");
  const version = t.versions ? t.versions[i] : t.version;
  const ratio = t.log_ratios[i];
  parts.push(`sampler log p ${signed(t.logprobs[i])}`);
  if (known(ratio))
    parts.push(
      `policy log p ${signed(t.logprobs[i] + ratio)}`,
      `ratio ${fmt(Math.exp(ratio), 4)} (log ${signed(ratio)})`,
    );
  else parts.push("not trained: no ratio");
  parts.push(`version ${version}`);
  if (known(row.lag) && known(row.versions[0])) parts.push(`lag ${row.lag + row.versions[0] - version}`);
  return parts.join(" · ");
}

// kind: "ratio", "advantage" or "plain". facts: the element that a token's numbers are put in.
function tokenText(row, kind, scale, special, needle, facts) {
  const t = row.trace;
  const nodes = t.texts.map((text, i) => {
    const classes = ["token", special.has(t.ids[i]) && "special", t.observed?.[i] && "observation"].filter(Boolean);
    const node = el(
      `span.${classes.join(".")}`,
      { "data-i": i },
      text === "" ? el("span.faintmark", {}, "·") : visible(text, needle),
    );
    const x = kind === "ratio" ? t.log_ratios[i] : kind === "advantage" && !t.observed?.[i] ? row.advantage : null;
    return known(x) ? tint(node, x, scale) : node;
  });
  let chosen = null;
  const choose = (node) => {
    if (!node) return;
    for (const other of document.querySelectorAll(".token.at")) other.classList.remove("at");
    chosen = node;
    node.classList.add("at");
    facts.textContent = `#${row.index ?? "–"}, ${tokenFacts(row, Number(node.dataset.i))}`;
  };
  const under = (event) => choose(event.target.closest(".token"));
  return el(
    "pre.sample.mono",
    {
      tabindex: 0,
      role: "group",
      "aria-label": "Completion by tokens. Left and right arrow keys read out a token's numbers.",
      onpointerover: under,
      onclick: under,
      onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const i = chosen ? nodes.indexOf(chosen) + step : step > 0 ? 0 : nodes.length - 1;
        choose(nodes[i]);
        nodes[i]?.scrollIntoView({ block: "nearest" });
      },
    },
    t.cut
      ? [nodes.slice(0, t.cut[0]), el("span.cut", {}, `… ${count(t.cut[1])} tokens left out …`), nodes.slice(t.cut[0])]
      : nodes,
  );
}

// Plain text, with what the environment put in marked as such.
function completionText(row, needle) {
  if (row.completion === "") return el("span.muted", {}, "(empty)");
  if (!row.turns) return visible(row.completion, needle);
  return row.turns.map(([byPolicy, text]) =>
    byPolicy ? visible(text, needle) : el("span.observation", {}, visible(text, needle)),
  );
}
