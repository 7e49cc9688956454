"""What can be read off a machine: memory of calls, its floors, where the time goes, and what it is."""

from __future__ import annotations

import contextlib
import gc
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import profile as record

from veca.utils.timing import Call, best_seconds, synchronize
from veca.version import __version__


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """The most bytes in use at a time during one call, above those before it; None on devices other than CUDA.

    A replay of a CUDA graph takes its memory from where the recording left it, which no allocator sees: measure the
    call that records.
    """
    if device.type != "cuda":
        return None
    gc.collect()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def forget(device: torch.device) -> None:
    """Let go of what the contenders of one case held: compiled code, and memory kept for reuse."""
    torch.compiler.reset()
    give_back(device)


def give_back(device: torch.device) -> None:
    """Let go of memory kept for reuse."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy, the best of a few."""
    count = 2**26 if device.type == "cpu" else 2**30
    source = torch.empty(count, device=device, dtype=torch.uint8).random_()  # zeros would cost less power
    target = torch.empty_like(source)
    return 2 * count / best_seconds(lambda: target.copy_(source), device)


class Spent(NamedTuple):
    """Seconds that one kernel or operator takes in a call, and how often it runs."""

    name: str
    seconds: float
    times: int


def where_the_time_goes(call: Call, device: torch.device, most: int = 12) -> list[Spent]:
    """What takes most of one call, longest first: kernels on CUDA, else operators less what they call."""
    with record(acc_events=True) as profile:
        call()
        synchronize(device)
    events = profile.key_averages()
    if device.type == "cuda":
        # Operators and annotated regions are listed with the time of their kernels too: once is enough.
        kernels = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
        spent = [Spent(event.key, event.self_device_time_total / 1e6, event.count) for event in kernels]
    else:
        spent = [Spent(e.key.removeprefix("aten::"), e.self_cpu_time_total / 1e6, e.count) for e in events]
    spent.sort(key=lambda entry: -entry.seconds)
    rest = spent[most:]
    return [*spent[:most], Spent("all the rest", sum(r.seconds for r in rest), sum(r.times for r in rest))]


def machine_facts(device: torch.device) -> dict[str, str]:
    """What a reader of the numbers must know of where they come from."""
    facts = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device} {_processor()}"}
    facts |= {"threads": str(torch.get_num_threads()), "torch": torch.__version__}
    if device.type == "cuda":
        facts["CUDA"] = str(torch.version.cuda)
    for package in ("triton", "timm"):
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts | {"veca": __version__}


def _processor() -> str:
    """The model of the CPU as Linux names it, or what Python knows."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
