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
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeGuard

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import AvifImagePlugin
from torch.utils.data import DataLoader, Dataset

from veca.data import parquet
from veca.data.tar import Member, Tape, TarError, members
from veca.errors import VecaError
from veca.images import EXTENSIONS, MAX_PIXELS, Fit, ImageError, fit_image, open_image, to_tensor
from veca.images.decode import max_bytes
from veca.images.formats import UNREAD, note_left_out
from veca.utils.signals import init_signals_of_worker, starting_workers

SHARDS = (".tar", ".tar.gz", ".tgz")
TABLES = (".parquet",)

_LABELS = {"seg", "depth", "mask", "label"}
MEMBER_BYTES = 1 << 30
"""Largest picture in an archive, a table or at an address, whatever `max_pixels` allows."""
_SENT_BYTES = 1 << 27
"""Of pictures on their way to decoding processes, together; a larger one goes alone."""
_BLOCK = 1 << 20
"""How much of a remote file is fetched at a time where it is read piece by piece."""
_PAUSES = (0.5, 5.0)
"""Seconds between tries to fetch something."""

OnRead = Callable[[str, int], None]
"""Is told an archive and how many of its bytes passed so far, unpacked; pictures need not come for long."""


class SourceError(VecaError, ValueError):
    """A source that is not there, or cannot be reached."""


class Item(NamedTuple):
    """One picture to come, small enough to send to another process: a file, a span of it, bytes, or what is wrong.

    `stamp` is the size of the file it is in, then after a blank its date or checksum; parts that are not known are
    empty. `number` is its place in its shard or table, or in its run of files that are pictures themselves.
    """

    name: str
    path: str = ""
    span: tuple[int, int] | None = None
    data: bytes | None = None
    error: str = ""
    stamp: str = ""
    number: int = 0


def items_of(
    sources: Sequence[str], column: str | None = None, max_pixels: int = MAX_PIXELS, on_read: OnRead | None = None
) -> Iterator[Item]:
    """All pictures of all sources, in order, found as they are asked for; none of more bytes than so many pixels take.

    Those of a Parquet file are in `column` (None: in the only one they can be).
    """
    files = chain.from_iterable(files_of(source, SHARDS + TABLES) for source in sources)
    return unpacked(files, column, max_pixels, on_read)


def expand(source: str, column: str | None = None, on_read: OnRead | None = None) -> Iterator[Item]:
    """The pictures of one file, folder, glob, tar shard or Parquet file."""
    return items_of([source], column, on_read=on_read)


def unpacked(
    files: Iterable[Item], column: str | None = None, max_pixels: int = MAX_PIXELS, on_read: OnRead | None = None
) -> Iterator[Item]:
    """The pictures of files, numbered, as `items_of` has them."""
    number, limit = 0, min(MEMBER_BYTES, max_bytes(max_pixels))
    for file in map(stamped, files):
        if not is_container(file):
            large = is_remote(file.path) and (size := _bytes_of(file)) > limit
            error = f"{size:,} bytes; at most {limit:,} are read" if large else file.error
            yield Item(file.name, file.path, error=error, stamp=file.stamp, number=number)
            number += 1
            continue
        remote = is_remote(file.path)
        opener = open_remote if remote else open
        if file.path.lower().endswith(TABLES):
            items = table_items(file.path, opener, column, limit)
        else:
            items = shard_items(file.path, opener, read=remote, limit=limit, on_read=on_read)
        yield from (Item(*item[:-2], file.stamp, i) for i, item in enumerate(items))
        number = 0


def stamped(file: Item) -> Item:
    """With its stamp; one at an address has it from where it is listed."""
    if file.stamp or not file.path or is_remote(file.path):
        return file
    try:
        about = os.stat(file.path)
    except OSError:  # it is told when the file is opened
        return file
    return Item(*file[:-2], f"{about.st_size} {about.st_mtime_ns}", file.number)


