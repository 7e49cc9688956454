"""Partitions: the folder of Parquet files that every engine writes and by which an interrupted run is resumed.

    features/00000000.parquet, 00000001.parquet, …   one file per partition
    features/_job.json, _done.json                   what the run computes; its totals, when it is complete
    features/_00000002-0000.parquet, …               slices: what is finished of a partition in progress

A partition is a tar shard, a Parquet file, or some thousand consecutive image files: it follows from the inputs and the
settings alone. Its file is complete or absent, with the failures and a digest of its inputs in the footer. Readers of
Parquet folders skip names that begin with an underscore.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from veca.data.sources import SHARDS, TABLES, Item, Record, files_of, is_container, is_remote, stamped
from veca.embed.batches import FeatureBatcher
from veca.embed.formats import WRITERS, parquet_writer, read_row_groups
from veca.embed.settings import EmbedError, EmbedSettings
from veca.utils.files import InUseError, atomic_path, locked, publish, temporary_path

PARTITION = 4096
"""Image files in a partition; rounded to whole parts (`veca.embed.batches`)."""

_JOB, _DONE, _LOCK = "_job.json", "_done.json", "_lock"
_OURS = re.compile(r"\d{8}\.parquet|_\d{8}-\d{4}\.parquet|_done\.json|\..*\.part")
_FORMER = re.compile(r"job\.json|\d{6}\.parquet|begun\.parquet")
"""Files in a `.parts` folder of former versions, which had a format of their own."""


class Partition(NamedTuple):
    """Consecutive image files, or one container: a tar shard or a Parquet file."""

    number: int
    files: list[Item]

    @property
    def name(self) -> str:
        return f"{self.number:08d}.parquet"

    def slice_name(self, index: int) -> str:
        return f"_{self.number:08d}-{index:04d}.parquet"

    def digests(self, images: int | None = None) -> dict[str, str]:
        """Digests of the names, sizes and dates of the files that hold the first `images`, or all."""
        files = self.files if is_container(self.files[0]) else self.files[:images]
        sizes = (f"{file.name}\0{file.stamp.partition(' ')[0]}" for file in files)
        dates = (f"{file.name}\0{file.stamp}" for file in files)
        texts = {"digest": (file.name for file in files), "sizes": sizes, "dates": dates}
        return {key: hashlib.sha256("\0".join(text).encode()).hexdigest() for key, text in texts.items()}


def plan_partitions(sources: Sequence[str], length: int) -> Iterator[Partition]:
    """Divide the sources into partitions of one container or `length` image files; nothing is opened."""
    number, files = 0, list[Item]()
    for file in (file for source in sources for file in files_of(source, SHARDS + TABLES)):
        if files and (is_container(file) or is_container(files[0]) or len(files) == length):
            yield Partition(number, files)
            number, files = number + 1, []
        files.append(file)
    if files:
        yield Partition(number, files)


def stamp_files(partition: Partition) -> Partition:
    """The partition with size and date of every local file."""
    return partition._replace(files=list(map(stamped, partition.files)))


StateT = TypeVar("StateT", bound="PartitionState")


@dataclass
class PartitionState:
    """What the footer of a partition's file says about it."""

    digest: str = ""
    sizes: str = ""
    dates: str = ""
    pictures: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class SliceState(PartitionState):
    """What the footer of a slice says about it, and what it takes to continue after it."""

    end: int = 0
    """Index in the partition of the first image after the slice."""
    groups: list[int] = field(default_factory=list)
    """For each row group, the index of the first image of its part."""
    part: int = 0
    """Index of the first image of the part in progress."""
    part_bytes: int = 0
    """Bytes of features of that part so far."""

    def next(self) -> SliceState:
        """An empty slice after this one."""
        return SliceState(end=self.end, part=self.part, part_bytes=self.part_bytes)


