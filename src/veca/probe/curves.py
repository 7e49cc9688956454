"""Charts of scores against budget and resolution, with the paper's curves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from veca.probe import paper
from veca.probe.results import lower_is_better, metric_name
from veca.probe.tables import Group, Series, compare_with_paper
from veca.report.charts import Chart, Line, Point, line_chart, shorten_middle

MAX_LINES = 6  # of ours in one chart; with more, each model has its own chart
LABEL_LETTERS = 22  # that fit beside a line
Along: TypeAlias = Literal["budget", "resolution"]
_FixedLine: TypeAlias = tuple[int | None, list[Point]]
"""Points along the budget at a resolution, or along the resolution at a budget."""


class Curve(NamedTuple):
    name: str
    """Of its file, without the suffix."""
    title: str
    chart: Chart
    caption: str


def draw_curves(group: Group) -> list[Curve]:
    """Charts along what varies, budget or resolution; where neither does, our points on the paper's curves."""
    varied: dict[Along, bool] = {"budget": len(group.cores) > 1, "resolution": len(group.sizes) > 1}
    curves = []
    for along, varies in varied.items():
        if not varies and any(varied.values()):
            continue
        fixed = group.sizes if along == "budget" else group.cores
        room = LABEL_LETTERS - (len(f", {_fixed_text(max(fixed), along)}") if len(fixed) > 1 else 0)
        names = dict(zip(group.series, short_names([s.name for s in group.series], room), strict=True))
        apart = sum(len(_own_lines(series, along)) for series in group.series) > MAX_LINES and len(group.series) > 1
        for i, part in enumerate([[series] for series in group.series] if apart else [list(group.series)], 1):
            lines, left_out = _chart_lines(group, part, along, names)
            if len({x for line in lines for x, _ in line.points}) < 2:  # a single point is in the table already
                continue
            words = [group.task, group.dataset, group.metric, along, *([str(i)] if apart else [])]
            name = "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", word)[:40].strip("-.") or "x" for word in words)
            title = f"{group.metric} against {along}" + (f", {part[0].name}" if apart else "")
            curves.append(Curve(name, title, _draw_lines(group, along, lines), _caption(group, lines, left_out)))
    return curves


def short_names(names: Sequence[str], limit: int = LABEL_LETTERS) -> list[str]:
    """Names short enough for a label and still distinct: the last part of a path, cut at its end or in the middle.

    >>> short_names(["facebook/dinov3-vits16-pretrain-lvd1689m", "facebook/dinov3-vitb16-pretrain-lvd1689m", "tiny"])
    ['dinov3-vits16-pretrai…', 'dinov3-vitb16-pretrai…', 'tiny']
    """
    last = [name.rstrip("/").rpartition("/")[2] or name for name in names]
    cut = [name if len(name) <= limit else f"{name[: limit - 1]}…" for name in last]
    for short in (list(names), last, cut, [shorten_middle(name, limit) for name in names]):
        if len(set(short)) == len(set(names)) and max(map(len, short), default=0) <= limit:
            return short
    return [f"{i}: {shorten_middle(name, limit - len(str(i)) - 2)}" for i, name in enumerate(names, 1)]


def _lines_by_fixed(scores: Iterable[tuple[int | None, int, float]], along: Along) -> list[_FixedLine]:
    """Lines through (cores, size, value), one for each resolution or budget; of equal places the first counts."""
    points: dict[int | None, dict[float, float]] = {}
    for cores, size, value in scores:
        fixed, x = (size, cores) if along == "budget" else (cores, size)
        if x is not None and math.isfinite(value):
            points.setdefault(fixed, {}).setdefault(float(x), value)
    return [(fixed, sorted(points[fixed].items())) for fixed in sorted(points, key=lambda fixed: fixed or 0)]


def _own_lines(series: Series, along: Along) -> list[_FixedLine]:
    return _lines_by_fixed(((row.cores, row.size, series.mean(row.cores, row.size)) for row in series.rows), along)


