"""One process or many: torchrun starts them, PyTorch connects them."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from veca.errors import ArgumentError, VecaError
from veca.model import Veca
from veca.utils.device import choose_device
from veca.utils.files import check_utf8, check_writable, locked

SILENCE, PATIENCE = datetime.timedelta(minutes=20), datetime.timedelta(days=7)
"""How long a process waits for the others before it takes one for lost; the same where one works for all."""


class World(NamedTuple):
    """Which of how many processes this is, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


@contextlib.contextmanager
def processes(device: str = "auto") -> Iterator[World]:
    """The processes torchrun started, connected while the block runs; this one alone without it.

    `device` is "cpu", "cuda" (each process takes its own), or "auto".
    """
    rank, size, local = (int(os.environ.get(name, default)) for name, default in _FROM_TORCHRUN)
    if size > 1 and device not in ("auto", "cpu", "cuda"):
        raise ArgumentError(f"device {device!r} for {size} processes: each takes its own, so name cpu, cuda or auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    own = torch.device("cuda", local) if device == "cuda" and torch.cuda.is_available() else choose_device(device)
    if own.type == "cuda":
        if own.index >= torch.cuda.device_count():
            raise ArgumentError(
                f"{torch.cuda.device_count()} GPUs for process {local} of this machine; "
                "start as many processes as there are GPUs: torchrun --nproc-per-node=gpu"
            )
        torch.cuda.set_device(own)
    if size == 1:
        yield World(rank, size, own)
        return
    # What is small and on the host travels by gloo, so that no GPU is waited for.
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=SILENCE, device_id=own if own.type == "cuda" else None)
    try:
        yield World(rank, size, own)
    finally:
        dist.destroy_process_group()


_FROM_TORCHRUN = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


@contextlib.contextmanager
def first_alone(world: World) -> Iterator[None]:
    """No process leaves the block before the first is through, which may take it longer than SILENCE."""
    if world.size == 1:
        yield
        return
    patient = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=PATIENCE))
    yield
    try:
        dist.all_reduce(torch.zeros(1), group=patient)
    except RuntimeError as error:
        raise ArgumentError("another process has ended; what it said is the reason") from error
    dist.destroy_process_group(patient)


@contextlib.contextmanager
def run_folder(folder: Path, world: World) -> Iterator[None]:
    """The folder of a run, writable and locked by the first process; where it cannot be, all raise why."""
    with contextlib.ExitStack() as stack:
        problem: Exception | None = None
        if world.first:
            try:
                check_utf8(folder)
                check_writable(folder, folder=True)
                stack.enter_context(locked(folder))
            except (VecaError, OSError) as error:
                problem = error
        if problem := gathered(problem, world)[0]:
            raise problem
        yield


def shard(model: Veca, world: World) -> None:
    """Share the model's parameters out over the processes, block by block (FSDP2)."""
    if world.size == 1:
        return
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def share_again(model: nn.Module) -> None:
    """Have the parameters shared out again that a forward pass without a backward one left whole."""
    if isinstance(model, FSDPModule):
        model.reshard()


def replicate(module: nn.Module, world: World, how: Literal["ddp", "fsdp"]) -> nn.Module:
    """The module whose gradients are those of all processes; with FSDP2 its model has been sharded already."""
    if world.size == 1 or how == "fsdp":
        return module
    # Cores beyond a step's budget have no gradient in it.
    return DistributedDataParallel(
        module, device_ids=[world.device] if world.device.type == "cuda" else None, find_unused_parameters=True
    )


@contextlib.contextmanager
def unsynced(module: nn.Module, last: bool) -> Iterator[None]:
    """Gradients of several passes are exchanged in the last one alone; FSDP2 exchanges them in each."""
    with contextlib.nullcontext() if last or not isinstance(module, DistributedDataParallel) else module.no_sync():
        yield


def any_of(flag: bool, world: World) -> bool:
    """Whether any process says so."""
    return sum_of([float(flag)], world)[0] > 0


def sum_of(values: list[float], world: World) -> list[float]:
    """Sums over all processes, on the host."""
    if world.size == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return cast(list[float], total.tolist())


def largest(value: Tensor, world: World) -> Tensor:
    """The largest of all processes' values, on the device; the host does not wait for it."""
    if world.size > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value


def summed(value: Tensor, world: World) -> Tensor:
    """The sum over all processes, in place, on the device; the host does not wait for it."""
    if world.size > 1:
        dist.all_reduce(value)
    return value


def gathered(thing: Any, world: World) -> list[Any]:
    """What every process has, in order of rank; plain data."""
    if world.size == 1:
        return [thing]
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, thing)
    return found


def broadcast(tensors: list[Tensor], world: World) -> None:
    """The first process's, in place."""
    if world.size > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def all_rows(rows: Tensor, counts: Sequence[int], world: World) -> Tensor:
    """Those of all processes, in order of rank; `counts` says how many each has."""
    if world.size == 1:
        return rows
    rows = rows.contiguous()
    parts = [rows if rank == world.rank else rows.new_empty(n, *rows.shape[1:]) for rank, n in enumerate(counts)]
    for rank, part in enumerate(parts):
        dist.broadcast(part, src=rank)
    return torch.cat(parts)


def whole(tensor: Tensor) -> Tensor:
    """A copy on the host of a tensor that may be shared out: every process must ask."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().to("cpu", copy=True)


@torch.no_grad()
def fill(target: Tensor, value: Tensor) -> None:
    """Copy the whole of a tensor into one that may be shared out."""
    if isinstance(target, DTensor):
        value = value.to(target.device, target.dtype)
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)
