"""What is known of each published dataset, from published.toml: layout, origin, licence, sizes, reader."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from veca.data.datasets import classification, dense
from veca.data.datasets.base import DatasetError, DepthRules, LabelTask
from veca.data.datasets.layout import PublishedSplits


@dataclass(frozen=True)
class Spec:
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
    read: Callable[[Path], PublishedSplits]
    hold_out: bool = False
    ignore: int | None = None
    depth: DepthRules | None = None
    protocol: dict[str, Any] = field(default_factory=dict)

    def locate(self, root: Path) -> Path:
        """Return the dataset's folder: `root` itself or one below it."""
        candidates = [root, *(root / folder for folder in self.folders)]
        for folder in candidates:
            if not self._missing(folder):
                return folder
        if not root.is_dir():
            raise DatasetError(self.explain(f"no folder {root}"))
        # The deepest folder that exists is most likely the one that was meant: say what it lacks.
        nearest = next((folder for folder in candidates[::-1] if folder.is_dir()), root)
        raise DatasetError(self.explain(f"{nearest} has no {' and no '.join(self._missing(nearest))}"))

    def _missing(self, folder: Path) -> list[str]:
        alternatives = [names.split("|") for names in self.required]
        return [" or ".join(names) for names in alternatives if not any((folder / name).exists() for name in names)]

    def explain(self, reason: str) -> str:
        """Return an error message that shows the expected layout."""
        tree = "\n".join(f"    {line}" for line in self.tree.strip().splitlines())
        below = f", or below it as {' or '.join(self.folders)}" if self.folders else ""
        expected = f"{self.title} is expected in the folder that is given{below}:\n{tree}"
        return f"{self.name}: {reason}. {expected}\nGet it from {self.source} ({self.licence})"


def _make_spec(name: str, reader: str, layout: dict[str, Any] | None = None, **row: Any) -> Spec:
    # By name, when this module is imported: a misspelt reader or field fails there, not when a dataset is loaded.
    read = getattr(classification if row["task"] in ("classify", "multilabel") else dense, f"read_{reader}")
    for key in ("required", "folders"):
        row[key] = tuple(row[key])
    if rules := row.pop("depth", None):
        crop = rules.pop("input_crop", None)
        row["depth"] = DepthRules(**rules, input_crop=crop and tuple(crop))
    return Spec(name=name, read=partial(read, **layout) if layout else read, **row)


_TABLE = tomllib.loads((files("veca.data.datasets") / "published.toml").read_text("utf-8"))
SPECS = {name: _make_spec(name, **row) for name, row in _TABLE.items()}
"""The published datasets by name."""
