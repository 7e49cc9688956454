"""`embed` on Ray Data: the partitions of a run, computed by many processes or machines.

    sources → partitions → one model per GPU or CPU slot → features/00000000.parquet, 00000001.parquet, …

A worker gets a partition (`veca.embed.partitions`), reads it and writes its file. Batches are those of the plain
engine, and so are the bits. Finished partitions are not computed again: a lost worker costs its partition, an
interrupted run those in progress.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from veca.config import VecaConfig
from veca.data.loader import decode_items
from veca.data.remote import SourceError, is_remote
from veca.data.sources import Item, is_container, unpack_files
from veca.embed.batches import FeatureBatcher, partition_length
from veca.embed.folder import PartitionFolder, prepare_run
from veca.embed.formats import feature_schema
from veca.embed.partitions import PARTITION, Partition, plan_partitions, stamp_files
from veca.embed.ray_cluster import RaySlots, connect_ray, find_slots, silence_ray_data
from veca.embed.settings import EmbedError, EmbedReport, EmbedSettings, describe_features, describe_job
from veca.embed.writer import PartitionWriter
from veca.images.formats import collect_unsupported
from veca.model import Veca
from veca.utils.console import bar
from veca.version import __version__

Engine = Literal["plain", "ray"]

_MAX_BLOCKS = 10_000
_MAX_TRIES = 4
"""Workers that may die of a partition before it is given up; others continue, and the end says what is missing."""


def embed_on_ray(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    model: Veca,
    model_name: str,
    settings: EmbedSettings | None = None,
    address: str | None = None,
    device: str | torch.device | None = None,
    column: str | None = None,
    workers: int | None = None,
    partition: int = PARTITION,
    overwrite: bool = False,
    skip_nonfinite: bool = False,
    ignore_dates: bool = False,
    progress: bool = True,
) -> EmbedReport:
    """`veca.embed.embed` on Ray: `out` is a file or folder on a disk that all machines share, or an address as s3://….

    `address` is the cluster's (None: the one this process or RAY_ADDRESS names, or this machine alone). Models run on
    `device` (None: on GPUs if the cluster has any, or else on CPUs), one per GPU with `workers` decoding processes
    (None: all cores there are per GPU), or one per CPU (`workers` more than 0: per that many CPUs, which all decode).
    """
    began = time.perf_counter()
    if partition < 1:
        raise EmbedError(f"partition={partition}: must be at least 1")
    sources, folder, settings = prepare_run(inputs, out, model, settings, column, workers or 0, progress)
    with connect_ray(address), folder.locked():
        slots = find_slots(device, workers)
        about = describe_features(model, model_name, settings, torch.device(slots.device))
        length = partition_length(model.config, settings, partition)
        config, place = model.config.to_dict(), f"{folder.address}/"
        job = RayJob(place, os.getcwd(), about, settings, config, slots, column, skip_nonfinite, ignore_dates)
        present = folder.start(describe_job(about, model, sources, column, length), overwrite)
        with collect_unsupported() as left_out:
            plan = list(plan_partitions(sources, length))
        left_out.warn()
        folder.check_partitions(len(plan))
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        results = _compute(folder, plan, job, np.frombuffer(save_tensors(tensors), np.uint8), progress)
        check_results(folder, plan, results)
        images, failed = (sum(counts) for counts in zip(*(result[1:3] for result in results.values()), strict=True))
        totals = {"partitions": len(plan), "pictures": images, "failures": failed}
        with_failures = [number for number, result in results.items() if result.failed]
        folder.complete(totals, with_failures, feature_schema(about))
    kept = [result for number, result in results.items() if result.kept and number in present]
    resumed, resumed_failures = sum(r.images + r.failed for r in kept), sum(r.failed for r in kept)
    return EmbedReport(images, failed, resumed, time.perf_counter() - began, folder.out, resumed_failures)


@dataclass(frozen=True)
class RayJob:
    """What a worker has to know, beside the weights."""

    out: str
    cwd: str
    about: dict[str, Any]
    settings: EmbedSettings
    config: dict[str, Any]
    slots: RaySlots
    column: str | None
    skip_nonfinite: bool = False
    ignore_dates: bool = False


class PartitionResult(NamedTuple):
    """What a worker reports of a partition. An error stops the run, unless the partition was given up."""

    number: int
    images: int = 0
    failed: int = 0
    kept: bool = False  # it was there already
    error: str = ""
    given_up: bool = False


class RayWorker:
    """One model. Ray Data creates one per slot, and again elsewhere when its process or machine is lost."""

    def __init__(self, job: RayJob, weights: list[Any], tries: Any) -> None:
        self.job, self.weights, self.tries = job, weights, tries
        self.batcher: FeatureBatcher | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        import ray

        number = int(row["number"])
        if ray.get(self.tries.begin.remote(number)) > _MAX_TRIES:
            reason = f"its workers died {_MAX_TRIES} times: memory ran out, or an image crashes the decoder"
            return PartitionResult(number, error=reason, given_up=True)._asdict()
        partition = Partition(number, [Item(*fields) for fields in json.loads(row["files"])])
        # Errors are returned: Ray would wrap what is raised, or compute the block again.
        try:
            return self.embed(partition)._asdict()
        except torch.OutOfMemoryError:
            reason, given_up = f"no memory for batch={self.job.settings.batch}: lower it", False
        except Exception as error:
            reason, given_up = str(error), isinstance(error, SourceError)
            if not given_up:
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                reason = f"{kind}{reason} (partition {number}, on {socket.gethostname()})"
        self.batcher = None  # it may hold images of the partition
        return PartitionResult(number, error=reason, given_up=given_up)._asdict()

    def embed(self, partition: Partition) -> PartitionResult:
        """Compute a partition, unless its file is there."""
        job, s = self.job, self.job.settings
        with suppress(OSError):
            os.chdir(job.cwd)  # for relative paths
        folder, partition = PartitionFolder(job.out), stamp_files(partition)
        state, kept = folder.finished(partition, job.ignore_dates), True
        if state is None:
            batcher, kept = self._get_batcher(folder, partition), False
            items = unpack_files(partition.files, job.column, s.max_pixels)
            with decode_items(items, s.size, s.fit, s.max_pixels, job.slots.workers) as records:
                state = PartitionWriter(folder, partition, batcher).write(records)
        return PartitionResult(partition.number, state.pictures, len(state.failures), kept)

    def _get_batcher(self, folder: PartitionFolder, partition: Partition) -> FeatureBatcher:
        """The batcher with its model, created for the first partition; checks what a machine of a cluster may lack."""
        import ray

        job = self.job
        place = os.path.dirname(next((file.path for file in partition.files if file.path), ""))
        if place and not is_remote(place) and not os.path.isdir(place):
            raise EmbedError(f"{place} is not there; images must be on a disk that all machines share, or remote")
        if self.batcher is not None:
            return self.batcher
        if not folder.exists("_job.json"):
            raise EmbedError(f"{job.out} is not there; it must be on a disk that all machines share, or remote")
        installed = {"veca": __version__, "torch": torch.__version__}
        if other := [f"{name} {version}" for name, version in installed.items() if version != job.about[name]]:
            expected = f"veca {job.about['veca']} and torch {job.about['torch']}"
            raise EmbedError(f"{' and '.join(other)} where the run was started with {expected}")
        with torch.device("meta"):
            model = Veca(VecaConfig.from_dict(job.config))
        model.load_state_dict(load_tensors(ray.get(self.weights[0]).tobytes()), assign=True)
        if job.slots.device == "cpu":
            torch.set_num_threads(max(1, job.slots.workers))
        return self.use_model(model)

    def use_model(self, model: Veca) -> FeatureBatcher:
        job, device = self.job, torch.device(self.job.slots.device)
        self.batcher = FeatureBatcher(model, job.settings, device, feature_schema(job.about), job.skip_nonfinite)
        return self.batcher


def _compute(
    folder: PartitionFolder, plan: list[Partition], job: RayJob, weights: NDArray[np.uint8], progress: bool
) -> dict[int, PartitionResult]:
    """Have all missing partitions computed; returns results by number."""
    import ray

    rows = [{"number": number, "files": json.dumps([list(file) for file in files])} for number, files in plan]
    slots, results, images, failed = job.slots, dict[int, PartitionResult](), 0, 0
    shown = bar("embedding", len(plan), "images", progress, failures=True, note="partitions")
    with silence_ray_data(), shown as advance:
        data = ray.data.from_items(rows, override_num_blocks=min(len(rows), _MAX_BLOCKS))
        actors = ray.data.ActorPoolStrategy(size=min(slots.models, len(plan)), max_tasks_in_flight_per_actor=1)
        each: dict[str, Any] = {"num_cpus": max(1, slots.workers), "num_gpus": int(slots.device == "cuda")}
        each["fn_constructor_args"] = job, [ray.put(weights)], _count_tries()
        iterator = iter(data.map(RayWorker, compute=actors, **each).iter_rows())
        try:
            for result in (PartitionResult(**row) for row in iterator):
                if result.error and not result.given_up:
                    raise EmbedError(f"the run stopped: {result.error}. {folder.kept_message(images)}")
                results[result.number] = result
                images, failed = images + result.images, failed + result.failed
                fresh = 0 if result.kept else result.images + result.failed
                advance(1, counted=fresh, failed=failed, note=f"partitions, {images:,} images")
        except ray.exceptions.RayError as error:
            raise EmbedError(f"Ray stopped: {str(error).splitlines()[0]} {folder.kept_message(images)}") from error
        finally:
            getattr(iterator, "close", lambda: None)()
        advance.describe("embedded")
    return results


def _count_tries() -> Any:
    """An actor that counts how often each partition was begun: workers do not survive what kills them."""
    import ray

    class Tries:  # defined here, Ray sends it by value: its process need not import this module, and torch
        def __init__(self) -> None:
            self.count = Counter[int]()

        def begin(self, number: int) -> int:
            self.count[number] += 1
            return self.count[number]

    return ray.remote(num_cpus=0)(Tries).remote()


def check_results(folder: PartitionFolder, plan: list[Partition], results: dict[int, PartitionResult]) -> None:
    """Raise EmbedError unless every partition is in the folder with as many rows and failures as images."""
    present, missing = folder.partitions(), dict[int, str]()
    for number, files in plan:
        result = results.get(number, PartitionResult(number, error="Ray lost it"))
        count = len(files) if not is_container(files[0]) else result.images + result.failed
        if result.error:
            missing[number] = result.error
        elif number not in present or result.images + result.failed != count:
            missing[number] = f"its file is gone, or has not all of the {count:,} images"
    if missing:
        named = (f"{plan[n].name} ({plan[n].files[0].name} …): {reason}" for n, reason in list(missing.items())[:3])
        images = sum(result.images for number, result in results.items() if number not in missing)
        lost = f"{len(missing):,} of {len(plan):,} partitions are missing"
        raise EmbedError(f"{lost}, among them {'; '.join(named)}. {folder.kept_message(images)}")
