"""Frozen backbones, and their global features of a split, extracted once and cached on disk.

Images come in as uint8 and every backbone normalises them its own way. Features come back as float32.

One pass over the images serves all budgets. A file holds the features of up to `PART` images at one budget. Its name is
a hash of everything that decides them: a changed model, image or crop finds no file, and an interrupted run continues
after its last whole file. On a CPU the worker processes that decode run the backbone too, each on one core, so none
waits for another.

Shapes: N images, B of them per forward pass, D width of the features, rows × columns patches.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from veca.checkpoint.format import weights_hash, write_tensors
from veca.config import is_budget
from veca.data.datasets import batches
from veca.data.datasets.base import Split
from veca.errors import ArgumentError, VecaError
from veca.images import MAX_PIXELS, MEAN, STD, nearest_sizes, normalize
from veca.images.pack import pack
from veca.inputs import resolve_width
from veca.model import Veca
from veca.optimized import optimize, supports_fused
from veca.packed import PackedImages
from veca.utils.console import bar
from veca.utils.files import atomic_path
from veca.utils.text import quoted

FrozenPrecision: TypeAlias = Literal["float32", "bfloat16", "float16"]
FeatureKind: TypeAlias = Literal["cls", "cls+mean"]
"""Global feature: the backbone's own, or that concatenated with the mean of the patches."""
FEATURES_VERSION = 1
"""Part of cache keys: raise it when the same settings give other numbers."""
PART, PART_ON_CPU = 8192, 512
"""Images per file: what a run that is killed loses, minutes of a CPU's work."""
PASS_PIXELS, PASS_PIXELS_ON_CPU = 128 * 256 * 256, 8 * 256 * 256
"""Pixels per forward pass, unless the batch size is given."""

ByBudget: TypeAlias = dict[int | None, NDArray[np.float32]]
"""Features (B, D) for each budget."""


class BackboneError(VecaError, ValueError):
    """A backbone that cannot be loaded or run as asked; the message says what to do."""


