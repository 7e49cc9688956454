"""Small training runs for tests: what they learn from, in this process or in their own, and what they leave.

A process of its own is forked, so it starts at once, with everything imported; it is the command line from there on.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from sample_images import smooth_image
from torch import Tensor
from typer.testing import CliRunner

import veca.cli.main
from veca.train.checkpoints import list_checkpoints
from veca.train.distill import distill
from veca.train.recipe import Recipe

CliRunner().invoke(veca.cli.main.app, ["--version"])  # has typer import what it needs, which each fork would do again

STEPS = 32
TIMES = {"time", "seconds", "images_per_s", "memory_gib", "floor_share"}
BOUND = 90.0
"""Seconds after which a run hangs."""


class Place:
    """A folder with pictures, a teacher and the recipe of a run of some seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, count, first in (("photos", 37, 0), ("validation", 6, 100)):
            (folder / name).mkdir()
            for i in range(count):
                smooth_image(first + i).save(folder / name / f"{i:02}.png")
        broken = (folder / "photos/17.png").read_bytes()
        (folder / "photos/17.png").write_bytes(broken[: len(broken) // 2])
        torch.manual_seed(0)
        settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16}
        model = transformers.Dinov2Model(transformers.Dinov2Config(**settings, image_size=48))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.3)
        model.save_pretrained(folder / "teacher")
        about = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "BitImageProcessor"}
        (folder / "teacher/preprocessor_config.json").write_text(json.dumps(about))
        self.file = folder / "recipe.yaml"
        self.file.write_text(self.recipe().to_yaml())

    def recipe(self, **changes: Any) -> Recipe:
        """Changes by key, with `__` for the dot."""
        values: dict[str, Any] = {
            "model": {"size": "veca_tiny", "overrides": {"embed_dim": 32, "depth": 2, "num_heads": 1}},
            "teacher": {"name": str(self.folder / "teacher")},
            "data": {"train": [str(self.folder / "photos")], "validation": [str(self.folder / "validation")]},
            "schedule": {"epochs": None, "steps": STEPS, "warmup": 4, "peak": 2e-3, "low": 1e-4},
            "budgets": {8: 1, 16: 1, 64: 2},
            "resolutions": [{"odds": {32: 1, 48: 1}}],
            "batch": 8,
            "precision": "float32",
            "compile": False,
            "ema": 0.9,
            "validation": {"every": 8, "budgets": [8, 64]},
            "checkpoints": {"every": 4, "keep": 3},
            "log_every": 5,
            "seed": 1,
        }
        values["data"]["workers"] = 0
        for key, value in changes.items():
            *above, last = key.split("__")
            at = values
            for name in above:
                at = at.setdefault(name, {})
            at[last] = value
        return Recipe.from_dict(values)


def train(recipe: Recipe, folder: Path, **options: Any) -> list[str]:
    """A run in this process; what it said."""
    said: list[str] = []
    distill(recipe, folder, device="cpu", say=said.append, **options)
    return said


def check_fork() -> None:
    """Autograd refuses to work in a fork of a process that has compiled something: then these tests need their own."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        finally:
            os._exit(int(sys.exc_info()[0] is not None))
    if os.waitpid(pid, 0)[1]:
        reason = "tests before this one have compiled something; run this file on its own, as `make test` does"
        pytest.fail(reason) if os.environ.get("VECA_TESTS_FORK") else pytest.skip(reason)


def default_signals() -> None:
    """For a new process, before it begins (`preexec_fn`): signals as a shell in the foreground leaves them.

    Scripts start background jobs with SIGINT and SIGQUIT ignored, nohup with SIGHUP, and that is inherited.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Process:
    """`veca ARGUMENTS` in a forked process, the leader of a group of its own. `before` runs in it first."""

    def __init__(
        self,
        *arguments: object,
        log: Path,
        environment: dict[str, str] | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        check_fork()
        self.log, self.code = log, -1
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.setsid()
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                default_signals()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.environ.update(environment or {})
                sys.argv = ["veca", *map(str, arguments)]
                if before is not None:
                    before()
                veca.cli.main.main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1 if end.code else 0
            except BaseException:
                import traceback

                traceback.print_exc()
                code = 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """The process and all it started."""
        if self.running():
            os.killpg(self.pid, number)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def members(self) -> list[int]:
        """It and all processes it started that have not ended."""
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdecimal():
                    state, _, _, session = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
                    found += [int(entry)] * (session == str(self.pid) and state != "Z")
        return found

    def running(self) -> bool:
        if self.code == -1:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code == -1

    def wait(self, bound: float = BOUND) -> int:
        """Its exit status; a run that hangs is killed and fails the test."""
        end = time.monotonic() + bound
        while self.running():
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"still running after {bound} s: {self.text()[-2000:]}")
            time.sleep(0.005)
        return self.code

    def text(self) -> str:
        return " ".join(self.log.read_text().split()) if self.log.exists() else ""


