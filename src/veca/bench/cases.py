"""Benchmark cases: model size, image size, batch size and budget; the default cases and target times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from veca.config import SIZES, VecaConfig
from veca.errors import ArgumentError
from veca.utils.settings import Positive, Settings
from veca.utils.text import did_you_mean

Bench: TypeAlias = Literal["attention", "model", "train"]


@dataclass(frozen=True)
class Case(Settings):
    """One point of a sweep.

    >>> Case.parse("base:1024:16")
    Case(model='veca_base', size=1024, batch=16, cores=64)
    >>> str(Case.parse("veca_small:512:96:8"))
    'small:512:96:8'
    """

    model: str
    size: int
    """Side of the square images in pixels."""
    batch: Positive
    cores: int

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [name.removeprefix("veca_") for name in SIZES]
        hint = did_you_mean(self.model.removeprefix("veca_"), known)
        self.require("model", self.model in SIZES, f"one of {', '.join(known)}{hint}")
        patch, bank = self.config.patch_size, self.config.num_cores
        nearest = max(patch, round(self.size / patch) * patch)
        valid = self.size >= patch and self.size % patch == 0
        self.require("size", valid, f"a positive multiple of {patch}, such as {nearest}")
        self.require("cores", 1 <= self.cores <= bank, f"from 1 to {bank}, the core bank")

    @classmethod
    def parse(cls, text: str) -> Case:
        """A case from MODEL:PIXELS:BATCH or MODEL:PIXELS:BATCH:CORES."""
        model, *numbers = text.split(":")
        if len(numbers) not in (2, 3) or not all(number.isdecimal() for number in numbers):
            raise ArgumentError(f"case {text!r}: must be MODEL:PIXELS:BATCH[:CORES], as base:1024:16")
        size, batch, *cores = map(int, numbers)
        return cls(full_model_name(model), size, batch, *(cores or [64]))  # 64: all cores of the named sizes

    def __str__(self) -> str:
        return f"{self.model.removeprefix('veca_')}:{self.size}:{self.batch}:{self.cores}"

    @property
    def config(self) -> VecaConfig:
        return SIZES[self.model]

    @property
    def patches(self) -> int:
        return (self.size // self.config.patch_size) ** 2

    @property
    def tokens(self) -> int:
        """Cores and patches of one image."""
        return self.cores + self.patches


def full_model_name(model: str) -> str:
    """`base` and `veca_base` are the same model."""
    return f"veca_{model}" if f"veca_{model}" in SIZES else model


def choose_cases(bench: Bench, on_cuda: bool, exact: Sequence[str] = (), *sweep: Sequence[Any]) -> list[Case]:
    """The `exact` cases, or every combination of a `sweep`, or the default cases when all are empty.

    A sweep is models, sizes, batch sizes and budgets; for each of these that is empty there is a default.
    """
    if exact and any(sweep):
        raise ArgumentError("--case says it all: leave out --model, --size, --batch-size and --cores, or --case")
    if any(sweep):
        defaults: list[list[Any]] = [["base"], [1024], [16 if on_cuda else 1], [64]]
        product = itertools.product(*(values or default for values, default in zip(sweep, defaults, strict=True)))
        return [Case(full_model_name(model), *numbers) for model, *numbers in product]
    return [Case.parse(text) for text in exact or (TARGETS[bench] if on_cuda else CPU_CASES[bench].split())]


# Milliseconds on one H200 in bfloat16 with 64 cores: the default cases on CUDA. For attention it is the forward pass.
TARGETS: dict[Bench, dict[str, float | None]] = {
    "model": {
        "base:256:64": 8,
        "base:512:32": 13,
        "base:1024:16": 24,
        "base:2048:4": 24,
        "small:1024:16": 9,
        "large:1024:8": 45,
        "base:1024:1": 2,
    },
    "train": {"small:256:384": 48, "small:512:96": 42, "base:256:128": 48, "base:512:32": 42},
    "attention": {"base:1024:16": 0.18, "base:256:64": None},
}
CPU_CASES: dict[Bench, str] = {"model": "small:512:1 base:512:1", "train": "small:256:1", "attention": "base:512:1"}


def target_ms(what: str, case: Case) -> float | None:
    """The target of a measurement, such as `model forward`, if it has one in this case."""
    targets = {} if what == "attention backward" else TARGETS[cast(Bench, what.split()[0])]
    return {Case.parse(text): ms for text, ms in targets.items()}.get(case)
