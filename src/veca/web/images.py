"""Images of the explorer: uploads and samples, decoded and cached in memory up to a limit."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from veca.errors import ArgumentError
from veca.images import open_image, resample
from veca.images.samples import sample_images
from veca.web.jobs import ByteCache
from veca.web.schemas import ImageInfo

MAX_UPLOAD_BYTES = 2**25
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


class ImageStore:
    """Images by id: a sample's name, or the hash of the uploaded bytes."""

    def __init__(self, max_bytes: int = 2**28) -> None:
        self.cache: ByteCache[StoredImage] = ByteCache(max_bytes, lambda held: 3 * held.image.width * held.image.height)
        self.samples = find_samples()

    def get(self, id: str) -> StoredImage | None:
        """An image in memory, or a sample, opened if need be. None: unknown or evicted."""
        stored = self.cache.get(id)
        if stored is None and id in self.samples:
            stored = self._store(id, open_image(self.samples[id], at_least=SHORT_SIDE))
        return stored

    def add(self, data: bytes) -> StoredImage:
        """Decode an upload; `ImageError` if it cannot be."""
        id = hashlib.sha256(data).hexdigest()[:32]  # 128 bits: ids cannot be guessed
        return self.cache.get(id) or self._store(id, open_image(data, at_least=SHORT_SIDE))

    def _store(self, id: str, image: Image.Image) -> StoredImage:
        width, height = image.info["extent"]  # of the file: large JPEGs are decoded at a fraction of it
        crop_width, crop_height = min(width, MAX_ASPECT * height), min(height, MAX_ASPECT * width)
        left, top = (width - crop_width) / 2, (height - crop_height) / 2
        scale = min(1.0, LONG_SIDE / max(crop_width, crop_height))
        size = max(1, round(crop_width * scale)), max(1, round(crop_height * scale))
        resized = resample(image, size, (left, top, left + crop_width, top + crop_height))
        stored = StoredImage(id, resized, (crop_width, crop_height) != (width, height))
        self.cache.put(id, stored)
        return stored


def find_samples() -> dict[str, Path]:
    """The photographs of `veca demo` by name; none where scikit-image is not installed."""
    try:
        return {path.stem: path for path in sample_images()}
    except ArgumentError:
        return {}
