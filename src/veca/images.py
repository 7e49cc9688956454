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

import io
import operator
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Literal, get_args

import numpy as np
import torch
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

Fit = Literal["crop", "stretch", "keep", "pad"]
Source = str | os.PathLike[str] | bytes | BinaryIO | Image.Image

MAX_PIXELS = 2**26
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
PATCH = 16
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".avif", ".avifs"}
    | {".tif", ".tiff", ".gif", ".bmp", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm"}
)

_MAX_SIDE = 2**20
# MPO has no opener of its own in Pillow: the JPEG one recognises it.
_FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "GIF", "BMP", "PPM")
# Pillow reads these in Python; more than this many bytes would take seconds.
_SLOW_CODECS = {"ppm_plain": 2**18, "ppm": 2**21, "bmp_rle": 2**22}
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
) -> Image.Image:
    """Open a picture as fully decoded, upright RGB, or raise `ImageError`.

    Takes JPEG, MPO, PNG, WebP, AVIF, TIFF, GIF, BMP and PPM from a path, bytes, a binary stream
    (read from its start, left open) or a Pillow image. Of animations and multi-page files the
    first frame is taken. EXIF orientation is applied, broken EXIF ignored. Transparent pictures
    are laid over `background`. 16-bit grey becomes 8-bit; floating-point grey must lie in [0, 1].

    >>> open_image(Image.new("LA", (40, 30), (0, 0)), background=(9, 8, 7)).getpixel((0, 0))
    (9, 8, 7)
    """
    if len(background) != 3 or not all(0 <= value <= 255 for value in background):
        raise ValueError(f"background is {background}; it must be three numbers from 0 to 255")
    name = _name(source)
    try:
        with _strict_pillow(4 * max_pixels):
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
        rule = f"more than {4 * max_pixels:,} pixels; at most {max_pixels:,} are opened"
        raise ImageTooLargeError(f"{name}: {rule}. Shrink it or raise max_pixels") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: not one of {', '.join(_FORMATS)}; save it as PNG") from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise ImageError(f"{name}: damaged or truncated ({cause}); save it again") from error
    # What the file said about itself, such as its orientation, no longer holds.
    rgb.info = {}
    return rgb


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
    image = _resize(image, (columns, rows), (left, top, width - left, height - top))
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
    mean, std = (torch.tensor(value, device=x.device).view(3, 1, 1) for value in (MEAN, STD))
    unit = x.float() if x.is_floating_point() else x.float() / 255
    return (unit - mean) / std


def nearest_sizes(height: float, width: float, patch: int = PATCH) -> tuple[int, int]:
    """The multiples of `patch` nearest to a size; ties go up, and nothing becomes 0.

    >>> nearest_sizes(250, 333)
    (256, 336)
    """
    rows, columns = (max(1, int(side / patch + 0.5)) * patch for side in (height, width))
    return rows, columns


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


class _Limit(int):
    """Pillow warns above its limit and raises above twice that; with this it raises at once."""

    def __rmul__(self, other: int) -> int:
        return int(self)


_switches = threading.Lock()
_limits: list[int] = []
_saved: tuple[int | None, bool] = (None, False)


@contextmanager
def _strict_pillow(limit: int) -> Iterator[None]:
    """Hold Pillow's global switches where we need them while any thread opens a picture.

    Another library may have told Pillow to accept truncated files or pictures of any size.
    """
    global _saved
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
    # The fattest pixels, 16-bit RGBA, take 8 bytes each; the rest is room for metadata.
    max_bytes = 8 * max_pixels + 2**26
    with _opened(source, max_bytes) as stream:
        stream.seek(0, os.SEEK_END)
        size = stream.tell()
        if size > max_bytes:
            rule = f"at most {max_bytes:,} are read for {max_pixels:,} pixels"
            raise ImageTooLargeError(f"{size:,} bytes; {rule}. Shrink it or raise max_pixels")
        stream.seek(0)
        passes = 1
        if stream.read(3) == b"\xff\xd8\xff":
            stream.seek(0)
            jpeg, passes = _whole_jpeg(stream.read())
            stream = io.BytesIO(jpeg)
        with Image.open(stream, formats=_FORMATS) as image:
            _check_header(image, size, passes, max_pixels)
            if image.format == "PNG":
                _load_png(image, stream)
            else:
                image.load()
            return image


