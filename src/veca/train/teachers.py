"""Teachers: frozen backbones behind one small protocol, whatever their family, patch size, width or normalisation.

Pictures come as the student sees them; what comes back lies on the student's grid.

Shapes: B images, rows × columns = N cells of the student's grid, D the teacher's width.
"""

from __future__ import annotations

import inspect
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


class HfTeacher(Teacher):
    """A vision transformer of transformers: DINOv3, DINOv2 with or without registers, CLIP, SigLIP (and 2)."""

    def __init__(self, model: nn.Module, mean: Sequence[float], std: Sequence[float], meet: Meet = "input") -> None:
        config = cast(Any, model).config
        super().__init__(config.hidden_size, config.patch_size, mean, std, raw=False, meet=meet)
        family = _family(config)
        # SigLIP has no class token: a head of its own makes its global feature.
        self.prefix = 0 if family == "siglip" else 1 + getattr(config, "num_register_tokens", 0)
        self.normed = family != "clip"
        self.model = model.eval().requires_grad_(False)
        # DINO's interpolate their positions by themselves.
        takes = inspect.signature(model.forward).parameters
        self.options = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in takes else {}

    def train(self, mode: bool = True) -> HfTeacher:
        return super().train(False)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(pixel_values=images, **self.options)
        tokens: Tensor = out.last_hidden_state
        if not self.normed:  # CLIP applies its last norm to the class token alone
            tokens = cast(Any, getattr(self.model, "vision_model", self.model)).post_layernorm(tokens)
        grid = tuple(side // self.stride for side in images.shape[-2:])
        dense = tokens[:, self.prefix :].mT.unflatten(2, grid)
        return tokens[:, 0] if self.prefix else out.pooler_output, dense


_FAMILIES = {
    "dinov3_vit": ("dino", "AutoModel"),
    "dinov2": ("dino", "AutoModel"),
    "dinov2_with_registers": ("dino", "AutoModel"),
    "clip": ("clip", "CLIPVisionModel"),
    "clip_vision_model": ("clip", "CLIPVisionModel"),
    "siglip": ("siglip", "SiglipVisionModel"),
    "siglip_vision_model": ("siglip", "SiglipVisionModel"),
}
"""By transformers' `model_type`: how its tokens are read, and the class that loads its vision part."""


def _family(config: Any) -> str:
    if config.model_type not in _FAMILIES:
        raise TeacherError(
            f"transformers model of type {config.model_type!r}: teachers are {', '.join(_FAMILIES)}. "
            "Others may be in timm: timm:NAME"
        )
    return _FAMILIES[config.model_type][0]


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


def hf_teacher(name: str, meet: Meet = "input") -> HfTeacher:
    """A teacher from transformers, by its name on the hub or from a local folder."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise TeacherError(f"{name}: {str(error).splitlines()[0]} Name a model of the hub or a local folder") from error
    _family(config)
    try:
        model = getattr(transformers, _FAMILIES[config.model_type][1]).from_pretrained(name)
        about, _ = transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict(name)
    except OSError as error:
        raise TeacherError(f"{name}: {str(error).splitlines()[0]}") from error
    if "image_mean" not in about or "image_std" not in about:
        raise TeacherError(f"{name}: its preprocessor_config.json has no image_mean and image_std")
    return HfTeacher(model, about["image_mean"], about["image_std"], meet)


def load_teacher(name: str, meet: Meet = "input") -> Teacher:
    """A teacher by name: `timm:NAME`, or what transformers loads, a name on the hub or a local folder."""
    library, colon, rest = name.partition(":")
    if colon and library == "timm":
        return timm_teacher(rest, meet)
    return hf_teacher(name, meet)
