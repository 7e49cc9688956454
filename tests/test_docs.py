"""Every Python block in the README and the docs runs, and what they say about commands is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from PIL import Image

import veca
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


def test_the_gallery_has_a_command_for_every_picture() -> None:
    text = (ROOT / "docs/gallery.md").read_text()
    shown = re.findall(r"images/gallery/(\w+)\.webp", text)
    files = list((ROOT / "docs/images/gallery").iterdir())
    assert shown == re.findall(r"(?:--out|--chart) (\w+)\.png$", text, re.MULTILINE)
    assert sorted(shown) == sorted(file.stem for file in files)
    assert sum(file.stat().st_size for file in files) < 1.2e6


def test_the_site_builds_without_a_warning_and_needs_nothing_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    site = tmp_path / "site"
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site)))  # strict: a dead link is an error
    for page in PAGES[1:]:
        text = (site / f"{page.stem}.html").read_text()
        assert not re.findall(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//|<link[^>]*href="(?:https?:)?//', text)
    reference = (site / "api.html").read_text()
    assert "md-search__input" in reference
    assert "&gt;&gt;&gt;" in reference  # examples as code, not as quotations
    assert all(f'id="veca.{name}"' in reference for name in set(veca.__all__) - {"hub", "images", "ImageError"})
    assert 'id="veca.images.ImageError"' in reference
    assert "files/recipes/quick.yaml.txt" in (site / "training.html").read_text()
    assert (site / "files/recipes/quick.yaml.txt").read_text() == (ROOT / "recipes/quick.yaml").read_text()
