"""Linear and k-NN classification probes of the global feature, and the loop over sizes and budgets of all probes.

Shapes: N images, D width of the features, C classes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from veca.data.datasets.base import DatasetError, ProbeData
from veca.data.datasets.batches import CropTransform, join_some
from veca.heads.features import Extraction, drop_unreadable
from veca.heads.frozen import FeatureKind, FrozenBackbone
from veca.heads.linear import DECAYS, RATES, LinearHead, score, score_valid_labels, train_linear
from veca.heads.metrics import average_precision, percent_by_class, top_k_hits
from veca.probe.knn import knn_accuracy
from veca.probe.rows import Job, ProbeTask, Row
from veca.utils.files import check_utf8, check_writable
from veca.utils.progress import bar

_NOT_IN_PROTOCOL = ("cores", "sizes", "seed", "workers", "progress")
"""Settings that are elsewhere in a row, or that change no number."""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Settings of all probes: budgets, sizes, and how the work is done.

    The names of the fields are part of the protocol of a row, so renaming one makes users compute their rows again.
    """

    cores: tuple[int, ...] | None = None
    """Budgets; None: the largest of the model. Ignored by a backbone without a budget."""
    sizes: tuple[int, ...] = (256,)
    """In pixels: side of the crop in classification, short side in dense tasks."""
    seed: int = 0
    at_once: int | None = None
    """Images per forward pass; None: by their size."""
    workers: int = 0
    skip_bad: bool = False
    """Leave out unreadable images and report them, instead of stopping."""
    progress: bool = True

    def describe(self, *leave_out: str) -> dict[str, Any]:
        """Return the settings that belong to a protocol as plain data."""
        left_out = (*_NOT_IN_PROTOCOL, *leave_out)
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}


@dataclass(frozen=True, kw_only=True)
class ClassifySettings(ProbeSettings):
    """Linear classifiers: SGD with momentum and a cosine schedule, one head for every rate × decay."""

    rates: tuple[float, ...] = RATES
    decays: tuple[float, ...] = DECAYS
    epochs: int = 100
    batch: int = 128
    momentum: float = 0.9
    standardize: bool = False
    """Bring each channel to mean 0 and deviation 1 first."""
    feature: FeatureKind = "cls"
    passes: int = 0
    """Train on this many epochs of random crops, instead of one of centre crops."""


@dataclass(frozen=True, kw_only=True)
class KnnSettings(ProbeSettings):
    """Nearest neighbours by cosine, each weighing exp(cosine / temperature)."""

    ks: tuple[int, ...] = (10, 20)
    """The last is reported as `top1`."""
    temperature: float = 0.07
    feature: FeatureKind = "cls"


class ProbeResult(NamedTuple):
    job: Job
    values: dict[str, Any]
    """Arguments of `Job.finish`."""
    skipped: Mapping[str, Sequence[str]]
    """Unreadable images that were left out, by dataset and split."""


Compute: TypeAlias = Callable[[Sequence[Job], int], Iterator[ProbeResult]]
"""Computes the jobs of one size, given the side in pixels."""
Warn: TypeAlias = Callable[[str], None]


def run_probe(
    task: ProbeTask,
    backbone: FrozenBackbone,
    data: ProbeData,
    out: Path,
    settings: ProbeSettings,
    protocol: Callable[[int], dict[str, Any]],
    compute: Compute,
    warn: Warn,
    also: Sequence[ProbeData] = (),
) -> list[Row]:
    """Return a row for every size and budget: those already in `out`, and the others computed and written there.

    `protocol` describes what is computed at a side in pixels.
    """
    check_utf8(out)
    check_writable(out, folder=True)
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
        jobs = [Job(task, backbone, data, cores, size, settings.seed, about, also) for cores in budgets]
        done = {job.cores: job.done(out) for job in jobs}
        todo = [job for job in jobs if done[job.cores] is None]
        warned: set[str] = set()  # all budgets skip the same images
        for job, values, skipped in compute(todo, side) if todo else ():
            for where in sorted(skipped.keys() - warned):
                bad = skipped[where]
                warn(f"{len(bad):,} pictures of {where} cannot be read and were left out: {join_some(bad)}")
            warned |= skipped.keys()
            done[job.cores] = job.finish(out, found={"skipped": dict(skipped)} if skipped else {}, **values)
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


