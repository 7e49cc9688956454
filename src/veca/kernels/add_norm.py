"""Residual sum and LayerNorm in one pass, forward and backward, as Triton kernels.

The first rows of each image, its cores, are also given on their own, so that what only they go into sends back a
gradient of their size. The backward reads each row once and writes its gradient twice: as the residual stream has it,
and rounded to the type of what was added, where the next product wants it. Gradients of the norm's gain and shift are
summed up on the way.

Shapes: B images, S tokens, C of them cores, D width; M = B·S rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from veca.kernels.launch import launchable, multiprocessors

EACH = 4
"""Numbers side by side that one thread takes."""


@triton.jit
def _columns(THREADS: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr):
    lane, part, each = tl.arange(0, THREADS), tl.arange(0, PARTS), tl.arange(0, EACH)
    return (lane[:, None, None] + part[None, :, None] * THREADS) * EACH + each[None, None, :]


@triton.jit
def _sum(a):
    return tl.sum(tl.sum(tl.sum(a, 2), 1), 0)


@triton.jit
def _normalized(a, inside, EPS: tl.constexpr, D: tl.constexpr):
    """A row centred and divided by its deviation, and one over that."""
    a = tl.where(inside, a - _sum(a) / D, 0.0)
    scale = tl.rsqrt(_sum(a * a) / D + EPS)
    return a * scale, scale


@triton.jit
def _unnormalized(dn, a, scale, D: tl.constexpr):
    """The gradient of a row from that of its norm `a`."""
    return scale * (dn - _sum(dn) / D - a * (_sum(dn * a) / D))


@triton.jit
def _load(at, inside):
    return tl.load(at, inside, 0.0).to(tl.float32)


@triton.jit
def _load_core(cores, row, is_core, S, C, D: tl.constexpr, k):
    """The row of a token among the cores alone; zeros for a patch."""
    return _load(cores + (row // S * C + row % S).to(tl.int64) * D + k, k < tl.where(is_core, D, 0))


@triton.jit(do_not_specialize=["S", "C"])
def _add_norm(
    x, update, weight, bias, total, normed, cores, S, C, ADD: tl.constexpr, EPS: tl.constexpr,
    D: tl.constexpr, THREADS: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    k = _columns(THREADS, PARTS, EACH)
    inside = k < D
    at = row.to(tl.int64) * D + k
    a = _load(x + at, inside)
    if ADD:
        a += _load(update + at, inside)
        kept = a.to(total.dtype.element_ty)
        tl.store(total + at, kept, inside)
        if row % S < C:
            at_core = (row // S * C + row % S).to(tl.int64) * D + k
            tl.store(cores + at_core, kept.to(cores.dtype.element_ty), inside)
        a = kept.to(tl.float32)
    a, _ = _normalized(a, inside, EPS, D)
    a = a * _load(weight + k, inside) + _load(bias + k, inside)
    tl.store(normed + at, a.to(normed.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["M", "S", "C"])
def _add_norm_backward(
    d_total, d_normed, d_cores, total, weight, d_x, d_update, shares, M, S, C,
    CARRIED: tl.constexpr, CORES: tl.constexpr, ADD: tl.constexpr, EPS: tl.constexpr,
    D: tl.constexpr, THREADS: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    k = _columns(THREADS, PARTS, EACH)
    inside = k < D
    gain = _load(weight + k, inside)
    d_gain = tl.zeros([THREADS, PARTS, EACH], tl.float32)
    d_shift = tl.zeros([THREADS, PARTS, EACH], tl.float32)
    for m in tl.range(2 * tl.program_id(0), M, 2 * tl.num_programs(0)):
        # Two rows at a time, all loads first: there is more to wait for at once.
        row = m + tl.full([], 0, tl.int32)  # the interpreter counts in numbers of Python
        at = row.to(tl.int64) * D + k
        also = k < tl.where(row + 1 < M, D, 0)
        a0, a1 = _load(total + at, inside), _load(total + at + D, also)
        dn0, dn1 = _load(d_normed + at, inside), _load(d_normed + at + D, also)
        if CARRIED:
            dt0, dt1 = _load(d_total + at, inside), _load(d_total + at + D, also)
        a0, scale0 = _normalized(a0, inside, EPS, D)
        a1, scale1 = _normalized(a1, also, EPS, D)
        d_gain += dn0 * a0 + dn1 * a1
        d_shift += dn0 + dn1
        d0, d1 = _unnormalized(dn0 * gain, a0, scale0, D), _unnormalized(dn1 * gain, a1, scale1, D)
        if CARRIED:
            d0 += dt0
            d1 += dt1
        if CORES:
            d0 += _load_core(d_cores, row, row % S < C, S, C, D, k)
            d1 += _load_core(d_cores, row + 1, (row + 1 < M) & ((row + 1) % S < C), S, C, D, k)
        tl.store(d_x + at, d0.to(d_x.dtype.element_ty), inside)
        tl.store(d_x + at + D, d1.to(d_x.dtype.element_ty), also)
        if ADD:
            tl.store(d_update + at, d0.to(d_update.dtype.element_ty), inside)
            tl.store(d_update + at + D, d1.to(d_update.dtype.element_ty), also)
    to = shares + tl.program_id(0) * (2 * D) + k
    tl.store(to, d_gain, inside)
    tl.store(to + D, d_shift, inside)


@triton.jit(do_not_specialize=["P"])
def _column_sums(x, out, P, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, P, ROWS):
        p = first + tl.arange(0, ROWS)[:, None]
        acc += tl.load(x + p * W + n, (p < P) & (n < W), 0.0)
    tl.store(out + n, tl.sum(acc, 0)[None, :].to(out.dtype.element_ty), n < W)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums (W) over the rows of x (P, W): what many programs summed up, joined in a fixed order."""
    count, width = x.shape
    out = x.new_empty(width, dtype=dtype)
    launchable(_column_sums, x)[triton.cdiv(width, 8),](x, out, count, W=width, ROWS=1024, COLUMNS=8, num_warps=8)
    return out


