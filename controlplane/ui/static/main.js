// The page: signs in, follows the moments, and hands each to the parts.

import { always, follow, get, token } from "./api.js";
import { showCapacity } from "./capacity.js";
import { byId, h, replaceIf, visible } from "./dom.js";
import { Events } from "./events.js";
import { incidentDetail, Incidents } from "./incidents.js";
import { Fleet, holds } from "./lanes.js";
import { Moment } from "./moment.js";
import { Requests } from "./requests.js";
import { showReport } from "./report.js";
import { Scrubber } from "./scrubber.js";
import { whyDetail } from "./why.js";
import { counted, duration, number, share, STATE_TEXT, stateText, WORKER_STATES } from "./words.js";

const SILENT_MS = 5000;
const HIDDEN_MS = 30000;
const STORY_MS = 3000;

let moment = null;
let takenAt = 0;
let problem = "";
let stopFollowing = () => {};

const fleet = new Fleet((name) => go("worker", name));
const incidents = new Incidents((id) => go("incident", id));
const requests = new Requests((id) => go("request", id), failed);
const events = new Events((id) => go("request", id), failed);

// --- signing in ------------------------------------------------------------------------------

const isRecording = document.querySelector('meta[name="relume-source"]').content === "recording";
let scrubber = null;

/** A stored log: no connection to follow, a place to choose. */
async function startPast() {
  try {
    const recording = await get("recording");
    byId("page").hidden = byId("parts").hidden = false;
    scrubber = new Scrubber(recording, takePast, go, pastFailed);
    if (recording.has_report) showReport(await get("report"), showPlace, go);
    document.title = `Relume: ${recording.origin}`;
    byId("connection").textContent = `Recording: ${recording.origin}`;
    const { revision } = address();
    await scrubber.go(revision ? { revision } : { place: recording.places });
    route();
  } catch (error) {
    pastFailed(error);
  }
}

function takePast(data) {
  always.place = data.head.recorded.place;
  byId("connection").className = "connection ok";
  take("moment", data);
  events.showPast();
}

function pastFailed(error) {
  byId("connection").textContent = error.message;
  byId("connection").className = "connection warn";
}

function start() {
  stopFollowing();
  byId("sign-out").hidden = !token.get();
  stopFollowing = follow("moment", () => ({}), {
    opened: () => {
      problem = "";
      if (byId("page").hidden) {
        byId("sign-in").hidden = true;
        byId("page").hidden = byId("parts").hidden = false;
        events.start();
        route();
      }
    },
    take,
    lost: (error) => {
      if (failed(error)) return false;
      problem = error.message;
      connection();
      return true;
    },
  });
}

/** Whether the error means that this page may not read: then it asks for a token. */
function failed(error) {
  if (error.status !== 401 && error.status !== 403) return false;
  stopFollowing();
  events.stop();
  const known = token.get();
  token.clear();
  byId("sign-out").hidden = true;
  byId("page").hidden = byId("parts").hidden = true;
  byId("sign-in").hidden = false;
  byId("connection").textContent = "Not signed in";
  byId("sign-in-error").textContent = known || error.status === 403 ? error.message : "";
  byId("token").focus();
  return true;
}

byId("sign-in").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("token").value.trim();
  byId("token").value = "";
  if (given) {
    token.set(given);
    start();
  }
});

byId("sign-out").addEventListener("click", () => {
  token.clear();
  location.replace(location.pathname);
});

// --- moments ---------------------------------------------------------------------------------

function take(type, data) {
  if (type === "moment") moment = new Moment(data);
  else moment.apply(data);
  takenAt = performance.now();
  fleet.show(moment);
  incidents.show(moment);
  showCapacity(moment);
  requests.show(moment);
  summary();
  connection();
}

