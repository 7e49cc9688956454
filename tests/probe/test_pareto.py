"""`veca probe pareto`: a quality-cost table from rows and measured times, and its way into weights and commands."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_tiny
from test_probe_dense_run import make_pairs
from tiny_datasets import make_folder
from typer.testing import CliRunner

import veca
from veca.cli.main import app
from veca.compute import CostTable, MeasuredSetting
from veca.flops import model_flops
from veca.probe.backbones import load_backbone
from veca.probe.pareto import (
    ProbedSetting,
    collect_scores,
    draw_costs,
    make_cost_table,
    measure_settings,
    rate_settings,
)

QUICK = ["--workers", "0", "--no-progress", "--device", "cpu"]
GRID = ["--cores", "8,64", "--widths", "all"]
SETTINGS = {(c, w, s) for c in (8, 64) for w in (0.25, 1) for s in (32, 48)}


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, f"{result.output}{result.exception}"
    return result.output


def fails(*arguments: object) -> str:
    return str(CliRunner().invoke(app, [*map(str, arguments)]).exception)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data, and the rows of two sweeps."""
    root = tmp_path_factory.mktemp("pareto")
    veca.save(make_tiny(mlp_ratio=4.0, widths=(0.25, 1)), root / "model")
    make_folder(root / "mine", 7)
    make_pairs(root / "steps", "depths", 3)
    common = ["--model", root / "model", "--out", root / "out", "--size", "32,48", *GRID, *QUICK]
    run("probe", "knn", "--data", root / "mine", "--k", "1", *common)
    run("probe", "depth", "--data", root / "steps", "--steps", "2", "--rates", "1e-3", *common)
    return root


def pareto(root: Path, *more: str) -> list[object]:
    return ["probe", "pareto", "--model", root / "model", "--out", root / "out", "--batch-size", "2",
            "--repeats", "3", "--device", "cpu", *more]  # fmt: skip


