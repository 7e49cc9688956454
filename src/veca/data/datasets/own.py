"""Readers of a user's own labelled datasets: folders, and tar shards.

    train/CLASS/7.jpg                     images/7.jpg            masks/7.png      or depths/7.png, 16-bit millimetres
    val/CLASS/…                           images/train/7.jpg      masks/train/7.png
    or CLASS/7.jpg                        train/images/7.jpg      train/masks/7.png

`classes.txt`, one name a line, has the classes of masks; without it they are numbered.

In shards, members that share the name before the first dot are one sample: 7.webp (any image) with 7.cls (class number
as text), 7.seg.png (mask) or 7.depth.png (16-bit millimetres). The split is in the name of the shard: NAME-train.tar,
NAME-trainval.tar, NAME-val.tar, NAME-test.tar, with a number after it where there are several (NAME-train-00.tar).
"""

import glob
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import numpy as np

from veca.data.datasets.base import IGNORE, LabelMaps, Split, class_folders, evenly_spaced
from veca.data.datasets.dense import train_ids
from veca.data.datasets.listings import DatasetError, images_in, read_lines, subfolders
from veca.data.index import ImageIndex
from veca.data.remote import as_text, read_span
from veca.data.sources import is_image_name, shard_items
from veca.errors import warn_caller
from veca.images import EXTENSIONS

# What the readers return: the task, the splits ("all" where there are none), and the names of the classes, if any
OwnSplits: TypeAlias = tuple[str, dict[str, Split], list[str]]

SPLIT_FOLDERS = {"train": "train", "training": "train", "test": "test"}
SPLIT_FOLDERS |= dict.fromkeys(("val", "valid", "validation"), "val")
_MAP_FOLDERS = {"segment": ("masks", "annotations", "labels"), "depth": ("depths", "depth")}
_LABEL_SUFFIXES = {"classify": "cls", "segment": "seg.png", "depth": "depth.png"}
_SHARD_NAME = re.compile(r"(?P<name>.+?)[-_.](?P<split>trainval|train|validation|valid|val|test)([-_.]\d+)?\.tar")
_MAX_LABEL_BYTES = 64
_SCANNED_MASKS = 1000
"""So many masks are searched for class numbers where `classes.txt` is missing."""
LAYOUT = """
    FOLDER/train/CLASS/7.jpg …, FOLDER/val/CLASS/…, FOLDER/test/CLASS/…   or FOLDER/CLASS/7.jpg …   to classify
    FOLDER/images/7.jpg …, FOLDER/masks/7.png …                          to segment, pixels are class numbers, 255 none
    FOLDER/images/7.jpg …, FOLDER/depths/7.png …                         depth in 16-bit millimetres, 0 none
    (the latter two also as images/train/7.jpg or train/images/7.jpg, and classes.txt with one name a line)
    FOLDER/NAME-train.tar, FOLDER/NAME-val.tar, FOLDER/NAME-test.tar     shards, val or test may be missing:
    ├── 7.webp                                                           any picture
    └── 7.cls, 7.seg.png or 7.depth.png                                  number as text, mask, 16-bit millimetres"""


def read_folder(root: Path, task: str | None) -> OwnSplits:
    """Read a folder; `task` selects the labels where it has several kinds."""
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
    strays = [e.path for e in entries if Path(e.name).suffix.lower() in EXTENSIONS and e.name[0] != "." and e.is_file()]
    _warn_unlabelled(strays, "a picture lies in the folder of its class")
    return "classify", splits or {"all": class_folders(root, "", classes)}, classes


def _warn_unlabelled(names: Sequence[str], rule: str) -> None:
    if names:
        count = "1 picture has no label and is" if len(names) == 1 else f"{len(names):,} pictures have no label and are"
        warn_caller(f"{count} left out, such as {min(names)}: {rule}")


def _read_pairs(root: Path, task: str | None, split_folders: dict[str, str]) -> OwnSplits:
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
    map_files = ImageIndex.of_files(root, [maps_by_stem[stem] for stem in by_stem])
    return Split(ImageIndex.of_files(root, list(by_stem.values())), _own_maps(map_files, task))


def _own_maps(files: ImageIndex, task: str) -> LabelMaps:
    return LabelMaps(files, units_per_metre=1000 if task == "depth" else 0)


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
    ids = train_ids(range(len(classes)))  # class 255 cannot be used: its value means "ignore"
    return {k: Split(s.images, LabelMaps(s.maps.files, ids)) for k, s in splits.items() if s.maps}, classes


def find_shards(source: str) -> list[str]:
    """Return the shards of a comma-separated list, a folder, a glob or a name's prefix; none if it is neither."""
    shards: list[str] = []
    for part in source.split(","):
        if os.path.isdir(part):
            shards += sorted(glob.glob(os.path.join(glob.escape(part), "*.tar")))
        elif glob.has_magic(part):
            shards += sorted(path for path in glob.glob(part) if path.endswith(".tar"))
        elif part.lower().endswith((".tar", ".tar.gz", ".tgz")):
            shards.append(part)
        else:
            beside = sorted(glob.glob(f"{glob.escape(part)}[-_.]*.tar"))
            shards += [path for path in beside if _parse_name(path)[0] == os.path.basename(part)]
    return shards