class PartitionFolder:
    """The folder of a run, on this machine or at an address, and the file it becomes if one was asked for."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        """`out` is a folder or address, or a file (.parquet, .safetensors, .npz), whose folder is `<out>.parts`."""
        name = os.fspath(out)
        self.out = name.rstrip("/") or name
        self.file: Path | None = None
        self.address = self.out if is_remote(name) else os.path.abspath(name)
        suffix = os.path.splitext(self.out)[1]
        if suffix and not (is_remote(name) or name.endswith("/") or os.path.isdir(name)):
            if suffix not in WRITERS:
                known = ", ".join(WRITERS)
                raise EmbedError(
                    f"{name}: unknown kind of file {suffix!r}; choose one of {known}, or end it with / for a folder"
                )
            self.file, self.address = Path(name), f"{self.address}.parts"
        try:
            self._fs, self._root = fsspec.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise EmbedError(f"{name}: {error}") from error

    def check_format(self, settings: EmbedSettings) -> None:
        """Raise EmbedError if the file cannot hold features of these settings."""
        if self.file and self.file.suffix != ".parquet" and settings.dense and settings.fit in ("keep", "pad"):
            raise EmbedError(
                f"fit={settings.fit!r} gives every image a grid of its own, which {self.file.suffix} cannot hold; "
                "write .parquet, or choose fit 'crop' or 'stretch'"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse a second run while the block runs. Object stores have no locks: nothing keeps runs apart there."""
        if is_remote(self.address) or os.path.isfile(self._root):  # `start` refuses a file
            yield
            return
        try:
            with locked(self._root, _LOCK):
                yield
        except InUseError as error:
            raise EmbedError(str(error)) from None
        finally:
            if self.file:
                with suppress(OSError):  # not empty: the run is unfinished, or the user keeps a file in it
                    os.rmdir(self._root)

    def start(self, job: dict[str, Any], overwrite: bool) -> set[int]:
        """Begin or resume `job` in this folder; returns the partitions that are there. Refuses any other content."""
        if self._fs.isfile(self._root):
            raise EmbedError(f"{self.address} is a file; choose another name for the folder of features")
        old: Any = None
        with suppress(OSError, ValueError, RecursionError):
            old = json.loads(self._fs.cat_file(f"{self._root}/{_JOB}"))
        names = self._names()
        unfinished = isinstance(old, dict) and _DONE not in names and any(map(_OURS.fullmatch, names))
        if self.file:
            self._check_file(names, unfinished, overwrite)
        elif names and not isinstance(old, dict):
            raise EmbedError(f"{self.address} holds files that no run of this left, as {names[0]}; choose another name")
        elif _DONE in names and not overwrite:
            raise EmbedError(
                f"{self.out} exists; choose another name, or overwrite it with --overwrite (overwrite=True)"
            )
        if unfinished and not overwrite:
            check_same_job(self.address, old, job)
            return self.partitions()
        # A description remains until the new one replaces it: without any, the folder would be nobody's.
        self._remove_all(keep_job=True)
        self._write_json(_JOB, job)
        return set()

    def _check_file(self, names: list[str], unfinished: bool, overwrite: bool) -> None:
        assert self.file is not None
        former = [name for name in names if _FORMER.fullmatch(name)]
        if len(former) > 1 and not overwrite:
            raise EmbedError(
                f"{self.address} holds an unfinished run of a former version of veca, which this one cannot continue: "
                "finish it with that version, or start anew with --overwrite (overwrite=True)"
            )
        if self.file.exists() and not overwrite and not unfinished:
            raise self._exists()
        for name in former:
            self.remove(name)

    def _exists(self) -> EmbedError:
        return EmbedError(f"{self.out} exists; choose another name, or overwrite it with --overwrite (overwrite=True)")

    def partitions(self) -> set[int]:
        """Numbers of the partitions that are there."""
        return {int(name[:8]) for name in self._names() if re.fullmatch(r"\d{8}\.parquet", name)}

    def finished(self, partition: Partition, ignore_dates: bool = False) -> PartitionState | None:
        """State of the partition if an earlier worker or run has finished it; refuses one of other images."""
        state = self.read_state(partition.name, PartitionState)
        if state is not None:
            self._check_unchanged(state, partition.digests(), ignore_dates, f"the images of {partition.name}")
        return state

    def slices(self, partition: Partition, ignore_dates: bool = False) -> list[SliceState]:
        """States of the slices that an earlier run left of a partition; refuses those of other images."""
        states, index = list[SliceState](), 0
        while self.exists(name := partition.slice_name(index)):
            state, index = self.read_state(name, SliceState), index + 1
            if state is None or len(states) < index - 1:  # after a damaged slice, the rest is computed again
                self.remove(name)
            else:
                states.append(state)
        if states:
            digests, which = partition.digests(states[-1].end), f"the first images of {partition.name}"
            self._check_unchanged(states[-1], digests, ignore_dates, which)
        return states

    def read_state(self, name: str, kind: type[StateT]) -> StateT | None:
        """The state in the footer of a file; None if it is absent or damaged: not all file systems write atomically."""
        try:
            with self._fs.open(f"{self._root}/{name}", "rb") as file:
                footer = pq.read_metadata(file)
            state = kind(**json.loads((footer.metadata or {})[b"veca_partition"]))
        except (OSError, ValueError, LookupError, TypeError):
            return None
        whole = footer.num_rows == state.pictures
        if isinstance(state, SliceState):
            whole &= footer.num_row_groups == len(state.groups)
        return state if whole else None

    def _check_unchanged(self, state: PartitionState, digests: dict[str, str], ignore_dates: bool, which: str) -> None:
        # Partitions of former versions have a digest of names alone.
        changed = {key for key, digest in digests.items() if (getattr(state, key) or digest) != digest}
        if changed == {"dates"} and not ignore_dates:
            raise EmbedError(
                f"the inputs have changed: {which} have the names and sizes of those already embedded in "
                f"{self.address}, but other dates. If they are only new copies, continue with --ignore-dates "
                "(ignore_dates=True); if not, start anew with --overwrite (overwrite=True)"
            )
        if changed - {"dates"}:
            raise EmbedError(
                f"the inputs have changed: {which} are not those already embedded in {self.address}. Restore them, or "
                "start anew with --overwrite (overwrite=True)"
            )

    def complete(self, totals: dict[str, int], failed: Iterable[int], schema: pa.Schema, about: dict[str, Any]) -> None:
        """End the run: write the failures of the partitions `failed`, join the file or mark the folder as complete."""
        self.check_partitions(totals["partitions"])
        present = self.partitions()
        if missing := sorted(set(range(totals["partitions"])) - present):
            raise EmbedError(
                f"{missing[0]:08d}.parquet is missing from {self.address}: the same call computes it again"
            )
        states = (self.read_state(f"{number:08d}.parquet", PartitionState) for number in sorted(failed))
        failures = (state.failures for state in states if state is not None)
        self._write_failures(failures if totals["failures"] else None)
        if self.file is None:
            for name in self._names():
                if name.startswith((".", "_0")):  # temporary files of killed workers, and slices
                    self.remove(name)
            self._write_json(_DONE, totals)
            return
        with atomic_path(self.file) as path:
            WRITERS[self.file.suffix](path, [self.path(f"{n:08d}.parquet") for n in sorted(present)], schema, about)
        for temporary in self.file.parent.glob(f".{glob.escape(self.file.name)}.*.part"):
            temporary.unlink()
        self._remove_all(keep_job=False)

    def check_partitions(self, count: int) -> None:
        """Raise EmbedError if there are partitions after the first `count`: the inputs had more images."""
        if any(number >= count for number in self.partitions()):
            raise EmbedError(
                f"the inputs have changed: {self.address} holds partitions of other images. Restore them, or start "
                "anew with --overwrite (overwrite=True)"
            )

    def _write_failures(self, failures: Iterable[list[tuple[str, str]]] | None) -> None:
        address = f"{self.file or self._root.rstrip('/')}.failures.csv"
        if failures is not None:
            with self._replacing(address) as path, open(path, "w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                rows.writerow(("path", "error"))
                for part in failures:
                    rows.writerows(part)
        elif self._fs.exists(address):
            self._fs.rm_file(address)

    def kept_message(self, images: int) -> str:
        """How to go on after an error; `images` are finished."""
        if not self.has_job():
            return f"Not all that was finished is in {self.address}; the same call computes what is missing."
        return f"{images:,} finished images are kept in {self.address}; the same call continues after them."

    def path(self, name: str) -> Path:
        """Path of a file in a local folder."""
        return Path(self._root, name)

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """A local path to write to; `publish` moves what is there into the folder."""
        if is_remote(self.address):
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder, "new")
        else:
            with temporary_path(self.path("new")) as path:
                yield path

    def publish(self, path: Path, name: str) -> None:
        """Move a file from `temporary` into the folder, at once."""
        if is_remote(self.address):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.put_file(str(path), f"{self._root}/{name}")
            return
        try:
            os.stat(self.path(_JOB))
            publish(path, self.path(name))
        except FileNotFoundError:
            raise EmbedError(
                f"{self.address} was removed while the run was at work, and what it had finished with it. Run it "
                "again: it starts anew"
            ) from None

    def has_job(self) -> bool:
        return self.exists(_JOB)

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(f"{self._root}/{name}"))

    def remove(self, name: str) -> None:
        self._fs.rm_file(f"{self._root}/{name}")

    def _names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            names = (name.rstrip("/").rpartition("/")[2] for name in self._fs.ls(self._root, detail=False))
            return sorted(name for name in names if name != _LOCK)
        except FileNotFoundError:
            return []

    def _remove_all(self, keep_job: bool) -> None:
        """Remove what runs wrote, and nothing else."""
        if not keep_job:  # first: partitions without a description are no run to resume
            self.remove(_JOB)
        for name in filter(_OURS.fullmatch, self._names()):
            self.remove(name)

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        with self._replacing(f"{self._root}/{name}") as path:
            path.write_text(json.dumps(value, indent=2))

    @contextmanager
    def _replacing(self, address: str) -> Iterator[Path]:
        """A local path; what is written there replaces the file at `address` when the block succeeds."""
        if not is_remote(self.address):
            with atomic_path(address) as path:
                yield path
            return
        with self.temporary() as path:
            yield path
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.put_file(str(path), address)


def check_same_job(folder: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise EmbedError if a folder holds another job, and say in what it differs."""
    pairs = {key: (old.get(key), new.get(key)) for key in new | old}
    changed = [f"{key} was {a!s:.40}, now {b!s:.40}" for key, (a, b) in pairs.items() if a != b]
    if changed:
        raise EmbedError(
            f"{folder} holds an unfinished run that differs: {'; '.join(changed)}. "
            "Repeat that run to finish it, or start anew with --overwrite (overwrite=True)"
        )


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
        self._added = self._state.end
        """Images that the batcher has got, and those before."""
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
