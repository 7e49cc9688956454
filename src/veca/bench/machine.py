"""Measurements of the machine: copy rate, kernels of a call, peak memory of a forward pass, rate of training data."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.profiler import profile

from veca.checkpoint import create_model
from veca.data.index import ImageIndex
from veca.data.loader import Batch, load_crop, to_model_input, train_loader
from veca.data.sampler import TrainSampler, sample_transforms
from veca.data.transforms import augment_image
from veca.images import ImageError, open_image
from veca.utils.console import PlainConsole
from veca.utils.device import choose_device, peak_device_bytes, process_bytes
from veca.utils.timing import Call, best_seconds, synchronize
from veca.version import __version__


def empty_cache(device: torch.device) -> None:
    """Free unreferenced memory and return cached blocks to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def child_environment() -> dict[str, str]:
    """Environment of a process that is to import the same veca, and to print its lines at once."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}


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


def bench_data(
    sources: Sequence[str], resolution: int = 256, workers: int = 0, batch_size: int = 128, seconds: float = 5.0
) -> None:
    """Print how many images per second one process, then `workers` processes (0: one per CPU), get ready for training.

    Each measurement takes `seconds`. The rate per CPU core says how many cores a GPU needs.
    """
    torch.set_num_threads(1)
    cpus = len(os.sched_getaffinity(0))
    workers = workers or cpus
    images = ImageIndex.build(sources)
    indices = [i % len(images) for i in range(max(len(images), 100_000))]

    def crop(index: int, augment: bool = False) -> object:
        params = sample_transforms(0, [index], [0]).item()
        image = load_crop(images.read(index), params, resolution, 1.125, 2**26)
        return augment_image(image, params.op, params.strength) if augment else image

    stages: dict[str, Callable[[int], object]] = {
        "read": images.read,
        "read, decode in full": lambda index: open_image(images.read(index)),
        "read, decode, resize, crop, flip": crop,
        "the same and TrivialAugmentWide": partial(crop, augment=True),
    }
    console = PlainConsole()
    table = Table("one process", "images/s", title=f"{len(images):,} images at {resolution}")
    for name, stage in stages.items():
        calls_per_second(stage, indices, 0.2)  # warm up
        table.add_row(name, f"{calls_per_second(stage, indices, seconds):,.0f}")
    console.print(table)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table("augmented on", "images/s", "per CPU core", title=f"{workers} workers, batch size {batch_size}")
    for where in ("cpu", "gpu") if device == "cuda" else ("cpu",):
        sampler = TrainSampler(len(images), batch_size, lambda _: resolution)
        with train_loader(images, sampler, workers, where=where) as loader:
            batches = iter(loader)

            def take_batch(_: int, batches: Iterator[Batch] = batches) -> None:
                batch = next(batches)
                if device == "cuda":  # on a CPU normalisation would compete with the workers
                    to_model_input(batch, device)

            calls_per_second(take_batch, range(3), seconds)  # workers start, and fill their queue
            rate = calls_per_second(take_batch, itertools.repeat(0), 2 * seconds) * batch_size
        table.add_row(where, f"{rate:,.0f}", f"{rate / min(workers, cpus):,.0f}")
    console.print(table)
    console.print(" · ".join(f"{key} {value}" for key, value in machine_facts(torch.device(device)).items()))


def calls_per_second(call: Callable[[int], object], indices: Iterable[int], seconds: float) -> float:
    """Rate of `call(index)` over about `seconds`; images that cannot be decoded count as done."""
    count, start = 0, time.perf_counter()
    for index in indices:
        with contextlib.suppress(ImageError):
            call(index)
        count += 1
        if time.perf_counter() - start > seconds:
            break
    return count / (time.perf_counter() - start)
