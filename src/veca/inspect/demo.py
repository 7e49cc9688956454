"""`veca demo`: one HTML page that shows what a model makes of images at each budget, and what each budget costs.

Shapes: N = rows × columns patches, C active cores, D width, L blocks.
"""

import io
import platform
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageChops, ImageOps
from torch import Tensor

from veca.flops import model_flops
from veca.images import fit_image, open_image
from veca.images.samples import sample_images
from veca.inspect import scaling
from veca.inspect.figure_layout import PathLike, Photo, check_out, choose_budgets, path_scale
from veca.inspect.maps import check_finite, core_maps, inspecting
from veca.inspect.projections import core_colours, find_foreground, heat_hex, pca, scale_maps, to_rgb
from veca.model import Veca
from veca.report.page import data_uri, write_page
from veca.utils.console import bar
from veca.utils.device import describe_versions
from veca.utils.text import origin
from veca.utils.timing import measure

TIMED_RUNS = 3
SHOWN_CORES = 8
SHOWN_CLASSES = 3
TILE_SIDE, IMAGE_SIDE = 256, 512  # pixels


def write_demo(
    pictures: Sequence[PathLike] | None,
    out: PathLike,
    *,
    model: Veca,
    model_name: str,
    size: int = 512,
    budgets: Sequence[int] | None = None,
    progress: bool = True,
) -> Path:
    """Write the report on `pictures` (None: sample photos of scikit-image) to the HTML file `out` and return its path.

    `budgets` are by default those the model was trained at.
    """
    config, weight = model.config, model.norm.weight
    budgets = choose_budgets(model, budgets, config.budgets)
    settings = scaling.choose_settings(config, budgets)
    out = check_out(out, suffixes=(), example="veca-demo.html")
    paths = [Path(picture) for picture in pictures or sample_images()]
    photos = [Photo(path.name, fit_image(open_image(path), size, "crop")) for path in paths]
    batch, images = photos[0].batch(model), []
    with inspecting(model):
        with bar("looking at pictures", len(photos), "pictures", progress) as advance:
            for photo in photos:
                images.append(_show_image(model, photo, budgets))
                advance(1)
        with bar("timing budgets", TIMED_RUNS * len(budgets), "runs", progress) as advance:

            def run(budget: int) -> None:
                model(batch, cores=budget)
                advance(1)

            # Looking at the pictures was the warm-up.
            calls = {str(budget): partial(run, budget) for budget in budgets}
            times = measure(calls, weight.device, TIMED_RUNS, warmup=0)
        sizes = scaling.sizes_around(size, config.patch_size)
        with bar("timing resolutions", len(sizes), "sizes", progress) as advance:
            points = scaling.measure_scaling(model, settings, sizes, advance)
    facts = {
        "Model": model_name,
        "Parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "Weights": _weights_text(model.provenance),
        "Pictures": f"{size} × {size} px, {(size // config.patch_size) ** 2:,} patches",
        "Device": f"{_device_text(weight.device)}, {str(weight.dtype).removeprefix('torch.')}",
        "PyTorch": torch.__version__,
    }
    costs = [(c, statistics.median(times[str(c)]), model_flops(config, size, size, c)) for c in budgets]
    context = {"banner": model.provenance.get("weights") == "random", "config": config, "budgets": budgets}
    # Paths too short to see are drawn longer, by one factor for all images, and the captions say so.
    context |= {"images": images, "path_scale": path_scale(image["path"] for image in images)[1], "costs": costs}
    timed = [point for point in points if point.seconds]
    context |= {"points": points, "timed": timed, "charts": list(scaling.draw_scaling(points, settings))}
    context |= {"dense": scaling.DENSE, "matches": _match_patches(photos, images) if pictures else []}
    context |= {"size": size, "runs": TIMED_RUNS, "heat_ramp": heat_hex(torch.linspace(0, 1, 11))}
    write_page(out, "demo.html", name=model_name, facts=facts, **context)
    return out


def _weights_text(provenance: Mapping[str, Any]) -> str:
    if provenance.get("weights") == "random":
        return f"random, seed {provenance['seed']}" if "seed" in provenance else "random"
    entries = [f"{key}: {value}".replace("_", " ", key.count("_")) for key, value in provenance.items()]
    return origin(provenance) or ", ".join(entry for entry in entries if len(entry) <= 80) or "of unrecorded origin"


def _device_text(device: torch.device) -> str:
    cpu = f"CPU ({platform.machine()}), {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    return cpu if device.type == "cpu" else describe_versions(device)["device"]