def test_pareto_writes_table_csv_and_chart(root: Path) -> None:
    shown = run(*pareto(root))
    assert "Pareto front of 8 settings; cost: time on cpu, batch 2" in shown
    table = CostTable.read(root / "out/pareto.json")
    assert {(row.cores, row.width, row.size) for row in table.settings} == SETTINGS
    config = veca.load(root / "model").config
    for row in table.settings:
        flops = model_flops(config, row.size, row.size, row.cores, row.width)
        assert row.gflops == pytest.approx(flops / 1e9, rel=1e-4)
        assert row.scores.keys() == {"knn:mine top1", "depth:steps rmse"}
        assert row.ms is not None
    full = next(row for row in table.settings if (row.cores, row.width, row.size) == (64, 1, 48))
    assert full.quality == 1
    with (root / "out/pareto.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    front = {(int(row["cores"]), float(row["width"]), int(row["size"])) for row in rows if row["front"] == "True"}
    assert front == {(row.cores, row.width, row.size) for row in table.front()}
    assert (root / "out/pareto.svg").read_text().startswith("<svg")


def test_probes_and_settings_can_be_chosen(root: Path) -> None:
    backbone = load_backbone(str(root / "model"), "cpu")
    table = make_cost_table(backbone, root / "out", ["knn:mine"], cores=[64], sizes=[48], batch=1, repeats=1)
    assert {(row.cores, row.width, row.size) for row in table.settings} == {(64, 0.25, 48), (64, 1, 48)}
    assert table.settings[0].scores.keys() == {"knn:mine top1"}


def test_mistakes_name_the_way_out(root: Path, tmp_path: Path) -> None:
    unknown = "no rows of knn:mien with these weights (did you mean 'knn:mine'?)"
    assert unknown in fails(*pareto(root, "--probe", "knn:mien"))
    assert "no setting has rows of every probe" in fails(*pareto(root, "--size", "64"))
    veca.save(make_tiny(), tmp_path / "other")
    other = ["probe", "pareto", "--model", tmp_path / "other", "--out", root / "out", "--device", "cpu"]
    assert "no setting has rows" in fails(*other)


def test_rows_of_different_protocols_are_refused(root: Path, tmp_path: Path) -> None:
    common = ["--model", root / "model", "--data", root / "mine", "--out", tmp_path, "--size", "32", *QUICK]
    run("probe", "knn", "--k", "1", *common)
    run("probe", "knn", "--k", "3", *common)
    backbone = load_backbone(str(root / "model"), "cpu")
    with pytest.raises(veca.VecaError, match="rows of knn:mine have different protocols"):
        collect_scores(tmp_path, backbone.about["sha256"])


def test_seeds_are_averaged(root: Path, tmp_path: Path) -> None:
    common = [
        "--model",
        root / "model",
        "--data",
        root / "steps",
        "--out",
        tmp_path,
        "--size",
        "32",
        "--steps",
        "2",
        *QUICK,
    ]
    for seed in (0, 1):
        run("probe", "depth", "--seed", seed, *common)
    rows = [json.loads(path.read_text()) for path in (tmp_path / "rows").iterdir()]
    values = [row["metrics"]["rmse"] for row in rows]
    assert values[0] != values[1]
    backbone = load_backbone(str(root / "model"), "cpu")
    ((_, scores),) = collect_scores(tmp_path, backbone.about["sha256"]).items()
    assert scores["depth:steps rmse"] == pytest.approx(sum(values) / 2)


def test_quality_is_relative_to_the_full_setting_and_errors_count_inversely() -> None:
    full, small = ProbedSetting(64, 64, 1), ProbedSetting(64, 8, 1)
    scores = {small: {"knn:a top1": 40, "depth:b rmse": 2}, full: {"knn:a top1": 80, "depth:b rmse": 1}}
    assert rate_settings(scores) == {full: 1, small: 0.5}
    with pytest.raises(veca.VecaError, match="knn:a top1 is 0 at the full setting"):
        rate_settings({full: {"knn:a top1": 0}})


def test_more_settings_than_take_turns_at_once_are_all_timed(root: Path) -> None:
    backbone: Any = load_backbone(str(root / "model"), "cpu")
    settings = [
        ProbedSetting(size, cores, width) for size in (48, 32) for width in (1, 0.25) for cores in range(64, 0, -8)
    ]
    times = measure_settings(backbone, settings, 1, 1)
    assert times.keys() == set(settings)
    assert all(value > 0 for value in times.values())


def test_a_chart_of_one_size_has_no_line_over_sizes() -> None:
    rows = [MeasuredSetting(cores=c, size=32, gflops=c, quality=c / 64) for c in (8, 64)]
    texts = [getattr(mark, "text", "") for mark in draw_costs(CostTable(settings=tuple(rows))).marks]
    assert "Pareto front" in texts
    assert "size alone" not in texts
    assert "GFLOPs per image" in texts


@pytest.fixture
def dialled(root: Path, tmp_path: Path) -> Path:
    """The model with a table in which half the cost buys a quarter of the width, and a third 32 px."""
    rows = [(64, 1, 64, 10.0, 1.0), (64, 0.25, 64, 5.0, 0.9), (64, 1, 32, 3.0, 0.8)]
    settings = tuple(MeasuredSetting(cores=c, width=w, size=s, gflops=1, ms=ms, quality=q) for c, w, s, ms, q in rows)
    (tmp_path / "pareto.json").write_text(json.dumps(CostTable(device="a test", settings=settings).to_dict()))
    run(
        "convert",
        "--model",
        root / "model",
        "--out",
        tmp_path / "dialled",
        "--table",
        tmp_path / "pareto.json",
        "--no-paths",
    )
    return tmp_path / "dialled"


def test_convert_puts_the_table_into_the_weights(dialled: Path) -> None:
    assert veca.load(dialled).quality_cost == CostTable.read(dialled.parent / "pareto.json")
    shown = run("info", "--model", dialled, "--size", "64")
    assert "C = 64, width 0.25, 64 px: 0.50 of the cost by time on a test, quality 0.900" in " ".join(shown.split())
    assert "Pareto front of 3 settings" in shown
    facts = json.loads(run("info", "--model", dialled, "--size", "64", "--json"))
    assert facts["compute"]["0.5"]["width"] == 0.25
    wrong = dialled.parent / "wrong.json"
    wrong.write_text("{")
    assert "wrong.json is no pareto.json" in fails(
        "convert", "--model", dialled, "--out", dialled.parent / "x", "--table", wrong
    )


def test_embed_at_a_share_of_the_cost(root: Path, dialled: Path, tmp_path: Path) -> None:
    photos = ["embed", root / "mine/test", "--model", dialled, "--size", "64", "--workers", "0", "--device", "cpu"]
    result = run(*photos, "--out", tmp_path / "half.npz", "--compute", "0.5")
    assert "compute 0.5: C = 64, width 0.25, 64 px, 0.50 of the full cost by time on a test." in result
    run(*photos, "--out", tmp_path / "same.npz", "--cores", "64", "--width", "0.25")
    half, same = (np.load(tmp_path / f"{name}.npz") for name in ("half", "same"))
    name = next(key for key in half if half[key].dtype == np.float32)
    np.testing.assert_array_equal(half[name], same[name])
    assert "32 px" in run(*photos, "--out", tmp_path / "third.npz", "--compute", "0.3")
    assert "leave out --cores" in fails(*photos, "--out", tmp_path / "x.npz", "--compute", "0.5", "--cores", "8")
    assert "above 0, at most 1" in fails(*photos, "--out", tmp_path / "x.npz", "--compute", "2")


def test_probe_at_a_share_of_the_cost(root: Path, dialled: Path, tmp_path: Path) -> None:
    command = ["probe", "knn", "--model", dialled, "--data", root / "mine", "--out", tmp_path, "--k", "1", *QUICK]
    run(*command, "--size", "64", "--compute", "0.5")
    (row,) = [json.loads(path.read_text()) for path in (tmp_path / "rows").iterdir()]
    assert (row["cores"], row["width"], row["size"]) == (64, 0.25, 64)
    assert "at one --size" in fails(*command, "--size", "32,64", "--compute", "0.5")
    assert "leave out --cores" in fails(*command, "--size", "64", "--compute", "0.5", "--widths", "1")


def test_a_figure_at_a_share_of_the_cost(root: Path, dialled: Path, tmp_path: Path) -> None:
    photo = next((root / "mine/test").rglob("*.*"))
    figure = ["figure", "similarity", photo, "--model", dialled, "--size", "64", "--device", "cpu", "--out"]
    assert "32 px" in run(*figure, tmp_path / "a.png", "--compute", "0.3")
    assert (tmp_path / "a.png").exists()
    assert "leave out --cores" in fails(*figure, tmp_path / "b.png", "--compute", "0.3", "--width", "1")
