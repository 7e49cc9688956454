"""Labelled images that keep their aspect ratio, in batches of mixed sizes: `fit: native` of probes and fine-tuning.

The sides of an image are the nearest multiples of the patch size; one of more than `max_patches` patches is shrunk.

Shapes: B images of H × W pixels, label maps of H' × W'.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from veca.data import transforms
from veca.data.datasets.batches import CropTransform, DenseLoader
from veca.images.resize import PATCH, Crop, native_sizes


class PackedBatch(NamedTuple):
    pixels: Sequence[Tensor]
    """(3, H, W) uint8 of each image"""
    labels: Tensor
    """(B) class numbers; or (1, 1, ΣH'W') those of all pixels, label map by label map, each row by row."""
    size: Sequence[tuple[int, int]] = ()
    """(H', W') of each label map"""

    def or_black(self, side: int, ignore: int) -> "PackedBatch":
        """Return itself or, in place of an empty batch, a black image of `side` × `side` pixels, labelled `ignore`."""
        if self.pixels:
            return self
        is_dense = self.labels.ndim > 1
        labels = self.labels.new_full((1, 1, side * side) if is_dense else (1,), ignore)
        return PackedBatch([torch.zeros(3, side, side, dtype=torch.uint8)], labels, [(side, side)] if is_dense else ())


def native_side(max_patches: int, patch: int = PATCH) -> int:
    """Return the side in pixels of a square of `max_patches` patches: no short side is longer."""
    return math.ceil(patch * math.sqrt(max_patches))


def plan_native(width: int, height: int, max_patches: int, patch: int = PATCH) -> Crop:
    """Return the whole image, both sides rounded to `patch`, shrunk to at most `max_patches` patches."""
    rows, columns = native_sizes(height, width, max_patches, patch)
    return Crop((0, 0, width, height), columns, rows, columns, rows)


@dataclass(frozen=True, kw_only=True)
class NativeTransform(CropTransform):
    """The whole of each image; or random parts, others from epoch to epoch, as `plan_native_crop` draws them.

    `side` is that of a square of `max_patches`, see `native_side`.
    """

    max_patches: int
    patch: int = PATCH
    scales: tuple[float, float] = (1.0, 1.0)
    """Range of the factor by which the sides of a random part are scaled."""

    def _plan(self, i: int, width: int, height: int) -> Crop:
        if self.epoch is None:
            return plan_native(width, height, self.max_patches, self.patch)
        generator = transforms.seeded_random(self.seed, self.epoch, i)
        return transforms.plan_native_crop(
            width, height, self.max_patches, generator, self.area, self.scales, self.patch
        )

    def describe(self) -> dict[str, Any]:
        shape = {"max_patches": self.max_patches, "patch": self.patch, "scales": list(self.scales)}
        return {**super().describe(), "fit": "native", **shape}


@dataclass(kw_only=True)
class NativeDenseLoader(DenseLoader):
    """Batches are `PackedBatch`es. `side` is that of a square of `max_patches`, see `native_side`.

    To train, an image is scaled by a number in `scales`; of one that has more than `max_patches` patches then, a random
    window of its aspect ratio is taken. It is flipped in half the cases, and labels are resized to its pixels by
    nearest neighbour: a class or depth is never a mixture of others, and pixels without a label stay so. Whole images
    are scored, at the size of their labels.
    """

    max_patches: int

    def _plan_whole(self, width: int, height: int) -> Crop:
        return plan_native(width, height, self.max_patches, self.patch)

    def _plan_scaled(self, scale: float, width: int, height: int) -> Crop:
        if scale == 1:
            return self._plan_whole(width, height)
        shrunk = min(1.0, self.patch * math.sqrt(self.max_patches / (width * height)))
        return transforms.plan_short_side(width, height, scale * shrunk * min(width, height), self.patch)

    def _window_size(self, rows: int, columns: int) -> tuple[int, int]:
        return native_sizes(rows, columns, self.max_patches, self.patch)

    def _group(self, pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> Iterable[Any]:
        return [pairs]

    def _collate(self, pairs: Sequence[tuple[Any, NDArray[Any]]], dtype: DTypeLike | None = None) -> PackedBatch:
        dtype = dtype or self._label_dtype
        flat = [label.astype(dtype).ravel() for _, label in pairs]
        labels = torch.from_numpy(np.concatenate([np.empty(0, dtype), *flat]))
        sizes = [(label.shape[0], label.shape[1]) for _, label in pairs]
        return PackedBatch([torch.as_tensor(pixels) for pixels, _ in pairs], labels[None, None], sizes)
