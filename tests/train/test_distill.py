"""A run from the first step to the last: what it learns, what it leaves, what it refuses."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import resource
import shutil
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import STEPS, Place, Process, assert_same_run, copy_run, different, finish, start, table, tensors, train
from safetensors.torch import load_file

import veca
import veca.checkpoint.format
from veca.images import MEAN, STD
from veca.teachers import Targets, Teacher, TeacherError
from veca.teachers.outputs import attach_classifier
from veca.train import checkpoints
from veca.train.checkpoints import list_checkpoints
from veca.train.engine import TrainingError, draw
from veca.train.objective import distillation_losses
from veca.train.parallel import processes
from veca.train.recipe import RecipeError
from veca.train.student import Student

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")

LOSSES = ("total", "cls", "dense", "cosine", "mse", "gradient_norm")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def done(place: Place) -> Path:
    """A run that is over. Tests that change it take a copy."""
    train(place.recipe(), folder := place.folder / "done")
    return folder


def step_of(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """All checkpoints of a run by step."""
    return {int(path.name.removeprefix("step-")): tensors(path) for path in list_checkpoints(folder / "checkpoints")}


def assert_close(found: Path, expected: Path) -> None:
    """Every loss and norm of two runs to 1e-5, and the same draws."""
    for name in ("metrics.csv", "validation.csv"):
        ours, theirs = table(found / name), table(expected / name)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                bound = 1e-5 * max(1, abs(float(b[key]))) if key in LOSSES else 0
                assert abs(float(a[key]) - float(b[key])) <= bound, (name, key, a, b)


def command(place: Place, *arguments: object, log: Path) -> tuple[int, str]:
    """Exit status and output of `veca ARGUMENTS`."""
    process = Process(*arguments, log=log)
    return process.wait(), process.text()


# What it learns


def test_the_student_learns_its_teacher(done: Path) -> None:
    totals = [float(row["total"]) for row in table(done / "metrics.csv")]
    assert totals[-1] < 0.5 * totals[0]
    assert float(table(done / "validation.csv")[-1]["total"]) < float(table(done / "validation.csv")[0]["total"])
    assert "<svg" in (done / "report.html").read_text()


def test_draws_are_those_of_the_seed(place: Place, done: Path) -> None:
    recipe, rows = place.recipe(), table(done / "metrics.csv")
    for name, odds in (("budget", recipe.budgets), ("resolution", recipe.odds_at(0))):
        drawn = [draw(odds, name, recipe.seed, step) for step in range(STEPS)]
        for row, first, last in zip(rows, range(0, STEPS, 5), [*range(5, STEPS, 5), STEPS], strict=True):
            assert {key: int(row[f"{name}_{key}"]) for key in odds} == {k: drawn[first:last].count(k) for k in odds}
        shares = Counter(draw(odds, name, recipe.seed, step) for step in range(4000))
        for key, odd in odds.items():
            assert abs(shares[key] / 4000 - odd / sum(odds.values())) < 0.03


@pytest.mark.parametrize("processes", [1, 2])
def test_a_student_is_made_elastic_before_it_learns(place: Place, done: Path, tmp_path: Path, processes: int) -> None:
    """After a step at next to no rate its features are still those it began with, its channels are in order."""
    recipe = place.recipe(
        model__start=str(done), model__elastic=[0.5, 1], weight_decay=0.0, ema=None,
        schedule={"epochs": None, "steps": 1, "warmup": 0, "peak": 1e-9, "low": 1e-9},
    )  # fmt: skip
    run = start(recipe, tmp_path / "run", processes)
    assert finish(run) == [0] * processes, run[0].text()
    before, after, images = veca.load(done), veca.load(tmp_path / "run"), torch.randn(2, 3, 48, 48)
    assert after.config.widths == (0.5, 1.0)
    torch.testing.assert_close(after(images).patches, before(images).patches, rtol=1e-4, atol=1e-4)
    weights = [(model.blocks[0].mlp.fc2.weight.detach()) for model in (before, after)]
    assert not torch.allclose(*weights, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*(weight.sort(dim=1).values for weight in weights), rtol=1e-4, atol=1e-5)
    with pytest.raises(RecipeError, match=r"is another model \(widths: \(0.5, 1.0\), not \(1.0,\)\)"):
        train(place.recipe(model__start=str(tmp_path / "run")), tmp_path / "other")


def test_the_largest_setting_teaches_the_others(place: Place) -> None:
    """Its features are targets without a gradient, on the same images and coordinates; itself it learns as before."""
    wide = {"embed_dim": 32, "depth": 2, "num_heads": 1, "mlp_ratio": 8.0, "widths": [0.25, 1], "output_dim": 32}
    recipes = [place.recipe(model__overrides=wide, widths={"match": weight}) for weight in (0.0, 0.5)]
    model = veca.Veca(recipes[0].model.config()).train()
    plain, matched = (Student(model, recipe) for recipe in recipes)
    images, targets = torch.randn(2, 3, 32, 48), Targets(torch.randn(2, 32), torch.randn(2, 6, 32))

    def run(call: Any) -> Any:
        torch.manual_seed(3)
        return call()

    for setting, extra in (((8, 0.25), True), ((64, 1.0), False)):
        without, found = (run(lambda s=s: s(images, setting, targets)) for s in (plain, matched))  # noqa: B023
        larger, own = run(lambda: model(images, 64)), run(lambda: model(images, setting[0], width=setting[1]))  # noqa: B023
        match = distillation_losses(own.cls, own.patches, larger.cls.detach(), larger.patches.detach()).total
        expected = without.total + 0.5 * match * extra
        torch.testing.assert_close(found.total, expected)
        grads = [torch.autograd.grad(total, list(model.blocks.parameters())) for total in (found.total, expected)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)
        torch.testing.assert_close(found.cls, without.cls, rtol=0, atol=0)


@pytest.mark.parametrize(("parallel", "passes"), [("ddp", 1), ("ddp", 2), ("fsdp", 1)])
def test_two_processes_do_what_one_does(place: Place, done: Path, tmp_path: Path, parallel: str, passes: int) -> None:
    run = start(place.recipe(accumulate=passes, parallel=parallel), tmp_path / "run", 2)
    assert finish(run) == [0, 0], run[0].text()
    assert_close(tmp_path / "run", done)
    found, expected = step_of(tmp_path / "run")[STEPS], step_of(done)[STEPS]
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-4), name


def test_mixed_images_are_the_same_for_any_number_of_processes_and_passes(place: Place, tmp_path: Path) -> None:
    recipes = [place.recipe(data__mixup=1.0, data__cutmix=1.0, schedule__steps=8, accumulate=n) for n in (1, 2, 1)]
    train(recipes[0], tmp_path / "one")
    train(recipes[1], tmp_path / "two passes")
    run = start(recipes[2], tmp_path / "two processes", 2)
    assert finish(run) == [0, 0], run[0].text()
    for name in ("two passes", "two processes"):
        assert_close(tmp_path / name, tmp_path / "one")


def test_two_passes_do_what_one_does(place: Place, done: Path, tmp_path: Path) -> None:
    train(place.recipe(accumulate=2, validation__batch=8), tmp_path / "run")
    assert_close(tmp_path / "run", done)


@pytest.mark.parametrize(("processes", "parallel"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_cores_beyond_all_budgets_never_move(place: Place, tmp_path: Path, processes: int, parallel: str) -> None:
    """No gradient, no decay, no momentum: not even in steps after one in which others had some."""
    recipe = place.recipe(
        budgets={8: 1, 16: 1, 64: 0}, parallel=parallel, weight_decay=0.5, validation__every=99,
        schedule={"epochs": None, "steps": 8, "warmup": 0, "peak": 0.01}, checkpoints={"every": 1, "keep": 99},
    )  # fmt: skip
    assert finish(start(recipe, tmp_path / "run", processes)) == [0] * processes
    steps = step_of(tmp_path / "run")
    for name in (f"model: {bank}.{chunk}" for bank in ("cores", "core_states") for chunk in range(8)):
        moved = [s for s in range(2, 9) if not torch.equal(steps[s][name], steps[1][name])]
        kept = [key for key in steps[8] if key.startswith(f"optimizers: adamw/{name.removeprefix('model: ')}/")]
        if name.endswith((".0", ".1")):
            assert moved, name
            assert kept, name
        else:
            assert (moved, kept) == ([], []), name
    drawn = [draw(recipe.budgets, "budget", recipe.seed, s) for s in range(8)]
    small = [s + 1 for s in range(1, 8) if drawn[s] == 8]
    assert small
    for step in small:
        assert torch.equal(steps[step]["model: cores.1"], steps[step - 1]["model: cores.1"])


# What it leaves


def test_the_saved_model_is_the_moving_average(place: Place, done: Path) -> None:
    last, handed = step_of(done)[STEPS], load_file(done / "model.safetensors")
    assert all(torch.equal(handed[name], last[f"ema: {name}"]) for name in handed)
    assert not any(
        torch.equal(handed[f"blocks.{i}.mlp.fc1.weight"], last[f"model: blocks.{i}.mlp.fc1.weight"]) for i in (0, 1)
    )


def test_the_moving_average_follows_its_definition(place: Place, tmp_path: Path) -> None:
    recipe = place.recipe(schedule={"epochs": None, "steps": 6, "warmup": 1}, checkpoints={"every": 1, "keep": 99})
    train(recipe, tmp_path / "run")
    steps = step_of(tmp_path / "run")
    for name in ("cores.0", "blocks.0.attn.qkv.weight", "norm.bias"):
        for step in range(2, 7):
            expected = 0.9 * steps[step - 1][f"ema: {name}"] + 0.1 * steps[step][f"model: {name}"]
            assert torch.allclose(steps[step][f"ema: {name}"], expected, atol=1e-6)


def test_best_has_the_lowest_validation_loss(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here not the last: the teacher turns round in the third step, of three calls each after two before the first."""
    poison(monkeypatch, *range(9, 99), value=-3)
    schedule = {"epochs": None, "steps": 5, "warmup": 0}
    train(
        place.recipe(schedule=schedule, validation__every=1, ema=None, checkpoints={"every": 1, "keep": 9}),
        tmp_path / "run",
    )
    means: dict[int, float] = Counter()
    for row in table(tmp_path / "run/validation.csv"):
        means[int(row["step"])] += float(row["total"]) / 4
    best = min(means, key=means.__getitem__)
    assert best == 2
    model = veca.load(tmp_path / "run/best")
    assert model.provenance["step"] == best
    assert model.provenance["validation"] == pytest.approx(means[best], rel=1e-6)
    weights = step_of(tmp_path / "run")[best]
    assert all(torch.equal(tensor, weights[f"model: {name}"]) for name, tensor in model.state_dict().items())


