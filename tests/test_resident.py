from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from veca.train.data import DataError, Pictures, TrainBatches
from veca.train.resident import Resident, ResidentBatches

SIDE = 40
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    """Noise has every value next to every other; the last file is no picture."""
    folder = tmp_path_factory.mktemp("squares")
    rng = np.random.default_rng(0)
    for i in range(9):
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    (folder / "x.png").write_bytes(b"no picture")
    return Pictures.find([str(folder)], None, progress=False)


def resident(pictures: Pictures, side: int = SIDE, device: torch.device = CPU) -> Resident:
    return Resident(pictures, side, device, workers=0, max_pixels=10**6, progress=False)


@pytest.mark.parametrize(
    ("resolution", "short_side", "more"),
    [
        (32, 1.125, {}),  # smaller
        (48, 1.125, {"augment": "flip"}),  # larger
        (40, 1.0, {"augment": "none"}),  # as it is
        (16, 1.5, {"views": 2, "start": 7, "rank": 1, "world": 2, "seed": 3}),
    ],
)
def test_batches_are_those_of_the_loader(squares: Pictures, resolution: int, short_side: float, more: Any) -> None:
    options = {"resolution_of": lambda f: resolution, "batch": 8, "short_side": short_side, **more}
    with TrainBatches(squares, workers=0, where="gpu", **options) as there:
        expected = [batch for batch, _ in zip(there, range(3), strict=False)]
    with ResidentBatches(resident(squares), **options) as here:
        found = [batch for batch, _ in zip(here, range(3), strict=False)]
    assert any(batch.skipped for batch in found)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.views, b.views)
        assert a.skipped == b.skipped
        if a.augmentation is None or b.augmentation is None:
            assert a.augmentation is b.augmentation
        else:
            assert all(map(torch.equal, a.augmentation, b.augmentation))


def test_other_pictures_are_kept_as_the_square_in_their_middle(tmp_path: Path) -> None:
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    kept = resident(Pictures.find([str(tmp_path)], None, progress=False), side=20)
    assert kept.images.shape == (1, 3, 20, 20)
    assert (kept.images == 200).all()


def test_nothing_but_bad_pictures(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"no picture")
    kept = resident(Pictures.find([str(tmp_path)], None, progress=False))
    with pytest.raises(DataError, match="in a row cannot be used"):
        next(iter(ResidentBatches(kept, resolution_of=lambda f: 32, batch=1)))


@pytest.mark.gpu
def test_gpu_gives_the_same_pixels(squares: Pictures) -> None:
    options: Any = {"resolution_of": lambda f: 32, "batch": 8}
    kept = resident(squares, device=torch.device("cuda"))
    expected = next(iter(ResidentBatches(resident(squares), **options)))
    for compiled in (False, True):
        assert torch.equal(next(iter(ResidentBatches(kept, compile=compiled, **options))).images.cpu(), expected.images)
