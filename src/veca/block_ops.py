"""Fast paths of a block: fused residual, norm and SwiGLU, attention shortcuts, gradient checkpointing.

`veca.model` says what a block computes; this module says how, without changing what it computes: Triton kernels on
GPUs that have them, PyTorch operators elsewhere.

Shapes: B images, C cores, S = C + N tokens (cores first), D width.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from veca.attention import (
    few_cores_attention,
    first_core_attention,
    many_cores_attention,
    prefers_few_cores,
    rotates_in_place,
    use_triton,
)
from veca.kernels import onednn, ops
from veca.rope import Rotary


class Tokens(NamedTuple):
    """The residual stream `x + update` (B, S, D), its last sum not yet taken.

    A block ends with an update that the next block's first norm reads together with `x`. Left to that norm, the sum is
    part of its kernel: one pass over memory instead of two.
    """

    x: Tensor
    update: Tensor | None = None
    """What the last layer adds; None: nothing."""

    def total(self) -> Tensor:
        return self.x if self.update is None else self.x + self.update


def add_and_norm(tokens: Tokens, norm: nn.LayerNorm, cores: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of `tokens` (B, S, D), `norm` of it, and the sum's first `cores` tokens.

    The fused kernel copies the cores out, so that a gradient through them alone is C and not S tokens long.
    """
    x, update = tokens
    if _on_gpu(x) and is_plain(norm, nn.LayerNorm):
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        total, normed, first = ops.add_norm_op(x, update, norm.weight, norm.bias, norm.eps, dtype, cores, ops.KERNELS)
        return (x, normed, x[:, :cores]) if update is None else (total, normed, first)
    x = tokens.total()
    return x, norm(x), x[:, :cores]


def gated_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """SwiGLU: `silu(u) * v` of [u, v] = layer(x)."""
    if _on_gpu(x) and is_plain(layer, nn.Linear):
        return ops.swiglu_op(F.linear(x, layer.weight), layer.bias, ops.KERNELS)
    if onednn.supports_onednn(x, layer.weight) and is_plain(layer, nn.Linear):
        u, v = zip(layer.weight.chunk(2), layer.bias.chunk(2), strict=True)
        return onednn.inference_swiglu(x, u, v)
    u, v = layer(x).chunk(2, dim=-1)
    return F.silu(u) * v


def apply_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """`layer(x)`."""
    if onednn.supports_onednn(x, layer.weight) and is_plain(layer, nn.Linear):
        return onednn.inference_linear(x, layer.weight, layer.bias)
    out: Tensor = layer(x)
    return out


def nested_mlp(x: Tensor, fc1: nn.Linear, fc2: nn.Linear, cores: int, hidden: int) -> Tensor:
    """`fc2(silu(u) * v)`, [u, v] = `fc1(x)`, of which the first `cores` tokens use all channels, others `hidden`.

    All tokens together take the first `hidden` channels; the rest are a second product, of the cores alone.
    """
    if not (is_plain(fc1, nn.Linear) and is_plain(fc2, nn.Linear)):
        gated = gated_linear(x, fc1)
        gated[:, cores:, hidden:] = 0
        out: Tensor = fc2(gated)
        return out
    if _on_gpu(x):
        hidden = operator.index(hidden)  # a constant for torch.compile: the kernel is compiled for a width
    sizes = [hidden, fc2.in_features - hidden]
    u_first, u_rest, v_first, v_rest = zip(fc1.weight.split(sizes * 2), fc1.bias.split(sizes * 2), strict=True)
    w_first, w_rest = fc2.weight.split(sizes, dim=1)
    out = onednn.inference_linear(_gated_pair(x, u_first, v_first), w_first, fc2.bias)
    if cores:
        out[:, :cores] += F.linear(_gated_pair(x[:, :cores], u_rest, v_rest), w_rest)
    return out


def _gated_pair(x: Tensor, u: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor]) -> Tensor:
    """SwiGLU of two layers, each a weight and a bias."""
    if _on_gpu(x):
        weight, bias = (torch.cat(parts) for parts in zip(u, v, strict=True))
        return ops.swiglu_op(F.linear(x, weight), bias, ops.KERNELS)
    if onednn.supports_onednn(x, u[0]):
        return onednn.inference_swiglu(x, u, v)
    return F.silu(F.linear(x, *u)) * F.linear(x, *v)


class CoordinateHead(nn.Linear):
    """Two outputs, a core's step. No plain Linear, so that bitsandbytes, which takes 32 outputs at once, leaves it."""


def coordinate_step(cores: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    """`head(cores)`: (B, C, D) → (B, C, 2)."""
    if isinstance(head, nn.Linear) and _on_gpu(cores) and is_plain(head, CoordinateHead):
        return ops.narrow_linear_op(cores, head.weight, head.bias, ops.KERNELS)
    return head(cores)


def pass_layer(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """`layer` as an argument of a block; accelerate would move one whose weights it keeps elsewhere, so a function."""
    return functools.partial(layer) if "forward" in vars(layer) else layer


def attention_shortcut(
    x: Tensor, qkv: nn.Linear, proj: nn.Linear, heads: int, core_rotary: Rotary, patch_rotary: Rotary, cls_only: bool
) -> Tensor | None:
    """`proj(core_attention(qkv(x)))` with less work, for `cls_only`, few cores or a CPU; None: compute it as written.

    With `cls_only` the result is the first core's row alone, (B, 1, D).
    """
    few = prefers_few_cores(x, heads, core_rotary)
    shorter = cls_only or few or rotates_in_place(x, qkv)
    if shorter and is_plain(qkv, nn.Linear) and is_plain(proj, nn.Linear):
        attend = first_core_attention if cls_only else few_cores_attention if few else many_cores_attention
        return attend(x, qkv, proj, heads, core_rotary, patch_rotary)
    return None


def checkpoint_block(block: nn.Module, tokens: Tokens, state: Tensor, *args: Any) -> tuple[Tokens, Tensor]:
    """`block(tokens, state, *args)` that keeps its inputs alone for the backward pass and recomputes the rest."""
    x, state = checkpoint(_run_and_add, block, tokens.total(), state, *args, use_reentrant=False)
    return Tokens(x), state


def _run_and_add(block: nn.Module, x: Tensor, state: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    # The sum is taken inside: of each block one tensor is kept for the backward pass, not two.
    tokens, state = block(Tokens(x), state, *args)
    return tokens.total(), state


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda" and use_triton(x)


# The fast paths read a layer's weights and do not call the layer. That is only right for a layer nobody has changed:
# hooks (pruning, weight norm, captum, feature extractors), parametrizations, adapters and quantised weights take effect
# in the call.


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
    """Whether calling `module` runs more than the forward method of its class; global hooks aside."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or "forward" in module.__dict__  # as accelerate attaches its hooks
    )


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor keeps its values in others, as quantised and distributed ones do."""
    return hasattr(type(tensor), "__tensor_flatten__")
