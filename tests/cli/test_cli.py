"""The commands as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import GOLDEN, make_tiny
from PIL import Image
from sample_images import noise_image
from typer.testing import CliRunner

import veca
from veca.cli.common import count_workers
from veca.cli.main import app, main
from veca.config import SIZES
from veca.flops import model_flops

run = CliRunner().invoke


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model and three pictures, one of them broken."""
    veca.save(make_tiny(), tmp_path / "model")
    (tmp_path / "photos").mkdir()
    noise_image(0, 60, 40).save(tmp_path / "photos" / "a.png")
    noise_image(1, 50, 90).save(tmp_path / "photos" / "b.jpg")
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"\xff\xd8\xff no picture")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [[], ["demo"], ["embed"], ["distill"], ["report"], ["info"], ["convert"], ["export"], ["explore"], ["serve"]],
)
def test_help_of_every_command_is_complete(command: list[str]) -> None:
    result = run(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output
    if not command:
        assert all(
            verb in result.output for verb in ("demo", "embed", "distill", "report", "info", "convert", "export")
        )


def test_version_is_that_of_the_package() -> None:
    assert run(app, ["--version"]).output.startswith(f"veca {veca.__version__}")


def test_embed_writes_features_and_lists_failures(folder: Path) -> None:
    out = folder / "features.parquet"
    options = ["--model", str(folder / "model"), "--cores", "16", "--size", "48", "--dense", "--workers", "0"]
    options += ["--decode", "pillow"]
    result = run(app, ["embed", str(folder / "photos"), "--out", str(out), *options])
    assert result.exit_code == 3, result.output
    table = pq.read_table(out).to_pydict()
    assert [Path(path).name for path in table["path"]] == ["a.png", "b.jpg"]
    assert table["width"] == [60, 50]
    assert "broken.jpg" in (folder / "features.parquet.failures.csv").read_text()
    with torch.no_grad():
        expected = veca.load(folder / "model")(veca.images.load_image(folder / "photos" / "b.jpg", 48)[None], 16)
    patches = np.frombuffer(table["patches"][1], "<f2")
    np.testing.assert_allclose(table["cls"][1], expected.cls[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(patches, expected.patches.flatten(), rtol=1e-3, atol=1e-3)

    again = run(app, ["embed", str(folder / "photos"), "--out", str(out), *options])
    assert isinstance(again.exception, ValueError)
    assert "--overwrite" in str(again.exception)


@pytest.mark.usefixtures("nothing_ships")
def test_embed_with_a_named_size_says_the_weights_are_random(folder: Path) -> None:
    result = run(app, ["embed", str(folder / "photos" / "a.png"), "--out", str(folder / "f.parquet"), "--size", "32"])
    assert result.exit_code == 0, result.output
    assert "weights are random" in result.stderr
    assert len(pq.read_table(folder / "f.parquet")["cls"][0]) == 192


@pytest.mark.usefixtures("nothing_ships")
def test_info_shows_size_and_cost(folder: Path) -> None:
    shown = run(app, ["info", "--model", str(folder / "model"), "--size", "64", "--cores", "24"])
    assert shown.exit_code == 0
    assert "GFLOPs, 64 px, C = 24" in shown.output
    facts = json.loads(run(app, ["info", "--model", "veca_base", "--size", "512", "--json"]).output)
    assert facts["parameters"] == 85_725_089
    assert facts["provenance"]["weights"] == "random"
    assert facts["gflops"]["64"] == model_flops(SIZES["veca_base"], 512, 512, 64) / 1e9
    assert set(facts["gflops"]) == {str(c) for c in range(8, 65, 8)}
    veca.save(make_tiny(mlp_ratio=4.0, widths=(1.0, 0.25)), folder / "elastic")
    elastic = json.loads(run(app, ["info", "--model", str(folder / "elastic"), "--cores", "8", "--json"]).output)
    assert list(elastic["gflops"]) == ["8", "8, width 0.25"]
    assert elastic["gflops"]["8, width 0.25"] < 0.7 * elastic["gflops"]["8"]
    official = json.loads(run(app, ["info", "--model", str(GOLDEN / "official_checkpoint.pt"), "--json"]).output)
    assert official["provenance"]["global_step"] == 7
    for wrong in (["--size", "100"], ["--cores", "65"], ["--width", "2"]):
        assert isinstance(run(app, ["info", "--model", "veca_tiny", *wrong]).exception, ValueError)


def test_converting_there_and_back_changes_nothing(tmp_path: Path) -> None:
    source = GOLDEN / "official_checkpoint.pt"
    assert run(app, ["convert", "--model", str(source), "--out", str(tmp_path / "ours")]).exit_code == 0
    assert run(app, ["convert", "--model", str(tmp_path / "ours"), "--out", str(tmp_path / "back.pt")]).exit_code == 0
    before, after = (torch.load(path, weights_only=True) for path in (source, tmp_path / "back.pt"))
    assert before["config"] == after["config"]
    assert all(torch.equal(before["student"][name], after["student"][name]) for name in before["student"])
    refused = run(app, ["convert", "--model", str(source), "--out", str(tmp_path / "ours")])
    assert "exists" in str(refused.exception)
    assert run(app, ["convert", "--model", str(source), "--out", str(tmp_path / "ours"), "--overwrite"]).exit_code == 0


def test_a_folder_that_is_made_is_named_and_one_left_empty_is_removed(folder: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "new" / "deep", ["--model", str(folder / "model"), "--size", "64"]
    refused = run(app, ["figure", "paths", "nowhere.png", "--out", str(out / "f.png"), *options])
    assert refused.exit_code != 0
    assert not out.parent.exists()
    drawn = run(app, ["figure", "paths", str(folder / "photos" / "a.png"), "--out", str(out / "f.png"), *options])
    assert drawn.exit_code == 0, drawn.output
    assert f"Made the folder {out}\n" in drawn.stderr
    assert (out / "f.png").is_file()


def test_demo_writes_its_page(folder: Path) -> None:
    out = folder / "r.html"
    picture, model = str(folder / "photos" / "a.png"), str(folder / "model")
    result = run(app, ["demo", picture, "--out", str(out), "--model", model, "--size", "64"])
    assert result.exit_code == 0, result.output
    assert str(out) in result.output.replace("\n", "")
    assert "data:image" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "--model", "veca_bose"], "no such file or folder"),
        (["embed", "nowhere", "--out", "f.parquet"], "nowhere"),
        (["embed", ".", "--out", "f.parquet", "--device", "warp"], "device 'warp' cannot be used"),
        (["embed", ".", "--out", "f.doc"], "f.doc"),
        (["embed", ".", "--out", "f.parquet", "--device", "warp"], "On this machine there is cpu"),
        (["embed", "a.png", "--out", "a.png/f.parquet", "--size", "32"], "a.png/f.parquet cannot be written"),
        (["demo", "a.png", "--out", "a.png/f.html", "--size", "32"], "a.png/f.html cannot be written"),
        (["figure", "paths", "a.png", "--out", "a.png/f.png", "--size", "32"], "a.png/f.png cannot be written"),
        (
            ["cores", "--model", "veca_tiny", "a.png", "--out", "a.png/f.json", "--size", "32"],
            "a.png/f.json cannot be written",
        ),
        (["convert", "--model", "veca_tiny", "--out", "a.png/f"], "a.png/f/model.safetensors cannot be written"),
        (["export", "--model", "veca_tiny", "--out", "a.png/f.onnx"], "a.png/f.onnx cannot be written"),
        (["demo", "nowhere.jpg"], "nowhere.jpg"),
        (["convert", "--model", "veca_large", "--out", "x.pt"], "no weights ship"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (32, 32)).save("a.png")
    monkeypatch.setattr(sys, "argv", ["veca", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    shown = capsys.readouterr().err
    assert "error: " in shown
    assert message in shown
    assert "Traceback" not in shown
    assert not list(tmp_path.glob("f.*"))


@pytest.mark.filterwarnings("default::UserWarning")
def test_warnings_are_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        (folder / f"photos/IMG_{i}.{('HEIC', 'heif', 'cr3')[i]}").write_bytes(b"no matter what")
    options = ["--model", str(folder / "model"), "--size", "32", "--workers", "0"]
    embed = ["veca", "embed", str(folder / "photos"), "--out", str(folder / "f.parquet"), *options]
    monkeypatch.setattr(sys, "argv", embed)
    with pytest.raises(SystemExit):
        main()
    told = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(told) == 1
    assert told[0].startswith("warning: 3 files were left out: ")
    assert told[0].endswith(" to JPEG or PNG first")


def test_an_interrupted_embed_resumes_to_the_same_file(folder: Path) -> None:
    """Ctrl-C in the middle: status 130 and a hint; the same command then gives what an uninterrupted one gives."""
    for i in range(60):
        noise_image(i, 64, 64).save(folder / "photos" / f"p{i:03d}.png")
    command = ["embed", str(folder / "photos"), "--model", str(folder / "model")]
    command += ["--size", "160", "--batch-size", "4", "--workers", "1", "--no-progress", "--dense"]
    whole, broken = folder / "whole.parquet", folder / "broken.parquet"
    process = subprocess.Popen(
        [sys.executable, "-m", "veca", *command, "--out", str(broken)], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # as here: sums of several threads are others
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (folder / "broken.parquet.parts" / "_job.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGINT)
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130, stderr
    assert "continues where this one stopped" in stderr
    assert not broken.exists()
    for out in (broken, whole):
        assert run(app, [*command, "--out", str(out)]).exit_code == 3
    assert pq.read_table(broken).equals(pq.read_table(whole))


def test_all_cores_have_a_name(folder: Path) -> None:
    command = ["embed", str(folder / "photos" / "a.png"), "--model", str(folder / "model"), "--size", "32"]
    wrong = run(app, [*command, "--cores", "8,16", "--out", str(folder / "x.parquet")])
    assert wrong.exit_code == 2
    assert "'8,16' is no budget" in wrong.stderr
    assert run(app, [*command, "--cores", "all", "--out", str(folder / "all.parquet")]).exit_code == 0
    assert pq.read_table(folder / "all.parquet")["cores"].to_pylist() == [64]


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "veca", "demo", "a:dog:b.webp"], cwd=tmp_path, capture_output=True, text=True
    )
    assert "a:dog:b.webp: no such file" in ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process may use all CPUs")
def test_workers_are_as_many_as_the_cpus_a_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert (count_workers(None), count_workers(None, limit=None), count_workers(30), count_workers(0)) == (8, 12, 30, 0)
