"""Render the tables of results/*.md from the CSV files beside them.

    python tools/results.py           # rewrite the pages
    python tools/results.py --check   # fail where a page differs from its CSV files

A page names a file between two markers, and the table between them is generated:

    <!-- table speed/forward.csv -->
    <!-- end -->

A CSV file starts with its provenance, one `# key: value` line for each of command (repeatable), machine, date and
commit. Where rows were measured apart, these keys are columns of the table instead.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"
PROVENANCE = ("command", "machine", "date", "commit")
TABLE = re.compile(r"<!-- table (\S+\.csv) -->\n.*?<!-- end -->", re.DOTALL)
NUMBER = re.compile(r"[-–\d.,e+/ ]*( ?[×%])?")


def read_table(path: Path) -> tuple[dict[str, list[str]], list[list[str]]]:
    """The `# key: value` lines at the top of a CSV file, and its rows with the header first."""
    lines = path.read_text().splitlines()
    facts: dict[str, list[str]] = {}
    while lines and lines[0].startswith("# "):
        key, _, value = lines.pop(0)[2:].partition(": ")
        facts.setdefault(key, []).append(value)
    return facts, list(csv.reader(lines))


def find_problems(path: Path) -> list[str]:
    """What is wrong with a CSV file: missing provenance, rows of different lengths."""
    facts, rows = read_table(path)
    problems = [f"{path}: no {key}" for key in PROVENANCE if not facts.get(key) and key not in rows[0]]
    problems += [
        f"{path}: row {row} has {len(row)} cells, the header has {len(rows[0])}"
        for row in rows
        if len(row) != len(rows[0])
    ]
    return problems


def render_table(name: str) -> str:
    """A CSV file as a Markdown table with its provenance below."""
    facts, (header, *rows) = read_table(RESULTS / name)
    columns = list(zip(*rows, strict=True))
    # Numbers are aligned to the right, text to the left.
    aligned = ["---:" if all(NUMBER.fullmatch(cell) for cell in column) else "---" for column in columns]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, aligned, *rows)]
    facts["commit"] = [f"commit {commit}" for commit in facts.get("commit", [])]
    source = [value for key in PROVENANCE[1:] for value in facts.get(key, [])]
    lines += ["", f"{', '.join([f'[{name}]({name})', *source])}"]
    if "command" in facts:
        lines += ["", "```sh", *facts["command"], "```"]
    return "\n".join(lines)


def render_page(text: str) -> str:
    """The page with every table between markers generated anew."""
    return TABLE.sub(lambda match: f"<!-- table {match[1]} -->\n{render_table(match[1])}\n<!-- end -->", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail where a page would change")
    check = parser.parse_args().check
    problems = [problem for path in sorted(RESULTS.glob("*/*.csv")) for problem in find_problems(path)]
    for page in sorted(RESULTS.glob("*.md")):
        text = page.read_text()
        if (rendered := render_page(text)) != text:
            if check:
                problems.append(f"{page} differs from its CSV files: run python tools/results.py")
            else:
                page.write_text(rendered)
    sys.exit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
