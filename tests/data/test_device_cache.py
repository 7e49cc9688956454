from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from veca.config import get_config
from veca.data.device_cache import Resident, ResidentBatches, Taught
from veca.data.loader import DataError, Pictures, TrainBatches, normalized
from veca.data.sampler import places, views_of
from veca.images import MEAN, STD
from veca.teachers import Standardized, Teacher
from veca.train.parallel import World
from veca.train.plan import RunPlan
from veca.train.recipe import Recipe, RecipeError
from veca.train.validation import TeacherRunner

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
        (32, 1.125, {"augment": "colour"}),
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


class Blurry(Teacher):
    """A map of the mean colour of each cell, and its mean: equivariant, so crops of maps are maps of crops."""

    pooled = True

    def __init__(self) -> None:
        super().__init__(3, 8, MEAN, STD, raw=True)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = F.avg_pool2d(images, 8)
        return found.mean((2, 3)), found


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize(("kept", "error"), [("bfloat16", 4e-3), ("float8", 7e-2)])
def test_targets_of_a_crop_are_cells_of_the_whole(
    squares: Pictures, standardize: bool, kept: str, error: float
) -> None:
    about: dict[str, Any] = {"model": {"size": "veca_tiny"}, "precision": "float32", "compile": False, "batch": 4}
    teacher: Any = Blurry()
    if standardize:
        teacher = Standardized(teacher)
        teacher.means.copy_(torch.tensor([[0.1, 0.2, 0.3], [-0.3, 0.2, 0.1]]))
        teacher.deviations.copy_(torch.tensor([[1.1, 0.7, 1.3], [0.8, 1.2, 0.9]]))
    lessons = TeacherRunner(teacher, Recipe.from_dict(about), World(0, 1, CPU), 8)
    pixels = resident(squares)
    dtype = torch.bfloat16 if kept == "bfloat16" else torch.float8_e4m3fn
    taught = Taught(pixels, lessons, dtype, short_side=5 / 3, progress=False)
    about["model"]["overrides"] = {"patch_size": 8}
    about |= {"data": {"resident": SIDE, "augment": "colour"}, "teacher": {"resident": kept}}
    recipe = Recipe.from_dict({**about, "resolutions": [{"odds": {24: 1}}]})
    config = get_config("veca_tiny", patch_size=8)
    plan = RunPlan(recipe, config, len(squares), 1, {"width": 3, "stride": 8, "parameters": 1})
    tensors = (pixels.images, taught.maps, taught.cls)
    assert plan.memory().resident == sum(tensor.nbytes for tensor in tensors)
    assert plan.teacher_flops() == 0
    options: Any = {"resolution_of": lambda f: 24, "batch": 16, "short_side": 5 / 3, "augment": "colour"}
    batches = ResidentBatches(pixels, taught=taught, **options)
    batch = batches.batch(0)
    assert batch.targets is not None
    exact = lessons.targets(normalized(batch.images))
    for found, expected in zip(batch.targets, exact, strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found.float(), expected, rtol=error, atol=error)
    whole = [pixels.images[i] for i in batch.indices.tolist()]
    places = {
        (x, y, flip)
        for image, seen in zip(whole, batch.images, strict=True)
        for x in (0, 8, 16)
        for y in (0, 8, 16)
        for flip in (False, True)
        if torch.equal(image[:, y : y + 24, x : x + 24].flip(-1) if flip else image[:, y : y + 24, x : x + 24], seen)
    }
    assert len(places) > 5  # of 18


