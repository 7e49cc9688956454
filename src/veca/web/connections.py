"""The HTTP server with limits on connections: time of each phase, number per address, unsent bytes.

uvicorn closes a connection only when it is idle after a response. A client that sends nothing, sends a byte now and
then, or never reads its response could hold a connection forever.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from veca.errors import ArgumentError
from veca.utils.signals import handled_by
from veca.utils.text import quoted
from veca.web.security import address_of

INITIAL_CREDIT = 2**16
"""Bytes credited to every transfer when the slowest is determined, so that it is not the newest."""
_MAX_PARSED = 2**14
"""Bytes passed to h11 at a time: it checks the length of headers only between two calls."""
_PROBLEM = b'{"problem": "Too many connections at once; try again in a moment."}'
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(_PROBLEM), _PROBLEM)
)


@dataclass(frozen=True)
class Limits:
    connections: int = 512
    per_address: int = 256
    """Of one address: others always find room."""
    header_seconds: float = 10.0
    """From the first byte of a request, or from connecting, to the end of its headers."""
    idle_seconds: float = 10.0
    """Between a response and the next request on the same connection."""
    body_seconds: float = 30.0
    """For the whole body of a request, at whatever rate it comes."""
    grace_seconds: float = 10.0
    min_rate: float = 2**14
    """Bytes per second, on average after `grace_seconds`, at which a body must arrive and a response be read."""
    unsent_bytes: int = 2**28
    """Of responses that clients have not read yet, over all connections."""

    def seconds_for(self, transferred: int) -> float:
        """How long a transfer may have taken after `transferred` bytes."""
        return self.grace_seconds + transferred / self.min_rate


LIMITS = Limits()


def slowest_at_largest_address(held: Mapping[Any, int]) -> Any:
    """Of transfers, which have an `address` and a `pace`, and the bytes each holds: the slowest one of the address
    that holds most in total.
    """
    by_address: Counter[str] = Counter()
    for transfer, size in held.items():
        by_address[transfer.address] += size
    largest, _ = by_address.most_common(1)[0]
    return min((transfer for transfer in held if transfer.address == largest), key=lambda transfer: transfer.pace)


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients can connect to from now on: they wait while models are loaded, and are not refused."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
        return bound
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise ArgumentError(
            f"cannot listen on {quoted(host)}, port {port}: {reason}; choose another --port or --host"
        ) from error


def printed_address(host: str, listening: socket.socket) -> str:
    """The address to print for a server that was told to listen on `host`."""
    shown = f"[{host}]" if ":" in host else socket.gethostname() if host in ("0.0.0.0", "") else host
    return f"http://{shown}:{listening.getsockname()[1]}/"


def create_server(app: Any, limits: Limits = LIMITS, shutdown_seconds: int = 3) -> uvicorn.Server:
    """A server of `app` under `limits`; `run(sockets=[…])` starts it.

    When it is to stop, requests that were accepted have `shutdown_seconds` to be answered.
    """
    protocol = type("Protocol", (LimitedProtocol,), {"pool": ConnectionPool(_within_file_limit(limits))})
    # The log has errors only: otherwise clients could fill it with invalid requests.
    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False, "ws": "none"}
    timeouts: dict[str, Any] = {"timeout_keep_alive": limits.idle_seconds}
    timeouts |= {"timeout_graceful_shutdown": shutdown_seconds}
    # The backlog waits to be accepted: so many connections can exceed the limit before the first is closed.
    return _LimitedServer(uvicorn.Config(app, http=protocol, backlog=128, **quiet, **timeouts))


class _LimitedServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down on SIGHUP too, where it ends a command. uvicorn raises what it captured again in the end."""
        hangup = getattr(signal, "SIGHUP", None)  # not on Windows; not callable where it is ignored, as under nohup
        applies = lambda number, handler: number == hangup and callable(handler)  # noqa: E731
        with super().capture_signals(), handled_by(self.handle_exit, applies):
            yield

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        pool: ConnectionPool = self.config.http.pool  # type: ignore[union-attr]
        for connection in [connection for connection in pool.open if connection.is_overdue()]:
            pool.close(connection)
        return await super().on_tick(counter)


