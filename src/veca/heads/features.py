"""Global features of a split, extracted once and cached on disk: one pass over the images for all budgets.

A file holds the features of up to `PART` images at one budget. Its name is a hash of everything that decides them: a
changed model, image or crop finds no file, and an interrupted run continues after its last whole file.

On a CPU the worker processes that decode run the backbone too, each on one core, so none waits for another.

Shapes: N images, B of them per forward pass, D width of the features.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from veca.checkpoint import write_tensors
from veca.data.datasets import batches
from veca.data.datasets.base import Split
from veca.errors import ArgumentError
from veca.heads.frozen import FeatureKind, FrozenBackbone
from veca.utils.console import bar
from veca.utils.files import atomic_path

FEATURES_VERSION = 1
"""Part of cache keys: raise it when the same settings give other numbers."""
PART, PART_ON_CPU = 8192, 512
"""Images per file: what a run that is killed loses, minutes of a CPU's work."""
PIXELS, PIXELS_ON_CPU = 128 * 256 * 256, 8 * 256 * 256
"""Pixels per forward pass, unless the batch size is given."""

ByBudget: TypeAlias = dict[int | None, NDArray[np.float32]]
"""Features (B, D) for each budget."""


class Features(NamedTuple):
    values: Tensor
    """(N, D) float32; zeros where an image is unreadable."""
    bad: dict[int, str]
    """Unreadable images: number → name and reason."""


