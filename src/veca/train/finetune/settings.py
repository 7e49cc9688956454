"""What a fine-tune is asked, checked before anything starts and kept beside what it made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from veca.config import VecaConfig, is_budget
from veca.errors import ArgumentError
from veca.images import MAX_PIXELS, nearest_sizes
from veca.utils.text import quoted

Task: TypeAlias = Literal["classify", "segment"]
Augment: TypeAlias = Literal["flip", "colour", "trivial"]
Head: TypeAlias = Literal["probe", "new"]
Precision: TypeAlias = Literal["float32", "bfloat16"]
FREE = ("model", "workers", "skip_bad", "progress")
"""What may change when a run goes on: it decides no number, and of the model the weights are what counts."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of both tasks. Defaults are for some thousand pictures and a few epochs."""

    task: ClassVar[Task]
    size: int
    """Side in pixels of the squares to learn from."""
    cores: tuple[int, ...] = ()
    """Budgets, of which each step draws one; none given: all the model was trained at."""
    epochs: float = 10
    batch: int = 32
    rate: float = 5e-4
    """The highest. The last block has `layer_decay` of it, each layer below `layer_decay` times that of the one above;
    a new head has all of it, one from a probe a tenth."""
    layer_decay: float = 0.75
    decay: float = 0.05
    """Of weights; biases, norms, cores and coordinates have none."""
    head: Head = "probe"
    """Start from a linear probe of the frozen features, or from new weights."""
    head_epochs: int
    """Passes over train for that probe."""
    augment: Augment = "flip"
    """Crops and flips alone; with TrivialAugmentWide; or with those of its operations that move no pixel."""
    ema: float | None = None
    """Decay of a running mean of the weights, which is then what is scored and kept."""
    every: int | None = None
    """Score on val after so many steps; None: every epoch, and at least four times."""
    seed: int = 0
    precision: Precision | None = None
    """Of the products; None: bfloat16 on a GPU, float32 elsewhere."""
    workers: int = 0
    skip_bad: bool = False
    """Leave out pictures that cannot be read, and say so, instead of stopping."""
    progress: bool = True

    def __post_init__(self) -> None:
        self.require("size", self.size >= 1, "at least 1")
        self.require("epochs", 0 < self.epochs < math.inf, "above 0")
        self.require("size", self.size <= (most := math.isqrt(MAX_PIXELS)), f"at most {most:,}")
        self.require("batch", 1 <= self.batch <= 1_000_000, "from 1 to 1,000,000")
        self.require("workers", 0 <= self.workers <= 1024, "from 0 to 1024")
        self.require("seed", 0 <= self.seed < 2**63, "from 0 to 2^63 - 1")
        self.require("rate", 0 < self.rate <= 1, "above 0, at most 1")
        self.require("layer_decay", 0 < self.layer_decay <= 1, "above 0, at most 1; 1 is one rate for all layers")
        self.require("decay", 0 <= self.decay < 1, "from 0 to under 1")
        self.require("head_epochs", self.head_epochs >= 1, "at least 1")
        self.require("ema", self.ema is None or 0 < self.ema < 1, "None, or between 0 and 1")
        self.require("every", self.every is None or self.every >= 1, "None, or at least 1")

    def require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ArgumentError(f"{name}={quoted(getattr(self, name))}: must be {rule}")

    def budgets(self, config: VecaConfig) -> dict[int, float]:
        """Budgets and their odds, which are the paper's: large ones come more often. Size and budgets are checked."""
        patch, most = config.patch_size, config.num_cores
        near = nearest_sizes(self.size, self.size, patch)[0]
        self.require("size", self.size % patch == 0, f"a multiple of {patch}. Nearest: {near}")
        asked = tuple(dict.fromkeys(self.cores or config.budgets))
        self.require("cores", all(is_budget(budget, most) for budget in asked), f"from 1 to {most}, the core bank")
        return {budget: math.ceil(4 * budget / most) for budget in sorted(asked)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON gives it back."""
        return {
            "task": self.task,
            **{key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()},
        }


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: object) -> None:
    """A run goes on with what it began with, but for what decides no number."""
    keys = [key for key in dict.fromkeys([*before, *now]) if key not in FREE]
    if different := [f"{k}: {before.get(k)!r}, now {now.get(k)!r}" for k in keys if before.get(k) != now.get(k)]:
        raise ArgumentError(
            f"{folder} holds a run with other settings ({'; '.join(different)}). Take another --out, or --overwrite "
            "to begin anew in it"
        )


@dataclass(frozen=True, kw_only=True)
class ClassifySettings(Settings):
    task: ClassVar[Task] = "classify"
    size: int = 256
    head_epochs: int = 100
    """Over features that are extracted once, so that many are cheap."""
    least_area: float = 0.35
    """A crop has at least this share of its picture."""
    smoothing: float = 0.1
    """Of labels."""
    mixup: float = 0.0
    """Both parameters of the Beta distribution of the shares in which two pictures are mixed; 0: they are not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("least_area", 0 < self.least_area <= 1, "above 0, at most 1")
        self.require("smoothing", 0 <= self.smoothing < 1, "from 0 to under 1")
        self.require("mixup", self.mixup >= 0, "0 or more")


@dataclass(frozen=True, kw_only=True)
class SegmentSettings(Settings):
    task: ClassVar[Task] = "segment"
    size: int = 512
    batch: int = 8
    head_epochs: int = 1
    scales: tuple[float, float] = (0.5, 2.0)
    """The short side of a picture becomes the size times a number between these, before a square is taken of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("augment", self.augment != "trivial", "flip or colour: trivial moves pixels off their labels")
        two = len(self.scales) == 2 and 0 < self.scales[0] <= self.scales[1] <= 8
        self.require("scales", two, "two numbers above 0, at most 8, the lower first")
