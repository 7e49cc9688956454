"""Core-periphery attention with each tile of q, k and v read once, as Triton kernels; the backward pass is next door.

A program walks over tiles of patches of one image and head in one of two roles, which share no tile and so cost no
second read:

- patches ask, cores answer: a softmax over the cores, which stay on chip; reads q, writes the patches' output;
- cores ask, patches answer: the cores' running softmax; reads k and v, and leaves a share for a second kernel
  to join, unless it walked over all tiles itself.

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

from veca.kernels.launch import launchable, multiprocessors
from veca.kernels.rotary import load, load_frequency, load_turned, table

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_STRIDE = 2**22
"""Of tokens, heads, and q, k and v, of which a program takes up to 256 of one with offsets in 32 bits."""


@triton.jit
def scores(a, b, PRECISION: tl.constexpr):
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
    base, cores, patches, frequency, out, lse, C, first_patch, count, scale, stride_s, stride_3, stride_o,
    D: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, FULL_C: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    c, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    token = (C + first_patch).to(tl.int64)
    own, out, lse, patches = base + token * stride_s, out + token * stride_o, lse + token, patches + 2 * first_patch
    if CHUNKS == 1:
        cos, sin = table(cores, frequency, tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
        k = load_turned(base + stride_3 + c * stride_s, c < C, cos, sin, HALF)
        v = load(base + 2 * stride_3 + c * stride_s, c < C, D)
    for tile in tl.range(0, tl.cdiv(count, TILE), num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)
        mask = (n < count)[:, None]
        patch_c, patch_s = table(patches, frequency, n[:, None], count - 1, HALF, EXACT)
        q = load_turned(own + n[:, None] * stride_s, mask, patch_c, patch_s, HALF)
        if CHUNKS == 1:
            s = scores(q, k, PRECISION)
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
                cos, sin = table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
                k = load_turned(row + stride_3, first + c < C, cos, sin, HALF)
                v = load(row + 2 * stride_3, first + c < C, D)
                s = tl.where(first + column < C, scores(q, k, PRECISION), float("-inf"))
                top, total, o = _running_softmax(s, v, top, total, o, scale, PRECISION)
        o *= (1.0 / total)[:, None]
        tl.store(out + n[:, None] * stride_o + tl.arange(0, D)[None, :], o.to(q.dtype), mask)
        tl.store(lse + n, top + tl.log2(total), n < count)


@triton.jit
def _cores_ask(
    base, cores, patches, frequency, out, lse, share, chunk, C, first_patch, count, scale,
    stride_s, stride_3, stride_o,
    D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, ALONE: tl.constexpr, FULL_N: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    c, column = tl.arange(0, CHUNK), tl.arange(0, CHUNK)[None, :]
    row = chunk * CHUNK + c[:, None]
    own, patches = base + (C + first_patch).to(tl.int64) * stride_s, patches + 2 * first_patch
    cos, sin = table(cores, frequency, chunk * CHUNK + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
    q = load_turned(base + row * stride_s, row < C, cos, sin, HALF)
    top = tl.full([CHUNK], float("-inf"), tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    acc = tl.zeros([CHUNK, D], tl.float32)
    if first_patch == 0:  # cores answer cores too
        for first in range(0, C, CHUNK):
            key = base + (first + c)[:, None] * stride_s
            mask = (first + c < C)[:, None]
            cos, sin = table(cores, frequency, first + tl.arange(0, CHUNK)[:, None], C - 1, HALF, EXACT)
            k = load_turned(key + stride_3, mask, cos, sin, HALF)
            v = load(key + 2 * stride_3, mask, D)
            s = tl.where(first + column < C, scores(q, k, PRECISION), float("-inf"))
            top, total, acc = _running_softmax(s, v, top, total, acc, scale, PRECISION)
    for tile in tl.range(0, tl.cdiv(count, TILE), num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)
        mask = (n < count)[:, None]
        key = own + n[:, None] * stride_s
        patch_c, patch_s = table(patches, frequency, n[:, None], count - 1, HALF, EXACT)
        k = load_turned(key + stride_3, mask, patch_c, patch_s, HALF)
        v = load(key + 2 * stride_3, mask, D)
        s = scores(q, k, PRECISION)
        if not FULL_N:
            s = tl.where((n < count)[None, :], s, float("-inf"))
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
    cores += b.to(tl.int64) * (2 * C)
    frequency = load_frequency(frequencies, D // 2)
    first_patch = split * (tiles * TILE)
    count = min(N - first_patch, tiles * TILE)
    out += b.to(tl.int64) * (C + N) * (H * D) + h * D
    lse += bh.to(tl.int64) * (C + N)
    if role == 0:
        _patches_ask(
            base, cores, patches, frequency, out, lse, C, first_patch, count, SCALE * LOG2_E,
            stride_s, stride_3, H * D, D, CHUNK, CHUNKS, TILE, FULL_C, EXACT, PRECISION, STAGES,
        )  # fmt: skip
    else:
        share = shares + ((split * tl.num_programs(0) + bh).to(tl.int64) * CHUNKS + role - 1) * (CHUNK * (D + 2))
        _cores_ask(
            base, cores, patches, frequency, out, lse, share, role - 1, C, first_patch, count, SCALE * LOG2_E,
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
    at = (b.to(tl.int64) * (C + N) + c)[:, None] * (H * D) + h * D + channel
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), c[:, None] < C)
    tl.store(lse + bh.to(tl.int64) * (C + N) + c, top + tl.log2(total), c < C)


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


class Launch(NamedTuple):
    """What the kernels of one pass are launched with."""

    constants: dict[str, Any]
    options: dict[str, Any]
    splits: int
    """Programs that share the tiles of one image and head, in each role."""
    tiles: int
    """Tiles for each of them."""


def prepare(qkv: Tensor, cores: int, backward: bool, cut: Plan | None, stride: int = 0) -> Launch:
    """How to launch the kernels of a pass; `stride` is the largest from token to token in tensors other than qkv.

    Sizes may be symbols, when they are traced: what is known of them only later is decided without them.
    """
    batch, tokens, _, heads, width = qkv.shape
    cut = cut or plan(qkv, cores, backward)
    chunks = int(triton.cdiv(cores, cut.chunk))
    patches = tokens - cores
    tiles = triton.cdiv(patches, cut.tile)
    wanted = cut.programs * multiprocessors(qkv) // torch.sym_max(1, 2 * batch * heads)
    splits = torch.sym_max(1, torch.sym_min(tiles, wanted))
    # A program finds its first patch with an offset in 64 bits, and all its others from there with one in 32.
    within_32_bits = (2**31 - 1) // (cut.tile * max(stride, qkv.stride(1), 3 * heads * width))
    per_split = torch.sym_min(triton.cdiv(tiles, splits), within_32_bits)
    splits = triton.cdiv(tiles, torch.sym_max(1, per_split))
    constants = {
        "H": heads, "D": width, "CHUNK": cut.chunk, "CHUNKS": chunks, "TILE": cut.tile, "STAGES": cut.stages,
        "ALONE": isinstance(splits, int) and splits == 1,
        "FULL_C": _whole(cores, cut.chunk), "FULL_N": _whole(patches, cut.tile),
        "SCALE": width**-0.5, "EXACT": qkv.dtype == torch.float32, "PRECISION": "ieee",
    }  # fmt: skip
    return Launch(constants, {"num_warps": cut.warps}, splits, per_split)


def _whole(count: int, size: int) -> bool:
    """Whether `count` is known, and a multiple."""
    return isinstance(count, int) and count % size == 0


def together(x: Tensor) -> Tensor:
    """`x` as the kernels take it: channels of a head side by side, offsets within a tile of tokens below 2³¹."""
    return x if x.stride(-1) == 1 and max(x.stride()[1:]) <= MAX_STRIDE else x.contiguous()


def forward(
    qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor, cut: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """Attention (B, S, H·d) and log-sum-exp (B, H, S)."""
    qkv = together(qkv)
    batch, tokens, _, heads, width = qkv.shape
    cores = core_points.shape[1]
    constants, options, splits, tiles = prepare(qkv, cores, False, cut)
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