class FrozenBackbone(ABC):
    """A frozen model that gives a global feature and a feature map.

    `name` is as the user gave it, `kind` the library its code comes from. `budgets` are those it was trained at; None:
    it has no budget. `about` is plain data for reports: a hash of the weights, `patch`, the pixels per cell of its map,
    the `width` of its features, `mean` and `std` of its input, and more.
    """

    budgets: tuple[int, ...] | None = None
    mlp_width: float | None = None
    """Share of the MLP's channels that patches use; None: all, or there is no such choice."""
    rounds_sizes = False
    """Whether a size that is no multiple of the patch is rounded to one, or refused."""

    def __init__(
        self, name: str, kind: str, device: torch.device, precision: FrozenPrecision, about: Mapping[str, Any]
    ) -> None:
        self.name, self.kind, self.about = name, kind, about
        self.patch, self.width = about["patch"], about["width"]
        self.mean, self.std = tuple(about["mean"]), tuple(about["std"])
        self.device, self.precision, self.autocast = device, precision, precision != "float32"

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the features, for cache keys: not the name or path."""
        about = {key: value for key, value in self.about.items() if key not in ("weights", "provenance")}
        # `running` too: precision and device change the last bits.
        return {"kind": self.kind, **about, **self.running} | ({"mlp_width": w} if (w := self.mlp_width) else {})

    @property
    def running(self) -> dict[str, Any]:
        """Return how it is run, for protocols and cache keys."""
        return {"precision": self.precision, "device": self.device.type}

    @property
    def forks(self) -> bool:
        """Whether forked worker processes can run it, each on one core."""
        return self.device.type == "cpu" and sys.platform == "linux"

    def as_forked(self) -> AbstractContextManager[Any]:
        """Context in which a forked worker process runs it."""
        return nullcontext()

    def side(self, size: int) -> int:
        """Return the side in pixels of the input when `size` is asked for."""
        if not 1 <= size <= (limit := math.isqrt(MAX_PIXELS)):
            raise BackboneError(f"size {quoted(size)}: a side has at least {self.patch} and at most {limit:,} pixels")
        near = nearest_sizes(size, size, self.patch)[0]
        if size != near and not self.rounds_sizes:
            raise BackboneError(f"size {size}: {self.name} takes multiples of {self.patch}. Nearest: {near}")
        return near

    def cores(self, requested: Sequence[int] | None) -> tuple[int | None, ...]:
        """Return the budgets to run at: those asked for, or the default when None."""
        return (None,)

    def at_width(self, width: float) -> Self:
        """Return this backbone with patches at a share of the MLP's channels."""
        raise BackboneError(f"width {width:g}: {self.name} has no widths; leave out --widths")

    def prepare(self, pixels: Tensor) -> Tensor:
        """Normalise images (B, 3, height, width) uint8 for this backbone, on its device."""
        return normalize(pixels.to(self.device, non_blocking=True), self.mean, self.std)

    def features(self, images: Tensor, cores: int | None, dense: bool = True) -> tuple[Tensor, Tensor | None]:
        """Return the global feature (B, D) and, if `dense`, the map (B, D, rows, columns) of prepared images."""
        with self._inference():
            cls, patches = self._run(images, cores, dense)
        # Copies: a view of one token would keep all tokens in memory, and inference tensors take no gradient.
        return cls.to(torch.float32, copy=True), None if patches is None else patches.to(torch.float32, copy=True)

    def dense_features(self, images: Tensor, cores: int | None) -> tuple[Tensor, Tensor]:
        """Return the map and the global feature, in the order dense heads take them."""
        cls, patches = self.features(images, cores)
        assert patches is not None
        return patches, cls

    def grouped_features(self, groups: Sequence[Tensor], cores: int | None) -> list[tuple[Tensor, Tensor]]:
        """Return `dense_features` of prepared images of several sizes, those of one size in a group."""
        return [self.dense_features(images, cores) for images in groups]

    def check_native(self) -> None:
        """Refuse native sizes where the backbone takes one size only, as two small images of other sizes show."""
        try:
            for rows, columns in ((4, 6), (7, 5)):
                shape = 1, 3, rows * self.patch, columns * self.patch
                self.dense_features(torch.zeros(shape, device=self.device), None)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise BackboneError(f"native sizes: {self.name} takes one size only; leave out --fit native") from error

    @contextmanager
    def _inference(self) -> Iterator[None]:
        dtype = getattr(torch, self.precision)
        with torch.inference_mode(), torch.autocast(self.device.type, dtype, enabled=self.autocast):
            yield

    def global_feature(self, images: Tensor, cores: int | None, kind: FeatureKind = "cls") -> Tensor:
        """Return (B, D), or with the mean of the patches (B, 2 D)."""
        cls, patches = self.features(images, cores, dense=kind == "cls+mean")
        return cls if patches is None or kind == "cls" else torch.cat([cls, patches.mean((2, 3))], 1)

    @abstractmethod
    def _run(self, images: Tensor, cores: int | None, dense: bool) -> tuple[Tensor, Tensor | None]: ...


