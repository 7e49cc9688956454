"""Loads a dataset by its name or path, with the splits it lacks."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from veca.data.datasets import base
from veca.data.datasets.base import DatasetError, DepthRules, ProbeData, Split
from veca.data.datasets.folders import LAYOUT, read_folder, restrict_to_classes
from veca.data.datasets.layout import PublishedSplits, read_lines
from veca.data.datasets.shards import dataset_name, find_shards, read_shards
from veca.data.datasets.specs import SPECS, Spec
from veca.errors import ArgumentError, warn_caller
from veca.images.formats import collect_unsupported
from veca.utils.text import did_you_mean

_TEST_SHARE = 0.2
"""Of a user's dataset without any splits."""
_LISTED_CLASSES = 10
"""Classes that a warning names."""


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
        if task is not None and _probe_task(spec) != task:
            others = ", ".join(other.name for other in SPECS.values() if _probe_task(other) == task)
            raise DatasetError(f"{spec.name} has no labels to {task}; these have: {others}")
        try:
            return _load_published(spec, Path(root or os.environ.get("VECA_DATA") or "data"))
        except DatasetError as error:
            # A folder of the user's may have the name of a benchmark, such as ./pets.
            own = Path(root or ".", name_or_path)
            hint = f"\nThe folder {own} is taken for one of your own if you write {name_or_path}/"
            raise DatasetError(f"{error}{hint * own.is_dir()}") from error
    source = str(Path(root, name_or_path)) if root is not None and "," not in name_or_path else name_or_path
    if shards := find_shards(source):
        if missing := next((path for path in shards if not os.path.isfile(path)), None):
            raise DatasetError(f"{missing}: no such file")
        return _load_own_shards(shards, task)
    if os.path.isdir(source):
        return _load_own_folder(Path(source), task)
    hint = did_you_mean(name_or_path.lower(), SPECS)
    known = f"The names are {', '.join(SPECS)}. A path is expected to be one of:{LAYOUT}"
    raise DatasetError(f"{name_or_path!r} is neither the name of a dataset nor a file or folder{hint}. {known}")


def _probe_task(spec: Spec) -> str:
    return "classify" if spec.task == "multilabel" else spec.task


def limit_splits(data: ProbeData, limit: int | None) -> ProbeData:
    """Return the dataset with at most `limit` images in each split, evenly spaced."""
    if limit is None:
        return data
    if limit < 1:
        raise ArgumentError(f"limit is {limit}; at least one picture of each split is needed")
    splits = {name: split.take(base.evenly_spaced(len(split), limit)) for name, split in data.splits.items()}
    counts = {name: len(split) for name, split in splits.items()}
    return dataclasses.replace(data, splits=splits, protocol={**data.protocol, "counts": counts, "limit": limit})


def _load_published(spec: Spec, root: Path) -> ProbeData:
    folder = spec.locate(root)
    try:
        published = spec.read(folder)
        if empty := [name for name, split in published.splits.items() if not len(split)]:
            raise DatasetError(f"{folder} has no pictures for {' and '.join(empty)}")
    except ValueError as error:
        raise DatasetError(spec.explain(str(error))) from error
    about = {"dataset": spec.title, "licence": spec.licence, "published": dict(spec.sizes), **spec.protocol}
    splits = dict(published.splits)
    if spec.hold_out:
        splits, about["val"] = _hold_out_val(splits, published.groups)
    problems = _differences_from_published(spec, published)
    data = ProbeData(spec.name, spec.task, published.classes, splits, spec.ignore, spec.depth, about, problems)
    return _complete_protocol(data)


def _differences_from_published(spec: Spec, published: PublishedSplits) -> list[str]:
    """Say where this copy is not what was published: it can be used, but its score is not the benchmark's."""
    counts = {name: len(published.splits[name]) for name in spec.sizes}
    wrong = [name for name, count in spec.sizes.items() if counts[name] != count]
    problems = [f"{name} has {counts[name]:,} pictures; {spec.sizes[name]:,} were published" for name in wrong]
    if len(published.classes) != spec.classes:
        problems.append(f"there are {len(published.classes):,} classes; {spec.classes:,} were published")
    return problems


def _hold_out_val(splits: dict[str, Split], groups: Any = None) -> tuple[dict[str, Split], str]:
    """Return the splits with a val that was held out of train, and a description of it."""
    train, val = base.held_out(splits["train"], groups=groups)
    unit = "whole scenes" if groups is not None else "every class" if splits["train"].maps is None else "the pictures"
    about = f"{len(val):,} of train, {base.HELD_OUT:.0%} of {unit}, fixed by a hash of their names"
    return {"train": train, "val": val, **{name: s for name, s in splits.items() if name != "train"}}, about


def _complete_protocol(data: ProbeData) -> ProbeData:
    counts = {name: len(split) for name, split in data.splits.items()}
    protocol = {**data.protocol, "counts": counts, "classes": len(data.classes)}
    if (rules := data.depth) is not None:
        protocol |= {"min_depth": rules.min_depth, "max_depth": rules.max_depth, "crop": rules.crop}
    return dataclasses.replace(data, protocol=protocol)


def _load_own_shards(paths: list[str], task: str | None) -> ProbeData:
    name = dataset_name(paths)
    task, splits = read_shards(paths, task)
    listed = Path(paths[0]).parent / f"{name}-classes.txt"
    return _load_own(name, task, splits, read_lines(listed) if listed.exists() and task != "depth" else [])


def _load_own_folder(root: Path, task: str | None) -> ProbeData:
    with collect_unsupported() as left_out:
        try:
            task, splits, classes = read_folder(root, task)
        except DatasetError as error:
            raise DatasetError(left_out.append_to(str(error))) from error
    left_out.warn()
    return _load_own(root.resolve().name, task, splits, classes)


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
    depth, ignore = DepthRules() if task == "depth" else None, base.IGNORE if task == "segment" else None
    return _complete_protocol(ProbeData(name, cast(base.LabelTask, task), classes, splits, ignore, depth, about))


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
