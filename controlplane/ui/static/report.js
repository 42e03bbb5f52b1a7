// Of a chaos run: its verdict, faults and figures, and its lanes over time, above its log.

import { byId, h, svg } from "./dom.js";
import { mark, number, sentence } from "./words.js";

const [WIDTH, LEFT, ROW, PLOT] = [1160, 90, 5, 200];
const RESULTS = { passed: ["ok", "check"], failed: ["bad", "cross"], inconclusive: ["warn", "triangle"], "": ["idle", "dash"] };

/** `goTo(query)` shows the moment at a time or a revision; `open(kind, name)` leads to details. */
export function showReport(report, goTo, open) {
  const box = byId("run");
  box.hidden = false;
  byId("run-title").textContent = `${report.scenario}, seed ${report.seed}`;
  byId("run-body").replaceChildren(
    ...[
      h("p", { class: "lead" }, result(report.result), ` ${report.kind}, ${(report.ends_ms / 1000).toFixed(1)} s, commit ${report.commit}`),
      report.why.map((line) => h("p", {}, sentence(line))),
      h("p", { class: "muted" }, "Repeat: ", h("code", {}, report.command)),
      h("ul", { class: "promises", "aria-label": "Promises" }, report.promises.map(promise)),
      report.violations.length ? violations(report, goTo) : null,
      h("h3", {}, "Workers and replicas over time"),
      h("p", { class: "muted" }, "Each bar is an attempt of a request: light until its first token, violet if it continued from elsewhere, with a red end if it was lost. Dashed lines are faults. A click shows the fleet at that moment."),
      h("div", { class: "figure-box" }, lanes(report, goTo)),
      faults(report),
      h("h3", {}, "Latencies"),
      latencies(report),
      h("div", { class: "figure-box" }, scatter(report, "ttft_ms", "Time to first token in ms, by when the request was sent", open)),
      h("div", { class: "figure-box" }, scatter(report, "gap_ms", "Longest gap between tokens in ms, by when the request was sent", open)),
      h("p", { class: "muted" }, "Circles: undisturbed. Diamonds: interrupted. Crosses: not completed."),
      h("h3", {}, "Figures"),
      table(["Figure", "Value", "Bound", "Meaning"], report.figures.map((one) => [one.name, one.value === null ? "–" : one.value.toFixed(2), one.bound, one.meaning])),
    ].flat(Infinity).filter(Boolean),
  );
}

const result = (name) => h("span", { class: `state ${RESULTS[name][0]}` }, mark(RESULTS[name]), name || "not judged");

const promise = (one) => h("li", { class: `promise ${RESULTS[one.result][0]}`, title: one.text }, mark(RESULTS[one.result]), one.name, h("span", { class: "unseen" }, one.text));

function table(heads, rows) {
  return h("table", { class: "plain" }, h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell) => h("td", {}, cell))))));
}

function violations(report, goTo) {
  const rows = report.violations.map((one) => [
    one.promise,
    one.about,
    one.detail,
    one.revision ? h("button", { type: "button", class: "link", on: { click: () => goTo({ revision: one.revision }) } }, `revision ${number(one.revision)}`) : "",
  ]);
  return [h("h3", {}, "Broken promises"), table(["Promise", "About", "What", "Where"], rows)];
}

const faults = (report) => (report.faults.length ? table(["Fault", "What", "Target", "When"], report.faults.map((one) => [one.name, one.what, one.target, one.text])) : null);

function latencies(report) {
  const ms = (value) => (value === null ? "–" : value.toFixed(1));
  return table(["Requests", "Count", "TTFT p50, ms", "TTFT p99, ms", "Gap p50, ms", "Gap p99, ms"], report.latencies.map((one) => [one.kind, number(one.requests), ms(one.ttft_p50), ms(one.ttft_p99), ms(one.gap_p50), ms(one.gap_p99)]));
}

const placed = (report, ms) => LEFT + ((WIDTH - LEFT - 10) * Math.min(Math.max(ms, 0), report.ends_ms)) / Math.max(report.ends_ms, 1);

function axis(report, top, bottom) {
  const step = nice(report.ends_ms / 8000) * 1000;
  const marks = [];
  for (let at = 0; at <= report.ends_ms; at += step) {
    marks.push(svg("line", { class: "grid", x1: placed(report, at), x2: placed(report, at), y1: top, y2: bottom }));
    marks.push(svg("text", { class: "axis", x: placed(report, at) + 2, y: bottom + 11 }, `${+(at / 1000).toFixed(3)} s`));
  }
  return marks;
}

