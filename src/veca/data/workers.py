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
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from itertools import chain
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
    """An array in the slot of its task."""

    offset: int
    shape: tuple[int, ...]


class SharedSlots:
    """Memory that forked workers share with this process: task n has slot n modulo their number.

    There must be one slot more than tasks under way: a slot is read before the task after those is begun. The memory is
    anonymous, not taken from /dev/shm, of which containers have little; pages that are never written take none.
    """

    def __init__(self, count: int, size: int) -> None:
        self.size, self._memory = size, mmap.mmap(-1, count * size)

    def _slot(self, task: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._memory, np.uint8, self.size, task * self.size % len(self._memory))

    def put(self, task: int, arrays: Iterable[NDArray[np.uint8]]) -> list[Placed | NDArray[np.uint8]]:
        """Copy arrays into the slot of a task, in a worker; those that do not fit are returned as they are."""
        slot, end = self._slot(task), 0
        placed = list[Placed | NDArray[np.uint8]]()
        for array in arrays:
            if end + array.size > len(slot):
                placed.append(array)
                continue
            slot[end : end + array.size].reshape(array.shape)[...] = array
            placed.append(Placed(end, array.shape))
            end += array.size
        return placed

    def get(
        self, task: int, placed: Iterable[Placed | NDArray[np.uint8]], copy: bool = False
    ) -> list[NDArray[np.uint8]]:
        """Return what `put` was given: views of the slot, which the next tasks overwrite, or with `copy` of a copy."""
        placed, slot = list(placed), self._slot(task)
        if copy:
            ends = (each.offset + math.prod(each.shape) for each in placed if isinstance(each, Placed))
            slot = slot[: max(ends, default=0)].copy()
        return [
            slot[each.offset : each.offset + math.prod(each.shape)].reshape(each.shape)
            if isinstance(each, Placed)
            else each
            for each in placed
        ]


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
