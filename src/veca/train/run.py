"""A run as a whole: what `veca distill` calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Group

from veca.config import get_config
from veca.train.data import Pictures
from veca.train.loop import Trainer
from veca.train.parallel import processes
from veca.train.plan import describe_plan
from veca.train.recipe import Recipe


def distill(
    recipe: Recipe,
    folder: Path,
    *,
    device: str = "auto",
    restart: bool = False,
    wandb: str | None = None,
    say: Callable[[str], None] = print,
) -> Path | None:
    """Train as the recipe says and leave everything in `folder`; the path of its report, in the first process.

    What the folder holds of the same run is continued, unless it is to `restart`.
    """
    with processes(device) as world:
        report = Trainer(recipe, folder, world, restart=restart, wandb=wandb, say=say).run()
        return report if world.first else None


def show_plan(recipe: Recipe) -> Group:
    """What a run of the recipe would be. Its pictures are counted, where there are any; nothing is written."""
    pictures = len(Pictures.find(recipe.data.train)) if recipe.data.train else None
    return describe_plan(recipe, get_config(recipe.model.size, **recipe.model.overrides), pictures)
