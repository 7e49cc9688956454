"""`veca finetune`: classification, segmentation and depth on labelled images."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from veca.cli import common
from veca.cli import options as opt
from veca.cli.common import print_path, resumable_run, warn
from veca.errors import needs_extra
from veca.train.finetune.settings import (
    FinetuneClassifySettings,
    FinetuneDepthSettings,
    FinetuneSegmentSettings,
    FinetuneSettings,
    HeadStart,
)

finetune_app = common.make_group(
    "Fine-tune a VECA on your own labelled images; the result is a model and a report.\n\n"
    "Example: veca finetune classify --model veca_tiny --data photos/ --out runs/photos\n\n"
    "Several GPUs or machines: torchrun --nproc-per-node=gpu -m veca finetune classify …\n\n"
    "Interrupted or killed? Run the same command again: it continues, and the result is the same."
)
TunedOut = Annotated[Path, opt.option("finetune.out")]
# The options of the settings; others are changed by --set.
TUNING_OPTIONS = {
    "size": opt.Size,
    "fit": opt.CropOrNative,
    "max_patches": opt.MaxPatches,
    "cores": opt.Budgets,
    "width": opt.Width,
    "epochs": Annotated[float, opt.option("finetune.epochs")],
    "batch": opt.TrainBatchSize,
    "rate": Annotated[float, opt.option("finetune.rate")],
    "layer_decay": Annotated[float, opt.option("finetune.layer-decay")],
    "head": Annotated[HeadStart, opt.option("finetune.head")],
    "workers": opt.Workers,
    "decode": opt.Decoding,
    "skip_bad": opt.SkipBad,
}


def _finetune(
    kind: type[FinetuneSettings], data: opt.Data, to: TunedOut,
    model: opt.Model = "veca_tiny", changes: opt.Changes = None, root: opt.DataRoot = None, limit: opt.Limit = None,
    device: opt.Device = "auto", overwrite: opt.Overwrite = False, **values: Any,
) -> None:  # fmt: skip
    with needs_extra("fine-tuning needs", "train"):
        from veca.train.finetune.run import finetune
    values |= {"cores": values["cores"] or [], "workers": common.count_workers(values["workers"])}
    settings = kind.from_dict(values, changes or [])
    with resumable_run(to, warn, overwrite):
        report = finetune(model, data, to, settings, root=root, limit=limit, device=device, restart=overwrite, say=warn)
    if report is not None:
        print_path("Report", report)


TASKS: dict[type[FinetuneSettings], str] = {
    FinetuneClassifySettings: "One class per image: FOLDER/CLASS/7.jpg, with or without train/, val/ and test/ above.",
    FinetuneSegmentSettings: "One class per pixel: FOLDER/images/7.jpg with FOLDER/masks/7.png, whose values are class "
    "numbers.",
    FinetuneDepthSettings: "Metres at each pixel: FOLDER/images/7.jpg with FOLDER/depths/7.png, 16 bits, in "
    "millimetres.",
}
for _settings, _help in TASKS.items():
    _command = common.with_settings(partial(_finetune, _settings), TUNING_OPTIONS, _settings, cores=None, workers=None)
    finetune_app.command(_settings.task, cls=common.Command, help=_help)(_command)
