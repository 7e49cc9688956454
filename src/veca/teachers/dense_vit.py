"""The dense DINOv3 ViT of the same size as a VECA, from timm: what its costs are compared with."""

from __future__ import annotations

from typing import Any

from torch import nn

from veca.config import VecaConfig, size_name
from veca.errors import needs_extra

DENSE_VITS = {f"veca_{size}": f"vit_{size}_patch16_dinov3" for size in ("small", "small_plus", "base", "large")}
"""timm's names of the dense ViTs that have the depth, width and heads of a named VECA."""


def create_dense_vit(config: VecaConfig, **options: Any) -> nn.Module:
    """A randomly initialised dense ViT with the depth, width and heads of `config`; `options` go to timm.

    Sizes that DINOv3 does not have are DINOv3's small ViT with another width, depth and number of heads.
    """
    with needs_extra("the dense ViT needs", "bench"):
        import timm
    name = DENSE_VITS.get(size_name(config) or "")
    if name is None:
        # The MLP is gated in small+ alone, as `dense_model_flops` counts it.
        name = DENSE_VITS["veca_small_plus" if config.mlp_dim == 4 * config.embed_dim else "veca_small"]
        options = {
            "embed_dim": config.embed_dim, "depth": config.depth, "num_heads": config.num_heads,
            "patch_size": config.patch_size, "in_chans": config.in_chans,
        } | options  # fmt: skip
    model: nn.Module = timm.create_model(name, num_classes=0, dynamic_img_size=True, **options)
    return model
