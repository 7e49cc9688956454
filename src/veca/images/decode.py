"""Bounded decoding of untrusted image files: Pillow, with the checks it lacks.

Pillow and the libraries under it silently fill missing data with grey or black, take minutes or gigabytes on small
hostile files, and obey global switches that other libraries may have set. `decode` refuses such files, from the header
where possible.
"""

import io
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import BinaryIO

from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from veca.errors import VecaError
from veca.images.formats import unsupported_suffix
from veca.images.jpeg import guard_end, read_header

Source = str | os.PathLike[str] | bytes | BinaryIO | Image.Image

# Largest image that is opened, unless the caller allows another size
MAX_PIXELS = 2**26
_MAX_SIDE = 2**20
# MPO has no opener of its own in Pillow: the JPEG one recognises it.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "TIFF", "GIF", "BMP", "PPM")
# Codecs that Pillow runs in Python, with the largest file in bytes: more would take seconds.
_SLOW_CODECS = {"ppm_plain": 2**18, "ppm": 2**21, "bmp_rle": 2**22}


class ImageError(VecaError, ValueError):
    """The image cannot be used; the message names it, the reason and a remedy."""


class ImageTooLargeError(ImageError):
    """The image has, or would get, more pixels or bytes than allowed."""


class _HardLimit(int):
    """A pixel limit above which Pillow raises at once; by itself it warns, and raises above twice the limit."""

    def __rmul__(self, other: int) -> int:
        return int(self)


_pillow_lock = threading.Lock()
# Pixel limits of all threads that are decoding now
_limits: list[int] = []
# Pillow's global settings as they were before the first of these threads
_saved: tuple[int | None, bool] = (None, False)


@contextmanager
def _strict_pillow(limit: int) -> Iterator[None]:
    """Set Pillow's global switches to strict while any thread is inside the block.

    Another library may have set Pillow to accept truncated files or images of any size.
    """
    global _saved
    with _pillow_lock:
        if not _limits:
            _saved = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
        _limits.append(limit)
        Image.MAX_IMAGE_PIXELS = _HardLimit(max(_limits))
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        with _pillow_lock:
            _limits.remove(limit)
            if not _limits:
                Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = _saved


@contextmanager
def image_errors(source: Source, max_pixels: int) -> Iterator[None]:
    """Run the block with strict Pillow settings; any exception becomes an `ImageError` with name, reason and remedy."""
    name = _source_name(source)
    try:
        with _strict_pillow(4 * max_pixels):
            yield
    except ImageError as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
    except Image.DecompressionBombError as error:
        rule = f"more than {4 * max_pixels:,} pixels; at most {max_pixels:,} are opened"
        raise ImageTooLargeError(f"{name}: {rule}. Shrink it or raise max_pixels") from error
    except UnidentifiedImageError as error:
        suffix = unsupported_suffix(source)
        rule = f"{suffix} is not read, only" if suffix else "not one of"
        raise ImageError(f"{name}: {rule} {', '.join(FORMATS)}; save it as PNG") from error
    except Exception as error:  # Pillow raises almost anything on damaged files
        raise ImageError(f"{name}: damaged or truncated ({type(error).__name__}: {error}); save it again") from error


def _source_name(source: object) -> str:
    if isinstance(source, bytes | bytearray | memoryview):
        return "<bytes>"
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
    elif isinstance(source, Image.Image):
        name = getattr(source, "filename", "") or "<image>"
    elif hasattr(source, "read"):
        name = getattr(source, "name", "<stream>")
    else:
        raise TypeError(f"source is {type(source).__name__}; pass a path, bytes, a binary stream or a Pillow image")
    return name if isinstance(name, str) and name and name.isprintable() else repr(name)


def max_bytes(max_pixels: int) -> int:
    """Return the size of the largest file that is read for an image of `max_pixels`."""
    # The largest pixels, 16-bit RGBA, take 8 bytes each; the rest is room for metadata.
    return 8 * max_pixels + 2**26


