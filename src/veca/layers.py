"""Which layers may be replaced by a product with their weights.

The fast paths of `veca.model` read a layer's weights and do not call the layer. That is only right for a layer nobody
has changed: hooks (pruning, weight norm, captum, feature extractors), parametrizations, adapters and quantised weights
take effect in the call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module


def is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling `layer`, a Linear or a LayerNorm, does no more than that `kind` does with its weight and bias.

    torch.compile traces it, so a compiled model knows the hooks that are there when it is compiled.
    """
    known: Any = layer
    return (
        type(layer) is kind  # parametrize and fully_shard change the class, adapters replace the layer
        and not has_hooks(layer)
        and not torch_module._has_any_global_hook()
        and known.weight is not None
        and known.bias is not None
        and not is_wrapped(known.weight)
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of `module` runs more than the forward method of its class; hooks of all modules aside."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or "forward" in module.__dict__  # as accelerate attaches its hooks
    )


def is_wrapped(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor are held by others, as those of quantised and distributed ones are."""
    return hasattr(type(tensor), "__tensor_flatten__")
