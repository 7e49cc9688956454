"""The story of the cores in numbers: where they go, where they look, who is heard, what a smaller budget keeps.

Every number is taken of one picture first; what is told is its mean over pictures and its standard deviation over them.
Pictures stream through in batches and sums are float64, so memory does not grow with their number.

Several numbers need something to be compared with: the same between a picture and the one before it.

Shapes: B pictures, N patches, C active cores, S = C + N tokens (cores first), D width, L layers.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from veca.checkpoint import weights_hash
from veca.config import size_name
from veca.data.sources import Item, Record, SourceError, count, decoded, expand, items_of
from veca.errors import ArgumentError
from veca.images import EXTENSIONS, MAX_PIXELS, PATCH, normalize
from veca.images.formats import noting_left_out
from veca.inspect.contribution import PIECE, attention_and_profiles
from veca.inspect.maps import look_into
from veca.inspect.measures import Alignment, Moments, as_maps, effective_area, exact, overlap, pair_overlap, winners
from veca.inspect.subject import choose_budgets, looking, spread
from veca.model import Veca, VecaOutput
from veca.rope import Rotary
from veca.utils.files import list_paths
from veca.utils.progress import bar, reading_line
from veca.version import __version__

AT_ONCE, AT_ONCE_ON_CPU = 64 * 256 * 256, 16 * 256 * 256
"""Pixels of a batch, unless told."""
MOST_NAMED = 20
"""So many pictures that cannot be read are named; all are counted."""


@dataclass(frozen=True)
class Spread:
    """The mean over pictures and the standard deviation over them: the variance is divided by their number."""

    mean: float
    std: float


@dataclass(frozen=True)
class Layers:
    """A number of every layer, from the first to the last: mean and standard deviation over pictures."""

    mean: list[float]
    std: list[float]
    overall: Spread
    """Of the mean over layers. Of maps, without the last layer: there, only the first core's still reach a feature."""


@dataclass(frozen=True)
class Places:
    """Where cores go. Lengths are in sides of the picture: coordinates, from -1 to 1, are two to a side."""

    distance: Layers
    """From a core's learned start, which is where it stands in layer 1: mean over cores."""
    path: Layers
    """Length of the way up to that layer: mean over cores."""
    shift: list[float]
    """Per layer, what all pictures have in common: from the start to the mean place. Root mean square over cores."""
    scatter: list[float]
    """Per layer, what depends on the picture: from the mean place. Root mean square over cores and pictures.

    shift² + scatter² is the mean square distance from the start, exactly."""
    picture_share: list[float]
    """Per layer, scatter² / (shift² + scatter²); nan where nothing moves."""
    spacing: float
    """To the nearest other core, at the start: mean over cores. A measure for the others."""
    start: list[list[float]]
    """(x, y) of each core, in coordinates from -1 to 1, as the next."""
    end: list[list[float]]
    """The mean place of each core in the last layer."""
    core_scatter: list[float]
    """The scatter of each core in the last layer."""


@dataclass(frozen=True)
class Maps:
    """Where cores look: their attention over the patches, the mean over heads, divided by its sum over patches."""

    overlap: Layers
    """Σᵢ min(aᵢ, bᵢ) of two cores' maps, 1 where they are the same: mean over all pairs of cores."""
    same_core: Layers
    """The same for one core in this picture and the one before: mean over cores. 1: maps do not depend on pictures."""
    even: Layers
    """The same for a map and one that is even over all patches: mean over cores."""
    area: Layers
    """exp(entropy) / N, the share of the picture that a map covers: mean over cores."""
    winners: Layers
    """The share of cores that look at some patch more than all other cores do, maps compared."""


@dataclass(frozen=True)
class Looks:
    """Where the attention of cores goes, in shares that sum to 1."""

    itself: Layers
    cores: Layers
    """Other cores."""
    patches: Layers


@dataclass(frozen=True)
class Heard:
    """Who carries what: the share of cores in what attention adds to a patch (`core_profiles`), mean over patches."""

    first: Layers
    """Core 1, the global feature."""
    chunks: list[Layers]
    """Cores 1–8, 9–16, …: one for every chunk of the bank that takes part."""
    cores: list[list[float]]
    """[layer][core]: mean over pictures."""


