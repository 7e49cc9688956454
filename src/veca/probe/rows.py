"""Rows of probes: settings, the loop over sizes and budgets, and one JSON file per result.

The folder of results may be shared by runs, models and datasets. The name of a file holds a hash of everything that
determines its numbers, known before any is computed: a row that exists is not computed again, and different settings
give a different file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from veca.data.datasets.base import DatasetError, ProbeData
from veca.data.datasets.batches import join_some
from veca.errors import ArgumentError
from veca.heads.features import digest_of
from veca.heads.frozen import FrozenBackbone
from veca.probe.results import SCHEMA
from veca.utils.device import describe_versions
from veca.utils.files import atomic_path, check_utf8, check_writable
from veca.utils.settings import Bounds, Positive, Settings

ROWS_VERSION = 1  # of the code that computes rows: raise it when equal settings give other numbers
_NOT_IN_PROTOCOL = ("cores", "sizes", "seed", "workers", "progress")
"""Settings that are elsewhere in a row, or that change no number."""
Row: TypeAlias = dict[str, Any]
Warn: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(Settings):
    """Settings of all probes: budgets, sizes, and how the work is done.

    The names of the fields are part of the protocol of a row, so renaming one makes users compute their rows again.
    """

    cores: tuple[Positive, ...] | None = None
    """Budgets; None: the largest of the model. Ignored by a backbone without a budget."""
    sizes: tuple[Positive, ...] = (256,)
    """In pixels: side of the crop in classification, short side in dense tasks."""
    seed: Annotated[int, Bounds(ge=0)] = 0
    at_once: Positive | None = None
    """Images per forward pass; None: by their size."""
    workers: Annotated[int, Bounds(ge=0)] = 0
    skip_bad: bool = False
    """Leave out unreadable images and report them, instead of stopping."""
    progress: bool = True

    def describe(self, *leave_out: str) -> dict[str, Any]:
        """Return the settings that belong to a protocol as plain data."""
        left_out = (*_NOT_IN_PROTOCOL, *leave_out)
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}


@dataclass(frozen=True)
class Job:
    """A row to compute: everything that determines its numbers, and the folder it is written to."""

    task: Literal["classify", "knn", "segment", "depth"]
    backbone: FrozenBackbone
    data: ProbeData
    folder: Path
    settings: ProbeSettings
    also: Sequence[ProbeData] = ()
    """Further datasets, scored with the same head."""
    cores: int | None = None
    size: int = 0
    protocol: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Plain data."""

    @property
    def name(self) -> str:
        """The name of the file, without its suffix. It ends with a hash of everything the numbers depend on."""
        datasets = (self.data, *self.also)
        contents = [split.content_hash for data in datasets for _, split in sorted(data.splits.items())]
        key = digest_of(
            version=ROWS_VERSION, task=self.task, backbone=self.backbone.identity, cores=self.cores, size=self.size,
            data=[data.fingerprint for data in datasets], pictures=contents, seed=self.settings.seed,
            protocol=self.protocol,
        )  # fmt: skip
        cores = "none" if self.cores is None else self.cores
        return f"{self.task}-{_slug(self.backbone.name)}-{_slug(self.data.name)}-c{cores}-s{self.size}-{key[:8]}"

    @property
    def path(self) -> Path:
        return self.folder / "rows" / f"{self.name}.json"

    def finish(self, values: Mapping[str, Any], skipped: Mapping[str, Sequence[str]]) -> Row:
        """Write the row: `values` are those that only the computation gives, `skipped` the images it left out."""
        metrics = values["metrics"]
        if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
            way = "nothing was scored, or the head diverged. Look at the labels, or take lower rates"
            raise ArgumentError(f"{self.name}: {wrong[0]} is {metrics[wrong[0]]}: {way}")
        data, backbone = self.data, self.backbone
        counts = {split: len(data.splits.get(split, ())) for split in ("train", "val", "test")}
        protocol = {**self.protocol, "data": data.protocol, **backbone.running}
        protocol |= {"skipped": dict(skipped)} if skipped else {}
        protocol |= {"problems": data.problems} if data.problems else {}
        row: Row = {
            "schema": SCHEMA, "task": self.task,
            "model": {"name": backbone.name, "kind": backbone.kind, "about": backbone.about},
            "data": {"name": data.name, **counts, "classes": data.classes or None, "fingerprint": data.fingerprint},
            "cores": self.cores, "size": self.size, "grid": None, "seed": self.settings.seed, "scored_on": data.report,
            # None: what a task does not have.
            **dict.fromkeys(("metric", "metrics", "per_class", "best", "sweep", "curve")), "protocol": protocol,
            "gallery": None, "also": None, "versions": describe_versions(backbone.device), **values,
            "seconds": {name: round(value, 3) for name, value in values["seconds"].items()},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        row = json.loads(json.dumps(row, default=str))  # as it will be read, so that the digest is of that
        row["digest"] = digest_of(**row)
        with atomic_path(self.path) as part:
            part.write_text(json.dumps(row, indent=1))
        return row


Compute: TypeAlias = Callable[[Sequence[Job], int], Iterable[tuple[Job, dict[str, Any], Mapping[str, Sequence[str]]]]]
"""Computes the jobs of one size, given the side in pixels: arguments of `Job.finish` for each.

Skipped are unreadable images, by dataset and split.
"""


def run_probe(probe: Job, protocol: Callable[[int], dict[str, Any]], compute: Compute, warn: Warn) -> list[Row]:
    """Return a row for every size and budget: those already in the folder, and the others computed and written there.

    `probe` is what the jobs have in common; `protocol` describes what is computed at a side in pixels.
    """
    backbone, settings = probe.backbone, probe.settings
    check_utf8(probe.folder)
    check_writable(probe.folder, folder=True)
    if backbone.budgets is None and settings.cores is not None:
        warn(f"{backbone.name} has no budget: --cores makes no difference to it, and its rows have none.")
    budgets = backbone.cores(settings.cores)
    rows: list[Row] = []
    # All sides first: a wrong one is to be refused before anything is computed.
    for size, side in [(size, backbone.side(size)) for size in settings.sizes]:
        about = protocol(side)
        if side != size:
            note = f"{size} is no multiple of {backbone.name}'s patch, {backbone.patch}: it sees {side}"
            about |= {"side": side, "note": note}
            warn(f"{note}.")
        jobs = [dataclasses.replace(probe, cores=cores, size=size, protocol=about) for cores in budgets]
        done = {job.cores: read_row(job.path) for job in jobs}
        todo = [job for job in jobs if done[job.cores] is None]
        warned: set[str] = set()  # all budgets skip the same images
        for job, values, skipped in compute(todo, side) if todo else ():
            for where in sorted(skipped.keys() - warned):
                bad = skipped[where]
                warn(f"{len(bad):,} pictures of {where} cannot be read and were left out: {join_some(bad)}")
            warned |= skipped.keys()
            done[job.cores] = job.finish(values, skipped)
        rows += [row for row in done.values() if row is not None]
    return rows


def check_probe_data(data: ProbeData, tasks: Sequence[str], warn: Warn) -> None:
    """Refuse data without the labels or splits that a probe needs; warn where it is not what was published."""
    if data.task not in tasks:
        raise DatasetError(f"{data.name} has labels to {data.task}: `veca probe {data.task}` is the probe for it")
    if missing := [split for split in ("train", "val") if split not in data.splits]:
        head = data.protocol.get("head")
        way = f"score it with a head of {head}: --data {head} --also {data.name}" if head else "add one"
        raise DatasetError(f"{data.name} has no {' and no '.join(missing)}, and nothing can be learned: {way}")
    for problem in data.problems:
        warn(f"{data.name}: {problem}. The score is not the benchmark's.")


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
