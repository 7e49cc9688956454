"""Loads a labelled dataset by its name or path: the published benchmarks, a user's own, and the splits they lack."""

import dataclasses
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from veca.data.datasets import classification, dense, own
from veca.data.datasets.base import HELD_OUT, IGNORE, DepthRules, LabelTask, ProbeData, Split, evenly_spaced, held_out
from veca.data.datasets.listings import DatasetError
from veca.errors import ArgumentError, warn_caller
from veca.images.formats import collect_unsupported
from veca.utils.settings import Settings
from veca.utils.text import did_you_mean

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
            module: Any = classification if self.probe_task == "classify" else dense
            splits, classes = getattr(module, f"read_{self.reader}")(folder, **self.layout)
            if empty := [name for name, split in splits.items() if not len(split)]:
                raise DatasetError(f"{folder} has no pictures for {' and '.join(empty)}")
        except ValueError as error:
            raise self._explained(str(error)) from error
        # Where this copy is not what was published it can be used, but its score is not the benchmark's.
        counts = {name: (len(splits[name]), count) for name, count in self.sizes.items()}
        problems = [
            f"{s} has {n:,} pictures; {count:,} were published" for s, (n, count) in counts.items() if n != count
        ]
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
        for folder in candidates:
            if not self._missing(folder):
                return folder
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
        tree = "\n".join(f"    {line}" for line in self.tree.strip().splitlines())
        below = f", or below it as {' or '.join(self.folders)}" if self.folders else ""
        expected = f"{self.title} is expected in the folder that is given{below}:\n{tree}"
        return DatasetError(f"{self.name}: {reason}. {expected}\nGet it from {self.source} ({self.licence})")


_TABLE = tomllib.loads((files("veca.data.datasets") / "published.toml").read_text("utf-8"))
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
    if shards := own.find_shards(source):
        if missing := next((path for path in shards if not os.path.isfile(path)), None):
            raise DatasetError(f"{missing}: no such file")
        return _load_own(own.dataset_name(shards), *own.read_shards(shards, task))
    if os.path.isdir(source):
        with collect_unsupported() as left_out:
            try:
                contents = own.read_folder(Path(source), task)
            except DatasetError as error:
                raise DatasetError(left_out.append_to(str(error))) from error
        left_out.warn()
        return _load_own(Path(source).resolve().name, *contents)
    hint = did_you_mean(name_or_path.lower(), SPECS)
    known = f"The names are {', '.join(SPECS)}. A path is expected to be one of:{own.LAYOUT}"
    raise DatasetError(f"{name_or_path!r} is neither the name of a dataset nor a file or folder{hint}. {known}")


def limit_splits(data: ProbeData, limit: int | None) -> ProbeData:
    """Return the dataset with at most `limit` images in each split, evenly spaced."""
    if limit is None:
        return data
    if limit < 1:
        raise ArgumentError(f"limit is {limit}; at least one picture of each split is needed")
    splits = {name: split.take(evenly_spaced(len(split), limit)) for name, split in data.splits.items()}
    counts = {name: len(split) for name, split in splits.items()}
    return dataclasses.replace(data, splits=splits, protocol={**data.protocol, "counts": counts, "limit": limit})


def _hold_out_val(splits: dict[str, Split], scenes: Sequence[str] = ()) -> tuple[dict[str, Split], str]:
    """Return the splits with a val that was held out of train, and a description of it."""
    train, val = held_out(splits["train"], groups=scenes)
    unit = "whole scenes" if scenes else "every class" if train.maps is None else "the pictures"
    about = f"{len(val):,} of train, {HELD_OUT:.0%} of {unit}, fixed by a hash of their names"
    return {"train": train, "val": val, **{name: s for name, s in splits.items() if name != "train"}}, about


def _complete(data: ProbeData) -> ProbeData:
    """Add counts and the rules of depth to the protocol."""
    counts = {name: len(split) for name, split in data.splits.items()}
    protocol = {**data.protocol, "counts": counts, "classes": len(data.classes)}
    if (rules := data.depth) is not None:
        protocol |= {"min_depth": rules.min_depth, "max_depth": rules.max_depth, "crop": rules.crop}
    return dataclasses.replace(data, protocol=protocol)


def _load_own(name: str, task: str, splits: dict[str, Split], classes: list[str]) -> ProbeData:
    """Make a user's dataset from the splits there are, and hold out those it lacks."""
    about: dict[str, Any] = {"dataset": name}
    needed = 3 if "all" in splits else 2  # images of a class, so that every split gets one
    if "all" in splits:
        train, test = held_out(splits.pop("all"), _TEST_SHARE)
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
        splits, classes = own.restrict_to_classes(splits, classes)
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
        raise DatasetError(f"{name}: {only}; at least two are needed to tell apart. Expected:{own.LAYOUT}")
    trained = set(splits["train"].labels.tolist()) if "train" in splits else set(range(len(classes)))
    if lacking := [label for i, label in enumerate(classes) if i not in trained]:
        listed = ", ".join(lacking[:_LISTED_CLASSES]) + " …" * (len(lacking) > _LISTED_CLASSES)
        reason = f"{len(lacking):,} of {len(classes):,} classes have no picture to learn from: {listed}"
        warn_caller(f"{name}: {reason}. Add some, or remove the folder or the name if it is no class")
    return classes