class ConnectionPool:
    """The open connections of a server; where there are too many, or they are too slow, the slowest are closed."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.open: set[LimitedProtocol] = set()

    def add(self, new: LimitedProtocol) -> None:
        """Admit a connection; at the limit the slowest of a crowded address makes room, or the new one is refused."""
        self.open.add(new)
        per_address = Counter(connection.address for connection in self.open)
        own_crowded = per_address[new.address] > self.limits.per_address
        if not own_crowded and len(self.open) <= self.limits.connections:
            return
        crowded = new.address if own_crowded else per_address.most_common(1)[0][0]
        candidates = [c for c in self.open if c.address == crowded and c is not new and not c.working]
        if candidates:
            self.close(min(candidates, key=lambda connection: connection.pace))
        else:
            self.open.discard(new)
            new.transport.write(_REFUSAL)
            new.transport.close()

    def limit_unsent(self) -> None:
        """Close connections that do not read, until the responses of all others fit into memory."""
        unsent = {connection: connection.unsent for connection in self.open if connection.unsent}
        while sum(unsent.values()) > self.limits.unsent_bytes:
            slowest = slowest_at_largest_address(unsent)
            self.close(slowest)
            del unsent[slowest]

    def close(self, connection: LimitedProtocol) -> None:
        self.open.discard(connection)
        connection.transport.abort()  # `close` would wait until the client has read everything


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, which also tracks how long the current phase of its connection has taken.

    Phases: waiting for a request, receiving its body, working on it, sending the response.
    """

    pool: ClassVar[ConnectionPool]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = address_of(self.client[0]) if self.client else ""
        self._completion_deferred = False  # whether uvicorn has yet to be told that the response is complete
        self._begin_phase()
        self.pool.add(self)

    def _begin_phase(self) -> None:
        # A client that does not read makes no progress: the fewest unsent bytes so far, and since when.
        self._phase_start = self._last_progress = self.loop.time()
        self._to_send = self._min_unsent = self.unsent
        self._received = 0  # bytes

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.open.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._waiting and not self._received:
            self._begin_phase()  # the first bytes of a request
        for start in range(0, len(data), _MAX_PARSED):
            if self.transport.is_closing():
                return
            part = data[start : start + _MAX_PARSED]
            self._received += len(part)
            super().data_received(part)

    def handle_events(self) -> None:
        previous = self.cycle
        super().handle_events()
        if self.cycle is not previous:
            self._begin_phase()

    def on_response_complete(self) -> None:
        self._begin_phase()
        if self.flow.write_paused:
            # The next pipelined request waits until this response has been read: one per connection in memory.
            self._completion_deferred = True
            self.pool.limit_unsent()
        else:
            super().on_response_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._completion_deferred:
            self._completion_deferred = False
            self._begin_phase()
            super().on_response_complete()

    @property
    def unsent(self) -> int:
        """Bytes of the response that the client has not read yet."""
        return self.transport.get_write_buffer_size()

    @property
    def working(self) -> bool:
        """Whether the client has done its part and waits for the server."""
        return not (self._waiting or self.unsent or self.cycle.more_body)

    @property
    def pace(self) -> float:
        """Bytes per second of the current phase."""
        elapsed = max(self.loop.time() - self._phase_start, 1e-6)
        return (self._transferred + INITIAL_CREDIT) / elapsed

    def is_overdue(self) -> bool:
        """Whether the current phase has taken longer than it may."""
        limits, now = self.pool.limits, self.loop.time()
        if self.working:
            return False
        if self.unsent:
            if self.unsent < self._min_unsent:
                self._min_unsent, self._last_progress = self.unsent, now
            if now - self._last_progress > limits.grace_seconds:
                return True
            allowed = limits.seconds_for(self._transferred)
        elif self._waiting:
            allowed = limits.idle_seconds if self.cycle and not self._received else limits.header_seconds
        else:
            # Uploads enforce tighter limits with a proper answer; this ends bodies that no handler reads.
            allowed = limits.body_seconds + limits.grace_seconds
        return now - self._phase_start > allowed

    @property
    def _waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _transferred(self) -> int:
        return self._to_send - self.unsent if self.unsent else self._received


def _within_file_limit(limits: Limits) -> Limits:
    """Let connections take at most half of the files that this process may open."""
    with suppress(ImportError):
        import resource  # not on Windows

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY and files // 2 < limits.connections:
            return replace(limits, connections=files // 2, per_address=min(limits.per_address, files // 4))
    return limits
