from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import average_precision_score, confusion_matrix, precision_recall_curve, top_k_accuracy_score
from torch import Tensor
from torchmetrics.classification import MultilabelAveragePrecision
from torchmetrics.functional.classification import multiclass_jaccard_index

from veca.heads.metrics import (
    Confusion,
    DepthErrors,
    average_precision,
    top_k_accuracy,
    top_k_hits,
)


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("k", [1, 5])
def test_top_k_agrees_with_scikit_learn(k: int) -> None:
    scores, labels = torch.randn(200, 12, generator=draw(0)), torch.randint(12, (200,), generator=draw(1))
    expected = top_k_accuracy_score(labels.numpy(), scores.numpy(), k=k, labels=np.arange(12))
    assert float(top_k_accuracy(scores, labels, k)) == pytest.approx(expected)
    many = torch.stack([scores, -scores])
    assert top_k_accuracy(many, labels, k)[0] == top_k_accuracy(scores, labels, k)


def test_equal_scores_go_to_the_first_class_and_nan_never_wins() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0]] * 3)
    assert top_k_hits(scores, torch.tensor([0, 1, 2])).tolist() == [True, False, False]
    assert top_k_hits(scores, torch.tensor([0, 1, 2]), k=2).tolist() == [True, True, False]
    broken = torch.full((3, 3), torch.nan)
    assert not top_k_hits(broken, torch.tensor([0, 1, 2]), k=2).any()


def multilabel_case(seed: int, ties: bool) -> tuple[Tensor, Tensor]:
    scores, targets = torch.randn(150, 6, generator=draw(seed)), torch.rand(150, 6, generator=draw(seed + 99)) < 0.2
    targets[:, 4] = False  # a class that no picture has
    targets[:, 5] = True
    return (scores.mul(2).round() if ties else scores), targets.long()


@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_agrees_with_scikit_learn(ties: bool) -> None:
    scores, targets = multilabel_case(3, ties)
    found = average_precision(scores, targets)
    assert found[4].isnan()
    present = [0, 1, 2, 3, 5]
    expected = [average_precision_score(targets[:, c].numpy(), scores[:, c].numpy()) for c in present]
    assert found[present].tolist() == pytest.approx(expected)
    assert float(average_precision(scores, targets).nanmean()) == pytest.approx(np.mean(expected))
    order = torch.randperm(150, generator=draw(5))
    assert torch.allclose(average_precision(scores[order], targets[order])[present], found[present])


def test_mean_average_precision_agrees_with_torchmetrics() -> None:
    scores, targets = multilabel_case(7, ties=False)
    scores, targets = scores[:, :4].sigmoid(), targets[:, :4]
    expected = MultilabelAveragePrecision(num_labels=4)(scores, targets)
    assert float(average_precision(scores, targets).nanmean()) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("ties", [False, True])
def test_eleven_points_as_in_the_voc_2007_challenge(ties: bool) -> None:
    scores, targets = multilabel_case(11, ties)
    found = average_precision(scores, targets, points="11")
    assert found[4].isnan()
    for c in (0, 1, 2, 3, 5):
        precision, recall, _ = precision_recall_curve(targets[:, c].numpy(), scores[:, c].numpy())
        precision, recall = precision[:-1], recall[:-1]  # the last point is made up by scikit-learn
        expected = np.mean([precision[recall >= level / 10 - 1e-9].max() for level in range(11)])
        assert float(found[c]) == pytest.approx(expected)


@pytest.mark.parametrize("points", ["all", "11"])
def test_difficult_examples_do_not_count(points: str) -> None:
    scores, targets = multilabel_case(13, ties=True)
    difficult = torch.rand(150, generator=draw(17)) < 0.3
    marked = targets.clone()
    marked[difficult] = -1
    found, expected = (
        average_precision(scores, marked, points),
        average_precision(scores[~difficult], targets[~difficult], points),
    )
    assert torch.allclose(found, expected, equal_nan=True)


