"""Hostile tar archives and Parquet files, embedded together by one watched process.

    python tests/tools/fuzz_archives.py --count 200 --seed 0

The first few dozen are made by hand, one for every trick we know; the rest are good archives with flipped bits, cut
tails and swapped parts. The run must end by itself, without a traceback and within the memory allowed to it and to each
of its decoding processes, and pictures beside or after the tricks must come out with the bits they have alone.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzzing import damage, run_script
from PIL import Image

MAX_MIB = 2048.0
MIB = 1 << 20
PIECE = 32 * MIB
HONEST = "honest.png"


@dataclass
class Case:
    """One archive: how to make it, and whether it holds a picture that must be found after all that is wrong."""

    name: str
    make: bytes | Callable[[], bytes]
    honest: bool = False


@dataclass
class Report:
    """What came of the archives, and everything that should not have."""

    cases: int
    pictures: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    mib: dict[str, float] = field(default_factory=dict)
    """Most memory beyond what the same run takes for one good archive: of the process, and of a decoding one."""

    def __str__(self) -> str:
        memory = ", ".join(f"{who} {mib:.0f} MiB" for who, mib in self.mib.items())
        return (
            f"{self.cases} archives: {self.pictures} pictures, {len(self.failures)} failures, "
            f"{len(self.problems)} problems; most memory: {memory}"
        )


@cache
def honest() -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def header(name: str, size: int = 0, kind: bytes = b"0", **more: Any) -> bytes:
    """One block, with its checksum; sizes may be anything."""
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in more.items():
        setattr(info, key, value)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[-512:])
    block[124:136] = (
        b"%011o\0" % size
        if 0 <= size < 8**11
        else (b"\x80" if size >= 0 else b"\xff") + (size % 256**11).to_bytes(11, "big")
    )
    return summed(block)


def summed(block: bytearray) -> bytes:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: str, data: bytes, kind: bytes = b"0") -> bytes:
    return header(name, len(data), kind) + data + bytes(-len(data) % 512)


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    return member("pax", records, kind)


def record(key: str, value: str) -> bytes:
    text = f" {key}={value}\n"
    size = len(text) + 1
    while len(f"{size}{text}") != size:
        size = len(f"{size}{text}")
    return f"{size}{text}".encode()


END = bytes(1024)


def tail() -> bytes:
    """A picture, and the end of an archive."""
    return member(HONEST, honest()) + END


@cache
def _packed(size: int, fill: bytes = b"\0") -> bytes:
    return gzip.compress(fill * size, 1, mtime=0)


def packed(*parts: bytes | int) -> bytes:
    """A gzip file of several members: bytes, and so many zeros, of which pieces are packed once."""
    out = []
    for part in parts:
        if isinstance(part, bytes):
            out.append(gzip.compress(part, 1, mtime=0))
        else:
            out += [_packed(PIECE)] * (part // PIECE) + [_packed(part % PIECE)]
    return b"".join(out)


def sparse_header(name: str, claimed: int, more: bool = False) -> bytes:
    """GNU's old format: one byte of data, at the end of `claimed` bytes."""
    block = bytearray(header(name, 512, b"S"))
    block[386:410] = b"%011o\0%011o\0" % (claimed - 512, 512)
    block[482] = more
    block[483:495] = b"%011o\0" % claimed
    return summed(block)


