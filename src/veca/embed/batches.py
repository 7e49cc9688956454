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
from veca.embed.partitions import Partition, PartitionFolder, PartitionState, feature_schema
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


class FeatureModel:
    """The model of a run: a batch of images to their features."""

    def __init__(self, model: Veca, job: EmbedJob) -> None:
        self.job, self.schema = job, feature_schema(job.about)
        self.model = prepare_model(model, job.settings, job.device)
        # A subclass may return something else when called, as timm's models do.
        plain = type(self.model).forward is Veca.forward
        self._forward = self.model if plain else partial(Veca.forward, self.model)

    def __call__(self, pixels: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Images (B, 3, height, width) → columns of features, (B, numbers) each."""
        s, device = self.job.settings, self.job.device
        autocast = torch.autocast(device.type, getattr(torch, s.precision), enabled=s.precision != "float32")
        with torch.inference_mode(), autocast:
            images = normalize(torch.from_numpy(pixels).to(device))
            output = self._forward(images, cores=s.cores, cls_only=not s.dense)
        # copy=True: a view of the first token would keep all tokens in memory.
        saved = {"device": "cpu", "dtype": getattr(torch, s.save_dtype), "copy": True}
        return {name: getattr(output, name).to(**saved).flatten(1).numpy() for name in self.schema.names[6:]}


class PartitionWriter:
    """Runs the images of one partition through the model, in batches of one shape, and writes its file.

    `slices` of an earlier run are continued; the file is the same with and without them. An image whose features are
    not finite is an error, or with `skip_nonfinite` a failure.
    """

    def __init__(self, model: FeatureModel, partition: Partition, slices: Iterable[PartitionState] = ()) -> None:
        self.model, self.job, self.partition, self.slices = model, model.job, partition, list(slices)
        self._state = self.slices[-1].next() if self.slices else PartitionState()
        self.added, self._part_bytes = self._state.end, self._state.part_bytes  # with what is not written yet
        # Of each image after those written its columns, or a reason in `error`; those before `_settled` are finished.
        self._rows: list[dict[str, Any]] = []
        self._settled = 0
        # Rows and decoded images that wait for their batch, by shape (height, width).
        self.waiting: dict[tuple[int, int], list[tuple[dict[str, Any], NDArray[np.uint8]]]] = {}
        self._waiting_bytes = 0

    def write(self, records: Iterable[Record], save_seconds: float | None = None) -> PartitionState:
        """Embed `records`, the images after those in slices, and write the file.

        With `save_seconds`, finished rows are saved as a slice that often and when the run is stopped.
        """
        records, complete = iter(records), False
        while not complete:
            with self.job.folder.new_file(self.model.schema) as (path, writer):
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
        began, (part_images, max_part_bytes) = time.monotonic(), self.job.part_limits()
        for record in records:
            self._add(record)
            # Images larger than size × size may fill a part before it has `part_images`.
            if self.added % part_images == 0 or self._part_bytes > max_part_bytes:
                self._end_part(writer)
            due = save_seconds is not None and time.monotonic() - began > save_seconds
            if due and not self.waiting:  # images that wait for their batch cannot be saved
                self._write_rows(writer)
                if self._state.pictures:
                    return False
        self._end_part(writer)
        return True

    def _add(self, record: Record) -> None:
        """Add an image; runs the model when a batch is full."""
        row: dict[str, Any] = {"path": record.name, "error": record.error, "nbytes": 0}
        self._rows.append(row)
        self.added += 1
        if record.pixels is not None:
            s, patch = self.job.settings, self.job.config.patch_size
            height, width = shape = record.pixels.shape[1:]
            numbers = (*record.size, height // patch, width // patch, s.cores)
            row |= dict(zip(self.model.schema.names[1:6], numbers, strict=True), nbytes=self.job.feature_bytes(*shape))
            self._part_bytes += row["nbytes"]
            self._waiting_bytes += record.pixels.nbytes
            group = self.waiting.setdefault(shape, [])
            group.append((row, record.pixels))
            batch_pixels = s.batch * s.size**2
            if len(group) >= min(s.batch, max(1, batch_pixels // (height * width))):
                self._run_batch(self.waiting.pop(shape))
            elif self._waiting_bytes > max(PART_BYTES, 3 * batch_pixels):
                self._run_waiting()
        if not self.waiting:
            self._settled = len(self._rows)

    def _run_waiting(self) -> None:
        """Run the model on all images that wait, full batches or not."""
        while self.waiting:
            self._run_batch(self.waiting.pop(next(iter(self.waiting))))
        self._settled = len(self._rows)

    def _run_batch(self, group: list[tuple[dict[str, Any], NDArray[np.uint8]]]) -> None:
        pixels, s = np.stack([pixels for _, pixels in group]), self.job.settings
        self._waiting_bytes -= pixels.nbytes
        for name, features in self.model(pixels).items():
            for (row, _), values in zip(group, features, strict=True):
                row[name] = values
                if not np.isfinite(values).all():
                    how = f"computed in {s.precision} and saved in {s.save_dtype}"
                    check = "check the weights, --precision and --dtype (float16 overflows)"
                    row["error"] = f"its features are not finite, {how}: {check}"
                    if not self.job.skip_nonfinite:
                        way = "--skip-nonfinite (skip_nonfinite=True) lists such images as failures and goes on"
                        raise NonFiniteError(f"{row['path']}: {row['error']}; {way}")

    def _end_part(self, writer: pq.ParquetWriter) -> None:
        self._run_waiting()
        self._write_rows(writer)
        self._state.part, self._state.part_bytes, self._part_bytes = self._state.end, 0, 0

    def _write_rows(self, writer: pq.ParquetWriter) -> None:
        """Write the finished rows as one row group."""
        state, schema = self._state, self.model.schema
        rows, self._rows, self._settled = self._rows[: self._settled], self._rows[self._settled :], 0
        if good := [row for row in rows if not row["error"]]:
            columns: dict[str, Any] = {name: [row[name] for row in good] for name in schema.names}
            for name in schema.names[6:]:
                ends, values = np.cumsum([0, *(row.size for row in columns[name])]), np.concatenate(columns[name])
                lists = pa.LargeListArray.from_arrays(pa.array(ends), pa.array(values))
                columns[name] = lists.cast(schema.field(name).type)
            writer.write_table(pa.table(columns, schema))
            state.groups.append(state.part)
        state.pictures += len(good)
        state.failures += [(row["path"], row["error"]) for row in rows if row["error"]]
        state.end += len(rows)
        state.part_bytes += sum(row["nbytes"] for row in rows)

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
