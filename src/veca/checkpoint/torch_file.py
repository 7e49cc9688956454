"""Reader of PyTorch checkpoints (`.pt`) from untrusted sources: tensors and plain data only.

`torch.load(weights_only=True)` runs no code, but a file of a few kilobytes can make it allocate gigabytes or hang. This
reader accepts only the pickle opcodes that `torch.save` writes, calls nothing that a file names, and compares every
size that a file claims with the size of the file before memory is allocated for it.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import tomllib
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from veca.utils.text import excerpt

_MAX_OPERATIONS = 1_000_000
"""Opcodes in a pickle; a checkpoint has about 40 per tensor."""
_MAX_SHARING = 2
"""How many times the bytes of the file all tensors together may claim: tied weights are stored once."""
_MAX_DIMENSIONS = 32
_MAX_ARGUMENTS = 8
"""Of a function that rebuilds a tensor: copying long tuples again and again could take quadratic time."""
_CHUNK = 2**24
"""Bytes read at once."""

_OPCODES = {
    "PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND",
    "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL",
    "REDUCE", "BUILD", "BINPERSID",
}  # fmt: skip
"""What `torch.save` writes, in pickle protocol 2."""

# The allow-list of "module name": functions, dtypes by storage class, descriptions of contents that are not read.
_NAMES = tomllib.loads(Path(__file__).with_name("torch_names.toml").read_text("utf-8"))
_DTYPES = {f"torch {name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_DTYPES |= {name: getattr(torch, dtype) for name, dtype in _NAMES["storages"].items()}
_LEGACY_START = (0x1950A86A20F9469CFC6C, 1001)
"""Magic number and protocol version."""


class Unsupported:
    """Takes the place of an object that is not read, such as a sparse tensor or a set."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class _Function(NamedTuple):
    """A function that a file names; `_Unpickler` does its work, it is never looked up."""

    name: str


class _Storage(NamedTuple):
    data: Tensor
    """(bytes,), uint8."""
    dtype: torch.dtype


FindStorage = Callable[[str, int], Tensor]
"""(key, number of bytes that the pickle claims) → the bytes of a storage."""


def read_torch_file(path: Path) -> Any:
    """The contents of a file that `torch.save` wrote, tensors on the CPU.

    Raises `pickle.UnpicklingError` if it holds more than tensors and plain data, `ValueError` if it is damaged or
    claims more than it holds.
    """
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"PK"
        return _read_zip(path) if zipped else _read_legacy(path)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged file raises almost anything
        raise ValueError(excerpt(str(error) or type(error).__name__)) from error