def tars() -> Iterator[Case]:
    """Headers that claim what is not so."""
    sparse = (sparse_header(f"{i}.png", 600 * MIB) + bytes(512) for i in range(16))
    yield Case("sparse.tar", b"".join(sparse) + tail(), True)
    endless = bytearray(512)
    endless[504] = 1
    yield Case("sparse-map.tar.gz", packed(sparse_header("a.png", 600 * MIB, True), bytes(endless) * 100_000), False)
    maps = {
        "0.0": record("GNU.sparse.size", str(600 * MIB)) + record("GNU.sparse.offset", "0") * 20_000,
        "0.1": record("GNU.sparse.map", ",".join(["0", "512"] * 50_000)) + record("GNU.sparse.size", str(600 * MIB)),
        "1.0": record("GNU.sparse.major", "1") + record("GNU.sparse.minor", "0")
        + record("GNU.sparse.realsize", str(600 * MIB)) + record("GNU.sparse.name", "a.png"),
    }  # fmt: skip
    for version, records in maps.items():
        data = b"999999999999\n" + b"0\n" * 2000
        yield Case(f"sparse-{version}.tar", pax(records) + member("a.png", data) + tail(), True)
    for kind, what in ((b"L", "name"), (b"K", "link"), (b"x", "pax"), (b"g", "global")):
        parts = header("long", 300 * MIB, kind), 300 * MIB, member("a.png", b"x") + tail()
        yield Case(f"long-{what}.tgz", packed(*parts), True)
        chain = pax(record("path", HONEST), kind) if kind in b"xg" else member("long", HONEST.encode(), kind)
        yield Case(f"chain-{what}.tgz", packed(chain * 20_000 + tail()), True)
    many = b"".join(pax(b"".join(record(f"{i} {j}", "v" * 500) for j in range(1000)), b"g") for i in range(20))
    yield Case("globals.tgz", packed(many + tail()), True)
    yield Case("digits.tar", pax(b"1" * 1_000_000) + member("a.png", b"x") + tail())
    yield Case("ones.tar", pax(b"1 " * 500_000) + member("a.png", b"x") + tail())
    yield Case("pax-size.tar", pax(record("size", "9" * 5000)) + tail())
    yield Case("global-size.tar", pax(record("size", str(1 << 40)), b"g") + tail(), True)
    for size in (1 << 40, 1 << 62, 1 << 80, 605 * 10**6):
        yield Case(f"claims-{size}.tar", header("a.png", size) + tail())
    for size in (-512, -1024, -1, -(1 << 40)):
        yield Case(f"negative{size}.tar", member("a.png", honest()) + header("b.png", size) + tail())
    yield Case("negative-octal.tar", _negative_octal() + tail())
    kinds = {"hard": b"1", "soft": b"2", "character": b"3", "block": b"4", "pipe": b"6", "unknown": b"Z"}
    links = b"".join(header(f"{name}.png", 0, kind, linkname="/dev/zero") for name, kind in kinds.items())
    yield Case("links.tar", links + tail(), True)
    yield Case("self-link.tar", header("a.png", 0, b"2", linkname="a.png") + tail(), True)
    names = ["\x1b[31mred\x07.png", "[bold red]x[/nothing].png", "a\nb\r.png", "../../../etc/a.png", "/abs.png"]
    names += ["\u202egnp.a.png"]
    yield Case("names.tar", b"".join(member(name, b"no picture") for name in names) + tail(), True)
    yield Case("bytes.tar", member("b\udcff\udcfe.png", b"no picture") + tail(), True)
    deep = member("long", b"d/" * 5000 + b"a.png\0", b"L") + member("d", b"x")
    yield Case("deep-name.tar", deep + tail(), True)
    yield Case("empty-members.tar", b"".join(header(f"{i}.png") for i in range(2000)) + tail(), True)
    yield Case("nested.tar", member("inner.tar.png", member("a.png", honest()) + END) + tail(), True)
    yield Case("cut.tar", (member("a.png", honest()) + tail())[:3000])
    yield Case("no-end.tar", member("a.png", honest()))
    yield Case("empty.tar", b"")
    yield Case("page.tar", b"<html>404 Not Found</html>" * 100)


def _negative_octal() -> bytes:
    block = bytearray(header("b.png", 0))
    block[124:136] = b"-0000001000\0"
    return summed(block)


