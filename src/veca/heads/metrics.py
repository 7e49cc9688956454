"""Metrics of classification, segmentation and depth, as shares in [0, 1] or in metres.

`Confusion` and `DepthErrors` add up batches on the device and synchronize once, in `compute`. They may be of several
heads at once, with a leading shape; `each` then gives those of single heads.

Shapes: N examples, C classes, B images of H × W pixels; `...` is any leading shape, such as the heads of a sweep.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Self, TypeAlias

import torch
from torch import Tensor

from veca.errors import ArgumentError

DeviceLike: TypeAlias = torch.device | str
ALL = slice(None)
"""All heads of a stack."""
_NORMAL_QUANTILE = 1.959964
"""2.5 % of the normal distribution are above it."""
_SHARES = "miou", "pixel_accuracy", "class_accuracy", "delta1", "delta2", "delta3"
"""Scores that are at most 1."""


def top_k_hits(scores: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """Return whether the label (N) is among the k classes of highest score (..., N, C) → (..., N).

    Of equal scores the first class ranks higher, and NaN never wins.
    """
    # Counts the classes ranked above the label: unlike topk, this decides ties and NaN the same way on every device.
    own = scores.gather(-1, labels.expand(scores.shape[:-1])[..., None])
    earlier = torch.arange(scores.shape[-1], device=scores.device) < labels[:, None]
    above = ~(scores <= own) | ((scores == own) & earlier)
    return above.sum(-1) < k


def top_k_accuracy(scores: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """Return the share of examples whose label is among the k best: scores (..., N, C), labels (N) → (...)."""
    return top_k_hits(scores, labels, k).double().mean(-1)


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share of `count` examples; unlike share ± error it stays within [0, 1].

    >>> [round(end, 3) for end in wilson_interval(0.9, 100)]
    [0.826, 0.945]
    """
    z = _NORMAL_QUANTILE
    centre, spread = share + z**2 / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / count) ** 2 / 4)
    low, high = ((centre + side) / (1 + z**2 / count) for side in (-spread, spread))
    return max(0.0, low), min(1.0, high)


def describe_spread(percent: float, count: int | None) -> str:
    """Half the width of that interval in points, as text; empty where no number of examples is known.

    >>> describe_spread(90.0, 100), describe_spread(90.0, None)
    (' ± 6', '')
    """
    if not count:
        return ""
    low, high = wilson_interval(percent / 100, count)
    return f" ± {50 * (high - low):.2g}"


def average_precision(scores: Tensor, targets: Tensor, points: Literal["all", "11"] = "all") -> Tensor:
    """Return the average precision of each class: scores and targets (N, C) → (C), NaN for a class without examples.

    A target is 1 where the class is present, 0 where not, and -1 where it does not count (VOC's "difficult").
    Equal scores share one threshold, so the order of the examples does not matter.

    points:
        `all` is the area under the steps of precision over recall, as in scikit-learn and VOC since 2010. `11` is that
        of the VOC2007 challenge: the mean over recalls 0, 0.1 … 1 of the best precision at that recall or more.
    """
    # What does not count ranks last, where it changes no precision above it, and is not counted in `counted`.
    scores = torch.where(targets < 0, -torch.inf, scores.double().nan_to_num(nan=-torch.inf))
    scores, order = scores.sort(dim=0, descending=True, stable=True)
    targets = targets.gather(0, order)
    positives = (targets > 0).cumsum(0)
    counted = (targets >= 0).cumsum(0)
    # Each example takes the counts at the end of the run of scores equal to its own.
    position = torch.arange(len(scores), device=scores.device)[:, None].expand_as(scores)
    ends = torch.ones_like(scores, dtype=torch.bool)
    ends[:-1] = scores[:-1] != scores[1:]
    end = torch.where(ends, position, len(scores)).flip(0).cummin(0).values.flip(0)
    positives, counted, total = positives.gather(0, end), counted.gather(0, end), positives[-1]
    precision = positives.double() / counted.clamp_min(1)
    if points == "all":
        return (precision * (targets > 0)).sum(0) / total
    best = [torch.where(10 * positives >= level * total, precision, 0).amax(0) for level in range(11)]
    return torch.where(total > 0, torch.stack(best).mean(0), torch.nan)


def percent_by_class(classes: Sequence[str], shares: Iterable[float]) -> dict[str, float]:
    """Return shares in percent by class name, without NaNs; a repeated name gets the class's number appended."""
    names = [f"{name} ({i})" if classes.count(name) > 1 else name for i, name in enumerate(classes)]
    return {name: round(100 * x, 4) for name, x in zip(names, shares, strict=True) if not math.isnan(x)}


