"""Optimizers and parameter groups: NorMuon with AdamW, and layer-wise rates for fine-tuning."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from veca.model import Veca
from veca.train.normuon import NorMuon

_NUMBERED_LAYER = re.compile(r"(?:blocks|coordinate_heads)\.(\d+)\.")
_STEM_PARAMETERS = ("patch_embed.", "cores.", "core_states.", "coordinate_alpha")
_NO_DECAY = ("cores.", "core_states.", "coordinate_alpha")


class ParameterSplit(NamedTuple):
    """Names of a model's trainable parameters, by the optimizer that updates them."""

    normuon_qkv: list[str]
    """Weights that hold three matrices (q, k, v), which NorMuon orthogonalises separately."""
    normuon: list[str]
    adamw: list[str]


class Optimizers(NamedTuple):
    """The two optimizers of a distillation run, stepped together."""

    normuon: NorMuon
    adamw: AdamW

    def step(self, learning_rate: float, skip: Tensor | None = None) -> None:
        """Update all parameters, or none if `skip`, a scalar on the device, is 1: the host need not wait to know."""
        for optimizer in self:
            optimizer.found_inf = skip  # type: ignore[union-attr]  # fused AdamW reads it, though its class does not declare it
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()


def split_parameters(model: Veca) -> ParameterSplit:
    """NorMuon updates the weight matrices of the blocks except the very last one; AdamW updates the rest."""
    split = ParameterSplit([], [], [])
    last = f"blocks.{len(model.blocks) - 1}.mlp.fc2.weight"
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # As in Muon, embeddings, norms, biases and the output layer are left to AdamW.
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

    Parameters without a gradient in a step, as cores beyond its budget, are left alone: no decay, no momentum.
    """
    split, named = split_parameters(model), dict(model.named_parameters())
    matrices, rest = {3: split.normuon_qkv, 1: split.normuon}, [named[name] for name in split.adamw]
    groups = [{"params": [named[name] for name in names], "parts": parts} for parts, names in matrices.items()]
    return Optimizers(
        NorMuon(groups, learning_rate, weight_decay, dtype),
        AdamW(rest, learning_rate, (0.9, 0.999), 1e-8, weight_decay, fused=True),
    )


def layer_of(name: str, depth: int) -> int:
    """0 for parameters before the blocks, i + 1 for block i, depth + 1 for the head; as in timm, those between the
    blocks and the head go with the last block.

    >>> [layer_of(name, 12) for name in ("cores.3", "blocks.0.norm1.weight", "coordinate_heads.4.bias", "head.weight")]
    [0, 1, 5, 13]
    """
    name = name.removeprefix("backbone.")
    if match := _NUMBERED_LAYER.match(name):
        return int(match[1]) + 1
    return 0 if name.startswith(_STEM_PARAMETERS) else depth + name.startswith("head.")


def layer_decay_groups(
    network: nn.Module, depth: int, layer_decay: float, decay: float, head: float = 1.0
) -> list[dict[str, Any]]:
    """Parameter groups with layer-wise rates: general layers, near the pixels, should change less.

    The `scale` of a group's rate is `layer_decay` for the last block, `layer_decay` times that of the layer above for
    the others, `head` for the head. Biases, norms, cores and coordinates have no weight decay.
    """
    groups: dict[tuple[int, float], dict[str, Any]] = {}
    for name, parameter in network.named_parameters():
        undecayed = parameter.ndim < 2 or name.removeprefix("backbone.").startswith(_NO_DECAY)
        layer, weight_decay = layer_of(name, depth), 0.0 if undecayed else decay
        scale = head if layer > depth else layer_decay ** (depth + 1 - layer)
        empty = {"params": [], "names": [], "scale": scale, "weight_decay": weight_decay}
        group = groups.setdefault((layer, weight_decay), empty)
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())
