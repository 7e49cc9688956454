"""Report of a results folder: `report.html`, `report.md`, `rows.csv` and `curves/*.svg`, from the rows in it.

It can be written at any time, from whatever rows are there. Tables are plain text, for both HTML and Markdown.
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from veca.errors import ArgumentError
from veca.probe import paper
from veca.probe.paper import Comparison, PaperNumber, compare_with_paper
from veca.probe.results import SPLITS, ProbeResult, Unusable, lower_is_better, metric_name, metric_text, read_results
from veca.report.charts import Chart, Line, Point, line_chart, shorten_middle, write_chart
from veca.report.page import data_uri, heat_rows, levels, write_page, write_text
from veca.utils.text import duration, number

TASK_ORDER = ("classify", "knn", "segment", "depth")
GALLERY_IMAGES = 6  # of a series
MAX_GALLERY_BYTES = 24 * 2**20
MAX_LINES = 6  # of ours in one chart; with more, each model has one
LABEL_LETTERS = 22  # that fit beside a line
Along: TypeAlias = Literal["budget", "resolution"]
FixedLine: TypeAlias = tuple[int | None, list[Point]]
"""Points along the budget at a resolution, or along the resolution at a budget."""


@dataclass(frozen=True, eq=False)
class Series:
    """Results of one model with equal settings, except budget, resolution and seed."""

    name: str
    rows: Sequence[ProbeResult]

    @property
    def best(self) -> ProbeResult:
        return max(self.rows, key=lambda row: row.goodness)

    def mean(self, cores: int | None, size: int) -> float:
        """The mean over seeds; nan where there is no result."""
        values = [row.value for row in self.rows if (row.cores, row.size) == (cores, size) and math.isfinite(row.value)]
        return math.fsum(values) / len(values) if values else math.nan


@dataclass(frozen=True, eq=False)
class Group:
    """All results of one task, dataset and metric; those at native sizes are a group of their own."""

    task: str
    dataset: str
    metric: str
    native: bool
    rows: Sequence[ProbeResult]
    series: Sequence[Series]

    @property
    def is_comparable(self) -> bool:
        """Whether the paper may have numbers of this."""
        return not self.native and any(row.is_published() for row in self.rows)

    @property
    def title(self) -> str:
        return f"{self.dataset} · {self.task}, {self.metric}{', native sizes' * self.native}"

    def varies(self, key: Literal["cores", "size"]) -> bool:
        return len({getattr(row, key) for row in self.rows} - {None}) > 1


def write_probe_report(folder: Path) -> tuple[Path, list[str]]:
    """Write the report of the rows in `folder` into it: the path of the page, and a sentence for each file left out."""
    folder = Path(folder)
    rows, unusable = read_results(folder)
    if not rows:
        reasons = "; ".join(f"{file} {reason}" for file, reason in unusable[:3])
        raise ArgumentError(f"{folder} has no row that can be read: {reasons or '`veca probe` has finished none yet'}")
    groups, gallery = group_rows(rows), _Gallery(folder, unusable)
    sections: list[dict[str, Any]] = [
        {
            "group": group,
            "curves": draw_curves(group),
            "grids": [grid for series in group.series if (grid := heat_grid(group, series))],
            "galleries": [(series.name, strips) for series in group.series if (strips := gallery.strips(series))],
            "paper": paper.find(group.task, group.dataset, group.metric) if group.is_comparable else [],
        }
        for group in groups
    ]
    for curve in (curve for section in sections for curve in section["curves"]):
        write_chart(curve["chart"], folder / "curves" / f"{curve['name']}.svg")
    context = {
        "name": folder.resolve().name,
        "paper_name": paper.PAPER["paper"],
        "groups": sections,
        "unusable": unusable,
        "rows": [row for group in groups for series in group.series for row in series.rows],
        "time_spent": duration(math.fsum(seconds for row in rows for seconds in row.seconds.values())),
        # What templates call: they make the tables.
        **{"compare": compare_with_paper, "paper_cells": _paper_cells, "place": _place, "class_order": _class_order},
        **{"head_curve": _head_curve, "sweep_grid": _sweep_grid},
        **{"duration": duration, "metric_text": metric_text, "metric_name": metric_name},
    }
    write_text(folder / "rows.csv", rows_csv(rows))
    write_page(folder / "report.md", "probe.md", **context)
    write_page(folder / "report.html", "probe.html", **context)
    return folder / "report.html", [f"{file} {reason}" for file, reason in unusable]


def _group_by(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def group_rows(rows: Sequence[ProbeResult]) -> list[Group]:
    """The results of each task, dataset and metric together, but for those at native sizes."""
    by_key: dict[tuple[str, str, str, bool], list[Any]] = _group_by(
        rows, lambda row: (row.task, row.dataset, row.metric, row.native)
    )
    order = {task: i for i, task in enumerate(TASK_ORDER)}
    keys = sorted(by_key, key=lambda key: (order.get(key[0], len(order)), key))
    return [Group(*key, by_key[key], _split_into_series(by_key[key])) for key in keys]


def _split_into_series(rows: Sequence[ProbeResult]) -> list[Series]:
    """Results by model, and apart where one budget and resolution was run with different settings.

    A setting that changes along with the resolution, as the crop does, does not make another series.
    """
    series = []
    for model, own in _group_by(rows, lambda row: row.model).items():
        # A setting splits a model's results where it differs between two at the same place.
        settings = [(row, _settings_of(row)) for row in own]
        places = _group_by(settings, lambda item: (item[0].cores, item[0].size)).values()
        names = sorted({name for _, values in settings for name in values})
        splitting = [k for k in names if any(len({v.get(k) for _, v in same}) > 1 for same in places)]
        # One series for each combination of the splitting settings, named by the first three of them.
        keyed = [(row, tuple(values.get(k) for k in splitting)) for row, values in settings]
        for key, same in _group_by(keyed, lambda item: item[1]).items():
            parts = [f"{k.rpartition('.')[2]} {(v or 'not set')[:24]}" for k, v in zip(splitting, key, strict=True)]
            more = "" if len(parts) <= 3 else f" and {len(parts) - 3} more"
            name = f"{model} ({', '.join(parts[:3])}{more})" if parts else model
            series.append(Series(name, [row for row, _ in same]))
    return series


def _settings_of(row: ProbeResult) -> dict[str, str]:
    """Everything that determines a score besides model, budget, resolution and seed, with dotted names."""
    settings: dict[str, str] = {}

    def flatten(values: Mapping[str, Any], prefix: str = "") -> None:
        for key, value in values.items():
            if isinstance(value, dict) and value:
                flatten(value, f"{prefix}{key}.")
            elif key != "seed":
                settings[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value)

    own = {"data fingerprint": row.fingerprint, "scored on": row.scored_on}
    flatten({**row.protocol, **own, **({"weights": row.about} if row.about else {})})
    return settings


def _class_order(scored: Sequence[Mapping[str, float]], metric: str) -> list[str]:
    """Names of classes by the first of several scores, best first, then by name those that only others have."""
    first: Mapping[str, float] = next(iter(scored), {})
    names = sorted(first, key=first.__getitem__, reverse=not lower_is_better(metric))
    return names + sorted({name for scores in scored for name in scores}.difference(first))


def _place(row: ProbeResult | PaperNumber) -> list[str]:
    size = row.resolution if isinstance(row, ProbeResult) else str(row.size)
    return ["–" if row.cores is None else str(row.cores), size]


def _paper_cells(compared: Comparison | None, metric: str, notes: list[str]) -> list[str]:
    """The paper's number, its model, the gap and the numbers of the notes, which are added to `notes`."""
    if compared is None:
        return ["–", "–", "–", ""]
    notes += [note for note in compared.notes if note not in notes]
    numbers = sorted(notes.index(note) + 1 for note in compared.notes)
    n = compared.number
    which = f"{n.model}, {'' if n.cores is None else f'C {n.cores}, '}{n.size} px (Table {n.table})"
    return [metric_text(metric, n.value), which, gap_text(compared, metric), ", ".join(map(str, numbers))]


