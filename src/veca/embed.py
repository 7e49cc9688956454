"""Features of many pictures in one file: read, embed, write, and go on where an interrupted run stopped.

    sources → one walk over all names → decoding processes → batches of one shape → parts → one file

A run keeps its finished *parts* in `<out>.parts/` and merges them at the end. The part at hand is kept there too, as
far as its batches are whole: when the run is stopped, and every minute in case it is killed. What a part holds follows
from the settings and the order of the pictures alone, and none holds pictures of two shards. So a continued run, or one
that many machines share (`veca.scale`), forms the same batches and gives the same bits as one that was never
interrupted.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import glob
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from veca.fast import fits, optimize
from veca.features import PARQUET, WRITERS, feature_schema
from veca.files import atomic_path, check_writable
from veca.images import EXTENSIONS, MAX_PIXELS, PATCH, Fit, normalize
from veca.model import Veca
from veca.sources import SHARDS, TABLES, Item, Record, count, decoded, expand, is_remote, items_of, noting_left_out

Precision = Literal["float32", "bfloat16", "float16"]
SaveDtype = Literal["float32", "float16"]

_PART_BYTES = 256 << 20
_PART_PICTURES = 1024
_KEEP_SECONDS = 60.0


class EmbedError(ValueError):
    """A run that cannot start, go on or end: the message says why and the way out."""


@dataclass(frozen=True, kw_only=True)
class EmbedSettings:
    """Everything beside the model and the pictures that the numbers depend on."""

    cores: int | None = None
    """Budget; None: all the model has."""
    size: int = 512
    """Side in pixels, as `veca.images.fit_image` takes it."""
    fit: Fit = "crop"
    dense: bool = False
    """Save the patches."""
    with_global: bool = True
    """Save the global feature."""
    batch: int = 32
    """Pictures of size × size per step; of larger ones, as many as have no more pixels together."""
    precision: Precision = "float32"
    """Of the computation: other than float32, autocast."""
    save_dtype: SaveDtype = "float32"
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        for name in ("size", "batch", "max_pixels"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise EmbedError(f"{name}={value!r}: must be an integer, at least 1")
        for name, kind in (("fit", Fit), ("precision", Precision), ("save_dtype", SaveDtype)):
            known = get_args(kind)
            if (value := getattr(self, name)) not in known:
                raise EmbedError(f"{name}={value!r}: must be one of {', '.join(known)}")
        if not self.dense and not self.with_global:
            raise EmbedError("nothing to save: ask for the global feature, for dense features, or for both")


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
    """A file; of `veca.scale` a folder, or its address."""


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
    progress: bool = True,
) -> EmbedReport:
    """Write the features of all pictures in `inputs` to `out` (`.parquet`, `.safetensors` or `.npz`).

    `inputs` are files, folders (all below, links to folders excepted), globs, tar shards (`.tar`, `.tar.gz`, `.tgz`)
    and Parquet files, whose pictures are bytes in `column` (None: the only one of bytes, or `image`), here or at
    addresses that fsspec reads; rows keep their order, and a folder's is sorted. A picture that cannot be read is a
    row in `<out>.failures.csv` and stops nothing. The model moves to `device` (None: it stays where it is). `workers`
    processes decode pictures, with 0 this one does; it alone unpacks compressed shards, once more when `progress` has
    to count. Called again after an interruption, with the same arguments, it continues; `overwrite` starts anew and
    replaces an earlier `out`.

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
    settings = check(sources, model, settings, workers, column)
    about = describe(model, model_name, settings, device)
    parts = _Parts(out, settings, about, sources, column)
    if out.exists() and not overwrite and not parts.unfinished:
        raise EmbedError(f"{out} exists; choose another name, or overwrite it with --overwrite (overwrite=True)")
    check_writable(out)
    was_training = model.training
    new_part = partial(Part, ready(model, settings, device), settings, device)
    try:
        with _locked(parts.folder), noting_left_out() as left_out:
            parts.resume(overwrite)
            _run(sources, column, parts, new_part, workers, progress)
    except torch.OutOfMemoryError as error:
        raise EmbedError(f"no memory on {device} for batch={settings.batch}: lower it. {parts.kept}") from error
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise EmbedError(
            f"a decoding process died: {error} Most often memory ran out (fewer --workers or a lower --max-pixels "
            f"help); if a picture crashes the decoder, it comes soon after {parts.last!r}. {parts.kept}"
        ) from error
    except OSError as error:
        hint = " Free some: the parts and the file they become exist side by side." * (error.errno == errno.ENOSPC)
        raise EmbedError(f"the run stopped: {error}.{hint} {parts.kept}") from error
    finally:
        model.train(was_training)
    left_out.warn()
    return EmbedReport(parts.pictures, parts.failed, parts.resumed, time.perf_counter() - began, out)


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
    return optimize(model, dtype=dtype) if fits(model.config, device, dtype) else model


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
    sources: list[str], model: Veca, settings: EmbedSettings, workers: int, column: str | None = None
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
        with noting_left_out() as left_out:
            first = next(expand(source, column), None)
        if first is None:
            names = os.listdir(source) if os.path.isdir(source) else []
            kinds = ((SHARDS, "tar shards", "*.tar"), (TABLES, "Parquet files", "*.parquet"))
            found = ((what, stars) for ends, what, stars in kinds if any(name.endswith(ends) for name in names))
            hint = "".join(f". Its {what} can be named: '{os.path.join(source, stars)}'" for what, stars in found)
            raise EmbedError(left_out.after(f"{source}: no pictures there ({', '.join(sorted(EXTENSIONS))}){hint}"))
    return dataclasses.replace(settings, cores=budget)


