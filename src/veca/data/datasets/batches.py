"""Batches of labelled images: crops of each or images with masks or depths, decoded in worker processes.

Images that cannot be read become text, their name and the reason, so that one bad file does not end a worker.

Dense heads train on random square crops, the short side at the size asked for, flipped in half the cases. They are
scored on whole images with the short side at that size; the label keeps its own size.

Shapes: B images of H × W pixels.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from veca.data import transforms
from veca.data.datasets.base import IGNORE, DepthRules, ProbeData, Split
from veca.data.workers import WorkerDiedError, WorkerPool
from veca.errors import ArgumentError, VecaError
from veca.images import ImageError, open_image
from veca.images.load import CROP_RATIO

# Pixels and label map of an image
_Pair = tuple[NDArray[Any], NDArray[Any]]
_SCORING_WINDOW = 2
"""Scoring groups images by shape within this many batches: few enough to stay in memory."""


class UnreadableImageError(VecaError, ValueError):
    """Images of a dataset cannot be read; the message names them."""


class LabelledBatch(NamedTuple):
    pixels: Tensor
    """(B, 3, H, W) uint8"""
    labels: Tensor
    """(B) class numbers; or (B, H', W') class numbers or metres, at the size of the label files when scoring."""


@dataclass(frozen=True)
class CropTransform:
    """The square crop of each image: its centre, or a random resized crop that differs from epoch to epoch."""

    side: int
    epoch: int | None = None
    """Number of the epoch of random crops; None: the centre crop."""
    seed: int = 0
    area: tuple[float, float] = transforms.CROP_AREA
    """Range of the share of the image that a random crop covers."""

    def __call__(self, split: Split, i: int) -> NDArray[np.uint8]:
        image = open_image(split.image(i))
        if self.epoch is None:
            return transforms.centre_crop(image, self.side).numpy()
        generator = transforms.seeded_random(self.seed, self.epoch, i)
        return transforms.random_resized_crop(image, self.side, generator, self.area).numpy()

    def describe(self) -> dict[str, Any]:
        """Return plain data for cache keys and protocols. Changing it invalidates the users' caches."""
        if self.epoch is None:
            return {"view": "centre", "side": self.side, "short_side": round(self.side * CROP_RATIO)}
        shape = {"area": list(self.area), "aspect": list(transforms.CROP_ASPECT), "side": self.side}
        return {"view": "random resized crop and flip", **shape, "pass": self.epoch, "seed": self.seed}


@dataclass(frozen=True)
class CroppedImages(Dataset[Any]):
    """What a transform makes of the images of a split: (number, result), or (number, reason) for an unreadable one.

    An index is a number, or (position, number) as `shuffled_batches` yields it.
    """

    split: Split
    transform: Callable[[Split, Any], Any]

    def __getitem__(self, index: Any) -> tuple[int, Any]:
        i = index[-1] if isinstance(index, tuple) else index
        try:
            return i, self.transform(self.split, index)
        except (ImageError, OSError) as error:
            reason = str(error).removeprefix("<bytes>: ").removeprefix(f"{self.split.images.path(i)}: ")
            return i, f"{self.split.name(i)}: {reason}"[:1000]


def join_some(items: Sequence[str], limit: int = 5) -> str:
    """Join the first items, and say how many more there are."""
    more = f" … and {len(items) - limit:,} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


def stack_crops(side: int, crops: Sequence[tuple[int, Any]]) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """Stack what `CroppedImages` gave to (B, 3, side, side), black where unreadable; and the reasons by number.

    NumPy arrays, not tensors: tensors from worker processes would take shared memory.
    """
    unreadable = {i: pixels for i, pixels in crops if isinstance(pixels, str)}
    black = np.zeros((3, side, side), np.uint8)
    return np.stack([black if isinstance(pixels, str) else pixels for _, pixels in crops]), unreadable


