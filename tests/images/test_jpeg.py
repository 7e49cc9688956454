from __future__ import annotations

import io
import random
import struct
import time

import numpy as np
import pytest
from fuzz_images import after_soi, app, encode, originals, photo
from fuzzing import damage
from PIL import Image

from veca.images import MAX_PIXELS
from veca.images.decode import orientation
from veca.images.jpeg import JpegHeader, gpu_decodable, read_header

PLAIN = {
    "420": {"subsampling": 2},
    "422": {"subsampling": 1},
    "444": {"subsampling": 0},
    "optimized": {"optimize": True},
    "restarts": {"restart_marker_blocks": 3},
    "restart rows": {"restart_marker_rows": 1},
    "coarse": {"quality": 5},
}


@pytest.fixture
def image() -> Image.Image:
    return photo(np.random.default_rng(0), 157, 121)


@pytest.fixture
def jpeg(image: Image.Image) -> bytes:
    return encode(image, "JPEG")


def decodable(data: bytes, max_pixels: int = MAX_PIXELS) -> bool:
    return gpu_decodable(data, read_header(data), max_pixels)


def replace(data: bytes, offset: int, values: bytes) -> bytes:
    return data[:offset] + values + data[offset + len(values) :]


def frame_at(data: bytes) -> int:
    """Where the bits, height and width of a baseline JPEG are."""
    return data.index(b"\xff\xc0") + 4


def segment(data: bytes, marker: int) -> bytes:
    """The first segment of a JPEG with this marker."""
    start = data.index(bytes((0xFF, marker)))
    return data[start : start + 2 + int.from_bytes(data[start + 2 : start + 4])]


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("options", [*PLAIN.values(), {"progressive": True}])
def test_headers_say_what_pillow_reads(image: Image.Image, mode: str, options: dict[str, object]) -> None:
    data = encode(image.convert(mode), "JPEG", **options)
    header, expected = read_header(data), Image.open(io.BytesIO(data))
    assert header.problem == ""
    assert (header.width, header.height, header.bits) == (*expected.size, 8)
    assert [tuple(component) for component in header.components] == expected.layer
    assert (header.frame == 0xC2) == bool(expected.info.get("progressive"))
    assert header.jfif == ("jfif" in expected.info)
    assert header.adobe == expected.info.get("adobe_transform")
    assert (header.restart_interval > 0) == any(name.startswith("restart") for name in options)
    assert header.ended
    assert header.end == len(data) - 2
    assert header.passes == data.count(b"\xff\xda")
    assert header.scan_stop == (header.end if header.passes == 1 else data.index(b"\xff\xc4", header.scan_start))


def test_scans_begin_behind_their_header(jpeg: bytes) -> None:
    header = read_header(jpeg)
    assert header.scan_start == jpeg.index(b"\xff\xda") + 14
    assert read_header(jpeg + b"archive \xff\xd9") == header
    cut = read_header(jpeg[:-2])
    assert (cut.ended, cut.end, cut.scan_stop) == (False, len(jpeg) - 2, len(jpeg) - 2)


@pytest.mark.parametrize("turn", range(11))
def test_orientation_is_that_of_pillow(image: Image.Image, turn: int) -> None:
    for exif in (
        struct.pack("<2sHIHHHIH", b"II", 42, 8, 1, 0x0112, 3, 1, turn) + bytes(6),
        struct.pack(">2sHIHHHIH", b"MM", 42, 8, 1, 0x0112, 3, 1, turn) + bytes(6),
        struct.pack("<2sHI3xHHHII", b"II", 42, 11, 1, 0x0112, 4, 1, turn) + bytes(4),
    ):
        data = encode(image, "JPEG", exif=b"Exif\0\0" + exif)
        found = orientation(Image.open(io.BytesIO(data)))
        assert found == turn
        assert read_header(data).orientation == (turn if turn in range(1, 9) else 1)


