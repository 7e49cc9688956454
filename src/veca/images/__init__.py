"""Every picture enters here: open, check, fit, normalise.

    file, bytes, stream → open_image → upright RGB picture → fit_image → sides multiples of 16
                        → to_tensor → uint8 (3, H, W) → normalize → float32, ready for the model

`load_image` does all of it. Whatever is wrong with a picture raises `ImageError`, so that is the
one class to catch. Files are not trusted: the formats are a fixed list that runs no other program,
sizes are checked from the header before anything is decoded, and a file that stops early is
refused instead of being filled up with grey.

Colour profiles (ICC) are ignored: the numbers in the file are taken to be sRGB.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from veca.errors import ArgumentError
from veca.images.decode import FORMATS, ImageError, ImageTooLargeError, Source, decode, orientation, strict_pillow
from veca.images.formats import unread_suffix
from veca.inputs import nearest_sizes

__all__ = [
    "EXTENSIONS",
    "MAX_PIXELS",
    "MEAN",
    "PATCH",
    "STD",
    "Fit",
    "ImageError",
    "ImageTooLargeError",
    "Source",
    "fit_image",
    "load_image",
    "nearest_sizes",
    "normalize",
    "open_image",
    "open_values",
    "pad_to_multiple",
    "resample",
    "resize_to_multiple",
    "to_tensor",
]

Fit = Literal["crop", "stretch", "keep", "pad"]

MAX_PIXELS = 2**26
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
PATCH = 16
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".avif", ".avifs"}
    | {".tif", ".tiff", ".gif", ".bmp", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm"}
)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def load_image(
    source: Source,
    size: int | tuple[int, int] | None = 512,
    fit: Fit = "crop",
    *,
    max_pixels: int = MAX_PIXELS,
    background: tuple[int, int, int] = (255, 255, 255),
) -> Tensor:
    """Picture to float32 tensor (3, H, W), ready for the model: open, fit, normalise.

    >>> load_image(Image.new("RGB", (640, 400)), size=64).shape
    torch.Size([3, 64, 64])
    """
    _check_fit(size, fit)
    image = open_image(source, max_pixels=max_pixels, background=background)
    try:
        image = fit_image(image, size, fit, max_pixels)
    except ImageTooLargeError as error:
        raise ImageTooLargeError(f"{_name(source)}: {error}") from None
    return normalize(to_tensor(image))


def open_image(
    source: Source,
    *,
    max_pixels: int = MAX_PIXELS,
    background: tuple[int, int, int] = (255, 255, 255),
    at_least: int | None = None,
) -> Image.Image:
    """Open a picture as fully decoded, upright RGB, or raise `ImageError`.

    Takes JPEG, MPO, PNG, WebP, AVIF, TIFF, GIF, BMP and PPM from a path, bytes, a binary stream
    (read from its start, left open) or a Pillow image. Of animations and multi-page files the
    first frame is taken. EXIF orientation is applied, broken EXIF ignored. Transparent pictures
    are laid over `background`. 16-bit grey becomes 8-bit; floating-point grey must lie in [0, 1].

    For a picture that is to be shrunk anyway, `at_least` saves time: a JPEG whose short side has twice
    as many pixels or more comes out at a half, a quarter or an eighth of its size, unless it is to be
    turned. Its exact size, which may end within the last pixels, is then `info["extent"]`.

    >>> open_image(Image.new("LA", (40, 30), (0, 0)), background=(9, 8, 7)).getpixel((0, 0))
    (9, 8, 7)
    """
    if len(background) != 3 or not all(0 <= value <= 255 for value in background):
        raise ArgumentError(f"background is {background}; it must be three numbers from 0 to 255")
    with _reasons(source, max_pixels):
        image = decode(source, max_pixels, at_least)
        turn = _TURNS.get(orientation(image))
        rgb = _to_rgb(image, background)
        if turn is not None:
            rgb = rgb.transpose(turn)
        elif rgb is image:
            rgb = image.copy()
    # What the file said about itself, such as its orientation, no longer holds.
    rgb.info = {}
    if at_least is not None and image is not source:
        rgb.info["extent"] = image.info["extent"] if turn is None else rgb.size
    return rgb


def open_values(source: Source, *, max_pixels: int = MAX_PIXELS) -> NDArray[Any]:
    """The numbers of a picture with one channel, (height, width), as they are in the file: masks and depths.

    uint8 or uint16. Of a picture with a palette these are the indices, not the colours. Nothing is turned, and
    colours are refused; what is refused of pictures otherwise, `open_image` tells.

    >>> open_values(Image.new("L", (3, 2), 7)).tolist()
    [[7, 7, 7], [7, 7, 7]]
    """
    with _reasons(source, max_pixels):
        image = decode(source, max_pixels)
        values = np.array(image)  # a copy: the picture may be the caller's
        if values.dtype == np.bool_:
            values = values.astype(np.uint8)
        wide = values.dtype == np.int32 and values.min() >= 0 and values.max() <= 65535
        if wide or values.dtype == ">u2":  # 16-bit grey, as some formats give it
            values = values.astype(np.uint16)
        if values.ndim != 2 or values.dtype not in (np.uint8, np.uint16):
            raise ImageError(f"mode {image.mode}; labels are one channel of 8 or 16 bits. Save them as grey PNG")
    return values


@contextmanager
def _reasons(source: Source, max_pixels: int) -> Iterator[None]:
    """Pillow as strict as we need it; whatever it raises becomes an `ImageError` with name, reason and way out."""
    name = _name(source)
    try:
        with strict_pillow(4 * max_pixels):
            yield
    except ImageError as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
    except Image.DecompressionBombError as error:
        rule = f"more than {4 * max_pixels:,} pixels; at most {max_pixels:,} are opened"
        raise ImageTooLargeError(f"{name}: {rule}. Shrink it or raise max_pixels") from error
    except UnidentifiedImageError as error:
        kind = unread_suffix(source)
        rule = f"{kind} is not read, only" if kind else "not one of"
        raise ImageError(f"{name}: {rule} {', '.join(FORMATS)}; save it as PNG") from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise ImageError(f"{name}: damaged or truncated ({cause}); save it again") from error


def fit_image(
    image: Image.Image,
    size: int | tuple[int, int] | None,
    fit: Fit = "crop",
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Resize an RGB picture (bicubic, antialiased) so that both sides are multiples of 16.

    - "crop": the evaluation view. The short side becomes 1.125 × `size` and the centre is kept.
    - "stretch": exactly `size`; the aspect ratio is not kept.
    - "keep": the short side becomes `size`, the long one the multiple of 16 nearest to keeping
      the aspect ratio; nothing is cropped. Without `size`: the multiples nearest to the sides.
    - "pad": the short side becomes `size`; without it, nothing is resized. Then the last column
      and row are repeated to the right and downwards up to the next multiples of 16.

    `size` is one number or, for "crop" and "stretch", also (height, width).

    Padding adds at most 15 pixels to a side, so every patch holds real pixels. Patches that lie
    fully inside the picture keep exactly their pixels. Coordinates span the padded canvas, so
    those of a real patch move by at most 2 · 15 / side; the cores see at most one more row and
    one more column of patches, partly padded.

    >>> fit_image(Image.new("RGB", (640, 400)), 64, "keep").size
    (96, 64)
    """
    _check_fit(size, fit)
    _check_rgb(image)
    width, height = image.size
    if isinstance(size, tuple):
        rows, columns = size
    elif size is not None and fit in ("crop", "stretch"):
        rows = columns = size
    else:
        scale = size / min(height, width) if size else 1
        rows, columns = round(height * scale), round(width * scale)
        if fit == "keep":
            rows, columns = nearest_sizes(height * scale, width * scale)
    below, beside = -rows % PATCH, -columns % PATCH
    total = (rows + below) * (columns + beside)
    if total > max_pixels:
        raise ImageTooLargeError(
            f"{height}×{width}; fit={fit!r} with size={size} would make it "
            f"{rows + below}×{columns + beside} = {total:,} pixels, and at most {max_pixels:,} "
            f"are allowed. Use a smaller size, fit='crop' or max_pixels={total}"
        )
    left, top = 0.0, 0.0
    if fit == "crop":
        scale = min(height / rows, width / columns) / 1.125
        left, top = (width - columns * scale) / 2, (height - rows * scale) / 2
    image = resample(image, (columns, rows), (left, top, width - left, height - top))
    if below or beside:
        padding = ((0, below), (0, beside), (0, 0))
        image = Image.fromarray(np.pad(np.asarray(image), padding, mode="edge"))
    return image


