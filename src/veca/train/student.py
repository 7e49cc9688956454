"""The student in training: the model with its losses, on batches of one shape or of several."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from veca.images.pack import pack
from veca.model import Veca
from veca.teachers import Targets
from veca.train.objective import Losses, TeacherLoss, sum_losses
from veca.train.recipe import Recipe, Setting


class Student(nn.Module):
    """The model with its loss in one module: DDP needs the output of forward to be what backward starts from."""

    def __init__(self, model: Veca, recipe: Recipe, losses: Sequence[TeacherLoss] | None = None) -> None:
        super().__init__()
        self.model = model
        parts = [TeacherLoss(model.num_features, recipe.objective)] if losses is None else losses

        def teacher_loss(cls: Tensor, patches: Tensor, targets: Targets) -> Losses:
            return sum_losses(cls, patches, targets, parts)

        def match_loss(cls: Tensor, patches: Tensor, targets: Targets) -> Losses:
            return sum_losses(cls, patches, targets, [part._replace(classifier=None) for part in parts])

        # Compiled anew when a first size changes, after that for any: the width stays a constant, which is faster.
        self.losses, self.match_losses = (
            torch.compile(each) if recipe.compile else each for each in (teacher_loss, match_loss)
        )
        self.match, self.largest = recipe.widths.match if recipe.widths else 0.0, recipe.largest_setting()

    def forward(self, images: Tensor | list[Tensor], setting: Setting, targets: Targets | list[Targets]) -> Losses:
        """Losses at a setting against the targets, and against the largest setting where the recipe says so."""
        larger = None
        if self.match and setting != self.largest:
            with torch.no_grad():
                larger = self._features(images, self.largest)
            torch.manual_seed(torch.initial_seed())  # both see the same augmented coordinates
        features = self._features(images, setting)
        losses = _mean_losses(self.losses, features, targets)
        if larger is None:
            return losses
        matched = _mean_losses(self.match_losses, features, larger)
        return losses._replace(total=losses.total + self.match * matched.total)

    def _features(self, images: Tensor | list[Tensor], setting: Setting) -> Targets | list[Targets]:
        if isinstance(images, Tensor):
            out = self.model(images, setting[0], width=setting[1])
            return Targets(out.cls, out.patches)
        patch = self.model.config.patch_size
        batch = pack([image for group in images for image in group], patch_size=patch)
        packed = self.model(batch, setting[0], width=setting[1])
        counts = [len(group) for group in images]
        cells = [group[:, 0].numel() // patch**2 for group in images]
        parts = zip(packed.cls.split(counts), packed.patches.split(cells), strict=True)
        return [Targets(cls, patches.unflatten(0, (len(cls), -1))) for cls, patches in parts]


def _mean_losses(loss: Callable[..., Losses], features: Any, targets: Any) -> Losses:
    """The losses of a batch. Where shapes differ, the mean over all images of those of each: `loss` is a mean over the
    images of a shape, and for each of these over its patches.
    """
    if isinstance(features, Targets):
        return loss(*features, targets)
    count = sum(len(own.cls) for own in features)
    parts = [
        [None if value is None else value * (len(own.cls) / count) for value in loss(*own, target)]
        for own, target in zip(features, targets, strict=True)
    ]
    sums: Any = (None if values[0] is None else torch.stack(values).sum() for values in zip(*parts, strict=True))
    return Losses(*sums)
