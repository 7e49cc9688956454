"""Read encoded images from a column of an untrusted Parquet file in bounded memory.

pyarrow decompresses whole pages and does not tell their size beforehand: a file of kilobytes may hold a page of
gigabytes, or a dictionary whose one huge value every row repeats. The sizes in the footer may be wrong, so the page
headers are read first; that is cheap, as the pages themselves are skipped.
"""

import io
import os
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from veca.errors import VecaError

# Largest decompressed page. pyarrow needs up to three times as much memory for it.
PAGE_BYTES = 1 << 29
# Largest encoded image, and largest dictionary
VALUE_BYTES = 1 << 27
# Rows held in memory at a time, and their bytes
_BATCH_ROWS, _BATCH_BYTES = 16, 1 << 27
# Largest page header, as in pyarrow
_PAGE_HEADER_BYTES = 1 << 24
# This many rows may take less than a byte each
_EMPTY_ROWS = 4096
# By repeating values, pages may yield this many times their bytes, or this many bytes
_REPEATS, _REPEATED_BYTES = 64, 1 << 32
# Kinds of pages, and the field of a page header that describes each
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_HEADER_FIELDS = {_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}


class TableError(VecaError, ValueError):
    """Rows that are refused, or a file that is not Parquet."""


def iter_values(
    file: IO[bytes], table: pq.ParquetFile, column: str, limit: int
) -> Iterator[tuple[bytes | None, str, int]]:
    """Yield the rows of a column of bytes, or of structs with a field `bytes`, of at most `limit` bytes each.

    Each is (data, error, rows): the bytes of an image, or an error, which may stand for several rows.
    """
    limit = min(limit, VALUE_BYTES)
    leaves = [table.schema.column(i).path for i in range(len(table.schema))]
    leaf = leaves.index(column if column in leaves else f"{column}.bytes")
    page_bytes = read_bytes = 0
    for i in range(table.num_row_groups):
        group = table.metadata.row_group(i)
        try:
            pages = _check_pages(file, group.column(leaf), limit)
        except (TableError, pa.ArrowException, OSError) as error:
            yield None, str(error), group.num_rows
            continue
        page_bytes += sum(pages)
        max_read = max(_REPEATED_BYTES, _REPEATS * page_bytes)
        # No value is larger than the largest page.
        rows = min(_BATCH_ROWS, max(1, _BATCH_BYTES // max(pages, default=1)))
        for batch in table.iter_batches(rows, row_groups=[i], columns=[leaves[leaf]]):
            if (read_bytes := read_bytes + batch.nbytes) > max_read:
                raise TableError(f"its rows repeat the same values, over {max_read:,} bytes together")
            values = batch.column(0)
            if isinstance(values, pa.StructArray):
                (values,) = values.flatten()  # null where the struct is
            for value in values:
                if not value.is_valid:
                    yield None, "the row has no picture", 1
                elif (size := value.as_buffer().size) > limit:
                    yield None, f"{size:,} bytes in a table; at most {limit:,} are read", 1
                else:
                    yield value.as_py(), "", 1
            del batch, values  # else they would be in memory beside the next ones
            value = None


def _check_pages(file: IO[bytes], chunk: pq.ColumnChunkMetaData, limit: int) -> list[int]:
    """Return the sizes of the pages that pyarrow will read of a row group, or raise `TableError`."""
    first, position = chunk.dictionary_page_offset, chunk.data_page_offset
    if first is not None and 0 < first < position:
        position = first
    end, rows, pages = position + chunk.total_compressed_size, 0, list[int]()
    while rows < chunk.num_values and position < end:
        start, kind, unpacked, packed, values = _read_page_header(file, position)
        position = start + packed
        # Any value of a dictionary may be almost all of it. Writers limit dictionaries to about a mebibyte.
        if unpacked > (allowed := VALUE_BYTES if kind == _DICTIONARY else PAGE_BYTES):
            rule = f"at most {allowed:,} are read. Write the table with smaller row groups or without dictionaries"
            raise TableError(f"a page of {unpacked:,} bytes; {rule}")
        if (average := unpacked // max(values, 1)) > limit:
            raise TableError(f"values of {average:,} bytes; at most {limit:,} are read")
        rows += values if kind in (_DATA, _DATA_2) else 0
        pages.append(unpacked)
    if rows > max(_EMPTY_ROWS, chunk.total_compressed_size):
        raise TableError(f"{rows:,} rows in {chunk.total_compressed_size:,} bytes cannot be pictures")
    return pages


def _read_page_header(file: IO[bytes], position: int) -> tuple[int, ...]:
    """Return of the page at `position`: where its data start, kind, decompressed and compressed size, and values."""
    size = 1 << 12
    while size <= _PAGE_HEADER_BYTES:
        file.seek(position)
        stream = io.BytesIO(file.read(size))
        try:
            fields = _parse_struct(stream)
        except (IndexError, OverflowError):  # it goes on
            size *= 16
            continue
        # The header of a data page, a dictionary or a data page of version 2 begins with the number of its values.
        kind_header = fields.get(_HEADER_FIELDS.get(fields.get(1, -1), -1), {1: 0})
        page = *(fields.get(i) for i in (1, 2, 3)), kind_header.get(1)
        if all(type(number) is int and 0 <= number < 1 << 31 for number in page):
            return position + stream.tell(), *page
        break
    raise TableError("a broken page header")


def _parse_struct(stream: io.BytesIO, nesting: int = 8) -> dict[int, Any]:
    """Parse a struct of Thrift's compact protocol, of the types in page headers; IndexError past the end of the data.

    Anything else is refused: skipping over it as pyarrow does could go wrong, and then other sizes would be checked
    than those pyarrow sees.
    """
    fields: dict[int, Any] = {}
    number = 0
    while byte := stream.read(1)[0]:
        step, kind = divmod(byte, 16)
        number += step
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind in (5, 6):
            value = _parse_varint(stream)
            fields[number] = (value >> 1) ^ -(value & 1)  # 0, -1, 1, -2, …
        elif kind == 8:
            stream.seek(_parse_varint(stream), os.SEEK_CUR)  # bytes, such as the largest value of the page
        elif kind == 12 and nesting:
            fields[number] = _parse_struct(stream, nesting - 1)
        else:
            raise TableError("a broken page header")
        if not step:  # the number of the field would follow, as no writer does it
            raise TableError("a broken page header")
    return fields


def _parse_varint(stream: io.BytesIO) -> int:
    value = shift = 0
    while (byte := stream.read(1)[0]) & 0x80 and shift < 63:
        value, shift = value | (byte & 0x7F) << shift, shift + 7
    return value | byte << shift