def remote_stamp(about: dict[str, Any]) -> str:
    """As `Item.stamp`, as far as the file system tells: best a checksum, which a copy has too."""
    keys = ("md5Hash", "ETag", "etag", "mtime", "LastModified", "last_modified", "created")
    size, change = about.get("size"), next((about[key] for key in keys if about.get(key)), "")
    return f"{'' if size is None else size} {change}"


def _bytes_of(file: Item) -> int:
    """-1 where it is not known."""
    size = file.stamp.partition(" ")[0]
    return int(size) if size.isdigit() else -1


def is_container(file: Item) -> bool:
    """Whether the file holds pictures instead of being one."""
    return file.path.lower().endswith(SHARDS + TABLES)


def count(sources: Sequence[str], unpack: bool = True, on_read: OnRead | None = None) -> int | None:
    """How many pictures there are; None if a shard would have to be fetched for it, or unpacked without `unpack`."""
    total = 0
    for file in chain.from_iterable(files_of(source, SHARDS + TABLES) for source in sources):
        if file.path.lower().endswith(TABLES):
            with suppress(Exception), (open_remote if is_remote(file.path) else open)(file.path, "rb") as raw:
                total += pq.read_metadata(raw).num_rows
        elif is_container(file) and (is_remote(file.path) or (_is_packed(file.path) and not unpack)):
            return None
        else:
            # With this limit no picture is read.
            total += sum(1 for _ in shard_items(file.path, limit=-1, on_read=on_read)) if is_container(file) else 1
    return total


def files_of(source: str, containers: tuple[str, ...] = SHARDS) -> Iterator[Item]:
    """The files of one source: pictures, and what ends as one of `containers` as it is, if it is named or by a glob."""
    if is_remote(source):
        for _, address, about in remote_files(source, containers):
            yield Item(as_text(address), address, stamp=remote_stamp(about))
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
    """A file at an address, or a span of it; -1 stands for a size that is not known."""
    if size > MEMBER_BYTES:
        raise ImageError(f"{size:,} bytes; at most {MEMBER_BYTES:,} are read")
    fs, path = fsspec.url_to_fs(address)  # asked for here, so that a forked process has its own
    if offset is None and size < 0:
        return _stream_bytes(fs.open(path, "rb"))
    if offset is None:
        return fs.cat_file(path)
    data: bytes = fs.cat_file(path, start=offset, end=offset + size)
    if len(data) < size:
        raise ImageError("the archive ends within this picture")
    return data


def _stream_bytes(stream: IO[bytes]) -> bytes:
    """All of it, if it is not too much: such a stream need not end."""
    pieces, size = list[bytes](), 0
    with stream:
        while piece := stream.read(_BLOCK):
            pieces.append(piece)
            if (size := size + len(piece)) > MEMBER_BYTES:
                raise ImageError(f"more than {MEMBER_BYTES:,} bytes; so many are read")
    return b"".join(pieces)


def _walk(root: str, pattern: Sequence[str], containers: tuple[str, ...]) -> Iterator[Item]:
    """Pictures whose path from `root` matches, sorted; nothing hidden. One folder's names are held at a time."""
    problems: list[OSError] = []
    kinds = Counter[str]()
    match = 1 << len(pattern)
    waiting = [("" if Path(root) == Path() else str(Path(root)), _start(1, pattern))]
    while waiting:  # folders may lie deeper in each other than functions can call themselves
        above, places = waiting.pop()
        try:
            folders, names = _listed(above or ".")
        except OSError as error:
            problems.append(error)
            continue
        for name in names:
            if not _after(name, places, pattern) & match:
                continue
            path = os.path.join(above, name)  # a Path for each of millions would take as long as all the rest
            suffix = os.path.splitext(name)[1].lower()
            if suffix in EXTENSIONS or name.lower().endswith(containers):
                yield Item(as_text(path), path)
            elif suffix in UNREAD:
                kinds[suffix] += 1
        for name in reversed(folders):
            if (beyond := _after(name, places, pattern)) & ~match:
                waiting.append((os.path.join(above, name), beyond))
    note_left_out((root, *pattern), kinds)
    yield from (Item(as_text(str(p.filename)), error=f"folder cannot be listed: {p.strerror}") for p in problems)


