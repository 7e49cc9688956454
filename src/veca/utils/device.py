"""Choosing a device by name."""

from __future__ import annotations

import torch

from veca.errors import ArgumentError
from veca.utils.text import quoted


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is an accelerator if there is one, else the CPU.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if accelerator else 0
    available = ["cpu", *(f"{accelerator.type}:{i}" for i in range(count) if accelerator)]
    try:
        # Allocating is the only check that covers all back ends: an index out of range, one that was not compiled in.
        device = torch.empty(0, device=accelerator or "cpu" if name == "auto" else name).device
        reason = "it holds no numbers" if device.type == "meta" else ""
    except (RuntimeError, AssertionError, ImportError) as error:
        missing = isinstance(error, NotImplementedError | ImportError)
        reason = "this PyTorch was built without it" if missing else str(error).splitlines()[0].rstrip(".")
    if reason:
        raise ArgumentError(
            f"device {quoted(name)} cannot be used: {reason}. On this machine there is {', '.join(available)}"
        )
    return device
