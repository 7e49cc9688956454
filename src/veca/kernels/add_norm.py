"""Residual sum and LayerNorm in one pass, forward and backward, as Triton kernels.

The backward reads each row once and writes its gradient twice: as the residual stream has it, and rounded to the type
of what was added, where the next product wants it. Gradients of the norm's gain and shift are summed up on the way.

Shapes: M rows (tokens), D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from veca.kernels.core_attention import multiprocessors

ROWS = 4


@triton.jit
def _normalized(a, inside, eps, D: tl.constexpr):
    """Rows centred and divided by their deviation, and one over that."""
    a = tl.where(inside, a - (tl.sum(a, 1) / D)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(a * a, 1) / D + eps)[:, None]
    return a * scale, scale


@triton.jit(do_not_specialize=["M"])
def _forward(
    x, update, weight, bias, total, normed, M, eps,
    ADD: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, WIDTH)[None, :]
    inside = (m < M) & (k < D)
    at = m.to(tl.int64) * D + k
    a = tl.load(x + at, inside, 0.0).to(tl.float32)
    if ADD:
        a += tl.load(update + at, inside, 0.0).to(tl.float32)
        kept = a.to(total.dtype.element_ty)
        tl.store(total + at, kept, inside)
        a = kept.to(tl.float32)
    a, _ = _normalized(a, inside, eps, D)
    a = a * tl.load(weight + k, k < D, 0.0).to(tl.float32) + tl.load(bias + k, k < D, 0.0).to(tl.float32)
    tl.store(normed + at, a.to(normed.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["M", "steps"])
def _backward(
    d_total, d_normed, total, weight, d_x, d_update, shares, M, steps, eps,
    CARRIED: tl.constexpr, ADD: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, WIDTH)[None, :]
    gain = tl.load(weight + k, k < D, 0.0).to(tl.float32)
    d_gain = tl.zeros([ROWS, WIDTH], tl.float32)
    d_shift = tl.zeros([ROWS, WIDTH], tl.float32)
    for step in range(steps):
        m = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (m < M) & (k < D)
        at = m.to(tl.int64) * D + k
        a, scale = _normalized(tl.load(total + at, inside, 0.0).to(tl.float32), inside, eps, D)
        dn = tl.load(d_normed + at, inside, 0.0).to(tl.float32)
        d_gain += dn * a
        d_shift += dn
        dn *= gain
        d = scale * (dn - (tl.sum(dn, 1) / D)[:, None] - a * (tl.sum(dn * a, 1) / D)[:, None])
        if CARRIED:
            d += tl.load(d_total + at, inside, 0.0).to(tl.float32)
        tl.store(d_x + at, d.to(d_x.dtype.element_ty), inside)
        if ADD:
            tl.store(d_update + at, d.to(d_update.dtype.element_ty), inside)
    to = shares + tl.program_id(0) * (2 * D) + k
    tl.store(to, tl.sum(d_gain, 0)[None, :], k < D)
    tl.store(to + D, tl.sum(d_shift, 0)[None, :], k < D)


@triton.jit(do_not_specialize=["P"])
def _column_sums(x, out, P, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, P, ROWS):
        p = first + tl.arange(0, ROWS)[:, None]
        acc += tl.load(x + p * W + n, (p < P) & (n < W), 0.0)
    tl.store(out + n, tl.sum(acc, 0)[None, :], n < W)


def column_sums(x: Tensor) -> Tensor:
    """Sums (W) over the rows of x (P, W), float32: what many programs summed up, joined in a fixed order."""
    count, width = x.shape
    out = torch.empty(width, device=x.device, dtype=torch.float32)
    _column_sums[triton.cdiv(width, 32),](x, out, count, W=width, ROWS=128, COLUMNS=32)
    return out


def forward(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The sum of x and update, and its LayerNorm in `dtype`; without an update the sum is left empty, for it is x."""
    x, dim = x.contiguous(), x.shape[-1]
    update = None if update is None else update.contiguous()
    total = x.new_empty(0) if update is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=dtype)
    rows = x.numel() // dim
    _forward[triton.cdiv(rows, ROWS),](
        x, x if update is None else update, weight, bias, total, normed, rows, eps,
        ADD=update is not None, D=dim, WIDTH=triton.next_power_of_2(dim), ROWS=ROWS,
    )  # fmt: skip
    return total, normed


def backward(
    d_total: Tensor | None, d_normed: Tensor, total: Tensor, weight: Tensor, eps: float, update: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of the update (empty where there was none), of the gain and of the shift.

    `d_total` is what comes back along the residual stream, `update` the type of what was added.
    """
    d_normed, dim = d_normed.contiguous(), total.shape[-1]
    d_total = None if d_total is None else d_total.contiguous()
    d_x = torch.empty_like(total)
    d_update = total.new_empty(0) if update is None else torch.empty_like(total, dtype=update)
    rows = total.numel() // dim
    steps = max(1, triton.cdiv(rows, 6 * multiprocessors(total)))
    programs = triton.cdiv(rows, steps)
    shares = total.new_empty(programs, 2, dim, dtype=torch.float32)
    _backward[programs,](
        total if d_total is None else d_total, d_normed, total, weight, d_x, d_update, shares, rows, steps, eps,
        CARRIED=d_total is not None, ADD=update is not None, D=dim, WIDTH=triton.next_power_of_2(dim), ROWS=1,
    )  # fmt: skip
    sums = column_sums(shares.flatten(1))
    return d_x, d_update, sums[:dim].to(weight.dtype, copy=True), sums[dim:].to(weight.dtype, copy=True)
