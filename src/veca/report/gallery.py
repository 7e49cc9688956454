"""Segmentation and depth in colours, with legends; thumbnails of them, written to the gallery of a folder."""

import colorsys
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from veca.report.charts import load_font
from veca.utils.files import atomic_path
from veca.utils.text import printable, shorten

LONG_SIDE = 320
_TEXT, _LEGEND_ROWS = 16, 40
# Colours of depth at even distances.
_NEAR_TO_FAR = ((252, 255, 164), (249, 142, 9), (188, 55, 84), (87, 16, 110), (20, 11, 53))


def class_colours(count: int) -> NDArray[np.uint8]:
    """A colour for each class: (count, 3), successive ones far apart; black is left for pixels without a class."""
    # Steps of the golden ratio around the colour circle never come close to an earlier hue.
    rows = [colorsys.hls_to_rgb(i * 0.618034 % 1, (0.5, 0.65, 0.35)[i % 3], 0.75) for i in range(count)]
    return (np.array(rows).reshape(-1, 3) * 255).round().astype(np.uint8)


def colour_classes(mask: NDArray[Any], count: int) -> Image.Image:
    """A mask (height, width) in the colours of its classes; other values are black."""
    table = np.concatenate([class_colours(count), np.zeros((1, 3), np.uint8)])
    known = (mask >= 0) & (mask < count)
    return Image.fromarray(table[np.where(known, mask, count)])


def colour_depth(depth: NDArray[Any], low: float, high: float) -> Image.Image:
    """Depth in metres (height, width) from light, near, to dark; black where there is no measurement."""
    position = ((depth - low) / max(high - low, 1e-6)).clip(0, 1) * (len(_NEAR_TO_FAR) - 1)
    stops = range(len(_NEAR_TO_FAR))
    pixels = np.stack([np.interp(position, stops, channel) for channel in zip(*_NEAR_TO_FAR, strict=True)], -1)
    pixels[depth <= 0] = 0
    return Image.fromarray(pixels.round().astype(np.uint8))


def depth_range(depth: NDArray[Any], default: float) -> tuple[float, float]:
    """The range of a depth map in metres, without outliers; from 0 to `default` where nothing is measured."""
    measured = depth[depth > 0]
    low, high = np.quantile(measured, (0.02, 0.98)) if len(measured) else (0.0, default)
    return float(low), float(high)


def draw_legend(classes: Sequence[str]) -> Image.Image:
    """Number, colour and name of each class, in columns."""
    texts = [f"{i}  {shorten(printable(name), 80)}" for i, name in enumerate(classes)]
    font, colours = load_font(_TEXT)[0], class_colours(len(classes)).tolist()
    row, width = 2 * _TEXT, math.ceil(max(map(font.getlength, texts))) + 4 * _TEXT
    rows = min(len(texts), _LEGEND_ROWS)
    image = Image.new("RGB", (width * -(-len(texts) // rows), row * rows), "white")
    draw = ImageDraw.Draw(image)
    for i, (text, colour) in enumerate(zip(texts, colours, strict=True)):
        x, y = width * (i // rows), row * (i % rows) + row // 2
        draw.rectangle((x + _TEXT // 2, y - _TEXT // 2, x + _TEXT * 3 // 2, y + _TEXT // 2), tuple(colour))
        draw.text((x + 2 * _TEXT, y), text, "black", font, "lm")
    return image


def draw_depth_legend(image: Image.Image, low: float, high: float) -> Image.Image:
    """A picture of depths with the range of its colours below it, in metres."""
    whole = Image.new("RGB", (max(image.width, 12 * _TEXT), image.height + 2 * _TEXT), "white")
    whole.paste(image)
    font, draw = load_font(_TEXT)[0], ImageDraw.Draw(whole)
    near, far = f"{low:.2f} m", f"{high:.2f} m"
    left, right = (math.ceil(font.getlength(text)) + _TEXT for text in (near, far))
    scale = np.linspace(1, 2, whole.width - left - right)[None].repeat(_TEXT, 0)  # from near to far, above 0
    whole.paste(colour_depth(scale, 1, 2), (left, image.height + _TEXT // 2))
    for x, text, anchor in ((_TEXT // 2, near, "lm"), (whole.width - _TEXT // 2, far, "rm")):
        draw.text((x, image.height + _TEXT), text, "black", font, anchor)
    return whole


def save_picture(image: Image.Image, folder: Path, name: str) -> str:
    """Write `gallery/name` in a folder and return that path."""
    path = folder / "gallery" / name
    with atomic_path(path) as part:
        if path.suffix == ".webp":
            image.thumbnail((LONG_SIDE, LONG_SIDE))
            image.save(part, "WEBP", quality=80)
        else:  # colours of classes must not mix
            image.thumbnail((LONG_SIDE, LONG_SIDE), Image.Resampling.NEAREST)
            image.save(part, "PNG", optimize=True)
    return f"gallery/{name}"
