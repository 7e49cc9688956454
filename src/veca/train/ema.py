"""Exponential moving average (EMA) of a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from veca.train.parallel import local_part, shard_like


class Ema:
    """A moving average of a model's parameters; does nothing where `decay` is None."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.model, self.decay = model, decay
        self.averages = [local_part(p).detach().clone() for p in model.parameters()] if decay else []

    def update(self, skip: Tensor) -> None:
        """Average in the current weights, unless `skip`, a scalar on the device, is 1."""
        if self.decay:
            # average += (1 - decay) · (weights - average); with skip = 1 nothing is added, without a host sync.
            change = torch._foreach_sub([local_part(p).detach() for p in self.model.parameters()], self.averages)
            torch._foreach_mul_(change, (1 - self.decay) * (1 - skip))
            torch._foreach_add_(self.averages, change)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model has the averages as its parameters while the block runs."""
        if not self.decay:
            yield
            return
        parameters = [local_part(p) for p in self.model.parameters()]
        trained = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            torch._foreach_copy_(parameters, self.averages)
            try:
                yield
            finally:
                torch._foreach_copy_(parameters, trained)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Averages by parameter name, sharded as the parameters are."""
        for (name, parameter), average in zip(self.model.named_parameters(), self.averages, strict=bool(self.decay)):
            yield name, shard_like(average, parameter)
