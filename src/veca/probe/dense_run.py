"""Segmentation and depth probes: linear heads over the feature map.

Images are decoded once for all budgets and learning rates of a size; the features are too many to be cached. At native
sizes a batch has images of several sizes, which a VECA takes as one pack; a size is then a limit, that of a square.

Shapes: B images of H × W pixels, K heads, C classes.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from veca.data.datasets.base import ProbeData
from veca.data.datasets.batches import DenseLoader, LabelledBatch, open_pair
from veca.data.datasets.native import NativeDenseLoader
from veca.data.transforms import slide_windows
from veca.heads.dense import (
    DenseBatch,
    DenseHead,
    DenseMetrics,
    DenseSweep,
    DepthHead,
    Norm,
    SegmentationHead,
    fit_dense,
)
from veca.heads.features import FrozenBackbone
from veca.heads.metrics import Confusion, percent_by_class
from veca.images.resize import resize_maps
from veca.probe.run import Job, ProbeSettings, Row, Warn, check_probe_data, make_job, run_probe
from veca.report.gallery import colour_classes, colour_depth, depth_range, save_picture
from veca.utils.console import bar
from veca.utils.settings import Bounds, Positive

ProbeFit: TypeAlias = Literal["crop", "native"]
NormName: TypeAlias = Literal["none", "batch", "standard"]
_NORMS: dict[NormName, Norm] = {"none": "none", "batch": "batchnorm", "standard": "standardize"}
GALLERY = 8
"""Number of images shown with their predictions."""
STRIDE = 2 / 3
"""Stride of sliding windows, in windows: 341 for 512, as in mmsegmentation."""


@dataclass(frozen=True, kw_only=True)
class DenseSettings(ProbeSettings):
    """Linear heads over the map: AdamW with a polynomial schedule, one head for every rate."""

    sizes: tuple[Positive, ...] = (512,)
    fit: ProbeFit = "crop"
    """"crop": square crops to train, whole images with the short side at the size to score. "native": whole images at
    their own size."""
    max_patches: Positive | None = None
    """With fit "native", shrink images of more patches; None: of more than size × size pixels have."""
    rates: tuple[Annotated[float, Bounds(gt=0)], ...] = (1e-4, 3e-4, 1e-3, 3e-3)
    decay: Annotated[float, Bounds(ge=0)] = 1e-4
    steps: Positive = 10_000
    every: Positive | None = None
    """Score the heads on val after so many steps; None: ten times in all."""
    batch: Positive = 8
    power: Annotated[float, Bounds(ge=0)] = 0.9
    warmup: Annotated[int, Bounds(ge=0)] = 0
    norm: NormName = "none"
    slide: bool = False
    """Score by square windows that slide over the image, instead of the whole of it at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        native = self.fit == "native"
        self.require("max_patches", native or self.max_patches is None, "None unless fit is 'native'")
        self.require("slide", not (native and self.slide), "False with fit 'native', which scores whole images")
        one_limit = self.max_patches is None or len(self.sizes) == 1
        self.require("max_patches", one_limit, "None with several sizes: each is a limit of its own")

    @property
    def eval_every(self) -> int:
        return self.every or max(1, self.steps // 10)

    def sizes_of(self, backbone: FrozenBackbone) -> tuple[int, ...]:
        if self.fit == "native":
            backbone.check_native()
        # Of a number of patches: the side of the largest square that has no more.
        return (math.isqrt(self.max_patches) * backbone.patch,) if self.max_patches else self.sizes

    def limit(self, side: int, patch: int) -> int:
        """Return the number of patches to which larger images are shrunk."""
        return self.max_patches or (side // patch) ** 2

    def describe(self, *leave_out: str) -> dict[str, Any]:
        # The default is not named: rows of before there was a choice are still valid.
        return super().describe(*leave_out, *(() if self.fit == "native" else ("fit", "max_patches")))


@dataclass(frozen=True, kw_only=True)
class DepthSettings(DenseSettings):
    head: Literal["bins", "regression"] = "bins"
    bins: Annotated[int, Bounds(ge=2, le=65_536)] = 256
    loss: Literal["sig", "l1", "l2"] = "sig"


def probe_dense(
    backbone: FrozenBackbone, data: ProbeData, out: Path, settings: DenseSettings, warn: Warn = print
) -> list[Row]:
    """Train linear heads for segmentation, or with `DepthSettings` for depth, and score the one that is best on val.

    It is scored on test, or on val without a test.
    """
    job = make_job("depth" if isinstance(settings, DepthSettings) else "segment", backbone, data, out, settings)
    check_probe_data(data, (job.task,), warn)
    head, about_head = _make_head(backbone.width, data, settings)

    def protocol(side: int) -> dict[str, Any]:
        preprocessing = _describe_images(settings, side, backbone.patch) | job.reader.describe()
        fit = {"every": settings.eval_every, "optimizer": "AdamW", "schedule": "polynomial", "chosen_on": "val"}
        native = {"max_patches": settings.limit(side, backbone.patch)} if settings.fit == "native" else {}
        inputs = {"input": "each patch with the global feature", "preprocessing": preprocessing}
        return {**inputs, **settings.describe("at_once"), **native, **fit, **about_head}

    return run_probe(job, protocol, lambda jobs, side: _DenseSize(jobs, side, settings, head).run(), warn)


def _describe_images(settings: DenseSettings, side: int, patch: int) -> dict[str, str]:
    """Return what a protocol says of how images and labels are resized."""
    resize = {"resize": "bicubic, antialiased"}
    if settings.fit == "native":
        size = f"own size to multiples of {patch}, up to {settings.limit(side, patch)} patches"
        labels = "labels to the same pixels by nearest neighbour"
        return {**resize, "train": f"{size}, flip, {labels}", "score": f"{size}, labels as they are"}
    windows = f"windows of {side}×{side}, stride {_stride(side)}" if settings.slide else "whole picture"
    multiple = f"the other to a multiple of {patch}"
    train = f"short side {side}, random crop of {side}×{side}, flip"
    return {**resize, "train": train, "score": f"short side {side}, {multiple}, {windows}, labels as they are"}


def _make_head(width: int, data: ProbeData, settings: DenseSettings) -> tuple[DenseHead, dict[str, Any]]:
    """Return the untrained head, and what a protocol says of it beside the settings."""
    norm, rules = _NORMS[settings.norm], data.depth
    if not isinstance(settings, DepthSettings) or rules is None:
        ignore = DenseLoader(data, 0, 0, 0).ignore
        classes = len(data.classes)
        return SegmentationHead(width, classes, norm=norm, ignore=ignore, seed=settings.seed), {"ignore": ignore}
    bins = settings.bins if settings.head == "bins" else 0
    head = DepthHead(
        width, rules.min_depth, rules.max_depth, norm=norm, seed=settings.seed, bins=bins, loss=settings.loss
    )
    about = {key: getattr(head, key) for key in ("low", "high", "gradient_weight", "upsample")}
    return head, {**about, "average": "image", "eval_crop": rules.crop, "input_crop": rules.input_crop}


class _DenseSize:
    """Trains and scores the heads of all budgets at one size, in one pass over the images."""

    def __init__(self, jobs: Sequence[Job], side: int, settings: DenseSettings, head: DenseHead) -> None:
        self.jobs, self.side, self.settings, self.head = jobs, side, settings, head
        self.backbone, self.data = jobs[0].backbone, jobs[0].data
        self.native, patch = settings.fit == "native", self.backbone.patch
        arguments = self.data, side, patch, settings.batch, settings.seed, settings.workers, settings.skip_bad
        self.loader = DenseLoader(*arguments, reader=jobs[0].reader)
        if self.native:
            limit = settings.limit(side, patch)
            self.loader = NativeDenseLoader(*arguments, reader=jobs[0].reader, max_patches=limit)

    def run(self) -> Iterator[tuple[Job, dict[str, Any], dict[str, list[str]]]]:
        settings, began = self.settings, time.perf_counter()
        size = "native" if self.native else f"{self.jobs[0].size} px"
        title = f"{self.backbone.name} {self.data.name} {size}"
        with bar(title, settings.steps, "steps", settings.progress) as advance:
            sweeps = fit_dense(
                [self.head.to(self.backbone.device)] * len(self.jobs), self.training_batches,
                lambda stacks: [[each.compute() for each in m.each()] for m in self.evaluate(stacks, "val")],
                rates=settings.rates, steps=settings.steps, every=settings.eval_every, decay=settings.decay,
                power=settings.power, warmup=settings.warmup, progress=advance,
            )  # fmt: skip
        metrics = self.evaluate([sweep.head for sweep in sweeps], self.data.report, by_image=True)
        # Nothing is cached, so all time is the head's; it is shared by the budgets trained together.
        seconds = {"features": 0.0, "head": (time.perf_counter() - began) / len(self.jobs)}
        skipped = {where: sorted(names) for where, names in self.loader.skipped.items()}
        grid = None if self.native else (self.side // self.backbone.patch,) * 2
        about = {"grid": grid, "seconds": seconds}
        for job, sweep, scored in zip(self.jobs, sweeps, metrics, strict=True):
            gallery = self.make_gallery(job, sweep.head)
            yield job, {**about, "gallery": gallery, **self.summarize(sweep, scored)}, skipped

    def training_batches(self) -> Iterator[list[list[DenseBatch]]]:
        """Yield for each step the features of one batch of images at the budget of each job."""
        for groups in self.loader.training_groups(self.settings.steps):
            for batch in groups:
                self.head.check(batch.labels)
            images, labels = self.move(groups)
            yield [self.compute(images, labels, job.cores) for job in self.jobs]

    def move(self, groups: Sequence[LabelledBatch]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the prepared images and the labels of each group, on the device."""
        images = [self.backbone.prepare(batch.pixels) for batch in groups]
        return images, [batch.labels.to(self.backbone.device, non_blocking=True) for batch in groups]

    def compute(self, images: Sequence[Tensor], labels: Sequence[Tensor], cores: int | None) -> list[DenseBatch]:
        features = self.backbone.grouped_features(images, cores)
        return [DenseBatch(*maps, own) for maps, own in zip(features, labels, strict=True)]

    @torch.no_grad()
    def evaluate(self, heads: Sequence[DenseHead], split: str, by_image: bool = False) -> list[DenseMetrics]:
        """Score the heads, or stacks of them, that belong to each job on a split; they are in eval mode afterwards.

        Of single heads, metrics can keep what they add up `by_image`.
        """
        metrics = [head.eval().metrics() for head in heads]
        metrics = [each.keep_images() for each in metrics] if by_image else metrics
        for groups in self.loader.scoring_groups(split):
            images, labels = self.move(groups)
            for job, head, scored in zip(self.jobs, heads, metrics, strict=True):
                for own, predictions in zip(labels, self.predictions(images, labels, job.cores, head), strict=True):
                    for predicted, part in predictions:
                        scored.update(predicted, own, part)
        return metrics

    def predictions(
        self, images: Sequence[Tensor], labels: Sequence[Tensor], cores: int | None, heads: DenseHead
    ) -> list[Iterator[tuple[Tensor, slice]]]:
        """`DenseHead.predictions` of each group at the size of its labels, by sliding windows where asked for."""
        if self.settings.slide:
            pairs = zip(images, labels, strict=True)
            return [self.slide(each, (own.shape[-2], own.shape[-1]), cores, heads) for each, own in pairs]
        batches = self.compute(images, labels, cores)
        return [heads.predictions(maps, cls, (own.shape[-2], own.shape[-1])) for maps, cls, own in batches]

    def slide(
        self, images: Tensor, size: tuple[int, int], cores: int | None, heads: DenseHead
    ) -> Iterator[tuple[Tensor, slice]]:
        def predict_window(part: Tensor) -> Tensor:
            return heads(*self.backbone.dense_features(part, cores), (part.shape[-2], part.shape[-1]))

        outputs = slide_windows(predict_window, images, (self.side, self.side), (_stride(self.side),) * 2)
        parts = heads.split_heads((images.movedim(1, -1), size))
        return ((heads.predict(resize_maps(outputs[part], size)), part) for part in parts)

    def summarize(self, sweep: DenseSweep, scored: DenseMetrics) -> dict[str, Any]:
        """Return what a row says of a sweep and of its best head's score."""
        segments = isinstance(scored, Confusion)

        def shown(name: str, number: float) -> float:
            # Shares in percent; errors as they are, in metres or logarithms.
            return round(100 * number, 4) if segments or name.startswith("delta") else round(number, 6)

        metric, decay, unit = sweep.head.metric, self.settings.decay, 100 if segments else 1
        curves = [[round(scores[k][metric] * unit, 4) for scores in sweep.scores] for k in range(len(sweep.rates))]
        best_of = max if sweep.head.higher_is_better else min
        iou = scored.iou().tolist() if isinstance(scored, Confusion) else None
        scores = scored.compute()
        names = {name: name.replace("miou", "mIoU") for name in scores}
        intervals = {name: [shown(name, end) for end in ends] for name, ends in scored.intervals().items()}
        return {
            "metric": names[metric],
            "metrics": {names[name]: shown(name, number) for name, number in scores.items()},
            "interval": {names[name]: ends for name, ends in intervals.items()},
            "per_class": iou and percent_by_class(self.data.classes, iou),
            "best": {"rate": sweep.rates[sweep.best], "decay": decay, "step": sweep.best_step},
            "sweep": [{"rate": r, "decay": decay, "val": best_of(c)} for r, c in zip(sweep.rates, curves, strict=True)],
            "curve": {"val": curves[sweep.best]},
        }

    @torch.no_grad()
    def make_gallery(self, job: Job, head: DenseHead) -> list[dict[str, str]]:
        """Save the first images of the scored split with their labels and predictions; return the files."""
        split, gallery = self.data.splits[self.data.report], []
        stem = f"{job.task}-{split.content_hash[:12]}"
        for i in range(min(GALLERY, len(split))):
            if batch := self.loader.one(self.data.report, i):
                images, labels = self.move([batch])
                ((predicted, _),) = self.predictions(images, labels, job.cores, head)[0]
                # The cropped original, at the size of its label, beside which it is shown.
                image, _ = open_pair(split, i, self.data.depth, scored=True)
                label, prediction = self.colour(batch.labels[0]), self.colour(predicted[0].cpu(), batch.labels[0])
                files = {"image": (image, f"{stem}-{i}.webp"), "label": (label, f"{stem}-{i}-label.png")}
                files["prediction"] = prediction, f"{job.name}-{i}.png"
                gallery.append({kind: save_picture(shown, job.folder, name) for kind, (shown, name) in files.items()})
        return gallery

    def colour(self, values: Tensor, reference: Tensor | None = None) -> Image.Image:
        """Colour a map; depths over the range of the `reference` label, without its outliers."""
        if self.data.depth is None:
            return colour_classes(values.numpy(), len(self.data.classes))
        known = values if reference is None else reference
        return colour_depth(values.numpy(), *depth_range(known.numpy(), self.data.depth.max_depth))


def _stride(side: int) -> int:
    return max(1, int(side * STRIDE))
