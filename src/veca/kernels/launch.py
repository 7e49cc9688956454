"""Launching kernels, and where a program and its rows are in tensors of any size.

Of the three dimensions of a CUDA grid only the first may exceed 65,535. Whatever grows with the batch or the image goes
there, and `program_pair` takes it apart. Offsets beyond 2³¹ elements are computed in 64 bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


def launchable(kernel: Any, x: Tensor) -> Any:
    """The kernel to call on `x`: itself, or wrapped where torch.compile traces with something else than a tensor.

    A traced graph then holds the kernels themselves, not the operator around them, and launches them directly.
    """
    return kernel if type(x) in (Tensor, nn.Parameter) else torch.library.wrap_triton(kernel)


def multiprocessors(x: Tensor) -> int:
    """Of the GPU that holds `x`; 1 on a CPU, where Triton's interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


@triton.jit
def program_pair(inner):
    """(i, j) of a program in a grid of one dimension, i < `inner` running fastest."""
    program = tl.program_id(0)
    return program % inner, program // inner


@triton.jit
def row_pointers(base, first, stride, ROWS: tl.constexpr):
    """Pointers (ROWS, 1) to the rows from `first` on.

    One offset in 64 bits to the first row, 32 bits from there: 64 for every row would take twice the registers.
    """
    return base + first.to(tl.int64) * stride + tl.arange(0, ROWS)[:, None] * stride
