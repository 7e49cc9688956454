"""Attention with few cores, for inference: probabilities instead of values, as Triton kernels.

With C·H well below D it is less work to average tokens than to project their values, and to mix C·H projected vectors than to
project every patch's output (`veca.attention.few_cores_attention` is the definition). What that takes beside matrix products:

- `probabilities`: q and k → each patch's softmax over the cores, and the cores' logits over all tokens;
- `averaging`: softmax of those logits, times 1/σ of each token, so that the tokens need no LayerNorm before they are averaged;
- `mix`: x + probabilities · vectors + bias, and the moments of the sum for the next LayerNorm.

Shapes: B images, C cores, N patches, S = C + N tokens (cores first), H heads, d width of a head, D = H·d. The H·C columns of
probabilities go head by head: h·C + c.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from veca.kernels.core_attention import LOG2_E, _core_table, _load_turned, _logits, _patch_table, multiprocessors


@triton.jit(do_not_specialize=["C", "N", "tiles"])
def _probabilities(
    qk, core_cos, core_sin, coordinates, frequencies, patch_to_core, logits, C, N, tiles, scale,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    split, bh, role = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // H, bh % H
    S = C + N
    base = qk + b.to(tl.int64) * S * (2 * H * D) + h * D
    c, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    cos, sin = _core_table(core_cos, core_sin, b, 0, C, HALF, CHUNK)
    start = split * tiles
    stop = min(start + tiles, tl.cdiv(N, TILE))
    if role == 0:  # patches ask
        k1, k2 = _load_turned(base + H * D + c * (2 * H * D), c < C, cos, sin, HALF)
        for tile in tl.range(start, stop, num_stages=STAGES):
            n = tile * TILE + tl.arange(0, TILE)[:, None]
            patch_c, patch_s = _patch_table(coordinates, frequencies, n, N, HALF, EXACT)
            q1, q2 = _load_turned(base + (C + n) * (2 * H * D), n < N, patch_c, patch_s, HALF)
            s = tl.where(column < C, _logits(q1, q2, k1, k2, PRECISION), float("-inf"))
            p = tl.exp2((s - tl.max(s, 1)[:, None]) * scale)
            p *= (1.0 / tl.sum(p, 1))[:, None]
            to = patch_to_core + (b * S + C + n).to(tl.int64) * (H * C) + h * C + column
            tl.store(to, p.to(qk.dtype.element_ty), (n < N) & (column < C))
    else:  # cores ask; log2 of their probabilities, up to a constant
        q1, q2 = _load_turned(base + c * (2 * H * D), c < C, cos, sin, HALF)
        to = logits + (bh * C + c).to(tl.int64) * S
        if split == 0:
            k1, k2 = _load_turned(base + H * D + c * (2 * H * D), c < C, cos, sin, HALF)
            tl.store(to + column, _logits(q1, q2, k1, k2, PRECISION) * scale, (c < C) & (column < C))
        for tile in tl.range(start, stop, num_stages=STAGES):
            n = tile * TILE + tl.arange(0, TILE)
            patch_c, patch_s = _patch_table(coordinates, frequencies, n[:, None], N, HALF, EXACT)
            key = base + (C + n)[:, None] * (2 * H * D) + H * D
            k1, k2 = _load_turned(key, (n < N)[:, None], patch_c, patch_s, HALF)
            s = _logits(q1, q2, k1, k2, PRECISION) * scale
            tl.store(to + C + n[None, :], s, (c < C) & (n < N)[None, :])


def probabilities(
    qk: Tensor, core_cos: Tensor, core_sin: Tensor, coordinates: Tensor, frequencies: Tensor
) -> tuple[Tensor, Tensor]:
    """Qk (B, S, 2, H, d) → patches' probabilities (B, S, H·C), rows of cores left open, and cores' logits (B, H·C, S)."""
    batch, tokens, _, heads, width = qk.shape
    cores = core_cos.shape[1]
    patch_to_core = qk.new_empty(batch, tokens, heads * cores)
    logits = qk.new_empty(batch, heads * cores, tokens, dtype=torch.float32)
    tiles = triton.cdiv(tokens - cores, 64)
    splits = max(1, min(tiles, 10 * multiprocessors(qk) // (2 * batch * heads)))
    per_split = triton.cdiv(tiles, splits)
    _probabilities[triton.cdiv(tiles, per_split), batch * heads, 2](
        qk, core_cos, core_sin, coordinates, frequencies, patch_to_core, logits, cores, tokens - cores, per_split,
        width**-0.5 * LOG2_E, H=heads, D=width, CHUNK=max(16, triton.next_power_of_2(cores)), TILE=64,
        EXACT=qk.dtype == torch.float32, PRECISION="ieee", STAGES=3,
    )  # fmt: skip
    return patch_to_core, logits


@triton.jit(do_not_specialize=["S", "M"])
def _averaging(logits, moments, out, S, M, rows, eps, D: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row, b = tl.program_id(0), tl.program_id(1)
    at = (b * rows + row).to(tl.int64) * S
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, S, BLOCK):
        s = first + tl.arange(0, BLOCK)
        a = tl.load(logits + at + s, s < S, float("-inf"))
        new_top = tl.maximum(top, a)
        # A lane past the end has seen nothing yet: both are -inf.
        total = tl.where(new_top == float("-inf"), 0.0, total * tl.exp2(top - new_top) + tl.exp2(a - new_top))
        top = new_top
    best = tl.max(top, 0)
    all_of_it = tl.sum(total * tl.exp2(top - best), 0)
    for first in range(0, S, BLOCK):
        s = first + tl.arange(0, BLOCK)
        p = tl.exp2(tl.load(logits + at + s, s < S, float("-inf")) - best) / all_of_it
        sums = tl.zeros([BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            sums += tl.load(moments + (2 * part) * M + b * S + s, s < S, 0.0)
            squares += tl.load(moments + (2 * part + 1) * M + b * S + s, s < S, 0.0)
        mean = sums / D
        p *= tl.rsqrt(squares / D - mean * mean + eps)
        tl.store(out + at + s, p.to(out.dtype.element_ty), s < S)


def averaging(logits: Tensor, moments: Tensor, dim: int, eps: float, dtype: torch.dtype) -> Tensor:
    """Weights (B, H·C, S) such that weights · x, through a value projection with the norm folded in, are the cores' values."""
    batch, rows, tokens = logits.shape
    out = torch.empty_like(logits, dtype=dtype)
    _averaging[rows, batch](
        logits, moments, out, tokens, batch * tokens, rows, eps, D=dim, PARTS=moments.shape[0], BLOCK=1024
    )
    return out