def _cut(width: int) -> dict[str, int]:
    """A row to one warp, whose sums need no other; a row too wide for its registers to two."""
    warps = 1 if width <= 512 else 2
    parts = triton.next_power_of_2(triton.cdiv(width, 32 * warps * EACH))
    return {"D": width, "THREADS": 32 * warps, "PARTS": parts, "EACH": EACH, "num_warps": warps}


def forward(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, cores: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of x and update (B, S, D), and in `dtype` its LayerNorm and the sum's first `cores` tokens.

    Without an update both sums are left empty, for they are x.
    """
    x = x.contiguous()
    batch, tokens, dim = x.shape
    normed = torch.empty_like(x, dtype=dtype)
    if update is None:
        total, first = x.new_empty(0), x.new_empty(0, dtype=dtype)
    else:
        update, total = update.contiguous(), torch.empty_like(x)
        first = x.new_empty(batch, cores, dim, dtype=dtype)
    launchable(_add_norm, x)[batch * tokens,](
        x, x if update is None else update, weight, bias, total, normed, first, tokens, cores,
        ADD=update is not None, EPS=eps, **_cut(dim),
    )  # fmt: skip
    return total, normed, first


def backward(
    d_total: Tensor | None, d_normed: Tensor, d_cores: Tensor | None, total: Tensor, weight: Tensor, eps: float,
    update: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, of the update (empty where there was none), and of gain and shift (2, D).

    `d_total` is what comes back along the residual stream, `d_cores` what comes back from its first tokens alone,
    `update` the type of what was added.
    """
    batch, tokens, dim = total.shape
    d_normed = d_normed.contiguous()
    d_total = None if d_total is None else d_total.contiguous()
    d_cores = None if d_cores is None else d_cores.contiguous()
    d_x = torch.empty_like(total)
    d_update = total.new_empty(0) if update is None else torch.empty_like(total, dtype=update)
    cut = _cut(dim)
    per_multiprocessor = 12 if dim <= 512 else 6 if dim <= 768 else 8  # as many as there are registers for
    programs = torch.sym_min((batch * tokens + 1) // 2, per_multiprocessor * multiprocessors(total))
    shares = total.new_empty(programs, 2 * dim, dtype=torch.float32)
    launchable(_add_norm_backward, total)[programs,](
        total if d_total is None else d_total, d_normed, total if d_cores is None else d_cores, total, weight,
        d_x, d_update, shares, batch * tokens, tokens, 0 if d_cores is None else d_cores.shape[1],
        CARRIED=d_total is not None, CORES=d_cores is not None, ADD=update is not None, EPS=eps, **cut,
    )  # fmt: skip
    return d_x, d_update, column_sums(shares, weight.dtype).view(2, dim)
