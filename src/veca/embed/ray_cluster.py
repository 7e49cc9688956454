"""Ray itself: a connection to a cluster, what it has for models, and quiet while it works."""

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

from veca.embed.partitions import EmbedError

REPORTS = "RAY_USAGE_STATS_ENABLED"


@contextmanager
def session(address: str | None) -> Iterator[None]:
    """A connection to Ray; one that is there is used, and left."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise EmbedError(
            f"--engine ray needs {error.name}, which is not installed: pip install 'veca[scale]'"
        ) from error
    if ray.is_initialized():
        yield
        return
    if address is not None:
        _reach(address)
    before, wish = signal.getsignal(signal.SIGTERM), os.environ.get(REPORTS)
    os.environ.setdefault(REPORTS, "0")  # else Ray reports to its makers, and a thread stays for it
    try:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise EmbedError(f"Ray cannot be had at {address or 'this machine'}: {reason}") from error
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # of the command line, which says how to continue; Ray's does not
        yield
    finally:
        ray.shutdown()
        if wish is None:
            os.environ.pop(REPORTS, None)
        if threading.current_thread() is threading.main_thread():  # Ray put its own there, and leaves it
            signal.signal(signal.SIGTERM, before)


def _reach(address: str) -> None:
    """Ray itself would try for a minute."""
    if address.startswith("ray://"):
        raise EmbedError(
            f"--address {address}: Ray Data does not run through a Ray Client. Start this on a machine of the cluster "
            "with --address auto, or hand it in: ray job submit --address http://HEAD:8265 -- veca embed …"
        )
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise EmbedError(f"--address {address}: must be HOST:PORT, auto (a cluster on this machine) or local")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise EmbedError(
            f"--address {address}: nothing answers there ({error}). `ray start --head --port {port}` on {host} starts "
            "a cluster; `ray status` there shows one"
        ) from error


class Slots(NamedTuple):
    """Where models run: how many, on what, with how many decoding processes each."""

    models: int
    device: str
    workers: int


def find_slots(device: str | torch.device | None, workers: int | None) -> Slots:
    """What the cluster has for `device` and `workers`, as `veca.embed.ray_engine.embed_on_ray` takes them."""
    import ray

    have = ray.cluster_resources()
    cpus, gpus = int(have.get("CPU", 0)), int(have.get("GPU", 0))
    kind = torch.device(device).type if device is not None else "cuda" if gpus else "cpu"
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not gpus):
        raise EmbedError(f"device {str(device)!r}: the cluster has {cpus} CPUs and {gpus} GPUs; choose cpu or cuda")
    if workers is None:
        workers = max(1, cpus // gpus) if kind == "cuda" else 0
    count = gpus if kind == "cuda" else cpus // max(1, workers)
    if not count or cpus < workers:
        raise EmbedError(f"workers={workers}: the cluster has {cpus} CPUs; ask for no more, or wait for its machines")
    return Slots(count, kind, workers)


@contextmanager
def quiet() -> Iterator[None]:
    """Ray Data without its bars and messages."""
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
