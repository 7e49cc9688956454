"""Reports of training runs: `report.html`, from the files in the folder of a distillation or fine-tuning run.

They can be written at any time: of a run in progress, a finished one, or one that failed before its first step.
"""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import UndefinedError

from veca.checkpoint.format import FINETUNE_RESULT, FINETUNE_SETTINGS
from veca.errors import ArgumentError, VecaError
from veca.heads.metrics import describe_spread
from veca.report.charts import Chart, Line, Point, line_chart, smooth
from veca.report.gallery import class_colours
from veca.report.page import data_uri, heat_rows, levels, write_page
from veca.train.finetune.settings import TASK_METRICS
from veca.train.logger import LOSS_COLUMNS, Grid, grid_means, read_object, read_table
from veca.train.plan import resolution_odds, shares
from veca.train.recipe import Recipe, Setting
from veca.utils.text import number

SHOWN_ROWS, SHOWN_EVENTS, SHOWN_PAIRS = 12, 200, 12
"""Rows of the table of metrics; events of each kind; pairs of classes that are confused."""
Rows = Sequence[Mapping[str, float]]


def write_distill_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a distillation run and return its path."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is not a folder; name the one a run wrote to")
    rows, grids = (
        read_table(folder / "metrics.csv"),
        defaultdict[int, dict[tuple[int, int, float], dict[str, float]]](dict),
    )
    for row in read_table(folder / "validation.csv"):
        if {"resolution", "budget"} <= row.keys():
            step, *cell = (int(row.pop(name)) for name in ("step", "resolution", "budget"))
            grids[step][cell[0], cell[1], row.pop("width", 1.0)] = row
    events, recipe_text = (
        path.read_text(encoding="utf-8", errors="replace") if (path := folder / name).exists() else ""
        for name in ("events.txt", "recipe.yaml")
    )
    recipe = None
    # Another version's recipe, or a torn file; RecipeError is a ValueError. The text is shown in any case.
    with contextlib.suppress(yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):
        recipe = Recipe.from_dict(yaml.safe_load(recipe_text)) if recipe_text else None
    pace, steps = _points(rows, "images_per_s"), max((row["step"] for row in rows), default=0.0)
    resolutions = resolution_odds(recipe, steps) if recipe else {}
    settings = recipe.settings() if recipe else {}
    validation = _validation_maps(grids)
    curves = _loss_curves(rows, validation["means"])
    curves["pace"] = _step_chart([Line("", pace)], "images/s", "images per second", pace)
    draws = [_draw_counts(rows, "budget", _marginal(settings, 0)), _draw_counts(rows, "resolution", resolutions)]
    if len(widths := _marginal(settings, 1)) > 1:
        draws.append(_draw_counts(rows, "width", widths))
    context = {"draws": draws, "event_groups": _group_events(events), "summary": read_object(folder / "summary.json")}
    context |= {"recipe": recipe, "recipe_text": recipe_text, **curves, **validation}
    return _write_run_page(folder, "distill.html", rows, not rows, **context)


def _write_run_page(folder: Path, template: str, rows: Rows, banner: bool, **context: Any) -> Path:
    """Write the page of a run; `last` gives its template the last finite value of a column."""
    out, name, last = folder / "report.html", folder.resolve().name, partial(_last, rows)
    write_page(out, template, name=name, banner=banner, last=last, **context)
    return out


def _points(rows: Rows, column: str) -> list[Point]:
    return [(row["step"], row[column]) for row in rows if column in row]


def _last(rows: Rows, column: str) -> float:
    """The last finite value of a column, or nan."""
    return next((y for _, y in reversed(_points(rows, column)) if math.isfinite(y)), math.nan)


def _raw_and_smooth(points: Sequence[Point], name: str, colour: int, share: float = 0.01) -> list[Line]:
    return [Line("", points, colour, faint=True), Line(name, smooth(points, share), colour)]


def _step_chart(lines: Sequence[Line], y_title: str, label: str, points: Sequence[Point]) -> Chart:
    """Lines against steps; the label for screen readers names the first and the last finite one of the points."""
    finite = [(number(y), f"{x:,.0f}") for x, y in points if math.isfinite(y)]
    ends = "from {} at step {} to {} at {}".format(*finite[0], *finite[-1]) if finite else "no numbers"
    return line_chart(lines, "step", y_title, f"{label}, {ends}", wide=True, y_scale="auto")


