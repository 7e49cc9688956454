"""Results of a benchmark: rows, their files (JSON, CSV, text) and their tables."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from veca.bench.cases import Case
from veca.errors import ArgumentError
from veca.utils.console import PlainConsole
from veca.utils.files import atomic_path


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
    """‖result − exact‖ / ‖exact‖, exact being VECA in float64; see `veca.bench.accuracy`."""
    against_eager: float | None = None
    """`error` over that of plain eager VECA in the same case."""
    failure: str | None = None
    """Why there is no time, or no error."""

    @property
    def case(self) -> Case:
        return Case(self.model, self.size, self.batch, self.cores)


@dataclass
class Results:
    """A whole run: machine, settings, floors, rows and, if requested, a profile."""

    machine: dict[str, str]
    settings: dict[str, str]
    floors: dict[str, float]
    rows: list[BenchRow] = field(default_factory=list)
    profile: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> list[Path]:
        """Write results.json, results.csv and table.txt."""
        paths = [folder / name for name in ("results.json", "results.csv", "table.txt")]
        with atomic_path(paths[0]) as part:
            part.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        with atomic_path(paths[1]) as part, part.open("w", newline="") as file:
            writer = csv.DictWriter(file, [column.name for column in dataclasses.fields(BenchRow)])
            writer.writeheader()
            writer.writerows(dataclasses.asdict(row) for row in self.rows)
        with atomic_path(paths[2]) as part, part.open("w") as file:
            self.show(PlainConsole(file=file))
        return paths

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
        say("Measured in this run, the floors:", ", ".join(f"{four_digits(v)} {key}" for key, v in self.floors.items()))
        for what in dict.fromkeys(row.what for row in self.rows):
            table = _rows_table(what, [row for row in self.rows if row.what == what])
            # A figure cut off to fit a narrow window would be worse than a line that wraps.
            table.width = Measurement.get(console, console.options.update(width=1000), table).maximum
            console.print(table, crop=False)
        for row in self.rows:
            if row.failure:
                say(f"{row.what}, {row.case}, {row.contender}: {row.failure}")
        for entry in self.profile:
            say(f"\nWhere the time goes: {entry['what']}, {entry['case']}, {entry['contender']}")
            for name, seconds, times in entry["spent"]:
                say(f"{four_digits(1e3 * seconds):>10} ms {times:5} × {name[:120]}")


# Fields of a row that are columns of its table: heading, and format where it is not four digits.
_TABLE_COLUMNS = {
    "ms": ("ms", ""), "best_ms": ("best", ""), "images_per_s": ("images/s", ""), "gflops": ("GFLOPs/image", ""),
    "tflops_per_s": ("TFLOP/s", ""), "peak_mib": ("peak MiB", ""), "floor_ms": ("floor ms", ""),
    "floor_share": ("of floor", ".0%"), "against_dense": ("× dense", ".2f"), "target_ms": ("target ms", ""),
    "first_call_s": ("first call s", ""), "error": ("error", ".2e"), "against_eager": ("× eager", ".2f"),
}  # fmt: skip


def _rows_table(what: str, rows: Sequence[BenchRow]) -> Table:
    """Rows of one kind, case by case; columns without any value are left out, except `ms`."""
    filled = {key for key in _TABLE_COLUMNS for row in rows if getattr(row, key) is not None} | {"ms"}
    columns = {key: column for key, column in _TABLE_COLUMNS.items() if key in filled}
    table = Table(title=what, title_justify="left", title_style="bold", header_style="bold", box=None)
    table.add_column("case", no_wrap=True)
    table.add_column("contender", no_wrap=True)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    case = None
    for row in rows:
        cells = [four_digits(getattr(row, key), form) for key, (_, form) in columns.items()]
        if row.failure and row.ms is None:
            cells[0] = "failed"
        style = "red" if row.failure else ""
        if not row.failure and row.ms is not None and row.target_ms is not None:
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


def baseline(times: Mapping[str, float]) -> float | None:
    """The time of the dense contender, the compiled one if it took part."""
    names = ("dense compiled", "dense", "dense SDPA compiled", "dense SDPA")
    return next((times[name] for name in names if name in times), None)
