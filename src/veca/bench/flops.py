"""FLOPs of the dense DINOv3 ViT of the same size as a VECA, for one image; VECA's from `veca.flops`.

Symbols: N patches, D width, S = N + 5 tokens (one class token, four registers).
"""

from __future__ import annotations

from veca.config import VecaConfig
from veca.flops import attention_flops, attention_product_flops, embed_flops, model_flops, patches

__all__ = [
    "attention_flops",
    "attention_product_flops",
    "dense_attention_flops",
    "dense_model_flops",
    "model_flops",
]

DENSE_PREFIX = 5
"""Tokens of DINOv3 that are no patches."""


def dense_attention_flops(config: VecaConfig, height: int, width: int) -> int:
    """The attention path of one layer of the DINOv3 ViT that has the width of `config`.

    >>> dense_attention_flops(VecaConfig(), 1024, 1024)
    71016459264
    """
    dim, tokens = config.embed_dim, patches(config, height, width) + DENSE_PREFIX
    return 8 * tokens * dim**2 + 4 * dim * tokens**2


def dense_model_flops(config: VecaConfig, height: int, width: int) -> int:
    """The whole DINOv3 ViT of the size of `config`, from pixels to features.

    Its hidden layer is 4 D wide; it is gated in small+ alone, the one size whose hidden layer VECA makes 4 D wide too.
    """
    dim, tokens = config.embed_dim, patches(config, height, width) + DENSE_PREFIX
    products = 3 if config.mlp_dim == 4 * dim else 2
    layer = dense_attention_flops(config, height, width) + 8 * products * tokens * dim**2
    return embed_flops(config, height, width) + config.depth * layer
