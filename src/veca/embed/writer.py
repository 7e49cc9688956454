"""Writing a partition: its images go through the model, and their rows into one Parquet file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from veca.data.loader import Record
from veca.embed.batches import FeatureBatcher
from veca.embed.folder import PartitionFolder
from veca.embed.formats import parquet_writer, read_row_groups
from veca.embed.partitions import Partition, PartitionState, SliceState


class PartitionWriter:
    """Runs the images of one partition through the model and writes its file.

    With `save_seconds`, finished rows are saved as a slice that often and when the run is stopped, and `slices` of an
    earlier run are continued. The file is the same with and without slices.
    """

    def __init__(
        self,
        folder: PartitionFolder,
        partition: Partition,
        batcher: FeatureBatcher,
        about: dict[str, Any],
        slices: Sequence[SliceState] = (),
        save_seconds: float | None = None,
    ) -> None:
        self.folder, self.partition, self.batcher, self.about = folder, partition, batcher, about
        self.slices, self.save_seconds = list(slices), save_seconds
        self._state = slices[-1].next() if slices else SliceState()
        self._added = self._state.end  # images of the partition so far
        batcher.begin_part(self._state.part_bytes)

    @property
    def saved(self) -> int:
        """Images in slices."""
        return sum(state.pictures for state in self.slices)

    def write(self, records: Iterable[Record]) -> PartitionState:
        """Embed `records`, the images after those in slices, and write the file."""
        records, state = iter(records), None
        while state is None:
            with self._new_file() as (path, writer):
                try:
                    complete = self._add_records(records, writer)
                except BaseException:
                    if self.save_seconds is not None:
                        with suppress(Exception):  # the first error is the one to report
                            self._write_rows(writer)
                            self._save_slice(path, writer)
                    raise
                if complete and not self.slices:
                    state = self._finish(path, writer, self._state.pictures, self._state.failures)
                    continue
                self._save_slice(path, writer)
            if complete:
                state = self._join_slices()
        return state

    @contextmanager
    def _new_file(self) -> Iterator[tuple[Path, pq.ParquetWriter]]:
        with (
            self.folder.temporary() as path,
            parquet_writer(path, self.batcher.schema, self.about, checksums=True) as writer,
        ):
            yield path, writer

    def _add_records(self, records: Iterator[Record], writer: pq.ParquetWriter) -> bool:
        """Add records until the partition ends (True) or a slice is due (False)."""
        began, batcher = time.monotonic(), self.batcher
        for record in records:
            batcher.add(record)
            self._added += 1
            if batcher.part_is_full or self._added % batcher.part_images == 0:
                self._end_part(writer)
            due = self.save_seconds is not None and time.monotonic() - began > self.save_seconds
            if due and batcher.is_settled:  # images that wait for their batch cannot be saved
                self._write_rows(writer)
                if self._state.pictures:
                    return False
        self._end_part(writer)
        return True

    def _end_part(self, writer: pq.ParquetWriter) -> None:
        self.batcher.flush()
        self._write_rows(writer)
        self.batcher.begin_part()
        self._state.part, self._state.part_bytes = self._state.end, 0

    def _write_rows(self, writer: pq.ParquetWriter) -> None:
        """Write the finished rows as one row group."""
        state, rows = self._state, self.batcher.take()
        if rows.table.num_rows:
            writer.write_table(rows.table)
            state.groups.append(state.part)
            state.pictures += rows.table.num_rows
        state.failures += rows.failures
        state.end += rows.images
        state.part_bytes += rows.nbytes

    def _save_slice(self, path: Path, writer: pq.ParquetWriter) -> None:
        state = self._state
        if not state.pictures:
            return
        vars(state).update(self.partition.digests(state.end))
        self._publish(path, writer, state, self.partition.slice_name(len(self.slices)))
        self.slices.append(state)
        self._state = state.next()

    def _finish(
        self, path: Path, writer: pq.ParquetWriter, pictures: int, failures: list[tuple[str, str]]
    ) -> PartitionState:
        state = PartitionState(**self.partition.digests(), pictures=pictures, failures=failures)
        self._publish(path, writer, state, self.partition.name)
        return state

    def _publish(self, path: Path, writer: pq.ParquetWriter, state: PartitionState, name: str) -> None:
        # In the metadata of the file alone: tables that readers make of all partitions have one schema.
        writer.add_key_value_metadata({"veca_partition": json.dumps(asdict(state))})
        writer.close()
        self.folder.publish(path, name)

    def _join_slices(self) -> PartitionState:
        """Write the file from the slices and the rows after them, with one row group per part as without slices."""
        files = [self.folder.path(self.partition.slice_name(index)) for index in range(len(self.slices))]
        tables = (table for file in files for table in read_row_groups(file, self.batcher.schema))
        parts = [part for state in self.slices for part in state.groups]
        failures = [failure for state in (*self.slices, self._state) for failure in state.failures]
        with self._new_file() as (path, writer):
            for _, group in groupby(zip(parts, tables, strict=True), key=itemgetter(0)):
                writer.write_table(pa.concat_tables([table for _, table in group]).combine_chunks())
            state = self._finish(path, writer, self.saved, failures)
        for file in files:
            file.unlink()
        return state
