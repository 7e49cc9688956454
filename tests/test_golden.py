"""Exactness: the authors' implementation gave these numbers; ours must too."""

from __future__ import annotations

import pytest
import torch
from conftest import GOLDEN, Golden, relative_error
from safetensors.torch import load_file

from veca.checkpoint.released import to_released
from veca.rope import farthest_points
from veca.train.objective import distillation_losses

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("image", ["image0", "image1"])
def test_outputs_at_every_budget(golden: Golden, image: str, device: str) -> None:
    model = golden.model().to(device)
    for cores in range(8, 65, 8):
        with torch.no_grad():
            out = model(golden.numbers[image].to(device), cores)
        found = {"cls": out.cls, "patches": out.patches, "coords": out.coordinates}
        for name, tensor in found.items():
            expected = golden.numbers[f"{image}.C{cores}.{name}"]
            assert tensor.shape == expected.shape
            assert relative_error(tensor.cpu(), expected) <= 2e-5, (cores, name)


@pytest.mark.parametrize("image", ["image0", "image1"])
def test_hidden_states_match_the_golden_numbers(golden: Golden, image: str) -> None:
    model = golden.model()
    with torch.no_grad():
        _, blocks = model.forward_intermediates(
            golden.numbers[image], return_prefix_tokens=True, output_fmt="NLC", cores=24
        )
    for (patches, cores), expected in zip(blocks, golden.numbers[f"{image}.C24.hidden"], strict=True):
        assert relative_error(torch.cat([cores, patches], dim=1), expected) <= 2e-5


@pytest.mark.parametrize("device", DEVICES)
def test_loss_and_every_gradient(golden: Golden, device: str) -> None:
    numbers = {name: tensor.to(device) for name, tensor in golden.numbers.items()}
    model = golden.model().to(device)
    out = model(numbers["image0"], cores=40)

    losses = distillation_losses(out.cls, out.patches, numbers["loss.teacher_cls"], numbers["loss.teacher_patches"])
    torch.testing.assert_close(torch.stack(losses[1:5]), numbers["loss.values"], rtol=1e-5, atol=1e-7)

    losses.total.backward()
    assert model.cores[5].grad is None, "chunks beyond the budget must take no part at all"
    assert model.core_states[5].grad is None
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    checked = 0
    for name, grad in to_released(grads, model.config).items():
        if f"grad.{name}" not in numbers:
            continue
        expected = numbers[f"grad.{name}"]
        checked += 1
        if expected.any():
            assert relative_error(grad.view_as(expected), expected) <= 1e-4, name
        else:
            assert grad.abs().max() <= 1e-6, name
    assert checked == sum(name.startswith("grad.") for name in numbers)


def test_farthest_points_match_the_golden_selection() -> None:
    fps = load_file(GOLDEN / "fps.safetensors")
    assert farthest_points(fps["pool"], 64).tolist() == fps["selected"].tolist()
