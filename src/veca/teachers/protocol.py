"""What every teacher offers, and its targets standardised.

Shapes: B images, rows × columns = N cells of the student's grid, D the teacher's width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from veca.errors import VecaError
from veca.images import MEAN, STD
from veca.images.resize import resize_maps

Meet: TypeAlias = Literal["input", "map"] | int
"""How the teacher's grid comes to be the student's: its input is resized, or its map. A number: its input, so that the
short side has so many pixels whatever the student sees, then its map."""


class TeacherError(VecaError, ValueError):
    """A teacher that cannot be had, or cannot teach: the message says what to do."""


class Targets(NamedTuple):
    cls: Tensor
    """The global feature (B, D)."""
    patches: Tensor
    """The dense map on the student's grid (B, N, D)."""


class Teacher(nn.Module, ABC):
    """A backbone that is looked up to, never trained.

    `width` is that of its features, `stride` the pixels per cell of its map, `mean` and `std` what it expects pictures
    to be normalised with. `raw`: its features are of no particular size, and want standardising. Whoever loads one says
    what it is: `name`, as `load_teacher` took it, the `library` its code is from, and its `weights`, in words.
    """

    name: str = "unnamed"
    library: str = "unknown"
    weights: str = "unknown"
    pooled: bool = False
    """Whether the global feature is the mean of the map."""
    glance: int | None = None
    """Pixels a side of a second look, which the global feature is taken from; None: there is one look."""

    def __init__(
        self, width: int, stride: int, mean: Sequence[float], std: Sequence[float], raw: bool, meet: Meet = "input"
    ) -> None:
        super().__init__()
        self.width, self.stride, self.raw, self.meet = width, stride, raw, meet
        self.mean, self.std = tuple(mean), tuple(std)
        own, theirs = torch.tensor([MEAN, STD]), torch.tensor([self.mean, self.std])
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", (own[1] / theirs[1]).view(3, 1, 1), persistent=False)
        self.register_buffer("shift", ((own[0] - theirs[0]) / theirs[1]).view(3, 1, 1), persistent=False)

    @abstractmethod
    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Of images normalised its own way: the global feature (B, D) and the dense map (B, D, rows, columns)."""

    def patch_embedding(self) -> tuple[Tensor, Tensor] | None:
        """Kernel (D, 3, stride, stride) and bias (D) of its patch embedding, if it begins with one."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and module.in_channels == 3:
                square = module.kernel_size == module.stride == (self.stride, self.stride)
                if not square or module.padding != (0, 0):
                    return None
                bias = module.weight.new_zeros(len(module.weight)) if module.bias is None else module.bias
                return module.weight, bias
        return None

    @property
    def about(self) -> dict[str, Any]:
        """What this teacher is, as plain data for reports and checkpoints."""
        return {
            "name": self.name,
            "library": self.library,
            "weights": self.weights,
            "width": self.width,
            "stride": self.stride,
            "mean": list(self.mean),
            "std": list(self.std),
            "meet": self.meet,
            "standardized": False,
            **({"glance": self.glance} if self.glance is not None else {}),
        }

    def train(self, mode: bool = True) -> Teacher:
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor, grid: tuple[int, int], zoom: float = 1.0) -> Targets:
        """Targets for a student that sees `images`, normalised for the student, on `grid` = (rows, columns).

        With `zoom` these are pictures of which the student sees a part, so many times smaller.
        """
        if self.meet == "input":
            cls, dense = self._look(images, grid)
        else:
            least = min(images.shape[-2:])
            cls, dense = self._look(images, self._cells(images, least if self.meet == "map" else self.meet * zoom))
        if self.glance is not None:
            cls, _ = self._look(images, self._cells(images, self.glance * zoom))
        return Targets(cls, resize_maps(dense, grid, antialias=True).flatten(2).mT)

    @torch.no_grad()
    def glimpse(self, images: Tensor, zoom: float = 1.0) -> Tensor:
        """The map (B, D, rows, columns) of the second look, whose mean is the global feature if that is `pooled`."""
        assert self.glance is not None
        return self._look(images, self._cells(images, self.glance * zoom))[1]

    def _cells(self, images: Tensor, short: float) -> tuple[int, int]:
        """Of the teacher's map, if the short side of the images had so many pixels."""
        scale = short / min(images.shape[-2:])
        return cast(tuple[int, int], tuple(max(1, round(scale * s / self.stride)) for s in images.shape[-2:]))

    def _look(self, images: Tensor, cells: tuple[int, int]) -> tuple[Tensor, Tensor]:
        size = cells[0] * self.stride, cells[1] * self.stride
        return self.features(resize_maps(images * self.scale + self.shift, size, "bicubic", antialias=True))


class Standardized(nn.Module):
    """Targets with each channel at mean 0 and deviation 1, by statistics taken once, over pictures.

    The global feature and the dense map have statistics of their own.
    """

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        self.teacher, self.width, self.stride, self.name = teacher, teacher.width, teacher.stride, teacher.name
        self.means: Tensor
        self.deviations: Tensor
        self.register_buffer("means", torch.zeros(2, teacher.width))
        self.register_buffer("deviations", torch.ones(2, teacher.width))

    @property
    def about(self) -> dict[str, Any]:
        return {**self.teacher.about, "standardized": True}

    @torch.no_grad()
    def fit(self, batches: Iterable[Tensor], grid: tuple[int, int]) -> None:
        """Take the statistics over batches of images, as `forward` gets them."""
        like = self.means
        count = torch.zeros(2, 1, dtype=torch.float64, device=like.device)
        total = torch.zeros(2, self.width, dtype=torch.float64, device=like.device)
        squares = torch.zeros_like(total)
        for images in batches:
            for i, target in enumerate(self.teacher(images.to(like.device), grid)):
                values = target.double().flatten(0, -2)
                count[i] += len(values)
                total[i] += values.sum(0)
                squares[i] += values.square().sum(0)
        if not count.all():
            raise TeacherError("no pictures to take the teacher's statistics of")
        means = total / count
        self.means.copy_(means)
        self.deviations.copy_((squares / count - means.square()).clamp_min(0).sqrt() + 1e-3)

    def forward(self, images: Tensor, grid: tuple[int, int], zoom: float = 1.0) -> Targets:
        cls, patches = self.teacher(images, grid, zoom)
        return Targets((cls - self.means[0]) / self.deviations[0], (patches - self.means[1]) / self.deviations[1])
