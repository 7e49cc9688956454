"""Readers of the segmentation and depth benchmarks, in their published layouts and those of common toolboxes.

Each takes the dataset's folder, and the values of `layout` in published.toml.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from veca.data.datasets import classes as tables
from veca.data.datasets import layout
from veca.data.datasets.base import DatasetError, FileList, LabelMaps, Split
from veca.data.datasets.layout import PublishedSplits

# Alternative names, by split
_Names = Mapping[str, Sequence[str]]


def _masked_images(
    root: Path, images: Sequence[str], masks: Sequence[str], train_ids: tables.TrainIds, variable: str = ""
) -> Split:
    files, mask_files = FileList(root, images), FileList(root, masks)
    split = Split(files, LabelMaps(mask_files, train_ids, variable=variable))
    layout.check_files_exist(files)
    layout.check_files_exist(mask_files)
    return split


def _paired_folders(root: Path, images: str, masks: str, ends: tuple[str, str], train_ids: tables.TrainIds) -> Split:
    """Pair the masks of a folder, NAME + ends[1], with the images NAME + ends[0] of another."""
    image_end, mask_end = ends
    names = [name for name in layout.images_in(root, masks) if name.endswith(mask_end)]
    if not names:
        raise DatasetError(f"{root / masks} has no masks *{mask_end}")
    stems = [name[len(masks) + 1 : -len(mask_end)] for name in names]
    return _masked_images(root, [f"{images}/{stem}{image_end}" for stem in stems], names, train_ids)


def _listed_masks(
    root: Path, stems: Sequence[str], folder: str, train_ids: tables.TrainIds, end: str = ".png", variable: str = ""
) -> Split:
    """Images of a PASCAL VOC folder and their masks, by stems."""
    masks = [f"{folder}/{stem}{end}" for stem in stems]
    return _masked_images(root, [f"JPEGImages/{stem}.jpg" for stem in stems], masks, train_ids, variable)


def read_voc2012(root: Path, train_list: str, train_masks: str) -> PublishedSplits:
    train_ids, splits = tables.identity(1 + len(tables.VOC)), {}
    for split, listed, folder in (("train", train_list, train_masks), ("val", "val", "SegmentationClass")):
        # The list of trainaug also exists with paths: /JPEGImages/2007_000032.jpg /SegmentationClassAug/….
        rows = layout.read_columns(root / f"ImageSets/Segmentation/{listed}.txt", 1)
        splits[split] = _listed_masks(root, [Path(row[0]).stem for row in rows], folder, train_ids)
    return PublishedSplits(splits, ["background", *tables.VOC])


def read_context60(root: Path) -> PublishedSplits:
    """Masks as the toolboxes convert them, or the 459 labels of the release, mapped by the names in its list."""
    lists = layout.first_existing(root, "ImageSets/SegmentationContext", "ImageSets/Main")
    if (root / "SegmentationClassContext").is_dir():
        masks = "SegmentationClassContext", tables.identity(len(tables.CONTEXT)), ".png", ""
    else:
        masks = "trainval", tables.context_ids(_context_labels(root / "labels.txt")), ".mat", "LabelMap"
    stems = {split: layout.read_lines(root / lists / f"{split}.txt") for split in ("train", "val")}
    return PublishedSplits({s: _listed_masks(root, stems[s], *masks) for s in stems}, list(tables.CONTEXT))


def _context_labels(path: Path) -> dict[int, str]:
    pairs = [line.split(":", 1) for line in layout.read_lines(path)]
    if not all(len(pair) == 2 and pair[0].isdecimal() and int(pair[0]) < 1 << 16 for pair in pairs):
        raise DatasetError(f"{path} is not a list of lines such as '2: aeroplane'")
    return {int(pair[0]): pair[1].strip() for pair in pairs}


def read_ade20k(root: Path) -> PublishedSplits:
    splits = {
        split: _paired_folders(root, f"images/{name}", f"annotations/{name}", (".jpg", ".png"), tables.ade20k_ids())
        for split, name in (("train", "training"), ("val", "validation"))
    }
    listed = root / "objectInfo150.txt"
    rows = [line.split("\t") for line in layout.read_lines(listed)[1:]]
    names = {int(row[0]): row[-1].strip() for row in rows if row[0].strip().isdecimal()}
    if sorted(names) != list(range(1, 151)):
        raise DatasetError(f"{listed} has {len(names)} classes in columns set apart by tabs; 150 are expected")
    return PublishedSplits(splits, [names[i] for i in range(1, 151)])


def read_cityscapes(root: Path) -> PublishedSplits:
    ends, ids = ("_leftImg8bit.png", "_gtFine_labelIds.png"), tables.cityscapes_ids()
    splits = {s: _paired_folders(root, f"leftImg8bit/{s}", f"gtFine/{s}", ends, ids) for s in ("train", "val")}
    return PublishedSplits(splits, list(tables.CITYSCAPES.values()))


def read_coco(root: Path, things_only: bool) -> PublishedSplits:
    """COCO-Stuff, or with `things_only` COCO-Object, from the masks of the release or converted to train ids."""
    train_ids, classes, converted = tables.coco_stuff_ids(), tables.COCO_STUFF, "_labelTrainIds.png"
    if things_only:
        train_ids, classes, converted = tables.coco_object_ids(), tables.COCO_OBJECT, "_instanceTrainIds.png"
    splits = {}
    for split, folder in (("train", "train2017"), ("val", "val2017")):
        images = layout.first_existing(root, f"images/{folder}", folder)
        tops = ("annotations", "stuffthingmaps", "stuffthingmaps_trainval2017")
        masks = layout.first_existing(root, *(f"{top}/{folder}" for top in tops))
        # Converted masks lie beside the released ones in mmsegmentation's layout; the released ones are preferred.
        released = [name for name in layout.images_in(root, masks) if not name.endswith("TrainIds.png")]
        if released:
            names = [f"{images}/{Path(name).stem}.jpg" for name in released]
            splits[split] = _masked_images(root, names, released, train_ids)
        else:
            splits[split] = _paired_folders(root, images, masks, (".jpg", converted), tables.identity(len(classes)))
    return PublishedSplits(splits, list(classes))


def read_depth_lists(
    root: Path, lists: _Names, images: _Names, depths: _Names, units_per_metre: int, scene: str
) -> PublishedSplits:
    """Lists of lines `image depth …`, where "None" stands for no depth and the line is left out.

    All three mappings give alternatives for each split: of the list's name, and of the folders that hold the images
    and depths. `scene` is a regular expression for the scene in the name of an image.
    """
    splits = {}
    for split, names in lists.items():
        listed = root / layout.first_existing(root, *names)
        rows = [row for row in layout.read_columns(listed, 2) if row[1] != "None"]
        if not rows:
            raise DatasetError(f"{listed} names no picture with a depth")
        image_files = FileList(root, [_find_below(root, row[0], images[split]) for row in rows])
        depth_files = FileList(root, [_find_below(root, row[1], depths[split]) for row in rows])
        splits[split] = Split(image_files, LabelMaps(depth_files, units_per_metre=units_per_metre))
    train = splits["train"]
    # Frames of one scene look alike, so held-out validation takes whole scenes.
    matches = [re.match(scene, name) or re.match("(.*)", name) for name in map(train.name, range(len(train)))]
    return PublishedSplits(splits, [], [match[1] for match in matches if match])


def _find_below(root: Path, name: str, folders: Sequence[str]) -> str:
    return layout.first_existing(root, *(os.path.join(folder, name.lstrip("/")) for folder in folders))


def read_nyuv2_labelled(root: Path) -> PublishedSplits:
    """The 795 + 654 images of the labelled file, unpacked to `SCENE/rgb_….jpg` and `SCENE/sync_depth_….png`."""
    splits = {}
    for split in ("train", "test"):
        folder = f"official_splits/{split}"
        images = [name for name in layout.images_in(root, folder) if Path(name).name.startswith("rgb_")]
        depths = [f"{Path(n).parent}/sync_depth_{Path(n).stem.removeprefix('rgb_')}.png" for n in images]
        if not images:
            raise DatasetError(f"{root / folder} has no pictures SCENE/rgb_….jpg")
        depth_files = FileList(root, depths)
        splits[split] = Split(FileList(root, images), LabelMaps(depth_files, units_per_metre=1000))
        layout.check_files_exist(depth_files)
    return PublishedSplits(splits, [])
