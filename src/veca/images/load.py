"""Load images as model input: open as upright RGB or as labels, fit to a size, convert to tensors, normalise."""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veca.errors import ArgumentError
from veca.images.decode import MAX_PIXELS, ImageError, ImageTooLargeError, Source, decode, image_errors, orientation
from veca.images.resize import (
    PATCH,
    Box,
    Crop,
    cached_tensors,
    check_max_patches,
    check_tensor,
    native_sizes,
    resample,
    resample_fast,
)
from veca.inputs import nearest_sizes

Fit = Literal["crop", "stretch", "keep", "pad", "native"]
# One side, or (height, width)
FitSize = int | tuple[int, int] | None
Colour = tuple[int, int, int]
Decoder = Literal["cpu", "pillow"]
# Width and height of an upright image to the crop of it
PlanCrop = Callable[[int, int], Crop]

# Short side of the resized image over the side of its centre crop: 288 for 256
CROP_RATIO = 1.125
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WHITE: Colour = (255, 255, 255)
# What makes an image upright, by its EXIF orientation from 2 on; 1 is upright
_TURNS = "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"
_TRANSPOSE = {code: Image.Transpose[name] for code, name in enumerate(_TURNS, start=2)}
_BAND_PIXELS = 2**22


def load_image(
    source: Source,
    size: FitSize = 512,
    fit: Fit = "crop",
    *,
    max_pixels: int = MAX_PIXELS,
    background: Colour = WHITE,
    max_patches: int | None = None,
) -> Tensor:
    """Load an image as a float32 tensor (3, H, W), ready for the model: open, fit, normalise.

    >>> load_image(Image.new("RGB", (640, 400)), size=64).shape
    torch.Size([3, 64, 64])
    """
    _check_fit(size, fit, max_patches)
    image = open_image(source, max_pixels=max_pixels, background=background)
    with image_errors(source, max_pixels):  # it may get too large
        image = fit_image(image, size, fit, max_pixels, max_patches)
    return normalize(to_tensor(image))


def load_pixels(
    source: Source,
    size: FitSize,
    fit: Fit = "crop",
    *,
    max_pixels: int = MAX_PIXELS,
    decoder: Decoder = "pillow",
    max_patches: int | None = None,
) -> tuple[Tensor, tuple[int, int]]:
    """Load an image as a uint8 tensor (3, H, W), with the (width, height) of the upright image before it is fitted.

    "pillow" is `open_image`, `fit_image` and `to_tensor`. "cpu" takes half the time or less, and values differ by a few
    grey levels: large JPEGs are decoded at reduced size, and PyTorch resizes.

    >>> pixels, size = load_pixels(Image.new("RGB", (640, 400)), 64, "keep", decoder="cpu")
    >>> pixels.shape, size
    (torch.Size([3, 64, 96]), (640, 400))
    """
    image, crop, full_size = open_for_fit(
        source, size, fit, max_pixels=max_pixels, decoder=decoder, max_patches=max_patches
    )
    return crop_pixels(crop, image, decoder), full_size


def open_for_fit(
    source: Source,
    size: FitSize,
    fit: Fit = "crop",
    *,
    max_pixels: int = MAX_PIXELS,
    decoder: Decoder = "pillow",
    max_patches: int | None = None,
) -> tuple[Image.Image, Crop, tuple[int, int]]:
    """Open an image as upright RGB, with the crop of it that `fit_image` makes and the (width, height) of its file.

    With "cpu" a JPEG is decoded at reduced size as long as two pixels are left for each one of the result; the image
    may then be that of the decoder.
    """
    _check_fit(size, fit, max_patches)
    if decoder not in get_args(Decoder):
        raise ArgumentError(f"decoder is {decoder!r}; it must be one of {', '.join(get_args(Decoder))}")
    side = float(max(size) if isinstance(size, tuple) else size or 0)
    if fit == "native":  # no short side is longer than that of a square
        side = PATCH * math.sqrt(max_patches or patch_limit(size) or 0)
    at_least = math.ceil(2 * side * (CROP_RATIO if fit == "crop" else 1)) if side and decoder == "cpu" else None
    plan = partial(plan_fit, size=size, fit=fit, max_pixels=max_pixels, max_patches=max_patches)
    return open_for_crop(source, plan, max_pixels=max_pixels, at_least=at_least)


