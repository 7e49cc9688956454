"""`veca.kernels.jpeg_scan`: verdicts beside those of a reader in plain Python that takes one bit after the other."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from interpreter import interpreted
from PIL import Image

from veca.images.jpeg import gpu_decodable, read_header

CPU, GPU = torch.device("cpu"), torch.device("cuda")
OPTIONS: dict[str, dict[str, Any]] = {
    "444": {"subsampling": 0},
    "422": {"subsampling": 1},
    "420": {"subsampling": 2},
    "grey": {"mode": "L"},
    "optimized": {"optimize": True},
    "restarts": {"restart_marker_blocks": 2},
    "restart rows": {"restart_marker_rows": 1, "subsampling": 0},
    "many restarts": {"restart_marker_blocks": 1, "subsampling": 0},
    "grey restarts": {"mode": "L", "restart_marker_blocks": 3, "optimize": True},
}


def jpeg(width: int, height: int, seed: int = 0, mode: str = "RGB", grain: int = 12, **options: Any) -> bytes:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
    values = smooth + rng.integers(-grain, grain + 1, smooth.shape)
    stream = io.BytesIO()
    Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert(mode).save(stream, "JPEG", **options)
    return stream.getvalue()


def as_440(data: bytes) -> bytes:
    """A 4:2:2 file as if turned: other sampling factors, height and width, and the same blocks."""
    place = data.index(b"\xff\xc0") + 5
    assert data[place + 6] == 0x21
    return (
        data[:place]
        + data[place + 2 : place + 4]
        + data[place : place + 2]
        + data[place + 4 : place + 6]
        + b"\x12"
        + data[place + 7 :]
    )


def codes_of(data: bytes) -> dict[int, dict[str, int]]:
    """The symbol of each code, written in bits, of the Huffman tables by number."""
    tables: dict[int, dict[str, int]] = {}
    for marker, start, stop in read_header(data).segments:
        body = data[start:stop] if marker == 0xC4 else b""
        while body:
            symbols, code, table = iter(body[17:]), 0, dict[str, int]()
            for bits, count in enumerate(body[1:17], start=1):
                for _ in range(count):
                    table[f"{code:0{bits}b}"] = next(symbols)
                    code += 1
                code <<= 1
            tables[body[0]] = table
            body = body[17 + sum(body[1:17]) :]
    return tables


def read_symbol(bits: Iterator[str], table: dict[str, int]) -> int:
    code = ""
    while code not in table:
        if len(code) == 16:
            raise ValueError("no code")
        code += next(bits)
    return table[code]


def read_block(bits: Iterator[str], dc: dict[str, int], ac: dict[str, int]) -> None:
    for _ in range(read_symbol(bits, dc)):
        next(bits)
    coefficient = 1
    while coefficient < 64 and (symbol := read_symbol(bits, ac)):
        run, size = divmod(symbol, 16)
        if size == 0 and run != 15:
            raise ValueError("an end of several blocks")
        coefficient += run + 1
        if coefficient > 64 or (size == 0 and coefficient == 64):
            raise ValueError("beyond the block")
        for _ in range(size):
            next(bits)


def is_valid(data: bytes) -> bool:
    """Whether the coded data of a file with a good header are valid and complete."""
    header, tables = read_header(data), codes_of(data)
    luma = header.components[0]
    units = -(-header.width // (8 * luma.across)) * -(-header.height // (8 * luma.down))
    _, start, stop = header.segments[-1]
    blocks = list[tuple[dict[str, int], dict[str, int]]]()
    for component, numbers in zip(header.components, data[start + 2 : stop - 3 : 2], strict=True):
        blocks += [(tables[numbers >> 4], tables[16 | numbers & 15])] * (component.across * component.down)
    parts = re.split(rb"\xff[\xd0-\xd7]", data[header.scan_start : header.scan_stop])
    interval = header.restart_interval or units
    for number, part in enumerate(parts):
        values = part.replace(b"\xff\0", b"\xff")
        bits = iter("".join(f"{value:08b}" for value in values))
        try:
            for _ in range(min(interval, units - number * interval)):
                for dc, ac in blocks:
                    read_block(bits, dc, ac)
        except (ValueError, StopIteration):
            return False
        if not re.fullmatch("1{0,7}", "".join(bits)):
            return False
    return len(parts) == -(-units // interval)


def check(files: list[bytes], device: torch.device, **sizes: int) -> list[bool]:
    from veca.kernels.jpeg_scan import check_scans

    return check_scans([np.frombuffer(data, np.uint8) for data in files], device, **sizes).tolist()


def decodable(files: list[bytes]) -> list[bytes]:
    """Those whose header lets them pass, without what follows the image."""
    headers = map(read_header, files)
    return [
        data[: header.end + 2]
        for data, header in zip(files, headers, strict=True)
        if gpu_decodable(data, header, 10**8)
    ]


def flips(data: bytes) -> list[bytes]:
    """A file for each bit of the scan, which is flipped."""
    header = read_header(data)
    places = range(8 * header.scan_start, 8 * header.scan_stop)
    return [data[: p // 8] + bytes([data[p // 8] ^ 128 >> p % 8]) + data[p // 8 + 1 :] for p in places]


def damaged(data: bytes, dice: random.Random) -> bytes:
    """A file whose scan, or sometimes a Huffman table, is cut, overwritten, shortened or lengthened."""
    header = read_header(data)
    first = header.scan_start if dice.random() < 0.9 else data.index(b"\xff\xc4") + 4
    place, length = dice.randrange(first, header.scan_stop), dice.choice((1, 1, 2, 5, 30))
    new = dice.choice(
        (b"", dice.randbytes(length), bytes(length), dice.randbytes(2 * length), data[place - length : place])
    )
    rest = data[place + dice.choice((0, length)) :] if dice.random() < 0.9 else b"\xff\xd9"
    return data[:place] + new + rest


@interpreted
@pytest.mark.parametrize("kind", [*OPTIONS, "440"])
def test_intact_files_are_valid(kind: str) -> None:
    options = OPTIONS["422" if kind == "440" else kind]
    data = jpeg(17, 10, **{"quality": 15, "grain": 4, **options})
    data = as_440(data) if kind == "440" else data
    assert decodable([data]) == [data]
    assert is_valid(data)
    assert check([data], CPU, lanes=8, piece=8) == [True]


@interpreted
@pytest.mark.parametrize("kind", ["420", "grey restarts"])
def test_verdicts_on_damaged_files_are_those_of_a_plain_reader(kind: str) -> None:
    dice = random.Random(0)
    data = jpeg(17, 16, **{"quality": 20, "grain": 4, **OPTIONS[kind]})
    files = decodable([*flips(data)[::31], *(damaged(data, dice) for _ in range(6))])
    expected = [is_valid(file) for file in files]
    assert 3 < sum(expected) < len(expected) - 3
    assert check(files, CPU, lanes=16, piece=4) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OPTIONS)
def test_verdicts_on_a_gpu_are_those_of_a_plain_reader(kind: str) -> None:
    dice = random.Random(1)
    small, large = (jpeg(*size, quality=60, **OPTIONS[kind]) for size in ((33, 40), (320, 200)))
    files = [small, large, *flips(small), *(damaged(small, dice) for _ in range(500))]
    files = decodable([*files, *(damaged(large, dice) for _ in range(50))])
    expected = [is_valid(file) for file in files]
    assert 50 < sum(expected) < len(expected) - 50
    for sizes in ({}, {"lanes": 32, "piece": 4}):
        assert check(files, GPU, **sizes) == expected