def _parse_name(path: str) -> tuple[str, str]:
    """Return the name of the dataset, and the split that the name of a shard has."""
    match = _SHARD_NAME.fullmatch(os.path.basename(path))
    if match is None:
        return Path(path).stem, "all"
    return match["name"], {"trainval": "train", **SPLIT_FOLDERS}[match["split"]]


def dataset_name(paths: Sequence[str]) -> str:
    """Return the name that the shards have in common; several datasets in one folder are an error."""
    names = sorted({_parse_name(path)[0] for path in paths})
    if len(names) > 1:
        folder = os.path.dirname(paths[0])
        way = f"name one of them, such as {os.path.join(folder, names[0])}, or its shards with commas between"
        raise DatasetError(f"{', '.join(names)} are shards of several datasets; {way}")
    return names[0]


def read_shards(paths: Sequence[str], task: str | None) -> OwnSplits:
    """Read shards of one dataset; `task` selects the labels where they have several kinds."""
    # Names are relative to this folder, so that fingerprints do not depend on where the shards lie.
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    indexed: dict[str, _Samples] = {}
    for path in paths:
        if not path.endswith(".tar"):
            raise DatasetError(f"{path}: compressed archives have no random access; decompress it to .tar with gunzip")
        _index_members(path, root, indexed.setdefault(_parse_name(path)[1], {}))
    samples = [sample for split in indexed.values() for sample in split.values()]
    kinds = {kind for sample in samples for kind in sample}
    present = [name for name, suffix in _LABEL_SUFFIXES.items() if suffix in kinds]
    if not present:
        raise DatasetError(f"{paths[0]}: has no labels beside its pictures. Expected:{LAYOUT}")
    if task not in present and (task or len(present) > 1):
        way = f", not to {task}. Expected:{LAYOUT}" if task else "; say which with task="
        raise DatasetError(f"{paths[0]}: has labels to {' and to '.join(present)}{way}")
    task = task or present[0]
    suffix = _LABEL_SUFFIXES[task]
    unlabelled = [s["image"][0].replace("\0", "/") for s in samples if "image" in s and suffix not in s]
    _warn_unlabelled(unlabelled, f"a picture 7.jpg has its label in 7.{suffix}")
    listed = Path(paths[0]).parent / f"{dataset_name(paths)}-classes.txt"
    classes = read_lines(listed) if listed.exists() and task != "depth" else []
    return task, {split: _make_split(root, samples.values(), task) for split, samples in indexed.items()}, classes


# A sample has "image" and the suffixes of its labels, each with the shard and member, and the span in the shard:
# so any can be read without unpacking it.
_Sample: TypeAlias = dict[str, tuple[str, tuple[int, int]]]
_Samples: TypeAlias = dict[str, _Sample]


def _index_members(path: str, root: str, samples: _Samples) -> None:
    prefix, shard = len(as_text(path)) + 1, os.path.relpath(path, root)
    # All members: the walk for images alone would leave out labels such as 7.seg.png.
    for item in shard_items(path, wanted=lambda name: True):
        member = item.name[prefix:]
        folder, _, file = member.rpartition("/")
        key, _, end = file.partition(".")
        kind = "image" if is_image_name(member) else end.lower()
        if item.error and not member:
            raise DatasetError(f"{path}: {item.error}")
        if not key or (kind != "image" and kind not in _LABEL_SUFFIXES.values()):
            continue
        if item.span is None:
            raise DatasetError(f"{item.name}: {item.error}")
        # Keys repeat from shard to shard (0.jpg, 1.jpg …), so the shard is a part of them.
        sample = samples.setdefault(f"{shard}\0{folder}/{key}", {})
        if kind in sample:
            raise DatasetError(f"{item.name}: sample {key} has this twice")
        sample[kind] = f"{shard}\0{member}", item.span


def _make_split(root: str, samples: Iterable[_Sample], task: str) -> Split:
    """Return the samples that have image and label, in the order of the shards."""
    suffix = _LABEL_SUFFIXES[task]
    complete = [sample for sample in samples if {"image", suffix} <= sample.keys()]
    if not complete:
        raise DatasetError(f"{root}: a shard has no pictures with .{suffix}. Expected:{LAYOUT}")
    images, labels = (
        ImageIndex.of_files(root, [sample[kind][0] for sample in complete], np.array([s[kind][1] for s in complete]))
        for kind in ("image", suffix)
    )
    if task != "classify":
        return Split(images, _own_maps(labels, task))
    return Split(images, np.array([_read_class(root, *sample[suffix]) for sample in complete]))


def _read_class(root: str, name: str, span: tuple[int, int]) -> int:
    path = os.path.join(root, name.partition("\0")[0])
    text = read_span(path, *span).strip() if span[1] <= _MAX_LABEL_BYTES else b""
    # At most 65535: the classes are numbered up to the highest that occurs, which must not fill the memory.
    if not text.isdigit() or int(text) >= 1 << 16:
        name = name.replace("\0", "/")
        raise DatasetError(f"{as_text(name)}: must hold a class number, 0 to 65535, as text")
    return int(text)
