"""Settings of an embed run, how they are checked, and the description by which a run is resumed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from veca.checkpoint import weights_hash
from veca.data.remote import is_remote
from veca.data.sources import SHARDS, TABLES, OnRead, iter_items
from veca.errors import VecaError
from veca.images import EXTENSIONS, MAX_PIXELS, PATCH, Fit
from veca.images.formats import collect_unsupported
from veca.model import Veca
from veca.utils.settings import Positive, Settings
from veca.version import __version__

Precision = Literal["float32", "bfloat16", "float16"]
SaveDtype = Literal["float32", "float16"]

ANEW = "start anew with --overwrite (overwrite=True)"
"""The way out of most errors, for messages."""


class EmbedError(VecaError, ValueError):
    """A run of `embed` that cannot start, continue or finish."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedSettings(Settings):
    """Everything but the model and the images that the features depend on."""

    error: ClassVar[type[VecaError]] = EmbedError

    cores: int | None = None
    """Budget; None: all cores of the model."""
    size: Positive = 512
    """Side in pixels, as in `veca.images.fit_image`."""
    fit: Fit = "crop"
    dense: bool = False
    """Save the patch features."""
    with_global: bool = True
    """Save the global feature."""
    batch: Positive = 32
    """Images of size × size per forward pass; of larger images, as many as have no more pixels in total."""
    precision: Precision = "float32"
    """Precision of the computation; other than float32: autocast."""
    save_dtype: SaveDtype = "float32"
    max_pixels: Positive = MAX_PIXELS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dense and not self.with_global:
            raise EmbedError("nothing to save: ask for the global feature, for dense features, or for both")

    def resolve(self, model: Veca) -> EmbedSettings:
        """These settings with the budget filled in; raises EmbedError if the model cannot run with them."""
        bank, step = model.config.num_cores, math.lcm(model.config.patch_size, PATCH)
        budget = bank if self.cores is None else self.cores
        self.require("cores", 1 <= budget <= bank, f"from 1 to {bank}, or None for all {bank}")
        nearest = max(step, round(self.size / step) * step)
        self.require("size", self.size % step == 0, f"a multiple of {step}. Nearest: {nearest}")
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


def check_sources_hold_images(sources: list[str], column: str | None, on_read: OnRead | None) -> None:
    """Raise EmbedError unless every source holds at least one image."""
    if not sources:
        raise EmbedError("nothing to embed; name files, folders, globs, tar shards or Parquet files")
    for source in sources:
        with collect_unsupported() as left_out:
            first = next(iter_items([source], column, on_read=on_read), None)
        if first is None:
            # Archives in a folder are only read if they are named.
            names = os.listdir(source) if os.path.isdir(source) else []
            kinds = ((SHARDS, "tar shards", "*.tar"), (TABLES, "Parquet files", "*.parquet"))
            archives = ((kind, glob) for ends, kind, glob in kinds if any(name.endswith(ends) for name in names))
            hint = "".join(f". Its {kind} can be named: '{os.path.join(source, glob)}'" for kind, glob in archives)
            raise EmbedError(left_out.append_to(f"{source}: no images there ({', '.join(sorted(EXTENSIONS))}){hint}"))


def describe_features(model: Veca, name: str, settings: EmbedSettings, device: torch.device) -> dict[str, Any]:
    """How the features are made: model, weights, versions and settings. Saved as metadata of every feature file."""
    about: dict[str, Any] = {"veca": __version__, "torch": torch.__version__, "device": device.type, "model": name}
    about |= {"provenance": model.provenance, "weights": weights_hash(model), "dim": model.config.num_features}
    about |= {"patch_size": model.config.patch_size, **dataclasses.asdict(settings)}
    return dict(json.loads(json.dumps(about, default=str)))


def describe_job(
    about: dict[str, Any], model: Veca, sources: list[str], column: str | None, length: int
) -> dict[str, Any]:
    """What must be equal for a run to be resumed: how the features are made, of which inputs, in which partitions."""
    places = [source if is_remote(source) else os.path.abspath(source) for source in sources]
    places += [] if column is None else [f"column {column}"]
    inputs = hashlib.sha256("\0".join(places).encode("utf-8", "backslashreplace")).hexdigest()
    config = json.loads(json.dumps(model.config.to_dict()))
    return {**about, "config": config, "inputs": inputs, "partition": length}
