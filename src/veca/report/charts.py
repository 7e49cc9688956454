"""Line charts: laid out in pixels, drawn as SVG by a template or as PNG by Pillow.

A `Chart` put into a template becomes inline SVG that takes the colours of the page, light or dark. A file of its own is
SVG that follows the reader's colour scheme, or PNG in the light palette.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from veca.errors import ArgumentError
from veca.report.page import LIGHT, ROLES, render, write_text
from veca.utils.files import atomic_path
from veca.utils.text import printable

MAX_POINTS = 800  # of a line; more would only make the file larger
LINE_COLOURS = 6  # c0 to c5 of the palettes
LABEL_GAP = 16  # pixels between the names of lines, one above the other
MAX_LABEL = 24  # letters of the name of a line
GLYPH_WIDTH = 0.57  # mean width of a letter, in units of the text size
WIDE, SMALL = (760, 300, 12), (540, 320, 14)  # width and height of a chart, size of its text
TOP, BOTTOM = 12, 46  # margins above and below the axes
SCALE, SUPERSAMPLING = 2, 2  # of a PNG. Pillow's lines have no anti-aliasing: draw larger, then reduce
_FONTS = ("DejaVuSans.ttf", "LiberationSans-Regular.ttf", "arial.ttf")
_BOLD_FONTS = ("DejaVuSans-Bold.ttf", "LiberationSans-Bold.ttf", "arialbd.ttf")
_IN_ASCII = str.maketrans({"×": "x", "−": "-", "–": "-", "↓": "(low)", "…": "...", "·": ","})
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

    @property
    def stroke(self) -> tuple[str, str]:
        """Its colour in the palettes, and its dashes."""
        return ("muted", self.dash or "5 4") if self.quoted else (f"c{self.colour % LINE_COLOURS}", self.dash)


# What a chart consists of, in pixels. `role` and `colour` are keys of `colours.toml`.
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


class Axis:
    """Values laid out between two pixel positions."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool = False, margin: float = 0) -> None:
        self.log, self.start, self.end = log, start, end
        low, high = min(values), max(values)
        spare = (abs(low) or 1) / 10 if high <= low else 0  # one value, or equal ones: an axis needs a range
        low, high = low - spare, high + spare
        first, last = (math.log(low), math.log(high)) if log else (low, high)
        room = margin * (last - first)
        self.first, self.last = first - (0 if low == 0 else room), last + room  # one from zero starts at its line

    def at(self, value: float) -> float:
        if self.log and value <= 0:
            return self.start
        share = ((math.log(value) if self.log else value) - self.first) / (self.last - self.first)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[tuple[float, str]]:
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


