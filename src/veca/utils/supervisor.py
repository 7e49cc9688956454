"""Keep a server up: its worker process is started again where it crashes or is killed, with the same listening socket.

    supervisor  runs a command, and again if it dies; holds the listening socket
    worker      is that command: `attach` once, then `report_ready(socket)`; a later worker gets the `listening` socket

While a worker starts, clients wait to be accepted: only those whose requests the last one had are cut off. The
supervisor is small, because it imports nothing that a server does.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from veca.utils.signals import handled_by

MAX_CRASHES = 5
"""In a row, each within `QUICK_SECONDS` of the worker's start: then starting again does not help."""
QUICK_SECONDS = 60.0
SUPPORTED = hasattr(socket, "send_fds")  # not on Windows
_VARIABLE = "VECA_SUPERVISED"
_MAX_NOTES = 4096


def is_worker() -> bool:
    """Whether this process has a supervisor."""
    return _VARIABLE in os.environ


def supervise(command: Sequence[str]) -> int:
    """Run a command that calls `attach`, again and again until a signal comes; the exit status.

    One that ends before it is ready is not started again: its status is returned.
    """
    stopping, process = list[int](), None

    def stop(number: int, _: object) -> None:
        stopping.append(number)
        if process is not None:
            process.terminate()

    listening, notes, crashes = None, dict[str, Any](), 0
    with handled_by(stop, lambda _, old: old is not signal.SIG_IGN):
        while True:
            began = time.monotonic()
            process, channel = _start(command, listening, notes)
            if stopping:  # meanwhile
                process.terminate()
            with channel:
                ready = _wait_until_ready(channel)
                if ready:
                    notes, listening = ready[0], listening or ready[1]
                status = process.wait()
            if stopping:
                return 128 + stopping[0]
            if not ready and listening is None:
                return 128 - status if status < 0 else status
            crashes = crashes + 1 if time.monotonic() - began < QUICK_SECONDS else 1
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            if crashes >= MAX_CRASHES:
                print(f"error: the worker {how}, {crashes} times in a row: see above", file=sys.stderr, flush=True)
                return 1
            print(f"warning: the worker {how}; starting it again", file=sys.stderr, flush=True)


def _start(
    command: Sequence[str], listening: socket.socket | None, notes: dict[str, Any]
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        handed = {"channel": theirs.fileno(), "listening": listening and listening.fileno(), "notes": notes}
        descriptors = [each.fileno() for each in (theirs, listening) if each]
        environment = {**os.environ, _VARIABLE: json.dumps(handed)}
        return subprocess.Popen(command, env=environment, pass_fds=descriptors), ours


def _wait_until_ready(channel: socket.socket) -> tuple[dict[str, Any], socket.socket | None] | None:
    """What a worker reports: notes for the next one, and the first time the listening socket. None: it has ended."""
    message, descriptors, *_ = socket.recv_fds(channel, _MAX_NOTES, 1)
    if not message:
        return None
    return json.loads(message), socket.socket(fileno=descriptors[0]) if descriptors else None


class Supervised:
    """The side of the worker."""

    def __init__(self, channel: int, listening: int | None, notes: dict[str, Any]) -> None:
        self._channel = socket.socket(fileno=channel)
        self.listening = None if listening is None else socket.socket(fileno=listening)
        """That of the workers before; None: this is the first one."""
        self.notes = notes
        """What these have reported."""
        threading.Thread(target=self._end_with_supervisor, name="veca-supervisor", daemon=True).start()

    @classmethod
    def attach(cls) -> "Supervised | None":
        """What the supervisor of this process has for it; None if it has none."""
        handed = os.environ.pop(_VARIABLE, None)  # other processes that it may start are none of its workers
        return cls(**json.loads(handed)) if handed else None

    def report_ready(self, listening: socket.socket, **notes: Any) -> None:
        """From now on requests are answered; `notes` are for the next worker."""
        descriptors = [] if self.listening else [listening.fileno()]
        with suppress(OSError):  # it is gone, and this process will be
            socket.send_fds(self._channel, [json.dumps(notes).encode()], descriptors)

    def _end_with_supervisor(self) -> None:
        with suppress(OSError):
            self._channel.recv(1)  # nothing ever comes
        os.kill(os.getpid(), signal.SIGTERM)