def gap_text(compared: Comparison, metric: str) -> str:
    """The gap with its verdict; between models of different sizes, the gap alone in brackets."""
    if not compared.same_size:
        return f"({metric_text(metric, compared.gap, '+')})"
    if metric_text(metric, abs(compared.gap)) == metric_text(metric, 0.0):  # equal as printed
        return f"{metric_text(metric, 0.0)} equal"
    return f"{metric_text(metric, compared.gap, '+')} {'better' if compared.better else 'worse'}"


def heat_grid(group: Group, series: Series) -> dict[str, Any] | None:
    """Scores of one series by resolution (rows) and budget (columns), where both vary."""
    values = {(row.size, row.cores): series.mean(row.cores, row.size) for row in series.rows if row.cores is not None}
    if min((len(set(each)) for each in zip(*values, strict=True)), default=0) < 2:
        return None
    return {"series": series.name, **_heat_table(values, group.metric, "{} px", partial(metric_text, group.metric))}


def _sweep_grid(row: ProbeResult) -> dict[str, Any] | None:
    """Decays × rates of a sweep, each with its best score on val."""
    heads = [head for head in row.sweep if {"rate", "decay"} <= head.keys()]
    values = {(head["decay"], head["rate"]): head.get("val", math.nan) for head in heads}
    return _heat_table(values, row.metric, "{:g}", number) if len(values) > 1 else None


