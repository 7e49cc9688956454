"""Figures of the cores (profiles, attention, paths, states) and of dense features (sizes, similarity, budgets).

Each function returns a matplotlib figure; `write_figure` saves it. `options` are those of all figures: `size`, `fit`,
`name`, `method` and `say` of `figure_layout.Sheet`. Layers, cores and patches are numbered from 1, patches by row and
column. Shapes: rows × columns = N patches, C active cores, D width, L blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from veca.errors import ArgumentError
from veca.inspect import figure_layout as layout
from veca.inspect.figure_layout import FeatureFunction, Photos, Sheet, choose_budgets, cores_label, pick_evenly
from veca.inspect.maps import core_maps, core_profiles
from veca.inspect.projections import map_range
from veca.model import Veca

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEATURE_SIZES = (256, 512, 768)
Picks: TypeAlias = Sequence[int] | None  # None: a selection


def draw_layers(model: Veca, images: Photos, *, budgets: Picks = None, layers: Picks = None, **options: Any) -> Figure:
    """Profiles of all patches as colours: rows are budgets, columns layers (the paper's Figure 7).

    Defaults: four of the model's budgets, and six layers without the first.
    """
    sheet = Sheet("layers", model, images, **options)
    budgets = choose_budgets(model, budgets, pick_evenly(model.config.budgets, 4))
    layers = sheet.choose_layers(layers, pick_evenly(range(2, len(model.blocks) + 1) or [1], 6))
    sheet.check_panels(len(sheet.photos) * len(budgets), 1 + len(layers))
    colours, blocks = list[list[Tensor]](), [layer - 1 for layer in layers]
    for budget in budgets:
        sheet.say(f"{cores_label(budget)}: running the model")
        profiles = [sheet.run(core_profiles, photo, budget, blocks) for photo in sheet.photos]
        colours.append(sheet.project(cores_label(budget), profiles))  # [budget][photo]: (layers, rows, columns, 3)
    sheet.create_photo_panels([cores_label(budget) for budget in budgets], sheet.layer_labels(layers), colours)
    return sheet.figure


def draw_cores(
    model: Veca, images: Photos, *, cores: int | None = None, which: Picks = None, layers: Picks = None, **options: Any
) -> Figure:
    """Attention maps and places of the cores numbered `which`, with a budget of `cores` (the paper's Figure 6).

    Defaults: all cores are active, the first six are shown, in three layers.
    """
    budget, sheet = _choose_budget(model, cores), Sheet("cores", model, images, **options)
    rule = f"with a budget of {budget}, cores are numbered 1 to {budget}: choose one of these, or raise the budget"
    which = layout.choose_numbers("core", which, range(1, min(6, budget) + 1), budget, rule)
    layers = sheet.choose_layers(layers, pick_evenly(range(1, len(model.blocks) + 1), 4)[1:] or [1])
    sheet.check_panels(len(sheet.photos) * len(layers), 1 + len(which))
    labels = sheet.layer_labels(layers), [f"core {core}" for core in which]
    panels = sheet.create_photo_panels(*labels, cores=cores_label(budget))
    for photo, rows in zip(sheet.photos, panels, strict=True):
        sheet.say(f"{photo.name}: running the model")
        maps = sheet.run(core_maps, photo, budget, [layer - 1 for layer in layers])
        coordinates = sheet.run(_coordinates, photo, budget)
        for row, layer, attention in zip(rows, layers, maps[:, [core - 1 for core in which]], strict=True):
            for axis, core, core_map in zip(row, which, attention, strict=True):
                layout.show_photo(axis, photo, dim=True)
                peak, (low, high) = f"{float(core_map.max() / core_map.mean()):.1f}×", map(float, map_range(core_map))
                layout.show_map(axis, core_map, photo.aspect, peak, alpha=0.75, vmin=low, vmax=high)
                layout.draw_ring(axis, *coordinates[layer - 1, core - 1].tolist())
    sheet.add_colour_bar([row[-1] for rows in panels for row in rows], {0: "least", 1: "most"}, "attention")
    return sheet.figure


def draw_paths(model: Veca, images: Photos, *, budgets: Picks = None, **options: Any) -> Figure:
    """Paths of the cores through the layers: rows are budgets (default: all cores), columns images.

    Paths too short to be seen are drawn longer, all by the same factor, and the text says so.
    """
    sheet = Sheet("paths", model, images, **options)
    budgets = choose_budgets(model, budgets, [model.config.num_cores])
    sheet.check_panels(len(budgets), len(sheet.photos))
    sheet.say("running the model")
    # [budget][photo]: (L, C, 2)
    paths = [[sheet.run(_coordinates, photo, budget) for photo in sheet.photos] for budget in budgets]
    longest, scale = layout.path_scale(path for row in paths for path in row)
    longer = f" Paths are drawn {scale} times as long as they are." if scale > 1 else ""
    labels = [cores_label(budget) for budget in budgets], [photo.name for photo in sheet.photos]
    aspects = [max(photo.aspect for photo in sheet.photos)] * len(budgets)
    values: dict[str, Any] = {"layers": len(model.blocks), "longest": 100 * longest, "longer": longer}
    axes = sheet.create_panels(*labels, aspects, **values)
    for row, row_paths in zip(axes, paths, strict=True):
        for axis, photo, path in zip(row, sheet.photos, row_paths, strict=True):
            layout.show_photo(axis, photo, dim=True)
            drawn = (path[0] + scale * (path - path[0])).permute(1, 2, 0).numpy()  # (C, 2, L)
            colours = sheet.core_colours()(torch.arange(len(drawn)).numpy() / max(1, budgets[-1] - 1))
            for (x, y), colour in reversed(list(zip(drawn, colours, strict=True))):  # the first cores are on top
                axis.plot(x, y, color="white", linewidth=2.4, alpha=0.5)
                axis.plot(x, y, color=colour, linewidth=1.3)
                axis.plot(x[:1], y[:1], "o", markersize=4.5, markerfacecolor="none", markeredgecolor=colour)
                axis.plot(x[-1:], y[-1:], "o", markersize=4.5, color=colour, markeredgecolor="white", mew=0.5)
    sheet.add_core_bar([row[-1] for row in axes], budgets[-1])
    return sheet.figure


def draw_states(
    model: Veca, images: Photos, *, cores: int | None = None, layers: Picks = None, **options: Any
) -> Figure:
    """States of the cores after chosen layers as points in the plane, coloured by core and by image.

    Default: four layers, from the first to the last.
    """
    budget, sheet = _choose_budget(model, cores), Sheet("states", model, images, **options)
    layers = sheet.choose_layers(layers, pick_evenly(range(1, len(model.blocks) + 1), 4))
    several = len(sheet.photos) > 1
    sheet.check_panels(1 + several, len(layers))
    states = []  # [photo][layer]: (C, D)
    for photo in sheet.photos:
        sheet.say(f"{photo.name}: running the model")
        blocks = [layer - 1 for layer in sorted(layers)]
        states.append(dict(zip(sorted(layers), sheet.run(_core_states, photo, budget, blocks), strict=True)))
    hint = "" if several else "Give several pictures to see whether states group by core or by picture."
    labels = ["coloured\nby core", "coloured\nby picture"][: 1 + several], sheet.layer_labels(layers)
    axes = sheet.create_panels(*labels, [1.0] * (1 + several), cores=cores_label(budget), hint=hint)
    # The same points are drawn twice: coloured by core and, with several images, by image.
    by_core = sheet.core_colours()(torch.linspace(0, 1, budget).numpy())
    for column, layer in enumerate(layers):
        points_by_photo = sheet.project(f"layer {layer}", [photo_states[layer] for photo_states in states], 2, clip=0.0)
        for i, points in enumerate(points_by_photo):
            colour, marker = layout.marker_style(i)  # the marker tells images apart in both rows
            for row, colours in zip(axes, (by_core, [colour] * budget), strict=False):
                axis, (x, y) = row[column], points.T.numpy()
                axis.scatter(x[1:], y[1:], c=colours[1:], s=14, marker=marker, linewidths=0.3, edgecolors="white")
                axis.scatter(x[:1], y[:1], c=colours[:1], s=90, marker="*", linewidths=0.7, edgecolors="black")
                axis.set(xlim=(-0.08, 1.08), ylim=(-0.08, 1.08))
    sheet.add_core_bar([axes[0][-1]], budget)
    if several:
        sheet.add_legend(axes[1][0])
    return sheet.figure


def draw_features(
    model: Veca,
    images: Photos,
    *,
    cores: int | None = None,
    sizes: Sequence[int] = FEATURE_SIZES,
    beside: Mapping[str, FeatureFunction] | None = None,
    **options: Any,
) -> Figure:
    """Dense features at several resolutions in one joint projection (Figure 3), and those of the backbones `beside`."""
    if not sizes:
        raise ArgumentError("asked for no size; name at least one")
    sheets = {size: Sheet("features", model, images, size=size, **options) for size in sorted(set(sizes))}
    sheet, count = sheets[max(sizes)], len(sheets[max(sizes)].photos)
    backbones = sheet.label_backbones(_choose_budget(model, cores), beside or {})
    sheet.check_panels(count * len(backbones), 1 + len(sheets))
    colours = []  # [backbone][image][size]
    for label, backbone in backbones.items():
        maps = []
        for size, at_size in sheets.items():
            sheet.say(f"{label.splitlines()[0]}: running at {size} px")
            maps += [sheet.features(backbone, photo)[1] for photo in at_size.photos]
        values = sheet.project(label.splitlines()[0], maps)  # jointly over sizes and images
        colours.append([values[i::count] for i in range(count)])
    sheet.create_photo_panels(list(backbones), [f"{size} px" for size in sheets], colours)
    return sheet.figure


def draw_similarity(
    model: Veca,
    images: Photos,
    *,
    cores: int | None = None,
    patches: Sequence[tuple[int, int]] | None = None,
    with_global: bool = True,
    beside: Mapping[str, FeatureFunction] | None = None,
    **options: Any,
) -> Figure:
    """Cosine similarity of all patches to the global feature and to chosen `patches` (row, column) (Figure 4).

    Default: the patch in the middle. `beside`: the same of other backbones.
    """
    sheet = Sheet("similarity", model, images, **options)
    # [photo][row]: the patch to compare with; None is the global feature.
    sources = [[None] * with_global + _choose_patches(photo, photo.grid(model), patches) for photo in sheet.photos]
    count = len(sources[0])
    if not count:
        raise ArgumentError("neither the global feature nor a patch to compare with; name a patch, or keep the global")
    backbones = sheet.label_backbones(_choose_budget(model, cores), beside or {})
    sheet.check_panels(len(sheet.photos) * count, 1 + len(backbones))
    names = [f"patch in\nrow {at[0]},\ncolumn {at[1]}" if at else "global\nfeature" for each in sources for at in each]
    aspects = [photo.aspect for photo in sheet.photos for _ in range(count)]
    axes = sheet.create_panels(names, ["picture", *backbones], aspects)
    for i, photo in enumerate(sheet.photos):
        rows = axes[i * count : (i + 1) * count]
        for row in rows:
            layout.show_photo(row[0], photo, caption=photo.name if row is rows[0] else "")
        for column, (label, backbone) in enumerate(backbones.items(), start=1):
            sheet.say(f"{photo.name}: running {label.splitlines()[0]}")
            cls, dense = sheet.features(backbone, photo)
            for row, source in zip(rows, sources[i], strict=True):
                feature = dense[source[0] - 1, source[1] - 1] if source else cls
                values = F.cosine_similarity(feature, dense, dim=-1)
                ends = f"{float(values.min()):.2f} to {float(values.max()):.2f}"
                layout.show_map(row[column], values, photo.aspect, ends)
        for row, source in zip(rows, sources[i], strict=True):
            for axis in row if source else ():
                sheet.frame_patch(axis, source, photo.grid(model))
    sheet.add_colour_bar([row[-1] for row in axes], {0: "least", 1: "most"}, "similarity")
    return sheet.figure


def draw_budgets(model: Veca, images: Photos, *, budgets: Picks = None, **options: Any) -> Figure:
    """Dense features by budget: as colours, and the similarity of each patch to itself at the largest budget.

    Default: the budgets the model was trained at.
    """
    sheet = Sheet("budgets", model, images, **options)
    budgets, count = choose_budgets(model, budgets, model.config.budgets), len(sheet.photos)
    sheet.check_panels(2 * count, 1 + len(budgets))
    maps = []  # [budget][photo]
    for budget in budgets:
        sheet.say(f"{cores_label(budget)}: running the model")
        maps.append([sheet.features(budget, photo)[1] for photo in sheet.photos])
    colours = sheet.project("all budgets", [dense for row in maps for dense in row])  # [budget × photo]
    similarity = [[F.cosine_similarity(a, b, dim=-1) for a, b in zip(row, maps[-1], strict=True)] for row in maps]
    # One scale for all maps, from the smallest similarity to 1, and never of zero width.
    low, largest = min(0.999, *(float(values.min()) for row in similarity for values in row)), cores_label(budgets[-1])
    labels = ["features", f"similarity to\n{largest}"], [cores_label(budget) for budget in budgets]
    panels = sheet.create_photo_panels(*labels, [[colours[i::count] for i in range(count)]], largest=largest)
    for i, (photo, (_, below)) in enumerate(zip(sheet.photos, panels, strict=True)):
        for axis, row in zip(below, similarity, strict=True):
            layout.show_map(axis, row[i], photo.aspect, f"{float(row[i].mean()):.3f}", vmin=low, vmax=1.0)
        sheet.add_colour_bar([below[-1]], {low: f"{low:.3f}", 1.0: "1"}, "")
    return sheet.figure


def _choose_budget(model: Veca, cores: int | None) -> int:
    """A budget of the model; None: all its cores."""
    return choose_budgets(model, None if cores is None else [cores], [model.config.num_cores])[0]


def _choose_patches(photo: layout.Photo, grid: tuple[int, int], patches: Sequence[tuple[int, int]] | None) -> list[Any]:
    """The patches (row, column), checked; by default the one in the middle."""
    for patch in patches or ():
        if len(patch) != 2 or not all(1 <= number <= side for number, side in zip(patch, grid, strict=True)):
            rule = f"whose rows are numbered 1 to {grid[0]} and columns 1 to {grid[1]}: name a patch within these"
            raise ArgumentError(f"patch {'x'.join(map(str, patch))} is outside the grid of {photo.name}, {rule}")
    return [(grid[0] // 2 + 1, grid[1] // 2 + 1)] if patches is None else list(patches)


def _coordinates(model: Veca, images: Tensor, budget: int) -> Tensor:
    """(L, B, C, 2)"""
    return Veca.forward(model, images, budget).coordinates


def _core_states(model: Veca, images: Tensor, budget: int, blocks: Sequence[int]) -> Tensor:
    """(blocks, B, C, D)"""
    options: dict[str, Any] = {"return_prefix_tokens": True, "output_fmt": "NLC", "intermediates_only": True}
    outputs = model.forward_intermediates(images, blocks, stop_early=True, cores=budget, **options)
    return torch.stack([bank for _, bank in outputs])
