"""Teachers: frozen backbones behind one small protocol, whatever their family, patch size, width or normalisation.

Pictures come as the student sees them; what comes back lies on the student's grid.

Shapes: B images, rows × columns = N cells of the student's grid, D the teacher's width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veca.config import did_you_mean
from veca.images import MEAN, STD

Meet: TypeAlias = Literal["input", "map"]
"""How the teacher's grid comes to be the student's: its input is resized, or its map."""


class TeacherError(ValueError):
    """A teacher that cannot be had, or cannot teach: the message says what to do."""


class Targets(NamedTuple):
    cls: Tensor
    """The global feature (B, D)."""
    patches: Tensor
    """The dense map on the student's grid (B, N, D)."""


class Teacher(nn.Module, ABC):
    """A backbone that is looked up to, never trained.

    `width` is that of its features, `stride` the pixels per cell of its map, `mean` and `std` what it expects pictures
    to be normalised with. `raw`: its features are of no particular size, and want standardising.
    """

    def __init__(
        self, width: int, stride: int, mean: Sequence[float], std: Sequence[float], raw: bool, meet: Meet = "input"
    ) -> None:
        super().__init__()
        self.width, self.stride, self.raw, self.meet = width, stride, raw, meet
        own, theirs = torch.tensor([MEAN, STD]), torch.tensor([list(mean), list(std)])
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", (own[1] / theirs[1]).view(3, 1, 1), persistent=False)
        self.register_buffer("shift", ((own[0] - theirs[0]) / theirs[1]).view(3, 1, 1), persistent=False)

    @abstractmethod
    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Of images normalised its own way: the global feature (B, D) and the dense map (B, D, rows, columns)."""

    @torch.no_grad()
    def forward(self, images: Tensor, grid: tuple[int, int]) -> Targets:
        """Targets for a student that sees `images`, normalised for the student, on `grid` = (rows, columns)."""
        images = images * self.scale + self.shift
        if self.meet == "input":
            size = grid[0] * self.stride, grid[1] * self.stride
        else:
            size = cast(tuple[int, int], tuple(max(1, round(s / self.stride)) * self.stride for s in images.shape[-2:]))
        if size != tuple(images.shape[-2:]):
            images = F.interpolate(images, size, mode="bicubic", antialias=True)
        cls, dense = self.features(images)
        if tuple(dense.shape[-2:]) != tuple(grid):
            dense = F.interpolate(dense, grid, mode="bilinear", antialias=True)
        return Targets(cls, dense.flatten(2).mT)


class TimmTeacher(Teacher):
    """Any model of timm that has a map: ViTs by their patch tokens, convolutional ones by their last stage."""

    def __init__(self, model: nn.Module, meet: Meet = "input") -> None:
        from timm.data.config import resolve_data_config

        about = resolve_data_config({}, model=model)
        prefix = getattr(model, "num_prefix_tokens", None)  # class token and registers; None: no tokens at all
        if prefix is not None and hasattr(model, "patch_embed"):
            stride = cast(Any, model).patch_embed.patch_size[0]
        elif getattr(model, "feature_info", None):
            stride = cast(Any, model).feature_info[-1]["reduction"]
        else:
            raise TeacherError(f"{type(model).__name__}: timm does not say how many pixels a cell of its map has")
        width = cast(int, model.num_features)
        super().__init__(width, stride, about["mean"], about["std"], raw=prefix is None, meet=meet)
        self.prefix = prefix
        self.model = model.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> TimmTeacher:
        return super().train(False)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        model = cast(Any, self.model)
        found: Tensor = model.forward_features(images)
        if self.prefix is None:
            dense = found if getattr(model, "output_fmt", "NCHW") == "NCHW" else found.permute(0, 3, 1, 2)
            return dense.mean((2, 3)), dense
        grid = tuple(side // self.stride for side in images.shape[-2:])
        dense = found[:, self.prefix :].mT.unflatten(2, grid)
        cls = found[:, 0] if self.prefix else model.forward_head(found, pre_logits=True)
        return cls, dense


class Standardized(nn.Module):
    """Targets with each channel at mean 0 and deviation 1, by statistics taken once, over pictures.

    The global feature and the dense map have statistics of their own.
    """

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        self.teacher, self.width, self.stride = teacher, teacher.width, teacher.stride
        self.means: Tensor
        self.deviations: Tensor
        self.register_buffer("means", torch.zeros(2, teacher.width))
        self.register_buffer("deviations", torch.ones(2, teacher.width))

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

    def forward(self, images: Tensor, grid: tuple[int, int]) -> Targets:
        cls, patches = self.teacher(images, grid)
        return Targets((cls - self.means[0]) / self.deviations[0], (patches - self.means[1]) / self.deviations[1])


def timm_teacher(name: str, meet: Meet = "input", pretrained: bool = True, **options: Any) -> TimmTeacher:
    """A teacher from timm by name, with the weights timm has for it, or from a local file (`checkpoint_path=`)."""
    import timm

    if not timm.is_model(name.split(".")[0]):
        known = timm.list_models()
        raise TeacherError(f"timm has no model {name!r}{did_you_mean(name, known)}; timm.list_models() has them all")
    try:
        model = timm.create_model(name, pretrained=pretrained, num_classes=0, dynamic_img_size=True, **options)
    except TypeError:  # only those with positions to interpolate have that option
        model = timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
    return TimmTeacher(model, meet)