def _listed(folder: str) -> tuple[list[str], list[str]]:
    """Folders to go on with, and names of files; sorted, without hidden ones and links to folders."""
    folders, names = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                below = entry.is_dir()
            except OSError:
                below = False
            if not below:
                names.append(entry.name)
            elif not entry.is_symlink():
                folders.append(entry.name)
    return sorted(folders), sorted(names)


def _after(name: str, places: int, pattern: Sequence[str]) -> int:
    """Where in the pattern one more part of a path may lead, as bits; the bit after the last: the path matches."""
    found = 0
    for place, part in enumerate(pattern):
        if places >> place & 1 and (part == "**" or fnmatchcase(name, part)):
            found |= 1 << (place if part == "**" else place + 1)
    return _start(found, pattern)


def _start(places: int, pattern: Sequence[str]) -> int:
    """`**` may stand for nothing, so where it is, what follows it may be too."""
    for place, part in enumerate(pattern):
        if part == "**" and places >> place & 1:
            places |= 1 << place + 1
    return places


def is_picture(member: str) -> bool:
    """Whether a member of an archive is a picture, by its name. Labels beside one (`7.seg.png`) are none."""
    *stem, suffix = member.rpartition("/")[2].lower().split(".")
    return f".{suffix}" in EXTENSIONS and any(stem[:1]) and not _LABELS.intersection(stem[1:])


def shard_items(
    path: str,
    opener: Callable[[str, str], IO[bytes]] = open,
    wanted: Callable[[str], bool] = is_picture,
    read: bool = False,
    limit: int = MEMBER_BYTES,
    on_read: OnRead | None = None,
) -> Iterator[Item]:
    """The members of a tar archive whose names are `wanted`; nothing is unpacked. With `read` they come as bytes.

    Those of more than `limit` bytes are passed over, with an error.
    """
    packed, after = _is_packed(path), "its start"
    try:
        with opener(path, "rb") as raw, gzip.open(raw) if packed else nullcontext(raw) as file:
            tape = Tape(file, None if on_read is None else lambda size: on_read(path, size))
            for member in members(tape):
                if member.kind != "folder" and (member.error or wanted(member.name)):
                    yield _member(path, tape, member, packed or read, limit)
                after = member.name
    except SourceError:
        raise
    except Exception as error:  # a damaged archive surfaces as almost anything
        yield Item(as_text(path), error=as_text(f"damaged archive, nothing was read after {after}: {error}"))


def _member(path: str, tape: Tape, member: Member, read: bool, limit: int) -> Item:
    name = as_text(f"{path}/{member.name}")
    if error := _refusal(member, limit):
        return Item(name, error=error)
    if not read:
        return Item(name, path, span=(member.offset, member.size))
    data = tape.read(member.size)
    if len(data) < member.size:
        raise TarError(f"it ends within {member.name}")
    return Item(name, data=data)


def _is_packed(path: str) -> bool:
    return path.lower().endswith("gz")


def _refusal(member: Member, limit: int) -> str:
    """Why the member is not read, or nothing."""
    if member.error:
        return member.error
    if member.kind == "sparse":
        return "a sparse file in an archive; only regular files are read. Pack it again without --sparse"
    if member.kind != "file":
        return "a link or special file in an archive; only regular files are read"
    if member.size > limit:
        return f"{member.size:,} bytes in an archive; at most {limit:,} are read"
    return ""


