"""Bodies of uploads: limited in bytes, in time and in rate.

Their number is not limited here: a slow upload holds little memory, so it keeps no other one out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from veca.web.connections import HEAD_START, Limits
from veca.web.images import MOST_BYTES
from veca.web.jobs import DroppedError, ProblemError

UPLOAD_BYTES = 4 * MOST_BYTES
"""Of all uploads together that are being received or wait to be opened."""


class _Upload:
    def __init__(self, address: str, timeout: asyncio.Timeout, now: float) -> None:
        self.address, self.timeout, self.since = address, timeout, now
        self.data = bytearray()
        self.complete = self.ended = False

    def pace(self, now: float) -> float:
        return (len(self.data) + HEAD_START) / max(now - self.since, 1e-6)


class Uploads:
    """Where memory runs short, the slowest upload of the address that holds most is ended."""

    def __init__(self, limits: Limits, most: int = UPLOAD_BYTES) -> None:
        self.limits, self.most = limits, most
        self._uploads: set[_Upload] = set()

    @asynccontextmanager
    async def receive(self, request: Request, address: str) -> AsyncIterator[bytes]:
        """The whole body of `request`, or a `ProblemError`; it counts as held until the end of the `with` block."""
        stated: Any = request.headers.get("content-length", "")
        if stated.isdecimal() and int(stated[:20]) > MOST_BYTES:
            raise _too_long()
        loop = asyncio.get_running_loop()
        upload = _Upload(address, asyncio.timeout(None), loop.time())
        self._uploads.add(upload)
        try:
            await self._read(request, upload)
            yield bytes(upload.data)
        finally:
            self._uploads.discard(upload)

    async def _read(self, request: Request, upload: _Upload) -> None:
        try:
            async with upload.timeout:
                self._extend(upload)
                async for chunk in request.stream():
                    if len(upload.data) + len(chunk) > MOST_BYTES:
                        raise _too_long()
                    self._make_room(len(chunk), upload)
                    upload.data += chunk
                    self._extend(upload)
                upload.complete = True
        except ClientDisconnect:
            raise DroppedError from None
        except TimeoutError:
            if upload.ended:
                raise _no_room() from None
            whole, grace, rate = self.limits.body_seconds, self.limits.grace_seconds, self.limits.min_rate
            raise ProblemError(
                408,
                f"The picture did not arrive in time: {len(upload.data):,} bytes came. All of it must come within "
                f"{whole:g} seconds, and {rate:,.0f} bytes per second after the first {grace:g}; send a smaller one.",
                connection="close",
            ) from None

    def _extend(self, upload: _Upload) -> None:
        """The deadline of an upload moves with what has arrived."""
        if not upload.ended:
            allowed = min(self.limits.body_seconds, self.limits.seconds_for(len(upload.data)))
            upload.timeout.reschedule(upload.since + allowed)

    def _make_room(self, size: int, upload: _Upload) -> None:
        if upload.ended:
            raise _no_room()
        now = asyncio.get_running_loop().time()
        while sum(len(each.data) for each in self._uploads) + size > self.most:
            unfinished = [each for each in self._uploads if not (each.complete or each.ended)]
            held: Counter[str] = Counter()
            for each in unfinished:
                held[each.address] += len(each.data)
            largest, _ = held.most_common(1)[0]
            crowd = [each for each in unfinished if each.address == largest]
            slowest = min(crowd, key=lambda each: each.pace(now))
            if slowest is upload:
                raise _no_room()
            slowest.ended = True
            slowest.data.clear()
            slowest.timeout.reschedule(now)


def _too_long() -> ProblemError:
    return ProblemError(413, f"The picture has more than {MOST_BYTES:,} bytes; send a smaller one.", connection="close")


def _no_room() -> ProblemError:
    headers = {"retry-after": "1", "connection": "close"}
    return ProblemError(503, "Too many pictures arrive at once; try again in a moment.", **headers)
