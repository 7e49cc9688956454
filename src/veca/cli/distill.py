"""`veca distill`: train a VECA from a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import err, out, print_path, register_timm_models, resumable_run
from veca.cli.options import Changes, Device, Overwrite
from veca.errors import ArgumentError, needs_extra


def distill_command(
    recipe: Annotated[Path, typer.Argument(help="A recipe, as recipes/small-stage1.yaml.")],
    to: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the run.", show_default="runs/RECIPE")
    ] = None,
    changes: Changes = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
    wandb: Annotated[str | None, typer.Option(help="Weights & Biases project to log to.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and exit; nothing is loaded.")] = False,
    images: Annotated[
        int | None, typer.Option(help="With --dry-run: number of images, instead of counting them.")
    ] = None,
    processes: Annotated[int, typer.Option(help="With --dry-run: processes that torchrun will start.")] = 1,
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
    register_timm_models(settings.teacher.name)
    folder = to or Path("runs") / recipe.stem
    if dry_run:
        out.print(show_plan(settings, images, processes))
        return
    if images is not None or processes != 1:
        raise ArgumentError("--images and --processes are for --dry-run; a run counts its own: leave them out")
    with resumable_run(folder, log, overwrite):
        report = distill(settings, folder, device=device, restart=overwrite, wandb=wandb, say=log)
    if report is not None:
        print_path("Report", report)


def log(text: str) -> None:
    err.print(text, soft_wrap=True)
