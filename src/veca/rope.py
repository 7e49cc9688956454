"""Coordinates of patches and cores, and the rotary position embedding made from them.

Coordinates are (x, y), x along the width, both in [-1, 1]. Shapes: N patches = rows × columns, d width of a head.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

BASE = 100.0
"""Of the rotary periods, which run from 1 to BASE in coordinates."""
POOL_SIZE = 1000
POOL_RANGE = 0.95
"""Initial core coordinates are chosen among POOL_SIZE random points in [-POOL_RANGE, POOL_RANGE]²."""


class Rotary(NamedTuple):
    """The rotary table of some tokens, and what it is computed from: kernels recompute it instead of loading it."""

    cos: Tensor
    """(..., d/2); entry j rotates the pair (j, j + d/2) of a head's channels."""
    sin: Tensor
    coordinates: Tensor
    """(..., 2)"""
    frequencies: Tensor
    """(d/4): x times these are the first d/4 angles, y times these the last d/4."""


def patch_coordinates(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Centres of the patches of a grid, row by row: (N, 2). Both axes span [-1, 1], square image or not."""
    x = (torch.arange(columns, device=device, dtype=dtype) + 0.5) / columns * 2 - 1
    y = (torch.arange(rows, device=device, dtype=dtype) + 0.5) / rows * 2 - 1
    return torch.stack([x.expand(rows, columns), y[:, None].expand(rows, columns)], dim=-1).flatten(0, 1)


def packed_coordinates(shapes: Tensor, total: int) -> Tensor:
    """`patch_coordinates` of many grids (images, 2), of ΣN = `total` patches: (ΣN, 2), by as many calls as for one."""
    counts = shapes.prod(dim=1)
    image = torch.repeat_interleave(counts, output_size=total)
    place = torch.arange(total, device=shapes.device) - (counts.cumsum(0) - counts)[image]
    rows, columns = shapes[image].unbind(dim=1)
    x, y = ((index + 0.5) / size * 2 - 1 for index, size in ((place % columns, columns), (place // columns, rows)))
    return torch.stack([x, y], dim=-1)


def augment_coordinates(coordinates: Tensor, shift: float, rescale: float) -> Tensor:
    """Training augmentation: a random shift per axis, then a random scale, the same for every patch of the batch."""
    offset = torch.empty_like(coordinates[:1]).uniform_(-shift, shift)
    log_scale = torch.empty_like(coordinates[:1, :1]).uniform_(-math.log(rescale), math.log(rescale))
    return (coordinates + offset) * log_scale.exp()


def make_rotary(coordinates: Tensor, head_dim: int, zero_fraction: float) -> Rotary:
    """The rotary table of tokens at `coordinates` (..., 2): d/4 angles for x, then d/4 for y."""
    count = head_dim // 4
    exponents = torch.arange(count, device=coordinates.device, dtype=coordinates.dtype) / count
    frequencies = 2 * math.pi / BASE**exponents
    # The slowest frequencies are set to 0: their channels carry no position.
    active = count - round(zero_fraction * count)
    frequencies = torch.where(torch.arange(count, device=coordinates.device) < active, frequencies, 0.0)
    angles = (coordinates[..., None] * frequencies).flatten(-2)
    return Rotary(angles.cos(), angles.sin(), coordinates, frequencies)


def rotate(x: Tensor, table: Rotary | tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys `x` (..., d), in the dtype of the table (float32 or better); the result has that of x."""
    cos, sin = table[:2]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(a * sin, b, cos)], dim=-1).to(x.dtype)


def grid_rotary(
    rows: int, columns: int, head_dim: int, zero_fraction: float, device: torch.device, dtype: torch.dtype
) -> Rotary:
    """The table of an un-augmented grid, cached between calls: it is the same for all layers and images."""
    # A traced or fake tensor, which `torch.empty` then returns, must not be cached beyond its trace.
    if torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor:
        return make_rotary(patch_coordinates(rows, columns, device, dtype), head_dim, zero_fraction)
    return _cached_grid_rotary(rows, columns, head_dim, zero_fraction, device, dtype)


@functools.lru_cache(maxsize=8)
def _cached_grid_rotary(
    rows: int, columns: int, head_dim: int, zero_fraction: float, device: torch.device, dtype: torch.dtype
) -> Rotary:
    # A tensor created in inference mode could not be used by a later training step.
    with torch.inference_mode(False), torch.no_grad():
        return make_rotary(patch_coordinates(rows, columns, device, dtype), head_dim, zero_fraction)


def farthest_points(pool: Tensor, count: int) -> Tensor:
    """Farthest-point sampling: indices of `count` points of `pool` (P, 2) of which every prefix is well spread.

    The first is nearest the origin; each next one is farthest from its nearest chosen point (ties: lowest index).
    """
    chosen = [int(pool.square().sum(-1).argmin())]
    nearest = torch.full_like(pool[:, 0], math.inf)
    for _ in range(count - 1):
        nearest = torch.minimum(nearest, (pool - pool[chosen[-1]]).square().sum(-1))
        chosen.append(int((nearest == nearest.max()).nonzero()[0, 0]))
    return torch.tensor(chosen)


def initial_core_states(num_cores: int) -> Tensor:
    """Free coordinates (num_cores, 2) of a new bank; tanh of them is spread over the image, for every budget."""
    pool = (torch.rand(POOL_SIZE, 2, device="cpu") * 2 - 1) * POOL_RANGE
    return pool[farthest_points(pool, num_cores)].atanh()
