"""NVIDIA's JPEG decoder, nvJPEG, called directly for YCbCr planes as a file codes them.

RGB, which torchvision's binding of nvJPEG gives, takes small kernels for every image, and beside a model that fills the
GPU each of them waits for one of the model's. Planes come from the GPU's JPEG engines alone; one kernel of ours makes
RGB of a whole task (`veca.kernels.ycbcr`), with the pixels of libjpeg.
"""

import ctypes
import ctypes.util
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca.errors import VecaError

# Of nvjpeg.h
_HARDWARE, _DEFAULT, _PLANES = 3, 0, 1
_GREY = 6
# Planes across and down as nvJPEG may write them: whole blocks
_ALIGNED = 32


class DecodedJpegs(NamedTuple):
    """Images on a GPU: RGB (3, height, width) each, one after another in `pixels`, at `starts`."""

    pixels: Tensor
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    """Height and width of each (B, 2)."""

    def image(self, index: int) -> Tensor:
        """One of the images."""
        (height, width), start = self.sizes[index].tolist(), int(self.starts[index])
        return self.pixels[start : start + 3 * height * width].view(3, height, width)

    def locate(self) -> NDArray[np.int64]:
        """Where the images are, as `veca.kernels.resample` wants it."""
        (height, width), one = self.sizes.T, np.ones_like(self.starts)
        return np.stack([self.pixels.data_ptr() + self.starts, 3 * one, height, width, height * width, width, one], 1)


class NvJpegError(VecaError, RuntimeError):
    """NvJPEG refuses a file, all of a batch, or to work at all."""


@cache
def load_library() -> ctypes.CDLL:
    """Load nvJPEG: of NVIDIA's package, of torchvision's, or of the system."""
    names = [name for path in _packaged() for name in sorted(map(str, path))]
    names += filter(None, [ctypes.util.find_library("nvjpeg")])
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ImportError("it needs nvJPEG, which comes with torchvision for CUDA")


def _packaged() -> Iterator[Iterator[Path]]:
    for package, pattern in (("nvidia", "*/lib/libnvjpeg.so*"), ("torchvision", "../torchvision.libs/libnvjpeg*")):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield Path(folder).glob(pattern)


class NvJpeg:
    """A decoder of one GPU; threads may share it."""

    def __init__(self, device: torch.device) -> None:
        self._library, self._device, self._lock = load_library(), device, threading.Lock()
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.init()
            for backend in (_HARDWARE, _DEFAULT):  # not every GPU has engines for JPEGs
                status = self._library.nvjpegCreateEx(backend, None, None, 0, ctypes.byref(self._handle))
                if not status:
                    break
            _check(status, "no decoder")
            _check(self._library.nvjpegJpegStateCreate(self._handle, ctypes.byref(self._state)), "no decoder")

    def decode(self, files: Sequence[NDArray[np.uint8]]) -> DecodedJpegs:
        """Decode files, all or none, on the current stream."""
        from veca.kernels.ycbcr import planes_to_rgb

        count = len(files)
        data = np.array([file.__array_interface__["data"][0] for file in files], np.uint64)
        lengths = np.array([file.size for file in files], np.uint64)
        shapes = self._read_shapes(data, lengths)
        # Rows, columns: of Y, Cb, Cr
        padded = -(-shapes // _ALIGNED) * _ALIGNED
        sizes = padded.prod(2)
        ends = np.cumsum(sizes).reshape(count, 3)
        planes = torch.empty(int(ends[-1, -1]), dtype=torch.uint8, device=self._device)
        addresses = planes.data_ptr() + ends - sizes
        # Four addresses and four pitches
        targets = np.zeros((count, 2, 4), np.uint64)
        targets[:, 0, :3], targets[:, 1, :3] = np.where(sizes > 0, addresses, 0), padded[:, :, 1]
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        with self._lock, torch.cuda.device(self._device):
            call, handle, state = self._library, self._handle, self._state
            _check(call.nvjpegDecodeBatchedInitialize(handle, state, count, 1, _PLANES), "a batch is refused")
            arrays = (ctypes.c_void_p(array.ctypes.data) for array in (data, lengths, targets))
            _check(call.nvjpegDecodeBatched(handle, state, *arrays, stream), "a file is refused")
        luma, chroma = shapes[:, 0], shapes[:, 1]
        areas = 3 * luma.prod(1)
        starts = np.cumsum(areas) - areas
        pixels = torch.empty(int(areas.sum()), dtype=torch.uint8, device=self._device)
        table = np.stack([addresses[:, 0], padded[:, 0, 1], addresses[:, 1], padded[:, 1, 1], addresses[:, 2]], 1)
        result = (pixels.data_ptr() + starts)[:, None]
        planes_to_rgb(np.concatenate([table, result, luma, chroma], 1), self._device)
        return DecodedJpegs(pixels, starts, luma)

    def _read_shapes(self, data: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Height and width of the planes of each file (B, 3, 2), zero where there is none, as nvJPEG reads them."""
        count = len(data)
        components, sampling = np.zeros(count, np.int32), np.zeros(count, np.int32)
        sides = np.zeros((2, count, 4), np.int32)
        read, handle = self._library.nvjpegGetImageInfo, self._handle
        read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 4]
        found = (components.ctypes.data, sampling.ctypes.data, *(side.ctypes.data for side in sides))
        for i, (address, length) in enumerate(zip(data.tolist(), lengths.tolist(), strict=True)):
            places = (start + i * size for start, size in zip(found, (4, 4, 16, 16), strict=True))
            _check(read(handle, address, length, *places), "a header is refused")
        widths, heights = sides
        shapes = np.stack([heights, widths], 2)[:, :3].astype(np.int64)
        shapes[components == 1, 1:] = 0
        colour = (components == 3) & (sampling != _GREY)
        halves = -(-shapes[:, :1] // 2)
        whole_or_half = ((shapes[:, 1:] == shapes[:, :1]) | (shapes[:, 1:] == halves)).all((1, 2))
        alike = (shapes[:, 1] == shapes[:, 2]).all(1)
        if not ((components == 1) | (colour & whole_or_half & alike)).all() or (shapes[:, 0] < 1).any():
            raise NvJpegError("nvJPEG reads other components or sizes than a JPEG of YCbCr or grey has")
        return shapes


def _check(status: int, what: str) -> None:
    if status:
        raise NvJpegError(f"nvJPEG: {what} (status {status})")


@cache
def nvjpeg_of(index: int) -> NvJpeg:
    """The decoder of a GPU."""
    return NvJpeg(torch.device("cuda", index))
