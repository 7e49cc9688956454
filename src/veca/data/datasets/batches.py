"""Batches of labelled images: crops of each or images with masks or depths, decoded in worker processes.

Images that cannot be read become text, their name and the reason, so that one bad file does not end a worker.

Dense heads train on random square crops, the short side at the size asked for, flipped in half the cases. They are
scored on whole images with the short side at that size; the label keeps its own size. `veca.data.datasets.native` keeps
the aspect ratio, in batches of mixed sizes.

Shapes: B images of H × W pixels.
"""

import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count, repeat, tee
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from veca.data import transforms
from veca.data.crops import CropReader, PlannedCrop, finish_planned
from veca.data.datasets.base import IGNORE, DepthRules, ProbeData, Split
from veca.data.workers import Placed, SharedSlots, WorkerDiedError, WorkerPool, prefetch
from veca.errors import ArgumentError, VecaError
from veca.images import ImageError, open_image
from veca.images.load import CROP_RATIO, PlanCrop, plan_centre
from veca.images.resize import Crop
from veca.utils.device import side_stream

# Pixels and label map of an image
_Pair = tuple[NDArray[Any], NDArray[Any]]
_SCORING_WINDOW = 2
"""Scoring groups images by shape within this many batches: few enough to stay in memory."""
_TASK_IMAGES, _PREFETCH = 16, 2
"""For a GPU: images that a worker returns at a time, and tasks that it is given in advance."""
_SLOT_BYTES = _TASK_IMAGES * 3 << 20
"""Shared memory of a task; what does not fit is sent."""


class UnreadableImageError(VecaError, ValueError):
    """Images of a dataset cannot be read; the message names them."""


class LabelledBatch(NamedTuple):
    pixels: Tensor
    """(B, 3, H, W) uint8"""
    labels: Tensor
    """(B) class numbers; or (B, H', W') class numbers or metres, at the size of the label files when scoring."""

    @property
    def size(self) -> tuple[int, ...]:
        """(H', W') of the labels; () of class numbers."""
        return self.labels.shape[1:]


@dataclass(frozen=True)
class CropTransform:
    """The square crop of each image: its centre, or a random resized crop that differs from epoch to epoch."""

    side: int
    epoch: int | None = None
    """Number of the epoch of random crops; None: the centre crop."""
    seed: int = 0
    area: tuple[float, float] = transforms.CROP_AREA
    """Range of the share of the image that a random crop covers."""

    reader: CropReader = field(default_factory=CropReader)

    def __call__(self, split: Split, i: int) -> NDArray[np.uint8] | PlannedCrop:
        # Share of the short side that a crop has at least; two pixels are left for each one of the result.
        share = 1 / CROP_RATIO if self.epoch is None else math.sqrt(self.area[0] * transforms.CROP_ASPECT[0])
        return self.reader.read(split.image(i), partial(self._plan, i), math.ceil(2 * self.side / share))

    def _plan(self, i: int, width: int, height: int) -> Crop:
        if self.epoch is None:
            return plan_centre(width, height, self.side)
        generator = transforms.seeded_random(self.seed, self.epoch, i)
        return transforms.plan_random_crop(width, height, self.side, generator, self.area)

    def describe(self) -> dict[str, Any]:
        """Return plain data for cache keys and protocols. Changing it invalidates the users' caches."""
        if self.epoch is None:
            short = round(self.side * CROP_RATIO)
            return {"view": "centre", "side": self.side, "short_side": short, **self.reader.describe()}
        shape = {"area": list(self.area), "aspect": list(transforms.CROP_ASPECT), "side": self.side}
        drawn = {"pass": self.epoch, "seed": self.seed, **self.reader.describe()}
        return {"view": "random resized crop and flip", **shape, **drawn}


