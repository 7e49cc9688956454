"""The segmentation and depth benchmarks, in the layouts they were published in and those of the toolboxes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from string import ascii_lowercase

from veca.data.datasets import classes as names
from veca.data.datasets.base import DatasetError, Maps, Places, Split
from veca.data.datasets.layout import Found, check_there, first_there, pictures_in, read_lines, read_rows

MILLIMETRES, KITTI_UNITS = 1000, 256


def masked(root: Path, images: Sequence[str], masks: Sequence[str], table: names.Table, variable: str = "") -> Split:
    split = Split(Places(root, images), Maps(Places(root, masks), table, variable=variable))
    check_there(split.images)
    check_there(split.maps.places if split.maps else split.images)
    return split


def _paired(root: Path, images: str, masks: str, before: str, after: str, table: names.Table) -> Split:
    """The masks of a folder, each `NAME + after`, with the pictures `NAME + before` of another."""
    found = [name for name in pictures_in(root, masks) if name.endswith(after)]
    if not found:
        raise DatasetError(f"{root / masks} has no masks *{after}")
    stems = [name[len(masks) + 1 : -len(after)] for name in found]
    return masked(root, [f"{images}/{stem}{before}" for stem in stems], found, table)


def voc2012(root: Path, augmented: bool = False) -> Found:
    lists, splits = root / "ImageSets/Segmentation", {}
    table = names.identity(1 + len(names.VOC))
    for split, listed, folder in (
        ("train", "trainaug" if augmented else "train", "SegmentationClassAug" if augmented else "SegmentationClass"),
        ("val", "val", "SegmentationClass"),
    ):
        # The longer list is also found with paths: /JPEGImages/2007_000032.jpg /SegmentationClassAug/….
        stems = [Path(row[0]).stem for row in read_rows(lists / f"{listed}.txt", 1)]
        pictures = [f"JPEGImages/{stem}.jpg" for stem in stems]
        splits[split] = masked(root, pictures, [f"{folder}/{stem}.png" for stem in stems], table)
    return Found(splits, ["background", *names.VOC])


voc2012_aug = partial(voc2012, augmented=True)


def context60(root: Path) -> Found:
    """Masks as the toolboxes convert them, or the 459 labels of the release, mapped by the names in its list."""
    converted = (root / "SegmentationClassContext").is_dir()
    lists = first_there(root, "ImageSets/SegmentationContext", "ImageSets/Main")
    folder, suffix = ("SegmentationClassContext", ".png") if converted else ("trainval", ".mat")
    table = names.identity(len(names.CONTEXT)) if converted else names.context(_context_labels(root / "labels.txt"))
    splits = {}
    for split in ("train", "val"):
        stems = read_lines(root / lists / f"{split}.txt")
        masks, pictures = [f"{folder}/{s}{suffix}" for s in stems], [f"JPEGImages/{s}.jpg" for s in stems]
        splits[split] = masked(root, pictures, masks, table, "" if converted else "LabelMap")
    return Found(splits, list(names.CONTEXT))


def _context_labels(path: Path) -> dict[int, str]:
    pairs = [line.split(":", 1) for line in read_lines(path)]
    if not all(len(pair) == 2 and pair[0].isdecimal() and int(pair[0]) < 1 << 16 for pair in pairs):
        raise DatasetError(f"{path} is not a list of lines such as '2: aeroplane'")
    return {int(pair[0]): pair[1].strip() for pair in pairs}


def ade20k(root: Path) -> Found:
    splits = {
        split: _paired(root, f"images/{folder}", f"annotations/{folder}", ".jpg", ".png", names.ade20k())
        for split, folder in (("train", "training"), ("val", "validation"))
    }
    listed = root / "objectInfo150.txt"
    rows = [line.split("\t") for line in read_lines(listed)[1:]]
    found = {int(row[0]): row[-1].strip() for row in rows if row[0].strip().isdecimal()}
    if sorted(found) != list(range(1, 151)):
        raise DatasetError(f"{listed} has {len(found)} classes in columns set apart by tabs; 150 are expected")
    return Found(splits, [found[i] for i in range(1, 151)])


def cityscapes(root: Path) -> Found:
    ends = "_leftImg8bit.png", "_gtFine_labelIds.png"
    splits = {s: _paired(root, f"leftImg8bit/{s}", f"gtFine/{s}", *ends, names.cityscapes()) for s in ("train", "val")}
    return Found(splits, list(names.CITYSCAPES.values()))


def _coco(root: Path, table: names.Table, classes: tuple[str, ...], converted: str) -> Found:
    splits = {}
    for split, folder in (("train", "train2017"), ("val", "val2017")):
        images = first_there(root, f"images/{folder}", folder)
        tops = ("annotations", "stuffthingmaps", "stuffthingmaps_trainval2017")
        masks = first_there(root, *(f"{top}/{folder}" for top in tops))
        plain = [name for name in pictures_in(root, masks) if not name.endswith("TrainIds.png")]
        if plain:
            pictures = [f"{images}/{Path(name).stem}.jpg" for name in plain]
            splits[split] = masked(root, pictures, plain, table)
        else:
            splits[split] = _paired(root, images, masks, ".jpg", converted, names.identity(len(classes)))
    return Found(splits, list(classes))


def coco_stuff(root: Path) -> Found:
    return _coco(root, names.coco_stuff(), names.COCO_STUFF, "_labelTrainIds.png")


def coco_object(root: Path) -> Found:
    return _coco(root, names.coco_object(), names.COCO_OBJECT, "_instanceTrainIds.png")


def _listed(root: Path, name: str, images: Sequence[str], depths: Sequence[str], per_metre: float) -> Split:
    """Pictures and depths of a list `picture depth …`, each below one of some folders; None stands for no depth."""
    rows = [row for row in read_rows(root / name, 2) if row[1] != "None"]
    if not rows:
        raise DatasetError(f"{root / name} names no picture with a depth")
    found = [[_below(root, row[0], images) for row in rows], [_below(root, row[1], depths) for row in rows]]
    split = Split(Places(root, found[0]), Maps(Places(root, found[1]), per_metre=per_metre))
    check_there(split.images)
    return split


def _below(root: Path, name: str, folders: Sequence[str]) -> str:
    name = name.lstrip("/")
    paths = [os.path.join(folder, name) for folder in folders]
    if (there := next((path for path in paths if (root / path).exists()), None)) is None:
        raise DatasetError(f"{root} has none of {', '.join(paths)}, which its list names")
    return there


def nyuv2(root: Path) -> Found:
    """The 24,231 frames of the lists, which show the same 654 pictures for the test as everybody's."""
    listed = "nyudepthv2_train_files_with_gt.txt", "nyu_train.txt"
    tested = "nyudepthv2_test_files_with_gt.txt", "nyu_test.txt"
    folders = {"train": ("sync", "train", ""), "test": ("official_splits/test", "test", "")}
    splits = {
        split: _listed(root, first_there(root, *lists), folders[split], folders[split], MILLIMETRES)
        for split, lists in (("train", listed), ("test", tested))
    }
    # One scene may have several takes: basement_0001a, basement_0001b.
    scenes = [name.rpartition("/")[0].rstrip(ascii_lowercase) for name in _names(splits["train"])]
    return Found(splits, [], scenes)


