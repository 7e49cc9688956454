"""Attention maps of the cores, and their contributions to the patches (the paper's equation 5).

Attention alone misleads: a core may get much attention and still add little. The contribution of token j to token i is
the norm of what j adds to i, c_ij = ‖Σ_h A^h_ij v^h_j W_O^h‖; a patch's *profile* is each core's share of these.

Shapes: B images, rows × columns = N patches, C active cores, S = C + N tokens (cores first), H heads, d width of a
head, D = H·d; Q queries (tokens that receive), K keys (tokens that contribute).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from veca.attention import core_probabilities, patch_probabilities
from veca.errors import ArgumentError
from veca.model import Veca, VecaOutput
from veca.rope import Rotary, rotate

Captured = TypeVar("Captured")
CHUNK_SIZE = 2**20
"""About this many float64 numbers per intermediate tensor: 8 MiB."""


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

    def capture(attn: Any, x: Tensor, *rotaries: Rotary) -> Tensor:
        attention = attention_to_patches(project_qkv(attn, x), *rotaries)
        return attention if per_head else attention.mean(1)

    captured, out = capture_attention(model, images, cores, layers, capture)
    return torch.stack(captured).unflatten(-1, out.grid)


@torch.no_grad()
def core_profiles(
    model: Veca, images: Tensor, cores: int | None = None, layers: Sequence[int] = (-1,), chunk_size: int = CHUNK_SIZE
) -> Tensor:
    """Each patch's profile over the active cores, in the blocks numbered `layers` (negative: from the end).

    Returns (layers, B, rows, columns, C), float32 or better. The C shares of a patch sum to 1: patches attend to
    nothing else. Memory is linear in N. The model is run as it is: put it in eval mode first.

    >>> from veca import create_model
    >>> core_profiles(create_model("veca_tiny").eval(), torch.zeros(1, 3, 64, 96), cores=16, layers=(3, -1)).shape
    torch.Size([2, 1, 4, 6, 16])
    """

    def capture(attn: Any, x: Tensor, *rotaries: Rotary) -> Tensor:
        return _profiles(attn, project_qkv(attn, x), *rotaries, chunk_size=chunk_size)

    captured, out = capture_attention(model, images, cores, layers, capture)
    return torch.stack(captured).unflatten(2, out.grid)


class Inside(NamedTuple):
    """Output, maps and profiles of one forward pass."""

    output: VecaOutput
    maps: Tensor
    """(layers, B, C, rows, columns), as from `core_maps`."""
    profiles: Tensor
    """(layers, B, rows, columns, C), as from `core_profiles`."""


@torch.no_grad()
def look_inside(model: Veca, images: Tensor, cores: int | None = None, layers: Sequence[int] = (-1,)) -> Inside:
    """`core_maps` and `core_profiles` of one forward pass, and its output."""

    def capture(attn: Any, x: Tensor, *rotaries: Rotary) -> Tensor:
        qkv = project_qkv(attn, x)
        attention = attention_to_patches(qkv, *rotaries).mean(1)
        return torch.stack([attention, _profiles(attn, qkv, *rotaries).mT])  # (2, B, C, N)

    captured, out = capture_attention(model, images, cores, layers, capture)
    maps, shares = torch.stack(captured, dim=1)
    return Inside(out, maps.unflatten(-1, out.grid), shares.mT.unflatten(2, out.grid))


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


def contributions(attention: Tensor, values: Tensor, weight: Tensor, chunk_size: int = CHUNK_SIZE) -> Tensor:
    """c_ij of every query and key, (..., Q, K), not yet divided by its sum over j. Exact, float64.

    `attention` (..., H, Q, K), `values` (..., H, K, d), `weight` (D, H·d) of the output projection.
    """
    heads = attention.shape[-3]
    # ‖Σ_h a_h u_h‖² = aᵀ G a, where G (H, H) is the Gram matrix of a key's vectors u_h = v^h W_O^h: H numbers per pair
    # of tokens instead of D. In float64 cancellation in the sum leaves no visible error.
    slices = weight.double().unflatten(1, (heads, -1)).permute(1, 2, 0)  # (H, d, D)
    # Keys of all images in one dimension and queries last: (H, H) @ (H, Q) is fast, with Q first it is slow.
    keys = values.movedim(-3, 0).flatten(1, -2)  # (H, keys, d)
    shares = attention.movedim(-1, -3)  # (..., K, H, Q)
    rows = shares.reshape(-1, *shares.shape[-2:])
    norms = []
    step = max(1, chunk_size // (heads * (weight.shape[0] + rows.shape[-1])))
    for start in range(0, len(rows), step):
        chunk = slice(start, start + step)
        vectors = (keys[:, chunk].double() @ slices).transpose(0, 1)  # (keys, H, D)
        share = rows[chunk].double()
        norms.append(((vectors @ vectors.mT @ share) * share).sum(-2).clamp(min=0).sqrt())
    return torch.cat(norms).reshape(*shares.shape[:-2], -1).mT


def attention_and_profiles(
    attn: Any, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary, *, chunk_size: int = CHUNK_SIZE
) -> tuple[Tensor, Tensor]:
    """From the inputs of a block's attention: attention of the cores and profiles of the patches.

    (B, C, S), the mean over heads, whose rows sum to 1, and (B, N, C).
    """
    qkv = project_qkv(attn, x)
    qkv = qkv.to(torch.promote_types(qkv.dtype, torch.float32))  # rounded only where the model rounds
    patch_to_core, core_to_all = core_probabilities(qkv[:, :, :2], core_rotary, patch_rotary)
    profiles = _shares(attn, patch_to_core, qkv[:, : core_rotary.cos.shape[-2], 2], chunk_size)
    return core_to_all.unflatten(1, (attn.num_heads, -1)).mean(1), profiles


def _profiles(
    attn: Any, qkv: Tensor, core_rotary: Rotary, patch_rotary: Rotary, *, chunk_size: int = CHUNK_SIZE
) -> Tensor:
    """Profiles of the patches alone, (B, N, C)."""
    qkv = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    patch_to_core = patch_probabilities(qkv[:, :, :2], core_rotary, patch_rotary)
    return _shares(attn, patch_to_core, qkv[:, : core_rotary.cos.shape[-2], 2], chunk_size)


def _shares(attn: Any, patch_to_core: Tensor, values: Tensor, chunk_size: int) -> Tensor:
    """Profiles (B, N, C) from probabilities (B, N, H·C) and the values of the cores (B, C, H, d)."""
    if type(attn.proj) is not nn.Linear:
        kind = f"the output projection is a {type(attn.proj).__name__} here and not a Linear"
        raise ArgumentError(f"{kind}; merge adapters into the model to see contributions, or take it unquantised")
    device = "cpu" if values.device.type == "mps" else values.device  # MPS has no float64
    attention = patch_to_core.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)  # (B, H, N, C)
    parts = attention.to(device), values.transpose(1, 2).to(device), attn.proj.weight.to(device)
    norms = contributions(*parts, chunk_size)
    # A patch to which no core adds anything gets equal shares.
    norms = torch.where(norms.sum(-1, keepdim=True) == 0, 1.0, norms)
    return (norms / norms.sum(-1, keepdim=True)).to(values.device, values.dtype)
