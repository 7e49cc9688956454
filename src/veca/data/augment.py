"""TrivialAugmentWide: one operation per picture, of one strength, on uint8 pixels.

The operations, their strengths and their arithmetic are torchvision's, on Pillow's terms: nearest pixels, black where
nothing is. `augment_image` does one picture with Pillow, `augment_batch` many at once on any device; both give the same
pixels, bit for bit, so where a run augments does not change what it learns.

Shapes: B pictures, R rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

BINS = 31


def _magnitudes() -> dict[str, tuple[Tensor, bool]]:
    def up_to(most: float) -> Tensor:
        return torch.linspace(0.0, most, BINS)

    nothing = torch.zeros(BINS)
    return {
        "Identity": (nothing, False),
        "ShearX": (up_to(0.99), True),
        "ShearY": (up_to(0.99), True),
        "TranslateX": (up_to(32.0), True),
        "TranslateY": (up_to(32.0), True),
        "Rotate": (up_to(135.0), True),
        "Brightness": (up_to(0.99), True),
        "Color": (up_to(0.99), True),
        "Contrast": (up_to(0.99), True),
        "Sharpness": (up_to(0.99), True),
        "Posterize": (8 - (torch.arange(BINS) / ((BINS - 1) / 6)).round(), False),
        "Solarize": (torch.linspace(255.0, 0.0, BINS), False),
        "AutoContrast": (nothing, False),
        "Equalize": (nothing, False),
    }


_SPACE = _magnitudes()
OPS = tuple(_SPACE)
"""Names of the operations, by number."""
_STRENGTHS = np.stack([values.double().numpy() for values, _ in _SPACE.values()])
_SIGNED = np.array([signed for _, signed in _SPACE.values()])

_MOVES = frozenset({"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"})
COLOURS = tuple(number for number, name in enumerate(OPS) if name not in _MOVES)
"""Operations after which every pixel is where it was."""
_TABLES = frozenset({"Brightness", "Contrast", "Posterize", "Solarize"})
_BY_COUNT = frozenset({"AutoContrast", "Equalize"})
_BLENDS = {"Brightness": ImageEnhance.Brightness, "Color": ImageEnhance.Color, "Contrast": ImageEnhance.Contrast}


class Augmentation(NamedTuple):
    """What is to be done to each picture of a batch: numbers of operations (B) int64, strengths (B) float64."""

    ops: Tensor
    strengths: Tensor


def choose(
    op: NDArray[np.uint64], bin: NDArray[np.uint64], negative: NDArray[np.bool_], among: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """For each picture an operation and its strength, from three random numbers of any size, evenly distributed."""
    ops = np.array(among)[op % np.uint64(len(among))]
    strengths = _STRENGTHS[ops, bin % np.uint64(BINS)]
    return ops, np.where(negative & _SIGNED[ops], -strengths, strengths)


def augment_image(image: Image.Image, op: int, strength: float) -> Image.Image:
    """An RGB picture after one operation."""
    name = OPS[op]
    if name in _MOVES:
        return image.transform(image.size, Image.Transform.AFFINE, _affine(name, strength, image.width, image.height))
    if name in _BLENDS:
        return _BLENDS[name](image).enhance(1.0 + strength)
    if name == "Sharpness":
        return ImageEnhance.Sharpness(image).enhance(1.0 + strength) if min(image.size) > 2 else image
    if name == "Posterize":
        return ImageOps.posterize(image, int(strength))
    if name == "Solarize":
        return image.point([i if i < strength else 255 - i for i in range(256)] * 3)
    if name == "AutoContrast":
        return ImageOps.autocontrast(image)
    return ImageOps.equalize(image) if name == "Equalize" else image


def _affine(name: str, strength: float, width: int, height: int) -> tuple[float, ...]:
    """(a, b, c, d, e, f): the pixel at (x, y) comes from (ax + by + c, dx + ey + f)."""
    if name == "ShearX":
        return 1.0, strength, 0.0, 0.0, 1.0, 0.0
    if name == "ShearY":
        return 1.0, 0.0, 0.0, strength, 1.0, 0.0
    if name == "TranslateX":
        return 1.0, 0.0, -float(int(strength)), 0.0, 1.0, 0.0
    if name == "TranslateY":
        return 1.0, 0.0, 0.0, 0.0, 1.0, -float(int(strength))
    turn = -math.radians(strength % 360)  # of Rotate, around the centre
    cos, sin = round(math.cos(turn), 15), round(math.sin(turn), 15)
    x, y = width / 2, height / 2
    return cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y


def augment_batch(images: Tensor, augmentation: Augmentation) -> Tensor:
    """Pictures (B, 3, R, R) uint8 on any device, each after its own operation, in new memory.

    `augmentation` stays on the CPU: from it the pictures are sorted by what is done to them, and the device gets a few
    large operations for each kind and is never waited for.
    """
    images = images.clone(memory_format=torch.contiguous_format)
    names = [OPS[op] for op in augmentation.ops.tolist()]
    strengths = augmentation.strengths.tolist()

    def change(kinds: frozenset[str], how: Callable[[Tensor, Sequence[str], Sequence[float]], Tensor]) -> None:
        if chosen := [i for i, name in enumerate(names) if name in kinds]:
            where = _to(images.device, np.array(chosen))
            done = how(images[where], [names[i] for i in chosen], [strengths[i] for i in chosen])
            images.index_copy_(0, where, done)

    change(_MOVES, _move)
    change(_TABLES, _look_up)
    change(_BY_COUNT, _look_up)
    change(frozenset({"Color"}), lambda x, _, strength: _blend(_grey(x)[:, None], x, strength))
    if min(images.shape[-2:]) > 2:
        change(frozenset({"Sharpness"}), lambda x, _, strength: _blend(_smooth(x), x, strength))
    return images


def _to(device: torch.device, values: NDArray[Any]) -> Tensor:
    """Numbers on the device, without waiting for it."""
    found = torch.from_numpy(values)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def _move(x: Tensor, names: Sequence[str], strengths: Sequence[float]) -> Tensor:
    """Pillow's affine transform: where a pixel comes from is reckoned in whole 65536ths, so it is exact anywhere."""
    rows, columns = x.shape[-2:]
    table = np.array([_affine(name, s, columns, rows) for name, s in zip(names, strengths, strict=True)])
    table[:, 2] += table[:, :2].sum(1) / 2  # pixels have their centres at halves
    table[:, 5] += table[:, 3:5].sum(1) / 2
    fixed = _to(x.device, np.floor(table * 65536 + 0.5).astype(np.int32))
    a, b, c, d, e, f = fixed[:, :, None, None].unbind(1)
    down = torch.arange(rows, dtype=torch.int32, device=x.device)[:, None]
    across = torch.arange(columns, dtype=torch.int32, device=x.device)
    from_x, from_y = (c + a * across + b * down) >> 16, (f + d * across + e * down) >> 16
    inside = (from_x >= 0) & (from_x < columns) & (from_y >= 0) & (from_y < rows)
    # Not `where` with a number, here and below: it would be sent to the device, and waited for.
    source = (from_y * columns + from_x).masked_fill(~inside, 0).flatten(1).long()
    moved = x.flatten(2).gather(2, source[:, None].expand(-1, 3, -1)).view_as(x)
    return moved * inside[:, None]


