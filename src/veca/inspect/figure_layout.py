"""Layout of figures: images and heading, panels in rows and columns, and drawing into them.

Layers, cores and patches are numbered from 1, as in the figures; patches by row and column from the top left. Panels
with an image have the model's coordinates: x and y in [-1, 1], y downwards, whatever the image's shape.
"""

from __future__ import annotations

import math
import operator
import os
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from PIL import Image
from torch import Tensor

from veca.config import is_budget, size_name
from veca.errors import ArgumentError, needs_extra
from veca.images import Fit, Source, fit_image, normalize, open_image, to_tensor
from veca.inspect.maps import check_finite, inspecting
from veca.inspect.projections import ProjectionMethod, check_method, core_colours, describe_axes, project
from veca.model import Veca
from veca.report.charts import LINE_COLOURS, Chart, shorten_middle, write_chart
from veca.report.page import LIGHT
from veca.utils.files import atomic_path, check_writable
from veca.utils.text import origin, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PathLike: TypeAlias = str | os.PathLike[str]
Photos: TypeAlias = Source | Sequence[Source]
FeatureFunction: TypeAlias = Callable[[Tensor, tuple[int, int]], tuple[Tensor, Tensor]]
"""Images (B, 3, height, width), normalised as for VECA, and a grid → global feature (B, D) and patches (B, N, D).

The teachers of `veca.teachers` have this signature."""
FIGURE_SUFFIXES = (".png", ".svg")
MAX_PANELS = 400
MAX_NAME_LENGTH = 28
HEAT = "inferno"
"""A perceptually uniform colour map, readable with colour vision deficiencies and in grey."""
PALETTE = (*(LIGHT[f"c{i}"] for i in range(LINE_COLOURS)), LIGHT["ink"])
"""Of series: the line colours of charts."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PHOTO_SIZE = 512
"""Longest side, in pixels, of a photo in a figure."""
EXTENT = (-1.0, 1.0, 1.0, -1.0)
OUTLINE = (("black", 3.0), ("white", 1.4))
"""Colours and widths of two strokes, one on the other: visible on dark and light."""
# In inches.
PAGE_WIDTH, MIN_PANEL, MAX_PANEL = 8.5, 1.35, 2.8
MARGIN, GAP, LINE_HEIGHT, INCHES_PER_LETTER = 0.15, 0.08, 0.165, 0.068


class Photo(NamedTuple):
    name: str
    image: Image.Image
    """Resized for the model."""

    @property
    def aspect(self) -> float:
        """Height over width."""
        return self.image.height / self.image.width

    def grid(self, model: Veca) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image.height // model.config.patch_size, self.image.width // model.config.patch_size

    def batch(self, model: Veca) -> Tensor:
        """(1, 3, height, width), normalised, on the model's device."""
        return normalize(to_tensor(self.image))[None].to(model.norm.weight.device)


def open_photos(images: Photos, size: int, fit: Fit) -> list[Photo]:
    """Open one or several images and resize them to `size`."""
    sources = images if isinstance(images, list | tuple) else [images]
    if not sources:
        raise ArgumentError("no picture given; name at least one")
    photos = []
    for i, source in enumerate(sources):
        is_path = isinstance(source, str | os.PathLike)
        name = printable(Path(os.fsdecode(source)).name) if is_path else f"picture {i + 1}"
        photos.append(Photo(shorten_middle(name, MAX_NAME_LENGTH), fit_image(open_image(source), size, fit)))
    return photos


def figure_settings(kind: str) -> dict[str, Any]:
    """Texts and layout of a kind of figure."""
    return tomllib.loads(Path(__file__).with_name("figures.toml").read_text("utf-8"))[kind]


