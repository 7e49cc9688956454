"""MkDocs hooks: pages of notebooks and from outside this folder, links out of it, doctest examples shown as code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "docs/notebooks"
RESULTS = {f"results/{page.name}": f"results/{page.name}" for page in sorted((ROOT / "results").glob("*.md"))}
PAGES = {**RESULTS, "CHANGELOG.md": "changes.md"}
"""Pages of the project outside this folder, and their names on the site."""
DOCTEST = re.compile(r"^( *)>>> (?:.+\n?)+", re.MULTILINE)
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
"""A link from a page of this folder to a file outside it."""
NOTEBOOK = re.compile(r"(\]\((?:notebooks/)?\w+)\.ipynb")
"""A link to a notebook, from a page of this folder or from another notebook."""


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of `PAGES`, the data of the results, and every other file of the project that a page links to."""
    contents = {page: _move_inside(source, (ROOT / source).read_text()) for source, page in PAGES.items()}
    for path in sorted((ROOT / "results").rglob("*.csv")):
        contents[str(path.relative_to(ROOT))] = path.read_text()
    pages = [*Path(config.docs_dir).glob("*.md"), *(ROOT / source for source in RESULTS)]
    for target in {target for page in pages for target in OUTSIDE.findall(page.read_text())} - PAGES.keys():
        if not target.startswith("docs/"):
            contents[_copy_name(target)] = (ROOT / target).read_text()
    contents |= {f"notebooks/{path.stem}.md": render_notebook(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    for name in sorted(contents):
        files.append(File.generated(config, name, content=contents[name]))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri in PAGES.values():
        return markdown
    markdown = NOTEBOOK.sub(r"\1.md", markdown)
    if page.file.src_uri.startswith("notebooks/"):  # one folder deeper, where `results/` is a folder of the site
        return markdown.replace("](../../results/", "](../results/")
    return OUTSIDE.sub(lambda match: f"]({PAGES.get(match[1]) or _copy_name(match[1])}", markdown)


def render_notebook(path: Path) -> str:
    """A notebook as Markdown: its text, its code, and below that what it printed and drew."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(output["text"]) for output in cell.get("outputs", ()) if "text" in output)
        parts += [f"```text\n{printed.rstrip()}\n```"] * bool(printed.strip())
        for output in cell.get("outputs", ()):
            images = ((kind, data) for kind, data in output.get("data", {}).items() if kind.startswith("image/"))
            parts += [f"![](data:{kind};base64,{''.join(data).replace(chr(10), '')})" for kind, data in images]
    return "\n\n".join(parts)


def _move_inside(source: str, markdown: str) -> str:
    """Rewrite the links of a page outside this folder for its place on the site."""
    if not source.startswith("results/"):
        return markdown.replace("](docs/", "](")
    markdown = markdown.replace("](../docs/", "](../")
    return re.sub(
        r"\]\(\.\./((?:src|recipes|tests|tools)/[^)#\s]+)", lambda match: f"](../{_copy_name(match[1])}", markdown
    )


def _copy_name(target: str) -> str:
    """Name of the copy of a project file; as text, so that a browser shows it."""
    return f"files/{target}.txt"


class Examples(griffe.Extension):
    """Show doctests as code: Markdown would take `>>>` for quotations."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(
                lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", obj.docstring.value
            )
