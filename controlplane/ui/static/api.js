// Calls of the admin API, with the token of this tab if there is one.

const KEY = "relume.token";
const BASE = new URL("../admin/v1/", document.baseURI);
const PAUSES_MS = [500, 1000, 2000, 5000];

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  clear: () => sessionStorage.removeItem(KEY),
};

/** Added to each call: of a stored log, the place that is shown. */
export const always = {};

async function open(path, query, signal) {
  const url = new URL(path, BASE);
  query = { ...always, ...query };
  for (const [name, value] of Object.entries(query)) if (value !== "" && value !== undefined) url.searchParams.set(name, value);
  const headers = token.get() ? { Authorization: `Bearer ${token.get()}` } : {};
  const answer = await fetch(url, { headers, signal, credentials: "omit", cache: "no-store" });
  if (answer.ok) return answer;
  let message = `HTTP ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // an answer of something before the admin port: its status has to do
  }
  throw new ApiError(answer.status, message);
}

/** The JSON of one call. Throws ApiError, TypeError (no connection). */
export async function get(path, query = {}, signal = undefined) {
  return (await open(path, query, signal)).json();
}

/** Server-sent events of one connection: `take(type, data, id)` for each, until it ends. */
async function read(path, query, signal, opened, take) {
  const answer = await open(path, { ...query, follow: 1 }, signal);
  opened();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { event: "message", data: "", id: "" };
      for (const line of block.split("\n")) {
        const colon = line.indexOf(": ");
        if (colon > 0) event[line.slice(0, colon)] = line.slice(colon + 2);
      }
      if (event.data) take(event.event, JSON.parse(event.data), event.id);
    }
  }
}

/**
 * A stream that connects again until it is stopped. `on`: take(type, data, id), opened(),
 * lost(error): called with each failure, returns false to give up. `query(last)` gives the
 * query, with the id of the last event. Returns stop().
 */
export function follow(path, query, on) {
  const stopping = new AbortController();
  let last = "";
  let failures = 0;
  const take = (type, data, id) => {
    last = id || last;
    failures = 0;
    on.take(type, data, id);
  };
  (async () => {
    while (!stopping.signal.aborted) {
      try {
        await read(path, query(last), stopping.signal, on.opened, take);
        if (!on.lost(new TypeError("the connection ended"))) return;
      } catch (error) {
        if (stopping.signal.aborted || !on.lost(error)) return;
      }
      const pause = PAUSES_MS[Math.min(failures++, PAUSES_MS.length - 1)];
      await new Promise((resume) => setTimeout(resume, pause));
    }
  })();
  return () => stopping.abort();
}
