"""Features by many processes and machines, with Ray Data: the rows of `veca.embed.run`, in a folder of Parquet files.

    sources → partitions → one model per GPU or CPU slot → out/00000000.parquet, out/00000001.parquet, …

A partition is a tar shard, a Parquet file, or some thousand pictures that are files. Whoever gets one reads it, and
cuts it into the parts that `veca.embed.run` cuts, so batches are the same and so are the bits. Its file is whole or not
there, and what is there is not computed again: a lost worker costs its partition, an interrupted run those at work.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fsspec
import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from veca.config import VecaConfig
from veca.data.loader import decode_items
from veca.data.remote import SourceError, is_remote
from veca.data.sources import Item, add_stamp, is_container, list_files, unpack_files
from veca.embed.formats import PARQUET, feature_schema
from veca.embed.partitions import (
    EmbedError,
    EmbedSettings,
    Part,
    cut,
    identities,
    refuse_changed,
    same_job,
    write_failures,
)
from veca.embed.ray_cluster import Slots, find_slots, quiet, session
from veca.embed.run import EmbedReport, check, describe, describe_inputs, listed, progress_line, reading_line, ready
from veca.errors import ArgumentError, NonFiniteError
from veca.images.formats import collect_unsupported
from veca.model import Veca
from veca.utils.files import InUseError, atomic_path, locked
from veca.version import __version__

Engine = Literal["plain", "ray"]

PARTITION = 4096
"""Pictures that are files, to a partition."""

_BLOCKS = 10_000
_LOCK = "_lock"
"""Readers of a folder of Parquet files pass over names that begin so."""
_TRIES = 4
"""How many workers may die of a partition before it is given up; the rest goes on, and the end says what is missing."""


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
    """`veca.embed.embed` on Ray: `out` is a folder, on a disk that all machines share, or an address as s3://….

    `address` is the cluster's (None: the one this process or RAY_ADDRESS names, or this machine alone). Models run on
    `device` (None: on GPUs if the cluster has any, or else on CPUs), one per GPU with `workers` decoding processes
    (None: all cores that are there for it), or one per CPU (`workers` more than 0: per so many, that many decode).
    """
    began = time.perf_counter()
    sources, out = listed(inputs), os.fspath(out)
    with reading_line(progress) as on_read:
        settings = check(sources, model, settings or EmbedSettings(), workers or 0, column, on_read)
    if partition < 1:
        raise EmbedError(f"partition={partition}: must be at least 1")
    folder = _Folder(out if is_remote(out) else os.path.abspath(out))
    with session(address), folder.locked():
        slots = find_slots(device, workers)
        about = describe(model, model_name, settings, torch.device(slots.device))
        most = Part(model, settings, torch.device("cpu")).most
        partition = max(1, partition // most) * most  # parts are never divided
        job = _Job(
            folder.address, os.getcwd(), about, settings, model.config.to_dict(), slots, column, most, skip_nonfinite,
            ignore_dates,
        )  # fmt: skip
        found = folder.start({**about, "inputs": describe_inputs(sources, column), "partition": partition}, overwrite)
        with collect_unsupported() as left_out:
            plan = list(_plan(sources, partition))
        left_out.warn()
        if any(number >= len(plan) for number in found):
            raise _changed(folder)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        done = _run(plan, job, np.frombuffer(save_tensors(tensors), np.uint8), progress)
        pictures, failed, resumed = _end(folder, plan, done, found)
    again = sum(each.failed for number, each in done.items() if each.kept and number in found)
    return EmbedReport(pictures, failed, resumed, time.perf_counter() - began, out, again)


class _Partition(NamedTuple):
    """Consecutive pictures, or the shard or table that holds them; `digest` tells their names from others."""

    digest: str
    files: list[Item]

    @classmethod
    def of(cls, files: list[Item]) -> _Partition:
        return cls(hashlib.sha256("\0".join(file.name for file in files).encode()).hexdigest(), files)


def _plan(sources: list[str], size: int) -> Iterator[_Partition]:
    """All files of all sources, none of them opened: a container alone, pictures by the `size`."""
    pictures: list[Item] = []
    for file in (file for source in sources for file in list_files(source)[1]):
        if pictures and (is_container(file) or len(pictures) == size):
            yield _Partition.of(pictures)
            pictures = []
        if is_container(file):
            yield _Partition.of([file])
        else:
            pictures.append(file)
    if pictures:
        yield _Partition.of(pictures)


@dataclass(frozen=True)
class _Job:
    """What a worker has to know, beside the weights."""

    out: str
    cwd: str
    about: dict[str, Any]
    settings: EmbedSettings
    config: dict[str, Any]
    slots: Slots
    column: str | None
    most: int
    skip_nonfinite: bool = False
    ignore_dates: bool = False


class _Done(NamedTuple):
    """What a worker says of a partition; with an error the run stops, or goes on without a partition given up."""

    number: int
    pictures: int = 0
    failed: int = 0
    kept: bool = False
    """Whether it was there already."""
    error: str = ""
    given_up: bool = False


class _Embedder:
    """One model; Ray Data makes one per slot, and makes it again elsewhere when its process or machine is lost."""

    def __init__(self, job: _Job, weights: list[Any], tries: Any) -> None:
        self.job, self.weights, self.tries = job, weights, tries
        self.model: Veca | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        import ray

        number = int(row["number"])
        if ray.get(self.tries.begin.remote(number)) > _TRIES:
            died = f"its workers died {_TRIES} times: memory ran out, or a picture crashes the decoder"
            return _Done(number, error=died, given_up=True)._asdict()
        # An error is an answer: Ray would wrap it, or take it for a lost block.
        try:
            files = [Item(*fields) for fields in json.loads(row["files"])]
            return self._embed(number, row["digest"], files)._asdict()
        except SourceError as error:
            return _Done(number, error=str(error), given_up=True)._asdict()
        except NonFiniteError as error:
            way = "--skip-nonfinite (skip_nonfinite=True) lists such pictures as failures and goes on"
            return _Done(number, error=f"{error}; {way} (partition {number})")._asdict()
        except torch.OutOfMemoryError:
            return _Done(number, error=f"no memory for batch={self.job.settings.batch}: lower it")._asdict()
        except Exception as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return _Done(number, error=f"{reason} (partition {number}, on {socket.gethostname()})")._asdict()

    def _embed(self, number: int, digest: str, files: list[Item]) -> _Done:
        job, s, folder = self.job, self.job.settings, _Folder(self.job.out)
        with suppress(OSError):
            os.chdir(job.cwd)  # for relative paths
        files = list(map(add_stamp, files))
        digests = {"digest": digest, **_digests(files)}
        if done := folder.finished(number, digests, job.ignore_dates):
            return done
        model, device = self._ready(folder, files), torch.device(job.slots.device)
        schema = feature_schema(job.about["dim"], s.save_dtype, s.with_global, s.dense)
        items, pictures, failures = unpack_files(files, job.column, s.max_pixels), 0, list[tuple[str, str]]()
        with (
            folder.new(_name(number)) as path,
            pq.ParquetWriter(path, schema.with_metadata({"veca": json.dumps(job.about)}), **PARQUET) as writer,
            decode_items(items, s.size, s.fit, s.max_pixels, job.slots.workers) as records,
        ):
            for part in cut(records, partial(Part, model, s, device, job.skip_nonfinite), job.most):
                table = part.table(schema)
                if part.rows:
                    writer.write_table(table)
                pictures, failures = pictures + len(part.rows), failures + part.failures
                del part, table  # or they would be in memory beside the next ones
            state = {**digests, "pictures": pictures, "failures": failures}
            writer.add_key_value_metadata({"veca_partition": json.dumps(state)})
        return _Done(number, pictures, len(failures))

    def _ready(self, folder: _Folder, files: list[Item]) -> Veca:
        """The model; the first time also a look around, for what a cluster may lack."""
        job = self.job
        place = os.path.dirname(next((file.path for file in files if file.path), ""))
        if place and not is_remote(place) and not os.path.isdir(place):
            raise EmbedError(f"{place} is not there; pictures must be on a disk that all machines share, or remote")
        if self.model is not None:
            return self.model
        if not folder.holds("_job.json"):
            raise EmbedError(f"{job.out} is not there; it must be on a disk that all machines share, or remote")
        have = {"veca": __version__, "torch": torch.__version__}
        if other := [f"{name} {have[name]}" for name in have if have[name] != job.about[name]]:
            raise EmbedError(f"{' and '.join(other)} where the run was started with {_versions(job.about)}")
        import ray

        with torch.device("meta"):
            model = Veca(VecaConfig.from_dict(job.config))
        model.load_state_dict(load_tensors(ray.get(self.weights[0]).tobytes()), assign=True)
        if job.slots.device == "cpu":
            torch.set_num_threads(max(1, job.slots.workers))
        self.model = ready(model, job.settings, torch.device(job.slots.device))
        return self.model


def _digests(files: list[Item]) -> dict[str, str]:
    """Of the sizes and the dates of a partition's files."""
    found = [identities(file.name, file.stamp) for file in files]
    texts = {key: "\0".join(each[key] for each in found) for key in ("sizes", "dates")}
    return {key: hashlib.sha256(text.encode()).hexdigest() for key, text in texts.items()}


