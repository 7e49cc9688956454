"""Checks of a model's arguments: images, core budget, MLP width, block indices."""

import numbers
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from veca.config import VecaConfig
from veca.errors import ArgumentError, warn_caller


def nearest_sizes(height: float, width: float, patch: int = 16) -> tuple[int, int]:
    """The multiples of `patch` nearest to a size; ties go up, and nothing becomes 0.

    >>> nearest_sizes(250, 333)
    (256, 336)
    """
    rows, columns = (max(1, int(side / patch + 0.5)) * patch for side in (height, width))
    return rows, columns


def patch_grid(images: Tensor, config: VecaConfig) -> tuple[int, int]:
    """(rows, columns) of the patches of `images`, which must be float (B, in_chans, height, width)."""
    channels, patch = config.in_chans, config.patch_size
    if not isinstance(images, Tensor):
        raise TypeError(
            f"images are {type(images).__name__}; expected a tensor (batch, {channels}, height, width). "
            "veca.images.load_image opens an image, torch.stack makes a batch of several"
        )
    if images.ndim != 4 or images.shape[1] != channels:
        shape, hint = tuple(images.shape), ""
        if len(shape) == 3 and shape[0] == channels:
            hint = ": images[None] makes a batch of one"
        elif len(shape) in (3, 4) and shape[-1] == channels:
            hint = f": images{'[None]' * (len(shape) == 3)}.permute(0, 3, 1, 2) puts channels first"
        raise ArgumentError(f"images have shape {shape}; expected (batch, {channels}, height, width){hint}")
    if not images.is_floating_point():
        raise ArgumentError(f"images are {images.dtype}; make them float with veca.images.normalize(images)")
    height, width = images.shape[-2:]
    if height % patch or width % patch or not height or not width:
        nearest = "×".join(map(str, nearest_sizes(height, width, patch)))
        raise ArgumentError(
            f"image is {height}×{width}; sides must be multiples of {patch}. Nearest: {nearest}. "
            "veca.images.resize_to_multiple or veca.images.pad_to_multiple gets there"
        )
    return height // patch, width // patch


def resolve_budget(cores: int | None, config: VecaConfig, warned: set[str]) -> int:
    """The budget that `cores` names (None: all). An untrained one warns, once for each set `warned`."""
    limit = config.num_cores
    budget = limit if cores is None else cores
    # A traced budget is a symbol, which `operator.index` would specialise to one value.
    traced = torch.compiler.is_compiling()
    if isinstance(budget, bool) or not (traced or hasattr(budget, "__index__")):
        raise TypeError(f"cores={cores!r}; a budget is an integer from 1 to {limit}, or None for all {limit}")
    budget = budget if traced else operator.index(budget)
    if not 1 <= budget <= limit:
        raise ArgumentError(f"cores={cores}; a budget is an integer from 1 to {limit}, or None for all {limit}")
    if not traced and budget not in config.budgets:
        _warn_untrained(f"cores={budget}", config.budgets, warned)
    return budget


def resolve_width(width: float | None, config: VecaConfig, warned: set[str]) -> int | None:
    """Channels of the MLP that patches use at `width`; None: all. An untrained width warns, once for each set `warned`.

    A width is trained if one of `config.widths` has the same channels.
    """
    if width is None:
        return None
    number = not isinstance(width, bool) and isinstance(width, numbers.Real)
    if not number or not 0 < width <= 1:
        raise ArgumentError(
            f"width={width!r}; a width is a number above 0, at most 1: the share of the MLP for patches"
        )
    hidden = config.hidden_width(width)
    trained = {config.hidden_width(each) for each in config.widths}
    if not torch.compiler.is_compiling() and hidden not in trained:
        _warn_untrained(f"width={width:g}", config.widths, warned)
    return hidden if hidden < config.mlp_dim else None


def _warn_untrained(setting: str, trained: Iterable[float], warned: set[str]) -> None:
    if setting not in warned:
        warned.add(setting)
        numbers = ", ".join(f"{each:g}" for each in trained)
        warn_caller(f"{setting} was not trained (trained: {numbers}); expect lesser features")


def resolve_block_indices(indices: int | Sequence[int] | None, depth: int) -> list[int]:
    """Block numbers from 0: of the last `indices` blocks, of those listed (negative: from the end), or of all."""
    if indices is None:
        return list(range(depth))
    if not isinstance(indices, Iterable):
        if not 1 <= operator.index(indices) <= depth:
            raise ArgumentError(f"asked for the last {indices} blocks; the model has {depth}")
        return list(range(depth - indices, depth))
    indices = list(map(operator.index, indices))
    for i in indices:
        if not -depth <= i < depth:
            raise ArgumentError(f"asked for block {i}; the model has blocks 0 to {depth - 1}")
    if not indices:
        raise ArgumentError("asked for no block; name at least one")
    return [i % depth for i in indices]
