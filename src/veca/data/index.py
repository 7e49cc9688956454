"""Index of the images to train on: random access to millions of them, kept in memory and in a file.

    folder, glob, file, tar shard   on this machine
    s3://…, https://…, memory://…   the same, anywhere fsspec reaches; members of shards are read by byte range
    hf:NAME[:split[:column]]        a Hugging Face dataset, by its name on the hub or its folder

Folders are listed anew each time; the headers of a shard are read once and kept in the file until the shard changes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from rich.progress import TimeElapsedColumn

from veca.data.remote import SourceError, as_text, is_remote, read_remote, read_span
from veca.data.sources import SHARDS, add_stamp, list_files, shard_items
from veca.errors import VecaError
from veca.images import ImageError
from veca.images.formats import UnsupportedFiles, collect_unsupported
from veca.utils.console import progress_bar
from veca.utils.files import atomic_path

_FORMAT = 1
_FLUSH_ROWS = 1 << 16
_FIELDS = pa.field("name", pa.large_binary()), pa.field("offset", pa.int64()), pa.field("bytes", pa.int64())
_INDEX_SCHEMA = pa.schema(_FIELDS)


class DataError(VecaError, ValueError):
    """Images that cannot be loaded; the message says which, why and the remedy."""


@dataclass
class _Container:
    """A folder, shard or dataset with `rows` images; `stamp` changes when it does."""

    kind: Literal["files", "shard", "dataset"]
    address: str
    stamp: str = ""
    rows: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)


class ImageIndex:
    """All images of some sources, by number; made by `build`.

    `problems` lists what cannot be used, by name and reason: damaged shards, folders that cannot be listed.
    """

    def __init__(self, containers: Sequence[_Container], table: pa.Table) -> None:
        self._containers = list(containers)
        # Plain arrays: they take no more memory than their bytes, and forked processes share them.
        names = pa.concat_arrays([pa.array([], pa.large_binary()), *table["name"].chunks])
        _, ends, data = (memoryview(buffer) if buffer else memoryview(bytes(8)) for buffer in names.buffers())
        self._ends = np.frombuffer(ends, np.int64)[names.offset : names.offset + len(names) + 1]
        self._names = np.frombuffer(data, np.uint8)
        self._offsets: NDArray[np.int64] = table["offset"].to_numpy()
        self._bytes: NDArray[np.int64] = table["bytes"].to_numpy()
        self._starts = np.cumsum([0, *(container.rows for container in self._containers)])
        self.problems = [problem for container in self._containers for problem in container.problems]
        self._datasets: dict[str, Any] = {}

    @classmethod
    def build(cls, sources: str | Sequence[str], cache: Path | None = None, progress: bool = True) -> ImageIndex:
        """Index the images of all sources, in order. `cache` is a file for the index, written or updated.

        With `progress` a progress line is shown, and a warning if there are images in unsupported formats.
        """
        sources = [sources] if isinstance(sources, str) else list(sources)
        if not sources:
            raise DataError("no sources given; name folders, globs, tar shards or hf: datasets")
        unsupported = UnsupportedFiles()
        saved, table = _load_index(cache) if cache is not None else ([], _INDEX_SCHEMA.empty_table())
        columns = "{task.description}", "{task.fields[count]}", TimeElapsedColumn()
        with progress_bar(*columns, shown=progress) as bar:
            task = bar.add_task("finding pictures", total=None, count="")

            def show(count: int) -> None:
                seconds = bar.tasks[0].elapsed or 0
                rate = f", {count / seconds:,.0f}/s" if seconds > 1 else ""
                bar.update(task, count=f"{count:,}{rate}")

            builder = _IndexBuilder(saved, table, show)
            for source in sources:
                before = builder.count
                with collect_unsupported() as of_source:
                    builder.add(source)
                show(builder.count)
                if builder.count == before:
                    raise DataError(of_source.append_to(builder.describe_empty(source)))
                unsupported |= of_source
        if progress:
            unsupported.warn()
        table = builder.table()
        if cache is not None and builder.containers != saved:
            _save_index(cache, builder.containers, table)
        return cls(builder.containers, table)

    @classmethod
    def of_files(
        cls, root: str | os.PathLike[str], names: Sequence[str], spans: NDArray[np.int64] | None = None
    ) -> ImageIndex:
        """Index files under `root` by name, or parts of files, named `file\\0part`, with (offset, size) in `spans`.

        Nothing is opened or checked to exist.
        """
        # Names come from lists in downloaded archives: they must not lead out of the folder.
        if outside := next((name for name in names if ".." in name and ".." in name.split("/")), None):
            raise DataError(f"the lists name {outside!r}, which is outside the dataset's folder")
        spans = np.full((len(names), 2), -1) if spans is None else spans
        # fsencode: a file name need not be valid UTF-8.
        columns = [[os.fsencode(name) for name in names], spans[:, 0], spans[:, 1]]
        return cls([_Container("files", os.fspath(root), rows=len(names))], pa.table(columns, schema=_INDEX_SCHEMA))

    def take(self, indices: Sequence[int]) -> ImageIndex:
        """Return the index of some images, of one made by `of_files`."""
        (container,) = self._containers
        spans = np.stack([self._offsets, self._bytes], 1)[indices]
        return self.of_files(container.address, [self._name(i) for i in indices], spans)

    def __len__(self) -> int:
        return len(self._offsets)

    def describe_problems(self, limit: int = 20) -> list[str]:
        """Return a line for each problem, at most `limit` and one more."""
        lines = [f"unusable: {name}, {reason}" for name, reason in self.problems[:limit]]
        more = len(self.problems) - limit
        return [*lines, f"unusable: {more:,} more"] if more > 0 else lines

    def name(self, i: int) -> str:
        """Return the name of image `i`: its path or address, then the member of the shard or the row of the dataset."""
        container, path, offset, _ = self._locate(i)
        return f"{container.address}/{offset}" if container.kind == "dataset" else as_text(path)

    def relative_name(self, i: int) -> str:
        """Return the name of image `i` in its folder or shard: the same wherever that lies."""
        return as_text(self._name(i).replace("\0", "/"))

    def path(self, i: int) -> str:
        """Return the path or address of the file that holds image `i`."""
        container, path, _, _ = self._locate(i)
        return container.address if container.kind == "shard" else path.partition("\0")[0]

    def sizes(self) -> NDArray[np.int64]:
        """Return the size of each local image in bytes; -1 where its file is missing."""
        sizes = self._bytes.copy()
        for i in np.flatnonzero(sizes < 0).tolist():
            with suppress(OSError):
                sizes[i] = os.stat(self.path(i)).st_size
        return sizes

    def digest(self) -> bytes:
        """Return a hash of the names and their order, but not of the folder's path; part of users' result rows."""
        names = self._names[self._ends[0] : self._ends[-1]].tobytes()
        return hashlib.sha256(np.ascontiguousarray(self._ends - self._ends[0], "<i8").tobytes() + names).digest()

    def read(self, i: int) -> str | bytes:
        """Return image `i` as `veca.images.open_image` takes it: the path of a local file, or encoded bytes."""
        container, _, offset, size = self._locate(i)
        if container.kind == "dataset":
            if container.address not in self._datasets:
                self._datasets[container.address] = _open_dataset(container.address)
            return _dataset_bytes(self._datasets[container.address][offset])
        file = self.path(i)
        if offset < 0:
            return read_remote(file, None, size) if is_remote(file) else file
        return (read_remote if is_remote(file) else read_span)(file, offset, size)

    @property
    def fingerprint(self) -> str:
        """A hash of names, order and sizes, wherever the folders or shards are; it differs if the images differ."""
        digest = hashlib.sha256(f"veca pictures {_FORMAT}".encode())
        for container in self._containers:
            shard = os.path.basename(container.address) if container.kind == "shard" else ""
            digest.update(f"\n{container.kind} {as_text(shard)} {container.rows}".encode())
        for array in (self._ends - self._ends[0], self._offsets, self._bytes):
            digest.update(np.ascontiguousarray(array, "<i8").data)
        digest.update(self._names[self._ends[0] : self._ends[-1]].data)
        return digest.hexdigest()

    def _locate(self, i: int) -> tuple[_Container, str, int, int]:
        """Return the container of image `i`, its path, its offset and its size in bytes."""
        name = self._name(i)
        container = self._containers[int(np.searchsorted(self._starts, i, side="right")) - 1]
        path = f"{container.address}/{name}" if container.address else name
        return container, path, int(self._offsets[i]), int(self._bytes[i])

    def _name(self, i: int) -> str:
        if not 0 <= i < len(self):
            raise IndexError(f"picture {i}; there are {len(self):,}")
        return os.fsdecode(self._names[self._ends[i] : self._ends[i + 1]].tobytes())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_datasets": {}}  # worker processes open their own


def _load_index(path: Path) -> tuple[list[_Container], pa.Table]:
    """Read a saved index; an empty one if there is no such file or it is not one of ours."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # pyarrow's own errors are among these
        table = pq.read_table(path)
        saved = json.loads((table.schema.metadata or {})[b"veca"])
        containers = [_Container(**{**c, "problems": [tuple(p) for p in c["problems"]]}) for c in saved["places"]]
        table = table.replace_schema_metadata()
        complete = sum(container.rows for container in containers) == len(table) and table.schema == _INDEX_SCHEMA
        if saved["format"] == _FORMAT and complete:
            return containers, table
    return [], _INDEX_SCHEMA.empty_table()


