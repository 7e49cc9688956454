"""Rotary embedding inside a kernel; angles are computed from the tokens' coordinates, not loaded.

Shapes: d width of a head, HALF = d/2. Channel j of a query or key is rotated with channel j + d/2.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def rotate_pair(a, b, cos, sin):
    """The two halves of the channels, rotated in float32."""
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def load_rows(rows, mask, WIDTH: tl.constexpr):
    """(rows, WIDTH) from pointers (rows, 1); zeros outside the mask."""
    return tl.load(rows + tl.arange(0, WIDTH)[None, :], mask, 0.0)


@triton.jit
def load_rotated(rows, mask, cos, sin, HALF: tl.constexpr):
    """Queries or keys (rows, d), rotated."""
    a, b = load_rows(rows, mask, HALF), load_rows(rows + HALF, mask, HALF)
    rotated_a, rotated_b = rotate_pair(a, b, cos, sin)
    both = tl.join(rotated_a.to(a.dtype), rotated_b.to(a.dtype))
    return tl.reshape(tl.permute(both, (0, 2, 1)), (both.shape[0], 2 * HALF))


@triton.jit
def split_halves(x, HALF: tl.constexpr):
    """(rows, d) → channels [0, d/2) and [d/2, d)."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, HALF)), (0, 2, 1)))


@triton.jit
def store_unrotated(to, d, mask, cos, sin, HALF: tl.constexpr):
    """Store the gradient before rotation, given the gradient `d` (rows, d) of rotated queries or keys."""
    a, b = split_halves(d, HALF)
    a, b = rotate_pair(a, b, cos, -sin)
    half = tl.arange(0, HALF)[None, :]
    tl.store(to + half, a.to(to.dtype.element_ty), mask)
    tl.store(to + HALF + half, b.to(to.dtype.element_ty), mask)


@triton.jit
def cos_sin(angle, EXACT: tl.constexpr):
    """Hardware approximations (within 1e-6 for angles of a few turns) suffice where results are half precision."""
    if EXACT:
        return tl.cos(angle), tl.sin(angle)
    else:
        return libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)


@triton.jit
def load_frequency(frequencies, HALF: tl.constexpr):
    """The frequency of each channel of a half, (1, d/2): d/4 for x, the same d/4 for y."""
    return tl.load(frequencies + tl.arange(0, HALF)[None, :] % (HALF // 2))


@triton.jit
def rotary_table(coordinates, frequency, at, last, HALF: tl.constexpr, EXACT: tl.constexpr):
    """Cosines and sines (rows, d/2) of the tokens `at` (rows, 1): computing them is cheaper than loading them."""
    point = coordinates + 2 * tl.minimum(at, last)  # a tile may reach past the last token
    angle = tl.where(tl.arange(0, HALF)[None, :] < HALF // 2, tl.load(point), tl.load(point + 1)) * frequency
    return cos_sin(angle, EXACT)
