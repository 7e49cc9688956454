"""The README from top to bottom, as a new user: every command and example in its code blocks, in their order.

    python tests/tools/newcomer.py   # in a fresh clone and environment: some 6 GB in a temporary folder, and minutes

Each step must end well, and within the time that the README states beside it ("2 min on two cores"); the machine should
have nothing else to do. `make test` is left out. `tests/test_newcomer.py` runs the steps in the present environment, in
small.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EXPLORE = "veca explore"


class Step(NamedTuple):
    """A command for the shell, or an example in Python."""

    command: str
    python: bool = False
    limit: float | None = None
    """Seconds that the README states."""

    @property
    def name(self) -> str:
        return "example in Python" if self.python else self.command

    def run(self, folder: Path, environment: Mapping[str, str]) -> float:
        """Run in `folder`, and return the seconds it took; an error is raised with what it printed."""
        arguments = ["python", "-c", self.command] if self.python else ["bash", "-euc", self.command]
        program = shutil.which(arguments[0], path=environment["PATH"])
        assert program is not None
        begin = time.perf_counter()
        done = subprocess.run([program, *arguments[1:]], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (
            f"{self.command}\nstatus {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
        return time.perf_counter() - begin


def read_steps(page: Path = ROOT / "README.md") -> list[Step]:
    """The steps in the code blocks of a page: each line of the shell, each example in Python."""
    steps = list[Step]()
    for language, block in re.findall(r"```(sh|python)\n(.*?)```", page.read_text(), re.DOTALL):
        if language == "python":
            steps.append(Step(block, python=True))
            continue
        for line in block.splitlines():
            command, _, comment = line.partition("#")
            stated = re.search(r"(\d+) (s|min) on two cores", comment)
            limit = int(stated[1]) * {"s": 1, "min": 60}[stated[2]] if stated else None
            steps.append(Step(command.strip(), limit=limit))
    return steps


def make_belongings(folder: Path) -> None:
    """What the README takes a user to have: photo.jpg, photos/, others/ and labelled/."""
    photo = Image.effect_mandelbrot((300, 200), (-2, -1, 1, 1), 50).convert("RGB")
    photo.save(folder / "photo.jpg")
    colours = {"cat": (250, 120, 0), "dog": (0, 120, 250)}
    for name in ("photos", "others", *(f"labelled/{label}" for label in colours)):
        (folder / name).mkdir(parents=True)
        colour = colours.get(Path(name).name, (90, 90, 90))
        for i in range(14):
            window = photo.crop((7 * i, 3 * i, 7 * i + 200, 3 * i + 150))
            Image.blend(window, Image.new("RGB", window.size, colour), 0.4).save(folder / name / f"{i}.jpg")


def clean_environment(home: Path, python: Path, **more: str) -> dict[str, str]:
    """The environment of a user with an empty home, whose `python` and `veca` are those of an installation."""
    home.mkdir(exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if key in ("LANG", "PIP_INDEX_URL", "PIP_CONFIG_FILE")}
    path = f"{python}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "PATH": path, **more}


@contextmanager
def serve(command: str, folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Run the explorer while the block runs; its address, which it prints."""
    with subprocess.Popen(
        ["bash", "-euc", f"exec {command}"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("Explorer: http://127.0.0.1:"), line
            yield line.split()[1]
        finally:
            server.terminate()


def drag_budget(address: str) -> None:
    """Open the explorer's page in Chromium, see the picture and its features, drag the budget to its left end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(address)
        page.locator(".pane[data-shown*=' 64 ']").first.wait_for()  # "picture cores size layer"
        features = page.locator(".features canvas").first
        before = features.screenshot()
        assert Image.open(io.BytesIO(before)).convert("RGB").getcolors(1000) is None, "the picture has few colours"
        slider = page.locator("input.cores").first
        slider.scroll_into_view_if_needed()
        box = slider.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
        page.mouse.down()
        page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2, steps=5)
        page.mouse.up()
        page.locator(".pane[data-shown*=' 8 ']").first.wait_for()
        assert features.screenshot() != before
        browser.close()


def run_steps(steps: Sequence[Step], folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Run all steps; a line for each that failed or took longer than it should."""
    problems = list[str]()
    for step in steps:
        print(step.name, end=" … ", flush=True)
        if step.command == EXPLORE:
            with serve(step.command, folder, environment) as address:
                drag_budget(address)
            print("opened")
            continue
        try:
            seconds = step.run(folder, environment)
        except AssertionError as error:
            print("failed")
            problems.append(str(error))
            continue
        print(f"{seconds:.0f} s")
        if step.limit is not None and seconds > step.limit:
            problems.append(f"{step.name}: {seconds:.0f} s; the README says {step.limit:.0f} s")
    return problems


def main() -> None:
    steps = [step for step in read_steps() if step.command != "make test"]
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "veca"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        make_belongings(clone)
        problems = run_steps(steps, clone, clean_environment(Path(folder) / "home", clone / ".venv/bin"))
    sys.exit("\n\n".join(problems) or None)


if __name__ == "__main__":
    main()
