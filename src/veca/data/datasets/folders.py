"""Folders of one's own: a folder for each class, or pictures with a mask or a depth of the same name.

    train/CLASS/7.jpg                     images/7.jpg            masks/7.png      or depths/7.png, 16-bit millimetres
    val/CLASS/…                           images/train/7.jpg      masks/train/7.png
    or CLASS/7.jpg                        train/images/7.jpg      train/masks/7.png

`classes.txt`, one name a line, tells the classes of masks; without it they are numbered.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import numpy as np

from veca.data.datasets.base import IGNORE, DatasetError, Maps, Places, Split
from veca.data.datasets.classes import identity, table
from veca.data.datasets.layout import class_folders, pictures_in, read_lines, subfolders, warn_unlabelled
from veca.images import EXTENSIONS

_SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_KINDS = {"segment": ("masks", "annotations", "labels"), "depth": ("depths", "depth")}
_LOOKED_AT = 1000
LAYOUT = """
    FOLDER/train/CLASS/7.jpg …, FOLDER/val/CLASS/…, FOLDER/test/CLASS/…   or FOLDER/CLASS/7.jpg …   to classify
    FOLDER/images/7.jpg …, FOLDER/masks/7.png …                          to segment, pixels are class numbers, 255 none
    FOLDER/images/7.jpg …, FOLDER/depths/7.png …                         depth in 16-bit millimetres, 0 none
    (the latter two also as images/train/7.jpg or train/images/7.jpg, and classes.txt with one name a line)
    FOLDER/NAME-train.tar, FOLDER/NAME-val.tar, FOLDER/NAME-test.tar     shards"""


def read_folder(root: Path, task: str | None) -> tuple[str, dict[str, Split], list[str]]:
    """Task, splits ("all" where there are none) and names of classes, empty where none are told."""
    top = subfolders(root)
    splits = {name: _SPLITS[name] for name in top if name in _SPLITS}
    inside = subfolders(root / next(iter(splits))) if splits else []
    if "images" in top or "images" in inside:
        return _paired(root, task, splits if "images" in inside else {})
    if task not in (None, "classify"):
        wanted = " or ".join(_KINDS[task]) if task in _KINDS else task
        raise DatasetError(f"{root}: has no folder images beside {wanted}. Expected:{LAYOUT}")
    classes = sorted({name for split in splits for name in subfolders(root / split)}) if splits else top
    if not classes:
        raise DatasetError(f"{root}: has no folders of classes. Expected:{LAYOUT}")
    found = {splits[folder]: class_folders(root, folder, classes) for folder in splits}
    beside = [entry.path for folder in ("", *splits) for entry in os.scandir(root / folder) if _is_picture(entry)]
    warn_unlabelled(beside, "a picture lies in the folder of its class")
    return "classify", found or {"all": class_folders(root, "", classes)}, classes


def _is_picture(entry: os.DirEntry[str]) -> bool:
    suffix = os.path.splitext(entry.name)[1].lower()
    return suffix in EXTENSIONS and not entry.name.startswith(".") and entry.is_file()


def _paired(root: Path, task: str | None, above: dict[str, str]) -> tuple[str, dict[str, Split], list[str]]:
    """Pictures and maps; `above`: folders of splits that hold the two, by the name of the split."""
    here = root / next(iter(above)) if above else root
    there = {t: name for t, names in _KINDS.items() for name in names[::-1] if (here / name).is_dir()}
    if task == "classify":
        raise DatasetError(f"{here}: has pictures all in one folder, images. Expected:{LAYOUT}")
    if task is None and len(there) > 1:
        raise DatasetError(f"{here}: has {' and '.join(there.values())}; say which with task=")
    task = task or next(iter(there), "segment")
    if task not in there:
        raise DatasetError(f"{here}: has no folder {' or '.join(_KINDS[task])}. Expected:{LAYOUT}")
    pairs = {split: (f"{f}/images", f"{f}/{there[task]}") for f, split in above.items()}
    if not above:
        below = {name: _SPLITS[name] for name in subfolders(root / "images") if name in _SPLITS}
        pairs = {split: (f"images/{f}", f"{there[task]}/{f}") for f, split in below.items()}
    pairs = pairs or {"all": ("images", there[task])}
    listed = root / "classes.txt"
    classes = read_lines(listed) if listed.exists() and task == "segment" else []
    return task, {split: _pair(root, *folders, task) for split, folders in pairs.items()}, classes


def _pair(root: Path, images: str, maps: str, task: str) -> Split:
    """Files with the same name but for its end. Pictures without a map are refused, as one would miss them."""
    stems = [
        {str(PurePosixPath(n[len(f) + 1 :]).with_suffix("")): n for n in pictures_in(root, f)} for f in (images, maps)
    ]
    if lonely := sorted(set(stems[0]) ^ set(stems[1])):
        where = maps if lonely[0] in stems[0] else images
        raise DatasetError(f"{root}: {lonely[0]} is missing in {where}, and {len(lonely) - 1} more are in only one")
    if not stems[0]:
        raise DatasetError(f"{root / images}: has no pictures. Expected:{LAYOUT}")
    places = Places(root, [stems[1][stem] for stem in stems[0]])
    return Split(Places(root, list(stems[0].values())), Maps(places, per_metre=1000 if task == "depth" else 0))


def with_classes(splits: dict[str, Split], classes: list[str]) -> tuple[dict[str, Split], list[str]]:
    """Masks held to their classes. Where nobody told those, a look at up to 1,000 masks of the first split does.

    A larger number that turns up later is an error then; `classes.txt` avoids it.
    """
    if not classes:
        maps = next(iter(splits.values())).maps
        assert maps is not None
        looked = np.unique(np.linspace(0, len(maps) - 1, min(len(maps), _LOOKED_AT)).astype(int)).tolist()
        highest = -1
        for i in looked:
            seen = np.unique(maps[i])
            highest = max(highest, *seen[seen != IGNORE].tolist(), -1)
        if highest < 1:
            raise DatasetError(f"{maps.places.path(0)} and the other masks have fewer than two classes")
        classes = [str(i) for i in range(highest + 1)]
    if len(classes) <= IGNORE:
        values_of = identity(len(classes))
    else:
        pairs = [(i, i) for i in range(len(classes)) if i != IGNORE]
        values_of = table([*pairs, (IGNORE, IGNORE)], len(classes))
    held = {
        name: Split(split.images, Maps(split.maps.places, values_of)) for name, split in splits.items() if split.maps
    }
    return held, classes
