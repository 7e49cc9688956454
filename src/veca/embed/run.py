"""`embed`: features of many images, computed by one model in this process or by many on Ray.

    sources → partitions → processes that read, check and decode → GPU decoder → batches of one shape → model
            → partition files → one file, if asked for

Each stage works ahead of the next, within bounds. On a CPU the processes that decode run the model too. A run that was
interrupted is resumed by the partitions in its folder (`veca.embed.partitions`).
"""

import dataclasses
import errno
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch

from veca.checkpoint.format import weights_hash
from veca.data.gpu_decode import GpuDecoder, choose_decoder
from veca.data.records import TaskRecords, TaskSeconds, decode_tasks
from veca.data.remote import is_remote
from veca.data.sources import Item, OnRead, counting_images, find_empty_source, unpack_files
from veca.data.workers import WorkerDiedError
from veca.embed import partitions
from veca.embed.batches import EmbedJob, FeatureModel, PartitionWriter, prepare_model
from veca.embed.large import LargeImages
from veca.embed.meter import StageMeter
from veca.embed.partitions import Partition, PartitionFolder, PartitionState, RunTotals, plan_partitions
from veca.embed.ray_engine import Engine, connect_ray, find_slots, run_on_ray
from veca.embed.rows import WriteQueue
from veca.embed.settings import EmbedError, EmbedReport, EmbedSettings
from veca.embed.tuning import choose_batch, default_batch
from veca.errors import NonFiniteError
from veca.images.formats import collect_unsupported
from veca.model import Veca
from veca.utils.console import ProgressTask, ReadingLine, bar, reading_line
from veca.utils.cuda import separate_streams
from veca.utils.device import usable_cpus
from veca.utils.files import check_utf8, check_writable, list_paths
from veca.version import __version__

_SHOW_SECONDS = 0.1
"""How often the progress line changes."""
_SAVE_SECONDS = 60.0
"""How often the finished images of a partition in progress are saved: what a killed run loses at most."""


