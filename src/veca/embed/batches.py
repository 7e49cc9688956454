"""From decoded images to files: batches of one shape through the model, rows of features, partitions.

Batches are formed within a *part*: up to `PART_IMAGES` consecutive images of one partition, fewer where their features
are large. Parts follow from the settings and the order of the images alone, so batches and therefore the bits of the
features do not depend on interruptions, on the number of workers or on the engine.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from veca.config import VecaConfig
from veca.data.loader import Record
from veca.embed.partitions import (
    Partition,
    PartitionFolder,
    PartitionState,
    feature_schema,
    parquet_writer,
    read_row_groups,
)
from veca.embed.settings import EmbedSettings
from veca.errors import NonFiniteError
from veca.images import normalize
from veca.model import Veca
from veca.optimized import optimize, supports_fused, unfusable_reason

PART_IMAGES = 1024
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

    def feature_bytes(self, height: int, width: int) -> int:
        """Bytes of the saved features of one image of height × width pixels."""
        vectors = self.settings.with_global + self.settings.dense * (height * width // self.config.patch_size**2)
        return vectors * self.config.num_features * np.dtype(self.settings.save_dtype).itemsize

    def part_limits(self) -> tuple[int, int]:
        """Images in a part, a multiple of the batch size, and the bytes of features after which it ends early."""
        batch, size = self.settings.batch, self.settings.size
        image = self.feature_bytes(size, size)
        max_bytes = max(PART_BYTES, batch * image)
        return max(1, min(PART_IMAGES, max_bytes // image) // batch) * batch, max_bytes

    def partition_length(self, images: int) -> int:
        """Image files in a partition: about `images`, in whole parts."""
        part_images, _ = self.part_limits()
        return max(1, images // part_images) * part_images


def prepare_model(model: Veca, settings: EmbedSettings, device: torch.device) -> Veca:
    """Move the model to the device and optimize it where that is supported."""
    model.to(device).eval()
    for tensor in chain(model.parameters(), model.buffers()):
        # Weights mapped from a file may be unaligned, and on CPUs the bits of small matrix products depend on it.
        if tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()
    dtype: torch.dtype = getattr(torch, settings.precision)
    supported = supports_fused(model.config, device, dtype) and not unfusable_reason(model)
    return optimize(model, dtype=dtype) if supported else model


@dataclass(slots=True)
class _Entry:
    """One image: its row, with the features once its batch has run, or the reason why it has none."""

    name: str
    error: str
    numbers: tuple[int | None, ...] = ()  # width, height, rows, columns, cores
    features: dict[str, NDArray[Any]] = field(default_factory=dict)
    nbytes: int = 0


class FeatureBatcher:
    """Collects decoded images, runs the model on batches of one shape, and returns rows in input order.

    An image whose features are not finite is an error, or with `skip_nonfinite` a failure.
    """

    def __init__(self, model: Veca, job: EmbedJob) -> None:
        self.job, self.settings = job, job.settings
        self.model, self.schema = prepare_model(model, job.settings, job.device), feature_schema(job.about)
        # A subclass may return something else when called, as timm's models do.
        plain = type(self.model).forward is Veca.forward
        self._forward = self.model if plain else partial(Veca.forward, self.model)
        self.part_images, self._max_part_bytes = job.part_limits()
        self.part_bytes = 0  # features of the part in progress; set by `PartitionWriter` where a part begins
        self._entries: list[_Entry] = []
        self._settled = 0  # entries before this one are finished: none of them waits for its batch
        # Decoded images that wait for their batch, by shape (height, width).
        self.waiting: dict[tuple[int, int], list[tuple[_Entry, NDArray[np.uint8]]]] = {}
        self._waiting_bytes = 0

    @property
    def part_is_full(self) -> bool:
        """Whether images larger than size × size have filled the part before it had `part_images`."""
        return self.part_bytes > self._max_part_bytes

    def add(self, record: Record) -> None:
        entry = _Entry(record.name, record.error)
        self._entries.append(entry)
        if record.pixels is not None:
            s, patch = self.settings, self.job.config.patch_size
            height, width = shape = record.pixels.shape[1:]
            entry.numbers = (*record.size, height // patch, width // patch, s.cores)
            entry.nbytes = self.job.feature_bytes(height, width)
            self.part_bytes += entry.nbytes
            self._waiting_bytes += record.pixels.nbytes
            group = self.waiting.setdefault(shape, [])
            group.append((entry, record.pixels))
            batch_pixels = s.batch * s.size**2
            if len(group) >= min(s.batch, max(1, batch_pixels // (height * width))):
                self._run_batch(self.waiting.pop(shape))
            elif self._waiting_bytes > max(PART_BYTES, 3 * batch_pixels):
                self.flush()
        if not self.waiting:
            self._settled = len(self._entries)

    def flush(self) -> None:
        """Run the model on all images that wait, full batches or not."""
        while self.waiting:
            self._run_batch(self.waiting.pop(next(iter(self.waiting))))
        self._settled = len(self._entries)

    def _run_batch(self, group: list[tuple[_Entry, NDArray[np.uint8]]]) -> None:
        s, entries = self.settings, [entry for entry, _ in group]
        pixels = torch.from_numpy(np.stack([pixels for _, pixels in group]))
        self._waiting_bytes -= pixels.nbytes
        autocast = torch.autocast(self.job.device.type, getattr(torch, s.precision), enabled=s.precision != "float32")
        with torch.inference_mode(), autocast:
            output = self._forward(normalize(pixels.to(self.job.device)), cores=s.cores, cls_only=not s.dense)
        for name in self.schema.names[6:]:
            # copy=True: a view of the first token would keep all tokens in memory.
            features = getattr(output, name).to("cpu", getattr(torch, s.save_dtype), copy=True).flatten(1).numpy()
            for entry, row in zip(entries, features, strict=True):
                entry.features[name] = row
            bad = [entry for entry in entries if not np.isfinite(entry.features[name]).all()]
            if bad:
                self._note_nonfinite(bad, len(bad) == len(group), getattr(output, name))

    def _note_nonfinite(self, bad: list[_Entry], whole_batch: bool, output: torch.Tensor) -> None:
        weights = chain(self.model.parameters(), self.model.buffers())  # an optimized model has buffers alone
        if whole_batch and not all(tensor.isfinite().all() for tensor in weights):
            hint = "the weights have NaN or infinity in them"
        elif bool(output.isfinite().all()):
            hint = "float16 cannot hold them: save float32 (--save-dtype)"
        elif self.settings.precision == "float16":
            hint = "float16 may overflow: compute in bfloat16 or float32 (--precision)"
        else:
            hint = "look at the weights, and at --precision"
        for entry in bad:
            entry.error = f"its features are not finite: {hint}"
            if not self.job.skip_nonfinite:
                way = "--skip-nonfinite (skip_nonfinite=True) lists such images as failures and goes on"
                raise NonFiniteError(f"{entry.name}: {entry.error}; {way}")

    def take(self) -> tuple[int, int, pa.Table, list[tuple[str, str]]]:
        """Remove the finished images; returns their number, the bytes of their features, their rows and failures."""
        entries, self._entries = self._entries[: self._settled], self._entries[self._settled :]
        self._settled = 0
        good = [entry for entry in entries if not entry.error]
        columns: dict[str, Any] = {"path": [entry.name for entry in good]}
        columns |= {name: [entry.numbers[i] for entry in good] for i, name in enumerate(self.schema.names[1:6])}
        for name in self.schema.names[6:]:
            rows = [np.empty(0, self.settings.save_dtype), *(entry.features[name] for entry in good)]
            ends, values = pa.array(np.cumsum([row.size for row in rows])), pa.array(np.concatenate(rows))
            columns[name] = pa.LargeListArray.from_arrays(ends, values).cast(self.schema.field(name).type)
        failures = [(entry.name, entry.error) for entry in entries if entry.error]
        return len(entries), sum(entry.nbytes for entry in entries), pa.table(columns, self.schema), failures


class PartitionWriter:
    """Runs the images of one partition through the model and writes its file.

    `slices` of an earlier run are continued; the file is the same with and without them.
    """

    def __init__(self, batcher: FeatureBatcher, partition: Partition, slices: Iterable[PartitionState] = ()) -> None:
        self.batcher, self.partition, self.slices = batcher, partition, list(slices)
        self.folder, self._state = batcher.job.folder, PartitionState()
        if self.slices:
            self._begin_slice(self.slices[-1])
        self.added = self._state.end  # images of the partition so far

    def _begin_slice(self, last: PartitionState) -> None:
        self._state = PartitionState(end=last.end, part=last.part, part_bytes=last.part_bytes)

    def write(self, records: Iterable[Record], save_seconds: float | None = None) -> PartitionState:
        """Embed `records`, the images after those in slices, and write the file.

        With `save_seconds`, finished rows are saved as a slice that often and when the run is stopped.
        """
        records, complete = iter(records), False
        self.batcher.part_bytes = self._state.part_bytes
        while not complete:
            with self.folder.temporary() as path, parquet_writer(path, self.batcher.schema, checksums=True) as writer:
                try:
                    complete = self._add_records(records, writer, save_seconds)
                except BaseException:
                    if save_seconds is not None:
                        with suppress(Exception):  # the first error is the one to report
                            self._write_rows(writer)
                            self._save_slice(path, writer)
                    raise
                if complete and not self.slices:
                    state = PartitionState(pictures=self._state.pictures, failures=self._state.failures)
                    return self._publish(path, writer, state)
                self._save_slice(path, writer)
        return self._join_slices()

    def _add_records(self, records: Iterator[Record], writer: pq.ParquetWriter, save_seconds: float | None) -> bool:
        """Add records until the partition ends (True) or a slice is due (False)."""
        began, batcher = time.monotonic(), self.batcher
        for record in records:
            batcher.add(record)
            self.added += 1
            if batcher.part_is_full or self.added % batcher.part_images == 0:
                self._end_part(writer)
            due = save_seconds is not None and time.monotonic() - began > save_seconds
            if due and not batcher.waiting:  # images that wait for their batch cannot be saved
                self._write_rows(writer)
                if self._state.pictures:
                    return False
        self._end_part(writer)
        return True

    def _end_part(self, writer: pq.ParquetWriter) -> None:
        self.batcher.flush()
        self._write_rows(writer)
        self._state.part, self._state.part_bytes, self.batcher.part_bytes = self._state.end, 0, 0

    def _write_rows(self, writer: pq.ParquetWriter) -> None:
        """Write the finished rows as one row group."""
        state = self._state
        images, nbytes, table, failures = self.batcher.take()
        if table.num_rows:
            writer.write_table(table)
            state.groups.append(state.part)
        state.pictures += table.num_rows
        state.failures += failures
        state.end += images
        state.part_bytes += nbytes

    def _save_slice(self, path: Path, writer: pq.ParquetWriter) -> None:
        if self._state.pictures:
            self._publish(path, writer, self._state, len(self.slices))
            self.slices.append(self._state)
            self._begin_slice(self._state)

    def _publish(
        self, path: Path, writer: pq.ParquetWriter, state: PartitionState, slice_index: int | None = None
    ) -> PartitionState:
        """Move the file into the folder, as a slice or as the partition, with its state in the footer."""
        vars(state).update(self.partition.digests(None if slice_index is None else state.end))
        # In the metadata of the file alone: tables that readers make of all partitions have one schema.
        writer.add_key_value_metadata({"veca_partition": json.dumps(asdict(state))})
        writer.close()
        self.folder.publish(path, self.partition.name(slice_index))
        return state

    def _join_slices(self) -> PartitionState:
        """Write the file from the slices and the rows after them, with one row group per part as without slices."""
        files = [self.folder.path(self.partition.name(index)) for index in range(len(self.slices))]
        tables = (table for file in files for table in read_row_groups(file, self.batcher.schema))
        parts = [part for state in self.slices for part in state.groups]
        failures = [failure for state in (*self.slices, self._state) for failure in state.failures]
        with self.folder.temporary() as path, parquet_writer(path, self.batcher.schema, checksums=True) as writer:
            for _, group in groupby(zip(parts, tables, strict=True), key=itemgetter(0)):
                writer.write_table(pa.concat_tables([table for _, table in group]).combine_chunks())
            pictures = sum(state.pictures for state in self.slices)
            state = self._publish(path, writer, PartitionState(pictures=pictures, failures=failures))
        for file in files:
            file.unlink()
        return state
