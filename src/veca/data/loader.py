"""Decode and transform images in worker processes: single records for embedding, batches for training.

Shapes: B images, R rows and columns.
"""

from __future__ import annotations

import functools
import math
import mmap
import queue
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.data.index import DataError, ImageIndex
from veca.data.remote import SourceError, as_text, is_remote, read_remote, read_span, retry
from veca.data.sampler import (
    AugmentMode,
    EpochSampler,
    TransformParams,
    crop_offset,
    replacement,
    sample_transform,
)
from veca.data.sources import Item
from veca.data.transforms import Augmentation, augment_batch, augment_image
from veca.data.workers import WorkerDiedError, WorkerPool
from veca.images import MAX_PIXELS, Fit, ImageError, fit_image, normalize, open_image, resample, to_tensor

MAX_FAILURES = 100
"""Abort after this many consecutive unreadable images."""
_SENT_BYTES = 1 << 27
"""Encoded images on their way to worker processes, together; a larger one is sent alone."""
_TASK_IMAGES = 16
"""Images that a worker returns at a time."""
_SLOT_BYTES = _TASK_IMAGES * 3 * 1024**2
"""Shared memory for them, enough at 1024 × 1024. Pages that are never written take no memory."""
_JOIN_SECONDS = 10.0
"""How long to wait for a thread that waits for a worker."""
_DRAFT_FACTOR = 2
"""A JPEG is decoded at reduced size as long as this many pixels are left for each one of the result."""


def describe_error(error: Exception, name: str) -> str:
    """Return why an image cannot be read, without its name, fit for a table."""
    reason = str(error) if isinstance(error, ImageError) else f"{type(error).__name__}: {error}"
    return as_text(reason.removeprefix("<bytes>: ").removeprefix(f"{name}: "))[:1000]


# Embedding: a stream of items to a stream of records


class Record(NamedTuple):
    """A decoded image, (3, height, width) uint8, with its original (width, height); or an error."""

    name: str
    size: tuple[int, int] = (0, 0)
    pixels: NDArray[np.uint8] | None = None
    error: str = ""
    stamp: str = ""
    number: int = 0


_PADDING = Item("", number=-1)
"""A task without work; see `_ByteWindow`."""


