"""ImageIndex for training: found anywhere, seen the same way in every run, and no accident stops it without a word."""

from __future__ import annotations

import functools
import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from sample_images import smooth_image
from torch.utils.data import DataLoader
from torchvision.transforms.v2 import functional as tv

from veca.bench.machine import bench_data
from veca.data import index as index_module
from veca.data import loader
from veca.data.index import DataError, ImageIndex
from veca.data.loader import Batch, ImageLoader, load_crop, to_model_input, train_loader
from veca.data.loader import validation_loader as validation
from veca.data.sampler import AugmentMode, TrainSampler, TransformParams, epoch_order, sample_transforms
from veca.images import normalize, open_image

grainy_image = functools.partial(smooth_image, grain=8)


def encoded(image: Image.Image, kind: str = "png", **options: object) -> bytes:
    image.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


def shard(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            (info := tarfile.TarInfo(name)).size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def find(*sources: object, **options: object) -> ImageIndex:
    return ImageIndex.build([str(source) for source in sources], **{"progress": False, **options})


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten pictures in a folder."""
    folder = tmp_path_factory.mktemp("photos")
    for i in range(10):
        (folder / f"{i}.jpg").write_bytes(encoded(grainy_image(i, 60 + i, 44), "jpeg", quality=95))
    return folder


@pytest.fixture
def members() -> dict[str, bytes]:
    return {f"{i:03}.png": encoded(grainy_image(i)) for i in range(5)}


def load(
    found: ImageIndex, *, workers: int, max_pixels: int = 10**8, where: Any = "cpu", **options: Any
) -> ImageLoader:
    sampler = TrainSampler(len(found), **({"resolution_of": lambda _: 32, "batch_size": 4} | options))
    return train_loader(found, sampler, workers, max_pixels, where)


def sample_transform(seed: int, image: int, variant: int, augment: AugmentMode = "trivial") -> TransformParams:
    return sample_transforms(seed, [image], [variant], augment).item()


def batches(found: ImageIndex, count: int, **options: object) -> list[Batch]:
    with load(found, **({"workers": 0, "seed": 3} | options)) as stream:
        return [batch for batch, _ in zip(stream, range(count), strict=False)]


def same(a: Batch, b: Batch) -> bool:
    pairs = zip((a.images, a.indices, a.variants), (b.images, b.indices, b.variants), strict=True)
    return all(torch.equal(x, y) for x, y in pairs) and a.skipped == b.skipped


def joined(parts: list[Batch]) -> Batch:
    images, indices, variants = (
        torch.cat([getattr(p, key) for p in parts]) for key in ("images", "indices", "variants")
    )
    return Batch(images, None, indices, variants, [problem for part in parts for problem in part.skipped])


# The stream.


def test_every_epoch_is_another_order_of_all() -> None:
    first, second = epoch_order(1000, 0, 0), epoch_order(1000, 0, 1)
    assert sorted(first) == sorted(second) == list(range(1000))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, epoch_order(1000, 1, 0))
    assert epoch_order(8, 0, 0).tolist() == [3, 2, 6, 1, 4, 7, 0, 5]  # and stays so in versions to come


def test_ranks_share_out_the_stream_without_gaps() -> None:
    samplers = [TrainSampler(60, 5, lambda _: 32, rank=rank, world_size=4) for rank in range(4)]
    images = [image for forward in range(3) for sampler in samplers for image in sampler.plan(forward).images]
    assert images == epoch_order(60, 0, 0).tolist()


def test_an_epoch_shows_each_picture_once(photos: Path) -> None:
    shown = joined(batches(find(photos), 5))
    assert sorted(shown.indices[:10].tolist()) == sorted(shown.indices[10:].tolist()) == list(range(10))
    assert shown.variants.tolist() == [0] * 10 + [1] * 10
    assert len({image.numpy().tobytes() for image in shown.images}) == 20


def test_the_number_of_workers_changes_no_batch(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_SLOT_BYTES", 3 * 70**2)  # three pictures, one, and less than one
    options = {"resolution_of": lambda forward: (32, 64, 80)[forward % 3]}
    alone, helped = (batches(find(photos), 6, workers=workers, **options) for workers in (0, 2))
    assert [batch.images.shape[-1] for batch in alone] == [32, 64, 80] * 2
    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))


def test_many_small_tasks_do_not_overtake_each_other(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_TASK_IMAGES", 1)
    alone, helped = (batches(find(photos), 40, workers=workers, batch_size=6) for workers in (0, 2))
    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))


def test_a_run_continues_where_it_was(photos: Path) -> None:
    whole = batches(find(photos), 7)
    for start in (1, 3, 6):  # 2.5 forward passes are an epoch
        rest = batches(find(photos), 7 - start, start=start)
        assert all(same(a, b) for a, b in zip(whole[start:], rest, strict=True))


def test_processes_together_see_what_one_sees(photos: Path) -> None:
    one = batches(find(photos), 4, batch_size=6)
    two = [batches(find(photos), 4, batch_size=3, rank=rank, world_size=2) for rank in (0, 1)]
    three = [batches(find(photos), 4, batch_size=2, rank=rank, world_size=3) for rank in (0, 1, 2)]
    for ranks in (two, three):
        assert all(same(a, joined(list(parts))) for a, *parts in zip(one, *ranks, strict=True))


def test_views_come_back_when_they_are_few(photos: Path) -> None:
    shown = joined(batches(find(photos), 15, num_variants=2))
    assert shown.variants.tolist() == ([0] * 10 + [1] * 10) * 3
    by_view: dict[tuple[int, int], set[bytes]] = {}
    for image, index, view in zip(shown.images, shown.indices.tolist(), shown.variants.tolist(), strict=True):
        by_view.setdefault((index, view), set()).add(image.numpy().tobytes())
    assert len(by_view) == 20
    assert all(len(pixels) == 1 for pixels in by_view.values())


def test_the_seed_changes_order_and_views(photos: Path) -> None:
    a, b = (batches(find(photos), 1, batch_size=10, seed=seed)[0] for seed in (0, 1))
    assert a.indices.tolist() != b.indices.tolist()
    assert sample_transform(0, 5, 0) != sample_transform(1, 5, 0)


def test_random_views_cover_all_there_is() -> None:
    views = [sample_transform(0, picture, 0) for picture in range(4000)]
    assert np.bincount([view.op for view in views], minlength=14).min() > 200
    assert 0.45 < np.mean([view.flip for view in views]) < 0.55
    for shares in ([view.x for view in views], [view.y for view in views]):
        assert np.histogram(shares, 10, (0, 1))[0].min() > 300
    turned = [view.strength for view in views if view.op == 5]
    assert min(turned) < -120
    assert max(turned) > 120
    assert all((view.op, view.strength) == (0, 0) for view in (sample_transform(0, i, 0, "flip") for i in range(50)))


# What a view is.


def reference(image: Image.Image, view: TransformParams, resolution: int) -> torch.Tensor:
    """Resize, then crop, by torchvision."""
    resized = tv.resize(image, [round(1.125 * resolution)], tv.InterpolationMode.BICUBIC, antialias=True)
    if view.x == 0.5:
        crop = tv.center_crop(resized, [resolution, resolution])
    else:
        left, top = (int(share * (side - resolution + 1)) for share, side in zip(view[:2], resized.size, strict=True))
        crop = tv.crop(resized, top, left, resolution, resolution)
    return tv.pil_to_tensor(tv.horizontal_flip(crop) if view.flip else crop)


@pytest.mark.parametrize("size", [(640, 480), (300, 200), (40, 55), (333, 1000), (64, 64), (1000, 20), (3, 9)])
@pytest.mark.parametrize("augment", ["flip", "none"])
def test_a_view_is_resized_and_cropped(size: tuple[int, int], augment: AugmentMode) -> None:
    image = grainy_image(1, *size)
    for picture in range(4):
        view = sample_transform(0, picture, 0, augment)
        found = tv.pil_to_tensor(load_crop(encoded(image), view, 64, 1.125, 10**8))
        assert (found.int() - reference(image, view, 64).int()).abs().max() <= 2


def test_crops_of_many_sizes(photos: Path) -> None:
    pictures = find(photos)
    (batch,) = batches(pictures, 1, batch_size=8, augment="flip", resolution_of=lambda _: 32, crops=(0.3, 0.9))
    views = [
        sample_transform(3, *which, "flip")
        for which in zip(batch.indices.tolist(), batch.variants.tolist(), strict=True)
    ]
    shares = [0.3 + 0.6 * view.scale for view in views]
    assert max(shares) - min(shares) > 0.3
    for number, view, share, found in zip(batch.indices.tolist(), views, shares, batch.images, strict=True):
        expected = tv.pil_to_tensor(load_crop(pictures.read(number), view, 32, 1 / share, 10**8))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [(1333, 1001), (1600, 1200), (601, 2000)])
@pytest.mark.parametrize("turn", [1, 6])
def test_large_jpegs_are_decoded_smaller_and_look_the_same(size: tuple[int, int], turn: int) -> None:
    (exif := Image.Exif())[0x0112] = turn
    fine = grainy_image(1, 97, 75).resize(size, Image.Resampling.BICUBIC)
    image = encoded(fine, "jpeg", quality=92, exif=exif)
    assert (min(open_image(image, at_least=288).size) < min(size)) == (turn == 1)
    for picture in range(3):
        view = sample_transform(0, picture, 0, "flip")
        found = tv.pil_to_tensor(load_crop(image, view, 128, 1.125, 10**8))
        apart = (found.int() - reference(open_image(image), view, 128).int()).abs().float()
        assert apart.mean() < 0.3
        assert apart.quantile(0.999) <= 2


def test_odd_shapes_and_modes_become_crops(tmp_path: Path) -> None:
    rotated = Image.Exif()
    rotated[0x0112] = 6
    grainy_image(0, 1, 1).save(tmp_path / "a.png")
    grainy_image(0, 5000, 20).save(tmp_path / "b.png")
    grainy_image(0, 20, 5000).save(tmp_path / "c.jpg")
    grainy_image(0).convert("L").save(tmp_path / "d.png")
    grainy_image(0).convert("RGBA").save(tmp_path / "e.png")
    grainy_image(0, 90, 40).save(tmp_path / "f.jpg", exif=rotated, quality=95)
    (shown,) = batches(find(tmp_path), 1, batch_size=6, augment="none", resolution_of=lambda _: 32)
    assert (shown.images.shape, shown.skipped) == ((6, 3, 32, 32), [])
    turned = shown.images[shown.indices.tolist().index(5)]
    upright = open_image(tmp_path / "f.jpg")
    assert upright.size == (40, 90)
    assert (turned.int() - reference(upright, sample_transform(0, 0, 0, "none"), 32).int()).abs().max() <= 1


def test_where_augmentation_happens_changes_no_pixel(photos: Path) -> None:
    here, there = (batches(find(photos), 10, where=where) for where in ("cpu", "gpu"))
    assert all(batch.augmentation is None for batch in here)
    assert all(batch.augmentation is not None for batch in there)
    for a, b in zip(here, there, strict=True):
        assert torch.equal(to_model_input(a, "cpu"), to_model_input(b, "cpu"))
        assert torch.equal(to_model_input(a, "cpu"), normalize(a.images))
    assert not all(torch.equal(a.images, b.images) for a, b in zip(here, there, strict=True))


@pytest.mark.gpu
def test_the_device_is_not_waited_for(photos: Path) -> None:
    batch, again = batches(find(photos), 2, where="gpu", workers=2, batch_size=30)
    assert batch.images.is_pinned()
    wanted = to_model_input(again, "cpu")
    to_model_input(batch, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = to_model_input(again, "cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.cpu(), wanted, atol=1e-6, rtol=0)


# Validation.


def test_validation_shows_every_centre_once(photos: Path) -> None:
    found = find(photos)
    for world, batch in ((1, 4), (3, 2), (4, 3), (2, 16)):
        shares = [list(validation(found, 32, batch, rank, world, workers=0)) for rank in range(world)]
        every = sorted(int(i) for share in shares for part in share for i in part.indices)
        assert every == list(range(10))
    assert shares[1] == []  # nothing was left for it
    (whole,) = shares[0]
    centre = sample_transform(0, 0, 0, "none")
    for i, image in enumerate(whole.images):
        wanted = reference(open_image(photos / f"{i}.jpg"), centre, 32)
        assert (image.int() - wanted.int()).abs().max() <= 1


def test_validation_counts_what_it_skips(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, folder := tmp_path / "copy")
    (folder / "3.jpg").write_bytes(b"nothing")
    (folder / "4.jpg").write_bytes((folder / "4.jpg").read_bytes()[:300])
    for workers in (0, 2):
        parts = list(validation(find(folder), 32, 4, workers=workers))
        assert [len(part.indices) for part in parts] == [3, 3, 2]
        assert [len(part.images) for part in parts] == [3, 3, 2]
        whole = joined(parts)
        assert whole.indices.tolist() == [0, 1, 2, 5, 6, 7, 8, 9]
        assert [name for name, _ in whole.skipped] == [str(folder / "3.jpg"), str(folder / "4.jpg")]
        clean = joined(list(validation(find(photos), 32, 4, workers=0)))
        assert torch.equal(whole.images, clean.images[whole.indices])


# Accidents.


def test_a_corrupt_picture_is_replaced_and_named(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, folder := tmp_path / "copy")
    (folder / "3.jpg").write_bytes(b"nothing")
    found = find(folder)
    shown = joined(batches(found, 5))
    assert len(shown.indices) == 20
    assert 3 not in shown.indices.tolist()
    assert len(shown.skipped) >= 2  # once in each epoch, and whenever it was drawn to replace itself
    assert {name for name, _ in shown.skipped} == {str(folder / "3.jpg")}
    assert shown.skipped[0][1].startswith("not one of JPEG")
    assert same(shown, joined(batches(found, 5, workers=2)))
    assert same(shown, joined([b for f in range(5) for b in batches(found, 1, start=f)]))


def test_nothing_but_corrupt_pictures_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"nothing")
    for workers in (0, 1):
        with pytest.raises(DataError, match=r"100 pictures in a row cannot be used. The last is .*a.jpg: not one of"):
            batches(find(tmp_path), 1, workers=workers)


def test_too_large_a_picture_is_skipped(photos: Path, tmp_path: Path) -> None:
    shutil.copytree(photos, folder := tmp_path / "copy")
    grainy_image(0, 400, 300).save(folder / "big.png")
    shown = joined(batches(find(folder), 3, max_pixels=50_000))
    assert {(name, "300×400" in reason) for name, reason in shown.skipped} == {(str(folder / "big.png"), True)}


def test_a_killed_worker_is_an_error(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data.dataloader._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", False)
    list(DataLoader([1, 2], num_workers=1, multiprocessing_context="fork"))  # leaves a handler behind
    assert callable(signal.getsignal(signal.SIGCHLD))
    with load(find(photos), workers=2) as stream:
        steps = iter(stream)
        next(steps)
        os.kill(stream._pool.processes[0].pid, signal.SIGKILL)
        with pytest.raises(DataError, match="a process that reads pictures has died"):
            for _ in range(100):
                next(steps)


def test_workers_end_with_the_block(photos: Path) -> None:
    with load(find(photos), workers=2) as stream:
        next(iter(stream))
        kept = stream.__iter__()
        next(kept)
        processes = list(stream._pool.processes)
        assert all(process.is_alive() for process in processes)
    assert not any(process.is_alive() for process in processes)


def test_an_interrupt_ends_everything(photos: Path) -> None:
    script = textwrap.dedent("""
        import os, signal, sys, threading
        from veca.data.index import ImageIndex
        from veca.data.loader import train_loader
        from veca.data.sampler import TrainSampler
        found = ImageIndex.build(sys.argv[1:], progress=False)
        try:
            with train_loader(found, TrainSampler(len(found), 4, lambda _: 32), workers=2) as stream:
                for step, _ in enumerate(stream):
                    if step == 3:
                        workers = [process.pid for process in stream._pool.processes]
                        os.killpg(0, signal.SIGINT)
        except KeyboardInterrupt:
            alive = [pid for pid in workers if os.path.exists(f"/proc/{pid}")]
            print("interrupted", alive)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(photos)], capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert (done.stdout.strip(), done.stderr) == ("interrupted []", "")


