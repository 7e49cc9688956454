"""Log files of a run: CSV tables, events, TensorBoard, Weights & Biases; and its progress line.

Files are appended line by line and readable even if the run was killed.
"""

import contextlib
import csv
import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.progress import BarColumn, MofNCompleteColumn
from rich.table import Column

from veca.checkpoint.format import FINETUNE_SETTINGS
from veca.errors import ArgumentError, warn_caller
from veca.utils.console import PlainColumn, PlainConsole, progress_bar
from veca.utils.files import atomic_path
from veca.utils.text import duration, printable, shorten

LOSS_COLUMNS = ("total", "cls", "dense", "cosine", "mse")
"""Losses in the order of the table's columns; other columns follow alphabetically."""

Grid = Mapping[tuple[int, int, float], Mapping[str, float]]
"""Losses by name, at each (resolution, budget, width)."""


def is_run(folder: Path) -> bool:
    """Whether a folder has any file of a training run."""
    return any((folder / name).is_file() for name in ("metrics.csv", "validation.csv", "events.txt", "recipe.yaml"))


def is_finetune_run(folder: Path) -> bool:
    """Whether `veca finetune` wrote to a folder."""
    return (folder / FINETUNE_SETTINGS).is_file()


class LineFile:
    """A text file appended to by whole lines. The next write overwrites what a failed one left behind."""

    def __init__(self, path: Path) -> None:
        self.path, self.pending = path, list[Any]()
        # A last line without its end was cut off by a kill.
        self.size = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0

    def flush(self) -> None:
        """Write the pending lines."""
        if self.pending:
            if self.size and not self.path.exists():  # deleted meanwhile: it and its folder are begun anew
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.size = 0
            self._append(self._text().encode())
            self.pending.clear()

    def _text(self) -> str:
        return "".join(self.pending)

    def _append(self, data: bytes) -> None:
        with self.path.open("r+b" if self.size else "wb") as file:
            file.seek(self.size)
            file.truncate()
            file.write(data)
        self.size += len(data)


class CsvTable(LineFile):
    """A CSV file of rows that begin with `keys`. Columns that appear later are added at the end.

    Rows of `resume_step` and later, which a killed run had written, are dropped on opening.
    """

    def __init__(self, path: Path, keys: Sequence[str], resume_step: int) -> None:
        super().__init__(path)
        self.keys, self.columns = list(keys), list[str]()
        if self.size:  # there is at least a complete header
            self._rewrite([], resume_step)

    def add(self, keys: Sequence[object], values: Mapping[str, float]) -> None:
        row = dict(zip(self.keys, map(str, keys), strict=True))
        for name, value in values.items():
            value = float(value)
            # 9 digits restore every float32.
            row[name] = str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.9g}"
        self.pending.append(row)

    def _text(self) -> str:
        new = {name for row in self.pending for name in row}.difference(self.columns, self.keys)
        added = [name for name in LOSS_COLUMNS if name in new] + sorted(new.difference(LOSS_COLUMNS))
        if self.columns and self.size and added:  # rows that are there get empty cells
            self._rewrite(added)
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        if not self.size:
            self.columns = [*(self.columns or self.keys), *added]
            writer.writerow(self.columns)
        writer.writerows([row.get(name, "") for name in self.columns] for row in self.pending)
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
            self.columns, writer = [*header, *added], csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            for cells in lines:
                if len(cells) == len(header) and cells[0].isdecimal() and int(cells[0]) < before:
                    writer.writerow(cells + [""] * len(added))
        self.size = self.path.stat().st_size


