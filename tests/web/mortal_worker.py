"""A worker process for the tests of the supervisor, which dies when it is told to; quick to import."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

from veca.errors import VecaError


def serve(listening: socket.socket, on_ready: Callable[[], None], problem: str = "") -> None:
    """Tell every client the number of this process, and die by what it says."""
    if problem:
        raise VecaError(problem)
    on_ready()
    while True:
        client, _ = listening.accept()
        with client:
            client.sendall(f"{os.getpid()}\n".encode())
            if client.recv(16) == b"die\n":
                os.kill(os.getpid(), signal.SIGKILL)
