"""Features of many pictures in one file: read, embed, write, and go on where an interrupted run stopped.

    sources → one walk over all names → decoding processes → batches of one shape → parts → one file

A run keeps its finished *parts* (`veca.embed.partitions`) in `<out>.parts/` and merges them at the end. The part in
progress is saved there too, up to its last whole batch: when the run is stopped, and every minute in case it is killed.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from veca.checkpoint import weights_hash
from veca.data.loader import Record, decode_items
from veca.data.remote import is_remote
from veca.data.sources import SHARDS, TABLES, OnRead, count_images, iter_items
from veca.embed.formats import WRITERS, DamagedPart
from veca.embed.partitions import EmbedError, EmbedSettings, Part, Parts, Precision, SaveDtype, cut
from veca.errors import NonFiniteError
from veca.images import EXTENSIONS, PATCH
from veca.images.formats import collect_unsupported
from veca.model import Veca
from veca.optimized import optimize, supports_fused, unfusable_reason
from veca.utils.console import progress_bar
from veca.utils.files import InUseError, check_utf8, check_writable, locked
from veca.version import __version__

__all__ = ["EmbedError", "EmbedReport", "EmbedSettings", "Precision", "SaveDtype", "embed"]

_KEEP_SECONDS = 60.0
_SILENT_SECONDS = 2.0
"""After so long without a picture, what is read instead is shown."""


class EmbedReport(NamedTuple):
    """What a run did."""

    pictures: int
    """Rows in `out`."""
    failures: int
    """Rows in `<out>.failures.csv`; without any there is no such file."""
    resumed: int
    """Pictures and failures among these that an earlier, interrupted run had finished."""
    seconds: float
    out: Path | str
    """A file; of `veca.embed.ray_engine` a folder, or its address."""
    resumed_failures: int = 0
    """How many of `resumed` are failures."""


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
    """Write the features of all pictures in `inputs` to `out` (`.parquet`, `.safetensors` or `.npz`).

    `inputs` are files, folders (all below, links to folders excepted), globs, tar shards (`.tar`, `.tar.gz`, `.tgz`)
    and Parquet files, whose pictures are bytes in `column` (None: the only one of bytes, or `image`), here or at
    addresses that fsspec reads; rows keep their order, and a folder's is sorted. A picture that cannot be read is a
    row in `<out>.failures.csv` and stops nothing; one whose features have NaN or infinity stops the run, unless
    `skip_nonfinite` makes it such a row too. The model moves to `device` (None: it stays where it is). `workers`
    processes decode pictures, with 0 this one does; it alone unpacks compressed shards. Called again after an
    interruption, with the same arguments, it continues if the files have the names, sizes and dates they had
    (`ignore_dates`: names and sizes); `overwrite` starts anew and replaces an earlier `out`.

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
        raise EmbedError(f"{out}: an address; one file is written on this machine. --engine ray writes to addresses")
    sources, out = listed(inputs), Path(out)
    device = torch.device(device) if device is not None else next(model.parameters()).device
    settings = settings or EmbedSettings()
    _check_file(out, settings)
    with reading_line(progress) as on_read:
        settings = check(sources, model, settings, workers, column, on_read)
    about = describe(model, model_name, settings, device)
    parts = Parts(out, settings, about, describe_inputs(sources, column))
    if out.exists() and not overwrite and not parts.unfinished:
        raise EmbedError(f"{out} exists; choose another name, or overwrite it with --overwrite (overwrite=True)")
    check_utf8(out)
    check_writable(out)
    was_training = model.training
    new_part = partial(Part, ready(model, settings, device), settings, device, skip_nonfinite)
    try:
        with locked(parts.folder), collect_unsupported() as left_out:
            parts.resume(overwrite)
            _run(sources, column, parts, new_part, workers, ignore_dates, progress)
        with suppress(OSError):  # not empty, if someone keeps a file of their own in it
            parts.folder.rmdir()
    except InUseError as error:
        raise EmbedError(str(error)) from None
    except DamagedPart as error:
        raise EmbedError(f"{error}; start anew with --overwrite (overwrite=True)") from error
    except NonFiniteError as error:
        way = "--skip-nonfinite (skip_nonfinite=True) lists such pictures as failures and goes on"
        raise EmbedError(f"{error}. Nothing was written of it; {way}. {parts.kept}") from error
    except torch.OutOfMemoryError as error:
        raise EmbedError(f"no memory on {device} for batch={settings.batch}: lower it. {parts.kept}") from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise EmbedError(
            f"a decoding process died: {str(error).rstrip('. ')}. Most often memory ran out (fewer --workers or a "
            f"lower --max-pixels help); if a picture crashes the decoder, it comes soon after {parts.last!r}. "
            f"{parts.kept}"
        ) from error
    except OSError as error:
        hint = " Free some: the parts and the file they become exist side by side." * (error.errno == errno.ENOSPC)
        raise EmbedError(f"the run stopped: {error}.{hint} {parts.kept}") from error
    finally:
        model.train(was_training)
    left_out.warn()
    seconds = time.perf_counter() - began
    return EmbedReport(parts.pictures, parts.failed, parts.resumed, seconds, out, parts.resumed_failures)


