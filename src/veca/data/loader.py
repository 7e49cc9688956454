"""Batches for training, from an index of images: decoded and transformed in worker processes.

Shapes: B images, R rows and columns.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count, groupby, tee
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.data.gpu_decode import finish_crops
from veca.data.index import DataError, ImageIndex
from veca.data.records import describe_error, for_resizing, read_jpeg
from veca.data.sampler import MAX_FAILURES, BatchPlan, TrainSampler, TransformParams, crop_offset, sample_transforms
from veca.data.transforms import Augmentation, augment_batch, augment_image, bucket_grids, nearest_grid
from veca.data.workers import SharedSlots, WorkerDiedError, WorkerPool, prefetch
from veca.images import MAX_PIXELS, normalize, open_image
from veca.images.load import apply_crop
from veca.images.resize import Crop
from veca.utils.device import side_stream

# Images that a worker returns at a time
_TASK_IMAGES = 16
# Shared memory for them, enough at 1024 × 1024
_SLOT_BYTES = _TASK_IMAGES * 3 * 1024**2


def plan_crop(width: float, height: float, params: TransformParams, resolution: int, short_side: float) -> Crop:
    """Return the crop of an image of this size whose short side becomes `short_side` × resolution."""
    short = round(short_side * resolution)
    # Sizes as torchvision's Resize rounds them
    columns = short if width <= height else int(short * width / height)
    rows = short if height <= width else int(short * height / width)
    left, top = int(crop_offset(params.x, columns - resolution)), int(crop_offset(params.y, rows - resolution))
    right, bottom = (left + resolution) * width / columns, (top + resolution) * height / rows
    box = left * width / columns, top * height / rows, right, bottom
    return Crop(box, *(resolution,) * 4, flip=bool(params.flip))


def plan_grid_crop(
    width: float, height: float, params: TransformParams, size: tuple[int, int], short_side: float
) -> Crop:
    """Return the crop of `size` = (rows, columns) pixels of an image that is resized to cover `short_side` times it."""
    rows, columns = size
    scale = short_side * max(rows / height, columns / width)
    whole_rows, whole_columns = max(rows, round(height * scale)), max(columns, round(width * scale))
    left, top = int(crop_offset(params.x, whole_columns - columns)), int(crop_offset(params.y, whole_rows - rows))
    across, down = width / whole_columns, height / whole_rows
    box = left * across, top * down, (left + columns) * across, (top + rows) * down
    return Crop(box, columns, rows, columns, rows, flip=bool(params.flip))


def open_crop(
    source: str | bytes, params: TransformParams, resolution: int, short_side: float, max_pixels: int
) -> tuple[Image.Image, Crop]:
    """Open an image, with the crop of it that a batch takes; a large JPEG is decoded at reduced size."""
    # As long as two pixels are left for each one of the result
    image = open_image(source, max_pixels=max_pixels, at_least=2 * round(short_side * resolution))
    width, height = image.info.get("extent", image.size)
    return image, plan_crop(width, height, params, resolution, short_side)


def load_crop(
    source: str | bytes, params: TransformParams, resolution: int, short_side: float, max_pixels: int
) -> Image.Image:
    """Open an image, resize its short side to `short_side` × resolution, crop and flip it.

    Nothing outside the crop is resized. The operation of TrivialAugmentWide is left to the caller.
    """
    image, crop = open_crop(source, params, resolution, short_side, max_pixels)
    return apply_crop(crop, image)


@dataclass(frozen=True)
class Batch:
    """Images of a forward pass, on the CPU (pinned where there is a GPU) or on the device."""

    # (B, 3, R, R) uint8; empty where there are `groups`
    images: Tensor
    # What `to_model_input` still has to apply
    augmentation: Augmentation | None
    # (B) int64, numbers in the index
    indices: Tensor
    # (B) int64, which random variant of the image: with number and seed it determines every pixel
    variants: Tensor
    # Names of unreadable images and why; in training each was replaced by another
    skipped: list[tuple[str, str]]
    # Teacher's targets, where they are cached
    targets: Any = None
    # Where shapes differ, the images of each shape (b, 3, H, W) uint8; all other fields are in their order
    groups: Sequence[Tensor] = ()


def to_model_groups(batch: Batch, device: torch.device | str) -> list[Tensor]:
    """Return what `to_model_input` does, of each of the groups of a batch."""
    groups, start = list[Tensor](), 0
    for images in batch.groups:
        part = slice(start, start := start + len(images))
        augmentation = batch.augmentation and Augmentation(*(values[part] for values in batch.augmentation))
        groups.append(to_model_input(replace(batch, images=images, augmentation=augmentation), device))
    return groups


def to_model_input(batch: Batch, device: torch.device | str) -> Tensor:
    """Return the model's input (B, 3, R, R), float32 on `device`: augmented if that is left to do, and normalised.

    The device is not waited for.
    """
    images = batch.images.to(device, non_blocking=True)
    if batch.augmentation is not None:
        images = augment_batch(images, batch.augmentation)
    return normalize(images.contiguous())


def too_many_failures(name: str, reason: str) -> str:
    """Return the message of a run that is aborted because of unreadable images."""
    return f"{MAX_FAILURES} pictures in a row cannot be used. The last is {name}: {reason}"


@dataclass(eq=False)
class ImageLoader(AbstractContextManager["ImageLoader"]):
    """Batches of an index, decoded ahead by `workers` processes (0: by this one), which end with the `with` block.

    Made by `train_loader` and `validation_loader`. Iterating again starts over. Unreadable images are skipped, or
    replaced by others if `replace`. Without `apply_op` the operation of TrivialAugmentWide is left to `to_model_input`,
    with the same pixels. Images are cropped and resized on `device`, again with the same pixels, or where that is None
    by the workers; with `decode_on_device` that decodes ordinary JPEGs too.
    """

    index: ImageIndex
    sampler: TrainSampler
    plans: Iterable[BatchPlan]
    workers: int
    max_pixels: int
    replace: bool
    apply_op: bool = True
    device: torch.device | None = None
    decode_on_device: bool = False
    _pool: WorkerPool[Any] | None = None
    # For the images of tasks under way
    _shared: SharedSlots | None = None

    def __post_init__(self) -> None:
        batch_size, workers = self.sampler.batch_size, max(1, self.workers)
        self._task_images = max(1, min(_TASK_IMAGES, math.ceil(batch_size / workers)))
        # Two batches ahead, shared by the workers
        self._prefetch = max(2, math.ceil(2 * batch_size / (self._task_images * workers)))
        if self.workers and sys.platform == "linux":
            self._shared = SharedSlots(workers * self._prefetch + 1, _SLOT_BYTES)
        self._pin = torch.cuda.is_available() and self.device is None
        on_gpu = self.device is not None and self.device.type == "cuda"
        self._stream: Any = torch.cuda.stream(side_stream(self.device, "loader")) if on_gpu else nullcontext()

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def __iter__(self) -> Iterator[Batch]:
        self.__exit__()
        sent, pending = tee(self.plans)
        tasks = enumerate(part for plan in sent for part in self._split(plan))
        self._pool = pool = WorkerPool(self._decode, tasks, self.workers, self._prefetch, fork=self._shared is not None)
        batches = self._collect(pool, pending)
        try:
            yield from prefetch(batches) if self.workers else batches
        finally:
            if self._pool is pool:  # and not that of a later loop
                self.__exit__()

    def _split(self, plan: BatchPlan) -> Iterator[BatchPlan]:
        """Split a batch into tasks, the pixels of which fit in a slot."""
        size = max(1, min(self._task_images, _SLOT_BYTES // (3 * plan.resolution**2)))
        for start in range(0, len(plan.images), size):
            part = slice(start, start + size)
            yield BatchPlan(plan.resolution, plan.images[part], plan.variants[part], plan.resolutions[part])

    def _decode(self, task: tuple[int, BatchPlan]) -> tuple[list[int], list[tuple[str, str]], Any, list[Crop]]:
        """Decode a task, in a worker: images that were read, those skipped, their pixels and what to crop of them."""
        number, plan = task
        images, skipped, arrays, crops = list[int](), list[tuple[str, str]](), list[NDArray[np.uint8]](), list[Crop]()
        resolutions = plan.resolutions or [plan.resolution] * len(plan.images)
        for first, variant, resolution in zip(plan.images, plan.variants, resolutions, strict=True):
            found = self._load(first, variant, resolution, skipped, self.decode_on_device)
            if found is not None:
                images.append(found[0])
                arrays.append(found[1])
                crops.append(found[2])
            elif self.replace:  # `_collect` will abort the run
                break
        return images, skipped, arrays if self._shared is None else self._shared.put(number, arrays), crops

    def _load(
        self, first: int, variant: int, resolution: int, skipped: list[tuple[str, str]], as_jpeg: bool
    ) -> tuple[int, NDArray[np.uint8], Crop] | None:
        """Load an image, or its replacement: its number, what is sent of it, and the crop that is left to make."""
        sampler = self.sampler
        for image in sampler.candidates(first, variant) if self.replace else (first,):
            params = sample_transforms(sampler.seed, [image], [variant], sampler.augment).item()
            short = 1 / np.interp(params.scale, (0, 1), sampler.crops) if sampler.crops else sampler.short_side
            try:
                source = self.index.read(image)
                jpeg = read_jpeg(source, self.max_pixels) if as_jpeg else None
                if jpeg is not None:
                    data, size, orientation = jpeg
                    crop = plan_crop(*size, params, resolution, float(short))._replace(orientation=orientation)
                    if not crop.grows_first:
                        return image, data, crop
                opened, crop = self._open(source, params, resolution, float(short))
                if self.device is not None:
                    return image, *for_resizing(opened, crop)
                cropped = apply_crop(crop, opened)
                cropped = augment_image(cropped, params.op, params.strength) if self.apply_op else cropped
                return image, np.asarray(cropped), crop
            except Exception as error:  # no image may end the run
                name = self.index.name(image)
                skipped.append((name, describe_error(error, name)))
        return None

    def _open(
        self, source: str | bytes, params: TransformParams, resolution: int, short_side: float
    ) -> tuple[Image.Image, Crop]:
        """Open an image, with the crop of it that a batch takes: a square, or one of about the image's aspect ratio."""
        aspect, patch = self.sampler.aspect, self.sampler.patch
        if aspect is None:
            return open_crop(source, params, resolution, short_side, self.max_pixels)
        grids = bucket_grids(resolution // patch, aspect)
        longest = patch * max(max(grid) for grid in grids)
        image = open_image(source, max_pixels=self.max_pixels, at_least=2 * round(short_side * longest))
        width, height = image.info.get("extent", image.size)
        rows, columns = nearest_grid(width, height, grids)
        return image, plan_grid_crop(width, height, params, (rows * patch, columns * patch), short_side)

    def _collect(self, results: Iterator[Any], plans: Iterator[BatchPlan]) -> Iterator[Batch]:
        """Assemble batches from the results of their tasks."""
        numbers, mixed = count(), self.sampler.aspect is not None
        stacked = self.device is None and not mixed
        try:
            for plan in plans:
                pixels = torch.empty(plan.shape if stacked else 0, dtype=torch.uint8, pin_memory=self._pin)
                images, skipped = list[int](), list[tuple[str, str]]()
                sources, crops = list[NDArray[np.uint8]](), list[Crop]()
                for part in self._split(plan):
                    number = next(numbers)
                    found, failed, arrays, some = next(results)
                    if self._shared is not None:
                        arrays = self._shared.get(number, arrays, copy=not stacked)
                    if stacked:
                        # Copied by numpy: torch would use a thread per core, which the workers need.
                        for target, array in zip(pixels.numpy()[len(images) :], arrays, strict=False):
                            target[:] = array
                    else:
                        sources += arrays
                        crops += some
                    images += found
                    skipped += failed
                    if self.replace and len(found) < len(part.images):
                        raise DataError(f"{too_many_failures(*skipped[-1])}. Check the sources and data.max_pixels")
                finished, groups, variants = pixels[: len(images)], list[Tensor](), plan.variants[: len(images)]
                if mixed:
                    order = sorted(range(len(images)), key=lambda i: sources[i].shape)
                    images, variants = ([values[i] for i in order] for values in (images, variants))
                    groups = self._stack_by_shape([sources[i] for i in order])
                elif stacked:
                    finished = finished.permute(0, 3, 1, 2)
                else:
                    finished = self._finish(plan, images, skipped, sources, crops)
                augmentation = None
                if not self.apply_op:
                    params = sample_transforms(self.sampler.seed, images, variants, self.sampler.augment)
                    augmentation = params.augmentation()
                indices, which = (torch.tensor(values, dtype=torch.int64) for values in (images, variants))
                yield Batch(finished, augmentation, indices, which, skipped, groups=groups)
        except RuntimeError as error:  # a builtin: an open loop may end with the interpreter, after this module is gone
            if not isinstance(error, WorkerDiedError):
                raise
            reason = "Memory may be short (fewer data.workers need less), or somebody killed it"
            raise DataError(f"a process that reads pictures has died: {error}. {reason}") from error

    def _stack_by_shape(self, images: Sequence[NDArray[np.uint8]]) -> list[Tensor]:
        """Images (height, width, 3), sorted by shape, as one (b, 3, height, width) of each shape."""
        groups = []
        for _, same in groupby(images, key=lambda image: image.shape):
            group = torch.from_numpy(np.stack(list(same)))
            groups.append((group.pin_memory() if self._pin else group).permute(0, 3, 1, 2))
        return groups

    def _finish(
        self,
        plan: BatchPlan,
        images: list[int],
        skipped: list[tuple[str, str]],
        sources: list[NDArray[np.uint8]],
        crops: list[Crop],
    ) -> Tensor:
        """Make a batch on the device; what that refuses to decode is loaded anew, in this process."""
        assert self.device is not None
        shape = plan.resolution, plan.resolution
        with self._stream, torch.inference_mode():
            pixels, refused = finish_crops(sources, crops, shape, self.device)
            while refused:
                for i in refused:
                    found = self._load(plan.images[i], plan.variants[i], plan.resolution, skipped, as_jpeg=False)
                    if found is None:
                        raise DataError(f"{too_many_failures(*skipped[-1])}. Check the sources and data.max_pixels")
                    images[i], sources[i], crops[i] = found
                pixels, refused = finish_crops(sources, crops, shape, self.device)
        return pixels


def train_loader(
    index: ImageIndex,
    sampler: TrainSampler,
    workers: int = 8,
    max_pixels: int = MAX_PIXELS,
    where: str = "cpu",
    device: torch.device | None = None,
    decode_on_device: bool = False,
) -> ImageLoader:
    """Load the batches of a sampler, without end; with `where="gpu"` TrivialAugmentWide is left to `to_model_input`.

    Then images are resized on `device` too, if there is one, and ordinary JPEGs are decoded there if asked for.
    """
    apply_op = where == "cpu" or sampler.augment in ("flip", "none")
    on_device = device if where == "gpu" else None
    decode = decode_on_device and on_device is not None
    return ImageLoader(
        index, sampler, sampler, workers, max_pixels, True, apply_op and on_device is None, on_device, decode
    )


def validation_loader(
    index: ImageIndex,
    resolution: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 8,
    short_side: float = 1.125,
    max_pixels: int = MAX_PIXELS,
) -> ImageLoader:
    """Load the centre crop of every image once, in order; batches are dealt to the processes in turn.

    A batch is shorter at the end and where images are unreadable: those are in its `skipped`. A process may get none.
    """
    sampler = TrainSampler(len(index), batch_size, lambda _: resolution, short_side=short_side, augment="none")
    starts = range(rank * batch_size, len(index), world_size * batch_size)
    images = [range(start, min(start + batch_size, len(index))) for start in starts]
    plans = [BatchPlan(resolution, part, [0] * len(part)) for part in images]
    return ImageLoader(index, sampler, plans, workers, max_pixels, replace=False)