def _loss_curves(rows: Rows, means: Mapping[int, float]) -> dict[str, Any]:
    """Charts of the losses and the learning rate, and the numbers of some of the rows."""
    loss, rates = _points(rows, "total"), _points(rows, "learning_rate")
    validated = [(float(step), mean) for step, mean in means.items()]
    total = [*_raw_and_smooth(loss, "training, smoothed", 0), Line("validation, mean of grid", validated, 1, dots=True)]
    names = {name: name for name in LOSS_COLUMNS} | {"learning_rate": "learning rate", "images_per_s": "images/s"}
    used = {column: name for column, name in names.items() if _points(rows, column)}
    parts = [name for name in LOSS_COLUMNS[1:] if name in used]
    part_lines = [line for i, name in enumerate(parts) for line in _raw_and_smooth(_points(rows, name), name, i)]
    every = max(1, math.ceil(len(rows) / SHOWN_ROWS))
    return {
        "loss": _step_chart(total, "loss", "loss against steps", loss),
        "smoothed": next((y for _, y in reversed(smooth(loss))), math.nan),
        "parts": line_chart(part_lines, "step", "loss", "parts of the loss against steps", wide=True, y_scale="auto"),
        "learning_rate": _step_chart([Line("", rates)], "learning rate", "learning rate against steps", rates),
        "metric_columns": used,
        "metric_rows": rows[::-1][::every][::-1],  # the last row is always among them
    }


def _marginal(settings: Mapping[Setting, float], axis: int) -> dict[float, float]:
    """Odds of the budgets (axis 0) or widths (axis 1) of settings."""
    odds = defaultdict[float, float](float)
    for setting, odd in settings.items():
        odds[setting[axis]] += odd
    return odds


def _validation_maps(grids: Mapping[int, Grid]) -> dict[str, Any]:
    """Heat tables of the best and the last validation on one colour scale, and the last one's loss against budget."""
    if not grids:
        return {"means": {}, "best": None, "grids": [], "against_budget": None, "last_step": None}
    means = {step: grid_means(grid).get("total", math.nan) for step, grid in grids.items()}
    best = min((step for step in means if math.isfinite(means[step])), key=means.__getitem__, default=None)
    last = max(grids)
    titles = {} if best is None else {best: "Best"}
    titles[last] = "Best and last" if best == last else "Last"
    # A row of a table is a resolution and a width, a column a budget.
    losses = {step: {((s, w), c): v.get("total", math.nan) for (s, c, w), v in grids[step].items()} for step in titles}
    scaled = levels({(step, cell): loss for step in titles for cell, loss in losses[step].items()}, flat=0.0)
    maps, lines = [], []
    for step, title in titles.items():
        kinds, budgets = sorted({row for row, _ in losses[step]}), sorted({column for _, column in losses[step]})
        own_levels = {cell: level for (at, cell), level in scaled.items() if at == step}
        names = {(size, w): f"{size} px" + (f", width {w:g}" if w != 1 else "") for size, w in kinds}
        rows = heat_rows(losses[step], own_levels, names, budgets)
        maps.append({"title": title, "step": step, "budgets": budgets, "rows": rows})
    for i, (kind, name) in enumerate(names.items()):  # of the last validation
        points = [(float(b), losses[last].get((kind, b), math.nan)) for b in budgets]
        lines.append(Line(name, points, i, dots=True))
    label = f"validation loss against budget at step {last}, one line per resolution and width"
    chart = line_chart(lines, "budget, cores", "loss", label, wide=True, ticks_at_points=True, y_scale="auto")
    return {"means": means, "best": best, "losses": losses, "grids": maps, "against_budget": chart, "last_step": last}


def _draw_counts(rows: Rows, name: str, odds: Mapping[Any, float]) -> dict[str, Any]:
    """How often each budget, resolution or width was drawn, beside the odds of the recipe."""
    counts = defaultdict[float, float](float)
    for column, value in [item for row in rows for item in row.items() if math.isfinite(item[1])]:
        prefix, _, key = column.rpartition("_")
        if prefix == name and (number := re.fullmatch(r"\d+(\.\d+)?", key)):  # as budget_8, width_0.25
            counts[float(key) if number[1] else int(key)] += value
    drawn = shares(counts) if any(counts.values()) else {}
    return {"name": name, "counts": counts, "drawn": drawn, "targets": shares(odds) if odds else {}}


