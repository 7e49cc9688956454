"""`veca demo`: one HTML page that shows what a model makes of images at each budget, and what each budget costs.

Shapes: N = rows × columns patches, C active cores, D width, L blocks.
"""

from __future__ import annotations

import io
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image, ImageChops, ImageOps
from rich.progress import BarColumn, TaskProgressColumn, TimeRemainingColumn
from torch import Tensor

from veca.errors import ArgumentError
from veca.flops import model_flops
from veca.images import fit_image, normalize, open_image, to_tensor
from veca.images.samples import sample_images
from veca.inspect import core_maps, heat, pca, to_rgb
from veca.inspect.figure_inputs import check_finite
from veca.model import Veca
from veca.report.page import data_uri, write_page
from veca.utils.console import progress_bar
from veca.utils.files import check_writable
from veca.utils.text import origin
from veca.utils.timing import measure

PathLike = str | os.PathLike[str]

TIMED_RUNS = 5
SHOWN_CORES = 8
TILE_SIDE, IMAGE_SIDE = 256, 512  # pixels


class _ImageResult(NamedTuple):
    """What the model makes of one image; maps and coordinates are those of the largest budget."""

    name: str
    image: Image.Image
    colours: Tensor
    """(budgets, rows, columns, 3)"""
    similarity: list[float]
    """Mean cosine of each budget's patches with the largest budget's."""
    maps: Tensor
    """(C, rows, columns): attention of the cores in `block`."""
    block: int
    coordinates: Tensor
    """(L, C, 2), in [-1, 1]"""


