"""Gather the measurements in results/*/*.csv, and render the tables and plots of results/*.md.

    python tools/results.py           # rewrite benchmark.csv, scores.csv, the pages and the plots
    python tools/results.py --check   # fail where one of them differs from the CSV files

A CSV file in a folder of results/ starts with its provenance, one `# key: value` line for each of command (repeatable),
machine, date and commit. Where rows were measured apart, these keys are columns instead. There are two kinds:

- measurements, one per row, of plain numbers: those with a column `contender` are gathered into benchmark.csv, those
  with a column `score` into scores.csv, with their provenance, FLOPs and the file they are from;
- tables, which a page shows as they are.

A page names a CSV file between two markers, and the table between them is generated:

    <!-- table training/small.csv -->
    <!-- end -->

Of benchmark.csv and scores.csv it shows a pivot, described in TOML inside the first marker: `where` selects rows by
their values (of a list of conditions, any), `rows` and `values` name columns and their headings, and the values of
`columns` become headings.

    <!-- table scores.csv
    where = {dataset = "pets", size = ["256", "512"]}
    rows = {task = "task"}
    columns = {cores = "C = {}"}
    values = {score = ""}
    -->
    <!-- end -->
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import veca
from veca.bench.report import MODEL_COLOURS
from veca.config import SIZES, VecaConfig
from veca.flops import dense_model_flops, model_flops
from veca.report.charts import Chart, Line, Point, chart_grid, line_chart
from veca.report.page import render
from veca.teachers.load import KNOWN_TEACHERS

ROOT = Path(__file__).resolve().parent.parent
RESULTS, CHARTS = ROOT / "results", ROOT / "docs/images/comparison"
PROVENANCE = ("command", "machine", "date", "commit")
GATHERED = {
    "benchmark.csv": (
        "contender", "model", "size", "batch", "cores", "width", "precision", "machine", "gflops", "ms", "best_ms",
        "time_share", "images_per_s", "peak_mib", "floor_ms", "floor_share", "target_ms", "against_dense",
        "against_full", "error", "date", "commit", "command", "file",
    ),
    "scores.csv": (
        "model", "task", "dataset", "scored_on", "metric", "score", "size", "cores", "width", "seed", "options",
        "gflops", "machine", "date", "commit", "command", "file",
    ),
}  # fmt: skip
"""Files that are generated from measurements, and their columns."""
MARKS = {"contender": "benchmark.csv", "score": "scores.csv"}
"""Columns that tell where measurements belong."""
TABLE = re.compile(r"<!-- table (\S+\.csv)(.*?)-->\n.*?<!-- end -->", re.DOTALL)
NUMBER = re.compile(r"[-–\d.,e+/ ]*( ?[×%])?")
SHARES, RATIOS = ("floor_share",), ("against_dense", "against_full")
Row: TypeAlias = Mapping[str, str]
PROBES = {
    "Pets, linear classifier, top-1 (%)": {"task": "classify", "dataset": "pets"},
    "Pets, 20 nearest neighbours, top-1 (%)": {"task": "knn", "dataset": "pets"},
    "CamVid val, mIoU (%)": {"task": "segment", "scored_on": "val", "seed": "0", "options": ""},
    "room depth, RMSE (m), lower is better": {"task": "depth", "metric": "rmse"},
}
"""Panels of the charts of quality, and their scores."""
PRETRAINED, TEACHER = "veca_tiny.effnetlite2_coco", "efficientnet-lite2"
TIMES = "speed/tiny-cpu.csv"


def read_table(path: Path) -> tuple[dict[str, list[str]], list[list[str]]]:
    """The `# key: value` lines at the top of a CSV file, and its rows with the header first."""
    lines = path.read_text().splitlines()
    facts: dict[str, list[str]] = {}
    while lines and lines[0].startswith("# "):
        key, _, value = lines.pop(0)[2:].partition(": ")
        facts.setdefault(key, []).append(value)
    return facts, list(csv.reader(lines))


def find_problems(path: Path) -> list[str]:
    """What is wrong with a CSV file: missing provenance, rows of different lengths, columns that are not known."""
    facts, rows = read_table(path)
    problems = [f"{path}: no {key}" for key in PROVENANCE if not facts.get(key) and key not in rows[0]]
    problems += [
        f"{path}: row {row} has {len(row)} cells, the header has {len(rows[0])}"
        for row in rows
        if len(row) != len(rows[0])
    ]
    if target := gathered_into(rows[0]):
        unknown = sorted(set(rows[0]) - set(GATHERED[target]))
        problems += [f"{path}: {target} has no column {column}" for column in unknown]
    return problems


def gathered_into(header: Sequence[str]) -> str | None:
    """The file that measurements with these columns belong to; None: it is a table of a page."""
    return next((target for mark, target in MARKS.items() if mark in header), None)


@cache
def gather_rows(target: str) -> list[Row]:
    """All measurements that belong to benchmark.csv or scores.csv, with what is the same for their file."""
    gathered = []
    for path in sorted(RESULTS.glob("*/*.csv")):
        facts, (header, *rows) = read_table(path)
        if gathered_into(header) == target:
            common = {key: "; ".join(values) for key, values in facts.items()}
            common["file"] = path.relative_to(RESULTS).as_posix()
            gathered += [derive_cells(common | dict(zip(header, row, strict=True))) for row in rows]
    return gathered


def derive_cells(row: dict[str, str]) -> Row:
    """A measurement with its FLOPs per image of size × size, and the rate that its time means."""
    if row.get("cores"):  # where a file does not say, patches used the whole MLP
        row["width"] = row.get("width") or "1"
    row["gflops"] = format_digits(count_flops(row) / 1e9, 5)
    if row.get("ms") and not row.get("images_per_s"):
        row["images_per_s"] = format_digits(1000 * int(row["batch"]) / float(row["ms"]), 4)
    return row


def count_flops(row: Row) -> float:
    """FLOPs per image of what a row measured, by its contender, its model or, of a teacher, by its name."""
    size = int(row["size"])
    if teacher := KNOWN_TEACHERS.get(row["model"]):
        return float(teacher["flops_per_pixel"]) * size**2
    config = load_config(row["model"])
    if row.get("contender", "").startswith("dense"):
        return dense_model_flops(config, size, size)
    return model_flops(config, size, size, int(row["cores"]), float(row["width"]))


@cache
def load_config(name: str) -> VecaConfig:
    """The configuration of a size, or of pretrained weights."""
    return SIZES[name] if name in SIZES else veca.load(name).config


def format_digits(value: float, digits: int) -> str:
    """A number of so many significant digits, never in powers of ten.

    >>> format_digits(15358.8, 4), format_digits(0.5, 4)
    ('15360', '0.5')
    """
    return f"{float(f'{value:.{digits}g}'):.10g}"


def format_gathered(target: str) -> str:
    """The text of benchmark.csv or scores.csv."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, GATHERED[target], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(gather_rows(target))
    return text.getvalue()


