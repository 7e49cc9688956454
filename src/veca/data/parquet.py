"""Encoded images in a column of a Parquet file nobody vouches for, in bounded memory.

pyarrow unpacks whole pages and does not say beforehand how large they are: a file of kilobytes may hold a page of
gigabytes, and a dictionary whose one huge value every row repeats. The sizes that its footer claims may be wrong, so
the headers of the pages are read first; that is cheap, as the pages themselves are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from veca.errors import VecaError

PAGE_BYTES = 1 << 29
"""Largest page, unpacked; pyarrow takes up to three times its memory, and of a dictionary twice and its largest value
three times."""
VALUE_BYTES = 1 << 27
"""Largest picture."""
_ROWS = 16
_BATCH_BYTES = 1 << 27
"""Rows that are held at a time, and how many bytes they may have."""
_HEADER_BYTES = 1 << 24
"""Largest header of a page, as pyarrow has it."""
_EMPTY_ROWS = 4096
"""So many rows may take less than a byte each."""
_REPEATS = 64
_REPEATED_BYTES = 1 << 32
"""Pages may give so many times their bytes, by repeating values, or so many bytes."""
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_MOST_VALUES = 1 << 20
"""Of a dictionary larger than a value may be: its values are looked at one by one."""
_LEVELS = 64
"""A page's header has four structures in each other at most."""


class TableError(VecaError, ValueError):
    """Rows that are not read, or not a Parquet file."""


class Value(NamedTuple):
    """One row: the bytes of an image, or why there are none. `rows` is how many rows this stands for."""

    data: bytes | None = None
    error: str = ""
    rows: int = 1


def values(file: IO[bytes], table: pq.ParquetFile, column: str, limit: int) -> Iterator[Value]:
    """The rows of a column of bytes, or of structures with a field `bytes`; none of more than `limit` bytes."""
    limit = min(limit, VALUE_BYTES)
    leaves = [table.schema.column(i).path for i in range(len(table.schema))]
    leaf = leaves.index(column if column in leaves else f"{column}.bytes")
    refused: dict[int, str] = {}
    unpacked: dict[int, int] = {}

    def rows_at_once(group: int) -> int:
        try:
            pages = _checked_pages(file, table.metadata.row_group(group).column(leaf), limit)
        except (TableError, pa.ArrowException, OSError) as error:
            refused[group] = str(error)
            return 0
        unpacked[group] = sum(page.unpacked for page in pages)
        # No value is larger than the largest page.
        return min(_ROWS, max(1, _BATCH_BYTES // max((page.unpacked for page in pages), default=1)))

    for rows, run in groupby(range(table.num_row_groups), rows_at_once):
        if not rows:
            yield from (Value(error=refused[i], rows=table.metadata.row_group(i).num_rows) for i in run)
            continue
        groups, given = list(run), 0
        most = max(_REPEATED_BYTES, _REPEATS * sum(unpacked[i] for i in groups))
        for batch in table.iter_batches(rows, row_groups=groups, columns=[leaves[leaf]]):
            if (given := given + batch.nbytes) > most:
                raise TableError(f"its rows repeat the same values, over {most:,} bytes together")
            yield from (_value(each, limit) for each in batch.column(0))
            del batch  # or it would be in memory beside the next one


def _value(value: Any, limit: int) -> Value:
    if isinstance(value, pa.StructScalar):
        value = value["bytes"] if value.is_valid else None
    if value is None or not value.is_valid:
        return Value(error="the row has no picture")
    buffer = value.as_buffer()
    if buffer.size > limit:
        return Value(error=f"{buffer.size:,} bytes in a table; at most {limit:,} are read")
    return Value(buffer.to_pybytes())


def _checked_pages(file: IO[bytes], chunk: pq.ColumnChunkMetaData, limit: int) -> list[_Page]:
    """The pages of a column in a row group, if all can be unpacked."""
    pages = []
    for page in _pages(file, chunk):
        pages.append(page)
        if page.unpacked > PAGE_BYTES:
            way = "Write the table with smaller row groups"
            raise TableError(f"a page of {page.unpacked:,} bytes; at most {PAGE_BYTES:,} are read. {way}")
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
    start: int
    kind: int
    packed: int
    unpacked: int
    values: int


def _pages(file: IO[bytes], chunk: pq.ColumnChunkMetaData) -> Iterator[_Page]:
    """The pages that pyarrow will read."""
    first, position = chunk.dictionary_page_offset, chunk.data_page_offset
    if first is not None and 0 < first < position:
        position = first
    end, seen = position + chunk.total_compressed_size, 0
    while seen < chunk.num_values and position < end:
        page = _page(file, position)
        seen += page.values if page.kind in (_DATA, _DATA_2) else 0
        position = page.start + page.packed
        yield page


def _largest_value(file: IO[bytes], page: _Page, compression: str) -> int:
    """Of a dictionary, which is unpacked for it and left again."""
    if page.values > _MOST_VALUES:
        raise TableError(f"a dictionary of {page.values:,} values; pictures have at most {_MOST_VALUES:,}")
    file.seek(page.start)
    data: Any = file.read(page.packed)
    if compression != "UNCOMPRESSED":
        codec: Any = compression.lower()
        data = pa.Codec(codec).decompress(data, page.unpacked)
    view, at, largest = memoryview(data), 0, 0
    for _ in range(page.values):
        size = int.from_bytes(view[at : at + 4], "little")
        at, largest = at + 4 + size, max(largest, size)
    return largest


def _page(file: IO[bytes], position: int) -> _Page:
    """What the header of a page says; its data start after it."""
    size = 1 << 12
    while True:
        file.seek(position)
        data = file.read(size)
        header = _Thrift(data)
        try:
            fields = header.struct()
            break
        except IndexError:
            if len(data) < size or size >= _HEADER_BYTES:
                raise TableError("a broken page header") from None
            size *= 16
    kind, unpacked, packed = (fields.get(i, -1) for i in (1, 2, 3))
    about: dict[int, Any] = next((fields[i] for i in (5, 7, 8) if isinstance(fields.get(i), dict)), {})
    page = _Page(position + header.at, kind, packed, unpacked, about.get(1, 0))
    if not all(type(number) is int and number >= 0 for number in page):
        raise TableError("a broken page header")
    return page


class _Thrift:
    """Thrift's compact protocol, as far as headers of pages use it. Past the end of the data it is an IndexError."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

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
            self.at += size
            return None
        if kind == 12 and level < _LEVELS:
            return self.struct(level + 1)
        raise TableError("a broken page header")

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

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
