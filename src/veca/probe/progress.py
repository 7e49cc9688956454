"""A line on the screen for what takes long: how much is done, how fast, how long it still takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int], None]


@contextmanager
def bar(what: str, total: int, unit: str, show: bool = True) -> Iterator[Advance]:
    """A bar while the block runs; call what it gives with how many more `unit` are done."""
    said = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
    columns = *said, TextColumn("left"), TimeRemainingColumn()
    # What processes that are forked meanwhile print must not wait for a lock of this one.
    shown = Progress(
        *columns, console=Console(stderr=True), disable=not show, redirect_stdout=False, redirect_stderr=False
    )
    with shown as progress:
        task = progress.add_task(what, total=total, rate="")
        began, done = time.perf_counter(), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            rate = f"{done / max(1e-9, time.perf_counter() - began):,.1f} {unit}/s"
            progress.update(task, completed=done, rate=rate)

        yield advance
