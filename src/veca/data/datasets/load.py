"""Loads a labelled dataset by name or path: a published benchmark, or a user's own folder or tar shards.

    train/CLASS/7.jpg                     images/7.jpg            masks/7.png      or depths/7.png, 16-bit millimetres
    val/CLASS/…                           images/train/7.jpg      masks/train/7.png
    or CLASS/7.jpg                        train/images/7.jpg      train/masks/7.png

`classes.txt`, one name a line, has the classes of masks; without it they are numbered.

In shards, members that share the name before the first dot are one sample: 7.webp (any image) with 7.cls (class number
as text), 7.seg.png (mask) or 7.depth.png (16-bit millimetres). The split is in the name of the shard: NAME-train.tar,
NAME-trainval.tar, NAME-val.tar, NAME-test.tar, with a number after it where there are several (NAME-train-00.tar).
"""

import dataclasses
import glob
import os
import re
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from veca.data.datasets import base, published
from veca.data.datasets.base import IGNORE, DatasetError, DepthRules, LabelMaps, LabelTask, ProbeData, Split
from veca.data.index import ImageIndex
from veca.data.remote import as_text, read_span
from veca.data.sources import is_image_name, shard_items
from veca.errors import ArgumentError, warn_caller
from veca.images import EXTENSIONS
from veca.images.formats import collect_unsupported
from veca.utils.settings import Settings
from veca.utils.text import did_you_mean

# What the readers return: the task, the splits ("all" where there are none), and the names of the classes, if any
OwnSplits: TypeAlias = tuple[str, dict[str, Split], list[str]]

SPLIT_FOLDERS = {"train": "train", "training": "train", "test": "test"}
SPLIT_FOLDERS |= dict.fromkeys(("val", "valid", "validation"), "val")
_MAP_FOLDERS = {"segment": ("masks", "annotations", "labels"), "depth": ("depths", "depth")}
_LABEL_SUFFIXES = {"classify": "cls", "segment": "seg.png", "depth": "depth.png"}
_SHARD_NAME = re.compile(r"(?P<name>.+?)[-_.](?P<split>trainval|train|validation|valid|val|test)([-_.]\d+)?\.tar")
_UNITS = {"segment": 0, "depth": 1000}  # per metre
_MAX_LABEL_BYTES = 64
_SCANNED_MASKS = 1000
"""So many masks are searched for class numbers where `classes.txt` is missing."""
_TEST_SHARE = 0.2
"""Of a user's dataset without any splits."""
_LISTED_CLASSES = 10
"""Classes that a warning names."""


@dataclass(frozen=True, kw_only=True)
class Spec(Settings):
    """One published dataset; the fields are explained in published.toml."""

    name: str
    title: str
    task: LabelTask
    classes: int
    sizes: dict[str, int]
    tree: str
    required: tuple[str, ...]
    folders: tuple[str, ...]
    source: str
    licence: str
    reader: str
    layout: dict[str, Any] = field(default_factory=dict)
    hold_out: bool = False
    scene: str = ""
    ignore: int | None = None
    depth: DepthRules | None = None
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def probe_task(self) -> str:
        return "classify" if self.task == "multilabel" else self.task

    def load(self, root: Path) -> ProbeData:
        """Load it from `root` or one of the folders below it."""
        folder = self._locate(root)
        try:
            splits, classes = getattr(published, f"read_{self.reader}")(folder, **self.layout)
            if empty := [name for name, split in splits.items() if not len(split)]:
                raise DatasetError(f"{folder} has no pictures for {' and '.join(empty)}")
        except (ValueError, OSError) as error:
            raise self._explained(str(error)) from error
        # Where this copy is not what was published it can be used, but its score is not the benchmark's.
        wrong = [name for name, count in self.sizes.items() if len(splits[name]) != count]
        problems = [f"{k} has {len(splits[k]):,} pictures; {self.sizes[k]:,} were published" for k in wrong]
        if len(classes) != self.classes:
            problems.append(f"there are {len(classes):,} classes; {self.classes:,} were published")
        about = {"dataset": self.title, "licence": self.licence, "published": dict(self.sizes), **self.protocol}
        if self.hold_out:
            names = [splits["train"].name(i) for i in range(len(splits["train"]))] if self.scene else []
            scenes = [match[1] if (match := re.match(self.scene, name)) else name for name in names]
            splits, about["val"] = _hold_out_val(splits, scenes)
        return _complete(ProbeData(self.name, self.task, classes, splits, self.ignore, self.depth, about, problems))

    def _locate(self, root: Path) -> Path:
        candidates = [root, *(root / folder for folder in self.folders)]
        if complete := next((folder for folder in candidates if not self._missing(folder)), None):
            return complete
        if not root.is_dir():
            raise self._explained(f"no folder {root}")
        # The deepest folder that exists is most likely the one that was meant: say what it lacks.
        nearest = next((folder for folder in candidates[::-1] if folder.is_dir()), root)
        raise self._explained(f"{nearest} has no {' and no '.join(self._missing(nearest))}")

    def _missing(self, folder: Path) -> list[str]:
        alternatives = [names.split("|") for names in self.required]
        return [" or ".join(names) for names in alternatives if not any((folder / name).exists() for name in names)]

    def _explained(self, reason: str) -> DatasetError:
        """An error that shows the expected layout."""
        tree = textwrap.indent(self.tree.strip(), "    ")
        below = f", or below it as {' or '.join(self.folders)}" if self.folders else ""
        expected = f"{self.title} is expected in the folder that is given{below}:\n{tree}"
        return DatasetError(f"{self.name}: {reason}. {expected}\nGet it from {self.source} ({self.licence})")


