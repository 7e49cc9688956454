"""Resize Pillow images, image tensors and feature maps."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from veca.errors import ArgumentError
from veca.inputs import nearest_sizes

PATCH = 16
Mode: TypeAlias = Literal["bilinear", "bicubic"]
# Left, top, right, bottom
Box: TypeAlias = tuple[float, float, float, float]
# Limits of `resample_fast`, beyond which Pillow resizes: shift in pixels of the result, and pixels that are copied
_MAX_SHIFT, _MAX_COPY = 0.05, 2**23
_ALL_ROWS = slice(None)


class Crop(NamedTuple):
    """Which part of an upright image becomes a result of `columns` × `rows` pixels, and how the image is stored.

    `box` is (left, top, right, bottom) in pixels of the upright image, `orientation` the EXIF code of the stored one,
    which may be turned. The result is repeated at its right and bottom edges up to `height` × `width`; `flip` mirrors
    it.
    """

    box: Box
    columns: int
    rows: int
    width: int
    height: int
    orientation: int = 1
    flip: bool = False

    @property
    def source(self) -> tuple[float, float]:
        """Width and height of what it certainly has of the image."""
        return self.box[2], self.box[3]

    @property
    def grows_first(self) -> bool:
        """Whether `resample` resizes rows first: columns would grow before the image shrinks."""
        left, top, right, bottom = self.box
        return self.columns > right - left and self.rows < bottom - top

    def rows_first(self, width: int, height: int) -> bool:
        """Whether Pillow resizes the rows of a `width` × `height` image first, which changes how values are rounded.

        Its versions before 13 do not, where the height shrinks by more than twice the pixels that the width does.
        """
        return self.grows_first or height - self.rows > 2 * max(0, width - self.columns)


def cached_tensors(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Cache the tensors that a function makes from constants; they must not be written to."""
    # A tensor made in inference mode could not be used by a later training step.
    build = torch.inference_mode(False)(build)
    cached = functools.lru_cache(maxsize=16)(build)

    @functools.wraps(build)
    def get(*args: Any, **options: Any) -> Tensor:
        # A tensor made while tracing must not outlive the trace (`torch.empty` shows fake tensors), so no cache there.
        tracing = torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor
        return build(*args, **options) if tracing else cached(*args, **options)

    return get


def resize_maps(
    maps: Tensor, size: tuple[int, int], mode: Mode = "bilinear", antialias: bool = False, band: slice = _ALL_ROWS
) -> Tensor:
    """Compute `F.interpolate(maps, size, mode=mode, antialias=antialias)` for maps (..., h, w); its rows in `band`.

    By matrix products: fast on GPUs, with deterministic gradients.
    """
    (height, width), (rows, columns) = maps.shape[-2:], size
    if rows != height:
        maps = resize_matrix(height, rows, maps.device, maps.dtype, mode, antialias)[band] @ maps
    elif band != _ALL_ROWS:
        maps = maps[..., band, :]
    if columns != width:
        maps = maps @ resize_matrix(width, columns, maps.device, maps.dtype, mode, antialias).mT
    return maps


