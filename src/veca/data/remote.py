"""Remote files through fsspec: list, open and read them, with retries and size limits."""

import glob
import io
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import IO, Any

import fsspec

from veca.errors import VecaError
from veca.images import ImageError
from veca.images.formats import select_images

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
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


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
        has_magic = glob.has_magic(path)
        if not has_magic and fs.isfile(path):  # one file keeps the address it was given by, query and all
            return source.rpartition("/")[0], iter([(source, _stamp(fs.info(path)))])
        infos = fs.glob(path, detail=True) if has_magic else fs.find(path, detail=True)
    except Exception as error:  # every file system has its own exceptions; ImportError names the missing package
        reason = error if isinstance(error, ImportError) else f"cannot be listed ({type(error).__name__}: {error})"
        raise SourceError(f"{source}: {reason}") from error
    root = re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0] if has_magic else path.rstrip("/")
    files = (name for name, info in sorted(infos.items()) if info.get("type") == "file")
    shown = (name for name in files if not any(part.startswith(".") for part in name[len(root) :].split("/")))
    images = select_images(shown, source, containers if has_magic else ())
    return fs.unstrip_protocol(root), ((fs.unstrip_protocol(name), _stamp(infos[name])) for name in images)


def _stamp(info: dict[str, Any]) -> str:
    size, version = info.get("size"), next((info[key] for key in _VERSION_KEYS if info.get(key)), "")
    return f"{'' if size is None else size} {version}"


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

    def readable(self) -> bool:
        return True

    seekable = readable

    def close(self) -> None:
        self.file.close()
        super().close()


def retry(address: str, read: Callable[[], bytes]) -> bytes:
    """Call `read` up to three times, then raise `SourceError`; a missing file is raised as it is."""
    for pause in (*_RETRY_PAUSES, None):
        try:
            return read()
        except (FileNotFoundError, ImageError):
            raise
        except Exception as error:  # every file system has its own exceptions
            if pause is None:
                raise SourceError(f"{as_text(address)}: cannot be read ({type(error).__name__}: {error})") from error
            time.sleep(pause)
    raise AssertionError


def read_remote(address: str, size: int) -> bytes:
    """Read a remote file of `size` bytes, -1 where unknown."""
    _check_size(size)
    fs, path = fsspec.url_to_fs(address)  # looked up here, so that a forked process has its own connection
    if size >= 0:
        return fs.cat_file(path)
    data = bytearray()
    with fs.open(path, "rb") as stream:
        while piece := stream.read(_BLOCK_BYTES):  # it might never end
            data += piece
            _check_size(len(data))
    return bytes(data)


class SpanReader(AbstractContextManager["SpanReader"]):
    """Reads spans of files, members of archives; the file read last stays open while the block runs."""

    def __init__(self) -> None:
        self._path = ""
        self._file: IO[bytes] = io.BytesIO()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, path: str, offset: int, size: int) -> bytes:
        """Read `size` bytes of a local or remote file from `offset`."""
        _check_size(size)
        if is_remote(path):
            fs, path = fsspec.url_to_fs(path)
            data: bytes = fs.cat_file(path, start=offset, end=offset + size)
        else:
            if path != self._path:
                self._file.close()
                self._path = ""
                self._file = open(path, "rb")  # noqa: SIM115
                self._path = path
            self._file.seek(offset)
            data = self._file.read(size)
        if len(data) < size:
            raise ImageError("the archive ends within this picture")
        return data


def read_span(path: str, offset: int, size: int) -> bytes:
    """Read `size` bytes of a local or remote file from `offset`: a member of an archive."""
    with SpanReader() as spans:
        return spans.read(path, offset, size)


def _check_size(size: int) -> None:
    if size > MAX_IMAGE_BYTES:
        raise ImageError(f"{size:,} bytes; at most {MAX_IMAGE_BYTES:,} are read")
