"""Training of dense heads on a stream of features, and their scores.

Features of a dense task are too many to keep, so they come in batches as the backbone gives them; heads of several
learning rates learn from the same pass, as one computation. Each ends where it would have come to alone.

Shapes: B images, D width of the features, h × w patches, H × W pixels of the labels, K heads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from veca.errors import ArgumentError
from veca.heads.dense import DenseBatch, DenseHead

STATISTICS_BATCHES = 64
"""At most so many batches make the statistics of a head that standardizes."""


@dataclass(frozen=True)
class DenseSweep:
    """K trained heads, one for each learning rate, and how they came along."""

    rates: tuple[float, ...]
    heads: tuple[DenseHead, ...]
    """Each as it was when its metric on validation was best, ready to predict."""
    losses: Tensor
    """(steps, K): of each training batch."""
    evaluated: tuple[int, ...]
    """The steps after which the heads were scored."""
    scores: tuple[tuple[dict[str, float], ...], ...]
    """What the meters gave on validation: for each of those steps, for each head."""

    def _worth(self, scored: dict[str, float]) -> float:
        return _worth(self.heads[0], scored)

    @property
    def best(self) -> int:
        """The head whose metric was best after any step; of equal ones the first."""
        worth = [max(self._worth(at[k]) for at in self.scores) for k in range(len(self.rates))]
        return worth.index(max(worth))

    @property
    def best_step(self) -> int:
        """The first step after which the best head had its best score."""
        worth = [self._worth(at[self.best]) for at in self.scores]
        return self.evaluated[worth.index(max(worth))]

    @property
    def best_scores(self) -> dict[str, float]:
        """Of the best head at its best step."""
        return self.scores[self.evaluated.index(self.best_step)][self.best]

    @property
    def head(self) -> DenseHead:
        return self.heads[self.best]


def polynomial(step: int, steps: int, power: float, warmup: int = 0) -> float:
    """The share of the rate at a step: (1 - step / steps) ** power, times a straight rise over the first `warmup`.

    >>> [polynomial(step, steps=4, power=1.0) for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return min(1.0, (step + 1) / max(1, warmup)) * (1 - step / steps) ** power


def fit_dense(
    head: DenseHead,
    train: Callable[[], Iterable[DenseBatch]],
    validation: Callable[[], Iterable[DenseBatch]],
    *,
    rates: Sequence[float],
    steps: int,
    every: int | None = None,
    decay: float = 1e-4,
    power: float = 0.9,
    warmup: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> DenseSweep:
    """Train a copy of `head` for each rate with AdamW on the same batches; keep each at its best on validation.

    `train` and `validation` are called for a fresh pass over their batches, which must be the same pass each time for
    the same result. One of `train` must last for `steps` batches. The rest is as in `fit_many`.
    """
    (found,) = fit_many(
        [head], lambda: ([batch] for batch in train()), lambda stacks: [evaluate(stacks[0], validation(), device)],
        rates=rates, steps=steps, every=every, decay=decay, power=power, warmup=warmup, device=device,
        progress=progress,
    )  # fmt: skip
    return found


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
    checked: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> list[DenseSweep]:
    """`fit_dense` for several heads in one pass over the pictures, as each has features of its own from them.

    train:
        Gives, for every step, a batch for each head.
    score:
        What the meters give on validation for stacks of heads: for each of `heads` its copies, one for each rate.
    every:
        Score the heads after every so many steps, and after the last; None: after the last alone.
    power:
        Of the polynomial schedule; 0.9 is DeepLab's and mmsegmentation's. DINOv2 used 1.0, with 1,500 steps of warm-up.
    checked:
        Labels have been through `DenseHead.check`: it waits for those that are on a GPU.
    progress:
        Called with the steps done and all of them.
    """
    if not rates or steps < 1 or (every is not None and every < 1):
        raise ArgumentError(
            f"{len(rates)} rates, {steps} steps, scored every {every}: there must be one at least of each"
        )
    heads = [copy.deepcopy(head).to(device) for head in heads]
    if any(head.norm == "standardize" for head in heads):
        moments = [
            [head.moments(batch) for head, batch in zip(heads, batches, strict=True)]
            for batches in islice(train(), STATISTICS_BATCHES)
        ]
        for i, head in enumerate(heads):
            head.use_moments(each[i] for each in moments)
    fits = [_Fit(head, rates) for head in heads]
    optimizer = _optimizer(fits, len(rates), decay)
    evaluated: list[int] = []
    done = 0
    for batches in islice(train(), steps):
        optimizer.zero_grad(set_to_none=False)  # the stacks have the same ones
        for fit, batch in zip(fits, batches, strict=True):
            if not checked:
                fit.heads.check(batch[2])
            fit.backward(batch, device)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * polynomial(done, steps, power, warmup)
        optimizer.step()
        done += 1
        if done == steps or (every is not None and done % every == 0):
            evaluated.append(done)
            for fit, scored in zip(fits, score([fit.heads for fit in fits]), strict=True):
                fit.keep(scored)
        if progress is not None:
            progress(done, steps)
    if done < steps:
        raise ArgumentError(f"the training batches ended after {done} of {steps} steps: repeat them, or take fewer")
    return [fit.sweep(evaluated) for fit in fits]


def _optimizer(fits: Sequence[_Fit], rates: int, decay: float) -> torch.optim.AdamW:
    """One for all heads of all stacks, with a group for each rate: its parameters are parts of those of the stacks."""
    groups: list[dict[str, list[Tensor]]] = [{"params": []} for _ in range(rates)]
    for parameter in (parameter for fit in fits for parameter in fit.heads.parameters()):
        parameter.grad = torch.zeros_like(parameter)
        for group, part, gradient in zip(groups, parameter.detach(), parameter.grad, strict=True):
            part.grad = gradient
            group["params"].append(part)
    return torch.optim.AdamW(groups, lr=0.0, weight_decay=decay, fused=True)


class _Fit:
    """Copies of a head, one for each rate, as they learn, and each as it was at its best."""

    def __init__(self, head: DenseHead, rates: Sequence[float]) -> None:
        self.rates = tuple(rates)
        self.heads = head.stack(len(rates)).train()
        self.best, self.worth = [copy.deepcopy(head) for _ in rates], [-math.inf] * len(rates)
        self.losses: list[Tensor] = []
        self.scores: list[tuple[dict[str, float], ...]] = []

    def backward(self, batch: DenseBatch, device: torch.device | str) -> None:
        patches, cls, labels = (tensor.detach().to(device) for tensor in batch)
        x, size, now = self.heads.normed(patches, cls), _size(labels), []
        for heads in self.heads.groups(x, size):
            loss = self.heads.loss(self.heads.output(x, size, heads), labels)
            loss.sum().backward()
            now.append(loss.detach())
        self.losses.append(torch.cat(now))

    def keep(self, scores: Sequence[dict[str, float]]) -> None:
        self.scores.append(tuple(scores))
        for k, scored in enumerate(scores):
            if _worth(self.heads, scored) > self.worth[k]:
                self.worth[k], self.best[k] = _worth(self.heads, scored), self.heads.part(k)

    def sweep(self, evaluated: Sequence[int]) -> DenseSweep:
        ready = tuple(head.eval() for head in self.best)
        losses = torch.stack(self.losses).cpu()
        return DenseSweep(self.rates, ready, losses, tuple(evaluated), tuple(self.scores))


@torch.no_grad()
def evaluate(
    heads: DenseHead, batches: Iterable[DenseBatch], device: torch.device | str = "cpu"
) -> list[dict[str, float]]:
    """Scores of each head of a stack over whole images at the size of their labels, from one pass over the features."""
    meter, mode = heads.meter(device), heads.training
    heads.eval()
    for batch in batches:
        patches, cls, labels = (tensor.to(device) for tensor in batch)
        for said, those in heads.predictions(patches, cls, _size(labels)):
            meter.update(said, labels, those)
    heads.train(mode)
    return [each.compute() for each in meter.each()]


def _size(labels: Tensor) -> tuple[int, int]:
    return labels.shape[-2], labels.shape[-1]


def _worth(head: DenseHead, scored: dict[str, float]) -> float:
    """The metric, turned so that more is better; what is not a number is worth nothing."""
    value = scored[head.metric]
    return -math.inf if math.isnan(value) else value if head.higher_is_better else -value
