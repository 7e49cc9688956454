"""Reader of PyTorch checkpoints (`.pt`) from untrusted sources: tensors and plain data only.

`torch.load(weights_only=True)` runs no code, but a file of a few kilobytes can make it allocate gigabytes or hang. This
reader interprets only the pickle opcodes that `torch.save` writes, calls nothing that a file names, and compares every
size that a file claims with the size of the file before memory is allocated for it.
"""

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
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from veca.utils.text import excerpt

_LEGACY_START = (0x1950A86A20F9469CFC6C, 1001)
"""Magic number and version with which files begin that PyTorch before 1.6 saved."""
_MAX_OPERATIONS = 1_000_000
"""Opcodes in a pickle; a checkpoint has about 40 per tensor."""
_MAX_SHARING = 2
"""How many times the bytes of the file all tensors together may claim: tied weights are stored once."""
_MAX_DIMENSIONS = 32
_MAX_ARGUMENTS = 8
"""Of a function that rebuilds a tensor: copying long tuples again and again could take quadratic time."""

# Of the opcodes that `torch.save` writes, in pickle protocol 2: those that push a value, and those that take operands
# from the stack, so many or (None) all since the last mark.
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING")
_OPERANDS: dict[str, int | None] = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None}
_OPERANDS |= {"APPEND": 1, "APPENDS": None, "SETITEM": 2, "SETITEMS": None, "REDUCE": 1, "BUILD": 1, "BINPERSID": 1}