def bombs(mib: int = 900) -> Iterator[Case]:
    """Little that unpacks to much."""
    size = mib * MIB

    def zeros(name: str, start: bytes, many: int, size: int = size) -> list[bytes | int]:
        return [part for i in range(many) for part in (header(f"{i}{name}", size) + start, size - len(start))]

    yield Case("zeros.tgz", lambda: packed(*zeros(".png", b"", 2), tail()), True)
    # Below the limit of a picture: these are read, and sent to decoding processes.
    for kind, start in (("png", b"\x89PNG\r\n\x1a\n"), ("jpg", b"\xff\xd8\xff\xe0"), ("bmp", b"BM")):
        parts = zeros(f".{kind}", start, 3, size // 2)
        yield Case(f"{kind}.tgz", lambda parts=parts: packed(*parts, tail()), True)
    yield Case("text-first.tgz", lambda: packed(header("a.txt", size), size, tail()), True)
    yield Case("many-zeros.tgz", lambda: packed(*zeros(".gif", b"GIF89a", 60, 16 * MIB), tail()), True)


def gzips() -> Iterator[Case]:
    """Damage around the archive."""
    good = gzip.compress(tail(), mtime=0)
    yield Case("cut.tgz", good[:-2000])
    yield Case("no-checksum.tgz", good[:-8])
    yield Case("wrong-checksum.tgz", good[:-8] + bytes(8))
    yield Case("garbage-behind.tgz", good + b"x" * 1000, True)
    yield Case("twice.tgz", gzip.compress(good))
    yield Case("empties.tgz", gzip.compress(b"", mtime=0) * 20_000 + good, True)
    named = good[:3] + b"\x08" + good[4:10] + b"n" * 200_000 + b"\0" + good[10:]
    yield Case("file-name.tgz", named, True)
    yield Case("not-packed.tgz", tail())
    yield Case("empty.tgz", b"")


def thrift(*fields: tuple[int, Any]) -> bytes:
    """A structure in the compact protocol: int is i64 (in `I32` i32), bytes binary, tuple a structure, list a list."""
    out, last = bytearray(), 0
    for number, value in fields:
        out.append((number - last) << 4 | _kind(value))
        last = number
        out += _encoded(value)
    return bytes(out) + b"\0"


class I32(int):
    """A number of 32 bits."""


def _kind(value: Any) -> int:
    return 5 if isinstance(value, I32) else 6 if isinstance(value, int) else {bytes: 8, list: 9, tuple: 12}[type(value)]


def _encoded(value: Any) -> bytes:
    if isinstance(value, int):
        return varint(value << 1 if value >= 0 else (-value << 1) - 1)
    if isinstance(value, bytes):
        return varint(len(value)) + value
    if isinstance(value, list):
        return bytes([len(value) << 4 | _kind(value[0])]) + b"".join(map(_encoded, value))
    return thrift(*value)


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def table(pages: list[tuple[int, int, bytes | bytearray, int]], rows: int, claims: int | None = None) -> bytes:
    """A Parquet file of one column `image` in one row group; pages are (kind, values, data, encoding), zstd.

    `claims` is what the footer has for the unpacked bytes (None: the truth).
    """
    out, unpacked, places = bytearray(b"PAR1"), 0, {}
    for kind, values, data, encoding in pages:
        small = bytes(pa.Codec("zstd").compress(data))
        about = ((1, I32(values)), (2, I32(encoding))) + (((3, I32(3)), (4, I32(3))) if kind == 0 else ())
        fields = (1, I32(kind)), (2, I32(len(data))), (3, I32(len(small))), (5 if kind == 0 else 7, about)
        places.setdefault(kind, len(out))
        out += thrift(*fields) + small
        unpacked += len(data)
    size = len(out) - 4
    column = [(1, I32(6)), (2, [I32(0), I32(8)]), (3, [b"image"]), (4, I32(6)), (5, rows)]
    column += [(6, unpacked if claims is None else claims), (7, size), (9, places[0])]
    column += [(11, places[2])] if 2 in places else []
    schema = [((4, b"schema"), (5, I32(1))), ((1, I32(6)), (3, I32(0)), (4, b"image"))]
    group = ((1, [((2, 4), (3, tuple(column)))]), (2, unpacked), (3, rows))
    footer = thrift((1, I32(1)), (2, schema), (3, rows), (4, [group]))
    return bytes(out) + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def repeated(count: int, width: int = 1) -> bytes:
    """Indices into a dictionary: all 0."""
    return bytes([width]) + varint(count << 1) + bytes([0])


def value(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def zeros(mib: int, *more: bytes) -> bytearray:
    """So many zeros as a value, and then others. Memory that is not written to takes none."""
    tail = b"".join(map(value, more))
    data = bytearray(4 + mib * MIB + len(tail))
    data[:4] = (mib * MIB).to_bytes(4, "little")
    data[len(data) - len(tail) :] = tail
    return data


def tables(mib: int = 900) -> Iterator[Case]:
    """Parquet files that unpack to much, and damaged ones."""

    def dictionary(data: bytes | bytearray, values: int, rows: int, claims: int | None = None) -> bytes:
        return table([(2, values, data, 0), (0, rows, repeated(rows), 8)], rows, claims)

    yield Case("good.parquet", table([(0, 1, value(honest()), 0)], 1), True)
    yield Case("one-value.parquet", dictionary(zeros(600), 1, 1000))
    yield Case("lies.parquet", dictionary(zeros(600), 1, 1000, claims=1000))
    yield Case("one-of-many.parquet", dictionary(zeros(min(mib, 500), *[b"x"] * 9), 10, 6, claims=1000))
    yield Case("repeats.parquet", dictionary(zeros(100, b"x"), 2, 8))
    yield Case("page.parquet", table([(0, 16, zeros(mib // 2, *[b"x"] * 15), 0)], 16))
    yield Case("empties.parquet", dictionary(value(b""), 1, 200_000_000))
    plain = io.BytesIO()
    rows = [{"bytes": honest(), "path": "x" * MIB}] * 40
    pq.write_table(pa.table({"image": rows}), plain, compression="zstd")
    yield Case("paths.parquet", plain.getvalue())
    good = table([(0, 1, value(honest()), 0)], 1)
    size = len(pa.Codec("zstd").compress(value(honest())))
    # pyarrow reads 32 bits of a size
    yield Case("wide.parquet", good.replace(_encoded(I32(size)), _encoded(I32(size + (1 << 32))), 1))
    yield Case("cut.parquet", good[:-200])
    yield Case("footer.parquet", good[:-8] + (1 << 31).to_bytes(4, "little") + b"PAR1")
    yield Case("empty.parquet", b"")
    yield Case("magic.parquet", b"PAR1PAR1")


def mutation(index: int, good: dict[str, bytes], dice: random.Random) -> Case:
    """A good archive with flipped bits, noise, a hole, a piece of another, or a cut tail."""
    name = dice.choice(list(good))
    data = good[name]
    position = dice.randrange(1, len(data))
    way = dice.choice(("flips", "noise", "hole", "splice", "cut", "header"))
    if way != "header":
        return Case(f"{index}-{way}-{name}", damage(data, way, position, good, dice))
    if not name.endswith(".tar"):
        return Case(f"{index}-cut-{name}", data[:position])
    # A field of a header with a checksum that fits: what a reader believes.
    changed, start = bytearray(data), position // 512 * 512
    block = changed[start : start + 512].ljust(512, b"\0")
    at = dice.choice((0, 100, 124, 156, 157, 345, 386, 482))
    block[at : at + 12] = dice.choice((dice.randbytes(12), b"7" * 12, b"\xff" * 12, bytes(12)))[: 512 - at]
    block[156:157] = dice.choice((b"0", b"L", b"x", b"g", b"S", b"5", block[156:157]))
    changed[start : start + 512] = summed(block)
    return Case(f"{index}-{way}-{name}", bytes(changed))


def originals() -> dict[str, bytes]:
    """Good archives of every kind."""
    found = {}
    for name, kind in (("ustar", tarfile.USTAR_FORMAT), ("gnu", tarfile.GNU_FORMAT), ("pax", tarfile.PAX_FORMAT)):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
            for member in ("a.png", "folder/b.png", f"{'long' * 20}/{'name' * 20}.png", "c.txt"):
                info = tarfile.TarInfo(member)
                info.size = len(honest())
                info.mtime = 1.5 if name == "pax" else 1
                archive.addfile(info, io.BytesIO(honest()))
        found[f"{name}.tar"] = stream.getvalue()
        found[f"{name}.tgz"] = gzip.compress(stream.getvalue(), mtime=0)
    for compression in ("none", "snappy", "zstd"):
        stream = io.BytesIO()
        pq.write_table(pa.table({"image": [honest()] * 3 + [None]}), stream, compression=compression, row_group_size=2)
        found[f"{compression}.parquet"] = stream.getvalue()
    return found


def cases(count: int, seed: int, mib: int = 900) -> Iterator[Case]:
    yield from tars()
    yield from gzips()
    yield from bombs(mib)
    yield from tables(mib)
    dice, good = random.Random(seed), originals()
    yield from (mutation(index, good, dice) for index in range(count))


def run(count: int, seed: int, folder: Path, workers: int = 1, mib: int = 900) -> Report:
    """Write the archives into `folder`, embed them in a child process and judge it."""
    made = []
    for case in cases(count, seed, mib):
        path = folder / case.name
        assert not path.exists(), case.name
        path.write_bytes(case.make if isinstance(case.make, bytes) else case.make())
        made.append(case)
    report = Report(len(made))
    command = [sys.executable, __file__, "--child", str(folder), "--workers", str(workers)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    except subprocess.TimeoutExpired:
        report.problems.append("the child hung")
        return report
    if found.returncode or "Traceback" in found.stderr:
        report.problems.append(f"the child ended with {found.returncode}: {found.stderr[-4000:]}")
        return report
    answer = json.loads(found.stdout)
    report.pictures, report.failures, report.mib = answer["pictures"], answer["failures"], answer["mib"]
    for who, most in report.mib.items():
        if most > MAX_MIB:
            report.problems.append(f"{who}: {most:.0f} MiB")
    for case in made:
        tail = f"{case.name}/0" if case.name.endswith(".parquet") else f"{case.name}/{HONEST}"
        if case.honest and tail not in answer["same"]:
            report.problems.append(f"{case.name}: its picture was not found, or has other bits")
        if not case.honest and not any(name.startswith(case.name) for name in answer["named"]):
            report.problems.append(f"{case.name}: neither a picture nor a failure")
    return report


def child(folder: Path, workers: int, **_: int) -> None:
    """Embed a good archive, then all; tell what came of them and the most memory there was."""
    import csv
    import resource

    import torch

    from veca import Veca, VecaConfig
    from veca.embed import EmbedSettings, embed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Veca(VecaConfig(embed_dim=32, depth=2, num_heads=1)).eval()
    how: dict[str, Any] = {"model": model, "model_name": "tiny", "settings": EmbedSettings(cores=8, size=32)}
    how |= {"workers": workers, "progress": False}

    def most() -> list[float]:
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return [resource.getrusage(who).ru_maxrss / unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]

    out = folder / "out"
    out.mkdir()
    (out / "good.tar").write_bytes(tail())
    embed(out / "good.tar", out / "good.parquet", **how)
    (want,) = pq.read_table(out / "good.parquet")["cls"].to_pylist()
    before = most()
    globs = [str(folder / f"*{suffix}") for suffix in (".tar", ".tar.gz", ".tgz", ".parquet")]
    report = embed(globs, out / "all.parquet", **how)
    rows = pq.read_table(out / "all.parquet", columns=["path", "cls"]).to_pylist()
    with open(out / "all.parquet.failures.csv", newline="", encoding="utf-8") as file:
        failures = {row["path"]: row["error"] for row in csv.DictReader(file)}
    at = len(str(folder)) + 1
    answer = {
        "pictures": report.pictures,
        "failures": {name[at:]: why for name, why in failures.items()},
        "same": [row["path"][at:] for row in rows if row["cls"] == want],
        "named": [name[at:] for name in (*failures, *(row["path"] for row in rows))],
        "mib": dict(zip(("process", "decoding"), (b - a for a, b in zip(before, most(), strict=True)), strict=True)),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    sys.exit(run_script(__doc__, run, child, count=200, seed=0, workers=1))
