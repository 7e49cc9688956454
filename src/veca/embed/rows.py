"""Images on their way to the device, and rows of features to a file: their Arrow table, the thread that writes them."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from veca.data.video import frame_time

_T = TypeVar("_T")

MAX_WRITES = 2
"""Row groups and files that wait to be written, at most."""


class FeatureBatch:
    """Features of a batch, on their way from the device until they are asked for."""

    def __init__(self, columns: dict[str, Tensor], events: Sequence[torch.cuda.Event], seconds: float) -> None:
        self._columns, self._events = columns, events
        self.seconds = seconds
        """What the model took."""

    def columns(self) -> dict[str, NDArray[Any]]:
        """Wait for them: columns (B, numbers)."""
        if self._events:
            began, ended, copied = self._events
            copied.synchronize()
            self.seconds, self._events = began.elapsed_time(ended) / 1000, ()
        return {name: values.numpy() for name, values in self._columns.items()}


@dataclass(frozen=True, slots=True)
class ImageShape:
    """What images of one shape have in common."""

    numbers: tuple[int, int, int]
    """Rows and columns of patches, and the budget of cores."""
    batch: int
    """How many go through the model at a time."""
    feature_bytes: int
    pixel_bytes: int


@dataclass(slots=True)
class FeatureRows:
    """Consecutive images of a part: all of one shape, and where their features are, from `first` on; or all errors.

    `errors` are of rows by their index. `images` wait for their batch.
    """

    names: list[str]
    sizes: NDArray[np.int32]
    errors: dict[int, str]
    shape: ImageShape | None = None
    images: Any = None
    features: FeatureBatch | dict[str, NDArray[Any]] | None = None
    first: int = 0

    def __len__(self) -> int:
        return len(self.names)

    def column(self, name: str) -> NDArray[Any]:
        """A column of their features (rows, numbers); waits for them."""
        columns = self.features.columns() if isinstance(self.features, FeatureBatch) else self.features
        assert columns is not None
        return columns[name][self.first : self.first + len(self)]

    def without_errors(self, names: Iterable[str]) -> "FeatureRows":
        """The rows with features, of which `names` are the columns."""
        if not self.errors:
            return self
        kept = [i for i in range(len(self)) if i not in self.errors]
        features = {name: self.column(name)[kept] for name in names}
        return FeatureRows([self.names[i] for i in kept], self.sizes[kept], {}, self.shape, None, features)


class WriteQueue(AbstractContextManager["WriteQueue"]):
    """A thread that writes what it is given, in order. It is at most `MAX_WRITES` jobs behind."""

    def __init__(self) -> None:
        self._thread, self._jobs = ThreadPoolExecutor(1, "parquet"), deque[Future[Any]]()

    def __exit__(self, *_: object) -> None:
        self.close(wait=True)

    def close(self, wait: bool = False) -> None:
        """Take no more jobs; those that were submitted are done, and waited for if told so."""
        self._thread.shutdown(wait)

    def submit(self, job: Callable[..., _T], *args: Any) -> Future[_T]:
        """Have a job done; raises the error of an earlier one instead."""
        self.wait(MAX_WRITES - 1)
        future = self._thread.submit(job, *args)
        self._jobs.append(future)
        return future

    def settle(self) -> None:
        """Wait until all jobs are done or have failed; errors are ignored."""
        wait(self._jobs)
        self._jobs.clear()

    def wait(self, but: int = 0) -> None:
        """Wait until all jobs but the last few are done; raises the error of one of them."""
        while len(self._jobs) > but:
            self._jobs.popleft().result()


def stack_images(images: Sequence[Any], device: torch.device) -> Tensor:
    """Join images on the device: tensors there, and lists of arrays."""
    if device.type == "cpu":
        return torch.from_numpy(np.stack(list(chain.from_iterable(images))))
    parts = list[Tensor]()
    for on_device, group in groupby(images, key=lambda some: isinstance(some, Tensor)):
        if on_device:
            parts += group
            continue
        arrays = list(chain.from_iterable(group))
        host = torch.empty(len(arrays), *arrays[0].shape, dtype=torch.uint8, pin_memory=True)
        np.stack(arrays, out=host.numpy())
        parts.append(host.to(device, non_blocking=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def make_table(pieces: Sequence[FeatureRows], schema: pa.Schema) -> pa.Table:
    """The table of rows, none of which is an error."""
    counts = [len(rows) for rows in pieces]
    shapes = np.array([rows.shape.numbers for rows in pieces if rows.shape], np.int32)
    numbers = np.concatenate([np.concatenate([rows.sizes for rows in pieces]), np.repeat(shapes, counts, axis=0)], 1)
    columns: dict[str, Any] = {"path": _to_strings(list(chain.from_iterable(rows.names for rows in pieces)))}
    columns |= dict(zip(schema.names[1:6], map(_to_arrow, numbers.T.copy()), strict=True))
    if "time" in schema.names:
        times = [frame_time(name) for rows in pieces for name in rows.names]
        columns["time"] = _to_arrow(np.array(times, np.float64))
    for name in (name for name in schema.names if name not in columns):
        values, kind = [rows.column(name) for rows in pieces], cast(Any, schema.field(name).type)
        flat = _to_arrow(np.concatenate([each.reshape(-1) for each in values]))
        if pa.types.is_fixed_size_list(kind):
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, type=kind)  # type: ignore[call-overload]
        else:
            lengths = np.repeat([each.shape[1] for each in values], counts)
            ends = _to_arrow(np.concatenate([[0], np.cumsum(lengths)]))
            columns[name] = pa.LargeListArray.from_arrays(ends, flat, type=kind)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _to_arrow(values: Any) -> Any:
    """An array of numbers as Arrow's, not copied. `pa.array` would first import pandas, where that is installed."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _to_strings(texts: Sequence[str]) -> Any:
    encoded = [text.encode() for text in texts]
    ends: Any = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(texts), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))])
