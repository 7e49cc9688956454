"""Running a benchmark: every contender of every case, interleaved in one run, with its error against float64.

The error is that of the call that was timed, so nothing is compiled again, against the plain model in float64 with the
same weights. For a model the features of the first image are compared, for attention its output or the gradient of q,
k and v for the first image (images are independent), for a training step the gradients of all weights over the batch.
"""

import dataclasses
import datetime
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn
from torch import Tensor

from veca.attention import core_attention, use_kernel
from veca.bench import contenders
from veca.bench.contenders import Bench, BenchSetting, Case, Contender, Prepared, Workload, batch_loss, target_ms
from veca.bench.machine import copy_rate, empty_cache, machine_facts, profile_call
from veca.bench.report import BenchRow, Results, four_digits
from veca.errors import ArgumentError
from veca.rope import make_rotary
from veca.utils.console import progress_bar
from veca.utils.device import choose_device, peak_device_bytes
from veca.utils.files import check_writable, locked
from veca.utils.timing import BusyMachineError, Call, describe, matrix_rate, measure, synchronize

FloatDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Report: TypeAlias = Callable[[str], None]
Tensors: TypeAlias = Sequence[Tensor | None]
"""None stands for zeros, as in `torch.autograd.grad`."""

BASELINES = ("dense compiled", "dense", "dense SDPA compiled", "dense SDPA")
"""The first of these that took part is the one others are compared with."""
VECA = ("veca", "two SDPA")
"""Prefixes of the contenders that compute VECA."""
EAGER = ("veca eager", "two SDPA")
"""The plain implementations among them."""
BEATEN = 1.1
"""Share of the floor from which on it is refused: a tenth may be chance."""
TOKENS_AT_ONCE = 4096
"""Tokens per float64 backward pass: about 7 GiB for base."""


