"""Rate of distillation steps, what they wait for, and the kernels they launch; nothing is saved.

`python tests/tools/profile_distill.py recipes/quick.yaml --set data.train=images.tar --set data.validation=others.tar`

With `--settings 64:1,64:0.25` steps run at these budgets and widths, in turns, instead of those drawn.
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
from veca.train.recipe import Setting, load_recipe
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
    parser.add_argument("--settings", type=parse_settings, default=[None], metavar="CORES:WIDTH,…")
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
            for turn, count in enumerate((arguments.warmup, *(arguments.steps,) * 3)):
                for setting in arguments.settings:
                    time_steps(run, passes, waiting, count, "timed" if turn else "warm-up", setting)
            for setting in arguments.settings if run.device.type == "cuda" else ():
                fix_setting(run, setting)
                show_kernels(run, passes, arguments.rows)


def parse_settings(text: str) -> list[Setting | None]:
    pairs = (part.partition(":") for part in text.split(","))
    return [(int(cores), float(width or 1)) for cores, _, width in pairs]


def fix_setting(run: Distillation, setting: Setting | None) -> None:
    """Let steps run at a setting; None: at those that are drawn."""
    if setting is not None:
        run.settings = {setting: 1.0}


def time_steps(
    run: Distillation, passes: PassLoader, waiting: Waiting, count: int, label: str, setting: Setting | None
) -> None:
    fix_setting(run, setting)
    label += f" at {setting}" if setting else ""
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
    setting = next(iter(run.settings)) if len(run.settings) == 1 else "as drawn"
    print(f"{setting}: GPU busy {busy / steps / 1e3:.1f} ms a step, {len(events) // steps} launches")
    for name, total in times.most_common(rows):
        print(f"{total / steps / 1e3:8.2f} ms {launches[name] / steps:7.1f} × {name[:120]}")


if __name__ == "__main__":
    main()
