// How values are shown: numbers, times, and for each state a word with a shape and a tone.

import { h, svg } from "./dom.js";

export const number = (value) => value.toLocaleString("en-US").replaceAll(",", " ");

/** With a capital, unless it begins with a name such as w1. */
export const sentence = (text) => (/^\S*\d/.test(text) ? text : text.charAt(0).toUpperCase() + text.slice(1));

export const plain = (word) => word.replaceAll("_", " ");

export const counted = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;

export function bytes(value) {
  if (value < 1024) return `${value} B`;
  const power = Math.min(Math.floor(Math.log2(value) / 10), 4);
  const scaled = value / 1024 ** power;
  return `${scaled < 10 ? scaled.toFixed(1) : Math.round(scaled)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

/** A duration in microseconds; a negative one is unknown. */
export function duration(us) {
  if (us < 0) return "–";
  if (us < 1e5) return `${(us / 1e3).toFixed(1)} ms`;
  if (us < 1e6) return `${Math.round(us / 1e3)} ms`;
  if (us < 1.2e8) return `${(us / 1e6).toFixed(2)} s`;
  return `${Math.round(us / 6e7)} min`;
}

/** A difference of two times of the log, which counts milliseconds. */
export const milliseconds = (ms) => (ms >= 0 && ms < 1000 ? `${Math.round(ms)} ms` : duration(ms * 1000));

/** A time of day in this browser's zone. */
export function clock(ms, fine = false) {
  if (ms <= 0) return "–";
  const at = new Date(ms);
  const text = [at.getHours(), at.getMinutes(), at.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
  return fine ? `${text}.${String(at.getMilliseconds()).padStart(3, "0")}` : text;
}

export const share = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");

// Shapes on a field of 16 by 16. The shape alone tells the kind of state; colour only adds to it.
const SHAPES = {
  circle: "M8 2a6 6 0 1 0 0 12A6 6 0 1 0 8 2z",
  ring: "M8 2a6 6 0 1 0 0 12A6 6 0 1 0 8 2zm0 2.4a3.6 3.6 0 1 1 0 7.2 3.6 3.6 0 1 1 0-7.2z",
  triangle: "M8 2l6.5 12h-13z",
  diamond: "M8 1l7 7-7 7-7-7z",
  cross: "M3.6 1.8L8 6.2l4.4-4.4 1.8 1.8L9.8 8l4.4 4.4-1.8 1.8L8 9.8l-4.4 4.4-1.8-1.8L6.2 8 1.8 3.6z",
  down: "M6.4 2h3.2v6H14l-6 6.5L2 8h4.4z",
  square: "M2.5 2.5h11v11h-11zm2.2 2.2v6.6h6.6V4.7z",
  pause: "M3.5 2.5h3v11h-3zm6 0h3v11h-3z",
  check: "M6.3 13.2L1.6 8.5l1.9-1.9 2.8 2.8 6.2-6.2 1.9 1.9z",
  dash: "M2 6.6h12v2.8H2z",
};

/** By state of a worker: tone, shape. Worst first: lists are in this order. */
export const WORKER_STATES = {
  lost: ["bad", "cross"],
  dead: ["bad", "cross"],
  quarantined: ["bad", "square"],
  unhealthy: ["bad", "diamond"],
  suspected: ["warn", "triangle"],
  probing: ["warn", "diamond"],
  held: ["warn", "pause"],
  starting: ["warn", "ring"],
  draining: ["idle", "down"],
  drained: ["idle", "down"],
  none: ["idle", "ring"],
  spare: ["ok", "ring"],
  serving: ["ok", "circle"],
};

/** Other words for states that their name alone does not explain. */
export const STATE_TEXT = {
  held: "restart disabled",
  none: "no engine yet",
  lost: "lost",
};

export const REQUEST_STATES = {
  live: ["live", "circle"],
  completed: ["ok", "check"],
  cancelled: ["idle", "dash"],
  failed: ["bad", "cross"],
  rejected: ["warn", "square"],
};

export const ORDER = Object.fromEntries(Object.keys(WORKER_STATES).map((state, at) => [state, at]));

export const shapePath = (shape) => SHAPES[shape];

export function mark([tone, shape]) {
  return svg("svg", { class: `mark ${tone}`, viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: SHAPES[shape] }));
}

/** A state as shape and word. */
export function stateText(state, table) {
  const known = table[state] ?? ["idle", "ring"];
  return h("span", { class: `state ${known[0]}` }, mark(known), STATE_TEXT[state] ?? state);
}

/** A bar for `part` of `whole` beside its text. Beyond 85 % it is marked as full. */
export function bar(part, whole, text) {
  const width = whole > 0 ? Math.max(0, Math.min(100, (100 * part) / whole)) : 0;
  return h(
    "span",
    { class: "bar" },
    svg(
      "svg",
      { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "track", width: 100, height: 8 }),
      svg("rect", { class: width > 85 ? "value full" : "value", width, height: 8 }),
    ),
    h("span", { class: "number" }, text),
  );
}