def nyuv2_labelled(root: Path) -> Found:
    """The 795 + 654 pictures of the labelled file, unpacked to `SCENE/rgb_….jpg` and `SCENE/sync_depth_….png`."""
    splits = {}
    for split in ("train", "test"):
        folder = f"official_splits/{split}"
        images = [name for name in pictures_in(root, folder) if Path(name).name.startswith("rgb_")]
        depths = [f"{Path(n).parent}/sync_depth_{Path(n).stem.removeprefix('rgb_')}.png" for n in images]
        if not images:
            raise DatasetError(f"{root / folder} has no pictures SCENE/rgb_….jpg")
        splits[split] = Split(Places(root, images), Maps(Places(root, depths), per_metre=MILLIMETRES))
        check_there(Places(root, depths))
    return Found(splits, [])


def kitti(root: Path) -> Found:
    """The Eigen split with the denser depths of the depth benchmark; pictures that have none there are left out."""
    lists = {"train": ("eigen_train_files_with_gt.txt", "kitti_eigen_train.txt")}
    lists |= {"test": ("eigen_test_files_with_gt.txt", "kitti_eigen_test.txt")}
    images = ("", "raw", "raw_data", "input")
    depths = ("data_depth_annotated", "data_depth_annotated/train", "data_depth_annotated/val", "gt_depth")
    splits = {s: _listed(root, first_there(root, *n), images, depths, KITTI_UNITS) for s, n in lists.items()}
    return Found(splits, [], [name.partition("_sync/")[0] for name in _names(splits["train"])])


def _names(split: Split) -> list[str]:
    return [split.name(i) for i in range(len(split))]
