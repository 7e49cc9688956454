"""Triton kernels: what a block computes of its cores alone, as small matrix products, for inference.

- MLP of a width below 1: all tokens share two products over the first channels (`veca.kernels.linear`); the channels
  that only cores use are `core_channels` and `add_core_channels`.
- Attention with few cores (`veca.kernels.few_cores`): `core_projection` are their queries, keys and values,
  `core_vectors` what patches and cores take.

Cores of all images share tiles, read from and written to where they are in the sequence.

Shapes: B images, C cores, S tokens of an image (cores first), M = B·S rows, H heads, d width of a head, D = H·d. W1
interleaves u and v in groups of `SWIGLU_GROUP` rows; norms are folded into weights as in `veca.kernels.linear`.
"""

import triton
import triton.language as tl
from torch import Tensor

from veca.config import SWIGLU_GROUP

K_STEP, STAGES = 64, 4


@triton.jit
def inverse_deviation(moments, row, mask, M, eps, D: tl.constexpr, PARTS: tl.constexpr):
    """1/σ of rows, from their moments (PARTS, 2, M)."""
    total = tl.load(moments + row, mask, 0.0)
    squares = tl.load(moments + M.to(tl.int64) + row, mask, 0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(moments + (2 * part) * M.to(tl.int64) + row, mask, 0.0)
        squares += tl.load(moments + (2 * part + 1) * M.to(tl.int64) + row, mask, 0.0)
    mean = total / D
    return tl.rsqrt(tl.maximum(squares / D - mean * mean, 0.0) + eps)


@triton.jit
def split_groups(h, ROWS: tl.constexpr, GROUP: tl.constexpr):
    """(ROWS, 2·GROUP) → its left and right half."""
    return tl.split(tl.permute(tl.reshape(h, (ROWS, 2, GROUP)), (0, 2, 1)))


@triton.jit
def core_rows(tile, B, C, S, ROWS: tl.constexpr):
    """Of a tile of cores, counted over all images: their numbers, the rows they are in, and which of them exist."""
    i = tile * ROWS + tl.arange(0, ROWS)
    return i.to(tl.int64), ((i // C) * S + i % C).to(tl.int64), i < B * C


@triton.jit
def _small_product(
    a, b, acc, a_mask, b_mask, K, K_STEP: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """`acc + a bᵀ`, of pointers (rows, 1) to rows of a and b; WHOLE: their length K is a multiple of K_STEP."""
    for first in tl.range(0, K, K_STEP, num_stages=STAGES):
        k = first + tl.arange(0, K_STEP)[None, :]
        if WHOLE:
            rows, columns = tl.load(a + k, a_mask, 0.0), tl.load(b + k, b_mask, 0.0)
        else:
            rows, columns = tl.load(a + k, a_mask & (k < K), 0.0), tl.load(b + k, b_mask & (k < K), 0.0)
        acc = tl.dot(rows, columns.T, acc, input_precision="ieee")
    return acc


def _tile_rows(count: int) -> int:
    """Rows of a tile for products of `count` cores: small ones, for more programs, where the cores are few."""
    return 16 if count <= 512 else 64


@triton.jit(do_not_specialize=["B", "C", "S"])
def _core_channels_kernel(
    x, w, bias, out, moments, B, C, S, N, eps,
    D: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, K_STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    i, row, inside = core_rows(tl.program_id(0), B, C, S, ROWS)
    group = tl.program_id(1)
    n = group * (2 * GROUP) + tl.arange(0, 2 * GROUP)[:, None]
    acc = tl.zeros([ROWS, 2 * GROUP], tl.float32)
    at = x + row[:, None] * D
    acc = _small_product(at, w + n * D, acc, inside[:, None], n >= 0, D, K_STEP, D % K_STEP == 0, STAGES)
    acc *= inverse_deviation(moments, row, inside, B * S, eps, D, PARTS)[:, None]
    u, v = split_groups(acc, ROWS, GROUP)
    n = group * (2 * GROUP) + tl.arange(0, GROUP)
    u += tl.load(bias + n)[None, :]
    v += tl.load(bias + GROUP + n)[None, :]
    to = out + i[:, None] * N + group * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(to, (u * v / (1.0 + tl.exp(-u))).to(out.dtype.element_ty), inside[:, None])


def core_channels(x: Tensor, moments: Tensor, w: Tensor, bias: Tensor, eps: float, cores: int) -> Tensor:
    """SwiGLU of the norm of the first `cores` tokens of x (B, S, D), by some groups of rows of W1: (B·C, channels)."""
    (batch, tokens, dim), channels = x.shape, len(w) // 2
    out = x.new_empty(batch * cores, channels)
    rows = _tile_rows(len(out))
    _core_channels_kernel[triton.cdiv(len(out), rows), channels // SWIGLU_GROUP](
        x, w, bias, out, moments, batch, cores, tokens, channels, eps, D=dim, PARTS=moments.shape[0], ROWS=rows,
        GROUP=SWIGLU_GROUP, K_STEP=K_STEP, STAGES=STAGES,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["B", "C", "S"])
def _add_core_channels_kernel(
    hidden, w, x, B, C, S, N, stride,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, K_STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i, row, inside = core_rows(tl.program_id(0), B, C, S, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = inside[:, None] & (n < D)[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    rows, columns = hidden + i[:, None] * N, w + n[:, None] * stride
    acc = _small_product(rows, columns, acc, inside[:, None], (n < D)[:, None], N, K_STEP, True, STAGES)
    to = x + row[:, None] * D + n[None, :]
    acc += tl.load(to, mask, 0.0).to(tl.float32)
    tl.store(to, acc.to(x.dtype.element_ty), mask)


def add_core_channels(hidden: Tensor, w: Tensor, x: Tensor, cores: int) -> None:
    """Add `hidden` Wᵀ to the first `cores` tokens of x (B, S, D), in place; W is some groups of columns of W2."""
    batch, tokens, dim = x.shape
    rows = _tile_rows(len(hidden))
    columns = 64 if rows == 64 else 32
    _add_core_channels_kernel[triton.cdiv(len(hidden), rows), triton.cdiv(dim, columns)](
        hidden, w, x, batch, cores, tokens, hidden.shape[1], w.stride(0), D=dim, ROWS=rows, COLUMNS=columns,
        K_STEP=K_STEP, STAGES=STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "C", "S"])
def _core_projection_kernel(
    x, w, bias, out, moments, B, C, S, eps,
    N: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    K_STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i, row, inside = core_rows(tl.program_id(0), B, C, S, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    at, columns = x + row[:, None] * D, w + n[:, None] * D
    acc = _small_product(at, columns, acc, inside[:, None], (n < N)[:, None], D, K_STEP, D % K_STEP == 0, STAGES)
    acc *= inverse_deviation(moments, row, inside, B * S, eps, D, PARTS)[:, None]
    acc += tl.load(bias + n, n < N, 0.0)[None, :]
    tl.store(out + i[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), inside[:, None] & (n < N)[None, :])


def core_projection(x: Tensor, moments: Tensor, w: Tensor, bias: Tensor, eps: float, cores: int) -> Tensor:
    """A layer, with the norm before it, of the first `cores` tokens of x (B, S, D): (B·C, N)."""
    (batch, tokens, dim), outputs = x.shape, len(w)
    out = x.new_empty(batch * cores, outputs)
    rows = _tile_rows(len(out))
    _core_projection_kernel[triton.cdiv(len(out), rows), triton.cdiv(outputs, 64)](
        x, w, bias, out, moments, batch, cores, tokens, eps, N=outputs, D=dim, PARTS=moments.shape[0], ROWS=rows,
        COLUMNS=64, K_STEP=K_STEP, STAGES=STAGES,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["B", "C"])
def _core_values_kernel(
    averages, w, bias, out, B, C,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, K_STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = D // H
    i, row, inside = core_rows(tl.program_id(0), B, C, H * C, ROWS)
    h = tl.program_id(1)
    n = h * WIDTH + tl.arange(0, WIDTH)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    at, columns = averages + (row + h * C)[:, None] * D, w + n[:, None] * D
    acc = _small_product(at, columns, acc, inside[:, None], n[:, None] >= 0, D, K_STEP, D % K_STEP == 0, STAGES)
    acc += tl.load(bias + n)[None, :]
    tl.store(out + i[:, None] * D + n[None, :], acc.to(out.dtype.element_ty), inside[:, None])


@triton.jit(do_not_specialize=["B", "C"])
def _core_vectors_kernel(
    own, averaged, w, out, B, C,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, K_STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # The first H roles: one head of the cores' own values. The last: all heads of what they have averaged.
    WIDTH: tl.constexpr = D // H
    i, row, inside = core_rows(tl.program_id(0), B, C, (H + 1) * C, ROWS)
    n, role = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(2)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    b, b_mask = w + n[:, None] * D, (n < D)[:, None]
    if role < H:
        a = own + i[:, None] * (3 * D) + (2 * D + role * WIDTH)
        acc = _small_product(a, b + role * WIDTH, acc, inside[:, None], b_mask, WIDTH, K_STEP, True, STAGES)
    else:
        acc = _small_product(averaged + i[:, None] * D, b, acc, inside[:, None], b_mask, D, K_STEP, True, STAGES)
    to = out + (row + role * C)[:, None] * D + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), inside[:, None] & (n < D)[None, :])


def core_vectors(averages: Tensor, core_qkv: Tensor, value: tuple[Tensor, Tensor], proj: Tensor, heads: int) -> Tensor:
    """The vectors (B, H·C + C, D) that `mix_residual` takes, of averages (B, H·C, D) of the tokens.

    The first H·C are the values of the cores, in their projection `core_qkv` (B·C, 3·D), through one head of the output
    projection each; the others are the averages', through all. `value` is weight and bias of the value projection, with
    the norm folded in.
    """
    (batch, rows_of_image, dim), count = averages.shape, len(core_qkv)
    cores = rows_of_image // heads
    values, vectors = averages.new_empty(count, dim), averages.new_empty(batch, rows_of_image + cores, dim)
    rows, columns = _tile_rows(count), 64
    _core_values_kernel[triton.cdiv(count, rows), heads](
        averages, *value, values, batch, cores, H=heads, D=dim, ROWS=rows, K_STEP=K_STEP, STAGES=STAGES
    )
    _core_vectors_kernel[triton.cdiv(count, rows), triton.cdiv(dim, columns), heads + 1](
        core_qkv, values, proj, vectors, batch, cores, H=heads, D=dim, ROWS=rows, COLUMNS=columns,
        K_STEP=min(K_STEP, dim // heads), STAGES=STAGES,
    )  # fmt: skip
    return vectors
