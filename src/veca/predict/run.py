"""`veca predict`: predictions for many images, as a table of classes or a folder of masks or depths.

    sources → processes that read, check and resize → batches → model → threads that write files

Every file is written atomically. A table that was interrupted is begun anew; a folder is continued.
"""

import csv
import json
import math
import os
import shutil
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from veca.checkpoint.format import weights_hash
from veca.data.records import TASK_IMAGES, Record, RecordDecoder, decode_tasks, describe_error, read_item, split_tasks
from veca.data.remote import as_text, is_remote
from veca.data.sources import Item, counting_images, find_empty_source, iter_items, list_files
from veca.errors import ArgumentError, warn_caller
from veca.heads.networks import DepthEstimator
from veca.images import MAX_PIXELS, ImageError, open_image, resample
from veca.images.formats import collect_unsupported
from veca.predict.predictor import ClassPrediction, DepthPrediction, MaskPrediction, Prediction, Predictor
from veca.report.gallery import colour_classes, colour_depth, depth_range, draw_depth_legend, draw_legend
from veca.utils.console import bar
from veca.utils.files import atomic_path, check_writable, list_paths, locked
from veca.utils.text import printable

PICTURE_SIDE = 2048
"""Longest side in pixels of a coloured picture; masks and depths have all pixels."""
MAX_METRES = 65.535
"""The largest depth in 16 bits of millimetres."""
_SETTINGS, _TABLE, _FAILURES = "predict.json", "predictions.csv", "failures.csv"
_WRITERS = 4
"""Threads that write files, and the most images that wait for them."""
_MAX_NAME = 200
"""Bytes of a part of a name; file systems take 255."""


@dataclass(frozen=True)
class PredictReport:
    """Result of a run."""

    out: Path
    images: int
    """Images with a prediction, those of an earlier, interrupted run included."""
    resumed: int
    failures: list[tuple[str, str]]
    """Name and reason of images that cannot be read; they are in `failure_file` too."""
    failure_file: Path
    seconds: float


class _Job(NamedTuple):
    """An image, and the name of its files: its path within the sources, without suffix."""

    number: int
    item: Item
    name: str


def predict_files(
    predictor: Predictor,
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    top: int | None = None,
    column: str | None = None,
    workers: int = 0,
    overwrite: bool = False,
    progress: bool = True,
) -> PredictReport:
    """Write the predictions for all images in `inputs` to `out`: a `.csv` file of classes, or a folder of maps.

    `inputs` are as in `embed`. A table has the `top` most probable classes of each image (None: one).
    """
    began, sources = time.perf_counter(), list_paths(inputs)
    if not sources:
        raise ArgumentError("nothing to predict; name files, folders, globs, tar shards or Parquet files")
    if problem := find_empty_source(sources, column):
        raise ArgumentError(problem)
    writer: _Table | _Maps
    if predictor.task == "classify":
        writer = _Table(predictor, Path(out), 1 if top is None else top, overwrite)
    elif top is not None:
        raise ArgumentError(f"--top {top}: classes of images are counted; this model predicts maps: leave it out")
    else:
        writer = _Maps(predictor, Path(out), sources, column, overwrite)
    with collect_unsupported() as left_out, writer:
        _Run(predictor, writer, sources, column, workers, progress).run()
    left_out.warn()
    failures = sorted(writer.failures)
    return PredictReport(
        writer.out, writer.done, writer.resumed, failures, writer.failure_file, time.perf_counter() - began
    )


