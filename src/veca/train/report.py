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
from pathlib import Path
from typing import Any

import yaml

from veca.errors import ArgumentError
from veca.report.charts import Line, Point, bar_chart, line_chart, smooth
from veca.report.page import details, figure, heat_table, section, table, write_page
from veca.train.csv_log import EVENTS, LOSS_COLUMNS, METRICS, VALIDATION, Grid, grid_means, read_table
from veca.train.plan import resolution_odds, shares
from veca.train.recipe import Recipe
from veca.utils.text import duration, number, printable

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
        raise ArgumentError(f"{folder} is no folder; name the one a run wrote to")
    run = _read(folder)
    out = folder / "report.html"
    write_page(
        out,
        name=run.name,
        eyebrow="VECA training",
        banner="" if run.metrics else "<p><strong>No training step was logged.</strong></p>",
        facts=_facts(run),
        sections=[
            section("Curves", _curves(run)),
            section("Validation", _validation(run)),
            section("What was drawn", _draws(run)),
            section("Pace", _pace(run)),
            section("Events", _events(run)),
            section(
                "The recipe",
                f"<pre>{escape(run.recipe_text) or 'There is no recipe.yaml in the folder.'}</pre>",
            ),
            _summary(run.summary),
        ],
        footer=f"Made of the files in the run's folder on {datetime.now():%d %B %Y}.",
    )
    return out


def _read(folder: Path) -> _Run:
    validation: dict[int, dict[tuple[int, int], dict[str, float]]] = {}
    for row in read_table(folder / VALIDATION):
        if {"resolution", "budget"} <= row.keys():
            values = {name: value for name, value in row.items() if name not in ("step", "resolution", "budget")}
            validation.setdefault(int(row["step"]), {})[int(row["resolution"]), int(row["budget"])] = values
    lines = [line.split("\t", 2) for line in _text(folder / EVENTS).splitlines()]
    text, recipe = _text(folder / "recipe.yaml"), None
    # Of another version, or torn; a RecipeError is a ValueError.
    with contextlib.suppress(yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):
        recipe = Recipe.from_dict(yaml.safe_load(text)) if text else None
    summary: Any = {}
    with contextlib.suppress(ValueError, RecursionError):
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


def _facts(run: _Run) -> dict[str, str]:
    recipe, best = run.recipe, run.best()
    steps = max((row["step"] for row in run.metrics), default=math.nan)
    planned = run.summary.get("total_steps", recipe.schedule.steps if recipe else None)
    facts = {
        "Model": escape(recipe.model.size) if recipe else "–",
        "Teacher": escape(recipe.teacher.name) if recipe else "–",
        "Steps": number(steps, ",.0f") + (f" of {planned:,}" if type(planned) is int else ""),
        "Images seen": number(run.last("images"), ",.0f"),
        "Time, training": duration(run.last("seconds")),
        "Images per second": number(run.last("images_per_s"), ",.1f"),
        "Training loss, smoothed": number(next((y for _, y in reversed(smooth(run.line("total")))), math.nan)),
        "Best validation loss": "no validation",
    }
    if best is not None:
        grid = run.validation[best]
        cells = [(values["total"], at) for at, values in grid.items() if math.isfinite(values.get("total", math.nan))]
        low, (resolution, budget) = min(cells)
        mean = grid_means(grid)["total"]
        facts["Best validation loss"] = (
            f"{number(mean)} at step {best:,}, the mean of its grid; lowest {number(low)} at {resolution} px with "
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
    for i, name in enumerate(part for part in LOSS_COLUMNS[1:] if run.line(part)):
        parts += [Line("raw", run.line(name), i, faint=True), Line(name, smooth(run.line(name)), i)]
    columns = {"total": "total", **{part: part for part in LOSS_COLUMNS[1:]}, "learning_rate": "learning rate"}
    columns["images_per_s"] = "images/s"
    used = {column: name for column, name in columns.items() if run.line(column)}
    every = max(1, math.ceil(len(run.metrics) / SHOWN_ROWS))
    shown = list(reversed(run.metrics[::-1][::every]))
    body = [[f"{row['step']:,.0f}", *(number(row.get(c, math.nan)) for c in used)] for row in shown]
    return "\n".join(
        [
            figure(
                "Loss",
                line_chart(lines, "step", "loss", f"loss against steps, {_spoken(raw)}"),
                "Faint: as logged. Line: a running mean over about the last hundredth of the run.",
            ),
            figure("Its parts", line_chart(parts, "step", "loss", "parts of the loss against steps")),
            figure(
                "Learning rate",
                line_chart(
                    [Line("learning rate", run.line("learning_rate"), 0)],
                    "step",
                    "learning rate",
                    f"learning rate against steps, {_spoken(run.line('learning_rate'))}",
                ),
            ),
            details("The numbers", table(["Step", *used.values()], body)) if body and used else "",
        ]
    )


def _spoken(points: Sequence[Point]) -> str:
    finite = [p for p in points if math.isfinite(p[1])]
    if not finite:
        return "no numbers"
    return f"from {number(finite[0][1])} at step {finite[0][0]:,.0f} to {number(finite[-1][1])} at {finite[-1][0]:,.0f}"


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
            figure(title, _heat(grid, level), f"Mean of the grid: {number(grid_means(grid).get('total', math.nan))}.")
        )
    parts.append(figure("Loss against budget", _against_budget(grid, last), f"At the last validation, step {last:,}."))
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
    rows = {}
    for resolution in sorted({resolution for resolution, _ in grid}):
        values = [grid.get((resolution, budget), {}).get("total", math.nan) for budget in budgets]
        rows[f"{resolution} px"] = [(number(v), level(v) if math.isfinite(v) else math.nan) for v in values]
    caption = "Validation loss by resolution (rows) and budget (columns)."
    return heat_table("cores", [str(budget) for budget in budgets], rows, caption)


