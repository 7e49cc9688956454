"""The classification benchmarks, each read from the files it was published as."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from veca.data.datasets.base import DatasetError, Places, Split, lowest
from veca.data.datasets.classes import VOC
from veca.data.datasets.layout import (
    Found,
    class_folders,
    class_index,
    first_there,
    labelled,
    number,
    read_lines,
    read_rows,
    subfolders,
)
from veca.data.datasets.matlab import load_mat

_CIFAR_PIXELS = 32 * 32
_PRESENT = {"1": 1, "-1": 0, "0": -1}
CALTECH_TRAIN = 30
"""Pictures of each class in train; the rest is test."""


def places365(root: Path) -> Found:
    if not (root / "categories_places365.txt").exists():  # the "easy" archive, in folders of classes
        classes = subfolders(root / "train")
        return Found({name: class_folders(root, name, classes) for name in ("train", "val")}, classes)
    categories = read_rows(root / "categories_places365.txt", 2)
    splits = {}
    for split, listed, *folders in (
        ("train", "places365_train_standard.txt", "data_256_standard", "data_large_standard", "data_256"),
        ("val", "places365_val.txt", "val_256", "val_large"),
    ):
        folder, rows = first_there(root, *folders), read_rows(root / listed, 2)
        names = [f"{folder}/{row[0].lstrip('/')}" for row in rows]
        splits[split] = labelled(root, names, (number(r[1], root / listed, len(categories), 0) for r in rows))
    order = sorted(categories, key=lambda row: number(row[1], root, len(categories), 0))
    return Found(splits, [row[0].split("/", 2)[-1] for row in order])


def food101(root: Path) -> Found:
    classes = read_lines(root / "meta/classes.txt")
    index = {name: i for i, name in enumerate(classes)}
    splits = {}
    for split in ("train", "test"):
        listed = root / f"meta/{split}.txt"
        names = read_lines(listed)
        if unknown := next((n for n in names if n.split("/")[0] not in index), None):
            raise DatasetError(f"{listed} names {unknown!r}, whose class is not in meta/classes.txt")
        splits[split] = labelled(root, [f"images/{n}.jpg" for n in names], (index[n.split("/")[0]] for n in names))
    return Found(splits, classes)


class _Planes(Places):
    """Pictures of 32 × 32 as CIFAR has them, all red, then all green, then all blue: given out as PPM files."""

    def read(self, i: int) -> bytes:
        data = super().read(i)
        assert isinstance(data, bytes)
        pixels = np.frombuffer(data, np.uint8).reshape(3, _CIFAR_PIXELS).T
        return b"P6 32 32 255\n" + pixels.tobytes()


def _cifar(root: Path, files: dict[str, list[str]], labels: int, classes: list[str]) -> Found:
    """Records of `labels` bytes, of which the last is the class, and the picture."""
    record, splits = labels + 3 * _CIFAR_PIXELS, {}
    for split, batches in files.items():
        names, spans, found = [], [], []
        for batch in batches:
            try:
                size = (root / batch).stat().st_size
                if not size or size % record:
                    raise DatasetError(f"{root / batch} has {size:,} bytes, not a multiple of {record:,}; get it again")
                columns = np.memmap(root / batch, np.uint8, "r", shape=(size // record, record))[:, labels - 1]
            except OSError as error:
                raise DatasetError(f"{root / batch}: {(error.strerror or str(error)).lower()}") from error
            found.append(columns.astype(np.int64))
            names += [f"{batch}\0{i}" for i in range(len(columns))]
            spans += [(i * record + labels, 3 * _CIFAR_PIXELS) for i in range(len(columns))]
        numbers = np.concatenate(found)
        if numbers.max() >= len(classes):
            raise DatasetError(f"{root} has the class {numbers.max()}; there are {len(classes)}")
        splits[split] = Split(_Planes(root, names, np.array(spans, np.int64)), numbers)
    return Found(splits, classes)


def cifar10(root: Path) -> Found:
    files = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
    return _cifar(root, files, 1, read_lines(root / "batches.meta.txt"))


def cifar100(root: Path) -> Found:
    return _cifar(root, {"train": ["train.bin"], "test": ["test.bin"]}, 2, read_lines(root / "fine_label_names.txt"))


def sun397(root: Path) -> Found:
    classes = read_lines(root / "ClassName.txt")
    index = {name: i for i, name in enumerate(classes)}
    splits = {}
    for split, name in (("train", "Training_01.txt"), ("test", "Testing_01.txt")):
        listed = root / first_there(root, name, f"Partitions/{name}", f"../Partitions/{name}", f"../{name}")
        names = read_lines(listed)
        if unknown := next((n for n in names if n.rpartition("/")[0] not in index), None):
            raise DatasetError(f"{listed} names {unknown!r}, whose class is not in ClassName.txt")
        splits[split] = labelled(root, [n.lstrip("/") for n in names], (index[n.rpartition("/")[0]] for n in names))
    return Found(splits, [name.split("/", 2)[-1] for name in classes])


def cars(root: Path) -> Found:
    classes = [
        str(name) for name in np.atleast_1d(load_mat(root / "devkit/cars_meta.mat", "class_names")["class_names"])
    ]
    tests = first_there(root, "cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat")
    splits = {}
    for split, listed in (("train", "devkit/cars_train_annos.mat"), ("test", tests)):
        rows = np.atleast_1d(load_mat(root / listed, "annotations")["annotations"])
        if rows.dtype.names is None or not {"fname", "class"}.issubset(rows.dtype.names):
            raise DatasetError(f"{root / listed} tells no fname and class; test pictures need the file with labels")
        labels = (number(str(row["class"]), root / listed, len(classes)) for row in rows)
        splits[split] = labelled(root, [f"cars_{split}/{row['fname']}" for row in rows], labels)
    return Found(splits, classes)


def aircraft(root: Path) -> Found:
    classes = read_lines(root / "data/variants.txt")
    splits = {}
    for split in ("train", "val", "test"):
        listed = root / f"data/images_variant_{split}.txt"
        rows = [line.split(" ", 1) for line in read_lines(listed)]
        names = [f"data/images/{row[0]}.jpg" for row in rows]
        splits[split] = labelled(root, names, (class_index(classes, row[-1], listed) for row in rows))
    return Found(splits, classes)


def voc2007(root: Path) -> Found:
    """1 where a class is in the picture, 0 where not, -1 where all there is of it was marked difficult.

    The lists of the classes say so themselves; the published score leaves the last out, class by class.
    """
    splits = {}
    for split in ("train", "val", "test"):
        listed = root / "ImageSets/Main"
        names = read_lines(listed / f"{split}.txt")
        marks = np.zeros((len(names), len(VOC)), np.int8)
        for column, name in enumerate(VOC):
            rows = dict(row[:2] for row in read_rows(listed / f"{name}_{split}.txt", 2))
            if unsaid := next((key for key in names if rows.get(key) not in _PRESENT), None):
                raise DatasetError(f"{listed / f'{name}_{split}.txt'} has no 1, 0 or -1 for picture {unsaid}")
            marks[:, column] = [_PRESENT[rows[key]] for key in names]
        splits[split] = Split(labelled(root, [f"JPEGImages/{n}.jpg" for n in names], [0] * len(names)).images, marks)
    return Found(splits, list(VOC))


def dtd(root: Path) -> Found:
    rows = {split: read_lines(root / f"labels/{split}1.txt") for split in ("train", "val", "test")}
    classes = sorted({name.split("/")[0] for names in rows.values() for name in names})
    index = {name: i for i, name in enumerate(classes)}
    splits = {
        split: labelled(root, [f"images/{name}" for name in names], (index[name.split("/")[0]] for name in names))
        for split, names in rows.items()
    }
    return Found(splits, classes)


def caltech101(root: Path) -> Found:
    """There is no official split. Of each class, 30 pictures whose names have the lowest hashes train."""
    classes = subfolders(root / "101_ObjectCategories")
    whole = class_folders(root, "101_ObjectCategories", classes)
    train = lowest(whole, lambda count: min(CALTECH_TRAIN, count - 1))
    return Found({"train": whole.take(np.flatnonzero(train)), "test": whole.take(np.flatnonzero(~train))}, classes)


def pets(root: Path) -> Found:
    splits, names = {}, dict[int, str]()
    for split, part in (("train", "trainval"), ("test", "test")):
        listed = root / f"annotations/{part}.txt"
        rows = [row for row in read_rows(listed, 2) if not row[0].startswith("#")]
        labels = [number(row[1], listed, 37) for row in rows]
        splits[split] = labelled(root, [f"images/{row[0]}.jpg" for row in rows], labels)
        names |= {label: row[0].rpartition("_")[0] for label, row in zip(labels, rows, strict=True)}
    return Found(splits, [names.get(i, f"class {i + 1}") for i in range(max(names) + 1)])


def cub200(root: Path) -> Found:
    classes = [row[1] for row in read_rows(root / "classes.txt", 2)]
    listed = root / "image_class_labels.txt"
    labels = {row[0]: number(row[1], listed, len(classes)) for row in read_rows(listed, 2)}
    trains = {row[0]: row[1] for row in read_rows(root / "train_test_split.txt", 2)}
    images = read_rows(root / "images.txt", 2)
    if missing := next((row[0] for row in images if row[0] not in labels or row[0] not in trains), None):
        raise DatasetError(f"picture {missing} of images.txt is not in the two other lists")
    splits = {}
    for split, mark in (("train", "1"), ("test", "0")):
        rows = [row for row in images if trains[row[0]] == mark]
        splits[split] = labelled(root, [f"images/{row[1]}" for row in rows], (labels[row[0]] for row in rows))
    return Found(splits, [name.partition(".")[2] or name for name in classes])


def flowers102(root: Path) -> Found:
    """The files hold no names of the classes, so their numbers 1 to 102 stand for them."""
    labels = np.atleast_1d(load_mat(root / "imagelabels.mat", "labels")["labels"])
    keys = {"train": "trnid", "val": "valid", "test": "tstid"}
    sets = load_mat(root / "setid.mat", *keys.values())
    splits = {}
    for split, key in keys.items():
        ids = np.atleast_1d(sets[key]).tolist()
        if not all(1 <= i <= len(labels) for i in ids):
            raise DatasetError(f"{root / 'setid.mat'} has picture {max(ids)}; imagelabels.mat has {len(labels):,}")
        classes = (number(str(labels[i - 1]), root / "imagelabels.mat", 102) for i in ids)
        splits[split] = labelled(root, [f"jpg/image_{i:05d}.jpg" for i in ids], classes)
    return Found(splits, [str(i) for i in range(1, 103)])
