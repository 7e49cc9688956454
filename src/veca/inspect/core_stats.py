"""Statistics of the cores over many images (`veca cores`): movement, attention, contributions, budgets.

Every number is computed for one image first, then averaged over images, with its standard deviation over images.
Images are processed in batches and sums are float64, so memory does not grow with their number. Several statistics need
a baseline: the same between an image and the one before it.

Shapes: B images, N patches, C active cores, S = C + N tokens (cores first), D width, L layers.
"""

import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from veca.checkpoint.format import weights_hash
from veca.config import size_name
from veca.data.records import decode_items
from veca.data.remote import SourceError
from veca.data.sources import count_images, iter_items
from veca.errors import ArgumentError
from veca.images import EXTENSIONS, MAX_PIXELS, PATCH, normalize
from veca.images.formats import collect_unsupported
from veca.inspect import maps as measures
from veca.inspect.figure_layout import choose_budgets, pick_evenly
from veca.inspect.maps import capture_attention, inspecting, mean_attention_and_profiles
from veca.model import Veca
from veca.outputs import VecaOutput
from veca.utils.console import bar, reading_line
from veca.utils.device import describe_versions
from veca.utils.files import list_paths

BATCH_PIXELS, BATCH_PIXELS_ON_CPU = 64 * 256 * 256, 16 * 256 * 256
"""Default batch size, in pixels."""
MAX_NAMED_FAILURES = 20
"""Of the images that cannot be read, this many are named; all are counted."""


@dataclass(frozen=True)
class MeanStd:
    """Mean and population standard deviation over images."""

    mean: float
    std: float


@dataclass(frozen=True)
class LayerStats:
    """A number of every layer, from the first to the last: mean and standard deviation over images."""

    mean: list[float]
    std: list[float]
    overall: MeanStd
    """Of the mean over layers; for maps without the last layer, where only the first core still reaches a feature."""


@dataclass(frozen=True)
class CorePlaces:
    """Where cores go. Lengths are in sides of the image: coordinates, from -1 to 1, are two to a side."""

    distance: LayerStats
    """From a core's learned start, which is its place in layer 1: mean over cores."""
    path: LayerStats
    """Length of the path up to that layer: mean over cores."""
    shift: list[float]
    """Per layer, what all images have in common: from the start to the mean place. Root mean square over cores."""
    scatter: list[float]
    """Per layer, what depends on the image: from the mean place. Root mean square over cores and images.

    shift² + scatter² is the mean square distance from the start, exactly."""
    picture_share: list[float]
    """Per layer, scatter² / (shift² + scatter²); nan where nothing moves."""
    spacing: float
    """Distance to the nearest other core, at the start: mean over cores. A scale for the other lengths."""
    start: list[list[float]]
    """(x, y) of each core, in coordinates from -1 to 1, as the next."""
    end: list[list[float]]
    """The mean place of each core in the last layer."""
    core_scatter: list[float]
    """The scatter of each core in the last layer."""


@dataclass(frozen=True)
class MapStats:
    """Attention maps of the cores: attention over the patches, the mean over heads, divided by its sum."""

    overlap: LayerStats
    """Σᵢ min(aᵢ, bᵢ) of two cores' maps, 1 where they are the same: mean over all pairs of cores."""
    same_core: LayerStats
    """The same for one core in this image and the one before: mean over cores. 1: maps do not depend on images."""
    even: LayerStats
    """The same for a map and a uniform one: mean over cores."""
    area: LayerStats
    """exp(entropy) / N, the share of the image that a map covers: mean over cores."""
    winners: LayerStats
    """The share of cores whose map is larger than that of all other cores at some patch."""


@dataclass(frozen=True)
class AttentionShares:
    """Where the attention of cores goes, in shares that sum to 1."""

    itself: LayerStats
    cores: LayerStats
    """Other cores."""
    patches: LayerStats


@dataclass(frozen=True)
class ProfileStats:
    """Shares of cores in what attention adds to a patch (`core_profiles`), mean over patches."""

    first: LayerStats
    """Core 1, the global feature."""
    chunks: list[LayerStats]
    """Cores 1–8, 9–16, …: one entry per active chunk of the bank."""
    cores: list[list[float]]
    """[layer][core]: mean over images."""


@dataclass(frozen=True)
class FeatureSimilarity:
    """Similarity of two sets of features: cosines, and linear centred kernel alignment (CKA) over all images."""

    cls: MeanStd
    """Cosine of the global features."""
    patches: MeanStd
    """Cosine of patches in the same place: mean over patches."""
    cka: float
    """Of the global features: ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖), channels centred. Too high with fewer images than channels."""


