// One pane: a picture at one budget, resolution and model, its maps and its costs.

import { LatestRequest, cached, json, load } from "./api.js";
import { Scaling, drawChart, number, sizeAt, time } from "./chart.js";
import { drawBars, drawBox, drawFrame, drawPath, fitCanvas, paint, pathScale, similarity, tiles } from "./draw.js";
import { Search, bindDrag, boxOf } from "./search.js";
import { fillStrip } from "./strip.js";

const MEASURE_AFTER = 500; // ms without a change
const SLOW = 0.4; // s: where a view is expected to take longer, a smaller one is shown first

export class Pane {
  // `shared` is the state of all panes, `setting` that of this one; `on` has the callbacks for user input.
  constructor(index, about, shared, setting, on) {
    Object.assign(this, { index, about, shared, setting, on });
    this.id = `${Math.random().toString(36).slice(2)}-${index}`;
    this.requests = Object.fromEntries(["view", "counts", "measures", "classes", "neighbours"].map((name) => [name, new LatestRequest()]));
    this.element = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    this.element.setAttribute("aria-label", `Pane ${index + 1}`);
    const find = (selector) => this.element.querySelector(selector);
    this.find = find;
    this.frames = [...this.element.querySelectorAll(".frame")];
    this.canvases = { features: find(".features canvas"), similar: find(".similar canvas"), looks: find(".looks canvas") };
    this.bars = find(".listens canvas");
    const [open, choose, around] = [(id) => on.open(this, id), (part) => on.box(this, part), () => this.#around()];
    this.search = new Search(find(".found"), about.index, open, choose, around);
    this.#bindControls();
    this.#bindPointer();
  }

  get model() {
    return this.about.models.find(({ name }) => name === this.setting.model);
  }

  get scaling() {
    return Scaling.of(this.setting.model, this.on.scaling);
  }

  // The second pane shows the picture of the first, unless it has one of its own.
  get picture() {
    return this.shared.pictures[this.index] ?? this.shared.pictures[0];
  }

  get photo() {
    return this.shared.photos.get(this.picture?.id);
  }

  get query() {
    return this.#queryAt(this.setting.size);
  }

  #queryAt(size) {
    const { model, cores, width } = this.setting;
    return new URLSearchParams({ picture: this.picture.id, model, cores, width, size }).toString();
  }

  get grid() {
    return this.view?.colours.shape.slice(0, 2);
  }

