"""`veca.data.crops`: labelled images have the same pixels wherever they are finished, and a GPU may refuse any.

Without a GPU the kernel runs in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interpreter import interpreted
from PIL import Image
from sample_images import fractal_image

from veca.data.crops import CropReader, PlannedCrop
from veca.data.datasets import ProbeData, load_dataset
from veca.data.datasets.base import DepthRules, Split
from veca.data.datasets.batches import CroppedImages, CropTransform, DenseLoader, decode_batches, stack_crops
from veca.data.index import ImageIndex
from veca.errors import ArgumentError
from veca.images import ImageError

CPU = torch.device("cpu")
ON_CPU = CropReader(device=CPU)


def make_pairs(root: Path, kind: str = "masks", suffix: str = "png") -> ProbeData:
    """Images of several shapes, some turned, with label maps; one cannot be read."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for i in range(9):
            width, height = (int(side) for side in rng.integers(30, 60, 2))
            image, exif = fractal_image(width, height), Image.Exif()
            exif[0x0112] = 3 if i % 2 else 1  # upside down: labels have no orientation, but the same shape
            label = rng.integers(0, 3, (height, width))
            for folder in ("images", kind):
                (root / split / folder).mkdir(parents=True, exist_ok=True)
            image.save(root / split / "images" / f"{i}.{suffix}", exif=exif, **({} if suffix == "png" else JPEG))
            values = (1000 * label).astype(np.uint16) if kind == "depths" else label.astype(np.uint8)
            Image.fromarray(values).save(root / split / kind / f"{i}.png")
        broken = root / split / "images" / f"4.{suffix}"
        broken.write_bytes(broken.read_bytes()[:200])
    return load_dataset(str(root))


JPEG: dict[str, Any] = {"quality": 90, "subsampling": 0}


def dense_batches(data: ProbeData, reader: CropReader, workers: int) -> list[tuple[Any, Any]]:
    loader = DenseLoader(data, 32, 16, 4, workers=workers, skip_bad=True, scales=(0.5, 2.0), reader=reader)
    batches = [*loader.training(4), *loader.scoring("val")]
    batches += [batch for i in range(9) if (batch := loader.one("val", i))]
    assert [len(names) for names in loader.skipped.values()] == [1, 1]
    return [(batch.pixels.cpu(), batch.labels) for batch in batches]


def crops_of(split: Split, transform: CropTransform, workers: int) -> tuple[torch.Tensor, dict[int, str]]:
    order, images = [range(0, 5), range(5, 9)], CroppedImages(split, transform)
    with decode_batches(images, order, workers, device=transform.reader.device) as decoded:
        stacked = [stack_crops(transform.side, items) for items in decoded]
    return torch.cat([pixels.cpu() for pixels, _ in stacked]), {**stacked[0][1], **stacked[1][1]}


def check_same_crops(data: ProbeData, transforms: list[CropTransform], reader: CropReader, workers: int) -> None:
    for transform in transforms:
        want = crops_of(data.splits["train"], transform, 0)
        found = crops_of(data.splits["train"], dataclasses.replace(transform, reader=reader), workers)
        assert torch.equal(found[0], want[0])
        assert found[1] == want[1]
        assert list(want[1]) == [4]


@interpreted
def test_a_device_makes_the_pixels_of_pillow(tmp_path: Path) -> None:
    check_same_crops(make_pairs(tmp_path), [CropTransform(16, 0)], CropReader(device=CPU), 2)


