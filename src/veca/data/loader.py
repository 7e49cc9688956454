"""Batches of pictures for training, decoded by worker processes; `draws.py` says which, and how each is seen.

Shapes: B pictures, R rows and columns.
"""

from __future__ import annotations

import functools
import math
import mmap
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from veca.data.augment import Augmentation, augment_batch, augment_image
from veca.data.index import DataError, Pictures
from veca.data.sampler import Augment, Stream, View, place, replacement, view_of
from veca.data.sources import as_is, as_text, begin, end, init_worker
from veca.images import MAX_PIXELS, MEAN, STD, ImageError, open_image, resample
from veca.teachers import Targets

__all__ = [
    "Batch",
    "Batches",
    "DataError",
    "Pictures",
    "TrainBatches",
    "to_model_input",
    "validation_batches",
]

MOST_FAILURES = 100
"""So many pictures in a row that cannot be used are no accident."""
_TOGETHER = 16
"""Pictures that a worker hands over at a time."""
_SLOT = _TOGETHER * 3 * 1024**2
"""Bytes of shared memory for them: as much as they take at 1024. What is not used is address space and no memory."""
_PATIENCE = 10.0
"""Seconds that a thread which waits for a worker is waited for."""
_SPARE = 2
"""A JPEG is decoded at a fraction of its size as long as this many pixels are left for each one of the result."""


def see(source: str | bytes, view: View, resolution: int, short_side: float, max_pixels: int) -> Image.Image:
    """Open a picture, resize its short side to `short_side` × resolution, crop and flip it; no more is decoded or
    resized than that takes. The operation of the view is left to do.
    """
    short = round(short_side * resolution)
    image = open_image(source, max_pixels=max_pixels, at_least=_SPARE * short)
    width, height = image.info.get("extent", image.size)
    # The sizes that torchvision's Resize gives.
    columns = short if width <= height else int(short * width / height)
    rows = short if height <= width else int(short * height / width)
    left, top = place(view.across, columns - resolution), place(view.down, rows - resolution)
    box = left * width / columns, top * height / rows, (left + resolution) * width / columns
    image = resample(image, (resolution, resolution), (*box, (top + resolution) * height / rows))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if view.flip else image


@dataclass(frozen=True)
class Batch:
    """Pictures on the CPU, pinned where there is a GPU."""

    images: Tensor
    """(B, 3, R, R) uint8, in the order of channels_last."""
    augmentation: Augmentation | None
    """What `to_model_input` is still to do to each; None: nothing."""
    indices: Tensor
    """(B) int64, their numbers among all pictures."""
    views: Tensor
    """(B) int64, which view of the picture: with the number and the seed it fixes every pixel."""
    skipped: list[tuple[str, str]]
    """Names of pictures that could not be used and why; in training another took the place of each."""
    targets: Targets | None = None
    """What the teacher says of them, where that is known already."""


@functools.cache
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    return mean, std


def to_model_input(batch: Batch, device: torch.device | str) -> Tensor:
    """What the model takes: (B, 3, R, R) float32 on `device`, augmented if that is still to do, normalised.

    The device is not waited for.
    """
    images = batch.images.to(device, non_blocking=True)
    if batch.augmentation is not None:
        images = augment_batch(images, batch.augmentation)
    return normalized(images)


def normalized(images: Tensor) -> Tensor:
    """Pictures (B, 3, R, R) uint8 as the model takes them."""
    mean, std = _statistics(images.device)
    return ((images.contiguous().float() / 255) - mean) / std


class _Task(NamedTuple):
    """Pictures for a worker: places in a batch, in one stretch, that go to a slot of the shared memory."""

    number: int
    resolution: int
    pictures: Sequence[int]
    views: Sequence[int]


class _Done(NamedTuple):
    """What a worker made of a task: which pictures these are in the end; their pixels, if they are in no slot."""

    pictures: list[int]
    views: list[View]
    skipped: list[tuple[str, str]]
    pixels: NDArray[np.uint8] | None
    failed: str = ""


