"""Images that are too large to be decoded with the others: their features by tiles, each in a file of its own.

    features.parquet.large/index.parquet        the columns of `features.parquet`, with `file` in place of `patches`
    features.parquet.large/map-1f6c0c4e.tif     patches (rows, columns, D) of an image that has a georeference, with it
    features.parquet.large/slide-09b3d2aa.npy   and of one that has none

An interrupted run continues with the tile at which it stopped.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from veca.data.records import describe_error
from veca.data.sources import is_container
from veca.embed.batches import EmbedJob
from veca.embed.partitions import Partition, RunTotals, feature_schema
from veca.embed.settings import EmbedError
from veca.errors import NonFiniteError, VecaError
from veca.images import ImageError, open_image
from veca.images.decode import ImageTooLargeError
from veca.images.tiles import REGION_SUFFIXES, ArraySource, PixelSource, open_pixels
from veca.model import Veca
from veca.streaming import StreamError, stream
from veca.utils.files import atomic_path

_OURS = re.compile(r"\.?(.+-[0-9a-f]{8})(\.part)?\.(npy|tif)(\.states)?|(index)\.parquet", re.DOTALL)

_STAMPS = b"stamps"
"""Key of the index's metadata: JSON of what each image was when it was computed, by name."""


class LargeImages:
    """The large images of a run: those of `plan` that are failures of its partitions because of their size."""

    def __init__(self, job: EmbedJob, model: Veca, plan: Iterable[Partition], progress: bool) -> None:
        self.job, self._model, self._plan, self._progress = job, model, plan, progress
        self._folder = Path(f"{job.folder.base}.large")
        self._index = self._folder / "index.parquet"
        fields = [field for field in feature_schema(job.about) if field.name != "patches"]
        self._schema = pa.schema([*fields, pa.field("file", pa.string(), nullable=False)])
        self._found = dict[str, str]()

    def __len__(self) -> int:
        return len(self._found)

    def find(self, totals: RunTotals) -> None:
        """Look for them among the failures of a run; removes what an earlier run has left if there are none."""
        names = {name for name, _ in self.job.folder.read_failures(totals)} if self.job.settings.dense else set()
        if names:
            files = (file for part in self._plan if part.number in totals.with_failures for file in part.files)
            local = (file for file in files if file.name in names and file.is_local_file and not is_container(file))
            self._found = {file.name: file.path for file in local if self._is_large(file.path)}
        if not self._found:
            self._clear()

    def run(self, totals: RunTotals) -> None:
        """Stream them, one after the other; what cannot be is an error in the totals."""
        rows = self._read_index()
        self._clear([] if rows is None else ["index", *map(_stem, self._found)])
        try:
            self._folder.mkdir(exist_ok=rows is not None)
        except FileExistsError as error:
            reason = "is for the features of large images, and holds other files"
            raise EmbedError(f"{self._folder} {reason}; move it, or choose another name for the run") from error
        rows = rows or {}
        self._write_index(rows)
        for name, path in self._found.items():
            try:
                source = self._open(path)
                stamp = json.dumps(source.identity)
                if name not in rows or rows[name]["stamp"] != stamp:
                    rows[name] = self._stream(name, source) | {"stamp": stamp}
                    self._write_index(rows)
            except NonFiniteError as error:
                if not self.job.skip_nonfinite:
                    raise
                totals.add_streamed(name, str(error))
            except VecaError as error:
                totals.add_streamed(name, describe_error(error, path))
            else:
                totals.add_streamed(name)
        if not rows:
            self._clear()

    def _is_large(self, path: str) -> bool:
        try:
            open_image(path, max_pixels=self.job.decoder.max_file_pixels or self.job.settings.max_pixels)
        except ImageTooLargeError:
            return True
        except ImageError:  # slides are TIFF files in part, which Pillow tries
            return path.lower().endswith(REGION_SUFFIXES)
        return False

    def _open(self, path: str) -> PixelSource:
        """By regions if possible, or else decoded whole, up to `max_pixels`."""
        try:
            return open_pixels(path, self.job.settings.max_pixels)
        except ImageError as error:
            with suppress(ImageError):
                pixels = np.asarray(open_image(path, max_pixels=self.job.settings.max_pixels))
                return ArraySource(pixels, path)
            raise error

    def _stream(self, name: str, source: PixelSource) -> dict[str, Any]:
        """Write the features of an image; returns its row of the index."""
        s, file = self.job.settings, f"{_stem(name)}{'.tif' if source.geo_tags else '.npy'}"
        out, states = self._folder / file, self._folder / f"{file}.states"
        out.unlink(missing_ok=True)  # of a run that was killed before it was in the index
        compute = partial(
            stream, self._model, source, cores=s.cores, width=s.width, out=out, save_dtype=str(s.save_dtype),
            states=states, precision=getattr(torch, s.precision), progress=self._progress,
        )  # fmt: skip
        try:
            found = compute()
        except StreamError:  # the image has changed since, or a file is gone
            shutil.rmtree(states)
            found = compute()
        rows, columns = found.grid
        row = {"path": name, "width": source.width, "height": source.height, "rows": rows, "columns": columns}
        return row | {"cores": s.cores, "cls": found.cls.numpy().astype(s.save_dtype or "float32"), "file": file}

    def _read_index(self) -> dict[str, dict[str, Any]] | None:
        """Rows of an earlier run of the same job, by name; None: there was none."""
        with suppress(OSError, ValueError, LookupError, TypeError):
            table = pq.read_table(self._index)
            metadata = table.schema.metadata or {}
            if json.loads(metadata[b"veca"]) == self.job.about:
                stamps = json.loads(metadata[_STAMPS])
                rows = {row["path"]: row | {"stamp": stamps[row["path"]]} for row in table.to_pylist()}
                return {name: row for name, row in rows.items() if (self._folder / row["file"]).exists()}
        return None

    def _is_ours(self) -> bool:
        """Whether the folder is that of a run: its index, which is there before anything else, says so."""
        with suppress(OSError, ValueError):
            return _STAMPS in (pq.read_schema(self._index).metadata or {})
        return False

    def _write_index(self, rows: dict[str, dict[str, Any]]) -> None:
        kept = [rows[name] for name in self._found if name in rows]
        about = {"veca": json.dumps(self.job.about), _STAMPS: json.dumps({row["path"]: row["stamp"] for row in kept})}
        table = pa.Table.from_pylist(kept, self._schema.with_metadata(about))
        with atomic_path(self._index) as path:
            pq.write_table(table, path)

    def _clear(self, but: Collection[str] = ()) -> None:
        """Remove the files of earlier runs, but not those with some stems, and the folder if it is empty then."""
        for path in list(self._folder.iterdir()) if self._is_ours() else []:
            if (match := _OURS.fullmatch(path.name)) and (match[1] or match[5]) not in but:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with suppress(OSError):  # it has other files
            self._folder.rmdir()


def _stem(name: str) -> str:
    """The name of an image's file of features, without suffix."""
    return f"{Path(name).stem[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