def _heat_table(
    values: Mapping[tuple[Any, Any], float], metric: str, row_form: str, text: Callable[[float], str]
) -> dict[str, Any]:
    names, columns = (sorted(set(each)) for each in zip(*values, strict=True))
    scaled = levels(values, lower_is_better(metric))
    rows = heat_rows(values, scaled, {name: row_form.format(name) for name in names}, columns, text)
    return {"columns": [f"{column:g}" for column in columns], "rows": rows}


@dataclass
class _Gallery:
    """Images of a folder as data URIs, as long as the page has room."""

    folder: Path
    unusable: list[Unusable]
    """Images that cannot be shown are added here."""
    bytes_left: int = MAX_GALLERY_BYTES

    def strips(self, series: Series) -> list[list[tuple[str, str, str]]]:
        """Per image: itself, its label, its predictions at the least and the greatest budget of the best resolution.

        Each is (data URI, path, what it is).
        """
        own = [row for row in series.rows if row.gallery and row.size == series.best.size]
        own.sort(key=lambda row: (row.cores or 0, row.goodness))
        strips: dict[str, dict[str, tuple[str, str, str]]] = {}
        for row in own[:1] + own[1:][-1:]:
            heads = {"image": "picture", "label": "label", "prediction": f"prediction, {row.place}"}
            for entry in row.gallery[:GALLERY_IMAGES]:
                read = {key: (self._source(row, path := entry.get(key, "")), path, head) for key, head in heads.items()}
                if read["image"][0] and read["prediction"][0]:
                    strip = strips.setdefault(read["image"][1], {})
                    strip |= {shown[2]: shown for shown in read.values() if shown[0]}
        return [list(strip.values()) for strip in strips.values()]

    def _source(self, row: ProbeResult, path: str) -> str:
        """The data URI of an image; empty, and noted as unusable, where it cannot be shown."""
        # Only paths that can stand in a link of Markdown. Symbolic links must not lead out of the folder either.
        safe = re.fullmatch(r"gallery(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+\.(png|webp)", path)
        file, data = (self.folder / path).resolve(), b""
        with suppress(OSError):
            if safe and file.is_relative_to(self.folder.resolve()) and file.stat().st_size <= self.bytes_left:
                data = file.read_bytes()
        if path and not data:
            reason = "cannot be shown: it is no .png or .webp in gallery/, or the page has no room for it"
            self.unusable.append((path[:120], f"of {row.file} {reason}"))
        self.bytes_left -= len(data)
        return data_uri(data, file.suffix[1:]) if data else ""


