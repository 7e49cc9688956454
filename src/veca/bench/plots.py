"""Plots in the paper's form: FLOPs and latency against resolution, latency against batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from veca.bench.report import Results, Row
from veca.config import SIZES
from veca.errors import needs_extra
from veca.flops import attention_flops, dense_attention_flops
from veca.utils.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Format: TypeAlias = Literal["svg", "png"]
RESOLUTIONS = (256, 384, 512, 768, 1024)
COLOURS = {"veca": "#c1272d", "dense": "#0b4f8a", "two SDPA": "#d98c00", "products": "#777777"}
"""By the first words of a contender; the ways to run one model differ by line and marker."""


class Panel(NamedTuple):
    """One set of axes: its title and its lines, each a name and points (x, y)."""

    title: str
    lines: dict[str, list[tuple[float, float]]]


def write_plots(files: Sequence[Path], folder: Path, form: Format = "svg") -> list[Path]:
    """One file per plot that `files` (results.json of runs) have something for; the FLOPs need none."""
    _figure_class()
    runs = [Results.load(path) for path in files]
    drawn = {
        "flops-resolution": (flops_panels(), "resolution, px", "GFLOPs per image"),
        "latency-resolution": (latency_panels(runs, "size"), "resolution, px", "ms"),
        "latency-batch": (latency_panels(runs, "batch"), "batch size", "ms"),
    }
    paths = []
    for name, (panels, across, up) in drawn.items():
        if panels:
            paths.append(folder / f"{name}.{form}")
            _draw(panels, across, up, paths[-1])
    return paths


def flops_panels() -> list[Panel]:
    """The attention path of one layer, exactly, at 64 cores."""
    panels = []
    for size in ("small", "base", "large"):
        config = SIZES[f"veca_{size}"]
        count: dict[str, Callable[[int], int]] = {
            "veca, 64 cores": lambda px, config=config: attention_flops(config, px, px, 64),  # type: ignore[misc]
            "dense (DINOv3)": lambda px, config=config: dense_attention_flops(config, px, px),  # type: ignore[misc]
        }
        lines = {name: [(float(px), flops(px) / 1e9) for px in RESOLUTIONS] for name, flops in count.items()}
        panels.append(Panel(f"{size}: attention path of one layer", lines))
    return panels


def latency_panels(runs: Sequence[Results], along: Literal["size", "batch"]) -> list[Panel]:
    """A panel for all rows that differ in `along` and the contender alone, where there are two points or more."""
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for run in runs:
        for row in run.rows:
            if row.ms is not None:
                lines = groups.setdefault(_title(run, row, along), {})
                lines.setdefault(row.contender, []).append((float(getattr(row, along)), row.ms))
    panels = []
    for title, lines in groups.items():
        kept = {name: sorted(points) for name, points in lines.items() if len({x for x, _ in points}) > 1}
        if kept:
            panels.append(Panel(title, kept))
    return panels


def _title(run: Results, row: Row, along: Literal["size", "batch"]) -> str:
    fixed = f"batch {row.batch}" if along == "size" else f"{row.size} px"
    size, dtype = row.model.removeprefix("veca_"), run.settings.get("dtype", "")
    return f"{row.what}: {size}, {fixed}, C = {row.cores}\n{run.machine.get('device', '')}, {dtype}"


def _draw(panels: Sequence[Panel], across: str, up: str, path: Path) -> None:
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure_class()(figsize=(4.6 * columns, 3.8 * rows))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel, across, up)
    figure.tight_layout()
    with atomic_path(path) as part:
        figure.savefig(part, format=path.suffix[1:], dpi=160)


def _draw_panel(axis: Axes, panel: Panel, across: str, up: str) -> None:
    from matplotlib.ticker import LogLocator

    for name, points in panel.lines.items():
        x, y = zip(*points, strict=True)
        axis.plot(x, y, label=name, **_look(name))
    ticks = sorted({x for points in panel.lines.values() for x, _ in points})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.minorticks_off()
    axis.set_title(panel.title, fontsize=9)
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def _look(name: str) -> dict[str, Any]:
    colour = next((colour for start, colour in COLOURS.items() if name.startswith(start)), None)
    ways = {"eager": ":", "compiled": "--", "checkpointed": "-.", "float8": "-.", "without": ":"}
    line = next((line for way, line in ways.items() if way in name), "-")
    return {"color": colour, "linestyle": line, "marker": "o", "markersize": 3.5}


def _figure_class() -> Any:
    with needs_extra("plots need", "bench"):
        import matplotlib  # noqa: F401
        from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the whole process
    return Figure