_TABLE = tomllib.loads((files("veca.data.datasets") / "published.toml").read_text("utf-8"))
LAYOUT = _TABLE.pop("own_layout")
"""Of a user's own datasets, for messages."""
SPECS = {name: Spec.from_dict({"name": name, **row}) for name, row in _TABLE.items()}
"""The published datasets by name."""


def load_dataset(
    name_or_path: str, root: Path | None = None, task: Literal["classify", "segment", "depth"] | None = None
) -> ProbeData:
    """Load a published dataset by its name, or a user's own: a folder, or tar shards with labels.

    A published dataset is looked for in `root`, or in the folders below it that it usually has; without `root`, in
    `$VECA_DATA` or else `data`. `task` selects the labels of a user's dataset that has several kinds. Shards are given
    as a comma-separated list, a glob, a folder, or the prefix of their names (`FOLDER/pets`).
    """
    spec = SPECS.get(name_or_path.lower())
    if spec is not None:
        if task not in (None, spec.probe_task):
            others = ", ".join(other.name for other in SPECS.values() if other.probe_task == task)
            raise DatasetError(f"{spec.name} has no labels to {task}; these have: {others}")
        try:
            return spec.load(Path(root or os.environ.get("VECA_DATA") or "data"))
        except DatasetError as error:
            # A folder of the user's may have the name of a benchmark, such as ./pets.
            folder = Path(root or ".", name_or_path)
            hint = f"\nThe folder {folder} is taken for one of your own if you write {name_or_path}/"
            raise DatasetError(f"{error}{hint * folder.is_dir()}") from error
    source = str(Path(root, name_or_path)) if root is not None and "," not in name_or_path else name_or_path
    if shards := find_shards(source):
        if missing := next((path for path in shards if not os.path.isfile(path)), None):
            raise DatasetError(f"{missing}: no such file")
        return _load_own(dataset_name(shards), *read_shards(shards, task))
    if os.path.isdir(source):
        with collect_unsupported() as left_out:
            try:
                contents = read_folder(Path(source), task)
            except DatasetError as error:
                raise DatasetError(left_out.append_to(str(error))) from error
        left_out.warn()
        return _load_own(Path(source).resolve().name, *contents)
    hint = did_you_mean(name_or_path.lower(), SPECS)
    known = f"The names are {', '.join(SPECS)}. A path is expected to be one of:{LAYOUT}"
    raise DatasetError(f"{name_or_path!r} is neither the name of a dataset nor a file or folder{hint}. {known}")


def limit_splits(data: ProbeData, limit: int | None) -> ProbeData:
    """Return the dataset with at most `limit` images in each split, evenly spaced."""
    if limit is None:
        return data
    if limit < 1:
        raise ArgumentError(f"limit is {limit}; at least one picture of each split is needed")
    splits = {name: split.take(base.evenly_spaced(len(split), limit)) for name, split in data.splits.items()}
    counts = {name: len(split) for name, split in splits.items()}
    return dataclasses.replace(data, splits=splits, protocol={**data.protocol, "counts": counts, "limit": limit})


