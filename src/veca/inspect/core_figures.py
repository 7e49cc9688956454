"""Figures of the cores: whom patches listen to, where cores look, where they go, what they hold.

Each function returns a matplotlib figure; `write_figure` saves it. Layers and cores are numbered from 1.
Shapes: rows × columns = N patches, C active cores, D width, L blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from veca.images import Fit
from veca.inspect.contribution import core_profiles
from veca.inspect.maps import core_maps
from veca.inspect.projections import Method, axes_of, check_method, project
from veca.inspect.sheet import (
    HEAT,
    check_sheet,
    colour_bar,
    hide,
    legend,
    look_of,
    order_colours,
    ring,
    sheet,
    show_map,
    show_photo,
)
from veca.inspect.subject import (
    Photo,
    Pictures,
    Say,
    check_finite,
    choose_budget,
    choose_budgets,
    choose_cores,
    choose_layers,
    cores_label,
    input_of,
    inspecting,
    layer_label,
    model_label,
    notice_of,
    open_photos,
    quiet,
    spread,
)
from veca.model import Veca

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_layers(
    model: Veca,
    pictures: Pictures,
    *,
    budgets: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    method: Method = "pca",
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: Say = quiet,
) -> Figure:
    """Which cores every patch listens to, as colours: rows are budgets, columns layers (the paper's Figure 7).

    Defaults: four of the model's budgets, and six layers without the first.
    """
    check_method(method)
    budgets = choose_budgets(model, budgets, spread(model.config.budgets, 4))
    layers = choose_layers(model, layers, spread(range(2, len(model.blocks) + 1) or [1], 6))
    photos = open_photos(pictures, size, fit)
    check_sheet(len(photos) * len(budgets), 1 + len(layers))
    colours: list[list[Tensor]] = []
    for budget in budgets:
        say(f"{cores_label(budget)}: running the model")
        with inspecting(model):
            profiles = [core_profiles(model, input_of(model, p), budget, [i - 1 for i in layers])[:, 0] for p in photos]
            check_finite(model, *profiles)
        say(f"{cores_label(budget)}: {method.upper()} of {sum(p[..., 0].numel() for p in profiles):,} profiles")
        colours.append(project(profiles, 3, method))
    figure, axes = sheet(
        f"Which cores each patch listens to, {model_label(model, name)}",
        "One square per patch. Its colour stands for the shares in which the cores contribute to it in that layer: the "
        "length of what each core adds (attention × value × output projection). Patches of like colour are fed by "
        f"like mixtures of cores. Colours: the {axes_of(method, 3)} of these shares, fitted to all layers of one "
        "budget together, so they compare from column to column, not from row to row.",
        [cores_label(budget) for _ in photos for budget in budgets],
        ["picture", *(layer_label(model, i) for i in layers)],
        [photo.aspect for photo in photos for _ in budgets],
        notice=notice_of(model, name),
        captions=len(photos) > 1,
    )
    for i, photo in enumerate(photos):
        for j in range(len(budgets)):
            row = axes[i * len(budgets) + j]
            if j:
                hide(row[0])
            else:
                show_photo(row[0], photo, caption=photo.name if len(photos) > 1 else "")
            for axis, values in zip(row[1:], colours[j][i], strict=True):
                show_map(axis, values, photo.aspect)
    return figure


def draw_cores(
    model: Veca,
    pictures: Pictures,
    *,
    cores: int | None = None,
    which: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: Say = quiet,
) -> Figure:
    """Where the cores numbered `which` look and stand, with a budget of `cores` (the paper's Figure 6).

    Defaults: all cores take part, the first six are shown, in three layers.
    """
    budget = choose_budget(model, cores)
    which = choose_cores(which, budget)
    layers = choose_layers(model, layers, spread(range(1, len(model.blocks) + 1), 4)[1:] or [1])
    photos = open_photos(pictures, size, fit)
    check_sheet(len(photos) * len(layers), 1 + len(which))
    figure, axes = sheet(
        f"Where cores look, {model_label(model, name)} with {cores_label(budget)}",
        "Bright: the patches a core takes its information from in that layer (attention, the mean over heads); each "
        "map has its own scale. Ring: where the core stands. Number: how many times more attention the brightest "
        "patch gets than if the core looked everywhere evenly. Core 1 doubles as the feature of the whole picture.",
        [layer_label(model, i) for _ in photos for i in layers],
        ["picture", *(f"core {core}" for core in which)],
        [photo.aspect for photo in photos for _ in layers],
        notice=notice_of(model, name),
        captions=True,
        beside=True,
    )
    for i, photo in enumerate(photos):
        say(f"{photo.name}: running the model")
        with inspecting(model):
            images = input_of(model, photo)
            maps = core_maps(model, images, budget, [layer - 1 for layer in layers])[:, 0].float().cpu()
            places = Veca.forward(model, images, budget).coordinates[:, 0].float().cpu()
            check_finite(model, maps, places)
        rows = axes[i * len(layers) : (i + 1) * len(layers)]
        for row, layer, attention in zip(rows, layers, maps, strict=True):
            if row is rows[0]:
                show_photo(row[0], photo, caption=photo.name)
            else:
                hide(row[0])
            for axis, core in zip(row[1:], which, strict=True):
                _look(axis, photo, attention[core - 1])
                ring(axis, *places[layer - 1, core - 1].tolist())
    colour_bar(figure, [row[-1] for row in axes], HEAT, (0, 1), "attention", {0: "least", 1: "most"})
    return figure


def _look(axis: Axes, photo: Photo, attention: Tensor) -> None:
    # The top percent may saturate, or a single bright patch would leave the rest in the dark.
    most = max(float(attention.quantile(0.99)), float(attention.max()) / 4)
    show_photo(axis, photo, dim=True)
    peak = f"{float(attention.max() / attention.mean()):.1f}×"
    show_map(axis, attention, photo.aspect, peak, cmap=HEAT, vmin=float(attention.min()), vmax=most, alpha=0.75)


def draw_paths(
    model: Veca,
    pictures: Pictures,
    *,
    budgets: Sequence[int] | None = None,
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: Say = quiet,
) -> Figure:
    """The cores' ways over the pictures through the layers: rows are budgets (default: all cores), columns pictures.

    Ways too short to be seen are drawn longer, all alike, and the text says so.
    """
    budgets = choose_budgets(model, budgets, [model.config.num_cores])
    photos = open_photos(pictures, size, fit)
    check_sheet(len(budgets), len(photos))
    say("running the model")
    with inspecting(model):
        ways = [
            [Veca.forward(model, input_of(model, photo), c).coordinates[:, 0].float().cpu() for photo in photos]
            for c in budgets
        ]
        check_finite(model, *(way for row in ways for way in row))
    lengths = [(way[-1] - way[0]).norm(dim=-1) / 2 for row in ways for way in row]  # in sides of the picture
    longest = max(float(length.max()) for length in lengths)
    scale = next((times for times in (200, 100, 50, 20, 10, 5, 2) if times * longest <= 0.1), 1)
    longer = f" Ways are drawn {scale} times as long as they are." if scale > 1 else ""
    figure, axes = sheet(
        f"Where cores go, {model_label(model, name)}",
        "Every core has a place in the picture, moved before each layer by what the core has seen so far. Ring: its "
        f"place in the first layer. Dot: in the last, layer {len(model.blocks)}.{longer} The longest way is "
        f"{100 * longest:.2g}% of a side. Dark cores are the first of the bank and take part at every budget.",
        [cores_label(budget) for budget in budgets],
        [photo.name for photo in photos],
        [max(photo.aspect for photo in photos)] * len(budgets),
        notice=notice_of(model, name),
        beside=True,
    )
    for row, found in zip(axes, ways, strict=True):
        for axis, photo, way in zip(row, photos, found, strict=True):
            show_photo(axis, photo, dim=True)
            _draw_ways(axis, way[0] + scale * (way - way[0]), max(budgets))
    ticks = {float(core): str(core) for core in spread(range(1, max(budgets) + 1), 5)}
    colour_bar(figure, [row[-1] for row in axes], order_colours(), (1, max(2, *budgets)), "core", ticks)
    return figure


def _draw_ways(axis: Axes, ways: Tensor, most: int) -> None:
    count = ways.shape[1]
    colours = order_colours()(torch.arange(count).numpy() / max(1, most - 1))
    for core in reversed(range(count)):  # the first cores end up on top
        x, y = ways[:, core].T.numpy()
        axis.plot(x, y, color="white", linewidth=2.4, alpha=0.5)
        axis.plot(x, y, color=colours[core], linewidth=1.3)
        axis.plot(x[:1], y[:1], "o", markersize=4.5, markerfacecolor="none", markeredgecolor=colours[core])
        axis.plot(
            x[-1:], y[-1:], "o", markersize=4.5, color=colours[core], markeredgecolor="white", markeredgewidth=0.5
        )
    axis.set_xlim(-1, 1)
    axis.set_ylim(1, -1)


def draw_states(
    model: Veca,
    pictures: Pictures,
    *,
    cores: int | None = None,
    layers: Sequence[int] | None = None,
    method: Method = "pca",
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: Say = quiet,
) -> Figure:
    """The cores' states after chosen layers as points in the plane, coloured by core and by picture.

    Default: four layers, from the first to the last.
    """
    check_method(method)
    budget = choose_budget(model, cores)
    layers = choose_layers(model, layers, spread(range(1, len(model.blocks) + 1), 4))
    photos = open_photos(pictures, size, fit)
    several = len(photos) > 1
    check_sheet(1 + several, len(layers))
    states = []
    for photo in photos:
        say(f"{photo.name}: running the model")
        with inspecting(model):
            taken = model.forward_intermediates(
                input_of(model, photo), [i - 1 for i in sorted(layers)], return_prefix_tokens=True, stop_early=True,
                output_fmt="NLC", intermediates_only=True, cores=budget,
            )  # fmt: skip
            check_finite(model, *(cores for _, cores in taken))
        states.append({i: cores[0].float().cpu() for i, (_, cores) in zip(sorted(layers), taken, strict=True)})
    figure, axes = sheet(
        f"What cores hold, {model_label(model, name)} with {cores_label(budget)}",
        f"One point per core and picture: the core's state after that layer, in the {axes_of(method, 2)} of that "
        "layer's states. Points that are close are states that are alike. Star: core 1, the feature of the whole "
        "picture. " + ("" if several else "Give several pictures to see whether states go by core or by picture."),
        ["coloured\nby core", "coloured\nby picture"][: 1 + several],
        [layer_label(model, i) for i in layers],
        [1.0] * (1 + several),
        notice=notice_of(model, name),
        beside=True,
        below=-(-len(photos) // 4) if several else 0,
    )
    by_core = order_colours()(torch.linspace(0, 1, budget).numpy())
    looks = [look_of(i) for i in range(len(photos))]
    for column, layer in enumerate(layers):
        say(f"layer {layer}: {method.upper()} of {len(photos) * budget:,} states")
        for points, look in zip(project([each[layer] for each in states], 2, method, clip=0.0), looks, strict=True):
            for row, colours in zip(axes, (by_core, [look[0]] * budget), strict=False):
                _scatter(row[column], points, colours, look[1])
                row[column].set_xlim(-0.08, 1.08)
                row[column].set_ylim(-0.08, 1.08)
    ticks = {float(core): str(core) for core in spread(range(1, budget + 1), 5)}
    colour_bar(figure, [axes[0][-1]], order_colours(), (1, max(budget, 2)), "core", ticks)
    if several:
        legend(axes[1][0], [(photo.name, look) for photo, look in zip(photos, looks, strict=True)])
    return figure


def _scatter(axis: Axes, points: Tensor, colours: Any, marker: str) -> None:
    x, y = points.T.numpy()
    axis.scatter(x[1:], y[1:], c=colours[1:], s=14, marker=marker, linewidths=0.3, edgecolors="white")
    axis.scatter(x[:1], y[:1], c=colours[:1], s=90, marker="*", linewidths=0.7, edgecolors="black")
