"""The folder of a run: its partitions as Parquet files, by which every engine resumes.

    features/00000000.parquet, 00000001.parquet, …   one file per partition, complete or absent
    features/_job.json, _done.json                   what the run computes; its totals, when it is complete
    features/_00000002-0000.parquet, …               slices of partitions in progress

A partition is a tar shard, a Parquet file, or some thousand consecutive image files: it follows from the inputs and the
settings alone. While it is in progress, finished rows may be saved as *slices*, files of their own. The failures of a
partition and digests of its inputs are in the footer of its file. Readers of Parquet folders skip names that begin with
an underscore.

Columns: `path`, `width`, `height` (of the image), `rows`, `columns` (of the grid), `cores` (the budget), `cls` (D
numbers) and, if dense, `patches` (rows × columns × D numbers, or those of `cells` × `cells` means, row by row; in the
files as little-endian bytes). How the features were made is JSON in the metadata, under the key `veca`.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from veca.data.remote import is_remote
from veca.data.sources import Item, add_stamp, is_container, list_files
from veca.embed.arrays import write_arrays
from veca.embed.settings import ANEW, EmbedError
from veca.utils.files import atomic_path, locked, publish, temporary_path

PARTITION = 4096
"""Image files in a partition; rounded to whole parts (`veca.embed.batches`)."""
SUFFIXES = (".parquet", ".safetensors", ".npz")
"""Kinds of file that a run can be joined into."""
GROUP_ROWS, GROUP_BYTES = 16_384, 32 << 20
"""Largest row group of a joined file. Vectors are scanned more slowly in larger ones, other columns in smaller ones."""
_JOB, _DONE, _LOCK = "_job.json", "_done.json", "_lock"
# In a `.parts` folder of earlier versions, which had a format of their own
_FORMER = re.compile(r"job\.json|\d{6}\.parquet|begun\.parquet")
_OURS = re.compile(r"\d{8}\.parquet|_\d{8}-\d{4}\.parquet|_done\.json|\..*\.part")


class Partition(NamedTuple):
    """Consecutive image files, or one container: a tar shard or a Parquet file."""

    number: int
    files: list[Item]

    def name(self, slice_index: int | None = None) -> str:
        """Name of its file, or of a slice."""
        return f"{self.number:08d}.parquet" if slice_index is None else f"_{self.number:08d}-{slice_index:04d}.parquet"

    def with_stamps(self) -> Partition:
        """The partition with size and date of every local file."""
        return Partition(self.number, list(map(add_stamp, self.files)))

    def digests(self, images: int | None = None) -> dict[str, str]:
        """Digests of the names, sizes and dates of the files that hold the first `images`, or all."""
        files = self.files if is_container(self.files[0]) else self.files[:images]
        sizes = (f"{file.name}\0{file.stamp.partition(' ')[0]}" for file in files)
        texts = {"sizes": sizes, "dates": (f"{file.name}\0{file.stamp}" for file in files)}
        return {key: hashlib.sha256("\0".join(text).encode()).hexdigest() for key, text in texts.items()}


def plan_partitions(sources: Sequence[str], length: int, videos: bool = False) -> Iterator[Partition]:
    """Divide the sources into partitions of one container or `length` image files; nothing is opened."""
    number, files = 0, list[Item]()
    for file in (file for source in sources for file in list_files(source, videos=videos)[1]):
        if files and (is_container(file) or is_container(files[0]) or len(files) == length):
            yield Partition(number, files)
            number, files = number + 1, []
        files.append(file)
    if files:
        yield Partition(number, files)


@dataclass
class PartitionState:
    """What the footer of a partition or a slice says about it."""

    sizes: str = ""  # digest of the names and sizes of its files
    dates: str = ""  # digest of names, sizes and dates
    pictures: int = 0  # rows
    failures: list[tuple[str, str]] = field(default_factory=list)
    shrunk: int = 0  # of the rows, those of images that had too many patches
    # What it takes to continue after a slice. Images are counted from the start of the partition, failures included.
    end: int = 0  # the first image after the slice
    groups: list[int] = field(default_factory=list)  # of each row group, the first image of its part
    part: int = 0  # the first image of the part in progress
    part_bytes: int = 0  # features of that part so far

    def next(self) -> PartitionState:
        """An empty slice after this one."""
        return PartitionState(end=self.end, part=self.part, part_bytes=self.part_bytes)


@dataclass
class RunTotals:
    """Counts of a run, with those of an earlier run that it resumed."""

    partitions: int = 0
    pictures: int = 0
    failures: int = 0
    shrunk: int = 0
    resumed: int = 0  # images and failures
    resumed_failures: int = 0
    with_failures: list[int] = field(default_factory=list)  # numbers of partitions
    streamed: dict[str, str] = field(default_factory=dict)
    """Of images that were too large to be decoded, and streamed: why they were not, or ""."""

    def add(self, number: int, pictures: int, failures: int, shrunk: int = 0) -> None:
        """Count a partition."""
        self.pictures += pictures
        self.shrunk += shrunk
        self.failures += failures
        self.with_failures += [number] if failures else []

    def add_streamed(self, name: str, error: str = "") -> None:
        """Count an image that is a failure of a partition and was streamed, unless there is an error."""
        self.streamed[name] = error
        self.failures -= not error


def feature_schema(about: dict[str, Any]) -> pa.Schema:
    """The columns of a table, in order. `about`, of `veca.embed.run.describe_features`, becomes the metadata."""
    # Nothing is nullable: Parquet has then no levels to decode beside the numbers.
    number = pa.field("element", pa.float16() if about["save_dtype"] == "float16" else pa.float32(), nullable=False)
    types: dict[str, pa.DataType] = {"path": pa.string()}
    types |= dict.fromkeys(("width", "height", "rows", "columns", "cores"), pa.int32())
    types |= {"cls": pa.list_(number, about["dim"])} if about["with_global"] else {}
    types |= {"patches": pa.large_list(number)} if about["dense"] else {}
    types |= {"time": pa.float64()} if about.get("fps") else {}
    fields = [pa.field(name, kind, nullable=False) for name, kind in types.items()]
    return pa.schema(fields, {"veca": json.dumps(about)})


def feature_columns(schema: pa.Schema) -> list[str]:
    """Names of the columns that the model makes."""
    return [name for name in ("cls", "patches") if name in schema.names]


class FeatureWriter(pq.ParquetWriter):
    """Writes tables of `feature_schema`, each as a row group; `checksums` let readers tell damage from features.

    `patches` are stored as bytes: pyarrow encodes a list number by number, which for float16 is far slower than a disk.
    """

    def __init__(self, path: Path, schema: pa.Schema, checksums: bool) -> None:
        for index in schema.get_all_field_indices("patches"):
            schema = schema.set(index, pa.field("patches", pa.large_binary(), nullable=False))
        # Features compress little and at less than disk speed, and queries do not filter by them.
        small = [name for name in schema.names if name not in feature_columns(schema)]
        options: dict[str, Any] = {"use_dictionary": small[1:], "write_statistics": small}
        options |= {"compression": dict.fromkeys(small, "zstd"), "write_page_checksum": checksums}
        super().__init__(path, schema, **options)

    def write_table(self, table: pa.Table, row_group_size: int | None = None) -> None:
        super().write_table(_map_patches(table, _to_bytes), row_group_size or len(table))


def _map_patches(table: pa.Table, convert: Callable[[Any], Any]) -> pa.Table:
    """The table with the column `patches` converted, if it has one."""
    for index in table.schema.get_all_field_indices("patches"):
        chunks: Any = pa.chunked_array([convert(chunk) for chunk in table.column(index).chunks])
        table = table.set_column(index, pa.field("patches", chunks.type, nullable=False), chunks)
    return table


def _to_bytes(lists: Any) -> Any:
    """The numbers of each list as bytes; nothing but offsets is copied."""
    values = lists.values
    offsets = (lists.offsets.to_numpy() + values.offset) * values.type.byte_width
    return pa.Array.from_buffers(pa.large_binary(), len(lists), [None, pa.py_buffer(offsets), values.buffers()[1]])


def _to_lists(rows: Any, kind: Any) -> Any:
    """The reverse of `_to_bytes`, as lists of type `kind`."""
    _, offsets, data = rows.buffers()
    ends = np.frombuffer(offsets, np.int64)[rows.offset : rows.offset + len(rows) + 1] // kind.value_type.byte_width
    values = pa.Array.from_buffers(kind.value_type, int(ends[-1]), [None, data])
    return pa.Array.from_buffers(kind, len(rows), [None, pa.py_buffer(ends)], children=[values])


def _merge_tables(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Consecutive tables joined up to `GROUP_ROWS` and `GROUP_BYTES`; a larger one alone."""
    merged, rows, size = list[pa.Table](), 0, 0
    for table in tables:
        rows, size = rows + len(table), size + table.nbytes
        if merged and (rows > GROUP_ROWS or size > GROUP_BYTES):
            yield pa.concat_tables(merged)
            merged, rows, size = [], len(table), table.nbytes
        merged.append(table)
    if merged:
        yield pa.concat_tables(merged)


