"""`veca demo`: one page, a file that needs nothing beside it, showing what a model makes of pictures at each budget.

Shapes: N = rows × columns patches, C active cores, D width, L blocks.
"""

from __future__ import annotations

import base64
import io
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image, ImageChops, ImageOps
from rich.progress import BarColumn, TaskProgressColumn, TimeRemainingColumn
from torch import Tensor

from veca.errors import ArgumentError
from veca.flops import model_flops
from veca.images import fit_image, normalize, open_image, to_tensor
from veca.inspect import core_maps, heat, pca, to_rgb
from veca.inspect.subject import check_finite
from veca.model import Veca
from veca.utils.console import progress_bar
from veca.utils.files import atomic_path, check_writable
from veca.utils.text import origin
from veca.utils.timing import measure

PathLike = str | os.PathLike[str]

SAMPLES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")
RUNS = 5
SHOWN_CORES = 8
TILE = 256
PHOTO = 512


class _View(NamedTuple):
    """One picture, looked at with every budget; cores and paths are those of the largest."""

    name: str
    photo: Image.Image
    colours: Tensor
    """(budgets, rows, columns, 3)"""
    similarity: list[float]
    """Mean cosine of each budget's patches with the largest budget's."""
    maps: Tensor
    """(C, rows, columns): attention of the cores in `block`."""
    block: int
    coordinates: Tensor
    """(L, C, 2)"""


