"""Readers of the segmentation and depth benchmarks, in their published layouts and those of common toolboxes.

Each takes the dataset's folder, and the values of `layout` in published.toml.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from veca.data.datasets.base import IGNORE, LabelMaps, Split, check_files_exist
from veca.data.datasets.listings import DatasetError, first_existing, images_in, read_columns, read_lines
from veca.data.index import ImageIndex

# The published splits, and the classes in the order of their numbers
PublishedSplits: TypeAlias = tuple[dict[str, Split], list[str]]
# Alternative names, by split
_Names: TypeAlias = Mapping[str, Sequence[str]]
# The train id of each value of a mask; -1 for a value that must not occur
TrainIds: TypeAlias = NDArray[np.int16]

CLASS_NAMES: dict[str, Any] = tomllib.loads((files("veca.data.datasets") / "class_names.toml").read_text("utf-8"))
_CITYSCAPES = {int(value): str(name) for value, name in CLASS_NAMES["cityscapes"].items()}
# COCO's masks hold the labels' numbers, counted from 0; the first 91 are things, and 11 of these have no image.
_COCO: list[str] = CLASS_NAMES["coco"]
_COCO_USED = [i for i in range(len(_COCO)) if i not in CLASS_NAMES["coco_unused"]]
_COCO_THINGS = [i for i in _COCO_USED if i < 91]


def train_ids(
    values: Iterable[int], others: Iterable[int] = (IGNORE,), other: int = IGNORE, start: int = 0
) -> TrainIds:
    """Number the values of a mask from `start`; `others` become `other`, and any further value must not occur.

    Without `others`, 255 is ignored, as in masks that hold train ids already.
    """
    table = dict.fromkeys(others, other) | {value: start + i for i, value in enumerate(values)}
    ids = np.full(max(256, max(table) + 1), -1, np.int16)
    ids[list(table)] = list(table.values())
    return ids


def _masked_images(
    root: Path, images: Sequence[str], masks: Sequence[str], ids: TrainIds | None, variable: str = "", units: int = 0
) -> Split:
    files, maps = ImageIndex.of_files(root, images), LabelMaps(ImageIndex.of_files(root, masks), ids, units, variable)
    split = Split(files, maps)
    check_files_exist(files)
    check_files_exist(maps.files)
    return split


def _paired_folders(root: Path, images: str, masks: str, ends: tuple[str, str], ids: TrainIds) -> Split:
    """Pair the masks of a folder, NAME + ends[1], with the images NAME + ends[0] of another."""
    image_end, mask_end = ends
    names = [name for name in images_in(root, masks) if name.endswith(mask_end)]
    if not names:
        raise DatasetError(f"{root / masks} has no masks *{mask_end}")
    stems = [name[len(masks) + 1 : -len(mask_end)] for name in names]
    return _masked_images(root, [f"{images}/{stem}{image_end}" for stem in stems], names, ids)


def _listed_masks(root: Path, stems: Iterable[str], mask: str, ids: TrainIds, variable: str = "") -> Split:
    """Images of a PASCAL VOC folder and their masks, by stems and a pattern."""
    stems = list(stems)
    images, masks = ([pattern.format(stem) for stem in stems] for pattern in ("JPEGImages/{}.jpg", mask))
    return _masked_images(root, images, masks, ids, variable)


def read_voc2012(root: Path, train_list: str, train_masks: str) -> PublishedSplits:
    classes, splits = ["background", *CLASS_NAMES["voc"]], {}
    for split, listed, folder in (("train", train_list, train_masks), ("val", "val", "SegmentationClass")):
        # The list of trainaug also exists with paths: /JPEGImages/2007_000032.jpg /SegmentationClassAug/….
        rows = read_columns(root / f"ImageSets/Segmentation/{listed}.txt", 1)
        stems = (Path(row[0]).stem for row in rows)
        splits[split] = _listed_masks(root, stems, f"{folder}/{{}}.png", train_ids(range(len(classes))))
    return splits, classes


def read_context60(root: Path) -> PublishedSplits:
    """Masks as the toolboxes convert them, or the 459 labels of the release, mapped by the names in its list."""
    lists = first_existing(root, "ImageSets/SegmentationContext", "ImageSets/Main")
    classes: list[str] = CLASS_NAMES["context"]
    if (root / "SegmentationClassContext").is_dir():
        masks = "SegmentationClassContext/{}.png", train_ids(range(len(classes))), ""
    else:
        masks = "trainval/{}.mat", _context_ids(root / "labels.txt", classes), "LabelMap"
    stems = {split: read_lines(root / lists / f"{split}.txt") for split in ("train", "val")}
    return {split: _listed_masks(root, stems[split], *masks) for split in stems}, classes


def _context_ids(path: Path, classes: Sequence[str]) -> TrainIds:
    """Map the numbers of the 459 labels; 0 and all but the 59 classes are background."""
    pairs = [line.split(":", 1) for line in read_lines(path)]
    if not all(len(pair) == 2 and pair[0].isdecimal() and int(pair[0]) < 1 << 16 for pair in pairs):
        raise DatasetError(f"{path} is not a list of lines such as '2: aeroplane'")
    labels = {name.strip(): int(number) for number, name in pairs}
    if missing := sorted(set(classes[1:]) - labels.keys()):
        raise DatasetError(f"the list of labels has no {', '.join(missing)}")
    return train_ids((labels[name] for name in classes[1:]), (0, *labels.values()), other=0, start=1)


def read_ade20k(root: Path) -> PublishedSplits:
    ids = train_ids(range(1, 151), [0])
    splits = {
        split: _paired_folders(root, f"images/{name}", f"annotations/{name}", (".jpg", ".png"), ids)
        for split, name in (("train", "training"), ("val", "validation"))
    }
    listed = root / "objectInfo150.txt"
    rows = [line.split("\t") for line in read_lines(listed)[1:]]
    names = {int(row[0]): row[-1].strip() for row in rows if row[0].strip().isdecimal()}
    if sorted(names) != list(range(1, 151)):
        raise DatasetError(f"{listed} has {len(names)} classes in columns set apart by tabs; 150 are expected")
    return splits, [names[i] for i in range(1, 151)]


def read_cityscapes(root: Path) -> PublishedSplits:
    ends, ids = ("_leftImg8bit.png", "_gtFine_labelIds.png"), train_ids(_CITYSCAPES, range(34))
    splits = {s: _paired_folders(root, f"leftImg8bit/{s}", f"gtFine/{s}", ends, ids) for s in ("train", "val")}
    return splits, list(_CITYSCAPES.values())


def read_coco(root: Path, things_only: bool) -> PublishedSplits:
    """COCO-Stuff, or with `things_only` COCO-Object, from the masks of the release or converted to train ids.

    Of COCO-Object, stuff and unlabelled pixels are background, which is a class: nothing is ignored.
    """
    others, classes, converted = (*range(len(_COCO)), IGNORE), [_COCO[i] for i in _COCO_USED], "_labelTrainIds.png"
    ids = train_ids(_COCO_USED, others)
    if things_only:
        classes, converted = ["background", *(_COCO[i] for i in _COCO_THINGS)], "_instanceTrainIds.png"
        ids = train_ids(_COCO_THINGS, others, other=0, start=1)
    splits = {}
    for split, folder in (("train", "train2017"), ("val", "val2017")):
        images = first_existing(root, f"images/{folder}", folder)
        tops = ("annotations", "stuffthingmaps", "stuffthingmaps_trainval2017")
        masks = first_existing(root, *(f"{top}/{folder}" for top in tops))
        # Converted masks lie beside the released ones in mmsegmentation's layout; the released ones are preferred.
        released = [name for name in images_in(root, masks) if not name.endswith("TrainIds.png")]
        if released:
            names = [f"{images}/{Path(name).stem}.jpg" for name in released]
            splits[split] = _masked_images(root, names, released, ids)
        else:
            splits[split] = _paired_folders(root, images, masks, (".jpg", converted), train_ids(range(len(classes))))
    return splits, classes


def read_depth_lists(
    root: Path, lists: _Names, images: _Names, depths: _Names, units_per_metre: int
) -> PublishedSplits:
    """Lists of lines `image depth …`, where "None" stands for no depth and the line is left out.

    All three mappings give alternatives for each split: of the list's name, and of the folders that hold the images
    and depths.
    """
    splits = {}
    for split, names in lists.items():
        listed = root / first_existing(root, *names)
        rows = [row for row in read_columns(listed, 2) if row[1] != "None"]
        if not rows:
            raise DatasetError(f"{listed} names no picture with a depth")
        image_files, depth_files = (
            [first_existing(root, *(os.path.join(f, row[column].lstrip("/")) for f in folders[split])) for row in rows]
            for column, folders in enumerate((images, depths))
        )
        splits[split] = _masked_images(root, image_files, depth_files, None, units=units_per_metre)
    return splits, []


def read_nyuv2_labelled(root: Path) -> PublishedSplits:
    """The 795 + 654 images of the labelled file, unpacked to `SCENE/rgb_….jpg` and `SCENE/sync_depth_….png`."""
    splits = {}
    for split in ("train", "test"):
        folder = f"official_splits/{split}"
        images = [name for name in images_in(root, folder) if Path(name).name.startswith("rgb_")]
        depths = [f"{Path(n).parent}/sync_depth_{Path(n).stem.removeprefix('rgb_')}.png" for n in images]
        if not images:
            raise DatasetError(f"{root / folder} has no pictures SCENE/rgb_….jpg")
        splits[split] = _masked_images(root, images, depths, None, units=1000)
    return splits, []
