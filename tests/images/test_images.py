from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import fuzz_images
import numpy as np
import pytest
import torch
from fuzz_images import Case, chunk, encode, flat_png, photo, png, png_file, rgb_tiff
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from veca.images import (
    EXTENSIONS,
    MAX_PIXELS,
    MEAN,
    STD,
    ImageError,
    ImageTooLargeError,
    fit_image,
    load_image,
    nearest_sizes,
    normalize,
    open_image,
    open_values,
    pad_to_multiple,
    resize_to_multiple,
    to_tensor,
)
from veca.images.decode import FORMATS

BLUE = (10, 60, 200)
JPEGS = {
    "420": {"subsampling": 2},
    "444": {"subsampling": 0},
    "422": {"subsampling": 1},
    "optimized": {"optimize": True},
    "coarse": {"quality": 5},
    "fine": {"quality": 99},
    "restarts": {"restart_marker_blocks": 3},
    "restart-rows": {"restart_marker_rows": 1},
    "progressive": {"progressive": True},
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def image(rng: np.random.Generator) -> Image.Image:
    return photo(rng, 61, 47)


@pytest.fixture
def pillow() -> Iterator[None]:
    saved = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    yield
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = saved


def array(source: object, **options: object) -> np.ndarray:
    opened = open_image(source, **options)
    assert opened.mode == "RGB"
    return np.asarray(opened).astype(int)


def grey(values: np.ndarray) -> np.ndarray:
    return np.repeat(values.astype(int)[..., None], 3, axis=-1)


def over(colours: np.ndarray, alpha: np.ndarray, background: tuple[int, int, int]) -> np.ndarray:
    share = alpha[..., None] / 255
    return colours * share + np.array(background) * (1 - share)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM", "TIFF", "WEBP"])
def test_lossless_formats_give_back_every_pixel(image: Image.Image, kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    np.testing.assert_array_equal(array(encode(image, kind, **options)), np.asarray(image))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("AVIF", {}), ("WEBP", {}), ("TIFF", {"compression": "jpeg"})] + [("JPEG", options) for options in JPEGS.values()],
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_lossy_formats_decode_as_pillow_does(
    image: Image.Image, kind: str, options: dict[str, object], mode: str
) -> None:
    data = encode(image.convert(mode), kind, **options)
    expected = Image.open(io.BytesIO(data)).convert("RGB")
    np.testing.assert_array_equal(array(data), np.asarray(expected))


def test_every_extension_is_one_pillow_knows_for_a_format_we_take() -> None:
    Image.init()
    assert {Image.EXTENSION[suffix] for suffix in EXTENSIONS} <= {*FORMATS, "MPO"}
    assert all(suffix == suffix.lower() for suffix in EXTENSIONS)


@pytest.mark.parametrize("colours", [2, 4, 16, 256])
@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF"])
def test_palettes_are_resolved_to_their_colours(image: Image.Image, colours: int, kind: str) -> None:
    indexed = image.quantize(colours)
    palette = np.array(indexed.getpalette()).reshape(-1, 3)
    np.testing.assert_array_equal(array(encode(indexed, kind)), palette[np.asarray(indexed)])


def test_one_bit_is_black_and_white(image: Image.Image) -> None:
    bits = image.convert("1")
    np.testing.assert_array_equal(array(encode(bits, "PNG")), grey(np.asarray(bits) * 255))


@pytest.mark.parametrize("mode", ["LA", "La", "RGBA", "RGBa"])
def test_alpha_is_laid_over_the_background(image: Image.Image, mode: str) -> None:
    alpha = np.linspace(0, 255, 47 * 61).reshape(47, 61).astype(np.uint8)
    plain = image.convert("L" if mode in ("LA", "La") else "RGB")
    colours = np.asarray(plain.convert("RGB"))
    plain.putalpha(Image.fromarray(alpha))
    expected = over(colours, alpha, BLUE)
    np.testing.assert_allclose(array(plain.convert(mode), background=BLUE), expected, atol=2)


def test_large_pictures_are_converted_in_bands_without_seams() -> None:
    grey_ramp = np.arange(2**20 * 6, dtype=np.uint32).reshape(6, 2**20) % 251
    layers = np.stack([grey_ramp, 255 - grey_ramp % 2 * 99], axis=-1).astype(np.uint8)
    found = array(Image.fromarray(layers), background=BLUE)
    np.testing.assert_allclose(found, over(grey(layers[..., 0]), layers[..., 1], BLUE), atol=1)


def test_palette_alpha_and_transparent_index(image: Image.Image) -> None:
    indexed = image.quantize(32)
    index = np.asarray(indexed)
    colours = np.array(indexed.getpalette()).reshape(-1, 3)[index]
    alphas = np.arange(32, dtype=np.uint8) * 8
    data = encode(indexed, "PNG", transparency=alphas.tobytes())
    expected = over(colours, alphas[index], BLUE)
    np.testing.assert_allclose(array(data, background=BLUE), expected, atol=1)
    for kind in ("GIF", "PNG"):
        opened = Image.open(io.BytesIO(encode(indexed, kind, transparency=3)))
        mask = np.asarray(opened) == opened.info["transparency"]
        assert mask.any()
        data = encode(indexed, kind, transparency=3)
        expected = np.where(mask[..., None], BLUE, np.asarray(opened.convert("RGBA"))[..., :3])
        np.testing.assert_array_equal(array(data, background=BLUE), expected)
    np.testing.assert_array_equal(array(indexed.convert("PA")), colours)


@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_a_transparent_colour_takes_the_background(image: Image.Image, mode: str) -> None:
    plain = image.convert(mode)
    key = plain.getpixel((5, 5))
    values = np.asarray(plain.convert("RGB")).astype(int)
    expected = np.where((values == values[5, 5]).all(-1, keepdims=True), BLUE, values)
    data = encode(plain, "PNG", transparency=key)
    np.testing.assert_array_equal(array(data, background=BLUE), expected)


def test_sixteen_bit_grey_is_divided_by_257_and_rounded() -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = grey(np.round(values / 257))
    picture = Image.fromarray(values)
    for kind in ("PNG", "TIFF", "PPM"):
        np.testing.assert_array_equal(array(encode(picture, kind)), expected)
    big_endian = Image.frombytes("I;16B", (256, 256), values.astype(">u2").tobytes())
    for same in (picture, big_endian, Image.fromarray(values.astype(np.int32))):
        np.testing.assert_array_equal(array(same), expected)
    keyed = array(encode(picture, "PNG", transparency=777), background=BLUE)
    expected[values == 777] = BLUE
    np.testing.assert_array_equal(keyed, expected)


@pytest.mark.parametrize("bad", [-1, 65536])
def test_integers_beyond_sixteen_bits_are_refused(bad: int) -> None:
    values = np.full((20, 30), 7, np.int32)
    values[3, 4] = bad
    with pytest.raises(ImageError, match=rf"{bad}.*0 to 65535"):
        open_image(encode(Image.fromarray(values), "TIFF"))


def test_floating_point_grey_must_lie_in_the_unit_interval() -> None:
    values = np.linspace(0, 1, 9000, dtype=np.float32).reshape(90, 100)
    for kind in ("TIFF", "PPM"):
        opened = array(encode(Image.fromarray(values), kind))
        assert np.abs(opened - grey(values * 0) - values[..., None] * 255).max() <= 0.5 + 1e-4
    for bad in (-0.01, 1.01, np.nan, np.inf, -np.inf):
        values[50, 60] = bad
        with pytest.raises(ImageError, match="0 to 1"):
            open_image(encode(Image.fromarray(values), "TIFF"))


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV"])
def test_colour_spaces_come_back_as_rgb(image: Image.Image, mode: str) -> None:
    np.testing.assert_allclose(array(image.convert(mode)), np.asarray(image), atol=12)


def test_lab_red_is_red() -> None:
    red = Image.new("LAB", (20, 20), (135, 128 + 80, 128 + 67))  # L* 53, a* 80, b* 67
    np.testing.assert_allclose(array(encode(red, "TIFF"))[0, 0], (255, 0, 0), atol=12)


UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", [*UPRIGHT, 0, 9])
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "TIFF-lzw", "JPEG", "AVIF", "MPO"])
def test_orientation_is_applied_once(image: Image.Image, kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, object] = {"exif": exif}
    if kind == "WEBP":
        options["lossless"] = True
    if kind == "TIFF-lzw":
        options["compression"] = "tiff_lzw"
    if kind in ("JPEG", "MPO"):
        options |= {"quality": 98, "subsampling": 0}
    if kind == "MPO":
        options |= {"save_all": True, "append_images": [image]}
    if kind == "AVIF":
        options |= {"quality": 98, "subsampling": "4:4:4"}
    if kind in ("AVIF", "TIFF-lzw") and orientation not in UPRIGHT:
        pytest.skip("cannot be written")
    expected = UPRIGHT.get(orientation, UPRIGHT[1])(np.asarray(image).astype(int))
    opened = open_image(encode(image, kind.removesuffix("-lzw"), **options))
    found = np.asarray(opened).astype(int)
    assert found.shape == expected.shape
    exact = kind not in ("JPEG", "MPO", "AVIF")
    assert np.abs(found - expected).mean() <= (0 if exact else 4)
    np.testing.assert_array_equal(array(opened), found)
    assert opened.info == {}


