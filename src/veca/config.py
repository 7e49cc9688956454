"""Model configuration: a strict, frozen dataclass, and the named sizes."""

import itertools
import operator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, SupportsIndex

from veca.errors import VecaError
from veca.utils.settings import Bounds, Positive, Settings
from veca.utils.text import did_you_mean

SWIGLU_GROUP = 64
"""Channels of an MLP that kernels compute together: those that patches use are a multiple of it."""


class ConfigError(VecaError, ValueError):
    """An invalid configuration: the message names the field, the value and the rule."""


def is_budget(cores: object, limit: int) -> bool:
    """Whether `cores` is an integer from 1 to `limit`; booleans are not."""
    return not isinstance(cores, bool) and isinstance(cores, SupportsIndex) and 1 <= operator.index(cores) <= limit


# The upper bounds keep a hostile file from describing a model that no machine can hold.
_Count = Annotated[int, Bounds(ge=1, le=1024)]
_Width = Annotated[int, Bounds(ge=1, le=65536)]
_Share = Annotated[float, Bounds(ge=0, le=1)]
MlpWidth = Annotated[float, Bounds(gt=0, le=1)]
"""A share of the MLP's channels."""


@dataclass(frozen=True, kw_only=True)
class VecaConfig(Settings):
    """The architecture of a model. Defaults are the paper's base model.

    >>> VecaConfig(embed_dim=384, num_heads=6).head_dim
    64
    """

    error: ClassVar[type[VecaError]] = ConfigError

    embed_dim: _Width = 768
    depth: _Count = 12
    num_heads: _Count = 12
    mlp_ratio: Annotated[float, Bounds(gt=0, le=64)] = 2.66667
    patch_size: _Count = 16
    in_chans: _Count = 3
    num_cores: Annotated[int, Bounds(ge=1, le=256)] = 64
    """Capacity of the core bank: the largest budget."""
    core_chunk: Positive = 8
    """The bank is stored in parameters of this many cores, so that inactive ones get no gradient at all."""
    budgets: tuple[int, ...] = (8, 16, 24, 32, 40, 48, 56, 64)
    """Budgets the weights are trained at; any other from 1 to `num_cores` works, with a warning."""
    widths: tuple[MlpWidth, ...] = (1.0,)
    """Shares of the MLP's channels that the weights are trained with patches at; cores always use all of them."""
    output_dim: _Width | None = None
    """Width of a final linear projection, for students of a teacher with another width; None: none."""
    num_classes: Annotated[int, Bounds(ge=0, le=10_000_000)] = 0
    """Classes of a linear classifier on the global feature; 0: no classifier."""
    rope_zero_fraction: _Share = 0.125
    """Fraction of the rotary frequencies, the slowest, that are set to zero."""
    coordinate_shift: _Share = 0.08
    """Training only: patch coordinates are shifted by U(-shift, shift) on each axis; 0: off."""
    coordinate_rescale: Annotated[float, Bounds(ge=1, le=16)] = 2.0
    """Training only: patch coordinates are scaled by exp(U(-ln r, ln r)); 1: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        multiple, bank = 4 * self.num_heads, self.num_cores
        self.require("embed_dim", self.embed_dim % multiple == 0, f"a multiple of 4 × num_heads = {multiple}")
        self.require("mlp_ratio", self.mlp_dim >= 1, f"at least 1 / embed_dim = 1 / {self.embed_dim}")
        self.require("core_chunk", bank % self.core_chunk == 0, f"a divisor of num_cores = {bank}")
        valid = len(self.budgets) > 0 and all(is_budget(budget, bank) for budget in self.budgets)
        self.require("budgets", valid, f"one or more integers from 1 to num_cores = {bank}")
        object.__setattr__(self, "widths", tuple(map(float, self.widths)))  # 1 may be an integer
        steps = [b - a for a, b in itertools.pairwise(self.widths)]
        valid = 1 in self.widths and (all(step > 0 for step in steps) or all(step < 0 for step in steps))
        self.require("widths", valid, "shares from above 0 to 1 in ascending or descending order, 1 among them")

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def mlp_dim(self) -> int:
        return int(self.embed_dim * self.mlp_ratio)

    def hidden_width(self, width: float) -> int:
        """Channels of the MLP that patches use at a width, a share of all: whole groups of the kernels, at least one.

        >>> VecaConfig().hidden_width(1), VecaConfig().hidden_width(0.25)
        (2048, 512)
        """
        groups = max(1, int(width * self.mlp_dim / SWIGLU_GROUP + 0.5))
        return self.mlp_dim if width == 1 else min(groups * SWIGLU_GROUP, self.mlp_dim)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` takes back. A model of one width is written as by versions without widths."""
        values = super().to_dict()
        return values if self.widths != (1.0,) else {k: v for k, v in values.items() if k != "widths"}

    @property
    def num_features(self) -> int:
        """Width of the output features."""
        return self.output_dim or self.embed_dim


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
