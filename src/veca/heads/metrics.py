"""Scores of classification, segmentation and depth, as shares in [0, 1] or in metres.

The meters (`Confusion`, `DepthErrors`) add up batches on the device and wait for it once, in `compute`. One may be of
several heads, with a leading shape, from which `each` takes those of single heads.

Shapes: N examples, C classes, B images of H × W pixels; `...` is any leading shape, such as the heads of a sweep.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from veca.errors import ArgumentError

ALL = slice(None)
"""The heads of a meter, or of a stack."""


def top_k_hits(scores: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """Whether the label (N) is among the k classes of highest score (..., N, C) → (..., N).

    Of classes with equal scores the first is the higher, and a score that is not a number never wins.
    """
    own = scores.gather(-1, labels.expand(scores.shape[:-1])[..., None])
    earlier = torch.arange(scores.shape[-1], device=scores.device) < labels[:, None]
    above = ~(scores <= own) | ((scores == own) & earlier)
    return above.sum(-1) < k


def top_k_accuracy(scores: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """The share of examples whose label is among the k best: scores (..., N, C), labels (N) → (...)."""
    return top_k_hits(scores, labels, k).double().mean(-1)


def valid_label_accuracy(scores: Tensor, valid: Tensor) -> Tensor:
    """The share of examples whose best class is one of their valid ones, as ImageNet-ReaL is scored.

    `valid` (N, C) is true for each label an example may have; an example that has none does not count.
    """
    hits = valid.gather(1, scores.argmax(1, keepdim=True))[:, 0]
    hits = hits & ~scores.isnan().any(1)
    return hits.sum().double() / valid.any(1).sum()


def average_precision(scores: Tensor, targets: Tensor, points: Literal["all", "11"] = "all") -> Tensor:
    """Average precision of each class: scores and targets (N, C) → (C), nan for a class that no example has.

    A target is 1 where the class is there, 0 where not, and -1 where it does not count (VOC's "difficult").
    Equal scores stand together, so the order of the examples is of no matter.

    points:
        `all` is the area under the steps of precision over recall, as scikit-learn has it and VOC since 2010. `11` is
        the VOC2007 challenge's own: the mean, over recalls 0, 0.1 … 1, of the best precision at that recall or more.
    """
    scores = torch.where(targets < 0, -torch.inf, scores.double().nan_to_num(nan=-torch.inf))
    scores, order = scores.sort(dim=0, descending=True, stable=True)
    targets = targets.gather(0, order)
    found = (targets > 0).cumsum(0)
    seen = (targets >= 0).cumsum(0)
    # Each example takes the counts at the end of the run of scores equal to its own.
    position = torch.arange(len(scores), device=scores.device)[:, None].expand_as(scores)
    ends = torch.ones_like(scores, dtype=torch.bool)
    ends[:-1] = scores[:-1] != scores[1:]
    end = torch.where(ends, position, len(scores)).flip(0).cummin(0).values.flip(0)
    found, seen, total = found.gather(0, end), seen.gather(0, end), found[-1]
    precision = found.double() / seen.clamp_min(1)
    if points == "all":
        return (precision * (targets > 0)).sum(0) / total
    best = [torch.where(10 * found >= level * total, precision, 0).amax(0) for level in range(11)]
    return torch.where(total > 0, torch.stack(best).mean(0), torch.nan)


def mean_average_precision(scores: Tensor, targets: Tensor, points: Literal["all", "11"] = "all") -> Tensor:
    """The mean of `average_precision` over the classes that some example has."""
    return average_precision(scores, targets, points).nanmean()


class Confusion:
    """How often each class was taken for each: `counts` (C, C), a row per true class, over all batches so far.

    >>> meter = Confusion(classes=3)
    >>> meter.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 255]))
    >>> meter.compute()["miou"]
    1.0
    """

    def __init__(
        self, classes: int, ignore: int = 255, device: torch.device | str = "cpu", heads: Sequence[int] = ()
    ) -> None:
        self.classes, self.ignore = classes, ignore
        # The last two take the pixels that do not count, and those whose label is no class: an error that can wait.
        self.bins = torch.zeros(*heads, classes * classes + 2, dtype=torch.int64, device=device)

    def update(self, predicted: Tensor, labels: Tensor, heads: slice = ALL) -> None:
        """Add pixels: class numbers (..., *) of the heads and (*), for any shape *; a label may be `ignore`."""
        total = self.bins[heads]
        if predicted.shape != total.shape[:-1] + labels.shape:
            raise ArgumentError(
                f"predictions are {tuple(predicted.shape)}, labels {tuple(labels.shape)}; they must have one shape: "
                "resize the scores to the labels before taking the best class"
            )
        predicted, labels = (tensor.to(self.bins.device).long() for tensor in (predicted, labels))
        inside = (labels >= 0) & (labels < self.classes) & (predicted >= 0) & (predicted < self.classes)
        bins = torch.where(inside, labels * self.classes + predicted, self.classes**2 + 1)
        bins = torch.where(labels == self.ignore, self.classes**2, bins).reshape(*total.shape[:-1], -1)
        total.scatter_add_(-1, bins, torch.ones_like(bins))  # whole numbers: the order does not matter

    def each(self) -> list[Confusion]:
        """The meters of single heads."""
        found = [copy.copy(self) for _ in self.bins]
        for meter, bins in zip(found, self.bins, strict=True):
            meter.bins = bins
        return found

    @property
    def counts(self) -> Tensor:
        wrong = int(self.bins[-1])
        if wrong:
            raise ArgumentError(
                f"{wrong} pixels have a class outside 0…{self.classes - 1} that is not the ignored {self.ignore}: "
                "give the number of classes the labels have, or the label to ignore"
            )
        return self.bins[:-2].view(self.classes, self.classes)

    def iou(self) -> Tensor:
        """Intersection over union of each class (C); nan for one neither labelled nor predicted anywhere."""
        counts = self.counts.double()
        both = counts.diagonal()
        return both / (counts.sum(0) + counts.sum(1) - both)

    def compute(self) -> dict[str, float]:
        """`miou`, `pixel_accuracy` and `class_accuracy` (the mean of the classes' own).

        As in mmsegmentation, a class that is in no label and no prediction takes no part in the means; one that is
        predicted and never labelled has an intersection over union of 0, which counts, and no accuracy.
        """
        counts = self.counts.double()
        right = counts.diagonal()
        found = {
            "miou": self.iou().nanmean(),
            "pixel_accuracy": right.sum() / counts.sum(),
            "class_accuracy": (right / counts.sum(1)).nanmean(),
        }
        return {name: float(value) for name, value in found.items()}


class DepthErrors:
    """Errors of depth maps over the pixels with a reading in (low, high), which are also the cap of predictions.

    Each error is taken over the pixels of a picture, then the mean over pictures, as the benchmarks of NYUv2 and KITTI
    do; a picture without a valid pixel does not count.
    """

    NAMES = "rmse", "abs_rel", "delta1", "delta2", "delta3", "log10", "rmse_log", "silog"

    def __init__(self, low: float, high: float, device: torch.device | str = "cpu", heads: Sequence[int] = ()) -> None:
        if not 0 < low < high:
            raise ArgumentError(f"low is {low} and high {high}; a range of depths needs 0 < low < high, in metres")
        self.low, self.high = low, high
        self._total = torch.zeros(*heads, 9, dtype=torch.float64, device=device)
        """Of the errors of pictures, and their number."""

    def update(self, predicted: Tensor, depth: Tensor, heads: slice = ALL) -> None:
        """Add pictures, (..., B, H, W) of the heads and (B, H, W)."""
        total = self._total[heads]
        if predicted.shape != total.shape[:-1] + depth.shape:
            raise ArgumentError(
                f"predictions are {tuple(predicted.shape)}, depths {tuple(depth.shape)}; they must have one shape: "
                "resize the predictions to the depths"
            )
        device = total.device
        predicted, depth = predicted.to(device).double().flatten(-2), depth.to(device).double().flatten(1)
        valid = (depth > self.low) & (depth < self.high)
        # Pixels that do not count become perfect ones, and are not counted. What is not a number stays, and is seen.
        depth = torch.where(valid, depth, 1.0)
        predicted = torch.where(valid, predicted.clamp(self.low, self.high), 1.0)
        ratio = torch.maximum(predicted / depth, depth / predicted)
        log = (predicted / depth).log()
        terms = [(predicted - depth).square(), (predicted - depth).abs() / depth]
        terms += [((ratio < 1.25**power) & valid).double() for power in (1, 2, 3)]
        terms += [log.abs(), log.square(), log, valid.double().expand_as(log)]
        sums = torch.stack([term.sum(-1) for term in terms])
        errors = torch.cat([_errors(sums), torch.ones_like(sums[:1])])
        total += torch.where(sums[-1] > 0, errors, 0.0).sum(-1).movedim(0, -1)

    def each(self) -> list[DepthErrors]:
        """The meters of single heads."""
        found = [copy.copy(self) for _ in self._total]
        for meter, total in zip(found, self._total, strict=True):
            meter._total = total
        return found

    def compute(self) -> dict[str, float]:
        """By name: `rmse`, `abs_rel`, `delta1` (the share within a factor of 1.25), `delta2`, `delta3` (of its powers),
        `log10`, `rmse_log` and `silog` (natural logarithms; some papers print the last times 100).
        """
        means = self._total[:-1] / self._total[-1]
        return dict(zip(self.NAMES, means.tolist(), strict=True))


def _errors(sums: Tensor) -> Tensor:
    """The errors (8, ...), as they are named, from sums over pixels (9, ...) that end with the number of pixels."""
    squared, relative, *within, log_abs, log_squared, log = sums[:-1] / sums[-1]
    silog = (log_squared - log.square()).clamp_min(0).sqrt()
    rows = [squared.sqrt(), relative, *within, log_abs / math.log(10), log_squared.sqrt(), silog]
    return torch.stack(rows)


def by_class(classes: Sequence[str], values: Iterable[float]) -> dict[str, float]:
    """Scores in percent by class name, without nan; a name that comes twice has the number of its class after it."""
    named: dict[str, float] = {}
    for number, (name, value) in enumerate(zip(classes, values, strict=True)):
        if not math.isnan(value):
            named[f"{name} ({number})" if classes.count(name) > 1 else name] = round(100 * value, 4)
    return named
