"""Triton kernels of the coordinate heads, linear layers with two outputs: forward and backward, and the update.

A matrix product with so narrow a side leaves most of a GPU idle, and so do the reductions that a compiler makes of it.
Here each row is read once in either pass, and the weight's gradient is accumulated on the way. For inference the whole
update of the cores between two blocks is one kernel.

Shapes: B images, C cores, D width; M = B·C rows. x is (M, D), weight (2, D), bias (2), out (M, 2); state and
coordinates are (B, C, 2).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from veca.kernels.launch import launchable, multiprocessors, program_pair
from veca.kernels.norm_swiglu import column_sums

NARROW_ROWS = 8
"""Rows per program, or per step of one."""


@triton.jit(do_not_specialize=["M"])
def _narrow_linear_kernel(x, weight, bias, out, M, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    m, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    a = tl.load(x + m.to(tl.int64)[:, None] * D + k, (m[:, None] < M) & (k < D), 0.0).to(tl.float32)
    for side in tl.static_range(2):
        w = tl.load(weight + side * D + k, k < D, 0.0).to(tl.float32)
        tl.store(out + 2 * m + side, tl.sum(a * w, 1) + tl.load(bias + side).to(tl.float32), m < M)


@triton.jit(do_not_specialize=["M"])
def _narrow_linear_backward_kernel(
    d_out, x, weight, d_x, partials, M, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    k = tl.arange(0, WIDTH)[None, :]
    w0 = tl.load(weight + k, k < D, 0.0).to(tl.float32)
    w1 = tl.load(weight + D + k, k < D, 0.0).to(tl.float32)
    dw0 = tl.zeros([ROWS, WIDTH], tl.float32)
    dw1 = tl.zeros([ROWS, WIDTH], tl.float32)
    db0 = tl.zeros([ROWS], tl.float32)
    db1 = tl.zeros([ROWS], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, M, tl.num_programs(0) * ROWS):
        m = first + tl.arange(0, ROWS)
        inside = (m[:, None] < M) & (k < D)
        at = m.to(tl.int64)[:, None] * D + k
        a = tl.load(x + at, inside, 0.0).to(tl.float32)
        d0 = tl.load(d_out + 2 * m, m < M, 0.0).to(tl.float32)
        d1 = tl.load(d_out + 2 * m + 1, m < M, 0.0).to(tl.float32)
        dw0 += d0[:, None] * a
        dw1 += d1[:, None] * a
        db0 += d0
        db1 += d1
        tl.store(d_x + at, (d0[:, None] * w0 + d1[:, None] * w1).to(d_x.dtype.element_ty), inside)
    # A partial sum is the gradient of the weight (2, D), then that of the bias (2).
    to = partials + tl.program_id(0) * (2 * D + 2)
    tl.store(to + k, tl.sum(dw0, 0)[None, :], k < D)
    tl.store(to + D + k, tl.sum(dw1, 0)[None, :], k < D)
    tl.store(to + 2 * D, tl.sum(db0, 0))
    tl.store(to + 2 * D + 1, tl.sum(db1, 0))


def launch_narrow_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x Wᵀ + bias` in float32: (..., D) → (..., 2)."""
    x = x.contiguous()
    rows, dim = x.numel() // x.shape[-1], x.shape[-1]
    out = x.new_empty(*x.shape[:-1], 2, dtype=torch.float32)
    launchable(_narrow_linear_kernel, x)[triton.cdiv(rows, NARROW_ROWS),](
        x, weight, bias, out, rows, D=dim, WIDTH=triton.next_power_of_2(dim), ROWS=NARROW_ROWS
    )
    return out


def launch_narrow_linear_backward(d_out: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of weight and bias in one row (2·D + 2)."""
    x, d_out = x.contiguous(), d_out.contiguous()
    rows, dim = x.numel() // x.shape[-1], x.shape[-1]
    d_x = torch.empty_like(x)
    programs = torch.sym_min(triton.cdiv(rows, NARROW_ROWS), 4 * multiprocessors(x))
    partials = x.new_empty(programs, 2 * dim + 2, dtype=torch.float32)
    launchable(_narrow_linear_backward_kernel, x)[programs,](
        d_out, x, weight, d_x, partials, rows, D=dim, WIDTH=triton.next_power_of_2(dim), ROWS=NARROW_ROWS, num_warps=8
    )
    return d_x, column_sums(partials, weight.dtype)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit(
    do_not_specialize=["C", "stride_state"], do_not_specialize_on_alignment=["state", "new_state", "coordinates"]
)
def _move_cores_kernel(
    x, weight, bias, alpha, state, new_state, coordinates, C, stride_b, stride_state,
    HAS_HEAD: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    group, b = program_pair(tl.cdiv(C, ROWS))
    b = b.to(tl.int64)
    c = group * ROWS + tl.arange(0, ROWS)
    mask = c < C
    core_x = tl.load(state + b * stride_state + 2 * c, mask, 0.0)
    core_y = tl.load(state + b * stride_state + 2 * c + 1, mask, 0.0)
    if HAS_HEAD:
        k = tl.arange(0, WIDTH)[None, :]
        inside = mask[:, None] & (k < D)
        core = tl.load(x + b * stride_b + c[:, None] * D + k, inside, 0.0).to(tl.float32)
        factor = tl.load(alpha)
        core_x += factor * (tl.sum(core * tl.load(weight + k, k < D, 0.0), 1) + tl.load(bias))
        core_y += factor * (tl.sum(core * tl.load(weight + D + k, k < D, 0.0), 1) + tl.load(bias + 1))
    to = b * C + c
    tl.store(new_state + 2 * to, core_x, mask)
    tl.store(new_state + 2 * to + 1, core_y, mask)
    tl.store(coordinates + 2 * to, _tanh(core_x), mask)
    tl.store(coordinates + 2 * to + 1, _tanh(core_y), mask)


def move_cores(
    x: Tensor, cores: int, state: Tensor, head: tuple[Tensor, Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """New state, and coordinates = tanh(state), of the cores of tokens `x` (B, S, D).

    `head` is (weight, bias, alpha), in float32; without one the cores do not move. `state` is (C, 2), shared by all
    images, or (B, C, 2).
    """
    batch, _, dim = x.shape
    new_state, coordinates = torch.empty(2, batch, cores, 2, device=x.device, dtype=torch.float32)
    weight, bias, alpha = head or (state, state, state)
    _move_cores_kernel[triton.cdiv(cores, 4) * batch,](
        x, weight, bias, alpha, state, new_state, coordinates, cores, x.stride(0),
        state.stride(0) if state.ndim == 3 else 0,
        HAS_HEAD=head is not None, D=dim, WIDTH=triton.next_power_of_2(dim), ROWS=4,
    )  # fmt: skip
    return new_state, coordinates
