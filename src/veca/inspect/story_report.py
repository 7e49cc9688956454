"""Results of `veca cores`: a table for the terminal, a JSON file, and a chart."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from veca.inspect.core_stats import BudgetStats, CoreStory, LayerStats, MeanStd
from veca.inspect.figure_layout import PathLike, check_out, cores_label, figure_settings
from veca.report.charts import Chart, Line, Point, chart_grid, line_chart
from veca.utils.files import atomic_path
from veca.utils.text import number, printable

DOTTED = "1 4"  # of lines to compare with


def check_story(path: PathLike, chart: PathLike | None = None) -> Path:
    """The path of the JSON file; raises before any work is done if it, or the chart, could not be written."""
    path = check_out(path, "numbers are", (".json",), "cores.json")
    if chart is not None:
        check_out(chart)
    return path


def write_story(story: CoreStory, path: PathLike) -> Path:
    """Write all numbers as JSON; what could not be measured is null."""
    path = check_story(path)
    # JSON has no nan and infinity: reading back what Python writes replaces them.
    values = json.loads(json.dumps(dataclasses.asdict(story), default=str), parse_constant=lambda _: None)
    with atomic_path(path) as part:
        part.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
    return path


def story_table(story: CoreStory) -> Table:
    """The main numbers in percent: a row for each, a column for each budget."""
    about, chunk = story.about, story.about["config"]["core_chunk"]
    model = printable(str(about["model"]))
    title = f"{model}, {about['pictures']:,} pictures, {about['size']} px; in %, ± over pictures"
    cosines = f"{_percent_text(story.between.cls)} (global), {_percent_text(story.between.patches)} (dense)"
    caption = f"Features of different pictures: cosine {cosines}, CKA {_percent_text(story.between.cka)}. "
    caption += "Lengths are in sides of the picture."
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=None, pad_edge=False)
    for header in ("cores", *map(str, story.budgets)):
        table.add_column(header, header_style="bold", justify="left" if header == "cores" else "right")
    for name, *path in figure_settings("story")["rows"]:
        # Shares of cores in what patches hear are relative to an even share; this many cores are meant.
        heard = {"first": 1, "chunks": chunk}.get(path[1], math.inf)
        cells = [_percent_text(_look_up(at, path), c / min(c, heard)) for c, at in story.budgets.items()]
        table.add_row(name.format(chunk=chunk), *cells)
    return table


def _look_up(stats: BudgetStats, path: Sequence[str | int]) -> MeanStd | float:
    """The number at a path of fields and indices; of the last layer where it has several."""
    value: Any = stats
    for key in path:
        value = value[key] if isinstance(key, int) else getattr(value, key)
    return MeanStd(value.mean[-1], value.std[-1]) if isinstance(value, LayerStats) else value


def _percent_text(value: MeanStd | float, factor: float = 1.0) -> str:
    if isinstance(value, MeanStd):
        return f"{_percent_text(value.mean, factor)} ± {_percent_text(value.std, factor)}"
    return number(100 * factor * value, ".1f")


def draw_story(story: CoreStory) -> Chart:
    """Four charts: how far cores move, whether their maps overlap, who is heard, what a smaller budget keeps."""
    about, texts = story.about, figure_settings("story")
    model = printable(str(about["model"]))
    even_share = Line("", [(1, 1), (max(story.budgets), 1)], quoted=True, dash=DOTTED)
    moves, maps, heard = list[Line](), list[Line](), [even_share]
    for i, (budget, at) in enumerate(story.budgets.items()):
        name = cores_label(budget)
        distance, overlap, layers = at.places.distance, at.maps.overlap, len(at.heard.cores)
        band = [100 * std for std in distance.std]
        moves.append(Line(name, _by_number(distance.mean, 100), i, dots=True, band=band))
        moves.append(Line("", _by_number(at.places.scatter, 100), i, dash=DOTTED))
        maps.append(Line(name, _by_number(overlap.mean), i, dots=True, band=overlap.std))
        maps.append(Line("", _by_number(at.maps.same_core.mean), i, dash=DOTTED))
        shares = [budget * sum(layer[core] for layer in at.heard.cores) / layers for core in range(budget)]
        heard.append(Line(name, _by_number(shares), i))
    whole = cores_label(about["config"]["num_cores"])
    charts = [
        line_chart(moves, "layer", "% of a side", "distance of the cores from their start", include=[0]),
        # The whole range, or maps that are all alike would seem to differ.
        line_chart(maps, "layer", "overlap of maps", "overlap of two cores' maps", include=[0, 1]),
        line_chart(heard, "core", "× an even share", "share of each core in what patches read", include=[0]),
        _draw_kept(story),
    ]
    panels = [(title.format(cores=whole), chart) for title, chart in zip(texts["charts"], charts, strict=True)]
    notice = texts["notice"].format(model=model) if about["provenance"].get("weights") == "random" else ""
    caption = texts["text"].format_map(about)
    return chart_grid(panels, title=texts["title"].format(model=model), notice=notice, caption=caption)


def _by_number(values: Sequence[float], factor: float = 1.0) -> list[Point]:
    """Values of layers or cores, which are counted from 1."""
    return [(float(i), factor * value) for i, value in enumerate(values, 1)]


def _draw_kept(story: CoreStory) -> Chart:
    lines, budgets = [], [float(budget) for budget in story.budgets]
    names = "global, cosine", "dense, cosine", "global, CKA"
    for i, (name, field) in enumerate(zip(names, ("cls", "patches", "cka"), strict=True)):
        values = [getattr(features, field) for features in (*(at.kept for at in story.budgets.values()), story.between)]
        *means, unlike = values if field == "cka" else [value.mean for value in values]
        stds = [] if field == "cka" else [value.std for value in values[:-1]]
        lines.append(Line(name, list(zip(budgets, means, strict=True)), i, dots=True, band=stds))
        lines.append(Line("", [(budget, unlike) for budget in budgets], i, dash=DOTTED))
    return line_chart(lines, "cores", "likeness", "likeness of features at smaller budgets", ticks_at_points=True)
