"""Learning rate schedule, and random draws per step (budget, resolution).

Each is a function of the step and the seed alone: every process computes the same without communication, and a resumed
run draws what it would have drawn.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping


def learning_rate(step: int, total: int, warmup: int, peak: float, low: float) -> float:
    """Linear warm-up from `low` to `peak` in `warmup` steps, then a half cosine down to `low` at step `total`.

    >>> [learning_rate(step, total=8, warmup=4, peak=5.0, low=1.0) for step in (0, 2, 4, 6, 8)]
    [1.0, 3.0, 5.0, 3.0, 1.0]
    """
    progress = (step - warmup) / max(1, total - warmup)
    share = step / warmup if step < warmup else (1 + math.cos(math.pi * progress)) / 2
    return low + (peak - low) * share


def draw(odds: Mapping[int, float], stream: str, seed: int, step: int) -> int:
    """One of the keys, with probability proportional to its odds. Streams with different names are independent.

    >>> draw({8: 1, 16: 1, 64: 0}, "budget", seed=0, step=7) in (8, 16)
    True
    """
    remaining = step_seed(stream, seed, step) / 2**64 * sum(odds.values())
    for key, odd in odds.items():
        remaining -= odd
        if remaining < 0:
            return key
    return [key for key, odd in odds.items() if odd][-1]  # rounding: the last possible one


def step_seed(stream: str, seed: int, step: int) -> int:
    """A seed of 64 bits for one step of one stream."""
    return int.from_bytes(hashlib.sha256(f"{stream} {seed} {step}".encode()).digest()[:8])
