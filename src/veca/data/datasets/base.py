"""The in-memory form of a labelled dataset, and the reading of text lists, MATLAB files and folders of images.

Nothing is opened before it is asked for; splits are small enough to be sent to worker processes.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from veca.data.index import ImageIndex
from veca.data.sources import list_files
from veca.errors import VecaError, needs_extra
from veca.images import ImageError, open_values
from veca.utils.settings import Settings

LabelTask = Literal["classify", "multilabel", "segment", "depth"]

IGNORE = 255
"""The value of pixels that count neither in training nor in scoring."""
HELD_OUT = 0.1
"""The share of train that becomes val where a benchmark has none."""
HASHED_FILES = 64
"""At most this many files of a split have their bytes hashed."""
_CHECKED_FILES = 1000
"""So many files of a list are checked to exist."""
_MAX_LIST_BYTES = 1 << 28
"""Of a list, or of a MATLAB file when unpacked: the longest list, that of Places365, has 60 million bytes."""
_COMPRESSED = 15
"""Tag of a compressed element in the MAT format (miCOMPRESSED)."""


class DatasetError(VecaError, ValueError):
    """A dataset cannot be read; the message says what is missing and which layout is expected."""


def read_lines(path: Path) -> list[str]:
    """Read the non-empty lines of a list, stripped."""
    if (size := path.stat().st_size) > _MAX_LIST_BYTES:
        raise DatasetError(f"{path} has {size:,} bytes; at most {_MAX_LIST_BYTES:,} are read of a list")
    return [line.strip() for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]


def read_columns(path: Path, columns: int) -> list[list[str]]:
    """Split the lines of a list into words; fewer than `columns` are an error, as it cannot be the right list."""
    rows = [line.split() for line in read_lines(path)]
    if short := next((row for row in rows if len(row) < columns), None):
        raise DatasetError(f"{path} has the line {' '.join(short)!r}; {columns} words are expected")
    return rows


def load_mat(path: Path, *names: str) -> dict[str, Any]:
    """Return the variables `names` of a .mat file, without dimensions of size one."""
    with needs_extra(f"{path}: needs", "eval"):
        from scipy.io import loadmat
    try:
        _check_unpacked_size(path)
        variables: dict[str, Any] = loadmat(path, squeeze_me=True, variable_names=list(names))
    except DatasetError:
        raise
    except Exception as error:  # damaged files surface as almost anything
        reason = f"{type(error).__name__}: {error}"
        raise DatasetError(f"{path}: not a MATLAB file, or damaged ({reason}); get it again") from error
    if missing := [name for name in names if name not in variables]:
        raise DatasetError(f"{path}: has no {', '.join(missing)}; is it of another dataset?")
    return {name: variables[name] for name in names}


def _check_unpacked_size(path: Path) -> None:
    """Refuse a .mat file that unpacks to too much: SciPy would fill the memory with it."""
    size = path.stat().st_size
    left = _MAX_LIST_BYTES - size  # bytes that it may still unpack to
    with open(path, "rb") as file:
        header = file.read(128)  # text, version, and "IM" or "MI" for the byte order
        order = "<" if header[126:128] == b"IM" else ">"
        while left >= 0 and len(tag := file.read(8)) == 8:
            kind, length = struct.unpack(f"{order}II", tag)
            if kind != _COMPRESSED:
                file.seek(length, os.SEEK_CUR)
                continue
            # Unpacked a megabyte at a time and thrown away: only the size matters here.
            unpacker, packed = zlib.decompressobj(), file.read(min(length, size))
            while packed and left >= 0 and not unpacker.eof:
                left -= len(unpacker.decompress(packed, 1 << 20))
                packed = unpacker.unconsumed_tail
    if left < 0:
        raise DatasetError(f"{path}: more than {_MAX_LIST_BYTES:,} bytes when unpacked; is it the right file?")


def subfolders(folder: Path) -> list[str]:
    """Return the sorted names of the folders in `folder` that are not hidden."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def images_in(root: Path, folder: str) -> list[str]:
    """Return the sorted paths, relative to `root`, of all images under one of its folders."""
    if not (root / folder).is_dir():
        raise DatasetError(f"{root} has no folder {folder}")
    items = list(list_files(str(root / folder))[1])
    if bad := next((item for item in items if item.error), None):
        raise DatasetError(f"{bad.name}: {bad.error}")
    start = len(str(root)) + 1  # not os.path.relpath, which is slow for a million files
    return [item.path[start:] for item in items]


