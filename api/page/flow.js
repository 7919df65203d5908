// The flow view: one column for each engine step, one lane for each sequence.

const STATES = ["waiting", "prefill", "decode", "preempted"];
const REASONS = {
  token_budget: "the step's token budget is spent",
  seq_budget: "all slots are taken",
  prefill_budget: "as many prompts as allowed are in prefill",
  kv_blocks: "too few free KV blocks",
  prefill_reserve: "decoding leaves this share of the step to prompts",
  grammar: "its grammar is being compiled",
  sibling: "the first output of its request computes their prompt",
  behind: "it is behind others in the queue",
};
const MAX_STEPS = 2000;
const COLUMN = 4;
const SUMMARY_MS = 5000;
const CALM_MS = 1000; // Interval of redraws with reduced motion.
const MIN_ROWS = 8;
const MAX_LISTED = 50;

/** Show the steps of a worker in `element`. Returns a function that removes the view. */
export function mount(element, context) {
  const view = new FlowView(element, context);
  view.start();
  return () => view.close();
}

/** Assigns each sequence a row for as long as it exists. Free rows are used again, lowest first. */
export class Rows {
  constructor() {
    this.byLane = new Map();
    this.taken = [];
  }

  place(lanes) {
    const keys = keysOf(lanes);
    const present = new Set(keys);
    for (const [key, row] of this.byLane) {
      if (!present.has(key)) {
        this.byLane.delete(key);
        this.taken[row] = false;
      }
    }
    return keys.map((key) => this.rowOf(key));
  }

  rowOf(key) {
    let row = this.byLane.get(key);
    if (row === undefined) {
      row = this.taken.indexOf(false);
      if (row < 0) row = this.taken.length;
      this.taken[row] = true;
      this.byLane.set(key, row);
    }
    return row;
  }
}

/** Lanes of other tenants have no id: they are told apart by their order. */
function keysOf(lanes) {
  let hidden = 0;
  return lanes.map((lane) => (lane.task === null ? `hidden ${hidden++}` : `${lane.task} ${lane.index}`));
}

class FlowView {
  constructor(element, context) {
    this.element = element;
    this.context = context;
    this.steps = [];
    this.rows = new Rows();
    this.numRows = MIN_ROWS;
    this.pending = 0;
    this.isPaused = false;
    this.place = null; // Index of the selected step; null: the newest.
    this.needsAll = true;
    this.frame = 0;
    this.timer = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.summarizedAt = -SUMMARY_MS;
    this.frameMs = [];
    this.closing = new AbortController();
    this.following = null;
  }

  start() {
    this.build();
    const signal = this.closing.signal;
    this.observer = new ResizeObserver(() => this.redraw());
    this.observer.observe(this.root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw(), { signal });
    this.loadWorkers();
    window.tokenmillFlow = this;
  }

  close() {
    this.closing.abort();
    this.following?.abort();
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.root.remove();
    if (window.tokenmillFlow === this) delete window.tokenmillFlow;
  }

