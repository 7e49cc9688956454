"""Read encoded images from a column of an untrusted Parquet file in bounded memory.

pyarrow decompresses whole pages and does not tell their size beforehand: a file of kilobytes may hold a page of
gigabytes, or a dictionary whose one huge value every row repeats. The sizes in the footer may be wrong, so the page
headers are read first; that is cheap, as the pages themselves are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from veca.errors import VecaError

# Largest decompressed page. pyarrow needs up to three times as much memory for it; for a dictionary, twice as much
# and three times its largest value.
PAGE_BYTES = 1 << 29
# Largest encoded image
VALUE_BYTES = 1 << 27
# Rows held in memory at a time, and their bytes
_BATCH_ROWS, _BATCH_BYTES = 16, 1 << 27
# Largest page header, as in pyarrow
_PAGE_HEADER_BYTES = 1 << 24
# This many rows may take less than a byte each
_EMPTY_ROWS = 4096
# By repeating values, pages may yield this many times their bytes, or this many bytes
_REPEATS, _REPEATED_BYTES = 64, 1 << 32
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
# Of a dictionary larger than one value may be: its values are measured one by one
_MAX_VALUES = 1 << 20
# Page headers nest structs at most four deep
_MAX_NESTING = 64


class TableError(VecaError, ValueError):
    """Rows that are refused, or a file that is not Parquet."""


class Value(NamedTuple):
    """One row: the bytes of an image, or an error; an error may stand for several `rows`."""

    data: bytes | None = None
    error: str = ""
    rows: int = 1


def iter_values(file: IO[bytes], table: pq.ParquetFile, column: str, limit: int) -> Iterator[Value]:
    """Yield the rows of a column of bytes, or of structs with a field `bytes`, of at most `limit` bytes each."""
    limit = min(limit, VALUE_BYTES)
    leaves = [table.schema.column(i).path for i in range(len(table.schema))]
    leaf = leaves.index(column if column in leaves else f"{column}.bytes")
    refused: dict[int, str] = {}
    group_bytes: dict[int, int] = {}

    def batch_rows(group: int) -> int:
        """Check a row group's pages; how many of its rows fit in a batch, 0 if it is refused."""
        try:
            pages = _checked_pages(file, table.metadata.row_group(group).column(leaf), limit)
        except (TableError, pa.ArrowException, OSError) as error:
            refused[group] = str(error)
            return 0
        group_bytes[group] = sum(page.unpacked for page in pages)
        # No value is larger than the largest page.
        return min(_BATCH_ROWS, max(1, _BATCH_BYTES // max((page.unpacked for page in pages), default=1)))

    for rows, run in groupby(range(table.num_row_groups), batch_rows):
        if not rows:
            yield from (Value(error=refused[i], rows=table.metadata.row_group(i).num_rows) for i in run)
            continue
        groups, read_bytes = list(run), 0
        max_read = max(_REPEATED_BYTES, _REPEATS * sum(group_bytes[i] for i in groups))
        for batch in table.iter_batches(rows, row_groups=groups, columns=[leaves[leaf]]):
            if (read_bytes := read_bytes + batch.nbytes) > max_read:
                raise TableError(f"its rows repeat the same values, over {max_read:,} bytes together")
            yield from (_convert_value(value, limit) for value in batch.column(0))
            del batch  # else it would be in memory beside the next one


def _convert_value(value: Any, limit: int) -> Value:
    if isinstance(value, pa.StructScalar):
        value = value["bytes"] if value.is_valid else None
    if value is None or not value.is_valid:
        return Value(error="the row has no picture")
    buffer = value.as_buffer()
    if buffer.size > limit:
        return Value(error=f"{buffer.size:,} bytes in a table; at most {limit:,} are read")
    return Value(buffer.to_pybytes())


def _checked_pages(file: IO[bytes], chunk: pq.ColumnChunkMetaData, limit: int) -> list[_Page]:
    """Return the pages of a column in a row group, or raise `TableError` if one is too large."""
    pages = []
    for page in _iter_pages(file, chunk):
        pages.append(page)
        if page.unpacked > PAGE_BYTES:
            rule = f"at most {PAGE_BYTES:,} are read. Write the table with smaller row groups"
            raise TableError(f"a page of {page.unpacked:,} bytes; {rule}")
        largest = page.unpacked // max(page.values, 1)
        if page.kind == _DICTIONARY and page.unpacked > VALUE_BYTES >= largest:
            largest = _largest_value(file, page, chunk.compression)
        if largest > limit:
            raise TableError(f"values of {largest:,} bytes; at most {limit:,} are read")
    rows = sum(page.values for page in pages if page.kind != _DICTIONARY)
    if rows > max(_EMPTY_ROWS, chunk.total_compressed_size):
        raise TableError(f"{rows:,} rows in {chunk.total_compressed_size:,} bytes cannot be pictures")
    return pages


class _Page(NamedTuple):
    """Where its data start, its kind, its compressed and decompressed size, and its number of values."""

    start: int
    kind: int
    packed: int
    unpacked: int
    values: int


def _iter_pages(file: IO[bytes], chunk: pq.ColumnChunkMetaData) -> Iterator[_Page]:
    """Yield the pages that pyarrow will read."""
    first, position = chunk.dictionary_page_offset, chunk.data_page_offset
    if first is not None and 0 < first < position:
        position = first
    end, num_values = position + chunk.total_compressed_size, 0
    while num_values < chunk.num_values and position < end:
        page = _read_page_header(file, position)
        num_values += page.values if page.kind in (_DATA, _DATA_2) else 0
        position = page.start + page.packed
        yield page


def _largest_value(file: IO[bytes], page: _Page, compression: str) -> int:
    """Return the size of the largest value of a dictionary, which is decompressed for it."""
    if page.values > _MAX_VALUES:
        raise TableError(f"a dictionary of {page.values:,} values; pictures have at most {_MAX_VALUES:,}")
    file.seek(page.start)
    data: Any = file.read(page.packed)
    if compression != "UNCOMPRESSED":
        codec: Any = compression.lower()
        data = pa.Codec(codec).decompress(data, page.unpacked)
    view, offset, largest = memoryview(data), 0, 0
    for _ in range(page.values):
        size = int.from_bytes(view[offset : offset + 4], "little")
        offset, largest = offset + 4 + size, max(largest, size)
    return largest


def _read_page_header(file: IO[bytes], position: int) -> _Page:
    """Parse the header of the page at `position`; its data start after it."""
    size = 1 << 12
    while True:
        file.seek(position)
        data = file.read(size)
        header = _Thrift(data)
        try:
            fields = header.struct()
            break
        except IndexError:
            if len(data) < size or size >= _PAGE_HEADER_BYTES:
                raise TableError("a broken page header") from None
            size *= 16
    kind, unpacked, packed = (fields.get(i, -1) for i in (1, 2, 3))
    header_fields: dict[int, Any] = next((fields[i] for i in (5, 7, 8) if isinstance(fields.get(i), dict)), {})
    page = _Page(position + header.position, kind, packed, unpacked, header_fields.get(1, 0))
    if not all(type(number) is int and number >= 0 for number in page):
        raise TableError("a broken page header")
    return page


class _Thrift:
    """Parser of Thrift's compact protocol, as far as page headers use it; IndexError past the end of the data."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def struct(self, level: int = 0) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while byte := self._byte():
            number = number + (byte >> 4) if byte >> 4 else self._signed()
            fields[number] = self._field(byte & 15, level)
        return fields

    def _field(self, kind: int, level: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind in (7, 8):
            size = 8 if kind == 7 else self._unsigned()  # a double, or bytes
            self.position += size
            return None
        if kind == 12 and level < _MAX_NESTING:
            return self.struct(level + 1)
        raise TableError("a broken page header")

    def _byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value, shift = value | (byte & 0x7F) << shift, shift + 7
            if shift > 63:
                raise TableError("a broken page header")
        return value | byte << shift

    def _signed(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)
