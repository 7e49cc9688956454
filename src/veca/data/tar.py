"""Read the headers of untrusted tar archives in bounded memory and time.

Iterating over the standard library's `tarfile` keeps whatever a header claims (names, PAX records and sparse maps of
any size), parses PAX records in quadratic time before Python 3.11.10 and loops on negative sizes before 3.11.14. Only
names, types, sizes and offsets are needed here, so a pattern parses the blocks that writers usually make, `tarfile` all
others, and this does the rest: ustar, GNU long names and PAX. Everything else is skipped in pieces.
"""

import gzip
import io
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import IO, Literal, NamedTuple
from zlib import adler32

from veca.errors import VecaError

# Limit of all long names and PAX records of one member; beyond it the member is an error
HEADER_BYTES = 1 << 20
# The longest path that Linux supports
NAME_BYTES = 4096

_BLOCK_SIZE = 512
_PIECE = 1 << 20
_PAX = b"xX"
# Headers before a member's own: long name, long link, PAX records, those of all members
_EXTENDED = b"LK" + _PAX + b"g"
# Links, devices, folders and pipes: no data follow, whatever size the header states
_WITHOUT_DATA = b"123456"
# A subset of the blocks that `tarfile` accepts, with a size in octal, of the types 0 (file), L and x
_NUMBERS = rb"(?:[0-7]{6}[0-7 ][ \0]|\0{8}|[\x80\xff].{7})"
_TIME = rb"(?:[0-7]{11}[ \0]|[\x80\xff].{11})"
# What members of an archive usually share: mode and owner; type, link, user and group, prefix
_USUAL_OWNER = re.compile(rb"(?s)%b{3}" % _NUMBERS)
_USUAL_REST = re.compile(rb"(?s)([0Lx]).{172}%b{2}(.{155}).{12}" % _NUMBERS)
# And what they do not, but for the name: size, date, checksum
_USUAL_SIZE = re.compile(rb"(?s)([0-7]{11})[ \0]%b([0-7]{6})[ \0]{2}" % _TIME)


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


class _Header(NamedTuple):
    type: bytes
    name: bytes
    size: int


class TarReader:
    """A tar or gzip-compressed tar file, read from start to end.

    `on_read` is called with the number of bytes read or skipped so far, about once per mebibyte.
    """

    def __init__(self, file: IO[bytes] | gzip.GzipFile, on_read: Callable[[int], None] | None = None) -> None:
        self.file, self.on_read, self.position, self._reported = file, on_read, 0, 0
        is_plain = isinstance(getattr(file, "raw", None), io.FileIO) and hasattr(os, "pread")
        self._descriptor = file.fileno() if is_plain else None
        self._seekable = not isinstance(file, gzip.GzipFile)

    def read(self, size: int) -> bytes:
        """Read `size` bytes, or all that are left."""
        if self._seekable:
            self.file.seek(self.position)
        data = self.file.read(size)
        self._advance(self.position + len(data))
        return data

    def read_block(self) -> bytes:
        """Read 512 bytes, or all that are left; of a local file with one system call."""
        if self._descriptor is None:
            return self.read(_BLOCK_SIZE)
        block = os.pread(self._descriptor, _BLOCK_SIZE, self.position)
        self.position += len(block)
        return block

    def skip_to(self, position: int) -> None:
        """Skip to `position`, or to the end."""
        if self._seekable:
            self._advance(position)
            return
        while self.position < position and self.read(min(_PIECE, position - self.position)):
            pass

    def _advance(self, position: int) -> None:
        self.position = position
        if position - self._reported >= _PIECE:
            self._reported = position
            if self.on_read:
                self.on_read(position)


