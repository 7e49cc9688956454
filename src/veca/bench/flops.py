"""FLOPs of one image, 2 per multiply-add, matrix products only."""

from __future__ import annotations

from veca.config import VecaConfig


def attention_flops(config: VecaConfig, height: int, width: int, cores: int) -> int:
    """The attention path of one layer: q, k, v and output projections, and the attention products.

    >>> attention_flops(VecaConfig(), 1024, 1024, cores=64)
    21252538368
    """
    dim, patches = config.embed_dim, _patches(config, height, width)
    return 8 * (cores + patches) * dim**2 + 8 * dim * cores * patches + 4 * dim * cores**2


def model_flops(config: VecaConfig, height: int, width: int, cores: int) -> int:
    """The whole model, from pixels to features."""
    dim, patches = config.embed_dim, _patches(config, height, width)
    tokens = cores + patches
    embed = 2 * patches * config.in_chans * config.patch_size**2 * dim
    layer = attention_flops(config, height, width, cores) + 6 * tokens * dim * config.mlp_dim
    coordinates = 4 * cores * dim * (config.depth - 1)
    output = 2 * tokens * dim * (config.output_dim or 0) + 2 * config.num_features * config.num_classes
    return embed + config.depth * layer + coordinates + output


def _patches(config: VecaConfig, height: int, width: int) -> int:
    return (height // config.patch_size) * (width // config.patch_size)
