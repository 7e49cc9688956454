"""Linear heads over feature maps for segmentation and depth: losses, training and scores.

A head sees each patch with the global feature appended. Features of a dense task are too many to cache, so batches come
as the backbone computes them. One head is trained per learning rate: all are stacked, see the same pass over the images
in one computation, and each ends where it would have ended alone.

A batch is a list of groups, a `DenseBatch` for the images of one size. Norms and losses are those of all its images
together, whatever their sizes: each counted pixel weighs the same.

Shapes: B images, D width of the features, h × w patches, H × W pixels of the labels, C classes, n depth bins; `...` is
the K heads of a stack, and nothing for a single head.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veca.errors import ArgumentError
from veca.heads.metrics import ALL, Confusion, DepthErrors
from veca.images.resize import resize_maps

Norm: TypeAlias = Literal["none", "batchnorm", "standardize"]
"""What comes before the Linear; `standardize` uses statistics of the training features, computed once."""
DepthLoss: TypeAlias = Literal["sig", "l1", "l2"]
DenseMetrics: TypeAlias = Confusion | DepthErrors
Total: TypeAlias = Callable[[Tensor], Tensor]
"""From a sum over the own part of a batch to that over all of it; its gradient is that of the own part."""
MAX_OUTPUTS = 2**27
"""Numbers in one output of a stack, half a GB; training takes three times that."""
BAND_OUTPUTS = 2**24
"""Numbers in one band of the scores of a whole image."""
STATISTICS_BATCHES = 64
"""At most this many batches give the statistics of a head that standardizes."""
PIXELS = (-3, -2, -1)
"""The dimensions B, H, W of a batch of maps."""


def own_alone(value: Tensor) -> Tensor:
    """The `Total` of a process that has the whole batch."""
    return value


class DenseBatch(NamedTuple):
    patches: Tensor
    """(B, D, h, w)"""
    cls: Tensor
    """(B, D)"""
    labels: Tensor
    """(B, H, W): class numbers, or metres."""


class DenseHead(nn.Module, ABC):
    """Norm and Linear over [patch, global feature]; subclasses say what the outputs mean.

    A stack of K heads (`stack`) has parameters with one more leading dimension; the norm's statistics are shared.
    """

    metric: str
    """The score by which heads are selected."""
    higher_is_better: bool
    maps: int
    """Channels of the output, at the size of the labels."""
    upsample = 1
    """Factor by which the grid of patches is upsampled before the outputs are computed."""
    mean: Tensor
    deviation: Tensor

    def __init__(self, width: int, channels: int, *, norm: Norm = "none", seed: int = 0) -> None:
        super().__init__()
        if norm not in get_args(Norm):
            raise ArgumentError(f"norm is {norm!r}; choose none, batchnorm or standardize")
        self.width, self.norm, inputs = width, norm, 2 * width
        self.batchnorm = nn.BatchNorm1d(inputs, affine=False) if norm == "batchnorm" else None
        self.gain = nn.Parameter(torch.ones(inputs)) if norm == "batchnorm" else None
        self.shift = nn.Parameter(torch.zeros(inputs)) if norm == "batchnorm" else None
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("deviation", torch.ones(inputs))
        generator = torch.Generator().manual_seed(seed)  # nn.Linear would draw from the global generator
        self.weight = nn.Parameter(torch.randn(channels, inputs, generator=generator) * 0.01)
        self.bias = nn.Parameter(torch.zeros(channels))

    def stack(self, count: int) -> Self:
        """Return `count` copies of this head as one stack."""
        # The copies are equal at first; the learning rates make them differ.
        return self.reshaped(lambda data: data.expand(count, *data.shape))

    def reshaped(self, reshape: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy of this head or stack with other parameters."""
        head = copy.deepcopy(self)
        for parameter in head.parameters():
            parameter.data = reshape(parameter.data).clone()
        return head

    def inputs(self, patches: Tensor, cls: Tensor) -> Tensor:
        """Return the input of the norm (B, h, w, 2 D)."""
        if patches.shape[1] != self.width or tuple(cls.shape) != tuple(patches.shape[:2]):
            shapes = f"patches are {tuple(patches.shape)}, the global feature {tuple(cls.shape)}"
            raise ArgumentError(f"{shapes}; this head takes (B, {self.width}, h, w) and (B, {self.width})")
        patches = patches.float().permute(0, 2, 3, 1)
        return torch.cat([patches, cls.float()[:, None, None].expand_as(patches)], 3)

    def normed(self, patches: Tensor, cls: Tensor) -> Tensor:
        """Return the input of the Linear (B, h, w, 2 D), except for gain and shift of a batch norm (see `scores`)."""
        return self.normed_groups([(patches, cls)])[0]

    def normed_groups(self, features: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return `normed` of each group of a batch; a batch norm takes its statistics over all of them."""
        groups = [self.inputs(*each) for each in features]
        if self.batchnorm is not None:
            tokens = [x.flatten(0, 2) for x in groups]
            normed = self.batchnorm(torch.cat(tokens)).split([len(each) for each in tokens])
            return [part.view_as(x) for part, x in zip(normed, groups, strict=True)]
        return [(x - self.mean) / self.deviation for x in groups] if self.norm == "standardize" else groups

    def scores(self, x: Tensor, heads: slice) -> Tensor:
        """Apply the Linear: (..., B, channels, h, w)."""
        weight, bias = self.weight[heads], self.bias[heads]
        # Gain and shift differ between the heads of a stack, so they are folded into its weights:
        # W (gain x + shift) + b = (W gain) x + (W shift + b)
        if self.gain is not None and self.shift is not None:
            bias = bias + (weight @ self.shift[heads][..., None])[..., 0]
            weight = weight * self.gain[heads][..., None, :]
        # A matrix product, not a convolution, which cuDNN would round to TF32 by default.
        scores = F.linear(x, weight.flatten(0, -2), bias.flatten())
        return scores.unflatten(3, bias.shape).movedim((0, 1, 2), (-4, -2, -1))

    @torch.no_grad()
    def moments(self, batch: DenseBatch) -> Tensor:
        """Return of a batch of features (3, 2 D): the number of patches, their sums and sums of squares."""
        x = self.inputs(batch.patches, batch.cls).double()
        sums = x.sum((0, 1, 2))
        return torch.stack([torch.full_like(sums, x.numel() // x.shape[3]), sums, x.square().sum((0, 1, 2))])

    @torch.no_grad()
    def use_moments(self, moments: Iterable[Tensor]) -> None:
        """Set the statistics of `standardize` from the `moments` of several batches."""
        count, total, squares = sum(moments, torch.zeros(3, len(self.mean), device=self.mean.device)).double()
        mean = total / count
        deviation = (squares / count - mean.square()).clamp_min(0).sqrt()
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 1e-5 * mean.abs(), deviation, 1.0))  # 1 for constant channels

    def forward(self, patches: Tensor, cls: Tensor, size: tuple[int, int]) -> Tensor:
        return self.output(self.normed(patches, cls), size)

    @abstractmethod
    def output(self, x: Tensor, size: tuple[int, int], heads: slice = ALL) -> Tensor:
        """Return the output at `size` = (H, W) for `loss` and `predict`, from what `normed` gave."""

    def split_heads(self, *groups: tuple[Tensor, tuple[int, int]]) -> list[slice]:
        """Split the heads of a stack so that each part has at most `MAX_OUTPUTS` numbers, but at least one head.

        Of each group of images the map (B, h, w, ...) is given, and the size (H, W) of the output.
        """
        if self.weight.ndim == 2:
            return [ALL]
        (count, channels), numbers = self.bias.shape, 0
        for x, size in groups:
            upsampled = channels * self.upsample**2 * x.shape[1] * x.shape[2]
            numbers += len(x) * max(upsampled, self.maps * size[0] * size[1])
        step = max(1, MAX_OUTPUTS // max(1, numbers))
        return [slice(k, min(k + step, count)) for k in range(0, count, step)]

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each head (...) on images of one size."""
        return self.batch_loss([output], [labels])

    @abstractmethod
    def batch_loss(self, outputs: Sequence[Tensor], labels: Sequence[Tensor], total: Total = own_alone) -> Tensor:
        """Return the loss of each head (...) on all groups of a batch together.

        Where several processes share a batch, `total` makes of their sums over pixels those of all.
        """

    def check(self, labels: Tensor) -> None:
        """Refuse labels that the loss cannot take."""

    def predict(self, output: Tensor) -> Tensor:
        """Return predictions (..., B, H, W) as the metrics take them."""
        return output

    def predict_map(self, patches: Tensor, cls: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the predictions (B, H, W) of a single head."""
        return self.predict(self(patches, cls, size))

    def predictions(self, patches: Tensor, cls: Tensor, size: tuple[int, int]) -> Iterator[tuple[Tensor, slice]]:
        """Yield the predictions (..., B, H, W) of some heads at a time, and which heads they are."""
        x = self.normed(patches, cls)
        return ((self.predict(self.output(x, size, heads)), heads) for heads in self.split_heads((x, size)))

    @abstractmethod
    def metrics(self) -> DenseMetrics:
        """Return empty metrics for this task and these heads, on their device."""


class SegmentationHead(DenseHead):
    """Scores of C classes at each pixel: (..., B, C, H, W)."""

    metric, higher_is_better = "miou", True

    def __init__(self, width: int, classes: int, *, norm: Norm = "none", ignore: int = 255, seed: int = 0) -> None:
        super().__init__(width, classes, norm=norm, seed=seed)
        self.classes = self.maps = classes
        self.ignore = ignore

    def output(self, x: Tensor, size: tuple[int, int], heads: slice = ALL) -> Tensor:
        return resize_maps(self.scores(x, heads), size)

    def batch_loss(self, outputs: Sequence[Tensor], labels: Sequence[Tensor], total: Total = own_alone) -> Tensor:
        """Return the mean cross-entropy over the pixels that are not ignored; 0 if there are none."""
        losses = total(sum_pixels(map(self._pixel_losses, outputs, labels)))
        return losses / total(sum_pixels(each != self.ignore for each in labels)).clamp_min(1)

    def _pixel_losses(self, output: Tensor, labels: Tensor) -> Tensor:
        expanded = labels.long().expand(*output.shape[:-4], *labels.shape)
        flat = output.flatten(0, -4), expanded.flatten(0, -3)
        return F.cross_entropy(*flat, ignore_index=self.ignore, reduction="none").view_as(expanded)

    def check(self, labels: Tensor) -> None:
        # On the CPU, before the batch goes to the device, and by NumPy: threads of PyTorch would compete with decoding
        # workers for cores.
        values = labels.cpu().numpy()
        wrong = values[((values < 0) | (values >= self.classes)) & (values != self.ignore)]
        if len(wrong):  # on a GPU the loss would abort the process
            rule = f"this head takes 0…{self.classes - 1} and {self.ignore} for what does not count"
            raise ArgumentError(f"a label is {int(wrong[0])}; {rule}: give it all classes, or the label to ignore")

    def predict(self, output: Tensor) -> Tensor:
        return output.argmax(-3)

    def predict_map(self, patches: Tensor, cls: Tensor, size: tuple[int, int]) -> Tensor:
        """Return class numbers (B, H, W) in bytes if they fit; by bands of rows: all scores could fill the memory."""
        scores, dtype = self.scores(self.normed(patches, cls), ALL), torch.uint8 if self.classes <= 256 else torch.int32
        rows = max(1, BAND_OUTPUTS // (scores[..., 0, 0].numel() * size[1]))
        bands = (slice(start, start + rows) for start in range(0, size[0], rows))
        return torch.cat([self.predict(resize_maps(scores, size, band=band)).to(dtype) for band in bands], dim=-2)

    def metrics(self) -> Confusion:
        return Confusion(self.classes, self.ignore, self.weight.device, self.weight.shape[:-2])


class DepthHead(DenseHead):
    """Metres at each pixel (..., B, H, W), from labels between `low` and `high`; others do not count.

    bins:
        As in the DINO protocol (and AdaBins before it), the Linear weighs this many depths evenly spaced from `low`
        to `high`; the weights are its outputs above 0, plus 0.1, normalised to sum 1. 0: the Linear gives the depth
        itself, as a share of the range.
    loss:
        `sig`, scale-invariant in logarithms, plus `gradient_weight` × `gradient_loss`; or `l1`, `l2`.
    options:
        `norm` and `seed`, as `DenseHead` has them.
    """

    metric, higher_is_better, maps = "rmse", False, 1
    gradient_weight, upsample = 0.5, 4
    """Bins are weighed at 4 times the grid of patches, and the depths upsampled from there to the labels' size:
    weighing at full size would take hundreds of numbers per pixel."""
    depths: Tensor

    def __init__(
        self, width: int, low: float, high: float, *, bins: int = 256, loss: DepthLoss = "sig", **options: Any
    ) -> None:
        super().__init__(width, bins or 1, **options)
        if not 0 < low < high or bins < 0 or bins == 1 or loss not in get_args(DepthLoss):
            rule = "depths need 0 < low < high, in metres, two bins or more, or 0 for plain regression; sig, l1 or l2"
            raise ArgumentError(f"low is {low}, high {high}, bins {bins}, loss {loss!r}; {rule}")
        self.low, self.high, self.bins, self.loss_name = low, high, bins, loss
        self.register_buffer("depths", torch.linspace(low, high, bins))
        if not bins:
            # Start at the middle of the range: random weights over thousands of channels would be metres off.
            nn.init.zeros_(self.weight)
            nn.init.constant_(self.bias, 0.5)

    def output(self, x: Tensor, size: tuple[int, int], heads: slice = ALL) -> Tensor:
        scores = self.scores(x, heads)
        if not self.bins:
            return resize_maps(self.low + (self.high - self.low) * scores[..., 0, :, :], size)
        rows, columns = scores.shape[-2:]
        weights = resize_maps(scores, (rows * self.upsample, columns * self.upsample)).relu()
        # One product gives numerator and denominator of the weighted mean; 0.1 is added to all weights afterwards.
        terms = torch.stack([self.depths, torch.ones_like(self.depths)])  # (2, n)
        sums = terms.expand(*weights.shape[:-3], *terms.shape) @ weights.flatten(-2) + 0.1 * terms.sum(1, keepdim=True)
        depth = sums[..., 0, :] / sums[..., 1, :]
        return resize_maps(depth.unflatten(-1, weights.shape[-2:]), size)

    def batch_loss(self, outputs: Sequence[Tensor], labels: Sequence[Tensor], total: Total = own_alone) -> Tensor:
        valid = [(each > self.low) & (each < self.high) for each in labels]
        if self.loss_name == "sig":
            errors = list(map(log_error, outputs, labels, valid))
            gradients = gradient_loss(errors, valid, total)
            return scale_invariant_loss(errors, valid, total) + self.gradient_weight * gradients
        errors = [torch.where(v, output - each, 0) for output, each, v in zip(outputs, labels, valid, strict=True)]
        errors = [each.abs() if self.loss_name == "l1" else each.square() for each in errors]
        return total(sum_pixels(errors)) / total(sum_pixels(valid)).clamp_min(1)

    def metrics(self) -> DepthErrors:
        return DepthErrors(self.low, self.high, self.weight.device, self.weight.shape[:-2])


def sum_pixels(groups: Iterable[Tensor]) -> Tensor:
    """Return the sum (...) over all pixels of maps (..., B, H, W), each of a size of its own."""
    first, *others = (each.sum(PIXELS) for each in groups)
    return sum(others, first)


def log_error(predicted: Tensor, depth: Tensor, valid: Tensor) -> Tensor:
    """Return the difference of logarithms (..., B, H, W), 0 where not valid. Depths are floored at a millimetre."""
    return torch.where(valid, predicted.clamp_min(1e-3).log() - depth.clamp_min(1e-3).log(), 0)


def scale_invariant_loss(errors: Sequence[Tensor], valid: Sequence[Tensor], total: Total = own_alone) -> Tensor:
    """Return √(variance + 0.15 mean²) of a `log_error` over all valid pixels of a batch (after Eigen et al. 2014).

    Where there are none it is a constant, 1e-6.
    """
    count = total(sum_pixels(valid)).clamp_min(1)
    mean = total(sum_pixels(errors)) / count
    # Deviations sum to 0, so the variance has no gradient by the mean. Of a part of them it would have one.
    deviations = (each - mean.detach()[..., None, None, None] for each in errors)
    squares = sum_pixels(torch.where(v, each, 0).square() for each, v in zip(deviations, valid, strict=True))
    variance = total(squares) / count
    # The gradient of a square root is infinite at 0: clamp first.
    return (variance + 0.15 * mean.square()).clamp_min(1e-12).sqrt()


def gradient_loss(errors: Sequence[Tensor], valid: Sequence[Tensor], total: Total = own_alone) -> Tensor:
    """Return how much a `log_error` changes from pixel to pixel, at four scales (MegaDepth, Li & Snavely 2018)."""
    loss = errors[0].new_zeros(())
    for step in (1, 2, 4, 8):
        strided = [(e[..., ::step, ::step], v[..., ::step, ::step]) for e, v in zip(errors, valid, strict=True)]
        down = ((e[..., 2:, :] - e[..., :-2, :]).abs() * (v[..., 2:, :] & v[..., :-2, :]) for e, v in strided)
        across = ((e[..., 2:] - e[..., :-2]).abs() * (v[..., 2:] & v[..., :-2]) for e, v in strided)
        count = total(sum_pixels(v for _, v in strided)).clamp_min(1)
        loss = loss + total(sum_pixels(down) + sum_pixels(across)) / count
    return loss


class DenseSweep:
    """K copies of a head, one for each learning rate, and their training history."""

    def __init__(self, head: DenseHead, rates: Sequence[float]) -> None:
        self.rates, self.stack = tuple(rates), head.stack(len(rates))
        self.heads = [copy.deepcopy(head).eval() for _ in rates]
        """Each as it was at its best validation score, in eval mode."""
        self.evaluated: list[int] = []
        """The steps after which the heads were scored."""
        self.scores: list[Sequence[dict[str, float]]] = []
        """Validation scores: for each of those steps, for each head."""
        self._best_ranks, self._best_steps = [-math.inf] * len(rates), [0] * len(rates)

    def backward(self, batch: Sequence[DenseBatch]) -> None:
        self.stack.train()  # scoring leaves them in eval mode
        normed = self.stack.normed_groups((patches.detach(), cls.detach()) for patches, cls, _ in batch)
        labels = [each.labels.detach() for each in batch]
        groups = [(x, (each.shape[-2], each.shape[-1])) for x, each in zip(normed, labels, strict=True)]
        for heads in self.stack.split_heads(*groups):
            # Heads share no parameters, so the sum of their losses gives each its own gradient.
            outputs = [self.stack.output(x, size, heads) for x, size in groups]
            self.stack.batch_loss(outputs, labels).sum().backward()

    def keep_best(self, step: int, scores: Sequence[dict[str, float]]) -> None:
        self.evaluated.append(step)
        self.scores.append(scores)
        for k, each in enumerate(scores):
            rank = each[self.stack.metric] * (1 if self.stack.higher_is_better else -1)
            if rank > self._best_ranks[k]:  # NaN never is
                head = self.stack.reshaped(itemgetter(k)).eval()
                self._best_ranks[k], self._best_steps[k], self.heads[k] = rank, step, head
        # The head with the best score after any step, and the first step after which it had it; the first of equals.
        self.best = self._best_ranks.index(max(self._best_ranks))
        self.head, self.best_step = self.heads[self.best], self._best_steps[self.best]


def polynomial(step: int, steps: int, power: float, warmup: int = 0) -> float:
    """Return the factor of the learning rate: (1 - step / steps) ** power, times a linear warm-up.

    >>> [polynomial(step, steps=4, power=1.0) for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return min(1.0, (step + 1) / max(1, warmup)) * (1 - step / steps) ** power


def fit_dense(
    heads: Sequence[DenseHead],
    train: Callable[[], Iterable[Sequence[Sequence[DenseBatch]]]],
    score: Callable[[Sequence[DenseHead]], Sequence[Sequence[dict[str, float]]]],
    *,
    rates: Sequence[float],
    steps: int,
    every: int | None = None,
    decay: float = 1e-4,
    power: float = 0.9,
    warmup: int = 0,
    progress: Callable[[int], object] = lambda steps: None,
) -> list[DenseSweep]:
    """Train a copy of each head for each rate with AdamW on the same images; keep each at its best on validation.

    Heads and batches are on one device.

    train:
        Starts a pass over at least `steps` batches. Each step has a batch for each head, with features of its own and
        labels that passed `DenseHead.check`: a group for each size of images. Passes must be equal for a result to
        repeat.
    score:
        Returns validation scores for stacks of heads: for each of `heads`, those of its copies, one for each rate.
    every:
        Score the heads after every so many steps, and after the last; None: after the last only.
    power:
        Of the polynomial schedule; 0.9 is DeepLab's and mmsegmentation's. DINOv2 used 1.0, with 1,500 steps of warm-up.
    progress:
        Called with 1 after each step.
    """
    if not rates or steps < 1 or (every is not None and every < 1):
        raise ArgumentError(f"{len(rates)} rates, {steps} steps, scored every {every}: at least one of each is needed")
    heads = [copy.deepcopy(head) for head in heads]
    if any(head.norm == "standardize" for head in heads):
        # In a pass of its own: the first training step needs the statistics.
        first = islice(train(), STATISTICS_BATCHES)
        moments = [
            [[head.moments(group) for group in batch] for head, batch in zip(heads, batches, strict=True)]
            for batches in first
        ]
        for i, head in enumerate(heads):
            head.use_moments(group for step in moments for group in step[i])
    sweeps = [DenseSweep(head, rates) for head in heads]
    optimizer = _make_optimizer(sweeps, len(rates), decay)
    done = 0
    for batches in islice(train(), steps):
        optimizer.zero_grad(set_to_none=False)  # gradients are views of those of the stacks
        for sweep, batch in zip(sweeps, batches, strict=True):
            sweep.backward(batch)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * polynomial(done, steps, power, warmup)
        optimizer.step()
        done += 1
        if done == steps or (every is not None and done % every == 0):
            for sweep, scores in zip(sweeps, score([sweep.stack for sweep in sweeps]), strict=True):
                sweep.keep_best(done, scores)
        progress(1)
    if done < steps:
        raise ArgumentError(f"the training batches ended after {done} of {steps} steps: repeat them, or take fewer")
    return sweeps


def _make_optimizer(sweeps: Sequence[DenseSweep], rates: int, decay: float) -> torch.optim.AdamW:
    """Make one optimizer for all stacks with a parameter group for each rate, of views of the stacks' parameters."""
    groups: list[dict[str, list[Tensor]]] = [{"params": []} for _ in range(rates)]
    for parameter in (parameter for sweep in sweeps for parameter in sweep.stack.parameters()):
        parameter.grad = torch.zeros_like(parameter)
        for group, part, gradient in zip(groups, parameter.detach(), parameter.grad, strict=True):
            part.grad = gradient
            group["params"].append(part)
    return torch.optim.AdamW(groups, lr=0.0, weight_decay=decay, fused=True)


@torch.no_grad()
def evaluate(heads: DenseHead, batches: Iterable[DenseBatch]) -> list[dict[str, float]]:
    """Return the scores of each head of a stack, now in eval mode, over whole images at the size of their labels."""
    metrics = heads.eval().metrics()
    for patches, cls, labels in batches:
        for predicted, part in heads.predictions(patches, cls, (labels.shape[-2], labels.shape[-1])):
            metrics.update(predicted, labels, part)
    return [each.compute() for each in metrics.each()]