def describe(model: Veca, name: str, settings: EmbedSettings, device: torch.device) -> dict[str, Any]:
    """What made the features; a run with another description is another run."""
    digest = hashlib.sha256(json.dumps(model.config.to_dict()).encode())
    for key, tensor in model.state_dict().items():
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy())
    about: dict[str, Any] = {"veca": version("veca"), "torch": torch.__version__, "device": device.type, "model": name}
    about |= {"provenance": model.provenance, "weights": digest.hexdigest()}
    about |= {"dim": model.config.num_features, "patch_size": model.config.patch_size}
    return dict(json.loads(json.dumps(about | dataclasses.asdict(settings), default=str)))


def describe_inputs(sources: list[str], column: str | None) -> str:
    """A hash of where the pictures are."""
    places = [source if is_remote(source) else os.path.abspath(source) for source in sources]
    places += [] if column is None else [f"column {column}"]
    return hashlib.sha256("\0".join(places).encode("utf-8", "backslashreplace")).hexdigest()


def progress_line(*counts: str, shown: bool) -> Progress:
    """The line that every engine shows: what it does, `counts`, how fast, how long."""
    said = ("{task.description}", *counts, "{task.fields[rate]}", "{task.fields[failed]} failed")
    columns = (*map(TextColumn, said), BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not shown)


def _run(
    sources: list[str],
    column: str | None,
    parts: _Parts,
    new_part: Callable[[], Part],
    workers: int,
    progress: bool,
) -> None:
    total = count(sources) if progress else None
    items = items_of(sources, column)
    parts.skip(items)
    s = new_part().settings
    part = new_part()
    parts.restore(part)
    # The decoding processes come first: forking is safest before the bar has its thread.
    with (
        decoded(items, s.size, s.fit, s.max_pixels, workers) as records,
        progress_line("{task.completed}/{task.total}", shown=progress) as bar,
    ):
        task = bar.add_task("embedding", total=total, completed=parts.resumed, rate="", failed=parts.failed)

        def watched() -> Iterator[Record]:
            began, failed = time.perf_counter(), parts.failed + len(part.failures)
            for done, record in enumerate(records, 1):
                parts.last = record.name
                failed += record.pixels is None
                yield record
                rate = f"{done / (time.perf_counter() - began):.1f} pictures/s"
                bar.update(task, advance=1, rate=rate, failed=failed)
                if time.monotonic() - parts.kept_at > _KEEP_SECONDS:
                    parts.keep(part)

        def next_part() -> Part:
            nonlocal part
            part = new_part()
            return part

        try:
            for whole in cut(watched(), next_part, part.most, part):
                parts.store(whole)
                del whole  # or it would be in memory beside the next one
            next_part()
        except BaseException:
            with suppress(OSError):  # what stopped the run is to be told
                parts.keep(part)
            raise
        bar.update(task, description="merging")
        parts.merge()
        bar.update(task, description="embedded")


