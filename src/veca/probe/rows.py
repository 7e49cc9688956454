"""Results: one JSON file for each row of a table, in a folder that several runs, models and datasets may share.

What decides a row's numbers is hashed into the name of its file before any is computed: a row that is there is not
computed again, and one that was asked for differently has another name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from veca.data.datasets.base import ProbeData
from veca.errors import ArgumentError
from veca.heads.features import digest_of
from veca.heads.frozen import FrozenBackbone
from veca.probe.results import SCHEMA
from veca.utils.device import describe_versions
from veca.utils.files import atomic_path

VERSION = 1
"""Of the code that makes numbers: to be raised when the same settings give others."""
Row: TypeAlias = dict[str, Any]
ProbeTask: TypeAlias = Literal["classify", "knn", "segment", "depth"]


@dataclass(frozen=True)
class Job:
    """A row to be: all that decides its numbers. `protocol` is plain data."""

    task: ProbeTask
    backbone: FrozenBackbone
    data: ProbeData
    cores: int | None
    size: int
    seed: int
    protocol: Mapping[str, Any]
    also: Sequence[ProbeData] = field(default=())
    """Further sets that are scored with the same head."""

    @property
    def key(self) -> str:
        """A hash of everything the numbers depend on."""
        every = (self.data, *self.also)
        pictures = [split.content_hash for data in every for _, split in sorted(data.splits.items())]
        return digest_of(
            version=VERSION, task=self.task, backbone=self.backbone.identity, cores=self.cores, size=self.size,
            data=[data.fingerprint for data in every], pictures=pictures, seed=self.seed, protocol=self.protocol,
        )  # fmt: skip

    @property
    def name(self) -> str:
        cores = "none" if self.cores is None else self.cores
        names = f"{self.task}-{_slug(self.backbone.name)}-{_slug(self.data.name)}"
        return f"{names}-c{cores}-s{self.size}-{self.key[:8]}"

    def path(self, folder: Path) -> Path:
        return folder / "rows" / f"{self.name}.json"

    def done(self, folder: Path) -> Row | None:
        """The row, if it was computed before and is whole."""
        return read_row(self.path(folder))

    def finish(
        self,
        folder: Path,
        *,
        metric: str,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
        per_class: Mapping[str, float] | None = None,
        best: Mapping[str, float] | None = None,
        sweep: Sequence[Mapping[str, float]] | None = None,
        curve: Mapping[str, Sequence[float]] | None = None,
        grid: tuple[int, int] | None = None,
        gallery: Sequence[Mapping[str, str]] | None = None,
        also: Mapping[str, Mapping[str, float]] | None = None,
        found: Mapping[str, Any] | None = None,
    ) -> Row:
        """Write the row. `found` is what of the protocol was not known before."""
        if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
            raise ArgumentError(
                f"{self.name}: {wrong[0]} is {metrics[wrong[0]]}: nothing was scored, or the head diverged. "
                "Look at the labels, or take lower rates"
            )
        data, backbone = self.data, self.backbone
        counts = {split: len(data.splits.get(split, ())) for split in ("train", "val", "test")}
        row: Row = {
            "schema": SCHEMA,
            "task": self.task,
            "model": {"name": backbone.name, "kind": backbone.kind, "about": backbone.about},
            "data": {"name": data.name, **counts, "classes": data.classes or None, "fingerprint": data.fingerprint},
            "cores": self.cores,
            "size": self.size,
            "grid": list(grid) if grid else None,
            "seed": self.seed,
            "scored_on": data.report,
            "metric": metric,
            "metrics": dict(metrics),
            "per_class": per_class and dict(per_class),
            "best": best,
            "sweep": sweep,
            "curve": curve,
            "protocol": {**self.protocol, "data": data.protocol, **backbone.running, **(found or {})},
            "gallery": gallery,
            "also": also or None,
            "versions": describe_versions(backbone.device),
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if problems := data.problems:
            row["protocol"]["problems"] = problems
        row = json.loads(json.dumps(row, default=str))  # as it will be read
        row["digest"] = digest_of(**row)
        with atomic_path(self.path(folder)) as part:
            part.write_text(json.dumps(row, indent=1))
        return row


def read_row(path: Path) -> Row | None:
    """A row file; None where there is none, or it is not as it was written."""
    try:
        row: Row = json.loads(path.read_text())
        said = {name: value for name, value in row.items() if name != "digest"}
        return row if row.get("digest") == digest_of(**said) else None
    except (OSError, ValueError, RecursionError, AttributeError):
        return None


def _slug(name: str) -> str:
    """A name as a part of a file's name; of a long one, its end."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", name)[-60:].strip("-.") or "unnamed"
