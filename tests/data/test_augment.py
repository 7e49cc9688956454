"""TrivialAugmentWide, one picture at a time and in batches, against torchvision's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from PIL import Image

from veca.data.transforms import BINS, OPS, Augmentation, augment_batch, augment_image, choose_ops

autoaugment = pytest.importorskip("torchvision.transforms.autoaugment")


def picture(kind: str, side: int = 48) -> Image.Image:
    rng = np.random.default_rng(7)
    if kind == "noise":
        return Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
    if kind == "flat":
        return Image.new("RGB", (side, side), (3, 200, 90))
    y, x = np.mgrid[:side, :side] / side
    waves = [np.sin(5 * x + 3 * y), np.cos(4 * x * y), np.sin(9 * y)]
    smooth = np.stack([110 + 60 * wave for wave in waves], -1) + rng.normal(0, 3, (side, side, 3))
    return Image.fromarray(smooth.clip(20, 230).astype(np.uint8))


def tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def chosen_from(ops: Iterable[int], bins: Iterable[int], negative: Iterable[bool]) -> list[tuple[int, float]]:
    numbers = np.array(list(ops), np.uint64), np.array(list(bins), np.uint64), np.array(list(negative))
    chosen = choose_ops(*numbers, range(len(OPS)))
    return list(zip(*(values.tolist() for values in chosen), strict=True))


def every_strength(op: int) -> list[float]:
    pairs = [(bin, negative) for bin in range(BINS) for negative in (False, True)]
    return sorted({strength for _, strength in chosen_from([op] * len(pairs), *zip(*pairs, strict=True))})


def test_operations_and_strengths_are_torchvisions() -> None:
    space = autoaugment.TrivialAugmentWide()._augmentation_space(BINS)
    assert tuple(space) == OPS
    for op, (magnitudes, signed) in enumerate(space.values()):
        wanted = set(magnitudes.reshape(-1).tolist())
        assert set(every_strength(op)) == wanted | ({-value for value in wanted} if signed else set())


@pytest.mark.parametrize("kind", ["noise", "smooth", "flat"])
@pytest.mark.parametrize("op", range(len(OPS)), ids=OPS)
def test_every_operation_is_torchvisions(op: int, kind: str) -> None:
    image = picture(kind)
    for strength in every_strength(op):
        nearest = autoaugment.InterpolationMode.NEAREST
        wanted = tensor(autoaugment._apply_op(image, OPS[op], strength, nearest, None))
        assert torch.equal(tensor(augment_image(image, op, strength)), wanted), (OPS[op], strength)


@pytest.mark.parametrize("side", [1, 2, 3, 16, 17, 64])
def test_batches_are_the_same_pixels(side: int) -> None:
    cases = [
        (kind, op, s) for kind in ("noise", "smooth", "flat") for op in range(len(OPS)) for s in every_strength(op)
    ]
    before = torch.stack([tensor(picture(kind, side)) for kind, _, _ in cases])
    kept = before.clone()
    what = Augmentation(
        torch.tensor([op for _, op, _ in cases]), torch.tensor([s for _, _, s in cases], dtype=torch.float64)
    )
    found = augment_batch(before, what)
    assert torch.equal(before, kept)
    for row, (kind, op, strength) in zip(found, cases, strict=True):
        assert torch.equal(row, tensor(augment_image(picture(kind, side), op, strength))), (kind, OPS[op], strength)


def test_a_picture_does_not_depend_on_its_batch() -> None:
    images = torch.stack([tensor(picture("noise")), tensor(picture("smooth"))] * len(OPS))
    count = range(len(images))
    chosen = chosen_from((i // 2 for i in count), (7 * i for i in count), (i % 3 == 0 for i in count))
    what = Augmentation(torch.tensor([op for op, _ in chosen]), torch.tensor([s for _, s in chosen]))
    together = augment_batch(images, what)
    for i in range(len(images)):
        alone = augment_batch(images[i : i + 1], Augmentation(what.ops[i : i + 1], what.strengths[i : i + 1]))
        assert torch.equal(alone[0], together[i])


@pytest.mark.gpu
def test_a_gpu_gives_the_same_pixels_and_is_not_waited_for() -> None:
    images = torch.stack([tensor(picture(kind)) for kind in ("noise", "smooth", "flat")] * len(OPS))
    count = range(len(images))
    chosen = chosen_from((i // 3 for i in count), (11 * i for i in count), (i % 2 == 0 for i in count))
    what = Augmentation(torch.tensor([op for op, _ in chosen]), torch.tensor([s for _, s in chosen]))
    there = images.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = augment_batch(there, what)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), augment_batch(images, what))
