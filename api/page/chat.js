// Chat: a conversation as durable tasks. A reload or a restart of the service resumes the answer.

import { duration, h } from "./elements.js";

const SAVED = "tokenmill.chat";
const EMPTY = { system: "", messages: [], parameters: { max_tokens: 256, temperature: 0.7, top_p: 1, seed: "", logprobs: false } };
const FIELDS = [
  ["max_tokens", "Longest answer, in tokens", { type: "number", min: 1, step: 1 }],
  ["temperature", "Temperature", { type: "number", min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { type: "number", min: 0.05, max: 1, step: 0.05 }],
  ["seed", "Seed (empty: random)", { type: "number", min: 0, step: 1 }],
];

export function mount(element, context) {
  const view = new Chat(element, context);
  view.resume();
}

class Chat {
  constructor(element, context) {
    this.context = context;
    this.saved = { ...structuredClone(EMPTY), ...JSON.parse(localStorage.getItem(SAVED) ?? "{}") };
    this.list = h("ol", { class: "messages", "aria-label": "Conversation" });
    this.input = h("textarea", { rows: 3, name: "message", onkeydown: (event) => this.onKey(event) });
    this.send = h("button", { class: "main", type: "submit" }, "Send");
    this.stop = h("button", { type: "button", onclick: () => this.cancel(), hidden: true }, "Stop");
    this.details = h("p", { class: "details muted", role: "status" });
    const form = h("form", { class: "composer", onsubmit: (event) => this.onSubmit(event) },
      h("label", {}, "Message (Enter sends, Shift and Enter begins a line)", this.input),
      h("div", { class: "row" }, this.send, this.stop,
        h("button", { type: "button", onclick: () => this.repeat() }, "Again"),
        h("button", { type: "button", onclick: () => this.clear() }, "New chat"),
        h("button", { type: "button", onclick: () => this.copy() }, "Copy as curl")),
      this.details);
    element.append(h("h2", {}, "Chat"), h("div", { class: "chat" }, h("div", {}, this.list, form), this.parameters()));
    this.draw();
  }

  parameters() {
    const inputs = FIELDS.map(([name, title, attributes]) => h("label", {}, title, h("input", {
      ...attributes, name, value: this.saved.parameters[name],
      onchange: (event) => this.set(name, event.target.value === "" ? "" : Number(event.target.value)),
    })));
    const system = h("textarea", { rows: 3, name: "system", onchange: (event) => {
      this.saved.system = event.target.value;
      this.save();
    } });
    system.value = this.saved.system;
    const logprobs = h("input", { type: "checkbox", name: "logprobs", onchange: (event) => this.set("logprobs", event.target.checked) });
    logprobs.checked = this.saved.parameters.logprobs;
    return h("aside", { class: "panel parameters", "aria-label": "Parameters" }, h("h3", {}, "Parameters"),
      h("label", {}, "System prompt", system), inputs,
      h("label", { class: "inline" }, logprobs, "Probabilities of the tokens"));
  }

  set(name, value) {
    this.saved.parameters[name] = value;
    this.save();
  }

  save() {
    localStorage.setItem(SAVED, JSON.stringify(this.saved));
  }

  get answer() {
    return this.saved.messages.findLast((message) => message.role === "assistant");
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      this.onSubmit(event);
    }
  }

  onSubmit(event) {
    event.preventDefault();
    const text = this.input.value.trim();
    if (text && !this.following) {
      this.input.value = "";
      this.saved.messages.push({ role: "user", content: text });
      this.ask();
    }
  }

  repeat() {
    if (this.following || !this.saved.messages.length) {
      return;
    }
    if (this.saved.messages.at(-1).role === "assistant") {
      this.saved.messages.pop();
    }
    this.ask();
  }

  clear() {
    this.following?.abort();
    this.saved.messages = [];
    this.save();
    this.draw();
    this.input.focus();
  }

  body() {
    const { logprobs, seed, ...parameters } = this.saved.parameters;
    const system = this.saved.system ? [{ role: "system", content: this.saved.system }] : [];
    const messages = this.saved.messages.map(({ role, content }) => ({ role, content }));
    const set = Object.entries(parameters).filter(([, value]) => value !== "");
    return {
      messages: [...system, ...messages],
      ...Object.fromEntries(set),
      ...(seed === "" ? {} : { seed }),
      ...(logprobs ? { logprobs: 3 } : {}),
      metadata: { from: "page" },
    };
  }

  async copy() {
    const body = JSON.stringify(this.body()).replaceAll("'", "'\\''");
    const url = new URL("v1/tasks?", document.baseURI).href.replace("?", "");
    await navigator.clipboard?.writeText(`curl -s ${url} -H 'Content-Type: application/json' -d '${body}'`);
    this.details.textContent = "Copied. With API keys, add -H 'Authorization: Bearer KEY'.";
  }

  async ask() {
    const body = this.body();
    this.save();
    this.draw();
    this.busy(true);
    this.details.textContent = "Waiting for the first token.";
    // The same key at each attempt, so that a lost reply does not start two tasks.
    const headers = { "Idempotency-Key": crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}` };
    try {
      const task = await this.context.fetch("v1/tasks", { method: "POST", body, headers });
      this.saved.messages.push({ role: "assistant", content: "", task: task.id });
      this.save();
      this.draw();
      await this.follow(this.answer);
    } catch (error) {
      this.failed(error);
    }
  }

  async resume() {
    const answer = this.answer;
    if (!answer || answer !== this.saved.messages.at(-1)) {
      return;
    }
    if (answer.end) {
      this.showEnd(answer);
    } else {
      await this.follow(answer);
    }
  }

  // Replays the answer from its first event: what is kept here needs no other state.
  async follow(answer) {
    const stopping = new AbortController();
    this.context.signal.addEventListener("abort", () => stopping.abort());
    this.following = stopping;
    this.busy(true);
    answer.content = "";
    const text = this.list.lastElementChild.querySelector(".text");
    text.replaceChildren();
    const started = performance.now();
    let count = 0;
    try {
      await this.context.follow(`v1/tasks/${answer.task}/events`, {
        signal: stopping.signal,
        after: -1,
        onPause: (error) => {
          this.details.textContent = `${error.message} The answer continues when it is back.`;
        },
        onEvent: ({ data }) => {
          answer.content += data.text ?? "";
          if (data.text) {
            text.append(this.piece(data));
          }
          if (!data.finish_reason) {
            count += 1;
            this.details.textContent = `${count} tokens`;
          }
          if (data.done) {
            answer.end = data.finish_reason;
            answer.error = data.error?.message;
          }
          return Boolean(data.done);
        },
      });
      this.save();
      if (answer.error) {
        this.list.lastElementChild.append(h("p", { class: "error" }, answer.error));
      }
      this.showEnd(answer, count, performance.now() - started);
    } catch (error) {
      this.failed(error);
    } finally {
      if (this.following === stopping) {
        this.following = null;
        this.busy(false);
      }
    }
  }

  piece(data) {
    if (!data.logprobs) {
      return document.createTextNode(data.text);
    }
    const describe = ({ token, logprob }) => `“${token}” ${(100 * Math.exp(logprob)).toFixed(1)} %`;
    const others = data.logprobs.top.map(describe).join(", ");
    const tell = () => {
      this.details.textContent = `${describe(data.logprobs)}. Likeliest: ${others}`;
    };
    return h("span", { class: "token", tabindex: 0, title: others, onmouseenter: tell, onfocus: tell }, data.text);
  }

  showEnd(answer, count, milliseconds) {
    const reasons = { stop: "finished", length: "reached the longest answer", cancelled: "stopped" };
    const how = reasons[answer.end] ?? answer.end ?? "ended";
    const measured = count === undefined ? "" : `: ${count} tokens in ${duration(milliseconds / 1000)}`;
    this.details.textContent = `The answer ${how}${measured}.`;
  }

  failed(error) {
    if (error.name !== "AbortError") {
      this.details.textContent = error.message;
    }
    this.busy(false);
  }

  busy(is) {
    this.stop.hidden = !is;
    this.send.disabled = is;
  }

  async cancel() {
    try {
      await this.context.fetch(`v1/tasks/${this.answer.task}/cancel`, { method: "POST" });
    } catch (error) {
      this.failed(error);
    }
  }

  draw() {
    const items = this.saved.messages.map((message) => h("li", { class: `message ${message.role}` },
      h("h3", {}, message.role === "user" ? "You" : "Model", " ",
        message.task ? h("a", { href: `#/tasks/${message.task}` }, "Task") : null),
      h("div", { class: "text" }, message.content),
      message.error ? h("p", { class: "error" }, message.error) : null));
    this.list.replaceChildren(...items);
    this.list.hidden = !items.length;
    if (!items.length) {
      this.details.textContent = "Write a message to start. The conversation stays in this browser.";
    }
  }
}
