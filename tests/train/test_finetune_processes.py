"""Fine-tuning in two processes: what one would do with the batch of both, and one goes on where two were stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tiny
from PIL import Image
from runs import Process, finish, reached, start_all, table, tensors, wait_for
from typer.testing import CliRunner

import veca
from veca.cli.main import app
from veca.train.checkpoints import list_checkpoints
from veca.train.finetune.run import Finetuning, finetune
from veca.train.finetune.settings import FinetuneClassifySettings
from veca.utils.files import locked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, pictures of two classes, and pictures with masks and depths, of which more and more is to be
    ignored. Of each kind one to learn from cannot be read.
    """
    folder = tmp_path_factory.mktemp("place")
    veca.save(make_tiny(), folder / "model")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 10)):
        dense = "masks/images/SPLIT", "masks/masks/SPLIT", "masks/depths/SPLIT"
        for kind in ("classes/SPLIT/dark", "classes/SPLIT/light", *dense):
            (folder / kind.replace("SPLIT", split)).mkdir(parents=True)
        for i in range(count):
            for name, mean in (("dark", 90), ("light", 150)):
                pixels = rng.normal(mean, 60, (36, 44, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"classes/{split}/{name}/{i}.png")
            mask = (pixels[..., 0] > 150).astype(np.uint8)
            mask[: 3 * i] = 255
            Image.fromarray(pixels).save(folder / f"masks/images/{split}/{i}.png")
            Image.fromarray(mask).save(folder / f"masks/masks/{split}/{i}.png")
            depth = np.where(mask < 255, 20 * pixels[..., 0].astype(np.uint16) + 500, 0).astype(np.uint16)
            Image.fromarray(depth).save(folder / f"masks/depths/{split}/{i}.png")
    for torn in ("classes/train/dark/3.png", "masks/images/train/3.png"):
        (folder / torn).write_bytes(b"\x89PNG torn")
    return folder


def command(place: Path, task: str, folder: Path, *more: object) -> list[object]:
    data = place / ("classes" if task == "classify" else "masks")
    found = [
        "finetune",
        task,
        "--model",
        place / "model",
        "--data",
        data,
        "--out",
        folder,
        "--device",
        "cpu",
        "--workers",
        0,
    ]
    for setting in ("head_epochs=2", "every=4", "progress=false", "ema=0.8"):
        found += ["--set", setting]
    return [*found, "--size", 32, "--cores", "8,64", "--rate", "1e-3", "--skip-bad", *more]


CLASSIFY = "--batch-size", 4, "--epochs", 2, "--set", "augment=trivial", "--set", "mixup=0.3"  # 12 steps
DEPTH = "--batch-size", 4, "--epochs", 1, "--set", "augment=colour"  # 3 steps
SEGMENT = "--batch-size", 2, "--epochs", 2, "--set", "augment=colour"  # 12 steps: one picture for each process


def in_one(arguments: list[object]) -> None:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.exception


def in_two(arguments: list[object], folder: Path) -> list[Process]:
    run = start_all(arguments, folder, 2)
    assert finish(run) == [0, 0], [process.text() for process in run]
    return run


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    in_one(command(place, "classify", place / "alone", *CLASSIFY))
    return place / "alone"


def assert_same_run(found: Path, expected: Path) -> None:
    """All numbers of two runs, but for the order in which they were summed up."""
    assert_same_steps(found, expected)
    one, two = (json.loads((folder / "result.json").read_text()) for folder in (found, expected))
    for key in ("before", "after", "best", "matrix", "problems", "images"):
        assert one[key] == two[key], key


def assert_same_steps(found: Path, expected: Path) -> None:
    for name in ("metrics.csv", "validation.csv"):
        ours, theirs = table(found / name), table(expected / name)
        assert [row.keys() for row in ours] == [row.keys() for row in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert {k: float(v) for k, v in a.items()} == pytest.approx({k: float(v) for k, v in b.items()}, rel=1e-5)
    a, b = (tensors(list_checkpoints(folder / "checkpoints")[-1]) for folder in (found, expected))
    assert a.keys() == b.keys()
    for name in a:
        ours, theirs = a[name], b[name]
        if name.endswith(
            "qkv.bias"
        ):  # softmax cancels most of the keys': their gradient is noise, which AdamW enlarges
            ours, theirs = (torch.cat([q, v]) for q, _, v in (ours.chunk(3), theirs.chunk(3)))
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6), (name, float((ours - theirs).abs().max()))


def test_two_processes_classify_as_one(place: Path, alone: Path, tmp_path: Path) -> None:
    run = in_two(command(place, "classify", tmp_path / "run", *CLASSIFY), tmp_path / "run")
    assert_same_run(tmp_path / "run", alone)
    said = [[word in process.text() for word in ("val at step", "Report: ")] for process in run]
    assert said == [[True, True], [False, False]], "the first speaks for all"


@pytest.mark.parametrize(
    "more",
    [SEGMENT, (*SEGMENT, "--fit", "native", "--max-patches", 6, "--rate", "2e-4")],  # at 1e-3 AdamW enlarges rounding
    ids=["squares", "native"],
)
def test_two_processes_segment_as_one(place: Path, tmp_path: Path, more: tuple[object, ...]) -> None:
    """A mean over the pixels that count in both processes, of which one has more, and sometimes no picture at all."""
    in_one(command(place, "segment", tmp_path / "one", *more))
    in_two(command(place, "segment", tmp_path / "two", *more), tmp_path / "two")
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert json.loads((tmp_path / "two/result.json").read_text())["problems"]


def test_two_processes_measure_depth_as_one(place: Path, tmp_path: Path) -> None:
    """By a loss over the pixels of both that is no mean over them.

    Few steps: its absolute values have kinks, where a rounding error becomes another gradient.
    """
    in_one(command(place, "depth", tmp_path / "one", *DEPTH))
    in_two(command(place, "depth", tmp_path / "two", *DEPTH), tmp_path / "two")
    assert_same_steps(tmp_path / "two", tmp_path / "one")


def test_one_process_continues_what_two_began(place: Path, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = start_all(command(place, "classify", folder, *CLASSIFY, "--workers", 1), folder, 2)
    wait_for(folder, 4, run)
    run[1].kill(signal.SIGTERM)  # with the process that decodes for it; the other hears of it
    assert finish(run) == [143, 143], [process.text() for process in run]
    assert ["Stopped, and saved" in process.text() for process in run] == [True, False]
    assert 4 < reached(folder) < 12
    in_one(command(place, "classify", folder, *CLASSIFY))
    assert_same_run(folder, alone)


def test_two_processes_continue_what_one_began(place: Path, alone: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(alone, tmp_path / "run")
    shutil.rmtree(list_checkpoints(folder / "checkpoints")[-1])  # as if it had been killed before it was written
    (folder / "result.json").unlink()
    in_two(command(place, "classify", folder, *CLASSIFY), folder)
    assert "resumed: from step 8" in (folder / "events.txt").read_text()
    assert_same_run(folder, alone)


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_right_after_the_first_checkpoint(place: Path, alone: Path, tmp_path: Path, processes: int) -> None:
    """Which is that of step 0: its scores were written before it, and are not computed again."""

    def before() -> None:
        Finetuning.train_step = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]

    folder = tmp_path / "run"
    (run,) = start_all(command(place, "classify", folder, *CLASSIFY), folder, 1, before)
    assert run.wait() == -signal.SIGKILL, run.text()
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-00000000"]
    (in_one if processes == 1 else lambda asked: in_two(asked, folder))(command(place, "classify", folder, *CLASSIFY))
    assert "resumed: from step 0" in (folder / "events.txt").read_text()
    assert {row["step"] for row in table(folder / "validation.csv")} >= {"0"}
    assert_same_run(folder, alone)


def test_a_second_run_in_a_folder_is_refused(place: Path, alone: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(alone, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with locked(folder):
        run = start_all(command(place, "classify", folder, *CLASSIFY, "--overwrite"), tmp_path / "second", 1)
        assert finish(run) == [1]
    assert f"error: another run is at work in {folder}; wait for it" in run[0].text()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_batch_that_cannot_be_shared(place: Path, tmp_path: Path) -> None:
    arguments = [
        "finetune",
        "classify",
        "--model",
        "no model",
        "--data",
        "no data",
        "--out",
        tmp_path / "run",
        "--batch-size",
        5,
    ]
    run = start_all([*arguments, "--device", "cpu"], tmp_path / "run", 2)
    assert finish(run) == [1, 1]
    assert "batch=5: must be a multiple of 2, the number of processes" in run[0].text()
    assert not (tmp_path / "run").exists()


def test_a_device_that_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="device 'cuda:1' for 2 processes: each takes its own, so name cpu"):
        finetune("no model", "no data", Path("run"), FinetuneClassifySettings(), device="cuda:1")