  build() {
    const link = make("link", { rel: "stylesheet", href: new URL("flow.css", import.meta.url).href });
    link.addEventListener("load", () => this.redraw());
    this.worker = make("select");
    this.pause = make("button", { type: "button", textContent: "Pause" });
    this.slider = make("input", { type: "range", min: 0, max: 0, step: 1, value: 0 });
    this.lanes = make("canvas", { className: "flow-lanes", tabIndex: 0 });
    this.lanes.setAttribute("role", "img");
    this.lanes.setAttribute("aria-label", "Sequences by step. The text below says the same.");
    this.tokens = make("canvas", { className: "flow-tokens" });
    this.blocks = make("canvas", { className: "flow-blocks" });
    for (const strip of [this.tokens, this.blocks]) strip.setAttribute("aria-hidden", "true");
    this.budget = make("figcaption", { textContent: "Token budget" });
    this.pool = make("figcaption", { textContent: "KV blocks" });
    this.detail = make("p", { className: "flow-detail" });
    this.summary = make("p", { className: "flow-hidden" });
    this.summary.setAttribute("aria-live", "polite");
    this.waiting = make("ul", { className: "flow-waiting-list", tabIndex: 0 });
    this.waiting.setAttribute("aria-label", "Waiting requests");
    this.title = make("h2", { textContent: "Waiting requests" });
    this.root = make("section", { className: "flow" }, [
      link,
      make("div", { className: "flow-bar" }, [
        make("label", {}, ["Worker", this.worker]),
        this.pause,
        make("label", { className: "flow-scrub" }, ["Step", this.slider]),
      ]),
      this.legend(),
      make("figure", {}, [make("figcaption", { textContent: "Sequences, one column per step" }), this.lanes]),
      make("figure", {}, [this.budget, this.tokens]),
      make("figure", {}, [this.pool, this.blocks]),
      this.detail,
      this.title,
      this.waiting,
      this.summary,
    ]);
    this.listen();
    this.element.append(this.root);
  }

  legend() {
    const names = [...STATES, ["used", "KV in use"], ["cached", "KV cached"], ["ground", null]];
    this.swatches = {};
    const items = names.map((one) => {
      const [name, text] = Array.isArray(one) ? one : [one, one];
      this.swatches[name] = make("span", { className: `flow-swatch ${name}` });
      return text ? make("li", {}, [this.swatches[name], text]) : make("li", { hidden: true }, [this.swatches[name]]);
    });
    return make("ul", { className: "flow-legend" }, items);
  }

  listen() {
    this.pause.addEventListener("click", () => this.setPaused(!this.isPaused));
    this.worker.addEventListener("change", () => this.follow(this.worker.value));
    this.slider.addEventListener("input", () => this.select(Number(this.slider.value)));
    this.lanes.addEventListener("keydown", (event) => this.onKey(event));
    this.lanes.addEventListener("pointermove", (event) => this.point(event));
    this.lanes.addEventListener("click", (event) => {
      const lane = this.laneAt(event);
      if (lane?.task) this.context.navigate(`#/tasks/${lane.task}`);
    });
  }

  async loadWorkers() {
    try {
      const { data } = await this.context.fetch("v1/workers", { signal: this.closing.signal });
      this.worker.replaceChildren(...data.map(({ name }) => make("option", { value: name, textContent: name })));
      if (data.length) this.follow(data[0].name);
      else this.detail.textContent = "No worker runs. This view starts with the first one: reload it then.";
    } catch (error) {
      if (!this.closing.signal.aborted) this.detail.textContent = `The workers cannot be listed: ${error.message}`;
    }
  }

  follow(name) {
    this.following?.abort();
    this.following = new AbortController();
    this.steps = [];
    this.rows = new Rows();
    this.numRows = MIN_ROWS;
    this.place = null;
    this.setPaused(false);
    this.redraw();
    const { signal } = this.following;
    this.context.follow(`v1/workers/${encodeURIComponent(name)}/steps`, {
      signal,
      onEvent: ({ name: kind, data }) => {
        if (kind === "step") this.add(data);
      },
    }).catch((error) => {
      if (!signal.aborted) this.detail.textContent = `The steps cannot be read: ${error.message}`;
    });
  }

  add(step) {
    step.rows = this.rows.place(step.lanes);
    const numRows = step.rows.reduce((most, row) => Math.max(most, row + 1), 0);
    while (this.numRows < numRows) {
      this.numRows *= 2;
      this.needsAll = true;
    }
    this.steps.push(step);
    this.pending += 1;
    if (this.steps.length > MAX_STEPS) {
      this.steps.shift();
      if (this.place !== null) this.place = Math.max(0, this.place - 1);
    }
    if (!this.isPaused) this.schedule();
  }

