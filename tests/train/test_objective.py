from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veca.images import MEAN, STD
from veca.teachers import Standardized, Teacher, TeacherGroup
from veca.train.objective import TeacherLoss, distillation_losses, sum_losses, teacher_losses
from veca.train.recipe import ObjectiveRecipe, Recipe, RecipeError


def features() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 8), torch.randn(2, 5, 8), torch.randn(2, 8), torch.randn(2, 5, 8)


def test_losses_are_weighted_as_the_recipe_says() -> None:
    plain, weighted = distillation_losses(*features()), distillation_losses(*features(), weights=(0.5, 3))
    assert torch.equal(plain.total, plain.cls + plain.dense)
    assert float(weighted.total) == pytest.approx(float(plain.cls + 0.5 * (plain.cosine + 3 * plain.mse)), rel=1e-6)


def test_computed_in_float32_whatever_comes_in() -> None:
    rounded = [feature.bfloat16() for feature in features()]
    expected = distillation_losses(*(feature.float() for feature in rounded))
    with torch.autocast("cpu", torch.bfloat16):
        found = distillation_losses(*rounded)
    assert found.total.dtype == torch.float32
    assert found.values() == expected.values()
    assert len(found.values()) == 5


def test_a_feature_of_zeros_has_a_loss_and_a_gradient() -> None:
    patches = torch.zeros(1, 4, 8, requires_grad=True)
    losses = distillation_losses(torch.zeros(1, 8), patches, torch.ones(1, 8), torch.ones(1, 4, 8))
    losses.total.backward()
    assert float(losses.total.detach()) == 3.0  # both angles count 1, and every square is 1
    assert torch.isfinite(patches.grad).all()


def test_losses_and_gradients_are_those_of_torchs_functions() -> None:
    given = [feature.double().requires_grad_() for feature in features()]
    losses = distillation_losses(*given)
    cls, patches, teacher_cls, teacher_patches = given
    cosines = [
        F.cosine_similarity(*pair, dim=-1, eps=1e-6) for pair in ((cls, teacher_cls), (patches, teacher_patches))
    ]
    expected = (1 - cosines[0]).mean() + (1 - cosines[1]).mean() + F.mse_loss(patches, teacher_patches)
    torch.testing.assert_close(losses.total, expected, rtol=1e-12, atol=0)
    gradients = (torch.autograd.grad(total, given, retain_graph=True) for total in (losses.total, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_weights_of_the_objective() -> None:
    given = features()
    plain = distillation_losses(*given)
    objective = ObjectiveRecipe(cls_weight=2, dense_weight=0.5, mse_weight=3)
    found = TeacherLoss(8, objective)(*given)
    torch.testing.assert_close(found.total, 2 * plain.cls + 0.5 * (plain.cosine + 3 * plain.mse))
    assert found.logits is None
    for name in ("cls", "cosine", "mse"):
        assert torch.equal(getattr(found, name), getattr(plain, name))


class Classes(Teacher):
    """A teacher of 8 channels with a classifier of 5 classes."""

    def __init__(self, classes: bool = True) -> None:
        super().__init__(8, 16, MEAN, STD, raw=True)
        torch.manual_seed(1)
        self.classifier = nn.Linear(8, 5) if classes else None
        self.name = "classes" if classes else "none"

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        dense = F.avg_pool2d(images, 16).repeat(1, 3, 1, 1)[:, :8]
        return 3 * dense.mean((2, 3)) + 1, dense


def standardized(classes: bool = True) -> Standardized:
    teacher = Standardized(Classes(classes))
    torch.manual_seed(2)
    teacher.means.copy_(torch.randn(2, 8))
    teacher.deviations.copy_(torch.rand(2, 8) + 0.5)
    return teacher


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_logits_are_those_of_the_teachers_classifier(temperature: float) -> None:
    teacher, images = standardized(), torch.randn(3, 3, 32, 48)
    recipe = Recipe.from_dict({"objective": {"logits_weight": 0.5, "temperature": temperature}})
    (loss,) = teacher_losses(recipe, teacher)
    targets = teacher(images, (2, 3))
    own_logits = teacher.teacher.classifier(teacher.teacher(images, (2, 3)).cls)
    torch.testing.assert_close(loss.classifier.logits(targets.cls), own_logits, rtol=1e-5, atol=1e-5)
    cls = torch.randn(3, 8, requires_grad=True)
    raw = cls * teacher.deviations[0] + teacher.means[0]
    log_odds = (F.log_softmax(x / temperature, -1) for x in (teacher.teacher.classifier(raw), own_logits))
    student, own = log_odds
    expected = temperature**2 * (own.exp() * (own - student)).sum(-1).mean()
    patches = torch.randn(3, 6, 8)
    found = loss(cls, patches, *targets)
    torch.testing.assert_close(found.logits, expected, rtol=1e-5, atol=1e-6)
    without = distillation_losses(cls, patches, *targets)
    torch.testing.assert_close(found.total, without.total + 0.5 * expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(x, cls, retain_graph=True)[0] for x in (found.logits, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    same = loss(targets.cls, targets.patches, *targets)
    assert float(same.logits) == pytest.approx(0, abs=1e-6)


def test_a_teacher_without_a_classifier_has_no_logits() -> None:
    recipe = Recipe.from_dict({"objective": {"logits_weight": 1.0}})
    with pytest.raises(RecipeError, match="logits_weight=1: none has no classifier on its global feature. Set it to 0"):
        teacher_losses(recipe, standardized(classes=False))


def test_several_teachers_have_their_own_part_of_the_features() -> None:
    """Each is compared with its part alone, by its own weights; logits of those that have them count."""
    teachers = [standardized(), Classes(classes=False)]
    group, images = TeacherGroup(teachers), torch.randn(2, 3, 32, 32)
    about = {"name": "second", "objective": {"dense_weight": 0.5}}
    recipe = Recipe.from_dict({"objective": {"logits_weight": 1.0}, "teachers": [about]})
    targets, single = group(images, (2, 2)), [teacher(images, (2, 2)) for teacher in teachers]
    assert (group.width, targets.cls.shape, targets.patches.shape) == (16, (2, 16), (2, 4, 16))
    for i, each in enumerate(single):
        for all_of_them, own in zip(targets, each, strict=True):
            assert torch.equal(all_of_them[..., 8 * i : 8 * i + 8], own)
    cls, patches = torch.randn(2, 16), torch.randn(2, 4, 16)
    losses = teacher_losses(recipe, group)
    found = sum_losses(cls, patches, targets, losses)
    parts = [
        loss(cls[:, 8 * i : 8 * i + 8], patches[..., 8 * i : 8 * i + 8], *single[i]) for i, loss in enumerate(losses)
    ]
    torch.testing.assert_close(found.total, parts[0].total + parts[1].total)
    torch.testing.assert_close(found.mse, (parts[0].mse + parts[1].mse) / 2)
    torch.testing.assert_close(found.logits, parts[0].logits)
    assert parts[1].logits is None
    assert parts[1].total < distillation_losses(cls[:, 8:], patches[..., 8:], *single[1]).total
    assert [each["name"] for each in group.about["teachers"]] == ["classes", "none"]
