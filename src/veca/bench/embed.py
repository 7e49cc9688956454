"""`veca bench embed`: the stages of `veca.embed`, each alone, and whole runs, side by side.

    list → read and check → decode (one core, all workers, GPU) → resize on the GPU → model → write;  end to end

Every stage is the code that a run uses, with ready input. All take turns, round by round.
"""

import dataclasses
import io
import itertools
import math
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from veca.bench.machine import child_environment, machine_facts
from veca.bench.report import EmbedResults, StageRow, four_digits
from veca.data.gpu_decode import GpuDecoder, decode_jpegs, undecodable_reason
from veca.data.records import Decode, Record, RecordDecoder, TaskRecords, decode_tasks
from veca.data.remote import SpanReader
from veca.data.sources import Item, iter_items
from veca.embed.batches import EmbedJob, FeatureModel, PartitionWriter, prepare_model
from veca.embed.partitions import Partition, PartitionFolder
from veca.embed.rows import FeatureBatch
from veca.embed.run import describe_features, embed
from veca.embed.settings import EmbedReport, EmbedSettings
from veca.embed.tuning import choose_batch
from veca.errors import ArgumentError, VecaError
from veca.model import Veca
from veca.utils.console import progress_bar
from veca.utils.device import usable_cpus
from veca.utils.files import check_writable, locked
from veca.utils.timing import synchronize

# Images made on the spot: different ones, and how many in total on a GPU and on a CPU
_PICTURES, _IMAGES, _IMAGES_ON_CPU = 32, 8192, 128
# Batches and tasks that the GPU is given in advance
_AHEAD = 4
_WARM_UP_SECONDS = 0.2
_ONE, _ALL = "one core", "all workers"
_TO_END = "end to end"


class _Sample(NamedTuple):
    images: int
    seconds: float


_Stage = Callable[[float], _Sample]
"""Does its work for about that many seconds."""


def bench_embed(
    sources: Sequence[str],
    *,
    model: Veca,
    model_name: str,
    settings: EmbedSettings,
    device: torch.device,
    workers: int | None = None,
    images: int | None = None,
    image_size: tuple[int, int] = (640, 480),
    seconds: float = 2.0,
    repeats: int = 3,
    out: Path | None = None,
) -> EmbedResults:
    """Measure the stages of a run over `sources` and whole runs, which embed all their images several times.

    Without sources, `images` JPEGs of `image_size` (width, height) are made, in a tar shard. Each stage has `repeats`
    turns of `seconds`. `model_name` is what `veca embed --model` takes. The folder `out` gets the results.
    """
    if repeats < 1:
        raise ArgumentError(f"repeats={repeats}: must be at least 1")
    if out is not None:
        check_writable(out, folder=True)
    settings = settings.resolve(model)
    keep = nullcontext() if out is None else locked(out)
    with keep, tempfile.TemporaryDirectory(prefix="veca-bench-") as folder:
        count = images or (_IMAGES_ON_CPU if device.type == "cpu" else _IMAGES)
        pictures = make_jpegs(*image_size, 1 if sources else min(count, _PICTURES))
        if not sources:
            sources = [f"{folder}/images.tar"]
            _write_shard(Path(sources[0]), pictures, count)
        Path(folder, "one.jpg").write_bytes(pictures[0])
        bench = _EmbedBench(folder, list(sources), model, model_name, settings, device, workers)
        start = bench.time_command()
        rows = [_make_row(*measured) for measured in bench.measure_stages(seconds, repeats).items()]
        rows += bench.measure_runs({row.stage: row.images_per_s for row in rows}, seconds, repeats)
        facts = {"model": model_name, **bench.describe(), "images": f"{bench.count:,}"}
        facts |= {"seconds": f"{seconds:g}", "repeats": str(repeats)}
        results = EmbedResults(machine_facts(device), facts, rows, start, bench.find_bottleneck(rows))
        if out is not None:
            results.save(out)
    return results


