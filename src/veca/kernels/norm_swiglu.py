"""Triton kernels for training: residual sum and LayerNorm in one pass, and SwiGLU, each forward and backward.

Residual sum and LayerNorm: the cores, the first rows of each image, are also written on their own, so that the gradient
of what reads only them has their size. The backward reads each row once and writes its gradient twice: in the dtype of
the residual stream, and rounded to that of the update, which the next matrix product reads.

SwiGLU includes the bias of the layer before it. The backward writes the gradients of both halves side by side, as the
next matrix product reads them: one pass instead of three.

Gradients of weights and biases are accumulated on the way.

Shapes: B images, S tokens, C of them cores, D width; M = B·S rows. In SwiGLU h = [u, v] is (M, 2W), bias (2W), out
(M, W).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from veca.kernels.launch import launchable, multiprocessors, program_pair

PER_THREAD = 4
"""Neighbouring elements per thread: 16 bytes of float32, one vector load."""


@triton.jit
def _column_offsets(THREADS: tl.constexpr, PARTS: tl.constexpr, PER_THREAD: tl.constexpr):
    """Columns (THREADS, PARTS, PER_THREAD) of one row; neighbouring threads read neighbouring vectors."""
    lane, part, each = tl.arange(0, THREADS), tl.arange(0, PARTS), tl.arange(0, PER_THREAD)
    return (lane[:, None, None] + part[None, :, None] * THREADS) * PER_THREAD + each[None, None, :]


@triton.jit
def _row_sum(a):
    return tl.sum(tl.sum(tl.sum(a, 2), 1), 0)


@triton.jit
def _normalize_row(a, inside, EPS: tl.constexpr, D: tl.constexpr):
    """A row minus its mean, divided by its standard deviation; and one over that deviation."""
    a = tl.where(inside, a - _row_sum(a) / D, 0.0)
    scale = tl.rsqrt(_row_sum(a * a) / D + EPS)
    return a * scale, scale


@triton.jit
def _norm_gradient(dn, a, scale, D: tl.constexpr):
    """The gradient of a row, from the gradient `dn` of its normalised form `a`."""
    return scale * (dn - _row_sum(dn) / D - a * (_row_sum(dn * a) / D))


@triton.jit
def _load_float(at, inside):
    return tl.load(at, inside, 0.0).to(tl.float32)


@triton.jit
def _load_core_row(cores, row, is_core, S, C, D: tl.constexpr, k):
    """The row of a token in a (B, C, D) tensor of cores; zeros for a patch."""
    return _load_float(cores + (row // S * C + row % S).to(tl.int64) * D + k, k < tl.where(is_core, D, 0))


@triton.jit(do_not_specialize=["S", "C"])
def _add_norm_kernel(
    x, update, weight, bias, total, normed, cores, S, C, HAS_UPDATE: tl.constexpr, EPS: tl.constexpr,
    D: tl.constexpr, THREADS: tl.constexpr, PARTS: tl.constexpr, PER_THREAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    k = _column_offsets(THREADS, PARTS, PER_THREAD)
    inside = k < D
    at = row.to(tl.int64) * D + k
    a = _load_float(x + at, inside)
    if HAS_UPDATE:
        a += _load_float(update + at, inside)
        rounded = a.to(total.dtype.element_ty)
        tl.store(total + at, rounded, inside)
        if row % S < C:
            at_core = (row // S * C + row % S).to(tl.int64) * D + k
            tl.store(cores + at_core, rounded.to(cores.dtype.element_ty), inside)
        a = rounded.to(tl.float32)
    a, _ = _normalize_row(a, inside, EPS, D)
    a = a * _load_float(weight + k, inside) + _load_float(bias + k, inside)
    tl.store(normed + at, a.to(normed.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["M", "S", "C"])
def _add_norm_backward_kernel(
    d_total, d_normed, d_cores, total, weight, d_x, d_update, partials, M, S, C,
    HAS_D_TOTAL: tl.constexpr, HAS_D_CORES: tl.constexpr, HAS_UPDATE: tl.constexpr, EPS: tl.constexpr,
    D: tl.constexpr, THREADS: tl.constexpr, PARTS: tl.constexpr, PER_THREAD: tl.constexpr,
):  # fmt: skip
    k = _column_offsets(THREADS, PARTS, PER_THREAD)
    inside = k < D
    gain = _load_float(weight + k, inside)
    d_weight = tl.zeros([THREADS, PARTS, PER_THREAD], tl.float32)
    d_bias = tl.zeros([THREADS, PARTS, PER_THREAD], tl.float32)
    for m in tl.range(2 * tl.program_id(0), M, 2 * tl.num_programs(0)):
        # Two rows per step, all loads first: more memory requests are in flight at once.
        row = m + tl.full([], 0, tl.int32)  # a tensor in Triton's interpreter too, where `m` is a Python integer
        at = row.to(tl.int64) * D + k
        inside1 = k < tl.where(row + 1 < M, D, 0)
        a0, a1 = _load_float(total + at, inside), _load_float(total + at + D, inside1)
        dn0, dn1 = _load_float(d_normed + at, inside), _load_float(d_normed + at + D, inside1)
        if HAS_D_TOTAL:
            dt0, dt1 = _load_float(d_total + at, inside), _load_float(d_total + at + D, inside1)
        a0, scale0 = _normalize_row(a0, inside, EPS, D)
        a1, scale1 = _normalize_row(a1, inside1, EPS, D)
        d_weight += dn0 * a0 + dn1 * a1
        d_bias += dn0 + dn1
        d0, d1 = _norm_gradient(dn0 * gain, a0, scale0, D), _norm_gradient(dn1 * gain, a1, scale1, D)
        if HAS_D_TOTAL:
            d0 += dt0
            d1 += dt1
        if HAS_D_CORES:
            d0 += _load_core_row(d_cores, row, row % S < C, S, C, D, k)
            d1 += _load_core_row(d_cores, row + 1, (row + 1 < M) & ((row + 1) % S < C), S, C, D, k)
        tl.store(d_x + at, d0.to(d_x.dtype.element_ty), inside)
        tl.store(d_x + at + D, d1.to(d_x.dtype.element_ty), inside1)
        if HAS_UPDATE:
            tl.store(d_update + at, d0.to(d_update.dtype.element_ty), inside)
            tl.store(d_update + at + D, d1.to(d_update.dtype.element_ty), inside1)
    to = partials + tl.program_id(0) * (2 * D) + k
    tl.store(to, d_weight, inside)
    tl.store(to + D, d_bias, inside)


@triton.jit(do_not_specialize=["P"])
def _column_sums_kernel(x, out, P, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, P, ROWS):
        p = first + tl.arange(0, ROWS)[:, None]
        acc += tl.load(x + p * W + n, (p < P) & (n < W), 0.0)
    tl.store(out + n, tl.sum(acc, 0)[None, :].to(out.dtype.element_ty), n < W)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums (W) over the rows of x (P, W): combines the partial sums of many programs, in a fixed order."""
    count, width = x.shape
    out = x.new_empty(width, dtype=dtype)
    launchable(_column_sums_kernel, x)[triton.cdiv(width, 8),](
        x, out, count, W=width, ROWS=1024, COLUMNS=8, num_warps=8
    )
    return out


