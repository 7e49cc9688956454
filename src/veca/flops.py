"""FLOPs per image of VECA and of the dense DINOv3 ViT of the same size.

Matrix products only, 2 FLOPs per multiply-add. Symbols: N patches, C cores, D width; S tokens: C + N in VECA, N + 5 in
DINOv3 (one class token, four registers).
"""

from veca.config import VecaConfig

DENSE_PREFIX = 5
"""Tokens of DINOv3 that are not patches."""


def attention_flops(config: VecaConfig, height: int, width: int, cores: int) -> int:
    """One attention layer: q, k, v and output projections, and the attention products.

    >>> attention_flops(VecaConfig(), 1024, 1024, cores=64)
    21252538368
    """
    tokens = cores + num_patches(config, height, width)
    return 8 * tokens * config.embed_dim**2 + attention_product_flops(config, height, width, cores)


def attention_product_flops(config: VecaConfig, height: int, width: int, cores: int) -> int:
    """The attention products of one layer: cores with every token, patches with the cores."""
    return 4 * config.embed_dim * cores * (2 * num_patches(config, height, width) + cores)


def model_flops(config: VecaConfig, height: int, width: int, cores: int, mlp_width: float = 1.0) -> int:
    """The whole model, from pixels to features; `mlp_width` is the share of the MLP's channels that patches use.

    >>> whole, narrow = (model_flops(VecaConfig(), 1024, 1024, 8, mlp_width=width) for width in (1, 0.25))
    >>> round(narrow / whole, 2)
    0.51
    """
    dim, patches = config.embed_dim, num_patches(config, height, width)
    tokens, hidden = cores + patches, cores * config.mlp_dim + patches * config.hidden_width(mlp_width)
    layer = attention_flops(config, height, width, cores) + 6 * dim * hidden
    coordinates = 4 * cores * dim * (config.depth - 1)
    output = 2 * tokens * dim * (config.output_dim or 0) + 2 * config.num_features * config.num_classes
    return patch_embed_flops(config, height, width) + config.depth * layer + coordinates + output


def patch_embed_flops(config: VecaConfig, height: int, width: int) -> int:
    return 2 * num_patches(config, height, width) * config.in_chans * config.patch_size**2 * config.embed_dim


def num_patches(config: VecaConfig, height: int, width: int) -> int:
    return (height // config.patch_size) * (width // config.patch_size)


def dense_attention_flops(config: VecaConfig, height: int, width: int) -> int:
    """One attention layer of the DINOv3 ViT that is as wide as `config`.

    >>> dense_attention_flops(VecaConfig(), 1024, 1024)
    71016459264
    """
    dim, tokens = config.embed_dim, num_patches(config, height, width) + DENSE_PREFIX
    return 8 * tokens * dim**2 + 4 * dim * tokens**2


def dense_model_flops(config: VecaConfig, height: int, width: int) -> int:
    """The whole DINOv3 ViT of the size of `config`, from pixels to features.

    Its MLP is 4 D wide, and gated in small+ only, the one size in which VECA's MLP is 4 D wide too.
    """
    dim, tokens = config.embed_dim, num_patches(config, height, width) + DENSE_PREFIX
    products = 3 if config.mlp_dim == 4 * dim else 2
    layer = dense_attention_flops(config, height, width) + 8 * products * tokens * dim**2
    return patch_embed_flops(config, height, width) + config.depth * layer
