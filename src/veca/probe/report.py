"""Report of a results folder: `report.html`, `report.md`, `rows.csv` and `curves/*.svg`, from the rows in it.

It can be written at any time, from whatever rows are there.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from veca.errors import ArgumentError
from veca.probe import paper, tables
from veca.probe.curves import draw_curves
from veca.probe.results import ProbeResult, Unusable, lower_is_better, metric_name, metric_text, read_results
from veca.probe.tables import Group, ResultTable, Series
from veca.report.charts import Line, line_chart, write_chart
from veca.report.page import data_uri, heat_rows, levels, write_page, write_text
from veca.utils.text import duration, number, printable

SHOWN_ROWS = 24  # of a dataset; with more, the best are shown and all are folded away
SHOWN_CLASSES = 5  # in Markdown: the best and the worst, where there are many more
GALLERY_IMAGES, MARKDOWN_IMAGES = 6, 4  # of a series
MAX_IMAGE_BYTES, MAX_GALLERY_BYTES = 4 * 2**20, 24 * 2**20
IMAGE_TYPES = {".png": ("png", b"\x89PNG"), ".webp": ("webp", b"RIFF"), ".jpg": ("jpeg", b"\xff\xd8")}
"""By suffix: the type, and how a file of it begins."""


def write_probe_report(folder: Path) -> tuple[Path, list[str]]:
    """Write the report of the rows in `folder` into it: the path of the page, and a sentence for each file left out."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is not a folder; name the one `veca probe` wrote to")
    rows, unusable = read_results(folder)
    if not rows:
        reasons = "; ".join(f"{file} {reason}" for file, reason in unusable[:3])
        raise ArgumentError(f"{folder} has no row that can be read: {reasons or '`veca probe` has finished none yet'}")
    groups = tables.group_rows(rows)
    gallery = _Gallery(folder, unusable)
    sections = [_group_context(group, gallery) for group in groups]
    for curve in (curve for section in sections for curve in section["curves"]):
        write_chart(curve.chart, folder / "curves" / f"{curve.name}.svg")
    ordered = [row for group in groups for series in group.series for row in series.rows]
    lines, protocols = _row_table(ordered)
    context: dict[str, Any] = {"name": folder.resolve().name, "paper_name": paper.name(), "groups": sections}
    context |= {"facts": _folder_facts(rows, groups), "overview": tables.overview_table(groups)}
    context |= {"banner": bool(unusable), "unusable": unusable}
    write_text(folder / "rows.csv", rows_csv(rows))
    write_page(folder / "report.md", "probe.md", **context, rows=lines, protocols=protocols)
    details = [_row_context(row) for row in ordered]
    write_page(folder / "report.html", "probe.html", **context, rows=details, tone_gaps=tone_gaps)
    return folder / "report.html", [f"{file} {reason}" for file, reason in unusable]


def _folder_facts(rows: Sequence[ProbeResult], groups: Sequence[Group]) -> dict[str, str]:
    def listed(names: Iterable[Any], limit: int | None = None) -> str:
        ordered = sorted(set(names))
        more = f" and {len(ordered) - limit} more" if limit and len(ordered) > limit else ""
        return ", ".join(map(str, ordered[:limit])) + more

    dates = sorted(row.date[:10] for row in rows if row.date)
    made_with = [listed(f"veca {row.versions['veca']}" for row in rows if "veca" in row.versions)]
    made_with += [listed(row.versions["device"] for row in rows if "device" in row.versions)]
    return {
        "Rows": f"{len(rows):,}",
        "Models": listed((row.model for row in rows), 4),
        "Datasets": listed((row.dataset for row in rows), 4),
        "Budgets": listed(cores for group in groups for cores in group.cores) or "none",
        "Resolutions": listed(size for group in groups for size in group.sizes) + " px",
        "Time spent": duration(math.fsum(v for row in rows for v in row.seconds.values())),
        "When": " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "–",
        "Made with": ", ".join(filter(None, made_with)) or "–",
    }