  setPaused(isPaused) {
    this.isPaused = isPaused;
    this.pause.textContent = isPaused ? "Resume" : "Pause";
    this.pause.setAttribute("aria-pressed", String(isPaused));
    if (isPaused) this.place ??= this.steps.length - 1;
    else this.place = null;
    this.redraw();
  }

  select(place) {
    if (!this.steps.length) return;
    if (!this.isPaused) this.setPaused(true);
    this.place = Math.min(Math.max(place, 0), this.steps.length - 1);
    this.redraw();
  }

  onKey(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
    const last = this.steps.length - 1;
    if (event.key in moves) this.select((this.place ?? last) + moves[event.key]);
    else if (event.key === " ") this.setPaused(!this.isPaused);
    else return;
    event.preventDefault();
  }

  /** The newest step that is shown. */
  get shown() {
    return this.place ?? this.steps.length - 1;
  }

  redraw() {
    this.needsAll = true;
    this.schedule();
  }

  schedule() {
    if (this.frame || this.timer || this.closing.signal.aborted) return;
    const isDue = this.isPaused || this.needsAll || !this.calm.matches;
    if (isDue) this.frame = requestAnimationFrame(() => this.draw());
    else this.timer = setTimeout(() => this.wake(), CALM_MS);
  }

  wake() {
    this.timer = 0;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const began = performance.now();
    if (this.needsAll) this.prepare();
    const columns = Math.floor(this.width / COLUMN);
    const count = Math.min(this.needsAll ? columns : this.pending, columns, this.shown + 1);
    if (!this.needsAll) this.shift(Math.min(this.pending, columns));
    for (let back = count - 1; back >= 0; back -= 1) this.drawColumn(this.steps[this.shown - back], back);
    this.needsAll = false;
    this.pending = 0;
    this.describe();
    this.frameMs.push(performance.now() - began);
    if (this.frameMs.length > 600) this.frameMs.shift();
  }

  prepare() {
    this.colors = {};
    for (const [name, swatch] of Object.entries(this.swatches)) {
      this.colors[name] = getComputedStyle(swatch).backgroundColor;
    }
    const scale = devicePixelRatio || 1;
    this.pens = [this.lanes, this.tokens, this.blocks].map((canvas) => {
      canvas.width = Math.max(1, Math.round(canvas.clientWidth * scale));
      canvas.height = Math.max(1, Math.round(canvas.clientHeight * scale));
      const pen = canvas.getContext("2d", { alpha: false });
      pen.fillStyle = this.colors.ground;
      pen.fillRect(0, 0, canvas.width, canvas.height);
      return pen;
    });
    this.scale = scale;
    this.width = this.lanes.clientWidth;
  }

  shift(columns) {
    const distance = Math.round(columns * COLUMN * this.scale);
    for (const pen of this.pens) pen.drawImage(pen.canvas, -distance, 0);
  }

  drawColumn(step, back) {
    const wide = Math.round(COLUMN * this.scale);
    const left = this.pens[0].canvas.width - (back + 1) * wide;
    for (const pen of this.pens) {
      pen.fillStyle = this.colors.ground;
      pen.fillRect(left, 0, wide, pen.canvas.height);
    }
    const pen = this.pens[0];
    const high = pen.canvas.height / this.numRows;
    const gap = high > 4 * this.scale ? this.scale : 0;
    for (const state of STATES) {
      pen.fillStyle = this.colors[state];
      step.lanes.forEach((lane, place) => {
        if (lane.state !== state) return;
        const top = Math.round(step.rows[place] * high);
        const bottom = Math.round((step.rows[place] + 1) * high);
        pen.fillRect(left, top, wide - (gap && 1), Math.max(1, bottom - top - gap));
      });
    }
    const { budget, kv } = step;
    this.bar(this.pens[1], left, wide, budget.used / budget.tokens, 0, "decode");
    const used = kv.used / kv.total;
    this.bar(this.pens[2], left, wide, used, 0, "used");
    this.bar(this.pens[2], left, wide, (kv.cached ?? 0) / kv.total, used, "cached");
  }

