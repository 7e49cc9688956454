"""Report of a distillation run: `report.html`, from the files in the folder of the run.

It can be written at any time: of a run in progress, a finished one, or one that failed before its first step.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from veca.errors import ArgumentError
from veca.report.charts import Chart, Line, Point, bar_chart, line_chart, smooth
from veca.report.page import heat_rows, levels, write_page
from veca.train.csv_log import EVENTS, LOSS_COLUMNS, METRICS, VALIDATION, Grid, grid_means, read_object, read_table
from veca.train.plan import resolution_odds, shares
from veca.train.recipe import Recipe
from veca.utils.text import duration, number

SHOWN_ROWS, SHOWN_EVENTS = 12, 200
Event = tuple[str, str, str]  # time, step, text


class _Run:
    """The files of a run's folder, parsed; missing or damaged ones are empty."""

    def __init__(self, folder: Path) -> None:
        self.name, self.metrics = folder.resolve().name, read_table(folder / METRICS)
        self.validation: dict[int, dict[tuple[int, int], dict[str, float]]] = {}
        """Grids by step."""
        for row in read_table(folder / VALIDATION):
            if {"resolution", "budget"} <= row.keys():
                step, *cell = (int(row.pop(name)) for name in ("step", "resolution", "budget"))
                self.validation.setdefault(step, {})[cell[0], cell[1]] = row
        lines = [line.split("\t", 2) for line in _read_text(folder / EVENTS).splitlines()]
        self.events: list[Event] = [(line[0], line[1], line[2]) for line in lines if len(line) == 3]
        self.recipe_text, self.recipe = _read_text(folder / "recipe.yaml"), None
        # Another version's recipe, or a torn file; RecipeError is a ValueError. The text is shown in any case.
        with contextlib.suppress(yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):
            self.recipe = Recipe.from_dict(yaml.safe_load(self.recipe_text)) if self.recipe_text else None
        self.summary = read_object(folder / "summary.json")

    def points(self, column: str) -> list[Point]:
        return [(row["step"], row[column]) for row in self.metrics if column in row]

    def last(self, column: str) -> float:
        """The last finite value of a column, or nan."""
        return next((y for _, y in reversed(self.points(column)) if math.isfinite(y)), math.nan)

    def best_validation(self) -> int | None:
        """The step of the validation with the lowest mean loss over its grid."""
        means = {step: _mean_loss(grid) for step, grid in self.validation.items()}
        return min((step for step in means if math.isfinite(means[step])), key=means.__getitem__, default=None)


def write_distill_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run and return its path."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is not a folder; name the one a run wrote to")
    run = _Run(folder)
    summary = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in run.summary.items()}
    write_page(
        out := folder / "report.html",
        "distill.html",
        name=run.name,
        banner=not run.metrics,
        facts=_distill_facts(run),
        **_loss_curves(run),
        **_validation_maps(run),
        draws=[_draw_counts(run, "budget", "cores"), _draw_counts(run, "resolution", "px")],
        pace=_chart([Line("", pace := run.points("images_per_s"))], "images/s", "images per second", pace),
        ends=[(n, number(run.last(c), form)) for c, n, form in _END_COLUMNS if run.points(c)],
        event_groups=_group_events(run.events),
        recipe=run.recipe_text,
        summary=[(key, value[:500]) for key, value in summary.items()],
    )
    return out


_END_COLUMNS = (("floor_share", "Share of the floor", ".0%"), ("memory_gib", "Most memory in use, GiB", ".1f"))


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _mean_loss(grid: Grid) -> float:
    return grid_means(grid).get("total", math.nan)


def _distill_facts(run: _Run) -> dict[str, str]:
    recipe, best = run.recipe, run.best_validation()
    steps = max((row["step"] for row in run.metrics), default=math.nan)
    planned = run.summary.get("total_steps", recipe.schedule.steps if recipe else None)
    best_text = "no validation"
    if best is not None:
        grid = run.validation[best]
        # The mean is finite, so all losses are.
        low, (size, budget) = min((losses["total"], cell) for cell, losses in grid.items() if "total" in losses)
        lowest = f"lowest {number(low)} at {size} px with {budget} cores"
        best_text = f"{number(_mean_loss(grid))} at step {best:,}, the mean of its grid; {lowest}"
    return {
        "Model": recipe.model.size if recipe else "–",
        "Teacher": recipe.teacher.name if recipe else "–",
        "Steps": number(steps, ",.0f") + (f" of {planned:,}" if type(planned) is int else ""),
        "Images seen": number(run.last("images"), ",.0f"),
        "Time, training": duration(run.last("seconds")),
        "Images per second": number(run.last("images_per_s"), ",.1f"),
        "Training loss, smoothed": number(next((y for _, y in reversed(smooth(run.points("total")))), math.nan)),
        "Best validation loss": best_text,
    }


def _chart(lines: Sequence[Line], y_title: str, label: str, points: Sequence[Point]) -> Chart:
    """Lines against steps; the label for screen readers names the first and the last finite one of the points."""
    finite = [(number(y), f"{x:,.0f}") for x, y in points if math.isfinite(y)]
    ends = "from {} at step {} to {} at {}".format(*finite[0], *finite[-1]) if finite else "no numbers"
    return line_chart(lines, "step", y_title, f"{label}, {ends}", wide=True, y_scale="auto")


