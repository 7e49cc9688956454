"""What the page shows of one image: features and maps of one forward pass, and costs.

Maps are sent as safetensors of bytes, since each value is drawn as one of 256 colours. Shapes: rows × columns = N
patches, C active cores, D width, L layers.
"""

import io
import json
import weakref
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from veca.config import VecaConfig
from veca.flops import DENSE_PREFIX, dense_model_flops, model_flops
from veca.images import fit_image, normalize, to_tensor
from veca.inspect import look_inside, pca
from veca.inspect.maps import check_finite, inspecting
from veca.inspect.projections import map_range, scale_maps
from veca.model import Veca
from veca.teachers.from_timm import create_dense_vit
from veca.utils.device import peak_device_bytes
from veca.utils.timing import timed
from veca.web.images import StoredImage
from veca.web.jobs import JobSteps
from veca.web.schemas import CountedCost, CountedCosts, MeasuredCost

REFERENCE_SIZE = 256
"""Short side at which colours are fitted, with all cores: so colours compare between budgets and resolutions."""
MAX_REPEATS = 3
MAX_SECONDS = 1.0
"""No further repeat after this much measuring. The fastest counts: others shared the machine with something else."""


class Analysis(NamedTuple):
    about: dict[str, Any]
    """The setting, and the grid of patches."""
    arrays: dict[str, NDArray[Any]]
    """cls (D), cores (C, D), patches (rows, columns, D) in float32; and for the page:

    colours (rows, columns, 3), bytes; places (L, C, 2): the (x, y) in [-1, 1] of each core;
    maps (L, C, rows, columns), bytes: attention of each core, scaled between its ends in `ranges`;
    ranges (L, C, 3): attention at 0 and at 255, and its maximum over its mean;
    profiles (L, rows, columns, C), bytes: each core's share in the update of a patch, relative to the largest;
    shares (L, rows, columns): that largest share.
    """


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
    model: Veca, image: StoredImage, cores: int, size: int, width: float, reference: Tensor, about: dict[str, Any]
) -> Analysis:
    """One forward pass with maps and profiles of every layer. `NonFiniteError` where anything is not finite."""
    with inspecting(model):
        inside = look_inside(model, model_input(model, image, size), cores, range(len(model.blocks)), width)
        out = inside.output
        check_finite(model, out.cls, out.cores, out.patches, out.coordinates, inside.maps, inside.profiles)
    cls, cores_, patches = (features[0].float().cpu() for features in (out.cls, out.cores, out.patches))
    places, maps, profiles = (part[:, 0].float().cpu() for part in (out.coordinates, inside.maps, inside.profiles))
    patches = patches.unflatten(0, out.grid)
    peak = maps.amax((-2, -1)) / maps.mean((-2, -1)).clamp(min=1e-12)
    shares = profiles.amax(-1)
    parts = {
        "cls": cls,
        "cores": cores_,
        "patches": patches,
        "colours": _to_bytes(pca(patches, like=reference)),
        "places": places,
        "maps": _to_bytes(scale_maps(maps)),
        "ranges": torch.stack([*map_range(maps), peak], dim=-1),
        "profiles": _to_bytes(profiles / shares[..., None]),
        "shares": shares,
    }
    rows, columns = out.grid
    return Analysis({**about, "rows": rows, "columns": columns}, {k: v.contiguous().numpy() for k, v in parts.items()})


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
    shown = {"colours": analysis.arrays["colours"], "features": features, "places": analysis.arrays["places"]}
    return _pack(shown, analysis.about)


def pack_layer(analysis: Analysis, number: int) -> bytes:
    """What the page needs of one layer (counted from 1), as safetensors."""
    parts = {name: analysis.arrays[name][number - 1] for name in ("maps", "ranges", "profiles", "shares")}
    return _pack(parts, {**analysis.about, "layer": number})


def pack_features(analysis: Analysis, file_format: Literal["npz", "safetensors"]) -> bytes:
    """The features themselves in float32, as a file."""
    arrays = analysis.arrays
    parts = {name: arrays[name] for name in ("cls", "cores", "patches")} | {"coordinates": arrays["places"]}
    if file_format == "safetensors":
        return _pack(parts, analysis.about)
    data = io.BytesIO()
    entries: dict[str, Any] = {**parts, "veca": np.array(json.dumps(analysis.about, allow_nan=False))}
    np.savez(data, **entries)
    return data.getvalue()


def _pack(parts: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> bytes:
    tensors = {name: np.ascontiguousarray(part) for name, part in parts.items()}
    return save(tensors, {"veca": json.dumps(about, allow_nan=False)})


def count_costs(config: VecaConfig, height: int, width: int, cores: int, mlp_width: float) -> CountedCosts:
    patches = (height // config.patch_size) * (width // config.patch_size)
    return CountedCosts(
        veca=CountedCost(tokens=cores + patches, gflops=model_flops(config, height, width, cores, mlp_width) / 1e9),
        dense=CountedCost(tokens=DENSE_PREFIX + patches, gflops=dense_model_flops(config, height, width) / 1e9),
    )


def measure_dense(config: VecaConfig, images: Tensor) -> JobSteps[MeasuredCost | None]:
    """The cost of timm's dense ViT with random weights; None where timm is not installed."""
    if find_spec("timm") is None:
        return None
    # All layers have the same shapes: a model of one layer is built, and its block called once per further layer.
    dense: Any = create_dense_vit(config, depth=1).to(images.device, images.dtype).eval()
    inputs: list[Any] = []
    hook = dense.blocks[0].register_forward_pre_hook(lambda _, *given: inputs.extend(given), with_kwargs=True)
    with torch.inference_mode():
        dense.forward_features(images)
    hook.remove()
    args, kwargs = inputs
    layers = (config.depth - 1) * [lambda: dense.blocks[0](*args, **kwargs)]
    return (yield from measure_calls([lambda: dense.forward_features(images), *layers], images.device))


def measure_calls(calls: list[Callable[[], object]], device: torch.device) -> JobSteps[MeasuredCost]:
    """Time of all calls one after the other, and the peak memory of the first; pauses between any two."""
    runs = [torch.inference_mode()(call) for call in calls]
    peak = peak_device_bytes(runs[0], device)
    peak = peak_tensor_bytes(runs[0]) if peak is None else peak  # this first run also warms up
    totals: list[float] = []
    while len(totals) < MAX_REPEATS and sum(totals) < MAX_SECONDS:
        total = 0.0
        for run in runs:
            yield
            total += timed(run, device)
        totals.append(total)
    return MeasuredCost(seconds=min(totals), mebibytes=peak / 2**20)


def peak_tensor_bytes(call: Callable[[], object]) -> int:
    """Peak bytes of the tensors that operators return during a call; their scratch memory is not seen."""
    with _TensorCounter() as counter:
        call()
    return counter.peak


class _TensorCounter(TorchDispatchMode):
    """Counts the bytes of tensors created while it is active, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The storages of inputs are not new, so neither are those of views and of in-place results.
        self._known.update(leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        result = func(*args, **(kwargs or {}))
        storages = {leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        for storage in storages.difference(self._known):
            self._known.add(storage)
            self.current += storage.nbytes()
            weakref.finalize(storage, self._release, storage.nbytes())
        self.peak = max(self.peak, self.current)
        return result

    def _release(self, count: int) -> None:
        self.current -= count
