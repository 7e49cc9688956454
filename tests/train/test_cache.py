from __future__ import annotations

import contextlib
import errno
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from torch import Tensor

from veca.data.loader import Batch
from veca.data.sampler import view_of
from veca.teachers import Standardized, Targets, Teacher
from veca.train import cache as module
from veca.train.cache import TargetCache, cache_about, cache_bytes
from veca.train.objective import distillation_losses
from veca.train.recipe import Recipe, RecipeError

WIDTH, PATCH = 48, 16


@pytest.fixture(autouse=True)
def _small_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPARE", 0)


def make(folder: Path, about: object = "teacher", **changes: object) -> TargetCache:
    settings = {"pictures": 100, "width": WIDTH, "patch_size": PATCH}
    return TargetCache(folder, {"teacher": about}, **(settings | changes))


def of(pictures: list[int], view: int = 0, resolution: int = 64) -> Targets:
    """Other numbers for every picture, view and resolution; laid out as a teacher's map is, which is channels first."""
    parts = []
    for picture in pictures:
        made = torch.Generator().manual_seed(picture * 10_000 + view * 1_000 + resolution)
        parts.append(torch.randn(WIDTH, (resolution // PATCH) ** 2 + 1, generator=made))
    both = torch.stack(parts)
    return Targets(both[..., 0], both[..., 1:].mT)


def at(pictures: list[int], view: int = 0, resolution: int = 64) -> tuple[Tensor, Tensor, int]:
    return torch.tensor(pictures), torch.full((len(pictures),), view), resolution


def put(cache: TargetCache, pictures: list[int], view: int = 0, resolution: int = 64) -> None:
    cache.put(*at(pictures, view, resolution), of(pictures, view, resolution))
    cache.flush()


def holds(cache: TargetCache, pictures: list[int], view: int = 0, resolution: int = 64) -> list[int]:
    """The pictures it has; what it has must be right."""
    found = cache.get(*at(pictures, view, resolution))
    rows = [row for row in range(len(pictures)) if row not in found.missing.tolist()]
    for read, right in zip(found.targets, cache.round(of(pictures, view, resolution)), strict=True):
        assert torch.equal(read[rows], right[rows])
    return [pictures[row] for row in rows]


def batch(pictures: list[int], view: int = 0, resolution: int = 64) -> Batch:
    made = torch.Generator().manual_seed(sum(pictures))
    images = torch.randint(0, 256, (len(pictures), 3, resolution, resolution), generator=made, dtype=torch.uint8)
    return Batch(images, None, *at(pictures, view)[:2], [])


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.targets"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gives_back_what_was_put_in_any_order_also_later(tmp_path: Path, dtype: torch.dtype) -> None:
    with make(tmp_path, dtype=dtype) as cache:
        assert holds(cache, [3, 7]) == []
        put(cache, [3, 99, 0])
        put(cache, [3, 50], view=2)
        put(cache, [3, 50], resolution=32)
        assert holds(cache, [0, 1, 3, 99]) == [0, 3, 99]
    with make(tmp_path, dtype=dtype) as cache:
        assert holds(cache, [99, 50, 0, 3]) == [99, 0, 3]
        assert holds(cache, [3, 50, 0], view=2) == [3, 50]
        assert holds(cache, [3, 50, 99], resolution=32) == [3, 50]
        assert holds(cache, [3, 50], view=1) == holds(cache, [3], resolution=48) == []


def test_a_run_learns_the_same_from_stored_and_computed_targets(tmp_path: Path) -> None:
    """Bit for bit: weights after steps whose targets are all computed, all read, or some of each."""
    images = {picture: torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(picture)) for picture in range(8)}
    batches = [batch([0, 1, 2, 3]), batch([4, 5, 6, 7]), batch([5, 0, 3, 6]), batch([1, 7, 2, 4])]
    computed = 0

    def train(cache: TargetCache) -> dict[str, Tensor]:
        model = make_tiny(output_dim=WIDTH).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for one in cache.ahead(batches):
            seen = torch.stack([images[picture] for picture in one.indices.tolist()])

            def teach(some: Tensor) -> Targets:
                nonlocal computed
                computed += len(some)
                return of([next(p for p, image in images.items() if torch.equal(image, x)) for x in some])

            out = model(seen, 8)
            distillation_losses(out.cls, out.patches, *cache.targets(one, seen, teach)).total.backward()
            cache.flush()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    with make(tmp_path / "a") as cache:
        first = train(cache)
    before, computed = computed, 0
    assert before >= 8
    with make(tmp_path / "a") as cache:
        again = train(cache)
        assert (computed, cache.hits, cache.misses) == (0, 16, 0)
    with make(tmp_path / "b") as cache:
        put(cache, [0, 3, 4, 5])
        mixed = train(cache)
        assert 4 <= computed == cache.misses < 16
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert torch.equal(tensor, mixed[name]), name


@pytest.mark.parametrize(
    ("together", "expected"), [(1, [[1, 2], [4, 3]]), (3, [[1, 2], [4, 3, 2]]), (8, [[1, 2], [4, 3, 2, 1]])]
)
def test_computes_only_what_is_missing(tmp_path: Path, together: int, expected: list[list[int]]) -> None:
    """And what it takes to make that a number of pictures the teacher knows."""
    asked: list[list[float]] = []

    def teach(images: Tensor) -> Targets:
        asked.append(images[:, 0, 0, 0].tolist())
        return of([int(number) for number in asked[-1]])

    with make(tmp_path) as cache:
        for pictures in ([1, 2], [2, 4, 1, 3], [4, 3, 2, 1]):
            images = torch.tensor(pictures).float().view(-1, 1, 1, 1).expand(-1, 3, 64, 64)
            found = cache.targets(batch(pictures), images, teach, together)
            cache.flush()
            for read, right in zip(found, cache.round(of(pictures)), strict=True):
                assert torch.equal(read, right)
        assert asked == expected


def test_batches_come_as_they_are_and_are_read_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is in hand, the next is read: its file is not needed any more."""
    read, ended = module._read, queue.SimpleQueue[bool]()

    def noted(*args: Any) -> bool:
        hit = read(*args)
        ended.put(hit)
        return hit

    with make(tmp_path) as cache:
        put(cache, list(range(9)))
        put(cache, [9, 10, 11], resolution=32)
        monkeypatch.setattr(module, "_read", noted)
        given = [batch([0, 1, 2]), batch([9, 10, 11], resolution=32), batch([3, 4, 5]), batch([6, 7, 8])]
        for number, one in enumerate(cache.ahead(given)):
            assert one is given[number]
            for _ in range(6 if number == 0 else 3 if number < 3 else 0):
                assert ended.get(timeout=20)
            if number == 2:
                for path in files(tmp_path):
                    os.truncate(path, 0)
            pictures = one.indices.tolist()
            assert holds(cache, pictures, resolution=one.images.shape[-1]) == pictures
        monkeypatch.undo()
        assert holds(cache, [6]) == []


@pytest.mark.parametrize("damage", ["bit", "torn", "cut", "moved", "noise"])
def test_a_damaged_slot_is_no_hit_and_is_written_again(tmp_path: Path, damage: str) -> None:
    with make(tmp_path) as cache:
        put(cache, [0, 1, 2])
    [path] = files(tmp_path)
    size = cache_bytes(1, 1, [64], PATCH, WIDTH)
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[size + 300] ^= 4
    elif damage == "torn":
        data[size + 1000 : 2 * size] = bytes(size - 1000)
    elif damage == "cut":
        data[size + 1000 :] = b""
    elif damage == "moved":
        data[size : 2 * size] = data[:size]
    else:
        data[size : 2 * size] = os.urandom(size)
    path.write_bytes(data)
    with make(tmp_path) as cache:
        assert holds(cache, [0, 1, 2]) == ([0] if damage == "cut" else [0, 2])
        put(cache, [1])
        assert holds(cache, [0, 1]) == [0, 1]


def test_targets_of_something_else_are_never_read(tmp_path: Path) -> None:
    with make(tmp_path, "one") as cache:
        put(cache, [0, 1])
    for changes in ({"about": "two"}, {"pictures": 101}, {"patch_size": 8}, {"dtype": torch.bfloat16}):
        with make(tmp_path, **({"about": "one"} | changes)) as other:
            assert other.path != cache.path
            assert len(other.get(*at([0, 1])).missing) == 2
    # Not even where somebody has moved the file.
    with make(tmp_path, "two") as other:
        shutil.copy(cache.path / "64.targets", other.path / "64.targets")
        assert holds(other, [0, 1]) == []


class Small(Teacher):
    def __init__(self, mean: float = 0.5, meet: str = "input") -> None:
        super().__init__(8, 16, [mean] * 3, [0.5] * 3, raw=True, meet=meet)  # type: ignore[arg-type]
        self.weight = torch.nn.Parameter(torch.arange(8.0))

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def test_whatever_changes_a_target_changes_its_description(tmp_path: Path) -> None:
    def key(taught: Teacher | Standardized | None = None, fingerprint: str = "a", **values: object) -> str:
        about = cache_about(Recipe.from_dict(values), taught or Standardized(Small()), fingerprint)
        return make(tmp_path, about).key

    def nudged(name: str) -> Standardized:
        teacher = Standardized(Small())
        teacher.state_dict()[name].view(-1)[3] += 1e-3
        return teacher

    others = [
        *(key(nudged(name)) for name in ("teacher.weight", "means", "deviations")),
        key(Small()),
        key(Standardized(Small(mean=0.4))),
        key(Standardized(Small(meet="map"))),
        key(fingerprint="b"),
        key(seed=1),
        key(precision="float32"),
        key(data={"short_side": 1.5}),
        key(data={"augment": "flip"}),
        key(data={"crops": [0.5, 1]}),
        key(data={"resident": 256}),  # what is beyond the square in the middle is lost
        key(data={"resident": 288}),
    ]
    assert len({key(), *others}) == 1 + len(others)
    same = [
        key(batch=3),
        key(schedule={"peak": 1e-3}),
        key(model={"size": "veca_base"}),
        key(teacher={"micro_batch": 1}),
    ]
    assert {*same} == {key()}


def test_more_views_leave_the_first_as_they_were(tmp_path: Path) -> None:
    """So they have the same cache."""
    few, more = (Recipe.from_dict({"data": {"views": views}}) for views in (2, 3))
    assert cache_about(few, Small(), "a") == cache_about(more, Small(), "a")
    assert [view_of(0, 5, epoch % 2) for epoch in (0, 1)] == [view_of(0, 5, epoch % 3) for epoch in (0, 1)]


WRITE = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/train"]
import test_cache as t
t.module.SPARE = 0
cache = t.make(t.Path({folder!r}), pictures=10_000)
for first in range({first}, {end}, 10):
    print(first, flush=True)
    t.put(cache, list(range(first, first + 10)), resolution=256)
cache.close()
"""


@contextlib.contextmanager
def writer(folder: Path, first: int, end: int) -> Iterator[subprocess.Popen[str]]:
    """A process that writes pictures, ten at a time, and says with which it begins."""
    code = WRITE.format(tests=str(Path(__file__).parents[1]), folder=str(folder), first=first, end=end)
    with subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_after_a_kill_everything_that_is_there_is_right(tmp_path: Path) -> None:
    with writer(tmp_path, 0, 10_000) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 50:
            pass
        process.send_signal(signal.SIGKILL)
        begun = max([50, *map(int, process.stdout.read().split())])
    with make(tmp_path, pictures=10_000) as cache:
        assert holds(cache, list(range(begun + 20)), resolution=256)[:begun] == list(range(begun))
        again = list(range(begun, begun + 20))
        put(cache, again, resolution=256)
        assert holds(cache, again, resolution=256) == again


def test_processes_write_to_one_folder_and_read_each_other(tmp_path: Path) -> None:
    """Each with pictures of its own, and some that the other has too."""
    with writer(tmp_path, 50, 150) as process, make(tmp_path, pictures=10_000) as cache:
        assert process.stdout is not None
        process.stdout.readline()
        for first in range(0, 100, 10):
            put(cache, list(range(first, first + 10)), resolution=256)
            holds(cache, list(range(150)), resolution=256)
        assert process.wait(60) == 0
        assert holds(cache, list(range(150)), resolution=256) == list(range(150))


@pytest.mark.parametrize("short", [False, True], ids=["refused", "cut short"])
def test_a_full_disk_ends_the_writing_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    written, said = os.pwritev, list[str]()

    def pwritev(file: int, buffers: list[memoryview], offset: int) -> int:
        if not short:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(file, [b"".join(buffers)[:1000]], offset)

    with make(tmp_path, say=said.append) as cache:
        put(cache, [0, 1])
        monkeypatch.setattr(os, "pwritev", pwritev)
        for pictures in ([1, 2], [3, 4], [5, 6]):
            found = cache.targets(batch(pictures), torch.zeros(2, 3, 64, 64), lambda images: of([8] * len(images)))
            assert found.patches.isfinite().all()
            cache.flush()
        assert len(said) == 1
        assert "No space left on device" in said[0]
        assert holds(cache, [0, 1, 2, 3, 4, 5]) == [0, 1]
    monkeypatch.undo()
    monkeypatch.setattr(module, "SPARE", 0)
    with make(tmp_path) as cache:
        assert holds(cache, [0, 1, 2, 3]) == [0, 1]
        put(cache, [2])
        assert holds(cache, [0, 1, 2, 3]) == [0, 1, 2]


def test_leaves_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "SPARE", shutil.disk_usage(tmp_path).total * 2)
    with make(tmp_path, say=said.append) as cache:
        put(cache, [0])
        put(cache, [1])
        assert holds(cache, [0, 1]) == []
    assert len(said) == 1
    assert "left free for checkpoints" in said[0]


def test_takes_no_more_than_it_may(tmp_path: Path) -> None:
    """The whole folder counts, other teachers' targets too; what is there stays in use."""
    said: list[str] = []
    with make(tmp_path, "other") as cache:
        put(cache, [0, 1])
    most = cache_bytes(5, 1, [64], PATCH, WIDTH)
    with make(tmp_path, most_bytes=most, say=said.append) as cache:
        put(cache, [0, 50])
        assert said == []
        put(cache, [99, 3, 4])
        put(cache, [5])
        assert holds(cache, [0, 50, 99, 3, 4, 5]) == [0, 50, 99]
    assert len(said) == 1
    assert "is to take at most" in said[0]
    assert sum(path.stat().st_blocks * 512 for path in files(tmp_path)) <= most


def test_a_slow_disk_costs_targets_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, written = threading.Event(), os.pwritev

    def pwritev(*args: object) -> int:
        assert go.wait(20)
        return written(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", pwritev)
    with make(tmp_path) as cache:
        for picture in range(10):
            cache.put(*at([picture]), of([picture]))  # none of them may wait for the disk
        assert cache.dropped >= 6
        go.set()
        cache.flush()
        assert len(holds(cache, list(range(10)))) == 10 - cache.dropped


def test_what_the_precision_cannot_hold_is_not_stored(tmp_path: Path) -> None:
    said: list[str] = []
    with make(tmp_path, say=said.append) as cache:
        targets = of([0, 1])
        targets.patches[0, 3, 7] = 1e6
        cache.put(*at([0, 1]), targets)
        cache.flush()
        assert holds(cache, [0, 1]) == [1]
    assert len(said) == 1
    assert "teacher.standardize=true" in said[0]


def test_a_folder_that_vanishes_costs_the_cache_alone(tmp_path: Path) -> None:
    said: list[str] = []
    with make(tmp_path / "cache", say=said.append) as cache:
        shutil.rmtree(tmp_path / "cache")
        put(cache, [0])
        assert holds(cache, [0]) == []
        put(cache, [1])
    assert len(said) == 1
    assert "cannot be written" in said[0]


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="teacher.cache=.*file: cannot be written .*; name another folder"):
        make(tmp_path / "file")


def test_the_size_foretold_is_the_size_on_disk(tmp_path: Path) -> None:
    with make(tmp_path, pictures=5) as cache:
        for view in (0, 1):
            for resolution in (32, 64):
                put(cache, list(range(5)), view, resolution)
    used = sum(path.stat().st_blocks * 512 for path in files(tmp_path))
    assert used == cache_bytes(5, 2, [32, 64], PATCH, WIDTH)


@pytest.mark.gpu
def test_goes_to_a_gpu_and_back(tmp_path: Path) -> None:
    images = torch.zeros(3, 3, 64, 64, device="cuda")
    with make(tmp_path) as cache:
        for pictures in ([1, 2, 3], [3, 4, 1], [4, 1, 2]):

            def teach(some: Tensor, pictures: list[int] = pictures) -> Targets:
                missing = pictures if len(some) == 3 else [4]
                return Targets(*(tensor.to(some.device) for tensor in of(missing)))

            found = cache.targets(batch(pictures), images, teach)
            cache.flush()
            for read, right in zip(found, cache.round(of(pictures)), strict=True):
                assert read.is_cuda
                assert torch.equal(read.cpu(), right)
        assert (cache.hits, cache.misses) == (5, 4)
