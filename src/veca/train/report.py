"""Report of a distillation run: `report.html`, from the files in the folder of the run.

It can be written at any time: of a run in progress, a finished one, or one that failed before its first step.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from veca.errors import ArgumentError
from veca.report.charts import Line, Point, bar_chart, line_chart, smooth
from veca.report.page import heat_rows, levels, write_page
from veca.train.csv_log import EVENTS, LOSS_COLUMNS, METRICS, VALIDATION, Grid, grid_means, read_table
from veca.train.plan import resolution_odds, shares
from veca.train.recipe import Recipe
from veca.utils.text import duration, number

SHOWN_ROWS, SHOWN_EVENTS = 12, 200
Event = tuple[str, str, str]  # time, step, text


@dataclass(frozen=True)
class _Run:
    """The files of a run's folder, parsed; missing or damaged ones are empty."""

    name: str
    metrics: Sequence[Mapping[str, float]]
    validation: Mapping[int, Grid]
    """By step, in rising order."""
    events: Sequence[Event]
    recipe_text: str
    recipe: Recipe | None
    summary: Mapping[str, Any]

    def points(self, column: str) -> list[Point]:
        return [(row["step"], row[column]) for row in self.metrics if column in row]

    def last(self, column: str) -> float:
        """The last finite value of a column, or nan."""
        return next((y for _, y in reversed(self.points(column)) if math.isfinite(y)), math.nan)

    def count_draws(self, name: str) -> dict[int, float]:
        """Steps at each budget or resolution: from columns such as `budget_8`, or else rows by their `budget`."""
        counts: dict[int, float] = {}
        rows_by_value: dict[int, float] = {}
        for row in self.metrics:
            for column, value in row.items():
                prefix, _, key = column.rpartition("_")
                if prefix == name and key.isdecimal() and math.isfinite(value):
                    counts[int(key)] = counts.get(int(key), 0) + value
                elif column == name and math.isfinite(value):
                    rows_by_value[int(value)] = rows_by_value.get(int(value), 0) + 1
        return counts or rows_by_value

    def best_validation(self) -> int | None:
        """The step of the validation with the lowest mean loss over its grid."""
        means = {step: _mean_loss(grid) for step, grid in self.validation.items()}
        return min((step for step in means if math.isfinite(means[step])), key=means.__getitem__, default=None)


def write_distill_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a run and return its path."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is not a folder; name the one a run wrote to")
    run = _read_run(folder)
    out = folder / "report.html"
    summary = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in run.summary.items()}
    write_page(
        out,
        "distill.html",
        name=run.name,
        banner=not run.metrics,
        facts=_distill_facts(run),
        **_loss_curves(run),
        **_validation_maps(run),
        draws=[_draw_counts(run, "budget", "cores"), _draw_counts(run, "resolution", "px")],
        pace=_chart_of(run, "images_per_s", "images/s", "images per second"),
        ends=[(n, number(run.last(c), form)) for c, n, form in _END_COLUMNS if run.points(c)],
        event_groups=_group_events(run.events),
        recipe=run.recipe_text,
        summary=[(key, value[:500]) for key, value in summary.items()],
    )
    return out


_END_COLUMNS = (("floor_share", "Share of the floor", ".0%"), ("memory_gib", "Most memory in use, GiB", ".1f"))


def _read_run(folder: Path) -> _Run:
    validation: dict[int, dict[tuple[int, int], dict[str, float]]] = {}
    for row in read_table(folder / VALIDATION):
        if {"resolution", "budget"} <= row.keys():
            losses = {name: value for name, value in row.items() if name not in ("step", "resolution", "budget")}
            validation.setdefault(int(row["step"]), {})[int(row["resolution"]), int(row["budget"])] = losses
    events = [line.split("\t", 2) for line in _read_text(folder / EVENTS).splitlines()]
    text, recipe = _read_text(folder / "recipe.yaml"), None
    # Another version's recipe, or a torn file; RecipeError is a ValueError. The text is shown in any case.
    with contextlib.suppress(yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):
        recipe = Recipe.from_dict(yaml.safe_load(text)) if text else None
    summary: Any = {}
    with contextlib.suppress(ValueError, RecursionError):
        summary = json.loads(_read_text(folder / "summary.json") or "{}")
    return _Run(
        folder.resolve().name,
        read_table(folder / METRICS),
        dict(sorted(validation.items())),
        [(event[0], event[1], event[2]) for event in events if len(event) == 3],
        text,
        recipe,
        summary if isinstance(summary, dict) else {},
    )


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
        low, (resolution, budget) = min(
            (losses["total"], cell) for cell, losses in grid.items() if math.isfinite(losses.get("total", math.nan))
        )
        best_text = (
            f"{number(_mean_loss(grid))} at step {best:,}, the mean of its grid; lowest {number(low)} at "
            f"{resolution} px with {budget} cores"
        )
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


def _chart_of(run: _Run, column: str, title: str, label: str) -> Any:
    points = run.points(column)
    label = f"{label}, {_first_and_last(points)}"
    return line_chart([Line("", points)], "step", title, label, wide=True, y_scale="auto")


def _first_and_last(points: Sequence[Point]) -> str:
    finite = [p for p in points if math.isfinite(p[1])]
    if not finite:
        return "no numbers"
    return f"from {number(finite[0][1])} at step {finite[0][0]:,.0f} to {number(finite[-1][1])} at {finite[-1][0]:,.0f}"


def _loss_curves(run: _Run) -> dict[str, Any]:
    """Charts of the losses and the learning rate, and the numbers of some of the rows."""

    def raw_and_smooth(column: str, name: str, colour: int) -> list[Line]:
        points = run.points(column)
        return [Line("", points, colour, faint=True), Line(name, smooth(points), colour)]

    total = raw_and_smooth("total", "training, smoothed", 0)
    if means := [(float(step), _mean_loss(grid)) for step, grid in run.validation.items()]:
        total.append(Line("validation, mean of grid", means, 1, dots=True))
    parts = [name for name in LOSS_COLUMNS[1:] if run.points(name)]
    part_lines = [line for i, name in enumerate(parts) for line in raw_and_smooth(name, name, i)]
    columns = {"total": "total", **dict.fromkeys(LOSS_COLUMNS[1:], ""), "learning_rate": "learning rate"}
    columns["images_per_s"] = "images/s"
    used = {column: name or column for column, name in columns.items() if run.points(column)}
    every = max(1, math.ceil(len(run.metrics) / SHOWN_ROWS))
    rows = list(reversed(run.metrics[::-1][::every])) if used else []  # the last row is always among them
    label = f"loss against steps, {_first_and_last(run.points('total'))}"
    return {
        "loss": line_chart(total, "step", "loss", label, wide=True, y_scale="auto"),
        "parts": line_chart(part_lines, "step", "loss", "parts of the loss against steps", wide=True, y_scale="auto"),
        "learning_rate": _chart_of(run, "learning_rate", "learning rate", "learning rate against steps"),
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
    counts = run.count_draws(name)
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
    kinds: dict[str, list[Event]] = {}
    for event in events:
        word = re.match(r"[A-Za-z]+", event[2])
        kinds.setdefault(word[0].lower() if word else "other", []).append(event)
    return [(k, len(v), v[-SHOWN_EVENTS:]) for k, v in sorted(kinds.items(), key=lambda item: len(item[1]))]
