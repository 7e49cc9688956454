"""What a figure is of: the model as it is looked at, the pictures, and what was chosen to be shown, checked.

Layers, cores and patches are numbered from 1, as in the pictures; patches by row and column from the top left.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from veca.config import is_budget, size_name
from veca.errors import ArgumentError, NonFiniteError
from veca.images import Fit, Source, fit_image, normalize, open_image, to_tensor
from veca.model import Veca
from veca.utils.text import origin, printable

Pictures: TypeAlias = Source | Sequence[Source]
Backbone: TypeAlias = Callable[[Tensor, tuple[int, int]], tuple[Tensor, Tensor]]
"""Images (B, 3, height, width) as VECA sees them, and a grid → global feature (B, D) and patches (B, N, D) on it.

The teachers of `veca.teachers` are such."""
Say: TypeAlias = Callable[[str], None]
LONGEST_NAME = 28


def quiet(text: str) -> None:
    """Says nothing."""


class Photo(NamedTuple):
    name: str
    picture: Image.Image
    """As the model is given it."""

    @property
    def tensor(self) -> Tensor:
        """(1, 3, height, width), normalised."""
        return normalize(to_tensor(self.picture))[None]

    @property
    def aspect(self) -> float:
        """Height over width."""
        return self.picture.height / self.picture.width


def open_photos(pictures: Pictures, size: int, fit: Fit = "crop") -> list[Photo]:
    """Pictures through the one door of `veca.images`, fitted to `size`."""
    several = pictures if isinstance(pictures, list | tuple) else [pictures]
    if not several:
        raise ArgumentError("no picture given; name at least one")
    return [Photo(_name(each, i), fit_image(open_image(each), size, fit)) for i, each in enumerate(several)]


def _name(source: object, i: int) -> str:
    if not isinstance(source, str | os.PathLike):
        return f"picture {i + 1}"
    name = printable(Path(os.fsdecode(source)).name)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 8]}…{name[-7:]}"


@contextmanager
def inspecting(model: Veca) -> Iterator[None]:
    """The model in eval mode and without gradients; afterwards it is as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


def check_finite(model: Veca, *outputs: Tensor) -> None:
    """Raises `NonFiniteError` where something that `model` gave is not finite, and says whether its weights are."""
    if all(output.isfinite().all() for output in outputs):
        return
    weights = list(model.named_parameters())
    broken = [name for name, weight in weights if not weight.isfinite().all()]
    if broken:
        raise NonFiniteError(
            f"the model's features are not finite: {len(broken)} of its {len(weights)} weight tensors hold NaN or "
            f"infinity, the first {broken[0]}; load another checkpoint"
        )
    raise NonFiniteError(
        f"the model's features are not finite, though its weights are: its numbers overflow in "
        f"{model.norm.weight.dtype}; load it in float32"
    )


def input_of(model: Veca, photo: Photo) -> Tensor:
    return photo.tensor.to(model.norm.weight.device)


def veca_at(model: Veca, budget: int) -> Backbone:
    def features(images: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        found = Veca.forward(model, images, budget)  # whatever a subclass makes of a call
        check_finite(model, found.cls, found.patches)
        return found.cls, found.patches

    return features


def features_of(model: Veca, backbone: Backbone, photo: Photo) -> tuple[Tensor, Tensor]:
    """Of one photo, float32 on the CPU: the global feature (D) and the dense map (rows, columns, D)."""
    side = model.config.patch_size
    grid = (photo.picture.height // side, photo.picture.width // side)
    with inspecting(model):
        cls, patches = backbone(input_of(model, photo), grid)
    return cls[0].float().cpu(), patches[0].float().cpu().unflatten(0, grid)


def layer_label(model: Veca, number: int) -> str:
    return f"layer {number} of {len(model.blocks)}"


def model_label(model: Veca, name: str | None) -> str:
    return printable(name) if name else size_name(model.config) or "VECA"


def notice_of(model: Veca, name: str | None) -> str:
    """What must be said of the weights, if anything."""
    label, told = model_label(model, name), origin(model.provenance)
    if model.provenance.get("weights") == "random":
        return f"{label} has {told}: this shows how it works, not what a trained model sees."
    return f"{label}: {told}." if told else ""


def cores_label(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def choose_budget(model: Veca, cores: int | None) -> int:
    """A budget of the model; None: all its cores."""
    most = model.config.num_cores
    budget = most if cores is None else cores
    if not is_budget(budget, most):
        raise ArgumentError(f"cores={budget!r}; a budget is an integer from 1 to {most}")
    return operator.index(budget)


def choose_budgets(model: Veca, budgets: Sequence[int] | None, default: Sequence[int]) -> list[int]:
    """In ascending order, each once."""
    return sorted({choose_budget(model, budget) for budget in _some(budgets, default, "budget")})


def choose_layers(model: Veca, layers: Sequence[int] | None, default: Sequence[int]) -> list[int]:
    depth = len(model.blocks)
    return _numbers("layer", _some(layers, default, "layer"), depth, f"the model has layers 1 to {depth}")


def choose_cores(which: Sequence[int] | None, budget: int, default: int = 6) -> list[int]:
    """Numbers of cores that take part at a budget; None: the first `default`."""
    first = range(1, min(default, budget) + 1)
    rule = f"with a budget of {budget}, cores are numbered 1 to {budget}: choose one of these, or raise the budget"
    return _numbers("core", _some(which, first, "core"), budget, rule)


def choose_patch(place: tuple[int, int], grid: tuple[int, int], name: str) -> tuple[int, int]:
    """(row, column) of a patch of the grid."""
    if len(place) != 2 or not all(1 <= number <= most for number, most in zip(place, grid, strict=True)):
        raise ArgumentError(
            f"patch {','.join(map(str, place))} is outside the grid of {name}, whose rows are numbered 1 to {grid[0]} "
            f"and columns 1 to {grid[1]}: name a patch as ROW,COLUMN within these"
        )
    return place


def spread(values: Sequence[int], count: int) -> list[int]:
    """`count` of the values, evenly from the first to the last; all where there are no more.

    >>> spread(range(2, 13), 6), spread([8, 16], 4)
    ([2, 4, 6, 8, 10, 12], [8, 16])
    """
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _some(values: Sequence[int] | None, default: Sequence[int], what: str) -> Sequence[int]:
    chosen = default if values is None else values
    if not chosen:
        raise ArgumentError(f"asked for no {what}; name at least one")
    return chosen


def _numbers(what: str, numbers: Sequence[int], most: int, rule: str) -> list[int]:
    for number in numbers:
        if not 1 <= operator.index(number) <= most:
            raise ArgumentError(f"{what} {number}: {rule}")
    return list(dict.fromkeys(numbers))
