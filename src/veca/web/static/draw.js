// Drawing on canvases: colour maps, overlays, marks, and the figure to save.

const ramp = new Uint8Array(768);
const cores = new Uint8Array(768);

// The server sends a few colours of each ramp; interpolate 256.
export function setRamps({ heat, core_colours }) {
  for (const [colours, levels] of [[heat, ramp], [core_colours, cores]]) {
    const anchors = colours.map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
    for (let level = 0; level < 256; level++) {
      const at = (level / 255) * (anchors.length - 1);
      const low = Math.min(Math.floor(at), anchors.length - 2);
      for (let c = 0; c < 3; c++) {
        levels[3 * level + c] = Math.round(anchors[low][c] + (at - low) * (anchors[low + 1][c] - anchors[low][c]));
      }
    }
  }
}

// The colour of core `core` of a bank of `count`.
function coreColour(core, count) {
  const level = 3 * Math.round((255 * core) / Math.max(1, count - 1));
  return `rgb(${cores.subarray(level, level + 3).join(" ")})`;
}

// Values (rows × columns × channels) at more points, by bicubic interpolation (Catmull-Rom) between centres of patches.
function upsample(values, rows, columns, channels, factor) {
  const weights = (along) => {
    const at = (along + 0.5) / factor - 0.5;
    const first = Math.floor(at);
    const t = at - first;
    return [first, [((2 - t) * t - 1) * t / 2, ((3 * t - 5) * t * t + 2) / 2, ((4 - 3 * t) * t + 1) * t / 2, ((t - 1) * t * t) / 2]];
  };
  const clip = (value, most) => Math.min(Math.max(value, 0), most - 1);
  const [tall, wide] = [rows * factor, columns * factor];
  const across = new Float32Array(rows * wide * channels);
  for (let x = 0; x < wide; x++) {
    const [first, parts] = weights(x);
    for (let row = 0; row < rows; row++) {
      for (let c = 0; c < channels; c++) {
        let sum = 0;
        for (let k = 0; k < 4; k++) sum += parts[k] * values[(row * columns + clip(first + k - 1, columns)) * channels + c];
        across[(row * wide + x) * channels + c] = sum;
      }
    }
  }
  const line = wide * channels;
  const all = new Float32Array(tall * line);
  for (let y = 0; y < tall; y++) {
    const [first, parts] = weights(y);
    for (let k = 0; k < 4; k++) {
      const from = clip(first + k - 1, rows) * line;
      for (let i = 0; i < line; i++) all[y * line + i] += parts[k] * across[from + i];
    }
  }
  return all;
}

