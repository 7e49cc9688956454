"""Core-periphery attention with each tile of q, k and v read once, forward and backward, as Triton kernels.

A program walks over tiles of patches of one image and head in one of two roles, which share no tile and so cost no
second read:

- patches ask, cores answer: a softmax over the cores, which stay on chip; reads q, writes the patches' output;
- cores ask, patches answer: the cores' running softmax; reads k and v, leaves a share that a second kernel joins.

The backward pass has the same two roles: the first reads q and the output's gradient, writes dq, and sums up dk and dv
of the cores; the second reads k and v, writes dk and dv of the patches, and sums up dq of the cores.

Rotary embedding happens on the way in: angles are made on the spot from the tokens' coordinates.

More cores than fit on chip come in chunks.

Shapes: B images, C cores, N patches, S = C + N tokens (cores first), H heads, d width of a head. qkv is (B, S, 3, H, d)
with any strides but the last; the cores' coordinates (B, C, 2), the patches' (N, 2) and the frequencies (d/4) are
float32. Softmax works in base 2: `lse` (B, H, S) is the log2 of each row's sum of exponentials.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from veca.kernels.launch import launchable, multiprocessors

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rotate(a, b, cos, sin):
    a, b = a.to(tl.float32), b.to(tl.float32)
    return a * cos - b * sin, a * sin + b * cos


@triton.jit
def _load(rows, mask, WIDTH: tl.constexpr):
    return tl.load(rows + tl.arange(0, WIDTH)[None, :], mask, 0.0)


@triton.jit
def _load_turned(rows, mask, cos, sin, HALF: tl.constexpr):
    """Queries or keys, turned: channel j turns with channel j + d/2."""
    a, b = _load(rows, mask, HALF), _load(rows + HALF, mask, HALF)
    turned_a, turned_b = _rotate(a, b, cos, sin)
    both = tl.join(turned_a.to(a.dtype), turned_b.to(a.dtype))
    return tl.reshape(tl.permute(both, (0, 2, 1)), (both.shape[0], 2 * HALF))


@triton.jit
def _halves(x, HALF: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, HALF)), (0, 2, 1)))


@triton.jit
def _store_turned_back(to, d, mask, cos, sin, HALF: tl.constexpr):
    """The gradient of turned queries or keys as that of the ones before the turn."""
    a, b = _halves(d, HALF)
    a, b = _rotate(a, b, cos, -sin)
    half = tl.arange(0, HALF)[None, :]
    tl.store(to + half, a.to(to.dtype.element_ty), mask)
    tl.store(to + HALF + half, b.to(to.dtype.element_ty), mask)


@triton.jit
def _cos_sin(angle, EXACT: tl.constexpr):
    """The hardware's own (within 1e-6 for angles of a few turns) are enough for what is rounded to half precision."""
    if EXACT:
        return tl.cos(angle), tl.sin(angle)
    else:
        return libdevice.fast_cosf(angle), libdevice.fast_sinf(angle)


