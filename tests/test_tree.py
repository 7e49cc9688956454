"""CONTRIBUTING.md shows the source tree as the docstrings describe it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("tree", ROOT / "tools/tree.py")
assert spec is not None
assert spec.loader is not None
tree = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tree)


def test_contributing_has_the_tree_of_the_sources() -> None:
    assert tree.render_tree() in (ROOT / "CONTRIBUTING.md").read_text(), "run python tools/tree.py"


def test_every_module_says_in_one_line_what_it_holds() -> None:
    undescribed = [name.strip() for name, description in tree.list_package(ROOT / "src/veca") if not description]
    assert not undescribed


def test_modules_come_before_subpackages(tmp_path: Path) -> None:
    for name, docstring in {"__init__": "Top.", "zebra": "Stripes, and\nmore.", "apes/__init__": "Apes."}.items():
        path = tmp_path / "pack" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""{docstring}"""\n')
    lines = tree.render_tree(tmp_path / "pack").splitlines()
    assert lines[2:-2] == ["pack/       Top", "  zebra.py  Stripes, and", "  apes/     Apes"]
