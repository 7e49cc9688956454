"""A thousand hostile or odd files, each opened in a child process that is watched.

    python tests/tools/fuzz_images.py --count 1000 --seed 0

The first few hundred are made by hand, one for every trick we know; the rest are good files with
flipped bits, cut tails and swapped parts. A file must become a finite tensor of the right shape
or an `ImageError`, within five seconds and one gibibyte, and the child must survive them all.
"""

from __future__ import annotations

import io
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from fuzzing import damage, peak_mib, run_script
from PIL import Image, ImageFilter

MAX_SECONDS = 5.0
MAX_MIB = 1024.0
PICTURE, REFUSAL, EITHER = "picture", "refusal", "either"


@dataclass
class Case:
    """One file: how to make it, and what must come of it.

    `like` names the intact file that a cut one must equal if it is taken at all, in all but
    `slack` pixels.
    """

    name: str
    make: bytes | Callable[[Path], object]
    expect: str = EITHER
    like: str = ""
    slack: int = 0


@dataclass
class Report:
    """What came of the files, and everything that should not have."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest: tuple[float, str] = (0.0, "")
    fattest: tuple[float, str] = (0.0, "")

    def __str__(self) -> str:
        return (
            f"{sum(self.outcomes.values())} files in {self.seconds:.1f} s: "
            f"{self.outcomes[PICTURE]} pictures, {self.outcomes[REFUSAL]} refusals, "
            f"{len(self.problems)} problems; slowest {self.slowest[0]:.2f} s ({self.slowest[1]}), "
            f"most memory {self.fattest[0]:.0f} MiB ({self.fattest[1]})"
        )


def photo(rng: np.random.Generator, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Smooth colours with grain: no flat block anywhere."""
    coarse = rng.integers(0, 256, (max(2, height // 12), max(2, width // 12), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    grain = rng.integers(-12, 13, smooth.shape)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).convert(mode)


def encode(image: Image.Image, kind: str, **options: object) -> bytes:
    """The bytes of a picture in a format."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    """A PNG chunk with its checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(pixels: np.ndarray, *, interlace: bool = False, drop: int = 0, extra: bytes = b"") -> bytes:
    """A PNG of uint8 (H, W) or (H, W, 3) pixels, without its last `drop` rows of data."""
    corners = [(0, 0, 1, 1)]
    if interlace:
        corners = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)]
        corners += [(0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    parts = [pixels[y::down, x::across] for x, y, across, down in corners]
    rows = [b"\0" + row.tobytes() for part in parts if part.size for row in part]
    return png_file(
        pixels.shape[1],
        pixels.shape[0],
        zlib.compress(b"".join(rows[: len(rows) - drop]), 1),
        colour=2 if pixels.ndim == 3 else 0,
        interlace=interlace,
        extra=extra,
    )


def png_file(
    width: int,
    height: int,
    data: bytes,
    *,
    depth: int = 8,
    colour: int = 0,
    interlace: bool = False,
    extra: bytes = b"",
) -> bytes:
    """A PNG of given header and compressed data, `extra` chunks in between."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    body = chunk(b"IHDR", header) + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def flat_png(width: int, height: int) -> bytes:
    """A grey PNG of any size, made without holding its pixels."""
    packer = zlib.compressobj(1)
    step = max(1, 2**20 // (width + 1))
    rows = (min(step, height - y) * (b"\0" + b"\x80" * width) for y in range(0, height, step))
    data = b"".join(packer.compress(row) for row in rows)
    return png_file(width, height, data + packer.flush())


def tiff(tags: dict[int, tuple[str, list[int]]], data: bytes, following: int = 0) -> bytes:
    """A little-endian TIFF: tag to ("H" or "I", values); the data start at byte 8."""
    directory = 8 + len(data)
    entries, beyond = b"", b""
    for tag, (code, values) in sorted(tags.items()):
        packed = struct.pack(f"<{len(values)}{code}", *values)
        entries += struct.pack("<HHI", tag, {"H": 3, "I": 4}[code], len(values))
        if len(packed) > 4:
            entries += struct.pack("<I", directory + 6 + 12 * len(tags) + len(beyond))
            beyond += packed
        else:
            entries += packed.ljust(4, b"\0")
    start = b"II*\0" + struct.pack("<I", directory) + data
    return start + struct.pack("<H", len(tags)) + entries + struct.pack("<I", following) + beyond


def rgb_tiff(*, loop: bool = False, **changes: tuple[str, list[int]]) -> bytes:
    """A 64×64 deflated RGB TIFF; `t324=("I", [8])` sets tag 324."""
    data = zlib.compress(bytes(range(192)) * 64)
    tags = {256: ("I", [64]), 257: ("I", [64]), 258: ("H", [8, 8, 8]), 259: ("H", [8])}
    tags |= {262: ("H", [2]), 273: ("I", [8]), 277: ("H", [3]), 278: ("I", [64])}
    tags |= {279: ("I", [len(data)])}
    tags |= {int(tag[1:]): value for tag, value in changes.items()}
    return tiff(tags, data, following=8 + len(data) if loop else 0)


def jpeg_scans(data: bytes) -> list[int]:
    """Where each pass of a JPEG begins."""
    starts, position = [], 2
    while data[position : position + 2] != b"\xff\xd9":
        marker = data[position + 1]
        following = position + 2 + int.from_bytes(data[position + 2 : position + 4])
        if marker == 0xDA:
            starts.append(position)
            while data[following] != 0xFF or data[following + 1] in (0, *range(0xD0, 0xD8)):
                following += 1
        position = following
    return starts


def after_soi(data: bytes, segment: bytes) -> bytes:
    """A JPEG with something put in front of its first segment."""
    return data[:2] + segment + data[2:]


def app(number: int, body: bytes) -> bytes:
    """A JPEG application segment."""
    return bytes([0xFF, 0xE0 + number]) + struct.pack(">H", len(body) + 2) + body


def sparse(header: bytes, size: int) -> Callable[[Path], object]:
    """A file of zeros behind a header, taking no room on disk."""

    def make(path: Path) -> None:
        path.write_bytes(header)
        os.truncate(path, size)

    return make


def bmp_header(width: int, height: int, bits: int = 24, compression: int = 0) -> bytes:
    """A BMP header, with a grey palette where one is needed."""
    palette = b"".join(bytes([v, v, v // 2, 0]) for v in range(256)) if bits <= 8 else b""
    start = struct.pack("<IHHI", 0, 0, 0, 54 + len(palette))
    sizes = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, 0, 0)
    return b"BM" + start + sizes + palette


def originals(rng: np.random.Generator) -> dict[str, bytes]:
    """Good files in every format and mode we take, in odd sizes."""
    files: dict[str, bytes] = {}

    def add(name: str, image: Image.Image, kind: str, **options: object) -> None:
        files[f"{name}.{kind.lower()}"] = encode(image, kind, **options)

    image = photo(rng, 157, 121)
    palette = image.quantize(37)
    grey = Image.fromarray(np.arange(0, 60000, dtype=np.uint16).reshape(200, 300))
    unit = Image.fromarray(np.linspace(0, 1, 9000, dtype=np.float32).reshape(90, 100))
    clear = image.convert("RGBA")
    clear.putalpha(image.convert("L").filter(ImageFilter.GaussianBlur(4)))
    for name, options in {
        "420": {"subsampling": 2},
        "444": {"subsampling": 0},
        "422": {"subsampling": 1},
        "progressive": {"progressive": True},
        "progressive-444": {"progressive": True, "subsampling": 0},
        "optimized": {"optimize": True},
        "restarts": {"restart_marker_blocks": 3},
        "restart-rows": {"restart_marker_rows": 1},
        "coarse": {"quality": 5},
        "fine": {"quality": 99},
    }.items():
        add(name, image, "JPEG", **options)
        add(f"grey-{name}", image.convert("L"), "JPEG", **options)
        add(f"cmyk-{name}", image.convert("CMYK"), "JPEG", **options)
    add("stereo", image, "MPO", save_all=True, append_images=[image.rotate(9)])
    for mode in ("1", "L", "LA", "RGB", "RGBA", "P"):
        picture = palette if mode == "P" else clear.convert(mode)
        add(mode, picture, "PNG")
        add(f"best-{mode}", picture, "PNG", compress_level=9)
        add(mode, picture, "TIFF")
        add(f"lzw-{mode}", picture, "TIFF", compression="tiff_lzw")
        add(f"deflate-{mode}", picture, "TIFF", compression="tiff_adobe_deflate")
        add(f"packbits-{mode}", picture, "TIFF", compression="packbits")
    add("cmyk", image.convert("CMYK"), "TIFF")
    add("lab", Image.new("LAB", (50, 60), (99, 140, 90)), "TIFF")
    add("jpeg", image, "TIFF", compression="jpeg")
    add("fax", image.convert("1"), "TIFF", compression="group4")
    add("pages", image, "TIFF", save_all=True, append_images=[palette, clear])
    add("key", palette, "PNG", transparency=3)
    add("alphas", palette, "PNG", transparency=bytes(range(37)))
    add("16", grey, "PNG")
    add("16", grey, "TIFF")
    add("16", grey, "PPM")
    add("unit", unit, "TIFF")
    add("unit", unit, "PPM")
    add("apng", image, "PNG", save_all=True, append_images=[image.rotate(5)])
    for mode in ("1", "L", "P"):
        add(mode, palette.convert(mode), "GIF")
    add("key", palette, "GIF", transparency=5)
    add("moving", palette, "GIF", save_all=True, append_images=[palette.rotate(40)], loop=0)
    for mode in ("1", "L", "P", "RGB", "RGBA"):
        add(mode, palette if mode == "P" else clear.convert(mode), "BMP")
    for mode in ("1", "L", "RGB"):
        add(mode, image.convert(mode), "PPM")
    add("lossy", image, "WEBP", quality=70)
    add("lossless", image, "WEBP", lossless=True)
    add("clear", clear, "WEBP")
    add("moving", image, "WEBP", save_all=True, append_images=[image.rotate(9)])
    add("colour", image, "AVIF", speed=10)
    add("clear", clear, "AVIF", speed=10)
    add("grey", image.convert("L"), "AVIF", speed=10)
    for width, height in ((1, 1), (1, 7), (7, 1), (16, 16), (17, 15), (3, 300), (300, 2)):
        for kind in ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM"):
            add(f"{width}x{height}", photo(rng, width, height), kind)
    for turn in range(11):
        exif = Image.Exif()
        exif[0x0112] = turn
        for kind in ("JPEG", "PNG", "WEBP"):
            add(f"turn-{turn}", image, kind, exif=exif)
    return files


def cases(count: int, seed: int) -> Iterator[Case]:
    """The first `count` cases: intact, made by hand, then mutated at random."""
    rng, dice = np.random.default_rng(seed), random.Random(seed)
    good = originals(rng)
    fixed = [Case(f"good-{name}", data, PICTURE) for name, data in good.items()]
    fixed += [*large(), *structural(rng, good), *nothing_like_a_picture(good)]
    yield from fixed[:count]
    for index in range(len(fixed), count):
        yield mutation(index, good, dice)


def large() -> Iterator[Case]:
    """At and just above the limits, and far above."""
    side = 8192
    full = Image.new("RGB", (side, side), (90, 120, 30))
    yield Case("full.jpg", encode(full, "JPEG"), PICTURE)
    yield Case("full.png", flat_png(side, side), PICTURE)
    yield Case("full.bmp", sparse(bmp_header(side, side), 54 + 3 * side * side), PICTURE)
    yield Case("full.ppm", sparse(b"P6 8192 8192 255\n", 17 + 3 * side * side), PICTURE)
    yield Case("full.gif", encode(full.convert("P"), "GIF"), PICTURE)
    wide = Image.new("RGB", (side, side * 7 // 8), (90, 120, 30))
    yield Case("full.webp", encode(wide, "WEBP", lossless=True, method=0), PICTURE)
    yield Case("tall.png", flat_png(1, 2**20), PICTURE)
    yield Case("wide.png", flat_png(2**20, 1), PICTURE)
    yield Case("thin.png", flat_png(1, 60000), PICTURE)
    yield Case("too-tall.png", flat_png(1, 2**20 + 1), REFUSAL)
    yield Case("over.png", flat_png(side, side + 1), REFUSAL)
    yield Case("over.bmp", sparse(bmp_header(side, side + 1), 54 + 3 * side * side), REFUSAL)
    yield Case("zeros.jpg", sparse(b"\xff\xd8\xff\xe0", 2**28), REFUSAL)
    yield Case("endless.webp", sparse(b"RIFF\xff\xff\xff\xffWEBPVP8L", 2**40), REFUSAL)
    for width, height in ((65535, 65535), (30000, 30000), (8192, 8193), (0, 5), (5, 0)):
        size = struct.pack(">HH", height, width)
        small = encode(Image.new("RGB", (64, 64)), "JPEG")
        frame = small.index(b"\xff\xc0") + 5
        yield Case(f"{width}x{height}.jpg", small[:frame] + size + small[frame + 4 :], REFUSAL)
        dims = struct.pack("<HH", width, height)
        disposed = b"GIF89a" + dims + b"\0\0\0!\xf9\x04\x08\0\0\0\0," + bytes(4) + dims
        yield Case(f"{width}x{height}.gif", disposed + b"\0\x08\x03\x00\x01\x02\0;", REFUSAL)
        yield Case(f"{width}x{height}.png", png_file(width, height, b"x"), REFUSAL)
        yield Case(f"{width}x{height}.ppm", b"P6 %d %d 255\n" % (width, height), REFUSAL)
        yield Case(f"{width}x{height}.bmp", bmp_header(width, height), REFUSAL)
        sides = {"t256": ("I", [width]), "t257": ("I", [height])}
        yield Case(f"{width}x{height}.tif", rgb_tiff(**sides), REFUSAL)
        canvas = b"".join(struct.pack("<I", max(v - 1, 0))[:3] for v in (width, height))
        webp = b"WEBPVP8X\x0a\0\0\0\0\0\0\0" + canvas + b"VP8L\x04\0\0\0/abc"
        yield Case(f"{width}x{height}.webp", b"RIFF\x2a\0\0\0" + webp, REFUSAL)
    avif = bytearray(encode(Image.new("RGB", (64, 64)), "AVIF", speed=10))
    where = avif.index(b"ispe") + 8
    avif[where : where + 8] = struct.pack(">II", 30000, 30000)
    yield Case("claims.avif", bytes(avif), REFUSAL)


def structural(rng: np.random.Generator, good: dict[str, bytes]) -> Iterator[Case]:
    """Files that are wrong, or odd, in one chosen place."""
    yield from odd_png(rng)
    yield from odd_jpeg(good)
    yield from odd_rest(good)


def odd_png(rng: np.random.Generator) -> Iterator[Case]:
    pixels = rng.integers(0, 256, (33, 29, 3), dtype=np.uint8)
    yield Case("interlaced.png", png(pixels, interlace=True), PICTURE)
    for drop in (1, 5, 20):
        yield Case(f"tidy-{drop}.png", png(pixels, drop=drop), REFUSAL)
        yield Case(f"tidy-black-{drop}.png", png(pixels * 0, drop=drop), REFUSAL)
        yield Case(f"tidy-weave-{drop}.png", png(pixels, interlace=True, drop=drop), REFUSAL)
    bomb = zlib.compress(bytes(2**26), 9)
    yield Case("ztxt.png", png(pixels, extra=chunk(b"zTXt", b"a\0\0" + bomb)), REFUSAL)
    text = b"".join(chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20), 9)) for _ in range(80))
    yield Case("many-ztxt.png", png(pixels, extra=text), REFUSAL)
    yield Case("itxt.png", png(pixels, extra=chunk(b"iTXt", b"a\0\1\0\0\0" + bomb)))
    yield Case("iccp.png", png(pixels, extra=chunk(b"iCCP", b"a\0\0" + bomb)), REFUSAL)
    yield Case("idat.png", png_file(16, 16, bomb), PICTURE)
    yield Case("chunks.png", png(pixels, extra=chunk(b"prIv", b"") * 20000), PICTURE)
    yield Case("critical.png", png(pixels, extra=chunk(b"ABCD", b"huh")))
    yield Case("exif.png", png(pixels, extra=chunk(b"eXIf", b"not exif at all")), PICTURE)
    hexed = chunk(b"tEXt", b"Raw profile type exif\0\nexif\n  9\nzz nothex")
    yield Case("hexed.png", png(pixels, extra=hexed), PICTURE)
    yield Case("trns.png", png(pixels, extra=chunk(b"tRNS", bytes(999))), PICTURE)
    flipped = bytearray(png(pixels))
    flipped[-20] ^= 1
    yield Case("crc.png", bytes(flipped), REFUSAL)
    yield Case("no-idat.png", png(pixels).split(b"IDAT")[0], REFUSAL)
    yield Case("no-iend.png", png(pixels)[:-12])
    yield Case("no-palette.png", png_file(4, 4, zlib.compress(bytes(20)), colour=3))
    yield Case("stored.png", png_file(4, 4, zlib.compress(bytes(20), 0)), PICTURE)
    yield Case("adler.png", png_file(4, 4, zlib.compress(bytes(20))[:-4] + b"oops"))
    yield Case("filter.png", png_file(4, 4, zlib.compress(b"\x09" * 20)), REFUSAL)
    for depth in (0, 1, 3, 16, 255):
        for colour in (0, 1, 2, 3, 6):
            data = zlib.compress(bytes(999))
            yield Case(f"{depth}-{colour}.png", png_file(4, 4, data, depth=depth, colour=colour))
    frame = struct.pack(">IIIIIHHBB", 0, 99, 99, 0, 0, 0, 0, 0, 0)
    animation = chunk(b"acTL", struct.pack(">II", 2**31, 0)) + chunk(b"fcTL", frame)
    yield Case("frame.png", png(pixels, extra=animation))


def odd_jpeg(good: dict[str, bytes]) -> Iterator[Case]:
    base, waves = good["420.jpeg"], good["progressive.jpeg"]
    scans = jpeg_scans(waves)
    end = len(waves) - 2
    for times in (60, 1000):
        bomb = waves[:end] + waves[scans[-1] : end] * times + b"\xff\xd9"
        yield Case(f"passes-{times}.jpg", bomb, REFUSAL)
    for index, start in enumerate(scans):
        yield Case(f"pass-{index}.jpg", waves[:start] + b"\xff\xd9", REFUSAL)
    huge = encode(Image.new("L", (8192, 8192), 77), "JPEG", progressive=True)
    last = jpeg_scans(huge)[-1]
    yield Case("slow-passes.jpg", huge[:-2] + huge[last:-2] * 40 + b"\xff\xd9", REFUSAL)
    frame = base.index(b"\xff\xc0")
    taller = base[: frame + 5] + struct.pack(">H", 242) + base[frame + 7 :]
    yield Case("taller.jpg", taller, REFUSAL)
    shorter = base[: frame + 5] + struct.pack(">H", 64) + base[frame + 7 :]
    yield Case("shorter.jpg", shorter, PICTURE)
    yield Case("no-end.jpg", base[:-2], PICTURE, "good-420.jpeg")
    yield Case("end-only.jpg", b"\xff\xd8\xff\xd9", REFUSAL)
    yield Case("no-frame.jpg", base[:frame] + base[frame + 19 :], REFUSAL)
    yield Case("stray.jpg", after_soi(base, b"\xff" * 2**20), REFUSAL)
    yield Case("segments.jpg", after_soi(base, b"\xff\xe5\0\2" * 10**6), REFUSAL)
    yield Case("comment.jpg", after_soi(base, b"\xff\xfe\xff\xffx" + bytes(65532)), PICTURE)
    archive = b"PK\3\4" + b"\xff\xda" * 999 + b"\xff\xd9"
    yield Case("zip.jpg", base + archive, PICTURE, "good-420.jpeg")
    yield Case("twice.jpg", base + base, PICTURE, "good-420.jpeg")
    thumbnail = app(1, b"Exif\0\0II*\0\x08\0\0\0\0\0" + good["16x16.jpeg"])
    yield Case("thumbnail.jpg", after_soi(base, thumbnail), PICTURE, "good-420.jpeg")
    for number, exif in enumerate(
        (
            b"",
            b"garbage",
            b"II*\0\xff\xff\xff\xff",
            b"MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12\0\x03\xff\xff\xff\xff\0\0\0\0" * 99,
            b"II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x01\0\0\0sixx\x08\0\0\0",
            b"II*\0\x08\0\0\0\x01\0\x69\x87\x04\0\x01\0\0\0\x08\0\0\0\x08\0\0\0",
            b"II*\0\x08\0\0\0" + b"\xff\xff" + b"\x0f\x01\x02\0\xf0\xff\0\0\0\0\0\0" * 5000,
        )
    ):
        data = after_soi(base, app(1, b"Exif\0\0" + exif))
        yield Case(f"exif-{number}.jpg", data, PICTURE, "good-420.jpeg")
    parts = app(1, b"Exif\0\0II*\0\x08\0\0\0" + b"\xff\xff" + b"\x0f\x01\x02\0\0\xff\xff\0" * 8000)
    yield Case("exif-parts.jpg", after_soi(base, parts * 40), PICTURE, "good-420.jpeg")
    yield Case("icc.jpg", after_soi(base, app(2, b"ICC_PROFILE\0\1\1junk")), PICTURE)
    yield Case("mpf.jpg", after_soi(base, app(2, b"MPF\0II*\0\xff\xff\xff\xff")))
    yield Case("photoshop.jpg", after_soi(base, app(13, b"Photoshop 3.0\0008BIM\x03\xed\0")))


def odd_rest(good: dict[str, bytes]) -> Iterator[Case]:
    yield Case("plain.tif", rgb_tiff(), PICTURE)
    for side in (16384, 20000, 65536):
        tile = {"t322": ("I", [side]), "t323": ("I", [side]), "t324": ("I", [8])}
        yield Case(f"tile-{side}.tif", rgb_tiff(**tile, t325=("I", [99])), REFUSAL)
    raw = {"t259": ("H", [1]), "t278": ("I", [8]), "t279": ("I", [16])}
    yield Case("strips.tif", rgb_tiff(**raw, t273=("I", [8, 9])), REFUSAL)
    yield Case("rows.tif", rgb_tiff(t278=("I", [2**32 - 1])))
    yield Case("counts.tif", rgb_tiff(t279=("I", [2**31])))
    for tag in (34665, 34853, 330):
        yield Case(f"pointer-{tag}.tif", rgb_tiff(**{f"t{tag}": ("I", [2**32 - 1])}), PICTURE)
    yield Case("xmp.tif", rgb_tiff(t700=("I", [5])))
    for samples in (0, 2, 4, 6, 99, 60000):
        yield Case(f"samples-{samples}.tif", rgb_tiff(t277=("H", [samples])))
    for code in (2, 4, 5, 6, 7, 99, 32773, 34925, 50000, 50001):
        yield Case(f"codec-{code}.tif", rgb_tiff(t259=("H", [code])))
    yield Case("loop.tif", rgb_tiff(loop=True), PICTURE)
    for low, high, kind in ((-1, 5, "<i4"), (0, 70000, "<i4"), (0, 2, "<f4"), (-1, 0, "<f4")):
        wide = Image.fromarray(np.linspace(low, high, 600).reshape(20, 30).astype(kind))
        yield Case(f"{low}..{high}{kind[1]}.tif", encode(wide, "TIFF"), REFUSAL)
    for value in (np.nan, np.inf):
        holes = np.full((20, 30), 0.5, np.float32)
        holes[7, 7] = value
        yield Case(f"{value}.tif", encode(Image.fromarray(holes), "TIFF"), REFUSAL)
    yield Case("delta.bmp", bmp_header(8192, 8192, 8, 1) + b"\0\2\0\0" * 3 * 10**6, REFUSAL)
    runs = b"".join(bytes([20, value, 0, 0]) for value in range(20)) + b"\0\1"
    yield Case("runs.bmp", bmp_header(20, 20, 8, 1) + runs, PICTURE)
    yield Case("short-runs.bmp", bmp_header(20, 30, 8, 1) + runs, REFUSAL)
    yield Case("top-down.bmp", bmp_header(20, -20) + bytes(1200), PICTURE)
    for bits in (0, 1, 2, 4, 8, 16, 24, 32, 64):
        for compression in (0, 3, 4):
            data = bmp_header(9, 9, bits, compression) + bytes(999)
            yield Case(f"{bits}-{compression}.bmp", data)
    for magic in b"123456":
        for largest in (0, 1, 100, 255, 1000, 65535, 65536):
            data = b"P%c 9 9 %d\n" % (magic, largest) + b"1 0 " * 300
            yield Case(f"{magic}-{largest}.ppm", data)
    yield Case("comments.pgm", b"P2 900 900 255\n" + b"#\n" * 10**6, REFUSAL)
    yield Case("odd.ppm", b"P6 2000 2000 100\n" + bytes(3 * 2000 * 2000), REFUSAL)
    yield Case("token.ppm", b"P6 " + b"9" * 10**6, REFUSAL)
    gif = good["P.gif"]
    for bits in (0, 1, 12, 13, 255):
        yield Case(f"lzw-{bits}.gif", gif.replace(b"\0\x06", bytes([0, bits]), 1))
    yield Case("no-trailer.gif", gif[:-1], PICTURE)
    yield Case("header.gif", gif[:13], REFUSAL)
    for number in range(12, 300, 24):
        for name in ("lossy.webp", "lossless.webp", "colour.avif", "clear.avif"):
            data = good[name][:number] + b"\xff" + good[name][number + 1 :]
            yield Case(f"ff-{number}-{name}", data)


def nothing_like_a_picture(good: dict[str, bytes]) -> Iterator[Case]:
    """Other formats, above all those that run programs, and other things than files."""
    for name, data in {
        "empty.jpg": b"",
        "one.png": b"\x89",
        "text.jpg": b"this is not a picture\n" * 99,
        "page.png": b"<!doctype html><img src=x>",
        "drawing.svg": b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="9"/></svg>',
        "script.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n/showpage",
        "script.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n(%pipe%id)",
        "paper.pdf": b"%PDF-1.7\n1 0 obj",
        "archive.zip": b"PK\3\4" + bytes(99),
        "layers.psd": b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 9, 9, 8, 3),
        "icon.ico": b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0" + bytes(40),
        "meta.wmf": b"\xd7\xcd\xc6\x9a\0\0" + bytes(40),
        "film.mp4": b"\0\0\0\x18ftypisom" + bytes(99),
        "apple.heic": b"\0\0\0\x18ftypheic" + bytes(99),
        "liar.avif": b"\0\0\0\x18ftypmif1" + bytes(99),
        "jpeg.jp2": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(99),
        "zeros.tif": bytes(5000),
        "front.png": b"GIF89a" + good["RGB.png"],
        "back.gif": good["RGB.png"][:8] + good["P.gif"],
    }.items():
        yield Case(name, data, REFUSAL)
    yield Case("wrong-name.jpg", good["RGB.png"], PICTURE)
    yield Case("wrong-name.eps", good["420.jpeg"], PICTURE)
    yield Case("page-behind.png", good["RGB.png"] + b"<script>alert(1)</script>", PICTURE)
    yield Case("script.gif", good["P.gif"] + b"*/=1;alert(1)", PICTURE)
    yield Case("directory.png", Path.mkdir, REFUSAL)
    yield Case("missing.png", lambda path: None, REFUSAL)
    yield Case("pipe.png", os.mkfifo, REFUSAL)
    yield Case("device.png", lambda path: path.symlink_to("/dev/zero"), REFUSAL)
    yield Case("loop.png", lambda path: path.symlink_to(path.name), REFUSAL)
    yield Case("socket.png", _socket, REFUSAL)


def _socket(path: Path) -> None:
    # A socket's address may have a hundred characters; a test's folder has more.
    with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryDirectory() as folder:
        server.bind(f"{folder}/s")
        os.rename(f"{folder}/s", path)


def mutation(index: int, good: dict[str, bytes], dice: random.Random) -> Case:
    """A good file with flipped bits, a cut tail, a cut middle or a piece of another file."""
    cut = dice.random() < 0.5
    names = [name for name in good if not cut or name.endswith((".jpeg", ".png", ".mpo"))]
    name = dice.choice(names)
    data = good[name]
    kind = name.rsplit(".", 1)[1]
    position = dice.randrange(1, len(data))
    if cut:
        # The two formats whose decoders fill up in silence, as cut and as tidied up afterwards.
        tail = dice.choice((b"", b"\xff\xd9" if kind != "png" else chunk(b"IEND", b"")))
        slack = 0 if kind == "png" else 512
        label = f"{index}-cut-{position}-{name}"
        return Case(label, data[:position] + tail, EITHER, f"good-{name}", slack)
    way = dice.choice(("flips", "noise", "hole", "splice", "cut"))
    return Case(f"{index}-{way}-{name}", damage(data, way, position, good, dice))


def run(count: int, seed: int, folder: Path) -> Report:
    """Write the files into `folder`, open them all in a child process and judge it."""
    started = time.perf_counter()
    manifest, paths = [], set()
    for case in cases(count, seed):
        path = folder / case.name
        assert path not in paths, case.name
        paths.add(path)
        path.write_bytes(case.make) if isinstance(case.make, bytes) else case.make(path)
        manifest.append([case.name, case.expect, case.like, case.slack])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    report = Report()
    results, crash = _watch(folder)
    for name, outcome, detail, seconds, mib in results:
        report.outcomes[outcome] += 1
        report.slowest = max(report.slowest, (seconds, name))
        report.fattest = max(report.fattest, (mib, name))
        if outcome not in (PICTURE, REFUSAL):
            report.problems.append(f"{name}: {detail}")
        if seconds > MAX_SECONDS or mib > MAX_MIB:
            report.problems.append(f"{name}: took {seconds:.1f} s and {mib:.0f} MiB")
    if crash:
        culprit = manifest[len(results)][0] if len(results) < len(manifest) else "the end"
        report.problems.append(f"child {crash} at {culprit}")
    report.seconds = time.perf_counter() - started
    return report


def _watch(folder: Path) -> tuple[list[tuple[str, str, str, float, float]], str]:
    command = [sys.executable, __file__, "--child", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    crash = ""
    # The decoders' C libraries write to stderr what they think of such files.
    with open(folder / "results", "w") as results:
        try:
            code = subprocess.run(
                command, stdout=results, stderr=subprocess.DEVNULL, env=environment, timeout=600
            ).returncode
            crash = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            crash = "hung"
    lines = (folder / "results").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines], crash


def child(folder: Path, **_: int) -> None:
    """Open every file of the manifest, one line of result each."""
    for name, expect, like, slack in json.loads((folder / "manifest.json").read_text()):
        seconds, mib, outcome, detail = _measure(folder / name, expect)
        if seconds > MAX_SECONDS / 2:
            # On a busy machine anything can be slow once.
            seconds = min(seconds, _measure(folder / name, expect)[0])
        if like and outcome == PICTURE:
            outcome, detail = _compare(folder / name, folder / like, slack)
        print(json.dumps([name, outcome, detail, seconds, mib]), flush=True)


def _measure(path: Path, expect: str) -> tuple[float, float, str, str]:
    import torch

    from veca.images import ImageError, load_image

    before = peak_mib(reset=True)
    started = time.perf_counter()
    try:
        x = load_image(path, size=64)
    except ImageError as error:
        outcome, detail = REFUSAL, str(error)
        named = str(path) in detail
    except BaseException as error:
        return 0.0, 0.0, "crash", repr(error)
    else:
        outcome, detail = PICTURE, f"{tuple(x.shape)} {x.dtype}"
        named = x.shape == (3, 64, 64) and x.dtype == torch.float32 and bool(x.isfinite().all())
    seconds = time.perf_counter() - started
    if expect not in (EITHER, outcome) or not named:
        outcome = f"wrong {outcome}"
    return seconds, peak_mib() - before, outcome, detail


def _compare(path: Path, like: Path, slack: int) -> tuple[str, str]:
    from veca.images import open_image

    ours, intact = (np.asarray(open_image(p)).astype(int) for p in (path, like))
    if ours.shape != intact.shape:
        return "wrong size", f"{ours.shape}, not {intact.shape}"
    changed = int((np.abs(ours - intact).max(axis=-1) > (48 if slack else 0)).sum())
    return (PICTURE, "") if changed <= slack else ("filled", f"{changed} pixels are not its own")


if __name__ == "__main__":
    sys.exit(run_script(__doc__, run, child, count=1000, seed=0))
