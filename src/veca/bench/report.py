"""Results of a benchmark: rows, their files (JSON, CSV, text), tables, and charts in the paper's form."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from veca.bench.contenders import Case
from veca.config import SIZES
from veca.errors import ArgumentError
from veca.flops import attention_flops, dense_attention_flops
from veca.report.charts import Chart, Line, Point, chart_grid, line_chart, write_chart
from veca.utils.console import PlainConsole
from veca.utils.files import atomic_path

PlotFormat: TypeAlias = Literal["svg", "png"]
Panels: TypeAlias = dict[str, dict[str, list[Point]]]
"""Charts by title, each with the points of its lines by name."""
RESOLUTIONS = (256, 384, 512, 768, 1024)
# By words in a contender's name: the colour says which model, the dashes how it is run.
MODEL_COLOURS = {"veca": 1, "dense": 0, "two SDPA": 4, "products": 3}
RUN_DASHES = {"eager": "2 3", "compiled": "7 4", "checkpointed": "10 3 2 3", "float8": "10 3 2 3", "without": "2 3"}


@dataclass(frozen=True)
class BenchRow:
    """One contender in one case. None: not applicable there, or `failure` says why it could not be measured."""

    what: str
    """`model forward`, `train step`, `attention forward` or `attention backward`."""
    contender: str
    model: str
    size: int
    batch: int
    cores: int
    width: float = 1.0
    ms: float | None = None
    """Median."""
    best_ms: float | None = None
    images_per_s: float | None = None
    gflops: float | None = None
    """Per image, counted: matrix products, 2 per multiply-add; a training step is three forward passes."""
    tflops_per_s: float | None = None
    peak_mib: float | None = None
    """Peak memory above what was in use before; in a training step weights and gradients count too. CUDA only."""
    floor_ms: float | None = None
    floor_share: float | None = None
    """floor_ms / ms: 1 would be the floor."""
    against_dense: float | None = None
    """Time of the dense contender of the case, compiled if it took part, over the time of this one."""
    target_ms: float | None = None
    first_call_s: float | None = None
    """Of a compiled contender: seconds until its first result, compilation included."""
    error: float | None = None
    """‖result − exact‖ / ‖exact‖, exact being VECA in float64; see `veca.bench.run`."""
    against_eager: float | None = None
    """`error` over that of plain eager VECA in the same case."""
    failure: str | None = None
    """Why there is no time, or no error."""

    @property
    def case(self) -> Case:
        return Case(self.model, self.size, self.batch, self.cores, self.width)


@dataclass
class Results:
    """A whole run: machine, settings, floors, rows and, if requested, a profile."""

    machine: dict[str, str]
    settings: dict[str, str]
    floors: dict[str, float]
    rows: list[BenchRow] = field(default_factory=list)
    profile: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Why a floor is missing."""

    def save(self, folder: Path) -> None:
        """Write results.json, results.csv and table.txt."""
        save_results(self, BenchRow, folder)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read the results.json that `save` wrote."""
        try:
            values = json.loads(path.read_text())
            results = cls(**{**values, "rows": [BenchRow(**row) for row in values["rows"]]})
            if not all(type(n) is int for row in results.rows for n in (row.size, row.batch, row.cores)):
                raise TypeError("size, batch or cores of a row is no whole number")
            return results
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ArgumentError(f"{path} is no results.json of `veca bench`: {error}") from error

    def show(self, console: Console) -> None:
        """Print the header, a table for each kind of measurement, failures and profiles."""
        say = partial(console.print, markup=False, soft_wrap=True, highlight=False)
        say(", ".join(f"{key} {value}" for key, value in {**self.machine, **self.settings}.items()))
        if self.floors:
            floors = ", ".join(f"{four_digits(v)} {key}" for key, v in self.floors.items())
            say("Measured in this run, the floors:", floors)
        for reason in self.refused:
            say(reason)
        for what in dict.fromkeys(row.what for row in self.rows):
            print_table(_rows_table(what, [row for row in self.rows if row.what == what]), console)
        for row in self.rows:
            if row.failure:
                say(f"{row.what}, {row.case}, {row.contender}: {row.failure}")
        for entry in self.profile:
            say(f"\nWhere the time goes: {entry['what']}, {entry['case']}, {entry['contender']}")
            for name, seconds, times in entry["spent"]:
                say(f"{four_digits(1e3 * seconds):>10} ms {times:5} × {name[:120]}")


@dataclass(frozen=True)
class StageRow:
    """A stage of embedding at work alone, or a whole run."""

    stage: str
    images_per_s: float
    """Median of the rounds."""
    us_per_image: float
    spread: float
    """Highest less lowest rate of the rounds, over the median."""
    start_s: float | None = None
    """Seconds of a run of one image: the rate is that of the images after it."""
    model_share: float | None = None
    """Of a run: its rate over that of the model alone."""
    gpu_busy: float | None = None
    """Of a run on a GPU: share of the time in which the model is at work."""


@dataclass
class EmbedResults:
    """A benchmark of embedding: machine, settings, stages, and what holds runs up."""

    machine: dict[str, str]
    settings: dict[str, str]
    rows: list[StageRow]
    start: dict[str, float]
    """Seconds that the command takes for one image, in a new process."""
    bottleneck: str

    def save(self, folder: Path) -> None:
        """Write results.json, results.csv and table.txt."""
        save_results(self, StageRow, folder)

    def show(self, console: Console) -> None:
        """Print the table, and the bottleneck last."""
        console.print(", ".join(f"{k} {v}" for k, v in {**self.machine, **self.settings}.items()), soft_wrap=True)
        table = Table("stage", title="embedding", title_justify="left", title_style="bold", box=None)
        for heading in ("images/s", "µs/image", "spread"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("note", no_wrap=True)
        for row in self.rows:
            notes = {"for the first image": four_digits(row.start_s, ".1f") and f"{row.start_s:.1f} s"}
            notes |= {"of the model alone": four_digits(row.model_share, ".0%")}
            notes |= {"GPU busy": four_digits(row.gpu_busy, ".0%")}
            note = ", ".join(f"{value} {what}" for what, value in notes.items() if value)
            table.add_row(row.stage, *map(four_digits, (row.images_per_s, row.us_per_image)), f"{row.spread:.0%}", note)
        print_table(table, console)
        for what, seconds in self.start.items():
            console.print(f"`veca embed` of one image, {what}: {seconds:.1f} s", soft_wrap=True)
        console.print(self.bottleneck, soft_wrap=True)


def save_results(results: Any, row: Any, folder: Path) -> None:
    """Write results, whose `rows` are of the dataclass `row`, as results.json, results.csv and table.txt."""
    with atomic_path(folder / "results.json") as part:
        part.write_text(json.dumps(dataclasses.asdict(results), indent=1) + "\n")
    with atomic_path(folder / "results.csv") as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, [column.name for column in dataclasses.fields(row)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(each) for each in results.rows)
    with atomic_path(folder / "table.txt") as part, part.open("w") as file:
        results.show(PlainConsole(file=file))


def print_table(table: Table, console: Console) -> None:
    """Print a table in full width: a figure cut off to fit a narrow window would be worse than a line that wraps."""
    table.width = Measurement.get(console, console.options.update(width=1000), table).maximum
    console.print(table, crop=False)


# Fields of a row that are columns of its table: heading, and format where it is not four digits.
_TABLE_COLUMNS = {
    "ms": ("ms", ""), "best_ms": ("best", ""), "images_per_s": ("images/s", ""), "gflops": ("GFLOPs/image", ""),
    "tflops_per_s": ("TFLOP/s", ""), "peak_mib": ("peak MiB", ""), "floor_ms": ("floor ms", ""),
    "floor_share": ("of floor", ".0%"), "against_dense": ("× dense", ".2f"), "target_ms": ("target ms", ""),
    "first_call_s": ("first call s", ""), "error": ("error", ".2e"), "against_eager": ("× eager", ".2f"),
}  # fmt: skip


def _rows_table(what: str, rows: Sequence[BenchRow]) -> Table:
    """Rows of one kind, case by case; columns without any value are left out, except `ms`."""
    filled = [key for key in _TABLE_COLUMNS if key == "ms" or any(getattr(row, key) is not None for row in rows)]
    columns = {key: _TABLE_COLUMNS[key] for key in filled}
    table = Table(title=what, title_justify="left", title_style="bold", header_style="bold", box=None)
    for heading in ("case", "contender", *(heading for heading, _ in columns.values())):
        table.add_column(heading, justify="left" if heading in ("case", "contender") else "right", no_wrap=True)
    case = None
    for row in rows:
        cells = [four_digits(getattr(row, key), form) for key, (_, form) in columns.items()]
        style = "red" if row.failure else ""
        if row.ms is None:
            cells[0] = "failed" if row.failure else ""
        elif row.target_ms is not None and not row.failure:
            style = "green" if row.ms <= row.target_ms else "yellow"
        table.add_row("" if row.case == case else str(row.case), row.contender, *cells, style=style)
        case = row.case
    return table


def four_digits(value: float | None, form: str = "") -> str:
    """A measured number with four significant digits, unless `form` says otherwise; None is empty.

    >>> four_digits(0.18042), four_digits(24.1), four_digits(1321.4), four_digits(0.567, ".0%"), four_digits(None)
    ('0.1804', '24.10', '1,321', '57%', '')
    """
    if value is None:
        return ""
    digits = 4 if value < 1 else max(0, 3 - math.floor(math.log10(value)))
    return format(value, form or f",.{digits}f")


def write_plots(files: Sequence[Path], folder: Path, form: PlotFormat = "svg") -> list[Path]:
    """Write a chart of FLOPs, and of latency where `files` (results.json of runs) have several points of a line."""
    runs = [Results.load(path) for path in files]
    plots = {
        "flops-resolution": (flops_panels(), "resolution, px", "GFLOPs per image"),
        "latency-resolution": (latency_panels(runs, "size"), "resolution, px", "ms"),
        "latency-batch": (latency_panels(runs, "batch"), "batch size", "ms"),
    }
    paths = []
    for name, (panels, x_title, y_title) in plots.items():
        charts = [(title, _draw_panel(title, lines, x_title, y_title)) for title, lines in panels.items()]
        if charts:
            paths.append(write_chart(chart_grid(charts, columns=3), folder / f"{name}.{form}"))
    return paths


def flops_panels() -> Panels:
    """FLOPs of the attention path of one layer, exactly, at 64 cores."""
    panels: Panels = {}
    for size in ("small", "base", "large"):
        config = SIZES[f"veca_{size}"]
        panels[f"{size}: attention path of one layer"] = {
            "veca, 64 cores": [(float(px), attention_flops(config, px, px, 64) / 1e9) for px in RESOLUTIONS],
            "dense (DINOv3)": [(float(px), dense_attention_flops(config, px, px) / 1e9) for px in RESOLUTIONS],
        }
    return panels


def latency_panels(runs: Sequence[Results], along: Literal["size", "batch"]) -> Panels:
    """A panel for all rows that differ only in `along` and the contender, where a contender has two points or more."""
    panels: Panels = {}
    for run in runs:
        for row in run.rows:
            if isinstance(row.ms, int | float) and row.ms > 0:
                fixed = f"batch {row.batch}" if along == "size" else f"{row.size} px"
                title = f"{row.what}: {row.model.removeprefix('veca_')}, {fixed}, C = {row.cores}"
                title += f", width {row.width:g}\n" if row.width != 1 else "\n"
                title += f"{run.machine.get('device', '')}, {run.settings.get('dtype', '')}"
                lines = panels.setdefault(title, {})
                lines.setdefault(row.contender, []).append((float(getattr(row, along)), row.ms))
    for title, lines in panels.items():
        panels[title] = {name: sorted(points) for name, points in lines.items() if len({x for x, _ in points}) > 1}
    return {title: lines for title, lines in panels.items() if lines}


def _draw_panel(title: str, lines: dict[str, list[Point]], x_title: str, y_title: str) -> Chart:
    drawn = []
    for name, points in lines.items():
        colour = next((colour for start, colour in MODEL_COLOURS.items() if name.startswith(start)), 2)
        dash = next((dash for word, dash in RUN_DASHES.items() if word in name), "")
        drawn.append(Line(name, points, colour, dots=True, dash=dash))
    label = f"{title}: {y_title} against {x_title}"
    return line_chart(drawn, x_title, y_title, label, ticks_at_points=True, log_x=True, y_scale="log")
