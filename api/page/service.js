// Calls of the service: JSON with the API key, and event streams that reconnect.

import { parse } from "./json.js";

const KEY = "tokenmill.key";
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 5000;
const SILENCE = 35_000; // The service writes at least every 10 seconds.
const NOT_REPEATED = [400, 401, 403, 404, 410, 422];
const AWAY = [0, 502, 503, 504];

export class ServiceError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// `askForKey(reason)` returns a promise of a new key, "" if none is given.
export class Service {
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.asking = null;
  }

  get hasKey() {
    return Boolean(sessionStorage.getItem(KEY));
  }

  // The response. Raises ServiceError for an error status or if the service does not answer.
  async fetch(path, { signal, headers = {}, ...options } = {}) {
    const key = sessionStorage.getItem(KEY);
    const all = key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
    let response;
    try {
      response = await fetch(path, { signal, headers: all, ...options });
    } catch (error) {
      if (error.name === "AbortError") {
        throw error;
      }
      throw new ServiceError("The service does not answer.", 0, "unreachable");
    }
    if (response.status === 401) {
      // Another call may have asked for a new one meanwhile.
      if (key === sessionStorage.getItem(KEY)) {
        await this.newKey(key ? "The service refused this key." : "");
      }
      return this.fetch(path, { signal, headers, ...options });
    }
    if (!response.ok) {
      throw await problemOf(response);
    }
    return response;
  }

  async json(path, options = {}) {
    const { body, ...rest } = options;
    const headers = body === undefined ? {} : { "Content-Type": "application/json" };
    const response = await this.fetch(path, {
      ...rest,
      headers: { ...headers, ...rest.headers },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    return response.status === 204 ? null : parse(await response.text());
  }

  // Like `json`, repeated while the service is away. `onPause(error)`: it is.
  async persistent(path, { onPause, signal, ...options }) {
    for (let pause = FIRST_PAUSE; ; pause = Math.min(2 * pause, LONGEST_PAUSE)) {
      try {
        return await this.json(path, { signal, ...options });
      } catch (error) {
        if (signal.aborted || !AWAY.includes(error.status)) {
          throw error;
        }
        onPause(error);
      }
      await sleep(pause, signal);
      signal.throwIfAborted();
    }
  }

  // Raises ServiceError if the user gives none.
  async newKey(reason) {
    this.asking ??= this.enteredKey(reason).finally(() => {
      this.asking = null;
    });
    const key = await this.asking;
    if (!key) {
      throw new ServiceError("The service needs an API key. Open a view to enter one.", 401, "key_missing");
    }
    sessionStorage.setItem(KEY, key);
  }

  async enteredKey(reason) {
    const key = (await this.askForKey(reason)).trim();
    // A header cannot carry others, and the browser refuses the whole call.
    const isCarried = /^[\x21-\x7e]*$/.test(key);
    return isCarried ? key : this.enteredKey("A key has no spaces, accents or other special characters.");
  }

  // Calls `onEvent({id, name, data})` for each event after `after` until the server ends the stream with 204, or
  // `onEvent` returns true. Reconnects after the last event. `onPause(error)`: the connection is lost.
  async follow(path, { after, signal, onEvent, onPause = () => {} }) {
    let last = after;
    let pause = FIRST_PAUSE;
    while (!signal.aborted) {
      try {
        const headers = { Accept: "text/event-stream", ...(last === undefined ? {} : { "Last-Event-ID": String(last) }) };
        const response = await this.fetch(path, { signal, headers });
        if (response.status === 204) {
          return;
        }
        for await (const event of eventsOf(response.body)) {
          last = event.id || last;
          pause = FIRST_PAUSE;
          if (onEvent(event)) {
            return;
          }
        }
      } catch (error) {
        if (signal.aborted || NOT_REPEATED.includes(error.status)) {
          throw error;
        }
        onPause(error);
      }
      await sleep(pause, signal);
      pause = Math.min(2 * pause, LONGEST_PAUSE);
    }
  }
}

export function sleep(milliseconds, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, signal?.aborted ? 0 : milliseconds);
    signal?.addEventListener("abort", end);
  });
}

async function problemOf(response) {
  let problem = {};
  try {
    problem = await response.json();
  } catch {
    // A proxy answered without JSON.
  }
  const message = problem.error?.message ?? problem.detail ?? `The service answered with status ${response.status}.`;
  return new ServiceError(message, response.status, problem.error?.code);
}

// Ends with the body, or if the connection is silent: a phone that slept is not told that it is lost.
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let timer;
  try {
    for (;;) {
      clearTimeout(timer);
      timer = setTimeout(() => reader.cancel().catch(() => {}), SILENCE);
      const { value, done } = await reader.read();
      if (done) {
        return;
      }
      buffer += value;
      const blocks = buffer.split("\n\n");
      buffer = blocks.pop();
      for (const block of blocks) {
        const event = eventOf(block);
        if (event) {
          yield event;
        }
      }
    }
  } finally {
    clearTimeout(timer);
    reader.cancel().catch(() => {});
  }
}

function eventOf(block) {
  const fields = { id: "", event: "message", data: "" };
  for (const line of block.split("\n")) {
    // No regular expression: its `.` does not match U+2028, which a text may contain.
    const colon = line.indexOf(":");
    const name = line.slice(0, colon);
    if (Object.hasOwn(fields, name)) {
      fields[name] = line.slice(colon + 1).replace(/^ /, "");
    }
  }
  return fields.data ? { id: fields.id, name: fields.event, data: JSON.parse(fields.data) } : null;
}
