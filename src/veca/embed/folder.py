"""The folder of a run: partitions that every engine writes, and by which a run is resumed.

    features/00000000.parquet, 00000001.parquet, …   one file per partition, complete or absent
    features/_job.json, _done.json                   what the run computes; its totals, when it is complete
    features/_00000002-0000.parquet, …               slices of partitions in progress

The failures of a partition and a digest of its inputs are in the footer of its file. Readers of Parquet folders skip
names that begin with an underscore.
"""

from __future__ import annotations

import csv
import glob
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from veca.data.remote import is_remote
from veca.embed.formats import WRITERS
from veca.embed.partitions import Partition, PartitionState, SliceState
from veca.embed.settings import ANEW, EmbedError, EmbedSettings, check_sources_hold_images
from veca.model import Veca
from veca.utils.console import reading_line
from veca.utils.files import InUseError, atomic_path, list_paths, locked, publish, temporary_path

_JOB, _DONE, _LOCK = "_job.json", "_done.json", "_lock"
_OURS = re.compile(r"\d{8}\.parquet|_\d{8}-\d{4}\.parquet|_done\.json|\..*\.part")
# In a `.parts` folder of former versions, which had a format of their own.
_FORMER = re.compile(r"job\.json|\d{6}\.parquet|begun\.parquet")

StateT = TypeVar("StateT", bound=PartitionState)


def prepare_run(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    model: Veca,
    settings: EmbedSettings | None,
    column: str | None,
    workers: int,
    progress: bool,
) -> tuple[list[str], PartitionFolder, EmbedSettings]:
    """Sources, folder and resolved settings of a run, all checked before any work is done."""
    sources, folder, settings = list_paths(inputs), PartitionFolder(out), (settings or EmbedSettings()).resolve(model)
    if workers < 0:
        raise EmbedError(f"workers={workers}: must be 0 (decode in this process) or more")
    if folder.file and folder.file.suffix != ".parquet" and settings.dense and settings.fit in ("keep", "pad"):
        reason = f"gives every image a grid of its own, which {folder.file.suffix} cannot hold"
        raise EmbedError(f"fit={settings.fit!r} {reason}; write .parquet, or choose fit 'crop' or 'stretch'")
    with reading_line(progress) as on_read:
        check_sources_hold_images(sources, column, on_read)
    return sources, folder, settings


