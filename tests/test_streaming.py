from __future__ import annotations

import copy
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import tifffile
import torch
import zarr
from PIL import Image
from torch import Tensor

import veca
from veca.images import normalize, pad_to_multiple
from veca.images.tiles import open_pixels
from veca.streaming import StreamError, storage, stream
from veca.streaming.run import _Stream

LIMIT = 2e-6


@pytest.fixture(scope="module")
def model() -> veca.Veca:
    torch.manual_seed(0)
    options: dict[str, Any] = {"embed_dim": 64, "depth": 3, "num_heads": 2, "widths": (1, 0.5), "output_dim": 24}
    model = veca.create_model("veca_tiny", pretrained=False, **options).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (150, 203, 3), np.uint8)


def whole(model: veca.Veca, pixels: np.ndarray, **settings: Any) -> veca.VecaOutput:
    image = pad_to_multiple(normalize(torch.from_numpy(pixels).permute(2, 0, 1)))
    with torch.inference_mode():
        return model(image[None], **settings)


def relative(found: Any, expected: Tensor) -> float:
    found = found if isinstance(found, Tensor) else torch.from_numpy(np.array(found[:])).float()
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


def assert_alike(found: veca.StreamedFeatures, expected: veca.VecaOutput, limit: float = LIMIT) -> None:
    assert found.grid == expected.grid
    assert relative(found.cores, expected.cores[0]) <= limit
    assert relative(found.coordinates, expected.coordinates[:, 0]) <= limit
    if found.patches is not None:
        assert relative(found.patches, expected.feature_map[0].permute(1, 2, 0)) <= limit


@pytest.mark.parametrize("tile", [16, 48, 64, 4096])
@pytest.mark.parametrize("settings", [{}, {"cores": 8, "width": 0.5}, {"cores": 40}])
def test_features_are_those_of_the_whole_image(
    model: veca.Veca, pixels: np.ndarray, tile: int, settings: dict[str, Any]
) -> None:
    found = stream(model, pixels, tile=tile, progress=False, **settings)
    assert_alike(found, whole(model, pixels, **settings))


