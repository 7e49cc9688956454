"""Files of a run that grow while it goes: whole line by whole line, and readable however the run ended."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from veca.errors import ArgumentError
from veca.utils.files import atomic_path

PARTS = ("total", "cls", "dense", "cosine", "mse")
"""Names of the losses, in the order in which tables have them; other columns follow by the alphabet."""
METRICS, VALIDATION, EVENTS = "metrics.csv", "validation.csv", "events.txt"
RUN_FILES = (METRICS, VALIDATION, EVENTS, "recipe.yaml")
METRIC_KEYS, VALIDATION_KEYS = ("step", "time"), ("step", "resolution", "budget")

Grid = Mapping[tuple[int, int], Mapping[str, float]]
"""Losses by name, at each (resolution, budget)."""


def is_run(folder: Path) -> bool:
    """Whether a folder has any of the files that a run leaves."""
    return any((folder / name).is_file() for name in RUN_FILES)


class Lines:
    """A text file that grows by whole lines. What a failed or half-done write left behind, the next one writes over."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._waiting: list[Any] = []
        self._lock = threading.Lock()
        if path.exists():
            text = path.read_bytes()
            self.size = text.rfind(b"\n") + 1

    def add(self, line: Any) -> None:
        self._waiting.append(line)

    def flush(self) -> bool:
        """Write what waits. True if the file was there before and is gone: it begins again then, with its folder."""
        with self._lock:
            count = len(self._waiting)
            gone = bool(self.size and count) and not self.path.exists()
            if gone:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.size = 0
            if count:
                self._append(self._text(self._waiting[:count]).encode())
                del self._waiting[:count]
            return gone

    def _text(self, waiting: Sequence[Any]) -> str:
        return "".join(waiting)

    def _append(self, data: bytes) -> None:
        with self.path.open("r+b" if self.size else "wb") as file:
            file.seek(self.size)
            file.truncate()
            file.write(data)
        self.size += len(data)


class Table(Lines):
    """A CSV file of rows that begin with `keys`. Its columns are those of the first rows; new ones come at the end."""

    def __init__(self, path: Path, keys: Sequence[str], resume_step: int) -> None:
        super().__init__(path)
        self.keys, self.columns = list(keys), list[str]()
        if self.size:  # there is a whole header at least
            self._rewrite([], resume_step)

    def _text(self, waiting: Sequence[Any]) -> str:
        rows: Sequence[dict[str, str]] = waiting
        fresh = {name for row in rows for name in row}.difference(self.columns, self.keys)
        added = [name for name in PARTS if name in fresh] + sorted(fresh.difference(PARTS))
        if self.columns and self.size and added:
            self._rewrite(added)
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        if not self.size:
            self.columns = [*(self.columns or self.keys), *added]
            writer.writerow(self.columns)
        writer.writerows([row.get(name, "") for name in self.columns] for row in rows)
        return text.getvalue()

    def _rewrite(self, added: Sequence[str], before: float = math.inf) -> None:
        """The same rows, those of steps `before` that are whole, with more columns."""
        with (
            atomic_path(self.path) as part,
            part.open("w", encoding="utf-8", newline="") as file,
            self.path.open(encoding="utf-8", errors="replace", newline="") as old,
        ):
            lines = whole_lines(old)
            header = next(lines, [])
            if header[: len(self.keys)] != self.keys:
                raise ArgumentError(
                    f"{self.path} begins with {','.join(header)[:80]!r}, not with {','.join(self.keys)}: it is no table"
                    " of a run. Move it away, or choose another folder"
                )
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*header, *added])
            for cells in lines:
                if len(cells) == len(header) and cells[0].isdecimal() and int(cells[0]) < before:
                    writer.writerow(cells + [""] * len(added))
        self.columns, self.size = [*header, *added], self.path.stat().st_size


def whole_lines(file: Iterable[str]) -> Iterator[list[str]]:
    """Cells of the lines of a CSV file without line breaks in its cells; a last one that breaks off is left out."""
    for line in file:
        if line.endswith("\n"):
            yield next(csv.reader([line]), [])


def read_table(path: Path) -> list[dict[str, float]]:
    """Rows of a table of a run, as numbers; cells without one are left out, and so are damaged rows. No file: none."""
    if not path.exists():
        return []
    rows = []
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        lines = whole_lines(file)
        header = next(lines, [])
        for cells in lines:
            with contextlib.suppress(ValueError):  # of a cell that is no number, or of too few cells
                row = {name: float(cell) for name, cell in zip(header, cells, strict=True) if cell}
                if math.isfinite(row.get("step", math.nan)):
                    rows.append(row)
    return rows


def grid_means(grid: Grid) -> dict[str, float]:
    """Means of the losses over a grid: the one of `total` says which validation was best.

    >>> grid_means({(256, 8): {"total": 1.0}, (256, 16): {"total": 0.5}})
    {'total': 0.75}
    """
    names = dict.fromkeys(name for values in grid.values() for name in values)
    return {name: math.fsum(v := [x[name] for x in grid.values() if name in x]) / len(v) for name in names}


def cell(value: float) -> str:
    value = float(value)
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.9g}"
