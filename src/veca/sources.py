"""Pictures from files, folders, globs, tar shards and Parquet, here or at any address that fsspec reads.

One walk in a fixed order, decoded by worker processes. Nothing here holds more than one folder's names, or what one
address lists, so any number of pictures can pass through.
"""

from __future__ import annotations

import atexit
import glob
import gzip
import io
import multiprocessing
import os
import re
import tarfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard, cast

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import AvifImagePlugin
from torch.utils.data import DataLoader, Dataset

from veca.errors import VecaError
from veca.images import EXTENSIONS, Fit, ImageError, fit_image, open_image, to_tensor
from veca.signals import init_signals_of_worker, starting_workers
from veca.unread import UNREAD, note_left_out

SHARDS = (".tar", ".tar.gz", ".tgz")
TABLES = (".parquet",)

_LABELS = {"seg", "depth", "mask", "label"}
MEMBER_BYTES = 1 << 30
_BLOCK = 1 << 20
"""How much of a remote file is fetched at a time where it is read piece by piece."""
_PAUSES = (0.5, 5.0)
"""Seconds between tries to fetch something."""
_ROWS = 16
"""Rows of a table that are held at a time."""


class SourceError(VecaError, ValueError):
    """A source that is not there, or cannot be reached."""


class Item(NamedTuple):
    """One picture to come, small enough to send to another process: a file, a span of it, bytes, or what is wrong.

    `number` is its place in its shard or table, or in its run of files that are pictures themselves.
    """

    name: str
    path: str = ""
    span: tuple[int, int] | None = None
    data: bytes | None = None
    error: str = ""
    number: int = 0


def items_of(sources: Sequence[str], column: str | None = None) -> Iterator[Item]:
    """All pictures of all sources, in order, found as they are asked for."""
    return unpacked(chain.from_iterable(files_of(source, SHARDS + TABLES) for source in sources), column)


def expand(source: str, column: str | None = None) -> Iterator[Item]:
    """The pictures of one file, folder, glob, tar shard or Parquet file."""
    return items_of([source], column)


def unpacked(files: Iterable[Item], column: str | None = None) -> Iterator[Item]:
    """The pictures of files, numbered; those of a Parquet file are in `column` (None: in the only one they can be)."""
    number = 0
    for file in files:
        if not is_container(file):
            yield _numbered(file, number)
            number += 1
            continue
        remote = is_remote(file.path)
        opener = open_remote if remote else open
        if file.path.lower().endswith(TABLES):
            items = table_items(file.path, opener, column)
        else:
            items = shard_items(file.path, opener, read=remote)
        yield from (_numbered(item, i) for i, item in enumerate(items))
        number = 0


def _numbered(item: Item, number: int) -> Item:
    return Item(*item[:-1], number)


def is_container(file: Item) -> bool:
    """Whether the file holds pictures instead of being one."""
    return file.path.lower().endswith(SHARDS + TABLES)


def count(sources: Sequence[str]) -> int | None:
    """How many pictures there are; None if a remote shard would have to be read for it."""
    total = 0
    for file in chain.from_iterable(files_of(source, SHARDS + TABLES) for source in sources):
        if file.path.lower().endswith(TABLES):
            with suppress(Exception), (open_remote if is_remote(file.path) else open)(file.path, "rb") as raw:
                total += pq.read_metadata(raw).num_rows
        elif is_container(file) and is_remote(file.path):
            return None
        else:
            total += sum(1 for _ in unpacked([file]))
    return total


def files_of(source: str, containers: tuple[str, ...] = SHARDS) -> Iterator[Item]:
    """The files of one source: pictures, and what ends as one of `containers` as it is, if it is named or by a glob."""
    if is_remote(source):
        for _, address, about in remote_files(source, containers):
            size = about.get("size") or 0
            large = size > MEMBER_BYTES and not address.lower().endswith(containers)
            error = f"{size:,} bytes; at most {MEMBER_BYTES:,} are read" if large else ""
            yield Item(as_text(address), address, error=error)
    elif os.path.isdir(source):
        yield from _walk(source, ("**", "*"), ())
    elif os.path.lexists(source):
        yield Item(as_text(source), source)
    elif glob.has_magic(source):
        parts = Path(source).parts
        fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        root, pattern = str(Path(*parts[:fixed])), parts[fixed:]
        if os.path.isdir(root):
            yield from _walk(root, (*pattern, "*") if pattern[-1] == "**" else pattern, containers)
    else:
        raise SourceError(f"{source!r}: no such file or folder")


