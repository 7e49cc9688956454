"""A run as a whole: what `veca distill` calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Group
from rich.text import Text

from veca.config import VecaConfig, get_config
from veca.data.loader import DataError, Pictures
from veca.teachers.load import KNOWN_TEACHERS as KNOWN
from veca.train.loop import Trainer
from veca.train.parallel import processes, run_folder
from veca.train.plan import describe_plan
from veca.train.recipe import Recipe, RecipeError
from veca.utils.console import as_message
from veca.utils.text import quoted


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
    with processes(device) as world, run_folder(folder, world):
        report = Trainer(recipe, folder, world, restart=restart, wandb=wandb, say=say).run()
        return report if world.first else None


def show_plan(recipe: Recipe, pictures: int | None = None, processes: int = 1) -> Group:
    """What a run of the recipe would be, on so many pictures, or on those that are there. Nothing is loaded or written.

    A recipe whose pictures are not there yet has a plan too: with a note that says why they are not counted.
    """
    if not 1 <= processes < 2**63 or (pictures is not None and not 1 <= pictures < 2**63):
        asked = f"processes={quoted(processes)}, pictures={quoted(pictures)}"
        raise RecipeError(f"{asked}: a plan is for at least 1 of each, and fewer than 2^63")
    note = ""
    if pictures is None:
        try:
            pictures = len(Pictures.find(recipe.data.train))
        except DataError as error:
            note = f"data.train: {error}"
    teacher = KNOWN.get(recipe.teacher.name, {})
    config = get_config(recipe.model.size, **recipe.model.overrides)
    if teacher and config.output_dim is None and config.embed_dim != teacher["width"]:
        config = VecaConfig.from_dict({**config.to_dict(), "output_dim": teacher["width"]})
    plan = describe_plan(recipe, config, pictures, world_size=processes, teacher=teacher)
    return Group(plan, Text(as_message(note), style="yellow")) if note else plan
