"""What changes from step to step: the learning rate, and the budget and resolution that are drawn.

Each is a function of the step and the seed alone, so every process finds the same without asking the others, and a run
that continues finds what it would have found.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping


def learning_rate(step: int, total: int, warmup: int, peak: float, low: float) -> float:
    """From `low` straight up to `peak` in `warmup` steps, then down a half cosine to `low` at step `total`.

    >>> [learning_rate(step, total=8, warmup=4, peak=5.0, low=1.0) for step in (0, 2, 4, 6, 8)]
    [1.0, 3.0, 5.0, 3.0, 1.0]
    """
    done = (step - warmup) / max(1, total - warmup)
    share = step / warmup if step < warmup else (1 + math.cos(math.pi * done)) / 2
    return low + (peak - low) * share


def draw(odds: Mapping[int, float], stream: str, seed: int, step: int) -> int:
    """One of the keys, by its odds. Streams with different names draw independently of each other.

    >>> draw({8: 1, 16: 1, 64: 0}, "budget", seed=0, step=7) in (8, 16)
    True
    """
    left = seed_of(stream, seed, step) / 2**64 * sum(odds.values())
    for key, odd in odds.items():
        left -= odd
        if left < 0:
            return key
    return [key for key, odd in odds.items() if odd][-1]  # rounding left nothing


def seed_of(stream: str, seed: int, step: int) -> int:
    """64 bits for one step of one stream."""
    return int.from_bytes(hashlib.sha256(f"{stream} {seed} {step}".encode()).digest()[:8])
