"""Every picture enters here: open, check, fit, normalise.

    file, bytes, stream -> open_image -> RGB picture -> fit_image -> sides in multiples of 16
                        -> to_tensor -> uint8 (3, H, W) -> normalize -> float32 for the model

`load_image` does all of it. Whatever is wrong with a picture raises `ImageError`, so that is the
one class to catch. The file is not trusted: formats are a fixed list that runs no other program,
the size is checked from the header before anything is decoded, and a file that stops early is
refused instead of being filled up with grey.

Colour profiles (ICC) are ignored: the numbers in the file are taken to be sRGB.
"""

from __future__ import annotations

import io
import operator
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Literal, cast, get_args

import numpy as np
import torch
from PIL import Image, ImageFile, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

Fit = Literal["crop", "stretch", "keep", "pad"]
Source = str | os.PathLike[str] | bytes | BinaryIO | Image.Image

MAX_PIXELS = 2**26
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
PATCH = 16
# fmt: off
EXTENSIONS = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".avif", ".avifs",
    ".tif", ".tiff", ".gif", ".bmp", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm",
})
# fmt: on

# MPO has no opener of its own in Pillow: the JPEG one recognises it.
_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "GIF", "BMP", "PPM")
# Pillow decodes these byte by byte in Python; more than this many bytes would take seconds.
_SLOW_CODECS = {"ppm_plain": 2**18, "ppm": 2**21, "bmp_rle": 2**22}
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(ValueError):
    """The picture cannot be used; the message names it, the reason and the way out."""


class ImageTooLargeError(ImageError):
    """The picture has, or would get, more pixels or bytes than allowed."""


def open_image(
    source: Source,
    *,
    max_pixels: int = MAX_PIXELS,
    background: tuple[int, int, int] = (255, 255, 255),
) -> Image.Image:
    """Open a picture as fully decoded, upright RGB, or raise `ImageError`.

    Takes JPEG, MPO, PNG, WebP, AVIF, TIFF, GIF, BMP and PPM from a path, bytes, a binary stream
    (read from its start, left open) or a Pillow image. Of animations and multi-page files the
    first frame is taken. EXIF orientation is applied and broken EXIF ignored. Transparent pictures
    are laid over `background`. 16-bit grey becomes 8-bit; floating-point grey must lie in [0, 1].

    >>> open_image(Image.new("LA", (40, 30), (0, 0)), background=(9, 8, 7)).getpixel((0, 0))
    (9, 8, 7)
    """
    if len(background) != 3 or not all(0 <= value <= 255 for value in background):
        raise ValueError(f"background is {background}; it must be three numbers from 0 to 255")
    name = _name(source)
    try:
        with _strict_pillow(max_pixels):
            image = _decode(source, max_pixels)
            turn = _turn(image)
            rgb = _to_rgb(image, background)
            if turn is not None:
                rgb = rgb.transpose(turn)
            elif rgb is image:
                rgb = image.copy()
    except ImageError as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
    except Image.DecompressionBombError as error:
        message = f"{name}: more than {_bomb_limit(max_pixels):,} pixels; {_allowed(max_pixels)}"
        raise ImageTooLargeError(message) from error
    except UnidentifiedImageError as error:
        formats = ", ".join(_FORMATS)
        raise ImageError(f"{name}: not a picture in {formats}; convert it to PNG") from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        message = f"{name}: damaged or truncated ({cause}); fetch or save it again"
        raise ImageError(message) from error
    # What the file said about itself, such as its orientation, no longer holds for these pixels.
    rgb.info = {}
    return rgb


