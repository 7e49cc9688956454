"""Layout of figures: panels in rows and columns under a title and text, and drawing into them.

Panels with an image have the model's coordinates: x and y in [-1, 1], y downwards, whatever the image's shape.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from veca.errors import ArgumentError, needs_extra
from veca.inspect.figure_inputs import Heading, PathLike, Photo
from veca.report.charts import Chart, write_chart
from veca.utils.files import atomic_path, check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

FIGURE_SUFFIXES = (".png", ".svg")
DPI = 160
MAX_PANELS = 400
HEAT = "inferno"
"""A perceptually uniform colour map, readable with colour vision deficiencies and in grey."""
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Of Okabe and Ito, made for readers with colour vision deficiencies."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PHOTO_SIZE = 512
"""Longest side, in pixels, of a photo in a figure."""
EXTENT = (-1.0, 1.0, 1.0, -1.0)
OUTLINE = (("black", 3.0), ("white", 1.4))
"""Colours and widths of two strokes, one on the other: visible on dark and light."""
NOTICE_COLOUR = "#b34700"

# In inches.
PAGE_WIDTH = 8.5
MIN_PANEL, MAX_PANEL = 1.35, 2.8
MARGIN = 0.15
LINE_HEIGHT = 0.165
INCHES_PER_LETTER = 0.068
GAP = 0.08


def check_panels(rows: int, columns: int) -> None:
    """Raise, before any work is done, what `create_panels` would raise."""
    _import_figure()
    if rows * columns > MAX_PANELS:
        rule = f"a figure has at most {MAX_PANELS}. Give fewer pictures, budgets or layers"
        raise ArgumentError(f"{rows} × {columns} = {rows * columns} panels; {rule}")


def create_panels(
    heading: Heading,
    rows: Sequence[str],
    columns: Sequence[str],
    aspects: Sequence[float],
    *,
    captions: bool = False,
    colour_bar: bool = False,
    legend_lines: int = 0,
) -> tuple[Figure, list[list[Axes]]]:
    """An empty figure and its panels, [row][column].

    `aspects` are height over width of the panels of each row. `captions` leaves room for a line under each panel,
    `colour_bar` for one on the right, `legend_lines` for a legend at the bottom.
    """
    check_panels(len(rows), len(columns))
    rows = [_wrap_label(row, 18) for row in rows]
    left = MARGIN + max(len(line) for row in rows for line in row.split("\n")) * INCHES_PER_LETTER + 0.1
    right = MARGIN + 0.75 * colour_bar
    below_panel = GAP + 0.2 * captions
    panel = min(max((PAGE_WIDTH - left - right) / len(columns) - GAP, MIN_PANEL), MAX_PANEL)
    width = max(left + len(columns) * (panel + GAP) + right, 6.0)
    columns = [_wrap_label(column, int(panel / INCHES_PER_LETTER)) for column in columns]
    headings = 0.15 + LINE_HEIGHT * max(column.count("\n") + 1 for column in columns)
    body = headings + sum(panel * aspect + below_panel for aspect in aspects) + legend_lines * 0.2 + MARGIN
    figure, top = _create_headed_figure(heading, width, body)
    height = figure.get_size_inches()[1]
    axes: list[list[Axes]] = []
    top += headings
    for row, aspect in zip(rows, aspects, strict=True):
        panel_height = panel * aspect
        axes.append([])
        for i, column in enumerate(columns):
            x, y = (left + i * (panel + GAP)) / width, 1 - (top + panel_height) / height
            axis = figure.add_axes((x, y, panel / width, panel_height / height))
            axis.set_xticks([])
            axis.set_yticks([])
            if len(axes) == 1:  # headings stand over the first row
                axis.set_title(column, fontsize=9, pad=4, parse_math=False)
            axes[-1].append(axis)
        middle = 1 - (top + panel_height / 2) / height
        figure.text((left - 0.1) / width, middle, row, ha="right", va="center", fontsize=9, parse_math=False)
        top += panel_height + below_panel
    return figure, axes


def create_photo_panels(
    heading: Heading,
    photos: Sequence[Photo],
    rows: Sequence[str],
    columns: Sequence[str],
    maps: Sequence[Sequence[Iterable[Tensor]]] = (),
    captions: bool = True,
    colour_bar: bool = False,
) -> tuple[Figure, list[list[list[Axes]]]]:
    """A figure with `rows` for each photo, which stands in an extra first column; panels [photo][row][column].

    `maps` [row][photo][column] are drawn into the first rows of each photo.
    """
    aspects = [photo.aspect for photo in photos for _ in rows]
    labels = [*rows] * len(photos), ["picture", *columns]
    figure, axes = create_panels(heading, *labels, aspects, captions=captions, colour_bar=colour_bar)
    panels = []
    for i, photo in enumerate(photos):
        own = axes[i * len(rows) : (i + 1) * len(rows)]
        show_photo(own[0][0], photo, caption=photo.name if captions else "")
        for row in own[1:]:
            row[0].set_axis_off()
        panels.append([row[1:] for row in own])
        for row, row_maps in zip(panels[-1], maps, strict=False):
            for axis, values in zip(row, row_maps[i], strict=True):
                show_map(axis, values, photo.aspect)
    return figure, panels


def _create_headed_figure(heading: Heading, width: float, body: float) -> tuple[Figure, float]:
    """A figure with title, notice and text, and `body` inches under them; also returns where that begins."""
    letters = int((width - 2 * MARGIN) / INCHES_PER_LETTER)
    # Text, font, and relative to body text how many letters fit into a line and how tall a line is.
    parts: list[tuple[str, dict[str, Any], float, float]] = [
        (heading.title, {"fontsize": 12, "fontweight": "bold"}, 0.72, 1.4),
        (heading.notice, {"fontsize": 9, "fontweight": "bold", "color": NOTICE_COLOUR}, 0.9, 1.0),
        (heading.text, {"fontsize": 9}, 1.0, 1.0),
    ]
    wrapped = [
        (textwrap.wrap(words, int(letters * share)), font, LINE_HEIGHT * tall)
        for words, font, share, tall in parts
        if words
    ]
    head = MARGIN + sum(len(lines) * line_height + 0.07 for lines, _, line_height in wrapped)
    height = head + body
    figure = _import_figure()(figsize=(width, height), facecolor="white")
    top = MARGIN
    for lines, font, line_height in wrapped:
        y = 1 - top / height
        figure.text(MARGIN / width, y, "\n".join(lines), va="top", linespacing=1.25, parse_math=False, **font)
        top += len(lines) * line_height + 0.07
    return figure, head


def _wrap_label(label: str, letters: int) -> str:
    """Lines of at most so many letters; longer names like SIZE.TAG are broken after a dot where that helps."""
    lines = [
        part
        for line in label.split("\n")
        for part in (re.split(r"(?<=\w\.)(?=\w{5})", line) if len(line) > letters else [line])
    ]
    return "\n".join(part for line in lines for part in textwrap.wrap(line, letters))


def show_photo(axis: Axes, photo: Photo, dim: bool = False, caption: str = "") -> None:
    """Draw a photo; `dim`: dark and grey, as a background of marks and maps."""
    small = photo.image.copy()
    small.thumbnail((PHOTO_SIZE, PHOTO_SIZE))
    pixels = np.asarray(small.convert("L").convert("RGB")) // 2 if dim else np.asarray(small)
    # The axes are square in coordinates: the aspect restores the image's shape.
    axis.imshow(pixels, extent=EXTENT, aspect=photo.aspect)
    axis.set_autoscale_on(False)  # marks leave the limits as they are
    axis.set_xlabel(caption, fontsize=8, labelpad=3, parse_math=False)


def show_map(axis: Axes, values: Tensor, aspect: float, caption: str = "", **style: Any) -> None:
    """Draw a map (rows, columns) through a colour map, or (rows, columns, 3) of colours: one square per patch."""
    axis.imshow(values.float().cpu().numpy(), extent=EXTENT, aspect=aspect, interpolation="nearest", **style)
    if caption:  # a map over a photo keeps the photo's
        axis.set_xlabel(caption, fontsize=8, labelpad=3, parse_math=False)


def draw_ring(axis: Axes, x: float, y: float) -> None:
    """Mark the place of a core."""
    for colour, width in OUTLINE:
        axis.plot(
            [x], [y], "o", markersize=8, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=width,
            clip_on=False,
        )  # fmt: skip


def draw_frame(axis: Axes, patch: tuple[int, int], grid: tuple[int, int]) -> None:
    """Frame the patch at (row, column)."""
    from matplotlib.patches import Rectangle

    (row, column), (rows, columns) = patch, grid
    corner = (2 * (column - 1) / columns - 1, 2 * (row - 1) / rows - 1)
    for colour, width in OUTLINE:
        axis.add_patch(
            Rectangle(corner, 2 / columns, 2 / rows, fill=False, edgecolor=colour, linewidth=width, clip_on=False)
        )


def core_colours() -> Colormap:
    """Colours of cores in their order: viridis without its dark end, which is lost on a dark photo."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["viridis"](np.linspace(0.25, 1, 256)))