@pytest.mark.parametrize(
    "exif",
    [
        b"garbage",
        b"II*\0\xff\xff\xff\xff",
        b"MM\0*\0\0\0\x08\xff\xff" + b"\x01\x12\0\x03\xff\xff\xff\xff\0\0\0\0" * 9,
        b"II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x01\0\0\0sixx\x08\0\0\0",
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_is_ignored(image: Image.Image, kind: str, exif: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = array(encode(image, kind, exif=b"Exif\0\0" + exif))
    np.testing.assert_array_equal(found, array(encode(image, kind)))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "TIFF", "AVIF", "MPO"])
def test_the_first_frame_is_taken(kind: str) -> None:
    red, green = (Image.new("RGB", (40, 30), colour) for colour in ((200, 0, 0), (0, 200, 0)))
    data = encode(red, kind, save_all=True, append_images=[green])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    np.testing.assert_allclose(array(data), np.asarray(red), atol=4)


def test_pillow_images_are_converted_and_never_changed(image: Image.Image) -> None:
    image.getexif()[0x0112] = 6
    image.info["note"] = "mine"
    before = image.tobytes()
    opened = open_image(image)
    assert opened.size == (47, 61)
    assert image.tobytes() == before
    assert image.info == {"note": "mine"}
    same = open_image(opened)
    same.putpixel((0, 0), (1, 2, 3))
    assert opened.getpixel((0, 0)) != (1, 2, 3)


def test_paths_bytes_and_streams_open_alike(image: Image.Image, tmp_path: Path) -> None:
    data = encode(image, "PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    stream = io.BytesIO(data)
    stream.seek(99)

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def seek(self, *_: object) -> int:
            raise OSError("pipes cannot seek")

    for source in (path, str(path), data, bytearray(data), stream, Pipe(data)):
        np.testing.assert_array_equal(array(source), np.asarray(image))
    assert not stream.closed
    with path.open("rb") as file:
        np.testing.assert_array_equal(array(file), np.asarray(image))
        assert not file.closed
    with pytest.raises(TypeError, match="ndarray.*Pillow image"):
        open_image(np.zeros((5, 5, 3)))
    with pytest.raises(ValueError, match="background"):
        open_image(data, background=(0, 0, 256))


def test_everything_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop").symlink_to("loop")
    for path, reason in {
        tmp_path / "missing.png": "no such file",
        tmp_path: "directory",
        tmp_path / "pipe.png": "pipe",
        Path("/dev/zero"): "device",
        tmp_path / "loop": "symbolic links",
        tmp_path / ("long" * 999): "too long",
    }.items():
        with pytest.raises(ImageError, match=reason) as caught:
            open_image(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ImageError, match=r"'a\\x00b'"):
        open_image("a\0b")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "locked.png"
    path.write_bytes(flat_png(4, 4))
    path.chmod(0)
    with pytest.raises(ImageError, match="permission denied"):
        open_image(path)


@pytest.mark.parametrize("data", [b"text", b"<svg></svg>", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_other_formats_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(ImageError, match="<bytes>: not one of JPEG, PNG"):
        open_image(data)


def test_formats_that_are_known_but_not_read(tmp_path: Path) -> None:
    image = Image.new("RGB", (16, 12))
    (tmp_path / "a.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200))
    image.save(tmp_path / "b.NEF", "tiff", tiffinfo={254: 1})  # as a camera's raw file begins: with a thumbnail
    for path, suffix in ((tmp_path / "a.HEIC", ".heic"), (tmp_path / "b.NEF", ".nef")):
        with pytest.raises(ImageError, match=f"{path.name}: {suffix} is not read, only JPEG, PNG.*; save it as PNG"):
            open_image(path)
        with path.open("rb") as stream, pytest.raises(ImageError, match=f"{suffix} is not read"):
            open_image(stream)
    for tags in ({254: 1}, {50706: b"\1\4\0\0"}):  # nothing but their content tells: from an address or a table
        image.save(tmp_path / "d.tif", "tiff", tiffinfo=tags)
        with pytest.raises(ImageError, match="<bytes>: its first page is a small preview, as in raws of cameras; save"):
            open_image((tmp_path / "d.tif").read_bytes())
    image.save(tmp_path / "e.tif", "tiff", tiffinfo={254: 2})  # a page of several, as scanners write
    assert open_image(tmp_path / "e.tif").size == (16, 12)
    image.save(tmp_path / "c.heic", "jpeg")  # some programs convert pictures and leave their names
    assert open_image(tmp_path / "c.heic").size == (16, 12)


@pytest.mark.parametrize(
    "raised",
    [
        *(OSError, SyntaxError, ValueError, struct.error, zlib.error, MemoryError, OverflowError),
        *(IndexError, KeyError, TypeError, AttributeError, EOFError, RecursionError),
        *(AssertionError, NotImplementedError, ZeroDivisionError, UserWarning),
    ],
)
@pytest.mark.parametrize("where", ["open", "load"])
def test_whatever_a_decoder_throws_is_an_image_error(
    image: Image.Image, monkeypatch: pytest.MonkeyPatch, raised: type[Exception], where: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised("from the decoder")

    data = encode(image, "BMP")
    monkeypatch.setattr(Image if where == "open" else ImageFile.ImageFile, where, fail)
    with pytest.raises(ImageError, match="<bytes>.*from the decoder") as caught:
        open_image(data)
    assert type(caught.value.__cause__) is raised


def test_an_interrupt_is_not_swallowed(image: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Image, "open", interrupt)
    limit = Image.MAX_IMAGE_PIXELS
    with pytest.raises(KeyboardInterrupt):
        open_image(b"x")
    assert limit is Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "AVIF"])
def test_more_pixels_than_the_limit_are_refused(kind: str, image: Image.Image) -> None:
    data = encode(image, kind)
    pixels = 61 * 47
    # WebP is allowed seven eighths, because its decoder needs more memory.
    enough = -(-pixels * 8 // 7) if kind == "WEBP" else pixels
    assert open_image(data, max_pixels=enough).size == (61, 47)
    with pytest.raises(ImageTooLargeError, match=r"47×61 = 2,867 pixels.*max_pixels"):
        open_image(data, max_pixels=enough - 1)
    with pytest.raises(ImageTooLargeError, match="max_pixels"):
        open_image(data, max_pixels=20)
    with pytest.raises(ImageTooLargeError):
        open_image(image, max_pixels=pixels - 1)


def test_the_limit_is_checked_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(ImageTooLargeError, match=r"8193×8192 = 67,117,056 pixels"):
        open_image(png_file(8192, 8193, b""))
    with pytest.raises(ImageTooLargeError, match="1×1048577.*1,048,576"):
        open_image(png_file(2**20 + 1, 1, b""))
    assert MAX_PIXELS == 8192 * 8192


def test_a_file_too_long_for_its_pixels_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "long.webp"
    path.write_bytes(b"RIFF\xff\xff\xff\xffWEBPVP8L")
    os.truncate(path, 2**40)
    with pytest.raises(ImageTooLargeError, match=r"1,099,511,627,776 bytes"):
        open_image(path)


@pytest.mark.usefixtures("pillow")
@pytest.mark.parametrize("limit", [None, 10, 1500, 10**12])
def test_pillows_own_limit_does_not_matter(image: Image.Image, limit: int | None) -> None:
    Image.MAX_IMAGE_PIXELS = limit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_image(encode(image, "PNG")).size == (61, 47)
        for pixels in (10, 500, 1500, 2866):
            with pytest.raises(ImageTooLargeError):
                open_image(encode(image, "PNG"), max_pixels=pixels)
    assert limit is Image.MAX_IMAGE_PIXELS


@pytest.mark.usefixtures("pillow")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF"])
def test_truncation_is_refused_even_if_pillow_was_told_to_take_it(image: Image.Image, kind: str) -> None:
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    data = encode(image, kind)
    with pytest.raises(ImageError):
        open_image(data[: len(data) * 3 // 4])
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


@pytest.mark.usefixtures("pillow")
def test_threads_share_pillows_switches(image: Image.Image) -> None:
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = 7, True
    big = encode(image.resize((400, 300)), "JPEG")
    expected = np.asarray(open_image(big))
    ready = threading.Barrier(4)

    def work(index: int) -> bool:
        if index < 4:
            ready.wait()
        if index % 3 == 0:
            with pytest.raises(ImageTooLargeError):
                open_image(big, max_pixels=100 + index)
        elif index % 3 == 1:
            with pytest.raises(ImageError):
                open_image(big[: len(big) // 2])
        else:
            return bool((np.asarray(open_image(big, max_pixels=120_000)) == expected).all())
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(300)))
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == (7, True)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("name", JPEGS)
def test_a_cut_jpeg_with_an_end_marker_is_refused(rng: np.random.Generator, name: str, mode: str) -> None:
    data = encode(photo(rng, 150, 110, mode), "JPEG", **JPEGS[name])
    start = fuzz_images.jpeg_scans(data)[0] + 20
    # A progressive file cut in its last pass lacks detail nobody sees, but no part.
    stop = fuzz_images.jpeg_scans(data)[-1] if name == "progressive" else len(data) - 40
    for cut in rng.integers(start, stop, 20):
        whole = data[:cut].rstrip(b"\xff")
        with pytest.raises(ImageError, match="truncated"):
            open_image(whole + b"\xff\xd9")
        with pytest.raises(ImageError, match="truncated"):
            open_image(whole)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("name", JPEGS)
def test_whole_jpegs_raise_no_false_alarm(rng: np.random.Generator, name: str, mode: str) -> None:
    for width, height in ((1, 1), (8, 8), (16, 17), (63, 64), (65, 130)):
        for flat in (None, (width // 2, height // 2, width, height), (0, 0, width, height)):
            picture = photo(rng, width, height)
            if flat:
                picture.paste((128, 128, 128), flat)
            data = encode(picture.convert(mode), "JPEG", **JPEGS[name])
            expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
            np.testing.assert_array_equal(array(data), expected)
            np.testing.assert_array_equal(array(data + b"PK\3\4\xff\xda\xff\xd9"), expected)
            if name != "progressive":
                np.testing.assert_array_equal(array(data[:-2]), expected)


def test_a_stray_marker_does_not_end_a_jpeg_early(rng: np.random.Generator) -> None:
    data = encode(photo(rng, 150, 110), "JPEG")
    start = fuzz_images.jpeg_scans(data)[0] + 20
    middle = data.index(b"\xff\x00", (start + len(data)) // 2)
    for marker in (b"\xff\xfe\0\2", b"\xff\xe9\0\2", b"\xff\xd9"):
        broken = data[:middle] + marker + data[middle:]
        assert Image.open(io.BytesIO(broken)).convert("RGB").getpixel((149, 109)) == (128,) * 3
        with pytest.raises(ImageError, match="truncated"):
            open_image(broken)


def test_jpeg_passes_are_counted(image: Image.Image) -> None:
    data = encode(image, "JPEG", progressive=True)
    scans = fuzz_images.jpeg_scans(data)
    last = data[scans[-1] : -2]
    most = data[:-2] + last * (64 - len(scans)) + b"\xff\xd9"
    assert open_image(most).size == (61, 47)
    with pytest.raises(ImageError, match="65 passes"):
        open_image(most[:-2] + last + b"\xff\xd9")
    with pytest.raises(ImageError, match=r"64 passes over 2,867 pixels"):
        open_image(most, max_pixels=3000)
    # Comments, thumbnails and what follows the picture may hold bytes that look like passes.
    noise = b"\xff\xda" * 9999
    comment = b"\xff\xfe" + struct.pack(">H", len(noise) + 2) + noise
    np.testing.assert_array_equal(array(data[:2] + comment + data[2:] + noise), array(data))


@pytest.mark.parametrize("interlace", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 1), (1, 9), (9, 1), (8, 8), (17, 31)])
@pytest.mark.parametrize("fill", ["noise", "black", "the value the check looks for"])
def test_a_png_that_ends_between_rows_is_refused(
    rng: np.random.Generator, size: tuple[int, int], interlace: bool, fill: str
) -> None:
    for shape in (size, (*size, 3)):
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        if fill != "noise":
            pixels[:] = 0
        if fill.startswith("the"):
            pixels[..., *([0] if len(shape) == 3 else [])] = 1
        whole = array(png(pixels, interlace=interlace))
        np.testing.assert_array_equal(whole, pixels if pixels.ndim == 3 else grey(pixels))
        with pytest.raises(ImageError, match="truncated"):
            open_image(png(pixels, interlace=interlace, drop=1))


def test_png_checksums_are_checked(rng: np.random.Generator) -> None:
    data = bytearray(png(rng.integers(0, 256, (20, 30), dtype=np.uint8)))
    open_image(bytes(data))
    for position in (20, 60, 200, len(data) - 20):
        data[position] ^= 4
        with pytest.raises(ImageError):
            open_image(bytes(data))
        data[position] ^= 4


def test_a_tiff_without_its_last_strips_is_refused() -> None:
    raw = {"t259": ("H", [1]), "t278": ("I", [16]), "t279": ("I", [99] * 4)}
    padding = 64 * 64 * 3
    whole = rgb_tiff(**raw, t273=("I", [8, 8, 8, 8])) + bytes(padding)
    assert open_image(whole).size == (64, 64)
    with pytest.raises(ImageError, match="strips are missing"):
        open_image(rgb_tiff(**raw, t273=("I", [8, 8, 8])) + bytes(padding))


_MANY = 70_000


@pytest.mark.parametrize(
    "data",
    [
        png(np.zeros((4, 4), np.uint8), extra=chunk(b"tEXt", b"a\0b") * _MANY),
        png(np.zeros((4, 4), np.uint8), extra=chunk(b"abCd", b"") * _MANY),
        png(np.zeros((4, 4), np.uint8), extra=chunk(b"IDAT", b"") * _MANY),
        encode(Image.new("L", (4, 4)), "GIF")[:-1].replace(b",", b"!\xfe\x01a\0" * _MANY + b",", 1) + b";",
        encode(Image.new("L", (4, 4)), "GIF")[:-1].replace(b",", b"!\xfe" + b"\x01a" * _MANY + b"\0,", 1) + b";",
        encode(Image.new("L", (4, 4)), "GIF")[:-1].replace(b",", bytes(_MANY) + b",", 1) + b";",
        b"P6 " + b"#\n" * _MANY + b"4 4 255\n" + bytes(48),
        b"P6 #" + b"x" * _MANY + b"\n4 4 255\n" + bytes(48),
        b"P4" + b" " * _MANY + b"4 4\n" + bytes(4),
    ],
    ids=["text", "unknown", "pixels", "comments", "comment", "stray", "lines", "line", "blanks"],
)
def test_very_many_small_pieces_are_refused_at_once(data: bytes) -> None:
    """Pillow would go through them one by one, for seconds or minutes."""
    with pytest.raises(ImageError, match=r"very many (chunks|blocks)|header of over"):
        open_image(data)


def test_pieces_of_good_files_are_not_too_many() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1024, 4096), dtype=np.uint8)
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels), 1)
    split = b"".join(chunk(b"IDAT", data[i : i + 1024]) for i in range(0, len(data), 1024))
    text = chunk(b"tEXt", b"key\0value") * 5000
    start = struct.pack(">IIBBBBB", 4096, 1024, 8, 0, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", start) + text + split + chunk(b"IEND", b"")
    np.testing.assert_array_equal(np.asarray(open_image(file))[..., 0], pixels)
    gif = encode(Image.new("L", (4, 4), 7), "GIF", comment=b"c" * 60_000)
    assert open_image(gif).size == (4, 4)
    assert open_image(b"P5 #" + b"x" * 60_000 + b"\n400 400 255\n" + bytes(160_000)).size == (400, 400)
    assert open_image(b"P4\n" + b"800 800\n" + b" " * 80_000).size == (800, 800)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "BMP", "PPM", "AVIF", "PNG"])
def test_cut_files_of_other_formats_are_refused(image: Image.Image, kind: str) -> None:
    data = encode(image, kind)
    for cut in np.linspace(1, len(data) - 15, 25).astype(int):
        with pytest.raises(ImageError):
            open_image(data[:cut])


def test_crop_is_the_centre_of_the_picture_at_1_125(rng: np.random.Generator) -> None:
    picture = photo(rng, 100, 72)
    centre = picture.crop((18, 4, 82, 68))
    np.testing.assert_array_equal(np.asarray(fit_image(picture, 64)), np.asarray(centre))
    wide = fit_image(picture, (32, 64), "crop")
    assert wide.size == (64, 32)
    for width, height in ((300, 200), (144, 720), (36, 18)):
        picture = photo(rng, width, height)
        reference = v2.Compose([v2.Resize(72, v2.InterpolationMode.BICUBIC), v2.CenterCrop(64)])
        found = np.asarray(fit_image(picture, 64)).astype(int)
        np.testing.assert_allclose(found, np.asarray(reference(picture)), atol=1)


def test_stretch_is_a_bicubic_resize(rng: np.random.Generator) -> None:
    picture = photo(rng, 100, 72)
    for size, sides in ((64, (64, 64)), ((32, 96), (96, 32)), ((96, 112), (112, 96))):
        expected = picture.resize(sides, Image.Resampling.BICUBIC)
        found = fit_image(picture, size, "stretch")
        assert found.size == sides
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_stretch_of_a_narrow_picture_shrinks_before_it_grows(rng: np.random.Generator) -> None:
    picture = photo(rng, 9, 900)
    expected = np.asarray(picture.resize((64, 64), Image.Resampling.BICUBIC)).astype(int)
    found = np.asarray(fit_image(picture, 64, "stretch")).astype(int)
    # Overshoot at edges is clipped after each of the two steps, so their order shows a little.
    assert np.abs(found - expected).mean() < 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="no way to reset the peak")
def test_stretch_of_a_very_narrow_picture_needs_little_memory() -> None:
    picture = Image.new("RGB", (1, 2**20), (1, 2, 3))
    before = fuzz_images.peak_mib(reset=True)
    assert fit_image(picture, 64, "stretch").getpixel((63, 63)) == (1, 2, 3)
    assert fuzz_images.peak_mib() - before < 100


@pytest.mark.parametrize(
    ("sides", "size", "expected"),
    [
        ((640, 400), 64, (96, 64)),
        ((400, 640), 64, (64, 96)),
        ((400, 400), 512, (512, 512)),
        ((237, 100), 64, (144, 64)),  # 151.68 is nearer to 144 than to 160
        ((250, 333), None, (256, 336)),
        ((1, 7), None, (16, 16)),
        ((24, 40), None, (32, 48)),
    ],
)
def test_keep_preserves_the_aspect_ratio(sides: tuple[int, int], size: int | None, expected: tuple[int, int]) -> None:
    assert fit_image(Image.new("RGB", sides), size, "keep").size == expected


@pytest.mark.parametrize(("sides", "size"), [((61, 47), None), ((64, 48), None), ((61, 47), 32)])
def test_pad_repeats_the_edge(rng: np.random.Generator, sides: tuple[int, int], size: int | None) -> None:
    picture = photo(rng, *sides)
    found = np.asarray(fit_image(picture, size, "pad"))
    if size:
        picture = picture.resize((round(61 * 32 / 47), 32), Image.Resampling.BICUBIC)
    inner = np.asarray(picture)
    height, width = inner.shape[:2]
    assert found.shape[0] % 16 == found.shape[1] % 16 == 0
    assert 0 <= found.shape[0] - height < 16
    assert 0 <= found.shape[1] - width < 16
    rows = np.minimum(np.arange(found.shape[0]), height - 1)
    columns = np.minimum(np.arange(found.shape[1]), width - 1)
    np.testing.assert_array_equal(found, inner[rows][:, columns])


@pytest.mark.parametrize("fit", ["keep", "pad"])
def test_results_beyond_the_limit_are_refused(fit: str, tmp_path: Path) -> None:
    path = tmp_path / "thin.png"
    path.write_bytes(flat_png(1, 60000))
    with pytest.raises(ImageTooLargeError, match=r"thin.png: 60000×1.*3840000×64.*245,760,000"):
        load_image(path, 64, fit)
    for shape in ("crop", "stretch"):
        assert load_image(path, 64, shape).shape == (3, 64, 64)
    with pytest.raises(ImageTooLargeError, match="max_pixels=4096"):
        fit_image(Image.new("RGB", (9, 9)), 64, fit, max_pixels=4095)


@pytest.mark.parametrize(
    ("size", "fit", "message"),
    [
        (250, "crop", "250.*multiple of 16.*240 or 256"),
        (0, "keep", "Nearest: 16"),
        (-16, "stretch", "Nearest: 16"),
        (5, "pad", "Nearest: 16"),
        ((64, 65), "stretch", "65.*64 or 80"),
        (None, "crop", "None.*keep"),
        ((64, 64), "keep", "short side"),
        (64, "squash", "squash.*crop, stretch, keep, pad"),
    ],
)
def test_sizes_that_do_not_fit(size: object, fit: str, message: str) -> None:
    for call in (
        lambda: fit_image(Image.new("RGB", (40, 40)), size, fit),
        lambda: load_image("no such file.png", size, fit),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert not isinstance(caught.value, ImageError)


def test_only_rgb_is_fitted(image: Image.Image) -> None:
    for call in (lambda p: fit_image(p, 64), to_tensor):
        with pytest.raises(ValueError, match="mode L.*open_image"):
            call(image.convert("L"))


def test_to_tensor_and_normalize_match_torchvision(image: Image.Image) -> None:
    x = to_tensor(image)
    assert torch.equal(x, tv.pil_to_tensor(image))
    assert x.is_contiguous()
    expected = tv.normalize(tv.to_dtype(x, torch.float32, scale=True), MEAN, STD)
    torch.testing.assert_close(normalize(x), expected)
    unit = tv.to_dtype(x, torch.float32, scale=True)
    before = unit.clone()
    torch.testing.assert_close(normalize(unit), expected)
    assert torch.equal(unit, before)
    batch = unit.to(torch.float64).expand(2, 5, -1, -1, -1)
    assert normalize(batch).dtype == torch.float32
    torch.testing.assert_close(normalize(batch)[1, 4], expected)
    with pytest.raises(ValueError, match="int64"):
        normalize(x.long())
    with pytest.raises(ValueError, match=r"values up to 2\d\d; floats must lie in \[0, 1\]. Divide by 255"):
        normalize(x.float())
    with pytest.raises(ValueError, match="3, H, W"):
        normalize(x[:1])


def test_load_image_is_the_sum_of_its_parts(image: Image.Image, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    image.putalpha(128)
    image.save(path)
    x = load_image(path, 32, "pad", background=BLUE)
    parts = normalize(to_tensor(fit_image(open_image(path, background=BLUE), 32, "pad")))
    assert torch.equal(x, parts)
    assert load_image(path).shape == (3, 512, 512)
    with pytest.raises(ImageTooLargeError):
        load_image(path, max_pixels=2000)


@pytest.mark.parametrize("sides", [(250, 333), (16, 16), (5, 40), (47, 61)])
def test_tensors_are_resized_and_padded_to_multiples(sides: tuple[int, int]) -> None:
    x = torch.rand(2, 3, 3, *sides, generator=torch.Generator().manual_seed(0))
    rows, columns = nearest_sizes(*sides)
    resized = resize_to_multiple(x)
    bicubic = v2.InterpolationMode.BICUBIC
    expected = tv.resize(x, [rows, columns], bicubic, antialias=True)
    torch.testing.assert_close(resized, expected)
    padded = pad_to_multiple(x)
    below, beside = -sides[0] % 16, -sides[1] % 16
    replicated = torch.nn.functional.pad(x.flatten(0, 1), (0, beside, 0, below), mode="replicate")
    assert torch.equal(padded, replicated.unflatten(0, (2, 3)))
    assert pad_to_multiple(x[0, 0], patch=7).shape[-1] == -(-sides[1] // 7) * 7
    for function in (resize_to_multiple, pad_to_multiple):
        with pytest.raises(ValueError, match="uint8"):
            function(x.to(torch.uint8))
        with pytest.raises(ValueError, match="3, H, W"):
            function(x[..., :2, :, :])


def test_nearest_sizes_are_nearest() -> None:
    for side in range(1, 200):
        rows, columns = nearest_sizes(side, 2 * side, 14)
        for found, wanted in ((rows, side), (columns, 2 * side)):
            choices = sorted(range(14, 600, 14), key=lambda m: (abs(m - wanted), -m))
            assert found == choices[0]


def test_a_thousand_hostile_files(tmp_path: Path) -> None:
    report = fuzz_images.run(1000, 0, tmp_path)
    print(report)
    assert report.problems == []
    assert sum(report.outcomes.values()) == 1000
    assert report.outcomes[fuzz_images.PICTURE] >= 300
    assert report.outcomes[fuzz_images.REFUSAL] >= 300


def test_the_fuzz_finds_what_it_looks_for(image: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = image.copy()
    half.paste((128, 128, 128), (0, 24, 61, 47))
    found = [
        Case("good.png", encode(image, "PNG"), fuzz_images.PICTURE),
        Case("taken.png", encode(image, "PNG"), fuzz_images.REFUSAL),
        Case("refused.png", b"text", fuzz_images.PICTURE),
        Case("filled.png", encode(half, "PNG"), like="good.png"),
        Case("smaller.png", encode(image.resize((9, 9)), "PNG"), like="good.png"),
    ]
    monkeypatch.setattr(fuzz_images, "cases", lambda count, seed: found)
    report, watched = fuzz_images.run(5, 0, tmp_path), (tmp_path / "results").read_text()
    culprits = [problem.split(":")[0] for problem in report.problems]
    assert culprits == ["taken.png", "refused.png", "filled.png", "smaller.png"]

    def again(command: list[str], stdout: TextIO, **_: object) -> subprocess.CompletedProcess[str]:
        stdout.write(watched)
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(subprocess, "run", again)
    monkeypatch.setattr(fuzz_images, "MAX_MIB", -1.0)
    assert any("good.png: took" in problem for problem in fuzz_images.run(5, 0, tmp_path).problems)
    killed = subprocess.CompletedProcess([], -9)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    assert fuzz_images.run(5, 0, tmp_path).problems == ["child ended with -9 at good.png"]


def test_importing_does_not_touch_pillow() -> None:
    code = (
        "from PIL import Image, ImageFile; a = Image.MAX_IMAGE_PIXELS; import veca.images; "
        "assert Image.MAX_IMAGE_PIXELS is a and not ImageFile.LOAD_TRUNCATED_IMAGES"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_chunk_is_a_png_chunk() -> None:
    assert chunk(b"IEND", b"") == encode(Image.new("L", (1, 1)), "PNG")[-12:]


def test_large_jpegs_may_come_smaller():
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    small.resize((1600, 1200), Image.Resampling.BICUBIC).save(buffer, "jpeg", quality=95)
    data = buffer.getvalue()
    sizes = [open_image(data, at_least=least).size for least in (1200, 601, 600, 300, 150, 1)]
    assert sizes == [(1600, 1200), (1600, 1200), (800, 600), (400, 300), (200, 150), (200, 150)]
    for least in (600, 150):
        with pytest.raises(ImageError, match="truncated"):
            open_image(data[: len(data) * 3 // 4], at_least=least)
    with pytest.raises(ImageTooLargeError):
        open_image(data, at_least=150, max_pixels=10**6)


def test_what_a_smaller_jpeg_covers():
    buffer = io.BytesIO()
    Image.new("RGB", (1601, 1201)).save(buffer, "jpeg")
    image = open_image(buffer.getvalue(), at_least=300)
    assert (image.size, image.info) == ((401, 301), {"extent": (400.25, 300.25)})
    assert open_image(buffer.getvalue()).info == {}
    text = PngInfo()
    text.add_text("extent", "a lie")
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30)).save(buffer, "png", pnginfo=text)
    assert open_image(buffer.getvalue(), at_least=8).info == {"extent": (40, 30)}


def test_values_come_as_they_are_in_the_file(rng: np.random.Generator) -> None:
    wide = rng.integers(0, 65536, (20, 30)).astype(np.uint16)
    for kind in ("PNG", "TIFF", "PPM"):
        found = open_values(encode(Image.fromarray(wide), kind))
        assert found.dtype == np.uint16
        np.testing.assert_array_equal(found, wide)
    indices = rng.integers(0, 256, (20, 30)).astype(np.uint8)
    (palette := Image.fromarray(indices)).putpalette(rng.integers(0, 256, 768).astype(np.uint8).tobytes())
    assert palette.mode == "P"
    for picture in (palette, Image.fromarray(indices)):
        np.testing.assert_array_equal(open_values(encode(picture, "PNG")), indices)
    assert open_values(encode(Image.fromarray(indices > 127), "PNG")).max() == 1
    big_endian = Image.frombytes("I;16B", (30, 20), wide.astype(">u2").tobytes())
    np.testing.assert_array_equal(open_values(big_endian), wide)


def test_values_are_refused_as_pictures_are(image: Image.Image) -> None:
    with pytest.raises(ImageError, match="mode RGB; labels are one channel of 8 or 16 bits. Save them as grey PNG"):
        open_values(image)
    with pytest.raises(ImageTooLargeError, match="<bytes>: 47×61 = 2,867 pixels; at most 999"):
        open_values(encode(image, "PNG"), max_pixels=999)
    with pytest.raises(ImageError, match="<bytes>: not one of JPEG, PNG"):
        open_values(b"no picture at all")
    with pytest.raises(ImageError, match="<bytes>: damaged or truncated"):
        open_values(encode(image.convert("L"), "PNG")[:-400])


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    with pytest.raises(ImageError, match=r"a.jpg: empty, 0 bytes; fetch or save it again"):
        open_image(tmp_path / "a.jpg")
