"""What the site needs beyond Markdown: pages that lie outside this folder, links that lead out of it, and examples of
docstrings shown as code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"RESULTS.md": "results.md", "CHANGELOG.md": "changes.md"}
DOCTEST = re.compile(r"^( *)>>> (?:.+\n?)+", re.MULTILINE)
OUT = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages, and every file of the project that some page links to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_inside((ROOT / source).read_text())))
    for page in sorted(Path(config.docs_dir).glob("*.md")):
        for target in sorted(set(OUT.findall(page.read_text())) - PAGES.keys()):
            if files.get_file_from_path(_name(target)) is None:
                files.append(File.generated(config, _name(target), content=(ROOT / target).read_text()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return OUT.sub(lambda found: f"]({PAGES.get(found[1]) or _name(found[1])}", markdown)


def _inside(markdown: str) -> str:
    """A page of the project's root, as one of this folder."""
    return markdown.replace("](docs/", "](")


def _name(target: str) -> str:
    """As text, so that a browser shows it."""
    return f"files/{target}.txt"


class Examples(griffe.Extension):
    """Doctests, which Markdown would take for quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value
            )
