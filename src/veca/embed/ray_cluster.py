"""Connection to a Ray cluster, and the slots it has for models."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from veca.embed.settings import EmbedError

_USAGE_REPORTS = "RAY_USAGE_STATS_ENABLED"


@contextmanager
def connect_ray(address: str | None) -> Iterator[None]:
    """Connect to Ray while the block runs; an existing connection is used, and stays."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        way = "pip install 'veca[scale]'"
        raise EmbedError(f"--engine ray needs {error.name}, which is not installed: {way}") from error
    if ray.is_initialized():
        yield
        return
    if address is not None:
        _check_address(address)
    handler, reports = signal.getsignal(signal.SIGTERM), os.environ.get(_USAGE_REPORTS)
    in_main = threading.current_thread() is threading.main_thread()
    os.environ.setdefault(_USAGE_REPORTS, "0")  # else Ray reports to its makers, from a thread that stays
    try:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (RuntimeError, ValueError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise EmbedError(f"Ray cannot be started or reached at {address or 'this machine'}: {reason}") from error
        if callable(handler) and in_main:
            signal.signal(signal.SIGTERM, handler)  # Ray's does not say how to continue
        yield
    finally:
        ray.shutdown()
        if reports is None:
            os.environ.pop(_USAGE_REPORTS, None)
        if in_main:  # Ray leaves its own handler
            signal.signal(signal.SIGTERM, handler)


def _check_address(address: str) -> None:
    """Raise EmbedError if nothing answers at the address. Ray itself would try for a minute."""
    if address.startswith("ray://"):
        way = "use --address auto on a machine of the cluster, or: ray job submit --address http://HEAD:8265 -- veca …"
        raise EmbedError(f"--address {address}: Ray Data does not run through a Ray Client; {way}")
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise EmbedError(f"--address {address}: must be HOST:PORT, auto (a cluster on this machine) or local")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        way = f"`ray start --head --port {port}` on {host} starts a cluster; `ray status` there shows one"
        raise EmbedError(f"--address {address}: nothing answers there ({error}). {way}") from error


class RaySlots(NamedTuple):
    """How many models run on a cluster, on which kind of device, with how many decoding processes each."""

    models: int
    device: str
    workers: int


def find_slots(device: str | torch.device | None, workers: int | None) -> RaySlots:
    """Slots of the cluster for `device` and `workers`, as `veca.embed.ray_engine.embed_on_ray` takes them."""
    import ray

    resources = ray.cluster_resources()
    cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    kind = torch.device(device).type if device is not None else "cuda" if gpus else "cpu"
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not gpus):
        raise EmbedError(f"device {str(device)!r}: the cluster has {cpus} CPUs and {gpus} GPUs; choose cpu or cuda")
    if workers is None:
        workers = max(1, cpus // gpus) if kind == "cuda" else 0
    count = gpus if kind == "cuda" else cpus // max(1, workers)
    if not count or cpus < workers:
        raise EmbedError(f"workers={workers}: the cluster has {cpus} CPUs; ask for no more, or wait for its machines")
    return RaySlots(count, kind, workers)


@contextmanager
def silence_ray_data() -> Iterator[None]:
    """Turn off the progress bars and messages of Ray Data while the block runs."""
    import ray

    context, logger = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    bars, level = context.enable_progress_bars, logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        logger.setLevel(level)
