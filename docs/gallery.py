"""Draws the pictures of the documentation again: `make gallery`, after weights have changed.

It runs the commands that gallery.md shows, in a folder that holds the sample photographs, and keeps what they write:
NAME.png becomes images/gallery/NAME.webp. Then, where there is a Chromium, it cuts images/demo.jpg out of the report of
`veca demo`. With names it makes only those: `python docs/gallery.py cores paths demo`.
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

from veca.inspect.demo import sample_pictures
from veca.utils.files import atomic_path

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
WIDTH = 1200
MOST = 1_200_000
"""Bytes that all of images/gallery may have."""


def commands() -> dict[str, list[str]]:
    """By the name of the picture each writes, the arguments of every `veca` command of the page."""
    page = (DOCS / "gallery.md").read_text(encoding="utf-8")
    found = {}
    for line in re.findall(r"^veca (.+)$", page.replace("\\\n", ""), re.MULTILINE):
        words = shlex.split(line)
        found[Path(words[-1]).stem] = words
    return found


def veca(words: list[str], folder: Path) -> None:
    print("veca", *words, flush=True)
    subprocess.run([sys.executable, "-m", "veca", *words], cwd=folder, check=True, stderr=subprocess.DEVNULL)


def keep(drawn: Path, to: Path) -> None:
    """As WebP, at most WIDTH wide."""
    with Image.open(drawn) as picture:
        small = picture.convert("RGB")
    if small.width > WIDTH:
        small = small.resize((WIDTH, round(small.height * WIDTH / small.width)), Image.Resampling.LANCZOS)
    with atomic_path(to) as part:
        small.save(part, "WEBP", quality=80, method=6)


def cut_demo(folder: Path, chromium: str) -> None:
    """The first picture's section of the report, as images/demo.jpg."""
    from playwright.sync_api import sync_playwright

    veca(["demo", "--out", "demo.html"], folder)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 900}, color_scheme="light")
        page.goto((folder / "demo.html").as_uri())
        box = page.locator("section").first.bounding_box()
        assert box
        room: Any = {"x": box["x"] - 24, "y": box["y"] - 12, "width": box["width"] + 48, "height": box["height"] + 24}
        with atomic_path(IMAGES / "demo.jpg") as part:
            page.screenshot(path=part, type="jpeg", quality=88, full_page=True, clip=room)
        browser.close()


def main(names: list[str]) -> None:
    listed = commands()
    if unknown := sorted(set(names) - listed.keys() - {"demo"}):
        raise SystemExit(f"no picture is called {', '.join(unknown)}; there are {', '.join(listed)} and demo")
    to = IMAGES / "gallery"
    to.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for picture in sample_pictures():
            shutil.copy(picture, folder)
        for name, words in listed.items():
            if not names or name in names:
                veca(words, folder)
                keep(folder / words[-1], to / f"{name}.webp")
        chromium = shutil.which("chromium")
        if chromium is None:
            print("images/demo.jpg was not made: there is no Chromium here")
        elif not names or "demo" in names:
            cut_demo(folder, chromium)
    total = sum(file.stat().st_size for file in to.iterdir())
    print(f"{to.relative_to(DOCS)}: {total / 1000:.0f} kB")
    if total > MOST:
        raise SystemExit(f"that is more than {MOST / 1000:.0f} kB; draw fewer panels")


if __name__ == "__main__":
    main(sys.argv[1:])
