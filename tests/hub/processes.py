"""Tools of these tests: training under DistributedDataParallel, and programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sample_images import random_images
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def assert_ddp_trains(model: nn.Module, loss_of: Callable[[Any], Tensor]) -> None:
    """Two steps without `find_unused_parameters`: the second fails if the first left a parameter without gradient."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
        for _ in range(2):
            loss_of(parallel(random_images())).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.destroy_process_group()


def run_program(program: str, *arguments: str | Path, folder: Path) -> str:
    """What a program prints, in a process of its own with `folder` as its home and current folder."""
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout
