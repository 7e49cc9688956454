"""Hostile and damaged TIFF files, read by regions in a child process that is watched.

    python tests/tools/fuzz_tiff.py --count 1000 --seed 0

The first are made by hand: tiles that claim to be huge, bombs, cut files, sizes and offsets out of range. The rest are
good files with flipped bits, cut tails and swapped parts, most of the damage in the header. Regions of a file must
become finite tensors of their shape, or an `ImageError`, within seconds and little memory.
"""

from __future__ import annotations

import io
import json
import os
import random
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import tifffile
from fuzzing import damage, peak_mib, run_script

from veca.images import ImageError
from veca.images.tiles import open_pixels

MAX_SECONDS, MAX_MIB = 5.0, 512.0
"""Of one file; memory beyond that of the process before the first."""
PIXELS, REFUSAL = "pixels", "refusal"
GOOD: dict[str, dict[str, Any]] = {
    "plain": {"tile": (64, 64)},
    "strips": {"rowsperstrip": 7, "compression": "lzw", "predictor": True},
    "deflate": {"tile": (32, 48), "compression": "zlib", "bigtiff": True},
    "zstd": {"tile": (64, 64), "compression": "zstd"},
    "jpeg": {"tile": (64, 64), "compression": "jpeg"},
    "jpeg2000": {"tile": (64, 64), "compression": "jpeg2000"},
    "webp": {"tile": (64, 64), "compression": "webp"},
    "geo": {"tile": (64, 64), "extratags": [(33550, "d", 3, (0.5, 0.5, 0.0), True), (33922, "d", 6, (0.0,) * 6, True)]},
}


