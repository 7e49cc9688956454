"""Classification by the nearest neighbours among the training features, as in DINO: cosine, weighted by nearness.

Exact, in pieces that bound the memory, and the same every time: of neighbours equally near the first is the nearer.

Shapes: N training features, Q queries, D width, C classes, k neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from veca.errors import ArgumentError
from veca.heads.metrics import top_k_accuracy

PIECE = 2**24
"""At most so many similarities at once; they take 20 bytes each."""


def neighbours(
    train: Tensor, queries: Tensor, k: int, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """The k training features (N, D) of highest cosine with each query (Q, D): cosines and numbers, both (Q, k).

    The features may be anywhere and of any float type; a piece at a time comes to `device`, or stays where they are.
    """
    if train.ndim != 2 or queries.ndim != 2 or train.shape[1] != queries.shape[1]:
        raise ArgumentError(
            f"training features are {tuple(train.shape)}, queries {tuple(queries.shape)}; both must be (number, width) "
            "with one width: extract them with the same model"
        )
    if not 1 <= k <= len(train):
        raise ArgumentError(
            f"k is {k}; it must be between 1 and the number of training features, which is {len(train)}"
        )
    device = torch.device(device) if device is not None else queries.device
    rows = min(4096, len(train))
    cosines, numbers = [], []
    for some in queries.split(max(1, PIECE // rows)):
        directions = _directions(some, device)
        best = torch.empty(len(some), 0, dtype=torch.int64, device=device)
        for start in range(0, len(train), rows):
            similarity = directions @ _directions(train[start : start + rows], device).T
            keys = _keys(similarity, start)
            best = torch.cat([best, keys.topk(min(k, keys.shape[1])).values], 1)
            best = best.topk(min(k, best.shape[1])).values
        cosines.append(_similarity(best))
        numbers.append(~best & 0xFFFFFFFF)
    return torch.cat(cosines), torch.cat(numbers)


def knn_scores(cosines: Tensor, labels: Tensor, classes: int, temperature: float = 0.07) -> Tensor:
    """Votes for each class (Q, C) from neighbours' cosines and labels (Q, k).

    A vote weighs exp(cosine / temperature). The weights of a query are scaled to a sum of 1, which changes no order
    and cannot overflow.
    """
    weights = (cosines / temperature).softmax(1)
    scores = weights.new_zeros(len(weights), classes)
    for i in range(weights.shape[1]):  # one vote at a time adds in the same order every time, on a GPU too
        scores.scatter_add_(1, labels[:, i : i + 1], weights[:, i : i + 1])
    return scores


def knn_accuracy(
    train: Tensor,
    labels: Tensor,
    queries: Tensor,
    query_labels: Tensor,
    *,
    ks: Sequence[int] = (10, 20),
    temperature: float = 0.07,
    device: torch.device | str | None = None,
) -> dict[int, float]:
    """Top-1 of the queries (Q, D) for each k, from training features (N, D) with labels (N)."""
    for name, features, of in (("training features", train, labels), ("queries", queries, query_labels)):
        if of.shape != features.shape[:1]:
            raise ArgumentError(
                f"{len(features)} {name} have labels of shape {tuple(of.shape)}; give one label for each"
            )
    cosines, numbers = neighbours(train, queries, max(ks), device)
    classes = 1 + int(max(labels.max(), query_labels.max()))
    found, query_labels = labels.to(numbers.device)[numbers], query_labels.to(numbers.device)
    scores = {k: knn_scores(cosines[:, :k], found[:, :k], classes, temperature) for k in ks}
    return {k: float(top_k_accuracy(scores[k], query_labels)) for k in ks}


def _directions(features: Tensor, device: torch.device) -> Tensor:
    features = features.to(device).float()
    if not features.isfinite().all():
        raise ArgumentError("some features are not finite: they cannot be compared; look at the model that gave them")
    return F.normalize(features, dim=1)


def _keys(similarity: Tensor, start: int) -> Tensor:
    """One whole number for each similarity (q, n), ordered by it and then by who comes first.

    The upper 32 bits are those of the float, the negative ones turned over so that they sort as whole numbers; the
    lower 32 bits are the complement of the number of the training feature.
    """
    bits = (similarity + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    first = torch.arange(start, start + similarity.shape[1], device=similarity.device)
    return ordered * 2**32 + (0xFFFFFFFF - first)


def _similarity(keys: Tensor) -> Tensor:
    ordered = (keys >> 32).int()
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)
