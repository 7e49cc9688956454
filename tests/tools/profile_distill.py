"""Rate of distillation steps, what they wait for, and the kernels they launch; nothing is saved.

`python tests/tools/profile_distill.py recipes/quick.yaml --set data.train=images.tar --set data.validation=others.tar`
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from veca.optimized import RECOMPILE_LIMIT
from veca.train import parallel
from veca.train.distill import Distillation
from veca.train.objective import PassLoader
from veca.train.recipe import load_recipe
from veca.utils.timing import synchronize


class Waiting(AbstractContextManager["Waiting"]):
    """Batches, and the seconds that were spent waiting for them."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.batches, self.seconds = loader, iter(loader), 0.0

    def __exit__(self, *error: Any) -> None:
        self.loader.__exit__(*error)

    def __iter__(self) -> Waiting:
        return self

    def __next__(self) -> Any:
        began = time.perf_counter()
        batch = next(self.batches)
        self.seconds += time.perf_counter() - began
        return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--warmup", type=int, default=40, help="steps before the first that is timed")
    parser.add_argument("--steps", type=int, default=40, help="timed steps in each of three rounds")
    parser.add_argument("--rows", type=int, default=30, help="kernels to show")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe, arguments.changes)
    with (
        tempfile.TemporaryDirectory() as folder,
        parallel.processes("auto") as world,
        torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT),
    ):
        run = Distillation(recipe, Path(folder), world)
        with run.batches() as batches:
            batches.batches = waiting = Waiting(batches.batches)
            passes = iter(batches)
            time_steps(run, passes, waiting, arguments.warmup, "warm-up")
            for _ in range(3):
                time_steps(run, passes, waiting, arguments.steps, "timed")
            if run.device.type == "cuda":
                show_kernels(run, passes, arguments.rows)


def time_steps(run: Distillation, passes: PassLoader, waiting: Waiting, count: int, label: str) -> None:
    waiting.seconds, began = 0.0, time.perf_counter()
    for _ in range(count):
        run.train_step(passes)
    synchronize(run.device)
    seconds = time.perf_counter() - began
    rate = run.recipe.batch * count / seconds
    each, waited = 1e3 * seconds / count, 1e3 * waiting.seconds / count
    print(f"{label}: {rate:,.0f} images/s, {each:.1f} ms a step, {waited:.1f} ms of it waiting for images", flush=True)


def show_kernels(run: Distillation, passes: PassLoader, rows: int, steps: int = 3) -> None:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run.train_step(passes)
        synchronize(run.device)
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy, end, times, launches = 0.0, 0.0, Counter[str](), Counter[str]()
    for event in sorted(events, key=lambda event: event.time_range.start):
        busy += max(0.0, event.time_range.end - max(event.time_range.start, end))
        end = max(end, event.time_range.end)
        times[event.name] += event.time_range.elapsed_us()
        launches[event.name] += 1
    print(f"GPU busy {busy / steps / 1e3:.1f} ms a step, {len(events) // steps} launches")
    for name, total in times.most_common(rows):
        print(f"{total / steps / 1e3:8.2f} ms {launches[name] / steps:7.1f} × {name[:120]}")


if __name__ == "__main__":
    main()
