"""Probes of the global feature: linear classifiers and nearest neighbours, at every size and budget asked for.

Shapes: N pictures, D width of the features, C classes.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from veca.data.datasets.base import DatasetError, ProbeData
from veca.errors import ArgumentError
from veca.heads.linear import LinearHead, score, score_valid_labels, train_linear
from veca.heads.metrics import average_precision, by_class, top_k_hits
from veca.probe.backbones import Backbone, Kind
from veca.probe.features import Extraction, View, as_plain, listed, spread, without_bad
from veca.probe.knn import knn_accuracy
from veca.probe.rows import Job, ProbeTask, Row
from veca.utils.files import check_utf8, check_writable
from veca.utils.progress import bar

Say = Callable[[str], None]
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
DECAYS = (0.0, 1e-5, 1e-4)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What every probe is asked: budgets, sizes, and how the work is done."""

    cores: tuple[int, ...] | None = None
    """Budgets; None: all the model has. A backbone without a budget takes no notice."""
    sizes: tuple[int, ...] = (256,)
    """In pixels: of the side that is seen in classification, of the short side in dense tasks."""
    seed: int = 0
    at_once: int | None = None
    """Pictures per forward pass; None: by their size."""
    workers: int = 0
    skip_bad: bool = False
    """Leave out pictures that cannot be read, and say so, instead of stopping."""
    progress: bool = True

    def jobs(
        self, task: ProbeTask, backbone: Backbone, data: ProbeData, protocol: Any, also: Sequence[ProbeData], say: Say
    ) -> Iterator[list[Job]]:
        """The rows of each size. `protocol` gives that of a size and its side in pixels."""
        if backbone.budgets is None and self.cores is not None:
            say(f"{backbone.name} has no budget: --cores makes no difference to it, and its rows have none.")
        budgets = backbone.cores(self.cores)
        for size in self.sizes:
            backbone.side(size)  # a wrong one is to be known before the first is computed
        for size in self.sizes:
            side = backbone.side(size)
            about = protocol(side)
            if side != size:
                note = f"{size} is no multiple of {backbone.name}'s patch, {backbone.patch}: it sees {side}"
                about |= {"side": side, "note": note}
                say(f"{note}.")
            yield [Job(task, backbone, data, cores, size, self.seed, about, also) for cores in budgets]


@dataclass(frozen=True, kw_only=True)
class ClassifySettings(Asked):
    """Of linear classifiers: SGD with momentum and a cosine schedule, a head for every rate × decay."""

    rates: tuple[float, ...] = RATES
    decays: tuple[float, ...] = DECAYS
    epochs: int = 100
    batch: int = 128
    momentum: float = 0.9
    standardize: bool = False
    """Bring each channel to mean 0 and deviation 1 first."""
    feature: Kind = "cls"
    passes: int = 0
    """So many passes over train with random parts of the pictures, instead of one with their centres."""


@dataclass(frozen=True, kw_only=True)
class KnnSettings(Asked):
    """Of nearest neighbours: cosine, each weighing exp(cosine / temperature)."""

    ks: tuple[int, ...] = (10, 20)
    """The last is the one that is reported as `top1`."""
    temperature: float = 0.07
    feature: Kind = "cls"


def limited(data: ProbeData, limit: int | None) -> ProbeData:
    """The dataset with at most `limit` pictures in each split, evenly spread over it."""
    if limit is None:
        return data
    if limit < 1:
        raise ArgumentError(f"limit is {limit}; at least one picture of each split is needed")
    splits = {name: split.take(spread(len(split), limit)) for name, split in data.splits.items()}
    counts = {name: len(split) for name, split in splits.items()}
    return dataclasses.replace(data, splits=splits, protocol={**data.protocol, "counts": counts, "limit": limit})


def classify(
    backbone: Backbone,
    data: ProbeData,
    out: Path,
    settings: ClassifySettings,
    also: Sequence[ProbeData] = (),
    say: Say = print,
) -> list[Row]:
    """Linear classifiers of the global feature: the best on val is scored on test, or on val where there is no test.

    `also` are further sets with the same classes, such as ImageNetV2 for ImageNet, scored with the same head.
    """
    check_data(data, ("classify", "multilabel"), say)
    check_utf8(out)
    check_writable(out, folder=True)
    for other in also:
        if len(other.classes) != len(data.classes):
            raise DatasetError(
                f"{other.name} has {len(other.classes):,} classes, {data.name} {len(data.classes):,}: a head of the "
                "one cannot be scored on the other"
            )
    rows = []

    def protocol(side: int) -> dict[str, Any]:
        view = View(side, 0, settings.seed) if settings.passes else View(side)
        heads = {**as_plain(settings, *_HOW), "optimizer": "SGD", "schedule": "cosine", "chosen_on": "val"}
        return {**_seen(side), "train_view": view.about(), **heads, "also": [other.name for other in also]}

    for jobs in settings.jobs("classify", backbone, data, protocol, also, say):
        rows += _at_one_size(jobs, out, settings, settings.feature, functools.partial(_linear, settings=settings), say)
    return rows


