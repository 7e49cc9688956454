"""The sweeps: every contender of every case, side by side in one run on one machine."""

from __future__ import annotations

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from veca.bench import contenders
from veca.bench.accuracy import add_errors
from veca.bench.cases import BACKWARD_TARGET, Bench, Case, target_ms
from veca.bench.contenders import Contender, Prepared, Setting, Workload, choose
from veca.bench.machine import (
    Spent,
    copy_rate,
    forget,
    give_back,
    machine_facts,
    peak_bytes,
    where_the_time_goes,
)
from veca.bench.report import BenchRow, Results, baseline
from veca.errors import ArgumentError
from veca.utils.console import progress_bar
from veca.utils.device import choose_device
from veca.utils.files import check_writable, locked
from veca.utils.timing import Call, describe, matrix_rate, measure, synchronize

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]

PARTS: dict[Bench, dict[str, dict[str, Contender]]] = {
    "model": {"model forward": contenders.MODEL},
    "train": {"train step": contenders.TRAIN},
    "attention": {
        "attention forward": contenders.ATTENTION_FORWARD,
        "attention backward": contenders.ATTENTION_BACKWARD,
    },
}
"""What each bench measures, one after the other in every case."""


@dataclass(frozen=True)
class Floors:
    """The rates of this machine, measured in the run: no contender can do better."""

    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def measure(cls, setting: Setting) -> Floors:
        return cls(matrix_rate(setting.device, setting.dtype), copy_rate(setting.device))

    def seconds(self, prepared: Prepared) -> float:
        if prepared.bytes is not None:
            return prepared.bytes / self.bytes_per_s
        return prepared.flops / self.flops_per_s

    def shown(self) -> dict[str, float]:
        return {"TFLOP/s": self.flops_per_s / 1e12, "GB/s": self.bytes_per_s / 1e9}


class Entry(NamedTuple):
    """A contender that has come through its first call."""

    prepared: Prepared
    first_call_s: float | None
    peak: int | None


