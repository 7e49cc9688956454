"""Headers of JPEG files: one pass over the markers, for the checks before decoding and the choice of a decoder."""

import re
import struct
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

# Any marker except those without a length: stuffed bytes, fill bytes, restarts.
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")
_NOT_STUFFED = re.compile(rb"\xff[^\x00]")
_BASELINE, _DHT, _EOI, _SOS, _DQT, _DRI = 0xC0, 0xC4, 0xD9, 0xDA, 0xDB, 0xDD
_APP0, _APP1, _APP14, _COM = 0xE0, 0xE1, 0xEE, 0xFE
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}

_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')

# Largest side and sampling factors of luma (across, down) that are left to the decoder of a GPU
_GPU_SIDE = 16384
_GPU_SAMPLING = {(1, 1), (2, 1), (1, 2), (2, 2)}
_GPU_MARKERS = {_BASELINE, _DHT, _SOS, _DQT, _DRI, *range(_APP0, _APP0 + 16), _COM}
_LOW_NIBBLE = bytes(value & 15 for value in range(256))


class Segment(NamedTuple):
    """A marker, and where its parameters are in the file."""

    marker: int
    start: int
    stop: int


class Component(NamedTuple):
    """A channel: its number, sampling factors and quantisation table."""

    id: int
    across: int
    down: int
    table: int


class HuffmanCode(NamedTuple):
    """What is needed of a Huffman table: the least bits of a code and its value, and the code of symbol 0."""

    least_bits: int
    end: int
    end_bits: int


class JpegHeader(NamedTuple):
    """What the markers of a JPEG file say."""

    # Why the file cannot be decoded; empty where no reason is seen
    problem: str = ""
    # Marker of the frame, which tells the process: 0xC0 is baseline, 0xC2 progressive
    frame: int = 0
    bits: int = 0
    width: int = 0
    height: int = 0
    components: tuple[Component, ...] = ()
    # EXIF or XMP orientation, from 1 to 8; 1 (upright) where there is none or it is damaged
    orientation: int = 1
    # Whether there is a JFIF marker: colours are YCbCr
    jfif: bool = False
    # Colour transform in the Adobe marker: 0 none, 1 YCbCr, 2 YCCK
    adobe: int | None = None
    # Units of blocks (MCUs) between restart markers, 0 without them
    restart_interval: int = 0
    passes: int = 0
    # Coded data of the first pass
    scan_start: int = 0
    scan_stop: int = 0
    # Where the end marker is, or the length of the file
    end: int = 0
    ended: bool = False
    # Bytes that belong to no segment
    stray: int = 0
    segments: tuple[Segment, ...] = ()


def read_header(data: bytes) -> JpegHeader:
    """Read the header of a JPEG file. `data` may be anything: what is wrong with it is in `problem`."""
    try:
        return _read_header(data)
    except (IndexError, struct.error):
        return JpegHeader("damaged JPEG, a segment is too short; save it again")


