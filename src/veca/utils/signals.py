"""Signals that stop a command, and worker processes that end with the process that started them."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask a run to save and stop; Windows has no SIGHUP."""
IMPATIENT = 1.0
"""Seconds within which a second signal counts as the first: `timeout` and torchrun signal a process and its group, a
terminal that closes does so itself and through its shell."""
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0
_MAIN_THREAD = threading.main_thread().ident
"""Of the process that imported this. A forked process inherits it, and has the identifier of the thread that forked."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP. A KeyboardInterrupt, so that whatever saves its work on Ctrl-C saves it here too."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


class Interrupted(BaseException):
    """A run stopped at the end of a step because of a signal, with everything saved.

    A BaseException, as KeyboardInterrupt is, so that `except Exception` cannot swallow it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


def exit_status(error: BaseException) -> int:
    """The exit status of a process that was stopped, as shells count it: 128 + the number of the signal."""
    return 128 + int(getattr(error, "number", signal.SIGINT))


@contextmanager
def terminable() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP stop it as Ctrl-C does; then the process exits with 128 + the number.

    For a command, which owns its process: a signal that is ignored (as under nohup) or handled already stays so.
    """
    received: list[tuple[int, float]] = []

    def handle(number: int, _: FrameType | None) -> None:
        drop_lost_terminal(number)
        if received and time.monotonic() - received[-1][1] < IMPATIENT:
            return
        received.append((number, time.monotonic()))
        raise Terminated(number)

    in_main = threading.current_thread() is threading.main_thread()
    others = [number for number in STOPPING if in_main and number != signal.SIGINT]
    before = {number: signal.signal(number, handle) for number in others if signal.getsignal(number) is signal.SIG_DFL}
    try:
        yield
    except Terminated as error:
        sys.exit(exit_status(error))
    except SystemExit as end:
        if received and end.code == exit_status(KeyboardInterrupt()):  # what Typer makes of any KeyboardInterrupt
            sys.exit(128 + received[-1][0])
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred_signals(on_signal: Callable[[int], object]) -> Iterator[None]:
    """While the block runs, SIGINT, SIGTERM and SIGHUP only call `on_signal`; a second one, later, ends it at once.

    Signals that are ignored stay so: SIGHUP under nohup, SIGINT in the background of a shell script.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first = math.inf

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal first
        drop_lost_terminal(number)
        if time.monotonic() - first > IMPATIENT:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)
        first = min(first, time.monotonic())
        on_signal(number)

    handled = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def drop_lost_terminal(number: int) -> None:
    """On SIGHUP, if the terminal is gone: write to nowhere, as an error on writing would keep a run from saving."""
    if number != getattr(signal, "SIGHUP", None):
        return
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


@contextmanager
def starting_workers(forked: bool) -> Iterator[None]:
    """Around the start of processes that call `init_signals_of_worker`: signals are handled after the block.

    Hooks of the interpreter around a fork would swallow what a handler raises. And a signal to the whole group is not
    to end a worker that has not come to ignoring it: it is blocked in those that are `forked`.
    """
    block = forked and hasattr(signal, "pthread_sigmask")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING) if block else set()
    came: list[tuple[int, FrameType | None]] = []
    in_main = threading.current_thread() is threading.main_thread()  # which alone handles signals
    handled = [number for number in STOPPING if in_main and callable(signal.getsignal(number))]
    before = {number: signal.signal(number, lambda *args: came.append(args)) for number in handled}
    try:
        yield
    finally:
        if block:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    if came and callable(handler := before[came[0][0]]):
        handler(*came[0])


def init_signals_of_worker() -> None:
    """Leave signals to the main process: a terminal, `timeout` and torchrun send them to the whole group.

    That process ends its workers, or where it trains, first finishes its step with their images.
    """
    end_with_parent()
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def end_with_parent() -> None:
    """Have this worker process end when the process that started it has ended, however that came about.

    To be called in the worker. On Linux the kernel kills it then, even where its decoder hangs; elsewhere, or where
    another thread than the main one forked it, a thread of its own looks.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    method = getattr(multiprocessing.current_process(), "_start_method", None) or multiprocessing.get_start_method()
    # A fork server stands between the two; Windows keeps the number of a parent that is gone.
    by_number, pid = method != "forkserver" and sys.platform != "win32", parent.pid

    def parent_lives() -> bool:
        return os.getppid() == pid if by_number else parent.is_alive()

    def watch() -> None:
        while parent_lives():
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    # The kernel's signal comes at the end of the *thread* that forked, so that has to be one that lasts.
    if method == "fork" and threading.get_ident() == _MAIN_THREAD and _kill_at_parents_end():
        if not parent_lives():  # it ended before the signal was asked for
            os._exit(1)
    else:
        threading.Thread(target=watch, name="veca-parent", daemon=True).start()


def _kill_at_parents_end() -> bool:
    if sys.platform != "linux":
        return False
    try:
        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False
