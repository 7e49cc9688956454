"""Charts in the paper's form: FLOPs and latency against resolution, latency against batch size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from veca.bench.report import BenchRow, Results
from veca.config import SIZES
from veca.flops import attention_flops, dense_attention_flops
from veca.report.charts import Chart, Line, Point, chart_grid, line_chart, write_chart

PlotFormat: TypeAlias = Literal["svg", "png"]
RESOLUTIONS = (256, 384, 512, 768, 1024)
# By words in a contender's name: the colour says which model, the dashes how it is run.
MODEL_COLOURS = {"veca": 1, "dense": 0, "two SDPA": 4, "products": 3}
RUN_DASHES = {"eager": "2 3", "compiled": "7 4", "checkpointed": "10 3 2 3", "float8": "10 3 2 3", "without": "2 3"}


class Panel(NamedTuple):
    """One chart: its title and its lines, by name."""

    title: str
    lines: dict[str, list[Point]]


def write_plots(files: Sequence[Path], folder: Path, form: PlotFormat = "svg") -> list[Path]:
    """Write a chart of FLOPs, and of latency where `files` (results.json of runs) have several points of a line."""
    runs = [Results.load(path) for path in files]
    plots = {
        "flops-resolution": (flops_panels(), "resolution, px", "GFLOPs per image"),
        "latency-resolution": (latency_panels(runs, "size"), "resolution, px", "ms"),
        "latency-batch": (latency_panels(runs, "batch"), "batch size", "ms"),
    }
    return [
        write_chart(chart_grid([_draw_panel(panel, *titles) for panel in panels], columns=3), folder / f"{name}.{form}")
        for name, (panels, *titles) in plots.items()
        if panels
    ]


def flops_panels() -> list[Panel]:
    """FLOPs of the attention path of one layer, exactly, at 64 cores."""
    panels = []
    for size in ("small", "base", "large"):
        config = SIZES[f"veca_{size}"]
        lines = {
            "veca, 64 cores": [(float(px), attention_flops(config, px, px, 64) / 1e9) for px in RESOLUTIONS],
            "dense (DINOv3)": [(float(px), dense_attention_flops(config, px, px) / 1e9) for px in RESOLUTIONS],
        }
        panels.append(Panel(f"{size}: attention path of one layer", lines))
    return panels


def latency_panels(runs: Sequence[Results], along: Literal["size", "batch"]) -> list[Panel]:
    """A panel for all rows that differ only in `along` and the contender, where a contender has two points or more."""
    groups: dict[str, dict[str, list[Point]]] = {}
    for run in runs:
        for row in run.rows:
            if isinstance(row.ms, int | float) and row.ms > 0:
                lines = groups.setdefault(_panel_title(run, row, along), {})
                lines.setdefault(row.contender, []).append((float(getattr(row, along)), row.ms))
    panels = []
    for title, lines in groups.items():
        if drawn := {name: sorted(points) for name, points in lines.items() if len({x for x, _ in points}) > 1}:
            panels.append(Panel(title, drawn))
    return panels


def _panel_title(run: Results, row: BenchRow, along: Literal["size", "batch"]) -> str:
    fixed = f"batch {row.batch}" if along == "size" else f"{row.size} px"
    size, dtype = row.model.removeprefix("veca_"), run.settings.get("dtype", "")
    return f"{row.what}: {size}, {fixed}, C = {row.cores}\n{run.machine.get('device', '')}, {dtype}"


def _draw_panel(panel: Panel, x_title: str, y_title: str) -> tuple[str, Chart]:
    lines = []
    for name, points in panel.lines.items():
        colour = next((colour for start, colour in MODEL_COLOURS.items() if name.startswith(start)), 2)
        dash = next((dash for word, dash in RUN_DASHES.items() if word in name), "")
        lines.append(Line(name, points, colour, dots=True, dash=dash))
    label = f"{panel.title}: {y_title} against {x_title}"
    chart = line_chart(lines, x_title, y_title, label, ticks_at_points=True, log_x=True, y_scale="log")
    return panel.title, chart
