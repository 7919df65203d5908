// Chat: a conversation as durable tasks. A reload or a restart of the service resumes the answer.

import { Conversation } from "./conversation.js";
import { duration, h } from "./elements.js";
import { parametersPanel } from "./parameters.js";
import { moveAmongTokens, token } from "./tokens.js";

const REASONS = { stop: "finished", length: "reached the longest answer", cancelled: "stopped" };
const NEAR_THE_END = 40; // Pixels.

export function mount(element, context) {
  new Chat(element, context).resume();
}

class Chat {
  constructor(element, context) {
    this.context = context;
    this.conversation = new Conversation();
    this.running = null; // The AbortController of the request or the answer that is under way.
    this.isStopped = false; // Stop was pressed before the task was known.
    this.atEnd = true; // Whether the end of the conversation is in sight. New text keeps it so.
    this.list = h("ol", { class: "messages", "aria-label": "Conversation" });
    this.form = this.composer();
    const parameters = parametersPanel(this.conversation, context.service, (text) => this.tell(text));
    element.append(h("h2", {}, "Chat"), h("div", { class: "chat" }, h("div", {}, this.list, this.form), parameters));
    addEventListener("scroll", () => {
      this.atEnd = this.beyond() <= NEAR_THE_END;
    }, { signal: context.signal, passive: true });
    this.draw();
  }

  composer() {
    this.input = h("textarea", { rows: 2, name: "message", onkeydown: (event) => this.onKey(event) });
    this.send = h("button", { class: "main", type: "submit" }, "Send");
    this.stop = h("button", { type: "button", onclick: () => this.cancel(), hidden: true }, "Stop");
    this.details = h("p", { class: "details muted" });
    this.about = h("p", { class: "about muted" });
    this.announced = h("p", { class: "unseen", role: "status" });
    return h("form", { class: "composer", onsubmit: (event) => this.onSubmit(event) },
      h("label", {}, "Message (Enter sends, Shift and Enter begins a line)", this.input),
      h("div", { class: "row" }, this.send, this.stop,
        h("button", { type: "button", onclick: () => this.repeat() }, "Again"),
        h("button", { type: "button", onclick: () => this.clear() }, "New chat")),
      this.details, this.about, this.announced);
  }

  // Shows `text` below the message. Screen readers say it unless `announce` is false.
  tell(text, { announce = true } = {}) {
    this.details.textContent = text;
    if (announce) {
      this.announced.textContent = text;
    }
  }

