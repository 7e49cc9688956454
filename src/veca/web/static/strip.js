// Pictures as buttons, alone and in strips of those that are like another one.

// A button with a picture on it.
export function thumbnail({ id, title }, open) {
  const [button, image] = [document.createElement("button"), new Image()];
  Object.assign(button, { type: "button", value: id, title });
  Object.assign(image, { loading: "lazy", src: `api/pictures/${id}?side=256`, alt: title });
  image.addEventListener("error", () => button.remove()); // it cannot be read
  button.append(image);
  button.addEventListener("click", open);
  return button;
}

// Fill a strip with the pictures found, each with its cosine, and with the outline of the part that is meant.
export function fillStrip(strip, found, open) {
  const key = JSON.stringify(found.map(({ id, box }) => [id, box]));
  if (strip.dataset.found === key) return;
  strip.dataset.found = key;
  strip.replaceChildren(...found.map(({ id, title, similarity, box, readable = true }) => {
    const cosine = similarity.toFixed(2).replace("-", "−");
    const label = document.createElement("span");
    label.textContent = cosine;
    if (!readable) {
      label.textContent += `: ${title} cannot be opened`;
      return label;
    }
    const button = thumbnail({ id, title: `${title}, cosine ${cosine}` }, () => open(id));
    if (box) button.append(outlined(button.firstChild, box));
    button.append(label);
    return button;
  }));
}

// A picture with the outline of a part of it, [x, y, width, height] from 0 to 1.
function outlined(image, box) {
  const [frame, mark] = [document.createElement("span"), document.createElement("i")];
  frame.className = "outlined";
  ["left", "top", "width", "height"].forEach((side, i) => (mark.style[side] = `${100 * box[i]}%`));
  frame.append(image, mark);
  return frame;
}
