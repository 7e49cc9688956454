from __future__ import annotations

import functools
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny
from PIL import Image
from tiny_datasets import make_folder

import veca
from veca.data.datasets import ProbeData, base, load_dataset
from veca.data.datasets.batches import CropTransform, UnreadableImageError
from veca.heads import features
from veca.heads.features import Extraction, FrozenBackbone, FrozenVeca, drop_unreadable

VIEW = CropTransform(32)


@pytest.fixture
def data(tmp_path: Path) -> ProbeData:
    return load_dataset(str(make_folder(tmp_path / "mine", 7)))


def backbone() -> FrozenVeca:
    return FrozenVeca(make_tiny(), "tiny", torch.device("cpu"), "float32")


class Counted(FrozenVeca):
    """Counts pictures that are not black, in all processes, and fails after some."""

    fail_after = 10**9

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.count = multiprocessing.Value("i", 0)

    @property
    def seen(self) -> int:
        return self.count.value

    def prepare(self, pixels: torch.Tensor) -> torch.Tensor:
        with self.count:
            self.count.value += int(pixels.flatten(1).any(1).sum())
        if self.seen > self.fail_after:
            raise KeyboardInterrupt
        return super().prepare(pixels)


def counted() -> Counted:
    return Counted(make_tiny(), "tiny", torch.device("cpu"), "float32")


