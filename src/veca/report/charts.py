"""Pictures of numbers as SVG text, drawn with the page's own colours, so they follow it into the dark.

Colours are those of Okabe and Ito and the cividis map: both were made for readers who see fewer of them. Lines differ
by their dashes too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

MOST_POINTS = 800
DASHES = ("", "7 4", "2 3", "10 3 2 3")
COLOURS = 6

SVG = '<svg xmlns="http://www.w3.org/2000/svg" '
LABEL_GAP = 16
"""Between the labels of lines, one above the other."""
STYLE = """
:root { --paper: #fbfaf6; --ink: #22211e; --muted: #6a675f; --line: #e0dcd1;
  --c0: #0072b2; --c1: #d55e00; --c2: #007d5a; --c3: #b0508a; --c4: #a67a00; --c5: #3d8fc4; --sans: system-ui,
  -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", Helvetica, Arial, sans-serif; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16171a; --ink: #e8e6e0; --muted: #a19e96; --line: #33353a;
    --c0: #56b4e9; --c1: #f08a3c; --c2: #2bbf94; --c3: #e39ac3; --c4: #f0e442; --c5: #8fb8e8; }
}
.chart text { fill: var(--muted); font: 12px var(--sans); font-variant-numeric: tabular-nums; }
.chart.small text { font-size: 14px; }
.chart .name, .chart.small .name { fill: var(--ink); }
.grid { stroke: var(--line); fill: none; }
.axis { stroke: var(--muted); fill: none; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.faint { stroke-width: 1; stroke-opacity: 0.28; }
.lead { fill: none; stroke-width: 1; stroke-dasharray: 1 3; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); } .quoted { stroke: var(--muted); }
circle, rect.quoted { fill: var(--paper); stroke-width: 1.8; }
.bar { fill: var(--c0); fill-opacity: 0.55; }
.wanted { stroke: var(--c1); stroke-width: 3; fill: none; }
.ground { fill: var(--paper); }
"""
"""What the pictures are drawn with, in the light and in the dark."""

Point = tuple[float, float]


class Frame(NamedTuple):
    """The size of a picture, and of the margins within it."""

    width: int = 720
    height: int = 300
    left: int = 64
    right: int = 30
    top: int = 12
    bottom: int = 44


WIDE = Frame()
SMALL = Frame(540, 320, 66, 192, 12, 46)
"""For several beside each other, or a narrow screen; lines are named at their ends."""

_CIVIDIS = (
    "#00224e",
    "#123570",
    "#3b496c",
    "#575d6d",
    "#707173",
    "#8a8678",
    "#a59c74",
    "#c3b369",
    "#e1cc55",
    "#fee838",
)


class Line(NamedTuple):
    name: str
    points: Sequence[Point]
    colour: int = 0
    """Which of the page's line colours, and of the dashes."""
    faint: bool = False
    dots: bool = False
    """Marks at the points."""
    quoted: bool = False
    """Somebody else's numbers: grey, dashed, with square marks."""


def colour_of(level: float) -> tuple[str, str]:
    """The colour of a level in [0, 1], and of text that can be read on it.

    >>> colour_of(0.0), colour_of(1.0)
    (('#00224e', '#ffffff'), ('#fee838', '#000000'))
    """
    place = min(max(level, 0.0), 1.0) * (len(_CIVIDIS) - 1)
    i = min(int(place), len(_CIVIDIS) - 2)
    low, high = (tuple(int(c[k : k + 2], 16) for k in (1, 3, 5)) for c in _CIVIDIS[i : i + 2])
    red, green, blue = (round(a + (b - a) * (place - i)) for a, b in zip(low, high, strict=True))
    bright = _luminance(red, green, blue)
    # WCAG's contrast: (brighter + 0.05) / (darker + 0.05).
    white_wins = 1.05 / (bright + 0.05) > (bright + 0.05) / 0.05
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if white_wins else "#000000"