def _read_zip(path: Path) -> Any:
    size = os.path.getsize(path)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) != len(archive.infolist()):
            raise ValueError("two entries of the archive have the same name")
        if any(e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size for e in entries.values()):
            raise ValueError("entries of the archive are compressed, which torch.save never does")
        # Entries may overlap in a hostile archive, and so claim more than the file has.
        if (total := sum(entry.file_size for entry in entries.values())) > size:
            raise ValueError(f"its entries claim {total:,} bytes, the file has {size:,}")
        # torch.save puts everything under one folder: NAME/data.pkl, NAME/data/0, NAME/data/1 …
        pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ValueError("a zip archive without a data.pkl, so not one of torch.save")
        folder = pickles[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in entries and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("its numbers are not little-endian")
        storages: dict[str, Tensor] = {}

        def find_storage(key: str, count: int) -> Tensor:
            entry = entries.get(f"{folder}data/{key}")
            if entry is None or entry.file_size != count:
                raise ValueError(f"storage {excerpt(key)} has not the {count:,} bytes its tensors claim")
            if key not in storages:
                storages[key] = _read_entry(archive, entry)
            return storages[key]

        return _Unpickler(io.BytesIO(archive.read(pickles[0])), size, find_storage).load()


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Tensor:
    data = torch.empty(entry.file_size, dtype=torch.uint8)
    view = data.numpy().data
    with archive.open(entry) as file:
        while view:
            if not (count := file.readinto(view[:_CHUNK])):  # type: ignore[attr-defined]
                raise EOFError(f"{entry.filename} is truncated")
            view = view[count:]
    return data


def _read_legacy(path: Path) -> Any:
    """The format before PyTorch 1.6: five pickles, then the storages."""
    file = io.BytesIO(path.read_bytes())
    size = len(file.getbuffer())
    storages: dict[str, Tensor] = {}
    unclaimed = size

    def find_storage(key: str, count: int) -> Tensor:
        nonlocal unclaimed
        if key not in storages:
            unclaimed -= count
            if unclaimed < 0:
                raise ValueError(f"its storages claim more than the {size:,} bytes of the file")
            storages[key] = torch.empty(count, dtype=torch.uint8)
        if len(storages[key]) != count:
            raise ValueError(f"storage {excerpt(key)} has not the {count:,} bytes its tensors claim")
        return storages[key]

    unpickler = _Unpickler(file, size, find_storage)
    magic, protocol, system = (unpickler.load() for _ in range(3))
    if (magic, protocol) != _LEGACY_START or not isinstance(system, dict):
        raise ValueError("a pickle, but not one of torch.save")
    if system.get("little_endian") is not True:
        raise ValueError("its numbers are not little-endian")
    contents, keys = unpickler.load(), unpickler.load()
    if type(keys) is not list or any(type(key) is not str for key in keys) or set(keys) != set(storages):
        raise ValueError("its tensors and its storages do not belong together")
    for key in keys:
        file.seek(8, io.SEEK_CUR)  # the number of elements
        data = file.read(len(storages[key]))
        if len(data) != len(storages[key]):
            raise EOFError(f"storage {excerpt(key)} is truncated")
        storages[key].numpy().data[:] = data
    return contents


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler, in which nothing of the file's choosing is imported, called or hashed."""

    stack: list[Any]  # of the base class, which has no types
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: io.BytesIO, size: int, find_storage: FindStorage) -> None:
        super().__init__(file, encoding="latin-1")
        self.file, self.find_storage = file, find_storage
        self.operations_left, self.bytes_left = _MAX_OPERATIONS, _MAX_SHARING * size

    def load(self) -> Any:
        start = self.file.tell()
        for opcode, _, _ in pickletools.genops(self.file):  # which only parses
            self.operations_left -= 1
            if self.operations_left < 0:
                raise ValueError(f"it has more than {_MAX_OPERATIONS:,} objects")
            if opcode.name not in _OPCODES:
                raise pickle.UnpicklingError(f"it has the opcode {opcode.name}")
        self.file.seek(start)
        self.memo: dict[int, Any] = {}
        return super().load()

    def find_class(self, module: str, name: str) -> Any:
        known = f"{module} {name}"
        if known in _DTYPES:
            return _DTYPES[known]
        if known in _NAMES["functions"]:
            return _Function(known)
        if known in _NAMES["unsupported"]:
            return Unsupported(_NAMES["unsupported"][known])
        raise pickle.UnpicklingError(f"it names {excerpt(f'{module}.{name}')}")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def load_build(self) -> None:
        self.stack.pop()  # attributes, such as the `_metadata` of a state_dict: not needed
        if not isinstance(self.stack[-1], OrderedDict | Unsupported):
            raise pickle.UnpicklingError(f"it sets the state of a {type(self.stack[-1]).__name__}")

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            raise ValueError("it sets items of what is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_hashable(key)] = value

    def persistent_load(self, identifier: Any) -> _Storage:
        match identifier:
            case "storage", torch.dtype() as dtype, str() as key, _, int() as count, *view:
                if count >= 0 and all(each is None for each in view):
                    return _Storage(self.find_storage(key, count * dtype.itemsize), dtype)
        raise pickle.UnpicklingError("it refers to something that is not a storage")

    def _call(self, function: Any, arguments: Any) -> Any:
        if isinstance(function, Unsupported):
            return function
        if not isinstance(function, _Function):
            raise pickle.UnpicklingError(f"it calls a {type(function).__name__}")
        if type(arguments) is not tuple or len(arguments) > _MAX_ARGUMENTS:
            raise ValueError(f"the arguments of {function.name.replace(' ', '.')} are damaged")
        match function.name.rpartition(" ")[2], arguments:
            case "OrderedDict", ():
                return OrderedDict()
            case "Size", (tuple() as sizes,):
                return sizes
            case "_get_layout", (str() as layout,):
                return Unsupported(excerpt(layout))
            case "_rebuild_sparse_tensor", (layout, _):
                return Unsupported(f"a {layout.kind} tensor" if isinstance(layout, Unsupported) else "a sparse tensor")
            case ("_rebuild_parameter", (data, _, _)) | ("_rebuild_parameter_with_state", (data, _, _, _)):
                return data
            case "_rebuild_from_type_v2", (rebuild, _, tuple() as inner, _):  # a tensor with attributes
                return self._call(rebuild, inner)
            case "_rebuild_tensor", (storage, offset, sizes, strides):
                return self._tensor(storage, offset, sizes, strides, [])
            case "_rebuild_tensor_v2", (storage, offset, sizes, strides, _, _, *metadata):
                return self._tensor(storage, offset, sizes, strides, metadata)
            case "_rebuild_tensor_v3", (storage, offset, sizes, strides, _, _, torch.dtype() as dtype, *metadata):
                return self._tensor(storage, offset, sizes, strides, metadata, dtype)
        raise pickle.UnpicklingError(f"it calls {function.name.replace(' ', '.')} in a way that torch.save does not")

    def _tensor(
        self, storage: Any, offset: Any, sizes: Any, strides: Any, metadata: list[Any], dtype: torch.dtype | None = None
    ) -> Tensor | Unsupported:
        """A view of a storage, which must hold all that the view claims."""
        if any(metadata):
            return Unsupported("a conjugated or negated tensor")
        if len(sizes) != len(strides) or len(sizes) > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {len(sizes)} sizes and {len(strides)} strides")
        numbers = (offset, *sizes, *strides)
        if not isinstance(storage, _Storage) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("the description of a tensor is damaged")
        dtype = dtype or storage.dtype
        # In elements: of the storage, and of the tensor.
        held, claimed = len(storage.data) // dtype.itemsize, math.prod(sizes)
        end = offset + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) + 1 if claimed else 0
        if claimed > held or end > held:
            raise ValueError(f"a tensor of {excerpt(str(sizes))} in a storage of {held:,} numbers")
        self.bytes_left -= claimed * dtype.itemsize
        if self.bytes_left < 0:
            raise ValueError(f"its tensors claim more than {_MAX_SHARING} times the bytes of the file")
        return storage.data[: held * dtype.itemsize].view(dtype).as_strided(sizes, strides, offset)


def _hashable(key: Any) -> Any:
    """A key that is quick to hash: nested tuples can take exponential time, and large integers can collide."""
    if type(key) in (str, float, bool, type(None)) or (type(key) is int and abs(key) < 2**60):
        return key
    return Unsupported(f"a key of type {type(key).__name__}")