def table_items(
    path: str,
    opener: Callable[[str, str], IO[bytes]] = open,
    column: str | None = None,
    limit: int = MEMBER_BYTES,
) -> Iterator[Item]:
    """The rows of a Parquet file, named by their numbers, with the bytes of the pictures in `column`.

    Those of more than `limit` bytes come as errors.
    """
    row = 0
    try:
        with opener(path, "rb") as raw, pq.ParquetFile(raw) as table:
            chosen = _picture_column(path, table.schema_arrow, column)
            for value in parquet.values(raw, table, chosen, limit):
                name = as_text(f"{path}/{row}")
                many = f"rows {row} to {row + value.rows - 1} are not read: " if value.rows > 1 else ""
                yield Item(name, data=value.data, error=f"{many}{value.error}" if value.error else "")
                row += value.rows
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
    stamp: str = ""
    number: int = 0


class _Decoder(Dataset[Record]):
    """Indexed by what to read instead of a number: the walk over the sources happens once, in the main process."""

    def __init__(self, size: int, fit: Fit, max_pixels: int) -> None:
        self.size, self.fit, self.max_pixels = size, fit, max_pixels

    def __getitem__(self, item: Item) -> Record:
        if item.number == _NOTHING.number:
            return Record("", number=item.number)
        try:
            with warnings.catch_warnings():
                # Pillow may have tens of thousands of them for one file.
                warnings.simplefilter("ignore")
                image = open_image(_content(item), max_pixels=self.max_pixels)
            fitted = fit_image(image, self.size, self.fit, self.max_pixels)
            # An array, not a tensor: tensors travel in shared memory, which containers have little of.
            pixels = to_tensor(fitted).numpy()
            return Record(item.name, image.size, pixels, stamp=item.stamp, number=item.number)
        except SourceError:
            raise
        except Exception as error:  # whatever one picture does, the others are to be embedded
            reason = str(error) if isinstance(error, ImageError) else f"{type(error).__name__}: {error}"
            reason = reason.removeprefix("<bytes>: ").removeprefix(f"{item.path}: ")  # the row has the name
            return Record(item.name, error=as_text(reason)[:1000], stamp=item.stamp, number=item.number)


def _content(item: Item) -> str | bytes:
    if item.error:
        raise ImageError(item.error)
    if item.data is not None:
        return item.data
    if is_remote(item.path):
        return fetched(item.path, lambda: remote_bytes(item.path, None, _bytes_of(item)))
    return item.path if item.span is None else read_span(item.path, *item.span)


def read_span(path: str, offset: int, size: int) -> bytes:
    """The bytes of one member of an archive on this machine."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) < size:
        raise ImageError("the archive ends within this picture")
    return data


class _Window:
    """Bounds the bytes on their way to decoding processes, which `DataLoader` counts by items alone.

    It asks for the next item whenever a record comes back, and cannot be kept waiting. So when there are bytes enough
    on their way, it is given an item that means nothing, whose record is left out.
    """

    def __init__(self, items: Iterator[Item]) -> None:
        self.items, self.bytes = items, 0
        self.sizes = deque[int]()

    def __iter__(self) -> Iterator[Item]:
        for item in self.items:
            size = len(item.data or b"")
            while self.bytes and self.bytes + size > _SENT_BYTES:
                yield _NOTHING
            self.bytes += size
            self.sizes.append(size)
            yield item

    def came_back(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            if record.number != _NOTHING.number:
                self.bytes -= self.sizes.popleft()
                yield record


_NOTHING = Item("", number=-1)


@contextmanager
def decoded(items: Iterator[Item], size: int, fit: Fit, max_pixels: int, workers: int) -> Iterator[Iterator[Record]]:
    """The records of `items`, in their order, made by `workers` processes (0: by this one) while the block runs."""
    window = _Window(items)
    loader = DataLoader(
        _Decoder(size, fit, max_pixels),
        batch_size=None,
        sampler=window,
        num_workers=workers,
        collate_fn=as_is,
        worker_init_fn=init_worker,
        prefetch_factor=4 if workers else None,
        generator=torch.Generator(),  # so that the caller's random numbers stay as they were
    )
    records = begin(loader)
    try:
        yield window.came_back(records)
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
