"""Image tensors: conversion from Pillow, ImageNet normalisation, sides made multiples of the patch size."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from veca.errors import ArgumentError
from veca.images.fit import PATCH, check_rgb
from veca.inputs import nearest_sizes

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


def to_tensor(image: Image.Image) -> Tensor:
    """Convert an RGB image to a uint8 tensor (3, H, W)."""
    check_rgb(image)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def normalize(x: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """Normalise a tensor (..., 3, H, W), uint8 or float in [0, 1], to float32, by default as ImageNet models expect.

    >>> normalize(torch.full((3, 16, 16), 0.485))[0, 0, 0]
    tensor(0.)
    """
    _check_tensor(x, x.is_floating_point() or x.dtype == torch.uint8, "uint8 or float in [0, 1]")
    # Only on the CPU, where reading the maximum costs no synchronisation. Resizing may overshoot 1 a little.
    readable = x.is_floating_point() and x.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and x.numel() and (top := float(x.detach().max())) > 2:
        raise ArgumentError(f"tensor has values up to {top:g}; floats must lie in [0, 1]. Divide by 255, or pass uint8")
    unit = x.float() if x.is_floating_point() else x.float() / 255
    # A tensor made while tracing must not outlive the trace (`torch.empty` shows fake tensors), so no cache there.
    tracing = torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor
    channels = _channel_constants.__wrapped__ if tracing else _channel_constants
    mean_tensor, std_tensor = channels(tuple(mean), tuple(std), x.device)
    return (unit - mean_tensor) / std_tensor


@functools.lru_cache(maxsize=16)  # copying constants to a GPU would wait for it at every batch
@torch.inference_mode(False)  # a tensor made in inference mode could not be used for gradients later
def _channel_constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    mean_tensor, std_tensor = (torch.tensor(values, device=device).view(3, 1, 1) for values in (mean, std))
    return mean_tensor, std_tensor


def resize_to_multiple(x: Tensor, patch: int = PATCH) -> Tensor:
    """Resize a float tensor (..., 3, H, W) to the nearest multiples (bicubic, antialiased).

    As with any bicubic resize, values may overshoot a little at hard edges.
    """
    _check_tensor(x, x.is_floating_point(), "floating point")
    rows, columns = nearest_sizes(x.shape[-2], x.shape[-1], patch)
    if (rows, columns) == x.shape[-2:]:
        return x
    resized = F.interpolate(x.reshape(-1, *x.shape[-3:]), (rows, columns), mode="bicubic", antialias=True)
    return resized.reshape(*x.shape[:-2], rows, columns)


def pad_to_multiple(x: Tensor, patch: int = PATCH) -> Tensor:
    """Repeat the last column and row of a float tensor (..., 3, H, W) up to the next multiples.

    What this changes for the model is described under "pad" in `fit_image`.
    """
    _check_tensor(x, x.is_floating_point(), "floating point")
    for dim in (-2, -1):
        side = x.shape[dim]
        if side % patch:
            index = torch.arange(side + -side % patch, device=x.device)
            x = x.index_select(dim, index.clamp(max=side - 1))
    return x


def _check_tensor(x: Tensor, dtype_fits: bool, dtypes: str) -> None:
    if x.ndim < 3 or x.shape[-3] != 3:
        raise ArgumentError(f"tensor has shape {tuple(x.shape)}; it must be (..., 3, H, W)")
    if not dtype_fits:
        raise ArgumentError(f"tensor is {x.dtype}; it must be {dtypes}")
