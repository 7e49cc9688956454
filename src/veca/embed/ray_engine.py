"""`embed` on Ray Data: the partitions of a run, computed by many processes or machines.

    sources → partitions → one pipeline per GPU or CPU slot → features/00000000.parquet, 00000001.parquet, …

A worker gets partitions (`veca.embed.partitions`), reads them and writes their files; its pipeline, from processes that
read to the model, is one for all of them, and reads the next while it computes one. Batches are those of the plain
engine, and so are the bits. Finished partitions are not computed again: a lost worker costs its partitions, an
interrupted run those in progress.
"""

import json
import logging
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from veca.data.gpu_decode import undecodable_reason
from veca.data.remote import SourceError, is_remote
from veca.data.sources import Item, is_container
from veca.embed.batches import EmbedJob, FeatureModel, prepare_model
from veca.embed.partitions import Partition, PartitionFolder, RunTotals, feature_schema
from veca.embed.settings import EmbedError
from veca.embed.stream import PartitionStream
from veca.model import Veca
from veca.utils.console import bar
from veca.utils.cuda import separate_streams
from veca.version import __version__

Engine = Literal["plain", "ray"]

_USAGE_REPORTS = "RAY_USAGE_STATS_ENABLED"
_AHEAD = 2
"""Partitions that a worker with processes of its own is given at a time: it reads one while it computes the other."""
_MAX_TRIES = 4
"""Workers that may die of a partition before it is given up; others continue, and the end says what is missing."""


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
    if (address or "").startswith("ray://"):
        way = "use auto on a machine of the cluster, or: ray job submit --address http://HEAD:8265 -- veca …"
        raise EmbedError(f"--address {address}: Ray Data does not run through a Ray Client; {way}")
    handler, reports = signal.getsignal(signal.SIGTERM), os.environ.get(_USAGE_REPORTS)
    in_main = threading.current_thread() is threading.main_thread()
    os.environ.setdefault(_USAGE_REPORTS, "0")  # else Ray reports to its makers, from a thread that stays
    try:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (RuntimeError, ValueError, OSError) as error:
            reason, way = str(error).splitlines()[0], "`ray start --head` starts a cluster, `ray status` shows one"
            place = f"--address {address} (HOST:PORT, auto or local)" if address else "this machine"
            raise EmbedError(f"Ray cannot be started or reached at {place}: {reason}. {way}") from error
        if callable(handler) and in_main:
            signal.signal(signal.SIGTERM, handler)  # Ray's does not say how to continue
        yield
    finally:
        ray.shutdown()
        if reports is None:
            os.environ.pop(_USAGE_REPORTS, None)
        if in_main:  # Ray leaves its own handler
            signal.signal(signal.SIGTERM, handler)


def find_slots(device: str | torch.device | None, workers: int | None) -> tuple[int, str, int]:
    """How many models run on the cluster, on which kind of device, with how many decoding processes each.

    `device` and `workers` are as `veca.embed.embed` takes them.
    """
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
    return count, kind, workers


class PartitionResult(NamedTuple):
    """What a worker reports of a partition. An error stops the run, unless the partition was given up."""

    number: int
    images: int = 0
    failed: int = 0
    kept: bool = False  # it was there already; of the results of `_compute`: since an earlier run
    error: str = ""
    given_up: bool = False
    shrunk: int = 0


class GivenUpError(EmbedError):
    """A partition that killed its workers."""


class RayWorker:
    """One pipeline. Ray Data creates one per slot, and again elsewhere when its process or machine is lost.

    It may be called by several threads, each with a partition.
    """

    def __init__(self, job: EmbedJob, weights: list[Any], tries: Any) -> None:
        self.job, self.weights, self.tries = job, weights, tries
        self.stream: PartitionStream | None = None
        self._loading = threading.Lock()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        number = int(row["number"])
        partition = Partition(number, [Item(*fields) for fields in json.loads(row["files"])])
        # Errors are returned: Ray would wrap what is raised, or compute the block again.
        try:
            return self.embed(partition)._asdict()
        except torch.OutOfMemoryError:
            reason, given_up = f"no memory for batch={self.job.settings.batch}: lower it", False
        except Exception as error:
            reason, given_up = str(error), isinstance(error, SourceError | GivenUpError)
            if not given_up:
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                reason = f"{kind}{reason} (partition {number}, on {socket.gethostname()})"
        return PartitionResult(number, error=reason, given_up=given_up)._asdict()

    def embed(self, partition: Partition) -> PartitionResult:
        """Compute a partition, unless its file is there."""
        job = self.job
        with suppress(OSError):
            os.chdir(job.cwd)  # for relative paths
        partition = partition.with_stamps()
        kept = state = job.folder.finished(partition, job.ignore_dates)
        if state is None:
            place = os.path.dirname(next((file.path for file in partition.files if file.path), ""))
            if place and not is_remote(place) and not os.path.isdir(place):
                raise EmbedError(f"{place} is not there; images must be on a disk that all machines share, or remote")
            with self._loading:
                if self.stream is None:
                    model = FeatureModel(prepare_model(self._load_model(), job.settings, job.device), job)
                    self.stream = PartitionStream(model, self._begin)
            state = self.stream.submit(partition).result()
        counts = state.pictures, len(state.failures), kept is not None
        return PartitionResult(partition.number, *counts, shrunk=state.shrunk)

    def _begin(self, number: int) -> int:
        """Count that a partition is begun, and give it up after too many times."""
        import ray

        tried = int(ray.get(self.tries.begin.remote(number)))
        if tried > _MAX_TRIES:
            raise GivenUpError(f"its workers died {_MAX_TRIES} times: memory ran out, or an image crashes the decoder")
        return tried

    def _load_model(self) -> Veca:
        """The model, for the first partition; checks what a machine of a cluster may lack."""
        import ray

        job = self.job
        if not job.folder.exists("_job.json"):
            place = job.folder.address
            raise EmbedError(f"{place} is not there; it must be on a disk that all machines share, or remote")
        installed = {"veca": __version__, "torch": torch.__version__}
        if other := [f"{name} {version}" for name, version in installed.items() if version != job.about[name]]:
            expected = f"veca {job.about['veca']} and torch {job.about['torch']}"
            raise EmbedError(f"{' and '.join(other)} where the run was started with {expected}")
        separate_streams()
        with torch.device("meta"):
            model = Veca(job.config)
        model.load_state_dict(load_tensors(ray.get(self.weights[0]).tobytes()), assign=True)
        if job.device.type == "cpu":
            torch.set_num_threads(max(1, job.workers))
        if job.settings.decode == "gpu" and (reason := undecodable_reason(job.device)):
            raise EmbedError(f"--decode gpu: {reason}. Use --decode cpu")
        return model


