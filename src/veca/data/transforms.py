"""Image transforms: crops and resizes for training and evaluation, TrivialAugmentWide, mixup and CutMix.

TrivialAugmentWide applies one operation of one strength to each image. Operations, strengths and arithmetic are
torchvision's on Pillow images: nearest-neighbour sampling, black fill. `augment_image` does one image with Pillow,
`augment_batch` many at once on any device; both give the same pixels, bit for bit, so where a run augments does not
change what it learns. torchvision itself has no batched version, and is not a dependency.

Shapes: B images of H × W pixels, R rows and columns; `...` is any leading shape.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from veca.errors import ArgumentError
from veca.images import MAX_PIXELS, ImageTooLargeError, nearest_sizes
from veca.images.resize import PATCH, Crop, native_sizes

# Of a random resized crop: its share of the image's area, and its width over its height
CROP_AREA, CROP_ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
# Aspect ratios at one resolution: few enough that many images of a batch share one
BUCKETS = 7


def seeded_random(*numbers: int) -> random.Random:
    """Return a generator seeded by whole numbers, the same on every machine."""
    return random.Random(" ".join(map(str, numbers)))


def plan_random_crop(
    width: int, height: int, side: int, rng: random.Random, area: tuple[float, float] = CROP_AREA
) -> Crop:
    """Return a random part of an image that becomes `side` × `side`, flipped in half the cases.

    Drawn as in torchvision's RandomResizedCrop.
    """
    box = random_box(width, height, rng, area, CROP_ASPECT)
    return Crop(box, *(side,) * 4, flip=rng.random() < 0.5)


def random_box(
    width: int, height: int, rng: random.Random, area: tuple[float, float], aspect: tuple[float, float]
) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a random part of an image.

    `area` is the range of its share of the image's, `aspect` that of its width over its height.
    """
    for _ in range(10):
        pixels = width * height * rng.uniform(*area)
        ratio = math.exp(rng.uniform(math.log(aspect[0]), math.log(aspect[1])))
        columns, rows = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            left, top = rng.randint(0, width - columns), rng.randint(0, height - rows)
            break
    else:  # a very long image: the largest part of its centre with an allowed aspect ratio
        columns, rows = min(width, round(height * aspect[1])), min(height, round(width / aspect[0]))
        left, top = (width - columns) // 2, (height - rows) // 2
    return left, top, left + columns, top + rows


def plan_native_crop(
    width: int,
    height: int,
    max_patches: int,
    rng: random.Random,
    area: tuple[float, float] = CROP_AREA,
    scales: tuple[float, float] = (1.0, 1.0),
    patch: int = PATCH,
) -> Crop:
    """Return a random part of an image, of about the image's aspect ratio, flipped in half the cases.

    Its aspect ratio is the image's times a number in `CROP_ASPECT`. It is resized, its aspect ratio kept, to as many
    patches as the whole image has by `native_sizes`, its sides then scaled by a number in `scales`.
    """
    box = random_box(width, height, rng, area, (CROP_ASPECT[0] * width / height, CROP_ASPECT[1] * width / height))
    whole = math.prod(native_sizes(height, width, max_patches, patch)) / patch**2
    patches = min(max_patches, max(1, round(whole * draw_scale(rng, scales) ** 2)))
    across, down = box[2] - box[0], box[3] - box[1]
    zoom = patch * math.sqrt(patches / (across * down))
    rows, columns = native_sizes(down * zoom, across * zoom, patches, patch)
    return Crop(box, columns, rows, columns, rows, flip=rng.random() < 0.5)


