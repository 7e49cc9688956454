"""The commands of `veca finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from veca.probe.cli import Data, Root, SkipBad, numbers, workers_of
from veca.terminal import Device, err, out
from veca.tune.settings import ClassifySettings, Head, SegmentSettings, Settings

finetune_app = typer.Typer(
    no_args_is_help=True,
    help="Fine-tune a VECA on labelled pictures of your own; what comes out is a model and a report. "
    "Interrupted or killed? Run the same command again: it continues, and the result is the same.",
)
Model = Annotated[str, typer.Argument(help="A VECA by name, .safetensors file or folder, or a released .pt file.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="The run's folder: the model, the log and the report.")]
Size = Annotated[int, typer.Option(help="Side in pixels, a multiple of 16.")]
Cores = Annotated[
    str, typer.Option(help="Budgets, as 8,16,32: a step draws one. all: every one the model was trained at.")
]
Epochs = Annotated[float, typer.Option(help="Passes over train.")]
Batch = Annotated[int, typer.Option(help="Pictures in a step.")]
Rate = Annotated[float, typer.Option(help="The highest learning rate.")]
LayerDecay = Annotated[float, typer.Option(help="The rate of a layer over that of the one above it; 1: one for all.")]
HeadOf = Annotated[Head, typer.Option(help="Start it from a linear probe of the frozen features, or from new weights.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Any other setting of docs/finetune.md, as augment=colour; repeat.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many pictures of each split; for a try.")]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Decoding processes.  [default: one per CPU, at most 8]", show_default=False)
]
Restart = Annotated[bool, typer.Option("--restart", help="Begin anew, whatever the folder holds.")]


@finetune_app.command()
def classify(
    model: Model, data: Data, to: Out, size: Size = ClassifySettings.size, cores: Cores = "all",
    epochs: Epochs = Settings.epochs, batch: Batch = ClassifySettings.batch, rate: Rate = Settings.rate,
    layer_decay: LayerDecay = Settings.layer_decay, head: HeadOf = Settings.head, changes: Changes = None,
    root: Root = None, limit: Limit = None, device: Device = "auto", workers: Workers = None,
    skip_bad: SkipBad = False, restart: Restart = False,
) -> None:  # fmt: skip
    """A class for each picture: FOLDER/CLASS/7.jpg, with or without train/, val/ and test/ above."""
    asked = {"size": size, "epochs": epochs, "batch": batch, "rate": rate, "layer_decay": layer_decay, "head": head}
    how = {"root": root, "limit": limit, "device": device, "restart": restart}
    _run(ClassifySettings, model, data, to, cores, asked, changes, workers, skip_bad, how)


@finetune_app.command()
def segment(
    model: Model, data: Data, to: Out, size: Size = SegmentSettings.size, cores: Cores = "all",
    epochs: Epochs = Settings.epochs, batch: Batch = SegmentSettings.batch, rate: Rate = Settings.rate,
    layer_decay: LayerDecay = Settings.layer_decay, head: HeadOf = Settings.head, changes: Changes = None,
    root: Root = None, limit: Limit = None, device: Device = "auto", workers: Workers = None,
    skip_bad: SkipBad = False, restart: Restart = False,
) -> None:  # fmt: skip
    """A class for each pixel: FOLDER/images/7.jpg with FOLDER/masks/7.png, whose values are class numbers."""
    asked = {"size": size, "epochs": epochs, "batch": batch, "rate": rate, "layer_decay": layer_decay, "head": head}
    how = {"root": root, "limit": limit, "device": device, "restart": restart}
    _run(SegmentSettings, model, data, to, cores, asked, changes, workers, skip_bad, how)


def _run(
    kind: type[Settings], model: str, data: str, to: Path, cores: str, asked: dict[str, Any],
    changes: list[str] | None, workers: int | None, skip_bad: bool, how: dict[str, Any],
) -> None:  # fmt: skip
    try:
        from veca.train.recipe import build
        from veca.train.stop import Interrupted
        from veca.tune.run import finetune
    except ImportError as error:
        raise ValueError(f"tuning needs {error.name}, which is not installed: pip install 'veca[train]'") from error
    asked |= {"cores": [] if cores == "all" else numbers(cores, "cores", int)}
    settings = build(kind, asked | {"workers": workers_of(workers), "skip_bad": skip_bad}, changes or [])
    try:
        report = finetune(model, data, to, settings, **how, say=_say)
    except Interrupted as stop:
        _say(f"Stopped, and saved in {to}. The same command continues where this one stopped.")
        raise typer.Exit(128 + stop.number) from None
    except KeyboardInterrupt:
        _say(f"Stopped at once. The same command continues from the last checkpoint in {to}.")
        raise typer.Exit(130) from None
    out.print(f"Report: {report.resolve()}", soft_wrap=True, markup=False)


def _say(text: str) -> None:
    err.print(text, style="yellow", markup=False, soft_wrap=True)