@triton.jit
def _load_frequency(frequencies, HALF: tl.constexpr):
    """The frequency of each channel of a half (1, d/2): the same for both coordinates."""
    return tl.load(frequencies + tl.arange(0, HALF)[None, :] % (HALF // 2))


@triton.jit
def _table(coordinates, frequency, at, last, HALF: tl.constexpr, EXACT: tl.constexpr):
    """Rotary table of the tokens `at` (rows, 1), made on the spot: it is less work than to fetch it."""
    point = coordinates + 2 * tl.minimum(at, last)  # a tile may reach past the last token
    angle = tl.where(tl.arange(0, HALF)[None, :] < HALF // 2, tl.load(point), tl.load(point + 1)) * frequency
    return _cos_sin(angle, EXACT)


@triton.jit
def _logits(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, tl.trans(b), input_precision=PRECISION)


@triton.jit
def _running_softmax(s, v, top, total, acc, scale, PRECISION: tl.constexpr):
    """One step: logits `s` (rows, columns), not yet scaled, against values `v` (columns, d)."""
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    fade = tl.exp2(top - new_top)
    p = tl.exp2(s * scale - new_top[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return new_top, total * fade + tl.sum(p, 1), acc


@triton.jit
def _patches_ask(
    base, cores, patches, frequency, out, lse, C, N, start, stop, scale, stride_s, stride_3, stride_o,
    D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, FULL_C: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    c, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    if CHUNKS == 1:
        cos, sin = _table(cores, frequency, tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
        k = _load_turned(base + stride_3 + c * stride_s, c < C, cos, sin, HALF)
        v = _load(base + 2 * stride_3 + c * stride_s, c < C, D)
    for tile in tl.range(start, stop, num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)
        mask = (n < N)[:, None]
        patch_c, patch_s = _table(patches, frequency, n[:, None], N - 1, HALF, EXACT)
        q = _load_turned(base + (C + n)[:, None] * stride_s, mask, patch_c, patch_s, HALF)
        if CHUNKS == 1:
            s = _logits(q, k, PRECISION)
            if not FULL_C:
                s = tl.where(column < C, s, float("-inf"))
            top = tl.max(s, 1) * scale
            p = tl.exp2(s * scale - top[:, None])
            total = tl.sum(p, 1)
            o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        else:
            top = tl.full([TILE], float("-inf"), tl.float32)
            total = tl.zeros([TILE], tl.float32)
            o = tl.zeros([TILE, D], tl.float32)
            for first in range(0, C, CHUNK):
                row = base + (first + c) * stride_s
                cos, sin = _table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
                k = _load_turned(row + stride_3, first + c < C, cos, sin, HALF)
                v = _load(row + 2 * stride_3, first + c < C, D)
                s = tl.where(first + column < C, _logits(q, k, PRECISION), float("-inf"))
                top, total, o = _running_softmax(s, v, top, total, o, scale, PRECISION)
        o *= (1.0 / total)[:, None]
        tl.store(out + (C + n)[:, None] * stride_o + tl.arange(0, D)[None, :], o.to(q.dtype), mask)
        tl.store(lse + C + n, top + tl.log2(total), n < N)


@triton.jit
def _cores_ask(
    base, cores, patches, frequency, out, lse, share, chunk, C, N, start, stop, scale, stride_s, stride_3, stride_o,
    D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr, FULL_N: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    c, column = tl.arange(0, CHUNK), tl.arange(0, CHUNK)[None, :]
    row = chunk * CHUNK + c[:, None]
    cos, sin = _table(cores, frequency, chunk * CHUNK + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
    q = _load_turned(base + row * stride_s, row < C, cos, sin, HALF)
    top = tl.full([CHUNK], float("-inf"), tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    acc = tl.zeros([CHUNK, D], tl.float32)
    if start == 0:  # cores answer cores too
        for first in range(0, C, CHUNK):
            key = base + (first + c)[:, None] * stride_s
            mask = (first + c < C)[:, None]
            cos, sin = _table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
            k = _load_turned(key + stride_3, mask, cos, sin, HALF)
            v = _load(key + 2 * stride_3, mask, D)
            s = tl.where(first + column < C, _logits(q, k, PRECISION), float("-inf"))
            top, total, acc = _running_softmax(s, v, top, total, acc, scale, PRECISION)
    for tile in tl.range(start, stop, num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)
        mask = (n < N)[:, None]
        key = base + (C + n)[:, None] * stride_s
        patch_c, patch_s = _table(patches, frequency, n[:, None], N - 1, HALF, EXACT)
        k = _load_turned(key + stride_3, mask, patch_c, patch_s, HALF)
        v = _load(key + 2 * stride_3, mask, D)
        s = _logits(q, k, PRECISION)
        if not FULL_N:
            s = tl.where((n < N)[None, :], s, float("-inf"))
        top, total, acc = _running_softmax(s, v, top, total, acc, scale, PRECISION)
    channel = tl.arange(0, D)[None, :]
    if ALONE:
        tl.store(out + row * stride_o + channel, (acc / total[:, None]).to(q.dtype), row < C)
        tl.store(lse + chunk * CHUNK + c, top + tl.log2(total), chunk * CHUNK + c < C)
    else:  # a share is acc (CHUNK, d), then top and total (CHUNK each)
        tl.store(share + c[:, None] * D + channel, acc)
        tl.store(share + CHUNK * D + c, top)
        tl.store(share + CHUNK * (D + 1) + c, total)


@triton.jit(do_not_specialize=["C", "N", "tiles"])
def _attention(
    qkv, cores, patches, frequencies, out, lse, shares, C, N, tiles,
    stride_b, stride_s, stride_3, stride_h,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    ALONE: tl.constexpr, FULL_C: tl.constexpr, FULL_N: tl.constexpr, SCALE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    bh, split, role = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    base = qkv + b.to(tl.int64) * stride_b + h * stride_h
    cores += b * (2 * C)
    frequency = _load_frequency(frequencies, D // 2)
    start = split * tiles
    stop = min(start + tiles, tl.cdiv(N, TILE))
    out += b.to(tl.int64) * (C + N) * (H * D) + h * D
    lse += bh.to(tl.int64) * (C + N)
    if role == 0:
        _patches_ask(
            base, cores, patches, frequency, out, lse, C, N, start, stop, SCALE * LOG2_E, stride_s, stride_3, H * D,
            D, CHUNK, CHUNKS, TILE, FULL_C, EXACT, PRECISION, STAGES,
        )  # fmt: skip
    else:
        share = shares + ((split * tl.num_programs(0) + bh).to(tl.int64) * CHUNKS + role - 1) * (CHUNK * (D + 2))
        _cores_ask(
            base, cores, patches, frequency, out, lse, share, role - 1, C, N, start, stop, SCALE * LOG2_E,
            stride_s, stride_3, H * D, D, CHUNK, TILE, ALONE, FULL_N, EXACT, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["C", "N", "splits"])
def _join(
    shares, out, lse, C, N, splits,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The cores' output from the shares of all splits; a program takes a few cores, so that many can run."""
    bh, chunk, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    c, channel = part * ROWS + tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    step = tl.num_programs(0).to(tl.int64) * CHUNKS * (CHUNK * (D + 2))
    first = shares + (bh * CHUNKS + chunk).to(tl.int64) * (CHUNK * (D + 2))
    # The first share has the cores themselves in it, so no row is empty.
    top = tl.load(first + CHUNK * D + c)
    total = tl.load(first + CHUNK * (D + 1) + c)
    acc = tl.load(first + c[:, None] * D + channel)
    for split in tl.range(1, splits, num_stages=4):
        share = first + split * step
        their_top = tl.load(share + CHUNK * D + c)
        new_top = tl.maximum(top, their_top)
        fade, weight = tl.exp2(top - new_top), tl.exp2(their_top - new_top)
        acc = acc * fade[:, None] + tl.load(share + c[:, None] * D + channel) * weight[:, None]
        total = total * fade + tl.load(share + CHUNK * (D + 1) + c) * weight
        top = new_top
    c += chunk * CHUNK
    at = (b * (C + N) + c).to(tl.int64)[:, None] * (H * D) + h * D + channel
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), c[:, None] < C)
    tl.store(lse + bh.to(tl.int64) * (C + N) + c, top + tl.log2(total), c < C)


@triton.jit
def _core_gradient(out, d_out, lse, first, C, stride_o, stride_d, D: tl.constexpr, CHUNK: tl.constexpr):
    """Of cores that ask: the gradient of their output, their log-sum-exp, and delta = o · do."""
    c = first + tl.arange(0, CHUNK)
    mask = (c < C)[:, None]
    do = _load(d_out + c[:, None] * stride_d, mask, D)
    o = _load(out + c[:, None] * stride_o, mask, D)
    return do, tl.load(lse + c, c < C, float("inf")), tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)


@triton.jit
def _finish(
    d, raw, to, d_points, cores, frequency, first, C, stride_s, stride_to,
    SCALE: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """From the gradient of a chunk's turned queries or keys to that of the `raw` ones and of the cores' coordinates."""
    HALF: tl.constexpr = D // 2
    c, half = first + tl.arange(0, CHUNK), tl.arange(0, HALF)[None, :]
    mask = (c < C)[:, None]
    cos, sin = _table(cores, frequency, c[:, None], C - 1, HALF, EXACT)
    a, b = _load(raw + c[:, None] * stride_s, mask, HALF), _load(raw + c[:, None] * stride_s + HALF, mask, HALF)
    a, b = _rotate(a, b, cos, sin)
    d *= SCALE
    d1, d2 = _halves(d, HALF)
    # A turn by dθ moves the turned pair (a, b) by (-b, a) dθ; each angle is a coordinate times its frequency.
    d_angle = (d2 * a - d1 * b) * frequency
    tl.store(d_points + 2 * c, tl.sum(tl.where(half < HALF // 2, d_angle, 0.0), 1), c < C)
    tl.store(d_points + 2 * c + 1, tl.sum(tl.where(half < HALF // 2, 0.0, d_angle), 1), c < C)
    _store_turned_back(to + c[:, None] * stride_to, d, mask, cos, sin, HALF)


@triton.jit
def _patches_asked(
    base, cores, patches, frequency, out, lse, d_out, d_qkv, d_points, share, chunk, C, N, start, stop,
    stride_s, stride_3, stride_d,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    PATCHES: tl.constexpr, CORES: tl.constexpr, ALONE: tl.constexpr, FULL_C: tl.constexpr, SCALE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Backward of `_patches_ask`: dq of the patches, and dk and dv of a chunk of cores, of which all tokens ask."""
    HALF: tl.constexpr = D // 2
    c, channel = tl.arange(0, CHUNK)[:, None], tl.arange(0, D)[None, :]
    dk_core = tl.zeros([CHUNK, D], tl.float32)
    dv_core = tl.zeros([CHUNK, D], tl.float32)
    SEVERAL: tl.constexpr = CHUNKS if PATCHES else 1
    if SEVERAL == 1:
        row = base + (chunk * CHUNK + c) * stride_s
        cos, sin = _table(cores, frequency, chunk * CHUNK + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
        k = _load_turned(row + stride_3, chunk * CHUNK + c < C, cos, sin, HALF)
        v = _load(row + 2 * stride_3, chunk * CHUNK + c < C, D)
    if CORES and start == 0:  # cores ask cores too
        for first in range(0, C, CHUNK):
            cos, sin = _table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
            q = _load_turned(base + (first + c) * stride_s, first + c < C, cos, sin, HALF)
            do, core_lse, delta = _core_gradient(out, d_out, lse, first, C, H * D, stride_d, D, CHUNK)
            p = tl.exp2(_logits(q, k, PRECISION) * (SCALE * LOG2_E) - core_lse[:, None])
            ds = (p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])).to(q.dtype)
            dv_core = tl.dot(tl.trans(p.to(q.dtype)), do, dv_core, input_precision=PRECISION)
            dk_core = tl.dot(tl.trans(ds), q, dk_core, input_precision=PRECISION)
    for tile in tl.range(start, stop, num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)
        mask = (n < N)[:, None]
        token = (C + n)[:, None]
        patch_c, patch_s = _table(patches, frequency, n[:, None], N - 1, HALF, EXACT)
        q = _load_turned(base + token * stride_s, mask, patch_c, patch_s, HALF)
        do = _load(d_out + token * stride_d, mask, D)
        own_lse = tl.load(lse + C + n, n < N, float("inf"))
        if CHUNKS > 1:
            o = _load(out + token * (H * D), mask, D)
            delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        dq = tl.zeros([TILE, D], tl.float32)
        for other in range(SEVERAL):
            first = other * CHUNK if SEVERAL > 1 else chunk * CHUNK
            if SEVERAL > 1:
                row = base + (first + c) * stride_s
                cos, sin = _table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
                k = _load_turned(row + stride_3, first + c < C, cos, sin, HALF)
                v = _load(row + 2 * stride_3, first + c < C, D)
            p = tl.exp2(_logits(q, k, PRECISION) * (SCALE * LOG2_E) - own_lse[:, None])
            if not FULL_C:
                p = tl.where(first + tl.arange(0, CHUNK)[None, :] < C, p, 0.0)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if CHUNKS == 1:
                delta = tl.sum(p * dp, 1)
            ds = (p * (dp - delta[:, None])).to(q.dtype)
            if CORES:
                dv_core = tl.dot(tl.trans(p.to(q.dtype)), do, dv_core, input_precision=PRECISION)
                dk_core = tl.dot(tl.trans(ds), q, dk_core, input_precision=PRECISION)
            if PATCHES:
                dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        if PATCHES:
            _store_turned_back(d_qkv + token * (3 * H * D), dq * SCALE, mask, patch_c, patch_s, HALF)
    if CORES:
        if ALONE:
            _finish(
                dk_core, base + stride_3, d_qkv + H * D, d_points, cores, frequency, chunk * CHUNK, C,
                stride_s, 3 * H * D, SCALE, D, CHUNK, EXACT,
            )  # fmt: skip
            to = d_qkv + (chunk * CHUNK + c) * (3 * H * D) + 2 * H * D
            tl.store(to + channel, dv_core.to(to.dtype.element_ty), chunk * CHUNK + c < C)
        else:
            to = share + CHUNK * D + c * D
            tl.store(to + channel, dk_core)
            tl.store(to + CHUNK * D + channel, dv_core)


@triton.jit
def _cores_asked(
    base, cores, patches, frequency, out, lse, d_out, d_qkv, d_points, share, chunk, C, N, start, stop,
    stride_s, stride_3, stride_d,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    PATCHES: tl.constexpr, CORES: tl.constexpr, ALONE: tl.constexpr, FULL_N: tl.constexpr, SCALE: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Backward of `_cores_ask`: dk and dv of the patches, and dq of a chunk of cores, which ask all tokens."""
    HALF: tl.constexpr = D // 2
    c, channel = tl.arange(0, CHUNK)[:, None], tl.arange(0, D)[None, :]
    dq_core = tl.zeros([CHUNK, D], tl.float32)
    SEVERAL: tl.constexpr = CHUNKS if PATCHES else 1
    if SEVERAL == 1:
        cos, sin = _table(cores, frequency, chunk * CHUNK + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
        q = _load_turned(base + (chunk * CHUNK + c) * stride_s, chunk * CHUNK + c < C, cos, sin, HALF)
        do, core_lse, delta = _core_gradient(out, d_out, lse, chunk * CHUNK, C, H * D, stride_d, D, CHUNK)
    if CORES and start == 0:  # cores ask cores too
        for first in range(0, C, CHUNK):
            key = base + (first + c) * stride_s
            cos, sin = _table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
            k = _load_turned(key + stride_3, first + c < C, cos, sin, HALF)
            v = _load(key + 2 * stride_3, first + c < C, D)
            p = tl.exp2(_logits(k, q, PRECISION) * (SCALE * LOG2_E) - core_lse[None, :])
            p = tl.where(first + c < C, p, 0.0)
            ds = (p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])).to(k.dtype)
            dq_core = tl.dot(tl.trans(ds), k, dq_core, input_precision=PRECISION)
    for tile in tl.range(start, stop, num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)
        mask = (n < N)[:, None]
        token = (C + n)[:, None]
        key = base + token * stride_s
        patch_c, patch_s = _table(patches, frequency, n[:, None], N - 1, HALF, EXACT)
        k = _load_turned(key + stride_3, mask, patch_c, patch_s, HALF)
        v = _load(key + 2 * stride_3, mask, D)
        dk = tl.zeros([TILE, D], tl.float32)
        dv = tl.zeros([TILE, D], tl.float32)
        for other in range(SEVERAL):
            if SEVERAL > 1:
                first = other * CHUNK
                cos, sin = _table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
                q = _load_turned(base + (first + c) * stride_s, first + c < C, cos, sin, HALF)
                do, core_lse, delta = _core_gradient(out, d_out, lse, first, C, H * D, stride_d, D, CHUNK)
            # Patches down, cores across: only dq of the cores needs a transpose.
            p = tl.exp2(_logits(k, q, PRECISION) * (SCALE * LOG2_E) - core_lse[None, :])
            if not FULL_N:
                p = tl.where(mask, p, 0.0)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            ds = (p * (dp - delta[None, :])).to(k.dtype)
            if CORES:
                dq_core = tl.dot(tl.trans(ds), k, dq_core, input_precision=PRECISION)
            if PATCHES:
                dv = tl.dot(p.to(k.dtype), do, dv, input_precision=PRECISION)
                dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if PATCHES:
            to = d_qkv + token * (3 * H * D) + H * D
            _store_turned_back(to, dk * SCALE, mask, patch_c, patch_s, HALF)
            tl.store(to + H * D + channel, dv.to(k.dtype), mask)
    if CORES:
        if ALONE:
            _finish(
                dq_core, base, d_qkv, d_points, cores, frequency, chunk * CHUNK, C, stride_s, 3 * H * D,
                SCALE, D, CHUNK, EXACT,
            )  # fmt: skip
        else:
            tl.store(share + c * D + channel, dq_core)


@triton.jit(do_not_specialize=["C", "N", "tiles"])
def _attention_backward(
    qkv, cores, patches, frequencies, out, lse, d_out, d_qkv, d_points, shares, C, N, tiles,
    stride_b, stride_s, stride_3, stride_h, stride_db, stride_ds,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
    PATCHES: tl.constexpr, CORES: tl.constexpr, ALONE: tl.constexpr, FULL_C: tl.constexpr, FULL_N: tl.constexpr,
    SCALE: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`PATCHES`: write the patches' gradients, over all chunks of cores. `CORES`: sum up those of one chunk."""
    bh, split, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    S = C + N
    chunk = place // 2
    base = qkv + b.to(tl.int64) * stride_b + h * stride_h
    cores += b * (2 * C)
    frequency = _load_frequency(frequencies, D // 2)
    out += b.to(tl.int64) * S * (H * D) + h * D
    lse += bh.to(tl.int64) * S
    d_out += b.to(tl.int64) * stride_db + h * D
    d_qkv += b.to(tl.int64) * S * (3 * H * D) + h * D
    d_points += (2 * bh + place % 2) * (2 * C)
    # A share is dq, dk and dv of the chunk, (CHUNK, d) each.
    share = shares + ((split * tl.num_programs(0) + bh).to(tl.int64) * CHUNKS + chunk) * (3 * CHUNK * D)
    start = split * tiles
    stop = min(start + tiles, tl.cdiv(N, TILE))
    if place % 2 == 0:
        _patches_asked(
            base, cores, patches, frequency, out, lse, d_out, d_qkv, d_points, share, chunk, C, N, start, stop,
            stride_s, stride_3, stride_ds, H, D, CHUNK, CHUNKS, TILE, PATCHES, CORES, ALONE, FULL_C, SCALE,
            EXACT, PRECISION, STAGES,
        )  # fmt: skip
    else:
        _cores_asked(
            base, cores, patches, frequency, out, lse, d_out, d_qkv, d_points, share, chunk, C, N, start, stop,
            stride_s, stride_3, stride_ds, H, D, CHUNK, CHUNKS, TILE, PATCHES, CORES, ALONE, FULL_N, SCALE,
            EXACT, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["C", "N", "splits"])
def _join_backward(
    qkv, cores, frequencies, d_qkv, d_points, shares, C, N, splits, stride_b, stride_s, stride_3, stride_h,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SCALE: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The cores' gradients from the shares of all splits: keys and values in one program, queries in another."""
    bh, chunk, role = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    base = qkv + b.to(tl.int64) * stride_b + h * stride_h
    d_qkv += b.to(tl.int64) * (C + N) * (3 * H * D) + h * D
    channel = tl.arange(0, D)[None, :]
    step = tl.num_programs(0).to(tl.int64) * CHUNKS * (3 * CHUNK * D)
    row = shares + (bh * CHUNKS + chunk).to(tl.int64) * (3 * CHUNK * D) + tl.arange(0, CHUNK)[:, None] * D
    d = tl.zeros([CHUNK, D], tl.float32)
    turned = row + (1 - role) * CHUNK * D
    for _ in range(splits):
        d += tl.load(turned + channel)
        turned += step
    _finish(
        d, base + (1 - role) * stride_3, d_qkv + (1 - role) * H * D, d_points + (2 * bh + role) * (2 * C),
        cores + b * (2 * C), _load_frequency(frequencies, D // 2), chunk * CHUNK, C, stride_s, 3 * H * D,
        SCALE, D, CHUNK, EXACT,
    )  # fmt: skip
    if role == 0:
        dv = tl.zeros([CHUNK, D], tl.float32)
        value = row + 2 * CHUNK * D
        for _ in range(splits):
            dv += tl.load(value + channel)
            value += step
        c = chunk * CHUNK + tl.arange(0, CHUNK)[:, None]
        tl.store(d_qkv + c * (3 * H * D) + 2 * H * D + channel, dv.to(d_qkv.dtype.element_ty), c < C)


class Plan(NamedTuple):
    """How a launch cuts the work."""

    chunk: int
    """Cores held on chip at once."""
    tile: int
    """Patches per step."""
    warps: int
    stages: int
    programs: int
    """Programs to aim at per multiprocessor."""


def plan(qkv: Tensor, cores: int, backward: bool) -> Plan:
    """The fastest cut measured on an H200 for these widths; float32 and wide heads take smaller ones to fit on chip."""
    wide = qkv.shape[-1] > 64
    most = 64 if qkv.dtype != torch.float32 else 16 if wide else 32
    # A budget that is traced is a symbol: the largest chunk holds any.
    chunk = min(max(16, triton.next_power_of_2(cores)), most) if isinstance(cores, int) else most
    if qkv.dtype == torch.float32:
        return Plan(chunk, 32, 4, 1, 4)
    if wide:
        return Plan(chunk, 64, 8, 1, 2) if backward else Plan(chunk, 64, 4, 2, 4)
    return Plan(chunk, 64, 4, 3 if backward else 4, 8)


class _Launch(NamedTuple):
    """How one pass is cut."""

    constants: dict[str, Any]
    options: dict[str, Any]
    splits: int
    tiles: int


def _launch(qkv: Tensor, cores: int, backward: bool, cut: Plan | None) -> _Launch:
    batch, tokens, _, heads, width = qkv.shape
    cut = cut or plan(qkv, cores, backward)
    chunks = triton.cdiv(cores, cut.chunk)
    patches = tokens - cores
    tiles = triton.cdiv(patches, cut.tile)
    wanted = cut.programs * multiprocessors(qkv) // torch.sym_max(1, 2 * batch * heads)
    splits = torch.sym_max(1, torch.sym_min(tiles, wanted))
    per_split = triton.cdiv(tiles, splits)
    splits = triton.cdiv(tiles, torch.sym_max(1, per_split))
    constants = {
        "H": heads, "D": width, "CHUNK": cut.chunk, "CHUNKS": chunks, "TILE": cut.tile, "STAGES": cut.stages,
        "ALONE": isinstance(splits, int) and splits == 1,
        "FULL_C": _whole(cores, cut.chunk), "FULL_N": _whole(patches, cut.tile),
        "SCALE": width**-0.5, "EXACT": qkv.dtype == torch.float32, "PRECISION": "ieee",
    }  # fmt: skip
    return _Launch(constants, {"num_warps": cut.warps}, splits, per_split)


def _whole(count: int, size: int) -> bool:
    """Whether `count` is known, and a multiple."""
    return isinstance(count, int) and count % size == 0


def _together(x: Tensor) -> Tensor:
    """The kernels take any strides but this one: channels of a head lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor, cut: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """Attention (B, S, H·d) and log-sum-exp (B, H, S)."""
    qkv = _together(qkv)
    batch, tokens, _, heads, width = qkv.shape
    cores = core_points.shape[1]
    constants, options, splits, tiles = _launch(qkv, cores, False, cut)
    chunk, chunks, alone = constants["CHUNK"], constants["CHUNKS"], constants["ALONE"]
    out = qkv.new_empty(batch, tokens, heads * width)
    lse = qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
    shares = qkv.new_empty(0 if alone else splits * batch * heads * chunks * chunk * (width + 2), dtype=torch.float32)
    launchable(_attention, qkv)[batch * heads, splits, 1 + chunks](
        qkv, core_points, patch_points, frequencies, out, lse, shares, cores, tokens - cores, tiles,
        qkv.stride(0), qkv.stride(1), qkv.stride(2), qkv.stride(3), **constants, **options,
    )  # fmt: skip
    if not alone:
        launchable(_join, qkv)[batch * heads, chunks, chunk // 16](
            shares, out, lse, cores, tokens - cores, splits, H=heads, D=width, CHUNK=chunk, CHUNKS=chunks, ROWS=16
        )
    return out, lse


def backward(
    d_out: Tensor, qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor,
    out: Tensor, lse: Tensor, cut: Plan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv (B, S, 3, H, d) and of the cores' coordinates (B, C, 2)."""
    qkv, d_out = _together(qkv), _together(d_out)
    batch, tokens, _, heads, width = qkv.shape
    cores = core_points.shape[1]
    constants, options, splits, tiles = _launch(qkv, cores, True, cut)
    chunk, chunks, alone = constants["CHUNK"], constants["CHUNKS"], constants["ALONE"]
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    shares = qkv.new_empty(0 if alone else splits * batch * heads * chunks * 3 * chunk * width, dtype=torch.float32)
    d_points = qkv.new_empty(batch, heads, 2, cores, 2, dtype=torch.float32)  # by way of keys, and of queries
    strides = qkv.stride(0), qkv.stride(1), qkv.stride(2), qkv.stride(3)
    # Patches' gradients need all chunks and a chunk's needs all patches: one launch for both, or one after the other.
    for patches, core in [(True, True)] if chunks == 1 else [(True, False), (False, True)]:
        launchable(_attention_backward, qkv)[batch * heads, splits, 2 * chunks if core else 2](
            qkv, core_points, patch_points, frequencies, out, lse, d_out, d_qkv, d_points, shares,
            cores, tokens - cores, tiles, *strides, d_out.stride(0), d_out.stride(1),
            PATCHES=patches, CORES=core, **constants, **options,
        )  # fmt: skip
    if not alone:
        launchable(_join_backward, qkv)[batch * heads, chunks, 2](
            qkv, core_points, frequencies, d_qkv, d_points, shares, cores, tokens - cores, splits, *strides,
            H=heads, D=width, CHUNK=chunk, CHUNKS=chunks, SCALE=constants["SCALE"], EXACT=constants["EXACT"],
        )  # fmt: skip
    return d_qkv, d_points.sum((1, 2))
