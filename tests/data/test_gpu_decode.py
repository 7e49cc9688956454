"""`veca.data.gpu_decode`: what the GPU makes of images, and what becomes of those it refuses.

Without a GPU the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

import io
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from interpreter import interpreted
from numpy.typing import NDArray
from PIL import Image

import veca
from veca.data import gpu_decode
from veca.data.gpu_decode import GpuDecoder, choose_decoder, decode_jpegs, finish_crops
from veca.data.index import ImageIndex
from veca.data.loader import to_model_input, train_loader
from veca.data.nvjpeg import DecodedJpegs
from veca.data.records import Record, RecordDecoder, TaskRecords, decode_tasks, read_jpeg
from veca.data.sampler import TrainSampler
from veca.data.sources import Item
from veca.embed import EmbedSettings, embed
from veca.errors import ArgumentError
from veca.images.load import _TRANSPOSE, apply_crop, plan_fit
from veca.images.resize import Crop

GPU = torch.device("cuda")
KINDS = {"crop": (640, 480), "keep": (333, 251), "pad": (251, 333), "stretch": (200, 140)}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture with edges and texture, another for each seed."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    values = np.asarray(small) + rng.integers(-12, 13, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def jpeg(size: tuple[int, int], seed: int = 0, orientation: int = 1, **options: Any) -> bytes:
    image, stream, exif = picture(*size, seed), io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    image.save(stream, "JPEG", exif=exif, **{"quality": 90, **options})
    return stream.getvalue()


def shard(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@interpreted
def test_the_kernel_gives_the_pixels_of_pillow() -> None:
    from veca.kernels.resample import locate, resample_crops

    rng = np.random.default_rng(0)
    images, crops, want = list[NDArray[np.uint8]](), list[Crop](), list[NDArray[np.uint8]]()
    for orientation in range(1, 9):
        height, width = rng.integers(36, 60, 2)
        stored = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        turn = _TRANSPOSE.get(orientation)
        upright = Image.fromarray(stored) if turn is None else Image.fromarray(stored).transpose(turn)
        left, top, right, bottom = rng.random(4).tolist()
        box = 6 * left, 6 * top, upright.width - 6 * right, upright.height - 6 * bottom
        crop = Crop(box, 15, 12, 16, 16)
        want.append(np.asarray(apply_crop(crop, upright)))
        images.append(stored)
        crops.append(crop._replace(orientation=orientation))
    square = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
    images.append(square)
    crops.append(Crop((0.0, 0.0, 20.0, 20.0), 16, 16, 16, 16, flip=True))
    want.append(np.asarray(apply_crop(crops[-1], Image.fromarray(square))))
    out = torch.full((len(images), 3, 16, 16), 7, dtype=torch.uint8)
    pixels = np.concatenate([image.reshape(-1) for image in images])
    places = locate(pixels.ctypes.data, [image.shape for image in images])
    # Planes of channels too, as a JPEG's are
    planes = torch.from_numpy(images[1]).permute(2, 0, 1).contiguous()
    places[1] = planes.data_ptr(), *planes.shape, *planes.stride()
    resample_crops(places, crops, out)
    np.testing.assert_array_equal(out.permute(0, 2, 3, 1).numpy(), np.stack(want))


SAMPLING = {"4:4:4": (1, 1), "4:2:2": (2, 1), "4:2:0": (2, 2), "4:4:0": (1, 2), "grey": (1, 1)}


def blocks(sampling: str, width: int, height: int) -> tuple[bytes, list[NDArray[np.uint8]]]:
    """A JPEG of blocks of one colour, which it codes without loss, and its planes."""
    rng, (across, down) = np.random.default_rng(width), SAMPLING[sampling]
    cells = rng.integers(0, 256, (-(-height // (8 * down)), -(-width // (8 * across)), 3), dtype=np.uint8)
    # Pillow does not write 4:4:0. The blocks of 4:2:2 are coded in the same order.
    stored = (2, 1) if sampling == "4:4:0" else (across, down)
    sides = (len(cells) * 8 * stored[1], cells.shape[1] * 8 * stored[0]) if sampling == "4:4:0" else (height, width)
    values = cells.repeat(8 * stored[1], 0).repeat(8 * stored[0], 1)[: sides[0], : sides[1]]
    stream = io.BytesIO()
    if sampling == "grey":
        Image.fromarray(np.ascontiguousarray(values[..., 0])).save(stream, "JPEG", quality=100)
    else:
        kind = "4:2:2" if sampling == "4:4:0" else sampling
        Image.fromarray(values, mode="YCbCr").save(stream, "JPEG", quality=100, subsampling=kind)
    data = bytearray(stream.getvalue())
    if sampling == "4:4:0":
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 9] = height.to_bytes(2) + width.to_bytes(2)
        data[frame + 11] = 0x12
    luma = cells[..., 0].repeat(8 * down, 0).repeat(8 * across, 1)[:height, :width]
    chroma = cells.repeat(8, 0).repeat(8, 1)[: -(-height // down), : -(-width // across)]
    planes = [luma] if sampling == "grey" else [luma, chroma[..., 1], chroma[..., 2]]
    return bytes(data), [np.ascontiguousarray(plane) for plane in planes]


@interpreted
@pytest.mark.parametrize("sampling", SAMPLING)
def test_planes_become_the_rgb_of_libjpeg(sampling: str) -> None:
    from veca.kernels.ycbcr import planes_to_rgb

    sizes = [(50, 37), (33, 16), (3, 5), (1, 1), (4, 2), (2, 9), (150, 9)]
    rows, kept = [], []
    for width, height in sizes:
        data, planes = blocks(sampling, width, height)
        out = np.full((3, height, width), 7, np.uint8)
        luma, *chroma = planes
        places = [x for plane in chroma for x in (plane.ctypes.data, plane.shape[1])][:3] if chroma else [0, 0, 0]
        shape = chroma[0].shape if chroma else (0, 0)
        rows.append([luma.ctypes.data, width, *places, out.ctypes.data, height, width, *shape])
        kept.append((out, planes, data))
    planes_to_rgb(np.array(rows, np.int64), torch.device("cpu"))
    for out, _, data in kept:
        want = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        np.testing.assert_array_equal(out.transpose(1, 2, 0), want)


def records_of(*files: bytes, decode: str = "gpu", fit: Any = "crop") -> tuple[list[Record], RecordDecoder]:
    decoder = RecordDecoder(64, fit, 10**8, decode)  # type: ignore[arg-type]
    return [decoder(Item(f"{i}.jpg", data=data), gpu=True) for i, data in enumerate(files)], decoder


def test_ordinary_jpegs_are_left_to_the_gpu_and_others_only_resized() -> None:
    stream = io.BytesIO()
    picture(90, 70).save(stream, "PNG")
    files = [jpeg((80, 60)), stream.getvalue(), jpeg((80, 60), progressive=True), jpeg((80, 60))[:-400], b"no picture"]
    found, _ = records_of(*files)
    assert [None if r.source is None else r.source.ndim for r in found] == [1, 3, 3, None, None]
    assert ["truncated" in r.error or "not one of" in r.error for r in found] == [False, False, False, True, True]
    assert [r.size for r in found[:3]] == [(80, 60), (90, 70), (80, 60)]
    found, _ = records_of(*files[:2], decode="pillow")
    assert [r.source.ndim for r in found] == [3, 3]


def test_the_gpu_gets_nothing_after_the_image() -> None:
    data = jpeg((80, 60))
    found = read_jpeg(data + b"more" * 100, 10**8)
    assert found is not None
    assert found[0].tobytes() == data
    assert read_jpeg(data, 80 * 60 - 1) is None


def test_images_too_large_to_send_are_resized_by_the_worker() -> None:
    (record,), _ = records_of(jpeg((1600, 1200), quality=30), decode="pillow")
    assert record.source.shape == (64, 64, 3)
    assert record.size == (1600, 1200)
    want = apply_crop(plan_fit(1600, 1200, 64, "crop"), Image.open(io.BytesIO(jpeg((1600, 1200), quality=30))))
    np.testing.assert_array_equal(record.source, np.asarray(want))


class FakeGpu(GpuDecoder):
    """One that refuses, or that never answers: faults a real GPU cannot be made to have."""

    def __init__(self, hang: bool = False, error: Exception | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.hang, self.error, self.released = hang, error, threading.Event()

    def _finish(self, records: TaskRecords) -> dict[tuple[int, int], Any]:
        if self.hang:
            self.released.wait(60)
        if self.error is not None:
            raise self.error
        return {}


def test_what_the_gpu_refuses_is_decoded_by_the_cpu() -> None:
    records, decoder = records_of(jpeg((80, 60)), jpeg((60, 80), seed=1))
    with FakeGpu() as gpu:
        finished = gpu.submit(TaskRecords.collect(records), decoder)()
    assert gpu.refused == 2
    for record, made in zip(records, finished, strict=True):
        want = decoder.from_source(record.name, record.source.tobytes())
        np.testing.assert_array_equal(made.pixels, want.pixels)
        assert made.size == want.size == record.size


def test_what_the_gpu_refuses_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(
        sources: Any, crops: Any, shape: tuple[int, int], device: torch.device
    ) -> tuple[torch.Tensor, list[int]]:
        refused = [1] if len(sources) > 1 else [0]
        numbers = torch.arange(1, len(sources) + 1, dtype=torch.uint8)
        return numbers[:, None, None, None].expand(-1, 3, *shape), refused

    files = [jpeg((80, 60)), jpeg((80, 60), seed=1), b"no picture", jpeg((60, 80), seed=2), jpeg((80, 60), seed=3)]
    records, decoder = records_of(*files, fit="keep")
    (a, b, bad, tall, c), want = records, decoder.from_source("1.jpg", files[1])
    monkeypatch.setattr(gpu_decode, "finish_crops", finish)
    with GpuDecoder(torch.device("cpu")) as gpu:
        finished = gpu.submit(TaskRecords.collect(records), decoder)()
    assert gpu.refused == 2
    assert finished.runs == [(a.shape, 2), ((0, 0), 1), (tall.shape, 1), (c.shape, 1)]
    assert finished.errors == {2: bad.error}
    images = [record.pixels for record in finished]
    assert [int(images[i].max()) for i in (0, 4)] == [1, 3]
    np.testing.assert_array_equal(images[1].numpy(), want.pixels)
    np.testing.assert_array_equal(images[3], decoder.from_source("3.jpg", files[3]).pixels)
    assert [record.size for record in finished] == [record.size for record in records]
    assert b.size == want.size


def test_a_gpu_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "PATIENCE", 0.2)
    records, decoder = records_of(jpeg((80, 60)))
    with FakeGpu(hang=True) as gpu:
        first, second = (gpu.submit(TaskRecords.collect(records), decoder) for _ in range(2))
        began = time.monotonic()
        with pytest.warns(UserWarning, match="does not answer"):
            assert next(iter(first())).pixels.shape == (3, 64, 64)
        assert next(iter(second())).pixels.shape == (3, 64, 64)
        assert time.monotonic() - began < 10
        assert not gpu.works
        gpu.released.set()


def test_an_error_of_the_gpu_reaches_the_caller() -> None:
    records, decoder = records_of(jpeg((80, 60)))
    with FakeGpu(error=torch.OutOfMemoryError("none left")) as gpu, pytest.raises(torch.OutOfMemoryError):
        gpu.submit(TaskRecords.collect(records), decoder)()


def decoded_by_pillow(files: list[NDArray[np.uint8]], _: torch.device) -> DecodedJpegs:
    """What nvJPEG would give, where there is none."""
    images = [np.asarray(Image.open(io.BytesIO(file.tobytes())).convert("RGB")).transpose(2, 0, 1) for file in files]
    ends, sizes = np.cumsum([image.size for image in images]), np.array([image.shape[1:] for image in images])
    pixels = torch.from_numpy(np.concatenate([image.ravel() for image in images]))
    return DecodedJpegs(pixels, ends - [image.size for image in images], sizes)


@interpreted
def test_what_is_damaged_within_its_coded_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "decode_jpegs", decoded_by_pillow)
    good = jpeg((24, 16), quality=10)
    longer = good[:-2] + good[-3:-2] + good[-2:]
    crop = plan_fit(24, 16, 16, "crop")
    sources = []
    for data in (good, longer, good):
        found = read_jpeg(data, 10**8)
        assert found is not None
        sources.append(found[0].copy())
    pixels, refused = finish_crops(
        [*sources, np.zeros((16, 24, 3), np.uint8)], [crop] * 4, (16, 16), torch.device("cpu")
    )
    assert refused == [1]
    assert torch.equal(pixels[0], pixels[2])
    assert pixels[0].any()
    assert not pixels[3].any()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_task_does_not_wait_for_those_that_do_not_come(workers: int) -> None:
    found = list[TaskRecords]()

    def tasks() -> Iterator[list[Item] | None]:
        yield [Item("0.jpg", data=jpeg((80, 60)))]
        while not found:
            yield None

    decoder = RecordDecoder(64, "crop", 10**8, "gpu")
    with FakeGpu() as gpu, decode_tasks(tasks(), decoder, workers, gpu=gpu) as decoded:
        found.append(next(decoded))
        assert next(decoded, None) is None
    assert [record.pixels.shape for record in found[0]] == [(3, 64, 64)]


def test_tall_images_are_resized_by_the_worker() -> None:
    """Pillow 13 resizes their rows first, the GPU their columns."""
    found, _ = records_of(jpeg((70, 200)), jpeg((200, 70)), decode="pillow")
    assert [record.source.shape for record in found] == [(64, 64, 3), (70, 200, 3)]


def test_the_choice_of_a_decoder() -> None:
    cpu = torch.device("cpu")
    assert choose_decoder("auto", cpu) == "cpu"
    assert choose_decoder("pillow", cpu) == "pillow"
    with pytest.raises(ArgumentError, match=r"decode gpu \(decode='gpu'\): cpu is no NVIDIA GPU.*Use cpu, or auto"):
        choose_decoder("gpu", cpu)


# On a GPU


@pytest.mark.gpu
def test_decoded_by_the_gpu_as_by_libjpeg() -> None:
    files = [jpeg((90 + 7 * i, 160 - 9 * i), seed=i, subsampling=i % 3, quality=70 + i) for i in range(12)]
    files += [blocks(sampling, 61 + i, 45 + i)[0] for i, sampling in enumerate(SAMPLING)]
    grey = io.BytesIO()
    picture(75, 53).convert("L").save(grey, "JPEG", quality=85)
    files.append(grey.getvalue())
    decoded = decode_jpegs([np.frombuffer(file, np.uint8) for file in files], GPU)
    for i, file in enumerate(files):
        want = np.asarray(Image.open(io.BytesIO(file)).convert("RGB")).astype(int)
        difference = np.abs(decoded.image(i).permute(1, 2, 0).cpu().numpy() - want)
        # The cosine transforms of both round differently.
        assert difference.max() <= 4, i
        assert difference.mean() < 0.2, i


@pytest.mark.gpu
@pytest.mark.parametrize("fit", KINDS)
@pytest.mark.parametrize("orientation", [1, 6])
def test_resized_on_the_gpu_as_by_pillow(fit: Any, orientation: int) -> None:
    data = jpeg(KINDS[fit], orientation=orientation, subsampling=0)
    found = read_jpeg(data, 10**8)
    assert found is not None
    source, size, turn = found
    crop = plan_fit(*size, 64, fit)._replace(orientation=turn)
    stored = decode_jpegs([source], GPU).image(0).permute(1, 2, 0).cpu().numpy()
    exact, refused = finish_crops([stored], [crop], (crop.height, crop.width), GPU)
    both, also = finish_crops([source.copy()], [crop], (crop.height, crop.width), GPU)
    upright = Image.fromarray(stored) if turn == 1 else Image.fromarray(stored).transpose(Image.Transpose.ROTATE_270)
    want = np.asarray(apply_crop(crop._replace(orientation=1), upright)).transpose(2, 0, 1)
    assert not refused
    assert not also
    np.testing.assert_array_equal(exact[0].cpu().numpy(), want)
    np.testing.assert_array_equal(both[0].cpu().numpy(), want)


def hostile(count: int) -> list[bytes]:
    """JPEGs cut, closed with an end marker, overwritten and shuffled."""
    rng, made = np.random.default_rng(0), list[bytes]()
    for i in range(count):
        data = bytearray(jpeg((64 + i % 64, 64 + i % 7 * 16), seed=i % 9, quality=60 + i % 40))
        kind, place = i % 5, int(rng.integers(2, len(data) - 2))
        if kind == 0:
            data = data[:place] + b"\xff\xd9"
        elif kind == 1:
            data[place : place + 40] = rng.integers(0, 256, 40, dtype=np.uint8).tobytes()[: len(data) - place]
        elif kind == 2:
            data[place:place] = bytes(int(rng.integers(1, 500)))
        elif kind == 3:
            other = jpeg((96, 64), seed=i % 5)
            data = data[:place] + bytearray(other[place % len(other) :])
        else:
            for spot in rng.integers(2, len(data), 30):
                data[spot] = rng.integers(0, 256)
        made.append(bytes(data))
    return made


@pytest.mark.gpu
def test_pixels_of_hostile_files_do_not_depend_on_other_files() -> None:
    """Of a file damaged within its coded data, the hardware leaves pixels as they were before."""
    files = hostile(1000)
    decoder, good = RecordDecoder(64, "crop", 10**8, "gpu"), [jpeg((128, 96), seed=i) for i in range(40)]
    runs = []
    for order in (range(1000), np.random.default_rng(1).permutation(1000).tolist()):
        pixels = dict[int, Any]()
        with GpuDecoder(GPU) as gpu:
            for numbers in (list(order[i : i + 200]) for i in range(0, 1000, 200)):
                data = [*(files[i] for i in numbers), *good[: len(runs) * 40]]
                records = [decoder(Item("", data=each), gpu=True) for each in data]
                finished = gpu.submit(TaskRecords.collect(records), decoder)()
                made = (None if record.pixels is None else torch.as_tensor(record.pixels).cpu() for record in finished)
                pixels |= dict(zip(numbers, made, strict=False))
            assert 100 < gpu.refused < 900
        runs.append(pixels)
    for i in range(1000):
        a, b = (run[i] for run in runs)
        assert (a is None and b is None) or torch.equal(a, b), i


@pytest.mark.gpu
def test_hostile_files_neither_crash_nor_hang_nor_change_from_run_to_run(tmp_path: Path) -> None:
    files = {f"{i:04}.jpg": data for i, data in enumerate(hostile(1000))}
    files |= {f"good{i}.jpg": jpeg((128, 96), seed=i) for i in range(40)}
    path = shard(tmp_path / "hostile.tar", files)
    model, settings = veca.load("veca_tiny").to(GPU), EmbedSettings(size=64, cores=8, decode="gpu", batch=64)
    tables: list[dict[str, Any]] = []
    for name, workers in (("a", 4), ("b", 2)):
        out = tmp_path / f"{name}.parquet"
        report = embed(path, out, model=model, model_name="t", settings=settings, workers=workers, progress=False)
        assert report.pictures + report.failures == 1040
        tables.append({row["path"]: row["cls"] for row in pq.read_table(out).to_pylist()})
    assert tables[0].keys() == tables[1].keys()
    assert sum("good" in name for name in tables[0]) == 40
    assert all(np.array_equal(tables[0][name], tables[1][name]) for name in tables[0])


@pytest.mark.gpu
def test_features_hardly_depend_on_the_decoder_and_runs_do_not_mix(tmp_path: Path) -> None:
    path = shard(tmp_path / "s.tar", {f"{i}.jpg": jpeg((640, 480), seed=i) for i in range(64)})
    model, found = veca.load("veca_tiny").to(GPU), dict[str, NDArray[np.float32]]()
    for decode in ("gpu", "cpu", "pillow"):
        settings = EmbedSettings(size=256, cores=32, decode=decode)  # type: ignore[arg-type]
        out = tmp_path / f"{decode}.parquet"
        embed(path, out, model=model, model_name="t", settings=settings, workers=2, progress=False)
        found[decode] = np.stack(pq.read_table(out)["cls"].to_numpy())
        assert f'"decode": "{decode}"' in pq.read_schema(out).metadata[b"veca"].decode()
    for decode, least in (("gpu", 0.99), ("cpu", 0.999)):
        a, b = found[decode], found["pillow"]
        cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        assert cosine.min() > least


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_training_batches_are_the_same_wherever_they_are_resized(tmp_path: Path, workers: int) -> None:
    files = {f"{i}.jpg": jpeg((96 + 8 * i, 160 - 8 * i), seed=i, orientation=1 + i % 8) for i in range(12)}
    files["broken.jpg"] = files["0.jpg"][:900]
    index = ImageIndex.build([str(shard(tmp_path / "s.tar", files))], progress=False)
    sampler = TrainSampler(len(index), 8, lambda i: (64, 96)[i % 2])
    loaders = {"cpu": train_loader(index, sampler, workers, where="gpu")}
    loaders["gpu"] = train_loader(index, sampler, workers, where="gpu", device=GPU)
    loaders["jpeg"] = train_loader(index, sampler, workers, where="gpu", device=GPU, decode_on_device=True)
    found: dict[str, list[Any]] = {}
    for name, loader in loaders.items():
        with loader:
            batches = [batch for _, batch in zip(range(5), loader, strict=False)]
        found[name] = [(to_model_input(batch, GPU).cpu(), batch.indices.tolist(), batch.skipped) for batch in batches]
    for a, b, c in zip(*(found[name] for name in ("cpu", "gpu", "jpeg")), strict=True):
        assert torch.equal(a[0], b[0])
        assert a[1:] == b[1:]
        assert a[1] == c[1]
        assert (a[0] - c[0]).abs().mean() < 0.1


def test_a_crop_that_grows_before_it_shrinks_is_left_to_the_cpu() -> None:
    assert Crop((0, 0, 10, 400), 20, 100, 20, 100).grows_first
    record = RecordDecoder(64, "stretch", 10**8, "gpu")(Item("a.jpg", data=jpeg((24, 200))), gpu=True)
    assert record.source.shape == (64, 64, 3)