def segmentation_case() -> tuple[Tensor, Tensor]:
    """Class 3 is neither labelled nor predicted; class 4 is predicted and never labelled."""
    predicted, labels = torch.randint(5, (4, 9, 7), generator=draw(0)), torch.randint(5, (4, 9, 7), generator=draw(1))
    predicted[predicted == 3], labels[(labels == 3) | (labels == 4)] = 0, 255
    return predicted, labels


def test_confusion_agrees_with_scikit_learn_batch_by_batch() -> None:
    predicted, labels = segmentation_case()
    meter = Confusion(5)
    for i in range(4):
        meter.update(predicted[i], labels[i])
    kept = labels != 255
    expected = confusion_matrix(labels[kept].numpy(), predicted[kept].numpy(), labels=np.arange(5))
    assert np.array_equal(meter.counts.numpy(), expected)


def test_an_absent_class_takes_no_part_and_a_spurious_one_counts_zero() -> None:
    predicted, labels = segmentation_case()
    meter = Confusion(5)
    meter.update(predicted, labels)
    iou, found = meter.iou(), meter.compute()
    assert iou[3].isnan()
    assert iou[4] == 0
    assert found["miou"] == pytest.approx(float(iou[[0, 1, 2, 4]].mean()))
    per_class = multiclass_jaccard_index(predicted, labels, num_classes=5, ignore_index=255, average="none")
    assert iou[[0, 1, 2, 4]].tolist() == pytest.approx(per_class[[0, 1, 2, 4]].tolist())
    kept = labels != 255
    assert found["pixel_accuracy"] == pytest.approx(float((predicted == labels)[kept].double().mean()))
    recalls = [float((predicted[labels == c] == c).double().mean()) for c in range(3)]
    assert found["class_accuracy"] == pytest.approx(np.mean(recalls))


def test_a_label_that_is_no_class_is_an_error() -> None:
    meter = Confusion(3, ignore=255)
    meter.update(torch.tensor([0, 1]), torch.tensor([0, 7]))
    with pytest.raises(ValueError, match="1 pixels have a class outside 0…2"):
        meter.compute()
    with pytest.raises(ValueError, match="one shape"):
        meter.update(torch.zeros(2, 3), torch.zeros(3, 2))


def test_a_meter_of_several_heads_is_one_of_each() -> None:
    classes, labels = torch.randint(5, (3, 4, 9, 7), generator=draw(0)), torch.randint(5, (4, 9, 7), generator=draw(1))
    labels[:, :2] = 255
    depths, readings = 9 * torch.rand(3, 4, 9, 7, generator=draw(2)), 9 * torch.rand(4, 9, 7, generator=draw(3))
    readings[1] = 0
    cases: list[tuple[Callable[..., Confusion | DepthErrors], Tensor, Tensor]] = [
        (partial(Confusion, 5), classes, labels),
        (partial(DepthErrors, 0.5, 8), depths, readings),
    ]
    for make, predicted, truth in cases:
        together = make(heads=(3,))
        together.update(predicted[:, :3], truth[:3])
        for heads in (slice(0, 1), slice(1, 3)):
            together.update(predicted[heads, 3:], truth[3:], heads)
        for meter, own in zip(together.each(), predicted, strict=True):
            alone = make()
            alone.update(own, truth)
            assert meter.compute() == pytest.approx(alone.compute(), rel=1e-12)
        with pytest.raises(ValueError, match="one shape"):
            together.update(predicted[:2], truth)


def test_nothing_counted_is_nan_not_a_score() -> None:
    meter = Confusion(3)
    meter.update(torch.tensor([0, 1]), torch.tensor([255, 255]))
    assert np.isnan(meter.compute()["miou"])
    depth = DepthErrors(0.1, 10)
    depth.update(torch.ones(2, 3, 3), torch.zeros(2, 3, 3))
    assert np.isnan(depth.compute()["rmse"])


def reference_depth(predicted: np.ndarray, depth: np.ndarray) -> list[float]:
    """The definitions, over the pixels of one picture."""
    ratio, log = np.maximum(predicted / depth, depth / predicted), np.log(predicted) - np.log(depth)
    within = [(ratio < 1.25**power).mean() for power in (1, 2, 3)]
    rmse, log10 = np.sqrt(((predicted - depth) ** 2).mean()), np.abs(np.log10(predicted) - np.log10(depth)).mean()
    return [rmse, (abs(predicted - depth) / depth).mean(), *within, log10, np.sqrt((log**2).mean()), log.std()]