def is_remote(source: str) -> bool:
    return "://" in source


def remote_files(source: str, containers: tuple[str, ...]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(root, address, what its file system tells) of every file: in a folder its pictures, by a glob also containers.

    They come sorted, and nothing hidden.
    """
    try:
        fs, path = fsspec.url_to_fs(source)
        if glob.has_magic(path):
            found, root = fs.glob(path, detail=True), fixed_part(path)
        elif fs.isfile(path):
            found, root = {path: fs.info(path)}, path.rpartition("/")[0]
        else:
            found, root = fs.find(path, detail=True), path.rstrip("/")
    except ImportError as error:
        raise SourceError(f"{source}: {error}") from error
    except Exception as error:  # every file system has its own
        raise SourceError(f"{source}: cannot be listed ({type(error).__name__}: {error})") from error
    suffixes = tuple(EXTENSIONS) + (containers if glob.has_magic(path) else ())
    kinds = Counter[str]()
    for name, about in sorted(found.items()):
        shown = not any(part.startswith(".") for part in name[len(root) :].split("/"))
        if about.get("type") == "file" and (name == path or (name.lower().endswith(suffixes) and shown)):
            where = source if name == path else fs.unstrip_protocol(name)  # an address of one file stays as it is
            base = source.rpartition("/")[0] if name == path else fs.unstrip_protocol(root)
            yield base, where, about
        elif shown and (suffix := os.path.splitext(name)[1].lower()) in UNREAD:
            kinds[suffix] += 1
    note_left_out((source,), kinds)


def fixed_part(path: str) -> str:
    """The folders of a path before anything in it is a pattern."""
    return re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0]


def open_remote(address: str, mode: str) -> IO[bytes]:
    return io.BufferedReader(_Remote(address, mode), _BLOCK)


class _Remote(io.RawIOBase):
    """A file at an address. What cannot be fetched of it is not damaged: `SourceError`, which ends the run instead."""

    def __init__(self, address: str, mode: str) -> None:
        fs, path = fsspec.url_to_fs(address)
        self.address, self.file = address, fs.open(path, mode, block_size=_BLOCK)

    def readinto(self, buffer: Any) -> int:
        data = fetched(self.address, lambda: self.file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self.file.seek(offset, whence))

    def tell(self) -> int:
        return int(self.file.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()


def fetched(address: str, fetch: Callable[[], bytes]) -> bytes:
    """What `fetch` gives, tried again a few times; a file that is not there is its own error."""
    for pause in (*_PAUSES, None):
        try:
            return fetch()
        except FileNotFoundError:
            raise
        except Exception as error:  # every file system has its own
            if pause is None:
                raise SourceError(f"{as_text(address)}: cannot be read ({type(error).__name__}: {error})") from error
            time.sleep(pause)
    raise AssertionError


def remote_bytes(address: str, offset: int | None, size: int) -> bytes:
    """A file at an address, or a span of it."""
    if size > MEMBER_BYTES:
        raise ImageError(f"{size:,} bytes; at most {MEMBER_BYTES:,} are read")
    fs, path = fsspec.url_to_fs(address)  # asked for here, so that a forked process has its own
    if offset is None:
        return fs.cat_file(path)
    data: bytes = fs.cat_file(path, start=offset, end=offset + size)
    if len(data) < size:
        raise ImageError("the archive ends within this picture")
    return data


def _walk(root: str, pattern: Sequence[str], containers: tuple[str, ...]) -> Iterator[Item]:
    """Pictures whose path from `root` matches, sorted; nothing hidden. One folder's names are held at a time."""
    problems: list[OSError] = []
    kinds = Counter[str]()
    for folder, folders, names in os.walk(root, onerror=problems.append):
        here = Path(folder).relative_to(root).parts
        folders[:] = sorted(f for f in folders if f[0] != "." and _matches((*here, f), pattern, part=True))
        above = "" if Path(folder) == Path() else str(Path(folder))
        for name in sorted(name for name in names if name[0] != "." and _matches((*here, name), pattern)):
            path = os.path.join(above, name)  # a Path for each of millions would take as long as all the rest
            suffix = os.path.splitext(name)[1].lower()
            if suffix in EXTENSIONS or name.lower().endswith(containers):
                yield Item(as_text(path), path)
            elif suffix in UNREAD:
                kinds[suffix] += 1
    note_left_out((root, *pattern), kinds)
    yield from (Item(as_text(str(p.filename)), error=f"folder cannot be listed: {p.strerror}") for p in problems)


def _matches(parts: Sequence[str], pattern: Sequence[str], part: bool = False) -> bool:
    """Whether the path matches; with `part`, whether one that goes on from it can."""
    if not parts or not pattern:
        return bool(pattern) if part else not parts and not pattern
    if pattern[0] == "**":
        return _matches(parts, pattern[1:], part) or _matches(parts[1:], pattern, part)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:], part)


