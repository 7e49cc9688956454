"""Decode and transform images in worker processes: single records for embedding, batches for training.

Shapes: B images, R rows and columns.
"""

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
from functools import partial
from itertools import chain, count, tee
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.data.index import DataError, ImageIndex
from veca.data.remote import SourceError, as_text, is_remote, read_remote, read_span, retry
from veca.data.sampler import MAX_FAILURES, BatchPlan, TrainSampler, TransformParams, crop_offset, sample_transforms
from veca.data.sources import Item
from veca.data.transforms import Augmentation, augment_batch, augment_image
from veca.data.workers import WorkerDiedError, WorkerPool
from veca.images import MAX_PIXELS, Fit, ImageError, normalize, open_image, resample
from veca.images.load import Decoder, load_pixels

# Encoded images on their way to worker processes, together; a larger one is sent alone
_SENT_BYTES = 1 << 27
# Images that a worker returns at a time
_TASK_IMAGES = 16
# Shared memory for them, enough at 1024 × 1024. Pages that are never written take no memory.
_SLOT_BYTES = _TASK_IMAGES * 3 * 1024**2


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


def _decode_item(size: int, fit: Fit, max_pixels: int, item: Item | None, decoder: Decoder = "pillow") -> Record | None:
    if item is None:
        return None
    try:
        if item.error:
            raise ImageError(item.error)
        source: str | bytes = item.path if item.data is None else item.data
        if item.span is not None:
            source = read_span(item.path, *item.span)
        elif is_remote(item.path):
            source = retry(item.path, lambda: read_remote(item.path, item.file_size))
        with warnings.catch_warnings(action="ignore"):  # Pillow may emit tens of thousands for one file
            pixels, original = load_pixels(source, size, fit, max_pixels=max_pixels, decoder=decoder)
        # An array, not a tensor: tensors travel in shared memory, of which containers have little.
        return Record(item.name, original, pixels.numpy(), stamp=item.stamp, number=item.number)
    except SourceError:
        raise
    except Exception as error:  # no image may end the run
        return Record(item.name, error=describe_error(error, item.path), stamp=item.stamp, number=item.number)


@contextmanager
def decode_items(
    items: Iterator[Item], size: int, fit: Fit, max_pixels: int, workers: int
) -> Iterator[Iterator[Record]]:
    """Decode and fit `items` in `workers` processes (0: in this one) while the block runs; records keep their order."""
    sizes = deque[int]()  # of the items on their way

    def limit_bytes() -> Iterator[Item | None]:
        for item in items:
            size = len(item.data or b"")
            # `WorkerPool` limits only the number of tasks. It asks for one whenever a record comes back, and cannot be
            # made to wait: while too many bytes are on their way it is given tasks without work.
            while any(sizes) and sum(sizes) + size > _SENT_BYTES:
                yield None
            sizes.append(size)
            yield item

    def receive(records: Iterable[Record | None]) -> Iterator[Record]:
        for record in records:
            if record is not None:
                sizes.popleft()
                yield record

    with WorkerPool(partial(_decode_item, size, fit, max_pixels), limit_bytes(), workers, prefetch=4) as records:
        yield receive(records)


# Training: an index of images to batches


def load_crop(
    source: str | bytes, params: TransformParams, resolution: int, short_side: float, max_pixels: int
) -> Image.Image:
    """Open an image, resize its short side to `short_side` × resolution, crop and flip it.

    Nothing outside the crop is resized, and a large JPEG is decoded at reduced size. The operation of
    TrivialAugmentWide is left to the caller.
    """
    short = round(short_side * resolution)
    # A JPEG is decoded at reduced size as long as two pixels are left for each one of the result.
    image = open_image(source, max_pixels=max_pixels, at_least=2 * short)
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


def too_many_failures(name: str, reason: str) -> str:
    """Return the message of a run that is aborted because of unreadable images."""
    return f"{MAX_FAILURES} pictures in a row cannot be used. The last is {name}: {reason}"


