"""Peak memory: of one call on a CUDA device, and of a process as Linux counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch


def peak_device_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Peak bytes allocated during one call, above those allocated before it; None on devices other than CUDA.

    A replayed CUDA graph uses memory reserved when it was captured, which the allocator does not report: measure the
    call that captures.
    """
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def process_bytes(key: Literal["VmRSS", "VmHWM"], pid: int | str = "self") -> int:
    """Resident bytes of a process, now (VmRSS) or at its peak (VmHWM). Linux only: reads /proc."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith(key)).split()[1])
