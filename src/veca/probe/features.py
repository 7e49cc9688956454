"""Global features of a split, extracted once and kept: one pass over the pictures for all budgets of a backbone.

A file holds those of so many pictures at one budget. Its name is a hash of all that decides them, so a changed
model, picture or view finds no file, and an interrupted run goes on after its last whole part.

On a CPU the processes that decode run the backbone too, each on one core: none waits for another.

Shapes: N pictures, B of them at once, D width of the features.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset

from veca.checkpoint import write_tensors
from veca.data.datasets.base import Places, Split
from veca.data.transforms import CROP_AREA, CROP_ASPECT, centre_crop, random_resized_crop, seeded_random
from veca.data.workers import WorkerDiedError, WorkerPool
from veca.errors import ArgumentError, VecaError
from veca.images import ImageError, open_image
from veca.images.fit import CROP_RATIO
from veca.probe.backbones import Backbone, Kind
from veca.utils.files import atomic_path
from veca.utils.progress import bar

VERSION = 1
"""Of the code that makes features: to be raised when the same settings give other numbers."""
PART, PART_ON_CPU = 8192, 512
"""Pictures in a file: what a run that is killed loses, minutes of a CPU's work."""
AT_ONCE, AT_ONCE_ON_CPU = 128 * 256 * 256, 8 * 256 * 256
"""Pixels per forward pass, unless told."""
_SAMPLED = 64

ByBudget: TypeAlias = dict[int | None, NDArray[np.float32]]
"""Features (B, D)."""


class PictureError(VecaError, ValueError):
    """Pictures that cannot be read: the message names them."""


@dataclass(frozen=True)
class View:
    """What is seen of each picture: its centre, or a random part, another one in each pass."""

    side: int
    turn: int | None = None
    """The number of a pass of random parts; None: the centre."""
    seed: int = 0
    area: tuple[float, float] = CROP_AREA
    """The share of the picture a random part has."""

    def __call__(self, split: Split, i: int) -> NDArray[np.uint8]:
        image = open_image(split.image(i))
        if self.turn is None:
            return centre_crop(image, self.side).numpy()
        return random_resized_crop(image, self.side, seeded_random(self.seed, self.turn, i), self.area).numpy()

    def about(self) -> dict[str, Any]:
        """As plain data, for keys and protocols."""
        if self.turn is None:
            return {"view": "centre", "side": self.side, "short_side": round(self.side * CROP_RATIO)}
        parts = {"view": "random resized crop and flip", "area": list(self.area), "aspect": list(CROP_ASPECT)}
        return {**parts, "side": self.side, "pass": self.turn, "seed": self.seed}


class Features(NamedTuple):
    values: Tensor
    """(N, D) float32; zeros where a picture is bad."""
    bad: dict[int, str]
    """Pictures that could not be read: number, and name with reason."""


