"""Timing of calls, interleaved so that other load on the machine affects all of them alike.

On CUDA a sample is the time between two events on the stream; elsewhere it is wall-clock time.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from veca.errors import VecaError

Call: TypeAlias = Callable[[], object]

# Calls shorter than this many seconds are repeated within a sample, so that launch gaps do not count.
_SHORT_CALL = 1e-3
_SAMPLE_SECONDS = 5e-3
_MAX_CALLS = 100
_LEAST_CPU_SHARE = 0.8
"""Of the CPU time of all threads: with less, other programs ran too, and a rate is not the machine's."""


class BusyMachineError(VecaError, RuntimeError):
    """A peak rate that could not be measured, because other programs used the CPU."""


def measure(
    calls: Mapping[str, Call],
    device: torch.device,
    repeats: int,
    *,
    warmup: int = 1,
    repeat_short: bool = False,
    failed: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each call in `repeats` rounds; every round makes each call once.

    The first `warmup` rounds are dropped. With `repeat_short`, calls that were short in them are repeated within each
    sample. With `failed`, a call that raises is left out from then on, and its error is added there.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    count = dict.fromkeys(calls, 1)
    for round_ in range(warmup + repeats):
        for name in list(seconds):
            try:
                sample = timed(calls[name], device, count[name])
            except Exception as error:
                if failed is None:
                    raise
                failed[name] = describe(error)
                del seconds[name]
                continue
            if round_ >= warmup:
                seconds[name].append(sample)
            elif repeat_short:
                # As often as fills a sample: 1 for 20 ms, 10 for 0.5 ms.
                enough = min(_MAX_CALLS, math.ceil(_SAMPLE_SECONDS / max(sample, 1e-9)))
                count[name] = 1 if sample >= _SHORT_CALL else enough
    return seconds


def timed(call: Call, device: torch.device, count: int = 1) -> float:
    """Mean seconds of `count` calls, one after another."""
    synchronize(device)
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count
    begin = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) / count


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def describe(error: Exception) -> str:
    """An error as one short line, for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matrix product, the best of a few: nothing made of such products runs faster."""
    side = 8192 if device.type == "cuda" else 256
    while True:
        a, b, out = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(3))
        product = functools.partial(torch.mm, a, b, out=out)
        # Large is what keeps the machine busy for a while; a CPU without instructions for a dtype is busy very soon.
        timed(product, device)  # the first call starts threads and libraries
        if side >= 2048 or timed(product, device) >= 0.02:
            return 2 * side**3 / best_seconds(product, device)
        side *= 2


def best_seconds(call: Call, device: torch.device, samples: int = 10) -> float:
    """Seconds of the fastest of some samples, after two to warm up; refused on a busy CPU."""
    times = 1 if device.type == "cpu" else 4
    timed(call, device, 2 * times)
    start, start_cpu = time.perf_counter(), time.process_time()
    best = min(timed(call, device, times) for _ in range(samples))
    threads = torch.get_num_threads()
    share = (time.process_time() - start_cpu) / (time.perf_counter() - start) / threads
    if device.type == "cpu" and share < _LEAST_CPU_SHARE:
        raise BusyMachineError(
            f"the machine is busy: this process got {share:.0%} of the CPU time of its {threads} threads. "
            "Measure again when nothing else runs, or with fewer threads: OMP_NUM_THREADS"
        )
    return best
