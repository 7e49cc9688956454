"""The output layer of a student: its width, what becomes of it when teachers change, a teacher's classifier on it.

The features that a student learned from several teachers lie side by side, in the order of the recipe.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from veca.checkpoint.format import read_safetensors, write_tensors
from veca.config import VecaConfig
from veca.errors import ArgumentError
from veca.model import Veca, init_layer
from veca.teachers.protocol import AnyTeacher, Standardized, Teacher, TeacherError, TeacherGroup
from veca.utils.files import atomic_path

CLASSIFIER = "classifier.safetensors"
"""Of a teacher, in the folder of a run that learned from its logits."""


def output_dim_for(config: VecaConfig, teacher: AnyTeacher) -> int | None:
    """The student's `output_dim`: the teacher's width if it is not the student's own or that of several, else None."""
    width = teacher.width
    if config.output_dim not in (None, width):
        raise TeacherError(f"output_dim={config.output_dim}: {teacher.name} is {width} wide; leave output_dim out")
    own = config.embed_dim == width and not isinstance(teacher, TeacherGroup)
    return config.output_dim if own else width


@torch.no_grad()
def replace_output(model: Veca, output_dim: int | None, first: Teacher | Standardized, seed: int = 0) -> None:
    """Give a model another output, for other teachers; of a first one that it has learned from already, rows are kept.

    New rows follow from the seed.
    """
    old, learned = model.output_proj, _learned_from(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new: nn.Linear | nn.Identity = nn.Linear(model.embed_dim, output_dim) if output_dim else nn.Identity()
        init_layer(new)
    known = bool(learned) and (learned[0].get("name"), learned[0].get("width")) == (first.name, first.width)
    if known and isinstance(old, nn.Linear) and isinstance(new, nn.Linear):
        new.weight[: first.width] = old.weight[: first.width]
        new.bias[: first.width] = old.bias[: first.width]
    _set_output(model, new, output_dim)


@torch.no_grad()
def keep_output(model: Veca, teacher: str) -> None:
    """Keep the features that a model learned from one of its teachers, by name, and drop the others'.

    "none" drops the output layer: features are then the backbone's own, `config.embed_dim` wide.
    """
    learned, layer = _learned_from(model), model.output_proj
    names = [str(about.get("name")) for about in learned]
    if teacher == "none":
        _set_output(model, nn.Identity(), None)
        return
    if teacher not in names:
        raise ArgumentError(
            f"no output for {teacher!r}: the model learned from {', '.join(names) or 'none'}; or 'none'"
        )
    widths = [int(about["width"]) for about in learned]
    if not isinstance(layer, nn.Linear) or layer.out_features != sum(widths):
        raise ArgumentError(
            f"the model has {model.num_features} output channels, its teachers {widths}: nothing to keep"
        )
    place = names.index(teacher)
    rows = slice(sum(widths[:place]), sum(widths[: place + 1]))
    new = nn.Linear(model.embed_dim, widths[place], device=layer.weight.device, dtype=layer.weight.dtype)
    new.weight.copy_(layer.weight[rows])
    new.bias.copy_(layer.bias[rows])
    _set_output(model, new, widths[place])
    model.provenance = {**model.provenance, "output": teacher}


def write_classifier(path: Path, weight: Tensor, bias: Tensor, teacher: str, classes: Sequence[str]) -> None:
    """Write a classifier (K, D) on the features that a model learned from a teacher, with the names of its classes."""
    about = json.dumps({"teacher": teacher, "classes": list(classes)})
    with atomic_path(path) as part:
        write_tensors(part, {"weight": weight.cpu().contiguous(), "bias": bias.cpu()}, {"classifier": about})


@torch.no_grad()
def attach_classifier(model: Veca, path: Path) -> None:
    """Give a model the classifier of a teacher that it learned from, as `write_classifier` wrote it."""
    try:
        tensors, metadata = read_safetensors(path)
        weight, bias, about = tensors["weight"], tensors["bias"], json.loads(metadata["classifier"])
        teacher, classes = str(about["teacher"]), [str(name) for name in about["classes"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path} is no classifier that `veca distill` left: {error}") from error
    learned = _learned_from(model)
    names, widths = [str(each.get("name")) for each in learned], [int(each.get("width", 0)) for each in learned]
    if teacher not in names or widths[names.index(teacher)] != weight.shape[1] or sum(widths) != model.num_features:
        raise ArgumentError(f"{path} needs the features learned from {teacher}, which the model has not")
    first = sum(widths[: names.index(teacher)])
    model.reset_classifier(len(weight))
    assert isinstance(model.head, nn.Linear)
    model.head.weight.zero_()  # other teachers' features do not count
    model.head.weight[:, first : first + weight.shape[1]] = weight
    model.head.bias.copy_(bias)
    model.provenance = {**model.provenance, "classes": classes} if classes else model.provenance


def _learned_from(model: Veca) -> list[dict[str, Any]]:
    """What provenance says of each teacher that the output has rows for; empty: nothing."""
    about = model.provenance.get("teacher")
    if not isinstance(about, dict):
        return []
    learned: list[dict[str, Any]] = about.get("teachers", [about])
    kept = model.provenance.get("output")
    return [each for each in learned if each.get("name") == kept] if kept else learned


def _set_output(model: Veca, layer: nn.Linear | nn.Identity, output_dim: int | None) -> None:
    if model.config.num_classes:
        raise ArgumentError("the model has a classifier on its output; change the output before it gets one")
    model.output_proj = layer
    model.config = dataclasses.replace(model.config, output_dim=output_dim)
    model.num_features = model.config.num_features
