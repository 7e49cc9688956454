"""The interface of teachers, a wrapper that standardises their targets, and groups of several.

Shapes: B images, rows × columns = N cells of the student's grid, D the teacher's width.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast

import torch
from torch import Tensor, nn

from veca.errors import VecaError
from veca.images import MEAN, STD
from veca.images.resize import resize_maps
from veca.utils.settings import to_plain

Meet: TypeAlias = Literal["input", "map"] | int
"""What is resized to match the teacher's grid to the student's: the teacher's input, or its feature map. A number: the
input to so many pixels on the short side, whatever the student sees, then the map."""


class TeacherError(VecaError, ValueError):
    """A teacher that cannot be loaded or used: the message says what to do."""


class Targets(NamedTuple):
    """What a student is trained to predict."""

    cls: Tensor
    """The global feature (B, D)."""
    patches: Tensor
    """The dense map on the student's grid (B, N, D)."""


class Teacher(nn.Module):
    """A frozen backbone that gives targets.

    `width` is that of its features, `stride` the pixels per cell of its map, `mean` and `std` those its input is
    normalised with. `raw`: its features have no final norm, so they should be standardised. Set by the function that
    loads it: `name`, as `load_teacher` takes it, the `library` of its code, and a description of its `weights`.
    """

    model: Any
    name: str = "unnamed"
    library: str = "unknown"
    weights: str = "unknown"
    pooled: bool = False
    """Whether the global feature is the mean of the map."""
    glance: int | None = None
    """Short side in pixels of a second pass, which the global feature is taken from; None: a single pass."""

    def __init__(
        self, width: int, stride: int, mean: Sequence[float], std: Sequence[float], raw: bool, meet: Meet = "input"
    ) -> None:
        super().__init__()
        self.width, self.stride, self.raw, self.meet = width, stride, raw, meet
        self.mean, self.std = tuple(mean), tuple(std)
        self.classifier: nn.Linear | None = None
        """Logits of its own classes from the global feature; None: it has no classes, or needs more for them."""
        self.classes: tuple[str, ...] = ()
        """Names of the classes, where they are known."""
        # One scale and shift take our normalisation to the teacher's.
        own, theirs = torch.tensor([MEAN, STD]), torch.tensor([self.mean, self.std])
        self.scale = nn.Buffer((own[1] / theirs[1]).view(3, 1, 1), persistent=False)
        self.shift = nn.Buffer(((own[0] - theirs[0]) / theirs[1]).view(3, 1, 1), persistent=False)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Global feature (B, D) and dense map (B, D, rows, columns) of images in the teacher's normalisation."""
        raise NotImplementedError

    def patch_embedding(self) -> tuple[Tensor, Tensor] | None:
        """Kernel (D, 3, stride, stride) and bias (D) of its patch embedding, if it has one."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and module.in_channels == 3:
                if not module.kernel_size == module.stride == (self.stride, self.stride) or module.padding != (0, 0):
                    return None
                weight, bias = module.weight, module.bias
                return weight, weight.new_zeros(len(weight)) if bias is None else bias
        return None

    def to_map(self, tokens: Tensor, images: Tensor) -> Tensor:
        """Patch tokens (B, rows · columns, D) of images as a map (B, D, rows, columns)."""
        return tokens.mT.unflatten(2, (-1, images.shape[-1] // self.stride))

    @property
    def about(self) -> dict[str, Any]:
        """A description as plain data, for reports and checkpoints."""
        keys = ("name", "library", "weights", "width", "stride", "mean", "std", "meet")
        about = {key: to_plain(getattr(self, key)) for key in keys} | {"standardized": False}
        return about if self.glance is None else {**about, "glance": self.glance}

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor, grid: tuple[int, int], zoom: float = 1.0) -> Targets:
        """Targets on the student's `grid` = (rows, columns) for `images` in the student's normalisation.

        With `zoom` the images are larger by this factor than the crops of them that the student sees.
        """
        if self.meet == "input":
            cls, dense = self._features_on(images, grid)
        else:
            short_side = min(images.shape[-2:]) if self.meet == "map" else self.meet * zoom
            cls, dense = self._features_on(images, self._grid_at(images, short_side))
        if self.glance is not None:
            cls, _ = self._features_on(images, self._grid_at(images, self.glance * zoom))
        return Targets(cls, resize_maps(dense, grid, antialias=True).flatten(2).mT)

    @torch.no_grad()
    def glimpse(self, images: Tensor, zoom: float = 1.0) -> Tensor:
        """The map (B, D, rows, columns) of the second pass; its mean is the global feature of a `pooled` teacher."""
        assert self.glance is not None
        return self._features_on(images, self._grid_at(images, self.glance * zoom))[1]

    def _grid_at(self, images: Tensor, short_side: float) -> tuple[int, int]:
        """The teacher's grid for images resized to `short_side` pixels."""
        scale, (height, width) = short_side / min(images.shape[-2:]), images.shape[-2:]
        return max(1, round(scale * height / self.stride)), max(1, round(scale * width / self.stride))

    def _features_on(self, images: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Features of images resized so that the teacher's map has this grid."""
        size = grid[0] * self.stride, grid[1] * self.stride
        return self.features(resize_maps(images * self.scale + self.shift, size, "bicubic", antialias=True))


class Standardized(nn.Module):
    """A teacher whose targets are standardised: each channel to mean 0 and deviation 1, by statistics of `fit`.

    The global feature and the dense map have separate statistics: rows 0 and 1 of `means` and `deviations` (2, D).
    """

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        self.teacher, self.width, self.stride, self.name = teacher, teacher.width, teacher.stride, teacher.name
        self.means = nn.Buffer(torch.zeros(2, teacher.width))
        self.deviations = nn.Buffer(torch.ones(2, teacher.width))

    @property
    def about(self) -> dict[str, Any]:
        return {**self.teacher.about, "standardized": True}

    @torch.no_grad()
    def fit(self, batches: Iterable[Tensor], grid: tuple[int, int]) -> None:
        """Compute the statistics over batches of images, as `forward` takes them."""
        count, total, squares = (self.means.new_zeros(2, n, dtype=torch.float64) for n in (1, self.width, self.width))
        for images in batches:
            for i, target in enumerate(self.teacher(images.to(count.device), grid)):
                values = target.double().flatten(0, -2)
                count[i] += len(values)
                total[i] += values.sum(0)
                squares[i] += values.square().sum(0)
        if not count.all():
            raise TeacherError("no images to compute the teacher's statistics from")
        means = total / count
        self.means.copy_(means)
        self.deviations.copy_((squares / count - means.square()).clamp_min(0).sqrt() + 1e-3)

    def forward(self, images: Tensor, grid: tuple[int, int], zoom: float = 1.0) -> Targets:
        cls, patches = self.teacher(images, grid, zoom)
        return Targets((cls - self.means[0]) / self.deviations[0], (patches - self.means[1]) / self.deviations[1])


class TeacherGroup(nn.Module):
    """Several teachers as one: its features are theirs side by side, its width the sum of their `widths`."""

    def __init__(self, teachers: Sequence[Teacher | Standardized]) -> None:
        super().__init__()
        self.teachers = nn.ModuleList(teachers)
        self.widths = tuple(teacher.width for teacher in teachers)
        self.width, self.name = sum(self.widths), " + ".join(teacher.name for teacher in teachers)

    @property
    def about(self) -> dict[str, Any]:
        return {"name": self.name, "teachers": [teacher.about for teacher in members(self)]}

    def forward(self, images: Tensor, grid: tuple[int, int], zoom: float = 1.0) -> Targets:
        targets = [teacher(images, grid, zoom) for teacher in self.teachers]
        cls, patches = (torch.cat(features, dim=-1) for features in zip(*targets, strict=True))
        return Targets(cls, patches)


AnyTeacher: TypeAlias = Teacher | Standardized | TeacherGroup


def members(teacher: AnyTeacher) -> list[Teacher | Standardized]:
    """The teachers of a group, or the teacher itself."""
    own: Any = list(teacher.teachers) if isinstance(teacher, TeacherGroup) else [teacher]
    return cast(list[Teacher | Standardized], own)