@contextmanager
def decode_batches(
    dataset: Any, batches: Iterable[Sequence[Any]], workers: int, collate: Any = list, forked: bool = False
) -> Iterator[Iterator[Any]]:
    """Iterate over the items of each batch of indices, made by worker processes (0: by this process).

    `forked` workers inherit everything in this process, such as a compiled model.
    """
    try:
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

    @property
    def ignore(self) -> int:
        """The label of pixels that do not count."""
        return IGNORE if self.data.ignore is None else self.data.ignore

    def training(self, steps: int, start: int = 0, rank: int = 0, size: int = 1) -> Iterator[LabelledBatch]:
        """Yield random square crops for the steps from `start`; each step follows from the seed alone.

        Each of `size` processes gets its share of a batch, which is empty if none of its images can be read.
        """
        split = self.data.splits["train"]
        order = shuffled_batches(len(split), self.batch, range(start, steps), self.seed, rank, size)
        # One dtype whatever the mask files hold: processes gather their labels.
        dtype = np.float32 if self.data.task == "depth" else np.int32
        with decode_batches(CroppedImages(split, self._random_crop), order, self.workers) as batches:
            for items in batches:
                readable = self._check_readable("train", items)
                if not readable and size == 1:
                    raise UnreadableImageError(f"a whole batch of {self.data.name} train cannot be read: {items[0][1]}")
                empty = torch.empty(0, 3, self.side, self.side, dtype=torch.uint8)
                yield _stack_pairs(readable, dtype) if readable else LabelledBatch(empty, empty[:, 0].int())

    def scoring(self, name: str, rank: int = 0, size: int = 1) -> Iterator[LabelledBatch]:
        """Yield all images of a split once, in batches of equal shapes, shared out among `size` processes."""
        split, window = self.data.splits[name], _SCORING_WINDOW * self.batch
        windows = [range(start, min(start + window, len(split))) for start in range(0, len(split), window)][rank::size]
        with decode_batches(CroppedImages(split, self._whole_image), windows, self.workers) as batches:
            for items in batches:
                by_shape: dict[Any, list[Any]] = {}
                for pixels, label in self._check_readable(name, items):
                    by_shape.setdefault((pixels.shape, label.shape), []).append((pixels, label))
                for same in by_shape.values():
                    for start in range(0, len(same), self.batch):
                        yield _stack_pairs(same[start : start + self.batch])

    def one(self, name: str, i: int) -> LabelledBatch | None:
        """Return image `i` of a split as `scoring` has it; None when it cannot be read."""
        _, pair = CroppedImages(self.data.splits[name], self._whole_image)[i]
        return None if isinstance(pair, str) else _stack_pairs([pair])

    def _check_readable(self, name: str, items: Sequence[tuple[int, Any]]) -> list[Any]:
        where, pairs = f"{self.data.name} {name}", [pair for _, pair in items]
        if unreadable := {pair for pair in pairs if isinstance(pair, str)}:
            if not self.skip_bad:
                way_out = "Repair it, or leave such pictures out with --skip-bad"
                raise UnreadableImageError(f"a picture of {where} cannot be read: {min(unreadable)}. {way_out}")
            self.skipped.setdefault(where, set()).update(unreadable)
        return [pair for pair in pairs if not isinstance(pair, str)]

    def _random_crop(self, split: Split, index: tuple[int, int]) -> _Pair:
        """Crop image and label at random; where an image is smaller than the crop, the padding does not count."""
        position, i = index  # as `shuffled_batches` yields them
        image, values = open_pair(split, i, self.data.depth, scored=False)
        # Seeded by the position in the stream, so that an image is cropped differently in every epoch.
        scale = math.exp(transforms.seeded_random(self.seed, position, 1).uniform(*map(math.log, self.scales)))
        pixels = transforms.resize_short_side(image, round(self.side * scale))
        label = transforms.resize_nearest(values, (pixels.shape[1], pixels.shape[2]))
        generator = torch.Generator().manual_seed(transforms.seeded_random(self.seed, position).getrandbits(62))
        fill = 0 if self.data.task == "depth" else self.ignore
        cropped = transforms.random_crop_and_flip(pixels, label, (self.side, self.side), generator, fill)
        crop, crop_label = (tensor.contiguous().numpy() for tensor in cropped)
        # Bytes where they suffice: less to send between processes.
        fits_byte = values.dtype == np.uint8 and 0 <= fill <= 255
        return crop, crop_label.astype(np.uint8) if fits_byte else crop_label

    def _whole_image(self, split: Split, i: int) -> _Pair:
        image, values = open_pair(split, i, self.data.depth, scored=True)
        # PyTorch supports few operations on uint16. Bytes stay bytes: less to send between processes.
        label = values.astype(np.int32) if values.dtype == np.uint16 else np.ascontiguousarray(values)
        return transforms.resize_short_side(image, self.side, self.patch).numpy(), label


def _stack_pairs(pairs: Sequence[_Pair], dtype: DTypeLike | None = None) -> LabelledBatch:
    pixels, labels = zip(*pairs, strict=True)
    return LabelledBatch(torch.from_numpy(np.stack(pixels)), torch.from_numpy(np.stack(labels, dtype=dtype)))


def open_pair(split: Split, i: int, rules: DepthRules | None, scored: bool) -> tuple[Image.Image, NDArray[Any]]:
    """Open an image and its label map. Depths to be `scored` are 0 outside the region the benchmark evaluates."""
    image, label = open_image(split.image(i)), split.label(i)
    height, width = label.shape
    if (height, width) != (image.height, image.width):
        raise ImageError(f"the picture is {image.height}×{image.width}, its label {height}×{width}; they must match")
    if rules is None:
        return image, label
    if scored:
        top, bottom, left, right = rules.box(height, width)
        evaluated = np.zeros_like(label)
        evaluated[top:bottom, left:right] = label[top:bottom, left:right]
        label = evaluated
    if rules.input_crop:
        rows, columns = min(rules.input_crop[0], height), min(rules.input_crop[1], width)
        top, left = height - rows, (width - columns) // 2
        image = image.crop((left, top, left + columns, top + rows))
        label = label[top : top + rows, left : left + columns]
    return image, label
