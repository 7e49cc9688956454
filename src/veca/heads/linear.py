"""Linear classifiers on features: all pairs of learning rate and weight decay trained at once, the best kept.

The heads of a sweep are one parameter and see the same batches: a step costs one matrix product forward and one back
for all of them. Each ends where `torch.optim.SGD` with a cosine schedule would have brought it alone.

Shapes: N examples, D width, C classes, K heads (rates × decays), B examples in a batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from veca.errors import ArgumentError
from veca.heads.metrics import average_precision, top_k_hits

MAX_CHUNK = 2**24
"""Scores, or numbers of features, that are computed at a time."""
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
DECAYS = (0.0, 1e-5, 1e-4)
"""Default learning rates and weight decays of a sweep."""


@dataclass(frozen=True)
class LinearHead:
    """Scores (N, C) = weight · (features - mean) / deviation + bias."""

    weight: Tensor
    """(C, D)"""
    bias: Tensor
    """(C)"""
    mean: Tensor
    """(D); 0 where features are taken as they are."""
    deviation: Tensor
    """(D); 1 where features are taken as they are."""

    def __call__(self, features: Tensor) -> Tensor:
        features = features.to(self.weight.device).float()
        return F.linear((features - self.mean) / self.deviation, self.weight, self.bias)

    def scores(self, features: Tensor) -> Tensor:
        """Return the scores of any number of features, which may be on another device, computed in chunks."""
        return torch.cat([self(chunk) for chunk in features.split(_chunk_rows(features, len(self.bias)))])


class LinearSweep:
    """K heads with equal initial weights, one for each pair of rate and decay, and their training history."""

    scores: Tensor
    """(epochs, K): validation score after each epoch, top-1 or mean average precision."""

    def __init__(self, pairs: Sequence[tuple[float, float]], start: Tensor, mean: Tensor, deviation: Tensor) -> None:
        self.pairs, self.mean, self.deviation = pairs, mean, deviation
        self.rate, self.decay = torch.tensor(pairs, device=start.device).T[:, :, None]  # (K, 1) each
        self.weight = start.repeat(len(pairs), 1, 1)  # (K, C, D)
        self.bias = start.new_zeros(len(pairs), len(start))
        self.weight_momentum, self.bias_momentum = torch.zeros_like(self.weight), torch.zeros_like(self.bias)
        # Each head after its best epoch on validation, and its score there (K).
        self.weights, self.biases = self.weight.clone(), self.bias.clone()
        self.best_scores = self.weight.new_full((len(pairs),), -1.0, dtype=torch.float64)

    @property
    def best(self) -> int:
        """The head with the highest score after any epoch; the first of equals."""
        return int(self.best_scores.cpu().argmax())

    @property
    def best_epoch(self) -> int:
        """The first epoch, from 1, after which the best head had its best score."""
        return 1 + int(self.scores[:, self.best].argmax())

    @property
    def head(self) -> LinearHead:
        """The best head, as it was after its best epoch."""
        return LinearHead(self.weights[self.best], self.biases[self.best], self.mean, self.deviation)

    def step(self, x: Tensor, labels: Tensor, schedule: float, momentum: float) -> None:
        """Take an SGD step on a batch (B, D) at `schedule` × each head's rate."""
        # Gradients by hand: autograd would hold the logits of all heads, and each momentum update is then one product.
        x = (x.float() - self.mean) / self.deviation
        logits = torch.addmm(self.bias.flatten(), x, self.weight.flatten(0, 1).T)
        gradient = _loss_gradient(logits.unflatten(1, self.bias.shape), labels)
        self.weight_momentum.flatten(0, 1).addmm_(gradient.flatten(1).T, x, beta=momentum)
        self.weight_momentum.addcmul_(self.weight, self.decay[:, :, None])
        self.bias_momentum.mul_(momentum).add_(gradient.sum(0)).addcmul_(self.bias, self.decay)
        self.weight.addcmul_(self.weight_momentum, self.rate[:, :, None], value=-schedule)
        self.bias.addcmul_(self.bias_momentum, self.rate, value=-schedule)

    def validate(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return top-1 or mean average precision of each head (K); keep the heads that score higher than before."""
        scores = self._validation_scores(features, labels.to(self.mean.device))
        better = scores > self.best_scores
        self.best_scores = torch.where(better, scores, self.best_scores)
        self.weights = torch.where(better[:, None, None], self.weight, self.weights)
        self.biases = torch.where(better[:, None], self.bias, self.biases)
        return scores

    def _validation_scores(self, features: Tensor, labels: Tensor) -> Tensor:
        heads, classes = self.bias.shape
        stacked = LinearHead(self.weight.flatten(0, 1), self.bias.flatten(), self.mean, self.deviation)
        rows = _chunk_rows(features, heads * classes)
        chunks = (stacked(chunk).unflatten(1, (heads, classes)) for chunk in features.split(rows))
        if labels.ndim == 2:
            scores = torch.cat(list(chunks)).flatten(1)
            return average_precision(scores, labels.repeat(1, heads)).unflatten(0, (heads, classes)).nanmean(1)
        hits = torch.zeros(heads, dtype=torch.int64, device=labels.device)
        for scores, own in zip(chunks, labels.split(rows), strict=True):
            # argmax alone would not do: a NaN would count as a hit of its class.
            highest, predicted = scores.max(-1)
            hits += ((predicted == own[:, None]) & ~highest.isnan()).sum(0)
        return hits.double() / len(labels)


@torch.no_grad()
def train_linear(
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    *,
    classes: int,
    rates: Sequence[float],
    decays: Sequence[float],
    epochs: int,
    batch: int = 128,
    momentum: float = 0.9,
    seed: int = 0,
    standardize: bool = False,
    device: torch.device | str | None = None,
    progress: Callable[[int], object] = lambda epochs: None,
) -> LinearSweep:
    """Train a head for each rate × decay and score all of them on validation after every epoch.

    `train` and `validation` are features (N, D) and labels: class numbers (N), or for several classes per example
    (N, C) of 1, 0 and, for what does not count, -1. The loss is softmax or sigmoid cross-entropy, the score top-1 or
    mean average precision. The rate follows a half cosine, step by step, to 0. Decay is the L2 of SGD, on weights and
    biases. Features may be on any device and of any float type: a batch at a time is moved to `device` (None: that of
    the features) as float32.

    seed:
        Of the initial weights, equal for all heads, and of the order of the examples.
    standardize:
        Bring each channel to mean 0 and deviation 1 by statistics of the training features.
    progress:
        Called with 1 after each epoch.
    """
    if not rates or not decays or min(epochs, batch) < 1:
        counts = f"{len(rates)} rates, {len(decays)} decays, {epochs} epochs, batch {batch}"
        raise ArgumentError(f"{counts}: at least one of each is needed")
    _check_labels("training", *train, classes)
    _check_labels("validation", *validation, classes)
    features, width = train[0], train[0].shape[1]
    if width != (other := validation[0].shape[1]):
        raise ArgumentError(f"training features are {width} wide, validation ones {other}: use one model for both")
    if validation[1].ndim == 2 and not (validation[1] > 0).any():
        raise ArgumentError("no validation example has any class: there is no average precision to select by")
    device = torch.device(device) if device is not None else features.device
    plain = torch.zeros(width, device=device), torch.ones(width, device=device)
    mean, deviation = _channel_statistics(features, device) if standardize else plain
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers for every device
    pairs = tuple((float(rate), float(decay)) for rate in rates for decay in decays)
    start = torch.randn(classes, width, generator=generator).to(device) * 0.01  # biases start at 0
    sweep = LinearSweep(pairs, start, mean, deviation)
    scores, batch = [], min(batch, len(features))
    step, steps = 0, epochs * math.ceil(len(features) / batch)
    for _ in range(epochs):
        for rows in torch.randperm(len(features), generator=generator).split(batch):
            x, y = (tensor.index_select(0, rows.to(tensor.device)).to(device) for tensor in train)
            schedule = (1 + math.cos(math.pi * step / steps)) / 2
            sweep.step(x, y, schedule, momentum)
            step += 1
        scores.append(sweep.validate(*validation))
        progress(1)
    sweep.scores = torch.stack(scores).cpu()
    return sweep


@torch.no_grad()
def score(head: LinearHead, features: Tensor, labels: Tensor, points: Literal["all", "11"] = "all") -> dict[str, float]:
    """Return `top1` and `top5` of a head for labels (N), or `map` for labels (N, C).

    For `points` see `average_precision`.
    """
    _check_labels("these", features, labels, len(head.bias))
    scores, labels = head.scores(features), labels.to(head.bias.device)
    if labels.ndim == 2:
        return {"map": float(average_precision(scores, labels, points).nanmean())}
    return {f"top{k}": float(top_k_hits(scores, labels, k).double().mean()) for k in (1, 5)}


@torch.no_grad()
def score_valid_labels(head: LinearHead, features: Tensor, valid: Tensor) -> float:
    """Return top-1 where examples have any number of valid labels, as in ImageNet-ReaL; those without do not count.

    `valid` (N, C) is true for each valid label.
    """
    n, c = len(features), len(head.bias)
    if tuple(valid.shape) != (n, c) or not valid.any():
        given = f"valid labels are {tuple(valid.shape)}, {int(valid.sum())} of them true"
        raise ArgumentError(f"{given}; {n} features and {c} classes need ({n}, {c}) and a true one")
    scores, valid = head.scores(features), valid.to(head.bias.device)
    hits = valid.gather(1, scores.argmax(1, keepdim=True))[:, 0] & ~scores.isnan().any(1)
    return float(hits.sum().double() / valid.any(1).sum())


def _loss_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient (B, K, C) of the mean loss of each head, from logits (B, K, C) and labels (B) or (B, C)."""
    if labels.ndim == 1:
        target = (labels[:, None] == torch.arange(logits.shape[-1], device=logits.device)).float()[:, None]
        return (logits.log_softmax(-1).exp() - target) / len(logits)
    counted = (labels >= 0).float()[:, None]
    target = labels.clamp_min(0).float()[:, None]  # -1, which does not count, is masked anyway
    return (logits.sigmoid() - target) * counted / counted.sum().clamp_min(1)


def _channel_statistics(features: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each channel (D); the deviation is 1 for a channel constant up to rounding."""
    rows = _chunk_rows(features, 1)
    mean = sum(chunk.to(device).double().sum(0) for chunk in features.split(rows)) / len(features)
    squares = sum((chunk.to(device).double() - mean).square().sum(0) for chunk in features.split(rows))
    deviation = (squares / len(features)).sqrt()
    deviation = torch.where(deviation > 1e-6 * mean.abs(), deviation, 1.0)
    return mean.float(), deviation.float()


def _chunk_rows(features: Tensor, scores: int) -> int:
    return max(1, MAX_CHUNK // max(scores, features.shape[1]))


def _check_labels(name: str, features: Tensor, labels: Tensor, classes: int) -> None:
    if features.ndim != 2 or not len(features) or tuple(labels.shape) not in ((n := len(features),), (n, classes)):
        given = f"{name} features are {tuple(features.shape)} and labels {tuple(labels.shape)}"
        raise ArgumentError(f"{given}; they must be (N, D) and (N) or (N, {classes}), N at least 1")
    low, high = int(labels.min()), int(labels.max())
    allowed = (-1, 1) if labels.ndim == 2 else (0, classes - 1)
    if low < allowed[0] or high > allowed[1]:
        raise ArgumentError(f"{name} labels go from {low} to {high}; they must be within {allowed[0]}…{allowed[1]}")
    if not all(chunk.isfinite().all() for chunk in features.split(_chunk_rows(features, 1))):
        raise ArgumentError(f"some {name} features are not finite: check the model that computed them")