def embed(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    model: Veca,
    model_name: str,
    settings: EmbedSettings | None = None,
    device: str | torch.device | None = None,
    column: str | None = None,
    workers: int | None = None,
    engine: Engine = "plain",
    address: str | None = None,
    partition: int | None = None,
    overwrite: bool = False,
    skip_nonfinite: bool = False,
    ignore_dates: bool = False,
    progress: bool = True,
) -> EmbedReport:
    """Write the features of all images in `inputs` to `out`: a `.parquet`, `.safetensors` or `.npz` file, or a folder.

    `inputs` are files, folders (recursive, links to folders excepted), globs, tar shards (`.tar`, `.tar.gz`, `.tgz`)
    and Parquet files with encoded images in `column` (None: the only one of bytes, or `image`), on this machine or at
    addresses that fsspec reads; rows keep their order, and folders are sorted. An image that cannot be read is a row in
    `<out>.failures.csv`; one whose features have NaN or infinity stops the run, unless `skip_nonfinite` makes it such a
    row too. With dense features, images that are too large to be decoded are computed by tiles into `<out>.large`
    (`veca.embed.large`), if their format allows. The model moves to `device` (None: it stays where it is). `workers`
    processes read and decode images (None: one per CPU; 0: this process does), and run the model if that is on a CPU;
    compressed shards are unpacked by this process alone. Called again after an interruption, with the same arguments,
    it continues if files have the names, sizes and dates they had (`ignore_dates`: names and sizes); `overwrite` starts
    anew and replaces an earlier `out`. `partition` is the number of image files per file of features in the folder.

    With `engine` "ray", `out` is on a disk that all machines share, or a folder at an address as s3://…. `address` is
    the cluster's (None: the one this process or RAY_ADDRESS names, or this machine alone). Models run on `device`
    (None: on GPUs if the cluster has any, or else on CPUs), one per GPU with `workers` decoding processes (None: all
    cores there are per GPU), or one per CPU (`workers` more than 0: per that many CPUs, which all decode).

    >>> import tempfile, veca
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (80, 60)).save(f"{folder}/photo.png")
    ...     settings = EmbedSettings(cores=8, size=64)
    ...     model = veca.load("veca_tiny")
    ...     out = f"{folder}/features.parquet"
    ...     embed(folder, out, model=model, model_name="veca_tiny", settings=settings, progress=False).pictures
    1
    """
    began, on_ray, was_training = time.perf_counter(), engine == "ray", model.training
    separate_streams()
    if not on_ray and is_remote(os.fspath(out)):
        raise EmbedError(f"{out}: an address; this engine writes on this machine. --engine ray writes to addresses")
    if on_ray and settings is not None and settings.stream_above is not None:
        reason = "large images are streamed by one machine; leave it out, or --engine ray"
        raise EmbedError(f"stream_above={settings.stream_above}: {reason}")
    if partition is not None and partition < 1:
        raise EmbedError(f"partition={partition}: must be at least 1")
    sources, folder, settings = list_paths(inputs), PartitionFolder(out), (settings or EmbedSettings()).resolve(model)
    if (
        folder.file
        and folder.file.suffix != ".parquet"
        and settings.dense
        and not settings.cells
        and settings.fit in ("keep", "pad", "native")
    ):
        reason = f"gives every image a grid of its own, which {folder.file.suffix} cannot hold"
        raise EmbedError(f"fit={settings.fit!r} {reason}; write .parquet, or choose fit 'crop' or 'stretch'")
    with reading_line(progress) as on_read:
        _check_sources(sources, column, on_read, settings.fps)
    if not on_ray:
        check_utf8(out)
        check_writable(folder.file or folder.address, folder=folder.file is None)
    with connect_ray(address) if on_ray else nullcontext(), folder.locked(), collect_unsupported() as left_out:
        where, models = device or next(model.parameters()).device, 1
        if on_ray:
            models, where, workers = find_slots(device, workers)
        workers, device = usable_cpus() if workers is None else workers, torch.device(where)
        unfinished = folder.check(overwrite)  # before anything that takes long
        if settings.batch is None:
            settings = dataclasses.replace(settings, batch=unfinished.get("batch"))
        try:
            # In a thread: both compile kernels where the disk has none yet.
            with ThreadPoolExecutor(1, "choose decoder") as thread:
                decode = thread.submit(choose_decoder, settings.decode, device, check=not on_ray)
                if device.type != "cuda":
                    decode.result()
                ready = model if on_ray else prepare_model(model, settings, device)
                if settings.batch is None:
                    width = model.config.embed_dim
                    batch = default_batch(settings, device, width) if on_ray else choose_batch(ready, settings, device)
                    settings = dataclasses.replace(settings, batch=batch)
            settings = dataclasses.replace(settings, decode=decode.result())
            about = describe_features(model, model_name, settings, device)
            job = EmbedJob(folder, settings, model.config, about, device, workers, column, skip_nonfinite, ignore_dates)
            length = job.partition_length(partition or partitions.PARTITION)
            folder.start(describe_job(about, model, sources, column, length), overwrite)
            plan, meter = plan_partitions(sources, length, settings.fps is not None), StageMeter(job.processes())
            if on_ray:
                totals = run_on_ray(job, model, list(plan), models, progress)
            else:
                run = _PlainRun(job, ready, plan, meter)
                large = LargeImages(job, model, plan_partitions(sources, length), progress)
                totals = run.run(sources if progress else [], large)
        finally:
            model.train(was_training)
    left_out.warn()
    seconds, to = time.perf_counter() - began, folder.out if on_ray else Path(folder.out)
    return EmbedReport(
        totals.pictures,
        totals.failures,
        totals.resumed,
        seconds,
        to,
        totals.resumed_failures,
        meter.rates(),
        meter.bottleneck,
        job.describe(),
        totals.shrunk,
        settings.max_patches,
        len(totals.streamed) - sum(map(bool, totals.streamed.values())),
    )


def _check_sources(sources: list[str], column: str | None, on_read: OnRead | None, fps: float | None) -> None:
    """Raise EmbedError unless every source holds at least one image."""
    if not sources:
        raise EmbedError("nothing to embed; name files, folders, globs, tar shards or Parquet files")
    if problem := find_empty_source(sources, column, on_read, fps):
        raise EmbedError(problem)


