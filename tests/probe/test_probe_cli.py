"""`veca probe` as a user types it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import make_tiny
from test_probe_dense_run import make_pairs
from tiny_datasets import make_folder
from typer.testing import CliRunner

import veca
from veca.cli.main import app, main
from veca.probe.results import read_results

run = CliRunner().invoke
QUICK = ["--workers", "0", "--no-progress", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("probe")
    veca.save(make_tiny(), root / "model")
    make_folder(root / "mine", 7)
    make_pairs(root / "halves", "masks", 3)
    make_pairs(root / "steps", "depths", 3)
    return root


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in (folder / "rows").glob("*.json")]
    return sorted(found, key=lambda row: (row["size"], row["cores"] or 0))


def test_help_of_every_probe_is_complete() -> None:
    for command in ([], ["classify"], ["knn"], ["segment"], ["depth"]):
        result = run(app, ["probe", *command, "--help"])
        assert result.exit_code == 0
        assert "Usage" in result.output


def test_classify_writes_rows_and_a_table(folder: Path, tmp_path: Path) -> None:
    options = ["--cores", "8,64", "--size", "32,48", "--epochs", "4", "--rates", "0.1", "--decays", "0,1e-4", *QUICK]
    command = [
        "probe",
        "classify",
        "--model",
        str(folder / "model"),
        "--data",
        str(folder / "mine"),
        "--out",
        str(tmp_path),
    ]
    result = run(app, [*command, *options])
    assert result.exit_code == 0, result.output
    assert "scored on test" in result.output
    assert [(row["size"], row["cores"]) for row in rows(tmp_path)] == [(32, 8), (32, 64), (48, 8), (48, 64)]
    assert all(row["metrics"]["top1"] == 100 for row in rows(tmp_path))
    assert "100 ± " in result.output
    assert all(0 < row["interval"]["top1"][0] < row["interval"]["top1"][1] == 100 for row in rows(tmp_path))
    assert rows(tmp_path)[0]["model"]["name"] == str(folder / "model")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").iterdir()}
    assert run(app, [*command, *options]).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").iterdir()} == before


def test_knn_at_all_budgets(folder: Path, tmp_path: Path) -> None:
    options = ["--cores", "all", "--size", "32", "--k", "1,3", "--limit", "8", *QUICK]
    command = ["probe", "knn", "--model", str(folder / "model"), "--data", str(folder / "mine"), "--out", str(tmp_path)]
    assert run(app, [*command, *options]).exit_code == 0
    assert [row["cores"] for row in rows(tmp_path)] == [8, 16, 24, 32, 40, 48, 56, 64]
    assert rows(tmp_path)[0]["data"]["train"] == 8
    assert rows(tmp_path)[0]["protocol"]["data"]["limit"] == 8


@pytest.mark.parametrize(
    ("probe", "data", "quick"), [("knn", "mine", ["--k", "1"]), ("segment", "halves", ["--steps", "2"])]
)
def test_a_sweep_over_widths(folder: Path, tmp_path: Path, probe: str, data: str, quick: list[str]) -> None:
    veca.save(make_tiny(mlp_ratio=4.0, widths=(0.25, 1)), folder / "elastic")
    out, model = ["--data", str(folder / data), "--out", str(tmp_path / "out")], ["--model", str(folder / "elastic")]
    options = ["--cores", "8,64", "--size", "32", *quick, *QUICK]
    result = run(app, ["probe", probe, *model, *out, *options, "--widths", "all"])
    assert result.exit_code == 0, result.output
    found = {(row["cores"], row.get("width")): row for row in rows(tmp_path / "out")}
    assert found.keys() == {(8, None), (8, 0.25), (64, None), (64, 0.25)}
    assert "width" in result.output
    results, unusable = read_results(tmp_path / "out")
    assert not unusable
    assert {each.model.rpartition(", ")[2] for each in results if each.model.endswith("0.25")} == {"width 0.25"}
    plain = run(app, ["probe", probe, *model, *out, *options])  # one width: the rows that are there
    assert plain.exit_code == 0
    assert len(rows(tmp_path / "out")) == 4
    wrong = run(app, ["probe", probe, *model, *out, *options, "--widths", "2"])
    assert "width=2.0; a width is a number above 0, at most 1" in str(wrong.exception)


@pytest.mark.parametrize(("task", "data", "metric"), [("segment", "halves", "mIoU"), ("depth", "steps", "rmse")])
def test_dense_probes_write_one_row(folder: Path, tmp_path: Path, task: str, data: str, metric: str) -> None:
    options = ["--cores", "8", "--size", "32", "--steps", "2", "--batch-size", "2", "--norm", "standard", *QUICK]
    command = ["probe", task, "--model", str(folder / "model"), "--data", str(folder / data), "--out", str(tmp_path)]
    result = run(app, [*command, *options])
    assert result.exit_code == 0, result.output
    (row,) = rows(tmp_path)
    assert row["metric"] == metric
    assert metric in result.output
    assert (tmp_path / row["gallery"][0]["prediction"]).exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--data", "pts"], "did you mean 'pets'?"),
        (["--data", "pets", "--root", "gone"], "no folder gone"),
        (["--data", "mine", "--cores", "8,65"], "cores 65"),
        (["--data", "mine", "--size", "32,40"], "size 40: model takes multiples of 16. Nearest: 48"),
        (["--data", "halves"], "has pictures all in one folder"),
        (["--data", "mine", "--also", "halves"], "has pictures all in one folder"),
    ],
)
def test_mistakes_are_one_message(
    folder: Path, options: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["veca", "probe", "classify", "--model", "model", *options, *QUICK])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert says.replace(" ", "") in shown.replace("\n", "").replace(" ", "")
    assert not (folder / "results/rows").exists()


def test_killed_and_run_again(folder: Path, tmp_path: Path) -> None:
    """As with kill -9: what was finished is kept, and the end is that of a run that was never killed."""
    command = [
        sys.executable,
        "-m",
        "veca",
        "probe",
        "classify",
        "--model",
        str(folder / "model"),
        "--data",
        str(folder / "mine"),
    ]
    command += ["--cores", "8,16,32,64", "--size", "32,48", "--epochs", "60", "--out", str(tmp_path / "f"), *QUICK]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list((tmp_path / "f").glob("rows/*.json")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "f/rows").glob("*.json")}
    assert 0 < len(kept) < 8
    again = [part.replace(str(tmp_path / "f"), str(tmp_path / "whole")) for part in command]
    for arguments in (command, again):
        assert run(app, arguments[3:]).exit_code == 0
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in (tmp_path / "f/rows").iterdir()}.items()
    same = ("cores", "size", "metrics", "best", "sweep", "curve")
    ended, whole = ([[row[key] for key in same] for row in rows(tmp_path / name)] for name in ("f", "whole"))
    assert ended == whole
    assert len(whole) == 8
