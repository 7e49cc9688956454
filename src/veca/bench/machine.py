"""Measurements of the machine: copy rate, time per kernel of a call, peak memory of a forward pass, description."""

import contextlib
import gc
import multiprocessing
import platform
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from veca.checkpoint import create_model
from veca.utils.device import choose_device
from veca.utils.memory import peak_device_bytes, process_bytes
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


def profile_call(call: Call, device: torch.device, top: int = 12) -> list[tuple[str, float, int]]:
    """The `top` kernels (CUDA) or operators (CPU) of one call, and the sum of the others: name, seconds, how often."""
    with profile(acc_events=True) as recorded:
        call()
        synchronize(device)
    events: Any = recorded.key_averages()
    total = "self_cpu_time_total"
    if device.type == "cuda":
        # Operators and annotated regions are listed with the time of their kernels too: count it once.
        events = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
        total = "self_device_time_total"
    spent = [(e.key.removeprefix("aten::"), getattr(e, total) / 1e6, e.count) for e in events]
    spent.sort(key=lambda entry: -entry[1])
    rest = spent[top:]
    return [*spent[:top], ("all the rest", sum(seconds for _, seconds, _ in rest), sum(times for *_, times in rest))]


def machine_facts(device: torch.device) -> dict[str, str]:
    """What a reader of the results must know about the machine: device, threads, versions."""
    name = f"{device} {platform.processor() or platform.machine()}"
    with contextlib.suppress(OSError, StopIteration):  # Linux knows the model of the CPU, Python does not
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = f"{device} {next(line.split(':', 1)[1].strip() for line in lines if line.startswith('model name'))}"
    on_cuda = device.type == "cuda"
    facts = {"device": torch.cuda.get_device_name(device) if on_cuda else name}
    # Times on a CPU depend on the number of threads.
    facts |= {"threads": str(torch.get_num_threads()), "torch": torch.__version__}
    facts |= {"CUDA": str(torch.version.cuda)} if on_cuda else {}
    for package in ("triton", "timm"):
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    return facts | {"veca": __version__}


def bench_memory(
    model: str, sizes: Sequence[int], cores: int = 64, device: str = "cpu", dtype: str = "float32"
) -> None:
    """Print the peak bytes of a forward pass of one image at each size, weights not counted.

    On CUDA the peak is the allocator's. On a CPU (Linux) it is the peak of the process's resident memory less what was
    resident before the pass, so every size runs in a new process.
    """
    chosen, first = choose_device(device), 0
    print(f"{model}, C = {cores}, batch 1, {dtype}, {device}, torch {torch.__version__}")
    for size in sizes:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            peak = process.submit(forward_peak_bytes, model, size, cores, chosen, getattr(torch, dtype)).result()
        first = first or peak
        print(f"{size:5} px  {peak / 2**20:8.0f} MiB  {peak / first:5.2f} ×", flush=True)


def forward_peak_bytes(model_name: str, size: int, cores: int, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes one image of `size` px needs above the weights, in this process, which should do nothing else."""
    model = create_model(model_name).to(device, dtype).eval()
    images = torch.randn(1, 3, size, size, device=device, dtype=dtype)
    with torch.inference_mode():
        model(torch.zeros_like(images[..., :32, :32]), cores)  # libraries load and thread pools start here
        peak = peak_device_bytes(lambda: model(images, cores), device)
        if peak is not None:
            return peak
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, which still holds the peak of loading
        before = process_bytes("VmRSS")
        model(images, cores)
        return process_bytes("VmHWM") - before
