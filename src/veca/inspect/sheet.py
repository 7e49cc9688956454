"""The paper that figures are drawn on: panels or charts in rows and columns, under a title and a text about them.

Every panel of a picture has the coordinates of the model: x and y in [-1, 1], y downwards, whatever its sides are.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from veca.errors import ArgumentError
from veca.inspect.subject import Photo
from veca.report.chart_files import write_chart
from veca.report.charts import Chart
from veca.utils.files import atomic_path, check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
DPI = 160
MOST_PANELS = 400
HEAT = "inferno"
"""A colour map that grows evenly brighter: all readers see its order, and so does a grey print."""
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Of Okabe and Ito, made for readers who see fewer colours."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SHOWN = 512
"""Longest side, in pixels, of a photo in a figure."""
EXTENT = (-1.0, 1.0, 1.0, -1.0)
NOTICE = "#b34700"

# In inches.
WIDTH = 8.5
NARROWEST, WIDEST = 1.35, 2.8
MARGIN = 0.15
LINE = 0.165
LETTER = 0.068


def check_sheet(rows: int, columns: int) -> None:
    """Raises before any work is done what `sheet` would raise after it."""
    _matplotlib()
    if rows * columns > MOST_PANELS:
        raise ArgumentError(
            f"{rows} × {columns} = {rows * columns} panels; a figure has at most {MOST_PANELS}. "
            "Give fewer pictures, budgets or layers"
        )


def sheet(
    title: str,
    text: str,
    rows: Sequence[str],
    columns: Sequence[str],
    aspects: Sequence[float],
    *,
    notice: str = "",
    captions: bool = False,
    beside: bool = False,
    below: int = 0,
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure and its panels, [row][column].

    `aspects` are height over width of the panels of each row. `captions` leaves room for a line under each panel,
    `beside` for a colour bar on the right, `below` for so many lines of a legend.
    """
    check_sheet(len(rows), len(columns))
    rows = [_wrapped(row, 18) for row in rows]
    left = MARGIN + max(len(line) for row in rows for line in row.split("\n")) * LETTER + 0.1
    right = MARGIN + 0.75 * beside
    gap, under = 0.08, 0.08 + 0.2 * captions
    panel = min(max((WIDTH - left - right) / len(columns) - gap, NARROWEST), WIDEST)
    width = max(left + len(columns) * (panel + gap) + right, 6.0)
    columns = [_wrapped(column, int(panel / LETTER)) for column in columns]
    room = 0.15 + LINE * max(column.count("\n") + 1 for column in columns)
    room += sum(panel * aspect + under for aspect in aspects) + below * 0.2 + MARGIN
    figure, head = _headed(title, text, notice, width, room)
    height = figure.get_size_inches()[1]
    head += 0.15 + LINE * max(column.count("\n") + 1 for column in columns)
    axes: list[list[Axes]] = []
    top = head
    for row, aspect in zip(rows, aspects, strict=True):
        tall = panel * aspect
        axes.append([])
        for i, column in enumerate(columns):
            place = left + i * (panel + gap)
            axis = figure.add_axes((place / width, 1 - (top + tall) / height, panel / width, tall / height))
            axis.set_xticks([])
            axis.set_yticks([])
            if len(axes) == 1:
                axis.set_title(column, fontsize=9, pad=4, parse_math=False)
            axes[-1].append(axis)
        middle = 1 - (top + tall / 2) / height
        figure.text((left - 0.1) / width, middle, row, ha="right", va="center", fontsize=9, parse_math=False)
        top += tall + under
    return figure, axes


