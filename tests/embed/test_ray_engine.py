"""`veca embed --engine ray`: the rows of the plain engine, whatever is lost on the way."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sample_images import noise_png
from typer.testing import CliRunner

import veca
from veca import Veca, VecaConfig, VecaError
from veca.cli.main import app
from veca.data import records, remote
from veca.data.sources import Item, list_files
from veca.embed import EmbedError, EmbedSettings, batches, embed
from veca.embed import partitions as partitions_module
from veca.embed.batches import EmbedJob, FeatureModel
from veca.embed.partitions import Partition, PartitionFolder, RunTotals, plan_partitions
from veca.embed.ray_engine import PartitionResult, RayWorker, check_results, connect_ray
from veca.embed.run import describe_features, describe_job
from veca.embed.stream import PartitionStream

SETTINGS = EmbedSettings(cores=8, size=48, batch=2)


@pytest.fixture(scope="module")
def model() -> Veca:
    torch.manual_seed(0)
    return Veca(VecaConfig(embed_dim=32, depth=2, num_heads=1)).eval()


def shard(path: Path, pictures: list[bytes]) -> None:
    with tarfile.open(path, "w") as archive:
        for i, data in enumerate(pictures):
            info = tarfile.TarInfo(f"{i:03}.png")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files, tar shards and a Parquet file, some by address; two pictures are broken."""
    root = tmp_path_factory.mktemp("inputs")
    for i in range(11):
        (root / "files" / f"{i:02}.png").parent.mkdir(exist_ok=True)
        (root / "files" / f"{i:02}.png").write_bytes(noise_png(i, 48 + 16 * (i % 3), 48))
    (root / "files" / "03.jpg").write_bytes(b"no picture")
    data = [noise_png(i, 64, 48) for i in range(9)]
    for i in range(12):
        shard(root / f"{i:02}.tar", data[i:] + data[:i])
    pq.write_table(pa.table({"id": [1, 2, 3], "jpg": [data[0], b"broken", data[2]]}), root / "t.parquet")
    return [str(root / "files"), str(root / "0*.tar"), f"file://{root}/1*.tar", str(root / "t.parquet")]


def table(out: Path | str) -> tuple[pa.Table, Any, str]:
    found = pq.read_table(out)
    return found, found.schema.metadata, Path(f"{out}.failures.csv").read_text()


def at_hand(
    inputs: list[str], out: Path, model: Veca, settings: EmbedSettings, partition: int = 1, name: str = "tiny"
) -> dict[str, Any]:
    """The plan of a run, its description, and a worker in this process."""
    settings = dataclasses.replace(
        settings.resolve(model), decode="cpu" if settings.decode == "auto" else settings.decode
    )
    about = describe_features(model, name, settings, torch.device("cpu"))
    job = EmbedJob(PartitionFolder(f"{out}/"), settings, model.config, about, torch.device("cpu"))
    length = job.partition_length(partition)
    worker = RayWorker(job, [], None)
    worker.stream = PartitionStream(
        FeatureModel(model, job), lambda number: worker._begin(number) if worker.tries else 1
    )
    described = describe_job(about, model, inputs, None, length)
    return {"worker": worker, "plan": list(plan_partitions(inputs, length)), "job": described}


@pytest.mark.parametrize("partition", [1, 8])
def test_partitions_hold_the_rows_of_the_plain_engine(inputs, tmp_path, model, monkeypatch, partition):
    monkeypatch.setattr(batches, "PART_IMAGES", 4)
    monkeypatch.setattr(batches, "PART_BYTES", 12_000)  # so that large pictures fill a part before its time
    settings = EmbedSettings(cores=8, size=48, batch=2, dense=True, fit="keep", save_dtype="float16")
    inputs = [inputs[0], inputs[1].replace("0*", "0[01]"), inputs[2].replace("1*", "11"), inputs[3]]
    embed(inputs, tmp_path / "plain.parquet", model=model, model_name="tiny", settings=settings, progress=False)
    made = at_hand(inputs, tmp_path / "out", model, settings, partition)
    folder, schema = PartitionFolder(tmp_path / "out"), made["worker"].stream.model.schema
    folder.start(made["job"], overwrite=False)
    done = {each.number: made["worker"].embed(each) for each in made["plan"]}
    assert len(done) == 4 + {1: 3, 8: 2}[partition]
    check_results(folder, made["plan"], done)
    totals = RunTotals(partitions=len(done))
    for result in done.values():
        totals.add(*result[:3])
    assert (totals.pictures, totals.failures) == (11 + 27 + 2, 2)
    folder.complete(totals, schema)
    assert table(tmp_path / "out") == table(tmp_path / "plain.parquet")