class _Run:
    """Reads, predicts and hands over all images of a run."""

    def __init__(
        self, predictor: Predictor, writer: "_Writer", sources: list[str], column: str | None, workers: int, show: bool
    ) -> None:
        self.predictor, self.writer, self.settings = predictor, writer, predictor.settings
        self.sources, self.column, self.workers, self.show = sources, column, workers, show
        self.reading = deque[_Job]()
        """Images on their way through the decoding processes, which keep their order."""

    def run(self) -> None:
        settings, writer = self.settings, self.writer
        decoder = RecordDecoder(settings.size, settings.fit, MAX_PIXELS, max_patches=settings.max_patches)
        # The processes start before the threads of the bar and of the writer: forking is safest then.
        with (
            decode_tasks(split_tasks(self._items(), TASK_IMAGES), decoder, self.workers) as tasks,
            bar("predicting", None, "images", self.show, failures=True) as advance,
            counting_images(self.sources if self.show else [], lambda total: advance(total=total)),
        ):
            records = (record for task in tasks for record in task)
            for batch in self._batches(records):
                pixels = [torch.as_tensor(record.pixels) for _, record in batch]
                sizes = [(record.size[1], record.size[0]) for _, record in batch]
                predictions = self.predictor.predict_pixels(pixels, sizes)
                for (job, _), prediction in zip(batch, predictions, strict=True):
                    writer.write(job, prediction)
                failed = len(writer.failures)
                advance(counted=len(batch), completed=writer.done + failed, failed=failed)
            writer.finish()
            failed = len(writer.failures)
            advance(0, completed=writer.done + failed, failed=failed, total=writer.done + failed)

    def _items(self) -> Iterator[Item]:
        """The images to predict, each with a name of its own."""
        names = _Names(self.sources)
        for number, item in enumerate(iter_items(self.sources, self.column)):
            job = _Job(number, item, names.choose(item.name))
            if not self.writer.has(job):
                self.reading.append(job)
                yield item

    def _batches(self, records: Iterable[Record]) -> Iterator[list[tuple[_Job, Record]]]:
        """Batches of readable images, fewer where they or their maps have many pixels."""
        batch, pixels, full = list[tuple[_Job, Record]](), 0, 0
        limit = 2 * self.settings.batch * self.settings.size**2
        for record in records:
            job = self.reading.popleft()
            if record.error:
                self.writer.fail(job, record.error)
                continue
            pixels, full = pixels + math.prod(record.shape), full + math.prod(record.size)
            if batch and (len(batch) == self.settings.batch or pixels > limit or full > MAX_PIXELS):
                yield batch
                batch, pixels, full = [], math.prod(record.shape), math.prod(record.size)
            batch.append((job, record))
        if batch:
            yield batch


