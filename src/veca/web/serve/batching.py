"""Dynamic batching: items of equal key, from whatever requests, are worked on together."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from veca.errors import VecaError
from veca.web.jobs import BusyError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
R = TypeVar("R")
MAX_FAILED_BATCHES = 3
"""Batches in a row that may fail before the model counts as broken."""


@dataclass
class _Waiting(Generic[K, T, R]):
    key: K
    item: T
    since: float
    future: "Future[R]"


class Batcher(Generic[K, T, R]):
    """Runs `run(key, items)`, whose results are those of the items in their order, in one thread or several.

    The oldest item decides which key is next. Its batch begins when it has `max_batch(key)` items, or when the oldest
    has waited for `max_wait` seconds. While a batch runs the next ones gather. Cancelled items are left out.

    A batch that fails gives each of its items `BusyError`, or the error itself if that is a `VecaError`, and the next
    one follows. After `MAX_FAILED_BATCHES` in a row `broken` is true and `on_broken` is called.
    """

    def __init__(
        self, run: Callable[[K, list[T]], Sequence[R]], max_batch: Callable[[K], int], max_wait: float, threads: int = 1
    ) -> None:
        self.run, self.max_batch, self.max_wait = run, max_batch, max_wait
        self.failures, self.broken = 0, False
        self.on_broken: Callable[[], object] = lambda: None
        self._waiting: list[_Waiting[K, T, R]] = []  # the oldest first
        self._condition = threading.Condition()
        self.is_open = True
        names = (f"veca-model-{number}" for number in range(threads))
        self._threads = [threading.Thread(target=self._run_batches, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        """Items that wait for their batch to begin."""
        return len(self._waiting)

    def submit(self, key: K, items: Sequence[T]) -> "list[Future[R]]":
        """Queue items; a future that is cancelled before its batch begins is dropped from it."""
        added = [_Waiting[K, T, R](key, item, time.monotonic(), Future()) for item in items]
        with self._condition:
            if not self.is_open:
                raise BusyError("The server is shutting down.", connection="close")
            self._waiting += added
            self._condition.notify()
        return [waiting.future for waiting in added]

    def close(self) -> None:
        """Finish what is queued, and end the threads."""
        with self._condition:
            self.is_open = False
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _run_batches(self) -> None:
        while batch := self._next_batch():
            results: Sequence[Any]
            try:
                results = self.run(batch[0].key, [waiting.item for waiting in batch])
                self.failures = 0
            except VecaError as error:
                results = [error] * len(batch)
            except Exception as error:
                logging.getLogger("uvicorn.error").exception("a batch of %d images failed", len(batch))
                results = [BusyError(f"The model failed ({type(error).__name__}); try again.")] * len(batch)
                self.failures += 1
            for waiting, result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    waiting.future.set_exception(result)
                else:
                    waiting.future.set_result(result)
            if self.failures >= MAX_FAILED_BATCHES and not self.broken:
                self.broken = True
                self.on_broken()

    def _next_batch(self) -> list[_Waiting[K, T, R]]:
        """The items to run next, once it is time for them; none when the queue is closed and empty."""
        with self._condition:
            while True:
                self._waiting = [waiting for waiting in self._waiting if not waiting.future.cancelled()]
                if not self._waiting:
                    if not self.is_open:
                        return []
                    self._condition.wait()
                    continue
                first = self._waiting[0]
                limit = self.max_batch(first.key)
                batch = list(islice((waiting for waiting in self._waiting if waiting.key == first.key), limit))
                left = first.since + self.max_wait - time.monotonic()
                if len(batch) < limit and left > 0 and self.is_open:
                    self._condition.wait(left)
                    continue
                chosen = set(map(id, batch))
                self._waiting = [waiting for waiting in self._waiting if id(waiting) not in chosen]
                # From here on an item can no longer be cancelled, so setting its result cannot fail.
                if batch := [waiting for waiting in batch if waiting.future.set_running_or_notify_cancel()]:
                    return batch
