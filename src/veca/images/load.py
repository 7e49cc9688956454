"""Open image files as upright RGB images or as arrays of labels, or load them as model input."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.errors import ArgumentError
from veca.images.decode import MAX_PIXELS, ImageError, Source, decode, image_errors, orientation
from veca.images.fit import Fit, FitSize, check_fit, fit_image
from veca.images.tensors import normalize, to_tensor

# What makes an image upright, by its EXIF orientation from 2 on; 1 is upright
_TURNS = "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"
_TRANSPOSE = {code: Image.Transpose[name] for code, name in enumerate(_TURNS, start=2)}
_BAND_PIXELS = 2**22
Colour = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)


def load_image(
    source: Source, size: FitSize = 512, fit: Fit = "crop", *, max_pixels: int = MAX_PIXELS, background: Colour = WHITE
) -> Tensor:
    """Load an image as a float32 tensor (3, H, W), ready for the model: open, fit, normalise.

    >>> load_image(Image.new("RGB", (640, 400)), size=64).shape
    torch.Size([3, 64, 64])
    """
    check_fit(size, fit)
    image = open_image(source, max_pixels=max_pixels, background=background)
    with image_errors(source, max_pixels):  # it may get too large
        image = fit_image(image, size, fit, max_pixels)
    return normalize(to_tensor(image))


def open_image(
    source: Source, *, max_pixels: int = MAX_PIXELS, background: Colour = WHITE, at_least: int | None = None
) -> Image.Image:
    """Open an image as fully decoded, upright RGB, or raise `ImageError`.

    Takes JPEG, MPO, PNG, WebP, AVIF, TIFF, GIF, BMP and PPM from a path, bytes, a binary stream
    (read from its start, left open) or a Pillow image. Of animations and multi-page files the
    first frame is taken. EXIF orientation is applied, broken EXIF ignored. Transparent images
    are laid over `background`. 16-bit grey becomes 8-bit; floating-point grey must lie in [0, 1].

    For an image that will be shrunk anyway, `at_least` saves time: a JPEG whose short side has twice
    as many pixels or more is decoded at a half, a quarter or an eighth of its size, unless it must be
    rotated. Its exact size, which may end within the last pixels, is then `info["extent"]`.

    >>> open_image(Image.new("LA", (40, 30), (0, 0)), background=(9, 8, 7)).getpixel((0, 0))
    (9, 8, 7)
    """
    if len(background) != 3 or not all(0 <= value <= 255 for value in background):
        raise ArgumentError(f"background is {background}; it must be three numbers from 0 to 255")
    with image_errors(source, max_pixels):
        image = decode(source, max_pixels, at_least)
        transpose = _TRANSPOSE.get(orientation(image))
        rgb = _to_rgb(image, background)
        if transpose is not None:
            rgb = rgb.transpose(transpose)
        elif rgb is image:
            rgb = image.copy()
    rgb.info = {}  # metadata of the file, such as its orientation, no longer applies
    if at_least is not None and image is not source:
        rgb.info["extent"] = image.info["extent"] if transpose is None else rgb.size
    return rgb


def open_values(source: Source, *, max_pixels: int = MAX_PIXELS) -> NDArray[Any]:
    """Open a one-channel image as the array (height, width) of its raw values, uint8 or uint16: masks and depths.

    Of an image with a palette these are the indices, not the colours. Orientation is not applied, and colour images
    are refused; so is whatever `open_image` refuses.

    >>> open_values(Image.new("L", (3, 2), 7)).tolist()
    [[7, 7, 7], [7, 7, 7]]
    """
    with image_errors(source, max_pixels):
        image = decode(source, max_pixels)
        values = np.array(image)  # a copy: the image may be the caller's
        if values.dtype == np.bool_:
            values = values.astype(np.uint8)
        fits_uint16 = values.dtype == np.int32 and values.min() >= 0 and values.max() <= 65535
        if fits_uint16 or values.dtype == ">u2":  # how Pillow returns 16-bit grey from some formats
            values = values.astype(np.uint16)
        if values.ndim != 2 or values.dtype not in (np.uint8, np.uint16):
            raise ImageError(f"mode {image.mode}; labels are one channel of 8 or 16 bits. Save them as grey PNG")
    return values


def _to_rgb(image: Image.Image, background: Colour) -> Image.Image:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    rgb = Image.new("RGB", image.size, background)
    # In bands of rows: intermediate modes of the whole image would take several times its memory.
    rows = max(1, _BAND_PIXELS // image.width)
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
    """Convert 16-bit, 32-bit or float grey to 8 bits."""
    values = np.asarray(image)
    low, high = values.min(), values.max()
    top = 1 if image.mode == "F" else 65535
    if not (low >= 0 and high <= top):  # so that NaN is refused too
        rule = f"in {values.dtype} pictures they must lie in 0 to {top}. Rescale them first"
        raise ImageError(f"grey values run from {low} to {high}; {rule}")
    grey = Image.fromarray((values * (255 / top) + 0.5).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray((values != transparent).astype(np.uint8) * 255))
    return grey