def render_table(name: str, view: str = "") -> str:
    """A CSV file, or a view of a gathered one, as a Markdown table with its provenance below."""
    if name in GATHERED:
        header, rows, facts, files = pivot_rows(gather_rows(name), tomllib.loads(view))
    else:
        facts, (header, *rows) = read_table(RESULTS / name)
        files = [name]
    # Numbers are aligned to the right, text to the left.
    columns = list(zip(*rows, strict=True))
    aligned = ["---:" if all(NUMBER.fullmatch(cell) for cell in column) else "---" for column in columns]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, aligned, *rows)]
    commits = facts.get("commit", [])
    source = [*facts.get("machine", []), *facts.get("date", []), *[f"commit {' and '.join(commits)}"] * bool(commits)]
    lines += ["", ", ".join([*(f"[{file}]({file})" for file in files), *source])]
    if "command" in facts:
        lines += ["", "```sh", *facts["command"], "```"]
    return "\n".join(lines)


def select_rows(rows: Iterable[Row], where: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows that have, in each column of `where`, its value or one of its values; of several conditions, any."""
    kept = list(rows)

    def has(row: Row, key: str, wanted: str | list[str]) -> bool:
        return row.get(key, "") in ([wanted] if isinstance(wanted, str) else wanted)

    conditions = [where] if isinstance(where, Mapping) else where
    return [row for each in conditions for row in kept if all(has(row, *item) for item in each.items())]


def pivot_rows(
    measurements: Iterable[Row], view: Mapping[str, Any]
) -> tuple[list[str], list[list[str]], dict[str, list[str]], list[str]]:
    """Header, rows, provenance and files of a view; two measurements in one cell are an error."""
    selected = select_rows(measurements, view.get("where", {}))
    index, values = list(view["rows"]), view["values"]
    (column, form), *_ = [*view.get("columns", {}).items(), ("", "")]
    cells: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for row, value in itertools.product(selected, values):
        if text := row.get(value, ""):
            at = cells.setdefault(tuple(row.get(key, "") for key in index), {})
            if at.setdefault((row.get(column, ""), value), text) != text:
                raise SystemExit(f"two measurements of {value} for {dict(row)} in one table")
    labels = in_order(row.get(column, "") for row in selected)
    places = [
        (label, value) for label in labels for value in values if any((label, value) in at for at in cells.values())
    ]
    keys = [(key,) for key in in_order(key for (key,) in cells)] if len(index) == 1 else list(cells)
    heads = [_heading(form.format(label) if label else view.get("blank", ""), values[value]) for label, value in places]
    header = [*view["rows"].values(), *heads]
    body = [[*key, *(format_cell(place[1], cells[key].get(place, "")) for place in places)] for key in keys]
    facts = {key: list(dict.fromkeys(row[key] for row in selected)) for key in PROVENANCE}
    return header, body, facts, list(dict.fromkeys(row["file"] for row in selected))


def in_order(texts: Iterable[str]) -> list[str]:
    """Different texts: numbers in ascending order and the empty text last, other texts as they come."""
    different = list(dict.fromkeys(texts))
    if all(text.replace(".", "", 1).isdigit() for text in different if text):
        different.sort(key=lambda text: float(text or "inf"))
    return different


def _heading(label: str, value: str) -> str:
    return f"{label} ({value})" if label and value else label or value


def format_cell(column: str, text: str) -> str:
    """A number for reading: thousands separated, shares in percent, ratios with a sign."""
    if not text:
        return ""
    if column in SHARES:
        return f"{100 * float(text):.0f} %"
    if column in RATIOS:
        return f"{text} ×"
    whole, point, rest = text.partition(".")
    return f"{int(whole):,}{point}{rest}" if whole.isdigit() else text


def render_page(text: str) -> str:
    """The page with every table between markers generated anew."""
    return TABLE.sub(
        lambda match: f"<!-- table {match[1]}{match[2]}-->\n{render_table(match[1], match[2])}\n<!-- end -->", text
    )


def draw_quality(title: str, x_title: str, costs: Mapping[tuple[str, str, str], float]) -> Chart:
    """Scores of the pretrained model and of its teacher against `costs` by contender, size and cores."""
    panels = []
    for name, where in PROBES.items():
        scores = [row for row in select_rows(gather_rows("scores.csv"), where) if cost_key(row) in costs]
        if any(row["model"] == TEACHER for row in scores):
            lines = [*quality_lines(scores, costs)]
            xs = [x for line in lines for x, _ in line.points]
            log_x = max(xs) > 5 * min(xs)
            panels.append((name, line_chart(lines, x_title, "", f"{name} against {x_title}", log_x=log_x)))
    return chart_grid(panels, title=title)


def cost_key(row: Row) -> tuple[str, str, str]:
    """Contender, size and cores: whose cost it is."""
    contender = "teacher" if row["model"] == TEACHER else row.get("contender", "veca").split()[0]
    return contender, row["size"], row["cores"] if contender == "veca" else ""


def quality_lines(scores: Sequence[Row], costs: Mapping[tuple[str, str, str], float]) -> Iterator[Line]:
    """Lines of one probe: VECA over sizes and over budgets, the teacher, and along the bottom the dense ViT's costs."""

    def points(rows: Iterable[Row]) -> list[Point]:
        return sorted((costs[cost_key(row)], float(row["score"])) for row in rows)

    own = select_rows(scores, {"model": PRETRAINED})
    sizes = in_order(row["size"] for row in own)
    swept = max(sizes, key=lambda size: len(select_rows(own, {"size": size})))
    veca, dense, teacher = MODEL_COLOURS["veca"], MODEL_COLOURS["dense"], 2
    budgets = in_order(row["cores"] for row in own)
    for cores, dash in (budgets[-1], ""), (budgets[0], "7 4"):
        if len(sizes) > 1:
            by_size = points(select_rows(own, {"cores": cores}))
            yield Line(f"VECA, C = {cores}, by size", by_size, veca, dots=True, dash=dash)
    by_budget = points(select_rows(own, {"size": swept}))
    yield Line(f"VECA, {swept} px, by C", by_budget, veca, dots=True, dash="2 3")
    yield Line("teacher", points(select_rows(scores, {"model": TEACHER})), teacher, dots=True)
    values = [float(row["score"]) for row in scores]
    bottom = min(values) - (max(values) - min(values)) / 10
    at_cost = [(costs["dense", size, ""], bottom) for size in sizes]
    yield Line("dense ViT, cost alone", at_cost, dense, dots=True, dash="2 3")


def count_costs() -> dict[tuple[str, str, str], float]:
    """GFLOPs of everything that has scores, and of the dense ViT at the same sizes."""
    scores = gather_rows("scores.csv")
    config = load_config(PRETRAINED)
    dense = {row["size"]: dense_model_flops(config, int(row["size"]), int(row["size"])) / 1e9 for row in scores}
    costs = {("dense", size, ""): gflops for size, gflops in dense.items()}
    return costs | {cost_key(row): float(row["gflops"]) for row in scores}


def draw_ratios() -> Chart:
    """How many times as fast as the compiled dense ViT VECA is, by size, in the runs with filled batches."""
    where = {"file": ["speed/forward.csv", "speed/forward-large.csv", "speed/dense.csv"], "contender": "veca"}
    filled = [row for row in select_rows(gather_rows("benchmark.csv"), where) if row["batch"] != "1"]
    lines = []
    for i, model in enumerate(("veca_small", "veca_base", "veca_large")):
        ratios = {float(row["size"]): float(row["against_dense"]) for row in select_rows(filled, {"model": model})}
        lines.append(Line(model, sorted(ratios.items()), i + 2, dots=True))
    x_title, y_title = "resolution, px", "time of dense / VECA"
    label = "time of the compiled dense ViT over that of VECA against resolution"
    return line_chart(lines, x_title, y_title, label, wide=True, ticks_at_points=True, log_x=True, include=(1.0,))


def draw_charts() -> dict[str, Chart]:
    """Charts of the comparison, by file name."""
    timed = select_rows(gather_rows("benchmark.csv"), {"file": TIMES})
    times = {cost_key(row): float(row["time_share"]) for row in timed}
    return {
        "quality-gflops.svg": draw_quality("Quality against GFLOPs per image", "GFLOPs", count_costs()),
        "quality-time.svg": draw_quality("Quality against CPU time per image", "time; VECA, C = 64, 768 px: 1", times),
        "dense-resolution.svg": draw_ratios(),
    }


def generate_files() -> dict[Path, str]:
    """Everything that is generated: path and text."""
    files = {RESULTS / target: format_gathered(target) for target in GATHERED}
    files |= {CHARTS / name: render("chart.svg", chart=chart, standalone=True) for name, chart in draw_charts().items()}
    return files | {page: render_page(page.read_text()) for page in sorted(RESULTS.glob("*.md"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail where a file would change")
    check = parser.parse_args().check
    problems = [problem for path in sorted(RESULTS.glob("*/*.csv")) for problem in find_problems(path)]
    for path, text in generate_files().items():
        if path.is_file() and path.read_text() == text:
            continue
        if check:
            problems.append(f"{path} differs from the CSV files: run python tools/results.py")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    sys.exit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
