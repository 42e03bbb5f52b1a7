// The fleet: counts by state, an overview of large fleets, and one lane per worker.

import { byId, h, replaceIf, Rows, svg } from "./dom.js";
import { bar, bytes, counted, mark, number, ORDER, share, STATE_TEXT, stateText, WORKER_STATES } from "./words.js";

const LANE_PX = 44; // page.css: .lanes tbody tr
const OVERSCAN = 8;
const OVERVIEW_FROM = 40;
const CELL = 10;
const byName = new Intl.Collator("en", { numeric: true }).compare;

export class Fleet {
  constructor(openWorker) {
    this.openWorker = openWorker;
    this.chosen = new Set();
    this.search = "";
    this.lanes = [];
    this.sorted = [];
    this.body = h("tbody");
    this.above = h("tr", { "aria-hidden": "true", class: "space" }, h("td", { colspan: 6 }));
    this.below = h("tr", { "aria-hidden": "true", class: "space" }, h("td", { colspan: 6 }));
    this.table = h(
      "table",
      {},
      h("caption", { class: "unseen" }, "Workers, those with problems first"),
      h("thead", {}, h("tr", {}, ["Worker", "State", "Requests", "KV cache", "Prompt tokens to compute", "Holds checkpoints of"].map((text, at) => h("th", { scope: "col", class: at === 4 ? "figure" : undefined }, text)))),
      this.body,
    );
    this.rows = new Rows(this.body, (lane) => lane.name, (lane) => this.#lane(lane));
    this.scroll = byId("lanes");
    this.scroll.append(this.table);
    this.scroll.addEventListener("scroll", () => this.#window(), { passive: true });
    byId("lane-search").addEventListener("input", (event) => {
      this.search = event.target.value.trim().toLowerCase();
      this.scroll.scrollTop = 0;
      this.#list();
    });
  }

  show(moment) {
    this.lanes = [...moment.lanes.values()];
    this.most = Math.max(8, ...this.lanes.map((lane) => lane.requests ?? 0));
    this.#chips();
    this.#mosaic();
    this.#list();
  }

  #chips() {
    const counts = {};
    for (const { state } of this.lanes) counts[state] = (counts[state] ?? 0) + 1;
    const states = Object.keys(WORKER_STATES).filter((state) => counts[state] || this.chosen.has(state));
    const key = states.map((state) => `${state}${counts[state] ?? 0}${this.chosen.has(state)}`).join();
    replaceIf(byId("states"), key || "none", () =>
      states.map((state) =>
        h(
          "button",
          { type: "button", class: `chip ${WORKER_STATES[state][0]}`, "aria-pressed": String(this.chosen.has(state)), "data-state": state, on: { click: () => this.#choose(state) } },
          mark(WORKER_STATES[state]),
          `${STATE_TEXT[state] ?? state} ${number(counts[state] ?? 0)}`,
        ),
      ),
    );
  }

  #choose(state) {
    if (!this.chosen.delete(state)) this.chosen.add(state);
    this.scroll.scrollTop = 0;
    this.#chips();
    byId("states").querySelector(`[data-state="${state}"]`)?.focus();
    this.#list();
  }

  /** All workers of a large fleet as small cells, in the order of the log. */
  #mosaic() {
    const box = byId("mosaic");
    box.hidden = this.lanes.length < OVERVIEW_FROM;
    if (box.hidden) return;
    const columns = Math.max(20, Math.floor((box.clientWidth || 600) / CELL));
    const paths = {};
    this.lanes.forEach(({ state }, at) => {
      const [tone] = WORKER_STATES[state] ?? ["idle"];
      const x = (at % columns) * CELL;
      const y = Math.floor(at / columns) * CELL;
      const cell = tone === "bad" ? `M${x} ${y}l8 8m0-8l-8 8` : tone === "warn" ? `M${x + 4} ${y}l4 8h-8z` : `M${x} ${y}h8v8h-8z`;
      paths[tone] = (paths[tone] ?? "") + cell;
    });
    const height = Math.ceil(this.lanes.length / columns) * CELL;
    replaceIf(box, `${columns}${Object.entries(paths)}`, () =>
      svg(
        "svg",
        { viewBox: `0 0 ${columns * CELL} ${height}`, width: columns * CELL, height, role: "img", "aria-label": `${counted(this.lanes.length, "worker")}; the table below lists them`, on: { click: (event) => this.#clicked(event, columns) } },
        Object.entries(paths).map(([tone, d]) => svg("path", { class: `cell ${tone}`, d })),
      ),
    );
  }

  #clicked(event, columns) {
    const at = Math.floor(event.offsetX / CELL) + columns * Math.floor(event.offsetY / CELL);
    if (this.lanes[at]) this.openWorker(this.lanes[at].name);
  }

  #list() {
    const wanted = this.lanes.filter(
      (lane) => (!this.chosen.size || this.chosen.has(lane.state)) && (!this.search || `${lane.name} ${lane.domain ?? ""} ${lane.model ?? ""}`.toLowerCase().includes(this.search)),
    );
    this.sorted = wanted.sort((a, b) => ORDER[a.state] - ORDER[b.state] || byName(a.name, b.name));
    this.table.setAttribute("aria-rowcount", String(this.sorted.length + 1));
    this.#window();
  }

  /** Only the lanes in sight are elements. */
  #window() {
    const count = this.sorted.length;
    const first = Math.max(0, Math.min(Math.floor(this.scroll.scrollTop / LANE_PX) - OVERSCAN, count - 1));
    const last = Math.min(count, first + Math.ceil((this.scroll.clientHeight || 480) / LANE_PX) + 2 * OVERSCAN);
    this.above.firstChild.style.height = `${first * LANE_PX}px`;
    this.below.firstChild.style.height = `${(count - last) * LANE_PX}px`;
    const spaces = [first > 0 ? [this.above] : [], last < count ? [this.below] : []];
    if (!count) return this.rows.show([], [h("tr", {}, h("td", { colspan: 6, class: "empty" }, this.lanes.length ? "No worker matches." : "No worker has registered yet."))]);
    this.rows.show(this.sorted.slice(first, last), ...spaces);
    this.sorted.slice(first, last).forEach((lane, at) => this.rows.known.get(lane.name).element.setAttribute("aria-rowindex", String(first + at + 2)));
  }

