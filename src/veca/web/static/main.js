// The page: one state, shown by the panes and kept in the address.

import { RequestError, json, request } from "./api.js";
import { Scaling } from "./chart.js";
import { drawFigure, setRamps } from "./draw.js";
import { Pane } from "./pane.js";
import { thumbnail } from "./strip.js";

const $ = (id) => document.getElementById(id);
const about = await json("api/about").catch((error) => {
  showError(error);
  return new Promise(() => {}); // without it there is nothing to show
});
setRamps(about);
$("ramp").style.background = `linear-gradient(90deg, ${about.heat.join(", ")})`;

const maxLayers = () => Math.max(...panes.map((pane) => pane.model.layers));
const first = about.models[0];
// What all panes share. `pictures` has that of each pane, null for that of the first; `source` is the pane pointed at.
const shared = {
  pictures: [null, null], photos: new Map(), panes: [], opacity: 0.8, smooth: true, foreground: false,
  layer: Math.round(first.layers * 0.75), core: null, at: [0.5, 0.5], held: false, source: 0, box: null,
};
const second = about.models[1] ?? first;
const settings = [
  { model: first.name, cores: first.budgets.at(-1), width: 1, size: about.default_size },
  { model: second.name, cores: second.budgets.at(second === first ? 0 : -1), width: 1, size: about.default_size },
];
let compare = false;
let panes = [];
let target = null; // the pane that a chosen picture is for; null: all
const files = new Map(); // uploads by id, to be sent again if the server has evicted them

// Callbacks for user input in a pane.
const on = {
  set(pane, change) {
    Object.assign(pane.setting, change);
    const { budgets, widths } = pane.model;
    if (!budgets.includes(pane.setting.cores)) pane.setting.cores = budgets.at(-1);
    if (!widths.includes(pane.setting.width)) pane.setting.width = 1;
    showControls();
    updateAddress();
    refresh([pane]);
    measureScaling();
  },
  point(pane, at, hold, byKeyboard = false) {
    if (shared.held && !hold && !byKeyboard) return;
    const before = shared.held && hold && shared.source === pane.index && String(pane.pointed);
    [shared.at, shared.source] = [at, pane.index];
    const same = before && before === String(pane.pointed);
    shared.held = hold ? !same : shared.held && byKeyboard;
    draw();
    if (hold || byKeyboard) $("spoken").textContent = pane.describe();
    updateAddress();
  },
  open(pane, id) {
    choose(id, compare ? pane.index : null);
  },
  scaling() {
    for (const pane of panes) pane.drawCharts();
  },
  // Search by a part of the picture of a pane, or (null) by the whole.
  box(pane, part) {
    shared.box = part && { picture: pane.picture.id, part };
    for (const each of panes) each.showFound();
    draw();
    updateAddress();
  },
  core(number) {
    shared.core = number;
    showControls();
    draw();
    updateAddress();
  },
};

function showError(error) {
  const box = $("problem");
  box.querySelector("span").textContent = error instanceof RequestError ? error.message : "Something went wrong: reload the page.";
  box.hidden = false;
  if (!(error instanceof RequestError)) throw error;
}

// A text at the bottom, for some seconds or until the next one.
function showStatus(text, seconds = 0) {
  clearTimeout(showStatus.timer);
  $("status").textContent = text;
  if (seconds) showStatus.timer = setTimeout(() => showStatus(""), 1000 * seconds);
}

const hideError = () => ($("problem").hidden = true);
$("problem").querySelector("button").addEventListener("click", hideError);

let frameRequested = false;
function draw() {
  if (frameRequested) return;
  frameRequested = true;
  requestAnimationFrame(() => {
    frameRequested = false;
    for (const pane of panes) pane.draw();
    showCore();
  });
}

async function refresh(changed = panes) {
  if (!shared.pictures[0] && pendingId) return choose(pendingId);
  try {
    await Promise.all(changed.map((pane) => pane.refresh()));
    showCore();
  } catch (error) {
    const file = files.get(changed[0].picture?.id);
    if (error.status === 404 && file) return upload(file).catch(showError);
    for (const pane of changed) pane.element.setAttribute("aria-busy", "false");
    showError(error);
  }
}

