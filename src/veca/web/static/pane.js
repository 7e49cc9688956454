// One pane: a picture at one budget, resolution and model, its maps and its numbers.

import { Latest, json, load, recall } from "./api.js";
import { bars, fit, frame, paint, similarity, stretch, tiles, way } from "./draw.js";

const MEASURE_AFTER = 500; // ms without a change

const number = (value, digits = 3) => {
  const rounded = Number(value.toPrecision(digits));
  return rounded.toLocaleString("en", { maximumFractionDigits: 2, minimumFractionDigits: rounded < 10 ? 1 : 0 });
};
const time = (seconds) => (seconds < 1 ? `${number(1000 * seconds)} ms` : `${number(seconds)} s`);

export class Pane {
  // `shared` is the state all panes have in common; `setting` is this one's. `on` is told what people do here.
  constructor(index, about, shared, setting, on) {
    Object.assign(this, { index, about, shared, setting, on });
    this.id = `${Math.random().toString(36).slice(2)}-${index}`;
    this.questions = { view: new Latest(), counts: new Latest(), measures: new Latest() };
    this.element = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    this.element.setAttribute("aria-label", `Pane ${index + 1}`);
    const find = (selector) => this.element.querySelector(selector);
    this.find = find;
    this.frames = [...this.element.querySelectorAll(".frame")];
    this.canvases = { features: find(".features canvas"), similar: find(".similar canvas"), looks: find(".looks canvas") };
    this.bars = find(".listens canvas");
    this.#controls();
    this.#pointing();
  }

  get model() {
    return this.about.models.find(({ name }) => name === this.setting.model);
  }

  get query() {
    const { model, cores, size } = this.setting;
    return new URLSearchParams({ picture: this.shared.picture.id, model, cores, size }).toString();
  }

  get grid() {
    return this.view?.colours.shape.slice(0, 2);
  }

