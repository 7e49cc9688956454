from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sample_images import noise_image
from torch import Tensor

from veca.config import get_config
from veca.data.device_cache import DeviceImageCache, DeviceLoader
from veca.data.index import DataError, ImageIndex
from veca.data.loader import Batch, train_loader
from veca.data.sampler import TrainSampler, crop_offset, sample_transforms
from veca.images import MEAN, STD, normalize
from veca.teachers import Standardized, Teacher
from veca.train.objective import TeacherMaps, TeacherRunner
from veca.train.parallel import World
from veca.train.plan import RunPlan
from veca.train.recipe import Recipe, RecipeError

SIDE = 40
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> ImageIndex:
    """Noise has every value next to every other; the last file is no picture."""
    folder = tmp_path_factory.mktemp("squares")
    for i in range(9):
        noise_image(i, SIDE, SIDE).save(folder / f"{i}.png")
    (folder / "x.png").write_bytes(b"no picture")
    return ImageIndex.build([str(folder)], None, progress=False)


def cached(index: ImageIndex, side: int = SIDE, device: torch.device = CPU) -> DeviceImageCache:
    return DeviceImageCache(index, side, device, workers=0, max_pixels=10**6, progress=False)


def first_batch(cache: DeviceImageCache, targets: TeacherMaps | None = None, **options: Any) -> Batch:
    return next(iter(DeviceLoader(cache, TrainSampler(len(cache.images), **options), targets)))


def assert_close_pixels(found: Tensor, expected: Tensor, mean: float = 0.03) -> None:
    """Pillow computes in fixed point."""
    apart = (found.int() - expected.int()).abs()
    assert found.dtype == expected.dtype == torch.uint8
    assert apart.max() <= 2
    assert apart.float().mean() < mean


@pytest.mark.parametrize(
    ("resolution", "short_side", "more"),
    [
        (32, 1.125, {}),  # smaller
        (48, 1.125, {"augment": "flip"}),  # larger
        (40, 1.0, {"augment": "none"}),  # as it is
        (32, 1.125, {"augment": "colour"}),
        (16, 1.5, {"num_variants": 2, "start": 7, "rank": 1, "world_size": 2, "seed": 3}),
        (32, 1.125, {"crops": (0.3, 1.0)}),  # smaller and larger
    ],
)
def test_batches_are_those_of_the_loader_but_for_rounding(
    squares: ImageIndex, resolution: int, short_side: float, more: Any
) -> None:
    options = {"resolution_of": lambda f: resolution, "batch_size": 8, "short_side": short_side, **more}
    sampler = TrainSampler(len(squares), **options)
    with train_loader(squares, sampler, workers=0, where="gpu") as there:
        expected = [batch for batch, _ in zip(there, range(3), strict=False)]
    with DeviceLoader(cached(squares), sampler) as here:
        found = [batch for batch, _ in zip(here, range(3), strict=False)]
    assert any(batch.skipped for batch in found)
    for a, b in zip(found, expected, strict=True):
        assert_close_pixels(a.images, b.images)
        assert torch.equal(a.indices, b.indices)
        assert torch.equal(a.variants, b.variants)
        assert a.skipped == b.skipped
        if a.augmentation is None or b.augmentation is None:
            assert a.augmentation is b.augmentation
        else:
            assert all(map(torch.equal, a.augmentation, b.augmentation))


def test_other_pictures_are_kept_as_the_square_in_their_middle(tmp_path: Path) -> None:
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    kept = cached(ImageIndex.build([str(tmp_path)], None, progress=False), side=20)
    assert kept.images.shape == (1, 3, 20, 20)
    assert (kept.images == 200).all()