class _Seer(Dataset[_Done]):
    """Indexed by a task, in a worker process."""

    def __init__(
        self,
        pictures: Pictures,
        seed: int,
        short_side: float,
        crops: tuple[float, float] | None,
        augment: Augment,
        max_pixels: int,
        here: bool,
        replace: bool,
        slots: int,
    ) -> None:
        self.pictures, self.seed, self.short_side, self.augment = pictures, seed, short_side, augment
        self.crops = crops
        self.max_pixels, self.here, self.replace = max_pixels, here, replace
        # Anonymous memory that forked processes share: it is not taken from /dev/shm, of which containers have little.
        self.shared = mmap.mmap(-1, slots * _SLOT) if slots else None
        self.slots = slots

    def slot(self, task: _Task, count: int) -> NDArray[np.uint8] | None:
        shape = count, task.resolution, task.resolution, 3
        if self.shared is None or math.prod(shape) > _SLOT:
            return None
        offset = task.number % self.slots * _SLOT
        return np.frombuffer(self.shared, np.uint8, math.prod(shape), offset).reshape(shape)

    def __getitem__(self, task: _Task) -> _Done:
        shape = len(task.pictures), task.resolution, task.resolution, 3
        slot = self.slot(task, len(task.pictures))
        pixels = slot if slot is not None else np.empty(shape, np.uint8)
        done = _Done([], [], [], None if slot is not None else pixels)
        for first, epoch in zip(task.pictures, task.views, strict=True):
            for attempt in range(MOST_FAILURES):
                picture = first if not attempt else replacement(len(self.pictures), self.seed, first, epoch, attempt)
                view = view_of(self.seed, picture, epoch, self.augment)
                try:
                    pixels[len(done.pictures)] = self.see(picture, view, task.resolution)
                except Exception as error:  # whatever one picture does, the run goes on
                    name = self.pictures.name(picture)
                    done.skipped.append((name, _reason(error, name)))
                    if not self.replace:
                        break
                else:
                    done.pictures.append(picture)
                    done.views.append(view)
                    break
            else:
                name, reason = done.skipped[-1]
                failed = f"{MOST_FAILURES} pictures in a row cannot be used. The last is {name}: {reason}"
                return done._replace(failed=failed, pixels=None)
        return done

    def see(self, picture: int, view: View, resolution: int) -> NDArray[np.uint8]:
        short_side = self.short_side if self.crops is None else 1 / np.interp(view.size, (0, 1), self.crops)
        image = see(self.pictures.read(picture), view, resolution, float(short_side), self.max_pixels)
        return np.asarray(augment_image(image, view.op, view.strength) if self.here else image)


def _reason(error: Exception, name: str) -> str:
    reason = str(error) if isinstance(error, ImageError) else f"{type(error).__name__}: {error}"
    return as_text(reason.removeprefix("<bytes>: ").removeprefix(f"{name}: "))[:1000]


class _Plan(NamedTuple):
    """A batch to come."""

    resolution: int
    pictures: Sequence[int]
    views: Sequence[int]