def test_weights_can_be_loaded_from_everywhere(place: Place, done: Path, tmp_path: Path) -> None:
    for folder in (done, done / "best", *list_checkpoints(done / "checkpoints")):
        model = veca.load(folder)
        assert model.config.embed_dim == 32
        assert model(torch.zeros(1, 3, 32, 48), 8).patches.shape == (1, 6, 32)
        assert model.provenance["weights"] == "distilled"
    status, text = command(place, "info", "--model", done, "--json", log=tmp_path / "log")
    assert status == 0
    provenance = json.loads(text)["provenance"]
    assert provenance["step"] == STEPS
    assert provenance["images"] == 8 * STEPS
    assert provenance["recipe"]["teacher"]["name"] == str(place.folder / "teacher")
    status, text = command(place, "info", "--model", done, log=tmp_path / "shown")
    assert status == 0
    assert "distilled" in text
    assert "teacher" in text


@pytest.mark.parametrize("keep", [1, 2])
def test_as_many_checkpoints_stay_as_asked(place: Place, tmp_path: Path, keep: int) -> None:
    schedule = {"epochs": None, "steps": 7, "warmup": 1}
    train(place.recipe(schedule=schedule, checkpoints={"every": 2, "keep": keep}), tmp_path / "run")
    assert list(step_of(tmp_path / "run")) == [4, 6, 7][-keep:]


