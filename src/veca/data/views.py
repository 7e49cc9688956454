"""What of a picture a backbone gets to see: the centre, a random part, or all of it with its mask or depth.

All are uint8 (3, height, width), to be normalised by the backbone.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.images import MAX_PIXELS, ImageTooLargeError, nearest_sizes, resample, to_tensor

SHORT_SIDE = 1.125
"""Of the resized picture, in sides of the centre that is kept: 288 for 256."""
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
"""The share of a picture a random part has, and its width over its height."""


def seeded(*numbers: int) -> random.Random:
    """Random numbers that follow from whole numbers alone, on every machine."""
    return random.Random(" ".join(map(str, numbers)))


def centre(image: Image.Image, side: int) -> Tensor:
    """The short side becomes 1.125 × `side` and the centre is kept; for multiples of 16, `fit_image`'s "crop"."""
    width, height = image.size
    part = min(width, height) / SHORT_SIDE
    left, top = (width - part) / 2, (height - part) / 2
    return to_tensor(resample(image, (side, side), (left, top, width - left, height - top)))


def random_part(image: Image.Image, side: int, draw: random.Random, area: tuple[float, float] = AREA) -> Tensor:
    """A random part at `side` × `side`, in half the cases mirrored, as torchvision's RandomResizedCrop draws it."""
    width, height = image.size
    for _ in range(10):
        pixels = width * height * draw.uniform(*area)
        aspect = math.exp(draw.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        across, down = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
        if 0 < across <= width and 0 < down <= height:
            left, top = draw.randint(0, width - across), draw.randint(0, height - down)
            break
    else:  # a very long picture: the largest part from its centre that is not too long itself
        across, down = min(width, round(height * ASPECT[1])), min(height, round(width / ASPECT[0]))
        left, top = (width - across) // 2, (height - down) // 2
    part = to_tensor(resample(image, (side, side), (left, top, left + across, top + down)))
    return part.flip(-1) if draw.random() < 0.5 else part


def whole(image: Image.Image, short: int, multiple: int = 1) -> Tensor:
    """All of it, the short side at `short`, the other at the nearest multiple to keeping the aspect ratio."""
    width, height = image.size
    scale = short / min(width, height)
    rows, columns = nearest_sizes(height * scale, width * scale, multiple)
    if rows * columns > MAX_PIXELS:
        raise ImageTooLargeError(f"{height}×{width}; with a short side of {short} it has over {MAX_PIXELS:,} pixels")
    return to_tensor(resample(image, (columns, rows), (0, 0, width, height)))


def nearest(values: NDArray[Any], size: tuple[int, int]) -> Tensor:
    """A mask or depth (height, width) at `size` = (rows, columns): at each pixel the value at its centre."""
    height, width = values.shape
    rows = ((np.arange(size[0]) + 0.5) * height / size[0]).astype(np.int64)
    columns = ((np.arange(size[1]) + 0.5) * width / size[1]).astype(np.int64)
    found = values[rows[:, None], columns]
    return torch.from_numpy(found.astype(np.float32 if found.dtype.kind == "f" else np.int32))
