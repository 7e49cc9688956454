from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sample_images import noise_image
from torch import Tensor, nn

import veca
from veca.data.index import DataError, ImageIndex
from veca.images import MEAN, STD
from veca.teachers import Standardized, Targets, Teacher
from veca.train.distill import Distillation
from veca.train.engine import SkippedSteps, TrainingError
from veca.train.objective import TeacherRunner
from veca.train.optimizers import Ema
from veca.train.parallel import World
from veca.train.recipe import Recipe
from veca.utils.signals import Interrupted, deferred_signals

CPU = World(0, 1, torch.device("cpu"))


def test_watch_counts_what_is_skipped_and_the_longest_row() -> None:
    watch = SkippedSteps(torch.device("cpu"), total=4)
    for skip in (0, 1, 1, 0, 1):
        watch.update(torch.tensor(float(skip)))
    assert watch.read() == (7, 2)


def test_ema_is_the_running_mean_and_is_put_aside_again() -> None:
    model = nn.Linear(2, 1)
    ema = Ema(model, 0.9)
    expected = model.weight.detach().clone()
    for _ in range(3):
        with torch.no_grad():
            model.weight += 1
        ema.update(torch.tensor(0.0))
        expected = 0.9 * expected + 0.1 * model.weight.detach()
    now = model.weight.detach().clone()
    with ema.swapped_in():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight, now)
    ema.update(torch.tensor(1.0))  # a step that is skipped
    torch.testing.assert_close(dict(ema.named())["weight"], expected)
    ema.update(torch.tensor(0.0))  # what was in place was a copy
    torch.testing.assert_close(dict(ema.named())["weight"], 0.9 * expected + 0.1 * now)


def test_no_ema_is_the_model_itself() -> None:
    model = nn.Linear(2, 1)
    ema = Ema(model, None)
    ema.update(torch.tensor(0.0))
    with ema.swapped_in():
        assert not list(ema.named())


