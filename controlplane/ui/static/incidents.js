// Incidents: a list with the times of each, and one with each stream's gap as a figure.

import { byId, h, Rows, svg } from "./dom.js";
import { clock, duration, mark, milliseconds, number, REQUEST_STATES, sentence, stateText } from "./words.js";

const SHOWN_STREAMS = 40;

export class Incidents {
  constructor(open) {
    this.open = open;
    this.list = byId("incident-list");
    this.rows = new Rows(this.list, (incident) => incident.id, (incident) => this.#row(incident));
  }

  show(moment) {
    const all = [...moment.incidents.values()].reverse();
    if (all.length) this.rows.show(all);
    else this.rows.show([], [this.list.querySelector(".empty") ?? h("li", { class: "empty" }, "No failure so far.")]);
  }

  #row(incident) {
    const steps = phases(incident).filter(([, ms]) => ms >= 0).map(([name, ms]) => `${name} +${milliseconds(ms)}`);
    return h(
      "li",
      {},
      h("span", { class: `state ${incident.open ? "bad" : "ok"}` }, mark(incident.open ? ["bad", "triangle"] : ["ok", "check"]), incident.open ? "open" : "over"),
      h("time", {}, clock(incident.began_ms)),
      h("button", { type: "button", class: "link", on: { click: () => this.open(incident.id) } }, sentence(incident.summary)),
      h("small", {}, steps.join(" · ")),
    );
  }
}

/** Names of what followed, with the time since the beginning; -1: not yet, or not known. */
export function phases(incident) {
  const since = (at) => (at < 0 ? -1 : Math.max(at - incident.began_ms, 0));
  const what = incident.part === "daemon" ? "checkpoint" : "stream";
  return [
    ["noticed", since(incident.noticed_ms)],
    ["decided", since(incident.decided_ms)],
    [`first ${what} continued`, since(incident.first_stream_on_ms)],
    [`last ${what} continued`, since(incident.last_stream_on_ms)],
    ["capacity back", since(incident.capacity_back_ms)],
    ...[["first token of the next engine", since(incident.first_token_ms)], ["next engine at its peak", since(incident.peak_ms)]].filter(([, ms]) => ms >= 0),
  ];
}

/** The whole record of one failure. `openRequest(id)` leads to a stream's story. */
export function incidentDetail(incident, openRequest) {
  return [
    h("p", { class: "lead" }, sentence(incident.summary)),
    h("dl", { class: "facts" }, fact("Began", clock(incident.began_ms, true)), phases(incident).map(([name, ms]) => fact(sentence(name), ms < 0 ? notYet(name, incident) : `after ${milliseconds(ms)}`))),
    incident.touched.length ? [h("h3", {}, "Gap of each stream"), gaps(incident), streams(incident, openRequest)] : null,
    incident.events.length ? [h("h3", {}, "Events, in the order of the log"), chain(incident)] : null,
  ];
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

const notYet = (name, incident) => (name === "capacity back" && !incident.open ? "no: the worker left, or failed again" : "not yet, or not known");

/** Time to the right; one bar per stream from its loss to its next token. */
function gaps(incident) {
  const shown = incident.touched.slice(0, SHOWN_STREAMS);
  const ends = phases(incident).map(([, ms]) => ms);
  const streamEnds = shown.map((stream) => (stream.on_ms < 0 ? 0 : stream.on_ms - incident.began_ms));
  const span = Math.max(50, ...ends.slice(0, 4), ...streamEnds) * 1.08;
  const [left, width, row] = [150, 640, 18];
  const x = (ms) => left + (width * Math.max(0, Math.min(ms, span))) / span;
  const height = 40 + row * shown.length;
  const marks = phases(incident).filter(([, ms]) => ms >= 0 && ms <= span);
  return h("div", { class: "figure-box" }, svg(
    "svg",
    { class: "gaps", viewBox: `0 0 ${left + width + 20} ${height}`, role: "img", "aria-label": `Gaps of ${shown.length} streams; the table below has the same figures` },
    marks.map(([name, ms]) => svg("line", { class: "moment", x1: x(ms), x2: x(ms), y1: 16, y2: height - 18 }, svg("title", {}, `${name} +${milliseconds(ms)}`))),
    shown.map((stream, at) => {
      const y = 22 + at * row;
      const from = stream.touched_ms - incident.began_ms;
      const to = stream.on_ms < 0 ? span : stream.on_ms - incident.began_ms;
      return [
        svg("text", { x: left - 8, y: y + 9, "text-anchor": "end" }, short(stream.request)),
        svg("rect", { class: stream.on_ms < 0 ? "gap open" : "gap", x: x(from), y, width: Math.max(2, x(to) - x(from)), height: 11 }, svg("title", {}, `${stream.request}: ${stream.on_ms < 0 ? "not continued" : milliseconds(to - from)}`)),
      ];
    }),
    [0, 0.25, 0.5, 0.75, 1].map((part) => svg("text", { class: "axis", x: left + width * part, y: height - 4, "text-anchor": part === 1 ? "end" : "middle" }, part ? `+${milliseconds(span * part)}` : "began")),
  ), h("p", { class: "muted" }, `Vertical lines: ${marks.map(([name, ms]) => `${name} +${milliseconds(ms)}`).join(", ")}.`));
}

const short = (name) => (name.length > 20 ? `${name.slice(0, 9)}…${name.slice(-9)}` : name);

function streams(incident, openRequest) {
  const rows = incident.touched.map((stream) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, h("button", { type: "button", class: "link", on: { click: () => openRequest(stream.request) } }, stream.request)),
      h("td", {}, stateText(stream.state, REQUEST_STATES)),
      h("td", {}, stream.to.join(" → ") || "–"),
      h("td", { class: "figure" }, stream.on_ms < 0 ? "–" : milliseconds(stream.on_ms - stream.touched_ms)),
      h("td", { class: "figure" }, duration(stream.longest_gap_us)),
      h("td", { class: "figure" }, number(stream.delivered)),
      h("td", { class: "figure" }, number(stream.restored)),
    ),
  );
  const heads = ["Stream", "State", "Continued on", "Next token after", "Longest gap of its client", "Tokens delivered before", "Tokens restored"];
  const left = incident.streams - incident.touched.length;
  return [h("table", {}, h("thead", {}, h("tr", {}, heads.map((text, at) => h("th", { scope: "col", class: at > 2 ? "figure" : undefined }, text)))), h("tbody", {}, rows)), left > 0 ? h("p", { class: "muted" }, `and ${number(left)} more`) : null];
}

function chain(incident) {
  const rows = incident.events.map((event) =>
    h("tr", {}, h("td", { class: "figure" }, `${event.at_ms - incident.began_ms >= 0 ? "+" : ""}${event.at_ms - incident.began_ms} ms`), h("td", {}, event.stream), h("td", {}, event.request ? `${event.request}: ${event.text}` : event.text)),
  );
  return [
    h("table", { class: "plain" }, h("thead", {}, h("tr", {}, ["Since the beginning", "Stream", "Event"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows)),
    incident.events_left_out ? h("p", { class: "muted" }, `and ${number(incident.events_left_out)} more`) : null,
  ];
}
