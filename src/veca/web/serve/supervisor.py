"""Keeps a server up: it runs in a worker process, which is started again where it crashes or is killed.

The parent process has the listening socket and nothing else. While a worker starts, clients wait to be accepted: only
those whose requests the worker had are cut off.
"""

import multiprocessing
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from veca.errors import VecaError
from veca.utils.console import PlainConsole
from veca.utils.signals import STOPPING, end_with_parent

MAX_CRASHES = 5
"""In a row, each within `QUICK_SECONDS` of the worker's start: then starting again does not help."""
QUICK_SECONDS = 60.0


def supervise(
    serve: Callable[..., None],
    arguments: tuple[Any, ...],
    listening: socket.socket,
    on_ready: Callable[[], None],
    on_crash: Callable[[str], None],
) -> None:
    """Run `serve(listening, ready, *arguments)` in a process, again and again until a signal comes.

    `serve` calls `ready` once it can answer, and the first time `on_ready` is called here. What goes wrong before is
    raised. It is a function of a module, and so are the classes of its arguments: they are pickled.
    """
    crashes, first = 0, True
    while True:
        began = time.monotonic()
        worker, receiving = _start(serve, arguments, listening)
        try:
            ended = _wait_until_ready(worker, receiving)
            if not ended:
                if first:
                    on_ready()
                first = False
                worker.join()
                ended = _describe_end(worker)
        except KeyboardInterrupt:
            listening.close()  # new connections are refused from now on
            worker.terminate()
            try:
                worker.join()
            finally:  # a second signal
                worker.kill()
            raise
        crashes = crashes + 1 if time.monotonic() - began < QUICK_SECONDS else 1
        if first or crashes >= MAX_CRASHES:
            raise VecaError(ended if first else f"{ended}, {crashes} times in a row: see above")
        on_crash(f"{ended}; starting again")


def _start(
    serve: Callable[..., None], arguments: tuple[Any, ...], listening: socket.socket
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")  # a fork would share what PyTorch has begun
    receiving, sending = context.Pipe(duplex=False)
    worker = context.Process(target=_run_worker, args=(serve, arguments, listening, sending), daemon=True)
    # Blocked until the worker ignores it: Ctrl-C goes to both, and it is the parent that ends the worker.
    masks = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if masks else set()
    try:
        worker.start()
    finally:
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    sending.close()
    return worker, receiving


def _wait_until_ready(worker: multiprocessing.process.BaseProcess, receiving: Connection) -> str:
    """Nothing once it answers; why it ended, if it did before."""
    try:
        return str(receiving.recv())
    except EOFError:
        worker.join()
        return _describe_end(worker)


def _describe_end(worker: multiprocessing.process.BaseProcess) -> str:
    status = worker.exitcode or 0
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"the worker process {how}"


def _run_worker(
    serve: Callable[..., None], arguments: tuple[Any, ...], listening: socket.socket, sending: Connection
) -> None:
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent()
    ready = False

    def on_ready() -> None:
        nonlocal ready
        sending.send("")
        ready = True

    try:
        serve(listening, on_ready, *arguments)
    except (VecaError, OSError) as error:
        if ready:
            PlainConsole(stderr=True).print(f"error: {error}", style="red", soft_wrap=True)
        else:
            sending.send(str(error))
        sys.exit(1)
