"""`veca finetune`: classification and segmentation on labelled images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from veca.cli.common import Command, count_workers, make_group, print_path, resumable_run, warn
from veca.cli.options import (
    Budgets,
    Changes,
    Data,
    DataRoot,
    Device,
    Limit,
    Model,
    Overwrite,
    Size,
    SkipBad,
    TrainBatchSize,
    Workers,
)
from veca.errors import needs_extra
from veca.train.finetune.settings import FinetuneClassifySettings, FinetuneSegmentSettings, HeadStart

finetune_app = make_group(
    "Fine-tune a VECA on your own labelled images; the result is a model and a report.\n\n"
    "Example: veca finetune classify --model veca_tiny --data photos/ --out runs/photos\n\n"
    "Several GPUs or machines: torchrun --nproc-per-node=gpu -m veca finetune classify …\n\n"
    "Interrupted or killed? Run the same command again: it continues, and the result is the same."
)
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the run: the model, the log and the report.")]
Epochs = Annotated[float, typer.Option(help="Passes over the training split.")]
Rate = Annotated[float, typer.Option(help="Peak learning rate.")]
LayerDecay = Annotated[float, typer.Option(help="Learning rate of a layer over that of the next one; 1: the same.")]
HeadOption = Annotated[
    HeadStart,
    typer.Option("--head", help="Initialise the head by a linear probe of the frozen features, or at random."),
]


def _add_command(kind: type[FinetuneClassifySettings | FinetuneSegmentSettings], help: str) -> None:
    @finetune_app.command(kind.task, cls=Command, help=help)
    def command(
        data: Data, to: Out, model: Model = "veca_tiny", size: Size = kind.size, cores: Budgets = None,
        epochs: Epochs = kind.epochs, batch_size: TrainBatchSize = kind.batch, rate: Rate = kind.rate,
        layer_decay: LayerDecay = kind.layer_decay, head: HeadOption = kind.head, changes: Changes = None,
        root: DataRoot = None, limit: Limit = None, device: Device = "auto", workers: Workers = None,
        skip_bad: SkipBad = False, overwrite: Overwrite = False,
    ) -> None:  # fmt: skip
        with needs_extra("fine-tuning needs", "train"):
            from veca.train.finetune.run import finetune
        values: dict[str, Any] = {
            "size": size, "cores": cores or [], "epochs": epochs, "batch": batch_size, "rate": rate,
            "layer_decay": layer_decay, "head": head, "workers": count_workers(workers), "skip_bad": skip_bad,
        }  # fmt: skip
        settings = kind.from_dict(values, changes or [])
        with resumable_run(to, warn, overwrite):
            report = finetune(
                model, data, to, settings, root=root, limit=limit, device=device, restart=overwrite, say=warn
            )
        if report is not None:
            print_path("Report", report)


_add_command(
    FinetuneClassifySettings,
    "One class per image: FOLDER/CLASS/7.jpg, with or without train/, val/ and test/ above.",
)
_add_command(
    FinetuneSegmentSettings,
    "One class per pixel: FOLDER/images/7.jpg with FOLDER/masks/7.png, whose values are class numbers.",
)
