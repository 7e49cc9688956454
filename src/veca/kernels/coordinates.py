"""Triton kernel: the coordinate update of the cores between two blocks, for inference.

Shapes: B images, C cores, D width; state and coordinates (B, C, 2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from veca.kernels.launch import program_pair


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
