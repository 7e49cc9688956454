"""Line charts: laid out here in pixels, drawn as SVG by a template.

A `Chart` put into a template becomes inline SVG that takes the colours of the page, light or dark;
`veca.report.chart_files` writes a file of its own.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from veca.report.colours import LINE_COLOURS
from veca.report.page import render

MAX_POINTS = 800  # of a line; more would only make the file larger
LABEL_GAP = 16  # pixels between the names of lines, one above the other
MAX_LABEL = 24  # letters of the name of a line
GLYPH_WIDTH = 0.57  # mean width of a letter, in units of the text size
Point: TypeAlias = tuple[float, float]


class Line(NamedTuple):
    """A line of a chart, in the units of its axes."""

    name: str
    """Written beside the end of the line; empty: nothing is."""
    points: Sequence[Point]
    colour: int = 0
    """Which of the line colours of the page."""
    faint: bool = False
    dots: bool = False
    quoted: bool = False
    """Numbers of other authors: grey, dashed, with square dots."""
    dash: str = ""
    """As SVG's stroke-dasharray."""
    band: Sequence[float] = ()
    """Half the height of a band around the line, at each point."""


# What a chart consists of, in pixels. `role` and `colour` are keys of `veca.report.colours`.
class Polyline(NamedTuple):
    """Lines through runs of points, or filled shapes, as the role says."""

    runs: Sequence[Sequence[Point]]
    role: str
    colour: str
    dash: str = ""


class Dot(NamedTuple):
    """A marked point: a circle or a square."""

    x: float
    y: float
    colour: str
    square: bool = False


class Label(NamedTuple):
    """A line of text; x and y are of its baseline, at the anchor."""

    x: float
    y: float
    text: str
    size: float
    colour: str = "muted"
    anchor: Literal["start", "middle", "end"] = "start"
    full: str = ""
    """The whole text where `text` is cut; SVG shows it under the pointer."""
    vertical: bool = False
    bold: bool = False


Mark: TypeAlias = Polyline | Dot | Label


class Chart(NamedTuple):
    """A finished layout; without marks there was nothing to draw."""

    width: float
    height: float
    marks: Sequence[Mark]
    label: str
    """What the chart shows, for readers who cannot see it."""
    panels: Sequence[tuple[float, float, Chart]] = ()
    """Charts within this one: x and y of the upper left corner, and the chart."""
    wide: bool = False

    def __html__(self) -> str:
        return render("chart.svg", chart=self, standalone=False)


class Frame(NamedTuple):
    """Size of a chart, of its text, and of the margins above and below the axes."""

    width: int
    height: int
    text: int
    top: int = 12
    bottom: int = 46

    def room_for(self, texts: Sequence[str]) -> float:
        """The width of the longest text."""
        return GLYPH_WIDTH * self.text * max(map(len, texts), default=0)


WIDE, SMALL = Frame(760, 300, 12), Frame(540, 320, 14)


class Axis:
    """Values laid out between two pixel positions."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool = False, margin: float = 0) -> None:
        self.log, self.start, self.end = log, start, end
        low, high = min(values), max(values)
        spare = (abs(low) or 1) / 10 if high <= low else 0  # one value, or equal ones: an axis needs a range
        low, high = low - spare, high + spare
        first, last = self._scaled(low), self._scaled(high)
        room = margin * (last - first)
        self.first = first - (0 if low == 0 else room)  # an axis from zero starts at its line
        self.last = last + room

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value

    def at(self, value: float) -> float:
        share = 0.0 if self.log and value <= 0 else (self._scaled(value) - self.first) / (self.last - self.first)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """Values and their labels."""
        low, high = (math.exp(end) if self.log else end for end in (self.first, self.last))
        values = ticks(low, high, count, self.log)
        return [(value, format(value, "g" if abs(value) < 1e4 else ",.0f")) for value in values]


def ticks(low: float, high: float, count: int = 5, log: bool = False) -> list[float]:
    """Round numbers from `low` to `high`.

    >>> ticks(0, 10), [round(t, 3) for t in ticks(0.03, 2, log=True)]
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.05, 0.1, 0.2, 0.5, 1.0, 2.0])
    """
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if len(decades) <= 4 else (1,)  # over many decades, only the decades
        return [t for decade in decades for factor in factors if low <= (t := factor * 10.0**decade) <= high]
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(m for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)  # 1e-9: an end that is a tick but for rounding counts
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def smooth(points: Sequence[Point], share: float = 0.01) -> list[Point]:
    """An exponential running mean over about `share` of the points; nan stays nan and does not spread."""
    decay = 1 - 1 / max(1.0, share * len(points))
    # Dividing by the sum of the weights makes the first values means too, instead of starting from zero.
    smoothed, total, weight = [], 0.0, 0.0
    for x, y in points:
        if math.isfinite(y):
            total, weight = decay * total + y, decay * weight + 1
        smoothed.append((x, total / weight if weight and math.isfinite(y) else math.nan))
    return smoothed


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """About `limit` points at most: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)  # two points are kept of each stretch
    kept: list[Point] = []
    for i in range(0, len(points), size):
        stretch = [p for p in points[i : i + size] if math.isfinite(p[1])] or [points[i]]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


