from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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


def test_losses_and_gradients_are_those_of_torchs_functions() -> None:
    given = [feature.double().requires_grad_() for feature in features()]
    losses = distillation_losses(*given)
    cls, patches, teacher_cls, teacher_patches = given
    cosines = [
        F.cosine_similarity(*pair, dim=-1, eps=1e-6) for pair in ((cls, teacher_cls), (patches, teacher_patches))
    ]
    expected = (1 - cosines[0]).mean() + (1 - cosines[1]).mean() + F.mse_loss(patches, teacher_patches)
    torch.testing.assert_close(losses.total, expected, rtol=1e-12, atol=0)
    gradients = (torch.autograd.grad(total, given, retain_graph=True) for total in (losses.total, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
