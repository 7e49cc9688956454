"""What the student learns: the teacher's targets, the losses between features, and validation by them.

Shapes: N images or patches, B images in a batch, D width of the features, G rows and columns of a crop's targets.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from veca.data.device_cache import DeviceImageCache
from veca.data.index import DataError, ImageIndex
from veca.data.loader import Batch, to_model_groups, to_model_input, validation_loader
from veca.data.transforms import PairMixer, bucket_grids
from veca.images import normalize
from veca.model import Veca
from veca.optimized import Graph
from veca.teachers import AnyTeacher, Standardized, Targets, Teacher, members
from veca.train.logger import Grid
from veca.train.parallel import World, all_reduced, broadcast, gathered
from veca.train.recipe import ObjectiveRecipe, Recipe, RecipeError
from veca.utils.console import bar
from veca.utils.device import on_stream, side_stream
from veca.utils.text import excerpt

STATISTICS_IMAGES = 1024
"""Number of images for a teacher's statistics, where training images are among them."""
MIN_VALIDATION_IMAGES = 256
"""With fewer, statistics are not taken from validation images alone: a channel that happens to be near zero in all of
them would be divided by next to nothing, and outweigh the others."""
_CALLS_BEFORE_GRAPH = 2
"""Calls of the teacher with a shape before it is recorded as a CUDA graph: they compile it and its kernels."""


