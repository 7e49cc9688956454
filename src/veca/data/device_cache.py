"""Training pictures decoded once and kept on the device, where a batch is then made without the CPU.

They are kept as squares: the short side at `side` pixels, the centre. Pictures that are such squares already give the
same batches as `TrainBatches`, bit for bit; of others the ends of the long side are lost.

Shapes: N pictures, B of them in a batch, S side of the squares, R rows and columns of what is seen, T taps of a filter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from torch import Tensor

from veca.data.augment import Augmentation
from veca.data.index import Pictures
from veca.data.loader import MOST_FAILURES, Batch, DataError, normalized, validation_batches
from veca.data.sampler import Augment, Stream, Views, places, replacement, views_of
from veca.images.resize import filters
from veca.teachers import Standardized, Targets
from veca.train.validation import TeacherRunner
from veca.utils.console import progress_bar

_BITS = 22
"""Pillow's weights are whole numbers of so many bits after the point."""
_AT_ONCE = 256
Boxes: TypeAlias = tuple[tuple[float, float], ...]
"""From where to where crops reach along a side of a square, in pixels."""


class Resident:
    """All pictures (N, 3, S, S) uint8 on `device`; `bad` are those that cannot be used: number, name and reason."""

    def __init__(
        self, pictures: Pictures, side: int, device: torch.device, workers: int, max_pixels: int, progress: bool = True
    ) -> None:
        self.side, needed = side, len(pictures) * 3 * side**2
        if device.type == "cuda" and needed > 0.5 * (free := torch.cuda.mem_get_info(device)[0]):
            raise DataError(
                f"data.resident={side}: {len(pictures):,} pictures take {needed / 2**30:.1f} GiB, more than half of "
                f"the {free / 2**30:.1f} GiB that {device} has free. Keep smaller ones, or leave data.resident out"
            )
        self.images = torch.zeros(len(pictures), 3, side, side, dtype=torch.uint8, device=device)
        self.bad: dict[int, tuple[str, str]] = {}
        seen = torch.zeros(len(pictures), dtype=torch.bool)
        columns = "decoding pictures", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with (
            validation_batches(
                pictures, side, _AT_ONCE, workers=workers, short_side=1.0, max_pixels=max_pixels
            ) as batches,
            progress_bar(*columns, shown=progress) as bar,
        ):
            task = bar.add_task("", total=len(pictures))
            reasons: dict[str, tuple[str, str]] = {}
            for batch in batches:
                reasons |= {name: (name, reason) for name, reason in batch.skipped}
                self.images[batch.indices.to(device)] = batch.images.to(device, non_blocking=True)
                seen[batch.indices] = True
                bar.update(task, completed=int(seen.sum()) + len(reasons))
        self.bad = {int(i): reasons[pictures.name(int(i))] for i in (~seen).nonzero()}