def classify(
    backbone: FrozenBackbone,
    data: ProbeData,
    out: Path,
    settings: ClassifySettings,
    also: Sequence[ProbeData] = (),
    warn: Warn = print,
) -> list[Row]:
    """Train linear classifiers of the global feature; score the best on val on test, or on val without a test.

    `also` are further sets with the same classes, such as ImageNetV2 for ImageNet, scored with the same head.
    """
    check_probe_data(data, ("classify", "multilabel"), warn)
    for other in also:
        if len(other.classes) != len(data.classes):
            raise DatasetError(
                f"{other.name} has {len(other.classes):,} classes, {data.name} {len(data.classes):,}: a head of the "
                "one cannot be scored on the other"
            )

    def protocol(side: int) -> dict[str, Any]:
        crop = _train_crops(side, min(1, settings.passes), settings.seed)[0].describe()
        heads = {**settings.describe(), "optimizer": "SGD", "schedule": "cosine", "chosen_on": "val"}
        return {**_preprocessing(side), "train_view": crop, **heads, "also": [other.name for other in also]}

    def compute(jobs: Sequence[Job], side: int) -> Iterator[ProbeResult]:
        train_crops = _train_crops(side, settings.passes, settings.seed)
        return _probe_features(
            jobs, side, out, settings, settings.feature, train_crops,
            lambda job, features: _probe_linear(job, features, settings, train_crops),
        )  # fmt: skip

    return run_probe("classify", backbone, data, out, settings, protocol, compute, warn, also)


def knn(backbone: FrozenBackbone, data: ProbeData, out: Path, settings: KnnSettings, warn: Warn = print) -> list[Row]:
    """Classify by nearest neighbours among train, and val if test is scored: nothing is chosen on val."""
    if data.task == "multilabel":
        raise DatasetError(
            f"{data.name} has several labels for a picture, which k-NN does not support: use `veca probe classify`"
        )
    check_probe_data(data, ("classify",), warn)
    # Whatever is not scored can vote.
    neighbours = ("train", "val") if data.report == "test" and "val" in data.splits else ("train",)

    def protocol(side: int) -> dict[str, Any]:
        return {**_preprocessing(side), **settings.describe(), "neighbours": list(neighbours)}

    def probe(job: Job, features: _CachedFeatures) -> dict[str, Any]:
        accuracies = knn_accuracy(
            *features(data, *neighbours), *features(data, data.report),
            ks=settings.ks, temperature=settings.temperature, device=features.device,
        )  # fmt: skip
        metrics = {"top1": accuracies[settings.ks[-1]], **{f"top1_k{k}": value for k, value in accuracies.items()}}
        return {"metric": "top1", "metrics": _to_percent(metrics)}

    def compute(jobs: Sequence[Job], side: int) -> Iterator[ProbeResult]:
        return _probe_features(jobs, side, out, settings, settings.feature, [CropTransform(side)], probe)

    return run_probe("knn", backbone, data, out, settings, protocol, compute, warn)


def _preprocessing(side: int) -> dict[str, Any]:
    crop = CropTransform(side).describe()
    return {"preprocessing": {**crop, "resize": "bicubic, antialiased", "crop": "centre"}}


def _train_crops(side: int, epochs: int, seed: int) -> list[CropTransform]:
    return [CropTransform(side, epoch, seed) for epoch in range(epochs)] or [CropTransform(side)]


