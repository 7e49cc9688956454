"""Linear heads over maps of features, for segmentation and depth, and their losses. `fit_dense` trains them.

A head sees each patch with the global feature appended. Heads that see the same are stacked to be computed together.

Shapes: B images, D width of the features, h × w patches, H × W pixels of the labels, C classes, n bins of depth; `...`
is the K heads of a stack, and nothing for a head alone.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veca.errors import ArgumentError
from veca.heads.metrics import ALL, Confusion, DepthErrors
from veca.images.resize import resize_maps

Norm: TypeAlias = Literal["none", "batchnorm", "standardize"]
"""What comes before the Linear; the last is by statistics of the training features, taken once."""
AT_ONCE = 2**27
"""At most so many numbers are one output of a stack, half a GB; to learn takes three times that."""
PIXELS = (-3, -2, -1)
"""The dimensions of a batch of maps."""


class DenseBatch(NamedTuple):
    patches: Tensor
    """(B, D, h, w)"""
    cls: Tensor
    """(B, D)"""
    labels: Tensor
    """(B, H, W): class numbers, or metres."""


class Meter(Protocol):
    def update(self, predicted: Tensor, labels: Tensor, heads: slice = ALL) -> None: ...
    def compute(self) -> dict[str, float]: ...
    def each(self) -> Sequence[Meter]: ...


class DenseHead(nn.Module, ABC):
    """Norm and Linear over [patch, global feature]; what the outputs mean is up to those who inherit.

    A stack of K heads (`stack`) is one whose parameters have a dimension more, before the others; the norm is shared.
    """

    metric: str
    """The one of the meter's scores to choose by."""
    higher_is_better: bool

    def __init__(self, width: int, channels: int, norm: Norm, seed: int) -> None:
        super().__init__()
        if norm not in ("none", "batchnorm", "standardize"):
            raise ArgumentError(f"norm is {norm!r}; choose none, batchnorm or standardize")
        self.width, self.norm, inputs = width, norm, 2 * width
        self.batchnorm, self.gain, self.shift = None, None, None
        if norm == "batchnorm":
            self.batchnorm = nn.BatchNorm1d(inputs, affine=False)
            self.gain, self.shift = nn.Parameter(torch.ones(inputs)), nn.Parameter(torch.zeros(inputs))
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("deviation", torch.ones(inputs))
        draw = torch.Generator().manual_seed(seed)  # nn.Linear would draw from the global one
        self.weight = nn.Parameter(torch.randn(channels, inputs, generator=draw) * 0.01)
        self.bias = nn.Parameter(torch.zeros(channels))

    def stack(self, count: int) -> Self:
        """So many copies of a head as one."""
        many = copy.deepcopy(self)
        for parameter in many.parameters():
            parameter.data = parameter.data.expand(count, *parameter.shape).clone()
        return many

    def part(self, k: int) -> Self:
        """A copy of one head of a stack."""
        one = copy.deepcopy(self)
        for parameter in one.parameters():
            parameter.data = parameter.data[k].clone()
        return one

    def inputs(self, patches: Tensor, cls: Tensor) -> Tensor:
        """What the norm gets to see: (B, h, w, 2 D)."""
        if patches.shape[1] != self.width or tuple(cls.shape) != tuple(patches.shape[:2]):
            raise ArgumentError(
                f"patches are {tuple(patches.shape)}, the global feature {tuple(cls.shape)}; this head takes "
                f"(B, {self.width}, h, w) and (B, {self.width})"
            )
        patches = patches.float().permute(0, 2, 3, 1)
        return torch.cat([patches, cls.float()[:, None, None].expand_as(patches)], 3)

    def normed(self, patches: Tensor, cls: Tensor) -> Tensor:
        """What the Linear gets to see, but for the gain and shift of a batch norm: (B, h, w, 2 D)."""
        x = self.inputs(patches, cls)
        if self.batchnorm is not None:
            return self.batchnorm(x.flatten(0, 2)).view_as(x)
        return (x - self.mean) / self.deviation if self.norm == "standardize" else x

    def scores(self, x: Tensor, heads: slice) -> Tensor:
        """Of the Linear: (..., B, channels, h, w)."""
        weight, bias = self.weight[heads], self.bias[heads]
        if self.gain is not None and self.shift is not None:  # W (gain x + shift) + b = (W gain) x + (W shift + b)
            bias = bias + (weight @ self.shift[heads][..., None])[..., 0]
            weight = weight * self.gain[heads][..., None, :]
        # A matrix product, not a convolution, which cuDNN would round to TF32 unless told otherwise.
        scores = F.linear(x, weight.flatten(0, -2), bias.flatten())
        return scores.unflatten(3, bias.shape).movedim((0, 1, 2), (-4, -2, -1))

    @torch.no_grad()
    def moments(self, batch: DenseBatch) -> Tensor:
        """Of a batch of features: (3, 2 D) the number of cells, their sums and the sums of their squares."""
        x = self.inputs(batch.patches.to(self.mean.device), batch.cls.to(self.mean.device)).double()
        sums = x.sum((0, 1, 2))
        return torch.stack([torch.full_like(sums, x.numel() // x.shape[3]), sums, x.square().sum((0, 1, 2))])

    def take_statistics(self, batches: Iterable[DenseBatch]) -> None:
        """Those of `standardize`, over batches of features."""
        self.use_moments(self.moments(batch) for batch in batches)

    @torch.no_grad()
    def use_moments(self, moments: Iterable[Tensor]) -> None:
        """`take_statistics` from the moments of the batches."""
        count, total, squares = sum(moments, torch.zeros(3, len(self.mean), device=self.mean.device)).double()
        if not count.all():
            raise ArgumentError("no batches to take the statistics of the features from")
        mean = total / count
        deviation = (squares / count - mean.square()).clamp_min(0).sqrt()
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 1e-5 * mean.abs(), deviation, 1.0))  # 1 where nothing varies

    def forward(self, patches: Tensor, cls: Tensor, size: tuple[int, int]) -> Tensor:
        return self.output(self.normed(patches, cls), size)

    @abstractmethod
    def output(self, x: Tensor, size: tuple[int, int], heads: slice = ALL) -> Tensor:
        """At `size` = (H, W), from what `normed` gave, for `loss` and `predict`; of some heads of a stack."""

    @abstractmethod
    def numbers(self, x: Tensor, size: tuple[int, int]) -> int:
        """The most that the output of one head takes at once."""

    def groups(self, x: Tensor, size: tuple[int, int]) -> list[slice]:
        """All heads, in parts whose outputs are `AT_ONCE` at most, or of one head."""
        if self.weight.ndim == 2:
            return [ALL]
        count, step = len(self.weight), max(1, AT_ONCE // max(1, self.numbers(x, size)))
        return [slice(k, min(k + step, count)) for k in range(0, count, step)]

    @abstractmethod
    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Of each head (...)."""

    def check(self, labels: Tensor) -> None:
        """Refuse labels that the loss could not take."""

    def predict(self, output: Tensor) -> Tensor:
        """(..., B, H, W), as a meter takes it."""
        return output

    def predictions(self, patches: Tensor, cls: Tensor, size: tuple[int, int]) -> Iterator[tuple[Tensor, slice]]:
        """Of all heads, some at a time: (..., B, H, W), and whose."""
        x = self.normed(patches, cls)
        return ((self.predict(self.output(x, size, heads)), heads) for heads in self.groups(x, size))

    @abstractmethod
    def meter(self, device: torch.device | str = "cpu") -> Meter:
        """A fresh one for this task and these heads."""


class SegmentationHead(DenseHead):
    """Scores of C classes at each pixel: (..., B, C, H, W)."""

    metric, higher_is_better = "miou", True

    def __init__(self, width: int, classes: int, *, norm: Norm = "none", ignore: int = 255, seed: int = 0) -> None:
        super().__init__(width, classes, norm, seed)
        self.classes, self.ignore = classes, ignore

    def output(self, x: Tensor, size: tuple[int, int], heads: slice = ALL) -> Tensor:
        return resize_maps(self.scores(x, heads), size)

    def numbers(self, x: Tensor, size: tuple[int, int]) -> int:
        return len(x) * self.classes * size[0] * size[1]

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy, the mean over the pixels that count; 0 where none does."""
        labels = labels.long()
        own = labels.expand(*output.shape[:-4], *labels.shape)
        each = F.cross_entropy(output.flatten(0, -4), own.flatten(0, -3), ignore_index=self.ignore, reduction="none")
        return each.view_as(own).sum(PIXELS) / (labels != self.ignore).sum().clamp_min(1)

    def check(self, labels: Tensor) -> None:
        values = labels.cpu().numpy()  # not by torch's threads: they would wait for cores that decode
        wrong = values[((values < 0) | (values >= self.classes)) & (values != self.ignore)]
        if len(wrong):  # on a GPU the loss would end the process
            raise ArgumentError(
                f"a label is {int(wrong[0])}; this head takes 0…{self.classes - 1} and {self.ignore} for what does not "
                "count: give it the number of classes the labels have, or the label to ignore"
            )

    def predict(self, output: Tensor) -> Tensor:
        return output.argmax(-3)

    def meter(self, device: torch.device | str = "cpu") -> Confusion:
        return Confusion(self.classes, self.ignore, device, self.weight.shape[:-2])


class DepthHead(DenseHead):
    """Metres at each pixel (..., B, H, W), of readings between `low` and `high`; what is outside does not count.

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
            raise ArgumentError(
                f"low is {low}, high {high}, bins {bins}; depths need 0 < low < high, in metres, and two bins or more; "
                "bins=0 is plain regression"
            )
        if loss not in ("sig", "l1", "l2"):
            raise ArgumentError(f"loss is {loss!r}; choose sig, l1 or l2")
        self.low, self.high, self.bins, self.loss_name = low, high, bins, loss
        self.gradient_weight, self.upsample = gradient_weight, upsample
        self.depths: Tensor
        self.register_buffer("depths", torch.linspace(low, high, bins))
        if not bins:
            nn.init.zeros_(self.weight)  # metres away from anything, where thousands of channels have random weights
            nn.init.constant_(self.bias, 0.5)

    def output(self, x: Tensor, size: tuple[int, int], heads: slice = ALL) -> Tensor:
        scores = self.scores(x, heads)
        if not self.bins:
            return resize_maps(self.low + (self.high - self.low) * scores[..., 0, :, :], size)
        rows, columns = scores.shape[-2:]
        above = resize_maps(scores, (rows * self.upsample, columns * self.upsample)).relu()
        both = torch.stack([self.depths, torch.ones_like(self.depths)])  # (2, n)
        sums = both.expand(*above.shape[:-3], *both.shape) @ above.flatten(-2) + 0.1 * both.sum(1, keepdim=True)
        depth = sums[..., 0, :] / sums[..., 1, :]
        return resize_maps(depth.unflatten(-1, above.shape[-2:]), size)

    def numbers(self, x: Tensor, size: tuple[int, int]) -> int:
        rows, columns = x.shape[1:3]
        return len(x) * max(self.bins * self.upsample**2 * rows * columns, size[0] * size[1])

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        valid = (labels > self.low) & (labels < self.high)
        if self.loss_name == "sig":
            error = log_error(output, labels, valid)
            loss = scale_invariant_loss(error, valid)
            return loss + self.gradient_weight * gradient_loss(error, valid) if self.gradient_weight else loss
        error = torch.where(valid, output - labels, 0)
        error = error.abs() if self.loss_name == "l1" else error.square()
        return error.sum(PIXELS) / valid.sum().clamp_min(1)

    def meter(self, device: torch.device | str = "cpu") -> DepthErrors:
        return DepthErrors(self.low, self.high, device, self.weight.shape[:-2])


def log_error(predicted: Tensor, depth: Tensor, valid: Tensor) -> Tensor:
    """Of logarithms (..., B, H, W), 0 where not valid. Depths are floored at a millimetre."""
    return torch.where(valid, predicted.clamp_min(1e-3).log() - depth.clamp_min(1e-3).log(), 0)


def scale_invariant_loss(error: Tensor, valid: Tensor) -> Tensor:
    """√(variance + 0.15 mean²) of the error of logarithms over all valid pixels (after Eigen et al. 2014).

    Where there are none it is a constant, 1e-6.
    """
    count = valid.sum().clamp_min(1)
    mean = error.sum(PIXELS, keepdim=True) / count
    variance = torch.where(valid, error - mean, 0).square().sum(PIXELS) / count
    return (variance + 0.15 * mean[..., 0, 0, 0].square()).clamp_min(1e-12).sqrt()  # a root has no gradient at 0


def gradient_loss(error: Tensor, valid: Tensor) -> Tensor:
    """How much the error of logarithms changes from pixel to pixel, at four scales (Li & Snavely's MegaDepth)."""
    total = error.new_zeros(())
    for step in (1, 2, 4, 8):
        some, counted = error[..., ::step, ::step], valid[..., ::step, ::step]
        down = (some[..., 2:, :] - some[..., :-2, :]).abs() * (counted[..., 2:, :] & counted[..., :-2, :])
        across = (some[..., 2:] - some[..., :-2]).abs() * (counted[..., 2:] & counted[..., :-2])
        total = total + (down.sum(PIXELS) + across.sum(PIXELS)) / counted.sum().clamp_min(1)
    return total
