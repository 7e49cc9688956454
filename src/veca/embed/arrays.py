"""Join the partitions of a run into one `.npz` or `.safetensors` file, with one array per column.

`cls` is (n, D) and `patches` (n, rows × columns, D). How the features were made is JSON under the key `veca`: an array
of its own in `.npz`, metadata in `.safetensors`. Safetensors has no strings: there `path` is all names as UTF-8, end to
end, and name i is `bytes(path[path_offsets[i] : path_offsets[i + 1]]).decode()`.

Tables are read one row group at a time, so memory does not grow with their number or size.
"""

import json
import math
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_SAFETENSORS_DTYPES = {"<i8": "I64", "<f8": "F64", "<i4": "I32", "<f4": "F32", "<f2": "F16", "|u1": "U8"}


class _Array(NamedTuple):
    """An array to write, chunk by chunk."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunks: Iterator[NDArray[Any]]

    def write_to(self, file: IO[bytes]) -> None:
        for chunk in self.chunks:
            file.write(chunk.astype(self.dtype, copy=False).tobytes())


def write_arrays(
    path: Path, suffix: str, schema: pa.Schema, read_tables: Callable[[pa.Schema], Iterator[pa.Table]]
) -> None:
    """Write the tables, which `read_tables` gives anew for the columns in a schema, in the format of `suffix`."""

    def chunks(name: str) -> Iterator[NDArray[Any]]:
        for table in read_tables(pa.schema([schema.field(name)])):
            column: Any = table[name].combine_chunks()
            yield (column.flatten() if pa.types.is_nested(column.type) else column).to_numpy(zero_copy_only=False)

    metadata = schema.metadata[b"veca"].decode()
    about, rows = json.loads(metadata), sum(map(len, chunks("path")))
    side = about.get("cells") or about["size"] // about["patch_size"]
    shapes = {"cls": (rows, about["dim"]), "patches": (rows, side**2, about["dim"])}
    arrays: dict[str, _Array] = {}
    for name in schema.names[1:]:
        kind = about["save_dtype"] if name in shapes else schema.field(name).type.to_pandas_dtype()
        dtype = np.dtype(kind).newbyteorder("<")
        arrays[name] = _Array(dtype, shapes.get(name, (rows,)), chunks(name))
    (_write_npz if suffix == ".npz" else _write_safetensors)(path, arrays, rows, lambda: chunks("path"), metadata)


def _write_npz(
    path: Path, arrays: dict[str, _Array], rows: int, names: Callable[[], Iterator[NDArray[Any]]], metadata: str
) -> None:
    longest, text = max((len(name) for chunk in names() for name in chunk), default=1), np.array(metadata)
    texts = {"path": _Array(np.dtype(f"<U{longest}"), (rows,), names()), "veca": _Array(text.dtype, (), iter([text]))}
    with zipfile.ZipFile(path, "w") as archive:
        for key, array in (texts | arrays).items():
            info = zipfile.ZipInfo(f"{key}.npy")
            # NumPy pads every name to the longest, with four bytes per character: only names are worth compressing.
            info.compress_type = zipfile.ZIP_DEFLATED if key == "path" else zipfile.ZIP_STORED
            with archive.open(info, "w", force_zip64=True) as file:
                header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(file, header)
                array.write_to(file)


def _write_safetensors(
    path: Path, arrays: dict[str, _Array], rows: int, names: Callable[[], Iterator[NDArray[Any]]], metadata: str
) -> None:
    def encoded() -> Iterator[list[bytes]]:
        return ([name.encode() for name in chunk] for chunk in names())

    def offsets() -> Iterator[NDArray[np.int64]]:
        end = 0
        yield np.zeros(1, np.int64)
        for chunk in encoded():
            yield end + np.cumsum([len(name) for name in chunk], dtype=np.int64)
            end += sum(map(len, chunk))

    characters = (np.frombuffer(b"".join(chunk), np.uint8) for chunk in encoded())
    length = sum(len(name) for chunk in encoded() for name in chunk)
    # Wide numbers before narrow ones, so that every array is aligned.
    arrays = {
        "path_offsets": _Array(np.dtype("<i8"), (rows + 1,), offsets()),
        **dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize)),
        "path": _Array(np.dtype(np.uint8), (length,), characters),
    }
    header, end = dict[str, Any](__metadata__={"veca": metadata}), 0
    for key, array in arrays.items():
        start, end = end, end + math.prod(array.shape) * array.dtype.itemsize
        dtype = _SAFETENSORS_DTYPES[array.dtype.str]
        header[key] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, end]}
    encoded_header = json.dumps(header).encode()
    encoded_header += b" " * (-len(encoded_header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded_header)) + encoded_header)
        for array in arrays.values():
            array.write_to(file)
