"""Settings of an embed run, its report and its error."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from veca.errors import VecaError
from veca.images import MAX_PIXELS, PATCH, Fit
from veca.model import Veca

Precision = Literal["float32", "bfloat16", "float16"]
SaveDtype = Literal["float32", "float16"]

ANEW = "start anew with --overwrite (overwrite=True)"
"""The way out of most errors, for messages."""


class EmbedError(VecaError, ValueError):
    """A run of `embed` that cannot start, continue or finish."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedSettings:
    """Everything but the model and the images that the features depend on."""

    cores: int | None = None
    """Budget; None: all cores of the model."""
    size: int = 512
    """Side in pixels, as in `veca.images.fit_image`."""
    fit: Fit = "crop"
    dense: bool = False
    """Save the patch features."""
    with_global: bool = True
    """Save the global feature."""
    batch: int = 32
    """Images of size × size per forward pass; of larger images, as many as have no more pixels in total."""
    precision: Precision = "float32"
    """Precision of the computation; other than float32: autocast."""
    save_dtype: SaveDtype = "float32"
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        for name in ("size", "batch", "max_pixels"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise EmbedError(f"{name}={value!r}: must be an integer, at least 1")
        for name, choices in (("fit", Fit), ("precision", Precision), ("save_dtype", SaveDtype)):
            if (value := getattr(self, name)) not in get_args(choices):
                raise EmbedError(f"{name}={value!r}: must be one of {', '.join(get_args(choices))}")
        if not self.dense and not self.with_global:
            raise EmbedError("nothing to save: ask for the global feature, for dense features, or for both")

    def resolve(self, model: Veca) -> EmbedSettings:
        """These settings with the budget filled in; raises EmbedError if the model cannot run with them."""
        bank, step = model.config.num_cores, math.lcm(model.config.patch_size, PATCH)
        budget = bank if self.cores is None else self.cores
        if type(budget) is not int or not 1 <= budget <= bank:
            raise EmbedError(f"cores={budget!r}; a budget is an integer from 1 to {bank}, or None for all {bank}")
        if self.size % step:
            nearest = max(step, round(self.size / step) * step)
            raise EmbedError(f"size={self.size}: must be a multiple of {step}. Nearest: {nearest}")
        return dataclasses.replace(self, cores=budget)


class EmbedReport(NamedTuple):
    """Result of a run."""

    pictures: int
    """Rows in `out`."""
    failures: int
    """Rows in `<out>.failures.csv`; there is no such file without failures."""
    resumed: int
    """Images and failures among these that an earlier, interrupted run had finished."""
    seconds: float
    out: Path | str
    """The file, the folder or the address of the folder."""
    resumed_failures: int = 0
    """How many of `resumed` are failures."""
