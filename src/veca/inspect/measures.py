"""The arithmetic of `story`: what is measured of maps, and sums over pictures that come in batches.

Shapes: B pictures, N patches, C active cores, D width. Maps are (..., C, N) and sum to 1 over N.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def as_maps(attention: Tensor) -> Tensor:
    """Attention over the patches (..., N), divided by its sum; where there is none, even."""
    total = attention.sum(-1, keepdim=True)
    return torch.where(total > 0, attention / total, 1 / attention.shape[-1])


def overlap(a: Tensor, b: Tensor | float) -> Tensor:
    """Σᵢ min(aᵢ, bᵢ) over the last axis: 1 where both maps are the same, 0 where they have nothing in common."""
    return torch.minimum(a, torch.as_tensor(b, dtype=a.dtype, device=a.device)).sum(-1)


def pair_overlap(maps: Tensor) -> Tensor:
    """The mean overlap of all pairs of cores, (...); of one core nan.

    >>> pair_overlap(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]])).item()
    0.5
    """
    cores = maps.shape[-2]
    # Σ min(a, b) = 1 − Σ |a − b| / 2, as both sum to 1: nothing of size C × C × N is made.
    distances = torch.cdist(maps, maps, p=1.0).sum((-2, -1))
    return 1 - distances / (2 * cores * (cores - 1)) if cores > 1 else torch.full_like(distances, math.nan)


def effective_area(maps: Tensor) -> Tensor:
    """exp(entropy) / N of each map, (..., C): 1 if it is even, k / N if it is even over k patches and 0 elsewhere."""
    return torch.special.entr(maps).sum(-1).exp() / maps.shape[-1]


def winners(maps: Tensor) -> Tensor:
    """The share of cores whose map is the greatest of all at some patch, (...)."""
    return maps.new_zeros(maps.shape[:-1]).scatter_(-1, maps.argmax(-2), 1.0).mean(-1)


class Moments:
    """Mean and variance of values (B, ...) over pictures, in float64; the variance is divided by their number."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        values = values.cpu().double()
        if not len(values):
            self._mean, self._squares = (each.expand(values.shape[1:]) for each in (self._mean, self._squares))
            return
        mean, total = values.mean(0), self.count + len(values)
        away, weight = mean - self._mean, self.count * len(values) / total
        self._squares = self._squares + (values - mean).square().sum(0) + weight * away.square()
        self._mean, self.count = self._mean + away * (len(values) / total), total

    @property
    def mean(self) -> Tensor:
        return self._mean if self.count else self._mean + math.nan

    @property
    def variance(self) -> Tensor:
        return self._squares / self.count if self.count else self._squares + math.nan


class Alignment:
    """Linear centred kernel alignment of features x and y, (B, D) each: 1 if one is the other turned and scaled.

    Products of channels are kept and not pictures: memory is D².
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._products = torch.zeros((), dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        if not len(x):
            return
        both, total = torch.stack([x, y]).cpu().double(), self.count + len(x)
        mean = both.mean(1, keepdim=True)  # (2, 1, D)
        centred, away, weight = both - mean, mean - self._mean, self.count * len(x) / total
        left, right = [0, 1, 0], [0, 1, 1]  # xx, yy, xy
        self._products = self._products + centred[left].mT @ centred[right] + weight * away[left].mT @ away[right]
        self._mean, self.count = self._mean + away * (len(x) / total), total

    @property
    def value(self) -> float:
        """Nan of fewer than two pictures, and where features do not vary."""
        if self.count < 2:
            return math.nan
        xx, yy, xy = (float(product.norm()) for product in self._products)
        return xy**2 / (xx * yy) if xx * yy else math.nan
