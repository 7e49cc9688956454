"""Draw the figures of the documentation again: `make gallery`, after weights have changed.

Runs the commands of gallery.md in a folder with the sample photographs and converts NAME.png to
images/gallery/NAME.webp. If there is a Chromium, images/demo.jpg is cut from the report of `veca demo`. With names,
only those are made: `python docs/gallery.py cores paths demo`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from veca.images.samples import sample_images
from veca.utils.files import atomic_path

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
WIDTH = 1200
MAX_BYTES = 1_200_000
"""Limit for all files in images/gallery."""


def parse_commands() -> dict[str, list[str]]:
    """Arguments of every `veca` command of the page, by the name of the figure it writes."""
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    commands = {}
    for line in re.findall(r"^veca (.+)$", page.replace("\\\n", ""), re.MULTILINE):
        arguments = shlex.split(line)
        commands[Path(arguments[-1]).stem] = arguments
    return commands


def run_veca(arguments: list[str], folder: Path) -> None:
    print("veca", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "veca", *arguments], cwd=folder, check=True, stderr=subprocess.DEVNULL)


def save_webp(drawn: Path, to: Path) -> None:
    """Convert a figure to WebP, at most WIDTH pixels wide."""
    with Image.open(drawn) as source:
        image = source.convert("RGB")
    if image.width > WIDTH:
        image = image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)
    with atomic_path(to) as part:
        image.save(part, "WEBP", quality=80, method=6)


def shoot_demo(folder: Path, chromium: str) -> None:
    """Write the first image's section of the demo report to images/demo.jpg."""
    from playwright.sync_api import sync_playwright

    run_veca(["demo", "--out", "demo.html"], folder)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 900}, color_scheme="light")
        page.goto((folder / "demo.html").as_uri())
        box = page.locator("section").first.bounding_box()
        assert box
        clip: Any = {"x": box["x"] - 24, "y": box["y"] - 12, "width": box["width"] + 48, "height": box["height"] + 24}
        with atomic_path(IMAGES / "demo.jpg") as part:
            page.screenshot(path=part, type="jpeg", quality=88, full_page=True, clip=clip)
        browser.close()


def main(names: list[str]) -> None:
    commands = parse_commands()
    if unknown := sorted(set(names) - commands.keys() - {"demo"}):
        raise SystemExit(f"no figure is called {', '.join(unknown)}; there are {', '.join(commands)} and demo")
    to = IMAGES / "gallery"
    to.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for photo in sample_images():
            shutil.copy(photo, folder)
        for name, arguments in commands.items():
            if not names or name in names:
                run_veca(arguments, folder)
                save_webp(folder / arguments[-1], to / f"{name}.webp")
        chromium = shutil.which("chromium")
        if chromium is None:
            print("images/demo.jpg was not made: there is no Chromium here")
        elif not names or "demo" in names:
            shoot_demo(folder, chromium)
    total = sum(file.stat().st_size for file in to.iterdir())
    print(f"{to.relative_to(DOCS)}: {total / 1000:.0f} kB")
    if total > MAX_BYTES:
        raise SystemExit(f"images/gallery has {total} bytes; the limit is {MAX_BYTES}. Draw fewer panels")


if __name__ == "__main__":
    main(sys.argv[1:])