def _complete_rows(file: Iterable[str]) -> Iterator[list[str]]:
    """Cells of each line, of which none contains a line break; a last line that breaks off is left out."""
    return (next(csv.reader([line]), []) for line in file if line.endswith("\n"))


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

    >>> grid_means({(256, 8, 1.0): {"total": 1.0}, (256, 16, 1.0): {"total": 0.5}})
    {'total': 0.75}
    """
    names = dict.fromkeys(name for values in grid.values() for name in values)
    return {name: math.fsum(v := [x[name] for x in grid.values() if name in x]) / len(v) for name in names}


class RunLogger(contextlib.AbstractContextManager["RunLogger"]):
    """Writes the log files of a run to its folder. For the first process only.

    `resume_step` is the first step that will be logged again: rows of it and of later steps, written by a run that was
    killed, are dropped, so that each step is there once. Events are a history and stay.
    `wandb` names a W&B project; it is not imported otherwise. `config` is what W&B shows as settings.
    """

    def __init__(
        self, folder: Path, *, wandb: str | None = None, resume_step: int = 0, config: Mapping[str, Any] | None = None
    ) -> None:
        board = _import_optional("torch.utils.tensorboard", "tensorboard", "pip install 'veca[train]'")
        wandb_module = None if wandb is None else _import_optional("wandb", "wandb", "pip install wandb, or do without")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._metrics = CsvTable(self.folder / "metrics.csv", ["step", "time"], resume_step)
        self._validation = CsvTable(self.folder / "validation.csv", ["step", "resolution", "budget"], resume_step)
        self._events = LineFile(self.folder / "events.txt")
        # A queue that fills up would block training: this one is long enough.
        self._new_board = lambda step: board.SummaryWriter(str(self.folder / "tensorboard"), "", step, 10_000, 10)
        self._board: Any = self._new_board(resume_step)
        self._wandb = None if wandb is None else _join_wandb(wandb_module, wandb, self.folder, dict(config or {}))

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row to metrics.csv. A new name adds a column, which is empty in earlier rows."""
        self._metrics.add((step, f"{time.time():.1f}"), values)
        self._write(step, {f"train/{name}": float(value) for name, value in values.items()})

    def validation(self, step: int, grid: Grid) -> None:
        """Add a row to validation.csv for each cell; TensorBoard also gets the grid's means.

        There is a column `width` where the grid has other widths than 1.
        """
        scalars = {f"validation/mean/{name}": value for name, value in grid_means(grid).items()}
        elastic = any(width != 1 for _, _, width in grid)
        for (resolution, budget, width), values in grid.items():
            self._validation.add((step, resolution, budget), {**values, "width": width} if elastic else values)
            cell = f"{resolution}px-{budget}cores" + (f"-width{width:g}" if width != 1 else "")
            scalars |= {f"validation/{cell}/{name}": float(v) for name, v in values.items()}
        self._write(step, scalars)

    def event(self, step: int, text: str) -> None:
        """Add a line to events.txt: time, step, text. The report counts events by their first word: `skipped: …`,
        `corrupt: NAME, reason`, `unusable: NAME, reason`, `resumed: …`, `checkpoint: …`.
        """
        self._events.pending.append(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\t{step}\t{printable(text)}\n")
        self._write(step, {})

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        """To disk, TensorBoard and W&B. A full disk does not end a run: rows stay pending and are tried again.

        It ends TensorBoard's thread, though: these points are lost there, then a new file begins.
        """
        if self._wandb is not None and scalars:
            self._wandb.log({"step": step, **scalars})
        try:
            self.flush()
            self._board = self._board or self._new_board(step)
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
        except (OSError, ValueError) as error:  # ValueError: the table was replaced by another file
            self._board = None
            warn_caller(f"the log waits, its files cannot be written: {error}")

    def flush(self) -> None:
        """Write pending rows to disk."""
        for file in (self._metrics, self._validation, self._events):
            file.flush()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            # The error that ended the run matters more than a row that cannot be written.
            with contextlib.suppress(*([OSError, ValueError] if error is not None else [])):
                self.flush()
        finally:
            # In a thread: closing waits forever for TensorBoard's own thread where a full disk has ended it.
            closing = threading.Thread(target=self._close_board, name="veca-log-close", daemon=True)
            closing.start()
            closing.join(30)
            if self._wandb is not None:
                self._wandb.finish(exit_code=int(error is not None))

    def _close_board(self) -> None:
        with contextlib.suppress(OSError):
            if self._board is not None:
                self._board.close()


def _import_optional(module: str, package: str, way_out: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ArgumentError(f"the log of this run needs {package}, which is not installed: {way_out}") from error


def _join_wandb(wandb: Any, project: str, folder: Path, config: dict[str, Any]) -> Any:
    """Start a W&B run, or continue that of a resumed run. Its own step counter cannot go back: ours is a metric."""
    id_file = folder / "wandb.txt"
    run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
    run = wandb.init(project=project, dir=str(folder), config=config, id=run_id, resume="allow")
    run.define_metric("*", step_metric="step")
    with atomic_path(id_file) as part:
        part.write_text(f"{run.id}\n", encoding="utf-8")
    return run


class ProgressLine(contextlib.AbstractContextManager["ProgressLine"]):
    """Progress of a run on stderr: `with ProgressLine(total) as progress: progress.update(step, values)`.

    A terminal gets a bar. Anything else (a file, a job's log) gets a plain line every half minute and at each 5 %,
    without control characters. `start` is the step a resumed run begins with.
    """

    def __init__(
        self, total: int, *, start: int = 0, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self._clock, stream = total, clock, stream or sys.stderr
        facts = PlainColumn("{task.fields[facts]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        columns = BarColumn(16), MofNCompleteColumn(), facts
        self._bar = progress_bar(*columns, console=PlainConsole(file=stream), refresh_per_second=4)
        self._task = self._bar.add_task("", total=total, completed=start, facts="")
        # Not `rich`'s own test, which FORCE_COLOR overrides.
        self._terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        if self._terminal:
            self._bar.start()
        self._first: tuple[int, float] | None = None
        self._printed = (-math.inf, -1)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show `values`, named as in `TrainMeter.values`, after `step` steps; with `floor_share` and `memory_gib`."""
        now, facts = self._clock(), list[str]()
        # By the speed since the first update, which includes validation and checkpoints but not compilation.
        self._first = self._first or (step, now)
        if step > (since := self._first[0]):
            facts.append(f"{duration((now - self._first[1]) / (step - since) * max(0, self.total - step))} left")
        if "total" in values:
            parts = ", ".join(f"{name} {values[name]:.4g}" for name in ("cls", "dense") if name in values)
            facts.append(f"loss {values['total']:.4g}" + (f" ({parts})" if parts else ""))
        forms = {"images_per_s": "{:,.0f} images/s", "floor_share": "{:.0%} of the floor", "memory_gib": "{:.1f} GiB"}
        facts += [form.format(values[k]) for k, form in forms.items() if math.isfinite(values.get(k, math.nan))]
        if self._terminal:
            self._bar.update(self._task, completed=step, facts=" · ".join(facts))
            return
        # At most one line in 30 seconds, but always at each 5 % and at the end.
        twentieth = 20 * step // max(1, self.total)
        if now - self._printed[0] >= 30 or twentieth > self._printed[1] or step >= self.total:
            self._printed = (now, twentieth)
            done = f"step {step:,} of {self.total:,} ({100 * step / max(1, self.total):.1f} %)"
            self.say(" · ".join([done, *facts]))

    def say(self, text: str) -> None:
        """Print a message, above the bar where there is one."""
        self._bar.console.print(shorten(printable(text)), soft_wrap=True)

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._bar.stop()


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of a CUDA device so far, in GiB; nan on other devices."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else math.nan
