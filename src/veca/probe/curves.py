"""Scores against budget and resolution as pictures, ours and the paper's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from veca.probe import paper
from veca.probe.results import lower_is_better, metric_name
from veca.probe.tables import Group, Series, compare
from veca.report.charts import SMALL, Line, Point, cut, line_chart

MOST_LINES = 6
"""Of ours in one picture; more of them, and each model has its own."""
LABEL = 22
"""Characters that a picture has room for beside a line."""
What: TypeAlias = Literal["budget", "resolution"]


class Picture(NamedTuple):
    name: str
    """As a part of a file's name."""
    title: str
    svg: str
    caption: str


def pictures(group: Group) -> list[Picture]:
    """Curves of a group over what varies, budgets or resolutions; where neither does, points on the paper's curves."""
    found = []
    kinds: tuple[What, ...] = ("budget", "resolution")
    varied = {"budget": len(group.cores) > 1, "resolution": len(group.sizes) > 1}
    for what in kinds:
        if not varied[what] and any(varied.values()):
            continue
        others = group.sizes if what == "budget" else group.cores
        room = LABEL - (len(f", {_fixed(max(others), what)}") if len(others) > 1 else 0)
        short = dict(zip(group.series, short_names([s.name for s in group.series], room), strict=True))
        count = sum(len(_own_lines(series, what)) for series in group.series)
        apart = count > MOST_LINES and len(group.series) > 1
        for i, part in enumerate([[series] for series in group.series] if apart else [list(group.series)]):
            lines, left_out = _lines(group, part, what, short)
            if len({x for line in lines for x, _ in line.points}) > 1:
                whose = f", {part[0].name}" if apart else ""
                parts = (group.task, group.dataset, group.metric, what, *([str(i + 1)] if apart else []))
                slug = "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part)[:40].strip("-.") or "x" for part in parts)
                svg, caption = _draw(group, what, lines, left_out)
                found.append(Picture(slug, f"{group.metric} against {what}{whose}", svg, caption))
    return found


def short_names(names: Sequence[str], most: int = LABEL) -> list[str]:
    """Names short enough for a label, and still as many: the last part of a path, cut at its end or in the middle.

    >>> short_names(["facebook/dinov3-vits16-pretrain-lvd1689m", "facebook/dinov3-vitb16-pretrain-lvd1689m", "tiny"])
    ['dinov3-vits16-pretrai…', 'dinov3-vitb16-pretrai…', 'tiny']
    """
    last = [name.rstrip("/").rpartition("/")[2] or name for name in names]
    for tried in (
        list(names),
        last,
        [name if len(name) <= most else f"{name[: most - 1]}…" for name in last],
        [cut(name, most) for name in names],
    ):
        if len(set(tried)) == len(set(names)) and max(map(len, tried), default=0) <= most:
            return tried
    return [f"{i}: {cut(name, most - len(str(i)) - 2)}" for i, name in enumerate(names, 1)]


def _own_lines(series: Series, what: What) -> list[tuple[int | None, list[Point]]]:
    """Lines of a series: the resolution or budget that is fixed, and the points."""
    lines: dict[int | None, dict[float, float]] = {}
    for row in series.rows:
        fixed, x = (row.size, row.cores) if what == "budget" else (row.cores, row.size)
        value = series.mean(row.cores, row.size)
        if x is not None and math.isfinite(value):
            lines.setdefault(fixed, {})[float(x)] = value
    return [(fixed, sorted(points.items())) for fixed, points in sorted(lines.items(), key=lambda line: line[0] or 0)]


def _paper_lines(group: Group, part: Sequence[Series], what: What) -> list[tuple[str, int | None, list[Point]]]:
    """The longest curve of each model of the paper that stands beside one of ours: its name, what is fixed, points."""
    nearest = [found.number.model for series in part for row in series.rows if (found := compare(row))]
    lines = []
    for model in dict.fromkeys(nearest):
        curves: dict[int | None, dict[float, float]] = {}
        for n in paper.find(group.task, group.dataset, group.metric, model):
            fixed, x = (n.size, n.cores) if what == "budget" else (n.cores, n.size)
            if x is not None:
                curves.setdefault(fixed, {}).setdefault(float(x), n.value)
        if curves:
            fixed = max(curves, key=lambda key: len(curves[key]))
            lines.append((model, fixed, sorted(curves[fixed].items())))
    return [line for line in lines if len(line[2]) > 1]


def _lines(
    group: Group, part: Sequence[Series], what: What, short: dict[Series, str]
) -> tuple[list[Line], int]:  # fmt: skip
    """What is drawn, and how many lines of ours are not: for want of room, or as they have one point."""
    every = [(series, *line) for series in part for line in _own_lines(series, what)]
    if not every:
        return [], 0
    curved = {series for series, _, points in every if len(points) > 1}  # single points would lie beside its curves
    own = [line for line in every if line[0] not in curved or len(line[2]) > 1]
    kept = [own[round(i * (len(own) - 1) / (MOST_LINES - 1))] for i in range(MOST_LINES)]
    kept = kept if len(own) > MOST_LINES else own
    quoted = _paper_lines(group, part, what)
    several = len({fixed for _, fixed, _ in kept} | {fixed for _, fixed, _ in quoted}) > 1
    lines = []
    for i, (series, fixed, points) in enumerate(kept):
        where = _fixed(fixed, what) if several else ""
        name = short[series] if len(part) > 1 or not where else ""
        lines.append(Line(_label(name, where), points, i, dots=True))
    for model, fixed, points in quoted:
        where = f", {_fixed(fixed, what)}" if several and fixed is not None else ""
        lines.append(Line(f"paper {model}{where}", points, dots=True, quoted=True))
    if what == "budget":
        ends = [x for line in lines for x, _ in line.points]
        for series in group.series:  # one without a budget is a level to compare with, whichever part this is
            for size in sorted({row.size for row in series.rows if row.cores is None}):
                value = series.mean(None, size)
                if math.isfinite(value):
                    name = _label(short[series], f"{size} px" if len(group.sizes) > 1 else "")
                    lines.append(Line(name, [(min(ends), value), (max(ends), value)], len(lines)))
    return lines, len(every) - len(kept)


def _fixed(value: int | None, what: What) -> str:
    return "" if value is None else f"{value} px" if what == "budget" else f"C = {value}"


def _label(name: str, where: str) -> str:
    if not name or not where:
        return name or where
    return f"{cut(name, max(8, LABEL - len(where) - 2))}, {where}"


def _draw(group: Group, what: What, lines: Sequence[Line], left_out: int) -> tuple[str, str]:
    across = "budget C, cores" if what == "budget" else "resolution, px"
    every = sorted({x for line in lines for x, _ in line.points})
    ticks = every[:1]
    for x in every[1:]:
        if x - ticks[-1] >= (every[-1] - every[0]) / 9:
            ticks.append(x)
    label = f"{group.metric} on {group.dataset} against {what}: " + "; ".join(map(_spoken, lines))
    said = ["Lower is better." if lower_is_better(group.metric) else "Higher is better."]
    if any(line.quoted for line in lines):
        said.append("Grey squares: the paper's.")
    if left_out:
        said.append(f"Not drawn: {left_out} more of the table.")
    return line_chart(lines, across, metric_name(group.metric), label, ticks, frame=SMALL, log=False), " ".join(said)


def _spoken(line: Line) -> str:
    (first, start), (last, end) = line.points[0], line.points[-1]
    return f"{line.name} {start:.4g} at {first:g}" + (f" to {end:.4g} at {last:g}" if last != first else "")
