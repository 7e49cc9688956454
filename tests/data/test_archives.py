"""Archives, tables and folders that nobody vouches for: what they hold is found, and nothing multiplies."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import tarfile
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuzz_archives as fuzz
import pytest
from fuzz_archives import HONEST, MIB, header, honest, member, packed, pax, record, tail

from veca.data import parquet
from veca.data import records as record_stream
from veca.data.index import ImageIndex
from veca.data.records import decode_items
from veca.data.remote import read_span
from veca.data.sources import Item, count_images, counting_images, iter_items, shard_items
from veca.data.tar import HEADER_BYTES, TarReader, _parse_usual, iter_members
from veca.data.workers import WorkerPool
from veca.embed import EmbedSettings, embed
from veca.model import Veca


def test_hostile_archives_neither_end_the_run_nor_fill_memory(tmp_path: Path) -> None:
    report = fuzz.run(60, 0, tmp_path, workers=1, mib=160)
    assert report.problems == []
    assert report.pictures >= 60
    assert max(report.mib.values()) < 1024


def of_tarfile(data: bytes) -> list[tuple[str, str, int, int]]:
    found = []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for each in archive:
            kind = "folder" if each.isdir() else "file" if each.isfile() else "other"
            found.append((each.name, kind, each.offset_data, each.size if kind == "file" else 0))
    return found


def of_ours(file: Any) -> list[tuple[str, str, int, int]]:
    return [(each.name.rstrip("/"), each.kind, each.offset, each.size) for each in iter_members(TarReader(file))]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_tarfile(kind: int) -> None:
    stream = io.BytesIO()
    names = ["a.png", "ünï/cøde.png", "d/" * 40 + "deep.png", f"{'e' * 80}/{'f' * 90}.png", "b\udce9.png"]
    names += [] if kind == tarfile.USTAR_FORMAT else [f"{'long' * 30}/" * 5 + "g.png"]
    with tarfile.open(fileobj=stream, mode="w", format=kind, pax_headers={"comment": "of all"}) as archive:
        for number, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = 700 * number, 1.5 if kind == tarfile.PAX_FORMAT else 1
            archive.addfile(info, io.BytesIO(bytes(info.size)))
        for number, type in enumerate((tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE)):
            info = tarfile.TarInfo(f"special{number}")
            info.type, info.linkname = type, "to/a.png"
            archive.addfile(info)
        archive.addfile(tarfile.TarInfo("last.png"))
    found = of_tarfile(stream.getvalue())
    assert len(found) == len(names) + 5
    assert of_ours(io.BytesIO(stream.getvalue())) == found
    assert of_ours(gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(stream.getvalue())))) == found


def usual_headers() -> list[bytes]:
    """Headers of a file as Python, GNU tar (with a large user number), libarchive and Go write them."""
    blocks = []
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT):
        info = tarfile.TarInfo(f"{'folder' * 14}/photo.png" if kind == tarfile.USTAR_FORMAT else "photo.png")
        info.size, info.uid, info.mtime = 61_234, 1000 if kind == tarfile.USTAR_FORMAT else 1 << 30, 1_700_000_000
        blocks.append(info.tobuf(kind))
    libarchive = bytearray(blocks[0])
    libarchive[100:148] = b"000644 \0" + b"001750 \0" * 2 + b"00000167462 14524532000 "
    go = bytearray(blocks[0])
    go[329:345] = bytes(16)
    long_name, records = header("././@LongLink", 120, b"L"), header("PaxHeader/photo.png", 300, b"x")
    return [*blocks, fuzz.summed(libarchive), fuzz.summed(go), long_name, records]


def test_headers_parsed_by_a_pattern_are_those_of_tarfile() -> None:
    """With fields and bits changed at random, and with checksums that fit or do not: the same, or left to tarfile."""
    dice, good, parsed = random.Random(0), usual_headers(), 0
    assert all(_parse_usual(block) for block in good)
    fields = [(0, 100), (100, 124), (124, 136), (136, 148), (156, 157), (157, 345), (329, 345), (345, 500), (500, 512)]
    values = [b"\0", b" ", b"0", b"7", b"8", b"-", b"_", b"/", b"\x80", b"\xff", b"o", "ü".encode(), b"\n"]
    for _ in range(20_000):
        block = bytearray(dice.choice(good))
        for start, end in dice.sample(fields, dice.choice((0, 1, 2))):
            at, value = dice.randrange(start, end), dice.choice([*values, dice.randbytes(12)])
            block[at : at + len(value)] = value[: 512 - at]
        block = bytearray(fuzz.summed(block)) if dice.random() < 0.8 else block
        if dice.random() < 0.3:
            block[dice.randrange(148, 156)] = dice.choice(b"01234567 \0x")
        ours = _parse_usual(bytes(block))
        if ours:
            parsed += 1
            info = tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
            assert ours == (info.type, info.name.encode("utf-8", "surrogateescape"), info.size), bytes(block)
    assert 5_000 < parsed < 15_000
    assert _parse_usual(good[0][:-1]) is None  # the archive ends there
    assert _parse_usual(fuzz.summed(bytearray(b"\xff" * 100 + good[0][100:345] + b"\xff" * 155 + good[0][500:])))


def test_sizes_of_many_gigabytes_are_followed(tmp_path: Path) -> None:
    """As large files have them: in base 256, or as a PAX record."""
    size = 9 << 30
    for start in (header("a.bin", size), pax(record("size", str(size))) + header("a.bin")):
        with open(tmp_path / "s.tar", "wb") as file:
            file.write(start)
            file.seek(size, os.SEEK_CUR)
            file.write(tail())
        (item,) = shard_items(str(tmp_path / "s.tar"))
        assert item.span is not None
        assert read_span(item.path, *item.span) == honest()


@pytest.mark.parametrize("suffix", [".tar", ".tgz"])
def test_a_member_is_measured_before_it_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"s{suffix}"
    data = header("a.png", 65 * MIB) + bytes(65 * MIB) + tail()
    path.write_bytes(packed(data) if suffix == ".tgz" else data)
    tracemalloc.start()
    found = list(iter_items([str(path)], max_pixels=32 * 32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [item.name for item in found] == [f"{path}/a.png", f"{path}/{HONEST}"]
    assert "68,157,440 bytes in an archive; at most 67,117,056 are read" in found[0].error
    assert not found[1].error
    assert peak < 8 * MIB
    assert not any(item.error for item in iter_items([str(path)], max_pixels=10**6))


@pytest.mark.parametrize("kind", [b"L", b"x"])
def test_a_header_may_be_a_mebibyte(tmp_path: Path, kind: bytes) -> None:
    """Beyond that its member is an error, and the next one is read."""

    def shard(size: int) -> str:
        text = HONEST.encode() + bytes(size - len(HONEST))
        if kind == b"x":
            text = record("path", HONEST)
            text += record("comment", "v" * (size - len(text) - 20))
        path = tmp_path / f"{size}.tar"
        path.write_bytes(member("long", text, kind) + member("a", honest()) + tail())
        return str(path)

    names = [item.name for item in iter_items([shard(HEADER_BYTES - 100)])]
    assert [os.path.basename(name) for name in names] == [HONEST, HONEST]
    bad, good = iter_items([shard(HEADER_BYTES + 1000)])
    assert "a header of 1,0" in bad.error
    assert "at most 1,048,576 are read" in bad.error
    assert good.span is not None


def test_training_and_probes_read_the_same_members(tmp_path: Path) -> None:
    (case,) = (case for case in fuzz.tars() if case.name == "sparse.tar")
    assert isinstance(case.make, bytes)
    (tmp_path / "s.tar").write_bytes(case.make)
    found = ImageIndex.build([str(tmp_path / "s.tar")], progress=False)
    assert len(found) == 1
    assert found.read(0) == honest()
    assert len(found.problems) == 16
    assert "a sparse file in an archive" in found.problems[0][1]


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """Folders in each other, deeper than Python can recurse, with a picture in the deepest."""
    here = os.open(tmp_path, os.O_RDONLY)
    root = here
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        if here != root:
            os.close(here)
        here = below
    with open(os.open("a.png", os.O_WRONLY | os.O_CREAT, dir_fd=here), "wb") as file:
        file.write(honest())
    os.close(here)
    os.close(root)
    yield tmp_path
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # what Python has for it recurses


def test_folders_may_be_deep(deep: Path) -> None:
    want = str(deep / "/".join(["d"] * 1500) / "a.png")
    for source in (str(deep), f"{deep}/**", f"{deep}/**/*.png", f"{deep}/d/**/d/**/a.*"):
        assert [item.name for item in iter_items([source])] == [want]
    assert list(iter_items([f"{deep}/**/e/**"])) == []


def test_paths_that_are_too_long_are_failures(tmp_path: Path, tiny: Veca) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / HONEST).write_bytes(honest())
    here = os.open(tmp_path / "p", os.O_RDONLY)
    for _ in range(30):  # 6,000 characters
        os.mkdir("n" * 200, dir_fd=here)
        below = os.open("n" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        settings = EmbedSettings(cores=8, size=32)
        report = embed(
            tmp_path / "p", tmp_path / "f.parquet", model=tiny, model_name="t", settings=settings, progress=False
        )
        assert report[:2] == (1, 1)
        assert "folder cannot be listed: File name too long" in Path(f"{report.out}.failures.csv").read_text()
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "p"], check=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_bytes_on_their_way_to_decoding_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    path = tmp_path / "s.tgz"
    sizes = [60_000, 10, 200_000, *[30_000] * 20, 10, 150_000, 150_000]
    path.write_bytes(packed(*(member(f"{i:02}.bmp", bytes(size)) for i, size in enumerate(sizes)), tail()))
    monkeypatch.setattr(record_stream, "_SENT_BYTES", 100_000)
    sent: list[int] = []
    seen = []

    monkeypatch.setattr(record_stream, "TASK_IMAGES", 1)

    class Watched(WorkerPool[Any]):
        def __init__(self, function: Any, tasks: Iterator[Any], *options: Any, **more: Any) -> None:
            super().__init__(function, self.watch(tasks), *options, **more)

        def watch(self, tasks: Iterator[Any]) -> Iterator[Any]:
            for task in tasks:
                if task is not None:
                    items = map(Item._make, zip(*task.fields, strict=True))
                    sent.append(sum(len(item.data or b"") for item in items))
                seen.append((-1 if task is None else task.number, sum(sent)))
                yield task

        def __next__(self) -> Any:
            if (result := super().__next__()) is not None:
                sent.pop(0)
            return result

    monkeypatch.setattr(record_stream, "WorkerPool", Watched)
    with decode_items(iter_items([str(path)]), 32, "crop", 10**6, workers) as records:
        found = list(records)
    assert [record.name for record in found] == [item.name for item in iter_items([str(path)])]
    assert [record.pixels is not None for record in found] == [*[False] * len(sizes), True]
    large = {item: size for item, size in seen if item >= 0 and size > 100_000}
    assert large == {2: 200_000, 24: 150_000, 25: 150_000}, "larger ones go alone"
    assert max(size for _, size in seen if size <= 100_000) >= 60_000
    if workers:
        assert len(seen) > len(sizes) + 1, "while there is enough on its way, nothing is sent"


def test_rows_that_repeat_a_value_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    rows = 4000
    path.write_bytes(fuzz.table([(2, 1, fuzz.value(honest()), 0), (0, rows, fuzz.repeated(rows), 8)], rows))
    assert sum(1 for _ in iter_items([str(path)])) == rows
    monkeypatch.setattr(parquet, "_REPEATED_BYTES", 1000)
    *found, last = iter_items([str(path)])
    assert 64 <= len(found) < 100
    assert all(item.data == honest() for item in found)
    assert "its rows repeat the same values" in last.error


def test_a_row_group_that_is_refused_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    rows = [honest(), honest(), bytes(200_000), honest(), honest(), honest()]
    pq.write_table(pa.table({"image": rows}), path, row_group_size=2, use_dictionary=False)
    monkeypatch.setattr(parquet, "PAGE_BYTES", 100_000)
    found = list(iter_items([str(path)]))
    assert [os.path.basename(item.name) for item in found] == ["0", "1", "2", "4", "5"]
    assert [item.data == honest() for item in found] == [True, True, False, True, True]
    assert "rows 2 to 3 are not read: a page of 20" in found[2].error
    assert "smaller row groups" in found[2].error
    monkeypatch.setattr(parquet, "PAGE_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "VALUE_BYTES", 150_000)
    found = list(iter_items([str(path)]))
    assert [item.data == honest() for item in found] == [True, True, False, True, True, True]
    assert "200,000 bytes in a table; at most 150,000 are read" in found[2].error


def test_compressed_shards_are_counted_only_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "s.tgz").write_bytes(packed(tail()))
    (tmp_path / "s.tar").write_bytes(member("a.png", honest()) + tail())
    assert count_images([str(tmp_path / "s.tar")], unpack=False) == 2
    assert count_images([str(tmp_path / "s.tar"), str(tmp_path / "s.tgz")], unpack=False) is None
    assert count_images([str(tmp_path / "s.tar"), str(tmp_path / "s.tgz")]) == 3


def test_images_are_counted_in_the_background(tmp_path: Path) -> None:
    (tmp_path / "s.tgz").write_bytes(packed(tail()))
    (tmp_path / "s.tar").write_bytes(member("a.png", honest()) + tail())
    (tmp_path / "b.png").write_bytes(honest())
    counted, known = list[int](), threading.Event()
    with counting_images([str(tmp_path), str(tmp_path / "s.tar")], lambda n: (counted.append(n), known.set())):
        assert known.wait(10)
    assert counted == [3]
    for unknown in ("s.tgz", "missing.tar"):
        with counting_images([str(tmp_path / unknown)], counted.append):
            pass
    assert counted == [3]


def test_counting_ends_with_its_block(tmp_path: Path) -> None:
    counted = list[int]()
    (tmp_path / "s.tar").write_bytes(b"".join(header(f"{i}.png") for i in range(100_000)))
    threads = threading.active_count()
    with counting_images([str(tmp_path / "s.tar")], counted.append):
        pass
    assert threading.active_count() == threads
    assert counted == []


def test_reading_without_pictures_is_shown(
    tmp_path: Path, tiny: Veca, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "words [only].tgz"
    path.write_bytes(packed(header("a.txt", 64 * MIB), 64 * MIB, tail()))
    monkeypatch.setattr("veca.utils.console._SILENT_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    for progress in (True, False):
        report = embed(
            path, tmp_path / f"{progress}.parquet", model=tiny, model_name="t",
            settings=EmbedSettings(cores=8, size=32), progress=progress,
        )  # fmt: skip
        assert report.pictures == 1
        said = capsys.readouterr().err
        assert ("reading words [only].tgz: 0.1 GB" in said) == progress
        assert ("1/?" in said) == progress
