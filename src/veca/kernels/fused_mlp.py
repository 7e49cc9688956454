"""Triton kernel: the whole MLP of a block in one launch, for inference with narrow models.

A program keeps a tile of rows on chip, and the sums of both layers with it: a step takes some hidden channels through
norm, first layer, SwiGLU and second layer, so that they never reach memory. Where patches use the first channels only,
the cores are tiles of their own, which go on to the last channel.

Shapes: B images, C cores, S tokens of an image (cores first), M = B·S rows, D width. W1 (2·hidden, D) interleaves u and
v in groups of `SWIGLU_GROUP` rows, W2 is (D, hidden); the norm before them is folded into W1, as in
`veca.kernels.linear`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from veca.config import SWIGLU_GROUP
from veca.kernels.core_products import inverse_deviation, split_groups


@triton.jit
def _finish_columns(acc, x, out, bias, row, mask, FIRST: tl.constexpr, COLUMNS: tl.constexpr):
    """Add bias and residual to some columns, and store them; returns their sums and the sums of their squares."""
    n = FIRST + tl.arange(0, COLUMNS)[None, :]
    # The policy keeps the compiler from holding the tile of the first product in registers until here.
    acc += tl.load(x + row + n, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
    acc += tl.load(bias + n)
    tl.store(out + row + n, acc.to(out.dtype.element_ty), mask)
    return tl.sum(acc, 1), tl.sum(acc * acc, 1)


@triton.jit(do_not_specialize=["B", "C", "S", "patch_steps", "core_steps", "core_tiles"])
def _fused_mlp_kernel(
    x, w1_left, w1_right, w2_left, w2_right, b1, b2, out, moments_in, moments_out,
    B, C, S, patch_steps, core_steps, core_tiles, eps,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A tile has rows of patches only, or of cores only. Those of the cores come first: they take longest.
    D: tl.constexpr = LEFT + RIGHT
    tile = tl.program_id(0)
    M = B * S
    first, count, steps = C, S - C, patch_steps
    if tile < core_tiles:
        first, count, steps = C * 0, C, core_steps
    else:
        tile -= core_tiles
    i = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = i < B * count
    row = (i // count) * S + first + i % count
    factor = inverse_deviation(moments_in, row, inside, M, eps, D, PARTS)[:, None]
    at, mask = row.to(tl.int64)[:, None] * D, inside[:, None]
    x_left = tl.load(x + at + tl.arange(0, LEFT)[None, :], mask, 0.0)
    acc_left = tl.zeros([BLOCK_M, LEFT], tl.float32)
    if RIGHT:
        x_right = tl.load(x + at + LEFT + tl.arange(0, RIGHT)[None, :], mask, 0.0)
        acc_right = tl.zeros([BLOCK_M, RIGHT], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        # STEP rows of u and as many of v: a part of one group, W1 seen as (groups of u and v, GROUP, D).
        pair, inner = 2 * (step * STEP // GROUP), step * STEP % GROUP
        w = w1_left.load([pair, inner, 0]).reshape(2 * STEP, LEFT)
        h = tl.dot(x_left, w.T, input_precision="ieee")
        if RIGHT:
            w = w1_right.load([pair, inner, LEFT]).reshape(2 * STEP, RIGHT)
            h = tl.dot(x_right, w.T, h, input_precision="ieee")
        u, v = split_groups(h * factor, BLOCK_M, STEP)
        n = pair * GROUP + inner + tl.arange(0, STEP)
        u += tl.load(b1 + n)[None, :]
        v += tl.load(b1 + GROUP + n)[None, :]
        gated = (u * v / (1.0 + tl.exp(-u))).to(x.dtype.element_ty)
        acc_left = tl.dot(gated, w2_left.load([0, step * STEP]).T, acc_left, input_precision="ieee")
        if RIGHT:
            acc_right = tl.dot(gated, w2_right.load([LEFT, step * STEP]).T, acc_right, input_precision="ieee")
    sums, squares = _finish_columns(acc_left, x, out, b2, at, mask, 0, LEFT)
    if RIGHT:
        right_sums, right_squares = _finish_columns(acc_right, x, out, b2, at, mask, LEFT, RIGHT)
        sums += right_sums
        squares += right_squares
    tl.store(moments_out + row, sums, inside)
    tl.store(moments_out + M.to(tl.int64) + row, squares, inside)


class FusedTiling(NamedTuple):
    """How `fused_mlp` is divided into tiles."""

    rows: int
    step: int
    """Hidden channels of one step, at most `SWIGLU_GROUP`."""
    warps: int
    stages: int
    registers: int | None = None
    """Most of a thread; None: as the compiler chooses."""


FUSED_TILINGS = {64: FusedTiling(64, 64, 4, 2), 192: FusedTiling(64, 32, 4, 2), 384: FusedTiling(64, 32, 8, 2)}
"""By the width D up to which they serve."""
FUSED_MAX_DIM, FUSED_MAX_HIDDEN = 192, 128
"""`fused_mlp` is used up to this width D and so many hidden channels of the patches. Beyond them two products through
memory were faster on an H200; at D = 384 twice as fast, for lack of registers here."""


def column_parts(dim: int) -> tuple[int, int]:
    """A width as a power of two and the rest."""
    left = 1 << (dim.bit_length() - 1)
    return left, dim - left


def prefers_fused(dim: int, hidden: int) -> bool:
    """Whether `fused_mlp` supports a width D, and is expected to be faster where patches use `hidden` channels."""
    left, right = column_parts(dim)
    supported = dim % SWIGLU_GROUP == 0 and left <= 256 and right & (right - 1) == 0
    return supported and dim <= FUSED_MAX_DIM and hidden <= FUSED_MAX_HIDDEN


def fused_mlp(
    x: Tensor, moments: Tensor, fc1: tuple[Tensor, Tensor], fc2: tuple[Tensor, Tensor], eps: float, cores: int,
    hidden: int, tiling: FusedTiling | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """X (B, S, D) + its MLP, and the sum's moments (1, 2, M); `cores` tokens of each image use more than `hidden`.

    `fc1` and `fc2` are weights and biases; their channels are padded to whole groups.
    """
    (batch, tokens, dim), (w1, b1), (w2, b2) = x.shape, fc1, fc2
    out = torch.empty_like(x)
    sums = torch.empty(1, 2, batch * tokens, device=x.device, dtype=torch.float32)
    if not len(x):
        return out, sums
    if hidden == w2.shape[1]:
        cores = 0  # no different from patches
    tiling = tiling or next(each for limit, each in FUSED_TILINGS.items() if dim <= limit)
    rows, step, warps, stages, registers = tiling
    left, right = column_parts(dim)
    pairs = w1.view(-1, SWIGLU_GROUP, dim)
    w1_left = TensorDescriptor.from_tensor(pairs, [2, step, left])
    w2_left = TensorDescriptor.from_tensor(w2, [left, step])
    w1_right = TensorDescriptor.from_tensor(pairs, [2, step, right]) if right else w1_left
    w2_right = TensorDescriptor.from_tensor(w2, [right, step]) if right else w2_left
    core_tiles = triton.cdiv(batch * cores, rows)
    _fused_mlp_kernel[core_tiles + triton.cdiv(batch * (tokens - cores), rows),](
        x, w1_left, w1_right, w2_left, w2_right, b1, b2, out, moments, sums,
        batch, cores, tokens, hidden // step, w2.shape[1] // step, core_tiles, eps,
        LEFT=left, RIGHT=right, PARTS=moments.shape[0], BLOCK_M=rows, STEP=step, GROUP=SWIGLU_GROUP, STAGES=stages,
        num_warps=warps, maxnreg=registers,
    )  # fmt: skip
    return out, sums
