"""Variants of a recipe in turn: what each learns, what they share, how long they take, and their table."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import Place, different, train
from safetensors.torch import load_file

from veca.train.engine import TrainMeter
from veca.train.recipe import load_recipe

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("ablate", ROOT / "tools/ablate.py")
assert spec is not None
assert spec.loader is not None
ablate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ablate)
CACHED = {"data__resident": 32, "data__augment": "flip", "data__short_side": 1.0, "resolutions": [{"odds": {32: 1}}]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


def write_recipe(place: Place, folder: Path, **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(place.recipe(**{**CACHED, "schedule__steps": 8, "log_every": 1, **changes}).to_yaml())
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["ablate.py", *map(str, arguments)])
    ablate.main()


def test_variants_are_the_runs_of_veca_distill(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    for name in ("DeviceImageCache", "TeacherMaps"):
        real = getattr(sys.modules["veca.train.distill"], name)
        monkeypatch.setattr(f"veca.train.distill.{name}", lambda *a, n=name, r=real: made.append(n) or r(*a))
    recipe, out = write_recipe(place, tmp_path, teacher__resident="bfloat16"), tmp_path / "out"
    variants = "--variant", "plain", "--variant", "dense objective.cls_weight=0 objective.mse_weight=0.5"
    arguments = recipe, "--out", out, "--device", "cpu", "--set", "seed=2", *variants
    run(monkeypatch, *arguments)
    assert made == ["DeviceImageCache", "TeacherMaps"], "made once for both"
    shown = capsys.readouterr().out

    for name, changes in (("plain", ["seed=2"]), ("dense", ["seed=2", *variants[3].split()[1:]])):
        train(load_recipe(recipe, changes), tmp_path / name)
        files = (folder / name / "model.safetensors" for folder in (out, tmp_path))
        assert different(*map(load_file, files)) == []
    with (out / "variants.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["plain", "dense"]
    assert rows[0]["steps"] == "8"
    facts = json.loads((out / "plain/summary.json").read_text())
    losses = [float(rows[0][f"loss, 32 px, {budget}"]) for budget in (8, 64)]
    assert facts["validation"] == pytest.approx(sum(losses) / 2, abs=1e-3)
    assert f"| dense | 8 | {rows[1]['images']} |" in shown

    made.clear()
    run(monkeypatch, *arguments)
    assert f"{out / 'plain'} is done" in capsys.readouterr().out
    assert made == []
    with pytest.raises(SystemExit, match=r"holds a run of another recipe \(seed: 2, now 3\)"):
        run(monkeypatch, *arguments, "--set", "seed=3")


def test_runs_take_the_time_that_is_given(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = write_recipe(place, tmp_path, schedule__warmup=4, schedule__steps=1000), tmp_path / "out"
    rates = iter([1.0, 960.0, 1000.0, 1040.0, *[1.0] * 100])  # images/s; the first does not count

    def rate(self: Any, *arguments: Any) -> dict[str, float]:
        values = real(self, *arguments)
        self.rate = next(rates)
        return {**values, "images_per_s": self.rate}

    real = TrainMeter.values
    monkeypatch.setattr(TrainMeter, "values", rate)
    run(monkeypatch, recipe, "--out", out, "--device", "cpu", "--minutes", 0.002, "--variant", "a")
    steps = round(60 * 0.002 * 1000 / 8)
    assert json.loads((out / "a/summary.json").read_text())["total_steps"] == steps == 15
    written = load_recipe(out / "a/recipe.yaml")
    assert (written.schedule.steps, written.schedule.warmup) == (15, 4)
    assert "length: 15 steps, 0.002 minutes at 1,000 images/s" in (out / "a/events.txt").read_text()
    train(written, tmp_path / "again")
    assert different(load_file(out / "a/model.safetensors"), load_file(tmp_path / "again/model.safetensors")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--variant: none is given"),
        (["--variant", "a", "--variant", "a batch=4"], "must have names that differ"),
        (["--variant", "batch=4"], "must be a name, as for a folder"),
        (["--variant", "../a"], "must be a name, as for a folder"),
        (["--variant", "a batsh=4"], "batsh"),
        (["--variant", "a", "--minutes", "-1"], "--minutes=-1: must be above 0"),
        (["--variant", "a", "--minutes", "1"], r"schedule.warmup=2: must be at least 4 with --minutes"),
    ],
)
def test_refusals(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    recipe = write_recipe(place, tmp_path, schedule__warmup=2)
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, recipe, "--out", tmp_path / "out", "--device", "cpu", *arguments)


@pytest.mark.parametrize("script", ["tiny-ablation.sh", "tiny-elastic.sh"])
def test_variants_of_the_scripts_are_possible(script: str, tmp_path: Path) -> None:
    """The command that the script gives to Python, caught before it runs."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > {tmp_path}/words\nexit 1\n')
    python.chmod(0o755)
    times = ["1"] if script == "tiny-ablation.sh" else []
    call = [ROOT / "recipes" / script, tmp_path, tmp_path / "out", *times, "veca_tiny"]
    subprocess.run(call, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=False)
    tool, recipe, *words = (tmp_path / "words").read_text().split("\0")[:-1]
    assert Path(tool).resolve() == ROOT / "tools/ablate.py"
    given = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    variants = dict(ablate.parse_variant(words[i + 1]) for i, word in enumerate(words) if word == "--variant")
    assert len(variants) == words.count("--variant")
    recipes = [load_recipe(recipe, [*given, *changes]).to_dict() for changes in variants.values()]
    assert all(one != other for one, other in itertools.combinations(recipes, 2)), "no two are the same"


def test_a_table_needs_finished_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no such folder"):
        run(monkeypatch, "--out", tmp_path / "none")
    with pytest.raises(SystemExit, match="no run in it is finished"):
        run(monkeypatch, "--out", tmp_path)
