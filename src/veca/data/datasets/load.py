"""A dataset by its name or path."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from veca.data.datasets import imagenet, published, published_dense
from veca.data.datasets.base import HELD_OUT, IGNORE, DatasetError, DepthRules, ProbeData, Split, Task, held_out
from veca.data.datasets.folders import LAYOUT, read_folder, with_classes
from veca.data.datasets.layout import Found, Spec, read_lines
from veca.data.datasets.shards import find_shards, name_of, read_shards
from veca.errors import warn_caller
from veca.images.formats import collect_unsupported

SPECS = {spec.name: spec for spec in (*imagenet.SPECS, *published.SPECS, *published_dense.SPECS)}
"""The published datasets by name."""
_TEST_SHARE = 0.2
"""Of a dataset of one's own without any splits."""
_NAMED = 10
"""Classes that a warning names."""


def load_dataset(
    name_or_path: str, root: Path | None = None, task: Literal["classify", "segment", "depth"] | None = None
) -> ProbeData:
    """A published dataset by its name, or one's own: a folder, or tar shards with labels.

    A published dataset is looked for in `root`, or in the folders below it that it usually has; without `root`, in
    `$VECA_DATA` or else `data`. Of one's own, `task` says which labels are meant where there are several. Shards are
    given as a list with commas, a glob, a folder, or the start of their names (`FOLDER/pets`).
    """
    spec = SPECS.get(name_or_path.lower())
    if spec is not None:
        if task is not None and {"multilabel": "classify"}.get(spec.task, spec.task) != task:
            fit = ", ".join(s.name for s in SPECS.values() if s.task.replace("multilabel", "classify") == task)
            raise DatasetError(f"{spec.name} has no labels to {task}; these have: {fit}")
        try:
            return _published(spec, Path(root or os.environ.get("VECA_DATA") or "data"))
        except DatasetError as error:
            own = Path(root or ".", name_or_path)
            hint = f"\nThe folder {own} is taken for one of your own if you write {name_or_path}/"
            raise DatasetError(f"{error}{hint * own.is_dir()}") from error
    source = str(Path(root, name_or_path)) if root is not None and "," not in name_or_path else name_or_path
    if shards := find_shards(source):
        if missing := next((path for path in shards if not os.path.isfile(path)), None):
            raise DatasetError(f"{missing}: no such file")
        return _own_shards(shards, task)
    if os.path.isdir(source):
        return _own_folder(Path(source), task)
    near = get_close_matches(name_or_path.lower(), SPECS, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    known = f"The names are {', '.join(SPECS)}. A path is expected to be one of:{LAYOUT}"
    raise DatasetError(f"{name_or_path!r} is no dataset's name and no file or folder{hint}. {known}")


def _published(spec: Spec, root: Path) -> ProbeData:
    place = spec.locate(root)
    try:
        found = spec.read(place)
        if empty := [split for split, pictures in found.splits.items() if not len(pictures)]:
            raise DatasetError(f"{place} has no pictures for {' and '.join(empty)}")
    except ValueError as error:
        raise DatasetError(spec.wrong(str(error))) from error
    problems = _differences(spec, found)
    protocol: dict[str, Any] = {
        "dataset": spec.title,
        "licence": spec.licence,
        "published": dict(spec.sizes),
        **spec.protocol,
    }
    splits = dict(found.splits)
    if spec.hold_out:
        splits, protocol["val"] = _with_val(splits, found.groups)
    return _finished(spec.name, spec.task, found.classes, splits, spec.ignore, spec.depth, protocol, problems)


def _differences(spec: Spec, found: Found) -> list[str]:
    """Where this copy is not what was published: it can be used, but its score is not the benchmark's."""
    problems = [
        f"{split} has {len(found.splits[split]):,} pictures; {count:,} were published"
        for split, count in spec.sizes.items()
        if len(found.splits[split]) != count
    ]
    if len(found.classes) != spec.classes:
        problems.append(f"there are {len(found.classes):,} classes; {spec.classes:,} were published")
    return problems


def _with_val(splits: dict[str, Split], groups: Any = None) -> tuple[dict[str, Split], str]:
    """The splits with a val that was held out of train, and how."""
    train, val = held_out(splits["train"], groups=groups)
    unit = "whole scenes" if groups is not None else "every class" if splits["train"].maps is None else "the pictures"
    how = f"{len(val):,} of train, {HELD_OUT:.0%} of {unit}, fixed by a hash of their names"
    return {"train": train, "val": val, **{name: s for name, s in splits.items() if name != "train"}}, how


def _finished(
    name: str,
    task: Task,
    classes: list[str],
    splits: dict[str, Split],
    ignore: int | None,
    depth: DepthRules | None,
    protocol: dict[str, Any],
    problems: list[str],
) -> ProbeData:
    protocol |= {"counts": {split: len(found) for split, found in splits.items()}, "classes": len(classes)}
    if depth is not None:
        protocol |= {"min_depth": depth.min_depth, "max_depth": depth.max_depth, "crop": depth.crop}
    return ProbeData(name, task, classes, splits, ignore, depth, protocol, problems)


def _own_shards(paths: list[str], task: str | None) -> ProbeData:
    name = name_of(paths)
    task, splits = read_shards(paths, task)
    listed = Path(paths[0]).parent / f"{name}-classes.txt"
    return _own(name, task, splits, read_lines(listed) if listed.exists() and task != "depth" else [])


def _own_folder(root: Path, task: str | None) -> ProbeData:
    with collect_unsupported() as left_out:
        try:
            task, splits, classes = read_folder(root, task)
        except DatasetError as error:
            raise DatasetError(left_out.append_to(str(error))) from error
    left_out.warn()
    return _own(root.resolve().name, task, splits, classes)


def _checked_classes(name: str, splits: dict[str, Split], classes: list[str]) -> list[str]:
    """The names of the classes, by number where there are none; at least two of them must have pictures."""
    present = np.unique(np.concatenate([split.labels for split in splits.values()])).tolist()
    classes = classes or [str(i) for i in range(present[-1] + 1)]
    if present[-1] >= len(classes):
        raise DatasetError(f"{name}: has class {present[-1]}, but {len(classes)} names of classes")
    if len(present) < 2:
        raise DatasetError(
            f"{name}: all pictures are of one class, {classes[present[0]]}; at least two are needed to tell apart. "
            f"Expected:{LAYOUT}"
        )
    learnable = set(splits["train"].labels.tolist()) if "train" in splits else set(range(len(classes)))
    if lacking := [each for i, each in enumerate(classes) if i not in learnable]:
        some = ", ".join(lacking[:_NAMED]) + " …" * (len(lacking) > _NAMED)
        warn_caller(
            f"{name}: {len(lacking):,} of {len(classes):,} classes have no picture to learn from: {some}. Add some, or "
            "remove the folder or the name if it is no class"
        )
    return classes


def _own(name: str, task: str, splits: dict[str, Split], classes: list[str]) -> ProbeData:
    """A dataset of one's own, with the splits it lacks."""
    protocol: dict[str, Any] = {"dataset": name}
    needed = 3 if "all" in splits else 2
    if "all" in splits:
        train, test = held_out(splits.pop("all"), _TEST_SHARE)
        splits |= {"train": train, "test": test}
        protocol["test"] = f"{_TEST_SHARE:.0%}, fixed by a hash of the names"
    if "train" in splits and "val" not in splits:
        splits, protocol["val"] = _with_val(splits)
    splits = {split: splits[split] for split in ("train", "val", "test") if split in splits}
    if empty := [split for split, found in splits.items() if not len(found)]:
        each = "of a class" if task == "classify" else "in all"
        raise DatasetError(
            f"{name}: no picture is left for {' and '.join(empty)}, which is held out of train: that takes {needed} "
            f"pictures {each}. Add some, or make the splits yourself: train, val, test"
        )
    if task == "segment":
        splits, classes = with_classes(splits, classes)
    if task == "classify":
        classes = _checked_classes(name, splits, classes)
    depth = DepthRules() if task == "depth" else None
    ignore = IGNORE if task == "segment" else None
    return _finished(name, cast(Task, task), classes, splits, ignore, depth, protocol, [])