def knn(backbone: Backbone, data: ProbeData, out: Path, settings: KnnSettings, say: Say = print) -> list[Row]:
    """Classification by nearest neighbours among train; nothing is chosen, so val is among them if test is scored."""
    if data.task == "multilabel":
        raise DatasetError(
            f"{data.name} has several labels for a picture, which neighbours do not vote on: classify it"
        )
    check_data(data, ("classify",), say)
    check_utf8(out)
    check_writable(out, folder=True)
    rows = []

    def protocol(side: int) -> dict[str, Any]:
        return {**_seen(side), **as_plain(settings, *_HOW), "neighbours": list(_known(data))}

    for jobs in settings.jobs("knn", backbone, data, protocol, (), say):
        rows += _at_one_size(jobs, out, settings, settings.feature, functools.partial(_knn, settings=settings), say)
    return rows


_HOW = ("cores", "sizes", "seed", "workers", "progress")
"""Fields that are no part of a protocol: they are in the row, or change no number."""


def _seen(side: int) -> dict[str, Any]:
    return {"preprocessing": {**View(side).about(), "resize": "bicubic, antialiased", "crop": "centre"}}


def _known(data: ProbeData) -> tuple[str, ...]:
    return ("train", "val") if data.report == "test" and "val" in data.splits else ("train",)


def check_data(data: ProbeData, tasks: Sequence[str], say: Say) -> None:
    if data.task not in tasks:
        raise DatasetError(f"{data.name} has labels to {data.task}: `veca probe {data.task}` is the probe for it")
    if missing := [split for split in ("train", "val") if split not in data.splits]:
        head = data.protocol.get("head")
        way = f"score it with a head of {head}: --data {head} --also {data.name}" if head else "add one"
        raise DatasetError(f"{data.name} has no {' and no '.join(missing)}, and nothing can be learned: {way}")
    for problem in data.problems:
        say(f"{data.name}: {problem}. The score is not the benchmark's.")


class _Cached:
    """The features of a dataset at one size and budget, as they are on disk, and their labels."""

    def __init__(self, extraction: Extraction, cores: int | None, side: int, skip_bad: bool, device: torch.device):
        self.extraction, self.cores, self.side, self.skip_bad, self.device = extraction, cores, side, skip_bad, device
        self.skipped: dict[str, list[str]] = {}

    def __call__(self, data: ProbeData, *names: str, views: Sequence[View] = ()) -> tuple[Tensor, Tensor]:
        """Of the splits `names` one after the other, each in all `views` (none: the centre)."""
        found = [
            self._one(data, name, view) for name in names for view in (views or (View(self.side),))
        ]  # fmt: skip
        values, labels = (torch.cat(list(parts)) for parts in zip(*found, strict=True))
        if not len(values):
            raise DatasetError(f"{data.name} has no picture in {' and '.join(names)} that can be read")
        return _near(values, self.device), labels

    def _one(self, data: ProbeData, name: str, view: View) -> tuple[Tensor, Tensor]:
        split = data.splits[name]
        features = self.extraction.load(split, view, self.cores)
        if features.bad:
            self.skipped[f"{data.name} {name}"] = sorted(features.bad.values())
        return without_bad(features, torch.from_numpy(split.labels).long(), self.skip_bad, f"{data.name} {name}")


def _near(values: Tensor, device: torch.device) -> Tensor:
    """Features where they are used, if they fit there well."""
    if device.type == "cuda" and 4 * values.nbytes < torch.cuda.mem_get_info(device)[0]:
        return values.to(device)
    return values


Probe = Callable[[Job, _Cached], dict[str, Any]]
"""What `Job.finish` takes, from features."""


def _at_one_size(jobs: Sequence[Job], out: Path, settings: Asked, kind: Kind, probe: Probe, say: Say) -> list[Row]:
    """The rows of one size: those that are there, and the others from one pass over each split for all budgets."""
    rows = {job.cores: job.done(out) for job in jobs}
    todo = [job for job in jobs if rows[job.cores] is None]
    if todo:
        job, budgets = todo[0], [job.cores for job in todo]
        backbone, side = job.backbone, job.backbone.side(job.size)
        extraction = Extraction(
            backbone, out / "features", kind, settings.at_once, settings.workers, settings.progress
        )  # fmt: skip
        took = 0.0
        for data, name, view in _passes(job, settings, side):
            what = f"{backbone.name} {data.name} {name} {job.size} px"
            what += "" if view.turn is None else f", pass {view.turn + 1}"
            took += extraction.run(data.splits[name], view, budgets, what)
        for job in todo:
            began = time.perf_counter()
            cached = _Cached(extraction, job.cores, side, settings.skip_bad, backbone.device)
            found = probe(job, cached)
            seconds = {"features": took / len(todo), "head": time.perf_counter() - began}
            for where, bad in cached.skipped.items():
                say(f"{len(bad):,} pictures of {where} cannot be read and were left out: {listed(bad)}")
            more = {"skipped": cached.skipped} if cached.skipped else {}
            rows[job.cores] = job.finish(out, seconds=seconds, found=more, **found)
    return [row for row in rows.values() if row is not None]