@pytest.mark.parametrize("standardize", [False, True])
def test_a_second_look_gives_the_mean_of_its_map_over_the_crop(squares: Pictures, standardize: bool) -> None:
    own = Blurry()
    own.meet, own.glance = 32, 24  # of crops of 32 pixels; the whole, of 40, is seen with 32 in 4 × 4 cells
    teacher: Any = own
    if standardize:
        teacher = Standardized(own)
        teacher.means.copy_(torch.tensor([[0.1, 0.2, 0.3], [-0.3, 0.2, 0.1]]))
        teacher.deviations.copy_(torch.tensor([[1.1, 0.7, 1.3], [0.8, 1.2, 0.9]]))
    about: dict[str, Any] = {"precision": "float32", "compile": False, "batch": 4}
    about |= {"teacher": {"glance": 24, "meet": 32, "resident": "bfloat16"}}
    about |= {"data": {"resident": SIDE, "augment": "flip"}, "resolutions": [{"odds": {32: 1}}]}
    about |= {"model": {"size": "veca_tiny", "overrides": {"patch_size": 8}}}
    recipe = Recipe.from_dict(about)
    pixels = resident(squares)
    taught = Taught(pixels, TeacherRunner(teacher, recipe, World(0, 1, CPU), 8), torch.bfloat16, progress=False)
    assert taught.glimpses is not None
    assert taught.glimpses.shape == (len(squares), 4, 4, 3)
    facts = {"width": 3, "stride": 8, "parameters": 1, "pooled": True}
    plan = RunPlan(recipe, get_config("veca_tiny", patch_size=8), len(squares), 1, facts)
    kept = (pixels.images, taught.maps, taught.cls, taught.glimpses)
    assert plan.memory().resident == sum(tensor.nbytes for tensor in kept)
    options: Any = {"resolution_of": lambda f: 32, "batch": 12, "augment": "flip", "crops": (0.4, 1.0)}
    batch = ResidentBatches(pixels, taught=taught, **options).batch(0)
    assert batch.targets is not None
    views = views_of(0, batch.indices.tolist(), batch.views.tolist(), "flip")
    spans = np.rint(5 * np.interp(views.size, (0, 1), (0.4, 1.0))).astype(np.int64)
    left, top = (places(shares, 5 - spans) for shares in (views.across, views.down))
    for i, number in enumerate(batch.indices.tolist()):
        # In twentieths of a side a cell of the fine map is 4 wide, one of the coarse 5.
        fine = taught.glimpses[number].float().repeat_interleave(5, 0).repeat_interleave(5, 1)
        rows, columns = (slice(4 * at[i], 4 * (at[i] + spans[i])) for at in (top, left))
        mean = fine[rows, columns].mean((0, 1))
        if standardize:
            mean = (mean - teacher.means[0]) / teacher.deviations[0]
        torch.testing.assert_close(batch.targets.cls[i], mean, rtol=1e-2, atol=1e-2)


class Sparse(Blurry):
    """Silent in most cells, as a CNN."""

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = 5.0 * (super().features(images)[1] > 0.2)
        return found.mean((2, 3)), found


def test_a_second_look_loses_nothing_in_eight_bits_where_the_teacher_is_silent(squares: Pictures) -> None:
    own = Sparse()
    own.meet, own.glance = 32, 24
    teacher = Standardized(own)
    teacher.means[0], teacher.deviations[0] = 1.37, 0.11  # -12.45 is no number of eight bits
    lessons = TeacherRunner(teacher, Recipe.from_dict({"precision": "float32", "compile": False}), World(0, 1, CPU), 8)
    pixels, found = resident(squares), []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        taught = Taught(pixels, lessons, dtype, progress=False)
        batch = ResidentBatches(pixels, taught=taught, resolution_of=lambda f: 32, batch=12, augment="flip").batch(0)
        assert batch.targets is not None
        found.append(batch.targets.cls)
    assert found[0].std(0).min() > 1
    assert torch.equal(*found)


def test_a_teacher_with_a_global_feature_of_its_own_gives_that_of_the_whole(squares: Pictures) -> None:
    teacher = Blurry()
    teacher.pooled = False
    about = {"precision": "float32", "compile": False}
    lessons = TeacherRunner(teacher, Recipe.from_dict(about), World(0, 1, CPU), 8)
    pixels = resident(squares)
    taught = Taught(pixels, lessons, torch.bfloat16, short_side=5 / 3, progress=False)
    options: Any = {"resolution_of": lambda f: 24, "batch": 4, "short_side": 5 / 3, "augment": "flip"}
    batch = ResidentBatches(pixels, taught=taught, **options).batch(0)
    assert batch.targets is not None
    assert torch.equal(batch.targets.cls, taught.cls[batch.indices])


