"""Decode and transform images in worker processes: single records for embedding, batches for training.

Shapes: B images, R rows and columns.
"""

from __future__ import annotations

import math
import mmap
import queue
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import tee
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.data.index import DataError, ImageIndex
from veca.data.remote import SourceError, as_text, is_remote, read_remote, read_span, retry
from veca.data.sampler import MAX_FAILURES, BatchPlan, TrainSampler, TransformParams, crop_offset
from veca.data.sources import Item
from veca.data.transforms import Augmentation, augment_batch, augment_image
from veca.data.workers import WorkerDiedError, WorkerPool
from veca.images import MAX_PIXELS, Fit, ImageError, fit_image, normalize, open_image, resample, to_tensor

# Encoded images on their way to worker processes, together; a larger one is sent alone
_SENT_BYTES = 1 << 27
# Images that a worker returns at a time
_TASK_IMAGES = 16
# Shared memory for them, enough at 1024 × 1024. Pages that are never written take no memory.
_SLOT_BYTES = _TASK_IMAGES * 3 * 1024**2
# How long to wait for a thread that waits for a worker, which may hang and is killed after this
_JOIN_SECONDS = 10.0
# A JPEG is decoded at reduced size as long as this many pixels are left for each one of the result
_DRAFT_FACTOR = 2


def describe_error(error: Exception, name: str) -> str:
    """Return why an image cannot be read, without its name, fit for a table."""
    reason = str(error) if isinstance(error, ImageError) else f"{type(error).__name__}: {error}"
    return as_text(reason.removeprefix("<bytes>: ").removeprefix(f"{name}: "))[:1000]


# Where TrivialAugmentWide is applied
Where = Literal["cpu", "gpu"]


# Embedding: a stream of items to a stream of records


class Record(NamedTuple):
    """A decoded image, (3, height, width) uint8, with its original (width, height); or an error."""

    name: str
    size: tuple[int, int] = (0, 0)
    pixels: NDArray[np.uint8] | None = None
    error: str = ""
    stamp: str = ""
    number: int = 0


# A task without work; see `_ByteWindow`
_PADDING = Item("", number=-1)


@dataclass(frozen=True)
class _ItemDecoder:
    size: int
    fit: Fit
    max_pixels: int

    def __call__(self, item: Item) -> Record:
        if item.number == _PADDING.number:
            return Record("", number=item.number)
        try:
            with warnings.catch_warnings(action="ignore"):  # Pillow may emit tens of thousands for one file
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
        return retry(item.path, lambda: read_remote(item.path, item.file_size))
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

    # (B, 3, R, R) uint8
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


def to_model_input(batch: Batch, device: torch.device | str) -> Tensor:
    """Return the model's input (B, 3, R, R), float32 on `device`: augmented if that is left to do, and normalised.

    The device is not waited for.
    """
    images = batch.images.to(device, non_blocking=True)
    if batch.augmentation is not None:
        images = augment_batch(images, batch.augmentation)
    return normalize(images.contiguous())


class _CropTask(NamedTuple):
    """A part of a batch for a worker, whose pixels go to slot `number` modulo the slots of the shared memory."""

    number: int
    plan: BatchPlan


class _CropResult(NamedTuple):
    """The images of a task that were read; `pixels` only if they are not in shared memory."""

    images: list[int]
    skipped: list[tuple[str, str]]
    pixels: NDArray[np.uint8] | None
    error: str = ""


@dataclass
class _CropDecoder:
    """Decodes the images of a task, in a worker process.

    Unreadable images are skipped, or replaced by others if `replace`. Without `apply_op` the operation of
    TrivialAugmentWide is left to `to_model_input`, with the same pixels.
    """

    index: ImageIndex
    sampler: TrainSampler
    max_pixels: int
    replace: bool
    apply_op: bool = True
    # Slots for the pixels of tasks under way, shared by forked processes
    shared: mmap.mmap | None = None

    def slot(self, task: _CropTask) -> NDArray[np.uint8] | None:
        """Return the shared memory for a task's pixels, None where there is none or not enough."""
        shape = _pixel_shape(task.plan)
        if self.shared is None or math.prod(shape) > _SLOT_BYTES:
            return None
        offset = task.number * _SLOT_BYTES % len(self.shared)
        return np.frombuffer(self.shared, np.uint8, math.prod(shape), offset).reshape(shape)

    def __call__(self, task: _CropTask) -> _CropResult:
        slot = self.slot(task)
        pixels = np.empty(_pixel_shape(task.plan), np.uint8) if slot is None else slot
        result = _CropResult([], [], pixels if slot is None else None)
        for first, variant in zip(task.plan.images, task.plan.variants, strict=True):
            for image in self.sampler.candidates(first, variant):
                try:
                    pixels[len(result.images)] = self.load(image, variant, task.plan.resolution)
                except Exception as error:  # no image may end the run
                    name = self.index.name(image)
                    result.skipped.append((name, describe_error(error, name)))
                    if not self.replace:
                        break
                else:
                    result.images.append(image)
                    break
            else:
                return result._replace(error=too_many_failures(*result.skipped[-1]), pixels=None)
        return result

    def load(self, image: int, variant: int, resolution: int) -> NDArray[np.uint8]:
        sampler = self.sampler
        params = sampler.sample([image], [variant]).item()
        short_side = 1 / np.interp(params.scale, (0, 1), sampler.crops) if sampler.crops else sampler.short_side
        crop = load_crop(self.index.read(image), params, resolution, float(short_side), self.max_pixels)
        return np.asarray(augment_image(crop, params.op, params.strength) if self.apply_op else crop)


