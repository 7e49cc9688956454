"""Contributions of cores to patches: attention, values and output projection together (the paper's equation 5).

Attention alone misleads: a core may get much attention and still add little. The contribution of token j to token i is
the norm of what j adds to i, c_ij = ‖Σ_h A^h_ij v^h_j W_O^h‖; a patch's *profile* is each core's share of these.

Shapes: B images, rows × columns = N patches, C active cores, S = C + N tokens (cores first), H heads, d width of a
head, D = H·d; Q queries (tokens that receive), K keys (tokens that contribute).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from veca.attention import core_probabilities, patch_probabilities
from veca.errors import ArgumentError
from veca.inspect.maps import attention_to_patches, capture_attention, project_qkv
from veca.model import Veca, VecaOutput
from veca.rope import Rotary

CHUNK_SIZE = 2**20
"""About this many float64 numbers per intermediate tensor: 8 MiB."""


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

    def capture(attn: Any, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> Tensor:
        return _profiles(attn, project_qkv(attn, x), core_rotary, patch_rotary, chunk_size)

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

    def capture(attn: Any, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> Tensor:
        qkv = project_qkv(attn, x)
        attention = attention_to_patches(qkv, core_rotary, patch_rotary).mean(1)
        return torch.stack([attention, _profiles(attn, qkv, core_rotary, patch_rotary).mT])  # (2, B, C, N)

    captured, out = capture_attention(model, images, cores, layers, capture)
    maps, shares = torch.stack(captured, dim=1)
    return Inside(out, maps.unflatten(-1, out.grid), shares.mT.unflatten(2, out.grid))


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
    attn: Any, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary, chunk_size: int = CHUNK_SIZE
) -> tuple[Tensor, Tensor]:
    """From the inputs of a block's attention: attention of the cores and profiles of the patches.

    (B, C, S), the mean over heads, whose rows sum to 1, and (B, N, C).
    """
    qkv = _at_least_float32(project_qkv(attn, x))
    patch_to_core, core_to_all = core_probabilities(qkv[:, :, :2], core_rotary, patch_rotary)
    profiles = _shares(attn, patch_to_core, qkv[:, : core_rotary.cos.shape[-2], 2], chunk_size)
    return core_to_all.unflatten(1, (attn.num_heads, -1)).mean(1), profiles


def _profiles(
    attn: Any, qkv: Tensor, core_rotary: Rotary, patch_rotary: Rotary, chunk_size: int = CHUNK_SIZE
) -> Tensor:
    """Profiles of the patches alone, (B, N, C)."""
    qkv = _at_least_float32(qkv)
    patch_to_core = patch_probabilities(qkv[:, :, :2], core_rotary, patch_rotary)
    return _shares(attn, patch_to_core, qkv[:, : core_rotary.cos.shape[-2], 2], chunk_size)


def _shares(attn: Any, patch_to_core: Tensor, values: Tensor, chunk_size: int) -> Tensor:
    """Profiles (B, N, C) from probabilities (B, N, H·C) and the values of the cores (B, C, H, d)."""
    if type(attn.proj) is not nn.Linear:
        raise ArgumentError(
            f"contributions are made of the weights of the output projection, which is a {type(attn.proj).__name__} "
            "here and not a Linear; merge adapters into the model, or take it unquantised"
        )
    device = "cpu" if values.device.type == "mps" else values.device  # MPS has no float64
    attention = patch_to_core.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)  # (B, H, N, C)
    norms = contributions(
        attention.to(device), values.transpose(1, 2).to(device), attn.proj.weight.to(device), chunk_size
    )
    # A patch to which no core adds anything gets equal shares.
    norms = torch.where(norms.sum(-1, keepdim=True) == 0, 1.0, norms)
    return (norms / norms.sum(-1, keepdim=True)).to(values.device, values.dtype)


def _at_least_float32(qkv: Tensor) -> Tensor:
    """Rounded where the model rounds, then exact."""
    return qkv.to(torch.promote_types(qkv.dtype, torch.float32))
