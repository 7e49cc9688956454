"""How fast pictures come: `python -m veca.bench.data SOURCE…`.

One process does each part of the work by itself, then worker processes do all of it. The rate for a core is what
tells how many cores a GPU needs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import torch
import typer
from rich.table import Table

from veca.bench.machine import machine_facts
from veca.data.index import ImageIndex
from veca.data.loader import Batch, load_crop, to_model_input, train_loader
from veca.data.sampler import TrainSampler, sample_transforms
from veca.data.transforms import augment_image
from veca.images import ImageError, open_image
from veca.utils.console import PlainConsole

_PIXELS = 2**26


def rate(work: Callable[[int], object], numbers: Iterable[int], seconds: float) -> float:
    """Calls a second; pictures that cannot be used count as done."""
    count, start = 0, time.perf_counter()
    for number in numbers:
        with contextlib.suppress(ImageError):
            work(number)
        count += 1
        if time.perf_counter() - start > seconds:
            break
    return count / (time.perf_counter() - start)


def run(
    sources: Annotated[list[str], typer.Argument(help="Folders, globs, tar shards, addresses, hf: datasets.")],
    resolution: Annotated[int, typer.Option(min=16)] = 256,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: as many as there are cores.")] = 0,
    batch: Annotated[int, typer.Option(min=1)] = 128,
    seconds: Annotated[float, typer.Option(min=0.1, help="For each measurement.")] = 5.0,
) -> None:
    """Measure how many pictures a second are read, decoded, cropped and augmented."""
    torch.set_num_threads(1)
    workers = workers or len(os.sched_getaffinity(0))
    pictures = ImageIndex.build(sources)
    numbers = [i % len(pictures) for i in range(max(len(pictures), 100_000))]

    def seen(number: int) -> object:
        return load_crop(pictures.read(number), sample_transforms(0, [number], [0]).item(), resolution, 1.125, _PIXELS)

    def augmented(number: int) -> object:
        view = sample_transforms(0, [number], [0]).item()
        image = load_crop(pictures.read(number), view, resolution, 1.125, _PIXELS)
        return augment_image(image, view.op, view.strength)

    stages: dict[str, Callable[[int], object]] = {
        "read": pictures.read,
        "read, decode all of it": lambda number: open_image(pictures.read(number)),
        "read, decode, resize, crop, flip": seen,
        "the same and TrivialAugmentWide": augmented,
    }
    table = Table("one process", "images/s", title=f"{len(pictures):,} pictures at {resolution}")
    for name, work in stages.items():
        rate(work, numbers, 0.2)
        table.add_row(name, f"{rate(work, numbers, seconds):,.0f}")
    console = PlainConsole()
    console.print(table)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table("augmented on", "images/s", "for a core", title=f"{workers} workers, batch {batch}")
    for where in ("cpu", "gpu") if device == "cuda" else ("cpu",):
        sampler = TrainSampler(len(pictures), batch, lambda _: resolution)
        with train_loader(pictures, sampler, workers, where=where) as stream:
            steps = iter(stream)

            def take(_: int, steps: Iterator[Batch] = steps) -> None:
                batch = next(steps)
                if device == "cuda":  # else the normalisation would take the time of a worker
                    to_model_input(batch, device)

            rate(take, range(3), seconds)  # the first come slowly, the next were made while they did
            found = rate(take, itertools.repeat(0), 2 * seconds) * batch
        cores = min(workers, len(os.sched_getaffinity(0)))
        table.add_row(where, f"{found:,.0f}", f"{found / cores:,.0f}")
    console.print(table)
    console.print(" · ".join(f"{key} {value}" for key, value in machine_facts(torch.device(device)).items()))


if __name__ == "__main__":
    typer.run(run)
