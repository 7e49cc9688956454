"""Results of `veca cores`: a table for the terminal, a JSON file, and a chart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

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
    between, chunk = story.between, story.about["config"]["core_chunk"]
    model, count = printable(str(story.about["model"])), story.about["pictures"]
    table = Table(
        "cores", *map(str, story.budgets), header_style="bold", box=None, pad_edge=False, title_justify="left",
        title=f"{model}, {count:,} pictures, {story.about['size']} px; in %, ± over pictures", caption_justify="left",
        caption=f"Features of different pictures: cosine {_percent_text(between.cls)} (global), "
        f"{_percent_text(between.patches)} (dense), CKA {_percent_text(between.cka)}. "
        "Lengths are in sides of the picture.",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    # (name, value at a budget C); without a value, a section ends.
    rows: list[tuple[str, Callable[[int, BudgetStats], MeanStd | float] | None]] = [
        ("moved from the start", lambda _, at: _last_layer(at.places.distance)),
        ("  length of the way", lambda _, at: _last_layer(at.places.path)),
        ("  its part by the picture", lambda _, at: at.places.picture_share[-1]),
        ("  from core to core", lambda _, at: at.places.spacing),
        ("", None),
        ("overlap of two cores' maps", lambda _, at: at.maps.overlap.overall),
        ("  one core's in two pictures", lambda _, at: at.maps.same_core.overall),
        ("  a map and an even one", lambda _, at: at.maps.even.overall),
        ("area of a map", lambda _, at: at.maps.area.overall),
        ("cores first at some patch", lambda _, at: at.maps.winners.overall),
        ("", None),
        ("core 1 heard (even: 100)", lambda c, at: _scaled(at.heard.first.overall, c)),
        (f"first {chunk} heard (even: 100)", lambda c, at: _scaled(at.heard.chunks[0].overall, c / min(c, chunk))),
        ("core 1 looks at patches", lambda _, at: at.first_core.patches.overall),
        ("other cores at patches", lambda _, at: at.other_cores.patches.overall),
        ("", None),
        ("global feature kept, cosine", lambda _, at: at.kept.cls),
        ("dense features kept, cosine", lambda _, at: at.kept.patches),
        ("global feature kept, CKA", lambda _, at: at.kept.cka),
    ]
    for name, value in rows:
        if value is None:
            table.add_section()
        else:
            table.add_row(name, *(_percent_text(value(c, at)) for c, at in story.budgets.items()))
    return table


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
        moves.append(Line(name, _by_number([100 * mean for mean in distance.mean]), i, dots=True, band=band))
        moves.append(Line("", _by_number([100 * scatter for scatter in at.places.scatter]), i, dash=DOTTED))
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


def _by_number(values: Sequence[float]) -> list[Point]:
    """Values of layers or cores, which are counted from 1."""
    return [(float(i), value) for i, value in enumerate(values, 1)]


def _draw_kept(story: CoreStory) -> Chart:
    budgets, kept, between = list(story.budgets), [at.kept for at in story.budgets.values()], story.between
    kinds = [
        ("global, cosine", [k.cls.mean for k in kept], [k.cls.std for k in kept], between.cls.mean),
        ("dense, cosine", [k.patches.mean for k in kept], [k.patches.std for k in kept], between.patches.mean),
        ("global, CKA", [k.cka for k in kept], [], between.cka),
    ]
    lines = []
    for i, (name, means, stds, unlike) in enumerate(kinds):
        points = [(float(budget), mean) for budget, mean in zip(budgets, means, strict=True)]
        lines.append(Line(name, points, i, dots=True, band=stds))
        lines.append(Line("", [(float(budget), unlike) for budget in budgets], i, dash=DOTTED))
    return line_chart(lines, "cores", "likeness", "likeness of features at smaller budgets", ticks_at_points=True)


def _last_layer(values: LayerStats) -> MeanStd:
    return MeanStd(values.mean[-1], values.std[-1])


def _scaled(value: MeanStd, factor: float) -> MeanStd:
    return MeanStd(factor * value.mean, factor * value.std)


def _percent_text(value: MeanStd | float) -> str:
    if isinstance(value, MeanStd):
        return f"{_percent_text(value.mean)} ± {_percent_text(value.std)}"
    return number(100 * value, ".1f")
