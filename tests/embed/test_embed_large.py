"""`veca.embed.large`: images that are too large to be decoded, by tiles, beside the features of the others."""

from __future__ import annotations

import dataclasses
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import rasterio
import tifffile
import torch
from PIL import Image
from typer.testing import CliRunner

import veca
from veca.cli.main import app
from veca.embed import EmbedError, EmbedSettings, embed
from veca.images import normalize, pad_to_multiple
from veca.streaming import storage
from veca.streaming.run import _Stream

SETTINGS: dict[str, Any] = {"cores": 8, "fit": "native", "dense": True, "save_dtype": "float32", "decode": "pillow"}
FIELDS = {field.name for field in dataclasses.fields(EmbedSettings)}
GEO_TAGS = [(33550, "d", 3, (0.5, 0.25, 0.0), True), (33922, "d", 6, (0.0, 0.0, 0.0, 3.0, 50.0, 0.0), True)]


@pytest.fixture(scope="module")
def model() -> veca.Veca:
    torch.manual_seed(0)
    return veca.create_model("veca_tiny", pretrained=False, embed_dim=32, depth=2, num_heads=2).eval()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two images of ordinary size, and three of 20 × 30 patches or more: a TIFF with a georeference, a PNG, a JPEG."""
    folder, random = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    pixels = random.integers(0, 256, (330, 490, 3), np.uint8)
    Image.fromarray(pixels[:90, :120]).save(folder / "a.png")
    Image.fromarray(pixels[:60, :100]).save(folder / "z.png")
    tifffile.imwrite(folder / "map.tif", pixels, photometric="rgb", tile=(64, 64), extratags=GEO_TAGS)
    Image.fromarray(pixels[:320, :480]).save(folder / "large.png")
    Image.fromarray(pixels).save(folder / "too-large.jpg")
    return folder


def run(photos: Path, out: Path, model: veca.Veca, **options: Any) -> Any:
    settings = {**SETTINGS, **{name: options.pop(name) for name in list(options) if name in FIELDS}}
    return embed(
        photos,
        out,
        model=model,
        model_name="tiny",
        settings=EmbedSettings(**settings),
        workers=0,
        progress=False,
        **options,
    )


def read_large(folder: Path) -> dict[str, tuple[dict[str, Any], np.ndarray]]:
    """Row of the index and patches of each image, by the name of its file."""
    found = {}
    for row in pq.read_table(folder / "index.parquet").to_pylist():
        path = folder / row["file"]
        patches = np.load(path) if path.suffix == ".npy" else tifffile.imread(path)
        found[os.path.basename(row["path"])] = row, patches
    return found


def test_large_images_are_computed_whole_beside_the_others(photos: Path, tmp_path: Path, model: veca.Veca) -> None:
    out = tmp_path / "f.parquet"
    report = run(photos, out, model, stream_above=500, max_pixels=160_000)
    assert (report.pictures, report.failures, report.streamed) == (2, 1, 2)
    failures = (tmp_path / "f.parquet.failures.csv").read_text()
    assert "too-large.jpg" in failures
    assert "at most 160,000 are opened" in failures
    assert "map.tif" not in failures
    assert [os.path.basename(row["path"]) for row in pq.read_table(out).to_pylist()] == ["a.png", "z.png"]

    large = read_large(tmp_path / "f.parquet.large")
    assert sorted(large) == ["large.png", "map.tif"]
    for name, (row, patches) in large.items():
        pixels = torch.from_numpy(np.array(Image.open(photos / name))).permute(2, 0, 1)
        assert (row["width"], row["height"]) == (pixels.shape[2], pixels.shape[1])
        with torch.inference_mode():
            whole = model(pad_to_multiple(normalize(pixels))[None], cores=8)
        assert (row["rows"], row["columns"], row["cores"]) == (*whole.grid, 8)
        torch.testing.assert_close(torch.tensor(row["cls"]), whole.cls[0], atol=1e-5, rtol=1e-4)
        expected = whole.feature_map[0].permute(1, 2, 0)
        torch.testing.assert_close(torch.from_numpy(patches), expected, atol=1e-5, rtol=1e-4)
    with rasterio.open(tmp_path / "f.parquet.large" / large["map.tif"][0]["file"]) as features:
        assert features.transform.almost_equals(rasterio.Affine(8, 0, 3, 0, -4, 50))

    run(photos / "a.png", out, model, overwrite=True)  # without large images nothing is left of them
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.parquet", "photos"]


def test_a_folder_of_others_is_left_alone(photos: Path, tmp_path: Path, model: veca.Veca) -> None:
    folder = tmp_path / "f.parquet.large"
    folder.mkdir()
    for name in ("mine-0123abcd.npy", "index.parquet"):
        (folder / name).write_text("mine")
    run(photos / "a.png", tmp_path / "f.parquet", model)
    with pytest.raises(EmbedError, match=r"f.parquet.large is for the features of large images, and holds other files"):
        run(photos, tmp_path / "f.parquet", model, stream_above=500, overwrite=True)
    assert {path.read_text() for path in folder.iterdir()} == {"mine"}


def test_without_dense_features_large_images_are_failures(photos: Path, tmp_path: Path, model: veca.Veca) -> None:
    report = run(photos, tmp_path / "f.parquet", model, dense=False, max_pixels=160_000)
    assert (report.pictures, report.failures, report.streamed) == (3, 2, 0)
    with pytest.raises(EmbedError, match="stream_above=500: must be None unless dense is True"):
        EmbedSettings(stream_above=500)
    with pytest.raises(EmbedError, match="stream_above=500: large images are streamed by one machine"):
        run(photos, tmp_path / "features", model, stream_above=500, engine="ray")


def test_members_of_archives_are_decoded_as_before(photos: Path, tmp_path: Path, model: veca.Veca) -> None:
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        shard.add(photos / "large.png", "large.png")
    report = run(tmp_path / "shard.tar", tmp_path / "f.parquet", model, stream_above=500)
    assert (report.pictures, report.streamed) == (1, 0)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("touched", [False, True])
def test_an_interrupted_run_continues_within_a_large_image(
    photos: Path, tmp_path: Path, model: veca.Veca, monkeypatch: pytest.MonkeyPatch, touched: bool
) -> None:
    """And begins an image anew whose file has another date."""
    settings = {"stream_above": 500, "save_dtype": "float16"}
    monkeypatch.setattr(storage, "_SAVE_SECONDS", 0.0)
    expected = read_large(
        Path(run(photos, tmp_path / "whole.parquet", model, **settings).out).with_suffix(".parquet.large")
    )
    real, calls = _Stream._run_tile, []

    def run_tile(self: Any, *args: Any) -> None:
        calls.append(self.source.name)
        if len(calls) == 4:  # in the second block of the second image
            raise Stop
        real(self, *args)

    monkeypatch.setattr(_Stream, "_run_tile", run_tile)
    with pytest.raises(Stop):
        run(photos, tmp_path / "f.parquet", model, **settings)
    assert not (tmp_path / "f.parquet").exists()
    if touched:
        os.utime(photos / "map.tif", (1, 1))
    report = run(photos, tmp_path / "f.parquet", model, ignore_dates=touched, **settings)
    assert (report.pictures, report.failures, report.streamed) == (2, 0, 3)
    # Tiles of three images in two blocks, and what was stopped or has to be computed again
    assert len(calls) == 3 * 2 + 1 + touched
    found = read_large(tmp_path / "f.parquet.large")
    assert sorted(found) == sorted(expected) == ["large.png", "map.tif", "too-large.jpg"]
    for name, (row, patches) in found.items():
        assert row["cls"] == expected[name][0]["cls"]
        assert np.array_equal(patches, expected[name][1])
    assert not [path for path in (tmp_path / "f.parquet.large").iterdir() if path.suffix == ".states"]


def test_the_command_says_where_large_images_are(photos: Path, tmp_path: Path, model: veca.Veca) -> None:
    veca.save(model, tmp_path / "model")
    options = ["--model", str(tmp_path / "model"), "--workers", "0", "--device", "cpu", "--no-progress", "--dense"]
    command = ["embed", str(photos / "map.tif"), str(photos / "a.png"), "--out", str(tmp_path / "f.parquet"), *options]
    result = CliRunner().invoke(app, [*command, "--size", "64", "--max-pixels", "100000"])
    assert result.exit_code == 0, result.output
    assert f"1 large image computed by tiles: {tmp_path / 'f.parquet'}.large" in result.output.replace("\n", " ")
