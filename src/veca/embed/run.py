"""`embed`: features of many images, computed by one model in this process.

    sources → partitions → decoding processes → batches of one shape → partition files → one file, if asked for

A run that was interrupted is resumed by the partitions in its folder (`veca.embed.partitions`).
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path

import torch

from veca.data.loader import Record, decode_items
from veca.data.remote import is_remote
from veca.data.sources import Item, count_images, unpack_files
from veca.data.workers import WorkerDiedError
from veca.embed import partitions
from veca.embed.batches import FeatureBatcher, partition_length
from veca.embed.folder import PartitionFolder, prepare_run
from veca.embed.formats import feature_schema
from veca.embed.partitions import Partition, PartitionState, plan_partitions, stamp_files
from veca.embed.settings import EmbedError, EmbedReport, EmbedSettings, describe_features, describe_job
from veca.embed.writer import PartitionWriter
from veca.errors import NonFiniteError
from veca.images.formats import collect_unsupported
from veca.model import Veca
from veca.utils.console import ProgressTask, ReadingLine, bar
from veca.utils.files import check_utf8, check_writable

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
    batcher = FeatureBatcher(model, settings, device, feature_schema(about), skip_nonfinite)
    run = _PlainRun(folder, batcher, column, ignore_dates)
    try:
        with folder.locked(), collect_unsupported() as left_out, run.explaining_errors():
            folder.start(describe_job(about, model, sources, column, length), overwrite)
            run.run(sources, length, workers, progress)
    finally:
        model.train(was_training)
    left_out.warn()
    seconds = time.perf_counter() - began
    return EmbedReport(run.images, run.failed, run.resumed, seconds, Path(folder.out), run.resumed_failures)


class _PlainRun:
    """Computes the partitions of a run one after another."""

    def __init__(
        self, folder: PartitionFolder, batcher: FeatureBatcher, column: str | None, ignore_dates: bool
    ) -> None:
        self.folder, self.batcher, self.column, self.ignore_dates = folder, batcher, column, ignore_dates
        self.images = self.failed = self.resumed = self.resumed_failures = self.partitions = 0
        self.with_failures: list[int] = []  # numbers of partitions
        self.last_image = ""
        self.queue = deque[PartitionWriter]()  # partitions that the loader has come to, in order
        self.loading = deque[PartitionWriter]()  # of each image that the loader has been given, its partition

    def run(self, sources: list[str], length: int, workers: int, progress: bool) -> None:
        s = self.batcher.settings
        # Compressed shards are not counted: it would take as long as reading them.
        total = count_images(sources, unpack=False) if progress else None
        on_read = ReadingLine()
        # One loader for all partitions, so that its processes never wait for the next. They start before the bar:
        # forking is safest before that has its thread.
        with (
            decode_items(self._items(sources, length, on_read), s.size, s.fit, s.max_pixels, workers) as records,
            bar("embedding", total, "images", progress, failures=True) as advance,
        ):
            on_read.show = advance.describe
            for writer, group in groupby(self._watch(records, advance, on_read), lambda _: self.loading.popleft()):
                while self.queue[0] is not writer:  # nothing is left to embed of these
                    self._write_first(())
                self._write_first(group)
            while self.queue:
                self._write_first(())
            advance(0, completed=self.images + self.failed, failed=self.failed)
            if self.folder.file:
                advance.describe("joining")
            totals = {"partitions": self.partitions, "pictures": self.images, "failures": self.failed}
            self.folder.complete(totals, self.with_failures, self.batcher.schema)
            advance.describe("embedded")

    def _items(self, sources: list[str], length: int, on_read: ReadingLine) -> Iterator[Item]:
        """The images still to be embedded; their partitions join the queue as the loader comes to them."""
        for partition in map(stamp_files, plan_partitions(sources, length)):
            self.partitions += 1
            finished = self.folder.finished(partition, self.ignore_dates)
            slices = [] if finished else self.folder.slices(partition, self.ignore_dates)
            for state in [finished] if finished else slices:
                self.resumed += state.pictures + len(state.failures)
                self.resumed_failures += len(state.failures)
            if finished:
                self._add_totals(partition, finished)
                continue
            writer = PartitionWriter(self.folder, partition, self.batcher, slices)
            self.queue.append(writer)
            images = unpack_files(partition.files, self.column, self.batcher.settings.max_pixels, on_read)
            for item in islice(images, writer.added, None):
                self.loading.append(writer)
                yield item

    def _write_first(self, records: Iterable[Record]) -> None:
        """Write the first partition in the queue with its records."""
        state = self.queue[0].write(records, _SAVE_SECONDS)
        self._add_totals(self.queue.popleft().partition, state)

    def _add_totals(self, partition: Partition, state: PartitionState) -> None:
        self.images += state.pictures
        self.failed += len(state.failures)
        if state.failures:
            self.with_failures.append(partition.number)

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

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Raise what stops a run as EmbedError that says what is kept and how to go on."""
        try:
            yield
        except (NonFiniteError, torch.OutOfMemoryError, WorkerDiedError, OSError) as error:
            reason = str(error)
            if isinstance(error, torch.OutOfMemoryError):
                reason = f"no memory on {self.batcher.device} for batch={self.batcher.settings.batch}: lower it"
            elif isinstance(error, WorkerDiedError):
                reason = (
                    f"a decoding process died: {error}. Most often memory ran out (fewer --workers or a lower "
                    f"--max-pixels help); if an image crashes the decoder, it comes soon after {self.last_image!r}"
                )
            elif isinstance(error, OSError):
                reason = f"the run stopped: {error}"
                if error.errno == errno.ENOSPC:
                    reason += ". Free some: the partitions and the file they become exist side by side"
            saved = self.queue[0].saved if self.queue else 0
            raise EmbedError(f"{reason}. {self.folder.kept_message(self.images + saved)}") from error
