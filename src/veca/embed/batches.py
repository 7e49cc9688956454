"""From decoded images to files: batches of one shape through the model, rows of features, partitions.

Batches are formed within a *part*: up to `PART_IMAGES` consecutive images of one partition, fewer where their features
are large. Parts follow from the settings and the order of the images alone, so batches and therefore the bits of the
features do not depend on interruptions, on the number of workers or on the engine.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca.config import VecaConfig
from veca.data.gpu_decode import can_resize
from veca.data.records import GPU_TASK_IMAGES, TASK_IMAGES, Decode, Record, RecordDecoder, split_tasks
from veca.data.sources import Item
from veca.embed.meter import StageMeter
from veca.embed.partitions import Partition, PartitionFolder, PartitionState, feature_schema
from veca.embed.settings import EmbedSettings
from veca.errors import NonFiniteError
from veca.images import normalize
from veca.model import Veca
from veca.optimized import optimize, supports_fused, unfusable_reason

PART_IMAGES = 4096
PART_BYTES = 256 << 20
"""Bytes of features in a part, about; also of decoded images that wait for their batch."""
_WRITES = 2
"""Row groups that wait to be written, at most."""


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
        return RecordDecoder(s.size, s.fit, s.max_pixels, cast(Decode, s.decode))

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
        """How many processes share each stage, where there are several."""
        return dict.fromkeys([self.reading, *["model"] * self.by_task], self.workers)

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
        vectors = self.settings.with_global + self.settings.dense * (height * width // self.config.patch_size**2)
        return vectors * self.config.num_features * np.dtype(self.settings.save_dtype).itemsize

    def batch_of(self, height: int, width: int) -> int:
        """How many images of height × width pixels go through the model at a time."""
        batch, size = self.settings.batch_size, self.settings.size
        return min(batch, max(1, batch * size**2 // (height * width)))

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


class FeatureBatch:
    """FeatureBatch of a batch, on their way from the device until they are asked for."""

    def __init__(self, columns: dict[str, Tensor], events: Sequence[torch.cuda.Event], seconds: float) -> None:
        self._columns, self._events = columns, events
        self.seconds = seconds
        """What the model took."""

    def columns(self) -> dict[str, NDArray[Any]]:
        """Wait for them: columns (B, numbers)."""
        if self._events:
            began, ended, copied = self._events
            copied.synchronize()
            self.seconds, self._events = began.elapsed_time(ended) / 1000, ()
        return {name: values.numpy() for name, values in self._columns.items()}


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

    def __call__(self, images: Sequence[Any]) -> FeatureBatch:
        """Images (3, height, width) uint8 of one shape, as `Record.pixels` has them, to their features."""
        s, device = self.job.settings, self.job.device
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if device.type == "cuda" else []
        began, ended, copied = (event.record for event in events) if events else (lambda: None,) * 3
        start = time.perf_counter()
        with torch.inference_mode(), torch.autocast(device.type, self._dtype, enabled=self._autocast):
            pixels = _stack(images, device)
            began()
            output = self._forward(normalize(pixels), cores=s.cores, cls_only=not s.dense, width=s.width)
            ended()
            dtype = getattr(torch, str(s.save_dtype))
            found = {name: getattr(output, name).to(dtype).flatten(1) for name in self.schema.names[6:]}
            # New memory: a view of the first token would keep all tokens.
            columns = {k: torch.empty(v.shape, dtype=dtype, pin_memory=v.is_cuda) for k, v in found.items()}
            for name, values in found.items():
                columns[name].copy_(values, non_blocking=True)
            copied()
        return FeatureBatch(columns, events, time.perf_counter() - start)

    def compute(self, records: list[Record]) -> list[Record]:
        """Replace the pixels of records, those of a task, by their features: batches of one shape.

        A worker process that is a fork of this one may call it.
        """
        # After a fork the compiler would wait forever for its threads, so a new shape must run eagerly.
        eager = torch.compiler.set_stance("eager_on_recompile") if self.job.settings.compile else nullcontext()
        by_shape: dict[tuple[int, int], list[Record]] = {}
        for record in records:
            if record.pixels is not None:
                by_shape.setdefault(record.shape, []).append(record)
        with eager:
            for (height, width), group in by_shape.items():
                count = self.job.batch_of(height, width)
                for start in range(0, len(group), count):
                    some = group[start : start + count]
                    columns = self([record.pixels for record in some]).columns()
                    for i, record in enumerate(some):
                        record.pixels, record.features = None, {name: values[i] for name, values in columns.items()}
        return records

    def warm_up(self) -> None:
        """Run the model once as forked workers will: they inherit what it compiles, and errors surface sooner."""
        side, batch = self.job.settings.size, self.job.settings.batch_size
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a forked process would wait forever for threads it does not have
        try:
            self([np.zeros((3, side, side), np.uint8)] * batch)
        finally:
            torch.set_num_threads(threads)


def _stack(images: Sequence[Any], device: torch.device) -> Tensor:
    """Stack images on the device: arrays, or a tensor there and which of its images it is."""
    if device.type == "cpu":
        return torch.from_numpy(np.stack(images))
    parts = list[Tensor]()
    for together, group in groupby(images, key=lambda image: id(image[0]) if isinstance(image, tuple) else None):
        some = list(group)
        if together is None:
            host = torch.empty(len(some), *some[0].shape, dtype=torch.uint8, pin_memory=True)
            np.stack(some, out=host.numpy())
            parts.append(host.to(device, non_blocking=True))
            continue
        pixels, first, count = some[0][0], some[0][1], len(some)
        consecutive = some[-1][1] - first == count - 1
        parts.append(pixels[first : first + count] if consecutive else pixels[[i for _, i in some]])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Shape:
    """What images of one shape (height, width) have in common."""

    def __init__(self, job: EmbedJob, shape: tuple[int, int]) -> None:
        height, width = shape
        self.numbers = height // job.config.patch_size, width // job.config.patch_size, job.settings.cores or 0
        self.batch, self.feature_bytes = job.batch_of(height, width), job.feature_bytes(height, width)
        self.pixel_bytes = 3 * height * width


class _Row:
    """An image of the part in progress: its size and shape, and where its features are; or an error."""

    __slots__ = ("error", "features", "index", "name", "shape", "size")

    def __init__(self, name: str, error: str) -> None:
        self.name, self.error, self.size, self.index = name, error, (0, 0), 0
        self.shape: _Shape | None = None
        self.features: FeatureBatch | dict[str, NDArray[Any]] | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its columns between the name and the features."""
        assert self.shape is not None
        return *self.size, *self.shape.numbers


