"""Hostile TIFF files, read by regions. Those of `fuzz_tiff.py` are tried in a process of their own."""

from __future__ import annotations

from pathlib import Path

import fuzz_tiff as fuzz
import numpy as np
import pytest
import torch
from PIL import Image

import veca
from veca.images.tiles import open_pixels

PIXELS = np.random.default_rng(0).integers(0, 256, (150, 203, 3), np.uint8)
HOSTILE = dict(fuzz.hostile_files({"plain": fuzz.write_tiff(PIXELS, tile=(64, 64))}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("JPEG that claims 65,000 × 65,000 pixels", "a tile claims 65,000 × 65,000 pixels; at most 67,108,864 pixels"),
        ("JPEG 2000 that claims 60,000 × 60,000 pixels", "a tile claims 60,000 × 60,000 pixels; at most 67,108,864"),
        ("PNG that claims 60,000 × 60,000 pixels", "a tile claims 60,000 × 60,000 pixels; at most 67,108,864 pixels"),
        ("JPEG XL", "compression 50002 is not read by regions; write it again with LZW, deflate, "),
        ("bomb of zlib", "cannot be read: DeflateError"),
        ("width of 2³²", "is 150×4294967295; sides must be from 1 to 16,777,216 pixels"),
        ("no width", "is 150×0; sides must be from 1"),
        ("wide tiles", "has segments of 64×2147483648; at most 67,108,864 pixels are decoded at a time"),
        ("tiles of one pixel", "is damaged: it has 12 segments, and its size needs 609"),
        ("offset beyond the end", "segment 0 ends after byte 2,147,574,998, the file after "),
        ("length beyond the end", "segment 0 ends after byte 2,147,48"),
        ("half a file", "ends after byte"),
        ("nothing", "cannot be read: TiffFileError"),
    ],
)
def test_hostile_tiff_files_are_refused_in_a_sentence(tmp_path: Path, name: str, message: str) -> None:
    path = tmp_path / "a.tif"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(veca.ImageError, match=message) as caught:
        open_pixels(path).read(0, 0, 150, 203)
    assert str(caught.value).startswith(str(path))


def test_many_hostile_tiff_files(tmp_path: Path) -> None:
    report = fuzz.run(150, 0, tmp_path)
    assert report.problems == []
    assert report.outcomes[fuzz.PIXELS] >= 30
    assert report.outcomes[fuzz.REFUSAL] >= 80


@pytest.mark.parametrize("name", sorted(fuzz.GOOD))
def test_compressions_give_the_pixels_of_pillow(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.tif"
    path.write_bytes(fuzz.write_tiff(PIXELS, **fuzz.GOOD[name]))
    # Pillow reads no JPEG 2000 or WebP within a TIFF; both were written without loss.
    pixels = PIXELS if name in ("jpeg2000", "webp") else np.array(Image.open(path))
    expected = veca.images.normalize(torch.from_numpy(pixels).permute(2, 0, 1))
    assert torch.equal(open_pixels(path).read(0, 0, 150, 203), expected)
