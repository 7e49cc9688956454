"""Everything the page shows of one image at one budget and resolution, from one forward pass.

Maps are sent as safetensors of bytes, since each value is drawn as one of 256 colours. Shapes: rows × columns = N
patches, C active cores, D width, L layers.
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

from veca.images import fit_image, normalize, to_tensor
from veca.inspect import look_inside, pca
from veca.inspect.maps import check_finite, inspecting
from veca.inspect.projections import map_range, scale_maps
from veca.model import Veca
from veca.web.images import StoredImage

REFERENCE_SIZE = 256
"""Short side at which colours are fitted, with all cores: so colours compare between budgets and resolutions."""


class Analysis(NamedTuple):
    about: dict[str, Any]
    """The setting, and the grid of patches."""
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
    """(L, C, rows, columns): attention of each core, scaled between its ends in `ranges`."""
    ranges: NDArray[np.float32]
    """(L, C, 3): attention at 0 and at 255, and its maximum over its mean."""
    profiles: NDArray[np.uint8]
    """(L, rows, columns, C): each core's share in the update of a patch, relative to the largest."""
    shares: NDArray[np.float32]
    """(L, rows, columns): that largest share."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self[1:])


def model_input(model: Veca, image: StoredImage, size: int) -> Tensor:
    # A short side of `size`, in whole patches.
    return normalize(to_tensor(fit_image(image.image, size, "keep")))[None].to(model.norm.weight.device)


def reference_features(model: Veca, image: StoredImage) -> Tensor:
    """The features colours are fitted to: (N, D). `NonFiniteError` where they are not finite."""
    with inspecting(model):
        patches: Tensor = model(model_input(model, image, REFERENCE_SIZE)).patches[0].float().cpu()
        check_finite(model, patches)
    return patches


def analyse(
    model: Veca, image: StoredImage, cores: int, size: int, reference: Tensor, about: dict[str, Any]
) -> Analysis:
    """One forward pass with maps and profiles of every layer. `NonFiniteError` where anything is not finite."""
    with inspecting(model):
        inside = look_inside(model, model_input(model, image, size), cores, range(len(model.blocks)))
        out = inside.output
        check_finite(model, out.cls, out.cores, out.patches, out.coordinates, inside.maps, inside.profiles)
    rows, columns = out.grid
    cls, bank, patches = (features[0].float().cpu() for features in (out.cls, out.cores, out.patches))
    places, maps, profiles = (part[:, 0].float().cpu() for part in (out.coordinates, inside.maps, inside.profiles))
    patches = patches.unflatten(0, out.grid)
    peak = maps.amax((-2, -1)) / maps.mean((-2, -1)).clamp(min=1e-12)
    ranges = torch.stack([*map_range(maps), peak], dim=-1)
    shares = profiles.amax(-1)
    relative = profiles / shares[..., None]
    colours, levels, profiles = map(_to_bytes, (pca(patches, like=reference), scale_maps(maps), relative))
    parts = cls, bank, patches, colours, places, levels, ranges, profiles, shares
    return Analysis({**about, "rows": rows, "columns": columns}, *(part.contiguous().numpy() for part in parts))


def _to_bytes(values: Tensor) -> Tensor:
    """Values in [0, 1] as bytes."""
    return (values * 255).round().to(torch.uint8)


def pack_view(analysis: Analysis) -> bytes:
    """What the page needs at every layer, as safetensors.

    `features` are int8, each patch scaled by its own maximum, which leaves cosines between patches as they are.
    """
    largest = np.abs(analysis.patches).max(-1, keepdims=True)
    features = np.rint(analysis.patches / np.maximum(largest, 1e-12) * 127).astype(np.int8)
    return _pack({"colours": analysis.colours, "features": features, "places": analysis.places}, analysis.about)


def pack_layer(analysis: Analysis, number: int) -> bytes:
    """What the page needs of one layer (counted from 1), as safetensors."""
    parts = {name: getattr(analysis, name)[number - 1] for name in ("maps", "ranges", "profiles", "shares")}
    return _pack(parts, {**analysis.about, "layer": number})


def pack_features(analysis: Analysis, file_format: Literal["npz", "safetensors"]) -> bytes:
    """The features themselves in float32, as a file."""
    parts = {name: getattr(analysis, name) for name in ("cls", "cores", "patches")} | {"coordinates": analysis.places}
    if file_format == "safetensors":
        return _pack(parts, analysis.about)
    data = io.BytesIO()
    np.savez(data, **parts, veca=np.array(json.dumps(analysis.about, allow_nan=False)))
    return data.getvalue()


def _pack(parts: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> bytes:
    tensors = {name: np.ascontiguousarray(part) for name, part in parts.items()}
    return save(tensors, {"veca": json.dumps(about, allow_nan=False)})
