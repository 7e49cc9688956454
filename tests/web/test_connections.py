"""The explorer's server under clients that hold connections: by silence, by slowness, by not reading."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from conftest import make_tiny
from sample_images import encode, fractal_image
from starlette.testclient import TestClient

from veca.web.app import create_app
from veca.web.connections import ConnectionPool, Limits, create_server
from veca.web.images import UploadReceiver
from veca.web.jobs import BusyError, JobQueue, JobSteps, RequestError
from veca.web.security import SecurityMiddleware

PATIENT = Limits(header_seconds=60, idle_seconds=60, body_seconds=60, grace_seconds=60)
"""Nothing ends by itself while a test runs."""
DEADLINE = 20.0
"""Seconds in which everything that must end has ended."""
PHOTO = encode(fractal_image(640, 480))
GET = b"GET /api/about HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /api/pictures HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"


@contextmanager
def serving(app: Any, limits: Limits) -> Iterator[tuple[int, ConnectionPool]]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen(128)
        server = create_server(app, limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield bound.getsockname()[1], server.config.http.pool  # type: ignore[union-attr]
        finally:
            server.should_exit = True
            thread.join(DEADLINE)
        assert not thread.is_alive()


@contextmanager
def exploring(limits: Limits) -> Iterator[tuple[int, ConnectionPool]]:
    with serving(create_app({"tiny": make_tiny()}, warm=False, limits=limits), limits) as served:
        yield served


class Crowd(ExitStack):
    """Sockets to one server, closed in the end."""

    def connect(self, port: int, sent: bytes = b"", source: str = "127.0.0.1", unread: bool = False) -> socket.socket:
        connection = self.enter_context(socket.socket())
        connection.settimeout(DEADLINE)
        connection.bind((source, 0))
        if unread:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(sent)
        return connection


def ask(port: int, body: bytes | None = None, path: str = "/api/about") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def rest(connection: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    received = b""
    try:
        while data := connection.recv(2**20):
            received += data
    except ConnectionResetError:
        pass
    return received


def drip_until_closed(connection: socket.socket) -> bytes:
    """Send a byte now and then until the server closes; whatever it said."""
    end = time.monotonic() + DEADLINE
    connection.settimeout(0.05)
    received = b""
    while time.monotonic() < end:
        try:
            connection.send(b"a")
            data = connection.recv(2**16)
        except TimeoutError:
            continue
        except OSError:
            return received
        if not data:
            return received
        received += data
    raise AssertionError(f"still open: {received!r}")


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_silent_connections_keep_nobody_out_and_are_closed() -> None:
    limits = Limits(connections=64, per_address=48, header_seconds=1.0)
    with exploring(limits) as (port, pool), Crowd() as crowd:
        silent = [crowd.connect(port) for _ in range(limits.connections + 30)]
        assert ask(port)[0] == 200
        assert len(pool.open) <= limits.per_address
        assert [rest(connection) for connection in silent] == [b""] * len(silent)


def test_headers_that_drip_are_cut_off() -> None:
    with exploring(Limits(header_seconds=0.5)) as (port, _), Crowd() as crowd:
        assert drip_until_closed(crowd.connect(port, b"GET /api/about HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")) == b""


def test_an_idle_connection_is_closed_and_a_new_request_starts_its_time_anew() -> None:
    with exploring(Limits(idle_seconds=0.5)) as (port, _), Crowd() as crowd:
        connection = crowd.connect(port, GET)
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200")
        connection.sendall(GET)
        assert rest(connection).count(b"HTTP/1.1 200") == 1


def test_uploads_that_drip_keep_no_other_one_out() -> None:
    with exploring(PATIENT) as (port, pool), Crowd() as crowd:
        for _ in range(150):
            crowd.connect(port, POST + b"a")
        wait_for(lambda: len(pool.open) == 150)
        assert ask(port, PHOTO, "/api/pictures")[0] == 200
        assert ask(port)[0] == 200


def test_uploads_that_fill_all_connections_give_way_to_others() -> None:
    limits = Limits(connections=40, per_address=30, header_seconds=60, body_seconds=60, grace_seconds=60)
    with exploring(limits) as (port, _), Crowd() as crowd:
        for _ in range(40):
            crowd.connect(port, POST + b"a")
        assert ask(port, PHOTO, "/api/pictures")[0] == 200


@pytest.mark.parametrize("limits", [Limits(grace_seconds=0.5), Limits(body_seconds=0.5)], ids=["rate", "whole"])
def test_an_upload_that_drips_is_told_and_ended(limits: Limits) -> None:
    with exploring(limits) as (port, _), Crowd() as crowd:
        told = drip_until_closed(crowd.connect(port, POST))
        assert told.startswith(b"HTTP/1.1 408")
        assert b"did not arrive in time" in told


@pytest.mark.parametrize("framing", [b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n186a0\r\n"])
@pytest.mark.parametrize("path", [b"/api/about", b"/slow"])
def test_a_body_that_nobody_reads_is_cut_off(framing: bytes, path: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            if scope["path"] == "/slow":
                while (await receive())["type"] != "http.disconnect":
                    pass
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    limits = Limits(header_seconds=0.5, body_seconds=0.3, grace_seconds=0.3, idle_seconds=0.5)
    with serving(app, limits) as (port, _), Crowd() as crowd:
        drip_until_closed(crowd.connect(port, b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s" % (path, framing)))


def test_an_address_has_a_share_and_others_keep_theirs() -> None:
    limits = Limits(connections=24, per_address=16, header_seconds=60)
    with exploring(limits) as (port, pool), Crowd() as crowd:
        try:
            other = crowd.connect(port, source="127.0.0.2")
        except OSError:
            pytest.skip("this machine has one loopback address")
        for _ in range(100):
            crowd.connect(port)
        wait_for(lambda: sum(each.address == "127.0.0.1" for each in list(pool.open)) == 16)
        for _ in range(100):
            crowd.connect(port, source="127.0.0.3")
        wait_for(lambda: sum(each.address == "127.0.0.3" for each in list(pool.open)) >= 11)
        assert len(pool.open) <= 24
        other.sendall(GET)
        assert other.recv(2**16).startswith(b"HTTP/1.1 200")


def test_connections_being_worked_for_are_kept_and_others_told_to_wait() -> None:
    release = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await asyncio.to_thread(release.wait, DEADLINE)
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    limits = Limits(connections=4, per_address=4, header_seconds=0.4, body_seconds=0.4, grace_seconds=0.4)
    with serving(app, limits) as (port, pool), Crowd() as crowd:
        waiting = [crowd.connect(port, GET) for _ in range(4)]
        wait_for(lambda: len(pool.open) == 4 and all(each.working for each in list(pool.open)))
        refused = rest(crowd.connect(port))
        assert refused.startswith(b"HTTP/1.1 503")
        assert b"Retry-After: 1" in refused
        time.sleep(1)  # longer than any limit on the client's part
        release.set()
        assert all(connection.recv(2**16).startswith(b"HTTP/1.1 200") for connection in waiting)


LARGE = 2**24


def large(calls: list[int]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            calls.append(1)
            headers = [(b"content-length", b"%d" % LARGE)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": bytes(LARGE)})

    return app


def test_responses_that_nobody_reads_are_bounded_in_memory_and_time() -> None:
    calls: list[int] = []
    limits = Limits(unsent_bytes=3 * LARGE, grace_seconds=60)
    with serving(large(calls), limits) as (port, pool), Crowd() as crowd:
        for count in range(1, 11):
            crowd.connect(port, GET, unread=True)
            wait_for(lambda count=count: len(calls) == count)  # type: ignore[misc]
        wait_for(lambda: sum(each.unsent for each in list(pool.open)) <= limits.unsent_bytes)
        assert 1 <= len(pool.open) <= 4
        assert len(ask(port)[1]) == LARGE

    with serving(large([]), Limits(grace_seconds=0.5, min_rate=1)) as (port, pool), Crowd() as crowd:
        for request in (GET, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")):
            crowd.connect(port, request, unread=True)
        wait_for(lambda: len(pool.open) == 2)
        wait_for(lambda: not pool.open)


def test_pipelined_requests_wait_until_the_response_before_is_read() -> None:
    calls: list[int] = []
    with serving(large(calls), PATIENT) as (port, _), Crowd() as crowd:
        connection = crowd.connect(port, 3 * GET, unread=True)
        assert connection.recv(1) == b"H"
        time.sleep(0.3)
        assert len(calls) == 1
        received = 1
        while received < 3 * LARGE:
            received += len(connection.recv(2**20))
        assert len(calls) == 3


def test_long_headers_are_refused() -> None:
    arrived = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            arrived.wait(DEADLINE)  # blocks the server, so that it finds all of the headers at once
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})

    with serving(app, PATIENT) as (port, _), Crowd() as crowd:
        long, blocking = crowd.connect(port), crowd.connect(port, GET)
        long.sendall(GET[:-2] + b"X-A: a\r\n" * 7000 + b"\r\n")
        arrived.set()
        assert blocking.recv(64).startswith(b"HTTP/1.1 200")
        assert not long.recv(64).startswith(b"HTTP/1.1 200")


class FakeUpload:
    """A request whose body comes in the pieces that a test puts into it."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()

    async def stream(self) -> AsyncIterator[bytes]:
        while piece := await self.pieces.get():
            yield piece


