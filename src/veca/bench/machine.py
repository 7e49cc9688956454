"""Measurements of the machine: its copy rate, where the time of a call goes, and its description."""

from __future__ import annotations

import contextlib
import gc
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import profile

from veca.utils.timing import Call, best_seconds, synchronize
from veca.version import __version__


def empty_cache(device: torch.device) -> None:
    """Free unreferenced memory and return cached blocks to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def copy_rate(device: torch.device) -> float:
    """Peak memory bandwidth in bytes per second, reads and writes counted: the best of several large copies."""
    count = 2**26 if device.type == "cpu" else 2**30
    source = torch.empty(count, device=device, dtype=torch.uint8).random_()  # zeros draw less power: too fast
    target = torch.empty_like(source)
    return 2 * count / best_seconds(lambda: target.copy_(source), device)


class KernelTime(NamedTuple):
    """Seconds that one kernel (CUDA) or operator (CPU) takes in a call, and how often it runs."""

    name: str
    seconds: float
    times: int


def profile_call(call: Call, device: torch.device, top: int = 12) -> list[KernelTime]:
    """The `top` kernels of one call by time, and the sum of the others; on a CPU operators without their children."""
    with profile(acc_events=True) as recorded:
        call()
        synchronize(device)
    events: Any = recorded.key_averages()
    total = "self_cpu_time_total"
    if device.type == "cuda":
        # Operators and annotated regions are listed with the time of their kernels too: count it once.
        events = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
        total = "self_device_time_total"
    times = [KernelTime(e.key.removeprefix("aten::"), getattr(e, total) / 1e6, e.count) for e in events]
    times.sort(key=lambda entry: -entry.seconds)
    rest = times[top:]
    return [*times[:top], KernelTime("all the rest", sum(r.seconds for r in rest), sum(r.times for r in rest))]


def machine_facts(device: torch.device) -> dict[str, str]:
    """What a reader of the results must know about the machine: device, threads, versions."""
    facts = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {_cpu_name()}"}
    # Times on a CPU depend on the number of threads.
    facts |= {"threads": str(torch.get_num_threads()), "torch": torch.__version__}
    if device.type == "cuda":
        facts["CUDA"] = str(torch.version.cuda)
    for package in ("triton", "timm"):
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts | {"veca": __version__}


def _cpu_name() -> str:
    """The CPU's model name from Linux, else what Python knows."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
