"""Maps and pictures resized by matrix products: a GPU does these sooner, and their gradients are alike in every run."""

from __future__ import annotations

import functools
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
    """The matrix (after, before) that resizes one side, kept between calls: not to be written to."""
    # A traced or fake matrix (what `torch.empty` gives there shows it) must not outlive its trace.
    passing = torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor
    return (_filters.__wrapped__ if passing else _filters)(before, after, like.device, like.dtype, mode, antialias)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # a matrix born in inference mode could never be used by a later training step
def _filters(before: int, after: int, device: torch.device, dtype: torch.dtype, mode: Mode, antialias: bool) -> Tensor:
    unit = torch.eye(before, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return F.interpolate(unit[None, None], (after, before), mode=mode, antialias=antialias)[0, 0].to(dtype)
