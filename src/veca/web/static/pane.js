// One pane: a picture at one budget, resolution and model, its maps and its costs.

import { LatestRequest, cached, json, load } from "./api.js";
import { drawBars, drawFrame, drawPath, fitCanvas, paint, pathScale, similarity, tiles } from "./draw.js";

const MEASURE_AFTER = 500; // ms without a change

const number = (value, digits = 3) => {
  const rounded = Number(value.toPrecision(digits));
  return rounded.toLocaleString("en", { maximumFractionDigits: 2, minimumFractionDigits: rounded < 10 ? 1 : 0 });
};
const time = (seconds) => (seconds < 1 ? `${number(1000 * seconds)} ms` : `${number(seconds)} s`);

export class Pane {
  // `shared` is the state of all panes, `setting` that of this one; `on` has the callbacks for user input.
  constructor(index, about, shared, setting, on) {
    Object.assign(this, { index, about, shared, setting, on });
    this.id = `${Math.random().toString(36).slice(2)}-${index}`;
    this.requests = { view: new LatestRequest(), counts: new LatestRequest(), measures: new LatestRequest() };
    this.element = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    this.element.setAttribute("aria-label", `Pane ${index + 1}`);
    const find = (selector) => this.element.querySelector(selector);
    this.find = find;
    this.frames = [...this.element.querySelectorAll(".frame")];
    this.canvases = { features: find(".features canvas"), similar: find(".similar canvas"), looks: find(".looks canvas") };
    this.bars = find(".listens canvas");
    this.#bindControls();
    this.#bindPointer();
  }

  get model() {
    return this.about.models.find(({ name }) => name === this.setting.model);
  }

  get query() {
    const { model, cores, width, size } = this.setting;
    return new URLSearchParams({ picture: this.shared.picture.id, model, cores, width, size }).toString();
  }

  get grid() {
    return this.view?.colours.shape.slice(0, 2);
  }

