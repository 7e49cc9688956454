"""`veca demo`: one HTML page that shows what a model makes of images at each budget, and what each budget costs.

Shapes: N = rows × columns patches, C active cores, D width, L blocks.
"""

from __future__ import annotations

import io
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
from veca.images import fit_image, open_image
from veca.images.samples import sample_images
from veca.inspect.figure_inputs import PathLike, Photo, check_finite, inspecting, path_scale, travelled
from veca.inspect.figure_layout import check_out
from veca.inspect.maps import core_maps
from veca.inspect.projections import heat_hex, pca, scale_maps, to_rgb
from veca.model import Veca
from veca.report.page import data_uri, write_page
from veca.utils.console import progress_bar
from veca.utils.text import origin
from veca.utils.timing import measure

TIMED_RUNS = 5
SHOWN_CORES = 8
TILE_SIDE, IMAGE_SIDE = 256, 512  # pixels


class _ImageResult(NamedTuple):
    """What the model makes of one image; maps and coordinates are those of the largest budget."""

    photo: Photo
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
    out = check_out(out, suffixes=(), example="veca-demo.html")
    paths = [Path(picture) for picture in pictures or sample_images()]
    photos = [Photo(path.name, fit_image(open_image(path), size, "crop")) for path in paths]
    model = model if device is None else model.to(device)
    bar = progress_bar("{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), shown=progress)
    with bar, inspecting(model):
        looking = bar.add_task("looking at pictures", total=len(photos) * (len(budgets) + 1))
        timing = bar.add_task("timing budgets", total=(TIMED_RUNS + 1) * len(budgets))
        results = [_run_budgets(model, photo, budgets, lambda: bar.advance(looking)) for photo in photos]
        batch = photos[0].batch(model)

        def run(budget: int) -> None:
            model(batch, cores=budget)
            bar.advance(timing)

        times = measure({str(budget): partial(run, budget) for budget in budgets}, batch.device, TIMED_RUNS)
    seconds = [statistics.median(times[str(budget)]) for budget in budgets]
    write_page(out, "demo.html", **_page_context(model, model_name, size, budgets, results, seconds))
    return out


def _run_budgets(model: Veca, photo: Photo, budgets: Sequence[int], advance: Callable[[], None]) -> _ImageResult:
    batch = photo.batch(model)
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
    return _ImageResult(photo, colours, similarity, maps, block, output.coordinates[:, 0].float().cpu())


def _page_context(
    model: Veca, model_name: str, size: int, budgets: Sequence[int], results: Sequence[_ImageResult],
    seconds: Sequence[float],
) -> dict[str, Any]:  # fmt: skip
    config, weight = model.config, model.norm.weight
    # Paths too short to see are drawn longer, by one factor for all images, and the captions say so.
    scale = path_scale(max(float(travelled(result.coordinates).max()) for result in results))
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
        "path_scale": scale,
        "images": [_image_context(result, budgets, scale) for result in results],
        "costs": list(zip(budgets, seconds, flops, similarity, strict=True)),
        "heat_ramp": heat_hex(torch.linspace(0, 1, 11)),
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


def _image_context(result: _ImageResult, budgets: Sequence[int], scale: int) -> dict[str, Any]:
    """The figures of one image, for the template."""
    image, path = result.photo.image, result.coordinates
    dim, travel = _dimmed(image, TILE_SIDE), travelled(path)
    maps = result.maps[:SHOWN_CORES]
    places = _in_percent(path[result.block])
    core_tiles = []
    for core, (attention, level) in enumerate(zip(maps, scale_maps(maps), strict=True)):
        tile = _embed(ImageChops.screen(dim, to_rgb(level, dim.size, smooth=True)))
        core_tiles.append((core + 1, tile, places[core], float(attention.max() / attention.mean())))
    features = [_embed(to_rgb(colours, (TILE_SIDE, TILE_SIDE)), "PNG") for colours in result.colours]
    # Colour and positions of each core through the blocks; the first cores are drawn last, on top.
    colours = heat_hex(torch.tensor([0.95 - 0.6 * core / len(travel) for core in range(len(travel))]))
    positions = (_in_percent(steps) for steps in (path[0] + scale * (path - path[0])).transpose(0, 1))
    return {
        "name": result.photo.name,
        "image": _embed(image.resize((IMAGE_SIDE, IMAGE_SIDE))),
        "features": list(zip(budgets, features, result.similarity, strict=True)),
        "patches": result.maps[0].numel(),
        "core_tiles": core_tiles,
        "block": result.block + 1,
        "dimmed": _embed(_dimmed(image, IMAGE_SIDE)),
        "paths": list(zip(colours, positions, strict=True))[::-1],
        "farthest_core": int(travel.argmax()) + 1,
        "farthest": 100 * float(travel.max()),
    }


def _embed(image: Image.Image, kind: str = "JPEG") -> str:
    file = io.BytesIO()
    image.save(file, kind, quality=86, optimize=True)
    return data_uri(file.getvalue(), kind.lower())


def _dimmed(image: Image.Image, side: int) -> Image.Image:
    """Grey and dark, for maps and marks to stand out."""
    grey = ImageOps.grayscale(image.resize((side, side))).point([round(18 + 0.42 * level) for level in range(256)])
    return grey.convert("RGB")


def _in_percent(places: Tensor) -> list[tuple[float, float]]:
    """Coordinates (C, 2) in [-1, 1] as percent of the image."""
    return [(round(x, 2), round(y, 2)) for x, y in ((places + 1) * 50).tolist()]