class PartitionWriter:
    """Runs the images of one partition through the model, in batches of one shape, and writes its file.

    Rows are written by a thread, while the model is at work on the next. `slices` of an earlier run are continued; the
    file is the same with and without them. An image whose features are not finite is an error, or with
    `skip_nonfinite` a failure.
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
        self._rows: list[_Row] = []
        self._settled = 0
        # Rows and images that wait for their batch, by shape (height, width).
        self.waiting: dict[tuple[int, int], list[tuple[_Row, Any]]] = {}
        self._waiting_bytes, self._by_task, s = 0, self.job.by_task, self.job.settings
        self._max_waiting_bytes = max(PART_BYTES, 3 * s.batch_size * s.size**2)
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._writes = deque[Future[None]]()
        self._failed = False

    def write(self, records: Iterable[Record], save_seconds: float | None = None) -> PartitionState:
        """Embed `records`, the images after those in slices, and write the file.

        With `save_seconds`, finished rows are saved as a slice that often and when the run is stopped.
        """
        records, complete = iter(records), False
        with ThreadPoolExecutor(1, "parquet") as self._thread:
            while not complete:
                with self.job.folder.new_file(self.model.schema) as (path, writer):
                    try:
                        complete = self._add_records(records, writer, save_seconds)
                        self._finish_writes()
                    except BaseException:
                        if save_seconds is not None:
                            with suppress(Exception):  # the first error is the one to report
                                self._write_rows(writer)
                            wait(self._writes)
                            with suppress(Exception):
                                self._save_slice(path, writer)
                        raise
                    if complete and not self.slices:
                        state = PartitionState(pictures=self._state.pictures, failures=self._state.failures)
                        return self._publish(path, writer, state)
                    self._save_slice(path, writer)
        return self._join_slices()

    def _add_records(self, records: Iterator[Record], writer: pq.ParquetWriter, save_seconds: float | None) -> bool:
        """Add records until the partition ends (True) or a slice is due (False)."""
        began, (part_images, max_part_bytes) = time.monotonic(), self.job.part_limits()
        for record in records:
            self._add(record)
            # Images larger than size × size may fill a part before it has `part_images`.
            full = self.added - self._part >= part_images or self._part_bytes > max_part_bytes
            if full and (record.last or not self._by_task):
                self._end_part(writer)
            due = save_seconds is not None and time.monotonic() - began > save_seconds
            if due and self._settled == len(self._rows):  # images that wait for their batch cannot be saved
                self._write_rows(writer)
                self._finish_writes()
                if self._state.pictures:
                    return False
        self._end_part(writer)
        return True

    def _add(self, record: Record) -> None:
        """Add an image; runs the model when a batch is full."""
        row = _Row(record.name, record.error)
        self._rows.append(row)
        self.added += 1
        if not record.error:
            shape = self._shapes.get(record.shape) or self._shapes.setdefault(
                record.shape, _Shape(self.job, record.shape)
            )
            row.size, row.shape, row.features = record.size, shape, record.features
            self._part_bytes += shape.feature_bytes
            if record.features is None:
                self._waiting_bytes += shape.pixel_bytes
                group = self.waiting.setdefault(record.shape, [])
                group.append((row, record.pixels))
                if len(group) >= shape.batch:
                    self._run_batch(record.shape)
                elif self._waiting_bytes > self._max_waiting_bytes:
                    self._run_waiting()
        # Where the model runs by task, a part or slice that ends within one would change the batches after it.
        if not self.waiting and (record.last or not self._by_task):
            self._settled = len(self._rows)

    def _run_waiting(self) -> None:
        """Run the model on all images that wait, full batches or not."""
        while self.waiting:
            self._run_batch(next(iter(self.waiting)))
        self._settled = len(self._rows)

    def _run_batch(self, shape: tuple[int, int]) -> None:
        group = self.waiting.pop(shape)
        self._waiting_bytes -= len(group) * self._shapes[shape].pixel_bytes
        features = self.model([pixels for _, pixels in group])
        for i, (row, _) in enumerate(group):
            row.features, row.index = features, i

    def _end_part(self, writer: pq.ParquetWriter) -> None:
        self._run_waiting()
        self._write_rows(writer, end_part=True)
        self._part, self._part_bytes = self.added, 0

    def _write_rows(self, writer: pq.ParquetWriter, end_part: bool = False) -> None:
        """Have the finished rows written as one row group."""
        rows, self._rows, self._settled = self._rows[: self._settled], self._rows[self._settled :], 0
        self._writes.append(self._thread.submit(self._write, writer, rows, end_part))
        self._finish_writes(_WRITES)

    def _finish_writes(self, but: int = 0) -> None:
        """Wait until all writes but the last few are done."""
        while len(self._writes) > but:
            self._writes.popleft().result()

    def _write(self, writer: pq.ParquetWriter, rows: list[_Row], end_part: bool) -> None:
        """Wait for the features of rows and write them, in a thread; nothing is written after a failure."""
        state, schema = self._state, self.model.schema
        if self._failed:
            raise RuntimeError("rows before these were not written")
        self._failed = True  # until they are written
        values = {name: self._collect(name, rows) for name in schema.names[6:]}
        began = time.perf_counter()
        if good := [i for i, row in enumerate(rows) if not row.error]:
            numbers = np.array([rows[i].numbers for i in good], np.int32)
            columns: dict[str, Any] = {"path": pa.array([rows[i].name for i in good], pa.string())}
            columns |= dict(zip(schema.names[1:6], map(pa.array, numbers.T.copy()), strict=True))
            for name, arrays in values.items():
                kept = [arrays[i] for i in good]
                kind: Any = schema.field(name).type
                flat = pa.array(np.concatenate(kept))
                if pa.types.is_fixed_size_list(kind):
                    columns[name] = pa.FixedSizeListArray.from_arrays(flat, type=kind)  # type: ignore[call-overload]
                else:
                    ends = pa.array(np.cumsum([0, *(array.size for array in kept)]))
                    columns[name] = pa.LargeListArray.from_arrays(ends, flat, type=kind)
            writer.write_table(pa.table(columns, schema))
            state.groups.append(state.part)
        state.pictures += len(good)
        state.failures += [(row.name, row.error) for row in rows if row.error]
        state.end += len(rows)
        state.part_bytes += sum(row.shape.feature_bytes for row in rows if row.shape)
        if end_part:
            state.part, state.part_bytes = state.end, 0
        self._failed = False
        self._meter.add("write", len(rows), time.perf_counter() - began)

    def _collect(self, name: str, rows: list[_Row]) -> list[NDArray[Any]]:
        """A column of the features of each row, empty where there are none; those that are not finite are refused."""
        collected, batches = list[NDArray[Any]](), dict[int, tuple[NDArray[Any], NDArray[Any]]]()
        for row in rows:
            features = row.features
            if isinstance(features, FeatureBatch):
                if id(features) not in batches:
                    values = features.columns()[name]
                    batches[id(features)] = values, np.isfinite(values).all(1)
                    if name == self.model.schema.names[6]:
                        self._meter.add("model", len(values), features.seconds)
                values, finite = batches[id(features)]
                collected.append(values[row.index])
                is_finite = finite[row.index]
            else:
                collected.append(np.empty(0) if features is None else features[name])
                is_finite = np.isfinite(collected[-1]).all()
            if not is_finite:
                self._refuse(row)
        return collected

    def _refuse(self, row: _Row) -> None:
        """Make an image whose features are not finite an error or a failure."""
        s = self.job.settings
        how = f"computed in {s.precision} and saved in {s.save_dtype}"
        check = "check the weights, --precision and --dtype (float16 overflows)"
        row.error = f"its features are not finite, {how}: {check}"
        if not self.job.skip_nonfinite:
            way = "--skip-nonfinite (skip_nonfinite=True) lists such images as failures and goes on"
            raise NonFiniteError(f"{row.name}: {row.error}; {way}")

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
            pictures = sum(state.pictures for state in self.slices)
            state = self._publish(path, writer, PartitionState(pictures=pictures, failures=failures))
        for name in names:
            folder.remove(name)
        return state
