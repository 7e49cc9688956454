"""Feature files: columns, reading partitions, joining them to one Parquet, npz or safetensors file.

Every file has the same columns: `path`, `width`, `height` (of the image), `rows`, `columns` (of the grid), `cores`
(the budget), `cls` (D numbers) and, if dense, `patches` (rows × columns × D numbers, row by row). Parquet holds any
mix of grids. `.npz` and `.safetensors` hold one array per column, `cls` as (n, D) and `patches` as
(n, rows × columns, D). Safetensors has no strings: there `path` is all names as UTF-8, end to end, and name i is
`bytes(path[path_offsets[i] : path_offsets[i + 1]]).decode()`. How the features were made is JSON under the key `veca`:
in the metadata of Parquet and safetensors, an array of its own in `.npz`.

Files are joined one row group at a time, so memory does not grow with their number or size.
"""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from veca.embed.settings import ANEW, EmbedError

# Features do not compress or repeat, and queries do not filter by them.
_PARQUET_OPTIONS: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}


@contextmanager
def naming_damage(file: Path) -> Iterator[None]:
    """Raise what pyarrow raises for a damaged file as an EmbedError that names it."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # from the system, as a missing file; errors of pyarrow have no number
        reason = str(error).partition("\n")[0]  # may hold bytes of the damage: quoted
        way = f"remove it, and the same call computes it again, or {ANEW}"
        raise EmbedError(f"{file} is damaged ({reason!r}); {way}") from error


def feature_schema(about: dict[str, Any]) -> pa.Schema:
    """The columns, in order. `about`, of `veca.embed.settings.describe_features`, becomes the metadata."""
    number = pa.float16() if about["save_dtype"] == "float16" else pa.float32()
    fields: dict[str, pa.DataType] = {"path": pa.string()}
    fields |= dict.fromkeys(("width", "height", "rows", "columns", "cores"), pa.int32())
    fields |= {"cls": pa.list_(number, about["dim"])} if about["with_global"] else {}
    fields |= {"patches": pa.large_list(number)} if about["dense"] else {}
    return pa.schema(fields, {"veca": json.dumps(about)})


def _metadata(schema: pa.Schema) -> str:
    """How the features are made, as JSON."""
    return (schema.metadata or {})[b"veca"].decode()


def parquet_writer(path: Path, schema: pa.Schema, checksums: bool) -> pq.ParquetWriter:
    """A writer of features; `checksums` let `read_row_groups` tell damage from features."""
    return pq.ParquetWriter(path, schema, write_page_checksum=checksums, **_PARQUET_OPTIONS)


def read_row_groups(file: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """The columns in `schema`, one table per row group."""
    with naming_damage(file), pq.ParquetFile(file, page_checksum_verification=True) as parquet:
        for index in range(parquet.num_row_groups):
            yield parquet.read_row_group(index, schema.names).cast(schema)


def write_parquet(path: Path, files: list[Path], schema: pa.Schema) -> None:
    with parquet_writer(path, schema, checksums=False) as writer:
        for file in files:
            for table in read_row_groups(file, schema):
                writer.write_table(table)


class _Array(NamedTuple):
    """An array to write, piece by piece."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunks: Iterator[NDArray[Any]]

    def write_to(self, file: IO[bytes]) -> None:
        for chunk in self.chunks:
            file.write(chunk.astype(self.dtype, copy=False).tobytes())


def _column_chunks(files: list[Path], schema: pa.Schema, name: str) -> Iterator[NDArray[Any]]:
    for file in files:
        for table in read_row_groups(file, pa.schema([schema.field(name)])):
            column: Any = table[name].combine_chunks()
            yield (column.flatten() if pa.types.is_nested(column.type) else column).to_numpy(zero_copy_only=False)


def _number_arrays(files: list[Path], schema: pa.Schema) -> list[_Array]:
    """All columns but `path`, which each format writes its own way."""
    n, arrays, about = 0, [], json.loads(_metadata(schema))
    for file in files:
        with naming_damage(file):
            n += pq.read_metadata(file).num_rows
    shapes = {"cls": (n, about["dim"]), "patches": (n, (about["size"] // about["patch_size"]) ** 2, about["dim"])}
    for name in schema.names[1:]:
        dtype = np.dtype(about["save_dtype"] if name in shapes else np.int32).newbyteorder("<")
        arrays.append(_Array(name, dtype, shapes.get(name, (n,)), _column_chunks(files, schema, name)))
    return arrays


def write_npz(path: Path, files: list[Path], schema: pa.Schema) -> None:
    arrays, about = _number_arrays(files, schema), np.array(_metadata(schema))
    longest = max((len(name) for names in _column_chunks(files, schema, "path") for name in names), default=1)
    names = _Array("path", np.dtype(f"<U{longest}"), arrays[0].shape, _column_chunks(files, schema, "path"))
    with zipfile.ZipFile(path, "w") as archive:
        for array in (names, *arrays, _Array("veca", about.dtype, (), iter([about]))):
            info = zipfile.ZipInfo(f"{array.name}.npy")
            # NumPy pads every name to the longest, with four bytes per character: only names are worth compressing.
            info.compress_type = zipfile.ZIP_DEFLATED if array is names else zipfile.ZIP_STORED
            with archive.open(info, "w", force_zip64=True) as file:
                header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(file, header)
                array.write_to(file)


def write_safetensors(path: Path, files: list[Path], schema: pa.Schema) -> None:
    def encoded_names() -> Iterator[list[bytes]]:
        return ([name.encode() for name in names] for names in _column_chunks(files, schema, "path"))

    def name_offsets() -> Iterator[NDArray[np.int64]]:
        yield (ends := np.zeros(1, np.int64))
        for names in encoded_names():
            yield (ends := ends[-1] + np.cumsum([len(name) for name in names], dtype=np.int64))

    numbers = _number_arrays(files, schema)
    offsets = _Array("path_offsets", np.dtype("<i8"), (numbers[0].shape[0] + 1,), name_offsets())
    characters = (np.frombuffer(b"".join(names), np.uint8) for names in encoded_names())
    length = sum(len(name) for names in encoded_names() for name in names)
    # Wide numbers before narrow ones, so that every array is aligned.
    arrays = (offsets, *numbers, _Array("path", np.dtype(np.uint8), (length,), characters))
    dtype_names, end = {"<i8": "I64", "<i4": "I32", "<f4": "F32", "<f2": "F16", "|u1": "U8"}, 0
    header: dict[str, Any] = {"__metadata__": {"veca": _metadata(schema)}}
    for array in arrays:
        start, end = end, end + math.prod(array.shape) * array.dtype.itemsize
        dtype = dtype_names[array.dtype.str]
        header[array.name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for array in arrays:
            array.write_to(file)


WRITERS = {".parquet": write_parquet, ".safetensors": write_safetensors, ".npz": write_npz}
"""By suffix: functions that join partitions into one file. They take its path, the partitions and the schema."""
