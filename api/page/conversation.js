// The conversation that the browser keeps, and the requests made of it.

const SAVED = "tokenmill.chat";
const PARAMETERS = { max_tokens: 256, temperature: 0.7, top_p: 1, seed: "", logprobs: false };

// `messages`: {role, content}, and of an answer also {task, end, error}. `pending`: {key, body} of a request whose task
// is not known yet; repeated with its key, it starts no second task.
export class Conversation {
  constructor() {
    const saved = read();
    this.system = typeof saved.system === "string" ? saved.system : "";
    this.messages = Array.isArray(saved.messages) ? saved.messages.filter(isMessage) : [];
    this.parameters = Object.fromEntries(
      Object.entries(PARAMETERS).map(([name, value]) => [name, saved.parameters?.[name] ?? value]),
    );
    this.pending = saved.pending?.key && saved.pending.body ? saved.pending : null;
  }

  // Whether the browser has kept it. It does not if its storage is full or switched off.
  save() {
    try {
      localStorage.setItem(SAVED, JSON.stringify({ ...this }));
      return true;
    } catch {
      return false;
    }
  }

  get lastAnswer() {
    return this.messages.findLast((message) => message.role === "assistant");
  }

  // The last message, if it is an answer.
  get currentAnswer() {
    const last = this.messages.at(-1);
    return last?.role === "assistant" ? last : undefined;
  }

  // The fields of a task that asks for the answer to the last message of the user.
  body() {
    const { logprobs, seed, ...parameters } = this.parameters;
    const asked = this.currentAnswer ? this.messages.slice(0, -1) : this.messages;
    const system = this.system ? [{ role: "system", content: this.system }] : [];
    return {
      messages: [...system, ...asked.map(({ role, content }) => ({ role, content }))],
      ...Object.fromEntries(Object.entries(parameters).filter(([, value]) => value !== "")),
      ...(seed === "" ? {} : { seed }),
      ...(logprobs ? { logprobs: 3 } : {}),
    };
  }
}

// The commands read the key from the environment, so that none is copied.
export function asCurl(body, address, hasKey) {
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = hasKey ? ' -H "Authorization: Bearer $TOKENMILL_API_KEY"' : "";
  return `curl -s '${address}v1/tasks'${key} -H 'Content-Type: application/json' -H 'Prefer: wait=60' -d '${data}'`;
}

// Strings, numbers and lists of JSON are Python too, and `body` has no others.
export function asPython(body, address) {
  const fields = Object.entries(body).map(([name, value]) => `        ${name}=${JSON.stringify(value)},\n`);
  return [
    "from tokenmill import Client\n\n",
    `with Client(${JSON.stringify(address.replace(/\/$/, ""))}) as client:\n`,
    `    task = client.submit(\n${fields.join("")}    )\n`,
    "    for event in task.stream():\n",
    '        print(event.text, end="", flush=True)\n',
  ].join("");
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(SAVED)) ?? {};
  } catch {
    return {};
  }
}

function isMessage(message) {
  return ["user", "assistant"].includes(message?.role) && typeof message.content === "string";
}
