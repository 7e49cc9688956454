"""Training images decoded once and cached on the device, where batches are made without the CPU.

They are kept as squares: the short side resized to `side` pixels, the centre cropped. Batches have the images, crops
and operations of `train_loader`; pixels may differ by rounding, and the ends of long sides are lost.

Shapes: N images, B of them in a batch, S side of the squares, R rows and columns of a batch.
"""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca.data.index import DataError, ImageIndex
from veca.data.loader import Batch, too_many_failures, validation_loader
from veca.data.sampler import BatchPlan, TrainSampler, TransformParams, crop_offset, sample_transforms
from veca.data.transforms import copy_to_device
from veca.images.resize import Mode, resize_matrix
from veca.utils.console import bar

_DECODE_BATCH = 256
# Start and end of crops along one side
Spans: TypeAlias = tuple[tuple[int, int], ...]


class DeviceImageCache:
    """All images (N, 3, S, S) uint8 on `device`; `unreadable` gives name and reason by number."""

    def __init__(
        self, index: ImageIndex, side: int, device: torch.device, workers: int, max_pixels: int, progress: bool = True
    ) -> None:
        self.side, needed = side, len(index) * 3 * side**2
        if device.type == "cuda" and needed > 0.5 * (free := torch.cuda.mem_get_info(device)[0]):
            room = f"more than half of the {free / 2**30:.1f} GiB that {device} has free"
            taken = f"{len(index):,} pictures take {needed / 2**30:.1f} GiB, {room}"
            raise DataError(f"data.resident={side}: {taken}. Keep smaller ones, or leave data.resident out")
        self.images = torch.zeros(len(index), 3, side, side, dtype=torch.uint8, device=device)
        unread, reasons = set(range(len(index))), dict[str, str]()
        loader = validation_loader(index, side, _DECODE_BATCH, 0, 1, workers, short_side=1.0, max_pixels=max_pixels)
        with loader as batches, bar("decoding pictures", len(index), "images", progress) as advance:
            for batch in batches:
                reasons |= dict(batch.skipped)
                self.images[batch.indices.to(device)] = batch.images.to(device, non_blocking=True)
                unread.difference_update(batch.indices.tolist())
                advance(len(batch.indices) + len(batch.skipped))
        self.unreadable = {i: (name := index.name(i), reasons[name]) for i in unread}


