"""The dial: `compute` picks cores, width and size from a quality-cost table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_tiny

import veca
from veca.compute import TABLE_KEY, CostTable, resolve_compute
from veca.flops import model_flops


def row(cores: int, width: float, size: int, ms: float | None, quality: float) -> dict[str, Any]:
    return {"cores": cores, "width": width, "size": size, "gflops": 1.0, "ms": ms, "quality": quality}


def make_table() -> dict[str, Any]:
    """At 64 px a quarter-wide MLP beats few cores at the same time; 48 px is better than both."""
    rows = [row(64, 1, 64, 10, 1.0), row(8, 1, 64, 5, 0.7), row(64, 0.25, 64, 5, 0.9), row(8, 0.25, 64, 3, 0.6)]
    rows += [row(64, 1, 48, 5, 0.95), row(8, 0.25, 48, 1, 0.5)]
    return {"version": 1, "device": "a test", "settings": rows}


def make_dialled(table: dict[str, Any] | None = None, **overrides: Any) -> veca.Veca:
    model = make_tiny(mlp_ratio=4.0, widths=(0.25, 1), **overrides)
    model.provenance = {TABLE_KEY: make_table() if table is None else table}
    return model


def images(height: int = 64, width: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def test_the_best_setting_within_the_share_is_taken() -> None:
    model, x = make_dialled(), images()
    for compute, setting in {1: (64, 1), 0.5: (64, 0.25), 0.49: (8, 0.25), 0.3: (8, 0.25)}.items():
        found, cores, width = model(x, compute=compute), *setting
        torch.testing.assert_close(found.patches, model(x, cores, width=width).patches, rtol=0, atol=0)
    choice = resolve_compute(model, 0.5, 64)
    assert choice == (64, 0.25, (64, 64), 0.5, 0.9, "time on a test")
    assert resolve_compute(model, 0.5) == choice  # the largest size of the table


def test_compute_overrides_the_default_budget_and_width_of_the_model() -> None:
    model = make_dialled()
    model.budget, model.width = 16, 0.25
    assert model(images(), compute=1).cores.shape[1] == 64


def test_resizing_may_be_the_best_setting() -> None:
    model, x = make_dialled(), images(64, 96)
    choice = resolve_compute(model, 0.5, (64, 96), resize=True)
    assert choice == (64, 1, (48, 80), 0.5, 0.95, "time on a test")
    out = model(x, compute=0.5, resize=True)
    assert out.grid == (3, 5)
    smaller = F.interpolate(x, (48, 80), mode="bicubic", antialias=True)
    torch.testing.assert_close(out.patches, model(smaller).patches)
    assert model(x.bfloat16(), compute=0.5, resize=True).grid == (3, 5)
    assert resolve_compute(model, 1, (64, 96), resize=True).size == (64, 96)


def test_the_nearest_size_of_the_table_counts() -> None:
    model = make_dialled()
    assert resolve_compute(model, 0.2, 48).cores == 8
    assert resolve_compute(model, 0.2, 48).cost == 0.2
    assert resolve_compute(model, 0.5, 1024).size == (1024, 1024)
    assert resolve_compute(model, 0.5, 1024, resize=True).size == (768, 768)


def test_a_cost_that_no_setting_has_warns_once_and_takes_the_cheapest() -> None:
    model = make_dialled()
    with pytest.warns(UserWarning, match=r"compute=0.1: the cheapest setting costs 0.30 .* resize=True"):
        assert resolve_compute(model, 0.1, 64).cores == 8
    model(images(), compute=0.1)  # a second warning would be an error
    assert resolve_compute(model, 0.1, 64, resize=True).size == (48, 48)


def test_without_a_table_flops_decide_over_trained_budgets_and_widths() -> None:
    model = make_tiny(mlp_ratio=4.0, widths=(0.25, 0.5, 1), budgets=(8, 32, 64))
    assert model.quality_cost is None
    full = model_flops(model.config, 128, 128, 64)
    pairs = [(c, w) for c in (8, 32, 64) for w in (0.25, 0.5, 1)]
    for compute in (1, 0.8, 0.6, 0.5):
        costs = {pair: model_flops(model.config, 128, 128, pair[0], pair[1]) / full for pair in pairs}
        allowed = {pair: cost for pair, cost in costs.items() if cost <= compute}
        choice = resolve_compute(model, compute, 128)
        assert (choice.cores, choice.width) == max(allowed, key=lambda pair: allowed[pair])
        assert choice.cost == pytest.approx(allowed[choice.cores, choice.width])
        assert choice[4:] == (None, "FLOPs")


def test_models_of_the_paper_have_cores_and_sizes() -> None:
    model = make_tiny()
    least = model_flops(model.config, 128, 128, 8) / model_flops(model.config, 128, 128, 64)
    assert resolve_compute(model, least, 128)[:2] == (8, 1)
    choice = resolve_compute(model, 0.9 * least, 128, resize=True)
    assert choice.width == 1
    assert choice.size[0] < 128
    assert choice.cost <= 0.9 * least


@pytest.mark.parametrize("compute", [0, -1, 1.5, float("nan"), float("inf"), True, "auto", "half", torch.tensor(0.5)])
def test_a_wrong_share_is_a_named_error(compute: Any) -> None:
    with pytest.raises(veca.VecaError, match="compute=.*above 0, at most 1"):
        make_dialled()(images(), compute=compute)


def test_numbers_of_numpy_are_shares() -> None:
    assert resolve_compute(make_dialled(), np.float32(0.5)).width == 0.25


@pytest.mark.parametrize("given", [{"cores": 8}, {"width": 0.25}, {"cores": 8, "width": 1}])
def test_compute_excludes_cores_and_width(given: dict[str, Any]) -> None:
    with pytest.raises(veca.VecaError, match="pass the one or the other"):
        make_dialled()(images(), compute=0.5, **given)


def test_other_mistakes() -> None:
    model = make_dialled()
    with pytest.raises(veca.VecaError, match="resize=True goes with compute"):
        model(images(), resize=True)
    with pytest.raises(veca.VecaError, match="image is 60×64"):
        model(images(60, 64), compute=0.5)
    with pytest.raises(veca.VecaError, match="size=100; sides must be multiples of 16"):
        resolve_compute(model, 0.5, 100)


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_the_table_travels_with_the_weights(tmp_path: Path, suffix: str) -> None:
    model = make_dialled()
    veca.save(model, tmp_path / f"model{suffix}")
    loaded = veca.load(tmp_path / f"model{suffix}")
    assert loaded.quality_cost == model.quality_cost == CostTable.from_dict(make_table())
    assert loaded.provenance == model.provenance | {TABLE_KEY: make_table()}
    if not suffix:
        assert json.loads((tmp_path / "model/config.json").read_text())["provenance"][TABLE_KEY] == make_table()


def _change(path: str, value: Any) -> dict[str, Any]:
    table = make_table()
    *keys, last = path.split(".")
    part: Any = table
    for key in keys:
        part = part[int(key) if key.isdecimal() else key]
    part[last] = value
    return table


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (_change("version", 2), "version=2: must be 1, which this veca reads"),
        (_change("settings", []), "one row or more"),
        ({"settings": [row(65, 1, 64, None, 1.0)]}, "within the 64 cores"),
        (_change("settings.0.ms", float("nan")), "finite number"),
        (_change("settings.0.ms", None), "quality_cost.device"),
        (_change("settings.0.ms", -1), "above 0"),
        (_change("settings.0.width", 1.5), "at most 1"),
        (_change("settings.0.extra", 1), "unknown key"),
        (_change("extra", 1), "unknown key"),
        (_change("settings.4.cores", 32), "at every size"),
        (_change("settings.1.width", 0.25), "none twice"),
        ([], "keys with values"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, table: Any, says: str) -> None:
    with pytest.raises(veca.VecaError, match=says):
        make_dialled(table)
    model = make_tiny()
    model.provenance[TABLE_KEY] = table
    veca.save(model, tmp_path / "model")
    with pytest.raises(veca.CheckpointError, match=rf"model.safetensors: its quality-cost table: .*{says}"):
        veca.load(tmp_path / "model")


def test_the_front_has_what_nothing_cheaper_surpasses() -> None:
    front = CostTable.from_dict(make_table()).front()
    assert [(each.cores, each.width, each.size) for each in front] == [
        (8, 0.25, 48),
        (8, 0.25, 64),
        (64, 1, 48),
        (64, 1, 64),
    ]


@pytest.mark.parametrize("with_table", [True, False])
def test_compute_is_compiled_as_one_graph(with_table: bool) -> None:
    torch.compiler.reset()
    model = make_dialled(depth=2) if with_table else make_tiny(depth=2, mlp_ratio=4.0, widths=(0.25, 1))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for options in ({"compute": 0.7}, {"compute": 0.5, "resize": True}):
            found, expected = compiled(images(), **options), model(images(), **options)
            assert found.grid == expected.grid
            torch.testing.assert_close(found.cores, expected.cores)
