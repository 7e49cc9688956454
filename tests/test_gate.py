"""The experiment on choosing settings by content tells a gate that pays from one that does not."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from tiny_datasets import make_folder

import veca

spec = importlib.util.spec_from_file_location("gate", Path(__file__).parents[1] / "tools/gate.py")
assert spec is not None
assert spec.loader is not None
gate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gate)
COSTS = {(8, 1.0): 0.2, (64, 1.0): 1.0}


def judge(predictable: bool, costs: dict[Any, float] = COSTS) -> dict[str, Any]:
    """Regrets of a heavy tail, which the first channel of the features tells, or nothing does."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2000, 8, generator=generator)
    signal = features[:, 0] if predictable else torch.randn(2000, generator=generator)
    regrets = {(8, 1.0): (2 * signal - 4).exp(), (64, 1.0): torch.zeros(2000)}
    return gate.judge(features, regrets, costs, gate_cost=0.0)


def test_a_gate_that_knows_pays_and_one_that_does_not_never_does() -> None:
    known, unknown = judge(True), judge(False)
    assert known["correlation"] > 0.95
    assert any(row["pays"] for row in known["table"])
    assert abs(unknown["correlation"]) < 0.2
    assert not any(row["pays"] for row in unknown["table"])


def test_the_first_pass_is_paid_for() -> None:
    """Where the small setting costs nearly as much as the full one, even a perfect gate does not pay."""
    assert not any(row["pays"] for row in judge(True, {(8, 1.0): 0.99, (64, 1.0): 1.0})["table"])
    (row,) = [row for row in judge(True)["table"] if row["share"] == 0.5]
    assert row["cost"] == pytest.approx(0.2 + 0.5, abs=1e-3)


def test_a_good_fixed_setting_is_part_of_the_baseline() -> None:
    hull = gate.lower_hull([(0.2, 1.0), (0.3, 0.05), (1.0, 0.0), (0.8, 0.9)])
    assert hull == [(0.2, 1.0), (0.3, 0.05), (1.0, 0.0)]
    assert gate.mixed_regret(hull, 0.25) == pytest.approx(0.525)
    assert gate.mixed_regret(hull, 0.1) == 1.0


def test_the_script_runs_on_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    veca.save(make_tiny(depth=1, mlp_ratio=4.0, widths=(0.25, 1), budgets=(8, 64)), tmp_path / "model")
    shutil.make_archive(str(tmp_path / "mine"), "tar", make_folder(tmp_path / "mine", 4))
    arguments = {"model": "model", "images": "mine.tar", "out": "gate.json", "size": "32", "batch": "4", "repeats": "1"}
    words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gate.py", *words, "--device", "cpu"])
    gate.main()
    result = json.loads(Path("gate.json").read_text())
    assert len(result["fixed"]) == 4
    assert result["images"] == 24
    assert result["full"] == [64, 1.0]
    assert [row["share"] for row in result["table"]] == list(gate.SHARES)
