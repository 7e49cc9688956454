"""Commands that are killed or stopped leave no process behind, and continue where they were stopped."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import resource
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_tiny
from PIL import Image
from runs import BOUND, Place, Process, assert_same_run, reached, table, tensors
from typer.testing import CliRunner

import veca
import veca.cli.main
from veca.data import crops, loader, records
from veca.data.records import decode_items
from veca.data.sources import iter_items
from veca.train.checkpoints import list_checkpoints
from veca.utils.signals import Terminated, deferred_signals, terminable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks processes up in /proc")

COMMANDS = "embed", "probe", "finetune", "distill"
GONE = 20.0
"""Seconds after which a process that should have ended is taken for one that stays."""


class Commands:
    """A model, images of two classes, a recipe, and the commands that work on them with two workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        veca.save(make_tiny(), folder / "model")
        rng = np.random.default_rng(0)
        for split, count in (("train", 12), ("val", 4)):
            for name, mean in (("dark", 90), ("light", 150)):
                (folder / "classes" / split / name).mkdir(parents=True)
                for i in range(count):
                    pixels = rng.normal(mean, 60, (36, 44, 3)).clip(0, 255).astype(np.uint8)
                    Image.fromarray(pixels).save(folder / f"classes/{split}/{name}/{i}.png")
        (folder / "place").mkdir()
        place = Place(folder / "place")
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(place.recipe(data__workers=2, schedule__steps=16).to_yaml())

    def __call__(self, command: str, out: Path) -> list[object]:
        common: list[object] = ["--device", "cpu", "--workers", 2]
        model, classes = self.folder / "model", self.folder / "classes"
        if command == "embed":
            return ["embed", classes, "--model", model, "--out", out, "--size", 32, "--batch-size", 2, *common]
        if command == "probe":
            sizes = ["--cores", "8,64", "--size", "32,48", "--epochs", 2, "--batch-size", 2, "--no-progress"]
            return ["probe", "classify", "--model", model, "--data", classes, "--out", out, *sizes, *common]
        if command == "finetune":
            short = ["--size", 32, "--cores", "8,64", "--epochs", 2, "--batch-size", 4, "--head", "new"]
            short += ["--set", "every=4", "--set", "progress=false"]
            return ["finetune", "classify", "--model", model, "--data", classes, "--out", out, *short, *common]
        return ["distill", self.recipe, "--out", out, "--device", "cpu"]

    def out(self, command: str, folder: Path) -> Path:
        return folder / ("out.parquet" if command == "embed" else "out")

    def run(self, command: str, out: Path) -> None:
        done = CliRunner().invoke(veca.cli.main.app, [str(argument) for argument in self(command, out)])
        assert done.exit_code == 0, (done.output, done.exception)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("commands"))


@pytest.fixture(scope="module")
def whole(commands: Commands) -> Callable[[str], Path]:
    """What a command gives that nothing happens to."""

    def made(command: str) -> Path:
        (folder := commands.folder / f"whole {command}").mkdir(exist_ok=True)
        if not (out := commands.out(command, folder)).exists():
            commands.run(command, out)
        return out

    return made


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Processes that a test starts; what is left of them is ended after it."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        for pid in process.members():
            os.kill(pid, signal.SIGKILL)
        process.wait()


def slowly(seconds: float, decoding: Path) -> Callable[[], None]:
    """Have decoding an image take so long; `decoding` is there when one is at hand."""

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for module, name in ((loader, "open_image"), (records, "load_pixels"), (crops, "open_for_crop")):
            real: Any = getattr(module, name)

            def slow(*arguments: Any, _real: Any = real, **options: Any) -> Any:
                decoding.touch()
                time.sleep(seconds)
                return _real(*arguments, **options)

            setattr(module, name, slow)

    return before


def wait_until(done: Callable[[], bool], process: Process) -> None:
    end = time.monotonic() + BOUND
    while not done():
        assert process.running(), process.text()[-2000:]
        assert time.monotonic() < end, process.text()[-2000:]
        time.sleep(0.01)


def assert_all_gone(process: Process) -> None:
    end = time.monotonic() + GONE
    while members := process.members():
        assert time.monotonic() < end, f"{len(members)} processes live on"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT])
@pytest.mark.parametrize("command", COMMANDS)
def test_workers_end_with_a_process_that_is_killed(
    commands: Commands, started: list[Process], tmp_path: Path, command: str, number: signal.Signals
) -> None:
    """It alone gets the signal, and its workers hang in a decoder at that moment."""
    out, decoding = commands.out(command, tmp_path), tmp_path / "decoding"
    process = Process(*commands(command, out), log=tmp_path / "log", before=slowly(3600, decoding))
    started.append(process)
    wait_until(lambda: decoding.exists() and len(process.members()) >= 3, process)
    process.send(number)
    assert process.wait() == -number
    assert_all_gone(process)


def saved(command: str, out: Path) -> bool:
    """Whether some of the work is done, and kept."""
    if command == "embed":
        return (out.with_name(f"{out.name}.parts") / "_job.json").exists()
    if command == "probe":
        return any((out / "rows").glob("*.json"))
    return reached(out) >= 4


