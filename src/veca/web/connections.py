"""Limits on connections: how long each phase may take, how many an address may hold, how much may wait to be sent.

uvicorn closes connections only when they are idle after a response. Without more, a client that sends nothing, sends a
byte now and then, or never reads its response holds a connection for as long as it likes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from veca.web.security import address_of

CONNECTIONS = 512
PER_ADDRESS = CONNECTIONS // 2
"""At most, of one address: others always find room."""
HEADER_SECONDS = 10.0
"""From the first byte of a request, or from connecting, to the end of its headers."""
IDLE_SECONDS = 10.0
"""Between a response and the next request of the same connection."""
BODY_SECONDS = 30.0
"""For the whole body of a request, at whatever rate it comes."""
GRACE_SECONDS = 10.0
MIN_RATE = 2**14
"""Bytes per second, on average after the first GRACE_SECONDS, at which a body must come and a response be read."""
UNSENT_BYTES = 2**28
"""Of responses that clients have not read yet, over all connections."""
BACKLOG = 128
"""Connections that wait to be accepted; so many can be accepted beyond the limit before the first is closed."""
HEAD_START = 2**16
"""Bytes credited to every transfer when the slowest is looked for, so that a new one is not the slowest."""
_SLICE = 2**14
"""Bytes handed to h11 at once: it checks the length of headers only between two calls."""
_REFUSAL = b'{"problem": "Too many connections at once; try again in a moment."}'


@dataclass(frozen=True)
class Limits:
    connections: int = CONNECTIONS
    per_address: int = PER_ADDRESS
    header_seconds: float = HEADER_SECONDS
    idle_seconds: float = IDLE_SECONDS
    body_seconds: float = BODY_SECONDS
    grace_seconds: float = GRACE_SECONDS
    min_rate: float = MIN_RATE
    unsent_bytes: int = UNSENT_BYTES

    def seconds_for(self, transferred: int) -> float:
        """How long a transfer may have taken after `transferred` bytes."""
        return self.grace_seconds + transferred / self.min_rate


LIMITS = Limits()


def create_server(app: Any, limits: Limits = LIMITS) -> uvicorn.Server:
    """A server of `app` under `limits`; `run(sockets=[…])` starts it."""
    protocol = type("Protocol", (LimitedProtocol,), {"pool": ConnectionPool(_within_file_limit(limits))})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level="error",  # a warning for every request that is not HTTP would let clients fill the log
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]
        timeout_graceful_shutdown=3,
    )
    return uvicorn.Server(config)


class ConnectionPool:
    """The open connections of a server. Too many, or too slow ones, are closed, the slowest first."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.open: set[LimitedProtocol] = set()
        shortest = min(limits.header_seconds, limits.idle_seconds, limits.body_seconds, limits.grace_seconds)
        self._interval = min(1.0, shortest / 4)
        self._sweeping = False

    def add(self, new: LimitedProtocol) -> None:
        """Make room for `new`, in the share of its address or else where most connections are, or refuse it."""
        self.open.add(new)
        self._sweep_later(new.loop)
        crowd = [each for each in self.open if each.address == new.address]
        if len(crowd) <= self.limits.per_address:
            if len(self.open) <= self.limits.connections:
                return
            crowded, _ = Counter(each.address for each in self.open).most_common(1)[0]
            crowd = [each for each in self.open if each.address == crowded]
        if not self._close_slowest([each for each in crowd if each is not new and not each.working]):
            self.open.discard(new)
            new.refuse()

    def limit_unsent(self) -> None:
        """Close connections whose clients do not read, until what they all have to be sent fits into memory."""
        unsent = {each: each.unsent for each in self.open if each.unsent}
        while sum(unsent.values()) > self.limits.unsent_bytes:
            by_address: Counter[str] = Counter()
            for each, size in unsent.items():
                by_address[each.address] += size
            largest, _ = by_address.most_common(1)[0]
            closed = self._close_slowest([each for each in unsent if each.address == largest])
            assert closed
            del unsent[closed]

    def close(self, connection: LimitedProtocol) -> None:
        self.open.discard(connection)
        connection.transport.abort()  # `close` would wait until the client has read all

    def _close_slowest(self, crowd: list[LimitedProtocol]) -> LimitedProtocol | None:
        slowest = min(crowd, key=lambda each: each.pace, default=None)
        if slowest:
            self.close(slowest)
        return slowest

    def _sweep_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.open and not self._sweeping:
            self._sweeping = True
            loop.call_later(self._interval, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweeping = False
        for each in [each for each in self.open if each.is_overdue()]:
            self.close(each)
        self._sweep_later(loop)


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which also keeps track of how long the present phase of its connection has taken.

    Phases: waiting for a request, receiving its body, working on it, sending the response.
    """

    pool: ClassVar[ConnectionPool]
    address: str
    _since: float
    """When the present phase began."""
    _received: int
    """Bytes received in it."""
    _to_send: int
    """Bytes that were to be sent when it began."""
    _least_unsent: int
    _last_read: float
    """The fewest bytes left to send so far, and since when: a client that does not read makes no progress."""
    _owes_completion: bool
    """Whether uvicorn has yet to be told that the response is complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = address_of(self.client[0]) if self.client else ""
        self._owes_completion = False
        self._begin_phase()
        self.pool.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.open.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._waiting and not self._received:
            self._begin_phase()  # a request begins
        for start in range(0, len(data), _SLICE):
            if self.transport.is_closing():
                return
            piece = data[start : start + _SLICE]
            self._received += len(piece)
            super().data_received(piece)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._begin_phase()

    def on_response_complete(self) -> None:
        self._begin_phase()
        if self.flow.write_paused:
            # The next of several pipelined requests waits until this response has been read: one per connection.
            self._owes_completion = True
            self.pool.limit_unsent()
        else:
            super().on_response_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._owes_completion:
            self._owes_completion = False
            self._begin_phase()
            super().on_response_complete()

    def refuse(self) -> None:
        self.transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(_REFUSAL), _REFUSAL)
        )
        self.transport.close()

    @property
    def unsent(self) -> int:
        """Bytes of the response that the client has not taken yet."""
        return self.transport.get_write_buffer_size()

    @property
    def working(self) -> bool:
        """Whether the client has done its part and waits for the server."""
        return not (self._waiting or self.unsent or self.cycle.more_body)

    @property
    def pace(self) -> float:
        """Bytes per second of the present phase."""
        elapsed = max(self.loop.time() - self._since, 1e-6)
        return (self._transferred + HEAD_START) / elapsed

    def is_overdue(self) -> bool:
        """Whether the present phase has taken longer than it may."""
        limits, now = self.pool.limits, self.loop.time()
        if self.working:
            return False
        if self.unsent:
            if self.unsent < self._least_unsent:
                self._least_unsent, self._last_read = self.unsent, now
            if now - self._last_read > limits.grace_seconds:
                return True
            allowed = limits.seconds_for(self._transferred)
        elif self._waiting:
            allowed = limits.idle_seconds if self.cycle and not self._received else limits.header_seconds
        else:
            # An upload is told about its own limits; this one ends bodies that nobody reads.
            allowed = limits.body_seconds + limits.grace_seconds
        return now - self._since > allowed

    @property
    def _waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _transferred(self) -> int:
        return self._to_send - self.unsent if self.unsent else self._received

    def _begin_phase(self) -> None:
        self._since = self._last_read = self.loop.time()
        self._received = 0
        self._to_send = self._least_unsent = self.unsent


def _within_file_limit(limits: Limits) -> Limits:
    """Connections may take half of the files that this process may open."""
    try:
        import resource
    except ImportError:  # Windows
        return limits
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or files // 2 >= limits.connections:
        return limits
    return replace(limits, connections=files // 2, per_address=min(limits.per_address, files // 4))
