"""Tar archives nobody vouches for: where each member lies, in bounded memory and time.

The standard library's `tarfile` keeps whatever a header claims (names, PAX records and sparse maps of any size), parses
PAX records in quadratic time before Python 3.11.10 and follows negative sizes in circles before 3.11.14. Only names,
types, sizes and places are needed here, so this reads the headers itself: ustar, GNU long names and PAX. Whatever is
not kept passes by in pieces.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from typing import IO, Literal, NamedTuple

from veca.errors import VecaError

HEADER_BYTES = 1 << 20
"""Of long names and PAX records of one member, together; if they have more, the member is an error."""
NAME_BYTES = 4096
"""The longest path that Linux takes."""

_BLOCK = 512
_PIECE = 1 << 20
_LONG_NAME, _LONG_LINK, _PAX, _GLOBAL_PAX = b"L", b"K", b"xX", b"g"
_EXTENDED = _LONG_NAME + _LONG_LINK + _PAX + _GLOBAL_PAX
_REGULAR, _FOLDER, _OLD_SPARSE = b"07\0", b"5", b"S"
_WITHOUT_DATA = b"123456"
"""Links, devices, folders and pipes: no data follow, whatever size their header has."""


class TarError(VecaError, ValueError):
    """The archive cannot be read from here on."""


class Member(NamedTuple):
    """A member of an archive: `size` bytes from `offset` on."""

    name: str
    kind: Literal["file", "folder", "sparse", "other"]
    offset: int
    size: int
    error: str = ""
    """Why its name is not known in full."""


class Tape:
    """A tar file or what a gzip file holds, read from start to end.

    `on_read` is told the bytes that passed so far, piece by piece.
    """

    def __init__(self, file: IO[bytes] | gzip.GzipFile, on_read: Callable[[int], None] | None = None) -> None:
        self.file, self.on_read, self.position = file, on_read, 0
        self.packed = isinstance(file, gzip.GzipFile)

    def read(self, size: int) -> bytes:
        """As many bytes, or all that are left."""
        data = self.file.read(size)
        self._advance(len(data))
        return data

    def go_to(self, position: int) -> None:
        """Pass over everything before `position`, or all that is left."""
        if not self.packed:
            if position != self.position:
                self.file.seek(position)
                self._advance(position - self.position)
            return
        while self.position < position and self.read(min(_PIECE, position - self.position)):
            pass

    def ends_before(self, position: int) -> bool:
        """Whether there is less than that; the tape is then at its end."""
        self.go_to(position - 1)
        return not self.read(1)

    def _advance(self, size: int) -> None:
        self.position += size
        if self.on_read is not None:
            self.on_read(self.position)


def members(tape: Tape) -> Iterator[Member]:
    """All members in order. When one comes, the tape is at its data, which may be read or left."""
    while True:
        known = _Extended()
        head = _header(tape, first=True)
        while head is not None and head.kind in _EXTENDED:
            known.add(tape, head)
            head = _header(tape, first=False)
        if head is None:
            return
        if head.kind == _OLD_SPARSE:
            _pass_sparse_map(tape, head.block)
        kind: Literal["file", "folder", "sparse", "other"] = "other"
        if head.kind == _FOLDER or (head.kind == b"\0" and head.name.endswith(b"/")):
            kind = "folder"
        elif known.sparse or head.kind == _OLD_SPARSE:
            kind = "sparse"
        elif head.kind in _REGULAR:
            kind = "file"
        name, error, start = known.name or head.name, known.error, tape.position
        if len(name) > NAME_BYTES:
            error = error or f"a name of {len(name):,} bytes in an archive; at most {NAME_BYTES:,} are read"
            name = name[:NAME_BYTES]
        size = 0 if head.kind in _WITHOUT_DATA else head.size if known.size is None else known.size
        yield Member(name.decode("utf-8", "surrogateescape"), kind, start, size, error)
        tape.go_to(start + size + -size % _BLOCK)


class _Header(NamedTuple):
    name: bytes
    kind: bytes
    size: int
    block: bytes


class _Extended:
    """What the headers before a member's own tell of it; the first of them that tells something counts."""

    def __init__(self) -> None:
        self.name, self.error, self.sparse, self.used = b"", "", False, 0
        self.size: int | None = None

    def add(self, tape: Tape, head: _Header) -> None:
        end = tape.position + head.size + -head.size % _BLOCK
        self.used += head.size if head.kind in _LONG_NAME + _PAX else 0  # nothing is needed of others
        if self.used > HEADER_BYTES:
            self.error = f"a header of {head.size:,} bytes in an archive; at most {HEADER_BYTES:,} are read"
            if tape.ends_before(end):
                raise TarError(f"it ends within a header of {head.size:,} bytes")
        elif head.kind == _LONG_NAME:
            self.name = self.name or tape.read(head.size).partition(b"\0")[0]
        elif head.kind in _PAX:
            records = _pax_records(tape.read(head.size))
            path = records.get(b"GNU.sparse.name") or records.get(b"path", b"").rstrip(b"/")
            self.name = self.name or path
            self.sparse = self.sparse or any(key.startswith(b"GNU.sparse.") for key in records)
            self.size = _pax_size(records) if self.size is None else self.size
        tape.go_to(end)