def _versions(about: dict[str, Any]) -> str:
    return f"veca {about['veca']} and torch {about['torch']}"


def _name(number: int) -> str:
    return f"{number:08d}.parquet"


def _run(plan: list[_Partition], job: _Job, weights: NDArray[np.uint8], progress: bool) -> dict[int, _Done]:
    """Have all partitions computed that are not; what became of each."""
    import ray

    rows = [
        {"number": number, "digest": partition.digest, "files": json.dumps([list(file) for file in partition.files])}
        for number, partition in enumerate(plan)
    ]
    slots, done = job.slots, dict[int, _Done]()
    with (
        quiet(),
        progress_line(
            "{task.completed}/{task.total} partitions", "{task.fields[pictures]} pictures", shown=progress
        ) as bar,
    ):
        task = bar.add_task("embedding", total=len(plan), pictures="0", rate="", failed=0)
        results = (
            ray.data.from_items(rows, override_num_blocks=min(len(rows), _BLOCKS))
            .map(
                _Embedder,
                fn_constructor_args=(job, [ray.put(weights)], _tries()),
                compute=ray.data.ActorPoolStrategy(size=min(slots.models, len(plan)), max_tasks_in_flight_per_actor=1),
                num_cpus=max(1, slots.workers),
                num_gpus=1 if slots.device == "cuda" else 0,
            )
            .iter_rows()
        )
        began, pictures, failed, fresh, iterator = time.perf_counter(), 0, 0, 0, iter(results)
        try:
            for result in (_Done(**row) for row in iterator):
                if result.error and not result.given_up:
                    raise EmbedError(f"the run stopped: {result.error}. {_kept(job.out, done)}")
                done[result.number] = result
                pictures, failed = pictures + result.pictures, failed + result.failed
                fresh += 0 if result.kept else result.pictures + result.failed
                rate = f"{fresh / (time.perf_counter() - began):.1f} pictures/s"
                bar.update(task, advance=1, pictures=f"{pictures:,}", rate=rate, failed=failed)
        except ray.exceptions.RayError as error:
            raise EmbedError(f"Ray stopped: {str(error).splitlines()[0]} {_kept(job.out, done)}") from error
        finally:
            getattr(iterator, "close", lambda: None)()
        bar.update(task, description="embedded")
    return done


