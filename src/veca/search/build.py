"""`update_index`: make an index of images, or bring one up to date with them.

    sources → files, by name and stamp → those that no run has → runs of `embed` → tables of what is there now

Runs are the only source of features. An update embeds the files that no complete run has as they are now, continues
a run that was interrupted, and then writes the tables anew from all runs: images of files that have changed or are gone
are left out of them. A run none of whose files is left is removed.
"""

import csv
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from veca.checkpoint.format import weights_hash
from veca.data.remote import is_remote
from veca.data.sources import Item, add_stamp, list_files
from veca.data.video import file_of_frame
from veca.embed import EmbedSettings, embed
from veca.embed.partitions import PartitionFolder
from veca.images import EXTENSIONS
from veca.images.formats import collect_unsupported
from veca.model import Veca
from veca.search.store import IndexDescription, IndexFolder, SearchError
from veca.utils.files import atomic_path, check_writable, list_paths, locked

RUN_FILES = 65_536
"""Files of a run, at most: an update that is interrupted, and whose files then change, loses one run."""


class IndexReport(NamedTuple):
    """Result of an update."""

    images: int
    """In the index now."""
    added: int
    changed: int
    dropped: int
    """Images that were in the index and are in the sources no more."""
    failures: int
    """Images that could not be read, listed in `failures.csv`."""
    seconds: float
    out: Path


def update_index(
    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    model: Veca,
    model_name: str,
    settings: EmbedSettings | None = None,
    device: str | torch.device | None = None,
    column: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    drop_sources: bool = False,
    progress: bool = True,
) -> IndexReport:
    """Make the index `out` of all images in `sources`, or bring it up to date: embed what is new or has changed.

    `sources`, `column`, `device` and `workers` are those of `veca.embed.embed`, and so are `settings`: with `dense` and
    `cells`, regions of images can be searched. Images that are in the index and no more in the sources are dropped from
    it; sources of the index must all be named, unless `drop_sources`. `overwrite` makes the index anew.
    """
    began, folder = time.perf_counter(), IndexFolder(out)
    check_writable(folder.path, folder=True)
    settings = _index_settings(settings or EmbedSettings(), model)
    with locked(folder.path):
        _check_folder(folder, overwrite)
        if overwrite:
            _remove_all(folder)
        places = [place if is_remote(place) else os.path.abspath(place) for place in list_paths(sources)]
        description = IndexDescription(
            model=model_name, weights=weights_hash(model), dim=model.config.num_features,
            settings=settings, sources=tuple(places), column=column,
        )  # fmt: skip
        if folder.exists():
            old = folder.read()
            _check_same(folder, old, description, drop_sources)
            description = dataclasses.replace(description, tables=old.tables)
        items = _list_sources(places, settings.fps is not None)
        folder.write(description)
        options: dict[str, Any] = {"model": model, "model_name": model_name, "settings": settings, "column": column}
        options |= {"device": device, "workers": workers, "progress": progress}
        _embed_missing(folder, items, options)
        counts = _refresh(folder, description, _files_of_runs(folder, items))
    return IndexReport(**counts, seconds=time.perf_counter() - began, out=folder.path)


def _index_settings(settings: EmbedSettings, model: Veca) -> EmbedSettings:
    """Settings as the index keeps them: float16, with the global feature, and no batch, which is each run's own."""
    if settings.dense and not settings.cells:
        raise SearchError("dense=True: an index has no features of all patches; set cells too, for those of regions")
    return dataclasses.replace(settings, with_global=True, save_dtype="float16").resolve(model)


def _check_folder(folder: IndexFolder, overwrite: bool) -> None:
    """Refuse a folder that holds something else."""
    names = {name for name in os.listdir(folder.path) if name != "lock" and not name.startswith(".")}
    if names and not folder.exists() and not names <= {"runs", "tables", "failures.csv"}:
        raise SearchError(f"{folder.path} holds other files, as {min(names)}; choose another name")
    if names and not folder.exists() and not overwrite:
        raise SearchError(f"{folder.path} is what is left of an index; make it anew with --overwrite (overwrite=True)")


def _remove_all(folder: IndexFolder) -> None:
    """Remove what updates wrote, and nothing else; the description first."""
    for file in (folder.path / "index.json", folder.failures):
        file.unlink(missing_ok=True)
    for name in ("tables", "runs"):
        shutil.rmtree(folder.path / name, ignore_errors=True)


