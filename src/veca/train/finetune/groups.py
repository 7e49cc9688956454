"""Learning rates by depth: the nearer to the pixels, the more general a layer is and the less it should move."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

_NUMBERED = re.compile(r"(?:blocks|coordinate_heads)\.(\d+)\.")
_STEM = ("patch_embed.", "cores.", "core_states.", "coordinate_alpha")
_UNDECAYED = ("cores.", "core_states.", "coordinate_alpha")


def layer_of(name: str, depth: int) -> int:
    """0 for what comes before the blocks, i + 1 for block i, depth + 1 for the head; as in timm, what comes between
    goes with the last block.

    >>> [layer_of(name, 12) for name in ("cores.3", "blocks.0.norm1.weight", "coordinate_heads.4.bias", "head.weight")]
    [0, 1, 5, 13]
    """
    name = name.removeprefix("backbone.")
    if found := _NUMBERED.match(name):
        return int(found[1]) + 1
    return 0 if name.startswith(_STEM) else depth + name.startswith("head.")


def parameter_groups(
    network: nn.Module, depth: int, layer_decay: float, decay: float, head: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for an optimizer, each with the `scale` of its rate: `layer_decay` for the last block, `layer_decay` times
    that of the layer above for the others, `head` for the head. Biases, norms, cores and coordinates have no weight
    decay.
    """
    groups: dict[tuple[int, float], dict[str, Any]] = {}
    for name, parameter in network.named_parameters():
        plain = parameter.ndim < 2 or name.removeprefix("backbone.").startswith(_UNDECAYED)
        layer, own = layer_of(name, depth), 0.0 if plain else decay
        scale = head if layer > depth else layer_decay ** (depth + 1 - layer)
        empty = {"params": [], "names": [], "scale": scale, "weight_decay": own}
        group = groups.setdefault((layer, own), empty)
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())
