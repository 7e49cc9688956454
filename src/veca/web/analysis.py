"""What the page shows of one image: features of a forward pass, maps of a layer, classes, and costs.

Maps are sent as safetensors of bytes, since each value is drawn as one of 256 colours. Shapes: rows × columns = N
patches, C active cores, D width, L layers.
"""

import io
import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from veca.compute import nearest_size
from veca.config import VecaConfig
from veca.flops import DENSE_PREFIX, dense_model_flops, model_flops
from veca.images import fit_image, normalize, to_tensor
from veca.inspect.demo import top_classes
from veca.inspect.maps import capture_attention, check_finite, inspecting, mean_attention_and_profiles
from veca.inspect.projections import PcaColours, map_range, scale_maps, split_foreground
from veca.inspect.scaling import CPU_SECONDS, sizes_around
from veca.model import Veca
from veca.rope import Rotary
from veca.web.images import StoredImage
from veca.web.schemas import SHORT_SIDES, ClassProbability, CountedCost, CountedCosts, Scaling, ScalingLine

DEFAULT_SIZE = 512
"""Short side at which the page opens."""
REFERENCE_SIZE = 256
"""Short side at which colours are fitted, with all cores: so colours compare between budgets and resolutions."""
LISTED_CLASSES = 5


class Reference(NamedTuple):
    """What is fitted to an image once, for all budgets and resolutions."""

    cls: Tensor
    """(D): the global feature."""
    colours: PcaColours
    threshold: float
    """Otsu's, between foreground and background, of the level of the first principal component."""
    side: float
    """1: the foreground is above the threshold; -1: below. Of both sides the one with fewer patches at the border."""

    @classmethod
    def fit(cls, model: Veca, image: StoredImage) -> Self:
        """`NonFiniteError` where the features are not finite."""
        with inspecting(model):
            out = model(model_input(model, image, REFERENCE_SIZE))
            patches, global_feature = out.patches[0].float().cpu(), out.cls[0].float().cpu()
            check_finite(model, patches, global_feature)
        colours = PcaColours.fit(patches)
        threshold, side = split_foreground(colours.levels(patches)[:, 0].unflatten(0, out.grid))
        return cls(global_feature, colours, threshold, side)

    @property
    def nbytes(self) -> int:
        return self.cls.nbytes + sum(part.nbytes for part in self.colours)