def _group_events(text: str) -> list[tuple[str, int, list[list[str]]]]:
    """(kind, count, last events) by their first word, rare kinds first: errors must not drown in checkpoints."""
    kinds = defaultdict[str, list[list[str]]](list)
    for event in (line.split("\t", 2) for line in text.splitlines()):  # time, step, text
        if len(event) == 3:
            word = re.match(r"[A-Za-z]+", event[2])
            kinds[word[0].lower() if word else "other"].append(event)
    return [(k, len(v), v[-SHOWN_EVENTS:]) for k, v in sorted(kinds.items(), key=lambda item: len(item[1]))]


def write_finetune_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a fine-tuning run and return its path."""
    settings, result = (read_object(folder / name) for name in (FINETUNE_SETTINGS, FINETUNE_RESULT))
    rows = read_table(folder / "metrics.csv")
    try:
        metric, unit = TASK_METRICS[settings.get("task", "classify")]
        metric = result.get("metric", metric)
        charts = _finetune_charts(folder, rows, result, metric, unit)
        banner = not result or bool(result["problems"] or result.get("note"))
        pictures = {"thumbnail": partial(_thumbnail, folder), "class_colours": class_colours}
        context = {"settings": settings, "result": result, "shown_pairs": SHOWN_PAIRS, **pictures, **charts}
        context |= {"metric": metric, "unit": unit, "form": ".2f" if unit == "%" else ".3f"}
        context["spread"] = partial(describe_spread, count=result.get("scored"))
        return _write_run_page(folder, "finetune.html", rows, banner, **context)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, UndefinedError) as error:
        if isinstance(error, VecaError):
            raise
        files = f"{FINETUNE_SETTINGS} or {FINETUNE_RESULT}"
        problem = f"{files} is not as `veca finetune` wrote it ({type(error).__name__}: {error})"
        raise ArgumentError(f"{folder}: {problem}; the same command writes them again") from error


def _finetune_charts(folder: Path, rows: Rows, result: Mapping[str, Any], metric: str, unit: str) -> dict[str, Any]:
    """Curves of the metric, the loss and the rate; of a finished run also the scores by budget."""
    loss, rate = _points(rows, "total"), _points(rows, "learning_rate")
    by_budget = defaultdict[int, list[Mapping[str, float]]](list)
    for row in read_table(folder / "validation.csv"):
        by_budget[int(row["budget"])].append(row)
    metric_lines, loss_lines, score_lines = (
        list[Line](),
        _raw_and_smooth(loss, "train, smoothed", 0, 0.05),
        list[Line](),
    )
    for i, (cores, validations) in enumerate(sorted(by_budget.items())):
        metric_lines.append(Line(f"C = {cores}", _points(validations, metric), i, dots=True))
        loss_lines.append(Line(f"val, C = {cores}", _points(validations, "loss"), i + 1, dots=True))
    for i, (name, key) in enumerate({"fine-tuned": "after", "linear probe": "before"}.items()):
        points = [(float(cores), scores[metric]) for cores, scores in result.get(key, {}).items()]
        score_lines.append(Line(name, points, i, dots=True))
    budget_label = f"{metric} against budget"
    return {
        "metric_chart": line_chart(metric_lines, "step", f"{metric}, {unit}", metric, wide=True),
        "loss_chart": _step_chart(loss_lines, "loss", "loss against steps", loss),
        "rate_chart": line_chart([Line("", rate)], "step", "rate", "learning rate", wide=True),
        "score_chart": line_chart(
            score_lines, "budget, cores", f"{metric}, {unit}", budget_label, wide=True, ticks_at_points=True
        ),
    }


def _thumbnail(folder: Path, name: str) -> str:
    """The data URI of a file of the gallery; only the name counts, so that nothing else on the disk can be shown."""
    path = folder / "gallery" / Path(name).name
    return data_uri(path.read_bytes() if path.is_file() else b"", "webp" if path.suffix == ".webp" else "png")