function summary() {
  const { head } = moment;
  const lanes = [...moment.lanes.values()];
  const serving = lanes.filter((lane) => lane.state === "serving" || lane.state === "spare").length;
  const open = [...moment.incidents.values()].filter((incident) => incident.open).length;
  const used = lanes.reduce((sum, lane) => sum + (lane.kv_used ?? 0), 0);
  const blocks = lanes.reduce((sum, lane) => sum + (lane.kv_blocks ?? 0), 0);
  replaceIf(byId("headline"), headline(head, lanes, serving, open), () => headline(head, lanes, serving, open));
  const lead = head.leader || "none";
  const rows = [
    ["Workers that serve", `${number(serving)} of ${number(lanes.length)}`],
    ["Live requests", number(head.live_requests)],
    ["KV cache in use", share(used, blocks)],
    ["Open incidents", number(open)],
    ["Requests ended", number(head.ended)],
    ["Leader", lead],
    ["Replicas", `${number([...moment.replicas.values()].filter((one) => one.alive).length)} of ${number(moment.replicas.size)} alive`],
    ["Log", `${head.recorded ? "recorded" : head.log_healthy ? "written" : "etcd is away"}, revision ${number(head.revision)}`],
  ];
  replaceIf(byId("totals"), JSON.stringify(rows), () => rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** The state of the fleet in one or two sentences. */
function headline(head, lanes, serving, open) {
  const parts = [];
  if (!lanes.length) parts.push("No worker has registered.");
  else if (serving === lanes.length) parts.push(lanes.length === 1 ? "The only worker serves." : `All ${number(lanes.length)} workers serve.`);
  else {
    parts.push(`${number(serving)} of ${number(lanes.length)} workers serve: ${others(lanes)}.`);
  }
  if (!head.serving) parts.push("No request can be accepted.");
  if (open) parts.push(open === 1 ? "One incident is open." : `${number(open)} incidents are open.`);
  if (!head.log_healthy) parts.push(`etcd is away; ${counted(head.unwritten, "event")} wait on this replica.`);
  const degraded = [...moment.models.values()].filter((model) => model.level);
  if (degraded.length) parts.push(`Degraded: ${degraded.map((model) => `${model.model} at level ${model.level}`).join(", ")}.`);
  return parts.join(" ");
}

/** The workers that do not serve: by name if they are few, else by state. */
function others(lanes) {
  const rest = lanes.filter((lane) => lane.state !== "serving" && lane.state !== "spare");
  if (rest.length <= 3) return rest.map((lane) => `${lane.name} is ${STATE_TEXT[lane.state] ?? lane.state}`).join(", ");
  const counts = new Map();
  for (const { state } of rest) counts.set(state, (counts.get(state) ?? 0) + 1);
  return [...counts].map(([state, count]) => `${number(count)} ${STATE_TEXT[state] ?? state}`).join(", ");
}

function connection() {
  if (isRecording) return;
  const box = byId("connection");
  const age = performance.now() - takenAt;
  let text = "Connecting";
  let tone = "warn";
  if (problem) text = `Not connected (${problem}); trying again`;
  else if (moment && age < SILENT_MS) [text, tone] = [`Live from ${moment.head.replica}`, "ok"];
  else if (moment) text = `No news for ${duration(age * 1000)}`;
  if (box.textContent !== text) box.textContent = text;
  box.className = `connection ${tone}`;
}

// --- details: the address says which is open -----------------------------------------------

const dialog = byId("detail");
let refresh = 0;
let calling = null;
let opener = null;

/** Where a control is: its row may be made again while the dialog is open. */
function placeOf(element) {
  const row = element.closest("[data-row]");
  return { element, row: row?.dataset.row, list: row?.parentElement.closest("[id]")?.id };
}

function focusOpener() {
  const { element, row, list } = opener ?? {};
  const again = element?.isConnected ? element : list && byId(list).querySelector(`[data-row="${CSS.escape(row)}"] button`);
  again?.focus({ preventScroll: true });
  opener = null;
}

function go(kind, name) {
  location.hash = `${kind}=${encodeURIComponent(name)}`;
}

/** What the address names: details of one kind, and of a stored log a revision. */
function address() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

async function route() {
  clearTimeout(refresh);
  calling?.abort();
  const wanted = address();
  const kind = Object.keys(DETAILS).find((one) => wanted[one]);
  if (!kind || byId("page").hidden) {
    if (dialog.open) dialog.close();
    return;
  }
  const name = wanted[kind];
  const shown = `${kind} ${name}`;
  if (!dialog.open) {
    opener = placeOf(document.activeElement);
    dialog.showModal();
  }
  if (dialog.dataset.shown !== shown) {
    dialog.dataset.shown = shown;
    byId("detail-title").textContent = visible(TITLES[kind](name));
    byId("detail-body").replaceChildren(h("p", { class: "muted" }, "Reading"));
    byId("detail-body").scrollTop = 0;
    byId("detail-title").focus();
  }
  await show(kind, name, shown);
}

async function show(kind, name, shown) {
  calling = new AbortController();
  try {
    const [content, again] = await DETAILS[kind](name, calling.signal);
    if (dialog.dataset.shown !== shown) return;
    byId("detail-body").replaceChildren(...[content].flat(Infinity).filter(Boolean));
    if (again) refresh = setTimeout(() => show(kind, name, shown), STORY_MS);
  } catch (error) {
    if (error.name !== "AbortError" && !failed(error)) byId("detail-body").replaceChildren(h("p", { class: "error" }, error.message));
  }
}

const TITLES = {
  request: (name) => `Request ${name}`,
  incident: (name) => `Incident ${name}`,
  worker: (name) => `Worker ${name}`,
};

const DETAILS = {
  request: async (name, signal) => {
    const story = await get(`requests/${encodeURIComponent(name)}/why`, {}, signal);
    const past = isRecording && { revision: moment.head.revision, show: showRevision };
    return [whyDetail(story, past), !story.outcome && !isRecording];
  },
  incident: async (name, signal) => {
    const incident = await get(`incidents/${encodeURIComponent(name)}`, {}, signal);
    return [incidentDetail(incident, (id) => go("request", id)), incident.open && !isRecording];
  },
  worker: async (name) => {
    const lane = moment?.lanes.get(name);
    if (!lane) throw new Error(`No worker ${name} in this fleet.`);
    return [workerDetail(lane), !isRecording];
  },
};

function workerDetail(lane) {
  const holders = [...moment.lanes.values()].filter((other) => other.holds?.[lane.name]).map((other) => `${other.name} (${other.holds[lane.name]})`);
  const rows = [
    ["State", stateText(lane.state, WORKER_STATES)],
    ["Because", lane.because || "–"],
    ["Health", `${lane.health ?? "healthy"}${lane.failure ? `, ${lane.failure}` : ""}`],
    ["Model", lane.model || "–"],
    ["Failure domain", lane.domain || "–"],
    ["Engine", `incarnation ${lane.incarnation ?? 0}, pid ${lane.engine_pid ?? 0}, ${counted(lane.deaths ?? 0, "death")} so far`],
    ["Requests", `${number(lane.requests ?? 0)}, of which ${number(lane.waiting ?? 0)} wait in the engine`],
    ["Prompt tokens to compute", number(lane.prefill_tokens ?? 0)],
    ["KV cache", `${number(lane.kv_used ?? 0)} of ${number(lane.kv_blocks ?? 0)} blocks`],
    ["Holds checkpoints of", holds(lane)],
    ["Its checkpoints are on", holders.join(", ") || "no worker now"],
    ["Suspected by", [...moment.replicas.values()].filter((one) => one.suspects.includes(lane.name)).map((one) => one.name).join(", ") || "no replica"],
  ];
  const mine = () => {
    closeDetail();
    requests.ofWorker(lane.name);
    byId("requests").scrollIntoView();
    byId("requests").focus();
  };
  return [
    h("dl", { class: "facts" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    h("button", { type: "button", on: { click: mine } }, `Requests of ${lane.name}`),
  ];
}

function showPlace(query) {
  scrubber.go(query);
  byId("scrubber").scrollIntoView({ block: "center" });
}

function showRevision(revision) {
  closeDetail();
  scrubber.go({ revision });
}

function closeDetail() {
  history.replaceState(null, "", location.pathname);
  route();
}

byId("detail-close").addEventListener("click", closeDetail);
dialog.addEventListener("close", () => {
  clearTimeout(refresh);
  calling?.abort();
  delete dialog.dataset.shown;
  focusOpener();
  if (location.hash.includes("=")) history.replaceState(null, "", location.pathname);
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) closeDetail();
});
addEventListener("hashchange", route);

byId("request-search").addEventListener("keydown", (event) => {
  const id = event.target.value.trim();
  if (event.key === "Enter" && id) go("request", id);
});

addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest("input, select, textarea") && !dialog.open) {
    event.preventDefault();
    byId("request-search").focus();
  } else if (scrubber && !event.target.closest("input[type=search], select, textarea") && !dialog.open) {
    if (event.key === "[") scrubber.previous();
    if (event.key === "]") scrubber.next();
  }
});

// --- a hidden page costs a replica nothing ----------------------------------------------------

let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden && !isRecording) {
    hiding = setTimeout(() => {
      stopFollowing();
      events.stop();
      hiding = -1;
    }, HIDDEN_MS);
  } else if (!isRecording && hiding === -1 && !byId("page").hidden) {
    hiding = 0;
    start();
    events.start();
  }
});

setInterval(connection, 1000);
const given = /^#token=(.+)$/.exec(location.hash);
if (given) {
  token.set(decodeURIComponent(given[1]));
  history.replaceState(null, "", location.pathname);
}
if (isRecording) startPast();
else start();
