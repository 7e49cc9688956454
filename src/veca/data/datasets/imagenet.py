"""ImageNet-1K and the two other ways to score a head that was trained on it.

Class numbers are the order of the sorted WordNet ids, which is also that of ImageNetV2's folders and of ReaL's labels.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from veca.data.datasets.base import DatasetError, Places, Split
from veca.data.datasets.layout import (
    Found,
    Spec,
    check_there,
    class_folders,
    class_index,
    labelled,
    number,
    pictures_in,
    read_lines,
    subfolders,
)

_KAGGLE = "ILSVRC/Data/CLS-LOC"
_COUNT = 1000
_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})\.")


def _read(root: Path) -> Found:
    images = root / _KAGGLE if (root / _KAGGLE).is_dir() else root
    ids = subfolders(images / "train")
    train = class_folders(images, "train", ids)
    return Found({"train": train, "val": _validation(root, images, ids)}, _names(root, ids))


def _validation(root: Path, images: Path, ids: list[str]) -> Split:
    """In folders of classes, or all in one folder with the list of the Kaggle release."""
    folders = subfolders(images / "val")
    if folders:
        if unknown := sorted(set(folders) - set(ids)):
            raise DatasetError(f"{images / 'val'} has the class {unknown[0]}, which {images / 'train'} has not")
        return class_folders(images, "val", ids)
    listed = root / "LOC_val_solution.csv"
    if not listed.exists():
        raise DatasetError(f"{images / 'val'} has no folders of classes, and {root} no {listed.name} to tell them")
    rows = [line.split(",", 1) for line in read_lines(listed)[1:]]
    names = [f"val/{row[0]}.JPEG" for row in rows]
    return labelled(images, names, (class_index(ids, row[-1].split()[0], listed) for row in rows))


def _names(root: Path, ids: list[str]) -> list[str]:
    """Words for the classes where a list of them lies beside the pictures, else their WordNet ids."""
    words: dict[str, str] = {}
    for name in ("LOC_synset_mapping.txt", "synset_words.txt"):
        if (root / name).exists():
            words = dict(line.split(" ", 1) for line in read_lines(root / name) if " " in line)
    return [words.get(wnid, wnid) for wnid in ids]


def _read_v2(root: Path) -> Found:
    folders = subfolders(root)
    labels = {name: number(name, root, _COUNT, start=0) for name in folders if name.isdecimal()}
    names: list[str] = []
    classes: list[int] = []
    for name, label in sorted(labels.items(), key=lambda pair: pair[1]):
        found = pictures_in(root, name)
        names += found
        classes += [label] * len(found)
    return Found({"test": labelled(root, names, classes)}, [str(i) for i in range(_COUNT)])


def _read_real(root: Path) -> Found:
    images = root / _KAGGLE if (root / _KAGGLE).is_dir() else root
    listed = root / "real.json"
    try:
        sets = json.loads("\n".join(read_lines(listed)))
    except (json.JSONDecodeError, RecursionError):
        sets = None
    if not isinstance(sets, list) or not all(isinstance(row, list) for row in sets):
        raise DatasetError(f"{listed} is not a list with a list of labels for each validation picture")
    found = sorted((int(match[1]), n) for n in pictures_in(images, "val") if (match := _NUMBER.search(n)))
    if not found or not 1 <= found[0][0] <= found[-1][0] <= len(sets):
        raise DatasetError(
            f"{images / 'val'} has {len(found):,} pictures ILSVRC2012_val_….JPEG, {listed} {len(sets):,}"
        )
    rows = [(sets[i - 1], name) for i, name in found if sets[i - 1]]
    marks = np.zeros((len(rows), _COUNT), np.int8)
    for row, (labels, _) in zip(marks, rows, strict=True):
        row[[number(str(label), listed, _COUNT, start=0) for label in labels]] = 1
    split = Split(Places(images, [name for _, name in rows]), marks)
    check_there(split.images)
    folders = subfolders(images / "val")
    classes = folders if len(folders) == _COUNT else [str(i) for i in range(_COUNT)]
    return Found({"test": split}, classes)


_TREE = """
imagenet/
├── train/n01440764/n01440764_10026.JPEG …
├── val/n01440764/ILSVRC2012_val_00000293.JPEG …
└── LOC_synset_mapping.txt                  names of the classes, may be missing
or the folder of the Kaggle release:
├── ILSVRC/Data/CLS-LOC/train/n01440764/…
├── ILSVRC/Data/CLS-LOC/val/ILSVRC2012_val_00000293.JPEG …
├── LOC_synset_mapping.txt
└── LOC_val_solution.csv
"""
_TREE_V2 = """
imagenetv2-matched-frequency-format-val/
├── 0/….jpeg
├── …
└── 999/….jpeg
"""
_TREE_REAL = """
imagenet/
├── real.json                               "reassessed labels", one list for each picture
└── val/n01440764/ILSVRC2012_val_00000293.JPEG …   in folders of classes or all in one
"""
_HEAD = {"head": "imagenet"}

SPECS = [
    Spec(
        name="imagenet",
        title="ImageNet-1K",
        task="classify",
        classes=_COUNT,
        sizes={"train": 1_281_167, "val": 50_000},
        tree=_TREE,
        marks=(f"train|{_KAGGLE}/train",),
        folders=("imagenet", "imagenet1k", "ILSVRC2012"),
        source="the ImageNet site or its Kaggle competition",
        licence="research, no redistribution",
        read=_read,
        protocol={"metric": "top-1"},
    ),
    Spec(
        name="imagenetv2",
        title="ImageNetV2, matched frequency",
        task="classify",
        classes=_COUNT,
        sizes={"test": 10_000},
        tree=_TREE_V2,
        marks=("0",),
        folders=("imagenetv2-matched-frequency-format-val", "imagenetv2"),
        source="the ImageNetV2 page of its authors on the Hugging Face hub",
        licence="MIT for the labels; pictures are their owners'",
        read=_read_v2,
        protocol={"metric": "top-1", **_HEAD},
    ),
    Spec(
        name="imagenet-real",
        title="ImageNet-ReaL",
        task="multilabel",
        classes=_COUNT,
        sizes={"test": 46_837},
        tree=_TREE_REAL,
        marks=("real.json",),
        folders=("imagenet", "imagenet1k", "ILSVRC2012"),
        source="the ImageNet site, and real.json from Google Research's reassessed-imagenet",
        licence="research, no redistribution; Apache-2.0 for the labels",
        read=_read_real,
        protocol={
            "metric": "top-1 within the picture's set of labels",
            "rule": "pictures without any label are left out",
            **_HEAD,
        },
    ),
]