def make_jpegs(width: int, height: int, count: int = _PICTURES) -> list[bytes]:
    """Different JPEGs with texture at all scales, as large as photographs of the size: 56 kB at 640 × 480."""

    def make(seed: int) -> bytes:
        random, pixels = np.random.default_rng(seed), np.zeros((height, width, 3), np.float32)
        for octave, step in enumerate((128, 32, 8, 2)):
            coarse = random.integers(0, 256, (height // step + 2, width // step + 2, 3), dtype=np.uint8)
            fine = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            pixels += np.asarray(fine, np.float32) * 0.53**octave
        pixels -= pixels.min()
        file = io.BytesIO()
        Image.fromarray((pixels * (255 / pixels.max())).astype(np.uint8)).save(file, "JPEG", quality=85)
        return file.getvalue()

    with ThreadPoolExecutor(usable_cpus()) as threads:
        return list(threads.map(make, range(count)))


def _write_shard(path: Path, pictures: Sequence[bytes], count: int) -> None:
    with tarfile.open(path, "w") as shard:
        for i, data in enumerate(itertools.islice(itertools.cycle(pictures), count)):
            member = tarfile.TarInfo(f"{i:08d}.jpg")
            member.size = len(data)
            shard.addfile(member, io.BytesIO(data))


def _make_row(stage: str, samples: Sequence[_Sample]) -> StageRow:
    rates = [sample.images / sample.seconds for sample in samples]
    rate = statistics.median(rates)
    return StageRow(stage, rate, 1e6 / rate, (max(rates) - min(rates)) / rate)


class _FileReader(GpuDecoder):
    """Leaves the JPEGs as they are: workers read and check them for the GPU, and nothing follows."""

    def submit(self, records: TaskRecords, decoder: RecordDecoder) -> Callable[[], TaskRecords]:
        return lambda: records


@dataclass(frozen=True)
class _ReadyDecoder(RecordDecoder):
    """Reads nothing: each image has the same pixels."""

    pixels: NDArray[np.uint8] | None = None

    def __call__(self, item: Item, gpu: bool = False, spans: SpanReader | None = None) -> Record:
        return Record(item.name, (self.size, self.size), self.pixels, shape=(self.size, self.size))


class _ReadyModel(FeatureModel):
    """Computes nothing: each image has the same features."""

    def __call__(self, images: Sequence[Any]) -> FeatureBatch:
        dtype = getattr(torch, str(self.job.settings.save_dtype))
        return FeatureBatch(
            {"cls": torch.ones(sum(map(len, images)), self.job.config.num_features, dtype=dtype)}, (), 0.0
        )


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _repeat(step: Callable[[], int], seconds: float) -> _Sample:
    """Call `step`, which returns a number of images, for that many seconds."""
    images, began = 0, time.perf_counter()
    while True:
        images += step()
        if (passed := time.perf_counter() - began) >= seconds:
            return _Sample(images, passed)


class _EmbedBench:
    """The stages and runs of one model over some sources."""

    def __init__(
        self,
        folder: str,
        sources: list[str],
        model: Veca,
        name: str,
        settings: EmbedSettings,
        device: torch.device,
        workers: int | None,
    ) -> None:
        self.folder, self.sources, self.model, self.name, self.device = folder, sources, model, name, device
        self.picture = Path(folder, "one.jpg")
        self.count = sum(1 for _ in iter_items(sources))
        if not self.count:
            raise ArgumentError(f"{', '.join(sources)}: no images there; name others, or none to have some made")
        ready = prepare_model(model, settings, device)
        batch = settings.batch or choose_batch(ready, settings, device)
        self.settings = settings = dataclasses.replace(settings, batch=batch)
        about = describe_features(model, name, settings, device)
        features = PartitionFolder(f"{folder}/stage/")
        workers = usable_cpus() if workers is None else workers
        self.job = EmbedJob(features, settings, model.config, about, device, workers)
        features.start(about, overwrite=True)
        self.feature_model = FeatureModel(ready, self.job)
        self.no_gpu = undecodable_reason(device)
        """Why the GPU cannot decode."""

    @property
    def decoders(self) -> list[Decode]:
        return ["pillow", "cpu"] if self.no_gpu else ["pillow", "cpu", "gpu"]

    @property
    def where(self) -> str:
        """Of the stages by processes, the one that a run has."""
        return _ALL if self.job.workers else _ONE

    def describe(self) -> dict[str, str]:
        s = self.settings
        facts = {"size": f"{s.size} px", "cores": str(s.cores), "precision": s.precision, "batch": str(s.batch)}
        return facts | {"workers": str(self.job.workers)} | ({"no GPU decoder": self.no_gpu} if self.no_gpu else {})

    def time_command(self) -> dict[str, float]:
        """Seconds of `veca embed` for one image, in a new process; on a GPU also while kernels have to be compiled."""
        s, paths = self.settings, [str(self.picture), "--out", f"{self.folder}/one.parquet", "--overwrite"]
        command = [sys.executable, "-m", "veca", "embed", *paths, "--model", self.name, "--device", str(self.device)]
        command += ["--size", str(s.size), "--cores", str(s.cores), "--precision", s.precision]
        command += ["--workers", str(self.job.workers), "--no-progress"]
        environment, seconds = child_environment() | {"TRITON_CACHE_DIR": f"{self.folder}/triton"}, dict[str, float]()
        names = ("kernels compiled", "kernels cached") if self.device.type == "cuda" else ("from start to exit",)
        for name in names:
            began = time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            seconds[name] = time.perf_counter() - began
            if done.returncode:
                raise VecaError(f"veca embed failed: {done.stderr.strip()}")
        return seconds

    def measure_stages(self, seconds: float, repeats: int) -> dict[str, list[_Sample]]:
        """Samples of each stage, round by round."""
        stages = self._stages()
        samples: dict[str, list[_Sample]] = {name: [] for name in stages}
        with self._progress((1 + repeats) * len(stages)) as advance:
            for round_ in range(1 + repeats):
                for name, stage in stages.items():
                    with advance(name):
                        sample = stage(seconds if round_ else min(seconds, _WARM_UP_SECONDS))
                        samples[name] += [sample] if round_ else []
        return samples

    @contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[str], AbstractContextManager[None]]]:
        """A progress bar, which shows a step while its block runs."""
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with progress_bar(*columns, transient=True) as progress:
            task = progress.add_task("", total=total)

            @contextmanager
            def advance(step: str) -> Iterator[None]:
                progress.update(task, description=step)
                yield
                progress.advance(task)

            yield advance

    def _stages(self) -> dict[str, _Stage]:
        """Every stage that works on this machine, by name."""
        stages: dict[str, _Stage] = {"list": self._list}
        processes = {_ONE: 0} | ({_ALL: self.job.workers} if self.job.workers else {})
        for where, workers in processes.items():
            stages[f"read, {where}"] = partial(self._take, workers, "gpu")
            stages[f"decode pillow, {where}"] = partial(self._take, workers, "pillow")
            stages[f"decode cpu, {where}"] = partial(self._take, workers, "cpu")
            if self.job.by_task:
                stages[f"model, {where}"] = partial(self._compute, workers)
        if not self.no_gpu and (tasks := self._jpeg_tasks()):
            stages |= {"decode gpu": partial(self._decode_gpu, tasks), "resize gpu": self._resize_gpu(tasks)}
            stages["decode and resize gpu"] = partial(self._decode_resize_gpu, tasks)
        if not self.job.by_task:
            batch, side = self.settings.batch_size, self.settings.size
            pixels = torch.randint(256, (batch, 3, side, side), dtype=torch.uint8, device=self.device)
            stages["model"] = partial(self._run_model, pixels, True)
            stages["model, stack and copy"] = partial(self._run_model, pixels, False)
        return stages | {"write": self._write}

    def _job_by(self, decode: Decode) -> EmbedJob:
        return dataclasses.replace(self.job, settings=dataclasses.replace(self.settings, decode=decode))

    def _list(self, seconds: float) -> _Sample:
        return _repeat(lambda: sum(1 for _ in iter_items(self.sources)), seconds)

    def _items(self) -> Iterator[Item]:
        return itertools.chain.from_iterable(iter_items(self.sources) for _ in itertools.repeat(None))

    def _take(self, workers: int, decode: Decode, seconds: float, decoder: RecordDecoder | None = None) -> _Sample:
        """Records of endless tasks, once workers have their queues filled; the model computes if there is a decoder."""
        job = self._job_by(decode)
        gpu = _FileReader(self.device) if decode == "gpu" or job.resizes_on_gpu else None
        compute = self.feature_model.compute if decoder else None
        tasks, step = job.split_tasks(self._items()), max(1, workers)
        with _one_thread(), decode_tasks(tasks, decoder or job.decoder, workers, gpu=gpu, compute=compute) as decoded:

            def take() -> int:
                """As many tasks as there are workers."""
                return sum(len(records) for records in itertools.islice(decoded, step))

            for _ in range(2 if workers else 0):
                take()
            return _repeat(take, seconds)

    def _compute(self, workers: int, seconds: float) -> _Sample:
        s, side = self.settings, self.settings.size
        pixels = np.random.default_rng(0).integers(0, 256, (3, side, side), np.uint8)
        return self._take(workers, "cpu", seconds, _ReadyDecoder(side, s.fit, s.max_pixels, "cpu", pixels=pixels))

    def _jpeg_tasks(self) -> list[TaskRecords]:
        """Some tasks of JPEGs that the GPU takes."""
        job, tasks = self._job_by("gpu"), list[TaskRecords]()
        for items in itertools.islice(job.split_tasks(iter_items(self.sources)), 2 * _AHEAD):
            records = [job.decoder(item, gpu=True) for item in items]
            records = [record for record in records if record.source is not None and record.source.ndim == 1]
            for record in records:
                record.source = record.source.copy()  # writable, as from a worker
            tasks += [TaskRecords.collect(records)] if records else []
        return tasks

    def _decode_gpu(self, tasks: list[TaskRecords], seconds: float) -> _Sample:
        files = itertools.cycle([[record.source for record in task] for task in tasks])

        def decode() -> int:
            decoded = decode_jpegs(next(files), self.device)
            synchronize(self.device)
            return len(decoded.starts)

        return _repeat(decode, seconds)

    def _decode_resize_gpu(self, tasks: list[TaskRecords], seconds: float) -> _Sample:
        endless, decoder = itertools.cycle(tasks), self.job.decoder
        with GpuDecoder(self.device) as gpu:
            waiting = deque(gpu.submit(next(endless), decoder) for _ in range(_AHEAD))

            def decode() -> int:
                waiting.append(gpu.submit(next(endless), decoder))
                return len(waiting.popleft()())

            sample = _repeat(decode, seconds)
            for rest in waiting:
                rest()
        return sample

    def _resize_gpu(self, tasks: list[TaskRecords]) -> _Stage:
        from veca.kernels.resample import resample_crops

        records, side = list(tasks[0]), self.settings.size
        decoded = decode_jpegs([record.source for record in records], self.device)
        places, crops = decoded.locate(), [record.crop for record in records if record.crop]
        out = torch.empty(len(places), 3, side, side, dtype=torch.uint8, device=self.device)

        def resize() -> int:
            resample_crops(places, crops, out)
            synchronize(self.device)
            return len(places)

        return partial(_repeat, resize)

    def _run_model(self, images: torch.Tensor, alone: bool, seconds: float) -> _Sample:
        """Batches through the model: what it takes the device itself (`alone`), or until features are on the host."""
        waiting, spent = deque(self.feature_model([images]) for _ in range(_AHEAD)), 0.0

        def run() -> int:
            nonlocal spent
            waiting.append(self.feature_model([images]))
            features = waiting.popleft()
            features.columns()
            spent += features.seconds
            return len(images)

        sample = _repeat(run, seconds)
        synchronize(self.device)
        return _Sample(sample.images, spent) if alone else sample

    def _write(self, seconds: float) -> _Sample:
        model, side = _ReadyModel(self.feature_model.model, self.job), self.settings.size
        partition = Partition(0, [Item("images", self.sources[0])])
        length, _ = self.job.part_limits()
        shape, pixels = (side, side), np.empty((3, side, side), np.uint8)
        records = TaskRecords.collect([Record(f"{i:08d}.jpg", shape, pixels, shape=shape) for i in range(length)])
        if self.job.by_task:
            model.compute(records)

        def write() -> int:
            return PartitionWriter(model, partition).write([records]).pictures

        return _repeat(write, seconds)

    def measure_runs(self, rates: dict[str, float], seconds: float, repeats: int) -> list[StageRow]:
        """Whole runs by each decoder, and of one image alone: the rate is that of the rest."""
        limits = {decode: self._limit(decode, rates)[0] for decode in self.decoders}
        # Twice the time of a stage: a run has to fill and to empty its queues.
        sources = {each: self.sources * math.ceil(2 * seconds * limit / self.count) for each, limit in limits.items()}
        runs: dict[Decode, list[tuple[EmbedReport, EmbedReport]]] = {decode: [] for decode in self.decoders}
        with self._progress((1 + repeats) * len(runs)) as advance:
            for round_ in range(1 + repeats):
                for decode, pairs in runs.items():
                    with advance(f"{_TO_END}, {decode}"):
                        one = self._run(decode, [str(self.picture)])
                        pairs += [(one, self._run(decode, sources[decode]))] if round_ else []
        model = rates[self._model_stage]
        return [self._run_row(decode, pairs, model) for decode, pairs in runs.items()]

    def _run(self, decode: Decode, sources: list[str]) -> EmbedReport:
        settings = self._job_by(decode).settings
        report = embed(
            sources, f"{self.folder}/features.parquet", model=self.model, model_name=self.name, settings=settings,
            device=self.device, workers=self.job.workers, overwrite=True, progress=False,
        )  # fmt: skip
        if not report.pictures:
            raise VecaError(f"no image of {', '.join(self.sources)} can be read; `veca embed` lists why")
        return report

    def _run_row(self, decode: Decode, pairs: list[tuple[EmbedReport, EmbedReport]], model_rate: float) -> StageRow:
        samples, busy = list[_Sample](), list[float]()
        for one, whole in pairs:
            if (seconds := whole.seconds - one.seconds) > 0:
                samples.append(_Sample(whole.pictures + whole.failures - 1, seconds))
                busy.append((whole.pictures / whole.rates["model"] - one.pictures / one.rates["model"]) / seconds)
        if not samples:
            raise VecaError(f"runs by {decode} take no longer than one image: use more --seconds or more images")
        row = _make_row(f"{_TO_END}, {decode}", samples)
        return dataclasses.replace(
            row,
            start_s=statistics.median(one.seconds for one, _ in pairs),
            model_share=row.images_per_s / model_rate,
            gpu_busy=statistics.median(busy) if self.device.type == "cuda" else None,
        )

    @property
    def _model_stage(self) -> str:
        return f"model, {self.where}" if self.job.by_task else "model"

    def _limit(self, decode: Decode, rates: dict[str, float]) -> tuple[float, str]:
        """The rate that a run can reach by the stages it has, and the slowest of them."""
        stages = [f"decode {decode}, {self.where}", self._model_stage, "write"]
        if decode == "gpu":
            stages = [f"read, {self.where}", "decode and resize gpu", *stages[1:]]
        stages = [stage for stage in stages if stage in rates]
        slowest = min(stages, key=rates.__getitem__)
        if self.job.by_task:  # decoding and the model share the processes
            return min(1 / sum(1 / rates[stage] for stage in stages[:2]), rates["write"]), slowest
        return rates[slowest], slowest

    def find_bottleneck(self, rows: Sequence[StageRow]) -> str:
        """What holds up the fastest decoder's runs, in words."""
        rates = {row.stage: row.images_per_s for row in rows}
        decode = max(self.decoders, key=lambda each: rates[f"{_TO_END}, {each}"])
        limit, slowest = self._limit(decode, rates)
        reached = rates[f"{_TO_END}, {decode}"] / limit
        together = "; decoding and model share the processes" if self.job.by_task else ""
        return (
            f"Bottleneck by {decode}, the fastest end to end: {slowest}, {four_digits(rates[slowest])} images/s"
            f"{together}. Stages allow {four_digits(limit)} images/s, and runs reach {reached:.0%} of that."
        )
