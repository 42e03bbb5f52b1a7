// A stored log: a scale of its transactions, with decisions and incidents, and the place shown.

import { get } from "./api.js";
import { byId, h, Rows, svg } from "./dom.js";
import { clock, number, sentence } from "./words.js";

const WAIT_MS = 60;

export class Scrubber {
  /** `shown(moment)` takes each moment; `open(kind, name)` leads to details. */
  constructor(recording, shown, open, failed) {
    this.recording = recording;
    this.shown = shown;
    this.open = open;
    this.failed = failed;
    this.place = 0;
    this.scale = byId("scale");
    this.scale.max = recording.places;
    this.scale.addEventListener("input", () => this.soon({ place: this.scale.value }));
    for (const [id, query] of Object.entries(this.#steps())) byId(id).addEventListener("click", () => this.go(query()));
    byId("scrubber").hidden = false;
    byId("marks").replaceChildren(this.#marks());
    this.events = new Rows(byId("place-events"), (event) => event.id, (event) => this.#event(event));
  }

  #steps() {
    return {
      "to-start": () => ({ place: 0 }),
      "to-previous": () => ({ place: this.place, step: "previous" }),
      "back-one": () => ({ place: Math.max(this.place - 1, 0) }),
      "on-one": () => ({ place: Math.min(this.place + 1, this.recording.places) }),
      "to-next": () => ({ place: this.place, step: "next" }),
      "to-end": () => ({ place: this.recording.places }),
    };
  }

  previous() {
    this.go({ place: this.place, step: "previous" });
  }

  next() {
    this.go({ place: this.place, step: "next" });
  }

  /** As `go`, once the scale rests. */
  soon(query) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.go(query), WAIT_MS);
  }

  /** Show the moment at a place, at a revision, or a decision further. */
  async go(query) {
    clearTimeout(this.timer);
    this.calling?.abort();
    this.calling = new AbortController();
    try {
      const moment = await get("moment", query, this.calling.signal);
      this.place = moment.head.recorded.place;
      this.#draw(moment.head);
      this.shown(moment);
    } catch (error) {
      if (error.name !== "AbortError") this.failed(error);
    }
  }

  #draw(head) {
    const { place, decision, events } = head.recorded;
    const { places, decisions } = this.recording;
    if (document.activeElement !== this.scale || Number(this.scale.value) !== place) this.scale.value = place;
    const when = head.at_ms ? `${clock(head.at_ms, true)}, ` : "";
    const text = place ? `${when}revision ${number(head.revision)}` : "before the first transaction";
    byId("place-time").textContent = text;
    byId("place-count").textContent = `transaction ${number(place)} of ${number(places)}, decision ${number(decision)} of ${number(decisions)}`;
    this.scale.setAttribute("aria-valuetext", `${text}, decision ${number(decision)} of ${number(decisions)}`);
    byId("cursor").setAttribute("x", this.#x(place) - 1);
    if (events.length) this.events.show(events);
    else this.events.show([], [h("li", { class: "muted" }, place ? "This transaction has frequent events only." : "The log begins here.")]);
    byId("to-start").disabled = byId("back-one").disabled = byId("to-previous").disabled = place === 0;
    byId("to-end").disabled = byId("on-one").disabled = byId("to-next").disabled = place === places;
  }

  #event(event) {
    const request = event.event.request;
    const why = request ? h("button", { type: "button", class: "link", on: { click: () => this.open("request", request) } }, `why ${request}`) : null;
    return h("li", {}, h("code", {}, event.event.type), h("span", {}, sentence(event.text)), why);
  }

  #x(place) {
    return (1000 * place) / Math.max(this.recording.places, 1);
  }

  #marks() {
    const { density, incidents } = this.recording;
    const most = Math.max(1, ...density);
    const width = 1000 / density.length;
    return svg(
      "svg",
      { viewBox: "0 0 1000 40", preserveAspectRatio: "none", role: "img", "aria-label": `Decisions and ${incidents.length} incidents over the log` },
      density.map((count, at) => (count ? svg("rect", { class: "decisions", x: at * width, width: Math.max(width - 0.6, 0.6), y: 40 - 6 - (22 * count) / most, height: 6 + (22 * count) / most }) : null)),
      incidents.map((one) => svg("rect", { class: "failure", x: Math.max(this.#x(one.place) - 1.5, 0), width: 3, y: 0, height: 40, on: { click: () => this.go({ place: one.place }) } }, svg("title", {}, one.summary))),
      svg("rect", { id: "cursor", class: "cursor", x: 0, width: 2, y: 0, height: 40 }),
    );
  }
}
