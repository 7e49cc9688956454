"""Batches of images with masks or depths, to train dense heads on and to score them.

Training: the short side at the size asked for, a random square crop, flipped in half the cases. Scoring: the whole
image with its short side at that size; the label keeps its own size.

Shapes: B images of H × W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from PIL import Image

from veca.data.datasets.base import IGNORE, DepthRules, ProbeData, Split
from veca.data.datasets.batches import LabelledBatch, UnreadableImageError, decode_batches, shuffled_batches, try_load
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
        fill = 0 if is_depth else self.ignore
        crop = partial(_random_crop, split, self.data.depth, self.side, fill, self.seed, self.scales)
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
        with decode_batches(self._whole_images(name), windows, self.workers) as batches:
            for pairs in batches:
                by_shape: dict[Any, list[Any]] = {}
                for pixels, label in self._check_readable(name, pairs):
                    by_shape.setdefault((pixels.shape, label.shape), []).append((pixels, label))
                for same in by_shape.values():
                    for start in range(0, len(same), self.batch):
                        yield _stack_pairs(same[start : start + self.batch])

    def one(self, name: str, i: int) -> LabelledBatch | None:
        """Return image `i` of a split as `scoring` has it; None when it cannot be read."""
        pair = self._whole_images(name)[i]
        return None if isinstance(pair, str) else _stack_pairs([pair])

    def _whole_images(self, name: str) -> _LoadedPairs:
        split = self.data.splits[name]
        return _LoadedPairs(split, partial(_whole_image, split, self.data.depth, self.side, self.patch))

    def _check_readable(self, name: str, pairs: Sequence[Any]) -> list[Any]:
        where = f"{self.data.name} {name}"
        if unreadable := {pair for pair in pairs if isinstance(pair, str)}:
            if not self.skip_bad:
                way_out = "Repair it, or leave such pictures out with --skip-bad"
                raise UnreadableImageError(f"a picture of {where} cannot be read: {min(unreadable)}. {way_out}")
            self.skipped.setdefault(where, set()).update(unreadable)
        return [pair for pair in pairs if not isinstance(pair, str)]


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


_Pair = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class _LoadedPairs:
    """Pixels and label of each item of a split, or the reason why it cannot be read."""

    split: Split
    load: Callable[[Any], _Pair]

    def __getitem__(self, index: Any) -> _Pair | str:
        i = index[-1] if isinstance(index, tuple) else index
        return try_load(self.split, i, lambda: self.load(index))


def _random_crop(
    split: Split, rules: DepthRules | None, side: int, fill: int, seed: int, scales: tuple[float, float], index: Any
) -> _Pair:
    """Crop image and label at random; `fill` is the label of the padding where an image is smaller than the crop."""
    position, i = index  # as `shuffled_batches` yields them
    image, values = open_pair(split, i, rules, scored=False)
    # Seeded by the position in the stream, so that an image is cropped differently in every epoch.
    scale = math.exp(seeded_random(seed, position, 1).uniform(*map(math.log, scales)))
    pixels = resize_short_side(image, round(side * scale))
    label = resize_nearest(values, (pixels.shape[1], pixels.shape[2]))
    generator = torch.Generator().manual_seed(seeded_random(seed, position).getrandbits(62))
    cropped = random_crop_and_flip(pixels, label, (side, side), generator, fill)
    crop, crop_label = (tensor.contiguous().numpy() for tensor in cropped)
    # Bytes where they suffice: less to send between processes.
    fits_byte = values.dtype == np.uint8 and 0 <= fill <= 255
    return crop, crop_label.astype(np.uint8) if fits_byte else crop_label


def _whole_image(split: Split, rules: DepthRules | None, side: int, patch: int, i: int) -> _Pair:
    image, values = open_pair(split, i, rules, scored=True)
    # PyTorch supports few operations on uint16. Bytes stay bytes: less to send between processes.
    label = values.astype(np.int32) if values.dtype == np.uint16 else np.ascontiguousarray(values)
    return resize_short_side(image, side, patch).numpy(), label


def _stack_pairs(pairs: Sequence[_Pair], dtype: DTypeLike | None = None) -> LabelledBatch:
    pixels, labels = zip(*pairs, strict=True)
    return LabelledBatch(torch.from_numpy(np.stack(pixels)), torch.from_numpy(np.stack(labels, dtype=dtype)))
