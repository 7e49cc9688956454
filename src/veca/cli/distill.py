"""`veca distill`: train a VECA from a teacher."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from veca.cli import common
from veca.cli import options as opt
from veca.cli.common import err, out, print_path, resumable_run
from veca.errors import ArgumentError, needs_extra


def distill_command(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe, as recipes/small-stage1.yaml.")] = None,
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
        from veca.train.recipe import describe_recipes, list_recipes, load_recipe

    if recipe is None:
        raise ArgumentError(f"name a recipe: veca distill recipes/quick.yaml. {describe_recipes(list_recipes(Path()))}")
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
