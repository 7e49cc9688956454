"""Job queue: one worker thread, a bounded queue, shared and cancellable jobs; an LRU cache.

A job is a generator. At each `yield` it may be paused for more urgent jobs, or ended if nobody waits for it any more.
"""

import asyncio
import itertools
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from veca.errors import VecaError

T = TypeVar("T")
JobSteps: TypeAlias = Generator[None, None, T]


class RequestError(VecaError):
    """A request that cannot be answered: the HTTP status, what to tell the client, and headers."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers


class BusyError(RequestError):
    """The queue is full."""

    def __init__(self, message: str = "The server is busy; try again in a moment.", **headers: str) -> None:
        super().__init__(503, message, **{"retry-after": "1"}, **headers)


class DroppedError(RequestError):
    """Nobody waits for the result any more: the client disconnected, or its pane asked for something else."""

    def __init__(self) -> None:
        super().__init__(409, "This pane asked for something else meanwhile.")


@dataclass
class QueuedJob:
    key: Hashable
    steps: JobSteps[Any]
    later: int
    client: str
    turn: int
    """How many jobs the same client had queued before: clients take turns, however many jobs each has."""
    order: int
    started: bool = False
    waiters: dict[Future[Any], str] = field(default_factory=dict)
    """Futures of those who wait for the result, and the pane of each."""


class JobQueue:
    """One thread that runs jobs in turn; requests with the same key share one job.

    One client may fill at most three quarters of the queue, and clients take turns.
    """

    def __init__(self, name: str, max_jobs: int) -> None:
        self.max_jobs, self.max_per_client = max_jobs, max_jobs - max_jobs // 4
        self.jobs: dict[Hashable, QueuedJob] = {}
        self._condition = threading.Condition()
        self._order = itertools.count()
        self._open = True
        self._thread = threading.Thread(target=self._run_jobs, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, key: Hashable, steps: JobSteps[T], *, client: str = "", pane: str = "", later: int = 0
    ) -> Future[T]:
        """The result of the job `key`, queued unless it is already; `BusyError` if there is no room.

        What the same `pane` was waiting for under another key is dropped. Those of lower `later` go first.
        """
        with self._condition:
            # At most `max_jobs` jobs: scanning them all is cheap.
            others = [job for job in self.jobs.values() if pane and job.key != key]
            for stale in [future for job in others for future, waiting in job.waiters.items() if waiting == pane]:
                self._leave(stale)
                stale.set_exception(DroppedError())
            if key not in self.jobs:
                turn = sum(job.client == client for job in self.jobs.values()) if client else 0
                if len(self.jobs) >= self.max_jobs or turn >= self.max_per_client or not self._open:
                    raise BusyError
                self.jobs[key] = QueuedJob(key, steps, later, client, turn, next(self._order))
                self._condition.notify()
            future = Future[T]()
            future.set_running_or_notify_cancel()  # it can no longer be cancelled, so setting its result cannot fail
            self.jobs[key].waiters[future] = pane
            return future

    async def run(
        self, key: Hashable, steps: JobSteps[T], disconnected: Callable[[], Awaitable[object]], **options: Any
    ) -> T:
        """`submit` and wait; the job is dropped once `disconnected()` returns."""
        future = self.submit(key, steps, **options)
        result: asyncio.Future[Any] = asyncio.wrap_future(future)
        watcher: asyncio.Future[Any] = asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait({result, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise DroppedError
            return result.result()
        finally:
            watcher.cancel()
            if not result.cancel() and not result.cancelled():
                result.exception()  # asyncio logs those that nobody has seen
            with self._condition:
                self._leave(future)

    def close(self) -> None:
        with self._condition:
            self._open = False
            self._condition.notify_all()
        self._thread.join(timeout=10)

    def _leave(self, future: Future[Any]) -> None:
        """Stop waiting; without any waiter a job is not begun, or not continued."""
        for job in list(self.jobs.values()):
            if job.waiters.pop(future, None) is not None and not job.waiters:
                del self.jobs[job.key]

    def _run_jobs(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self.jobs or not self._open)
                if not self._open:
                    break
                # Chosen anew after every step: a job goes on until it ends, unless one of lower `later` has come.
                job = min(self.jobs.values(), key=lambda job: (job.later, not job.started, job.turn, job.order))
            try:
                job.started = True
                next(job.steps)
            except StopIteration as end:
                self._finish(job, result=end.value)
            except Exception as error:  # the waiters get it; the thread goes on
                self._finish(job, error=error)
        for job in list(self.jobs.values()):
            self._finish(job, error=DroppedError())

    def _finish(self, job: QueuedJob, result: Any = None, error: Exception | None = None) -> None:
        with self._condition:
            if self.jobs.get(job.key) is job:
                del self.jobs[job.key]
            for future in job.waiters:
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)


class ByteCache(Generic[T]):
    """A thread-safe LRU cache of at most `max_bytes`; the newest value stays even if it alone exceeds that."""

    def __init__(self, max_bytes: int, size: Callable[[T], int]) -> None:
        self.max_bytes, self.size = max_bytes, size
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
            while self.bytes > self.max_bytes and len(self._values) > 1:
                self.bytes -= self.size(self._values.popitem(last=False)[1])