  bar(pen, left, wide, share, base, color) {
    if (!(share > 0)) return;
    const { height } = pen.canvas;
    pen.fillStyle = this.colors[color];
    const high = Math.max(1, Math.round(share * height));
    pen.fillRect(left, height - Math.round(base * height) - high, wide, high);
  }

  laneAt(event) {
    const box = this.lanes.getBoundingClientRect();
    const back = Math.floor((box.right - event.clientX) / COLUMN);
    const step = this.steps[this.shown - back];
    if (!step) return null;
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.numRows);
    const place = step.rows.indexOf(row);
    return place < 0 ? null : { ...step.lanes[place], step: step.step };
  }

  point(event) {
    const lane = this.laneAt(event);
    if (!lane) return;
    const what = lane.state === "prefill" || lane.state === "decode" ? `${lane.state}, ${lane.tokens} tokens` : lane.state;
    this.detail.replaceChildren(
      `Step ${lane.step}: ${what}${lane.reason ? ` (${reasonOf(lane)})` : ""}, `,
      nameOf(lane),
    );
  }

  /** Text of the shown step. The lists are written at most a few times per second. */
  describe() {
    const step = this.steps[this.shown];
    const last = Math.max(0, this.steps.length - 1);
    this.slider.max = last;
    this.slider.value = this.shown;
    this.root.dataset.steps = this.steps.length;
    this.root.dataset.paused = this.isPaused;
    if (!step) return;
    this.root.dataset.step = step.step;
    this.root.dataset.lanes = step.lanes.length;
    this.slider.setAttribute("aria-valuetext", `step ${step.step}`);
    this.budget.textContent =
      `Token budget: ${step.budget.used} of ${step.budget.tokens} tokens, ` +
      `${step.budget.seqs} of ${step.budget.max_seqs} sequences`;
    this.pool.textContent = `KV blocks: ${step.kv.used} of ${step.kv.total} in use, ${step.kv.cached ?? 0} cached`;
    const now = performance.now();
    if (this.isPaused || now - (this.listedAt ?? -Infinity) > 250) {
      this.listedAt = now;
      this.list(step);
    }
    if (now - this.summarizedAt > SUMMARY_MS) {
      this.summarizedAt = now;
      this.summary.textContent = summaryOf(step);
    }
  }

  list(step) {
    const lanes = step.lanes.filter((lane) => lane.state === "waiting" || lane.state === "preempted");
    const total = step.waiting ?? lanes.length;
    this.title.textContent = `Waiting requests (${total})`;
    const items = lanes.slice(0, MAX_LISTED).map((lane) => make("li", {}, [nameOf(lane), `: ${reasonOf(lane)}`]));
    if (lanes.length < total || lanes.length > MAX_LISTED) {
      const counts = Object.entries(step.waiting_reasons ?? {}).filter(([, number]) => number);
      const text = counts.map(([reason, number]) => `${number}: ${REASONS[reason] ?? reason}`).join("; ");
      items.push(make("li", { textContent: `All: ${text}` }));
    }
    if (!items.length) items.push(make("li", { textContent: "No request waits." }));
    this.waiting.replaceChildren(...items);
  }
}

function nameOf(lane) {
  if (lane.task === null) return "a task of another tenant";
  return make("a", { href: `#/tasks/${lane.task}`, textContent: lane.index ? `${lane.task} [${lane.index}]` : lane.task });
}

function reasonOf(lane) {
  const reason = REASONS[lane.reason] ?? lane.reason ?? "left out of this step";
  return lane.state === "preempted" ? `preempted; ${reason}` : reason;
}

function summaryOf(step) {
  const numbers = STATES.map((state) => `${step.lanes.filter((lane) => lane.state === state).length} ${state}`);
  return `Step ${step.step}: ${numbers.join(", ")}. ${step.budget.used} of ${step.budget.tokens} tokens.`;
}

function make(name, properties = {}, children = []) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}
