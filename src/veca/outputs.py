"""What a forward pass returns.

Shapes: B images, C cores and N patches of an image, ΣC and ΣN of all images of a pack, D width, L blocks.
"""

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from veca.errors import ArgumentError

PatchGrid = tuple[int, int]
"""(rows, columns) of the patches of an image."""


class VecaOutput(NamedTuple):
    """Result of a forward pass. D is the output width: the model's, or `output_dim` where it has one.

    >>> import torch, veca
    >>> out = veca.create_model("veca_tiny").eval()(torch.zeros(1, 3, 64, 96), cores=16)
    >>> out.cores.shape, out.patches.shape, out.coordinates.shape, out.grid
    (torch.Size([1, 16, 192]), torch.Size([1, 24, 192]), torch.Size([12, 1, 16, 2]), (4, 6))
    """

    cores: Tensor
    """(B, C, D); the first is the global feature."""
    patches: Tensor
    """(B, N, D), row by row."""
    coordinates: Tensor
    """(L, B, C, 2): the (x, y) in [-1, 1] of each core in each block."""
    grid: tuple[int, int]
    """(rows, columns) of the patches."""
    logits: Tensor | None = None
    """(B, num_classes) when the model has a classifier."""

    @property
    def cls(self) -> Tensor:
        """(B, D): the global feature."""
        return self.cores[:, 0]

    @property
    def feature_map(self) -> Tensor:
        """(B, D, rows, columns): the patches as a map."""
        if not self.patches.shape[1]:
            raise ArgumentError("there are no patches here: the model ran with cls_only=True; leave it out to get them")
        return self.patches.mT.unflatten(-1, self.grid)


@dataclass(frozen=True)
class PackedOutput:
    """Result of a forward pass of a pack. D is the output width: the model's, or `output_dim` where it has one.

    >>> import torch, veca
    >>> model = veca.create_model("veca_tiny").eval()
    >>> out = model(veca.pack([torch.zeros(3, 64, 96), torch.zeros(3, 16, 32)]), cores=[64, 8])
    >>> out.cls.shape, [tuple(each.shape) for each in out.feature_maps]
    (torch.Size([2, 192]), [(192, 4, 6), (192, 1, 2)])
    """

    cores: Tensor
    """(ΣC, D): the cores of each image, in the order of the images; its first core is its global feature."""
    patches: Tensor
    """(ΣN, D): the patches of each image, row by row."""
    coordinates: Tensor
    """(L, ΣC, 2): the (x, y) in [-1, 1] of each core in each block."""
    grids: tuple[PatchGrid, ...]
    budgets: tuple[int, ...]
    """Number of cores of each image, as the model ran."""
    logits: Tensor | None = None
    """(B, num_classes) when the model has a classifier."""
    cls_only: bool = field(default=False, repr=False)

    def __len__(self) -> int:
        return len(self.grids)

    @property
    def core_offsets(self) -> tuple[int, ...]:
        """Where the cores of each image start in `cores`, and the end of the last: B + 1 numbers."""
        return (0, *itertools.accumulate(1 if self.cls_only else budget for budget in self.budgets))

    @property
    def patch_offsets(self) -> tuple[int, ...]:
        """Where the patches of each image start in `patches`, and the end of the last: B + 1 numbers."""
        return (0, *itertools.accumulate(0 if self.cls_only else rows * columns for rows, columns in self.grids))

    @property
    def cls(self) -> Tensor:
        """(B, D): the global features."""
        return self.cores[list(self.core_offsets[:-1])]

    @property
    def feature_maps(self) -> list[Tensor]:
        """(D, rows, columns) of each image: its patches as a map."""
        if self.cls_only:
            raise ArgumentError("there are no patches here: the model ran with cls_only=True; leave it out to get them")
        parts = self.patches.split([rows * columns for rows, columns in self.grids])
        return [part.mT.unflatten(-1, grid) for part, grid in zip(parts, self.grids, strict=True)]

    def __getitem__(self, index: int) -> VecaOutput:
        """What the model gives for one image alone, with a batch size of 1."""
        index = range(len(self))[operator.index(index)]
        cores, patches = (slice(*at[index : index + 2]) for at in (self.core_offsets, self.patch_offsets))
        logits = None if self.logits is None else self.logits[index : index + 1]
        budget = slice(*list(itertools.accumulate((0, *self.budgets)))[index : index + 2])
        of_image = self.cores[None, cores], self.patches[None, patches], self.coordinates[:, None, budget]
        return VecaOutput(*of_image, self.grids[index], logits)

    def __iter__(self) -> Iterator[VecaOutput]:
        return (self[i] for i in range(len(self)))
