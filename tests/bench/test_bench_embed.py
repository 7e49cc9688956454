from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import veca
from veca.bench.embed import bench_embed, make_jpegs
from veca.bench.report import StageRow
from veca.cli.main import app
from veca.embed import EmbedSettings
from veca.utils.files import InUseError, locked

QUICK = ["--size", "32", "--cores", "8", "--seconds", "0.1", "--repeats", "2", "--device", "cpu"]
ONE_CORE = ["read, one core", "decode pillow, one core", "decode cpu, one core", "model, one core"]
ALL_WORKERS = [stage.replace("one core", "all workers") for stage in ONE_CORE]
RUNS = ["end to end, pillow", "end to end, cpu"]


def run_embed_bench(*options: str) -> str:
    result = CliRunner().invoke(app, ["bench", "embed", *options])
    assert result.exit_code == 0, result.output
    return result.output


def check_numbers(rows: list[StageRow]) -> None:
    for row in rows:
        assert 0 < row.images_per_s < math.inf
        assert row.us_per_image == pytest.approx(1e6 / row.images_per_s)
        assert 0 <= row.spread < math.inf
        is_run = row.stage.startswith("end to end")
        assert (row.start_s is not None) == (row.model_share is not None) == is_run
        assert not is_run or (row.start_s or 0) > 0 < (row.model_share or 0)


def test_every_stage_is_in_the_files_and_the_slowest_is_named(tmp_path: Path) -> None:
    made = ["--images", "24", "--image-size", "96x64", "--workers", "2", "--batch-size", "4"]
    said = run_embed_bench(*QUICK, *made, "--out", str(tmp_path))
    kept = json.loads((tmp_path / "results.json").read_text())
    rows = [StageRow(**row) for row in kept["rows"]]
    assert [row.stage for row in rows] == ["list", *ONE_CORE, *ALL_WORKERS, "write", *RUNS]
    check_numbers(rows)
    with (tmp_path / "results.csv").open() as file:
        assert [float(row["images_per_s"]) for row in csv.DictReader(file)] == [row.images_per_s for row in rows]
    assert kept["settings"]["images"] == "24"
    assert kept["settings"]["batch"] == "4"
    assert all(row.stage in said for row in rows)
    rates = {row.stage: row.images_per_s for row in rows}
    decode, slowest = re.search(r"Bottleneck by (\w+), the fastest end to end: ([^\d]+), \d", said).groups()  # type: ignore[union-attr]
    assert rates[f"end to end, {decode}"] == max(rates[run] for run in RUNS)
    stages = [f"decode {decode}, all workers", "model, all workers", "write"]
    assert slowest == min(stages, key=rates.__getitem__)
    assert "Bottleneck" in (tmp_path / "table.txt").read_text().splitlines()[-1]


def test_the_images_of_the_user_are_measured_in_this_process(tmp_path: Path) -> None:
    for i in range(3):
        Image.effect_noise((80 + 16 * i, 64), 40).convert("RGB").save(tmp_path / f"{i}.png")
    results = bench_embed(
        [str(tmp_path)], model=veca.load("veca_tiny"), model_name="veca_tiny", device=torch.device("cpu"), workers=0,
        settings=EmbedSettings(size=32, cores=8), seconds=0.1, repeats=1,
    )  # fmt: skip
    assert [row.stage for row in results.rows] == ["list", *ONE_CORE, "write", *RUNS]
    check_numbers(results.rows)
    assert results.settings["images"] == "3"
    assert [row.spread for row in results.rows] == [0.0] * len(results.rows)  # one round
    assert results.start["from start to exit"] > max(row.start_s or 0 for row in results.rows)


def test_jpegs_are_as_large_as_photographs() -> None:
    files = make_jpegs(640, 480, 4)
    assert len(set(files)) == 4
    assert 50_000 < sum(map(len, files)) / len(files) < 62_000
    assert Image.open(io.BytesIO(files[0])).size == (640, 480)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image-size", "640"], "'640': expected WIDTHxHEIGHT, sides of 16 to 16,384 pixels, as 640x480"),
        (["--image-size", "8x64"], "'8x64': expected WIDTHxHEIGHT"),
        (["--size", "250"], "size=250: must be a multiple of 16. Nearest: 256"),
        (["--cores", "65"], "cores=65: must be from 1 to 64"),
        (["--repeats", "0"], "repeats=0: must be at least 1"),
        (["--seconds", "0"], "0.1"),
        (["--images", "0"], "greater than or equal to 1"),
        (["{folder}"], "no images there; name others, or none to have some made"),
        (["{folder}", "--images", "3"], "--images is for images that are made"),
        (["{folder}/absent"], "absent"),
        (["{folder}/broken.jpg"], "broken.jpg can be read; `veca embed` lists why"),
        (["veca_tiny"], "veca_tiny is a model, not an image"),
    ],
)
def test_bad_options_say_what_is_wrong(options: list[str], message: str, tmp_path: Path) -> None:
    if any("broken" in option for option in options):
        (tmp_path / "broken.jpg").write_bytes(b"no image")
    given = [option.format(folder=tmp_path) for option in options]
    result = CliRunner().invoke(app, ["bench", "embed", *QUICK, "--workers", "0", *given], env={"COLUMNS": "400"})
    assert result.exit_code != 0
    said = f"{result.output} {result.exception}"
    assert message in re.sub(r"\s+", " ", said), said


def test_a_folder_is_of_one_run_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path):
        result = CliRunner().invoke(app, ["bench", "embed", *QUICK, "--images", "2", "--out", str(tmp_path)])
    assert isinstance(result.exception, InUseError)


@pytest.mark.gpu
def test_a_gpu_decodes_and_is_busy() -> None:
    results = bench_embed(
        [], model=veca.load("veca_tiny"), model_name="veca_tiny", device=torch.device("cuda"), workers=4,
        settings=EmbedSettings(size=256, cores=32, precision="bfloat16"), images=1024, seconds=0.5, repeats=2,
    )  # fmt: skip
    stages = {row.stage: row for row in results.rows}
    on_gpu = {"decode gpu", "resize gpu", "decode and resize gpu", "model", "model, stack and copy"}
    assert on_gpu | {*RUNS, "end to end, gpu"} <= stages.keys()
    check_numbers(results.rows)
    assert all(0 < (stages[f"end to end, {decode}"].gpu_busy or 0) < 1 for decode in ("pillow", "cpu", "gpu"))
    assert stages["decode and resize gpu"].images_per_s < stages["resize gpu"].images_per_s
    assert set(results.start) == {"kernels compiled", "kernels cached"}
