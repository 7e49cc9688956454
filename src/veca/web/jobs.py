"""Work off the request thread: one thread, a bounded queue, jobs that are shared, dropped and put off.

A job is a generator: it may pause at each `yield`, where more urgent work goes first and a job nobody waits for ends.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from veca.errors import VecaError

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
MOST_PANES = 4096


class ProblemError(VecaError):
    """What a client did wrong, as it is told."""

    def __init__(self, status: int, problem: str, **headers: str) -> None:
        super().__init__(problem)
        self.status, self.problem, self.headers = status, problem, headers


class BusyError(VecaError):
    """The queue is full; a moment later it will not be."""


class DroppedError(VecaError):
    """Nobody waits for the answer any more: the client left, or asked for something else instead."""


@dataclass
class _Job:
    key: Hashable
    make: Callable[[], Steps[Any]]
    later: bool
    client: str | None = None
    turn: int = 0
    """How many jobs of the same client were there before it: clients take turns, however many jobs each has."""
    futures: list[Future[Any]] = field(default_factory=list)
    steps: Steps[Any] | None = None


class Worker:
    """One thread that does jobs; those that ask for the same thing get the same job.

    No client may take the last quarter of the queue from the others, and jobs of several clients take turns.
    """

    def __init__(self, name: str, most: int) -> None:
        self.most, self.most_of_one = most, most - most // 4
        self._condition = threading.Condition()
        self._jobs: dict[Hashable, _Job] = {}
        self._queue: list[tuple[bool, int, int, Hashable]] = []
        self._order = itertools.count()
        self._panes: OrderedDict[str, tuple[Hashable, list[Future[Any]]]] = OrderedDict()
        self._open = True
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def submit(
        self,
        key: Hashable,
        make: Callable[[], Steps[T]],
        *,
        client: str | None = None,
        pane: str | None = None,
        later: bool = False,
    ) -> Future[T]:
        """The answer of the job called `key`, made if it is not there yet; `BusyError` where it finds no place.

        What the same `pane` was waiting for under another key is dropped. With `later`, all other work goes first.
        """
        with self._condition:
            if pane is not None:
                self._supersede(pane, key)
            job = self._jobs.get(key)
            if job is None:
                turn = sum(job.client == client for job in self._jobs.values()) if client else 0
                if len(self._jobs) >= self.most or turn >= self.most_of_one or not self._open:
                    raise BusyError
                job = self._jobs[key] = _Job(key, make, later, client, turn)
                self._push(job)
            future: Future[T] = Future()
            future.set_running_or_notify_cancel()  # it is dropped, never cancelled: an answer always finds it open
            job.futures.append(future)
            if pane is not None:
                self._panes[pane][1].append(future)
            return future

    async def run(
        self,
        key: Hashable,
        make: Callable[[], Steps[T]],
        gone: Callable[[], Awaitable[object]],
        *,
        client: str | None = None,
        pane: str | None = None,
        later: bool = False,
    ) -> T:
        """`submit`, and wait; once `gone()` returns, because the client is, the job is dropped."""
        future = self.submit(key, make, client=client, pane=pane, later=later)
        answer: asyncio.Future[Any] = asyncio.wrap_future(future)
        left: asyncio.Future[Any] = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise DroppedError
            return answer.result()
        finally:
            left.cancel()
            self.drop(future)

    def drop(self, future: Future[Any]) -> None:
        """Wait for it no longer; a job that nobody waits for is not begun, or ends at its next step."""
        with self._condition:
            for job in list(self._jobs.values()):
                if future in job.futures:
                    self._leave(job, future)

    def close(self) -> None:
        with self._condition:
            self._open = False
            self._condition.notify_all()
        self._thread.join(timeout=10)

    def _supersede(self, pane: str, key: Hashable) -> None:
        before, futures = self._panes.pop(pane, (key, []))
        if before != key:
            for future in futures:
                if (job := self._jobs.get(before)) and future in job.futures:
                    self._leave(job, future)
                    future.set_exception(DroppedError())
            futures = []
        self._panes[pane] = key, [future for future in futures if not future.done()]
        if len(self._panes) > MOST_PANES:
            self._panes.popitem(last=False)

    def _leave(self, job: _Job, future: Future[Any]) -> None:
        job.futures.remove(future)
        if not job.futures and self._jobs.get(job.key) is job:
            del self._jobs[job.key]  # its place in the queue is void

    def _push(self, job: _Job) -> None:
        heapq.heappush(self._queue, (job.later, job.turn, next(self._order), job.key))
        self._condition.notify()

    def _next(self) -> _Job | None:
        with self._condition:
            while self._open:
                while self._queue:
                    later, _, _, key = heapq.heappop(self._queue)
                    if (job := self._jobs.get(key)) and job.later == later:
                        return job
                self._condition.wait()
        return None

    def _work(self) -> None:
        while job := self._next():
            result: Any = None
            error: Exception | None = None
            try:
                job.steps = job.steps or job.make()
                while True:
                    next(job.steps)
                    with self._condition:
                        if self._jobs.get(job.key) is not job or not self._open:
                            job.steps.close()
                            error = DroppedError()
                            break
                        if job.later and any(key in self._jobs for later, _, _, key in self._queue if not later):
                            self._push(job)
                            break
            except StopIteration as end:
                result = end.value
            except Exception as problem:  # whoever asked is told
                error = problem
            else:
                if error is None:
                    continue  # put off
            with self._condition:
                if self._jobs.get(job.key) is job:
                    del self._jobs[job.key]
                futures, job.futures = job.futures, []
            for future in futures:
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)


class Kept(Generic[T]):
    """The values last used, up to so many bytes in all; safe to use from several threads."""

    def __init__(self, most: int, size: Callable[[T], int]) -> None:
        self.most, self.size = most, size
        self.bytes = 0
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> T | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Hashable, value: T) -> None:
        with self._lock:
            if key in self._values:
                self.bytes -= self.size(self._values.pop(key))
            self._values[key] = value
            self.bytes += self.size(value)
            while self.bytes > self.most and len(self._values) > 1:
                self.bytes -= self.size(self._values.popitem(last=False)[1])
