"""Large images read a region at a time: arrays, TIFF and its relatives, zarr, NumPy files, slides, rasters.

A `PixelSource` has the height and width of an image and returns any region of it. Nothing else of the image is decoded
or kept, but some segments of a TIFF that the next regions are likely to need.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import operator
import os
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca.errors import ArgumentError
from veca.images.decode import MAX_PIXELS, ImageError, open_regular
from veca.images.geotiff import GeoTag, make_geo_tags, read_geo_tags, scale_geo_tags
from veca.images.load import normalize, open_image
from veca.images.resize import PATCH
from veca.images.segments import MAX_SEGMENT_PIXELS, check_compression, check_segment, is_bounded

TIFF_SUFFIXES = (".tif", ".tiff", ".svs", ".ndpi", ".scn", ".btf", ".gtiff")
SLIDE_SUFFIXES = (".mrxs", ".vms", ".vmu", ".bif", ".czi", ".dcm", ".svslide")
"""Of microscope slides that are no TIFF, or one that tifffile puts together wrongly: OpenSlide reads them."""
RASTER_SUFFIXES = (".jp2", ".j2k", ".img", ".vrt", ".ntf")
"""Of rasters that are no TIFF: rasterio reads them."""
REGION_SUFFIXES = (*TIFF_SUFFIXES, *SLIDE_SUFFIXES, *RASTER_SUFFIXES)
_MAX_SIDE = 2**24
"""Pixels of a side, at most."""
_CACHE_BYTES = 256 << 20
"""Decoded segments of a TIFF that are kept."""
_WHITE_IS_ZERO, _YCBCR = 0, 6
_COLOURS = _WHITE_IS_ZERO, 1, 2
"""Photometric interpretations of a TIFF that are grey or RGB. YCbCr becomes RGB where a codec of images decodes it."""
Alpha = Literal["straight", "premultiplied", "none"]
"""What a fourth channel is: opacity, by which the colours may be multiplied already; or no colour, such as infrared."""
_ALPHAS: dict[int, Alpha] = {1: "premultiplied", 2: "straight"}


class PixelSource(ABC):
    """An image that is read a region at a time."""

    name: str = "the image"
    path: Path | None = None
    """Its file, if it is in one."""
    georeference: dict[str, Any]
    """GeoTIFF tags of the image, by name; empty: it has none."""
    geo_tags: list[GeoTag]
    """The same as they are in the file."""

    def __init__(self, height: int, width: int) -> None:
        self.height, self.width, self.georeference, self.geo_tags = height, width, {}, []
        if not (1 <= height <= _MAX_SIDE and 1 <= width <= _MAX_SIDE):
            raise ImageError(f"{self.name} is {height}×{width}; sides must be from 1 to {_MAX_SIDE:,} pixels")

    @abstractmethod
    def _read(self, top: int, left: int, bottom: int, right: int) -> NDArray[np.uint8] | Tensor:
        """A region inside the image: uint8 (height, width, 3), or a normalised tensor (3, height, width)."""

    @property
    def identity(self) -> list[Any]:
        """What must be equal for a run to be resumed."""
        status = None if self.path is None else self.path.stat()
        return [self.height, self.width, *([status.st_size, status.st_mtime_ns] if status else [])]

    def _digest(self) -> str:
        """A hash of a few pixels: an array has no date by which another would be known."""
        boxes = [(self.height * i // 16, self.width * i // 16) for i in range(16)]
        regions = (self._read(y, x, min(y + 16, self.height), min(x + 16, self.width)) for y, x in boxes)
        arrays = (x.float().numpy() if isinstance(x, Tensor) else x for x in regions)
        return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]

    def grid(self, patch: int = PATCH) -> tuple[int, int]:
        """Rows and columns of patches; the last row and column of pixels are repeated up to whole patches."""
        return -(-self.height // patch), -(-self.width // patch)

    def read(self, top: int, left: int, bottom: int, right: int) -> Tensor:
        """A region as a normalised tensor (3, height, width); beyond the image its last row and column are repeated."""
        inside = self._read(top, left, min(bottom, self.height), min(right, self.width))
        pixels = inside if isinstance(inside, Tensor) else normalize(torch.from_numpy(inside.copy()).permute(2, 0, 1))
        for dim, length in ((1, bottom - top), (2, right - left)):
            if pixels.shape[dim] < length:
                pixels = pixels.index_select(dim, torch.arange(length).clamp(max=pixels.shape[dim] - 1))
        return pixels


class ArraySource(PixelSource):
    """An array (height, width, 3 or 4) or (height, width) of uint8, in memory, mapped from a file, or of zarr."""

    def __init__(self, array: Any, path: str | None = None) -> None:
        self.array, self.path = array, None if path is None else Path(path)
        self.name = name = path or "the array"
        shape, dtype = tuple(array.shape), np.dtype(array.dtype)
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3, 4)):
            raise ImageError(f"{name} has shape {shape}; it must be (height, width), or with 1, 3 or 4 channels last")
        if dtype != np.uint8:
            raise ImageError(f"{name} is {dtype}; it must be uint8. Scale it to 0–255 first")
        chunks = getattr(array, "chunks", None) or ()  # of zarr and h5py: each is decoded whole
        if all(isinstance(each, int) for each in chunks) and math.prod(chunks) > 4 * MAX_SEGMENT_PIXELS:
            rule = f"at most {MAX_SEGMENT_PIXELS:,} pixels are decoded at a time. Write it again in smaller chunks"
            raise ImageError(f"{name} has chunks of {'×'.join(map(str, chunks))}; {rule}")
        super().__init__(*shape[:2])

    @property
    def identity(self) -> list[Any]:
        return [*super().identity, self._digest()]

    def _read(self, top: int, left: int, bottom: int, right: int) -> NDArray[np.uint8]:
        return _to_rgb(np.asarray(self.array[top:bottom, left:right]))


class TensorSource(PixelSource):
    """A tensor (3, height, width): uint8, or normalised floats."""

    def __init__(self, tensor: Tensor) -> None:
        self.name, self.tensor = "the tensor", tensor
        if tensor.ndim != 3 or len(tensor) != 3:
            raise ArgumentError(f"the tensor has shape {tuple(tensor.shape)}; it must be (3, height, width)")
        if tensor.dtype != torch.uint8 and not tensor.is_floating_point():
            raise ArgumentError(f"the tensor is {tensor.dtype}; it must be uint8, or normalised floats")
        super().__init__(*tensor.shape[1:])

    @property
    def identity(self) -> list[Any]:
        return [*super().identity, self._digest()]

    def _read(self, top: int, left: int, bottom: int, right: int) -> Tensor:
        region = self.tensor[:, top:bottom, left:right].cpu()
        return normalize(region) if region.dtype == torch.uint8 else region


class TiffSource(PixelSource):
    """The first image of a TIFF, in tiles or strips: BigTIFF, GeoTIFF, OME-TIFF, SVS and others that tifffile reads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            import tifffile
        except ImportError as error:
            raise ArgumentError("reading a TIFF by regions needs tifffile: pip install 'veca[large]'") from error

        self.name, self.path = os.fspath(path), Path(path)
        with self._errors():
            file = open(path, "rb", opener=open_regular)  # noqa: SIM115 (as long as regions are read)
            self._bytes = os.fstat(file.fileno()).st_size
            page = self._page = cast(Any, tifffile.TiffFile(file).pages[0])
            self._handle, self._compression = file, int(page.compression)
            check_compression(self._compression)
            if page.jpegtables:
                check_segment(self._compression, page.jpegtables)
            planar = page.samplesperpixel > 1 and page.planarconfig == tifffile.PLANARCONFIG.SEPARATE
            photometric = int(page.photometric)
            colours = photometric in _COLOURS or (photometric == _YCBCR and not is_bounded(self._compression))
            supported = page.dtype == np.uint8 and page.samplesperpixel in (1, 3, 4) and page.imagedepth == 1
            name = str(getattr(page.photometric, "name", photometric)).lower()
            kind = f"{page.dtype}, {page.samplesperpixel} channels{' in planes' * planar}, {name}"
            self._inverted = photometric == _WHITE_IS_ZERO
            self._alpha = _ALPHAS.get(next(iter(page.extrasamples), 0), "none")
            # A damaged file may have lists where numbers belong.
            height, width = operator.index(page.imagelength), operator.index(page.imagewidth)
            segment = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, width)
            self._rows, self._columns = map(operator.index, segment)
            self._offsets, self._byte_counts = list(page.dataoffsets), list(page.databytecounts)
            orientation = page.tags.valueof(274, 1)
        if orientation in range(2, 9):
            rule = "regions are read of upright images. Turn it and write it again"
            raise ImageError(f"{self.name} is stored turned or mirrored, orientation {orientation}; {rule}")
        if not supported or planar or not colours:
            raise ImageError(f"{self.name} holds {kind}; regions are read of 8-bit grey, RGB or RGBA")
        super().__init__(height, width)
        if min(self._rows, self._columns) < 1 or self._rows * self._columns > MAX_SEGMENT_PIXELS:
            rule = f"at most {MAX_SEGMENT_PIXELS:,} pixels are decoded at a time. Write it again in tiles"
            raise ImageError(f"{self.name} has segments of {self._rows}×{self._columns}; {rule}")
        across = -(-self.width // self._columns)
        if (found := min(len(self._offsets), len(self._byte_counts))) < (
            expected := across * -(-self.height // self._rows)
        ):
            raise ImageError(f"{self.name} is damaged: it has {found} segments, and its size needs {expected}")
        self._across, self._cache, self._cache_bytes = across, OrderedDict[int, NDArray[np.uint8]](), 0
        with contextlib.suppress(Exception):  # a damaged georeference is none
            georeference, geo_tags = _plain(page.geotiff_tags or {}), read_geo_tags(page)
            scale_geo_tags(geo_tags, PATCH)
            self.georeference, self.geo_tags = georeference, geo_tags

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except ImageError as error:
            raise ImageError(f"{self.name}: {error}") from error.__cause__
        except (ArgumentError, MemoryError):
            raise
        except Exception as error:  # what codecs and tifffile raise has no common class
            reason = f"{type(error).__name__}: {error}"
            raise ImageError(f"{self.name} cannot be read: {reason[:300]}") from error

    def _segment(self, index: int) -> NDArray[np.uint8]:
        """A decoded tile or strip (rows, columns, channels)."""
        if index in self._cache:
            self._cache.move_to_end(index)
            return self._cache[index]
        page, data = self._page, None
        with self._errors():
            offset, count = self._offsets[index], self._byte_counts[index]
            if count:
                if not 0 <= offset <= offset + count <= self._bytes:
                    raise ImageError(
                        f"segment {index} ends after byte {offset + count:,}, the file after {self._bytes:,}"
                    )
                self._handle.seek(offset)
                data = self._handle.read(count)
                check_segment(self._compression, data)
            decoded, _, shape = page.decode(data, index, jpegtables=page.jpegtables, jpegheader=page.jpegheader)
            if decoded is None:  # a sparse TIFF leaves out segments of the background
                decoded = np.full(shape, page.nodata if 0 <= page.nodata <= 255 else 0)
        segment = np.ascontiguousarray(decoded.reshape(-1, *decoded.shape[-2:]), dtype=np.uint8)
        self._cache[index] = segment
        self._cache_bytes += segment.nbytes
        while self._cache_bytes > _CACHE_BYTES and len(self._cache) > 1:
            self._cache_bytes -= self._cache.popitem(last=False)[1].nbytes
        return segment

    def _read(self, top: int, left: int, bottom: int, right: int) -> NDArray[np.uint8]:
        out = np.empty((bottom - top, right - left, self._page.samplesperpixel), np.uint8)
        for i in range(top // self._rows, -(-bottom // self._rows)):
            for j in range(left // self._columns, -(-right // self._columns)):
                first_row, first_column = i * self._rows, j * self._columns
                rows = slice(max(top, first_row), min(bottom, first_row + self._rows))
                columns = slice(max(left, first_column), min(right, first_column + self._columns))
                segment = self._segment(i * self._across + j)
                part = segment[
                    rows.start - first_row : rows.stop - first_row,
                    columns.start - first_column : columns.stop - first_column,
                ]
                if part.shape[:2] != (rows.stop - rows.start, columns.stop - columns.start):
                    raise ImageError(f"{self.name} is damaged: segment {i * self._across + j} is too small")
                out[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left] = part
        return _to_rgb(out, self._alpha, self._inverted)


class SlideSource(PixelSource):
    """A microscope slide at its full resolution, by OpenSlide; what was not scanned is white."""

    def __init__(self, path: str) -> None:
        try:
            import openslide
        except ImportError as error:
            raise ArgumentError(f"{path} needs openslide: pip install 'veca[slides]'") from error

        self.name, self.path, self._error = path, Path(path), openslide.OpenSlideError
        try:
            self._slide = openslide.OpenSlide(path)
            width, height = self._slide.dimensions
        except (openslide.OpenSlideError, OSError) as error:
            raise ImageError(f"{path} cannot be read: {error or type(error).__name__}") from error
        super().__init__(height, width)

    def _read(self, top: int, left: int, bottom: int, right: int) -> NDArray[np.uint8]:
        try:
            region = self._slide.read_region((left, top), 0, (right - left, bottom - top))
        except self._error as error:
            raise ImageError(f"{self.name} cannot be read: {error}") from error
        return _to_rgb(np.asarray(region))


class RasterSource(PixelSource):
    """A raster of another format than TIFF, by rasterio."""

    def __init__(self, path: str) -> None:
        try:
            import rasterio
        except ImportError as error:
            raise ArgumentError(f"{path} needs rasterio: pip install 'veca[geo]'") from error

        self.name, self.path, self._error = path, Path(path), rasterio.errors.RasterioError
        try:
            with warnings.catch_warnings(action="ignore"):  # of rasters without a georeference
                file = self._file = rasterio.open(path)
        except rasterio.errors.RasterioError as error:
            raise ImageError(f"{path} cannot be read: {error}") from error
        kinds, colours = set(file.dtypes), rasterio.enums.ColorInterp
        other = {colours.palette, colours.cyan, colours.hue, colours.Y} & set(file.colorinterp)
        self._alpha: Alpha = "straight" if file.colorinterp[-1] == colours.alpha else "none"
        if kinds != {"uint8"} or file.count not in (1, 3, 4) or other:
            held = f"{file.count} bands of {', '.join(sorted(kinds))}"
            raise ImageError(f"{path} holds {held}; regions are read of 8-bit grey, RGB or RGBA")
        rows, columns = map(max, zip(*file.block_shapes, strict=True))
        if rows * columns > MAX_SEGMENT_PIXELS:
            rule = f"at most {MAX_SEGMENT_PIXELS:,} pixels are decoded at a time"
            raise ImageError(f"{path} has blocks of {rows}×{columns}; {rule}")
        super().__init__(file.height, file.width)
        if not file.transform.is_identity:
            crs = file.crs or rasterio.CRS()
            self.geo_tags = make_geo_tags(tuple(file.transform)[:6], crs.to_epsg(), crs.is_projected)
            self.georeference = {"ModelTransformation": list(self.geo_tags[0].value), "crs": str(crs)}

    def _read(self, top: int, left: int, bottom: int, right: int) -> NDArray[np.uint8]:
        try:
            bands = self._file.read(window=((top, bottom), (left, right)))
        except self._error as error:
            raise ImageError(f"{self.name} cannot be read: {error}") from error
        return _to_rgb(np.moveaxis(bands, 0, -1), self._alpha)


def open_pixels(source: Any, max_pixels: int = MAX_PIXELS) -> PixelSource:
    """What an image is read from by regions: a path, an array, a tensor, or a `PixelSource` as it is.

    Paths are of TIFF files, slides, rasters, zarr arrays, `.npy` files, and images of the other formats, which are
    decoded whole if they have at most `max_pixels`.
    """
    if isinstance(source, PixelSource):
        return source
    if isinstance(source, Tensor):
        return TensorSource(source)
    if not isinstance(source, str | os.PathLike):
        if hasattr(source, "shape") and hasattr(source, "dtype"):
            return ArraySource(source)
        raise ArgumentError(f"the source is {type(source).__name__}; expected a path, an array or a tensor")
    name = os.fspath(source)
    suffix = Path(name).suffix.lower()
    if suffix in TIFF_SUFFIXES:
        return TiffSource(name)
    if suffix in SLIDE_SUFFIXES:
        return SlideSource(name)
    if suffix in RASTER_SUFFIXES:
        return RasterSource(name)
    if suffix == ".zarr":
        return ArraySource(open_zarr(name), name)
    if suffix == ".npy":
        try:
            return ArraySource(np.load(name, mmap_mode="r", allow_pickle=False), name)
        except (OSError, ValueError) as error:
            raise ImageError(f"{name} cannot be read: {error}") from error
    return ArraySource(np.asarray(open_image(name, max_pixels=max_pixels)), name)


def open_zarr(path: str) -> Any:
    """A zarr array, to be read."""
    try:
        import zarr
    except ImportError as error:
        raise ArgumentError("zarr arrays need zarr: pip install 'veca[large]'") from error

    try:
        return zarr.open_array(path, mode="r")
    except Exception as error:  # the stores of zarr have errors of their own
        raise ImageError(f"{path} cannot be opened as a zarr array: {error}") from error


def _to_rgb(pixels: NDArray[np.uint8], alpha: Alpha = "straight", inverted: bool = False) -> NDArray[np.uint8]:
    """Grey (height, width[, 1]), RGB or RGB with a fourth channel as RGB; what is transparent is white."""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.shape[2] == 1:
        return np.repeat(255 - pixels if inverted else pixels, 3, axis=2)
    colours = pixels[..., :3]
    if pixels.shape[2] == 3 or alpha == "none":
        return colours
    opacity = pixels[..., 3:].astype(np.uint16)
    if alpha == "premultiplied":
        return np.minimum(colours + (255 - opacity), 255).astype(np.uint8)
    return ((colours * opacity + 255 * (255 - opacity) + 127) // 255).astype(np.uint8)


def _plain(value: Any) -> Any:
    """Tags as JSON can hold them."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str) else str(value)
