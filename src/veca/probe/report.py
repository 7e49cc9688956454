"""The report of a results folder: `report.html`, `report.md`, `rows.csv` and the curves, made of the rows in it.

It can be made at any time, of whatever rows are there.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TypeVar

from veca.errors import ArgumentError
from veca.probe import paper
from veca.probe.curves import Picture, pictures
from veca.probe.markdown import markdown, rows_csv
from veca.probe.results import Problem, Row, lower_is_better, metric_name, read_rows, shown
from veca.probe.tables import (
    Group,
    Series,
    Table,
    at,
    class_table,
    edge_note,
    glance_table,
    grid_table,
    groups,
    paper_table,
    results_table,
)
from veca.report.charts import SMALL, Line, line_chart, standalone
from veca.report.page import details, figure, heat_table, section, table, write_page
from veca.utils.files import atomic_path
from veca.utils.text import duration, number, printable

SHOWN_ROWS = 24
"""Of a dataset; more of them are folded away, below the best."""
SHOWN_PICTURES, MOST_PICTURE_BYTES, MOST_GALLERY_BYTES = 6, 4 * 2**20, 24 * 2**20
READING = (
    f"The paper is {paper.name()}; its numbers are as its tables print them. Beside a row stands the one on the same "
    "dataset by a model of the same family, nearest in model size, then in budget and resolution; the notes say what "
    "differs. No number: the paper has none.",
    "A VECA that was trained here is not the paper's VECA, even at the same size. Its gap says how far apart the two "
    "models are under these settings, not whether the paper's result was reproduced.",
    "The gap is ours less the paper's, in the metric's own unit; of errors (↓) less is better. Of the protocols only "
    "what both state is compared. A gap in brackets is between models of different sizes, and says little.",
    "The best row of a model is the best by the score it reports: a choice made on the scored pictures. Curves "
    "and grids are means over seeds.",
)
Key = TypeVar("Key")
_TYPES = {".png": ("image/png", b"\x89PNG"), ".webp": ("image/webp", b"RIFF"), ".jpg": ("image/jpeg", b"\xff\xd8")}


def write_report(folder: Path) -> tuple[Path, list[str]]:
    """Write the report of the rows in `folder`, into it: the page's path, and what was left out, in sentences."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is no folder; name the one `veca probe` wrote to")
    rows, problems = read_rows(folder)
    if not rows:
        why = "; ".join(f"{file} {why}" for file, why in problems[:3]) or "`veca probe` has finished none yet"
        raise ArgumentError(f"{folder} has no row that can be read: {why}")
    name, every = printable(folder.resolve().name), groups(rows)
    gallery = _Gallery(folder)
    curves = {group: pictures(group) for group in every}
    for picture in (picture for group in every for picture in curves[group]):
        _write(folder / "curves" / f"{picture.name}.svg", standalone(picture.svg))
    sections = [_glance(every), *(_group(group, curves[group], gallery) for group in every), _every_row(every)]
    problems += gallery.problems
    facts = _facts(rows, every)
    _write(folder / "rows.csv", rows_csv(rows))
    _write(folder / "report.md", markdown(name, facts, every, curves, problems, READING))
    banner = [f"<li>{escape(file)} {escape(why)}</li>" for file, why in problems]
    write_page(
        folder / "report.html",
        name=name,
        eyebrow="VECA probes",
        banner=f"<p><strong>Left out:</strong></p><ul>{''.join(banner)}</ul>" if banner else "",
        facts={term: escape(value) for term, value in facts.items()},
        sections=sections,
        footer=f"Made of the rows in the folder on {datetime.now():%d %B %Y}.",
    )
    return folder / "report.html", [f"{file} {why}" for file, why in problems]


def _write(path: Path, text: str) -> None:
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8", errors="replace", newline="")


def _facts(rows: Sequence[Row], every: Sequence[Group]) -> dict[str, str]:
    dates = sorted(row.date[:10] for row in rows if row.date)
    versions = sorted({f"veca {row.versions['veca']}" for row in rows if "veca" in row.versions})
    devices = sorted({row.versions["device"] for row in rows if "device" in row.versions})
    facts = {
        "Rows": f"{len(rows):,}",
        "Models": _named({row.model for row in rows}),
        "Datasets": _named({row.dataset for row in rows}),
        "Budgets": ", ".join(map(str, sorted({c for group in every for c in group.cores}))) or "none",
        "Resolutions": ", ".join(f"{size}" for size in sorted({s for group in every for s in group.sizes})) + " px",
        "Time spent": duration(math.fsum(v for row in rows for v in row.seconds.values())),
        "When": " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "–",
        "Made with": ", ".join([*versions, *devices]) or "–",
    }
    return facts


