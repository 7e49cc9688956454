"""Running a benchmark: every contender of every case, interleaved in one run on one machine."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from veca.bench import contenders
from veca.bench.accuracy import add_errors
from veca.bench.cases import BACKWARD_TARGET, Bench, Case, target_ms
from veca.bench.contenders import BenchSetting, Contender, Prepared, Workload, choose_contenders
from veca.bench.machine import KernelTime, copy_rate, empty_cache, machine_facts, profile_call
from veca.bench.report import BenchRow, Results, baseline
from veca.errors import ArgumentError
from veca.utils.console import progress_bar
from veca.utils.device import choose_device, peak_device_bytes
from veca.utils.files import check_writable, locked
from veca.utils.timing import Call, describe, matrix_rate, measure, synchronize

FloatDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]

MEASUREMENTS: dict[Bench, dict[str, dict[str, Contender]]] = {
    "model": {"model forward": contenders.MODEL},
    "train": {"train step": contenders.TRAIN},
    "attention": {
        "attention forward": contenders.ATTENTION_FORWARD,
        "attention backward": contenders.ATTENTION_BACKWARD,
    },
}
"""What each benchmark measures in every case, and the contenders of each measurement."""


@dataclass(frozen=True)
class Floors:
    """Peak rates of this machine, measured in the run: they bound every contender."""

    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def measure(cls, setting: BenchSetting) -> Floors:
        return cls(matrix_rate(setting.device, setting.dtype), copy_rate(setting.device))

    def seconds(self, prepared: Prepared) -> float:
        """The shortest time one call can take."""
        return prepared.flops / self.flops_per_s if prepared.bytes is None else prepared.bytes / self.bytes_per_s


def pick_setting(device: str = "auto", dtype: FloatDtype | None = None, cls_only: bool = False) -> BenchSetting:
    """The device ("auto": CUDA if available) and, unless given, the precision customary on it."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # events are recorded on the current device
    dtype = dtype or ("bfloat16" if chosen.type == "cuda" else "float32")
    return BenchSetting(chosen, getattr(torch, dtype), cls_only)


def run_bench(
    bench: Bench,
    cases: Sequence[Case],
    setting: BenchSetting,
    names: Sequence[str] = (),
    repeats: int = 10,
    profile: bool = False,
    out: Path | None = None,
    errors: bool = True,
) -> Results:
    """Measure the contenders called `names` (none: all that apply); the folder `out` is updated after every case."""
    if repeats < 1:
        raise ArgumentError(f"repeats={repeats}: must be at least 1")
    if out is not None:
        check_writable(out, folder=True)
    # Names of contenders are checked here, before anything is measured.
    product = itertools.product(cases, MEASUREMENTS[bench].items())
    plan = [(what, case, choose_contenders(known, names, case)) for case, (what, known) in product]
    settings = {"bench": bench, "dtype": str(setting.dtype).removeprefix("torch."), "repeats": str(repeats)}
    settings |= {"date": datetime.date.today().isoformat()} | ({"cls only": "yes"} if setting.cls_only else {})
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with locked(out) if out is not None else nullcontext(), progress_bar(*columns, transient=True) as progress:
        task = progress.add_task("floors of this machine", total=sum(len(chosen) + 1 + errors for *_, chosen in plan))
        floors = Floors.measure(setting)
        rates = {"TFLOP/s": floors.flops_per_s / 1e12, "GB/s": floors.bytes_per_s / 1e9}
        results = Results(machine_facts(setting.device), settings, rates)
        for what, case, chosen in plan:

            def report_step(step: str, label: str = f"{what}, {case}") -> None:
                progress.update(task, description=f"{label}: {step}", advance=1)
                if not progress.console.is_terminal:  # a log shows no bar: print a line instead
                    progress.console.print(f"{label}: {step}", soft_wrap=True)

            run = CaseRun(what, case, setting, floors)
            workload = Workload(case, setting, torch.float32 if bench == "train" else None)
            run.prepare(chosen, workload, report_step)
            report_step("all take turns")
            rows = with_targets(bench, setting, run.rows(repeats), results.rows)
            if errors:  # after the timing: the float64 reference takes memory
                report_step("errors")
                rows = add_errors(rows, run.calls(), workload)
            results.rows += rows
            results.profile += run.profile() if profile else []
            # Compiled code and CUDA graphs of one case must not take memory from the next.
            del run, workload
            torch.compiler.reset()
            empty_cache(setting.device)
            if out is not None:
                results.save(out)
    return results