def _group_context(group: Group, gallery: _Gallery) -> dict[str, Any]:
    """All that HTML and Markdown show of one task, dataset and metric."""
    classes, series = tables.class_table(group), group.series
    return {
        "group": group,
        "metric": metric_name(group.metric),
        "results": tables.results_table(group),
        "best": tables.results_table(group, best=True) if len(group.rows) > SHOWN_ROWS else None,
        "curves": draw_curves(group),
        "grids": [grid for one in series if (grid := tables.heat_grid(group, one))],
        "galleries": [(one.name, strips) for one in series if (strips := gallery.strips(one))],
        "images": [(one.name, one.best.place, paths) for one in series if (paths := _markdown_images(one.best))],
        "classes": classes,
        "few_classes": classes and _best_and_worst(classes),
        "paper": tables.paper_table(group),
    }


def _best_and_worst(classes: ResultTable) -> ResultTable:
    rows, skipped = classes.rows, len(classes.rows) - 2 * SHOWN_CLASSES
    gap = ["…", *[f"{skipped} more"] * (len(classes.heads) - 1)]
    shown = [*rows[:SHOWN_CLASSES], gap, *rows[-SHOWN_CLASSES:]] if skipped > 0 else rows
    return ResultTable(classes.heads, shown)


def _markdown_images(row: ProbeResult) -> list[list[str]]:
    """Paths of image, label and prediction; only those that can stand in a link and stay in the folder."""
    safe = re.compile(r"gallery(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")
    shown = [one for one in row.gallery if all(isinstance(p, str) and safe.fullmatch(p) for p in one.values())]
    return [[one.get(kind, "") for kind in ("image", "label", "prediction")] for one in shown[:MARKDOWN_IMAGES]]


@dataclass
class _Gallery:
    """Images of a folder as data URIs, as long as the page has room."""

    folder: Path
    unusable: list[Unusable]
    """Images that cannot be shown are added here."""
    bytes_left: int = MAX_GALLERY_BYTES

    def strips(self, series: Series) -> list[list[tuple[str, str, str]]]:
        """Per image: itself, its label, its predictions at the least and the greatest budget of the best resolution."""
        own = [row for row in series.rows if row.gallery and row.size == series.best.size]
        own.sort(key=lambda row: (row.cores or 0, row.goodness))
        rows = own[:1] + own[1:][-1:]
        heads = ["picture", "label", *(f"prediction, {row.place}" for row in rows)]
        by_image: dict[str, list[str]] = {}
        for i, row in enumerate(rows):
            for entry in row.gallery[:GALLERY_IMAGES]:
                image, label, prediction = (self._source(row, entry.get(k)) for k in ("image", "label", "prediction"))
                if image and prediction:
                    by_image.setdefault(image, [image, label, *[""] * len(rows)])[2 + i] = prediction
        return [
            [(source, head, head) for head, source in zip(heads, sources, strict=True) if source]
            for sources in by_image.values()
        ]

    def _source(self, row: ProbeResult, path: object) -> str:
        """The data URI of an image; empty, and noted as unusable, where it cannot be shown."""
        if not isinstance(path, str) or not path:
            return ""
        try:
            file = (self.folder / path).resolve()  # symbolic links too must not lead out of the folder
            if not file.is_relative_to(self.folder.resolve()):
                raise ArgumentError("lies outside the folder")
            kind, start = IMAGE_TYPES.get(file.suffix.lower().replace("jpeg", "jpg"), ("", b""))
            if not kind:
                raise ArgumentError("is no .png, .webp or .jpg")
            if (size := file.stat().st_size) > min(self.bytes_left, MAX_IMAGE_BYTES):
                raise ArgumentError(f"has {size:,} bytes, more than the page has room for")
            if not (data := file.read_bytes()).startswith(start):
                raise ArgumentError("is no picture of its kind")
        except (ValueError, OSError) as error:
            reason = "is not there" if isinstance(error, FileNotFoundError) else printable(str(error))
            self.unusable.append((printable(path)[:120], f"of {row.file} {reason}"))
            return ""
        self.bytes_left -= len(data)
        return data_uri(data, kind)


def tone_gaps(table: ResultTable) -> list[Sequence[str]]:
    """Rows of a table with notes, gaps in colour where no note says that the two numbers differ in kind."""

    def tone(cell: str) -> str:
        verdict = {"better": "good", "worse": "bad"}.get(cell.rpartition(" ")[2])
        return Markup('<span class="{}">{}</span>').format(verdict, cell) if verdict and cell[0] in "+−" else cell

    return [row if row[-1] else list(map(tone, row)) for row in table.rows]


