"""Read the headers of untrusted tar archives in bounded memory and time.

Iterating over the standard library's `tarfile` keeps whatever a header claims (names, PAX records and sparse maps of
any size), parses PAX records in quadratic time before Python 3.11.10 and loops on negative sizes before 3.11.14. Only
names, types, sizes and offsets are needed here, so `tarfile` parses single blocks and this does the rest: ustar, GNU
long names and PAX. Everything else is skipped in pieces.
"""

import gzip
import tarfile
from collections.abc import Callable, Iterator
from typing import IO, Literal, NamedTuple

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
        self.file, self.on_read, self.position = file, on_read or (lambda _: None), 0

    def read(self, size: int) -> bytes:
        """Read `size` bytes, or all that are left."""
        data = self.file.read(size)
        self.position += len(data)
        self.on_read(self.position)
        return data

    def skip_to(self, position: int) -> None:
        """Skip to `position`, or to the end."""
        if isinstance(self.file, gzip.GzipFile):
            while self.position < position and self.read(min(_PIECE, position - self.position)):
                pass
        elif position != self.position:
            self.position = position
            self.file.seek(position)
            self.on_read(position)


def iter_members(reader: TarReader) -> Iterator[Member]:
    """Yield all members in order. The reader is then at the start of the member's data, which need not be read."""
    while (header := _read_header(reader)) is not None:
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
        if header.isdir():
            kind = "folder"
        elif header.isreg():
            kind = "sparse" if sparse or header.type == tarfile.GNUTYPE_SPARSE else "file"
        name = name or header.name.encode("utf-8", "surrogateescape")
        if len(name) > NAME_BYTES:
            error = error or f"a name of {len(name):,} bytes in an archive; at most {NAME_BYTES:,} are read"
        size = 0 if header.type in _WITHOUT_DATA else header.size if size is None else size
        start = reader.position
        yield Member(name[:NAME_BYTES].decode("utf-8", "surrogateescape"), kind, start, size, error)
        reader.skip_to(start + size + -size % _BLOCK_SIZE)


def _read_header(reader: TarReader) -> tarfile.TarInfo | None:
    """Read the next header, None at the end mark; raise `tarfile.HeaderError` if it is broken."""
    block = reader.read(_BLOCK_SIZE)
    if not block:
        raise TarError("it ends without its end mark")
    if block == bytes(_BLOCK_SIZE):
        return None
    header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    if header.size < 0:
        raise TarError(f"broken header, a size of {header.size:,} bytes")
    # An old GNU sparse map may go on in blocks of its own, each of which states whether another follows.
    more = header.type == tarfile.GNUTYPE_SPARSE and block[482]
    while more:
        if len(block := reader.read(_BLOCK_SIZE)) < _BLOCK_SIZE:
            raise TarError("it ends within a sparse map")
        more = block[504]
    return header


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