def add_colour_bar(axes: Sequence[Axes], colours: str | Colormap, ticks: Mapping[float, str], label: str = "") -> None:
    """A colour bar to the right of `axes`, panels above one another, from the smallest to the largest tick."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure, boxes = _figure_of(axes[0]), [axis.get_position() for axis in axes]
    low, high, right = min(b.y0 for b in boxes), max(b.y1 for b in boxes), max(b.x1 for b in boxes)
    width, height = figure.get_size_inches()
    bar_height = min(high - low, 2.6 / height)
    place = (right + 0.1 / width, (low + high - bar_height) / 2, 0.12 / width, bar_height)
    scale = Normalize(min(ticks), max(ticks) if len(ticks) > 1 else min(ticks) + 1)
    bar = figure.colorbar(ScalarMappable(scale, colours), cax=figure.add_axes(place, label="colour bar"))
    bar.set_ticks(list(ticks), labels=list(ticks.values()), fontsize=8)
    bar.set_label(label, fontsize=8)


def _figure_of(axis: Axes) -> Figure:
    figure = axis.get_figure(root=True)
    assert figure is not None
    return figure


def marker_style(i: int) -> tuple[str, str]:
    """Colour and marker of the i-th of several series; the first 49 all differ."""
    return PALETTE[i % len(PALETTE)], MARKERS[(i + i // len(PALETTE)) % len(MARKERS)]


def add_legend(axis: Axes, names: Sequence[str]) -> None:
    """Names and marker styles in lines of four under a row of panels, beginning at `axis`."""
    from matplotlib.lines import Line2D

    box = axis.get_position()
    styles = [(name, *marker_style(i)) for i, name in enumerate(names)]
    legend = _figure_of(axis).legend(
        handles=[Line2D([], [], linestyle="", color=c, marker=m, label=name) for name, c, m in styles],
        loc="upper left", bbox_to_anchor=(box.x0, box.y0), ncols=4, fontsize=8, frameon=False, handletextpad=0.2,
        borderaxespad=0.3,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def write_figure(figure: Figure | Chart, path: PathLike) -> Path:
    """Save a figure in the format of its suffix; the same figure gives the same bytes."""
    path = check_out(path)
    if isinstance(figure, Chart):  # as `draw_story` makes it, without matplotlib
        return write_chart(figure, path)
    import matplotlib

    # Without a date and with fixed ids, so that the same figure is the same file.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "veca"}), atomic_path(path) as part:
        figure.savefig(part, format=path.suffix[1:].lower(), dpi=DPI, metadata=metadata)
    return path


def check_out(
    path: PathLike, what: str = "a figure is", suffixes: Sequence[str] = FIGURE_SUFFIXES, example: str = "figure.png"
) -> Path:
    """The path, if a file with one of the suffixes can be written there."""
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ArgumentError(f"{path}: {what} written as {' or '.join(suffixes)}; end its name so")
    if path.is_dir():
        raise ArgumentError(f"{path} is a folder; name the file to write, such as {path / example}")
    check_writable(path)
    return path


def _import_figure() -> type[Figure]:
    with needs_extra("figures need", "viz"):
        from matplotlib.figure import Figure
    return Figure
