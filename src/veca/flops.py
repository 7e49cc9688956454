"""FLOPs of one image, 2 per multiply-add, matrix products only.

Symbols: N patches, C cores, D width, S = C + N tokens.
"""

from __future__ import annotations

from veca.config import VecaConfig


def attention_flops(config: VecaConfig, height: int, width: int, cores: int) -> int:
    """The attention path of one layer: q, k, v and output projections, and the attention products.

    >>> attention_flops(VecaConfig(), 1024, 1024, cores=64)
    21252538368
    """
    tokens = cores + patches(config, height, width)
    return 8 * tokens * config.embed_dim**2 + attention_product_flops(config, height, width, cores)


def attention_product_flops(config: VecaConfig, height: int, width: int, cores: int) -> int:
    """The attention products of one layer alone: cores with every token, patches with the cores."""
    return 4 * config.embed_dim * cores * (2 * patches(config, height, width) + cores)


def model_flops(config: VecaConfig, height: int, width: int, cores: int) -> int:
    """The whole model, from pixels to features."""
    dim, tokens = config.embed_dim, cores + patches(config, height, width)
    layer = attention_flops(config, height, width, cores) + 6 * tokens * dim * config.mlp_dim
    coordinates = 4 * cores * dim * (config.depth - 1)
    output = 2 * tokens * dim * (config.output_dim or 0) + 2 * config.num_features * config.num_classes
    return embed_flops(config, height, width) + config.depth * layer + coordinates + output


def embed_flops(config: VecaConfig, height: int, width: int) -> int:
    return 2 * patches(config, height, width) * config.in_chans * config.patch_size**2 * config.embed_dim


def patches(config: VecaConfig, height: int, width: int) -> int:
    return (height // config.patch_size) * (width // config.patch_size)