def extraction(model: FrozenBackbone, folder: Path, **options: Any) -> Extraction:
    return Extraction(model, folder, at_once=4, progress=False, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_budgets_come_from_one_pass(data: ProbeData, tmp_path: Path, workers: int) -> None:
    model, split = counted(), data.splits["train"]
    run = extraction(model, tmp_path / "f", workers=workers)
    run.run(split, VIEW, (8, 64), "")
    assert model.seen == 14
    for cores in (8, 64):
        found = run.load(split, VIEW, cores)
        assert not found.bad
        for i in (0, 13):
            image = veca.images.load_image(split.image(i), 32)
            expected = make_tiny()(image[None], cores=cores).cls[0]
            assert torch.allclose(found.values[i], expected, atol=1e-4)
    assert run.run(split, VIEW, (8, 64), "") == 0.0
    assert model.seen == 14
    run.run(split, VIEW, (8, 16), "")  # a new budget alone is computed
    assert model.seen == 28


class Where(FrozenVeca):
    """Its features are the number of the process that computes them."""

    def _run(self, images: torch.Tensor, cores: int | None, dense: bool) -> tuple[torch.Tensor, None]:
        assert torch.get_num_threads() == 1
        return torch.full((len(images), self.width), float(os.getpid())), None


class Broken(FrozenVeca):
    def _run(self, images: torch.Tensor, cores: int | None, dense: bool) -> Any:
        if images.std() > 1e-3:
            raise RuntimeError("two shapes that do not fit")
        return super()._run(images, cores, dense)


def test_on_a_cpu_processes_compute_too(data: ProbeData, tmp_path: Path) -> None:
    split, threads = data.splits["train"], torch.get_num_threads()
    run = extraction(Where(make_tiny(), "tiny", torch.device("cpu"), "float32"), tmp_path / "f", workers=2)
    run.run(split, VIEW, (8, 64), "")
    found = set(run.load(split, VIEW, 64).values[:, 0].tolist())
    assert len(found) == 2
    assert os.getpid() not in found
    assert torch.get_num_threads() == threads
    broken = Broken(make_tiny(), "tiny", torch.device("cpu"), "float32")
    with pytest.raises(RuntimeError, match="two shapes that do not fit"):  # not: a process died
        extraction(broken, tmp_path / "g", workers=2).run(split, VIEW, (8,), "")


def test_features_do_not_depend_on_the_number_of_processes(data: ProbeData, tmp_path: Path) -> None:
    split, found = data.splits["train"], []
    for workers in (0, 1, 2):
        run = extraction(backbone(), tmp_path / str(workers), workers=workers)
        run.run(split, VIEW, (8, 64), "")
        found.append(run.load(split, VIEW, 64).values)
    assert torch.equal(found[1], found[2])
    assert torch.allclose(found[0], found[1], atol=1e-5)  # that one may have several threads


def test_processes_have_what_was_compiled(data: ProbeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # no machine code
    split = data.splits["train"]  # 14: of the last batch of 4, 2 are there
    model = FrozenVeca(make_tiny(depth=2), "tiny", torch.device("cpu"), "float32", compile=True)
    run, alone = (extraction(model, tmp_path / str(workers), workers=workers) for workers in (2, 0))
    run.run(split, VIEW, (8, 64), "")
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["ok"]
    with model.as_forked():
        model.features(torch.zeros(1, 3, 64, 32), 40)
    assert frames["ok"] == before > 0
    alone.run(split, VIEW, (8, 64), "")
    for cores in (8, 64):
        assert torch.allclose(run.load(split, VIEW, cores).values, alone.load(split, VIEW, cores).values, atol=1e-5)


def test_an_interrupted_pass_goes_on(data: ProbeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "PART_ON_CPU", 6)
    split, model = data.splits["train"], counted()
    whole = extraction(backbone(), tmp_path / "whole")
    whole.run(split, VIEW, (8, 64), "")
    model.fail_after = 9
    run = extraction(model, tmp_path / "f")
    with pytest.raises(KeyboardInterrupt):
        run.run(split, VIEW, (8, 64), "")
    assert len(list((tmp_path / "f").iterdir())) == 2  # the first part at two budgets, and nothing half written
    model.count.value, model.fail_after = 0, 10**9
    run.run(split, VIEW, (8, 64), "")
    assert model.seen == 8
    for cores in (8, 64):
        assert torch.equal(run.load(split, VIEW, cores).values, whole.load(split, VIEW, cores).values)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_a_damaged_file_is_made_again(data: ProbeData, tmp_path: Path, damage: str) -> None:
    split, model = data.splits["val"], counted()
    run = extraction(model, tmp_path / "f")
    run.run(split, VIEW, (8,), "")
    before = run.load(split, VIEW, 8).values
    (path,) = (tmp_path / "f").iterdir()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    path.write_bytes({"cut": whole[:-7], "flipped": bytes(flipped), "empty": b"", "text": b"no tensors"}[damage])
    with pytest.raises(ValueError, match="damaged or gone"):
        run.load(split, VIEW, 8)
    model.count.value = 0
    run.run(split, VIEW, (8,), "")
    assert model.seen == 14
    assert torch.equal(run.load(split, VIEW, 8).values, before)


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_pictures_are_named(tmp_path: Path, workers: int) -> None:
    folder = make_folder(tmp_path / "mine", 7)
    whole = (folder / "val/red/3.png").read_bytes()
    (folder / "val/red/3.png").write_bytes(whole[: len(whole) // 2])
    for i in range(4):  # a whole batch
        (folder / f"val/blue/{i}.png").write_bytes(b"nothing")
    data = load_dataset(str(folder))
    split, run = data.splits["val"], extraction(backbone(), tmp_path / "f", workers=workers)
    run.run(split, VIEW, (8, 16), "")
    found, labels = run.load(split, VIEW, 8), torch.from_numpy(split.labels)
    assert sorted(found.bad) == [0, 1, 2, 3, 10]
    assert found.bad[10].startswith("val/red/3.png: ")
    with pytest.raises(UnreadableImageError, match="5 of 14 pictures of mine val.*val/blue/0.png.*--skip-bad"):
        drop_unreadable(found, labels, False, "mine val")
    values, kept = drop_unreadable(found, labels, True, "mine val")
    assert kept.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert torch.equal(values, found.values[[4, 5, 6, 7, 8, 9, 11, 12, 13]])
    assert values.norm(dim=1).min() > 0


def test_a_picture_that_was_mended_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it is among those whose bytes are part of the key."""
    monkeypatch.setattr(base, "HASHED_FILES", 2)
    folder = make_folder(tmp_path / "mine", 7)
    whole = (folder / "val/red/3.png").read_bytes()
    run = extraction(backbone(), tmp_path / "f")
    for text, bad in ((whole[:99], [10]), (whole, [])):
        (folder / "val/red/3.png").write_bytes(text)
        split = load_dataset(str(folder)).splits["val"]
        run.run(split, VIEW, (8,), "")
        assert sorted(run.load(split, VIEW, 8).bad) == bad


def test_keys_differ_where_features_do(data: ProbeData, tmp_path: Path) -> None:
    split, run = data.splits["train"], extraction(backbone(), tmp_path)
    other = make_tiny()
    torch.nn.init.ones_(other.norm.bias)
    keys = [
        run.key(split, VIEW, 8),
        run.key(split, VIEW, 16),
        run.key(split, CropTransform(48), 8),
        run.key(split, CropTransform(32, 0), 8),
        run.key(split, CropTransform(32, 1), 8),
        run.key(split, CropTransform(32, 0, seed=1), 8),
        run.key(data.splits["val"], VIEW, 8),
        extraction(backbone(), tmp_path, kind="cls+mean").key(split, VIEW, 8),
        extraction(FrozenVeca(other, "tiny", torch.device("cpu"), "float32"), tmp_path).key(split, VIEW, 8),
        extraction(FrozenVeca(make_tiny(), "tiny", torch.device("cpu"), "bfloat16"), tmp_path).key(split, VIEW, 8),
    ]
    assert len(set(keys)) == len(keys)
    again = extraction(FrozenVeca(make_tiny(), "another name", torch.device("cpu"), "float32"), tmp_path / "else")
    assert again.key(split, VIEW, 8) == keys[0]


def test_pictures_replaced_under_their_names_are_noticed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "mine", 3)
    before = load_dataset(str(folder))
    first = before.splits["train"].content_hash
    assert load_dataset(str(folder)).splits["train"].content_hash == first
    Image.new("RGB", (60, 40)).save(folder / "train/red/1.png")
    after = load_dataset(str(folder))
    assert after.fingerprint == before.fingerprint
    assert after.splits["train"].content_hash != first


def test_random_parts_do_not_depend_on_batches(data: ProbeData, tmp_path: Path) -> None:
    split, view = data.splits["train"], CropTransform(32, 2, seed=5)
    small, large = extraction(backbone(), tmp_path), Extraction(backbone(), tmp_path, at_once=14, progress=False)
    for run in (small, large):
        run.run(split, view, (8,), "")
    assert torch.allclose(small.load(split, view, 8).values, large.load(split, view, 8).values, atol=1e-4)
    small.run(split, VIEW, (8,), "")
    assert not torch.allclose(small.load(split, view, 8).values, small.load(split, VIEW, 8).values, atol=1e-2)
