// Why a request went where it went: the steps of `relume why`, with candidates as tables.

import { h } from "./dom.js";
import { clock, duration, mark, number, plain, sentence } from "./words.js";

const TONES = {
  engine_died: ["bad", "cross"],
  engine_hung: ["bad", "cross"],
  worker_lost: ["bad", "cross"],
  replica_lost: ["bad", "cross"],
  restore_failed: ["bad", "cross"],
  request_shed: ["warn", "square"],
  transport_observed: ["warn", "triangle"],
  worker_suspected: ["warn", "triangle"],
  stall_judged: ["warn", "triangle"],
  stream_judged: ["warn", "triangle"],
  health_decided: ["warn", "diamond"],
  request_preempted: ["warn", "down"],
  route_decided: ["live", "circle"],
  recovery_planned: ["live", "circle"],
  migration_planned: ["live", "circle"],
  request_ended: ["ok", "check"],
  engine_finished: ["ok", "check"],
};

/** `past`: of a stored log, the revision that is shown, and how to show another; else nothing. */
export function whyDetail(story, past) {
  const began = story.steps[0]?.at_ms ?? 0;
  return [
    h("p", { class: "lead" }, story.headline),
    story.complete ? null : h("p", { class: "notice" }, "The log is long: this story is not complete. `relume why` reads all of it."),
    h("ol", { class: "story" }, story.steps.map((step) => stepItem(step, began, past))),
    past ? h("p", { class: "muted" }, "A click on a time shows the fleet at that moment. Steps marked as later come after the moment that is shown.") : null,
    h("p", { class: "muted" }, `Read from revision ${number(story.since)} on. In a terminal: `, h("code", {}, `relume why ${story.request}`)),
  ];
}

function placeButton(step, since, past) {
  const label = `Show the fleet at revision ${revisionOf(step)}`;
  return h("button", { type: "button", class: "link", title: label, "aria-label": `${since}: ${label}`, on: { click: () => past.show(revisionOf(step)) } }, step.at_ms ? since : `revision ${revisionOf(step)}`);
}

const revisionOf = (step) => Number(step.id.split(".")[0]);

function stepItem(step, began, past) {
  const [first, ...details] = [step.text, ...step.details];
  const since = step.at_ms === began ? clock(step.at_ms, true) : `${step.at_ms >= began ? "+" : ""}${step.at_ms - began} ms`;
  return h(
    "li",
    { class: past && revisionOf(step) > past.revision ? "later" : undefined },
    h("div", { class: "when" }, past ? placeButton(step, since, past) : h("time", {}, step.at_ms ? since : "–"), h("small", {}, `${step.stream}:${step.position}`)),
    h(
      "div",
      { class: "what" },
      h("p", {}, mark(TONES[step.type] ?? ["idle", "ring"]), h("span", {}, sentence(first))),
      step.candidates.length ? candidateTable(step.candidates) : null,
      details.length ? h("ul", {}, details.map(detail)) : null,
    ),
  );
}

/** A line of `relume why`; an arrow before it marks what was chosen. */
function detail(line) {
  const text = line.trim();
  return text.startsWith("-> ") ? h("li", { class: "chosen-line" }, mark(["ok", "check"]), h("span", {}, `chosen: ${text.slice(3)}`)) : h("li", {}, text);
}

function candidateTable(candidates) {
  const predicted = candidates.some((one) => one.ttft_us >= 0);
  const unit = candidates.find((one) => one.unit)?.unit;
  const heads = ["Worker", "Choice", unit ? `Cost (${unit})` : "Cost", "Requests", "Prompt tokens to compute"];
  if (predicted) heads.push("Tokens cached", "KV blocks free", "Predicted TTFT", "Predicted TPOT");
  const rows = candidates.map((one) => {
    const choice = one.chosen ? h("strong", {}, mark(["ok", "check"]), "chosen") : one.excluded ? `not eligible: ${plain(one.excluded)}` : "not chosen";
    const cells = [h("td", {}, choice), figure(number(one.cost)), figure(number(one.requests)), figure(number(one.prefill_tokens))];
    if (predicted) {
      const known = one.ttft_us >= 0;
      cells.push(figure(known ? number(one.hit_tokens) : "–"), figure(known ? number(one.kv_free) : "–"), figure(duration(one.ttft_us)), figure(duration(one.tpot_us)));
    }
    return h("tr", { class: one.chosen ? "chosen" : undefined }, h("th", { scope: "row" }, `${one.worker}:${one.incarnation}`), cells);
  });
  return h("div", { class: "figure-box" }, h("table", { class: "candidates" }, h("thead", {}, h("tr", {}, heads.map((text, at) => h("th", { scope: "col", class: at > 1 ? "figure" : undefined }, text)))), h("tbody", {}, rows)));
}

const figure = (text) => h("td", { class: "figure" }, text);
