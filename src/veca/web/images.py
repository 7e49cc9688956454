"""Pictures that were uploaded, and the samples: opened through `veca.images`, held decoded, forgotten in time."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from veca.images import fit_image, open_image, resample
from veca.images.samples import sample_images
from veca.web.jobs import Kept

MOST_BYTES = 2**25
"""Of an upload."""
SHORTEST, LONGEST = 1024, 2048
"""Pixels that are kept of a picture's sides: as many as the largest resolution takes."""
SHAPE = 2
"""The long side over the short, at most; the rest is cut off around the centre."""
SHOWN = 1024
TITLES = {
    "astronaut": "Eileen Collins, NASA",
    "chelsea": "Chelsea, Stéfan van der Walt",
    "coffee": "Coffee, Rachel Michetti",
    "rocket": "Falcon 9, SpaceX",
}


class Picture(NamedTuple):
    id: str
    image: Image.Image
    """As it is looked at, not yet fitted to patches."""
    cut: bool
    """Whether its ends were cut off."""

    def at(self, size: int) -> Image.Image:
        """With a short side of `size`, in whole patches."""
        return fit_image(self.image, size, "keep")

    def jpeg(self, side: int = SHOWN) -> bytes:
        """For the page: the long side at most `side`."""
        shown = self.image.copy()
        shown.thumbnail((side, side), Image.Resampling.BICUBIC)
        data = io.BytesIO()
        shown.save(data, "JPEG", quality=90)
        return data.getvalue()


class Pictures:
    """By id: a sample's name, or the hash of the bytes that were uploaded."""

    def __init__(self, most: int = 2**28) -> None:
        self._kept: Kept[Picture] = Kept(most, lambda picture: 3 * picture.image.width * picture.image.height)
        self.samples = samples()

    def held(self, id: str) -> Picture | None:
        """One that is at hand."""
        return self._kept.get(id)

    def get(self, id: str) -> Picture | None:
        """One that is, or a sample, which is opened then. None: never seen, or forgotten."""
        found = self._kept.get(id)
        if found is None and id in self.samples:
            found = self._keep(id, open_image(self.samples[id], at_least=SHORTEST))
        return found

    def add(self, data: bytes) -> Picture:
        """Opens what came as `data`, or raises `ImageError`."""
        id = hashlib.sha256(data).hexdigest()[:32]
        return self._kept.get(id) or self._keep(id, open_image(data, at_least=SHORTEST))

    def _keep(self, id: str, image: Image.Image) -> Picture:
        width, height = image.info["extent"]
        cut_width, cut_height = min(width, SHAPE * height), min(height, SHAPE * width)
        left, top = (width - cut_width) / 2, (height - cut_height) / 2
        scale = min(1.0, LONGEST / max(cut_width, cut_height))
        size = max(1, round(cut_width * scale)), max(1, round(cut_height * scale))
        shown = resample(image, size, (left, top, left + cut_width, top + cut_height))
        picture = Picture(id, shown, (cut_width, cut_height) != (width, height))
        self._kept.put(id, picture)
        return picture


def samples() -> dict[str, Path]:
    """The photographs of `veca demo` by name; none where scikit-image is not installed."""
    try:
        return {path.stem: path for path in sample_images()}
    except ValueError:
        return {}