def _pixel_shape(plan: BatchPlan) -> tuple[int, int, int, int]:
    return len(plan.images), plan.resolution, plan.resolution, 3


def too_many_failures(name: str, reason: str) -> str:
    """Return the message of a run that is aborted because of unreadable images."""
    return f"{MAX_FAILURES} pictures in a row cannot be used. The last is {name}: {reason}"


class ImageLoader(AbstractContextManager["ImageLoader"]):
    """Batches of an index, decoded ahead by `workers` processes (0: by this one), which end with the `with` block.

    Made by `train_loader` and `validation_loader`. Iterating again starts over.
    """

    def __init__(self, decoder: _CropDecoder, plans: Iterable[BatchPlan], workers: int) -> None:
        self._decoder, self._plans, self._workers, self._fork = decoder, plans, workers, sys.platform == "linux"
        batch_size = decoder.sampler.batch_size
        self._task_images = max(1, min(_TASK_IMAGES, math.ceil(batch_size / max(1, workers))))
        # Two batches ahead, shared by the workers
        self._prefetch = max(2, math.ceil(2 * batch_size / (self._task_images * max(1, workers))))
        if workers and self._fork:
            # Anonymous memory: it is not taken from /dev/shm, of which containers have little. One slot more than tasks
            # under way: a slot is read before the task after those is begun.
            decoder.shared = mmap.mmap(-1, (workers * self._prefetch + 1) * _SLOT_BYTES)
        self._pool: WorkerPool[_CropTask, _CropResult] | None = None

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def __iter__(self) -> Iterator[Batch]:
        self.__exit__()
        sent, pending = tee(self._tasks())
        tasks = (task for _, task in sent)
        self._pool = pool = WorkerPool(self._decoder, tasks, self._workers, self._prefetch, self._fork)
        batches = self._collect(pool, pending)
        try:
            yield from _prefetch_batches(batches) if self._workers else batches
        finally:
            if self._pool is pool:  # and not that of a later loop
                self.__exit__()

    def _tasks(self) -> Iterator[tuple[BatchPlan, _CropTask]]:
        """Split batches into tasks that fit in a slot, numbered through."""
        number = 0
        for plan in self._plans:
            size = max(1, min(self._task_images, _SLOT_BYTES // (3 * plan.resolution**2)))
            for start in range(0, len(plan.images), size):
                part = slice(start, start + size)
                yield plan, _CropTask(number, BatchPlan(plan.resolution, plan.images[part], plan.variants[part]))
                number += 1

    def _collect(self, results: Iterator[_CropResult], tasks: Iterator[tuple[BatchPlan, _CropTask]]) -> Iterator[Batch]:
        """Assemble batches from the results of their tasks."""
        pixels, images, skipped, handled = torch.empty(0), list[int](), list[tuple[str, str]](), 0
        try:
            for result, (plan, task) in zip(results, tasks, strict=True):
                if result.error:
                    raise DataError(f"{result.error}. Check the sources and data.max_pixels")
                if not handled:
                    pixels = torch.empty(_pixel_shape(plan), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
                    images, skipped = [], []
                part = result.pixels if result.pixels is not None else self._decoder.slot(task)
                assert part is not None
                # Copied by numpy: torch would use a thread per core, which the workers need.
                pixels.numpy()[len(images) : len(images) + len(result.images)] = part[: len(result.images)]
                images += result.images
                skipped += result.skipped
                handled += len(task.plan.images)
                if handled == len(plan.images):
                    variants, handled = plan.variants[: len(images)], 0
                    augmentation = None
                    if not self._decoder.apply_op:
                        augmentation = self._decoder.sampler.sample(images, variants).augmentation()
                    numbers, which = (torch.tensor(values, dtype=torch.int64) for values in (images, variants))
                    yield Batch(pixels[: len(images)].permute(0, 3, 1, 2), augmentation, numbers, which, skipped)
        except RuntimeError as error:  # a builtin: an open loop may end with the interpreter, after this module is gone
            if not isinstance(error, WorkerDiedError):
                raise
            reason = "Memory may be short (fewer data.workers need less), or somebody killed it"
            raise DataError(f"a process that reads pictures has died: {error}. {reason}") from error


def _prefetch_batches(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Assemble each batch in a thread while the one before it is in use."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(1)
    stop = threading.Event()

    def assemble() -> None:
        try:
            for batch in batches:
                ready.put(batch)
                if stop.is_set():
                    return
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    # A daemon, unlike the threads of an executor: the interpreter does not wait for it if a worker hangs.
    thread = threading.Thread(target=assemble, name="batches", daemon=True)
    thread.start()
    try:
        while (batch := ready.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch
    finally:
        stop.set()
        with suppress(queue.Empty):
            ready.get_nowait()  # room for the batch that the thread is about to put
        thread.join(_JOIN_SECONDS)


def train_loader(
    index: ImageIndex, sampler: TrainSampler, workers: int = 8, max_pixels: int = MAX_PIXELS, where: Where = "cpu"
) -> ImageLoader:
    """Load the batches of a sampler, without end; with `where="gpu"` TrivialAugmentWide is left to `to_model_input`."""
    apply_op = where == "cpu" or sampler.augment in ("flip", "none")
    return ImageLoader(_CropDecoder(index, sampler, max_pixels, replace=True, apply_op=apply_op), sampler, workers)


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
    return ImageLoader(_CropDecoder(index, sampler, max_pixels, replace=False), plans, workers)