def start(
    recipe: Recipe, folder: Path, processes: int = 1, before: Callable[[], object] | None = None
) -> list[Process]:
    """`veca distill` in so many processes."""
    file = folder.with_suffix(".yaml")
    file.write_text(recipe.to_yaml())
    return start_all(["distill", file, "--out", folder, "--device", "cpu"], folder, processes, before)


def free_port() -> int:
    """A port that is free, below those that the system gives to connections: none of them takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def start_all(
    arguments: Sequence[object], folder: Path, processes: int, before: Callable[[], object] | None = None
) -> list[Process]:
    """`veca ARGUMENTS` in so many processes, as torchrun would start them; what each says is beside the folder."""
    port, started = str(free_port()), []
    for rank in range(processes):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        log = folder.with_suffix(f".{rank}.log")
        started.append(Process(*arguments, log=log, environment=environment, before=before if rank == 0 else None))
    return started


def finish(run: list[Process], bound: float = BOUND) -> list[int]:
    try:
        return [process.wait(bound) for process in run]
    finally:
        for process in run:
            process.kill()


def kill(run: list[Process]) -> None:
    for process in run:
        process.kill()
    for process in run:
        process.wait()


def reached(folder: Path) -> int:
    """The step of the newest checkpoint."""
    found = list_checkpoints(folder / "checkpoints")
    return int(found[-1].name.removeprefix("step-")) if found else 0


def wait_for(folder: Path, step: int, run: list[Process]) -> None:
    """Until there is a checkpoint of this step or a later one, or the run is over."""
    wait_until(lambda: reached(folder) >= step, run)


def wait_until(done: Callable[[], bool], run: list[Process]) -> None:
    end = time.monotonic() + BOUND
    while not done() and any(process.running() for process in run):
        assert time.monotonic() < end, run[0].text()[-2000:]
        time.sleep(0.002)


def table(path: Path) -> list[dict[str, str]]:
    """Rows of a table, but for what a clock had a say in."""
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMES} for row in csv.DictReader(file)]


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by file and name."""
    return {f"{f.stem}: {k}": v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def different(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [k for k in sorted({*a, *b}) if k not in a or k not in b or not torch.equal(a[k], b[k])]


def summary(folder: Path) -> dict[str, Any]:
    facts = json.loads((folder / "summary.json").read_text())
    return {key: value for key, value in facts.items() if key not in ("seconds", "recipe")}


def assert_same_run(found: Path, expected: Path) -> None:
    """Bit for bit: weights, what the optimizers keep, and every row of the tables but for times."""
    ours, theirs = (list_checkpoints(folder / "checkpoints")[-1] for folder in (found, expected))
    assert ours.name == theirs.name
    assert different(tensors(ours), tensors(theirs)) == []
    for name in ("model.safetensors", "best/model.safetensors"):
        assert different(load_file(found / name), load_file(expected / name)) == [], name
    for name in ("metrics.csv", "validation.csv"):
        assert table(found / name) == table(expected / name), name
    assert summary(found) == summary(expected)


def copy_run(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))
