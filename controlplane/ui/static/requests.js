// The request table: the newest as they come, or what a search finds.

import { get } from "./api.js";
import { byId, h, Rows } from "./dom.js";
import { clock, duration, number, plain, REQUEST_STATES, stateText } from "./words.js";

const LIMIT = 200;
const REFRESH_MS = 2000;
const HEADS = ["Request", "State", "Workers", "Tokens", "First token", "Longest gap", "Arrived", "Resume guarantee", "Model"];
const FIGURES = HEADS.slice(3, 7);

export class Requests {
  constructor(open, failed) {
    this.failed = failed;
    this.moment = null;
    this.found = null;
    this.body = h("tbody");
    this.rows = new Rows(this.body, (row) => row.request, (row) => requestRow(row, open));
    byId("request-table").append(
      h("table", {}, h("caption", { class: "unseen" }, "Requests, newest first"), h("thead", {}, h("tr", {}, HEADS.map((text) => h("th", { scope: "col", class: FIGURES.includes(text) ? "figure" : undefined }, text)))), this.body),
    );
    const form = byId("request-filter");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => this.#soon(200));
    form.addEventListener("change", () => this.#soon(0));
  }

  /** Show only requests with an attempt on this worker. */
  ofWorker(name) {
    byId("request-worker").value = name;
    this.#soon(0);
  }

  show(moment) {
    this.moment = moment;
    this.#draw();
    if (moment.head.recorded && this.found) this.#soon(0);
  }

  #query() {
    return { search: byId("request-search").value.trim(), state: byId("request-state").value, worker: byId("request-worker").value.trim() };
  }

  #soon(ms) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#search(), ms);
  }

  async #search() {
    clearTimeout(this.timer);
    const query = this.#query();
    if (!Object.values(query).some(Boolean)) {
      this.found = null;
      return this.#draw();
    }
    try {
      const answer = await get("requests", { ...query, limit: LIMIT });
      if (JSON.stringify(query) !== JSON.stringify(this.#query())) return this.#soon(0);
      this.found = answer.requests;
    } catch (error) {
      this.failed(error);
    }
    this.#draw();
    if (!this.moment?.head.recorded) this.#soon(document.hidden ? 10 * REFRESH_MS : REFRESH_MS);
  }

  #draw() {
    const rows = (this.found ?? [...(this.moment?.requests.values() ?? [])]).slice().reverse();
    const head = this.moment?.head;
    let note = "";
    if (this.found) note = `${rows.length === LIMIT ? `the newest ${LIMIT}` : number(rows.length)} found`;
    else if (head) note = `${number(head.live_requests)} live; shown: the newest ${number(rows.length)} of ${number(head.requests_known)} remembered`;
    if (byId("request-count").textContent !== note) byId("request-count").textContent = note;
    if (rows.length) this.rows.show(rows);
    else this.rows.show([], [h("tr", {}, h("td", { colspan: HEADS.length, class: "empty" }, this.found ? "No remembered request matches. A whole id opens any request of the log: press Enter." : "No request yet."))]);
  }
}

function requestRow(row, open) {
  const client = row.client_id ? h("small", {}, row.client_id) : null;
  const path = row.workers.filter((name, at) => name !== row.workers[at - 1]).join(" → ");
  const again = row.attempts > 1 ? h("small", {}, `${row.attempts} attempts`) : null;
  const status = row.status && row.status !== 200 ? h("small", {}, `HTTP ${row.status}`) : null;
  return h(
    "tr",
    {},
    h("th", { scope: "row" }, h("button", { type: "button", class: "link", on: { click: () => open(row.request) } }, row.request), client),
    h("td", {}, stateText(row.state, REQUEST_STATES), status),
    h("td", {}, path || "–", again),
    h("td", { class: "figure" }, row.tokens < 0 ? "–" : number(row.tokens)),
    h("td", { class: "figure" }, duration(row.ttft_us)),
    h("td", { class: "figure" }, duration(row.longest_gap_us)),
    h("td", { class: "figure" }, row.arrived_ms === undefined || row.arrived_ms < 0 ? "–" : clock(row.arrived_ms)),
    h("td", { title: row.reason || undefined }, plain(row.verdict || "–")),
    h("td", {}, row.model),
  );
}