def _tries() -> Any:
    """An actor that counts how often each partition was begun; workers do not outlive those that kill them."""
    import ray

    class Tries:  # in here, Ray sends it as it is: its process has not to import this module, and torch
        def __init__(self) -> None:
            self.count: dict[int, int] = {}

        def begin(self, number: int) -> int:
            self.count[number] = self.count.get(number, 0) + 1
            return self.count[number]

    return ray.remote(num_cpus=0)(Tries).remote()


def _kept(out: str, done: dict[int, _Done]) -> str:
    return f"{len(done):,} finished partitions are kept in {out}; the same call continues after them."


def _end(folder: _Folder, plan: list[_Partition], done: dict[int, _Done], found: set[int]) -> tuple[int, int, int]:
    """Pictures, failures and those of an earlier run, if nothing is missing; the list of failures, and a mark."""
    there, missing = folder.partitions(), dict[int, str]()
    for number, (_, files) in enumerate(plan):
        result = done.get(number, _Done(number, error="Ray lost it"))
        count = len(files) if not is_container(files[0]) else result.pictures + result.failed
        if result.error:
            missing[number] = result.error
        elif number not in there or result.pictures + result.failed != count:
            missing[number] = f"its file is gone, or has not all of the {count:,} pictures"
    if missing:
        first = "; ".join(f"{_name(n)} ({plan[n].files[0].name} …): {why}" for n, why in list(missing.items())[:3])
        whole = {number: result for number, result in done.items() if number not in missing}
        raise EmbedError(
            f"{len(missing):,} of {len(plan):,} partitions are missing, among them {first}. "
            f"{_kept(folder.address, whole)}"
        )
    pictures, failed = (sum(each) for each in zip(*(result[1:3] for result in done.values()), strict=True))
    resumed = sum(each.pictures + each.failed for number, each in done.items() if each.kept and number in found)
    bad = (folder.state(number)["failures"] for number, result in sorted(done.items()) if result.failed)
    folder.end({"partitions": len(plan), "pictures": pictures, "failures": failed}, bad if failed else None)
    return pictures, failed, resumed