def thin(points: Sequence[Point]) -> list[Point]:
    """About `MAX_POINTS` at most: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MAX_POINTS)  # two points are kept of each stretch
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
    width, height, text_size = WIDE if wide else SMALL
    if not finite:
        return Chart(width, height, [], label, wide=wide)
    xs, ys = [p[0] for p in finite], [*(p[1] for p in finite), *include]
    bands = [band for line in lines for band in zip(line.points, line.band, strict=False)]
    ys += [y + side for (_, y), half in bands for side in (-half, half) if _drawable((0, y + side))]
    log_x = log_x and min(xs) > 0
    log_y = y_scale == "log" or (y_scale == "auto" and min(ys) > 0 and max(ys) / min(ys) >= 20)
    log_y = log_y and min(ys) > 1e-200 and max(ys) < 1e200  # beyond, the ends of the axis are no floats
    y_axis = Axis(ys, height - BOTTOM, TOP, log_y, margin=0.05)
    names = [shorten_middle(line.name, MAX_LABEL) for line in lines if line.name]
    right = width - (_text_width(names, text_size) + 38 if names else 24)
    x_axis = Axis(xs, _left_of_axes(y_axis, text_size), right, log_x)
    x_ticks = sorted(set(xs)) if ticks_at_points else [x for x, _ in x_axis.ticks(6)]
    marks = _axes(x_axis, y_axis, x_title, y_title, x_ticks, text_size) + _end_labels(lines, x_axis, y_axis, text_size)
    marks += [mark for line in lines for mark in _line_marks(line, x_axis, y_axis)]
    return Chart(width, height, marks, label, wide=wide)


def _drawable(point: Point) -> bool:
    return all(abs(value) < 1e300 for value in point)  # not nan, and differences do not overflow


def _text_width(texts: Sequence[str], size: float) -> float:
    """Of the longest text."""
    return GLYPH_WIDTH * size * max(map(len, texts), default=0)


def _left_of_axes(y_axis: Axis, text_size: int) -> float:
    """Room for the title of the y axis and its tick labels."""
    return 36 + _text_width([text for _, text in y_axis.ticks()], text_size)


def _axes(
    x_axis: Axis, y_axis: Axis, x_title: str, y_title: str, x_ticks: Sequence[float], text_size: int
) -> list[Mark]:
    """Grid lines, tick labels and titles of both axes; x ticks too near to the one before are left out."""
    marks: list[Mark] = []
    floor, left, right, last = y_axis.start, x_axis.start, x_axis.end, -math.inf
    for value, text in y_axis.ticks():
        y = y_axis.at(value)
        marks.append(Polyline([[(left, y), (right, y)]], "grid", "rule"))
        marks.append(Label(left - 7, y + 4, text, text_size, anchor="end"))
    for value in x_ticks:
        x = x_axis.at(value)
        if x - last >= (right - left) / 9.01:  # at most ten labels; 9.01, as rounding must not drop the tenth
            marks.append(Polyline([[(x, floor), (x, floor + 4)]], "grid", "rule"))
            marks.append(Label(x, floor + 17, f"{value:,.6g}", text_size, anchor="middle"))
            last = x
    marks.append(Polyline([[(left, floor), (right, floor)]], "axis", "muted"))
    marks.append(Label(right, floor + BOTTOM - 8, x_title, text_size, "ink", "end"))
    marks.append(Label(13, (TOP + floor) / 2, y_title, text_size, "ink", "middle", vertical=True))
    return marks


def _line_marks(line: Line, x_axis: Axis, y_axis: Axis) -> Iterator[Mark]:
    """The band of a line, the line with gaps where it breaks, and its dots, in the order in which they are drawn."""
    colour, dash = line.stroke
    groups = itertools.groupby(line.points, _drawable)
    runs = [[(x_axis.at(x), y_axis.at(y)) for x, y in run] for drawable, run in groups if drawable]
    halves = zip(line.points, line.band, strict=False)
    if band := [(x, y, half) for (x, y), half in halves if _drawable((x, y)) and math.isfinite(half)]:
        edges = [[(x_axis.at(x), y_axis.at(y + sign * half)) for x, y, half in band] for sign in (-1, 1)]
        yield Polyline([[*edges[0], *reversed(edges[1])]], "band", colour)
    yield Polyline(runs, "faint" if line.faint else "line", colour, dash)
    if line.dots:
        yield from (Dot(x, y, colour, line.quoted) for run in runs for x, y in run)


def _end_labels(lines: Sequence[Line], x_axis: Axis, y_axis: Axis, text_size: int) -> list[Mark]:
    """Names of the lines right of the axes, each as near to the last point of its line as the others allow."""
    last = [(line, p) for line in lines if line.name and (p := next(filter(_drawable, reversed(line.points)), None))]
    ends = sorted(((y_axis.at(y), x_axis.at(x), line) for line, (x, y) in last), key=lambda end: end[0])
    heights = spread_apart([y for y, _, _ in ends], TOP + 6, y_axis.start, LABEL_GAP)
    marks, edge = list[Mark](), x_axis.end + 10
    for (y, x, line), height in zip(ends, heights, strict=True):
        colour, dash = line.stroke
        marks.append(Polyline([[(x + 5, y), (edge - 2, height)]], "lead", colour, "1 3"))
        marks.append(Polyline([[(edge, height), (edge + 16, height)]], "key", colour, dash))
        name = shorten_middle(line.name, MAX_LABEL)
        marks.append(Label(edge + 22, height + 4, name, text_size, "ink", full=line.name))
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


def write_chart(chart: Chart, path: Path) -> Path:
    """Write a chart as its suffix says, `.svg` or `.png`; the parent folder is made."""
    if path.suffix.lower() == ".svg":
        write_text(path, render("chart.svg", chart=chart, standalone=True))
    elif path.suffix.lower() == ".png":
        with atomic_path(path) as part:
            draw_png(chart).save(part, "PNG", optimize=True)
    else:
        raise ArgumentError(f"{path}: a chart is written as .svg or .png; end its name so")
    return path


def draw_png(chart: Chart) -> Image.Image:
    """The chart as an image, twice as large as the SVG."""
    factor = SCALE * SUPERSAMPLING
    image = Image.new("RGB", (round(chart.width * factor), round(chart.height * factor)), LIGHT["paper"])
    draw = ImageDraw.Draw(image, "RGBA")  # RGBA: colours with an opacity blend with what is there
    placed = [(0, 0, chart), *chart.panels]
    for left, top, mark in ((left, top, mark) for left, top, part in placed for mark in part.marks):
        if isinstance(mark, Polyline):
            role, dash = ROLES[mark.role], [float(length) * factor for length in mark.dash.split()]
            colour = LIGHT[mark.colour] + f"{round(255 * role['opacity']):02x}"
            for run in mark.runs:
                points = [((left + x) * factor, (top + y) * factor) for x, y in run]
                if not role["width"]:
                    draw.polygon(points, colour)
                    continue
                for piece in _dashes(points, dash) if dash else [points]:
                    draw.line(piece, colour, round(role["width"] * factor), "curve")
            continue
        x, y = (left + mark.x) * factor, (top + mark.y) * factor
        if isinstance(mark, Label):
            _draw_label(draw, image, mark, (x, y), factor)
        else:
            shape, radius = (draw.rectangle, 2.8 * factor) if mark.square else (draw.ellipse, 3.2 * factor)
            box = (x - radius, y - radius, x + radius, y + radius)
            shape(box, LIGHT["paper"], LIGHT[mark.colour], round(ROLES["dot"]["width"] * factor))
    return image.reduce(SUPERSAMPLING)


def _dashes(points: Sequence[Point], pattern: Sequence[float]) -> Iterator[list[Point]]:
    """A polyline cut into the dashes of a pattern of on and off lengths."""
    xs, ys = zip(*points, strict=True)
    lengths = np.cumsum([0, *itertools.starmap(math.dist, itertools.pairwise(points))])  # up to each point
    cuts = itertools.takewhile(lambda cut: cut < lengths[-1], itertools.accumulate(itertools.cycle(pattern), initial=0))
    for start, end in list(itertools.pairwise([*cuts, lengths[-1]]))[::2]:
        at = [start, *(length for length in lengths if start < length < end), end]
        yield list(zip(np.interp(at, lengths, xs).tolist(), np.interp(at, lengths, ys).tolist(), strict=True))


def _draw_label(draw: ImageDraw.ImageDraw, image: Image.Image, mark: Label, at: Point, factor: int) -> None:
    font, has_all_letters = load_font(round(mark.size * factor), mark.bold)
    text = printable(mark.text if has_all_letters else mark.text.translate(_IN_ASCII))
    if not mark.vertical:
        draw.text(at, text, LIGHT[mark.colour], font, {"start": "ls", "middle": "ms", "end": "rs"}[mark.anchor])
        return
    left, top, right, bottom = font.getbbox(text)
    mask = Image.new("L", (math.ceil(right - left), math.ceil(bottom - top)))
    ImageDraw.Draw(mask).text((-left, -top), text, 255, font)
    mask = mask.rotate(90, expand=True)  # Pillow draws no rotated text, so an image of it is pasted
    image.paste(LIGHT[mark.colour], (round(at[0] - mask.width), round(at[1] - mask.height / 2)), mask)


@cache
def load_font(size: int, bold: bool = False) -> tuple[ImageFont.FreeTypeFont | ImageFont.ImageFont, bool]:
    """A font, and whether it has letters beyond ASCII: Pillow's own, where the system has none of ours, has few."""
    for name in _BOLD_FONTS if bold else _FONTS:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(name, size), True
    return ImageFont.load_default(size), False