@interpreted
def test_a_device_makes_the_pixels_of_whole_images_and_their_crops(tmp_path: Path) -> None:
    data = make_pairs(tmp_path)
    loaders = [DenseLoader(data, 16, 8, 2, scales=(0.5, 2.0), reader=reader) for reader in (CropReader(), ON_CPU)]
    pairs = zip(*(CroppedImages(data.splits["val"], loader._whole_image) for loader in loaders), strict=False)
    (_, want), (i, planned) = next(pairs)
    ((_, found),) = CroppedImages(data.splits["val"], loaders[1]._whole_image).finish([(i, planned)], CPU)
    assert np.array_equal(found[0], want[0])
    assert np.array_equal(found[1], want[1])
    for position in range(3):
        index, split = (position, position), data.splits["train"]
        want = loaders[0]._random_crop(split, index)
        planned = loaders[1]._random_crop(split, index)
        ((_, found),) = CroppedImages(split, loaders[1]._random_crop).finish([(0, planned)], CPU)
        assert np.array_equal(found[0], want[0])
        assert np.array_equal(found[1], want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_a_gpu_makes_the_pixels_of_pillow(tmp_path: Path, workers: int) -> None:
    data, reader = make_pairs(tmp_path / "masks"), CropReader(device=torch.device("cuda"))
    check_same_crops(data, [CropTransform(30), CropTransform(32, 0), CropTransform(32, 1)], reader, workers)
    depths = make_pairs(tmp_path / "depths", "depths")
    depths = dataclasses.replace(depths, depth=DepthRules(crop="eigen", input_crop=(40, 40)))
    for each in (data, depths):
        exact, found = dense_batches(each, CropReader(), 0), dense_batches(each, reader, workers)
        for want_pair, pair in zip(exact, found, strict=True):
            assert torch.equal(pair[0], want_pair[0])
            assert torch.equal(pair[1], want_pair[1])


def refuse_all(
    sources: list[Any], crops: Any, shape: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, list[int]]:
    """A GPU that refuses everything: what is in the rows of such images is not to be used."""
    return torch.full((len(sources), 3, *shape), 7, dtype=torch.uint8, device=device), list(range(len(sources)))


def test_what_the_device_refuses_is_decoded_by_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veca.data.crops.finish_crops", refuse_all)
    split = make_pairs(tmp_path, suffix="jpg").splits["train"]
    transform = CropTransform(32, 1, reader=CropReader("gpu", CPU))
    images = CroppedImages(split, transform)
    assert sum(isinstance(images[i][1], PlannedCrop) and images[i][1].source.ndim == 1 for i in range(9)) == 8
    found, bad = crops_of(split, transform, 0)
    want, also = crops_of(split, CropTransform(32, 1), 0)
    assert bad == also
    assert (found.int() - want.int()).abs().max() <= 3
    # What was no doubtful header may still be no image.
    i, planned = images[0]
    cut = planned._replace(source=planned.source[: len(planned.source) // 2])
    ((_, reason),) = images.finish([(i, cut)], CPU)
    assert reason.startswith(f"{split.name(0)}: ")
    assert "truncated" in reason


@pytest.mark.parametrize("size", [(900, 700), (70, 50)])
def test_the_fast_decoder_is_close_to_pillow(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "a.jpg"
    fractal_image(*size).save(path, **JPEG)
    split = Split(ImageIndex.build([str(path)], progress=False), np.zeros(1, np.int64))
    for transform in (CropTransform(48), CropTransform(48, 3, area=(0.35, 1.0))):
        want = transform(split, 0)
        found = CropTransform(48, transform.epoch, area=transform.area, reader=CropReader("cpu"))(split, 0)
        assert isinstance(want, np.ndarray)
        assert isinstance(found, np.ndarray)
        assert found.shape == want.shape
        assert np.abs(found.astype(int) - want).mean() < 2


def test_the_choice_is_part_of_what_is_described() -> None:
    assert CropReader.choose("auto", CPU) == CropReader("cpu")
    assert CropReader.choose("pillow", CPU) == CropReader()
    with pytest.raises(ArgumentError, match="--decode gpu .*cpu is no NVIDIA GPU"):
        CropReader.choose("gpu", CPU)
    for epoch in (None, 1):
        exact, fast = (CropTransform(32, epoch, reader=CropReader(decode)).describe() for decode in ("pillow", "cpu"))
        assert fast == {**exact, "decode": "cpu"}


def test_a_label_of_another_size_is_refused(tmp_path: Path) -> None:
    data = make_pairs(tmp_path, suffix="jpg")
    Image.new("L", (7, 5)).save(tmp_path / "train" / "masks" / "0.png")
    for reader in (CropReader(), CropReader("cpu"), CropReader("gpu", CPU)):
        with pytest.raises(ImageError, match=r"its label 5×7; they must match"):
            DenseLoader(data, 32, 16, 4, reader=reader)._whole_image(data.splits["train"], 0)


@pytest.mark.gpu
def test_crops_decoded_by_a_gpu_are_close_to_pillow(tmp_path: Path) -> None:
    data, reader = make_pairs(tmp_path, suffix="jpg"), CropReader.choose("gpu", torch.device("cuda"))
    assert reader == CropReader("gpu", torch.device("cuda"))
    for epoch in (None, 2):
        found, bad = crops_of(data.splits["train"], CropTransform(32, epoch, reader=reader), 2)
        want, also = crops_of(data.splits["train"], CropTransform(32, epoch), 0)
        assert bad == also
        assert (found.int() - want.int()).abs().float().mean() < 3
    again = dense_batches(data, reader, 2)
    for pair, same, want_pair in zip(
        again, dense_batches(data, reader, 0), dense_batches(data, CropReader(), 0), strict=True
    ):
        assert torch.equal(pair[0], same[0])
        assert torch.equal(pair[1], want_pair[1])
        assert (pair[0].int() - want_pair[0].int()).abs().float().mean() < 3
