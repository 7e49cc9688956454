"""Worker processes that apply a function to a stream of tasks and return the results in order."""

import atexit
import ctypes
import math
import mmap
import multiprocessing
import queue
import signal
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from veca.errors import VecaError
from veca.utils.signals import init_signals_of_worker, starting_workers

ResultT = TypeVar("ResultT")

# Of glibc: blocks up to 32 MiB come from the heap (M_MMAP_THRESHOLD), which keeps 64 MiB when freed (M_TRIM_THRESHOLD)
_MALLOC_OPTIONS = {-3: 1 << 25, -1: 1 << 26}


class WorkerDiedError(VecaError, RuntimeError):
    """A worker process was killed or crashed."""


class Placed(NamedTuple):
    """Arrays in the slot of their task, one after another: the shape of each; and the arrays after them."""

    shapes: list[tuple[int, ...]]
    rest: list[NDArray[np.uint8]]


class SharedSlots:
    """Memory that forked workers share with this process: task n has slot n modulo their number.

    There must be one slot more than tasks under way, and one for each result that is kept while others are taken: a
    slot is read before the task after those is begun. The memory is anonymous, not taken from /dev/shm, of which
    containers have little; pages that are never written take none.
    """

    def __init__(self, count: int, size: int) -> None:
        self.size, self._memory = size, mmap.mmap(-1, count * size)

    def _slot(self, task: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._memory, np.uint8, self.size, task * self.size % len(self._memory))

    def put(self, task: int, arrays: Sequence[NDArray[np.uint8]]) -> Placed:
        """Copy arrays into the slot of a task, in a worker; from the first that does not fit on, they are sent."""
        ends = list(accumulate(array.size for array in arrays))
        slot, fitting = self._slot(task), bisect_right(ends, self.size)
        for array, end in zip(arrays[:fitting], ends, strict=False):
            slot[end - array.size : end].reshape(array.shape)[...] = array
        return Placed([array.shape for array in arrays[:fitting]], list(arrays[fitting:]))

    def get(self, task: int, placed: Placed, copy: bool = False) -> list[NDArray[np.uint8]]:
        """Return what `put` was given: views of the slot, which the next tasks overwrite, or with `copy` of a copy."""
        ends = list(accumulate(map(math.prod, placed.shapes), initial=0))
        slot = self._slot(task)[: ends[-1]]
        slot = slot.copy() if copy else slot
        arrays = [slot[start:end] for start, end in pairwise(ends)]
        shaped = zip(arrays, placed.shapes, strict=True)
        return [array if len(shape) == 1 else array.reshape(shape) for array, shape in shaped] + placed.rest


class _Tasks(Dataset[Any]):
    """A dataset whose item at a task is the task itself."""

    def __getitem__(self, task: Any) -> Any:
        return task


class WorkerPool(Iterator[ResultT], AbstractContextManager["WorkerPool[ResultT]"]):
    """Applies `work` to each of `tasks` in `workers` processes (0: in this one); iterates over results in order.

    Tasks are taken as results are asked for, up to `prefetch` of them for each worker in advance. With `fork` the
    processes are forks of this one on any platform, and share what it has, such as memory or a compiled model. They
    run until `close`, which a `with` block calls, or until the interpreter ends.
    """

    def __init__(
        self, work: Callable[[Any], ResultT], tasks: Iterable[Any], workers: int, prefetch: int = 2, fork: bool = False
    ) -> None:
        # Built on DataLoader for its ordering, prefetching and watching over processes; its sampler gives the tasks.
        loader = DataLoader(
            _Tasks(),
            batch_size=None,
            sampler=tasks,
            num_workers=workers,
            collate_fn=work,
            worker_init_fn=_init_worker,
            prefetch_factor=prefetch if workers else None,
            multiprocessing_context="fork" if workers and fork else None,
            generator=torch.Generator(),  # else it would draw from the caller's random numbers
        )
        method = (loader.multiprocessing_context or multiprocessing).get_start_method() if workers else ""
        sigchld = getattr(signal, "SIGCHLD", None)  # None on Windows
        handler = signal.getsignal(sigchld) if sigchld else None
        with starting_workers(forked=method == "fork"):
            self._results: Any = iter(loader)
            _open_pools.add(self)
        # Undo torch's handler, set just now or by an earlier loader. It would raise a worker's death at an arbitrary
        # point of the main process; `next` reports it anyway.
        if sigchld and threading.current_thread() is threading.main_thread():
            of_torch = getattr(handler, "__module__", "") == signal_handling.__name__
            signal.signal(sigchld, signal.SIG_DFL if of_torch else handler)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> ResultT:
        try:
            return next(self._results)
        except RuntimeError as error:
            if "DataLoader worker (pid" not in str(error):
                raise
            raise WorkerDiedError(str(error).rstrip(". ")) from error

    @property
    def processes(self) -> list[Any]:
        """The worker processes."""
        return list(getattr(self._results, "_workers", []))

    def close(self) -> None:
        """End the processes. The garbage collector would keep them alive as long as a traceback that refers to them."""
        getattr(self._results, "_shutdown_workers", lambda: None)()
        for process in self.processes:
            if process.is_alive():  # it hangs, and ignores SIGTERM
                process.kill()
                process.join()


def prefetch(items: Iterator[ResultT]) -> Generator[ResultT]:
    """Make each item in a thread while the one before it is in use."""
    ready: queue.Queue[ResultT | BaseException | None] = queue.Queue(1)
    stop = threading.Event()

    def make() -> None:
        try:
            for item in chain(items, (None,)):
                ready.put(item)
                if stop.is_set():
                    return
        except BaseException as error:
            ready.put(error)

    # A daemon, unlike the threads of an executor: the interpreter does not wait for it if a worker hangs.
    thread = threading.Thread(target=make, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        with suppress(queue.Empty):
            ready.get_nowait()  # room for the item that the thread is about to put
        thread.join(10.0)  # it may wait for a worker that hangs, which is killed after this


_open_pools: weakref.WeakSet[WorkerPool[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_open_pools):  # the interpreter would wait for processes that ignore SIGTERM
        pool.close()


def _init_worker(_: int) -> None:
    init_signals_of_worker()
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    # Freed memory is kept for the next image: allocating anew is a quarter of the time a JPEG takes.
    Image.core.set_blocks_max(4)  # type: ignore[attr-defined]
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):
        for option, size in _MALLOC_OPTIONS.items():
            libc.mallopt(option, size)