def pick_setting(device: str = "auto", dtype: Dtype | None = None, cls_only: bool = False) -> Setting:
    """The device, CUDA where there is one, and the precision people use on it."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = choose_device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # events are recorded on the current device
    dtype = dtype or ("bfloat16" if chosen.type == "cuda" else "float32")
    return Setting(chosen, getattr(torch, dtype), cls_only)


def run_bench(
    bench: Bench,
    cases: Sequence[Case],
    setting: Setting,
    asked: Sequence[str] = (),
    repeats: int = 10,
    profile: bool = False,
    out: Path | None = None,
    errors: bool = True,
) -> Results:
    """Measure; what is found is in `out`, if given, after every case, so that an end before the end loses little."""
    if repeats < 1:
        raise ArgumentError(f"repeats={repeats}: must be at least 1")
    if out is not None:
        check_writable(out, folder=True)
    plan = [(what, case, choose(known, asked, case, setting)) for case in cases for what, known in PARTS[bench].items()]
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with locked(out) if out is not None else nullcontext(), progress_bar(*columns, transient=True) as progress:
        task = progress.add_task("floors of this machine", total=sum(len(chosen) + 1 + errors for *_, chosen in plan))
        floors = Floors.measure(setting)
        results = Results(machine_facts(setting.device), _settings(bench, setting, repeats), floors.shown())
        for what, case, chosen in plan:

            def say(doing: str, label: str = f"{what}, {case}") -> None:
                progress.update(task, description=f"{label}: {doing}", advance=1)
                if not progress.console.is_terminal:  # no bar there: a line in the log says how far it is
                    progress.console.print(f"{label}: {doing}", soft_wrap=True)

            contest = Contest(what, case, setting, floors)
            workload = Workload(case, setting, torch.float32 if bench == "train" else None)
            contest.enter(chosen, workload, say)
            say("all take turns")
            rows = with_targets(bench, setting, contest.rows(repeats), results.rows)
            if errors:  # last, for what is exact takes memory
                say("errors")
                rows = add_errors(rows, contest.calls(), workload)
            results.rows += rows
            results.profile += contest.profile() if profile else []
            del contest, workload
            forget(setting.device)
            if out is not None:
                results.save(out)
    return results


class Contest:
    """The contenders of one case."""

    def __init__(self, what: str, case: Case, setting: Setting, floors: Floors) -> None:
        self.what, self.case, self.setting, self.floors = what, case, setting, floors
        self.entered: dict[str, Entry | str] = {}
        """Those that came through their first call, and what went wrong with the others."""

    def enter(self, chosen: dict[str, Contender], workload: Workload, say: Callable[[str], None]) -> None:
        for name, contender in chosen.items():
            say(name)
            self.entered[name] = _enter(contender, workload)
            give_back(self.setting.device)  # what one that ran out of memory left behind is not the next one's burden

    def calls(self) -> dict[str, Call]:
        return {name: entry.prepared.call for name, entry in self.entered.items() if isinstance(entry, Entry)}

    def rows(self, repeats: int) -> list[BenchRow]:
        """Let them take turns; a row for each, in the order they came."""
        on_cuda = self.setting.device.type == "cuda"
        failed: dict[str, str] = {}
        seconds = measure(
            self.calls(), self.setting.device, repeats, warmup=3 if on_cuda else 1, repeat_short=on_cuda, failed=failed
        )
        self.entered |= failed
        dense = baseline({name: statistics.median(samples) for name, samples in seconds.items()})
        return [
            self._row(name, failure=entry)
            if isinstance(entry, str)
            else self._row(name, **self._figures(entry, seconds[name], dense))
            for name, entry in self.entered.items()
        ]

    def _row(self, name: str, **values: Any) -> BenchRow:
        case = self.case
        return BenchRow(self.what, name, case.model, case.size, case.batch, case.cores, **values)

    def _figures(self, entry: Entry, seconds: Sequence[float], dense: float | None) -> dict[str, float | None]:
        flops, floor, median = entry.prepared.flops, self.floors.seconds(entry.prepared), statistics.median(seconds)
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
        """Where the time of each one goes; the times measured are not lost where that cannot be had."""
        entries = []
        for name, entry in self.entered.items():
            if isinstance(entry, Entry):
                try:
                    spent = where_the_time_goes(entry.prepared.call, self.setting.device)
                except Exception as error:
                    spent = [Spent(describe(error), 0.0, 0)]
                entries.append({"what": self.what, "case": str(self.case), "contender": name, "spent": spent})
        return entries


def _enter(contender: Contender, workload: Workload) -> Entry | str:
    """Build, call, take the peak once calls are alike; whatever goes wrong is a line of text."""
    device = workload.setting.device
    try:
        prepared = contender.build(workload)
        start = time.perf_counter()
        prepared.call()
        synchronize(device)
        first = time.perf_counter() - start + prepared.built_s
        peak = peak_bytes(prepared.call, device)  # a CUDA graph is recorded in the second call
    except Exception as error:  # the other contenders and cases go on
        return describe(error)
    return Entry(prepared, first if contender.compiled else None, None if peak is None else peak + prepared.resident)


def with_targets(bench: Bench, setting: Setting, rows: list[BenchRow], earlier: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows, that of `veca` with the time aimed at, where there is one for the case and the setting."""
    if setting.device.type != "cuda" or setting.dtype != torch.bfloat16 or setting.cls_only:
        return rows

    def target(row: BenchRow) -> float | None:
        if row.contender != "veca":
            return None
        if row.what != "attention backward":
            return target_ms(bench, row.case)
        same = (r.ms for r in earlier if (r.what, r.contender, r.case) == ("attention forward", "veca", row.case))
        forward = next(same, None)
        return None if forward is None else BACKWARD_TARGET * forward

    return [dataclasses.replace(row, target_ms=target(row)) for row in rows]


def _settings(bench: Bench, setting: Setting, repeats: int) -> dict[str, str]:
    settings = {"bench": bench, "dtype": str(setting.dtype).removeprefix("torch."), "repeats": str(repeats)}
    settings["date"] = datetime.date.today().isoformat()
    return settings | ({"cls only": "yes"} if setting.cls_only else {})