def _check_same(folder: IndexFolder, old: IndexDescription, new: IndexDescription, drop_sources: bool) -> None:
    """Refuse to mix features of another model or of other settings, and to drop a source unasked."""
    if old.weights != new.weights:
        raise SearchError(f"{folder.path} is an index of another model, {old.model}, not of {new.model}; {_ANEW}")
    pairs = {key: (value, new.settings.to_dict()[key]) for key, value in old.settings.to_dict().items()}
    pairs |= {"column": (old.column, new.column)}
    changed = [f"{key} was {a!s:.40}, now {b!s:.40}" for key, (a, b) in pairs.items() if a != b and key != "batch"]
    if changed:
        raise SearchError(f"{folder.path} has features made otherwise: {'; '.join(changed)}. Repeat these, or {_ANEW}")
    missing = [source for source in old.sources if source not in new.sources]
    if missing and not drop_sources:
        way = "name all sources of the index, or drop their images with --drop-sources (drop_sources=True)"
        raise SearchError(f"{folder.path} is also of {', '.join(missing)}: {way}")


_ANEW = "choose another name, or make it anew with --overwrite (overwrite=True)"


def _list_sources(sources: Sequence[str], videos: bool) -> dict[str, Item]:
    """The files of all sources by name, each with its stamp."""
    items: dict[str, Item] = {}
    with collect_unsupported() as left_out:
        for source in sources:
            found = [add_stamp(item) for item in list_files(source, videos=videos)[1]]
            if not found:
                kinds = ", ".join(sorted(EXTENSIONS))
                raise SearchError(left_out.append_to(f"{source}: no images there ({kinds})"))
            for item in found:
                if not item.path:  # its images are not gone, only out of sight
                    raise SearchError(f"{item.name}: {item.error}; make it readable, or leave it out")
                items.setdefault(item.name, item)
    left_out.warn()
    return items


def _files_of_runs(folder: IndexFolder, items: dict[str, Item]) -> dict[int, set[str]]:
    """The files that complete runs have as they are now, by run; of two runs with one file the later one counts."""
    runs: dict[str, int] = {}
    for number in folder.runs():
        if PartitionFolder(folder.run(number)).is_done():
            stamps = folder.read_run_files(number)
            runs |= {name: number for name, stamp in stamps.items() if name in items and items[name].stamp == stamp}
    files: dict[int, set[str]] = {}
    for name, number in runs.items():
        files.setdefault(number, set()).add(name)
    return files


def _embed_missing(folder: IndexFolder, items: dict[str, Item], options: dict[str, Any]) -> None:
    """Embed the files that no run has; a run that was interrupted is continued if its files are as they were."""
    done = set(chain.from_iterable(_files_of_runs(folder, items).values()))
    missing = {name: item.stamp for name, item in items.items() if name not in done}
    plan = list[tuple[int, dict[str, str]]]()
    for number in folder.runs():
        if not PartitionFolder(folder.run(number)).is_done():
            stamps = folder.read_run_files(number)
            if stamps.items() <= missing.items():
                plan.append((number, stamps))
                missing = {name: stamp for name, stamp in missing.items() if name not in stamps}
            else:
                folder.remove_run(number)
    following = max(folder.runs(), default=-1) + 1
    rest = iter(missing.items())
    while some := dict(islice(rest, RUN_FILES)):
        folder.write_run_files(following, some)
        plan.append((following, some))
        following += 1
    for number, stamps in plan:
        embed([items[name].path for name in stamps], folder.run(number), **options)


def _refresh(folder: IndexFolder, description: IndexDescription, files: dict[int, set[str]]) -> dict[str, int]:
    """Write the tables of what is there now; returns the counts of the report."""
    before = _runs_of_images(folder, description)
    tables = [_RunTable(folder.run(number), number, names) for number, names in sorted(files.items())]
    images = pa.concat_tables([table.read_images() for table in tables])
    after = _runs_by_path(images)
    if before != after or not _is_readable(folder, description):
        new = dataclasses.replace(description, tables=description.tables + 1)
        with folder.new_tables(new) as part:
            folder.write_images(part, {name: images[name] for name in images.column_names})
            for name, column, shape in _vector_files(description):
                _write_vectors(part / name, (len(images), *shape), chain.from_iterable(t.read(column) for t in tables))
    failures = list(chain.from_iterable(table.read_failures() for table in tables))
    _write_failures(folder.failures, failures)
    for number in folder.runs():
        if number not in files:
            folder.remove_run(number)
    added, dropped = len(after.keys() - before.keys()), len(before.keys() - after.keys())
    changed = sum(after[path] != run for path, run in before.items() if path in after)
    counts = {"images": len(images), "added": added, "changed": changed, "dropped": dropped}
    return counts | {"failures": len(failures)}