def to_tensor(image: Image.Image) -> Tensor:
    """RGB picture to uint8 tensor (3, H, W)."""
    _check_rgb(image)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def normalize(x: Tensor) -> Tensor:
    """Tensor (..., 3, H, W), uint8 or float in [0, 1], to float32 with ImageNet mean and std.

    >>> normalize(torch.full((3, 16, 16), 0.485))[0, 0, 0]
    tensor(0.)
    """
    _check_tensor(x, x.is_floating_point() or x.dtype == torch.uint8, "uint8 or float in [0, 1]")
    # On the CPU, where it costs no waiting. Resizing may leave values a little above 1.
    looked_at = x.is_floating_point() and x.device.type == "cpu" and not torch.compiler.is_compiling()
    if looked_at and x.numel() and (top := float(x.detach().max())) > 2:
        raise ArgumentError(f"tensor has values up to {top:g}; floats must lie in [0, 1]. Divide by 255, or pass uint8")
    mean, std = (torch.tensor(value, device=x.device).view(3, 1, 1) for value in (MEAN, STD))
    unit = x.float() if x.is_floating_point() else x.float() / 255
    return (unit - mean) / std


def resize_to_multiple(x: Tensor, patch: int = PATCH) -> Tensor:
    """Resize a float tensor (..., 3, H, W) to the nearest multiples (bicubic, antialiased).

    As with any bicubic resize, values may overshoot a little at hard edges.
    """
    _check_tensor(x, x.is_floating_point(), "floating point")
    rows, columns = nearest_sizes(x.shape[-2], x.shape[-1], patch)
    if (rows, columns) == x.shape[-2:]:
        return x
    flat = x.reshape(-1, *x.shape[-3:])
    resized = F.interpolate(flat, (rows, columns), mode="bicubic", antialias=True)
    return resized.reshape(*x.shape[:-2], rows, columns)


