"""TrivialAugmentWide, one picture at a time and in batches, against torchvision's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from PIL import Image

from veca.data.transforms import (
    BINS,
    OPS,
    Augmentation,
    PairMixer,
    augment_batch,
    augment_image,
    choose_ops,
    mix_pairs,
)

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


def test_pairs_are_mixed_with_each_other() -> None:
    images = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 8, 8)
    blend, box, none = [0.75, 0, 0, 0, 0], [1, 0.25, 0.5, -0.5, 0.75], [1, 0, 0, 0, 0]
    mixed = mix_pairs(images, torch.tensor([blend, box, none]))
    assert (mixed[0] == 0.25).all()
    assert (mixed[1] == 0.75).all()
    expected = torch.full((8, 8), 2.0)
    expected[:6, 2:4] = 3
    assert torch.equal(mixed[2], expected.expand(3, 8, 8))
    assert torch.equal(mixed[3], 5 - mixed[2])
    assert torch.equal(mixed[4:], images[4:])


@pytest.mark.parametrize(("mixup", "cutmix"), [(1.0, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_mixing_depends_on_the_place_of_a_pair_alone(mixup: float, cutmix: float) -> None:
    images = torch.randn(64, 3, 16, 16)
    whole = PairMixer(mixup, cutmix, 0.5, seed=3, forward=5)(images)
    parts = []
    for half in range(2):  # two passes in two processes each
        for rank in range(2):
            mixer = PairMixer(mixup, cutmix, 0.5, 3, 10 + half, 2, rank, 2)
            parts.append(mixer(images.view(4, 16, 3, 16, 16)[2 * half + rank]))
    assert torch.equal(torch.cat(parts), whole)
    mixed = (whole != images).flatten(1).any(1)
    assert torch.equal(mixed[::2], mixed[1::2])
    assert 8 <= int(mixed[::2].sum()) <= 24  # about half of 32 pairs
    blended = (whole != images).flatten(1).all(1)  # of a box part of the image stays
    assert bool(blended.any()) == (mixup > 0)
    assert bool((mixed & ~blended).any()) == (cutmix > 0)
    torch.testing.assert_close(whole[::2] + whole[1::2], images[::2] + images[1::2])
    assert not torch.equal(PairMixer(mixup, cutmix, 0.5, seed=3, forward=6)(images), whole)


def test_shares_of_mixup_are_those_of_the_beta_distribution() -> None:
    images = torch.tensor([0.0, 1.0]).repeat(2000).view(-1, 1, 1, 1).expand(-1, 3, 1, 1)
    shares = PairMixer(0.4, 0.0)(images)[1::2, 0, 0, 0].double()
    assert abs(float(shares.mean()) - 0.5) < 0.03
    assert abs(float(shares.var()) - 1 / (4 * (2 * 0.4 + 1))) < 0.01


def test_areas_of_cutmix_are_those_of_the_beta_distribution() -> None:
    images = torch.tensor([0.0, 1.0]).repeat(1000).view(-1, 1, 1, 1).expand(-1, 3, 64, 64)
    areas = PairMixer(0.0, 1.0)(images)[::2, 0].mean((1, 2))
    assert float(areas.max()) <= 1
    assert 0.25 < float(areas.mean()) < 0.4  # 1/2 if no box went beyond the edges, which cut off a third
