// The parameters of the chat, and its last request as a command.

import { asCurl, asPython } from "./conversation.js";
import { h } from "./elements.js";

const FIELDS = [
  ["max_tokens", "Longest answer, in tokens", { type: "number", min: 1, step: 1 }],
  ["temperature", "Temperature", { type: "number", min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { type: "number", min: 0.05, max: 1, step: 0.05 }],
  ["seed", "Seed (empty: random)", { type: "number", min: 0, step: 1 }],
];

// `tell(text)` shows what became of a copy.
export function parametersPanel(conversation, service, tell) {
  const set = (name, value) => {
    conversation.parameters[name] = value;
    conversation.save();
  };
  const inputs = FIELDS.map(([name, title, attributes]) => h("label", {}, title, h("input", {
    ...attributes, name, value: conversation.parameters[name],
    onchange: (event) => set(name, event.target.value === "" ? "" : Number(event.target.value)),
  })));
  const system = h("textarea", { rows: 3, name: "system", onchange: (event) => {
    conversation.system = event.target.value;
    conversation.save();
  } });
  system.value = conversation.system;
  const logprobs = h("input", { type: "checkbox", name: "logprobs", onchange: (event) => set("logprobs", event.target.checked) });
  logprobs.checked = conversation.parameters.logprobs;
  const shown = h("textarea", { rows: 6, readonly: true, hidden: true, "aria-label": "The request as a command" });
  const button = (title, write) => h("button", { type: "button", onclick: () => {
    if (conversation.messages.length) {
      copy(write(conversation.body(), new URL(".", document.baseURI).href, service.hasKey), shown, tell);
    } else {
      tell("Write a message first: its request is copied.");
    }
  } }, title);
  return h("aside", { class: "panel parameters", "aria-label": "Parameters" }, h("h3", {}, "Parameters"),
    h("label", {}, "System prompt", system), inputs,
    h("label", { class: "inline" }, logprobs, "Probabilities of the tokens"),
    h("div", { class: "row" }, button("Copy as curl", asCurl), button("Copy as Python", asPython)), shown);
}

// Without access to the clipboard (a page without TLS, for example) the text is shown to be copied by hand.
async function copy(text, shown, tell) {
  try {
    await navigator.clipboard.writeText(text);
    shown.hidden = true;
    tell("Copied.");
  } catch {
    shown.hidden = false;
    shown.value = text;
    shown.focus();
    shown.select();
    tell("This browser does not let the page copy. The text is selected: copy it.");
  }
}
