"""All that the page shows of one picture, model, budget and resolution, from one forward pass.

Maps travel as safetensors of bytes: a value is shown as one of 256 colours anyway. Shapes: rows × columns = N patches,
C active cores, D width, L layers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from veca.images import normalize, to_tensor
from veca.inspect import look_inside, pca
from veca.inspect.subject import check_finite, looking
from veca.model import Veca
from veca.web.images import Picture

REFERENCE = 256
"""Pixels of the short side at which colours are fitted, with all cores: so they compare whatever is chosen."""


class Analysis(NamedTuple):
    about: dict[str, Any]
    """What was looked at, in words and numbers."""
    cls: NDArray[np.float32]
    """(D)"""
    cores: NDArray[np.float32]
    """(C, D)"""
    patches: NDArray[np.float32]
    """(rows, columns, D)"""
    colours: NDArray[np.uint8]
    """(rows, columns, 3)"""
    places: NDArray[np.float32]
    """(L, C, 2): the (x, y) in [-1, 1] of each core."""
    maps: NDArray[np.uint8]
    """(L, C, rows, columns): attention of each core between its least and its most."""
    ranges: NDArray[np.float32]
    """(L, C, 3): its least, what became 255, and its most over its mean."""
    profiles: NDArray[np.uint8]
    """(L, rows, columns, C): the share of each core in what a patch hears, as parts of its largest."""
    shares: NDArray[np.float32]
    """(L, rows, columns): that largest."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self[1:])


def input_of(model: Veca, picture: Picture, size: int) -> Tensor:
    return normalize(to_tensor(picture.at(size)))[None].to(model.norm.weight.device)


def reference(model: Veca, picture: Picture) -> Tensor:
    """The features colours are fitted to: (N, D). `NonFiniteError` where they are not finite."""
    with looking(model):
        patches: Tensor = model(input_of(model, picture, REFERENCE)).patches[0].float().cpu()
        check_finite(model, patches)
    return patches


def analyse(model: Veca, picture: Picture, cores: int, size: int, like: Tensor, about: dict[str, Any]) -> Analysis:
    """One forward pass, looked into at every layer. `NonFiniteError` where anything in it is not finite."""
    with looking(model):
        inside = look_inside(model, input_of(model, picture, size), cores, range(len(model.blocks)))
        out = inside.output
        check_finite(model, out.cls, out.cores, out.patches, out.coordinates, inside.maps, inside.profiles)
    patches = out.patches[0].float().cpu().unflatten(0, out.grid)
    colours = (pca(patches, like=like) * 255).round().to(torch.uint8)
    maps, ranges = _levels(inside.maps[:, 0].float().cpu())
    profiles = inside.profiles[:, 0].float().cpu()
    shares = profiles.amax(-1)
    parts = (profiles / shares[..., None] * 255).round().to(torch.uint8)
    rows, columns = out.grid
    return Analysis(
        {**about, "rows": rows, "columns": columns},
        *(
            part.contiguous().numpy()
            for part in (
                out.cls[0].float().cpu(), out.cores[0].float().cpu(), patches, colours,
                out.coordinates[:, 0].float().cpu(), maps, ranges, parts, shares,
            )
        ),
    )  # fmt: skip


def _levels(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Maps (L, C, rows, columns) as bytes, and their ranges."""
    flat = maps.flatten(2)
    least, peak = flat.amin(-1), flat.amax(-1)
    # As in `veca figure cores`: the top percent may saturate, or one bright patch would leave the rest in the dark.
    most = torch.maximum(flat.quantile(0.99, dim=-1), peak / 4)
    levels = (flat - least[..., None]) / (most - least).clamp(min=1e-12)[..., None]
    ranges = torch.stack([least, most, peak / flat.mean(-1).clamp(min=1e-12)], dim=-1)
    return (levels.clamp(0, 1) * 255).round().to(torch.uint8).reshape(maps.shape), ranges


def view(found: Analysis) -> bytes:
    """What the page needs at every layer, as safetensors: `features` of bytes, whose cosines are those of the patches.

    Each patch is scaled by itself, which no cosine sees.
    """
    largest = np.abs(found.patches).max(-1, keepdims=True)
    features = np.rint(found.patches / np.maximum(largest, 1e-12) * 127).astype(np.int8)
    parts = {"colours": found.colours, "features": features, "places": found.places}
    return _pack(parts, found.about)


def layer(found: Analysis, number: int) -> bytes:
    """What the page needs of one layer (counted from 1), as safetensors."""
    at = number - 1
    parts = {
        "maps": found.maps[at], "ranges": found.ranges[at], "profiles": found.profiles[at], "shares": found.shares[at]
    }  # fmt: skip
    return _pack(parts, {**found.about, "layer": number})


def features(found: Analysis, form: Literal["npz", "safetensors"]) -> bytes:
    """The features themselves, float32, as a file."""
    parts = {"cls": found.cls, "cores": found.cores, "patches": found.patches, "coordinates": found.places}
    if form == "safetensors":
        return _pack(parts, found.about)
    data = io.BytesIO()
    np.savez(data, **parts, veca=np.array(json.dumps(found.about, allow_nan=False)))  # type: ignore[arg-type]
    return data.getvalue()


def _pack(parts: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> bytes:
    whole = {name: np.ascontiguousarray(part) for name, part in parts.items()}
    return save(whole, {"veca": json.dumps(about, allow_nan=False)})
