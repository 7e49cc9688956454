"""Arrays of features as tiled TIFF files, with the georeference of the image they are of.

A georeference is three kinds of tags: how raster positions become model coordinates (a scale and a tie point, or a
matrix), and the keys of the coordinate system, with the numbers and texts they refer to, which are copied.
"""

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

_PIXEL_SCALE, _TIE_POINTS, _MATRIX, _KEYS = 33550, 33922, 34264, 34735
_TAGS = (_PIXEL_SCALE, _TIE_POINTS, _MATRIX, _KEYS, 34736, 34737)
_RASTER_TYPE, _PIXEL_IS_POINT = 1025, 2
_SHORT, _DOUBLE = 3, 12
_TILE = 64
"""Side of a tile of features, at most; a multiple of 16, as TIFF demands."""


class GeoTag(NamedTuple):
    """A tag as tifffile writes it."""

    code: int
    dtype: int
    length: int
    value: Any
    write_once: bool = True


def read_geo_tags(page: Any) -> list[GeoTag]:
    """The tags of a page of tifffile that make its georeference; empty: it has none."""
    tags = [tag for code in _TAGS if (tag := page.tags.get(code)) is not None]
    if not any(tag.code in (_PIXEL_SCALE, _TIE_POINTS, _MATRIX) for tag in tags):
        return []
    return [GeoTag(tag.code, int(tag.dtype), int(tag.count), tag.value) for tag in tags]


def make_geo_tags(transform: Sequence[float], epsg: int | None, is_projected: bool) -> list[GeoTag]:
    """The georeference of pixels that are areas: two rows of their matrix, and the number of the coordinate system."""
    a, b, c, d, e, f = transform
    matrix = (a, b, 0.0, c, d, e, 0.0, f, *(0.0,) * 7, 1.0)
    tags = [GeoTag(_MATRIX, _DOUBLE, len(matrix), matrix)]
    if epsg is not None:
        model, system = (1, 3072) if is_projected else (2, 2048)
        keys = (1, 1, 0, 3, 1024, 0, 1, model, _RASTER_TYPE, 0, 1, 1, system, 0, 1, epsg)
        tags.append(GeoTag(_KEYS, _SHORT, len(keys), keys))
    return tags


def scale_geo_tags(tags: Sequence[GeoTag], patch: int) -> list[GeoTag]:
    """The georeference of the grid of patches, of `patch` × `patch` pixels, of an image."""
    keys = [key for tag in tags if tag.code == _KEYS for key in np.reshape(tag.value, (-1, 4)).tolist()]
    is_point = any(key[0] == _RASTER_TYPE and key[3] == _PIXEL_IS_POINT for key in keys)
    # Position (0, 0) is the corner of the first pixel, or its centre: then that of the first patch is between pixels.
    shift = (patch - 1) / 2 if is_point else 0.0
    move = np.diag([patch, patch, 1.0, 1.0])
    move[:2, 3] = shift
    scaled = list[GeoTag]()
    for tag in tags:
        if tag.code in (_PIXEL_SCALE, _TIE_POINTS, _MATRIX):
            values = np.array(tag.value, np.float64)
            if tag.code == _PIXEL_SCALE:
                values[:2] *= patch
            elif tag.code == _TIE_POINTS:
                values = values.reshape(-1, 6)
                values[:, :2] = (values[:, :2] - shift) / patch
            else:
                values = values.reshape(4, 4) @ move
            tag = tag._replace(value=tuple(values.ravel().tolist()))
        scaled.append(tag)
    return scaled


def write_empty_tiff(
    path: str | os.PathLike[str],
    shape: tuple[int, int, int],
    dtype: DTypeLike,
    about: dict[str, Any],
    tags: Sequence[GeoTag] = (),
) -> None:
    """A BigTIFF of zeros in tiles (rows, columns, channels), not compressed; `about` is its description, as JSON."""
    import tifffile

    tile = tuple(min(_TILE, -(-side // 16) * 16) for side in shape[:2])
    options: dict[str, Any] = {"photometric": "minisblack", "planarconfig": "contig", "metadata": None}
    options |= {"tile": tile, "bigtiff": True, "description": json.dumps(about), "extratags": tags}
    tifffile.imwrite(path, None, shape=shape, dtype=np.dtype(dtype), **options)


class TiffArray:
    """Regions of such a file, read and written as those of an array."""

    def __init__(self, path: str | os.PathLike[str], writable: bool = False) -> None:
        import tifffile
        import zarr

        self._file = tifffile.TiffFile(path, mode="r+" if writable else "r")
        self._array: Any = zarr.open_array(self._file.pages[0].aszarr(), mode="r+" if writable else "r")
        self.shape, self.dtype = tuple(self._array.shape), self._array.dtype

    def __getitem__(self, region: Any) -> NDArray[Any]:
        found: NDArray[Any] = np.asarray(self._array[region])
        return found

    def __setitem__(self, region: Any, values: Any) -> None:
        self._array[region] = values
        self._file.filehandle.flush()  # the system keeps it if this process is killed

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return self[:].astype(dtype or self.dtype, copy=False)

    def close(self) -> None:
        self._file.close()