  #bindControls() {
    this.element.querySelectorAll(".settings .control").forEach((control, i) => {
      const input = control.querySelector("input, select");
      input.id = `pane-${this.index}-${i}`;
      control.querySelector("label").htmlFor = input.id;
      control.querySelector("output")?.setAttribute("for", input.id);
    });
    this.choice = { model: this.find("select"), cores: this.find(".cores"), width: this.find(".width"), size: this.find(".size") };
    this.choice.model.append(...this.about.models.map(({ name }) => new Option(name, name)));
    this.choice.model.addEventListener("change", () => this.on.set(this, { model: this.choice.model.value }));
    this.choice.cores.addEventListener("input", () =>
      this.on.set(this, { cores: this.model.budgets[this.choice.cores.value] }));
    this.choice.width.addEventListener("input", () =>
      this.on.set(this, { width: this.model.widths[this.choice.width.value] }));
    this.choice.size.addEventListener("input", () => this.on.set(this, { size: this.about.sizes[this.choice.size.value] }));
  }

  #bindPointer() {
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
    this.frames[0].addEventListener("keydown", (event) => this.#handleKey(event));
    const core = (event) => Math.floor(at(event, this.bars)[0] * this.setting.cores) + 1;
    this.bars.addEventListener("click", (event) => this.on.core(core(event)));
    this.bars.addEventListener("pointermove", (event) => {
      this.bars.title = `core ${core(event)}: ${this.#share(core(event) - 1)}`;
    });
  }

  #handleKey(event) {
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

  // The index of the core that is shown: the chosen one, or the one the patch listens to most.
  get core() {
    if (this.shared.core) return Math.min(this.shared.core, this.setting.cores) - 1;
    const shares = this.#shares();
    return shares ? shares.indexOf(Math.max(...shares)) : 0;
  }

  // Each core's share in the update of the patch, as bytes relative to the largest.
  #shares() {
    if (!this.layer || !this.patch) return null;
    const [, columns, cores] = this.layer.profiles.shape;
    const start = (this.patch[0] * columns + this.patch[1]) * cores;
    return this.layer.profiles.data.subarray(start, start + cores);
  }

  #share(core) {
    const shares = this.#shares();
    if (!shares) return "";
    const largest = this.layer.shares.data[this.patch[0] * this.layer.profiles.shape[1] + this.patch[1]];
    return `${number((100 * largest * shares[core]) / 255, 2)} %`;
  }

  showSettings() {
    const { model, cores, width, size } = this.setting;
    this.find(".widths").hidden = this.model.widths.length < 2;
    this.find(".model").hidden = this.about.models.length < 2;
    this.choice.model.value = model;
    const set = (input, values, value, text) => {
      input.max = values.length - 1;
      input.value = values.indexOf(value);
      input.setAttribute("aria-valuetext", text);
      input.parentElement.querySelector("output").textContent = text;
    };
    set(this.choice.cores, this.model.budgets, cores, `${cores} core${cores > 1 ? "s" : ""}`);
    set(this.choice.width, this.model.widths, width, `${Math.round(100 * width)} %`);
    set(this.choice.size, this.about.sizes, size, `${size} px`);
    for (const form of ["safetensors", "npz"]) {
      const link = this.find(`.downloads .${form}`);
      if (this.shared.picture) link.href = `api/features?${this.query}&format=${form}`;
    }
  }

  // Request what the setting needs and show it; what is cached is shown at once.
  async refresh() {
    this.showSettings();
    if (!this.shared.picture) return;
    const layer = Math.min(this.shared.layer, this.model.layers);
    const [view, one] = [`api/view?${this.query}`, `api/layer?${this.query}&layer=${layer}`];
    this.#showCosts();
    this.element.setAttribute("aria-busy", "true");
    const options = (signal) => ({ signal, headers: { "X-Veca-Pane": this.id } });
    let tensors = [cached(view), cached(one)];
    if (tensors.every(Boolean)) this.requests.view.abort();
    else tensors = await this.requests.view.run((signal) => Promise.all([view, one].map((path) => load(path, options(signal)))));
    if (!tensors) return;
    [this.view, this.layer] = tensors;
    this.pathScale = pathScale(this.view.places);
    const [rows, columns] = this.grid;
    this.overlay = tiles(this.view.colours.data, rows, columns);
    this.element.setAttribute("aria-busy", "false");
    this.shown = { ...this.setting, layer };
    this.draw();
    this.element.dataset.shown = `${this.shared.picture.id} ${this.setting.cores} ${this.setting.size} ${layer}`;
    if (this.setting.width < 1) this.element.dataset.shown += ` ${this.setting.width}`;
    performance.mark("veca-shown", { detail: this.element.dataset.shown });
  }

  #setCells(column, values) {
    const texts = values ?? ["", ""];
    ["veca", "dense"].forEach((row, i) => {
      this.element.querySelector(`.numbers .${row}`).cells[column].textContent = texts[i];
    });
  }

  async #showCosts() {
    clearTimeout(this.timer);
    const query = this.query;
    this.#setCells(1, ["…", "…"]);
    this.#setCells(3, ["…", "…"]);
    this.timer = setTimeout(() => this.#measure(query), MEASURE_AFTER);
    try {
      const counts = await this.requests.counts.run((signal) => json(`api/counts?${query}`, { signal }));
      if (!counts) return;
      const both = [counts.veca, counts.dense];
      this.#setCells(2, both.map(({ gflops }) => number(gflops)));
      this.#setCells(4, both.map(({ tokens }) => tokens.toLocaleString("en")));
    } catch {
      this.#setCells(2);
      this.#setCells(4);
    }
  }

  async #measure(query) {
    const headers = { "X-Veca-Pane": this.id };
    try {
      const costs = await this.requests.measures.run((signal) => json(`api/measures?${query}`, { signal, headers }));
      if (!costs || query !== this.query) return;
      const both = [costs.veca, costs.dense]; // without timm the dense ViT is counted, not measured
      this.#setCells(1, both.map((cost) => (cost ? time(cost.seconds) : "needs timm")));
      this.#setCells(3, both.map((cost) => (cost ? `${number(cost.mebibytes, 2)} MiB` : "needs timm")));
    } catch {
      this.#setCells(1);
      this.#setCells(3);
    }
  }

  draw() {
    if (!this.view || !this.shared.photo) return;
    const { photo, opacity, held } = this.shared;
    const aspect = photo.width / photo.height;
    const [rows, columns] = this.grid;
    const { patch, core } = this;
    const contexts = Object.fromEntries(Object.entries(this.canvases).map(([kind, canvas]) => [kind, fitCanvas(canvas, aspect)]));
    paint(contexts.features, photo, this.overlay, opacity);
    if (patch) {
      const cosines = similarity(this.view.features, patch[0] * columns + patch[1]);
      paint(contexts.similar, photo, tiles(cosines.levels, rows, columns), opacity, 0.35);
      this.#caption("similar", `${cosines.low.toFixed(2)} to ${cosines.high.toFixed(2)}`.replaceAll("-", "−"), "cosine similarity to the patch");
    } else {
      paint(contexts.similar, photo, null, 0, 0.35);
      this.#caption("similar", "point at one", "no patch is chosen");
    }
    const cells = rows * columns;
    const map = this.layer.maps.data.subarray(core * cells, (core + 1) * cells);
    paint(contexts.looks, photo, tiles(map, rows, columns), opacity, 0.35);
    drawPath(contexts.looks, this.view.places, core, this.shown.layer, this.pathScale);
    if (patch) for (const context of Object.values(contexts)) drawFrame(context, ...patch, rows, columns, held);
    const peak = this.layer.ranges.data[3 * core + 2];
    const longer = this.pathScale > 1 ? `, path × ${this.pathScale}` : ""; // drawn longer by this factor
    this.find(".looks b").textContent = `Where core ${core + 1} looks`;
    this.#caption("looks", `peak ${number(peak, 2)} × even${longer}`.replaceAll(" × ", "\u00a0×\u00a0"), `attention of core ${core + 1} over the picture`);
    this.find(".features figcaption span").textContent = `${columns} × ${rows} patches: like colours are like features`;
    this.frames[0].setAttribute("aria-label", this.#label());
    const shares = this.#shares();
    drawBars(this.bars, shares ?? new Uint8Array(this.setting.cores), core);
    this.find(".listens span").textContent = shares ? this.#strongest().map((c) => `${c + 1} (${this.#share(c)})`).join(", ") : "";
    this.bars.setAttribute("aria-label", this.describe());
  }

  #caption(kind, text, label) {
    this.find(`.${kind} figcaption span`).textContent = text;
    this.canvases[kind].setAttribute("aria-label", `${label}: ${text}`);
  }

  #strongest() {
    const shares = this.#shares();
    return [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, 3);
  }

  #label() {
    const where = this.patch ? `, patch in row ${this.patch[0] + 1}, column ${this.patch[1] + 1}` : "";
    return `Features of the picture with ${this.setting.cores} cores${this.#width()} at ${this.setting.size} pixels${where}. Arrow keys move.`;
  }

  #width() {
    return this.setting.width < 1 ? `, ${Math.round(100 * this.setting.width)} % of the MLP,` : "";
  }

  // For screen readers: the patch under the cursor.
  describe() {
    if (!this.patch || !this.#shares()) return "no patch is chosen";
    const cores = this.#strongest().map((core) => `${core + 1}, ${this.#share(core)}`).join("; ");
    return `Row ${this.patch[0] + 1}, column ${this.patch[1] + 1}: listens most to cores ${cores}.`;
  }

  // For the figure that is saved.
  get summary() {
    const cell = (row, i) => this.find(`.numbers .${row}`).cells[i].textContent;
    const pairs = ["time", "GFLOPs", "memory", "tokens"].map((what, i) => [what, cell("veca", i + 1), cell("dense", i + 1)]);
    const costs = pairs.filter(([, veca]) => veca && veca !== "…").map(([what, veca, dense]) => `${what} ${veca} (dense ViT ${dense})`);
    const text = (kind, part) => this.find(`.${kind} figcaption ${part}`).textContent;
    return {
      aspect: this.shared.photo.width / this.shared.photo.height,
      title: `${this.setting.model}, ${this.setting.cores} cores${this.#width().replace(/,$/, "")}, ${this.setting.size} px, layer ${this.shown.layer}`,
      costs: costs.join("  ·  "),
      maps: Object.entries(this.canvases).map(([kind, canvas]) => ({ canvas, label: text(kind, "b"), text: text(kind, "span") })),
    };
  }
}