def test_one_engine_continues_what_the_other_began(inputs, tmp_path, model, monkeypatch):
    monkeypatch.setattr(batches, "PART_IMAGES", 4)
    monkeypatch.setattr(partitions_module, "PARTITION", 4)
    how = {"model": model, "model_name": "tiny", "settings": SETTINGS, "progress": False}
    embed(inputs, tmp_path / "plain", **how)
    made = at_hand(inputs, tmp_path / "out", model, SETTINGS, partition=4)
    PartitionFolder(tmp_path / "out").start(made["job"], overwrite=False)
    for each in made["plan"][3:5]:
        made["worker"].embed(each)
    assert embed(inputs, tmp_path / "out", **how).resumed == 18
    for path in (tmp_path / "plain").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_pictures_of_two_shards_never_share_a_batch(inputs, tmp_path, model, monkeypatch):
    seen = []
    real = batches.normalize
    monkeypatch.setattr(batches, "normalize", lambda pixels: (seen.append(len(pixels)), real(pixels))[1])
    options = {"settings": EmbedSettings(cores=8, size=48, batch=5), "workers": 0, "progress": False}
    embed(inputs[1], tmp_path / "plain.parquet", model=model, model_name="tiny", **options)
    assert seen == [5, 4] * 10


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine, one CPU each."""
    ray = pytest.importorskip("ray", reason="RAY IS NOT INSTALLED: --engine ray was not tested. pip install '.[scale]'")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        signal.signal(signal.SIGTERM, before)  # Ray has one of its own


def workers_of(cluster: Any) -> list[int]:
    """The processes that hold a model, of this cluster."""

    def command(process: int) -> str:
        try:
            return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            return ""

    def parent(process: int) -> int:
        try:
            return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return 0

    port = cluster.address.rpartition(":")[2]
    models = [int(name) for name in os.listdir("/proc") if name.isdigit() and "MapWorker" in command(int(name))]
    return [process for process in models if f":{port}" in command(parent(process))]


class Killer(threading.Thread):
    """Kills one worker as soon as `when()`, and counts the partitions that `out` holds then."""

    def __init__(self, cluster: Any, out: Path, when: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self.cluster, self.out, self.when, self.killed, self.there = cluster, out, when, 0, 0

    def run(self) -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end and not self.killed:
            time.sleep(0.002)
            if self.when() and (workers := workers_of(self.cluster)):
                self.killed = workers[-1]
                os.kill(self.killed, signal.SIGKILL)
                self.there = len(list(self.out.glob("*.parquet")))


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_interruption_and_a_killed_worker_change_no_row(cluster, inputs, tmp_path, model, monkeypatch, workers):
    monkeypatch.setattr(batches, "PART_IMAGES", 4)
    plain, out = tmp_path / "plain.parquet", tmp_path / "out"
    weights = tmp_path / "weights"
    veca.save(model, weights)
    how = {"model": veca.load(weights), "model_name": str(weights), "settings": SETTINGS, "progress": False}
    embed(inputs, plain, **how)

    # What a run leaves that is interrupted after five partitions.
    made = at_hand(inputs, out, how["model"], SETTINGS, partition=4, name=str(weights))
    PartitionFolder(out).start(made["job"], overwrite=False)
    for each in made["plan"][:5]:
        made["worker"].embed(each)
    whole = sorted(out.glob("0*.parquet"))
    whole[1].write_bytes(whole[1].read_bytes()[:-30])  # as a file system without atomic writes may leave it
    times = {path: path.stat().st_mtime_ns for path in whole}

    # With one process, the worker dies between writing the damaged partition anew and reporting it.
    def time_has_come() -> bool:
        if workers == "1":
            return whole[1].stat().st_mtime_ns != times[whole[1]]
        return len(list(out.glob("*.parquet"))) > len(whole)

    killer = Killer(cluster, out, time_has_come)
    killer.start()
    options = ["--model", str(weights), "--cores", "8", "--size", "48", "--batch-size", "2", "--partition", "4"]
    said = CliRunner().invoke(
        app, ["embed", *inputs, "--out", str(out), "--engine", "ray", *options, "--workers", workers]
    )
    assert said.exit_code == 3, said.output
    assert killer.killed
    assert killer.there < 16, "the worker was killed too late to matter"
    assert "16/16 partitions" in said.stderr
    assert "121 images, 25 of them in an earlier run" in said.stdout
    assert table(out) == table(plain)
    assert [path for path in whole if path.stat().st_mtime_ns != times[path]] == [whole[1]]
    assert sorted(name for name in os.listdir(out) if not name.endswith(".parquet")) == ["_done.json", "_job.json"]
    with pytest.raises(EmbedError, match="exists; choose another name.*--overwrite"):
        embed(inputs, out, engine="ray", partition=4, **how)


def test_partitions_that_cannot_be_had_are_given_up(cluster, inputs, tmp_path, model, monkeypatch):
    import ray

    worker = at_hand(inputs, tmp_path / "out", model, SETTINGS)["worker"]
    worker.tries = SimpleNamespace(begin=SimpleNamespace(remote=lambda number: ray.put(5)))
    found = worker({"number": 3, "files": "[]"})
    assert found["given_up"]
    assert "its workers died 4 times" in found["error"]
    # Before that, what goes wrong is told, not raised.
    worker.tries = SimpleNamespace(begin=SimpleNamespace(remote=lambda number: ray.put(4)))

    def tried(address: str) -> dict[str, Any]:
        return worker({"number": 3, "files": json.dumps([list(Item("a", address))])})

    def unreachable(*_: Any) -> bytes:
        raise ConnectionError("no route")

    monkeypatch.setattr(remote, "_RETRY_PAUSES", ())
    monkeypatch.setattr(records, "read_remote", unreachable)
    found = tried("memory://bucket/a.png")
    assert found["given_up"], found
    assert "memory://bucket/a.png: cannot be read (ConnectionError: no route)" in found["error"]
    found = tried("/nowhere/at/all/a.png")
    assert not found["given_up"]
    assert "/nowhere/at/all is not there; images must be on a disk that all machines share" in found["error"]


def test_features_that_are_not_finite_stop_a_worker_or_are_failures(cluster, inputs, tmp_path, model):
    import ray

    broken = Veca(VecaConfig(embed_dim=32, depth=2, num_heads=1)).eval()
    broken.norm.weight.data[0] = float("inf")
    made = at_hand(inputs, tmp_path / "out", broken, SETTINGS)
    worker, first, folder = made["worker"], made["plan"][0], PartitionFolder(tmp_path / "out")
    folder.start(made["job"], overwrite=False)
    worker.tries = SimpleNamespace(begin=SimpleNamespace(remote=lambda number: ray.put(1)))
    row = {"number": 0, "files": json.dumps([list(file) for file in first.files])}
    found = worker(row)
    assert not found["given_up"]
    assert "00.png: its features are not finite, computed in float32" in found["error"]
    assert "--skip-nonfinite" in found["error"]
    assert os.listdir(tmp_path / "out") == ["_job.json"]
    worker.job = dataclasses.replace(worker.job, skip_nonfinite=True)
    worker.stream = PartitionStream(FeatureModel(broken, worker.job))
    assert worker(row)["failed"] == 12
    state = folder.read_state("00000000.parquet")
    assert (state.pictures, len(state.failures)) == (0, 12)


def test_what_is_missing_is_named(inputs, tmp_path, model):
    out = tmp_path / "out"
    made = at_hand(inputs, out, model, SETTINGS)
    folder = PartitionFolder(out)
    folder.start(made["job"], overwrite=False)
    done = {each.number: made["worker"].embed(each) for each in made["plan"]}
    lost = {number: each for number, each in done.items() if number != 2}
    with pytest.raises(
        EmbedError, match=r"1 of 14 .* missing, .*00000002\.parquet \(.*01\.tar …\): Ray lost.* kept in"
    ):
        check_results(folder, made["plan"], lost)
    (out / "00000005.parquet").unlink()
    check_results(folder, made["plan"], done)
    with pytest.raises(EmbedError, match=r"00000005\.parquet is missing from .*out: the same call computes it again"):
        folder.complete(RunTotals(partitions=14), made["worker"].stream.model.schema)
    done[5] = PartitionResult(5, error="not to be reached", given_up=True)
    with pytest.raises(EmbedError, match=r"not to be reached. 112 finished images are kept"):
        check_results(folder, made["plan"], done)
    assert not (out / "_done.json").exists()


def test_a_worker_looks_around_first(inputs, tmp_path, model):
    worker = at_hand(inputs, tmp_path / "nowhere", model, SETTINGS)["worker"]
    worker.stream = None
    partition = Partition(0, list(list_files(inputs[0])[1]))
    with pytest.raises(EmbedError, match="nowhere is not there; it must be on a disk that all machines share"):
        worker.embed(partition)
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / "_job.json").write_text("{}")
    worker.job.about["torch"] = "1.0"
    with pytest.raises(EmbedError, match=f"torch {torch.__version__} where .* torch 1.0".replace("+", r"\+")):
        worker.embed(partition)


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_folder_belongs_to_one_job(inputs, tmp_path, model, prefix):
    made = at_hand(inputs, tmp_path / "out", model, SETTINGS)
    folder = PartitionFolder(f"{prefix}{tmp_path}/out")
    folder.start({"size": 32}, False)
    folder.start({"size": 48}, False)  # a run that finished nothing does not stand in the way
    worker, first = made["worker"], made["plan"][0].with_stamps()
    assert worker.embed(first)[:4] == (0, 11, 1, False)
    assert worker.embed(first)[:4] == (0, 11, 1, True)
    folder.start({"size": 48}, False)
    assert folder.numbers() == {0}
    with pytest.raises(EmbedError, match=r"size was 48, now 64.*--overwrite"):
        folder.start({"size": 64}, False)
    with pytest.raises(EmbedError, match=r"inputs have changed.*--overwrite"):
        worker.embed(Partition(0, first.files[1:]))
    for stamp, ignored in (("7 0", True), (f"{os.path.getsize(first.files[0].path)} 0", False)):
        changed = Partition(0, [first.files[0]._replace(stamp=stamp), *first.files[1:]])
        worker.job = dataclasses.replace(worker.job, ignore_dates=ignored)
        with pytest.raises(EmbedError, match=r"inputs have changed: the images of 00000000\.parquet"):
            worker.embed(changed)
    worker.job = dataclasses.replace(worker.job, ignore_dates=True)
    assert worker.embed(changed)[:4] == (0, 11, 1, True)
    with pytest.raises(EmbedError, match="holds partitions of other images"):
        folder.check_partitions(0)
    (tmp_path / "out" / ".00000001.parquet.abcd.part").write_bytes(b"half a file")
    totals = RunTotals(partitions=1)
    totals.add(0, 11, 1)
    folder.complete(totals, worker.stream.model.schema)
    assert sorted(os.listdir(tmp_path / "out")) == ["00000000.parquet", "_done.json", "_job.json"]
    assert "03.jpg" in (tmp_path / "out.failures.csv").read_text()
    with pytest.raises(EmbedError, match="exists; choose another name"):
        folder.start({"size": 48}, False)
    folder.start({"size": 64}, True)
    assert os.listdir(tmp_path / "out") == ["_job.json"]


def test_a_folder_is_of_one_run_at_a_time(tmp_path):
    folder = PartitionFolder(tmp_path / "out")
    with folder.locked():
        folder.start({"size": 64}, False)
        with pytest.raises(VecaError, match="another run is at work in .*out; wait for it"), folder.locked():
            pass
    assert os.listdir(tmp_path / "out") == ["_job.json"]
    with PartitionFolder("memory://somewhere/out").locked():
        pass


def test_a_folder_of_others_and_a_file_are_left_alone(tmp_path):
    (tmp_path / "mine").write_text("keep")
    for overwrite in (False, True):
        with pytest.raises(EmbedError, match=r"holds files that no run of this left, as mine"):
            PartitionFolder(tmp_path).start({}, overwrite)
        with pytest.raises(EmbedError, match="is a file; choose another name for the folder"):
            PartitionFolder(tmp_path / "mine").start({}, overwrite)
    assert os.listdir(tmp_path) == ["mine"]


def go(inputs: Any, out: Any, model: Veca, **options: Any) -> None:
    how = {"model": model, "model_name": "tiny", "settings": SETTINGS, "progress": False}
    embed(inputs, out, engine="ray", **how, **options)


def test_ray_is_asked_for_by_its_extra(inputs, tmp_path, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EmbedError, match=r"needs ray, which is not installed: pip install 'veca\[scale\]'"):
        go(inputs, tmp_path / "out", model)
    assert os.listdir(tmp_path) == []


def test_addresses_that_cannot_work_are_refused(inputs, tmp_path, model, monkeypatch):
    ray = pytest.importorskip("ray")

    def unreachable(**options):
        raise ConnectionError("no cluster\nthere")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", unreachable)
    with pytest.raises(EmbedError, match="does not run through a Ray Client.*ray job submit"):
        go(inputs, tmp_path / "out", model, address="ray://head:10001")
    with pytest.raises(EmbedError, match=r"--address head:1 \(HOST:PORT.*\): no cluster\. `ray start --head`"):
        go(inputs, tmp_path / "out", model, address="head:1")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wish", [None, "1"])
def test_ray_reports_to_nobody_unless_told_to(monkeypatch, wish):
    ray = pytest.importorskip("ray")
    asked = []
    for name in ("is_initialized", "shutdown"):
        monkeypatch.setattr(ray, name, lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: asked.append(os.environ["RAY_USAGE_STATS_ENABLED"]))
    if wish is None:
        monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    else:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", wish)
    with connect_ray(None):
        pass
    assert asked == [wish or "0"]
    assert os.environ.get("RAY_USAGE_STATS_ENABLED") == wish, "and the caller's environment is as it was"


def test_what_the_cluster_does_not_have_is_refused(cluster, inputs, tmp_path, model):
    with pytest.raises(EmbedError, match="device 'cuda': the cluster has 2 CPUs and 0 GPUs"):
        go(inputs, tmp_path / "out", model, device="cuda")
    with pytest.raises(EmbedError, match="workers=3: the cluster has 2 CPUs"):
        go(inputs, tmp_path / "out", model, workers=3)
    with pytest.raises(EmbedError, match="partition=0"):
        go(inputs, tmp_path / "out", model, partition=0)


def test_options_of_ray_are_not_ignored_elsewhere(inputs, tmp_path):
    said = CliRunner().invoke(app, ["embed", *inputs, "--out", str(tmp_path / "f.parquet"), "--address", "auto"])
    assert "are for --engine ray" in str(said.exception)
    with pytest.raises(EmbedError, match="s3://bucket/f.parquet: an address.*--engine ray"):
        embed(
            inputs, "s3://bucket/f.parquet", model=Veca(VecaConfig(embed_dim=32, depth=2, num_heads=1)), model_name=""
        )
