"""What a teacher says of pictures, and how far a student is from it on those it does not train on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from veca.data.loader import Batch, DataError, Pictures, to_model_input, validation_batches
from veca.model import Veca
from veca.teachers import Standardized, Targets, Teacher
from veca.train.objective import Losses, distillation_losses
from veca.train.parallel import World, any_of, broadcast, share_again, sum_of
from veca.train.recipe import Recipe
from veca.train.tables import Grid

STATISTICS_PICTURES = 1024
"""At most so many make a teacher's statistics, where training pictures are among them."""
FEW_PICTURES = 256
"""Fewer for validation do not make them alone: a channel that happens to be silent in all would be divided by next to
nothing, and outweigh the others."""


class Lessons:
    """A teacher at work, in the precision of the recipe."""

    def __init__(self, teacher: Teacher | Standardized, recipe: Recipe, world: World, patch_size: int) -> None:
        self.teacher, self.recipe, self.world, self.patch_size = teacher, recipe, world, patch_size
        self.skipped: list[tuple[str, str]] = []
        """Pictures that could not be used so far, and why; whoever reports them empties the list."""

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16")

    def at_once(self, resolution: int) -> int:
        """Pictures the teacher takes at a time."""
        asked = self.recipe.teacher.micro_batch
        if not isinstance(asked, int):
            fitting = [count for size, count in asked.items() if size >= resolution]
            asked = max(fitting) if fitting else min(asked.values())
        return min(asked, self.recipe.batch)

    @torch.no_grad()
    def targets(self, images: Tensor, zoom: float = 1.0) -> Targets:
        grid = images.shape[-2] // self.patch_size, images.shape[-1] // self.patch_size
        together, count = self.at_once(images.shape[-1]), len(images)
        if self.recipe.compile:  # for one number of pictures: blank ones fill the last part
            images = F.pad(images, (0, 0) * 3 + (0, -count % together))
        with self.autocast():
            parts = [self.teacher(part, grid, zoom) for part in images.split(together)]
        return Targets(*(torch.cat(tensors)[:count] for tensors in zip(*parts, strict=True)))

    def take_statistics(self, pictures: Pictures, validation: Pictures | None) -> None:
        """Those a standardized teacher needs, alike in every process: over the validation pictures, and training ones
        where those are few.
        """
        if not isinstance(self.teacher, Standardized):
            return
        resolution = self.recipe.grid()[0][0]
        side = resolution // self.patch_size
        if self.world.first:
            together, enough = self.at_once(resolution), validation is not None and len(validation) >= FEW_PICTURES
            chosen = [validation] if enough else [validation, pictures]
            found = chain.from_iterable(self.centres(p, resolution, together, alone=True) for p in chosen if p)
            self.teacher.fit(found if enough else _some(found, STATISTICS_PICTURES), (side, side))
        broadcast([self.teacher.means, self.teacher.deviations], self.world)

    def centres(self, pictures: Pictures, resolution: int, batch: int, alone: bool = False) -> Iterator[Tensor]:
        """The centre of every picture once, dealt to the processes, or all of them for this one `alone`."""
        data = self.recipe.data
        rank, size = (0, 1) if alone else (self.world.rank, self.world.size)
        found = validation_batches(
            pictures, resolution, batch, rank, size, data.workers, data.short_side, data.max_pixels
        )
        with found as batches:
            for one in cast(Iterator[Batch], batches):
                self.skipped += one.skipped
                if len(one.images):
                    yield to_model_input(one, self.world.device)


@torch.no_grad()
def validate(model: Veca, lessons: Lessons, pictures: Pictures) -> Grid:
    """Losses on the pictures at each resolution and budget of the recipe's grid."""
    recipe, world = lessons.recipe, lessons.world
    resolutions, budgets = recipe.grid()
    weights = recipe.objective.dense_weight, recipe.objective.mse_weight
    found: dict[tuple[int, int], dict[str, float]] = {}
    model.eval()
    try:
        for resolution in resolutions:
            sums = torch.zeros(len(budgets), len(Losses._fields), device=world.device, dtype=torch.float64)
            count = 0
            batches = lessons.centres(pictures, resolution, recipe.validation.batch or recipe.batch)
            for images, number in _in_step(batches, resolution, world):
                targets = lessons.targets(images)
                for row, budget in zip(sums, budgets, strict=True):
                    with lessons.autocast():
                        out = model(images, budget)
                    losses = distillation_losses(out.cls, out.patches, *targets, *weights)
                    row += number * torch.stack(list(losses)).double()
                count += number
            *totals, counted = sum_of([*sums.flatten().tolist(), float(count)], world)
            if not counted:  # a mean of nothing would be the best there is
                why = "".join(f": {name}, {reason}" for name, reason in lessons.skipped[-1:])
                raise DataError(f"data.validation: none of its {len(pictures):,} pictures can be used{why}")
            means = torch.tensor(totals, dtype=torch.float64).view(sums.shape) / counted
            for budget, row in zip(budgets, means.tolist(), strict=True):
                found[resolution, budget] = dict(zip(Losses._fields, row, strict=True))
    finally:
        share_again(model)
        model.train()
    return found


def _in_step(batches: Iterator[Tensor], resolution: int, world: World) -> Iterator[tuple[Tensor, int]]:
    """Batches, and how many pictures of each count: as many in every process, since shared-out parameters are put
    together by all of them. A process that has none left sees a blank one.
    """
    blank = torch.zeros(1, 3, resolution, resolution, device=world.device)
    while True:
        images = next(batches, None)
        if not any_of(images is not None, world):
            return
        yield (blank, 0) if images is None else (images, len(images))


def _some(batches: Iterator[Tensor], most: int) -> Iterator[Tensor]:
    seen = 0
    for images in batches:
        yield images
        seen += len(images)
        if seen >= most:
            return