def cut(
    records: Iterable[Record], new_part: Callable[[], Part], most: int, begun: Part | None = None
) -> Iterator[Part]:
    """The records as parts: one ends with every `most`-th picture of a shard or a run of files, or when it is full.

    The first of them go to the part that was `begun`, if there is one.
    """
    part = begun or new_part()
    for record in records:
        if part.names and record.number == 0:
            yield part
            part = new_part()
        part.add(record)
        if part.full or (record.number + 1) % most == 0:
            yield part
            part = new_part()
    if part.names:
        yield part


class Part:
    """Pictures on their way to one file of features, in input order. Batches take them as they come, by shape."""

    def __init__(self, model: Veca, settings: EmbedSettings, device: torch.device) -> None:
        self.model, self.settings, self.device = model, settings, device
        self.names: list[str] = []
        self.rows: list[tuple[str, int, int, int, int, int | None]] = []
        self.failures: list[tuple[str, str]] = []
        self._features: dict[str, dict[int, NDArray[Any]]] = {"cls": {}, "patches": {}}
        self._waiting: dict[tuple[int, int], list[tuple[int, NDArray[np.uint8]]]] = {}
        self._waiting_bytes = self._feature_bytes = 0
        self.settled = (0, 0)
        """Of names and rows, how many there were when last no picture waited for its batch."""
        picture = self._bytes_of(settings.size, settings.size)
        self._most_bytes = max(_PART_BYTES, settings.batch * picture)
        self.most = max(1, min(_PART_PICTURES, self._most_bytes // picture) // settings.batch) * settings.batch

    def _bytes_of(self, height: int, width: int) -> int:
        """Size of the features of a picture."""
        s, config = self.settings, self.model.config
        vectors = s.with_global + s.dense * (height * width // config.patch_size**2)
        return vectors * config.num_features * np.dtype(s.save_dtype).itemsize

    @property
    def full(self) -> bool:
        """Whether pictures larger than size × size have filled it before it had `most` of them."""
        return self._feature_bytes > self._most_bytes

    def add(self, record: Record) -> None:
        self._add(record)
        if not self._waiting:
            self.settled = (len(self.names), len(self.rows))

    def restore(self, names: list[str], failures: Iterable[Sequence[str]], table: pa.Table) -> None:
        """Begin with what another part had settled."""
        patch = self.model.config.patch_size
        columns: list[list[Any]] = [table[i].to_pylist() for i in range(6)]
        self.names, self.rows = names, list(zip(*columns, strict=True))
        self.failures = [(name, error) for name, error in failures]
        self._feature_bytes = sum(self._bytes_of(row[3] * patch, row[4] * patch) for row in self.rows)
        for name in table.schema.names[6:]:
            self._features[name] = {i: row.values.to_numpy() for i, row in enumerate(table[name])}
        self.settled = (len(self.names), len(self.rows))

    def _add(self, record: Record) -> None:
        self.names.append(record.name)
        if record.pixels is None:
            self.failures.append((record.name, record.error))
            return
        height, width = shape = record.pixels.shape[1:]
        s, patch, area = self.settings, self.model.config.patch_size, self.settings.batch * self.settings.size**2
        group = self._waiting.setdefault(shape, [])
        group.append((len(self.rows), record.pixels))
        self.rows.append((record.name, *record.size, height // patch, width // patch, s.cores))
        self._waiting_bytes += record.pixels.nbytes
        self._feature_bytes += self._bytes_of(height, width)
        if len(group) >= min(s.batch, max(1, area // (height * width))):
            self._embed(shape)
        elif self._waiting_bytes > max(_PART_BYTES, 3 * area):
            self._embed(*self._waiting)

    def _embed(self, *shapes: tuple[int, int]) -> None:
        s = self.settings
        precision = torch.autocast(self.device.type, getattr(torch, s.precision), enabled=s.precision != "float32")
        for group in map(self._waiting.pop, shapes):
            pixels = torch.from_numpy(np.stack([pixels for _, pixels in group]))
            self._waiting_bytes -= pixels.nbytes
            with torch.inference_mode(), precision:
                output = self.model(normalize(pixels.to(self.device)), cores=s.cores, cls_only=not s.dense)
            for name, wanted in (("cls", s.with_global), ("patches", s.dense)):
                if wanted:
                    # A copy always: a view of one token would keep all tokens in memory.
                    features = getattr(output, name).to("cpu", getattr(torch, s.save_dtype), copy=True)
                    indices = (index for index, _ in group)
                    self._features[name].update(zip(indices, features.flatten(1).numpy(), strict=True))

    def table(self, schema: pa.Schema, count: int | None = None) -> pa.Table:
        """All rows, or the first `count`, which must be settled."""
        if count is None:
            self._embed(*self._waiting)
            count = len(self.rows)
        columns: dict[str, Any] = {n: [row[i] for row in self.rows[:count]] for i, n in enumerate(schema.names[:6])}
        for name in schema.names[6:]:
            rows = [np.empty(0, self.settings.save_dtype), *(self._features[name][i] for i in range(count))]
            ends, values = pa.array(np.cumsum([row.size for row in rows])), pa.array(np.concatenate(rows))
            columns[name] = pa.LargeListArray.from_arrays(ends, values).cast(schema.field(name).type)
        return pa.table(columns, schema)


class _Parts:
    """The finished parts of a run, in a folder beside `out`, and what they become.

    Each part knows the totals up to its end and a digest of all names so far, so the last tells where to go on.
    """

    def __init__(
        self, out: Path, settings: EmbedSettings, about: dict[str, Any], sources: list[str], column: str | None
    ) -> None:
        self.out, self.about = out, about
        self.folder = out.with_name(f"{out.name}.parts")
        self.job = {**about, "inputs": describe_inputs(sources, column)}
        self.schema = feature_schema(about["dim"], settings.save_dtype, settings.with_global, settings.dense)
        self.count = self.items = self.pictures = self.failed = self.resumed = self.rows = 0
        self.digest = self.last = ""
        self.begun = self.folder / "begun.parquet"
        self.names: list[str] = []
        """What `begun` holds of the part at hand, and `rows` how many of them are pictures."""
        self.kept_at = time.monotonic()

    @property
    def unfinished(self) -> bool:
        return (self.folder / "job.json").exists() and (self._file(0).exists() or self.begun.exists())

    @property
    def kept(self) -> str:
        done = self.pictures + self.rows
        return f"{done:,} finished pictures are kept in {self.folder}; the same call continues after them."

    def _file(self, index: int) -> Path:
        return self.folder / f"{index:06d}.parquet"

    def _state(self, file: Path) -> dict[str, Any]:
        try:
            return dict(json.loads(pq.read_schema(file).metadata[b"veca"]))
        except (ValueError, KeyError, TypeError) as error:
            raise EmbedError(f"{file} is damaged ({error}); start anew with --overwrite") from error

    def resume(self, overwrite: bool) -> None:
        """Take over the parts of an earlier run of the same job; refuse those of another."""
        old = None
        with suppress(OSError, ValueError):
            old = json.loads((self.folder / "job.json").read_text())
        if overwrite or old is None or not self.unfinished:
            self._clear()
            with atomic_path(self.folder / "job.json") as path:
                path.write_text(json.dumps(self.job, indent=2))
            return
        same_job(self.folder, old, self.job)
        while self._file(self.count).exists():
            self.count += 1
        if self.count:
            state = self._state(self._file(self.count - 1))
            self.items, self.pictures, self.failed = state["items"], state["pictures"], state["failed"]
            self.digest = state["digest"]
        if self.begun.exists() and (state := self._state(self.begun))["part"] == self.count:
            self.names = state["names"]
            self.rows = len(self.names) - len(state["failures"])
        self.resumed = self.items + len(self.names)

    def _follow(self, names: Iterable[str]) -> None:
        for name in names:
            self.digest = hashlib.sha256(f"{self.digest}{name}".encode()).hexdigest()

    def skip(self, items: Iterator[Item]) -> None:
        """Pass over what is done, if it is still the same."""
        expected, self.digest = self.digest, ""
        self._follow(item.name for item in islice(items, self.items))
        if self.digest != expected or [item.name for item in islice(items, len(self.names))] != self.names:
            raise EmbedError(
                f"the inputs have changed: their first {self.resumed:,} pictures are not those already embedded in "
                f"{self.folder}. Restore them, or start anew with --overwrite (overwrite=True)"
            )

    def restore(self, part: Part) -> None:
        """What an earlier run had of the part at hand."""
        if self.names:
            with pq.ParquetFile(self.begun) as file:
                part.restore(list(self.names), self._state(self.begun)["failures"], file.read())

    def keep(self, part: Part) -> None:
        """The part at hand, as far as it is settled."""
        self.kept_at, (names, rows) = time.monotonic(), part.settled
        if not rows or names <= len(self.names):
            return
        state = {"part": self.count, "names": part.names[:names], "failures": part.failures[: names - rows]}
        table = part.table(self.schema, rows).replace_schema_metadata({"veca": json.dumps(state)})
        with atomic_path(self.begun) as path:
            pq.write_table(table, path, **PARQUET)
        self.names, self.rows = part.names[:names], rows

    def store(self, part: Part) -> None:
        self._follow(part.names)
        table, pictures, failed = part.table(self.schema), len(part.rows), len(part.failures)
        totals = (self.items + pictures + failed, self.pictures + pictures, self.failed + failed)
        state: dict[str, Any] = dict(zip(("items", "pictures", "failed"), totals, strict=True))
        state |= {"digest": self.digest, "failures": part.failures}
        with atomic_path(self._file(self.count)) as path:
            pq.write_table(table.replace_schema_metadata({"veca": json.dumps(state)}), path, **PARQUET)
        self.count += 1
        self.items, self.pictures, self.failed = totals
        self.names, self.rows = [], 0

    def merge(self) -> None:
        """The parts as one file, and nothing else left; whenever it stops, doing it again gives the same."""
        failures = self.out.with_name(f"{self.out.name}.failures.csv")
        files = [self._file(index) for index in range(self.count)]
        if self.failed:
            with atomic_path(failures) as path:
                write_failures(path, (self._state(file)["failures"] for file in files))
        else:
            failures.unlink(missing_ok=True)
        with atomic_path(self.out) as path:
            WRITERS[self.out.suffix](path, files, self.schema, self.about)
        self._clear()
        with suppress(OSError):  # not empty, if someone keeps a file of their own in it
            (self.folder / "lock").unlink()
            self.folder.rmdir()

    def _clear(self) -> None:
        # The description goes first: parts without one are no run to continue.
        (self.folder / "job.json").unlink(missing_ok=True)
        temporary = self.out.parent.glob(f".{glob.escape(self.out.name)}.*.part")
        for file in chain(self.folder.glob("[0-9]*.parquet"), self.folder.glob(".*.part"), temporary):
            file.unlink()
        self.begun.unlink(missing_ok=True)


def same_job(folder: object, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse to continue a run by another."""
    pairs = {key: (old.get(key), new.get(key)) for key in new | old}
    changed = [f"{key} was {a!s:.40}, now {b!s:.40}" for key, (a, b) in pairs.items() if a != b]
    if changed:
        raise EmbedError(
            f"{folder} holds an unfinished run that differs: {'; '.join(changed)}. "
            "Repeat that run to finish it, or start anew with --overwrite (overwrite=True)"
        )


def write_failures(path: Path, parts: Iterable[Iterable[Sequence[str]]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "error"))
        for failures in parts:
            rows.writerows(failures)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One run at a time; the system takes the lock from a process that dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "wb") as file:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise EmbedError(f"another run is at work in {folder}; wait for it, or choose another name") from None
            except OSError:
                pass  # a file system without locks
        yield
