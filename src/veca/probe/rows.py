"""Row files of probes: one JSON file per result, in a folder that runs, models and datasets may share.

The name of a file holds a hash of everything that determines its numbers, known before any is computed: a row that
exists is not computed again, and different settings give a different file.
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

ROWS_VERSION = 1  # of the code that computes rows: raise it when equal settings give other numbers
Row: TypeAlias = dict[str, Any]
ProbeTask: TypeAlias = Literal["classify", "knn", "segment", "depth"]


@dataclass(frozen=True)
class Job:
    """A row to compute: everything that determines its numbers. `protocol` is plain data."""

    task: ProbeTask
    backbone: FrozenBackbone
    data: ProbeData
    cores: int | None
    size: int
    seed: int
    protocol: Mapping[str, Any]
    also: Sequence[ProbeData] = field(default=())
    """Further datasets, scored with the same head."""

    @property
    def key(self) -> str:
        """A hash of everything the numbers depend on."""
        datasets = (self.data, *self.also)
        contents = [split.content_hash for data in datasets for _, split in sorted(data.splits.items())]
        return digest_of(
            version=ROWS_VERSION, task=self.task, backbone=self.backbone.identity, cores=self.cores, size=self.size,
            data=[data.fingerprint for data in datasets], pictures=contents, seed=self.seed, protocol=self.protocol,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The name of the file, without its suffix."""
        cores = "none" if self.cores is None else self.cores
        return f"{self.task}-{_slug(self.backbone.name)}-{_slug(self.data.name)}-c{cores}-s{self.size}-{self.key[:8]}"

    def path(self, folder: Path) -> Path:
        return folder / "rows" / f"{self.name}.json"

    def done(self, folder: Path) -> Row | None:
        """The row, if it was computed before and its file is undamaged."""
        return read_row(self.path(folder))

    def finish(
        self, folder: Path, *, metric: str, metrics: Mapping[str, float], seconds: Mapping[str, float],
        per_class: Mapping[str, float] | None = None, best: Mapping[str, float] | None = None,
        sweep: Sequence[Mapping[str, float]] | None = None, curve: Mapping[str, Sequence[float]] | None = None,
        grid: tuple[int, int] | None = None, gallery: Sequence[Mapping[str, str]] | None = None,
        also: Mapping[str, Mapping[str, float]] | None = None, found: Mapping[str, Any] | None = None,
    ) -> Row:  # fmt: skip
        """Write the row. `found` are settings of the protocol that were only known after the computation."""
        if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
            raise ArgumentError(
                f"{self.name}: {wrong[0]} is {metrics[wrong[0]]}: nothing was scored, or the head diverged. "
                "Look at the labels, or take lower rates"
            )
        data, backbone = self.data, self.backbone
        counts = {split: len(data.splits.get(split, ())) for split in ("train", "val", "test")}
        protocol = {**self.protocol, "data": data.protocol, **backbone.running, **(found or {})}
        if data.problems:
            protocol["problems"] = data.problems
        row: Row = {
            "schema": SCHEMA, "task": self.task,
            "model": {"name": backbone.name, "kind": backbone.kind, "about": backbone.about},
            "data": {"name": data.name, **counts, "classes": data.classes or None, "fingerprint": data.fingerprint},
            "cores": self.cores, "size": self.size, "grid": list(grid) if grid else None, "seed": self.seed,
            "scored_on": data.report, "metric": metric, "metrics": dict(metrics),
            "per_class": per_class and dict(per_class), "best": best, "sweep": sweep, "curve": curve,
            "protocol": protocol, "gallery": gallery, "also": also or None,
            "versions": describe_versions(backbone.device),
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        row = json.loads(json.dumps(row, default=str))  # as it will be read, so that the digest is of that
        row["digest"] = digest_of(**row)
        with atomic_path(self.path(folder)) as part:
            part.write_text(json.dumps(row, indent=1))
        return row


def read_row(path: Path) -> Row | None:
    """A row file; None where there is none, or its digest says that it was changed."""
    try:
        row: Row = json.loads(path.read_text())
        rest = {name: value for name, value in row.items() if name != "digest"}
        return row if row.get("digest") == digest_of(**rest) else None
    except (OSError, ValueError, RecursionError, AttributeError):
        return None


def _slug(name: str) -> str:
    """A name as part of a file name; of a long one, its end."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", name)[-60:].strip("-.") or "unnamed"