def fit_image(
    image: Image.Image,
    size: int | tuple[int, int] | None,
    fit: Fit = "crop",
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Resize an RGB picture (bicubic, antialiased) so that both sides are multiples of 16.

    - "crop": the evaluation view. The short side becomes 1.125 x `size`, the centre is kept.
    - "stretch": exactly `size`; the aspect ratio is not kept.
    - "keep": the short side becomes `size`, the long one the nearest multiple of 16 to keeping
      the aspect ratio. Nothing is cropped. `None`: the multiples nearest to the picture's sides.
    - "pad": the short side becomes `size` (`None`: the picture is not resized); then the last
      column and row are repeated to the right and downwards up to the next multiple of 16.

    `size` is one number or, for "crop" and "stretch", also (height, width).

    Padding adds at most 15 pixels a side, so every patch holds real pixels. Patches that lie
    fully inside the picture keep exactly their pixels. Coordinates span the padded canvas, so
    that of a real patch moves by at most 2 * 15 / side; the cores see at most one more row and
    one more column of patches, partly padded.

    >>> fit_image(Image.new("RGB", (640, 400)), 64, "keep").size
    (96, 64)
    """
    _check_fit(size, fit)
    if image.mode != "RGB":
        raise ValueError(f"image has mode {image.mode}; it must be RGB. open_image converts it")
    width, height = image.size
    if fit == "crop" or fit == "stretch":
        rows, columns = size if isinstance(size, tuple) else (cast(int, size), cast(int, size))
    else:
        scale = cast(int, size) / min(height, width) if size else 1.0
        rows, columns = round(height * scale), round(width * scale)
        if fit == "keep":
            rows, columns = nearest_sizes(height * scale, width * scale)
    right, bottom = -columns % PATCH, -rows % PATCH
    total = (rows + bottom) * (columns + right)
    if total > max_pixels:
        raise ImageTooLargeError(
            f"image is {height}×{width}; fit={fit!r} with size={size} makes it "
            f"{rows + bottom}×{columns + right} = {total:,} pixels; at most {max_pixels:,} are "
            f"allowed. Use a smaller size, fit='crop' or max_pixels={total}"
        )
    box = (0.0, 0.0, float(width), float(height))
    if fit == "crop":
        shrink = min(height / rows, width / columns) / 1.125
        x, y = (width - columns * shrink) / 2, (height - rows * shrink) / 2
        box = (x, y, width - x, height - y)
    image = _resize(image, (columns, rows), box)
    if right or bottom:
        padding = ((0, bottom), (0, right), (0, 0))
        image = Image.fromarray(np.pad(np.asarray(image), padding, mode="edge"))
    return image


def to_tensor(image: Image.Image) -> Tensor:
    """RGB picture to uint8 tensor (3, H, W)."""
    if image.mode != "RGB":
        raise ValueError(f"image has mode {image.mode}; it must be RGB. open_image converts it")
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def normalize(x: Tensor) -> Tensor:
    """uint8 or float in [0, 1], (..., 3, H, W), to float32 with ImageNet mean and deviation.

    >>> normalize(torch.zeros(3, 16, 16, dtype=torch.uint8))[0, 0, 0].item()
    -2.1179039478302
    """
    if x.ndim < 3 or x.shape[-3] != 3:
        raise ValueError(f"tensor has shape {tuple(x.shape)}; it must be (..., 3, H, W)")
    if x.dtype != torch.uint8 and not x.is_floating_point():
        raise ValueError(f"tensor is {x.dtype}; it must be uint8, or floating point in [0, 1]")
    mean = torch.tensor(MEAN, device=x.device).view(3, 1, 1)
    std = torch.tensor(STD, device=x.device).view(3, 1, 1)
    unit = x.float() / 255 if x.dtype == torch.uint8 else x.float()
    return (unit - mean) / std


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


def nearest_sizes(height: float, width: float, patch: int = PATCH) -> tuple[int, int]:
    """The multiples of `patch` nearest to a size; ties go up, and nothing becomes 0.

    >>> nearest_sizes(250, 333)
    (256, 336)
    """
    rows, columns = (max(1, int(side / patch + 0.5)) * patch for side in (height, width))
    return rows, columns


def resize_to_multiple(x: Tensor, patch: int = PATCH) -> Tensor:
    """Resize a float tensor (..., 3, H, W) to the nearest multiples (bicubic, antialiased).

    Like every bicubic resize it may overshoot the range of `x` a little at hard edges.
    """
    _check_float_image(x)
    sizes = nearest_sizes(x.shape[-2], x.shape[-1], patch)
    if sizes == x.shape[-2:]:
        return x
    flat = x.reshape(-1, *x.shape[-3:])
    resized = F.interpolate(flat, sizes, mode="bicubic", antialias=True, align_corners=False)
    return resized.reshape(*x.shape[:-2], *sizes)


def pad_to_multiple(x: Tensor, patch: int = PATCH) -> Tensor:
    """Repeat the last column and row of a float tensor (..., 3, H, W) up to the next multiples.

    What this changes for the model is described under "pad" in `fit_image`.
    """
    _check_float_image(x)
    for dim in (-2, -1):
        side = x.shape[dim]
        if side % patch:
            index = torch.arange(side + -side % patch, device=x.device).clamp(max=side - 1)
            x = x.index_select(dim, index)
    return x


def _name(source: Source) -> str:
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
    name = os.fsdecode(name) if isinstance(name, str | bytes) else str(name)
    return name if name.isprintable() else repr(name)


def _allowed(max_pixels: int) -> str:
    return f"at most {max_pixels:,} are opened. Shrink the picture or raise max_pixels"


class _Limit(int):
    """Pillow warns above its limit and raises above twice it; with this one it raises at once."""

    def __rmul__(self, other: int) -> int:
        return int(self)


_switches = threading.Lock()
_limits: list[int] = []
_saved: tuple[int | None, bool] = (None, False)


def _bomb_limit(max_pixels: int) -> int:
    # Above ours, so that the error of a merely large picture can name its sides.
    return 4 * max_pixels


@contextmanager
def _strict_pillow(max_pixels: int) -> Iterator[None]:
    """Set Pillow's global switches while pictures are being opened, in any number of threads.

    Another library may have told Pillow to accept truncated files or pictures of any size.
    """
    global _saved
    limit = _bomb_limit(max_pixels)
    with _switches:
        if not _limits:
            _saved = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
        _limits.append(limit)
        Image.MAX_IMAGE_PIXELS = _Limit(max(_limits))
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        with _switches:
            _limits.remove(limit)
            if _limits:
                Image.MAX_IMAGE_PIXELS = _Limit(max(_limits))
            else:
                Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = _saved


def _decode(source: Source, max_pixels: int) -> Image.Image:
    if isinstance(source, Image.Image):
        _check_pixels(source, max_pixels)
        source.load()
        return source
    # The fattest pixels taken are 16-bit RGBA; the rest is room for metadata.
    max_bytes = 8 * max_pixels + 2**26
    with _opened(source, max_bytes) as stream:
        size = stream.seek(0, os.SEEK_END)
        if size == 0:
            raise ImageError("empty; fetch or save it again")
        if size > max_bytes:
            raise ImageTooLargeError(
                f"more than {max_bytes:,} bytes, too many for a picture of {max_pixels:,} pixels. "
                "Shrink the picture or raise max_pixels"
            )
        stream.seek(0)
        passes = 1
        if stream.read(3) == b"\xff\xd8\xff":
            stream.seek(0)
            data, passes = _whole_jpeg(stream.read())
            stream = io.BytesIO(data)
        with Image.open(stream, formats=_FORMATS) as image:
            _check_header(image, size, passes, max_pixels)
            if image.format == "PNG":
                _load_png(image, stream)
            else:
                image.load()
            return image


@contextmanager
def _opened(source: str | os.PathLike[str] | bytes | BinaryIO, limit: int) -> Iterator[BinaryIO]:
    if isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(source)
    elif not isinstance(source, str | os.PathLike):
        yield source if source.seekable() else io.BytesIO(source.read(limit + 1))
    else:
        try:
            stream = open(source, "rb", opener=_open_regular)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ImageError(f"cannot be opened ({reason}); check the path") from error
        with stream:
            yield stream


def _open_regular(path: str, flags: int) -> int:
    # Opening a pipe would wait for its writer, for ever if there is none.
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise ImageError("not a regular file; pass a file, bytes or an open stream")


_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")
_DHT, _SOS, _EOI = 0xC4, 0xDA, 0xD9
_FRAMES = frozenset(range(0xC0, 0xD0)) - {_DHT, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}


def _whole_jpeg(data: bytes) -> tuple[bytes, int]:
    """Check that a JPEG is whole; return the bytes to decode and its number of passes.

    libjpeg fills what is missing with grey and tells nobody. Two things show it. The passes must
    send every coefficient of every component. And a picture in one Huffman pass is handed on
    without its end marker but with eight bytes of ones: enough for the decoder to finish a whole
    picture, which it does without looking at them, but less than two blocks of a cut one (ones
    are no code; each block takes 34 of these bits), for which it then asks for more and fails.
    """
    position, segments, stray = 2, 0, 0
    frame, components, passes, sent = 0, 1, 0, 0
    first_end = 0
    while match := _MARKER.search(data, position):
        marker, start = data[match.start() + 1], match.end()
        if passes == 1 and not first_end:
            first_end = match.start()
        if marker == _EOI:
            break
        segments += 1
        stray += 0 if passes else match.start() - position
        if segments > 1024 or stray > 2**16:
            raise ImageError("JPEG with thousands of stray segments or bytes; save it again")
        position = start + int.from_bytes(data[start : start + 2])
        body = data[start + 2 : position]
        if marker in _FRAMES:
            frame, components = marker, body[5]
        elif marker == _SOS:
            passes += 1
            first, last, approximation = body[-3], body[-2], body[-1] & 15
            if frame not in _PROGRESSIVE:
                sent += 64 * body[0]
            elif approximation == 0:
                sent += (last - first + 1) * body[0]
    if sent < 64 * components:
        raise ImageError("truncated JPEG, its last passes are missing; fetch or save it again")
    end = match.start() if match else len(data)
    if passes == 1 and frame in (0xC0, 0xC1):
        return data[: first_end or end] + b"\xff\x00" * 8, passes
    return data[: end + 2], passes


def _check_pixels(image: Image.Image, max_pixels: int) -> None:
    # Pillow's WebP decoder holds four copies of the picture at once.
    allowed = max_pixels * 7 // 8 if image.format == "WEBP" else max_pixels
    width, height = image.size
    if width * height > allowed:
        pixels = f"{height}×{width} = {width * height:,} pixels"
        raise ImageTooLargeError(f"picture is {pixels}; {_allowed(allowed)}")


def _check_header(image: ImageFile.ImageFile, size: int, passes: int, max_pixels: int) -> None:
    """Refuse, before decoding, what would take too much memory or time."""
    _check_pixels(image, max_pixels)
    pixels = image.width * image.height
    if passes > min(64, 16 * max_pixels // pixels):
        raise ImageError(f"JPEG in {passes} passes over {pixels:,} pixels; save it again")
    codec = image.tile[0].codec_name if image.tile else ""
    if size > _SLOW_CODECS.get(codec, size):
        raise ImageError(
            f"{size:,} bytes of {codec}, which is slow to read; at most "
            f"{_SLOW_CODECS[codec]:,} are taken. Save it as PNG"
        )
    if image.format == "TIFF":
        tags = image.tag_v2  # type: ignore[attr-defined]
        if tags.get(322, 1) * tags.get(323, 1) > max_pixels:
            raise ImageTooLargeError(f"TIFF tiles are over {max_pixels:,} pixels; save it again")
        boxes = [tile.extents or (0, 0, 0, 0) for tile in image.tile]
        if sum((right - left) * (bottom - top) for left, top, right, bottom in boxes) < pixels:
            raise ImageError("truncated TIFF, strips are missing; fetch or save it again")


def _load_png(image: ImageFile.ImageFile, stream: BinaryIO) -> None:
    """Decode a PNG and see that its last pixels were written.

    Pillow takes a data stream that ends early, but tidily, for a picture whose rest is black.
    """
    width, height = image.size
    # The last pixel to be written, without interlacing and with it, is one of these.
    last = {(width - 1, height - 1), (width - 1, max(height - 2, 0)), (max(width - 2, 0), height - 1)}
    image.im = Image.new(image.mode, image.size, 1).im
    unwritten = {at: image.im.getpixel(at) for at in last}
    image.load()
    if any(image.im.getpixel(at) == value for at, value in unwritten.items()):
        with Image.open(stream, formats=("PNG",)) as again:
            again.load()
            if any(image.im.getpixel(at) != again.im.getpixel(at) for at in last):
                raise ImageError("truncated PNG, rows are missing; fetch or save it again")


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        # A picture without its orientation is worth more than no picture.
        return None


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    rgb = Image.new("RGB", image.size, background)
    # In bands, because the steps in between would need the memory of several whole pictures.
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
    top = 1 if image.mode == "F" else 65535
    low, high = values.min(), values.max()
    if not (0 <= low and high <= top):
        raise ImageError(
            f"grey values run from {low} to {high}; {values.dtype} pictures must lie in "
            f"0..{top}. Rescale them first"
        )
    grey = Image.fromarray((values * (255 / top) + 0.5).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray((values != transparent).astype(np.uint8) * 255))
    return grey


def _check_fit(size: int | tuple[int, int] | None, fit: str) -> None:
    if fit not in get_args(Fit):
        raise ValueError(f"fit is {fit!r}; it must be one of {', '.join(get_args(Fit))}")
    if size is None and fit in ("crop", "stretch"):
        raise ValueError(f"size is None; fit={fit!r} needs one. Or use fit='keep' or 'pad'")
    if isinstance(size, tuple) and (fit in ("keep", "pad") or len(size) != 2):
        raise ValueError(f"size is {size}; fit={fit!r} takes one number, the short side" )
    for side in size if isinstance(size, tuple) else (size,):
        if side is not None and (operator.index(side) < PATCH or side % PATCH):
            low = max(PATCH, side // PATCH * PATCH)
            nearest = " or ".join(str(value) for value in sorted({low, low + PATCH}))
            raise ValueError(
                f"size is {side}; it must be a positive multiple of {PATCH}. Nearest: {nearest}"
            )


def _resize(
    image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float]
) -> Image.Image:
    left, top, right, bottom = box
    if size[0] > right - left and size[1] < bottom - top:
        # Pillow resizes across, then down: a picture 1 wide and millions high would first grow.
        image = _bicubic(image, (image.width, size[1]), (0, top, image.width, bottom))
        top, bottom = 0, size[1]
    return _bicubic(image, size, (left, top, right, bottom))


def _bicubic(
    image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float]
) -> Image.Image:
    # The gap matters only when shrinking over 2000 times, where the filter itself would need
    # gigabytes.
    return image.resize(size, Image.Resampling.BICUBIC, box=box, reducing_gap=1024.0)


def _check_float_image(x: Tensor) -> None:
    if x.ndim < 3 or x.shape[-3] != 3:
        raise ValueError(f"tensor has shape {tuple(x.shape)}; it must be (..., 3, H, W)")
    if not x.is_floating_point():
        raise ValueError(f"tensor is {x.dtype}; it must be floating point. normalize makes it so")
