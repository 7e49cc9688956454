"""Console output and progress bars, safe for untrusted text: no markup, control characters escaped."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import rich.progress
from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Column
from rich.text import Text

from veca.utils.text import printable, shorten

# Characters of one printed string: room for the longest path of Linux, 4,096 bytes, in a sentence.
_MAX_CHARACTERS = 8_192
# After this many seconds without an image, the archive that is being read is shown.
_SILENT_SECONDS = 2.0


def as_message(text: str, limit: int = 2_000) -> str:
    """Text with control characters escaped except line breaks and tabs, shortened to about `limit` characters."""
    return shorten(printable(text, keep="\n\t"), limit)


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code; that ipykernel is imported does not make it so."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return getattr(get_ipython(), "kernel", None) is not None


class PlainConsole(Console):
    """A console without markup, emoji codes and highlighting, which escapes control characters.

    Strings are safe in `print`, `status` and the cells and titles of tables. A `Text` is printed unchanged.
    """

    def __init__(self, **options: Any) -> None:
        # In a notebook lines as in a file: as HTML, each would be an output of its own, and bars would need ipywidgets.
        # Its kernel sets FORCE_COLOR, by which rich takes it for a terminal.
        options = {"force_jupyter": False} | ({"force_terminal": False} if in_notebook() else {}) | options
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(as_message(text, _MAX_CHARACTERS), **options)

    def status(self, status: RenderableType, **options: Any) -> Status:
        return super().status(self.render_str(status) if isinstance(status, str) else status, **options)


class PlainColumn(TextColumn):
    """A column of a progress bar: a format string with `task`, shown as plain text on one line."""

    def render(self, task: Task) -> Text:
        text = shorten(printable(self.text_format.format(task=task)), 200)
        return Text(text, style=self.style, justify=self.justify)


def progress_bar(*columns: str | ProgressColumn, shown: bool = True, **options: Any) -> Progress:
    """A progress bar on stderr; columns that are strings become `PlainColumn`."""
    plain = [PlainColumn(column) if isinstance(column, str) else column for column in columns]
    console = options.pop("console", None) or PlainConsole(stderr=True)
    return Progress(*plain, console=console, disable=not shown, **options)


class ProgressTask:
    """The one task of a progress bar; call it with how many more units are done."""

    def __init__(self, progress: Progress, unit: str) -> None:
        self._progress, self._unit = progress, unit
        self._began, self._counted = time.perf_counter(), 0

    def __call__(self, count: int = 0, *, counted: int | None = None, **fields: Any) -> None:
        """Advance by `count`, or set `completed`. The rate is of `counted` units, by default `count`."""
        self._counted += count if counted is None else counted
        rate = f"{self._counted / max(1e-9, time.perf_counter() - self._began):,.1f} {self._unit}/s"
        self._progress.update(self._progress.task_ids[0], advance=count, rate=rate, **fields)

    def describe(self, text: str) -> None:
        self._progress.update(self._progress.task_ids[0], description=text, refresh=True)


@contextmanager
def bar(
    what: str, total: int | None, unit: str, show: bool = True, *, failures: bool = False, note: str = ""
) -> Iterator[ProgressTask]:
    """A progress bar while the block runs; yields a function to call with how many more `unit` are done.

    `failures` adds a count of failures, given as `failed=` to that function; `note` is a text after the count, and can
    be changed likewise.
    """
    # Narrow terminals cut the bar and the times first.
    done = rich.progress.MofNCompleteColumn(table_column=Column(no_wrap=True))
    texts = ["{task.fields[note]}", "{task.fields[rate]}", *["{task.fields[failed]} failed"] * failures]
    times = rich.progress.BarColumn(), TimeElapsedColumn(), "left", rich.progress.TimeRemainingColumn()
    # Forked processes inherit the lock of redirected streams: one of them could wait for it forever.
    options = {"redirect_stdout": False, "redirect_stderr": False}
    with progress_bar("{task.description}", done, *texts, *times, shown=show, **options) as progress:
        progress.add_task(what, total=total, rate="", failed=0, note=note)
        yield ProgressTask(progress, unit)


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
