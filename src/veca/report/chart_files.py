"""Charts as files: SVG that follows the reader's colour scheme, or PNG in the light palette, drawn with Pillow."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from veca.errors import ArgumentError
from veca.report.charts import Chart, Dot, Label, Point
from veca.report.colours import LIGHT, ROLES
from veca.report.page import render, write_text
from veca.utils.files import atomic_path
from veca.utils.text import printable

CHART_SUFFIXES = (".svg", ".png")
SCALE = 2  # pixels of the file per pixel of the chart
SUPERSAMPLING = 2  # Pillow's lines have no anti-aliasing: draw larger, then reduce
_FONTS = ("DejaVuSans.ttf", "LiberationSans-Regular.ttf", "arial.ttf")
_BOLD_FONTS = ("DejaVuSans-Bold.ttf", "LiberationSans-Bold.ttf", "arialbd.ttf")
_IN_ASCII = str.maketrans({"×": "x", "−": "-", "–": "-", "↓": "(low)", "…": "...", "·": ","})


def write_chart(chart: Chart, path: Path) -> Path:
    """Write a chart as its suffix says, `.svg` or `.png`; the parent folder is made."""
    if path.suffix.lower() not in CHART_SUFFIXES:
        raise ArgumentError(f"{path}: a chart is written as {' or '.join(CHART_SUFFIXES)}; end its name so")
    if path.suffix.lower() == ".svg":
        write_text(path, render("chart.svg", chart=chart, standalone=True))
    else:
        with atomic_path(path) as part:
            draw_png(chart).save(part, "PNG", optimize=True)
    return path


def draw_png(chart: Chart) -> Image.Image:
    """The chart as an image, twice as large as the SVG."""
    factor = SCALE * SUPERSAMPLING
    image = Image.new("RGB", (round(chart.width * factor), round(chart.height * factor)), LIGHT["paper"])
    _draw(chart, image, factor, 0, 0)
    return image.reduce(SUPERSAMPLING)


def _draw(chart: Chart, image: Image.Image, factor: int, left: float, top: float) -> None:
    draw = ImageDraw.Draw(image, "RGBA")  # RGBA: colours with an opacity blend with what is there

    def place(point: Point) -> Point:
        return (left + point[0]) * factor, (top + point[1]) * factor

    for mark in chart.marks:
        if isinstance(mark, Label):
            _draw_label(draw, image, mark, place((mark.x, mark.y)), factor)
        elif isinstance(mark, Dot):
            x, y = place((mark.x, mark.y))
            shape, radius = (draw.rectangle, 2.8) if mark.square else (draw.ellipse, 3.2)
            box = (x - radius * factor, y - radius * factor, x + radius * factor, y + radius * factor)
            shape(box, LIGHT["paper"], LIGHT[mark.colour], round(ROLES["dot"].width * factor))
        else:
            role = ROLES[mark.role]
            colour = LIGHT[mark.colour] + f"{round(255 * role.opacity):02x}"
            for run in mark.runs:
                points = [place(point) for point in run]
                if not role.width:
                    draw.polygon(points, colour)
                    continue
                for piece in _dashed(points, [float(length) * factor for length in mark.dash.split()]):
                    draw.line(piece, colour, round(role.width * factor), "curve")
    for x, y, panel in chart.panels:
        _draw(panel, image, factor, left + x, top + y)


def _dashed(points: Sequence[Point], pattern: Sequence[float]) -> Iterator[list[Point]]:
    """A polyline cut into the dashes of a pattern of on and off lengths; no pattern: the whole line."""
    if not pattern:
        yield list(points)
        return
    lengths = itertools.cycle(pattern)
    rest, on, piece = next(lengths), True, [points[0]]
    for start, end in itertools.pairwise(points):
        at, length = 0.0, math.dist(start, end)
        while length - at > rest:
            at += rest
            corner = (start[0] + (end[0] - start[0]) * at / length, start[1] + (end[1] - start[1]) * at / length)
            if on:
                yield [*piece, corner]
            rest, on, piece = next(lengths), not on, [corner]
        rest -= length - at
        piece.append(end)
    if on and len(piece) > 1:
        yield piece


def _draw_label(draw: ImageDraw.ImageDraw, image: Image.Image, mark: Label, at: Point, factor: int) -> None:
    font, has_all_letters = _font(round(mark.size * factor), mark.bold)
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
def _font(size: int, bold: bool) -> tuple[ImageFont.FreeTypeFont | ImageFont.ImageFont, bool]:
    """A font, and whether it has letters beyond ASCII: Pillow's own, where the system has none of ours, has few."""
    for name in _BOLD_FONTS if bold else _FONTS:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(name, size), True
    return ImageFont.load_default(size), False
