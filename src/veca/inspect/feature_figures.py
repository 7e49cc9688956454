"""Figures of dense features: at several resolutions, at several budgets, and how like one another they are.

Each function returns a matplotlib figure; `write_figure` saves it. Patches are numbered from 1, by row and column.
Shapes: rows × columns = N patches, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch.nn.functional as F

from veca.errors import ArgumentError
from veca.images import Fit
from veca.inspect.projections import Method, axes_of, check_method, project
from veca.inspect.sheet import (
    HEAT,
    check_sheet,
    colour_bar,
    frame,
    hide,
    sheet,
    show_map,
    show_photo,
)
from veca.inspect.subject import (
    Backbone,
    Pictures,
    Say,
    choose_budget,
    choose_budgets,
    choose_patch,
    cores_label,
    features_of,
    model_label,
    notice_of,
    open_photos,
    quiet,
    veca_at,
)
from veca.model import Veca

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEATURE_SIZES = (256, 512, 768)


def draw_features(
    model: Veca,
    pictures: Pictures,
    *,
    cores: int | None = None,
    sizes: Sequence[int] = FEATURE_SIZES,
    beside: Mapping[str, Backbone] | None = None,
    method: Method = "pca",
    fit: Fit = "crop",
    name: str | None = None,
    say: Say = quiet,
) -> Figure:
    """Dense features at several resolutions in one joint projection (Figure 3), and those of `beside` under them."""
    check_method(method)
    budget = choose_budget(model, cores)
    if not sizes:
        raise ArgumentError("asked for no size; name at least one")
    sizes = sorted(set(sizes))
    photos = [open_photos(pictures, size, fit) for size in sizes]  # [size][picture]
    backbones = {f"{model_label(model, name)}\n{cores_label(budget)}": veca_at(model, budget), **(beside or {})}
    check_sheet(len(photos[0]) * len(backbones), 1 + len(sizes))
    colours = []
    for label, backbone in backbones.items():
        maps = []
        for size, at_size in zip(sizes, photos, strict=True):
            say(f"{label.splitlines()[0]}: running at {size} px")
            maps += [features_of(model, backbone, photo)[1] for photo in at_size]
        say(f"{label.splitlines()[0]}: {method.upper()} of {sum(m[..., 0].numel() for m in maps):,} patches")
        colours.append(project(maps, 3, method))
    last = photos[-1]
    figure, axes = sheet(
        "Features of the same picture at several resolutions",
        "One square per patch; a larger picture has more of them. The "
        f"{axes_of(method, 3)} of the features are shown as red, green and blue, so patches of like colour have like "
        "features. Colours are fitted to all resolutions (and pictures) of one model together: they compare within a "
        "model, not between models.",
        [label for _ in last for label in backbones],
        ["picture", *(f"{size} px" for size in sizes)],
        [photo.aspect for photo in last for _ in backbones],
        notice=notice_of(model, name),
        captions=len(last) > 1,
    )
    for i, photo in enumerate(last):
        for j, found in enumerate(colours):
            row = axes[i * len(backbones) + j]
            if j:
                hide(row[0])
            else:
                show_photo(row[0], photo, caption=photo.name if len(last) > 1 else "")
            for k, axis in enumerate(row[1:]):
                show_map(axis, found[k * len(last) + i], photo.aspect)
    return figure


def draw_similarity(
    model: Veca,
    pictures: Pictures,
    *,
    cores: int | None = None,
    patches: Sequence[tuple[int, int]] | None = None,
    with_global: bool = True,
    beside: Mapping[str, Backbone] | None = None,
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: Say = quiet,
) -> Figure:
    """Cosine similarity of all patches to the global feature and to chosen `patches` (row, column) (Figure 4).

    Default: the patch in the middle. `beside`: the same of other backbones.
    """
    budget = choose_budget(model, cores)
    photos = open_photos(pictures, size, fit)
    side = model.config.patch_size
    grids = [(photo.picture.height // side, photo.picture.width // side) for photo in photos]
    chosen = [
        [(grid[0] // 2 + 1, grid[1] // 2 + 1)]
        if patches is None
        else [choose_patch(p, grid, photo.name) for p in patches]
        for photo, grid in zip(photos, grids, strict=True)
    ]
    count = with_global + len(chosen[0])
    if not count:
        raise ArgumentError("neither the global feature nor a patch to compare with; name a patch, or keep the global")
    backbones = {f"{model_label(model, name)}\n{cores_label(budget)}": veca_at(model, budget), **(beside or {})}
    check_sheet(len(photos) * count, 1 + len(backbones))
    labels = [label for places in chosen for label in with_global * ["global\nfeature"] + [_at(p) for p in places]]
    figure, axes = sheet(
        "Which patches are like a chosen one, and like the whole picture",
        "One square per patch, the brighter the greater its cosine similarity to the feature named on the left: the "
        "global feature, which stands for the whole picture, or that of the patch in the white frame. Each map has "
        "its own scale; the numbers below it are its least and greatest similarity.",
        labels,
        ["picture", *backbones],
        [photo.aspect for photo in photos for _ in range(count)],
        notice=notice_of(model, name),
        captions=True,
        beside=True,
    )
    for i, (photo, grid) in enumerate(zip(photos, grids, strict=True)):
        rows = axes[i * count : (i + 1) * count]
        places = [None] * with_global + list(chosen[i])
        for row, place in zip(rows, places, strict=True):
            show_photo(row[0], photo, caption=photo.name if row is rows[0] else "")
            frame(row[0], place, grid)
        for j, (label, backbone) in enumerate(backbones.items()):
            say(f"{photo.name}: running {label.splitlines()[0]}")
            cls, dense = features_of(model, backbone, photo)
            for row, place in zip(rows, places, strict=True):
                source = cls if place is None else dense[place[0] - 1, place[1] - 1]
                values = F.cosine_similarity(source, dense, dim=-1)
                ends = f"{float(values.min()):.2f} to {float(values.max()):.2f}"
                show_map(row[1 + j], values, photo.aspect, ends, cmap=HEAT)
                frame(row[1 + j], place, grid)
    colour_bar(figure, [row[-1] for row in axes], HEAT, (0, 1), "similarity", {0: "least", 1: "most"})
    return figure


def draw_budgets(
    model: Veca,
    pictures: Pictures,
    *,
    budgets: Sequence[int] | None = None,
    method: Method = "pca",
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: Say = quiet,
) -> Figure:
    """How dense features change with the budget: as colours, and how like each patch is to itself at the largest.

    Default: the budgets the model was trained at.
    """
    check_method(method)
    budgets = choose_budgets(model, budgets, list(model.config.budgets))
    photos = open_photos(pictures, size, fit)
    check_sheet(2 * len(photos), 1 + len(budgets))
    maps = []
    for budget in budgets:
        say(f"{cores_label(budget)}: running the model")
        maps.append([features_of(model, veca_at(model, budget), photo)[1] for photo in photos])
    say(f"{method.upper()} of all features")
    colours = project([each for row in maps for each in row], 3, method)
    alike = [[F.cosine_similarity(a, b, dim=-1) for a, b in zip(row, maps[-1], strict=True)] for row in maps]
    least = min(float(values.min()) for row in alike for values in row)
    figure, axes = sheet(
        f"What a smaller budget changes, {model_label(model, name)}",
        f"Above: one square per patch; the {axes_of(method, 3)} of the features are shown as red, green and "
        "blue, fitted to all budgets together, so like colours are like features in all columns. Below: cosine "
        f"similarity of each patch to the same patch with {cores_label(budgets[-1])}; the number is the mean.",
        [label for _ in photos for label in ("features", f"similarity to\n{cores_label(budgets[-1])}")],
        ["picture", *(cores_label(budget) for budget in budgets)],
        [photo.aspect for photo in photos for _ in range(2)],
        notice=notice_of(model, name),
        captions=True,
        beside=True,
    )
    for i, photo in enumerate(photos):
        above, below = axes[2 * i], axes[2 * i + 1]
        show_photo(above[0], photo, caption=photo.name)
        hide(below[0])
        for j in range(len(budgets)):
            show_map(above[1 + j], colours[j * len(photos) + i], photo.aspect)
            values = alike[j][i]
            caption = f"{float(values.mean()):.3f}"
            show_map(below[1 + j], values, photo.aspect, caption, cmap=HEAT, vmin=min(least, 0.999), vmax=1.0)
        ends = (min(least, 0.999), 1.0)
        colour_bar(figure, [below[-1]], HEAT, ends, "", {ends[0]: f"{ends[0]:.3f}", 1.0: "1"})
    return figure


def _at(place: tuple[int, int]) -> str:
    return f"patch in\nrow {place[0]},\ncolumn {place[1]}"
