"""Settings of fine-tuning: typed, strict, and saved beside the results."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from veca.config import MlpWidth, VecaConfig, is_budget
from veca.data.records import DecodeChoice
from veca.errors import ArgumentError
from veca.heads.dense import DepthLoss
from veca.images import MAX_PIXELS, nearest_sizes
from veca.utils.settings import Bounds, Positive, Settings

HeadStart: TypeAlias = Literal["probe", "new"]
FinetuneFit: TypeAlias = Literal["crop", "native"]
FinetuneTaskName: TypeAlias = Literal["classify", "segment", "depth"]
TASK_METRICS = {"classify": ("top1", "%"), "segment": ("mIoU", "%"), "depth": ("rmse", "m")}
"""Of each task the score by which weights are selected, and its unit."""
_CHANGEABLE_SETTINGS = ("model", "workers", "skip_bad", "progress")
"""Settings that may change when a run is resumed: they change no result. Of the model, the weights are compared."""


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings(Settings):
    """Settings of all tasks. Defaults are for some thousand images and a few epochs."""

    task: ClassVar[FinetuneTaskName]
    size: Annotated[int, Bounds(ge=1, le=math.isqrt(MAX_PIXELS))]
    """Side in pixels of the training crops."""
    fit: FinetuneFit = "crop"
    """Squares of `size`; or "native": images keep their aspect ratio, and one batch holds any mix of sizes."""
    max_patches: Positive | None = None
    """With "native": images of more patches are shrunk; null: as many as `size` × `size` pixels have."""
    scales: tuple[float, float]
    """Range of a factor, drawn for each training image, of its sides; see the tasks."""
    cores: tuple[int, ...] = ()
    """Budgets, of which each step draws one; empty: all the model was trained with."""
    width: MlpWidth | None = None
    """Share of the MLP's channels that patches use, in training and scoring; null: all."""
    epochs: Annotated[float, Bounds(gt=0, lt=math.inf)] = 10
    batch: Annotated[int, Bounds(ge=1, le=1_000_000)] = 32
    """Images per optimizer step, over all processes."""
    rate: Annotated[float, Bounds(gt=0, le=1)] = 5e-4
    """The highest learning rate. The last block has `layer_decay` of it, each layer below `layer_decay` times that of
    the one above; a new head has all of it, one from a probe a tenth."""
    layer_decay: Annotated[float, Bounds(gt=0, le=1)] = 0.75
    """1 is one rate for all layers."""
    decay: Annotated[float, Bounds(ge=0, lt=1)] = 0.05
    """Weight decay; biases, norms, cores and coordinates have none."""
    head: HeadStart = "probe"
    """Start the head from a linear probe of the frozen features, or from new weights."""
    head_epochs: Annotated[int, Bounds(ge=1)]
    """Passes over train for that probe."""
    augment: Literal["flip", "colour", "trivial"] = "flip"
    """Crops and flips only; with TrivialAugmentWide; or with its operations that move no pixels."""
    ema: Annotated[float, Bounds(gt=0, lt=1)] | None = None
    """Decay of a moving average of the weights, which is then what is scored and saved."""
    every: Annotated[int, Bounds(ge=1)] | None = None
    """Steps between validations; null: every epoch, and at least four times."""
    seed: Annotated[int, Bounds(ge=0, lt=2**63)] = 0
    precision: Literal["float32", "bfloat16"] | None = None
    """Of the matrix products; null: bfloat16 on a GPU, float32 elsewhere."""
    workers: Annotated[int, Bounds(ge=0, le=1024)] = 0
    decode: DecodeChoice = "pillow"
    """Decoder: "pillow" is exact; "gpu" decodes ordinary JPEGs on the GPU and the rest as "cpu" does; "cpu" is fast,
    its pixels differ from Pillow's by a few grey levels; "auto" is "gpu" where there is one, or else "cpu"."""
    skip_bad: bool = False
    """Leave out unreadable images, with a note, instead of stopping."""
    progress: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = len(self.scales) == 2 and 0 < self.scales[0] <= self.scales[1] <= 8
        self.require("scales", valid, "two numbers above 0, at most 8, the lower first")
        self.require("max_patches", self.fit == "native" or self.max_patches is None, "null unless fit is native")

    def patch_limit(self, patch: int) -> int | None:
        """Most patches of an image that keeps its aspect ratio; None: images are squares."""
        return None if self.fit == "crop" else self.max_patches or (self.size // patch) ** 2

    def budgets(self, config: VecaConfig) -> dict[int, float]:
        """Check size and budgets against the model; the budgets with the paper's odds, which favour large ones."""
        patch, bank = config.patch_size, config.num_cores
        most = MAX_PIXELS // patch**2
        self.require("max_patches", (self.max_patches or 1) <= most, f"at most {most:,}, {MAX_PIXELS:,} pixels")
        nearest = nearest_sizes(self.size, self.size, patch)[0]
        self.require("size", self.size % patch == 0, f"a multiple of {patch}. Nearest: {nearest}")
        budgets = tuple(dict.fromkeys(self.cores or config.budgets))
        self.require("cores", all(is_budget(budget, bank) for budget in budgets), f"from 1 to {bank}, the core bank")
        return {budget: math.ceil(4 * budget / bank) for budget in sorted(budgets)}

    def to_dict(self) -> dict[str, Any]:
        return {"task": self.task, **super().to_dict()}


@dataclass(frozen=True, kw_only=True)
class FinetuneClassifySettings(FinetuneSettings):
    """Settings of `veca finetune classify`."""

    task: ClassVar[FinetuneTaskName] = "classify"
    size: Annotated[int, Bounds(ge=1, le=math.isqrt(MAX_PIXELS))] = 256
    head_epochs: Annotated[int, Bounds(ge=1)] = 100
    """Cheap: over features that are extracted once."""
    scales: tuple[float, float] = (0.5, 1.0)
    """With "native": a crop has as many patches as its whole image, its sides then times a number between these."""
    least_area: Annotated[float, Bounds(gt=0, le=1)] = 0.35
    """The smallest share of an image's area that a crop has."""
    smoothing: Annotated[float, Bounds(ge=0, lt=1)] = 0.1
    """Label smoothing."""
    mixup: Annotated[float, Bounds(ge=0)] = 0.0
    """Both parameters of the Beta distribution of mixup's shares; 0: no mixup."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("mixup", self.fit == "crop" or not self.mixup, "0 with fit native: sizes differ")
        with_effect = self.fit == "native" or self.scales == type(self).scales
        self.require("scales", with_effect, f"{list(type(self).scales)} unless fit is native: crops have one size")


@dataclass(frozen=True, kw_only=True)
class FinetuneDenseSettings(FinetuneSettings):
    """Settings of the tasks with a label for each pixel."""

    size: Annotated[int, Bounds(ge=1, le=math.isqrt(MAX_PIXELS))] = 512
    batch: Annotated[int, Bounds(ge=1, le=1_000_000)] = 8
    scales: tuple[float, float]
    """The short side of an image is resized to the size times a number between these, before it is cropped; with
    "native" its sides are those of the whole image, times the number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("augment", self.augment != "trivial", "flip or colour: trivial moves pixels off their labels")


@dataclass(frozen=True, kw_only=True)
class FinetuneSegmentSettings(FinetuneDenseSettings):
    """Settings of `veca finetune segment`."""

    task: ClassVar[FinetuneTaskName] = "segment"
    head_epochs: Annotated[int, Bounds(ge=1)] = 1
    scales: tuple[float, float] = (0.5, 2.0)


@dataclass(frozen=True, kw_only=True)
class FinetuneDepthSettings(FinetuneDenseSettings):
    """Settings of `veca finetune depth`; those of the head are explained in `veca.heads.dense.DepthHead`."""

    task: ClassVar[FinetuneTaskName] = "depth"
    head_epochs: Annotated[int, Bounds(ge=1)] = 10
    scales: tuple[float, float] = (1.0, 1.0)
    """What is enlarged looks nearer, but its label stays: other numbers than 1 teach wrong depths."""
    bins: Annotated[int, Bounds(ge=0, le=65_536)] = 256
    """Depths that the head weighs; 0: it gives the depth itself."""
    loss: DepthLoss = "sig"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("bins", self.bins != 1, "0, or at least 2")


def check_same_settings(before: Mapping[str, Any], now: Mapping[str, Any], folder: object) -> None:
    """Refuse to resume with other settings, except those that change no result."""
    # Of runs before there was a choice; without "native", `scales` of classification has no effect.
    before = {"decode": "pillow", "fit": "crop", "scales": now.get("scales"), **before}
    keys = [key for key in dict.fromkeys([*before, *now]) if key not in _CHANGEABLE_SETTINGS]
    if different := [f"{k}: {before.get(k)!r}, now {now.get(k)!r}" for k in keys if before.get(k) != now.get(k)]:
        way_out = "Take another --out, or --overwrite to begin anew in it"
        raise ArgumentError(f"{folder} holds a run with other settings ({'; '.join(different)}). {way_out}")