def write_demo(
    pictures: Sequence[PathLike] | None,
    out: PathLike,
    *,
    model: Veca,
    model_name: str,
    size: int = 512,
    budgets: Sequence[int] | None = None,
    device: str | torch.device | None = None,
    progress: bool = True,
) -> Path:
    """Write the report on `pictures` (None: sample photos of scikit-image) to the HTML file `out` and return its path.

    `budgets` are by default those the model was trained at. `device` moves the model; None leaves it where it is.
    """
    budgets = sorted(set(model.config.budgets if budgets is None else budgets))
    if not budgets:
        raise ArgumentError("budgets is empty; name at least one, or pass None for those of the model")
    out = Path(out)
    if out.is_dir():
        raise ArgumentError(f"{out} is a folder; name the file to write, such as {out / 'veca-demo.html'}")
    check_writable(out)
    paths = [Path(picture) for picture in pictures or sample_images()]
    images = [fit_image(open_image(path), size, "crop") for path in paths]
    model = model if device is None else model.to(device)
    was_training = model.training
    model.eval()
    bar = progress_bar("{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), shown=progress)
    try:
        with bar, torch.inference_mode():
            looking = bar.add_task("looking at pictures", total=len(images) * (len(budgets) + 1))
            timing = bar.add_task("timing budgets", total=(TIMED_RUNS + 1) * len(budgets))
            results = [
                _run_budgets(model, path.name, image, budgets, lambda: bar.advance(looking))
                for path, image in zip(paths, images, strict=True)
            ]
            seconds = _median_times(model, _as_batch(model, images[0]), budgets, lambda: bar.advance(timing))
    finally:
        model.train(was_training)
    write_page(out, "demo.html", **_page_context(model, model_name, size, budgets, results, seconds))
    return out


def _as_batch(model: Veca, image: Image.Image) -> Tensor:
    return normalize(to_tensor(image))[None].to(model.norm.weight.device)


def _run_budgets(
    model: Veca, name: str, image: Image.Image, budgets: Sequence[int], advance: Callable[[], None]
) -> _ImageResult:
    batch = _as_batch(model, image)
    features = []
    for budget in budgets:
        output = model(batch, cores=budget)
        features.append(output.patches[0].float().unflatten(0, output.grid))
        advance()
    similarity = [F.cosine_similarity(each, features[-1], dim=-1).mean().item() for each in features]
    block = model.config.depth * 3 // 4  # late, where maps are of objects; in the last only core 1's still matters
    maps = core_maps(model, batch, cores=budgets[-1], layers=[block])[0, 0].float().cpu()
    check_finite(model, maps, *features)
    colours = pca(torch.stack(features)).cpu()  # fitted to all budgets together, so that their colours compare
    advance()
    return _ImageResult(name, image, colours, similarity, maps, block, output.coordinates[:, 0].float().cpu())


def _median_times(model: Veca, images: Tensor, budgets: Sequence[int], advance: Callable[[], None]) -> list[float]:
    """Seconds for one image at each budget."""

    def run(budget: int) -> None:
        model(images, cores=budget)
        advance()

    seconds = measure({str(budget): partial(run, budget) for budget in budgets}, images.device, TIMED_RUNS)
    return [statistics.median(seconds[str(budget)]) for budget in budgets]


def _page_context(
    model: Veca, model_name: str, size: int, budgets: Sequence[int], results: Sequence[_ImageResult],
    seconds: Sequence[float],
) -> dict[str, Any]:  # fmt: skip
    config, weight = model.config, model.norm.weight
    # Paths too short to see are drawn longer, by one factor for all images, and the captions say so.
    longest = max(float(_travel(result).max()) for result in results)
    path_scale = next((factor for factor in (200, 100, 50, 20, 10, 5, 2) if factor * longest <= 0.1), 1)
    flops = [model_flops(config, size, size, budget) for budget in budgets]
    similarity = [statistics.fmean(values) for values in zip(*(result.similarity for result in results), strict=True)]
    return {
        "name": model_name,
        "banner": model.provenance.get("weights") == "random",
        "facts": {
            "Model": model_name,
            "Parameters": f"{sum(p.numel() for p in model.parameters()):,}",
            "Weights": _weights_text(model.provenance),
            "Pictures": f"{size} × {size} px, {(size // config.patch_size) ** 2:,} patches",
            "Device": _device_text(weight),
            "PyTorch": torch.__version__,
        },
        "config": config,
        "size": size,
        "budgets": budgets,
        "runs": TIMED_RUNS,
        "path_scale": path_scale,
        "images": [_image_context(result, budgets, path_scale) for result in results],
        "costs": list(zip(budgets, seconds, flops, similarity, strict=True)),
        "heat_ramp": [_hex(heat(torch.tensor(level / 10))) for level in range(11)],
    }


def _weights_text(provenance: Mapping[str, Any]) -> str:
    if provenance.get("weights") == "random":
        return f"random, seed {provenance['seed']}" if "seed" in provenance else "random"
    if phrase := origin(provenance):
        return phrase
    entries = [f"{key}: {value}".replace("_", " ", key.count("_")) for key, value in provenance.items()]
    return ", ".join(entry for entry in entries if len(entry) <= 80) or "of unrecorded origin"


def _device_text(weight: Tensor) -> str:
    name, threads = weight.device.type, torch.get_num_threads()
    if weight.is_cuda:
        name = torch.cuda.get_device_name(weight.device)
    elif name == "cpu":
        name = f"CPU ({platform.machine()}), {threads} thread{'s' if threads > 1 else ''}"
    return f"{name}, {str(weight.dtype).removeprefix('torch.')}"


def _image_context(result: _ImageResult, budgets: Sequence[int], path_scale: int) -> dict[str, Any]:
    """The figures of one image, for the template."""
    dim, travel = _dimmed(result.image, TILE_SIDE), _travel(result)
    core_tiles = []
    for core, attention in enumerate(result.maps[:SHOWN_CORES]):
        # The top percent may saturate, or a single bright patch would leave the rest in the dark.
        top = torch.maximum(attention.quantile(0.99), attention.max() / 4)
        level = (attention - attention.min()) / (top - attention.min()).clamp(min=1e-12)
        tile = _embed(ImageChops.screen(dim, to_rgb(level, dim.size, smooth=True)))
        position = _in_percent(result.coordinates[result.block, core])
        core_tiles.append((core + 1, tile, position, float(attention.max() / attention.mean())))
    features = [_embed(to_rgb(colours, (TILE_SIDE, TILE_SIDE)), "PNG") for colours in result.colours]
    return {
        "name": result.name,
        "image": _embed(result.image.resize((IMAGE_SIDE, IMAGE_SIDE))),
        "features": list(zip(budgets, features, result.similarity, strict=True)),
        "patches": result.maps[0].numel(),
        "core_tiles": core_tiles,
        "block": result.block + 1,
        "dimmed": _embed(_dimmed(result.image, IMAGE_SIDE)),
        "paths": _core_paths(result, path_scale),
        "farthest_core": int(travel.argmax()) + 1,
        "farthest": 100 * float(travel.max()),
    }


def _travel(result: _ImageResult) -> Tensor:
    """Distance of each core from its start to its end: (C,), in sides of the image."""
    return (result.coordinates[-1] - result.coordinates[0]).square().sum(-1).sqrt() / 2


def _core_paths(result: _ImageResult, scale: int) -> list[tuple[str, list[tuple[float, float]]]]:
    """(colour, positions through the blocks) of each core, `scale` times as long as they are, the last core first."""
    start, steps = result.coordinates[0], result.coordinates - result.coordinates[0]
    count = len(start)
    return [
        (
            _hex(heat(torch.tensor(0.95 - 0.6 * core / count))),
            [_in_percent(position) for position in start[core] + scale * steps[:, core]],
        )
        for core in reversed(range(count))  # so that the first cores are drawn on top
    ]


def _embed(image: Image.Image, kind: str = "JPEG") -> str:
    file = io.BytesIO()
    image.save(file, kind, quality=86, optimize=True)
    return data_uri(file.getvalue(), kind.lower())


def _dimmed(image: Image.Image, side: int) -> Image.Image:
    """Grey and dark, for maps and marks to stand out."""
    grey = ImageOps.grayscale(image.resize((side, side))).point([round(18 + 0.42 * level) for level in range(256)])
    return grey.convert("RGB")


def _in_percent(position: Tensor) -> tuple[float, float]:
    """Coordinates in [-1, 1] as percent of the image."""
    x, y = ((position + 1) * 50).tolist()
    return round(x, 2), round(y, 2)


def _hex(colour: Tensor) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in colour.tolist())