class _Names:
    """Names of the files of images: where they lie below the folder that all sources have in common, without suffix.

    Of two images whose names differ in the suffix alone, the second keeps its suffix.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        roots = [_parts(as_text(list_files(source)[0])) for source in sources]
        # Of each level the names; those before the first with several are of a folder that all have in common.
        self.common = len(list(takewhile(lambda names: len(set(names)) == 1, zip(*roots, strict=False))))
        self.taken = set[str]()

    def choose(self, path: str) -> str:
        *folders, file = [_shorten(part) for part in _parts(path)[self.common :]]
        stem, count = file.rpartition(".")[0] or file, 1
        names = ["/".join([*folders, stem]), "/".join([*folders, file])]
        name = next((name for name in names if name not in self.taken), "")
        while not name or name in self.taken:
            count += 1
            name = f"{names[1]}-{count}"
        self.taken.add(name)
        return name


def _parts(path: str) -> list[str]:
    """The parts of a path or address, from the top; no part leads upwards, whatever an archive says."""
    if not is_remote(path) and not path.startswith(os.sep):
        path = os.path.join(os.getcwd(), path)
    return [part for part in path.replace(os.sep, "/").split("/") if part not in ("", ".", "..")]


def _shorten(part: str) -> str:
    encoded = part.encode()
    return part if len(encoded) <= _MAX_NAME else encoded[-_MAX_NAME:].decode(errors="ignore")


class _Writer(AbstractContextManager["_Writer"]):
    """Where predictions go. Used as a context manager, it holds its place and leaves nothing half-written."""

    out: Path
    failure_file: Path

    def __init__(self) -> None:
        self.done = self.resumed = 0
        self.failures: list[tuple[str, str]] = []
        self.stack = ExitStack()

    def __exit__(self, *error: Any) -> bool | None:
        return self.stack.__exit__(*error)

    def has(self, job: _Job) -> bool:
        """Whether an interrupted run has left the prediction for an image."""
        return False

    def fail(self, job: _Job, reason: str) -> None:
        self.failures.append((job.item.name, reason))

    @abstractmethod
    def write(self, job: _Job, prediction: Prediction) -> None: ...

    def finish(self) -> None:
        """Complete the output: the list of failures, if there are any."""
        if not self.failures:
            self.failure_file.unlink(missing_ok=True)
            return
        with atomic_path(self.failure_file) as part:
            _write_csv(part, ("path", "error"), sorted(self.failures))


def _write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(header)
        table.writerows(rows)


class _Table(_Writer):
    """A CSV file: a row for each image, in the order of the images."""

    def __init__(self, predictor: Predictor, out: Path, top: int, overwrite: bool) -> None:
        super().__init__()
        count = len(predictor.classes)
        if not 1 <= top <= count:
            raise ArgumentError(f"--top {top}: must be from 1 to {count}, the number of classes")
        if out.is_dir() or out.suffix.lower() != ".csv":
            problem = "is a folder" if out.is_dir() else "does not end with .csv"
            raise ArgumentError(f"{out} {problem}; classes are written to a file: name one, as predictions.csv")
        if out.exists() and not overwrite:
            raise ArgumentError(f"{out} exists; choose another name, or pass --overwrite")
        check_writable(out)
        self.out, self.top, self.failure_file = out, top, out.with_name(f"{out.name}.failures.csv")

    def __enter__(self) -> Self:
        part = self.stack.enter_context(atomic_path(self.out))
        self.file = self.stack.enter_context(part.open("w", newline="", encoding="utf-8"))
        self.table = csv.writer(self.file, lineterminator="\n")
        more = [f"{name}_{i}" for i in range(2, self.top + 1) for name in ("class", "probability")]
        self.table.writerow(["image", "class", "probability", *more])
        return self

    def write(self, job: _Job, prediction: Prediction) -> None:
        assert isinstance(prediction, ClassPrediction)
        best = zip(prediction.classes[: self.top], prediction.probabilities[: self.top], strict=True)
        self.table.writerow([job.item.name, *(cell for name, share in best for cell in (name, f"{share:.6f}"))])
        self.done += 1


class _Maps(_Writer):
    """A folder: a map in the pixels of each image and a coloured picture, below folders named as the sources are."""

    def __init__(
        self, predictor: Predictor, out: Path, sources: Sequence[str], column: str | None, overwrite: bool
    ) -> None:
        super().__init__()
        if out.exists() and not out.is_dir():
            raise ArgumentError(f"{out} is a file; masks and depths are written to a folder: name one")
        for source in filter(os.path.isdir, sources):
            if out.resolve().is_relative_to(Path(source).resolve()):  # what is written there would be read again
                raise ArgumentError(f"{out} is inside {source}, where the images are; name a folder elsewhere")
        check_writable(out, folder=True)
        self.predictor, self.out, self.overwrite, self.failure_file = predictor, out, overwrite, out / _FAILURES
        self.kinds = ("masks", "overlays") if predictor.task == "segment" else ("depths", "pictures")
        """Folders of the maps and of the coloured pictures."""
        places = [source if is_remote(source) else os.path.abspath(source) for source in sources]
        about = {"task": predictor.task, "weights": weights_hash(predictor.network), **asdict(predictor.settings)}
        self.about = {**about, "sources": places, "column": column}
        del self.about["batch"]  # it changes no more than rounding
        self.rows: dict[int, tuple[str, str, str]] = {}
        if isinstance(predictor.network, DepthEstimator) and (high := predictor.network.head.high) > MAX_METRES:
            warn_caller(f"this model measures up to {high:g} m; PNG files of millimetres end at {MAX_METRES} m")
        self.writing = deque[tuple[_Job, Future[None]]]()

    def __enter__(self) -> Self:
        with self.stack as stack:
            stack.enter_context(locked(self.out))
            self._begin()
            self.threads = stack.enter_context(ThreadPoolExecutor(_WRITERS, "write predictions"))
            self.stack = stack.pop_all()
        return self

    def _begin(self) -> None:
        """Refuse a folder in use, and write what does not depend on the images."""
        settings, used = self.out / _SETTINGS, any(path.name != "lock" for path in self.out.iterdir())
        if used and not settings.is_file():
            raise ArgumentError(f"{self.out} holds other files; name a new folder or an empty one")
        if used and self.overwrite:
            for name in (_TABLE, _FAILURES, _SETTINGS):  # first: what is left then is no run to continue
                (self.out / name).unlink(missing_ok=True)
            for kind in ("masks", "overlays", "depths", "pictures"):
                shutil.rmtree(self.out / kind, ignore_errors=True)
        elif (self.out / _TABLE).exists():
            raise ArgumentError(f"{self.out} has predictions already; choose another folder, or pass --overwrite")
        elif used and (different := self._compare(settings)):
            problem = f"predictions that were interrupted, with other settings ({', '.join(different)})"
            raise ArgumentError(f"{self.out} holds {problem}; choose another folder, or pass --overwrite")
        with atomic_path(settings) as part:
            part.write_text(json.dumps(self.about, indent=1) + "\n", encoding="utf-8")
        if self.predictor.task == "segment":
            classes = self.predictor.classes
            with atomic_path(self.out / "classes.txt") as part:
                part.write_text("".join(f"{printable(name)}\n" for name in classes), encoding="utf-8")
            _save_png(self.out / "legend.png", draw_legend(classes))

    def _compare(self, file: Path) -> list[str]:
        """Names of the settings that an interrupted run had otherwise."""
        before: Any = {}
        with suppress(OSError, ValueError, RecursionError):
            before = json.loads(file.read_text(encoding="utf-8"))
        before = before if isinstance(before, dict) else {}
        now = json.loads(json.dumps(self.about))
        return [name for name in now if before.get(name) != now[name]]

    def _paths(self, job: _Job) -> tuple[str, str]:
        """Paths of the map and of the picture, in the folder."""
        return f"{self.kinds[0]}/{job.name}.png", f"{self.kinds[1]}/{job.name}.png"

    def has(self, job: _Job) -> bool:
        finished = (self.out / self._paths(job)[0]).is_file()
        if finished:
            self._count(job)
            self.resumed += 1
        return finished

    def _count(self, job: _Job) -> None:
        self.rows[job.number] = (job.item.name, *self._paths(job))
        self.done += 1

    def write(self, job: _Job, prediction: Prediction) -> None:
        self._wait(_WRITERS - 1)
        self.writing.append((job, self.threads.submit(self._write, job, prediction)))

    def _wait(self, but: int = 0) -> None:
        """Wait until all but the last few are written."""
        while len(self.writing) > but:
            job, future = self.writing.popleft()
            try:
                future.result()
            except ImageError as error:  # it has changed since it was read first
                self.fail(job, describe_error(error, job.item.path))
            else:
                self._count(job)

    def _write(self, job: _Job, prediction: Prediction) -> None:
        map_path, picture_path = (self.out / path for path in self._paths(job))
        if isinstance(prediction, MaskPrediction):
            mask = prediction.mask.numpy()
            values = mask if mask.dtype == np.uint8 else mask.astype(np.uint16)
            picture = _draw_overlay(read_item(job.item), _shrink(mask), len(prediction.classes))
        else:
            assert isinstance(prediction, DepthPrediction)
            depth = prediction.depth.numpy()
            values = (1000 * depth.clip(max=MAX_METRES)).round().clip(min=1).astype(np.uint16)  # 0 is not measured
            shown = _shrink(depth)
            low, high = depth_range(shown, float(shown.max()))
            picture = draw_depth_legend(colour_depth(shown, low, high), low, high)
        _save_png(picture_path, picture)
        _save_png(map_path, Image.fromarray(values))  # last: it says that the image is done

    def finish(self) -> None:
        self._wait()
        super().finish()
        with atomic_path(self.out / _TABLE) as part:
            header = "image", *(kind.removesuffix("s") for kind in self.kinds)
            _write_csv(part, header, [self.rows[number] for number in sorted(self.rows)])


def _shrink(values: NDArray[Any]) -> NDArray[Any]:
    """A map (height, width) with sides of at most `PICTURE_SIDE`, by nearest neighbour."""
    scale = min(1.0, PICTURE_SIDE / max(values.shape))
    sides = [(side, max(1, round(side * scale))) for side in values.shape]
    return values[np.ix_(*(((np.arange(after) + 0.5) * side / after).astype(np.int64) for side, after in sides))]


def _draw_overlay(source: str | bytes, mask: NDArray[Any], classes: int) -> Image.Image:
    """The image at the size of the mask, half in the colours of its classes."""
    height, width = mask.shape
    image = open_image(source, at_least=min(width, height))
    image = resample(image, (width, height), (0, 0, *image.info["extent"]))
    return Image.blend(image, colour_classes(mask, classes), 0.5)


def _save_png(path: Path, image: Image.Image) -> None:
    with atomic_path(path) as part:
        image.save(part, "PNG", compress_level=4)
