"""Measures of attention maps, and running statistics over images that come in batches.

Shapes: B images, N patches, C active cores, D width. Maps are (..., C, N) and sum to 1 over N.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def as_maps(attention: Tensor) -> Tensor:
    """Attention over the patches (..., N), divided by its sum; uniform where the sum is 0."""
    total = attention.sum(-1, keepdim=True)
    return torch.where(total > 0, attention / total, 1 / attention.shape[-1])


def overlap(a: Tensor, b: Tensor | float) -> Tensor:
    """Σᵢ min(aᵢ, bᵢ) over the last axis: 1 where both maps are the same, 0 where they have nothing in common."""
    return torch.clamp(a, max=b).sum(-1)


def pair_overlap(maps: Tensor) -> Tensor:
    """The mean overlap of all pairs of cores, (...); nan for a single core.

    >>> pair_overlap(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]])).item()
    0.5
    """
    cores = maps.shape[-2]
    # Σ min(a, b) = 1 − Σ |a − b| / 2, as both sum to 1: avoids a tensor of size C × C × N.
    distances = torch.cdist(maps, maps, p=1.0).sum((-2, -1))
    return 1 - distances / (2 * cores * (cores - 1)) if cores > 1 else torch.full_like(distances, math.nan)


def effective_area(maps: Tensor) -> Tensor:
    """exp(entropy) / N of each map, (..., C): 1 if it is uniform, k / N if uniform over k patches and 0 elsewhere."""
    return torch.special.entr(maps).sum(-1).exp() / maps.shape[-1]


def winners(maps: Tensor) -> Tensor:
    """The share of cores whose map is the largest of all at some patch, (...)."""
    return maps.new_zeros(maps.shape[:-1]).scatter_(-1, maps.argmax(-2), 1.0).mean(-1)


def to_float64(values: Tensor) -> Tensor:
    """On the same device, so that nothing synchronises; on the CPU where the device (MPS) has no float64."""
    return values.to("cpu" if values.device.type == "mps" else values.device, torch.float64)


class Moments:
    """Running mean and population variance of values (B, ...) over images, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        values = to_float64(values)
        if not len(values):
            # Takes over the shape, so that mean and variance have it even if no image follows.
            self._mean, self._squares = (each + values.sum(0) for each in (self._mean, self._squares))
            return
        # Chan's parallel update: combine the moments so far with those of the batch.
        mean, total = values.mean(0), self.count + len(values)
        delta, weight = mean - self._mean, self.count * len(values) / total
        self._squares = self._squares + (values - mean).square().sum(0) + weight * delta.square()
        self._mean, self.count = self._mean + delta * (len(values) / total), total

    @property
    def mean(self) -> Tensor:
        return (self._mean if self.count else self._mean + math.nan).cpu()

    @property
    def variance(self) -> Tensor:
        return (self._squares / self.count if self.count else self._squares + math.nan).cpu()


class Alignment:
    """Running linear centred kernel alignment (CKA) of features x and y, (B, D) each.

    It is 1 if one is the other rotated and scaled. Kept are products of channels, not of images: memory is D².
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean = torch.zeros((), dtype=torch.float64)
        self._products: Tensor | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        if not len(x):
            return
        both, count = to_float64(torch.stack([x, y])), self.count + len(x)
        mean = both.mean(1, keepdim=True)  # (2, 1, D)
        delta = mean - self._mean
        self._mean = self._mean + delta * (len(x) / count)
        # The shift of the mean enters like one more image.
        x, y = torch.cat([both - mean, math.sqrt(self.count * len(x) / count) * delta], dim=1)
        left, right = torch.stack([x, y, x]).mT, torch.stack([x, y, y])
        self._products = left @ right if self._products is None else self._products.baddbmm_(left, right)
        self.count = count

    @property
    def value(self) -> float:
        """Nan for fewer than two images, and where features do not vary."""
        if self._products is None or self.count < 2:
            return math.nan
        xx, yy, xy = (float(product.norm()) for product in self._products)
        return xy**2 / (xx * yy) if xx * yy else math.nan
