"""The device that a user names."""

from __future__ import annotations

import platform

import torch

from veca.errors import ArgumentError
from veca.utils.text import quoted
from veca.version import __version__


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto": an accelerator where there is one, else the CPU.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    here = ["cpu", *(f"{found.type}:{i}" for i in range(torch.accelerator.device_count()))] if found else ["cpu"]
    try:
        device = torch.empty(0, device=found or "cpu" if name == "auto" else name).device
        reason = "it holds no numbers" if device.type == "meta" else ""
    except (RuntimeError, AssertionError, ImportError) as error:
        missing = isinstance(error, NotImplementedError | ImportError)
        reason = "this PyTorch was built without it" if missing else str(error).splitlines()[0].rstrip(".")
    if reason:
        raise ArgumentError(
            f"device {quoted(name)} cannot be used: {reason}. On this machine there is {', '.join(here)}"
        )
    return device


def describe_versions(device: torch.device) -> dict[str, str]:
    """Return the versions of veca, PyTorch and Python, and the name of the device, for results."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"veca": __version__, "torch": torch.__version__, "device": name, "python": platform.python_version()}
