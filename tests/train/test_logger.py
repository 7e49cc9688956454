from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import pty
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from veca.train.engine import TrainMeter
from veca.train.logger import ProgressLine, RunLogger, read_table
from veca.train.objective import distillation_losses

GRID = {
    (256, 8, 1.0): {"total": 1.5, "cls": 0.5, "dense": 1.0},
    (256, 64, 1.0): {"total": 0.75, "cls": 0.25, "dense": 0.5},
}


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def log_steps(folder: Path, steps: range, **options: object) -> None:
    with RunLogger(folder, **options) as log:
        for step in steps:
            log.train(step, {"total": step / 4, "cls": 0.1})


def test_every_row_is_there_with_columns_in_a_fixed_order(tmp_path: Path) -> None:
    with RunLogger(tmp_path / "new" / "run") as log:
        log.train(1, {"zebra": 3, "learning_rate": 4e-4, "cls": 0.125, "total": 1.1})
        log.train(2, {"total": math.nan, "cls": math.inf, "learning_rate": 1.23456789e-7})
        log.validation(2, GRID)
        log.event(2, "corrupt: a\nb\t<i>.jpg")
    rows = table(tmp_path / "new" / "run" / "metrics.csv")
    assert list(rows[0]) == ["step", "time", "total", "cls", "learning_rate", "zebra"]
    assert [row["step"] for row in rows] == ["1", "2"]
    assert float(rows[0]["learning_rate"]) == 4e-4
    assert [rows[1]["total"], rows[1]["cls"], rows[1]["zebra"]] == ["nan", "inf", ""]
    assert float(rows[1]["learning_rate"]) == pytest.approx(1.23456789e-7, rel=1e-8)
    found = table(tmp_path / "new" / "run" / "validation.csv")
    assert list(found[0]) == ["step", "resolution", "budget", "total", "cls", "dense"]
    assert {(int(r["resolution"]), int(r["budget"])): float(r["total"]) for r in found} == {
        (256, 8): 1.5,
        (256, 64): 0.75,
    }
    (line,) = (tmp_path / "new" / "run" / "events.txt").read_text().splitlines()
    when, step, text = line.split("\t")
    assert (step, text) == ("2", r"corrupt: a\nb\t<i>.jpg")
    assert when.endswith("Z")


