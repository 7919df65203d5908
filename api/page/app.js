// The page: its views, the dialog for the API key, and the state of the service.

import * as chat from "./chat.js";
import { h } from "./elements.js";
import * as flow from "./flow.js";
import * as health from "./health.js";
import { Service, sleep } from "./service.js";
import * as tasks from "./tasks.js";

const VIEWS = { chat: [chat, "Chat"], tasks: [tasks, "Tasks"], flow: [flow, "Flow"], health: [health, "Health"] };
const CHECK_MILLISECONDS = 5000;

const main = document.querySelector("main");
const nav = document.querySelector("nav");
const state = document.querySelector("#service");
const service = new Service(askForKey);
let leave = null;

function askForKey(reason) {
  const dialog = document.querySelector("#key");
  const form = dialog.querySelector("form");
  if (reason) {
    dialog.querySelector("#key-reason").textContent = reason;
  }
  form.reset();
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      // Escape closes it without a key.
      resolve(dialog.returnValue === "use" ? form.elements.key.value : "");
    }, { once: true });
  });
}

function show() {
  const [name, ...rest] = location.hash.slice(2).split("/");
  const view = Object.hasOwn(VIEWS, name) ? name : "chat";
  leave?.();
  const ending = new AbortController();
  main.replaceChildren();
  for (const link of nav.children) {
    if (link.dataset.view === view) {
      link.setAttribute("aria-current", "page");
    } else {
      link.removeAttribute("aria-current");
    }
  }
  const [module, title] = VIEWS[view];
  document.title = `${title} · Tokenmill`;
  const unmount = module.mount(main, {
    service,
    fetch: (path, options) => service.json(path, options),
    follow: (path, options) => service.follow(path, options),
    signal: ending.signal,
    rest,
    navigate: (hash) => {
      location.hash = hash;
    },
  });
  leave = () => {
    ending.abort();
    unmount?.();
  };
}

async function watch() {
  for (;;) {
    let text;
    try {
      const response = await fetch("readyz");
      const body = await response.json();
      const loading = body.workers?.find((worker) => worker.state === "loading");
      text = response.ok ? `Ready: ${body.model}` : loading ? `Loading: ${loading.detail}` : body.detail;
    } catch {
      text = "The service does not answer. Trying again.";
    }
    if (state.textContent !== text) {
      state.textContent = text;
    }
    await sleep(CHECK_MILLISECONDS);
  }
}

nav.append(...Object.entries(VIEWS).map(([name, [, title]]) => h("a", { href: `#/${name}`, "data-view": name }, title)));
addEventListener("hashchange", () => {
  show();
  // The element that had the focus may be gone; screen readers go on with the new view.
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});
document.querySelector(".skip").addEventListener("click", (event) => {
  // The address names the view, and stays.
  event.preventDefault();
  main.focus();
});
show();
watch();
