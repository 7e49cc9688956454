"""Fuzzes the explorer as a real server: its described API, hostile images, path traversal, invalid HTTP.

    python tests/tools/fuzz_web.py --examples 100 --uploads 500 --seed 0

First schemathesis sends valid and invalid requests for every operation of /openapi.json; then the hostile images of
`fuzz_images.py` are uploaded; then come paths that lead out of the server, and requests that are not HTTP. No answer
may be a 500, contain a file of this machine or take longer than ten seconds (measuring: a minute), and the server
must stay up within its memory limit.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import fuzz_images
from fuzzing import run_script

from veca.bench.explorer import ask, peak_mib, serving

MAX_SECONDS = 10.0
MAX_MEASURING = 60.0
MAX_MIB = 2560.0
_VIEW = "/api/view?cores=8&size=128"
OUTSIDE = [
    "/../../../../etc/passwd", "/..%2f..%2f..%2fetc/passwd", "/static/../../../etc/passwd", "//etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd", "/main.js/../app.py", "/app.py", "/__init__.py", "/static/index.html", "/etc/passwd",
    "/.git/config", "/api/pictures/../../etc/passwd", "/api/pictures/..%2f..%2fetc%2fpasswd",
    "/api/pictures/%2fetc%2fpasswd", "/api/pictures/astronaut.png", "/api/pictures/astronaut%00",
    f"{_VIEW}&picture=/etc/passwd&model=veca_tiny", f"{_VIEW}&picture=astronaut&model=/etc/passwd",
    f"{_VIEW}&picture=astronaut&model=../veca_tiny",
]  # fmt: skip
NO_HTTP = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x00" * 4096,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"a" * 70000 + b"\r\n\r\n",
    b"POST /api/pictures HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /api/pictures HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /api/pictures HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
    b"POST /api/pictures HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nshort",
    b"GET /api/about HTTP/1.1\r\nHost: localhost\r\nHost: example.org\r\n\r\n",
    b"GET /api/about HTTP/1.1\r\nHost: [::1\r\n\r\n",
    b"GET /api/about HTTP/1.1\r\n\r\n",
]  # fmt: skip


@dataclass
class Report:
    """Counts of answers by status, and everything that went wrong."""

    answers: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    asked: int = 0
    seconds: float = 0.0
    slowest: tuple[float, str] = (0.0, "")
    mib: float = 0.0

    def __str__(self) -> str:
        codes = ", ".join(f"{count} × {code}" for code, count in sorted(self.answers.items()))
        return (
            f"schemathesis: {self.asked} requests; then {sum(self.answers.values())} answers ({codes}); "
            f"{len(self.problems)} problems; {self.seconds:.1f} s; "
            f"slowest {self.slowest[0]:.2f} s ({self.slowest[1]}); most memory {self.mib:.0f} MiB"
        )


PHASES = "examples,coverage,fuzzing,stateful"


def run(
    examples: int, cases: Iterable[fuzz_images.Case], seed: int, folder: Path, *options: str, phases: str = PHASES
) -> Report:
    """Fuzz a server started with `options` of `veca explore`; `cases` are uploaded."""
    report = Report()
    started = time.perf_counter()
    with serving(*options) as (server, port):
        _run_schemathesis(port, examples, seed, phases, folder, report)
        for case in cases:
            path = folder / case.name
            path.write_bytes(case.make) if isinstance(case.make, bytes) else case.make(path)
            if path.is_file() and path.stat().st_size <= 2**26:
                _check_answer(report, port, f"upload {case.name}", "POST", "/api/pictures", path.read_bytes())
        for path in OUTSIDE:
            _check_answer(report, port, path, "GET", path)
        for sent in NO_HTTP:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
                raw.sendall(sent)
                raw.shutdown(socket.SHUT_WR)
                answer = raw.recv(64)
            if answer.startswith(b"HTTP/1.1 5"):
                report.problems.append(f"{sent[:40]!r}: {answer[:40]!r}")
        status, *_ = ask(port, "GET", "/api/about")
        if status != 200 or server.poll() is not None:
            report.problems.append(f"the server is gone: {status}, {server.poll()}")
        report.mib = peak_mib(server)
        if report.mib > MAX_MIB:
            report.problems.append(f"the server took {report.mib:.0f} MiB")
    report.seconds = time.perf_counter() - started
    return report


def _run_schemathesis(port: int, examples: int, seed: int, phases: str, folder: Path, report: Report) -> None:
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{port}/openapi.json", "--no-color",
        "--seed", str(seed), "--max-examples", str(examples), "--request-timeout", str(MAX_MEASURING),
        "--phases", phases,
        # Valid by the schema is not enough: bytes must be an image, and an id must exist.
        "--exclude-checks", "positive_data_acceptance",
    ]  # fmt: skip
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200)
    asked = re.search(r"(\d+) generated", found.stdout)
    report.asked = int(asked[1]) if asked else 0
    if found.returncode or not asked:
        report.problems.append(f"schemathesis: {found.stdout[-4000:]}{found.stderr[-1000:]}")


def _check_answer(report: Report, port: int, name: str, method: str, path: str, body: bytes | None = None) -> None:
    began = time.perf_counter()
    try:
        status, answer, _ = ask(port, method, path, body)
    except OSError as error:
        report.problems.append(f"{name}: {error!r}")
        return
    took = time.perf_counter() - began
    report.answers[status] += 1
    report.slowest = max(report.slowest, (took, name))
    if status >= 500 or took > MAX_SECONDS or b"root:x:" in answer or b"import " in answer[:2000]:
        report.problems.append(f"{name}: {status} in {took:.1f} s, {answer[:80]!r}")


if __name__ == "__main__":
    sys.exit(
        run_script(
            __doc__,
            lambda folder, examples, uploads, seed: run(examples, fuzz_images.cases(uploads, seed), seed, folder),
            examples=100,
            uploads=500,
            seed=0,
        )
    )