def describe_features(model: Veca, name: str, settings: EmbedSettings, device: torch.device) -> dict[str, Any]:
    """How the features are made: model, weights, versions and settings. Saved as metadata of every feature file."""
    about: dict[str, Any] = {"veca": __version__, "torch": torch.__version__, "device": device.type, "model": name}
    about |= {"provenance": model.provenance, "weights": weights_hash(model), "dim": model.config.num_features}
    about |= {"patch_size": model.config.patch_size, **dataclasses.asdict(settings)}
    for name in ("max_patches", "stream_above", "cells", "fps"):
        if about[name] is None:
            del about[name]  # as before there was such a setting
    return dict(json.loads(json.dumps(about, default=str)))


def describe_job(
    about: dict[str, Any], model: Veca, sources: list[str], column: str | None, length: int
) -> dict[str, Any]:
    """What must be equal for a run to be resumed: how the features are made, of which inputs, in which partitions."""
    places = [source if is_remote(source) else os.path.abspath(source) for source in sources]
    places += [] if column is None else [f"column {column}"]
    inputs = hashlib.sha256("\0".join(places).encode("utf-8", "backslashreplace")).hexdigest()
    config = json.loads(json.dumps(model.config.to_dict()))
    return {**about, "config": config, "inputs": inputs, "partition": length}