def listed(inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """The sources in `inputs`, one or several."""
    return [os.fspath(source) for source in ([inputs] if isinstance(inputs, str | os.PathLike) else inputs)]


def ready(model: Veca, settings: EmbedSettings, device: torch.device) -> Veca:
    """The model as it runs: on the device, and fast where that helps."""
    model.to(device).eval()
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.data_ptr() % 64:  # as weights lie in their file; on CPUs the bits of small products depend on it
            tensor.data = tensor.data.clone()
    dtype: torch.dtype = getattr(torch, settings.precision)
    fast = supports_fused(model.config, device, dtype) and not unfusable_reason(model)
    return optimize(model, dtype=dtype) if fast else model


def _check_file(out: Path, settings: EmbedSettings) -> None:
    if out.suffix not in WRITERS:
        raise EmbedError(f"{out}: unknown kind of file {out.suffix!r}; choose one of {', '.join(WRITERS)}")
    if out.is_dir():
        raise EmbedError(f"{out} is a folder; name a file in it")
    if settings.dense and settings.fit in ("keep", "pad") and out.suffix != ".parquet":
        raise EmbedError(
            f"fit={settings.fit!r} gives every picture a grid of its own, which {out.suffix} cannot hold; "
            "write .parquet, or choose fit 'crop' or 'stretch'"
        )


def check(
    sources: list[str],
    model: Veca,
    settings: EmbedSettings,
    workers: int,
    column: str | None = None,
    on_read: OnRead | None = None,
) -> EmbedSettings:
    """The settings with the budget filled in, if all can work together."""
    most, patch = model.config.num_cores, model.config.patch_size
    budget = most if settings.cores is None else settings.cores
    if type(budget) is not int or not 1 <= budget <= most:
        raise EmbedError(f"cores={budget!r}; a budget is an integer from 1 to {most}, or None for all {most}")
    if settings.size % (step := math.lcm(patch, PATCH)):
        near = max(step, round(settings.size / step) * step)
        raise EmbedError(f"size={settings.size}: must be a multiple of {step}. Nearest: {near}")
    if workers < 0:
        raise EmbedError(f"workers={workers}: must be 0 (decode in this process) or more")
    if not sources:
        raise EmbedError("nothing to embed; name files, folders, globs, tar shards or Parquet files")
    for source in sources:
        with collect_unsupported() as left_out:
            first = next(iter_items([source], column, on_read=on_read), None)
        if first is None:
            names = os.listdir(source) if os.path.isdir(source) else []
            kinds = ((SHARDS, "tar shards", "*.tar"), (TABLES, "Parquet files", "*.parquet"))
            found = ((what, stars) for ends, what, stars in kinds if any(name.endswith(ends) for name in names))
            hint = "".join(f". Its {what} can be named: '{os.path.join(source, stars)}'" for what, stars in found)
            raise EmbedError(left_out.append_to(f"{source}: no pictures there ({', '.join(sorted(EXTENSIONS))}){hint}"))
    return dataclasses.replace(settings, cores=budget)


def describe(model: Veca, name: str, settings: EmbedSettings, device: torch.device) -> dict[str, Any]:
    """What made the features; a run with another description is another run."""
    weights = weights_hash(model, prefix=json.dumps(model.config.to_dict()))
    about: dict[str, Any] = {"veca": __version__, "torch": torch.__version__, "device": device.type, "model": name}
    about |= {"provenance": model.provenance, "weights": weights}
    about |= {"dim": model.config.num_features, "patch_size": model.config.patch_size}
    return dict(json.loads(json.dumps(about | dataclasses.asdict(settings), default=str)))


def describe_inputs(sources: list[str], column: str | None) -> str:
    """A hash of where the pictures are."""
    places = [source if is_remote(source) else os.path.abspath(source) for source in sources]
    places += [] if column is None else [f"column {column}"]
    return hashlib.sha256("\0".join(places).encode("utf-8", "backslashreplace")).hexdigest()


def progress_line(*counts: str | ProgressColumn, shown: bool) -> Progress:
    """The line that every engine shows: what it does, `counts`, how fast, how long."""
    said = ("{task.description}", *counts, "{task.fields[rate]}", "{task.fields[failed]} failed")
    return progress_bar(*said, BarColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn(), shown=shown)


class _Reading:
    """Shows what is read while no picture comes: an archive may hold other files for minutes."""

    def __init__(self, show: Callable[[str], object] = lambda text: None) -> None:
        self.show, self.since = show, time.monotonic()

    def __call__(self, path: str, size: int) -> None:
        if (now := time.monotonic()) - self.since > _SILENT_SECONDS:
            self.since = now - _SILENT_SECONDS / 2  # again in a second
            self.show(f"reading {os.path.basename(path)}: {size / 1e9:.1f} GB")

    def picture_came(self) -> None:
        self.since = time.monotonic()


@contextmanager
def reading_line(shown: bool) -> Iterator[_Reading]:
    """A line that comes when the block reads for long without a picture, and goes with the block.

    It has no thread: processes may be forked in the block.
    """
    line = progress_bar("{task.description}", TimeElapsedColumn(), shown=shown, transient=True, auto_refresh=False)
    task = line.add_task("")

    def show(text: str) -> None:
        line.start()
        line.update(task, description=text, refresh=True)

    try:
        yield _Reading(show)
    finally:
        line.stop()


def _run(
    sources: list[str],
    column: str | None,
    parts: Parts,
    new_part: Callable[[], Part],
    workers: int,
    ignore_dates: bool,
    progress: bool,
) -> None:
    part = new_part()
    s = part.settings
    # Compressed shards are not counted: it would take as long as reading them.
    total = count_images(sources, unpack=False) if progress else None
    on_read = _Reading()
    items = iter_items(sources, column, s.max_pixels, on_read)
    with reading_line(progress) as line:
        on_read.show = line.show
        parts.skip(items, ignore_dates)
    parts.restore(part)
    # The decoding processes come first: forking is safest before the bar has its thread.
    with (
        decode_items(items, s.size, s.fit, s.max_pixels, workers) as records,
        progress_line(MofNCompleteColumn(), shown=progress) as bar,
    ):
        task = bar.add_task("embedding", total=total, completed=parts.resumed, rate="", failed=parts.failed)
        on_read.show = lambda text: bar.update(task, description=text)

        def watched() -> Iterator[Record]:
            began = time.perf_counter()
            for done, record in enumerate(records, 1):
                parts.last = record.name
                on_read.picture_came()
                yield record
                rate = f"{done / (time.perf_counter() - began):.1f} pictures/s"
                failed = parts.failed + len(part.failures)
                bar.update(task, description="embedding", advance=1, rate=rate, failed=failed)
                if time.monotonic() - parts.kept_at > _KEEP_SECONDS:
                    parts.keep(part)

        def next_part() -> Part:
            nonlocal part
            part = new_part()
            return part

        try:
            for whole in cut(watched(), next_part, part.most, part):
                parts.store(whole)
                on_read.picture_came()
                del whole  # or it would be in memory beside the next one
            next_part()
        except BaseException:
            with suppress(OSError, EmbedError):  # what stopped the run is to be told
                parts.keep(part)
            raise
        bar.update(task, description="merging", failed=parts.failed)
        parts.merge()
        bar.update(task, description="embedded")
