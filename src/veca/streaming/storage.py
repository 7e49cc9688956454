"""Where a streamed image keeps its patches between blocks, and where its features go."""

import functools
import math
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca.checkpoint.format import read_safetensors, write_tensors
from veca.errors import ArgumentError, NonFiniteError, VecaError
from veca.images.geotiff import GeoTag, TiffArray, write_empty_tiff
from veca.images.tiles import open_zarr
from veca.utils.files import atomic_path

_SAVE_SECONDS = 15.0
"""How often the progress of a run with files is saved."""


class StreamError(VecaError, ValueError):
    """A run of `stream` that cannot start or continue."""


class Tile(NamedTuple):
    """A rectangle of patches: rows and columns of the grid."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left

    @property
    def region(self) -> tuple[slice, slice]:
        return slice(self.top, self.bottom), slice(self.left, self.right)


def check_space(sizes: Mapping[Path, int]) -> None:
    """Raise an error unless there is space for files of these sizes: a mapped file on a full disk kills the process."""
    wanted, places = defaultdict[int, int](int), dict[int, Path]()
    for path, size in sizes.items():
        device = path.parent.stat().st_dev
        places.setdefault(device, path.parent)
        # Files of an interrupted run have their size, but not all of it is allocated.
        wanted[device] += max(0, size - (512 * getattr(path.stat(), "st_blocks", 0) if path.exists() else 0))
    for device, size in wanted.items():
        if size > (free := shutil.disk_usage(places[device]).free):
            needed = f"{size / 2**30:.1f} GiB, and the disk of {places[device]} has {free / 2**30:.1f} free"
            raise StreamError(f"the run needs {needed}; choose another disk, or make space")


class FeatureOutput:
    """Features of all patches (rows, columns, D): an array in memory, a `.npy` or `.tif` file, or a `.zarr` array.

    A file has another name until it is complete. A TIFF is one of tiles, with a channel for each number.
    """

    def __init__(self, out: str | os.PathLike[str] | None, shape: tuple[int, int, int], dtype: Any) -> None:
        self.path, self.shape, self.dtype = None if out is None else Path(out), shape, dtype
        if self.path is None:
            return
        if self.path.suffix not in (".npy", ".zarr", ".tif"):
            kinds = "a .npy file, a .zarr array or a .tif file"
            raise ArgumentError(f"out={os.fspath(self.path)!r}; features are written to {kinds}")
        if self.path.suffix != ".npy" and not all(map(find_spec, ("zarr", "tifffile"))):
            raise ArgumentError(f"a {self.path.suffix} output needs zarr and tifffile: pip install 'veca[large]'")
        if not self.path.parent.is_dir():
            raise StreamError(f"{self.path.parent} is not a folder; make it, or choose another name than {self.path}")
        if self.path.exists():
            raise StreamError(f"{self.path} exists; choose another name, or remove it")

    @property
    def _part(self) -> Path:
        assert self.path is not None
        return self.path.with_name(f".{self.path.stem}.part{self.path.suffix}")

    def sizes(self) -> dict[Path, int]:
        """Bytes of its file, where that is as large as its numbers."""
        compressed = self.path is None or self.path.suffix == ".zarr"
        return {} if compressed else {self._part: math.prod(self.shape) * np.dtype(self.dtype).itemsize}

    def open(self, begun: bool, chunk: int, about: dict[str, Any], geo_tags: Sequence[GeoTag] = ()) -> None:
        """Make the array, or open that of an interrupted run which had `begun` to write it.

        A zarr array has chunks of `chunk` × `chunk` patches, and `about` as its attributes; a TIFF has `geo_tags`.
        """
        if self.path is None:
            self._array: Any = np.empty(self.shape, self.dtype)
            return
        if begun and not self._part.exists():
            raise StreamError(
                f"{self._part} is gone, with features the run had written; remove its states to begin anew"
            )
        if self.path.suffix == ".npy":
            self._array = np.lib.format.open_memmap(self._part, "r+" if begun else "w+", self.dtype, self.shape)
        elif self.path.suffix == ".zarr":
            self._array = self._open_zarr("r+" if begun else "w", chunk, about)
        else:
            if not begun:
                write_empty_tiff(self._part, self.shape, self.dtype, about, geo_tags)
            self._array = TiffArray(self._part, writable=True)

    def _open_zarr(self, mode: str, chunk: int, about: dict[str, Any]) -> Any:
        import zarr

        if mode == "r+":
            return zarr.open_array(str(self._part), mode="r+")
        rows, columns, dim = self.shape
        chunks = min(chunk, rows), min(chunk, columns), dim
        options: dict[str, Any] = {"shape": self.shape, "chunks": chunks, "dtype": self.dtype, "attributes": about}
        return zarr.open_array(str(self._part), mode="w", **options)

    def write(self, tile: Tile, features: Tensor) -> None:
        with np.errstate(over="ignore"):
            values = features.unflatten(0, tile.shape).numpy().astype(self.dtype)
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"features are NaN or infinite when saved in {self.dtype}; save_dtype='float32' holds more"
            )
        self._array[tile.region] = values

    def close(self) -> Any:
        """Give the file its name; returns the array, or what maps it."""
        if self.path is None:
            return self._array
        if self.path.suffix == ".npy":
            self._array.flush()
            del self._array
            os.replace(self._part, self.path)
            return np.load(self.path, mmap_mode="r")
        if self.path.suffix == ".tif":
            self._array.close()
        os.replace(self._part, self.path)
        return open_zarr(str(self.path)) if self.path.suffix == ".zarr" else TiffArray(self.path)


class MemoryStates:
    """Patches between blocks, in host memory, overwritten in place."""

    def __init__(self, grid: tuple[int, int], dim: int) -> None:
        self._grid, self._dim = grid, dim
        self._patches: Tensor | None = None

    def sizes(self) -> dict[Path, int]:
        """Bytes of each of its files."""
        return {}

    def read(self, block: int, tile: Tile) -> Tensor:
        """Patches (1, N, D) before a block."""
        assert self._patches is not None
        return self._patches[tile.region].flatten(0, 1)[None]

    def write(self, block: int, tile: Tile, patches: Tensor) -> None:
        """Patches after a block."""
        if self._patches is None:
            self._patches = torch.empty(*self._grid, self._dim, dtype=patches.dtype)
        self._patches[tile.region] = patches[0].unflatten(0, tile.shape)

    def load(self) -> tuple[int, int, dict[str, Tensor]] | None:
        """Block and tile to continue with, and what else was saved; None: nothing was."""
        return None

    def save(self, block: int, tile: int, tensors: Callable[[], dict[str, Tensor]], due: bool = False) -> None:
        """Keep the progress of the run, when it is `due` or was not kept for some time."""

    def remove(self) -> None:
        self._patches = None


class FileStates:
    """Patches between blocks, in two files of a folder: one is read while the other is written.

    `progress.safetensors` holds the rest of the run, and how far it has come. A tile that was written after that file
    is written again, from the same inputs.
    """

    def __init__(self, folder: Path, grid: tuple[int, int], dim: int, job: str) -> None:
        self._folder, self._grid, self._dim, self._job = folder, grid, dim, job
        self._saved = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def _progress(self) -> Path:
        return self._folder / "progress.safetensors"

    def sizes(self) -> dict[Path, int]:
        """Bytes of each of its files."""
        size = math.prod((*self._grid, self._dim)) * 4
        return {self._folder / f"patches-{parity}.bin": size for parity in range(2)}

    def _map(self, path: Path, size: int) -> NDArray[np.float32]:
        if not path.exists() or path.stat().st_size != size:
            with open(path, "wb") as file:
                file.truncate(size)
        return np.memmap(path, np.float32, "r+", shape=(*self._grid, self._dim))

    @functools.cached_property
    def _maps(self) -> list[NDArray[np.float32]]:
        return [self._map(path, size) for path, size in self.sizes().items()]

    def read(self, block: int, tile: Tile) -> Tensor:
        return torch.from_numpy(self._maps[block % 2][tile.region].copy()).flatten(0, 1)[None]

    def write(self, block: int, tile: Tile, patches: Tensor) -> None:
        self._maps[(block + 1) % 2][tile.region] = patches[0].float().unflatten(0, tile.shape).numpy()

    def load(self) -> tuple[int, int, dict[str, Tensor]] | None:
        if not self._progress.exists():
            return None
        try:
            tensors, about = read_safetensors(self._progress)
        except ValueError as error:
            raise StreamError(f"{self._progress} is damaged; remove {self._folder} to begin anew") from error
        if about.get("job") != self._job:
            raise StreamError(
                f"{self._folder} holds a run with another image, model or settings; name another folder, or remove it"
            )
        # Copies: bits of products on a CPU depend on the alignment of memory.
        return int(about["block"]), int(about["tile"]), {name: tensor.clone() for name, tensor in tensors.items()}

    def save(self, block: int, tile: int, tensors: Callable[[], dict[str, Tensor]], due: bool = False) -> None:
        if not due and time.monotonic() - self._saved < _SAVE_SECONDS:
            return
        for each in self._maps:
            cast(np.memmap[Any, Any], each).flush()
        with atomic_path(self._progress) as path:
            write_tensors(path, tensors(), {"job": self._job, "block": str(block), "tile": str(tile)})
        self._saved = time.monotonic()

    def remove(self) -> None:
        self.__dict__.pop("_maps", None)
        for path in (self._progress, *self.sizes()):
            path.unlink(missing_ok=True)
        if not any(self._folder.iterdir()):
            self._folder.rmdir()
