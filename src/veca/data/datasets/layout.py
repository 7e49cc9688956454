"""What is known of a published dataset, and what its readers share: lists, class folders, finding the right folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from veca.data.datasets.base import DatasetError, DepthRules, Places, Split, Task
from veca.data.sources import list_files
from veca.errors import warn_caller

_MOST = 1 << 28
"""Bytes of a list; the longest, that of Places365, has 60 million."""
_LOOKED_AT = 1000


class Found(NamedTuple):
    """What a reader finds: the splits as they were published, and the classes in the order of their numbers."""

    splits: dict[str, Split]
    classes: list[str]
    groups: Sequence[Any] | None = None
    """For train, what must stay together when a part of it is held out."""


@dataclass(frozen=True)
class Spec:
    """One published dataset: how it lies on disk, where it comes from, what is in it, and how it is read.

    `tree` starts with the folder's usual name; `marks` are what must be in the folder for it to be the one,
    "a|b" for either; `folders` are where else below the given root it may be. `sizes` are those of the
    published splits.
    """

    name: str
    title: str
    task: Task
    classes: int
    sizes: dict[str, int]
    tree: str
    marks: tuple[str, ...]
    folders: tuple[str, ...]
    source: str
    licence: str
    read: Callable[[Path], Found]
    hold_out: bool = False
    ignore: int | None = None
    depth: DepthRules | None = None
    protocol: dict[str, Any] = field(default_factory=dict)

    def locate(self, root: Path) -> Path:
        """The dataset's folder: `root` itself or one below it."""
        places = [root, *(root / folder for folder in self.folders)]
        for place in places:
            if not self._missing(place):
                return place
        if not root.is_dir():
            raise DatasetError(self.wrong(f"no folder {root}"))
        near = next((p for p in places[::-1] if p.is_dir()), root)
        raise DatasetError(self.wrong(f"{near} has no {' and no '.join(self._missing(near))}"))

    def _missing(self, place: Path) -> list[str]:
        names = [mark.split("|") for mark in self.marks]
        return [" or ".join(any_of) for any_of in names if not any((place / name).exists() for name in any_of)]

    def wrong(self, reason: str) -> str:
        """An error message that shows the layout that was expected."""
        tree = "\n".join(f"    {line}" for line in self.tree.strip().splitlines())
        below = f", or below it as {' or '.join(self.folders)}" if self.folders else ""
        return (
            f"{self.name}: {reason}. {self.title} is expected in the folder that is given{below}:\n{tree}\n"
            f"Get it from {self.source} ({self.licence})"
        )


def read_lines(path: Path) -> list[str]:
    """The lines of a list that are not empty, without white space around them."""
    try:
        if path.stat().st_size > _MOST:
            raise DatasetError(f"{path} has {path.stat().st_size:,} bytes; at most {_MOST:,} are read of a list")
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise DatasetError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is no text") from error
    return [line.strip() for line in lines if line.strip()]


def read_rows(path: Path, columns: int) -> list[list[str]]:
    """Lines of a list in words: at least `columns` of them, as something else cannot be the list that is meant."""
    rows = [line.split() for line in read_lines(path)]
    if short := next((row for row in rows if len(row) < columns), None):
        raise DatasetError(f"{path} has the line {' '.join(short)!r}; {columns} words are expected")
    return rows


def number(text: str, path: Path, below: int, start: int = 1) -> int:
    """A class number of a list that counts from `start`, counted from 0."""
    value = int(text) - start if text.lstrip("-").isdecimal() else -1
    if not 0 <= value < below:
        raise DatasetError(f"{path} has the number {text!r}; classes are {start} to {below - 1 + start}")
    return value


def labelled(root: Path, names: Sequence[str], labels: Iterable[int]) -> Split:
    """A classification split, after a look whether the pictures are there."""
    split = Split(Places(root, names), np.fromiter(labels, np.int64))
    check_there(split.images)
    return split


def check_there(places: Places) -> None:
    """Look for a spread of the files: a list says nothing about what was unpacked."""
    looked = np.unique(np.linspace(0, len(places) - 1, min(len(places), _LOOKED_AT)).astype(int)).tolist()
    if missing := [i for i in looked if not os.path.exists(places.path(i))]:
        some = f"{len(missing):,} of {len(looked):,} files looked for are not there"
        raise DatasetError(f"{some}, such as {places.path(missing[0])}")


def class_index(classes: Sequence[str], name: str, path: Path) -> int:
    try:
        return classes.index(name)
    except ValueError:
        raise DatasetError(f"{path} names the class {name!r}, which is not among the {len(classes)} classes") from None


def subfolders(folder: Path) -> list[str]:
    """The names of folders in `folder`, sorted; nothing hidden."""
    try:
        return sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise DatasetError(f"{folder}: {(error.strerror or str(error)).lower()}") from error


def pictures_in(root: Path, folder: str) -> list[str]:
    """All pictures under a folder of `root`, by their path from `root`, sorted."""
    if not (root / folder).is_dir():
        raise DatasetError(f"{root} has no folder {folder}")
    items = list(list_files(str(root / folder))[1])
    if bad := next((item for item in items if item.error), None):
        raise DatasetError(f"{bad.name}: {bad.error}")
    start = len(str(root)) + 1
    return [item.path[start:] for item in items]


def warn_unlabelled(names: Sequence[str], why: str) -> None:
    """Say once how many pictures of a dataset are left out."""
    if names:
        which = "1 picture has no label and is" if len(names) == 1 else f"{len(names):,} pictures have no label and are"
        warn_caller(f"{which} left out, such as {min(names)}: {why}")


def class_folders(root: Path, folder: str, classes: Sequence[str]) -> Split:
    """The pictures of `root/folder/CLASS/…`."""
    names: list[str] = []
    labels: list[NDArray[np.int64]] = []
    for label, name in enumerate(classes):
        if (root / folder / name).is_dir():
            found = pictures_in(root, f"{folder}/{name}" if folder else name)
            names += found
            labels.append(np.full(len(found), label))
    if not names:
        raise DatasetError(f"{root / folder} has no pictures in folders of classes")
    return Split(Places(root, names), np.concatenate(labels))


def first_there(root: Path, *names: str) -> str:
    """The first of some names that is there, as the same thing goes by several."""
    for name in names:
        if (root / name).exists():
            return name
    raise DatasetError(f"{root} has no {' or '.join(names)}")