@dataclass(frozen=True)
class CroppedImages(Dataset[Any]):
    """What a transform makes of the images of a split: (number, result), or (number, reason) for an unreadable one.

    An index is a number, or a tuple that ends with it, such as (position, number) as `shuffled_batches` yields it. A
    result may be a crop that is left to a GPU.
    """

    split: Split
    transform: Callable[[Split, Any], Any]

    def __getitem__(self, index: Any) -> tuple[int, Any]:
        i = index[-1] if isinstance(index, tuple) else index
        try:
            return i, self.transform(self.split, index)
        except (ImageError, OSError) as error:
            return i, self.describe_error(i, error)

    def describe_error(self, i: int, error: Exception) -> str:
        """Return the name of an image and why it cannot be read."""
        reason = str(error).removeprefix("<bytes>: ").removeprefix(f"{self.split.images.path(i)}: ")
        return f"{self.split.name(i)}: {reason}"[:1000]

    def finish(self, items: Sequence[tuple[int, Any]], device: torch.device | None) -> list[tuple[int, Any]]:
        """Replace the crops that were left to `device` by their pixels there, with their labels if they have any."""
        planned = [value for _, value in items if isinstance(value, PlannedCrop)]
        if not planned or device is None:
            return list(items)
        finished, done = iter(finish_planned(planned, device)), list[tuple[int, Any]]()
        for i, value in items:
            result = value
            if isinstance(value, PlannedCrop):
                pixels = next(finished)
                if isinstance(pixels, ImageError):
                    result = self.describe_error(i, pixels)
                else:
                    result = pixels if value.label is None else (pixels, value.label)
            done.append((i, result))
        return done


def join_some(items: Sequence[str], limit: int = 5) -> str:
    """Join the first items, and say how many more there are."""
    more = f" … and {len(items) - limit:,} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


def stack_crops(side: int, crops: Sequence[tuple[int, Any]]) -> tuple[Tensor, dict[int, str]]:
    """Stack what `CroppedImages` gave to (B, 3, side, side), black where unreadable; and the reasons by number."""
    unreadable = {i: pixels for i, pixels in crops if isinstance(pixels, str)}
    black = np.zeros((3, side, side), np.uint8)
    return _stack([black if isinstance(pixels, str) else pixels for _, pixels in crops]), unreadable


def _stack(images: Sequence[Any]) -> Tensor:
    """Stack arrays, or tensors on a device and arrays."""
    device = next((image.device for image in images if isinstance(image, Tensor)), None)
    if device is None:  # by NumPy: torch would use a thread per core, which decoding needs
        return torch.from_numpy(np.stack(images))
    return torch.stack([torch.as_tensor(image, device=device) for image in images])


@contextmanager
def decode_batches(
    dataset: Any,
    batches: Iterable[Sequence[Any]],
    workers: int,
    collate: Any = list,
    forked: bool = False,
    device: torch.device | None = None,
) -> Iterator[Iterator[Any]]:
    """Iterate over the items of each batch of indices, made by worker processes (0: by this process).

    `forked` workers inherit everything in this process, such as a compiled model. With `device` the items of a
    `CroppedImages` are lists, and what was left to that GPU is finished there, a batch ahead.
    """
    try:
        if device is not None:
            with _DeviceBatches(dataset, batches, workers, device) as finished:
                yield finished
            return
        with WorkerPool(partial(_load_batch, dataset, collate), map(list, batches), workers, fork=forked) as decoded:
            yield decoded
    except RuntimeError as error:  # a builtin: a block left open may end with the interpreter, after torch is gone
        if isinstance(error, torch.OutOfMemoryError):
            raise ArgumentError("no memory on the device: lower --batch-size") from error
        if not isinstance(error, WorkerDiedError):
            raise
        way_out = "Most often memory ran out: take fewer --workers. Finished work is kept"
        raise ArgumentError(f"a decoding process died: {error}. {way_out}") from error


def _load_batch(dataset: Any, collate: Any, indices: Sequence[Any]) -> Any:
    return collate([dataset[i] for i in indices])