def _show_image(model: Veca, photo: Photo, budgets: Sequence[int]) -> dict[str, Any]:
    """What the model makes of one image, for the template; maps and path are those of the largest budget."""
    image, batch = photo.image, photo.batch(model)
    outputs = [model(batch, cores=budget) for budget in budgets]
    grid = outputs[-1].grid
    features = torch.stack([output.patches[0].float().unflatten(0, grid) for output in outputs])
    similarity = F.cosine_similarity(features, features[-1], dim=-1).mean((1, 2)).tolist()
    path = outputs[-1].coordinates[:, 0].float().cpu()  # (L, C, 2), in [-1, 1]
    block = model.config.depth * 3 // 4  # late, where maps are of objects; in the last only core 1's still matters
    maps = core_maps(model, batch, cores=budgets[-1], layers=[block])[0, 0].float().cpu()
    check_finite(model, maps, features)
    # Fitted to all budgets together, so that their colours compare.
    feature_tiles = [_embed(to_rgb(colours), "PNG") for colours in pca(features)]
    foreground = find_foreground(features[-1])
    inside = pca(features[-1], like=features[-1][foreground]) * foreground[..., None]
    middle = grid[0] // 2, grid[1] // 2  # as `veca figure similarity` does by default
    ends = {budgets[i]: F.cosine_similarity(features[i][middle], features[i], dim=-1) for i in (-1, 0)}
    dim, shown, core_tiles = _dimmed(image, TILE_SIDE), maps[:SHOWN_CORES], []
    for core, (attention, level) in enumerate(zip(shown, scale_maps(shown), strict=True)):
        tile = _embed(ImageChops.screen(dim, to_rgb(level, dim.size, smooth=True)))
        core_tiles.append((core + 1, tile, path[block, core].tolist(), float(attention.max() / attention.mean())))
    travel = (path[-1] - path[0]).norm(dim=-1) / 2
    colours = core_colours(len(travel))
    return {
        "name": photo.name,
        "classes": top_classes(model, outputs[-1].logits, SHOWN_CLASSES),
        "image": _embed(image.resize((IMAGE_SIDE, IMAGE_SIDE))),
        "features": list(zip(budgets, feature_tiles, similarity, strict=True)),
        "foreground": _embed(to_rgb(inside), "PNG"),
        "patch": _outline(middle, grid),
        "alike": {budget: _embed(to_rgb(scale_maps(values)), "PNG") for budget, values in ends.items()},
        "dense": features[-1],
        "patches": maps[0].numel(),
        "core_tiles": core_tiles,
        "block": block + 1,
        "dimmed": _embed(_dimmed(image, IMAGE_SIDE)),
        "path": path,
        # Colour and positions of each core through the blocks; the first cores are drawn last, on top.
        "paths": list(zip(colours, path.transpose(0, 1).tolist(), strict=True))[::-1],
        "farthest_core": int(travel.argmax()) + 1,
        "farthest": 100 * float(travel.max()),
    }


def _match_patches(photos: Sequence[Photo], images: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where each further image is most like the middle patch of the first one."""
    first, matches = images[0]["dense"], []
    for photo, image in zip(photos[1:], images[1:], strict=True):
        values = F.cosine_similarity(first[first.shape[0] // 2, first.shape[1] // 2], image["dense"], dim=-1)
        best = divmod(int(values.argmax()), values.shape[1])
        level = to_rgb(scale_maps(values), (TILE_SIDE, TILE_SIDE), smooth=True)
        matches.append(
            {
                "name": photo.name,
                "image": image["image"],
                "map": _embed(ImageChops.screen(_dimmed(photo.image, TILE_SIDE), level)),
                "patch": _outline(best, values.shape),
                "similarity": float(values.max()),
            }
        )
    return matches


def _outline(patch: tuple[int, int], grid: Sequence[int]) -> tuple[float, float, float, float]:
    """Left, top, width and height of a patch (row, column), in percent of the picture."""
    height, width = 100 / grid[0], 100 / grid[1]
    return patch[1] * width, patch[0] * height, width, height


def top_classes(model: Veca, logits: Tensor | None, count: int) -> list[tuple[str, float]]:
    """Names and probabilities of the most probable classes of one image (1, K); empty if the model has no classes."""
    if logits is None:
        return []
    names = model.provenance.get("classes") or ()
    odds, numbers = logits[0].float().softmax(-1).topk(min(count, logits.shape[-1]))
    named = len(names) == logits.shape[-1]
    found = zip(numbers.tolist(), odds.tolist(), strict=True)
    return [(str(names[i]) if named else f"class {i}", odd) for i, odd in found]


def _embed(image: Image.Image, kind: str = "JPEG") -> str:
    file = io.BytesIO()
    image.save(file, kind, quality=86, optimize=True)
    return data_uri(file.getvalue(), kind.lower())


def _dimmed(image: Image.Image, side: int) -> Image.Image:
    """Grey and dark, for maps and marks to stand out."""
    grey = ImageOps.grayscale(image.resize((side, side))).point([round(18 + 0.42 * level) for level in range(256)])
    return grey.convert("RGB")