def test_nothing_but_bad_pictures(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"no picture")
    kept = cached(ImageIndex.build([str(tmp_path)], None, progress=False))
    with pytest.raises(DataError, match="in a row cannot be used"):
        first_batch(kept, resolution_of=lambda f: 32, batch_size=1)


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
    squares: ImageIndex, standardize: bool, kept: str, error: float
) -> None:
    about: dict[str, Any] = {"model": {"size": "veca_tiny"}, "precision": "float32", "compile": False, "batch": 4}
    teacher: Any = Blurry()
    if standardize:
        teacher = Standardized(teacher)
        teacher.means.copy_(torch.tensor([[0.1, 0.2, 0.3], [-0.3, 0.2, 0.1]]))
        teacher.deviations.copy_(torch.tensor([[1.1, 0.7, 1.3], [0.8, 1.2, 0.9]]))
    recipe = Recipe.from_dict({**about, "data": {"short_side": 5 / 3}})
    runner = TeacherRunner(teacher, recipe, World(0, 1, CPU), 8)
    pixels = cached(squares)
    dtype = torch.bfloat16 if kept == "bfloat16" else torch.float8_e4m3fn
    taught = TeacherMaps(pixels, runner, dtype, progress=False)
    about["model"]["overrides"] = {"patch_size": 8}
    about |= {"data": {"resident": SIDE, "augment": "colour"}, "teacher": {"resident": kept}}
    recipe = Recipe.from_dict({**about, "resolutions": [{"odds": {24: 1}}]})
    config = get_config("veca_tiny", patch_size=8)
    plan = RunPlan(recipe, config, len(squares), 1, {"width": 3, "stride": 8, "parameters": 1})
    tensors = (pixels.images, taught.maps, taught.cls)
    assert plan.memory()["resident"] == sum(tensor.nbytes for tensor in tensors)
    assert plan.teacher_flops() == 0
    options: Any = {"resolution_of": lambda f: 24, "batch_size": 16, "short_side": 5 / 3, "augment": "colour"}
    batch = first_batch(pixels, taught, **options)
    assert batch.targets is not None
    exact = runner.targets(normalize(batch.images))
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
def test_a_second_look_gives_the_mean_of_its_map_over_the_crop(squares: ImageIndex, standardize: bool) -> None:
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
    pixels = cached(squares)
    taught = TeacherMaps(pixels, TeacherRunner(teacher, recipe, World(0, 1, CPU), 8), torch.bfloat16, progress=False)
    assert taught.glimpses is not None
    assert taught.glimpses.shape == (len(squares), 4, 4, 3)
    facts = {"width": 3, "stride": 8, "parameters": 1, "pooled": True}
    plan = RunPlan(recipe, get_config("veca_tiny", patch_size=8), len(squares), 1, facts)
    kept = (pixels.images, taught.maps, taught.cls, taught.glimpses)
    assert plan.memory()["resident"] == sum(tensor.nbytes for tensor in kept)
    options: Any = {"resolution_of": lambda f: 32, "batch_size": 12, "augment": "flip", "crops": (0.4, 1.0)}
    batch = first_batch(pixels, taught, **options)
    assert batch.targets is not None
    views = sample_transforms(0, batch.indices.tolist(), batch.variants.tolist(), "flip")
    spans = np.rint(5 * np.interp(views.scale, (0, 1), (0.4, 1.0))).astype(np.int64)
    left, top = (crop_offset(shares, 5 - spans) for shares in (views.x, views.y))
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


def test_a_second_look_loses_nothing_in_eight_bits_where_the_teacher_is_silent(squares: ImageIndex) -> None:
    own = Sparse()
    own.meet, own.glance = 32, 24
    teacher = Standardized(own)
    teacher.means[0], teacher.deviations[0] = 1.37, 0.11  # -12.45 is no number of eight bits
    runner = TeacherRunner(teacher, Recipe.from_dict({"precision": "float32", "compile": False}), World(0, 1, CPU), 8)
    pixels, found = cached(squares), []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        taught = TeacherMaps(pixels, runner, dtype, progress=False)
        batch = first_batch(pixels, taught, resolution_of=lambda f: 32, batch_size=12, augment="flip")
        assert batch.targets is not None
        found.append(batch.targets.cls)
    assert found[0].std(0).min() > 1
    assert torch.equal(*found)


