"""How a kernel is launched: at once, or as a step of the graph that is being traced.

Of the three dimensions of a CUDA grid only the first may pass 65,535: whatever grows with the batch or the image goes
there, and `veca.kernels.indexing` takes it apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def launchable(kernel: Any, x: Tensor) -> Any:
    """The kernel to call on `x`, which is a tensor, or in its place what torch.compile traces with.

    A traced graph holds the kernels themselves, not the operator around them: its code launches them directly.
    """
    return kernel if type(x) in (Tensor, nn.Parameter) else torch.library.wrap_triton(kernel)


def multiprocessors(x: Tensor) -> int:
    """Of the GPU that holds `x`; 1 on a CPU, where Triton's interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
