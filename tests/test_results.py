"""The pages in results/ equal their CSV files, and every figure has its provenance."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("results", ROOT / "tools/results.py")
assert spec is not None
assert spec.loader is not None
results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(results)

PAGES = sorted((ROOT / "results").glob("*.md"))
FILES = sorted((ROOT / "results").rglob("*.csv"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_table_is_generated_from_its_csv_file(page: Path) -> None:
    text = page.read_text()
    assert text == results.render_page(text), "run python tools/results.py"
    outside = results.TABLE.sub("", text)
    assert "|---" not in outside, "a table that no CSV file holds"
    assert "<!--" not in outside, "a marker without its end"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_csv_file_says_where_its_figures_come_from(path: Path) -> None:
    assert not results.find_problems(path)


def test_every_csv_file_is_used_once() -> None:
    tables = [name for page in PAGES for name in results.TABLE.findall(page.read_text())]
    assert sorted(tables) == [str(path.relative_to(ROOT / "results")) for path in FILES]


def test_missing_provenance_is_found(tmp_path: Path) -> None:
    path = tmp_path / "speed.csv"
    path.write_text("# command: veca bench\n# machine: H200\nmodel,ms,date\nbase,6.66,2026-11-15\n")
    assert results.find_problems(path) == [f"{path}: no commit"]
