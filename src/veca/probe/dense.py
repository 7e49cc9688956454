"""Linear heads over maps of features, for segmentation and depth, and their losses. `fit_dense` trains them.

A head sees each patch with the global feature appended.

Shapes: B images, D width of the features, h × w patches, H × W pixels of the labels, C classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veca.probe.metrics import Confusion, DepthErrors
from veca.resize import resized

Norm: TypeAlias = Literal["none", "batchnorm", "standardize"]
"""What comes before the Linear; the last is by statistics of the training features, taken once."""


class DenseBatch(NamedTuple):
    patches: Tensor
    """(B, D, h, w)"""
    cls: Tensor
    """(B, D)"""
    labels: Tensor
    """(B, H, W): class numbers, or metres."""


class Meter(Protocol):
    def update(self, predicted: Tensor, labels: Tensor) -> None: ...
    def compute(self) -> dict[str, float]: ...


class DenseHead(nn.Module, ABC):
    """Norm and Linear over [patch, global feature]; what the outputs mean is up to those who inherit."""

    metric: str
    """The one of the meter's scores to choose by."""
    higher_is_better: bool

    def __init__(self, width: int, channels: int, norm: Norm, seed: int) -> None:
        super().__init__()
        if norm not in ("none", "batchnorm", "standardize"):
            raise ValueError(f"norm is {norm!r}; choose none, batchnorm or standardize")
        self.width, self.norm, inputs = width, norm, 2 * width
        self.batchnorm = nn.BatchNorm2d(inputs) if norm == "batchnorm" else None
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("deviation", torch.ones(inputs))
        draw = torch.Generator().manual_seed(seed)  # nn.Linear would draw from the global one
        self.weight = nn.Parameter(torch.randn(channels, inputs, generator=draw) * 0.01)
        self.bias = nn.Parameter(torch.zeros(channels))

    def inputs(self, patches: Tensor, cls: Tensor) -> Tensor:
        """What the norm gets to see: (B, 2 D, h, w)."""
        if patches.shape[1] != self.width or tuple(cls.shape) != tuple(patches.shape[:2]):
            raise ValueError(
                f"patches are {tuple(patches.shape)}, the global feature {tuple(cls.shape)}; this head takes "
                f"(B, {self.width}, h, w) and (B, {self.width})"
            )
        patches = patches.float()
        return torch.cat([patches, cls.float()[:, :, None, None].expand_as(patches)], 1)

    def scores(self, patches: Tensor, cls: Tensor) -> Tensor:
        """Of the Linear: (B, channels, h, w)."""
        x = self.inputs(patches, cls)
        if self.batchnorm is not None:
            x = self.batchnorm(x)
        elif self.norm == "standardize":
            x = (x - self.mean[:, None, None]) / self.deviation[:, None, None]
        # A matrix product, not a convolution, which cuDNN would round to TF32 unless told otherwise.
        return F.linear(x.flatten(2).mT, self.weight, self.bias).mT.unflatten(2, x.shape[-2:])

    @torch.no_grad()
    def moments(self, batch: DenseBatch) -> Tensor:
        """Of a batch of features: (3, 2 D) the number of cells, their sums and the sums of their squares."""
        x = self.inputs(batch.patches.to(self.mean.device), batch.cls.to(self.mean.device)).double()
        sums = x.sum((0, 2, 3))
        return torch.stack([torch.full_like(sums, x.numel() // x.shape[1]), sums, x.square().sum((0, 2, 3))])

    def take_statistics(self, batches: Iterable[DenseBatch]) -> None:
        """Those of `standardize`, over batches of features."""
        self.use_moments(self.moments(batch) for batch in batches)

    @torch.no_grad()
    def use_moments(self, moments: Iterable[Tensor]) -> None:
        """`take_statistics` from the moments of the batches."""
        count, total, squares = sum(moments, torch.zeros(3, len(self.mean), device=self.mean.device)).double()
        if not count.all():
            raise ValueError("no batches to take the statistics of the features from")
        mean = total / count
        deviation = (squares / count - mean.square()).clamp_min(0).sqrt()
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 1e-5 * mean.abs(), deviation, 1.0))  # 1 where nothing varies

    @abstractmethod
    def forward(self, patches: Tensor, cls: Tensor, size: tuple[int, int]) -> Tensor:
        """The output at `size` = (H, W), which `loss` and `predict` take."""

    @abstractmethod
    def loss(self, output: Tensor, labels: Tensor) -> Tensor: ...

    def check(self, labels: Tensor) -> None:
        """Refuse labels that the loss could not take."""

    def predict(self, output: Tensor) -> Tensor:
        """(B, H, W), as a meter takes it."""
        return output

    @abstractmethod
    def meter(self, device: torch.device | str = "cpu") -> Meter:
        """A fresh one for this task."""


class SegmentationHead(DenseHead):
    """Scores of C classes at each pixel: (B, C, H, W)."""

    metric, higher_is_better = "miou", True

    def __init__(self, width: int, classes: int, *, norm: Norm = "none", ignore: int = 255, seed: int = 0) -> None:
        super().__init__(width, classes, norm, seed)
        self.classes, self.ignore = classes, ignore

    def forward(self, patches: Tensor, cls: Tensor, size: tuple[int, int]) -> Tensor:
        return resized(self.scores(patches, cls), size)

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy, the mean over the pixels that count; 0 where none does."""
        labels = labels.long()
        each = F.cross_entropy(output, labels, ignore_index=self.ignore, reduction="none")
        return each.sum() / (labels != self.ignore).sum().clamp_min(1)

    def check(self, labels: Tensor) -> None:
        wrong = labels[((labels < 0) | (labels >= self.classes)) & (labels != self.ignore)]
        if len(wrong):  # on a GPU the loss would end the process
            raise ValueError(
                f"a label is {int(wrong[0])}; this head takes 0…{self.classes - 1} and {self.ignore} for what does not "
                "count: give it the number of classes the labels have, or the label to ignore"
            )

    def predict(self, output: Tensor) -> Tensor:
        return output.argmax(1)

    def meter(self, device: torch.device | str = "cpu") -> Confusion:
        return Confusion(self.classes, self.ignore, device)


class DepthHead(DenseHead):
    """Metres at each pixel (B, H, W), of readings between `low` and `high`; what is outside does not count.

    bins:
        As in the DINO protocol (and AdaBins before it), the Linear weighs so many depths from `low` to `high`, evenly
        spaced; the weights are its outputs above 0, plus 0.1, over their sum. 0: the Linear gives the depth itself, as
        a share of the way from `low` to `high`.
    loss:
        `sig`, the scale-invariant one in logarithms, plus `gradient_weight` × `gradient_loss`; or `l1`, `l2`.
    upsample:
        The grid of patches is refined by this factor before bins are weighed, and then to the labels' size; all the
        way would take hundreds of numbers per pixel.
    """

    metric, higher_is_better = "rmse", False

    def __init__(
        self,
        width: int,
        low: float,
        high: float,
        *,
        bins: int = 256,
        loss: Literal["sig", "l1", "l2"] = "sig",
        gradient_weight: float = 0.5,
        upsample: int = 4,
        norm: Norm = "none",
        seed: int = 0,
    ) -> None:
        super().__init__(width, bins or 1, norm, seed)
        if not 0 < low < high or bins < 0 or bins == 1:
            raise ValueError(
                f"low is {low}, high {high}, bins {bins}; depths need 0 < low < high, in metres, and two bins or more; "
                "bins=0 is plain regression"
            )
        if loss not in ("sig", "l1", "l2"):
            raise ValueError(f"loss is {loss!r}; choose sig, l1 or l2")
        self.low, self.high, self.bins, self.loss_name = low, high, bins, loss
        self.gradient_weight, self.upsample = gradient_weight, upsample
        self.depths: Tensor
        self.register_buffer("depths", torch.linspace(low, high, bins))
        if not bins:
            nn.init.zeros_(self.weight)  # metres away from anything, where thousands of channels have random weights
            nn.init.constant_(self.bias, 0.5)

    def forward(self, patches: Tensor, cls: Tensor, size: tuple[int, int]) -> Tensor:
        scores = self.scores(patches, cls)
        if not self.bins:
            return resized(self.low + (self.high - self.low) * scores[:, 0], size)
        rows, columns = scores.shape[-2:]
        weights = resized(scores, (rows * self.upsample, columns * self.upsample)).relu() + 0.1
        depth = torch.einsum("bnhw,n->bhw", weights, self.depths) / weights.sum(1)
        return resized(depth, size)

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        valid = (labels > self.low) & (labels < self.high)
        if self.loss_name == "sig":
            loss = scale_invariant_loss(output, labels, valid)
            return loss + self.gradient_weight * gradient_loss(output, labels, valid) if self.gradient_weight else loss
        error = torch.where(valid, output - labels, 0)
        error = error.abs() if self.loss_name == "l1" else error.square()
        return error.sum() / valid.sum().clamp_min(1)

    def meter(self, device: torch.device | str = "cpu") -> DepthErrors:
        return DepthErrors(self.low, self.high, device)


def scale_invariant_loss(predicted: Tensor, depth: Tensor, valid: Tensor) -> Tensor:
    """√(variance + 0.15 mean²) of the error of logarithms over all valid pixels (after Eigen et al. 2014).

    Where there are none it is a constant, 1e-6.
    """
    error = _log_error(predicted, depth, valid)
    count = valid.sum().clamp_min(1)
    mean = error.sum() / count
    variance = torch.where(valid, error - mean, 0).square().sum() / count
    return (variance + 0.15 * mean.square()).clamp_min(1e-12).sqrt()  # a root has no gradient at 0


def gradient_loss(predicted: Tensor, depth: Tensor, valid: Tensor) -> Tensor:
    """How much the error of logarithms changes from pixel to pixel, at four scales (Li & Snavely's MegaDepth)."""
    error = _log_error(predicted, depth, valid)
    total = error.new_zeros(())
    for step in (1, 2, 4, 8):
        some, counted = error[..., ::step, ::step], valid[..., ::step, ::step]
        down = (some[..., 2:, :] - some[..., :-2, :]).abs() * (counted[..., 2:, :] & counted[..., :-2, :])
        across = (some[..., 2:] - some[..., :-2]).abs() * (counted[..., 2:] & counted[..., :-2])
        total = total + (down.sum() + across.sum()) / counted.sum().clamp_min(1)
    return total


def _log_error(predicted: Tensor, depth: Tensor, valid: Tensor) -> Tensor:
    """0 where not valid. Depths are floored at a millimetre."""
    return torch.where(valid, predicted.clamp_min(1e-3).log() - depth.clamp_min(1e-3).log(), 0)