class Taught:
    """What a teacher says of all resident pictures, each seen once and whole: maps (N, G, G, D) of G × G cells.

    A view is a square of cells, whatever resolution the student sees it at: its map is resized. Its global feature is
    the mean of its map if the teacher's is (of the map of its second look, where it has one), and that of the whole
    picture if not.
    """

    def __init__(
        self,
        resident: Resident,
        runner: TeacherRunner,
        dtype: torch.dtype,
        short_side: float = 1.125,
        progress: bool = True,
    ) -> None:
        images, teacher = resident.images, runner.teacher
        count, self.patch, width = len(images), runner.patch_size, teacher.width
        self.cells = resident.side // self.patch
        zoom = self.cells / max(1, round(self.cells / short_side))  # of the whole over the part that is a view
        self.dtype, self.standardized = dtype, teacher if isinstance(teacher, Standardized) else None
        own = teacher.teacher if isinstance(teacher, Standardized) else teacher
        self.pooled, second = own.pooled, own.pooled and own.glance is not None
        cells = self.cells**2 + (max(1, round((own.glance or 0) * zoom / own.stride)) ** 2 if second else 0)
        needed = count * cells * width * dtype.itemsize
        if images.is_cuda and needed > 0.9 * (free := torch.cuda.mem_get_info(images.device)[0]):
            raise DataError(
                f"teacher.resident: its maps of {count:,} pictures take {needed / 2**30:.1f} GiB in {dtype}, and "
                f"{images.device} has {free / 2**30:.1f} GiB free. Take float8, smaller or fewer pictures"
            )
        self.maps = torch.empty(count, self.cells, self.cells, width, dtype=dtype, device=images.device)
        self.cls = torch.empty(count, width, dtype=torch.bfloat16, device=images.device)
        # As the teacher has them: zeros, most of a CNN's map, are exact in eight bits, and so no mean is off by them.
        self.glimpses: Tensor | None = None
        columns = "asking the teacher", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with progress_bar(*columns, shown=progress) as bar:
            task, together = bar.add_task("", total=count), runner.micro_batch(resident.side)
            for start in range(0, count, together):
                part = slice(start, start + together)
                pixels = normalized(images[part])
                found = runner.targets(pixels, zoom=zoom)
                self.maps[part] = _within(found.patches.unflatten(1, (self.cells, self.cells)), dtype)
                self.cls[part] = found.cls
                if second:
                    with torch.no_grad(), runner.autocast():
                        seen = own.glimpse(pixels, zoom).permute(0, 2, 3, 1)
                    if self.glimpses is None:
                        self.glimpses = torch.empty(count, *seen.shape[1:], dtype=dtype, device=images.device)
                    self.glimpses[part] = _within(seen, dtype)
                bar.update(task, completed=min(start + together, count))

    def _like_cls(self, values: Tensor) -> Tensor:
        """The teacher's own features, standardized as its global one is."""
        if self.standardized is None:
            return values
        return (values - self.standardized.means[0]) / self.standardized.deviations[0]

    def of(self, index: Tensor, down: Tensor, across: Tensor) -> Targets:
        """Targets (B, G · G, D) of views of the pictures `index` (B), by matrices (B, G, cells) of their two sides."""
        maps = _taken(self.maps, index)
        rows = (down @ maps.flatten(2)).unflatten(2, maps.shape[2:])
        patches = (across[:, None] @ rows).flatten(1, 2)
        if not self.pooled:
            return Targets(self.cls[index], patches)
        if self.glimpses is not None:
            seen = _taken(self.glimpses, index).float()
            top, left = (side.float().mean(1) @ _areas(side, seen.shape[1]) for side in (down, across))
            return Targets(self._like_cls(torch.einsum("br,bc,brcd->bd", top, left, seen)), patches)
        cls = patches.mean(1, dtype=torch.float32)
        if self.standardized is not None:
            cls = self._like_cls(cls * self.standardized.deviations[1] + self.standardized.means[1])
        return Targets(cls, patches)


