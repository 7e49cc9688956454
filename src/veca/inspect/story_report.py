"""The story of the cores as a table, a JSON file and a chart."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from veca.errors import ArgumentError
from veca.inspect.core_stats import BudgetStats, CoreStory, LayerStats, MeanStd
from veca.inspect.figure_inputs import cores_label
from veca.inspect.figure_layout import check_out, check_panels, create_headed_figure, marker_style
from veca.utils.files import atomic_path, check_writable
from veca.utils.text import number, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#777777"


def check_story(path: str | os.PathLike[str], chart: str | os.PathLike[str] | None = None) -> Path:
    """The path of a JSON file; raises before any work is done if it, or the chart, could not be written."""
    path = Path(path)
    if path.suffix.lower() != ".json":
        raise ArgumentError(f"{path}: numbers are written as .json; end its name so")
    if path.is_dir():
        raise ArgumentError(f"{path} is a folder; name the file to write, such as {path / 'cores.json'}")
    check_writable(path)
    if chart is not None:
        check_out(chart)
        check_panels(2, 2)
    return path


def write_story(story: CoreStory, path: str | os.PathLike[str]) -> Path:
    """All numbers as JSON; what could not be measured is null."""
    path = check_story(path)
    with atomic_path(path) as part:
        part.write_text(json.dumps(_plain(dataclasses.asdict(story)), indent=1, default=str, allow_nan=False) + "\n")
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def story_table(story: CoreStory) -> Table:
    """The numbers worth a first look, all in percent: a row for each, a column for each budget."""
    between, chunk = story.between, story.about["config"]["core_chunk"]
    table = Table(
        "cores", *map(str, story.budgets), header_style="bold", box=None, pad_edge=False, title_justify="left",
        title=f"{_title(story)}; in %, ± over pictures", caption_justify="left",
        caption=f"Features of different pictures: cosine {_percent(between.cls)} (global), {_percent(between.patches)} "
        f"(dense), CKA {_percent(between.cka)}. Lengths are in sides of the picture.",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, tell: Callable[[int, BudgetStats], MeanStd | float], end: bool = False) -> None:
        table.add_row(name, *(_percent(tell(*each)) for each in story.budgets.items()), end_section=end)

    row("moved from the start", lambda _, told: _last(told.places.distance))
    row("  length of the way", lambda _, told: _last(told.places.path))
    row("  its part by the picture", lambda _, told: told.places.picture_share[-1])
    row("  from core to core", lambda _, told: told.places.spacing, end=True)
    row("overlap of two cores' maps", lambda _, told: told.maps.overlap.overall)
    row("  one core's in two pictures", lambda _, told: told.maps.same_core.overall)
    row("  a map and an even one", lambda _, told: told.maps.even.overall)
    row("area of a map", lambda _, told: told.maps.area.overall)
    row("cores first at some patch", lambda _, told: told.maps.winners.overall, end=True)
    row("core 1 heard (even: 100)", lambda c, told: _times(told.heard.first.overall, c))
    row(f"first {chunk} heard (even: 100)", lambda c, told: _times(told.heard.chunks[0].overall, c / min(c, chunk)))
    row("core 1 looks at patches", lambda _, told: told.first_core.patches.overall)
    row("other cores at patches", lambda _, told: told.other_cores.patches.overall, end=True)
    row("global feature kept, cosine", lambda _, told: told.kept.cls)
    row("dense features kept, cosine", lambda _, told: told.kept.patches)
    row("global feature kept, CKA", lambda _, told: told.kept.cka)
    return table


def draw_story(story: CoreStory) -> Figure:
    """Four charts: how far cores move, whether their maps overlap, who is heard, what a smaller budget keeps."""
    random = story.about["provenance"].get("weights") == "random"
    model = printable(str(story.about["model"]))
    notice = f"{model} has random weights: this shows how it works, not what a trained model does." if random else ""
    whole = story.about["config"]["num_cores"]
    figure, (moves, maps, heard, kept) = charts(
        f"The story of the cores, {model}",
        f"Means over {story.about['pictures']:,} pictures of {story.about['size']} px; bands and bars are one standard "
        "deviation over pictures. Overlap: 1 if two maps are the same, 0 if they have nothing in common; in the last "
        "layer only core 1's map still reaches a feature. Heard: the share of a core in what attention adds to "
        "patches, mean over layers; 1 if all cores had the same.",
        [
            "How far cores are from their start",
            "Do cores look at different regions?",
            "Whom patches hear",
            f"What is kept of the features with {cores_label(whole)}",
        ],
        notice=notice,
    )
    for i, (budget, told) in enumerate(story.budgets.items()):
        colour, marker = marker_style(i)
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3.5, "linewidth": 1.3}
        _lines(moves, told.places.distance, 100, cores_label(budget), **look)
        moves.plot(range(1, len(told.places.scatter) + 1), [100 * s for s in told.places.scatter], ":", color=colour)
        _lines(maps, told.maps.overlap, 1, cores_label(budget), **look)
        maps.plot(range(1, len(told.maps.same_core.mean) + 1), told.maps.same_core.mean, ":", color=colour)
        layers = len(told.heard.cores)
        shares = [budget * sum(layer[core] for layer in told.heard.cores) / layers for core in range(budget)]
        heard.plot(range(1, budget + 1), shares, label=cores_label(budget), **look)
    _name(moves, "layer", "% of a side", "dotted: what depends on the picture")
    _name(maps, "layer", "overlap of maps", "dotted: one core in two pictures")
    moves.set_ylim(bottom=0)
    maps.set_ylim(0, 1.02)  # whole, or maps that are all alike would seem to differ
    heard.set_ylim(0, 1.1 * heard.get_ylim()[1])
    heard.axhline(1, color=GREY, linewidth=1)
    _name(heard, "core", "× an even share")
    _draw_kept(kept, story)
    return figure


def _draw_kept(axis: Axes, story: CoreStory) -> None:
    budgets, told = list(story.budgets), [each.kept for each in story.budgets.values()]
    between = story.between
    ways: list[tuple[str, Sequence[float], Sequence[float] | None, float]] = [
        ("global feature, cosine", [each.cls.mean for each in told], [each.cls.std for each in told], between.cls.mean),
        (
            "dense features, cosine",
            [each.patches.mean for each in told],
            [each.patches.std for each in told],
            between.patches.mean,
        ),
        ("global feature, CKA", [each.cka for each in told], None, between.cka),
    ]
    for i, (name, means, spreads, floor) in enumerate(ways):
        colour, marker = marker_style(i)
        axis.errorbar(
            budgets, means, spreads, label=name, color=colour, marker=marker, markersize=3.5, linewidth=1.3, capsize=2
        )  # fmt: skip
        if math.isfinite(floor):
            axis.axhline(floor, color=colour, linestyle=":")
    axis.set_xticks(budgets)
    _name(axis, "cores", "likeness", "dotted: between pictures")


def _lines(axis: Axes, values: LayerStats, scale: float, label: str, **look: Any) -> None:
    layers = range(1, len(values.mean) + 1)
    low, high = ([scale * (m + sign * s) for m, s in zip(values.mean, values.std, strict=True)] for sign in (-1, 1))
    axis.plot(layers, [scale * mean for mean in values.mean], label=label, **look)
    axis.fill_between(layers, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _name(axis: Axes, across: str, up: str, note: str = "") -> None:
    axis.set_xlabel(f"{across} ({note})" if note else across, fontsize=8)
    axis.set_ylabel(up, fontsize=8)
    axis.legend(fontsize=7, frameon=False)


def _title(story: CoreStory) -> str:
    about = story.about
    return f"{printable(str(about['model']))}, {about['pictures']:,} pictures, {about['size']} px"


def _last(values: LayerStats) -> MeanStd:
    return MeanStd(values.mean[-1], values.std[-1])


def _times(value: MeanStd, factor: float) -> MeanStd:
    return MeanStd(factor * value.mean, factor * value.std)


def _percent(value: MeanStd | float) -> str:
    if isinstance(value, MeanStd):
        return f"{_percent(value.mean)} ± {_percent(value.std)}"
    return number(100 * value, ".1f")


def charts(title: str, text: str, names: Sequence[str], *, notice: str = "") -> tuple[Figure, list[Axes]]:
    """An empty figure and its charts, two in a row: axes with ticks, room for their names, and a title each."""
    left, right, above, wide, tall, under = 0.75, 0.15, 0.35, 3.35, 2.3, 0.55
    rows = -(-len(names) // 2)
    width = 2 * (left + wide + right)
    figure, head = create_headed_figure(title, text, notice, width, rows * (above + tall + under))
    height = figure.get_size_inches()[1]
    axes = []
    for i, name in enumerate(names):
        x, y = left + i % 2 * (left + wide + right), head + above + i // 2 * (above + tall + under)
        axis = figure.add_axes((x / width, 1 - (y + tall) / height, wide / width, tall / height))
        axis.set_title(name, fontsize=9, loc="left", pad=4, parse_math=False)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        axes.append(axis)
    return figure, axes
