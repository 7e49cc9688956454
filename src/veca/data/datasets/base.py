"""The in-memory form of a labelled dataset: lists of files, splits with labels, masks or depths.

Names are one run of bytes and labels one array, so that a million images take little memory and are sent to worker
processes in one piece. Nothing is opened before it is asked for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from veca.data.datasets.matlab import MatError, load_mat
from veca.data.remote import as_text, read_span
from veca.errors import VecaError
from veca.images import ImageError, open_values

LabelTask = Literal["classify", "multilabel", "segment", "depth"]

IGNORE = 255
"""The value of pixels that count neither in training nor in scoring."""
HELD_OUT = 0.1
"""The share of train that becomes val where a benchmark has none."""
HASHED_FILES = 64
"""At most this many files of a split have their bytes hashed."""


class DatasetError(VecaError, ValueError):
    """A dataset cannot be read; the message says what is missing and which layout is expected."""


class FileList:
    """Files under `root`, or spans of such files, named `file\\0member`."""

    def __init__(self, root: str | os.PathLike[str], names: Sequence[str], spans: NDArray[np.int64] | None = None):
        # Names come from lists in downloaded archives: they must not lead out of the folder.
        if outside := next((name for name in names if ".." in name and ".." in name.split("/")), None):
            raise DatasetError(f"the lists name {outside!r}, which is outside the dataset's folder")
        # fsencode: a file name need not be valid UTF-8.
        parts = [os.fsencode(name) for name in names]
        self.root, self._spans = os.fspath(root), spans
        self._ends = np.cumsum([0, *map(len, parts)])
        self._names = b"".join(parts)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def text(self, i: int) -> str:
        """Return the name as it was given."""
        if not 0 <= i < len(self):
            raise IndexError(f"item {i}; there are {len(self):,}")
        return os.fsdecode(self._names[self._ends[i] : self._ends[i + 1]])

    def name(self, i: int) -> str:
        return as_text(self.text(i).replace("\0", "/"))

    def path(self, i: int) -> str:
        """Return the path of the file that holds item `i`."""
        return os.path.join(self.root, self.text(i).partition("\0")[0])

    def read(self, i: int) -> str | bytes:
        """Return item `i` as `veca.images.open_image` takes it: the path of a file, or bytes."""
        if self._spans is None:
            return self.path(i)
        offset, size = self._spans[i].tolist()
        return read_span(self.path(i), offset, size)

    def read_bytes(self, i: int) -> bytes:
        """Return the bytes of item `i`; none where it cannot be read, which is reported when it is decoded."""
        try:
            data = self.read(i)
            return data if isinstance(data, bytes) else Path(data).read_bytes()
        except (OSError, ImageError):
            return b""

    def take(self, indices: Iterable[int]) -> FileList:
        indices = list(indices)
        spans = None if self._spans is None else self._spans[indices]
        return type(self)(self.root, [self.text(i) for i in indices], spans)

    def sizes(self) -> NDArray[np.int64]:
        """Return the size of each item in bytes; -1 where it is missing."""
        if self._spans is not None:
            return self._spans[:, 1]
        return np.array([_file_size(self.path(i)) for i in range(len(self))], np.int64)

    def digest(self) -> bytes:
        """Return a hash of the names, but not of the folder's path."""
        return _sha256(np.ascontiguousarray(self._ends, "<i8").data, self._names)


