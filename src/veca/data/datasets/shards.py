"""Reader of tar shards with labels: members that share the name before the first dot are one sample.

    7.webp (any picture)    7.cls (class number as text), 7.seg.png (mask) or 7.depth.png (16-bit millimetres)

The split is in the name of the shard: NAME-train.tar, NAME-trainval.tar, NAME-val.tar, NAME-test.tar, with a number
after it where there are several (NAME-train-00.tar).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from veca.data.datasets.base import DatasetError, FileList, LabelMaps, Split
from veca.data.datasets.folders import SPLIT_FOLDERS
from veca.data.datasets.layout import warn_unlabelled
from veca.data.remote import as_text
from veca.data.sources import is_image_name, shard_items

LABEL_SUFFIXES = {"classify": "cls", "segment": "seg.png", "depth": "depth.png"}
_SHARD_NAME = re.compile(r"(?P<name>.+?)[-_.](?P<split>trainval|train|validation|valid|val|test)([-_.]\d+)?\.tar")
_MAX_LABEL_BYTES = 64
_LAYOUT = """
    NAME-train.tar, NAME-val.tar, NAME-test.tar    val or test may be missing; trainval is train
    ├── 7.webp                                     any picture
    └── 7.cls, 7.seg.png or 7.depth.png            class number as text, mask, 16-bit millimetres"""


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
            shards += [path for path in beside if (m := _parse_name(path)) and m["name"] == os.path.basename(part)]
    return shards


def _parse_name(path: str) -> re.Match[str] | None:
    return _SHARD_NAME.fullmatch(os.path.basename(path))


def dataset_name(paths: Sequence[str]) -> str:
    """Return the name that the shards have in common; several datasets in one folder are an error."""
    names = sorted({m["name"] if (m := _parse_name(path)) else Path(path).stem for path in paths})
    if len(names) > 1:
        folder = os.path.dirname(paths[0])
        way = f"name one of them, such as {os.path.join(folder, names[0])}, or its shards with commas between"
        raise DatasetError(f"{', '.join(names)} are shards of several datasets; {way}")
    return names[0]


def read_shards(paths: Sequence[str], task: str | None) -> tuple[str, dict[str, Split]]:
    """Return the task (None: that of the labels there are) and the splits; "all" where the names tell none."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        match = _parse_name(path)
        split = match["split"] if match else "all"
        groups.setdefault({"trainval": "train", **SPLIT_FOLDERS}.get(split, split), []).append(path)
    # Names are relative to this folder, so that fingerprints do not depend on where the shards lie.
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    indexed = {split: _index_members(shards, root) for split, shards in groups.items()}
    samples = [sample for split in indexed.values() for sample in split.values()]
    kinds = {kind for sample in samples for kind in sample}
    present = [name for name, suffix in LABEL_SUFFIXES.items() if suffix in kinds]
    if not present:
        raise DatasetError(f"{paths[0]}: has no labels beside its pictures. Expected:{_LAYOUT}")
    if task is None and len(present) > 1:
        raise DatasetError(f"{paths[0]}: has labels to {' and to '.join(present)}; say which with task=")
    task = task or present[0]
    if task not in present:
        raise DatasetError(f"{paths[0]}: has labels to {' and to '.join(present)}, not to {task}. Expected:{_LAYOUT}")
    suffix = LABEL_SUFFIXES[task]
    unlabelled = [s["image"][0].replace("\0", "/") for s in samples if "image" in s and suffix not in s]
    warn_unlabelled(unlabelled, f"a picture 7.jpg has its label in 7.{suffix}")
    return task, {split: _make_split(root, samples, task) for split, samples in indexed.items()}


# Spans point into the shard, so that any sample can be read without unpacking it.
_Samples = dict[str, dict[str, tuple[str, tuple[int, int]]]]
"""Sample → "image" or the suffix of a label → (shard and member, span)."""


def _index_members(shards: Sequence[str], root: str) -> _Samples:
    samples: _Samples = {}
    for path in shards:
        if not path.endswith(".tar"):
            raise DatasetError(f"{path}: compressed archives have no random access; decompress it to .tar with gunzip")
        prefix, shard = len(as_text(path)) + 1, os.path.relpath(path, root)
        # All members: the walk for images alone would leave out labels such as 7.seg.png.
        for item in shard_items(path, wanted=lambda name: True):
            member = item.name[prefix:]
            folder, _, file = member.rpartition("/")
            key, _, end = file.partition(".")
            kind = "image" if is_image_name(member) else end.lower()
            if item.error and not member:
                raise DatasetError(f"{path}: {item.error}")
            if not key or (kind != "image" and kind not in LABEL_SUFFIXES.values()):
                continue
            if item.span is None:
                raise DatasetError(f"{item.name}: {item.error}")
            # Keys repeat from shard to shard (0.jpg, 1.jpg …), so the shard is a part of them.
            sample = samples.setdefault(f"{shard}\0{folder}/{key}", {})
            if kind in sample:
                raise DatasetError(f"{item.name}: sample {key} has this twice")
            sample[kind] = f"{shard}\0{member}", item.span
    return samples


def _make_split(root: str, samples: _Samples, task: str) -> Split:
    """Return the samples that have image and label, in the order of the shards."""
    suffix = LABEL_SUFFIXES[task]
    complete = [sample for sample in samples.values() if {"image", suffix} <= sample.keys()]
    if not complete:
        raise DatasetError(f"{root}: a shard has no pictures with .{suffix}. Expected:{_LAYOUT}")
    images, labels = (
        FileList(root, [sample[kind][0] for sample in complete], np.array([s[kind][1] for s in complete], np.int64))
        for kind in ("image", suffix)
    )
    if task == "classify":
        return Split(images, np.array([_read_class(labels, i) for i in range(len(labels))]))
    return Split(images, LabelMaps(labels, units_per_metre=1000 if task == "depth" else 0))


def _read_class(labels: FileList, i: int) -> int:
    text = labels.read_bytes(i).strip() if labels.sizes()[i] <= _MAX_LABEL_BYTES else b""
    # At most 65535: the classes are numbered up to the highest that occurs, which must not fill the memory.
    if not text.isdigit() or int(text) >= 1 << 16:
        raise DatasetError(f"{labels.name(i)}: must hold a class number, 0 to 65535, as text")
    return int(text)