def line_chart(
    lines: Sequence[Line], x_title: str, y_title: str, label: str, *, wide: bool = False, ticks_at_points: bool = False,
    log_x: bool = False, y_scale: Literal["linear", "log", "auto"] = "linear", include: Sequence[float] = (),
) -> Chart:  # fmt: skip
    """Lines over numbers, named at their ends; a line breaks where a value is not finite.

    `include` are y values that the axis must contain. `y_scale="auto"` is logarithmic where values span a factor of 20.
    """
    lines = [line if line.band else line._replace(points=thin(line.points)) for line in lines]
    finite = [point for line in lines for point in line.points if _drawable(point)]
    frame = WIDE if wide else SMALL
    if not finite:
        return Chart(frame.width, frame.height, [], label, wide=wide)
    xs, ys = [p[0] for p in finite], [*(p[1] for p in finite), *include]
    bands = [band for line in lines for band in zip(line.points, line.band, strict=False)]
    ys += [y + side for (_, y), half in bands for side in (-half, half) if _drawable((0, y + side))]
    log_x = log_x and min(xs) > 0
    log_y = y_scale == "log" or (y_scale == "auto" and min(ys) > 0 and max(ys) / min(ys) >= 20)
    log_y = log_y and min(ys) > 1e-200 and max(ys) < 1e200  # beyond, the ends of the axis are no floats
    y_axis = Axis(ys, frame.height - frame.bottom, frame.top, log_y, margin=0.05)
    names = [shorten_middle(line.name, MAX_LABEL) for line in lines if line.name]
    right = frame.width - (frame.room_for(names) + 38 if names else 24)
    x_axis = Axis(xs, _left_of_axes(frame, y_axis), right, log_x)
    x_ticks = sorted(set(xs)) if ticks_at_points else [x for x, _ in x_axis.ticks(6)]
    marks = _axes(frame, x_axis, y_axis, x_title, y_title, x_ticks) + _end_labels(lines, frame, x_axis, y_axis)
    marks += [mark for line in lines for mark in _line_marks(line, x_axis, y_axis)]
    return Chart(frame.width, frame.height, marks, label, wide=wide)


def _drawable(point: Point) -> bool:
    return all(abs(value) < 1e300 for value in point)  # not nan, and differences do not overflow


def _left_of_axes(frame: Frame, y_axis: Axis) -> float:
    """Room for the title of the y axis and its tick labels."""
    return 36 + frame.room_for([text for _, text in y_axis.ticks(5)])


def _axes(frame: Frame, x_axis: Axis, y_axis: Axis, x_title: str, y_title: str, x_ticks: Sequence[float]) -> list[Mark]:
    """Grid lines, tick labels and titles of both axes; x ticks too near to the one before are left out."""
    marks: list[Mark] = []
    floor, left, right = y_axis.start, x_axis.start, x_axis.end
    for value, text in y_axis.ticks(5):
        y = y_axis.at(value)
        marks.append(Polyline([[(left, y), (right, y)]], "grid", "rule"))
        marks.append(Label(left - 7, y + 4, text, frame.text, anchor="end"))
    last = -math.inf
    for value in x_ticks:
        x = x_axis.at(value)
        if x - last >= (right - left) / 9.01:  # at most ten labels; 9.01, as rounding must not drop the tenth
            marks.append(Polyline([[(x, floor), (x, floor + 4)]], "grid", "rule"))
            marks.append(Label(x, floor + 17, f"{value:,.6g}", frame.text, anchor="middle"))
            last = x
    marks.append(Polyline([[(left, floor), (right, floor)]], "axis", "muted"))
    marks.append(Label(right, frame.height - 8, x_title, frame.text, "ink", "end"))
    marks.append(Label(13, (frame.top + floor) / 2, y_title, frame.text, "ink", "middle", vertical=True))
    return marks


def _colour(line: Line) -> str:
    return "muted" if line.quoted else f"c{line.colour % LINE_COLOURS}"


def _dash(line: Line) -> str:
    return line.dash or ("5 4" if line.quoted else "")


