// Health: the queue, the workers, and charts of the time since the view was opened.

import { duration, h } from "./elements.js";
import { sleep } from "./service.js";

const PERIOD = 2000;
const KEPT = 300;
const RECENT = 50;

export function mount(element, context) {
  const numbers = h("dl", { class: "numbers" });
  const workers = h("tbody");
  const note = h("p", { class: "error", role: "status" });
  const charts = h("div", { class: "charts" });
  element.append(h("h2", {}, "Health"), note, numbers, charts,
    h("div", { class: "panel scroll", tabindex: 0, role: "region", "aria-label": "Workers" }, h("h3", {}, "Workers"),
      h("table", {}, h("thead", {}, h("tr", {}, ["Name", "State", "Running", "Waiting", "Slots", "Detail"]
        .map((title) => h("th", { scope: "col" }, title)))), workers)));
  const series = [
    new Chart(charts, "Tasks", ["waiting", "running"], ["--waiting", "--decode"]),
    new Chart(charts, "Output tokens per second of tasks that ended", ["tokens/s"], ["--good"]),
    new Chart(charts, "Seconds to the first token, of your last tasks", ["median", "95 %"], ["--decode", "--prefill"]),
  ];
  run(context, { numbers, workers, note, series });
  return () => series.forEach((chart) => chart.destroy());
}

async function run(context, parts) {
  let before = null;
  const counter = { isServed: true };
  while (!context.signal.aborted) {
    try {
      const [queue, list, tasks, tokens] = await Promise.all([
        context.fetch("v1/queue", { signal: context.signal }),
        context.fetch("v1/workers", { signal: context.signal }),
        context.fetch(`v1/tasks?limit=${RECENT}`, { signal: context.signal }),
        outputTokens(context, counter),
      ]);
      const now = { at: performance.now() / 1000, tokens };
      draw(parts, queue, list.data);
      const first = tasks.data.map((task) => task.timings.ttft_seconds).filter((value) => value !== null).sort((a, b) => a - b);
      parts.series[0].add([queue.waiting, queue.running]);
      parts.series[1].add([before && tokens !== null ? Math.max(0, (tokens - before.tokens) / (now.at - before.at)) : null]);
      parts.series[2].add([share(first, 0.5), share(first, 0.95)]);
      before = tokens === null ? before : now;
      parts.note.textContent = "";
    } catch (error) {
      if (context.signal.aborted) {
        return;
      }
      if (error.status === 401) {
        parts.note.textContent = error.message;
        return;
      }
      parts.note.textContent = `${error.message} Trying again.`;
    }
    await sleep(PERIOD, context.signal);
  }
}

// Null if the metrics have no such counter, or if a proxy keeps them to itself, as it should.
async function outputTokens(context, counter) {
  if (!counter.isServed) {
    return null;
  }
  let response;
  try {
    response = await context.service.fetch("metrics", { signal: context.signal });
  } catch (error) {
    if (![403, 404].includes(error.status)) {
      throw error;
    }
    counter.isServed = false;
    return null;
  }
  const lines = (await response.text()).split("\n").filter((line) => line.startsWith("tokenmill_tasks_completion_tokens_total"));
  return lines.length ? lines.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0) : null;
}

function share(sorted, part) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))] : null;
}

function draw({ numbers, workers }, queue, list) {
  const values = [
    ["Waiting tasks", queue.waiting],
    ["Running tasks", queue.running],
    ["Waiting tokens", queue.waiting_tokens],
    ["Oldest waits", duration(queue.oldest_seconds)],
    ["Ready workers", queue.ready_workers],
    ["Tokens per second", queue.drain_tokens_per_second === null ? "–" : Math.round(queue.drain_tokens_per_second)],
  ];
  numbers.replaceChildren(...values.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
  const rows = list.map((worker) => h("tr", {}, [worker.name, worker.state, worker.running, worker.waiting,
    worker.max_num_seqs, worker.detail || "–"].map((value) => h("td", {}, String(value)))));
  workers.replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td", { colspan: 6 }, "No worker runs. Tasks are accepted and wait."))]));
}

class Chart {
  constructor(parent, title, names, colours) {
    this.data = [[], ...names.map(() => [])];
    this.values = names.map(() => h("span"));
    this.summary = h("p", { class: "muted legend" },
      names.map((label, index) => h("span", {}, h("i", { class: `line ${colours[index].slice(2)}` }), `${label}: `, this.values[index])));
    this.canvas = h("div", { "aria-hidden": "true" });
    this.element = h("section", { class: "chart", "aria-label": title }, h("h3", {}, title), this.canvas, this.summary);
    parent.append(this.element);
    // Read at each drawing, since light and dark may change.
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => () => css.getPropertyValue(name);
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 } };
    this.plot = new globalThis.uPlot({
      width: 300,
      height: 160,
      legend: { show: false },
      cursor: { show: false },
      scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(1, high ?? 1)] } },
      axes: [{ ...axis, incrs: [5, 10, 30, 60, 120, 300] }, axis],
      series: [{}, ...names.map((label, index) => ({ label, stroke: colour(colours[index]), width: 2 }))],
    }, this.data, this.canvas);
    this.observer = new ResizeObserver(() => this.plot.setSize({ width: this.canvas.clientWidth, height: 160 }));
    this.observer.observe(this.canvas);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => this.plot.redraw(false, true);
    this.scheme.addEventListener("change", this.recolour);
  }

  add(values) {
    this.data[0].push(Date.now() / 1000);
    values.forEach((value, index) => this.data[index + 1].push(value));
    if (this.data[0].length > KEPT) {
      this.data.forEach((column) => column.shift());
    }
    this.plot.setData(this.data);
    values.forEach((value, index) => {
      this.values[index].textContent = value === null ? "–" : Math.round(100 * value) / 100;
    });
  }

  destroy() {
    this.observer.disconnect();
    this.scheme.removeEventListener("change", this.recolour);
    this.plot.destroy();
  }
}
