"""Readers of the published benchmarks, in their published layouts and those of common toolboxes.

Each takes the dataset's folder, and the values of `layout` in published.toml.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from veca.data.datasets import base
from veca.data.datasets.base import IGNORE, DatasetError, LabelMaps, Split, images_in, read_columns, read_lines
from veca.data.index import ImageIndex

# The published splits, and the classes in the order of their numbers
PublishedSplits: TypeAlias = tuple[dict[str, Split], list[str]]
# Alternative names, by split
_Names: TypeAlias = Mapping[str, Sequence[str]]
# The train id of each value of a mask; -1 for a value that must not occur
TrainIds: TypeAlias = NDArray[np.int16]

CLASS_NAMES: dict[str, Any] = tomllib.loads((files("veca.data.datasets") / "class_names.toml").read_text("utf-8"))
_KAGGLE = "ILSVRC/Data/CLS-LOC"
_IMAGENET_NUMBERS = [str(i) for i in range(1000)]
_VAL_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})\.")
_CIFAR_PIXELS = 32 * 32
_VOC_MARKS = {"1": 1, "-1": 0, "0": -1}
"""What the lists of VOC2007 say of a class: present, absent, only as difficult objects."""
_CUB_MARKS = {"train": "1", "test": "0"}
_CALTECH_TRAIN = 30
"""Images of each class in train; the rest is test."""


def _checked_split(root: Path, names: Sequence[str], targets: NDArray[Any] | LabelMaps) -> Split:
    split = Split(ImageIndex.of_files(root, names), targets)
    base.check_files_exist(split.images)
    if isinstance(targets, LabelMaps):
        base.check_files_exist(targets.files)
    return split


def _class_numbers(listed: Path, names: Iterable[object], classes: Sequence[str]) -> list[int]:
    """Return the numbers of classes, counted from 0, that a list gives by their names, or by numbers as text."""
    index = {name: i for i, name in enumerate(classes)}
    texts = [str(name) for name in names]
    if unknown := [text for text in texts if text not in index]:
        known = f"the {len(classes)} classes are {classes[0]} to {classes[-1]}"
        raise DatasetError(f"{listed} has the class {unknown[0]!r}; {known}")
    return [index[text] for text in texts]


def _listed(
    root: Path, image: str, listed: Path, rows: Iterable[Sequence[object]], classes: Sequence[str] | int
) -> Split:
    """Return the images of a list: rows of a name, which becomes a file by the pattern `image`, and a class.

    An integer for `classes` is their number, where the list has numbers from 1.
    """
    rows = list(rows)
    names = [image.format(str(row[0]).lstrip("/")) for row in rows]
    known = [str(i + 1) for i in range(classes)] if isinstance(classes, int) else classes
    return _checked_split(root, names, np.array(_class_numbers(listed, (row[1] for row in rows), known), np.int64))


def read_imagenet(root: Path) -> PublishedSplits:
    """Class numbers follow the sorted WordNet ids, as do ImageNetV2's folders and ReaL's labels."""
    images = root / _KAGGLE if (root / _KAGGLE).is_dir() else root
    ids, names = base.subfolders(images / "train"), dict[str, str]()
    for file in ("LOC_synset_mapping.txt", "synset_words.txt"):  # without either, the ids serve as names
        if (root / file).exists():
            names = dict(line.split(" ", 1) for line in read_lines(root / file) if " " in line)
    splits = {"train": base.class_folders(images, "train", ids), "val": _imagenet_val(root, images, ids)}
    return splits, [names.get(wnid, wnid) for wnid in ids]


def _imagenet_val(root: Path, images: Path, ids: list[str]) -> Split:
    """Validation images are in class folders, or all in one with the list of the Kaggle release."""
    val, listed = images / "val", root / "LOC_val_solution.csv"
    if folders := base.subfolders(val):
        if unknown := sorted(set(folders) - set(ids)):
            raise DatasetError(f"{val} has the class {unknown[0]}, which {images / 'train'} has not")
        return base.class_folders(images, "val", ids)
    if not listed.exists():
        raise DatasetError(f"{val} has no folders of classes, and {root} has no {listed.name} with the labels")
    pairs = (line.partition(",") for line in read_lines(listed)[1:])
    rows = [(name, boxes.partition(" ")[0]) for name, _, boxes in pairs]  # image,class x y …
    return _listed(images, "val/{}.JPEG", listed, rows, ids)


def read_imagenetv2(root: Path) -> PublishedSplits:
    return {"test": base.class_folders(root, "", _IMAGENET_NUMBERS)}, _IMAGENET_NUMBERS


def read_imagenet_real(root: Path) -> PublishedSplits:
    """The labels are lists of valid classes by number of the validation image; images without any are left out."""
    images = root / _KAGGLE if (root / _KAGGLE).is_dir() else root
    listed = root / "real.json"
    try:
        valid = json.loads("\n".join(read_lines(listed)))
    except (json.JSONDecodeError, RecursionError):
        valid = None
    if not isinstance(valid, list) or not all(isinstance(labels, list) for labels in valid):
        raise DatasetError(f"{listed} is not a list with a list of labels for each validation picture")
    numbered = sorted((int(match[1]), n) for n in images_in(images, "val") if (match := _VAL_NUMBER.search(n)))
    # real.json has an entry for each of the 50,000 validation images in order; this copy may have fewer of them.
    if not numbered or not 1 <= numbered[0][0] <= numbered[-1][0] <= len(valid):
        count = f"{len(numbered):,} pictures ILSVRC2012_val_….JPEG"
        raise DatasetError(f"{images / 'val'} has {count}, {listed} {len(valid):,}")
    rows = [(valid[i - 1], name) for i, name in numbered if valid[i - 1]]
    marks = np.zeros((len(rows), len(_IMAGENET_NUMBERS)), np.int8)
    for row, (labels, _) in zip(marks, rows, strict=True):
        row[_class_numbers(listed, labels, _IMAGENET_NUMBERS)] = 1
    folders = base.subfolders(images / "val")
    split = _checked_split(images, [name for _, name in rows], marks)
    return {"test": split}, folders if len(folders) == len(_IMAGENET_NUMBERS) else _IMAGENET_NUMBERS


def read_places365(root: Path) -> PublishedSplits:
    if not (root / "categories_places365.txt").exists():  # the "easy" archive, in class folders
        classes = base.subfolders(root / "train")
        return {name: base.class_folders(root, name, classes) for name in ("train", "val")}, classes
    categories, splits = read_columns(root / "categories_places365.txt", 2), {}
    numbers = [str(i) for i in range(len(categories))]
    for split, name, *folders in (
        ("train", "places365_train_standard.txt", "data_256_standard", "data_large_standard", "data_256"),
        ("val", "places365_val.txt", "val_256", "val_large"),
    ):
        rows = read_columns(root / name, 2)
        splits[split] = _listed(root, f"{base.first_existing(root, *folders)}/{{}}", root / name, rows, numbers)
    categories.sort(key=lambda row: _class_numbers(root, [row[1]], numbers))
    return splits, [row[0].split("/", 2)[-1] for row in categories]


def read_lists(
    root: Path, lists: Mapping[str, Sequence[str]], image: str, classes: str = "", named: bool = False
) -> PublishedSplits:
    """Lists of lines CLASS/NAME, or with `named` NAME CLASS; names become files by the pattern `image`.

    `lists` has the alternative names of the list of each split, `classes` the list of the classes; without it they are
    those of the lines, sorted.
    """
    files, rows = {split: root / base.first_existing(root, *names) for split, names in lists.items()}, {}
    for split, file in files.items():
        lines = read_lines(file)
        rows[split] = [line.partition(" ")[::2] if named else (line, line.rpartition("/")[0]) for line in lines]
    known = {name for part in rows.values() for _, name in part}
    every = read_lines(root / classes) if classes else sorted(known)
    splits = {split: _listed(root, image, files[split], rows[split], every) for split in rows}
    # SUN397 has its classes as /a/abbey, sorted by the first letter.
    return splits, [name.split("/", 2)[-1] if name.startswith("/") else name for name in every]


def _cifar_to_ppm(data: bytes) -> bytes:
    """An image of 32 × 32 stored as all red, then all green, then all blue, as a PPM file."""
    return b"P6 32 32 255\n" + np.frombuffer(data, np.uint8).reshape(3, _CIFAR_PIXELS).T.tobytes()


def read_cifar(root: Path, classes: str, label_bytes: int, **files: Sequence[str]) -> PublishedSplits:
    """Files of each split with records of `label_bytes` bytes, the last of which is the class, and the image."""
    names, record = read_lines(root / classes), label_bytes + 3 * _CIFAR_PIXELS
    splits = {}
    for split, batches in files.items():
        images, spans, labels = [], [], []
        for batch in batches:
            size = (root / batch).stat().st_size
            if not size or size % record:
                raise DatasetError(f"{root / batch} has {size:,} bytes, not a multiple of {record:,}; get it again")
            column = np.memmap(root / batch, np.uint8, "r", shape=(size // record, record))[:, label_bytes - 1]
            labels.append(column.astype(np.int64))
            images += [f"{batch}\0{i}" for i in range(len(column))]
            spans += [(i * record + label_bytes, 3 * _CIFAR_PIXELS) for i in range(len(column))]
        numbers = np.concatenate(labels)
        if numbers.max() >= len(names):
            raise DatasetError(f"{root} has the class {numbers.max()}; there are {len(names)}")
        splits[split] = Split(ImageIndex.of_files(root, images, np.array(spans, np.int64)), numbers, _cifar_to_ppm)
    return splits, names


def read_cars(root: Path) -> PublishedSplits:
    names = np.atleast_1d(base.load_mat(root / "devkit/cars_meta.mat", "class_names")["class_names"])
    # The devkit's own annotations of test have no classes; the labels were published later in another file.
    test = base.first_existing(root, "cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat")
    splits = {}
    for split, listed in (("train", "devkit/cars_train_annos.mat"), ("test", test)):
        rows = np.atleast_1d(base.load_mat(root / listed, "annotations")["annotations"])
        if rows.dtype.names is None or not {"fname", "class"}.issubset(rows.dtype.names):
            raise DatasetError(f"{root / listed} has no fname and class; for test take the file with labels")
        pairs = [(row["fname"], row["class"]) for row in rows]
        splits[split] = _listed(root, f"cars_{split}/{{}}", root / listed, pairs, len(names))
    return splits, [str(name) for name in names]


def read_voc2007(root: Path) -> PublishedSplits:
    """Labels are 1 where a class is in the image, 0 where not, -1 where all of it was marked difficult.

    The published score ignores the last, class by class.
    """
    lists, splits, classes = root / "ImageSets/Main", {}, CLASS_NAMES["voc"]
    for split in ("train", "val", "test"):
        names = read_lines(lists / f"{split}.txt")
        marks = np.zeros((len(names), len(classes)), np.int8)
        for column, name in enumerate(classes):
            listed = lists / f"{name}_{split}.txt"
            rows = dict(row[:2] for row in read_columns(listed, 2))
            if missing := next((key for key in names if rows.get(key) not in _VOC_MARKS), None):
                raise DatasetError(f"{listed} has no 1, 0 or -1 for picture {missing}")
            marks[:, column] = [_VOC_MARKS[rows[key]] for key in names]
        splits[split] = _checked_split(root, [f"JPEGImages/{name}.jpg" for name in names], marks)
    return splits, classes


def read_caltech101(root: Path) -> PublishedSplits:
    """There is no official split: of each class, the 30 images whose names have the lowest hashes are train."""
    classes = base.subfolders(root / "101_ObjectCategories")
    images = base.class_folders(root, "101_ObjectCategories", classes)
    train = base.lowest_hashes(images, lambda count: min(_CALTECH_TRAIN, count - 1))
    return {"train": images.take(np.flatnonzero(train)), "test": images.take(np.flatnonzero(~train))}, classes


def read_pets(root: Path) -> PublishedSplits:
    files = {"train": root / "annotations/trainval.txt", "test": root / "annotations/test.txt"}
    rows = {split: [row for row in read_columns(file, 2) if row[0][0] != "#"] for split, file in files.items()}
    splits = {split: _listed(root, "images/{}.jpg", files[split], rows[split], 37) for split in files}
    # Images are named by their breed: american_bulldog_9.
    names = {int(row[1]): row[0].rpartition("_")[0] for part in rows.values() for row in part}
    return splits, [names.get(i, f"class {i}") for i in range(1, max(names) + 1)]


def read_cub200(root: Path) -> PublishedSplits:
    classes = [row[1] for row in read_columns(root / "classes.txt", 2)]
    listed = root / "image_class_labels.txt"
    labels, is_train = (dict(row[:2] for row in read_columns(f, 2)) for f in (listed, root / "train_test_split.txt"))
    images = read_columns(root / "images.txt", 2)
    if missing := next((row[0] for row in images if row[0] not in labels or row[0] not in is_train), None):
        raise DatasetError(f"picture {missing} of images.txt is not in the two other lists")
    rows = {s: [(file, labels[i]) for i, file, *_ in images if is_train[i] == mark] for s, mark in _CUB_MARKS.items()}
    splits = {split: _listed(root, "images/{}", listed, rows[split], len(classes)) for split in rows}
    return splits, [name.partition(".")[2] or name for name in classes]


def read_flowers102(root: Path) -> PublishedSplits:
    """The files hold no names of the classes: their numbers 1 to 102 serve as names."""
    labels = np.atleast_1d(base.load_mat(root / "imagelabels.mat", "labels")["labels"])
    keys = {"train": "trnid", "val": "valid", "test": "tstid"}
    ids_by_key = base.load_mat(root / "setid.mat", *keys.values())
    splits = {}
    for split, key in keys.items():
        ids = np.atleast_1d(ids_by_key[key]).tolist()
        if not all(1 <= i <= len(labels) for i in ids):
            raise DatasetError(f"{root / 'setid.mat'} has picture {max(ids)}; imagelabels.mat has {len(labels):,}")
        rows = [(f"{i:05d}", labels[i - 1]) for i in ids]
        splits[split] = _listed(root, "jpg/image_{}.jpg", root / "imagelabels.mat", rows, 102)
    return splits, [str(i) for i in range(1, 103)]


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


def _paired_folders(root: Path, images: str, masks: str, ends: tuple[str, str], ids: TrainIds) -> Split:
    """Pair the masks of a folder, NAME + ends[1], with the images NAME + ends[0] of another."""
    image_end, mask_end = ends
    names = [name for name in images_in(root, masks) if name.endswith(mask_end)]
    if not names:
        raise DatasetError(f"{root / masks} has no masks *{mask_end}")
    stems = [name[len(masks) + 1 : -len(mask_end)] for name in names]
    maps = LabelMaps(ImageIndex.of_files(root, names), ids)
    return _checked_split(root, [f"{images}/{stem}{image_end}" for stem in stems], maps)


def _listed_masks(root: Path, stems: Iterable[str], mask: str, ids: TrainIds, variable: str = "") -> Split:
    """Images of a PASCAL VOC folder and their masks, by stems and a pattern."""
    stems = list(stems)
    maps = LabelMaps(ImageIndex.of_files(root, [mask.format(stem) for stem in stems]), ids, variable=variable)
    return _checked_split(root, [f"JPEGImages/{stem}.jpg" for stem in stems], maps)


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
    lists = base.first_existing(root, "ImageSets/SegmentationContext", "ImageSets/Main")
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
    names = CLASS_NAMES["cityscapes"]
    ends, ids = ("_leftImg8bit.png", "_gtFine_labelIds.png"), train_ids(map(int, names), range(34))
    splits = {s: _paired_folders(root, f"leftImg8bit/{s}", f"gtFine/{s}", ends, ids) for s in ("train", "val")}
    return splits, list(names.values())


def read_coco(root: Path, things_only: bool) -> PublishedSplits:
    """COCO-Stuff, or with `things_only` COCO-Object, from the masks of the release or converted to train ids.

    Of COCO-Object, stuff and unlabelled pixels are background, which is a class: nothing is ignored.
    """
    # Masks hold the numbers of the labels; the first 91 are things.
    names: list[str] = CLASS_NAMES["coco"]
    used = [i for i in range(91 if things_only else len(names)) if i not in CLASS_NAMES["coco_unused"]]
    background, end = (["background"], "_instanceTrainIds.png") if things_only else ([], "_labelTrainIds.png")
    ids = train_ids(used, (*range(len(names)), IGNORE), 0 if things_only else IGNORE, start=len(background))
    classes = [*background, *(names[i] for i in used)]
    splits = {}
    for split, folder in (("train", "train2017"), ("val", "val2017")):
        images = base.first_existing(root, f"images/{folder}", folder)
        tops = ("annotations", "stuffthingmaps", "stuffthingmaps_trainval2017")
        masks = base.first_existing(root, *(f"{top}/{folder}" for top in tops))
        # Converted masks lie beside the released ones in mmsegmentation's layout; the released ones are preferred.
        released = [name for name in images_in(root, masks) if not name.endswith("TrainIds.png")]
        if released:
            files = [f"{images}/{Path(name).stem}.jpg" for name in released]
            splits[split] = _checked_split(root, files, LabelMaps(ImageIndex.of_files(root, released), ids))
        else:
            splits[split] = _paired_folders(root, images, masks, (".jpg", end), train_ids(range(len(classes))))
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
        listed = root / base.first_existing(root, *names)
        rows = [row for row in read_columns(listed, 2) if row[1] != "None"]
        if not rows:
            raise DatasetError(f"{listed} names no picture with a depth")
        image_files = [_find_below(root, row[0], images[split]) for row in rows]
        depth_files = [_find_below(root, row[1], depths[split]) for row in rows]
        maps = LabelMaps(ImageIndex.of_files(root, depth_files), units_per_metre=units_per_metre)
        splits[split] = Split(ImageIndex.of_files(root, image_files), maps)
    return splits, []


def _find_below(root: Path, name: str, folders: Sequence[str]) -> str:
    return base.first_existing(root, *(os.path.join(folder, name.lstrip("/")) for folder in folders))


def read_nyuv2_labelled(root: Path) -> PublishedSplits:
    """The 795 + 654 images of the labelled file, unpacked to `SCENE/rgb_….jpg` and `SCENE/sync_depth_….png`."""
    splits = {}
    for split in ("train", "test"):
        folder = f"official_splits/{split}"
        images = [name for name in images_in(root, folder) if Path(name).name.startswith("rgb_")]
        depths = [f"{Path(n).parent}/sync_depth_{Path(n).stem.removeprefix('rgb_')}.png" for n in images]
        if not images:
            raise DatasetError(f"{root / folder} has no pictures SCENE/rgb_….jpg")
        maps = LabelMaps(ImageIndex.of_files(root, depths), units_per_metre=1000)
        splits[split] = _checked_split(root, images, maps)
    return splits, []
