"""Devices: choosing one by name, its versions for results, peak memory of a call or a process."""

import contextlib
import functools
import gc
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch

from veca.errors import ArgumentError
from veca.utils.cuda import separate_streams
from veca.utils.text import quoted
from veca.version import __version__


@functools.cache
def side_stream(device: torch.device, use: str, priority: int = 0) -> torch.cuda.Stream:
    """A stream of a GPU beside the model's, always the same for a `use`; a priority below 0 goes before others.

    torch deals out 32 streams in turn. Were one made for each run, it would sooner or later be the stream on which the
    model records a CUDA graph, and its work would be recorded or refused.
    """
    return torch.cuda.Stream(device, priority)


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run what follows on a stream, if there is one: after the work so far, and before the work behind the block."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is an accelerator if there is one, else the CPU.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    separate_streams()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        # Allocating is the only check that covers all back ends: an index out of range, one that was not compiled in.
        device = torch.empty(0, device=accelerator or "cpu" if name == "auto" else name).device
        reason = "it holds no numbers" if device.type == "meta" else ""
    except (RuntimeError, AssertionError, ImportError) as error:
        missing = isinstance(error, NotImplementedError | ImportError)
        reason = "this PyTorch was built without it" if missing else str(error).splitlines()[0].rstrip(".")
    if reason:
        available = ", ".join(["cpu", *(f"{accelerator}:{i}" for i in range(torch.accelerator.device_count()))])
        raise ArgumentError(f"device {quoted(name)} cannot be used: {reason}. On this machine there is {available}")
    return device


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def describe_versions(device: torch.device) -> dict[str, str]:
    """Return the versions of veca, PyTorch and Python, and the name of the device, for results."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"veca": __version__, "torch": torch.__version__, "device": name, "python": platform.python_version()}


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
