"""Remote files through fsspec: list, open and read them, with retries and size limits."""

from __future__ import annotations

import glob
import io
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import IO, Any

import fsspec

from veca.errors import VecaError
from veca.images import EXTENSIONS, ImageError
from veca.images.formats import UNSUPPORTED, report_unsupported

# Largest encoded image in an archive, a table or a remote file, whatever `max_pixels` allows
MAX_IMAGE_BYTES = 1 << 30
# How much of a remote file is fetched at a time where it is read sequentially
_BLOCK_BYTES = 1 << 20
# Seconds between attempts to read
_RETRY_PAUSES = (0.5, 5.0)
# Where file systems report what changes with a file; a checksum, which a copy has too, comes first
_VERSION_KEYS = ("md5Hash", "ETag", "etag", "mtime", "LastModified", "last_modified", "created")


class SourceError(VecaError, ValueError):
    """A source does not exist, or cannot be reached."""


def as_text(name: str) -> str:
    """Return a name as text that can be written to any file: bytes that are not UTF-8 become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def is_remote(source: str) -> bool:
    """Tell whether a source is an address such as s3://… instead of a local path."""
    return "://" in source


def list_remote(source: str, containers: tuple[str, ...]) -> tuple[str, Iterator[tuple[str, str]]]:
    """List a remote file, folder or glob: its root, and (address, stamp) of each file in sorted order.

    A folder gives its images, a glob also `containers` (suffixes of archives); hidden files are left out. A stamp is
    described at `veca.data.sources.Item`.
    """
    try:
        fs, path = fsspec.url_to_fs(source)
        if glob.has_magic(path):
            infos, root = fs.glob(path, detail=True), fixed_part(path)
        elif fs.isfile(path):
            infos, root = {path: fs.info(path)}, path.rpartition("/")[0]
        else:
            infos, root = fs.find(path, detail=True), path.rstrip("/")
    except Exception as error:  # every file system has its own exceptions; ImportError names the missing package
        reason = error if isinstance(error, ImportError) else f"cannot be listed ({type(error).__name__}: {error})"
        raise SourceError(f"{source}: {reason}") from error
    if path in infos and not glob.has_magic(path):  # one file keeps the address it was given by, query and all
        return source.rpartition("/")[0], iter([(source, _stamp(infos[path]))])
    suffixes = tuple(EXTENSIONS) + (containers if glob.has_magic(path) else ())

    def files() -> Iterator[tuple[str, str]]:
        unsupported = Counter[str]()
        for name, info in sorted(infos.items()):
            if any(part.startswith(".") for part in name[len(root) :].split("/")):
                continue
            if info.get("type") == "file" and name.lower().endswith(suffixes):
                yield fs.unstrip_protocol(name), _stamp(info)
            elif (suffix := os.path.splitext(name)[1].lower()) in UNSUPPORTED:
                unsupported[suffix] += 1
        report_unsupported((source,), unsupported)

    return fs.unstrip_protocol(root), files()


def _stamp(info: dict[str, Any]) -> str:
    size, version = info.get("size"), next((info[key] for key in _VERSION_KEYS if info.get(key)), "")
    return f"{'' if size is None else size} {version}"


def fixed_part(path: str) -> str:
    """Return the folders of a path before its first glob pattern."""
    return re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0]


def open_source(path: str) -> IO[bytes]:
    """Open a local path or an address for reading."""
    return io.BufferedReader(_RemoteFile(path), _BLOCK_BYTES) if is_remote(path) else open(path, "rb")


class _RemoteFile(io.RawIOBase):
    """A remote file whose failed reads raise `SourceError`: it is not damaged but unreachable, which ends the run."""

    def __init__(self, address: str) -> None:
        fs, path = fsspec.url_to_fs(address)
        self.address, self.file = address, fs.open(path, "rb", block_size=_BLOCK_BYTES)

    def readinto(self, buffer: Any) -> int:
        data = retry(self.address, lambda: self.file.read(len(buffer)))
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


def retry(address: str, read: Callable[[], bytes]) -> bytes:
    """Call `read` up to three times, then raise `SourceError`; a missing file is raised as it is."""
    for pause in (*_RETRY_PAUSES, None):
        try:
            return read()
        except FileNotFoundError:
            raise
        except Exception as error:  # every file system has its own exceptions
            if pause is None:
                raise SourceError(f"{as_text(address)}: cannot be read ({type(error).__name__}: {error})") from error
            time.sleep(pause)
    raise AssertionError


def read_remote(address: str, offset: int | None, size: int) -> bytes:
    """Read a remote file, or `size` bytes of it from `offset`; a size of -1 is unknown."""
    if size > MAX_IMAGE_BYTES:
        raise ImageError(f"{size:,} bytes; at most {MAX_IMAGE_BYTES:,} are read")
    fs, path = fsspec.url_to_fs(address)  # looked up here, so that a forked process has its own connection
    if offset is None and size < 0:
        return _read_stream(fs.open(path, "rb"))
    if offset is None:
        return fs.cat_file(path)
    return check_length(fs.cat_file(path, start=offset, end=offset + size), size)


def read_span(path: str, offset: int, size: int) -> bytes:
    """Read `size` bytes of a local file from `offset`: a member of an archive."""
    with open(path, "rb") as file:
        file.seek(offset)
        return check_length(file.read(size), size)


def check_length(data: bytes, size: int) -> bytes:
    """Return the bytes of an archive's member, or raise `ImageError` where there are fewer than `size`."""
    if len(data) < size:
        raise ImageError("the archive ends within this picture")
    return data


def _read_stream(stream: IO[bytes]) -> bytes:
    """Read a stream of unknown length, which might never end, up to the limit."""
    data = bytearray()
    with stream:
        while piece := stream.read(_BLOCK_BYTES):
            data += piece
            if len(data) > MAX_IMAGE_BYTES:
                raise ImageError(f"more than {MAX_IMAGE_BYTES:,} bytes; so many are read")
    return bytes(data)
