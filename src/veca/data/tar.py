"""Read the headers of untrusted tar archives in bounded memory and time.

The standard library's `tarfile` keeps whatever a header claims (names, PAX records and sparse maps of any size), parses
PAX records in quadratic time before Python 3.11.10 and loops on negative sizes before 3.11.14. Only names, types, sizes
and offsets are needed here, so this reads the headers itself: ustar, GNU long names and PAX. Everything else is skipped
in pieces.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from typing import IO, Literal, NamedTuple

from veca.errors import VecaError

# Limit of all long names and PAX records of one member; beyond it the member is an error
HEADER_BYTES = 1 << 20
# The longest path that Linux supports
NAME_BYTES = 4096

_BLOCK_SIZE = 512
_PIECE = 1 << 20
_LONG_NAME, _LONG_LINK, _PAX, _GLOBAL_PAX = b"L", b"K", b"xX", b"g"
_EXTENDED = _LONG_NAME + _LONG_LINK + _PAX + _GLOBAL_PAX
_REGULAR, _FOLDER, _OLD_SPARSE = b"07\0", b"5", b"S"
# Links, devices, folders and pipes: no data follow, whatever size the header states
_WITHOUT_DATA = b"123456"


class TarError(VecaError, ValueError):
    """The rest of the archive cannot be read."""


class Member(NamedTuple):
    """A member of an archive: `size` bytes from `offset`."""

    name: str
    kind: Literal["file", "folder", "sparse", "other"]
    offset: int
    size: int
    # Why its full name is not known
    error: str = ""


class TarReader:
    """A tar or gzip-compressed tar file, read from start to end.

    `on_read` is called with the number of bytes read or skipped so far.
    """

    def __init__(self, file: IO[bytes] | gzip.GzipFile, on_read: Callable[[int], None] | None = None) -> None:
        self.file, self.on_read, self.position = file, on_read, 0
        self.compressed = isinstance(file, gzip.GzipFile)

    def read(self, size: int) -> bytes:
        """Read `size` bytes, or all that are left."""
        data = self.file.read(size)
        self._advance(len(data))
        return data

    def skip_to(self, position: int) -> None:
        """Skip to `position`, or to the end."""
        if not self.compressed:
            if position != self.position:
                self.file.seek(position)
                self._advance(position - self.position)
            return
        while self.position < position and self.read(min(_PIECE, position - self.position)):
            pass

    def _advance(self, size: int) -> None:
        self.position += size
        if self.on_read is not None:
            self.on_read(self.position)


def iter_members(reader: TarReader) -> Iterator[Member]:
    """Yield all members in order. The reader is then at the start of the member's data, which need not be read."""
    while True:
        extended = _ExtendedHeader()
        head = _header(reader, first=True)
        while head is not None and head.kind in _EXTENDED:
            extended.add(reader, head)
            head = _header(reader, first=False)
        if head is None:
            return
        if head.kind == _OLD_SPARSE:
            _skip_sparse_map(reader, head.block)
        kind: Literal["file", "folder", "sparse", "other"] = "other"
        if head.kind == _FOLDER or (head.kind == b"\0" and head.name.endswith(b"/")):
            kind = "folder"
        elif extended.sparse or head.kind == _OLD_SPARSE:
            kind = "sparse"
        elif head.kind in _REGULAR:
            kind = "file"
        name, error, start = extended.name or head.name, extended.error, reader.position
        if len(name) > NAME_BYTES:
            error = error or f"a name of {len(name):,} bytes in an archive; at most {NAME_BYTES:,} are read"
            name = name[:NAME_BYTES]
        size = 0 if head.kind in _WITHOUT_DATA else head.size if extended.size is None else extended.size
        yield Member(name.decode("utf-8", "surrogateescape"), kind, start, size, error)
        reader.skip_to(start + size + -size % _BLOCK_SIZE)


class _Header(NamedTuple):
    name: bytes
    kind: bytes
    size: int
    block: bytes


