// Tokens with their probabilities: one stop of the Tab key, and the arrow keys move among them.

import { h } from "./elements.js";

const MOVES = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -Infinity, End: Infinity };

// `tell(text, {announce})` shows the probabilities of the token, and says them to screen readers if `announce`.
export function token({ text, logprobs }, isFirst, tell) {
  const likeliest = logprobs.top.map(describe).join(", ");
  const about = `${describe(logprobs)}. Likeliest: ${likeliest}`;
  return h("span", {
    class: "token",
    tabindex: isFirst ? 0 : -1,
    title: likeliest,
    onmouseenter: () => tell(about, { announce: false }),
    onfocus: () => tell(about, { announce: true }),
  }, text);
}

// Handles a key pressed within the element that contains the tokens.
export function moveAmongTokens(event) {
  const tokens = [...event.currentTarget.querySelectorAll(".token")];
  const from = tokens.indexOf(event.target);
  if (from < 0 || !Object.hasOwn(MOVES, event.key)) {
    return;
  }
  event.preventDefault();
  const to = Math.min(Math.max(from + MOVES[event.key], 0), tokens.length - 1);
  tokens[from].tabIndex = -1;
  tokens[to].tabIndex = 0;
  tokens[to].focus();
}

function describe({ token: text, logprob }) {
  return `“${text}” ${(100 * Math.exp(logprob)).toFixed(1)} %`;
}