@dataclass
class Report:
    """What came of the files, and everything that should not have."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[float, str] = (0.0, "")

    def __str__(self) -> str:
        return (
            f"{sum(self.outcomes.values())} files: {self.outcomes[PIXELS]} read, {self.outcomes[REFUSAL]} refused, "
            f"{len(self.problems)} problems; slowest {self.slowest[0]:.2f} s ({self.slowest[1]}), most memory "
            f"{self.largest[0]:.0f} MiB ({self.largest[1]})"
        )


def write_tiff(pixels: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, pixels, photometric="rgb", **options)
    return stream.getvalue()


def write_tiles(tile: bytes, compression: str) -> bytes:
    """A TIFF of 256 × 256 pixels whose tiles of 64 × 64 are all `tile`."""
    stream, options = io.BytesIO(), {"tile": (64, 64), "photometric": "rgb", "compression": compression}
    tifffile.imwrite(stream, iter([tile] * 16), shape=(256, 256, 3), dtype=np.uint8, **options)
    return stream.getvalue()


def replace_tag(data: bytes, code: int, value: int, count: int | None = None) -> bytes:
    """A small TIFF with another value, or offset, of a tag."""
    changed, start = bytearray(data), int.from_bytes(data[4:8], "little")
    for entry in range(start + 2, start + 2 + 12 * int.from_bytes(data[start : start + 2], "little"), 12):
        if int.from_bytes(data[entry : entry + 2], "little") == code:
            struct.pack_into("<H", changed, entry + 2, 4)
            struct.pack_into("<II", changed, entry + 4, 1 if count is None else count, value)
    return bytes(changed)


def hostile_files(good: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """One for every trick we know, with its name."""
    zeros, plain = np.zeros((64, 64, 3), np.uint8), good["plain"]
    jpeg = bytearray(imagecodecs.jpeg8_encode(zeros))
    struct.pack_into(">HH", jpeg, jpeg.index(b"\xff\xc0") + 5, 65000, 65000)
    yield "JPEG that claims 65,000 × 65,000 pixels", write_tiles(bytes(jpeg), "jpeg")
    jpeg2000 = bytearray(imagecodecs.jpeg2k_encode(zeros, codecformat="j2k"))
    for start in (6, 22):
        struct.pack_into(">II", jpeg2000, jpeg2000.index(b"\xff\x51") + start, 60000, 60000)
    yield "JPEG 2000 that claims 60,000 × 60,000 pixels", write_tiles(bytes(jpeg2000), "jpeg2000")
    png = bytearray(imagecodecs.png_encode(zeros))
    struct.pack_into(">II", png, 16, 60000, 60000)
    struct.pack_into(">I", png, 29, zlib.crc32(png[12:29]))
    yield "PNG that claims 60,000 × 60,000 pixels", write_tiles(bytes(png), "png")
    yield "JPEG XL", write_tiles(imagecodecs.jpegxl_encode(zeros), "jpegxl")
    for name, encode in (("zlib", zlib.compress), ("zstd", imagecodecs.zstd_encode), ("lzma", imagecodecs.lzma_encode)):
        yield f"bomb of {name}", write_tiles(encode(bytes(1 << 26)), name)
    for name, code, value in (
        ("width of 2³²", 256, 2**32 - 1),
        ("height of 2³²", 257, 2**32 - 1),
        ("no width", 256, 0),
        ("wide tiles", 322, 2**31),
        ("high tiles", 323, 2**31),
        ("tiles without width", 322, 0),
        ("tiles of one pixel", 322, 1),
        ("thousands of channels", 277, 65535),
        ("unknown compression", 259, 54321),
    ):
        yield name, replace_tag(plain, code, value)
    whole = write_tiff(np.zeros((150, 203, 3), np.uint8), rowsperstrip=150)
    yield "offset beyond the end", replace_tag(whole, 273, 2**31)
    yield "length beyond the end", replace_tag(whole, 279, 2**31)
    yield "offsets without end", replace_tag(plain, 324, 8, 2**32 - 1)
    yield "directory after itself", plain[:4] + struct.pack("<I", len(plain) - 1) + plain[8:]
    yield "half a file", plain[: len(plain) // 2]
    yield "header alone", plain[:8]
    yield "nothing", b""


def make_files(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    pixels = np.random.default_rng(0).integers(0, 256, (150, 203, 3), np.uint8)
    good = {name: write_tiff(pixels, **options) for name, options in GOOD.items()}
    yield from list(hostile_files(good))[:count]
    yield from good.items()
    dice = random.Random(seed)
    for number in range(count):
        name = dice.choice(list(good))
        way, data = dice.choice(("flips", "noise", "hole", "repeat", "splice", "cut")), good[name]
        head = dice.random() < 0.8  # where the tags are
        position = dice.randrange(min(len(data), 600) if head else len(data))
        changed = damage(data[:600] if head and way == "flips" else data, way, position, good, dice)
        yield f"{name}, {way} {number}", changed + (data[600:] if head and way == "flips" else b"")


def read_file(path: str) -> str:
    try:
        source = open_pixels(path)
        for top, left in ((0, 0), (max(0, source.height - 48), max(0, source.width - 64))):
            region = source.read(top, left, top + 48, left + 64)
            assert tuple(region.shape) == (3, 48, 64)
            assert bool(region.isfinite().all())
    except ImageError as error:
        named = str(error).startswith(path) and len(str(error)) < 1000
        return REFUSAL if named else f"a message without the name, or too long: {error}"[:300]
    return PIXELS


def child(folder: Path, count: int, seed: int) -> None:
    """Read the files that have no line in `results` yet; each gets one before it is opened, and one after."""
    results = folder / "results"
    done = {line["file"] for line in map(json.loads, results.read_text().splitlines())}
    before = peak_mib()
    with open(results, "a") as out:
        for path in sorted(folder.glob("*.tif")):
            if path.name in done:
                continue
            print(json.dumps({"file": path.name}), file=out, flush=True)
            began = time.process_time()
            try:
                outcome = read_file(str(path))
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"[:300]
            line = {"file": path.name, "outcome": outcome, "seconds": time.process_time() - began}
            print(json.dumps(line | {"mib": peak_mib() - before}), file=out, flush=True)


def run(count: int, seed: int, folder: Path) -> Report:
    names, report = dict[str, str](), Report()
    for number, (name, data) in enumerate(make_files(count, seed)):
        names[f"{number:05d}.tif"] = name
        (folder / f"{number:05d}.tif").write_bytes(data)
    results = folder / "results"
    results.touch()
    command = [sys.executable, __file__, "--child", str(folder), "--count", str(count), "--seed", str(seed)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    while True:
        try:
            status = subprocess.run(
                command, check=False, stderr=subprocess.DEVNULL, timeout=600, env=environment
            ).returncode
        except subprocess.TimeoutExpired:
            status = -9
        lines = {line["file"]: line for line in map(json.loads, results.read_text().splitlines())}
        if status == 0 and len(lines) == len(names):
            break
        last = list(lines)[-1] if lines else ""
        report.problems.append(f"{names.get(last)}: the process ended with status {status}")
        if not last or len(report.problems) > 20:
            break
    for file, line in lines.items():
        name, outcome = names[file], line.get("outcome", "died")
        report.outcomes[outcome if outcome in (PIXELS, REFUSAL) else "other"] += 1
        report.slowest = max(report.slowest, (line.get("seconds", 0.0), name))
        report.largest = max(report.largest, (line.get("mib", 0.0), name))
        if outcome not in (PIXELS, REFUSAL):
            report.problems.append(f"{name}: {outcome}")
    for (value, name), limit, unit in ((report.slowest, MAX_SECONDS, "s"), (report.largest, MAX_MIB, "MiB")):
        if value > limit:
            report.problems.append(f"{name}: {value:.1f} {unit}, over {limit}")
    return report


if __name__ == "__main__":
    sys.exit(run_script(__doc__, run, child, count=1000, seed=0))
