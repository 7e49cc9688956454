"""Figures of the cores: profiles by layer, attention maps, paths through the image, states.

Each function returns a matplotlib figure; `write_figure` saves it. Layers and cores are numbered from 1.
Shapes: rows × columns = N patches, C active cores, D width, L blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from veca.images import Fit
from veca.inspect import figure_inputs as inputs
from veca.inspect import figure_layout as layout
from veca.inspect.figure_inputs import ImageSources, ProgressCallback, cores_label, ignore_progress
from veca.inspect.maps import core_maps, core_profiles
from veca.inspect.projections import ProjectionMethod, check_method, describe_axes, map_range, project
from veca.model import Veca

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_layers(
    model: Veca,
    images: ImageSources,
    *,
    budgets: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    method: ProjectionMethod = "pca",
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: ProgressCallback = ignore_progress,
) -> Figure:
    """Profiles of all patches as colours: rows are budgets, columns layers (the paper's Figure 7).

    Defaults: four of the model's budgets, and six layers without the first.
    """
    check_method(method)
    budgets = inputs.choose_budgets(model, budgets, inputs.pick_evenly(model.config.budgets, 4))
    all_but_first = range(2, len(model.blocks) + 1) or [1]
    layers = inputs.choose_layers(model, layers, inputs.pick_evenly(all_but_first, 6))
    photos = inputs.open_photos(images, size, fit)
    layout.check_panels(len(photos) * len(budgets), 1 + len(layers))
    colours: list[list[Tensor]] = []  # [budget][photo]: (layers, rows, columns, 3)
    for budget in budgets:
        say(f"{cores_label(budget)}: running the model")
        with inputs.inspecting(model):
            blocks = [layer - 1 for layer in layers]
            profiles = [core_profiles(model, photo.batch(model), budget, blocks)[:, 0] for photo in photos]
            inputs.check_finite(model, *profiles)
        say(f"{cores_label(budget)}: {method.upper()} of {sum(p[..., 0].numel() for p in profiles):,} profiles")
        colours.append(project(profiles, 3, method))
    labels = [cores_label(budget) for budget in budgets], _layer_labels(model, layers)
    heading = inputs.make_heading("layers", model, name, axes=describe_axes(method, 3))
    return layout.create_photo_panels(heading, photos, *labels, colours, captions=len(photos) > 1)[0]


def draw_cores(
    model: Veca,
    images: ImageSources,
    *,
    cores: int | None = None,
    which: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: ProgressCallback = ignore_progress,
) -> Figure:
    """Attention maps and places of the cores numbered `which`, with a budget of `cores` (the paper's Figure 6).

    Defaults: all cores are active, the first six are shown, in three layers.
    """
    budget = inputs.choose_budget(model, cores)
    which = inputs.choose_cores(which, budget)
    later_layers = inputs.pick_evenly(range(1, len(model.blocks) + 1), 4)[1:] or [1]
    layers = inputs.choose_layers(model, layers, later_layers)
    photos = inputs.open_photos(images, size, fit)
    layout.check_panels(len(photos) * len(layers), 1 + len(which))
    heading = inputs.make_heading("cores", model, name, cores=cores_label(budget))
    labels = _layer_labels(model, layers), [f"core {core}" for core in which]
    figure, panels = layout.create_photo_panels(heading, photos, *labels, colour_bar=True)
    for photo, rows in zip(photos, panels, strict=True):
        say(f"{photo.name}: running the model")
        with inputs.inspecting(model):
            # Two passes: the first captures attention of the chosen layers, the second gives all coordinates.
            batch = photo.batch(model)
            maps = core_maps(model, batch, budget, [layer - 1 for layer in layers])[:, 0].float().cpu()
            coordinates = Veca.forward(model, batch, budget).coordinates[:, 0].float().cpu()
            inputs.check_finite(model, maps, coordinates)
        for row, layer, attention in zip(rows, layers, maps, strict=True):
            for axis, core in zip(row, which, strict=True):
                _draw_attention(axis, photo, attention[core - 1])
                layout.draw_ring(axis, *coordinates[layer - 1, core - 1].tolist())
    last_column = [row[-1] for rows in panels for row in rows]
    layout.add_colour_bar(last_column, layout.HEAT, {0: "least", 1: "most"}, "attention")
    return figure


def _draw_attention(axis: Axes, photo: inputs.Photo, attention: Tensor) -> None:
    layout.show_photo(axis, photo, dim=True)
    peak = f"{float(attention.max() / attention.mean()):.1f}×"
    low, high = map(float, map_range(attention))
    layout.show_map(axis, attention, photo.aspect, peak, cmap=layout.HEAT, alpha=0.75, vmin=low, vmax=high)


def draw_paths(
    model: Veca,
    images: ImageSources,
    *,
    budgets: Sequence[int] | None = None,
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: ProgressCallback = ignore_progress,
) -> Figure:
    """Paths of the cores through the layers: rows are budgets (default: all cores), columns images.

    Paths too short to be seen are drawn longer, all by the same factor, and the text says so.
    """
    budgets = inputs.choose_budgets(model, budgets, [model.config.num_cores])
    photos = inputs.open_photos(images, size, fit)
    layout.check_panels(len(budgets), len(photos))
    say("running the model")
    with inputs.inspecting(model):
        batches = [photo.batch(model) for photo in photos]
        # [budget][photo]: (L, C, 2)
        paths = [[Veca.forward(model, x, c).coordinates[:, 0].float().cpu() for x in batches] for c in budgets]
        inputs.check_finite(model, *(path for row in paths for path in row))
    longest = max(float(inputs.travelled(path).max()) for row in paths for path in row)
    scale = inputs.path_scale(longest)
    values = {"layers": len(model.blocks), "longest": 100 * longest}
    longer = f" Paths are drawn {scale} times as long as they are." if scale > 1 else ""
    heading = inputs.make_heading("paths", model, name, longer=longer, **values)
    labels = [cores_label(budget) for budget in budgets], [photo.name for photo in photos]
    aspects = [max(photo.aspect for photo in photos)] * len(budgets)
    figure, axes = layout.create_panels(heading, *labels, aspects, colour_bar=True)
    for row, row_paths in zip(axes, paths, strict=True):
        for axis, photo, path in zip(row, photos, row_paths, strict=True):
            layout.show_photo(axis, photo, dim=True)
            _draw_core_paths(axis, path[0] + scale * (path - path[0]), max(budgets))
    _add_core_bar([row[-1] for row in axes], max(budgets))
    return figure


def _draw_core_paths(axis: Axes, paths: Tensor, num_cores: int) -> None:
    count = paths.shape[1]
    colours = layout.core_colours()(torch.arange(count).numpy() / max(1, num_cores - 1))
    for core in reversed(range(count)):  # so that the first cores are on top
        (x, y), colour = paths[:, core].T.numpy(), colours[core]
        axis.plot(x, y, color="white", linewidth=2.4, alpha=0.5)
        axis.plot(x, y, color=colour, linewidth=1.3)
        axis.plot(x[:1], y[:1], "o", markersize=4.5, markerfacecolor="none", markeredgecolor=colour)
        axis.plot(x[-1:], y[-1:], "o", markersize=4.5, color=colour, markeredgecolor="white", markeredgewidth=0.5)


def draw_states(
    model: Veca,
    images: ImageSources,
    *,
    cores: int | None = None,
    layers: Sequence[int] | None = None,
    method: ProjectionMethod = "pca",
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: ProgressCallback = ignore_progress,
) -> Figure:
    """States of the cores after chosen layers as points in the plane, coloured by core and by image.

    Default: four layers, from the first to the last.
    """
    check_method(method)
    budget = inputs.choose_budget(model, cores)
    layers = inputs.choose_layers(model, layers, inputs.pick_evenly(range(1, len(model.blocks) + 1), 4))
    photos = inputs.open_photos(images, size, fit)
    several = len(photos) > 1
    layout.check_panels(1 + several, len(layers))
    states = []  # [photo][layer]: (C, D)
    for photo in photos:
        say(f"{photo.name}: running the model")
        with inputs.inspecting(model):
            intermediates = model.forward_intermediates(
                photo.batch(model), [layer - 1 for layer in sorted(layers)], return_prefix_tokens=True,
                stop_early=True, output_fmt="NLC", intermediates_only=True, cores=budget,
            )  # fmt: skip
            inputs.check_finite(model, *(bank for _, bank in intermediates))
        by_layer = zip(sorted(layers), intermediates, strict=True)
        states.append({layer: bank[0].float().cpu() for layer, (_, bank) in by_layer})
    hint = "" if several else "Give several pictures to see whether states group by core or by picture."
    values = {"cores": cores_label(budget), "axes": describe_axes(method, 2), "hint": hint}
    heading = inputs.make_heading("states", model, name, **values)
    labels = ["coloured\nby core", "coloured\nby picture"][: 1 + several], _layer_labels(model, layers)
    lines = -(-len(photos) // 4) if several else 0
    figure, axes = layout.create_panels(heading, *labels, [1.0] * (1 + several), colour_bar=True, legend_lines=lines)
    # The same points are drawn twice: coloured by core and, with several images, by image.
    by_core = layout.core_colours()(torch.linspace(0, 1, budget).numpy())
    for column, layer in enumerate(layers):
        say(f"layer {layer}: {method.upper()} of {len(photos) * budget:,} states")
        for i, points in enumerate(project([photo_states[layer] for photo_states in states], 2, method, clip=0.0)):
            colour, marker = layout.marker_style(i)  # the marker tells images apart in both rows
            for row, colours in zip(axes, (by_core, [colour] * budget), strict=False):
                _scatter_states(row[column], points, colours, marker)
    _add_core_bar([axes[0][-1]], budget)
    if several:
        layout.add_legend(axes[1][0], [photo.name for photo in photos])
    return figure


def _scatter_states(axis: Axes, points: Tensor, colours: Any, marker: str) -> None:
    x, y = points.T.numpy()
    axis.scatter(x[1:], y[1:], c=colours[1:], s=14, marker=marker, linewidths=0.3, edgecolors="white")
    axis.scatter(x[:1], y[:1], c=colours[:1], s=90, marker="*", linewidths=0.7, edgecolors="black")
    axis.set_xlim(-0.08, 1.08)
    axis.set_ylim(-0.08, 1.08)


def _layer_labels(model: Veca, layers: Sequence[int]) -> list[str]:
    return [f"layer {layer} of {len(model.blocks)}" for layer in layers]


def _add_core_bar(axes: Sequence[Axes], num_cores: int) -> None:
    ticks = {float(core): str(core) for core in inputs.pick_evenly(range(1, num_cores + 1), 5)}
    layout.add_colour_bar(axes, layout.core_colours(), ticks, "core")
