"""Figures of dense features: at several resolutions, at several budgets, and their similarity to a patch.

Each function returns a matplotlib figure; `write_figure` saves it. Patches are numbered from 1, by row and column.
Shapes: rows × columns = N patches, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch.nn.functional as F

from veca.errors import ArgumentError
from veca.images import Fit
from veca.inspect import figure_inputs as inputs
from veca.inspect import figure_layout as layout
from veca.inspect.figure_inputs import FeatureFunction, ImageSources, ProgressCallback, cores_label, ignore_progress
from veca.inspect.projections import ProjectionMethod, check_method, describe_axes, project
from veca.model import Veca

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEATURE_SIZES = (256, 512, 768)


def draw_features(
    model: Veca,
    images: ImageSources,
    *,
    cores: int | None = None,
    sizes: Sequence[int] = FEATURE_SIZES,
    beside: Mapping[str, FeatureFunction] | None = None,
    method: ProjectionMethod = "pca",
    fit: Fit = "crop",
    name: str | None = None,
    say: ProgressCallback = ignore_progress,
) -> Figure:
    """Dense features at several resolutions in one joint projection (Figure 3), and those of the backbones `beside`."""
    check_method(method)
    budget = inputs.choose_budget(model, cores)
    if not sizes:
        raise ArgumentError("asked for no size; name at least one")
    sizes = sorted(set(sizes))
    photos = [inputs.open_photos(images, size, fit) for size in sizes]  # [size][image]
    backbones = _backbones(model, budget, name, beside)
    layout.check_panels(len(photos[0]) * len(backbones), 1 + len(sizes))
    colours = []  # [backbone][image][size]
    for label, backbone in backbones.items():
        maps = []
        for size, photos_at_size in zip(sizes, photos, strict=True):
            say(f"{label.splitlines()[0]}: running at {size} px")
            maps += [inputs.photo_features(model, backbone, photo)[1] for photo in photos_at_size]
        say(f"{label.splitlines()[0]}: {method.upper()} of {sum(m[..., 0].numel() for m in maps):,} patches")
        values = project(maps, 3, method)  # jointly over sizes and images, separately for each backbone
        colours.append([values[i :: len(photos[0])] for i in range(len(photos[0]))])
    labels = list(backbones), [f"{size} px" for size in sizes]
    heading = inputs.make_heading("features", model, name, axes=describe_axes(method, 3))
    return layout.create_photo_panels(heading, photos[-1], *labels, colours, captions=len(photos[0]) > 1)[0]


def draw_similarity(
    model: Veca,
    images: ImageSources,
    *,
    cores: int | None = None,
    patches: Sequence[tuple[int, int]] | None = None,
    with_global: bool = True,
    beside: Mapping[str, FeatureFunction] | None = None,
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: ProgressCallback = ignore_progress,
) -> Figure:
    """Cosine similarity of all patches to the global feature and to chosen `patches` (row, column) (Figure 4).

    Default: the patch in the middle. `beside`: the same of other backbones.
    """
    budget = inputs.choose_budget(model, cores)
    photos = inputs.open_photos(images, size, fit)
    # [photo][row]: the patch to compare with; None is the global feature.
    sources: list[list[tuple[int, int] | None]] = []
    for photo in photos:
        grid = photo.grid(model)
        middle = (grid[0] // 2 + 1, grid[1] // 2 + 1)
        chosen = [middle] if patches is None else [inputs.choose_patch(patch, grid, photo.name) for patch in patches]
        sources.append([None] * with_global + chosen)
    count = len(sources[0])
    if not count:
        raise ArgumentError("neither the global feature nor a patch to compare with; name a patch, or keep the global")
    backbones = _backbones(model, budget, name, beside)
    layout.check_panels(len(photos) * count, 1 + len(backbones))
    names = [f"patch in\nrow {at[0]},\ncolumn {at[1]}" if at else "global\nfeature" for each in sources for at in each]
    aspects = [photo.aspect for photo in photos for _ in range(count)]
    heading = inputs.make_heading("similarity", model, name)
    labels = names, ["picture", *backbones]
    figure, axes = layout.create_panels(heading, *labels, aspects, captions=True, colour_bar=True)
    for i, photo in enumerate(photos):
        rows = axes[i * count : (i + 1) * count]
        for row in rows:
            layout.show_photo(row[0], photo, caption=photo.name if row is rows[0] else "")
        for column, (label, backbone) in enumerate(backbones.items(), start=1):
            say(f"{photo.name}: running {label.splitlines()[0]}")
            cls, dense = inputs.photo_features(model, backbone, photo)
            for row, source in zip(rows, sources[i], strict=True):
                feature = dense[source[0] - 1, source[1] - 1] if source else cls
                values = F.cosine_similarity(feature, dense, dim=-1)
                ends = f"{float(values.min()):.2f} to {float(values.max()):.2f}"
                layout.show_map(row[column], values, photo.aspect, ends, cmap=layout.HEAT)
        for axis, source in ((axis, source) for row, source in zip(rows, sources[i], strict=True) for axis in row):
            if source:
                layout.draw_frame(axis, source, photo.grid(model))
    layout.add_colour_bar([row[-1] for row in axes], layout.HEAT, {0: "least", 1: "most"}, "similarity")
    return figure


def draw_budgets(
    model: Veca,
    images: ImageSources,
    *,
    budgets: Sequence[int] | None = None,
    method: ProjectionMethod = "pca",
    size: int = 512,
    fit: Fit = "crop",
    name: str | None = None,
    say: ProgressCallback = ignore_progress,
) -> Figure:
    """Dense features by budget: as colours, and the similarity of each patch to itself at the largest budget.

    Default: the budgets the model was trained at.
    """
    check_method(method)
    budgets = inputs.choose_budgets(model, budgets, list(model.config.budgets))
    photos = inputs.open_photos(images, size, fit)
    layout.check_panels(2 * len(photos), 1 + len(budgets))
    maps = []  # [budget][photo]
    for budget in budgets:
        say(f"{cores_label(budget)}: running the model")
        features = inputs.features_at_budget(model, budget)
        maps.append([inputs.photo_features(model, features, photo)[1] for photo in photos])
    say(f"{method.upper()} of all features")
    colours = project([dense for row in maps for dense in row], 3, method)  # [budget × photo]
    similarity = [[F.cosine_similarity(a, b, dim=-1) for a, b in zip(row, maps[-1], strict=True)] for row in maps]
    # One scale for all maps, from the smallest similarity to 1, and never of zero width.
    low = min(0.999, *(float(values.min()) for row in similarity for values in row))
    largest = cores_label(budgets[-1])
    heading = inputs.make_heading("budgets", model, name, axes=describe_axes(method, 3), largest=largest)
    labels = ["features", f"similarity to\n{largest}"], [cores_label(budget) for budget in budgets]
    above = [[colours[i :: len(photos)] for i in range(len(photos))]]
    figure, panels = layout.create_photo_panels(heading, photos, *labels, above, colour_bar=True)
    for i, (photo, (_, below)) in enumerate(zip(photos, panels, strict=True)):
        for axis, row in zip(below, similarity, strict=True):
            mean = f"{float(row[i].mean()):.3f}"
            layout.show_map(axis, row[i], photo.aspect, mean, cmap=layout.HEAT, vmin=low, vmax=1.0)
        layout.add_colour_bar([below[-1]], layout.HEAT, {low: f"{low:.3f}", 1.0: "1"})
    return figure


def _backbones(
    model: Veca, budget: int, name: str | None, beside: Mapping[str, FeatureFunction] | None
) -> dict[str, FeatureFunction]:
    """The model at a budget and the backbones beside it, by label."""
    label = f"{inputs.model_label(model, name)}\n{cores_label(budget)}"
    return {label: inputs.features_at_budget(model, budget), **(beside or {})}