def test_where_memory_runs_short_the_slowest_upload_of_the_largest_address_ends() -> None:
    async def scenario() -> list[object]:
        uploads = UploadReceiver(PATIENT, max_bytes=2**20)

        async def receive(request: FakeUpload, address: str) -> object:
            try:
                async with uploads.receive(request, address) as data:  # type: ignore[arg-type]
                    return len(data)
            except RequestError as error:
                return error.status

        requests = [FakeUpload() for _ in range(5)]
        tasks = []
        for request, address in zip(requests, ("a", "b", "b", "b", "a"), strict=True):
            tasks.append(asyncio.create_task(receive(request, address)))
            await asyncio.sleep(0.05)
        for request, size in zip(requests, (2**10, 2**17, 2**18, 2**18, 2**19 - 2**12), strict=True):
            request.pieces.put_nowait(bytes(size))
            await asyncio.sleep(0.05)
        for request in requests:
            request.pieces.put_nowait(b"")
        return list(await asyncio.gather(*tasks))

    # The last exceeds 1 MiB in all: of address b, which holds most, the upload that came slowest makes room.
    assert asyncio.run(scenario()) == [2**10, 503, 2**18, 2**18, 2**19 - 2**12]


def test_one_address_cannot_take_all_requests_nor_the_whole_queue() -> None:
    async def scenario() -> list[int]:
        release = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await release.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        guard, statuses = SecurityMiddleware(app, {"localhost"}, max_requests=8), []

        async def arrive(address: str) -> None:
            async def send(message: Any) -> None:
                if "status" in message:
                    statuses.append(message["status"])

            scope = {
                "type": "http", "path": "/", "query_string": b"", "headers": [(b"host", b"localhost")],
                "client": (address, 1),
            }  # fmt: skip
            await guard(scope, None, send)  # type: ignore[arg-type]

        tasks = [asyncio.create_task(arrive(address)) for address in ["192.0.2.1"] * 20 + ["192.0.2.2"] * 2]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*tasks)
        return statuses

    assert sorted(asyncio.run(scenario())) == [200] * 8 + [503] * 14

    release, log = threading.Event(), []

    def held() -> JobSteps[None]:
        release.wait(DEADLINE)
        return
        yield

    def job(name: str) -> JobSteps[None]:
        log.append(name)
        return
        yield

    worker = JobQueue("test", 8)
    try:
        futures = [worker.submit("held", held())]
        futures += [worker.submit(f"a{i}", job(f"a{i}"), client="a") for i in range(6)]
        with pytest.raises(BusyError):
            worker.submit("a6", job("a6"), client="a")
        futures.append(worker.submit("b0", job("b0"), client="b"))
        release.set()
        for future in futures:
            future.result(DEADLINE)
    finally:
        release.set()
        worker.close()
    assert log == ["a0", "b0", "a1", "a2", "a3", "a4", "a5"], "clients take turns"


def test_a_token_is_found_among_other_cookies() -> None:
    app = create_app({"tiny": make_tiny()}, token="correct-horse", warm=False)

    def status(cookie: str) -> int:
        with TestClient(app, base_url="http://localhost") as client:
            return client.get("/api/about", headers={"cookie": cookie}).status_code

    assert status('a="b; c"; veca-token=correct-horse; d=e') == 200
    assert status('a="veca-token=correct-horse"') == 401
    assert status("veca-token=wrong") == 401
    assert status('a="' + "\\\\" * 10000) == 401
