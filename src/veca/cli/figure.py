"""`veca figure`: figures of what a model does with images, one command per kind."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from veca.cli import common
from veca.cli import options as opt
from veca.cli.common import load_model, print_path
from veca.errors import needs_extra
from veca.inputs import resolve_width
from veca.inspect import figures
from veca.inspect.figure_layout import FeatureFunction, check_out, write_figure
from veca.inspect.projections import ProjectionMethod
from veca.model import Veca
from veca.utils.console import bar

figure_app = common.make_group(
    "Draw what a model does with images.\n\nLayers, cores and patches are numbered from 1.\n\n"
    "Example: veca figure similarity photo.jpg --patch 8x5"
)
FigureOut = Annotated[Path | None, opt.option("figure.out")]
# The options of all figures, their defaults where they are not None, and the options of each figure.
FIGURE_OPTIONS = {
    "budgets": opt.Budgets,
    "cores": opt.Cores,
    "compute": opt.ComputeShare,
    "which": Annotated[Any, opt.option("figure.which")],
    "layers": Annotated[Any, opt.option("figure.layers")],
    "patches": Annotated[Any, opt.option("figure.patches")],
    "with_global": Annotated[bool, opt.option("figure.with-global")],
    "beside": Annotated[Any, opt.option("figure.beside")],
    "method": Annotated[ProjectionMethod, opt.option("figure.method")],
    "size": opt.Size,
    "sizes": opt.Sizes,
    "fit": opt.FitOption,
}
FIGURE_DEFAULTS: dict[str, Any] = {
    "method": "pca",
    "size": 512,
    "sizes": figures.FEATURE_SIZES,
    "fit": "crop",
    "with_global": True,
}
FIGURES: dict[str, tuple[Callable[..., Any], str]] = {
    "layers": (figures.draw_layers, "budgets layers method size fit"),
    "cores": (figures.draw_cores, "cores compute which layers size fit"),
    "paths": (figures.draw_paths, "budgets size fit"),
    "features": (figures.draw_features, "cores sizes beside method fit"),
    "similarity": (figures.draw_similarity, "cores compute patches with_global beside size fit"),
    "states": (figures.draw_states, "cores compute layers method size fit"),
    "budgets": (figures.draw_budgets, "budgets method size fit"),
}
FIGURE_HELP = {
    "layers": "Which cores every patch attends to, as colours: rows are budgets, columns layers.",
    "cores": "Where chosen cores look, and their positions.",
    "paths": "The paths of the cores over the images, from the first layer to the last.",
    "features": "Dense features of the same image at several resolutions, in comparable colours.",
    "similarity": "Cosine similarity of all patches to a chosen one, and to the global feature.",
    "states": "Core tokens after chosen layers, as points: coloured by core, and by image.",
    "budgets": "How dense features change from few cores to all.",
}


def _run_figure(
    kind: str, draw: Callable[..., Any], images: opt.Images, to: FigureOut = None, model: opt.Model = "veca_tiny",
    width: opt.Width = None, device: opt.Device = "auto", **values: Any,
) -> None:  # fmt: skip
    common.check_sources(images)
    to = check_out(Path(f"{kind}.png") if to is None else to)
    loaded, name = load_model(model, device), common.display_name(model)
    if (compute := values.pop("compute", None)) is not None:
        choice = common.choose_compute(loaded, compute, values["size"], values["cores"], width)
        values |= {"cores": choice.cores, "size": choice.size[0]}
        width = choice.width
    if width is not None:
        resolve_width(width, loaded.config, loaded._warned)
        loaded.width, name = width, f"{name}, width {width:g}"
    if "budgets" in values:
        values["budgets"] = trained_budgets(values["budgets"], loaded)
    if values.get("beside"):
        values["beside"] = {name: _load_backbone(name, loaded) for name in values["beside"]}
    with bar(f"{kind}: opening images", None, "steps", common.err.is_terminal) as advance:

        def show_step(text: str) -> None:
            advance.describe(f"{kind}: {text}")
            advance(1)

        figure = draw(loaded, images, name=name, say=show_step, **values)
        advance.describe(f"{kind}: writing")
        write_figure(figure, to)
    print_path("Figure", to)


for _kind, (_function, _keywords) in FIGURES.items():
    _defaults = {name: FIGURE_DEFAULTS.get(name) for name in _keywords.split()}
    _command = common.with_settings(partial(_run_figure, _kind, _function), FIGURE_OPTIONS, **_defaults)
    figure_app.command(_kind, cls=common.Command, help=FIGURE_HELP[_kind])(_command)


def trained_budgets(budgets: Sequence[int] | None, model: Veca) -> Sequence[int] | None:
    """The values of `--cores`; "all" stands for those the model was trained at."""
    return budgets if budgets or budgets is None else model.config.budgets


def _load_backbone(name: str, model: Veca) -> FeatureFunction:
    common.register_timm_models(name)
    with needs_extra("--beside needs", "train"):
        from veca.teachers import load_teacher
    return load_teacher(name).to(model.norm.weight.device)
