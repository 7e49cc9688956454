"""`veca distill`, `veca finetune` and `veca report`: training, and the pages of runs and probes."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from veca.cli import common
from veca.cli import options as opt
from veca.cli.common import err, out, print_path, resumable_run, warn
from veca.errors import ArgumentError, needs_extra
from veca.train.finetune.settings import FinetuneClassifySettings, FinetuneSegmentSettings, HeadStart

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
    "cores": opt.Budgets,
    "epochs": Annotated[float, opt.option("finetune.epochs")],
    "batch": opt.TrainBatchSize,
    "rate": Annotated[float, opt.option("finetune.rate")],
    "layer_decay": Annotated[float, opt.option("finetune.layer-decay")],
    "head": Annotated[HeadStart, opt.option("finetune.head")],
    "workers": opt.Workers,
    "skip_bad": opt.SkipBad,
}


def _finetune(
    kind: type[FinetuneClassifySettings | FinetuneSegmentSettings], data: opt.Data, to: TunedOut,
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


TASKS: dict[type[FinetuneClassifySettings | FinetuneSegmentSettings], str] = {
    FinetuneClassifySettings: "One class per image: FOLDER/CLASS/7.jpg, with or without train/, val/ and test/ above.",
    FinetuneSegmentSettings: "One class per pixel: FOLDER/images/7.jpg with FOLDER/masks/7.png, whose values are class "
    "numbers.",
}
for _settings, _help in TASKS.items():
    _command = common.with_settings(partial(_finetune, _settings), TUNING_OPTIONS, _settings, cores=None, workers=None)
    finetune_app.command(_settings.task, cls=common.Command, help=_help)(_command)


def distill_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe, as recipes/small-stage1.yaml.")],
    to: Annotated[Path | None, opt.option("distill.out")] = None,
    changes: opt.Changes = None,
    device: opt.Device = "auto",
    overwrite: opt.Overwrite = False,
    wandb: Annotated[str | None, opt.option("distill.wandb")] = None,
    dry_run: Annotated[bool, opt.option("distill.dry-run")] = False,
    images: Annotated[int | None, opt.option("distill.images")] = None,
    processes: Annotated[int, opt.option("distill.processes")] = 1,
) -> None:
    """Train a VECA to reproduce its teacher's features, as a recipe says.

    Example: veca distill recipes/quick.yaml --set data.train=photos/ --set data.validation=others/

    Several GPUs or machines: torchrun --nproc-per-node=gpu -m veca distill …

    Interrupted or killed? Run the same command again: it continues, and the result is the same.
    """
    with needs_extra("training needs", "train"):
        from veca.train.distill import distill
        from veca.train.plan import show_plan
        from veca.train.recipe import load_recipe

    settings = load_recipe(recipe, changes or [])
    common.register_timm_models(settings.teacher.name)
    folder = to or Path("runs") / recipe.stem
    if dry_run:
        out.print(show_plan(settings, images, processes))
        return
    if images is not None or processes != 1:
        raise ArgumentError("--images and --processes are for --dry-run; a run counts its own: leave them out")
    log = partial(err.print, soft_wrap=True)
    with resumable_run(folder, log, overwrite):
        report = distill(settings, folder, device=device, restart=overwrite, wandb=wandb, say=log)
    if report is not None:
        print_path("Report", report)


def report_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or of probes, as runs/small-stage1 or results.")],
) -> None:
    """Write report.html again from what `veca distill`, `veca finetune` or `veca probe` left in a folder.

    For probes also report.md, rows.csv and the curves.
    """
    from veca.probe.results import is_results_folder
    from veca.train.logger import is_finetune_run, is_run

    tuned, results = is_finetune_run(folder), is_results_folder(folder)
    run = is_run(folder) and not tuned
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is not a folder; name one that `veca distill` or `veca probe` wrote to")
    if run and results:
        raise ArgumentError(f"{folder} holds a run of `veca distill` and rows of `veca probe`: move rows/ elsewhere")
    if not (run or results or tuned):
        raise ArgumentError(
            f"{folder} is neither the folder of a run of `veca distill`, which has a recipe.yaml, nor of results of "
            "`veca probe`, which has rows/, nor of `veca finetune`, which has a finetune.json: name one of these"
        )
    if results and not tuned:
        from veca.probe.report import write_probe_report

        path, left_out = write_probe_report(folder)
        for problem in left_out:
            warn(f"left out: {problem}")
    else:
        with needs_extra("reports need", "train"):
            from veca.train.report import write_distill_report, write_finetune_report
        path = write_finetune_report(folder) if tuned else write_distill_report(folder)
    print_path("Report", path)