def _draws(run: _Run) -> str:
    steps = max((row["step"] for row in run.metrics), default=0.0)
    wanted: dict[str, dict[int, float]] = {"budget": {}, "resolution": {}}
    if run.recipe:
        wanted = {"budget": shares(run.recipe.budgets), "resolution": shares(resolution_odds(run.recipe, steps))}
    parts = []
    for what, unit in (("budget", "cores"), ("resolution", "px")):
        counts = run.drawn(what)
        if not any(counts.values()):
            parts.append(figure(f"{what.capitalize()}s drawn", '<p class="none">None were logged.</p>'))
            continue
        drawn = shares(counts)
        keys = sorted({*counts, *wanted[what]})
        cells = [
            [
                f"{key}",
                f"{counts.get(key, 0):,.0f}",
                f"{drawn.get(key, 0):.1%}",
                number(wanted[what].get(key, math.nan), ".1%"),
            ]
            for key in keys
        ]
        chart = bar_chart(drawn, wanted[what], f"{what}, {unit}", f"share of the steps that drew each {what}")
        numbers = table([what.capitalize(), "Steps", "Share", "Asked for"], cells)
        parts.append(figure(f"{what.capitalize()}s drawn", f'<div class="pair"><div>{chart}</div>{numbers}</div>'))
    return "\n".join(parts)


def _pace(run: _Run) -> str:
    points = run.line("images_per_s")
    chart = line_chart([Line("images/s", points, 0)], "step", "images/s", f"images per second, {_spoken(points)}")
    parts = [figure("Throughput", chart, "Smoothed; validation, checkpoints and compilation are left out.")]
    others = {"floor_share": ("Share of the floor", ".0%"), "memory_gib": ("Most memory in use, GiB", ".1f")}
    cells = [[name, number(run.last(column), form)] for column, (name, form) in others.items() if run.line(column)]
    return "\n".join([*parts, table(["At the end", ""], cells) if cells else ""])


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
        body = note + table(["Time", "Step", "What"], rows, "events")
        parts.append(details(f"{escape(kind)}: {len(events):,}", body, kind != "checkpoint"))
    return "\n".join(parts)


def _summary(summary: Mapping[str, Any]) -> str:
    if not summary:
        return ""
    values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in summary.items()}
    rows = [[escape(printable(str(key))), escape(printable(value[:500]))] for key, value in values.items()]
    return section("Summary", table(["", "summary.json"], rows, "events"))
