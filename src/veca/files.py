"""Files that are either whole or not there."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from veca.errors import ArgumentError


def check_writable(path: str | os.PathLike[str], folder: bool = False) -> None:
    """Raise, before any work is done for it, if the file `path` could not be written, or with `folder`, files in it.

    Folders on the way are made, as they would be later.
    """
    if "\0" in os.fspath(path):
        raise ArgumentError(f"{os.fspath(path)!r} cannot be written: no name holds a NUL; choose another")
    place = Path(path) if folder else _file(path).parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        reason = "not a folder" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
        raise ArgumentError(f"{path} cannot be written ({place}: {reason}); choose another place") from error


def check_utf8(path: str | os.PathLike[str]) -> None:
    """Raise if the name is not UTF-8, which pyarrow and safetensors need to open a file."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{path} is no name in UTF-8, as files of features need; choose another") from None


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and vanishes when it does not.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_path(folder + "/a.txt") as part:
    ...         _ = part.write_text("whole")
    ...     os.listdir(folder)
    ['a.txt']
    """
    path = _file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:  # which file is to be known
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        part.unlink(missing_ok=True)


def _file(path: str | os.PathLike[str]) -> Path:
    """What `path` names, or leads to if it is a link. A device is no file, and is not to become one."""
    found = Path(os.path.realpath(path))
    if found.exists() and not (found.is_file() or found.is_dir()):
        raise ArgumentError(
            f"{path} is a device, a pipe or a socket, which a file would take the place of; name a file"
        )
    return found