class Analysis(NamedTuple):
    about: dict[str, Any]
    """The setting, and the grid of patches."""
    arrays: dict[str, NDArray[Any]]
    """In float32: cls (D), cores (C, D), patches (rows, columns, D); and for the page:

    colours (rows, columns, 3): levels of principal components, 0 to 1 within the range of the reference;
    foreground (rows, columns): above 0 in the foreground; places (L, C, 2): the (x, y) in [-1, 1] of each core.
    """
    classes: list[ClassProbability]
    attention: list[tuple[Tensor, Rotary, Rotary]]
    """What the attention of each layer was given: its maps are computed when they are asked for."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values()) + sum(x.nbytes for x, *_ in self.attention)


def model_input(model: Veca, image: StoredImage, size: int) -> Tensor:
    # A short side of `size`, in whole patches.
    return normalize(to_tensor(fit_image(image.image, size, "keep")))[None].to(model.norm.weight.device)


def analyse(
    model: Veca, image: StoredImage, cores: int, size: int, width: float, reference: Reference, about: dict[str, Any]
) -> Analysis:
    """One forward pass. `NonFiniteError` where anything is not finite."""
    with inspecting(model):
        layers = range(len(model.blocks))
        attention, out = capture_attention(model, model_input(model, image, size), cores, layers, _keep_inputs, width)
        check_finite(model, out.cls, out.cores, out.patches, out.coordinates)
    cls, cores_, patches = (features[0].float().cpu() for features in (out.cls, out.cores, out.patches))
    patches = patches.unflatten(0, out.grid)
    colours = reference.colours.levels(patches)
    parts = {
        "cls": cls,
        "cores": cores_,
        "patches": patches,
        "colours": colours,
        "foreground": reference.side * (colours[..., 0] - reference.threshold),
        "places": out.coordinates[:, 0].float().cpu(),
    }
    rows, columns = out.grid
    arrays = {name: part.contiguous().numpy() for name, part in parts.items()}
    top = top_classes(model, out.logits, LISTED_CLASSES)
    classes = [ClassProbability(name=name, probability=probability) for name, probability in top]
    return Analysis({**about, "rows": rows, "columns": columns}, arrays, classes, attention)


def _keep_inputs(attn: Any, x: Tensor, *rotaries: Rotary) -> tuple[Tensor, Rotary, Rotary]:
    return (x, *rotaries)  # type: ignore[return-value]  # there are two: of the cores and of the patches


def analyse_layer(model: Veca, analysis: Analysis, number: int) -> dict[str, NDArray[Any]]:
    """Maps and profiles of one layer (counted from 1), for the page. `NonFiniteError` where they are not finite.

    maps (C, rows, columns), bytes: attention of each core, scaled between its ends in `ranges`;
    ranges (C, 3): attention at 0 and at 255, and its maximum over its mean;
    profiles (rows, columns, C), bytes: each core's share in the update of a patch, relative to the largest;
    shares (rows, columns): that largest share.
    """
    with inspecting(model):
        block: Any = model.blocks[number - 1]
        attention, profiles = mean_attention_and_profiles(block.attn, *analysis.attention[number - 1])
        check_finite(model, attention, profiles)
    grid, cores = (analysis.about["rows"], analysis.about["columns"]), attention.shape[1]
    profiles = profiles[0].float().cpu().unflatten(0, grid)
    maps = attention[0, :, cores:].float().cpu().unflatten(-1, grid)
    peak = maps.amax((-2, -1)) / maps.mean((-2, -1)).clamp(min=1e-12)
    shares = profiles.amax(-1)
    parts = {
        "maps": _to_bytes(scale_maps(maps)),
        "ranges": torch.stack([*map_range(maps), peak], dim=-1),
        "profiles": _to_bytes(profiles / shares[..., None]),
        "shares": shares,
    }
    return {name: part.contiguous().numpy() for name, part in parts.items()}


def _to_bytes(values: Tensor) -> Tensor:
    """Values in [0, 1] as bytes."""
    return (values * 255).round().to(torch.uint8)


def pack_view(analysis: Analysis) -> bytes:
    """What the page needs at every layer, as safetensors.

    `features` are int8, each patch scaled by its own maximum, which leaves cosines between patches as they are.
    """
    patches = analysis.arrays["patches"]
    largest = np.abs(patches).max(-1, keepdims=True)
    features = np.rint(patches / np.maximum(largest, 1e-12) * 127).astype(np.int8)
    shown = {name: analysis.arrays[name] for name in ("colours", "foreground", "places")}
    return pack_tensors({**shown, "features": features}, analysis.about)


def pack_features(analysis: Analysis, file_format: Literal["npz", "safetensors"]) -> bytes:
    """The features themselves in float32, as a file."""
    arrays = analysis.arrays
    parts = {name: arrays[name] for name in ("cls", "cores", "patches")} | {"coordinates": arrays["places"]}
    if file_format == "safetensors":
        return pack_tensors(parts, analysis.about)
    data = io.BytesIO()
    entries: dict[str, Any] = {**parts, "veca": np.array(json.dumps(analysis.about, allow_nan=False))}
    np.savez(data, **entries)
    return data.getvalue()


def pack_tensors(parts: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> bytes:
    tensors = {name: np.ascontiguousarray(part) for name, part in parts.items()}
    return save(tensors, {"veca": json.dumps(about, allow_nan=False)})


def count_costs(model: Veca, height: int, width: int, cores: int, mlp_width: float) -> CountedCosts:
    config, table = model.config, model.quality_cost
    patches = (height // config.patch_size) * (width // config.patch_size)
    quality = None
    if table:
        size = nearest_size(table.sizes, height * width)
        rows = [row for row in table.settings if (row.cores, row.width, row.size) == (cores, mlp_width, size)]
        quality = rows[0].quality if rows else None
    return CountedCosts(
        veca=CountedCost(tokens=cores + patches, gflops=model_flops(config, height, width, cores, mlp_width) / 1e9),
        dense=CountedCost(tokens=DENSE_PREFIX + patches, gflops=dense_model_flops(config, height, width) / 1e9),
        quality=quality,
    )


def scaling_choices(config: VecaConfig) -> list[tuple[int | None, float | None]]:
    """Budget and width of each line of the chart: the extreme ones, and last (None, None), the dense ViT."""
    most, least = max(config.budgets), min(config.budgets)
    choices = [(most, max(config.widths)), (least, max(config.widths)), (most, min(config.widths))]
    return [*dict.fromkeys(choices), (None, None)]


def count_scaling(config: VecaConfig) -> Scaling:
    lines = []
    for cores, width in scaling_choices(config):
        if cores is None or width is None:
            flops = [dense_model_flops(config, size, size) for size in SHORT_SIDES]
        else:
            flops = [model_flops(config, size, size, cores, width) for size in SHORT_SIDES]
        lines.append(ScalingLine(cores=cores, width=width, gflops=[count / 1e9 for count in flops]))
    timed = sizes_around(DEFAULT_SIZE, config.patch_size)
    return Scaling(sizes=list(SHORT_SIDES), lines=lines, timed_sizes=timed, max_seconds=CPU_SECONDS)
