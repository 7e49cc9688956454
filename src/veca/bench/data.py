"""Throughput of the training data: reading, decoding, cropping and augmenting images."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from rich.table import Table

from veca.bench.machine import machine_facts
from veca.data.index import ImageIndex
from veca.data.loader import Batch, load_crop, to_model_input, train_loader
from veca.data.sampler import TrainSampler, sample_transforms
from veca.data.transforms import augment_image
from veca.images import ImageError, open_image
from veca.utils.console import PlainConsole

_MAX_PIXELS = 2**26


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
        image = load_crop(images.read(index), params, resolution, 1.125, _MAX_PIXELS)
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
