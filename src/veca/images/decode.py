"""Decoding files nobody vouches for: Pillow, with the checks it leaves out.

Pillow and the libraries under it fill what is missing with grey or black and say nothing, take minutes or gigabytes
when a small file asks for it, and obey switches any other library may have thrown. `decode` refuses all that, from the
header where it can.
"""

from __future__ import annotations

import io
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from veca.errors import VecaError
from veca.images.formats import unread_suffix

Source = str | os.PathLike[str] | bytes | BinaryIO | Image.Image

_MAX_SIDE = 2**20
# MPO has no opener of its own in Pillow: the JPEG one recognises it.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "GIF", "BMP", "PPM")
# Pillow reads these in Python; more than this many bytes would take seconds.
_SLOW_CODECS = {"ppm_plain": 2**18, "ppm": 2**21, "bmp_rle": 2**22}


class ImageError(VecaError, ValueError):
    """The picture cannot be used; the message names it, the reason and the way out."""


class ImageTooLargeError(ImageError):
    """The picture has, or would get, more pixels or bytes than allowed."""


class _Limit(int):
    """Pillow warns above its limit and raises above twice that; with this it raises at once."""

    def __rmul__(self, other: int) -> int:
        return int(self)


_switches = threading.Lock()
_limits: list[int] = []
_saved: tuple[int | None, bool] = (None, False)


@contextmanager
def strict_pillow(limit: int) -> Iterator[None]:
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


def max_bytes(max_pixels: int) -> int:
    """The largest file that is read for a picture of so many pixels."""
    # The fattest pixels, 16-bit RGBA, take 8 bytes each; the rest is room for metadata.
    return 8 * max_pixels + 2**26


def decode(source: Source, max_pixels: int, at_least: int | None = None) -> Image.Image:
    """The picture in `source`, loaded, in the mode the file has; call it inside `strict_pillow`.

    With `at_least`, a JPEG may come at a half, a quarter or an eighth of its size, its short side no shorter than that.
    `info["extent"]` is its exact size then: the last column and row may be pixels that the picture fills in part.
    """
    if isinstance(source, Image.Image):
        _check_pixels(source, max_pixels)
        source.load()
        return source
    limit = max_bytes(max_pixels)
    with _opened(source, limit) as stream:
        stream.seek(0, os.SEEK_END)
        size = stream.tell()
        if size > limit:
            rule = f"at most {limit:,} are read for {max_pixels:,} pixels"
            raise ImageTooLargeError(f"{size:,} bytes; {rule}. Shrink it or raise max_pixels")
        if not size:
            raise ImageError("empty, 0 bytes; fetch or save it again")
        stream.seek(0)
        passes = 1
        start = stream.read(4)
        stream.seek(0)
        if start[:3] == b"\xff\xd8\xff":
            jpeg, passes = _whole_jpeg(stream.read())
            stream = io.BytesIO(jpeg)
        for magic, check in _CHECKS.items():
            if start.startswith(magic):
                check(stream, size)
                stream.seek(0)
        with Image.open(stream, formats=FORMATS) as image:
            # Many raw files of cameras are TIFF inside, and their first page is a thumbnail.
            if image.format == "TIFF" and unread_suffix(source):
                raise UnidentifiedImageError
            if isinstance(image, TiffImagePlugin.TiffImageFile) and _is_preview(image):
                raise ImageError(
                    "its first page is a small preview, as in raws of cameras; save the picture itself as PNG"
                )
            _check_header(image, size, passes, max_pixels)
            extent: tuple[float, float] = image.size
            # Turned, a picture would begin with the pixels it fills in part; no extent tells that.
            if at_least is not None and image.format in ("JPEG", "MPO") and orientation(image) == 1:
                drafted = image.draft(image.mode, (at_least, at_least))
                extent = drafted[1][2:] if drafted else extent
            if image.format == "PNG":
                _load_png(image, stream)
            else:
                image.load()
            image.info["extent"] = extent  # whatever the file may have under this name
            return image


def orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(0x0112, 1)
    except Exception:
        # Broken EXIF is no reason to do without the picture.
        return 1


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
    view = memoryview(data)  # data may be large: one copy is enough
    if passes == 1 and frame in (0xC0, 0xC1):
        return b"".join((view[: scan_end or end], b"\xff\x00" * 8)), passes
    return bytes(view[: end + 2]), passes


# Pillow goes through these one by one, in Python.
_MOST_PNG_CHUNKS, _MOST_GIF_BLOCKS, _MOST_PPM_HEADER = 2**16, 2**16, 2**16


def _check_png_chunks(stream: BinaryIO, size: int) -> None:
    """Refuse a PNG of very many chunks; those of pixels may be one for each kibibyte."""
    position, pixels, others = 8, 0, 0
    while position < size:
        stream.seek(position)
        length, kind = int.from_bytes(stream.read(4)), stream.read(4)
        if kind == b"IEND":
            return
        position += 12 + length
        pixels, others = (pixels + 1, others) if kind in (b"IDAT", b"fdAT") else (pixels, others + 1)
        if others > _MOST_PNG_CHUNKS or pixels > _MOST_PNG_CHUNKS + size // 1024:
            raise ImageError("PNG in very many chunks; save it again")


def _check_gif_blocks(stream: BinaryIO, size: int) -> None:
    """Refuse a GIF with very many blocks of comments and the like, or stray bytes, before its first frame."""
    flags = stream.read(11)[10:]
    stream.seek(13 + (6 << (flags[0] & 7) if flags and flags[0] & 128 else 0))
    blocks = 0
    while (mark := stream.read(1)) and mark not in (b",", b";"):
        length = stream.read(2)[1:] if mark == b"!" else b""
        blocks += 1
        while length and length[0] and blocks <= _MOST_GIF_BLOCKS:
            stream.seek(length[0], os.SEEK_CUR)
            length = stream.read(1)
            blocks += 1
        if blocks > _MOST_GIF_BLOCKS:
            raise ImageError("GIF with very many blocks before its first frame; save it again")


def _check_ppm_header(stream: BinaryIO, size: int) -> None:
    """Refuse a PPM with very long comments before its sizes."""
    head = stream.read(_MOST_PPM_HEADER)
    words = 3 if head[1:2] in (b"1", b"4") else 4  # a bitmap has no largest value
    if size > len(head) and len(re.sub(rb"#[^\r\n]*", b"", head).split(maxsplit=words)) < words:
        raise ImageError(f"PPM with a header of over {_MOST_PPM_HEADER:,} bytes; save it again")


_CHECKS = {
    b"\x89PNG": _check_png_chunks,
    b"GIF8": _check_gif_blocks,
    **{b"P%c" % kind: _check_ppm_header for kind in b"123456fF"},
}
"""By the first bytes of a file."""


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


def _is_preview(image: TiffImagePlugin.TiffImageFile) -> bool:
    """Whether the page says that it is a small copy of another, or that the file is a digital negative."""
    kind = image.tag_v2.get(254, 0)
    return (isinstance(kind, int) and kind & 1 == 1) or 50706 in image.tag_v2


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
