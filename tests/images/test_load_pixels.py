from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz_images import encode, flat_png, peak_mib
from PIL import Image
from torch import Tensor

from veca.images import Fit, ImageError, ImageTooLargeError, fit_image, open_image, to_tensor
from veca.images.load import FitSize, load_pixels
from veca.images.resize import _align

FITS: list[tuple[FitSize, Fit]] = [
    *((64, "crop"), (224, "crop"), ((96, 160), "crop"), (112, "stretch"), ((64, 144), "stretch")),
    *((112, "keep"), (None, "keep"), (112, "pad"), (None, "pad")),
]
SIDES = [(320, 240), (241, 403), (601, 377), (300, 300), (16, 16)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def photo(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Smooth colours, also after the image is shrunk, with grain."""
    coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
    return Image.fromarray((smooth + rng.integers(-12, 13, smooth.shape)).clip(0, 255).astype(np.uint8))


def by_parts(source: object, size: FitSize, fit: Fit) -> Tensor:
    return to_tensor(fit_image(open_image(source), size, fit))


def difference(found: Tensor, expected: Tensor) -> Tensor:
    assert found.dtype == torch.uint8
    assert found.shape == expected.shape
    assert found.is_contiguous()
    return (found.int() - expected.int()).abs().float()


@pytest.mark.parametrize(("size", "fit"), FITS)
def test_pillow_is_the_sum_of_its_parts(rng: np.random.Generator, size: FitSize, fit: Fit) -> None:
    image = photo(rng, 301, 203)
    for kind in ("JPEG", "PNG", "WEBP"):
        data = encode(image, kind)
        pixels, original = load_pixels(data, size, fit)
        assert original == (301, 203)
        assert difference(pixels, by_parts(data, size, fit)).max() == 0
        assert torch.equal(pixels, load_pixels(data, size, fit, decoder="pillow")[0])


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize(("size", "fit"), FITS)
def test_cpu_is_within_a_few_grey_levels(
    rng: np.random.Generator, size: FitSize, fit: Fit, sides: tuple[int, int]
) -> None:
    data = encode(photo(rng, *sides), "PNG")
    pixels, original = load_pixels(data, size, fit, decoder="cpu")
    assert original == sides
    error = difference(pixels, by_parts(data, size, fit))
    assert error.mean() < 0.5
    assert error.max() <= 6


@pytest.mark.parametrize("sides", [(723, 1283), (1603, 1201)])
@pytest.mark.parametrize(("size", "fit"), FITS)
def test_cpu_is_as_near_where_a_jpeg_is_decoded_at_reduced_size(
    rng: np.random.Generator, size: FitSize, fit: Fit, sides: tuple[int, int]
) -> None:
    data = encode(photo(rng, *sides), "JPEG", quality=92)
    pixels, original = load_pixels(data, size, fit, decoder="cpu")
    assert original == sides
    error = difference(pixels, by_parts(data, size, fit))
    assert error.mean() < 0.5
    assert error.max() <= 6


@pytest.mark.parametrize("sides", [(1, 1), (3, 5000), (5000, 3), (1, 40), (9, 900), (17, 31)])
@pytest.mark.parametrize(("size", "fit"), [fit for fit in FITS if fit[1] in ("crop", "stretch")])
def test_cpu_takes_images_of_odd_shapes(
    rng: np.random.Generator, size: FitSize, fit: Fit, sides: tuple[int, int]
) -> None:
    data = encode(photo(rng, *sides), "JPEG")
    pixels, original = load_pixels(data, size, fit, decoder="cpu")
    assert original == sides
    assert difference(pixels, by_parts(data, size, fit)).max() <= 6


@pytest.mark.parametrize("turn", range(1, 9))
def test_cpu_turns_images_upright(rng: np.random.Generator, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = encode(photo(rng, 901, 603), "JPEG", exif=exif)
    for size, fit in FITS:
        pixels, original = load_pixels(data, size, fit, decoder="cpu")
        assert original == ((603, 901) if turn > 4 else (901, 603))
        assert difference(pixels, by_parts(data, size, fit)).max() <= 6


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK"])
def test_cpu_converts_modes_as_pillow_does(rng: np.random.Generator, mode: str) -> None:
    image = photo(rng, 400, 300).convert(mode)
    data = encode(image, "TIFF")
    assert difference(load_pixels(data, 64, decoder="cpu")[0], by_parts(data, 64, "crop")).max() <= 6
    before = image.tobytes()
    assert load_pixels(image, 64, decoder="cpu")[1] == (400, 300)
    assert image.tobytes() == before


def test_crops_begin_within_a_twentieth_of_a_pixel_or_are_left_to_pillow(rng: np.random.Generator) -> None:
    shifts = []
    for start, scale in zip(rng.uniform(10, 500, 999), rng.uniform(0.5, 6, 999), strict=True):
        first, count = _align(start, scale)
        assert first >= 0
        assert first == 0 or count * scale >= 2 * max(scale, 1)
        shifts.append(abs(first + count * scale - start) / scale)
    assert max(shifts) <= 1 + 1e-9
    assert np.mean(np.array(shifts) <= 0.05) > 0.9
    # At a scale of 1 no window of whole pixels begins half a pixel off.
    data = encode(photo(rng, 72, 101), "PNG")
    assert torch.equal(load_pixels(data, 64, decoder="cpu")[0], by_parts(data, 64, "crop"))


def test_pixels_around_a_crop_contribute_at_its_edges() -> None:
    image = Image.new("RGB", (600, 300), (255, 255, 255))
    scale = 300 / 1.125 / 64
    edges = [round(middle + side * (32 * scale + 2)) for side in (-1, 1) for middle in (300, 150)]
    image.paste((128, 128, 128), tuple(edges))
    pixels, expected = load_pixels(image, 64, decoder="cpu")[0], by_parts(image, 64, "crop")
    assert {int(expected[0, 32, 0]), int(expected[0, 32, 63]), int(expected[0, 0, 32])} == {123}
    assert difference(pixels, expected).max() <= 2


def test_cpu_refuses_what_pillow_refuses(rng: np.random.Generator, tmp_path: Path) -> None:
    (path := tmp_path / "a.jpg").write_bytes(encode(photo(rng, 1600, 1200), "JPEG")[:-2000])
    for source, rule in ((path, "a.jpg: .*truncated"), (b"text", "not one of"), (tmp_path / "none.jpg", "no such")):
        messages = set()
        for decoder in ("pillow", "cpu"):
            with pytest.raises(ImageError, match=rule) as caught:
                load_pixels(source, 64, decoder=decoder)
            messages.add(str(caught.value))
        assert len(messages) == 1
    with pytest.raises(ImageTooLargeError, match=r"2000×1.*128000×64.*8,192,000"):
        load_pixels(flat_png(1, 2000), 64, "keep", max_pixels=10**6, decoder="cpu")
    with pytest.raises(ImageTooLargeError, match="pixels"):
        load_pixels(encode(photo(rng, 1600, 1200), "JPEG"), 64, max_pixels=10**6, decoder="cpu")
    for size, fit, decoder in ((63, "crop", "cpu"), (64, "cut", "cpu"), (64, "crop", "gpu")):
        with pytest.raises(ValueError, match="it must be"):
            load_pixels(path, size, fit, decoder=decoder)


@pytest.mark.skipif(sys.platform != "linux", reason="no way to reset the peak")
def test_cpu_needs_no_more_memory_than_pillow() -> None:
    data, peaks = flat_png(6000, 6000), {}
    for decoder in ("pillow", "cpu"):
        before = peak_mib(reset=True)
        load_pixels(data, 64, "stretch", decoder=decoder)
        peaks[decoder] = peak_mib() - before
    assert peaks["cpu"] < peaks["pillow"] + 100
