"""Resize, crop and pad Pillow images so that both sides are multiples of the patch size."""

from __future__ import annotations

import operator
from typing import Literal, get_args

import numpy as np
from PIL import Image

from veca.errors import ArgumentError
from veca.images.decode import MAX_PIXELS, ImageTooLargeError
from veca.inputs import nearest_sizes

Fit = Literal["crop", "stretch", "keep", "pad"]
# One side, or (height, width)
FitSize = int | tuple[int, int] | None

PATCH = 16
# Short side of the resized image over the side of its centre crop: 288 for 256
CROP_RATIO = 1.125


def fit_image(image: Image.Image, size: FitSize, fit: Fit = "crop", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Resize an RGB image (bicubic, antialiased) so that both sides are multiples of 16.

    - "crop": the evaluation transform. The short side becomes 1.125 × `size` and the centre is kept.
    - "stretch": exactly `size`; the aspect ratio is not kept.
    - "keep": the short side becomes `size`, the long one the multiple of 16 nearest to keeping
      the aspect ratio; nothing is cropped. Without `size`: the multiples nearest to the sides.
    - "pad": the short side becomes `size`; without it, nothing is resized. Then the last column
      and row are repeated to the right and downwards up to the next multiples of 16.

    `size` is one number or, for "crop" and "stretch", also (height, width).

    Padding adds at most 15 pixels to a side, so every patch holds real pixels. Patches that lie
    fully inside the image keep exactly their pixels. Coordinates span the padded canvas, so
    those of a real patch move by at most 2 · 15 / side; the cores see at most one more row and
    one more column of patches, partly padded.

    >>> fit_image(Image.new("RGB", (640, 400)), 64, "keep").size
    (96, 64)
    """
    check_fit(size, fit)
    check_rgb(image)
    width, height = image.size
    if isinstance(size, tuple):
        rows, columns = size
    elif size is not None and fit in ("crop", "stretch"):
        rows = columns = size
    else:
        scale = size / min(height, width) if size else 1
        rows, columns = round(height * scale), round(width * scale)
        if fit == "keep":
            rows, columns = nearest_sizes(height * scale, width * scale)
    pad_rows, pad_columns = -rows % PATCH, -columns % PATCH
    total = (rows + pad_rows) * (columns + pad_columns)
    if total > max_pixels:
        made = f"{rows + pad_rows}×{columns + pad_columns} = {total:,} pixels"
        rule = f"at most {max_pixels:,} are allowed. Use a smaller size, fit='crop' or max_pixels={total}"
        raise ImageTooLargeError(f"{height}×{width}; fit={fit!r} with size={size} would make it {made}, and {rule}")
    if fit == "crop":
        return crop_centre(image, columns, rows)
    image = resample(image, (columns, rows), (0, 0, width, height))
    if pad_rows or pad_columns:
        image = Image.fromarray(np.pad(np.asarray(image), ((0, pad_rows), (0, pad_columns), (0, 0)), mode="edge"))
    return image


def crop_centre(image: Image.Image, columns: int, rows: int) -> Image.Image:
    """Resize the short side to 1.125 × that of the crop and keep the centre, `columns` × `rows`, of an RGB image."""
    width, height = image.size
    scale = min(height / rows, width / columns) / CROP_RATIO
    left, top = (width - columns * scale) / 2, (height - rows * scale) / 2
    return resample(image, (columns, rows), (left, top, width - left, height - top))


def resample(image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float]) -> Image.Image:
    """Resize the part of an RGB image in `box` = (left, top, right, bottom) to `size` = (width, height).

    Bicubic and antialiased. Pixels around the box contribute at its edges: the result is a crop of the resized image.
    """
    left, top, right, bottom = box
    # Pillow resizes horizontally first: an image 1 wide and millions high would grow before it shrinks.
    if size[0] > right - left and size[1] < bottom - top:
        image = image.resize((image.width, size[1]), Image.Resampling.BICUBIC, (0, top, image.width, bottom))
        top, bottom = 0, size[1]
    return image.resize(size, Image.Resampling.BICUBIC, (left, top, right, bottom))


def check_fit(size: FitSize, fit: str) -> None:
    """Raise `ArgumentError` unless `fit_image` can use both."""
    if fit not in get_args(Fit):
        raise ArgumentError(f"fit is {fit!r}; it must be one of {', '.join(get_args(Fit))}")
    if size is None and fit in ("crop", "stretch"):
        raise ArgumentError(f"size is None; fit={fit!r} needs one. Or use fit='keep' or 'pad'")
    if isinstance(size, tuple) and fit in ("keep", "pad"):
        raise ArgumentError(f"size is {size}; fit={fit!r} takes one number, the short side")
    for side in size if isinstance(size, tuple) else (size,):
        if side is not None and (operator.index(side) < PATCH or side % PATCH):
            low = max(side // PATCH, 1) * PATCH
            nearest = f"{low} or {low + PATCH}" if side > PATCH else str(PATCH)
            raise ArgumentError(f"size is {side}; it must be a positive multiple of {PATCH}. Nearest: {nearest}")


def check_rgb(image: Image.Image) -> None:
    """Raise `ArgumentError` for an image of another mode."""
    if image.mode != "RGB":
        raise ArgumentError(f"image has mode {image.mode}; it must be RGB. open_image converts it")
