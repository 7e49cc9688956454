"""The commands of `veca finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import Device, Restart, Size, Source, Workers, out, stoppable, warn, workers_of
from veca.cli.probe import Data, Limit, Root, SkipBad, numbers
from veca.errors import needs_extra
from veca.train.finetune.settings import FinetuneClassifySettings, FinetuneSegmentSettings, HeadStart

finetune_app = typer.Typer(
    no_args_is_help=True,
    help="Fine-tune a VECA on labelled pictures of your own; what comes out is a model and a report.\n\n"
    "Example: veca finetune classify veca_tiny --data photos/ --out runs/photos\n\n"
    "Several GPUs or machines: torchrun --nproc-per-node=gpu -m veca finetune classify …\n\n"
    "Interrupted or killed? Run the same command again: it continues, and the result is the same.",
)
Out = Annotated[Path, typer.Option("--out", "-o", help="The run's folder: the model, the log and the report.")]
Cores = Annotated[
    str, typer.Option(help="Budgets, as 8,16,32: a step draws one. all: every one the model was trained at.")
]
Epochs = Annotated[float, typer.Option(help="Passes over train.")]
Batch = Annotated[int, typer.Option(help="Pictures in a step, of all processes together.")]
Rate = Annotated[float, typer.Option(help="The highest learning rate.")]
LayerDecay = Annotated[float, typer.Option(help="The rate of a layer over that of the one above it; 1: one for all.")]
HeadOf = Annotated[
    HeadStart, typer.Option(help="Start it from a linear probe of the frozen features, or from new weights.")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Any other setting of docs/finetune.md, as augment=colour; repeat.")
]


def _add(kind: type[FinetuneClassifySettings | FinetuneSegmentSettings], about: str) -> None:
    @finetune_app.command(kind.task, help=about)
    def command(
        model: Source, data: Data, to: Out, size: Size = kind.size, cores: Cores = "all",
        epochs: Epochs = kind.epochs, batch: Batch = kind.batch, rate: Rate = kind.rate,
        layer_decay: LayerDecay = kind.layer_decay, head: HeadOf = kind.head, changes: Changes = None,
        root: Root = None, limit: Limit = None, device: Device = "auto", workers: Workers = None,
        skip_bad: SkipBad = False, restart: Restart = False,
    ) -> None:  # fmt: skip
        with needs_extra("tuning needs", "train"):
            from veca.train.finetune.run import finetune
        asked = {
            "size": size, "cores": [] if cores == "all" else numbers(cores, "cores", int), "epochs": epochs,
            "batch": batch, "rate": rate, "layer_decay": layer_decay, "head": head, "workers": workers_of(workers),
            "skip_bad": skip_bad,
        }  # fmt: skip
        settings = kind.from_dict(asked, changes or [])
        with stoppable(to, warn, restart):
            report = finetune(
                model, data, to, settings, root=root, limit=limit, device=device, restart=restart, say=warn
            )
        if report is not None:
            out.print(f"Report: {report.resolve()}", soft_wrap=True)


_add(
    FinetuneClassifySettings,
    "A class for each picture: FOLDER/CLASS/7.jpg, with or without train/, val/ and test/ above.",
)
_add(
    FinetuneSegmentSettings,
    "A class for each pixel: FOLDER/images/7.jpg with FOLDER/masks/7.png, whose values are class numbers.",
)
