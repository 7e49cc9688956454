"""Training of dense heads on a stream of features, one head per learning rate, and their scores.

Features of a dense task are too many to cache, so batches come as the backbone computes them; the heads of all rates
learn from the same pass in one computation. Each ends where it would have ended alone.

Shapes: B images, D width of the features, h × w patches, H × W pixels of the labels, K heads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from veca.errors import ArgumentError
from veca.heads.dense import DenseBatch, DenseHead

Batches: TypeAlias = Callable[[], Iterable[DenseBatch]]
STATISTICS_BATCHES = 64
"""At most this many batches give the statistics of a head that standardizes."""


@dataclass(frozen=True)
class DenseSweep:
    """K trained heads, one for each learning rate, and their training history."""

    rates: tuple[float, ...]
    heads: tuple[DenseHead, ...]
    """Each as it was at its best validation score, in eval mode."""
    losses: Tensor
    """(steps, K): loss of each training batch."""
    evaluated: tuple[int, ...]
    """The steps after which the heads were scored."""
    scores: tuple[tuple[dict[str, float], ...], ...]
    """Validation scores: for each of those steps, for each head."""

    @property
    def best(self) -> int:
        """The head with the best score after any step; the first of equals."""
        ranks = [max(_rank(head, scores[k]) for scores in self.scores) for k, head in enumerate(self.heads)]
        return ranks.index(max(ranks))

    @property
    def best_step(self) -> int:
        """The first step after which the best head had its best score."""
        ranks = [_rank(self.head, scores[self.best]) for scores in self.scores]
        return self.evaluated[ranks.index(max(ranks))]

    @property
    def best_scores(self) -> dict[str, float]:
        """Scores of the best head at its best step."""
        return self.scores[self.evaluated.index(self.best_step)][self.best]

    @property
    def head(self) -> DenseHead:
        return self.heads[self.best]


def polynomial(step: int, steps: int, power: float, warmup: int = 0) -> float:
    """Return the factor of the learning rate: (1 - step / steps) ** power, times a linear warm-up.

    >>> [polynomial(step, steps=4, power=1.0) for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return min(1.0, (step + 1) / max(1, warmup)) * (1 - step / steps) ** power


def fit_dense(
    head: DenseHead, train: Batches, validation: Batches, *, device: torch.device | str = "cpu", **options: Any
) -> DenseSweep:
    """Train a copy of `head` for each rate with AdamW on the same batches; keep each at its best on validation.

    `train` and `validation` each start a new pass over their batches; passes must be equal for a result to repeat.
    A pass of `train` must last for `steps` batches. `options` are those of `fit_many`.
    """

    def checked() -> Iterator[list[DenseBatch]]:
        for batch in train():
            head.check(batch.labels)
            yield [batch]

    (sweep,) = fit_many(
        [head], checked, lambda stacks: [evaluate(stacks[0], validation(), device)], device=device, **options
    )
    return sweep


def fit_many(
    heads: Sequence[DenseHead],
    train: Callable[[], Iterable[Sequence[DenseBatch]]],
    score: Callable[[Sequence[DenseHead]], Sequence[Sequence[dict[str, float]]]],
    *,
    rates: Sequence[float],
    steps: int,
    every: int | None = None,
    decay: float = 1e-4,
    power: float = 0.9,
    warmup: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], object] = lambda done, steps: None,
) -> list[DenseSweep]:
    """`fit_dense` for several heads in one pass over the images, each head with features of its own.

    train:
        Yields for every step a batch for each head, with labels that passed `DenseHead.check`.
    score:
        Returns validation scores for stacks of heads: for each of `heads`, those of its copies, one for each rate.
    every:
        Score the heads after every so many steps, and after the last; None: after the last only.
    power:
        Of the polynomial schedule; 0.9 is DeepLab's and mmsegmentation's. DINOv2 used 1.0, with 1,500 steps of warm-up.
    progress:
        Called with the number of steps done and of all steps.
    """
    if not rates or steps < 1 or (every is not None and every < 1):
        raise ArgumentError(f"{len(rates)} rates, {steps} steps, scored every {every}: at least one of each is needed")
    heads = [copy.deepcopy(head).to(device) for head in heads]
    if any(head.norm == "standardize" for head in heads):
        _set_statistics(heads, train())
    fits = [_Fit(head, rates) for head in heads]
    optimizer = _optimizer(fits, len(rates), decay)
    evaluated: list[int] = []
    done = 0
    for batches in islice(train(), steps):
        optimizer.zero_grad(set_to_none=False)  # gradients are views of those of the stacks
        for fit, batch in zip(fits, batches, strict=True):
            fit.backward(batch, device)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * polynomial(done, steps, power, warmup)
        optimizer.step()
        done += 1
        if done == steps or (every is not None and done % every == 0):
            evaluated.append(done)
            for fit, scores in zip(fits, score([fit.heads for fit in fits]), strict=True):
                fit.keep_best(scores)
        progress(done, steps)
    if done < steps:
        raise ArgumentError(f"the training batches ended after {done} of {steps} steps: repeat them, or take fewer")
    return [fit.sweep(evaluated) for fit in fits]