def test_an_unfinished_loop_does_not_keep_the_interpreter(photos: Path) -> None:
    """Workers do not heed the SIGTERM by which it would end them."""
    script = textwrap.dedent("""
        import sys
        from veca.data.datasets.batches import decode_batches
        from veca.data.index import ImageIndex
        from veca.data.loader import train_loader
        from veca.data.sampler import TrainSampler
        found = ImageIndex.build(sys.argv[1:], progress=False)
        steps = iter(train_loader(found, TrainSampler(len(found), 4, lambda _: 32), workers=2))
        block = decode_batches(list(range(100)), ([i] for i in range(100)), workers=2)
        print(len(next(steps).images), next(block.__enter__()))
    """)
    command = [sys.executable, "-c", script, str(photos)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4 [0]\n", "")


# Finding.


def test_folders_globs_and_shards_in_order(photos: Path, tmp_path: Path, members: dict[str, bytes]) -> None:
    (tmp_path / "deep" / ".hidden").mkdir(parents=True)
    for path in ("deep/b.png", "deep/a.png", "deep/.hidden/no.png", "deep/.no.png"):
        grainy_image(1).save(tmp_path / path)
    (tmp_path / "deep" / "notes.txt").write_text("no picture")
    tar = shard(tmp_path / "s.tar", {**members, "000.seg.png": b"label", "000.cls": b"1"})
    found = find(tmp_path / "deep", tar, f"{photos}/[0-2].jpg", photos / "9.jpg")
    names = ["deep/a.png", "deep/b.png", *(f"s.tar/{name}" for name in members)]
    wanted = [f"{tmp_path}/{name}" for name in names] + [f"{photos}/{i}.jpg" for i in (0, 1, 2, 9)]
    assert [found.name(i) for i in range(len(found))] == wanted
    assert [found.read(i) for i in range(2, 7)] == list(members.values())
    assert found.read(0) == str(tmp_path / "deep" / "a.png")
    assert pickle.loads(pickle.dumps(found)).name(3) == found.name(3)
    with pytest.raises(IndexError):
        found.name(len(found))


def test_names_that_are_not_text(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.png"
    with open(path, "wb") as file:
        file.write(encoded(grainy_image()))
    found = find(tmp_path, cache=tmp_path / "train.index")
    assert found.name(0) == f"{tmp_path}/caf\\udce9.png"
    assert open_image(found.read(0)).size == (60, 44)


def test_pictures_in_formats_that_are_not_read_are_told_by_the_first_process(tmp_path: Path, photos: Path) -> None:
    names = ("raw/1.CR2", "raw/2.dng", "raw/deep/3.dng", "mixed/4.heic", "mixed/5.png", "mixed/6.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(encoded(grainy_image()))
    index = tmp_path / "index"
    with pytest.warns(UserWarning, match=r"^4 files were left out: .dng \(2\), .heic \(1\), .cr2 \(1\)"):
        found = find(tmp_path, cache=index, progress=True)
    assert [found.name(i) for i in range(len(found))] == [str(tmp_path / "mixed/5.png")]
    with warnings.catch_warnings(action="error"):
        find(tmp_path, cache=index)  # as the other processes do
        find(photos, progress=True)
    with pytest.raises(DataError, match=r"raw: no pictures found.*\. 3 files were left out: .dng \(2\), .cr2 \(1\)"):
        find(tmp_path / "mixed", tmp_path / "raw")


def test_nothing_found_is_an_error(tmp_path: Path, members: dict[str, bytes]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.tar").write_bytes(b"x" * 2000)
    shard(tmp_path / "packed.tar.gz", members, "w:gz")
    for sources, message in (
        ([], "no sources given"),
        ([tmp_path / "missing"], "missing.*no such file or folder. Name a folder, glob"),
        ([tmp_path / "empty"], "empty: no pictures found. Shards in a folder are named by a glob"),
        ([tmp_path / "*.jpg"], "no pictures found"),
        ([tmp_path / "bad.tar"], "no pictures found.*damaged archive"),
        ([tmp_path / "packed.tar.gz"], "Unpack it to .tar with gunzip"),
        (["memory://nowhere/at/all"], "memory://nowhere/at/all"),
        (["nonsense://bucket/x"], "nonsense://bucket/x: "),
        (["hf:"], "must be hf:NAME_OR_FOLDER"),
    ):
        with pytest.raises(DataError, match=message):
            find(*sources)


def test_damaged_shards_give_what_they_have(tmp_path: Path, members: dict[str, bytes]) -> None:
    whole = shard(tmp_path / "s.tar", members).read_bytes()
    (tmp_path / "s.tar").write_bytes(whole[: len(whole) // 2])
    found = find(tmp_path / "s.tar")
    assert 0 < len(found) < 5
    ((name, reason),) = found.problems
    assert name == str(tmp_path / "s.tar")
    assert "damaged archive" in reason


def test_an_index_of_thousands_of_names_is_complete(tmp_path: Path) -> None:
    tar = shard(tmp_path / "s.tar", {f"é{i:05}.jpg": b"%d" % i for i in range(5000)})
    for _ in range(2):
        found = find(tar, cache=tmp_path / "train.index")
        assert len(found) == 5000
        assert (found.name(4321), found.read(4321)) == (f"{tar}/é04321.jpg", b"4321")


def test_shards_are_read_once(
    photos: Path, tmp_path: Path, members: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = index_module.shard_items
    monkeypatch.setattr(index_module, "shard_items", lambda path: read.append(Path(path).name) or real(path))
    for name in ("a.tar", "b.tar"):
        shard(tmp_path / name, members)
    cache = tmp_path / "deep" / "train.index"

    def again() -> ImageIndex:
        read.clear()
        return find(photos, tmp_path / "*.tar", cache=cache)

    first = again()
    assert read == ["a.tar", "b.tar"]
    written = cache.stat().st_mtime_ns
    assert again().fingerprint == first.fingerprint
    assert (read, cache.stat().st_mtime_ns) == ([], written)

    shard(tmp_path / "b.tar", {**members, "more.png": encoded(grainy_image(8))})
    changed = again()
    assert (read, len(changed)) == (["b.tar"], 21)
    assert changed.fingerprint != first.fingerprint
    assert open_image(changed.read(20)).tobytes() == grainy_image(8).tobytes()

    shard(tmp_path / "aa.tar", members)
    assert (len(again()), read) == (26, ["aa.tar"])
    assert (len(again()), read) == (26, [])
    cache.write_bytes(b"something else")
    assert (len(again()), read) == (26, ["a.tar", "aa.tar", "b.tar"])
    os.utime(tmp_path / "a.tar", (1, 1))
    assert (len(again()), read) == (26, ["a.tar"])


def test_the_fingerprint_is_of_the_pictures_not_of_where_they_lie(
    photos: Path, tmp_path: Path, members: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here", "there"):
        shutil.copytree(photos, tmp_path / folder / "photos")
        shard(tmp_path / folder / "s.tar", members)

    def prints(root: str) -> list[str]:
        sources = [f"{root}/photos"], [f"{root}/s.tar"], [f"{root}/photos/*.jpg"], [f"{root}/photos/3.jpg"]
        return [find(*source).fingerprint for source in sources]

    here = prints(f"{tmp_path}/here")
    assert here == prints(f"{tmp_path}/there")
    monkeypatch.chdir(tmp_path)
    assert here == prints("here") == prints("./there")
    assert len({*here}) == 3  # the folder and the glob have the same pictures
    both = [f"{tmp_path}/here/photos", f"{tmp_path}/here/s.tar"]
    assert find(*both).fingerprint != find(*both[::-1]).fingerprint
    grainy_image(77).save(tmp_path / "there" / "photos" / "3.jpg")
    assert find(f"{tmp_path}/there/photos").fingerprint != here[0]


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def test_images_at_remote_addresses_are_indexed(
    photos: Path, tmp_path: Path, members: dict[str, bytes], memory: fsspec.AbstractFileSystem
) -> None:
    memory.pipe("/bucket/shards/s.tar", shard(tmp_path / "s.tar", members).read_bytes())
    for path in sorted(photos.iterdir()):
        memory.pipe(f"/bucket/photos/{path.name}", path.read_bytes())
    memory.pipe("/bucket/photos/.hidden.jpg", b"no")
    memory.pipe("/bucket/photos/notes.txt", b"no")
    local = find(tmp_path / "s.tar", photos)
    for sources in (
        ["memory://bucket/shards/s.tar", "memory://bucket/photos"],
        ["memory://bucket/shards/*.tar", "memory://bucket/photos/*.jpg"],
    ):
        there = find(*sources, cache=tmp_path / "train.index")
        assert there.fingerprint == local.fingerprint
        assert there.name(0).startswith("memory://")
        assert there.name(14).endswith("bucket/photos/9.jpg")
        for workers in (0, 2):
            assert all(same(a, b) for a, b in zip(batches(local, 3), batches(there, 3, workers=workers), strict=True))
    assert len(find("memory://bucket/photos/3.jpg")) == 1


def test_a_shard_elsewhere_is_read_by_ranges(
    tmp_path: Path, members: dict[str, bytes], memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/s.tar", shard(tmp_path / "s.tar", members).read_bytes())
    asked: list[tuple[int | None, int | None]] = []
    real = type(memory).cat_file

    def cat(fs: object, path: str, start: int | None = None, end: int | None = None) -> bytes:
        asked.append((start, end))
        return real(fs, path, start, end)

    monkeypatch.setattr(type(memory), "cat_file", cat)
    found = find("memory://s.tar")
    assert asked == []
    assert found.read(2) == members["002.png"]
    ((start, end),) = asked
    assert start is not None
    assert end == start + len(members["002.png"])
    memory.pipe("/s.tar", b"")
    with pytest.raises(ValueError, match="ends within"):
        found.read(2)


def test_hugging_face_datasets_are_indexed(photos: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    paths = sorted(str(path) for path in photos.iterdir())
    rows = {"label": list(range(10)), "picture": [{"bytes": Path(path).read_bytes()} for path in paths]}
    features = datasets.Features({"label": datasets.Value("int64"), "picture": datasets.Image()})
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made, "test": made.select(range(3))}).save_to_disk(tmp_path / "two")
    for source, count in (("one", 10), ("one::picture", 10), ("two", 10), ("two:test", 3), ("two:test:picture", 3)):
        found = find(f"hf:{tmp_path}/{source}", cache=tmp_path / "train.index")
        assert len(found) == count
        assert found.read(2) == Path(paths[2]).read_bytes()
        assert found.name(2) == f"hf:{tmp_path}/{source}/2"
    local = batches(find(photos), 3)
    found = find(f"hf:{tmp_path}/one")
    assert all(same(a, b) for a, b in zip(local, batches(found, 3, workers=2), strict=True))
    for source, message in (
        ("one::label", "no column of pictures 'label'; there are picture"),
        ("two:val", "no split 'val'; there are train, test"),
        ("one:a:b:c", "must be hf:"),
    ):
        with pytest.raises(DataError, match=message):
            find(f"hf:{tmp_path}/{source}")


def test_the_progress_line_is_shown_when_asked_for(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ImageIndex.build([str(photos)])
    assert "finding pictures 10" in capsys.readouterr().err
    find(photos)
    assert capsys.readouterr().err == ""


def test_the_data_benchmark_prints_its_rates(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_data([str(photos)], resolution=32, workers=1, batch_size=2, seconds=0.1)
    shown = capsys.readouterr().out
    assert "10 images at 32" in shown
    assert "1 workers, batch size 2" in shown


def test_a_second_loop_starts_again(photos: Path) -> None:
    with load(find(photos), workers=1) as stream:
        first = iter(stream)
        one = next(first)
        second = iter(stream)
        assert same(one, next(second))
        del first
        assert not same(one, next(second))
