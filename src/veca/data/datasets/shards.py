"""Tar shards with labels: members that share the name before the first dot are one sample.

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

from veca.data.datasets.base import DatasetError, Maps, Places, Split
from veca.data.datasets.layout import warn_unlabelled
from veca.data.remote import as_text
from veca.data.sources import is_image_name, shard_items

SUFFIXES = {"classify": "cls", "segment": "seg.png", "depth": "depth.png"}
_NAME = re.compile(r"(?P<name>.+?)[-_.](?P<split>trainval|train|validation|valid|val|test)([-_.]\d+)?\.tar")
_SPLITS = {"trainval": "train", "validation": "val", "valid": "val"}
_LABEL_BYTES = 64
_LAYOUT = """
    NAME-train.tar, NAME-val.tar, NAME-test.tar    val or test may be missing; trainval is train
    ├── 7.webp                                     any picture
    └── 7.cls, 7.seg.png or 7.depth.png            class number as text, mask, 16-bit millimetres"""


def find_shards(source: str) -> list[str]:
    """The shards of a list with commas, a folder, a glob or the start of a name; none when it is something else."""
    found: list[str] = []
    for part in source.split(","):
        if os.path.isdir(part):
            found += sorted(glob.glob(os.path.join(glob.escape(part), "*.tar")))
        elif glob.has_magic(part):
            found += sorted(path for path in glob.glob(part) if path.endswith(".tar"))
        elif part.lower().endswith((".tar", ".tar.gz", ".tgz")):
            found.append(part)
        else:
            beside = sorted(glob.glob(f"{glob.escape(part)}[-_.]*.tar"))
            found += [path for path in beside if (m := _parsed(path)) and m["name"] == os.path.basename(part)]
    return found


def _parsed(path: str) -> re.Match[str] | None:
    return _NAME.fullmatch(os.path.basename(path))


def name_of(paths: Sequence[str]) -> str:
    """What the shards have in common; several datasets in one folder are an error."""
    names = sorted({m["name"] if (m := _parsed(path)) else Path(path).stem for path in paths})
    if len(names) > 1:
        folder = os.path.dirname(paths[0])
        way = f"name one of them, such as {os.path.join(folder, names[0])}, or its shards with commas between"
        raise DatasetError(f"{', '.join(names)} are shards of several datasets; {way}")
    return names[0]


def read_shards(paths: Sequence[str], task: str | None) -> tuple[str, dict[str, Split]]:
    """The task, which may be left to the labels there are, and the splits; "all" where the names tell none."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        match = _parsed(path)
        split = match["split"] if match else "all"
        groups.setdefault(_SPLITS.get(split, split), []).append(path)
    # Names from here on, so that they are the same wherever the shards lie.
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    indexed = {split: _index(shards, root) for split, shards in groups.items()}
    there = [t for t, end in SUFFIXES.items() if any(end in row for rows in indexed.values() for row in rows.values())]
    if not there:
        raise DatasetError(f"{paths[0]}: has no labels beside its pictures. Expected:{_LAYOUT}")
    if task is None and len(there) > 1:
        raise DatasetError(f"{paths[0]}: has labels to {' and to '.join(there)}; say which with task=")
    task = task or there[0]
    if task not in there:
        raise DatasetError(f"{paths[0]}: has labels to {' and to '.join(there)}, not to {task}. Expected:{_LAYOUT}")
    end, samples = SUFFIXES[task], (row for rows in indexed.values() for row in rows.values())
    unlabelled = [row["image"][0].replace("\0", "/") for row in samples if "image" in row and end not in row]
    warn_unlabelled(unlabelled, f"a picture 7.jpg has its label in 7.{end}")
    return task, {split: _split(root, rows, task) for split, rows in indexed.items()}


_Rows = dict[str, dict[str, tuple[str, tuple[int, int]]]]
"""Sample → "image" or the end of a label's name → (shard and member, span)."""


def _index(shards: Sequence[str], root: str) -> _Rows:
    rows: _Rows = {}
    for path in shards:
        if not path.endswith(".tar"):
            raise DatasetError(f"{path}: a packed archive cannot be read in any order. Unpack it to .tar with gunzip")
        prefix, shard = len(as_text(path)) + 1, os.path.relpath(path, root)
        for item in shard_items(path, wanted=lambda name: True):
            member = item.name[prefix:]
            folder, _, file = member.rpartition("/")
            key, _, end = file.partition(".")
            kind = "image" if is_image_name(member) else end.lower()
            if item.error and not member:
                raise DatasetError(f"{path}: {item.error}")
            if not key or (kind != "image" and kind not in SUFFIXES.values()):
                continue
            if item.span is None:
                raise DatasetError(f"{item.name}: {item.error}")
            sample = rows.setdefault(f"{shard}\0{folder}/{key}", {})
            if kind in sample:
                raise DatasetError(f"{item.name}: sample {key} has this twice")
            sample[kind] = f"{shard}\0{member}", item.span
    return rows


def _split(root: str, rows: _Rows, task: str) -> Split:
    """Samples that have both, in the order of the shards."""
    end = SUFFIXES[task]
    whole = [row for row in rows.values() if "image" in row and end in row]
    if not whole:
        raise DatasetError(f"{root}: a shard has no pictures with .{end}. Expected:{_LAYOUT}")
    images, labels = (
        Places(root, [row[key][0] for row in whole], np.array([row[key][1] for row in whole], np.int64))
        for key in ("image", end)
    )
    if task == "depth":
        return Split(images, Maps(labels, per_metre=1000))
    if task == "segment":
        return Split(images, Maps(labels))
    return Split(images, np.array([_number(labels, row[end][1][1], i) for i, row in enumerate(whole)]))


def _number(labels: Places, size: int, i: int) -> int:
    text = bytes(labels.read(i)).strip() if size <= _LABEL_BYTES else b""  # type: ignore[arg-type]
    if not text.isdigit() or int(text) >= 1 << 16:
        raise DatasetError(f"{labels.name(i)}: must hold a class number, 0 to 65535, as text")
    return int(text)