@triton.jit(do_not_specialize=["C", "S", "M"])
def _mix(
    probabilities, vectors, bias, x, out, moments, C, S, M,
    WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1)
    s = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (b * S + s).to(tl.int64)[:, None]
    inner = tl.arange(0, INNER)
    sums = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for first in range(0, D, COLUMNS):
        n = first + tl.arange(0, COLUMNS)[None, :]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, WIDTH + C, INNER):
            at = (k + inner)[None, :]
            p = tl.load(probabilities + row * WIDTH + at, (s < S)[:, None] & (s >= C)[:, None] & (at < WIDTH), 0.0)
            # A core takes one vector whole: its own output, which comes after the mixed ones.
            p = tl.where((s < C)[:, None] & (at == WIDTH + s[:, None]), 1.0, p).to(vectors.dtype.element_ty)
            v = tl.load(vectors + (b * (WIDTH + C) + at.T).to(tl.int64) * D + n, (at.T < WIDTH + C) & (n < D), 0.0)
            acc = tl.dot(p, v, acc)
        inside = (s < S)[:, None] & (n < D)
        acc += tl.load(bias + n, n < D, 0.0) + tl.load(x + row * D + n, inside, 0.0).to(tl.float32)
        tl.store(out + row * D + n, acc.to(out.dtype.element_ty), inside)
        acc = tl.where(inside, acc, 0.0)
        sums += tl.sum(acc, 1)
        squares += tl.sum(acc * acc, 1)
    m = b * S + s
    tl.store(moments + m, sums, s < S)
    tl.store(moments + M + m, squares, s < S)


def mix(probabilities: Tensor, vectors: Tensor, bias: Tensor, x: Tensor, cores: int) -> tuple[Tensor, Tensor]:
    """X (B, S, D) + probabilities (B, S, H·C) · the first H·C vectors (B, H·C + C, D) + bias, and moments (1, 2, B·S).

    Of the cores, the c-th gets the vector H·C + c instead of a mixture.
    """
    batch, tokens, dim = x.shape
    out = torch.empty_like(x)
    moments = torch.empty(1, 2, batch * tokens, device=x.device, dtype=torch.float32)
    _mix[triton.cdiv(tokens, 128), batch](
        probabilities, vectors, bias, x, out, moments, cores, tokens, batch * tokens,
        WIDTH=probabilities.shape[-1], D=dim, ROWS=128, COLUMNS=128, INNER=64, num_warps=8, num_stages=2,
    )  # fmt: skip
    return out, moments