def cores_label(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def pick_evenly(values: Sequence[int], count: int) -> list[int]:
    """`count` of the values, evenly spaced from the first to the last; all if there are no more.

    >>> pick_evenly(range(2, 13), 6), pick_evenly([8, 16], 4)
    ([2, 4, 6, 8, 10, 12], [8, 16])
    """
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def choose_budgets(model: Veca, budgets: Sequence[int] | None, default: Sequence[int]) -> list[int]:
    """Budgets of the model in ascending order, each once. Any number of cores works; `config.budgets` were trained."""
    chosen, num_cores = default if budgets is None else budgets, model.config.num_cores
    for budget in chosen:
        if not is_budget(budget, num_cores):
            rule = f"a budget is an integer from 1 to {num_cores}; take one of these, or leave it out"
            raise ArgumentError(f"cores={budget!r}; {rule}")
    return sorted(set(choose_numbers("budget", chosen, (), num_cores, "")))


def choose_numbers(what: str, given: Sequence[int] | None, default: Sequence[int], last: int, rule: str) -> list[int]:
    """The given numbers from 1 to `last`, each once, in their order."""
    numbers = default if given is None else given
    if not numbers:
        raise ArgumentError(f"asked for no {what}; name at least one")
    for number in numbers:
        if not 1 <= operator.index(number) <= last:
            raise ArgumentError(f"{what} {number}: {rule}")
    return list(dict.fromkeys(map(operator.index, numbers)))


def path_scale(paths: Iterable[Tensor]) -> tuple[float, int]:
    """Of paths (L, C, 2) in [-1, 1]: the longest from start to end, in sides of the image, and a factor.

    All paths are drawn longer by the factor, so that even short ones can be seen.
    """
    longest = max(float((path[-1] - path[0]).norm(dim=-1).max()) / 2 for path in paths)
    return longest, next((factor for factor in (200, 100, 50, 20, 10, 5, 2) if factor * longest <= 0.1), 1)


@dataclass
class Sheet:
    """One figure: a model on photos, the heading and layout of its kind (`figures.toml`), and its panels.

    The fields with a default are options of every figure.
    """

    kind: str
    model: Veca
    images: Photos
    size: int = 512
    fit: Fit = "crop"
    name: str | None = None
    """Of the model; None: its size."""
    method: ProjectionMethod = "pca"
    """From features to colours or points."""
    say: Callable[[str], object] = lambda text: None
    """Is told what is being done."""

    def __post_init__(self) -> None:
        check_method(self.method)
        with needs_extra("figures need", "viz"):
            import matplotlib.figure
        self.mpl: Any = matplotlib
        self.settings = figure_settings(self.kind)
        self.label = printable(self.name) if self.name else size_name(self.model.config) or "VECA"
        self.photos = open_photos(self.images, self.size, self.fit)
        self.captions: bool = len(self.photos) >= self.settings.get("captions_from", math.inf)
        self.figure: Figure

    def choose_layers(self, layers: Sequence[int] | None, default: Sequence[int]) -> list[int]:
        depth = len(self.model.blocks)
        return choose_numbers("layer", layers, default, depth, f"the model has layers 1 to {depth}")

    def layer_labels(self, layers: Sequence[int]) -> list[str]:
        return [f"layer {layer} of {len(self.model.blocks)}" for layer in layers]

    def project(self, label: str, maps: Sequence[Tensor], components: int = 3, clip: float = 0.01) -> list[Tensor]:
        self.say(f"{label}: {self.method.upper()} of {sum(each[..., 0].numel() for each in maps):,} features")
        return project(maps, components, self.method, clip)

    def label_backbones(self, budget: int, beside: Mapping[str, FeatureFunction]) -> dict[str, int | FeatureFunction]:
        """The model at a budget and the backbones beside it, by label."""
        return {f"{self.label}\n{cores_label(budget)}": budget, **beside}

    def check_panels(self, rows: int, columns: int) -> None:
        """Refuse too many, before the model runs."""
        if rows * columns > MAX_PANELS:
            rule = f"a figure has at most {MAX_PANELS}. Give fewer pictures, budgets or layers"
            raise ArgumentError(f"{rows} × {columns} = {rows * columns} panels; {rule}")

    def run(self, compute: Callable[..., Tensor], photo: Photo, *args: Any) -> Tensor:
        """`compute(model, batch, *args)`, (layers, 1, ...), without the batch's axis: finite, float32, on the CPU."""
        with inspecting(self.model):
            output = compute(self.model, photo.batch(self.model), *args)
            check_finite(self.model, output)
        return output[:, 0].float().cpu()

    def features(self, backbone: int | FeatureFunction, photo: Photo) -> tuple[Tensor, Tensor]:
        """Of the model at a budget, or of another backbone: global feature (D) and dense map (rows, columns, D)."""
        grid = photo.grid(self.model)
        with inspecting(self.model):
            batch = photo.batch(self.model)
            if isinstance(backbone, int):
                out = Veca.forward(self.model, batch, backbone)  # subclasses, as timm's, return something else
                check_finite(self.model, cls := out.cls, patches := out.patches)
            else:
                cls, patches = backbone(batch, grid)
        return cls[0].float().cpu(), patches[0].float().cpu().unflatten(0, grid)

    def create_panels(
        self, rows: Sequence[str], columns: Sequence[str], aspects: Sequence[float], **values: Any
    ) -> list[list[Axes]]:
        """Create the figure, its heading filled with `values`, and its empty panels, [row][column].

        `aspects` are height over width of the panels of each row. There is room for a line under each panel, a colour
        bar on the right and a legend at the bottom, as the kind has them.
        """
        legend_lines = -(-len(self.photos) // 4) if self.settings.get("legend") and len(self.photos) > 1 else 0
        rows = [_wrap_label(row, 18) for row in rows]
        left = MARGIN + max(len(line) for row in rows for line in row.split("\n")) * INCHES_PER_LETTER + 0.1
        right, below_panel = MARGIN + 0.75 * self.settings.get("colour_bar", False), GAP + 0.2 * self.captions
        panel = min(max((PAGE_WIDTH - left - right) / len(columns) - GAP, MIN_PANEL), MAX_PANEL)
        width = max(left + len(columns) * (panel + GAP) + right, 6.0)
        columns = [_wrap_label(column, int(panel / INCHES_PER_LETTER)) for column in columns]
        titles = 0.15 + LINE_HEIGHT * max(column.count("\n") + 1 for column in columns)
        body = titles + sum(panel * aspect + below_panel for aspect in aspects) + legend_lines * 0.2 + MARGIN
        top = self._create_figure(width, body, values) + titles
        height = self.figure.get_size_inches()[1]
        axes: list[list[Axes]] = []
        for row, aspect in zip(rows, aspects, strict=True):
            panel_height = panel * aspect
            axes.append([])
            for i, column in enumerate(columns):
                x, y = (left + i * (panel + GAP)) / width, 1 - (top + panel_height) / height
                axis = self.figure.add_axes((x, y, panel / width, panel_height / height), xticks=[], yticks=[])
                if len(axes) == 1:  # titles stand over the first row
                    axis.set_title(column, fontsize=9, pad=4, parse_math=False)
                axes[-1].append(axis)
            place = (left - 0.1) / width, 1 - (top + panel_height / 2) / height
            self.figure.text(*place, row, ha="right", va="center", fontsize=9, parse_math=False)
            top += panel_height + below_panel
        return axes

    def _create_figure(self, width: float, body: float, values: dict[str, Any]) -> float:
        """A figure with title, notice and text, and `body` inches under them; returns where that begins."""
        values |= {"model": self.label, "axes": describe_axes(self.method, 3), "plane": describe_axes(self.method, 2)}
        notice = origin(self.model.provenance)
        if self.model.provenance.get("weights") == "random":
            notice = f"{self.label} has {notice}: this shows how it works, not what a trained model sees."
        elif notice:
            notice = f"{self.label}: {notice}."
        letters = int((width - 2 * MARGIN) / INCHES_PER_LETTER)
        title, text = (self.settings[key].format_map(values) for key in ("title", "text"))
        # Larger and bold letters are wider: fewer fit into a line.
        parts: list[tuple[list[str], float, dict[str, Any]]] = [
            (textwrap.wrap(title, int(letters * 0.72)), LINE_HEIGHT * 1.4, {"size": 12, "weight": "bold"}),
            (
                textwrap.wrap(notice, int(letters * 0.9)),
                LINE_HEIGHT,
                {"size": 9, "weight": "bold", "color": LIGHT["warning"]},
            ),
            (textwrap.wrap(text, letters), LINE_HEIGHT, {"size": 9}),
        ]
        wrapped = [part for part in parts if part[0]]
        head = MARGIN + sum(len(lines) * line_height + 0.07 for lines, line_height, _ in wrapped)
        self.figure, top = self.mpl.figure.Figure(figsize=(width, head + body), facecolor="white"), MARGIN
        for lines, line_height, font in wrapped:
            place = MARGIN / width, 1 - top / (head + body)
            self.figure.text(*place, "\n".join(lines), va="top", linespacing=1.25, parse_math=False, **font)
            top += len(lines) * line_height + 0.07
        return head

    def create_photo_panels(
        self, rows: Sequence[str], columns: Sequence[str], maps: Sequence[Sequence[Any]] = (), **values: Any
    ) -> list[list[list[Axes]]]:
        """A figure with `rows` for each photo, which stands in an extra first column; panels [photo][row][column].

        `maps` [row][photo][column] are drawn into the first rows of each photo.
        """
        aspects = [photo.aspect for photo in self.photos for _ in rows]
        labels = [*rows] * len(self.photos), ["picture", *columns]
        axes, panels = self.create_panels(*labels, aspects, **values), []
        for i, photo in enumerate(self.photos):
            own = axes[i * len(rows) : (i + 1) * len(rows)]
            show_photo(own[0][0], photo, caption=photo.name if self.captions else "")
            for row in own[1:]:
                row[0].set_axis_off()
            panels.append([row[1:] for row in own])
            for row, row_maps in zip(panels[-1], maps, strict=False):
                for axis, colours in zip(row, row_maps[i], strict=True):
                    show_map(axis, colours, photo.aspect)
        return panels

    def frame_patch(self, axis: Axes, patch: tuple[int, int], grid: tuple[int, int]) -> None:
        """Frame the patch at (row, column)."""
        (row, column), (rows, columns) = patch, grid
        corner, size = (2 * (column - 1) / columns - 1, 2 * (row - 1) / rows - 1), (2 / columns, 2 / rows)
        for colour, width in OUTLINE:
            axis.add_patch(self.mpl.patches.Rectangle(corner, *size, fill=False, ec=colour, lw=width, clip_on=False))

    def core_colours(self) -> Any:
        """Colours of cores in their order, as a colour map."""
        return self.mpl.colors.ListedColormap(core_colours(256))

    def add_core_bar(self, axes: Sequence[Axes], num_cores: int) -> None:
        ticks = {float(core): str(core) for core in pick_evenly(range(1, num_cores + 1), 5)}
        self.add_colour_bar(axes, ticks, "core", self.core_colours())

    def add_colour_bar(self, axes: Sequence[Axes], ticks: Mapping[float, str], label: str, colours: Any = HEAT) -> None:
        """A colour bar to the right of `axes`, panels above one another, from the smallest to the largest tick."""
        boxes, (width, height) = [axis.get_position() for axis in axes], self.figure.get_size_inches()
        low, high, right = min(b.y0 for b in boxes), max(b.y1 for b in boxes), max(b.x1 for b in boxes)
        bar_height = min(high - low, 2.6 / height)
        place = (right + 0.1 / width, (low + high - bar_height) / 2, 0.12 / width, bar_height)
        scale = self.mpl.colors.Normalize(min(ticks), max(ticks) if len(ticks) > 1 else min(ticks) + 1)
        colour_axis = self.figure.add_axes(place, label="colour bar")
        bar = self.figure.colorbar(self.mpl.cm.ScalarMappable(scale, colours), cax=colour_axis)
        bar.set_ticks(list(ticks), labels=list(ticks.values()), fontsize=8)
        bar.set_label(label, fontsize=8)

    def add_legend(self, axis: Axes) -> None:
        """Names and marker styles of the photos in lines of four under a row of panels, beginning at `axis`."""
        handles = []
        for i, photo in enumerate(self.photos):
            colour, marker = marker_style(i)
            handles.append(self.mpl.lines.Line2D([], [], linestyle="", color=colour, marker=marker, label=photo.name))
        place = {"loc": "upper left", "bbox_to_anchor": axis.get_position().p0, "ncols": 4, "borderaxespad": 0.3}
        legend = self.figure.legend(handles=handles, fontsize=8, frameon=False, handletextpad=0.2, **place)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _wrap_label(label: str, letters: int) -> str:
    """Lines of at most so many letters; longer names like SIZE.TAG are broken after a dot where that helps."""
    lines = []
    for line in label.split("\n"):
        parts = re.split(r"(?<=\w\.)(?=\w{5})", line) if len(line) > letters else [line]
        lines += [wrapped for part in parts for wrapped in textwrap.wrap(part, letters)]
    return "\n".join(lines)


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
    style = {"cmap": HEAT} | style  # colours take no map
    axis.imshow(values.numpy(), extent=EXTENT, aspect=aspect, interpolation="nearest", **style)
    if caption:  # a map over a photo keeps the photo's
        axis.set_xlabel(caption, fontsize=8, labelpad=3, parse_math=False)


def draw_ring(axis: Axes, x: float, y: float) -> None:
    """Mark the place of a core."""
    for colour, width in OUTLINE:
        axis.plot([x], [y], "o", markersize=8, mfc="none", mec=colour, mew=width, clip_on=False)


def marker_style(i: int) -> tuple[str, str]:
    """Colour and marker of the i-th of several series; the first 49 all differ."""
    return PALETTE[i % len(PALETTE)], MARKERS[(i + i // len(PALETTE)) % len(MARKERS)]


def write_figure(figure: Figure | Chart, path: PathLike) -> Path:
    """Save a figure in the format of its suffix; the same figure gives the same bytes."""
    path = check_out(path)
    if isinstance(figure, Chart):  # as `draw_story` makes it, without matplotlib
        return write_chart(figure, path)
    import matplotlib

    # Without a date and with fixed ids, so that the same figure is the same file.
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "veca"}), atomic_path(path) as part:
        figure.savefig(part, format=path.suffix[1:].lower(), dpi=160, metadata=metadata)
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
