"""Batches of labelled images: the crop of each, decoding in worker processes, a shuffled order.

Images that cannot be read become text, their name and the reason, so that one bad file does not end a worker.

Shapes: B images of H × W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from veca.data.datasets.base import Split
from veca.data.transforms import CROP_AREA, CROP_ASPECT, centre_crop, random_resized_crop, seeded_random
from veca.data.workers import ResultT, WorkerDiedError, WorkerPool
from veca.errors import ArgumentError, VecaError
from veca.images import ImageError, open_image
from veca.images.load import CROP_RATIO

# Makes a batch of a list of items
Collate = Callable[[Any], Any]


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
    area: tuple[float, float] = CROP_AREA
    """Range of the share of the image that a random crop covers."""

    def __call__(self, split: Split, i: int) -> NDArray[np.uint8]:
        image = open_image(split.image(i))
        if self.epoch is None:
            return centre_crop(image, self.side).numpy()
        return random_resized_crop(image, self.side, seeded_random(self.seed, self.epoch, i), self.area).numpy()

    def describe(self) -> dict[str, Any]:
        """Return plain data for cache keys and protocols. Changing it invalidates the users' caches."""
        if self.epoch is None:
            return {"view": "centre", "side": self.side, "short_side": round(self.side * CROP_RATIO)}
        crops = {"view": "random resized crop and flip", "area": list(self.area), "aspect": list(CROP_ASPECT)}
        return {**crops, "side": self.side, "pass": self.epoch, "seed": self.seed}


def try_load(split: Split, i: int, load: Callable[[], ResultT]) -> ResultT | str:
    """Return what `load` makes of image `i`, or its name and why it cannot be read."""
    try:
        return load()
    except (ImageError, OSError) as error:
        reason = str(error).removeprefix("<bytes>: ").removeprefix(f"{split.images.path(i)}: ")
        return f"{split.name(i)}: {reason}"[:1000]


@dataclass(frozen=True)
class CroppedImages(Dataset[Any]):
    """The cropped images of a split by number: (number, pixels), or (number, reason) for an unreadable one."""

    split: Split
    transform: CropTransform

    def __getitem__(self, i: int) -> tuple[int, NDArray[np.uint8] | str]:
        return i, try_load(self.split, i, lambda: self.transform(self.split, i))


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
    dataset: Any, batches: Iterable[Sequence[Any]], workers: int, collate: Collate = list, forked: bool = False
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


def _load_batch(dataset: Any, collate: Collate, indices: Sequence[Any]) -> Any:
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
