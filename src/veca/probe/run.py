"""Classification probes of the global feature, linear and k-NN, and the loop over sizes and budgets of every probe.

Each result is a row: a JSON file in a folder that runs, models and datasets may share. The name of a file holds a hash
of everything that determines its numbers, known before any is computed: a row that exists is not computed again, and
different settings give a different file.

Shapes: N images, Q queries, D width of the features, C classes, k neighbours.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from veca.data.crops import CropReader
from veca.data.datasets import DatasetError, ProbeData
from veca.data.datasets.batches import CropTransform, join_some
from veca.data.records import DecodeChoice
from veca.errors import ArgumentError
from veca.heads.features import Extraction, FeatureKind, FrozenBackbone, digest_of, drop_unreadable
from veca.heads.linear import DECAYS, RATES, LinearHead, score, score_valid_labels, train_linear
from veca.heads.metrics import average_precision, percent_by_class, top_k_accuracy, top_k_hits, wilson_interval
from veca.probe.results import SCHEMA, SPLITS
from veca.utils.console import bar
from veca.utils.device import describe_versions
from veca.utils.files import atomic_path, check_utf8, check_writable
from veca.utils.settings import Bounds, Positive, Settings

ROWS_VERSION = 1  # of the code that computes rows: raise it when equal settings give other numbers
_NOT_IN_PROTOCOL = ("cores", "sizes", "seed", "workers", "progress", "decode")
"""Settings that are elsewhere in a row, or that change no number."""
Row: TypeAlias = dict[str, Any]
Warn: TypeAlias = Callable[[str], None]
RowTask: TypeAlias = Literal["classify", "knn", "segment", "depth"]
MAX_SIMILARITIES = 2**24
"""Similarities computed at a time; they take 20 bytes each."""
Labelled: TypeAlias = tuple[Tensor, Tensor]
"""Features (N, D) and their labels."""
LoadFeatures: TypeAlias = Callable[..., Labelled]
"""Loads the features of a dataset's splits, one after the other, each in all its crops."""


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
    decode: DecodeChoice = "pillow"
    """Decoder: "pillow" is exact; "gpu" decodes ordinary JPEGs on the GPU and the rest as "cpu" does; "cpu" is fast,
    its pixels differ from Pillow's by a few grey levels; "auto" is "gpu" where there is one, or else "cpu"."""
    progress: bool = True

    def sizes_of(self, backbone: FrozenBackbone) -> tuple[int, ...]:
        """Return the sizes to run at; refuse what the backbone cannot do."""
        return self.sizes

    def describe(self, *leave_out: str) -> dict[str, Any]:
        """Return the settings that belong to a protocol as plain data."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in (*_NOT_IN_PROTOCOL, *leave_out)}


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

    job = make_job("classify", backbone, data, out, settings, also)

    def protocol(side: int) -> dict[str, Any]:
        crop = job.crops(side, "train")[0].describe()
        heads = {**settings.describe(), "optimizer": "SGD", "schedule": "cosine", "chosen_on": "val"}
        return {**job.preprocessing(side), "train_view": crop, **heads, "also": [other.name for other in also]}

    compute = partial(_probe_features, partial(_probe_linear, settings), settings.feature)
    return run_probe(job, protocol, compute, warn)


def knn(backbone: FrozenBackbone, data: ProbeData, out: Path, settings: KnnSettings, warn: Warn = print) -> list[Row]:
    """Classify by nearest neighbours among train, and val if test is scored: nothing is chosen on val."""
    check_probe_data(data, ("classify",), warn)
    # Whatever is not scored can vote.
    voters = ("train", "val") if data.report == "test" and "val" in data.splits else ("train",)
    job = make_job("knn", backbone, data, out, settings)

    def protocol(side: int) -> dict[str, Any]:
        return {**job.preprocessing(side), **settings.describe(), "neighbours": list(voters)}

    def probe(job: Job, features: LoadFeatures) -> dict[str, Any]:
        voting, queries = features(data, *voters), features(data, data.report)
        accuracies = knn_accuracy(voting, queries, settings.ks, settings.temperature, backbone.device)
        metrics = {"top1": accuracies[settings.ks[-1]], **{f"top1_k{k}": value for k, value in accuracies.items()}}
        interval = _accuracy_intervals(metrics, len(queries[1]))
        return {"metric": "top1", "metrics": _to_percent(metrics), "interval": interval}

    compute = partial(_probe_features, probe, settings.feature)
    return run_probe(job, protocol, compute, warn)


def _probe_features(
    probe: Callable[[Job, LoadFeatures], dict[str, Any]], kind: FeatureKind, jobs: Sequence[Job], side: int
) -> Iterator[tuple[Job, dict[str, Any], dict[str, list[str]]]]:
    """Extract the features of all budgets in one pass over each split, then probe budget by budget."""
    data, backbone, settings = jobs[0].data, jobs[0].backbone, jobs[0].settings
    running = settings.at_once, settings.workers, settings.progress
    extraction = Extraction(backbone, jobs[0].folder / "features", kind, *running)
    # Other test sets are scored with the same head, on the split they are published for.
    splits = [*((data, name) for name in data.splits), *((other, other.report) for other in jobs[0].also)]
    seconds = 0.0
    for dataset, name in splits:
        for crop in jobs[0].crops(side, name):
            title = f"{backbone.name} {dataset.name} {name} {jobs[0].size} px"
            title += "" if crop.epoch is None else f", pass {crop.epoch + 1}"
            seconds += extraction.run(dataset.splits[name], crop, [job.cores for job in jobs], title)
    for job in jobs:
        began, skipped = time.perf_counter(), dict[str, list[str]]()
        values = probe(job, partial(_load_features, extraction, side, job, skipped))
        times = {"features": seconds / len(jobs), "head": time.perf_counter() - began}
        yield job, {**values, "seconds": times}, skipped


def _load_features(
    extraction: Extraction, side: int, job: Job, skipped: dict[str, list[str]], data: ProbeData, *names: str
) -> Labelled:
    """Load the features of splits one after the other, each in all its crops; unreadable images go to `skipped`."""
    parts = []
    for name in names:
        split, where = data.splits[name], f"{data.name} {name}"
        for crop in job.crops(side, name):
            features = extraction.load(split, crop, job.cores)
            skipped |= {where: sorted(features.bad.values())} if features.bad else {}
            labels = torch.from_numpy(split.labels).long()
            parts.append(drop_unreadable(features, labels, job.settings.skip_bad, where))
    values, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if not len(values):
        raise DatasetError(f"{data.name} has no picture in {' and '.join(names)} that can be read")
    # On the device if they fit there well: training reads them many times.
    device = job.backbone.device
    fits = device.type == "cuda" and 4 * values.nbytes < torch.cuda.mem_get_info(device)[0]
    return values.to(device) if fits else values, labels


def _probe_linear(settings: ClassifySettings, job: Job, features: LoadFeatures) -> dict[str, Any]:
    data, multilabel = job.data, job.data.task == "multilabel"
    train, val, test = (features(data, name) for name in ("train", "val", data.report))
    title = f"heads, {job.backbone.name if job.cores is None else f'{job.cores} cores'}"
    with bar(title, settings.epochs, "epochs", settings.progress) as advance:
        sweep = train_linear(
            train, val, classes=len(data.classes), rates=settings.rates, decays=settings.decays,
            epochs=settings.epochs, batch=settings.batch, momentum=settings.momentum, seed=settings.seed,
            standardize=settings.standardize, device=job.backbone.device, progress=advance,
        )  # fmt: skip
    metrics, per_class = _score_classes(sweep.head, *test)
    heads = [{"rate": rate, "decay": decay} for rate, decay in sweep.pairs]
    scores = [round(100 * float(value), 4) for value in sweep.best_scores]
    return {
        "metric": "mAP" if multilabel else "top1",
        "metrics": _to_percent(metrics),
        "interval": _accuracy_intervals(metrics, len(test[1])),
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


def _score_other(head: LinearHead, other: ProbeData, features: LoadFeatures) -> dict[str, float]:
    values, labels = features(other, other.report)
    if other.task == "multilabel":
        return _to_percent({"top1": score_valid_labels(head, values, labels > 0)})
    return _to_percent(score(head, values, labels))


def _to_percent(shares: dict[str, float]) -> dict[str, float]:
    return {name: round(100 * value, 4) for name, value in shares.items()}


def _accuracy_intervals(metrics: Mapping[str, float], count: int) -> dict[str, list[float]] | None:
    """95 % confidence intervals in percent of the accuracies over `count` images; None: no metric is one."""
    accuracies = {name: share for name, share in metrics.items() if name.startswith("top")}
    ends = {name: wilson_interval(share, count) for name, share in accuracies.items()}
    return {name: [round(100 * end, 4) for end in pair] for name, pair in ends.items()} or None


def neighbours(train: Tensor, queries: Tensor, k: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return cosines and indices (Q, k) of the k training features (N, D) most similar to each query (Q, D).

    Exact, in chunks that bound the memory, and deterministic: of equally similar neighbours the first ranks higher.
    Features may be on any device and of any float type; a chunk at a time is moved to `device`.
    """
    if not 1 <= k <= len(train):
        rule = "it must be between 1 and the number of training features"
        raise ArgumentError(f"k is {k}; {rule}, which is {len(train)}: name a smaller k")
    rows = min(4096, len(train))
    cosines, indices = [], []
    for chunk in queries.split(max(1, MAX_SIMILARITIES // rows)):
        directions = _unit_vectors(chunk, device)
        best = torch.empty(len(chunk), 0, dtype=torch.int64, device=device)
        # Keep the k best so far and merge each chunk of training features into them.
        for start in range(0, len(train), rows):
            similarity = directions @ _unit_vectors(train[start : start + rows], device).T
            best = torch.cat([best, _sort_keys(similarity, start)], 1)
            best = best.topk(min(k, best.shape[1])).values
        ordered = (best >> 32).int()  # the inverse of `_sort_keys`
        cosines.append(torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32))
        indices.append(~best & 0xFFFFFFFF)
    return torch.cat(cosines), torch.cat(indices)


def knn_scores(cosines: Tensor, labels: Tensor, classes: int, temperature: float = 0.07) -> Tensor:
    """Return votes for each class (Q, C) from neighbours' cosines and labels (Q, k).

    A vote weighs exp(cosine / temperature). The weights of a query are normalised to sum 1 by a softmax, which changes
    no order and cannot overflow.
    """
    weights = (cosines / temperature).softmax(1)
    scores = weights.new_zeros(len(weights), classes)
    for i in range(weights.shape[1]):  # one vote at a time: a fixed order of additions, on a GPU too
        scores.scatter_add_(1, labels[:, i : i + 1], weights[:, i : i + 1])
    return scores


def knn_accuracy(
    train: Labelled, queries: Labelled, ks: Sequence[int], temperature: float = 0.07, device: torch.device | str = "cpu"
) -> dict[int, float]:
    """Return top-1 of the queries for each k, from the k training features nearest to each."""
    (features, labels), (query_features, query_labels) = train, queries
    cosines, indices = neighbours(features, query_features, max(ks), device)
    classes = 1 + int(max(labels.max(), query_labels.max()))
    neighbour_labels, query_labels = labels.to(indices.device)[indices], query_labels.to(indices.device)
    scores = {k: knn_scores(cosines[:, :k], neighbour_labels[:, :k], classes, temperature) for k in ks}
    return {k: float(top_k_accuracy(scores[k], query_labels)) for k in ks}


def _unit_vectors(features: Tensor, device: torch.device | str) -> Tensor:
    features = features.to(device).float()
    if not features.isfinite().all():
        raise ArgumentError("some features are not finite: check the model that computed them")
    return F.normalize(features, dim=1)


def _sort_keys(similarity: Tensor, start: int) -> Tensor:
    """Return an integer for each similarity (q, n) that sorts by similarity, then by the lower index.

    The upper 32 bits are those of the float, inverted where negative so that they sort as integers; the lower 32 bits
    are the complement of the index of the training feature.
    """
    bits = (similarity + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    first = torch.arange(start, start + similarity.shape[1], device=similarity.device)
    return ordered * 2**32 + (0xFFFFFFFF - first)


@dataclass(frozen=True)
class Job:
    """A row to compute: everything that determines its numbers, and the folder it is written to."""

    task: RowTask
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
    reader: CropReader = dataclasses.field(default_factory=CropReader)

    def crops(self, side: int, split: str) -> list[CropTransform]:
        """Return the centre crop of a split, or a random one for each pass over train."""
        settings = self.settings
        passes = settings.passes if split == "train" and isinstance(settings, ClassifySettings) else 0
        random = [CropTransform(side, epoch, settings.seed, reader=self.reader) for epoch in range(passes)]
        return random or [CropTransform(side, reader=self.reader)]

    def preprocessing(self, side: int) -> dict[str, Any]:
        """Return what a protocol says of the images of a classification probe."""
        crop = CropTransform(side, reader=self.reader).describe()
        return {"preprocessing": {**crop, "resize": "bicubic, antialiased", "crop": "centre"}}

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
        cores = "none" if self.cores is None else f"{self.cores}"
        cores += f"-w{width:g}" if (width := self.backbone.mlp_width) else ""
        # Of a long name, its end.
        names = (re.sub(r"[^A-Za-z0-9._]+", "-", each.name)[-60:].strip("-.") for each in (self.backbone, self.data))
        model, data = (name or "unnamed" for name in names)
        limit = self.protocol.get("max_patches")  # of native sizes
        size = f"s{self.size}" if limit is None else f"n{limit}"
        return f"{self.task}-{model}-{data}-c{cores}-{size}-{key[:8]}"

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
        counts = {split: len(data.splits.get(split, ())) for split in SPLITS}
        protocol = {**self.protocol, "data": data.protocol, "decode": self.reader.decode, **backbone.running}
        protocol |= {"also_data": {other.name: other.protocol for other in self.also}} if self.also else {}
        protocol |= {"skipped": dict(skipped)} if skipped else {}
        protocol |= {"problems": data.problems} if data.problems else {}
        row: Row = {
            "schema": SCHEMA, "task": self.task,
            "model": {"name": backbone.name, "kind": backbone.kind, "about": backbone.about},
            **({"width": backbone.mlp_width} if backbone.mlp_width else {}),
            "data": {"name": data.name, **counts, "classes": data.classes or None, "fingerprint": data.fingerprint},
            "cores": self.cores, "size": self.size, "grid": None, "seed": self.settings.seed, "scored_on": data.report,
            # None: what a task does not have.
            **dict.fromkeys(("metric", "metrics", "interval", "per_class", "best", "sweep", "curve")),
            "protocol": protocol, "gallery": None, "also": None, "versions": describe_versions(backbone.device),
            **values,
            "seconds": {name: round(value, 3) for name, value in values["seconds"].items()},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        row = json.loads(json.dumps(row, default=str))  # as it will be read, so that the digest is of that
        row["digest"] = digest_of(**row)
        with atomic_path(self.path) as part:
            part.write_text(json.dumps(row, indent=1))
        return row


def make_job(
    task: RowTask, backbone: FrozenBackbone, data: ProbeData, folder: Path, settings: ProbeSettings,
    also: Sequence[ProbeData] = (),
) -> Job:  # fmt: skip
    """Return what the rows of a probe have in common, with the decoder that is asked for."""
    return Job(task, backbone, data, folder, settings, also, reader=CropReader.choose(settings.decode, backbone.device))


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
    for size, side in [(size, backbone.side(size)) for size in settings.sizes_of(backbone)]:
        about = protocol(side)
        if side != size:
            sees = "the limit is that of" if "max_patches" in about else "it sees"
            note = f"{size} is no multiple of {backbone.name}'s patch, {backbone.patch}: {sees} {side}"
            about |= {"side": side, "note": note}
            warn(f"{note}.")
        jobs = [dataclasses.replace(probe, cores=cores, size=size, protocol=about) for cores in budgets]
        done = {job.cores: read_row(job.path) for job in jobs}
        todo = [job for job in jobs if done[job.cores] is None]
        warned: set[str] = set()  # all budgets skip the same images
        for job, values, skipped in compute(todo, side) if todo else ():
            for where in sorted(skipped.keys() - warned):
                bad = skipped[where]
                count = f"{len(bad):,} picture{'s' * (len(bad) > 1)} of {where}"
                warn(f"left out {count} that cannot be read: {join_some(bad)}")
            warned |= skipped.keys()
            done[job.cores] = job.finish(values, skipped)
        rows += [row for row in done.values() if row is not None]
    return rows


def check_probe_data(data: ProbeData, tasks: Sequence[str], warn: Warn) -> None:
    """Refuse data without the labels or splits that a probe needs; warn where it is not what was published."""
    if data.task not in tasks:
        probe = {"multilabel": "classify"}.get(data.task, data.task)
        raise DatasetError(f"{data.name} has labels to {data.task}: `veca probe {probe}` is the probe for it")
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