def test_the_recipe_and_the_split_are_beside_it(place: Place, done: Path) -> None:
    from veca.train.recipe import load_recipe

    assert load_recipe(done / "recipe.yaml") == place.recipe()
    split = json.loads((done / "split.json").read_text())
    assert sorted(name for names in split.values() for name in names) == sorted(load_file(done / "model.safetensors"))


def test_pictures_that_cannot_be_read_are_named_once_and_counted(done: Path) -> None:
    events = (done / "events.txt").read_text()
    assert len(re.findall(r"corrupt: .*17.png, damaged", events)) == 1
    assert json.loads((done / "summary.json").read_text())["corrupt"] == 7  # once in each of the seven epochs begun


def test_a_damaged_shard_is_named_at_the_start(place: Place, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for path in sorted((place.folder / "photos").iterdir())[:8]:
            tar.add(path, path.name)
    whole = (tmp_path / "s.tar").read_bytes()
    (tmp_path / "s.tar").write_bytes(whole[: len(whole) // 3])
    recipe = place.recipe(data__train=[str(tmp_path / "s.tar")], schedule__steps=2, schedule__warmup=1, batch=2)
    train(recipe, tmp_path / "run")
    events = (tmp_path / "run/events.txt").read_text()
    assert events.count(f"unusable: {tmp_path / 's.tar'}, damaged archive") == 1


# Steps that are no good


def poison(monkeypatch: pytest.MonkeyPatch, *calls: int, value: float = float("nan")) -> None:
    """Have the teacher give such numbers in these of its calls, from 1."""
    forward, count = Teacher.forward, 0

    def poisoned(self: Teacher, images: torch.Tensor, grid: tuple[int, int], zoom: float = 1.0) -> Targets:
        nonlocal count
        count += 1
        cls, patches = forward(self, images, grid, zoom)
        return Targets(cls * value, patches * value) if count in calls else Targets(cls, patches)

    monkeypatch.setattr(Teacher, "forward", poisoned)


def every_step(place: Place, **changes: Any) -> Any:
    return place.recipe(
        checkpoints={"every": 1, "keep": 99}, schedule={"epochs": None, "steps": 10, "warmup": 1},
        data__validation=[], log_every=3, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_without_a_finite_loss_is_skipped(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    poison(monkeypatch, 1, 5, 8, value=value)  # the first too, when the optimizers hold nothing yet
    train(every_step(place), tmp_path / "run")
    steps = step_of(tmp_path / "run")
    for bad in (5, 8):
        changed = different(steps[bad], steps[bad - 1])
        assert [name for name in changed if not name.startswith("ema: ")] == []
        assert any(name.startswith("model: ") for name in different(steps[bad + 1], steps[bad]))
    assert all(bool(tensor.isfinite().all()) for tensor in steps[10].values())
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["skipped"] == 3
    rows = table(tmp_path / "run/metrics.csv")
    assert [row["nonfinite"] for row in rows] == ["1", "1", "1", "0"]
    assert all(float(row["total"]) > 0 for row in rows)
    assert "skipped: 1 steps without a finite loss" in (tmp_path / "run/events.txt").read_text()


def test_the_count_of_skipped_steps_is_kept(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        poison(patch, 2, 4)
        train(every_step(place), tmp_path / "run")
    for step in range(7, 11):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:08d}")
    train(every_step(place), tmp_path / "run")
    assert json.loads((tmp_path / "run/summary.json").read_text())["skipped"] == 2


@pytest.mark.parametrize("processes", [1, 2])
def test_three_in_a_row_end_it(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    """With what is known to be good, and a way out that works. One process alone sees what is bad in it."""
    recipe = every_step(place)
    run = start(recipe, tmp_path / "run", processes, before=lambda: poison(monkeypatch, 2, 3, 5, 6, 7))
    assert finish(run) == [1] * processes
    text = run[0].text()
    assert "error: 3 steps in a row had no finite gradient" in text
    assert "5 in all" in text
    assert "schedule.peak" in text
    assert "Traceback" not in text
    steps = step_of(tmp_path / "run")
    assert different(steps[max(steps)], steps[4]) == []
    ways_out: list[dict[str, Any]] = [{"schedule__peak": 1e-4}, {"precision": "bfloat16"}]
    for way_out in ways_out:
        folder = copy_run(tmp_path / "run", tmp_path / next(iter(way_out)))
        train(every_step(place, **way_out), folder)
        assert max(step_of(folder)) == 10


# A disk that is full


def full(monkeypatch: pytest.MonkeyPatch, module: Any, *calls: int) -> None:
    """Have the disk take no more than a kilobyte in these of the files of tensors that are written, from 1."""
    write, count = module.write_tensors, 0

    def limited(*arguments: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024 if count in calls else soft, hard))
        try:
            write(*arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(module, "write_tensors", limited)


@pytest.mark.filterwarnings("ignore:the log waits", "ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_does_not_end_it(place: Place, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full(monkeypatch, checkpoints, 4, 5)  # of three for each checkpoint: the second one's first, the next one's first
    full(monkeypatch, veca.checkpoint.format, 2)  # the first are of step 0
    train(place.recipe(), tmp_path / "run")
    events = (tmp_path / "run/events.txt").read_text()
    assert "unsaved: checkpoint at step 8: File too large" in events
    assert "unsaved: checkpoint at step 12: File too large" in events
    assert "unsaved: best weights, at step 8: File too large" in events
    assert "checkpoint: step 16" in events
    assert_same_run(tmp_path / "run", done)


def test_no_room_for_the_last_checkpoint_is_an_error(
    place: Place, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        full(patch, checkpoints, 22)
        with pytest.raises(TrainingError, match="cannot be written .File too large.; its weights are in") as caught:
            train(place.recipe(), tmp_path / "run")
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EFBIG
    assert max(step_of(tmp_path / "run")) == STEPS - 4
    assert different(tensors(tmp_path / "run"), tensors(done)) == []
    train(place.recipe(), tmp_path / "run")
    assert_same_run(tmp_path / "run", done)


# Another recipe in the same folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 2}, "seed: 1, now 2"),
        ({"weight_decay": 0.1}, "weight_decay: 0.015, now 0.1"),
        ({"budgets": {8: 1, 16: 1, 64: 3}}, r"budgets.64: 2.*, now 3"),
        ({"model__overrides__depth": 3}, "model.overrides.depth: 2, now 3"),
        ({"data__augment": "flip"}, "data.augment: 'trivial', now 'flip'"),
        ({"ema": None}, "ema: 0.9, now None"),
    ],
)
def test_a_change_that_matters_is_refused(
    place: Place, done: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    with pytest.raises(RecipeError, match=rf"another recipe \({message}\).*--out, or --overwrite"):
        train(place.recipe(**changes), done)
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before


def test_a_change_that_does_not_matter_is_taken(place: Place, done: Path, tmp_path: Path) -> None:
    folder = copy_run(done, tmp_path / "run")
    for step in (28, 32):
        shutil.rmtree(folder / f"checkpoints/step-{step:08d}")
    train(place.recipe(data__workers=1, log_every=4, checkpoints__keep=9, teacher__micro_batch=3), folder)
    assert different(step_of(folder)[STEPS], step_of(done)[STEPS]) == []


def test_other_pictures_are_refused(place: Place, done: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    shutil.copytree(place.folder / "photos", photos)
    recipe = place.recipe(data__train=[str(photos)], schedule={"epochs": None, "steps": 2, "warmup": 1})
    train(recipe, tmp_path / "run")
    os.remove(photos / "03.png")
    with pytest.raises(
        RecipeError, match="data.train: these are not the pictures .*--overwrite, .*model.start=.*/best"
    ):
        train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "run", restart=True)


def test_a_restart_begins_from_step_zero(place: Place, done: Path, tmp_path: Path) -> None:
    """And a run that was killed after it continues the new one, before the first checkpoint too."""
    folder = copy_run(done, tmp_path / "run")
    short = {"epochs": None, "steps": 6, "warmup": 1}
    recipe = place.recipe(schedule=short, checkpoints={"every": 2, "keep": 2}, seed=5)

    def before() -> None:
        checkpoints.write_tensors = lambda *_: os._exit(9)  # type: ignore[assignment]

    file = folder.with_suffix(".yaml")
    file.write_text(recipe.to_yaml())
    arguments = "distill", file, "--out", folder, "--device", "cpu", "--overwrite"
    assert Process(*arguments, log=tmp_path / "log", before=before).wait() == 9
    said = train(recipe, folder)
    assert "resumed" not in "".join(said)
    train(recipe, tmp_path / "fresh")
    assert_same_run(folder, tmp_path / "fresh")
    assert list(step_of(folder)) == [4, 6]


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NOWHERE.yaml"], "NOWHERE.yaml: no such recipe"),
        (["RECIPE", "--set", "bach=4"], "unknown key 'bach' .did you mean 'batch'"),
        (["RECIPE", "--set", "batch=four"], "batch='four': must be an integer"),
        (["RECIPE", "--set", "data.train=[]"], "data.train: no pictures to train on"),
        (["RECIPE", "--set", "data.train=[NOWHERE]"], "NOWHERE"),
        (["RECIPE", "--set", "teacher.name=PLACE/photos"], "photos"),
        (["RECIPE", "--set", "model.start=NOWHERE"], "NOWHERE"),
        (
            ["RECIPE", "--set", "schedule={epochs: 1, warmup: 0}", "--set", "batch=64"],
            "37 pictures make no step of batch=64",
        ),
    ],
)
def test_what_a_user_can_mend_is_one_line(place: Place, tmp_path: Path, arguments: list[str], message: str) -> None:
    shown = [a.replace("RECIPE", str(place.file)).replace("PLACE", str(place.folder)) for a in arguments]
    log = tmp_path / "log"
    process = Process("distill", *shown, "--out", tmp_path / "run", "--device", "cpu", log=log)
    assert process.wait() == 1
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(message, errors[0])
    assert log.read_text().rstrip().endswith(errors[0])
    assert "Traceback" not in log.read_text()
    assert not (tmp_path / "run/checkpoints").exists()


def test_a_model_that_is_no_teacher(place: Place, tmp_path: Path) -> None:
    with pytest.raises(TeacherError):
        train(place.recipe(teacher__name=str(tmp_path)), tmp_path / "run")


def test_a_plan_writes_nothing(place: Place, tmp_path: Path) -> None:
    before = sorted(place.folder.rglob("*"))
    status, text = command(place, "distill", place.file, "--out", tmp_path / "run", "--dry-run", log=tmp_path / "log")
    assert status == 0
    assert "37" in text
    assert str(STEPS) in text
    assert sorted(place.folder.rglob("*")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


# A second stage


def test_a_second_stage_starts_from_the_first(place: Place, done: Path, tmp_path: Path) -> None:
    stage = {"epochs": None, "steps": 1, "warmup": 0, "peak": 1e-12, "low": 0.0}
    recipe = place.recipe(
        model__start=str(done), schedule=stage, resolutions=[{"odds": {64: 1}}], weight_decay=0.0, ema=None
    )
    train(recipe, tmp_path / "run")
    before, after = load_file(done / "model.safetensors"), load_file(tmp_path / "run/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[name], before[name], rtol=0, atol=1e-9) for name in before)
    assert table(tmp_path / "run/metrics.csv")[0]["resolution_64"] == "1"
    first, second = (veca.load(folder).provenance for folder in (done, tmp_path / "run"))
    assert second["started_from"] == first
    assert "started_from" not in first


def test_a_start_that_learned_from_others_gets_an_output_for_its_teachers(
    place: Place, done: Path, tmp_path: Path
) -> None:
    """The backbone stays; so do the output's rows of the teacher that both have."""
    stage = {"epochs": None, "steps": 1, "warmup": 0, "peak": 1e-12, "low": 0.0}
    options = {"schedule": stage, "weight_decay": 0.0, "ema": None}
    teacher = {"name": str(place.folder / "teacher"), "standardize": True}
    train(place.recipe(model__start=str(done), teachers=[teacher], **options), tmp_path / "two")
    train(place.recipe(model__start=str(tmp_path / "two"), teachers=[teacher] * 2, **options), tmp_path / "three")
    weights = [load_file(folder / "model.safetensors") for folder in (done, tmp_path / "two", tmp_path / "three")]
    assert weights[1]["output_proj.weight"].shape == (64, 32)
    assert weights[2]["output_proj.weight"].shape == (96, 32)
    for before, after in itertools.pairwise(weights):
        for name, tensor in before.items():
            kept = after[name] if not name.startswith("output_proj") else after[name][:32]
            expected = tensor if not name.startswith("output_proj") else tensor[:32]
            assert torch.allclose(kept, expected, rtol=0, atol=1e-9), name


def test_a_student_starts_from_its_teacher(place: Place, tmp_path: Path) -> None:
    stage = {"epochs": None, "steps": 1, "warmup": 0, "peak": 1e-12, "low": 0.0}
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 4.0}
    model = {"size": "veca_tiny", "overrides": sizes, "start": "teacher"}
    train(place.recipe(model=model, schedule=stage, weight_decay=0.0, ema=None), tmp_path / "run")
    found = load_file(tmp_path / "run/model.safetensors")
    teacher = load_file(place.folder / "teacher/model.safetensors")
    values = next(tensor for name, tensor in teacher.items() if re.search(r"layer\.1\..*(v_proj|value)\.weight", name))
    torch.testing.assert_close(found["blocks.1.attn.qkv.weight"][64:], values, rtol=0, atol=1e-9)


class Classifying(Teacher):
    """The mean colour of each cell, and a classifier of three classes on the mean of all."""

    def __init__(self) -> None:
        super().__init__(3, 16, MEAN, STD, raw=True)
        self.name, self.classes = "colours", ("red", "green", "blue")
        self.classifier = torch.nn.Linear(3, 3).requires_grad_(False)
        self.classifier.load_state_dict({"weight": 4 * torch.eye(3), "bias": torch.tensor([0.0, 0.5, -0.5])})

    def features(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cells = torch.nn.functional.avg_pool2d(images, 16)
        return cells.mean((2, 3)), cells


def test_a_student_of_logits_can_take_the_classifier_over(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Classifying()
    monkeypatch.setattr("veca.train.distill.load_teacher", lambda *_: teacher)
    weights = {"logits_weight": 2.0, "temperature": 2.0}
    train(place.recipe(objective=weights, schedule__steps=STEPS, data__augment="flip"), tmp_path / "run")
    for name in ("validation.csv", "metrics.csv"):
        parts = [float(table(tmp_path / "run" / name)[-1][key]) for key in ("total", "cls", "dense", "logits")]
        assert parts[0] == pytest.approx(parts[1] + parts[2] + 2 * parts[3], rel=1e-4)
    model, images = veca.load(tmp_path / "run").eval(), torch.randn(2, 3, 48, 32)
    attach_classifier(model, tmp_path / "run/classifier.safetensors")
    statistics = tensors(list_checkpoints(tmp_path / "run/checkpoints")[-1])
    mean, deviation = (statistics[f"teacher: {name}"][0] for name in ("means", "deviations"))
    out = model(images)
    torch.testing.assert_close(out.logits, teacher.classifier(out.cls * deviation + mean), rtol=1e-5, atol=1e-5)
    assert model.provenance["classes"] == ["red", "green", "blue"]


def test_it_does_not_start_from_another_model(place: Place, done: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model.start=.* is another model \(depth: 2, not 3\)"):
        train(place.recipe(model__start=str(done), model__overrides__depth=3), tmp_path / "run")


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"device 'warp' cannot be used: .*\. On this machine there is cpu"):
        processes("warp").__enter__()
