// Time and FLOPs against resolution: counted at once, timed while nothing else is asked for.

import { json } from "./api.js";

const SVG = document.querySelector("#pane").content.querySelector("svg").namespaceURI;
const HEIGHT = 128; // px; below: the space around the plot
const [TOP, RIGHT, BOTTOM, LEFT] = [22, 14, 17, 34];
const TICKS = [256, 512, 768, 1024];

export const number = (value, digits = 3) => {
  const rounded = Number(value.toPrecision(digits));
  return rounded.toLocaleString("en", { maximumFractionDigits: 2, minimumFractionDigits: rounded < 10 ? 1 : 0 });
};
export const time = (seconds) => (seconds < 1 ? `${number(1000 * seconds)} ms` : `${number(seconds)} s`);

// What a model and the dense ViT of its size cost at each resolution; times come one size after the other.
export class Scaling {
  static #known = new Map();
  static #page = Math.random().toString(36).slice(2);
  static #begun;
  static #beginning = new Promise((resolve) => (Scaling.#begun = resolve));

  // From now on sizes are timed: before, the first picture would wait for them.
  static begin() {
    Scaling.#begun();
  }

  static of(model, changed) {
    if (!Scaling.#known.has(model)) Scaling.#known.set(model, new Scaling(model, changed));
    return Scaling.#known.get(model);
  }

  // Measure those of `models`, and stop measuring others.
  static measure(models) {
    for (const [model, scaling] of Scaling.#known) {
      if (models.includes(model)) scaling.#run();
      else scaling.#stop();
    }
  }

  constructor(model, changed) {
    Object.assign(this, { model, changed, counted: null, seconds: new Map(), limited: false });
  }

  get measuring() {
    return Boolean(this.controller);
  }

  #stop() {
    this.controller?.abort();
    this.controller = null;
  }

  async #run() {
    if (this.controller || this.finished) return;
    this.controller = new AbortController();
    const { signal } = this.controller;
    const query = `model=${encodeURIComponent(this.model)}`;
    try {
      this.counted ??= await json(`api/scaling?${query}`, { signal });
      this.changed();
      await Scaling.#beginning;
      if (signal.aborted) return;
      for (const size of this.counted.timed_sizes) {
        if (this.seconds.has(size)) continue;
        this.limited = this.#expect(size) > this.counted.max_seconds;
        if (this.limited) break;
        const headers = { "X-Veca-Pane": `${Scaling.#page}-${this.model.replace(/[^0-9A-Za-z]/g, "-").slice(0, 32)}` };
        const { seconds } = await json(`api/scaling/times?${query}&size=${size}`, { signal, headers });
        this.seconds.set(size, seconds);
        this.changed();
      }
      this.finished = true;
    } catch (error) {
      if (signal.aborted) return; // another model was chosen
      this.finished = true; // the table says what is wrong, if anything
    } finally {
      if (this.controller?.signal === signal) this.controller = null;
      this.changed();
    }
  }

  // Seconds that measuring a size is expected to take: to warm up and at least once more.
  #expect(size) {
    const last = [...this.seconds.keys()].at(-1);
    if (!last) return 0;
    const total = this.seconds.get(last).reduce((sum, seconds) => sum + (seconds ?? 0), 0);
    return 2 * total * this.#growth(last, size);
  }

  #growth(from, to) {
    const { sizes, lines } = this.counted;
    const flops = lines.at(-1).gflops; // of the dense ViT, which grow fastest
    return flops[sizes.indexOf(to)] / flops[sizes.indexOf(from)];
  }

  // Seconds expected of one pass at a size; null before any was timed.
  expectPass(size) {
    const near = [...this.seconds.keys()].reduce((a, b) => (a && Math.abs(a - size) <= Math.abs(b - size) ? a : b), null);
    return near ? this.seconds.get(near)[0] * (size / near) ** 2 : null;
  }

  // The lines of a chart: of each its name, its class, and points [size, value].
  lines(kind) {
    if (!this.counted) return [];
    const { sizes, lines } = this.counted;
    return lines.map(({ cores, width, gflops }, i) => ({
      name: this.#name(i),
      kind: cores === null ? "dense" : width < lines[0].width ? "veca narrow" : i ? "veca few" : "veca",
      points: kind === "flops"
        ? sizes.map((size, k) => [size, gflops[k]])
        : [...this.seconds].filter(([, seconds]) => seconds[i] !== null).map(([size, seconds]) => [size, 1000 * seconds[i]]),
    }));
  }

  #name(i) {
    const { cores, width } = this.counted.lines[i];
    if (cores === null) return "dense ViT";
    const share = width < this.counted.lines[0].width ? `, ${Math.round(100 * width)} % MLP` : "";
    return `${i ? "" : "VECA, "}C = ${cores}${share}`;
  }
}

function element(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Two to four steps of a round number up to `most`, and 0.
function ticks(most) {
  const unit = 10 ** Math.floor(Math.log10(most / 4));
  const step = unit * [1, 2, 2.5, 5, 10].find((factor) => most / (factor * unit) <= 4);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

// Draw lines into an <svg>; `size` is the resolution that is shown now.
export function drawChart(svg, title, lines, size, dots) {
  const width = Math.max(120, svg.clientWidth);
  const most = Math.max(0, ...lines.flatMap(({ points }) => points.map(([, y]) => y)));
  const [from, to] = [128, 1024];
  const x = (value) => LEFT + ((value - from) / (to - from)) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value / (1.05 * most || 1)) * (HEIGHT - TOP - BOTTOM);
  const text = (at, anchor, content, kind = "") => element("text", { x: at[0], y: at[1], "text-anchor": anchor, class: kind }, content);
  const parts = [text([0, 11], "start", title, "title")];
  for (const tick of most ? ticks(most) : [0]) {
    parts.push(element("path", { class: "grid", d: `M${LEFT} ${y(tick)}H${width - RIGHT}` }));
    parts.push(text([LEFT - 6, y(tick) + 3.5], "end", tick.toLocaleString("en")));
  }
  for (const tick of TICKS) if (width > 260 || tick !== 768) parts.push(text([x(tick), HEIGHT - 3], "middle", String(tick)));
  parts.push(element("path", { class: "here", d: `M${x(size)} ${TOP - 4}V${HEIGHT - BOTTOM}` }));
  for (const { kind, name, points } of lines.toReversed()) {
    const path = points.map(([a, b]) => `${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("L");
    if (points.length > 1) parts.push(element("path", { class: `line ${kind}`, d: `M${path}` }));
    if (!dots) continue;
    for (const [a, b] of points) {
      const label = element("title", {}, `${name}: ${number(b)} at ${a} px`);
      parts.push(element("circle", { class: `dot ${kind}`, cx: x(a), cy: y(b), r: 2.6 }, label));
    }
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const told = lines.map(({ name, points }) => `${name} ${points.map(([a, b]) => `${number(b)} at ${a} px`).join(", ") || "not measured yet"}`);
  svg.setAttribute("aria-label", `${title} of one square picture by resolution: ${told.join("; ")}`);
  svg.replaceChildren(...parts);
}

// The resolution under the cursor.
export function sizeAt(svg, event, sizes) {
  const box = svg.getBoundingClientRect();
  const value = 128 + ((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT)) * (1024 - 128);
  return sizes.reduce((a, b) => (Math.abs(a - value) <= Math.abs(b - value) ? a : b));
}
