"""Distillation losses: cosine and MSE between the features of student and teacher.

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
    """Scalars, float32 or better. `total` is what training minimises."""

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
    """Losses between the student's features (B, D) and (B, N, D) and the teacher's.

    Global features are compared by cosine, patches by cosine and MSE:
    `total = cls + dense_weight · (cosine + mse_weight · mse)`.

    >>> same = torch.ones(2, 4), torch.ones(2, 9, 4)
    >>> float(distillation_losses(*same, *same).total)
    0.0
    """
    cls, patches, teacher_cls, teacher_patches = (
        x.to(torch.promote_types(x.dtype, torch.float32)) for x in (cls, patches, teacher_cls, teacher_patches)
    )
    with torch.autocast(cls.device.type, enabled=False):
        cls_loss, cosine = _cosine_loss(cls, teacher_cls), _cosine_loss(patches, teacher_patches)
        mse = F.mse_loss(patches, teacher_patches)
        dense = cosine + mse_weight * mse
    return Losses(cls_loss + dense_weight * dense, cls_loss, dense, cosine, mse)


def _cosine_loss(a: Tensor, b: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(a, b, dim=-1, eps=1e-6)).mean()


class Student(nn.Module):
    """The model with its loss in one module: DDP needs the output of forward to be what backward starts from."""

    def __init__(self, model: Veca, recipe: Recipe) -> None:
        super().__init__()
        self.model, self.objective = model, recipe.objective
        self.losses = torch.compile(distillation_losses, dynamic=True) if recipe.compile else distillation_losses

    def forward(self, images: Tensor, budget: int, targets: Targets) -> Losses:
        out = self.model(images, budget)
        weights = self.objective.dense_weight, self.objective.mse_weight
        return self.losses(out.cls, out.patches, *targets, *weights)