@cached_tensors
def resize_matrix(
    before: int, after: int, device: torch.device, dtype: torch.dtype, mode: Mode = "bilinear", antialias: bool = False
) -> Tensor:
    """Return the matrix (after, before) that resizes one side."""
    unit = torch.eye(before, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return F.interpolate(unit[None, None], (after, before), mode=mode, antialias=antialias)[0, 0].to(dtype)


def resample(image: Image.Image, size: tuple[int, int], box: Box) -> Image.Image:
    """Resize the part of an RGB image in `box` = (left, top, right, bottom) to `size` = (width, height).

    Bicubic and antialiased. Pixels around the box contribute at its edges: the result is a crop of the resized image.
    """
    left, top, right, bottom = box
    # Pillow resizes horizontally first: an image 1 wide and millions high would grow before it shrinks.
    if size[0] > right - left and size[1] < bottom - top:
        image = image.resize((image.width, size[1]), Image.Resampling.BICUBIC, (0, top, image.width, bottom))
        top, bottom = 0, size[1]
    return image.resize(size, Image.Resampling.BICUBIC, (left, top, right, bottom))


def resample_fast(image: Image.Image, size: tuple[int, int], box: Box) -> Tensor:
    """Compute `resample` by PyTorch, in a fraction of Pillow's time, as a uint8 tensor (3, height, width).

    PyTorch's kernel takes no box. It is given a window of whole pixels that begins before the box, so that the box
    begins with a whole pixel of the result, up to `_MAX_SHIFT`; what comes before that pixel is cut off.
    """
    left, top, right, bottom = box
    across, down = (right - left) / size[0], (bottom - top) / size[1]
    x, columns = _align(left, across)
    y, rows = _align(top, down)
    # The filter reaches two pixels of the result, or of the image if that is enlarged.
    x_stop = min(image.width, math.ceil(right + 2 * max(across, 1)))
    y_stop = min(image.height, math.ceil(bottom + 2 * max(down, 1)))
    shift = max(abs(left - x - columns * across) / across, abs(top - y - rows * down) / down)
    if shift > _MAX_SHIFT or min(across, down) < 0.5 or (x_stop - x) * (y_stop - y) > _MAX_COPY:
        return torch.from_numpy(np.array(resample(image, size, box))).permute(2, 0, 1)
    window = torch.from_numpy(np.array(image.crop((x, y, x_stop, y_stop)))).permute(2, 0, 1)
    out = rows + size[1], columns + size[0]
    resized = torch.ops.aten._upsample_bicubic2d_aa(window[None], out, False, 1 / down, 1 / across)
    return resized[0, :, rows:, columns:]


def _align(start: float, scale: float) -> tuple[int, int]:
    """Return a whole pixel, and how many pixels of the result, of `scale` pixels each, lead from it to `start`."""
    reach = math.ceil(2 * max(scale, 1) / scale)
    found = []
    for count in range(reach + 32):
        first = round(start - scale * count)
        # The filter needs the pixels before the first one, unless it is the image's.
        if first == 0 or (first > 0 and count >= reach):
            shift = abs(start - scale * count - first) / scale
            found.append((max(shift, 0.01), count, first))  # no more pixels than needed
    _, count, first = min(found, default=(0, 0, 0))
    return first, count


def native_sizes(height: float, width: float, max_patches: int | None = None, patch: int = PATCH) -> tuple[int, int]:
    """Height and width, multiples of `patch`, nearest to a size; shrunk to at most `max_patches` patches, at least one.

    >>> native_sizes(480, 640), native_sizes(480, 640, max_patches=256), native_sizes(1, 100_000, max_patches=10)
    ((480, 640), (224, 288), (16, 160))
    """
    rows, columns = (side // patch for side in nearest_sizes(height, width, patch))
    if max_patches is None or rows * columns <= max_patches:
        return rows * patch, columns * patch
    scale = math.sqrt(max_patches / (height * width))
    if min(height, width) * scale < 1:  # a side of one patch cannot shrink further: the other takes what is left
        rows, columns = (1, max_patches) if height < width else (max_patches, 1)
    else:
        sides = ((int(side * scale), math.ceil(side * scale)) for side in (height, width))
        fitting = [grid for grid in itertools.product(*sides) if math.prod(grid) <= max_patches]
        rows, columns = min(fitting, key=lambda grid: abs(math.log(grid[0] * width / (grid[1] * height))))
    return rows * patch, columns * patch


def check_max_patches(max_patches: int | None) -> None:
    if max_patches is not None and not (isinstance(max_patches, int) and max_patches >= 1):
        raise ArgumentError(f"max_patches={max_patches!r}; it must be at least 1, or None for no limit")


def resize_to_multiple(x: Tensor, patch: int = PATCH) -> Tensor:
    """Resize a float tensor (..., 3, H, W) to the nearest multiples (bicubic, antialiased).

    As with any bicubic resize, values may overshoot a little at hard edges.
    """
    check_tensor(x, x.is_floating_point(), "floating point")
    rows, columns = nearest_sizes(x.shape[-2], x.shape[-1], patch)
    if (rows, columns) == x.shape[-2:]:
        return x
    resized = F.interpolate(x.reshape(-1, *x.shape[-3:]), (rows, columns), mode="bicubic", antialias=True)
    return resized.reshape(*x.shape[:-2], rows, columns)


def pad_to_multiple(x: Tensor, patch: int = PATCH) -> Tensor:
    """Repeat the last column and row of a float tensor (..., 3, H, W) up to the next multiples.

    What this changes for the model is described under "pad" in `fit_image`.
    """
    check_tensor(x, x.is_floating_point(), "floating point")
    return repeat_edges(x, patch)


def repeat_edges(x: Tensor, patch: int) -> Tensor:
    """Repeat the last column and row of a tensor (..., H, W) up to the next multiples."""
    for dim, side in ((-2, x.shape[-2]), (-1, x.shape[-1])):
        if side % patch:
            x = x.index_select(dim, torch.arange(side + -side % patch, device=x.device).clamp(max=side - 1))
    return x


def check_tensor(x: Tensor, dtype_fits: bool, dtypes: str) -> None:
    if x.ndim < 3 or x.shape[-3] != 3:
        raise ArgumentError(f"tensor has shape {tuple(x.shape)}; it must be (..., 3, H, W)")
    if not dtype_fits:
        raise ArgumentError(f"tensor is {x.dtype}; it must be {dtypes}")
