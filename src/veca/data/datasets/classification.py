"""Readers of the classification benchmarks, from the files they were published as.

Each takes the dataset's folder, and the values of `layout` in published.toml.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from veca.data.datasets import listings
from veca.data.datasets.base import Split, check_files_exist, class_folders, lowest_hashes
from veca.data.datasets.dense import CLASS_NAMES, PublishedSplits
from veca.data.datasets.listings import DatasetError
from veca.data.index import ImageIndex

_KAGGLE = "ILSVRC/Data/CLS-LOC"
_IMAGENET_NUMBERS = [str(i) for i in range(1000)]
_VAL_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})\.")
_CIFAR_PIXELS = 32 * 32
_VOC_MARKS = {"1": 1, "-1": 0, "0": -1}
"""What the lists of VOC2007 say of a class: present, absent, only as difficult objects."""
_CALTECH_TRAIN = 30
"""Images of each class in train; the rest is test."""


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
    numbers = np.array(_class_numbers(listed, (row[1] for row in rows), known), np.int64)
    split = Split(ImageIndex.of_files(root, names), numbers)
    check_files_exist(split.images)
    return split


def read_imagenet(root: Path) -> PublishedSplits:
    """Class numbers follow the sorted WordNet ids, as do ImageNetV2's folders and ReaL's labels."""
    images = root / _KAGGLE if (root / _KAGGLE).is_dir() else root
    ids, names = listings.subfolders(images / "train"), dict[str, str]()
    for file in ("LOC_synset_mapping.txt", "synset_words.txt"):  # without either, the ids serve as names
        if (root / file).exists():
            names = dict(line.split(" ", 1) for line in listings.read_lines(root / file) if " " in line)
    splits = {"train": class_folders(images, "train", ids), "val": _imagenet_val(root, images, ids)}
    return splits, [names.get(wnid, wnid) for wnid in ids]


def _imagenet_val(root: Path, images: Path, ids: list[str]) -> Split:
    """Validation images are in class folders, or all in one with the list of the Kaggle release."""
    val, listed = images / "val", root / "LOC_val_solution.csv"
    if folders := listings.subfolders(val):
        if unknown := sorted(set(folders) - set(ids)):
            raise DatasetError(f"{val} has the class {unknown[0]}, which {images / 'train'} has not")
        return class_folders(images, "val", ids)
    if not listed.exists():
        raise DatasetError(f"{val} has no folders of classes, and {root} has no {listed.name} with the labels")
    pairs = (line.partition(",") for line in listings.read_lines(listed)[1:])
    rows = [(name, boxes.partition(" ")[0]) for name, _, boxes in pairs]  # image,class x y …
    return _listed(images, "val/{}.JPEG", listed, rows, ids)


def read_imagenetv2(root: Path) -> PublishedSplits:
    return {"test": class_folders(root, "", _IMAGENET_NUMBERS)}, _IMAGENET_NUMBERS


def read_imagenet_real(root: Path) -> PublishedSplits:
    """The labels are lists of valid classes by number of the validation image; images without any are left out."""
    images = root / _KAGGLE if (root / _KAGGLE).is_dir() else root
    listed = root / "real.json"
    try:
        valid = json.loads("\n".join(listings.read_lines(listed)))
    except (json.JSONDecodeError, RecursionError):
        valid = None
    if not isinstance(valid, list) or not all(isinstance(labels, list) for labels in valid):
        raise DatasetError(f"{listed} is not a list with a list of labels for each validation picture")
    numbered = sorted((int(match[1]), n) for n in listings.images_in(images, "val") if (match := _VAL_NUMBER.search(n)))
    # real.json has an entry for each of the 50,000 validation images in order; this copy may have fewer of them.
    if not numbered or not 1 <= numbered[0][0] <= numbered[-1][0] <= len(valid):
        count = f"{len(numbered):,} pictures ILSVRC2012_val_….JPEG"
        raise DatasetError(f"{images / 'val'} has {count}, {listed} {len(valid):,}")
    rows = [(valid[i - 1], name) for i, name in numbered if valid[i - 1]]
    marks = np.zeros((len(rows), len(_IMAGENET_NUMBERS)), np.int8)
    for row, (labels, _) in zip(marks, rows, strict=True):
        row[_class_numbers(listed, labels, _IMAGENET_NUMBERS)] = 1
    split = Split(ImageIndex.of_files(images, [name for _, name in rows]), marks)
    check_files_exist(split.images)
    folders = listings.subfolders(images / "val")
    return {"test": split}, folders if len(folders) == len(_IMAGENET_NUMBERS) else _IMAGENET_NUMBERS


def read_places365(root: Path) -> PublishedSplits:
    if not (root / "categories_places365.txt").exists():  # the "easy" archive, in class folders
        classes = listings.subfolders(root / "train")
        return {name: class_folders(root, name, classes) for name in ("train", "val")}, classes
    categories, splits = listings.read_columns(root / "categories_places365.txt", 2), {}
    numbers = [str(i) for i in range(len(categories))]
    for split, name, *folders in (
        ("train", "places365_train_standard.txt", "data_256_standard", "data_large_standard", "data_256"),
        ("val", "places365_val.txt", "val_256", "val_large"),
    ):
        rows = listings.read_columns(root / name, 2)
        splits[split] = _listed(root, f"{listings.first_existing(root, *folders)}/{{}}", root / name, rows, numbers)
    categories.sort(key=lambda row: _class_numbers(root, [row[1]], numbers))
    return splits, [row[0].split("/", 2)[-1] for row in categories]


def read_lists(
    root: Path, lists: Mapping[str, Sequence[str]], image: str, classes: str = "", named: bool = False
) -> PublishedSplits:
    """Lists of lines CLASS/NAME, or with `named` NAME CLASS; names become files by the pattern `image`.

    `lists` has the alternative names of the list of each split, `classes` the list of the classes; without it they are
    those of the lines, sorted.
    """
    files, rows = {split: root / listings.first_existing(root, *names) for split, names in lists.items()}, {}
    for split, file in files.items():
        lines = listings.read_lines(file)
        rows[split] = [line.partition(" ")[::2] if named else (line, line.rpartition("/")[0]) for line in lines]
    known = {name for part in rows.values() for _, name in part}
    every = listings.read_lines(root / classes) if classes else sorted(known)
    splits = {split: _listed(root, image, files[split], rows[split], every) for split in rows}
    # SUN397 has its classes as /a/abbey, sorted by the first letter.
    return splits, [name.split("/", 2)[-1] if name.startswith("/") else name for name in every]


def _cifar_to_ppm(data: bytes) -> bytes:
    """An image of 32 × 32 stored as all red, then all green, then all blue, as a PPM file."""
    return b"P6 32 32 255\n" + np.frombuffer(data, np.uint8).reshape(3, _CIFAR_PIXELS).T.tobytes()


def read_cifar(root: Path, classes: str, label_bytes: int, **files: Sequence[str]) -> PublishedSplits:
    """Files of each split with records of `label_bytes` bytes, the last of which is the class, and the image."""
    names, record = listings.read_lines(root / classes), label_bytes + 3 * _CIFAR_PIXELS
    splits = {}
    for split, batches in files.items():
        images, spans, labels = [], [], []
        for batch in batches:
            with listings.reading(root / batch):
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
    names = np.atleast_1d(listings.load_mat(root / "devkit/cars_meta.mat", "class_names")["class_names"])
    # The devkit's own annotations of test have no classes; the labels were published later in another file.
    test = listings.first_existing(root, "cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat")
    splits = {}
    for split, listed in (("train", "devkit/cars_train_annos.mat"), ("test", test)):
        rows = np.atleast_1d(listings.load_mat(root / listed, "annotations")["annotations"])
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
        names = listings.read_lines(lists / f"{split}.txt")
        marks = np.zeros((len(names), len(classes)), np.int8)
        for column, name in enumerate(classes):
            listed = lists / f"{name}_{split}.txt"
            rows = dict(row[:2] for row in listings.read_columns(listed, 2))
            if missing := next((key for key in names if rows.get(key) not in _VOC_MARKS), None):
                raise DatasetError(f"{listed} has no 1, 0 or -1 for picture {missing}")
            marks[:, column] = [_VOC_MARKS[rows[key]] for key in names]
        splits[split] = Split(ImageIndex.of_files(root, [f"JPEGImages/{name}.jpg" for name in names]), marks)
        check_files_exist(splits[split].images)
    return splits, classes


def read_caltech101(root: Path) -> PublishedSplits:
    """There is no official split: of each class, the 30 images whose names have the lowest hashes are train."""
    classes = listings.subfolders(root / "101_ObjectCategories")
    images = class_folders(root, "101_ObjectCategories", classes)
    train = lowest_hashes(images, lambda count: min(_CALTECH_TRAIN, count - 1))
    return {"train": images.take(np.flatnonzero(train)), "test": images.take(np.flatnonzero(~train))}, classes


def read_pets(root: Path) -> PublishedSplits:
    splits, names = {}, dict[int, str]()
    for split, part in (("train", "trainval"), ("test", "test")):
        listed = root / f"annotations/{part}.txt"
        rows = [row for row in listings.read_columns(listed, 2) if not row[0].startswith("#")]
        splits[split] = _listed(root, "images/{}.jpg", listed, rows, 37)
        # Images are named by their breed: american_bulldog_9.
        names |= {int(row[1]): row[0].rpartition("_")[0] for row in rows}
    return splits, [names.get(i, f"class {i}") for i in range(1, max(names) + 1)]


def read_cub200(root: Path) -> PublishedSplits:
    classes = [row[1] for row in listings.read_columns(root / "classes.txt", 2)]
    listed = root / "image_class_labels.txt"
    labels = {row[0]: row[1] for row in listings.read_columns(listed, 2)}
    is_train = {row[0]: row[1] for row in listings.read_columns(root / "train_test_split.txt", 2)}
    images = listings.read_columns(root / "images.txt", 2)
    if missing := next((row[0] for row in images if row[0] not in labels or row[0] not in is_train), None):
        raise DatasetError(f"picture {missing} of images.txt is not in the two other lists")
    splits = {}
    for split, mark in (("train", "1"), ("test", "0")):
        rows = [(row[1], labels[row[0]]) for row in images if is_train[row[0]] == mark]
        splits[split] = _listed(root, "images/{}", listed, rows, len(classes))
    return splits, [name.partition(".")[2] or name for name in classes]


def read_flowers102(root: Path) -> PublishedSplits:
    """The files hold no names of the classes: their numbers 1 to 102 serve as names."""
    labels = np.atleast_1d(listings.load_mat(root / "imagelabels.mat", "labels")["labels"])
    keys = {"train": "trnid", "val": "valid", "test": "tstid"}
    ids_by_key = listings.load_mat(root / "setid.mat", *keys.values())
    splits = {}
    for split, key in keys.items():
        ids = np.atleast_1d(ids_by_key[key]).tolist()
        if not all(1 <= i <= len(labels) for i in ids):
            raise DatasetError(f"{root / 'setid.mat'} has picture {max(ids)}; imagelabels.mat has {len(labels):,}")
        rows = [(f"{i:05d}", labels[i - 1]) for i in ids]
        splits[split] = _listed(root, "jpg/image_{}.jpg", root / "imagelabels.mat", rows, 102)
    return splits, [str(i) for i in range(1, 103)]
