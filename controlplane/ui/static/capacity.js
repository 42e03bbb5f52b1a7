// Demand, capacity and degradation of each model.

import { byId, h, replaceIf } from "./dom.js";
import { bar, mark, number } from "./words.js";

const rate = (value) => (value < 10 ? value.toFixed(2) : number(Math.round(value)));

export function showCapacity(moment) {
  const models = [...moment.models.values()];
  const mode = moment.head.degradation;
  replaceIf(byId("models"), JSON.stringify([mode, models]), () => {
    if (!models.length) return h("p", { class: "empty" }, mode === "off" ? "Degradation is off (setting degradation.mode), so demand and capacity are not measured." : "No model has had demand yet.");
    return models.map((model) => h("article", { class: "model" }, h("h3", {}, model.model), level(model, mode), figures(model)));
  });
}

function level(model, mode) {
  const text = model.level ? `degraded, level ${model.level}, since tick ${number(model.since_tick)}` : "full service";
  const kind = model.level ? ["warn", "triangle"] : ["ok", "check"];
  return h("p", {}, h("span", { class: `state ${kind[0]}` }, mark(kind), text), mode ? h("small", {}, ` mode ${mode}`) : null);
}

function figures(model) {
  const rows = [["Workers", `${number(model.workers)} serve, ${number(model.wanted_workers)} wanted`]];
  if (model.known) {
    rows.push(
      ["Demand of capacity", bar(model.demand_requests_s, model.usable_requests_s, `${rate(model.demand_requests_s)} of ${rate(model.usable_requests_s)} requests/s`)],
      ["Served", bar(model.served_permille, 1000, `${(model.served_permille / 10).toFixed(1)} % of demand`)],
      ["Tokens", `${number(model.demand_tokens_s)} of ${number(model.tokens_s)} tokens/s`],
    );
  } else rows.push(["Demand and capacity", "not known yet"]);
  return h("dl", { class: "facts" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}
