// The page: one state, shown by the panes, kept in the address.

import { Problem, ask, json } from "./api.js";
import { figure, setHeat } from "./draw.js";
import { Pane } from "./pane.js";

const $ = (id) => document.getElementById(id);
const about = await json("api/about").catch((error) => {
  fail(error);
  return new Promise(() => {}); // there is nothing to show
});
setHeat(about.heat);
$("ramp").style.background = `linear-gradient(90deg, ${about.heat.join(", ")})`;

const deepest = () => Math.max(...panes.map((pane) => pane.model.layers));
const first = about.models[0];
const shared = { picture: null, photo: null, opacity: 0.8, layer: Math.round(first.layers * 0.75), core: null, at: null, held: false };
const settings = [
  { model: first.name, cores: first.budgets.at(-1), size: 256 },
  { model: (about.models[1] ?? first).name, cores: (about.models[1] ?? first).budgets[about.models[1] ? about.models[1].budgets.length - 1 : 0], size: 256 },
];
let compare = false;
let panes = [];
const files = new Map(); // what was uploaded, by id, should the server have forgotten it

// What people do in a pane.
const on = {
  set(pane, change) {
    Object.assign(pane.setting, change);
    const { budgets } = pane.model;
    if (!budgets.includes(pane.setting.cores)) pane.setting.cores = budgets.at(-1);
    showControls();
    remember();
    refresh([pane]);
  },
  point(at, hold, aloud = false) {
    if (shared.held && !hold && !aloud) return;
    const same = shared.held && hold && panes[0].patch && String(patchOf(at)) === String(panes[0].patch);
    shared.at = at;
    shared.held = hold ? !same : shared.held && aloud;
    draw();
    if (hold || aloud) $("spoken").textContent = panes[0].describe();
    remember();
  },
  core(number) {
    shared.core = number;
    showControls();
    draw();
    remember();
  },
};

const patchOf = ([x, y]) => {
  const [rows, columns] = panes[0].grid ?? [1, 1];
  return [Math.floor(y * rows), Math.floor(x * columns)];
};

function fail(error) {
  const box = $("problem");
  box.querySelector("span").textContent = error instanceof Problem ? error.message : "Something went wrong: reload the page.";
  box.hidden = false;
  if (!(error instanceof Problem)) throw error;
}

const quiet = () => ($("problem").hidden = true);
$("problem").querySelector("button").addEventListener("click", quiet);

let frameAsked = false;
function draw() {
  if (frameAsked) return;
  frameAsked = true;
  requestAnimationFrame(() => {
    frameAsked = false;
    for (const pane of panes) pane.draw();
    showCore();
  });
}

async function refresh(some = panes) {
  if (!shared.picture && wanted) return choose(wanted);
  try {
    await Promise.all(some.map((pane) => pane.refresh()));
    showCore();
  } catch (error) {
    const file = files.get(shared.picture.id);
    if (error.status === 404 && file) return upload(file).catch(fail);
    for (const pane of some) pane.element.setAttribute("aria-busy", "false");
    fail(error);
  }
}

function showCore() {
  const core = panes[0].core + 1;
  const text = shared.core ? `${shared.core}` : panes[0].layer && shared.at ? `auto: ${core}` : "auto";
  $("core-value").textContent = text;
  $("core").setAttribute("aria-valuetext", shared.core ? `core ${shared.core}` : "the strongest of the patch");
}

function showControls() {
  const most = Math.max(...panes.map((pane) => pane.setting.cores));
  if (shared.core > most) shared.core = most;
  shared.layer = Math.min(shared.layer, deepest());
  $("opacity").value = Math.round(100 * shared.opacity);
  $("opacity-value").textContent = `${Math.round(100 * shared.opacity)} %`;
  $("layer").max = deepest();
  $("layer").value = shared.layer;
  $("layer-value").textContent = `${shared.layer} of ${deepest()}`;
  $("core").max = most;
  $("core").value = shared.core ?? 0;
  showCore();
  $("compare").setAttribute("aria-pressed", String(compare));
  $("panes").classList.toggle("two", compare);
  const random = [...new Set(panes.map((pane) => pane.model))].filter((model) => model.random).map(({ name }) => name);
  $("notice").hidden = !random.length;
  $("notice").textContent = random.length
    ? `The weights of ${random.join(" and ")} are random: this shows how it works, not what a trained model sees.`
    : "";
}

