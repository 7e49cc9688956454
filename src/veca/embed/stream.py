"""Partitions through one pipeline, as they come: workers and decoder are ahead of the model, files are behind it."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from veca.data.gpu_decode import GpuDecoder
from veca.data.records import TaskRecords, decode_tasks
from veca.data.sources import Item, unpack_files
from veca.embed.batches import FeatureModel, PartitionWriter
from veca.embed.partitions import Partition, PartitionState
from veca.embed.rows import WriteQueue


@dataclass(eq=False)
class _Request:
    partition: Partition
    alone: bool = False
    """Whether no other partition is under way beside it."""
    done: Future[PartitionState] = field(default_factory=Future)

    def report(self, completed: Future[PartitionState]) -> None:
        """Hand on what became of the file."""
        if error := completed.exception():
            self.done.set_exception(error)
        else:
            self.done.set_result(completed.result())


class PartitionStream:
    """Computes partitions in the order they are submitted, in a thread, with one pool of processes for all of them.

    `on_begin` is told the number of a partition when it is taken up and returns how many times that has happened, in
    this process and others that were lost. A partition that is begun again is computed alone, so that others do not
    share its fate; what `on_begin` raises becomes the partition's error. The file of a partition is completed while the
    next is computed, and what fails there is the partition's error too. After any other error the partitions under way
    are computed again, one by one, to tell which of them it belongs to.
    """

    def __init__(self, model: FeatureModel, on_begin: Callable[[int], int] = lambda number: 1) -> None:
        self.model, self.job, self._on_begin = model, model.job, on_begin
        self._gpu = GpuDecoder(self.job.device) if self.job.resizes_on_gpu else None
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        # Those to take up before others, and those that workers were given images of
        self._waiting, self._under_way = deque[_Request](), deque[_Request]()
        self._ends = deque[bool]()  # of each task under way, whether it is the last of its partition
        self._completing: Future[PartitionState] | None = None  # the file of the partition before
        # A daemon: it waits for partitions until the process ends.
        threading.Thread(target=self._run, name="partitions", daemon=True).start()

    def submit(self, partition: Partition) -> Future[PartitionState]:
        """Have a partition computed and written; what it raises is an error of this partition."""
        request = _Request(partition)
        self._requests.put(request)
        return request.done

    def _run(self) -> None:
        job, compute = self.job, self.model.compute if self.job.by_task else None
        if job.by_task and job.workers:
            self.model.warm_up()
        while True:
            if not self._waiting:
                self._waiting.append(self._requests.get())  # before there is a pool
            try:
                with decode_tasks(self._tasks(), job.decoder, job.workers, gpu=self._gpu, compute=compute) as tasks:
                    self._write(tasks)
            except BaseException as error:
                under_way = list(self._under_way) or [self._waiting.popleft()]
                self._under_way.clear()
                self._ends.clear()
                if len(under_way) == 1:
                    # Without the frames that would keep the processes of a pool that did not start
                    under_way[0].done.set_exception(error.with_traceback(None))
                else:
                    self._waiting.extendleft(_Request(each.partition, True, each.done) for each in under_way[::-1])

    def _tasks(self) -> Iterator[list[Item] | None]:
        """The tasks of partitions as they are taken up; None while there is none to take up."""
        while True:
            request = self._take()
            if request is None:
                yield None
                continue
            self._under_way.append(request)
            settings, files = self.job.settings, request.partition.files
            images = unpack_files(files, self.job.column, settings.max_pixels, fps=settings.fps)
            tasks = self.job.split_tasks(images)
            task = next(tasks, None)
            if task is None:  # a shard without images
                self._finish(request, iter(()))
            while task is not None:
                following = next(tasks, None)
                self._ends.append(following is None)
                yield task
                task = following

    def _take(self) -> _Request | None:
        """Take up the next partition. Waits for one if none is under way; their results would have to wait too."""
        if self._under_way and self._under_way[-1].alone:
            return None
        if not self._waiting:
            try:
                self._waiting.append(self._requests.get(block=not self._under_way))
            except queue.Empty:
                return None
        request = self._waiting[0]
        if not request.alone:
            try:
                request.alone = self._on_begin(request.partition.number) > 1
            except Exception as error:
                self._waiting.popleft().done.set_exception(error)
                return None
        if request.alone:
            if self._under_way:
                return None
            self._wait_for_file()
        return self._waiting.popleft()

    def _write(self, tasks: Iterator[TaskRecords]) -> None:
        for first in tasks:
            self._finish(self._under_way[0], self._tasks_of_one(first, tasks))

    def _tasks_of_one(self, task: TaskRecords, tasks: Iterator[TaskRecords]) -> Iterator[TaskRecords]:
        """The tasks of a partition, from its first on; the rest stays in `tasks`."""
        yield task
        while not self._ends.popleft():
            yield next(tasks)

    def _finish(self, request: _Request, tasks: Iterator[TaskRecords]) -> None:
        """Compute a partition and leave its file to a thread, once that of the partition before is complete."""
        writes = WriteQueue()  # its own: an error in it is of this partition
        try:
            completed = PartitionWriter(self.model, request.partition).submit(tasks, writes)
        finally:
            writes.close()
        self._wait_for_file()
        self._under_way.remove(request)
        self._completing = completed
        completed.add_done_callback(request.report)
        if request.alone:
            self._wait_for_file()

    def _wait_for_file(self) -> None:
        if self._completing is not None:
            wait([self._completing])
