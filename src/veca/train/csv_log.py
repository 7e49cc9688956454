"""Files of a run: CSV tables and events, appended line by line and readable even if the run was killed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from veca.errors import ArgumentError
from veca.utils.files import atomic_path

LOSS_COLUMNS = ("total", "cls", "dense", "cosine", "mse")
"""Losses in the order of the table's columns; other columns follow alphabetically."""
METRICS, VALIDATION, EVENTS = "metrics.csv", "validation.csv", "events.txt"
RUN_FILES = (METRICS, VALIDATION, EVENTS, "recipe.yaml")
TABLE_KEYS = {METRICS: ["step", "time"], VALIDATION: ["step", "resolution", "budget"]}
"""First columns of each table."""

Grid = Mapping[tuple[int, int], Mapping[str, float]]
"""Losses by name, at each (resolution, budget)."""


def is_run(folder: Path) -> bool:
    """Whether a folder has any file of a training run."""
    return any((folder / name).is_file() for name in RUN_FILES)


class LineFile:
    """A text file appended to by whole lines. The next write overwrites what a failed one left behind."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._pending: list[Any] = []
        self._lock = threading.Lock()
        if path.exists():
            self.size = path.read_bytes().rfind(b"\n") + 1  # a last line without its end was cut off by a kill

    def add(self, line: Any) -> None:
        self._pending.append(line)

    def flush(self) -> bool:
        """Write the pending lines. True if the file had been deleted meanwhile: it and its folder are created anew."""
        with self._lock:
            count = len(self._pending)
            deleted = bool(self.size and count) and not self.path.exists()
            if deleted:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.size = 0
            # `add` may be called meanwhile: only what was taken is removed, and only once it is written.
            if count:
                self._append(self._text(self._pending[:count]).encode())
                del self._pending[:count]
            return deleted

    def _text(self, pending: Sequence[Any]) -> str:
        return "".join(pending)

    def _append(self, data: bytes) -> None:
        with self.path.open("r+b" if self.size else "wb") as file:
            file.seek(self.size)
            file.truncate()
            file.write(data)
        self.size += len(data)


class CsvTable(LineFile):
    """A CSV file of rows that begin with the keys of its table. Columns that appear later are added at the end.

    Rows of `resume_step` and later, which a killed run had written, are dropped on opening.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        super().__init__(path)
        self.keys, self.columns = TABLE_KEYS[path.name], list[str]()
        if self.size:  # there is at least a complete header
            self._rewrite([], resume_step)

    def _text(self, pending: Sequence[Any]) -> str:
        rows: Sequence[dict[str, str]] = pending
        new = {name for row in rows for name in row}.difference(self.columns, self.keys)
        added = [name for name in LOSS_COLUMNS if name in new] + sorted(new.difference(LOSS_COLUMNS))
        if self.columns and self.size and added:  # rows that are there get empty cells
            self._rewrite(added)
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        if not self.size:
            self.columns = [*(self.columns or self.keys), *added]
            writer.writerow(self.columns)
        writer.writerows([row.get(name, "") for name in self.columns] for row in rows)
        return text.getvalue()

    def _rewrite(self, added: Sequence[str], before: float = math.inf) -> None:
        """Rewrite the complete rows of steps `before`, with more columns."""
        with (
            atomic_path(self.path) as part,
            part.open("w", encoding="utf-8", newline="") as file,
            self.path.open(encoding="utf-8", errors="replace", newline="") as old,
        ):
            lines = _complete_rows(old)
            header = next(lines, [])
            if header[: len(self.keys)] != self.keys:
                found = f"{self.path} begins with {','.join(header)[:80]!r}, not with {','.join(self.keys)}"
                raise ArgumentError(f"{found}: it is no table of a run. Move it away, or choose another folder")
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*header, *added])
            for cells in lines:
                if len(cells) == len(header) and cells[0].isdecimal() and int(cells[0]) < before:
                    writer.writerow(cells + [""] * len(added))
        self.columns, self.size = [*header, *added], self.path.stat().st_size


def _complete_rows(file: Iterable[str]) -> Iterator[list[str]]:
    """Cells of each line, of which none contains a line break; a last line that breaks off is left out."""
    for line in file:
        if line.endswith("\n"):
            yield next(csv.reader([line]), [])


def read_table(path: Path) -> list[dict[str, float]]:
    """Rows of a run's table as numbers, without empty cells and damaged rows; none if there is no file."""
    if not path.exists():
        return []
    rows = []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        lines = _complete_rows(file)
        header = next(lines, [])
        for cells in lines:
            with contextlib.suppress(ValueError):  # a cell that is no number, or too few cells
                row = {name: float(cell) for name, cell in zip(header, cells, strict=True) if cell}
                if math.isfinite(row.get("step", math.nan)):
                    rows.append(row)
    return rows


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run; empty where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def grid_means(grid: Grid) -> dict[str, float]:
    """Means of the losses over a validation grid; the best weights are those with the lowest mean of `total`.

    >>> grid_means({(256, 8): {"total": 1.0}, (256, 16): {"total": 0.5}})
    {'total': 0.75}
    """
    names = dict.fromkeys(name for values in grid.values() for name in values)
    return {name: math.fsum(v := [x[name] for x in grid.values() if name in x]) / len(v) for name in names}


def format_cell(value: float) -> str:
    """A number with 9 digits, which restore every float32."""
    value = float(value)
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.9g}"