@dataclass(frozen=True)
class BudgetStats:
    """Statistics at one budget."""

    places: CorePlaces
    maps: MapStats
    first_core: AttentionShares
    other_cores: AttentionShares
    """The mean over cores 2, 3, …"""
    heard: ProfileStats
    kept: FeatureSimilarity
    """To the features with all cores."""


@dataclass(frozen=True)
class CoreStory:
    """The result of `measure_cores`."""

    about: dict[str, Any]
    """The model, the images and the versions, as plain data."""
    budgets: dict[int, BudgetStats]
    """By the number of cores, in ascending order."""
    between: FeatureSimilarity
    """Of an image to the one before it, with all cores: the similarity of unrelated features."""
    failures: list[tuple[str, str]]
    """The first images that could not be read, and why."""


def measure_cores(
    model: Veca,
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    budgets: Sequence[int] | None = None,
    size: int = 256,
    limit: int | None = None,
    batch: int | None = None,
    workers: int = 0,
    name: str | None = None,
    progress: bool = False,
) -> CoreStory:
    """Measure what a model's cores do on images: files, folders, globs, tar shards, Parquet, as `veca.embed` takes.

    Images are cropped to the centre at `size` px. `limit` takes so many, evenly spread over all. `budgets` default to
    four of the model's. The model runs on its device and in its precision; statistics are float32 or better. An image
    that cannot be read is left out and counted.
    """
    began = time.perf_counter()
    chosen = choose_budgets(model, budgets, pick_evenly(model.config.budgets, 4))
    sources = list_paths(images)
    _check_arguments(sources, size, limit, batch, model.config.patch_size)
    device = model.norm.weight.device
    batch = batch or max(1, (BATCH_PIXELS_ON_CPU if device.type == "cpu" else BATCH_PIXELS) // size**2)
    with reading_line(progress) as on_read:
        # Counting compressed shards takes as long as reading them: only where the total is needed.
        total = count_images(sources, unpack=limit is not None, on_read=on_read) if progress or limit else None
    items = iter_items(sources)
    if limit is not None:
        available = total or limit  # where the total is not known, the first ones are taken
        spread = (item for i, item in enumerate(items) if (i + 1) * limit // available > i * limit // available)
        # Read to the end, so that all unsupported files are named, except where that means to fetch remote shards.
        items, total = spread if total else islice(spread, limit), min(limit, available)
    stats, failed, failures = CoreAccumulator(model, chosen), 0, list[tuple[str, str]]()
    # The decoding processes come first: forking is safest before the progress bar has its thread.
    with (
        collect_unsupported() as unsupported,
        decode_items(items, size, "crop", MAX_PIXELS, workers) as records,
        bar("measuring", total, "images", progress, failures=True) as advance,
        inspecting(model),
    ):
        while group := list(islice(records, batch)):
            unreadable = [(record.name, record.error) for record in group if record.pixels is None]
            failed, failures = failed + len(unreadable), (failures + unreadable)[:MAX_NAMED_FAILURES]
            if pixels := [record.pixels for record in group if record.pixels is not None]:
                try:
                    stats.add(normalize(torch.from_numpy(np.stack(pixels)).to(device)))
                except torch.OutOfMemoryError as error:
                    message = f"no memory on {device} for {batch} pictures at once: lower --batch-size"
                    raise ArgumentError(message) from error
            advance(len(group), failed=failed)
    unsupported.warn()
    if not stats.images:
        why = "".join(f". The first: {name}: {error}" for name, error in failures[:1])
        raise SourceError(f"none of the {failed} pictures could be read{why}")
    about = _describe_run(model, name, sources) | {"size": size, "fit": "crop", "limit": limit}
    about |= {"pictures": stats.images, "failed": failed, "seconds": round(time.perf_counter() - began, 1)}
    return CoreStory(about, {c: at.result() for c, at in stats.budgets.items()}, stats.between.result(), failures)


def _check_arguments(sources: list[str], size: int, limit: int | None, batch: int | None, patch: int) -> None:
    step = math.lcm(patch, PATCH)
    if size < step or size % step:
        nearest = max(1, round(size / step)) * step
        raise ArgumentError(f"size={size}: must be a positive multiple of {step}. Nearest: {nearest}")
    for what, value in (("limit", limit), ("batch", batch)):
        if value is not None and value < 1:
            raise ArgumentError(f"{what}={value}: must be at least 1")
    if not sources:
        raise ArgumentError("no pictures given; name files, folders, globs, tar shards or Parquet files")
    for source in sources:
        with collect_unsupported() as unsupported:
            first = next(iter_items([source]), None)
        if first is None:
            known, shards = ", ".join(sorted(EXTENSIONS)), os.path.join(source, "*.tar")
            message = f"{source}: no pictures there ({known}); shards are named by a glob, as '{shards}'"
            raise SourceError(unsupported.append_to(message))


def _describe_run(model: Veca, name: str | None, sources: list[str]) -> dict[str, Any]:
    versions, dtype = describe_versions(model.norm.weight.device), str(model.norm.weight.dtype)
    about: dict[str, Any] = {"model": name or size_name(model.config) or "custom", "sha256": weights_hash(model)}
    about |= {"provenance": model.provenance, "config": model.config.to_dict(), "dtype": dtype.removeprefix("torch.")}
    about |= {"sources": sources, "versions": versions, "device": versions.pop("device")}
    return about | {"date": datetime.now(UTC).isoformat(timespec="seconds")}


class CoreAccumulator:
    """Running statistics of all budgets."""

    def __init__(self, model: Veca, budgets: Sequence[int]) -> None:
        self.model, self.images = model, 0
        self.budgets = {budget: _BudgetAccumulator(budget, model.config.core_chunk) for budget in budgets}
        self.between = _SimilarityAccumulator()
        self.previous: Sequence[Tensor | None] = (None, None)
        """Features (1, ...) of the last image: the next batch is compared with it."""

    def add(self, images: Tensor) -> None:
        """Images (B, 3, height, width), normalised."""
        num_cores, layers = self.model.config.num_cores, range(len(self.model.blocks))
        all_cores = None if num_cores in self.budgets else _float_features(Veca.forward(self.model, images, num_cores))
        for budget in sorted(self.budgets, reverse=True):  # all cores come first
            captured, out = capture_attention(self.model, images, budget, layers, mean_attention_and_profiles)
            features = _float_features(out)
            all_cores = all_cores or features
            attention = torch.stack([attention for attention, _ in captured], dim=1)
            profiles = torch.stack([profiles.mean(1) for _, profiles in captured], dim=1)
            self.budgets[budget].add(out.coordinates.transpose(0, 1), attention, profiles)
            self.budgets[budget].kept.add(features, all_cores)
        assert all_cores is not None
        self.between.add(*zip(*map(_with_previous, all_cores, self.previous), strict=True))
        self.previous = [part[-1:].clone() for part in all_cores]
        self.images += len(images)


class Moments:
    """Running mean and population variance of values (B, ...) over images, in float64; nan without images."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        values = to_float64(values)
        added, total = len(values), self.count + len(values)
        # Chan's parallel update: combine the moments so far with those of the batch, which may be empty.
        mean = values.sum(0) / max(1, added)
        delta = mean - self._mean
        weight = self.count * added / max(1, total)
        self._squares = self._squares + (values - mean).square().sum(0) + weight * delta.square()
        self._mean, self.count = self._mean + delta * (added / max(1, total)), total

    @property
    def mean(self) -> Tensor:
        return (self._mean / min(1, self.count)).cpu()

    @property
    def variance(self) -> Tensor:
        return (self._squares / self.count).cpu()


class Alignment:
    """Running linear centred kernel alignment (CKA) of features x and y, (B, D) each.

    It is 1 if one is the other rotated and scaled. Kept are products of channels, not of images: memory is D².
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._products = torch.zeros((), dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        if not len(x):
            return
        both, count = to_float64(torch.stack([x, y])), self.count + len(x)
        mean = both.mean(1, keepdim=True)  # (2, 1, D)
        delta = mean - self._mean
        self._mean = self._mean + delta * (len(x) / count)
        # The shift of the mean enters like one more image.
        x, y = torch.cat([both - mean, math.sqrt(self.count * len(x) / count) * delta], dim=1)
        self._products, self.count = self._products + torch.stack([x, y, x]).mT @ torch.stack([x, y, y]), count

    @property
    def value(self) -> float:
        """Nan for fewer than two images, and where features do not vary."""
        if self.count < 2:
            return math.nan
        xx, yy, xy = (float(product.norm()) for product in self._products)
        return xy**2 / (xx * yy) if xx * yy else math.nan


class _SimilarityAccumulator:
    def __init__(self) -> None:
        self.cosines, self.alignment = Moments(), Alignment()

    def add(self, features: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """The global features (B, D) and patches (B, N, D) of two sets of images."""
        cls, patches = (F.cosine_similarity(a, b, dim=-1) for a, b in zip(features, others, strict=True))
        self.cosines.add(torch.stack([cls, patches.mean(-1)], dim=-1))
        self.alignment.add(features[0], others[0])

    def result(self) -> FeatureSimilarity:
        cls, patches = map(MeanStd, self.cosines.mean.tolist(), self.cosines.variance.sqrt().tolist())
        return FeatureSimilarity(cls, patches, self.alignment.value)


class _BudgetAccumulator:
    def __init__(self, cores: int, chunk: int) -> None:
        self.cores, self.chunk = cores, chunk
        self.moves, self.profiles, self.kept = Moments(), Moments(), _SimilarityAccumulator()
        self.layers: defaultdict[tuple[str, str], Moments] = defaultdict(Moments)
        """By the fields of `BudgetStats` and of what is there."""
        self.start = torch.zeros(cores, 2)
        self.previous_maps: Tensor | None = None

    def _add_layers(self, field: str, **values: Tensor) -> None:
        """Add statistics (B, L) by name, and their mean over layers, for maps without the last one, behind them."""
        for name, value in values.items():
            averaged = value[:, :-1] if field == "maps" and value.shape[1] > 1 else value
            self.layers[field, name].add(torch.cat([value, averaged.mean(-1, keepdim=True)], dim=-1))

    def add(self, coordinates: Tensor, attention: Tensor, profiles: Tensor) -> None:
        """(B, L, C, 2); (B, L, C, S), whose rows sum to 1; (B, L, C), the mean over patches."""
        places = to_float64(coordinates) / 2  # in sides of the image
        self.start = places[0, 0]  # the same for all images
        moves = places - self.start
        self.moves.add(moves)
        path = moves.diff(dim=1, prepend=moves[:, :1]).norm(dim=-1).cumsum(1)
        self._add_layers("places", distance=moves.norm(dim=-1).mean(-1), path=path.mean(-1))

        to_cores, to_patches = attention[..., : self.cores], attention[..., self.cores :]
        own = to_cores.diagonal(dim1=-2, dim2=-1)  # (B, L, C)
        masses = {"itself": own, "cores": to_cores.sum(-1) - own, "patches": to_patches.sum(-1)}
        # Core 1 is the global feature and behaves differently: it is kept apart from the others.
        self._add_layers("first_core", **{to: mass[..., 0] for to, mass in masses.items()})
        self._add_layers("other_cores", **{to: mass[..., 1:].mean(-1) for to, mass in masses.items()})

        maps = measures.as_maps(to_patches)
        now, before = _with_previous(maps, self.previous_maps)
        self.previous_maps = maps[-1:].clone()
        self._add_layers("maps", overlap=measures.pair_overlap(maps), winners=measures.winners(maps))
        self._add_layers("maps", area=measures.effective_area(maps).mean(-1))
        self._add_layers("maps", even=measures.overlap(maps, 1 / maps.shape[-1]).mean(-1))
        self._add_layers("maps", same_core=measures.overlap(now, before).mean(-1))

        self.profiles.add(profiles)
        self._add_layers("heard", first=profiles[..., 0])
        for i, chunk in enumerate(profiles.split(self.chunk, dim=-1)):
            self._add_layers("chunks", **{str(i): chunk.sum(-1)})

    def result(self) -> BudgetStats:
        stats: defaultdict[str, dict[str, LayerStats]] = defaultdict(dict)
        for (field, name), moments in self.layers.items():
            *means, mean = moments.mean.tolist()
            *stds, std = moments.variance.sqrt().tolist()
            stats[field][name] = LayerStats(means, stds, MeanStd(mean, std))
        first, other = AttentionShares(**stats["first_core"]), AttentionShares(**stats["other_cores"])
        heard = ProfileStats(stats["heard"]["first"], list(stats["chunks"].values()), self.profiles.mean.tolist())
        start, moves, variance = self.start.cpu(), self.moves.mean, self.moves.variance.sum(-1)  # (L, C, 2), (L, C)
        # Mean square move = square of the mean move (shift²) + its variance over images (scatter²).
        shift, scatter = moves.square().sum(-1).mean(-1), variance.mean(-1)
        places = CorePlaces(
            **stats["places"],
            shift=shift.sqrt().tolist(),
            scatter=scatter.sqrt().tolist(),
            picture_share=(scatter / (shift + scatter)).tolist(),
            spacing=float(torch.cdist(start, start).fill_diagonal_(math.inf).amin(-1).mean()),
            start=(2 * start).tolist(),
            end=(2 * (start + moves[-1])).tolist(),
            core_scatter=variance[-1].sqrt().tolist(),
        )
        return BudgetStats(places, MapStats(**stats["maps"]), first, other, heard, self.kept.result())


def to_float64(values: Tensor) -> Tensor:
    """On the same device, so that nothing synchronises; on the CPU where the device (MPS) has no float64."""
    return values.to("cpu" if values.device.type == "mps" else values.device, torch.float64)


def _float_features(out: VecaOutput) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(out.cls.dtype, torch.float32)
    return out.cls.to(dtype), out.patches.to(dtype)


def _with_previous(now: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """Images (B, ...) and the one before each; the very first has none and is left out."""
    return (now[1:], now[:-1]) if last is None else (now, torch.cat([last, now[:-1]]))
