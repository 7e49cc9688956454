"""Logging of a run: CSV tables, events, TensorBoard, Weights & Biases, and a progress line.

Nothing here makes training wait: rows go to a list in memory, which a thread writes to disk every few seconds.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from rich.progress import BarColumn, MofNCompleteColumn
from rich.table import Column

from veca.errors import ArgumentError, warn_caller
from veca.train.csv_log import EVENTS, METRICS, VALIDATION, CsvTable, Grid, LineFile, format_cell, grid_means
from veca.utils.console import PlainColumn, PlainConsole, progress_bar
from veca.utils.files import atomic_path
from veca.utils.text import duration, printable, shorten

LINE_SECONDS = 30.0
"""Time between two lines of progress where there is no terminal."""


class RunLogger:
    """Writes the log files of a run to its folder. For the first process only.

    `resume_step` is the first step that will be logged again: rows of it and of later steps, written by a run that was
    killed, are dropped, so that each step is there once. Events are a history and stay.
    `wandb` names a W&B project; it is not imported otherwise. `config` is what W&B shows as settings.
    """

    def __init__(
        self,
        folder: Path,
        *,
        wandb: str | None = None,
        resume_step: int = 0,
        config: Mapping[str, Any] | None = None,
        flush_seconds: float = 2.0,
    ) -> None:
        board = _import_optional("torch.utils.tensorboard", "tensorboard", "pip install 'veca[train]'")
        wandb_module = None if wandb is None else _import_optional("wandb", "wandb", "pip install wandb, or do without")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._metrics = CsvTable(self.folder / METRICS, resume_step)
        self._validation = CsvTable(self.folder / VALIDATION, resume_step)
        self._events = LineFile(self.folder / EVENTS)
        # A queue that fills up would block training: this one is long enough.
        self._new_board = lambda step: board.SummaryWriter(str(self.folder / "tensorboard"), "", step, 10_000, 10)
        self._board: Any = self._new_board(resume_step)
        self._wandb = None if wandb is None else _join_wandb(wandb_module, wandb, self.folder, dict(config or {}))
        self._problem = ""
        # A thread writes, so that a slow or full disk does not hold up training.
        self._end = threading.Event()
        self._writer = threading.Thread(target=self._write, args=(flush_seconds,), name="veca-log", daemon=True)
        self._writer.start()

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row to metrics.csv. A new name adds a column, which is empty in earlier rows."""
        row = {"step": str(step), "time": f"{time.time():.1f}"}
        self._metrics.add(row | {name: format_cell(value) for name, value in values.items()})
        self._log_scalars(step, {f"train/{name}": float(value) for name, value in values.items()})

    def validation(self, step: int, grid: Grid) -> None:
        """Add a row to validation.csv for every resolution and budget; TensorBoard also gets the grid's means."""
        scalars = {f"validation/mean/{name}": value for name, value in grid_means(grid).items()}
        for (resolution, budget), values in grid.items():
            row = {"step": str(step), "resolution": str(resolution), "budget": str(budget)}
            self._validation.add(row | {name: format_cell(value) for name, value in values.items()})
            scalars |= {f"validation/{resolution}px-{budget}cores/{name}": float(v) for name, v in values.items()}
        self._log_scalars(step, scalars)

    def _log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """To W&B and TensorBoard, whose thread dies on a full disk: these points are lost, then a new file begins."""
        if self._problem:  # a full disk does not end a run: rows stay pending and are tried again
            problem, self._problem = self._problem, ""
            warn_caller(problem)
        if self._wandb is not None:
            self._wandb.log({"step": step, **values})
        try:
            if self._board is None:
                self._board = self._new_board(step)
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:
            self._board, self._problem = None, _describe_delay(error)

    def event(self, step: int, text: str) -> None:
        """Add a line to events.txt: time, step, text. The report counts events by their first word: `skipped: …`,
        `corrupt: NAME, reason`, `unusable: NAME, reason`, `resumed: …`, `checkpoint: …`.
        """
        self._events.add(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\t{step}\t{printable(text)}\n")

    def flush(self) -> None:
        """Write pending rows to disk now."""
        for file in (self._metrics, self._validation, self._events):
            if file.flush():
                self._problem = f"{file.path} was deleted; it is begun anew, without what was in it"

    def close(self, failed: bool = False) -> None:
        self._end.set()
        self._writer.join()
        try:
            self.flush()
        finally:
            self._close_board()
            if self._wandb is not None:
                self._wandb.finish(exit_code=int(failed))

    def _close_board(self) -> None:
        """In a thread: closing waits forever for TensorBoard's own thread where a full disk has ended it."""

        def close(board: Any = self._board) -> None:
            with contextlib.suppress(OSError):
                board.close()

        if self._board is not None:
            closing = threading.Thread(target=close, name="veca-log-close", daemon=True)
            closing.start()
            closing.join(30)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # The error that ended the run matters more than a row that cannot be written.
        with contextlib.suppress(*([OSError, ValueError] if error is not None else [])):
            self.close(failed=error is not None)

    def _write(self, seconds: float) -> None:
        while not self._end.wait(seconds):
            try:
                self.flush()
            except (OSError, ValueError) as error:  # the thread must live to try again
                self._problem = _describe_delay(error)


def _describe_delay(error: Exception) -> str:
    return f"the log waits, its files cannot be written: {error}"


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


class ProgressLine:
    """Progress of a run on stderr: `with ProgressLine(total) as progress: progress.update(step, values)`.

    A terminal gets a bar. Anything else (a file, a job's log) gets a plain line every half minute and at each 5 %,
    without control characters. `start` is the step a resumed run begins with.
    """

    def __init__(
        self, total: int, *, start: int = 0, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self._clock = total, clock
        self._stream = sys.stderr if stream is None else stream
        # Not `rich`'s own test, which FORCE_COLOR overrides.
        self._terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        facts = PlainColumn("{task.fields[facts]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        console = PlainConsole(file=self._stream)
        self._bar = progress_bar(BarColumn(16), MofNCompleteColumn(), facts, console=console, refresh_per_second=4)
        self._task = self._bar.add_task("", total=total, completed=start, facts="")
        self._first: tuple[int, float] | None = None
        self._printed = (-math.inf, -1)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show `values`, named as in `TrainMeter.values`, after `step` steps; with `floor_share` and `memory_gib`."""
        now = self._clock()
        self._first = self._first or (step, now)  # the first update comes after compilation
        facts = " · ".join(self._facts(step, now, values))
        if self._terminal:
            self._bar.update(self._task, completed=step, facts=facts)
            return
        # At most one line per interval, but always at each 5 % and at the end.
        twentieth = 20 * step // max(1, self.total)
        if now - self._printed[0] >= LINE_SECONDS or twentieth > self._printed[1] or step >= self.total:
            self._printed = (now, twentieth)
            self._print(f"step {step:,} of {self.total:,} ({100 * step / max(1, self.total):.1f} %) · {facts}")

    def say(self, text: str) -> None:
        """Print a message above the bar."""
        text = shorten(printable(text))
        if self._terminal:
            self._bar.console.print(text, soft_wrap=True)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _facts(self, step: int, now: float, values: Mapping[str, float]) -> list[str]:
        facts = []
        # By the speed since the first update, which includes validation and checkpoints but not compilation.
        since, began = self._first or (step, now)
        if step > since:
            facts.append(f"{duration((now - began) / (step - since) * max(0, self.total - step))} left")
        if "total" in values:
            parts = ", ".join(f"{name} {values[name]:.4g}" for name in ("cls", "dense") if name in values)
            facts.append(f"loss {values['total']:.4g}" + (f" ({parts})" if parts else ""))
        forms = {"images_per_s": "{:,.0f} images/s", "floor_share": "{:.0%} of the floor", "memory_gib": "{:.1f} GiB"}
        known = [name for name in forms if math.isfinite(values.get(name, math.nan))]
        return facts + [forms[name].format(values[name]) for name in known]

    def __enter__(self) -> ProgressLine:
        if self._terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._terminal:
            self._bar.stop()


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of a CUDA device so far, in GiB; nan on other devices."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else math.nan
