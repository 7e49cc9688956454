"""Every Python block in the README and the docs runs, and what they say about commands is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

from veca.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [(page, block) for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page.stem}-{i}" for i, (page, _) in enumerate(BLOCKS)])
@pytest.mark.filterwarnings("ignore")
def test_python_blocks_run(page: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.effect_mandelbrot((300, 200), (-2, -1, 1, 1), 50).convert("RGB").save("photo.jpg")
    exec(compile(block, str(page), "exec"), {})


def test_the_readme_has_an_example() -> None:
    assert any(page.name == "README.md" for page, _ in BLOCKS)


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_links_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    verbs = {command.callback.__name__ for command in app.registered_commands if command.callback}
    verbs |= {group.name for group in app.registered_groups}
    for verb in re.findall(r"^veca (\w+)", text, re.MULTILINE):
        assert verb in verbs
