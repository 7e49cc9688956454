"""k-nearest-neighbour classification by weighted cosine similarity, as in DINO.

Exact, in chunks that bound the memory, and deterministic: of equally similar neighbours the first ranks higher.

Shapes: N training features, Q queries, D width, C classes, k neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from veca.errors import ArgumentError
from veca.heads.metrics import top_k_accuracy

MAX_SIMILARITIES = 2**24
"""Similarities computed at a time; they take 20 bytes each."""


def neighbours(
    train: Tensor, queries: Tensor, k: int, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and indices (Q, k) of the k training features (N, D) most similar to each query (Q, D).

    Features may be on any device and of any float type; a chunk at a time is moved to `device` (None: the queries').
    """
    if train.ndim != 2 or queries.ndim != 2 or train.shape[1] != queries.shape[1]:
        shapes = f"training features are {tuple(train.shape)}, queries {tuple(queries.shape)}"
        raise ArgumentError(f"{shapes}; both must be (number, width) with one width: extract them with the same model")
    if not 1 <= k <= len(train):
        rule = "it must be between 1 and the number of training features"
        raise ArgumentError(f"k is {k}; {rule}, which is {len(train)}")
    device = torch.device(device) if device is not None else queries.device
    rows = min(4096, len(train))
    cosines, indices = [], []
    for chunk in queries.split(max(1, MAX_SIMILARITIES // rows)):
        directions = _unit_vectors(chunk, device)
        best = torch.empty(len(chunk), 0, dtype=torch.int64, device=device)
        # Keep the k best so far and merge each chunk of training features into them.
        for start in range(0, len(train), rows):
            similarity = directions @ _unit_vectors(train[start : start + rows], device).T
            best = torch.cat([best, _sort_keys(similarity, start)], 1)
            best = best.topk(min(k, best.shape[1])).values
        cosines.append(_key_similarity(best))
        indices.append(~best & 0xFFFFFFFF)
    return torch.cat(cosines), torch.cat(indices)


def knn_scores(cosines: Tensor, labels: Tensor, classes: int, temperature: float = 0.07) -> Tensor:
    """Return votes for each class (Q, C) from neighbours' cosines and labels (Q, k).

    A vote weighs exp(cosine / temperature). The weights of a query are normalised to sum 1 by a softmax, which changes
    no order and cannot overflow.
    """
    weights = (cosines / temperature).softmax(1)
    scores = weights.new_zeros(len(weights), classes)
    for i in range(weights.shape[1]):  # one vote at a time: a fixed order of additions, on a GPU too
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
    """Return top-1 of the queries (Q, D) for each k, from training features (N, D) with labels (N)."""
    for name, features, own in (("training features", train, labels), ("queries", queries, query_labels)):
        if own.shape != features.shape[:1]:
            shape = tuple(own.shape)
            raise ArgumentError(f"{len(features)} {name} have labels of shape {shape}; give one label for each")
    cosines, indices = neighbours(train, queries, max(ks), device)
    classes = 1 + int(max(labels.max(), query_labels.max()))
    neighbour_labels, query_labels = labels.to(indices.device)[indices], query_labels.to(indices.device)
    scores = {k: knn_scores(cosines[:, :k], neighbour_labels[:, :k], classes, temperature) for k in ks}
    return {k: float(top_k_accuracy(scores[k], query_labels)) for k in ks}


def _unit_vectors(features: Tensor, device: torch.device) -> Tensor:
    features = features.to(device).float()
    if not features.isfinite().all():
        raise ArgumentError("some features are not finite: check the model that computed them")
    return F.normalize(features, dim=1)


def _sort_keys(similarity: Tensor, start: int) -> Tensor:
    """Return an integer for each similarity (q, n) that sorts by similarity, then by the lower index.

    The upper 32 bits are those of the float, inverted where negative so that they sort as integers; the lower 32 bits
    are the complement of the index of the training feature.
    """
    bits = (similarity + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    first = torch.arange(start, start + similarity.shape[1], device=similarity.device)
    return ordered * 2**32 + (0xFFFFFFFF - first)


def _key_similarity(keys: Tensor) -> Tensor:
    ordered = (keys >> 32).int()
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)
