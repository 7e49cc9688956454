"""A line on the screen for what takes long: how much is done, how fast, how long it still takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

from veca.utils.console import progress_bar

Advance = Callable[[int], None]


@contextmanager
def bar(what: str, total: int, unit: str, show: bool = True) -> Iterator[Advance]:
    """A bar while the block runs; call what it gives with how many more `unit` are done."""
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[rate]}", "left"
    # What processes that are forked meanwhile print must not wait for a lock of this one.
    shown = progress_bar(*columns, TimeRemainingColumn(), shown=show, redirect_stdout=False, redirect_stderr=False)
    with shown as progress:
        task = progress.add_task(what, total=total, rate="")
        began, done = time.perf_counter(), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            rate = f"{done / max(1e-9, time.perf_counter() - began):,.1f} {unit}/s"
            progress.update(task, completed=done, rate=rate)

        yield advance
