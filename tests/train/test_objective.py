from __future__ import annotations

import pytest
import torch
from torch import Tensor

from veca.train.objective import distillation_losses


def features() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 8), torch.randn(2, 5, 8), torch.randn(2, 8), torch.randn(2, 5, 8)


def test_losses_are_weighted_as_the_recipe_says() -> None:
    plain, weighted = distillation_losses(*features()), distillation_losses(*features(), weights=(0.5, 3))
    assert torch.equal(plain.total, plain.cls + plain.dense)
    assert float(weighted.total) == pytest.approx(float(plain.cls + 0.5 * (plain.cosine + 3 * plain.mse)), rel=1e-6)


def test_computed_in_float32_whatever_comes_in() -> None:
    rounded = [feature.bfloat16() for feature in features()]
    expected = distillation_losses(*(feature.float() for feature in rounded))
    with torch.autocast("cpu", torch.bfloat16):
        found = distillation_losses(*rounded)
    assert found.total.dtype == torch.float32
    assert torch.equal(torch.stack(found), torch.stack(expected))


def test_a_feature_of_zeros_has_a_loss_and_a_gradient() -> None:
    patches = torch.zeros(1, 4, 8, requires_grad=True)
    losses = distillation_losses(torch.zeros(1, 8), patches, torch.ones(1, 8), torch.ones(1, 4, 8))
    losses.total.backward()
    assert float(losses.total.detach()) == 3.0  # both angles count 1, and every square is 1
    assert torch.isfinite(patches.grad).all()