class TeacherRunner:
    """Runs the teacher in the precision and micro-batches of the recipe."""

    def __init__(self, teacher: AnyTeacher, recipe: Recipe, world: World, patch_size: int) -> None:
        self.teacher, self.recipe, self.world, self.patch_size = teacher, recipe, world, patch_size
        self.pass_batch = recipe.pass_batch(world.size)
        self.unreadable: list[tuple[str, str]] = []
        """Name and reason of images that could not be used, until they are logged."""

        # Its own stream, on which it can be ahead of the student
        self.stream = side_stream(world.device, "teacher") if world.device.type == "cuda" else None
        self._graphs: dict[Any, Graph | None] = {}
        self._calls = Counter[Any]()

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
        if not self.recipe.compile:
            with self.autocast():
                parts = [self.teacher(part, grid, zoom) for part in images.split(size)]
            return Targets(*map(torch.cat, zip(*parts, strict=True)))
        # Memory of the caller's stream, which waits for the teacher's: it can be used again at once when it is freed.
        callers_stream: Any = nullcontext()
        if self.stream is not None:
            callers_stream = torch.cuda.stream(torch.cuda.current_stream(self.stream.device))
        with on_stream(self.stream), self.autocast():
            if count % size:  # compiled for one batch size
                images = F.pad(images, (0, 0) * 3 + (0, -count % size))
            out: list[Tensor] = []
            for start in range(0, len(images), size):
                part = self._run(images[start : start + size], grid, zoom)
                if not out:
                    with callers_stream:
                        out = [tensor.new_empty(len(images), *tensor.shape[1:]) for tensor in part]
                for whole, tensor in zip(out, part, strict=True):
                    whole[start : start + size] = tensor
        return Targets(*(whole[:count] for whole in out))

    def check_rectangles(self, aspect: tuple[float, float]) -> None:
        """Raise an error unless the teacher takes images of the lowest and the highest of these aspect ratios."""
        grids = bucket_grids(self.recipe.grid()[0][0] // self.patch_size, aspect)
        for height, width in (
            (rows * self.patch_size, columns * self.patch_size) for rows, columns in (grids[0], grids[-1])
        ):
            try:
                self.targets(torch.zeros(1, 3, height, width, device=self.world.device))
            except (AssertionError, RuntimeError, ValueError) as error:
                problem = f"{self.teacher.name} cannot take an image of {height}×{width}: {excerpt(str(error))}"
                raise RecipeError(f"data.aspect={list(aspect)}: {problem}. Set it to null, or take another") from error

    def _run(self, images: Tensor, grid: tuple[int, int], zoom: float) -> Targets:
        """One pass of the compiled teacher, on a GPU by a CUDA graph: small kernels take longer to launch than to run.

        The next call may overwrite the result.
        """
        key = images.shape, grid, zoom
        self._calls[key] += 1
        if not images.is_cuda or self._calls[key] <= _CALLS_BEFORE_GRAPH:
            return self.teacher(images, grid, zoom)
        if key not in self._graphs:
            neighbour = next(filter(None, self._graphs.values()), None)
            try:
                self._graphs[key] = Graph(lambda x: self.teacher(x, grid, zoom), images.clone(), neighbour)
            except RuntimeError:  # it waits for the device, or memory is short
                self._graphs[key] = None
        graph = self._graphs[key]
        if graph is None:
            return self.teacher(images, grid, zoom)
        graph.inputs.copy_(images)
        return graph.replay()

    def fit_statistics(self, images: ImageIndex, validation: ImageIndex | None) -> None:
        """Fit the statistics of standardized teachers, the same in every process: over the validation images, and
        training images where those are few.
        """
        resolution = self.recipe.grid()[0][0]
        enough = len(validation or ()) >= MIN_VALIDATION_IMAGES

        def batches() -> Iterator[Tensor]:
            left = math.inf if enough else STATISTICS_IMAGES
            for source in filter(None, [validation] if enough else [validation, images]):
                for batch in self.centres(source, resolution, self.micro_batch(resolution), alone=True):
                    yield batch
                    left -= len(batch)
                    if left <= 0:
                        return

        for teacher in (each for each in members(self.teacher) if isinstance(each, Standardized)):
            if self.world.first:  # one process fits, all get the same numbers
                teacher.fit(batches(), (resolution // self.patch_size,) * 2)
            broadcast([teacher.means, teacher.deviations], self.world)

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


def _keep_for(stream: torch.cuda.Stream, *tensors: Tensor) -> None:
    """Have the memory of tensors, made on another stream, not used again before this stream has read it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


class Pass(NamedTuple):
    """What a forward pass of training takes."""

    images: Tensor | list[Tensor]
    """Where shapes differ, those of each shape."""
    targets: Targets | list[Targets]
    skipped: list[tuple[str, str]]
    """Name and reason of images that could not be used."""


class PassLoader(AbstractContextManager["PassLoader"]):
    """Batches as passes: on the device, normalised, with the teacher's targets.

    On a GPU passes can be made ahead, on the teacher's stream, beside the work of the student.
    """

    def __init__(self, batches: Iterable[Batch], runner: TeacherRunner, mixer: PairMixer | None = None) -> None:
        self.batches, self.runner, self.mixer = batches, runner, mixer
        self._ahead, self._ends = deque[tuple[Pass, torch.cuda.Event | None]](), deque[torch.cuda.Event]()
        self._iterator: Iterator[Batch] = iter(())

    def __exit__(self, *error: Any) -> None:
        if isinstance(self.batches, AbstractContextManager):
            self.batches.__exit__(*error)

    def __iter__(self) -> Self:
        self._ahead.clear()
        self._iterator = iter(self.batches)
        if self.runner.stream is not None:  # what the batches are made of may be on its way to the device
            self.runner.stream.wait_stream(torch.cuda.current_stream(self.runner.stream.device))
        return self

    def __next__(self) -> Pass:
        if not self._ahead:
            self._make()
        current, ready = self._ahead.popleft()
        if ready is not None and self.runner.stream is not None:
            student = torch.cuda.current_stream(self.runner.stream.device)
            student.wait_event(ready)
            _keep_for(student, *tree_leaves(current[:2]))
        return current

    def prefetch(self) -> None:
        """On a GPU, begin the next pass: the teacher runs where the student and the optimizers leave room."""
        if self.runner.stream is None:
            return
        # The host is at most two passes ahead of the GPU: passes hold memory.
        self._ends.append(torch.cuda.current_stream(self.runner.stream.device).record_event())
        if len(self._ends) > 2:
            self._ends.popleft().synchronize()
        self._make()

    def _make(self) -> None:
        stream = self.runner.stream
        if stream is None:
            self._ahead.append((self._ask_teacher(next(self._iterator)), None))
            return
        with torch.cuda.stream(stream):
            batch = next(self._iterator)
            _keep_for(stream, batch.images, *batch.groups)
            self._ahead.append((self._ask_teacher(batch), stream.record_event()))

    def _ask_teacher(self, batch: Batch) -> Pass:
        device = self.runner.world.device
        if batch.groups:
            groups = to_model_groups(batch, device)
            return Pass(groups, [self.runner.targets(images) for images in groups], batch.skipped)
        images = to_model_input(batch, device)
        images = images if self.mixer is None else self.mixer(images)
        return Pass(images, self.runner.targets(images) if batch.targets is None else batch.targets, batch.skipped)


class TeacherMaps:
    """Teacher maps (N, cells, cells, D) of all cached images, on their device.

    A crop is a square of cells, whatever resolution the student sees it at: its map is resized. Its global feature is
    the mean of its map if the teacher pools (of the map of its second pass, where it has one), and that of the whole
    image if not.
    """

    def __init__(self, cache: DeviceImageCache, runner: TeacherRunner, dtype: torch.dtype, progress: bool) -> None:
        images, teacher = cache.images, runner.teacher
        count, self.patch, width = len(images), runner.patch_size, teacher.width
        self.cells = cache.side // self.patch
        # Side of the whole over that of a crop.
        zoom = self.cells / max(1, round(self.cells / runner.recipe.data.short_side))
        own: Any = teacher.teacher if isinstance(teacher, Standardized) else teacher
        self.means, self.deviations = images.new_zeros(2, 1).float(), images.new_ones(2, 1).float()
        if isinstance(teacher, Standardized):
            self.means, self.deviations = teacher.means, teacher.deviations
        self.pooled = own.pooled
        # Maps of the second pass, not standardized: zeros, most of a CNN's map, are exact in float8, so means are not
        # biased by rounding.
        side = max(1, round(own.glance * zoom / own.stride)) if own.pooled and own.glance else 0
        self.maps = torch.empty(count, self.cells, self.cells, width, dtype=dtype, device=images.device)
        self.glimpses = torch.empty(count, side, side, width, dtype=dtype, device=images.device) if side else None
        self.cls = torch.empty(count, width, dtype=torch.bfloat16, device=images.device)
        batch_size, limit = runner.micro_batch(cache.side), torch.finfo(dtype).max  # float8 overflows to NaN: clamp
        with bar("asking the teacher", count, "images", progress) as advance:
            for start in range(0, count, batch_size):
                part = slice(start, start + batch_size)
                pixels = normalize(images[part])
                targets = runner.targets(pixels, zoom=zoom)
                self.maps[part] = targets.patches.unflatten(1, (self.cells, -1)).clamp(-limit, limit).to(dtype)
                self.cls[part] = targets.cls
                if self.glimpses is not None:
                    with runner.autocast():
                        glimpse = own.glimpse(pixels, zoom)
                    self.glimpses[part] = glimpse.permute(0, 2, 3, 1).clamp(-limit, limit).to(dtype)
                advance(len(pixels))

    def crop(self, index: Tensor, rows: Tensor, columns: Tensor) -> Targets:
        """Return targets (B, G · G, D) of crops of the images `index` (B), by matrices (B, G, cells) of their sides."""
        maps = _take(self.maps, index)
        resized = (rows @ maps.flatten(2)).unflatten(2, maps.shape[2:])
        patches = (columns[:, None] @ resized).flatten(1, 2)
        if not self.pooled:
            return Targets(self.cls[index], patches)
        if self.glimpses is None:
            cls = patches.mean(1, dtype=torch.float32) * self.deviations[1] + self.means[1]
        else:
            glimpses = _take(self.glimpses, index).float()
            top, left = (side.float().mean(1) @ _overlaps(side, glimpses.shape[1]) for side in (rows, columns))
            cls = torch.einsum("br,bc,brcd->bd", top, left, glimpses)
        return Targets((cls - self.means[0]) / self.deviations[0], patches)


def _take(maps: Tensor, index: Tensor) -> Tensor:
    """Return `maps[index]` in bfloat16. float8 has no indexing of its own, and int64 words are gathered faster."""
    words = maps.view(torch.int64 if maps.shape[-1] * maps.dtype.itemsize % 8 == 0 else torch.uint8)
    return words[index].view(maps.dtype).to(torch.bfloat16)


def _overlaps(sides: Tensor, cells: int) -> Tensor:
    """Return the share of each of K cells of a side (as in B, G, K) that lies in each of `cells` others: (K, cells)."""
    edges = (torch.linspace(0, 1, count + 1, device=sides.device) for count in (sides.shape[-1], cells))
    (start, end), (low, high) = ((each[:-1], each[1:]) for each in edges)
    return (torch.minimum(end[:, None], high) - torch.maximum(start[:, None], low)).clamp_min(0) * sides.shape[-1]


class Losses(NamedTuple):
    """Scalars, float32 or better. `total` is what training minimises; the others are means over the teachers."""

    total: Tensor
    cls: Tensor
    dense: Tensor
    cosine: Tensor
    mse: Tensor
    logits: Tensor | None = None
    """The mean over those whose logits count; None: there are none."""

    def values(self) -> dict[str, Tensor]:
        """Losses by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def distillation_losses(
    cls: Tensor, patches: Tensor, teacher_cls: Tensor, teacher_patches: Tensor, weights: tuple[float, float] = (1, 1)
) -> Losses:
    """Losses between the student's features (B, D) and (B, N, D) and the teacher's.

    Global features are compared by cosine, patches by cosine and MSE:
    `total = cls + dense_weight · (cosine + mse_weight · mse)`, with `weights` = (dense_weight, mse_weight).

    >>> same = torch.ones(2, 4), torch.ones(2, 9, 4)
    >>> float(distillation_losses(*same, *same).total)
    0.0
    """
    cls, patches, teacher_cls, teacher_patches = (
        x.to(torch.promote_types(x.dtype, torch.float32)) for x in (cls, patches, teacher_cls, teacher_patches)
    )
    with torch.autocast(cls.device.type, enabled=False):
        cls_loss = _cosine_loss(cls, teacher_cls)
        cosine = _cosine_loss(patches, teacher_patches)
        mse = (patches - teacher_patches).square().sum(-1).mean() / patches.shape[-1]
        dense = cosine + weights[1] * mse
    return Losses(cls_loss + weights[0] * dense, cls_loss, dense, cosine, mse)


def _cosine_loss(x: Tensor, y: Tensor, eps: float = 1e-6) -> Tensor:
    """The mean of 1 − `F.cosine_similarity(x, y, dim=-1, eps=eps)`, by sums that a compiler takes in one pass."""
    dot, square_x, square_y = ((a * b).sum(-1) for a, b in ((x, y), (x, x), (y, y)))
    return (1 - dot / (square_x.clamp_min(eps**2).sqrt() * square_y.clamp_min(eps**2).sqrt())).mean()


class TeacherClassifier(NamedTuple):
    """A teacher's classifier, on global features as the student learns them: weight (K, D) and bias (K)."""

    weight: Tensor
    bias: Tensor

    def logits(self, cls: Tensor) -> Tensor:
        """Logits (B, K) of global features (B, D), in float32."""
        with torch.autocast(cls.device.type, enabled=False):
            return F.linear(cls.float(), self.weight, self.bias)


def student_classifier(teacher: Teacher | Standardized) -> TeacherClassifier | None:
    """The classifier of a teacher, standardisation of its features undone in the weights; None: it has none."""
    own = teacher.teacher if isinstance(teacher, Standardized) else teacher
    if own.classifier is None:
        return None
    weight, bias = own.classifier.weight.detach().float(), own.classifier.bias.detach().float()
    if isinstance(teacher, Standardized):
        weight, bias = weight * teacher.deviations[0], bias + weight @ teacher.means[0]
    return TeacherClassifier(weight, bias)


class TeacherLoss(NamedTuple):
    """What one teacher's part of the features costs."""

    width: int
    objective: ObjectiveRecipe
    classifier: TeacherClassifier | None = None
    """Where logits count."""

    def __call__(self, cls: Tensor, patches: Tensor, teacher_cls: Tensor, teacher_patches: Tensor) -> Losses:
        weights = self.objective
        losses = distillation_losses(cls, patches, teacher_cls, teacher_patches, (1.0, weights.mse_weight))
        total, logits = weights.cls_weight * losses.cls + weights.dense_weight * losses.dense, None
        if self.classifier is not None:
            student, teacher = (self.classifier.logits(x) / weights.temperature for x in (cls, teacher_cls))
            log_odds = student.log_softmax(-1), teacher.log_softmax(-1)
            # Times the square of the temperature, gradients are of the same size at any temperature.
            logits = weights.temperature**2 * F.kl_div(*log_odds, reduction="batchmean", log_target=True)
            total = total + weights.logits_weight * logits
        # Written out: torch.compile of torch 2.11 does not know `_replace`.
        return Losses(total, losses.cls, losses.dense, losses.cosine, losses.mse, logits)


def teacher_losses(recipe: Recipe, teacher: AnyTeacher) -> list[TeacherLoss]:
    """The losses of a recipe's teachers. The statistics of standardised ones must be known."""
    losses = []
    for settings, each in zip((recipe.teacher, *recipe.teachers), members(teacher), strict=True):
        objective = settings.objective or recipe.objective
        classifier = student_classifier(each) if objective.logits_weight else None
        if objective.logits_weight and classifier is None:
            raise RecipeError(
                f"objective.logits_weight={objective.logits_weight:g}: {each.name} has no classifier on its global "
                "feature. Set it to 0, or in teacher.objective for a teacher that has one, as efficientnet-lite2"
            )
        losses.append(TeacherLoss(each.width, objective, classifier))
    return losses


def sum_losses(cls: Tensor, patches: Tensor, targets: Targets, losses: Sequence[TeacherLoss]) -> Losses:
    """Losses of features against those of all teachers, which lie side by side."""
    widths = [loss.width for loss in losses]
    parts = (x.split(widths, -1) for x in (cls, patches, *targets))
    by_teacher = [loss(*features) for loss, *features in zip(losses, *parts, strict=True)]
    if len(by_teacher) == 1:
        return by_teacher[0]
    logits = [each.logits for each in by_teacher if each.logits is not None]
    names = "cls", "dense", "cosine", "mse"
    means = {name: torch.stack([getattr(each, name) for each in by_teacher]).mean() for name in names}
    total = torch.stack([each.total for each in by_teacher]).sum()
    return Losses(total, logits=torch.stack(logits).mean() if logits else None, **means)


@torch.no_grad()
def validate(model: Veca, runner: TeacherRunner, images: ImageIndex) -> Grid:
    """Mean losses on the images at each resolution, budget and width of the recipe's grid."""
    recipe, world = runner.recipe, runner.world
    resolutions, budgets, widths = recipe.grid()
    settings = list(itertools.product(budgets, widths))
    losses_of = teacher_losses(recipe, runner.teacher)
    names = [*Losses._fields[:5], *(["logits"] if any(loss.classifier for loss in losses_of) else [])]
    grid: dict[tuple[int, int, float], dict[str, float]] = {}
    model.eval()
    for resolution in resolutions:
        # One row per setting; the last column counts images.
        sums = torch.zeros(len(settings), len(names) + 1, device=world.device, dtype=torch.float64)
        batches = runner.centres(images, resolution, recipe.validation.batch or runner.pass_batch)
        for inputs, number in _synchronized(batches, resolution, world):
            targets = runner.targets(inputs)
            for row, (budget, width) in zip(sums, settings, strict=True):
                with runner.autocast():
                    out = model(inputs, budget, width=width)
                losses = sum_losses(out.cls, out.patches, targets, losses_of)
                row += number * torch.stack([*losses.values().values(), torch.ones_like(losses.total)]).double()
        # Summed in float64 over all processes, so that their number does not show in the mean.
        all_reduced(sums, world)
        for (budget, width), (*totals, count) in zip(settings, sums.tolist(), strict=True):
            if not count:  # the mean of nothing would count as the best
                why = "".join(f": {name}, {reason}" for name, reason in runner.unreadable[-1:])
                raise DataError(f"data.validation: none of its {len(images):,} pictures can be used{why}")
            grid[resolution, budget, width] = {name: x / count for name, x in zip(names, totals, strict=True)}
    if isinstance(model, FSDPModule):  # a forward pass without a backward one leaves the parameters gathered
        model.reshard()
    model.train()
    return grid


def _synchronized(batches: Iterator[Tensor], resolution: int, world: World) -> Iterator[tuple[Tensor, int]]:
    """Batches, and how many images of each count: the same number of batches in every process, since gathering sharded
    parameters takes all of them. A process that has no images left gets a blank one, which does not count.
    """
    blank = torch.zeros(1, 3, resolution, resolution, device=world.device)
    while any(gathered((images := next(batches, None)) is not None, world)):
        yield (blank, 0) if images is None else (images, len(images))
