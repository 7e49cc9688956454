// Drawing on canvases: colour maps, overlays, marks, and the figure to save.

let ramp = new Uint8Array(768);

// The server sends a few colours; interpolate 256.
export function setHeat(colours) {
  const anchors = colours.map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
  for (let level = 0; level < 256; level++) {
    const at = (level / 255) * (anchors.length - 1);
    const low = Math.min(Math.floor(at), anchors.length - 2);
    for (let c = 0; c < 3; c++) {
      ramp[3 * level + c] = Math.round(anchors[low][c] + (at - low) * (anchors[low + 1][c] - anchors[low][c]));
    }
  }
}

// A canvas with one pixel per patch, of RGB bytes or of levels from 0 to 255.
export function tiles(data, rows, columns) {
  const image = new ImageData(columns, rows);
  const colours = data.length === 3 * rows * columns;
  for (let i = 0; i < rows * columns; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = colours ? data[3 * i + c] : ramp[3 * data[i] + c];
    image.data[4 * i + 3] = 255;
  }
  const canvas = new OffscreenCanvas(columns, rows);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// Cosine of every patch with patch `at`: levels from 0 to 255, and the cosines at both ends.
export function similarity({ data, shape: [rows, columns, width] }, at) {
  const count = rows * columns;
  const values = new Float32Array(count);
  let low = 1;
  let high = -1;
  const lengthOf = (start) => {
    let sum = 0;
    for (let k = 0; k < width; k++) sum += data[start + k] ** 2;
    return Math.sqrt(sum) || 1;
  };
  const own = at * width;
  const length = lengthOf(own);
  for (let i = 0; i < count; i++) {
    let dot = 0;
    const start = i * width;
    for (let k = 0; k < width; k++) dot += data[start + k] * data[own + k];
    values[i] = dot / (length * lengthOf(start));
    if (i === at) continue; // always 1: it would only stretch the scale
    low = Math.min(low, values[i]);
    high = Math.max(high, values[i]);
  }
  const span = Math.max(high - low, 1e-6);
  const levels = Uint8Array.from(values, (v) => Math.max(0, Math.min(255, Math.round((255 * (v - low)) / span))));
  return { levels, low, high };
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

export function paint(context, photo, overlay, opacity, dim = 0) {
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
    context.imageSmoothingEnabled = false;
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

// The path of a core through the layers, and a ring at its place in one of them.
export function drawPath(context, { data, shape: [layers, cores] }, core, layer, scale) {
  const { width, height } = context.canvas;
  const place = (l) => [0, 1].map((axis) => data[2 * (l * cores + core) + axis]);
  const origin = place(0);
  const points = Array.from({ length: layers }, (_, l) => {
    const [x, y] = place(l).map((value, axis) => origin[axis] + scale * (value - origin[axis]));
    return [((x + 1) / 2) * width, ((y + 1) / 2) * height];
  });
  strokeTwice(context, 1.5, "rgb(255 255 255 / 0.9)", () => points.forEach(([x, y]) => context.lineTo(x, y)));
  context.fillStyle = "#fff";
  for (const [x, y] of points) {
    context.beginPath();
    context.arc(x, y, 1.9 * unit(context), 0, 7);
    context.fill();
  }
  const [x, y] = points[layer - 1];
  strokeTwice(context, 2, "#fff", () => context.arc(x, y, 8 * unit(context), 0, 7));
}

// One bar per core; that of `chosen` is highlighted.
export function drawBars(canvas, shares, chosen) {
  const context = fitCanvas(canvas, canvas.clientWidth / Math.max(1, canvas.clientHeight));
  const { width, height } = canvas;
  const style = getComputedStyle(canvas);
  context.clearRect(0, 0, width, height);
  const step = width / shares.length;
  shares.forEach((share, core) => {
    const tall = Math.max(1, (share / 255) * (height - 1));
    context.fillStyle = style.getPropertyValue(core === chosen ? "--accent" : "--bar");
    context.fillRect(core * step + step * 0.12, height - tall, step * 0.76, tall);
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