def depth_case() -> tuple[Tensor, Tensor]:
    """Four pictures, the third without a reading; predictions beyond the cap."""
    depth = torch.rand(4, 8, 6, generator=draw(0)) * 12
    depth[torch.rand(4, 8, 6, generator=draw(1)) < 0.3] = 0
    depth[2] = 0
    predicted = depth * torch.randn(4, 8, 6, generator=draw(2)).mul(0.4).exp() - 0.2
    return predicted, depth


def test_depth_errors_are_means_over_pictures() -> None:
    predicted, depth = depth_case()
    meter = DepthErrors(0.1, 10)
    for part in (slice(0, 1), slice(1, 4)):
        meter.update(predicted[part], depth[part])
    valid = (depth > 0.1) & (depth < 10)
    capped = predicted.double().clamp(0.1, 10).numpy()
    pictures = [reference_depth(capped[i][valid[i]], depth[i][valid[i]].double().numpy()) for i in (0, 1, 3)]
    assert list(meter.compute().values()) == pytest.approx(np.mean(pictures, axis=0).tolist())


def test_a_prediction_that_is_not_a_number_is_seen() -> None:
    predicted, depth = depth_case()
    predicted[1] = torch.nan
    meter = DepthErrors(0.1, 10)
    meter.update(predicted, depth)
    assert np.isnan(meter.compute()["rmse"])


def t_interval(values: Tensor, centre: float) -> tuple[float, float]:
    error = scipy.stats.sem(values.numpy())
    low, high = scipy.stats.t.interval(0.95, len(values) - 1, loc=centre, scale=error)
    return float(low), float(high)


def test_intervals_of_depth_errors_are_those_of_means() -> None:
    depth = 1 + torch.rand(9, 8, 8, generator=draw(0))
    predicted = depth + 0.3 * torch.rand(9, 1, 1, generator=draw(1)) * torch.randn(9, 8, 8, generator=draw(2))
    meter = DepthErrors(0.1, 10).keep_images()
    for part in (slice(0, 4), slice(4, 9)):
        meter.update(predicted[part], depth[part])
    meter.update(predicted[:1], torch.zeros(1, 8, 8))  # without a valid pixel: does not count
    rmse = (predicted.double() - depth).square().mean(dim=(1, 2)).sqrt()
    assert meter.compute()["rmse"] == pytest.approx(float(rmse.mean()))
    assert meter.intervals()["rmse"] == pytest.approx(t_interval(rmse, float(rmse.mean())), rel=1e-5)
    assert meter.intervals()["delta3"][1] <= 1
    few = DepthErrors(0.1, 10).keep_images()
    few.update(predicted[:3], depth[:3])
    assert few.intervals() == {}


def test_intervals_of_segmentation_are_those_of_pseudo_values() -> None:
    labels = torch.randint(3, (12, 10, 10), generator=draw(0))
    wrong = torch.rand(12, 10, 10, generator=draw(1)) < torch.linspace(0.1, 0.5, 12)[:, None, None]
    predicted = torch.where(wrong, torch.randint(3, (12, 10, 10), generator=draw(2)), labels)
    labels[0, :2] = 255

    def score(images: list[int], keep: bool = False) -> Confusion:
        meter = Confusion(3)
        meter = meter.keep_images() if keep else meter
        for some in (images[:5], images[5:]):
            meter.update(predicted[some], labels[some])
        return meter

    everything = list(range(12))
    plain, meter = score(everything), score(everything, keep=True)
    assert meter.compute() == plain.compute()
    assert torch.equal(meter.counts, plain.counts)
    without = [score([i for i in everything if i != left]).compute() for left in everything]
    for name, value in plain.compute().items():
        pseudo = torch.tensor([12 * value - 11 * each[name] for each in without])
        assert meter.intervals()[name] == pytest.approx(t_interval(pseudo, value), rel=1e-4)
    perfect = Confusion(3).keep_images()
    perfect.update(labels, labels)
    assert perfect.intervals()["miou"] == (1, 1)