def demo(
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
    """Write the report on `pictures` (none: sample photos of scikit-image) to the HTML file `out`; its path comes back.

    `budgets` are by default those the model was trained at. `device` moves the model; None leaves it where it is.
    """
    budgets = sorted(set(model.config.budgets if budgets is None else budgets))
    if not budgets:
        raise ArgumentError("budgets is empty; name at least one, or pass None for those of the model")
    out = Path(out)
    if out.is_dir():
        raise ArgumentError(f"{out} is a folder; name the file to write, such as {out / 'veca-demo.html'}")
    check_writable(out)
    paths = [Path(picture) for picture in pictures or sample_pictures()]
    photos = [fit_image(open_image(path), size, "crop") for path in paths]
    model = model if device is None else model.to(device)
    was_training = model.training
    model.eval()
    bar = progress_bar("{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), shown=progress)
    try:
        with bar, torch.inference_mode():
            looking = bar.add_task("looking at pictures", total=len(photos) * (len(budgets) + 1))
            timing = bar.add_task("timing budgets", total=(RUNS + 1) * len(budgets))
            views = [
                _look(model, path.name, photo, budgets, lambda: bar.advance(looking))
                for path, photo in zip(paths, photos, strict=True)
            ]
            times = _median_times(model, _input(model, photos[0]), budgets, lambda: bar.advance(timing))
    finally:
        model.train(was_training)
    with atomic_path(out) as part:
        part.write_text(_page(model, model_name, size, budgets, views, times), encoding="utf-8", errors="replace")
    return out


def sample_pictures() -> list[Path]:
    """Photographs that scikit-image ships; nothing is downloaded, and scikit-image is not even imported."""
    spec = find_spec("skimage")
    folders = [] if spec is None else [Path(folder) / "data" for folder in spec.submodule_search_locations or ()]
    found = [folder / name for folder in folders for name in SAMPLES if (folder / name).is_file()]
    if not found:
        raise ArgumentError(
            "no pictures given, and the sample photos come with scikit-image, which is not installed: "
            "pip install 'veca[viz]', or pass pictures of your own"
        )
    return found


def _input(model: Veca, photo: Image.Image) -> Tensor:
    return normalize(to_tensor(photo))[None].to(model.norm.weight.device)


def _look(model: Veca, name: str, photo: Image.Image, budgets: Sequence[int], advance: Callable[[], None]) -> _View:
    images = _input(model, photo)
    features = []
    for budget in budgets:
        found = model(images, cores=budget)
        features.append(found.patches[0].float().unflatten(0, found.grid))
        advance()
    similarity = [F.cosine_similarity(each, features[-1], dim=-1).mean().item() for each in features]
    block = model.config.depth * 3 // 4
    maps = core_maps(model, images, cores=budgets[-1], layers=[block])[0, 0].float().cpu()
    check_finite(model, maps, *features)
    colours = pca(torch.stack(features)).cpu()
    advance()
    return _View(name, photo, colours, similarity, maps, block, found.coordinates[:, 0].float().cpu())


def _median_times(model: Veca, images: Tensor, budgets: Sequence[int], advance: Callable[[], None]) -> list[float]:
    """Seconds for one picture at each budget."""

    def run(budget: int) -> None:
        model(images, cores=budget)
        advance()

    seconds = measure({str(budget): partial(run, budget) for budget in budgets}, images.device, RUNS)
    return [statistics.median(seconds[str(budget)]) for budget in budgets]


def _page(
    model: Veca, model_name: str, size: int, budgets: Sequence[int], views: Sequence[_View], times: Sequence[float]
) -> str:
    name, patch = escape(model_name), model.config.patch_size
    facts = {
        "Model": name,
        "Parameters": f"{sum(p.numel() for p in model.parameters()):,}",
        "Weights": escape(_weights(model.provenance)),
        "Pictures": f"{size} × {size} px, {(size // patch) ** 2:,} patches",
        "Device": escape(_device(model.norm.weight)),
        "PyTorch": escape(torch.__version__),
    }
    banner = (
        '<div class="banner" role="note"><p><strong>These weights are random.</strong> This model has learned nothing '
        "yet: the pictures below show how the architecture passes information around, not what a trained VECA sees in "
        "a photograph. Times and GFLOPs do not depend on the weights.</p></div>"
    )
    # Ways too short to see are drawn longer, all pictures alike, and the caption says so.
    longest = max(float(_travel(view).max()) for view in views)
    scale = next((times for times in (200, 100, 50, 20, 10, 5, 2) if times * longest <= 0.1), 1)
    return Template((files("veca.report") / "templates" / "demo.html").read_text(encoding="utf-8")).substitute(
        title=f"VECA · {name}",
        banner=banner if model.provenance.get("weights") == "random" else "",
        facts="\n".join(f"<div><dt>{term}</dt><dd>{value}</dd></div>" for term, value in facts.items()),
        pictures="\n".join(_section(model, view, budgets, scale, full=view is views[0]) for view in views),
        table=_table(model, size, budgets, views, times),
        ramp=", ".join(_hex(heat(torch.tensor(level / 10))) for level in range(11)),
        footer=f"Made by <code>veca demo</code> on {datetime.now():%d %B %Y}.",
    )


def _weights(provenance: Mapping[str, Any]) -> str:
    if provenance.get("weights") == "random":
        return f"random, seed {provenance['seed']}" if "seed" in provenance else "random"
    if told := origin(provenance):
        return told
    known = [f"{key}: {value}".replace("_", " ", key.count("_")) for key, value in provenance.items()]
    return ", ".join(entry for entry in known if len(entry) <= 80) or "of unrecorded origin"


def _device(weight: Tensor) -> str:
    if weight.is_cuda:
        what = torch.cuda.get_device_name(weight.device)
    elif weight.device.type == "cpu":
        threads = torch.get_num_threads()
        what = f"CPU ({platform.machine()}), {threads} thread{'s' if threads > 1 else ''}"
    else:
        what = weight.device.type
    return f"{what}, {str(weight.dtype).removeprefix('torch.')}"


def _section(model: Veca, view: _View, budgets: Sequence[int], scale: int, full: bool) -> str:
    """The figures of one picture; `full` captions explain from the ground up, the others remind."""
    name = escape(view.name)
    photo = _frame(_embed(view.photo.resize((PHOTO, PHOTO))), f"{name}, the picture the model is given")
    config, most = model.config, budgets[-1]
    listed = f"{budgets[0]} to {most}" if len(budgets) > 1 else str(most)
    given = "What the model is given: the centre, cut to a square."
    if full:
        given += f" It sees {view.maps[0].numel():,} patches of {config.patch_size} × {config.patch_size} px."
    alike = "Patches of like colour have like features, across all tiles."
    if full:
        alike = (
            f"One square per patch. The model describes each by {config.num_features} numbers; the three directions "
            "in which these vary most are shown as red, green and blue, so patches of like colour have like features. "
            "Colours are fitted to all budgets together and compare from tile to tile."
        )
    alike += f" Numbers: cosine similarity to the features with {most} cores, averaged over the patches."
    looks = "Bright: where the core takes its information from. Ring: where it stands. Number: peak over even spread."
    if full:
        looks = (
            f"Cores gather what patches need to know of one another. These are the first {min(SHOWN_CORES, most)} of "
            f"{most} in block {view.block + 1} of {config.depth}: bright is where a core takes its information from, "
            "each map on its own scale, and the ring is where the core stands. The number is how many times more the "
            "brightest patch gets than if the core looked everywhere evenly. Core 1 doubles as the feature of the "
            "whole picture."
        )
    return f"""<section>
<h2>{name}</h2>
<div class="pair">
<figure><h3>The picture</h3>{photo}<figcaption>{given}</figcaption></figure>
<figure><h3>Features with {listed} cores</h3>
<div class="tiles">{_features(view, budgets)}</div><figcaption>{alike}</figcaption></figure>
</div>
<div class="pair">
{_paths(view, scale, full)}
<figure><h3>Where cores look <span class="scale">least <i></i> most</span></h3>
<div class="tiles">{_looks(view)}</div><figcaption>{looks}</figcaption></figure>
</div>
</section>"""


def _features(view: _View, budgets: Sequence[int]) -> str:
    tiles = []
    for budget, colours, alike in zip(budgets, view.colours, view.similarity, strict=True):
        picture = _embed(to_rgb(colours, (TILE, TILE)), "PNG")
        image = _frame(picture, f"principal components of the features of {escape(view.name)} with {budget} cores")
        tiles.append(f'<div>{image}<div class="label"><span>{budget} cores</span><span>{alike:.3f}</span></div></div>')
    return "\n".join(tiles)


def _looks(view: _View) -> str:
    dim = _dimmed(view.photo, TILE)
    tiles = []
    for core, attention in enumerate(view.maps[:SHOWN_CORES]):
        # The top percent may saturate, or a single bright patch would leave the rest in the dark.
        most = torch.maximum(attention.quantile(0.99), attention.max() / 4)
        level = (attention - attention.min()) / (most - attention.min()).clamp(min=1e-12)
        picture = _embed(ImageChops.screen(dim, to_rgb(level, dim.size, smooth=True)))
        x, y = _percent(view.coordinates[view.block, core])
        ring = "".join(f'<circle class="{kind}" cx="{x}" cy="{y}" r="3.6" />' for kind in ("halo", "ring"))
        image = _frame(picture, f"attention of core {core + 1} over {escape(view.name)}", ring)
        peak = attention.max() / attention.mean()
        tiles.append(f'<div>{image}<div class="label"><span>core {core + 1}</span><span>{peak:.1f}×</span></div></div>')
    return "\n".join(tiles)


def _travel(view: _View) -> Tensor:
    """How far each core is, at the end, from where it began: (C,), in sides of the picture."""
    return (view.coordinates[-1] - view.coordinates[0]).square().sum(-1).sqrt() / 2


def _paths(view: _View, scale: int, full: bool) -> str:
    """The cores' ways through the blocks, drawn `scale` times as long as they are."""
    steps = view.coordinates - view.coordinates[0]
    travel = _travel(view)
    marks = []
    count = view.coordinates.shape[1]
    for core in reversed(range(count)):  # the first cores end up on top
        places = [_percent(place) for place in view.coordinates[0, core] + scale * steps[:, core]]
        colour = _hex(heat(torch.tensor(0.95 - 0.6 * core / count)))
        (x0, y0), (x1, y1) = places[0], places[-1]
        way = " ".join(f"{x},{y}" for x, y in places)
        marks.append(
            f'<g stroke="{colour}" fill="none"><polyline points="{way}" stroke-width="0.7" />'
            f'<circle cx="{x0}" cy="{y0}" r="1.1" stroke-width="0.5" />'
            f'<circle cx="{x1}" cy="{y1}" r="1.2" fill="{colour}" stroke="none" /></g>'
        )
    image = _frame(_embed(_dimmed(view.photo, PHOTO)), f"ways of the cores over {escape(view.name)}", "".join(marks))
    longer = f" Ways are drawn {scale} times as long as they are." if scale > 1 else ""
    caption = (
        f"Ring: start. Dot: end.{longer} The longest, of core {int(travel.argmax()) + 1}, "
        f"is {100 * float(travel.max()):.2g}% of the picture's side."
    )
    if full:
        caption = (
            "Every core has a place in the picture, moved before each block by what the core has seen so far. "
            f"The palest cores take part at every budget, the darkest only at the largest. {caption}"
        )
    return f"<figure><h3>Where {count} cores stand</h3>{image}<figcaption>{caption}</figcaption></figure>"


def _table(model: Veca, size: int, budgets: Sequence[int], views: Sequence[_View], times: Sequence[float]) -> str:
    flops = [model_flops(model.config, size, size, budget) for budget in budgets]
    rows = []
    for i, budget in enumerate(budgets):
        alike = statistics.fmean(view.similarity[i] for view in views)
        rows.append(
            f'<tr><th scope="row">{budget}</th>'
            f'<td><data value="{times[i]:.6f}">{1000 * times[i]:.1f}</data></td>{_share(times[i] / times[-1])}'
            f'<td><data value="{flops[i]}">{flops[i] / 1e9:.3f}</data></td>{_share(flops[i] / flops[-1])}'
            f"<td>{alike:.3f}</td></tr>"
        )
    body = "\n".join(rows)
    return f"""<figure><table>
<thead><tr><th scope="col">Cores</th><th scope="col">Time, ms</th><th scope="col">of {budgets[-1]} cores</th>
<th scope="col">GFLOPs</th><th scope="col">of {budgets[-1]} cores</th><th scope="col">Similarity</th></tr></thead>
<tbody>
{body}
</tbody></table>
<figcaption>One picture of {size} × {size} px at a time, on the machine that made this page: the median of {RUNS} runs
after a warm-up, from pixels in memory to features. GFLOPs count 2 per multiply-add. The work done for each patch by
itself is the same at every budget; only what passes through the cores shrinks. Similarity is that of the features to
those with {budgets[-1]} cores, averaged over the pictures above.</figcaption></figure>"""


def _share(part: float) -> str:
    return (
        f'<td class="share"><div><i style="--part:{min(100.0, 100 * part):.1f}%"></i>'
        f"<span>{100 * part:.0f}%</span></div></td>"
    )


def _frame(source: str, alt: str, marks: str = "") -> str:
    over = f'<svg viewBox="0 0 100 100" aria-hidden="true">{marks}</svg>' if marks else ""
    return f'<div class="frame"><img src="{source}" alt="{alt}" />{over}</div>'


def _embed(picture: Image.Image, kind: str = "JPEG") -> str:
    file = io.BytesIO()
    picture.save(file, kind, quality=86, optimize=True)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def _dimmed(photo: Image.Image, side: int) -> Image.Image:
    grey = ImageOps.grayscale(photo.resize((side, side))).point([round(18 + 0.42 * level) for level in range(256)])
    return grey.convert("RGB")


def _percent(place: Tensor) -> tuple[float, float]:
    x, y = ((place + 1) * 50).tolist()
    return round(x, 2), round(y, 2)


def _hex(colour: Tensor) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in colour.tolist())
