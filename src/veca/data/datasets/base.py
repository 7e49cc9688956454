"""What a dataset is to the probes: pictures by number, and a label, mask or depth for each.

Names are kept as one run of bytes and labels as one array, so that a million pictures cost little memory and go to
worker processes in one piece. Nothing is opened before it is asked for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from veca.data.datasets.matlab import MatError, load_mat
from veca.data.remote import as_text, read_span
from veca.errors import VecaError
from veca.images import ImageError, open_values

Task = Literal["classify", "multilabel", "segment", "depth"]

IGNORE = 255
"""The value of pixels that count neither in training nor in the score."""
HELD_OUT = 0.1
"""The share of train that becomes val where a benchmark has none."""


class DatasetError(VecaError, ValueError):
    """A dataset that cannot be had; the message says what is missing, and the layout that is expected."""


class Places:
    """Where things lie: files under `root`, or spans of such files, named `file\\0member`."""

    def __init__(self, root: str | os.PathLike[str], names: Sequence[str], spans: NDArray[np.int64] | None = None):
        if outside := next((name for name in names if ".." in name and ".." in name.split("/")), None):
            raise DatasetError(f"the lists name {outside!r}, which is outside the dataset's folder")
        parts = [os.fsencode(name) for name in names]
        self.root, self._spans = os.fspath(root), spans
        self._ends = np.cumsum([0, *map(len, parts)])
        self._names = b"".join(parts)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def text(self, i: int) -> str:
        """The name as it was given."""
        if not 0 <= i < len(self):
            raise IndexError(f"item {i}; there are {len(self):,}")
        return os.fsdecode(self._names[self._ends[i] : self._ends[i + 1]])

    def name(self, i: int) -> str:
        return as_text(self.text(i).replace("\0", "/"))

    def path(self, i: int) -> str:
        """The file that holds item `i`."""
        return os.path.join(self.root, self.text(i).partition("\0")[0])

    def read(self, i: int) -> str | bytes:
        """Item `i` as `veca.images.open_image` takes it: the path of a file, or bytes."""
        if self._spans is None:
            return self.path(i)
        offset, size = self._spans[i].tolist()
        return read_span(self.path(i), offset, size)

    def take(self, which: Iterable[int]) -> Places:
        which = list(which)
        spans = None if self._spans is None else self._spans[which]
        return type(self)(self.root, [self.text(i) for i in which], spans)

    def sizes(self) -> NDArray[np.int64]:
        """In bytes, of each item; -1 where it is not to be found."""
        if self._spans is not None:
            return self._spans[:, 1]
        return np.array([_size(self.path(i)) for i in range(len(self))], np.int64)

    def digest(self) -> bytes:
        """A hash of the names, not of where the folder lies."""
        blob = hashlib.sha256(np.ascontiguousarray(self._ends, "<i8").data)
        blob.update(self._names)
        return blob.digest()


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


class Maps:
    """Masks or depths beside pictures, decoded when asked for.

    A mask's values become train ids by `table`, in which -1 stands at values that must not occur. With `per_metre`
    the maps are depths, so many units to the metre. With `variable` the files are MATLAB's and the map has that name.
    """

    def __init__(
        self, places: Places, table: NDArray[np.int16] | None = None, per_metre: float = 0, variable: str = ""
    ) -> None:
        self.places, self.table, self.per_metre, self.variable = places, table, per_metre, variable

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> NDArray[Any]:
        try:
            return self._decoded(self.places.read(i))
        except (ImageError, MatError, OSError) as error:
            reason = str(error).removeprefix("<bytes>: ").removeprefix(f"{self.places.path(i)}: ")
            raise ImageError(f"{self.places.name(i)}: {reason}") from error

    def _decoded(self, source: str | bytes) -> NDArray[Any]:
        values = self.values(source)
        if self.per_metre:
            return values.astype(np.float32) / np.float32(self.per_metre)
        if self.table is None:
            return values
        ids = self.table[np.minimum(values, len(self.table) - 1)]
        bad = (ids < 0) | (values >= len(self.table))
        if bad.any():
            raise ImageError(f"the mask has value {values[bad][0]}, which is no class here. Is it of another dataset?")
        return ids.astype(np.uint8 if self.table.max() < 256 else np.uint16)

    def values(self, source: str | bytes) -> NDArray[Any]:
        """The numbers in the file, before `table`."""
        if not self.variable:
            return open_values(source)
        values = np.asarray(load_mat(str(source), self.variable)[self.variable])
        if values.ndim != 2 or values.dtype not in (np.uint8, np.uint16):
            about = f"{self.variable} is {values.dtype} of shape {values.shape}"
            raise ImageError(f"{about}; masks are uint8 or uint16 of two dimensions")
        return values

    def take(self, which: Iterable[int]) -> Maps:
        return Maps(self.places.take(which), self.table, self.per_metre, self.variable)

    def digest(self) -> bytes:
        blob = hashlib.sha256(self.places.digest())
        blob.update(f"{self.per_metre} {self.variable}".encode())
        blob.update(b"" if self.table is None else np.ascontiguousarray(self.table, "<i2").data)
        return blob.digest()


class Split:
    """Pictures with their labels: class numbers (N,), rows of 1, 0 and -1 = ignored (N, classes), or maps."""

    def __init__(self, images: Places, targets: NDArray[Any] | Maps) -> None:
        if len(images) != len(targets):
            raise DatasetError(f"{len(images):,} pictures but {len(targets):,} labels")
        self.images, self._targets = images, targets

    def __len__(self) -> int:
        return len(self.images)

    def name(self, i: int) -> str:
        return self.images.name(i)

    def image(self, i: int) -> str | bytes:
        """Picture `i` as `veca.images.open_image` takes it."""
        return self.images.read(i)

    def label(self, i: int) -> Any:
        """A class number; a row of 1, 0 and -1; a mask (height, width) in train ids; or float32 metres, 0 = invalid."""
        if not 0 <= i < len(self):
            raise IndexError(f"item {i}; there are {len(self):,}")
        found = self._targets[i]
        return int(found) if np.ndim(found) == 0 else found

    @property
    def maps(self) -> Maps | None:
        """Where masks or depths come from; None in classification."""
        return self._targets if isinstance(self._targets, Maps) else None

    @property
    def labels(self) -> NDArray[Any]:
        """All labels of a classification split at once."""
        if isinstance(self._targets, Maps):
            raise TypeError("masks and depths are read one by one: label(i)")
        return self._targets

    def take(self, which: Iterable[int]) -> Split:
        which = [int(i) for i in which]
        maps = self.maps
        return Split(self.images.take(which), self.labels[which] if maps is None else maps.take(which))

    def digest(self) -> bytes:
        digest = hashlib.sha256(self.images.digest())
        if isinstance(self._targets, Maps):
            digest.update(self._targets.digest())
        else:
            digest.update(np.ascontiguousarray(self._targets, self._targets.dtype.newbyteorder("<")).data)
        return digest.digest()


@dataclass(frozen=True)
class DepthRules:
    """How a depth benchmark is scored: pixels whose true depth lies between the two, within `crop`, in metres.

    `input_crop` (height, width) is what the literature keeps of every picture, at the bottom centre.
    """

    min_depth: float = 1e-3
    max_depth: float = 10.0
    crop: Literal["none", "eigen", "garg"] = "none"
    input_crop: tuple[int, int] | None = None

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """The scored part of a picture as (top, bottom, left, right).

        >>> DepthRules(crop="eigen").box(480, 640), DepthRules(crop="garg").box(375, 1242)
        ((45, 471, 41, 601), (153, 371, 44, 1197))
        """
        if self.crop == "eigen":  # given in pixels of 480 × 640
            return 45 * height // 480, 471 * height // 480, 41 * width // 640, 601 * width // 640
        if self.crop == "garg":
            top, bottom = int(0.40810811 * height), int(0.99189189 * height)
            return top, bottom, int(0.03594771 * width), int(0.96405229 * width)
        return 0, height, 0, width


@dataclass(frozen=True)
class ProbeData:
    """A dataset as the probes take it.

    `splits` are train, val and test as far as there are any; the score is that of `report`. `protocol` is plain data
    for reports, among it how splits came about. `problems` tells where this copy is not what was published.
    """

    name: str
    task: Task
    classes: list[str]
    splits: dict[str, Split]
    ignore: int | None = None
    depth: DepthRules | None = None
    protocol: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def report(self) -> str:
        """The split whose score is the benchmark's: test, or val where test has no public labels."""
        return "test" if "test" in self.splits else "val"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of names, labels and splits, wherever the folder lies; of masks, their names and class mapping."""
        digest = hashlib.sha256(f"veca dataset 1 {self.task} {self.ignore} {self.classes}".encode())
        for name, split in sorted(self.splits.items()):
            digest.update(name.encode() + split.digest())
        return digest.hexdigest()


def held_out(split: Split, share: float = HELD_OUT, groups: Sequence[Any] | None = None) -> tuple[Split, Split]:
    """A split in two, the second with `share` of the pictures; the same ones for ever.

    Of every class the pictures whose names have the lowest hashes are taken: `share` of them, rounded, at least one of
    two. With `groups` whole groups go instead, as frames of one scene would give the other half away.
    """
    if groups is None:
        second = lowest(split, lambda count: min(max(1, int(count * share + 0.5)), count - 1))
    else:
        names, which = np.unique(np.asarray(groups, str), return_inverse=True)
        taken: list[int] = []
        # At least one group, and never all.
        for group in sorted(range(len(names)), key=lambda group: _hash(str(names[group])))[:-1]:
            if taken and np.isin(which, taken).sum() >= share * len(split):
                break
            taken.append(group)
        second = np.isin(which, taken)
    return split.take(np.flatnonzero(~second)), split.take(np.flatnonzero(second))


def lowest(split: Split, how_many: Callable[[int], int]) -> NDArray[np.bool_]:
    """Which pictures have the lowest hashes of their names in their class, `how_many` of so many in it."""
    plain = split.maps is None and split.labels.ndim == 1
    members: dict[int, list[int]] = {}
    for i, key in enumerate(split.labels.tolist() if plain else [0] * len(split)):
        members.setdefault(key, []).append(i)
    chosen = np.zeros(len(split), bool)
    for rows in members.values():
        chosen[sorted(rows, key=lambda i: _hash(split.name(i)))[: how_many(len(rows))]] = True
    return chosen


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
