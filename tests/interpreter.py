"""Tests that run kernels on a CPU, in Triton's interpreter."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_tests: defaultdict[str, list[str]] = defaultdict(list)


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Run `test` in Triton's interpreter.

    Triton must know of it before it is imported. So all these tests of a file run in one process of their own, and each
    shows here how it ended there. With TRITON_INTERPRET=1 already set they run in place, where a debugger can stop.
    """
    if INTERPRETED:
        return test
    file = inspect.getfile(test)
    _tests[file].append(test.__name__)

    @functools.wraps(test)
    def elsewhere(**_: object) -> None:
        name = os.environ["PYTEST_CURRENT_TEST"].rsplit("::", 1)[-1].removesuffix(" (call)")
        if problem := _problems(file)[name]:
            pytest.fail(problem, pytrace=False)

    return elsewhere


@functools.cache
def _problems(file: str) -> dict[str, str]:
    """What is wrong with each interpreted test of a file, by name."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [f"{file}::{name}" for name in _tests[file]]
        process = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert process.returncode in (0, 1), process.stdout + process.stderr  # 1: some test failed
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {case.get("name", ""): "\n".join(problem.text or "" for problem in case) for case in cases}