  #lane(lane) {
    const requests = lane.requests ?? 0;
    const used = lane.kv_used ?? 0;
    const blocks = lane.kv_blocks ?? 0;
    const waiting = lane.waiting ? `, ${number(lane.waiting)} wait` : "";
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, h("button", { type: "button", class: "link", on: { click: () => this.openWorker(lane.name) } }, lane.name), h("small", {}, lane.domain ?? "")),
      h("td", {}, stateText(lane.state, WORKER_STATES), lane.because ? h("small", { title: lane.because }, lane.because) : null),
      h("td", {}, bar(requests, this.most, `${number(requests)}${waiting}`)),
      h("td", {}, bar(used, blocks, share(used, blocks))),
      h("td", { class: "figure" }, number(lane.prefill_tokens ?? 0)),
      h("td", {}, holds(lane)),
    );
  }
}

/** Whose checkpoints a lane's daemon holds, and how full it is. */
export function holds(lane) {
  if (!lane.budget_bytes) return h("span", { class: "muted" }, "no state daemon");
  if (!lane.daemon_alive) return h("span", { class: "state bad" }, mark(["bad", "cross"]), "state daemon lost");
  const of = Object.entries(lane.holds ?? {}).sort((a, b) => b[1] - a[1]);
  const shown = of.slice(0, 3).map(([name, count]) => `${name} (${count})`).join(", ");
  const more = of.length > 3 ? ` and ${of.length - 3} more` : "";
  return [h("span", {}, of.length ? shown + more : "none now"), h("small", {}, `${bytes(lane.held_bytes ?? 0)} of ${bytes(lane.budget_bytes)}`)];
}