// A canvas of levels from 0 to `most`, of RGB or to be coloured by the ramp. One pixel per patch, or `smooth`: levels are
// interpolated, then coloured. Where `mask` is not above 0 it is transparent.
export function tiles(levels, rows, columns, { most = 1, smooth = false, mask = null } = {}) {
  const channels = levels.length / (rows * columns);
  const factor = smooth ? Math.max(1, Math.min(16, Math.round(256 / Math.max(rows, columns)))) : 1;
  if (factor > 1) {
    levels = upsample(levels, rows, columns, channels, factor);
    mask = mask && upsample(mask, rows, columns, 1, factor);
  }
  const [tall, wide] = [rows * factor, columns * factor];
  const edge = smooth ? 0.05 : 1e-9; // from transparent to opaque, in levels
  const image = new ImageData(wide, tall); // its bytes are clipped to 0 … 255
  for (let i = 0; i < tall * wide; i++) {
    const level = channels === 1 ? Math.max(0, Math.min(255, Math.round((255 * levels[i]) / most))) : 0;
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = channels === 1 ? ramp[3 * level + c] : (255 * levels[3 * i + c]) / most;
    image.data[4 * i + 3] = mask ? 255 * (0.5 + mask[i] / edge) : 255;
  }
  const canvas = new OffscreenCanvas(wide, tall);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

const lengths = new WeakMap(); // of the features of each patch, by tensor

function lengthOf(feature) {
  let sum = 0;
  for (let k = 0; k < feature.length; k++) sum += feature[k] ** 2;
  return Math.sqrt(sum) || 1;
}

// Cosines of every patch with a feature, the greatest of them and its patch, and their ends without that of patch `own`:
// it is always 1 and would only stretch the scale.
export function similarity(features, feature, own = -1) {
  const { data, shape: [rows, columns, width] } = features;
  const count = rows * columns;
  if (!lengths.has(features)) {
    lengths.set(features, Float32Array.from({ length: count }, (_, i) => lengthOf(data.subarray(i * width, (i + 1) * width))));
  }
  const [all, length] = [lengths.get(features), lengthOf(feature)];
  const values = new Float32Array(count);
  let [low, high, best] = [1, -1, 0];
  for (let i = 0; i < count; i++) {
    let dot = 0;
    const start = i * width;
    for (let k = 0; k < width; k++) dot += data[start + k] * feature[k];
    values[i] = dot / (length * all[i]);
    if (values[i] > values[best]) best = i;
    if (i === own) continue;
    low = Math.min(low, values[i]);
    high = Math.max(high, values[i]);
  }
  const span = Math.max(high - low, 1e-6);
  return { levels: values.map((value) => (value - low) / span), low, high, best };
}

// Resize a canvas to its box on the page, in device pixels.
export function fitCanvas(canvas, aspect) {
  const width = Math.max(1, Math.round(canvas.clientWidth * Math.min(devicePixelRatio, 2)));
  const height = Math.max(1, Math.round(width / aspect));
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  return canvas.getContext("2d");
}

// A photo, dimmed, and an overlay on it; a `smooth` one is enlarged smoothly.
export function paint(context, photo, overlay, { opacity = 0, dim = 0, smooth = false }) {
  const { width, height } = context.canvas;
  context.globalAlpha = 1;
  context.imageSmoothingEnabled = true;
  context.imageSmoothingQuality = "high";
  context.drawImage(photo, 0, 0, width, height);
  if (dim) {
    context.fillStyle = `rgb(0 0 0 / ${dim})`;
    context.fillRect(0, 0, width, height);
  }
  if (overlay && opacity > 0) {
    context.globalAlpha = opacity;
    context.imageSmoothingEnabled = smooth;
    context.drawImage(overlay, 0, 0, width, height);
    context.globalAlpha = 1;
  }
}

function strokeTwice(context, width, colour, draw) {
  for (const [line, style] of [[width + 2.4, "rgb(0 0 0 / 0.6)"], [width, colour]]) {
    context.lineWidth = line * unit(context);
    context.strokeStyle = style;
    context.beginPath();
    draw();
    context.stroke();
  }
}

const unit = (context) => Math.max(1, context.canvas.width / 480);

export function drawFrame(context, row, column, rows, columns, held) {
  const [width, height] = [context.canvas.width / columns, context.canvas.height / rows];
  strokeTwice(context, held ? 2.6 : 1.6, "#fff", () => context.rect(column * width, row * height, width, height));
}

// A part of the picture, [x, y, width, height] from 0 to 1.
export function drawBox(context, [x, y, across, down]) {
  const { width, height } = context.canvas;
  strokeTwice(context, 2, "#fff", () => context.rect(x * width, y * height, across * width, down * height));
}

// The factor by which paths are drawn longer so that they can be seen, as in `veca figure paths`.
export function pathScale({ data, shape: [layers, cores] }) {
  let longest = 0;
  for (let core = 0; core < cores; core++) {
    const first = 2 * core;
    const last = 2 * ((layers - 1) * cores + core);
    longest = Math.max(longest, Math.hypot(data[last] - data[first], data[last + 1] - data[first + 1]) / 2);
  }
  return [200, 100, 50, 20, 10, 5, 2].find((factor) => factor * longest <= 0.1) ?? 1;
}

// The path of a core through the layers in its colour, and a ring at its place in one of them.
export function drawPath(context, { data, shape: [layers, cores] }, core, bank, layer, scale) {
  const { width, height } = context.canvas;
  const place = (l) => [0, 1].map((axis) => data[2 * (l * cores + core) + axis]);
  const origin = place(0);
  const points = Array.from({ length: layers }, (_, l) => {
    const [x, y] = place(l).map((value, axis) => origin[axis] + scale * (value - origin[axis]));
    return [((x + 1) / 2) * width, ((y + 1) / 2) * height];
  });
  const colour = coreColour(core, bank);
  strokeTwice(context, 1.5, colour, () => points.forEach(([x, y]) => context.lineTo(x, y)));
  context.fillStyle = colour;
  for (const [x, y] of points) {
    context.beginPath();
    context.arc(x, y, 1.9 * unit(context), 0, 7);
    context.fill();
  }
  const [x, y] = points[layer - 1];
  strokeTwice(context, 2, "#fff", () => context.arc(x, y, 8 * unit(context), 0, 7));
}

// One bar per core of a bank of `bank`, in its colour; the mark under that of `chosen` is in the text's colour.
export function drawBars(canvas, shares, chosen, bank) {
  const context = fitCanvas(canvas, canvas.clientWidth / Math.max(1, canvas.clientHeight));
  const { width, height } = canvas;
  context.clearRect(0, 0, width, height);
  const step = width / shares.length;
  const mark = Math.max(3, Math.round(height / 16));
  shares.forEach((share, core) => {
    const tall = Math.max(1, (share / 255) * (height - 3 * mark));
    context.fillStyle = coreColour(core, bank);
    context.fillRect(core * step + step * 0.12, height - 2 * mark - tall, step * 0.76, tall);
    if (core !== chosen) return;
    context.fillStyle = "#fff";
    context.fillRect(core * step + step * 0.12, height - mark, step * 0.76, mark);
  });
}

// Everything that is shown, as one image with captions.
export function drawFigure(panes, title, notice) {
  const [cell, gap, margin] = [520, 28, 56];
  const body = '"Liberation Sans", "Segoe UI", system-ui, sans-serif';
  const rows = panes.map((pane) => Math.round(cell / pane.aspect));
  const [width, top] = [2 * margin + 3 * cell + 2 * gap, notice ? 190 : 150];
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = top + rows.reduce((sum, height) => sum + height + 176, 0);
  const context = canvas.getContext("2d");
  const write = (text, x, y, font, colour, most = width - margin - x) => {
    context.font = font;
    context.fillStyle = colour;
    context.fillText(text, x, y, most);
  };
  context.fillStyle = "#fbfaf6";
  context.fillRect(0, 0, width, canvas.height);
  write(title, margin, 96, "500 44px Charter, Georgia, serif", "#22211e");
  if (notice) write(notice, margin, 140, `22px ${body}`, "#8a5a00");
  let y = top;
  panes.forEach((pane, i) => {
    write(pane.title, margin, y, `600 24px ${body}`, "#8f3352");
    write(pane.costs, margin, y + 34, `20px ${body}`, "#6a675f");
    pane.maps.forEach(({ canvas: map, label, text }, j) => {
      const x = margin + j * (cell + gap);
      context.drawImage(map, x, y + 56, cell, rows[i]);
      const base = y + rows[i] + 86;
      write(label, x, base, `600 20px ${body}`, "#22211e", cell);
      const beside = context.measureText(`${label}  `).width;
      context.font = `20px ${body}`;
      const fits = beside + context.measureText(text).width <= cell; // else on a line of its own
      write(text, x + fits * beside, base + !fits * 27, `20px ${body}`, "#6a675f", cell);
    });
    y += rows[i] + 176;
  });
  return canvas;
}
