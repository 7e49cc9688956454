"""The teacher at work (targets, statistics) and validation of the student on held-out images."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from veca.data.index import DataError, ImageIndex
from veca.data.loader import to_model_input, validation_loader
from veca.model import Veca
from veca.teachers import Standardized, Targets, Teacher
from veca.train.logger import Grid
from veca.train.objective import Losses, distillation_losses
from veca.train.parallel import World, any_of, broadcast, sum_of
from veca.train.recipe import Recipe

STATISTICS_IMAGES = 1024
"""Number of images for a teacher's statistics, where training images are among them."""
MIN_VALIDATION_IMAGES = 256
"""With fewer, statistics are not taken from validation images alone: a channel that happens to be near zero in all of
them would be divided by next to nothing, and outweigh the others."""


class TeacherRunner:
    """Runs the teacher in the precision and micro-batches of the recipe."""

    def __init__(self, teacher: Teacher | Standardized, recipe: Recipe, world: World, patch_size: int) -> None:
        self.teacher, self.recipe, self.world, self.patch_size = teacher, recipe, world, patch_size
        self.pass_batch = recipe.pass_batch(world.size)
        self.unreadable: list[tuple[str, str]] = []
        """Name and reason of images that could not be used, until they are logged."""

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16")

    def micro_batch(self, resolution: int) -> int:
        """Images per forward pass of the teacher."""
        setting = self.recipe.teacher.micro_batch
        if not isinstance(setting, int):
            fitting = [count for size, count in setting.items() if size >= resolution]
            setting = max(fitting, default=min(setting.values()))
        return min(setting, self.pass_batch)

    @torch.no_grad()
    def targets(self, images: Tensor, zoom: float = 1.0) -> Targets:
        """The teacher's features of normalised images, its map on the student's grid."""
        grid = images.shape[-2] // self.patch_size, images.shape[-1] // self.patch_size
        size, count = self.micro_batch(images.shape[-1]), len(images)
        if self.recipe.compile:  # compiled for one batch size: blank images fill the last part
            images = F.pad(images, (0, 0) * 3 + (0, -count % size))
        with self.autocast():
            parts = [self.teacher(part, grid, zoom) for part in images.split(size)]
        return Targets(*(torch.cat(tensors)[:count] for tensors in zip(*parts, strict=True)))

    def fit_statistics(self, images: ImageIndex, validation: ImageIndex | None) -> None:
        """Fit the statistics of a standardized teacher, the same in every process: over the validation images, and
        training images where those are few.
        """
        if not isinstance(self.teacher, Standardized):
            return
        resolution = self.recipe.grid()[0][0]
        side = resolution // self.patch_size
        if self.world.first:  # one process fits, all get the same numbers
            size, enough = self.micro_batch(resolution), len(validation or ()) >= MIN_VALIDATION_IMAGES
            sources = [validation] if enough else [validation, images]
            batches = chain.from_iterable(self.centres(s, resolution, size, alone=True) for s in sources if s)
            self.teacher.fit(batches if enough else _first_images(batches, STATISTICS_IMAGES), (side, side))
        broadcast([self.teacher.means, self.teacher.deviations], self.world)

    def centres(self, images: ImageIndex, resolution: int, batch: int, alone: bool = False) -> Iterator[Tensor]:
        """The centre crop of every image once, distributed over the processes, or all of them for this one `alone`."""
        data = self.recipe.data
        rank, size = (0, 1) if alone else (self.world.rank, self.world.size)
        options = data.workers, data.short_side, data.max_pixels
        with validation_loader(images, resolution, batch, rank, size, *options) as batches:
            for each in batches:
                self.unreadable += each.skipped
                if len(each.images):
                    yield to_model_input(each, self.world.device)


@torch.no_grad()
def validate(model: Veca, runner: TeacherRunner, images: ImageIndex) -> Grid:
    """Mean losses on the images at each resolution and budget of the recipe's grid."""
    recipe, world = runner.recipe, runner.world
    resolutions, budgets = recipe.grid()
    weights = recipe.objective.dense_weight, recipe.objective.mse_weight
    grid: dict[tuple[int, int], dict[str, float]] = {}
    model.eval()
    try:
        for resolution in resolutions:
            sums = torch.zeros(len(budgets), len(Losses._fields), device=world.device, dtype=torch.float64)
            count = 0
            batches = runner.centres(images, resolution, recipe.validation.batch or runner.pass_batch)
            for inputs, number in _synchronized(batches, resolution, world):
                targets = runner.targets(inputs)
                for row, budget in zip(sums, budgets, strict=True):
                    with runner.autocast():
                        out = model(inputs, budget)
                    losses = distillation_losses(out.cls, out.patches, *targets, *weights)
                    row += number * torch.stack(list(losses)).double()
                count += number
            # Summed in float64 over all processes, so that their number does not show in the mean.
            *totals, counted = sum_of([*sums.flatten().tolist(), float(count)], world)
            if not counted:  # the mean of nothing would count as the best
                why = "".join(f": {name}, {reason}" for name, reason in runner.unreadable[-1:])
                raise DataError(f"data.validation: none of its {len(images):,} pictures can be used{why}")
            means = torch.tensor(totals, dtype=torch.float64).view(sums.shape) / counted
            for budget, row in zip(budgets, means.tolist(), strict=True):
                grid[resolution, budget] = dict(zip(Losses._fields, row, strict=True))
    finally:
        if isinstance(model, FSDPModule):  # a forward pass without a backward one leaves the parameters gathered
            model.reshard()
        model.train()
    return grid


def _synchronized(batches: Iterator[Tensor], resolution: int, world: World) -> Iterator[tuple[Tensor, int]]:
    """Batches, and how many images of each count: the same number of batches in every process, since gathering sharded
    parameters takes all of them. A process that has no images left gets a blank one, which does not count.
    """
    blank = torch.zeros(1, 3, resolution, resolution, device=world.device)
    while True:
        images = next(batches, None)
        if not any_of(images is not None, world):
            return
        yield (blank, 0) if images is None else (images, len(images))


def _first_images(batches: Iterator[Tensor], count: int) -> Iterator[Tensor]:
    seen = 0
    for images in batches:
        yield images
        seen += len(images)
        if seen >= count:
            return
