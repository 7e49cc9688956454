"""Print the largest errors of tests/test_golden.py, for results/exactness/golden.csv.

Runs these tests on the CPU, and on a GPU if there is one, and records every comparison with the authors' numbers.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))

import conftest  # noqa: E402

ROWS = {
    ("test_outputs_at_every_budget", 2): "global feature",
    ("test_outputs_at_every_budget", 3): "patches",
    ("test_outputs_at_every_budget", 4): "core coordinates",
    ("test_hidden_states", 3): "hidden states, C = 24",
    ("assert_close", 1): "loss values (absolute)",
}
"""Quantities by the test that compares them and the number of dimensions; everything else is a gradient."""


class Recorder:
    """Pytest plugin that records the largest error of each quantity."""

    def __init__(self) -> None:
        self.test = ""
        self.worst: defaultdict[str, float] = defaultdict(float)
        self.exact = conftest.relative_error, torch.testing.assert_close

    def pytest_runtest_setup(self, item: Any) -> None:
        self.test = item.originalname
        item.module.relative_error = self.record_relative
        torch.testing.assert_close = self.record_absolute

    def record_relative(self, actual: Tensor, expected: Tensor) -> float:
        error = self.exact[0](actual, expected)
        name = ROWS.get((self.test, expected.ndim), "gradients, every parameter")
        self.worst[name] = max(self.worst[name], error)
        return error

    def record_absolute(self, actual: Tensor, expected: Tensor, **tolerances: float) -> None:
        name = ROWS["assert_close", 1]
        self.worst[name] = max(self.worst[name], float((actual - expected).detach().abs().max()))
        self.exact[1](actual, expected, **tolerances)


if __name__ == "__main__":
    recorder = Recorder()
    status = pytest.main([str(TESTS / "test_golden.py"), "-q", "-p", "no:cacheprovider"], plugins=[recorder])
    for name, error in recorder.worst.items():
        print(f'"{name}",{error:.1e}'.replace("e-0", "e-"))
    sys.exit(status)