function build() {
  panes = settings.slice(0, compare ? 2 : 1).map((setting, i) => panes[i] ?? new Pane(i, about, shared, setting, on));
  $("panes").replaceChildren(...panes.map((pane) => pane.element));
  for (const pane of panes) pane.showSettings();
  showControls();
}

// The address says it all: picture, settings and what is pointed at.

function remember() {
  clearTimeout(remember.timer);
  remember.timer = setTimeout(() => {
    const told = new URLSearchParams();
    if (shared.picture) told.set("picture", shared.picture.id);
    panes.forEach(({ setting }, i) => {
      for (const key of ["model", "cores", "size"]) told.set(key + (i ? 2 : ""), setting[key]);
    });
    told.set("layer", shared.layer);
    told.set("overlay", Math.round(100 * shared.opacity));
    if (shared.core) told.set("core", shared.core);
    if (shared.at && shared.held) told.set("at", shared.at.map((value) => value.toFixed(4)).join(","));
    history.replaceState(null, "", `#${told}`);
  }, 200);
}

function recallAddress() {
  const told = new URLSearchParams(location.hash.slice(1));
  const whole = (key) => (/^\d{1,4}$/.test(told.get(key) ?? "") ? Number(told.get(key)) : null);
  compare = told.has("cores2");
  settings.forEach((setting, i) => {
    const suffix = i ? "2" : "";
    const model = about.models.find(({ name }) => name === told.get(`model${suffix}`));
    if (model) setting.model = model.name;
    const { budgets } = about.models.find(({ name }) => name === setting.model);
    if (budgets.includes(whole(`cores${suffix}`))) setting.cores = whole(`cores${suffix}`);
    if (about.sizes.includes(whole(`size${suffix}`))) setting.size = whole(`size${suffix}`);
  });
  shared.layer = Math.max(1, whole("layer") ?? shared.layer);
  shared.opacity = Math.min(100, whole("overlay") ?? 100 * shared.opacity) / 100;
  shared.core = whole("core") || null;
  const at = (told.get("at") ?? "").split(",").map(Number);
  if (at.length === 2 && at.every((value) => value >= 0 && value < 1)) [shared.at, shared.held] = [at, true];
  return told.get("picture");
}

// Pictures.

let turns = 0;
async function show(picture) {
  const turn = ++turns;
  const before = [shared.picture, shared.photo];
  const photo = async () => createImageBitmap(await (await ask(`api/pictures/${picture.id}`)).blob());
  [shared.picture, shared.photo] = [picture, null]; // no map of one picture over another
  let found;
  try {
    [found] = await Promise.all([photo(), ...panes.map((pane) => pane.refresh())]);
  } catch (error) {
    if (turn === turns) [shared.picture, shared.photo] = before;
    throw error;
  }
  if (turn !== turns) return;
  shared.photo = found;
  for (const button of $("samples").children) button.setAttribute("aria-pressed", String(button.value === picture.id));
  for (const pane of panes) pane.draw();
  showCore();
  performance.mark("veca-picture", { detail: picture.id });
  $("status").textContent = picture.cut ? "Long pictures are cut to twice their width." : "";
  remember();
}

let wanted = null; // the picture to show as soon as a setting works
async function choose(id) {
  wanted = id;
  quiet();
  try {
    await show(await json(`api/pictures/${id}/about`));
  } catch (error) {
    fail(error);
  }
}