def _named(names: set[str], most: int = 4) -> str:
    some = sorted(names)
    return ", ".join(some[:most]) + (f" and {len(some) - most} more" if len(some) > most else "")


def _glance(every: Sequence[Group]) -> str:
    reading = "".join(f"<p>{escape(one)}</p>" for one in READING)
    return section(
        "At a glance",
        "<p>The best row of each model on each dataset.</p>",
        _table(glance_table(every)),
        details("How to read the paper's column", reading),
    )


def _group(group: Group, curves: Sequence[Picture], gallery: _Gallery) -> str:
    every = _table(results_table(group))
    if len(group.rows) > SHOWN_ROWS:
        every = _table(results_table(group, best=True)) + details(f"All {len(group.rows)} rows", every)
    drawn = [figure(escape(p.title), p.svg, escape(p.caption)) for p in curves]
    drift = f"Also different between rows of one model: {', '.join(group.drifting)}." if group.drifting else ""
    quoted = paper_table(group)
    return section(
        escape(group.title),
        every,
        f'<div class="tiles">{"".join(drawn)}</div>' if drawn else "",
        f'<p class="none">{escape(drift)}</p>' if drift else "",
        *(_heat(group, series) for series in group.series),
        *(gallery.show(series) for series in group.series),
        _classes(group),
        details(f"What the paper has on {escape(group.dataset)}", _table(quoted)) if quoted else "",
    )


def _table(content: Table) -> str:
    """A table of plain text, with its notes below."""
    kind = "stack" if content.heads[-1] == "notes" else "plain"
    rows = [list(map(escape, cells)) for cells in content.rows]
    if kind == "stack":
        rows = [cells if cells[-1] else list(map(_tone, cells)) for cells in rows]
    words = {i for i, head in enumerate(content.heads) if head in ("model", "which", "from")}
    notes = "".join(f"<li>{escape(note)}</li>" for note in content.notes)
    return table([escape(head) for head in content.heads], rows, kind, words) + (
        f'<ol class="notes">{notes}</ol>' if notes else ""
    )


def _tone(cell: str) -> str:
    """A gap in colour; for rows without notes, whose numbers are alike as far as is known."""
    for word, tone in (("better", "good"), ("worse", "bad")):
        if cell[:1] in "+−" and cell.endswith(f" {word}"):
            return f'<span class="{tone}">{cell}</span>'
    return cell


def _heat(group: Group, series: Series) -> str:
    grid = grid_table(group, series)
    if grid is None:
        return ""
    cores = sorted({row.cores for row in series.rows if row.cores is not None})
    sizes = sorted({row.size for row in series.rows if row.cores is not None})
    values = {(c, s): series.mean(c, s) for c in cores for s in sizes}
    levels = _levels(values, lower_is_better(group.metric))
    cells = {
        f"{s} px": [(shown(group.metric, values[c, s]), levels.get((c, s), math.nan)) for c in cores] for s in sizes
    }
    caption = f"{escape(metric_name(group.metric))} by resolution (rows) and budget (columns)."
    picture = heat_table("cores", [str(c) for c in cores], cells, caption, ("worse", "better"))
    return figure(f"{escape(series.name)}: resolution × budget", picture)


def _levels(values: Mapping[Key, float], lower: bool) -> dict[Key, float]:
    """From the worst, 0, to the best, 1, where there is a number."""
    found = {key: -value if lower else value for key, value in values.items() if math.isfinite(value)}
    low, high = min(found.values(), default=0.0), max(found.values(), default=0.0)
    return {key: (value - low) / (high - low) if high > low else 0.5 for key, value in found.items()}


def _classes(group: Group) -> str:
    found = class_table(group)
    return details(f"All {len(found.rows):,} classes, best first", _table(found)) if found else ""


