"""Probes of the map: linear heads for segmentation and depth, at every size and budget asked for.

The pictures are decoded once for all budgets and learning rates of a size; features are too many to be kept.

Shapes: B images of H × W pixels, K heads, C classes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from veca.data.datasets.base import ProbeData
from veca.data.transforms import slide_windows
from veca.heads.dense import DenseBatch, DenseHead, DepthHead, Meter, Norm, SegmentationHead
from veca.heads.dense_fit import DenseSweep, fit_many
from veca.heads.metrics import Confusion, by_class
from veca.images.resize import resize_maps
from veca.probe.backbones import Backbone
from veca.probe.dense_data import DenseData, opened
from veca.probe.features import as_plain, content, listed
from veca.probe.rows import Job, ProbeTask, Row
from veca.probe.run import Asked, Say, check_data
from veca.report.gallery import colour_classes, colour_depth, save_picture
from veca.utils.files import check_utf8, check_writable
from veca.utils.progress import bar

NormName: TypeAlias = Literal["none", "batch", "standard"]
_NORMS: dict[NormName, Norm] = {"none": "none", "batch": "batchnorm", "standard": "standardize"}
GALLERY = 8
"""So many pictures are shown."""
STRIDE = 2 / 3
"""Of windows that slide, in windows: 341 for 512, as in mmsegmentation."""


@dataclass(frozen=True, kw_only=True)
class DenseSettings(Asked):
    """Of linear heads over maps: AdamW with a polynomial schedule, a head for every rate."""

    sizes: tuple[int, ...] = (512,)
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3)
    decay: float = 1e-4
    steps: int = 10_000
    every: int | None = None
    """Score the heads on val after so many steps; None: ten times in all."""
    batch: int = 8
    power: float = 0.9
    warmup: int = 0
    norm: NormName = "none"
    slide: bool = False
    """Score by square windows that slide over the picture, instead of the whole of it at once."""


@dataclass(frozen=True, kw_only=True)
class DepthSettings(DenseSettings):
    head: Literal["bins", "regression"] = "bins"
    bins: int = 256
    loss: Literal["sig", "l1", "l2"] = "sig"


def segment(backbone: Backbone, data: ProbeData, out: Path, settings: DenseSettings, say: Say = print) -> list[Row]:
    """Linear segmentation: the best on val is scored on test, or on val where there is no test."""
    check_data(data, ("segment",), say)
    head = SegmentationHead(
        backbone.width, len(data.classes), norm=_NORMS[settings.norm], ignore=_ignore(data), seed=settings.seed
    )
    return _probe("segment", backbone, data, out, settings, head, say)


def depth(backbone: Backbone, data: ProbeData, out: Path, settings: DepthSettings, say: Say = print) -> list[Row]:
    """Linear depth: the best on val is scored on test, or on val where there is no test."""
    check_data(data, ("depth",), say)
    assert data.depth is not None
    head = DepthHead(
        backbone.width, data.depth.min_depth, data.depth.max_depth, norm=_NORMS[settings.norm], seed=settings.seed,
        bins=settings.bins if settings.head == "bins" else 0, loss=settings.loss,
    )  # fmt: skip
    return _probe("depth", backbone, data, out, settings, head, say)


def _ignore(data: ProbeData) -> int:
    return DenseData(data, 0, 0, 0).ignore


def _probe(
    task: ProbeTask, backbone: Backbone, data: ProbeData, out: Path, settings: DenseSettings, head: DenseHead, say: Say
) -> list[Row]:
    def protocol(side: int) -> dict[str, Any]:
        seen = {"train": f"short side {side}, random crop of {side}×{side}, flip", "resize": "bicubic, antialiased"}
        windows = f"windows of {side}×{side}, stride {_stride(side)}" if settings.slide else "whole picture"
        seen["score"] = f"short side {side}, the other to a multiple of {backbone.patch}, {windows}, labels as they are"
        asked = as_plain(settings, "cores", "sizes", "seed", "workers", "progress", "at_once")
        asked |= {"every": _every(settings), "optimizer": "AdamW", "schedule": "polynomial", "chosen_on": "val"}
        about = {"input": "each patch with the global feature", "preprocessing": seen, **asked}
        if isinstance(head, DepthHead):
            about |= {"low": head.low, "high": head.high, "gradient_weight": head.gradient_weight}
            about |= {"upsample": head.upsample, "average": "image"}
            about |= {"eval_crop": data.depth.crop, "input_crop": data.depth.input_crop} if data.depth else {}
        else:
            about["ignore"] = _ignore(data)
        return about

    check_utf8(out)
    check_writable(out, folder=True)
    rows: list[Row] = []
    for jobs in settings.jobs(task, backbone, data, protocol, (), say):
        found = {job.cores: job.done(out) for job in jobs}
        todo = [job for job in jobs if found[job.cores] is None]
        if todo:
            for job, row in zip(todo, _Size(todo, settings, head, out).rows(say), strict=True):
                found[job.cores] = row
        rows += [row for row in found.values() if row is not None]
    return rows


class _Size:
    """The rows of one size, all budgets in one pass."""

    def __init__(self, jobs: Sequence[Job], settings: DenseSettings, head: DenseHead, out: Path) -> None:
        self.jobs, self.settings, self.head, self.out = jobs, settings, head, out
        job = jobs[0]
        self.backbone, self.data, self.size = job.backbone, job.data, job.size
        self.side = self.backbone.side(job.size)
        self.pictures = DenseData(
            job.data, self.side, self.backbone.patch, settings.batch, job.seed, settings.workers, settings.skip_bad
        )

    def rows(self, say: Say) -> list[Row]:
        settings, began = self.settings, time.perf_counter()
        what = f"{self.backbone.name} {self.data.name} {self.size} px"
        with bar(what, settings.steps, "steps", settings.progress) as advance:
            sweeps = fit_many(
                [self.head] * len(self.jobs), self.training,
                lambda stacks: [[each.compute() for each in meter.each()] for meter in self.meters(stacks, "val")],
                rates=settings.rates, steps=settings.steps, every=_every(settings), decay=settings.decay,
                power=settings.power, warmup=settings.warmup, device=self.backbone.device, checked=True,
                progress=lambda done, steps: advance(1),
            )  # fmt: skip
        meters = self.meters([sweep.head for sweep in sweeps], self.data.report)
        took = (time.perf_counter() - began) / len(self.jobs)
        skipped = {where: sorted(bad) for where, bad in self.pictures.skipped.items()}
        for where, bad in skipped.items():
            say(f"{len(bad):,} pictures of {where} cannot be read and were left out: {listed(bad)}")
        more = {"skipped": skipped} if skipped else {}
        return [
            job.finish(
                self.out,
                grid=(self.side // self.backbone.patch,) * 2,
                gallery=self.gallery(job, sweep),
                seconds={"features": 0.0, "head": took},
                found=more,
                **self.said(sweep, meter),
            )
            for job, sweep, meter in zip(self.jobs, sweeps, meters, strict=True)
        ]

    def training(self) -> Iterator[list[DenseBatch]]:
        for pixels, labels in self.pictures.training(self.settings.steps):
            self.head.check(labels)
            images, labels = self.backbone.prepare(pixels), labels.to(self.backbone.device, non_blocking=True)
            yield [DenseBatch(*self.features(images, job.cores), labels) for job in self.jobs]

    def features(self, images: Tensor, cores: int | None) -> tuple[Tensor, Tensor]:
        cls, patches = self.backbone.features(images, cores)
        assert patches is not None
        return patches, cls

    @torch.no_grad()
    def meters(self, heads: Sequence[DenseHead], split: str) -> list[Meter]:
        """What the heads, or stacks of them, for the budget of each job say of a split, added up."""
        device = self.backbone.device
        meters, modes = [head.meter(device) for head in heads], [head.training for head in heads]
        for head in heads:
            head.eval()
        for batch in self.pictures.scoring(split):
            images, labels = self.backbone.prepare(batch.pixels), batch.labels.to(device)
            for job, head, meter in zip(self.jobs, heads, meters, strict=True):
                for said, those in self.predictions(images, labels, job.cores, head):
                    meter.update(said, labels, those)
        for head, mode in zip(heads, modes, strict=True):
            head.train(mode)
        return meters

    def predictions(
        self, images: Tensor, labels: Tensor, cores: int | None, heads: DenseHead
    ) -> Iterator[tuple[Tensor, slice]]:
        """`DenseHead.predictions` at the size of the labels."""
        size = labels.shape[-2], labels.shape[-1]
        if not self.settings.slide:
            return heads.predictions(*self.features(images, cores), size)
        together = slide_windows(
            lambda part: heads(*self.features(part, cores), (part.shape[-2], part.shape[-1])),
            images, (self.side, self.side), (_stride(self.side),) * 2,
        )  # fmt: skip
        groups = heads.groups(images.movedim(1, -1), size)
        return ((heads.predict(resize_maps(together[those], size)), those) for those in groups)

    def said(self, sweep: DenseSweep, meter: Meter) -> dict[str, Any]:
        """What `Job.finish` takes of a head's training and its score."""
        metric = "mIoU" if isinstance(meter, Confusion) else "rmse"

        def value(scored: dict[str, float]) -> float:
            return round(scored[sweep.head.metric] * (100 if metric == "mIoU" else 1), 4)

        pick = max if sweep.head.higher_is_better else min
        decay = self.settings.decay
        reached = [
            {"rate": rate, "decay": decay, "val": pick(value(at[k]) for at in sweep.scores)}
            for k, rate in enumerate(sweep.rates)
        ]
        scored = meter.compute()
        if metric == "mIoU":
            metrics = {name.replace("miou", "mIoU"): round(100 * each, 4) for name, each in scored.items()}
        else:
            metrics = {
                name: round(100 * each, 4) if name.startswith("delta") else round(each, 6)
                for name, each in scored.items()
            }
        return {
            "metric": metric,
            "metrics": metrics,
            "per_class": by_class(self.data.classes, meter.iou().tolist()) if isinstance(meter, Confusion) else None,
            "best": {"rate": sweep.rates[sweep.best], "decay": decay, "step": sweep.best_step},
            "sweep": reached,
            "curve": {"val": [value(at[sweep.best]) for at in sweep.scores]},
        }

    @torch.no_grad()
    def gallery(self, job: Job, sweep: DenseSweep) -> list[dict[str, str]]:
        """The first pictures of the split that is scored, with what is right and what the head says."""
        split, shown = self.data.splits[self.data.report], []
        stem = f"{job.task}-{content(split)[:12]}"
        for i in range(min(GALLERY, len(split))):
            batch = self.pictures.one(self.data.report, i)
            if batch is None:
                continue
            images = self.backbone.prepare(batch.pixels)
            ((said, _),) = self.predictions(images, batch.labels, job.cores, sweep.head)
            image, _ = opened(split, i, self.data.depth, scored=True)
            label, prediction = self.coloured(batch.labels[0]), self.coloured(said[0].cpu(), batch.labels[0])
            shown.append(
                {
                    "image": save_picture(image, self.out, f"{stem}-{i}.webp"),
                    "label": save_picture(label, self.out, f"{stem}-{i}-label.png"),
                    "prediction": save_picture(prediction, self.out, f"{job.name}-{i}.png"),
                }
            )
        return shown

    def coloured(self, values: Tensor, beside: Tensor | None = None) -> Image.Image:
        """Depths in the range of most of those in the label `beside` them."""
        if self.data.depth is None:
            return colour_classes(values.numpy(), len(self.data.classes))
        known = values if beside is None else beside
        known = known[known > 0]
        low, high = np.quantile(known.numpy(), (0.02, 0.98)) if len(known) else (0.0, self.data.depth.max_depth)
        return colour_depth(values.numpy(), low, high)


def _every(settings: DenseSettings) -> int:
    return settings.every or max(1, settings.steps // 10)


def _stride(side: int) -> int:
    return max(1, int(side * STRIDE))