@dataclass(frozen=True)
class Kept:
    """How like features are to others: cosines, and linear centred kernel alignment over all pictures."""

    cls: Spread
    """Cosine of the global features."""
    patches: Spread
    """Cosine of patches in the same place: mean over patches."""
    cka: float
    """Of the global features: ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖), channels centred. Too high with fewer pictures than channels."""


@dataclass(frozen=True)
class AtBudget:
    """What was measured with some cores."""

    places: Places
    maps: Maps
    first_core: Looks
    other_cores: Looks
    """The mean over cores 2, 3, …"""
    heard: Heard
    kept: Kept
    """Against the features with the whole bank."""


@dataclass(frozen=True)
class CoreStory:
    """What `measure_cores` gives."""

    about: dict[str, Any]
    """The model, the pictures, the versions: what the numbers are of, as plain data."""
    budgets: dict[int, AtBudget]
    """By the number of cores, in ascending order."""
    between: Kept
    """A picture against the one before it, with the whole bank: what unlike features come to."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Pictures that could not be read, and why: the first of them."""


def measure_cores(
    model: Veca,
    pictures: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    budgets: Sequence[int] | None = None,
    size: int = 256,
    limit: int | None = None,
    batch: int | None = None,
    workers: int = 0,
    name: str | None = None,
    progress: bool = False,
) -> CoreStory:
    """Measure what a model's cores do on pictures: files, folders, globs, tar shards, Parquet, as `veca.embed` takes.

    The centre of each is seen at `size` px. `limit` takes so many, evenly spread over all. `budgets` default to four of
    the model's. The model runs where it is and as precise as its weights are; all that is made of it is float32 or
    better. A picture that cannot be read is left out and counted.
    """
    began = time.perf_counter()
    chosen = choose_budgets(model, budgets, spread(model.config.budgets, 4))
    sources = _checked(list_paths(pictures), size, limit, batch, model.config.patch_size)
    device = model.norm.weight.device
    batch = batch or max(1, (AT_ONCE_ON_CPU if device.type == "cpu" else AT_ONCE) // size**2)
    with reading_line(progress) as on_read:
        # Compressed shards take as long to count as to read: only where the total is needed.
        total = count(sources, unpack=limit is not None, on_read=on_read) if progress or limit else None
    items = items_of(sources)
    if limit is not None:
        items = islice(items, limit) if total is None else _evenly(items, total, limit)
        total = limit if total is None else min(limit, total)
    teller, failed = _Teller(model, chosen), 0
    failures: list[tuple[str, str]] = []
    # The decoding processes come first: forking is safest before the bar has its thread.
    with (
        noting_left_out() as left_out,
        decoded(items, size, "crop", MAX_PIXELS, workers) as records,
        bar("measuring", total, "images", progress, failures=True) as advance,
        looking(model),
    ):
        for group in _batches(records, batch):
            bad = [(record.name, record.error) for record in group if record.pixels is None]
            failures, failed = (failures + bad)[:MOST_NAMED], failed + len(bad)
            pixels = [record.pixels for record in group if record.pixels is not None]
            if pixels:
                try:
                    teller.add(normalize(torch.from_numpy(np.stack(pixels)).to(device)))
                except torch.OutOfMemoryError as error:
                    raise ArgumentError(f"no memory on {device} for {batch} pictures at once: lower --batch") from error
            advance(len(group), failed=failed)
    left_out.warn()
    if not teller.pictures:
        why = "".join(f". The first: {name}: {error}" for name, error in failures[:1])
        raise SourceError(f"none of the {failed} pictures could be read{why}")
    about = _about(model, name, sources) | {"size": size, "fit": "crop", "limit": limit}
    about |= {"pictures": teller.pictures, "failed": failed, "seconds": round(time.perf_counter() - began, 1)}
    told = {budget: each.tell() for budget, each in teller.budgets.items()}
    return CoreStory(about, told, teller.between.tell(), failures)


def _checked(sources: list[str], size: int, limit: int | None, batch: int | None, patch: int) -> list[str]:
    step = math.lcm(patch, PATCH)
    if size < step or size % step:
        near = max(1, round(size / step)) * step
        raise ArgumentError(f"size={size}: must be a positive multiple of {step}. Nearest: {near}")
    for what, value in (("limit", limit), ("batch", batch)):
        if value is not None and value < 1:
            raise ArgumentError(f"{what}={value}: must be at least 1")
    if not sources:
        raise ArgumentError("no pictures given; name files, folders, globs, tar shards or Parquet files")
    for source in sources:
        with noting_left_out() as left_out:
            first = next(expand(source), None)
        if first is None:
            none = f"{source}: no pictures there ({', '.join(sorted(EXTENSIONS))}); shards are named by a glob, as "
            raise SourceError(left_out.after(f"{none}'{os.path.join(source, '*.tar')}'"))
    return sources


def _evenly(items: Iterable[Item], total: int, limit: int) -> Iterator[Item]:
    """`limit` of `total` items, evenly spread; the same ones always."""
    return (item for i, item in enumerate(items) if (i + 1) * limit // total > i * limit // total)


def _batches(records: Iterable[Record], size: int) -> Iterator[list[Record]]:
    """Lists with `size` pictures each, and the bad ones between them; the last may be shorter."""
    group: list[Record] = []
    good = 0
    for record in records:
        group.append(record)
        good += record.pixels is not None
        if good == size:
            yield group
            group, good = [], 0
    if group:
        yield group


def _about(model: Veca, name: str | None, sources: Sequence[str]) -> dict[str, Any]:
    device = model.norm.weight.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "model": name or size_name(model.config) or "custom",
        "sha256": weights_hash(model),
        "provenance": model.provenance,
        "config": model.config.to_dict(),
        "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "sources": list(sources),
        "versions": {"veca": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": where,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class _Likeness:
    """`Kept` on its way."""

    def __init__(self) -> None:
        self.cls, self.patches, self.alignment = Moments(), Moments(), Alignment()

    def add(self, cls: Tensor, patches: Tensor, other_cls: Tensor, other_patches: Tensor) -> None:
        self.cls.add(F.cosine_similarity(cls, other_cls, dim=-1))
        self.patches.add(F.cosine_similarity(patches, other_patches, dim=-1).mean(-1))
        self.alignment.add(cls, other_cls)

    def tell(self) -> Kept:
        return Kept(_spread(self.cls), _spread(self.patches), self.alignment.value)


class _Teller:
    """All numbers of all budgets on their way."""

    def __init__(self, model: Veca, budgets: Sequence[int]) -> None:
        self.model, self.pictures = model, 0
        self.budgets = {budget: _Budget(budget, model.config.core_chunk) for budget in budgets}
        self.between = _Likeness()
        self.last: tuple[Tensor | None, Tensor | None] = None, None

    def add(self, images: Tensor) -> None:
        """Pictures (B, 3, height, width), normalised. The next batch is compared with the last of them."""
        most, layers = self.model.config.num_cores, range(len(self.model.blocks))
        whole = None if most in self.budgets else _features(Veca.forward(self.model, images, most))
        for budget in sorted(self.budgets, reverse=True):  # the whole bank comes first
            seen, out = look_into(self.model, images, budget, layers, _attention_and_heard)
            features = _features(out)
            whole = whole or features
            told = self.budgets[budget]
            attention, heard = (torch.stack(each, dim=1) for each in zip(*seen, strict=True))
            told.add_places(out.coordinates.transpose(0, 1))
            told.add_attention(attention)
            told.add_heard(heard)
            told.kept.add(*features, *whole)
        assert whole is not None
        (cls, cls_before), (patches, patches_before) = (
            _and_before(now, last) for now, last in zip(whole, self.last, strict=True)
        )
        self.between.add(cls, patches, cls_before, patches_before)
        self.last = whole[0][-1:].clone(), whole[1][-1:].clone()
        self.pictures += len(images)


def _attention_and_heard(attn: Any, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Of a layer, (B, C, S), rows that sum to 1, and the mean profile of its patches, (B, C)."""
    piece = PIECE if x.device.type == "cpu" else 16 * PIECE  # a GPU is kept busy by few large steps
    attention, profiles = attention_and_profiles(attn, x, core_rotary, patch_rotary, piece)
    return attention, profiles.mean(1)


def _features(out: VecaOutput) -> tuple[Tensor, Tensor]:
    return tuple(each.to(torch.promote_types(each.dtype, torch.float32)) for each in (out.cls, out.patches))  # type: ignore[return-value]


class _Budget:
    """The numbers of one budget on their way."""

    def __init__(self, cores: int, chunk: int) -> None:
        self.cores, self.chunk = cores, chunk
        self.moves, self.profiles, self.kept = Moments(), Moments(), _Likeness()
        self.start = torch.zeros(cores, 2, dtype=torch.float64)
        self.layers: defaultdict[tuple[str, ...], Moments] = defaultdict(Moments)
        """Of several names each: what comes together is added up together."""
        self.last: Tensor | None = None

    def _note(self, values: dict[str, Tensor], skip_last: bool = False) -> None:
        """Values (B, L) by name, and their mean over layers behind them."""
        stacked = torch.stack(list(values.values()), dim=1)
        some = stacked[..., :-1] if skip_last and stacked.shape[-1] > 1 else stacked
        self.layers[tuple(values)].add(torch.cat([stacked, some.mean(-1, keepdim=True)], dim=-1))

    def add_places(self, coordinates: Tensor) -> None:
        """(B, L, C, 2)"""
        places = exact(coordinates) / 2  # in sides
        self.start = places[0, 0]  # the same for all pictures
        moves = places - self.start
        self.moves.add(moves)
        path = moves.diff(dim=1, prepend=moves[:, :1]).norm(dim=-1).cumsum(1)
        self._note({"distance": moves.norm(dim=-1).mean(-1), "path": path.mean(-1)})

    def add_attention(self, attention: Tensor) -> None:
        """(B, L, C, S), rows that sum to 1."""
        to_cores, to_patches = attention[..., : self.cores], attention[..., self.cores :]
        own = to_cores.diagonal(dim1=-2, dim2=-1)  # (B, L, C)
        masses = {"itself": own, "cores": to_cores.sum(-1) - own, "patches": to_patches.sum(-1)}
        first = {f"first {what}": mass[..., 0] for what, mass in masses.items()}
        self._note(first | {f"other {what}": mass[..., 1:].mean(-1) for what, mass in masses.items()})
        maps = as_maps(to_patches)
        even = overlap(maps, 1 / maps.shape[-1]).mean(-1)
        area = effective_area(maps).mean(-1)
        measures = {"overlap": pair_overlap(maps), "even": even, "area": area, "winners": winners(maps)}
        self._note(measures, skip_last=True)
        now, before = _and_before(maps, self.last)
        self._note({"same core": overlap(now, before).mean(-1)}, skip_last=True)
        self.last = maps[-1:].clone()

    def add_heard(self, profiles: Tensor) -> None:
        """(B, L, C), the mean over patches."""
        self.profiles.add(profiles)
        chunks = profiles.split(self.chunk, dim=-1)
        self._note({"first": profiles[..., 0]} | {f"chunk {i}": chunk.sum(-1) for i, chunk in enumerate(chunks)})

    def tell(self) -> AtBudget:
        told = {
            name: Layers(mean[:-1].tolist(), std[:-1].tolist(), Spread(float(mean[-1]), float(std[-1])))
            for names, moments in self.layers.items()
            for name, mean, std in zip(names, moments.mean, moments.variance.sqrt(), strict=True)
        }
        chunks = [each for name, each in told.items() if name.startswith("chunk")]
        return AtBudget(
            places=self._tell_places(told["distance"], told["path"]),
            maps=Maps(*(told[name] for name in ("overlap", "same core", "even", "area", "winners"))),
            first_core=Looks(*(told[f"first {what}"] for what in ("itself", "cores", "patches"))),
            other_cores=Looks(*(told[f"other {what}"] for what in ("itself", "cores", "patches"))),
            heard=Heard(told["first"], chunks, self.profiles.mean.tolist()),
            kept=self.kept.tell(),
        )

    def _tell_places(self, distance: Layers, path: Layers) -> Places:
        start, mean, variance = self.start.cpu(), self.moves.mean, self.moves.variance.sum(-1)  # (L, C, 2), (L, C)
        shift, scatter = mean.square().sum(-1).mean(-1), variance.mean(-1)
        apart = torch.cdist(start, start).fill_diagonal_(math.inf).amin(-1)
        return Places(
            distance=distance,
            path=path,
            shift=shift.sqrt().tolist(),
            scatter=scatter.sqrt().tolist(),
            picture_share=(scatter / (shift + scatter)).tolist(),
            spacing=float(apart.mean()),
            start=(2 * start).tolist(),
            end=(2 * (start + mean[-1])).tolist(),
            core_scatter=variance[-1].sqrt().tolist(),
        )


def _and_before(now: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pictures (B, ...) and the one before each; the very first has none."""
    return (now[1:], now[:-1]) if last is None else (now, torch.cat([last, now[:-1]]))


def _spread(moments: Moments) -> Spread:
    return Spread(float(moments.mean), float(moments.variance.sqrt()))
