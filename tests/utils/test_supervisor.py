"""The supervisor of a server: what happens when its worker dies, cannot start, or is to end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from veca.bench.machine import child_environment
from veca.utils.supervisor import MAX_CRASHES, SUPPORTED

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="sockets cannot be handed over here")

WORKER = """
import os, signal, socket, sys
from veca.utils.supervisor import Supervised
worker = Supervised.attach()
if "broken" in sys.argv:
    sys.exit("no such model")
listening = worker.listening or socket.create_server(("127.0.0.1", 0))
count = worker.notes.get("count", 0) + 1
worker.report_ready(listening, count=count)
if worker.listening is None:
    print(listening.getsockname()[1], flush=True)
while True:
    client, _ = listening.accept()
    with client:
        client.sendall(str(count).encode())
        if client.recv(16) == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
"""
"""Tells every client how many workers there have been, and dies by what it says."""
SUPERVISOR = "import sys; from veca.utils.supervisor import supervise; sys.exit(supervise(sys.argv[1:]))"


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SUPERVISOR, sys.executable, "-c", WORKER, *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=child_environment())


def ask(port: int, text: bytes = b"") -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        said = client.recv(16).decode()
        client.sendall(text or b"bye")
        client.settimeout(60)
        assert client.recv(16) == b""  # it has closed the connection, or is dead
        return said


def test_a_worker_that_is_killed_is_started_again_and_no_client_is_refused() -> None:
    with start() as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert [ask(port, b"die") for _ in range(MAX_CRASHES)] == [str(number + 1) for number in range(MAX_CRASHES)]
        rest, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert rest == ""
    restarts = ["warning: the worker was ended by SIGKILL; starting it again"] * (MAX_CRASHES - 1)
    assert told.splitlines() == [
        *restarts,
        f"error: the worker was ended by SIGKILL, {MAX_CRASHES} times in a row: see above",
    ]


def test_a_signal_ends_the_worker_too() -> None:
    with start() as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert ask(port) == ask(port) == "1"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def test_a_worker_ends_with_its_supervisor() -> None:
    with start() as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        process.kill()
        assert process.communicate(timeout=60)[0] == "", "nobody has the pipe any more: the worker is gone"
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def test_a_worker_that_cannot_start_is_not_started_again() -> None:
    with start("broken") as process:
        _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (1, "no such model\n")