def open_for_crop(
    source: Source, plan: PlanCrop, *, max_pixels: int = MAX_PIXELS, at_least: int | None = None
) -> tuple[Image.Image, Crop, tuple[int, int]]:
    """Open an image as upright RGB, with the crop that `plan` makes of its size and the (width, height) of its file.

    `at_least` is as in `open_image`; the crop is then one of the reduced image.
    """
    opened = _open_rgb(source, max_pixels, WHITE, at_least)
    with image_errors(source, max_pixels):  # it may get too large
        crop = plan(*opened.full_size)
    across, down = (part / whole for part, whole in zip(opened.extent, opened.full_size, strict=True))
    left, top, right, bottom = crop.box
    scaled = (left * across, top * down, right * across, bottom * down)
    return opened.image, crop._replace(box=scaled), opened.full_size


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
    opened = _open_rgb(source, max_pixels, background, at_least)
    rgb = opened.image.copy() if opened.unchanged else opened.image
    rgb.info = {}  # metadata of the file, such as its orientation, no longer applies
    if at_least is not None and not isinstance(source, Image.Image):
        rgb.info["extent"] = opened.extent
    return rgb


class _Opened(NamedTuple):
    """An upright RGB image, maybe of reduced size, what it covers, and its size in the file."""

    image: Image.Image
    extent: tuple[float, float]
    full_size: tuple[int, int]
    # Whether the image is still the object that was decoded, which may be the caller's
    unchanged: bool


def _open_rgb(source: Source, max_pixels: int, background: Colour, at_least: int | None) -> _Opened:
    with image_errors(source, max_pixels):
        image = decode(source, max_pixels, at_least)
        transpose = _TRANSPOSE.get(orientation(image))
        rgb = _to_rgb(image, background)
        if transpose is not None:
            rgb = rgb.transpose(transpose)
    if transpose is not None or image is source:  # not at reduced size
        return _Opened(rgb, rgb.size, rgb.size, rgb is image)
    return _Opened(rgb, image.info["extent"], image.info["full_size"], rgb is image)


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


def fit_image(
    image: Image.Image,
    size: FitSize,
    fit: Fit = "crop",
    max_pixels: int = MAX_PIXELS,
    max_patches: int | None = None,
) -> Image.Image:
    """Resize an RGB image (bicubic, antialiased) so that both sides are multiples of 16.

    - "crop": the evaluation transform. The short side becomes 1.125 × `size` and the centre is kept.
    - "stretch": exactly `size`; the aspect ratio is not kept.
    - "keep": the short side becomes `size`, the long one the multiple of 16 nearest to keeping
      the aspect ratio; nothing is cropped. Without `size`: the multiples nearest to the sides.
    - "pad": the short side becomes `size`; without it, nothing is resized. Then the last column
      and row are repeated to the right and downwards up to the next multiples of 16.
    - "native": the multiples of 16 nearest to the sides of the image itself. One of more than `max_patches`
      patches, or without that number of more than `size` × `size` pixels has, is shrunk, its aspect ratio kept.

    `size` is one number or, for "crop" and "stretch", also (height, width).

    Padding adds at most 15 pixels to a side, so every patch holds real pixels. Patches that lie
    fully inside the image keep exactly their pixels. Coordinates span the padded canvas, so
    those of a real patch move by at most 2 · 15 / side; the cores see at most one more row and
    one more column of patches, partly padded.

    >>> fit_image(Image.new("RGB", (640, 400)), 64, "keep").size
    (96, 64)
    """
    _check_rgb(image)
    return apply_crop(plan_fit(*image.size, size, fit, max_pixels, max_patches), image)


def apply_crop(crop: Crop, image: Image.Image) -> Image.Image:
    """Make of an upright image what its crop says, with Pillow."""
    image = resample(image, (crop.columns, crop.rows), crop.box)
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.flip else image
    if (crop.width, crop.height) == image.size:
        return image
    padding = (0, crop.height - crop.rows), (0, crop.width - crop.columns), (0, 0)
    return Image.fromarray(np.pad(np.asarray(image), padding, mode="edge"))


