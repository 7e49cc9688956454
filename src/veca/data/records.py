"""A stream of encoded images to a stream of records: read, checked and decoded in worker processes, on a GPU if asked.

    items → worker processes (read, check; decode and resize on the CPU) → GPU (decode and resize JPEGs) → records

Records keep the order of the items. What a worker returns lies in memory it shares with this process. Files are not
trusted: a JPEG goes to the GPU only if its header leaves no doubt (`veca.images.jpeg`), and to the CPU if its coded
data are damaged (`veca.kernels.jpeg_scan`); everything else is decoded by the worker.
"""

import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from veca.data.remote import SourceError, as_text, is_remote, read_remote, read_span, retry
from veca.data.sources import Item
from veca.data.workers import SharedSlots, WorkerPool
from veca.images import Fit, ImageError
from veca.images.decode import open_regular
from veca.images.jpeg import gpu_decodable, read_header
from veca.images.load import Decoder, apply_crop, load_pixels, open_for_fit, plan_fit
from veca.images.resize import Crop

if TYPE_CHECKING:
    from veca.data.gpu_decode import GpuDecoder

Decode = Literal["gpu", "cpu", "pillow"]
"""Which decoder: the GPU's for JPEGs, and the CPU's for the rest; the fast one of the CPU; exactly Pillow's pixels."""
DecodeChoice = Literal["auto", "gpu", "cpu", "pillow"]
"""A decoder as asked for; "auto" is "gpu" where there is one, or else "cpu"."""

# Encoded images on their way to worker processes, together; a larger one is sent alone
_SENT_BYTES = 1 << 27
# Images and encoded bytes of a task, where nothing else decides
TASK_IMAGES, _TASK_BYTES = 16, 3 << 23
# Images of a task where the GPU decodes, which takes them together
GPU_TASK_IMAGES = 256
# Memory that a worker shares for the results of a task; what does not fit is sent
_SLOT_BYTES = 1 << 25
# Largest image whose pixels a worker sends to be resized by the GPU
_RAW_PIXELS = 1 << 20
_JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif")
# Tasks that each worker is given in advance
_PREFETCH = 2
_SWITCH_SECONDS = 1e-4
# Tasks that the GPU is given in advance
_GPU_TASKS = 4


def describe_error(error: Exception, name: str) -> str:
    """Return why an image cannot be read, without its name, fit for a table."""
    reason = str(error) if isinstance(error, ImageError) else f"{type(error).__name__}: {error}"
    return as_text(reason.removeprefix("<bytes>: ").removeprefix(f"{name}: "))[:1000]


@dataclass(slots=True)
class Record:
    """An image, (3, height, width) uint8, with its original (width, height); or an error.

    `pixels` is an array; or, on the GPU, a tensor of several images and which of them it is. Of an image that the GPU
    is to finish, `source` is the JPEG file, or what was decoded of another, uint8 (height, width, 3), and `crop` what
    becomes of it. Where the worker has a model, `features` is what it made of an image of `shape` (height, width), and
    there are no pixels. `last` marks the last record of a task.
    """

    name: str
    size: tuple[int, int] = (0, 0)
    pixels: Any = None
    error: str = ""
    stamp: str = ""
    number: int = 0
    source: Any = None
    crop: Crop | None = None
    features: dict[str, NDArray[Any]] | None = None
    shape: tuple[int, int] = (0, 0)
    last: bool = False