class _CachedFeatures:
    """Features and labels of a dataset at one size and budget, from the cache on disk."""

    def __init__(self, extraction: Extraction, cores: int | None, side: int, skip_bad: bool) -> None:
        self.extraction, self.cores, self.side, self.skip_bad = extraction, cores, side, skip_bad
        self.device = extraction.backbone.device
        self.skipped: dict[str, list[str]] = {}

    def __call__(
        self, data: ProbeData, *names: str, crops: Sequence[CropTransform] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return those of the splits `names` one after the other, each in all `crops` (None: the centre)."""
        crops = crops or [CropTransform(self.side)]
        parts = [self._load(data, name, crop) for name in names for crop in crops]
        values, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        if not len(values):
            raise DatasetError(f"{data.name} has no picture in {' and '.join(names)} that can be read")
        # On the device if they fit there well: training reads them many times.
        if self.device.type == "cuda" and 4 * values.nbytes < torch.cuda.mem_get_info(self.device)[0]:
            values = values.to(self.device)
        return values, labels

    def _load(self, data: ProbeData, name: str, crop: CropTransform) -> tuple[Tensor, Tensor]:
        split, where = data.splits[name], f"{data.name} {name}"
        features = self.extraction.load(split, crop, self.cores)
        if features.bad:
            self.skipped[where] = sorted(features.bad.values())
        return drop_unreadable(features, torch.from_numpy(split.labels).long(), self.skip_bad, where)


def _probe_features(
    jobs: Sequence[Job],
    side: int,
    out: Path,
    settings: ProbeSettings,
    kind: FeatureKind,
    train_crops: Sequence[CropTransform],
    probe: Callable[[Job, _CachedFeatures], dict[str, Any]],
) -> Iterator[ProbeResult]:
    """Extract the features of all budgets in one pass over each split, then probe budget by budget."""
    data, backbone, size = jobs[0].data, jobs[0].backbone, jobs[0].size
    extraction = Extraction(backbone, out / "features", kind, settings.at_once, settings.workers, settings.progress)
    passes = [
        (data, name, crop)
        for name in data.splits
        for crop in (train_crops if name == "train" else [CropTransform(side)])
    ]
    # Other test sets are scored with the same head, on the split they are published for.
    passes += [(other, other.report, CropTransform(side)) for other in jobs[0].also]
    extraction_seconds = 0.0
    for dataset, name, crop in passes:
        title = f"{backbone.name} {dataset.name} {name} {size} px"
        title += "" if crop.epoch is None else f", pass {crop.epoch + 1}"
        extraction_seconds += extraction.run(dataset.splits[name], crop, [job.cores for job in jobs], title)
    for job in jobs:
        began = time.perf_counter()
        features = _CachedFeatures(extraction, job.cores, side, settings.skip_bad)
        values = probe(job, features)
        seconds = {"features": extraction_seconds / len(jobs), "head": time.perf_counter() - began}
        yield ProbeResult(job, {**values, "seconds": seconds}, features.skipped)


def _probe_linear(
    job: Job, features: _CachedFeatures, settings: ClassifySettings, train_crops: Sequence[CropTransform]
) -> dict[str, Any]:
    data, multilabel = job.data, job.data.task == "multilabel"
    train = features(data, "train", crops=train_crops)
    val, test = features(data, "val"), features(data, data.report)
    title = f"heads, {job.backbone.name if job.cores is None else f'{job.cores} cores'}"
    with bar(title, settings.epochs, "epochs", settings.progress) as advance:
        sweep = train_linear(
            *train, *val, classes=len(data.classes), rates=settings.rates, decays=settings.decays,
            epochs=settings.epochs, batch=settings.batch, momentum=settings.momentum, seed=settings.seed,
            multilabel=multilabel, standardize=settings.standardize, device=features.device,
            progress=lambda done, total: advance(1),
        )  # fmt: skip
    metrics, per_class = _score_classes(sweep.head, *test)
    rate, decay = sweep.pairs[sweep.best]
    return {
        "metric": "mAP" if multilabel else "top1",
        "metrics": _to_percent(metrics),
        "per_class": percent_by_class(data.classes, per_class.tolist()),
        "best": {"rate": rate, "decay": decay, "epoch": sweep.best_epoch},
        "sweep": [
            {"rate": rate, "decay": decay, "val": round(100 * float(value), 4)}
            for (rate, decay), value in zip(sweep.pairs, sweep.best_scores, strict=True)
        ],
        "curve": {"val": [round(100 * float(value), 4) for value in sweep.scores[:, sweep.best]]},
        "also": {other.name: _score_other(sweep.head, other, features) for other in job.also},
    }


def _score_classes(head: LinearHead, features: Tensor, labels: Tensor) -> tuple[dict[str, float], Tensor]:
    """Return the metrics, and of each class (C) its accuracy or average precision."""
    metrics, scores = score(head, features, labels), head.scores(features)
    own = labels.to(scores.device)
    if labels.ndim == 2:
        metrics = {"mAP": metrics["map"], "mAP11": score(head, features, labels, "11")["map"]}
        return metrics, average_precision(scores, own).cpu()
    hits = top_k_hits(scores, own).cpu()
    labels = labels.cpu()
    # A class without test images divides 0 by 0: NaN, which the mean leaves out.
    right, count = (torch.bincount(each, minlength=len(head.bias)) for each in (labels[hits], labels))
    per_class = right.double() / count
    return {**metrics, "mean_per_class": float(per_class.nanmean())}, per_class


def _score_other(head: LinearHead, other: ProbeData, features: _CachedFeatures) -> dict[str, float]:
    values, labels = features(other, other.report)
    if other.task == "multilabel":
        return _to_percent({"top1": score_valid_labels(head, values, labels > 0)})
    return _to_percent(score(head, values, labels))


def _to_percent(shares: dict[str, float]) -> dict[str, float]:
    return {name: round(100 * value, 4) for name, value in shares.items()}