def charts(title: str, text: str, names: Sequence[str], *, notice: str = "") -> tuple[Figure, list[Axes]]:
    """An empty figure and its charts, two in a row: axes with ticks, room for their names, and a title each."""
    left, right, above, wide, tall, under = 0.75, 0.15, 0.35, 3.35, 2.3, 0.55
    rows = -(-len(names) // 2)
    width = 2 * (left + wide + right)
    figure, head = _headed(title, text, notice, width, rows * (above + tall + under))
    height = figure.get_size_inches()[1]
    axes = []
    for i, name in enumerate(names):
        x, y = left + i % 2 * (left + wide + right), head + above + i // 2 * (above + tall + under)
        axis = figure.add_axes((x / width, 1 - (y + tall) / height, wide / width, tall / height))
        axis.set_title(name, fontsize=9, loc="left", pad=4, parse_math=False)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        axes.append(axis)
    return figure, axes


def _headed(title: str, text: str, notice: str, width: float, room: float) -> tuple[Figure, float]:
    """A figure with its words and `room` inches under them, and where that begins."""
    letters = int((width - 2 * MARGIN) / LETTER)
    parts: list[tuple[str, dict[str, Any], float, float]]
    parts = [(title, {"fontsize": 12, "fontweight": "bold"}, 0.72, 1.4)]
    parts += [(notice, {"fontsize": 9, "fontweight": "bold", "color": NOTICE}, 0.9, 1.0)] if notice else []
    parts += [(text, {"fontsize": 9}, 1.0, 1.0)]
    wrapped = [(textwrap.wrap(words, int(letters * narrow)), look, tall) for words, look, narrow, tall in parts]
    head = MARGIN + sum(len(lines) * LINE * tall + 0.07 for lines, look, tall in wrapped)
    height = head + room
    figure = _matplotlib()(figsize=(width, height), facecolor="white")
    top = MARGIN
    for lines, look, tall in wrapped:
        y = 1 - top / height
        figure.text(MARGIN / width, y, "\n".join(lines), va="top", linespacing=1.25, parse_math=False, **look)
        top += len(lines) * LINE * tall + 0.07
    return figure, head


def _wrapped(label: str, letters: int) -> str:
    """In lines of so many letters; names that are longer, as SIZE.TAG, are broken after a dot where that will do."""
    lines = [
        part
        for line in label.split("\n")
        for part in (re.split(r"(?<=\w\.)(?=\w{5})", line) if len(line) > letters else [line])
    ]
    return "\n".join(part for line in lines for part in textwrap.wrap(line, letters))


def show_photo(axis: Axes, photo: Photo, dim: bool = False, caption: str = "") -> None:
    """The photo; `dim`: dark and grey, for marks and maps to stand out on."""
    small = photo.picture.copy()
    small.thumbnail((SHOWN, SHOWN))
    pixels = np.asarray(small.convert("L").convert("RGB")) // 2 if dim else np.asarray(small)
    axis.imshow(pixels, extent=EXTENT, aspect=photo.aspect)
    if caption:
        axis.set_xlabel(caption, fontsize=8, labelpad=3, parse_math=False)


def show_map(axis: Axes, values: Tensor, aspect: float, caption: str = "", **look: Any) -> None:
    """A map (rows, columns) through a colour map, or (rows, columns, 3) of colours: one square per patch."""
    axis.imshow(values.float().cpu().numpy(), extent=EXTENT, aspect=aspect, interpolation="nearest", **look)
    if caption:
        axis.set_xlabel(caption, fontsize=8, labelpad=3, parse_math=False)


def hide(axis: Axes) -> None:
    """Nothing is drawn there; its title, if it has one, stays."""
    axis.set_axis_off()


def ring(axis: Axes, x: float, y: float) -> None:
    """The mark of a place, seen on dark and light."""
    for colour, width in (("black", 3.0), ("white", 1.4)):
        axis.plot(
            [x], [y], "o", markersize=8, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=width,
            clip_on=False,
        )  # fmt: skip
    axis.set_xlim(-1, 1)
    axis.set_ylim(1, -1)


def frame(axis: Axes, place: tuple[int, int] | None, grid: tuple[int, int]) -> None:
    """A frame around the patch at `place`, seen on dark and light."""
    if place is None:
        return
    from matplotlib.patches import Rectangle

    (row, column), (rows, columns) = place, grid
    corner = (2 * (column - 1) / columns - 1, 2 * (row - 1) / rows - 1)
    for colour, width in (("black", 3.0), ("white", 1.4)):
        axis.add_patch(
            Rectangle(corner, 2 / columns, 2 / rows, fill=False, edgecolor=colour, linewidth=width, clip_on=False)
        )


def order_colours() -> Colormap:
    """Of things in order: viridis, which grows evenly brighter, without the end that is lost on a dark photo."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"](np.linspace(0.25, 1, 256)))


def colour_bar(
    figure: Figure,
    axes: Sequence[Axes],
    colours: str | Colormap,
    ends: tuple[float, float],
    label: str,
    ticks: Mapping[float, str],
) -> None:
    """A colour bar to the right of `axes`, panels above one another: what `ends` and between look like."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    boxes = [axis.get_position() for axis in axes]
    low, high, right = min(b.y0 for b in boxes), max(b.y1 for b in boxes), max(b.x1 for b in boxes)
    width, height = figure.get_size_inches()
    tall = min(high - low, 2.6 / height)
    place = (right + 0.1 / width, (low + high - tall) / 2, 0.12 / width, tall)
    bar = figure.colorbar(ScalarMappable(Normalize(*ends), colours), cax=figure.add_axes(place, label="colour bar"))
    bar.set_ticks(list(ticks), labels=list(ticks.values()), fontsize=8)
    bar.set_label(label, fontsize=8)


def look_of(i: int) -> tuple[str, str]:
    """Colour and marker of the i-th of several things; the first 49 all differ."""
    return PALETTE[i % len(PALETTE)], MARKERS[(i + i // len(PALETTE)) % len(MARKERS)]


def legend(axis: Axes, looks: Sequence[tuple[str, tuple[str, str]]]) -> None:
    """Names and looks in lines of four under a row of panels, from `axis` on; `below` of `sheet` makes room for it."""
    from matplotlib.lines import Line2D

    figure = axis.get_figure(root=True)
    assert figure is not None
    box = axis.get_position()
    found = figure.legend(
        handles=[Line2D([], [], linestyle="", color=c, marker=m, label=name) for name, (c, m) in looks],
        loc="upper left", bbox_to_anchor=(box.x0, box.y0), ncols=4, fontsize=8, frameon=False, handletextpad=0.2,
        borderaxespad=0.3,
    )  # fmt: skip
    for text in found.get_texts():
        text.set_parse_math(False)


def write_figure(figure: Figure | Chart, path: str | os.PathLike[str]) -> Path:
    """Save a figure as its suffix says: the same figure gives the same bytes."""
    path = check_out(path)
    if isinstance(figure, Chart):  # of `draw_story`, which needs no matplotlib
        return write_chart(figure, path)
    import matplotlib

    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "veca"}), atomic_path(path) as part:
        figure.savefig(part, format=path.suffix[1:].lower(), dpi=DPI, metadata=metadata)
    return path


def check_out(path: str | os.PathLike[str]) -> Path:
    """The path, if a figure can be written there."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"{path}: a figure is written as {' or '.join(SUFFIXES)}; end its name so")
    if path.is_dir():
        raise ArgumentError(f"{path} is a folder; name the file to write, such as {path / 'figure.png'}")
    check_writable(path)
    return path


def _matplotlib() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ArgumentError("figures need matplotlib, which is not installed: pip install 'veca[viz]'") from error
    return Figure
