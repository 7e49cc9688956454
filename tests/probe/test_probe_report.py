from __future__ import annotations

import csv
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from probe_rows import row, write_rows
from typer.testing import CliRunner

from veca.cli.main import app
from veca.config import SIZES
from veca.probe import paper
from veca.probe.paper import compare_with_paper
from veca.probe.report import (
    Group,
    draw_curves,
    gap_text,
    group_rows,
    heat_grid,
    rows_csv,
    write_probe_report,
)
from veca.probe.results import MAX_ROW_BYTES, ProbeResult, parse_row, read_results
from veca.report.charts import Label

BAD = '<script>alert("x")</script>&|`](http://x)\n</pre><img src=x onerror=alert(1)>'
IMAGENET = {"name": "imagenet", "train": 1_281_167, "val": 50_000, "test": 0, "fingerprint": "f"}


def parsed(*args: Any, **more: Any) -> ProbeResult:
    return parse_row(row(*args, **more), "rows/made.json")


def group_of(*rows: dict[str, Any]) -> Group:
    (group,) = group_rows([parse_row(one, f"rows/{i}.json") for i, one in enumerate(rows)])
    return group


def tree_of(folder: Path) -> ET.Element:
    return ET.fromstring((folder / "report.html").read_text(encoding="utf-8"))  # stricter than HTML asks


def tables(tree: ET.Element, heading: str) -> list[list[list[str]]]:
    section = next(s for s in tree.iter("section") if s.findtext("h2") == heading)
    return [[["".join(c.itertext()) for c in line] for line in table.iter("tr")] for table in section.iter("table")]


