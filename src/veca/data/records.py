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
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from veca.data.remote import SourceError, SpanReader, as_text, is_remote, read_remote, read_span, retry
from veca.data.sources import Item
from veca.data.workers import Placed, SharedSlots, WorkerPool
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


def read_item(item: Item, spans: SpanReader | None = None) -> str | bytes:
    """Return an encoded image as `open_image` takes it: the path of a local file, or bytes; `spans` reads archives."""
    if item.error:
        raise ImageError(item.error)
    if item.span is not None:
        return (spans.read if spans else read_span)(item.path, *item.span)
    if is_remote(item.path):
        return retry(item.path, lambda: read_remote(item.path, item.file_size))
    return item.path if item.data is None else item.data


@dataclass(slots=True)
class Record:
    """An image, (3, height, width) uint8, with its original (width, height); or an error.

    Of an image that the GPU is to finish, there are no `pixels`: `source` is the JPEG file, or what was decoded of
    another, uint8 (height, width, 3), and `crop` what becomes of it. `shape` is (height, width) of the result.
    """

    name: str
    size: tuple[int, int] = (0, 0)
    pixels: Any = None
    error: str = ""
    source: Any = None
    crop: Crop | None = None
    shape: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class ShapeGroup:
    """The images of a task that have one shape: their `pixels`, a sequence or a tensor; or what the GPU makes them of.

    Where the worker has a model, `features` (images, numbers) by name are what it made of them, without pixels.
    """

    count: int
    pixels: Any = None
    sources: list[NDArray[np.uint8]] | None = None
    crops: list[Crop | None] = field(default_factory=list)
    features: dict[str, NDArray[Any]] | None = None

    def set_features(self, parts: Sequence[dict[str, NDArray[Any]]]) -> None:
        """Replace the pixels by their features, of which `parts` has some images each."""
        self.features = {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}
        self.pixels = None

    def images(self) -> Iterator[tuple[Any, Any, Crop | None]]:
        """Pixels, source and crop of each."""
        nothing = [None] * self.count
        pixels = nothing if self.pixels is None else self.pixels
        return zip(pixels, self.sources or nothing, self.crops or nothing, strict=True)


@dataclass(slots=True)
class TaskRecords:
    """The records of a task in columns: what takes Python does not grow with the number of images.

    `sizes` are (images, 2): width and height. `runs` are consecutive images of one shape (height, width), (0, 0) of
    errors, and how many. The images of a shape are in `groups`, in order.
    """

    names: list[str]
    sizes: NDArray[np.int32]
    runs: list[tuple[tuple[int, int], int]]
    errors: dict[int, str]
    groups: dict[tuple[int, int], ShapeGroup]

    @classmethod
    def collect(cls, records: Sequence[Record]) -> "TaskRecords":
        """The columns of records; images are views of what these have."""
        by_shape: dict[tuple[int, int], list[Record]] = {}
        for record in records:
            if not record.error:
                by_shape.setdefault(record.shape, []).append(record)
        groups = dict[tuple[int, int], ShapeGroup]()
        for shape, some in by_shape.items():
            groups[shape] = group = ShapeGroup(len(some))
            if some[0].source is None:
                group.pixels = [record.pixels for record in some]
            else:
                group.sources, group.crops = [record.source for record in some], [record.crop for record in some]
        runs = [(shape, len(list(some))) for shape, some in groupby(record.shape for record in records)]
        errors = {i: record.error for i, record in enumerate(records) if record.error}
        sizes = np.array([record.size for record in records], np.int32)
        return cls([record.name for record in records], sizes, runs, errors, groups)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Record]:
        images = {shape: group.images() for shape, group in self.groups.items()}
        shapes = (shape for shape, count in self.runs for _ in range(count))
        for i, (name, shape, size) in enumerate(zip(self.names, shapes, self.sizes.tolist(), strict=True)):
            error = self.errors.get(i, "")
            pixels, source, crop = (None, None, None) if error else next(images[shape])
            yield Record(name, tuple(size), pixels, error, source, crop, shape)


