"""What a run leaves behind while it goes: tables, TensorBoard, a line on the screen, and the meter that feeds them.

Nothing here makes training wait. Rows go to a list in memory, which a thread writes out every few seconds; losses stay
on the device until somebody asks.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Column
from torch import Tensor

from veca.errors import ArgumentError, warn_caller
from veca.train.tables import (
    EVENTS,
    METRIC_KEYS,
    METRICS,
    VALIDATION,
    VALIDATION_KEYS,
    Grid,
    Lines,
    Table,
    cell,
    grid_means,
)
from veca.utils.console import PlainColumn, PlainConsole, progress_bar
from veca.utils.files import atomic_path
from veca.utils.text import duration, printable, shorten


class RunLog:
    """The files of one run, in its folder. For the first process alone.

    `resume_step` is the first step that will be logged again: whatever a run that died wrote of it and of later ones
    is dropped, so every step stands once. Events are a history and stay.
    `wandb` names a project there; it is not even imported unless asked for. `config` is what it shows as settings.
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
        tensorboard, online = _tensorboard(), None if wandb is None else _wandb()
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._metrics = Table(self.folder / METRICS, METRIC_KEYS, resume_step)
        self._validation = Table(self.folder / VALIDATION, VALIDATION_KEYS, resume_step)
        self._events = Lines(self.folder / EVENTS)
        # A queue this long is never full: a full one would make the training wait.
        self._new_board = lambda step: tensorboard(str(self.folder / "tensorboard"), "", step, 10_000, 10)
        self._board: Any = self._new_board(resume_step)
        self._online = None if online is None else _join(online, str(wandb), self.folder, dict(config or {}))
        self._trouble = ""
        self._end = threading.Event()
        self._writer = threading.Thread(target=self._write, args=(flush_seconds,), name="veca-log", daemon=True)
        self._writer.start()

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """One row of metrics.csv. A name that is new adds a column; rows from before have nothing in it."""
        self._warn()
        row = {"step": str(step), "time": f"{time.time():.1f}"}
        self._metrics.add(row | {name: cell(value) for name, value in values.items()})
        self._show(step, {f"train/{name}": value for name, value in values.items()})
        if self._online is not None:
            self._online.log({"step": step} | {f"train/{name}": float(value) for name, value in values.items()})

    def validation(self, step: int, grid: Grid) -> None:
        """A row of validation.csv for every resolution and budget; TensorBoard has the means over the grid besides."""
        self._warn()
        shown = {f"validation/mean/{name}": value for name, value in grid_means(grid).items()}
        for (resolution, budget), values in grid.items():
            row = {"step": str(step), "resolution": str(resolution), "budget": str(budget)}
            self._validation.add(row | {name: cell(value) for name, value in values.items()})
            shown |= {f"validation/{resolution}px-{budget}cores/{name}": float(v) for name, v in values.items()}
        self._show(step, shown)
        if self._online is not None:
            self._online.log({"step": step, **shown})

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        """On TensorBoard. Its thread does not outlive a full disk: points are lost, the next call begins a new file."""
        try:
            if self._board is None:
                self._board = self._new_board(step)
            for name, value in values.items():
                self._board.add_scalar(name, float(value), step)
        except OSError as error:
            self._board, self._trouble = None, _waits(error)

    def event(self, step: int, text: str) -> None:
        """A line of events.txt: time, step, text. The report counts events by their first word: `skipped: …`,
        `corrupt: NAME, why`, `unusable: NAME, why`, `resumed: …`, `checkpoint: …`.
        """
        self._events.add(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\t{step}\t{printable(text)}\n")

    def flush(self) -> None:
        """Write out what waits, now."""
        for file in (self._metrics, self._validation, self._events):
            if file.flush():
                self._trouble = f"{file.path} is gone; it begins again, without what was in it"

    def close(self, failed: bool = False) -> None:
        if self._end.is_set():
            return
        self._end.set()
        self._writer.join()
        try:
            self.flush()
        finally:
            self._close_board()
            if self._online is not None:
                self._online.finish(exit_code=int(failed))

    def _close_board(self) -> None:
        """It would wait for ever for a thread that a full disk has ended."""

        def close(board: Any = self._board) -> None:
            with contextlib.suppress(OSError):
                board.close()

        if self._board is not None:
            closing = threading.Thread(target=close, name="veca-log-close", daemon=True)
            closing.start()
            closing.join(30)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # What ended the run matters more than a row that cannot be written.
        with contextlib.suppress(*([OSError, ValueError] if error is not None else [])):
            self.close(failed=error is not None)

    def _write(self, seconds: float) -> None:
        while not self._end.wait(seconds):
            try:
                self.flush()
            except (OSError, ValueError) as error:  # the thread must live to try again
                self._trouble = _waits(error)

    def _warn(self) -> None:
        """A full disk does not end a run: its rows wait, and are tried again."""
        if self._trouble:
            trouble, self._trouble = self._trouble, ""
            warn_caller(trouble)


def _waits(error: Exception) -> str:
    return f"the log waits, its files cannot be written: {error}"


def _tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ArgumentError(
            "a run's log needs tensorboard, which is not installed: pip install 'veca[train]'"
        ) from error
    return SummaryWriter


def _wandb() -> Any:
    try:
        return import_module("wandb")
    except ImportError as error:
        raise ArgumentError(
            "W&B was asked for, but wandb is not installed: pip install wandb, or do without"
        ) from error


def _join(wandb: Any, project: str, folder: Path, config: dict[str, Any]) -> Any:
    """A run there, the same one when this run continues. Steps are a value like others: there they may not go back."""
    kept = folder / "wandb.txt"
    known = kept.read_text(encoding="utf-8").strip() if kept.exists() else None
    run = wandb.init(project=project, dir=str(folder), config=config, id=known, resume="allow")
    run.define_metric("*", step_metric="step")
    with atomic_path(kept) as part:
        part.write_text(f"{run.id}\n", encoding="utf-8")
    return run


class Meter:
    """Means of the losses and the pace of the training, without making the host wait for the device.

    `update` only queues work on the device; `values` is the one place that waits for it. The pace leaves out `pause`d
    time, the first `skip` steps, and the first step of each budget and resolution: those may compile.
    `images` and `seconds` are what a run that continues had before.
    """

    def __init__(
        self,
        budgets: Iterable[int] = (),
        resolutions: Iterable[int] = (),
        *,
        images: int = 0,
        seconds: float = 0.0,
        skip: int = 1,
        decay: float = 0.8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.images, self.seconds, self.rate = images, seconds, math.nan
        self._budgets, self._resolutions = dict.fromkeys(budgets, 0), dict.fromkeys(resolutions, 0)
        self._skip, self._decay, self._clock = skip, decay, clock
        self._names: list[str] = []
        self._sums: Tensor | None = None
        self._steps, self._seen = 0, set[tuple[int, int | None, int | None]]()
        self._new = [0, 0.0]  # images and seconds that count for the pace, since the last `values`
        self._smooth = [0.0, 0.0]
        self._mark, self._counts = clock(), False

    def update(
        self, losses: Mapping[str, Tensor], images: int, budget: int | None = None, resolution: int | None = None
    ) -> None:
        """One step, all its forward passes together: its losses, scalars on the device, and the pictures it took."""
        with torch.no_grad():
            found = torch.stack([value.detach().float() for value in losses.values()])
            # One bad step shall not spoil the mean of the others; it is counted.
            good = found.isfinite().all()
            row = torch.cat([torch.where(good, found, torch.zeros_like(found)), good.float()[None]])
            self._sums = row if self._sums is None else self._sums + row
        self._names = list(losses)
        kind = (images, budget, resolution)
        self._counts = self._skip <= 0 and kind in self._seen
        self._tick()
        if self._counts:
            self._new[0] += images
        self._skip -= 1
        self._seen.add(kind)
        self.images += images
        self._steps += 1
        for counts, drawn in ((self._budgets, budget), (self._resolutions, resolution)):
            if drawn is not None:
                counts[drawn] = counts.get(drawn, 0) + 1

    def _tick(self) -> None:
        """The time since the last look at the clock was training; it makes the pace if its step does."""
        now = self._clock()
        self.seconds += now - self._mark
        self._new[1] += (now - self._mark) * self._counts
        self._mark = now

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside is no training: validation, checkpoints. Ask for `values` first, and the device has caught up."""
        self._tick()
        try:
            yield
        finally:
            self._mark = self._clock()

    def values(self) -> dict[str, float]:
        """What to log of the steps since the last call; this waits for the device.

        Means of the losses over the steps whose losses were finite, the number of the others (`nonfinite`), how often
        each budget and resolution was drawn (`budget_8`, `resolution_256`, …), `images` and `seconds` of training in
        all, and smoothed `images_per_s` (nan until there is one).
        """
        sums = self._sums.tolist() if self._sums is not None else []
        self._tick()
        good = sums[-1] if sums else 0.0
        found = {name: total / good if good else math.nan for name, total in zip(self._names, sums, strict=False)}
        found["nonfinite"] = self._steps - good
        self._smooth = [self._decay * old + new for old, new in zip(self._smooth, self._new, strict=True)]
        if self._smooth[0] and self._smooth[1] > 0:
            self.rate = self._smooth[0] / self._smooth[1]
        found |= {"images": self.images, "seconds": self.seconds, "images_per_s": self.rate}
        for name, counts in (("budget", self._budgets), ("resolution", self._resolutions)):
            found |= {f"{name}_{drawn}": count for drawn, count in counts.items()}
            counts.update(dict.fromkeys(counts, 0))
        self._sums, self._steps, self._new = None, 0, [0, 0.0]
        return found

    def under_way(self) -> dict[str, Any]:
        """What `values` would be made of, as plain data, for a checkpoint between two calls; this waits too."""
        sums = None if self._sums is None else self._sums.tolist()
        return {"sums": sums, "steps": self._steps, "budgets": self._budgets, "resolutions": self._resolutions}

    def take_up(self, parts: Sequence[Mapping[str, Any]], rank: int, size: int, device: torch.device) -> None:
        """Go on from what `under_way` was in each process; where they were more or fewer, each has the mean."""
        own = parts[rank if len(parts) == size else 0]
        self._steps = own["steps"]
        if own["sums"] is not None:
            sums = [part["sums"] for part in parts] if len(parts) != size else [own["sums"]]
            self._sums = torch.tensor(sums, dtype=torch.float32, device=device).mean(0)
        for counts, before in ((self._budgets, own["budgets"]), (self._resolutions, own["resolutions"])):
            counts.update({int(drawn): count for drawn, count in before.items()})  # JSON makes keys text


class LiveLine:
    """Where a run stands, on stderr: `with LiveLine(total) as live: live.update(step, values)`.

    A terminal gets a bar. Anything else (a file, a job's log) gets a plain line every `every` seconds and at each 5 %,
    without control characters. `start` is the step a continued run begins with.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        every: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.start, self.every, self._clock = total, start, every, clock
        self._stream = sys.stderr if stream is None else stream
        # Not rich's word for it, which FORCE_COLOR turns.
        terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._bar = _bar(self._stream) if terminal else None
        self._task = None if self._bar is None else self._bar.add_task("", total=total, completed=start, facts="")
        self._first: tuple[int, float] | None = None
        self._said = (-math.inf, -1)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show `values` as `Meter.values` and `RunLog.train` name them, after `step` steps.

        `floor_share` and `memory_gib` are shown where given.
        """
        now = self._clock()
        self._first = self._first or (step, now)
        facts = " · ".join(self._facts(step, now, values))
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, facts=facts)
            return
        twentieth = 20 * step // max(1, self.total)
        if now - self._said[0] >= self.every or twentieth > self._said[1] or step >= self.total:
            self._said = (now, twentieth)
            self._print(f"step {step:,} of {self.total:,} ({100 * step / max(1, self.total):.1f} %) · {facts}")

    def say(self, text: str) -> None:
        """A line of its own, above the bar: a step that was skipped, a picture that cannot be read."""
        text = shorten(printable(text))
        if self._bar is None:
            self._print(text)
        else:
            self._bar.console.print(text, soft_wrap=True)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def _facts(self, step: int, now: float, values: Mapping[str, float]) -> list[str]:
        facts = [f"{duration(left)} left"] if (left := self._left(step, now)) is not None else []
        if "total" in values:
            parts = ", ".join(f"{name} {values[name]:.4g}" for name in ("cls", "dense") if name in values)
            facts.append(f"loss {values['total']:.4g}" + (f" ({parts})" if parts else ""))
        forms = {"images_per_s": "{:,.0f} images/s", "floor_share": "{:.0%} of the floor", "memory_gib": "{:.1f} GiB"}
        known = [name for name in forms if math.isfinite(values.get(name, math.nan))]
        return facts + [forms[name].format(values[name]) for name in known]

    def _left(self, step: int, now: float) -> float | None:
        """Seconds, by the pace since the first update: validation and checkpoints are in it, compilation is not."""
        assert self._first is not None
        since, began = self._first
        return (now - began) / (step - since) * max(0, self.total - step) if step > since else None

    def __enter__(self) -> LiveLine:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(stream: TextIO) -> Progress:
    facts = PlainColumn("{task.fields[facts]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
    console = PlainConsole(file=stream)
    return progress_bar(BarColumn(16), MofNCompleteColumn(), facts, console=console, refresh_per_second=4)


def memory_gib(device: torch.device) -> float:
    """The most memory that was in use on a CUDA device so far, in GiB; nan on others, which do not count it."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else math.nan
