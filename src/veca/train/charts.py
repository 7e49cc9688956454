"""Pictures of numbers as SVG text, drawn with the page's own colours, so they follow it into the dark.

Colours are those of Okabe and Ito and the cividis map: both were made for readers who see fewer of them. Lines differ
by their dashes too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 30, 12, 44
MOST_POINTS = 800
DASHES = ("", "7 4", "2 3", "10 3 2 3")
COLOURS = 6

Point = tuple[float, float]

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


def line_chart(lines: Sequence[Line], across: str, up: str, label: str, at: Sequence[float] | None = None) -> str:
    """Lines over numbers, with ticks `at` some; a line breaks where there is no number.

    Nothing to draw: a sentence that says so.
    """
    lines = [line._replace(points=thin(line.points)) for line in lines]
    finite = [p for line in lines for p in line.points if math.isfinite(p[0]) and math.isfinite(p[1])]
    if not finite:
        return '<p class="none">No numbers to draw.</p>'
    ys = [y for _, y in finite]
    scale = _Scale(min(x for x, _ in finite), max(x for x, _ in finite), min(ys), max(ys))
    marks = [_line(line, scale) for line in lines]
    return _figure([*_axes(scale, across, up, at), *marks], _legend(lines), label)


def bar_chart(counts: Mapping[int, float], wanted: Mapping[int, float], across: str, label: str) -> str:
    """Bars of shares, each with a mark where it should end; both are shares of 1."""
    keys = sorted({*counts, *wanted})
    most = max([*counts.values(), *wanted.values(), 1e-9])
    scale = _Scale(0, max(1, len(keys)), 0, most)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(keys))
    marks = _axes(scale, across, "share of the steps", [], percent=True)
    for i, key in enumerate(keys):
        x, top = LEFT + step * i, scale.y(counts.get(key, 0))
        marks.append(
            f'<rect class="bar" x="{x + 0.18 * step:.1f}" y="{top:.1f}" width="{0.64 * step:.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.1f}" /><text x="{x + step / 2:.1f}" y="{HEIGHT - BOTTOM + 17}" '
            f'text-anchor="middle">{key}</text>'
        )
        if key in wanted:
            y = scale.y(wanted[key])
            marks.append(f'<path class="wanted" d="M{x + 0.08 * step:.1f} {y:.1f}h{0.84 * step:.1f}" />')
    legend = '<span><i class="box"></i>drawn</span>' + ('<span><i class="dash"></i>asked for</span>' if wanted else "")
    return _figure(marks, legend, label)


class _Scale:
    """From numbers to places. Heights are logarithmic where numbers span a factor of twenty or more."""

    def __init__(self, left: float, right: float, low: float, high: float) -> None:
        self.log = low > 0 and high / low >= 20
        if right <= left:
            left, right = left - 0.5, right + 0.5
        if high <= low:
            low, high = low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10
        room = 0.0 if low == 0 else (math.log(high / low) if self.log else high - low) / 20
        self.left, self.right = left, right
        self.low = low * math.exp(-room) if self.log else low - room
        self.high = high * math.exp(room) if self.log else high + room

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


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
    marks = []
    for value in ticks(scale.low, scale.high, log=scale.log):
        y = scale.y(value)
        text = f"{value:.0%}" if percent else f"{value:g}" if abs(value) < 1e4 else f"{value:,.0f}"
        marks.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" />')
        marks.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for value in ticks(scale.left, scale.right, 6) if at is None else at:
        x = scale.x(value)
        marks.append(f'<path class="grid" d="M{x:.1f} {HEIGHT - BOTTOM}v4" />')
        marks.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{value:,.6g}</text>')
    centre = (TOP + HEIGHT - BOTTOM) / 2
    marks.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}" />')
    marks.append(f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{escape(across)}</text>')
    turned = f'transform="rotate(-90 13 {centre:.0f})"'
    marks.append(f'<text class="name" x="13" y="{centre:.0f}" text-anchor="middle" {turned}>{escape(up)}</text>')
    return marks


def _line(line: Line, scale: _Scale) -> str:
    pieces, pen, dots = [], "M", []
    for x, y in line.points:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        place = f"{scale.x(x):.1f} {scale.y(y):.1f}"
        pieces.append(pen + place)
        if line.dots:
            cx, cy = place.split()
            dots.append(f'<circle class="c{line.colour % COLOURS}" cx="{cx}" cy="{cy}" r="3.2" />')
        pen = "L"
    dash = f' stroke-dasharray="{DASHES[line.colour % len(DASHES)]}"' if line.colour % len(DASHES) else ""
    kind = f"line c{line.colour % COLOURS}" + (" faint" if line.faint else "")
    return f'<path class="{kind}" d="{"".join(pieces)}"{"" if line.faint else dash} />' + "".join(dots)


def _legend(lines: Sequence[Line]) -> str:
    shown = []
    for line in lines:
        if not line.faint:
            dash = DASHES[line.colour % len(DASHES)]
            mark = '<circle class="c{0}" cx="14" cy="5" r="3.2" />' if line.dots else ""
            key = f'<path class="line c{line.colour % COLOURS}" d="M0 5h28" stroke-dasharray="{dash}" />{mark}'
            key = key.format(line.colour % COLOURS)
            shown.append(f'<span><svg viewBox="0 0 28 10" aria-hidden="true">{key}</svg>{escape(line.name)}</span>')
    return "".join(shown)


def _figure(marks: Sequence[str], legend: str, label: str) -> str:
    drawn = "\n".join(marks)
    name = escape(label, quote=True)
    picture = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">\n{drawn}\n</svg>'
    return f'{picture}<div class="legend" aria-hidden="true">{legend}</div>'