class PartitionFolder:
    """The folder of a run, on this machine or at an address, and the file it becomes if one was asked for."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        """`out` is a folder or address, or a file (.parquet, .safetensors, .npz), whose folder is `<out>.parts`."""
        name = os.fspath(out)
        self.out = name.rstrip("/") or name
        self.file: Path | None = None
        self.address = self.out if is_remote(name) else os.path.abspath(name)
        suffix = os.path.splitext(self.out)[1]
        if suffix and not (is_remote(name) or name.endswith("/") or os.path.isdir(name)):
            if suffix not in WRITERS:
                choices = f"choose one of {', '.join(WRITERS)}, or end it with / for a folder"
                raise EmbedError(f"{name}: unknown kind of file {suffix!r}; {choices}")
            self.file, self.address = Path(name), f"{self.address}.parts"
        try:
            self._fs, self._root = fsspec.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise EmbedError(f"{name}: {error}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse a second run while the block runs. Object stores have no locks: nothing keeps runs apart there."""
        lockable = not is_remote(self.address) and not os.path.isfile(self._root)  # `start` refuses a file
        try:
            with locked(self._root, _LOCK) if lockable else nullcontext():
                yield
        except InUseError as error:
            raise EmbedError(str(error)) from None
        finally:
            if self.file:
                with suppress(OSError):  # not empty: the run is unfinished, or the user keeps a file in it
                    os.rmdir(self._root)

    def start(self, job: dict[str, Any], overwrite: bool) -> set[int]:
        """Begin or resume `job` in this folder; returns the partitions that are there. Refuses any other content."""
        if self._fs.isfile(self._root):
            raise EmbedError(f"{self.address} is a file; choose another name for the folder of features")
        old: Any = None
        with suppress(OSError, ValueError, RecursionError):
            old = json.loads(self._fs.cat_file(f"{self._root}/{_JOB}"))
        names = self._names()
        unfinished = isinstance(old, dict) and _DONE not in names and any(map(_OURS.fullmatch, names))
        former = [name for name in names if self.file and _FORMER.fullmatch(name)]
        if len(former) > 1 and not overwrite:
            reason = "holds an unfinished run of a former version of veca, which this one cannot continue"
            raise EmbedError(f"{self.address} {reason}: finish it with that version, or {ANEW}")
        if names and not self.file and not isinstance(old, dict):
            raise EmbedError(f"{self.address} holds files that no run of this left, as {names[0]}; choose another name")
        exists = self.file.exists() and not unfinished if self.file else _DONE in names
        if exists and not overwrite:
            way = "choose another name, or overwrite it with --overwrite (overwrite=True)"
            raise EmbedError(f"{self.out} exists; {way}")
        for name in former:
            self.remove(name)
        if unfinished and not overwrite:
            pairs = {key: (old.get(key), job.get(key)) for key in job | old}
            changed = [f"{key} was {a!s:.40}, now {b!s:.40}" for key, (a, b) in pairs.items() if a != b]
            if changed:
                reason = f"holds an unfinished run that differs: {'; '.join(changed)}"
                raise EmbedError(f"{self.address} {reason}. Repeat that run to finish it, or {ANEW}")
            return self.partitions()
        # Keep the old description until the new one replaces it: a folder of files without one is refused.
        self._remove_all(keep_job=True)
        self._write_json(_JOB, job)
        return set()

    def partitions(self) -> set[int]:
        """Numbers of the partitions that are there."""
        return {int(name[:8]) for name in self._names() if re.fullmatch(r"\d{8}\.parquet", name)}

    def finished(self, partition: Partition, ignore_dates: bool = False) -> PartitionState | None:
        """State of the partition if an earlier worker or run has finished it; refuses one of other images."""
        state = self.read_state(partition.name, PartitionState)
        if state is not None:
            self._check_unchanged(state, partition.digests(), ignore_dates, f"the images of {partition.name}")
        return state

    def slices(self, partition: Partition, ignore_dates: bool = False) -> list[SliceState]:
        """States of the slices that an earlier run left of a partition; refuses those of other images."""
        states, index = list[SliceState](), 0
        while self.exists(name := partition.slice_name(index)):
            state, index = self.read_state(name, SliceState), index + 1
            if state is None or len(states) < index - 1:  # after a damaged slice, the rest is computed again
                self.remove(name)
            else:
                states.append(state)
        if states:
            digests, which = partition.digests(states[-1].end), f"the first images of {partition.name}"
            self._check_unchanged(states[-1], digests, ignore_dates, which)
        return states

    def read_state(self, name: str, kind: type[StateT]) -> StateT | None:
        """The state in the footer of a file; None if it is absent or damaged: not all file systems write atomically."""
        try:
            with self._fs.open(f"{self._root}/{name}", "rb") as file:
                footer = pq.read_metadata(file)
            state = kind(**json.loads((footer.metadata or {})[b"veca_partition"]))
        except (OSError, ValueError, LookupError, TypeError):
            return None
        groups = len(state.groups) if isinstance(state, SliceState) else footer.num_row_groups
        return state if (footer.num_rows, footer.num_row_groups) == (state.pictures, groups) else None

    def _check_unchanged(self, state: PartitionState, digests: dict[str, str], ignore_dates: bool, which: str) -> None:
        changed = {key for key, digest in digests.items() if (getattr(state, key) or digest) != digest}
        if not changed or (changed == {"dates"} and ignore_dates):
            return
        known = f"those already embedded in {self.address}"
        reason, way = f"are not {known}", "Restore them, or"
        if changed == {"dates"}:
            reason = f"have the names and sizes of {known}, but other dates"
            way = "If they are only new copies, continue with --ignore-dates (ignore_dates=True); if not,"
        raise EmbedError(f"the inputs have changed: {which} {reason}. {way} {ANEW}")

    def complete(self, totals: dict[str, int], failed: Iterable[int], schema: pa.Schema) -> None:
        """End the run: write the failures of the partitions `failed`, join the file or mark the folder as complete."""
        self.check_partitions(totals["partitions"])
        names = [f"{number:08d}.parquet" for number in range(totals["partitions"])]
        present = set(self._names())
        if missing := [name for name in names if name not in present]:
            raise EmbedError(f"{missing[0]} is missing from {self.address}: the same call computes it again")
        states = (self.read_state(names[number], PartitionState) for number in sorted(failed))
        self._write_failures(chain.from_iterable(state.failures for state in states if state), totals["failures"] > 0)
        if self.file is None:
            for name in present:
                if name.startswith((".", "_0")):  # temporary files of killed workers, and slices
                    self.remove(name)
            self._write_json(_DONE, totals)
            return
        with atomic_path(self.file) as path:
            WRITERS[self.file.suffix](path, list(map(self.path, names)), schema)
        for temporary in self.file.parent.glob(f".{glob.escape(self.file.name)}.*.part"):
            temporary.unlink()
        self._remove_all(keep_job=False)

    def check_partitions(self, count: int) -> None:
        """Raise EmbedError if there are partitions after the first `count`: the inputs had more images."""
        if any(number >= count for number in self.partitions()):
            reason = f"{self.address} holds partitions of other images"
            raise EmbedError(f"the inputs have changed: {reason}. Restore them, or {ANEW}")

    def _write_failures(self, failures: Iterable[tuple[str, str]], any_failed: bool) -> None:
        address = f"{self.file or self._root.rstrip('/')}.failures.csv"
        if any_failed:
            with self.temporary() as path:
                with open(path, "w", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerows(chain([("path", "error")], failures))
                self._move(path, address)
        elif self._fs.exists(address):
            self._fs.rm_file(address)

    def kept_message(self, images: int) -> str:
        """How to go on after an error; `images` are finished."""
        if not self.exists(_JOB):
            return f"Not all that was finished is in {self.address}; the same call computes what is missing."
        return f"{images:,} finished images are kept in {self.address}; the same call continues after them."

    def path(self, name: str) -> Path:
        """Path of a file in a local folder."""
        return Path(self._root, name)

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """A local path to write a file that `publish` then moves into the folder."""
        place = tempfile.TemporaryDirectory() if is_remote(self.address) else nullcontext(self._root)
        with place as folder, temporary_path(Path(folder, "new")) as path:
            yield path

    def publish(self, path: Path, name: str) -> None:
        """Move a complete file from `temporary` into the folder."""
        try:
            if not is_remote(self.address):
                os.stat(self.path(_JOB))
            self._move(path, f"{self._root}/{name}")
        except FileNotFoundError:
            reason = "was removed while the run was at work, and what it had finished with it"
            raise EmbedError(f"{self.address} {reason}. Run it again: it starts anew") from None

    def _move(self, path: Path, address: str) -> None:
        if is_remote(self.address):
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.put_file(str(path), address)
        else:
            publish(path, Path(address))

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(f"{self._root}/{name}"))

    def remove(self, name: str) -> None:
        self._fs.rm_file(f"{self._root}/{name}")

    def _names(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            names = (name.rstrip("/").rpartition("/")[2] for name in self._fs.ls(self._root, detail=False))
            return sorted(name for name in names if name != _LOCK)
        except FileNotFoundError:
            return []

    def _remove_all(self, keep_job: bool) -> None:
        """Remove what runs wrote, and nothing else."""
        if not keep_job:  # first: partitions without a description are no run to resume
            self.remove(_JOB)
        for name in filter(_OURS.fullmatch, self._names()):
            self.remove(name)

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        with self.temporary() as path:
            path.write_text(json.dumps(value, indent=2))
            self._move(path, f"{self._root}/{name}")