class PartitionFolder:
    """The folder of a run, on this machine or at an address, and the file it becomes if one was asked for."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        """`out` is a folder or address, or a file of `SUFFIXES`, whose folder is `<out>.parts`."""
        name = os.fspath(out)
        self.out = name.rstrip("/") or name
        self.file: Path | None = None
        self.remote = is_remote(name)
        self.address = self.out if self.remote else os.path.abspath(name)
        suffix = os.path.splitext(self.out)[1]
        if suffix and not (self.remote or name.endswith("/") or os.path.isdir(name)):
            if suffix not in SUFFIXES:
                way = f"features are written as {', '.join(SUFFIXES)} or, where it ends with /, a folder of .parquet"
                raise EmbedError(f"{name}: unknown kind of file {suffix!r}; {way}")
            self.file, self.address = Path(name), f"{self.address}.parts"
        try:
            self._fs, self._root = fsspec.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise EmbedError(f"{name}: {error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse a second run while the block runs. Object stores have no locks: nothing keeps runs apart there."""
        lockable = not self.remote and not os.path.isfile(self._root)  # `start` refuses a file
        try:
            with locked(self._root, _LOCK) if lockable else nullcontext():
                yield
        finally:
            if self.file:
                with suppress(OSError):  # not empty: the run is unfinished, or the user keeps a file in it
                    os.rmdir(self._root)

    def check(self, overwrite: bool) -> dict[str, Any]:
        """Refuse what a run must not replace; returns the description of an unfinished run here, or an empty one."""
        if self._fs.isfile(self._root):
            raise EmbedError(f"{self.address} is a file; choose another name for the folder of features")
        old: Any = None
        with suppress(OSError, ValueError, RecursionError):
            old = json.loads(self._fs.cat_file(f"{self._root}/{_JOB}"))
        names = self._names()
        if names and not self.file and not isinstance(old, dict):
            raise EmbedError(f"{self.address} holds files that no run of this left, as {names[0]}; choose another name")
        if len(self._former(names)) > 1 and not overwrite:
            reason = "holds an unfinished run of a former version of veca, which this one cannot continue"
            raise EmbedError(f"{self.address} {reason}: finish it with that version, or {ANEW}")
        unfinished = isinstance(old, dict) and _DONE not in names and any(map(_OURS.fullmatch, names))
        if not overwrite and (self.file.exists() and not unfinished if self.file else _DONE in names):
            way = "choose another name, or overwrite it with --overwrite (overwrite=True)"
            raise EmbedError(f"{self.out} exists; {way}")
        return old if unfinished and not overwrite else {}

    def _former(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self.file and _FORMER.fullmatch(name)]

    def start(self, job: dict[str, Any], overwrite: bool) -> None:
        """Begin or resume `job` in this folder; refuses any other content."""
        if old := self.check(overwrite):
            pairs = {key: (old.get(key), job.get(key)) for key in job | old}
            changed = [f"{key} was {a!s:.40}, now {b!s:.40}" for key, (a, b) in pairs.items() if a != b]
            if changed:
                reason = f"holds an unfinished run that differs: {'; '.join(changed)}"
                raise EmbedError(f"{self.address} {reason}. Repeat that run to finish it, or {ANEW}")
            return
        # Keep the old description until the new one replaces it: a folder of files without one is refused.
        former = self._former(self._names())
        self._remove_all()
        for name in former:
            self.remove(name)
        self._write_json(_JOB, job)

    def numbers(self) -> set[int]:
        """Numbers of the partitions that are there."""
        return {int(name[:8]) for name in self._names() if re.fullmatch(r"\d{8}\.parquet", name)}

    def finished(self, partition: Partition, ignore_dates: bool = False) -> PartitionState | None:
        """State of the partition if an earlier worker or run has finished it; refuses one of other images."""
        state = self.read_state(partition.name())
        if state is not None:
            self._check_unchanged(state, partition.digests(), ignore_dates, f"the images of {partition.name()}")
        return state

    def slices(self, partition: Partition, ignore_dates: bool = False) -> list[PartitionState]:
        """States of the slices that an earlier run left of a partition; refuses those of other images."""
        states, index = list[PartitionState](), 0
        while self.exists(name := partition.name(index)):
            state, index = self.read_state(name), index + 1
            if state is None or len(states) < index - 1:  # after a damaged slice, the rest is computed again
                self.remove(name)
            else:
                states.append(state)
        if states:
            digests, which = partition.digests(states[-1].end), f"the first images of {partition.name()}"
            self._check_unchanged(states[-1], digests, ignore_dates, which)
        return states

    def read_state(self, name: str) -> PartitionState | None:
        """The state in the footer of a file; None if it is absent or damaged: not all file systems write atomically."""
        try:
            with self._fs.open(f"{self._root}/{name}", "rb") as file:
                footer = pq.read_metadata(file)
            state = PartitionState(**json.loads((footer.metadata or {})[b"veca_partition"]))
        except (OSError, ValueError, LookupError, TypeError):
            return None
        groups = len(state.groups) or footer.num_row_groups
        return state if (footer.num_rows, footer.num_row_groups) == (state.pictures, groups) else None

    def _check_unchanged(self, state: PartitionState, digests: dict[str, str], ignore_dates: bool, which: str) -> None:
        if state.sizes == digests["sizes"] and (ignore_dates or state.dates == digests["dates"]):
            return
        known = f"those already embedded in {self.address}"
        reason, way = f"are not {known}", "Restore them, or"
        if state.sizes == digests["sizes"]:
            reason = f"have the names and sizes of {known}, but other dates"
            way = "If they are only new copies, continue with --ignore-dates (ignore_dates=True); if not,"
        raise EmbedError(f"the inputs have changed: {which} {reason}. {way} {ANEW}")

    def complete(self, totals: RunTotals, schema: pa.Schema) -> None:
        """End the run: write the list of failures, join the file or mark the folder as complete."""
        self.check_partitions(totals.partitions)
        names, present = [Partition(number, []).name() for number in range(totals.partitions)], set(self._names())
        if missing := [name for name in names if name not in present]:
            raise EmbedError(f"{missing[0]} is missing from {self.address}: the same call computes it again")
        pairs = ((name, totals.streamed.get(name, error)) for name, error in self.read_failures(totals))
        failures, listed = (pair for pair in pairs if pair[1]), f"{self.base}.failures.csv"
        if totals.failures:
            with self.temporary() as path:
                with open(path, "w", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerows(chain([("path", "error")], failures))
                self._move(path, listed)
        elif self._fs.exists(listed):
            self._fs.rm_file(listed)
        if self.file is None:
            for name in present:
                if name.startswith((".", "_0")):  # temporary files of killed workers, and slices
                    self.remove(name)
            self._write_json(_DONE, {key: getattr(totals, key) for key in ("partitions", "pictures", "failures")})
            return
        # Some row groups at a time, so that memory does not grow with the number of images.
        with atomic_path(self.file) as path:
            if self.file.suffix != ".parquet":
                write_arrays(path, self.file.suffix, schema, partial(self.read_tables, names))
            else:
                with FeatureWriter(path, schema, checksums=False) as writer:
                    for table in _merge_tables(self.read_tables(names, schema)):
                        writer.write_table(table)
        for temporary in self.file.parent.glob(f".{glob.escape(self.file.name)}.*.part"):
            temporary.unlink()
        self.remove(_JOB)  # first: partitions without a description are no run to resume
        self._remove_all()

    @property
    def base(self) -> str:
        """What the names of files beside the features begin with."""
        return f"{self.file or self._root.rstrip('/')}"

    def read_failures(self, totals: RunTotals) -> Iterator[tuple[str, str]]:
        """Name and error of what failed in the partitions, in order."""
        states = (self.read_state(Partition(number, []).name()) for number in sorted(totals.with_failures))
        return chain.from_iterable(state.failures for state in states if state)

    def check_partitions(self, count: int) -> None:
        """Raise EmbedError if there are partitions after the first `count`: the inputs had more images."""
        if any(number >= count for number in self.numbers()):
            reason = f"{self.address} holds partitions of other images"
            raise EmbedError(f"the inputs have changed: {reason}. Restore them, or {ANEW}")

    def kept_message(self, images: int) -> str:
        """How to go on after an error; `images` are finished."""
        if not self.exists(_JOB):
            return f"Not all that was finished is in {self.address}; the same call computes what is missing."
        return f"{images:,} finished images are kept in {self.address}; the same call continues after them."

    def read_tables(self, names: Sequence[str], schema: pa.Schema) -> Iterator[pa.Table]:
        """One table per row group of files in a local folder, with the columns in `schema`."""

        def to_lists(rows: Any) -> Any:
            return _to_lists(rows, schema.field("patches").type)

        for file in (Path(self._root, name) for name in names):
            try:
                with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
                    for index in range(parquet.num_row_groups):
                        yield _map_patches(parquet.read_row_group(index, schema.names), to_lists).cast(schema)
            except (OSError, ValueError, LookupError, TypeError, NotImplementedError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # from the system, as a missing file; errors of pyarrow have no number
                reason = str(error).partition("\n")[0]  # may hold bytes of the damage: quoted
                way = f"remove it, and the same call computes it again, or {ANEW}"
                raise EmbedError(f"{file} is damaged ({reason!r}); {way}") from error

    @contextmanager
    def new_file(self, schema: pa.Schema) -> Iterator[tuple[Path, pq.ParquetWriter]]:
        """A file of features to write, which `publish` then moves into the folder."""
        with self.temporary() as path, FeatureWriter(path, schema, checksums=True) as writer:
            yield path, writer

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """A local path to write a file that is then moved into the folder."""
        place = tempfile.TemporaryDirectory() if self.remote else nullcontext(self._root)
        with place as folder, temporary_path(Path(folder, "new")) as path:
            yield path

    def publish(self, path: Path, name: str) -> None:
        """Move a complete file into the folder."""
        if not self.remote:
            os.stat(f"{self._root}/{_JOB}")  # FileNotFoundError if the folder was removed while the run was at work
        self._move(path, f"{self._root}/{name}")

    def _move(self, path: Path, address: str) -> None:
        if self.remote:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.put_file(str(path), address)
        else:
            publish(path, Path(address))

    def is_done(self) -> bool:
        """Whether a run into a folder is complete."""
        return self.exists(_DONE)

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

    def _remove_all(self) -> None:
        """Remove what runs wrote, but for the description, and nothing else."""
        for name in filter(_OURS.fullmatch, self._names()):
            self.remove(name)

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        with self.temporary() as path:
            path.write_text(json.dumps(value, indent=2))
            self._move(path, f"{self._root}/{name}")
