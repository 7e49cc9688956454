"""Which optimizer moves which parameter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from veca.model import Veca
from veca.train.normuon import NorMuon


class Split(NamedTuple):
    """Names of a model's trainable parameters, by what moves them."""

    normuon_qkv: list[str]
    """Weights that hold three matrices, which NorMuon takes one by one."""
    normuon: list[str]
    adamw: list[str]


class Optimizers(NamedTuple):
    """The two that train a model, used as one."""

    normuon: NorMuon
    adamw: AdamW

    def step(self, learning_rate: float, skip: Tensor | None = None) -> None:
        """Move all parameters; where `skip`, a number on the device, is 1, none moves, and no host waits to know."""
        for optimizer in self:
            optimizer.found_inf = skip  # type: ignore[union-attr]  # fused AdamW has it without saying
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()


def split_parameters(model: Veca) -> Split:
    """NorMuon takes the weight matrices of the blocks but for the last one's output; AdamW takes all the rest."""
    split = Split([], [], [])
    last = f"blocks.{len(model.blocks) - 1}.mlp.fc2.weight"
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not name.startswith("blocks.") or parameter.ndim != 2 or name == last:
            split.adamw.append(name)
        elif name.endswith("attn.qkv.weight"):
            split.normuon_qkv.append(name)
        else:
            split.normuon.append(name)
    return split


def make_optimizers(
    model: Veca, learning_rate: float, weight_decay: float, dtype: torch.dtype = torch.bfloat16
) -> Optimizers:
    """The optimizers of the paper, with one rate and one decay for both. `dtype` is that of NorMuon's products.

    What has no gradient in a step, as cores beyond its budget, is not touched by it: no decay, no momentum.
    """
    split, named = split_parameters(model), dict(model.named_parameters())

    def parameters(names: list[str]) -> list[nn.Parameter]:
        return [named[name] for name in names]

    groups = [{"params": parameters(split.normuon_qkv), "parts": 3}, {"params": parameters(split.normuon)}]
    return Optimizers(
        NorMuon(groups, learning_rate, weight_decay, dtype=dtype),
        AdamW(parameters(split.adamw), learning_rate, (0.9, 0.999), 1e-8, weight_decay, fused=True),
    )
