"""Resize crops of images of different sizes to one size, all in three launches, with the pixels of Pillow's bicubic.

Pillow resizes columns first, then rows, with 8 bits in between. A pixel is the sum of its taps in 32-bit integers, with
weights rounded to 22 bits; so are they here, and the pixels are the same, bit for bit.

Shapes: B images, T taps at most, S the longest side of the result. An axis is 0 (columns) or 1 (rows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from veca.images.resize import Crop

_BITS = tl.constexpr(22)
_ONE, _HALF = tl.constexpr(1 << 22), tl.constexpr(1 << 21)
# A tile, of few lines: more would take all registers of a thread
_LINES, _PIXELS = 4, 128
# Columns of the table of images
_FIELDS = tl.constexpr(12)


def locate(start: int, shapes: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """Where images (height, width, 3) are that lie one after another from an address on.

    Returns address, shape as (3, height, width) and strides of each: (B, 7).
    """
    height, width, channels = np.array(shapes, np.int64).T
    sizes = height * width * channels
    addresses, one = start + np.cumsum(sizes) - sizes, np.ones_like(sizes)
    return np.stack([addresses, channels, height, width, one, width * channels, channels], 1)


def resample_crops(places: NDArray[np.int64], crops: Sequence[Crop], out: Tensor) -> None:
    """Resize a crop of each image, uint8 on a GPU at `places` (see `locate`), into `out`, uint8 (B, 3, height, width).

    The sizes of all results are those of `out`. None of the crops may grow first.
    """
    device, (height, width), count = out.device, out.shape[-2:], len(places)
    table, boxes, taps = _describe(places, crops, width)
    rows, spans = (torch.from_numpy(array).to(device, non_blocking=True) for array in (table, boxes))
    side, lines = max(width, height), 3 * int(table[:, 9].max())
    between = torch.empty(width * 3 * int(table[:, 9].sum()), dtype=torch.uint8, device=device)
    weights = torch.empty(count, 2, taps, side, dtype=torch.int32, device=device)
    starts = torch.empty(count, 2, side, dtype=torch.int32, device=device)
    _weigh[(count, 2, triton.cdiv(side, _PIXELS))](rows, spans, weights, starts, taps, side, PIXELS=_PIXELS)
    for axis, longest in enumerate((lines, 3 * height)):
        grid = count, triton.cdiv(longest, _LINES), triton.cdiv(width, _PIXELS)
        sizes = {"AXIS": axis, "LINES": _LINES, "PIXELS": _PIXELS}
        _resize[grid](rows, weights, starts, between, out, taps, side, width, height, **sizes)


def _describe(
    places: NDArray[np.int64], crops: Sequence[Crop], width: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], int]:
    """Return for each image a row of the table that kernels read, and its box; and the most taps of any.

    A row is: address of the first pixel of the upright image; steps to its next channel, row and column; its width and
    height; columns and rows of the result; the first row that the second pass reads, and how many; where these begin
    between the passes; whether to flip. In NumPy for all images at once: it keeps up with the decoder.
    """
    address, _, height, across, channel, row, column = places.T
    box = np.array([crop.box for crop in crops], np.float64)
    columns, rows, orientation, flip = np.array([(c.columns, c.rows, c.orientation, c.flip) for c in crops]).T
    mirror_x, mirror_y = np.isin(orientation, (2, 3, 7, 8)), np.isin(orientation, (3, 4, 6, 7))
    address = address + mirror_x * (across - 1) * column + mirror_y * (height - 1) * row
    column, row = np.where(mirror_x, -column, column), np.where(mirror_y, -row, row)
    turned = orientation >= 5
    row, column = np.where(turned, column, row), np.where(turned, row, column)
    height, across = np.where(turned, across, height), np.where(turned, height, across)
    left, top, right, bottom = box.T
    scale = (bottom - top) / rows
    support = 2 * np.maximum(1.0, scale)
    first = np.maximum(0, top + 0.5 * scale - support).astype(np.int64)
    needed = np.minimum(height, (top + (rows - 0.5) * scale + support + 2).astype(np.int64)) - first
    starts = 3 * width * (np.cumsum(needed) - needed)
    table = np.stack([address, channel, row, column, across, height, columns, rows, first, needed, starts, flip], 1)
    widest = max(support.max(), 2 * max(1.0, ((right - left) / columns).max()))
    return table, np.stack([left, right, top, bottom], 1).astype(np.float32), 2 * math.ceil(widest) + 1


@triton.jit
def _cubic(x):
    x = tl.abs(x)
    near = ((1.5 * x - 2.5) * x) * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))


@triton.jit
def _weigh(table, boxes, weights, starts, taps, side, PIXELS: tl.constexpr):
    """The first tap of each column or row of a result, and the weights of its taps, as Pillow computes them."""
    i, axis = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pixel = tl.program_id(2) * PIXELS + tl.arange(0, PIXELS)
    size = tl.load(table + i * _FIELDS + 4 + axis)
    count = tl.load(table + i * _FIELDS + 6 + axis)
    start, end = tl.load(boxes + i * 4 + 2 * axis), tl.load(boxes + i * 4 + 2 * axis + 1)
    scale = (end - start).to(tl.float64) / count.to(tl.float64)  # Pillow takes boxes in single precision
    start = start.to(tl.float64)
    stretch = tl.maximum(scale, 1.0)
    support = 2.0 * stretch
    inverse = 1.0 / stretch
    # Columns and rows after the last repeat it.
    centre = start + (tl.minimum(pixel, (count - 1).to(tl.int32)).to(tl.float64) + 0.5) * scale
    first = tl.maximum(centre - support + 0.5, 0.0).to(tl.int32)
    last = tl.minimum((centre + support + 0.5).to(tl.int32), size.to(tl.int32))
    total = tl.zeros((PIXELS,), tl.float64)
    for tap in range(taps):
        weight = _cubic(((tap + first).to(tl.float64) - centre + 0.5) * inverse)
        total += tl.where(tap < last - first, weight, 0.0)
    mask = pixel < side
    tl.store(starts + (i * 2 + axis) * side + pixel, first, mask)
    for tap in range(taps):
        weight = _cubic(((tap + first).to(tl.float64) - centre + 0.5) * inverse)
        weight = tl.where(tap < last - first, weight / total, 0.0) * _ONE
        rounded = (weight + tl.where(weight < 0.0, -0.5, 0.5)).to(tl.int32)
        tl.store(weights + ((i * 2 + axis) * taps + tap) * side + pixel, rounded, mask)


@triton.jit
def _resize(
    table, weights, starts, between, out, taps, side, width, height,
    AXIS: tl.constexpr, LINES: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """One pass: columns of the image to `between` (3, rows of the image, columns), or rows of that to `out`."""
    i = tl.program_id(0).to(tl.int64)
    row = table + i * _FIELDS
    size = tl.load(row + 4 + AXIS).to(tl.int32)
    first_row, rows = tl.load(row + 8).to(tl.int32), tl.load(row + 9).to(tl.int32)
    x = tl.program_id(2) * PIXELS + tl.arange(0, PIXELS)[None, :]
    line = tl.program_id(1) * LINES + tl.arange(0, LINES)[:, None]
    lines = 3 * rows if AXIS == 0 else 3 * height
    if tl.program_id(1) * LINES < lines:
        inside, line = (line < lines) & (x < width), tl.minimum(line, lines - 1)
        x = tl.minimum(x, width - 1)
        middle = between + tl.load(row + 10)
        if AXIS == 0:
            channel, y = line // rows, line % rows
            source = tl.load(row).to(tl.pointer_type(tl.uint8))
            channel_step, row_step = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
            step, last = tl.load(row + 3).to(tl.int32), size - 1
            place, offset = x, channel * channel_step + (y + first_row) * row_step
            target = middle + line * width + x
        else:
            channel, y = line // height, line % height
            source, step, last = middle, width, first_row + rows - 1
            place, offset = y, (channel * rows - first_row) * width + x
            column = tl.where(tl.load(row + 11) != 0, width - 1 - x, x)
            target = out + i * 3 * height * width + line * width + column
        start = tl.load(starts + (i * 2 + AXIS) * side + place)
        weight = weights + (i * 2 + AXIS) * taps * side + place
        total = tl.full((LINES, PIXELS), _HALF, tl.int32)
        for tap in range(taps):
            # Beyond the last pixel weights are zero.
            pixel = tl.load(source + (offset + tl.minimum(start + tap, last) * step))
            total += pixel.to(tl.int32) * tl.load(weight + tap * side)
        tl.store(target, tl.minimum(tl.maximum(total >> _BITS, 0), 255).to(tl.uint8), inside)
