"""Class names of published datasets, and the mapping of the values in their masks to train ids."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from veca.data.datasets.base import IGNORE
from veca.errors import ArgumentError

TrainIds = NDArray[np.int16]
"""The train id of each value of a mask; -1 for a value that must not occur."""


_NAMES = tomllib.loads((files("veca.data.datasets") / "class_names.toml").read_text("utf-8"))
VOC: tuple[str, ...] = tuple(_NAMES["voc"])
CONTEXT: tuple[str, ...] = tuple(_NAMES["context"])
CITYSCAPES = {int(value): str(name) for value, name in _NAMES["cityscapes"].items()}
_COCO_LABELS: tuple[str, ...] = tuple(_NAMES["coco"])
_THINGS = 91
"""How many of them are things."""
_UNUSED = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83, 91})
"""Labels that no image has, counted from 1 as COCO does."""
_USED = [i for i in range(len(_COCO_LABELS)) if i + 1 not in _UNUSED]

COCO_STUFF = tuple(_COCO_LABELS[i] for i in _USED)
COCO_OBJECT = ("background", *(_COCO_LABELS[i] for i in _USED if i < _THINGS))


def make_train_ids(pairs: Iterable[tuple[int, int]], size: int = 256) -> TrainIds:
    """Map mask values to train ids by pairs; other values must not occur."""
    train_ids = np.full(size, -1, np.int16)
    for value, train_id in pairs:
        train_ids[value] = train_id
    return train_ids


def identity(classes: int) -> TrainIds:
    """Map masks that hold train ids already, and 255 for ignored pixels."""
    return make_train_ids([*((i, i) for i in range(classes)), (255, IGNORE)])


def ade20k_ids() -> TrainIds:
    """1 to 150 become 0 to 149; 0 is everything else and ignored."""
    return make_train_ids([(0, IGNORE), *((i, i - 1) for i in range(1, 151))])


def cityscapes_ids() -> TrainIds:
    ids = dict.fromkeys(range(34), IGNORE) | {value: i for i, value in enumerate(CITYSCAPES)}
    return make_train_ids(ids.items())


def coco_stuff_ids() -> TrainIds:
    """The 171 used labels in their order; unlabelled pixels are ignored."""
    ids = dict.fromkeys((*range(len(_COCO_LABELS)), 255), IGNORE) | {value: i for i, value in enumerate(_USED)}
    return make_train_ids(ids.items())


def coco_object_ids() -> TrainIds:
    """The 80 things are 1 to 80; stuff and unlabelled pixels are background, which is a class: nothing is ignored."""
    ids = dict.fromkeys((*range(len(_COCO_LABELS)), 255), 0)
    return make_train_ids((ids | {value: i + 1 for i, value in enumerate(_USED) if value < _THINGS}).items())


def context_ids(labels: dict[int, str]) -> TrainIds:
    """Map the numbers of the 459 labels; 0 and all but the 59 classes are background."""
    index = {name: i for i, name in enumerate(CONTEXT)}
    if missing := set(CONTEXT[1:]) - set(labels.values()):
        raise ArgumentError(f"the list of labels has no {', '.join(sorted(missing))}")
    return make_train_ids([(0, 0), *((value, index.get(name, 0)) for value, name in labels.items())], max(labels) + 1)