def bucket_grids(cells: int, aspect: tuple[float, float]) -> list[tuple[int, int]]:
    """Return grids of at most `cells`² patches whose widths over heights are spread over a range: `BUCKETS` at most.

    >>> bucket_grids(16, (0.5, 2.0))
    [(23, 11), (20, 12), (18, 14), (16, 16), (14, 18), (13, 19), (11, 23)]
    """
    low, high = map(math.log, aspect)
    ratios = [math.exp(low + (high - low) * i / (BUCKETS - 1)) for i in range(BUCKETS)]
    rows = [min(cells**2, max(1, round(cells / math.sqrt(ratio)))) for ratio in ratios]
    return [(each, cells**2 // each) for each in dict.fromkeys(rows)]


def nearest_grid(width: float, height: float, grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the grid whose aspect ratio is nearest to that of an image."""
    return min(grids, key=lambda grid: abs(math.log(grid[1] * height / (grid[0] * width))))


def draw_scale(rng: random.Random, scales: tuple[float, float]) -> float:
    """Draw a factor between two, its logarithm uniform."""
    return math.exp(rng.uniform(*map(math.log, scales)))


def plan_short_side(width: int, height: int, short: float, multiple: int = 1) -> Crop:
    """Return the whole image, its short side resized to `short` and both sides rounded to `multiple`."""
    scale = short / min(width, height)
    rows, columns = nearest_sizes(height * scale, width * scale, multiple)
    if rows * columns > MAX_PIXELS:
        raise ImageTooLargeError(
            f"{height}×{width}; with a short side of {round(short)} it has over {MAX_PIXELS:,} pixels"
        )
    return Crop((0, 0, width, height), columns, rows, columns, rows)


def resize_nearest(values: NDArray[Any], size: tuple[int, int]) -> Tensor:
    """Resize a mask or depth map (height, width) to `size` = (rows, columns) by nearest neighbour: int32 or float32."""
    height, width = values.shape
    rows = ((np.arange(size[0]) + 0.5) * height / size[0]).astype(np.int64)
    columns = ((np.arange(size[1]) + 0.5) * width / size[1]).astype(np.int64)
    resized = values[rows[:, None], columns]
    return torch.from_numpy(resized.astype(np.float32 if resized.dtype.kind == "f" else np.int32))


class Window(NamedTuple):
    """A part of an image and of its label map, mirrored if `flip`."""

    top: int
    left: int
    rows: int
    columns: int
    flip: bool

    def cut(self, x: Tensor, fill: float = 0) -> Tensor:
        """Cut it from a tensor (..., H, W); sides that are shorter are padded with `fill` at their end."""
        height, width = x.shape[-2:]
        x = F.pad(x, (0, max(0, self.columns - width), 0, max(0, self.rows - height)), value=fill)
        x = x[..., self.top : self.top + self.rows, self.left : self.left + self.columns]
        return x.flip(-1) if self.flip else x


def random_window(height: int, width: int, size: tuple[int, int], generator: torch.Generator) -> Window:
    """Return a random window of `size` = (rows, columns) in an image, flipped in half the cases."""
    rooms = max(0, height - size[0]), max(0, width - size[1])
    top, left = (int(torch.randint(room + 1, (), generator=generator)) for room in rooms)
    return Window(top, left, *size, flip=bool(torch.randint(2, (), generator=generator)))


def slide_windows(
    function: Callable[[Tensor], Tensor], images: Tensor, window: tuple[int, int], stride: tuple[int, int]
) -> Tensor:
    """Apply `function` to each window of images (B, 3, H, W) and average where windows overlap: (B, ..., H, W).

    The function maps (B, 3, h, w) to (B, ..., h, w), such as class scores. As in mmsegmentation, the last
    window of a row or column moves inwards to end with the image, and no window is larger than the image.
    """
    if min(stride) < 1 or any(step > side for step, side in zip(stride, window, strict=True)):
        rule = "a stride must be between 1 and the window, or pixels are missed"
        raise ArgumentError(f"stride is {stride}, window {window}; {rule}")
    height, width = images.shape[-2:]
    rows, columns = min(window[0], height), min(window[1], width)
    # The last step of each side may end beyond the image, and is moved back.
    tops, lefts = range(0, height - rows + stride[0], stride[0]), range(0, width - columns + stride[1], stride[1])
    total, counts = torch.empty(0), torch.zeros(height, width)
    for top, left in itertools.product(tops, lefts):
        top, left = min(top, height - rows), min(left, width - columns)
        window_slice = ..., slice(top, top + rows), slice(left, left + columns)
        scores = function(images[window_slice])
        if tuple(scores.shape[-2:]) != (rows, columns):
            rule = "its last two sides must stay: resize the scores to the window"
            raise ArgumentError(f"a window of {rows}×{columns} came back as {tuple(scores.shape)}; {rule}")
        if not total.numel():
            total = scores.new_zeros(*scores.shape[:-2], height, width)
        total[window_slice] += scores
        counts[window_slice] += 1
    return total / counts.to(total)


# Number of strengths of each operation
BINS = 31
# Largest strength of operations whose strength rises linearly from 0 and has a random sign
_MAX_STRENGTH = {"ShearX": 0.99, "ShearY": 0.99, "TranslateX": 32.0, "TranslateY": 32.0, "Rotate": 135.0}
_MAX_STRENGTH |= dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.99)
# Names of the operations, by number
OPS = ("Identity", *_MAX_STRENGTH, "Posterize", "Solarize", "AutoContrast", "Equalize")
_SIGNED = np.array([name in _MAX_STRENGTH for name in OPS])
# Computed by torch, as in torchvision, so that the strengths are the same float32 numbers.
_STRENGTHS = np.zeros((len(OPS), BINS))
for _name, _most in _MAX_STRENGTH.items():
    _STRENGTHS[OPS.index(_name)] = torch.linspace(0.0, _most, BINS)
_STRENGTHS[OPS.index("Posterize")] = 8 - (torch.arange(BINS) / ((BINS - 1) / 6)).round()  # bits that are kept
_STRENGTHS[OPS.index("Solarize")] = torch.linspace(255.0, 0.0, BINS)  # threshold

_GEOMETRIC = frozenset({"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"})
# Operations that move no pixel
COLOUR_OPS = tuple(number for number, name in enumerate(OPS) if name not in _GEOMETRIC)


class Augmentation(NamedTuple):
    """Operations of a batch of images: their numbers (B) int64, their strengths (B) float64."""

    ops: Tensor
    strengths: Tensor


def choose_ops(
    op: NDArray[np.uint64], bin: NDArray[np.uint64], negative: NDArray[np.bool_], among: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Choose an operation and its strength for each image, from three random numbers of any size."""
    ops = np.array(among)[op % np.uint64(len(among))]
    strengths = _STRENGTHS[ops, bin % np.uint64(BINS)]
    return ops, np.where(negative & _SIGNED[ops], -strengths, strengths)


def augment_image(image: Image.Image, op: int, strength: float) -> Image.Image:
    """Apply one operation to an RGB image."""
    name = OPS[op]
    if name in _GEOMETRIC:
        return image.transform(image.size, Image.Transform.AFFINE, _affine(name, strength, image.width, image.height))
    if name == "Solarize":
        return image.point([i if i < strength else 255 - i for i in range(256)] * 3)
    changed: Image.Image = image
    if name in _MAX_STRENGTH:
        changed = getattr(ImageEnhance, name)(image).enhance(1.0 + strength)
    elif name != "Identity":
        bits = [int(strength)] if name == "Posterize" else []
        changed = getattr(ImageOps, name.lower())(image, *bits)
    return changed


def _affine(name: str, strength: float, width: int, height: int) -> tuple[float, ...]:
    """Return (a, b, c, d, e, f): the pixel at (x, y) comes from (ax + by + c, dx + ey + f)."""
    if name == "Rotate":  # around the centre
        angle, x, y = -math.radians(strength % 360), width / 2, height / 2
        cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
        return cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y
    matrix = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    position = {"ShearX": 1, "ShearY": 3, "TranslateX": 2, "TranslateY": 5}[name]
    matrix[position] = -float(int(strength)) if name.startswith("Translate") else strength
    return tuple(matrix)


def augment_batch(images: Tensor, augmentation: Augmentation) -> Tensor:
    """Apply to each of the images (B, 3, R, R), uint8 on any device, its own operation; the input is not changed.

    `augmentation` stays on the CPU: images are grouped by operation there, so that the device is never waited for.
    """
    images = images.clone(memory_format=torch.contiguous_format)
    names = [OPS[op] for op in augmentation.ops.tolist()]
    for name in sorted({*names} - {"Identity"}):
        numbers = [i for i, other in enumerate(names) if other == name]
        index = copy_to_device(images.device, np.array(numbers))
        images.index_copy_(0, index, _augment_group(images[index], name, augmentation.strengths[numbers].numpy()))
    return images


def copy_to_device(device: torch.device, values: NDArray[Any]) -> Tensor:
    """Copy an array to the device without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _augment_group(x: Tensor, name: str, strengths: NDArray[np.float64]) -> Tensor:
    """Apply one operation to all images."""
    if name in _GEOMETRIC:
        return _transform_affine(x, name, strengths)
    strength = copy_to_device(x.device, strengths)[:, None, None]
    if name in ("Color", "Sharpness"):
        plain = _grey(x)[:, None] if name == "Color" else _smooth(x)
        return _blend(plain, x, 1 + strength[..., None]).to(torch.uint8)
    # The others map each value of a channel to another, by a table.
    levels = torch.arange(256, device=x.device)
    tables = {
        "Brightness": lambda: _blend(torch.zeros_like(strength), levels, 1 + strength),
        "Contrast": lambda: _blend(_mean_grey(x), levels, 1 + strength),
        "Posterize": lambda: levels & ~((1 << (8 - strength.long())) - 1),
        "Solarize": lambda: torch.where(levels < strength, levels, 255 - levels),
        "AutoContrast": lambda: _autocontrast_table(_histogram(x), levels),
        "Equalize": lambda: _equalize_table(_histogram(x), levels),
    }
    table = tables[name]().to(torch.uint8).expand(len(x), 3, 256)
    return table.gather(2, x.flatten(2).long()).view_as(x)


def _transform_affine(x: Tensor, name: str, strengths: NDArray[np.float64]) -> Tensor:
    """Pillow's affine transform. It computes source positions in fixed point, 1/65536, so it is exact on any device."""
    rows, columns = x.shape[-2:]
    matrices = np.array([_affine(name, strength, columns, rows) for strength in strengths.tolist()])
    matrices[:, 2] += matrices[:, :2].sum(1) / 2  # centres of pixels are at halves
    matrices[:, 5] += matrices[:, 3:5].sum(1) / 2
    fixed = copy_to_device(x.device, np.floor(matrices * 65536 + 0.5).astype(np.int32))
    a, b, c, d, e, f = fixed[:, :, None, None].unbind(1)
    to_y = torch.arange(rows, dtype=torch.int32, device=x.device)[:, None]
    to_x = torch.arange(columns, dtype=torch.int32, device=x.device)
    from_x, from_y = (c + a * to_x + b * to_y) >> 16, (f + d * to_x + e * to_y) >> 16
    inside = (from_x >= 0) & (from_x < columns) & (from_y >= 0) & (from_y < rows)
    # Not `where` with a Python number, here and below: copying it to the device would wait for it.
    source = (from_y * columns + from_x).masked_fill(~inside, 0).flatten(1).long()
    moved = x.flatten(2).gather(2, source[:, None].expand(-1, 3, -1)).view_as(x)
    return moved * inside[:, None]


def _histogram(x: Tensor) -> Tensor:
    """Count each value in each channel: (B, 3, 256). By sorting, because atomic counting on GPUs is slow."""
    ordered = x.flatten(2).sort().values
    levels = torch.arange(256, dtype=torch.uint8, device=x.device).expand(*x.shape[:2], 256).contiguous()
    up_to = torch.searchsorted(ordered, levels, right=True)
    return up_to.diff(dim=2, prepend=torch.zeros_like(up_to[..., :1]))


def _autocontrast_table(counts: Tensor, levels: Tensor) -> Tensor:
    """Value table of `ImageOps.autocontrast`: the range of present values stretched to 0…255."""
    present = counts > 0
    low = levels.expand_as(present).masked_fill(~present, 255).amin(2, keepdim=True).double()
    high = (levels * present).amax(2, keepdim=True).double()
    # Not 255 / tensor, which is computed as 255 · (1 / tensor) and rounded twice.
    scale = torch.full_like(low, 255) / (high - low).clamp_min(1)
    stretched = (levels.double() * scale + -low * scale).trunc().clamp(0, 255)
    return torch.where(high > low, stretched, levels.double())


def _equalize_table(counts: Tensor, levels: Tensor) -> Tensor:
    """Value table of `ImageOps.equalize`: all values made about equally frequent."""
    last = (levels * (counts > 0)).amax(2, keepdim=True)
    step = (counts.sum(2, keepdim=True) - counts.gather(2, last)) // 255
    before = counts.cumsum(2) - counts
    spread = ((step // 2 + before) // step.clamp_min(1)).clamp(0, 255)
    return torch.where(step > 0, spread, levels)


def _grey(x: Tensor) -> Tensor:
    """Convert (B, 3, R, R) to grey as Pillow does, (B, R, R) int32."""
    r, g, b = x.int().unbind(1)
    return (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16


def _smooth(x: Tensor) -> Tensor:
    """Pillow's SMOOTH filter: 3 × 3 with a centre weight of five; border pixels stay."""
    wide = x.int()
    rows = wide[..., :-2, :] + wide[..., 1:-1, :] + wide[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * wide[..., 1:-1, 1:-1]
    wide[..., 1:-1, 1:-1] = (2 * total + 13) // 26
    return wide


def _mean_grey(x: Tensor) -> Tensor:
    """The mean of each image in grey, rounded: (B, 1, 1)."""
    return (_grey(x).flatten(1).sum(1, dtype=torch.int64).double() / x[0, 0].numel() + 0.5).floor()[:, None, None]


def _blend(plain: Tensor, x: Tensor, share: Tensor) -> Tensor:
    """Blend from `plain` towards `x` and beyond, in float32 and truncated, as `Image.blend` does."""
    plain = plain.float()
    return (plain + (x.float() - plain) * share.float()).trunc().clamp(0, 255)


@dataclass
class PairMixer:
    """Mixes neighbouring images of a batch with each other, by mixup or CutMix.

    timm and torchvision mix labels too, and draw from global generators. Here what is drawn for a pair follows from the
    seed, the step and the place of the pair in it, whatever the number of processes and of the forward passes
    (`accumulate`) that share it. `mixup` and `cutmix` are alpha of Beta distributions, 0 for none; `prob` is the share
    of the pairs that are mixed.
    """

    mixup: float
    cutmix: float
    prob: float = 1.0
    seed: int = 0
    forward: int = 0
    """Number of the next forward pass."""
    accumulate: int = 1
    rank: int = 0
    world_size: int = 1

    def __call__(self, images: Tensor) -> Tensor:
        """Images (B, 3, R, R) of the next forward pass, B even, mixed."""
        step, place = divmod(self.forward, self.accumulate)
        pairs, rng = len(images) // 2, seeded_random(self.seed, step)
        drawn = [self._draw(rng) for _ in range(pairs * self.world_size * self.accumulate)]
        first = pairs * (place * self.world_size + self.rank)
        self.forward += 1
        own = np.array(drawn[first : first + pairs], np.float32)
        return mix_pairs(images, copy_to_device(images.device, own))

    def _draw(self, rng: random.Random) -> tuple[float, float, float, float, float]:
        """Draw a row for `mix_pairs`."""
        chosen, blends = rng.random() < self.prob, rng.random() < 0.5 if self.mixup and self.cutmix else self.mixup > 0
        alpha, x, y = self.mixup if blends else self.cutmix, rng.random(), rng.random()
        share = rng.betavariate(alpha, alpha) if alpha else 1.0
        if not chosen:
            return 1.0, 0.0, 0.0, 0.0, 0.0
        if blends:
            return share, 0.0, 0.0, 0.0, 0.0
        half = math.sqrt(1 - share) / 2
        return 1.0, x - half, x + half, y - half, y + half


def mix_pairs(images: Tensor, rows: Tensor) -> Tensor:
    """Mix images (B, 3, R, R) 2 i and 2 i + 1 with each other, by `rows` (B / 2, 5).

    A row is the share that an image keeps of itself, and a box in which it has the other's pixels alone: left, right,
    top and bottom as shares of the side.
    """
    side = images.shape[-1]
    places = (torch.arange(side, device=images.device) + 0.5) / side
    share, left, right, top, bottom = rows[:, :, None].unbind(1)
    inside_x, inside_y = (places > left) & (places < right), (places > top) & (places < bottom)
    inside = inside_y[:, :, None] & inside_x[:, None]  # (B / 2, R, R)
    kept = torch.where(inside, 0.0, share[:, :, None])[:, None, None]
    pairs = images.unflatten(0, (-1, 2))
    return torch.lerp(pairs.flip(1), pairs, kept.to(images.dtype)).flatten(0, 1)