@dataclass(frozen=True)
class Extraction:
    """How features are had: from which backbone, of what kind, and where they are kept."""

    backbone: Backbone
    folder: Path
    kind: Kind = "cls"
    at_once: int | None = None
    """Pictures per forward pass; None: by their size."""
    workers: int = 0
    """Processes that decode, and on a CPU compute; 0: this one does."""
    progress: bool = True
    tried: set[tuple[int | None, ...]] = dataclasses.field(default_factory=set, init=False, compare=False)
    """Side and budgets with which `try_alone` has run."""

    def batch(self, side: int) -> int:
        pixels = AT_ONCE_ON_CPU if self.backbone.device.type == "cpu" else AT_ONCE
        return self.at_once or max(1, pixels // side**2)

    def parts(self, split: Split) -> list[range]:
        """The pictures of each file."""
        most = PART_ON_CPU if self.backbone.device.type == "cpu" else PART
        return [range(start, min(start + most, len(split))) for start in range(0, len(split), most)]

    def key(self, split: Split, view: View, cores: int | None) -> str:
        """A hash of everything the features depend on."""
        return digest_of(
            version=VERSION, backbone=self.backbone.identity, pictures=content(split), view=view.about(),
            cores=cores, kind=self.kind, batch=self.batch(view.side),
        )  # fmt: skip

    def run(self, split: Split, view: View, budgets: Sequence[int | None], what: str) -> float:
        """See to it that the features of `split` at all `budgets` are on disk; the seconds it took."""
        began = time.perf_counter()
        keys = {cores: self.key(split, view, cores) for cores in budgets}
        todo = {
            (number, part): missing
            for number, part in enumerate(self.parts(split))
            if (missing := [c for c in budgets if _read(self._file(keys[c], number), len(part)) is None])
        }
        if not todo:
            return 0.0
        step = self.batch(view.side)
        numbers = {part[i : i + step]: lacks for (_, part), lacks in todo.items() for i in range(0, len(part), step)}
        collate: Callable[[Any], Any] = functools.partial(stack, view.side)
        if forked := self.workers > 0 and self.backbone.forks:
            self.try_alone(view.side, budgets)
            collate = _Computing(self, view.side, {batch.start: lacks for batch, lacks in numbers.items()})
        with (
            decoding(Pictures(split, view), numbers, min(self.workers, len(numbers)), collate, forked) as batches,
            bar(what, sum(len(part) for _, part in todo), "pictures", self.progress) as advance,
        ):
            for (number, part), missing in todo.items():
                found: dict[int | None, list[NDArray[Any]]] = {cores: [] for cores in missing}
                bad: dict[int, str] = {}
                for start in range(0, len(part), step):
                    made, errors = next(batches)
                    bad |= errors
                    for cores, values in (made if forked else self.features(made, missing)).items():
                        found[cores].append(values)
                    advance(len(part[start : start + step]))
                for cores in missing:
                    whole = np.concatenate(found[cores])
                    whole[[i - part.start for i in bad]] = 0
                    _write(self._file(keys[cores], number), torch.from_numpy(whole), bad)
        return time.perf_counter() - began

    def features(self, pixels: NDArray[np.uint8], budgets: Sequence[int | None]) -> ByBudget:
        """Of pictures (B, 3, side, side), at each budget (B, D)."""
        count, side = len(pixels), pixels.shape[-1]
        # The last ones get a batch like all others: computed the same way, and never compiled for.
        if missing := self.batch(side) - count:
            pixels = np.pad(pixels, ((0, missing), (0, 0), (0, 0), (0, 0)))
        images = self.backbone.prepare(torch.from_numpy(pixels))
        made = {cores: self.backbone.global_feature(images, cores, self.kind)[:count] for cores in budgets}
        return {cores: values.cpu().numpy() for cores, values in made.items()}

    def try_alone(self, side: int, budgets: Sequence[int | None]) -> None:
        """Run the backbone as forked processes will, once: what it compiles they have, what is wrong is said here."""
        if (side, *budgets) in self.tried:
            return
        self.tried.add((side, *budgets))
        # The compiler takes sizes that are equal at first for the same. Most others here are powers of two.
        budgets = sorted(budgets, key=lambda cores: cores is not None and cores.bit_count() == 1)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a forked process waits for ever for the threads it does not have
        try:
            self.features(np.zeros((self.batch(side), 3, side, side), np.uint8), budgets)
        finally:
            torch.set_num_threads(threads)

    def load(self, split: Split, view: View, cores: int | None) -> Features:
        """What `run` left on disk."""
        key = self.key(split, view, cores)
        values: list[Tensor] = []
        bad: dict[int, str] = {}
        for number, part in enumerate(self.parts(split)):
            kept = _read(self._file(key, number), len(part))
            if kept is None:
                raise ArgumentError(f"{self._file(key, number)} is damaged or gone since it was written; run it again")
            values.append(kept.values)
            bad |= kept.bad
        return Features(torch.cat(values), bad)

    def _file(self, key: str, part: int) -> Path:
        return self.folder / f"{key}-{part:03d}.safetensors"


def digest_of(**parts: Any) -> str:
    """A hash of plain data, 32 hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=16)
def content(split: Split) -> str:
    """A hash of the names and sizes of pictures (and masks or depths), and of the bytes of up to 64 spread over all.

    So pictures that were replaced or mended under the same names are noticed, without all of them being read.
    """
    digest = hashlib.sha256(split.digest())
    for places in (split.images, *([split.maps.places] if split.maps else [])):
        digest.update(np.ascontiguousarray(places.sizes(), "<i8").data)
        for i in spread(len(places), _SAMPLED):
            digest.update(hashlib.sha256(_bytes(places, i)).digest())
    return digest.hexdigest()


def spread(count: int, most: int) -> list[int]:
    """Up to `most` numbers below `count`, evenly spread; the same ones always."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist() if count else []


def _bytes(places: Places, i: int) -> bytes:
    try:
        found = places.read(i)
        return found if isinstance(found, bytes) else Path(found).read_bytes()
    except (OSError, ImageError):  # it will be among the bad ones
        return b""


@contextmanager
def decoding(
    items: Any,
    numbers: Iterable[Sequence[Any]],
    workers: int,
    collate: Callable[[Any], Any] = list,
    forked: bool = False,
) -> Iterator[Iterator[Any]]:
    """The items of each list of `numbers` in turn, made by so many processes (0: by this one) while the block runs.

    `forked` processes have all that this one has, such as a compiled model.
    """
    try:
        with WorkerPool(_Batches(items, collate), map(list, numbers), workers, fork=forked) as batches:
            yield batches
    except RuntimeError as error:  # a builtin: one that is left unfinished ends when modules are gone
        if isinstance(error, torch.OutOfMemoryError):
            raise ArgumentError("no memory on the device: lower --batch-size") from error
        if not isinstance(error, WorkerDiedError):
            raise
        raise ArgumentError(
            f"a decoding process died: {error}. Most often memory ran out: take fewer --workers. What is done is kept"
        ) from error


@dataclass(frozen=True)
class _Batches:
    """The items of a list of numbers, collated."""

    items: Any
    collate: Callable[[Any], Any]

    def __call__(self, numbers: Sequence[Any]) -> Any:
        return self.collate([self.items[i] for i in numbers])


def shuffled(
    count: int, batch: int, steps: range, seed: int, rank: int = 0, size: int = 1
) -> Iterator[list[tuple[int, int]]]:
    """For each step its places in the endless row of epochs, each with its picture, one of `count`.

    Of a batch for `size` processes these are the places of one of them.
    """
    epoch, order = -1, np.arange(count)
    own = batch // size
    for step in steps:
        chosen = []
        first = step * batch + rank * own
        for place in range(first, first + own):
            if place // count != epoch:
                epoch = place // count
                order = np.random.default_rng([seed, epoch]).permutation(count)
            chosen.append((place, int(order[place % count])))
        yield chosen


class Pictures(Dataset[Any]):
    """Pictures by number, as a view has them: number and pixels, or the number and why there are none."""

    def __init__(self, split: Split, view: View) -> None:
        self.split, self.view = split, view

    def __getitem__(self, i: int) -> tuple[int, NDArray[np.uint8] | str]:
        try:
            return i, self.view(self.split, i)
        except (ImageError, OSError) as error:
            return i, reason(self.split, i, error)


def reason(split: Split, i: int, error: Exception) -> str:
    """Name of a bad picture, and why."""
    text = str(error).removeprefix("<bytes>: ").removeprefix(f"{split.images.path(i)}: ")
    return f"{split.name(i)}: {text}"[:1000]


def stack(side: int, found: Sequence[tuple[int, Any]]) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """Pixels (B, 3, side, side), black where a picture is bad, and who is. Arrays: tensors take shared memory."""
    bad = {i: pixels for i, pixels in found if isinstance(pixels, str)}
    black = np.zeros((3, side, side), np.uint8)
    return np.stack([black if isinstance(pixels, str) else pixels for _, pixels in found]), bad


@dataclass(frozen=True)
class _Computing:
    """Pictures to features and who is bad: what a process does that computes too."""

    extraction: Extraction
    side: int
    budgets: Mapping[int, Sequence[int | None]]
    """By the first picture of a batch."""

    def __call__(self, found: Sequence[tuple[int, Any]]) -> tuple[ByBudget, dict[int, str]]:
        pixels, bad = stack(self.side, found)
        with self.extraction.backbone.as_forked():
            return self.extraction.features(pixels, self.budgets[found[0][0]]), bad


def _write(path: Path, values: Tensor, bad: Mapping[int, str]) -> None:
    described = {"digest": _digest(values), "bad": {str(i): why for i, why in bad.items()}}
    with atomic_path(path) as part:
        write_tensors(part, {"features": values.contiguous()}, {"veca": json.dumps(described)})


def _read(path: Path, count: int) -> Features | None:
    """A part that is whole; None where there is none, or it is damaged: it is made again then."""
    try:
        with safe_open(path, framework="pt") as file:
            described = json.loads((file.metadata() or {})["veca"])
            values = file.get_tensor("features")
        bad = {int(i): str(why) for i, why in described["bad"].items()}
        return Features(values, bad) if len(values) == count and described["digest"] == _digest(values) else None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(values: Tensor) -> str:
    return hashlib.blake2b(values.contiguous().numpy().data, digest_size=16).hexdigest()


def without_bad(features: Features, labels: Tensor, skip: bool, where: str) -> tuple[Tensor, Tensor]:
    """Features and labels of the pictures that could be read; unless `skip`, all of them must be."""
    values, bad = features
    if not bad:
        return values, labels
    if not skip:
        raise PictureError(
            f"{len(bad):,} of {len(values):,} pictures of {where} cannot be read: {listed(list(bad.values()))}. "
            "Mend them, or leave them out with --skip-bad"
        )
    kept = torch.ones(len(values), dtype=torch.bool)
    kept[list(bad)] = False
    return values[kept], labels[kept]


def listed(bad: Sequence[str], most: int = 5) -> str:
    more = f" … and {len(bad) - most:,} more" if len(bad) > most else ""
    return "; ".join(bad[:most]) + more


def as_plain(settings: Any, *leave_out: str) -> dict[str, Any]:
    """A dataclass as plain data, without some of its fields."""
    return {k: v for k, v in dataclasses.asdict(settings).items() if k not in leave_out}
