// Tasks: the list with filters, and one task with its timeline.

import { duration, h, status, time } from "./elements.js";
import { format } from "./json.js";
import { sleep } from "./service.js";

const STATES = ["", "queued", "in_progress", "completed", "failed", "cancelled"];
const ENDED = ["completed", "failed", "cancelled"];
const PAGE = 20;
const WAIT_SECONDS = 20;

export function mount(element, context) {
  if (context.rest[0]) {
    showTask(element, context, context.rest[0]);
  } else {
    showList(element, context);
  }
}

function showList(element, context) {
  const pages = [""];
  const rows = h("tbody");
  const note = h("p", { class: "muted", role: "status" });
  const choice = h("select", { name: "status", onchange: () => { pages.length = 1; load(); } },
    STATES.map((name) => h("option", { value: name }, name ? name.replace("_", " ") : "all")));
  const newer = h("button", { type: "button", disabled: true, onclick: () => { pages.pop(); load(); } }, "Newer");
  const older = h("button", { type: "button", disabled: true, onclick: () => { pages.push(older.dataset.next); load(); } }, "Older");

  let loading = new AbortController();

  async function load() {
    // A reply that comes late does not replace the list of a newer choice.
    loading.abort();
    loading = new AbortController();
    const signal = AbortSignal.any([loading.signal, context.signal]);
    const query = new URLSearchParams({ limit: PAGE });
    if (choice.value) {
      query.set("status", choice.value);
    }
    if (pages.at(-1)) {
      query.set("after", pages.at(-1));
    }
    try {
      const list = await context.fetch(`v1/tasks?${query}`, { signal });
      rows.replaceChildren(...list.data.map(row));
      older.dataset.next = list.next ?? "";
      older.disabled = !list.has_more;
      newer.disabled = pages.length === 1;
      const empty = list.has_more ? "None in this part. Older ones may follow." : "No tasks.";
      note.textContent = list.data.length ? `${list.data.length} tasks, newest first.` : empty;
    } catch (error) {
      if (!signal.aborted) {
        note.textContent = error.message;
      }
    }
  }

  element.append(
    h("h2", {}, "Tasks"),
    h("div", { class: "row" }, h("label", {}, "Status", choice),
      h("button", { type: "button", onclick: load }, "Refresh"), newer, older),
    note,
    h("div", { class: "panel scroll", tabindex: 0, role: "region", "aria-label": "List of tasks" },
      h("table", {}, h("thead", {}, h("tr", {}, ["Task", "Status", "Created", "Tokens", "First token", "Total"]
        .map((title) => h("th", { scope: "col" }, title)))), rows)));
  load();
}

function row(task) {
  return h("tr", {},
    h("td", {}, h("a", { href: `#/tasks/${task.id}` }, task.id.slice(0, 16))),
    h("td", {}, status(task)),
    h("td", {}, time(task.created_at)),
    h("td", {}, task.usage ? `${task.usage.prompt_tokens} + ${task.usage.completion_tokens}` : "–"),
    h("td", {}, duration(task.timings.ttft_seconds)),
    h("td", {}, duration(task.timings.total_seconds)));
}

async function showTask(element, context, id) {
  const body = h("div", { "aria-live": "off" });
  const note = h("p", { class: "error", role: "status" });
  const address = `v1/tasks/${encodeURIComponent(id)}`;
  const act = async (path, method) => {
    try {
      await context.fetch(path, { method });
      if (method === "DELETE") {
        context.navigate("#/tasks");
      }
    } catch (error) {
      note.textContent = error.message;
    }
  };
  const cancel = h("button", { type: "button", hidden: true, onclick: () => act(`${address}/cancel`, "POST") }, "Cancel");
  const remove = h("button", { type: "button", hidden: true, onclick: () => act(address, "DELETE") }, "Delete");
  element.append(h("p", {}, h("a", { href: "#/tasks" }, "All tasks")), h("h2", {}, `Task ${id}`),
    h("div", { class: "row" }, cancel, remove), note, body);
  let wait = 0;
  let lost = "";
  while (!context.signal.aborted) {
    try {
      const task = await context.fetch(`${address}?include=prompt&wait=${wait}`, { signal: context.signal });
      if (note.textContent === lost) {
        note.textContent = "";
      }
      body.replaceChildren(...detail(task));
      const ended = ENDED.includes(task.status);
      cancel.hidden = ended;
      remove.hidden = !ended;
      if (ended) {
        return;
      }
      // Shows progress soon at first, then mostly the end.
      wait = Math.min(wait + 1, WAIT_SECONDS);
    } catch (error) {
      if (error.name === "AbortError") {
        return;
      }
      note.textContent = lost = error.message;
      if (error.status >= 400 && error.status < 500 && error.status !== 429) {
        cancel.hidden = remove.hidden = true;
        return;
      }
    }
    await sleep(1000, context.signal);
  }
}

function detail(task) {
  return [
    panel("State", status(task), queue(task), task.error ? h("p", { class: "error" }, task.error.message) : null),
    panel("Timeline", timeline(task)),
    ...task.outputs.map((output) => panel(task.outputs.length > 1 ? `Output ${output.index}` : "Output",
      h("pre", {}, output.text || "(nothing yet)"),
      output.finish_reason ? h("p", { class: "muted" }, `Finish reason: ${output.finish_reason}`) : null)),
    panel("Request", h("pre", {}, format(task.request, 2))),
    panel("More", facts(task)),
  ];
}

function panel(title, ...children) {
  return h("section", { class: "panel" }, h("h3", {}, title), children);
}

function queue(task) {
  if (!task.queue) {
    return null;
  }
  const { position, tokens_ahead: tokens, eta_seconds: eta, waiting_for: reason } = task.queue;
  return h("p", {}, `Waits for ${reason ?? "its turn"}; ${position ?? "?"} tasks and ${tokens ?? "?"} tokens before it`,
    eta === null ? "." : `, about ${duration(eta)}.`);
}

function timeline(task) {
  const { queue_seconds: queued, ttft_seconds: first, total_seconds: total } = task.timings;
  const moments = [
    [`Accepted ${time(task.created_at)}`, 0],
    ["First scheduled", queued],
    ["First token", first],
    [`Ended: ${task.status}`, total],
  ];
  return h("ol", { class: "timeline" }, moments.filter(([, at]) => at !== null)
    .map(([what, at]) => h("li", {}, at ? `${what} after ${duration(at)}` : what)));
}

function facts(task) {
  const usage = task.usage ?? {};
  const hook = task.webhook;
  const pairs = [
    ["Model", task.model],
    ["Priority", String(task.priority)],
    ["Prompt tokens", usage.prompt_tokens === undefined ? "–" : `${usage.prompt_tokens} (${usage.cached_tokens} cached)`],
    ["Output tokens", String(usage.completion_tokens ?? "–")],
    ["Metadata", task.metadata ? format(task.metadata) : "–"],
    ["Webhook", hook ? `${hook.state}, ${hook.attempts} attempts, last ${hook.last_status ?? hook.last_error ?? "–"}` : "–"],
  ];
  return h("dl", {}, pairs.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}
