"""Resize feature maps and images by matrix products: fast on GPUs, with deterministic gradients."""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Mode: TypeAlias = Literal["bilinear", "bicubic"]


def resize_maps(maps: Tensor, size: tuple[int, int], mode: Mode = "bilinear", antialias: bool = False) -> Tensor:
    """Compute `F.interpolate(maps, size, mode=mode, antialias=antialias)` for maps (..., h, w)."""
    (height, width), (rows, columns) = maps.shape[-2:], size
    if rows != height:
        maps = resize_matrix(height, rows, maps, mode, antialias) @ maps
    if columns != width:
        maps = maps @ resize_matrix(width, columns, maps, mode, antialias).mT
    return maps


def resize_matrix(before: int, after: int, like: Tensor, mode: Mode = "bilinear", antialias: bool = False) -> Tensor:
    """Return the matrix (after, before) that resizes one side, on the device and in the dtype of `like`.

    It is cached between calls, so it must not be written to.
    """
    # A tensor made while tracing must not outlive the trace (`torch.empty` shows fake tensors), so no cache there.
    tracing = torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor
    build = _resize_matrix.__wrapped__ if tracing else _resize_matrix
    return build(before, after, like.device, like.dtype, mode, antialias)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # a matrix made in inference mode could not be used by a later training step
def _resize_matrix(
    before: int, after: int, device: torch.device, dtype: torch.dtype, mode: Mode, antialias: bool
) -> Tensor:
    unit = torch.eye(before, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return F.interpolate(unit[None, None], (after, before), mode=mode, antialias=antialias)[0, 0].to(dtype)
