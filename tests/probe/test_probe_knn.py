from __future__ import annotations

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from torch import Tensor

from veca.probe import run
from veca.probe.run import knn_accuracy, knn_scores, neighbours


def clusters(count: int, seed: int) -> tuple[Tensor, Tensor]:
    centres = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(7, (count,), generator=draw)
    return centres[labels] + 2.5 * torch.randn(count, 12, generator=draw), labels


def test_agrees_with_scikit_learn() -> None:
    (train, labels), (queries, query_labels) = clusters(500, 1), clusters(200, 2)
    cosines, numbers = neighbours(train, queries, 20)
    distances, expected = (
        NearestNeighbors(n_neighbors=20, metric="cosine").fit(train.numpy()).kneighbors(queries.numpy())
    )
    assert numbers.tolist() == expected.tolist()
    assert torch.allclose(cosines.double(), 1 - torch.from_numpy(distances).double(), atol=1e-6)
    found = knn_accuracy((train, labels), (queries, query_labels), (10, 20))
    for k in (10, 20):
        model = KNeighborsClassifier(
            k, metric="cosine", weights=lambda distance: torch.exp((1 - torch.tensor(distance)) / 0.07).numpy()
        )
        expected_accuracy = model.fit(train.numpy(), labels.numpy()).score(queries.numpy(), query_labels.numpy())
        assert found[k] == pytest.approx(expected_accuracy)
    assert 0.3 < found[20] < 0.95


def test_in_pieces_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (train, _), (queries, _) = clusters(9000, 1), clusters(40, 2)
    expected = (torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(train).T).topk(15)
    monkeypatch.setattr(run, "MAX_SIMILARITIES", 4096 * 7)
    cosines, numbers = neighbours(train, queries, 15)
    assert torch.equal(numbers, expected.indices)
    assert torch.allclose(cosines, expected.values, atol=1e-6)


def test_of_neighbours_equally_near_the_first_is_the_nearer() -> None:
    train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]).repeat(3000, 1)  # more than a piece
    _, numbers = neighbours(train, torch.tensor([[0.0, 2.0], [0.0, -3.0]]), 4)
    assert numbers.tolist() == [[1, 4, 7, 10], [0, 2, 3, 5]]


def test_neighbours_on_the_far_side_are_in_order_too() -> None:
    angles = torch.tensor([3.0, 2.0, 1.8, 2.5, 1.0])
    cosines, numbers = neighbours(torch.stack([angles.cos(), angles.sin()], 1), torch.tensor([[1.0, 0.0]]), 5)
    assert numbers.tolist() == [[4, 2, 1, 3, 0]]
    assert torch.allclose(cosines, angles[numbers].cos(), atol=1e-6)


def test_a_near_vote_outweighs_two_far_ones() -> None:
    cosines, labels = torch.tensor([[0.9, 0.5, 0.5]]), torch.tensor([[0, 1, 1]])
    assert knn_scores(cosines, labels, classes=3, temperature=0.07).argmax() == 0
    assert knn_scores(cosines, labels, classes=3, temperature=10.0).argmax() == 1
    assert knn_scores(cosines, labels, classes=3, temperature=1e-4).isfinite().all()


def test_the_same_twice_and_whatever_the_length_of_features() -> None:
    (train, labels), (queries, query_labels) = clusters(300, 1), clusters(50, 2)
    once = knn_accuracy((train, labels), (queries, query_labels), (10, 20))
    assert once == knn_accuracy((train, labels), (queries, query_labels), (10, 20))
    assert once == knn_accuracy((train * 4, labels), (queries / 8, query_labels), (10, 20))


def test_errors_say_what_to_do() -> None:
    train, labels = clusters(5, 1)
    with pytest.raises(
        ValueError,
        match="k is 10; it must be between 1 and the number of training features, which is 5: name a smaller k",
    ):
        knn_accuracy((train, labels), (train, labels), (10,))
    with pytest.raises(ValueError, match="not finite"):
        neighbours(train / 0, train, 1)