@dataclass(frozen=True)
class RecordDecoder:
    """Makes the records of items."""

    size: int
    fit: Fit
    max_pixels: int
    decode: Decode = "pillow"
    max_patches: int | None = None
    max_file_pixels: int | None = None
    """Limit of images that are files of this machine, which `veca.embed.large` takes where they are larger."""

    def __call__(self, item: Item, gpu: bool = False, spans: SpanReader | None = None) -> Record:
        """Read and decode an image; with `gpu`, what that can do is left to it. `spans` reads members of archives."""
        if self.max_file_pixels is not None and item.is_local_file:
            return replace(self, max_pixels=self.max_file_pixels, max_file_pixels=None)(item, gpu, spans)
        try:
            source = read_item(item, spans)
            if gpu:
                with warnings.catch_warnings(action="ignore"):
                    return self._for_gpu(item, source)
            return self.from_source(item.name, source)
        except SourceError:
            raise
        except Exception as error:  # no image may end the run
            return Record(item.name, error=describe_error(error, item.path))

    def from_source(self, name: str, source: str | bytes) -> Record:
        """Decode an image on the CPU."""
        try:
            with warnings.catch_warnings(action="ignore"):  # Pillow may emit tens of thousands for one file
                decoder: Decoder = "pillow" if self.decode == "pillow" else "cpu"
                limits = {"max_pixels": self.max_pixels, "max_patches": self.max_patches}
                pixels, size = load_pixels(source, self.size, self.fit, decoder=decoder, **limits)  # type: ignore[arg-type]
        except Exception as error:  # no image may end the run
            path = source if isinstance(source, str) else name
            return Record(name, error=describe_error(error, path))
        # An array, not a tensor: tensors travel in shared memory, of which containers have little.
        _, height, width = pixels.shape
        return Record(name, size, pixels.numpy(), shape=(height, width))

    def _for_gpu(self, item: Item, source: str | bytes) -> Record:
        """The record of an image that the GPU decodes and resizes, or only resizes."""
        jpeg = read_jpeg(source, self.max_pixels) if self.decode == "gpu" else None
        if jpeg is not None:
            data, size, orientation = jpeg
            crop = _plan_turned(*size, self.size, self.fit, self.max_pixels, self.max_patches, orientation)
        if jpeg is None or crop.grows_first:
            decoder: Decoder = "pillow" if self.decode == "pillow" else "cpu"
            options = {"max_pixels": self.max_pixels, "decoder": decoder, "max_patches": self.max_patches}
            image, crop, size = open_for_fit(source, self.size, self.fit, **options)  # type: ignore[arg-type]
            data, crop = for_resizing(image, crop)
        return Record(item.name, size, source=data, crop=crop, shape=(crop.height, crop.width))


@lru_cache(1024)
def _plan_turned(
    width: int, height: int, size: int, fit: Fit, max_pixels: int, max_patches: int | None, orientation: int
) -> Crop:
    """The crop of an image that may be stored turned. One for all images of a size: that is sent once for a task."""
    return plan_fit(width, height, size, fit, max_pixels, max_patches)._replace(orientation=orientation)


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
    """Pixels (height, width, 3) of an image that a GPU is to resize, columns first; others are resized here."""
    if image.width * image.height > _RAW_PIXELS or crop.rows_first(*image.size):
        image = apply_crop(crop, image)
        crop = Crop((0, 0, *image.size), *image.size, *image.size)
    return np.asarray(image), crop


class TaskSeconds(NamedTuple):
    """What a task took a worker: to read and decode, and to compute features."""

    decode: float
    compute: float


class _Task(NamedTuple):
    number: int
    fields: list[tuple[Any, ...]]  # of all items, field by field: faster to send than items
    gpu: bool


class _Result(NamedTuple):
    records: TaskRecords
    placed: Placed | None
    seconds: TaskSeconds


@dataclass(frozen=True)
class _Worker:
    """Does tasks, in a worker process; `compute` then makes features of the images of each."""

    decoder: RecordDecoder
    compute: Callable[[TaskRecords], None] | None
    slots: SharedSlots | None

    def __call__(self, task: _Task | None) -> _Result | None:
        if task is None:
            return None
        began = time.perf_counter()
        with SpanReader() as spans:
            records = TaskRecords.collect(
                [self.decoder(Item(*each), task.gpu, spans) for each in zip(*task.fields, strict=True)]
            )
        decoded = time.perf_counter()
        if self.compute is not None:
            self.compute(records)
        computed, placed = time.perf_counter(), None
        if self.slots is not None:
            placed = self.slots.put(task.number, _take_arrays(records))
        return _Result(
            records, placed, TaskSeconds(decoded - began + time.perf_counter() - computed, computed - decoded)
        )

    def unpack(self, number: int, result: _Result) -> TaskRecords:
        """The records of a task, in this process. Pixels are copied; sources are in the slot of the task."""
        records, placed, _ = result
        if self.slots is not None and placed is not None:
            copy = any(group.sources is None for group in records.groups.values())
            arrays = iter(self.slots.get(number, placed, copy))
            for group in records.groups.values():
                if group.sources is not None:
                    group.sources = list(islice(arrays, group.count))
                elif group.features is None:
                    group.pixels = list(islice(arrays, group.count))
        return records


