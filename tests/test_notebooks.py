"""Every notebook of the documentation runs from top to bottom, and holds the outputs of a run on its full settings."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from test_docs import OPTIONS, anchors

from veca.utils.console import PlainConsole

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools/notebooks.py")
assert spec is not None
assert spec.loader is not None
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def texts_of(notebook: Any) -> list[str]:
    """All that the outputs show as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [text for output in outputs for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return shown + [output.text for output in outputs if output.output_type == "stream"]


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One for all: most of the time of a small notebook goes into importing torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with notebooks.start_kernel() as kernel:
            yield kernel


@each_notebook
def test_notebooks_run(path: Path, tmp_path: Path, kernel: Any) -> None:
    notebook = notebooks.read_notebook(path)
    notebooks.shrink(notebook)
    notebooks.execute(notebook, tmp_path, kernel)  # raises the error of a cell
    assert "Warning" not in "".join(texts_of(notebook))


def test_lines_are_plain_in_a_notebook_alone(tmp_path: Path, kernel: Any) -> None:
    # Starting the kernel imported ipykernel here too, where a console stays that of a terminal.
    assert "ipykernel" in sys.modules
    assert PlainConsole(file=io.StringIO(), _environ={"FORCE_COLOR": "1"}).is_terminal

    code = "from veca.utils.console import PlainConsole\nprint(PlainConsole().is_terminal)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    notebooks.execute(notebook, tmp_path, kernel)
    assert texts_of(notebook) == ["False\n"]


@each_notebook
def test_notebooks_hold_their_outputs(path: Path) -> None:
    notebook = notebooks.read_notebook(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell.outputs]
    assert any(kind.startswith("image/") for output in outputs for kind in output.get("data", {}))
    assert all(output.output_type != "error" for output in outputs)
    text = "".join(texts_of(notebook))
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|usr|var|Users)/|site-packages|\x1b|Warning|Traceback", text)
    assert path.stat().st_size < 400_000


@each_notebook
def test_notebooks_say_what_to_install_and_link_to_what_exists(path: Path) -> None:
    notebook = notebooks.read_notebook(path)
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert "pip install '.[" in prose[0]
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", "".join(prose)):
        target = path.parent / link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"
    for verb, options in re.findall(r"`veca ([a-z]+)\b([^`]*)`", "".join(prose)):
        names = [name for name in OPTIONS if name.split()[0] == verb]
        assert names, verb
        assert set(re.findall(r"(?<!\S)--[a-z][\w-]*", options)) <= set().union(*(OPTIONS[name] for name in names))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "mkdocs.yml"])
def test_notebooks_are_linked(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not [path.name for path in PATHS if f"notebooks/{path.stem}." not in text]