def test_orientation_may_be_in_xmp_or_in_two_segments(jpeg: bytes) -> None:
    xmp = app(1, b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta tiff:Orientation="6"/>')
    exif = struct.pack("<2sHIHHHIH", b"II", 42, 8, 1, 0x0112, 3, 1, 8) + bytes(6)
    parts = app(1, b"Exif\0\0" + exif[:15]) + app(1, b"Exif\0\0" + exif[15:])
    for data, turn in ((xmp, 6), (parts, 8), (xmp + parts, 8)):
        data = after_soi(jpeg, data)
        assert read_header(data).orientation == orientation(Image.open(io.BytesIO(data))) == turn


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"garbage!",
        b"II*\0\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\x01",
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0",
        b"MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12\0\x03\xff\xff\xff\xff\0\0\0\0" * 9,
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x01\0\0\0sixx\x08\0\0\0",
    ],
)
def test_broken_exif_means_upright(jpeg: bytes, exif: bytes) -> None:
    assert read_header(after_soi(jpeg, app(1, b"Exif\0\0" + exif))).orientation == 1


@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN)
def test_ordinary_files_are_for_the_gpu(image: Image.Image, options: dict[str, object]) -> None:
    assert decodable(encode(image, "JPEG", **options))
    grey = {name: value for name, value in options.items() if name != "subsampling"}
    assert decodable(encode(image.convert("L"), "JPEG", subsampling=0, **grey))


def test_common_variations_are_for_the_gpu(image: Image.Image, jpeg: bytes) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    without_jfif = jpeg.replace(segment(jpeg, 0xE0), b"")
    adobe = b"Adobe\0\x64\0\0\0\0"
    for data in (
        encode(image, "JPEG", exif=exif, comment=b"hello", icc_profile=bytes(100_000)),
        encode(image, "MPO", save_all=True, append_images=[image]),
        encode(image.resize((1, 1)), "JPEG"),
        jpeg + b"archive",
        without_jfif,
        after_soi(without_jfif, app(14, adobe + b"\1")),
    ):
        assert decodable(data)