function showCore() {
  const pane = panes[shared.source] ?? panes[0];
  const text = shared.core ? `${shared.core}` : pane.layer && shared.at ? `auto: ${pane.core + 1}` : "auto";
  $("core-value").textContent = text;
  $("core").setAttribute("aria-valuetext", shared.core ? `core ${shared.core}` : "the strongest of the patch");
}

function showControls() {
  const maxCores = Math.max(...panes.map((pane) => pane.setting.cores));
  if (shared.core > maxCores) shared.core = maxCores;
  shared.layer = Math.min(shared.layer, maxLayers());
  $("opacity").value = Math.round(100 * shared.opacity);
  $("opacity-value").textContent = `${Math.round(100 * shared.opacity)} %`;
  $("layer").max = maxLayers();
  $("layer").value = shared.layer;
  $("layer-value").textContent = `${shared.layer} of ${maxLayers()}`;
  $("core").max = maxCores;
  $("core").value = shared.core ?? 0;
  showCore();
  for (const name of ["smooth", "foreground"]) $(name).setAttribute("aria-pressed", String(shared[name]));
  $("compare").setAttribute("aria-pressed", String(compare));
  $("panes").classList.toggle("two", compare);
  $("target").hidden = !compare;
  for (const radio of $("target").querySelectorAll("input")) radio.checked = radio.value === String(target ?? "all");
  const random = [...new Set(panes.map((pane) => pane.model))].filter((model) => model.random).map(({ name }) => name);
  $("notice").hidden = !random.length;
  $("notice").textContent = random.length
    ? `The weights of ${random.join(" and ")} are random: this shows how it works, not what a trained model sees.`
    : "";
}

function buildPanes() {
  panes = settings.slice(0, compare ? 2 : 1).map((setting, i) => panes[i] ?? new Pane(i, about, shared, setting, on));
  shared.panes = panes;
  if (!compare) [target, shared.source, shared.pictures[1]] = [null, 0, null];
  $("panes").replaceChildren(...panes.map((pane) => pane.element));
  for (const pane of panes) pane.showSettings();
  showControls();
  markPictures();
  measureScaling();
}

function measureScaling() {
  for (const pane of panes) pane.scaling.changed(); // those of a new model exist from now on
  Scaling.measure(panes.map(({ setting }) => setting.model));
}

// The state in the address: picture, settings and the held patch.

function updateAddress() {
  clearTimeout(updateAddress.timer);
  updateAddress.timer = setTimeout(() => {
    const params = new URLSearchParams();
    shared.pictures.forEach((picture, i) => picture && params.set(`picture${i ? 2 : ""}`, picture.id));
    panes.forEach(({ setting }, i) => {
      for (const key of ["model", "cores", "size"]) params.set(key + (i ? 2 : ""), setting[key]);
      if (setting.width < 1) params.set(`width${i ? 2 : ""}`, setting.width);
    });
    params.set("layer", shared.layer);
    params.set("overlay", Math.round(100 * shared.opacity));
    if (shared.core) params.set("core", shared.core);
    if (!shared.smooth) params.set("smooth", 0);
    if (shared.foreground) params.set("foreground", 1);
    if (shared.source && shared.held) params.set("source", shared.source + 1);
    if (shared.box) params.set("box", [shared.box.picture, ...shared.box.part.map((value) => value.toFixed(4))].join(","));
    if (shared.at && shared.held) params.set("at", shared.at.map((value) => value.toFixed(4)).join(","));
    history.replaceState(null, "", `#${params}`);
  }, 200);
}

