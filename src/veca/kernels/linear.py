"""Triton kernels: linear layers with norm, SwiGLU and residual fused in, for inference.

One persistent matrix product computes

    out = act(x Wᵀ / σ + bias) + residual

- LayerNorm before it: the norm's weight and centring are folded into W and its bias into the bias (`veca.optimized`),
  so what is left is one factor per row, 1/σ, applied to the product. σ comes from `moments` (T, 2, M): sums over a row
  of x and of x², which the product that wrote x left behind, one pair per tile of columns.
- SwiGLU after it: W interleaves u and v in groups of half a tile, so that a tile has both halves of what it gates.
- The residual is added before the single rounding to the dtype of the output.

The small steps between such products are here too.

Shapes: M rows (tokens), K inputs, N outputs; x (M, K), W (N, K), out (M, N), or (M, N/2) after SwiGLU.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from veca.kernels.launch import multiprocessors, program_pair
from veca.kernels.ops import ROW_MULTIPLE


@triton.jit
def _tile_position(tile, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile: down a band of GROUP rows before the next column, so that W stays in cache."""
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    band = tile // (GROUP * columns)
    height = min(tl.cdiv(M, BLOCK_M) - band * GROUP, GROUP)
    inside = tile % (GROUP * columns)
    return band * GROUP + inside % height, inside // height


