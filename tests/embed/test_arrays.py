"""`.npz` and `.safetensors` files of features, and what the three kinds of file have in common."""

from __future__ import annotations

import itertools
import json
import os

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from sample_images import noise_png, write_video
from test_embed import Stop, failures, go, interrupted, model, overwritten, paths, photos, small_partitions  # noqa: F401

from veca.embed import EmbedError, EmbedSettings
from veca.embed.partitions import SUFFIXES, PartitionFolder


@pytest.mark.parametrize("save_dtype", ["float32", "float16"])
def test_npz_and_safetensors_hold_the_same_as_parquet(photos, tmp_path, model, save_dtype):  # noqa: F811
    settings = EmbedSettings(cores=8, size=32, batch=2, dense=True, save_dtype=save_dtype)
    outs = {suffix: tmp_path / f"f{suffix}" for suffix in SUFFIXES}
    for out in outs.values():
        go(photos, out, model, settings)
    table = pq.read_table(outs[".parquet"])
    numbers = {
        name: np.array(table[name].to_pylist(), np.int32) for name in ("width", "height", "rows", "columns", "cores")
    }
    numbers["cls"] = np.array(table["cls"].to_pylist(), save_dtype)
    numbers["patches"] = np.frombuffer(b"".join(table["patches"].to_pylist()), save_dtype).reshape(11, 4, 32)
    about = json.loads(table.schema.metadata[b"veca"])

    with np.load(outs[".npz"], allow_pickle=False) as npz:
        assert set(npz) == {"path", "veca", *numbers}
        assert npz["path"].tolist() == table["path"].to_pylist()
        assert json.loads(npz["veca"].item()) == about
        for name, array in numbers.items():
            assert npz[name].dtype == array.dtype
            np.testing.assert_array_equal(npz[name], array)
    with open(outs[".safetensors"], "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    starts = {name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
    assert all(start % (8 if name == "path_offsets" else 2) == 0 for name, start in starts.items() if name != "path")
    with safe_open(outs[".safetensors"], "np") as tensors:
        names, offsets = tensors.get_tensor("path"), tensors.get_tensor("path_offsets")
        spans = itertools.pairwise(offsets)
        assert [bytes(names[start:end]).decode() for start, end in spans] == table["path"].to_pylist()
        assert json.loads(tensors.metadata()["veca"]) == about
        for name, array in numbers.items():
            assert tensors.get_tensor(name).dtype == array.dtype
            np.testing.assert_array_equal(tensors.get_tensor(name), array)


def test_cells_and_times_are_the_same_in_all_files(photos, tmp_path, model):  # noqa: F811
    """Of images of any shape: all have as many cells."""
    settings = EmbedSettings(cores=8, size=32, fit="keep", batch=2, dense=True, cells=2, fps=2)
    clip, outs = write_video(tmp_path / "clip.mp4", 1), {suffix: tmp_path / f"f{suffix}" for suffix in SUFFIXES}
    for out in outs.values():
        go([photos, clip], out, model, settings)
    table = pq.read_table(outs[".parquet"])
    patches = np.frombuffer(b"".join(table["patches"].to_pylist()), np.float16).reshape(13, 4, 32)
    times = table["time"].to_numpy()
    assert times[-2:].tolist() == [0, 0.5]
    assert np.isnan(times[:-2]).all()
    with np.load(outs[".npz"], allow_pickle=False) as npz, safe_open(outs[".safetensors"], "np") as tensors:
        for name, expected in (("patches", patches), ("time", times)):
            np.testing.assert_array_equal(npz[name], expected)
            np.testing.assert_array_equal(tensors.get_tensor(name), expected)


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_files_without_any_image_are_complete(tmp_path, model, suffix):  # noqa: F811
    (tmp_path / "a.png").write_bytes(b"broken")
    report = go(tmp_path / "a.png", tmp_path / f"f{suffix}", model, EmbedSettings(size=32, dense=True))
    assert report[:2] == (0, 1)
    if suffix == ".npz":
        assert np.load(report.out)["patches"].shape == (0, 4, 32)
    else:
        with safe_open(report.out, "np") as tensors:
            assert tensors.get_tensor("cls").shape == (0, 32)


def test_names_that_are_not_text_are_escaped(tmp_path, model):  # noqa: F811
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / os.fsdecode(b"caf\xe9.png")).write_bytes(noise_png())
    (tmp_path / "p" / 'ünïcode, "quoted".png').write_bytes(b"broken")
    for suffix in SUFFIXES:
        report = go(tmp_path / "p", tmp_path / f"f{suffix}", model)
        assert report[:2] == (1, 1)
        assert list(failures(report.out)) == [str(tmp_path / "p" / 'ünïcode, "quoted".png')]
    assert np.load(tmp_path / "f.npz")["path"].tolist() == paths(tmp_path / "f.parquet")


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
@pytest.mark.parametrize("fit", ["keep", "pad", "native"])
def test_arrays_of_different_grids_are_refused(photos, tmp_path, model, suffix, fit):  # noqa: F811
    with pytest.raises(EmbedError, match=r"a grid of its own, which .* cannot hold; write \.parquet"):
        go(photos, tmp_path / f"f{suffix}", model, EmbedSettings(size=32, dense=True, fit=fit))
    assert os.listdir(tmp_path) == ["photos"]


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
@pytest.mark.parametrize("written", [False, True])
def test_a_run_stopped_while_it_ends_gives_the_same_bytes(photos, tmp_path, model, suffix, written):  # noqa: F811
    go(photos, tmp_path / f"whole{suffix}", model)
    out = tmp_path / f"f{suffix}"

    def stop(*_: object) -> None:
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartitionFolder, "remove" if written else "read_tables", stop)
        with pytest.raises(Stop):
            go(photos, out, model)
    assert out.exists() == written
    assert go(photos, out, model)[:3] == (11, 1, 12)
    assert out.read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_a_damaged_partition_is_named_before_it_is_joined(photos, tmp_path, model, suffix):  # noqa: F811
    out = tmp_path / f"f{suffix}"
    go(photos, tmp_path / f"whole{suffix}", model)
    interrupted(photos, out, model)
    damaged = tmp_path / f"{out.name}.parts" / "00000000.parquet"
    overwritten(damaged, "page")
    with pytest.raises(EmbedError, match=r"00000000\.parquet is damaged"):
        go(photos, out, model)
    assert not out.exists()
    damaged.unlink()
    assert go(photos, out, model)[:3] == (11, 1, 8)
    assert out.read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_a_run_of_an_earlier_format_is_refused(photos, tmp_path, model):  # noqa: F811
    """Nothing of it is lost unless it is to be replaced."""
    folder = tmp_path / "f.parquet.parts"
    folder.mkdir()
    for name in ("job.json", "000000.parquet", "begun.parquet"):
        (folder / name).write_text("{}")
    with pytest.raises(EmbedError, match=r"former version of veca.*finish it with that version, or .*--overwrite"):
        go(photos, tmp_path / "f.parquet", model)
    assert len(os.listdir(folder)) == 3
    assert go(photos, tmp_path / "f.parquet", model, overwrite=True).pictures == 11
    assert not folder.exists()