@dataclass(frozen=True)
class Extraction:
    """Extracts global features with one backbone and caches them in a folder."""

    backbone: FrozenBackbone
    folder: Path
    kind: FeatureKind = "cls"
    at_once: int | None = None
    """Images per forward pass; None: by their size."""
    workers: int = 0
    """Processes that decode, and on a CPU compute; 0: this one does."""
    progress: bool = True
    warmed_up: set[tuple[int | None, ...]] = dataclasses.field(default_factory=set, init=False, compare=False)
    """Side and budgets that `warm_up` has run."""

    def batch(self, side: int) -> int:
        pixels = PIXELS_ON_CPU if self.backbone.device.type == "cpu" else PIXELS
        return self.at_once or max(1, pixels // side**2)

    def parts(self, split: Split, key: str) -> list[tuple[Path, range]]:
        """Return each file, and its images."""
        images = range(len(split))
        step = PART_ON_CPU if self.backbone.device.type == "cpu" else PART
        starts = enumerate(range(0, len(split), step))
        return [(self.folder / f"{key}-{n:03d}.safetensors", images[start : start + step]) for n, start in starts]

    def key(self, split: Split, transform: batches.CropTransform, cores: int | None) -> str:
        """Return a hash of everything the features depend on."""
        # The batch size is a part of it, as rounding depends on it.
        return digest_of(
            version=FEATURES_VERSION, backbone=self.backbone.identity, pictures=split.content_hash,
            view=transform.describe(), cores=cores, kind=self.kind, batch=self.batch(transform.side),
        )  # fmt: skip

    def run(self, split: Split, transform: batches.CropTransform, budgets: Sequence[int | None], title: str) -> float:
        """Make sure that the features of `split` at all `budgets` are on disk; return the seconds it took."""
        began = time.perf_counter()
        # For each part the files that are missing: it is computed again only at their budgets.
        todo: dict[range, dict[int | None, Path]] = {}
        for cores in budgets:
            for file, part in self.parts(split, self.key(split, transform, cores)):
                if _read_features(file, len(part)) is None:
                    todo.setdefault(part, {})[cores] = file
        if not todo:
            return 0.0
        todo = dict(sorted(todo.items(), key=lambda item: item[0].start))
        step = self.batch(transform.side)
        pending = {part[i : i + step]: list(files) for part, files in todo.items() for i in range(0, len(part), step)}
        collate: Callable[[Any], Any] = functools.partial(batches.stack_crops, transform.side)
        if forked := self.workers > 0 and self.backbone.forks:
            self.warm_up(transform.side, budgets)
            by_start = {batch.start: missing for batch, missing in pending.items()}
            collate = functools.partial(_compute_in_worker, self, transform.side, by_start)
        workers = min(self.workers, len(pending))
        with (
            batches.decode_batches(
                batches.CroppedImages(split, transform), pending, workers, collate, forked
            ) as decoded,
            bar(title, sum(map(len, todo)), "pictures", self.progress) as advance,
        ):
            for part, files in todo.items():
                pieces: list[ByBudget] = []
                bad: dict[int, str] = {}
                for start in range(0, len(part), step):
                    computed, errors = next(decoded)
                    bad |= errors
                    pieces.append(computed if forked else self.features(computed, list(files)))
                    advance(len(part[start : start + step]))
                # Written part by part, each atomically: an interrupted run continues after the last.
                for cores, file in files.items():
                    values = np.concatenate([piece[cores] for piece in pieces])
                    values[[i - part.start for i in bad]] = 0
                    _write_features(file, torch.from_numpy(values), bad)
        return time.perf_counter() - began

    def features(self, pixels: NDArray[np.uint8], budgets: Sequence[int | None]) -> ByBudget:
        """Return the features (B, D) of images (B, 3, side, side) at each budget."""
        count, side = len(pixels), pixels.shape[-1]
        # The last batch is padded: all are computed the same way, and none needs a compilation of its own.
        if missing := self.batch(side) - count:
            pixels = np.pad(pixels, ((0, missing), (0, 0), (0, 0), (0, 0)))
        images = self.backbone.prepare(torch.from_numpy(pixels))
        outputs = {cores: self.backbone.global_feature(images, cores, self.kind)[:count] for cores in budgets}
        return {cores: values.cpu().numpy() for cores, values in outputs.items()}

    def warm_up(self, side: int, budgets: Sequence[int | None]) -> None:
        """Run the backbone once as forked workers will: they inherit what it compiles, and errors surface sooner."""
        if (side, *budgets) in self.warmed_up:
            return
        self.warmed_up.add((side, *budgets))
        # The compiler may take equal sizes for one symbol. Most other sizes are powers of two: such budgets go last.
        budgets = sorted(budgets, key=lambda cores: cores is not None and cores.bit_count() == 1)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a forked process would wait forever for threads it does not have
        try:
            self.features(np.zeros((self.batch(side), 3, side, side), np.uint8), budgets)
        finally:
            torch.set_num_threads(threads)

    def load(self, split: Split, transform: batches.CropTransform, cores: int | None) -> Features:
        """Load what `run` left on disk."""
        values: list[Tensor] = []
        bad: dict[int, str] = {}
        for file, part in self.parts(split, self.key(split, transform, cores)):
            features = _read_features(file, len(part))
            if features is None:
                raise ArgumentError(f"{file} is damaged or gone since it was written; run it again")
            values.append(features.values)
            bad |= features.bad
        return Features(torch.cat(values), bad)


def digest_of(**parts: Any) -> str:
    """Return a hash of plain data, 32 hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _compute_in_worker(
    extraction: Extraction, side: int, budgets: Mapping[int, Sequence[int | None]], crops: Sequence[tuple[int, Any]]
) -> tuple[ByBudget, dict[int, str]]:
    """Collate function of forked workers: from crops to features. The first image of a batch tells its budgets."""
    pixels, bad = batches.stack_crops(side, crops)
    with extraction.backbone.as_forked():
        return extraction.features(pixels, budgets[crops[0][0]]), bad


def _write_features(path: Path, values: Tensor, bad: Mapping[int, str]) -> None:
    metadata = {"digest": _features_hash(values), "bad": {str(i): reason for i, reason in bad.items()}}
    with atomic_path(path) as part:
        write_tensors(part, {"features": values.contiguous()}, {"veca": json.dumps(metadata)})


def _read_features(path: Path, count: int) -> Features | None:
    """Read a whole file; None where there is none or it is damaged, so that it is computed again."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["veca"])
            values = file.get_tensor("features")
        bad = {int(i): str(reason) for i, reason in metadata["bad"].items()}
        intact = len(values) == count and metadata["digest"] == _features_hash(values)
        return Features(values, bad) if intact else None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _features_hash(values: Tensor) -> str:
    return hashlib.blake2b(values.contiguous().numpy().data, digest_size=16).hexdigest()


def drop_unreadable(features: Features, labels: Tensor, skip: bool, where: str) -> tuple[Tensor, Tensor]:
    """Return features and labels of the readable images; unless `skip`, an unreadable one is an error."""
    values, bad = features
    if not bad:
        return values, labels
    if not skip:
        some = f"{len(bad):,} of {len(values):,} pictures of {where}"
        why = f"cannot be read: {batches.join_some(list(bad.values()))}"
        raise batches.UnreadableImageError(f"{some} {why}. Repair them, or leave them out with --skip-bad")
    readable = torch.ones(len(values), dtype=torch.bool)
    readable[list(bad)] = False
    return values[readable], labels[readable]