class FrozenVeca(FrozenBackbone):
    """A VECA, optimized where its fused kernels run or with `compile`."""

    def __init__(
        self, model: Veca, name: str, device: torch.device, precision: FrozenPrecision, compile: bool = False
    ) -> None:
        config = model.config
        self.budgets, self.num_cores = tuple(config.budgets), config.num_cores
        # Without the classes, so that fine-tuned weights and their backbone share a cache.
        architecture = {**config.to_dict(), "num_classes": 0}
        about: dict[str, Any] = {"sha256": weights_hash(model), "config": architecture, "provenance": model.provenance}
        about |= {"width": config.num_features, "patch": config.patch_size, "mean": MEAN, "std": STD}
        super().__init__(name, "veca", device, precision, about)
        dtype: torch.dtype = getattr(torch, precision)
        fused = supports_fused(config, device, dtype)
        self.optimized = compile or fused
        self.autocast = self.autocast and (fused or not compile)  # a compiled model has that dtype itself
        self.model = optimize(model, dtype=dtype) if self.optimized else model.eval().requires_grad_(False)
        self.mlp_width = model.width

    @property
    def running(self) -> dict[str, Any]:
        return {**super().running, "optimized": self.optimized}

    def as_forked(self) -> AbstractContextManager[Any]:
        # After a fork the compiler would wait forever for its threads, so a new shape must run eagerly.
        return torch.compiler.set_stance("eager_on_recompile") if self.optimized else nullcontext()

    def cores(self, requested: Sequence[int] | None) -> tuple[int | None, ...]:
        if requested is None:
            return (self.num_cores,)
        if wrong := [budget for budget in requested if not is_budget(budget, self.num_cores)]:
            raise BackboneError(f"cores {wrong[0]}: a budget of {self.name} is an integer from 1 to {self.num_cores}")
        return tuple(dict.fromkeys(requested))

    def at_width(self, width: float) -> Self:
        resolve_width(width, self.model.config, self.model._warned)
        other = copy.copy(self)
        other.mlp_width = width if width != 1 else None
        return other

    def check_native(self) -> None:
        """Nothing to refuse: a VECA takes any size."""

    def grouped_features(self, groups: Sequence[Tensor], cores: int | None) -> list[tuple[Tensor, Tensor]]:
        if len(groups) == 1:
            return super().grouped_features(groups, cores)
        with self._inference():
            batch = pack([image for images in groups for image in images], patch_size=self.patch)
            output = self._forward(batch, cores)
        counts, maps = [len(images) for images in groups], iter(output.feature_maps)
        patches = (torch.stack([next(maps) for _ in range(count)]) for count in counts)
        # Copies, as in `features`.
        pairs = zip(patches, output.cls.split(counts), strict=True)
        return [(each.to(torch.float32, copy=True), cls.to(torch.float32, copy=True)) for each, cls in pairs]

    def _run(self, images: Tensor, cores: int | None, dense: bool) -> tuple[Tensor, Tensor | None]:
        output = self._forward(images, cores, cls_only=not dense)
        return output.cls, output.feature_map if dense else None

    def _forward(self, images: Tensor | PackedImages, cores: int | None, cls_only: bool = False) -> Any:
        try:
            return self.model(images, cores=cores, cls_only=cls_only, width=self.mlp_width or 1)
        except RuntimeError as error:
            if "InvalidCxxCompiler" not in str(error):
                raise
            way = "install g++, or leave it out"
            raise BackboneError(f"--compile needs a C++ compiler and finds none: {way}") from error


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
        pixels = PASS_PIXELS_ON_CPU if self.backbone.device.type == "cpu" else PASS_PIXELS
        return self.at_once or max(1, pixels // side**2)

    def key(self, split: Split, transform: batches.CropTransform, cores: int | None) -> str:
        """Return a hash of everything the features depend on."""
        # The batch size is a part of it, as rounding depends on it.
        return digest_of(
            version=FEATURES_VERSION, backbone=self.backbone.identity, pictures=split.content_hash,
            view=transform.describe(), cores=cores, kind=self.kind, batch=self.batch(transform.side),
        )  # fmt: skip

    def files(self, split: Split, transform: batches.CropTransform, cores: int | None) -> list[tuple[Path, range]]:
        """Return each file, and its images."""
        images, step = range(len(split)), PART_ON_CPU if self.backbone.device.type == "cpu" else PART
        stem, parts = self.key(split, transform, cores), (images[start : start + step] for start in images[::step])
        return [(self.folder / f"{stem}-{n:03d}.safetensors", part) for n, part in enumerate(parts)]

    def run(self, split: Split, transform: batches.CropTransform, budgets: Sequence[int | None], title: str) -> float:
        """Make sure that the features of `split` at all `budgets` are on disk; return the seconds it took."""
        began = time.perf_counter()
        missing: dict[range, dict[int | None, Path]] = {}
        for cores in budgets:
            for file, part in self.files(split, transform, cores):
                if _read_features(file, len(part)) is None:
                    missing.setdefault(part, {})[cores] = file
        if not missing:
            return 0.0
        budgets = [cores for cores in budgets if any(cores in files for files in missing.values())]
        step = self.batch(transform.side)
        todo = {part: missing[part] for part in sorted(missing, key=lambda part: part.start)}
        order = [part[i : i + step] for part in todo for i in range(0, len(part), step)]
        device, compute = transform.reader.device, functools.partial(self.compute, transform.side, budgets)
        if forked := self.workers > 0 and self.backbone.forks and device is None:
            self.warm_up(transform.side, budgets)
        images, workers = batches.CroppedImages(split, transform), min(self.workers, len(order))
        if device is not None:  # batches are shared by workers
            workers = self.workers
        with (
            batches.decode_batches(images, order, workers, compute if forked else list, forked, device) as decoded,
            bar(title, sum(map(len, todo)), "pictures", self.progress) as advance,
        ):
            for part, files in todo.items():
                pieces: list[ByBudget] = []
                bad: dict[int, str] = {}
                for start in range(0, len(part), step):
                    computed, errors = next(decoded) if forked else compute(next(decoded))
                    bad |= errors
                    pieces.append(computed)
                    advance(len(part[start : start + step]))
                # Written part by part, each atomically: an interrupted run continues after the last.
                for cores, file in files.items():
                    values = np.concatenate([piece[cores] for piece in pieces])
                    values[[i - part.start for i in bad]] = 0
                    _write_features(file, torch.from_numpy(values), bad)
        return time.perf_counter() - began

    def features(self, pixels: Tensor, budgets: Sequence[int | None]) -> ByBudget:
        """Return the features (B, D) of images (B, 3, side, side) at each budget."""
        count, side = len(pixels), pixels.shape[-1]
        # The last batch is padded: all are computed the same way, and none needs a compilation of its own.
        if missing := self.batch(side) - count:
            pixels = torch.cat([pixels, pixels.new_zeros(missing, *pixels.shape[1:])])
        images = self.backbone.prepare(pixels)
        outputs = {cores: self.backbone.global_feature(images, cores, self.kind)[:count] for cores in budgets}
        return {cores: values.cpu().numpy() for cores, values in outputs.items()}

    def compute(self, side: int, budgets: Sequence[int | None], crops: Any) -> tuple[ByBudget, dict[int, str]]:
        """Return the features of crops, and the reasons of unreadable ones; forked workers may call it."""
        pixels, bad = batches.stack_crops(side, crops)
        in_worker = torch.utils.data.get_worker_info() is not None
        with self.backbone.as_forked() if in_worker else nullcontext():
            return self.features(pixels, budgets), bad

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
            self.features(torch.zeros(self.batch(side), 3, side, side, dtype=torch.uint8), budgets)
        finally:
            torch.set_num_threads(threads)

    def load(self, split: Split, transform: batches.CropTransform, cores: int | None) -> Features:
        """Load what `run` left on disk."""
        values: list[Tensor] = []
        bad: dict[int, str] = {}
        for file, part in self.files(split, transform, cores):
            if (features := _read_features(file, len(part))) is None:
                raise ArgumentError(f"{file} is damaged or gone since it was written; run it again")
            values.append(features.values)
            bad |= features.bad
        return Features(torch.cat(values), bad)


def digest_of(**parts: Any) -> str:
    """Return a hash of plain data, 32 hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _write_features(path: Path, values: Tensor, bad: Mapping[int, str]) -> None:
    metadata = {"digest": _features_hash(values), "bad": bad}
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
    readable = [i not in bad for i in range(len(values))]
    return values[readable], labels[readable]