def decode(source: Source, max_pixels: int, at_least: int | None = None) -> Image.Image:
    """Decode the image in `source`, in the mode of the file; call it inside `image_errors`.

    With `at_least`, a JPEG may be decoded at a half, a quarter or an eighth of its size, its short side no shorter than
    that. `info["extent"]` is then its exact size: the image may cover its last column and row only in part. The size in
    the file is `info["full_size"]`.
    """
    if isinstance(source, Image.Image):
        _check_pixels(source, max_pixels)
        source.load()
        return source
    limit = max_bytes(max_pixels)
    with _open_stream(source, limit) as stream:
        stream.seek(0, os.SEEK_END)
        size = stream.tell()
        if size > limit:
            rule = f"at most {limit:,} are read for {max_pixels:,} pixels"
            raise ImageTooLargeError(f"{size:,} bytes; {rule}. Shrink it or raise max_pixels")
        if not size:
            raise ImageError("empty, 0 bytes; fetch or save it again")
        stream.seek(0)
        start, passes = stream.read(4), 1
        stream.seek(0)
        if start[:3] == b"\xff\xd8\xff":
            data = stream.read()
            header = read_header(data)
            if header.problem:
                raise ImageError(header.problem)
            passes, stream = header.passes, io.BytesIO(guard_end(data, header))
        for magic, check in _CHECKS.items():
            if start.startswith(magic):
                check(stream, size)
                stream.seek(0)
        with Image.open(stream, formats=FORMATS) as image:
            # Many camera raw files are TIFF inside, and their first page is a thumbnail.
            if image.format == "TIFF" and unsupported_suffix(source):
                raise UnidentifiedImageError
            _check_header(image, size, passes, max_pixels)
            full_size = image.size
            extent: tuple[float, float] = full_size
            # A rotated image would begin with its partly covered pixels, which an extent cannot describe.
            if at_least is not None and image.format in ("JPEG", "MPO") and orientation(image) == 1:
                drafted = image.draft(image.mode, (at_least, at_least))
                extent = drafted[1][2:] if drafted else extent
            if image.format == "PNG":
                _load_png(image, stream)
            else:
                image.load()
            image.info |= {"extent": extent, "full_size": full_size}  # the file may have metadata of these names
            return image


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 (upright) where there is none."""
    try:
        return image.getexif().get(0x0112, 1)
    except Exception:  # broken EXIF is no reason to refuse the image
        return 1


def _open_stream(source: str | os.PathLike[str] | bytes | BinaryIO, limit: int) -> AbstractContextManager[BinaryIO]:
    if isinstance(source, str | os.PathLike):
        return open(source, "rb", opener=open_regular)
    if isinstance(source, bytes | bytearray | memoryview):
        return io.BytesIO(source)
    return nullcontext(source if source.seekable() else io.BytesIO(source.read(limit + 1)))


def open_regular(path: str, flags: int) -> int:
    """Opener for `open` that refuses whatever is no regular file, and waits for nothing."""
    try:
        # Without this flag, opening a pipe would wait for its writer, forever if there is none.
        handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ImageError(f"{(error.strerror or str(error)).lower()}; check the path") from error
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise ImageError("a directory, pipe or device; pass a regular file, bytes or a stream")


# Largest number of PNG chunks or GIF blocks, and of bytes in a PPM header: Pillow parses them one by one, in Python.
_MAX_BLOCKS = 2**16


def _check_png_chunks(stream: BinaryIO, size: int) -> None:
    """Refuse a PNG of very many chunks; of pixel data one for each kibibyte is allowed."""
    position, pixels, others = 8, 0, 0
    while position < size:
        stream.seek(position)
        length, kind = int.from_bytes(stream.read(4)), stream.read(4)
        if kind == b"IEND":
            return
        position += 12 + length
        pixels, others = (pixels + 1, others) if kind in (b"IDAT", b"fdAT") else (pixels, others + 1)
        if others > _MAX_BLOCKS or pixels > _MAX_BLOCKS + size // 1024:
            raise ImageError("PNG in very many chunks; save it again")


def _check_gif_blocks(stream: BinaryIO, size: int) -> None:
    """Refuse a GIF with very many blocks of comments and the like, or stray bytes, before its first frame."""
    flags = stream.read(11)[10:]
    stream.seek(13 + (6 << (flags[0] & 7) if flags and flags[0] & 128 else 0))
    blocks = 0
    while (mark := stream.read(1)) and mark not in (b",", b";"):
        length = stream.read(2)[1:] if mark == b"!" else b""
        blocks += 1
        while length and length[0] and blocks <= _MAX_BLOCKS:
            stream.seek(length[0], os.SEEK_CUR)
            length = stream.read(1)
            blocks += 1
        if blocks > _MAX_BLOCKS:
            raise ImageError("GIF with very many blocks before its first frame; save it again")


def _check_ppm_header(stream: BinaryIO, size: int) -> None:
    """Refuse a PPM with very long comments before its sizes."""
    head = stream.read(_MAX_BLOCKS)
    words = 3 if head[1:2] in (b"1", b"4") else 4  # a bitmap has no largest value
    if size > len(head) and len(re.sub(rb"#[^\r\n]*", b"", head).split(maxsplit=words)) < words:
        raise ImageError(f"PPM with a header of over {_MAX_BLOCKS:,} bytes; save it again")


# Checks by the first bytes of a file
_CHECKS = {b"P%c" % kind: _check_ppm_header for kind in b"123456fF"}
_CHECKS |= {b"\x89PNG": _check_png_chunks, b"GIF8": _check_gif_blocks}


def _check_pixels(image: Image.Image, max_pixels: int) -> None:
    # Pillow's WebP decoder holds four copies of the image at once.
    allowed = max_pixels * 7 // 8 if image.format == "WEBP" else max_pixels
    width, height = image.size
    if width * height > allowed:
        by_tiles = "; veca.stream reads a TIFF of any size by tiles" if image.format == "TIFF" else ""
        rule = f"at most {allowed:,} are opened. Shrink it or raise max_pixels{by_tiles}"
        raise ImageTooLargeError(f"{height}×{width} = {width * height:,} pixels; {rule}")
    # Pillow allocates a pointer and more for every row: millions of rows cost gigabytes, however short.
    if max(width, height) > _MAX_SIDE:
        raise ImageTooLargeError(f"{height}×{width}; a side may have {_MAX_SIDE:,}. Cut it up")


def _check_header(image: ImageFile.ImageFile, size: int, passes: int, max_pixels: int) -> None:
    """Refuse, before decoding, an image that would take too much memory or time or is known to be truncated."""
    _check_pixels(image, max_pixels)
    pixels = image.width * image.height
    if passes > min(64, 24 * max_pixels // pixels):
        raise ImageError(f"JPEG in {passes} passes over {pixels:,} pixels; save it again")
    codec = image.tile[0].codec_name if image.tile else ""
    if size > (limit := _SLOW_CODECS.get(codec, size)):
        raise ImageError(f"{size:,} bytes of {codec} data; at most {limit:,} are read. Use PNG")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tags = image.tag_v2
        # Tag 254 marks a page as a reduced copy of another, 50706 the file as a digital negative (DNG).
        if (isinstance(tags.get(254), int) and tags[254] & 1) or 50706 in tags:
            raise ImageError("its first page is a small preview, as in raws of cameras; save the picture as PNG")
        if tags.get(322, 1) * tags.get(323, 1) > max_pixels:  # width and height of a tile
            raise ImageTooLargeError(f"TIFF in tiles of over {max_pixels:,} pixels; save it again")
        boxes = [tile.extents or (0, 0, 0, 0) for tile in image.tile]
        if sum((right - left) * (bottom - top) for left, top, right, bottom in boxes) < pixels:
            raise ImageError("truncated TIFF, strips are missing; save it again")


def _load_png(image: ImageFile.ImageFile, stream: BinaryIO) -> None:
    """Decode a PNG; check its checksums and that its last pixels were written.

    Pillow verifies no checksum of pixel data by itself, and accepts data that end between two
    rows, leaving the rest of the image black.
    """
    with Image.open(stream, formats=("PNG",)) as undecoded:
        undecoded.verify()
    right, bottom = image.width - 1, image.height - 1
    # Interlaced or not, the last pixel to be written is one of these. They are filled with a known value before
    # decoding; where they still have it, a second decoding over zeros tells whether the file really contains it.
    last = [(right, bottom), (right, max(bottom - 1, 0)), (max(right - 1, 0), bottom)]
    image.im = Image.new(image.mode, image.size, 1).im
    blank = image.im.getpixel((0, 0))
    image.load()
    if any(image.im.getpixel(pixel) == blank for pixel in last):
        with Image.open(stream, formats=("PNG",)) as again:
            again.load()
            if any(image.im.getpixel(pixel) != again.im.getpixel(pixel) for pixel in last):
                raise ImageError("truncated PNG, rows are missing; save it again")
