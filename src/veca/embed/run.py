"""`embed`: features of many images, computed by one model in this process.

    sources → partitions → decoding processes → batches of one shape → partition files → one file, if asked for

A run that was interrupted is resumed by the partitions in its folder (`veca.embed.partitions`).
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from veca.data.loader import Record, decode_items
from veca.data.remote import is_remote
from veca.data.sources import Item, count_images, unpack_files
from veca.data.workers import WorkerDiedError
from veca.embed import partitions
from veca.embed.batches import FeatureBatcher, partition_length, prepare_model
from veca.embed.folder import PartitionFolder, prepare_run
from veca.embed.formats import feature_schema
from veca.embed.partitions import Partition, PartitionState, SliceState, plan_partitions, stamp_files
from veca.embed.settings import (
    EmbedError,
    EmbedReport,
    EmbedSettings,
    Precision,
    SaveDtype,
    describe_features,
    describe_job,
)
from veca.embed.writer import PartitionWriter
from veca.errors import NonFiniteError
from veca.images.formats import collect_unsupported
from veca.model import Veca
from veca.utils.files import check_utf8, check_writable
from veca.utils.progress import ProgressTask, ReadingLine, bar

__all__ = ["EmbedError", "EmbedReport", "EmbedSettings", "Precision", "SaveDtype", "embed"]

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
    workers: int = 0,
    overwrite: bool = False,
    skip_nonfinite: bool = False,
    ignore_dates: bool = False,
    progress: bool = True,
) -> EmbedReport:
    """Write the features of all images in `inputs` to `out`: a `.parquet`, `.safetensors` or `.npz` file, or a folder.

    `inputs` are files, folders (recursive, links to folders excepted), globs, tar shards (`.tar`, `.tar.gz`, `.tgz`)
    and Parquet files with encoded images in `column` (None: the only one of bytes, or `image`), on this machine or at
    addresses that fsspec reads; rows keep their order, and folders are sorted. An image that cannot be read is a row
    in `<out>.failures.csv`; one whose features have NaN or infinity stops the run, unless `skip_nonfinite` makes it
    such a row too. The model moves to `device` (None: it stays where it is). `workers` processes decode images (0:
    this process does); compressed shards are unpacked by this process alone. Called again after an interruption, with
    the same arguments, it continues if files have the names, sizes and dates they had (`ignore_dates`: names and
    sizes); `overwrite` starts anew and replaces an earlier `out`.

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
    began = time.perf_counter()
    if is_remote(os.fspath(out)):
        raise EmbedError(f"{out}: an address; this engine writes on this machine. --engine ray writes to addresses")
    sources, folder, settings = prepare_run(inputs, out, model, settings, column, workers, progress)
    device = torch.device(device) if device is not None else next(model.parameters()).device
    check_utf8(out)
    check_writable(folder.file or folder.address, folder=folder.file is None)
    about = describe_features(model, model_name, settings, device)
    length = partition_length(model.config, settings, partitions.PARTITION)
    was_training = model.training
    schema = feature_schema(model.config.num_features, settings)
    batcher = FeatureBatcher(prepare_model(model, settings, device), settings, device, schema, skip_nonfinite)
    run = _PlainRun(folder, batcher, about)
    run.column, run.ignore_dates = column, ignore_dates
    try:
        with folder.locked(), collect_unsupported() as left_out, run.explaining_errors():
            folder.start(describe_job(about, model, sources, column, length), overwrite)
            run.run(sources, length, workers, progress)
    finally:
        model.train(was_training)
    left_out.warn()
    seconds, result = time.perf_counter() - began, Path(folder.out)
    return EmbedReport(run.images, run.failed, run.resumed, seconds, result, run.resumed_failures)


@dataclass
class _PendingPartition:
    """A partition to compute, and how far the loader has come with it."""

    partition: Partition
    slices: list[SliceState]
    loaded: int = 0  # images given to the loader
    all_loaded: bool = False