  // Shows the probabilities of a token, on a line of its own: the pointer may rest where the answer grows.
  tellToken(text, { announce }) {
    this.about.textContent = text;
    if (announce) {
      this.announced.textContent = text;
    }
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      this.onSubmit(event);
    }
  }

  onSubmit(event) {
    event.preventDefault();
    const text = this.input.value.trim();
    if (text && !this.running) {
      this.input.value = "";
      this.conversation.messages.push({ role: "user", content: text });
      this.ask();
    }
  }

  repeat() {
    if (this.running || !this.conversation.messages.length) {
      return;
    }
    if (this.conversation.currentAnswer) {
      this.conversation.messages.pop();
    }
    this.ask();
  }

  clear() {
    if (this.running) {
      this.running.abort();
      this.running = null;
      this.busy(false);
      // Its output would not be seen.
      this.cancelTask();
    }
    this.conversation.messages = [];
    this.conversation.pending = null;
    this.conversation.save();
    this.draw();
    this.input.focus();
  }

  async ask() {
    const key = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
    const body = { ...this.conversation.body(), metadata: { from: "page" } };
    this.conversation.pending = { key, body };
    this.isKept = this.conversation.save();
    this.atEnd = true;
    this.draw();
    await this.run((signal) => this.submit(signal));
  }

  async resume() {
    const answer = this.conversation.currentAnswer;
    if (this.conversation.pending) {
      await this.run((signal) => this.submit(signal));
    } else if (answer?.end) {
      this.tellEnd(answer, "");
    } else if (answer) {
      await this.run((signal) => this.follow(answer, signal));
    }
  }

  // `work(signal)` is the only request under way until it ends, or until the chat is cleared or left.
  async run(work) {
    const running = new AbortController();
    const signal = AbortSignal.any([running.signal, this.context.signal]);
    this.running = running;
    this.isStopped = false;
    this.busy(true);
    try {
      await work(signal);
    } catch (error) {
      if (!signal.aborted) {
        this.tell(error.message);
      }
    } finally {
      if (this.running === running) {
        this.running = null;
        this.busy(false);
      }
    }
  }

  // Sends the pending request until the service answers it, then follows its task.
  async submit(signal) {
    const { conversation } = this;
    const { key, body } = conversation.pending;
    this.tell("Waiting for the first token.");
    const pause = (error) => this.tell(`${error.message} The message is sent when it is back.`);
    let task;
    try {
      const options = { method: "POST", body, headers: { "Idempotency-Key": key }, signal, onPause: pause };
      task = await this.context.service.persistent("v1/tasks", options);
    } catch (error) {
      if (!signal.aborted) {
        conversation.pending = null;
        conversation.save();
      }
      throw error;
    }
    const answer = { role: "assistant", content: "", task: task.id };
    conversation.messages.push(answer);
    conversation.pending = null;
    conversation.save();
    this.draw();
    if (this.isStopped) {
      this.cancelTask();
    }
    await this.follow(answer, signal);
  }

  // Replays the answer from its first event: what is kept here needs no other state.
  async follow(answer, signal) {
    answer.content = "";
    this.about.textContent = "";
    const text = this.list.lastElementChild.querySelector(".text");
    text.replaceChildren();
    const started = performance.now();
    let count = 0;
    const onEvent = ({ data }) => {
      answer.content += data.text ?? "";
      if (data.text) {
        text.append(this.piece(data, text));
        this.keepInSight();
      }
      count += data.finish_reason ? 0 : 1;
      this.tell(`${count} tokens`, { announce: false });
      if (data.done) {
        answer.end = data.finish_reason;
        answer.error = data.error?.message;
      }
      return Boolean(data.done);
    };
    const onPause = (error) => this.tell(`${error.message} The answer continues when it is back.`);
    try {
      await this.context.follow(`v1/tasks/${answer.task}/events`, { signal, after: -1, onPause, onEvent });
    } catch (error) {
      if (signal.aborted || error.status === 401) {
        throw error;
      }
      // The task cannot be read any more: a reload does not ask for it again.
      answer.end = "error";
      answer.error = error.message;
    }
    if (!signal.aborted) {
      this.isKept = this.conversation.save();
      if (answer.error) {
        this.list.lastElementChild.append(h("p", { class: "error" }, answer.error));
      }
      this.tellEnd(answer, `: ${count} tokens in ${duration((performance.now() - started) / 1000)}`);
    }
  }

  piece(data, text) {
    const tell = (about, options) => this.tellToken(about, options);
    return data.logprobs ? token(data, !text.querySelector(".token"), tell) : document.createTextNode(data.text);
  }

  tellEnd(answer, measured) {
    const how = answer.end === "error" ? "ended with an error" : REASONS[answer.end] ?? `ended (${answer.end ?? "unknown"})`;
    const kept = this.isKept === false ? " This browser cannot keep the conversation: its storage is full or switched off." : "";
    this.tell(`The answer ${how}${measured}.${kept}`);
  }

  busy(is) {
    this.stop.hidden = !is;
    this.send.disabled = is;
  }

  cancel() {
    if (this.conversation.pending) {
      this.isStopped = true;
      this.tell("Stops as soon as the service has answered.");
    } else {
      this.cancelTask();
    }
  }

  async cancelTask() {
    const answer = this.conversation.currentAnswer;
    try {
      if (answer) {
        await this.context.fetch(`v1/tasks/${answer.task}/cancel`, { method: "POST" });
      }
    } catch (error) {
      this.tell(error.message);
    }
  }

  // Pixels by which the end of the conversation is below what can be seen.
  beyond() {
    return this.list.getBoundingClientRect().bottom - Math.min(this.form.getBoundingClientRect().top, innerHeight);
  }

  keepInSight() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      const beyond = this.beyond();
      if (this.atEnd && beyond > 0) {
        scrollBy(0, beyond);
      }
    });
  }

  draw() {
    const items = this.conversation.messages.map((message) => h("li", { class: `message ${message.role}` },
      h("h3", {}, message.role === "user" ? "You" : "Model", " ",
        message.task ? h("a", { href: `#/tasks/${message.task}` }, "Task") : null),
      h("div", { class: "text", onkeydown: moveAmongTokens }, message.content),
      message.error ? h("p", { class: "error" }, message.error) : null));
    this.about.textContent = "";
    this.list.replaceChildren(...items);
    this.list.hidden = !items.length;
    this.keepInSight();
    if (!items.length) {
      this.tell("Write a message to start. The conversation stays in this browser.");
    }
  }
}
