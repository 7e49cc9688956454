"""Which images a training step takes, and the random parameters of their transforms.

Nothing here has a state to save. Images form an endless stream, epoch after epoch, each in an order of its own, and
forward pass f takes positions f·G to (f+1)·G of it, G the batch of all processes together. The transform of an image
depends only on the seed, the image and the epoch. So a run can start at any forward pass, on any number of processes
with the same G, and sees the same pixels, bit for bit.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from veca.data.transforms import COLOUR_OPS, OPS, Augmentation, choose_ops

AugmentMode = Literal["trivial", "colour", "flip", "none"]

# Abort after this many consecutive unreadable images
MAX_FAILURES = 100


def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the numbers below `count` in the order of one epoch."""
    # Sorted by raw random numbers: numpy keeps those stable across versions, but not its own shuffling.
    digest = hashlib.sha256(f"order {seed} {epoch}".encode()).digest()
    raw = np.random.Philox(key=int.from_bytes(digest[:16])).random_raw(count)
    return np.argsort(raw, kind="stable")


class BatchPlan(NamedTuple):
    """Images of a batch to be made, and which random variant of each."""

    resolution: int
    images: Sequence[int]
    variants: Sequence[int]
    resolutions: Sequence[int] = ()
    """Of each image, where they differ"""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of its pixels."""
        return len(self.images), self.resolution, self.resolution, 3


class TransformParams(NamedTuple):
    """Random parameters of the transform of one image, or arrays of them for several images."""

    # Position of the crop, as shares of the room for it; 0.5 is the exact centre
    x: Any
    y: Any
    flip: Any
    # Size of the crop, as a share of the way from the smallest to the largest allowed
    scale: Any
    # TrivialAugmentWide: number of the operation, and its strength
    op: Any
    strength: Any

    def item(self) -> "TransformParams":
        """Return the parameters of the first of several images, as plain numbers."""
        return TransformParams(*(values[0].item() for values in self))

    def augmentation(self) -> Augmentation:
        """Return the operations of several images, for `augment_batch`."""
        return Augmentation(torch.from_numpy(self.op), torch.from_numpy(self.strength))


@dataclass
class TrainSampler:
    """Samples the images of one process's forward passes `start`, `start` + 1, … and their transforms.

    `count` images are shuffled anew in each epoch, unreadable ones included. `resolution_of` gives the resolution of a
    forward pass. The short side of an image is resized to `short_side` × resolution before the crop; with `crops` the
    side of each crop is random instead, as a share of the short side between these two. `num_variants` limits the
    random variants of an image: epochs take them in turn. With `aspect`, a range of width over height, crops have the
    aspect ratio nearest to their image's of those that `bucket_grids` has, in patches of `patch` pixels, and
    `resolution_at` gives the resolution of each position of the stream of images.
    """

    count: int
    batch_size: int
    resolution_of: Callable[[int], int]
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    short_side: float = 1.125
    crops: tuple[float, float] | None = None
    augment: AugmentMode = "trivial"
    num_variants: int | None = None
    start: int = 0
    aspect: tuple[float, float] | None = None
    patch: int = 16
    resolution_at: Callable[[int], int] | None = None
    _orders: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[BatchPlan]:
        return map(self.plan, itertools.count(self.start))

    def plan(self, forward: int) -> BatchPlan:
        """Return the images of one forward pass."""
        first = (forward * self.world_size + self.rank) * self.batch_size
        epochs, positions = np.divmod(np.arange(first, first + self.batch_size), self.count)
        images, present = np.empty_like(positions), np.unique(epochs).tolist()
        cached = self._orders
        self._orders = {e: cached[e] if e in cached else epoch_order(self.count, self.seed, e) for e in present}
        for epoch in present:
            images[epochs == epoch] = self._orders[epoch][positions[epochs == epoch]]
        variants = epochs % self.num_variants if self.num_variants else epochs
        plan = BatchPlan(self.resolution_of(forward), images.tolist(), variants.tolist())
        if self.resolution_at is None:
            return plan
        resolutions = [self.resolution_at(position) for position in range(first, first + self.batch_size)]
        return plan._replace(resolution=max(resolutions), resolutions=resolutions)

    def candidates(self, image: int, variant: int) -> Iterator[int]:
        """Yield an image and its random replacements, to be tried until one can be read."""
        yield image
        for attempt in range(1, MAX_FAILURES):
            digest = hashlib.sha256(f"instead {self.seed} {image} {variant} {attempt}".encode()).digest()
            yield int.from_bytes(digest[:8]) % self.count

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "resolution_of": None,
            "resolution_at": None,
            "_orders": {},
        }  # workers need none, and pickle no closures


def sample_transforms(
    seed: int, images: Sequence[int], variants: Sequence[int], augment: AugmentMode = "trivial"
) -> TransformParams:
    """Draw the parameters of several images as arrays; each depends only on the seed, the image and its variant."""
    count = len(images)
    if augment == "none":
        centre, zeros = np.full(count, 0.5), np.zeros(count)
        return TransformParams(centre, centre, zeros.astype(bool), centre, zeros.astype(np.int64), zeros)
    texts = [f"view {seed} {image} {variant}" for image, variant in zip(images, variants, strict=True)]
    digests = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    # A digest of 32 bytes is four random numbers: x, y, operation, and bits for everything else.
    x, y, op, bits = np.frombuffer(digests, ">u8").astype(np.uint64).reshape(count, 4).T
    among = {"trivial": range(len(OPS)), "colour": COLOUR_OPS}.get(augment, (0,))
    ops, strengths = choose_ops(op, bits >> np.uint64(2), (bits & np.uint64(2)).astype(bool), among)
    scale, flip = (bits >> np.uint64(32)) / 2.0**32, (bits & np.uint64(1)).astype(bool)
    return TransformParams(x / 2.0**64, y / 2.0**64, flip, scale, ops, strengths)


def crop_offset(share: ArrayLike, room: ArrayLike) -> Any:
    """Return where crops begin, in pixels, at a share of the `room` for them: an int64 scalar or array."""
    share, room = np.asarray(share), np.asarray(room)
    random = np.minimum((share * (room + 1)).astype(np.int64), room)
    return np.where(share == 0.5, np.rint(room / 2).astype(np.int64), random)