@dataclass(eq=False)
class ImageLoader(AbstractContextManager["ImageLoader"]):
    """Batches of an index, decoded ahead by `workers` processes (0: by this one), which end with the `with` block.

    Made by `train_loader` and `validation_loader`. Iterating again starts over. Unreadable images are skipped, or
    replaced by others if `replace`. Without `apply_op` the operation of TrivialAugmentWide is left to `to_model_input`,
    with the same pixels.
    """

    index: ImageIndex
    sampler: TrainSampler
    plans: Iterable[BatchPlan]
    workers: int
    max_pixels: int
    replace: bool
    apply_op: bool = True
    _pool: WorkerPool[Any] | None = None
    # Slots for the pixels of tasks under way, shared by forked processes
    _shared: mmap.mmap | None = None

    def __post_init__(self) -> None:
        batch_size, workers = self.sampler.batch_size, max(1, self.workers)
        self._task_images = max(1, min(_TASK_IMAGES, math.ceil(batch_size / workers)))
        # Two batches ahead, shared by the workers
        self._prefetch = max(2, math.ceil(2 * batch_size / (self._task_images * workers)))
        if self.workers and sys.platform == "linux":
            # Anonymous memory: it is not taken from /dev/shm, of which containers have little. One slot more than tasks
            # under way: a slot is read before the task after those is begun.
            self._shared = mmap.mmap(-1, (workers * self._prefetch + 1) * _SLOT_BYTES)

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
            yield from _prefetch_batches(batches) if self.workers else batches
        finally:
            if self._pool is pool:  # and not that of a later loop
                self.__exit__()

    def _split(self, plan: BatchPlan) -> Iterator[BatchPlan]:
        """Split a batch into tasks, the pixels of which fit in a slot."""
        size = max(1, min(self._task_images, _SLOT_BYTES // (3 * plan.resolution**2)))
        for start in range(0, len(plan.images), size):
            part = slice(start, start + size)
            yield BatchPlan(plan.resolution, plan.images[part], plan.variants[part])

    def _slot(self, number: int, plan: BatchPlan) -> NDArray[np.uint8] | None:
        """Return the shared memory for the pixels of task `number`, None where there is none or not enough."""
        if self._shared is None or math.prod(plan.shape) > _SLOT_BYTES:
            return None
        return np.ndarray(plan.shape, np.uint8, self._shared, number * _SLOT_BYTES % len(self._shared))

    def _decode(self, task: tuple[int, BatchPlan]) -> tuple[list[int], list[tuple[str, str]], NDArray[np.uint8] | None]:
        """Decode a task, in a worker: images that were read, those skipped, and pixels unless they are in its slot."""
        number, plan = task
        slot = self._slot(number, plan)
        pixels = np.empty(plan.shape, np.uint8) if slot is None else slot
        images, skipped, sampler = list[int](), list[tuple[str, str]](), self.sampler
        for first, variant in zip(plan.images, plan.variants, strict=True):
            for image in sampler.candidates(first, variant) if self.replace else (first,):
                params = sample_transforms(sampler.seed, [image], [variant], sampler.augment).item()
                short = 1 / np.interp(params.scale, (0, 1), sampler.crops) if sampler.crops else sampler.short_side
                try:
                    crop = load_crop(self.index.read(image), params, plan.resolution, float(short), self.max_pixels)
                    crop = augment_image(crop, params.op, params.strength) if self.apply_op else crop
                    pixels[len(images)] = np.asarray(crop)
                    images.append(image)
                    break
                except Exception as error:  # no image may end the run
                    name = self.index.name(image)
                    skipped.append((name, describe_error(error, name)))
            else:
                if self.replace:  # `_collect` will abort the run
                    break
        return images, skipped, pixels if slot is None else None

    def _collect(self, results: Iterator[Any], plans: Iterator[BatchPlan]) -> Iterator[Batch]:
        """Assemble batches from the results of their tasks."""
        numbers = count()
        try:
            for plan in plans:
                pixels = torch.empty(plan.shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
                images, skipped = list[int](), list[tuple[str, str]]()
                for part in self._split(plan):
                    slot: Any = self._slot(next(numbers), part)
                    found, failed, data = next(results)
                    # Copied by numpy: torch would use a thread per core, which the workers need.
                    target = pixels.numpy()[len(images) : len(images) + len(found)]
                    target[:] = (slot if data is None else data)[: len(found)]
                    images += found
                    skipped += failed
                    if self.replace and len(found) < len(part.images):
                        raise DataError(f"{too_many_failures(*skipped[-1])}. Check the sources and data.max_pixels")
                variants, augmentation = plan.variants[: len(images)], None
                if not self.apply_op:
                    params = sample_transforms(self.sampler.seed, images, variants, self.sampler.augment)
                    augmentation = params.augmentation()
                indices, which = (torch.tensor(values, dtype=torch.int64) for values in (images, variants))
                yield Batch(pixels[: len(images)].permute(0, 3, 1, 2), augmentation, indices, which, skipped)
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
            for batch in chain(batches, (None,)):
                ready.put(batch)
                if stop.is_set():
                    return
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
        thread.join(10.0)  # it may wait for a worker that hangs, which is killed after this


def train_loader(
    index: ImageIndex, sampler: TrainSampler, workers: int = 8, max_pixels: int = MAX_PIXELS, where: str = "cpu"
) -> ImageLoader:
    """Load the batches of a sampler, without end; with `where="gpu"` TrivialAugmentWide is left to `to_model_input`."""
    apply_op = where == "cpu" or sampler.augment in ("flip", "none")
    return ImageLoader(index, sampler, sampler, workers, max_pixels, replace=True, apply_op=apply_op)


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
