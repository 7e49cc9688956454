"""Which pictures there are to train on: an index of millions that fits in memory and in a file.

    folder, glob, file, tar shard   on this machine
    s3://…, https://…, memory://…   the same, anywhere fsspec reaches; members of shards are read by their range
    hf:NAME[:split[:column]]        a Hugging Face dataset, by its name on the hub or its folder

Finding them is a walk over names; of shards, the headers are read once and kept in a file for the next time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from rich.progress import TimeElapsedColumn

from veca.data.sources import (
    SHARDS,
    SourceError,
    as_text,
    files_of,
    fixed_part,
    is_remote,
    open_remote,
    read_span,
    remote_bytes,
    remote_files,
    shard_items,
)
from veca.errors import VecaError
from veca.images import ImageError
from veca.images.formats import LeftOut, noting_left_out
from veca.utils.console import progress_bar
from veca.utils.files import atomic_path

_FORMAT = 1
_ROWS = 1 << 16
_COLUMNS: list[tuple[str, pa.DataType]] = [("name", pa.large_binary()), ("offset", pa.int64()), ("bytes", pa.int64())]
_SCHEMA = pa.schema(_COLUMNS)
_Number = TypeVar("_Number", np.int64, np.uint8)


class DataError(VecaError, ValueError):
    """Pictures that cannot be had; the message says which, why and the way out."""


class _Row(NamedTuple):
    """A picture: its name in the place it is in, where it starts if that is a file of many, and its length."""

    name: bytes
    offset: int
    bytes: int


@dataclass
class _Place:
    """A folder, shard or dataset that holds pictures, `rows` of them; `stamp` changes when it does."""

    kind: Literal["files", "shard", "dataset"]
    address: str
    stamp: str = ""
    rows: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)


class Pictures:
    """All pictures of some sources, by number; made by `find`.

    `problems` are what was found and cannot be used, by name and reason: damaged shards, folders that cannot be listed.
    """

    def __init__(self, places: Sequence[_Place], table: pa.Table) -> None:
        self._places = list(places)
        # Plain arrays: they cost no more than their bytes, and processes that are forked share them.
        names = pa.concat_arrays([pa.array([], pa.large_binary()), *table["name"].chunks])
        first, (_, ends, data) = names.offset, names.buffers()
        self._ends = _numbers(ends, np.int64)[first : first + len(names) + 1]
        self._names = _numbers(data, np.uint8)
        self._offsets: NDArray[np.int64] = table["offset"].to_numpy()
        self._bytes: NDArray[np.int64] = table["bytes"].to_numpy()
        self._starts = np.cumsum([0, *(place.rows for place in self._places)])
        self.problems = [problem for place in self._places for problem in place.problems]
        self._datasets: dict[str, Any] = {}

    @classmethod
    def find(cls, sources: Sequence[str], cache: Path | None = None, progress: bool = True) -> Pictures:
        """The pictures of all sources, in order. `cache` is a file for the index, made or brought up to date.

        With `progress` it is shown, and a warning tells of pictures in formats that are not read.
        Names and sizes are always listed anew; a shard of the same name, size and date is not read again.
        """
        sources = [sources] if isinstance(sources, str) else list(sources)
        if not sources:
            raise DataError("no sources given; name folders, globs, tar shards or hf: datasets")
        left_out = LeftOut()
        old, index = _Index.load(cache) if cache is not None else _Index(), _Index()
        columns = "{task.description}", "{task.fields[found]}", TimeElapsedColumn()
        with progress_bar(*columns, shown=progress) as bar:
            task = bar.add_task("finding pictures", total=None, found="")

            def show(count: int) -> None:
                seconds = bar.tasks[0].elapsed or 0
                rate = f", {count / seconds:,.0f}/s" if seconds > 1 else ""
                bar.update(task, found=f"{count:,}{rate}")

            for source in sources:
                before = index.count
                with noting_left_out() as left_here:
                    index.add(source, old, show)
                if index.count == before:
                    problems = [p for place in index.places for p in place.problems]
                    raise DataError(left_here.after(_nothing(source, problems)))
                left_out |= left_here
        if progress:
            left_out.warn()
        if cache is not None and index.places != old.places:
            index.save(cache)
        return cls(index.places, index.table())

    def __len__(self) -> int:
        return len(self._offsets)

    def complaints(self, most: int = 20) -> list[str]:
        """A line for each of the problems; of many, for the first."""
        lines = [f"unusable: {name}, {reason}" for name, reason in self.problems[:most]]
        more = len(self.problems) - most
        return [*lines, f"unusable: {more:,} more"] if more > 0 else lines

    def name(self, i: int) -> str:
        """What to call picture `i`: its path or address, then the member of the shard or the row of the dataset."""
        place, path, offset, _ = self._at(i)
        return f"{place.address}/{offset}" if place.kind == "dataset" else as_text(path)

    def read(self, i: int) -> str | bytes:
        """Picture `i` as `veca.images.open_image` takes it: the path of a local file, or the bytes of anything else."""
        place, path, offset, size = self._at(i)
        if place.kind == "dataset":
            if place.address not in self._datasets:
                self._datasets[place.address] = _open_dataset(place.address)[0]
            return _dataset_bytes(self._datasets[place.address][offset])
        if place.kind == "files":
            return remote_bytes(path, None, size) if is_remote(path) else path
        if is_remote(place.address):
            return remote_bytes(place.address, offset, size)
        return read_span(place.address, offset, size)

    @property
    def fingerprint(self) -> str:
        """A hash of names, order and sizes, not of where the folders or shards lie: another means other pictures."""
        digest = hashlib.sha256(f"veca pictures {_FORMAT}".encode())
        for place in self._places:
            shard = os.path.basename(place.address) if place.kind == "shard" else ""
            digest.update(f"\n{place.kind} {as_text(shard)} {place.rows}".encode())
        for array in (self._ends - self._ends[0], self._offsets, self._bytes):
            digest.update(np.ascontiguousarray(array, "<i8").data)
        digest.update(self._names[self._ends[0] : self._ends[-1]].data)
        return digest.hexdigest()

    def _at(self, i: int) -> tuple[_Place, str, int, int]:
        """Where picture `i` is, its path, where it starts, its length."""
        if not 0 <= i < len(self):
            raise IndexError(f"picture {i}; there are {len(self):,}")
        place = self._places[int(np.searchsorted(self._starts, i, side="right")) - 1]
        name = os.fsdecode(self._names[self._ends[i] : self._ends[i + 1]].tobytes())
        return place, f"{place.address}/{name}" if place.address else name, int(self._offsets[i]), int(self._bytes[i])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_datasets": {}}


def _numbers(buffer: pa.Buffer | None, dtype: type[_Number]) -> NDArray[_Number]:
    return np.frombuffer(memoryview(buffer), dtype) if buffer else np.zeros(1, dtype)


class _Index:
    """The index while it is made, or as it was kept: places, and their rows one after the other."""

    def __init__(self, places: Sequence[_Place] = (), table: pa.Table | None = None) -> None:
        self.places = list(places)
        self._parts = [table if table is not None else _SCHEMA.empty_table()]
        self._fresh: list[_Row] = []
        starts = np.cumsum([0, *(place.rows for place in self.places)]).tolist()
        self._shards = {(p.address, p.stamp): (p, at) for p, at in zip(self.places, starts, strict=False)}
        self.count = starts[-1]

    @classmethod
    def load(cls, path: Path) -> _Index:
        """What was kept, or nothing when there is no such file or it is none of ours."""
        try:
            table = pq.read_table(path)
            about = json.loads((table.schema.metadata or {})[b"veca"])
            places = [_Place(**{**p, "problems": [tuple(q) for q in p["problems"]]}) for p in about["places"]]
            whole = sum(place.rows for place in places) == len(table)
            table = table.replace_schema_metadata()
            return cls(places, table) if about["format"] == _FORMAT and whole and table.schema == _SCHEMA else cls()
        except (OSError, ValueError, KeyError, TypeError):  # pyarrow's own errors are among these
            return cls()

    def save(self, path: Path) -> None:
        about = {"format": _FORMAT, "places": [asdict(place) for place in self.places]}
        with atomic_path(path) as part:
            pq.write_table(self.table().replace_schema_metadata({"veca": json.dumps(about)}), part, compression="zstd")

    def table(self) -> pa.Table:
        self._flush()
        if len(self._parts) > 1:
            self._parts = [pa.concat_tables(self._parts)]
        return self._parts[0]

    def add(self, source: str, old: _Index, show: Callable[[int], None]) -> None:
        """The pictures of one source; rows of shards that are as they were come from `old`."""
        if source.startswith("hf:"):
            _, place, rows = _open_dataset(source)
            self.places.append(place)
            for row in rows:
                self._add(place, row)
            return show(self.count)
        for root, address, stamp, size, problem in (_remote_files if is_remote(source) else _local_files)(source):
            if address.lower().endswith(SHARDS) and not problem:
                self._add_shard(address, stamp, old, show)
                continue
            base = root if address.startswith(f"{root}/") else ""
            if not self.places or (self.places[-1].kind, self.places[-1].address) != ("files", base):
                self.places.append(_Place("files", base))
            place = self.places[-1]
            if problem:
                place.problems.append((as_text(address), problem))
                continue
            self._add(place, _Row(os.fsencode(address[len(base) + 1 :] if base else address), -1, size))
            # One hash for the sizes and dates of all, so that what is kept is written again when one changes.
            place.stamp = hashlib.blake2b(f"{place.stamp} {stamp}".encode(), digest_size=8).hexdigest()
            if self.count % 1000 == 0:
                show(self.count)
        show(self.count)

    def _add_shard(self, address: str, stamp: str, old: _Index, show: Callable[[int], None]) -> None:
        if address.lower().endswith("gz"):
            reason = "pictures in a packed archive cannot be read one by one, in any order"
            raise DataError(f"{as_text(address)}: {reason}. Unpack it to .tar with gunzip")
        if known := old._shards.get((address, stamp)):
            place, start = known
            self._flush()
            self.places.append(place)
            self._parts.append(old.table().slice(start, place.rows))
            self.count += place.rows
            return show(self.count)
        place = _Place("shard", address, stamp)
        self.places.append(place)
        prefix = len(as_text(address)) + 1
        for item in shard_items(address, open_remote if is_remote(address) else open):
            if item.span is None:
                place.problems.append((item.name, item.error))
                continue
            self._add(place, _Row(item.name[prefix:].encode(), *item.span))
            if self.count % 1000 == 0:
                show(self.count)
        show(self.count)

    def _add(self, place: _Place, row: _Row) -> None:
        self._fresh.append(row)
        place.rows += 1
        self.count += 1
        if len(self._fresh) >= _ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._fresh:
            columns = zip(_SCHEMA.names, zip(*self._fresh, strict=True), strict=True)
            self._parts.append(pa.table({name: list(values) for name, values in columns}, schema=_SCHEMA))
            self._fresh = []


def _nothing(source: str, problems: Sequence[tuple[str, str]]) -> str:
    why = "".join(f"; {name}: {reason}" for name, reason in problems[-3:])
    hint = "" if why else ". Shards in a folder are named by a glob: FOLDER/*.tar"
    return f"{as_text(source)}: no pictures found{why}{hint}"


def _local_files(source: str) -> Iterator[tuple[str, str, str, int, str]]:
    """(root, path, what changes when it does, bytes, what is wrong) of every file."""
    root = os.path.dirname(source) if os.path.isfile(source) else str(Path(fixed_part(f"{source}/")))
    try:
        for item in files_of(source):
            if item.error:
                yield root, item.name, "", 0, item.error
                continue
            try:
                about = os.stat(item.path)
            except OSError as error:  # a broken link
                yield root, item.path, "", 0, str(error.strerror).lower()
            else:
                yield root, item.path, f"{about.st_size} {about.st_mtime_ns}", about.st_size, ""
    except SourceError as error:
        raise DataError(f"{error}. Name a folder, glob, tar shard, an address with :// or hf:NAME") from None


def _remote_files(source: str) -> Iterator[tuple[str, str, str, int, str]]:
    """As `_local_files`, of an address."""
    try:
        for root, address, about in remote_files(source, SHARDS):
            size = -1 if about.get("size") is None else int(about["size"])
            yield root, address, _stamp(about), size, ""
    except SourceError as error:
        raise DataError(str(error)) from error


def _stamp(about: dict[str, Any]) -> str:
    """What changes when the file does, as far as its file system tells."""
    keys = ("size", "mtime", "created", "ETag", "etag", "LastModified", "last_modified", "md5Hash", "version_id")
    return json.dumps({key: str(about[key]) for key in keys if key in about})


def _open_dataset(source: str) -> tuple[Any, _Place, Iterator[_Row]]:
    """The dataset of `hf:NAME_OR_FOLDER[:split[:column]]` with its pictures as bytes, and what to keep of it."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source}: needs the library datasets. pip install 'veca[hf]'") from None
    name, split, column, *more = [*source.removeprefix("hf:").split(":"), "", ""]
    if not name or any(more):
        raise DataError(f"{source!r}: must be hf:NAME_OR_FOLDER[:split[:column]]")
    saved = any(os.path.exists(os.path.join(name, file)) for file in ("state.json", "dataset_dict.json"))
    try:
        found = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=split or None)
    except Exception as error:  # the hub, the disk or what is in it
        raise DataError(f"{source}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    if isinstance(found, datasets.DatasetDict):
        split = split or ("train" if "train" in found or len(found) != 1 else next(iter(found)))
        if split not in found:
            raise DataError(f"{source}: no split {split!r}; there are {', '.join(found)}")
        found = found[split]
    pictures = [key for key, kind in found.features.items() if isinstance(kind, datasets.Image)]
    if (column or "".join(pictures[:1])) not in pictures:
        raise DataError(f"{source}: no column of pictures {column!r}; there are {', '.join(pictures) or 'none'}")
    column = column or pictures[0]
    found = found.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    lengths = np.full(len(found), -1)
    if found._indices is None:  # the lengths are there without reading the pictures
        sizes = pc.binary_length(pc.struct_field(found.data.column(column), "bytes"))
        lengths = sizes.fill_null(-1).to_numpy()
    rows = (_Row(b"", row, int(size)) for row, size in enumerate(lengths))
    return found, _Place("dataset", source, found._fingerprint), rows


def _dataset_bytes(row: dict[str, Any]) -> str | bytes:
    value = next(iter(row.values())) or {}
    found: str | bytes | None = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if found is None:
        raise ImageError("the row has no picture")
    return found
