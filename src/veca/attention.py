"""Core-periphery attention: the one function, its reference, and the choice between them.

Cores attend to every token, patches attend to the cores; there is no patch-to-patch term, so nothing of size N × N
is ever made and cost is linear in N.

Shapes: B images, C cores, N patches, S = C + N tokens (cores first), H heads, d width of a head, D = H·d.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from veca.rope import Rotary, rotate

Kernel: TypeAlias = Literal["auto", "sdpa", "reference"]

_kernel: Kernel = "auto"


def core_attention(qkv: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> Tensor:
    """Attention of the whole sequence, rotary embedding included: qkv (B, S, 3, H, d) → (B, S, D).

    `core_rotary` is per image, (B, 1, C, d/2) twice; `patch_rotary` is shared, (N, d/2) twice. C is read off it.
    """
    cores = core_rotary[0].shape[-2]
    qkv = qkv.permute(2, 0, 3, 1, 4)  # (3, B, H, S, d), a view
    v = qkv[2]
    q_core, k_core = rotate(qkv[:2, :, :, :cores], core_rotary)
    q_patch, k_patch = rotate(qkv[:2, :, :, cores:], patch_rotary)
    k_all = torch.cat([k_core, k_patch], dim=2)
    if _kernel == "reference":
        out = masked_attention(torch.cat([q_core, q_patch], dim=2), k_all, v, cores).transpose(1, 2)
    else:
        out_core = F.scaled_dot_product_attention(q_core, k_all, v)
        out_patch = F.scaled_dot_product_attention(q_patch, k_core, v[:, :, :cores])
        out = torch.cat([out_core.transpose(1, 2), out_patch.transpose(1, 2)], dim=1)
    return out.flatten(2)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, cores: int) -> Tensor:
    """The definition, S × S and slow: dense attention with every patch-to-patch logit at -inf. q, k, v (B, H, S, d)."""
    seq = q.shape[-2]
    patch = torch.arange(seq, device=q.device) >= cores
    logits = (q @ k.mT) / q.shape[-1] ** 0.5
    logits = logits.masked_fill(patch[:, None] & patch, -torch.inf)
    return logits.softmax(dim=-1) @ v


@contextmanager
def use_kernel(kernel: Kernel) -> Iterator[None]:
    """Choose how attention is computed while the block runs. "auto" takes the fastest that fits the inputs.

    >>> with use_kernel("reference"):
    ...     pass
    """
    if kernel not in get_args(Kernel):
        raise ValueError(f"kernel {kernel!r} is unknown; choose one of {', '.join(get_args(Kernel))}")
    global _kernel
    before, _kernel = _kernel, kernel
    try:
        yield
    finally:
        _kernel = before