def test_a_teacher_with_a_global_feature_of_its_own_gives_that_of_the_whole(squares: ImageIndex) -> None:
    teacher = Blurry()
    teacher.pooled = False
    about = {"precision": "float32", "compile": False, "data": {"short_side": 5 / 3}}
    runner = TeacherRunner(teacher, Recipe.from_dict(about), World(0, 1, CPU), 8)
    pixels = cached(squares)
    taught = TeacherMaps(pixels, runner, torch.bfloat16, progress=False)
    options: Any = {"resolution_of": lambda f: 24, "batch_size": 4, "short_side": 5 / 3, "augment": "flip"}
    batch = first_batch(pixels, taught, **options)
    assert batch.targets is not None
    assert torch.equal(batch.targets.cls, taught.cls[batch.indices])


@pytest.mark.parametrize(
    ("resolution", "zoomed", "crops"),
    [(16, 40, None), (64, 40, None), (64, 80, None), (32, 40, None), (24, 40, (0.4, 1.0)), (64, 80, (0.6, 0.8))],
)
def test_views_of_other_sizes_and_resolutions(
    squares: ImageIndex, resolution: int, zoomed: int, crops: tuple[float, float] | None
) -> None:
    """They are what Pillow and `interpolate` make of the crop, by itself, and of its cells."""
    teacher = Blurry()
    if zoomed != SIDE:
        teacher.meet = 64  # of a crop of 32 pixels, so the whole of 40 is seen with 80
    runner = TeacherRunner(teacher, Recipe.from_dict({"precision": "float32", "compile": False}), World(0, 1, CPU), 8)
    pixels = cached(squares)
    taught = TeacherMaps(pixels, runner, torch.bfloat16, progress=False)
    options: Any = {"resolution_of": lambda f: resolution, "batch_size": 12, "augment": "flip", "crops": crops}
    batch = first_batch(pixels, taught, **options)
    assert batch.targets is not None
    views = sample_transforms(0, batch.indices.tolist(), batch.variants.tolist(), "flip")
    spans = [round(5 * (crops[0] + share * (crops[1] - crops[0]))) if crops else 4 for share in views.scale.tolist()]
    assert len(set(spans)) >= (2 if crops else 1)
    for i, (number, span, flip) in enumerate(zip(batch.indices.tolist(), spans, views.flip, strict=True)):
        left, top = (int(crop_offset(shares, 5 - span)[i]) for shares in (views.x, views.y))
        image = Image.fromarray(pixels.images[number].permute(1, 2, 0).numpy())
        box = tuple(8 * cell for cell in (left, top, left + span, top + span))
        seen = image.crop(box).resize((resolution, resolution), Image.Resampling.BICUBIC)
        expected = torch.from_numpy(np.asarray(seen).copy()).permute(2, 0, 1)
        assert_close_pixels(batch.images[i], expected.flip(-1) if flip else expected)
        whole = normalize(pixels.images[number][None])
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
    ],
)
def test_recipes_that_cannot_be(changes: dict[str, Any], problem: str) -> None:
    teacher = {"resident": "float8", **changes.pop("teacher", {})}
    with pytest.raises(RecipeError, match=problem):
        Recipe.from_dict({"teacher": teacher, **changes})


@pytest.mark.gpu
def test_a_gpu_gives_the_same_pixels_but_for_rounding(squares: ImageIndex) -> None:
    options: Any = {"resolution_of": lambda f: 32, "batch_size": 8}
    expected = first_batch(cached(squares), **options)
    found = first_batch(cached(squares, device=torch.device("cuda")), **options)
    assert_close_pixels(found.images.cpu(), expected.images, mean=0.3)  # in half precision