def jackknife_intervals(scores: Mapping[str, float], without: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """The 95 % confidence interval of each score of n images, from the scores `without` each of them in turn (n).

    Of scores that are means over images it is the mean ± Student's t times the standard error. Images are taken as
    independent: for frames of one video the interval is too narrow.

    >>> values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> (low, high), = jackknife_intervals({"mean": 2.5}, {"mean": (10 - values) / 3}).values()
    >>> round(low, 2), round(high, 2)
    (0.45, 4.55)
    """
    intervals = {}
    for name, left in without.items():
        if (count := len(left)) < 4:  # three or fewer say nothing
            continue
        spread = student_t(count - 1) * float(((left - left.mean()).square().sum() * (count - 1) / count).sqrt())
        if math.isfinite(spread) and math.isfinite(scores[name]):
            most = 1.0 if name in _SHARES else math.inf
            intervals[name] = max(0.0, scores[name] - spread), min(most, scores[name] + spread)
    return intervals


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution: the expansion of Cornish and Fisher, to 0.2 % from 3 on.

    >>> [round(student_t(freedom), 2) for freedom in (3, 21, 10_000)]
    [3.18, 2.08, 1.96]
    """
    z = _NORMAL_QUANTILE
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


class _HeadMetrics:
    """Sums over images in `totals`, whose leading shape is that of the heads."""

    totals: Tensor
    by_image: list[Tensor] | None = None
    """Sums of single images, batch by batch, which `intervals` needs; None: they are not kept."""

    def keep_images(self) -> Self:
        """Keep the sums of each image, of one head alone: predictions and labels are then (B, H, W)."""
        assert self.totals.ndim == 1
        self.by_image = []
        return self

    def _check_shape(self, predicted: Tensor, labels: Tensor, heads: slice) -> Tensor:
        """Return the totals of some heads, after a check that the predictions are theirs."""
        totals = self.totals[heads]
        shapes = tuple(predicted.shape), tuple(labels.shape)
        if shapes[0] != totals.shape[:-1] + shapes[1]:
            way = "resize scores or depths to the labels first"
            raise ArgumentError(f"predictions are {shapes[0]}, labels {shapes[1]}; they must have one shape: {way}")
        return totals

    def each(self) -> list[Self]:
        """Return the metrics of single heads."""
        singles = [copy.copy(self) for _ in self.totals]
        for single, totals in zip(singles, self.totals, strict=True):
            single.totals = totals
        return singles


class Confusion(_HeadMetrics):
    """Counts how often each class was taken for each: `counts` (C, C), one row per true class.

    >>> confusion = Confusion(classes=3)
    >>> confusion.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 255]))
    >>> confusion.compute()["miou"]
    1.0
    """

    def __init__(self, classes: int, ignore: int = 255, device: DeviceLike = "cpu", heads: Sequence[int] = ()) -> None:
        self.classes, self.ignore = classes, ignore
        # The last two entries count ignored pixels and invalid labels: the error is raised by `counts`, without
        # synchronizing with the device at every batch.
        self.totals = torch.zeros(*heads, classes * classes + 2, dtype=torch.int64, device=device)

    def update(self, predicted: Tensor, labels: Tensor, heads: slice = ALL) -> None:
        """Add pixels: class numbers (..., *) of the heads and labels (*), for any shape *; a label may be `ignore`."""
        totals = self._check_shape(predicted, labels, heads)
        predicted, labels = (tensor.to(totals.device).long() for tensor in (predicted, labels))
        inside = (labels >= 0) & (labels < self.classes) & (predicted >= 0) & (predicted < self.classes)
        bins = torch.where(inside, labels * self.classes + predicted, self.classes**2 + 1)
        bins = torch.where(labels == self.ignore, self.classes**2, bins)
        # Integers: deterministic in any order.
        if self.by_image is None:
            bins = bins.reshape(*totals.shape[:-1], -1)
            totals.scatter_add_(-1, bins, torch.ones_like(bins))
            return
        bins = bins.flatten(1)
        images = totals.new_zeros(len(bins), len(totals)).scatter_add_(1, bins, torch.ones_like(bins))
        totals += images.sum(0)
        counts = images[:, :-2].unflatten(1, (self.classes, self.classes))
        self.by_image.append(torch.stack([counts.diagonal(dim1=1, dim2=2), counts.sum(2), counts.sum(1)], dim=1))

    @property
    def counts(self) -> Tensor:
        if invalid := int(self.totals[-1]):
            allowed = f"0…{self.classes - 1} that is not the ignored {self.ignore}"
            raise ArgumentError(f"{invalid} pixels have a class outside {allowed}: give all classes, or that to ignore")
        return self.totals[:-2].view(self.classes, self.classes)

    def iou(self) -> Tensor:
        """Return the intersection over union of each class (C); NaN for one neither labelled nor predicted."""
        counts = self.counts.double()
        return counts.diagonal() / (counts.sum(0) + counts.sum(1) - counts.diagonal())

    def compute(self) -> dict[str, float]:
        """Return `miou`, `pixel_accuracy` and `class_accuracy` (the mean over classes).

        As in mmsegmentation, a class that is in no label and no prediction is not part of the means; one that is
        predicted but never labelled has an intersection over union of 0, which counts, and no accuracy.
        """
        counts = self.counts
        values = _segmentation_scores(counts.diagonal(), counts.sum(1), counts.sum(0))
        return {name: float(value) for name, value in values.items()}

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return 95 % confidence intervals of scores, after `keep_images`; empty with three images or fewer."""
        if not self.by_image:
            return {}
        images = torch.cat(self.by_image)  # (B, 3, C)
        return jackknife_intervals(self.compute(), _segmentation_scores(*(images.sum(0) - images).unbind(1)))