  // The pane whose patch is looked for in this one: the one pointed at, if it shows another picture.
  get #asking() {
    const pointed = this.shared.panes[this.shared.source];
    return pointed && pointed !== this && pointed.picture !== this.picture && pointed.picture.id !== this.picture.id ? pointed : null;
  }

  // Similarity to the patch that is pointed at, in this pane or in the one that asks; null: there is none to compare with.
  get similar() {
    const asking = this.#asking;
    const from = asking ?? this;
    const at = from.pointed;
    if (!at || !from.view || !this.view || from.setting.model !== this.setting.model) return null;
    const width = from.view.features.shape[2];
    if (this.view.features.shape[2] !== width) return null; // its model has just been changed
    const start = (at[0] * from.grid[1] + at[1]) * width;
    const key = [from.view, this.view, start];
    if (!this.compared?.key.every((part, i) => part === key[i])) {
      const feature = from.view.features.data.subarray(start, start + width);
      this.compared = { key, ...similarity(this.view.features, feature, asking ? -1 : start / width) };
    }
    return this.compared;
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
        if (event.pointerType === "mouse") this.on.point(this, at(event, element), false);
      });
      if (this.about.index) {
        const draw = (part) => {
          this.drawn = part;
          this.draw();
        };
        bindDrag(element, at, draw, (part) => {
          this.drawn = null;
          this.on.box(this, part);
        });
      }
      element.addEventListener("click", (event) => this.on.point(this, at(event, element), true));
    }
    this.frames[0].addEventListener("keydown", (event) => this.#handleKey(event));
    const core = (event) => Math.floor(at(event, this.bars)[0] * this.setting.cores) + 1;
    this.bars.addEventListener("click", (event) => this.on.core(core(event)));
    this.bars.addEventListener("pointermove", (event) => {
      this.bars.title = `core ${core(event)}: ${this.#share(core(event) - 1)}`;
    });
    for (const svg of this.element.querySelectorAll(".charts svg")) {
      svg.addEventListener("click", (event) => this.on.set(this, { size: sizeAt(svg, event, this.about.sizes) }));
    }
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
    this.on.point(this, [(column + 0.5) / columns, (row + 0.5) / rows], hold, true);
  }

  // [row, column] under the cursor.
  get pointed() {
    const [rows, columns] = this.grid ?? [];
    return this.shared.at && rows ? [Math.floor(this.shared.at[1] * rows), Math.floor(this.shared.at[0] * columns)] : null;
  }

  // [row, column] of the patch that is shown: under the cursor, or the best match of the one in the pane that asks.
  get patch() {
    if (!this.#asking) return this.pointed;
    const found = this.similar;
    return found ? [Math.floor(found.best / this.grid[1]), found.best % this.grid[1]] : null;
  }

  // The index of the core that is shown: the chosen one, or the one the patch listens to most.
  get core() {
    if (this.shared.core) return Math.min(this.shared.core, this.shown?.cores ?? this.setting.cores) - 1;
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
      if (this.picture) link.href = `api/features?${this.query}&format=${form}`;
    }
  }

  // Request what the setting needs and show it; what is cached is shown at once.
  async refresh() {
    this.showSettings();
    if (!this.picture) return;
    this.#showCosts();
    this.element.setAttribute("aria-busy", "true");
    const { size } = this.setting;
    const layer = Math.min(this.shared.layer, this.model.layers);
    const paths = (query) => [`api/view?${query}`, `api/layer?${query}&layer=${layer}`];
    const wanted = paths(this.query);
    let tensors = wanted.map(cached);
    if (tensors.every(Boolean)) this.requests.view.abort();
    else {
      const preview = this.#previewSize();
      tensors = await this.requests.view.run(async (signal) => {
        const headers = { "X-Veca-Pane": this.id };
        const loadAll = (all) => Promise.all(all.map((path) => load(path, { signal, headers })));
        if (preview) this.#show(await loadAll(paths(this.#queryAt(preview))), layer, preview);
        return loadAll(wanted);
      });
    }
    if (!tensors) return;
    this.#show(tensors, layer, size);
    this.element.setAttribute("aria-busy", "false");
    this.#showClasses();
    this.#showNeighbours();
    this.showFound();
    this.element.dataset.shown = `${this.picture.id} ${this.setting.cores} ${size} ${layer}`;
    if (this.setting.width < 1) this.element.dataset.shown += ` ${this.setting.width}`;
    performance.mark("veca-shown", { detail: this.element.dataset.shown });
  }

  // The largest size that is expected to come soon, where the one asked for is not; null: no preview.
  #previewSize() {
    const expect = (size) => this.scaling.expectPass(size);
    if (!(expect(this.setting.size) > SLOW)) return null;
    return this.about.sizes.filter((size) => size < this.setting.size && expect(size) < SLOW / 2).at(-1) ?? this.about.sizes[0];
  }

  #show([view, layerMaps], layer, size) {
    [this.view, this.layer] = [view, layerMaps];
    this.pathScale = pathScale(view.places);
    this.overlay = null;
    this.shown = { ...this.setting, layer, size };
    this.draw();
    if (size !== this.setting.size) performance.mark("veca-preview");
  }

  // Drawn anew where colours, smoothness or mask have changed.
  #features() {
    const { smooth, foreground } = this.shared;
    const key = `${smooth} ${foreground}`;
    if (this.overlay?.key !== key) {
      const mask = foreground ? this.view.foreground.data : null;
      this.overlay = { key, canvas: tiles(this.view.colours.data, ...this.grid, { smooth, mask }) };
    }
    return this.overlay.canvas;
  }

  async #showClasses() {
    const box = this.find(".classes");
    box.hidden = !this.model.classes;
    if (!this.model.classes) return;
    const headers = { "X-Veca-Pane": `${this.id}-classes` };
    const found = await this.requests.classes.run((signal) => json(`api/classes?${this.query}`, { signal, headers })).catch(() => null);
    if (!found) return;
    const items = found.classes.map(({ name, probability }) => {
      const item = document.createElement("li");
      const [bar, label, value] = ["meter", "span", "span"].map((kind) => document.createElement(kind));
      Object.assign(bar, { value: probability, ariaLabel: name });
      [label.textContent, label.title, value.textContent] = [name, name, `${number(100 * probability, 2)} %`];
      item.append(label, bar, value);
      return item;
    });
    box.querySelector("ol").replaceChildren(...items);
  }

  // Again until all pictures of the folder are embedded.
  async #showNeighbours() {
    clearTimeout(this.neighbourTimer);
    const box = this.find(".neighbours");
    box.hidden = !this.about.folder.length;
    if (box.hidden) return;
    const headers = { "X-Veca-Pane": this.id };
    const query = new URLSearchParams({ picture: this.picture.id, model: this.setting.model, count: 6 });
    const found = await this.requests.neighbours.run((signal) => json(`api/neighbours?${query}`, { signal, headers })).catch(() => null);
    if (!found) return;
    const { neighbours, embedded, total } = found;
    box.querySelector("h3 span").textContent = embedded < total ? `${embedded} of ${total} embedded` : "by global feature";
    fillStrip(box.querySelector(".strip"), neighbours, (id) => this.on.open(this, id));
    if (embedded < total) this.neighbourTimer = setTimeout(() => this.#showNeighbours(), 2000);
  }

  // What the index has that is like the picture, or like its part in the box.
  showFound() {
    if (this.picture) this.search.show(this, boxOf(this.shared, this.picture));
  }

  // A part of the picture, a third of its sides: around the patch, or in the middle.
  #around() {
    const at = this.patch ? [this.patch[1] / this.grid[1], this.patch[0] / this.grid[0]] : [0.5, 0.5];
    return [...at.map((place) => Math.min(Math.max(place - 1 / 6, 0), 2 / 3)), 1 / 3, 1 / 3];
  }

  // Texts of VECA and the dense ViT in a column of the table, and how many times as large the second is.
  #setCells(column, values, ratio = NaN) {
    const texts = [...(values ?? ["", ""]), Number.isFinite(ratio) ? `${number(ratio, 2)} ×` : ""];
    ["veca", "dense", "ratio"].forEach((row, i) => {
      this.find(`.numbers .${row}`).cells[column].textContent = texts[i];
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
      const ratio = (name) => both[1][name] / both[0][name];
      this.#setCells(2, both.map(({ gflops }) => number(gflops)), ratio("gflops"));
      this.#setCells(4, both.map(({ tokens }) => tokens.toLocaleString("en")), ratio("tokens"));
      for (const row of this.find(".numbers").rows) row.cells[5].hidden = counts.quality === null;
      this.#setCells(5, [counts.quality === null ? "" : `${number(100 * counts.quality)} %`, ""]);
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
      const ratio = (name) => both[1]?.[name] / both[0][name];
      this.#setCells(1, both.map((cost) => (cost ? time(cost.seconds) : "needs timm")), ratio("seconds"));
      this.#setCells(3, both.map((cost) => (cost ? `${number(cost.mebibytes, 2)} MiB` : "needs timm")), ratio("mebibytes"));
    } catch {
      this.#setCells(1);
      this.#setCells(3);
    }
  }

  // Drawn anew where anything has changed: the cursor moves more often.
  drawCharts() {
    const { scaling } = this;
    const known = [scaling.model, scaling.measuring, Boolean(scaling.counted), scaling.seconds.size];
    const key = [...known, this.setting.size, this.find(".charts").clientWidth].join();
    if (this.charted === key) return;
    this.charted = key;
    const [seconds, flops] = ["seconds", "flops"].map((kind) => scaling.lines(kind));
    const [timed, counted] = this.element.querySelectorAll(".charts svg");
    const waiting = scaling.measuring ? " – measuring …" : "";
    drawChart(timed, `Time, ms${waiting}`, seconds, this.setting.size, true);
    drawChart(counted, "GFLOPs", flops, this.setting.size, false);
    const keys = flops.map(({ name, kind }) => {
      const [entry, key] = ["span", "i"].map((tag) => document.createElement(tag));
      key.className = `key ${kind}`;
      entry.append(key, name);
      return entry;
    });
    const last = [...scaling.seconds.keys()].at(-1);
    const note = scaling.limited ? `timed up to ${last} px` : "resolution in px";
    this.find(".keys-of-lines").replaceChildren(...keys, note);
  }

  draw() {
    this.drawCharts();
    if (!this.photo) return;
    if (this.view?.about.picture !== this.picture.id) return this.#drawPhoto();
    const { photo, patch, core } = this;
    const { opacity, held, smooth, foreground } = this.shared;
    const aspect = photo.width / photo.height;
    const [rows, columns] = this.grid;
    const contexts = Object.fromEntries(Object.entries(this.canvases).map(([kind, canvas]) => [kind, fitCanvas(canvas, aspect)]));
    paint(contexts.features, photo, this.#features(), { opacity, smooth, dim: foreground ? 0.6 : 0 });
    this.#drawSimilar(contexts.similar);
    const cells = rows * columns;
    const map = this.layer.maps.data.subarray(core * cells, (core + 1) * cells);
    paint(contexts.looks, photo, tiles(map, rows, columns, { most: 255, smooth }), { opacity, smooth, dim: 0.35 });
    const bank = this.model.budgets.at(-1);
    drawPath(contexts.looks, this.view.places, core, bank, this.shown.layer, this.pathScale);
    if (patch) for (const context of Object.values(contexts)) drawFrame(context, ...patch, rows, columns, held);
    const part = this.drawn ?? boxOf(this.shared, this.picture);
    if (part) drawBox(contexts.features, part);
    const peak = this.layer.ranges.data[3 * core + 2];
    const longer = this.pathScale > 1 ? `, path × ${this.pathScale}` : ""; // drawn longer by this factor
    this.find(".looks b").textContent = `Where core ${core + 1} looks`;
    this.#caption("looks", `peak ${number(peak, 2)} × even${longer}`.replaceAll(" × ", "\u00a0×\u00a0"), `attention of core ${core + 1} over the picture`);
    const preview = this.shown.size !== this.setting.size;
    this.find(".features figcaption span").textContent = preview
      ? `preview at ${this.shown.size} px; ${this.setting.size} px follows`
      : `${columns} × ${rows} patches: like colours are like features`;
    this.frames[0].setAttribute("aria-label", this.#label());
    const shares = this.#shares();
    drawBars(this.bars, shares ?? new Uint8Array(this.shown.cores), core, bank);
    this.find(".listens span").textContent = shares ? this.#strongest().map((c) => `${c + 1} (${this.#share(c)})`).join(", ") : "";
    this.bars.setAttribute("aria-label", this.describe());
  }

  // Until the features of the picture are there.
  #drawPhoto() {
    for (const [kind, canvas] of Object.entries(this.canvases)) {
      const context = fitCanvas(canvas, this.photo.width / this.photo.height);
      paint(context, this.photo, null, { dim: kind === "features" ? 0 : 0.35 });
    }
  }

  #drawSimilar(context) {
    const { opacity, smooth } = this.shared;
    const { similar } = this;
    const overlay = similar && tiles(similar.levels, ...this.grid, { smooth });
    paint(context, this.photo, overlay, { opacity, smooth, dim: 0.35 });
    const asked = this.#asking;
    this.find(".similar b").textContent = asked ? "Best match" : "Similar to this patch";
    if (!similar) {
      this.#caption("similar", asked?.pointed ? "other models' features differ" : "point at one", "no patch is chosen");
      return;
    }
    const [low, high] = [similar.low, similar.high].map((value) => value.toFixed(2).replace("-", "−"));
    if (asked) this.#caption("similar", `cosine ${high}`, "cosine similarity to the patch in the other pane, at its best match");
    else this.#caption("similar", `${low} to ${high}`, "cosine similarity to the patch");
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
      aspect: this.photo.width / this.photo.height,
      title: `${this.setting.model}, ${this.setting.cores} cores${this.#width().replace(/,$/, "")}, ${this.setting.size} px, layer ${this.shown.layer}`,
      costs: costs.join("  ·  "),
      maps: Object.entries(this.canvases).map(([kind, canvas]) => ({ canvas, label: text(kind, "b"), text: text(kind, "span") })),
    };
  }
}
