"""The parts of a run: pictures as they become features, and the folder that keeps what is finished.

What a part holds follows from the settings and the order of the pictures alone, and none holds pictures of two shards.
So a resumed run, or one that many machines share (`veca.embed.ray_engine`), forms the same batches and gives the same
bits as one that was never interrupted.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from veca.data.loader import Record
from veca.data.sources import Item
from veca.embed.formats import WRITERS, DamagedPart, feature_schema, read_part, reading, write_part
from veca.errors import NonFiniteError, VecaError
from veca.images import MAX_PIXELS, Fit, normalize
from veca.model import Veca
from veca.utils.files import atomic_path

Precision = Literal["float32", "bfloat16", "float16"]
SaveDtype = Literal["float32", "float16"]

_PART_BYTES = 256 << 20
_PART_PICTURES = 1024


class EmbedError(VecaError, ValueError):
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


class Part:
    """Pictures on their way to one file of features, in input order. Batches take them as they come, by shape.

    A picture whose features are not finite is an error, or with `skip_nonfinite` one of the failures.
    """

    def __init__(
        self, model: Veca, settings: EmbedSettings, device: torch.device, skip_nonfinite: bool = False
    ) -> None:
        self.model, self.settings, self.device, self.skip_nonfinite = model, settings, device, skip_nonfinite
        # A subclass may make something else of a call, as timm's models do.
        self.run = model if type(model).forward is Veca.forward else partial(Veca.forward, model)
        self.names: list[str] = []
        self.stamps: list[str] = []
        """For each name, what tells whether its file was replaced: see `Item`."""
        self.rows: list[tuple[str, int, int, int, int, int | None]] = []
        self.failures: list[tuple[str, str]] = []
        self._features: dict[str, dict[int, NDArray[Any]]] = {"cls": {}, "patches": {}}
        self._waiting: dict[tuple[int, int], list[tuple[int, NDArray[np.uint8]]]] = {}
        self._waiting_bytes = self._feature_bytes = 0
        self._nonfinite: dict[int, str] = {}
        """Rows since the last batch was whole that become failures, and why."""
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
            self._settle()

    def _settle(self) -> None:
        """No picture waits for its batch: rows that were found to be failures go."""
        if self._nonfinite:
            first, patch = min(self._nonfinite), self.model.config.patch_size
            good = [*range(first), *(i for i in range(first, len(self.rows)) if i not in self._nonfinite)]
            for i, reason in sorted(self._nonfinite.items()):
                name, _, _, rows, columns, _ = self.rows[i]
                self.failures.append((name, reason))
                self._feature_bytes -= self._bytes_of(rows * patch, columns * patch)
            self.rows = [self.rows[i] for i in good]
            for name, features in self._features.items():
                self._features[name] = {new: features[old] for new, old in enumerate(good) if old in features}
            self._nonfinite = {}
        self.settled = (len(self.names), len(self.rows))

    def restore(self, names: list[str], stamps: list[str], failures: Iterable[Sequence[str]], table: pa.Table) -> None:
        """Begin with what another part had settled."""
        patch = self.model.config.patch_size
        columns: list[list[Any]] = [table[i].to_pylist() for i in range(6)]
        self.names, self.stamps, self.rows = names, stamps, list(zip(*columns, strict=True))
        self.failures = [(name, error) for name, error in failures]
        self._feature_bytes = sum(self._bytes_of(row[3] * patch, row[4] * patch) for row in self.rows)
        for name in table.schema.names[6:]:
            self._features[name] = {i: row.values.to_numpy() for i, row in enumerate(table[name])}
        self.settled = (len(self.names), len(self.rows))

    def _add(self, record: Record) -> None:
        self.names.append(record.name)
        self.stamps.append(record.stamp)
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
                output = self.run(normalize(pixels.to(self.device)), cores=s.cores, cls_only=not s.dense)
            for name, wanted in (("cls", s.with_global), ("patches", s.dense)):
                if wanted:
                    # A copy always: a view of one token would keep all tokens in memory.
                    features = getattr(output, name).to("cpu", getattr(torch, s.save_dtype), copy=True)
                    indices = [index for index, _ in group]
                    rows = features.flatten(1).numpy()
                    self._features[name].update(zip(indices, rows, strict=True))
                    if not np.isfinite(rows).all():
                        self._note_nonfinite(indices, rows, getattr(output, name))

    def _note_nonfinite(self, indices: list[int], rows: NDArray[Any], output: torch.Tensor) -> None:
        s = self.settings
        bad = ~np.isfinite(rows).all(axis=1)
        weights = chain(self.model.parameters(), self.model.buffers())  # an optimized model has its own as buffers
        broken = bad.all() and not all(tensor.isfinite().all() for tensor in weights)
        reasons = [
            (broken, "the weights have NaN or infinity in them"),
            (bool(output.isfinite().all()), "float16 cannot hold them: save float32 (--dtype)"),
            (s.precision == "float16", "float16 may overflow: compute in bfloat16 or float32 (--precision)"),
        ]
        why = next((text for holds, text in reasons if holds), "look at the weights, and at --precision")
        reason = f"its features are not finite: {why}"
        self._nonfinite.update({indices[i]: reason for i in np.flatnonzero(bad)})
        if not self.skip_nonfinite:
            raise NonFiniteError(f"{self.rows[min(self._nonfinite)][0]}: {reason}")

    def table(self, schema: pa.Schema, count: int | None = None) -> pa.Table:
        """All rows, or the first `count`, which must be settled."""
        if count is None:
            self._embed(*self._waiting)
            self._settle()
            count = len(self.rows)
        columns: dict[str, Any] = {n: [row[i] for row in self.rows[:count]] for i, n in enumerate(schema.names[:6])}
        for name in schema.names[6:]:
            rows = [np.empty(0, self.settings.save_dtype), *(self._features[name][i] for i in range(count))]
            ends, values = pa.array(np.cumsum([row.size for row in rows])), pa.array(np.concatenate(rows))
            columns[name] = pa.LargeListArray.from_arrays(ends, values).cast(schema.field(name).type)
        return pa.table(columns, schema)


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


class Parts:
    """The finished parts of a run, in a folder beside `out`, and what they become.

    Each part knows the totals up to its end and digests of all pictures so far (their names; these and the sizes of
    their files; these and their dates), so the last tells where to go on.
    """

    def __init__(self, out: Path, settings: EmbedSettings, about: dict[str, Any], inputs: str) -> None:
        self.out, self.about = out, about
        self.folder = out.with_name(f"{out.name}.parts")
        self.job = {**about, "inputs": inputs}
        self.schema = feature_schema(about["dim"], settings.save_dtype, settings.with_global, settings.dense)
        self.count = self.items = self.pictures = self.failed = self.resumed = self.resumed_failures = self.rows = 0
        self.digests = dict.fromkeys(_DIGESTS, "")
        self.last = ""
        self.begun = self.folder / "begun.parquet"
        self.taken_over: tuple[list[str], list[str], list[Sequence[str]], pa.Table] | None = None
        """Names, stamps, failures and pictures of `begun`, for the part that goes on with them."""
        self.names: list[str] = []
        """What `begun` holds of the part at hand, and `rows` how many of them are pictures."""
        self.stamps: list[str] = []
        self.kept_at = time.monotonic()

    @property
    def unfinished(self) -> bool:
        return (self.folder / "job.json").exists() and (self._file(0).exists() or self.begun.exists())

    @property
    def kept(self) -> str:
        there = (self.folder / "job.json").exists() and all(self._file(i).exists() for i in range(self.count))
        if not there:
            return f"Not all that was finished is in {self.folder}; the same call computes what is missing."
        done = self.pictures + self.rows * self.begun.exists()
        return f"{done:,} finished pictures are kept in {self.folder}; the same call continues after them."

    def _file(self, index: int) -> Path:
        return self.folder / f"{index:06d}.parquet"

    def _state(self, file: Path, *keys: str) -> dict[str, Any]:
        """What the part knows, and `keys` for sure."""
        with reading(file):
            state = dict(json.loads(pq.read_schema(file).metadata[b"veca"]))
            missing = [key for key in keys if key not in state]
            if missing:
                raise KeyError(missing[0])
        return state

    def _describe(self) -> None:
        with atomic_path(self.folder / "job.json") as path:
            path.write_text(json.dumps(self.job, indent=2))

    def _still_there(self) -> None:
        """Before anything is written: the folder may have been removed meanwhile, and parts with it."""
        described = (self.folder / "job.json").exists()
        if self.count and not (described and self._file(self.count - 1).exists()):
            raise EmbedError(
                f"{self.folder} was removed while the run was at work, and {self.pictures:,} finished pictures with "
                "it. Run it again: it starts anew"
            )
        if not described:  # nothing is lost: the part at hand is in memory
            self._describe()
        if not self.begun.exists():
            self.names, self.stamps, self.rows = [], [], 0

    def resume(self, overwrite: bool) -> None:
        """Take over the parts of an earlier run of the same job; refuse those of another."""
        old = None
        with suppress(OSError, ValueError, RecursionError):
            old = json.loads((self.folder / "job.json").read_text())
        if overwrite or old is None or not self.unfinished:
            self._clear()
            self._describe()
            return
        same_job(self.folder, old, self.job)
        while self._file(self.count).exists():
            self.count += 1
        if self.count:
            last = self._state(self._file(self.count - 1), "items", "pictures", "failed", "digest")
            self.items, self.pictures, self.failed = (last[key] for key in ("items", "pictures", "failed"))
            # Parts of earlier versions know the names alone.
            self.digests = {key: last[key] for key in _DIGESTS if key in last}
        failures: list[Sequence[str]] = []
        if self.begun.exists():
            try:
                state = self._state(self.begun, "part", "names", "failures")
                if state["part"] == self.count:
                    names, failures = state["names"], state["failures"]
                    stamps = state.get("stamps") or [""] * len(names)
                    self.taken_over = names, stamps, failures, read_part(self.begun, self.schema)
                    self.names, self.stamps, self.rows = list(names), list(stamps), len(names) - len(failures)
            except DamagedPart:
                failures = []
                self.begun.unlink()  # one part at most, which is computed again
        self.resumed, self.resumed_failures = self.items + len(self.names), self.failed + len(failures)

    def _follow(self, pictures: Iterable[tuple[str, str]]) -> None:
        """Names, and stamps."""
        for name, stamp in pictures:
            for key, text in identities(name, stamp).items():
                if key in self.digests:
                    self.digests[key] = hashlib.sha256(f"{self.digests[key]}{text}".encode()).hexdigest()

    def skip(self, items: Iterator[Item], ignore_dates: bool = False) -> None:
        """Pass over what is done, if it is still the same; with `ignore_dates`, names and sizes are."""
        expected, self.digests = self.digests, dict.fromkeys(self.digests, "")
        self._follow((item.name, item.stamp) for item in islice(items, self.items))
        changed = {key for key, digest in self.digests.items() if digest != expected[key]}
        found = [(item.name, item.stamp) for item in islice(items, len(self.names))]
        kept = list(zip(self.names, self.stamps, strict=True))
        changed |= {"digest"} if len(found) != len(kept) else set()
        for now, before in zip(found, kept, strict=False):
            compared = [key for key in _DIGESTS if before[1] or key == "digest"]
            changed |= {key for key in compared if identities(*now)[key] != identities(*before)[key]}
        refuse_changed(changed, ignore_dates, f"their first {self.resumed:,} pictures", str(self.folder))

    def restore(self, part: Part) -> None:
        """What an earlier run had of the part at hand."""
        if self.taken_over:
            part.restore(*self.taken_over)
            self.taken_over = None  # or it would stay in memory after the part

    def keep(self, part: Part) -> None:
        """The part at hand, as far as it is settled."""
        self.kept_at, (names, rows) = time.monotonic(), part.settled
        self._still_there()
        if not rows or names <= len(self.names):
            return
        state = {"part": self.count, "names": part.names[:names], "stamps": part.stamps[:names]}
        state["failures"] = part.failures[: names - rows]
        with atomic_path(self.begun) as path:
            write_part(path, part.table(self.schema, rows), state)
        self.names, self.stamps, self.rows = part.names[:names], part.stamps[:names], rows

    def store(self, part: Part) -> None:
        self._still_there()
        self._follow(zip(part.names, part.stamps, strict=True))
        table = part.table(self.schema)
        pictures, failed = len(part.rows), len(part.failures)
        totals = (self.items + pictures + failed, self.pictures + pictures, self.failed + failed)
        state: dict[str, Any] = dict(zip(("items", "pictures", "failed"), totals, strict=True))
        state |= {**self.digests, "failures": part.failures}
        with atomic_path(self._file(self.count)) as path:
            write_part(path, table, state)
        part.settled = (0, 0)  # or a run stopped just now would keep it once more, as the next part
        self.count += 1
        self.items, self.pictures, self.failed = totals
        self.names, self.stamps, self.rows = [], [], 0

    def merge(self) -> None:
        """The parts as one file, and nothing else left; whenever it stops, doing it again gives the same."""
        self._still_there()
        failures = self.out.with_name(f"{self.out.name}.failures.csv")
        files = [self._file(index) for index in range(self.count)]
        if self.failed:
            with atomic_path(failures) as path:
                write_failures(path, (self._state(file, "failures")["failures"] for file in files))
        else:
            failures.unlink(missing_ok=True)
        with atomic_path(self.out) as path:
            WRITERS[self.out.suffix](path, files, self.schema, self.about)
        self._clear()

    def _clear(self) -> None:
        # The description goes first: parts without one are no run to continue.
        (self.folder / "job.json").unlink(missing_ok=True)
        temporary = self.out.parent.glob(f".{glob.escape(self.out.name)}.*.part")
        for file in chain(self.folder.glob("[0-9]*.parquet"), self.folder.glob(".*.part"), temporary):
            file.unlink()
        self.begun.unlink(missing_ok=True)


_DIGESTS = ("digest", "sizes", "dates")


def identities(name: str, stamp: str) -> dict[str, str]:
    """What tells a picture from others: by its name alone, also by the size of its file, and also by its date."""
    size = stamp.partition(" ")[0]
    return dict(zip(_DIGESTS, (name, f"{name}\0{size}", f"{name}\0{stamp}"), strict=True))


def refuse_changed(changed: set[str], ignore_dates: bool, which: str, folder: str) -> None:
    """Raise if pictures differ from those embedded before; `changed` has some of `_DIGESTS`."""
    if changed == {"dates"} and not ignore_dates:
        raise EmbedError(
            f"the inputs have changed: {which} have the names and sizes of those already embedded in {folder}, but "
            "other dates. If they are only new copies, continue with --ignore-dates (ignore_dates=True); if not, start "
            "anew with --overwrite (overwrite=True)"
        )
    if changed - {"dates"}:
        raise EmbedError(
            f"the inputs have changed: {which} are not those already embedded in {folder}. Restore them, or start "
            "anew with --overwrite (overwrite=True)"
        )


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
