from __future__ import annotations

import pytest
import torch
from conftest import make_tiny
from torch import nn

import veca
from veca.train.optimizers import make_optimizers, split_parameters


def test_every_parameter_has_one_optimizer(tiny: veca.Veca) -> None:
    split = split_parameters(tiny)
    assert sorted([*split.normuon_qkv, *split.normuon, *split.adamw]) == sorted(dict(tiny.named_parameters()))
    assert split.normuon_qkv == [f"blocks.{i}.attn.qkv.weight" for i in range(3)]
    per_block = ("attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
    assert split.normuon == [f"blocks.{i}.{name}" for i in range(3) for name in per_block][:-1]
    for name in (
        "blocks.2.mlp.fc2.weight",
        "blocks.0.attn.qkv.bias",
        "blocks.0.norm1.weight",
        "patch_embed.proj.weight",
    ):
        assert name in split.adamw
    for name in ("cores.0", "core_states.0", "coordinate_heads.0.weight", "coordinate_alpha", "norm.bias"):
        assert name in split.adamw


def test_a_projection_to_the_teachers_width_is_adamws() -> None:
    assert "output_proj.weight" in split_parameters(make_tiny(output_dim=48)).adamw


def test_what_is_frozen_is_left_out(tiny: veca.Veca) -> None:
    tiny.patch_embed.requires_grad_(False)
    tiny.blocks[0].requires_grad_(False)
    split = split_parameters(tiny)
    assert not any(name.startswith(("patch_embed.", "blocks.0.")) for names in split for name in names)
    make_optimizers(tiny, 1e-3, 0.1)


@pytest.mark.parametrize("cores", [8, 40, 64])
def test_cores_beyond_the_budget_take_no_part(tiny: veca.Veca, cores: int) -> None:
    """Not in this step, and not by momentum or decay in a later one."""
    optimizers = make_optimizers(tiny.train(), 1e-2, 0.1)
    before = {name: parameter.detach().clone() for name, parameter in tiny.named_parameters()}
    for _ in range(2):
        tiny(torch.randn(2, 3, 32, 48), cores).patches.square().mean().backward()
        optimizers.step(1e-2)
        optimizers.zero_grad()
    active = cores // tiny.config.core_chunk
    for name, parameter in tiny.named_parameters():
        bank = name.startswith(("cores.", "core_states."))
        beyond = bank and int(name.split(".")[1]) >= active
        assert torch.equal(parameter.detach(), before[name]) == beyond, name
        assert (parameter in optimizers.adamw.state or parameter in optimizers.normuon.state) != beyond


def test_the_rate_of_a_step_is_that_of_both(tiny: veca.Veca) -> None:
    optimizers = make_optimizers(tiny.train(), 1.0, 0.0)
    weights: list[nn.Parameter] = [tiny.blocks[0].attn.qkv.weight, tiny.norm.weight]  # type: ignore[list-item, union-attr]
    before = [weight.detach().clone() for weight in weights]
    tiny(torch.randn(2, 3, 32, 48)).patches.square().mean().backward()
    optimizers.step(0.0)
    assert all(torch.equal(weight.detach(), old) for weight, old in zip(weights, before, strict=True))
    optimizers.step(1e-3)
    assert not any(torch.equal(weight.detach(), old) for weight, old in zip(weights, before, strict=True))


def test_training_lowers_the_loss(tiny: veca.Veca) -> None:
    torch.manual_seed(0)
    images, target = torch.randn(4, 3, 32, 48), torch.randn(4, 6, 64)
    optimizers = make_optimizers(tiny.train(), 3e-3, 0.01)
    losses = []
    for _ in range(30):
        loss = (tiny(images).patches - target).square().mean()
        loss.backward()
        optimizers.step(3e-3)
        optimizers.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
