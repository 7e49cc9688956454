"""Recipes: everything that decides a distillation run, typed, strict and saved beside its results.

A recipe is a YAML file. Keys it leaves out have the defaults given here, which are those of the paper's first stage;
an unknown key or an impossible value is an error before anything starts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from veca.config import MlpWidth, VecaConfig, get_config
from veca.errors import VecaError
from veca.images import MAX_PIXELS
from veca.utils.settings import Bounds, Positive, Settings, parse_yaml
from veca.utils.text import did_you_mean

_Share = Annotated[float, Bounds(ge=0, le=1)]
Setting = tuple[int, float]
"""What a step runs at: a budget and a width."""
Pixels = Annotated[int, Bounds(ge=16, le=8192, unit="pixels")]
_Weight = Annotated[float, Bounds(ge=0)]
_NO_CACHE = "targets are no longer cached on disk. Remove the key; teacher.resident keeps them on the GPU"


class RecipeError(VecaError, ValueError):
    """A recipe that cannot be followed: the message names the key, the value and the rule."""


@dataclass(frozen=True, kw_only=True)
class RecipeSection(Settings):
    """Base of the recipe and its sections."""

    error: ClassVar[type[VecaError]] = RecipeError

    def __init_subclass__(cls, section: str = "") -> None:
        cls.section = section

    def require_odds(self, name: str) -> None:
        odds: Mapping[int, float] = getattr(self, name)
        valid = bool(odds) and all(odd >= 0 for odd in odds.values()) and 0 < sum(odds.values()) < math.inf
        self.require(name, valid, "choices with odds that are not negative, not all zero and not too large")


@dataclass(frozen=True, kw_only=True)
class ModelRecipe(RecipeSection, section="model"):
    """The student."""

    size: str = "veca_small"
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of `VecaConfig`. `output_dim` is set automatically when the teacher's width differs."""
    start: str | None = None
    """Weights to start from, as `veca.load` takes them: those of the first stage, for a second. "teacher": those of the
    first teacher, a ViT of the student's width (`veca.teachers.inherit_weights`)."""
    elastic: tuple[float, ...] | None = None
    """Make the weights of `start` elastic (`veca.make_elastic`) at these widths, calibrated on the first training
    images. Weights that are elastic already have their widths in `overrides` instead."""
    patch_embed_from_teacher: bool = False

    def config(self) -> VecaConfig:
        widths = {} if self.elastic is None else {"widths": self.elastic}
        valid = not widths or (self.start is not None and "widths" not in self.overrides)
        self.require("elastic", valid, "null unless there is model.start, and no model.overrides.widths")
        try:
            return get_config(self.size, **self.overrides, **widths)
        except ValueError as error:
            raise RecipeError(f"model: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ObjectiveRecipe(RecipeSection, section="objective"):
    """Weights of the losses."""

    cls_weight: _Weight = 1.0
    dense_weight: _Weight = 1.0
    mse_weight: _Weight = 1.0
    logits_weight: _Weight = 0.0
    """Of the KL divergence between the logits that the teacher's classifier gives from its and the student's global
    feature; 0: none. Only for a teacher that has such a classifier."""
    temperature: Annotated[float, Bounds(gt=0)] = 1.0
    """Logits are divided by it."""


@dataclass(frozen=True, kw_only=True)
class TeacherRecipe(RecipeSection, section="teacher"):
    """The frozen model whose features are the targets."""

    retired: ClassVar[Mapping[str, str]] = {"cache": _NO_CACHE, "cache_gb": _NO_CACHE}

    name: str = "facebook/dinov3-vits16-pretrain-lvd1689m"
    """A name, a local folder or a file; see `veca.teachers`."""
    trust_remote_code: bool = False
    """Run code that comes with the teacher's weights; without it such a teacher is refused."""
    standardize: bool | None = None
    """Scale each channel of the targets to mean 0 and deviation 1. null: where the teacher needs it."""
    meet: Literal["input", "map"] | int = "input"
    """How the teacher's grid is matched to the student's: by resizing its input (exact) or its map (cheap). A number:
    it sees every view at that many pixels a side, whatever the student's resolution, and its map is resized."""
    glance: Pixels | None = None
    """Take the global feature from a second pass at this many pixels a side: a CNN may have a better one at the size it
    was trained for, where its map has few cells. null: from the pass that gives the map."""
    micro_batch: int | dict[int, int] = 128
    """Images per forward pass of the teacher; by resolution, where it is not the same for all."""
    resident: Literal["bfloat16", "float8"] | None = None
    """Run the teacher once on every whole image, keep its maps in GPU memory in this precision, and crop targets from
    them, resized to the student's grid. Crops then align with cells, and no other augmentation may move pixels. Needs
    `data.resident`."""
    objective: ObjectiveRecipe | None = None
    """Weights of this teacher's losses; null: those of the recipe."""

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = isinstance(self.meet, str) or 16 <= self.meet <= 8192
        self.require("meet", valid, "'input', 'map', or from 16 to 8192 pixels")
        sizes = self.micro_batch.values() if isinstance(self.micro_batch, dict) else [self.micro_batch]
        self.require("micro_batch", bool(sizes) and min(sizes) >= 1, "at least 1")


@dataclass(frozen=True, kw_only=True)
class DataRecipe(RecipeSection, section="data"):
    """Images to train and validate on, and how they are augmented."""

    train: tuple[str, ...] = ()
    """Folders, globs, tar shards, local or at any address fsspec reads; or Hugging Face datasets, as
    `hf:NAME_OR_FOLDER[:split[:column]]`."""
    validation: tuple[str, ...] = ()
    short_side: Annotated[float, Bounds(ge=1, le=4)] = 1.125
    """The short side of an image is resized to this many times the resolution before it is cropped."""
    crops: tuple[float, float] | None = None
    """For training, in place of `short_side`: the side of each crop as a share of the image's short side, drawn
    uniformly between these two. null: all crops have one size, as in the paper."""
    aspect: tuple[float, float] | None = None
    """For training: range of width over height. A crop has the one of seven aspect ratios in it that is nearest to its
    image's, and each image draws its own resolution, so that a batch has mixed shapes. null: squares."""
    augment: Literal["trivial", "colour", "flip", "none"] = "trivial"
    """`trivial`: crop, flip and TrivialAugmentWide, as in the paper. `colour`: the same without operations that move
    pixels. `flip`: crop and flip. `none`: the centre crop."""
    augment_on: Literal["auto", "cpu", "gpu"] = "auto"
    """Where TrivialAugmentWide runs; the pixels are the same. `auto`: on the GPU where there is one."""
    decode: Literal["cpu", "gpu"] = "cpu"
    """Where ordinary JPEGs are decoded. The GPU has a cosine transform of its own, which may round differently, so a
    run keeps what it began with; images are resized on the GPU in any case where `augment_on` allows, with the same
    pixels as on the CPU."""
    mixup: Annotated[float, Bounds(ge=0)] = 0.0
    """Blend the images of a pair, for the teacher too: alpha of the Beta distribution that the share an image keeps is
    drawn from; 0: no mixup."""
    cutmix: Annotated[float, Bounds(ge=0)] = 0.0
    """Exchange a box between the images of a pair: alpha, as for mixup, of the area an image keeps; 0: no CutMix. With
    both, each pair has one of them."""
    mix_prob: _Share = 1.0
    """Share of the pairs that are mixed."""
    views: Positive | None = None
    """Number of random views per image, which epochs take in turn; null: a new one every epoch."""
    resident: Annotated[int, Bounds(ge=16, le=4096)] | None = None
    """Keep all training images decoded in GPU memory, as squares of this side; null: decode them when needed. For
    images that are such squares already the views are the same."""
    workers: Annotated[int, Bounds(ge=0, le=1024)] = 8
    """Decoding processes, per training process."""
    max_pixels: Positive = MAX_PIXELS
    """Images with more are skipped before they are decoded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crops is not None:
            valid = len(self.crops) == 2 and 0.1 <= self.crops[0] <= self.crops[1] <= 1
            self.require("crops", valid, "null, or two shares from 0.1 to 1, the smaller first", list(self.crops))
            self.require("augment", self.augment != "none", "another with data.crops, which draws crops")
        if self.aspect is not None:
            valid = len(self.aspect) == 2 and 0.1 <= self.aspect[0] <= self.aspect[1] <= 10
            self.require("aspect", valid, "null, or two numbers from 0.1 to 10, the smaller first", list(self.aspect))
            for name, default in (("resident", None), ("mixup", 0), ("cutmix", 0), ("decode", "cpu")):
                self.require(
                    name,
                    getattr(self, name) == default,
                    f"{'null' if default is None else default} with data.aspect: shapes differ",
                )
        self.require("decode", self.decode == "cpu" or self.augment_on != "cpu", "cpu with data.augment_on=cpu")


@dataclass(frozen=True, kw_only=True)
class Phase(RecipeSection, section="resolutions"):
    """Odds of the resolutions during one part of the run."""

    odds: dict[int, float]
    until: int | None = None
    """The step before which this phase ends; null: it lasts to the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_odds("odds")


@dataclass(frozen=True, kw_only=True)
class WidthRecipe(RecipeSection, section="widths"):
    """How a step draws its setting, a budget and a width: shares of the steps. In the rest widths are uniform."""

    smallest: _Share = 0.15
    """At the smallest budget and width."""
    largest: _Share = 0.15
    """At the largest budget and width."""
    tied: _Share = 0.5
    """Of steps whose width follows from the budget, as in `tied_width`."""
    match: Annotated[float, Bounds(ge=0)] = 0.0
    """Weight of a loss between the features of a step and those of the largest setting on the same images, detached,
    which costs a forward pass at that setting; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.smallest + self.largest + self.tied
        self.require("tied", total <= 1 + 1e-9, f"such that all shares sum to at most 1, not {total:g}")


def tied_width(budget: int, num_cores: int, widths: Sequence[float]) -> float:
    """The width that belongs to a budget: the largest down to half of all cores, the next down to a quarter, and so on.

    >>> [tied_width(budget, 64, (0.25, 0.5, 0.75, 1)) for budget in (8, 16, 24, 32, 40, 64)]
    [0.25, 0.5, 0.75, 0.75, 1, 1]
    """
    halvings = int(math.log2(num_cores / budget))
    return sorted(widths)[max(0, len(widths) - 1 - halvings)]


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe(RecipeSection, section="schedule"):
    """Length of the run and learning rate."""

    epochs: float | None = 135
    """Passes over the images; or `steps`, one of the two."""
    steps: int | None = None
    warmup: float = 25
    """In the unit of the length: epochs or steps."""
    peak: Annotated[float, Bounds(gt=0, le=10)] = 4e-4
    low: float = 5e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.steps if self.epochs is None else self.epochs
        both = {"epochs": self.epochs, "steps": self.steps}
        if length is None or length <= 0 or None not in both.values():
            raise RecipeError(f"schedule={both}: must be one of the two, the other null, and positive")
        self.require("warmup", 0 <= self.warmup < length, f"from 0 to under {length}")
        self.require("low", 0 <= self.low <= self.peak, f"from 0 to peak = {self.peak}")


@dataclass(frozen=True, kw_only=True)
class ValidationRecipe(RecipeSection, section="validation"):
    """When validation runs, and on which grid of resolutions, budgets and widths."""

    every: Positive = 1000
    """In steps; it also runs after the last step."""
    resolutions: tuple[int, ...] = ()
    """Empty: all resolutions of training."""
    budgets: tuple[int, ...] = ()
    """Empty: all cores."""
    widths: tuple[MlpWidth, ...] = ()
    """Empty: the whole MLP."""
    batch: Positive | None = None
    """Images per forward pass and process; null: as in training."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecipe(RecipeSection, section="checkpoints"):
    """When checkpoints are written, and how many are kept."""

    every: Positive = 1000
    """In steps; the last step always has one."""
    keep: Positive = 2
    """Number of newest checkpoints kept; the best weights by validation are kept as well."""


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeSection):
    """Everything that decides the result of a distillation run.

    >>> Recipe.from_dict({"model": {"size": "veca_base"}, "batch": 64}).model.size
    'veca_base'
    """

    model: ModelRecipe = field(default_factory=ModelRecipe)
    teacher: TeacherRecipe = field(default_factory=TeacherRecipe)
    teachers: tuple[TeacherRecipe, ...] = ()
    """More teachers: the student has an output for each, side by side. `micro_batch` is that of `teacher` for all."""
    data: DataRecipe = field(default_factory=DataRecipe)
    objective: ObjectiveRecipe = field(default_factory=ObjectiveRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    budgets: dict[int, float] = field(default_factory=lambda: {8: 1, 16: 1, 24: 2, 32: 2, 40: 3, 48: 3, 56: 4, 64: 4})
    """Odds of each budget, by default the paper's; one is drawn per step, for all processes."""
    widths: WidthRecipe | None = None
    """For a model of several widths; null: its defaults."""
    resolutions: tuple[Phase, ...] = (Phase(odds={256: 1.0}),)
    batch: Positive = 128
    """Images per optimizer step, over all processes and accumulated passes."""
    accumulate: Positive = 1
    """Forward passes per optimizer step, each with its share of the batch."""
    weight_decay: Annotated[float, Bounds(ge=0, lt=1)] = 0.015
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    compile: bool = True
    grad_checkpointing: bool = False
    """Keep one tensor per block and compute the rest again in the backward pass: less memory, a third more work."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: each holds the whole model (DDP), or a shard of it (FSDP2), for models that need that."""
    ema: Annotated[float, Bounds(gt=0, lt=1)] | None = None
    """Decay of a moving average of the weights, which is then what is validated and saved as the model; null: none."""
    validation: ValidationRecipe = field(default_factory=ValidationRecipe)
    checkpoints: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    log_every: Positive = 20
    """In steps."""
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        bank, patch = self.model.config().num_cores, self.model.config().patch_size
        # Targets cropped from resident maps need crops on whole cells.
        side = self.data.resident
        aligned = side is not None and side % patch == 0 and self.data.augment != "trivial"
        rule = f"null unless data.resident={side} is a multiple of {patch}; augment=trivial moves pixels, use colour"
        self.require("teacher.resident", self.teacher.resident is None or aligned, rule, self.teacher.resident)
        live = self.teacher.resident is None and all(each.resident is None for each in self.teachers)
        self.require(
            "teachers", live or not self.teachers, "empty with teacher.resident", [t.name for t in self.teachers]
        )
        for name, alpha in (("data.mixup", self.data.mixup), ("data.cutmix", self.data.cutmix)):
            self.require(name, live or not alpha, "0 with teacher.resident, whose maps are of whole images", alpha)
        rule = "false with data.aspect: a batch of mixed shapes has a layout of its own"
        self.require("compile", self.data.aspect is None or not self.compile, rule)
        self.require("batch", self.batch % self.accumulate == 0, f"a multiple of accumulate = {self.accumulate}")
        self.require_odds("budgets")
        until = [phase.until for phase in self.resolutions]
        rising = until == [*sorted({step for step in until if step is not None}), None]
        self.require("resolutions.until", rising, "rising, and null in the last phase", until)
        for name, budgets in (("budgets", self.budgets), ("validation.budgets", self.validation.budgets)):
            for budget in budgets:
                self.require(name, 1 <= budget <= bank, f"from 1 to {bank}, the core bank", budget)
        rule = "null for a model of one width; model.elastic or model.overrides.widths gives it several"
        self.require("widths", self.widths is None or len(self.model.config().widths) > 1, rule)
        trained = [size for phase in self.resolutions for size in phase.odds]
        for name, sizes in (("resolutions.odds", trained), ("validation.resolutions", self.validation.resolutions)):
            for size in sizes:
                self.require(name, size in range(patch, 8193, patch), f"multiples of {patch} up to 8192", size)

    def odds_at(self, step: int) -> dict[int, float]:
        """Odds of the resolutions at a step."""
        return next(phase.odds for phase in self.resolutions if phase.until is None or step < phase.until)

    def settings(self) -> dict[Setting, float]:
        """Odds of the settings that steps are drawn from; of a model of one width, those of its budgets."""
        config, draws = self.model.config(), self.widths or WidthRecipe()
        if len(config.widths) == 1:
            return {(budget, 1.0): odd for budget, odd in self.budgets.items()}
        uniform, total = 1 - draws.smallest - draws.largest - draws.tied, sum(self.budgets.values())
        odds = dict.fromkeys(((budget, width) for budget in self.budgets for width in sorted(config.widths)), 0.0)
        for budget, width in odds:
            tied = width == tied_width(budget, config.num_cores, config.widths)
            odds[budget, width] = self.budgets[budget] / total * (draws.tied * tied + uniform / len(config.widths))
        drawn = [budget for budget, odd in self.budgets.items() if odd]
        odds[min(drawn), min(config.widths)] += draws.smallest
        odds[max(drawn), max(config.widths)] += draws.largest
        return odds

    def largest_setting(self) -> Setting:
        return max(setting for setting, odd in self.settings().items() if odd)

    def grid(self) -> tuple[list[int], list[int], list[float]]:
        """Resolutions, budgets and widths to validate on."""
        trained = sorted({size for phase in self.resolutions for size, odd in phase.odds.items() if odd})
        budgets = list(self.validation.budgets) or [self.model.config().num_cores]
        return list(self.validation.resolutions) or trained, budgets, list(self.validation.widths) or [1.0]

    def pass_batch(self, processes: int) -> int:
        """Images per forward pass of one of `processes`."""
        parts = self.accumulate * processes
        rule = f"a multiple of {parts}: accumulate = {self.accumulate} × {processes} processes share it"
        self.require("batch", self.batch % parts == 0, rule)
        pairs = self.batch // parts % 2 == 0 or not (self.data.mixup or self.data.cutmix)
        self.require("batch", pairs, f"a multiple of {2 * parts}: data.mixup and data.cutmix take pairs")
        return self.batch // parts

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def list_recipes(folder: Path) -> list[Path]:
    """Recipes in a folder; those of a source tree, in `recipes/`, where it has none."""
    shipped = Path("recipes"), Path(__file__).parents[3] / "recipes"
    return next((names for each in (folder, *shipped) if (names := sorted(each.glob("*.y*ml")))), [])


def describe_recipes(names: Sequence[Path]) -> str:
    """A sentence that names recipes to choose from."""
    if not names:
        return "veca's own are in the folder recipes/ of its source: clone it, or write one (docs/training.md)"
    return f"In {names[0].parent}: {', '.join(name.name for name in names)}"


def load_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe file; `changes` are `key=value` as in `--set schedule.peak=2e-4`, the value in YAML."""
    path = Path(path)
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        names = list_recipes(path.parent)
        same = [f" (did you mean '{name}'?)" for name in names if name.stem == path.stem]
        close = same[0] if same else did_you_mean(path.name, [name.name for name in names])
        raise RecipeError(f"{path}: no such recipe{close}. {describe_recipes(names)}") from error
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds {type(values).__name__}, not the keys of a recipe")
    return Recipe.from_dict(values, changes)