def _look_up(x: Tensor, names: Sequence[str], strengths: Sequence[float]) -> Tensor:
    """Operations that take each value of a channel to another: a table of 256 for each, then one look-up for all."""
    levels = torch.arange(256, device=x.device)
    strength = _to(x.device, np.array(strengths))[:, None, None]
    middle = (_grey(x).flatten(1).sum(1, dtype=torch.int64).double() / x[0, 0].numel() + 0.5).floor()[:, None, None]
    counts = _histogram(x) if _BY_COUNT.intersection(names) else levels
    tables = {
        "Brightness": lambda: _mix(torch.zeros_like(middle), levels, 1 + strength),
        "Contrast": lambda: _mix(middle, levels, 1 + strength),
        "Posterize": lambda: levels & ~((1 << (8 - strength.long())) - 1),
        "Solarize": lambda: torch.where(levels < strength, levels, 255 - levels),
        "AutoContrast": lambda: _stretched(counts, levels),
        "Equalize": lambda: _equalized(counts, levels),
    }
    present = sorted(set(names))
    which = _to(x.device, np.array([present.index(name) for name in names]))
    stacked = torch.stack([tables[name]().to(torch.uint8).expand(len(x), 3, 256) for name in present])
    table = stacked[which, torch.arange(len(x), device=x.device)]
    return table.gather(2, x.flatten(2).long()).view_as(x)


def _histogram(x: Tensor) -> Tensor:
    """How often each value is in each channel: (B, 3, 256). By sorting, which is never a race, unlike counting."""
    ordered = x.flatten(2).sort().values
    levels = torch.arange(256, dtype=torch.uint8, device=x.device).expand(*x.shape[:2], 256).contiguous()
    up_to = torch.searchsorted(ordered, levels, right=True)
    return up_to.diff(dim=2, prepend=torch.zeros_like(up_to[..., :1]))


def _stretched(counts: Tensor, levels: Tensor) -> Tensor:
    """`ImageOps.autocontrast`: from the least to the greatest value that is there, stretched over all."""
    there = counts > 0
    low = levels.expand_as(there).masked_fill(~there, 255).amin(2, keepdim=True).double()
    high = (levels * there).amax(2, keepdim=True).double()
    scale = torch.full_like(low, 255) / (high - low).clamp_min(1)  # 255 / x would be 255 · (1 / x), rounded twice
    stretched = (levels.double() * scale + -low * scale).trunc().clamp(0, 255)
    return torch.where(high > low, stretched, levels.double())


def _equalized(counts: Tensor, levels: Tensor) -> Tensor:
    """`ImageOps.equalize`: every value about as often as any other."""
    last = (levels * (counts > 0)).amax(2, keepdim=True)
    step = (counts.sum(2, keepdim=True) - counts.gather(2, last)) // 255
    before = counts.cumsum(2) - counts
    spread = ((step // 2 + before) // step.clamp_min(1)).clamp(0, 255)
    return torch.where(step > 0, spread, levels)


def _grey(x: Tensor) -> Tensor:
    """Pillow's grey of (B, 3, R, R): (B, R, R), int32."""
    r, g, b = x.int().unbind(1)
    return (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16


def _smooth(x: Tensor) -> Tensor:
    """Pillow's SMOOTH filter: the middle of 3 × 3 counts five times; the outermost pixels stay."""
    wide = x.int()
    rows = wide[..., :-2, :] + wide[..., 1:-1, :] + wide[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * wide[..., 1:-1, 1:-1]
    wide[..., 1:-1, 1:-1] = (2 * total + 13) // 26
    return wide


def _blend(plain: Tensor, x: Tensor, strengths: Sequence[float]) -> Tensor:
    return _mix(plain, x, _to(x.device, 1.0 + np.array(strengths))[:, None, None, None]).to(torch.uint8)


def _mix(plain: Tensor, x: Tensor, share: Tensor) -> Tensor:
    """From `plain` towards `x` and beyond, in float32 and cut off, as `Image.blend`."""
    plain, x = plain.float(), x.float()
    step = (x - plain) * share.float()
    return (plain + step).trunc().clamp(0, 255)
