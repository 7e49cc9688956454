// Search in an index: by the picture of a pane, or by the part of it in a box that is drawn with the mouse.

import { LatestRequest, json } from "./api.js";
import { fillStrip } from "./strip.js";

const MIN_DRAG = 6; // px: less is a click
const COUNT = 12;

// The part of a picture that is searched by: [x, y, width, height] from 0 to 1. It is gone with the picture.
export const boxOf = (shared, picture) => (picture && shared.box?.picture === picture.id ? shared.box.part : null);

// Have `draw` called with the box that is dragged over an element, and `done` with the last one.
export function bindDrag(element, at, draw, done) {
  let start = null;
  let part = null;
  element.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button) return;
    [start, part] = [{ x: event.clientX, y: event.clientY, at: at(event, element) }, null];
  });
  element.addEventListener("pointermove", (event) => {
    if (!start || (!part && Math.hypot(event.clientX - start.x, event.clientY - start.y) < MIN_DRAG)) return;
    if (!part) element.setPointerCapture(event.pointerId);
    const ends = [start.at, at(event, element)];
    const [left, top] = [0, 1].map((axis) => Math.min(...ends.map((end) => end[axis])));
    part = [left, top, Math.abs(ends[0][0] - ends[1][0]), Math.abs(ends[0][1] - ends[1][1])];
    draw(part);
  });
  const end = () => {
    if (part) {
      done(part);
      // The click that ends a drag, if there is one, chooses no patch.
      const ignore = (event) => event.stopImmediatePropagation();
      element.addEventListener("click", ignore, { capture: true, once: true });
      setTimeout(() => element.removeEventListener("click", ignore, { capture: true }), 50);
    }
    start = null;
  };
  element.addEventListener("pointerup", end);
  element.addEventListener("pointercancel", () => (start = part = null));
}

export class Search {
  // `open` shows a picture, `choose` sets the part that is searched by, or null; `around` is that around the patch.
  constructor(element, index, open, choose, around) {
    Object.assign(this, { element, index, open, requests: new LatestRequest() });
    this.button = element.querySelector(".whole");
    this.button.addEventListener("click", () => choose(this.part ? null : around()));
  }

  // Search by the picture of a pane, or by a part of it.
  async show(pane, part) {
    const { model, cores, width } = pane.setting;
    this.element.hidden = this.index?.model !== model;
    if (this.element.hidden) return;
    this.part = part;
    this.button.textContent = part ? "search by the whole picture" : "search by the part around the patch";
    const query = new URLSearchParams({ picture: pane.picture.id, cores, width, count: COUNT });
    if (part) query.set("box", pixels(part, pane.picture));
    const headers = { "X-Veca-Pane": pane.id };
    const send = (signal) => json(`api/search?${query}`, { signal, headers });
    const found = await this.requests.run(send).catch((error) => ({ problem: error.message }));
    if (!found) return;
    const note = this.element.querySelector("h3 span");
    const compared = part && !this.index.regions ? ", compared with whole pictures" : "";
    note.textContent = found.problem ?? `${part ? "by the part in the box" : "by global feature"}${compared}`;
    fillStrip(this.element.querySelector(".strip"), found.matches ?? [], this.open);
  }
}

// A part of a picture in its pixels, at least one.
function pixels([x, y, width, height], picture) {
  const ends = (start, length, full) => {
    const first = Math.min(Math.floor(start * full), full - 1);
    return [first, Math.max(1, Math.min(full, Math.round((start + length) * full)) - first)];
  };
  const [[left, across], [top, down]] = [ends(x, width, picture.width), ends(y, height, picture.height)];
  return [left, top, across, down].join();
}