def doubtful(image: Image.Image) -> dict[str, bytes]:
    """Files that a GPU's decoder may read differently, or in part."""
    jpeg, restarts = encode(image, "JPEG"), encode(image, "JPEG", restart_marker_blocks=3)
    frame, scan, tables = frame_at(jpeg), jpeg.index(b"\xff\xda"), segment(jpeg, 0xC4)
    names = replace(jpeg, frame + 6, b"R")
    names = replace(replace(names, frame + 9, b"G"), frame + 12, b"B")
    names = replace(replace(replace(names, scan + 5, b"R"), scan + 7, b"G"), scan + 9, b"B")
    third = restarts.index(b"\xff\xd2")
    files = {
        "progressive": encode(image, "JPEG", progressive=True),
        "CMYK": encode(image.convert("CMYK"), "JPEG"),
        "RGB": encode(image, "JPEG", keep_rgb=True),
        "Adobe RGB": after_soi(jpeg, app(14, b"Adobe\0\x64\0\0\0\0\0")),
        "names RGB": names,
        "names unknown": names.replace(segment(names, 0xE0), b"").replace(b"G", b"g"),
        "extended": replace(jpeg, frame - 4, b"\xff\xc1"),
        "arithmetic": replace(jpeg, frame - 4, b"\xff\xc9"),
        "12 bits": replace(jpeg, frame, b"\x0c"),
        "sampling 4x1": replace(jpeg, frame + 7, b"\x41"),
        "chroma 2x1": replace(jpeg, frame + 10, b"\x21"),
        "grey sampled": encode(image.convert("L"), "JPEG", subsampling=2),
        "no height": replace(jpeg, frame + 1, b"\0\0"),
        "wide": replace(jpeg, frame + 3, b"\x40\x01"),
        "taller than its data": replace(jpeg, frame + 1, b"\x30\0"),
        "two frames": jpeg[: frame - 4] + segment(jpeg, 0xC0) + jpeg[frame - 4 :],
        "stray bytes": after_soi(jpeg, b"stray"),
        "fill bytes": after_soi(jpeg, b"\xff"),
        "arithmetic conditioning": after_soi(jpeg, b"\xff\xcc\0\4\0\0"),
        "number of lines": jpeg[:-2] + b"\xff\xdc\0\4\0\x79\xff\xd9",
        "without Huffman tables": jpeg.replace(tables, b""),
        "overfull Huffman table": replace(jpeg, jpeg.index(tables) + 5, b"\3"),
        "Huffman table too long": replace(jpeg, jpeg.index(tables) + 20, b"\xff"),
        "DC of 12 bits": replace(jpeg, jpeg.index(tables) + 21, b"\x0c"),
        "without quantisation": jpeg.replace(segment(jpeg, 0xDB), b""),
        "zero quantisation": replace(jpeg, jpeg.index(b"\xff\xdb") + 9, b"\0"),
        "quantisation of 16 bits": replace(jpeg, jpeg.index(b"\xff\xdb") + 4, b"\x10"),
        "another table of the scan": replace(jpeg, scan + 6, b"\x22"),
        "another component": replace(jpeg, scan + 5, b"\7"),
        "spectral selection": replace(jpeg, scan + 11, b"\1"),
        "no end": jpeg[:-2],
        "no end, an archive": jpeg[:-2] + b"archive",
        "cut": jpeg[: len(jpeg) // 2],
        "cut header": jpeg[: scan + 5],
        "cut and ended": jpeg[: scan + 14 + (len(jpeg) - scan) // 20] + b"\xff\xd9",
        "restart missing": restarts[:third] + restarts[third + 2 :],
        "restart repeated": restarts[:third] + b"\xff\xd2" + restarts[third:],
        "restart out of order": replace(restarts, third, b"\xff\xd4"),
        "restart without interval": restarts.replace(segment(restarts, 0xDD), b""),
        "interval without restarts": after_soi(jpeg, b"\xff\xdd\0\4\0\3"),
        "restarts cut and ended": restarts[: len(restarts) * 9 // 10] + b"\xff\xd9",
        "PNG": encode(image, "PNG"),
        "nothing": b"",
    }
    return files


@pytest.mark.parametrize("kind", doubtful(photo(np.random.default_rng(0), 157, 121)))
def test_doubtful_files_are_not_for_the_gpu(image: Image.Image, kind: str) -> None:
    data = doubtful(image)[kind]
    assert data not in (encode(image, "JPEG"), encode(image, "JPEG", restart_marker_blocks=3))
    assert not decodable(data)


def test_images_beyond_the_limit_are_not_for_the_gpu(jpeg: bytes) -> None:
    assert decodable(jpeg, 157 * 121)
    assert not decodable(jpeg, 157 * 121 - 1)


def test_most_files_that_were_cut_and_ended_are_not_for_the_gpu(image: Image.Image) -> None:
    for mode, most in (("RGB", 0.65), ("L", 0.25)):
        jpeg = encode(image.convert(mode), "JPEG", quality=95)
        header = read_header(jpeg)
        places = range(header.scan_start, header.end - 32)
        assert np.mean([decodable(jpeg[:place] + b"\xff\xd9") for place in places[::7]]) < most


def test_headers_of_hostile_files_never_raise_and_are_quick() -> None:
    dice = random.Random(0)
    good = {name: data for name, data in originals(np.random.default_rng(0)).items() if name.endswith("jpeg")}
    ways, taken = ("flips", "noise", "hole", "repeat", "splice", "cut"), 0
    for _ in range(3000):
        data = good[dice.choice(list(good))]
        position = dice.randrange(min(len(data), dice.choice((700, 10**6))))
        data = damage(data, dice.choice(ways), position, good, dice)
        header = read_header(data)
        assert isinstance(header, JpegHeader)
        taken += (found := gpu_decodable(data, header, MAX_PIXELS))
        if found:
            assert Image.open(io.BytesIO(data)).size == (header.width, header.height)
    assert 300 < taken < 2000
    for _ in range(1000):
        assert not decodable(b"\xff\xd8\xff" + dice.randbytes(dice.randrange(500)))


@pytest.mark.parametrize(
    "body",
    [
        b"\xff" * 2**24,
        b"\xff\xd0" * 2**23,
        app(1, b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(65000)) * 1000,
        (b"\xff\xc0\xff\xff" + b"\xfe" * 65533) * 1000,
        (b"\xff\xc4\xff\xff\0\1" + bytes(65531)) * 1000,
    ],
    ids=["fill", "restarts", "exif", "frames", "tables"],
)
def test_large_hostile_headers_take_no_time(jpeg: bytes, body: bytes) -> None:
    for data in (b"\xff\xd8" + body, after_soi(jpeg, body), jpeg[:-2] + body + b"\xff\xd9"):
        start = time.process_time()
        decodable(data)
        assert time.process_time() - start < 2
