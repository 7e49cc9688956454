"""Train variants of one recipe in turn, each for the same time; images and teacher maps are made once for all.

    python tools/ablate.py RECIPE.yaml --out OUT --minutes 3 --variant control --variant 'larger batch=1024'
    python tools/ablate.py --out OUT  # the table alone: validation losses, and scores of probes in OUT/results

A variant is a name and its changes, as `veca distill --set` takes them; `--set` changes all of them. Each is a run like
any other, in OUT/NAME; after an interruption the same command resumes. With `--minutes` a run has as many steps as fit
in that time of training, by its own rate in its first steps, compilation left out; without it those of the recipe.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from veca.data.device_cache import DeviceImageCache
from veca.errors import ArgumentError, VecaError
from veca.optimized import RECOMPILE_LIMIT
from veca.probe.results import metric_text, read_results
from veca.teachers import Standardized, members
from veca.train import parallel
from veca.train.checkpoints import list_checkpoints
from veca.train.distill import Distillation
from veca.train.logger import read_object, read_table
from veca.train.objective import TeacherMaps
from veca.train.parallel import World
from veca.train.recipe import Recipe, load_recipe
from veca.utils.files import atomic_path

MEASURED_LOGS = 3
"""Lines of the log whose rates decide the length of a run, after the first, most of whose steps compile."""


class Shared:
    """The last images that were decoded, and the teacher's last maps of them: no others, for they fill the device."""

    def __init__(self) -> None:
        self._images: tuple[Any, DeviceImageCache] | None = None
        self._maps: tuple[Any, TeacherMaps] | None = None

    def images(self, key: Any, make: Callable[[], DeviceImageCache]) -> DeviceImageCache:
        if self._images is None or self._images[0] != key:
            self._images = self._maps = None  # before others take their place
            self._images = key, make()
        return self._images[1]

    def maps(self, key: Any, make: Callable[[], TeacherMaps]) -> TeacherMaps:
        """Those of the last images."""
        if self._maps is None or self._maps[0] != key:
            self._maps = None
            self._maps = key, make()
        return self._maps[1]


class Variant(Distillation):
    """A run that shares what it can with those before it. With `minutes`, its length is not known from the start."""

    def __init__(self, recipe: Recipe, folder: Path, world: World, shared: Shared, minutes: float | None) -> None:
        self.shared, self.minutes, self.rates = shared, minutes, list[float]()
        if minutes is not None and list_checkpoints(folder / "checkpoints"):
            schedule = load_recipe(folder / "recipe.yaml").schedule
            if schedule != recipe.schedule:  # the length was decided before the interruption
                recipe, self.minutes = dataclasses.replace(recipe, schedule=schedule), None
        super().__init__(recipe, folder, world, say=print)
        least = (MEASURED_LOGS + 1) * self.log_every
        if self.minutes is not None and not least <= self.warmup:
            rule = f"at least {least} with --minutes, four times log_every: the length of a run is decided meanwhile"
            raise ArgumentError(f"schedule.warmup={self.warmup}: must be {rule}")

    def decode_images(self, side: int) -> DeviceImageCache:
        data, make = self.recipe.data, super().decode_images
        key = self.images.fingerprint, side, data.max_pixels
        return self.shared.images(key, lambda: make(side))

    def compute_maps(self, cache: DeviceImageCache, precision: str) -> TeacherMaps:
        recipe, make = self.recipe, super().compute_maps
        teacher = dataclasses.replace(recipe.teacher, objective=None)
        fitted = (each for each in members(self.teacher) if isinstance(each, Standardized))
        statistics = [(each.means.tolist(), each.deviations.tolist()) for each in fitted]
        key = teacher, statistics, recipe.data.short_side, recipe.precision, self.runner.patch_size
        return self.shared.maps(key, lambda: make(cache, precision))

    def _log_metrics(self) -> None:
        super()._log_metrics()
        if self.minutes is None or self.step == self.log_every:
            return
        if math.isfinite(self.meter.rate):  # not while each step is the first of its kind
            self.rates.append(self.meter.rate)
        # After the warm-up the rate of learning depends on the length.
        if len(self.rates) < MEASURED_LOGS and self.step + self.log_every <= self.warmup:
            return
        if not self.rates:
            raise ArgumentError(f"schedule.warmup={self.warmup}: too short to measure the rate in it, for --minutes")
        self.steps = max(self.warmup + 1, round(60 * self.minutes * fmean(self.rates) / self.recipe.batch))
        schedule = dataclasses.replace(self.recipe.schedule, epochs=None, warmup=self.warmup, steps=self.steps)
        self.recipe = self.runner.recipe = dataclasses.replace(self.recipe, schedule=schedule)
        with atomic_path(self.folder / "recipe.yaml") as part:
            part.write_text(self.recipe.to_yaml(), encoding="utf-8")
        self.event(f"length: {self.steps:,} steps, {self.minutes:g} minutes at {fmean(self.rates):,.0f} images/s")
        self.minutes = None
        if self.progress:
            self.progress.total = self.steps


