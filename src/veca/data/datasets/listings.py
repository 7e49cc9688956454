"""Reads what labelled datasets come with: text lists, MATLAB files, folders of images."""

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from veca.data.sources import list_files
from veca.errors import VecaError

_MAX_LIST_BYTES = 1 << 28
"""Of a list, or of a MATLAB file when unpacked: the longest list, that of Places365, has 60 million bytes."""
_COMPRESSED = 15
"""Tag of a compressed element in the MAT format (miCOMPRESSED)."""


class DatasetError(VecaError, ValueError):
    """A dataset cannot be read; the message says what is missing and which layout is expected."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the block, which reads a file or folder, into `DatasetError` with its path."""
    try:
        yield
    except OSError as error:
        raise DatasetError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not a text file") from error


def read_lines(path: Path) -> list[str]:
    """Read the non-empty lines of a list, stripped."""
    with reading(path):
        if (size := path.stat().st_size) > _MAX_LIST_BYTES:
            raise DatasetError(f"{path} has {size:,} bytes; at most {_MAX_LIST_BYTES:,} are read of a list")
        lines = path.read_text("utf-8").splitlines()
    return [line.strip() for line in lines if line.strip()]


def read_columns(path: Path, columns: int) -> list[list[str]]:
    """Split the lines of a list into words; fewer than `columns` are an error, as it cannot be the right list."""
    rows = [line.split() for line in read_lines(path)]
    if short := next((row for row in rows if len(row) < columns), None):
        raise DatasetError(f"{path} has the line {' '.join(short)!r}; {columns} words are expected")
    return rows


def load_mat(path: Path, *names: str) -> dict[str, Any]:
    """Return the variables `names` of a .mat file, without dimensions of size one."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise DatasetError(f"{path}: needs SciPy. pip install 'veca[eval]'") from None
    try:
        _check_unpacked_size(path)
        variables: dict[str, Any] = loadmat(path, squeeze_me=True, variable_names=list(names))
    except NotImplementedError:
        raise DatasetError(f"{path}: a file of MATLAB 7.3; save it with -v7") from None
    except DatasetError:
        raise
    except Exception as error:  # damaged files surface as almost anything
        reason = f"{type(error).__name__}: {error}"
        raise DatasetError(f"{path}: not a MATLAB file, or damaged ({reason}); get it again") from error
    if missing := [name for name in names if name not in variables]:
        raise DatasetError(f"{path}: has no {', '.join(missing)}; is it of another dataset?")
    return {name: variables[name] for name in names}


def _check_unpacked_size(path: Path) -> None:
    """Refuse a .mat file that unpacks to too much: SciPy would fill the memory with it."""
    size = path.stat().st_size
    left = _MAX_LIST_BYTES - size  # bytes that it may still unpack to
    with open(path, "rb") as file:
        header = file.read(128)  # text, version, and "IM" or "MI" for the byte order
        order = "<" if header[126:128] == b"IM" else ">"
        while left >= 0 and len(tag := file.read(8)) == 8:
            kind, length = struct.unpack(f"{order}II", tag)
            if kind != _COMPRESSED:
                file.seek(length, os.SEEK_CUR)
                continue
            # Unpacked a megabyte at a time and thrown away: only the size matters here.
            unpacker, packed = zlib.decompressobj(), file.read(min(length, size))
            while packed and left >= 0 and not unpacker.eof:
                left -= len(unpacker.decompress(packed, 1 << 20))
                packed = unpacker.unconsumed_tail
    if left < 0:
        raise DatasetError(f"{path}: more than {_MAX_LIST_BYTES:,} bytes when unpacked; is it the right file?")


def subfolders(folder: Path) -> list[str]:
    """Return the sorted names of the folders in `folder` that are not hidden."""
    with reading(folder):
        return sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))


def images_in(root: Path, folder: str) -> list[str]:
    """Return the sorted paths, relative to `root`, of all images under one of its folders."""
    if not (root / folder).is_dir():
        raise DatasetError(f"{root} has no folder {folder}")
    items = list(list_files(str(root / folder))[1])
    if bad := next((item for item in items if item.error), None):
        raise DatasetError(f"{bad.name}: {bad.error}")
    start = len(str(root)) + 1  # not os.path.relpath, which is slow for a million files
    return [item.path[start:] for item in items]


def first_existing(root: Path, *names: str) -> str:
    """Return the first name that exists in `root`, where the same thing goes by several names."""
    for name in names:
        if (root / name).exists():
            return name
    raise DatasetError(f"{root} has no {' or '.join(names)}")
