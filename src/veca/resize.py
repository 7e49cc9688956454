"""Maps and pictures resized by matrix products: a GPU does these sooner, and their gradients are alike in every run."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Mode: TypeAlias = Literal["bilinear", "bicubic"]


def resized(maps: Tensor, size: tuple[int, int], mode: Mode = "bilinear", antialias: bool = False) -> Tensor:
    """`F.interpolate(maps, size, mode=mode, antialias=antialias)` of maps (..., h, w)."""
    (height, width), (rows, columns) = maps.shape[-2:], size
    if rows != height:
        maps = filters(height, rows, maps, mode, antialias) @ maps
    if columns != width:
        maps = maps @ filters(width, columns, maps, mode, antialias).mT
    return maps


def filters(before: int, after: int, like: Tensor, mode: Mode = "bilinear", antialias: bool = False) -> Tensor:
    """The matrix (after, before) that resizes one side."""
    unit = torch.eye(before, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    return F.interpolate(unit[None, None], (after, before), mode=mode, antialias=antialias)[0, 0].to(like.dtype)
