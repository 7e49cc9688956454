"""A run that was killed, stopped or lost a part goes on as if nothing had been: the same numbers, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from runs import (
    BOUND,
    STEPS,
    Place,
    assert_same_run,
    copy_run,
    different,
    finish,
    kill,
    reached,
    start,
    start_all,
    table,
    tensors,
    train,
    wait_for,
    wait_until,
)

import veca
from veca.cli.common import resumable_run
from veca.train import checkpoints, distill, engine
from veca.train.checkpoints import DamagedError, list_checkpoints, read_checkpoint
from veca.train.distill import Distillation
from veca.train.engine import TrainingError
from veca.train.recipe import Recipe, RecipeError
from veca.utils.signals import Interrupted

WIDE = {"embed_dim": 32, "depth": 2, "num_heads": 1, "mlp_ratio": 8.0}
"""With an MLP of four groups of channels."""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks processes up in /proc")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def alone(place: Place) -> Path:
    """A run that nothing happens to, of one process; all its checkpoints are there."""
    train(place.recipe(checkpoints__keep=99), folder := place.folder / "alone")
    return folder


@pytest.fixture(scope="module")
def pair(place: Place) -> Path:
    """The same of two processes, each with half the batch."""
    folder = place.folder / "pair"
    assert finish(start(place.recipe(), folder, 2)) == [0, 0]
    return folder


def back_to(step: int, source: Path, folder: Path) -> Path:
    """A copy of a run as if it had been killed some time after the checkpoint of `step`."""
    copy_run(source, folder)
    for path in list_checkpoints(folder / "checkpoints"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    for name in ("model.safetensors", "config.json", "summary.json", "report.html"):
        (folder / name).unlink()
    return folder


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def close(found: list[dict[str, str]], expected: list[dict[str, str]]) -> bool:
    """Rows of tables, numbers to 1e-5."""
    pairs = [(a[k], b[k]) for a, b in zip(found, expected, strict=True) for k in {*a, *b}]
    return all(abs(float(a) - float(b)) <= 1e-5 * max(1, abs(float(b))) for a, b in pairs)


# Killed


@pytest.mark.parametrize(("processes", "workers", "seed"), [(1, 0, 0), (1, 2, 1), (2, 1, 2)])
def test_a_run_killed_at_any_moment_continues_bit_for_bit(
    place: Place, alone: Path, pair: Path, tmp_path: Path, processes: int, workers: int, seed: int
) -> None:
    """With SIGKILL, three times, somewhere between two checkpoints of an epoch that is not over."""
    rng = random.Random(seed)
    recipe = place.recipe(data__workers=workers)
    kills = 0
    for part in range(3):
        run = start(recipe, tmp_path / "run", processes)
        wait_for(tmp_path / "run", 8 * part + rng.randint(1, 8), run)
        time.sleep(rng.uniform(0, 0.2))
        kills += all(process.running() for process in run)
        kill(run)
    assert kills == 3
    run = start(recipe, tmp_path / "run", processes)
    assert finish(run) == [0] * processes, run[0].text()
    assert_same_run(tmp_path / "run", alone if processes == 1 else pair)


def dies(module: Any, name: str, call: int, then: Callable[..., object] | None = None) -> Callable[[], None]:
    """Have a process kill itself in the given call of a function for a checkpoint's path, before it is done."""

    def patch() -> None:
        real, count = getattr(module, name), 0

        def deadly(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            last = Path(arguments[-1] if name == "replace" else arguments[0])
            count += any(part.startswith(("step-", ".step-")) for part in (last.name, last.parent.name))
            if count == call:
                if then is not None:
                    then(real, *arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(module, name, deadly)

    return patch


def half_written(real: Callable[..., None], path: Path, *rest: Any) -> None:
    real(path, *rest)
    os.truncate(path, path.stat().st_size // 2)


def half_removed(_: object, path: Path, **__: object) -> None:
    next(iter(Path(path).iterdir())).unlink()


@pytest.mark.parametrize(
    "before",
    [
        dies(checkpoints, "write_tensors", 5, half_written),
        dies(checkpoints, "_sync_to_disk", 6, half_written),
        dies(os, "replace", 2),
        dies(os, "replace", 2, lambda real, *arguments: real(*arguments)),
    ],
    ids=["a half file", "before it is on disk", "before it has its name", "with its name"],
)
def test_killed_while_a_checkpoint_is_written(
    place: Place, alone: Path, tmp_path: Path, before: Callable[[], None]
) -> None:
    """The second one; what is there of it does not count before all of it is there."""
    run = start(place.recipe(), tmp_path / "run", before=before)
    assert finish(run) == [-signal.SIGKILL], run[0].text()
    assert reached(tmp_path / "run") in (4, 8)
    train(place.recipe(), tmp_path / "run")
    assert_same_run(tmp_path / "run", alone)
    assert not list((tmp_path / "run/checkpoints").glob(".*"))


def test_killed_while_an_old_checkpoint_is_removed(place: Place, alone: Path, tmp_path: Path) -> None:
    def before() -> None:
        real = shutil.rmtree

        def deadly(path: Any, *rest: Any, **options: Any) -> None:
            if Path(path).name == "step-00000004" and Path(path).is_dir():
                half_removed(None, Path(path))
                os.kill(os.getpid(), signal.SIGKILL)
            real(path, *rest, **options)

        shutil.rmtree = deadly  # type: ignore[assignment]

    run = start(place.recipe(checkpoints__keep=1), tmp_path / "run", before=before)
    assert finish(run) == [-signal.SIGKILL]
    assert reached(tmp_path / "run") == 8
    said = train(place.recipe(checkpoints__keep=1), tmp_path / "run")
    assert_same_run(tmp_path / "run", alone)
    assert not any("damaged" in text for text in said)


@pytest.mark.parametrize("standardize", [False, True])
def test_between_two_rows_of_the_log(place: Place, tmp_path: Path, standardize: bool) -> None:
    """Rows are means over steps: those before the checkpoint are in the row after it. A teacher's statistics stay."""
    recipe = place.recipe(checkpoints__keep=99, log_every=6, teacher__standardize=standardize, accumulate=2)
    train(recipe, tmp_path / "whole")
    for step in (16,) if standardize else (4, 28):
        folder = back_to(step, tmp_path / "whole", tmp_path / f"from {step}")
        said = train(recipe, folder)
        assert_same_run(folder, tmp_path / "whole")
        assert not any("statistics" in text for text in said)


def assert_continues(recipe: Recipe, folder: Path) -> Path:
    """A run continued from early and late checkpoints is the uninterrupted one; returns the last folder."""
    train(recipe, folder / "whole")
    for step in (4, 28):
        again = back_to(step, folder / "whole", folder / f"from {step}")
        train(recipe, again)
        assert_same_run(again, folder / "whole")
    return again


def test_a_run_of_several_widths_continues_bit_for_bit(place: Place, tmp_path: Path) -> None:
    """Their draws, the largest setting's features as targets, and the order of channels that the run began with."""
    start_from = place.folder / "start"
    if not start_from.exists():
        train(place.recipe(model__overrides=WIDE, schedule__steps=8), start_from)
    recipe = place.recipe(
        model={"size": "veca_tiny", "overrides": WIDE, "start": str(start_from), "elastic": [1, 0.5, 0.25]},
        checkpoints__keep=99, log_every=6, widths={"match": 0.5}, validation__widths=[0.25, 1],
    )  # fmt: skip
    folder = assert_continues(recipe, tmp_path)
    assert veca.load(folder).config.widths == (1.0, 0.5, 0.25)
    rows = table(folder / "metrics.csv")
    drawn = [sum(int(row[f"width_{width}"]) for row in rows) for width in ("0.25", "0.5", "1")]
    assert min(drawn) > 0
    assert sum(drawn) == STEPS
    assert [row["width"] for row in table(folder / "validation.csv")[:4]] == ["0.25", "1", "0.25", "1"]


def test_a_run_of_two_teachers_and_mixed_images_continues_bit_for_bit(place: Place, tmp_path: Path) -> None:
    more = {"name": str(place.folder / "teacher"), "standardize": True, "objective": {"dense_weight": 0.5}}
    recipe = place.recipe(
        teachers=[more], data__mixup=0.5, data__cutmix=1.0, data__mix_prob=0.8, checkpoints__keep=99, log_every=6,
        accumulate=2,
    )  # fmt: skip
    folder = assert_continues(recipe, tmp_path)
    model = veca.load(folder)
    assert (model.num_features, len(model.provenance["teacher"]["teachers"])) == (64, 2)


def test_a_run_that_is_over_stays_as_it_is(
    place: Place, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_run(alone, tmp_path / "run")
    monkeypatch.setattr(Distillation, "batches", lambda self: pytest.fail("no picture is needed any more"))
    said = train(place.recipe(checkpoints__keep=99), folder)
    assert_same_run(folder, alone)
    assert said == [f"{folder} is done; --overwrite begins anew in it."]


# Damaged


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize("keep", [1, 3])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    place: Place, alone: Path, tmp_path: Path, keep: int
) -> None:
    folder = back_to(16, alone, tmp_path / "run")
    flip(folder / "checkpoints/step-00000016/ema.safetensors")
    # Killed between its first checkpoint and its second, with the damaged one still ahead.
    run = start(place.recipe(checkpoints__keep=keep, checkpoints__every=1), folder, before=dies(os, "replace", 2))
    assert finish(run) == [-signal.SIGKILL], run[0].text()
    assert reached(folder) == 13
    assert "damaged: checkpoint step-00000016" in run[0].text()
    assert "resumed: from step 12" in run[0].text()
    train(place.recipe(checkpoints__keep=99), folder)
    assert_same_run(folder, alone)


def test_a_run_with_only_damaged_checkpoints_is_refused(place: Place, alone: Path, tmp_path: Path) -> None:
    folder = back_to(12, alone, tmp_path / "run")
    for path in list_checkpoints(folder / "checkpoints"):
        flip(path / "model.safetensors")
    with pytest.raises(DamagedError, match="none of the 3 checkpoints .*--overwrite"):
        train(place.recipe(), folder)
    train(place.recipe(checkpoints__keep=99), folder, restart=True)
    assert_same_run(folder, alone)


# Stopped


@pytest.mark.parametrize(
    ("number", "status", "workers"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 2), (signal.SIGTERM, 143, 0)]
)
def test_a_signal_finishes_the_step_and_saves(
    place: Place, alone: Path, tmp_path: Path, number: signal.Signals, status: int, workers: int
) -> None:
    """The whole group gets the signal, as by Ctrl-C or `timeout`: the step at hand is finished and saved."""
    recipe, tmp_path = place.recipe(data__workers=workers, checkpoints__every=99), tmp_path / "a folder [with brackets]"
    tmp_path.mkdir()
    run = start(recipe, tmp_path / "run")
    best = tmp_path / "run/best/config.json"
    wait_until(lambda: best.exists() and json.loads(best.read_text())["provenance"]["step"] >= 8, run)
    run[0].kill(number)
    assert finish(run) == [status], run[0].text()
    text = run[0].text()
    assert f"Stopped, and saved in {tmp_path / 'run'}. The same command continues" in text
    assert "Traceback" not in text
    step = reached(tmp_path / "run")
    assert 8 <= step < STEPS
    assert f"stopped: by {number.name}, at step {step}" in (tmp_path / "run/events.txt").read_text()
    assert different(tensors(list_checkpoints(tmp_path / "run/checkpoints")[-1]), at_step(place, alone, step)) == []
    train(place.recipe(), tmp_path / "run")
    assert_same_run(tmp_path / "run", alone)


def at_step(place: Place, alone: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of the run that nothing happened to, at any step."""
    folder = place.folder / "every step"
    if not folder.exists():
        train(place.recipe(checkpoints__keep=99, checkpoints__every=1), folder)
        assert (
            different(
                tensors(folder / "checkpoints/step-00000032"), tensors(list_checkpoints(alone / "checkpoints")[-1])
            )
            == []
        )
    return tensors(folder / f"checkpoints/step-{step:08d}")


@pytest.mark.parametrize("asked", ["one", "all"])
def test_all_processes_stop_at_the_same_step(place: Place, pair: Path, tmp_path: Path, asked: str) -> None:
    """They save the same step and leave: when one alone was asked, and when all were, with those that read pictures."""
    run = start(place.recipe(data__workers=1), tmp_path / "run", 2)
    wait_for(tmp_path / "run", 4, run)
    if asked == "one":
        run[1].send(signal.SIGTERM)
    else:
        for process in run:
            process.kill(signal.SIGTERM)
    assert finish(run) == [143, 143], run[0].text()
    assert 4 <= reached(tmp_path / "run") < STEPS
    assert f"stopped: by SIGTERM, at step {reached(tmp_path / 'run')}\n" in (tmp_path / "run/events.txt").read_text()
    assert finish(start(place.recipe(), tmp_path / "run", 2)) == [0, 0]
    assert_same_run(tmp_path / "run", pair)


# Two at a time


@pytest.mark.parametrize("processes", [1, 2])
def test_a_second_run_in_a_folder_is_refused(place: Place, alone: Path, tmp_path: Path, processes: int) -> None:
    """Whatever it is asked, --overwrite too; the first is not disturbed."""
    folder = tmp_path / "run"
    run = start(place.recipe(data__workers=1), folder)
    wait_for(folder, 4, run)
    os.kill(run[0].pid, signal.SIGSTOP)
    second = ["distill", place.file, "--out", folder, "--device", "cpu", "--overwrite", "--set", "seed=2"]
    others = start_all(second, tmp_path / "second", processes)
    assert finish(others) == [1] * processes
    assert f"error: another run is at work in {folder}; wait for it, or choose another name" in others[0].text()
    os.kill(run[0].pid, signal.SIGCONT)
    assert finish(run) == [0], run[0].text()
    assert_same_run(folder, alone)
    assert not (folder / "lock").exists()


# Parts that are lost


def test_a_process_that_reads_pictures_dies(place: Place, alone: Path, tmp_path: Path) -> None:
    run = start(place.recipe(data__workers=2), tmp_path / "run")
    wait_for(tmp_path / "run", 4, run)
    os.kill(children(run[0].pid)[0], signal.SIGKILL)
    assert finish(run) == [1]
    assert "error: a process that reads pictures has died" in run[0].text()
    assert "Traceback" not in run[0].text()
    train(place.recipe(), tmp_path / "run")
    assert_same_run(tmp_path / "run", alone)


def test_a_process_that_trains_dies(place: Place, pair: Path, tmp_path: Path) -> None:
    run = start(place.recipe(), tmp_path / "run", 2)
    wait_for(tmp_path / "run", 4, run)
    run[1].kill()
    first, second = finish(run, 60)
    assert first != 0
    assert second == -signal.SIGKILL
    assert finish(start(place.recipe(), tmp_path / "run", 2)) == [0, 0]
    assert_same_run(tmp_path / "run", pair)


def torchrun(place: Place, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    file = folder.with_suffix(".yaml")
    file.write_text(place.recipe(data__workers=1).to_yaml())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "veca"]
    command += ["distill", str(file), "--out", str(folder), "--device", "cpu"]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_torchrun_ends_and_continues_a_run(place: Place, pair: Path, tmp_path: Path) -> None:
    """It ends all when one is lost, and tells its processes to stop, data workers too; nobody hangs."""
    folder, log = tmp_path / "run", tmp_path / "log"
    for step, what in ((4, "a process lost"), (12, "stopped")):
        launcher = torchrun(place, folder, log)
        try:
            end = time.monotonic() + 2 * BOUND
            while reached(folder) < step and launcher.poll() is None:
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.01)
            ranks = children(launcher.pid)
            if what == "stopped":
                launcher.send_signal(signal.SIGTERM)
            else:
                os.kill(ranks[-1], signal.SIGKILL)
            assert launcher.wait(60) != 0
        finally:
            launcher.kill()
        assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
        assert step <= reached(folder) < STEPS
    assert "stopped: by SIGTERM" in (folder / "events.txt").read_text(), log.read_text()
    assert finish(start(place.recipe(), folder, 2)) == [0, 0]
    assert_same_run(folder, pair)


# Others go on with it


@pytest.mark.parametrize(
    ("before", "after", "parallel"), [(1, 2, "ddp"), (2, 1, "ddp"), (1, 2, "fsdp"), (2, 1, "fsdp")]
)
def test_another_number_of_processes_continues_a_run(
    place: Place, alone: Path, tmp_path: Path, before: int, after: int, parallel: str
) -> None:
    """The same pictures per step, the same numbers to rounding."""
    folder = tmp_path / "run"
    if before == 1:
        back_to(12, alone, folder)
        shutil.rmtree(folder / "best")
    else:
        run = start(place.recipe(parallel=parallel), folder, 2)
        wait_for(folder, 12, run)
        kill(run)
    run = start(place.recipe(parallel=parallel if after == 2 else "ddp"), folder, after)
    assert finish(run) == [0] * after, run[0].text()
    for name in ("metrics.csv", "validation.csv"):
        assert close(table(folder / name), table(alone / name)), name
    found, expected = (tensors(list_checkpoints(f / "checkpoints")[-1]) for f in (folder, alone))
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-4), name


def test_another_number_of_images_per_step_is_refused(place: Place, alone: Path, tmp_path: Path) -> None:
    folder = back_to(12, alone, tmp_path / "run")
    with pytest.raises(RecipeError, match="batch=4: the run in .* has had 8 images per step, .*Set batch=8"):
        train(place.recipe(batch=4), folder)


@pytest.mark.filterwarnings(
    "ignore:.* is gone", "ignore:the log waits", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
def test_a_folder_that_is_cleared_under_a_run_costs_what_was_in_it_and_no_more(
    place: Place, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_step = Distillation.train_step

    def then_cleared(self: Distillation, batches: Any) -> None:
        one_step(self, batches)
        if self.step == STEPS - 6:
            assert (folder / "metrics.csv").is_file()
            shutil.rmtree(folder)

    folder = tmp_path / "run"
    monkeypatch.setattr(Distillation, "train_step", then_cleared)
    train(place.recipe(), folder)
    assert different(tensors(folder), tensors(alone)) == []
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == [
        f"step-{STEPS - 4:08}",
        f"step-{STEPS:08}",
    ]
    steps = [row["step"] for row in table(folder / "metrics.csv")]
    assert steps == [row["step"] for row in table(alone / "metrics.csv")][-len(steps) :]
    assert set(steps) >= {str(STEPS - 2), str(STEPS)}
    assert (folder / "report.html").is_file()


def begun(alone: Path, folder: Path) -> Path:
    """A copy of the run as it was after 16 steps."""
    copy_run(alone, folder)
    for path in list_checkpoints(folder / "checkpoints"):
        if int(path.name.removeprefix("step-")) > 16:
            shutil.rmtree(path)
    for name in ("model.safetensors", "config.json", "summary.json", "report.html"):
        (folder / name).unlink()
    return folder


def test_where_a_checkpoint_finds_no_room_weights_may(
    place: Place, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine, "write_checkpoint", full)
    way = r"checkpoint of step 32 cannot be written \(No space left on device\); its weights are in .*Make room"
    with pytest.raises(TrainingError, match=way):
        train(place.recipe(), tmp_path)
    assert different(tensors(tmp_path), tensors(alone)) == []
    monkeypatch.setattr(distill, "save_tensors", full)
    with pytest.raises(TrainingError, match="nor can its weights. Make room"):
        train(place.recipe(), tmp_path)


def test_images_may_move_between_runs(place: Place, alone: Path, tmp_path: Path) -> None:
    folder, moved = begun(alone, tmp_path / "run"), tmp_path / "elsewhere"
    shutil.copytree(place.folder / "photos", moved / "photos")
    shutil.copytree(place.folder / "validation", moved / "validation")
    recipe = place.recipe(data__train=[str(moved / "photos")], data__validation=[str(moved / "validation")])
    train(recipe, folder)
    assert "resumed: from step 16" in (folder / "events.txt").read_text()
    assert different(tensors(folder), tensors(alone)) == []


def test_a_resumed_run_may_take_its_batch_in_more_passes(place: Place, alone: Path, tmp_path: Path) -> None:
    """The same images in each step, and the same weights but for rounding: the way out where memory is short."""
    train(place.recipe(accumulate=2), folder := begun(alone, tmp_path / "run"))
    ours, theirs = tensors(folder), tensors(alone)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in theirs)
    assert json.loads((folder / "summary.json").read_text())["images"] == 8 * STEPS


def test_processes_agree_to_stop_before_torchrun_loses_patience(place: Place, tmp_path: Path) -> None:
    """They agree after every step, however long it takes."""

    def slow() -> None:
        one_step = Distillation.train_step

        def step(self: Distillation, batches: Any) -> None:
            time.sleep(1.2)
            one_step(self, batches)

        Distillation.train_step = step

    folder = tmp_path / "run"
    run = start(place.recipe(checkpoints__every=1000, log_every=1), folder, 2, slow)
    wait_until(lambda: (folder / "metrics.csv").exists(), run)
    for process in run:
        process.send(signal.SIGTERM)
    assert [process.wait() for process in run] == [128 + signal.SIGTERM] * 2
    assert 0 < reached(folder) < 10


def test_begun_anew_a_folder_has_nothing_of_the_old_run(
    place: Place, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(self: Distillation, batches: Any) -> None:
        raise Interrupted(signal.SIGTERM)

    folder = copy_run(alone, tmp_path / "run")
    monkeypatch.setattr(Distillation, "train_step", ends)
    with pytest.raises(Interrupted):
        train(place.recipe(), folder, restart=True)
    assert not list_checkpoints(folder / "checkpoints")
    left = {path.name for path in folder.iterdir()}
    assert left.isdisjoint({"model.safetensors", "config.json", "summary.json"})
    with pytest.raises(ValueError, match="model"):
        veca.load(folder)


def test_weights_are_told_their_own_loss_and_the_best_are_compared_with_their_like(
    place: Place, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rising = iter(range(7, 99))
    monkeypatch.setattr("veca.train.distill.validate", lambda *_: {(32, 8, 1.0): {"total": float(next(rising))}})
    train(place.recipe(), folder := begun(alone, tmp_path / "same"))
    best = read_checkpoint(list_checkpoints(alone / "checkpoints")[3]).facts["best"]
    assert veca.load(folder).provenance["validation"] == 8
    assert read_checkpoint(list_checkpoints(folder / "checkpoints")[-1]).facts["best"] == best < 7
    train(place.recipe(validation__budgets=[16]), folder := begun(alone, tmp_path / "other"))
    assert "changed: validation" in (folder / "events.txt").read_text()
    assert veca.load(folder / "best").provenance["validation"] == 9
    assert veca.load(folder).provenance["validation"] == 10


def test_a_run_of_another_kind_is_named(place: Place, tmp_path: Path) -> None:
    checkpoints.write_checkpoint(tmp_path / "checkpoints", 1, {"asked": {}}, {})
    with pytest.raises(RecipeError, match="holds a run of `veca finetune`: take another --out"):
        train(place.recipe(), tmp_path)


@pytest.mark.parametrize("start_from", ["", "model.safetensors", "best", f"checkpoints/step-{STEPS:08}"])
@pytest.mark.parametrize("restart", [False, True])
def test_what_a_run_starts_from_is_not_written_over(place: Place, alone: Path, start_from: str, restart: bool) -> None:
    before = tensors(alone / "best")
    with pytest.raises(RecipeError, match=r"model\.start=.* would be written over: take another --out"):
        train(place.recipe(model__start=str(alone / start_from)), alone, restart=restart)
    assert different(tensors(alone / "best"), before) == []


@pytest.mark.parametrize("stop", [Interrupted(signal.SIGTERM), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("restart", "way"), [(False, "The same command continues"), (True, "without --overwrite cont")]
)
def test_how_to_go_on_is_said(tmp_path: Path, stop: BaseException, restart: bool, way: str) -> None:
    said: list[str] = []
    with pytest.raises(typer.Exit), resumable_run(tmp_path, said.append, restart):
        raise stop
    assert way in said[0]
