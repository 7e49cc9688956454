"""The tensors of a run: how they come into a checkpoint and out of it, whole, however they are shared out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from veca.teachers import Standardized, Teacher
from veca.train.normuon import local
from veca.train.optimizers import Optimizers
from veca.train.parallel import fill, whole

Files = dict[str, dict[str, Tensor]]
"""Tensors by name, by file."""
_STATISTICS = ("means", "deviations")


class Ema:
    """A running mean of a model's parameters, or nothing where there is no `decay`."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.model, self.decay = model, decay
        self.values = [local(p).detach().clone() for p in model.parameters()] if decay else []

    def update(self, skip: Tensor) -> None:
        """One step on; none where `skip`, a number on the device, is 1."""
        if self.decay:
            way = torch._foreach_sub([local(p).detach() for p in self.model.parameters()], self.values)
            torch._foreach_mul_(way, (1 - self.decay) * (1 - skip))
            torch._foreach_add_(self.values, way)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the mean for its parameters while the block runs: those are what people get."""
        if not self.decay:
            yield
            return
        now = [local(p) for p in self.model.parameters()]
        kept = [p.detach().clone() for p in now]
        with torch.no_grad():
            torch._foreach_copy_(now, self.values)
            try:
                yield
            finally:
                torch._foreach_copy_(now, kept)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        for (name, parameter), value in zip(self.model.named_parameters(), self.values, strict=bool(self.decay)):
            yield name, _shared_as(value, parameter)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole, on the host. What is shared out is put together by all processes: every one must ask."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


class Watch:
    """Counts steps that were skipped, on the device; the host looks without waiting, and so a little late."""

    def __init__(self, device: torch.device, total: int = 0) -> None:
        self.counts = torch.tensor([0, total, 0], dtype=torch.int32, device=device)  # in a row, in all, most in a row
        self._seen = torch.tensor([0, total, 0], dtype=torch.int32, pin_memory=device.type == "cuda")

    def update(self, skip: Tensor) -> None:
        row, total, most = self.counts.unbind()
        row = (row + 1) * skip.int()
        self.counts = torch.stack([row, total + skip.int(), torch.maximum(most, row)])
        self._seen.copy_(self.counts, non_blocking=True)

    def seen(self) -> tuple[int, int]:
        """Steps skipped in all, and most in a row."""
        _, total, most = self._seen.tolist()
        return total, most


def tensors_of(model: nn.Module, optimizers: Optimizers, ema: Ema, teacher: Teacher | Standardized) -> Files:
    """All that a checkpoint holds, as `weights_of`."""
    files: Files = {"model": weights_of(model), "optimizers": {}}
    for kind, optimizer in zip(Optimizers._fields, optimizers, strict=True):
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                files["optimizers"][f"{kind}/{name}/{key}"] = whole(value)
    if ema.decay:
        files["ema"] = {name: whole(value) for name, value in ema.named()}
    if isinstance(teacher, Standardized):
        files["teacher"] = {name: whole(getattr(teacher, name)) for name in _STATISTICS}
    return files


def restore(
    files: Mapping[str, Mapping[str, Tensor]],
    model: nn.Module,
    optimizers: Optimizers,
    ema: Ema,
    teacher: Teacher | Standardized,
) -> None:
    """The other way round."""
    for name, tensor in model.state_dict().items():
        fill(tensor, files["model"][name])
    parameters, by_kind = dict(model.named_parameters()), dict(zip(Optimizers._fields, optimizers, strict=True))
    for key, value in files["optimizers"].items():
        kind, name, entry = key.split("/")
        parameter = parameters[name]
        if value.shape == parameter.shape:  # shared out as the parameter is
            kept = torch.empty_like(parameter, dtype=value.dtype)
            fill(kept, value)
        else:
            kept = value.to(parameter.device)
        by_kind[kind].state[parameter][entry] = kept
    for name, value in ema.named():
        fill(value, files["ema"][name])
    if isinstance(teacher, Standardized):
        for name in _STATISTICS:
            getattr(teacher, name).copy_(files["teacher"][name])


def _shared_as(part: Tensor, parameter: Tensor) -> Tensor:
    """A process's part of what is shared out as `parameter` is, as the tensor it is a part of."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, shape=parameter.shape, stride=parameter.stride())
