"""Rotary embedding inside a kernel: angles are made on the spot from the tokens' coordinates.

Shapes: d width of a head. Channel j of a query or key turns with channel j + d/2; HALF is d/2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def rotate(a, b, cos, sin):
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def load(rows, mask, WIDTH: tl.constexpr):
    return tl.load(rows + tl.arange(0, WIDTH)[None, :], mask, 0.0)


@triton.jit
def load_turned(rows, mask, cos, sin, HALF: tl.constexpr):
    """Queries or keys, turned: channel j turns with channel j + d/2."""
    a, b = load(rows, mask, HALF), load(rows + HALF, mask, HALF)
    turned_a, turned_b = rotate(a, b, cos, sin)
    both = tl.join(turned_a.to(a.dtype), turned_b.to(a.dtype))
    return tl.reshape(tl.permute(both, (0, 2, 1)), (both.shape[0], 2 * HALF))


@triton.jit
def halves(x, HALF: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, HALF)), (0, 2, 1)))


@triton.jit
def store_turned_back(to, d, mask, cos, sin, HALF: tl.constexpr):
    """The gradient of turned queries or keys as that of the ones before the turn."""
    a, b = halves(d, HALF)
    a, b = rotate(a, b, cos, -sin)
    half = tl.arange(0, HALF)[None, :]
    tl.store(to + half, a.to(to.dtype.element_ty), mask)
    tl.store(to + HALF + half, b.to(to.dtype.element_ty), mask)


@triton.jit
def cos_sin(angle, EXACT: tl.constexpr):
    """The hardware's own (within 1e-6 for angles of a few turns) are enough for what is rounded to half precision."""
    if EXACT:
        return tl.cos(angle), tl.sin(angle)
    else:
        return libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)


@triton.jit
def load_frequency(frequencies, HALF: tl.constexpr):
    """The frequency of each channel of a half (1, d/2): the same for both coordinates."""
    return tl.load(frequencies + tl.arange(0, HALF)[None, :] % (HALF // 2))


@triton.jit
def table(coordinates, frequency, at, last, HALF: tl.constexpr, EXACT: tl.constexpr):
    """Rotary table of the tokens `at` (rows, 1), made on the spot: it is less work than to fetch it."""
    point = coordinates + 2 * tl.minimum(at, last)  # a tile may reach past the last token
    angle = tl.where(tl.arange(0, HALF)[None, :] < HALF // 2, tl.load(point), tl.load(point + 1)) * frequency
    return cos_sin(angle, EXACT)
