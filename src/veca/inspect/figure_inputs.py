"""Inputs of figures: images, and checked budgets, layers, cores and patches; running the model.

Layers, cores and patches are numbered from 1, as in the figures; patches by row and column from the top left.
"""

from __future__ import annotations

import operator
import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from veca.config import is_budget, size_name
from veca.errors import ArgumentError, NonFiniteError
from veca.images import Fit, Source, fit_image, normalize, open_image, to_tensor
from veca.model import Veca
from veca.report.charts import shorten_middle
from veca.utils.text import origin, printable

PathLike: TypeAlias = str | os.PathLike[str]
ImageSources: TypeAlias = Source | Sequence[Source]
FeatureFunction: TypeAlias = Callable[[Tensor, tuple[int, int]], tuple[Tensor, Tensor]]
"""Images (B, 3, height, width), normalised as for VECA, and a grid → global feature (B, D) and patches (B, N, D).

The teachers of `veca.teachers` have this signature."""
ProgressCallback: TypeAlias = Callable[[str], None]
MAX_NAME_LENGTH = 28


def ignore_progress(text: str) -> None:
    """The default progress callback."""


class Photo(NamedTuple):
    name: str
    image: Image.Image
    """Resized for the model."""

    @property
    def aspect(self) -> float:
        """Height over width."""
        return self.image.height / self.image.width

    def grid(self, model: Veca) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image.height // model.config.patch_size, self.image.width // model.config.patch_size

    def batch(self, model: Veca) -> Tensor:
        """(1, 3, height, width), normalised, on the model's device."""
        return normalize(to_tensor(self.image))[None].to(model.norm.weight.device)


def open_photos(images: ImageSources, size: int, fit: Fit = "crop") -> list[Photo]:
    """Open one or several images and resize them to `size`."""
    sources = images if isinstance(images, list | tuple) else [images]
    if not sources:
        raise ArgumentError("no picture given; name at least one")
    photos = []
    for i, source in enumerate(sources):
        is_path = isinstance(source, str | os.PathLike)
        name = printable(Path(os.fsdecode(source)).name) if is_path else f"picture {i + 1}"
        photos.append(Photo(shorten_middle(name, MAX_NAME_LENGTH), fit_image(open_image(source), size, fit)))
    return photos


