"""Training in one or several processes: torchrun, DDP, FSDP2 and small collectives."""

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from veca.errors import ArgumentError, VecaError
from veca.model import Veca
from veca.utils.device import choose_device
from veca.utils.files import check_utf8, check_writable, locked, remove_empty

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=20)
"""How long a process waits for the others before it assumes that one is lost."""
MAIN_ONLY_TIMEOUT = datetime.timedelta(days=7)
"""The same while the first process works for all."""


class World(NamedTuple):
    """Rank of this process, number of processes, and the device of this one."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


@contextlib.contextmanager
def processes(device: str = "auto") -> Iterator[World]:
    """Connect the processes that torchrun started while the block runs; without torchrun there is one.

    `device` is "cpu", "cuda" (each process uses its own GPU) or "auto".
    """
    torchrun = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))  # variables that it sets
    rank, size, local = (int(os.environ.get(name, default)) for name, default in torchrun)
    if size > 1 and device not in ("auto", "cpu", "cuda"):
        raise ArgumentError(f"device {device!r} for {size} processes: each takes its own, so name cpu, cuda or auto")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    own = torch.device("cuda", local) if device == "cuda" and torch.cuda.is_available() else choose_device(device)
    if own.type == "cuda":
        if own.index >= torch.cuda.device_count():
            way_out = "start as many processes as there are GPUs: torchrun --nproc-per-node=gpu"
            raise ArgumentError(f"{torch.cuda.device_count()} GPUs for process {local} of this machine; {way_out}")
        torch.cuda.set_device(own)
    if size > 1:
        # Small host tensors travel by gloo, so that no GPU has to be synchronised.
        backend, gpu = ("cpu:gloo,cuda:nccl", own) if own.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=gpu)
    try:
        yield World(rank, size, own)
    finally:
        if size > 1:
            dist.destroy_process_group()


@contextlib.contextmanager
def first_alone(world: World) -> Iterator[None]:
    """No process leaves the block before the first has, even if that takes longer than COLLECTIVE_TIMEOUT."""
    if world.size == 1:
        yield
        return
    # A group of its own, because the timeout belongs to the group.
    patient = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=MAIN_ONLY_TIMEOUT))
    yield
    try:
        dist.all_reduce(torch.zeros(1), group=patient)
    except RuntimeError as error:
        raise ArgumentError("another process has ended; its message gives the reason") from error
    dist.destroy_process_group(patient)


@contextlib.contextmanager
def run_folder(folder: Path, world: World) -> Iterator[None]:
    """Check and lock the run's folder in the first process; if that fails, all processes raise the reason."""
    # An error in the first process alone would leave the others waiting: all learn of it.
    with contextlib.ExitStack() as stack:
        problem: Exception | None = None
        if world.first:
            try:
                check_utf8(folder)
                stack.enter_context(remove_empty(folder))
                check_writable(folder, folder=True)
                stack.enter_context(locked(folder))
            except (VecaError, OSError) as error:
                problem = error
        if problem := gathered(problem, world)[0]:
            raise problem
        yield


def shard(model: Veca) -> None:
    """Shard the model's parameters over the processes (FSDP2); blocks are gathered one by one, just before they run."""
    for module in (*model.blocks, model):
        fully_shard(module)


def replicate(module: nn.Module, world: World) -> nn.Module:
    """The module with gradients averaged over all processes (DDP)."""
    if world.size == 1:
        return module
    device_ids = [world.device] if world.device.type == "cuda" else None
    # Cores beyond a step's budget get no gradient in it.
    return DistributedDataParallel(module, device_ids=device_ids, find_unused_parameters=True)


def sum_of(values: list[float], world: World) -> list[float]:
    """Sums over all processes, on the host."""
    return cast(list[float], all_reduced(torch.tensor(values, dtype=torch.float64), world).tolist())


def all_reduced(value: Tensor, world: World, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum (or by another `op`) over all processes, in place, on the device; without synchronising the host."""
    if world.size > 1:
        dist.all_reduce(value, op)
    return value


def with_others(value: Tensor, world: World) -> Tensor:
    """The sum over all processes; its gradient is that of the own value."""
    if world.size == 1:
        return value
    own = value.detach()
    return all_reduced(own.clone(), world) + (value - own)


def gathered(value: Any, world: World) -> list[Any]:
    """The (plain) value of every process, in order of rank."""
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def broadcast(tensors: list[Tensor], world: World) -> None:
    """Copy the first process's tensors to all others, in place."""
    if world.size > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def all_rows(rows: Tensor, counts: Sequence[int], world: World) -> Tensor:
    """Rows of all processes, in order of rank; `counts` says how many each has."""
    if world.size == 1:
        return rows
    rows = rows.contiguous()
    # all_gather needs rows of equal number; broadcasts do not.
    parts = [rows if rank == world.rank else rows.new_empty(n, *rows.shape[1:]) for rank, n in enumerate(counts)]
    for rank, part in enumerate(parts):
        dist.broadcast(part, src=rank)
    return torch.cat(parts)


def unshard(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; for one that is, every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, unsharded: every process must call this for a sharded tensor."""
    return unshard(tensor).detach().to("cpu", copy=True)


def local_part(tensor: Tensor) -> Tensor:
    """The shard of this process, or the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_shard(whole: Tensor, like: Tensor) -> Tensor:
    """The shard of this process of a tensor that all processes have, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


@torch.no_grad()
def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy an unsharded tensor into one that may be sharded."""
    local_part(target).copy_(own_shard(value.to(target.device, target.dtype), target))


def shard_like(part: Tensor, like: Tensor) -> Tensor:
    """The tensor, sharded as `like` is, of which this process holds `part`."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
