"""What a run draws: which pictures come when, and how each is seen.

Nothing here has a state to save. The pictures are an endless stream, epoch after epoch, each in an order of its own,
and forward pass f of a run takes places f·G to (f+1)·G of it, G the pictures of all processes together. What is done
to a picture depends on the seed, the picture and the epoch alone. So a run can start at any forward pass, on any number
of processes with the same G, and sees the same pixels, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from veca.data.augment import COLOURS, OPS, choose

Augment = Literal["trivial", "colour", "flip", "none"]


def order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The numbers below `count` in the order of one epoch.

    Sorted by raw random numbers, because numpy promises those for ever, and its own shuffling only for a version.
    """
    digest = hashlib.sha256(f"order {seed} {epoch}".encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16])).random_raw(count)
    return np.argsort(raw, kind="stable")


def positions(forward: int, batch: int, rank: int = 0, world: int = 1) -> range:
    """The places in the stream of pictures that one process takes in one forward pass.

    >>> [positions(2, batch=4, rank=rank, world=2) for rank in (0, 1)]
    [range(16, 20), range(20, 24)]
    """
    start = (forward * world + rank) * batch
    return range(start, start + batch)


class Stream:
    """Which pictures, of `count`, the forward passes of one process take; those that cannot be used among them."""

    def __init__(self, count: int, batch: int, rank: int = 0, world: int = 1, seed: int = 0) -> None:
        self.count, self.share, self.seed = count, (batch, rank, world), seed
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __call__(self, forward: int) -> tuple[list[int], list[int]]:
        """The pictures, and the epoch each belongs to."""
        epochs, places = np.divmod(np.array(positions(forward, *self.share)), self.count)
        kept, pictures = self._orders, np.empty_like(places)
        present = np.unique(epochs).tolist()
        self._orders = {e: kept[e] if e in kept else order(self.count, self.seed, e) for e in present}
        for epoch in present:
            pictures[epochs == epoch] = self._orders[epoch][places[epochs == epoch]]
        return pictures.tolist(), epochs.tolist()


class View(NamedTuple):
    """How a picture is seen: where its crop lies, as shares of the room there is, and what happens to it then."""

    across: float
    down: float
    flip: bool
    size: float
    """Of the crop, where that is drawn too: as a share of the way from the smallest to the largest."""
    op: int
    strength: float


class Views(NamedTuple):
    """The views of many pictures, each field an array."""

    across: NDArray[np.float64]
    down: NDArray[np.float64]
    flip: NDArray[np.bool_]
    size: NDArray[np.float64]
    op: NDArray[np.int64]
    strength: NDArray[np.float64]


def views_of(seed: int, pictures: Sequence[int], epochs: Sequence[int], augment: Augment = "trivial") -> Views:
    """Drawn from the seed, the picture and the epoch alone, for each."""
    count = len(pictures)
    if augment == "none":
        middle, nothing = np.full(count, 0.5), np.zeros(count)
        return Views(middle, middle, nothing.astype(bool), middle, nothing.astype(np.int64), nothing)
    texts = [f"view {seed} {picture} {epoch}" for picture, epoch in zip(pictures, epochs, strict=True)]
    digests = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    across, down, op, bits = np.frombuffer(digests, ">u8").astype(np.uint64).reshape(count, 4).T
    among = {"trivial": range(len(OPS)), "colour": COLOURS}.get(augment, (0,))
    chosen = choose(op, bits >> np.uint64(2), (bits & np.uint64(2)).astype(bool), among)
    size = (bits >> np.uint64(32)) / 2.0**32
    return Views(across / 2.0**64, down / 2.0**64, (bits & np.uint64(1)).astype(bool), size, *chosen)


def view_of(seed: int, picture: int, epoch: int, augment: Augment = "trivial") -> View:
    """`views_of` one picture."""
    return View(*(values[0].item() for values in views_of(seed, [picture], [epoch], augment)))


def replacement(count: int, seed: int, picture: int, epoch: int, attempt: int) -> int:
    """Another picture, for one that cannot be used."""
    digest = hashlib.sha256(f"instead {seed} {picture} {epoch} {attempt}".encode()).digest()
    return int.from_bytes(digest[:8]) % count


def place(share: float, room: int) -> int:
    """Where a crop begins, in pixels, at a share of the room there is."""
    return min(int(share * (room + 1)), room) if share != 0.5 else round(room / 2)


def places(shares: NDArray[np.float64], room: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """`place` for each."""
    room = np.asarray(room)
    found = np.minimum((shares * (room + 1)).astype(np.int64), room)
    return np.where(shares == 0.5, np.rint(room / 2).astype(np.int64), found)