def _paper_lines(group: Group, part: Sequence[Series], along: Along) -> dict[str, _FixedLine]:
    """The longest curve of each model of the paper that one of our results is compared with."""
    compared = [found.number.model for series in part for row in series.rows if (found := compare_with_paper(row))]
    longest = {}
    for model in dict.fromkeys(compared):
        scores = ((n.cores, n.size, n.value) for n in paper.find(group.task, group.dataset, group.metric, model))
        lines = [line for line in _lines_by_fixed(scores, along) if len(line[1]) > 1]
        if lines:
            longest[model] = max(lines, key=lambda line: len(line[1]))
    return longest


def _chart_lines(
    group: Group, part: Sequence[Series], along: Along, names: Mapping[Series, str]
) -> tuple[list[Line], int]:
    """The lines of a chart, and how many of ours are left out: for want of room, or as single points beside curves."""
    own, count = [], 0
    for series in part:
        lines = _own_lines(series, along)
        count += len(lines)
        curves = [line for line in lines if len(line[1]) > 1]
        own += [(names[series], *line) for line in curves or lines]
    if not own:
        return [], 0
    if len(own) > MAX_LINES:
        own = [own[round(i * (len(own) - 1) / (MAX_LINES - 1))] for i in range(MAX_LINES)]  # evenly, with both ends
    quoted = _paper_lines(group, part, along)
    # Where they differ, each line says at what it was measured.
    several = len({fixed for _, fixed, _ in own} | {fixed for fixed, _ in quoted.values()}) > 1
    drawn = []
    for i, (name, fixed, points) in enumerate(own):
        text = _fixed_text(fixed, along) if several else ""
        drawn.append(Line(_label(name if len(part) > 1 or not text else "", text), points, i, dots=True))
    for model, (fixed, points) in quoted.items():
        text = f", {_fixed_text(fixed, along)}" if several and fixed is not None else ""
        drawn.append(Line(f"paper {model}{text}", points, dots=True, quoted=True))
    if along == "budget":
        drawn += _levels_without_budget(group, drawn, names)
    return drawn, count - len(own)


def _levels_without_budget(group: Group, drawn: Sequence[Line], names: Mapping[Series, str]) -> list[Line]:
    """Models without cores as horizontal lines to compare with, in every chart of the group."""
    xs = [x for line in drawn for x, _ in line.points]
    levels = list[Line]()
    for series in group.series:
        for size in sorted({row.size for row in series.rows if row.cores is None}):
            value = series.mean(None, size)
            if math.isfinite(value):
                name = _label(names[series], f"{size} px" if len(group.sizes) > 1 else "")
                levels.append(Line(name, [(min(xs), value), (max(xs), value)], len(drawn) + len(levels)))
    return levels


def _fixed_text(value: int | None, along: Along) -> str:
    return "" if value is None else f"{value} px" if along == "budget" else f"C = {value}"


def _label(name: str, fixed: str) -> str:
    if not name or not fixed:
        return name or fixed
    return f"{shorten_middle(name, max(8, LABEL_LETTERS - len(fixed) - 2))}, {fixed}"


def _draw_lines(group: Group, along: Along, lines: Sequence[Line]) -> Chart:
    texts = []
    for line in lines:
        (first, start), (last, end) = line.points[0], line.points[-1]
        texts.append(f"{line.name} {start:.4g} at {first:g}" + (f" to {end:.4g} at {last:g}" if last != first else ""))
    label = f"{group.metric} on {group.dataset} against {along}: {'; '.join(texts)}"
    x_title = "budget C, cores" if along == "budget" else "resolution, px"
    return line_chart(lines, x_title, metric_name(group.metric), label, ticks_at_points=True)


def _caption(group: Group, lines: Sequence[Line], left_out: int) -> str:
    text = "Lower is better." if lower_is_better(group.metric) else "Higher is better."
    text += " Grey squares: the paper's." if any(line.quoted for line in lines) else ""
    return text + (f" Not drawn: {left_out} more of the table." if left_out else "")
