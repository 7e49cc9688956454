"""Reading of MATLAB files with SciPy, with bounds on their unpacked size."""

from __future__ import annotations

import os
import struct
import zlib
from typing import Any

from veca.errors import VecaError

_MAX_MAT_BYTES = 1 << 28
"""Bytes of a file, packed or not: the largest of the benchmarks has a few million."""
_COMPRESSED = 15
"""Tag of a compressed element in the MAT format (miCOMPRESSED)."""


class MatError(VecaError, ValueError):
    """A .mat file cannot be used; the message names it, the reason and the way out."""


def load_mat(path: str | os.PathLike[str], *names: str) -> dict[str, Any]:
    """Return the variables `names` of a .mat file, without dimensions of size one."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise MatError(f"{os.fspath(path)}: needs SciPy. pip install 'veca[eval]'") from None
    try:
        _check_size(path)
        variables: dict[str, Any] = loadmat(path, squeeze_me=True, variable_names=list(names))
    except NotImplementedError:
        raise MatError(f"{os.fspath(path)}: a file of MATLAB 7.3; save it with -v7") from None
    except MatError:
        raise
    except Exception as error:  # damaged files surface as almost anything
        reason = f"{type(error).__name__}: {error}"
        raise MatError(f"{os.fspath(path)}: not a MATLAB file, or damaged ({reason}); get it again") from error
    if missing := [name for name in names if name not in variables]:
        raise MatError(f"{os.fspath(path)}: has no {', '.join(missing)}; is it of another dataset?")
    return {name: variables[name] for name in names}


def _check_size(path: str | os.PathLike[str]) -> None:
    """Refuse a file that unpacks to too much: SciPy would fill the memory with it."""
    size = os.path.getsize(path)
    left = _MAX_MAT_BYTES - size  # bytes that it may still unpack to
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
        raise MatError(f"{os.fspath(path)}: more than {_MAX_MAT_BYTES:,} bytes when unpacked; is it the right file?")
