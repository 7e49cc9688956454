"""Triton kernels: attention with few cores, for inference, by probabilities instead of values.

With C·H well below D it is less work to average tokens than to project their values, and to mix C·H projected vectors
than to project the output of every patch (`veca.attention.few_cores_attention` is the definition). Besides matrix
products this takes:

- `projected_probabilities`: tokens → each patch's softmax over the cores, and the cores' logits over all tokens;
  queries and keys of patches stay on chip. `core_logits` are the logits alone, of queries and keys in memory;
- `averaging_weights`: softmax of those logits, times 1/σ of each token, so that tokens are averaged without a LayerNorm
  before;
- `mix_residual`: x + probabilities · vectors + bias, and the moments of the sum for the next LayerNorm.

Shapes: B images, C cores, N patches, S = C + N tokens (cores first), H heads, d width of a head, D = H·d. The H·C
columns of probabilities are head-major: h·C + c.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from veca.kernels.core_attention import LOG2_E, dot_scores
from veca.kernels.core_products import inverse_deviation, split_groups
from veca.kernels.launch import multiprocessors, program_pair, row_pointers
from veca.kernels.rotary import load_frequency, load_rotated, load_rows, rotary_table, rotate_pair


@triton.jit(do_not_specialize=["C", "N", "num_queries", "splits", "tiles"])
def _core_logits_kernel(
    q, k, cores, patches, frequencies, logits, C, N, num_queries, splits, tiles, scale, stride_qb, stride_q, stride_k,
    H: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    split, bh = program_pair(splits)
    b, h = bh // H, bh % H
    S = C + N
    cores += b.to(tl.int64) * (2 * C)
    q += b.to(tl.int64) * stride_qb + h * D
    k += b.to(tl.int64) * S * stride_k + h * D
    frequency = load_frequency(frequencies, D // 2)
    c, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    start = split * tiles
    stop = min(start + tiles, tl.cdiv(N, TILE))
    cos, sin = rotary_table(cores, frequency, c, C - 1, HALF, EXACT)
    query = load_rotated(q + c * stride_q, c < num_queries, cos, sin, HALF)
    to = logits + (bh.to(tl.int64) * num_queries + c) * S
    if split == 0:
        for first in range(0, C, CHUNK):
            key_cos, key_sin = rotary_table(cores, frequency, first + c, C - 1, HALF, EXACT)
            key = load_rotated(k + (first + c) * stride_k, first + c < C, key_cos, key_sin, HALF)
            s = dot_scores(query, key, PRECISION) * scale
            tl.store(to + first + column, s, (c < num_queries) & (first + column < C))
    for tile in tl.range(start, stop, num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)
        patch_cos, patch_sin = rotary_table(patches, frequency, n[:, None], N - 1, HALF, EXACT)
        rows = row_pointers(k, C + tile * TILE, stride_k, TILE)
        key = load_rotated(rows, (n < N)[:, None], patch_cos, patch_sin, HALF)
        s = dot_scores(query, key, PRECISION) * scale
        tl.store(to + C + n[None, :], s, (c < num_queries) & (n < N)[None, :])


def core_logits(q: Tensor, k: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor) -> Tensor:
    """Logits (B, H·n, S), base 2, of the first n cores' queries (B, n, H, d) against keys (B, S, H, d)."""
    (batch, tokens, heads, width), num_queries, cores = k.shape, q.shape[1], core_points.shape[1]
    logits = k.new_empty(batch, heads * num_queries, tokens, dtype=torch.float32)
    tiles = triton.cdiv(tokens - cores, 64)
    splits = max(1, min(tiles, 10 * multiprocessors(k) // (batch * heads)))
    per_split = triton.cdiv(tiles, splits)
    splits = triton.cdiv(tiles, per_split)
    _core_logits_kernel[splits * batch * heads,](
        q, k, core_points, patch_points, frequencies, logits, cores, tokens - cores, num_queries, splits, per_split,
        width**-0.5 * LOG2_E.value, q.stride(0), q.stride(1), k.stride(1),
        H=heads, D=width, CHUNK=max(16, triton.next_power_of_2(num_queries)), TILE=64, EXACT=k.dtype == torch.float32,
        PRECISION="ieee", STAGES=3,
    )  # fmt: skip
    return logits


@triton.jit
def _load_halves(rows, mask, cos, sin, HALF: tl.constexpr):
    """Queries or keys of cores, rotated, as two halves of their channels."""
    a, b = load_rows(rows, mask, HALF), load_rows(rows + HALF, mask, HALF)
    rotated_a, rotated_b = rotate_pair(a, b, cos, sin)
    return rotated_a.to(a.dtype), rotated_b.to(a.dtype)


@triton.jit
def _dot_halves(a, b, core_a, core_b, PRECISION: tl.constexpr):
    """Products (rows, cores) of queries or keys in float32 with those of cores, each as two halves."""
    acc = tl.dot(a.to(core_a.dtype), core_a.T, input_precision=PRECISION)
    return tl.dot(b.to(core_b.dtype), core_b.T, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["C", "N", "M", "tiles"])
def _projected_probabilities_kernel(
    x, w, bias, moments, core_qkv, cores, patches, frequencies, patch_to_core, logits, C, N, M, tiles, eps, scale,
    H: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # One tile of patches and one head; heads run fastest, so that they find the tile in the cache.
    WIDTH: tl.constexpr = D // H
    HALF: tl.constexpr = WIDTH // 2
    h, tile_b = program_pair(H)
    tile, b = tile_b % tiles, tile_b // tiles
    S = C + N
    acc = tl.zeros([BLOCK_M, 2 * WIDTH], tl.float32)
    for step in tl.range(0, tl.cdiv(D, BLOCK_K), num_stages=STAGES):
        rows = x.load([b, C + tile * BLOCK_M, step * BLOCK_K]).reshape(BLOCK_M, BLOCK_K)
        qk = w.load([0, h * WIDTH, step * BLOCK_K]).reshape(2 * WIDTH, BLOCK_K)
        acc = tl.dot(rows, qk.T, acc, input_precision=PRECISION)
    n = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (n < N)[:, None]
    acc *= inverse_deviation(moments + b.to(tl.int64) * S + C, n, n < N, M, eps, D, PARTS)[:, None]
    q, k = split_groups(acc, BLOCK_M, WIDTH)
    channel = h * WIDTH + tl.arange(0, WIDTH)[None, :]
    q += tl.load(bias + channel)
    k += tl.load(bias + D + channel)
    frequency = load_frequency(frequencies, HALF)
    cos, sin = rotary_table(patches, frequency, n[:, None], N - 1, HALF, EXACT)
    c, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    core_cos, core_sin = rotary_table(cores + b.to(tl.int64) * (2 * C), frequency, c, C - 1, HALF, EXACT)
    own = core_qkv + (b.to(tl.int64) * C + c) * (3 * D) + h * WIDTH
    key_a, key_b = _load_halves(own + D, c < C, core_cos, core_sin, HALF)
    query_a, query_b = _load_halves(own, c < C, core_cos, core_sin, HALF)

    a, b_half = split_groups(q, BLOCK_M, HALF)
    a, b_half = rotate_pair(a, b_half, cos, sin)
    s = tl.where(column < C, _dot_halves(a, b_half, key_a, key_b, PRECISION), float("-inf"))
    p = tl.exp2((s - tl.max(s, 1)[:, None]) * scale)
    p *= (1.0 / tl.sum(p, 1))[:, None]
    to = row_pointers(patch_to_core, b.to(tl.int64) * S + C + tile * BLOCK_M, H * C, BLOCK_M) + h * C + column
    tl.store(to, p.to(patch_to_core.dtype.element_ty), inside & (column < C))

    a, b_half = split_groups(k, BLOCK_M, HALF)
    a, b_half = rotate_pair(a, b_half, cos, sin)
    to = logits + ((b * H + h).to(tl.int64) * C + column) * S
    s = _dot_halves(a, b_half, query_a, query_b, PRECISION) * scale
    tl.store(to + C + n[:, None], s, inside & (column < C))
    if tile == 0:  # the cores' own keys
        own_logits = _dot_halves(key_a, key_b, query_a, query_b, PRECISION) * scale
        tl.store(to + c, own_logits, (c < C) & (column < C))


class ProjectionTiling(NamedTuple):
    """How `projected_probabilities` is divided into tiles."""

    rows: int
    warps: int
    stages: int
    registers: int | None = None
    """Most of a thread; None: as the compiler chooses."""


PROJECTION_TILING = ProjectionTiling(128, 8, 3, registers=128)


def projected_probabilities(
    x: Tensor, moments: Tensor, w: Tensor, bias: Tensor, eps: float, core_qkv: Tensor, heads: int, core_points: Tensor,
    patch_points: Tensor, frequencies: Tensor, tiling: ProjectionTiling | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Patches' probabilities (B, S, H·C), rows of cores unset, and cores' logits (B, H·C, S) of tokens x (B, S, D).

    `w` (2·D, D or more) and `bias` are of the projection to q and k, with the norm folded in; `core_qkv` (B·C, 3·D) is
    what it gives for the cores.
    """
    (batch, tokens, dim), cores = x.shape, core_points.shape[1]
    width, patches = dim // heads, tokens - cores
    patch_to_core = x.new_empty(batch, tokens, heads * cores)
    logits = x.new_empty(batch, heads * cores, tokens, dtype=torch.float32)
    rows, warps, stages, registers = tiling or PROJECTION_TILING
    block_k = 128 // x.element_size()  # rows of a tile are 128 bytes
    tiles = triton.cdiv(patches, rows)
    _projected_probabilities_kernel[heads * tiles * batch,](
        TensorDescriptor.from_tensor(x, [1, rows, block_k]),
        TensorDescriptor.from_tensor(w.view(2, dim, dim), [2, width, block_k]),
        bias, moments, core_qkv, core_points, patch_points, frequencies, patch_to_core, logits,
        cores, patches, batch * tokens, tiles, eps, width**-0.5 * LOG2_E.value,
        H=heads, D=dim, PARTS=moments.shape[0], BLOCK_M=rows, BLOCK_K=block_k,
        CHUNK=max(16, triton.next_power_of_2(cores)), EXACT=x.dtype == torch.float32, PRECISION="ieee", STAGES=stages,
        num_warps=warps, maxnreg=registers,
    )  # fmt: skip
    return patch_to_core, logits


@triton.jit(do_not_specialize=["rows", "S", "M"])
def _averaging_weights_kernel(
    logits, moments, out, rows, S, M, eps,
    D: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, b = program_pair(tl.cdiv(rows, ROWS))
    b = b.to(tl.int64)
    row = group * ROWS + tl.arange(0, ROWS)[:, None]
    at = (b * rows + row) * S
    moments += b * S
    # Each lane keeps a running softmax of its own columns; lanes are combined once, at the end.
    lane_max = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    lane_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, S, BLOCK):
        s = first + tl.arange(0, BLOCK)[None, :]
        a = tl.load(logits + at + s, (row < rows) & (s < S), float("-inf"))
        new_max = tl.maximum(lane_max, a)
        # Past the end of the row both maxima are -inf, and their difference would be NaN.
        lane_sum = tl.where(
            new_max == float("-inf"), 0.0, lane_sum * tl.exp2(lane_max - new_max) + tl.exp2(a - new_max)
        )
        lane_max = new_max
    row_max = tl.max(lane_max, 1)[:, None]
    row_sum = tl.sum(lane_sum * tl.exp2(lane_max - row_max), 1)[:, None]
    for first in range(0, S, BLOCK):
        s = first + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (s < S)
        sums = tl.zeros([1, BLOCK], tl.float32)
        squares = tl.zeros([1, BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            sums += tl.load(moments + (2 * part) * M.to(tl.int64) + s, s < S, 0.0)
            squares += tl.load(moments + (2 * part + 1) * M.to(tl.int64) + s, s < S, 0.0)
        mean = sums / D
        p = tl.exp2(tl.load(logits + at + s, inside, float("-inf")) - row_max) / row_sum
        tl.store(
            out + at + s,
            (p * tl.rsqrt(tl.maximum(squares / D - mean * mean, 0.0) + eps)).to(out.dtype.element_ty),
            inside,
        )


def averaging_weights(logits: Tensor, moments: Tensor, dim: int, eps: float, dtype: torch.dtype) -> Tensor:
    """Weights (B, H·C, S) such that weights · x, through a value projection with the norm folded in, are values."""
    batch, rows, tokens = logits.shape
    out = torch.empty_like(logits, dtype=dtype)
    _averaging_weights_kernel[triton.cdiv(rows, 4) * batch,](
        logits, moments, out, rows, tokens, batch * tokens, eps, D=dim, PARTS=moments.shape[0], ROWS=4, BLOCK=512
    )
    return out


@triton.jit(do_not_specialize=["C", "S", "M"])
def _mix_residual_kernel(
    probabilities, vectors, bias, x, out, moments, C, S, M, WIDTH,
    INNER: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, b = program_pair(tl.cdiv(S, ROWS))
    b = b.to(tl.int64)
    s = tile * ROWS + tl.arange(0, ROWS)
    vectors += b * (WIDTH + C) * D
    first_row = b * S + tile * ROWS
    x = row_pointers(x, first_row, D, ROWS)
    out = row_pointers(out, first_row, D, ROWS)
    inner = tl.arange(0, INNER)
    patch = ((s < S) & (s >= C))[:, None]
    p = row_pointers(probabilities, first_row, WIDTH, ROWS) + inner[None, :]
    p = tl.load(p, patch & (inner < WIDTH)[None, :], 0.0)
    # A core takes one vector as it is: its own output, which comes after the mixed ones.
    p = tl.where((s < C)[:, None] & (inner[None, :] == WIDTH + s[:, None]), 1.0, p).to(x.dtype.element_ty)
    sums = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, D, COLUMNS, num_stages=STAGES):
        n = first + tl.arange(0, COLUMNS)[None, :]
        inside = (s < S)[:, None] & (n < D)
        v = tl.load(vectors + inner[:, None] * D + n, (inner < WIDTH + C)[:, None] & (n < D), 0.0)
        old = tl.load(x + n, inside, 0.0)
        acc = tl.dot(p, v, input_precision=PRECISION) + old.to(tl.float32)
        acc = tl.where(inside, acc + tl.load(bias + n, n < D, 0.0), 0.0)
        tl.store(out + n, acc.to(x.dtype.element_ty), inside)
        sums += tl.sum(acc, 1)
        squares += tl.sum(acc * acc, 1)
    moments += first_row
    row = tl.arange(0, ROWS)
    tl.store(moments + row, sums, s < S)
    tl.store(moments + M + row, squares, s < S)


class MixTiling(NamedTuple):
    """How `mix_residual` is divided into tiles."""

    rows: int
    columns: int
    warps: int
    stages: int


MIX_TILING = MixTiling(64, 64, 4, 3)


def mix_residual(probabilities: Tensor, vectors: Tensor, bias: Tensor, x: Tensor, cores: int) -> tuple[Tensor, Tensor]:
    """X (B, S, D) + probabilities (B, S, H·C) · the first H·C vectors (B, H·C + C, D) + bias, and moments (1, 2, B·S).

    Of the cores, the c-th gets the vector H·C + c instead of a mixture.
    """
    batch, tokens, dim = x.shape
    out = torch.empty_like(x)
    moments = torch.empty(1, 2, batch * tokens, device=x.device, dtype=torch.float32)
    width = probabilities.shape[-1]
    rows, columns, warps, stages = MIX_TILING
    _mix_residual_kernel[triton.cdiv(tokens, rows) * batch,](
        probabilities, vectors, bias, x, out, moments, cores, tokens, batch * tokens, width,
        INNER=max(16, triton.next_power_of_2(width + cores)), D=dim, ROWS=rows, COLUMNS=columns, PRECISION="ieee",
        STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return out, moments
