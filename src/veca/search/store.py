"""The folder of a search index: what is in it, and how a change of it takes effect at once.

    index/index.json            the model, the settings, the sources, and the number of the tables that are current
    index/runs/00000000/…       features: folders of `veca embed`, from which the tables are made
    index/runs/00000000.files   the files that a run is of, a Parquet table: name, stamp
    index/tables/00000001/      images.parquet: path, width, height, run of every image, row by row
                                vectors.npy: (images, D) float16, the global features, of length 1
                                regions.npy: (images, cells, D) float16, with regions: those of the cells of each image
    index/failures.csv          images that could not be read

Vectors are plain matrices, mapped into memory and scanned: there is no graph whose links would have to be trusted.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from veca.checkpoint.format import read_description
from veca.embed import EmbedSettings
from veca.errors import VecaError
from veca.utils.files import atomic_path
from veca.utils.settings import Bounds, Positive, Settings
from veca.utils.text import excerpt
from veca.version import __version__

_INDEX = "index.json"


class SearchError(VecaError, ValueError):
    """An index that cannot be made, read or asked."""


@dataclass(frozen=True, kw_only=True)
class IndexDescription(Settings):
    """What an index is of; `index.json`."""

    section: ClassVar[str] = "index"
    error: ClassVar[type[VecaError]] = SearchError

    format: Literal[1] = 1
    model: str
    """Name by which the model was loaded."""
    weights: str
    """Hash of its weights: what tells models apart."""
    dim: Positive
    settings: EmbedSettings
    sources: tuple[str, ...]
    column: str | None = None
    tables: Annotated[int, Bounds(ge=0)] = 0
    """0: the first run is not complete."""
    veca: str = __version__


@dataclass(frozen=True)
class IndexTables:
    """The images of an index and their features."""

    images: pa.Table
    vectors: NDArray[np.float16]
    regions: NDArray[np.float16] | None


class IndexFolder:
    """Reads and writes the files of an index."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.failures = self.path / "failures.csv"

    def exists(self) -> bool:
        """Whether an index is there, be it one whose first run was interrupted."""
        return (self.path / _INDEX).is_file()

    def read(self) -> IndexDescription:
        """The description; raises SearchError if there is none or it is damaged."""
        file = self.path / _INDEX
        try:
            return IndexDescription.from_dict(read_description(file.read_text("utf-8")))
        except (FileNotFoundError, NotADirectoryError) as error:
            way = f"it has no {_INDEX}; `veca search index` makes one"
            raise SearchError(f"{self.path} is not an index: {way}") from error
        except (OSError, ValueError, VecaError) as error:
            way = "make the index again, with --overwrite (overwrite=True)"
            raise SearchError(f"{file} is damaged ({excerpt(str(error))}); {way}") from error

    def write(self, description: IndexDescription) -> None:
        """Replace the description."""
        with atomic_path(self.path / _INDEX) as path:
            path.write_text(json.dumps(description.to_dict(), indent=2), encoding="utf-8")

    def run(self, number: int) -> Path:
        """The folder of features of a run."""
        return self.path / "runs" / f"{number:08d}"

    def runs(self) -> list[int]:
        """Numbers of the runs that are there, complete or not."""
        names = (each.name for each in (self.path / "runs").glob("*.files"))
        return sorted(int(name[:8]) for name in names if name[:8].isdecimal())

    def write_run_files(self, number: int, stamps: dict[str, str]) -> None:
        """Note which files a run is of, before it begins."""
        _write_table(Path(f"{self.run(number)}.files"), {"name": list(stamps), "stamp": list(stamps.values())})

    def read_run_files(self, number: int) -> dict[str, str]:
        """The files of a run and their stamps."""
        table = self._read_table(Path(f"{self.run(number)}.files"), ("name", "stamp"))
        names: Any = table["name"].to_pylist()
        stamps: Any = table["stamp"].to_pylist()
        return dict(zip(names, stamps, strict=True))

    def remove_run(self, number: int) -> None:
        """Remove a run; its list of files comes last, so that an interruption leaves nothing without one."""
        shutil.rmtree(self.run(number), ignore_errors=True)
        for suffix in (".failures.csv", ".files"):
            Path(f"{self.run(number)}{suffix}").unlink(missing_ok=True)

    def tables(self, number: int) -> Path:
        """The folder of tables of that number."""
        return self.path / "tables" / f"{number:08d}"

    @contextmanager
    def new_tables(self, description: IndexDescription) -> Iterator[Path]:
        """A folder to write tables to. When the block ends they are the current ones, and the others are removed."""
        part = self.path / "tables" / f".{description.tables:08d}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
            final = self.tables(description.tables)
            shutil.rmtree(final, ignore_errors=True)  # of a run that was killed before it wrote the description
            os.rename(part, final)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        self.write(description)
        for old in final.parent.iterdir():
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def write_images(self, folder: Path, columns: dict[str, Any]) -> None:
        """Write `images.parquet` of new tables."""
        _write_table(folder / "images.parquet", columns)

    def read_images(self, description: IndexDescription) -> pa.Table:
        """The images of the index, row by row."""
        path = self.tables(description.tables) / "images.parquet"
        return self._read_table(path, ("path", "width", "height", "run"))

    def read_tables(self, description: IndexDescription) -> IndexTables:
        """Images and features; the latter are mapped, not read."""
        if not description.tables:
            raise SearchError(f"{self.path} is not complete; the same `veca search index` continues it")
        images, cells = self.read_images(description), description.settings.cells
        folder, dim, regions = self.tables(description.tables), description.dim, None
        if cells:
            regions = self._map_vectors(folder / "regions.npy", (len(images), cells**2, dim))
        return IndexTables(images, self._map_vectors(folder / "vectors.npy", (len(images), dim)), regions)

    def _map_vectors(self, path: Path, shape: tuple[int, ...]) -> NDArray[np.float16]:
        try:
            # Not `np.load`, which takes archives too.
            if not shape[0]:  # nothing to map
                return np.zeros(shape, np.float16)
            vectors: NDArray[np.float16] = np.lib.format.open_memmap(path, mode="r")
            if vectors.shape != shape or vectors.dtype != np.float16 or not vectors.flags.c_contiguous:
                raise ValueError(f"{vectors.dtype} {vectors.shape}, not float16 {shape}")
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(path, error) from error
        return vectors

    def _read_table(self, path: Path, columns: Iterable[str]) -> pa.Table:
        try:
            return pq.read_table(path, columns=list(columns)).select(list(columns))
        except (OSError, ValueError, LookupError) as error:
            raise self._damaged(path, error) from error

    def _damaged(self, path: Path, error: Exception) -> SearchError:
        reason = excerpt(str(error).partition("\n")[0])
        way = "the same `veca search index` makes it again, from the features that are there"
        return SearchError(f"{path} is damaged or missing ({reason}); {way}")


def _write_table(path: Path, columns: dict[str, Any]) -> None:
    types = {"name": pa.string(), "stamp": pa.string(), "path": pa.string()}
    arrays = {name: pa.array(values, types.get(name, pa.int32())) for name, values in columns.items()}
    with atomic_path(path) as part:
        pq.write_table(pa.table(arrays), part, compression="zstd")