class _ExtendedHeader:
    """Name, size and kind of a member from the headers before its own; the first to state one wins."""

    def __init__(self) -> None:
        self.name, self.error, self.sparse, self.used = b"", "", False, 0
        self.size: int | None = None

    def add(self, reader: TarReader, head: _Header) -> None:
        end = reader.position + head.size + -head.size % _BLOCK_SIZE
        self.used += head.size if head.kind in _LONG_NAME + _PAX else 0  # of others nothing is read
        if self.used > HEADER_BYTES:
            self.error = f"a header of {head.size:,} bytes in an archive; at most {HEADER_BYTES:,} are read"
            reader.skip_to(end - 1)
            if not reader.read(1):
                raise TarError(f"it ends within a header of {head.size:,} bytes")
        elif head.kind == _LONG_NAME:
            self.name = self.name or reader.read(head.size).partition(b"\0")[0]
        elif head.kind in _PAX:
            records = _pax_records(reader.read(head.size))
            self.name = self.name or records.get(b"GNU.sparse.name") or records.get(b"path", b"").rstrip(b"/")
            self.sparse = self.sparse or any(key.startswith(b"GNU.sparse.") for key in records)
            if self.size is None and (digits := records.get(b"size")) is not None:
                if not digits.isdigit() or len(digits) > 20:
                    raise TarError("broken header")
                self.size = int(digits)
        reader.skip_to(end)


def _header(reader: TarReader, first: bool) -> _Header | None:
    """Read the next header; None at the end mark, which is valid only in place of a member's `first` header."""
    block = reader.read(_BLOCK_SIZE)
    if not block:
        raise TarError("it ends without its end mark")
    if first and block == bytes(_BLOCK_SIZE):
        return None
    if len(block) < _BLOCK_SIZE or not _is_checksum(block, _parse_number(block[148:156])):
        raise TarError("broken header")
    name, kind, prefix = block[:100].partition(b"\0")[0], block[156:157], block[345:500].partition(b"\0")[0]
    if prefix and kind not in _LONG_NAME + _LONG_LINK + _OLD_SPARSE:
        name = prefix + b"/" + name
    if (size := _parse_number(block[124:136])) < 0:
        raise TarError(f"broken header, a size of {size:,} bytes")
    return _Header(name, kind, size, block)


def _is_checksum(block: bytes, claimed: int) -> bool:
    counted = block[:148] + b" " * 8 + block[156:]
    # Some old programs summed signed bytes.
    return claimed == (total := sum(counted)) or claimed == total - 256 * sum(byte > 127 for byte in counted)


def _parse_number(field: bytes) -> int:
    """Parse octal digits, or a base-256 number where the first bit is set."""
    if field[0] & 0x80:
        value = int.from_bytes(field[1:], "big")
        return value - (1 << 8 * (len(field) - 1)) if field[0] == 0xFF else value
    digits = field.partition(b"\0")[0].strip() or b"0"
    if not digits.isdigit() or digits.strip(b"01234567"):
        raise TarError("broken header")
    return int(digits, 8)


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """Parse records `LENGTH KEY=VALUE\\n`; only those about names, sizes and sparse files are kept."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data) and data[start]:
        space = data.find(b" ", start, start + 20)
        digits = data[start : max(space, start)]
        end = start + int(digits) if digits.isdigit() else 0
        if not space < end <= len(data) or data[end - 1 : end] != b"\n":
            raise TarError("broken header")
        key, _, value = data[space + 1 : end - 1].partition(b"=")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
            records[key] = value
        start = end
    return records


def _skip_sparse_map(reader: TarReader, block: bytes) -> None:
    """Skip the blocks of an old GNU sparse map; each states whether another follows."""
    more = block[482]
    while more:
        if len(block := reader.read(_BLOCK_SIZE)) < _BLOCK_SIZE:
            raise TarError("it ends within a sparse map")
        more = block[504]