def test_a_signal_that_comes_twice_is_one_and_a_later_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Distillation.__new__(Distillation)
    trainer.stop_signal, trainer.preparing = 0, False
    with deferred_signals(trainer._on_signal):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert trainer.stop_signal == signal.SIGTERM
        monkeypatch.setattr("veca.utils.signals.IMPATIENT", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Colours(Teacher):
    """The mean colour, of so many pictures at a time."""

    def __init__(self) -> None:
        super().__init__(3, 16, MEAN, STD, raw=True)
        self.seen: list[int] = []

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(len(images))
        return images.mean((2, 3)), F.avg_pool2d(images, 16)


class Counting(nn.Module):
    """A teacher that says how many pictures it was shown at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, images: Tensor, grid: tuple[int, int], zoom: float = 1.0) -> Targets:
        self.seen.append(len(images))
        return Targets(images.mean((2, 3)), images.new_zeros(len(images), grid[0] * grid[1], 3))


@pytest.mark.parametrize(("size", "shown"), [(32, [6, 4]), (48, [4, 4, 2]), (64, [4, 4, 2]), (80, [2, 2, 2, 2, 2])])
def test_the_teacher_takes_fewer_pictures_at_higher_resolutions(size: int, shown: list[int]) -> None:
    images = torch.randn(10, 3, size, size)
    for compiled in (False, True):
        about = {"teacher": {"micro_batch": {32: 6, 64: 4, 96: 2}}, "precision": "float32", "compile": compiled}
        teacher = Counting()
        targets = TeacherRunner(teacher, Recipe.from_dict(about), CPU, 16).targets(images)  # type: ignore[arg-type]
        # A compiled one is shown as many each time, or it would be compiled again.
        assert teacher.seen == ([shown[0]] * len(shown) if compiled else shown)
        assert targets.patches.shape == (10, (size // 16) ** 2, 3)
        torch.testing.assert_close(targets.cls, images.mean((2, 3)))


def small_recipe(folder: Path, steps: int, **more: Any) -> Recipe:
    for i in range(16):
        noise_image(i, 96, 80).save(folder / f"{i}.png")
    return Recipe.from_dict(
        {
            "model": {"size": "veca_tiny", "overrides": {"depth": 2}},
            "teacher": {"name": "efficientnet-lite2"},
            "data": {"train": [str(folder)], "workers": 2},
            "schedule": {"epochs": None, "steps": steps, "warmup": 4},
            "resolutions": [{"odds": {64: 1}}],
            "batch": 8,
            **more,
        }
    )


@pytest.mark.gpu
def test_gpu_stops_saves_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder, world = small_recipe(tmp_path, steps=5), tmp_path / "run", World(0, 1, torch.device("cuda", 0))
    step = Distillation.train_step

    def then_stop(trainer: Distillation, batches: Any) -> None:
        step(trainer, batches)
        if trainer.step == 3:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Distillation, "train_step", then_stop)
        with pytest.raises(Interrupted):
            Distillation(recipe, folder, world).run()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000003"]
    going_on = Distillation(recipe, folder, world)
    assert going_on.step == 3
    assert going_on.run().is_file()
    assert veca.load(folder).provenance["step"] == 5


@pytest.mark.gpu
def test_gpu_passes_ahead_of_the_student_have_the_targets_of_their_images(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, steps=20, resolutions=[{"odds": {64: 1, 96: 1}}])
    trainer = Distillation(recipe, tmp_path / "run", World(0, 1, torch.device("cuda", 0)))
    runner = trainer.runner
    with trainer.batches() as passes:
        for images, targets, _ in itertools.islice(passes, 16):
            passes.prefetch()
            again = runner.targets(images)  # as validation does, while the next pass is under way
            with runner.autocast():
                expected = trainer.teacher(images, (images.shape[-1] // 16,) * 2)
            for one, two, other in zip(targets, again, expected, strict=True):
                assert torch.equal(one, other)
                assert torch.equal(two, other)
    assert len(runner._graphs) == 2
    assert all(runner._graphs.values())


class Waiting(Colours):
    """A teacher that waits for the device, which a CUDA graph cannot."""

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(images * (1 + 0 * images[0, 0, 0, 0].item()))


@pytest.mark.gpu
def test_gpu_a_teacher_that_no_graph_can_record_runs_without() -> None:
    recipe, world = Recipe.from_dict({"precision": "float32", "compile": True}), World(0, 1, torch.device("cuda", 0))
    images = torch.randn(8, 3, 64, 64, device="cuda")
    for teacher, recorded in ((Waiting(), False), (Colours(), True)):
        runner = TeacherRunner(teacher.cuda(), recipe, world, 16)
        for _ in range(5):
            targets = runner.targets(images)
            assert torch.equal(targets.cls, teacher(images, (4, 4)).cls)
        assert [bool(graph) for graph in runner._graphs.values()] == [recorded]


def test_no_memory_names_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 406 MiB, another process has 30 GiB")

    recipe = small_recipe(tmp_path, steps=5, accumulate=2)
    monkeypatch.setattr(Distillation, "train_step", full)
    way = "no memory on cpu for 4 images per pass at .* px .* at step 0; set accumulate=4, or grad_.*another process"
    with pytest.raises(TrainingError, match=way):
        Distillation(recipe, tmp_path / "run", CPU).run()


@pytest.mark.parametrize("where", ["open_crop", "to_model_input"])
def test_a_signal_before_the_first_step_is_done_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    more: dict[str, Any] = {"teacher": {"name": "efficientnet-lite2", "standardize": False}}
    recipe = small_recipe(
        tmp_path, steps=5, **more, data={"train": [str(tmp_path)], "workers": 0, "resident": 64, "augment": "flip"}
    )
    place = "veca.data.loader.open_crop" if where == "open_crop" else "veca.train.objective.to_model_input"
    monkeypatch.setattr(place, lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(TeacherRunner, "targets", lambda *_: pytest.fail("went on to train"))
    with pytest.raises(Interrupted):
        Distillation(recipe, tmp_path / "run", CPU).run()


def test_validation_pictures_that_cannot_be_used_are_not_the_best_there_is(tmp_path: Path) -> None:
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation/x.png").write_bytes(b"no picture")
    pictures = {"train": [str(tmp_path / "*.png")], "validation": [str(tmp_path / "validation")], "workers": 0}
    recipe = small_recipe(
        tmp_path, steps=5, data=pictures, teacher={"name": "efficientnet-lite2", "standardize": False}
    )
    with pytest.raises(DataError, match="none of its 1 pictures can be used: .*x.png, not one of"):
        Distillation(recipe, tmp_path / "run", CPU).run()
    assert not (tmp_path / "run/best").exists()


@pytest.mark.parametrize(
    ("few", "validation", "seen"), [(4, 0, [3, 3, 3, 3, 3, 1]), (4, 3, [3, 3, 3, 3, 3, 3, 1]), (4, 4, [3, 1])]
)
def test_statistics_are_of_enough_pictures_and_the_teacher_sees_as_many_at_a_time_as_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int, validation: int, seen: list[int]
) -> None:
    monkeypatch.setattr("veca.train.objective.MIN_VALIDATION_IMAGES", few)
    more: dict[str, Any] = {"teacher": {"name": "efficientnet-lite2", "micro_batch": 3}}
    recipe = small_recipe(tmp_path, steps=5, **more, data={"train": [str(tmp_path)], "workers": 0})
    pictures, own = ImageIndex.build([str(tmp_path)], None, progress=False), Colours()
    chosen = [str(tmp_path / f"{i}.png") for i in range(validation)]
    held_out = ImageIndex.build(chosen, None, progress=False) if validation else None
    TeacherRunner(Standardized(own), recipe, CPU, 16).fit_statistics(pictures, held_out)
    assert own.seen == seen


@pytest.mark.gpu
def test_gpu_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, steps=200, resolutions=[{"odds": {64: 1, 96: 1}}])
    trainer = Distillation(recipe, tmp_path / "run", World(0, 1, torch.device("cuda", 0)))
    with trainer.batches() as passes:
        passes.batches = list(itertools.islice(passes.batches, 40))  # the thread of the loader waits, as it should
        batches = iter(passes)
        for _ in range(24):  # every budget and resolution compiles and warms up
            trainer.train_step(batches)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(8):
                trainer.train_step(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    values = trainer.meter.values()
    assert values["nonfinite"] == 0
    assert trainer.skipped_steps.read() == (0, 0)