def run_on_ray(job: EmbedJob, model: Veca, plan: list[Partition], models: int, progress: bool) -> RunTotals:
    """Have all partitions computed that are not there yet, by `models` workers, and complete the folder."""
    import ray

    job.folder.check_partitions(len(plan))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    totals, results = RunTotals(partitions=len(plan)), dict[int, PartitionResult]()
    try:
        with (
            closing(_compute(job, plan, save_tensors(tensors), models)) as computed,
            bar("embedding", len(plan), "images", progress, failures=True, note="partitions") as advance,
        ):
            for result in computed:
                if result.error and not result.given_up:
                    raise EmbedError(f"the run stopped: {result.error}. {job.folder.kept_message(totals.pictures)}")
                results[result.number] = result
                totals.add(result.number, result.images, result.failed, result.shrunk)
                done = result.images + result.failed
                if result.kept:
                    totals.resumed += done
                    totals.resumed_failures += result.failed
                note = f"partitions, {totals.pictures:,} images"
                advance(1, counted=0 if result.kept else done, failed=totals.failures, note=note)
            advance.describe("embedded")
    except ray.exceptions.RayError as error:
        reason = str(error).splitlines()[0]
        raise EmbedError(f"Ray stopped: {reason} {job.folder.kept_message(totals.pictures)}") from error
    check_results(job.folder, plan, results)
    job.folder.complete(totals, feature_schema(job.about))
    return totals


def _compute(job: EmbedJob, plan: list[Partition], weights: bytes, models: int) -> Generator[PartitionResult]:
    """Results of all partitions, as they come."""
    import ray

    class Tries:  # defined here, Ray sends it by value: its process need not import this module, and torch
        """Counts how often each partition was begun: workers do not survive what kills them."""

        def __init__(self) -> None:
            self.count = Counter[int]()

        def begin(self, number: int) -> int:
            self.count[number] += 1
            return self.count[number]

        def begun(self, number: int) -> bool:
            return number in self.count

    tasks = [{"number": number, "files": json.dumps([list(file) for file in files])} for number, files in plan]
    rows: Any = None
    context, logger = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    bars, level, context.enable_progress_bars = context.enable_progress_bars, logger.level, False
    logger.setLevel(logging.CRITICAL)
    try:
        tries = ray.remote(num_cpus=0)(Tries).remote()
        data = ray.data.from_items(tasks, override_num_blocks=min(len(tasks), 10_000))
        size, ahead = min(models, len(plan)), _AHEAD if job.workers else 1
        calls = {"max_tasks_in_flight_per_actor": ahead, "max_concurrent_calls_per_actor": ahead}
        actors = ray.data.ActorPoolStrategy(size=size, enable_true_multi_threading=True, **calls)
        each: dict[str, Any] = {"num_cpus": max(1, job.workers), "num_gpus": int(job.device.type == "cuda")}
        each["fn_constructor_args"] = job, [ray.put(np.frombuffer(weights, np.uint8))], tries
        rows = iter(data.map(RayWorker, compute=actors, **each).iter_rows())
        for row in rows:
            result = PartitionResult(**row)
            if result.kept and ray.get(tries.begun.remote(result.number)):  # by a worker that died after writing it
                result = result._replace(kept=False)
            yield result
    finally:
        getattr(rows, "close", lambda: None)()
        context.enable_progress_bars = bars
        logger.setLevel(level)


def check_results(folder: PartitionFolder, plan: list[Partition], results: dict[int, PartitionResult]) -> None:
    """Raise EmbedError unless every partition was computed, with a row or a failure for each image file.

    That its file is there is checked by `complete`.
    """
    missing = dict[int, str]()
    for number, files in plan:
        result = results.get(number, PartitionResult(number, error="Ray lost it"))
        count = result.images + result.failed
        if result.error or (count != len(files) and not is_container(files[0])):
            missing[number] = result.error or f"it has {count:,} of {len(files):,} images"
    if missing:
        named = (f"{plan[n].name()} ({plan[n].files[0].name} …): {reason}" for n, reason in list(missing.items())[:3])
        images = sum(result.images for number, result in results.items() if number not in missing)
        lost = f"{len(missing):,} of {len(plan):,} partitions are missing"
        raise EmbedError(f"{lost}, among them {'; '.join(named)}. {folder.kept_message(images)}")
