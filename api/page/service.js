// Calls of the service: JSON with the API key, and event streams that reconnect.

const KEY = "tokenmill.key";
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 5000;
const NOT_REPEATED = [400, 401, 403, 404, 410, 422];

export class ServiceError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// `askForKey(reason)` returns a promise of a new key.
export class Service {
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.asking = null;
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
      await this.newKey(key ? "The service refused this key." : "");
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
    return response.status === 204 ? null : response.json();
  }

  async newKey(reason) {
    this.asking ??= this.askForKey(reason).finally(() => {
      this.asking = null;
    });
    sessionStorage.setItem(KEY, await this.asking);
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
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
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

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
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
    reader.cancel().catch(() => {});
  }
}

function eventOf(block) {
  const fields = { id: "", event: "message", data: "" };
  for (const line of block.split("\n")) {
    const [, name, value] = /^(\w+): ?(.*)$/.exec(line) ?? [];
    if (name in fields) {
      fields[name] = value;
    }
  }
  return fields.data ? { id: fields.id, name: fields.event, data: JSON.parse(fields.data) } : null;
}
