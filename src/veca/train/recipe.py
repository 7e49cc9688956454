"""A training run, written down: typed, strict, and saved beside what it made.

A recipe is a YAML file. Whatever it leaves out has the default given here, which is the paper's first stage; a key it
must not have, or a value that cannot be, is an error that says so before anything starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from veca.config import did_you_mean, get_config
from veca.errors import VecaError
from veca.images import MAX_PIXELS
from veca.utils.text import quoted

Kind = TypeVar("Kind")


class RecipeError(VecaError, ValueError):
    """A recipe that cannot be followed: the message names the key, the value and the rule."""


_NO_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What `yaml.safe_load` raises; ValueError: of no UTF-8, a date that is none, a number of thousands of digits."""


def _require(where: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise RecipeError(f"{where}={quoted(value)}: must be {rule}")


def _check_odds(where: str, odds: Mapping[int, float]) -> None:
    fine = bool(odds) and all(odd >= 0 for odd in odds.values()) and 0 < sum(odds.values()) < math.inf
    _require(where, odds, fine, "choices with odds that are not negative, not all zero and not too large")


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """The student."""

    size: str = "veca_small"
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of `VecaConfig`. `output_dim` is set by itself when the teacher is wider or narrower."""
    start: str | None = None
    """Weights to start from, as `veca.load` takes them: the first stage's, for a second."""
    patch_embed_from_teacher: bool = False

    def __post_init__(self) -> None:
        try:
            get_config(self.size, **self.overrides)
        except ValueError as error:
            raise RecipeError(f"model: {error}") from error


@dataclass(frozen=True, kw_only=True)
class TeacherRecipe:
    name: str = "facebook/dinov3-vits16-pretrain-lvd1689m"
    """A name or a local folder or file; see `veca.teachers`."""
    trust_remote_code: bool = False
    """Let code that comes with the teacher's weights run; without it such a teacher is refused."""
    standardize: bool | None = None
    """Bring each channel of the targets to mean 0 and deviation 1. None: as the teacher needs it."""
    meet: Literal["input", "map"] | int = "input"
    """How its grid comes to be the student's: its input is resized, which is exact, or its map, which is cheap. With a
    number it sees every view with so many pixels a side, whatever the student's resolution, and its map is resized."""
    glance: int | None = None
    """Take the global feature from a second look, with so many pixels a side: a CNN may have a better one at the size
    it was trained for, where its map has few cells. null: from the look that gives the map."""
    micro_batch: int | dict[int, int] = 128
    """Pictures the teacher takes at a time; by resolution, if it is not the same for all."""
    resident: Literal["bfloat16", "float8"] | None = None
    """Show it every picture once and whole, keep its maps on the device, in this precision, and take from them the
    cells of each crop, resized to the student's grid: crops then begin and end with cells, and nothing else may move a
    pixel. With `data.resident` only."""
    cache: str | None = None
    """A folder to keep its targets in, in float16, and read them from when a view comes back; runs may share it.
    `data.views` must say how many views there are. With ViT-H's width, a view at 256 pixels takes 0.66 MB."""
    cache_gb: float | None = None
    """At most so many GB (10⁹ bytes) of it; null: as long as the disk has 10 GB left."""

    def __post_init__(self) -> None:
        fits = isinstance(self.meet, str) or 16 <= self.meet <= 8192
        _require("teacher.meet", self.meet, fits, "'input', 'map', or from 16 to 8192 pixels")
        fits = self.glance is None or 16 <= self.glance <= 8192
        _require("teacher.glance", self.glance, fits, "null, or from 16 to 8192 pixels")
        _require("teacher.cache", self.cache, self.cache != "", "a folder, or null")
        fine = self.cache_gb is None or self.cache_gb > 0
        _require("teacher.cache_gb", self.cache_gb, fine, "null, or above 0")
        sizes = self.micro_batch.values() if isinstance(self.micro_batch, dict) else [self.micro_batch]
        _require("teacher.micro_batch", self.micro_batch, bool(sizes) and min(sizes) >= 1, "at least 1")


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    train: tuple[str, ...] = ()
    """Folders, globs, tar shards, local or at any address fsspec reads; or Hugging Face datasets, as
    `hf:NAME_OR_FOLDER[:split[:column]]`."""
    validation: tuple[str, ...] = ()
    short_side: float = 1.125
    """A picture is resized to this many times the resolution before a crop is taken of it."""
    crops: tuple[float, float] | None = None
    """For training, in place of `short_side`: the side of each crop, as a share of the picture's short side, drawn
    evenly between these two. null: all are alike, as in the paper."""
    augment: Literal["trivial", "colour", "flip", "none"] = "trivial"
    """`trivial`: crop, flip and TrivialAugmentWide, as the paper. `colour`: the same without what moves pixels. `flip`:
    crop and flip. `none`: the centre."""
    augment_on: Literal["auto", "cpu", "gpu"] = "auto"
    """Who does TrivialAugmentWide; the pixels are the same. `auto`: the GPU where there is one."""
    views: int | None = None
    """How many random views there are of each picture, which epochs take in turn; null: a new one every epoch."""
    resident: int | None = None
    """Keep all training pictures on the device, decoded, as squares of so many pixels a side; null: decode them when
    they are needed. For pictures that are such squares already the pixels of the views are the same."""
    workers: int = 8
    """Processes that decode, for each process that trains."""
    max_pixels: int = MAX_PIXELS
    """A picture with more is skipped, before it is decoded."""

    def __post_init__(self) -> None:
        _require("data.short_side", self.short_side, 1 <= self.short_side <= 4, "from 1 to 4")
        if self.crops is not None:
            fits = len(self.crops) == 2 and 0.1 <= self.crops[0] <= self.crops[1] <= 1
            _require("data.crops", list(self.crops), fits, "null, or two shares from 0.1 to 1, the smaller first")
            _require("data.augment", self.augment, self.augment != "none", "another with data.crops, which draws crops")
        fits = self.resident is None or 16 <= self.resident <= 4096
        _require("data.resident", self.resident, fits, "from 16 to 4096, or null")
        _require("data.workers", self.workers, 0 <= self.workers <= 1024, "from 0 to 1024")
        _require("data.views", self.views, self.views is None or self.views >= 1, "at least 1, or null")
        _require("data.max_pixels", self.max_pixels, self.max_pixels >= 1, "at least 1")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Odds of the resolutions, for a stretch of the run."""

    odds: dict[int, float]
    until: int | None = None
    """The step before which this phase ends; None: it lasts."""

    def __post_init__(self) -> None:
        _check_odds("resolutions.odds", self.odds)


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    epochs: float | None = 135
    """Passes over the pictures; or `steps`, one of the two."""
    steps: int | None = None
    warmup: float = 25
    """In epochs or steps, as the length."""
    peak: float = 4e-4
    low: float = 5e-5

    def __post_init__(self) -> None:
        one = (self.epochs is None) != (self.steps is None)
        _require("schedule", {"epochs": self.epochs, "steps": self.steps}, one, "one of the two, the other null")
        length = self.epochs if self.steps is None else self.steps
        _require("schedule", length, length is not None and length > 0, "positive")
        _require("schedule.warmup", self.warmup, 0 <= self.warmup < cast(float, length), f"from 0 to under {length}")
        _require("schedule.peak", self.peak, 0 < self.peak <= 10, "above 0, at most 10")
        _require("schedule.low", self.low, 0 <= self.low <= self.peak, f"from 0 to peak = {self.peak}")


@dataclass(frozen=True, kw_only=True)
class ValidationRecipe:
    """The grid of resolutions and budgets on which the validation pictures are tried."""

    every: int = 1000
    """In steps; the last step is always one."""
    resolutions: tuple[int, ...] = ()
    """None given: all that are trained."""
    budgets: tuple[int, ...] = ()
    """None given: the whole bank alone."""
    batch: int | None = None
    """Pictures per forward pass; None: as in training."""

    def __post_init__(self) -> None:
        _require("validation.every", self.every, self.every >= 1, "at least 1")
        _require("validation.batch", self.batch, self.batch is None or self.batch >= 1, "null, or at least 1")


@dataclass(frozen=True, kw_only=True)
class CheckpointRecipe:
    every: int = 1000
    """In steps; the last step is always one."""
    keep: int = 2
    """How many of the newest stay; the best by validation is kept besides."""

    def __post_init__(self) -> None:
        _require("checkpoints.every", self.every, self.every >= 1, "at least 1")
        _require("checkpoints.keep", self.keep, self.keep >= 1, "at least 1")


@dataclass(frozen=True, kw_only=True)
class ObjectiveRecipe:
    dense_weight: float = 1.0
    mse_weight: float = 1.0

    def __post_init__(self) -> None:
        _require("objective.dense_weight", self.dense_weight, self.dense_weight >= 0, "0 or more")
        _require("objective.mse_weight", self.mse_weight, self.mse_weight >= 0, "0 or more")


def _paper_budgets() -> dict[int, float]:
    return {8: 1, 16: 1, 24: 2, 32: 2, 40: 3, 48: 3, 56: 4, 64: 4}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what a run gives.

    >>> Recipe.from_dict({"model": {"size": "veca_base"}, "batch": 64}).model.size
    'veca_base'
    """

    model: ModelRecipe = field(default_factory=ModelRecipe)
    teacher: TeacherRecipe = field(default_factory=TeacherRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    objective: ObjectiveRecipe = field(default_factory=ObjectiveRecipe)
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    budgets: dict[int, float] = field(default_factory=_paper_budgets)
    """How often each budget is drawn: one for all processes in each step."""
    resolutions: tuple[Phase, ...] = (Phase(odds={256: 1.0}),)
    batch: int = 128
    """Pictures per process and forward pass."""
    accumulate: int = 1
    """Forward passes per step."""
    weight_decay: float = 0.015
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    compile: bool = True
    grad_checkpointing: bool = False
    """Keep one tensor per block and compute the rest again in the backward pass: less memory, a third more work."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """With several processes: each holds the whole model, or its share of it (FSDP2), for models that need the room."""
    ema: float | None = None
    """Decay of a running mean of the weights, which is then what is validated and handed out; None: none."""
    validation: ValidationRecipe = field(default_factory=ValidationRecipe)
    checkpoints: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    log_every: int = 20
    """In steps."""
    seed: int = 0

    def __post_init__(self) -> None:
        config = get_config(self.model.size, **self.model.overrides)
        if self.teacher.cache is not None and self.data.views is None:
            raise RecipeError(
                f"teacher.cache={self.teacher.cache!r}: with data.views=null every epoch has new views, and no target "
                "is ever needed again. Set data.views to how many there are to be, or leave teacher.cache out"
            )
        if self.teacher.resident is not None:
            self._check_resident(config.patch_size)
        elif self.data.resident is not None and self.data.crops is not None:
            raise RecipeError(
                f"data.crops={list(self.data.crops)}: with data.resident they need teacher.resident, to lie on "
                "whole cells. Set it, or leave one of the two out"
            )
        _check_odds("budgets", self.budgets)
        for budget in self.budgets:
            _require("budgets", budget, 1 <= budget <= config.num_cores, f"from 1 to {config.num_cores}, the core bank")
        _require("resolutions", self.resolutions, bool(self.resolutions), "one phase or more")
        ends = [math.inf if phase.until is None else phase.until for phase in self.resolutions]
        rising = ends[-1] == math.inf and all(a < b for a, b in itertools.pairwise(ends))
        _require("resolutions.until", [p.until for p in self.resolutions], rising, "rising, and null in the last phase")
        for resolution in (size for phase in self.resolutions for size in phase.odds):
            fits = 0 < resolution <= 8192 and resolution % config.patch_size == 0
            _require("resolutions.odds", resolution, fits, f"multiples of {config.patch_size} up to 8192")
        for budget in self.validation.budgets:
            rule = f"from 1 to {config.num_cores}, the core bank"
            _require("validation.budgets", budget, 1 <= budget <= config.num_cores, rule)
        for resolution in self.validation.resolutions:
            fits = 0 < resolution <= 8192 and resolution % config.patch_size == 0
            _require("validation.resolutions", resolution, fits, f"multiples of {config.patch_size} up to 8192")
        _require("log_every", self.log_every, self.log_every >= 1, "at least 1")
        _require("batch", self.batch, self.batch >= 1, "at least 1")
        _require("accumulate", self.accumulate, self.accumulate >= 1, "at least 1")
        _require("weight_decay", self.weight_decay, 0 <= self.weight_decay < 1, "from 0 to under 1")
        _require("ema", self.ema, self.ema is None or 0 < self.ema < 1, "null, or between 0 and 1")

    def _check_resident(self, patch: int) -> None:
        asked, side = f"teacher.resident={self.teacher.resident!r}", self.data.resident
        if side is None or side % patch:
            raise RecipeError(f"{asked}: data.resident={side}, and must be a multiple of {patch}, the patch")
        if self.data.augment == "trivial":
            raise RecipeError(f"{asked}: data.augment='trivial' moves pixels away from their cells; take 'colour'")
        if self.teacher.cache is not None:
            raise RecipeError(f"{asked}: leave teacher.cache out, nothing is asked twice")

    def odds_at(self, step: int) -> dict[int, float]:
        """Odds of the resolutions at a step."""
        return next(phase.odds for phase in self.resolutions if phase.until is None or step < phase.until)

    def grid(self) -> tuple[list[int], list[int]]:
        """Resolutions and budgets to validate on."""
        trained = sorted({size for phase in self.resolutions for size, odd in phase.odds.items() if odd})
        bank = get_config(self.model.size, **self.model.overrides).num_cores
        return list(self.validation.resolutions) or trained, list(self.validation.budgets) or [bank]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        return cast(Recipe, _build(cls, values, ""))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` takes back, through YAML too."""
        return cast(dict[str, Any], _plain(dataclasses.asdict(self)))

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe file; `changes` are `key=value` as in `--set schedule.peak=2e-4`, the value in YAML."""
    path = Path(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        near = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        hint = f". There: {', '.join(near)}" if near else ""
        raise RecipeError(f"{path}: no such recipe{hint}") from error
    except (OSError, *_NO_YAML) as error:
        raise RecipeError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds {type(values).__name__}, not the keys of a recipe")
    return build(Recipe, values, changes)


def build(kind: type[Kind], values: Mapping[str, Any], changes: Sequence[str] = ()) -> Kind:
    """A dataclass from plain data with `changes` as `load_recipe` takes them; strict, as recipes are."""
    values = dict(values)
    for change in changes:
        _set(values, change)
    return cast(Kind, _build(kind, values, ""))


def _set(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {change}: must be key=value, as schedule.peak=2e-4")
    *above, last = key.split(".")
    for name in above:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise RecipeError(f"--set {change}: {name} has no keys of its own")
    try:
        values[last] = yaml.safe_load(text)
    except _NO_YAML as error:
        raise RecipeError(f"--set {change}: the value is not YAML") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value`, plain data, as a `kind`; `where` is its key, for errors."""
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _build_section(cast(type, kind), value, where)
    if origin in (Union, types.UnionType):
        return _build_either(get_args(kind), value, where)
    if origin is Literal:
        _require(where, value, value in get_args(kind), " or ".join(map(repr, get_args(kind))))
        return value
    if origin is tuple:
        listed = [value] if isinstance(value, str) and get_args(kind)[0] is str else value
        _require(where, value, isinstance(listed, list | tuple), "a list")
        return tuple(_build(get_args(kind)[0], part, f"{where}[{i}]") for i, part in enumerate(listed))
    if origin is dict:
        _require(where, value, isinstance(value, Mapping), "keys with values")
        of_key, of_value = get_args(kind)
        # In `--set budgets.8=2` the key is text.
        keys = {k: int(k) if of_key is int and isinstance(k, str) and k.isdecimal() else k for k in value}
        return {_build(of_key, keys[k], where): _build(of_value, v, f"{where}.{k}") for k, v in value.items()}
    if kind is Any:
        return value
    if kind is float:
        return _number(value, where)
    names = {int: "an integer", bool: "true or false", str: "text", type(None): "null"}
    _require(where, value, type(value) is kind, names[kind])
    if kind is int:
        _require(where, value, -(2**63) <= value < 2**63, "an integer of 64 bits")
    return value


def _build_section(kind: type, value: Any, where: str) -> Any:
    _require(where or "recipe", value, isinstance(value, Mapping), "keys with values")
    names = {field.name for field in dataclasses.fields(kind)}
    known = {name: hint for name, hint in get_type_hints(kind).items() if name in names}
    for key in value:
        if key not in known:
            full = f"{where}.{key}" if where else key
            raise RecipeError(f"unknown key {full!r}{did_you_mean(key, known)}. Known: {', '.join(known)}")
    return kind(**{k: _build(known[k], v, f"{where}.{k}" if where else k) for k, v in value.items()})


def _build_either(kinds: Sequence[Any], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    errors = []
    for kind in kinds:
        if kind is not type(None):
            try:
                return _build(kind, value, where)
            except RecipeError as error:
                errors.append(str(error))
    raise RecipeError("; or ".join(errors) + ("; or null" if type(None) in kinds else ""))


def _number(value: Any, where: str) -> float:
    if isinstance(value, str):  # YAML takes 4e-4 for text: it would have it 4.0e-4
        with contextlib.suppress(ValueError):
            value = float(value)
    fine = type(value) in (int, float) and abs(value) <= sys.float_info.max
    _require(where, value, fine, "a finite number")
    return value