def pick_setting(device: str = "auto", dtype: FloatDtype | None = None, **options: Any) -> BenchSetting:
    """The device ("auto": CUDA if available) and, unless given, the precision customary on it."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = choose_device(automatic if device == "auto" else device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # events are recorded on the current device
    dtype = dtype or ("bfloat16" if chosen.type == "cuda" else "float32")
    return BenchSetting(chosen, getattr(torch, dtype), **options)


def measure_floors(setting: BenchSetting) -> tuple[dict[str, float], list[str]]:
    """Peak rates of this machine, measured in the run: they bound every contender. And why others are missing."""
    rates: dict[str, Callable[[], float]] = {
        "TFLOP/s": lambda: matrix_rate(setting.device, setting.dtype) / 1e12,
        "GB/s": lambda: copy_rate(setting.device) / 1e9,
    }
    floors, refused = dict[str, float](), list[str]()
    for unit, measure_rate in rates.items():
        try:
            floors[unit] = measure_rate()
        except BusyMachineError as error:
            refused.append(f"No floor in {unit}: {error}")
    return floors, refused


def drop_beaten_floor(results: Results) -> None:
    """Remove the floor of matrix products where a contender was clearly faster, which shows that it is none."""
    # Copies are measured outside the caches, which small attention stays in; products of float8 are other products.
    bounded = [row for row in results.rows if not row.what.startswith("attention")]
    shares = {row: row.floor_share or 0.0 for row in bounded if "float8" not in row.contender}
    fastest = max(shares, key=lambda row: shares[row], default=None)
    if fastest is None or shares[fastest] <= BEATEN:
        return
    results.refused.append(
        f"No floor in TFLOP/s: {fastest.contender} in {fastest.case} ran at {shares[fastest]:.0%} of the "
        f"{four_digits(results.floors.pop('TFLOP/s'))} measured, so the machine was busy then. "
        "Measure again when nothing else runs"
    )
    results.rows = [
        dataclasses.replace(row, floor_ms=None, floor_share=None) if row in bounded else row for row in results.rows
    ]


def run_bench(bench: Bench, cases: Sequence[Case], setting: BenchSetting, out: Path | None = None) -> Results:
    """Measure the contenders of every case; the folder `out` is updated after each."""
    repeats, device, errors = setting.repeats, setting.device, setting.errors
    if repeats < 1:
        raise ArgumentError(f"repeats={repeats}: must be at least 1")
    if out is not None:
        check_writable(out, folder=True)
    # Names of contenders are checked here, before anything is measured.
    measurements = contenders.MEASUREMENTS[bench].items()
    chosen_of = {what: contenders.choose_contenders(known, setting.names) for what, known in measurements}
    plan = [(what, case, chosen) for case in cases for what, chosen in chosen_of.items()]
    settings = {"bench": bench, "dtype": str(setting.dtype).removeprefix("torch."), "repeats": str(repeats)}
    settings |= {"date": datetime.date.today().isoformat()} | ({"cls only": "yes"} if setting.cls_only else {})
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with locked(out) if out is not None else nullcontext(), progress_bar(*columns, transient=True) as progress:
        task = progress.add_task("floors of this machine", total=sum(len(chosen) + 1 + errors for *_, chosen in plan))
        floors, refused = measure_floors(setting)
        results = Results(machine_facts(device), settings, floors, refused=refused)
        for what, case, chosen in plan:

            def report_step(step: str, label: str = f"{what}, {case}") -> None:
                progress.update(task, description=f"{label}: {step}", advance=1)
                if not progress.console.is_terminal:  # a log shows no bar: print a line instead
                    progress.console.print(f"{label}: {step}", soft_wrap=True)

            workload = Workload(case, setting, torch.float32 if bench == "train" else None)
            rows, calls = measure_case(what, chosen, workload, results.floors, report_step)
            if errors:  # after the timing: the float64 reference takes memory
                report_step("errors")
                rows = add_errors(rows, calls, workload)
            results.rows += rows
            drop_beaten_floor(results)
            for name, call in calls.items() if setting.profile else ():
                try:
                    spent = profile_call(call, device)
                except Exception as error:
                    spent = [(describe(error), 0.0, 0)]
                results.profile.append({"what": what, "case": str(case), "contender": name, "spent": spent})
            # Compiled code and CUDA graphs of one case must not take memory from the next.
            del calls, workload
            torch.compiler.reset()
            empty_cache(device)
            if out is not None:
                results.save(out)
    return results


def measure_case(
    what: str, chosen: Mapping[str, Contender], workload: Workload, floors: Mapping[str, float], report_step: Report
) -> tuple[list[BenchRow], dict[str, Call]]:
    """Time the contenders of one case in turns: a row for each, in order, and the calls of those that did not fail."""
    case, setting, device, on_cuda = workload.case, workload.setting, workload.device, workload.device.type == "cuda"
    prepared: dict[str, Prepared] = {}
    figures: dict[str, dict[str, Any]] = {}
    for name, contender in chosen.items():
        report_step(name)
        try:
            prepared[name], figures[name] = first_call(contender, workload)
        except Exception as error:  # the other contenders and cases go on
            figures[name] = {"failure": describe(error)}
        empty_cache(device)  # also after an out-of-memory error, so that the next one has room
    report_step("all take turns")
    calls, failed = {name: ready.call for name, ready in prepared.items()}, dict[str, str]()
    warmup = 3 if on_cuda else 1
    seconds = measure(calls, device, setting.repeats, warmup=warmup, repeat_short=on_cuda, failed=failed)
    figures |= {name: {"failure": reason} for name, reason in failed.items()}  # a call may fail only after its first
    medians = {name: statistics.median(samples) for name, samples in seconds.items()}
    dense = next((medians[name] for name in BASELINES if name in medians), None)
    for name, median in medians.items():
        ready = prepared[name]
        work, unit = (ready.flops / 1e12, "TFLOP/s") if ready.bytes is None else (ready.bytes / 1e9, "GB/s")
        floor = work / floors[unit] if unit in floors else None
        figures[name] |= {
            "ms": 1e3 * median,
            "best_ms": 1e3 * min(seconds[name]),
            "images_per_s": case.batch / median,
            "gflops": ready.flops / case.batch / 1e9,
            "tflops_per_s": ready.flops / median / 1e12,
            "floor_ms": None if floor is None else 1e3 * floor,
            "floor_share": None if floor is None else floor / median,
            "against_dense": None if dense is None else dense / median,
        }
    if "veca" in medians and on_cuda and setting.dtype == torch.bfloat16 and not setting.cls_only:
        figures["veca"]["target_ms"] = target_ms(what, case)
    rows = [BenchRow(what, name, *dataclasses.astuple(case), **figures[name]) for name in chosen]
    return rows, {name: calls[name] for name in seconds}


def first_call(contender: Contender, workload: Workload) -> tuple[Prepared, dict[str, Any]]:
    """Build a contender and call it twice: seconds until the first result, if compiled, and the peak memory."""
    prepared = contender.build(workload)
    start = time.perf_counter()
    prepared.call()
    synchronize(workload.device)
    seconds = time.perf_counter() - start + prepared.built_s
    peak = peak_device_bytes(prepared.call, workload.device)  # a CUDA graph is captured in the second call
    peak_mib = None if peak is None else (peak + prepared.resident) / 2**20
    return prepared, {"peak_mib": peak_mib, "first_call_s": seconds if contender.compiled else None}


def exact_features(workload: Workload) -> Tensors:
    # The images were drawn in the contenders' dtype: float64 gets exactly the same numbers.
    model, image = workload.new_veca(torch.float64).eval(), workload.images[:1].double()
    with torch.no_grad(), use_kernel("sdpa"):
        out = model(image, workload.case.cores, cls_only=workload.setting.cls_only)
    return [out.cores[0], out.patches[0]]


def exact_gradients(workload: Workload) -> Tensors:
    """A few images at a time to save memory: the gradient of the batch is the mean of theirs."""
    model = workload.new_veca(torch.float64).train()
    for part in workload.images.split(max(1, TOKENS_AT_ONCE // workload.case.tokens)):
        with use_kernel("sdpa"):
            (batch_loss(model(part.double(), workload.case.cores)) * len(part) / workload.case.batch).backward()
    return [parameter.grad for parameter in model.parameters()]


def exact_attention(workload: Workload, gradient: bool = False) -> Tensors:
    """Output of attention for the first image, or the gradient of the qkv it was computed from."""
    config, (core, patch) = workload.case.config, workload.rotaries
    coordinates = (core.coordinates[:1].double(), patch.coordinates.double())
    tables = (make_rotary(each, config.head_dim, config.rope_zero_fraction) for each in coordinates)
    qkv = workload.qkv[:1].double().requires_grad_()
    with use_kernel("sdpa"):
        out = core_attention(qkv, *tables)
    return [torch.autograd.grad(out, qkv, workload.gradient[:1].double())[0][0] if gradient else out.detach()[0]]


CHECKS: dict[str, tuple[Callable[[Workload], Tensors], Callable[[Any], Tensors]]] = {
    "model forward": (exact_features, lambda out: [out.cores[0], out.patches[0]]),
    "train step": (exact_gradients, lambda gradients: gradients),
    "attention forward": (exact_attention, lambda out: [out[0]]),
    "attention backward": (partial(exact_attention, gradient=True), lambda gradients: [gradients[0][0]]),
}
"""The float64 result of a measurement, and the tensors to compare with it from the result of a call."""


def add_errors(rows: Sequence[BenchRow], calls: Mapping[str, Call], workload: Workload) -> list[BenchRow]:
    """The rows of one case with the errors of those that compute VECA; a failure here leaves their times alone."""
    # A contender that failed has no call, and the dense ones compute another function.
    names = [name for name in calls if name.startswith(VECA)]
    reference, outputs = CHECKS[rows[0].what]
    values: dict[str, dict[str, Any]] = {}
    empty_cache(workload.device)
    try:
        exact = reference(workload) if names else []
        for name in names:
            try:
                values[name] = {"error": relative_error(outputs(calls[name]()), exact)}
            except Exception as error:
                values[name] = {"failure": f"error not known: {describe(error)}"}
    except Exception as error:
        values = {name: {"failure": f"error not known: float64: {describe(error)}"} for name in names}
    eager = next((values[name]["error"] for name in EAGER if "error" in values.get(name, {})), None)
    for fields in values.values():
        if eager and "error" in fields:
            fields["against_eager"] = fields["error"] / eager
    return [dataclasses.replace(row, **values.get(row.contender, {})) for row in rows]


@torch.no_grad()
def relative_error(result: Tensors, exact: Tensors) -> float:
    """‖result − exact‖ / ‖exact‖ over all tensors together.

    >>> relative_error([torch.tensor([3.0, 3.0]), None], [torch.tensor([3.0, 0.0]), torch.tensor([4.0])])
    1.0
    """

    def square(x: Tensor | None) -> float:
        return 0.0 if x is None else float(x.double().square().sum())

    difference, norm = 0.0, 0.0
    for a, b in zip(result, exact, strict=True):
        difference += square(b if a is None else a if b is None else a.double() - b)  # None is zero
        norm += square(b)
    error = math.sqrt(difference / norm)
    if not math.isfinite(error):
        raise ArgumentError("the result has values that are not finite")
    return error
