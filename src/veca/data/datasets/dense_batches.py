"""Batches of images with masks or depths, to train dense heads on and to score them.

Training: the short side at the size asked for, a random square crop, flipped in half the cases. Scoring: the whole
image with its short side at that size; the label keeps its own size.

Shapes: B images of H × W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from PIL import Image
from torch.utils.data import Dataset

from veca.data.datasets.base import IGNORE, DepthRules, ProbeData, Split
from veca.data.datasets.batches import (
    LabelledBatch,
    UnreadableImageError,
    decode_batches,
    describe_unreadable,
    shuffled_batches,
)
from veca.data.transforms import random_crop_and_flip, resize_nearest, resize_short_side, seeded_random
from veca.images import ImageError, open_image

_SCORING_WINDOW = 2
"""Scoring groups images by shape within this many batches: few enough to stay in memory."""


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
        split, is_depth = self.data.splits["train"], self.data.task == "depth"
        crop = _RandomCrop(self.side, self.data.depth, 0 if is_depth else self.ignore, self.seed, self.scales)
        order = shuffled_batches(len(split), self.batch, range(start, steps), self.seed, rank, size)
        with decode_batches(_LoadedPairs(split, crop), order, self.workers) as batches:
            for pairs in batches:
                readable = self._check_readable("train", pairs)
                if not readable and size == 1:
                    raise UnreadableImageError(f"a whole batch of {self.data.name} train cannot be read: {pairs[0]}")
                empty = torch.empty(0, 3, self.side, self.side, dtype=torch.uint8)
                # One dtype whatever the mask files hold: processes gather their labels.
                dtype = np.float32 if is_depth else np.int32
                yield _stack_pairs(readable, dtype) if readable else LabelledBatch(empty, empty[:, 0].int())

    def scoring(self, name: str, rank: int = 0, size: int = 1) -> Iterator[LabelledBatch]:
        """Yield all images of a split once, in batches of equal shapes, shared out among `size` processes."""
        split, window = self.data.splits[name], _SCORING_WINDOW * self.batch
        windows = [range(start, min(start + window, len(split))) for start in range(0, len(split), window)][rank::size]
        with decode_batches(_LoadedPairs(split, self._whole_image), windows, self.workers) as batches:
            for pairs in batches:
                by_shape: dict[Any, list[Any]] = {}
                for pixels, label in self._check_readable(name, pairs):
                    by_shape.setdefault((pixels.shape, label.shape), []).append((pixels, label))
                for same in by_shape.values():
                    for start in range(0, len(same), self.batch):
                        yield _stack_pairs(same[start : start + self.batch])

    def one(self, name: str, i: int) -> LabelledBatch | None:
        """Return image `i` of a split as `scoring` has it; None when it cannot be read."""
        pair = _LoadedPairs(self.data.splits[name], self._whole_image)[i]
        return None if isinstance(pair, str) else _stack_pairs([pair])

    @property
    def _whole_image(self) -> _WholeImage:
        return _WholeImage(self.side, self.patch, self.data.depth)

    def _check_readable(self, name: str, pairs: Sequence[Any]) -> list[Any]:
        unreadable = {pair for pair in pairs if isinstance(pair, str)}
        if unreadable and not self.skip_bad:
            raise UnreadableImageError(
                f"a picture of {self.data.name} {name} cannot be read: {min(unreadable)}. Repair it, or leave such "
                "pictures out with --skip-bad"
            )
        if unreadable:
            self.skipped.setdefault(f"{self.data.name} {name}", set()).update(unreadable)
        return [pair for pair in pairs if not isinstance(pair, str)]


def open_pair(split: Split, i: int, rules: DepthRules | None, scored: bool) -> tuple[Image.Image, NDArray[Any]]:
    """Open an image and its label map. Depths to be `scored` are 0 outside the region the benchmark evaluates."""
    image, label = open_image(split.image(i)), split.label(i)
    if label.shape != (image.height, image.width):
        raise ImageError(
            f"the picture is {image.height}×{image.width}, its label {label.shape[0]}×{label.shape[1]}; they must match"
        )
    if rules is None:
        return image, label
    height, width = label.shape
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


_Pair = tuple[NDArray[Any], NDArray[Any]]


class _LoadedPairs(Dataset[Any]):
    """Pixels and label of each item of a split, or the reason why it cannot be read."""

    def __init__(self, split: Split, load: Callable[[Split, Any], _Pair]) -> None:
        self.split, self.load = split, load

    def __getitem__(self, index: Any) -> _Pair | str:
        try:
            return self.load(self.split, index)
        except (ImageError, OSError) as error:
            return describe_unreadable(self.split, index[-1] if isinstance(index, tuple) else index, error)


@dataclass(frozen=True)
class _RandomCrop:
    side: int
    rules: DepthRules | None
    fill: int
    """Label of the padding where an image is smaller than the crop."""
    seed: int
    scales: tuple[float, float]

    def __call__(self, split: Split, index: tuple[int, int]) -> _Pair:
        position, i = index
        image, values = open_pair(split, i, self.rules, scored=False)
        # Seeded by the position in the stream, so that an image is cropped differently in every epoch.
        scale = math.exp(seeded_random(self.seed, position, 1).uniform(*map(math.log, self.scales)))
        pixels = resize_short_side(image, round(self.side * scale))
        label = resize_nearest(values, (pixels.shape[1], pixels.shape[2]))
        generator = torch.Generator().manual_seed(seeded_random(self.seed, position).getrandbits(62))
        cropped = random_crop_and_flip(pixels, label, (self.side, self.side), generator, self.fill)
        crop, crop_label = (tensor.contiguous().numpy() for tensor in cropped)
        # Bytes where they suffice: less to send between processes.
        fits_byte = values.dtype == np.uint8 and 0 <= self.fill <= 255
        return crop, crop_label.astype(np.uint8) if fits_byte else crop_label


@dataclass(frozen=True)
class _WholeImage:
    side: int
    patch: int
    rules: DepthRules | None

    def __call__(self, split: Split, i: int) -> _Pair:
        image, values = open_pair(split, i, self.rules, scored=True)
        # PyTorch supports few operations on uint16. Bytes stay bytes: less to send between processes.
        label = values.astype(np.int32) if values.dtype == np.uint16 else np.ascontiguousarray(values)
        return resize_short_side(image, self.side, self.patch).numpy(), label


def _stack_pairs(pairs: Sequence[_Pair], dtype: DTypeLike | None = None) -> LabelledBatch:
    pixels, labels = zip(*pairs, strict=True)
    return LabelledBatch(torch.from_numpy(np.stack(pixels)), torch.from_numpy(np.stack(labels, dtype=dtype)))