class CaseRun:
    """One measurement of one case: its contenders, timed in turns."""

    def __init__(self, what: str, case: Case, setting: BenchSetting, floors: Floors) -> None:
        self.what, self.case, self.device, self.floors = what, case, setting.device, floors
        self.entries: dict[str, Prepared | str] = {}
        """By contender; a string says why it failed."""

    def prepare(self, chosen: dict[str, Contender], workload: Workload, report_step: Callable[[str], None]) -> None:
        for name, contender in chosen.items():
            report_step(name)
            self.entries[name] = _first_call(contender, workload)
            empty_cache(self.device)  # also after an out-of-memory error, so that the next one has room

    def calls(self) -> dict[str, Call]:
        return {name: entry.call for name, entry in self.entries.items() if isinstance(entry, Prepared)}

    def rows(self, repeats: int) -> list[BenchRow]:
        """Time all contenders in turns; one row each, in order."""
        on_cuda, failed = self.device.type == "cuda", dict[str, str]()
        warmup = 3 if on_cuda else 1
        seconds = measure(self.calls(), self.device, repeats, warmup=warmup, repeat_short=on_cuda, failed=failed)
        self.entries |= failed  # a call may fail only after its first
        dense = baseline({name: statistics.median(samples) for name, samples in seconds.items()})
        case, rows = self.case, []
        for name, entry in self.entries.items():
            values = {"failure": entry} if isinstance(entry, str) else self._figures(entry, seconds[name], dense)
            rows.append(BenchRow(self.what, name, case.model, case.size, case.batch, case.cores, **values))
        return rows

    def _figures(self, entry: Prepared, seconds: Sequence[float], dense: float | None) -> dict[str, Any]:
        flops, floor, median = entry.flops, self.floors.seconds(entry), statistics.median(seconds)
        return {
            "ms": 1e3 * median,
            "best_ms": 1e3 * min(seconds),
            "images_per_s": self.case.batch / median,
            "gflops": flops / self.case.batch / 1e9,
            "tflops_per_s": flops / median / 1e12,
            "peak_mib": None if entry.peak is None else entry.peak / 2**20,
            "floor_ms": 1e3 * floor,
            "floor_share": floor / median,
            "against_dense": None if dense is None else dense / median,
            "first_call_s": entry.first_call_s,
        }

    def profile(self) -> list[dict[str, Any]]:
        """The longest kernels of each contender; an error of the profiler becomes an entry."""
        profiles = []
        for name, call in self.calls().items():
            try:
                spent = profile_call(call, self.device)
            except Exception as error:
                spent = [KernelTime(describe(error), 0.0, 0)]
            profiles.append({"what": self.what, "case": str(self.case), "contender": name, "spent": spent})
        return profiles


def _first_call(contender: Contender, workload: Workload) -> Prepared | str:
    """Build a contender, call it, and measure the peak memory of its second call; errors come back as a line."""
    device = workload.setting.device
    try:
        prepared = contender.build(workload)
        start = time.perf_counter()
        prepared.call()
        synchronize(device)
        seconds = time.perf_counter() - start + prepared.built_s
        peak = peak_device_bytes(prepared.call, device)  # a CUDA graph is captured in the second call
    except Exception as error:  # the other contenders and cases go on
        return describe(error)
    peak = None if peak is None else peak + prepared.resident
    return prepared._replace(first_call_s=seconds if contender.compiled else None, peak=peak)


def with_targets(
    bench: Bench, setting: BenchSetting, rows: list[BenchRow], earlier: Sequence[BenchRow]
) -> list[BenchRow]:
    """The rows with target times for `veca`, where the case has one and the setting is the targets' own."""
    if setting.device.type != "cuda" or setting.dtype != torch.bfloat16 or setting.cls_only:
        return rows
    forward_ms = {r.case: r.ms for r in earlier if (r.what, r.contender) == ("attention forward", "veca")}

    def target(row: BenchRow) -> float | None:
        if row.contender != "veca":
            return None
        if row.what != "attention backward":
            return target_ms(bench, row.case)
        forward = forward_ms.get(row.case)
        return None if forward is None else BACKWARD_TARGET * forward

    return [dataclasses.replace(row, target_ms=target(row)) for row in rows]
