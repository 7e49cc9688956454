"""Triton kernels: SwiGLU with the bias of the layer before it, forward and backward.

The backward writes the gradients of both halves side by side, as the next matrix product reads them, and accumulates
that of the bias on the way: one pass instead of three.

Shapes: M rows (tokens), W width; h = [u, v] is (M, 2W), bias (2W), out (M, W).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from veca.kernels.add_norm import column_sums
from veca.kernels.launch import launchable, multiprocessors, program_pair

SWIGLU_COLUMNS = 256
"""Columns per program."""


@triton.jit(do_not_specialize=["M"])
def _swiglu_kernel(h, bias, out, M, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    across, down = program_pair(tl.cdiv(W, COLUMNS))
    m = down.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    n = across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (m < M) & (n < W)
    u = tl.load(h + m * (2 * W) + n, inside, 0.0) + tl.load(bias + n, n < W, 0.0).to(tl.float32)
    v = tl.load(h + m * (2 * W) + W + n, inside, 0.0) + tl.load(bias + W + n, n < W, 0.0).to(tl.float32)
    tl.store(out + m * W + n, (u * tl.sigmoid(u) * v).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["M", "steps"])
def _swiglu_backward_kernel(
    d_out, h, bias, d_h, partials, M, steps, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    bias_u = tl.load(bias + n, n < W, 0.0).to(tl.float32)
    bias_v = tl.load(bias + W + n, n < W, 0.0).to(tl.float32)
    sum_u = tl.zeros([ROWS, COLUMNS], tl.float32)
    sum_v = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        m = (tl.program_id(1).to(tl.int64) * steps + step) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (m < M) & (n < W)
        at = m * (2 * W) + n
        dy = tl.load(d_out + m * W + n, inside, 0.0).to(tl.float32)
        u = tl.load(h + at, inside, 0.0) + bias_u
        v = tl.load(h + at + W, inside, 0.0) + bias_v
        gate = tl.sigmoid(u)
        du = dy * v * gate * (1.0 + u * (1.0 - gate))
        dv = dy * u * gate
        tl.store(d_h + at, du.to(d_h.dtype.element_ty), inside)
        tl.store(d_h + at + W, dv.to(d_h.dtype.element_ty), inside)
        sum_u += du
        sum_v += dv
    to = partials + tl.program_id(1) * (2 * W) + n
    tl.store(to, tl.sum(sum_u, 0)[None, :], n < W)
    tl.store(to + W, tl.sum(sum_v, 0)[None, :], n < W)


def launch_swiglu(h: Tensor, bias: Tensor) -> Tensor:
    """`silu(u) * v` of [u, v] = h + bias, (..., 2W) → (..., W)."""
    width = h.shape[-1] // 2
    h = h.contiguous()
    out = h.new_empty(*h.shape[:-1], width)
    rows = h.numel() // (2 * width)
    launchable(_swiglu_kernel, h)[triton.cdiv(width, SWIGLU_COLUMNS) * triton.cdiv(rows, 16),](
        h, bias, out, rows, W=width, ROWS=16, COLUMNS=SWIGLU_COLUMNS
    )
    return out


def launch_swiglu_backward(d_out: Tensor, h: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of h and of the bias."""
    width = h.shape[-1] // 2
    h, d_out = h.contiguous(), d_out.contiguous()
    d_h = torch.empty_like(h)
    rows, across = h.numel() // (2 * width), triton.cdiv(width, SWIGLU_COLUMNS)
    # Enough programs to fill the GPU several times, each long enough that partial sums are few.
    down = torch.sym_min(triton.cdiv(rows, 4), max(1, 16 * multiprocessors(h) // across))
    steps = triton.cdiv(rows, 4 * torch.sym_max(1, down))
    down = triton.cdiv(rows, 4 * torch.sym_max(1, steps))
    partials = h.new_empty(down, 2 * width, dtype=torch.float32)
    launchable(_swiglu_backward_kernel, h)[across, down](
        d_out, h, bias, d_h, partials, rows, steps, W=width, ROWS=4, COLUMNS=SWIGLU_COLUMNS, num_warps=2
    )
    return d_h, column_sums(partials, bias.dtype)