@contextmanager
def _opened(source: str | os.PathLike[str] | bytes | BinaryIO, limit: int) -> Iterator[BinaryIO]:
    if isinstance(source, str | os.PathLike):
        with open(source, "rb", opener=_open_regular) as stream:
            yield stream
    elif isinstance(source, bytes | bytearray | memoryview):
        yield io.BytesIO(source)
    else:
        yield source if source.seekable() else io.BytesIO(source.read(limit + 1))


def _open_regular(path: str, flags: int) -> int:
    try:
        # Without this flag, opening a pipe waits for its writer, for ever if there is none.
        handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ImageError(f"{reason}; check the path") from error
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise ImageError("a directory, pipe or device; pass a regular file, bytes or a stream")


# Any marker but those without a length: stuffed bytes, fill bytes, restarts.
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")
_SOS, _EOI = 0xDA, 0xD9
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}


def _whole_jpeg(data: bytes) -> tuple[bytes, int]:
    """The bytes of a JPEG to decode and its number of passes; refuses one that stops early.

    libjpeg fills what is missing with grey and tells nobody. Two things show it. All passes
    together must send every coefficient of every component. And a picture in one Huffman pass is
    decoded without its end marker but with eight bytes of ones behind it: a whole picture is
    finished without looking at them, while one that lacks more than its last block asks for more
    and fails, because ones are no valid code and even an empty block takes 34 bits of them.
    """
    position, segments, stray = 2, 0, 0
    frame, components, passes, sent, scan_end = 0, 1, 0, 0, 0
    while match := _MARKER.search(data, position):
        marker, start = data[match.start() + 1], match.end()
        if passes and not scan_end:
            scan_end = match.start()
        if marker == _EOI:
            break
        segments += 1
        stray += 0 if passes else match.start() - position
        if segments > 1024 or stray > 2**16:
            raise ImageError("JPEG full of stray segments or bytes; save it again")
        position = start + int.from_bytes(data[start : start + 2])
        body = data[start + 2 : position]
        if marker in _FRAMES:
            frame, components = marker, body[5]
        elif marker == _SOS:
            passes += 1
            if frame not in _PROGRESSIVE:
                sent += 64 * body[0]
            elif body[-1] & 15 == 0:
                sent += (body[-2] - body[-3] + 1) * body[0]
    if sent < 64 * components:
        raise ImageError("truncated JPEG, it stops before its last pass; save it again")
    end = match.start() if match else len(data)
    if passes == 1 and frame in (0xC0, 0xC1):
        return data[: scan_end or end] + b"\xff\x00" * 8, passes
    return data[: end + 2], passes


def _check_pixels(image: Image.Image, max_pixels: int) -> None:
    # Pillow's WebP decoder holds four copies of the picture at once.
    allowed = max_pixels * 7 // 8 if image.format == "WEBP" else max_pixels
    width, height = image.size
    if width * height > allowed:
        rule = f"at most {allowed:,} are opened. Shrink it or raise max_pixels"
        raise ImageTooLargeError(f"{height}×{width} = {width * height:,} pixels; {rule}")
    # Pillow keeps a record for every row: millions of rows cost gigabytes, however short.
    if max(width, height) > _MAX_SIDE:
        raise ImageTooLargeError(f"{height}×{width}; a side may have {_MAX_SIDE:,}. Cut it up")


