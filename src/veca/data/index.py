"""Index of the images to train on: random access to millions of them, kept in memory and in a file.

    folder, glob, file, tar shard   on this machine
    s3://…, https://…, memory://…   the same, anywhere fsspec reaches; members of shards are read by byte range
    hf:NAME[:split[:column]]        a Hugging Face dataset, by its name on the hub or its folder

Folders are listed anew each time; the headers of a shard are read once and kept in the file until the shard changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from rich.progress import TimeElapsedColumn

from veca.data.remote import SourceError, as_text, is_remote, read_remote, read_span
from veca.data.sources import SHARDS, Item, add_stamp, list_files, shard_items
from veca.errors import VecaError
from veca.images import ImageError
from veca.images.formats import UnsupportedFiles, collect_unsupported
from veca.utils.console import progress_bar
from veca.utils.files import atomic_path

_FORMAT = 1
# Arrays of an index that are saved
_COLUMNS = ("_names", "_ends", "_offsets", "_bytes")


class DataError(VecaError, ValueError):
    """Images that cannot be loaded; the message says which, why and the remedy."""


@dataclass
class _Container:
    """A folder, shard or dataset with `rows` images from number `first` on; `stamp` changes when it does."""

    kind: Literal["files", "shard", "dataset"]
    address: str
    first: int
    stamp: str = ""
    rows: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)


class ImageIndex:
    """All images of some sources, by number; made by `build`."""

    def __init__(self) -> None:
        self._containers: list[_Container] = []
        # Of each image: its name in the container, its offset in the shard (-1: a file of its own) or its row in the
        # dataset, and its bytes or -1. Plain arrays: they take no more memory than their bytes, and forked processes
        # share them. Names are concatenated; name i ends where name i + 1 starts.
        self._names, self._ends = array("B"), array("q", [0])
        self._offsets, self._bytes = array("q"), array("q")
        self._datasets: dict[str, Any] = {}

    @classmethod
    def build(cls, sources: str | Sequence[str], cache: Path | None = None, progress: bool = True) -> ImageIndex:
        """Index the images of all sources, in order. `cache` is a file for the index, written or updated.

        With `progress` a progress line is shown, and a warning if there are images in unsupported formats.
        """
        sources = [sources] if isinstance(sources, str) else list(sources)
        if not sources:
            raise DataError("no sources given; name folders, globs, tar shards or hf: datasets")
        index, saved, unsupported = cls(), cls.load(cache) if cache else cls(), UnsupportedFiles()
        shards = {(container.address, container.stamp): container for container in saved._containers}
        with progress_bar("finding pictures", "{task.completed:,}", TimeElapsedColumn(), shown=progress) as bar:
            task = bar.add_task("", total=None)
            for source in sources:
                before = len(index)
                with collect_unsupported() as of_source:
                    for count in index._add_source(source, saved, shards):
                        if count % 1000 == 0:
                            bar.update(task, completed=count)
                bar.update(task, completed=len(index))
                if len(index) == before:
                    reasons = "".join(f"; {name}: {reason}" for name, reason in index.problems[-3:])
                    hint = "" if reasons else ". Shards in a folder are named by a glob: FOLDER/*.tar"
                    raise DataError(of_source.append_to(f"{as_text(source)}: no pictures found{reasons}{hint}"))
                unsupported |= of_source
        if progress:
            unsupported.warn()
        if cache is not None and index._describe_containers() != saved._describe_containers():
            index._save(cache)
        return index

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
        index = cls()
        index._containers.append(_Container("files", os.fspath(root), 0))
        for name, (offset, size) in zip(names, spans.tolist(), strict=True):
            index._add_image(os.fsencode(name), offset, size)  # fsencode: a file name need not be valid UTF-8
        return index

    def take(self, indices: Sequence[int]) -> ImageIndex:
        """Return the index of some images, of one made by `of_files`."""
        (container,) = self._containers
        spans = np.stack([np.asarray(self._offsets), np.asarray(self._bytes)], 1)[indices]
        return self.of_files(container.address, [self._name(i) for i in indices], spans)

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def problems(self) -> list[tuple[str, str]]:
        """What cannot be used, by name and reason: damaged shards, folders that cannot be listed."""
        return [(name, reason) for container in self._containers for name, reason in container.problems]

    def describe_problems(self, limit: int = 20) -> list[str]:
        """Return a line for each problem, at most `limit` and one more."""
        lines = [f"unusable: {name}, {reason}" for name, reason in self.problems[:limit]]
        more = len(self.problems) - limit
        return [*lines, f"unusable: {more:,} more"] if more > 0 else lines

    def name(self, i: int) -> str:
        """Return the name of image `i`: its path or address, then the member of the shard or the row of the dataset."""
        container, path = self._locate(i)
        return f"{container.address}/{self._offsets[i]}" if container.kind == "dataset" else as_text(path)

    def relative_name(self, i: int) -> str:
        """Return the name of image `i` in its folder or shard: the same wherever that lies."""
        return as_text(self._name(i).replace("\0", "/"))

    def path(self, i: int) -> str:
        """Return the path or address of the file that holds image `i`."""
        container, path = self._locate(i)
        return container.address if container.kind == "shard" else path.partition("\0")[0]

    def sizes(self) -> NDArray[np.int64]:
        """Return the size of each local image in bytes; -1 where its file is missing."""
        sizes = np.array(self._bytes)
        for i in np.flatnonzero(sizes < 0).tolist():
            with suppress(OSError):
                sizes[i] = os.stat(self.path(i)).st_size
        return sizes

    def digest(self) -> bytes:
        """Return a hash of the names and their order, but not of the folder's path; part of users' result rows."""
        return hashlib.sha256(np.asarray(self._ends, "<i8").tobytes() + self._names.tobytes()).digest()

    def read(self, i: int) -> str | bytes:
        """Return image `i` as `veca.images.open_image` takes it: the path of a local file, or encoded bytes."""
        container, file, offset, size = self._locate(i)[0], self.path(i), self._offsets[i], self._bytes[i]
        if container.kind != "dataset":
            if offset >= 0:
                return read_span(file, offset, size)
            return read_remote(file, size) if is_remote(file) else file
        if container.address not in self._datasets:
            self._datasets[container.address] = _open_dataset(container.address)
        row: dict[str, Any] = self._datasets[container.address][offset]
        image = next(iter(row.values())) or {}
        source: str | bytes = image.get("bytes") or image.get("path") or b""
        if not source:
            raise ImageError("the row has no picture")
        return source

    @property
    def fingerprint(self) -> str:
        """A hash of names, order and sizes, wherever the folders or shards are; it differs if the images differ."""
        digest = hashlib.sha256(f"veca pictures {_FORMAT}".encode())
        for container in self._containers:
            shard = os.path.basename(container.address) if container.kind == "shard" else ""
            digest.update(f"\n{container.kind} {as_text(shard)} {container.rows}".encode())
        for numbers in (self._ends, self._offsets, self._bytes):
            digest.update(np.asarray(numbers, "<i8").data)
        digest.update(self._names)
        return digest.hexdigest()

    def _locate(self, i: int) -> tuple[_Container, str]:
        """Return the container of image `i`, and its path."""
        name = self._name(i)
        container = self._containers[bisect_right(self._containers, i, key=lambda container: container.first) - 1]
        return container, f"{container.address}/{name}" if container.address else name

    def _name(self, i: int) -> str:
        if not 0 <= i < len(self):
            raise IndexError(f"picture {i}; there are {len(self):,}")
        return os.fsdecode(bytes(self._names[self._ends[i] : self._ends[i + 1]]))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_datasets": {}}  # worker processes open their own

    def _add_source(self, source: str, saved: ImageIndex, shards: dict[tuple[str, str], _Container]) -> Iterator[int]:
        """Add the images of one source, yielding the count after each; `shards` of `saved` are not read again."""
        if source.startswith("hf:"):
            import pyarrow.compute as pc  # slow to import, and few sources are datasets

            dataset = _open_dataset(source)
            self._containers.append(_Container("dataset", source, len(self), dataset._fingerprint))
            sizes = pc.binary_length(pc.struct_field(dataset.data.column(dataset.column_names[0]), "bytes"))
            for row, size in enumerate(sizes.fill_null(-1).to_pylist()):  # -1: the row names a file
                yield self._add_image(b"", row, size)
            return
        try:
            root, files = list_files(source, SHARDS)
        except SourceError as error:
            hint = "" if is_remote(source) else ". Name a folder, glob, tar shard, an address with :// or hf:NAME"
            raise DataError(f"{error}{hint}") from error
        for file in map(add_stamp, files):
            if file.path.lower().endswith(SHARDS) and not file.error:
                yield from self._add_shard(file, saved, shards)
                continue
            base = root if file.path.startswith(f"{root}/") else ""
            if not self._containers or (self._containers[-1].kind, self._containers[-1].address) != ("files", base):
                self._containers.append(_Container("files", base, len(self)))
            container = self._containers[-1]
            if file.error:
                container.problems.append((file.name, file.error))
                continue
            yield self._add_image(os.fsencode(file.path[len(base) + 1 :] if base else file.path), -1, file.file_size)
            # A hash of the stamps of all, so that the saved index is updated when a file changes.
            container.stamp = hashlib.blake2b(f"{container.stamp} {file.stamp}".encode(), digest_size=8).hexdigest()

    def _add_shard(self, shard: Item, saved: ImageIndex, shards: dict[tuple[str, str], _Container]) -> Iterator[int]:
        if shard.path.lower().endswith("gz"):
            reason = "pictures in a packed archive cannot be read one by one, in any order"
            raise DataError(f"{shard.name}: {reason}. Unpack it to .tar with gunzip")
        if (known := shards.get((shard.path, shard.stamp))) is not None:
            self._containers.append(replace(known, first=len(self)))
            images = slice(known.first, known.first + known.rows)
            ends = np.asarray(saved._ends[images.start : images.stop + 1])
            self._ends.frombytes((ends[1:] - ends[0] + len(self._names)).tobytes())
            self._names += saved._names[ends[0] : ends[-1]]
            self._offsets += saved._offsets[images]
            self._bytes += saved._bytes[images]
            return
        container = _Container("shard", shard.path, len(self), shard.stamp)
        self._containers.append(container)
        for item in shard_items(shard.path):
            if item.span is None:
                container.problems.append((item.name, item.error))
            else:
                yield self._add_image(item.name[len(shard.name) + 1 :].encode(), *item.span)

    def _add_image(self, name: bytes, offset: int, size: int) -> int:
        """Add an image to the last container; return how many there are."""
        self._names.frombytes(name)
        self._ends.append(len(self._names))
        self._offsets.append(offset)
        self._bytes.append(size)
        self._containers[-1].rows += 1
        return len(self)

    @classmethod
    def load(cls, path: Path) -> ImageIndex:
        """Read a saved index; an empty one if there is no such file or it is not one of ours."""
        index = cls()
        with suppress(OSError, ValueError, KeyError, TypeError, BadZipFile), np.load(path) as saved:
            index._containers = [_Container(**container) for container in json.loads(str(saved["containers"]))]
            for key in _COLUMNS:
                setattr(index, key, array(getattr(index, key).typecode, saved[key].tobytes()))
            return index
        return cls()

    def _save(self, path: Path) -> None:
        columns: dict[str, Any] = {key: np.asarray(getattr(self, key)) for key in _COLUMNS}
        with atomic_path(path) as part, open(part, "wb") as file:
            np.savez_compressed(file, containers=self._describe_containers(), **columns)

    def _describe_containers(self) -> str:
        return json.dumps([asdict(container) for container in self._containers])


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
