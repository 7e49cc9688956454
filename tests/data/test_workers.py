"""Worker processes: what they must not do with the memory they share with their parent."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

from veca.data.workers import WorkerPool


class Cycle:
    """Garbage that only the collector frees, and that tells which process did; as a CUDA graph in a reference cycle."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.itself = folder, self

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


def collect_garbage(task: int) -> int:
    gc.collect()
    return task


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_a_forked_worker_does_not_free_garbage_of_its_parent(tmp_path: Path) -> None:
    gc.disable()
    try:
        Cycle(tmp_path)
        with WorkerPool(collect_garbage, range(3), workers=1, fork=True) as pool:
            assert list(pool) == [0, 1, 2]
        assert os.listdir(tmp_path) == []
        gc.collect()  # the parent still frees it
        assert os.listdir(tmp_path) == [str(os.getpid())]
    finally:
        gc.enable()
