"""`PartitionStream`: partitions through one pipeline, whatever is wrong with some of them."""

from __future__ import annotations

import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_images import noise_png

from veca import Veca, VecaConfig
from veca.data import records, remote
from veca.data.remote import SourceError
from veca.data.sources import Item
from veca.data.workers import WorkerPool
from veca.embed import EmbedSettings, embed
from veca.embed import stream as stream_module
from veca.embed.batches import EmbedJob, FeatureModel
from veca.embed.partitions import Partition, PartitionFolder, plan_partitions
from veca.embed.run import describe_features, describe_job
from veca.embed.stream import PartitionStream

SETTINGS = EmbedSettings(cores=8, size=32, batch=2, decode="pillow")


@pytest.fixture
def model() -> Veca:
    torch.manual_seed(0)
    return Veca(VecaConfig(embed_dim=32, depth=2, num_heads=1)).eval()


@pytest.fixture
def images(tmp_path: Path) -> str:
    (tmp_path / "images").mkdir()
    for i in range(10):
        (tmp_path / "images" / f"{i}.png").write_bytes(noise_png(i, 40 + i, 40))
    (tmp_path / "images" / "3.png").write_bytes(b"no picture")
    return str(tmp_path / "images")


class Begun:
    """Tells which partitions are begun; the first waits until all are submitted, so that the rest is certain."""

    def __init__(self, tries: dict[int, int] | None = None) -> None:
        self.numbers, self.tries, self.submitted = list[int](), tries or {}, threading.Event()

    def __call__(self, number: int) -> int:
        assert self.submitted.wait(60)
        self.numbers.append(number)
        if self.tries.get(number, 1) > 4:
            raise ValueError(f"{number} is given up")
        return self.tries.get(number, 1)


def prepare(images: str, out: Path, model: Veca, workers: int, begun: Begun) -> tuple[PartitionStream, list[Partition]]:
    """A stream, and partitions of two images each."""
    settings = SETTINGS.resolve(model)
    about = describe_features(model, "tiny", settings, torch.device("cpu"))
    job = EmbedJob(PartitionFolder(f"{out}/"), settings, model.config, about, torch.device("cpu"), workers)
    job.folder.start(describe_job(about, model, [images], None, 2), overwrite=False)
    plan = [partition.with_stamps() for partition in plan_partitions([images], 2)]
    return PartitionStream(FeatureModel(model, job), begun), plan


@pytest.mark.parametrize("workers", [0, 2])
def test_one_pool_reads_ahead_and_files_are_those_of_the_plain_engine(
    images: str, tmp_path: Path, model: Veca, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools, events = list[Any](), list[str]()

    class Counted(WorkerPool[Any]):
        def __init__(self, *args: Any, **options: Any) -> None:
            pools.append(self)
            super().__init__(*args, **options)

    real = stream_module.PartitionWriter.submit
    monkeypatch.setattr(records, "WorkerPool", Counted)
    monkeypatch.setattr(
        stream_module.PartitionWriter,
        "submit",
        lambda self, *given: (real(self, *given), events.append(f"written {self.partition.number}"))[0],
    )
    begun = Begun()
    stream, plan = prepare(images, tmp_path / "out", model, workers, begun)
    begin = begun.__call__
    stream._on_begin = lambda number: (events.append(f"begun {number}"), begin(number))[1]
    futures = [stream.submit(partition) for partition in plan]
    begun.submitted.set()
    states = [future.result(120) for future in futures]
    assert sum(state.pictures for state in states) == 9
    assert [len(state.failures) for state in states] == [0, 1, 0, 0, 0]
    assert len(pools) == 1
    if workers:
        assert events.index("begun 1") < events.index("written 0")
    monkeypatch.setattr("veca.embed.partitions.PARTITION", 2)
    monkeypatch.setattr("veca.embed.batches.PART_IMAGES", 2)
    embed(images, f"{tmp_path}/plain/", model=model, model_name="tiny", settings=SETTINGS, workers=1, progress=False)
    for path in (tmp_path / "plain").glob("0*.parquet"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_is_completed_while_the_next_partition_is_computed(
    images: str, tmp_path: Path, model: Veca, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, computed = PartitionFolder.publish, threading.Event()
    submit, late = stream_module.PartitionWriter.submit, list[bool]()

    def publish(self: PartitionFolder, path: Path, name: str) -> None:
        late.append(name != "00000000.parquet" or computed.wait(60))
        if name == "00000002.parquet":
            raise OSError("the disk is full")
        published(self, path, name)

    def compute(self: Any, *given: Any) -> Any:
        future = submit(self, *given)
        if self.partition.number == 1:
            computed.set()
        return future

    monkeypatch.setattr(PartitionFolder, "publish", publish)
    monkeypatch.setattr(stream_module.PartitionWriter, "submit", compute)
    begun = Begun()
    stream, plan = prepare(images, tmp_path / "out", model, workers, begun)
    futures = [stream.submit(partition) for partition in plan]
    begun.submitted.set()
    with pytest.raises(OSError, match="the disk is full"):
        futures[2].result(120)
    assert [futures[i].result(120).pictures for i in (0, 1, 3, 4)] == [2, 1, 2, 2]
    assert all(late)
    assert begun.numbers == [0, 1, 2, 3, 4]  # each once
    monkeypatch.setattr(PartitionFolder, "publish", published)
    assert stream.submit(plan[2]).result(120).pictures == 2
    assert {path.name for path in (tmp_path / "out").glob("0*.parquet")} == {f"{i:08d}.parquet" for i in range(5)}


def test_an_error_is_that_of_its_partition(
    images: str, tmp_path: Path, model: Veca, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any) -> bytes:
        raise ConnectionError("no route")

    monkeypatch.setattr(remote, "_RETRY_PAUSES", ())
    monkeypatch.setattr(records, "read_remote", unreachable)
    begun = Begun({3: 5})
    stream, plan = prepare(images, tmp_path / "out", model, 2, begun)
    plan[1] = Partition(1, [Item("a", "memory://bucket/a.png")])
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    plan[2] = next(plan_partitions([str(tmp_path / "empty.tar")], 2))._replace(number=2).with_stamps()
    futures = [stream.submit(partition) for partition in plan]
    begun.submitted.set()
    assert futures[0].result(120).pictures == 2
    with pytest.raises(SourceError, match="memory://bucket/a.png: cannot be read"):
        futures[1].result(120)
    assert futures[2].result(120).pictures == 0
    with pytest.raises(ValueError, match="3 is given up"):
        futures[3].result(120)
    assert futures[4].result(120).pictures == 2
    assert stream.submit(plan[0]).result(120).pictures == 2  # and it goes on


def test_what_was_begun_before_is_computed_alone(images: str, tmp_path: Path, model: Veca) -> None:
    begun = Begun({1: 2})
    stream, plan = prepare(images, tmp_path / "out", model, 2, begun)
    together, real = dict[int, list[int]](), stream._finish

    def finish(request: Any, given: Any) -> None:
        together[request.partition.number] = [each.partition.number for each in stream._under_way]
        real(request, given)

    stream._finish = finish  # type: ignore[method-assign]
    futures = [stream.submit(partition) for partition in plan]
    begun.submitted.set()
    assert [future.result(120).pictures for future in futures] == [2, 1, 2, 2, 2]
    assert begun.numbers == [0, 1, 2, 3, 4]
    assert together[0] == [0]
    assert together[1] == [1]
    assert len(together[2]) > 1
