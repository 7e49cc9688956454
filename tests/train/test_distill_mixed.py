"""Distillation with `data.aspect`: batches of mixed aspect ratios and resolutions, run as one pack."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import Place, assert_same_run, finish, start, table, train
from sample_images import smooth_image
from torch import Tensor

import veca
from veca.data.loader import plan_grid_crop
from veca.data.sampler import TransformParams
from veca.images import MEAN, STD
from veca.teachers import Targets, Teacher
from veca.train.distill import Distillation
from veca.train.objective import TeacherRunner
from veca.train.parallel import World
from veca.train.recipe import Recipe, RecipeError
from veca.train.student import Student
from veca.utils.signals import Interrupted

SIZES = (60, 44), (44, 60), (50, 50), (120, 40), (30, 70)
STEPS = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("mixed"))
    for i in range(20):
        (place.folder / "sizes").mkdir(exist_ok=True)
        smooth_image(i, *SIZES[i % len(SIZES)]).save(place.folder / f"sizes/{i:02}.png")
    return place


def mixed(place: Place, **changes: Any) -> Recipe:
    schedule = {"epochs": None, "steps": STEPS, "warmup": 2, "peak": 2e-3, "low": 1e-4}
    options = {"data__train": [str(place.folder / "sizes")], "data__aspect": [0.5, 2.0], "schedule": schedule}
    return place.recipe(**{**options, "data__augment": "trivial", "checkpoints__every": 2, **changes})


def test_crops_are_not_squashed() -> None:
    params = TransformParams(0.3, 0.9, False, 0.5, 0, 0.0)
    for size in ((176, 368), (256, 256), (368, 176)):
        for width, height in ((640, 480), (480, 640), (3000, 500)):
            crop = plan_grid_crop(width, height, params, size, 1.125)
            left, top, right, bottom = crop.box
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            assert (right - left) / crop.columns == pytest.approx((bottom - top) / crop.rows, rel=0.01)


def test_the_loss_of_a_pack_is_the_mean_over_its_images() -> None:
    torch.manual_seed(0)
    recipe = Recipe.from_dict(
        {
            "model": {"size": "veca_tiny", "overrides": {"embed_dim": 32, "depth": 2, "num_heads": 1}},
            "compile": False,
            "objective": {"cls_weight": 0.7, "mse_weight": 2.0},
        }
    )
    student = Student(veca.Veca(recipe.model.config()), recipe).double().train()
    groups = [torch.randn(n, 3, *size, dtype=torch.double) for n, size in ((2, (32, 64)), (1, (48, 32)), (3, (16, 80)))]
    targets = [
        Targets(
            *(torch.randn(shape, dtype=torch.double) for shape in ((len(x), 32), (len(x), x[0, 0].numel() // 256, 32)))
        )
        for x in groups
    ]

    def run(images: Any, target: Any) -> Any:
        torch.manual_seed(1)  # coordinates are augmented
        return student(images, (8, 1.0), target)

    single = [
        run(x[i : i + 1], Targets(t.cls[i : i + 1], t.patches[i : i + 1]))
        for x, t in zip(groups, targets, strict=True)
        for i in range(len(x))
    ]
    packed = run(groups, targets)
    for name, value in packed.values().items():
        torch.testing.assert_close(value, torch.stack([getattr(each, name) for each in single]).mean())
    weights = list(student.model.blocks.parameters())
    ours = torch.autograd.grad(packed.total, weights)
    alone = torch.autograd.grad(torch.stack([each.total for each in single]).mean(), weights)
    for a, b in zip(ours, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_batches_have_mixed_shapes_near_those_of_their_images(place: Place, tmp_path: Path) -> None:
    run = Distillation(mixed(place), tmp_path, World(0, 1, torch.device("cpu")), say=lambda text: None)
    shapes = set()
    with run.batches() as passes:
        iterator = iter(passes)
        for _ in range(4):
            images, targets, _ = next(iterator)
            assert sum(map(len, images)) == 8
            for group, target in zip(images, targets, strict=True):
                rows, columns = group.shape[2] // 16, group.shape[3] // 16
                assert target.patches.shape[:2] == (len(group), rows * columns)
                assert rows * columns <= 9
                shapes.add((rows, columns))
    assert {(2, 2), (3, 3), (2, 4), (4, 2)} <= shapes, "squares, wide and tall ones, at two resolutions"


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_run_is_the_same_resumed_and_in_two_processes(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(mixed(place), tmp_path / "whole")
    step = Distillation.train_step

    def stop(self: Distillation, batches: Any) -> None:
        if self.step == 4:
            signal.raise_signal(signal.SIGTERM)
        step(self, batches)

    monkeypatch.setattr(Distillation, "train_step", stop)
    with pytest.raises(Interrupted):
        train(mixed(place), tmp_path / "again")
    monkeypatch.undo()
    train(mixed(place, data__workers=1), tmp_path / "again")
    assert_same_run(tmp_path / "again", tmp_path / "whole")
    assert finish(start(mixed(place), tmp_path / "pair", 2)) == [0, 0]
    for file in ("metrics.csv", "validation.csv"):
        ours, theirs = table(tmp_path / "pair" / file), table(tmp_path / "whole" / file)
        for a, b in zip(ours, theirs, strict=True):
            assert {k: float(v) for k, v in a.items()} == pytest.approx({k: float(v) for k, v in b.items()}, rel=1e-3)


class SquareTeacher(Teacher):
    """As a ViT whose position embedding has one size."""

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        assert images.shape[-2:] == (32, 32), "input height and width do not match the model"
        return images.mean((2, 3)), F.avg_pool2d(images, 16)


def test_a_teacher_of_squares_is_refused(place: Place) -> None:
    teacher = SquareTeacher(3, 16, MEAN, STD, raw=True)
    runner = TeacherRunner(teacher, mixed(place), World(0, 1, torch.device("cpu")), 16)
    with pytest.raises(RecipeError, match=r"data.aspect=\[0.5, 2.0\]: unnamed cannot take an image of .* do not match"):
        runner.check_rectangles((0.5, 2.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": True}, "compile=True: must be false with data.aspect"),
        ({"data__mixup": 0.2}, "data.mixup=0.2: must be 0 with data.aspect"),
        ({"data__resident": 64}, "data.resident=64: must be null with data.aspect"),
        ({"data__aspect": [2, 0.5]}, r"data.aspect=\[2, 0.5\]: must be null, or two numbers from 0.1 to 10"),
    ],
)
def test_keys_that_do_not_go_together(place: Place, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        mixed(place, **changes)