def shuffled_batches(
    count: int, batch_size: int, steps: range, seed: int, rank: int = 0, world_size: int = 1
) -> Iterator[list[tuple[int, int]]]:
    """Yield for each step (position in the endless stream of epochs, image), of the share of one process.

    `batch_size` is that of all processes together. A step follows from the seed alone, so a run can start at any.
    """
    share = batch_size // world_size

    @lru_cache(maxsize=1)
    def order(epoch: int) -> list[int]:
        return np.random.default_rng([seed, epoch]).permutation(count).tolist()

    for step in steps:
        first = step * batch_size + rank * share
        yield [(position, order(position // count)[position % count]) for position in range(first, first + share)]


@dataclass
class DenseLoader:
    """Loads the splits of a segmentation or depth dataset at one size."""

    data: ProbeData
    side: int
    patch: int
    batch: int
    seed: int = 0
    workers: int = 0
    skip_bad: bool = False
    """Leave out unreadable images, collected in `skipped`; otherwise the first is an error."""
    scales: tuple[float, float] = (1.0, 1.0)
    """Training: range of the short side, in multiples of `side`."""
    skipped: dict[str, set[str]] = field(default_factory=dict)
    reader: CropReader = field(default_factory=CropReader)

    @property
    def ignore(self) -> int:
        """The label of pixels that do not count."""
        return IGNORE if self.data.ignore is None else self.data.ignore

    def training(self, steps: int, start: int = 0, rank: int = 0, size: int = 1) -> Iterator[Any]:
        """Yield random square crops for the steps from `start`; each step follows from the seed alone.

        Each of `size` processes gets its share of a batch, which is empty if none of its images can be read.
        """
        return (self._collate(pairs, self._label_dtype) for pairs in self._training_pairs(steps, start, rank, size))

    def scoring(self, name: str, rank: int = 0, size: int = 1) -> Iterator[Any]:
        """Yield all images of a split once, in batches of equal shapes, shared out among `size` processes."""
        return (self._collate(pairs) for pairs in self._scoring_pairs(name, rank, size))

    def training_groups(self, steps: int) -> Iterator[list[LabelledBatch]]:
        """Yield `training`, each step as groups of images of one shape."""
        for pairs in self._training_pairs(steps):
            yield [_stack_pairs(same, self._label_dtype) for same in _group_by_shape(pairs)]

    def scoring_groups(self, name: str) -> Iterator[list[LabelledBatch]]:
        """Yield `scoring`, each batch as groups of images of one shape."""
        for pairs in self._scoring_pairs(name):
            yield [_stack_pairs(same) for same in _group_by_shape(pairs)]

    @property
    def _label_dtype(self) -> DTypeLike:
        """One dtype whatever the mask files hold: processes gather their labels."""
        return np.float32 if self.data.task == "depth" else np.int32

    def _training_pairs(self, steps: int, start: int = 0, rank: int = 0, size: int = 1) -> Iterator[list[_Pair]]:
        split = self.data.splits["train"]
        order = shuffled_batches(len(split), self.batch, range(start, steps), self.seed, rank, size)
        with self._decode(split, self._random_crop, order) as batches:
            for items in batches:
                readable = self._check_readable("train", items)
                if not readable and size == 1:
                    raise UnreadableImageError(f"a whole batch of {self.data.name} train cannot be read: {items[0][1]}")
                yield readable

    def _scoring_pairs(self, name: str, rank: int = 0, size: int = 1) -> Iterator[Sequence[_Pair]]:
        split, window = self.data.splits[name], _SCORING_WINDOW * self.batch
        windows = [range(start, min(start + window, len(split))) for start in range(0, len(split), window)][rank::size]
        with self._decode(split, self._whole_image, windows) as batches:
            for items in batches:
                for group in self._group(self._check_readable(name, items)):
                    yield from (group[start : start + self.batch] for start in range(0, len(group), self.batch))

    def one(self, name: str, i: int) -> LabelledBatch | None:
        """Return image `i` of a split as `scoring` has it; None when it cannot be read."""
        images = CroppedImages(self.data.splits[name], self._whole_image)
        ((_, pair),) = images.finish([images[i]], self.reader.device)
        return None if isinstance(pair, str) else _stack_pairs([pair])

    def _decode(self, split: Split, transform: Any, order: Iterable[Any]) -> AbstractContextManager[Iterator[Any]]:
        return decode_batches(CroppedImages(split, transform), order, self.workers, device=self.reader.device)

    def _check_readable(self, name: str, items: Sequence[tuple[int, Any]]) -> list[Any]:
        where, pairs = f"{self.data.name} {name}", [pair for _, pair in items]
        if unreadable := {pair for pair in pairs if isinstance(pair, str)}:
            if not self.skip_bad:
                way_out = "Repair it, or leave such pictures out with --skip-bad"
                raise UnreadableImageError(f"a picture of {where} cannot be read: {min(unreadable)}. {way_out}")
            self.skipped.setdefault(where, set()).update(unreadable)
        return [pair for pair in pairs if not isinstance(pair, str)]

    def _random_crop(self, split: Split, index: tuple[int, int]) -> _Pair | PlannedCrop:
        """Crop image and label at random; where an image is smaller than the crop, the padding does not count."""
        position, i = index  # as `shuffled_batches` yields them
        # Seeded by the position in the stream, so that an image is cropped differently in every epoch.
        scale = transforms.draw_scale(transforms.seeded_random(self.seed, position, 1), self.scales)
        image, values = self._read(split, i, partial(self._plan_scaled, scale), scale, scored=False)
        rows, columns = (image.crop.rows, image.crop.columns) if isinstance(image, PlannedCrop) else image.shape[1:]
        generator = torch.Generator().manual_seed(transforms.seeded_random(self.seed, position).getrandbits(62))
        window = transforms.random_window(rows, columns, self._window_size(rows, columns), generator)
        fill = 0 if self.data.task == "depth" else self.ignore
        label = window.cut(transforms.resize_nearest(values, (rows, columns)), fill).contiguous().numpy()
        # Bytes where they suffice: less to send between processes.
        fits_byte = values.dtype == np.uint8 and 0 <= fill <= 255
        label = label.astype(np.uint8) if fits_byte else label
        if isinstance(image, PlannedCrop):
            return image._replace(window=window, label=label)
        return window.cut(torch.from_numpy(image)).contiguous().numpy(), label

    def _whole_image(self, split: Split, i: int) -> _Pair | PlannedCrop:
        image, values = self._read(split, i, self._plan_whole)
        # PyTorch supports few operations on uint16. Bytes stay bytes: less to send between processes.
        label = values.astype(np.int32) if values.dtype == np.uint16 else np.ascontiguousarray(values)
        return image._replace(label=label) if isinstance(image, PlannedCrop) else (image, label)

    def _read(
        self, split: Split, i: int, plan: PlanCrop, scale: float = 1.0, scored: bool = True
    ) -> tuple[NDArray[np.uint8] | PlannedCrop, NDArray[Any]]:
        """Read an image as planned, the short side `scale` times `side` at most, and its label as `open_pair` does."""
        rules = self.data.depth
        if rules is not None and rules.input_crop:  # cropped before it is resized: decoded here
            image, label = open_pair(split, i, rules, scored)
            return self.reader.crop(image, plan(*image.size)), label
        label = split.label(i)

        def checked_plan(width: int, height: int) -> Crop:
            _check_same_size(height, width, label)
            return plan(width, height)

        pixels = self.reader.read(split.image(i), checked_plan, 2 * round(self.side * scale))
        return pixels, _evaluated(label, rules) if scored else label

    # How images are resized, and become batches

    def _plan_whole(self, width: int, height: int) -> Crop:
        return transforms.plan_short_side(width, height, self.side, self.patch)

    def _plan_scaled(self, scale: float, width: int, height: int) -> Crop:
        return transforms.plan_short_side(width, height, round(self.side * scale))

    def _window_size(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the size of a random window of an image that was planned by `_plan_scaled`."""
        return self.side, self.side

    def _group(self, pairs: Sequence[_Pair]) -> Iterable[Sequence[_Pair]]:
        """Group images and label maps that can be in a batch."""
        return _group_by_shape(pairs)

    def _collate(self, pairs: Sequence[_Pair], dtype: DTypeLike | None = None) -> Any:
        if pairs:
            return _stack_pairs(pairs, dtype)
        empty = torch.empty(0, 3, self.side, self.side, dtype=torch.uint8, device=self.reader.device)
        return LabelledBatch(empty, empty[:, 0].int())


def _group_by_shape(pairs: Iterable[_Pair]) -> list[list[_Pair]]:
    """Return the images whose pixels and labels have the same shapes together."""
    groups: dict[Any, list[_Pair]] = {}
    for pixels, label in pairs:
        groups.setdefault((pixels.shape, label.shape), []).append((pixels, label))
    return list(groups.values())


def _stack_pairs(pairs: Sequence[_Pair], dtype: DTypeLike | None = None) -> LabelledBatch:
    pixels, labels = zip(*pairs, strict=True)
    return LabelledBatch(_stack(pixels), torch.from_numpy(np.stack(labels, dtype=dtype)))


def open_pair(split: Split, i: int, rules: DepthRules | None, scored: bool) -> tuple[Image.Image, NDArray[Any]]:
    """Open an image and its label map. Depths to be `scored` are 0 outside the region the benchmark evaluates."""
    image, label = open_image(split.image(i)), split.label(i)
    height, width = image.height, image.width
    _check_same_size(height, width, label)
    label = _evaluated(label, rules) if scored else label
    if rules is not None and rules.input_crop:
        rows, columns = min(rules.input_crop[0], height), min(rules.input_crop[1], width)
        top, left = height - rows, (width - columns) // 2
        image = image.crop((left, top, left + columns, top + rows))
        label = label[top : top + rows, left : left + columns]
    return image, label


def _check_same_size(height: int, width: int, label: NDArray[Any]) -> None:
    if (height, width) != label.shape:
        rows, columns = label.shape
        raise ImageError(f"the picture is {height}×{width}, its label {rows}×{columns}; they must match")


def _evaluated(label: NDArray[Any], rules: DepthRules | None) -> NDArray[Any]:
    """Return depths that are 0 outside the region the benchmark evaluates; masks as they are."""
    if rules is None:
        return label
    top, bottom, left, right = rules.box(*label.shape)
    evaluated = np.zeros_like(label)
    evaluated[top:bottom, left:right] = label[top:bottom, left:right]
    return evaluated


def _split_batch(batch: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(batch), _TASK_IMAGES):
        yield batch[start : start + _TASK_IMAGES]


class _DeviceBatches(AbstractContextManager[Iterator[list[tuple[int, Any]]]]):
    """Batches of a `CroppedImages`, finished on a GPU; with workers in a thread, on a stream of its own.

    A worker takes a few images at a time, and leaves what it read in memory that it shares with this process.
    """

    def __init__(
        self, images: CroppedImages, batches: Iterable[Sequence[Any]], workers: int, device: torch.device
    ) -> None:
        self.images, self.device, self.workers = images, device, workers
        shared = workers and sys.platform == "linux"
        self.slots = SharedSlots(workers * _PREFETCH + 1, _SLOT_BYTES) if shared else None
        sent, self.pending = tee(map(list, batches))
        tasks = enumerate(part for batch in sent for part in _split_batch(batch))
        self.pool = WorkerPool(self._read, tasks, workers, _PREFETCH, fork=self.slots is not None)
        on_gpu = device.type == "cuda"
        self.stream: Any = torch.cuda.stream(side_stream(device, "labelled")) if on_gpu else nullcontext()

    def __enter__(self) -> Iterator[list[tuple[int, Any]]]:
        self.batches = self._finish()
        if self.workers:
            self.batches = prefetch(self.batches)
        return self.batches

    def __exit__(self, *_: object) -> None:
        self.batches.close()
        self.pool.close()

    def _read(self, task: tuple[int, Sequence[Any]]) -> tuple[list[tuple[int, Any]], Placed | None]:
        """Read the images of a task, in a worker; the sources of crops are left in its slot."""
        number, indices = task
        items = [self.images[index] for index in indices]
        if self.slots is None:
            return items, None
        sources = [value.source for _, value in items if isinstance(value, PlannedCrop)]
        return _move(items, repeat(None)), self.slots.put(number, sources)

    def _finish(self) -> Generator[list[tuple[int, Any]]]:
        numbers = count()
        for batch in self.pending:
            items = list[tuple[int, Any]]()
            for _ in _split_batch(batch):
                items += self._unpack(next(numbers), *next(self.pool))
            with self.stream:
                finished = self.images.finish(items, self.device)
            yield finished

    def _unpack(self, number: int, items: list[tuple[int, Any]], placed: Placed | None) -> list[tuple[int, Any]]:
        if self.slots is None or placed is None:
            return items
        return _move(items, iter(self.slots.get(number, placed, copy=True)))


def _move(items: Iterable[tuple[int, Any]], sources: Iterator[Any]) -> list[tuple[int, Any]]:
    """Replace the sources of crops that are left to a GPU by `sources`; other items stay."""
    return [(i, v._replace(source=next(sources)) if isinstance(v, PlannedCrop) else v) for i, v in items]