@dataclass(frozen=True)
class RecordDecoder:
    """Makes the records of items."""

    size: int
    fit: Fit
    max_pixels: int
    decode: Decode = "pillow"

    def __call__(self, item: Item, gpu: bool = False) -> Record:
        """Read and decode an image; with `gpu`, what that can do is left to it."""
        try:
            if item.error:
                raise ImageError(item.error)
            source: str | bytes = item.path if item.data is None else item.data
            if item.span is not None:
                source = read_span(item.path, *item.span)
            elif is_remote(item.path):
                source = retry(item.path, lambda: read_remote(item.path, item.file_size))
            if gpu:
                with warnings.catch_warnings(action="ignore"):
                    return self._for_gpu(item, source)
            return self.from_source(item.name, source, item.stamp, item.number)
        except SourceError:
            raise
        except Exception as error:  # no image may end the run
            return Record(item.name, error=describe_error(error, item.path), stamp=item.stamp, number=item.number)

    def from_source(self, name: str, source: str | bytes, stamp: str = "", number: int = 0) -> Record:
        """Decode an image on the CPU."""
        try:
            with warnings.catch_warnings(action="ignore"):  # Pillow may emit tens of thousands for one file
                decoder: Decoder = "pillow" if self.decode == "pillow" else "cpu"
                pixels, size = load_pixels(source, self.size, self.fit, max_pixels=self.max_pixels, decoder=decoder)
        except Exception as error:  # no image may end the run
            path = source if isinstance(source, str) else name
            return Record(name, error=describe_error(error, path), stamp=stamp, number=number)
        # An array, not a tensor: tensors travel in shared memory, of which containers have little.
        _, height, width = pixels.shape
        return Record(name, size, pixels.numpy(), stamp=stamp, number=number, shape=(height, width))

    def _for_gpu(self, item: Item, source: str | bytes) -> Record:
        """The record of an image that the GPU decodes and resizes, or only resizes."""
        jpeg = read_jpeg(source, self.max_pixels) if self.decode == "gpu" else None
        if jpeg is not None:
            data, size, orientation = jpeg
            crop = plan_fit(*size, self.size, self.fit, self.max_pixels)._replace(orientation=orientation)
        if jpeg is None or crop.grows_first:
            decoder: Decoder = "pillow" if self.decode == "pillow" else "cpu"
            options = {"max_pixels": self.max_pixels, "decoder": decoder}
            image, crop, size = open_for_fit(source, self.size, self.fit, **options)  # type: ignore[arg-type]
            data, crop = for_resizing(image, crop)
        record = Record(item.name, size, stamp=item.stamp, number=item.number, shape=(crop.height, crop.width))
        record.source, record.crop = data, crop
        return record


def read_jpeg(source: str | bytes, max_pixels: int) -> tuple[NDArray[np.uint8], tuple[int, int], int] | None:
    """Read a JPEG that a GPU can decode: its bytes, upright (width, height) and orientation. None for other images."""
    if isinstance(source, str):
        if not source.lower().endswith(_JPEG_SUFFIXES):
            return None
        with open(source, "rb", opener=open_regular) as file:
            source = file.read(_SLOT_BYTES + 1)
    header = read_header(source)
    if len(source) > _SLOT_BYTES or not gpu_decodable(source, header, max_pixels):
        return None
    turned = header.orientation >= 5
    size = (header.height, header.width) if turned else (header.width, header.height)
    # Without what may follow the image, such as the second one of a stereo camera
    return np.frombuffer(source, np.uint8, header.end + 2), size, header.orientation


def for_resizing(image: Image.Image, crop: Crop) -> tuple[NDArray[np.uint8], Crop]:
    """Pixels (height, width, 3) of an image that a GPU is to resize; a large one is resized here."""
    if image.width * image.height > _RAW_PIXELS or crop.grows_first:
        image = apply_crop(crop, image)
        crop = Crop((0, 0, *image.size), *image.size, *image.size)
    return np.asarray(image), crop


class TaskSeconds(NamedTuple):
    """What a task took a worker: to read and decode, and to compute features."""

    decode: float
    compute: float


class _Task(NamedTuple):
    number: int
    items: Sequence[Item]
    gpu: bool


@dataclass(frozen=True)
class _Worker:
    """Does tasks, in a worker process; `compute` then makes features of the images of each."""

    decoder: RecordDecoder
    compute: Callable[[list[Record]], list[Record]] | None
    slots: SharedSlots | None

    def __call__(self, task: _Task | None) -> tuple[list[Record], TaskSeconds] | None:
        if task is None:
            return None
        began = time.perf_counter()
        records = [self.decoder(item, task.gpu) for item in task.items]
        decoded = time.perf_counter()
        if self.compute is not None:
            records = self.compute(records)
        computed = time.perf_counter()
        if self.slots is not None:
            fields, arrays = _arrays(records)
            for (record, key), placed in zip(fields, self.slots.put(task.number, arrays), strict=True):
                setattr(record, key, placed)
        return records, TaskSeconds(decoded - began + time.perf_counter() - computed, computed - decoded)

    def unpack(self, number: int, records: list[Record]) -> list[Record]:
        """Copy what a worker left in its slot, in this process."""
        if self.slots is not None:
            fields, arrays = _arrays(records)
            for (record, key), array in zip(fields, self.slots.get(number, arrays, copy=True), strict=True):
                setattr(record, key, array)
        records[-1].last = True
        return records