def _row_tiling(width: int) -> dict[str, int]:
    """One warp per row, so that sums stay within it; two where a row is too wide for its registers."""
    warps = 1 if width <= 512 else 2
    parts = triton.next_power_of_2(triton.cdiv(width, 32 * warps * PER_THREAD))
    return {"D": width, "THREADS": 32 * warps, "PARTS": parts, "PER_THREAD": PER_THREAD, "num_warps": warps}


def launch_add_norm(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, cores: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of x and update (B, S, D), and in `dtype` its LayerNorm and the sum's first `cores` tokens.

    Without an update both sums are empty tensors: they would equal x.
    """
    x = x.contiguous()
    batch, tokens, dim = x.shape
    normed = torch.empty_like(x, dtype=dtype)
    if update is None:
        total, first = x.new_empty(0), x.new_empty(0, dtype=dtype)
    else:
        update, total = update.contiguous(), torch.empty_like(x)
        first = x.new_empty(batch, cores, dim, dtype=dtype)
    launchable(_add_norm_kernel, x)[batch * tokens,](
        x, x if update is None else update, weight, bias, total, normed, first, tokens, cores,
        HAS_UPDATE=update is not None, EPS=eps, **_row_tiling(dim),
    )  # fmt: skip
    return total, normed, first


def launch_add_norm_backward(
    d_total: Tensor | None, d_normed: Tensor, d_cores: Tensor | None, total: Tensor, weight: Tensor, eps: float,
    update: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, of the update (empty where there was none), and of weight and bias (2, D).

    `d_total` is the gradient along the residual stream, `d_cores` that of its first tokens alone, `update` the dtype of
    the update.
    """
    batch, tokens, dim = total.shape
    d_normed = d_normed.contiguous()
    d_total = None if d_total is None else d_total.contiguous()
    d_cores = None if d_cores is None else d_cores.contiguous()
    d_x = torch.empty_like(total)
    d_update = total.new_empty(0) if update is None else torch.empty_like(total, dtype=update)
    tiling = _row_tiling(dim)
    per_multiprocessor = 12 if dim <= 512 else 6 if dim <= 768 else 8  # as many as fit in the registers
    programs = torch.sym_min((batch * tokens + 1) // 2, per_multiprocessor * multiprocessors(total))
    partials = total.new_empty(programs, 2 * dim, dtype=torch.float32)
    launchable(_add_norm_backward_kernel, total)[programs,](
        total if d_total is None else d_total, d_normed, total if d_cores is None else d_cores, total, weight,
        d_x, d_update, partials, batch * tokens, tokens, 0 if d_cores is None else d_cores.shape[1],
        HAS_D_TOTAL=d_total is not None, HAS_D_CORES=d_cores is not None, HAS_UPDATE=update is not None, EPS=eps,
        **tiling,
    )  # fmt: skip
    return d_x, d_update, column_sums(partials, weight.dtype).view(2, dim)


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