class _Tape:
    """A file for `tarfile`, which takes a broken header for the end and believes any length a header claims."""

    def __init__(self, file: gzip.GzipFile | IO[bytes]) -> None:
        self.file, self.seek, self.tell, self.last = file, file.seek, file.tell, b""

    def read(self, size: int) -> bytes:
        if size > MEMBER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        self.last = self.file.read(size)
        return self.last


def is_picture(member: str) -> bool:
    """Whether a member of an archive is a picture, by its name. Labels beside one (`7.seg.png`) are none."""
    *stem, suffix = member.rpartition("/")[2].lower().split(".")
    return f".{suffix}" in EXTENSIONS and any(stem[:1]) and not _LABELS.intersection(stem[1:])


def shard_items(
    path: str,
    opener: Callable[[str, str], IO[bytes]] = open,
    wanted: Callable[[str], bool] = is_picture,
    read: bool = False,
) -> Iterator[Item]:
    """The members of a tar archive whose names are `wanted`; nothing is unpacked. With `read` they come as bytes."""
    packed, after = path.lower().endswith("gz"), "its start"
    try:
        with opener(path, "rb") as raw, gzip.open(raw) if packed else nullcontext(raw) as file:
            tape = _Tape(file)
            archive = tarfile.TarFile(fileobj=cast(IO[bytes], tape))
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would remember them all
                if not member.isdir() and wanted(member.name):
                    yield _member(path, archive, member, packed or read)
                after = member.name
            if tape.last.strip(b"\0") or len(tape.last) != tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it ends without its end mark" if not tape.last else "broken header")
    except SourceError:
        raise
    except Exception as error:  # a damaged archive surfaces as almost anything
        yield Item(as_text(path), error=as_text(f"damaged archive, nothing was read after {after}: {error}"))


def _member(path: str, archive: tarfile.TarFile, member: tarfile.TarInfo, read: bool) -> Item:
    name = as_text(f"{path}/{member.name}")
    if not member.isfile():
        return Item(name, error="a link or special file in an archive; only regular files are read")
    if member.size > MEMBER_BYTES:
        return Item(name, error=f"{member.size:,} bytes in an archive; at most {MEMBER_BYTES:,} are read")
    if read or member.issparse():
        file = archive.extractfile(member)
        return Item(name, data=file.read() if file else b"")
    return Item(name, path, span=(member.offset_data, member.size))


def table_items(path: str, opener: Callable[[str, str], IO[bytes]] = open, column: str | None = None) -> Iterator[Item]:
    """The rows of a Parquet file, named by their numbers, with the bytes of the pictures in `column`."""
    row = 0
    try:
        with opener(path, "rb") as raw, pq.ParquetFile(raw) as table:
            chosen = _picture_column(path, table.schema_arrow, column)
            for batch in table.iter_batches(_ROWS, columns=[chosen]):
                for value in batch.column(0).to_pylist():
                    data = value.get("bytes") if isinstance(value, dict) else value
                    name = as_text(f"{path}/{row}")
                    yield Item(name, data=data) if data is not None else Item(name, error="the row has no picture")
                    row += 1
    except SourceError:
        raise
    except Exception as error:  # a damaged table surfaces as almost anything
        yield Item(as_text(path), error=as_text(f"damaged table, nothing was read from row {row} on: {error}"))