def _arrays(records: Iterable[Record]) -> tuple[list[tuple[Record, str]], list[Any]]:
    """The arrays of records, and the record and the name of the field of each."""
    fields, arrays = list[tuple[Record, str]](), list[Any]()
    for record in records:
        key = "pixels" if record.source is None else "source"
        if (array := getattr(record, key)) is not None:
            fields.append((record, key))
            arrays.append(array)
    return fields, arrays


def split_tasks(items: Iterable[Item], count: int) -> Iterator[list[Item]]:
    """Group items into tasks of `count`, or fewer where they bring many bytes."""
    task, size = list[Item](), 0
    for item in items:
        task.append(item)
        size += len(item.data or b"") if item.span is None else item.span[1]
        if len(task) == count or size > _TASK_BYTES:
            yield task
            task, size = [], 0
    if task:
        yield task


@contextmanager
def decode_tasks(
    tasks: Iterable[list[Item]],
    decoder: RecordDecoder,
    workers: int,
    *,
    gpu: "GpuDecoder | None" = None,
    compute: Callable[[list[Record]], list[Record]] | None = None,
    on_work: Callable[[int, TaskSeconds], object] = lambda images, seconds: None,
) -> Iterator[Iterator[Record]]:
    """Decode tasks in `workers` processes (0: in this one) while the block runs; records keep their order.

    `gpu` finishes what it can. `compute` is what becomes of the records of each task, in its worker where that is a
    fork of this process, or else in this one. `on_work` is told of each task how many images it has and what it took a
    worker.
    """
    sent = deque[tuple[int, int]]()  # number and bytes of the tasks on their way

    def limit_bytes() -> Iterator[_Task | None]:
        for number, items in enumerate(tasks):
            size = sum(len(item.data or b"") for item in items)
            # `WorkerPool` limits only the number of tasks. It asks for one whenever a result comes back, and cannot be
            # made to wait: while too many bytes are on their way it is given tasks without work.
            while any(size for _, size in sent) and sum(size for _, size in sent) + size > _SENT_BYTES:
                yield None
            sent.append((number, size))
            yield _Task(number, items, gpu is not None and gpu.works)

    def receive(results: Iterable[tuple[list[Record], TaskSeconds] | None]) -> Iterator[list[Record]]:
        for result in results:
            if result is not None:
                records, seconds = result
                records = work.unpack(sent.popleft()[0], records)
                if compute is not None and work.compute is None:
                    began = time.perf_counter()
                    records = compute(records)
                    seconds = seconds._replace(compute=time.perf_counter() - began)
                on_work(len(records), seconds)
                yield records

    fork = sys.platform == "linux"
    # Tasks without work have slots of nobody; those with work are at most as many as are under way.
    slots = SharedSlots(workers * _PREFETCH + 1, _SLOT_BYTES) if workers and fork else None
    work = _Worker(decoder, compute if fork or not workers else None, slots)
    with WorkerPool(work, limit_bytes(), workers, _PREFETCH, fork=fork and bool(workers)) as results:
        chunks = receive(results)
        yield _flatten(chunks) if gpu is None else _decode_on_gpu(chunks, decoder, gpu)


def _flatten(chunks: Iterable[list[Record]]) -> Iterator[Record]:
    for records in chunks:
        yield from records


def _decode_on_gpu(chunks: Iterator[list[Record]], decoder: RecordDecoder, gpu: "GpuDecoder") -> Iterator[Record]:
    """Have images finished by the GPU while the tasks after theirs are read."""
    waiting, interval = deque[Callable[[], list[Record]]](), sys.getswitchinterval()
    # By default a thread that is ready to run waits five milliseconds for another: longer than the GPU takes for a task
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        for records in chunks:
            waiting.append(gpu.submit(records, decoder))
            if len(waiting) > _GPU_TASKS:
                yield from waiting.popleft()()
        while waiting:
            yield from waiting.popleft()()
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def decode_items(
    items: Iterable[Item], size: int, fit: Fit, max_pixels: int, workers: int, decode: Decode = "pillow"
) -> Iterator[Iterator[Record]]:
    """Decode and fit `items` on the CPU, in `workers` processes (0: in this one), while the block runs."""
    with decode_tasks(
        split_tasks(items, TASK_IMAGES), RecordDecoder(size, fit, max_pixels, decode), workers
    ) as records:
        yield records