def _check_header(image: ImageFile.ImageFile, size: int, passes: int, max_pixels: int) -> None:
    """Refuse, before decoding, what would take too much memory or time or is known to be cut."""
    _check_pixels(image, max_pixels)
    pixels = image.width * image.height
    if passes > min(64, 24 * max_pixels // pixels):
        raise ImageError(f"JPEG in {passes} passes over {pixels:,} pixels; save it again")
    codec = image.tile[0].codec_name if image.tile else ""
    if size > (most := _SLOW_CODECS.get(codec, size)):
        raise ImageError(f"{size:,} bytes of {codec} data; at most {most:,} are read. Use PNG")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tile_width, tile_height = image.tag_v2.get(322, 1), image.tag_v2.get(323, 1)
        if tile_width * tile_height > max_pixels:
            raise ImageTooLargeError(f"TIFF in tiles of over {max_pixels:,} pixels; save it again")
        boxes = [tile.extents or (0, 0, 0, 0) for tile in image.tile]
        if sum((right - left) * (bottom - top) for left, top, right, bottom in boxes) < pixels:
            raise ImageError("truncated TIFF, strips are missing; save it again")


def _load_png(image: ImageFile.ImageFile, stream: BinaryIO) -> None:
    """Decode a PNG, see that its checksums are right and that its last pixels were written.

    Pillow looks at no checksum of the pixels by itself, and takes data that end tidily between
    two rows for a picture whose rest is black.
    """
    with Image.open(stream, formats=("PNG",)) as unread:
        unread.verify()
    right, bottom = image.width - 1, image.height - 1
    # Interlaced or not, the last pixel to be written is one of these.
    last = [(right, bottom), (right, max(bottom - 1, 0)), (max(right - 1, 0), bottom)]
    image.im = Image.new(image.mode, image.size, 1).im
    blank = image.im.getpixel((0, 0))
    image.load()
    if any(image.im.getpixel(at) == blank for at in last):
        with Image.open(stream, formats=("PNG",)) as again:
            again.load()
            if any(image.im.getpixel(at) != again.im.getpixel(at) for at in last):
                raise ImageError("truncated PNG, rows are missing; save it again")


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return _TURNS.get(image.getexif().get(0x0112, 1))
    except Exception:
        # Broken EXIF is no reason to do without the picture.
        return None


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


def _resize(
    image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float]
) -> Image.Image:
    bicubic = Image.Resampling.BICUBIC
    left, top, right, bottom = box
    # Pillow resizes across, then down: a picture 1 wide and millions high would grow first.
    if size[0] > right - left and size[1] < bottom - top:
        image = image.resize((image.width, size[1]), bicubic, (0, top, image.width, bottom))
        top, bottom = 0, size[1]
    return image.resize(size, bicubic, (left, top, right, bottom))


def _check_fit(size: int | tuple[int, int] | None, fit: str) -> None:
    if fit not in get_args(Fit):
        raise ValueError(f"fit is {fit!r}; it must be one of {', '.join(get_args(Fit))}")
    if size is None and fit in ("crop", "stretch"):
        raise ValueError(f"size is None; fit={fit!r} needs one. Or use fit='keep' or 'pad'")
    if isinstance(size, tuple) and fit in ("keep", "pad"):
        raise ValueError(f"size is {size}; fit={fit!r} takes one number, the short side")
    for side in size if isinstance(size, tuple) else (size,):
        if side is not None and (operator.index(side) < PATCH or side % PATCH):
            low = max(side // PATCH, 1) * PATCH
            nearest = f"{low} or {low + PATCH}" if side > PATCH else str(PATCH)
            rule = f"it must be a positive multiple of {PATCH}"
            raise ValueError(f"size is {side}; {rule}. Nearest: {nearest}")


def _check_rgb(image: Image.Image) -> None:
    if image.mode != "RGB":
        raise ValueError(f"image has mode {image.mode}; it must be RGB. open_image converts it")


def _check_tensor(x: Tensor, dtype_fits: bool, dtypes: str) -> None:
    if x.ndim < 3 or x.shape[-3] != 3:
        raise ValueError(f"tensor has shape {tuple(x.shape)}; it must be (..., 3, H, W)")
    if not dtype_fits:
        raise ValueError(f"tensor is {x.dtype}; it must be {dtypes}")