function readAddress() {
  const params = new URLSearchParams(location.hash.slice(1));
  const whole = (key) => (/^\d{1,4}$/.test(params.get(key) ?? "") ? Number(params.get(key)) : null);
  compare = params.has("cores2");
  settings.forEach((setting, i) => {
    const suffix = i ? "2" : "";
    const model = about.models.find(({ name }) => name === params.get(`model${suffix}`));
    if (model) setting.model = model.name;
    const { budgets, widths } = about.models.find(({ name }) => name === setting.model);
    const width = Number(params.get(`width${suffix}`) ?? 1);
    if (widths.includes(width)) setting.width = width;
    if (budgets.includes(whole(`cores${suffix}`))) setting.cores = whole(`cores${suffix}`);
    if (about.sizes.includes(whole(`size${suffix}`))) setting.size = whole(`size${suffix}`);
  });
  shared.layer = Math.max(1, whole("layer") ?? shared.layer);
  shared.opacity = Math.min(100, whole("overlay") ?? 100 * shared.opacity) / 100;
  shared.core = whole("core") || null;
  shared.smooth = params.get("smooth") !== "0";
  shared.foreground = params.get("foreground") === "1";
  shared.source = compare && params.get("source") === "2" ? 1 : 0;
  const at = (params.get("at") ?? "").split(",").map(Number);
  if (at.length === 2 && at.every((value) => value >= 0 && value < 1)) [shared.at, shared.held] = [at, true];
  const [boxed, ...part] = (params.get("box") ?? "").split(",");
  const valid = part.length === 4 && part.every((value) => Number(value) >= 0 && Number(value) <= 1);
  shared.box = valid ? { picture: boxed, part: part.map(Number) } : null;
  return [params.get("picture"), compare ? params.get("picture2") : null];
}

// Pictures.

// The photos of the pictures shown, and of a few before.
async function loadPhoto(id) {
  if (!shared.photos.has(id)) {
    shared.photos.set(id, await createImageBitmap(await (await request(`api/pictures/${id}`)).blob()));
  }
  for (const old of shared.photos.keys()) {
    if (shared.photos.size > 6 && !panes.some(({ picture }) => picture?.id === old)) shared.photos.delete(old);
  }
}

let lastTurn = 0;
// Show a picture in one pane, or (null) in all.
async function show(picture, pane = target) {
  const turn = ++lastTurn;
  const previous = shared.pictures;
  shared.pictures = pane === null ? [picture, null] : previous.with(pane, picture);
  if (pane === 0 && compare && !previous[1]) shared.pictures[1] = previous[0]; // the other pane keeps its picture
  const changed = panes.filter(({ index }) => pane === null || pane === index);
  try {
    await Promise.all([loadPhoto(picture.id).then(draw), ...changed.map((each) => each.refresh())]);
  } catch (error) {
    if (turn === lastTurn) shared.pictures = previous;
    draw();
    throw error;
  }
  if (turn !== lastTurn) return;
  markPictures();
  for (const each of panes) each.draw();
  showCore();
  performance.mark("veca-picture", { detail: picture.id });
  showStatus(picture.cut ? "The picture was cropped: its long side is at most twice its short side." : "", 8);
  updateAddress();
}

function markPictures() {
  const shown = panes.filter(({ index }) => target === null || target === index).map(({ picture }) => picture?.id);
  for (const button of document.querySelectorAll(".samples button")) {
    button.setAttribute("aria-pressed", String(shown.includes(button.value)));
  }
}

let pendingId = null; // the picture to show as soon as a setting works
async function choose(id, pane = target) {
  pendingId = id;
  hideError();
  try {
    const picture = await json(`api/pictures/${id}/about`).catch((error) => {
      if (error.status === 404 || error.status === 422) return null; // gone, or never an id
      throw error;
    });
    if (picture) await show(picture, pane);
    else if (files.has(id)) await upload(files.get(id), pane);
    else await showInstead(pane);
  } catch (error) {
    showError(error);
  }
}

// Links outlive uploads, which the server keeps in memory only.
async function showInstead(pane) {
  const sample = about.samples[0];
  if (!sample) throw new RequestError(404, "The picture of this link is no longer on the server: choose another.");
  await choose(sample.id, pane);
  showStatus("The picture of this link is no longer on the server: this is a sample instead.", 10);
}

async function upload(blob, pane = target) {
  if (blob.size > about.most_bytes) {
    throw new RequestError(413, `The picture has ${blob.size.toLocaleString("en")} bytes; at most ${about.most_bytes.toLocaleString("en")} are taken.`);
  }
  showStatus("Opening the picture …");
  try {
    const response = await request("api/pictures", { method: "POST", body: blob });
    const picture = await response.json();
    files.set(picture.id, blob);
    if (files.size > 4) files.delete(files.keys().next().value);
    addThumbnail({ id: picture.id, title: blob.name || "Your picture" });
    await show(picture, pane);
  } finally {
    if ($("status").textContent.startsWith("Opening")) showStatus("");
  }
}

