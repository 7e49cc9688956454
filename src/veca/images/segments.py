"""Tiles and strips of a TIFF before they are decoded: which compressions are taken, and what sizes their data claim.

Most decoders write into memory of the size that the TIFF says. Those of images within a tile, such as a JPEG, take the
size from the data instead, which in a hostile file is another: it is read here first.
"""

import struct
from collections.abc import Callable

from veca.images.decode import ImageError
from veca.images.jpeg import read_header

MAX_SEGMENT_PIXELS = 2**26
"""Pixels of one tile or strip, at most: it is decoded whole."""
_MAX_PASSES = 64
_BOUNDED = {1, 5, 8, 32773, 32946, 34925, 50000}
"""None, LZW, deflate, PackBits, deflate, LZMA, zstd."""


def _jpeg_size(data: bytes) -> tuple[int, int]:
    header = read_header(data)
    if header.passes > _MAX_PASSES:
        raise ImageError(f"JPEG in {header.passes} passes; at most {_MAX_PASSES} are decoded")
    return header.width, header.height  # (0, 0) where the frame is in the tables of the file, as tifffile wrote them


def _jpeg2000_size(data: bytes) -> tuple[int, int]:
    start = data.index(b"\xff\x4f\xff\x51")
    right, bottom, left, top = struct.unpack_from(">4I", data, start + 8)
    return right - left, bottom - top


def _png_size(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from(">2I", data, 16)
    return width, height


def _webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<2H", data, 26)
    return width & 0x3FFF, height & 0x3FFF


_SIZES: dict[int, Callable[[bytes], tuple[int, int]]] = {
    7: _jpeg_size,
    **dict.fromkeys((33003, 33004, 33005, 34712), _jpeg2000_size),  # of Aperio's slides, and others
    34933: _png_size,
    **dict.fromkeys((34927, 50001), _webp_size),
}


def is_bounded(compression: int) -> bool:
    """Whether a compression, by its number, knows nothing of images: the TIFF alone says how large they are."""
    return compression in _BOUNDED


def check_compression(compression: int) -> None:
    """Raise ImageError unless the compression of a TIFF, by its number, is one whose memory can be bounded."""
    if compression not in _BOUNDED and compression not in _SIZES:
        kinds = "LZW, deflate, PackBits, LZMA, zstd, JPEG, JPEG 2000, PNG or WebP"
        raise ImageError(f"compression {compression} is not read by regions; write it again with {kinds}, or none")


def check_segment(compression: int, data: bytes) -> None:
    """Raise ImageError if the data of a tile or strip claim a size that would take too much memory."""
    if compression in _BOUNDED:
        return
    try:
        width, height = _SIZES[compression](data)
    except (ValueError, IndexError, struct.error) as error:
        raise ImageError("a tile has no header") from error
    if not 0 <= width * height <= MAX_SEGMENT_PIXELS:
        rule = f"at most {MAX_SEGMENT_PIXELS:,} pixels are decoded at a time"
        raise ImageError(f"a tile claims {width:,} × {height:,} pixels; {rule}")