def _hold_out_val(splits: dict[str, Split], scenes: Sequence[str] = ()) -> tuple[dict[str, Split], str]:
    """Return the splits with a val that was held out of train, and a description of it."""
    train, val = base.held_out(splits["train"], groups=scenes)
    unit = "whole scenes" if scenes else "every class" if train.maps is None else "the pictures"
    about = f"{len(val):,} of train, {base.HELD_OUT:.0%} of {unit}, fixed by a hash of their names"
    return {"train": train, "val": val, **{name: s for name, s in splits.items() if name != "train"}}, about


def _complete(data: ProbeData) -> ProbeData:
    """Add counts and the rules of depth to the protocol."""
    counts = {name: len(split) for name, split in data.splits.items()}
    rules = {key: getattr(data.depth, key) for key in ("min_depth", "max_depth", "crop") if data.depth}
    return dataclasses.replace(data, protocol=data.protocol | {"counts": counts, "classes": len(data.classes)} | rules)


def _load_own(name: str, task: str, splits: dict[str, Split], classes: list[str]) -> ProbeData:
    """Make a user's dataset from the splits there are, and hold out those it lacks."""
    about: dict[str, Any] = {"dataset": name}
    needed = 3 if "all" in splits else 2  # images of a class, so that every split gets one
    if "all" in splits:
        train, test = base.held_out(splits.pop("all"), _TEST_SHARE)
        splits |= {"train": train, "test": test}
        about["test"] = f"{_TEST_SHARE:.0%}, fixed by a hash of the names"
    if "train" in splits and "val" not in splits:
        splits, about["val"] = _hold_out_val(splits)
    # A fixed order, so that reports and progress do not depend on how the folders are called.
    splits = {split: splits[split] for split in ("train", "val", "test") if split in splits}
    if empty := [split for split, images in splits.items() if not len(images)]:
        rule = f"that takes {needed} pictures {'of a class' if task == 'classify' else 'in all'}"
        reason = f"no picture is left for {' and '.join(empty)}, which is held out of train: {rule}"
        raise DatasetError(f"{name}: {reason}. Add some, or make the splits yourself: train, val, test")
    if task == "segment":
        splits, classes = restrict_to_classes(splits, classes)
    if task == "classify":
        classes = _check_classes(name, splits, classes)
    depth, ignore = DepthRules() if task == "depth" else None, IGNORE if task == "segment" else None
    return _complete(ProbeData(name, cast(LabelTask, task), classes, splits, ignore, depth, about))


def _check_classes(name: str, splits: dict[str, Split], classes: list[str]) -> list[str]:
    """Return the names of the classes, numbers if there are none; at least two of them must have images."""
    # Numbers of classes come from shards, names from a list beside them: the two may disagree.
    present = np.unique(np.concatenate([split.labels for split in splits.values()])).tolist()
    classes = classes or [str(i) for i in range(present[-1] + 1)]
    if present[-1] >= len(classes):
        raise DatasetError(f"{name}: has class {present[-1]}, but {len(classes)} names of classes")
    if len(present) < 2:
        only = f"all pictures are of one class, {classes[present[0]]}"
        raise DatasetError(f"{name}: {only}; at least two are needed to tell apart. Expected:{LAYOUT}")
    trained = set(splits["train"].labels.tolist()) if "train" in splits else set(range(len(classes)))
    if lacking := [label for i, label in enumerate(classes) if i not in trained]:
        listed = ", ".join(lacking[:_LISTED_CLASSES]) + " …" * (len(lacking) > _LISTED_CLASSES)
        reason = f"{len(lacking):,} of {len(classes):,} classes have no picture to learn from: {listed}"
        warn_caller(f"{name}: {reason}. Add some, or remove the folder or the name if it is no class")
    return classes


