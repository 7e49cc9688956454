"""Pages and charts that all reports share."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from PIL import Image

from veca.report.chart_files import write_chart
from veca.report.charts import Chart, Label, Line, Polyline, chart_grid, line_chart, smooth, thin, ticks
from veca.report.colours import DARK, LIGHT, ramp_colours
from veca.report.page import render

SVG = "{http://www.w3.org/2000/svg}"
RISING = [(1.0, 1.0), (2.0, 4.0), (3.0, 9.0)]


def lines_of(chart: Chart, role: str = "line") -> list[Polyline]:
    return [mark for mark in chart.marks if isinstance(mark, Polyline) and mark.role == role]


def test_long_runs_keep_their_spikes_in_a_small_file() -> None:
    points = [(float(x), 1.0 + (x == 77_777) * 9) for x in range(100_000)]
    drawn = thin(points)
    assert len(drawn) <= 801
    assert (77_777.0, 10.0) in drawn
    assert smooth([(0.0, 2.0), (1.0, math.nan), (2.0, 4.0)])[2] == (2.0, 4.0)
    assert ticks(3, 97) == [20, 40, 60, 80]


def test_text_can_be_read_on_every_colour() -> None:
    for level in range(101):
        ground, ink = (luminance(colour) for colour in ramp_colours(level / 100))
        assert (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) >= 4.5


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_lines_and_text_stand_out_from_the_page(palette: dict[str, str]) -> None:
    paper = luminance(palette["paper"])
    for name, colour in palette.items():
        if name not in ("paper", "rule"):
            ink = luminance(colour)
            needed = 4.5 if name in ("ink", "muted", "warning") else 3
            assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) >= needed, name


def test_a_line_breaks_where_there_is_no_number() -> None:
    points = [(1.0, 1.0), (2.0, 2.0), (3.0, math.nan), (4.0, 1e308), (5.0, 1.0)]
    (line,) = lines_of(line_chart([Line("", points)], "x", "y", "label"))
    assert [len(run) for run in line.runs] == [2, 1]


def test_points_keep_their_proportions_on_both_scales() -> None:
    (linear,) = lines_of(line_chart([Line("a", RISING)], "x", "y", "label"))
    (log,) = lines_of(line_chart([Line("a", RISING)], "x", "y", "label", log_x=True, y_scale="log"))
    (x1, y1), (x2, y2), (x3, y3) = linear.runs[0]
    assert (x2 - x1) / (x3 - x1) == pytest.approx(1 / 2)
    assert (y2 - y1) / (y3 - y1) == pytest.approx(3 / 8)
    (x1, y1), (x2, y2), (x3, y3) = log.runs[0]
    assert (x2 - x1) / (x3 - x1) == pytest.approx(math.log(2) / math.log(3))
    assert (y2 - y1) / (y3 - y1) == pytest.approx(math.log(4) / math.log(9))


@pytest.mark.parametrize("points", [[(1.0, 0.0)], [(1.0, -5.0), (2.0, 0.0)], [(0.0, 1e-300), (1.0, 1e299)]])
def test_odd_ranges_are_drawn(points: list[tuple[float, float]]) -> None:
    for scale in ("linear", "log", "auto"):
        assert lines_of(line_chart([Line("a", points)], "x", "y", "label", log_x=True, y_scale=scale))  # type: ignore[arg-type]


def test_names_of_lines_do_not_overlap() -> None:
    chart = line_chart([Line(f"line {i}", [(0.0, 0.0), (1.0, 1 + i / 100)], i) for i in range(5)], "x", "y", "label")
    heights = sorted(mark.y for mark in chart.marks if isinstance(mark, Label) and mark.full)
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 16
    assert max(mark.x for mark in chart.marks if isinstance(mark, Label)) < chart.width


def test_nothing_to_draw_is_said() -> None:
    assert "No numbers to draw." in line_chart([Line("a", [])], "x", "y", "label").__html__()


def test_a_file_follows_the_colours_of_its_reader_and_shows_names_as_text(tmp_path: Path) -> None:
    name = '<script>&"'
    chart = chart_grid([(f"panel {name}", line_chart([Line(name, RISING, band=[1, 1, 1])], name, name, name))])
    svg = ET.parse(write_chart(chart, tmp_path / "new" / "chart.svg")).getroot()
    assert not list(svg.iter(f"{SVG}script"))
    texts = ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]
    assert f"panel {name}" in texts
    style = str(svg.findtext(f"{SVG}style"))
    assert LIGHT["c0"] in style
    assert DARK["c0"] in style[style.index("prefers-color-scheme: dark") :]
    assert not re.search(r"url\(|@import|https?:", ET.tostring(svg, encoding="unicode").replace(SVG[1:-1], ""))


def test_a_png_has_the_marks_of_the_chart(tmp_path: Path) -> None:
    lines = [Line("a\nb", RISING, 0, dots=True), Line("dashed", RISING[::-1], 1, dash="4 4", quoted=True)]
    path = write_chart(line_chart(lines, "x", "× y", "label"), tmp_path / "chart.png")
    with Image.open(path) as image:
        assert image.size == (2 * 540, 2 * 320)
        colours = {f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in image.getcolors(2**20) or []}  # type: ignore[misc]
    assert {LIGHT["paper"], LIGHT["c0"], LIGHT["muted"], LIGHT["ink"]} <= colours


def test_other_formats_of_charts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chart\.gif: a chart is written as \.svg or \.png"):
        write_chart(line_chart([Line("a", RISING)], "x", "y", "label"), tmp_path / "chart.gif")


def test_a_template_without_its_values_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        render("distill.html", name="no more than this")