  #controls() {
    this.element.querySelectorAll(".settings .control").forEach((control, i) => {
      const input = control.querySelector("input, select");
      input.id = `pane-${this.index}-${i}`;
      control.querySelector("label").htmlFor = input.id;
      control.querySelector("output")?.setAttribute("for", input.id);
    });
    this.choice = { model: this.find("select"), cores: this.find(".cores"), size: this.find(".size") };
    this.choice.model.append(...this.about.models.map(({ name }) => new Option(name, name)));
    this.choice.model.addEventListener("change", () => this.on.set(this, { model: this.choice.model.value }));
    this.choice.cores.addEventListener("input", () =>
      this.on.set(this, { cores: this.model.budgets[this.choice.cores.value] }));
    this.choice.size.addEventListener("input", () => this.on.set(this, { size: this.about.sizes[this.choice.size.value] }));
  }

  #pointing() {
    const at = (event, element) => {
      const box = element.getBoundingClientRect();
      const clip = (value) => Math.min(Math.max(value, 0), 0.999999);
      return [clip((event.clientX - box.left) / box.width), clip((event.clientY - box.top) / box.height)];
    };
    for (const element of this.frames) {
      element.addEventListener("pointermove", (event) => {
        if (event.pointerType === "mouse") this.on.point(at(event, element), false);
      });
      element.addEventListener("click", (event) => this.on.point(at(event, element), true));
    }
    this.frames[0].addEventListener("keydown", (event) => this.#key(event));
    const core = (event) => Math.floor(at(event, this.bars)[0] * this.setting.cores) + 1;
    this.bars.addEventListener("click", (event) => this.on.core(core(event)));
    this.bars.addEventListener("pointermove", (event) => {
      this.bars.title = `core ${core(event)}: ${this.#share(core(event) - 1)}`;
    });
  }

  #key(event) {
    const [rows, columns] = this.grid ?? [0, 0];
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const ends = { Home: 0, End: columns - 1 };
    if (!rows) return;
    let [row, column] = this.patch ?? [rows >> 1, columns >> 1];
    if (moves[event.key]) {
      column = Math.min(Math.max(column + moves[event.key][0], 0), columns - 1);
      row = Math.min(Math.max(row + moves[event.key][1], 0), rows - 1);
    } else if (event.key in ends) column = ends[event.key];
    else if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    const hold = event.key === "Enter" || event.key === " ";
    this.on.point([(column + 0.5) / columns, (row + 0.5) / rows], hold, true);
  }

  // [row, column] under the cursor.
  get patch() {
    const [rows, columns] = this.grid ?? [];
    return this.shared.at && rows ? [Math.floor(this.shared.at[1] * rows), Math.floor(this.shared.at[0] * columns)] : null;
  }

  // The core that is shown, from 0: the chosen one, or the one the patch listens to most.
  get core() {
    if (this.shared.core) return Math.min(this.shared.core, this.setting.cores) - 1;
    const parts = this.#parts();
    return parts ? parts.indexOf(Math.max(...parts)) : 0;
  }

  #parts() {
    if (!this.layer || !this.patch) return null;
    const [, columns, cores] = this.layer.profiles.shape;
    const start = (this.patch[0] * columns + this.patch[1]) * cores;
    return this.layer.profiles.data.subarray(start, start + cores);
  }

  #share(core) {
    const parts = this.#parts();
    if (!parts) return "";
    const most = this.layer.shares.data[this.patch[0] * this.layer.profiles.shape[1] + this.patch[1]];
    return `${number((100 * most * parts[core]) / 255, 2)} %`;
  }

  showSettings() {
    const { model, cores, size } = this.setting;
    this.find(".model").hidden = this.about.models.length < 2;
    this.choice.model.value = model;
    const set = (input, values, value, text) => {
      input.max = values.length - 1;
      input.value = values.indexOf(value);
      input.setAttribute("aria-valuetext", text);
      input.parentElement.querySelector("output").textContent = text;
    };
    set(this.choice.cores, this.model.budgets, cores, `${cores} core${cores > 1 ? "s" : ""}`);
    set(this.choice.size, this.about.sizes, size, `${size} px`);
    for (const form of ["safetensors", "npz"]) {
      const link = this.find(`.downloads .${form}`);
      if (this.shared.picture) link.href = `api/features?${this.query}&format=${form}`;
    }
  }

  // Asks for what the setting needs, and shows it; what is at hand is shown at once.
  async refresh() {
    this.showSettings();
    if (!this.shared.picture) return;
    const layer = Math.min(this.shared.layer, this.model.layers);
    const [view, one] = [`api/view?${this.query}`, `api/layer?${this.query}&layer=${layer}`];
    this.#numbers();
    this.element.setAttribute("aria-busy", "true");
    const options = (signal) => ({ signal, headers: { "X-Veca-Pane": this.id } });
    let found = [recall(view), recall(one)];
    if (found.every(Boolean)) this.questions.view.withdraw();
    else found = await this.questions.view.run((signal) => Promise.all([view, one].map((path) => load(path, options(signal)))));
    if (!found) return;
    [this.view, this.layer] = found;
    this.times = stretch(this.view.places);
    const [rows, columns] = this.grid;
    this.overlay = tiles(this.view.colours.data, rows, columns);
    this.element.setAttribute("aria-busy", "false");
    this.shown = { ...this.setting, layer };
    this.draw();
    this.element.dataset.shown = `${this.shared.picture.id} ${this.setting.cores} ${this.setting.size} ${layer}`;
    performance.mark("veca-shown", { detail: this.element.dataset.shown });
  }

  #cells(kind, values) {
    const texts = values ?? ["", ""];
    ["veca", "dense"].forEach((who, i) => {
      this.element.querySelector(`.numbers .${who}`).cells[kind].textContent = texts[i];
    });
  }

  async #numbers() {
    clearTimeout(this.timer);
    const query = this.query;
    this.#cells(1, ["…", "…"]);
    this.#cells(3, ["…", "…"]);
    this.timer = setTimeout(() => this.#measure(query), MEASURE_AFTER);
    try {
      const counts = await this.questions.counts.run((signal) => json(`api/counts?${query}`, { signal }));
      if (!counts) return;
      const both = [counts.veca, counts.dense];
      this.#cells(2, both.map(({ gflops }) => number(gflops)));
      this.#cells(4, both.map(({ tokens }) => tokens.toLocaleString("en")));
    } catch {
      this.#cells(2);
      this.#cells(4);
    }
  }

  async #measure(query) {
    const headers = { "X-Veca-Pane": this.id };
    try {
      const found = await this.questions.measures.run((signal) => json(`api/measures?${query}`, { signal, headers }));
      if (!found || query !== this.query) return;
      const both = [found.veca, found.dense]; // without timm the dense ViT is counted, not measured
      this.#cells(1, both.map((cost) => (cost ? time(cost.seconds) : "needs timm")));
      this.#cells(3, both.map((cost) => (cost ? `${number(cost.mebibytes, 2)} MiB` : "needs timm")));
    } catch {
      this.#cells(1);
      this.#cells(3);
    }
  }

  draw() {
    if (!this.view || !this.shared.photo) return;
    const { photo, opacity, held } = this.shared;
    const aspect = photo.width / photo.height;
    const [rows, columns] = this.grid;
    const { patch, core } = this;
    const contexts = Object.fromEntries(Object.entries(this.canvases).map(([kind, canvas]) => [kind, fit(canvas, aspect)]));
    paint(contexts.features, photo, this.overlay, opacity);
    if (patch) {
      const found = similarity(this.view.features, patch[0] * columns + patch[1]);
      paint(contexts.similar, photo, tiles(found.levels, rows, columns), opacity, 0.35);
      this.#say("similar", `${found.least.toFixed(2)} to ${found.most.toFixed(2)}`.replaceAll("-", "−"), "cosine similarity to the patch");
    } else {
      paint(contexts.similar, photo, null, 0, 0.35);
      this.#say("similar", "point at one", "no patch is chosen");
    }
    const cells = rows * columns;
    const map = this.layer.maps.data.subarray(core * cells, (core + 1) * cells);
    paint(contexts.looks, photo, tiles(map, rows, columns), opacity, 0.35);
    way(contexts.looks, this.view.places, core, this.shown.layer, this.times);
    if (patch) for (const context of Object.values(contexts)) frame(context, ...patch, rows, columns, held);
    const peak = this.layer.ranges.data[3 * core + 2];
    const longer = this.times > 1 ? `, way × ${this.times}` : ""; // drawn so much longer than it is
    this.find(".looks b").textContent = `Where core ${core + 1} looks`;
    this.#say("looks", `peak ${number(peak, 2)} × even${longer}`.replaceAll(" × ", "\u00a0×\u00a0"), `attention of core ${core + 1} over the picture`);
    this.find(".features figcaption span").textContent = `${columns} × ${rows} patches: like colours are like features`;
    this.frames[0].setAttribute("aria-label", this.#label());
    const parts = this.#parts();
    if (parts) bars(this.bars, parts, core);
    else bars(this.bars, new Uint8Array(this.setting.cores), core);
    this.find(".listens span").textContent = parts ? this.#strongest().map((c) => `${c + 1} (${this.#share(c)})`).join(", ") : "";
    this.bars.setAttribute("aria-label", this.describe());
  }

  #say(kind, text, label) {
    this.find(`.${kind} figcaption span`).textContent = text;
    this.canvases[kind].setAttribute("aria-label", `${label}: ${text}`);
  }

  #strongest() {
    const parts = this.#parts();
    return [...parts.keys()].sort((a, b) => parts[b] - parts[a]).slice(0, 3);
  }

  #label() {
    const where = this.patch ? `, patch in row ${this.patch[0] + 1}, column ${this.patch[1] + 1}` : "";
    return `Features of the picture with ${this.setting.cores} cores at ${this.setting.size} pixels${where}. Arrow keys move.`;
  }

  // What is to be heard of the patch under the cursor.
  describe() {
    if (!this.patch || !this.#parts()) return "no patch is chosen";
    const cores = this.#strongest().map((core) => `${core + 1}, ${this.#share(core)}`).join("; ");
    return `Row ${this.patch[0] + 1}, column ${this.patch[1] + 1}: listens most to cores ${cores}.`;
  }

  // For the figure that is saved.
  get summary() {
    const cell = (row, i) => this.find(`.numbers .${row}`).cells[i].textContent;
    const pairs = ["time", "GFLOPs", "memory", "tokens"].map((what, i) => [what, cell("veca", i + 1), cell("dense", i + 1)]);
    const told = pairs.filter(([, ours]) => ours && ours !== "…").map(([what, ours, dense]) => `${what} ${ours} (dense ViT ${dense})`);
    const text = (kind, part) => this.find(`.${kind} figcaption ${part}`).textContent;
    return {
      aspect: this.shared.photo.width / this.shared.photo.height,
      title: `${this.setting.model}, ${this.setting.cores} cores, ${this.setting.size} px, layer ${this.shown.layer}`,
      numbers: told.join("  ·  "),
      maps: Object.entries(this.canvases).map(([kind, canvas]) => ({ canvas, label: text(kind, "b"), text: text(kind, "span") })),
    };
  }
}