def read_folder(root: Path, task: str | None) -> OwnSplits:
    """Read a folder; `task` selects the labels where it has several kinds."""
    top = base.subfolders(root)
    split_folders = {name: SPLIT_FOLDERS[name] for name in top if name in SPLIT_FOLDERS}
    # Splits may hold images/ and masks/, or those may hold the splits; class folders have neither.
    inside = base.subfolders(root / next(iter(split_folders))) if split_folders else []
    if "images" in top or "images" in inside:
        return _read_pairs(root, task, split_folders if "images" in inside else {})
    if task not in (None, "classify"):
        wanted = " or ".join(_MAP_FOLDERS[task]) if task in _MAP_FOLDERS else task
        raise DatasetError(f"{root}: has no folder images beside {wanted}. Expected:{LAYOUT}")
    in_splits = sorted({name for folder in split_folders for name in base.subfolders(root / folder)})
    classes = in_splits if split_folders else top
    if not classes:
        raise DatasetError(f"{root}: has no folders of classes. Expected:{LAYOUT}")
    splits = {split: base.class_folders(root, folder, classes) for folder, split in split_folders.items()}
    entries = (entry for folder in ("", *split_folders) for entry in os.scandir(root / folder))
    strays = [e.path for e in entries if Path(e.name).suffix.lower() in EXTENSIONS and e.name[0] != "." and e.is_file()]
    _warn_unlabelled(strays, "a picture lies in the folder of its class")
    return "classify", splits or {"all": base.class_folders(root, "", classes)}, classes


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
    form, names = ("{0}/{1}", list(split_folders)) if split_folders else ("{1}/{0}", base.subfolders(root / "images"))
    named = [name for name in names if name in SPLIT_FOLDERS]
    pairs = {SPLIT_FOLDERS[name]: (form.format(name, "images"), form.format(name, maps)) for name in named}
    pairs = pairs or {"all": ("images", maps)}
    # Depths have no classes; a classes.txt beside them belongs to masks of the same images.
    listed = root / "classes.txt"
    classes = base.read_lines(listed) if listed.exists() and task == "segment" else []
    return task, {split: _pair_by_stem(root, *folders, task) for split, folders in pairs.items()}, classes


def _pair_by_stem(root: Path, images: str, maps: str, task: str) -> Split:
    """Pair files with the same name but for the extension. Unpaired files are refused: they would be missed."""
    by_stem, maps_by_stem = (
        {str(PurePosixPath(name[len(folder) + 1 :]).with_suffix("")): name for name in base.images_in(root, folder)}
        for folder in (images, maps)
    )
    if unpaired := sorted(set(by_stem) ^ set(maps_by_stem)):
        missing_in = maps if unpaired[0] in by_stem else images
        others = len(unpaired) - 1
        raise DatasetError(f"{root}: {unpaired[0]} is missing in {missing_in}, and {others} more are in only one")
    if not by_stem:
        raise DatasetError(f"{root / images}: has no pictures. Expected:{LAYOUT}")
    map_files = ImageIndex.of_files(root, [maps_by_stem[stem] for stem in by_stem])
    return Split(ImageIndex.of_files(root, list(by_stem.values())), LabelMaps(map_files, units_per_metre=_UNITS[task]))


def restrict_to_classes(splits: dict[str, Split], classes: list[str]) -> tuple[dict[str, Split], list[str]]:
    """Make masks refuse values that are no class. Without names, classes come from a sample of the first split.

    A larger number that turns up later is then an error, which `classes.txt` avoids.
    """
    if not classes:
        maps = next(iter(splits.values())).maps
        assert maps is not None
        highest = -1
        for i in base.evenly_spaced(len(maps), _SCANNED_MASKS):
            mask = maps[i]
            highest = max(highest, *np.unique(mask[mask != IGNORE]).tolist(), -1)
        if highest < 1:
            raise DatasetError(f"{maps.files.path(0)} and the other masks have fewer than two classes")
        classes = [str(i) for i in range(highest + 1)]
    ids = published.train_ids(range(len(classes)))  # class 255 cannot be used: its value means "ignore"
    return {k: Split(s.images, LabelMaps(s.maps.files, ids)) for k, s in splits.items() if s.maps}, classes


def find_shards(source: str) -> list[str]:
    """Return the shards of a comma-separated list, a folder, a glob or a name's prefix; none if it is neither."""
    shards: list[str] = []
    for part in source.split(","):
        if os.path.isdir(part) or glob.has_magic(part):
            pattern = os.path.join(glob.escape(part), "*.tar") if os.path.isdir(part) else part
            shards += sorted(path for path in glob.glob(pattern) if path.endswith(".tar"))
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
    classes = base.read_lines(listed) if listed.exists() and task != "depth" else []
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
        return Split(images, LabelMaps(labels, units_per_metre=_UNITS[task]))
    return Split(images, np.array([_read_class(root, *sample[suffix]) for sample in complete]))


def _read_class(root: str, name: str, span: tuple[int, int]) -> int:
    path = os.path.join(root, name.partition("\0")[0])
    text = read_span(path, *span).strip() if span[1] <= _MAX_LABEL_BYTES else b""
    # At most 65535: the classes are numbered up to the highest that occurs, which must not fill the memory.
    if not text.isdigit() or int(text) >= 1 << 16:
        name = name.replace("\0", "/")
        raise DatasetError(f"{as_text(name)}: must hold a class number, 0 to 65535, as text")
    return int(text)
