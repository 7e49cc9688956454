"""Linear and k-NN classification probes of the global feature.

Shapes: N images, D width of the features, C classes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from veca.data.datasets.base import DatasetError, ProbeData
from veca.data.datasets.batches import CropTransform
from veca.heads.features import Extraction, drop_unreadable
from veca.heads.frozen import FeatureKind, FrozenBackbone
from veca.heads.linear import DECAYS, RATES, LinearHead, score, score_valid_labels, train_linear
from veca.heads.metrics import average_precision, percent_by_class, top_k_hits
from veca.probe.knn import knn_accuracy
from veca.probe.rows import Compute, Job, ProbeSettings, Row, Warn, check_probe_data, run_probe
from veca.utils.progress import bar
from veca.utils.settings import Bounds, Positive


@dataclass(frozen=True, kw_only=True)
class ClassifySettings(ProbeSettings):
    """Linear classifiers: SGD with momentum and a cosine schedule, one head for every rate × decay."""

    rates: tuple[Annotated[float, Bounds(gt=0)], ...] = RATES
    decays: tuple[Annotated[float, Bounds(ge=0)], ...] = DECAYS
    epochs: Positive = 100
    batch: Positive = 128
    momentum: Annotated[float, Bounds(ge=0, lt=1)] = 0.9
    standardize: bool = False
    """Bring each channel to mean 0 and deviation 1 first."""
    feature: FeatureKind = "cls"
    passes: Annotated[int, Bounds(ge=0)] = 0
    """Train on this many epochs of random crops, instead of one of centre crops."""


@dataclass(frozen=True, kw_only=True)
class KnnSettings(ProbeSettings):
    """Nearest neighbours by cosine, each weighing exp(cosine / temperature)."""

    ks: tuple[Positive, ...] = (10, 20)
    """The last is reported as `top1`."""
    temperature: Annotated[float, Bounds(ge=1e-3)] = 0.07
    feature: FeatureKind = "cls"


def classify(
    backbone: FrozenBackbone, data: ProbeData, out: Path, settings: ClassifySettings,
    also: Sequence[ProbeData] = (), warn: Warn = print,
) -> list[Row]:  # fmt: skip
    """Train linear classifiers of the global feature; score the best on val on test, or on val without a test.

    `also` are further sets with the same classes, such as ImageNetV2 for ImageNet, scored with the same head.
    """
    check_probe_data(data, ("classify", "multilabel"), warn)
    for other in also:
        if len(other.classes) != len(data.classes):
            counts = f"{other.name} has {len(other.classes):,} classes, {data.name} {len(data.classes):,}"
            raise DatasetError(f"{counts}: a head of the one cannot be scored on the other")

    def protocol(side: int) -> dict[str, Any]:
        crop = _train_crops(side, min(1, settings.passes), settings.seed)[0].describe()
        heads = {**settings.describe(), "optimizer": "SGD", "schedule": "cosine", "chosen_on": "val"}
        return {**_preprocessing(side), "train_view": crop, **heads, "also": [other.name for other in also]}

    compute = _feature_probe(settings.feature, settings.passes, partial(_probe_linear, settings))
    return run_probe(Job("classify", backbone, data, out, settings, also), protocol, compute, warn)


def knn(backbone: FrozenBackbone, data: ProbeData, out: Path, settings: KnnSettings, warn: Warn = print) -> list[Row]:
    """Classify by nearest neighbours among train, and val if test is scored: nothing is chosen on val."""
    if data.task == "multilabel":
        way = "use `veca probe classify`"
        raise DatasetError(f"{data.name} has several labels for a picture, which k-NN does not support: {way}")
    check_probe_data(data, ("classify",), warn)
    # Whatever is not scored can vote.
    neighbours = ("train", "val") if data.report == "test" and "val" in data.splits else ("train",)

    def protocol(side: int) -> dict[str, Any]:
        return {**_preprocessing(side), **settings.describe(), "neighbours": list(neighbours)}

    def probe(job: Job, features: _CachedFeatures) -> dict[str, Any]:
        accuracies = knn_accuracy(
            *features(data, *neighbours), *features(data, data.report),
            ks=settings.ks, temperature=settings.temperature, device=backbone.device,
        )  # fmt: skip
        metrics = {"top1": accuracies[settings.ks[-1]], **{f"top1_k{k}": value for k, value in accuracies.items()}}
        return {"metric": "top1", "metrics": _to_percent(metrics)}

    compute = _feature_probe(settings.feature, 0, probe)
    return run_probe(Job("knn", backbone, data, out, settings), protocol, compute, warn)


def _preprocessing(side: int) -> dict[str, Any]:
    crop = CropTransform(side).describe()
    return {"preprocessing": {**crop, "resize": "bicubic, antialiased", "crop": "centre"}}


def _train_crops(side: int, epochs: int, seed: int) -> list[CropTransform]:
    return [CropTransform(side, epoch, seed) for epoch in range(epochs)] or [CropTransform(side)]


@dataclass
class _CachedFeatures:
    """Features and labels of datasets at one size and budget, from the cache on disk."""

    extraction: Extraction
    cores: int | None
    crops: Callable[[str], Sequence[CropTransform]]
    skip_bad: bool
    skipped: dict[str, list[str]]
    """Unreadable images are added here, by dataset and split."""

    def __call__(self, data: ProbeData, *names: str) -> tuple[Tensor, Tensor]:
        """Return those of the splits `names` one after the other, each in all its crops."""
        parts = [self._load(data, name, crop) for name in names for crop in self.crops(name)]
        values, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        if not len(values):
            raise DatasetError(f"{data.name} has no picture in {' and '.join(names)} that can be read")
        # On the device if they fit there well: training reads them many times.
        device = self.extraction.backbone.device
        fits = device.type == "cuda" and 4 * values.nbytes < torch.cuda.mem_get_info(device)[0]
        return values.to(device) if fits else values, labels

    def _load(self, data: ProbeData, name: str, crop: CropTransform) -> tuple[Tensor, Tensor]:
        split, where = data.splits[name], f"{data.name} {name}"
        features = self.extraction.load(split, crop, self.cores)
        if features.bad:
            self.skipped[where] = sorted(features.bad.values())
        return drop_unreadable(features, torch.from_numpy(split.labels).long(), self.skip_bad, where)


def _feature_probe(kind: FeatureKind, passes: int, probe: Callable[[Job, _CachedFeatures], dict[str, Any]]) -> Compute:
    """Return what extracts the features of all budgets in one pass over each split, then probes budget by budget."""

    def compute(jobs: Sequence[Job], side: int) -> Iterator[tuple[Job, dict[str, Any], dict[str, list[str]]]]:
        data, backbone, settings = jobs[0].data, jobs[0].backbone, jobs[0].settings
        extraction = Extraction(
            backbone, jobs[0].folder / "features", kind, settings.at_once, settings.workers, settings.progress
        )

        def crops(split: str) -> list[CropTransform]:
            return _train_crops(side, passes if split == "train" else 0, settings.seed)

        # Other test sets are scored with the same head, on the split they are published for.
        splits = [*((data, name) for name in data.splits), *((other, other.report) for other in jobs[0].also)]
        seconds = 0.0
        for dataset, name in splits:
            for crop in crops(name):
                title = f"{backbone.name} {dataset.name} {name} {jobs[0].size} px"
                title += "" if crop.epoch is None else f", pass {crop.epoch + 1}"
                seconds += extraction.run(dataset.splits[name], crop, [job.cores for job in jobs], title)
        for job in jobs:
            began = time.perf_counter()
            features = _CachedFeatures(extraction, job.cores, crops, settings.skip_bad, {})
            values = probe(job, features)
            times = {"features": seconds / len(jobs), "head": time.perf_counter() - began}
            yield job, {**values, "seconds": times}, features.skipped

    return compute


def _probe_linear(settings: ClassifySettings, job: Job, features: _CachedFeatures) -> dict[str, Any]:
    data, multilabel = job.data, job.data.task == "multilabel"
    train, val, test = (features(data, name) for name in ("train", "val", data.report))
    title = f"heads, {job.backbone.name if job.cores is None else f'{job.cores} cores'}"
    with bar(title, settings.epochs, "epochs", settings.progress) as advance:
        sweep = train_linear(
            *train, *val, classes=len(data.classes), rates=settings.rates, decays=settings.decays,
            epochs=settings.epochs, batch=settings.batch, momentum=settings.momentum, seed=settings.seed,
            multilabel=multilabel, standardize=settings.standardize, device=job.backbone.device,
            progress=lambda done, total: advance(1),
        )  # fmt: skip
    metrics, per_class = _score_classes(sweep.head, *test)
    heads = [{"rate": rate, "decay": decay} for rate, decay in sweep.pairs]
    scores = [round(100 * float(value), 4) for value in sweep.best_scores]
    return {
        "metric": "mAP" if multilabel else "top1",
        "metrics": _to_percent(metrics),
        "per_class": percent_by_class(data.classes, per_class.tolist()),
        "best": {**heads[sweep.best], "epoch": sweep.best_epoch},
        "sweep": [{**head, "val": value} for head, value in zip(heads, scores, strict=True)],
        "curve": {"val": [round(100 * float(value), 4) for value in sweep.scores[:, sweep.best]]},
        "also": {other.name: _score_other(sweep.head, other, features) for other in job.also} or None,
    }


def _score_classes(head: LinearHead, features: Tensor, labels: Tensor) -> tuple[dict[str, float], Tensor]:
    """Return the metrics, and of each class (C) its accuracy or average precision."""
    metrics, scores, own = score(head, features, labels), head.scores(features), labels.to(head.bias.device)
    if labels.ndim == 2:
        eleven = score(head, features, labels, "11")["map"]
        return {"mAP": metrics["map"], "mAP11": eleven}, average_precision(scores, own).cpu()
    hits, labels = top_k_hits(scores, own).cpu(), labels.cpu()
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
