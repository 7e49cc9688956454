"""Where a program and its rows are, right for any size: grids beyond 65,535 and tensors beyond 2³¹ numbers."""

from __future__ import annotations

import triton
import triton.language as tl


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