def iter_members(reader: TarReader) -> Iterator[Member]:
    """Yield all members in order. The reader is then at the start of the member's data, which need not be read."""
    while (header := _read_header(reader)) is not None:
        if header.type == tarfile.REGTYPE:  # nearly all: nothing is known of it but its own header
            start = reader.position
            yield Member(header.name.decode("utf-8", "surrogateescape"), "file", start, header.size)
            reader.skip_to(start + header.size + -header.size % _BLOCK_SIZE)
            continue
        # From headers before the member's own; the first to state something wins.
        name, error, size, sparse, used = b"", "", None, False, 0
        while header.type in _EXTENDED:
            end = reader.position + header.size + -header.size % _BLOCK_SIZE
            used += header.size if header.type in b"L" + _PAX else 0  # of others nothing is read
            if used > HEADER_BYTES:
                error = f"a header of {header.size:,} bytes in an archive; at most {HEADER_BYTES:,} are read"
                reader.skip_to(end - 1)
                if not reader.read(1):
                    raise TarError(f"it ends within a header of {header.size:,} bytes")
            elif header.type == b"L":
                name = name or reader.read(header.size).partition(b"\0")[0]
            elif header.type in _PAX:
                records = _pax_records(reader.read(header.size))
                name = name or records.get(b"GNU.sparse.name") or records.get(b"path", b"").rstrip(b"/")
                sparse = sparse or any(key.startswith(b"GNU.sparse.") for key in records)
                if size is None and (digits := records.get(b"size")) is not None:
                    size = _parse_digits(digits)
            reader.skip_to(end)
            if (header := _read_header(reader)) is None:
                raise TarError("it ends within the headers of a member")
        kind: Literal["file", "folder", "sparse", "other"] = "other"
        if header.type == tarfile.DIRTYPE:
            kind = "folder"
        elif header.type in tarfile.REGULAR_TYPES:
            kind = "sparse" if sparse or header.type == tarfile.GNUTYPE_SPARSE else "file"
        name = name or header.name
        if len(name) > NAME_BYTES:
            error = error or f"a name of {len(name):,} bytes in an archive; at most {NAME_BYTES:,} are read"
        size = 0 if header.type in _WITHOUT_DATA else header.size if size is None else size
        start = reader.position
        yield Member(name[:NAME_BYTES].decode("utf-8", "surrogateescape"), kind, start, size, error)
        reader.skip_to(start + size + -size % _BLOCK_SIZE)


def _read_header(reader: TarReader) -> _Header | None:
    """Read the next header, None at the end mark; raise `tarfile.HeaderError` if it is broken."""
    block = reader.read_block()
    if not block:
        raise TarError("it ends without its end mark")
    if (header := _parse_usual(block)) is not None:
        return header
    if block == bytes(_BLOCK_SIZE):
        return None
    info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    if info.size < 0:
        raise TarError(f"broken header, a size of {info.size:,} bytes")
    # An old GNU sparse map may go on in blocks of its own, each of which states whether another follows.
    more = info.type == tarfile.GNUTYPE_SPARSE and block[482]
    while more:
        if len(block := reader.read_block()) < _BLOCK_SIZE:
            raise TarError("it ends within a sparse map")
        more = block[504]
    return _Header(info.type, info.name.encode("utf-8", "surrogateescape"), info.size)


def _parse_usual(block: bytes) -> _Header | None:
    """Parse a header as `tarfile` does, but much faster; None if it is unusual or broken."""
    own, shared = _USUAL_SIZE.fullmatch(block, 124, 156), _parse_shared(block[100:124], block[156:])
    if own is None or shared is None:
        return None
    (size, checksum), (kind, prefix, total) = own.groups(), shared
    # The checksum is of all bytes, its own field taken as spaces. Without overflow, the low half of Adler-32 is one
    # more than the sum of the bytes; that of 256 bytes cannot overflow.
    total += (adler32(block[:100]) & 0xFFFF) + (adler32(block[124:148]) & 0xFFFF) - 2
    if total + 8 * ord(" ") != int(checksum, 8):
        return None
    name = block[:100].partition(b"\0")[0]
    return _Header(kind, b"%b/%b" % (prefix, name) if prefix and kind != b"L" else name, int(size, 8))


@lru_cache(64)
def _parse_shared(owner: bytes, rest: bytes) -> tuple[bytes, bytes, int] | None:
    """Type, prefix and sum of bytes of what members of an archive usually share; None if it is unusual or too short."""
    match = _USUAL_REST.fullmatch(rest)
    if match is None or _USUAL_OWNER.fullmatch(owner) is None:
        return None
    kind, prefix = match.groups()
    return kind, prefix.partition(b"\0")[0], sum(owner) + sum(rest)


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """Parse records `LENGTH KEY=VALUE\\n`; only those about names, sizes and sparse files are kept."""
    records: dict[bytes, bytes] = {}
    start = 0
    while start < len(data) and data[start]:
        space = data.find(b" ", start, start + 20)
        end = start + _parse_digits(data[start : max(space, start)])
        if not space < end <= len(data) or data[end - 1 : end] != b"\n":
            raise TarError("broken header")
        key, _, value = data[space + 1 : end - 1].partition(b"=")
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
            records[key] = value
        start = end
    return records


def _parse_digits(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 20:  # Python takes long for numbers of very many digits
        raise TarError("broken header")
    return int(digits)