def test_a_grid_of_several_widths_has_a_column_for_them(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as log:
        log.validation(2, {**GRID, (256, 8, 0.25): {"total": 2.0}})
    rows = table(tmp_path / "validation.csv")
    assert [(r["budget"], r["width"], r["total"]) for r in rows] == [
        ("8", "1", "1.5"),
        ("64", "1", "0.75"),
        ("8", "0.25", "2"),
    ]


def test_a_column_that_comes_later_keeps_the_table_whole(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as log:
        log.train(1, {"total": 1.0})
        log.flush()
        log.train(2, {"total": 2.0, "new": 7, "also": 8})
        log.flush()
        log.train(3, {"new": 9})
    rows = table(tmp_path / "metrics.csv")
    assert list(rows[0]) == ["step", "time", "total", "also", "new"]
    assert [(r["step"], r["total"], r["new"]) for r in rows] == [("1", "1", ""), ("2", "2", "7"), ("3", "", "9")]
    assert None not in {key for row in rows for key in row}


def test_a_run_that_died_mid_line_continues_with_every_step_once(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as log:
        for step in range(14):
            log.train(step, {"total": 1.0, "cls": 0.1})
        log.validation(5, GRID)
        log.validation(10, GRID)
        log.event(10, "checkpoint: 10")
    for name, half in (
        ("metrics.csv", "9,1784000000.0,1,0."),
        ("validation.csv", "9,256,8,1"),
        ("events.txt", "2026-"),
    ):
        with (tmp_path / name).open("a") as file:
            file.write(half)  # of a step before: only that it breaks off gives it away
    with RunLogger(tmp_path, resume_step=10) as log:
        for step in range(10, 13):
            log.train(step, {"total": 2.0, "cls": 0.1})
        log.event(10, "resumed")
    rows = table(tmp_path / "metrics.csv")
    assert [(int(row["step"]), row["total"]) for row in rows] == [(s, "1" if s < 10 else "2") for s in range(13)]
    assert [row["step"] for row in table(tmp_path / "validation.csv")] == ["5", "5"]
    events = (tmp_path / "events.txt").read_text().splitlines()
    assert [line.split("\t")[1:] for line in events] == [["10", "checkpoint: 10"], ["10", "resumed"]]
    assert not list(tmp_path.glob(".*")), "a temporary file was left"


def test_a_header_that_breaks_off_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,ti")
    log_steps(tmp_path, range(2))
    assert [row["step"] for row in table(tmp_path / "metrics.csv")] == ["0", "1"]


def test_rows_are_on_disk_at_once(tmp_path: Path) -> None:
    """What a process that is killed, now, leaves behind."""
    with RunLogger(tmp_path) as log:
        log.train(1, {"total": 1.0})
        log.event(1, "skipped: a step")
        left = shutil.copytree(tmp_path, tmp_path.with_name("left"))
    assert [row["total"] for row in table(left / "metrics.csv")] == ["1"]
    assert "skipped: a step" in (left / "events.txt").read_text()


def test_a_disk_that_fails_for_a_while_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_steps(tmp_path, range(2))
    with RunLogger(tmp_path, resume_step=2) as log:
        whole = type(log._metrics)._append

        def half(self: object, data: bytes) -> None:
            with self.path.open("ab") as file:
                file.write(9 * data[:-1])  # more than will take its place
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(type(log._metrics), "_append", half)
        for step in (2, 3):
            with pytest.warns(UserWarning, match="No space left"):
                log.train(step, {"total": float(step)})
        monkeypatch.setattr(type(log._metrics), "_append", whole)
        log.train(4, {"total": 4.0})
    rows = [(row["step"], row["total"], row["cls"]) for row in table(tmp_path / "metrics.csv")]
    assert rows == [("0", "0", "0.1"), ("1", "0.25", "0.1"), ("2", "2", ""), ("3", "3", ""), ("4", "4", "")]


def test_what_ends_a_run_is_not_hidden_by_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt), RunLogger(tmp_path) as log:
        monkeypatch.setattr(type(log._metrics), "_append", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.warns(UserWarning, match="the log waits, its files cannot be written: full"):
            log.train(1, {"total": 1.0})
        raise KeyboardInterrupt


def test_a_file_that_is_no_table_of_a_run_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("name,price\nbread,3\n")
    with pytest.raises(ValueError, match=r"metrics\.csv begins with 'name,price'.*Move it away"):
        RunLogger(tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == "name,price\nbread,3\n"


def test_tensorboard_reads_back_every_step_once(tmp_path: Path) -> None:
    log_steps(tmp_path, range(6))
    (first,) = (tmp_path / "tensorboard").iterdir()
    # Files are read in the order of their names, which have the second of their making: this one was made long before.
    first.rename(first.with_name("events.out.tfevents.1000000000.host.1.0"))
    with RunLogger(tmp_path, resume_step=4) as log:
        for step in range(4, 8):
            log.train(step, {"total": 100.0 + step})
        log.validation(7, GRID)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    found = [(event.step, event.value) for event in board.Scalars("train/total")]
    assert found == [(0, 0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 104), (5, 105), (6, 106), (7, 107)]
    assert [event.value for event in board.Scalars("validation/256px-64cores/dense")] == [0.5]
    assert [event.value for event in board.Scalars("validation/mean/total")] == [1.125]


def test_wandb_is_joined_when_asked_and_again_when_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    log_steps(tmp_path, range(1))  # not asked: not needed
    with pytest.raises(ValueError, match="pip install wandb, or do without"):
        RunLogger(tmp_path, wandb="project")
    assert [row["step"] for row in table(tmp_path / "metrics.csv")] == ["0"], "a refused run changed the files"

    calls: list[tuple[str, object]] = []

    class Run:
        id = "abc123"

        def __getattr__(self, name: str) -> object:
            return lambda *args, **options: calls.append((name, args or options))

    def init(**options: object) -> Run:
        calls.append(("init", options))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    log_steps(tmp_path, range(1, 2), resume_step=1, wandb="project", config={"batch": 8})
    log_steps(tmp_path, range(2, 3), resume_step=2, wandb="project")
    begun = [options for name, options in calls if name == "init"]
    assert [(o["project"], o["id"]) for o in begun] == [("project", None), ("project", "abc123")]
    assert begun[0]["config"] == {"batch": 8}
    assert ("log", ({"step": 1, "train/total": 0.25, "train/cls": 0.1},)) in calls
    assert [options for name, options in calls if name == "finish"] == [{"exit_code": 0}] * 2


class Clock:
    """In place of the clock of a meter, or of the progress line."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.now = 100.0
        if monkeypatch:
            monkeypatch.setattr("veca.train.engine.perf_counter", self)

    def __call__(self) -> float:
        return self.now


def losses(total: float) -> dict[str, torch.Tensor]:
    return {"total": torch.tensor(total), "cls": torch.tensor(total / 2)}


def test_means_are_over_the_steps_since_the_last_look() -> None:
    meter = TrainMeter()
    for total in (1.0, 2.0, 6.0):
        meter.update(losses(total), images=4)
    found = meter.values()
    assert (found["total"], found["cls"], found["images"], found["nonfinite"]) == (3.0, 1.5, 12, 0)
    meter.update(losses(5.0), images=4)
    assert meter.values()["total"] == 5.0


def test_a_step_that_is_not_finite_is_counted_and_spoils_no_mean() -> None:
    meter = TrainMeter()
    for total in (1.0, math.nan, math.inf, 3.0):
        meter.update(losses(total), images=1)
    found = meter.values()
    assert (found["total"], found["nonfinite"]) == (2.0, 2)
    meter.update(losses(math.nan), images=1)
    found = meter.values()
    assert math.isnan(found["total"])
    assert found["nonfinite"] == 1


def test_losses_of_a_real_step_leave_the_device_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.randn(2, 4, requires_grad=True), torch.randn(2, 9, 4, requires_grad=True)
    found = distillation_losses(*features, torch.randn(2, 4), torch.randn(2, 9, 4))
    looked: list[str] = []
    for name in ("item", "tolist", "numpy", "cpu", "__float__", "__bool__", "__int__", "__index__"):
        real = getattr(torch.Tensor, name)

        def spy(*args: object, name: str = name, real: object = real) -> object:
            looked.append(name)
            return real(*args)

        monkeypatch.setattr(torch.Tensor, name, spy)
    meter = TrainMeter()
    for _ in range(3):
        meter.update(found.values(), images=2)
    assert looked == []
    values = meter.values()
    assert looked == ["tolist"]
    assert values["total"] == pytest.approx(float(found.total.detach()))
    # A tensor without values at all would have raised, had anyone looked.
    TrainMeter().update({"total": torch.empty((), device="meta")}, images=2)


def test_pace_leaves_out_compilation_validation_and_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter = TrainMeter(budgets=(8, 64), resolutions=(256,))

    def step(seconds: float, budget: int) -> None:
        clock.now += seconds
        meter.update(losses(1.0), images=10, budget=budget, resolution=256)

    step(60, 8)  # the first step, and the first of each budget, compile
    step(2, 8)
    step(45, 64)
    step(2, 64)
    with meter.pause():
        clock.now += 1000
    step(2, 8)
    found = meter.values()
    assert found["images_per_s"] == pytest.approx(5.0)
    assert found["images"] == 50
    assert found["seconds"] == pytest.approx(111)
    assert (found["budget_8"], found["budget_64"], found["resolution_256"]) == (3, 2, 5)
    step(1, 8)
    found = meter.values()
    assert found["images_per_s"] == pytest.approx(10.0)
    assert (found["budget_8"], found["budget_64"]) == (1, 0)


def test_a_continued_meter_goes_on_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    meter = TrainMeter(images=1000, seconds=50)
    clock.now += 5
    meter.update(losses(1.0), images=10)
    found = meter.values()
    assert (found["images"], found["seconds"]) == (1010, 55)


VALUES = {"total": 0.81234, "cls": 0.3, "dense": 0.5, "images_per_s": 1234.4, "floor_share": 0.41, "memory_gib": 71.3}


def test_a_file_gets_plain_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    clock, stream = Clock(), io.StringIO()
    with ProgressLine(1000, stream=stream, clock=clock) as live:
        for step in range(10, 1001, 10):
            clock.now += 1
            live.update(step, VALUES)
        live.say("corrupt: \x1b[31mred\r.jpg")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + 20 + 1
    assert lines[0].startswith("step 10 of 1,000 (1.0 %)")
    assert "loss 0.8123 (cls 0.3, dense 0.5) · 1,234 images/s · 41% of the floor · 71.3 GiB" in lines[0]
    assert "left" not in lines[0], "nobody can know yet"
    assert "50 s left" in next(line for line in lines if line.startswith("step 500 "))
    assert lines[-2].startswith("step 1,000 of 1,000 (100.0 %) · 0 s left")
    assert all(character.isprintable() for line in lines for character in line)
    slow = io.StringIO()
    with ProgressLine(10**6, stream=slow, clock=clock) as live:
        for step in range(100):
            clock.now += 1
            live.update(step, {"total": math.nan, "images_per_s": math.nan})
    assert len(slow.getvalue().splitlines()) == 4
    assert "images/s" not in slow.getvalue()


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream, ProgressLine(1000, start=500, stream=stream) as live:
        live.update(501, VALUES)
        live.say("skipped: [red] a step")
    shown = ""
    with contextlib.suppress(OSError):  # the end, on Linux
        while piece := os.read(ours, 1 << 16).decode(errors="replace"):
            shown += piece
    os.close(ours)
    assert "501/1000" in shown
    assert "1,234 images/s" in shown
    assert "skipped: [red] a step" in shown


def test_damaged_rows_are_left_out_when_a_table_is_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"step,time,total\n1,5,0.5\n2,5\nx,5,1\n\0\0\0\n3,5,\n4,5,0.2")
    assert read_table(tmp_path / "metrics.csv") == [{"step": 1, "time": 5, "total": 0.5}, {"step": 3, "time": 5}]
    assert read_table(tmp_path / "none.csv") == []


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.filterwarnings("ignore:the log waits", "ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_begins_anew_when_there_is_room_again(tmp_path: Path) -> None:
    """A full disk ends its thread, not the run; all rows are in the table in the end."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunLogger(tmp_path) as log:
        board = log._board
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            log.train(1, {"total": 1.0})
            with contextlib.suppress(OSError):
                board.flush()
            log.train(2, {"total": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.train(3, {"total": 0.5})
    assert [row["step"] for row in table(tmp_path / "metrics.csv")] == ["1", "2", "3"]
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/total")
    assert 3 in [point.step for point in shown]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2), (2, 3)])
def test_a_meter_is_taken_up_by_as_many_or_others(before: int, after: int) -> None:
    """What was measured before a checkpoint counts as if it had been measured here: the mean over processes stays."""
    import json

    def update(meter: TrainMeter, loss: float, budget: int) -> None:
        meter.update({"total": torch.tensor(loss), "norm": torch.tensor(1.0)}, 4, budget, 256)

    old = [TrainMeter([8, 16], [256]) for _ in range(before)]
    for rank, meter in enumerate(old):
        update(meter, 1.0 + rank, 8)
        update(meter, math.nan, 16)
    parts = json.loads(json.dumps([meter.state() for meter in old]))
    new = [TrainMeter([8, 16], [256]) for _ in range(after)]
    for rank, meter in enumerate(new):
        meter.restore(parts, rank, after, torch.device("cpu"))
        update(meter, 4.0, 8)
    found = [meter.values() for meter in new]
    expected = (sum(1.0 + rank for rank in range(before)) / before + 4.0) / 2
    assert sum(values["total"] for values in found) / after == pytest.approx(expected, rel=1e-6)
    for values in found:
        counts = {name: values[name] for name in ("nonfinite", "budget_8", "budget_16", "resolution_256")}
        assert counts == {"nonfinite": 1, "budget_8": 2, "budget_16": 1, "resolution_256": 3}
