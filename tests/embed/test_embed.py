"""`veca.embed.run`: what it reads, what it writes, and that nothing stops it from finishing the job."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fsspec.implementations.memory import MemoryFile
from PIL import Image
from sample_images import noise_png
from typer.testing import CliRunner

import veca
from veca import Veca, VecaConfig, images
from veca.cli.main import app
from veca.data import records, sources
from veca.embed import EmbedError, EmbedReport, EmbedSettings, batches, embed, partitions
from veca.embed import run as engine
from veca.embed.partitions import PartitionFolder, RunTotals
from veca.embed.run import describe_features

SETTINGS = EmbedSettings(cores=8, size=32, batch=2, decode="pillow")


@pytest.fixture(scope="module")
def model() -> Veca:
    return _model()


def _model(seed: int = 0) -> Veca:
    torch.manual_seed(seed)
    return Veca(VecaConfig(embed_dim=32, depth=2, num_heads=1)).eval()


@pytest.fixture(autouse=True)
def small_partitions(monkeypatch):
    monkeypatch.setattr(batches, "PART_IMAGES", 4)
    monkeypatch.setattr(partitions, "PARTITION", 4)


@pytest.fixture
def one_partition(monkeypatch):
    """All images in one partition, of parts of four."""
    monkeypatch.setattr(partitions, "PARTITION", 1000)


@pytest.fixture
def photos(tmp_path) -> Path:
    """Eleven pictures of three shapes in nested folders, and one that is broken."""
    for i in range(11):
        path = tmp_path / "photos" / f"class{i % 2}" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(noise_png(i, 48 + 16 * (i % 3), 32))
    (tmp_path / "photos" / "class0" / "03.jpg").write_bytes(b"not a picture")
    return tmp_path / "photos"


def shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def go(inputs, out, model, settings: EmbedSettings = SETTINGS, **options) -> EmbedReport:
    return embed(
        inputs, out, model=model, model_name="tiny", settings=settings, **{"progress": False, "workers": 0, **options}
    )


def paths(out: Path) -> list[str]:
    return pq.read_table(out, columns=["path"])["path"].to_pylist()


def failures(out: Path) -> dict[str, str]:
    with open(f"{out}.failures.csv", newline="") as file:
        return {row["path"]: row["error"] for row in csv.DictReader(file)}


def expected(path, model, settings: EmbedSettings):
    image = images.fit_image(images.open_image(path), settings.size, settings.fit)
    with torch.no_grad():
        return model(images.normalize(images.to_tensor(image)[None]), cores=settings.cores)


@pytest.mark.parametrize("fit", ["crop", "keep"])
def test_features_are_those_of_the_model(photos, tmp_path, model, fit):
    settings = EmbedSettings(cores=8, size=32, batch=2, dense=True, fit=fit, save_dtype="float32", decode="pillow")
    report = go(photos, tmp_path / "f.parquet", model, settings)
    assert report[:3] == (11, 1, 0)
    assert report.out == tmp_path / "f.parquet"
    rows = pq.read_table(report.out).to_pylist()
    assert len(rows) == 11
    for row in rows:
        want = expected(row["path"], model, settings)
        assert (row["rows"], row["columns"], row["cores"]) == (*want.grid, 8)
        assert (row["width"], row["height"]) == Image.open(row["path"]).size
        torch.testing.assert_close(torch.tensor(row["cls"]), want.cls[0], atol=1e-5, rtol=1e-4)
        patches = torch.from_numpy(np.frombuffer(row["patches"], "<f4").copy()).unflatten(0, (-1, 32))
        torch.testing.assert_close(patches, want.patches[0], atol=1e-5, rtol=1e-4)
    assert len({row["columns"] for row in rows}) == (3 if fit == "keep" else 1)


def test_native_sizes_up_to_a_number_of_patches(tmp_path, model, monkeypatch):
    folder, sizes = tmp_path / "photos", [(64, 40), (200, 90), (31, 500), (64, 40), (96, 96), (97, 96), (8, 8)]
    folder.mkdir()
    for i, (width, height) in enumerate(sizes):
        Image.effect_noise((width, height), 60).convert("RGB").save(folder / f"{i}.png")
    options = {"batch": 2, "dense": True, "save_dtype": "float32", "decode": "pillow"}
    settings = EmbedSettings(cores=8, fit="native", max_patches=36, **options)
    report = go(folder, tmp_path / "f.parquet", model, settings)
    assert (report.pictures, report.shrunk, report.max_patches) == (7, 2, 36)
    rows = pq.read_table(report.out).to_pylist()
    for row, (width, height) in zip(rows, sizes, strict=True):
        grid = tuple(side // 16 for side in images.native_sizes(height, width, 36))
        assert (row["rows"], row["columns"]) == grid
        image = images.load_image(row["path"], None, "native", max_patches=36)
        with torch.no_grad():
            want = model(image[None], cores=8)
        torch.testing.assert_close(torch.tensor(row["cls"]), want.cls[0], atol=1e-5, rtol=1e-4)
    # The count is that of the whole run, however often it was interrupted.
    monkeypatch.setattr(engine, "_SAVE_SECONDS", 0.0)
    interrupted(folder, tmp_path / "g.parquet", model, settings)
    again = go(folder, tmp_path / "g.parquet", model, settings)
    assert again.resumed > 0
    assert again.shrunk == 2
    assert (tmp_path / "g.parquet").read_bytes() == (tmp_path / "f.parquet").read_bytes()
    # Without a number, as many patches as the square of `size` has
    assert go(folder, tmp_path / "h.parquet", model, EmbedSettings(size=96, fit="native")).shrunk == 2
    with pytest.raises(EmbedError, match="max_patches=36: must be None unless fit is 'native'"):
        EmbedSettings(max_patches=36)


@pytest.mark.parametrize("options", [{"dense": True}, {"dense": True, "cells": 2}, {}])
def test_images_of_a_task_run_together_whatever_their_sizes(tmp_path, model, monkeypatch, options):
    folder, draw = tmp_path / "photos", random.Random(0)
    folder.mkdir()
    for i in range(24):
        size = (draw.randint(8, 130), draw.randint(8, 130))
        Image.effect_noise(size, 60).convert("RGB").save(folder / f"{i:02}.png")
    packs, run_pack = [], batches.FeatureModel.run_pack

    def run(self, some):
        packs.append(len(some))
        return run_pack(self, some)

    monkeypatch.setattr(batches.FeatureModel, "run_pack", run)
    settings = EmbedSettings(fit="native", max_patches=36, batch=8, save_dtype="float32", decode="pillow", **options)
    rows = pq.read_table(go(folder, tmp_path / "f.parquet", model, settings).out).to_pylist()
    assert packs == [8, 8, 8]
    for row in rows:
        alone = pq.read_table(go(row["path"], tmp_path / "one.parquet", model, settings, overwrite=True).out)
        (one,) = alone.to_pylist()
        for name in {"cls", "patches"} & row.keys():
            found, want = (np.frombuffer(x, "<f4") if name == "patches" else x for x in (row[name], one[name]))
            np.testing.assert_allclose(found, want, atol=2e-6, rtol=1e-5)
    assert packs == [8, 8, 8]


def test_the_command_says_how_many_images_were_shrunk(tmp_path, model):
    veca.save(model, tmp_path / "model")
    Image.new("RGB", (400, 300)).save(tmp_path / "photo.png")
    options = ["--model", str(tmp_path / "model"), "--workers", "0", "--device", "cpu", "--no-progress", "--overwrite"]
    command = ["embed", str(tmp_path / "photo.png"), "--out", str(tmp_path / "new" / "f.parquet"), *options]
    result = CliRunner().invoke(app, [*command, "--fit", "native", "--max-patches", "20"])
    assert result.exit_code == 0, result.output
    assert f"Made the folder {tmp_path / 'new'}\n" in result.output
    assert "1 image had more than the 20 patches allowed and was shrunk; --max-patches sets the limit" in result.output
    result = CliRunner().invoke(app, [*command, "--size", "64"])
    assert "saw the central square of each image, at 64×64; 1 of 1 was larger. --fit keep or native" in result.output
    assert "Made the folder" not in result.output
    result = CliRunner().invoke(app, [*command, "--size", "64", "--fit", "keep"])
    assert "1 image of 1 larger than 64 px: the model saw a short side of 64; a larger --size" in result.output


def test_the_table_says_what_it_holds(photos, tmp_path, model):
    out = tmp_path / "f.parquet"
    go(photos, out, model, EmbedSettings(size=32, dense=True, save_dtype="float16"))
    schema = pq.read_schema(out)
    assert schema.field("cls").type == pa.list_(pa.field("element", pa.float16(), nullable=False), 32)
    assert schema.field("patches").type == pa.large_binary()
    assert schema.field("width").type == pa.int32()
    about = json.loads(schema.metadata[b"veca"])
    assert about["model"] == "tiny"
    assert (about["cores"], about["size"], about["fit"], about["dim"]) == (64, 32, "crop", 32)
    assert about["provenance"] == {}
    assert len(about["weights"]) == 64


def test_features_at_a_width(photos, tmp_path):
    torch.manual_seed(0)
    model = Veca(VecaConfig(embed_dim=32, depth=2, num_heads=1, mlp_ratio=4.0, widths=(0.5, 1))).eval()
    options = ["--model", str(tmp_path / "model"), "--size", "32", "--cores", "8", "--dense", "--decode", "pillow"]
    veca.save(model, tmp_path / "model")
    for width in ("0.5", "1"):
        out = str(tmp_path / f"{width}.parquet")
        command = ["embed", str(photos), "--out", out, "--width", width, *options, "--workers", "0"]
        assert CliRunner().invoke(app, [*command, "--device", "cpu", "--no-progress"]).exit_code == 3
        table = pq.read_table(out)
        assert json.loads(table.schema.metadata[b"veca"])["width"] == float(width)
        image = images.load_image(table["path"][0].as_py(), 32)[None]
        expected = model(image, 8, width=float(width)).patches[0].detach().half().numpy()
        found = np.frombuffer(table["patches"][0].as_py(), np.float16).reshape(expected.shape)
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    with pytest.raises(EmbedError, match="width=2"):
        EmbedSettings(width=2)


def test_only_what_is_asked_for_is_saved(photos, tmp_path, model):
    go(photos, tmp_path / "f.parquet", model)
    assert "patches" not in pq.read_schema(tmp_path / "f.parquet").names
    go(photos, tmp_path / "d.parquet", model, EmbedSettings(size=32, dense=True, with_global=False))
    assert pq.read_schema(tmp_path / "d.parquet").names[-2:] == ["cores", "patches"]
    with pytest.raises(EmbedError, match="nothing to save"):
        EmbedSettings(with_global=False)


def test_the_global_feature_alone_costs_no_last_patches(photos, tmp_path, model):
    tokens = []
    with model.norm.register_forward_hook(lambda _, __, out: tokens.append(out.shape[1])):
        go(photos, tmp_path / "f.parquet", model)
        assert set(tokens) == {1}
        both = EmbedSettings(cores=8, size=32, batch=2, dense=True, save_dtype="float32", decode="pillow")
        go(photos, tmp_path / "d.parquet", model, both)
        assert set(tokens) == {1, 8 + 4}
    alone, both = (np.stack(pq.read_table(tmp_path / name)["cls"].to_numpy()) for name in ("f.parquet", "d.parquet"))
    np.testing.assert_allclose(alone, both, rtol=1e-4, atol=1e-5)


def test_folders_come_sorted_without_hidden_and_foreign_files(tmp_path, model):
    wanted = ["a.PNG", "b.png", *(f"sub{i}/{j}.png" for i in range(9) for j in "xyz"), "sub9/deep/e.png"]
    for name in (*reversed(wanted), ".hidden.png", ".git/d.png", "sub1/.cache/f.png"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_bytes(noise_png())
    (tmp_path / "p" / "notes.txt").write_text("no picture")
    go(tmp_path / "p", tmp_path / "f.parquet", model)
    assert paths(tmp_path / "f.parquet") == [str(tmp_path / "p" / name) for name in wanted]


@pytest.mark.parametrize(("workers", "progress"), [(0, False), (2, True)])
def test_pictures_in_formats_that_are_not_read_are_counted_once(photos, tmp_path, model, workers, progress):
    go(photos, tmp_path / "before.parquet", model)
    for name in ("a.HEIC", "class0/b.heic", "class0/00.nef", "class1/.hidden.heic", "README.txt", "about.json"):
        (photos / name).write_bytes(b"no matter what")
    with pytest.warns(UserWarning, match="left out") as said:
        go(photos, tmp_path / "f.parquet", model, workers=workers, progress=progress)
    assert [str(each.message) for each in said] == [
        "3 files were left out: .heic (2), .nef (1). Such formats are not read: convert to JPEG or PNG first"
    ]
    assert (tmp_path / "f.parquet").read_bytes() == (tmp_path / "before.parquet").read_bytes()
    with pytest.warns(UserWarning, match=r"^5 files were left out: .heic \(3\), .nef \(2\)"):
        go([photos / "class*/*", f"file://{photos}"], tmp_path / "g.parquet", model)
    for pattern in (f"{photos}/*.[hH]*", f"file://{photos}/*.HEIC"):
        with pytest.raises(EmbedError, match=r"no images there.*1 file was left out: .heic \(1\)"):
            go(pattern, tmp_path / "h.parquet", model)


def test_inputs_keep_their_order_and_named_files_are_always_tried(tmp_path, model):
    (tmp_path / "z.data").write_bytes(noise_png())
    (tmp_path / "a.png").write_bytes(noise_png())
    (tmp_path / "words.txt").write_text("no picture")
    given = [str(tmp_path / name) for name in ("z.data", "words.txt", "a.png", "z.data")]
    report = go(given, tmp_path / "f.parquet", model)
    assert paths(report.out) == [given[0], given[2], given[3]]
    assert list(failures(report.out)) == [given[1]]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.png", ["a.png"]),
        ("**/*.png", ["a.png", "x/b.png", "x/y/c.png"]),
        ("x/**", ["x/b.png", "x/y/c.png"]),
        ("*/?.png", ["x/b.png"]),
        ("**/y/*", ["x/y/c.png"]),
        ("**/**/[bc].png", ["x/b.png", "x/y/c.png"]),
    ],
)
def test_globs_match_as_in_a_shell(tmp_path, model, pattern, found):
    for name in ("a.png", "x/b.png", "x/y/c.png", "x/y/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(noise_png())
    go(str(tmp_path / pattern), tmp_path / "f.parquet", model)
    assert paths(tmp_path / "f.parquet") == [str(tmp_path / name) for name in found]


def test_relative_globs_and_names_with_brackets(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a[1].png", "b.png"):
        Path(name).write_bytes(noise_png())
    go(["*.png", "a[1].png"], "f.parquet", model)
    assert paths(Path("f.parquet")) == ["a[1].png", "b.png", "a[1].png"]


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz"])
def test_shards_give_one_row_per_image(tmp_path, model, suffix):
    members = {
        "0001.png": noise_png(1),
        "0001.cls": b"7",
        "0001.seg.png": noise_png(),
        "0001.depth.PNG": noise_png(),
        "dir.mask/0002.v2.png": noise_png(2),
        "dir/._0002.png": b"left by a Mac",
        "../../etc/0003.png": noise_png(3),
        "0004.png": b"broken",
    }
    path = shard(tmp_path / f"s{suffix}", members)
    report = go(str(tmp_path / f"*{suffix}"), tmp_path / "f.parquet", model)
    assert paths(report.out) == [
        f"{path}/{name}" for name in ("0001.png", "dir.mask/0002.v2.png", "../../etc/0003.png")
    ]
    assert list(failures(report.out)) == [f"{path}/0004.png"]
    cls = pq.read_table(report.out)["cls"].to_pylist()
    for row, seed in zip(cls, (1, 2, 3), strict=True):
        torch.testing.assert_close(
            torch.tensor(row), expected(noise_png(seed), model, SETTINGS).cls[0], atol=1e-5, rtol=1e-4
        )


def rows_of(out: Path, model: Veca, seeds: list[int]) -> None:
    """Check that the global features are those of the pictures that `encoded` makes."""
    cls = pq.read_table(out)["cls"].to_pylist()
    for row, seed in zip(cls, seeds, strict=True):
        want = expected(noise_png(seed), model, SETTINGS).cls[0]
        torch.testing.assert_close(torch.tensor(row), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["binary", "large_binary", "struct"])
@pytest.mark.parametrize("workers", [0, 1])
def test_parquet_columns_of_every_type_are_read(tmp_path, model, kind, workers):
    data = [noise_png(1), b"broken", None, noise_png(2)] + [noise_png(3)] * 20
    values = [{"bytes": each, "path": "x.png"} for each in data] if kind == "struct" else data
    kinds = {
        "binary": pa.binary(),
        "large_binary": pa.large_binary(),
        "struct": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    }
    path = tmp_path / "t.parquet"
    schema = pa.schema({"label": pa.int64(), "photo": kinds[kind]})
    pq.write_table(pa.table({"label": range(24), "photo": values}, schema), path, row_group_size=5)
    report = go(str(tmp_path / "*.parquet"), tmp_path / "out" / "f.parquet", model, workers=workers)
    assert report[:2] == (22, 2)
    assert paths(report.out) == [f"{path}/{row}" for row in (0, *range(3, 24))]
    assert failures(report.out)[f"{path}/2"] == "the row has no picture"
    rows_of(report.out, model, [1, 2, *[3] * 20])


def test_the_column_of_pictures(tmp_path, model):
    path, out = tmp_path / "t.parquet", tmp_path / "f.parquet"
    pq.write_table(pa.table({"left": [noise_png(1)], "right": [noise_png(2)], "text": ["no bytes"]}), path)
    with pytest.raises(ValueError, match=r"not clear; of bytes there are left, right: name one with --column"):
        go(path, out, model)
    with pytest.raises(ValueError, match=r"no column of pictures 'text'; of bytes there are left, right"):
        go(path, out, model, column="text")
    rows_of(go(path, out, model, column="right").out, model, [2])
    pq.write_table(pa.table({"image": [noise_png(3)], "mask": [noise_png(4)]}), path)
    rows_of(go(path, out, model, overwrite=True).out, model, [3])
    pq.write_table(pa.table({"text": ["no bytes"]}), path)
    with pytest.raises(ValueError, match="of bytes it has none"):
        go(path, out, model, overwrite=True)


@pytest.mark.parametrize("place", ["header", "page"])
def test_a_damaged_table_gives_what_it_can(tmp_path, model, place):
    path = tmp_path / "t.parquet"
    table = pa.table({"image": [noise_png(i) for i in range(40)]})
    pq.write_table(table, path, row_group_size=20, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    if place == "header":
        start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    else:
        start = data.index(noise_png(20)) - 4  # its length
    data[start : start + 100] = b"x" * 100
    path.write_bytes(data)
    report = go(path, tmp_path / "f.parquet", model, progress=True)
    if place == "page":
        assert paths(report.out) == [f"{path}/{row}" for row in range(20)]
        assert list(failures(report.out)) == [str(path)]
        assert "damaged table, nothing was read from row 20 on" in failures(report.out)[str(path)]
    else:
        assert paths(report.out) == [f"{path}/{row}" for row in range(20)]
        assert failures(report.out) == {f"{path}/20": "rows 20 to 39 are not read: a broken page header"}
    path.write_bytes(b"PAR1")
    assert go(path, tmp_path / "g.parquet", model, progress=True)[:2] == (0, 1)


@pytest.fixture
def remote(tmp_path) -> Iterator[str]:
    """An address, with files, a shard and a table."""
    fs = fsspec.filesystem("memory")
    for name, seed in (("a/1.png", 1), ("a/b/2.png", 2), ("a/.hidden/3.png", 3), ("a/4.txt", 4)):
        fs.pipe_file(f"/bucket/{name}", noise_png(seed))
    fs.pipe_file("/bucket/s.tar", shard(tmp_path / "s.tar", {"5.png": noise_png(5), "6.png": b"broken"}).read_bytes())
    pq.write_table(pa.table({"image": [noise_png(7)]}), tmp_path / "t.parquet")
    fs.pipe_file("/bucket/t.parquet", (tmp_path / "t.parquet").read_bytes())
    yield "memory://bucket"
    fs.rm("/bucket", recursive=True)


def test_remote_sources_are_embedded(remote, tmp_path, model):
    given = [f"{remote}/a", f"{remote}/*.tar", f"{remote}/t.parquet", f"{remote}/a/1.png"]
    report = go(given, tmp_path / "f.parquet", model, progress=True)
    names = ["a/1.png", "a/b/2.png", "s.tar/5.png", "t.parquet/0", "a/1.png"]
    assert [path.replace("memory:///", "memory://") for path in paths(report.out)] == [f"{remote}/{n}" for n in names]
    assert list(failures(report.out)) == ["memory:///bucket/s.tar/6.png"]
    rows_of(report.out, model, [1, 2, 5, 7, 1])


def test_addresses_with_decoding_processes(photos, tmp_path, model):
    go(photos, tmp_path / "f.parquet", model)
    go(f"file://{photos}", tmp_path / "g.parquet", model, workers=2)
    here, there = (pq.read_table(tmp_path / name) for name in ("f.parquet", "g.parquet"))
    assert there["path"].to_pylist() == [f"file://{path}" for path in here["path"].to_pylist()]
    assert here.drop(["path"]) == there.drop(["path"])
    assert failures(tmp_path / "g.parquet") == {f"file://{k}": v for k, v in failures(tmp_path / "f.parquet").items()}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("memory://nowhere/*.tar", "no images there"),
        ("nosuch://bucket/a", "cannot be listed.*nosuch"),
    ],
)
def test_addresses_without_pictures_are_refused(tmp_path, model, source, message):
    with pytest.raises(ValueError, match=message):
        go(source, tmp_path / "f.parquet", model)


def test_large_remote_files_are_not_fetched(remote, tmp_path, model, monkeypatch):
    monkeypatch.setattr(sources, "MAX_IMAGE_BYTES", 100)
    report = go(f"{remote}/a/1.png", tmp_path / "f.parquet", model)
    assert "bytes; at most 100 are read" in failures(report.out)[f"{remote}/a/1.png"]


@pytest.mark.parametrize(("times", "name"), [(1, "s.tar"), (9, "s.tar"), (1, "t.parquet"), (9, "t.parquet"), (9, "a")])
def test_what_cannot_be_fetched_is_no_damage(remote, tmp_path, model, monkeypatch, times, name):
    left = itertools.chain([True] * times, itertools.repeat(False))
    real, real_bytes = MemoryFile.read, records.read_remote

    def flaky(call, *args):
        if next(left):
            raise ConnectionError("reset by peer")
        return call(*args)

    monkeypatch.setattr("veca.data.remote._RETRY_PAUSES", (0, 0))
    monkeypatch.setattr(MemoryFile, "read", lambda *args: flaky(real, *args))
    monkeypatch.setattr(records, "read_remote", lambda *args: flaky(real_bytes, *args))
    if times == 1:
        assert go(f"{remote}/{name}", tmp_path / "f.parquet", model).pictures == 1
    else:
        with pytest.raises(ValueError, match=r"cannot be read \(ConnectionError: reset by peer\)"):
            go(f"{remote}/{name}", tmp_path / "f.parquet", model)


def cut_in_picture(data: bytes) -> bytes:
    return data[: len(data) // 2]


def cut_at_header(data: bytes) -> bytes:
    second = data.index(b"b.png")
    return data[:second]


def break_header(data: bytes) -> bytes:
    second = data.index(b"b.png")
    return data[:second] + b"x" * 512 + data[second + 512 :]


@pytest.mark.parametrize("damage", [cut_in_picture, cut_at_header, break_header])
def test_a_damaged_shard_gives_what_it_can(tmp_path, model, damage):
    path = shard(tmp_path / "s.tar", {"a.png": noise_png(1), "b.png": noise_png(2), "c.png": noise_png(3)})
    (tmp_path / "later.png").write_bytes(noise_png())
    path.write_bytes(damage(path.read_bytes()))
    report = go([path, tmp_path / "later.png"], tmp_path / "f.parquet", model)
    assert paths(report.out) == [f"{path}/a.png", str(tmp_path / "later.png")]
    reasons = failures(report.out)
    assert "damaged archive" in reasons.pop(str(path))
    within = {f"{path}/b.png": "the archive ends within this picture"}
    assert reasons == (within if damage is cut_in_picture else {})


def test_a_damaged_compressed_shard_gives_what_it_can(tmp_path, model):
    path = shard(tmp_path / "s.tar.gz", {f"{i}.png": noise_png(i) for i in range(4)})
    path.write_bytes(path.read_bytes()[:-6000])
    report = go(path, tmp_path / "f.parquet", model)
    found = paths(report.out)
    assert found == [f"{path}/{i}.png" for i in range(len(found))]
    assert 1 <= len(found) < 4
    assert list(failures(report.out)) == [str(path)]


def test_hostile_shards_neither_fill_memory_nor_follow_links(tmp_path, model):
    secret = tmp_path / "secret.png"
    secret.write_bytes(noise_png())
    with tarfile.open(tmp_path / "links.tar", "w") as archive:
        for kind, name in ((tarfile.SYMTYPE, "soft.png"), (tarfile.LNKTYPE, "hard.png")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(secret)
            archive.addfile(info)
    big = tarfile.TarInfo("big.png")
    big.size = 1 << 40
    (tmp_path / "big.tar").write_bytes(big.tobuf() + b"\0" * 4096)
    header = tarfile.TarInfo("header")
    header.type, header.size = tarfile.XHDTYPE, 1 << 40
    with gzip.open(tmp_path / "header.tar.gz", "wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT if header.size < 8**11 else tarfile.GNU_FORMAT) + b"\0" * 4096)
    shards = [tmp_path / name for name in ("links.tar", "big.tar", "header.tar.gz")]
    tracemalloc.start()
    report = go(shards, tmp_path / "f.parquet", model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.pictures == 0
    reasons = failures(report.out)
    assert "only regular files" in reasons[f"{shards[0]}/soft.png"]
    assert "only regular files" in reasons[f"{shards[0]}/hard.png"]
    assert "1,099,511,627,776 bytes" in reasons[f"{shards[1]}/big.png"]
    assert "header of 1,099,511,627,776 bytes" in reasons[str(shards[2])]
    assert peak < 50 << 20


def test_names_that_are_not_text(tmp_path, model):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / os.fsdecode(b"caf\xe9.png")).write_bytes(noise_png())
    (tmp_path / "p" / 'ünïcode, "quoted".png').write_bytes(b"broken")
    report = go(tmp_path / "p", tmp_path / "f.parquet", model)
    assert report[:2] == (1, 1)
    assert list(failures(report.out)) == [str(tmp_path / "p" / 'ünïcode, "quoted".png')]
    assert paths(tmp_path / "f.parquet") == [str(tmp_path / "p" / "caf\\udce9.png")]


def test_special_files_do_not_block(tmp_path, model):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "a.png").write_bytes(noise_png())
    report = go(tmp_path, tmp_path / "f.parquet", model)
    assert paths(report.out) == [str(tmp_path / "a.png")]
    assert set(failures(report.out)) == {str(tmp_path / "pipe.png"), str(tmp_path / "gone.png")}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nowhere"], "no such file or folder"),
        ([""], "no such file or folder"),
        (["empty"], "no images there"),
        (["empty/*.png"], "no images there"),
        (["nowhere/*.png"], "no images there"),
        (["good.png", "empty.tar"], "no images there"),
        (["shards"], r"'shards/\*.tar'"),
        ([], "nothing to embed"),
    ],
)
def test_inputs_without_pictures_are_refused_before_any_work(tmp_path, model, monkeypatch, names, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("shards").mkdir()
    Path("good.png").write_bytes(noise_png())
    shard(Path("empty.tar"), {"a.txt": b"x"})
    shard(Path("shards/0.tar"), {"a.png": noise_png()})
    with pytest.raises(ValueError, match=message):
        go(names, "out/f.parquet", model)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("out", "settings", "message"),
    [
        ("photos", SETTINGS, "photos holds files that no run of this left, as class0"),
        (
            "f.csv",
            SETTINGS,
            r"unknown kind of file '\.csv'; .* \.parquet, \.safetensors, \.npz or, where it ends with /, a folder",
        ),
        ("f.parquet", EmbedSettings(size=40), "must be a multiple of 16. Nearest: 32"),
        ("f.parquet", EmbedSettings(size=32, cores=65), "from 1 to 64"),
    ],
)
def test_what_cannot_work_is_refused_up_front(photos, tmp_path, model, out, settings, message):
    with pytest.raises(EmbedError, match=message):
        go(photos, tmp_path / out, model, settings)
    assert os.listdir(tmp_path) == ["photos"]


@pytest.mark.parametrize("wrong", [{"size": 0}, {"batch": 2.0}, {"fit": "squeeze"}, {"save_dtype": "int8"}])
def test_invalid_settings_are_refused_by_name(wrong):
    with pytest.raises(EmbedError, match=next(iter(wrong))):
        EmbedSettings(**wrong)


def test_results_do_not_depend_on_the_number_of_workers(photos, tmp_path, model):
    path = shard(tmp_path / "s.tar.gz", {f"{i}.png": noise_png(i) for i in range(5)})
    settings = EmbedSettings(cores=8, size=32, batch=2, dense=True, fit="keep")
    for workers in (0, 1, 2):
        go([photos, path], tmp_path / f"{workers}.parquet", model, settings, workers=workers)
    alone = (tmp_path / "0.parquet").read_bytes()
    assert len(paths(tmp_path / "0.parquet")) == 16
    assert alone == (tmp_path / "1.parquet").read_bytes() == (tmp_path / "2.parquet").read_bytes()
    assert failures(tmp_path / "0.parquet") == failures(tmp_path / "2.parquet")


def test_no_picture_at_all_still_gives_a_whole_file(tmp_path, model):
    (tmp_path / "a.png").write_bytes(b"broken")
    report = go(tmp_path / "a.png", tmp_path / "f.parquet", model, EmbedSettings(size=32, dense=True))
    assert report[:2] == (0, 1)
    assert pq.read_table(report.out).num_rows == 0


class Stop(BaseException):
    """As sudden as Ctrl-C, and no other test can mistake it for something else."""


def counted(real, calls: int):
    """`real`, but call number `calls` raises `Stop`."""
    left = iter(range(calls))

    def call(*args, **kwargs):
        if next(left, None) is None:
            raise Stop
        return real(*args, **kwargs)

    return call


def interrupted(photos, out, model, settings=SETTINGS, count: int = 5, **options) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if options.get("workers"):  # stops before an image of the partition that has the batch
            patch.setattr(batches.PartitionWriter, "_add", counted(batches.PartitionWriter._add, 4 * (count // 3) + 1))
        else:
            patch.setattr(batches, "normalize", counted(batches.normalize, count))
        with pytest.raises(Stop):
            go(photos, out, model, settings, **options)


@pytest.mark.parametrize(("count", "workers"), [*((n, 0) for n in range(9)), (0, 2), (4, 2), (8, 2)])
def test_an_interrupted_run_continues_to_the_same_bytes(photos, tmp_path, model, count, workers):
    settings = EmbedSettings(cores=8, size=32, batch=4, dense=True, fit="keep")
    go(photos, tmp_path / "whole.parquet", model, settings)
    interrupted(photos, tmp_path / "f.parquet", model, settings, count, workers=workers)
    assert not (tmp_path / "f.parquet").exists()
    # Each partition of four takes three batches, for its three shapes; in the first one picture is broken.
    assert len(list((tmp_path / "f.parquet.parts").glob("*.parquet"))) == count // 3
    report = go(photos, tmp_path / "f.parquet", model, settings)
    assert report[:3] == (11, 1, [0, 4, 8][count // 3])
    assert (tmp_path / "f.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert failures(tmp_path / "f.parquet") == failures(tmp_path / "whole.parquet")
    assert not (tmp_path / "f.parquet.parts").exists()


@pytest.mark.parametrize("save_dtype", ["float32", "float16"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("part", [4, 1000])
def test_a_stopped_run_keeps_its_whole_batches(
    photos, tmp_path, model, monkeypatch, one_partition, count, part, save_dtype
):
    monkeypatch.setattr(batches, "PART_IMAGES", part)
    settings = EmbedSettings(cores=8, size=32, batch=2, dense=True, save_dtype=save_dtype)
    go(photos, tmp_path / "whole.parquet", model, settings)
    interrupted(photos, tmp_path / "f.parquet", model, settings, count)
    interrupted(photos, tmp_path / "f.parquet", model, settings, 1)
    assert not list((tmp_path / "f.parquet.parts").glob("0*.parquet"))
    report = go(photos, tmp_path / "f.parquet", model, settings)
    if part == 1000:
        assert report[:3] == (11, 1, 2 * count + 2)  # the two of another batch; one is the broken picture
    assert (tmp_path / "f.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert failures(tmp_path / "f.parquet") == failures(tmp_path / "whole.parquet")
    assert not (tmp_path / "f.parquet.parts").exists()


def test_a_run_stopped_right_after_a_partition_continues(photos, tmp_path, model, monkeypatch):
    with monkeypatch.context() as patch:
        real = RunTotals.add
        patch.setattr(RunTotals, "add", lambda *args: (real(*args), counted(real, 0)()))
        with pytest.raises(Stop):
            go(photos, tmp_path / "f.parquet", model)
    assert go(photos, tmp_path / "f.parquet", model).resumed in (4, 8, 12)  # files are completed beside the run


@pytest.mark.parametrize("part", [4, 1000])
def test_a_killed_run_has_saved_its_images_from_time_to_time(photos, tmp_path, model, monkeypatch, one_partition, part):
    monkeypatch.setattr(batches, "PART_IMAGES", part)
    go(photos, tmp_path / "whole.parquet", model)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_SAVE_SECONDS", 0.0)
        real, saved = PartitionFolder.publish, []

        def publish(folder, path, name):
            if len(saved) == 3:  # the third slice is the last; the one that a stopped run saves fails too
                raise Stop
            saved.append(name)
            real(folder, path, name)

        patch.setattr(PartitionFolder, "publish", publish)
        with pytest.raises(Stop):
            go(photos, tmp_path / "f.parquet", model)
    assert saved == [f"_00000000-{i:04}.parquet" for i in range(3)]
    report = go(photos, tmp_path / "f.parquet", model)
    assert 4 <= report.resumed <= 8
    assert (tmp_path / "f.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert failures(tmp_path / "f.parquet") == failures(tmp_path / "whole.parquet")


@pytest.mark.parametrize("fit", ["crop", "keep"])
def test_a_folder_holds_the_rows_of_the_file(photos, tmp_path, model, monkeypatch, fit):
    """Whether or not its partitions were saved in between, and the same files."""
    path = shard(tmp_path / "s.tar", {f"{i}.png": noise_png(i, 48 + 16 * (i % 2)) for i in range(7)})
    settings = EmbedSettings(cores=8, size=32, batch=2, dense=True, fit=fit)
    go([photos, path], tmp_path / "f.parquet", model, settings)
    report = go([photos, path], tmp_path / "folder", model, settings)
    assert report[:2] == (18, 1)
    assert report.out == tmp_path / "folder"
    names = ["_done.json", "_job.json", *(f"{i:08}.parquet" for i in range(4))]
    assert sorted(os.listdir(tmp_path / "folder")) == sorted(names)
    assert pq.read_table(tmp_path / "folder") == pq.read_table(tmp_path / "f.parquet")
    assert failures(tmp_path / "folder") == failures(tmp_path / "f.parquet")
    with pytest.raises(EmbedError, match=r"folder exists; choose another name.*--overwrite"):
        go([photos, path], tmp_path / "folder", model, settings)
    monkeypatch.setattr(engine, "_SAVE_SECONDS", 0.0)
    go([photos, path], f"{tmp_path}/again.d/", model, settings)
    for name in names[2:]:
        assert (tmp_path / "again.d" / name).read_bytes() == (tmp_path / "folder" / name).read_bytes()
    assert go([photos, path], tmp_path / "folder", model, settings, overwrite=True).resumed == 0
    interrupted([photos, path], tmp_path / "folder", model, settings, overwrite=True)
    assert not (tmp_path / "folder" / "_done.json").exists()
    assert go([photos, path], tmp_path / "folder", model, settings).resumed >= 4
    assert pq.read_table(tmp_path / "folder") == pq.read_table(tmp_path / "f.parquet")


@pytest.mark.parametrize("written", [False, True])
def test_a_run_stopped_while_it_ends_continues_to_the_same_bytes(photos, tmp_path, model, written):
    go(photos, tmp_path / "whole.parquet", model)
    out = tmp_path / "f.parquet"
    with pytest.MonkeyPatch.context() as patch:
        if written:
            patch.setattr(PartitionFolder, "remove", counted(PartitionFolder.remove, 0))
        else:
            patch.setattr(pq, "ParquetFile", counted(pq.ParquetFile, 2))
        with pytest.raises(Stop):
            go(photos, out, model)
    assert out.exists() == written
    assert go(photos, out, model)[:3] == (11, 1, 12)
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    files = [f"{name}.parquet{end}" for name in ("f", "whole") for end in ("", ".failures.csv")]
    assert sorted(os.listdir(tmp_path)) == sorted(["photos", *files])


SCRIPT = """
import sys, time, torch
from veca import Veca, VecaConfig
from veca.embed import EmbedSettings, batches, embed, partitions
from veca.data import records