@triton.jit(do_not_specialize=["M", "programs"])
def _linear_kernel(
    x, w, bias, out, residual, moments_in, moments_out, x_scale, w_scale, M, eps, programs,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr,
    SCALED: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    HALF: tl.constexpr = BLOCK_N // 2
    tiles = tl.cdiv(M, BLOCK_M) * columns
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=FLATTEN):
        row, column = _tile_position(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            a = x.load([row * BLOCK_M, k * BLOCK_K])
            b = w.load([column * BLOCK_N, k * BLOCK_K])
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
        m = row * BLOCK_M + tl.arange(0, BLOCK_M)
        if SCALED:
            n = column * BLOCK_N + tl.arange(0, BLOCK_N)
            acc *= tl.load(x_scale + m, m < M, 0.0)[:, None] * tl.load(w_scale + n, n < N, 0.0)[None, :]
        if NORM:
            total = tl.zeros([BLOCK_M], tl.float32)
            squares = tl.zeros([BLOCK_M], tl.float32)
            for part in tl.static_range(NORM):
                total += tl.load(moments_in + (2 * part) * M.to(tl.int64) + m, m < M, 0.0)
                squares += tl.load(moments_in + (2 * part + 1) * M.to(tl.int64) + m, m < M, 0.0)
            mean = total / K
            acc *= tl.rsqrt(tl.maximum(squares / K - mean * mean, 0.0) + eps)[:, None]
        # The two halves of a tile's columns are stored one after the other: fewer live registers.
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        n = column * BLOCK_N + tl.arange(0, HALF)
        left += tl.load(bias + n, n < N, 0.0)[None, :]
        right += tl.load(bias + HALF + n, HALF + n < N, 0.0)[None, :]
        if SWIGLU:
            out.store([row * BLOCK_M, column * HALF], (left * right / (1.0 + tl.exp(-left))).to(out.dtype))
        else:
            if RESIDUAL:
                left += residual.load([row * BLOCK_M, column * BLOCK_N]).to(tl.float32)
            out.store([row * BLOCK_M, column * BLOCK_N], left.to(out.dtype))
            if RESIDUAL:
                right += residual.load([row * BLOCK_M, column * BLOCK_N + HALF]).to(tl.float32)
            out.store([row * BLOCK_M, column * BLOCK_N + HALF], right.to(out.dtype))
            if MOMENTS:
                to = moments_out + (2 * column) * M.to(tl.int64)
                tl.store(to + m, tl.sum(left, 1) + tl.sum(right, 1), m < M)
                squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
                tl.store(to + M + m, squares, m < M)


class LinearTiling(NamedTuple):
    """How a matrix product is divided into tiles."""

    block_n: int
    warps: int
    stages: int
    programs: int
    """Programs per multiprocessor."""
    flatten: bool
    """Whether the next tile's first loads are issued while this one ends; costs registers."""


BLOCK_M = 128
WIDE_TILES = LinearTiling(256, 8, 3, 1, True)
NARROW_TILES = LinearTiling(128, 4, 3, 2, True)
NARROW_RESIDUAL_TILES = LinearTiling(128, 4, 3, 2, False)


def _choose_linear_tiling(inputs: int, outputs: int, swiglu: bool, residual: bool) -> LinearTiling:
    """The fastest measured on an H200 among tiles of 128 × 256, 128 × 128 and 256 × 128."""
    if swiglu or inputs < (768 if residual else 512) or outputs % WIDE_TILES.block_n:
        return NARROW_RESIDUAL_TILES if residual else NARROW_TILES
    return WIDE_TILES


def linear(
    x: Tensor, w: Tensor, bias: Tensor, *, moments: Tensor | None = None, eps: float = 1e-5, swiglu: bool = False,
    scales: tuple[Tensor, Tensor] | None = None, dtype: torch.dtype | None = None,
    tiling: LinearTiling | None = None,
) -> Tensor:  # fmt: skip
    """`act(norm(x) Wᵀ + bias)`; with `scales` (of rows of x, of rows of W) x and W are float8."""
    out = torch.empty(x.shape[0], w.shape[0] // (2 if swiglu else 1), device=x.device, dtype=dtype or x.dtype)
    _launch_linear(x, w, bias, out, moments, eps, swiglu, None, None, scales, tiling)
    return out


def moment_parts(w: Tensor, tiling: LinearTiling | None = None) -> int:
    """In how many parts `linear_residual` returns its moments, for a weight (outputs, inputs)."""
    return triton.cdiv(w.shape[0], (tiling or _choose_linear_tiling(w.shape[1], w.shape[0], False, True)).block_n)


def linear_residual(
    x: Tensor, w: Tensor, bias: Tensor, residual: Tensor, tiling: LinearTiling | None = None
) -> tuple[Tensor, Tensor]:
    """`residual + x Wᵀ + bias`, and its moments."""
    out, parts = torch.empty_like(residual), moment_parts(w, tiling)
    moments = torch.empty(parts, 2, x.shape[0], device=x.device, dtype=torch.float32)
    _launch_linear(x, w, bias, out, None, 0.0, False, residual, moments, None, tiling)
    return out, moments


def _launch_linear(
    x: Tensor, w: Tensor, bias: Tensor, out: Tensor, moments: Tensor | None, eps: float, swiglu: bool,
    residual: Tensor | None, moments_out: Tensor | None, scales: tuple[Tensor, Tensor] | None,
    tiling: LinearTiling | None,
) -> None:  # fmt: skip
    (rows, inputs), outputs = x.shape, w.shape[0]
    if not rows:
        return
    tiling = tiling or _choose_linear_tiling(inputs, outputs, swiglu, residual is not None)
    block_n, warps, stages, per_multiprocessor, flatten = tiling
    block_k = 128 // x.element_size()  # rows of a tile are 128 bytes
    tiles = triton.cdiv(rows, BLOCK_M) * triton.cdiv(outputs, block_n)
    programs = min(multiprocessors(x) * per_multiprocessor, tiles)
    to = TensorDescriptor.from_tensor(out, [BLOCK_M, block_n // 2])
    _linear_kernel[programs,](
        TensorDescriptor.from_tensor(x, [BLOCK_M, block_k]), TensorDescriptor.from_tensor(w, [block_n, block_k]), bias,
        to, to if residual is None else TensorDescriptor.from_tensor(residual, [BLOCK_M, block_n // 2]),
        bias if moments is None else moments, bias if moments_out is None else moments_out, *(scales or (bias, bias)),
        rows, eps, programs,
        N=outputs, K=inputs, BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=8,
        NORM=0 if moments is None else moments.shape[0], SWIGLU=swiglu, RESIDUAL=residual is not None,
        MOMENTS=moments_out is not None, SCALED=scales is not None, FLATTEN=flatten,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _load_rows(x, M, K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Whole rows of x (M, K) in float32, with their numbers, columns, offsets and mask."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, WIDTH)[None, :]
    inside = (m < M)[:, None] & (k < K)
    at = m.to(tl.int64)[:, None] * K + k
    return m, k, at, inside, tl.load(x + at, inside, 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def _row_moments_kernel(x, out, M, K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    m, _, _, _, a = _load_rows(x, M, K, WIDTH, ROWS)
    tl.store(out + m, tl.sum(a, 1), m < M)
    tl.store(out + M + m, tl.sum(a * a, 1), m < M)


@triton.jit(do_not_specialize=["M"])
def _layer_norm_kernel(x, weight, bias, out, M, eps, K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    _, k, at, inside, a = _load_rows(x, M, K, WIDTH, ROWS)
    a = tl.where(inside, a - (tl.sum(a, 1) / K)[:, None], 0.0)
    a *= tl.rsqrt(tl.sum(a * a, 1) / K + eps)[:, None]
    a = a * tl.load(weight + k, k < K, 0.0) + tl.load(bias + k, k < K, 0.0)
    tl.store(out + at, a.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["M"])
def _quantize_kernel(
    x, out, scale, M, eps, K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LIMIT: tl.constexpr
):
    m, _, at, inside, a = _load_rows(x, M, K, WIDTH, ROWS)
    a = tl.where(inside, a - (tl.sum(a, 1) / K)[:, None], 0.0)
    row_scale = tl.maximum(tl.max(tl.abs(a), 1), 1e-12) / LIMIT
    tl.store(out + at, (a / row_scale[:, None]).to(out.dtype.element_ty), inside)
    tl.store(scale + m, row_scale * tl.rsqrt(tl.sum(a * a, 1) / K + eps), m < M)


NORM_ROWS = 4
"""Rows per program of the kernels above."""


def moments(x: Tensor) -> Tensor:
    """Sums over each row of x (M, K) and of its squares: (1, 2, M)."""
    rows, width = x.shape
    out = torch.empty(1, 2, rows, device=x.device, dtype=torch.float32)
    _row_moments_kernel[triton.cdiv(rows, NORM_ROWS),](
        x, out, rows, K=width, WIDTH=triton.next_power_of_2(width), ROWS=NORM_ROWS
    )
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of rows (M, K); weight and bias in float32."""
    rows, width = x.shape
    out = torch.empty_like(x)
    _layer_norm_kernel[triton.cdiv(rows, NORM_ROWS),](
        x, weight, bias, out, rows, eps, K=width, WIDTH=triton.next_power_of_2(width), ROWS=NORM_ROWS
    )
    return out


def quantize_normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The LayerNorm of x (M, K), without weight and bias, as float8 times one scale per row."""
    rows, width = x.shape
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, device=x.device, dtype=torch.float32)
    limit = torch.finfo(torch.float8_e4m3fn).max
    _quantize_kernel[triton.cdiv(rows, NORM_ROWS),](
        x, out, scale, rows, eps, K=width, WIDTH=triton.next_power_of_2(width), ROWS=NORM_ROWS, LIMIT=limit
    )
    return out, scale


@triton.jit(do_not_specialize=["channels", "rows", "columns", "first", "tokens"])
def _patchify_kernel(
    images, out, channels, rows, columns, first, tokens, stride_b, stride_c, stride_y, stride_x,
    WIDTH: tl.constexpr, PATCH: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program per line of pixels of a channel: read along the line, written to the patches it crosses.
    line, image_channel = program_pair(rows * PATCH)
    b, channel = (image_channel // channels).to(tl.int64), (image_channel % channels).to(tl.int64)
    row, y = line // PATCH, line % PATCH
    x = tl.arange(0, SIDE)[None, :]
    images += b * stride_b + channel * stride_c + line.to(tl.int64) * stride_y
    out += (b * tokens + first + row * columns) * WIDTH
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)[:, None]
        inside = (column < columns) & (x < PATCH)
        a = tl.load(images + (column * PATCH + x).to(tl.int64) * stride_x, inside, 0.0)
        to = out + column * WIDTH + (channel * PATCH + y) * PATCH + x
        tl.store(to, a.to(out.dtype.element_ty), inside)


def patchify(images: Tensor, patch: int, first: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Images (B, c, height, width) as rows of pixels (B, first + N, c·p·p); the first rows of each image are zero.

    Rows are padded with zeros to multiples of `ROW_MULTIPLE` elements, as tensor descriptors need.
    `out` is an earlier result for the same shapes, to be overwritten.
    """
    batch, channels, height, width = images.shape
    rows, columns = height // patch, width // patch
    tokens = first + rows * columns
    if out is None:
        out = torch.zeros(
            batch,
            tokens,
            triton.cdiv(channels * patch**2, ROW_MULTIPLE) * ROW_MULTIPLE,
            device=images.device,
            dtype=dtype,
        )
    _patchify_kernel[height * channels * batch,](
        images, out, channels, rows, columns, first, tokens, *images.stride(),
        WIDTH=out.shape[2], PATCH=patch, SIDE=triton.next_power_of_2(patch), BLOCK=64,
    )  # fmt: skip
    return out
