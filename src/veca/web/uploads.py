"""Receiving uploads: limits on bytes, time and rate of a request's body.

The number of uploads is not limited here: a slow upload holds little memory, so it keeps no other one out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from veca.web.connections import INITIAL_CREDIT, Limits, slowest_at_largest_address
from veca.web.images import MAX_UPLOAD_BYTES
from veca.web.jobs import BusyError, DroppedError, RequestError

MAX_PENDING_BYTES = 4 * MAX_UPLOAD_BYTES
"""Of all uploads together that are being received or wait to be decoded."""


class _Upload:
    def __init__(self, address: str) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self.timeout, self.start = asyncio.timeout(None), self.loop.time()
        self.data = bytearray()
        self.complete = self.evicted = False

    @property
    def pace(self) -> float:
        """Bytes per second."""
        return (len(self.data) + INITIAL_CREDIT) / max(self.loop.time() - self.start, 1e-6)


class UploadReceiver:
    """Reads the bodies of uploads; where memory runs short, the slowest of the address that holds most is evicted."""

    def __init__(self, limits: Limits, max_bytes: int = MAX_PENDING_BYTES) -> None:
        self.limits, self.max_bytes = limits, max_bytes
        self._uploads: set[_Upload] = set()

    @asynccontextmanager
    async def receive(self, request: Request, address: str) -> AsyncIterator[bytes]:
        """The whole body of `request`, or a `RequestError`; it counts as pending until the `with` block ends."""
        # Refuse at once what is announced as too long; the header may be missing or wrong, so `_read` counts too.
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > MAX_UPLOAD_BYTES:
            raise _too_long()
        upload = _Upload(address)
        self._uploads.add(upload)
        try:
            await self._read(request, upload)
            yield bytes(upload.data)
        finally:
            self._uploads.discard(upload)

    async def _read(self, request: Request, upload: _Upload) -> None:
        try:
            async with upload.timeout:
                self._extend_deadline(upload)
                async for chunk in request.stream():
                    if len(upload.data) + len(chunk) > MAX_UPLOAD_BYTES:
                        raise _too_long()
                    self._make_room(len(chunk), upload)
                    upload.data += chunk
                    self._extend_deadline(upload)
                upload.complete = True
        except ClientDisconnect:
            raise DroppedError from None
        except TimeoutError:
            if upload.evicted:
                raise _no_room() from None
            limits, came = self.limits, f"The picture did not arrive in time: {len(upload.data):,} bytes came."
            rate = f"{limits.min_rate:,.0f} bytes per second after the first {limits.grace_seconds:g}"
            rule = f"All of it must come within {limits.body_seconds:g} seconds, and {rate}; send a smaller one."
            raise RequestError(408, f"{came} {rule}", connection="close") from None

    def _extend_deadline(self, upload: _Upload) -> None:
        """The deadline moves with what has arrived."""
        if not upload.evicted:
            allowed = min(self.limits.body_seconds, self.limits.seconds_for(len(upload.data)))
            upload.timeout.reschedule(upload.start + allowed)

    def _make_room(self, size: int, upload: _Upload) -> None:
        if upload.evicted:
            raise _no_room()
        while sum(len(other.data) for other in self._uploads) + size > self.max_bytes:
            active = {other: len(other.data) for other in self._uploads if not (other.complete or other.evicted)}
            slowest = slowest_at_largest_address(active)
            if slowest is upload:
                raise _no_room()
            # Its own task wakes up by the timeout and answers 503; the memory is free at once.
            slowest.evicted = True
            slowest.data.clear()
            slowest.timeout.reschedule(upload.loop.time())


def _too_long() -> RequestError:
    message = f"The picture has more than {MAX_UPLOAD_BYTES:,} bytes; send a smaller one."
    return RequestError(413, message, connection="close")


def _no_room() -> RequestError:
    return BusyError("Too many pictures arrive at once; try again in a moment.", connection="close")