def picture(path: Path, colour: str) -> str:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (8, 6), colour).save(path, lossless=True)
    return f"gallery/{path.name}"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, budgets × resolutions, a set scored with the same head, classes, a torn file."""
    folder = tmp_path_factory.mktemp("results") / "all & <one>"
    rows = []
    for size in (256, 512):
        for cores in (8, 16, 64):
            value = 60 + size / 100 - 32 / cores
            rows.append(
                row("classify", "imagenet", cores, size, value, data=IMAGENET, scored_on="val",
                    metrics={"top1": value, "top5": value + 20},
                    per_class={f"class {i}": value - i for i in range(20)},
                    also={"imagenetv2": {"top1": value - 10, "top5": value + 10}})
            )  # fmt: skip
    name = "facebook/dinov3-vits16-pretrain-lvd1689m"
    other = {"data": IMAGENET, "scored_on": "val", "interval": {"top1": [77.1, 77.9]}}
    rows.append(row("classify", "imagenet", None, 256, 77.5, name, "transformers", **other))
    write_rows(folder, rows)
    (folder / "rows" / "torn.json").write_text('{"task": "cl')
    path, left_out = write_probe_report(folder)
    assert path == folder / "report.html"
    assert [text.split(" is ")[0] for text in left_out] == ["rows/torn.json"]
    return folder


def test_every_number_of_the_papers_probe_tables_is_there() -> None:
    count: dict[str, int] = {}
    for n in paper.paper_numbers():
        count[n.table] = count.get(n.table, 0) + 1
    assert count == {"1": 80, "2": 80, "S10": 132, "S11": 128, "S12": 64, "S13": 160, "S15": 96, "S16": 96}
    assert math.fsum(n.value for n in paper.paper_numbers()) == pytest.approx(52401.2937, abs=1e-6)
    cells = [
        ("1", "depth", "kitti", "DINOv3-B", None, 512, 2.6915),
        ("2", "classify", "cub200", "VECA-B", 8, 256, 87.0),
        ("S10", "classify", "imagenet-real", "DINOv2-L", None, 768, 87.98),
        ("S11", "segment", "context60", "VECA-S+", 64, 384, 54.02),
        ("S12", "depth", "nyuv2", "VECA-L", 64, 256, 0.3546),
        ("S13", "classify", "flowers102", "DFN-CLIP-B", None, 256, 98.7),
        ("S15", "classify", "imagenetv2", "VECA-S", 40, 256, 62.94),
        ("S16", "segment", "voc2012", "VECA-L", 24, 512, 87.78),
    ]
    for table, task, dataset, model, cores, size, value in cells:
        found = paper.find(task, dataset, model=model, cores=cores, size=size)
        assert [n.value for n in found if n.table == table] == [value]


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("facebook/dinov3-vitb16-pretrain-lvd1689m", "transformers", ("DINOv3", "B")),
        ("timm:vit_small_plus_patch16_dinov3.lvd1689m", "timm", ("DINOv3", "S+")),
        ("facebook/dinov3-vit7b16-pretrain-lvd1689m", "transformers", ("DINOv3", "g")),
        ("facebook/dinov3-vitl16-pretrain-sat493m", "transformers", None),
        ("convnext_base.dinov3_lvd1689m", "timm", None),
        ("facebook/dinov2-with-registers-base", "transformers", ("DINOv2-reg", "B")),
        ("facebook/dinov2-large", "transformers", ("DINOv2", "L")),
        ("google/siglip2-base-patch16-256", "transformers", ("SigLIP2", "B")),
        ("google/siglip-base-patch16-224", "transformers", None),
        ("openai/clip-vit-base-patch16", "transformers", ("CLIP", "B")),
        ("openai/clip-vit-base-patch32", "transformers", None),
        ("vit_base_patch16_clip_224.laion2b", "timm", ("OpenCLIP", "B")),
        ("efficientnet-lite2", "package", None),
        ("veca_tiny", "veca", ("VECA", "T")),
        ("runs/mine", "veca", None),
    ],
)
def test_models_are_known_by_their_names(name: str, kind: str, found: tuple[str, str] | None) -> None:
    kin = paper.kin(name, kind, {})
    assert (kin and (kin.family, kin.size)) == found


def test_a_configuration_says_more_than_a_name() -> None:
    large = SIZES["veca_large"].to_dict()
    assert paper.kin("runs/small", "veca", {"config": large}) == paper.Kin("VECA", "L")
    assert paper.kin("runs/small", "veca", {"config": {**large, "depth": 3}}) is None, "of no size of the paper's"
    assert paper.kin("runs/small", "veca", {"config": {"strange": 1}}) is None


def test_the_gap_is_ours_less_the_papers_and_knows_which_way_is_up() -> None:
    low = compare_with_paper(parsed("depth", "nyuv2", 64, 512, 0.4))
    high = compare_with_paper(parsed("depth", "nyuv2", 64, 512, 0.5))
    assert low
    assert high
    assert low.number.value == 0.4347
    assert (low.gap, low.better) == (pytest.approx(-0.0347), True)
    assert (high.gap, high.better) == (pytest.approx(0.0653), False)
    assert gap_text(low, "rmse") == "−0.0347 better"
    assert gap_text(high, "rmse") == "+0.0653 worse"
    seg = compare_with_paper(parsed("segment", "ade20k", 16, 512, 40.0))
    assert seg
    assert gap_text(seg, "mIoU") == "−1.20 worse"
    same = compare_with_paper(parsed("segment", "ade20k", 16, 512, 41.2))
    assert same
    assert gap_text(same, "mIoU") == "0.00 equal"


def test_notes_say_what_is_unlike() -> None:
    found = compare_with_paper(parsed("segment", "ade20k", 64, 320, 40.0, protocol={"batch": 16, "optimizer": "AdamW"}))
    assert found
    assert found.number.size == 384
    text = "; ".join(found.notes)
    assert "a VECA of our own, distilled from facebook/dinov2-small, not the paper's" in text
    assert "the paper's number is at 384 px" in text
    assert "7,349 pictures of ade20k; 22,210 were published" in text
    assert "batch 16 (paper: 8)" in text
    assert "AdamW" not in text
    found = compare_with_paper(parsed(protocol={"problems": ["train has 9 pictures; 3,680 were published"]}))
    assert found
    assert "pets: train has 9 pictures; 3,680 were published" in found.notes
    model = {"name": "veca_base", "kind": "veca", "about": {"provenance": {"official_config": "{}"}}}
    released = parse_row({**row("segment", "coco-object", 64, 512, 60.0), "model": model}, "x")
    found = compare_with_paper(released)
    assert found
    assert "that they are the paper's is not checked" in found.notes[0]
    assert "Table S11 of the paper has 62.58 for the same" in found.notes
    random = {"name": "veca_tiny", "kind": "veca", "about": {"provenance": {"weights": "random"}}}
    found = compare_with_paper(parse_row({**row(), "model": random}, "x"))
    assert found
    assert found.notes[0].startswith("random weights, not the paper's VECA; of another size")
    assert gap_text(found, "top1") == "(−45.67)", "no verdict between models of different sizes"


def test_like_rows_have_no_notes() -> None:
    name = "facebook/dinov3-vits16-pretrain-lvd1689m"
    found = compare_with_paper(parsed("classify", "imagenet", None, 256, 77.5, name, "transformers", data=IMAGENET))
    assert found
    assert (found.number.table, found.number.value, list(found.notes)) == ("S10", 77.31, [])
    assert compare_with_paper(parsed("knn", "imagenet", None, 256, 77.5, name, "transformers")) is None
    assert compare_with_paper(parsed("classify", "my-own", 64, 256, 77.5)) is None
    assert compare_with_paper(parsed(published=False)) is None, "a folder of the user's that is called pets"
    assert compare_with_paper(parsed(value=math.nan)) is None


def test_tables_hold_the_numbers_of_the_rows(sweep: Path) -> None:
    rows, _ = read_results(sweep)
    found = tables(tree_of(sweep), "imagenet · classify, top1")[0]
    assert found[0] == ["model", "C", "px", "top1", "top5", "paper", "which", "gap", "notes"]
    ours = {(line[1], line[2]): line for line in found[1:] if line[0] == "runs/small"}
    assert len(ours) == 6
    for one in rows:
        if one.cores is not None:
            line = ours[str(one.cores), str(one.size)]
            assert line[3:5] == [f"{one.metrics['top1']:.2f}", f"{one.metrics['top5']:.2f}"]
    assert ours["16", "256"][5:7] == ["72.87", "VECA-S, C 16, 256 px (Table S15)"]
    assert ours["16", "256"][7] == "−12.31 worse"
    second = [line for line in found if line[0] == "↳ imagenetv2, same head"]
    assert [line[3] for line in second] == [f"{one.metrics['top1'] - 10:.2f}" for one in rows if one.cores is not None]
    assert next(line[5] for line in second if line[1:3] == ["16", "256"]) == "61.70"
    dense = next(line for line in found if line[0].startswith("facebook/"))
    assert dense[1:9] == ["–", "256", "77.50 ± 0.40", "–", "77.31", "DINOv3-S, 256 px (Table S10)", "+0.19 better", ""]
    assert (sweep / "report.md").read_text().count("| −12.31 worse |") == 1
    glance = tables(tree_of(sweep), "At a glance")[0]
    assert [line[5] for line in glance[1:]] == ["77.50 ± 0.40", "64.62"]


def test_csv_holds_the_numbers_of_the_rows(sweep: Path) -> None:
    rows, _ = read_results(sweep)
    lines = list(csv.DictReader(io.StringIO((sweep / "rows.csv").read_text(encoding="utf-8"))))
    assert len(lines) == 7 + 6
    own = [line for line in lines if not line["head_of"]]
    assert {(line["top1_low"], line["top1_high"]) for line in lines} == {("", ""), ("77.1", "77.9")}
    assert [float(line["top1"]) for line in own] == [one.value for one in rows]
    assert [line["cores"] for line in own] == ["" if one.cores is None else str(one.cores) for one in rows]
    assert all(json.loads(line["protocol"]) == one.protocol for line, one in zip(own, rows, strict=True))
    line = next(
        line for line in lines if line["dataset"] == "imagenetv2" and (line["cores"], line["size"]) == ("8", "256")
    )
    assert float(line["gap"]) == pytest.approx(float(line["top1"]) - 59.87)
    assert line["head_of"] == "imagenet"


def test_a_formula_in_a_name_is_text_in_the_csv() -> None:
    text = rows_csv([parsed(model="=1+1")])
    assert next(csv.DictReader(io.StringIO(text)))["model"] == "'=1+1"


def test_curves_hold_our_points_and_the_papers(sweep: Path) -> None:
    names = sorted(path.name for path in (sweep / "curves").iterdir())
    assert names == ["classify-imagenet-top1-budget.svg", "classify-imagenet-top1-resolution.svg"]
    svg = ET.fromstring((sweep / "curves" / names[0]).read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    assert len(list(svg.iter(f"{space}circle"))) == 6
    assert sum(rect.get("class") == "dot muted" for rect in svg.iter(f"{space}rect")) == 8, "budgets of Table S15"
    labels = [text.findtext(f"{space}title") for text in svg.iter(f"{space}text")]
    assert [label for label in labels if label] == [
        "dinov3-vits16…, 256 px", "paper VECA-S, 256 px", "small, 512 px", "small, 256 px"
    ]  # fmt: skip
    first = next(path for path in svg.iter(f"{space}path") if path.get("class") == "line c0")
    places = [tuple(map(float, pair.split())) for pair in re.split("[ML]", str(first.get("d")))[1:]]
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True), "scores rise with the budget"
    assert "Higher is better. Grey squares: the paper's." in "".join(tree_of(sweep).itertext())


def test_grids_are_shaded_by_score(sweep: Path) -> None:
    found = tables(tree_of(sweep), "imagenet · classify, top1")
    grid = next(table for table in found if table[0] == ["cores", "8", "16", "64"])
    assert grid[1:] == [["256 px", "58.56", "60.56", "62.06"], ["512 px", "61.12", "63.12", "64.62"]]
    cells = [cell for cell in tree_of(sweep).iter("td") if cell.text in ("58.56", "64.62") and cell.get("style")]
    assert [str(cell.get("style"))[:18] for cell in cells] == ["background:#00224e", "background:#fee838"]
    classes = next(table for table in found if table[0][0] == "class")
    assert [line[0] for line in classes[1:]] == [f"class {i}" for i in range(20)]
    assert classes[1][1] == "64.62"
    text = (sweep / "report.md").read_text()
    assert "| class 4 | 60.62 |\n| … | 10 more |\n| class 15 | 49.62 |" in text
    assert "| class 9 |" not in text


def test_errors_have_their_best_where_they_are_low() -> None:
    rows = [row("depth", "kitti", c, s, 3 + s / 1000 - c / 100) for c in (8, 64) for s in (256, 512)]
    group = group_of(*rows)
    assert (group.series[0].best.cores, group.series[0].best.size) == (64, 256)
    assert heat_grid(group, group.series[0])
    assert all(one["caption"].startswith("Lower is better.") for one in draw_curves(group))


def test_ways_to_run_the_same_are_kept_apart_and_seeds_are_not() -> None:
    other = {**row()["protocol"], "epochs": 10}
    group = group_of(row(), row(protocol=other, value=40.0), row(protocol=other, value=42.0, seed=1))
    assert [series.name for series in group.series] == ["runs/small (epochs 100)", "runs/small (epochs 10)"]
    assert group.series[1].mean(64, 256) == 41.0
    along = group_of(row(), row(size=512))
    assert [series.name for series in along.series] == ["runs/small"]


def test_rows_tell_how_they_were_made(sweep: Path) -> None:
    section = next(s for s in tree_of(sweep).iter("section") if s.findtext("h2") == "Every row")
    found = list(section.iter("details"))
    assert len(found) == 7
    text = "".join(found[-1].itertext())
    for part in ("seed", "2026-01-02T03:04:05+00:00", "torch 2.11.0", "features 1 min 2 s", "rate 0.1, decay 0"):
        assert part in text
    assert '"epochs": 100' in "".join(next(found[-1].iter("pre")).itertext())
    assert '"epochs": 100' in (sweep / "report.md").read_text()


def test_a_best_rate_at_the_end_of_the_sweep_is_told(tmp_path: Path) -> None:
    write_probe_report(write_rows(tmp_path, [row(best={"rate": 1.0, "decay": 0.0})]))
    assert "the highest rate of the sweep: others may do better" in (tmp_path / "report.html").read_text()


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


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path) -> None:
    hostile = row(dataset=BAD, model=BAD, task="segment", metric=BAD, metrics={BAD: 1.0}, per_class={BAD: 2.0},
                  protocol={BAD: BAD}, versions={BAD: BAD}, date=BAD, scored_on=BAD, also={BAD: {BAD: 3.0}},
                  gallery=[{"image": BAD, "label": BAD, "prediction": "../../etc/passwd"}])  # fmt: skip
    write_rows(tmp_path, [hostile, {**hostile, "size": 512}, row(model="a"), row(model="a", cores=8)])
    write_probe_report(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    ET.fromstring(page)
    seen = Seen(page)
    assert not {"script", "img", "iframe", "object", "link", "b"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert not re.search(r"https?:(?!//x)|url\(|@import|src=[\"']|href=", page)
    assert "default-src 'none'" in page
    assert "{{" not in page
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    outside = re.sub(r"```json\n.*?\n```", "", text, flags=re.DOTALL)
    assert "<script" not in outside
    assert "](http" not in outside.replace("\\](http", "")
    for path in (tmp_path / "curves").iterdir():
        assert path.parent == tmp_path / "curves"
        assert "script" not in [element.tag.rpartition("}")[2] for element in ET.parse(path).iter()]


def test_galleries_show_the_smallest_and_the_largest_budget(tmp_path: Path) -> None:
    place = tmp_path / "gallery"
    image, label = picture(place / "0.webp", "red"), picture(place / "0-label.png", "green")
    rows = []
    for cores in (8, 16, 64):
        shown = picture(place / f"0-{cores}.png", f"rgb({cores},0,0)")
        one = {"image": image, "label": label, "prediction": shown}
        rows.append(row("segment", "ade20k", cores, 512, 30 + cores / 10, gallery=[one]))
    write_rows(tmp_path, rows)
    _, left_out = write_probe_report(tmp_path)
    assert left_out == []
    drawn = [(i.get("alt"), str(i.get("src"))) for i in tree_of(tmp_path).iter("img")]
    assert [alt for alt, _ in drawn] == ["picture", "label", "prediction, C = 8, 512 px", "prediction, C = 64, 512 px"]
    assert [src.split(";")[0] for _, src in drawn] == ["data:image/webp", *["data:image/png"] * 3]
    assert len({src for _, src in drawn}) == 4
    assert "![picture](gallery/0.webp) ![label](gallery/0-label.png)" in (tmp_path / "report.md").read_text()


def test_pictures_that_cannot_be_shown_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    (tmp_path / "secret.png").write_bytes(b"\x89PNG secret")
    write_rows(folder, [])
    good = picture(folder / "gallery" / "good.png", "red")
    wrong = ["../secret.png", "gallery/none.png", "gallery/x.svg"]
    gallery = [{"image": good, "label": one, "prediction": good} for one in wrong]
    write_rows(folder, [row("segment", "ade20k", 64, 512, 30.0, gallery=gallery)])
    _, left_out = write_probe_report(folder)
    assert all(one in text and "cannot be shown" in text for text, one in zip(left_out, wrong, strict=True)), left_out
    assert "](../secret" not in (folder / "report.md").read_text()


def test_missing_metrics_and_one_row_alone(tmp_path: Path) -> None:
    bare = {"task": "depth", "model": {"name": "m"}, "data": {"name": "d"}, "size": 64, "metric": "rmse", "metrics": {}}
    write_probe_report(write_rows(tmp_path, [bare]))
    assert tables(tree_of(tmp_path), "d · depth, rmse") == [[["model", "C", "px", "rmse"], ["m", "–", "64", "–"]]]
    assert not (tmp_path / "curves").exists()
    nan = row("segment", "ade20k", 64, 512, math.nan, metrics={"mIoU": math.nan, "accuracy": 70.0})
    write_probe_report(write_rows(tmp_path / "nan", [nan, row("segment", "ade20k", 8, 512, 35.0)]))
    found = tables(tree_of(tmp_path / "nan"), "ade20k · segment, mIoU")[0]
    assert [line[3:6] for line in found[1:]] == [["35.00", "–", "37.48"], ["–", "70.00", "–"]]


def test_one_point_stands_on_the_papers_curves(tmp_path: Path) -> None:
    write_probe_report(write_rows(tmp_path, [row("segment", "ade20k", 64, 512, 44.0)]))
    assert len(list((tmp_path / "curves").iterdir())) == 2


def test_many_rows_are_folded_and_each_model_has_one_line(tmp_path: Path) -> None:
    rows = [row(cores=c, size=s, value=c / 2 + s / 64, model=f"runs/{m}") for m in "abc" for c in range(8, 65, 8)
            for s in (256, 384, 512)]  # fmt: skip
    write_probe_report(write_rows(tmp_path, rows))
    tree = tree_of(tmp_path)
    assert {line[5] for line in tables(tree, "At a glance")[0][1:]} == {"40.00"}
    assert len(tables(tree, "pets · classify, top1")[0]) == 1 + 72
    assert "All 72 rows" in "".join(tree.itertext())
    svg = ET.fromstring((tmp_path / "curves" / "classify-pets-top1-budget.svg").read_text(encoding="utf-8"))
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 3 * 8
    assert "runs/c, 512 px" in str(svg.get("aria-label"))
    assert "Not drawn: 6 more of the table." in (tmp_path / "report.md").read_text()


def test_single_points_beside_a_models_curves_are_not_drawn(tmp_path: Path) -> None:
    swept = [
        row(cores=c, size=s, value=c / 2 + s / 64) for c, s in [(8, 256), (16, 256), (64, 256), (8, 512), (64, 512)]
    ]
    write_probe_report(write_rows(tmp_path, [*swept, row(cores=32, size=512, value=30.0, model="runs/other")]))
    svg = (tmp_path / "curves" / "classify-pets-top1-resolution.svg").read_text()
    assert [label in svg for label in ("small, C = 8<", "small, C = 16<", "small, C = 64<", "other, C = 32<")] == [
        True, False, True, True
    ]  # fmt: skip
    assert "Not drawn: 1 more of the table." in (tmp_path / "report.md").read_text()


def test_what_is_no_row_is_named_and_left_out(tmp_path: Path) -> None:
    write_rows(tmp_path, [row()])
    place = tmp_path / "rows"
    wrong = {
        "a-list.json": ("[1, 2]", "is no row of `veca probe`: task=None: must be text"),
        "bytes.json": (b"\xff\xfe\x00", "is not whole JSON"),
        "deep.json": ("[" * 100_000, "is not whole JSON"),
        "foreign.json": ('{"name": "package", "version": 3}', "is no row of `veca probe`"),
        "future.json": (json.dumps({**row(), "schema": 2}), "is of version 2 of the format of rows; this veca reads"),
        "model.json": (json.dumps({**row(), "model": "veca"}), "model=None: must be text"),
        "size.json": (
            json.dumps({**row(), "size": "large"}),
            "size='large': must be an integer",
        ),
        "seed.json": (json.dumps(row(seed="x")), "seed='x': must be an integer"),
        "per-class.json": (json.dumps(row(per_class=[1])), "per_class=[1]: must be keys with values"),
        "cores.json": (json.dumps({**row(), "cores": -1}), "cores=-1: must be null, or at least 1"),
    }
    for name, (text, _) in wrong.items():
        (place / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (place / "folder.json").mkdir()
    with (place / "huge.json").open("wb") as file:
        file.truncate(MAX_ROW_BYTES + 1)
    (place / "notes.txt").write_text("not looked at")
    rows, problems = read_results(tmp_path)
    assert len(rows) == 1
    reasons = dict(problems)
    assert reasons.keys() == {f"rows/{name}" for name in (*wrong, "folder.json", "huge.json")}
    for name, (_, why) in wrong.items():
        assert why in reasons[f"rows/{name}"]
    shown = CliRunner().invoke(app, ["report", str(tmp_path)], env={"COLUMNS": "400"})
    assert shown.exit_code == 0, shown.output
    assert "rows/future.json is of version 2" in shown.output
    assert "rows/future.json" in "".join(tree_of(tmp_path).itertext())


def test_numbers_that_no_float_holds_are_left_out_of_a_row(tmp_path: Path) -> None:
    odd = row(metrics={"top1": 10**400, "top5": math.inf, "n": 3}, protocol=None, versions=None)
    odd["sweep"][0]["val"] = math.nan
    write_probe_report(write_rows(tmp_path, [odd]))
    found = tables(tree_of(tmp_path), "pets · classify, top1")[0]
    assert found[1][3:5] == ["–", "3.0000"]


def test_the_command_knows_folders_apart(tmp_path: Path) -> None:
    def said(folder: Path) -> str:
        return str(CliRunner().invoke(app, ["report", str(folder)]).exception)

    assert "is not a folder" in said(tmp_path / "nowhere")
    assert "neither the folder of a run of `veca distill`" in said(tmp_path)
    assert "nor of results of `veca probe`" in said(tmp_path)
    (tmp_path / "rows").mkdir()
    assert "`veca probe` has finished none yet" in said(tmp_path)
    (tmp_path / "rows" / "x.json").write_text("{")
    assert "has no row that can be read: rows/x.json is not whole JSON" in said(tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: {}")
    assert "move rows/ elsewhere" in said(tmp_path)


def test_labels_stay_apart_when_they_are_cut() -> None:
    def labels(*names: str) -> list[str]:
        (chart,) = draw_curves(group_of(*(row(cores=c, model=m, dataset="my-own") for m in names for c in (8, 64))))
        return sorted(mark.text for mark in chart["chart"].marks if isinstance(mark, Label) and mark.full)

    assert labels("a/b", "c/b") == ["a/b", "c/b"]
    found = labels(*(f"runs/a-very-long-name-that-goes-on-{i}/best" for i in range(3)))
    assert len(set(found)) == 3
    assert max(map(len, found)) <= 22
    assert labels("facebook/dinov3-vits16-pretrain-lvd1689m", "tiny") == ["dinov3-vits16-pretrai…", "tiny"]


def test_no_paper_no_columns(tmp_path: Path) -> None:
    write_probe_report(write_rows(tmp_path, [row(published=False)]))
    assert tables(tree_of(tmp_path), "pets · classify, top1")[0][0] == ["model", "C", "px", "top1"]
    assert "What the paper has" not in (tmp_path / "report.html").read_text()
