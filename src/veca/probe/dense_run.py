"""Segmentation and depth probes: linear heads over the feature map.

Images are decoded once for all budgets and learning rates of a size; the features are too many to be cached.

Shapes: B images of H × W pixels, K heads, C classes.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.data.datasets.base import ProbeData
from veca.data.datasets.batches import DenseLoader, open_pair
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
from veca.report.gallery import colour_classes, colour_depth, save_picture
from veca.utils.console import bar
from veca.utils.settings import Bounds, Positive

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

    @property
    def eval_every(self) -> int:
        return self.every or max(1, self.steps // 10)


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
        windows = f"windows of {side}×{side}, stride {_stride(side)}" if settings.slide else "whole picture"
        multiple = f"the other to a multiple of {backbone.patch}"
        preprocessing = {
            "train": f"short side {side}, random crop of {side}×{side}, flip",
            "resize": "bicubic, antialiased",
            "score": f"short side {side}, {multiple}, {windows}, labels as they are",
            **job.reader.describe(),
        }
        fit = {"every": settings.eval_every, "optimizer": "AdamW", "schedule": "polynomial", "chosen_on": "val"}
        inputs = {"input": "each patch with the global feature", "preprocessing": preprocessing}
        return {**inputs, **settings.describe("at_once"), **fit, **about_head}

    return run_probe(job, protocol, lambda jobs, side: _DenseSize(jobs, side, settings, head).run(), warn)


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
        sizes, running = (side, self.backbone.patch, settings.batch), (settings.workers, settings.skip_bad)
        self.loader = DenseLoader(self.data, *sizes, settings.seed, *running, reader=jobs[0].reader)

    def run(self) -> Iterator[tuple[Job, dict[str, Any], dict[str, list[str]]]]:
        settings, began = self.settings, time.perf_counter()
        title = f"{self.backbone.name} {self.data.name} {self.jobs[0].size} px"
        with bar(title, settings.steps, "steps", settings.progress) as advance:
            sweeps = fit_dense(
                [self.head.to(self.backbone.device)] * len(self.jobs), self.training_batches,
                lambda stacks: [[each.compute() for each in m.each()] for m in self.evaluate(stacks, "val")],
                rates=settings.rates, steps=settings.steps, every=settings.eval_every, decay=settings.decay,
                power=settings.power, warmup=settings.warmup, progress=advance,
            )  # fmt: skip
        metrics = self.evaluate([sweep.head for sweep in sweeps], self.data.report)
        # Nothing is cached, so all time is the head's; it is shared by the budgets trained together.
        seconds = {"features": 0.0, "head": (time.perf_counter() - began) / len(self.jobs)}
        skipped = {where: sorted(names) for where, names in self.loader.skipped.items()}
        about = {"grid": (self.side // self.backbone.patch,) * 2, "seconds": seconds}
        for job, sweep, scored in zip(self.jobs, sweeps, metrics, strict=True):
            gallery = self.make_gallery(job, sweep.head)
            yield job, {**about, "gallery": gallery, **self.summarize(sweep, scored)}, skipped

    def training_batches(self) -> Iterator[list[DenseBatch]]:
        """Yield for each step the features of one batch of images at the budget of each job."""
        for pixels, labels in self.loader.training(self.settings.steps):
            self.head.check(labels)
            images, labels = self.backbone.prepare(pixels), labels.to(self.backbone.device, non_blocking=True)
            yield [DenseBatch(*self.backbone.dense_features(images, job.cores), labels) for job in self.jobs]

    @torch.no_grad()
    def evaluate(self, heads: Sequence[DenseHead], split: str) -> list[DenseMetrics]:
        """Score the heads, or stacks of them, that belong to each job on a split; they are in eval mode afterwards."""
        metrics = [head.eval().metrics() for head in heads]
        for pixels, labels in self.loader.scoring(split):
            images, labels = self.backbone.prepare(pixels), labels.to(self.backbone.device)
            for job, head, scored in zip(self.jobs, heads, metrics, strict=True):
                for predicted, part in self.predictions(images, labels, job.cores, head):
                    scored.update(predicted, labels, part)
        return metrics

    def predictions(
        self, images: Tensor, labels: Tensor, cores: int | None, heads: DenseHead
    ) -> Iterator[tuple[Tensor, slice]]:
        """`DenseHead.predictions` at the size of the labels, by sliding windows where asked for."""
        size = labels.shape[-2], labels.shape[-1]
        if not self.settings.slide:
            return heads.predictions(*self.backbone.dense_features(images, cores), size)

        def predict_window(part: Tensor) -> Tensor:
            return heads(*self.backbone.dense_features(part, cores), (part.shape[-2], part.shape[-1]))

        outputs = slide_windows(predict_window, images, (self.side, self.side), (_stride(self.side),) * 2)
        groups = heads.groups(images.movedim(1, -1), size)
        return ((heads.predict(resize_maps(outputs[part], size)), part) for part in groups)

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
        return {
            "metric": metric.replace("miou", "mIoU"),
            "metrics": {name.replace("miou", "mIoU"): shown(name, number) for name, number in scored.compute().items()},
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
                ((predicted, _),) = self.predictions(self.backbone.prepare(batch.pixels), batch.labels, job.cores, head)
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
        known = known[known > 0]
        low, high = np.quantile(known.numpy(), (0.02, 0.98)) if len(known) else (0.0, self.data.depth.max_depth)
        return colour_depth(values.numpy(), low, high)


def _stride(side: int) -> int:
    return max(1, int(side * STRIDE))
