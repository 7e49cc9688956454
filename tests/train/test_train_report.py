from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from veca.cli.main import app
from veca.report.page import ramp_colours
from veca.train.logger import RunLogger
from veca.train.recipe import ModelRecipe, Recipe
from veca.train.report import write_distill_report

BAD = '<script>alert("x")</script>&\n</pre><img src=x onerror=alert(1)>.jpg'
RECIPE = Recipe.from_dict(
    {
        "teacher": {"name": "timm:<b>vit & co"},
        "schedule": {"epochs": None, "steps": 400, "warmup": 10},
        "budgets": {8: 1, 64: 3},
        "resolutions": [{"odds": {256: 1}, "until": 100}, {"odds": {256: 1, 512: 1}}],
    }
)


def grid(shift: float, widths: Sequence[float] = (1.0,)) -> dict[tuple[int, int, float], dict[str, float]]:
    return {
        (size, budget, width): {"total": shift + size / 1000 + 1 / budget / width, "cls": 0.5, "dense": 0.25}
        for size in (256, 512)
        for budget in (8, 64)
        for width in widths
    }


def write_run(folder: Path, recipe: Recipe = RECIPE) -> None:
    with RunLogger(folder) as log:
        for step in range(10, 401, 10):
            values = {
                "total": 2 / step,
                "cls": 1 / step,
                "dense": 1 / step,
                "learning_rate": 1e-4,
                "images_per_s": 512.5,
            }
            values |= {"images": 128 * step, "seconds": step / 4, "budget_8": 2, "budget_64": 8}
            log.train(step, values | {"resolution_256": 6, "resolution_512": 4, "memory_gib": 71.25})
        log.validation(200, grid(0.1))
        log.validation(300, grid(0.0))
        log.validation(400, grid(0.2))
        log.event(7, f"corrupt: {BAD}")
        log.event(9, "skipped: the loss was nan")
        log.event(200, "checkpoint: 200")
        log.event(300, "checkpoint: 300")
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "summary.json").write_text(json.dumps({"note": "<u>done</u>", "total_steps": 400}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run & <one>"
    write_run(folder)
    assert write_distill_report(folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tree(page: str) -> ET.Element:
    return ET.fromstring(page)  # stricter than HTML asks: every tag closed, every text escaped


def facts(tree: ET.Element) -> dict[str, str]:
    return {str(d.findtext("dt")): str(d.findtext("dd")) for d in tree.iter("div") if d.find("dt") is not None}


def tables(tree: ET.Element, heading: str) -> list[list[list[str]]]:
    section = next(s for s in tree.iter("section") if s.findtext("h2") == heading)
    return [[["".join(c.itertext()) for c in row] for row in table.iter("tr")] for table in section.iter("table")]


class Seen(HTMLParser):
    """What a browser's parser finds."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_headline_holds_the_numbers_of_the_run(tree: ET.Element) -> None:
    found = facts(tree)
    assert found["Model"] == "veca_small"
    assert found["Teacher"] == "timm:<b>vit & co"
    assert found["Steps"] == "400 of 400"
    assert found["Images seen"] == "51,200"
    assert found["Time, training"] == "1 min 40 s"
    assert found["Images per second"] == "512.5"
    mean = (256 + 512) / 2000 + (1 / 8 + 1 / 64) / 2
    assert found["Best validation loss"].startswith(f"{mean:.4g} at step 300")
    assert found["Best validation loss"].endswith(f"lowest {0.256 + 1 / 64:.4g} at 256 px with 64 cores")


def test_heat_maps_hold_the_best_and_the_last_validation(tree: ET.Element, folder: Path) -> None:
    with (folder / "validation.csv").open() as file:
        rows = list(csv.DictReader(file))
    section = next(s for s in tree.iter("section") if s.findtext("h2") == "Validation")
    maps = [figure for figure in section.iter("figure") if figure.find(".//table") is not None]
    assert [figure.findtext("h3") for figure in maps] == ["Best validation, step 300", "Last validation, step 400"]
    cells = {}
    for step, figure in zip(("300", "400"), maps, strict=True):
        head, *body = figure.iter("tr")
        assert [cell.text for cell in head] == ["cores", "8", "64"]
        for row in body:
            size, *values = row
            for budget, cell in zip(("8", "64"), values, strict=True):
                cells[step, str(size.text).removesuffix(" px"), budget] = cell
    wanted = {(r["step"], r["resolution"], r["budget"]): float(r["total"]) for r in rows if r["step"] != "200"}
    assert {key: cell.text for key, cell in cells.items()} == {key: f"{value:.4g}" for key, value in wanted.items()}
    low, high = min(wanted.values()), max(wanted.values())
    for key, cell in cells.items():
        ground, ink = ramp_colours((wanted[key] - low) / (high - low))
        assert cell.get("style") == f"background:{ground};color:{ink}"


def test_draws_stand_against_the_odds_of_the_recipe(tree: ET.Element) -> None:
    budgets, resolutions = tables(tree, "What was drawn")
    assert budgets[1:] == [["8", "80", "20.0%", "25.0%"], ["64", "320", "80.0%", "75.0%"]]
    # 100 of 400 steps at 256 alone, the others one half each.
    assert resolutions[1:] == [["256", "240", "60.0%", "62.5%"], ["512", "160", "40.0%", "37.5%"]]


def test_widths_are_rows_of_the_grid_and_drawn_too(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, model=ModelRecipe(overrides={"widths": [1, 0.5]}))
    write_run(tmp_path, recipe)
    with RunLogger(tmp_path, resume_step=400) as log:
        log.train(400, {"total": 0.1, "width_0.5": 1, "width_1": 3})
        log.validation(400, grid(-1.0, (0.5, 1.0)))
    tree = ET.fromstring(write_distill_report(tmp_path).read_text())
    section = next(s for s in tree.iter("section") if s.findtext("h2") == "Validation")
    names = [row[0].text for row in section.iter("tr") if row[0].tag == "th"]
    assert {"256 px", "256 px, width 0.5", "512 px, width 0.5"} <= {*names}
    *_, widths = tables(tree, "What was drawn")
    assert [row[:3] for row in widths[1:]] == [["0.5", "1", "25.0%"], ["1", "3", "75.0%"]]


def test_curves_are_drawn_and_told(tree: ET.Element) -> None:
    charts = [svg for svg in tree.iter("svg") if svg.get("role") == "img"]
    assert len(charts) == 3 + 1 + 1
    assert all(svg.get("aria-label") for svg in charts)
    assert charts[0].get("aria-label") == "loss against steps, from 0.2 at step 10 to 0.005 at 400"
    raw = next(path for path in charts[0].iter("path") if "faint" in str(path.get("class")))
    places = [tuple(map(float, pair.split())) for pair in re.split("[ML]", str(raw.get("d")))[1:]]
    assert len(places) == 40
    assert all(a < b for (a, _), (b, _) in itertools.pairwise(places))
    assert all(a < b for (_, a), (_, b) in itertools.pairwise(places)), "falling losses, rising y"
    assert len(list(charts[0].iter("circle"))) == 3
    (numbers,) = tables(tree, "Curves")
    assert numbers[0] == ["Step", "total", "cls", "dense", "learning rate", "images/s"]
    assert numbers[-1] == ["400", "0.005", "0.0025", "0.0025", "0.0001", "512.5"]
    assert len(numbers) <= 13


def test_a_hostile_name_is_shown_and_does_nothing(page: str, tree: ET.Element) -> None:
    shown = tables(tree, "Events")
    assert next(table[1][2] for table in shown) == "corrupt: " + BAD.replace("\n", r"\n")
    assert sorted(len(table) - 1 for table in shown) == [1, 1, 2]
    assert "<u>done</u>" in "".join(tree.itertext())
    seen = Seen(page)
    assert not {"script", "img", "b", "u", "one", "iframe", "object", "link"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]


def test_nothing_is_fetched_from_elsewhere(page: str, tree: ET.Element) -> None:
    assert not re.search(r"https?:|url\(|@import|src=[\"']|href=", page)
    assert "default-src 'none'" in page
    assert "{{" not in page, "an unfilled place in the template"


def test_the_recipe_is_there_to_the_letter(tree: ET.Element, folder: Path) -> None:
    text = "".join(next(tree.iter("pre")).itertext())
    assert text == (folder / "recipe.yaml").read_text()
    assert tree.findtext(".//h1") == "run & <one>"


def test_a_folder_with_nothing_in_it_makes_a_page(tmp_path: Path) -> None:
    tree = ET.fromstring(write_distill_report(tmp_path).read_text())
    assert "No training step was logged." in "".join(tree.itertext())
    assert "This run was not validated." in "".join(tree.itertext())
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_run_that_died_early_makes_a_page(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as log:
        log.train(1, {"total": math.nan, "cls": math.inf, "images": 8, "budget_8": 1})
    (tmp_path / "recipe.yaml").write_text("model: [torn")
    (tmp_path / "summary.json").write_text("{")
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,17")
    tree = ET.fromstring(write_distill_report(tmp_path).read_text())
    assert facts(tree)["Steps"] == "1"
    assert facts(tree)["Training loss, smoothed"] == "–"
    assert "model: [torn" in "".join(tree.itertext())
    assert tables(tree, "What was drawn") == [[["Budget", "Steps", "Share", "Asked for"], ["8", "1", "100.0%", "–"]]]


def test_one_resolution_and_losses_that_are_no_numbers(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as log:
        for step, total in ((1, 1.0), (2, math.nan), (3, 0.5)):
            log.train(step, {"total": total})
        log.validation(1, {(256, 8, 1.0): {"total": 1.0}, (256, 64, 1.0): {"total": 0.5}})
        log.validation(3, {(256, 8, 1.0): {"total": math.nan}, (256, 64, 1.0): {"total": 0.25}})
    tree = ET.fromstring(write_distill_report(tmp_path).read_text())
    assert facts(tree)["Best validation loss"].startswith("0.75 at step 1")
    best, last = tables(tree, "Validation")
    assert best[1] == ["256 px", "1", "0.5"]
    assert last[1] == ["256 px", "–", "0.25"]
    faint = next(path for path in tree.iter("path") if "faint" in str(path.get("class")))
    assert str(faint.get("d")).count("M") == 2, "a line over what is no number"


def test_no_folder_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder; name the one a run wrote to"):
        write_distill_report(tmp_path / "none")


def test_the_command_writes_it_anew(folder: Path, page: str, tmp_path: Path) -> None:
    (folder / "report.html").unlink()
    shown = CliRunner().invoke(app, ["report", str(folder)], env={"COLUMNS": "400"})
    assert shown.exit_code == 0, shown.output
    assert str(folder / "report.html") in shown.output
    assert (folder / "report.html").read_text(encoding="utf-8").count("<svg") == page.count("<svg")
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")])
    assert "is not a folder" in str(missing.exception)