class _PlainRun:
    """Computes the partitions of a run one after another, in this process."""

    def __init__(self, job: EmbedJob, model: Veca, plan: Iterable[Partition], meter: StageMeter) -> None:
        self.job, self.plan, self.totals, self.meter, self.last_image = job, plan, RunTotals(), meter, ""
        self.model = FeatureModel(model, job)
        self.loading = deque[PartitionWriter]()  # of each task that the loader has been given, its partition
        self.queue = WriteQueue()
        self.writing = deque[tuple[PartitionWriter, Future[PartitionState]]]()  # partitions that are being completed
        self.current: PartitionWriter | None = None

    def run(self, shown: Sequence[str], large: LargeImages) -> RunTotals:
        """Compute all partitions and complete the folder; the images of `shown` are the total of a progress bar.

        Images that were too large for the partitions are `large`.
        """
        with self._explaining_errors():
            self._run_partitions(shown, large)
            if large:
                large.run(self.totals)
                self.job.folder.complete(self.totals, self.model.schema)
        return self.totals

    def _run_partitions(self, shown: Sequence[str], large: LargeImages) -> None:
        job, totals, on_read = self.job, self.totals, ReadingLine()
        compute = None
        if job.by_task:
            compute = self.model.compute
            if job.workers:
                self.model.warm_up()
        # One pool for all partitions, so that its processes never wait for the next. They start before the bar and the
        # decoder: forking is safest before those have their threads.
        with (
            GpuDecoder(job.device, self.meter.add) if job.resizes_on_gpu else nullcontext() as gpu,
            decode_tasks(
                self._tasks(on_read), job.decoder, job.workers, gpu=gpu, compute=compute, on_work=self._on_work
            ) as tasks,
            bar("embedding", None, "images", bool(shown), failures=True, note=job.describe()) as advance,
            # Compressed shards are not counted: it would take as long as reading them.
            counting_images(shown, lambda total: advance(total=total), job.settings.fps is not None),
            self.queue,
        ):
            on_read.show = advance.describe
            for writer, group in groupby(self._watch(tasks, advance, on_read), lambda _: self.loading.popleft()):
                self._write(writer, group)
            self._count_written(all_of_them=True)
            large.find(totals)
            failed = totals.failures - len(large)
            note = f"{len(large)} large to come" if large else ""
            advance(0, completed=totals.pictures + failed, failed=failed, note=note)
            if not large:
                if job.folder.file:
                    advance.describe("joining")
                job.folder.complete(totals, self.model.schema)
            advance.describe("embedded")

    def _on_work(self, images: int, seconds: TaskSeconds) -> None:
        self.meter.add(self.job.reading, images, seconds.decode)
        if self.job.by_task:
            self.meter.add("model", images, seconds.compute)

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        """Raise what stops a run as EmbedError that says what is kept and how to go on."""
        try:
            yield
        except (NonFiniteError, torch.OutOfMemoryError, torch.AcceleratorError, WorkerDiedError, OSError) as error:
            reason = str(error)
            if isinstance(error, torch.OutOfMemoryError):
                reason = f"no memory on {self.job.device} for batch={self.job.settings.batch}: lower it"
            elif isinstance(error, torch.AcceleratorError):
                reason = f"{self.job.device} failed soon after {self.last_image!r}: {reason.splitlines()[0]}"
            elif isinstance(error, WorkerDiedError):
                reason = (
                    f"a decoding process died: {error}. Most often memory ran out (fewer --workers or a lower "
                    f"--max-pixels help); if an image crashes the decoder, it comes soon after {self.last_image!r}"
                )
            elif isinstance(error, OSError):
                more = ". Free some: the partitions and the file they become exist side by side"
                reason = f"the run stopped: {error}{more if error.errno == errno.ENOSPC else ''}"
            images = self._count_kept()
            raise EmbedError(f"{reason}. {self.job.folder.kept_message(images)}") from error

    def _tasks(self, on_read: ReadingLine) -> Iterator[list[Item]]:
        """The images still to be embedded, of the partitions as the workers come to them."""
        job, totals = self.job, self.totals
        for partition in map(Partition.with_stamps, self.plan):
            totals.partitions += 1
            finished = job.folder.finished(partition, job.ignore_dates)
            slices = [] if finished else job.folder.slices(partition, job.ignore_dates)
            for state in [finished] if finished else slices:
                totals.resumed += state.pictures + len(state.failures)
                totals.resumed_failures += len(state.failures)
            if finished:
                totals.add(partition.number, finished.pictures, len(finished.failures), finished.shrunk)
                continue
            writer = PartitionWriter(self.model, partition, slices, self.meter)
            settings, task = job.settings, None
            images = unpack_files(partition.files, job.column, settings.max_pixels, on_read, settings.fps)
            for task in job.split_tasks(islice(images, writer.added, None)):
                self.loading.append(writer)
                yield task
            if task is None:  # a shard without images, or all of them are in slices
                self._write(writer, ())

    def _write(self, writer: PartitionWriter, tasks: Iterable[TaskRecords]) -> None:
        before, self.current = self.current, writer  # a shard without images may come while one with images is at work
        self.writing.append((writer, writer.submit(tasks, self.queue, _SAVE_SECONDS)))
        self.current = before
        self._count_written()

    def _count_written(self, all_of_them: bool = False) -> None:
        """Count the partitions that are complete, without waiting for others unless told so."""
        while self.writing and (all_of_them or self.writing[0][1].done()):
            writer, future = self.writing.popleft()
            state = future.result()
            self.totals.add(writer.partition.number, state.pictures, len(state.failures), state.shrunk)

    def _count_kept(self) -> int:
        """The images that a run which stopped has written, once its thread is done."""
        slices = list(self.current.slices) if self.current else []
        images = self.totals.pictures
        for writer, future in self.writing:
            if future.exception() is None:
                images += future.result().pictures
            else:
                slices += writer.slices
        return images + sum(state.pictures for state in slices)

    def _watch(
        self, tasks: Iterator[TaskRecords], advance: ProgressTask, on_read: ReadingLine
    ) -> Iterator[TaskRecords]:
        done = failed = counted = 0
        shown = time.monotonic()
        for records in tasks:
            self.last_image = records.names[0]
            yield records
            self.last_image = records.names[-1]
            done, failed, counted = done + len(records), failed + len(records.errors), counted + len(records)
            if (now := time.monotonic()) - shown > _SHOW_SECONDS:
                shown = now
                on_read.image_came()
                advance.describe("embedding")
                # What an earlier run has done counts as soon as the workers have passed it, and not for the rate.
                totals = self.totals
                completed, all_failed = totals.resumed + done, totals.resumed_failures + failed
                advance(counted=counted, completed=completed, failed=all_failed, note=self._note())
                counted = 0

    def _note(self) -> str:
        """What the progress line says beside the numbers."""
        slowest = self.meter.bottleneck
        return f"{self.job.describe()}, {slowest} is the bottleneck" if slowest else self.job.describe()