def _segmentation_scores(right: Tensor, labelled: Tensor, predicted: Tensor) -> dict[str, Tensor]:
    """The scores of counts of pixels per class (..., C)."""
    right, labelled, predicted = right.double(), labelled.double(), predicted.double()
    return {
        "miou": (right / (labelled + predicted - right)).nanmean(-1),
        "pixel_accuracy": right.sum(-1) / labelled.sum(-1),
        "class_accuracy": (right / labelled).nanmean(-1),
    }


class DepthErrors(_HeadMetrics):
    """Errors of depth maps over pixels labelled within (low, high), to which predictions are clamped.

    Each error is averaged over the pixels of an image, then over images, as the benchmarks of NYUv2 and KITTI do; an
    image without a valid pixel does not count.
    """

    NAMES = "rmse", "abs_rel", "delta1", "delta2", "delta3", "log10", "rmse_log", "silog"

    def __init__(self, low: float, high: float, device: DeviceLike = "cpu", heads: Sequence[int] = ()) -> None:
        self.low, self.high = low, high
        # The errors summed over images, then the number of images.
        self.totals = torch.zeros(*heads, len(self.NAMES) + 1, dtype=torch.float64, device=device)

    def update(self, predicted: Tensor, depth: Tensor, heads: slice = ALL) -> None:
        """Add images: predictions (..., B, H, W) of the heads and depths (B, H, W)."""
        totals = self._check_shape(predicted, depth, heads)
        device = totals.device
        predicted, depth = predicted.to(device).double().flatten(-2), depth.to(device).double().flatten(1)
        valid = (depth > self.low) & (depth < self.high)
        # Pixels that do not count become perfect predictions and are left out of the means. NaN stays visible.
        depth = torch.where(valid, depth, 1.0)
        predicted = torch.where(valid, predicted.clamp(self.low, self.high), 1.0)
        ratio = torch.maximum(predicted / depth, depth / predicted)
        log = (predicted / depth).log()
        terms = [(predicted - depth).square(), (predicted - depth).abs() / depth]
        terms += [((ratio < 1.25**power) & valid).double() for power in (1, 2, 3)]
        terms += [log.abs(), log.square(), log, valid.double().expand_as(log)]
        *sums, count = torch.stack([term.sum(-1) for term in terms])
        squared, relative, *within, log_abs, log_squared, log = torch.stack(sums) / count
        silog = (log_squared - log.square()).clamp_min(0).sqrt()
        # In the order of `NAMES`.
        errors = [squared.sqrt(), relative, *within, log_abs / math.log(10), log_squared.sqrt(), silog]
        added = torch.where(count > 0, torch.stack([*errors, torch.ones_like(count)]), 0.0)
        totals += added.sum(-1).movedim(0, -1)
        if self.by_image is not None:
            self.by_image.append(added.T)

    def compute(self) -> dict[str, float]:
        """Return by name: `rmse`, `abs_rel`, `delta1` (share within a factor of 1.25), `delta2`, `delta3` (its powers),
        `log10`, `rmse_log` and `silog` (natural logarithms; some papers print the last times 100).
        """
        means = self.totals[:-1] / self.totals[-1]
        return dict(zip(self.NAMES, means.tolist(), strict=True))

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return 95 % confidence intervals of scores, after `keep_images`; empty with three images or fewer."""
        images = torch.cat(self.by_image or [self.totals.new_empty(0, len(self.totals))])
        images = images[images[:, -1] > 0]
        without = images.sum(0) - images
        means = (without[:, :-1] / without[:, -1:]).unbind(1)
        return jackknife_intervals(self.compute(), dict(zip(self.NAMES, means, strict=True)))