def _within(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Beyond its largest number an eight-bit float is no number."""
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


def _taken(maps: Tensor, index: Tensor) -> Tensor:
    """`maps[index]` in bfloat16. Eight-bit floats have no indexing of their own, and eight bytes at once go faster."""
    words = maps.view(torch.int64 if maps.shape[-1] * maps.dtype.itemsize % 8 == 0 else torch.uint8)
    return words[index].view(maps.dtype).to(torch.bfloat16)


def _areas(sides: Tensor, cells: int) -> Tensor:
    """The share of each of K cells of a side (as in B, G, K) that lies in each of `cells` others: (K, cells)."""
    ends = (torch.linspace(0, 1, count + 1, device=sides.device) for count in (sides.shape[-1], cells))
    (begin, end), (low, high) = ((each[:-1], each[1:]) for each in ends)
    return (torch.minimum(end[:, None], high) - torch.maximum(begin[:, None], low)).clamp_min(0) * sides.shape[-1]


class ResidentBatches:
    """The batches of `TrainBatches`, from pictures that are resident.

    With what the teacher said of them, crops begin and end with cells of the squares, and bring their targets.
    """

    def __init__(
        self,
        resident: Resident,
        *,
        resolution_of: Callable[[int], int],
        batch: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        short_side: float = 1.125,
        crops: tuple[float, float] | None = None,
        augment: Augment = "trivial",
        views: int | None = None,
        start: int = 0,
        compile: bool = False,
        taught: Taught | None = None,
    ) -> None:
        self.resident, self.taught, self.resolution_of, self.seed = resident, taught, resolution_of, seed
        self.short_side, self.augment, self.views, self.start = short_side, augment, views, start
        self.crops = crops or (1 / short_side, 1 / short_side)
        self.stream = Stream(len(resident.images), batch, rank, world, seed)
        self.resample: Any = torch.compile(resampled, dynamic=True) if compile else resampled

    def __enter__(self) -> ResidentBatches:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Batch]:
        forward = self.start
        while True:
            yield self.batch(forward)
            forward += 1

    def batch(self, forward: int) -> Batch:
        resolution, images = self.resolution_of(forward), self.resident.images
        chosen, epochs = self.stream(forward)
        which = [epoch % self.views for epoch in epochs] if self.views else epochs
        skipped: list[tuple[str, str]] = []
        numbers = [self._usable(first, epoch, skipped) for first, epoch in zip(chosen, which, strict=True)]
        views = views_of(self.seed, numbers, which, self.augment)
        boxes, across, down = self._boxes(views, resolution)
        where = torch.from_numpy(np.stack([numbers, across, down, views.flip]))
        if images.is_cuda:
            where = where.pin_memory()
        index, left, top, flips = where.to(images.device, non_blocking=True)
        flip, side = flips.bool(), self.resident.side
        tables = filter_tables(side, boxes, resolution, images.device)
        seen = self.resample(images[index], left, top, flip, *tables)
        targets = None
        if self.taught is not None:
            patch = self.taught.patch
            matrices = cell_matrices(self.taught.cells, boxes, patch, resolution // patch, images.device)
            columns = matrices[left]
            targets = self.taught.of(index, matrices[top], torch.where(flip[:, None, None], columns.flip(1), columns))
        augmentation = None
        if self.augment in ("trivial", "colour"):
            augmentation = Augmentation(torch.from_numpy(views.op), torch.from_numpy(views.strength))
        return Batch(seen, augmentation, torch.tensor(numbers), torch.tensor(which), skipped, targets)

    def _boxes(self, views: Views, resolution: int) -> tuple[Boxes, NDArray[np.int64], NDArray[np.int64]]:
        """Where crops can begin and end along a side, and which of these each view has, across and down."""
        side, taught = self.resident.side, self.taught
        if taught is None:
            short = round(self.short_side * resolution)
            room = short - resolution
            boxes = tuple((at * side / short, (at + resolution) * side / short) for at in range(room + 1))
            return boxes, places(views.across, room), places(views.down, room)
        count, patch = taught.cells, taught.patch
        least, most = (min(max(1, round(count * share)), count) for share in self.crops)
        spans = np.rint(count * np.interp(views.size, (0, 1), self.crops)).astype(np.int64).clip(least, most)
        cells = [(at, at + span) for span in range(least, most + 1) for at in range(count - span + 1)]
        first = np.array([cells.index((0, span)) for span in range(least, most + 1)])[spans - least]
        across, down = (first + places(shares, count - spans) for shares in (views.across, views.down))
        return tuple((begin * patch, end * patch) for begin, end in cells), across, down

    def _usable(self, first: int, epoch: int, skipped: list[tuple[str, str]]) -> int:
        """The picture, or the one that takes its place."""
        picture, bad = first, self.resident.bad
        for attempt in range(MOST_FAILURES):
            picture = replacement(len(self.resident.images), self.seed, first, epoch, attempt) if attempt else first
            if picture not in bad:
                return picture
            skipped.append(bad[picture])
        name, reason = bad[picture]
        raise DataError(f"{MOST_FAILURES} pictures in a row cannot be used. The last is {name}: {reason}")


def resampled(images: Tensor, left: Tensor, top: Tensor, flip: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Crops (B, 3, R, R) of squares (B, 3, S, S), resized: what `Image.resize` gives for each, pixel by pixel.

    `left` and `top` (B) say which of the crops of the tables they are, `flip` (B) which are mirrored.
    """
    across = _filtered(images, starts[left], weights[left])
    down = _filtered(across.mT, starts[top], weights[top]).mT
    return torch.where(flip[:, None, None, None], down.flip(-1), down)


def _filtered(images: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    """Along the last side: the taps of each pixel (B, R, T), from `starts` (B, R) on, in Pillow's whole numbers."""
    total = torch.full((), 1 << (_BITS - 1), dtype=torch.int32, device=images.device)
    last = images.shape[-1] - 1
    for tap in range(weights.shape[-1]):  # where the filter goes beyond the picture, its weight is 0
        at = (starts + tap).clamp(max=last)[:, None, None, :].expand(-1, *images.shape[1:3], -1)
        total = total + images.gather(3, at).int() * weights[:, None, None, :, tap]
    return (total >> _BITS).clamp(0, 255).to(torch.uint8)


@functools.lru_cache(maxsize=16)
def filter_tables(side: int, boxes: Boxes, resolution: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each of P crops of a square of `side`, from where to where: where the taps of its pixels start (P, R) int64,
    and their weights (P, R, T) int32, of bicubic and antialiased resizing, as Pillow reckons them.
    """
    starts, found = zip(*(_filter(side, begin, end, resolution) for begin, end in boxes), strict=True)
    taps = max(weights.shape[1] for weights in found)
    weights = [np.pad(each, ((0, 0), (0, taps - each.shape[1]))) for each in found]
    return torch.from_numpy(np.stack(starts)).to(device), torch.from_numpy(np.stack(weights)).to(device)


@functools.lru_cache(maxsize=16)
def cell_matrices(cells: int, boxes: Boxes, patch: int, out: int, device: torch.device) -> Tensor:
    """For each crop, in pixels, the matrix (out, cells) that resizes its cells of a side to `out`: (P, out, cells)."""
    found = torch.zeros(len(boxes), out, cells)
    for matrix, (begin, end) in zip(found, boxes, strict=True):
        first, last = int(begin) // patch, int(end) // patch
        matrix[:, first:last] = filters(last - first, out, matrix, antialias=True)
    return found.to(device, torch.bfloat16)


def _filter(size: int, begin: float, end: float, out: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    low, high = np.float32(begin), np.float32(end)  # as Pillow takes a box
    scale = float(high - low) / out
    spread = max(scale, 1.0)
    support = 2.0 * spread
    if begin == int(begin) and scale == 1.0:  # as it is
        return int(begin) + np.arange(out), np.full((out, 1), 1 << _BITS, np.int32)
    taps = int(np.ceil(support)) * 2 + 1
    centre = float(low) + (np.arange(out) + 0.5) * scale
    first = np.trunc(centre - support + 0.5).clip(0).astype(np.int64)
    beyond = np.trunc(centre + support + 0.5).clip(max=size).astype(np.int64)
    at = first[:, None] + np.arange(taps)
    x = np.abs((at - centre[:, None] + 0.5) / spread)
    near, far = (1.5 * x - 2.5) * x * x + 1, (((x - 5) * x + 8) * x - 4) * -0.5
    weight = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    weight[at >= beyond[:, None]] = 0.0
    weight /= np.cumsum(weight, 1)[:, -1:]
    fixed = weight * (1 << _BITS)
    return first, np.trunc(np.where(fixed < 0, fixed - 0.5, fixed + 0.5)).astype(np.int32)
