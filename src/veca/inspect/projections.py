"""Features as colours: principal components, a colour map, and pictures made of them."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_INFERNO = "000004 160b39 420a68 6a176e 932667 bc3754 dd513a f37819 fca50a f6d746 fcffa4"
_ANCHORS = np.array([list(bytes.fromhex(colour)) for colour in _INFERNO.split()]) / 255


def pca(features: Tensor, components: int = 3) -> Tensor:
    """The first principal components of `features` (..., D), each in [0, 1]: (..., components), float32.

    All leading dimensions are fitted together, so feature maps stacked into one tensor share their colours. The 1st
    and 99th percentile of a component become 0 and 1 and what lies beyond is clipped. The sign makes the largest
    loading positive. A component in which nothing varies beyond rounding is 0.5 everywhere.

    >>> pca(torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]), components=2).round(decimals=3)
    tensor([[0.0000, 0.5000],
            [0.5000, 0.5000],
            [1.0000, 0.5000]])
    """
    width = features.shape[-1] if features.ndim else 0
    if not 1 <= components <= width:
        raise ValueError(f"components={components}; features {tuple(features.shape)} have from 1 to {width}")
    if not features.numel() or not features.is_floating_point() or not features.isfinite().all():
        raise ValueError(
            f"features {tuple(features.shape)} of {features.dtype} must be finite, floating point, not empty"
        )
    x = features.detach().to("cpu", torch.float64).flatten(0, -2)
    size = x.square().mean(0)
    x = x - x.mean(0)
    variances, directions = torch.linalg.eigh(x.mT @ x / len(x))
    variances, directions = variances.flip(0)[:components], directions.flip(1)[:, :components]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    directions = directions * largest.sign()

    # The noise that rounding puts along each direction: of the features as they came, and of the decomposition here.
    rounding = torch.finfo(features.dtype).eps ** 2 * (directions.square().mT @ size)
    floor = rounding.clamp(min=width * torch.finfo(torch.float64).eps * float(variances[0]))
    scaled = _spread((x @ directions).numpy())
    scaled[:, (variances <= floor).numpy()] = 0.5
    return torch.from_numpy(scaled).float().reshape(*features.shape[:-1], components).to(features.device)


def _spread(columns: np.ndarray) -> np.ndarray:
    """Each column between its 1st and 99th percentile, clipped; between its ends where those two coincide."""
    low, high = np.quantile(columns, (0.01, 0.99), axis=0)
    flat = high <= low
    low, high = np.where(flat, columns.min(0), low), np.where(flat, columns.max(0), high)
    return np.asarray(np.clip((columns - low) / np.where(high > low, high - low, 1.0), 0.0, 1.0))


def heat(values: Tensor) -> Tensor:
    """Colours (..., 3) of values in [0, 1], from black over red to pale yellow; safe for colour-blind eyes.

    >>> heat(torch.tensor([0.0, 1.0]))
    tensor([[0.0000, 0.0000, 0.0157],
            [0.9882, 1.0000, 0.6431]])
    """
    at = np.linspace(0, 1, len(_ANCHORS))
    level = values.detach().float().cpu().numpy()
    colours = np.stack([np.interp(level, at, channel) for channel in _ANCHORS.T], axis=-1)
    return torch.from_numpy(colours).float().to(values.device)


def to_rgb(values: Tensor, size: tuple[int, int] | None = None, smooth: bool = False) -> Image.Image:
    """The picture of a map of values in [0, 1]: (rows, columns, 3) as colours, (rows, columns) through `heat`.

    `size` (width, height) scales it, one square per value, or smoothly.

    >>> to_rgb(torch.rand(4, 6, 3), size=(96, 64)).size
    (96, 64)
    """
    if values.ndim == 2:
        values = heat(values)
    if values.ndim != 3 or values.shape[-1] != 3:
        raise ValueError(f"a map is (rows, columns, 3) or (rows, columns), not {tuple(values.shape)}")
    levels = (values.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    picture = Image.fromarray(levels.numpy())
    return picture.resize(size, Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST) if size else picture