def _luminance(*channels: int) -> float:
    linear = [(c / 255) / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ramp() -> str:
    return ", ".join(_CIVIDIS)


def smooth(points: Sequence[Point], share: float = 0.01) -> list[Point]:
    """A running mean that forgets over `share` of the points; where there is no number there is none in it."""
    keep = 1 - 1 / max(1.0, share * len(points))
    found, total, weight = [], 0.0, 0.0
    for x, y in points:
        if math.isfinite(y):
            total, weight = keep * total + y, keep * weight + 1
        found.append((x, total / weight if weight and math.isfinite(y) else math.nan))
    return found


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points: the least and the greatest of each stretch, so no spike is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    found: list[Point] = []
    for i in range(0, len(points), size):
        stretch = [p for p in points[i : i + size] if math.isfinite(p[1])] or [points[i]]
        found += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return found


def line_chart(
    lines: Sequence[Line],
    across: str,
    up: str,
    label: str,
    at: Sequence[float] | None = None,
    *,
    frame: Frame = WIDE,
    log: bool = True,
) -> str:
    """Lines over numbers, with ticks `at` some; a line breaks where there is no number.

    In a small frame lines are named at their ends, in others below. Heights may be logarithmic, where `log` allows it.
    Nothing to draw: a sentence that says so.
    """
    lines = [line._replace(points=thin(line.points)) for line in lines]
    finite = [p for line in lines for p in line.points if math.isfinite(p[0]) and math.isfinite(p[1])]
    if not finite:
        return '<p class="none">No numbers to draw.</p>'
    ys = [y for _, y in finite]
    scale = _Scale(min(x for x, _ in finite), max(x for x, _ in finite), min(ys), max(ys), frame, log)
    marks = [_line(line, scale) for line in lines]
    axes = _axes(scale, across, up, at)
    if frame == SMALL:
        return _picture([*axes, *_end_labels(lines, scale), *marks], label, frame)
    return _picture([*axes, *marks], label, frame) + _legend(lines)


def standalone(picture: str) -> str:
    """A chart as a file of its own."""
    ground = '<rect class="ground" width="100%" height="100%" />'
    start, _, rest = picture.partition("\n")
    return f"{start.replace('<svg ', SVG, 1)}\n<style>{STYLE}</style>\n{ground}\n{rest}\n"


def bar_chart(counts: Mapping[int, float], wanted: Mapping[int, float], across: str, label: str) -> str:
    """Bars of shares, each with a mark where it should end; both are shares of 1."""
    keys = sorted({*counts, *wanted})
    most = max([*counts.values(), *wanted.values(), 1e-9])
    scale = _Scale(0, max(1, len(keys)), 0, most)
    frame = scale.frame
    step, floor = (frame.width - frame.left - frame.right) / max(1, len(keys)), frame.height - frame.bottom
    marks = _axes(scale, across, "share of the steps", [], percent=True)
    for i, key in enumerate(keys):
        x, top = frame.left + step * i, scale.y(counts.get(key, 0))
        marks.append(
            f'<rect class="bar" x="{x + 0.18 * step:.1f}" y="{top:.1f}" width="{0.64 * step:.1f}" '
            f'height="{floor - top:.1f}" /><text x="{x + step / 2:.1f}" y="{floor + 17}" '
            f'text-anchor="middle">{key}</text>'
        )
        if key in wanted:
            y = scale.y(wanted[key])
            marks.append(f'<path class="wanted" d="M{x + 0.08 * step:.1f} {y:.1f}h{0.84 * step:.1f}" />')
    legend = '<span><i class="box"></i>drawn</span>' + ('<span><i class="dash"></i>asked for</span>' if wanted else "")
    return _picture(marks, label, frame) + f'<div class="legend" aria-hidden="true">{legend}</div>'


class _Scale:
    """From numbers to places. Heights are logarithmic where numbers span a factor of twenty or more."""

    def __init__(
        self, left: float, right: float, low: float, high: float, frame: Frame = WIDE, log: bool = True
    ) -> None:
        self.frame = frame
        self.log = log and low > 0 and high / low >= 20
        if right <= left:
            left, right = left - 0.5, right + 0.5
        if high <= low:
            low, high = low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10
        room = 0.0 if low == 0 else (math.log(high / low) if self.log else high - low) / 20
        self.left, self.right = left, right
        self.low = low * math.exp(-room) if self.log else low - room
        self.high = high * math.exp(room) if self.log else high + room

    def x(self, value: float) -> float:
        frame = self.frame
        return frame.left + (value - self.left) / (self.right - self.left) * (frame.width - frame.left - frame.right)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        return self.frame.height - self.frame.bottom - share * (self.frame.height - self.frame.top - self.frame.bottom)


def ticks(low: float, high: float, count: int = 5, log: bool = False) -> list[float]:
    """Round numbers from `low` to `high`.

    >>> ticks(0, 10), [round(t, 3) for t in ticks(0.03, 2, log=True)]
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.05, 0.1, 0.2, 0.5, 1.0, 2.0])
    """
    if log:
        tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        subs = (1, 2, 5) if len(tens) <= 4 else (1,)
        return [t for ten in tens for sub in subs if low <= (t := sub * 10.0**ten) <= high]
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(m for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _axes(scale: _Scale, across: str, up: str, at: Sequence[float] | None = None, percent: bool = False) -> list[str]:
    marks, frame = [], scale.frame
    floor, end = frame.height - frame.bottom, frame.width - frame.right
    for value in ticks(scale.low, scale.high, log=scale.log):
        y = scale.y(value)
        text = f"{value:.0%}" if percent else f"{value:g}" if abs(value) < 1e4 else f"{value:,.0f}"
        marks.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{end}" />')
        marks.append(f'<text x="{frame.left - 7}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for value in ticks(scale.left, scale.right, 6) if at is None else at:
        x = scale.x(value)
        marks.append(f'<path class="grid" d="M{x:.1f} {floor}v4" />')
        marks.append(f'<text x="{x:.1f}" y="{floor + 17}" text-anchor="middle">{value:,.6g}</text>')
    centre = (frame.top + floor) / 2
    marks.append(f'<path class="axis" d="M{frame.left} {floor}H{end}" />')
    marks.append(f'<text class="name" x="{end}" y="{frame.height - 8}" text-anchor="end">{escape(across)}</text>')
    turned = f'transform="rotate(-90 13 {centre:.0f})"'
    marks.append(f'<text class="name" x="13" y="{centre:.0f}" text-anchor="middle" {turned}>{escape(up)}</text>')
    return marks


def _line(line: Line, scale: _Scale) -> str:
    pieces, pen, dots = [], "M", []
    colour = _colour(line)
    for x, y in line.points:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        cx, cy = scale.x(x), scale.y(y)
        pieces.append(f"{pen}{cx:.1f} {cy:.1f}")
        if line.dots and line.quoted:
            dots.append(f'<rect class="{colour}" x="{cx - 2.8:.1f}" y="{cy - 2.8:.1f}" width="5.6" height="5.6" />')
        elif line.dots:
            dots.append(f'<circle class="{colour}" cx="{cx:.1f}" cy="{cy:.1f}" r="3.2" />')
        pen = "L"
    dash = "5 4" if line.quoted else "" if scale.frame == SMALL else DASHES[line.colour % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash and not line.faint else ""
    kind = f"line {colour}" + (" faint" if line.faint else "")
    return f'<path class="{kind}" d="{"".join(pieces)}"{dashes} />' + "".join(dots)


def _colour(line: Line) -> str:
    return "quoted" if line.quoted else f"c{line.colour % COLOURS}"


def _end_labels(lines: Sequence[Line], scale: _Scale) -> list[str]:
    """The names of lines at the right, each beside the last point of its line or as near as the others let it."""
    frame, ends = scale.frame, []
    for line in lines:
        if finite := [p for p in line.points if math.isfinite(p[0]) and math.isfinite(p[1])]:
            ends.append((scale.y(finite[-1][1]), scale.x(finite[-1][0]), line))
    ends.sort(key=lambda end: end[0])
    places = spread([y for y, _, _ in ends], frame.top + 6, frame.height - frame.bottom, LABEL_GAP)
    marks = []
    for (y, x, line), place in zip(ends, places, strict=True):
        edge = frame.width - frame.right + 10
        marks.append(f'<path class="lead {_colour(line)}" d="M{x + 5:.1f} {y:.1f}L{edge - 3} {place:.1f}" />')
        text = f"<title>{escape(line.name)}</title>{escape(cut(line.name, (frame.right - 12) // 8))}"
        marks.append(f'<text class="name" x="{edge}" y="{place + 5:.1f}">{text}</text>')
    return marks


def spread(places: Sequence[float], low: float, high: float, gap: float) -> list[float]:
    """Rising places moved as little as needed to be `gap` apart and, if there is room, within the bounds.

    >>> spread([10, 11, 50], 0, 60, 10), spread([58, 59], 0, 60, 10)
    ([10, 20, 50], [50, 60])
    """
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + gap) if found else max(place, low))
    for i in range(len(found) - 1, -1, -1):
        found[i] = min(found[i], high if i == len(found) - 1 else found[i + 1] - gap)
    return found


def cut(text: str, most: int) -> str:
    """At most so many characters, those in the middle left out.

    >>> cut("veca_small_plus", 9), cut("short", 9)
    ('veca…plus', 'short')
    """
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"


def _legend(lines: Sequence[Line]) -> str:
    shown = []
    for line in lines:
        if not line.faint:
            dash = DASHES[line.colour % len(DASHES)]
            mark = '<circle class="c{0}" cx="14" cy="5" r="3.2" />' if line.dots else ""
            key = f'<path class="line c{line.colour % COLOURS}" d="M0 5h28" stroke-dasharray="{dash}" />{mark}'
            key = key.format(line.colour % COLOURS)
            shown.append(f'<span><svg viewBox="0 0 28 10" aria-hidden="true">{key}</svg>{escape(line.name)}</span>')
    return f'<div class="legend" aria-hidden="true">{"".join(shown)}</div>'


def _picture(marks: Sequence[str], label: str, frame: Frame) -> str:
    drawn = "\n".join(marks)
    name = escape(label, quote=True)
    kind = "chart small" if frame == SMALL else "chart"
    box = f"0 0 {frame.width} {frame.height}"
    return f'<svg class="{kind}" viewBox="{box}" role="img" aria-label="{name}">\n{drawn}\n</svg>'
