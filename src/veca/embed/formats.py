"""Feature files: their columns, and the writers that join parts into one file without holding it in memory.

Every file has the same columns: `path`, `width`, `height` (of the picture), `rows`, `columns` (of the grid), `cores`
(the budget), `cls` (D numbers) and, if dense, `patches` (rows × columns × D numbers, row by row). Parquet takes any
mix of grids. `.npz` and `.safetensors` hold one array per column, `cls` as (n, D) and `patches` as
(n, rows × columns, D). Safetensors has no strings: there `path` is all names as UTF-8, end to end, and name i is
`bytes(path[path_offsets[i] : path_offsets[i + 1]]).decode()`. How the features were made is JSON under the key `veca`:
in the metadata of Parquet and safetensors, an array of its own in `.npz`.
"""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from veca.errors import VecaError

PARQUET: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
"""Features neither compress nor repeat, and nobody filters by their extremes."""


class DamagedPart(VecaError, ValueError):
    """A part that is not as it was written."""


@contextmanager
def reading(part: Path) -> Iterator[None]:
    """What pyarrow raises for a damaged file becomes `DamagedPart`."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's, of a missing file or a bad disk: pyarrow's own have no number
        said = str(error).partition("\n")[0]  # and quoted below: it may hold bytes of the damage
        raise DamagedPart(f"{part} is damaged ({said!r})") from error


def write_part(path: Path, table: pa.Table, state: dict[str, Any]) -> None:
    # Checksums, for damage among the features would otherwise be features.
    table = table.replace_schema_metadata({"veca": json.dumps(state)})
    pq.write_table(table, path, write_page_checksum=True, **PARQUET)


def read_part(file: Path, schema: pa.Schema) -> pa.Table:
    """The columns that `schema` names."""
    with reading(file), pq.ParquetFile(file, page_checksum_verification=True) as part:
        table = part.read(schema.names).cast(schema)
    return table


def feature_schema(dim: int, dtype: str, with_global: bool, dense: bool) -> pa.Schema:
    """The columns, in order; `dense` adds the patches."""
    number = pa.float16() if dtype == "float16" else pa.float32()
    fields: dict[str, pa.DataType] = {"path": pa.string()}
    fields |= dict.fromkeys(("width", "height", "rows", "columns", "cores"), pa.int32())
    fields |= {"cls": pa.list_(number, dim)} if with_global else {}
    fields |= {"patches": pa.large_list(number)} if dense else {}
    return pa.schema(fields)


def write_parquet(path: Path, files: list[Path], schema: pa.Schema, about: dict[str, Any]) -> None:
    with pq.ParquetWriter(path, schema.with_metadata({"veca": json.dumps(about)}), **PARQUET) as writer:
        for file in files:
            writer.write_table(read_part(file, schema))


class _Array(NamedTuple):
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunks: Iterator[NDArray[Any]]


def _chunks(files: list[Path], schema: pa.Schema, name: str) -> Iterator[NDArray[Any]]:
    for file in files:
        column: Any = read_part(file, pa.schema([schema.field(name)]))[name].combine_chunks()
        yield (column.flatten() if pa.types.is_nested(column.type) else column).to_numpy(zero_copy_only=False)


def _arrays(files: list[Path], schema: pa.Schema, about: dict[str, Any]) -> Iterator[_Array]:
    """All columns but `path`, which each format writes its own way."""
    n, dim = 0, about["dim"]
    for file in files:
        with reading(file):
            n += pq.read_metadata(file).num_rows
    shapes = {"cls": (n, dim), "patches": (n, (about["size"] // about["patch_size"]) ** 2, dim)}
    for name in schema.names[1:]:
        dtype = np.dtype(about["save_dtype"] if name in shapes else np.int32).newbyteorder("<")
        yield _Array(name, dtype, shapes.get(name, (n,)), _chunks(files, schema, name))


def write_npz(path: Path, files: list[Path], schema: pa.Schema, about: dict[str, Any]) -> None:
    arrays, described = list(_arrays(files, schema, about)), np.array(json.dumps(about))
    longest = max((len(name) for names in _chunks(files, schema, "path") for name in names), default=1)
    names = _Array("path", np.dtype(f"<U{longest}"), arrays[0].shape, _chunks(files, schema, "path"))
    with zipfile.ZipFile(path, "w") as archive:
        for array in (names, *arrays, _Array("veca", described.dtype, (), iter([described]))):
            info = zipfile.ZipInfo(f"{array.name}.npy")
            # NumPy pads every name to the longest, with four bytes per character.
            info.compress_type = zipfile.ZIP_DEFLATED if array is names else zipfile.ZIP_STORED
            with archive.open(info, "w", force_zip64=True) as file:
                header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(file, header)
                for chunk in array.chunks:
                    file.write(chunk.astype(array.dtype, copy=False).tobytes())


def write_safetensors(path: Path, files: list[Path], schema: pa.Schema, about: dict[str, Any]) -> None:
    def lengths() -> Iterator[NDArray[np.int64]]:
        return (np.array([len(name.encode()) for name in names], np.int64) for names in _chunks(files, schema, "path"))

    def offsets() -> Iterator[NDArray[np.int64]]:
        yield np.zeros(1, np.int64)
        end = 0
        for part in lengths():
            yield end + part.cumsum()
            end += int(part.sum())

    columns = list(_arrays(files, schema, about))
    starts = _Array("path_offsets", np.dtype("<i8"), (columns[0].shape[0] + 1,), offsets())
    characters = (np.frombuffer("".join(names).encode(), np.uint8) for names in _chunks(files, schema, "path"))
    names = _Array("path", np.dtype(np.uint8), (sum(int(part.sum()) for part in lengths()),), characters)
    arrays = (starts, *columns, names)  # wide numbers before narrow ones: so every array is aligned
    kinds, end = {"<i8": "I64", "<i4": "I32", "<f4": "F32", "<f2": "F16", "|u1": "U8"}, 0
    header: dict[str, Any] = {"__metadata__": {"veca": json.dumps(about)}}
    for array in arrays:
        start, end = end, end + math.prod(array.shape) * array.dtype.itemsize
        header[array.name] = {"dtype": kinds[array.dtype.str], "shape": array.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for array in arrays:
            for chunk in array.chunks:
                file.write(chunk.astype(array.dtype, copy=False).tobytes())


WRITERS = {".parquet": write_parquet, ".safetensors": write_safetensors, ".npz": write_npz}
"""By suffix: each takes the file to write, the parts, their schema and what to say about them."""
