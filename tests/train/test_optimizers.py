from __future__ import annotations

import pytest
import torch
from conftest import make_tiny
from torch import Tensor, nn
from torch.optim import Optimizer

import veca
from veca.train.optimizers import make_optimizers, split_parameters, step_optimizers


def test_every_parameter_has_one_optimizer(tiny: veca.Veca) -> None:
    split = split_parameters(tiny)
    assert sorted([*split["normuon_qkv"], *split["normuon"], *split["adamw"]]) == sorted(dict(tiny.named_parameters()))
    assert split["normuon_qkv"] == [f"blocks.{i}.attn.qkv.weight" for i in range(3)]
    per_block = ("attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
    assert split["normuon"] == [f"blocks.{i}.{name}" for i in range(3) for name in per_block][:-1]
    for name in (
        "blocks.2.mlp.fc2.weight",
        "blocks.0.attn.qkv.bias",
        "blocks.0.norm1.weight",
        "patch_embed.proj.weight",
    ):
        assert name in split["adamw"]
    for name in ("cores.0", "core_states.0", "coordinate_heads.0.weight", "coordinate_alpha", "norm.bias"):
        assert name in split["adamw"]


def test_a_projection_to_the_teachers_width_is_adamws() -> None:
    assert "output_proj.weight" in split_parameters(make_tiny(output_dim=48))["adamw"]


def test_what_is_frozen_is_left_out(tiny: veca.Veca) -> None:
    tiny.patch_embed.requires_grad_(False)
    tiny.blocks[0].requires_grad_(False)
    split = split_parameters(tiny)
    assert not any(name.startswith(("patch_embed.", "blocks.0.")) for names in split.values() for name in names)
    make_optimizers(tiny, 1e-3, 0.1, torch.bfloat16)


@pytest.mark.parametrize("cores", [8, 40, 64])
def test_cores_beyond_the_budget_take_no_part(tiny: veca.Veca, cores: int) -> None:
    """Not in this step, and not by momentum or decay in a later one."""
    optimizers = make_optimizers(tiny.train(), 1e-2, 0.1, torch.bfloat16)
    before = {name: parameter.detach().clone() for name, parameter in tiny.named_parameters()}
    for _ in range(2):
        tiny(torch.randn(2, 3, 32, 48), cores).patches.square().mean().backward()
        step_optimizers(optimizers, 1e-2)
    active = cores // tiny.config.core_chunk
    for name, parameter in tiny.named_parameters():
        bank = name.startswith(("cores.", "core_states."))
        beyond = bank and int(name.split(".")[1]) >= active
        assert torch.equal(parameter.detach(), before[name]) == beyond, name
        assert any(parameter in optimizer.state for optimizer in optimizers.values()) != beyond


def test_the_rate_of_a_step_is_that_of_both(tiny: veca.Veca) -> None:
    optimizers = make_optimizers(tiny.train(), 1.0, 0.0, torch.bfloat16)
    weights: list[nn.Parameter] = [tiny.blocks[0].attn.qkv.weight, tiny.norm.weight]  # type: ignore[list-item, union-attr]
    before = [weight.detach().clone() for weight in weights]
    for rate in (0.0, 1e-3):
        tiny(torch.randn(2, 3, 32, 48)).patches.square().mean().backward()
        step_optimizers(optimizers, rate)
        assert tiny.norm.weight.grad is None
        same = [torch.equal(weight.detach(), old) for weight, old in zip(weights, before, strict=True)]
        assert same == [rate == 0] * 2


def test_training_lowers_the_loss(tiny: veca.Veca) -> None:
    torch.manual_seed(0)
    images, target = torch.randn(4, 3, 32, 48), torch.randn(4, 6, 64)
    optimizers = make_optimizers(tiny.train(), 3e-3, 0.01, torch.bfloat16)
    losses = []
    for _ in range(30):
        loss = (tiny(images).patches - target).square().mean()
        loss.backward()
        step_optimizers(optimizers, 3e-3)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


def moved(
    model: veca.Veca, optimizers: dict[str, Optimizer], seed: int, skip: Tensor | None, bad: bool = False
) -> None:
    torch.manual_seed(seed)
    model(torch.randn(2, 3, 32, 48), 16).patches.square().mean().backward()
    for parameter in model.parameters():
        if bad and parameter.grad is not None:
            parameter.grad.fill_(float("nan"))
    step_optimizers(optimizers, 1e-2, skip)


def everything(model: veca.Veca, optimizers: dict[str, Optimizer]) -> dict[str, Tensor]:
    """Weights, and whatever the optimizers keep of each."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for kind, optimizer in optimizers.items():
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{kind} {name} {key}"] = value.clone()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False])
def test_a_skipped_step_has_never_been(dtype: torch.dtype, first: bool) -> None:
    """Weights, momentum, second moments and AdamW's counts of steps: in it, and in all that follow."""
    go, no = torch.zeros(()), torch.ones(())
    runs = []
    for skipping in (False, True):
        model = make_tiny().train()
        optimizers = make_optimizers(model, 1e-2, 0.1, dtype)
        if not first:
            moved(model, optimizers, 1, go)
        if skipping:
            before = everything(model, optimizers)
            moved(model, optimizers, 2, no, bad=True)
            after = everything(model, optimizers)
            assert all(torch.equal(after[name], before[name]) for name in before)
            assert all(not after[name].any() for name in after.keys() - before.keys())  # begun, at zero
        for seed in (3, 4):
            moved(model, optimizers, seed, go)
        runs.append(everything(model, optimizers))
    plain, skipped = runs
    assert plain.keys() == skipped.keys()
    assert any(name.endswith(" step") for name in plain)
    for name in plain:
        assert torch.equal(skipped[name], plain[name]), name


def test_to_ask_for_no_skip_changes_nothing() -> None:
    runs = []
    for skip in (None, torch.zeros(())):
        model = make_tiny().train()
        optimizers = make_optimizers(model, 1e-2, 0.1, torch.float32)
        for seed in (1, 2):
            moved(model, optimizers, seed, skip)
        runs.append(everything(model, optimizers))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
