"""Images of the explorer: uploads, received under limits, and samples; decoded and cached in memory."""

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from PIL import Image
from starlette.requests import ClientDisconnect, Request

from veca.errors import ArgumentError
from veca.images import open_image, resample
from veca.images.samples import sample_images
from veca.web.connections import INITIAL_CREDIT, Limits, slowest_at_largest_address
from veca.web.jobs import BusyError, ByteCache, DroppedError, RequestError
from veca.web.schemas import ImageInfo

MAX_UPLOAD_BYTES = 2**25
MAX_PENDING_BYTES = 4 * MAX_UPLOAD_BYTES
"""Of all uploads together that are being received or wait to be decoded."""
SHORT_SIDE, LONG_SIDE = 1024, 2048
"""Images are held at most this large: what the largest resolution on offer needs."""
MAX_ASPECT = 2
"""Long side over short side; what is longer is cropped around the centre."""
DISPLAY_SIZE = 1024
SAMPLE_TITLES = {
    "astronaut": "Eileen Collins, NASA",
    "chelsea": "Chelsea, Stéfan van der Walt",
    "coffee": "Coffee, Rachel Michetti",
    "rocket": "Falcon 9, SpaceX",
}


class StoredImage(NamedTuple):
    id: str
    image: Image.Image
    """Cropped, not yet resized to whole patches."""
    cut: bool
    """Whether it was cropped."""

    @property
    def info(self) -> ImageInfo:
        return ImageInfo(id=self.id, width=self.image.width, height=self.image.height, cut=self.cut)

    def jpeg(self, max_side: int = DISPLAY_SIZE) -> bytes:
        """For the page."""
        shown = self.image.copy()
        shown.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
        data = io.BytesIO()
        shown.save(data, "JPEG", quality=90)
        return data.getvalue()


def crop_image(id: str, image: Image.Image) -> StoredImage:
    """An opened image, cropped and shrunk to what the explorer holds."""
    width, height = image.info["extent"]  # of the file: large JPEGs are decoded at a fraction of it
    crop_width, crop_height = min(width, MAX_ASPECT * height), min(height, MAX_ASPECT * width)
    left, top = (width - crop_width) / 2, (height - crop_height) / 2
    scale = min(1.0, LONG_SIDE / max(crop_width, crop_height))
    size = max(1, round(crop_width * scale)), max(1, round(crop_height * scale))
    resized = resample(image, size, (left, top, left + crop_width, top + crop_height))
    return StoredImage(id, resized, (crop_width, crop_height) != (width, height))


class ImageStore:
    """Images by id: a sample's name, or the hash of the uploaded bytes."""

    def __init__(self, max_bytes: int = 2**28) -> None:
        self.cache: ByteCache[StoredImage] = ByteCache(max_bytes, lambda held: 3 * held.image.width * held.image.height)
        try:
            self.samples = {path.stem: path for path in sample_images()}  # by name
        except ArgumentError:  # scikit-image is not installed
            self.samples = {}

    def get(self, id: str) -> StoredImage | None:
        """An image in memory, or a sample, opened if need be. None: unknown or evicted."""
        stored = self.cache.get(id)
        if stored is None and id in self.samples:
            stored = self.store(crop_image(id, open_image(self.samples[id], at_least=SHORT_SIDE)))
        return stored

    def add(self, data: bytes) -> StoredImage:
        """Decode an upload; `ImageError` if it cannot be."""
        id = hashlib.sha256(data).hexdigest()[:32]  # 128 bits: ids cannot be guessed
        return self.cache.get(id) or self.store(crop_image(id, open_image(data, at_least=SHORT_SIDE)))

    def store(self, stored: StoredImage) -> StoredImage:
        self.cache.put(stored.id, stored)
        return stored


_NO_ROOM = partial(BusyError, "Too many pictures arrive at once; try again in a moment.", connection="close")
_TOO_LONG = partial(
    RequestError, 413, f"The picture has more than {MAX_UPLOAD_BYTES:,} bytes; send a smaller one.", connection="close"
)


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
    """Reads the bodies of uploads; where memory runs short, the slowest of the address that holds most is evicted.

    The number of uploads is not limited: a slow upload holds little memory, so it keeps no other one out.
    """

    def __init__(self, limits: Limits, max_bytes: int = MAX_PENDING_BYTES) -> None:
        self.limits, self.max_bytes = limits, max_bytes
        self._uploads: set[_Upload] = set()

    @asynccontextmanager
    async def receive(self, request: Request, address: str) -> AsyncIterator[bytes]:
        """The whole body of `request`, or a `RequestError`; it counts as pending until the `with` block ends."""
        # Refuse at once what is announced as too long; the header may be missing or wrong, so `_add` counts too.
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > MAX_UPLOAD_BYTES:
            raise _TOO_LONG()
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
                self._add(upload, b"")  # sets the deadline of the first bytes
                async for chunk in request.stream():
                    self._add(upload, chunk)
                upload.complete = True
        except ClientDisconnect:
            raise DroppedError from None
        except TimeoutError:
            if upload.evicted:
                raise _NO_ROOM() from None
            limits, came = self.limits, f"The picture did not arrive in time: {len(upload.data):,} bytes came."
            rate = f"{limits.min_rate:,.0f} bytes per second after the first {limits.grace_seconds:g}"
            rule = f"All of it must come within {limits.body_seconds:g} seconds, and {rate}; send a smaller one."
            raise RequestError(408, f"{came} {rule}", connection="close") from None

    def _add(self, upload: _Upload, chunk: bytes) -> None:
        """Take in a part of a body, and move its deadline with what has arrived."""
        if len(upload.data) + len(chunk) > MAX_UPLOAD_BYTES:
            raise _TOO_LONG()
        if upload.evicted:
            raise _NO_ROOM()
        while sum(len(other.data) for other in self._uploads) + len(chunk) > self.max_bytes:
            active = {other: len(other.data) for other in self._uploads if not (other.complete or other.evicted)}
            slowest = slowest_at_largest_address(active)
            if slowest is upload:
                raise _NO_ROOM()
            # Its own task wakes up by the timeout and answers 503; the memory is free at once.
            slowest.evicted = True
            slowest.data.clear()
            slowest.timeout.reschedule(upload.loop.time())
        upload.data += chunk
        allowed = min(self.limits.body_seconds, self.limits.seconds_for(len(upload.data)))
        upload.timeout.reschedule(upload.start + allowed)