def _take_arrays(records: TaskRecords) -> list[NDArray[np.uint8]]:
    """Take the images out of records."""
    arrays = list[NDArray[np.uint8]]()
    for group in records.groups.values():
        if group.sources is not None:
            arrays += group.sources
            group.sources = []
        elif group.pixels is not None:
            arrays += group.pixels
            group.pixels = None
    return arrays


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
    tasks: Iterable[list[Item] | None],
    decoder: RecordDecoder,
    workers: int,
    *,
    gpu: "GpuDecoder | None" = None,
    compute: Callable[[TaskRecords], None] | None = None,
    on_work: Callable[[int, TaskSeconds], object] = lambda images, seconds: None,
) -> Iterator[Iterator[TaskRecords]]:
    """Decode tasks in `workers` processes (0: in this one) while the block runs; tasks and images keep their order.

    A task None stands for none: tasks that do not come yet do not keep the results of others waiting.
    `gpu` finishes what it can. `compute` makes features of the images of each task, in its worker where that is a
    fork of this process, or else in this one. `on_work` is told of each task how many images it has and what it took a
    worker.
    """
    sent = deque[tuple[int, int]]()  # number and bytes of the tasks on their way

    def limit_bytes() -> Iterator[_Task | None]:
        number = 0
        for items in tasks:
            if items is None:
                yield None
                continue
            size = sum(len(item.data) for item in items if item.data)
            # `WorkerPool` limits only the number of tasks. It asks for one whenever a result comes back, and cannot be
            # made to wait: while too many bytes are on their way it is given tasks without work.
            while any(size for _, size in sent) and sum(size for _, size in sent) + size > _SENT_BYTES:
                yield None
            sent.append((number, size))
            yield _Task(number, list(zip(*items, strict=True)), gpu is not None and gpu.works)
            number += 1

    def receive(results: Iterable[_Result | None]) -> Iterator[TaskRecords | None]:
        for result in results:
            if result is None:
                yield None
                continue
            records, seconds = work.unpack(sent.popleft()[0], result), result.seconds
            if compute is not None and work.compute is None:
                began = time.perf_counter()
                compute(records)
                seconds = seconds._replace(compute=time.perf_counter() - began)
            on_work(len(records), seconds)
            yield records

    fork = sys.platform == "linux"
    # Tasks without work have slots of nobody; those with work are at most as many as are under way.
    count = workers * _PREFETCH + 1 + (0 if gpu is None else _GPU_TASKS)
    slots = SharedSlots(count, _SLOT_BYTES) if workers and fork else None
    work = _Worker(decoder, compute if fork or not workers else None, slots)
    with WorkerPool(work, limit_bytes(), workers, _PREFETCH, fork=fork and bool(workers)) as results:
        chunks = receive(results)
        yield filter(None, chunks) if gpu is None else _decode_on_gpu(chunks, decoder, gpu)


def _decode_on_gpu(
    chunks: Iterator[TaskRecords | None], decoder: RecordDecoder, gpu: "GpuDecoder"
) -> Iterator[TaskRecords]:
    """Have images finished by the GPU while the tasks after theirs are read, and waited for where there are none."""
    waiting, interval = deque[Callable[[], TaskRecords]](), sys.getswitchinterval()
    # By default a thread that is ready to run waits five milliseconds for another: longer than the GPU takes for a task
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        for records in chunks:
            if records is not None:
                waiting.append(gpu.submit(records, decoder))
            if len(waiting) > _GPU_TASKS or (waiting and records is None):
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()
    finally:
        sys.setswitchinterval(interval)


@contextmanager
def decode_items(
    items: Iterable[Item], size: int, fit: Fit, max_pixels: int, workers: int, decode: Decode = "pillow"
) -> Iterator[Iterator[Record]]:
    """Decode and fit `items` on the CPU, in `workers` processes (0: in this one), while the block runs."""
    with decode_tasks(split_tasks(items, TASK_IMAGES), RecordDecoder(size, fit, max_pixels, decode), workers) as tasks:
        yield chain.from_iterable(tasks)
