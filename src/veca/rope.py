"""Where tokens are: coordinates of patches and cores, and the rotary angles made of them.

Coordinates are (x, y), x along the width, both in [-1, 1]. Shapes: N patches = rows × columns, d width of a head.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

BASE = 100.0
POOL_SIZE = 1000
POOL_RANGE = 0.95


class Rotary(NamedTuple):
    """The rotary table of some tokens, and what it is made of: a kernel may find it quicker to make it anew."""

    cos: Tensor
    """(..., d/2); entry j turns the pair (j, j + d/2) of a head's channels."""
    sin: Tensor
    coordinates: Tensor
    """(..., 2)"""
    frequencies: Tensor
    """(d/4): x times these are the first d/4 angles, y times these the others."""


def patch_coordinates(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Centres of the patches of a grid, row by row: (N, 2). Both axes span [-1, 1], square picture or not."""
    x = (torch.arange(columns, device=device, dtype=dtype) + 0.5) / columns * 2 - 1
    y = (torch.arange(rows, device=device, dtype=dtype) + 0.5) / rows * 2 - 1
    return torch.stack([x.expand(rows, columns), y[:, None].expand(rows, columns)], dim=-1).flatten(0, 1)


def augment(coordinates: Tensor, shift: float, rescale: float) -> Tensor:
    """One random shift per axis, then one random scale for both, the same for every patch of the batch."""
    offset = torch.empty_like(coordinates[:1]).uniform_(-shift, shift)
    log_scale = torch.empty_like(coordinates[:1, :1]).uniform_(-math.log(rescale), math.log(rescale))
    return (coordinates + offset) * log_scale.exp()


def rotary(coordinates: Tensor, head_dim: int, zero_fraction: float) -> Rotary:
    """The rotary table of tokens at `coordinates` (..., 2): d/4 angles for x, then d/4 for y."""
    count = head_dim // 4
    exponents = torch.arange(count, device=coordinates.device, dtype=coordinates.dtype) / count
    frequencies = 2 * math.pi / BASE**exponents
    # The slowest periods are switched off: an angle of 0 leaves those channels free of position.
    active = count - round(zero_fraction * count)
    frequencies = torch.where(torch.arange(count, device=coordinates.device) < active, frequencies, 0.0)
    angles = (coordinates[..., None] * frequencies).flatten(-2)
    return Rotary(angles.cos(), angles.sin(), coordinates, frequencies)


def rotate(x: Tensor, table: Rotary | tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys `x` (..., d). The arithmetic is the table's (float32 or better), the result x's."""
    cos, sin = table[:2]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(a * sin, b, cos)], dim=-1).to(x.dtype)


def grid_rotary(
    rows: int, columns: int, head_dim: int, zero_fraction: float, device: torch.device, dtype: torch.dtype
) -> Rotary:
    """The table of an un-augmented grid. It is the same for all layers and images, so it is kept between calls."""
    # A traced or fake table (what `torch.empty` gives there shows it) must not outlive its trace.
    if torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor:
        return rotary(patch_coordinates(rows, columns, device, dtype), head_dim, zero_fraction)
    return _kept_grid_rotary(rows, columns, head_dim, zero_fraction, device, dtype)


@functools.lru_cache(maxsize=8)
def _kept_grid_rotary(
    rows: int, columns: int, head_dim: int, zero_fraction: float, device: torch.device, dtype: torch.dtype
) -> Rotary:
    # A table born in inference mode could never be used by a later training step.
    with torch.inference_mode(False), torch.no_grad():
        return rotary(patch_coordinates(rows, columns, device, dtype), head_dim, zero_fraction)


def farthest_points(pool: Tensor, count: int) -> Tensor:
    """Indices of `count` well-spread points of `pool` (P, 2): every prefix of them covers the plane.

    The first is nearest the origin; each next one is farthest from its nearest chosen point (ties: lowest index).
    """
    chosen = [int(pool.square().sum(-1).argmin())]
    nearest = torch.full_like(pool[:, 0], math.inf)
    for _ in range(count - 1):
        nearest = torch.minimum(nearest, (pool - pool[chosen[-1]]).square().sum(-1))
        chosen.append(int((nearest == nearest.max()).nonzero()[0, 0]))
    return torch.tensor(chosen)


def initial_core_states(num_cores: int) -> Tensor:
    """Free coordinate states (M, 2) of a new bank: the cores start at tanh of these, spread over the picture."""
    pool = (torch.rand(POOL_SIZE, 2, device="cpu") * 2 - 1) * POOL_RANGE
    return pool[farthest_points(pool, num_cores)].atanh()