@dataclass
class _Gallery:
    """Pictures of a folder, put into the page as long as there is room."""

    folder: Path
    problems: list[Problem] = field(default_factory=list)
    left: int = MOST_GALLERY_BYTES

    def show(self, series: Series) -> str:
        """Predictions at the resolution of the best row: at the smallest and at the largest budget."""
        own = [row for row in series.rows if row.gallery and row.size == series.best.size]
        own.sort(key=lambda row: (row.cores or 0, row.goodness))
        rows = own if len(own) < 2 else [own[0], own[-1]]
        if not rows:
            return ""
        found: dict[str, list[str]] = {}
        for place, row in enumerate(rows):
            for one in row.gallery[:SHOWN_PICTURES]:
                image, label, prediction = (self._picture(row, one.get(k)) for k in ("image", "label", "prediction"))
                if image and prediction:
                    cells = found.setdefault(image, [image, label, *[""] * len(rows)])
                    cells[2 + place] = prediction
        heads = ["picture", "label", *(f"prediction, {at(row)}" for row in rows)]
        body = [
            "".join(
                f'<figure><img src="{cell}" alt="{head}" loading="lazy" /><figcaption>{head}</figcaption></figure>'
                for head, cell in zip(heads, cells, strict=True)
                if cell
            )
            for cells in found.values()
        ]
        strips = "".join(f'<div class="strip">{strip}</div>' for strip in body)
        return figure(f"{escape(series.name)}: predictions", strips) if strips else ""

    def _picture(self, row: Row, path: object) -> str:
        """A picture as a data address; empty, and named, where it cannot be shown."""
        if not isinstance(path, str) or not path:
            return ""
        name = printable(path)[:120]
        try:
            place = (self.folder / path).resolve()
            if not place.is_relative_to(self.folder.resolve()):
                raise ArgumentError(f"of {row.file} lies outside the folder")
            kind, start = _TYPES.get(place.suffix.lower().replace("jpeg", "jpg"), ("", b""))
            if not kind:
                raise ArgumentError(f"of {row.file} is no .png, .webp or .jpg")
            size = place.stat().st_size
            if size > min(self.left, MOST_PICTURE_BYTES):
                raise ArgumentError(f"of {row.file} has {size:,} bytes, more than the page has room for")
            data = place.read_bytes()
            if not data.startswith(start):
                raise ArgumentError(f"of {row.file} is no picture of its kind")
        except FileNotFoundError:
            self.problems.append(Problem(name, f"of {row.file} is not there"))
            return ""
        except (ValueError, OSError) as error:
            self.problems.append(Problem(name, printable(str(error))))
            return ""
        self.left -= len(data)
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _every_row(every: Sequence[Group]) -> str:
    rows = [row for group in every for series in group.series for row in series.rows]
    return section("Every row", *(details(_row_title(row), _row(row)) for row in rows))


def _row_title(row: Row) -> str:
    return escape(f"{row.task} {row.dataset}, {row.model}, {at(row)}: {shown(row.metric, row.value)} {row.metric}")


def _row(row: Row) -> str:
    counts = ", ".join(f"{split} {count:,}" for split, count in row.counts.items())
    took = ", ".join(f"{name} {duration(value)}" for name, value in row.seconds.items())
    best = ", ".join(f"{name} {value:g}" for name, value in row.best.items())
    facts = {
        "metrics": ", ".join(f"{name} {value:.6g}" for name, value in row.metrics.items()),
        "best of the sweep": "; ".join(text for text in (best, edge_note(row)) if text),
        "model": f"{row.model}, {row.kind}",
        "data": f"{row.dataset}: {counts}; fingerprint {row.fingerprint}",
        "scored on": row.scored_on,
        "grid": " × ".join(map(str, row.grid)),
        "seed": str(row.seed),
        "time": took,
        "date": row.date,
        "versions": ", ".join(f"{name} {version}" for name, version in row.versions.items()),
        "file": row.file,
    }
    cells = [[escape(name), escape(value)] for name, value in facts.items() if value]
    curve = [(float(i), value) for i, value in enumerate(row.curve, 1)]
    label = f"{row.metric} of the best head at each validation"
    line = Line(row.metric, curve, 0)
    drawn = line_chart([line], "validation", f"{row.metric} on val", label, frame=SMALL, log=False)
    return "\n".join(
        [
            table(["", ""], cells, "events"),
            _sweep(row),
            f'<div class="tiles">{drawn}</div>' if len(curve) > 1 else "",
            f"<h3>Protocol</h3><pre>{_json(row.protocol)}</pre>",
            f"<h3>Model</h3><pre>{_json(row.about)}</pre>" if row.about else "",
        ]
    )


def _json(value: object) -> str:
    return escape(json.dumps(value, indent=1, default=str))


def _sweep(row: Row) -> str:
    """Rates × decays, each with its best score on val."""
    values = {
        (one["rate"], one["decay"]): one.get("val", math.nan) for one in row.sweep if {"rate", "decay"} <= one.keys()
    }
    if len(values) < 2:
        return ""
    levels = _levels(values, lower_is_better(row.metric))
    rates, decays = (sorted({pair[i] for pair in values}) for i in (0, 1))
    cells = {
        f"{decay:g}": [
            (number(values.get((rate, decay), math.nan)), levels.get((rate, decay), math.nan)) for rate in rates
        ]
        for decay in decays
    }
    caption = f"Sweep: best {escape(row.metric)} on val by decay (rows) and rate (columns)."
    return heat_table("decay", [f"{rate:g}" for rate in rates], cells, caption, ("worse", "better"))