@dataclass(frozen=True)
class _ItemDecoder:
    size: int
    fit: Fit
    max_pixels: int

    def __call__(self, item: Item) -> Record:
        if item.number == _PADDING.number:
            return Record("", number=item.number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow may emit tens of thousands for one file
                image = open_image(_read_item(item), max_pixels=self.max_pixels)
            # An array, not a tensor: tensors travel in shared memory, of which containers have little.
            pixels = to_tensor(fit_image(image, self.size, self.fit, self.max_pixels)).numpy()
            return Record(item.name, image.size, pixels, stamp=item.stamp, number=item.number)
        except SourceError:
            raise
        except Exception as error:  # no image may end the run
            return Record(item.name, error=describe_error(error, item.path), stamp=item.stamp, number=item.number)


def _read_item(item: Item) -> str | bytes:
    if item.error:
        raise ImageError(item.error)
    if item.data is not None:
        return item.data
    if is_remote(item.path):
        return retry(item.path, lambda: read_remote(item.path, None, item.file_size))
    return item.path if item.span is None else read_span(item.path, *item.span)


class _ByteWindow:
    """Limits the bytes on their way to workers, of which `WorkerPool` limits only the number of items.

    The pool asks for an item whenever a record comes back, and cannot be made to wait. So while too many bytes are on
    their way it is given padding, whose records are dropped.
    """

    def __init__(self, items: Iterator[Item]) -> None:
        self.items, self.bytes = items, 0
        self.sizes = deque[int]()

    def __iter__(self) -> Iterator[Item]:
        for item in self.items:
            size = len(item.data or b"")
            while self.bytes and self.bytes + size > _SENT_BYTES:
                yield _PADDING
            self.bytes += size
            self.sizes.append(size)
            yield item

    def receive(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            if record.number != _PADDING.number:
                self.bytes -= self.sizes.popleft()
                yield record


@contextmanager
def decode_items(
    items: Iterator[Item], size: int, fit: Fit, max_pixels: int, workers: int
) -> Iterator[Iterator[Record]]:
    """Decode and fit `items` in `workers` processes (0: in this one) while the block runs; records keep their order."""
    window = _ByteWindow(items)
    with WorkerPool(_ItemDecoder(size, fit, max_pixels), window, workers, prefetch=4) as records:
        yield window.receive(records)


# Training: an index of images to batches


def load_crop(
    source: str | bytes, params: TransformParams, resolution: int, short_side: float, max_pixels: int
) -> Image.Image:
    """Open an image, resize its short side to `short_side` × resolution, crop and flip it.

    Nothing outside the crop is resized, and a large JPEG is decoded at reduced size. The operation of
    TrivialAugmentWide is left to the caller.
    """
    short = round(short_side * resolution)
    image = open_image(source, max_pixels=max_pixels, at_least=_DRAFT_FACTOR * short)
    width, height = image.info.get("extent", image.size)
    # Sizes as torchvision's Resize rounds them
    columns = short if width <= height else int(short * width / height)
    rows = short if height <= width else int(short * height / width)
    left, top = int(crop_offset(params.x, columns - resolution)), int(crop_offset(params.y, rows - resolution))
    box = left * width / columns, top * height / rows, (left + resolution) * width / columns
    image = resample(image, (resolution, resolution), (*box, (top + resolution) * height / rows))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if params.flip else image


@dataclass(frozen=True)
class Batch:
    """Images of a forward pass, on the CPU (pinned where there is a GPU) or on the device."""

    images: Tensor
    """(B, 3, R, R) uint8."""
    augmentation: Augmentation | None
    """What `to_model_input` still has to apply."""
    indices: Tensor
    """(B) int64, numbers in the index."""
    variants: Tensor
    """(B) int64, which random variant of the image: with number and seed it determines every pixel."""
    skipped: list[tuple[str, str]]
    """Names of unreadable images and why; in training each was replaced by another."""
    targets: Any = None
    """Teacher's targets, where they are cached."""


def to_model_input(batch: Batch, device: torch.device | str) -> Tensor:
    """Return the model's input (B, 3, R, R), float32 on `device`: augmented if that is left to do, and normalised.

    The device is not waited for.
    """
    images = batch.images.to(device, non_blocking=True)
    if batch.augmentation is not None:
        images = augment_batch(images, batch.augmentation)
    return normalize(images.contiguous())


class _BatchPlan(NamedTuple):
    """Images of a batch to come, and the variant of each."""

    resolution: int
    images: Sequence[int]
    variants: Sequence[int]


class _CropTask(NamedTuple):
    """A part of a batch for a worker; its pixels go to a slot of the shared memory."""

    number: int
    resolution: int
    images: Sequence[int]
    variants: Sequence[int]


class _CropResult(NamedTuple):
    """What a worker made of a task; `pixels` only if they are not in shared memory."""

    images: list[int]
    params: list[TransformParams]
    skipped: list[tuple[str, str]]
    pixels: NDArray[np.uint8] | None
    error: str = ""


class _CropDecoder:
    """Decodes the images of a task, in a worker process."""

    def __init__(
        self,
        index: ImageIndex,
        *,
        seed: int = 0,
        short_side: float,
        crops: tuple[float, float] | None = None,
        augment: AugmentMode,
        max_pixels: int,
        apply_op: bool = True,
        replace: bool,
        slots: int = 0,
    ) -> None:
        self.index, self.seed, self.short_side, self.crops, self.augment = index, seed, short_side, crops, augment
        self.max_pixels, self.apply_op, self.replace = max_pixels, apply_op, replace
        # Anonymous memory that forked processes share: it is not taken from /dev/shm, of which containers have little.
        self.shared = mmap.mmap(-1, slots * _SLOT_BYTES) if slots else None
        self.slots = slots

    def slot(self, task: _CropTask) -> NDArray[np.uint8] | None:
        """Return the shared memory for a task's pixels, None where there is none or not enough."""
        shape = len(task.images), task.resolution, task.resolution, 3
        if self.shared is None or math.prod(shape) > _SLOT_BYTES:
            return None
        offset = task.number % self.slots * _SLOT_BYTES
        return np.frombuffer(self.shared, np.uint8, math.prod(shape), offset).reshape(shape)

    def __call__(self, task: _CropTask) -> _CropResult:
        slot = self.slot(task)
        shape = len(task.images), task.resolution, task.resolution, 3
        pixels = np.empty(shape, np.uint8) if slot is None else slot
        result = _CropResult([], [], [], pixels if slot is None else None)
        for first, variant in zip(task.images, task.variants, strict=True):
            for attempt in range(MAX_FAILURES):
                image = replacement(len(self.index), self.seed, first, variant, attempt) if attempt else first
                params = sample_transform(self.seed, image, variant, self.augment)
                try:
                    pixels[len(result.images)] = self.load(image, params, task.resolution)
                except Exception as error:  # no image may end the run
                    name = self.index.name(image)
                    result.skipped.append((name, describe_error(error, name)))
                    if not self.replace:
                        break
                else:
                    result.images.append(image)
                    result.params.append(params)
                    break
            else:
                return result._replace(error=too_many_failures(*result.skipped[-1]), pixels=None)
        return result

    def load(self, image: int, params: TransformParams, resolution: int) -> NDArray[np.uint8]:
        short_side = self.short_side if self.crops is None else 1 / np.interp(params.scale, (0, 1), self.crops)
        crop = load_crop(self.index.read(image), params, resolution, float(short_side), self.max_pixels)
        return np.asarray(augment_image(crop, params.op, params.strength) if self.apply_op else crop)


def too_many_failures(name: str, reason: str) -> str:
    """Return the message of a run that is aborted because of unreadable images."""
    return f"{MAX_FAILURES} pictures in a row cannot be used. The last is {name}: {reason}"


class ImageLoader:
    """Batches of an index, decoded ahead by `workers` processes (0: by this one), which end with the `with` block.

    `plans` gives the batches to make; iterating again starts over.
    """

    def __init__(
        self,
        decoder: Callable[..., _CropDecoder],
        plans: Callable[[], Iterator[_BatchPlan]],
        batch_size: int,
        workers: int,
    ) -> None:
        self._task_images = max(1, min(_TASK_IMAGES, math.ceil(batch_size / max(1, workers))))
        # Two batches ahead, shared by the workers
        self._prefetch = max(2, math.ceil(2 * batch_size / (self._task_images * max(1, workers))))
        self._fork = sys.platform == "linux"
        # One slot more than tasks under way: a slot is read before the task after those is begun.
        self._decoder = decoder(slots=workers * self._prefetch + 1 if workers and self._fork else 0)
        self._plans, self._workers = plans, workers
        self._pool: WorkerPool[_CropTask, _CropResult] | None = None

    def __enter__(self) -> ImageLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        pending = deque[tuple[_BatchPlan, _CropTask]]()

        def tasks() -> Iterator[_CropTask]:
            for plan, task in self._tasks():
                pending.append((plan, task))
                yield task

        self._pool = pool = WorkerPool(self._decoder, tasks(), self._workers, self._prefetch, self._fork)
        batches = self._collect(pool, pending)
        try:
            yield from _prefetch_one(batches) if self._workers else batches
        finally:
            if self._pool is pool:  # and not that of a later loop
                self.close()

    def _tasks(self) -> Iterator[tuple[_BatchPlan, _CropTask]]:
        """Split batches into tasks that fit in a slot, numbered through."""
        number = 0
        for plan in self._plans():
            size = max(1, min(self._task_images, _SLOT_BYTES // (3 * plan.resolution**2)))
            for start in range(0, len(plan.images), size):
                part = slice(start, start + size)
                yield plan, _CropTask(number, plan.resolution, plan.images[part], plan.variants[part])
                number += 1

    def _collect(self, results: Iterator[_CropResult], pending: deque[tuple[_BatchPlan, _CropTask]]) -> Iterator[Batch]:
        """Assemble batches from the results of their tasks."""
        images, collected, asked = torch.empty(0), list[_CropResult](), 0
        while (result := self._next(results)) is not None:
            plan, task = pending.popleft()
            if result.error:
                raise DataError(f"{result.error}. Check the sources and data.max_pixels")
            if not asked:
                shape = len(plan.images), plan.resolution, plan.resolution, 3
                images, collected = torch.empty(shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available()), []
            pixels = result.pixels if result.pixels is not None else self._decoder.slot(task)
            assert pixels is not None
            start, count = sum(len(other.images) for other in collected), len(result.images)
            # Copied by numpy: torch would use a thread per core, which the workers need.
            images.numpy()[start : start + count] = pixels[:count]
            collected.append(result)
            asked += len(task.images)
            if asked == len(plan.images):
                yield self._to_batch(images[: start + count], plan, collected)
                asked = 0

    @staticmethod
    def _next(results: Iterator[_CropResult]) -> _CropResult | None:
        try:
            return next(results, None)
        except WorkerDiedError as error:
            reason = "Memory may be short (fewer data.workers need less), or somebody killed it"
            raise DataError(f"a process that reads pictures has died: {error}. {reason}") from error

    def _to_batch(self, images: Tensor, plan: _BatchPlan, results: list[_CropResult]) -> Batch:
        params = [each for result in results for each in result.params]
        skipped = [problem for result in results for problem in result.skipped]
        indices = torch.tensor([image for result in results for image in result.images], dtype=torch.int64)
        augmentation = None
        if not self._decoder.apply_op:
            strengths = torch.tensor([each.strength for each in params], dtype=torch.float64)
            augmentation = Augmentation(torch.tensor([each.op for each in params], dtype=torch.int64), strengths)
        variants = torch.tensor(plan.variants, dtype=torch.int64)[: len(indices)]
        return Batch(images.permute(0, 3, 1, 2), augmentation, indices, variants, skipped)


def _prefetch_one(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Assemble each batch in a thread while the one before it is in use."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(1)
    stop = threading.Event()

    def work() -> None:
        try:
            for batch in batches:
                ready.put(batch)
                if stop.is_set():
                    return
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while (batch := ready.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        stop.set()
        with suppress(queue.Empty):
            ready.get_nowait()  # so that the thread can put its last one
        thread.join(_JOIN_SECONDS)  # it may wait for a worker that hangs, which is killed after this


class TrainLoader(ImageLoader):
    """The batches of forward passes `start`, `start` + 1, … of one process, without end.

    `resolution_of` gives the resolution of a forward pass. With `crops` the side of each crop is random too, as a share
    of the image's short side between these two, in place of 1 / `short_side`. `num_variants` limits the random variants
    of an image: epochs take them in turn. With `where="gpu"` the operation of TrivialAugmentWide is left to
    `to_model_input`, with the same pixels.
    """

    def __init__(
        self,
        index: ImageIndex,
        *,
        resolution_of: Callable[[int], int],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        short_side: float = 1.125,
        crops: tuple[float, float] | None = None,
        augment: AugmentMode = "trivial",
        num_variants: int | None = None,
        workers: int = 8,
        max_pixels: int = MAX_PIXELS,
        start: int = 0,
        where: Literal["cpu", "gpu"] = "cpu",
    ) -> None:
        sampler = EpochSampler(len(index), batch_size, rank, world_size, seed)

        def plans() -> Iterator[_BatchPlan]:
            forward = start
            while True:
                images, epochs = sampler(forward)
                variants = [epoch % num_variants for epoch in epochs] if num_variants else epochs
                yield _BatchPlan(resolution_of(forward), images, variants)
                forward += 1

        decoder = functools.partial(
            _CropDecoder, index, seed=seed, short_side=short_side, crops=crops, augment=augment, max_pixels=max_pixels,
            apply_op=where == "cpu" or augment in ("flip", "none"), replace=True,
        )  # fmt: skip
        super().__init__(decoder, plans, batch_size, workers)


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

    def plans() -> Iterator[_BatchPlan]:
        for start in range(rank * batch_size, len(index), world_size * batch_size):
            images = range(start, min(start + batch_size, len(index)))
            yield _BatchPlan(resolution, images, [0] * len(images))

    decoder = functools.partial(
        _CropDecoder, index, short_side=short_side, augment="none", max_pixels=max_pixels, replace=False
    )
    return ImageLoader(decoder, plans, batch_size, workers)
