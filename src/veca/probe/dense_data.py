"""Pictures with their masks or depths as dense heads learn from them and are scored on them.

To learn: the short side at the size asked for, a random square of it, in half the cases mirrored. To be scored: all of
the picture, the short side at that size; the label stays as it is.

Shapes: B images of H × W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from veca.data.datasets.base import IGNORE, DepthRules, ProbeData, Split
from veca.data.transforms import random_crop_and_flip, resize_nearest, resize_short_side, seeded_random
from veca.images import ImageError, open_image
from veca.probe.features import PictureError, decoding, reason, shuffled

_WINDOW = 2
"""Batches of pictures among which those of one shape are put together to be scored."""


class Labelled(NamedTuple):
    pixels: Tensor
    """(B, 3, H, W) uint8"""
    labels: Tensor
    """(B, H', W'): class numbers, or metres."""


@dataclass
class DenseData:
    """The splits of a dataset at one size. `skipped` collects pictures that cannot be read; without `skip_bad` the
    first is an error.
    """

    data: ProbeData
    side: int
    patch: int
    batch: int
    seed: int = 0
    workers: int = 0
    skip_bad: bool = False
    scales: tuple[float, float] = (1.0, 1.0)
    """Of the short side to learn from, in sides: between these two."""
    skipped: dict[str, set[str]] = field(default_factory=dict)

    @property
    def ignore(self) -> int:
        return IGNORE if self.data.ignore is None else self.data.ignore

    def training(self, steps: int, start: int = 0, rank: int = 0, size: int = 1) -> Iterator[Labelled]:
        """Batches of random squares from step `start` to `steps`; each follows from the seed and its step alone.

        Of `size` processes each has its share of a batch, in which there may be no picture that can be read.
        """
        split = self.data.splits["train"]
        fill = 0 if self.data.task == "depth" else self.ignore
        squares = _Squares(split, self.side, self.data.depth, fill, self.seed, self.scales)
        order = shuffled(len(split), self.batch, range(start, steps), self.seed, rank, size)
        with decoding(squares, order, self.workers) as batches:
            for found in batches:
                good = self._good("train", found)
                if not good and size == 1:
                    raise PictureError(f"a whole batch of {self.data.name} train cannot be read: {found[0]}")
                none = torch.empty(0, 3, self.side, self.side, dtype=torch.uint8)
                # One type of labels, whatever the masks are: processes share them.
                kind = np.float32 if self.data.task == "depth" else np.int32
                yield _together(good, kind) if good else Labelled(none, none[:, 0].int())

    def scoring(self, name: str, rank: int = 0, size: int = 1) -> Iterator[Labelled]:
        """All pictures of a split once, in batches of one shape; of `size` processes each has some of the batches."""
        split = self.data.splits[name]
        most = _WINDOW * self.batch
        windows = [range(start, min(start + most, len(split))) for start in range(0, len(split), most)][rank::size]
        with decoding(_Wholes(split, self.side, self.patch, self.data.depth), windows, self.workers) as batches:
            for found in batches:
                shapes: dict[Any, list[Any]] = {}
                for pixels, label in self._good(name, found):
                    shapes.setdefault((pixels.shape, label.shape), []).append((pixels, label))
                for same in shapes.values():
                    for start in range(0, len(same), self.batch):
                        yield _together(same[start : start + self.batch])

    def one(self, name: str, i: int) -> Labelled | None:
        """Picture `i` of a split as `scoring` has it; None when it cannot be read."""
        found = _Wholes(self.data.splits[name], self.side, self.patch, self.data.depth)[i]
        return None if isinstance(found, str) else _together([found])

    def _good(self, name: str, found: Sequence[Any]) -> list[Any]:
        bad = {each for each in found if isinstance(each, str)}
        if bad and not self.skip_bad:
            raise PictureError(
                f"a picture of {self.data.name} {name} cannot be read: {min(bad)}. Mend it, or leave such out with "
                "--skip-bad"
            )
        if bad:
            self.skipped.setdefault(f"{self.data.name} {name}", set()).update(bad)
        return [each for each in found if not isinstance(each, str)]


def opened(split: Split, i: int, rules: DepthRules | None, scored: bool) -> tuple[Image.Image, NDArray[Any]]:
    """A picture and its label. Depths that are `scored` are 0 outside the part the benchmark looks at."""
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
        inside = np.zeros_like(label)
        inside[top:bottom, left:right] = label[top:bottom, left:right]
        label = inside
    if rules.input_crop:
        rows, columns = (min(most, side) for most, side in zip(rules.input_crop, (height, width), strict=True))
        top, left = height - rows, (width - columns) // 2
        image = image.crop((left, top, left + columns, top + rows))
        label = label[top : top + rows, left : left + columns]
    return image, label


class _Squares(Dataset[Any]):
    def __init__(
        self, split: Split, side: int, rules: DepthRules | None, fill: int, seed: int, scales: tuple[float, float]
    ) -> None:
        self.split, self.side, self.rules, self.fill, self.seed, self.scales = split, side, rules, fill, seed, scales

    def __getitem__(self, place_and_picture: tuple[int, int]) -> Any:
        place, i = place_and_picture
        try:
            image, values = opened(self.split, i, self.rules, scored=False)
            scale = math.exp(seeded_random(self.seed, place, 1).uniform(*map(math.log, self.scales)))
            seen = resize_short_side(image, round(self.side * scale))
            label = resize_nearest(values, (seen.shape[1], seen.shape[2]))
            draw = torch.Generator().manual_seed(seeded_random(self.seed, place).getrandbits(62))
            parts = random_crop_and_flip(seen, label, (self.side, self.side), draw, self.fill)
            pixels, kept = (each.contiguous().numpy() for each in parts)
            fits = values.dtype == np.uint8 and 0 <= self.fill <= 255
            return pixels, kept.astype(np.uint8) if fits else kept  # less to send between processes
        except (ImageError, OSError) as error:
            return reason(self.split, i, error)


class _Wholes(Dataset[Any]):
    def __init__(self, split: Split, side: int, patch: int, rules: DepthRules | None) -> None:
        self.split, self.side, self.patch, self.rules = split, side, patch, rules

    def __getitem__(self, i: int) -> Any:
        try:
            image, values = opened(self.split, i, self.rules, scored=True)
            # Torch computes little with uint16. What fits a byte stays one: it travels between processes.
            label = values.astype(np.int32) if values.dtype == np.uint16 else np.ascontiguousarray(values)
            return resize_short_side(image, self.side, self.patch).numpy(), label
        except (ImageError, OSError) as error:
            return reason(self.split, i, error)


def _together(found: Sequence[tuple[NDArray[Any], NDArray[Any]]], kind: DTypeLike | None = None) -> Labelled:
    pixels, labels = zip(*found, strict=True)
    return Labelled(torch.from_numpy(np.stack(pixels)), torch.from_numpy(np.stack(labels, dtype=kind)))