batches.PART_IMAGES = partitions.PARTITION = 4
torch.set_num_threads(1)
real = records.load_pixels
def slow(*args, **kwargs):
    time.sleep(float(sys.argv[3]))
    return real(*args, **kwargs)
records.load_pixels = slow
torch.manual_seed(0)
model = Veca(VecaConfig(embed_dim=32, depth=2, num_heads=1)).eval()
settings = EmbedSettings(cores=8, size=32, batch=2, decode="pillow")
options = {"model_name": "tiny", "workers": int(sys.argv[4]), "progress": False}
embed(sys.argv[1], sys.argv[2], model=model, settings=settings, **options)
"""


def start(photos, out, pause: float, workers: int) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(photos), str(out), str(pause), str(workers)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_continues_to_the_same_bytes(photos, tmp_path, model, workers):
    """And while it runs, a second run on the same file is refused."""
    go(photos, tmp_path / "whole.parquet", model)
    process = start(photos, tmp_path / "f.parquet", 0.3, workers)
    wait_for(tmp_path / "f.parquet.parts" / "_job.json", process)
    with pytest.raises(veca.VecaError, match="another run"):
        go(photos, tmp_path / "f.parquet", model)
    wait_for(tmp_path / "f.parquet.parts" / "00000000.parquet", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "f.parquet").exists()
    (tmp_path / "f.parquet.parts" / ".new.abcd.part").write_bytes(b"half a partition")
    (tmp_path / ".f.parquet.abcd.part").write_bytes(b"half a file")
    report = go(photos, tmp_path / "f.parquet", model)
    assert report.resumed >= 4
    assert (tmp_path / "f.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith((".", "f."))) == [
        "f.parquet",
        "f.parquet.failures.csv",
    ]


def test_ctrl_c_ends_the_workers_and_keeps_what_is_finished(photos, tmp_path, model):
    process = start(photos, tmp_path / "f.parquet", 0.1, 2)
    wait_for(tmp_path / "f.parquet.parts" / "00000000.parquet", process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in said
    assert len(children) >= 2
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert go(photos, tmp_path / "f.parquet", model).resumed >= 4


def test_a_dead_worker_loses_nothing(photos, tmp_path, model, monkeypatch):
    with monkeypatch.context() as patch:
        real = records.load_pixels

        def deadly(source, *args, **kwargs):
            if str(source).endswith("08.png"):
                deadline = time.monotonic() + 5
                while not any((tmp_path / "f.parquet.parts").glob("*.parquet")) and time.monotonic() < deadline:
                    time.sleep(0.01)  # until the first partition is done
                os.kill(os.getpid(), signal.SIGKILL)
            return real(source, *args, **kwargs)

        patch.setattr(records, "load_pixels", deadly)
        with pytest.raises(EmbedError, match=r"a decoding process died.*--workers.*kept in .*f\.parquet\.parts"):
            go(photos, tmp_path / "f.parquet", model, workers=1)
    go(photos, tmp_path / "whole.parquet", model)
    assert go(photos, tmp_path / "f.parquet", model).resumed >= 4
    assert (tmp_path / "f.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_a_full_disk_keeps_what_is_finished(photos, tmp_path, model, monkeypatch):
    with monkeypatch.context() as patch:
        real, left = pq.ParquetWriter.write_table, iter(range(1))

        def write_table(*args):
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(*args)

        patch.setattr(pq.ParquetWriter, "write_table", write_table)
        with pytest.raises(EmbedError, match=r"No space left on device.* Free some.* 3 finished images are kept"):
            go(photos, tmp_path / "f.parquet", model)
    assert go(photos, tmp_path / "f.parquet", model).resumed >= 4


def test_another_job_is_not_continued(photos, tmp_path, model):
    out = tmp_path / "f.parquet"
    interrupted(photos, out, model)
    with pytest.raises(EmbedError, match=r"size was 32, now 48.*--overwrite"):
        go(photos, out, model, EmbedSettings(cores=8, size=48, batch=2))
    with pytest.raises(EmbedError, match="weights was"):
        go(photos, out, _model(seed=1))
    with pytest.raises(EmbedError, match="inputs was"):
        go([photos, photos], out, model)
    (photos / "class0" / "00a.png").write_bytes(noise_png())
    with pytest.raises(EmbedError, match=r"inputs have changed.*--overwrite"):
        go(photos, out, model)
    (photos / "class0" / "00a.png").unlink()
    assert go(photos, out, model).resumed >= 4


def replaced(path: Path, way: str) -> None:
    """Another file under the same name, of another size or date."""
    about = path.stat()
    if way == "size":
        path.write_bytes(path.read_bytes() + b"more")
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    else:
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))


@pytest.mark.parametrize("way", ["size", "date"])
@pytest.mark.parametrize("where", ["partition", "slice", "shard"])
def test_a_replaced_picture_is_noticed(photos, tmp_path, model, monkeypatch, way, where):
    """Among those of finished partitions, of a partition in progress, or as the shard that holds them."""
    source, victim = photos, photos / "class0" / "00.png"
    if where == "slice":
        monkeypatch.setattr(partitions, "PARTITION", 1000)
    if where == "shard":
        source = victim = shard(tmp_path / "s.tar", {f"{i}.png": noise_png(i) for i in range(11)})
    go(source, tmp_path / "whole.parquet", model)
    interrupted(source, tmp_path / "f.parquet", model)
    before = victim.read_bytes(), victim.stat()
    replaced(victim, way)
    if way == "size":
        with pytest.raises(EmbedError, match=r"the inputs have changed: .* are not those already embedded"):
            go(source, tmp_path / "f.parquet", model, ignore_dates=True)
        victim.write_bytes(before[0])
        os.utime(victim, ns=(before[1].st_atime_ns, before[1].st_mtime_ns))
    else:
        with pytest.raises(EmbedError, match=r"the inputs have changed: .* but other dates.*--ignore-dates"):
            go(source, tmp_path / "f.parquet", model)
    report = go(source, tmp_path / "f.parquet", model, ignore_dates=way == "date")
    assert report.resumed >= 4
    assert (tmp_path / "f.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_pictures_after_those_that_are_done_may_change(photos, tmp_path, model, one_partition):
    interrupted(photos, tmp_path / "f.parquet", model, count=3)
    replaced(photos / "class1" / "09.png", "date")
    (photos / "class1" / "11.png").write_bytes(noise_png(11))
    assert go(photos, tmp_path / "f.parquet", model)[:3] == (12, 1, 6)


def test_a_replaced_remote_file_is_noticed(photos, tmp_path, model):
    fs = fsspec.filesystem("memory")
    fs.put(str(photos), "/bucket/photos", recursive=True)
    try:
        interrupted("memory://bucket/photos", tmp_path / "f.parquet", model)
        fs.pipe_file("/bucket/photos/class0/00.png", noise_png(99))
        with pytest.raises(EmbedError, match="the inputs have changed"):
            go("memory://bucket/photos", tmp_path / "f.parquet", model)
    finally:
        fs.rm("/bucket", recursive=True)


def broken_model(monkeypatch, values: dict[str, float]) -> Veca:
    """A model whose features of the named pictures have these values in them."""
    model = _model()
    real = batches.PartitionWriter._add

    def poison(writer, rows):
        for i, name in enumerate(rows.names):
            if (value := values.get(Path(name).name)) is not None:
                rows.column("cls")[i, 0] = value
        real(writer, rows)

    monkeypatch.setattr(batches.PartitionWriter, "_add", poison)
    return model


def test_features_that_are_not_finite_stop_the_run(photos, tmp_path, monkeypatch):
    go(photos, tmp_path / "whole.parquet", _model())
    with monkeypatch.context() as patch:
        broken = broken_model(patch, {"08.png": float("nan")})
        with pytest.raises(EmbedError, match=r"class0/08\.png: its features are not finite.*--skip-nonf.* 3 finished"):
            go(photos, tmp_path / "f.parquet", broken)
    assert not (tmp_path / "f.parquet").exists()
    report = go(photos, tmp_path / "f.parquet", _model())  # the same weights
    assert report[:3] == (11, 1, 4)
    assert (tmp_path / "f.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("fit", ["crop", "keep"])
def test_features_that_are_not_finite_can_be_failures(photos, tmp_path, monkeypatch, dense, fit):
    settings = EmbedSettings(cores=8, size=32, batch=2, dense=dense, fit=fit)
    go(photos, tmp_path / "whole.parquet", _model(), settings)
    monkeypatch.setattr(batches, "PART_IMAGES", 6)
    monkeypatch.setattr(partitions, "PARTITION", 6)
    model = broken_model(monkeypatch, {"04.png": float("nan"), "05.png": float("inf")})
    report = go(photos, tmp_path / "f.parquet", model, settings, skip_nonfinite=True)
    assert report[:2] == (9, 3)
    rows = {row["path"]: row for row in pq.read_table(tmp_path / "whole.parquet").to_pylist()}
    found = pq.read_table(tmp_path / "f.parquet").to_pylist()
    assert [Path(row["path"]).stem for row in found] == ["00", "02", "06", "08", "10", "01", "03", "07", "09"]
    assert all(np.isfinite(row["cls"]).all() for row in found)
    assert all(np.allclose(row["cls"], rows[row["path"]]["cls"], atol=1e-5) for row in found)
    reasons = failures(tmp_path / "f.parquet")
    assert [Path(name).name for name in reasons] == ["03.jpg", "04.png", "05.png"]
    assert "its features are not finite" in reasons[str(photos / "class0" / "04.png")]
    whole, written = (tmp_path / "f.parquet").read_bytes(), reasons
    for count in range(1, 6):
        out = tmp_path / f"{count}.parquet"
        interrupted(photos, out, model, settings, count, skip_nonfinite=True)
        go(photos, out, model, settings, skip_nonfinite=True)
        assert out.read_bytes() == whole
        assert failures(out) == written


def test_what_to_check_if_features_are_not_finite_is_told(photos, tmp_path):
    model = _model()
    model.norm.weight.data[5] = float("nan")
    with pytest.raises(EmbedError, match=r"class0/00\.png: .* computed in float32 .*: check the weights"):
        go(photos, tmp_path / "f.parquet", model)
    assert go(photos, tmp_path / "g.parquet", model, skip_nonfinite=True)[:2] == (0, 12)
    model = _model()
    model.norm.weight.data[5] = 1e30
    with pytest.raises(EmbedError, match=r"saved in float16: check .* --dtype \(float16 overflows\)"):
        go(photos, tmp_path / "h.parquet", model, EmbedSettings(cores=8, size=32, save_dtype="float16"))
    assert go(photos, tmp_path / "i.parquet", model).pictures == 11


def test_the_command_counts_what_an_earlier_run_did(photos, tmp_path, monkeypatch):
    weights = tmp_path / "weights"
    veca.save(_model(), weights)
    options = ["--model", str(weights), "--cores", "8", "--size", "32", "--batch-size", "2", "--workers", "0"]
    command = ["embed", str(photos), "--out", str(tmp_path / "f.parquet"), *options]
    with monkeypatch.context() as patch:
        patch.setattr(PartitionFolder, "complete", counted(PartitionFolder.complete, 0))
        with pytest.raises(Stop):
            CliRunner().invoke(app, command)
    said = CliRunner().invoke(app, command)
    assert "11 images, 11 of them in an earlier run" in said.stdout.replace("\n", "")
    assert said.exit_code == 3


def test_inputs_that_shrank_below_what_is_done_are_refused(photos, tmp_path, model):
    interrupted(photos, tmp_path / "f.parquet", model)
    for path in photos.rglob("*.*"):
        if path.name not in ("00.png", "02.png"):
            path.unlink()
    with pytest.raises(EmbedError, match="inputs have changed"):
        go(photos, tmp_path / "f.parquet", model)


def test_a_run_that_finished_nothing_does_not_stand_in_the_way(photos, tmp_path, model):
    interrupted(photos, tmp_path / "f.parquet", model, count=0)
    report = go(photos, tmp_path / "f.parquet", model, EmbedSettings(cores=8, size=48, batch=2))
    assert (report.pictures, report.resumed) == (11, 0)


def test_an_existing_file_is_only_replaced_on_request(photos, tmp_path, model):
    out = tmp_path / "f.parquet"
    go(photos, out, model)
    before = out.read_bytes()
    with pytest.raises(EmbedError, match="--overwrite"):
        go(photos, out, model)
    (photos / "class0" / "03.jpg").unlink()
    other = EmbedSettings(cores=8, size=48, batch=2)
    interrupted(photos, out, model, other, overwrite=True)
    assert out.read_bytes() == before
    report = go(photos, out, model, other)
    assert report[:3] == (11, 0, 10)
    assert json.loads(pq.read_schema(out).metadata[b"veca"])["size"] == 48
    assert not Path(f"{out}.failures.csv").exists()
    interrupted(photos, tmp_path / "g.parquet", model)
    assert go(photos, tmp_path / "g.parquet", model, other, overwrite=True).resumed == 0


@pytest.mark.parametrize("place", ["page", "footer", "all"])
def test_a_damaged_partition_is_named_or_computed_again(photos, tmp_path, model, place):
    out = tmp_path / "f.parquet"
    go(photos, tmp_path / "whole.parquet", model)
    interrupted(photos, out, model)
    damaged = tmp_path / f"{out.name}.parts" / "00000000.parquet"
    overwritten(damaged, place)
    if place == "page":  # only seen when all of it is read
        for _ in range(2):
            with pytest.raises(EmbedError, match=r"00000000\.parquet is damaged.*remove it.*--overwrite"):
                go(photos, out, model)
        assert not out.exists()
        damaged.unlink()
    assert go(photos, out, model)[:3] == (11, 1, 8 if place == "page" else 6)
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


@pytest.mark.parametrize("first", [True, False])
def test_damaged_slices_are_computed_again(photos, tmp_path, model, one_partition, first):
    go(photos, tmp_path / "whole.parquet", model)
    for count in (3, 1, 1):
        interrupted(photos, tmp_path / "f.parquet", model, count=count)
    slices = sorted((tmp_path / "f.parquet.parts").glob("_0*.parquet"))
    assert len(slices) == 3
    overwritten(slices[0 if first else 1], "footer")
    interrupted(photos, tmp_path / "f.parquet", model, count=1)
    assert go(photos, tmp_path / "f.parquet", model)[:3] == (11, 1, 2 if first else 8)
    assert (tmp_path / "f.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def overwritten(file: Path, place: str) -> None:
    if place == "all":
        file.write_bytes(b"PAR1")
        return
    data = bytearray(file.read_bytes())
    at = 400 if place == "page" else len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    data[at : at + 32] = b"\xff" * 32
    file.write_bytes(data)


def test_a_missing_partition_is_no_damage(photos, tmp_path, model):
    interrupted(photos, tmp_path / "f.parquet", model)
    with pytest.MonkeyPatch.context() as patch:
        real = PartitionFolder.complete

        def complete(folder, *args):
            folder.remove("00000000.parquet")
            real(folder, *args)

        patch.setattr(PartitionFolder, "complete", complete)
        with pytest.raises(EmbedError, match=r"00000000\.parquet is missing from .*f\.parquet\.parts: the same"):
            go(photos, tmp_path / "f.parquet", model)
    assert go(photos, tmp_path / "f.parquet", model).pictures == 11


def removing(folder: Path, count: int):
    """A `normalize` that removes the folder in batch number `count`."""
    numbers = itertools.count(1)

    def call(pixels):
        if next(numbers) == count:
            shutil.rmtree(folder)
        return images.normalize(pixels)

    return call


@pytest.mark.parametrize("count", [1, 3, 5, 6])
def test_a_folder_removed_meanwhile_ends_the_run(photos, tmp_path, model, monkeypatch, count):
    folder = tmp_path / "f.parquet.parts"
    with monkeypatch.context() as patch:
        patch.setattr(batches, "normalize", removing(folder, count))
        with pytest.raises(EmbedError, match=r"No such file.*Not all that was finished is in .*f\.parquet\.parts"):
            go(photos, tmp_path / "f.parquet", model)
    assert not folder.exists()
    assert go(photos, tmp_path / "f.parquet", model)[:3] == (11, 1, 0)


def test_nothing_is_called_kept_that_is_not_there(photos, tmp_path, model, monkeypatch):
    def fail(pixels):
        shutil.rmtree(tmp_path / "f.parquet.parts")
        raise torch.OutOfMemoryError

    interrupted(photos, tmp_path / "f.parquet", model)
    monkeypatch.setattr(batches, "normalize", fail)
    with pytest.raises(EmbedError, match=r"lower it\. Not all that was finished is in .*f\.parquet\.parts"):
        go(photos, tmp_path / "f.parquet", model)


def test_a_folder_of_others_is_not_replaced(photos, tmp_path, model):
    (tmp_path / "f.parquet").mkdir()
    (tmp_path / "f.parquet" / "mine.txt").write_text("keep")
    with pytest.raises(EmbedError, match=r"holds files that no run of this left, as mine\.txt"):
        go(photos, tmp_path / "f.parquet", model, overwrite=True)
    assert os.listdir(tmp_path / "f.parquet") == ["mine.txt"]
    (tmp_path / "f.parquet" / "mine.txt").unlink()
    assert go(photos, tmp_path / "f.parquet", model).pictures == 11
    assert (tmp_path / "f.parquet" / "00000000.parquet").exists(), "an existing folder stays one"


def test_workers_end_with_the_run(photos, tmp_path, model, monkeypatch):
    monkeypatch.setattr(batches.PartitionWriter, "_add", counted(batches.PartitionWriter._add, 1))
    with pytest.raises(Stop) as stopped:
        go(photos, tmp_path / "f.parquet", model, workers=2)
    assert stopped.traceback  # which refers to the frames, and they to the processes
    assert not multiprocessing.active_children()


def test_a_stray_file_in_the_parts_folder_is_left_alone(photos, tmp_path, model):
    (tmp_path / "f.parquet.parts").mkdir()
    (tmp_path / "f.parquet.parts" / "mine.txt").write_text("keep")
    go(photos, tmp_path / "f.parquet", model)
    assert os.listdir(tmp_path / "f.parquet.parts") == ["mine.txt"]


def test_large_pictures_go_in_smaller_batches(tmp_path, model, monkeypatch):
    for i in range(8):
        (tmp_path / f"{i}.png").write_bytes(noise_png(i, 192, 48))
    seen = []
    real = batches.normalize
    monkeypatch.setattr(batches, "normalize", lambda pixels: (seen.append(len(pixels)), real(pixels))[1])
    go(tmp_path, tmp_path / "f.parquet", model, EmbedSettings(size=48, batch=8, fit="keep"))
    assert seen == [2, 2, 2, 2]


def test_waiting_pictures_are_bounded(tmp_path, model, monkeypatch):
    for i in range(12):
        (tmp_path / f"{i:02}.png").write_bytes(noise_png(i, 64 + 16 * i, 64))
    monkeypatch.setattr(batches, "PART_IMAGES", 64)
    monkeypatch.setattr(batches, "PART_BYTES", 1000)
    monkeypatch.setattr(batches.EmbedJob, "by_task", False)  # as on a GPU
    waiting = []
    real = batches.PartitionWriter._add

    def add(writer, rows):
        real(writer, rows)
        groups = itertools.chain.from_iterable(writer.waiting.values())
        waiting.append(sum(pixels.nbytes for rows in groups for pixels in rows.images))

    monkeypatch.setattr(batches.PartitionWriter, "_add", add)
    assert go(tmp_path, tmp_path / "f.parquet", model, EmbedSettings(size=64, batch=16, fit="keep")).pictures == 12
    assert 3 * 14 * 64**2 < max(waiting) <= 3 * 16 * 64**2
    assert waiting.count(0) == 1


def test_features_are_copies_that_hold_no_other_tokens(tmp_path):
    (tmp_path / "a.png").write_bytes(noise_png())
    model, tokens = _model(), []
    model.register_forward_hook(lambda *call: tokens.append(call[-1].cores.numpy()))
    settings, device = EmbedSettings(size=32, batch=1, cores=8).resolve(model), torch.device("cpu")
    about = describe_features(model, "mine", settings, device)
    job = batches.EmbedJob(PartitionFolder(tmp_path), settings, model.config, about, device)
    items = sources.iter_items([str(tmp_path / "a.png")])
    with records.decode_items(items, 32, "crop", images.MAX_PIXELS, 0) as decoded:
        kept = batches.FeatureModel(model, job)([[next(decoded).pixels]]).columns()["cls"][0]
    np.testing.assert_array_equal(kept, tokens[0][0, 0])
    assert not np.shares_memory(kept, tokens[0])


# In a process of its own: what other tests left running would be counted too.
_PEAKS = """
import gc, sys, tracemalloc
from test_embed import EmbedSettings, _model, batches, go, partitions, torch
torch.set_num_threads(1)
batches.PART_IMAGES = partitions.PARTITION = 64
model, settings = _model(), EmbedSettings(cores=8, size=32, batch=32)
few, many, out = sys.argv[1:]
go(few, f"{out}/warm.parquet", model, settings)
for i, source in enumerate((few, many)):
    gc.collect()
    tracemalloc.start()
    go(source, f"{out}/{i}.parquet", model, settings)
    print(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
"""


@pytest.mark.parametrize("kind", ["folders", "shard"])
def test_memory_does_not_grow_with_the_number_of_pictures(tmp_path, kind):
    data = noise_png(0, 32, 32)

    def sources(n: int) -> Path:
        names = [f"{i // 20:03}/{i:05}{'long' * 50}.png" for i in range(n)]
        if kind == "shard":
            return shard(tmp_path / f"{n}.tar", dict.fromkeys(names, data))
        for name in names:
            (tmp_path / str(n) / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / str(n) / name).write_bytes(data)
        return tmp_path / str(n)

    command = [sys.executable, "-c", _PEAKS, sources(500), sources(1500), tmp_path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    few, many = map(int, done.stdout.split())
    assert many - few < 1000 * 150  # to remember the names alone would take more than 200 bytes each


def test_progress_goes_to_stderr(photos, tmp_path, model, capsys):
    go(photos, tmp_path / "f.parquet", model, progress=True)
    said = capsys.readouterr()
    assert said.out == ""
    assert "12/12" in said.err
    assert "1 failed" in said.err
    assert "images/s" in said.err
    go(photos, tmp_path / "g.parquet", model)
    assert capsys.readouterr().err == ""


def test_the_callers_model_and_random_numbers_stay_as_they_were(photos, tmp_path):
    model = _model().train()
    go(photos, tmp_path / "f.parquet", model.eval())
    state = torch.random.get_rng_state()
    go(photos, tmp_path / "g.parquet", model.train(), workers=1)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (tmp_path / "f.parquet").read_bytes() == (tmp_path / "g.parquet").read_bytes()


def test_bfloat16_features_are_close_to_float32(photos, tmp_path, model):
    go(photos, tmp_path / "f.parquet", model)
    go(photos, tmp_path / "g.parquet", model, EmbedSettings(cores=8, size=32, batch=2, precision="bfloat16"))
    full, half = (np.array(pq.read_table(tmp_path / n)["cls"].to_pylist()) for n in ("f.parquet", "g.parquet"))
    assert 0 < np.abs(full - half).max() < 0.1


def test_an_interrupt_during_the_fork_is_not_lost(photos: Path) -> None:
    """The interpreter ignores whatever is raised in its hooks around a fork."""
    script = f"""
import os, signal
from veca.data.records import decode_items
from veca.data.sources import iter_items

os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    with decode_items(iter_items([{str(photos)!r}]), 64, "crop", 10**6, workers=1):
        print("went on")
except KeyboardInterrupt:
    print("interrupted")
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert found.stdout == "interrupted\n", found.stderr