def _sha256(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def evenly_spaced(count: int, limit: int) -> list[int]:
    """Return up to `limit` numbers below `count`, evenly spaced and always the same."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int)).tolist() if count else []


def _file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


@dataclass(frozen=True, eq=False)
class LabelMaps:
    """Masks or depth maps, decoded when asked for.

    The values of masks become train ids by `train_ids`, which has -1 for values that must not occur. With
    `units_per_metre` the maps are depths. With `variable` the files are MATLAB's and the map is the variable so named.
    """

    files: FileList
    train_ids: NDArray[np.int16] | None = None
    units_per_metre: float = 0
    variable: str = ""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> NDArray[Any]:
        try:
            return self._decode(self.files.read(i))
        except (ImageError, MatError, OSError) as error:
            reason = str(error).removeprefix("<bytes>: ").removeprefix(f"{self.files.path(i)}: ")
            raise ImageError(f"{self.files.name(i)}: {reason}") from error

    def _decode(self, source: str | bytes) -> NDArray[Any]:
        values = self.values(source)
        if self.units_per_metre:
            return values.astype(np.float32) / np.float32(self.units_per_metre)
        if self.train_ids is None:
            return values
        # Clamped first, as a value beyond the table would be an IndexError that names neither value nor file.
        ids = self.train_ids[np.minimum(values, len(self.train_ids) - 1)]
        bad = (ids < 0) | (values >= len(self.train_ids))
        if bad.any():
            value = values[bad][0]
            raise ImageError(f"the mask has value {value}, which is not a class of this dataset. Is it from another?")
        return ids.astype(np.uint8 if self.train_ids.max() < 256 else np.uint16)

    def values(self, source: str | bytes) -> NDArray[Any]:
        """Return the values in the file, before `train_ids`."""
        if not self.variable:
            return open_values(source)
        values = np.asarray(load_mat(str(source), self.variable)[self.variable])
        if values.ndim != 2 or values.dtype not in (np.uint8, np.uint16):
            actual = f"{self.variable} is {values.dtype} of shape {values.shape}"
            raise ImageError(f"{actual}; masks are uint8 or uint16 of two dimensions")
        return values

    def take(self, indices: Iterable[int]) -> LabelMaps:
        return replace(self, files=self.files.take(indices))

    def digest(self) -> bytes:
        train_ids = b"" if self.train_ids is None else np.ascontiguousarray(self.train_ids, "<i2").data
        return _sha256(self.files.digest(), f"{self.units_per_metre} {self.variable}".encode(), train_ids)


class Split:
    """Images with labels: class numbers (N,), rows of 1, 0 and -1 = ignored (N, classes), or maps."""

    def __init__(self, images: FileList, targets: NDArray[Any] | LabelMaps) -> None:
        if len(images) != len(targets):
            raise DatasetError(f"{len(images):,} pictures but {len(targets):,} labels")
        self.images, self._targets = images, targets

    def __len__(self) -> int:
        return len(self.images)

    def name(self, i: int) -> str:
        return self.images.name(i)

    def image(self, i: int) -> str | bytes:
        """Return image `i` as `veca.images.open_image` takes it."""
        return self.images.read(i)

    def label(self, i: int) -> Any:
        """Return a class number, a row of 1, 0 and -1, or a map (height, width): train ids, or metres with 0 = none."""
        if not 0 <= i < len(self):
            raise IndexError(f"item {i}; there are {len(self):,}")
        label = self._targets[i]
        return int(label) if np.ndim(label) == 0 else label

    @property
    def maps(self) -> LabelMaps | None:
        """The masks or depths; None in classification."""
        return self._targets if isinstance(self._targets, LabelMaps) else None

    @property
    def labels(self) -> NDArray[Any]:
        """All labels of a classification split at once."""
        if isinstance(self._targets, LabelMaps):
            raise TypeError("masks and depths are read one by one: label(i)")
        return self._targets

    def take(self, indices: Iterable[int]) -> Split:
        indices = [int(i) for i in indices]
        maps = self.maps
        return Split(self.images.take(indices), self.labels[indices] if maps is None else maps.take(indices))

    @cached_property
    def content_hash(self) -> str:
        """A hash of names and file sizes of images (and label maps), and of the bytes of a sample of them.

        So files that were replaced under the same names are noticed without reading all of them.
        """
        parts: list[bytes | memoryview] = [self.digest()]
        for files in (self.images, *([self.maps.files] if self.maps else [])):
            sample = evenly_spaced(len(files), HASHED_FILES)
            parts += [np.ascontiguousarray(files.sizes(), "<i8").data, *(_sha256(files.read_bytes(i)) for i in sample)]
        return _sha256(*parts).hex()

    def digest(self) -> bytes:
        if isinstance(self._targets, LabelMaps):
            return _sha256(self.images.digest(), self._targets.digest())
        labels = np.ascontiguousarray(self._targets, self._targets.dtype.newbyteorder("<"))
        return _sha256(self.images.digest(), labels.data)


@dataclass(frozen=True)
class DepthRules:
    """How a depth benchmark is scored: pixels with true depths in metres between the two limits, within `crop`.

    `input_crop` (height, width) is the part of every image that the literature uses, at the bottom centre.
    """

    min_depth: float = 1e-3
    max_depth: float = 10.0
    crop: Literal["none", "eigen", "garg"] = "none"
    input_crop: tuple[int, int] | None = None

    def box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the scored region of an image as (top, bottom, left, right).

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
    """A labelled dataset for probes and fine-tuning.

    `splits` are those of train, val and test that exist; the score is that of `report`. `protocol` is plain data for
    reports, such as how splits were made. `problems` says where this copy is not what was published.
    """

    name: str
    task: LabelTask
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
        """A hash of names, labels and splits, but not of the folder's path; of masks, their names and class mapping."""
        splits = (name.encode() + split.digest() for name, split in sorted(self.splits.items()))
        return _sha256(f"veca dataset 1 {self.task} {self.ignore} {self.classes}".encode(), *splits).hex()


def held_out(split: Split, share: float = HELD_OUT, groups: Sequence[Any] | None = None) -> tuple[Split, Split]:
    """Divide a split in two, the second with `share` of the images; always the same ones.

    Of every class those with the lowest hashes of their names are taken: `share` of them, rounded, but at least one if
    there are two. With `groups` whole groups are taken instead: frames of one scene would give the other half away.
    """
    if groups is None:
        second = lowest_hashes(split, lambda count: min(max(1, int(count * share + 0.5)), count - 1))
    else:
        names, group_of = np.unique(np.asarray(groups, str), return_inverse=True)
        taken: list[int] = []
        # At least one group, and never all.
        for group in sorted(range(len(names)), key=lambda group: _hash_name(str(names[group])))[:-1]:
            if taken and np.isin(group_of, taken).sum() >= share * len(split):
                break
            taken.append(group)
        second = np.isin(group_of, taken)
    return split.take(np.flatnonzero(~second)), split.take(np.flatnonzero(second))


def lowest_hashes(split: Split, how_many: Callable[[int], int]) -> NDArray[np.bool_]:
    """Return a mask of the images with the lowest hashes of names in each class; `how_many` gives their number."""
    has_classes = split.maps is None and split.labels.ndim == 1
    members: dict[int, list[int]] = {}
    for i, label in enumerate(split.labels.tolist() if has_classes else [0] * len(split)):
        members.setdefault(label, []).append(i)
    chosen = np.zeros(len(split), bool)
    for images in members.values():
        chosen[sorted(images, key=lambda i: _hash_name(split.name(i)))[: how_many(len(images))]] = True
    return chosen


def _hash_name(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
