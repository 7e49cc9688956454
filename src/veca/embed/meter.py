"""How fast each stage of an embed run is, and which holds it up."""

import threading


class StageMeter:
    """Images and busy seconds of the stages of a run; threads may share it.

    A stage that several processes share has their seconds divided by their number: its rate is what all of them
    together would do if they never waited.
    """

    def __init__(self, parallel: dict[str, int] | None = None) -> None:
        self._parallel, self._lock = parallel or {}, threading.Lock()
        self._images: dict[str, int] = {}
        self._seconds: dict[str, float] = {}

    def add(self, stage: str, images: int, seconds: float) -> None:
        """Count images that a stage was busy with for so many seconds."""
        with self._lock:
            self._images[stage] = self._images.get(stage, 0) + images
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def rates(self) -> dict[str, float]:
        """Images per second of each stage at work, in the order they were first seen."""
        with self._lock:
            return {
                stage: count * max(1, self._parallel.get(stage, 1)) / self._seconds[stage]
                for stage, count in self._images.items()
                if count and self._seconds[stage] > 0
            }

    @property
    def bottleneck(self) -> str:
        """The slowest stage; empty before there is one."""
        rates = self.rates()
        return min(rates, key=rates.__getitem__) if rates else ""
