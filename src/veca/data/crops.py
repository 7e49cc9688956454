"""Parts of pictures: random ones to train on, windows that slide over a large one.

Shapes: B images of H × W pixels; `...` is any leading shape.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from veca.errors import ArgumentError


def random_crop_and_flip(
    image: Tensor, label: Tensor, size: tuple[int, int], generator: torch.Generator, fill: float = 255
) -> tuple[Tensor, Tensor]:
    """A random part of an image (..., H, W) and of its label (H, W), both of `size`, in half the cases mirrored.

    Where a side is shorter than asked for, zeros are added to the image after it, and `fill`, the label that does not
    count (for depths 0), to the label.
    """
    if image.shape[-2:] != label.shape[-2:]:
        raise ArgumentError(
            f"the image is {tuple(image.shape[-2:])}, its label {tuple(label.shape[-2:])}; resize them to one size"
        )
    below, beside = (max(0, wanted - side) for wanted, side in zip(size, image.shape[-2:], strict=True))
    image, label = F.pad(image, (0, beside, 0, below)), F.pad(label, (0, beside, 0, below), value=fill)
    top, left = (
        int(torch.randint(side - wanted + 1, (), generator=generator))
        for wanted, side in zip(size, image.shape[-2:], strict=True)
    )
    flip = bool(torch.randint(2, (), generator=generator))
    image, label = (x[..., top : top + size[0], left : left + size[1]] for x in (image, label))
    return (image.flip(-1), label.flip(-1)) if flip else (image, label)


def slide(
    function: Callable[[Tensor], Tensor], images: Tensor, window: tuple[int, int], stride: tuple[int, int]
) -> Tensor:
    """What `function` says of each window of images (B, 3, H, W), averaged where windows overlap: (B, ..., H, W).

    The function takes (B, 3, h, w) and gives (B, ..., h, w), such as scores of classes. As in mmsegmentation, the last
    window of a row or column moves inwards to end with the image, and no window is larger than the image.
    """
    if min(stride) < 1 or any(step > side for step, side in zip(stride, window, strict=True)):
        raise ArgumentError(
            f"stride is {stride}, window {window}; a stride must be between 1 and the window, or pixels are missed"
        )
    height, width = images.shape[-2:]
    rows, columns = min(window[0], height), min(window[1], width)
    tops, lefts = _starts(height, rows, stride[0]), _starts(width, columns, stride[1])
    total: Tensor | None = None
    for top in tops:
        for left in lefts:
            place = ..., slice(top, top + rows), slice(left, left + columns)
            found = function(images[place])
            if tuple(found.shape[-2:]) != (rows, columns):
                raise ArgumentError(
                    f"a window of {rows}×{columns} came back as {tuple(found.shape)}; its last two sides must stay: "
                    "resize the scores to the window"
                )
            if total is None:
                total = found.new_zeros(*found.shape[:-2], height, width)
            total[place] += found
    assert total is not None
    over = (_windows_over(height, rows, tops)[:, None] * _windows_over(width, columns, lefts)).to(total)
    return total / over


def _starts(side: int, window: int, stride: int) -> list[int]:
    count = max(side - window + stride - 1, 0) // stride + 1
    return [min(i * stride, side - window) for i in range(count)]


def _windows_over(side: int, window: int, starts: list[int]) -> Tensor:
    count = torch.zeros(side)
    for start in starts:
        count[start : start + window] += 1
    return count