def _head_curve(row: ProbeResult) -> Chart | None:
    """The score of the best head at each validation."""
    values = row.curve.get("val", ())
    line = Line("", [(float(i), value) for i, value in enumerate(values, 1)])
    label = f"{row.metric} of the best head at each validation"
    return line_chart([line], "validation", f"{row.metric} on val", label) if len(values) > 1 else None


def draw_curves(group: Group) -> list[dict[str, Any]]:
    """Charts along what varies, budget or resolution; where neither does, our points on the paper's curves."""
    varied: dict[Along, bool] = {"budget": group.varies("cores"), "resolution": group.varies("size")}
    curves = []
    for along, varies in varied.items():
        lines, left_out = _chart_lines(group, along) if varies or not any(varied.values()) else ([], 0)
        if len({x for line in lines for x, _ in line.points}) < 2:  # a single point is in the table already
            continue
        words = [group.task, group.dataset, group.metric, *["native"] * group.native, along]
        name = "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", word)[:40].strip("-.") or "x" for word in words)
        caption = "Lower is better." if lower_is_better(group.metric) else "Higher is better."
        caption += " Grey squares: the paper's." if any(line.quoted for line in lines) else ""
        caption += " Sizes are limits: sides of a square of as many pixels." if group.native else ""
        caption += f" Not drawn: {left_out} more of the table." if left_out else ""
        label = f"{group.metric} on {group.dataset} against {along}: {'; '.join(line.name for line in lines)}"
        x_title = "budget C, cores" if along == "budget" else "resolution, px"
        chart = line_chart(lines, x_title, metric_name(group.metric), label, ticks_at_points=True)
        title = f"{group.metric} against {along}"
        curves.append({"name": name, "title": title, "chart": chart, "caption": caption})
    return curves


def _lines_by_fixed(scores: Iterable[tuple[int | None, int, float]], along: Along) -> list[FixedLine]:
    """Lines through (cores, size, value), one for each resolution or budget; of equal places the first counts."""
    points: dict[int | None, dict[float, float]] = {}
    for cores, size, value in scores:
        fixed, x = (size, cores) if along == "budget" else (cores, size)
        if x is not None and math.isfinite(value):
            points.setdefault(fixed, {}).setdefault(float(x), value)
    return [(fixed, sorted(points[fixed].items())) for fixed in sorted(points, key=lambda fixed: fixed or 0)]


def _chart_lines(group: Group, along: Along) -> tuple[list[Line], int]:
    """The lines of a chart, and how many of ours are left out: for want of room, or as single points beside curves."""
    own, count = list[tuple[Series, int | None, list[Point]]](), 0
    for series in group.series:
        scores = [(row.cores, row.size, series.mean(row.cores, row.size)) for row in series.rows]
        lines = _lines_by_fixed(scores, along)
        count += len(lines)
        own += [(series, *line) for line in [line for line in lines if len(line[1]) > 1] or lines]
    if len(own) > MAX_LINES:  # of each series the longest line, at the highest resolution or budget
        own = list({line[0]: line for line in sorted(own, key=lambda line: (len(line[2]), line[1] or 0))}.values())
    if not own:
        return [], 0
    # The longest curve of each model of the paper that one of our results is compared with.
    quoted: dict[str, FixedLine] = {}
    for quote in (n.number for row in group.rows if (n := compare_with_paper(row))):
        same = paper.find(group.task, group.dataset, group.metric, quote.model)
        curves = _lines_by_fixed(((n.cores, n.size, n.value) for n in same), along)
        if longest := max((line for line in curves if len(line[1]) > 1), key=lambda line: len(line[1]), default=None):
            quoted[quote.model] = longest
    # Where they differ, each line says at what it was measured.
    several = len({fixed for _, fixed, _ in own} | {fixed for fixed, _ in quoted.values()}) > 1
    drawn = []
    for i, (series, fixed, points) in enumerate(own):
        text = _fixed_text(fixed, along) if several else ""
        drawn.append(
            Line(_label(group, series if len(group.series) > 1 or not text else None, text), points, i, dots=True)
        )
    for model, (fixed, points) in quoted.items():
        text = f", {_fixed_text(fixed, along)}" if several and fixed is not None else ""
        drawn.append(Line(f"paper {model}{text}", points, dots=True, quoted=True))
    if along == "budget":  # models without cores are levels to compare with, in every chart of the group
        xs = [x for line in drawn for x, _ in line.points]
        for series in group.series:
            for size in sorted({row.size for row in series.rows if row.cores is None}):
                if math.isfinite(value := series.mean(None, size)):
                    name = _label(group, series, f"{size} px" if group.varies("size") else "")
                    drawn.append(Line(name, [(min(xs), value), (max(xs), value)], len(drawn)))
    return drawn, count - len(own)


