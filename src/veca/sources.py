"""Pictures from files, folders, globs and tar shards: one walk in a fixed order, decoded by worker processes.

Nothing here holds more than one folder's names, so any number of pictures can pass through.
"""

from __future__ import annotations

import glob
import gzip
import os
import signal
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import AvifImagePlugin
from torch.utils.data import DataLoader, Dataset

from veca.images import EXTENSIONS, Fit, ImageError, fit_image, open_image, to_tensor

SHARDS = (".tar", ".tar.gz", ".tgz")

_LABELS = {"seg", "depth", "mask", "label"}
MEMBER_BYTES = 1 << 30


class SourceError(ValueError):
    """A source that is not there."""


class Item(NamedTuple):
    """One picture to come, small enough to send to another process: a file, a span of it, bytes, or what is wrong."""

    name: str
    path: str = ""
    span: tuple[int, int] | None = None
    data: bytes | None = None
    error: str = ""


def items_of(sources: Sequence[str]) -> Iterator[Item]:
    """All pictures of all sources, in order, found as they are asked for."""
    return chain.from_iterable(map(expand, sources))


def expand(source: str) -> Iterator[Item]:
    """The pictures of one file, folder, glob or tar shard."""
    for item in files_of(source):
        if item.path.lower().endswith(SHARDS):
            yield from shard_items(item.path)
        else:
            yield item


def files_of(source: str) -> Iterator[Item]:
    """The files of one source: pictures, and tar shards as they are."""
    if os.path.isdir(source):
        yield from _walk(source, ("**", "*"), shards=False)
    elif os.path.lexists(source):
        yield Item(as_text(source), source)
    elif glob.has_magic(source):
        parts = Path(source).parts
        fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        root, pattern = str(Path(*parts[:fixed])), parts[fixed:]
        if os.path.isdir(root):
            yield from _walk(root, (*pattern, "*") if pattern[-1] == "**" else pattern, shards=True)
    else:
        raise SourceError(f"{source!r}: no such file or folder")


def _walk(root: str, pattern: Sequence[str], shards: bool) -> Iterator[Item]:
    """Pictures whose path from `root` matches, sorted; nothing hidden. One folder's names are held at a time."""
    problems: list[OSError] = []
    for folder, folders, names in os.walk(root, onerror=problems.append):
        here = Path(folder).relative_to(root).parts
        folders[:] = sorted(f for f in folders if f[0] != "." and _matches((*here, f), pattern, part=True))
        above = "" if Path(folder) == Path() else str(Path(folder))
        for name in sorted(name for name in names if name[0] != "." and _matches((*here, name), pattern)):
            path = os.path.join(above, name)  # a Path for each of millions would take as long as all the rest
            if os.path.splitext(name)[1].lower() in EXTENSIONS or (shards and name.lower().endswith(SHARDS)):
                yield Item(as_text(path), path)
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
    path: str, opener: Callable[[str, str], IO[bytes]] = open, wanted: Callable[[str], bool] = is_picture
) -> Iterator[Item]:
    """The members of a tar archive whose names are `wanted`; nothing is unpacked."""
    packed, after = path.lower().endswith("gz"), "its start"
    try:
        with opener(path, "rb") as raw, gzip.open(raw) if packed else nullcontext(raw) as file:
            tape = _Tape(file)
            archive = tarfile.TarFile(fileobj=cast(IO[bytes], tape))
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would remember them all
                if not member.isdir() and wanted(member.name):
                    yield _member(path, archive, member, packed)
                after = member.name
            if tape.last.strip(b"\0") or len(tape.last) != tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it ends without its end mark" if not tape.last else "broken header")
    except Exception as error:  # a damaged archive surfaces as almost anything
        yield Item(as_text(path), error=as_text(f"damaged archive, nothing was read after {after}: {error}"))


def _member(path: str, archive: tarfile.TarFile, member: tarfile.TarInfo, packed: bool) -> Item:
    name = as_text(f"{path}/{member.name}")
    if not member.isfile():
        return Item(name, error="a link or special file in an archive; only regular files are read")
    if member.size > MEMBER_BYTES:
        return Item(name, error=f"{member.size:,} bytes in an archive; at most {MEMBER_BYTES:,} are read")
    if packed or member.issparse():
        file = archive.extractfile(member)
        return Item(name, data=file.read() if file else b"")
    return Item(name, path, span=(member.offset_data, member.size))


def as_text(name: str) -> str:
    """`name` as it can be written to any file; bytes that are no text in it come out as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


class Record(NamedTuple):
    """One picture decoded, (3, height, width) uint8, with its original (width, height); or why not."""

    name: str
    size: tuple[int, int] = (0, 0)
    pixels: NDArray[np.uint8] | None = None
    error: str = ""


class _Decoder(Dataset[Record]):
    """Indexed by what to read instead of a number: the walk over the sources happens once, in the main process."""

    def __init__(self, size: int, fit: Fit, max_pixels: int) -> None:
        self.size, self.fit, self.max_pixels = size, fit, max_pixels

    def __getitem__(self, item: Item) -> Record:
        try:
            image = open_image(_content(item), max_pixels=self.max_pixels)
            fitted = fit_image(image, self.size, self.fit, self.max_pixels)
            # An array, not a tensor: tensors travel in shared memory, which containers have little of.
            return Record(item.name, image.size, to_tensor(fitted).numpy())
        except Exception as error:  # whatever one picture does, the others are to be embedded
            reason = str(error) if isinstance(error, ImageError) else f"{type(error).__name__}: {error}"
            reason = reason.removeprefix("<bytes>: ").removeprefix(f"{item.path}: ")  # the row has the name
            return Record(item.name, error=as_text(reason)[:1000])


def _content(item: Item) -> str | bytes:
    if item.error:
        raise ImageError(item.error)
    if item.data is not None:
        return item.data
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
        collate_fn=_as_is,
        worker_init_fn=init_worker,
        prefetch_factor=4 if workers else None,
        generator=torch.Generator(),  # so that the caller's random numbers stay as they were
    )
    with interrupts_later():
        records = iter(loader)
    try:
        yield records
    finally:
        # Left to the garbage collector, the processes would live as long as a traceback that mentions them.
        getattr(records, "_shutdown_workers", lambda: None)()


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Ctrl-C while processes are forked would be lost in a hook of the interpreter: it is raised after the block."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets it
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])


def _as_is(record: Any) -> Any:
    return record


def init_worker(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process gets it too, and ends its workers
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