@contextmanager
def inspecting(model: Veca) -> Iterator[None]:
    """Eval mode without gradients; afterwards the model is in its former mode again."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


def check_finite(model: Veca, *outputs: Tensor) -> None:
    """Raise `NonFiniteError` if an output of `model` is not finite, saying whether its weights are."""
    if all(output.isfinite().all() for output in outputs):
        return
    # Tell broken weights from overflow: the way out differs.
    weights = dict(model.named_parameters())
    broken = [name for name, weight in weights.items() if not weight.isfinite().all()]
    reason = f", though its weights are: its numbers overflow in {model.norm.weight.dtype}; load it in float32"
    if broken:
        count = f"{len(broken)} of its {len(weights)} weight tensors"
        reason = f": {count} hold NaN or infinity, the first {broken[0]}; load another checkpoint"
    raise NonFiniteError(f"the model's features are not finite{reason}")


def features_at_budget(model: Veca, budget: int) -> FeatureFunction:
    def features(images: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        out = Veca.forward(model, images, budget)  # subclasses, as timm's, return something else when called
        check_finite(model, out.cls, out.patches)
        return out.cls, out.patches

    return features


def photo_features(model: Veca, features: FeatureFunction, photo: Photo) -> tuple[Tensor, Tensor]:
    """Of one photo, float32 on the CPU: the global feature (D) and the dense map (rows, columns, D)."""
    grid = photo.grid(model)
    with inspecting(model):
        cls, patches = features(photo.batch(model), grid)
    return cls[0].float().cpu(), patches[0].float().cpu().unflatten(0, grid)


def model_label(model: Veca, name: str | None) -> str:
    return printable(name) if name else size_name(model.config) or "VECA"


class Heading(NamedTuple):
    title: str
    text: str
    notice: str
    """What a reader must know about the weights, if anything."""


def figure_texts(kind: str) -> dict[str, Any]:
    return tomllib.loads((files("veca.inspect") / "figures.toml").read_text("utf-8"))[kind]


def make_heading(kind: str, model: Veca, name: str | None, **values: object) -> Heading:
    """The heading of a figure, `values` filled into its texts."""
    label, notice, texts = model_label(model, name), origin(model.provenance), figure_texts(kind)
    if model.provenance.get("weights") == "random":
        notice = f"{label} has {notice}: this shows how it works, not what a trained model sees."
    elif notice:
        notice = f"{label}: {notice}."
    values["model"] = label
    return Heading(texts["title"].format_map(values), texts["text"].format_map(values), notice)


def travelled(paths: Tensor) -> Tensor:
    """Distance of each core from its start to its end, (C), in sides of the image; paths (L, C, 2) in [-1, 1]."""
    return (paths[-1] - paths[0]).norm(dim=-1) / 2


def path_scale(longest: float) -> int:
    """How many times as long paths are drawn, so that even short ones can be seen."""
    return next((factor for factor in (200, 100, 50, 20, 10, 5, 2) if factor * longest <= 0.1), 1)


def cores_label(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def choose_budget(model: Veca, cores: int | None) -> int:
    """A budget of the model; None: all its cores."""
    num_cores = model.config.num_cores
    # Any number of cores works; only those in `config.budgets` were trained.
    budget = num_cores if cores is None else cores
    if not is_budget(budget, num_cores):
        raise ArgumentError(f"cores={budget!r}; a budget is an integer from 1 to {num_cores}")
    return operator.index(budget)


def choose_budgets(model: Veca, budgets: Sequence[int] | None, default: Sequence[int]) -> list[int]:
    """In ascending order, each once."""
    return sorted({choose_budget(model, budget) for budget in _given_or_default(budgets, default, "budget")})


def choose_layers(model: Veca, layers: Sequence[int] | None, default: Sequence[int]) -> list[int]:
    depth = len(model.blocks)
    numbers = _given_or_default(layers, default, "layer")
    return _check_numbers("layer", numbers, depth, f"the model has layers 1 to {depth}")


def choose_cores(which: Sequence[int] | None, budget: int) -> list[int]:
    """Numbers of cores that are active at a budget; None: the first six."""
    rule = f"with a budget of {budget}, cores are numbered 1 to {budget}: choose one of these, or raise the budget"
    return _check_numbers("core", _given_or_default(which, range(1, min(6, budget) + 1), "core"), budget, rule)


def _check_numbers(what: str, numbers: Sequence[int], largest: int, rule: str) -> list[int]:
    """The numbers, each once, in the given order."""
    for number in numbers:
        if not 1 <= operator.index(number) <= largest:
            raise ArgumentError(f"{what} {number}: {rule}")
    return list(dict.fromkeys(numbers))


def choose_patch(patch: tuple[int, int], grid: tuple[int, int], name: str) -> tuple[int, int]:
    """(row, column) of a patch of the grid."""
    if len(patch) != 2 or not all(1 <= number <= side for number, side in zip(patch, grid, strict=True)):
        rule = f"whose rows are numbered 1 to {grid[0]} and columns 1 to {grid[1]}: name a patch within these"
        raise ArgumentError(f"patch {','.join(map(str, patch))} is outside the grid of {name}, {rule}")
    return patch


def pick_evenly(values: Sequence[int], count: int) -> list[int]:
    """`count` of the values, evenly spaced from the first to the last; all if there are no more.

    >>> pick_evenly(range(2, 13), 6), pick_evenly([8, 16], 4)
    ([2, 4, 6, 8, 10, 12], [8, 16])
    """
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _given_or_default(values: Sequence[int] | None, default: Sequence[int], what: str) -> Sequence[int]:
    chosen = default if values is None else values
    if not chosen:
        raise ArgumentError(f"asked for no {what}; name at least one")
    return chosen
