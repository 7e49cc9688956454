"""What a run starts from: its teacher, its student, its pictures, and the run it may be the rest of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import veca
from veca.config import VecaConfig, get_config
from veca.data.loader import Pictures
from veca.model import Veca
from veca.teachers import Standardized, Teacher, load_teacher, output_dim_for, start_patch_embed
from veca.train.parallel import World, gathered
from veca.train.recipe import Recipe, RecipeError

_FREE = (
    *(
        "data.train",
        "data.validation",
        "data.workers",
        "data.augment_on",
        "grad_checkpointing",
        "log_every",
        "checkpoints",
        "validation",
        "compile",
        "teacher.micro_batch",
    ),
    *("teacher.cache", "teacher.cache_gb", "schedule", "precision", "parallel", "batch"),
)
"""Keys of a recipe that a run which continues may change. Pictures may have moved, but must be the same; so must the
batch of all processes together."""


def make_teacher(recipe: Recipe) -> Teacher | Standardized:
    asked = recipe.teacher
    teacher = load_teacher(asked.name, asked.meet, asked.trust_remote_code)
    teacher.glance = asked.glance
    wanted = teacher.raw if asked.standardize is None else asked.standardize
    return Standardized(teacher) if wanted else teacher


def make_student(recipe: Recipe, teacher: Teacher | Standardized) -> Veca:
    """New weights, always the same for a seed, or those the recipe starts from."""
    config = get_config(recipe.model.size, **recipe.model.overrides)
    config = VecaConfig.from_dict({**config.to_dict(), "output_dim": output_dim_for(config, teacher)})
    if recipe.model.start is not None:
        model = veca.load(recipe.model.start)
        ours, theirs = config.to_dict(), model.config.to_dict()
        if different := [f"{key}: {theirs[key]}, not {ours[key]}" for key in ours if ours[key] != theirs[key]]:
            raise RecipeError(f"model.start={recipe.model.start} is another model ({'; '.join(different)})")
        return model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Veca(config)
    if recipe.model.patch_embed_from_teacher:
        start_patch_embed(model, teacher)
    return model.train()


def check_start(recipe: Recipe, folder: Path) -> None:
    """Weights to start from are not where the run will write its own."""
    if recipe.model.start is None or not (start := Path(recipe.model.start)).exists():
        return
    place, folder = (start if start.is_dir() else start.parent).resolve(), folder.resolve()
    if place in (folder, folder / "best") or place.parent == folder / "checkpoints":
        raise RecipeError(f"model.start={start} is in {folder}, where it would be written over: take another --out")


def find_pictures(recipe: Recipe, folder: Path, world: World) -> tuple[Pictures, Pictures | None]:
    """Training and validation pictures; the first process makes the index, the others read it."""
    if not recipe.data.train:
        raise RecipeError("data.train: no pictures to train on; name folders, globs or tar shards")

    def find() -> tuple[Pictures, Pictures | None]:
        train = Pictures.find(recipe.data.train, folder / "train.index", progress=world.first)
        if not recipe.data.validation:
            return train, None
        return train, Pictures.find(recipe.data.validation, folder / "validation.index", progress=world.first)

    folder.mkdir(parents=True, exist_ok=True)
    found = find() if world.first else None
    gathered(None, world)
    return found or find()


def check_recipe(facts: Mapping[str, Any], recipe: Recipe, folder: Path) -> None:
    """A run goes on with the recipe it began with, but for what does not change what it learns."""
    if "recipe" not in facts:
        raise RecipeError(f"{folder} holds a run of `veca finetune`: take another --out")
    different = [
        f"{key}: {before!r}, now {now!r}"
        for key, before, now in _differences(facts["recipe"], recipe.to_dict())
        if not any(key == free or key.startswith((f"{free}.", f"{free}[")) for free in _FREE)
    ]
    if different:
        raise RecipeError(
            f"{folder} holds a run of another recipe ({'; '.join(different)}). "
            "Take another --out, or --overwrite to begin anew in it"
        )


def check_data(facts: Mapping[str, Any], pictures: Pictures, recipe: Recipe, world: World, folder: Path) -> None:
    """A run goes on with the pictures, and as many at a time, as it has had so far."""
    if facts["pictures"] != pictures.fingerprint:
        raise RecipeError(
            f"data.train: these are not the pictures that {folder} was trained with so far. Bring those back, "
            f"or begin anew: --overwrite, or another --out with model.start={folder}/best"
        )
    batch, before = recipe.batch * world.size, facts["batch"]
    if before != batch:
        raise RecipeError(
            f"batch={recipe.batch} × {world.size} processes: the run has had {before} pictures per "
            f"forward pass. Set batch={before / world.size:g} to go on"
        )


def _differences(old: Any, new: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        old, new = ({str(k): v for k, v in side.items()} for side in (old, new))  # JSON makes keys text
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _differences(a, b, f"{where}[{i}]")
    elif old != new:
        yield where, old, new