class DeviceLoader(AbstractContextManager["DeviceLoader"]):
    """The batches of `train_loader`, made from cached images.

    With `targets`, a `veca.train.objective.TeacherMaps`, crops start and end at cells of its maps, and batches bring
    their targets.
    """

    def __init__(self, cache: DeviceImageCache, sampler: TrainSampler, targets: Any = None) -> None:
        self.cache, self.sampler, self.targets = cache, sampler, targets

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Batch]:
        return map(self.make_batch, self.sampler)

    def make_batch(self, plan: BatchPlan) -> Batch:
        """Make the batch of one forward pass."""
        resolution, device, side = plan.resolution, self.cache.images.device, self.cache.side
        skipped: list[tuple[str, str]] = []
        numbers = [self._readable(*pair, skipped) for pair in zip(plan.images, plan.variants, strict=True)]
        params = sample_transforms(self.sampler.seed, numbers, plan.variants, self.sampler.augment)
        # Tensor cores need half precision: pixel values are exact in it, weights to 1/2048, less than a level in all
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        if self.targets is None:
            index = copy_to_device(device, np.array(numbers))
            left, top, lengths, flip = copy_to_device(device, self._pixel_spans(params, resolution))
            columns, rows = (bicubic_matrices(start, lengths, side, resolution, dtype) for start in (left, top))
        else:
            spans, x, y = self._cell_spans(params, self.targets.cells)
            patch = self.targets.patch
            pixels = tuple((start * patch, end * patch) for start, end in spans)
            matrices = crop_matrices(side, pixels, resolution, "bicubic", dtype, device)
            index, x_crop, y_crop, flip = copy_to_device(device, np.stack([numbers, x, y, params.flip]))
            columns, rows = matrices[x_crop], matrices[y_crop]
        images = resize_crops(self.cache.images[index], rows, _flip_rows(columns, flip))
        targets = None
        if self.targets is not None:
            grid = resolution // patch
            cells = crop_matrices(self.targets.cells, spans, grid, "bilinear", torch.bfloat16, device)
            targets = self.targets.crop(index, cells[y_crop], _flip_rows(cells[x_crop], flip))
        augmentation = params.augmentation() if self.sampler.augment in ("trivial", "colour") else None
        return Batch(images, augmentation, torch.tensor(numbers), torch.tensor(plan.variants), skipped, targets)

    def _pixel_spans(self, params: TransformParams, resolution: int) -> NDArray[np.float32]:
        """Return (4, B): where crops start in x and y, their length in pixels of the cached images, and flips.

        They are those of `veca.data.loader.plan_crop`.
        """
        sampler, side = self.sampler, self.cache.side
        zoom = 1 / np.interp(params.scale, (0, 1), sampler.crops) if sampler.crops else sampler.short_side
        short = np.broadcast_to(np.rint(zoom * resolution), len(params.flip)).astype(np.int64)
        starts = [crop_offset(share, short - resolution) * side / short for share in (params.x, params.y)]
        return np.stack([*starts, resolution * side / short, params.flip]).astype(np.float32)

    def _cell_spans(self, params: TransformParams, cells: int) -> tuple[Spans, NDArray[np.int64], NDArray[np.int64]]:
        """Return the spans of cells that crops can have along a side, and which of these each image has in x and y."""
        shares = self.sampler.crops or (1 / self.sampler.short_side,) * 2
        smallest, largest = (min(max(1, round(cells * share)), cells) for share in shares)
        sizes = np.rint(cells * np.interp(params.scale, (0, 1), shares)).astype(np.int64).clip(smallest, largest)
        lengths = range(smallest, largest + 1)
        spans = tuple((start, start + length) for length in lengths for start in range(cells - length + 1))
        first = np.array([spans.index((0, length)) for length in lengths])[sizes - smallest]
        x, y = (first + crop_offset(share, cells - sizes) for share in (params.x, params.y))
        return spans, x, y

    def _readable(self, first: int, variant: int, skipped: list[tuple[str, str]]) -> int:
        """Return the image, or its replacement where it cannot be read."""
        for image in self.sampler.candidates(first, variant):
            if image not in self.cache.unreadable:
                return image
            skipped.append(self.cache.unreadable[image])
        raise DataError(too_many_failures(*skipped[-1]))


def resize_crops(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Resize a crop of each image (B, 3, S, S) by the matrices (B, R, S) of its sides: uint8 (B, 3, R, R)."""
    count, resolution, side = rows.shape
    # As Pillow does: columns first, rounded and clamped to 8 bits after each product. All channels in one product.
    half = images.reshape(count, 3 * side, side).to(rows.dtype) @ columns.mT
    half = half.round_().clamp_(0, 255).view(count, 3, side, resolution).transpose(1, 2)
    pixels = rows @ half.reshape(count, side, 3 * resolution)
    pixels = pixels.round_().clamp_(0, 255).to(torch.uint8)
    return pixels.view(count, resolution, 3, resolution).transpose(1, 2).contiguous()


def _flip_rows(matrices: Tensor, flip: Tensor) -> Tensor:
    """Reverse the output order of those matrices (B, R, S) whose image is to be flipped."""
    return torch.where(flip.bool()[:, None, None], matrices.flip(1), matrices)


def bicubic_matrices(starts: Tensor, lengths: Tensor, side: int, out: int, dtype: torch.dtype) -> Tensor:
    """Matrices (B, out, side) that cut a span out of a side and resize it to `out`: bicubic, antialiased, as Pillow's.

    Spans (B) are in pixels, not whole ones; as in Pillow, pixels around them contribute at their ends.
    """
    scale = (lengths / out)[:, None, None]
    places = torch.arange(max(side, out), device=starts.device) + 0.5
    centres = starts[:, None, None] + places[:out, None] * scale
    x = ((places[:side] - centres) / scale.clamp_min(1)).abs()
    # Keys' cubic with a = -0.5, by pieces
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    return (weights / weights.sum(-1, keepdim=True)).to(dtype)


@functools.lru_cache(maxsize=32)
def crop_matrices(side: int, spans: Spans, out: int, mode: Mode, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Matrices (P, out, side) that cut each of P spans out of a side and resize it to `out`."""
    matrices = torch.zeros(len(spans), out, side)
    for matrix, (start, end) in zip(matrices, spans, strict=True):
        matrix[:, start:end] = resize_matrix(end - start, out, matrix.device, matrix.dtype, mode, antialias=True)
    return matrices.to(device, dtype)
