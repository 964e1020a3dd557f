// Elements, numbers and hostile text. Text reaches the page through text nodes only, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

// el("a.chip", {href: "#x"}, "text", child): className after dots, properties and on* listeners, null children left out.
function el(spec, props, ...children) {
  const [tag, ...classes] = spec.split(".");
  const node = ["svg", "g", "path", "rect", "line", "circle", "text", "title", "polyline"].includes(tag)
    ? document.createElementNS(SVG, tag)
    : document.createElement(tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined) continue;
    if (key === "c") node.style.setProperty("--c", value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

const known = (x) => x !== null && x !== undefined;
const color = (i) => `var(--c${i % 8})`;

// Up to `digits` significant digits: 0.8312 -> 0.831, 12345.6 -> 12,346, 0.0000012 -> 1.2e-6.
function fmt(x, digits = 3) {
  if (!known(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e7 || size < 1e-4)
    return x
      .toExponential(Math.max(0, digits - 1))
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  if (size >= 1000) return Math.round(x).toLocaleString("en-US");
  return String(Number(x.toPrecision(digits)));
}
const count = (x) => (known(x) ? Math.round(x).toLocaleString("en-US") : "–");
const percent = (x, digits = 0) => (known(x) ? `${(100 * x).toFixed(digits)} %` : "–");
const share = (x) => (known(x) ? `${fmt(100 * x)} %` : "–"); // as many digits as it takes, for axes and small shares
const fixed = (x, digits = 3) => (known(x) ? x.toFixed(digits) : "–");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

function duration(s) {
  if (!known(s)) return "–";
  if (s > 0 && s < 1) return `${fmt(s * 1000, 2)} ms`;
  if (s < 100) return `${fmt(s, 3)} s`;
  if (s < 6000) return `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
  if (s < 48 * 3600) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
  return `${fmt(s / 86400, 3)} days`;
}

// "0.939 to 0.985", nothing without an interval.
const interval = (low, high) => (known(low) && known(high) ? `${fixed(low)} to ${fixed(high)}` : "");

function swatch(c, ...text) {
  return el("span.key", {}, el("span.swatch", { c }), text);
}

// "rollout.max_staleness" -> "max_staleness" where no other knob ends so.
function shortNames(knobs) {
  const ends = knobs.map((knob) => knob.split(".").pop());
  return Object.fromEntries(
    knobs.map((knob, i) => [knob, ends.filter((end) => end === ends[i]).length > 1 ? knob : ends[i]]),
  );
}

// A row of buttons of which one is pressed; calls back with the chosen value.
function segments(label, options, chosen, onchange) {
  const box = el("span.segments", { role: "group", "aria-label": label });
  for (const [value, text] of options) {
    box.append(
      el(
        "button",
        {
          type: "button",
          "aria-pressed": value === chosen,
          onclick: (event) => {
            for (const button of box.children) button.setAttribute("aria-pressed", button === event.currentTarget);
            onchange(value);
          },
        },
        text,
      ),
    );
  }
  return box;
}

// A horizontally scrolling box that the keyboard can scroll too.
const scroller = (label, node) => el("div.scroll", { tabindex: 0, role: "region", "aria-label": label }, node);

// ---- text of completions ----
const SPECIAL =
  /<\|[^|<>\n]{1,60}\|>|<\/?(?:s|think|answer|tool_call|tool_response|pad|eos|bos|unk|mask)>|\[\/?(?:INST|SYS|TOOL_CALLS)\]/;
// Written as signs, so that nothing on the page moves, hides or reorders: controls, invisible and direction marks,
// private use, lone surrogates.
const CONTROL =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ue000-\uf8ff\ufeff\ufff9-\ufffd]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/;
const PIECES = new RegExp(`(${SPECIAL.source})|(${CONTROL.source})|(\\n)|(\\t)`, "g");

function controlName(char) {
  const code = char.charCodeAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

// A string, or [head, characters left out, tail], as nodes. `needle` is marked. `signs`: line ends and tabs show too.
function visible(text, needle = "", signs = true) {
  if (Array.isArray(text)) {
    const [head, cut, tail] = text;
    return [
      ...visible(head, needle, signs),
      el("span.cut", {}, `… ${count(cut)} characters left out …`),
      ...visible(tail, needle, signs),
    ];
  }
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(PIECES)) {
    if (match.index > at) nodes.push(...marked(text.slice(at, match.index), needle));
    if (match[1]) nodes.push(el("span.special", {}, match[0]));
    else if (match[2]) nodes.push(el("span.control", {}, controlName(match[0])));
    else if (!signs) nodes.push(match[0]);
    else if (match[3]) nodes.push(el("span.faintmark", {}, "⏎"), "\n");
    else nodes.push(el("span.faintmark", {}, "⇥"), "\t");
    at = match.index + match[0].length;
  }
  if (at < text.length) nodes.push(...marked(text.slice(at), needle));
  return nodes;
}

function marked(text, needle) {
  if (!needle) return [text];
  const nodes = [];
  const lower = text.toLowerCase();
  let at = 0;
  // Lower-casing may change the length of a few letters; then there is no marking, but the text stays right.
  for (let i; lower.length === text.length && (i = lower.indexOf(needle, at)) >= 0; at = i + needle.length) {
    nodes.push(text.slice(at, i), el("mark", {}, text.slice(i, i + needle.length)));
  }
  nodes.push(text.slice(at));
  return nodes;
}

// Text of the framework's own (commands, errors, notes): nothing hidden in it, but its line ends are just that.
const prose = (text) => visible(text, "", false);

const plain = (text) => (Array.isArray(text) ? `${text[0]} … ${text[2]}` : text);