class _Folder:
    """Where features go: a folder of this machine, or an address."""

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            self.fs, self.root = fsspec.url_to_fs(address)
        except (ImportError, ValueError) as error:
            raise EmbedError(f"{address}: {error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time, where the folder is on a disk: object stores have no locks."""
        if is_remote(self.address) or self.fs.isfile(self.root):  # which `start` refuses
            yield
            return
        try:
            with locked(self.root, _LOCK):
                yield
        except InUseError as error:
            raise EmbedError(str(error)) from None

    def start(self, job: dict[str, Any], overwrite: bool) -> set[int]:
        """Make the folder this job's; the partitions an earlier run of it left there."""
        if self.fs.isfile(self.root):
            raise EmbedError(f"{self.address} is a file; Ray writes a folder of Parquet files: choose another name")
        old: Any = None
        with suppress(OSError, ValueError, RecursionError):
            old = json.loads(self.fs.cat_file(f"{self.root}/_job.json"))
        names, found = self._names(), self.partitions()
        if overwrite and isinstance(old, dict):
            # The job goes last: without it, what is left would be nobody's.
            for name in ("_done.json", *map(_name, found)):
                if name in names:
                    self.fs.rm_file(f"{self.root}/{name}")
            found = set()
        elif "_done.json" in names:
            raise EmbedError(
                f"{self.address} exists; choose another name, or overwrite it with --overwrite (overwrite=True)"
            )
        elif names and not isinstance(old, dict):
            raise EmbedError(f"{self.address} holds files that no run of this left, as {names[0]}; choose another name")
        if found:
            same_job(self.address, old, json.loads(json.dumps(job)))
            return found
        with self.new("_job.json") as path:
            path.write_text(json.dumps(job, indent=2))
        return found

    def end(self, totals: dict[str, int], failures: Iterator[list[tuple[str, str]]] | None) -> None:
        name = f"{self.root.rstrip('/')}.failures.csv"
        if failures is not None:
            with self.new(name) as path:
                write_failures(path, failures)
        elif self.fs.exists(name):
            self.fs.rm_file(name)
        for left in self._names():
            if left.startswith(".") and left.endswith(".part"):  # of a worker that was killed
                self.fs.rm_file(f"{self.root}/{left}")
        with self.new("_done.json") as path:
            path.write_text(json.dumps(totals, indent=2))

    @contextmanager
    def new(self, name: str) -> Iterator[Path]:
        """A local path; when the block ends well, what is there comes into the folder, whole."""
        place = name if "/" in name else f"{self.root}/{name}"
        if not is_remote(self.address):
            with atomic_path(place) as path:
                yield path
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / os.path.basename(name)
            yield path
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.put_file(str(path), place)

    def holds(self, name: str) -> bool:
        return bool(self.fs.exists(f"{self.root}/{name}"))

    def partitions(self) -> set[int]:
        """The numbers of those that are there."""
        return {int(name[:8]) for name in self._names() if name[:8].isdigit() and name[8:] == ".parquet"}

    def state(self, number: int) -> dict[str, Any]:
        with self.fs.open(f"{self.root}/{_name(number)}", "rb") as file:
            about = pq.read_metadata(file)
        state = dict(json.loads((about.metadata or {})[b"veca_partition"]))
        if about.num_rows != state["pictures"]:
            raise ArgumentError(f"{about.num_rows} rows instead of {state['pictures']}")
        return state

    def finished(self, number: int, digests: dict[str, str], ignore_dates: bool = False) -> _Done | None:
        """What an earlier worker or run left, if it is whole and of the same pictures."""
        try:
            state = self.state(number)
        except (OSError, ValueError, KeyError):  # not there, or not whole: a file system may leave half a file
            return None
        # Partitions of earlier versions know the names alone.
        changed = {key for key, digest in digests.items() if state.get(key, digest) != digest}
        refuse_changed(changed, ignore_dates, f"the pictures of {_name(number)}", self.address)
        return _Done(number, state["pictures"], len(state["failures"]), kept=True)

    def _names(self) -> list[str]:
        self.fs.invalidate_cache()
        try:
            names = (name.rstrip("/").rpartition("/")[2] for name in self.fs.ls(self.root, detail=False))
            return sorted(name for name in names if name != _LOCK)
        except FileNotFoundError:
            return []


def _changed(folder: _Folder) -> EmbedError:
    return EmbedError(
        f"the inputs have changed: {folder.address} holds partitions of other pictures. Restore them, or start anew "
        "with --overwrite (overwrite=True)"
    )