def first_existing(root: Path, *names: str) -> str:
    """Return the first name that exists in `root`, where the same thing goes by several names."""
    for name in names:
        if (root / name).exists():
            return name
    raise DatasetError(f"{root} has no {' or '.join(names)}")


def _sha256(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def evenly_spaced(count: int, limit: int) -> list[int]:
    """Return up to `limit` numbers below `count`, evenly spaced and always the same."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int)).tolist() if count else []


@dataclass(frozen=True, eq=False)
class LabelMaps:
    """Masks or depth maps, decoded when asked for.

    The values of masks become train ids by `train_ids`, which has -1 for values that must not occur. With
    `units_per_metre` the maps are depths. With `variable` the files are MATLAB's and the map is the variable so named.
    """

    files: ImageIndex
    train_ids: NDArray[np.int16] | None = None
    units_per_metre: float = 0
    variable: str = ""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> NDArray[Any]:
        try:
            return self._decode(self.files.read(i))
        except (ImageError, DatasetError, OSError) as error:
            reason = str(error).removeprefix("<bytes>: ").removeprefix(f"{self.files.path(i)}: ")
            raise ImageError(f"{self.files.relative_name(i)}: {reason}") from error

    def _decode(self, source: str | bytes) -> NDArray[Any]:
        if self.variable:
            values = np.asarray(load_mat(Path(str(source)), self.variable)[self.variable])
            if values.ndim != 2 or values.dtype not in (np.uint8, np.uint16):
                actual = f"{self.variable} is {values.dtype} of shape {values.shape}"
                raise ImageError(f"{actual}; masks are uint8 or uint16 of two dimensions")
        else:
            values = open_values(source)
        if self.units_per_metre:
            return values.astype(np.float32) / np.float32(self.units_per_metre)
        if self.train_ids is None:
            return values
        # Clamped first, as a value beyond the table would be an IndexError that names neither value nor file.
        ids = self.train_ids[np.minimum(values, len(self.train_ids) - 1)]
        bad = (ids < 0) | (values >= len(self.train_ids))
        if bad.any():
            actual = f"the mask has value {values[bad][0]}, which is not a class of this dataset"
            raise ImageError(f"{actual}; it may be a mask of another")
        return ids.astype(np.uint8 if self.train_ids.max() < 256 else np.uint16)

    def digest(self) -> bytes:
        train_ids = b"" if self.train_ids is None else np.ascontiguousarray(self.train_ids, "<i2").data
        return _sha256(self.files.digest(), f"{self.units_per_metre} {self.variable}".encode(), train_ids)


@dataclass(frozen=True, eq=False)
class Split:
    """Images with labels: class numbers (N,), rows of 1, 0 and -1 = ignored (N, classes), or maps."""

    images: ImageIndex
    targets: NDArray[Any] | LabelMaps
    convert: Callable[[bytes], bytes] | None = None
    """Makes an encoded image of the bytes that the index has; None: they are one."""

    def __post_init__(self) -> None:
        if len(self.images) != len(self.targets):
            raise DatasetError(f"{len(self.images):,} pictures but {len(self.targets):,} labels")

    def __len__(self) -> int:
        return len(self.images)

    def name(self, i: int) -> str:
        return self.images.relative_name(i)

    def image(self, i: int) -> str | bytes:
        """Return image `i` as `veca.images.open_image` takes it: the path of a file, or bytes."""
        data = self.images.read(i)
        return self.convert(data) if self.convert and isinstance(data, bytes) else data

    def label(self, i: int) -> Any:
        """Return a class number, a row of 1, 0 and -1, or a map (height, width): train ids, or metres with 0 = none."""
        label = self.targets[i]
        return int(label) if np.ndim(label) == 0 else label

    @property
    def maps(self) -> LabelMaps | None:
        """The masks or depths; None in classification."""
        return self.targets if isinstance(self.targets, LabelMaps) else None

    @property
    def labels(self) -> NDArray[Any]:
        """All labels of a classification split at once."""
        if isinstance(self.targets, LabelMaps):
            raise TypeError("masks and depths are read one by one: label(i)")
        return self.targets

    def take(self, indices: Iterable[int]) -> Self:
        indices = [int(i) for i in indices]
        maps = self.maps
        targets = self.labels[indices] if maps is None else replace(maps, files=maps.files.take(indices))
        return replace(self, images=self.images.take(indices), targets=targets)

    @cached_property
    def content_hash(self) -> str:
        """A hash of names and file sizes of images (and label maps), and of the bytes of a sample of them.

        So files that were replaced under the same names are noticed without reading all of them.
        """
        parts: list[bytes | memoryview] = [self.digest()]
        sources = [(self.images, self.image), *([(self.maps.files, self.maps.files.read)] if self.maps else [])]
        for files, read in sources:
            parts.append(np.ascontiguousarray(files.sizes(), "<i8").data)
            for i in evenly_spaced(len(files), HASHED_FILES):
                try:
                    data = read(i)
                    parts.append(_sha256(data if isinstance(data, bytes) else Path(data).read_bytes()))
                except (OSError, ImageError):  # reported when it is decoded
                    parts.append(_sha256(b""))
        return _sha256(*parts).hex()

    def digest(self) -> bytes:
        if isinstance(self.targets, LabelMaps):
            return _sha256(self.images.digest(), self.targets.digest())
        labels = np.ascontiguousarray(self.targets, self.targets.dtype.newbyteorder("<"))
        return _sha256(self.images.digest(), labels.data)


@dataclass(frozen=True)
class DepthRules(Settings):
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


def check_files_exist(files: ImageIndex) -> None:
    """Check a sample of the files: a list does not say what was unpacked."""
    checked = evenly_spaced(len(files), _CHECKED_FILES)
    if missing := [i for i in checked if not os.path.exists(files.path(i))]:
        example = files.path(missing[0])
        raise DatasetError(f"{len(missing):,} of {len(checked):,} checked files are missing, such as {example}")


def class_folders(root: Path, folder: str, classes: Sequence[str]) -> Split:
    """Return the images of `root/folder/CLASS/…`."""
    present = [i for i, name in enumerate(classes) if (root / folder / name).is_dir()]
    images = [images_in(root, os.path.join(folder, classes[label])) for label in present]
    names = list(chain.from_iterable(images))
    if not names:
        raise DatasetError(f"{root / folder} has no pictures in folders of classes")
    return Split(ImageIndex.of_files(root, names), np.repeat(present, list(map(len, images))).astype(np.int64))


def held_out(split: Split, share: float = HELD_OUT, groups: Sequence[str] = ()) -> tuple[Split, Split]:
    """Divide a split in two, the second with `share` of the images; always the same ones.

    Of every class those with the lowest hashes of their names are taken: `share` of them, rounded, but at least one if
    there are two. With `groups` whole groups are taken instead: frames of one scene would give the other half away.
    """
    if not groups:
        second = lowest_hashes(split, lambda count: min(max(1, int(count * share + 0.5)), count - 1))
    else:
        taken = set[str]()
        # At least one group, and never all.
        for group in sorted(set(groups), key=_hash_name)[:-1]:
            if taken and sum(name in taken for name in groups) >= share * len(split):
                break
            taken.add(group)
        second = np.array([name in taken for name in groups])
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
