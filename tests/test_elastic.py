"""`veca.make_elastic`: the same outputs, the most important channels first."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, make_tiny, relative_error
from sample_images import random_images
from torch import nn

import veca
from veca.elastic import patch_magnitudes

WIDTHS = (1.0, 0.5, 0.25)


def test_outputs_stay_and_saving_keeps_it(tmp_path: Path) -> None:
    model = make_tiny(mlp_ratio=4.0).train()
    before = copy.deepcopy(model).eval()
    elastic = veca.make_elastic(model, random_images(40), WIDTHS)
    assert elastic is model
    assert model.training
    assert not any(block.mlp.fc2._forward_pre_hooks for block in model.blocks)
    veca.save(model, tmp_path)
    again, images = veca.load(tmp_path), random_images()
    assert again.config.widths == model.config.widths == WIDTHS
    for cores in (8, 64):
        assert relative_error(model.eval()(images, cores).patches, before(images, cores).patches) < 2e-6
        narrow = model(images, cores, width=0.25).patches
        torch.testing.assert_close(again(images, cores, width=0.25).patches, narrow, rtol=0, atol=0)


def test_works_on_released_checkpoints() -> None:
    before, images = veca.load(GOLDEN / "official_checkpoint.pt"), random_images(2, 64, 64)
    after = veca.make_elastic(copy.deepcopy(before), images, WIDTHS)
    assert relative_error(after(images).patches, before(images).patches) < 2e-6
    moved = [(a != b).any() for a, b in zip(after.parameters(), before.parameters(), strict=True)]
    assert sum(moved) == 3 * len(before.blocks), "fc1.weight, fc1.bias and fc2.weight of each block"


def test_importance_is_magnitude_over_patches_times_norm_and_descends() -> None:
    model, images = make_tiny(mlp_ratio=4.0), random_images(3)
    expected, seen = [], []
    for block in model.blocks:
        block.mlp.fc2.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(images)
    for block, hidden in zip(model.blocks, seen, strict=True):
        block.mlp.fc2._forward_pre_hooks.clear()
        magnitude = hidden[:, 64:].detach().abs().mean((0, 1))
        expected.append((magnitude * block.mlp.fc2.weight.detach().norm(dim=0)).sort(descending=True).values)
    veca.make_elastic(model, [images[:2], images[2:]], WIDTHS)
    for block, magnitude, importance in zip(model.blocks, patch_magnitudes(model, images), expected, strict=True):
        found = magnitude * block.mlp.fc2.weight.double().norm(dim=0)
        torch.testing.assert_close(found.float(), importance)


def test_the_important_half_is_closer_to_the_whole_than_any_half() -> None:
    model, images = veca.load("veca_tiny"), veca.images.normalize(torch.rand(2, 3, 64, 64))
    whole = model(images, 64).patches
    any_half = relative_error(model(images, 64, width=0.5).patches, whole)
    veca.make_elastic(model, images, WIDTHS)
    assert relative_error(model(images, 64, width=0.5).patches, whole) < 0.8 * any_half


def test_what_cannot_be_made_elastic_is_named() -> None:
    model, images = make_tiny(), random_images()
    with pytest.raises(veca.ConfigError, match="widths"):
        veca.make_elastic(model, images, (0.5,))
    with pytest.raises(veca.VecaError, match="calibration_images: there are none"):
        veca.make_elastic(model, [], WIDTHS)
    model.blocks[1].mlp.fc2 = nn.Sequential(model.blocks[1].mlp.fc2)  # type: ignore[assignment]
    with pytest.raises(veca.VecaError, match="the MLP of block 1 is not the model's own"):
        veca.make_elastic(model, images, WIDTHS)
    assert model.config.widths == (1.0,)
