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

import pyarrow as pa
import pyarrow.parquet as pq

from veca.data.loader import Record
from veca.embed.batches import FeatureBatcher
from veca.embed.folder import PartitionFolder
from veca.embed.formats import parquet_writer, read_row_groups
from veca.embed.partitions import Partition, PartitionState, SliceState


class PartitionWriter:
    """Runs the images of one partition through the model and writes its file.

    `slices` of an earlier run are continued; the file is the same with and without them.
    """

    def __init__(
        self, folder: PartitionFolder, partition: Partition, batcher: FeatureBatcher, slices: Sequence[SliceState] = ()
    ) -> None:
        self.folder, self.partition, self.batcher, self.slices = folder, partition, batcher, list(slices)
        self._state = slices[-1].next() if slices else SliceState()
        self.added = self._state.end  # images of the partition so far

    @property
    def saved(self) -> int:
        """Images in slices."""
        return sum(state.pictures for state in self.slices)

    def write(self, records: Iterable[Record], save_seconds: float | None = None) -> PartitionState:
        """Embed `records`, the images after those in slices, and write the file.

        With `save_seconds`, finished rows are saved as a slice that often and when the run is stopped.
        """
        records, complete, state = iter(records), False, self._state
        self.batcher.part_bytes = state.part_bytes
        while not complete:
            with self._new_file() as (path, writer):
                try:
                    complete = self._add_records(records, writer, save_seconds)
                except BaseException:
                    if save_seconds is not None:
                        with suppress(Exception):  # the first error is the one to report
                            self._write_rows(writer)
                            self._save_slice(path, writer)
                    raise
                if complete and not self.slices:
                    return self._publish(path, writer, PartitionState(pictures=state.pictures, failures=state.failures))
                self._save_slice(path, writer)
        return self._join_slices()

    @contextmanager
    def _new_file(self) -> Iterator[tuple[Path, pq.ParquetWriter]]:
        with self.folder.temporary() as path, parquet_writer(path, self.batcher.schema, checksums=True) as writer:
            yield path, writer

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
            self._publish(path, writer, self._state)
            self.slices.append(self._state)
            self._state = self._state.next()

    def _publish(self, path: Path, writer: pq.ParquetWriter, state: PartitionState) -> PartitionState:
        """Move the file into the folder, as a slice or as the partition, with its state in the footer."""
        name, end = self.partition.name, None
        if isinstance(state, SliceState):
            name, end = self.partition.slice_name(len(self.slices)), state.end
        vars(state).update(self.partition.digests(end))
        # In the metadata of the file alone: tables that readers make of all partitions have one schema.
        writer.add_key_value_metadata({"veca_partition": json.dumps(asdict(state))})
        writer.close()
        self.folder.publish(path, name)
        return state

    def _join_slices(self) -> PartitionState:
        """Write the file from the slices and the rows after them, with one row group per part as without slices."""
        files = [self.folder.path(self.partition.slice_name(index)) for index in range(len(self.slices))]
        tables = (table for file in files for table in read_row_groups(file, self.batcher.schema))
        parts = [part for state in self.slices for part in state.groups]
        failures = [failure for state in (*self.slices, self._state) for failure in state.failures]
        with self._new_file() as (path, writer):
            for _, group in groupby(zip(parts, tables, strict=True), key=itemgetter(0)):
                writer.write_table(pa.concat_tables([table for _, table in group]).combine_chunks())
            state = self._publish(path, writer, PartitionState(pictures=self.saved, failures=failures))
        for file in files:
            file.unlink()
        return state
