"""How a training run is asked to stop: by a signal, which waits until the step at hand is done."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from veca.utils.signals import IMPATIENT, STOPPING, Terminated, drop_lost_terminal


class Interrupted(BaseException):
    """Asked to stop, and did: everything is saved.

    A BaseException, as KeyboardInterrupt is, so that `except Exception` cannot swallow it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


@contextlib.contextmanager
def signals(note: Callable[[int], object]) -> Iterator[None]:
    """While the block runs SIGINT, SIGTERM and SIGHUP are only noted; a second one, a while later, ends it at once.

    One that is ignored stays so: SIGHUP under nohup, SIGINT in the background of a shell script.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first = math.inf

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal first
        drop_lost_terminal(number)
        if time.monotonic() - first > IMPATIENT:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)
        first = min(first, time.monotonic())
        note(number)

    wanted = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, heard) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