def _picture_column(path: str, schema: pa.Schema, wanted: str | None) -> str:
    """A column of bytes, or of structures that have them, as Hugging Face writes."""

    def holds_bytes(kind: pa.DataType) -> bool:
        return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)

    def fits(kind: pa.DataType) -> bool:
        inner = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)} if _is_struct(kind) else {}
        return holds_bytes(kind) or ("bytes" in inner and holds_bytes(inner["bytes"]))

    found = [field.name for field in schema if fits(field.type)]
    if wanted is None and (len(found) == 1 or "image" in found):
        return "image" if "image" in found else found[0]
    if wanted in found:
        return str(wanted)
    listed = f"there are {', '.join(found)}: name one with --column" if found else "it has none"
    which = "which column has the pictures is not clear" if wanted is None else f"no column of pictures {wanted!r}"
    raise SourceError(f"{as_text(path)}: {which}; of bytes {listed}")


def _is_struct(kind: pa.DataType) -> TypeGuard[pa.StructType]:
    return pa.types.is_struct(kind)


def as_text(name: str) -> str:
    """`name` as it can be written to any file; bytes that are no text in it come out as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


class Record(NamedTuple):
    """One picture decoded, (3, height, width) uint8, with its original (width, height); or why not."""

    name: str
    size: tuple[int, int] = (0, 0)
    pixels: NDArray[np.uint8] | None = None
    error: str = ""
    number: int = 0


class _Decoder(Dataset[Record]):
    """Indexed by what to read instead of a number: the walk over the sources happens once, in the main process."""

    def __init__(self, size: int, fit: Fit, max_pixels: int) -> None:
        self.size, self.fit, self.max_pixels = size, fit, max_pixels

    def __getitem__(self, item: Item) -> Record:
        try:
            image = open_image(_content(item), max_pixels=self.max_pixels)
            fitted = fit_image(image, self.size, self.fit, self.max_pixels)
            # An array, not a tensor: tensors travel in shared memory, which containers have little of.
            return Record(item.name, image.size, to_tensor(fitted).numpy(), number=item.number)
        except SourceError:
            raise
        except Exception as error:  # whatever one picture does, the others are to be embedded
            reason = str(error) if isinstance(error, ImageError) else f"{type(error).__name__}: {error}"
            reason = reason.removeprefix("<bytes>: ").removeprefix(f"{item.path}: ")  # the row has the name
            return Record(item.name, error=as_text(reason)[:1000], number=item.number)


def _content(item: Item) -> str | bytes:
    if item.error:
        raise ImageError(item.error)
    if item.data is not None:
        return item.data
    if is_remote(item.path):
        return fetched(item.path, lambda: remote_bytes(item.path, None, 0))
    return item.path if item.span is None else read_span(item.path, *item.span)


def read_span(path: str, offset: int, size: int) -> bytes:
    """The bytes of one member of an archive on this machine."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) < size:
        raise ImageError("the archive ends within this picture")
    return data


@contextmanager
def decoded(items: Iterator[Item], size: int, fit: Fit, max_pixels: int, workers: int) -> Iterator[Iterator[Record]]:
    """The records of `items`, in their order, made by `workers` processes (0: by this one) while the block runs."""
    loader = DataLoader(
        _Decoder(size, fit, max_pixels),
        batch_size=None,
        sampler=items,
        num_workers=workers,
        collate_fn=as_is,
        worker_init_fn=init_worker,
        prefetch_factor=4 if workers else None,
        generator=torch.Generator(),  # so that the caller's random numbers stay as they were
    )
    records = begin(loader)
    try:
        yield records
    finally:
        end(records)


_BEGUN: weakref.WeakSet[Any] = weakref.WeakSet()


def begin(loader: DataLoader[Any]) -> Iterator[Any]:
    """What a loader gives. Its processes work until `end`, or until the interpreter ends."""
    method = (loader.multiprocessing_context or multiprocessing).get_start_method() if loader.num_workers else ""
    with starting_workers(forked=method == "fork"):
        items = iter(loader)
        _BEGUN.add(items)
    return items


def end(items: Iterator[Any]) -> None:
    """End the processes; left to the garbage collector, they would live as long as a traceback that mentions them."""
    getattr(items, "_shutdown_workers", lambda: None)()
    for worker in getattr(items, "_workers", []):
        if worker.is_alive():  # it hangs, and does not heed SIGTERM
            worker.kill()
            worker.join()


@atexit.register
def _end_all() -> None:
    for items in list(_BEGUN):  # the interpreter would wait for those that do not heed SIGTERM
        end(items)


def as_is(record: Any) -> Any:
    """To collate nothing: a name, which processes that are not forked can be sent."""
    return record


def init_worker(_: int) -> None:
    init_signals_of_worker()
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
