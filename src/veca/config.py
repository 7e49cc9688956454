"""Model configuration: a strict, frozen dataclass, and the named sizes."""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

from veca.errors import VecaError
from veca.utils.text import did_you_mean, quoted


class ConfigError(VecaError, ValueError):
    """An invalid configuration: the message names the field, the value and the rule."""


def is_budget(cores: object, limit: int) -> bool:
    """Whether `cores` is an integer from 1 to `limit`; booleans are not."""
    return not isinstance(cores, bool) and isinstance(cores, SupportsIndex) and 1 <= operator.index(cores) <= limit


@dataclass(frozen=True, kw_only=True)
class VecaConfig:
    """The architecture of a model. Defaults are the paper's base model.

    >>> VecaConfig(embed_dim=384, num_heads=6).head_dim
    64
    """

    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 2.66667
    patch_size: int = 16
    in_chans: int = 3
    num_cores: int = 64
    """Capacity of the core bank: the largest budget."""
    core_chunk: int = 8
    """The bank is stored in parameters of this many cores, so that inactive ones get no gradient at all."""
    budgets: tuple[int, ...] = (8, 16, 24, 32, 40, 48, 56, 64)
    """Budgets the weights are trained at; any other from 1 to `num_cores` works, with a warning."""
    output_dim: int | None = None
    """Width of a final linear projection, for students of a teacher with another width; None: none."""
    num_classes: int = 0
    """Classes of a linear classifier on the global feature; 0: no classifier."""
    rope_zero_fraction: float = 0.125
    """Fraction of the rotary frequencies, the slowest, that are set to zero."""
    coordinate_shift: float = 0.08
    """Training only: patch coordinates are shifted by U(-shift, shift) on each axis; 0: off."""
    coordinate_rescale: float = 2.0
    """Training only: patch coordinates are scaled by exp(U(-ln r, ln r)); 1: off."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name))

        def require(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ConfigError(f"{name}={quoted(getattr(self, name))}: must be {rule}")

        # The upper bounds keep a hostile file from describing a model that no machine can hold.
        require("depth", 1 <= self.depth <= 1024, "from 1 to 1024")
        require("num_heads", 1 <= self.num_heads <= 1024, "from 1 to 1024")
        multiple = 4 * self.num_heads
        require("embed_dim", 1 <= self.embed_dim <= 65536, "from 1 to 65536")
        require("embed_dim", self.embed_dim % multiple == 0, f"a multiple of 4 × num_heads = {multiple}")
        require("mlp_ratio", 0 < self.mlp_ratio <= 64 and self.mlp_dim >= 1, "positive, at most 64")
        require("patch_size", 1 <= self.patch_size <= 1024, "from 1 to 1024")
        require("in_chans", 1 <= self.in_chans <= 1024, "from 1 to 1024")
        require("num_cores", 1 <= self.num_cores <= 256, "from 1 to 256")
        require("core_chunk", self.core_chunk >= 1, "at least 1")
        require("core_chunk", self.num_cores % self.core_chunk == 0, f"a divisor of num_cores = {self.num_cores}")
        budgets = f"one or more integers from 1 to num_cores = {self.num_cores}"
        require("budgets", len(self.budgets) > 0 and all(1 <= c <= self.num_cores for c in self.budgets), budgets)
        require("output_dim", self.output_dim is None or 1 <= self.output_dim <= 65536, "None or from 1 to 65536")
        require("num_classes", 0 <= self.num_classes <= 10_000_000, "from 0 to 10,000,000")
        require("rope_zero_fraction", 0 <= self.rope_zero_fraction <= 1, "in [0, 1]")
        require("coordinate_shift", 0 <= self.coordinate_shift <= 1, "in [0, 1]")
        require("coordinate_rescale", 1 <= self.coordinate_rescale <= 16, "in [1, 16]")

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def mlp_dim(self) -> int:
        return int(self.embed_dim * self.mlp_ratio)

    @property
    def num_features(self) -> int:
        """Width of the output features."""
        return self.output_dim or self.embed_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `from_dict`, also by way of JSON."""
        return {**dataclasses.asdict(self), "budgets": list(self.budgets)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VecaConfig:
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown field {quoted(key)}{did_you_mean(key, known)}. Known: {', '.join(known)}")
        values = dict(values)
        if isinstance(values.get("budgets"), list):
            values["budgets"] = tuple(values["budgets"])
        return cls(**values)


_NUMBERS = ("mlp_ratio", "rope_zero_fraction", "coordinate_shift", "coordinate_rescale")


def _check_type(name: str, value: object) -> None:
    if name in _NUMBERS:
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        fits, kind = abs(number) <= sys.float_info.max, "a finite number"
    elif name == "budgets":
        fits, kind = isinstance(value, tuple) and all(type(c) is int for c in value), "a tuple of integers"
    else:
        fits, kind = type(value) is int or (name == "output_dim" and value is None), "an integer"
    if not fits:
        raise ConfigError(f"{name}={quoted(value)}: must be {kind}")


SIZES: dict[str, VecaConfig] = {
    "veca_tiny": VecaConfig(embed_dim=192, num_heads=3),
    "veca_small": VecaConfig(embed_dim=384, num_heads=6),
    "veca_small_plus": VecaConfig(embed_dim=384, num_heads=6, mlp_ratio=4.0),
    "veca_base": VecaConfig(embed_dim=768, num_heads=12),
    "veca_large": VecaConfig(embed_dim=1024, num_heads=16, depth=24),
}
"""`veca_tiny` is our own size; the other four are the paper's."""


def get_config(name: str, **overrides: Any) -> VecaConfig:
    """The configuration of a named size, with fields replaced."""
    if name not in SIZES:
        raise ConfigError(f"unknown model {name!r}{did_you_mean(name, SIZES)}. Known: {', '.join(SIZES)}")
    return VecaConfig.from_dict({**SIZES[name].to_dict(), **overrides})


def size_name(config: VecaConfig) -> str | None:
    """The named size that has this backbone, if any; heads and training options may differ.

    >>> size_name(VecaConfig(num_classes=10))
    'veca_base'
    """
    backbone = ("embed_dim", "depth", "num_heads", "mlp_dim", "patch_size", "in_chans", "num_cores")
    for name, size in SIZES.items():
        if all(getattr(size, field) == getattr(config, field) for field in backbone):
            return name
    return None
