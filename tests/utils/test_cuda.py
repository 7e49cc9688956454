"""`veca.utils.cuda`: an early start of CUDA."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from veca.cli import common
from veca.utils import cuda


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"):
        monkeypatch.setenv(name, "")  # so that what is set is restored
    cuda._make_context("libthereisnone.so.1")
    thread = cuda.start_cuda()
    thread.join(20)
    assert not thread.is_alive()


def test_it_does_not_import_torch() -> None:
    code = "import sys, veca.utils.cuda; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("embed photos --out f.parquet", True),
        ("embed photos --out f.parquet --device cpu", False),
        ("embed photos --out f.parquet --device=cuda:1", False),
        ("embed photos --out f --engine ray", False),
        ("embed --help", False),
        ("info", False),
    ],
)
def test_only_a_command_that_will_use_the_first_device_starts_it(
    line: str, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, (name, *args) = list[Any](), line.split()
    monkeypatch.setattr(common, "start_cuda", lambda: calls.append(1))
    monkeypatch.setattr(common.TyperCommand, "make_context", lambda *_: None)
    command = common.LazyCommand(name)
    monkeypatch.setattr(command, "load", lambda: common.TyperCommand(name))
    command.make_context(name, args)
    assert bool(calls) == starts


@pytest.mark.gpu
def test_gpu_torch_uses_the_context_that_was_started() -> None:
    code = """
        import veca.utils.cuda
        thread = veca.utils.cuda.start_cuda()
        import torch
        assert float(torch.ones(3, device="cuda").sum()) == 3
        thread.join()
    """
    subprocess.run([sys.executable, "-c", "\n".join(map(str.strip, code.splitlines()))], check=True)
