// The event stream with its filters. Only the newest rows are elements.

import { follow, get } from "./api.js";
import { byId, h, visible } from "./dom.js";
import { clock, number } from "./words.js";

const SHOWN = 300;
const TAIL = 100;
const DRAW_MS = 150;

// As `relume events` leaves them out: there are hundreds of these per second.
export const NOISE = "engine_step,groups_received,tick,state_hashed,checkpoint_acknowledged,checkpoints_acknowledged,state_daemon_reported";

export const PRESETS = {
  "all but frequent ones": { exclude: NOISE },
  failures: { type: "engine_died,engine_hung,engine_recovered,worker_lost,worker_suspected,worker_cleared,transport_observed,stall_judged,stream_judged,health_decided,replica_lost,state_daemon_lost,restore_failed,reports_dropped,segment_skipped" },
  decisions: { type: "route_decided,recovery_planned,migration_planned,holder_chosen,request_held,request_shed,health_decided,degradation_decided,spares_decided,rollout_decided,effects_decided" },
  requests: { type: "request_arrived,route_decided,request_held,request_shed,client_returned,request_ended" },
  "workers and replicas": { type: "worker_registered,worker_leaving,worker_deregistered,engine_started,engine_ready,engine_died,engine_restart_scheduled,replica_started,replica_stopped,replica_lost" },
  operators: { type: "admin_commanded,config_changed,effects_decided,effect_applied,rollout_decided" },
  everything: {},
};

export class Events {
  constructor(openRequest, failed) {
    this.past = false;
    this.openRequest = openRequest;
    this.failed = failed;
    this.list = byId("event-list");
    this.waiting = [];
    this.paused = false;
    byId("event-preset").append(...Object.keys(PRESETS).map((name) => h("option", {}, name)));
    const form = byId("event-filter");
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const type of ["input", "change"]) form.addEventListener(type, () => this.#again(type === "input" ? 400 : 0));
    byId("event-pause").addEventListener("click", () => this.#pause());
  }

  start() {
    this.stop();
    this.list.replaceChildren(h("li", { class: "empty" }, "No such event yet."));
    this.waiting = [];
    this.stopFollowing = follow("events", (last) => this.#query(last), {
      opened: () => this.#note(this.paused ? "paused" : "live"),
      take: (_type, event) => this.#take(event),
      lost: (error) => {
        this.#note(error.message);
        if (error.status === 401 || error.status === 403) this.failed(error);
        return !(error.status >= 400 && error.status < 500 && error.status !== 429 && error.status !== 410);
      },
    });
  }

  /** Of a stored log: the newest up to the place that is shown. */
  async showPast() {
    clearTimeout(this.again);
    this.past = true;
    byId("event-pause").hidden = true;
    this.calling?.abort();
    this.calling = new AbortController();
    try {
      const page = await get("events", { ...this.#query(""), tail: "", limit: TAIL }, this.calling.signal);
      this.list.replaceChildren(...page.events.reverse().map((event) => this.#row(event)));
      if (!page.events.length) this.list.replaceChildren(h("li", { class: "empty" }, "No such event up to here."));
      this.#note("up to this moment");
    } catch (error) {
      if (error.name !== "AbortError") this.#note(error.message);
    }
  }

  stop() {
    this.stopFollowing?.();
    clearTimeout(this.again);
  }

  #query(last) {
    const types = byId("event-types").value.replaceAll(/\s/g, "");
    const preset = types ? { type: types } : PRESETS[byId("event-preset").value];
    return { ...preset, worker: byId("event-worker").value.trim(), request: byId("event-request").value.trim(), text: 1, ...(last ? { after: last } : { tail: TAIL }) };
  }

  #again(ms) {
    clearTimeout(this.again);
    this.again = setTimeout(() => (this.past ? this.showPast() : this.start()), ms);
  }

  #pause() {
    this.paused = !this.paused;
    byId("event-pause").setAttribute("aria-pressed", String(this.paused));
    this.#note(this.paused ? "paused" : "live");
    if (!this.paused) this.#draw();
  }

  #note(text) {
    const held = this.paused && this.waiting.length ? `, ${number(this.waiting.length)} new` : "";
    byId("event-note").textContent = text + held;
  }

  #take(event) {
    this.waiting.push(event);
    if (this.waiting.length > SHOWN) this.waiting.shift();
    if (this.paused) return this.#note("paused");
    this.drawing ??= setTimeout(() => this.#draw(), DRAW_MS);
  }

  #draw() {
    clearTimeout(this.drawing);
    this.drawing = undefined;
    const fresh = this.waiting.splice(0).reverse().map((event) => this.#row(event));
    if (!fresh.length) return;
    if (this.list.firstElementChild?.className === "empty") this.list.replaceChildren();
    this.list.prepend(...fresh);
    while (this.list.childElementCount > SHOWN) this.list.lastElementChild.remove();
  }

  #row(info) {
    const request = info.event.request;
    const whole = h("pre", {});
    const more = h(
      "details",
      { on: { toggle: () => { whole.textContent ||= JSON.stringify(info.event, null, 1).split("\n").map(visible).join("\n"); } } },
      h("summary", {}, h("time", {}, clock(info.at_ms, true)), h("code", {}, info.event.type), h("span", {}, info.text)),
      h("p", { class: "muted" }, `stream ${info.stream}, position ${info.position}, revision ${info.revision}`),
      request ? h("button", { class: "link", type: "button", on: { click: () => this.openRequest(request) } }, `Why request ${request} went where it went`) : null,
      whole,
    );
    return h("li", {}, more);
  }
}
