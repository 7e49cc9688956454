"""What stands between the matrix products of a block: one kernel each where one fits, plain operators elsewhere.

The residual stream is carried as a pair: `x`, and the `update` that the last layer adds to it. The sum is taken
together with the norm that reads it first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veca.attention import use_triton
from veca.kernels import ops
from veca.layers import is_plain


def add_norm(x: Tensor, update: Tensor | None, norm: nn.LayerNorm, cores: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """`x + update` (B, S, D), `norm` of it, and the first `cores` tokens of the sum."""
    if _on_gpu(x) and is_plain(norm, nn.LayerNorm):
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        total, normed, first = ops.add_norm(x, update, norm.weight, norm.bias, norm.eps, dtype, cores, ops.KERNELS)
        return (x, normed, x[:, :cores]) if update is None else (total, normed, first)
    x = x if update is None else x + update
    return x, norm(x), x[:, :cores]


def swiglu(x: Tensor, layer: nn.Linear) -> Tensor:
    """`silu(u) * v` of [u, v] = layer(x)."""
    if _on_gpu(x) and is_plain(layer, nn.Linear):
        return ops.swiglu(F.linear(x, layer.weight), layer.bias, ops.KERNELS)
    u, v = layer(x).chunk(2, dim=-1)
    return F.silu(u) * v


def narrow_linear(x: Tensor, layer: nn.Module) -> Tensor:
    """`layer(x)` of a layer with two outputs."""
    if _on_gpu(x) and is_plain(layer, nn.Linear):
        return ops.narrow_linear(x, layer.weight, layer.bias, ops.KERNELS)
    out: Tensor = layer(x)
    return out


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda" and use_triton(x)