def assert_same(command: str, found: Path, expected: Path) -> None:
    if command == "embed":
        assert found.read_bytes() == expected.read_bytes()
    elif command == "distill":
        assert_same_run(found, expected)
    elif command == "finetune":
        for name in ("metrics.csv", "validation.csv"):
            assert table(found / name) == table(expected / name)
        a, b = (tensors(list_checkpoints(folder / "checkpoints")[-1]) for folder in (found, expected))
        assert all(a[name].equal(b[name]) for name in a)
    else:
        names = [sorted(path.name for path in (folder / "features").iterdir()) for folder in (found, expected)]
        assert names[0] == names[1]
        for name in names[0]:
            assert (found / "features" / name).read_bytes() == (expected / "features" / name).read_bytes()
        assert len(list((found / "rows").glob("*.json"))) == 4


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("embed", signal.SIGTERM),
        ("embed", signal.SIGHUP),
        ("probe", signal.SIGTERM),
        ("probe", signal.SIGHUP),
        ("finetune", signal.SIGHUP),
        ("distill", signal.SIGHUP),
    ],
)
def test_a_command_that_is_stopped_continues(
    commands: Commands,
    whole: Callable[[str], Path],
    started: list[Process],
    tmp_path: Path,
    command: str,
    number: signal.Signals,
) -> None:
    """All its processes get the signal, twice, as `timeout` and a terminal that closes send it."""
    out = commands.out(command, tmp_path)
    process = Process(*commands(command, out), log=tmp_path / "log", before=slowly(0.03, tmp_path / "decoding"))
    started.append(process)
    wait_until(lambda: saved(command, out) and len(process.members()) >= 3, process)
    process.kill(number)
    process.kill(number)
    assert process.wait() == 128 + number, process.text()
    assert "he same command continues" in process.text()
    assert "Traceback" not in process.text()
    assert_all_gone(process)
    commands.run(command, out)
    assert_same(command, out, whole(command))


@pytest.mark.parametrize("command", ["embed", "distill"])
def test_a_terminal_that_closes(
    commands: Commands, whole: Callable[[str], Path], started: list[Process], tmp_path: Path, command: str
) -> None:
    """The system sends SIGHUP then, and writing to the terminal is an error: what is done is saved all the same."""
    out = commands.out(command, tmp_path)
    terminal, own = pty.openpty()
    slow = slowly(0.03, tmp_path / "decoding")

    def before() -> None:
        os.close(terminal)
        fcntl.ioctl(own, termios.TIOCSCTTY, 0)
        for descriptor in (0, 1, 2):
            os.dup2(own, descriptor)
        os.close(own)
        slow()

    process = Process(*commands(command, out), log=tmp_path / "log", before=before)
    started.append(process)
    os.close(own)
    os.set_blocking(terminal, False)

    def drained() -> bool:
        with contextlib.suppress(BlockingIOError):
            while os.read(terminal, 4096):
                pass
        return True

    wait_until(lambda: drained() and saved(command, out) and len(process.members()) >= 3, process)
    at = reached(out)
    os.close(terminal)
    assert process.wait() == 128 + signal.SIGHUP
    assert_all_gone(process)
    if command == "distill":
        assert reached(out) >= at
        assert "stopped: by SIGHUP" in (out / "events.txt").read_text()
    commands.run(command, out)
    assert_same(command, out, whole(command))


def test_workers_outlive_the_thread_that_started_them(tmp_path: Path) -> None:
    """The system would end those it is to end with their parent at the end of the *thread* that forked them."""
    for i in range(40):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(tmp_path / f"{i:02}.png")
    block = decode_items(iter_items([str(tmp_path)]), 16, "crop", 1000, workers=1)
    records: list[Any] = []

    def start() -> None:
        records.append(block.__enter__())
        next(records[0])

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    try:
        assert len(list(records[0])) == 39
    finally:
        block.__exit__(None, None, None)


def test_two_probes_at_once_share_a_folder(
    commands: Commands, whole: Callable[[str], Path], started: list[Process], tmp_path: Path
) -> None:
    """Features and rows are files that appear whole: what both make is the same."""
    for i in range(2):
        started.append(Process(*commands("probe", tmp_path / "out"), log=tmp_path / f"{i}.log"))
    assert [process.wait() for process in started] == [0, 0], [process.text() for process in started]
    assert_same("probe", tmp_path / "out", whole("probe"))
    assert not list(tmp_path.rglob("*.part"))


# The command line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_any_command_exits_as_shells_expect(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    monkeypatch.setattr("veca.cli.demo.write_demo", lambda *_, **__: signal.raise_signal(number))
    monkeypatch.setattr(sys, "argv", ["veca", "demo", "--out", str(tmp_path / "report.html")])
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as stop:
            veca.cli.main.main()
        assert stop.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_explorer_ends_without_a_traceback(
    commands: Commands, started: list[Process], tmp_path: Path, number: signal.Signals
) -> None:
    pytest.importorskip("uvicorn", reason="the explorer needs it: pip install '.[web]'")
    from veca.bench.explorer import ask

    arguments = ["explore", "--model", commands.folder / "model", "--port", 0, "--device", "cpu"]
    process = Process(*arguments, log=tmp_path / "log")
    started.append(process)
    wait_until(lambda: "Ctrl-C ends it" in process.text(), process)
    ask(int(re.findall(r":(\d+)/", process.text())[0]), "GET", "/")  # answered, so it is at work
    process.send(number)
    assert process.wait() == 128 + number, process.text()
    assert "Traceback" not in process.text()


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As SIGHUP is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        noted: list[int] = []
        with terminable(), deferred_signals(noted.append):
            signal.raise_signal(signal.SIGHUP)
        assert noted == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_comes_twice_does_not_interrupt_what_the_first_has_saved() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ended = False
    try:
        with pytest.raises(SystemExit), terminable():
            try:
                signal.raise_signal(signal.SIGTERM)
            except Terminated:
                signal.raise_signal(signal.SIGTERM)
                ended = True
                raise
        assert ended
    finally:
        signal.signal(signal.SIGTERM, before)