function openFile(blob) {
  if (!blob) return;
  hideError();
  performance.mark("veca-taken");
  upload(blob).catch(showError);
}

// Of the uploaded pictures the last four stay.
function addThumbnail(picture) {
  const buttons = [...$("samples").children];
  if (buttons.some(({ value }) => value === picture.id)) return;
  $("samples").append(thumbnail(picture, () => choose(picture.id)));
  if (buttons.length >= about.samples.length + 4) buttons[about.samples.length].remove();
}
about.samples.forEach(addThumbnail);
$("folder").hidden = !about.folder.length;
$("folder-size").textContent = about.folder.length.toLocaleString("en");
$("folder-pictures").append(...about.folder.map((picture) => thumbnail(picture, () => choose(picture.id))));

$("file").addEventListener("change", () => {
  openFile($("file").files[0]);
  $("file").value = "";
});
const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
addEventListener("dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  $("dropping").hidden = false;
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) $("dropping").hidden = true;
});
addEventListener("drop", (event) => {
  $("dropping").hidden = true;
  if (!hasFiles(event)) return;
  event.preventDefault();
  openFile(event.dataTransfer.files[0]);
});
addEventListener("paste", (event) => openFile([...event.clipboardData.files].find(({ type }) => type.startsWith("image/"))));

// Controls.

$("opacity").addEventListener("input", () => {
  shared.opacity = $("opacity").value / 100;
  showControls();
  draw();
  updateAddress();
});
$("layer").addEventListener("input", () => {
  shared.layer = Number($("layer").value);
  showControls();
  updateAddress();
  refresh();
});
for (const name of ["smooth", "foreground"]) {
  $(name).addEventListener("click", () => {
    shared[name] = !shared[name];
    showControls();
    draw();
    updateAddress();
  });
}
$("target").addEventListener("change", (event) => {
  target = event.target.value === "all" ? null : Number(event.target.value);
  markPictures();
});
$("core").addEventListener("input", () => on.core(Number($("core").value) || null));
$("compare").addEventListener("click", () => {
  compare = !compare;
  buildPanes();
  updateAddress();
  refresh();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  [shared.held, shared.at] = [false, shared.held ? shared.at : null];
  if (shared.box) on.box(panes[0], null);
  hideError();
  draw();
  updateAddress();
});
addEventListener("resize", draw);
new ResizeObserver(draw).observe($("panes"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("hashchange", () => {
  const ids = readAddress();
  buildPanes();
  openPictures(ids);
});

// The pictures of a link: of the first pane, and of the second if it has one of its own.
async function openPictures([id, other]) {
  if (!other) shared.pictures[1] = null;
  if (id && id !== shared.pictures[0]?.id) await choose(id, null);
  else await refresh();
  if (other && other !== shared.pictures[1]?.id) await choose(other, 1);
}

$("share").addEventListener("click", async () => {
  updateAddress();
  await new Promise((resolve) => setTimeout(resolve, 250));
  try {
    await navigator.clipboard.writeText(location.href);
    showStatus("Link copied.", 3);
  } catch {
    showStatus("Copy the link from the address bar.", 5);
  }
});

$("figure").addEventListener("click", () => {
  if (!panes.every((pane) => pane.shown)) return;
  const shown = [...new Set(panes.map(({ picture }) => picture.id))];
  const title = shown.map((id) => about.samples.find((sample) => sample.id === id)?.title ?? "VECA").join("  ·  ");
  const canvas = drawFigure(panes.map((pane) => pane.summary), title, $("notice").textContent);
  canvas.toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `veca-${shown[0].slice(0, 12)}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
});

const models = about.models.map(({ name, origin }) => (origin ? `${name} (${origin})` : name));
$("about").textContent = `veca ${about.version}, ${models.join(", ")}, ${about.device}.`;
const [requestedId, ...others] = readAddress();
buildPanes();
const start = [...about.folder, ...about.samples][0];
if (requestedId || start) await openPictures([requestedId ?? start.id, ...others]);
else showStatus("Drop, paste or choose a picture.");
Scaling.begin();
document.documentElement.dataset.ready = "true";