def parse_variant(text: str) -> tuple[str, list[str]]:
    """Name and changes of a variant.

    >>> parse_variant("logits objective.logits_weight=1 batch=64")
    ('logits', ['objective.logits_weight=1', 'batch=64'])
    """
    name, *changes = text.split() or [""]
    if "=" in name or not name or Path(name).name != name:
        raise ArgumentError(f"--variant={text!r}: must be a name, as for a folder, and then changes KEY=VALUE")
    return name, changes


def train(recipes: dict[str, Recipe], out: Path, device: str, minutes: float | None) -> None:
    """Train all variants; those that are finished are checked to be of the same recipe."""
    shared = Shared()
    with parallel.processes(device) as world, torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        if world.size > 1 and minutes is not None:
            raise ArgumentError("--minutes: for one process; several would decide on different lengths")
        for name, recipe in recipes.items():
            print(f"{name}:")
            with parallel.run_folder(out / name, world):
                Variant(recipe, out / name, world, shared, minutes).run()
            gc.collect()  # graphs and hooks of the run refer to each other
            if world.device.type == "cuda":
                torch.cuda.empty_cache()


def table_rows(out: Path, variants: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """A row for each finished variant: how long it trained, its validation losses, and its scores in OUT/results."""
    results, _ = read_results(out / "results") if (out / "results").is_dir() else ([], [])
    names = variants or sorted(path.parent.name for path in out.glob(f"*/{Variant.result_file}"))
    for name in names:
        facts = read_object(out / name / Variant.result_file)
        if not facts:
            continue
        seconds, images = facts["seconds"], facts["images"]
        row = {"variant": name, "steps": f"{facts['total_steps']:,}", "images": f"{images:,}"}
        row["minutes"] = f"{seconds / 60:.1f}"
        losses = read_table(out / name / "validation.csv")
        for line in (line for line in losses if line["step"] == losses[-1]["step"]):
            width = f", {line['width']:g}" if line.get("width", 1) != 1 else ""
            row[f"loss, {line['resolution']:.0f} px, {line['budget']:.0f}{width}"] = f"{line['total']:.3f}"
        for result in results:
            if Path(result.model).name == name:
                place = f"{result.resolution}, {result.cores}, seed {result.seed}"
                column = f"{result.dataset} {result.task}, {place}"
                row[column] = metric_text(result.metric, result.value)
        yield row


def write_table(out: Path, variants: Sequence[str] = ()) -> None:
    """Print the table as Markdown, and write it to OUT/variants.csv."""
    rows = list(table_rows(out, variants))
    if not rows:
        raise ArgumentError(f"--out={out}: no run in it is finished; name a recipe and variants to train")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with atomic_path(out / "variants.csv") as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    lines = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", help="without one, only the table is made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variant", action="append", default=[], metavar="'NAME [KEY=VALUE …]'")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all variants")
    parser.add_argument("--minutes", type=float, help="of training, for each")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    try:
        variants = dict(map(parse_variant, given.variant))
        if len(variants) < len(given.variant):
            raise ArgumentError(f"--variant={given.variant}: must have names that differ")
        if given.recipe:
            if given.minutes is not None and not 0 < given.minutes < math.inf:
                raise ArgumentError(f"--minutes={given.minutes:g}: must be above 0")
            if not variants:
                raise ArgumentError("--variant: none is given; 'control', a name alone, is the recipe as it is")
            # An impossible one is refused before the first is trained.
            recipes = {name: load_recipe(given.recipe, [*given.set, *changes]) for name, changes in variants.items()}
            train(recipes, given.out, given.device, given.minutes)
        if not given.out.is_dir():
            raise ArgumentError(f"--out={given.out}: no such folder, and no recipe to train")
        write_table(given.out, list(variants))
    except VecaError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