def _row_context(row: ProbeResult) -> dict[str, Any]:
    """One result, with the chart of its best head and the table of its sweep."""
    line = Line("", [(float(i), value) for i, value in enumerate(row.curve, 1)])
    label = f"{row.metric} of the best head at each validation"
    curve = line_chart([line], "validation", f"{row.metric} on val", label) if len(row.curve) > 1 else None
    times = {name: duration(seconds) for name, seconds in row.seconds.items()}
    score = metric_text(row.metric, row.value)
    return {"result": row, "score": score, "times": times, "sweep": _sweep_grid(row), "curve": curve}


def _sweep_grid(row: ProbeResult) -> dict[str, Any] | None:
    """Decays × rates of a sweep, each with its best score on val."""
    heads = [head for head in row.sweep if {"rate", "decay"} <= head.keys()]
    values = {(head["decay"], head["rate"]): head.get("val", math.nan) for head in heads}
    if len(values) < 2:
        return None
    decays, rates = (sorted(set(each)) for each in zip(*values, strict=True))
    scaled = levels(values, lower_is_better(row.metric))
    rows = heat_rows(values, scaled, {decay: f"{decay:g}" for decay in decays}, rates)
    return {"rates": [f"{rate:g}" for rate in rates], "rows": rows}


def _row_table(rows: Sequence[ProbeResult]) -> tuple[ResultTable, list[str]]:
    """One line per result for Markdown, and the distinct protocols, which lines name by number from 1."""
    protocols: dict[str, int] = {}
    heads = ["row", "best rate", "decay", "seed", "scored on", "time", "date", "versions", "protocol", ""]
    lines = []
    for row in rows:
        text = json.dumps(row.protocol, indent=1, default=str)
        protocol = protocols.setdefault(text, len(protocols) + 1)
        rate, decay = (number(row.best.get(key, math.nan), "g") for key in ("rate", "decay"))
        seconds = duration(sum(row.seconds.values())) if row.seconds else "–"
        versions = ", ".join(f"{name} {version}" for name, version in row.versions.items())
        cells = [row.file, rate, decay, row.seed, row.scored_on, seconds, row.date, versions, protocol]
        lines.append([*map(str, cells), row.sweep_note()])
    return ResultTable(heads, lines), list(protocols)


def rows_csv(rows: Sequence[ProbeResult]) -> str:
    """One line for each result and, after it, for each further dataset that its head was scored on."""
    scored = [(row, other, row.on(other)[1]) for row in rows for other in (None, *row.also)]
    names = list(dict.fromkeys(name for _, _, values in scored for name in values))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_csv_columns(rows[0], None), *map(_csv_cell, names)])
    # A metric that a result does not have is an empty cell.
    for row, other, values in scored:
        cells = [*_csv_columns(row, other).values(), *map(values.get, names)]
        writer.writerow(map(_csv_cell, cells))
    return text.getvalue()


def _csv_columns(row: ProbeResult, other: str | None) -> dict[str, object]:
    compared = tables.compare_with_paper(row, other)
    n = compared.number if compared else None
    return {
        "task": row.task, "dataset": other or row.dataset, "head_of": row.dataset if other else None,
        "model": row.model, "kind": row.kind, "cores": row.cores, "size": row.size, "seed": row.seed,
        "scored_on": row.scored_on, "metric": row.metric, "paper": n and n.value, "paper_model": n and n.model,
        "paper_cores": n and n.cores, "paper_size": n and n.size, "paper_table": n and n.table,
        "gap": compared and round(compared.gap, 6), "notes": compared and "; ".join(compared.notes),
        "rate": row.best.get("rate"), "decay": row.best.get("decay"),
        **{split: row.counts.get(split) for split in ("train", "val", "test")}, "fingerprint": row.fingerprint,
        "seconds": math.fsum(row.seconds.values()) if row.seconds else None, "date": row.date,
        "versions": json.dumps(row.versions, sort_keys=True),
        "protocol": json.dumps(row.protocol, sort_keys=True, default=str), "file": row.file,
    }  # fmt: skip


def _csv_cell(value: object) -> object:
    """Text that a spreadsheet would run as a formula gets a quote before it."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