def _tasks(plans: Iterator[_Plan], most: int) -> Iterator[tuple[_Plan, int, _Task]]:
    """Each batch in stretches that fit in a slot, with their start in it, numbered through."""
    number = 0
    for plan in plans:
        each = max(1, min(most, _SLOT // (3 * plan.resolution**2)))
        for start in range(0, len(plan.pictures), each):
            stretch = slice(start, start + each)
            yield plan, start, _Task(number, plan.resolution, plan.pictures[stretch], plan.views[stretch])
            number += 1


class Batches:
    """What there is to iterate over, made in advance by `workers` processes (0: by this one) while the block runs."""

    def __init__(self, seer: Callable[[int], _Seer], plans: Callable[[], Iterator[_Plan]], batch: int, workers: int):
        self._together = max(1, min(_TOGETHER, math.ceil(batch / max(1, workers))))
        self._ahead = max(2, math.ceil(2 * batch / (self._together * max(1, workers))))  # of each worker: two batches
        forks = sys.platform == "linux"
        # One slot more than tasks under way: a slot is read before the task after those is begun.
        self._seer = seer(workers * self._ahead + 1 if workers and forks else 0)
        self._plans, self._workers = plans, workers
        self._context = "fork" if workers and forks else None
        self._records: Any = None

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        end(self._records)
        self._records = None

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        waiting: list[tuple[_Plan, int, _Task]] = []

        def tasks() -> Iterator[_Task]:
            for entry in _tasks(self._plans(), self._together):
                waiting.append(entry)
                yield entry[2]

        loader = DataLoader(
            self._seer,
            batch_size=None,
            sampler=tasks(),
            num_workers=self._workers,
            collate_fn=as_is,
            worker_init_fn=_init_worker,
            prefetch_factor=self._ahead if self._workers else None,
            multiprocessing_context=self._context,
            generator=torch.Generator(),  # so that the caller's random numbers stay as they were
        )
        with _no_news_of_children():
            self._records = records = begin(loader)
        batches = self._collected(records, waiting)
        try:
            yield from _meanwhile(batches) if self._workers else batches
        finally:
            if self._records is records:  # and not those of a later loop
                self.close()

    def _collected(self, records: Iterator[_Done], waiting: list[tuple[_Plan, int, _Task]]) -> Iterator[Batch]:
        images, made = torch.empty(0), list[_Done]()
        while (done := self._next(records)) is not None:
            plan, start, task = waiting.pop(0)
            if done.failed:
                raise DataError(f"{done.failed}. Check the sources and data.max_pixels")
            if start == 0:
                shape = len(plan.pictures), plan.resolution, plan.resolution, 3
                images, made = torch.empty(shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available()), []
            pixels = done.pixels if done.pixels is not None else self._seer.slot(task, len(task.pictures))
            assert pixels is not None
            count, filled = len(done.pictures), sum(len(other.pictures) for other in made)
            # Not torch's copy: its threads, one per core, would get in the way of the workers.
            images.numpy()[filled : filled + count] = pixels[:count]
            made.append(done)
            if start + len(task.pictures) == len(plan.pictures):
                yield self._batch(images[: filled + count], plan, made)

    @staticmethod
    def _next(records: Iterator[_Done]) -> _Done | None:
        try:
            return next(records, None)
        except RuntimeError as error:
            if "worker" not in str(error):
                raise
            reason = "Memory may be short (fewer data.workers need less), or somebody killed it"
            raise DataError(f"a process that reads pictures has died: {error}. {reason}") from error

    def _batch(self, images: Tensor, plan: _Plan, made: list[_Done]) -> Batch:
        views = [view for done in made for view in done.views]
        skipped = [problem for done in made for problem in done.skipped]
        pictures = torch.tensor([picture for done in made for picture in done.pictures], dtype=torch.int64)
        augmentation = None
        if not self._seer.here:
            strengths = torch.tensor([view.strength for view in views], dtype=torch.float64)
            augmentation = Augmentation(torch.tensor([view.op for view in views], dtype=torch.int64), strengths)
        which = torch.tensor(plan.views, dtype=torch.int64)[: len(pictures)]
        return Batch(images.permute(0, 3, 1, 2), augmentation, pictures, which, skipped)


def _meanwhile(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, each put together by a thread while the one before it is in use."""
    made: queue.Queue[Batch | BaseException | None] = queue.Queue(1)
    stop = threading.Event()

    def work() -> None:
        try:
            for batch in batches:
                made.put(batch)
                if stop.is_set():
                    return
            made.put(None)
        except BaseException as error:
            made.put(error)

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while (found := made.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        stop.set()
        with suppress(queue.Empty):
            made.get_nowait()  # room for the last one
        thread.join(_PATIENCE)  # it may wait for a worker that hangs, which is killed after this


@contextmanager
def _no_news_of_children() -> Iterator[None]:
    """Torch would have a worker's death raised wherever the main process is at that moment; `next` asks for itself.

    So its handler of SIGCHLD, be it from this loader or from one before, does not stay.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        of_torch = getattr(before, "__module__", "") == signal_handling.__name__
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if of_torch else before)


def _init_worker(number: int) -> None:
    init_worker(number)
    # Memory of pictures is kept for the next ones; getting new memory is a quarter of what a JPEG takes.
    Image.core.set_blocks_max(4)  # type: ignore[attr-defined]


class TrainBatches(Batches):
    """The batches of forward passes `start`, `start` + 1, … of one process, without end; ends its workers when the
    block it is used in does.

    `resolution_of` says at which resolution a forward pass is. With `crops` the side of each crop is drawn as well, as
    a share of the picture's short side between these two, in place of 1 / `short_side`. `views` makes the random views
    of a picture so many and no more: epochs take them in turn. With `where="gpu"` the operation of TrivialAugmentWide
    is left to `to_model_input`, with the same pixels.
    """

    def __init__(
        self,
        pictures: Pictures,
        *,
        resolution_of: Callable[[int], int],
        batch: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        short_side: float = 1.125,
        crops: tuple[float, float] | None = None,
        augment: Augment = "trivial",
        views: int | None = None,
        workers: int = 8,
        max_pixels: int = MAX_PIXELS,
        start: int = 0,
        where: Literal["cpu", "gpu"] = "cpu",
    ) -> None:
        here = where == "cpu" or augment in ("flip", "none")

        def plans() -> Iterator[_Plan]:
            forward = start
            while True:
                chosen, epochs = stream(forward)
                yield _Plan(resolution_of(forward), chosen, [e % views for e in epochs] if views else epochs)
                forward += 1

        stream = Stream(len(pictures), batch, rank, world, seed)
        super().__init__(
            functools.partial(_Seer, pictures, seed, short_side, crops, augment, max_pixels, here, True),
            plans,
            batch,
            workers,
        )


def validation_batches(
    pictures: Pictures,
    resolution: int,
    batch: int,
    rank: int = 0,
    world: int = 1,
    workers: int = 8,
    short_side: float = 1.125,
    max_pixels: int = MAX_PIXELS,
) -> Batches:
    """The centre of every picture once, in order, dealt to the processes batch by batch.

    A batch is short where pictures run out or cannot be used: those are in its `skipped`. A process may get none.
    """

    def plans() -> Iterator[_Plan]:
        for start in range(rank * batch, len(pictures), world * batch):
            chosen = range(start, min(start + batch, len(pictures)))
            yield _Plan(resolution, chosen, [0] * len(chosen))

    seer = functools.partial(_Seer, pictures, 0, short_side, None, "none", max_pixels, True, False)
    return Batches(seer, plans, batch, workers)
