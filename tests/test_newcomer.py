"""The README from top to bottom, as a new user; VECA_TEST_FRESH=1 also runs it in an environment of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import newcomer
import pytest

ROOT = newcomer.ROOT
SMALL = {
    "veca demo": "--size 64",
    "veca explore": "--port 0",
    "veca embed": "--workers 0",
    "veca finetune": "--size 32 --epochs 1 --head new --workers 0",
    "veca distill": "--set schedule.steps=2 --set schedule.warmup=1 --set batch=4 --set validation.every=2",
}
"""Options that make a command quick."""
STEPS = newcomer.read_steps()
HERE = [step for step in STEPS if step.python or step.command.startswith("veca ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    newcomer.make_belongings(folder)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    paths = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return newcomer.clean_environment(tmp_path_factory.mktemp("home"), Path(sys.executable).parent, **paths)


def test_the_readme_has_what_a_newcomer_runs() -> None:
    """So that a change of the blocks cannot empty the tests below."""
    commands = [step.command for step in STEPS]
    assert {"make demo", "make test", "veca demo", newcomer.EXPLORE} <= set(commands)
    assert any(step.python for step in STEPS)
    assert any(step.limit for step in STEPS)
    known = ("veca ", "make ", "pip install '.[")
    assert all(step.command.startswith(known) for step in STEPS if not step.python)
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{command.split()[1]}:" in makefile for command in commands if command.startswith("make "))


@pytest.mark.parametrize("step", HERE, ids=[step.name for step in HERE])
def test_every_step_of_the_readme_runs(step: newcomer.Step, folder: Path, environment: dict[str, str]) -> None:
    """Each in a process of its own, in one folder: later steps take up what earlier ones left."""
    small = next((options for verb, options in SMALL.items() if step.command.startswith(verb)), "")
    step = step._replace(command=f"{step.command} {small}".strip())
    if not step.command.startswith(newcomer.EXPLORE):
        step.run(folder, environment)
        return
    if newcomer.CHROMIUM is None and os.environ.get("VECA_BROWSER") != "required":
        pytest.skip("needs Chromium: apt-get install chromium")
    with newcomer.serve(step.command, folder, environment) as address:
        newcomer.drag_budget(address)


@pytest.mark.skipif(not os.environ.get("VECA_TEST_FRESH"), reason="installs 6 GB; VECA_TEST_FRESH=1 runs it")
def test_every_step_of_the_readme_runs_in_a_fresh_environment() -> None:
    newcomer.main()
