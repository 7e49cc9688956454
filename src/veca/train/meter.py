"""Running means of losses, training speed and skipped steps, accumulated without synchronising the device."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

SMOOTHING = 0.8
"""Share of the earlier intervals that is kept in the smoothed speed."""


class TrainMeter:
    """Means of the losses and images per second.

    `update` only queues work on the device; `values` is the one place that waits for it. The speed leaves out `pause`d
    time and the first step of each number of images, budget and resolution: those may compile.
    `images` and `seconds` are the totals of a resumed run so far.
    """

    def __init__(
        self, budgets: Iterable[int] = (), resolutions: Iterable[int] = (), images: int = 0, seconds: float = 0.0
    ) -> None:
        self.images, self.seconds, self.rate = images, seconds, math.nan
        self._counts = {"budget": dict.fromkeys(budgets, 0), "resolution": dict.fromkeys(resolutions, 0)}
        self.names: list[str] = []
        """Of the losses."""
        self._sums: Tensor | None = None
        """Sums of the losses over steps with finite ones, and the number of these steps, on the device."""
        self._steps, self._seen = 0, set[tuple[int, int | None, int | None]]()
        self._timed = [0, 0.0]  # images and seconds that count for the speed, since the last `values`
        self._smoothed = [0.0, 0.0]
        self._last_tick, self._counts_for_speed = perf_counter(), False

    @torch.no_grad()
    def update(
        self, losses: Mapping[str, Tensor], images: int, budget: int | None = None, resolution: int | None = None
    ) -> None:
        """Add one optimizer step: its losses, scalars on the device, and its number of images."""
        values = torch.stack([value.float() for value in losses.values()])
        # A non-finite step must not spoil the mean of the others; it is counted instead.
        finite = values.isfinite().all()
        row = torch.cat([torch.where(finite, values, 0.0), finite.float()[None]])
        self._sums = row if self._sums is None else self._sums + row
        self.names = list(losses)
        # Shapes that occur for the first time may compile, which is not training speed.
        kind = (images, budget, resolution)
        self._counts_for_speed = kind in self._seen
        self._tick()
        self._timed[0] += images * self._counts_for_speed
        self._seen.add(kind)
        self.images += images
        self._steps += 1
        for counts, drawn in zip(self._counts.values(), (budget, resolution), strict=True):
            if drawn is not None:
                counts[drawn] = counts.get(drawn, 0) + 1

    def _tick(self) -> None:
        """Count the time since the last tick as training, and for the speed if its step does."""
        now = perf_counter()
        self.seconds += now - self._last_tick
        self._timed[1] += (now - self._last_tick) * self._counts_for_speed
        self._last_tick = now

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time of the block, as validation. Call `values` first, which waits for the device."""
        self._tick()
        try:
            yield
        finally:
            self._last_tick = perf_counter()

    def values(self) -> dict[str, float]:
        """What to log of the steps since the last call; this waits for the device.

        Means of the losses over the steps with finite ones, the number of the others (`nonfinite`), how often each
        budget and resolution was drawn (`budget_8`, `resolution_256`, …), `images` and `seconds` of training in all,
        and smoothed `images_per_s` (nan until there is one).
        """
        *sums, count = self._sums.tolist() if self._sums is not None else [0.0]
        self._tick()
        values = {name: total / count if count else math.nan for name, total in zip(self.names, sums, strict=False)}
        # Images and seconds are smoothed separately: their ratio weights steps by their duration.
        self._smoothed = [SMOOTHING * old + new for old, new in zip(self._smoothed, self._timed, strict=True)]
        if self._smoothed[0] and self._smoothed[1] > 0:
            self.rate = self._smoothed[0] / self._smoothed[1]
        values |= {"nonfinite": self._steps - count, "images": self.images, "seconds": self.seconds}
        values["images_per_s"] = self.rate
        for name, counts in self._counts.items():
            values |= {f"{name}_{drawn}": times for drawn, times in counts.items()}
            counts.update(dict.fromkeys(counts, 0))
        self._sums, self._steps, self._timed = None, 0, [0, 0.0]
        return values

    def state(self) -> dict[str, Any]:
        """What was added since the last `values`, as plain data for a checkpoint; this waits for the device too."""
        sums = None if self._sums is None else self._sums.tolist()
        return {"sums": sums, "steps": self._steps, **{f"{name}s": counts for name, counts in self._counts.items()}}

    def restore(self, states: Sequence[Mapping[str, Any]], rank: int, size: int, device: torch.device) -> None:
        """Continue from the `state` of each process; if their number has changed, each continues from the mean."""
        own = states[rank if len(states) == size else 0]
        self._steps = own["steps"]
        if own["sums"] is not None:
            sums = [state["sums"] for state in states] if len(states) != size else [own["sums"]]
            self._sums = torch.tensor(sums, dtype=torch.float32, device=device).mean(0)
        for name, counts in self._counts.items():
            counts.update({int(drawn): times for drawn, times in own[f"{name}s"].items()})  # JSON makes keys text


class SkippedSteps:
    """Counts skipped steps on the device; the host reads the counts without waiting, and so a little late."""

    def __init__(self, device: torch.device, total: int = 0) -> None:
        counts = [0, total, 0]  # consecutive, total, most consecutive
        self._counts = torch.tensor(counts, dtype=torch.int32, device=device)
        self._on_host = torch.tensor(counts, dtype=torch.int32, pin_memory=device.type == "cuda")

    def update(self, skip: Tensor) -> None:
        """`skip`, a scalar on the device, is 1 if the step was skipped."""
        consecutive, total, most = self._counts.unbind()
        consecutive = (consecutive + 1) * skip.int()
        self._counts = torch.stack([consecutive, total + skip.int(), torch.maximum(most, consecutive)])
        self._on_host.copy_(self._counts, non_blocking=True)

    def read(self) -> tuple[int, int]:
        """Skipped steps in all, and most in a row."""
        _, total, most = self._on_host.tolist()
        return total, most
