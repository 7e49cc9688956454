"""Attention maps: how each core attends to the patches.

Shapes: B images, rows × columns = N patches, C active cores, S = C + N tokens (cores first), H heads of width d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from veca.errors import ArgumentError
from veca.model import Veca, VecaOutput
from veca.rope import Rotary, rotate

Captured = TypeVar("Captured")


@torch.no_grad()
def core_maps(
    model: Veca, images: Tensor, cores: int | None = None, layers: Sequence[int] = (-1,), per_head: bool = False
) -> Tensor:
    """Attention of each active core over the patches, in the blocks numbered `layers` (negative: from the end).

    Returns (layers, B, C, rows, columns), the mean over heads, or with `per_head` (layers, B, H, C, rows, columns).
    These are probabilities of a softmax over all S tokens, so a map sums to what the core does not spend on cores.
    They are float32 or better; memory is linear in N. The model is run as it is: put it in eval mode first.

    >>> from veca import create_model
    >>> core_maps(create_model("veca_tiny").eval(), torch.zeros(1, 3, 64, 96), cores=16, layers=(0, -1)).shape
    torch.Size([2, 1, 16, 4, 6])
    """

    def capture(attn: Any, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> Tensor:
        attention = attention_to_patches(project_qkv(attn, x), core_rotary, patch_rotary)
        return attention if per_head else attention.mean(1)

    captured, out = capture_attention(model, images, cores, layers, capture)
    return torch.stack(captured).unflatten(-1, out.grid)


def capture_attention(
    model: Veca, images: Tensor, cores: int | None, layers: Sequence[int], capture: Callable[..., Captured]
) -> tuple[list[Captured], VecaOutput]:
    """Run the model and call `capture(attn, x, core_rotary, patch_rotary)` before the attention of each block.

    `x` (B, S, D) are the normalised tokens that attention gets. Returns one result per layer, and the model's output.
    """
    model = getattr(model, "_orig_mod", model)  # a graph compiled by torch.compile may skip hooks
    depth = len(model.blocks)
    if not layers:
        raise ArgumentError("asked for the maps of no block; name at least one")
    for layer in layers:
        if not -depth <= layer < depth:
            raise ArgumentError(f"asked for the maps of block {layer}; the model has blocks 0 to {depth - 1}")
    if not hasattr(model.blocks[0], "attn"):
        raise ArgumentError("an optimized model keeps no attention; give the model it was made from")
    indices = [layer % depth for layer in layers]
    blocks: Any = model.blocks
    captured: dict[int, Captured] = {}

    def run_capture(index: int, attn: Any, args: tuple[Any, ...]) -> None:
        captured[index] = capture(attn, *args[:3])

    with ExitStack() as hooks:
        if blocks[0]._compiled_call_impl is not None:  # `veca.optimize` compiles blocks on a CPU
            hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for index in set(indices):
            hooks.enter_context(blocks[index].attn.register_forward_pre_hook(partial(run_capture, index)))
        out = Veca.forward(model, images, cores)  # subclasses, as timm's, return something else when called
    return [captured[index] for index in indices], out


def project_qkv(attn: Any, x: Tensor) -> Tensor:
    """Queries, keys and values of tokens (B, S, D): (B, S, 3, H, d)."""
    qkv: Tensor = attn.qkv(x)
    return qkv.unflatten(-1, (3, attn.num_heads, -1))


def attention_to_patches(qkv: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> Tensor:
    """Attention of each core to the patches, (B, H, C, N)."""
    cores = core_rotary[0].shape[-2]
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)
    # Queries and keys are rounded as in the model; the softmax is at least float32 to keep small probabilities.
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_core = rotate(q[:, :, :cores], core_rotary).to(dtype)
    k_core, k_patch = rotate(k[:, :, :cores], core_rotary), rotate(k[:, :, cores:], patch_rotary)
    with torch.autocast(qkv.device.type, enabled=False):
        logits = q_core @ torch.cat([k_core, k_patch], dim=2).to(dtype).mT / q.shape[-1] ** 0.5
        probabilities: Tensor = logits.softmax(dim=-1)
    return probabilities[..., cores:]
