"""From decoded images to files: batches of one shape through the model, and partitions of their features.

Batches are formed within a *part*: up to `PART_IMAGES` consecutive images of one partition, fewer where their features
are large. Parts follow from the settings and the order of the images alone, so batches and therefore the bits of the
features do not depend on interruptions, on the number of workers or on the engine.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from veca.config import VecaConfig
from veca.data.gpu_decode import THREADS, can_resize
from veca.data.records import GPU_TASK_IMAGES, TASK_IMAGES, Decode, RecordDecoder, TaskRecords, split_tasks
from veca.data.sources import Item
from veca.embed.meter import StageMeter
from veca.embed.partitions import Partition, PartitionFolder, PartitionState, feature_columns, feature_schema
from veca.embed.rows import MAX_WRITES, FeatureBatch, FeatureRows, ImageShape, WriteQueue, make_table, stack_images
from veca.embed.settings import EmbedSettings
from veca.errors import NonFiniteError
from veca.images import normalize
from veca.images.pack import pack
from veca.kernels.onednn import PackedWeights
from veca.model import Veca
from veca.optimized import optimize, supports_fused, unfusable_reason
from veca.outputs import VecaOutput

PART_IMAGES = 4096
PART_BYTES = 256 << 20
"""Bytes of features in a part, about; also of decoded images that wait for their batch."""


@dataclass(frozen=True)
class EmbedJob:
    """What every process of a run has to know, beside the weights."""

    folder: PartitionFolder
    settings: EmbedSettings
    config: VecaConfig
    about: dict[str, Any]
    """Of `describe_features`."""
    device: torch.device
    workers: int = 0
    column: str | None = None
    skip_nonfinite: bool = False
    ignore_dates: bool = False
    cwd: str = field(default_factory=os.getcwd)

    @property
    def by_task(self) -> bool:
        """Whether the model runs on the tasks of workers, in their processes: on a CPU, which decoding shares."""
        return self.device.type == "cpu"

    @property
    def decoder(self) -> RecordDecoder:
        """What makes records of images."""
        s = self.settings
        max_file_pixels = s.stream_above and min(s.max_pixels, s.stream_above * self.config.patch_size**2)
        return RecordDecoder(s.size, s.fit, s.max_pixels, cast(Decode, s.decode), s.max_patches, max_file_pixels)

    def split_tasks(self, items: Iterable[Item]) -> Iterator[list[Item]]:
        """Images in groups that a worker takes at a time: batches, where it runs the model."""
        if self.by_task:
            return split_tasks(items, self.settings.batch_size)
        return split_tasks(items, GPU_TASK_IMAGES if self.settings.decode == "gpu" else TASK_IMAGES)

    @property
    def resizes_on_gpu(self) -> bool:
        """Whether the GPU resizes the images, and decodes them if `decode` says so."""
        return can_resize(self.device)

    def processes(self) -> dict[str, int]:
        """How many processes or threads share each stage, where there are several."""
        stages = dict.fromkeys([self.reading, *["model"] * self.by_task], self.workers)
        return stages | {"decode": THREADS} if self.resizes_on_gpu else stages

    @property
    def reading(self) -> str:
        """The stage of the processes that read: on a GPU another decodes, or resizes."""
        return "read" if self.resizes_on_gpu else "decode"

    def describe(self) -> str:
        """How the images are taken, in a few words."""
        decoders = {"gpu": f"{self.device} decodes", "pillow": "decoded by Pillow"}
        count = f"{self.workers} process{'es' * (self.workers != 1)}"
        return ", ".join(filter(None, [f"batch {self.settings.batch}", count, decoders.get(self.settings.decode, "")]))

    def feature_bytes(self, height: int, width: int) -> int:
        """Bytes of the saved features of one image of height × width pixels."""
        settings, patches = self.settings, height * width // self.config.patch_size**2
        vectors = settings.with_global + settings.dense * (settings.cells**2 if settings.cells else patches)
        return vectors * self.config.num_features * np.dtype(self.settings.save_dtype).itemsize

    def batch_of(self, height: int, width: int) -> int:
        """How many images of height × width pixels go through the model at a time."""
        batch, size = self.settings.batch_size, self.settings.size
        return min(batch, max(1, batch * size**2 // (height * width)))

    def shape_of(self, height: int, width: int) -> ImageShape:
        """What images of height × width pixels have in common."""
        grid, batch = (height // self.config.patch_size, width // self.config.patch_size), self.batch_of(height, width)
        cores = self.settings.cores or 0
        return ImageShape((*grid, cores), batch, self.feature_bytes(height, width), 3 * height * width)

    def is_shrunk(self, sizes: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which images of (width, height) lose pixels: of more than `max_patches` patches, or larger than `size`."""
        size, fit = self.settings.size, self.settings.fit
        if fit != "native":
            larger: NDArray[np.bool_] = (sizes.max(axis=1) if fit in ("crop", "stretch") else sizes.min(axis=1)) > size
            return larger
        patches = np.maximum(1, np.floor(sizes / self.config.patch_size + 0.5))
        shrunk: NDArray[np.bool_] = patches.prod(axis=1) > cast(int, self.settings.max_patches)
        return shrunk

    def part_limits(self) -> tuple[int, int]:
        """Images in a part, a multiple of the batch size, and the bytes of features after which it ends early."""
        batch, size = self.settings.batch_size, self.settings.size
        image = self.feature_bytes(size, size)
        max_bytes = max(PART_BYTES, batch * image)
        return max(1, min(PART_IMAGES, max_bytes // image) // batch) * batch, max_bytes

    def partition_length(self, images: int) -> int:
        """Image files in a partition: about `images`, in whole parts."""
        part_images, _ = self.part_limits()
        return max(1, images // part_images) * part_images


def prepare_model(model: Veca, settings: EmbedSettings, device: torch.device) -> Veca:
    """Move the model to the device and optimize it where that is supported or asked for."""
    model.to(device).eval()
    for tensor in chain(model.parameters(), model.buffers()):
        # Weights mapped from a file may be unaligned, and on CPUs the bits of small matrix products depend on it.
        if tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()
    dtype: torch.dtype = getattr(torch, settings.precision)
    supported = supports_fused(model.config, device, dtype) and not unfusable_reason(model)
    return optimize(model, dtype=dtype) if supported or settings.compile else model


class FeatureModel:
    """The model of a run: a batch of images to their features. The device is not waited for."""

    def __init__(self, model: Veca, job: EmbedJob) -> None:
        """`model` is as `prepare_model` returns it."""
        self.job, self.schema, self.model = job, feature_schema(job.about), model
        # A subclass may return something else when called, as timm's models do.
        plain = type(self.model).forward is Veca.forward
        self._forward = self.model if plain else partial(Veca.forward, self.model)
        self._dtype: torch.dtype = getattr(torch, job.settings.precision)
        compiled = job.settings.compile and not supports_fused(job.config, job.device, self._dtype)
        self._autocast = self._dtype != torch.float32 and not compiled  # a compiled model has that dtype itself
        self._packed = PackedWeights(model) if job.device.type == "cpu" else nullcontext()

    def __call__(self, images: Sequence[Any]) -> FeatureBatch:
        """Images of one shape, uint8, to their features: tensors (B, 3, height, width), or lists of arrays."""
        s, device = self.job.settings, self.job.device
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if device.type == "cuda" else []
        began, ended, copied = (event.record for event in events) if events else (lambda: None,) * 3
        start = time.perf_counter()
        with self._inference():
            pixels = stack_images(images, device)
            began()
            output = self._forward(normalize(pixels), cores=s.cores, cls_only=not s.dense, width=s.width)
            ended()
            found = self._features(output)
            # New memory: a view of the first token would keep all tokens.
            columns = {k: torch.empty(v.shape, dtype=v.dtype, pin_memory=v.is_cuda) for k, v in found.items()}
            for name, values in found.items():
                columns[name].copy_(values, non_blocking=True)
            copied()
        return FeatureBatch(columns, events, time.perf_counter() - start)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        autocast = torch.autocast(self.job.device.type, self._dtype, enabled=self._autocast)
        with torch.inference_mode(), autocast, self._packed:
            yield

    def run_pack(self, images: Sequence[NDArray[np.uint8]]) -> list[dict[str, NDArray[Any]]]:
        """Images of any shapes to their features, on a CPU."""
        s, patch = self.job.settings, self.job.config.patch_size
        with self._inference():
            batch = pack([normalize(torch.from_numpy(pixels)) for pixels in images], patch_size=patch)
            outputs: Any = self._forward(batch, cores=s.cores, cls_only=not s.dense, width=s.width)
            return [{name: x.numpy() for name, x in self._features(output).items()} for output in outputs]

    def _features(self, output: VecaOutput) -> dict[str, Tensor]:
        """The columns of the file (B, numbers)."""
        dtype = getattr(torch, str(self.job.settings.save_dtype))
        return {name: self._feature(output, name).to(dtype).flatten(1) for name in feature_columns(self.schema)}

    def _feature(self, output: VecaOutput, name: str) -> Tensor:
        """What a column holds: `cls` (B, D), `patches` (B, N, D) or the means of its cells."""
        cells = self.job.settings.cells
        if name == "patches" and cells:
            return adaptive_avg_pool2d(output.feature_map.float(), cells).flatten(2).mT
        feature: Tensor = getattr(output, name)
        return feature

    def compute(self, records: TaskRecords) -> None:
        """Replace the pixels of a task by their features: batches of one shape.

        A worker process that is a fork of this one may call it.
        """
        # After a fork the compiler would wait forever for its threads, so a new shape must run eagerly.
        s = self.job.settings
        eager = torch.compiler.set_stance("eager_on_recompile") if s.compile else nullcontext()
        # Compiled blocks have seen one shape, not packs.
        packed = s.fit == "native" and len(records.groups) > 1 and not s.compile
        with eager:
            if packed:  # a task has as many images as a batch, none of more patches than its images
                features = iter(self.run_pack([pixels for group in records.groups.values() for pixels in group.pixels]))
                for group in records.groups.values():
                    group.set_features(list(islice(features, group.count)))
                return
            for shape, group in records.groups.items():
                step, pixels = self.job.batch_of(*shape), group.pixels
                found = [self([pixels[start : start + step]]).columns() for start in range(0, group.count, step)]
                group.set_features(found)

    def warm_up(self) -> None:
        """Run the model once as forked workers will: they inherit what it compiles, and errors surface sooner."""
        side, batch = self.job.settings.size, self.job.settings.batch_size
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a forked process would wait forever for threads it does not have
        try:
            self([[np.zeros((3, side, side), np.uint8)] * batch])
        finally:
            torch.set_num_threads(threads)


class PartitionWriter:
    """Runs the images of one partition through the model, in batches of one shape, and writes its file.

    Rows are written and the file is completed by a thread, while the model is at work on the next. `slices` of an
    earlier run are continued; the file is the same with and without them. An image whose features are not finite is an
    error, or with `skip_nonfinite` a failure.
    """

    def __init__(
        self,
        model: FeatureModel,
        partition: Partition,
        slices: Iterable[PartitionState] = (),
        meter: StageMeter | None = None,
    ) -> None:
        self.model, self.job, self.partition, self.slices = model, model.job, partition, list(slices)
        self._meter = meter or StageMeter()
        self._state = self.slices[-1].next() if self.slices else PartitionState()
        # With what is not written yet
        self.added, self._part, self._part_bytes = self._state.end, self._state.part, self._state.part_bytes
        # Images after those written; those before `_settled` are finished.
        self._rows: list[FeatureRows] = []
        self._settled = 0
        # Images that wait for their batch
        self.waiting: dict[ImageShape, list[FeatureRows]] = {}
        self._waiting_bytes, self._by_task, s = 0, self.job.by_task, self.job.settings
        self._max_waiting_bytes = max(PART_BYTES, 3 * s.batch_size * s.size**2)
        self._part_images, self._max_part_bytes = self.job.part_limits()
        self._shapes: dict[tuple[int, int], ImageShape] = {}
        self._error: BaseException | None = None  # of the first write that failed: nothing is written after it

    def write(self, tasks: Iterable[TaskRecords]) -> PartitionState:
        """Embed the images of `tasks` and write the file."""
        with WriteQueue() as queue:
            return self.submit(tasks, queue).result()

    def submit(
        self, tasks: Iterable[TaskRecords], queue: WriteQueue, save_seconds: float | None = None
    ) -> Future[PartitionState]:
        """Embed the images of `tasks`, those after the slices, and have the file written.

        With `save_seconds`, finished rows are saved as a slice that often and when the run is stopped.
        """
        self._queue, pieces = queue, self._split(tasks)
        while True:
            with ExitStack() as stack:
                path, writer = stack.enter_context(self.job.folder.new_file(self.model.schema))
                try:
                    complete = self._add_pieces(pieces, writer, save_seconds)
                    queue.wait(MAX_WRITES - 1)  # an error must come before the file is left to the thread
                except BaseException:
                    queue.settle()  # before the file is closed
                    if save_seconds is not None:
                        with suppress(Exception):  # the first error is the one to report
                            self._write_rows(writer)
                        queue.settle()
                        with suppress(Exception):
                            self._save_slice(path, writer)
                    raise
                if complete:
                    return queue.submit(self._complete, stack.pop_all(), path, writer, save_seconds is not None)
                queue.submit(self._save_slice, path, writer).result()

    def _split(self, tasks: Iterable[TaskRecords]) -> Iterator[tuple[FeatureRows, bool]]:
        """The images of tasks in pieces of one shape that end where a batch or a part does; and whether a task ends."""
        for records in tasks:
            start, taken = 0, dict.fromkeys(records.groups, 0)
            for size, count in records.runs:
                group, shape, end = records.groups.get(size), self._shape(size), start + count
                while start < end:
                    stop = end if self._by_task else min(end, start + self._room(shape))
                    errors = {i - start: records.errors[i] for i in range(start, stop)} if group is None else {}
                    rows = FeatureRows(records.names[start:stop], records.sizes[start:stop], errors, shape)
                    if group is not None:
                        rows.features, rows.first = group.features, taken[size]
                        taken[size] += len(rows)
                        if rows.features is None:
                            rows.images = group.pixels[rows.first : taken[size]]
                    start = stop
                    yield rows, stop == len(records)

    def _shape(self, size: tuple[int, int]) -> ImageShape | None:
        """What images of height and width have in common; None of errors."""
        if size not in self._shapes and all(size):
            self._shapes[size] = self.job.shape_of(*size)
        return self._shapes.get(size)

    def _room(self, shape: ImageShape | None) -> int:
        """Images of a shape after which a batch or the part is full, or too many wait."""
        room = self._part_images - (self.added - self._part)
        if shape is None:
            return room
        # Images larger than size × size may fill a part before it has `_part_images`.
        part = (self._max_part_bytes - self._part_bytes) // shape.feature_bytes + 1
        waiting = (self._max_waiting_bytes - self._waiting_bytes) // shape.pixel_bytes + 1
        return min(room, part, waiting, shape.batch - sum(map(len, self.waiting.get(shape, ()))))

    def _add_pieces(
        self, pieces: Iterator[tuple[FeatureRows, bool]], writer: pq.ParquetWriter, save_seconds: float | None
    ) -> bool:
        """Add images until the partition ends (True) or a slice is due (False)."""
        began = time.monotonic()
        for rows, last in pieces:
            self._add(rows)
            # Where the model runs by task, a part or slice that ends within one would change the batches after it.
            if self._by_task and not last:
                continue
            if not self.waiting:
                self._settled = len(self._rows)
            if self.added - self._part >= self._part_images or self._part_bytes > self._max_part_bytes:
                self._end_part(writer)
            due = save_seconds is not None and time.monotonic() - began > save_seconds
            if due and self._settled == len(self._rows):  # images that wait for their batch cannot be saved
                self._write_rows(writer)
                self._queue.wait()
                if self._state.pictures:
                    return False
        self._end_part(writer)
        return True

    def _add(self, rows: FeatureRows) -> None:
        """Add images; runs the model when a batch is full."""
        self._rows.append(rows)
        self.added += len(rows)
        if (shape := rows.shape) is None:
            return
        self._part_bytes += len(rows) * shape.feature_bytes
        if rows.features is None:
            self._waiting_bytes += len(rows) * shape.pixel_bytes
            group = self.waiting.setdefault(shape, [])
            group.append(rows)
            if sum(map(len, group)) >= shape.batch:
                self._run_batch(shape)
            elif self._waiting_bytes > self._max_waiting_bytes:
                self._run_waiting()

    def _run_waiting(self) -> None:
        """Run the model on all images that wait, full batches or not."""
        while self.waiting:
            self._run_batch(next(iter(self.waiting)))
        self._settled = len(self._rows)

    def _run_batch(self, shape: ImageShape) -> None:
        group = self.waiting.pop(shape)
        features, first = self.model([rows.images for rows in group]), 0
        for rows in group:
            rows.images, rows.features, rows.first = None, features, first
            first += len(rows)
        self._waiting_bytes -= first * shape.pixel_bytes

    def _end_part(self, writer: pq.ParquetWriter) -> None:
        self._run_waiting()
        self._write_rows(writer, end_part=True)
        self._part, self._part_bytes = self.added, 0

    def _write_rows(self, writer: pq.ParquetWriter, end_part: bool = False) -> None:
        """Have the finished rows written as one row group."""
        self._queue.submit(self._write, writer, self._rows[: self._settled], end_part)
        self._rows, self._settled = self._rows[self._settled :], 0

    def _write(self, writer: pq.ParquetWriter, pieces: list[FeatureRows], end_part: bool) -> None:
        """Wait for the features of rows and write them, in a thread; nothing is written after a failure."""
        if self._error is not None:
            raise self._error
        try:
            self._write_group(writer, pieces)
        except BaseException as error:
            self._error = error
            raise
        if end_part:
            self._state.part, self._state.part_bytes = self._state.end, 0

    def _write_group(self, writer: pq.ParquetWriter, pieces: list[FeatureRows]) -> None:
        state, names = self._state, feature_columns(self.model.schema)
        batches = {id(rows.features): rows.features for rows in pieces if isinstance(rows.features, FeatureBatch)}
        for batch in batches.values():
            self._meter.add("model", len(batch.columns()[names[0]]), batch.seconds)
        for rows in pieces:
            if rows.shape is not None:
                self._refuse_nonfinite(rows, names)
        began = time.perf_counter()
        if good := [rows.without_errors(names) for rows in pieces if len(rows.errors) < len(rows)]:
            writer.write_table(make_table(good, self.model.schema))
            state.groups.append(state.part)
        state.pictures += sum(map(len, good))
        state.shrunk += sum(int(self.job.is_shrunk(rows.sizes).sum()) for rows in good)
        state.failures += [(rows.names[i], rows.errors[i]) for rows in pieces for i in sorted(rows.errors)]
        state.end += sum(map(len, pieces))
        state.part_bytes += sum(len(rows) * rows.shape.feature_bytes for rows in pieces if rows.shape)
        self._meter.add("write", sum(map(len, pieces)), time.perf_counter() - began)

    def _refuse_nonfinite(self, rows: FeatureRows, names: Iterable[str]) -> None:
        """Make images whose features are not finite errors or failures."""
        s = self.job.settings
        for name in names:
            for i in np.flatnonzero(~np.isfinite(rows.column(name)).all(1)).tolist():
                how = f"computed in {s.precision} and saved in {s.save_dtype}"
                check = "check the weights, --precision and --dtype (float16 overflows)"
                rows.errors[i] = f"its features are not finite, {how}: {check}"
                if not self.job.skip_nonfinite:
                    way = "--skip-nonfinite (skip_nonfinite=True) lists such images as failures and goes on"
                    raise NonFiniteError(f"{rows.names[i]}: {rows.errors[i]}; {way}")

    def _complete(self, stack: ExitStack, path: Path, writer: pq.ParquetWriter, save: bool) -> PartitionState:
        """Publish the partition, in a thread, when all of it is written; if that failed, `save` what was before."""
        with stack:
            if self._error is not None:
                if save:
                    with suppress(Exception):  # the first error is the one to report
                        self._save_slice(path, writer)
                raise self._error
            if not self.slices:
                done = self._state
                state = PartitionState(pictures=done.pictures, failures=done.failures, shrunk=done.shrunk)
                return self._publish(path, writer, state)
            self._save_slice(path, writer)
        return self._join_slices()

    def _save_slice(self, path: Path, writer: pq.ParquetWriter) -> None:
        if self._state.pictures:
            self._publish(path, writer, self._state, len(self.slices))
            self.slices.append(self._state)
            self._state = self._state.next()

    def _publish(
        self, path: Path, writer: pq.ParquetWriter, state: PartitionState, slice_index: int | None = None
    ) -> PartitionState:
        """Move the file into the folder, as a slice or as the partition, with its state in the footer."""
        vars(state).update(self.partition.digests(None if slice_index is None else state.end))
        # In the metadata of the file alone: tables that readers make of all partitions have one schema.
        writer.add_key_value_metadata({"veca_partition": json.dumps(asdict(state))})
        writer.close()
        self.job.folder.publish(path, self.partition.name(slice_index))
        return state

    def _join_slices(self) -> PartitionState:
        """Write the file from the slices and the rows after them, with one row group per part as without slices."""
        folder, schema = self.job.folder, self.model.schema
        names = [self.partition.name(index) for index in range(len(self.slices))]
        parts = [part for state in self.slices for part in state.groups]
        failures = [failure for state in (*self.slices, self._state) for failure in state.failures]
        tables = zip(parts, folder.read_tables(names, schema), strict=True)
        with folder.new_file(schema) as (path, writer):
            for _, group in groupby(tables, key=itemgetter(0)):
                writer.write_table(pa.concat_tables([table for _, table in group]).combine_chunks())
            pictures, shrunk = (sum(getattr(state, name) for state in self.slices) for name in ("pictures", "shrunk"))
            state = self._publish(path, writer, PartitionState(pictures=pictures, failures=failures, shrunk=shrunk))
        for name in names:
            folder.remove(name)
        return state
