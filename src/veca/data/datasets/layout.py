"""What the readers of datasets share: list files, class folders, checks that files exist."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from veca.data.datasets.base import DatasetError, FileList, Split, evenly_spaced
from veca.data.sources import list_files
from veca.errors import warn_caller

_MAX_LIST_BYTES = 1 << 28
"""The longest list, that of Places365, has 60 million bytes."""
_CHECKED_FILES = 1000
"""So many files of a list are checked to exist."""


class PublishedSplits(NamedTuple):
    """What a reader returns: the published splits, and the classes in the order of their numbers."""

    splits: dict[str, Split]
    classes: list[str]
    groups: Sequence[Any] | None = None
    """For each image of train, what must stay together when a part of it is held out."""


def read_lines(path: Path) -> list[str]:
    """Read the non-empty lines of a list, stripped."""
    with reading(path):
        if (size := path.stat().st_size) > _MAX_LIST_BYTES:
            raise DatasetError(f"{path} has {size:,} bytes; at most {_MAX_LIST_BYTES:,} are read of a list")
        lines = path.read_text("utf-8").splitlines()
    return [line.strip() for line in lines if line.strip()]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the block, which reads a file or folder, into `DatasetError` with its path."""
    try:
        yield
    except OSError as error:
        raise DatasetError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not a text file") from error


def read_columns(path: Path, columns: int) -> list[list[str]]:
    """Split the lines of a list into words; fewer than `columns` are an error, as it cannot be the right list."""
    rows = [line.split() for line in read_lines(path)]
    if short := next((row for row in rows if len(row) < columns), None):
        raise DatasetError(f"{path} has the line {' '.join(short)!r}; {columns} words are expected")
    return rows


def parse_class(text: str, path: Path, count: int, start: int = 1) -> int:
    """Return the class number, counted from 0, of a list that counts from `start`."""
    value = int(text) - start if text.lstrip("-").isdecimal() else -1
    if not 0 <= value < count:
        raise DatasetError(f"{path} has the number {text!r}; classes are {start} to {count - 1 + start}")
    return value


def class_index(classes: Sequence[str], name: str, path: Path) -> int:
    try:
        return classes.index(name)
    except ValueError:
        raise DatasetError(f"{path} names the class {name!r}, which is not among the {len(classes)} classes") from None


def labelled(root: Path, names: Sequence[str], labels: Iterable[int]) -> Split:
    """Return a classification split, after a check that the images exist."""
    split = Split(FileList(root, names), np.fromiter(labels, np.int64))
    check_files_exist(split.images)
    return split


def check_files_exist(files: FileList) -> None:
    """Check a sample of the files: a list does not say what was unpacked."""
    checked = evenly_spaced(len(files), _CHECKED_FILES)
    if missing := [i for i in checked if not os.path.exists(files.path(i))]:
        example = files.path(missing[0])
        raise DatasetError(f"{len(missing):,} of {len(checked):,} checked files are missing, such as {example}")


def subfolders(folder: Path) -> list[str]:
    """Return the sorted names of the folders in `folder` that are not hidden."""
    with reading(folder):
        return sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))


def images_in(root: Path, folder: str) -> list[str]:
    """Return the sorted paths, relative to `root`, of all images under one of its folders."""
    if not (root / folder).is_dir():
        raise DatasetError(f"{root} has no folder {folder}")
    items = list(list_files(str(root / folder))[1])
    if bad := next((item for item in items if item.error), None):
        raise DatasetError(f"{bad.name}: {bad.error}")
    start = len(str(root)) + 1  # not os.path.relpath, which is slow for a million files
    return [item.path[start:] for item in items]


def class_folders(root: Path, folder: str, classes: Sequence[str]) -> Split:
    """Return the images of `root/folder/CLASS/…`."""
    present = [i for i, name in enumerate(classes) if (root / folder / name).is_dir()]
    images = {label: images_in(root, os.path.join(folder, classes[label])) for label in present}
    names = list(chain.from_iterable(images.values()))
    if not names:
        raise DatasetError(f"{root / folder} has no pictures in folders of classes")
    return Split(FileList(root, names), np.repeat(present, [len(images[label]) for label in present]).astype(np.int64))


def first_existing(root: Path, *names: str) -> str:
    """Return the first name that exists in `root`, where the same thing goes by several names."""
    for name in names:
        if (root / name).exists():
            return name
    raise DatasetError(f"{root} has no {' or '.join(names)}")


def warn_unlabelled(names: Sequence[str], rule: str) -> None:
    """Warn of images that are left out because they have no label."""
    if names:
        count = "1 picture has no label and is" if len(names) == 1 else f"{len(names):,} pictures have no label and are"
        warn_caller(f"{count} left out, such as {min(names)}: {rule}")