def _header(tape: Tape, first: bool) -> _Header | None:
    """The next one; None at the end mark, which can only be where the `first` header of a member could be."""
    block = tape.read(_BLOCK)
    if not block:
        raise TarError("it ends without its end mark")
    if first and block == bytes(_BLOCK):
        return None
    if len(block) < _BLOCK or not _is_checksum(block, _number(block[148:156])):
        raise TarError("broken header")
    name, kind, prefix = block[:100].partition(b"\0")[0], block[156:157], block[345:500].partition(b"\0")[0]
    if prefix and kind not in _LONG_NAME + _LONG_LINK + _OLD_SPARSE:
        name = prefix + b"/" + name
    if (size := _number(block[124:136])) < 0:
        raise TarError(f"broken header, a size of {size:,} bytes")
    return _Header(name, kind, size, block)


def _is_checksum(block: bytes, claimed: int) -> bool:
    counted = block[:148] + b" " * 8 + block[156:]
    # Old programs summed signed bytes.
    return claimed == (total := sum(counted)) or claimed == total - 256 * sum(byte > 127 for byte in counted)


def _number(field: bytes) -> int:
    """Octal digits, or a number in base 256 where the first bit is set."""
    if field[0] & 0x80:
        value = int.from_bytes(field[1:], "big")
        return value - (1 << 8 * (len(field) - 1)) if field[0] == 0xFF else value
    digits = field.partition(b"\0")[0].strip() or b"0"
    if not digits.isdigit() or digits.strip(b"01234567"):
        raise TarError("broken header")
    return int(digits, 8)


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """Records `LENGTH KEY=VALUE\\n`, of which only those that tell of names, sizes and holes are kept."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data) and data[at]:
        space = data.find(b" ", at, at + 20)
        digits = data[at : max(space, at)]
        end = at + int(digits) if digits.isdigit() else 0
        if not space < end <= len(data) or data[end - 1 : end] != b"\n":
            raise TarError("broken header")
        key, _, value = data[space + 1 : end - 1].partition(b"=")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
            records[key] = value
        at = end
    return records


def _pax_size(records: dict[bytes, bytes]) -> int | None:
    digits = records.get(b"size")
    if digits is None:
        return None
    if not digits.isdigit() or len(digits) > 20:
        raise TarError("broken header")
    return int(digits)


def _pass_sparse_map(tape: Tape, block: bytes) -> None:
    """Blocks of places follow as long as the last one says so."""
    more = block[482]
    while more:
        if len(block := tape.read(_BLOCK)) < _BLOCK:
            raise TarError("it ends within a sparse map")
        more = block[504]