def _line_marks(line: Line, x_axis: Axis, y_axis: Axis) -> list[Mark]:
    """The band of a line, the line with gaps where it breaks, and its dots, in the order in which they are drawn."""
    colour, marks = _colour(line), list[Mark]()
    groups = itertools.groupby(line.points, _drawable)
    runs = [[(x_axis.at(x), y_axis.at(y)) for x, y in run] for drawable, run in groups if drawable]
    halves = zip(line.points, line.band, strict=False)
    if band := [(x, y, half) for (x, y), half in halves if _drawable((x, y)) and math.isfinite(half)]:
        edges = [[(x_axis.at(x), y_axis.at(y + sign * half)) for x, y, half in band] for sign in (-1, 1)]
        marks.append(Polyline([[*edges[0], *reversed(edges[1])]], "band", colour))
    marks.append(Polyline(runs, "faint" if line.faint else "line", colour, _dash(line)))
    if line.dots:
        marks += [Dot(x, y, colour, line.quoted) for run in runs for x, y in run]
    return marks


def _end_labels(lines: Sequence[Line], frame: Frame, x_axis: Axis, y_axis: Axis) -> list[Mark]:
    """Names of the lines right of the axes, each as near to the last point of its line as the others allow."""
    last = [(line, p) for line in lines if line.name and (p := next(filter(_drawable, reversed(line.points)), None))]
    ends = sorted(((y_axis.at(y), x_axis.at(x), line) for line, (x, y) in last), key=lambda end: end[0])
    heights = spread_apart([y for y, _, _ in ends], frame.top + 6, frame.height - frame.bottom, LABEL_GAP)
    marks, edge = list[Mark](), x_axis.end + 10
    for (y, x, line), height in zip(ends, heights, strict=True):
        marks.append(Polyline([[(x + 5, y), (edge - 2, height)]], "lead", _colour(line), "1 3"))
        marks.append(Polyline([[(edge, height), (edge + 16, height)]], "key", _colour(line), _dash(line)))
        text = shorten_middle(line.name, MAX_LABEL)
        marks.append(Label(edge + 22, height + 4, text, frame.text, "ink", full=line.name))
    return marks


def spread_apart(positions: Sequence[float], low: float, high: float, gap: float) -> list[float]:
    """Rising positions moved as little as needed to be `gap` apart and, if there is room, within the bounds.

    >>> spread_apart([10, 11, 50], 0, 60, 10), spread_apart([58, 59], 0, 60, 10)
    ([10, 20, 50], [50, 60])
    """
    # Downwards, away from the one before; then back up from the lower bound.
    moved = list(itertools.accumulate(positions, lambda before, own: max(own, before + gap), initial=low - gap))[1:]
    return list(itertools.accumulate(moved[::-1], lambda below, own: min(own, below - gap), initial=high + gap))[:0:-1]


def shorten_middle(text: str, limit: int) -> str:
    """At most `limit` characters: the middle of a longer text is left out.

    >>> shorten_middle("veca_small_plus", 9), shorten_middle("short", 9)
    ('veca…plus', 'short')
    """
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[len(text) - (limit - 1) // 2 :]}"


def chart_grid(
    panels: Sequence[tuple[str, Chart]], *, columns: int = 2, title: str = "", caption: str = "", notice: str = ""
) -> Chart:
    """Charts of one size in rows, each under its own title, below a common title, a notice and a caption."""
    gap, columns = 24, min(columns, len(panels))
    chart_width, chart_height = panels[0][1].width, panels[0][1].height
    width = gap + columns * (chart_width + gap)
    marks, top = list[Mark](), float(gap if title or notice or caption else 0)
    for text, size, colour in ((title, 22, "ink"), (notice, 15, "warning"), (caption, 15, "muted")):
        for line in textwrap.wrap(text, int((width - 2 * gap) / (GLYPH_WIDTH * size))):
            top += 1.35 * size
            marks.append(Label(gap, top, line, size, colour, bold=colour != "muted"))
    row_height = max(text.count("\n") + 1 for text, _ in panels) * 20 + 10 + chart_height
    placed = []
    for i, (text, chart) in enumerate(panels):
        x, y = gap + i % columns * (chart_width + gap), top + gap + i // columns * (row_height + gap)
        for k, line in enumerate(text.split("\n")):
            marks.append(Label(x, y + 20 * (k + 1), line, 15, "ink" if k == 0 else "muted", bold=k == 0))
        placed.append((x, y + row_height - chart_height, chart))
    label = title or "; ".join(text for text, _ in panels)
    return Chart(width, placed[-1][1] + chart_height + gap, marks, label, placed)
