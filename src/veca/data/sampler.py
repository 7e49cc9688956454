"""Which images a training step takes, and the random parameters of their transforms.

Nothing here has a state to save. Images form an endless stream, epoch after epoch, each in an order of its own, and
forward pass f takes positions f·G to (f+1)·G of it, G the batch of all processes together. The transform of an image
depends only on the seed, the image and the epoch. So a run can start at any forward pass, on any number of processes
with the same G, and sees the same pixels, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from veca.data.transforms import COLOUR_OPS, OPS, choose_ops

AugmentMode = Literal["trivial", "colour", "flip", "none"]


def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the numbers below `count` in the order of one epoch."""
    # Sorted by raw random numbers: numpy keeps those stable across versions, but not its own shuffling.
    digest = hashlib.sha256(f"order {seed} {epoch}".encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16])).random_raw(count)
    return np.argsort(raw, kind="stable")


def batch_positions(forward: int, batch_size: int, rank: int = 0, world_size: int = 1) -> range:
    """Return the positions in the stream of images that one process takes in one forward pass.

    >>> [batch_positions(2, batch_size=4, rank=rank, world_size=2) for rank in (0, 1)]
    [range(16, 20), range(20, 24)]
    """
    start = (forward * world_size + rank) * batch_size
    return range(start, start + batch_size)


class EpochSampler:
    """Gives the images, of `count`, that each forward pass of one process takes, unreadable ones included."""

    def __init__(self, count: int, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0) -> None:
        self.count, self.share, self.seed = count, (batch_size, rank, world_size), seed
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __call__(self, forward: int) -> tuple[list[int], list[int]]:
        """Return the images of a forward pass, and the epoch of each."""
        epochs, positions = np.divmod(np.array(batch_positions(forward, *self.share)), self.count)
        images, present = np.empty_like(positions), np.unique(epochs).tolist()
        cached = self._orders
        self._orders = {e: cached[e] if e in cached else epoch_order(self.count, self.seed, e) for e in present}
        for epoch in present:
            images[epochs == epoch] = self._orders[epoch][positions[epochs == epoch]]
        return images.tolist(), epochs.tolist()


def shuffled_batches(
    count: int, batch_size: int, steps: range, seed: int, rank: int = 0, world_size: int = 1
) -> Iterator[list[tuple[int, int]]]:
    """Yield for each step (position in the endless stream of epochs, image), of the share of one process.

    Fine-tuning and dense probes draw by this one. `batch_size` is that of all processes together.
    """
    epoch, order = -1, np.arange(count)
    share = batch_size // world_size
    for step in steps:
        batch = []
        first = step * batch_size + rank * share
        for position in range(first, first + share):
            if position // count != epoch:
                epoch = position // count
                order = np.random.default_rng([seed, epoch]).permutation(count)
            batch.append((position, int(order[position % count])))
        yield batch


class TransformParams(NamedTuple):
    """Random parameters of the transform of one image, or arrays of them for several images."""

    x: Any
    y: Any
    """Position of the crop, as shares of the room for it; 0.5 is the exact centre."""
    flip: Any
    scale: Any
    """Size of the crop, as a share of the way from the smallest to the largest allowed."""
    op: Any
    """Number of the TrivialAugmentWide operation."""
    strength: Any


def sample_transforms(
    seed: int, images: Sequence[int], epochs: Sequence[int], augment: AugmentMode = "trivial"
) -> TransformParams:
    """Draw the parameters of several images; those of each depend only on the seed, its number and its epoch."""
    count = len(images)
    if augment == "none":
        centre, zeros = np.full(count, 0.5), np.zeros(count)
        return TransformParams(centre, centre, zeros.astype(bool), centre, zeros.astype(np.int64), zeros)
    texts = [f"view {seed} {image} {epoch}" for image, epoch in zip(images, epochs, strict=True)]
    digests = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    # A digest of 32 bytes is four random numbers: x, y, operation, and bits for everything else.
    x, y, op, bits = np.frombuffer(digests, ">u8").astype(np.uint64).reshape(count, 4).T
    among = {"trivial": range(len(OPS)), "colour": COLOUR_OPS}.get(augment, (0,))
    ops, strengths = choose_ops(op, bits >> np.uint64(2), (bits & np.uint64(2)).astype(bool), among)
    scale, flip = (bits >> np.uint64(32)) / 2.0**32, (bits & np.uint64(1)).astype(bool)
    return TransformParams(x / 2.0**64, y / 2.0**64, flip, scale, ops, strengths)


def sample_transform(seed: int, image: int, epoch: int, augment: AugmentMode = "trivial") -> TransformParams:
    """Draw the parameters of one image, as plain numbers."""
    return TransformParams(*(values[0].item() for values in sample_transforms(seed, [image], [epoch], augment)))


def replacement(count: int, seed: int, image: int, epoch: int, attempt: int) -> int:
    """Choose another image for one that cannot be read."""
    digest = hashlib.sha256(f"instead {seed} {image} {epoch} {attempt}".encode()).digest()
    return int.from_bytes(digest[:8]) % count


def crop_offset(share: ArrayLike, room: ArrayLike) -> Any:
    """Return where crops begin, in pixels, at a share of the `room` for them: an int64 scalar or array."""
    share, room = np.asarray(share), np.asarray(room)
    random = np.minimum((share * (room + 1)).astype(np.int64), room)
    return np.where(share == 0.5, np.rint(room / 2).astype(np.int64), random)