def _read_header(data: bytes) -> JpegHeader:
    position, stray, sent, passes, scan_start, scan_stop = 2, 0, 0, 0, 0, 0
    segments, frame, size, components = list[Segment](), 0, (0, 0, 0, 1), tuple[Component, ...]()
    while match := _MARKER.search(data, position):
        marker, start = data[match.start() + 1], match.end()
        if passes and not scan_stop:
            scan_stop = match.start()
        if marker == _EOI:
            break
        stray += 0 if passes else match.start() - position
        if len(segments) == 1024 or stray > 2**16:
            return JpegHeader("JPEG full of stray segments or bytes; save it again")
        position = start + int.from_bytes(data[start : start + 2])
        segments.append(Segment(marker, start + 2, position))
        body = data[start + 2 : position]
        if marker in _FRAMES:
            frame, size = marker, struct.unpack_from(">BHHB", body)
            triples = struct.iter_unpack("BBB", body[6 : 6 + min(len(body) // 3 - 2, size[3]) * 3])
            components = tuple(Component(id, factors >> 4, factors & 15, table) for id, factors, table in triples)
        elif marker == _SOS:
            passes += 1
            scan_start = scan_start or position
            if frame not in _PROGRESSIVE:
                sent += 64 * body[0]
            elif body[-1] & 15 == 0:
                sent += (body[-2] - body[-3] + 1) * body[0]
    bits, height, width, channels = size
    # All passes together must send every coefficient of every component.
    problem = "truncated JPEG, it stops before its last pass; save it again" if sent < 64 * channels else ""
    end = match.start() if match else len(data)
    orientation, jfif, adobe, interval = _read_metadata(data, segments)
    return JpegHeader(
        *(problem, frame, bits, width, height, components, orientation, jfif, adobe, interval),
        *(passes, scan_start, scan_stop or end, end, match is not None, stray, tuple(segments)),
    )


def _read_metadata(data: bytes, segments: Iterable[Segment]) -> tuple[int, bool, int | None, int]:
    """Return orientation, whether there is a JFIF marker, Adobe's transform, and the restart interval."""
    exif, xmp, jfif, adobe, interval = list[bytes](), b"", False, None, 0
    for marker, start, stop in segments:
        if marker == _SOS or stop > len(data):
            break
        if marker == _DRI:
            interval = int.from_bytes(data[start : min(stop, start + 2)])
        elif marker == _APP0 and stop - start >= 14:
            jfif = jfif or data.startswith(b"JFIF\0", start)
        elif marker == _APP14 and stop - start >= 12 and data.startswith(b"Adobe", start):
            adobe = data[start + 11]
        elif marker == _APP1 and data.startswith(b"Exif\0\0", start, stop):
            exif.append(data[start + 6 : stop])  # a second segment continues the first
        elif marker == _APP1 and data.startswith(_XMP, start, stop):
            xmp = data[start + len(_XMP) : stop]
    value = _exif_orientation(b"".join(exif))
    if value is None and (match := _XMP_ORIENTATION.search(xmp)):
        value = int(match[1])
    return value if value and value < 9 else 1, jfif, adobe, interval


def _exif_orientation(exif: bytes) -> int | None:
    """Return the orientation in a TIFF directory, None where there is none that can be read."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None or sorted(exif[2:4]) != [0, 42] or len(exif) < 8:
        return None
    (offset,) = struct.unpack_from(f"{order}I", exif, 4)
    (count,) = struct.unpack_from(f"{order}H", exif, offset) if offset + 2 <= len(exif) else (0,)
    entries = exif[offset + 2 : offset + 2 + 12 * count]
    for tag, kind, values, field in struct.iter_unpack(f"{order}HHI4s", entries[: len(entries) // 12 * 12]):
        if tag == 0x0112 and values == 1 and kind in (3, 4):  # 16 or 32 bits
            return struct.unpack_from(order + "HI"[kind - 3], field)[0]
    return None


def guard_end(data: bytes, header: JpegHeader) -> bytes:
    """Return the bytes of a JPEG so that libjpeg fails where data are missing, instead of filling in grey.

    The data of a single Huffman pass are decoded with eight bytes of ones in place of the end marker: a complete image
    never reads them, while one that lacks more than its last block does and fails, because ones are no valid code and
    even an empty block takes 34 bits of them.
    """
    view = memoryview(data)  # avoids a second copy of large data
    if header.passes == 1 and header.frame in (0xC0, 0xC1):
        return b"".join((view[: header.scan_stop], b"\xff\x00" * 8))
    return bytes(view[: header.end + 2])


def gpu_decodable(data: bytes, header: JpegHeader, max_pixels: int) -> bool:
    """Whether to give `data[: header.end + 2]` to a GPU's decoder; with any doubt it is left to the CPU's.

    Only what all decoders read alike, and nothing that is known to be incomplete: one baseline pass of 8-bit grey or
    YCbCr, with its tables, restart markers and end marker, and data enough for its blocks.
    """
    markers = bytes(segment[0] for segment in header.segments)
    try:
        return (
            not header.problem
            and header.passes == 1
            and markers[-1] == _SOS
            and markers.count(_BASELINE) == 1
            and _GPU_MARKERS.issuperset(markers)
            and header.ended
            and not header.stray
            and 0 < header.width <= _GPU_SIDE
            and 0 < header.height <= _GPU_SIDE
            and header.width * header.height <= max_pixels
            and _is_grey_or_ycbcr(header)
            and _is_complete(data, header)
        )
    except (IndexError, KeyError, ValueError):  # tables that are missing, too short, or not allowed
        return False


def _is_grey_or_ycbcr(header: JpegHeader) -> bool:
    """Whether the components are 8-bit grey, or YCbCr for certain and sampled in a common way."""
    if header.bits != 8 or len(header.components) not in (1, 3):
        return False
    first, *others = header.components
    if not others:
        return (first.across, first.down) == (1, 1)
    if (first.across, first.down) not in _GPU_SAMPLING or any((c.across, c.down) != (1, 1) for c in others):
        return False
    ids = [component.id for component in header.components]
    if header.adobe is None:
        return ids == [1, 2, 3] or (header.jfif and bytes(ids) != b"RGB")
    return header.adobe == 1


def _is_complete(data: bytes, header: JpegHeader) -> bool:
    """Whether all tables are there, and as many restart markers and bits as the image needs at the very least."""
    codes, quantisation = _read_tables(data, header)
    *_, (_, start, stop) = header.segments
    scan, components = data[start:stop], header.components
    if len(scan) != 4 + 2 * len(components) or scan[0] != len(components) or scan[-3:] != b"\0\x3f\0":
        return False
    bits, ac = 0, None
    for component, id, tables in zip(components, scan[1:-3:2], scan[2:-3:2], strict=True):
        if component.id != id or component.table not in quantisation:
            return False
        ac = codes[16 | tables & 15]
        bits += component.across * component.down * (codes[tables >> 4].least_bits + ac.least_bits)
    luma = components[0]
    units = -(-header.width // (8 * luma.across)) * -(-header.height // (8 * luma.down))
    return _coded_bits(data, header, units) >= units * bits and ac is not None and _ends_with_block(data, header, ac)


def _ends_with_block(data: bytes, header: JpegHeader, code: HuffmanCode) -> bool:
    """Whether the last bits are the code of an end of block and padding of ones: what was cut off often ends otherwise.

    A block that uses its last coefficient ends without that code; there are few of those.
    """
    tail = data[max(header.scan_start, header.scan_stop - 8) : header.scan_stop].replace(b"\xff\0", b"\xff")
    value = int.from_bytes(tail)
    ends = (value >> ones for ones in range(8) if value & ((1 << ones) - 1) == (1 << ones) - 1)
    return code.end_bits > 0 and any(end & ((1 << code.end_bits) - 1) == code.end for end in ends)


def _coded_bits(data: bytes, header: JpegHeader, units: int) -> int:
    """Count the bits of the scan without stuffed bytes and restart markers; -1 where those markers are wrong."""
    start, stop = header.scan_start, header.scan_stop
    restarts = -(-units // header.restart_interval) - 1 if header.restart_interval else 0
    found = islice(_NOT_STUFFED.finditer(data, start, stop), restarts + 1)
    if [data[match.end() - 1] for match in found] != [0xD0 + number % 8 for number in range(restarts)]:
        return -1
    escapes = np.count_nonzero(np.frombuffer(data, np.uint8, stop - start, start) == 0xFF)
    return 8 * (stop - start - int(escapes) - restarts)


def _read_tables(data: bytes, header: JpegHeader) -> tuple[dict[int, HuffmanCode], set[int]]:
    """Return the Huffman codes by number, plus 16 for AC coefficients, and which quantisation tables there are.

    Raises `ValueError` where baseline does not allow a table.
    """
    codes, quantisation = dict[int, HuffmanCode](), set[int]()
    for marker, start, stop in header.segments:
        if stop > len(data) or start > stop:
            raise ValueError("a segment ends outside the file")
        body = data[start:stop] if marker in (_DHT, _DQT) else b""
        while body and marker == _DQT:
            if body[0] > 3 or len(body) < 65 or body.find(0, 1, 65) > 0:
                raise ValueError("a quantisation table is no baseline table")
            quantisation.add(body[0])
            body = body[65:]
        while body and marker == _DHT:
            length = 17 + sum(body[1:17])
            codes[body[0]] = _huffman_code(body[:length], length)
            body = body[length:]
    return codes, quantisation


@lru_cache(maxsize=64)  # most files have the tables of the standard
def _huffman_code(table: bytes, length: int) -> HuffmanCode:
    """Return what is needed of a Huffman table; raise `ValueError` where baseline does not allow it."""
    counts, symbols = table[1:17], table[17:].translate(_LOW_NIBBLE)
    largest = max(symbols) + 1 if table[0] & 16 else max(table[17:])  # of AC and DC, in bits
    full = sum(count << (15 - bits) for bits, count in enumerate(counts)) > 0xFFFF
    if len(table) != length or table[0] not in (0, 1, 16, 17) or full or largest > 11:
        raise ValueError("a Huffman table is no baseline table")
    least, first, code, end, end_bits = 32, 0, 0, 0, 0
    place = table.find(0, 17) - 17
    for bits, count in enumerate(counts, start=1):
        least = min([least, *(bits + size for size in symbols[first : first + count])])
        if first <= place < first + count:
            end, end_bits = code + place - first, bits
        first, code = first + count, (code + count) << 1
    return HuffmanCode(least, end, end_bits)
