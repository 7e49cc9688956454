from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from veca.heads import linear
from veca.heads.linear import LinearHead, LinearSweep, score, score_valid_labels, train_linear

RATES, DECAYS = (0.003, 0.1, 0.5), (0.0, 0.03)


def clusters(count: int, seed: int, noise: float = 1.5) -> tuple[Tensor, Tensor]:
    centres = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (count,), generator=draw)
    return centres[labels] + noise * torch.randn(count, 10, generator=draw), labels


def tags(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features and three tags each, one in ten of them not to be counted."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 10, generator=draw)
    targets = (features[:, :3] + 0.5 * torch.randn(count, 3, generator=draw) > 0.8).long()
    targets[torch.rand(count, 3, generator=draw) < 0.1] = -1
    return features, targets


def sweep(multilabel: bool = False, **options: object) -> LinearSweep:
    data = (tags(90, 1), tags(60, 2)) if multilabel else (clusters(90, 1), clusters(60, 2))
    options = {"classes": 3 if multilabel else 5, "rates": RATES, "decays": DECAYS, "epochs": 6, **options}
    return train_linear(*data, batch=32, seed=3, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("multilabel", [False, True])
def test_each_head_is_as_if_trained_alone_by_torch(multilabel: bool) -> None:
    found = sweep(multilabel)
    features, labels = tags(90, 1) if multilabel else clusters(90, 1)
    validation, validation_labels = tags(60, 2) if multilabel else clusters(60, 2)
    assert found.pairs == tuple((rate, decay) for rate in RATES for decay in DECAYS)
    for k, (rate, decay) in enumerate(found.pairs):
        draw = torch.Generator().manual_seed(3)
        head = nn.Linear(10, 3 if multilabel else 5)
        with torch.no_grad():
            head.weight.copy_(torch.randn(head.weight.shape, generator=draw) * 0.01)
            head.bias.zero_()
        optimizer = torch.optim.SGD(head.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6 * 3)
        best = -1.0
        for epoch in range(6):
            for rows in torch.randperm(90, generator=draw).split(32):
                logits, own = head(features[rows]), labels[rows]
                if multilabel:
                    kept = own >= 0
                    loss = F.binary_cross_entropy_with_logits(logits[kept], own[kept].float())
                else:
                    loss = F.cross_entropy(logits, own)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            with torch.no_grad():
                scores = head(validation)
            if multilabel:
                kept = [validation_labels[:, c] >= 0 for c in range(3)]
                mine = float(
                    np.mean(
                        [average_precision_score(validation_labels[kept[c], c], scores[kept[c], c]) for c in range(3)]
                    )
                )
            else:
                mine = float((scores.argmax(1) == validation_labels).double().mean())
            assert float(found.scores[epoch, k]) == pytest.approx(mine, abs=1e-6)
            if mine > best:
                best, weight, bias = mine, head.weight.detach().clone(), head.bias.detach().clone()
        assert torch.allclose(found.weights[k], weight, rtol=1e-4, atol=1e-5)
        assert torch.allclose(found.biases[k], bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("multilabel", [False, True])
def test_the_best_head_is_the_one_kept(multilabel: bool) -> None:
    found = sweep(multilabel)
    metric = "map" if multilabel else "top1"
    assert float(found.best_scores[found.best]) == float(found.scores.max())
    assert float(found.scores[found.best_epoch - 1, found.best]) == float(found.scores.max())
    again = score(found.head, *(tags(60, 2) if multilabel else clusters(60, 2)))
    assert again[metric] == pytest.approx(float(found.scores.max()))
    assert again[metric] > 0.5
    assert found.scores.max() > found.scores.min()


def test_the_same_twice_and_the_global_generator_untouched() -> None:
    before = torch.get_rng_state()
    once, twice, other = (
        sweep(),
        sweep(),
        train_linear(
            clusters(90, 1), clusters(60, 2), classes=5, rates=RATES, decays=DECAYS, epochs=6, batch=32, seed=4
        ),
    )
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(once.weights, twice.weights)
    assert torch.equal(once.scores, twice.scores)
    assert not torch.equal(once.weights, other.weights)


def test_a_rate_that_breaks_down_spoils_nothing_else() -> None:
    found = sweep(rates=(1e38, 0.1), decays=(0.0,))
    alone = sweep(rates=(0.1,), decays=(0.0,))
    assert not found.weight[0].isfinite().all()
    assert found.scores[-1, 0] == 0
    assert found.best == 1
    assert torch.allclose(found.head.weight, alone.head.weight, rtol=1e-4, atol=1e-5)


def test_standardized_channels_matter_alike() -> None:
    (features, labels), (validation, validation_labels) = clusters(90, 1), clusters(60, 2)
    scale, shift = torch.logspace(-3, 3, 10), torch.linspace(-50, 50, 10)
    constant = torch.full((90, 1), 0.1), torch.full((60, 1), 0.1)
    options = {"classes": 5, "rates": (0.1,), "decays": (0.0,), "epochs": 6, "batch": 32}
    plain = train_linear((features, labels), (validation, validation_labels), standardize=True, **options)
    moved, moved_validation = features * scale + shift * scale, validation * scale + shift * scale
    found = train_linear(
        (torch.cat([moved, constant[0]], 1), labels),
        (torch.cat([moved_validation, constant[1]], 1), validation_labels),
        standardize=True,
        **options,
    )
    assert found.mean.tolist()[:-1] == pytest.approx(moved.mean(0).tolist(), rel=1e-4)
    assert found.deviation.tolist()[:-1] == pytest.approx(moved.std(0, correction=0).tolist(), rel=1e-3)
    assert found.deviation[-1] == 1
    assert abs(float(found.best_scores[0] - plain.best_scores[0])) < 0.1
    assert score(found.head, torch.cat([moved_validation, constant[1]], 1), validation_labels)["top1"] == pytest.approx(
        float(found.best_scores[0])
    )


def test_half_precision_and_small_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (features, labels), (validation, validation_labels) = clusters(90, 1), clusters(60, 2)
    options = {"classes": 5, "rates": RATES, "decays": DECAYS, "epochs": 2, "standardize": True}
    half, half_validation = features.half(), validation.half()
    expected = train_linear((half.float(), labels), (half_validation.float(), validation_labels), **options)
    monkeypatch.setattr(linear, "MAX_CHUNK", 200)
    found = train_linear((half, labels), (half_validation, validation_labels), **options)
    assert torch.equal(found.scores, expected.scores)
    assert torch.allclose(found.head.weight, expected.head.weight, atol=1e-6)
    assert score(found.head, half_validation, validation_labels) == score(
        expected.head, validation.half(), validation_labels
    )


def test_real_labels_skip_examples_without_any() -> None:
    head = LinearHead(torch.eye(4), torch.zeros(4), torch.zeros(4), torch.ones(4))
    features = torch.eye(4)
    assert score(head, features, torch.tensor([0, 1, 2, 0])) == {"top1": 0.75, "top5": 1.0}
    valid = torch.zeros(4, 4, dtype=torch.bool)
    valid[[0, 0, 1, 3, 3], [0, 3, 0, 3, 1]] = True
    assert score_valid_labels(head, features, valid) == pytest.approx(2 / 3)
    for wrong in (valid[:, :3], valid[:1], torch.zeros_like(valid)):
        with pytest.raises(ValueError, match="valid labels are .* 4 features and 4 classes need \\(4, 4\\)"):
            score_valid_labels(head, features, wrong)


def test_errors_say_what_to_do() -> None:
    features, labels = clusters(20, 1)
    options = {"classes": 5, "rates": (0.1,), "decays": (0.0,), "epochs": 1}
    with pytest.raises(ValueError, match="training labels go from 0 to 7; they must be within 0…4"):
        train_linear((features, labels.clone().index_fill_(0, torch.tensor([3]), 7)), (features, labels), **options)
    with pytest.raises(ValueError, match="validation features are \\(20, 10\\) and labels \\(19,\\)"):
        train_linear((features, labels), (features, labels[1:]), **options)
    with pytest.raises(ValueError, match="some training features are not finite"):
        train_linear((features.log(), labels), (features, labels), **options)
    with pytest.raises(ValueError, match="0 rates"):
        train_linear((features, labels), (features, labels), **{**options, "rates": ()})
    with pytest.raises(ValueError, match="10 wide, validation ones 9"):
        train_linear((features, labels), (features[:, 1:], labels), **options)
