"""The report of a run: one page, a file that needs nothing beside it, made of what the run left in its folder.

It can be made at any time, of a run that goes, is done, or died before its first row.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from veca.files import atomic_path
from veca.train.charts import Line, Point, bar_chart, colour_of, line_chart, ramp, smooth
from veca.train.log import duration
from veca.train.plan import resolution_odds, shares
from veca.train.recipe import Recipe, RecipeError
from veca.train.tables import EVENTS, METRICS, PARTS, VALIDATION, Grid, grid_means, printable, read_table

SHOWN_ROWS, SHOWN_EVENTS = 12, 200
Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class _Run:
    """What a folder holds, read once."""

    name: str
    metrics: Rows
    validation: Mapping[int, Grid]
    events: Sequence[tuple[str, str, str]]
    """(time, step, text)"""
    recipe_text: str
    recipe: Recipe | None
    summary: Mapping[str, Any]

    def line(self, column: str) -> list[Point]:
        return [(row["step"], row[column]) for row in self.metrics if column in row]

    def last(self, column: str) -> float:
        """The last finite number of a column, or nan."""
        return next((y for _, y in reversed(self.line(column)) if math.isfinite(y)), math.nan)

    def drawn(self, what: str) -> dict[int, float]:
        """How many steps drew each budget or resolution; where nobody counted, how many rows name it."""
        counted: dict[int, float] = {}
        named: dict[int, float] = {}
        for row in self.metrics:
            for column, value in row.items():
                head, _, key = column.rpartition("_")
                if head == what and key.isdecimal() and math.isfinite(value):
                    counted[int(key)] = counted.get(int(key), 0) + value
                elif column == what and math.isfinite(value):
                    named[int(value)] = named.get(int(value), 0) + 1
        return counted or named

    def best(self) -> int | None:
        """The step of the validation with the lowest mean over its grid."""
        means = {step: grid_means(grid).get("total", math.nan) for step, grid in self.validation.items()}
        return min((step for step in means if math.isfinite(means[step])), key=lambda step: means[step], default=None)


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run, of the files that are there; its path comes back."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name the one a run wrote to")
    run = _read(folder)
    page = Template((files("veca") / "train" / "report.html").read_text(encoding="utf-8")).substitute(
        title=f"VECA · {escape(run.name)}",
        name=escape(run.name),
        banner=_banner(run),
        facts="\n".join(f"<div><dt>{term}</dt><dd>{value}</dd></div>" for term, value in _facts(run).items()),
        curves=_curves(run),
        validation=_validation(run),
        draws=_draws(run),
        pace=_pace(run),
        events=_events(run),
        recipe=escape(run.recipe_text) or "There is no recipe.yaml in the folder.",
        summary=_summary(run.summary),
        ramp=ramp(),
        footer=f"Made of the files in the run's folder on {datetime.now():%d %B %Y}.",
    )
    out = folder / "report.html"
    with atomic_path(out) as part:
        part.write_text(page, encoding="utf-8", errors="replace")
    return out


def _read(folder: Path) -> _Run:
    validation: dict[int, dict[tuple[int, int], dict[str, float]]] = {}
    for row in read_table(folder / VALIDATION):
        if {"resolution", "budget"} <= row.keys():
            values = {name: value for name, value in row.items() if name not in ("step", "resolution", "budget")}
            validation.setdefault(int(row["step"]), {})[int(row["resolution"]), int(row["budget"])] = values
    lines = [line.split("\t", 2) for line in _text(folder / EVENTS).splitlines()]
    text, recipe = _text(folder / "recipe.yaml"), None
    with contextlib.suppress(RecipeError, yaml.YAMLError, TypeError, AttributeError):  # of another version, or torn
        recipe = Recipe.from_dict(yaml.safe_load(text)) if text else None
    summary: Any = {}
    with contextlib.suppress(ValueError):
        summary = json.loads(_text(folder / "summary.json") or "{}")
    return _Run(
        printable(folder.resolve().name),
        read_table(folder / METRICS),
        dict(sorted(validation.items())),
        [(line[0], line[1], line[2]) for line in lines if len(line) == 3],
        text,
        recipe,
        summary if isinstance(summary, dict) else {},
    )


def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    # XML has no place for most control characters, and neither has a page.
    return "".join(c if c in "\n\t" or c.isprintable() else printable(c) for c in text.replace("\r\n", "\n"))


def _number(value: float, form: str = ".4g") -> str:
    return format(value, form) if math.isfinite(value) else "–"


def _banner(run: _Run) -> str:
    if run.metrics:
        return ""
    return '<div class="banner" role="note"><p><strong>No training step was logged.</strong></p></div>'


def _facts(run: _Run) -> dict[str, str]:
    recipe, best = run.recipe, run.best()
    steps = max((row["step"] for row in run.metrics), default=math.nan)
    planned = run.summary.get("total_steps", recipe.schedule.steps if recipe else None)
    facts = {
        "Model": escape(recipe.model.size) if recipe else "–",
        "Teacher": escape(recipe.teacher.name) if recipe else "–",
        "Steps": _number(steps, ",.0f") + (f" of {planned:,}" if type(planned) is int else ""),
        "Images seen": _number(run.last("images"), ",.0f"),
        "Time, training": duration(run.last("seconds")),
        "Images per second": _number(run.last("images_per_s"), ",.1f"),
        "Training loss, smoothed": _number(next((y for _, y in reversed(smooth(run.line("total")))), math.nan)),
        "Best validation loss": "no validation",
    }
    if best is not None:
        grid = run.validation[best]
        cells = [(values["total"], at) for at, values in grid.items() if math.isfinite(values.get("total", math.nan))]
        low, (resolution, budget) = min(cells)
        mean = grid_means(grid)["total"]
        facts["Best validation loss"] = (
            f"{_number(mean)} at step {best:,}, the mean of its grid; lowest {_number(low)} at {resolution} px with "
            f"{budget} cores"
        )
    return facts


def _curves(run: _Run) -> str:
    raw = run.line("total")
    means = [(float(step), grid_means(grid).get("total", math.nan)) for step, grid in run.validation.items()]
    lines = [Line("raw", raw, 0, faint=True), Line("training, smoothed", smooth(raw), 0)]
    if means:
        lines.append(Line("validation, mean of the grid", means, 1, dots=True))
    parts = []
    for i, name in enumerate(part for part in PARTS[1:] if run.line(part)):
        parts += [Line("raw", run.line(name), i, faint=True), Line(name, smooth(run.line(name)), i)]
    columns = {"total": "total", **{part: part for part in PARTS[1:]}, "learning_rate": "learning rate"}
    columns["images_per_s"] = "images/s"
    used = {column: name for column, name in columns.items() if run.line(column)}
    every = max(1, math.ceil(len(run.metrics) / SHOWN_ROWS))
    shown = list(reversed(run.metrics[::-1][::every]))
    body = [[f"{row['step']:,.0f}", *(_number(row.get(c, math.nan)) for c in used)] for row in shown]
    return "\n".join(
        [
            _figure(
                "Loss",
                line_chart(lines, "step", "loss", f"loss against steps, {_spoken(raw)}"),
                "Faint: as logged. Line: a running mean over about the last hundredth of the run.",
            ),
            _figure("Its parts", line_chart(parts, "step", "loss", "parts of the loss against steps")),
            _figure(
                "Learning rate",
                line_chart(
                    [Line("learning rate", run.line("learning_rate"), 0)],
                    "step",
                    "learning rate",
                    f"learning rate against steps, {_spoken(run.line('learning_rate'))}",
                ),
            ),
            _details("The numbers", _table(["Step", *used.values()], body)) if body and used else "",
        ]
    )


def _spoken(points: Sequence[Point]) -> str:
    finite = [p for p in points if math.isfinite(p[1])]
    if not finite:
        return "no numbers"
    return (
        f"from {_number(finite[0][1])} at step {finite[0][0]:,.0f} to {_number(finite[-1][1])} at {finite[-1][0]:,.0f}"
    )


def _validation(run: _Run) -> str:
    best = run.best()
    if not run.validation:
        return '<p class="none">This run was not validated.</p>'
    last = max(run.validation)
    shown = {
        step: run.validation[step] for step in ([last] if best in (None, last) else [best, last]) if step is not None
    }
    values = [v["total"] for grid in shown.values() for v in grid.values() if math.isfinite(v.get("total", math.nan))]
    low, high = min(values, default=0.0), max(values, default=0.0)

    def level(value: float) -> float:
        return (value - low) / (high - low) if high > low else 0.0

    parts = []
    for step, grid in shown.items():
        what = " and ".join(word for word, of in (("Best", best), ("last", last)) if of == step)
        title = f"{what[0].upper()}{what[1:]} validation, step {step:,}"
        parts.append(
            _figure(title, _heat(grid, level), f"Mean of the grid: {_number(grid_means(grid).get('total', math.nan))}.")
        )
    parts.append(_figure("Loss against budget", _against_budget(grid, last), f"At the last validation, step {last:,}."))
    return "\n".join(parts)


def _against_budget(grid: Grid, step: int) -> str:
    lines = []
    for i, resolution in enumerate(sorted({resolution for resolution, _ in grid})):
        points = [(float(b), v.get("total", math.nan)) for (r, b), v in sorted(grid.items()) if r == resolution]
        lines.append(Line(f"{resolution} px", points, i, dots=True))
    label = f"validation loss against budget at step {step}, one line per resolution"
    return line_chart(lines, "budget, cores", "loss", label, sorted({float(budget) for _, budget in grid}))


def _heat(grid: Grid, level: Callable[[float], float]) -> str:
    """Resolutions × budgets as a table, each cell in the colour of its loss."""
    budgets = sorted({budget for _, budget in grid})
    rows = []
    for resolution in sorted({resolution for resolution, _ in grid}):
        cells = []
        for budget in budgets:
            value = grid.get((resolution, budget), {}).get("total", math.nan)
            ground, ink = colour_of(level(value)) if math.isfinite(value) else ("transparent", "inherit")
            cells.append(f'<td style="background:{ground};color:{ink}">{_number(value)}</td>')
        rows.append(f'<tr><th scope="row">{resolution} px</th>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{budget}</th>' for budget in budgets)
    return (
        '<div class="wide"><table class="heat"><caption>Validation loss by resolution (rows) and budget (columns). '
        f'<span class="scale">low <i></i> high</span></caption><thead><tr><th scope="col">cores</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _draws(run: _Run) -> str:
    steps = max((row["step"] for row in run.metrics), default=0.0)
    wanted: dict[str, dict[int, float]] = {"budget": {}, "resolution": {}}
    if run.recipe:
        wanted = {"budget": shares(run.recipe.budgets), "resolution": shares(resolution_odds(run.recipe, steps))}
    parts = []
    for what, unit in (("budget", "cores"), ("resolution", "px")):
        counts = run.drawn(what)
        if not any(counts.values()):
            parts.append(_figure(f"{what.capitalize()}s drawn", '<p class="none">None were logged.</p>'))
            continue
        drawn = shares(counts)
        keys = sorted({*counts, *wanted[what]})
        cells = [
            [
                f"{key}",
                f"{counts.get(key, 0):,.0f}",
                f"{drawn.get(key, 0):.1%}",
                _number(wanted[what].get(key, math.nan), ".1%"),
            ]
            for key in keys
        ]
        chart = bar_chart(drawn, wanted[what], f"{what}, {unit}", f"share of the steps that drew each {what}")
        table = _table([what.capitalize(), "Steps", "Share", "Asked for"], cells)
        parts.append(_figure(f"{what.capitalize()}s drawn", f'<div class="pair"><div>{chart}</div>{table}</div>'))
    return "\n".join(parts)


def _pace(run: _Run) -> str:
    points = run.line("images_per_s")
    chart = line_chart([Line("images/s", points, 0)], "step", "images/s", f"images per second, {_spoken(points)}")
    parts = [_figure("Throughput", chart, "Smoothed; validation, checkpoints and compilation are left out.")]
    others = {"floor_share": ("Share of the floor", ".0%"), "memory_gib": ("Most memory in use, GiB", ".1f")}
    cells = [[name, _number(run.last(column), form)] for column, (name, form) in others.items() if run.line(column)]
    return "\n".join([*parts, _table(["At the end", ""], cells) if cells else ""])


def _events(run: _Run) -> str:
    """By their first word, the rare kinds first: what went wrong must not drown in what went well."""
    kinds: dict[str, list[tuple[str, str, str]]] = {}
    for event in run.events:
        word = re.match(r"[A-Za-z]+", event[2])
        kinds.setdefault(word[0].lower() if word else "other", []).append(event)
    if not kinds:
        return '<p class="none">None were logged.</p>'
    parts = []
    for kind, events in sorted(kinds.items(), key=lambda item: len(item[1])):
        more = len(events) - SHOWN_EVENTS
        rows = [[escape(cell) for cell in event] for event in events[-SHOWN_EVENTS:]]
        note = f"<p>The last {SHOWN_EVENTS}; {more:,} before them are in {EVENTS}.</p>" if more > 0 else ""
        body = note + _table(["Time", "Step", "What"], rows, "events")
        parts.append(_details(f"{escape(kind)}: {len(events):,}", body, kind != "checkpoint"))
    return "\n".join(parts)


def _summary(summary: Mapping[str, Any]) -> str:
    if not summary:
        return ""
    values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in summary.items()}
    rows = [[escape(printable(str(key))), escape(printable(value[:500]))] for key, value in values.items()]
    return f"<section><h2>Summary</h2>{_table(['', 'summary.json'], rows, 'events')}</section>"


def _figure(title: str, picture: str, caption: str = "") -> str:
    said = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure><h3>{title}</h3>{picture}{said}</figure>"


def _details(title: str, body: str, shown: bool = False) -> str:
    start = '<details open="">' if shown else "<details>"
    return f"{start}<summary>{title}</summary>{body}</details>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "plain") -> str:
    """Cells are HTML already."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )
