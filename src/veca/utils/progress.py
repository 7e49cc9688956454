"""Progress on stderr: a bar with rate and time left, a line while an archive yields no images."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from veca.utils.console import progress_bar

_SILENT_SECONDS = 2.0
"""After this long without an image, the archive that is being read is shown."""


class ProgressTask:
    """The one task of a progress bar; call it with how many more units are done."""

    def __init__(self, progress: Progress, task: TaskID, unit: str) -> None:
        self._progress, self._task, self._unit = progress, task, unit
        self._began, self._counted = time.perf_counter(), 0

    def __call__(self, count: int = 0, *, counted: int | None = None, **fields: Any) -> None:
        """Advance by `count`, or set `completed`. The rate is of `counted` units, by default `count`."""
        self._counted += count if counted is None else counted
        rate = f"{self._counted / max(1e-9, time.perf_counter() - self._began):,.1f} {self._unit}/s"
        self._progress.update(self._task, advance=count, rate=rate, **fields)

    def describe(self, text: str) -> None:
        self._progress.update(self._task, description=text)


@contextmanager
def bar(
    what: str, total: int | None, unit: str, show: bool = True, *, failures: bool = False, note: str = ""
) -> Iterator[ProgressTask]:
    """A progress bar while the block runs; yields a function to call with how many more `unit` are done.

    `failures` adds a count of failures, given as `failed=` to that function; `note` is a text after the count, and can
    be changed likewise.
    """
    done = MofNCompleteColumn(table_column=Column(no_wrap=True))  # narrow terminals cut the bar and the times first
    texts = ["{task.fields[note]}", "{task.fields[rate]}", *["{task.fields[failed]} failed"] * failures]
    times = BarColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn()
    # Forked processes inherit the lock of redirected streams: one of them could wait for it forever.
    options = {"redirect_stdout": False, "redirect_stderr": False}
    with progress_bar("{task.description}", done, *texts, *times, shown=show, **options) as progress:
        yield ProgressTask(progress, progress.add_task(what, total=total, rate="", failed=0, note=note), unit)


class ReadingLine:
    """Shows which archive is being read while no image comes; called with its path and the bytes read so far."""

    def __init__(self, show: Callable[[str], object] = lambda text: None) -> None:
        self.show, self._since = show, time.monotonic()

    def __call__(self, path: str, size: int) -> None:
        if (now := time.monotonic()) - self._since > _SILENT_SECONDS:
            self._since = now - _SILENT_SECONDS / 2  # shown again in a second
            self.show(f"reading {os.path.basename(path)}: {size / 1e9:.1f} GB")

    def image_came(self) -> None:
        self._since = time.monotonic()


@contextmanager
def reading_line(shown: bool) -> Iterator[ReadingLine]:
    """A line that appears when the block reads for long without an image, and disappears with the block.

    It has no thread, so processes can be forked in the block.
    """
    line = progress_bar("{task.description}", TimeElapsedColumn(), shown=shown, transient=True, auto_refresh=False)
    task = line.add_task("")

    def show(text: str) -> None:
        line.start()
        line.update(task, description=text, refresh=True)

    try:
        yield ReadingLine(show)
    finally:
        line.stop()