def _fixed_text(value: int | None, along: Along) -> str:
    return "" if value is None else f"{value} px" if along == "budget" else f"C = {value}"


def _label(group: Group, series: Series | None, fixed: str) -> str:
    """A line's series, in short by the last part of a path, and what is fixed along the line."""
    if series is None:
        return fixed
    room = max(8, LABEL_LETTERS - len(fixed) - 2) if fixed else LABEL_LETTERS
    last = {each.name: each.name.rstrip("/").rpartition("/")[2] or each.name for each in group.series}
    cut = {name: part if len(part) <= room else f"{part[: room - 1]}…" for name, part in last.items()}
    tells_apart = max(map(len, cut)) > room and len(set(cut.values())) == len(cut)
    name = cut[series.name] if tells_apart else shorten_middle(series.name, room)
    return f"{name}, {fixed}" if fixed else name


def rows_csv(rows: Sequence[ProbeResult]) -> str:
    """One line for each result and, after it, for each further dataset that its head was scored on."""
    scored = [(row, other, row.on(other)[1]) for row in rows for other in (None, *row.also)]
    names = list(dict.fromkeys(name for _, _, values in scored for name in values))
    bounded = list(dict.fromkeys(name for row in rows for name in row.interval))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    # A metric that a result does not have is an empty cell.
    lines = [
        [*_csv_columns(row, other).values(), *map(values.get, names), *_ends(row, other, bounded)]
        for row, other, values in scored
    ]
    ends = [f"{name}_{end}" for name in bounded for end in ("low", "high")]
    header: list[object] = [*_csv_columns(rows[0], None), *names, *ends]
    for line in [header, *lines]:
        # Text that a spreadsheet would run as a formula gets a quote before it.
        writer.writerow(f"'{v}" if isinstance(v, str) and v[:1] in ("=", "+", "-", "@") else v for v in line)
    return text.getvalue()


def _ends(row: ProbeResult, other: str | None, metrics: Sequence[str]) -> Iterator[float | None]:
    """Both ends of the confidence interval of each metric; only scores on the row's own dataset have them."""
    for metric in metrics:
        yield from (row.interval.get(metric) if other is None else None) or (None, None)


def _csv_columns(row: ProbeResult, other: str | None) -> dict[str, object]:
    compared = compare_with_paper(row, other)
    n = compared.number if compared else None
    return {
        "task": row.task, "dataset": other or row.dataset, "head_of": row.dataset if other else None,
        "model": row.model, "kind": row.kind, "cores": row.cores, "size": row.size, "native": row.native,
        "seed": row.seed, "scored_on": row.scored_on, "metric": row.metric,
        "paper": n and n.value, "paper_model": n and n.model, "paper_cores": n and n.cores,
        "paper_size": n and n.size, "paper_table": n and n.table,
        "gap": compared and round(compared.gap, 6), "notes": compared and "; ".join(compared.notes),
        "rate": row.best.get("rate"), "decay": row.best.get("decay"),
        **{split: row.counts.get(split) for split in SPLITS}, "fingerprint": row.fingerprint,
        "seconds": math.fsum(row.seconds.values()) if row.seconds else None, "date": row.date,
        "versions": json.dumps(row.versions, sort_keys=True),
        "protocol": json.dumps(row.protocol, sort_keys=True), "file": row.file,
    }  # fmt: skip