def _save_index(path: Path, containers: Sequence[_Container], table: pa.Table) -> None:
    metadata = {"format": _FORMAT, "places": [asdict(container) for container in containers]}
    with atomic_path(path) as part:
        pq.write_table(table.replace_schema_metadata({"veca": json.dumps(metadata)}), part, compression="zstd")


class _IndexBuilder:
    """An index being built: containers, and their rows one after the other.

    Rows of shards that are unchanged are taken from the saved index. `show` is called with the number of images.
    """

    def __init__(self, saved: Sequence[_Container], table: pa.Table, show: Callable[[int], None]) -> None:
        self.containers, self.count, self._show = list[_Container](), 0, show
        # Each row: name relative to the container, offset (-1 if it is a file of its own), size or -1
        self._parts, self._rows = [_INDEX_SCHEMA.empty_table()], list[tuple[bytes, int, int]]()
        starts = itertools.accumulate((container.rows for container in saved), initial=0)
        self._saved = {(c.address, c.stamp): (c, table.slice(i, c.rows)) for c, i in zip(saved, starts, strict=False)}

    def table(self) -> pa.Table:
        self._flush()
        return pa.concat_tables(self._parts)

    def add(self, source: str) -> None:
        """Add the images of one source."""
        if source.startswith("hf:"):
            dataset = _open_dataset(source)
            self.containers.append(_Container("dataset", source, dataset._fingerprint))
            for row, size in enumerate(_dataset_sizes(dataset)):
                self._add_row(b"", row, int(size))
            return
        try:
            root, files = list_files(source, SHARDS)
        except SourceError as error:
            hint = "" if is_remote(source) else ". Name a folder, glob, tar shard, an address with :// or hf:NAME"
            raise DataError(f"{error}{hint}") from error
        for file in map(add_stamp, files):
            if file.path.lower().endswith(SHARDS) and not file.error:
                self._add_shard(file.path, file.stamp)
                continue
            base = root if file.path.startswith(f"{root}/") else ""
            if not self.containers or (self.containers[-1].kind, self.containers[-1].address) != ("files", base):
                self.containers.append(_Container("files", base))
            container = self.containers[-1]
            if file.error:
                container.problems.append((file.name, file.error))
                continue
            name = os.fsencode(file.path[len(base) + 1 :] if base else file.path)
            self._add_row(name, -1, file.file_size)
            # A hash of the stamps of all, so that the saved index is updated when a file changes.
            container.stamp = hashlib.blake2b(f"{container.stamp} {file.stamp}".encode(), digest_size=8).hexdigest()

    def _add_shard(self, address: str, stamp: str) -> None:
        if address.lower().endswith("gz"):
            reason = "pictures in a packed archive cannot be read one by one, in any order"
            raise DataError(f"{as_text(address)}: {reason}. Unpack it to .tar with gunzip")
        if (address, stamp) in self._saved:
            container, rows = self._saved[address, stamp]
            self._flush()
            self.containers.append(container)
            self._parts.append(rows)
            self.count += container.rows
            self._show(self.count)
            return
        container = _Container("shard", address, stamp)
        self.containers.append(container)
        prefix = len(as_text(address)) + 1
        for item in shard_items(address):
            if item.span is None:
                container.problems.append((item.name, item.error))
            else:
                self._add_row(item.name[prefix:].encode(), *item.span)

    def _add_row(self, name: bytes, offset: int, size: int) -> None:
        """Add an image to the last container."""
        self._rows.append((name, offset, size))
        self.containers[-1].rows += 1
        self.count += 1
        if self.count % 1000 == 0:
            self._show(self.count)
        if len(self._rows) >= _FLUSH_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._parts.append(pa.table(list(zip(*self._rows, strict=True)), schema=_INDEX_SCHEMA))
            self._rows = []

    def describe_empty(self, source: str) -> str:
        """Return the message for a source without images."""
        problems = [problem for container in self.containers for problem in container.problems]
        reasons = "".join(f"; {name}: {reason}" for name, reason in problems[-3:])
        hint = "" if reasons else ". Shards in a folder are named by a glob: FOLDER/*.tar"
        return f"{as_text(source)}: no pictures found{reasons}{hint}"


