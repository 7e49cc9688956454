"""Signal handling: commands that stop cleanly, and worker processes that end with their parent."""

import gc
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
from typing import Any, TypeAlias

# Signals that ask a run to save and stop; Windows has no SIGHUP.
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
# A second signal within this many seconds is a duplicate: `timeout` and torchrun signal a process and its group, a
# terminal that closes signals directly and through its shell.
IMPATIENT = 1.0
_POLL_SECONDS = 1.0

_Handler: TypeAlias = Callable[[int, FrameType | None], object]


class _StoppedBySignal(BaseException):
    """A BaseException, as KeyboardInterrupt is, so that `except Exception` cannot swallow it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


class Interrupted(_StoppedBySignal):
    """A run stopped at the end of a step because of a signal, with everything saved."""


class Terminated(_StoppedBySignal, KeyboardInterrupt):
    """SIGTERM or SIGHUP. A KeyboardInterrupt, so that code that saves its work on Ctrl-C saves it here too."""


@contextmanager
def handled_by(handler: _Handler, applies: Callable[[int, Any], bool]) -> Iterator[dict[int, Any]]:
    """While the block runs, have `handler` handle the signals whose number and present handler `applies` accepts.

    Yields their previous handlers; none outside the main thread, the only one that may set handlers.
    """
    in_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in STOPPING if in_main and applies(number, signal.getsignal(number))]
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield previous
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def exit_status(error: BaseException) -> int:
    """Exit status of a process that was stopped, by the convention of shells: 128 + the number of the signal."""
    return 128 + int(getattr(error, "number", signal.SIGINT))


@contextmanager
def terminable() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP stop it as Ctrl-C does; then the process exits with 128 + the number.

    For commands, which own their process. Signals that are ignored (as under nohup) or handled already are left alone.
    """
    received: list[tuple[int, float]] = []

    def handle(number: int, _: FrameType | None) -> None:
        drop_lost_terminal(number)
        if received and time.monotonic() - received[-1][1] < IMPATIENT:
            return
        received.append((number, time.monotonic()))
        raise Terminated(number)

    try:
        with handled_by(handle, lambda number, old: number != signal.SIGINT and old is signal.SIG_DFL):
            yield
    except Terminated as error:
        sys.exit(exit_status(error))
    except SystemExit as end:
        if received and end.code == exit_status(KeyboardInterrupt()):  # Typer exits so on any KeyboardInterrupt
            sys.exit(128 + received[-1][0])
        raise


@contextmanager
def deferred_signals(on_signal: Callable[[int], object]) -> Iterator[None]:
    """While the block runs, SIGINT, SIGTERM and SIGHUP only call `on_signal`; a second one, later, ends it at once.

    Signals that are ignored stay so: SIGHUP under nohup, SIGINT in the background of a shell script.
    """
    first = math.inf

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal first
        drop_lost_terminal(number)
        if time.monotonic() - first > IMPATIENT:
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)
        first = min(first, time.monotonic())
        on_signal(number)

    with handled_by(handle, lambda _, old: old is not signal.SIG_IGN):
        yield


def drop_lost_terminal(number: int) -> None:
    """On SIGHUP, send output to /dev/null if the terminal is gone: errors on writing would keep a run from saving."""
    if number != getattr(signal, "SIGHUP", None):
        return
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            with suppress(OSError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


@contextmanager
def starting_workers(forked: bool) -> Iterator[None]:
    """Defer signals while processes are started that call `init_signals_of_worker`.

    The interpreter ignores exceptions in its hooks around a fork, so a handler that raises would be lost. In `forked`
    workers signals are blocked until they ignore them, or one sent to the whole group would end them before. Nor do
    they collect garbage of this process: freeing a CUDA object would abort them.
    """
    if forked:
        gc.freeze()
    block = forked and hasattr(signal, "pthread_sigmask")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING) if block else set()
    deferred: list[tuple[int, FrameType | None]] = []
    with handled_by(lambda *args: deferred.append(args), lambda _, old: callable(old)) as previous:
        try:
            yield
        finally:
            if block:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if forked:
                gc.unfreeze()
    if deferred:
        previous[deferred[0][0]](*deferred[0])


def init_signals_of_worker() -> None:
    """Ignore signals in a worker: a terminal, `timeout` and torchrun send them to the whole process group.

    The main process ends its workers, or in training first finishes its step with their images.
    """
    end_with_parent()
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def end_with_parent() -> None:
    """End this worker process within a second when its parent has ended, for whatever reason. Called in the worker.

    A thread polls, which goes on while a decoder hangs.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    method = getattr(multiprocessing.current_process(), "_start_method", None) or multiprocessing.get_start_method()
    # The direct parent may be a fork server; Windows keeps the number of a parent that is gone.
    by_number = method != "forkserver" and sys.platform != "win32"

    def watch() -> None:
        while os.getppid() == parent.pid if by_number else parent.is_alive():
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="veca-parent", daemon=True).start()