/** A round number, this or the next above. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-6)));
  return [1, 2, 5, 10].map((times) => times * power).find((one) => one >= value);
}

function lanes(report, goTo) {
  const parts = [];
  let top = 34;
  const end = (one) => one.to_ms ?? report.ends_ms;
  const rect = (from, to, y, height, kind, title) => svg("rect", { class: kind, x: placed(report, from), y, width: Math.max(placed(report, to) - placed(report, from), 0.8), height }, title ? svg("title", {}, title) : null);
  for (const lane of report.lanes) {
    const height = lane.attempts.length ? lane.rows * ROW + 8 : 14;
    parts.push(svg("text", { x: 4, y: top + height / 2 + 4 }, `${lane.name} ${lane.domain}`.slice(0, 14)), rect(0, report.ends_ms, top, height, "down"));
    for (const life of lane.lives) {
      const ready = life.ready_ms ?? end(life);
      parts.push(rect(life.from_ms, ready, top, height, "starting", `life ${life.number} starts`), rect(ready, end(life), top, height, "up", `life ${life.number} ${life.reason}`));
    }
    for (const one of lane.attempts) {
      const y = top + 4 + one.row * ROW;
      const first = one.first_ms ?? end(one);
      const title = `${one.request}/${one.attempt}: ${one.end || "open"} at ${(end(one) / 1000).toFixed(3)} s${one.restored ? `, ${one.restored} tokens restored` : ""}`;
      parts.push(rect(one.from_ms, first, y, ROW - 1, "prefill", title), rect(first, end(one), y, ROW - 1, one.attempt > 1 ? "again" : "decode", title));
      if (one.end && one.end !== "finished") parts.push(rect(end(one), end(one), y - 0.5, ROW, "cut", title));
    }
    for (const one of lane.leads) parts.push(rect(one.from_ms, end(one), top + 4, 6, "leads", `${lane.name} leads`));
    top += height + 5;
  }
  const struck = report.struck.map((one, at) => [
    svg("line", { class: "fault", x1: placed(report, one.from_ms), x2: placed(report, one.from_ms), y1: 26, y2: top }, svg("title", {}, `${one.name} ${one.what} ${one.target} ${one.detail}`)),
    svg("text", { class: "faulted", x: Math.min(placed(report, one.from_ms) + 2, WIDTH - 130), y: 11 + 12 * (at % 2) }, `${one.name} ${one.what}`),
  ]);
  const show = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const ms = ((((event.clientX - box.left) * WIDTH) / box.width - LEFT) * report.ends_ms) / (WIDTH - LEFT - 10);
    goTo({ at_ms: Math.round(report.began_ms + Math.max(ms, 0)) });
  };
  return svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${top + 18}`, role: "img", "aria-label": `${report.lanes.length} workers and replicas over time, with ${report.struck.length} faults; the table below lists the faults`, on: { click: show } }, axis(report, 30, top), parts, struck);
}

function scatter(report, figure, label, open) {
  const points = report.requests.filter((one) => one[figure] !== null);
  const most = Math.max(1, ...points.map((one) => one[figure]));
  const [top, bottom] = [18, PLOT - 18];
  const y = (value) => bottom - ((bottom - top) * value) / most;
  const step = nice(most / 4);
  const grid = [];
  for (let value = 0; value <= most; value += step) grid.push(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - 10, y1: y(value), y2: y(value) }), svg("text", { class: "axis", x: 4, y: y(value) + 4 }, number(+value.toFixed(2))));
  const shapes = points.map((one) => {
    const kind = one.outcome !== "completed" ? "cut" : one.interrupted ? "again" : "decode";
    const [cx, cy] = [placed(report, one.sent_ms), y(one[figure])];
    const d = kind === "decode" ? `M${cx - 2.6} ${cy}a2.6 2.6 0 1 0 5.2 0a2.6 2.6 0 1 0-5.2 0z` : kind === "again" ? `M${cx} ${cy - 4}l4 4-4 4-4-4z` : `M${cx - 3} ${cy - 4}l3 3 3-3 1 1-3 3 3 3-1 1-3-3-3 3-1-1 3-3-3-3z`;
    return svg("path", { class: `point ${kind}`, d, on: { click: () => one.id && open("request", one.id) } }, svg("title", {}, `${one.request} ${one.outcome}: ${one[figure].toFixed(1)} ms (${one.workers.join(" then ")})`));
  });
  return svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${PLOT}`, role: "img", "aria-label": `${label}: ${points.length} requests; the table above has their quantiles` }, axis(report, top, bottom), grid, shapes, svg("text", { x: LEFT + 6, y: 12 }, label));
}
