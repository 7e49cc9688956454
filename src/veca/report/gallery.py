"""Thumbnails of segmentation and depth: labels and predictions in colours, written to the gallery of a folder."""

import colorsys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from veca.utils.files import atomic_path

LONG_SIDE = 320
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