def pad_to_multiple(x: Tensor, patch: int = PATCH) -> Tensor:
    """Repeat the last column and row of a float tensor (..., 3, H, W) up to the next multiples.

    What this changes for the model is described under "pad" in `fit_image`.
    """
    _check_tensor(x, x.is_floating_point(), "floating point")
    for dim in (-2, -1):
        side = x.shape[dim]
        if side % patch:
            index = torch.arange(side + -side % patch, device=x.device)
            x = x.index_select(dim, index.clamp(max=side - 1))
    return x


def _name(source: object) -> str:
    if isinstance(source, bytes | bytearray | memoryview):
        return "<bytes>"
    if isinstance(source, Image.Image):
        name = getattr(source, "filename", "") or "<image>"
    elif hasattr(source, "read"):
        name = getattr(source, "name", "<stream>")
    elif isinstance(source, str | os.PathLike):
        name = os.fspath(source)
    else:
        kind = type(source).__name__
        raise TypeError(f"source is {kind}; pass a path, bytes, a binary stream or a Pillow image")
    text = str(name)
    return text if text and text.isprintable() else repr(name)


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    rgb = Image.new("RGB", image.size, background)
    # In bands, because the steps in between would hold several more pictures.
    rows = max(1, 2**22 // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        band = image.crop(box)
        if band.mode[0] in "IF":
            band = _wide_to_grey(band)
        if band.has_transparency_data:
            band = (band.convert("LA") if band.mode == "La" else band).convert("RGBA")
            rgb.paste(band, box, mask=band)
        else:
            rgb.paste(band.convert("RGB"), box)
    return rgb


def _wide_to_grey(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    low, high = values.min(), values.max()
    top = 1 if image.mode == "F" else 65535
    if not (low >= 0 and high <= top):
        raise ImageError(
            f"grey values run from {low} to {high}; in {values.dtype} pictures they must lie in "
            f"0 to {top}. Rescale them first"
        )
    grey = Image.fromarray((values * (255 / top) + 0.5).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray((values != transparent).astype(np.uint8) * 255))
    return grey


def resample(image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float]) -> Image.Image:
    """The part of an RGB picture in `box` = (left, top, right, bottom), at `size` = (width, height).

    Bicubic and antialiased. Pixels around the box count at its edges, so it is a crop of the whole, resized.
    """
    bicubic = Image.Resampling.BICUBIC
    left, top, right, bottom = box
    # Pillow resizes across, then down: a picture 1 wide and millions high would grow first.
    if size[0] > right - left and size[1] < bottom - top:
        image = image.resize((image.width, size[1]), bicubic, (0, top, image.width, bottom))
        top, bottom = 0, size[1]
    return image.resize(size, bicubic, (left, top, right, bottom))


def _check_fit(size: int | tuple[int, int] | None, fit: str) -> None:
    if fit not in get_args(Fit):
        raise ArgumentError(f"fit is {fit!r}; it must be one of {', '.join(get_args(Fit))}")
    if size is None and fit in ("crop", "stretch"):
        raise ArgumentError(f"size is None; fit={fit!r} needs one. Or use fit='keep' or 'pad'")
    if isinstance(size, tuple) and fit in ("keep", "pad"):
        raise ArgumentError(f"size is {size}; fit={fit!r} takes one number, the short side")
    for side in size if isinstance(size, tuple) else (size,):
        if side is not None and (operator.index(side) < PATCH or side % PATCH):
            low = max(side // PATCH, 1) * PATCH
            nearest = f"{low} or {low + PATCH}" if side > PATCH else str(PATCH)
            rule = f"it must be a positive multiple of {PATCH}"
            raise ArgumentError(f"size is {side}; {rule}. Nearest: {nearest}")


def _check_rgb(image: Image.Image) -> None:
    if image.mode != "RGB":
        raise ArgumentError(f"image has mode {image.mode}; it must be RGB. open_image converts it")


def _check_tensor(x: Tensor, dtype_fits: bool, dtypes: str) -> None:
    if x.ndim < 3 or x.shape[-3] != 3:
        raise ArgumentError(f"tensor has shape {tuple(x.shape)}; it must be (..., 3, H, W)")
    if not dtype_fits:
        raise ArgumentError(f"tensor is {x.dtype}; it must be {dtypes}")
