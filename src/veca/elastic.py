"""`veca.make_elastic`: put the MLP channels of a trained model in order of importance, so that widths can be trained.

Shapes: B images, C cores, S tokens (cores first), M channels of the MLP.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from veca.block_ops import is_plain
from veca.errors import ArgumentError
from veca.model import Block, Veca

BATCH = 32
"""Images per forward pass, where they come as one tensor."""


def make_elastic(model: Veca, calibration_images: Tensor | Iterable[Tensor], widths: Sequence[float]) -> Veca:
    """Order the MLP channels of `model`, in place, by their importance for patches, and list `widths` in its config.

    Importance of a channel is its mean magnitude over the patches of the images, times the norm of what it adds to a
    token. A permutation of channels changes no output; at a width below 1 patches then use the most important ones. The
    model is not trained at the widths yet: a recipe with `widths` does that. `calibration_images` are normalised, in
    one tensor (B, 3, height, width) or in batches; a few hundred are enough.

    >>> import veca
    >>> model = make_elastic(veca.load("veca_tiny"), torch.randn(4, 3, 64, 64), widths=(1, 0.5, 0.25))
    >>> model.config.widths
    (1.0, 0.5, 0.25)
    """
    config = dataclasses.replace(model.config, widths=tuple(widths))  # wrong widths are refused before any work
    blocks: Any = model.blocks
    for i, block in enumerate(blocks):
        layers = (block.mlp.fc1, block.mlp.fc2) if type(block) is Block else (block,)
        if not all(is_plain(layer, nn.Linear) for layer in layers):
            problem = f"the MLP of block {i} is not the model's own: it is compiled, quantised, adapted or has hooks"
            raise ArgumentError(f"{problem}. Make the plain model elastic, then change it")
    for block, magnitudes in zip(blocks, patch_magnitudes(model, calibration_images), strict=True):
        reorder(block.mlp, magnitudes)
    model.config = config
    return model


@torch.no_grad()
def patch_magnitudes(model: Veca, images: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """E|h| of each channel (M) over the patches of the images, in each block, at the model's own budget."""
    batches = images.split(BATCH) if isinstance(images, Tensor) else images
    weight, budget = model.patch_embed.proj.weight, model.budget or model.config.num_cores
    sums = weight.new_zeros(len(model.blocks), model.config.mlp_dim, dtype=torch.float64)
    patches, was_training = 0, model.training

    def hook(row: Tensor) -> Any:
        def add(_: Any, args: tuple[Tensor]) -> None:
            row.add_(args[0][:, budget:].abs().sum((0, 1), dtype=torch.float64))

        return add

    blocks: Any = model.blocks
    with ExitStack() as hooks:
        for row, block in zip(sums, blocks, strict=True):
            hooks.enter_context(block.mlp.fc2.register_forward_pre_hook(hook(row)))
        hooks.callback(model.train, was_training)
        model.eval()
        for batch in batches:
            patches += model.forward_features(batch.to(weight.device), width=1)[:, budget:, 0].numel()
    if not patches:
        raise ArgumentError("calibration_images: there are none; a few hundred are enough")
    return list(sums / patches)


@torch.no_grad()
def reorder(mlp: Any, magnitudes: Tensor) -> None:
    """Permute the channels of a `SwiGlu`: those of largest magnitude times norm of their output weights come first."""
    importance = magnitudes * mlp.fc2.weight.double().norm(dim=0)
    order = importance.argsort(descending=True, stable=True)
    for parameter in (mlp.fc1.weight, mlp.fc1.bias):
        parameter.copy_(parameter.unflatten(0, (2, -1))[:, order].flatten(0, 1))
    mlp.fc2.weight.copy_(mlp.fc2.weight[:, order])
