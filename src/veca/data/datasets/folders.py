"""Reader of a user's own folders: one folder per class, or images with masks or depths of the same name.

    train/CLASS/7.jpg                     images/7.jpg            masks/7.png      or depths/7.png, 16-bit millimetres
    val/CLASS/…                           images/train/7.jpg      masks/train/7.png
    or CLASS/7.jpg                        train/images/7.jpg      train/masks/7.png

`classes.txt`, one name a line, has the classes of masks; without it they are numbered.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import numpy as np

from veca.data.datasets.base import IGNORE, DatasetError, FileList, LabelMaps, Split, evenly_spaced
from veca.data.datasets.classes import identity, make_train_ids
from veca.data.datasets.layout import class_folders, images_in, read_lines, subfolders, warn_unlabelled
from veca.images import EXTENSIONS

SPLIT_FOLDERS = {"train": "train", "training": "train", "test": "test"}
SPLIT_FOLDERS |= dict.fromkeys(("val", "valid", "validation"), "val")
_MAP_FOLDERS = {"segment": ("masks", "annotations", "labels"), "depth": ("depths", "depth")}
_SCANNED_MASKS = 1000
"""So many masks are searched for class numbers where `classes.txt` is missing."""
LAYOUT = """
    FOLDER/train/CLASS/7.jpg …, FOLDER/val/CLASS/…, FOLDER/test/CLASS/…   or FOLDER/CLASS/7.jpg …   to classify
    FOLDER/images/7.jpg …, FOLDER/masks/7.png …                          to segment, pixels are class numbers, 255 none
    FOLDER/images/7.jpg …, FOLDER/depths/7.png …                         depth in 16-bit millimetres, 0 none
    (the latter two also as images/train/7.jpg or train/images/7.jpg, and classes.txt with one name a line)
    FOLDER/NAME-train.tar, FOLDER/NAME-val.tar, FOLDER/NAME-test.tar     shards"""


def read_folder(root: Path, task: str | None) -> tuple[str, dict[str, Split], list[str]]:
    """Return the task, the splits ("all" where there are none) and the names of the classes, if there are any."""
    top = subfolders(root)
    split_folders = {name: SPLIT_FOLDERS[name] for name in top if name in SPLIT_FOLDERS}
    # Splits may hold images/ and masks/, or those may hold the splits; class folders have neither.
    inside = subfolders(root / next(iter(split_folders))) if split_folders else []
    if "images" in top or "images" in inside:
        return _read_pairs(root, task, split_folders if "images" in inside else {})
    if task not in (None, "classify"):
        wanted = " or ".join(_MAP_FOLDERS[task]) if task in _MAP_FOLDERS else task
        raise DatasetError(f"{root}: has no folder images beside {wanted}. Expected:{LAYOUT}")
    classes = sorted({name for folder in split_folders for name in subfolders(root / folder)}) if split_folders else top
    if not classes:
        raise DatasetError(f"{root}: has no folders of classes. Expected:{LAYOUT}")
    splits = {split: class_folders(root, folder, classes) for folder, split in split_folders.items()}
    entries = (entry for folder in ("", *split_folders) for entry in os.scandir(root / folder))
    warn_unlabelled([e.path for e in entries if _is_image(e)], "a picture lies in the folder of its class")
    return "classify", splits or {"all": class_folders(root, "", classes)}, classes


def _is_image(entry: os.DirEntry[str]) -> bool:
    suffix = os.path.splitext(entry.name)[1].lower()
    return suffix in EXTENSIONS and not entry.name.startswith(".") and entry.is_file()


def _read_pairs(root: Path, task: str | None, split_folders: dict[str, str]) -> tuple[str, dict[str, Split], list[str]]:
    """Read images and maps; `split_folders` hold both, or else the folders of images and maps hold the splits."""
    folder = root / next(iter(split_folders)) if split_folders else root
    map_folders = {t: name for t, names in _MAP_FOLDERS.items() for name in names[::-1] if (folder / name).is_dir()}
    if task == "classify":
        raise DatasetError(f"{folder}: has pictures all in one folder, images. Expected:{LAYOUT}")
    if task is None and len(map_folders) > 1:
        raise DatasetError(f"{folder}: has {' and '.join(map_folders.values())}; say which with task=")
    task = task or next(iter(map_folders), "segment")
    if task not in map_folders:
        raise DatasetError(f"{folder}: has no folder {' or '.join(_MAP_FOLDERS[task])}. Expected:{LAYOUT}")
    maps = map_folders[task]
    pairs = {split: (f"{name}/images", f"{name}/{maps}") for name, split in split_folders.items()}
    if not split_folders:
        inside = [name for name in subfolders(root / "images") if name in SPLIT_FOLDERS]
        pairs = {SPLIT_FOLDERS[name]: (f"images/{name}", f"{maps}/{name}") for name in inside}
    pairs = pairs or {"all": ("images", maps)}
    # Depths have no classes; a classes.txt beside them belongs to masks of the same images.
    listed = root / "classes.txt"
    classes = read_lines(listed) if listed.exists() and task == "segment" else []
    return task, {split: _pair_by_stem(root, *folders, task) for split, folders in pairs.items()}, classes


def _pair_by_stem(root: Path, images: str, maps: str, task: str) -> Split:
    """Pair files with the same name but for the extension. Unpaired files are refused: they would be missed."""
    by_stem, maps_by_stem = (
        {str(PurePosixPath(name[len(folder) + 1 :]).with_suffix("")): name for name in images_in(root, folder)}
        for folder in (images, maps)
    )
    if unpaired := sorted(set(by_stem) ^ set(maps_by_stem)):
        missing_in = maps if unpaired[0] in by_stem else images
        others = len(unpaired) - 1
        raise DatasetError(f"{root}: {unpaired[0]} is missing in {missing_in}, and {others} more are in only one")
    if not by_stem:
        raise DatasetError(f"{root / images}: has no pictures. Expected:{LAYOUT}")
    map_files = FileList(root, [maps_by_stem[stem] for stem in by_stem])
    units_per_metre = 1000 if task == "depth" else 0
    return Split(FileList(root, list(by_stem.values())), LabelMaps(map_files, units_per_metre=units_per_metre))


def restrict_to_classes(splits: dict[str, Split], classes: list[str]) -> tuple[dict[str, Split], list[str]]:
    """Make masks refuse values that are no class. Without names, classes come from a sample of the first split.

    A larger number that turns up later is then an error, which `classes.txt` avoids.
    """
    if not classes:
        maps = next(iter(splits.values())).maps
        assert maps is not None
        highest = -1
        for i in evenly_spaced(len(maps), _SCANNED_MASKS):
            mask = maps[i]
            highest = max(highest, *np.unique(mask[mask != IGNORE]).tolist(), -1)
        if highest < 1:
            raise DatasetError(f"{maps.files.path(0)} and the other masks have fewer than two classes")
        classes = [str(i) for i in range(highest + 1)]
    train_ids = identity(len(classes))
    if len(classes) > IGNORE:  # class 255 cannot be used: its value means "ignore"
        pairs = [(i, i) for i in range(len(classes)) if i != IGNORE]
        train_ids = make_train_ids([*pairs, (IGNORE, IGNORE)], len(classes))
    return {k: Split(s.images, LabelMaps(s.maps.files, train_ids)) for k, s in splits.items() if s.maps}, classes