def crop_pixels(crop: Crop, image: Image.Image, decoder: Decoder = "pillow") -> Tensor:
    """Make of an upright image what its crop says, uint8 (3, H, W): as `apply_crop` does, or with "cpu" by PyTorch."""
    if decoder == "pillow":
        return to_tensor(apply_crop(crop, image))
    pixels = resample_fast(image, (crop.columns, crop.rows), crop.box).numpy()
    pixels = pixels[..., ::-1] if crop.flip else pixels
    if (crop.rows, crop.columns) != (crop.height, crop.width):
        pixels = np.pad(pixels, ((0, 0), (0, crop.height - crop.rows), (0, crop.width - crop.columns)), mode="edge")
    # Copied by numpy: torch would start a thread per core.
    return torch.from_numpy(np.ascontiguousarray(pixels))


def plan_fit(
    width: int,
    height: int,
    size: FitSize,
    fit: Fit = "crop",
    max_pixels: int = MAX_PIXELS,
    max_patches: int | None = None,
) -> Crop:
    """Return what `fit_image` makes of an image of this size."""
    _check_fit(size, fit, max_patches)
    if fit == "native":
        rows, columns = native_sizes(height, width, max_patches or patch_limit(size))
    elif isinstance(size, tuple):
        rows, columns = size
    elif size is not None and fit in ("crop", "stretch"):
        rows = columns = size
    else:
        scale = size / min(height, width) if size else 1
        rows, columns = round(height * scale), round(width * scale)
        if fit == "keep":
            rows, columns = nearest_sizes(height * scale, width * scale)
    full_rows, full_columns = rows + -rows % PATCH, columns + -columns % PATCH
    if (total := full_rows * full_columns) > max_pixels:
        made = f"{full_rows}×{full_columns} = {total:,} pixels"
        rule = f"at most {max_pixels:,} are allowed. Use a smaller size, fit='crop' or max_pixels={total}"
        raise ImageTooLargeError(f"{height}×{width}; fit={fit!r} with size={size} would make it {made}, and {rule}")
    box = _centre_box(width, height, columns, rows) if fit == "crop" else (0, 0, width, height)
    return Crop(box, columns, rows, full_columns, full_rows)


def patch_limit(size: FitSize) -> int | None:
    """Patches of an image of `size` pixels; None: no limit."""
    rows, columns = size if isinstance(size, tuple) else (size or 0, size or 0)
    return rows * columns // PATCH**2 or None


def plan_centre(width: int, height: int, side: int) -> Crop:
    """Return the crop that "crop" of `fit_image` makes, of any side."""
    return Crop(_centre_box(width, height, side, side), *(side,) * 4)


def _centre_box(width: int, height: int, columns: int, rows: int) -> Box:
    scale = min(height / rows, width / columns) / CROP_RATIO
    left, top = (width - columns * scale) / 2, (height - rows * scale) / 2
    return left, top, width - left, height - top


def _check_fit(size: FitSize, fit: str, max_patches: int | None) -> None:
    """Raise `ArgumentError` unless `fit_image` can use them."""
    check_max_patches(max_patches)
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
            raise ArgumentError(f"size is {side}; it must be a positive multiple of {PATCH}. Nearest: {nearest}")


def _check_rgb(image: Image.Image) -> None:
    """Raise `ArgumentError` for an image of another mode."""
    if image.mode != "RGB":
        raise ArgumentError(f"image has mode {image.mode}; it must be RGB. open_image converts it")


def to_tensor(image: Image.Image) -> Tensor:
    """Convert an RGB image to a uint8 tensor (3, H, W)."""
    _check_rgb(image)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def normalize(x: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """Normalise a tensor (..., 3, H, W), uint8 or float in [0, 1], to float32, by default as ImageNet models expect.

    >>> normalize(torch.full((3, 16, 16), 0.485))[0, 0, 0]
    tensor(0.)
    """
    check_tensor(x, x.is_floating_point() or x.dtype == torch.uint8, "uint8 or float in [0, 1]")
    # Only on the CPU, where reading the maximum costs no synchronisation. Resizing may overshoot 1 a little.
    readable = x.is_floating_point() and x.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and x.numel() and (top := float(x.detach().max())) > 2:
        raise ArgumentError(f"tensor has values up to {top:g}; floats must lie in [0, 1]. Divide by 255, or pass uint8")
    mean_of, std_of = (_channel_constants(tuple(values), x.device) for values in (mean, std))
    if x.is_floating_point():
        return (x.float() - mean_of) / std_of
    return x.float().div_(255).sub_(mean_of).div_(std_of)  # in place: no more memory


@cached_tensors  # copying constants to a GPU would wait for it at every batch
def _channel_constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(3, 1, 1)
