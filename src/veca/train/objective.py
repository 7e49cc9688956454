"""What a student is to learn: its teacher's global feature and dense map.

Shapes: B images, N patches, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veca.model import Veca
from veca.teachers import Targets
from veca.train.recipe import Recipe


class Losses(NamedTuple):
    """All scalars, float32 or better. `total` is what training minimises."""

    total: Tensor
    cls: Tensor
    dense: Tensor
    cosine: Tensor
    mse: Tensor


def distillation_losses(
    cls: Tensor,
    patches: Tensor,
    teacher_cls: Tensor,
    teacher_patches: Tensor,
    dense_weight: float = 1.0,
    mse_weight: float = 1.0,
) -> Losses:
    """How far the student's features (B, D) and (B, N, D) are from the teacher's.

    The global features are compared by angle, the patches by angle and by value:
    `total = cls + dense_weight · (cosine + mse_weight · mse)`.

    >>> same = torch.ones(2, 4), torch.ones(2, 9, 4)
    >>> float(distillation_losses(*same, *same).total)
    0.0
    """
    cls, patches, teacher_cls, teacher_patches = (
        x.to(torch.promote_types(x.dtype, torch.float32)) for x in (cls, patches, teacher_cls, teacher_patches)
    )
    with torch.autocast(cls.device.type, enabled=False):
        by_cls, cosine = _by_angle(cls, teacher_cls), _by_angle(patches, teacher_patches)
        mse = F.mse_loss(patches, teacher_patches)
        dense = cosine + mse_weight * mse
    return Losses(by_cls + dense_weight * dense, by_cls, dense, cosine, mse)


def _by_angle(a: Tensor, b: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(a, b, dim=-1, eps=1e-6)).mean()


class Student(nn.Module):
    """The model with its loss, so that what comes out of a forward pass is what goes into the backward one."""

    def __init__(self, model: Veca, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.objective = model, recipe.objective
        self.losses = torch.compile(distillation_losses, dynamic=True) if recipe.compile else distillation_losses

    def forward(self, images: Tensor, budget: int, targets: Targets) -> Losses:
        out = self.model(images, budget)
        weights = self.objective.dense_weight, self.objective.mse_weight
        return self.losses(out.cls, out.patches, *targets, *weights)