def test_other_precisions_and_outputs(model: veca.Veca, pixels: np.ndarray, tmp_path: Path) -> None:
    expected = whole(model, pixels)
    low = stream(model, pixels, tile=64, precision=torch.bfloat16, progress=False)
    assert_alike(low, expected, limit=0.02)
    alone = stream(model, pixels, dense=False, progress=False)
    assert alone.patches is None
    assert_alike(alone, expected)
    for name in ("features.npy", "features.zarr", "features.tif"):
        found = stream(model, pixels, tile=64, out=tmp_path / name, save_dtype="float16", progress=False)
        assert_alike(found, expected, limit=1e-3)
        assert np.asarray(found.patches[:1]).dtype == np.float16
        with pytest.raises(StreamError, match=f"{name} exists; choose another name, or remove it"):
            stream(model, pixels, out=tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["features.npy", "features.tif", "features.zarr"]
    assert zarr.open_array(str(tmp_path / "features.zarr")).attrs["image_width"] == 203


def test_regions_and_points_are_computed_alone(model: veca.Veca, pixels: np.ndarray) -> None:
    found = stream(model, pixels, cores=16, tile=48, dense=False, progress=False)
    expected = whole(model, pixels, cores=16).feature_map[0].permute(1, 2, 0)
    assert relative(found.read(box=(20, 33, 100, 100)), expected[2:9, 1:8]) <= LIMIT
    assert relative(found.read(box=(0, 0, 203, 150)), expected) <= LIMIT
    points = [(0, 0), (202.9, 149.5), (64, 15.9), (0, 0)]
    points += [(x, y) for x in range(3, 203, 17) for y in range(140, 0, -13)]  # more than are computed at a time
    spots = [expected[int(y // 16), int(x // 16)] for x, y in points]
    assert relative(found.read(points=points), torch.stack(spots)) <= LIMIT
    assert found.read(points=[]).shape == (0, 24)
    with pytest.raises(veca.VecaError, match=r"box=\(200, 0, 10, 10\); .* must lie in 203×150 pixels"):
        found.read(box=(200, 0, 10, 10))
    with pytest.raises(veca.VecaError, match=r"box=\(0, 0.5, 9, 9\); it must be four integers"):
        found.read(box=(0, 0.5, 9, 9))  # type: ignore[arg-type]
    with pytest.raises(veca.VecaError, match=r"point \(203, 0\) lies outside the image of 203×150"):
        found.read(points=[(203, 0)])
    with pytest.raises(veca.VecaError, match="read takes a box or points"):
        found.read()


class Stop(Exception):
    pass


@pytest.mark.parametrize("out", ["f.npy", "f.zarr", "f.tif"])
def test_an_interrupted_run_continues_to_the_same_bits(
    model: veca.Veca, pixels: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    expected = stream(model, pixels, tile=64, out=tmp_path / f"whole-{out}", progress=False)
    monkeypatch.setattr(storage, "_SAVE_SECONDS", 0.0)
    real, calls = _Stream._run_tile, []

    def run_tile(self: Any, *args: Any) -> None:
        calls.append(args[0])
        if len(calls) % 9 == 0:
            raise Stop
        real(self, *args)

    monkeypatch.setattr(_Stream, "_run_tile", run_tile)
    settings: dict[str, Any] = {"tile": 64, "out": tmp_path / out, "states": tmp_path / "states", "progress": False}
    tiles = 3 * 12  # of 3 blocks
    for stopped in range(10):
        try:
            found = stream(model, pixels, **settings)
            break
        except Stop:
            assert not (tmp_path / out).exists()
            if stopped == 0:
                for other in ({"cores": 8}, {"source": 255 - pixels}):
                    with pytest.raises(StreamError, match="holds a run with another image, model or settings"):
                        stream(model, **{"source": pixels, **settings, **other})
    assert len(calls) == tiles + stopped  # those that were stopped are run again, no others
    assert stopped == 4
    assert torch.equal(found.cores, expected.cores)
    assert np.array_equal(found.patches[:], expected.patches[:])
    assert relative(found.read(points=[(5, 5)]), torch.from_numpy(np.array(expected.patches[:1, 0]))) <= LIMIT
    assert not (tmp_path / "states").exists()


KILLED = """
import os, signal, sys
import numpy as np
import torch
import veca
from veca.streaming import storage
from veca.streaming.run import _Stream

storage._SAVE_SECONDS, real, calls = 0.0, _Stream._run_tile, []

def run_tile(self, *args):
    calls.append(args[0])
    real(self, *args)
    if len(calls) == 29:  # in the last of 3 blocks of 12 tiles, before its progress is saved
        os.kill(os.getpid(), signal.SIGKILL)

_Stream._run_tile = run_tile
folder = sys.argv[1]
model = veca.load(f"{folder}/model")
veca.stream(model, np.load(f"{folder}/a.npy"), tile=64, out=f"{folder}/f.tif", states=f"{folder}/s", progress=False)
"""


def test_a_killed_run_continues_at_its_tile_to_the_same_bits(
    model: veca.Veca, pixels: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    veca.save(model, tmp_path / "model")
    np.save(tmp_path / "a.npy", pixels)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    real, calls = _Stream._run_tile, []

    def run_tile(self: Any, *args: Any) -> None:
        calls.append(args[0])
        real(self, *args)

    monkeypatch.setattr(_Stream, "_run_tile", run_tile)
    found = stream(model, pixels, tile=64, out=tmp_path / "f.tif", states=tmp_path / "s", progress=False)
    assert len(calls) == 36 - 28
    expected = stream(model, pixels, tile=64, progress=False)
    assert np.array_equal(found.patches[:], expected.patches)
    assert torch.equal(found.cores, expected.cores)


def test_strips_of_one_pixel(model: veca.Veca) -> None:
    strip = np.random.default_rng(0).integers(0, 256, (1, 100_000, 3), np.uint8)
    for pixels in (strip, strip.transpose(1, 0, 2)):
        assert_alike(stream(model, pixels, cores=8, progress=False), whole(model, pixels, cores=8))


def test_features_that_are_not_finite_are_an_error(model: veca.Veca) -> None:
    image = torch.zeros(3, 64, 64)
    image[0, 20, 20] = torch.nan
    with pytest.raises(
        veca.errors.NonFiniteError, match="the tensor: the cores have NaN or infinite values after block 0"
    ):
        stream(model, image, progress=False)
    large = copy.deepcopy(model)
    large.output_proj.weight.data *= 1e6
    with pytest.raises(veca.errors.NonFiniteError, match="infinite when saved in float16; save_dtype='float32'"):
        stream(large, torch.zeros(3, 64, 64), save_dtype="float16", progress=False)


def test_lost_features_are_not_passed_over(
    model: veca.Veca, pixels: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_SAVE_SECONDS", 0.0)
    settings: dict[str, Any] = {"tile": 64, "out": tmp_path / "f.npy", "states": tmp_path / "s", "progress": False}
    real, calls = _Stream._run_tile, []

    def run_tile(self: Any, *args: Any) -> None:
        calls.append(args[0])
        if len(calls) == 30:  # in the last of 3 blocks of 12 tiles
            raise Stop
        real(self, *args)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(_Stream, "_run_tile", run_tile)
        stream(model, pixels, **settings)
    (tmp_path / ".f.part.npy").unlink()
    with pytest.raises(StreamError, match=r"\.f\.part\.npy is gone, .*; remove its states to begin anew"):
        stream(model, pixels, **settings)


def test_a_full_disk_is_known_before_the_run(
    model: veca.Veca, pixels: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped files are as large as needed from the start; writing to one without space would kill the process."""
    states, out = 2 * 130 * 64 * 4, 130 * 24 * 4
    settings: dict[str, Any] = {"tile": 64, "out": tmp_path / "f.npy", "states": tmp_path / "s", "progress": False}
    free = shutil.disk_usage(tmp_path)._replace(free=states + out - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(StreamError, match=r"the run needs 0.0 GiB, and the disk of .* has 0.0 free; choose another"):
        stream(model, pixels, **settings)
    free = free._replace(free=states + out)
    assert_alike(stream(model, pixels, **settings), whole(model, pixels))


def test_a_model_in_bfloat16(model: veca.Veca, pixels: np.ndarray, tmp_path: Path) -> None:
    low, expected = copy.deepcopy(model).bfloat16(), whole(model, pixels)
    in_memory = stream(low, pixels, tile=64, progress=False)
    in_files = stream(low, pixels, tile=64, out=tmp_path / "f.npy", states=tmp_path / "s", progress=False)
    for found in (in_memory, in_files):
        assert_alike(found, expected, limit=0.03)


def test_sources(model: veca.Veca, pixels: np.ndarray, tmp_path: Path) -> None:
    Image.fromarray(pixels).save(tmp_path / "a.png")
    np.save(tmp_path / "a.npy", pixels)
    zarr.save_array(str(tmp_path / "a.zarr"), pixels)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    rgba = np.concatenate([pixels, np.full((150, 203, 1), 255, np.uint8)], axis=2)
    sources = [
        pixels,
        rgba,
        tensor,
        normalize(tensor),
        *(tmp_path / f"a.{suffix}" for suffix in ("png", "npy", "zarr")),
    ]
    for source in sources:
        opened = open_pixels(source)
        assert (opened.height, opened.width, opened.grid()) == (150, 203, (10, 13))
        assert torch.equal(opened.read(30, 17, 144, 208)[:, :, :186], normalize(tensor)[:, 30:144, 17:203])
        edge = opened.read(144, 192, 160, 208)
        assert torch.equal(edge, pad_to_multiple(normalize(tensor))[:, 144:, 192:])
    grey = open_pixels(pixels[..., 0]).read(0, 0, 16, 16)
    assert torch.equal(grey, normalize(tensor[:1].expand(3, -1, -1))[:, :16, :16])


@pytest.mark.parametrize(
    "options",
    [
        {"tile": (32, 48)},
        {"tile": (64, 64), "compression": "zlib", "predictor": True},
        {"rowsperstrip": 7, "compression": "lzw"},
        {"bigtiff": True, "tile": (16, 16)},
        {},
    ],
)
def test_regions_of_tiff_files(pixels: np.ndarray, tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, pixels, photometric="rgb", **options)
    source, expected = open_pixels(path), open_pixels(pixels)
    for box in ((0, 0, 160, 208), (5, 9, 33, 90), (149, 202, 150, 203), (64, 0, 80, 208)):
        assert torch.equal(source.read(*box), expected.read(*box))
    grey = tmp_path / "grey.tif"
    for inverted in (False, True):
        photometric = "miniswhite" if inverted else "minisblack"
        tifffile.imwrite(grey, pixels[..., 0], photometric=photometric, **options)
        value = 255 - pixels[..., 0] if inverted else pixels[..., 0]
        assert torch.equal(open_pixels(grey).read(0, 0, 48, 48), open_pixels(value).read(0, 0, 48, 48))


@pytest.mark.parametrize("extra", ["unassalpha", "assocalpha", "unspecified"])
def test_fourth_channels_of_tiff_files(pixels: np.ndarray, tmp_path: Path, extra: str) -> None:
    """Only what is marked as opacity is one: the fourth channel of a map is often infrared."""
    fourth = np.random.default_rng(1).integers(0, 256, (*pixels.shape[:2], 1), np.uint8)
    colours = np.minimum(pixels, fourth) if extra == "assocalpha" else pixels
    path = tmp_path / "four.tif"
    channels = np.concatenate([colours, fourth], axis=2)
    tifffile.imwrite(path, channels, photometric="rgb", extrasamples=[extra], tile=(64, 64))
    opacity = fourth / 255 if extra != "unspecified" else 1.0
    expected = (colours if extra == "assocalpha" else colours * opacity) + 255 * (1 - opacity)
    found = open_pixels(path).read(0, 0, 150, 203)
    assert float((found - normalize(torch.from_numpy(expected / 255).float().permute(2, 0, 1))).abs().max()) < 0.02
    if extra == "unspecified":
        raster = tmp_path / "four.img"
        options = {"height": 150, "width": 203, "count": 4, "dtype": "uint8", "transform": rasterio.Affine.scale(2)}
        with rasterio.open(raster, "w", driver="HFA", **options) as file:
            file.write(np.moveaxis(channels, -1, 0))
        assert torch.equal(open_pixels(raster).read(0, 0, 150, 203), found)


@pytest.mark.parametrize(("photometric", "channels"), [("separated", 4), ("cielab", 3), ("ycbcr", 3)])
def test_other_colours_are_not_taken_for_rgb(
    pixels: np.ndarray, tmp_path: Path, photometric: str, channels: int
) -> None:
    path = tmp_path / "colours.tif"
    tifffile.imwrite(path, np.resize(pixels, (64, 64, channels)), photometric=photometric, tile=(64, 64))
    with pytest.raises(veca.ImageError, match=f"holds uint8, {channels} channels, {photometric}; regions are read of"):
        open_pixels(path)


@pytest.mark.parametrize("raster_type", [1, 2])  # pixels are areas, or points
@pytest.mark.parametrize("kind", ["scale", "matrix"])
def test_a_georeference_is_kept(
    model: veca.Veca, pixels: np.ndarray, tmp_path: Path, kind: str, raster_type: int
) -> None:
    scale, tie = (33550, "d", 3, (0.5, 0.25, 0.0), True), (33922, "d", 6, (3.0, 5.0, 0.0, 3.0, 50.0, 0.0), True)
    matrix = (34264, "d", 16, (0.5, 0.1, 0, 3, 0.2, -0.25, 0, 50, 0, 0, 0, 0, 0, 0, 0, 1), True)
    keys = (34735, "H", 16, (1, 1, 0, 3, 1024, 0, 1, 2, 1025, 0, 1, raster_type, 2048, 0, 1, 4326), True)
    path = tmp_path / "map.tif"
    tags = [scale, tie, keys] if kind == "scale" else [matrix, keys]
    tifffile.imwrite(path, pixels, photometric="rgb", tile=(64, 64), extratags=tags)
    found = {}
    for suffix in ("zarr", "tif"):
        found[suffix] = stream(model, path, cores=8, tile=48, out=tmp_path / f"out.{suffix}", progress=False).patches
    attributes = zarr.open_array(str(tmp_path / "out.zarr")).attrs
    georeference = attributes["georeference"]
    assert (
        georeference["ModelPixelScale"] == [0.5, 0.25, 0.0]
        if kind == "scale"
        else "ModelPixelScale" not in georeference
    )
    assert attributes["patch_size"] == 16
    with rasterio.open(path) as image, rasterio.open(tmp_path / "out.tif") as features:
        assert features.crs == image.crs == rasterio.CRS.from_epsg(4326)
        assert features.transform.almost_equals(image.transform @ rasterio.Affine.scale(16), 1e-9)
        assert np.array_equal(np.moveaxis(features.read(), 0, -1), found["zarr"][:])
        assert json.loads(features.tags()["TIFFTAG_IMAGEDESCRIPTION"])["image_width"] == 203


@pytest.mark.parametrize("epsg", [4326, 32631, None])
def test_rasters_of_other_formats(model: veca.Veca, pixels: np.ndarray, tmp_path: Path, epsg: int | None) -> None:
    transform = rasterio.Affine(0.5, 0.1, 3, 0.2, -0.25, 50)
    shape = {"height": 150, "width": 203, "count": 3, "dtype": "uint8"}
    place = {"transform": transform, "crs": epsg and rasterio.CRS.from_epsg(epsg)}
    path = tmp_path / "map.jp2"
    with rasterio.open(path, "w", driver="JP2OpenJPEG", QUALITY=100, REVERSIBLE="YES", **shape, **place) as file:
        file.write(np.moveaxis(pixels, -1, 0))
    source, expected = open_pixels(path), open_pixels(pixels)
    for box in ((0, 0, 160, 208), (5, 9, 33, 90)):
        assert torch.equal(source.read(*box), expected.read(*box))
    found = stream(model, path, cores=8, out=tmp_path / "out.tif", progress=False)
    assert np.array_equal(found.patches[:], stream(model, pixels, cores=8, progress=False).patches)
    with rasterio.open(tmp_path / "out.tif") as features:
        assert features.crs == place["crs"]
        assert features.transform.almost_equals(transform @ rasterio.Affine.scale(16), 1e-9)


def test_slides_by_openslide(pixels: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "slide.bif"  # OpenSlide goes by the contents, and reads any tiled TIFF
    tifffile.imwrite(path, pixels, photometric="rgb", tile=(64, 64))
    source, expected = open_pixels(path), open_pixels(pixels)
    for box in ((0, 0, 160, 208), (5, 9, 33, 90)):
        assert torch.equal(source.read(*box), expected.read(*box))


def test_broken_and_unsupported_tiff_files(pixels: np.ndarray, tmp_path: Path) -> None:
    whole = tmp_path / "whole.tif"
    tifffile.imwrite(whole, pixels, photometric="rgb", tile=(64, 64), compression="zlib")
    data = whole.read_bytes()
    broken = tmp_path / "broken.tif"
    refused = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        damaged = bytearray(data[: random.integers(1, len(data))] if seed % 2 else data)
        for _ in range(random.integers(0, 20)):
            damaged[random.integers(0, len(damaged))] = random.integers(0, 256)
        broken.write_bytes(damaged)
        try:
            open_pixels(broken).read(0, 0, 64, 64)
        except veca.ImageError:
            refused += 1
    assert refused > 20
    for name, array, options in (
        ("wide.tif", pixels.astype(np.uint16), {"photometric": "rgb"}),
        ("planar.tif", pixels.transpose(2, 0, 1).copy(), {"photometric": "rgb", "planarconfig": "separate"}),
    ):
        tifffile.imwrite(tmp_path / name, array, **options)
        with pytest.raises(veca.ImageError, match=f"{name} holds .*; regions are read of 8-bit grey, RGB or RGBA"):
            open_pixels(tmp_path / name)
    tifffile.imwrite(tmp_path / "turned.tif", pixels, photometric="rgb", extratags=[(274, "H", 1, 6, True)])
    with pytest.raises(veca.ImageError, match=r"turned.tif is stored turned or mirrored, orientation 6; regions are"):
        open_pixels(tmp_path / "turned.tif")
    with pytest.raises(veca.ImageError, match=r"nowhere.tif: no such file"):
        open_pixels(tmp_path / "nowhere.tif")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((4, 4, 2), np.uint8), r"has shape \(4, 4, 2\); it must be \(height, width\)"),
        (np.zeros((4, 4, 3), np.float32), "the array is float32; it must be uint8"),
        (
            zarr.create_array(zarr.storage.MemoryStore(), shape=(2**15, 2**15), chunks=(2**15, 2**15), dtype=np.uint8),
            "has chunks of 32768×32768; at most 67,108,864 pixels are decoded at a time",
        ),
        (np.zeros((0, 4, 3), np.uint8), "is 0×4; sides must be from 1"),
        (torch.zeros(1, 4, 4), "the tensor has shape"),
        (torch.zeros(3, 4, 4, dtype=torch.int32), "the tensor is torch.int32"),
        (7, "the source is int; expected a path, an array or a tensor"),
        ("nowhere.npy", "nowhere.npy cannot be read"),
        ("nowhere.mrxs", "nowhere.mrxs cannot be read"),
        ("nowhere.jp2", "nowhere.jp2 cannot be read"),
        ("nowhere.zarr", "nowhere.zarr cannot be opened as a zarr array"),
    ],
)
def test_sources_that_are_none(source: Any, message: str) -> None:
    with pytest.raises(veca.VecaError, match=message):
        open_pixels(source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tile": 8}, "tile=8; a tile has at least 16 pixels"),
        ({"save_dtype": "int8"}, "save_dtype='int8'; it must be 'float16' or 'float32'"),
        ({"out": "x.png"}, "features are written to a .npy file, a .zarr array or a .tif file"),
        ({"out": "x.npy", "dense": False}, "goes with dense=True"),
        ({"out": "nowhere/x.npy"}, "nowhere is not a folder; make it"),
        ({"states": "here"}, "features must be in a file: name it with out"),
        ({"cores": 65}, "cores=65; a budget is an integer from 1 to 64"),
    ],
)
def test_wrong_arguments(model: veca.Veca, options: dict[str, Any], message: str) -> None:
    with pytest.raises(veca.VecaError, match=message):
        stream(model, np.zeros((32, 32, 3), np.uint8), progress=False, **options)
