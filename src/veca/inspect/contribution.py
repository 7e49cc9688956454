"""What each core contributes to each patch: attention, values and output projection together (the paper's equation 5).

Attention alone misleads: a core may be looked at much and say little. The contribution of token j to token i is the
length of what j adds to i, c_ij = ‖Σ_h A^h_ij v^h_j W_O^h‖, and a patch's *profile* is its share from every core.

Shapes: B images, rows × columns = N patches, C active cores, S = C + N tokens (cores first), H heads, d width of a
head, D = H·d; Q tokens that receive, K tokens that give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from veca.attention import core_probabilities, patch_probabilities
from veca.errors import ArgumentError
from veca.inspect.maps import attention_to_patches, look_into, project
from veca.model import Veca, VecaOutput
from veca.rope import Rotary

PIECE = 2**20
"""About so many numbers of float64 at once: 8 MiB. A step holds a few such pieces."""


@torch.no_grad()
def core_profiles(
    model: Veca, images: Tensor, cores: int | None = None, layers: Sequence[int] = (-1,), piece: int = PIECE
) -> Tensor:
    """Each patch's profile over the active cores, in the blocks numbered `layers` (negative: from the end).

    Comes as (layers, B, rows, columns, C), float32 or better. The C shares of a patch sum to 1: it hears from nobody
    else. Memory is linear in N. The model is run as it stands: put it in eval mode first.

    >>> from veca import create_model
    >>> core_profiles(create_model("veca_tiny").eval(), torch.zeros(1, 3, 64, 96), cores=16, layers=(3, -1)).shape
    torch.Size([2, 1, 4, 6, 16])
    """

    def look(attn: Any, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> Tensor:
        return _profiles(attn, x, project(attn, x), core_rotary, patch_rotary, piece)

    found, out = look_into(model, images, cores, layers, look)
    return torch.stack(found).unflatten(2, out.grid)


class Inside(NamedTuple):
    """One forward pass, looked into."""

    output: VecaOutput
    maps: Tensor
    """(layers, B, C, rows, columns): what `core_maps` gives."""
    profiles: Tensor
    """(layers, B, rows, columns, C): what `core_profiles` gives."""


@torch.no_grad()
def look_inside(
    model: Veca, images: Tensor, cores: int | None = None, layers: Sequence[int] = (-1,), piece: int = PIECE
) -> Inside:
    """`core_maps` and `core_profiles` of one forward pass, and what came out of it."""

    def look(attn: Any, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> Tensor:
        qkv = project(attn, x)
        attention = attention_to_patches(qkv, core_rotary, patch_rotary).mean(1)
        return torch.stack([attention, _profiles(attn, x, qkv, core_rotary, patch_rotary, piece).mT])  # (2, B, C, N)

    found, out = look_into(model, images, cores, layers, look)
    maps, shares = torch.stack(found, dim=1)
    return Inside(out, maps.unflatten(-1, out.grid), shares.mT.unflatten(2, out.grid))


def contributions(attention: Tensor, values: Tensor, weight: Tensor, piece: int = PIECE) -> Tensor:
    """c_ij of every receiver and giver, (..., Q, K): not yet divided by its sum over j. Exact, float64.

    `attention` (..., H, Q, K), `values` (..., H, K, d), `weight` (D, H·d) of the output projection.
    """
    heads = attention.shape[-3]
    # ‖Σ_h a_h u_h‖² = aᵀ G a, where G holds the products of a giver's H vectors u_h = v^h W_O^h: H numbers for every
    # pair of tokens instead of D. G is float64, so what cancels in the sum leaves nothing visible.
    slices = weight.double().unflatten(1, (heads, -1)).permute(1, 2, 0)  # (H, d, D)
    # The givers of all images in one row, and receivers last: products of H × H with H × Q are quick, Q × H slow.
    givers = values.movedim(-3, 0).flatten(1, -2)  # (H, givers, d)
    shares = attention.movedim(-1, -3)  # (..., K, H, Q)
    rows = shares.reshape(-1, *shares.shape[-2:])
    lengths = []
    for some in _pieces(len(rows), heads * (weight.shape[0] + rows.shape[-1]), piece):
        vectors = (givers[:, some].double() @ slices).transpose(0, 1)  # (givers, H, D)
        share = rows[some].double()
        lengths.append(((vectors @ vectors.mT @ share) * share).sum(-2).clamp(min=0).sqrt())
    return torch.cat(lengths).reshape(*shares.shape[:-2], -1).mT


def attention_and_profiles(
    attn: Any, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary, piece: int = PIECE
) -> tuple[Tensor, Tensor]:
    """From the arguments of attention's forward pass: how each core attends, and each patch's profile.

    (B, C, S), the mean over heads, whose rows sum to 1, and (B, N, C).
    """
    qkv = project(attn, x)
    qkv = qkv.to(_better(x))  # rounded where the model rounds
    patch_to_core, core_to_all = core_probabilities(qkv[:, :, :2], core_rotary, patch_rotary)
    profiles = _shares(attn, patch_to_core, qkv[:, : core_rotary.cos.shape[-2], 2], piece)
    return core_to_all.unflatten(1, (attn.num_heads, -1)).mean(1), profiles


def _profiles(attn: Any, x: Tensor, qkv: Tensor, core_rotary: Rotary, patch_rotary: Rotary, piece: int) -> Tensor:
    """Each patch's profile alone, (B, N, C), from tokens `x` and their queries, keys and values."""
    qkv = qkv.to(_better(x))
    patch_to_core = patch_probabilities(qkv[:, :, :2], core_rotary, patch_rotary)
    return _shares(attn, patch_to_core, qkv[:, : core_rotary.cos.shape[-2], 2], piece)


def _shares(attn: Any, patch_to_core: Tensor, values: Tensor, piece: int) -> Tensor:
    """Profiles (B, N, C) from probabilities (B, N, H·C) and the values of the cores (B, C, H, d)."""
    if type(attn.proj) is not nn.Linear:
        raise ArgumentError(
            f"contributions are made of the weights of the output projection, which is a {type(attn.proj).__name__} "
            "here and not a Linear; merge adapters into the model, or take it unquantised"
        )
    where = "cpu" if values.device.type == "mps" else values.device  # which has no float64
    attention = patch_to_core.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)  # (B, H, N, C)
    lengths = contributions(
        attention.to(where), values.transpose(1, 2).to(where), attn.proj.weight.to(where), piece=piece
    )
    # Values of length 0 (a patch that hears nothing) give no shares; all cores alike is the honest answer.
    lengths = torch.where(lengths.sum(-1, keepdim=True) == 0, 1.0, lengths)
    return (lengths / lengths.sum(-1, keepdim=True)).to(values.device, values.dtype)


def _better(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _pieces(count: int, each: int, piece: int) -> list[slice]:
    """Slices that cover `count` things of `each` numbers, none of more than about `piece` numbers."""
    step = max(1, piece // max(1, each))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]