def _runs_of_images(folder: IndexFolder, description: IndexDescription) -> dict[str, int]:
    """The run of every image in the tables that are current, by path; none where there are none that can be read."""
    try:
        return _runs_by_path(folder.read_images(description))
    except SearchError:
        return {}


def _runs_by_path(images: pa.Table) -> dict[str, int]:
    paths, runs = (cast(list[Any], images[name].to_pylist()) for name in ("path", "run"))
    return dict(zip(paths, runs, strict=True))


def _is_readable(folder: IndexFolder, description: IndexDescription) -> bool:
    try:
        folder.read_tables(description)
    except SearchError:
        return False
    return True


def _vector_files(description: IndexDescription) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Each file of vectors: its name, its column in the features, the shape of a row."""
    yield "vectors.npy", "cls", (description.dim,)
    if cells := description.settings.cells:
        yield "regions.npy", "patches", (cells**2, description.dim)


def _write_vectors(path: Path, shape: tuple[int, ...], pieces: Iterator[NDArray[Any]]) -> None:
    """Write vectors of length 1 to a file of this shape, a piece at a time."""
    if not shape[0]:  # nothing to map
        np.save(path, np.zeros(shape, np.float16))
        return
    rows, start = np.lib.format.open_memmap(path, "w+", np.float16, shape), 0
    for piece in pieces:
        values = piece.reshape(-1, *shape[1:]).astype(np.float32)
        values /= np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), 1e-12)
        rows[start : start + len(values)] = values
        start += len(values)
    assert start == len(rows)
    rows.flush()


def _write_failures(path: Path, failures: list[tuple[str, str]]) -> None:
    if not failures:
        path.unlink(missing_ok=True)
        return
    with atomic_path(path) as part, open(part, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("path", "error"), *failures])


class _RunTable:
    """The rows of a complete run that are of some of its files."""

    def __init__(self, path: Path, number: int, files: set[str]) -> None:
        self.path, self.number, self.files = path, number, files
        self.folder = PartitionFolder(path)
        self.names = sorted(name for name in os.listdir(path) if name.endswith(".parquet"))

    def read_images(self) -> pa.Table:
        """Path, width and height of the images, and the run."""
        columns = ("path", "width", "height")
        tables = [table.filter(self._kept(table)) for table in self._read(*columns)]
        images = pa.concat_tables(tables)
        return images.append_column("run", pa.array([self.number] * len(images), pa.int32())).replace_schema_metadata()

    def read(self, column: str) -> Iterator[NDArray[Any]]:
        """The features of these images, some rows at a time, as one row of numbers."""
        for table in self._read("path", column):
            values: Any = table[column].filter(self._kept(table)).combine_chunks()
            yield values.flatten().to_numpy()

    def read_failures(self) -> Iterator[tuple[str, str]]:
        """Path and reason of the images that could not be read."""
        path = Path(f"{self.path}.failures.csv")
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                yield from ((row[0], row[1]) for row in list(csv.reader(file))[1:] if self._file_of(row[0]))

    def _read(self, *columns: str) -> Iterator[pa.Table]:
        schema = pq.read_schema(self.path / self.names[0])
        fields = [schema.field(name) for name in columns]
        if "patches" in columns:  # bytes in the file
            about = schema.field("cls").type
            fields[-1] = pa.field("patches", pa.large_list(about.value_field), nullable=False)
        yield from self.folder.read_tables(self.names, pa.schema(fields))

    def _kept(self, table: pa.Table) -> Any:
        paths = cast(list[str], table["path"].to_pylist())
        return pa.array([bool(self._file_of(path)) for path in paths], pa.bool_())

    def _file_of(self, path: str) -> str:
        """The file that an image is, or is in; empty if that is none of these."""
        path = file_of_frame(path)
        while path and path not in self.files:
            path = path.rpartition("/")[0]
        return path
