"""What is generated in results/ equals its CSV files, and every figure has its provenance."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("results", ROOT / "tools/results.py")
assert spec is not None
assert spec.loader is not None
results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(results)

PAGES = sorted((ROOT / "results").glob("*.md"))
FILES = sorted((ROOT / "results").glob("*/*.csv"))


def test_everything_generated_is_up_to_date() -> None:
    for path, text in results.generate_files().items():
        assert path.read_text() == text, f"{path}: run python tools/results.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_table_is_generated_from_csv_files(page: Path) -> None:
    outside = results.TABLE.sub("", page.read_text())
    assert "|---" not in outside, "a table that no CSV file holds"
    assert "<!--" not in outside, "a marker without its end"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_csv_file_says_where_its_figures_come_from(path: Path) -> None:
    assert not results.find_problems(path)


def test_every_csv_file_is_shown_on_a_page() -> None:
    shown = {name for page in PAGES for name in re.findall(r"\]\((\w+/[\w-]+\.csv)\)", page.read_text())}
    assert shown == {str(path.relative_to(ROOT / "results")) for path in FILES}


def test_problems_of_a_file_are_found(tmp_path: Path) -> None:
    path = tmp_path / "speed.csv"
    path.write_text("# command: veca bench\n# machine: H200\nmodel,ms,date\nbase,6.66,2026-11-15\n")
    assert results.find_problems(path) == [f"{path}: no commit"]
    path.write_text("contender,speed,command,machine,date,commit\nveca,1,,,,\n")
    assert results.find_problems(path) == [f"{path}: benchmark.csv has no column speed"]


def test_two_measurements_do_not_share_a_cell() -> None:
    rows = [{"size": "256", "cores": "8", "score": "57.2"}, {"size": "512", "cores": "8", "score": "57.4"}]
    rows = [row | dict.fromkeys((*results.PROVENANCE, "file"), "") for row in rows]
    view = {"rows": {"cores": "C"}, "columns": {"size": "{} px"}, "values": {"score": ""}}
    assert results.pivot_rows(rows, view)[:2] == (["C", "256 px", "512 px"], [["8", "57.2", "57.4"]])
    with pytest.raises(SystemExit, match="two measurements of score"):
        results.pivot_rows(rows, view | {"columns": {}})
    assert results.pivot_rows(rows, view | {"where": {"size": "512"}})[1] == [["8", "57.4"]]


def test_the_example_loads_plain_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "results/README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert "57.2" in capsys.readouterr().out
    text = {"contender", "model", "precision", "machine", "date", "commit", "command", "file"}
    text |= {"task", "dataset", "scored_on", "metric", "options"}
    for table in (names["speed"], names["scores"]):
        assert set(table.select_dtypes(exclude="number").columns) <= text  # type: ignore[attr-defined]
        assert (table["gflops"] > 0).all()  # type: ignore[index]
