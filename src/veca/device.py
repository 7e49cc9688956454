"""The device that a user names."""

from __future__ import annotations

import torch

from veca.errors import ArgumentError


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto": an accelerator where there is one, else the CPU.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    try:
        return torch.empty(0, device=found or "cpu" if name == "auto" else name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        here = [f"{found.type}:{i}" for i in range(torch.accelerator.device_count())] if found else []
        raise ArgumentError(
            f"device {name!r} cannot be used: {reason}. On this machine there is {', '.join(['cpu', *here])}"
        ) from error
