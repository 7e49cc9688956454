"""How a run is asked to stop: by a signal, which waits until the step at hand is done."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

IMPATIENT = 1.0
"""Seconds within which a signal is the same one: `timeout` and torchrun send it to a process and to its group."""


class Interrupted(BaseException):
    """Asked to stop, and did: everything is saved.

    No `Exception`, as KeyboardInterrupt is none: whoever goes on after a bad picture shall not go on after this.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextlib.contextmanager
def signals(note: Callable[[int], object]) -> Iterator[None]:
    """While the block runs SIGINT and SIGTERM are only noted; a second one, a while later, ends the run at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first = math.inf

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if time.monotonic() - first > IMPATIENT:
            raise KeyboardInterrupt
        first = min(first, time.monotonic())
        note(number)

    before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