async function upload(blob) {
  if (blob.size > about.most_bytes) {
    throw new Problem(413, `The picture has ${blob.size.toLocaleString("en")} bytes; at most ${about.most_bytes.toLocaleString("en")} are taken.`);
  }
  $("status").textContent = "Opening the picture …";
  try {
    const response = await ask("api/pictures", { method: "POST", body: blob });
    const picture = await response.json();
    files.set(picture.id, blob);
    if (files.size > 4) files.delete(files.keys().next().value);
    offer({ id: picture.id, title: blob.name || "Your picture" });
    await show(picture);
  } finally {
    if ($("status").textContent.startsWith("Opening")) $("status").textContent = "";
  }
}

function take(blob) {
  if (!blob) return;
  quiet();
  performance.mark("veca-taken");
  upload(blob).catch(fail);
}

// A button for a picture; of those that were uploaded, the last four.
function offer({ id, title }) {
  const buttons = [...$("samples").children];
  if (buttons.some(({ value }) => value === id)) return;
  const button = document.createElement("button");
  Object.assign(button, { type: "button", value: id, title });
  const image = new Image();
  Object.assign(image, { src: `api/pictures/${id}?side=256`, alt: title });
  button.append(image);
  button.addEventListener("click", () => choose(id));
  $("samples").append(button);
  if (buttons.length >= about.samples.length + 4) buttons[about.samples.length].remove();
}
about.samples.forEach(offer);

$("file").addEventListener("change", () => {
  take($("file").files[0]);
  $("file").value = "";
});
const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
addEventListener("dragover", (event) => {
  if (!carries(event)) return;
  event.preventDefault();
  $("dropping").hidden = false;
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) $("dropping").hidden = true;
});
addEventListener("drop", (event) => {
  $("dropping").hidden = true;
  if (!carries(event)) return;
  event.preventDefault();
  take(event.dataTransfer.files[0]);
});
addEventListener("paste", (event) => take([...event.clipboardData.files].find(({ type }) => type.startsWith("image/"))));

// Controls.

$("opacity").addEventListener("input", () => {
  shared.opacity = $("opacity").value / 100;
  showControls();
  draw();
  remember();
});
$("layer").addEventListener("input", () => {
  shared.layer = Number($("layer").value);
  showControls();
  remember();
  refresh();
});
$("core").addEventListener("input", () => on.core(Number($("core").value) || null));
$("compare").addEventListener("click", () => {
  compare = !compare;
  build();
  remember();
  refresh();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  [shared.held, shared.at] = [false, shared.held ? shared.at : null];
  quiet();
  draw();
  remember();
});
addEventListener("resize", draw);
new ResizeObserver(draw).observe($("panes"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("hashchange", () => {
  const id = recallAddress();
  build();
  if (id && id !== shared.picture?.id) choose(id);
  else refresh();
});

$("share").addEventListener("click", async () => {
  remember();
  await new Promise((resolve) => setTimeout(resolve, 250));
  try {
    await navigator.clipboard.writeText(location.href);
    $("status").textContent = "The link is copied.";
  } catch {
    $("status").textContent = "Copy it from the address bar: it leads back to this view.";
  }
});

$("figure").addEventListener("click", () => {
  if (!panes.every((pane) => pane.shown)) return;
  const title = about.samples.find(({ id }) => id === shared.picture.id)?.title ?? "VECA";
  const made = figure(panes.map((pane) => pane.summary), title, $("notice").textContent);
  made.toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = `veca-${shared.picture.id.slice(0, 12)}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
});

const models = about.models.map(({ name, origin }) => (origin ? `${name} (${origin})` : name));
$("about").textContent = `veca ${about.version}, ${models.join(", ")}, ${about.device}.`;
const asked = recallAddress();
build();
if (asked || about.samples.length) await choose(asked ?? about.samples[0].id);
else $("status").textContent = "Drop, paste or choose a picture.";
document.documentElement.dataset.ready = "true";