class _PlainRun:
    """Computes the partitions of a run one after another."""

    def __init__(self, folder: PartitionFolder, batcher: FeatureBatcher, about: dict[str, Any]) -> None:
        self.folder, self.batcher, self.about = folder, batcher, about
        self.column: str | None = None
        self.ignore_dates = False
        self.images = self.failed = self.resumed = self.resumed_failures = self.partitions = 0
        self.with_failures: list[int] = []  # numbers of partitions
        self.writer: PartitionWriter | None = None
        self.last_image = ""

    def run(self, sources: list[str], length: int, workers: int, progress: bool) -> None:
        s = self.batcher.settings
        # Compressed shards are not counted: it would take as long as reading them.
        total = count_images(sources, unpack=False) if progress else None
        on_read, queue = ReadingLine(), deque[_PendingPartition]()
        items = self._items(sources, length, queue, on_read)
        # One loader for all partitions, so that its processes never wait for the next. They start before the bar:
        # forking is safest before that has its thread.
        with (
            decode_items(items, s.size, s.fit, s.max_pixels, workers) as records,
            bar("embedding", total, "images", progress, failures=True) as advance,
        ):
            on_read.show = advance.describe
            self._compute(self._watch(records, advance, on_read), queue)
            advance(0, completed=self.images + self.failed, failed=self.failed)
            if self.folder.file:
                advance.describe("joining")
            totals = {"partitions": self.partitions, "pictures": self.images, "failures": self.failed}
            self.folder.complete(totals, self.with_failures, self.batcher.schema, self.about)
            advance.describe("embedded")

    def _items(
        self, sources: list[str], length: int, queue: deque[_PendingPartition], on_read: ReadingLine
    ) -> Iterator[Item]:
        """The images still to be embedded; their partitions join the queue as the loader comes to them."""
        for partition in map(stamp_files, plan_partitions(sources, length)):
            self.partitions += 1
            if state := self.folder.finished(partition, self.ignore_dates):
                self._add_totals(partition, state)
                self._add_resumed(state)
                continue
            pending = _PendingPartition(partition, self.folder.slices(partition, self.ignore_dates))
            for slice_state in pending.slices:
                self._add_resumed(slice_state)
            queue.append(pending)
            images = unpack_files(partition.files, self.column, self.batcher.settings.max_pixels, on_read)
            for item in islice(images, pending.slices[-1].end if pending.slices else 0, None):
                pending.loaded += 1
                yield item
            pending.all_loaded = True

    def _add_totals(self, partition: Partition, state: PartitionState) -> None:
        self.images += state.pictures
        self.failed += len(state.failures)
        if state.failures:
            self.with_failures.append(partition.number)

    def _add_resumed(self, state: PartitionState) -> None:
        self.resumed += state.pictures + len(state.failures)
        self.resumed_failures += len(state.failures)

    def _watch(self, records: Iterator[Record], advance: ProgressTask, on_read: ReadingLine) -> Iterator[Record]:
        done = failed = 0
        for record in records:
            self.last_image = record.name
            on_read.image_came()
            yield record
            on_read.image_came()
            done, failed = done + 1, failed + (record.pixels is None)
            advance.describe("embedding")
            # What an earlier run has done counts as soon as the loader has passed it, and not for the rate.
            advance(counted=1, completed=self.resumed + done, failed=self.resumed_failures + failed)

    def _compute(self, records: Iterator[Record], queue: deque[_PendingPartition]) -> None:
        """Divide the records among the partitions in the queue, and write each."""
        upcoming = next(records, None)

        def records_of(pending: _PendingPartition) -> Iterator[Record]:
            nonlocal upcoming
            given = 0
            # Whether a partition has ended is only known once the loader has been asked for one more image.
            while upcoming is not None and not (pending.all_loaded and given == pending.loaded):
                record, given = upcoming, given + 1
                yield record
                upcoming = next(records, None)

        while queue:
            pending = queue.popleft()
            self.writer = PartitionWriter(
                self.folder, pending.partition, self.batcher, self.about, pending.slices, _SAVE_SECONDS
            )
            state = self.writer.write(records_of(pending))
            self.writer = None
            self._add_totals(pending.partition, state)

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Raise what stops a run as EmbedError that says what is kept and how to go on."""
        try:
            yield
        except NonFiniteError as error:
            way = "--skip-nonfinite (skip_nonfinite=True) lists such images as failures and goes on"
            raise EmbedError(f"{error}. Nothing was written of it; {way}. {self._kept()}") from error
        except torch.OutOfMemoryError as error:
            where, batch = self.batcher.device, self.batcher.settings.batch
            raise EmbedError(f"no memory on {where} for batch={batch}: lower it. {self._kept()}") from error
        except WorkerDiedError as error:
            raise EmbedError(
                f"a decoding process died: {error}. Most often memory ran out (fewer --workers or a "
                f"lower --max-pixels help); if an image crashes the decoder, it comes soon after {self.last_image!r}. "
                f"{self._kept()}"
            ) from error
        except OSError as error:
            full = error.errno == errno.ENOSPC
            hint = " Free some: the partitions and the file they become exist side by side." if full else ""
            raise EmbedError(f"the run stopped: {error}.{hint} {self._kept()}") from error

    def _kept(self) -> str:
        return self.folder.kept_message(self.images + (self.writer.saved if self.writer else 0))