@pytest.mark.parametrize(
    ("resolution", "zoomed", "crops"),
    [(16, 40, None), (64, 40, None), (64, 80, None), (32, 40, None), (24, 40, (0.4, 1.0)), (64, 80, (0.6, 0.8))],
)
def test_views_of_other_sizes_and_resolutions(
    squares: Pictures, resolution: int, zoomed: int, crops: tuple[float, float] | None
) -> None:
    """They are what Pillow and `interpolate` make of the crop and of its cells."""
    teacher = Blurry()
    if zoomed != SIDE:
        teacher.meet = 64  # of a crop of 32 pixels, so the whole of 40 is seen with 80
    lessons = TeacherRunner(teacher, Recipe.from_dict({"precision": "float32", "compile": False}), World(0, 1, CPU), 8)
    pixels = resident(squares)
    taught = Taught(pixels, lessons, torch.bfloat16, progress=False)
    options: Any = {"resolution_of": lambda f: resolution, "batch": 12, "augment": "flip", "crops": crops}
    batch = ResidentBatches(pixels, taught=taught, **options).batch(0)
    assert batch.targets is not None
    views = views_of(0, batch.indices.tolist(), batch.views.tolist(), "flip")
    spans = [round(5 * (crops[0] + share * (crops[1] - crops[0]))) if crops else 4 for share in views.size.tolist()]
    assert len(set(spans)) >= (2 if crops else 1)
    for i, (number, span, flip) in enumerate(zip(batch.indices.tolist(), spans, views.flip, strict=True)):
        left, top = (int(places(shares, 5 - span)[i]) for shares in (views.across, views.down))
        image = Image.fromarray(pixels.images[number].permute(1, 2, 0).numpy())
        box = tuple(8 * cell for cell in (left, top, left + span, top + span))
        seen = image.resize((resolution, resolution), Image.Resampling.BICUBIC, box=box)
        expected = torch.from_numpy(np.asarray(seen).copy()).permute(2, 0, 1)
        assert torch.equal(batch.images[i], expected.flip(-1) if flip else expected)
        whole = normalized(pixels.images[number][None])
        if zoomed != SIDE:
            whole = F.interpolate(whole, (zoomed, zoomed), mode="bicubic", antialias=True)
        cells = F.interpolate(F.avg_pool2d(whole, 8), (5, 5), mode="bilinear", antialias=True)
        cells = cells[:, :, top : top + span, left : left + span]
        mapped = F.interpolate(cells, (resolution // 8,) * 2, mode="bilinear", antialias=True)
        patches = (mapped.flip(-1) if flip else mapped).flatten(2).mT[0]
        torch.testing.assert_close(batch.targets.patches[i].float(), patches, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data": {"augment": "colour"}}, "data.resident=None"),
        ({"data": {"resident": 280, "augment": "colour"}}, "multiple of 16"),
        ({"data": {"resident": 288}}, "moves pixels"),
        ({"data": {"resident": 288, "augment": "flip", "crops": [0.8]}}, "two shares"),
        ({"data": {"resident": 288, "augment": "flip", "crops": [0.8, 0.5]}}, "the smaller first"),
        ({"data": {"crops": [0.5, 0.8], "augment": "none"}}, "another with data.crops"),
        ({"data": {"resident": 288, "crops": [0.5, 1]}, "teacher": {"resident": None}}, "need teacher.resident"),
        (
            {"data": {"resident": 288, "augment": "flip", "views": 1}, "teacher": {"cache": "x"}},
            "leave teacher.cache out",
        ),
    ],
)
def test_recipes_that_cannot_be(changes: dict[str, Any], problem: str) -> None:
    teacher = {"resident": "float8", **changes.pop("teacher", {})}
    with pytest.raises(RecipeError, match=problem):
        Recipe.from_dict({"teacher": teacher, **changes})


@pytest.mark.gpu
def test_gpu_gives_the_same_pixels(squares: Pictures) -> None:
    options: Any = {"resolution_of": lambda f: 32, "batch": 8}
    kept = resident(squares, device=torch.device("cuda"))
    expected = next(iter(ResidentBatches(resident(squares), **options)))
    for compiled in (False, True):
        assert torch.equal(next(iter(ResidentBatches(kept, compile=compiled, **options))).images.cpu(), expected.images)