def _passes(job: Job, settings: Asked, side: int) -> Iterator[tuple[ProbeData, str, View]]:
    """All that has to be seen for a job: dataset, split and view."""
    turns = settings.passes if isinstance(settings, ClassifySettings) else 0
    for name in job.data.splits:
        for view in _views(side, turns, settings.seed) if name == "train" else [View(side)]:
            yield job.data, name, view
    for data in job.also:
        yield data, data.report, View(side)


def _views(side: int, turns: int, seed: int) -> list[View]:
    return [View(side, turn, seed) for turn in range(turns)] or [View(side)]


def _linear(job: Job, cached: _Cached, settings: ClassifySettings) -> dict[str, Any]:
    data, several = job.data, job.data.task == "multilabel"
    train = cached(data, "train", views=_views(cached.side, settings.passes, settings.seed))
    val, test = cached(data, "val"), cached(data, data.report)
    with bar(f"heads, {_budget(job)}", settings.epochs, "epochs", settings.progress) as advance:
        sweep = train_linear(
            *train, *val, classes=len(data.classes), rates=settings.rates, decays=settings.decays,
            epochs=settings.epochs, batch=settings.batch, momentum=settings.momentum, seed=settings.seed,
            multilabel=several, standardize=settings.standardize, device=cached.device,
            progress=lambda done, total: advance(1),
        )  # fmt: skip
    metrics, per_class = _scored(sweep.head, *test, several)
    best = dict(zip(("rate", "decay"), sweep.pairs[sweep.best], strict=True))
    reached = [
        {"rate": rate, "decay": decay, "val": round(100 * float(value), 4)}
        for (rate, decay), value in zip(sweep.pairs, sweep.best_scores, strict=True)
    ]
    return {
        "metric": "mAP" if several else "top1",
        "metrics": metrics,
        "per_class": by_class(data.classes, per_class.tolist()),
        "best": {**best, "epoch": sweep.best_epoch},
        "sweep": reached,
        "curve": {"val": [round(100 * float(value), 4) for value in sweep.scores[:, sweep.best]]},
        "also": {other.name: _also(sweep.head, other, cached) for other in job.also},
    }


def _scored(head: LinearHead, features: Tensor, labels: Tensor, several: bool) -> tuple[dict[str, float], Tensor]:
    """The metrics in percent, and the share of each class (C): its accuracy or average precision."""
    if several:
        metrics = {"mAP": score(head, features, labels)["map"], "mAP11": score(head, features, labels, "11")["map"]}
        scores = torch.cat([head(piece) for piece in features.split(8192)])
        return _percent(metrics), average_precision(scores, labels.to(scores.device)).cpu()
    hits = torch.cat(
        [
            top_k_hits(head(piece), own.to(head.bias.device)).cpu()
            for piece, own in zip(features.split(8192), labels.split(8192), strict=True)
        ]
    )
    count = torch.bincount(labels, minlength=len(head.bias))
    per_class = torch.bincount(labels[hits], minlength=len(head.bias)).double() / count
    metrics = {**score(head, features, labels), "mean_per_class": float(per_class.nanmean())}
    return _percent(metrics), per_class


def _also(head: LinearHead, other: ProbeData, cached: _Cached) -> dict[str, float]:
    features, labels = cached(other, other.report)
    if other.task == "multilabel":
        valid = [row.nonzero().flatten().tolist() for row in labels > 0]
        return _percent({"top1": score_valid_labels(head, features, valid)})
    return _percent(score(head, features, labels))


def _knn(job: Job, cached: _Cached, settings: KnnSettings) -> dict[str, Any]:
    train, queries = cached(job.data, *_known(job.data)), cached(job.data, job.data.report)
    found = knn_accuracy(
        *train, *queries, ks=settings.ks, temperature=settings.temperature, device=cached.device
    )  # fmt: skip
    metrics = {"top1": found[settings.ks[-1]], **{f"top1_k{k}": value for k, value in found.items()}}
    return {"metric": "top1", "metrics": _percent(metrics)}


def _percent(shares: dict[str, float]) -> dict[str, float]:
    return {name: round(100 * value, 4) for name, value in shares.items()}


def _budget(job: Job) -> str:
    return job.backbone.name if job.cores is None else f"{job.cores} cores"
