"""What is known of some teachers without loading them, for plans."""

from __future__ import annotations

from typing import Any


def _vit(width: int, parameters: int, depth: int = 12, stride: int = 16) -> dict[str, Any]:
    return {"width": width, "stride": stride, "parameters": parameters, "depth": depth}


KNOWN: dict[str, dict[str, Any]] = {
    "facebook/dinov3-vits16-pretrain-lvd1689m": _vit(384, 21_596_544),
    "facebook/dinov3-vits16plus-pretrain-lvd1689m": _vit(384, 28_692_864),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": _vit(768, 85_660_416),
    "facebook/dinov3-vitl16-pretrain-lvd1689m": _vit(1024, 303_129_600, depth=24),
    # A CNN's work goes by the pixels it sees.
    "efficientnet-lite2": {
        "width": 1280,
        "stride": 32,
        "parameters": 4_782_024,
        "flops_per_pixel": 22_928,
        "pooled": True,
    },
}
"""As `veca.train.plan.RunPlan` takes them."""
