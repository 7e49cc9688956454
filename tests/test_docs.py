"""Every Python block in the README and the docs runs, and what they say about commands is true."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from PIL import Image

import veca
from veca.cli.common import LazyCommand
from veca.cli.main import app
from veca.train.finetune.settings import FinetuneClassifySettings, FinetuneDepthSettings, FinetuneSegmentSettings
from veca.train.recipe import Recipe, WidthRecipe

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "results").glob("*.md"))
OTHERS = [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")]
CARDS = sorted((ROOT / "src/veca/weights").glob("*/README.md"))
RECIPES = sorted((ROOT / "recipes").iterdir())
BLOCKS = [(page, block) for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page.stem}-{i}" for i, (page, _) in enumerate(BLOCKS)])
@pytest.mark.filterwarnings("ignore")
def test_python_examples_of_the_docs_run(
    page: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.effect_mandelbrot((300, 200), (-2, -1, 1, 1), 50).convert("RGB").save("photo.jpg")
    exec(compile(block, str(page), "exec"), {})


def test_the_readme_has_an_example() -> None:
    assert any(page.name == "README.md" for page, _ in BLOCKS)


def _commands(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        command = command.load() if isinstance(command, LazyCommand) else command
        yield from _commands(command, f"{above}{name} ") if hasattr(command, "commands") else [(above + name, command)]


COMMANDS = dict(_commands(typer.main.get_command(app)))
OPTIONS = {name: {o for p in each.params for o in (*p.opts, *p.secondary_opts)} for name, each in COMMANDS.items()}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *RESULTS, *OTHERS, *CARDS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_docs_have_targets(page: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize(
    "page", [*PAGES, *RESULTS, *OTHERS, *CARDS, *RECIPES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_exist_and_take_their_options(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    groups = {name.split()[0] for name in COMMANDS if " " in name}
    for verb, kind, rest in re.findall(r"(?:^|`|-m |  |\$\()veca ([a-z]+)\b ?([a-z]*)([^`\n]*)", text, re.MULTILINE):
        if verb in groups:
            names = [f"{verb} {kind}"] if f"{verb} {kind}" in COMMANDS else [n for n in COMMANDS if n.startswith(verb)]
        else:
            assert verb in COMMANDS, verb
            names = [verb]
        known = set().union(*(OPTIONS[name] for name in names))
        assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", rest.partition("#")[0])) <= known, f"veca {verb} {kind}{rest}"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS, *RECIPES], ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_exist_and_take_their_options(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    for script, rest in re.findall(r"python (?:\"\$recipes/\.\./)?((?:tests/)?tools/\w+\.py)\"?([^`\n]*)", text):
        source = (ROOT / script).read_text()
        assert all(f'"{option}"' in source for option in re.findall(r"(?<!\S)--[a-z][\w-]*", rest)), f"{script}{rest}"
    for script in re.findall(r"(?:^|`|\")(?:\$)?(recipes/[\w-]+\.sh)", text, re.MULTILINE):
        assert (ROOT / script).exists(), script


HOMES = {
    "demo": (), "embed": ("embed", "scale"), "distill": ("training",), "report": ("reports",), "cores": ("figures",),
    "info": ("weights",), "convert": ("weights",), "export": ("export",), "explore": ("explore",), "serve": ("serve",),
    "bench": ("speed", "serve"), "figure": ("figures",), "probe": ("evaluation",), "finetune": ("finetune",),
    "predict": ("finetune",), "search": ("search", "embed"),
}  # fmt: skip
"""Where each command is explained; of `veca demo` there is nothing to explain."""
PLAIN = {"--device", "--help", "--model", "--out", "--overwrite", "--progress", "--seed", "--workers"}
"""Options whose help says all there is."""


def _told_of(option: str, text: str) -> bool:
    """As an option, or as the setting of the same name."""
    return re.search(rf"{option}\b|`{option[2:].replace('-', '_')}`", text) is not None


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_and_is_on_its_page(name: str) -> None:
    pages = [ROOT / f"docs/{page}.md" for page in HOMES[name.split()[0]]]
    text = "".join(page.read_text() for page in pages)
    for parameter in COMMANDS[name].params:
        assert parameter.name == "help" or parameter.help, parameter.name
        assert "[default" not in (parameter.help or "")  # rich takes it for markup and drops it
        names = {option for option in (*parameter.opts, *parameter.secondary_opts) if option.startswith("--")}
        assert not pages or not names or names & PLAIN or any(_told_of(option, text) for option in names), names


def _recipe_keys() -> Iterator[tuple[str, Any]]:
    for name, value in Recipe().to_dict().items():
        section = dataclasses.is_dataclass(getattr(Recipe(), name))
        yield from ((f"{name}.{key}", each) for key, each in value.items()) if section else [(name, value)]


KEYS = dict(_recipe_keys()) | {f"widths.{key}": value for key, value in WidthRecipe().to_dict().items()}
"""Every key of a recipe with its default; `widths` as a whole is null by default."""
TUNED = {
    field.name
    for kind in (FinetuneClassifySettings, FinetuneSegmentSettings, FinetuneDepthSettings)
    for field in dataclasses.fields(kind)
}


def test_every_key_of_a_recipe_is_on_its_page_with_its_default() -> None:
    text = (ROOT / "docs/training.md").read_text()
    told: dict[str, str] = {}  # a row is | `a`, `b` | 1, 2 | … |
    for keys, values in re.findall(r"^\| (`.+?`) \| (.+?) \|", text[text.index("## Every key") :], re.MULTILINE):
        names = re.findall(r"[\w.]+", keys)
        told |= zip(names, values.split(", ") if len(names) > 1 else [values], strict=True)
    assert sorted(told) == sorted(KEYS)
    for key, value in KEYS.items():
        said = yaml.safe_load(told[key])
        assert (float(said) if isinstance(value, float) else said) == value, key


@pytest.mark.parametrize(
    "page", [*PAGES, *RESULTS, *OTHERS, *CARDS, *RECIPES], ids=lambda page: str(page.relative_to(ROOT))
)
def test_recipe_keys_in_the_docs_exist(page: Path) -> None:
    text = page.read_text()
    sections = "|".join({key.partition(".")[0] for key in KEYS if "." in key} - {"model", "data"})  # variables, too
    found = re.findall(r"--set '?([a-z][\w.]*)=", text)
    found += re.findall(rf"(?<![\w./])(?:{sections})\.(?!py\b|csv\b)[a-z_]+\b(?![./(])", text)
    assert set(found) <= KEYS.keys() | TUNED


def test_every_setting_of_a_fine_tune_is_on_its_page() -> None:
    text = (ROOT / "docs/finetune.md").read_text()
    assert {name for name in TUNED if f"`{name}`" not in text} == {"workers", "skip_bad", "progress"}  # options alone


def test_the_gallery_has_a_command_for_every_picture() -> None:
    text = (ROOT / "docs/gallery.md").read_text()
    shown = re.findall(r"images/gallery/(\w+)\.webp", text)
    files = list((ROOT / "docs/images/gallery").iterdir())
    assert shown == re.findall(r"(?:--out|--chart) (\w+)\.png$", text, re.MULTILINE)
    assert sorted(shown) == sorted(file.stem for file in files)
    assert sum(file.stat().st_size for file in files) < 1.2e6


def _search_from_disk(site: Path) -> None:
    """Search the site as a reader does who opens it without a server."""
    if (chromium := shutil.which("chromium")) is None:
        return
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto((site / "results" / "speed.html").as_uri())
        page.locator("input.md-search__input").click()
        page.keyboard.type("budget")
        page.locator(".md-search-result__item").first.wait_for()
        browser.close()


def test_the_site_builds_without_a_warning_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    # In a process of its own: after other tests, Python 3.11 may fail to parse a module ("AST constructor recursion").
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--site-dir",
        str(site),
    ]  # strict: a dead link is an error
    done = subprocess.run(
        build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for page in PAGES[1:]:
        text = (site / f"{page.stem}.html").read_text()
        assert not re.findall(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//|<link[^>]*href="(?:https?:)?//', text)
    reference = (site / "api.html").read_text()
    assert "md-search__input" in reference
    _search_from_disk(site)
    assert "&gt;&gt;&gt;" in reference  # examples as code, not as quotations
    assert all(f'id="veca.{name}"' in reference for name in set(veca.__all__) - {"hub", "images", "ImageError"})
    assert 'id="veca.images.ImageError"' in reference
    for page in RESULTS:
        assert (site / "results" / page.with_suffix(".html").name.replace("README", "index")).exists()
    assert (site / "results/speed/forward.csv").read_text() == (ROOT / "results/speed/forward.csv").read_text()
    assert "files/recipes/quick.yaml.txt" in (site / "training.html").read_text()
    assert (site / "files/recipes/quick.yaml.txt").read_text() == (ROOT / "recipes/quick.yaml").read_text()