def _loss_curves(run: _Run) -> dict[str, Any]:
    """Charts of the losses and the learning rate, and the numbers of some of the rows."""

    def raw_and_smooth(column: str, name: str, colour: int) -> list[Line]:
        points = run.points(column)
        return [Line("", points, colour, faint=True), Line(name, smooth(points), colour)]

    total = raw_and_smooth("total", "training, smoothed", 0)
    if means := [(float(step), _mean_loss(grid)) for step, grid in run.validation.items()]:
        total.append(Line("validation, mean of grid", means, 1, dots=True))
    names = {name: name for name in LOSS_COLUMNS} | {"learning_rate": "learning rate", "images_per_s": "images/s"}
    used = {column: name for column, name in names.items() if run.points(column)}
    parts = [name for name in LOSS_COLUMNS[1:] if name in used]
    part_lines = [line for i, name in enumerate(parts) for line in raw_and_smooth(name, name, i)]
    every = max(1, math.ceil(len(run.metrics) / SHOWN_ROWS))
    rows = list(reversed(run.metrics[::-1][::every])) if used else []  # the last row is always among them
    rates = run.points("learning_rate")
    return {
        "loss": _chart(total, "loss", "loss against steps", run.points("total")),
        "parts": line_chart(part_lines, "step", "loss", "parts of the loss against steps", wide=True, y_scale="auto"),
        "learning_rate": _chart([Line("", rates)], "learning rate", "learning rate against steps", rates),
        "metric_heads": ["Step", *used.values()],
        "metric_rows": [[f"{row['step']:,.0f}", *(number(row.get(c, math.nan)) for c in used)] for row in rows],
    }


def _validation_maps(run: _Run) -> dict[str, Any]:
    """Heat tables of the best and the last validation on one colour scale, and the last one's loss against budget."""
    if not run.validation:
        return {"grids": [], "against_budget": None, "last_step": None}
    best, last = run.best_validation(), max(run.validation)
    titles = {} if best is None else {best: "Best"}
    titles[last] = "Best and last" if best == last else "Last"
    losses = {step: {cell: v.get("total", math.nan) for cell, v in run.validation[step].items()} for step in titles}
    scaled = levels({(step, cell): loss for step in titles for cell, loss in losses[step].items()}, flat=0.0)
    grids, lines = [], []
    for step, title in titles.items():
        sizes, budgets = (sorted({cell[i] for cell in losses[step]}) for i in (0, 1))
        own_levels = {cell: level for (at, cell), level in scaled.items() if at == step}
        rows = heat_rows(losses[step], own_levels, {size: f"{size} px" for size in sizes}, budgets)
        mean = number(_mean_loss(run.validation[step]))
        grids.append({"title": f"{title} validation, step {step:,}", "budgets": budgets, "rows": rows, "mean": mean})
    for i, size in enumerate(sizes):  # of the last validation
        points = [(float(b), losses[last].get((size, b), math.nan)) for b in budgets]
        lines.append(Line(f"{size} px", points, i, dots=True))
    label = f"validation loss against budget at step {last}, one line per resolution"
    chart = line_chart(lines, "budget, cores", "loss", label, wide=True, ticks_at_points=True, y_scale="auto")
    return {"grids": grids, "against_budget": chart, "last_step": last}


def _draw_counts(run: _Run, name: str, unit: str) -> dict[str, Any]:
    """How often each budget or resolution was drawn, beside the odds of the recipe."""
    steps = max((row["step"] for row in run.metrics), default=0.0)
    targets: dict[int, float] = {}
    if run.recipe:
        targets = shares(run.recipe.budgets if name == "budget" else resolution_odds(run.recipe, steps))
    counts, rows_by_value = defaultdict[int, float](float), defaultdict[int, float](float)
    for column, value in [item for row in run.metrics for item in row.items() if math.isfinite(item[1])]:
        prefix, _, key = column.rpartition("_")
        if prefix == name and key.isdecimal():  # as budget_8
            counts[int(key)] += value
        elif column == name:
            rows_by_value[int(value)] += 1
    counts = counts or rows_by_value
    title = f"{name.capitalize()}s drawn"
    if not any(counts.values()):
        return {"title": title, "chart": None}
    drawn = shares(counts)
    rows = [
        (key, f"{counts.get(key, 0):,.0f}", f"{drawn.get(key, 0):.1%}", number(targets.get(key, math.nan), ".1%"))
        for key in sorted({*counts, *targets})
    ]
    chart = bar_chart(drawn, targets, f"{name}, {unit}", f"share of the steps that drew each {name}")
    return {"title": title, "chart": chart, "name": name.capitalize(), "rows": rows, "targets": bool(targets)}


def _group_events(events: Sequence[Event]) -> list[tuple[str, int, list[Event]]]:
    """(kind, count, last events) by their first word, rare kinds first: errors must not drown in checkpoints."""
    kinds = defaultdict[str, list[Event]](list)
    for event in events:
        word = re.match(r"[A-Za-z]+", event[2])
        kinds[word[0].lower() if word else "other"].append(event)
    return [(k, len(v), v[-SHOWN_EVENTS:]) for k, v in sorted(kinds.items(), key=lambda item: len(item[1]))]