def _set_statistics(heads: Sequence[DenseHead], steps: Iterable[Sequence[DenseBatch]]) -> None:
    """Compute the statistics of heads that standardize, in a pass of its own: the first training step needs them."""
    steps = islice(steps, STATISTICS_BATCHES)
    moments = [[head.moments(batch) for head, batch in zip(heads, batches, strict=True)] for batches in steps]
    for i, head in enumerate(heads):
        head.use_moments(step[i] for step in moments)


def _optimizer(fits: Sequence[_Fit], rates: int, decay: float) -> torch.optim.AdamW:
    """Make one optimizer for all stacks with a parameter group for each rate, of views of the stacks' parameters."""
    groups: list[dict[str, list[Tensor]]] = [{"params": []} for _ in range(rates)]
    for parameter in (parameter for fit in fits for parameter in fit.heads.parameters()):
        parameter.grad = torch.zeros_like(parameter)
        for group, part, gradient in zip(groups, parameter.detach(), parameter.grad, strict=True):
            part.grad = gradient
            group["params"].append(part)
    return torch.optim.AdamW(groups, lr=0.0, weight_decay=decay, fused=True)


class _Fit:
    """A stack of copies of one head, one for each rate, and each copy as it was at its best."""

    def __init__(self, head: DenseHead, rates: Sequence[float]) -> None:
        self.rates = tuple(rates)
        self.heads = head.stack(len(rates))
        self.best, self.best_ranks = [copy.deepcopy(head) for _ in rates], [-math.inf] * len(rates)
        self.losses: list[Tensor] = []
        self.scores: list[tuple[dict[str, float], ...]] = []

    def backward(self, batch: DenseBatch, device: torch.device | str) -> None:
        self.heads.train()  # scoring leaves them in eval mode
        patches, cls, labels = (tensor.detach().to(device) for tensor in batch)
        x, size, losses = self.heads.normed(patches, cls), (labels.shape[-2], labels.shape[-1]), []
        for heads in self.heads.groups(x, size):
            loss = self.heads.loss(self.heads.output(x, size, heads), labels)
            loss.sum().backward()  # heads share no parameters, so the sum gives each its own gradient
            losses.append(loss.detach())
        self.losses.append(torch.cat(losses))

    def keep_best(self, scores: Sequence[dict[str, float]]) -> None:
        self.scores.append(tuple(scores))
        for k, rank in enumerate(_rank(self.heads, each) for each in scores):
            if rank > self.best_ranks[k]:
                self.best_ranks[k], self.best[k] = rank, self.heads.part(k)

    def sweep(self, evaluated: Sequence[int]) -> DenseSweep:
        heads = tuple(head.eval() for head in self.best)
        return DenseSweep(self.rates, heads, torch.stack(self.losses).cpu(), tuple(evaluated), tuple(self.scores))


@torch.no_grad()
def evaluate(
    heads: DenseHead, batches: Iterable[DenseBatch], device: torch.device | str = "cpu"
) -> list[dict[str, float]]:
    """Return the scores of each head of a stack, now in eval mode, over whole images at the size of their labels."""
    metrics = heads.eval().metrics(device)
    for batch in batches:
        patches, cls, labels = (tensor.to(device) for tensor in batch)
        for predicted, part in heads.predictions(patches, cls, (labels.shape[-2], labels.shape[-1])):
            metrics.update(predicted, labels, part)
    return [each.compute() for each in metrics.each()]


def _rank(head: DenseHead, scores: dict[str, float]) -> float:
    """Return the head's metric, negated where lower is better; NaN ranks last."""
    value = scores[head.metric]
    return -math.inf if math.isnan(value) else value if head.higher_is_better else -value
