"""Parts of pictures: random ones to train on, windows that slide over a large one, the rectangles benchmarks look at.

Shapes: B images of H × W pixels; `...` is any leading shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

CropRule: TypeAlias = Literal["garg", "eigen-kitti", "eigen-nyu"]


def random_crop_and_flip(
    image: Tensor, label: Tensor, size: tuple[int, int], generator: torch.Generator, fill: float = 255
) -> tuple[Tensor, Tensor]:
    """A random part of an image (..., H, W) and of its label (H, W), both of `size`, in half the cases mirrored.

    Where a side is shorter than asked for, zeros are added to the image after it, and `fill`, the label that does not
    count (for depths 0), to the label.
    """
    if image.shape[-2:] != label.shape[-2:]:
        raise ValueError(
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
        raise ValueError(
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
                raise ValueError(
                    f"a window of {rows}×{columns} came back as {tuple(found.shape)}; its last two sides must stay: "
                    "resize the scores to the window"
                )
            if total is None:
                total = found.new_zeros(*found.shape[:-2], height, width)
            total[place] += found
    assert total is not None
    over = (_windows_over(height, rows, tops)[:, None] * _windows_over(width, columns, lefts)).to(total)
    return total / over


def eval_crop(valid: Tensor, rule: CropRule) -> Tensor:
    """A mask of pixels (..., H, W) without those outside the rectangle that papers on depth evaluate in.

    `garg` (Garg et al. 2016) and `eigen-kitti` (Eigen et al. 2014) are shares of the height and width of a KITTI frame;
    `eigen-nyu` are the rows and columns of a 480 × 640 frame of NYUv2 that its Kinect saw. Depths times the mask are
    depths that only count inside: 0 is no reading.

    >>> int(eval_crop(torch.ones(480, 640, dtype=torch.bool), "eigen-nyu").sum()) == (471 - 45) * (601 - 41)
    True
    """
    height, width = valid.shape[-2:]
    if rule == "eigen-nyu":
        if (height, width) != (480, 640):
            raise ValueError(
                f"the mask is {height}×{width}; eigen-nyu is a rectangle of 480×640: evaluate at that size"
            )
        top, bottom, left, right = 45, 471, 41, 601
    elif rule == "garg" or rule == "eigen-kitti":
        shares = (0.40810811, 0.99189189) if rule == "garg" else (0.3324324, 0.91351351)
        top, bottom = (int(share * height) for share in shares)
        left, right = int(0.03594771 * width), int(0.96405229 * width)
    else:
        raise ValueError(f"there is no crop {rule!r}; choose garg, eigen-kitti or eigen-nyu")
    inside = torch.zeros(height, width, dtype=torch.bool, device=valid.device)
    inside[top:bottom, left:right] = True
    return valid & inside


def _starts(side: int, window: int, stride: int) -> list[int]:
    count = max(side - window + stride - 1, 0) // stride + 1
    return [min(i * stride, side - window) for i in range(count)]


def _windows_over(side: int, window: int, starts: list[int]) -> Tensor:
    count = torch.zeros(side)
    for start in starts:
        count[start : start + window] += 1
    return count