# The allow-list of "module name": functions, dtypes by storage class, descriptions of contents that are not read.
_NAMES = tomllib.loads(Path(__file__).with_name("torch_names.toml").read_text("utf-8"))
_DTYPES = {f"torch {name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_DTYPES |= {name: getattr(torch, dtype) for name, dtype in _NAMES["storages"].items()}


class Unsupported:
    """Takes the place of an object that is not read, such as a sparse tensor or a set."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}>"


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
    """An archive: a pickle NAME/data.pkl, and the storages of its tensors NAME/data/0, 1, …"""
    size, storages = os.path.getsize(path), dict[str, Tensor]()
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) != len(archive.infolist()):
            raise ValueError("two entries of the archive have the same name")
        if any(e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size for e in entries.values()):
            raise ValueError("entries of the archive are compressed, which torch.save never does")
        # Entries may overlap in a hostile archive, and so claim more than the file has.
        if (total := sum(entry.file_size for entry in entries.values())) > size:
            raise ValueError(f"its entries claim {total:,} bytes, the file has {size:,}")
        pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ValueError("a zip archive without a data.pkl, so not one of torch.save")
        folder = pickles[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in entries and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("its numbers are not little-endian")

        def find_storage(key: str, count: int) -> Tensor:
            entry = entries.get(f"{folder}data/{key}")
            if entry is None or entry.file_size != count:
                raise ValueError(f"storage {excerpt(key)} has not the {count:,} bytes its tensors claim")
            if key not in storages:
                storages[key] = torch.empty(count, dtype=torch.uint8)
                storages[key].numpy()[:] = np.frombuffer(archive.read(entry), np.uint8)
            return storages[key]

        return _Reader(size, find_storage).load(io.BytesIO(archive.read(pickles[0])))


def _read_legacy(path: Path) -> Any:
    """The format before PyTorch 1.6: five pickles, then the storages."""
    file, storages = io.BytesIO(path.read_bytes()), dict[str, Tensor]()
    unclaimed = size = len(file.getbuffer())

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

    reader = _Reader(size, find_storage)
    magic, protocol, system = (reader.load(file) for _ in range(3))
    if (magic, protocol) != _LEGACY_START or not isinstance(system, dict):
        raise ValueError("a pickle, but not one of torch.save")
    if system.get("little_endian") is not True:
        raise ValueError("its numbers are not little-endian")
    contents, keys = reader.load(file), reader.load(file)
    if type(keys) is not list or any(type(key) is not str for key in keys) or set(keys) != set(storages):
        raise ValueError("its tensors and its storages do not belong together")
    for key in keys:
        file.seek(8, io.SEEK_CUR)  # the number of elements
        data = file.read(len(storages[key]))
        if len(data) != len(storages[key]):
            raise EOFError(f"storage {excerpt(key)} is truncated")
        storages[key].numpy()[:] = np.frombuffer(data, np.uint8)
    return contents


class _Reader:
    """Interprets the pickles of a file of `size` bytes; `find_storage(key, bytes)` gives the storage of a tensor."""

    def __init__(self, size: int, find_storage: Callable[[str, int], Tensor]) -> None:
        self.bytes_left, self.find_storage = _MAX_SHARING * size, find_storage

    def load(self, file: IO[bytes]) -> Any:
        """Interpret the next pickle."""
        stack, marks, memo = list[Any](), list[int](), dict[int, Any]()
        operations: Any = pickletools.genops(file)  # which only parses
        for count, (opcode, argument, _) in enumerate(operations):
            if count >= _MAX_OPERATIONS:
                raise ValueError(f"it has more than {_MAX_OPERATIONS:,} objects")
            name, operands = opcode.name, list[Any]()
            if name in _OPERANDS:
                taken = _OPERANDS[name]
                start = marks.pop() if taken is None else len(stack) - taken
                operands = stack[start:]
                del stack[start:]
            match name:
                case _ if name in _CONSTANTS:
                    stack.append(_CONSTANTS[name])
                case _ if name in _VALUES:
                    stack.append(argument)
                case "STOP":
                    return stack.pop()
                case "PROTO":
                    pass
                case "MARK":
                    marks.append(len(stack))
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" | "TUPLE":
                    stack.append(tuple(operands))
                case "APPEND" | "APPENDS":
                    if type(stack[-1]) is not list:
                        raise ValueError("it appends to what is not a list")
                    stack[-1].extend(operands)
                case "SETITEM" | "SETITEMS":
                    _set_items(stack[-1], operands)
                case "BUILD":  # of attributes, such as the `_metadata` of a state_dict: not needed
                    if not isinstance(stack[-1], OrderedDict | Unsupported):
                        raise pickle.UnpicklingError(f"it sets the state of a {type(stack[-1]).__name__}")
                case "GLOBAL":
                    stack.append(_find_name(argument))
                case "BINPERSID":
                    stack.append(self._storage(operands[0]))
                case "REDUCE":
                    stack[-1] = self._call(stack[-1], operands[0])
                case _:
                    raise pickle.UnpicklingError(f"it has the opcode {name}")
        raise ValueError("its pickle has no end")

    def _storage(self, identifier: Any) -> Tensor:
        """The numbers of a storage, (count,)."""
        match identifier:
            case "storage", torch.dtype() as dtype, str() as key, _, int() as count, *view:
                if count >= 0 and all(each is None for each in view):
                    return self.find_storage(key, count * dtype.itemsize).view(dtype)
        raise pickle.UnpicklingError("it refers to something that is not a storage")

    def _call(self, function: Any, arguments: Any) -> Any:
        """Do what a function does, whose name the file gives; it is never looked up."""
        if isinstance(function, Unsupported):
            return function
        if not isinstance(function, str):
            raise pickle.UnpicklingError(f"it calls a {type(function).__name__}")
        if type(arguments) is not tuple or len(arguments) > _MAX_ARGUMENTS:
            raise ValueError(f"the arguments of {excerpt(function)} are damaged")
        match function.rpartition(" ")[2], arguments:
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
            case "_rebuild_tensor_v2", (Tensor() as storage, offset, sizes, strides, _, _, *metadata):
                return self._tensor(storage, offset, sizes, strides, metadata)
            case "_rebuild_tensor_v3", (Tensor() as data, offset, sizes, strides, _, _, torch.dtype() as dtype, *more):
                size = len(data) // dtype.itemsize * dtype.itemsize  # of an untyped storage, in bytes
                return self._tensor(data[:size].view(dtype), offset, sizes, strides, more)
        raise pickle.UnpicklingError(f"it calls {excerpt(function)} in a way that torch.save does not")

    def _tensor(self, storage: Tensor, offset: Any, sizes: Any, strides: Any, metadata: list[Any]) -> Any:
        """A view of a storage, which must hold all that the view claims."""
        if any(metadata):
            return Unsupported("a conjugated or negated tensor")
        if len(sizes) != len(strides) or len(sizes) > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {len(sizes)} sizes and {len(strides)} strides")
        if storage.dim() != 1 or any(type(number) is not int or number < 0 for number in (offset, *sizes, *strides)):
            raise ValueError("the description of a tensor is damaged")
        # In elements: of the storage, and of the tensor.
        held, claimed = len(storage), math.prod(sizes)
        end = offset + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True)) + 1 if claimed else 0
        if claimed > held or end > held:
            raise ValueError(f"a tensor of {excerpt(str(sizes))} in a storage of {held:,} numbers")
        self.bytes_left -= claimed * storage.dtype.itemsize
        if self.bytes_left < 0:
            raise ValueError(f"its tensors claim more than {_MAX_SHARING} times the bytes of the file")
        return storage.as_strided(sizes, strides, offset)


def _find_name(name: str) -> Any:
    """What stands for "module name" on the stack: a dtype, the name of a function, or `Unsupported`."""
    if name in _DTYPES:
        return _DTYPES[name]
    if name in _NAMES["functions"]:
        return name
    if name in _NAMES["unsupported"]:
        return Unsupported(_NAMES["unsupported"][name])
    raise pickle.UnpicklingError(f"it names {excerpt(name.replace(' ', '.'))}")


def _set_items(target: Any, items: list[Any]) -> None:
    if type(target) not in (dict, OrderedDict) or len(items) % 2:
        raise ValueError("it sets items of what is not a dictionary")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Only keys that are quick to hash: nested tuples can take exponential time, and large integers can collide.
        quick = type(key) in (str, float, bool, type(None)) or (type(key) is int and abs(key) < 2**60)
        target[key if quick else Unsupported(f"a key of type {type(key).__name__}")] = value
