"""YCbCr planes of JPEGs of different sizes to RGB, all in one launch, with the pixels of libjpeg.

Chroma that is sampled at half the width or height is interpolated as libjpeg does by default ("fancy upsampling"):
three parts of the nearest sample and one of the next, along each axis, in integers with the same rounding.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

# A tile: rows and columns of one image
_ROWS, _COLUMNS = 8, 128
# Columns of the table of images
_FIELDS = tl.constexpr(10)


def planes_to_rgb(table: NDArray[np.int64], device: torch.device) -> None:
    """Convert images on a GPU; a row of the table says where the planes and the result of one are.

    Address and pitch (bytes from row to row) of Y, of Cb, and of Cr (its pitch is that of Cb); address of the result
    (3, height, width); height and width; height and width of the chroma, zero where there is none.
    """
    height, width = (int(table[:, column].max()) for column in (6, 7))
    grid = len(table), triton.cdiv(height, _ROWS), triton.cdiv(width, _COLUMNS)
    places = torch.from_numpy(table).to(device, non_blocking=True)
    _convert[grid](places, ROWS=_ROWS, COLUMNS=_COLUMNS)


@triton.jit
def _upsample(plane, pitch, y, x, other_y, other_x, bias, inside):
    """Sixteen parts in all: 9 of the nearest sample, 3 of each of the next along an axis, 1 of the diagonal one."""
    near = 3 * tl.load(plane + y * pitch + x, inside, 128).to(tl.int32)
    near += tl.load(plane + other_y * pitch + x, inside, 128).to(tl.int32)
    far = 3 * tl.load(plane + y * pitch + other_x, inside, 128).to(tl.int32)
    far += tl.load(plane + other_y * pitch + other_x, inside, 128).to(tl.int32)
    return ((3 * near + far + bias) >> 4) - 128


@triton.jit
def _convert(table, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = table + tl.program_id(0).to(tl.int64) * _FIELDS
    height, width = tl.load(row + 6).to(tl.int32), tl.load(row + 7).to(tl.int32)
    first_y, first_x = tl.program_id(1) * ROWS, tl.program_id(2) * COLUMNS
    if (first_y < height) & (first_x < width):
        y, x = first_y + tl.arange(0, ROWS)[:, None], first_x + tl.arange(0, COLUMNS)[None, :]
        inside = (y < height) & (x < width)
        luma, chroma_b = (tl.load(row).to(tl.pointer_type(tl.uint8)), tl.load(row + 2).to(tl.pointer_type(tl.uint8)))
        chroma_r, out = (tl.load(row + 4).to(tl.pointer_type(tl.uint8)), tl.load(row + 5).to(tl.pointer_type(tl.uint8)))
        pitch = tl.load(row + 3).to(tl.int32)
        rows, columns = tl.load(row + 8).to(tl.int32), tl.load(row + 9).to(tl.int32)
        half_y, half_x = rows < height, columns < width
        near_y, near_x = tl.where(half_y, y // 2, y), tl.where(half_x, x // 2, x)
        odd_y, odd_x = y % 2, x % 2
        # Like libjpeg, which copies samples of chroma two columns wide or less
        smooth_x = half_x & (columns > 2)
        smooth_y = half_y & (smooth_x | (half_x == 0))
        far_y, far_x = near_y + tl.where(smooth_y, 2 * odd_y - 1, 0), near_x + tl.where(smooth_x, 2 * odd_x - 1, 0)
        far_y = tl.minimum(tl.maximum(far_y, 0), rows - 1)
        far_x = tl.minimum(tl.maximum(far_x, 0), columns - 1)
        along_y, along_x = tl.where(smooth_y, 4 + 4 * odd_y, 0), tl.where(smooth_x, 4 + 4 * odd_x, 0)
        bias = tl.where(smooth_y & smooth_x, 8 - odd_x, along_y + along_x)
        coloured = (y < tl.where(rows > 0, height, 0)) & (x < width)
        blue = _upsample(chroma_b, pitch, near_y, near_x, far_y, far_x, bias, coloured)
        red = _upsample(chroma_r, pitch, near_y, near_x, far_y, far_x, bias, coloured)
        grey = tl.load(luma + y * tl.load(row + 1).to(tl.int32) + x, inside, 0).to(tl.int32)
        # Weights of 16 bits: 1.402, 0.34414, 0.71414 and 1.772
        r = grey + ((91881 * red + 32768) >> 16)
        g = grey + ((-22554 * blue - 46802 * red + 32768) >> 16)
        b = grey + ((116130 * blue + 32768) >> 16)
        size = height * width
        target = out + y * width + x
        tl.store(target, tl.minimum(tl.maximum(r, 0), 255).to(tl.uint8), inside)
        tl.store(target + size, tl.minimum(tl.maximum(g, 0), 255).to(tl.uint8), inside)
        tl.store(target + 2 * size, tl.minimum(tl.maximum(b, 0), 255).to(tl.uint8), inside)