def _open_dataset(source: str) -> Any:
    """Open the dataset of `hf:NAME_OR_FOLDER[:split[:column]]`, reduced to its column of encoded images."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source}: needs the library datasets. pip install 'veca[hf]'") from None
    name, split, column, *more = [*source.removeprefix("hf:").split(":"), "", ""]
    if not name or any(more):
        raise DataError(f"{source!r}: must be hf:NAME_OR_FOLDER[:split[:column]]")
    saved = any(os.path.exists(os.path.join(name, file)) for file in ("state.json", "dataset_dict.json"))
    try:
        dataset = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, split=split or None)
    except Exception as error:  # from the hub, the disk or the dataset's files
        raise DataError(f"{source}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    if isinstance(dataset, datasets.DatasetDict):
        split = split or ("train" if "train" in dataset or len(dataset) != 1 else next(iter(dataset)))
        if split not in dataset:
            raise DataError(f"{source}: no split {split!r}; there are {', '.join(dataset)}")
        dataset = dataset[split]
    columns = [key for key, feature in dataset.features.items() if isinstance(feature, datasets.Image)]
    if (column or "".join(columns[:1])) not in columns:
        raise DataError(f"{source}: no column of pictures {column!r}; there are {', '.join(columns) or 'none'}")
    column = column or columns[0]
    return dataset.select_columns([column]).cast_column(column, datasets.Image(decode=False))


def _dataset_sizes(dataset: Any) -> NDArray[np.int64]:
    """Return the sizes of the encoded images; -1 where only reading them would tell."""
    if dataset._indices is not None:  # a selection of rows
        return np.full(len(dataset), -1)
    column = dataset.data.column(dataset.column_names[0])
    sizes: NDArray[np.int64] = pc.binary_length(pc.struct_field(column, "bytes")).fill_null(-1).to_numpy()
    return sizes


def _dataset_bytes(row: dict[str, Any]) -> str | bytes:
    image = next(iter(row.values())) or {}
    source: str | bytes | None = image["bytes"] if image.get("bytes") is not None else image.get("path")
    if source is None:
        raise ImageError("the row has no picture")
    return source
