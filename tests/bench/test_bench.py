from __future__ import annotations

import csv
import functools
import gc
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import veca
from veca.bench import contenders, machine, report, run
from veca.bench.contenders import (
    CPU_CASES,
    MEASUREMENTS,
    TARGETS,
    Bench,
    BenchSetting,
    Case,
    Contender,
    Prepared,
    Workload,
    choose_cases,
    target_ms,
)
from veca.bench.report import BenchRow, Results
from veca.bench.run import FloatDtype, pick_setting
from veca.cli.main import app
from veca.config import SIZES, VecaConfig
from veca.model import VecaOutput
from veca.rope import rotate
from veca.utils import timing as latency
from veca.utils.device import peak_device_bytes
from veca.utils.files import InUseError, locked

CPU = BenchSetting(torch.device("cpu"), torch.float32)
CASE = Case.parse("tiny:32:2:8")
FORWARD, BACKWARD = MEASUREMENTS["attention"].values()


def run_bench(
    bench: Bench, cases: Sequence[Case], setting: BenchSetting, names: Sequence[str], repeats: int = 1,
    out: Path | None = None, profile: bool = False,
) -> Results:  # fmt: skip
    return run.run_bench(bench, cases, replace(setting, names=names, repeats=repeats, profile=profile), out)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The floors are taken as known, but where they are what is tested, and the smallest model is made smaller."""
    monkeypatch.setattr(run, "measure_floors", lambda setting: ({"TFLOP/s": 1.0, "GB/s": 1.0}, []))
    monkeypatch.setitem(SIZES, "veca_tiny", VecaConfig(embed_dim=64, depth=2, num_heads=2))


@pytest.fixture(autouse=True)
def little_to_collect() -> Iterator[None]:
    """What is already there, most of it of imported packages, is no garbage: runs look for some again and again."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph and its backward pass are traced as for compiling, but not turned into machine code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.fixture
def forward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of a graph that has no backward pass."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


# Time


def test_measure_takes_turns_and_drops_the_first_rounds() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = latency.measure(calls, CPU.device, repeats=3)
    assert order == ["a", "b"] * 4
    assert [len(seconds) for seconds in times.values()] == [3, 3]


def test_short_calls_are_repeated_inside_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_SHORT_CALL": 1e6, "_SAMPLE_SECONDS": 1e9, "_MAX_CALLS": 7}.items():
        monkeypatch.setattr(latency, name, value)
    calls: list[int] = []
    latency.measure({"a": lambda: calls.append(1)}, CPU.device, repeats=2, warmup=1, repeat_short=True)
    assert len(calls) == 1 + 2 * 7


def test_a_call_that_fails_takes_no_further_part() -> None:
    rounds: list[str] = []

    def fail_in_the_second_round() -> None:
        rounds.append("bad")
        if len(rounds) == 3:
            raise RuntimeError("\n out of luck\nmore about it")

    calls = {"bad": fail_in_the_second_round, "good": lambda: rounds.append("good")}
    failed: dict[str, str] = {}
    times = latency.measure(calls, CPU.device, repeats=2, failed=failed)
    assert rounds == ["bad", "good", "bad", "good", "good"]
    assert failed == {"bad": "RuntimeError: out of luck"}
    assert list(times) == ["good"]
    with pytest.raises(RuntimeError, match="out of luck"):
        rounds.clear()
        latency.measure(calls, CPU.device, repeats=2)


def test_machine_rates_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "_LEAST_CPU_SHARE", 0)  # other tests may run beside this one
    assert 1e8 < latency.matrix_rate(CPU.device, torch.float32) < 1e15
    assert 1e7 < machine.copy_rate(CPU.device) < 1e14


def test_a_floor_measured_on_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(latency.BusyMachineError, match=r"this process got \d+% of the CPU time"):
        latency.best_seconds(lambda: time.sleep(0.01), CPU.device, samples=2)
    monkeypatch.setattr(run, "measure_floors", lambda setting: ({"TFLOP/s": 1e-9, "GB/s": 1.0}, []))
    results = run_bench("model", [CASE], CPU, ["veca-eager", "products"])
    assert "in tiny:32:2:8 ran at" in results.refused[0]
    assert list(results.floors) == ["GB/s"]
    assert {row.floor_share for row in results.rows} == {None}


# Cases


def test_cases_are_exact_or_a_product_or_default() -> None:
    assert choose_cases("model", True, exact=["small_plus:512:3:8"]) == [Case("veca_small_plus", 512, 3, 8)]
    swept = choose_cases("model", False, [], ["veca_base", "small"], [64, 32], [], [8])
    assert [str(case) for case in swept] == ["base:64:1:8", "base:32:1:8", "small:64:1:8", "small:32:1:8"]
    assert choose_cases("train", True)[0] == Case("veca_small", 256, 384, 64)
    for bench in TARGETS:
        assert choose_cases(bench, True) == [Case.parse(text) for text in TARGETS[bench]]
        assert choose_cases(bench, False) == [Case.parse(text) for text in CPU_CASES[bench].split()]


def test_targets_are_those_of_full_budget() -> None:
    assert target_ms("model forward", Case.parse("base:1024:16")) == 24
    assert target_ms("model forward", Case.parse("base:1024:16:8")) is None
    assert target_ms("train step", Case.parse("base:1024:16")) is None
    assert target_ms("attention forward", Case.parse("base:1024:16")) == 0.18
    assert target_ms("attention backward", Case.parse("base:1024:16")) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base:1024", "case 'base:1024': must be MODEL:PIXELS:BATCH"),
        ("base:1024:x", "as base:1024:16"),
        ("bass:1024:1", "model='bass': must be one of tiny, small, small_plus, base, large (did you mean 'base'?)"),
        ("base:1000:1", "size=1000: must be a positive multiple of 16, such as 992"),
        ("base:512:0", "batch=0: must be at least 1"),
        ("base:512:1:65", "cores=65: must be from 1 to 64, the core bank"),
        ("base:512:1:8:2", "width=2.0: must be above 0, at most 1"),
        ("base:512:1:8:a", "must be MODEL:PIXELS:BATCH[:CORES[:WIDTH]]"),
    ],
)
def test_wrong_cases_name_value_and_rule(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Case.parse(text)


def test_case_and_sweep_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="leave out"):
        choose_cases("model", False, ["base:64:1"], [], [64], [], [])


# Contenders


@pytest.mark.parametrize(
    ("known", "name"),
    [(contenders.MODEL, name) for name in ("veca eager", "products")]
    + [(FORWARD, name) for name in ("two SDPA", "dense SDPA")],
)
def test_declared_flops_are_those_executed(known: dict[str, Contender], name: str) -> None:
    prepared = known[name].build(Workload(CASE, CPU))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        prepared.call()
    assert counter.get_total_flops() == prepared.flops


def test_contenders_of_attention_agree_and_give_every_gradient(uncompiled: None) -> None:
    workload = Workload(CASE, CPU)
    found: dict[str, object] = {}
    for name, contender in FORWARD.items():
        found[name] = contender.build(workload).call()
    for a, b in (("veca", "two SDPA"), ("veca", "two SDPA compiled"), ("dense SDPA", "dense SDPA compiled")):
        torch.testing.assert_close(found[a], found[b])
    qkv, tokens = workload.qkv, CASE.tokens
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    table = workload.rotaries[1][:2]
    # The cores, which are first, have no place.
    q, k = (torch.cat([x[:, :, :8], rotate(x[:, :, 8:], table)], 2) for x in (q, k))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, tokens, -1)
    torch.testing.assert_close(found["dense SDPA"], expected)
    gradients = BACKWARD["veca"].build(workload).call()
    assert isinstance(gradients, tuple)
    assert gradients[0].shape == qkv.shape
    assert [g is None for g in gradients[1:]] == [False, False, True]  # here the tables are used, not the coordinates
    for name in ("two SDPA compiled", "dense SDPA compiled"):
        prepared = BACKWARD[name].build(workload)
        first, second = prepared.call(), prepared.call()  # the graph is kept
        torch.testing.assert_close(first, second)


def test_bytes_are_those_of_reading_and_writing_once() -> None:
    elements = CASE.batch * CASE.tokens * CASE.config.embed_dim
    forward, backward = (known["veca"].build(Workload(CASE, CPU)) for known in (FORWARD, BACKWARD))
    assert forward.bytes == 4 * 4 * elements
    assert backward.bytes == 4 * 8 * elements
    assert backward.flops == 2 * forward.flops


def test_a_training_step_gives_the_gradients_of_all_that_takes_part(uncompiled: None) -> None:
    workload = Workload(CASE, CPU, torch.float32)
    steps = {}
    for name in ("veca eager", "veca compiled", "veca", "veca checkpointed"):
        prepared = contenders.TRAIN[name].build(workload)
        gradients = prepared.call()
        assert isinstance(gradients, tuple)
        steps[name] = [gradient is None for gradient in gradients]
        assert prepared.flops == 3 * workload.veca_flops
        assert prepared.resident == sum(p.nbytes for p in workload.veca.parameters())
    names = [name for name, _ in workload.veca.named_parameters()]
    absent = {name for name, none in zip(names, steps["veca eager"], strict=True) if none}
    assert absent == {f"{bank}.{i}" for bank in ("cores", "core_states") for i in range(1, 8)}
    assert len({str(step) for step in steps.values()}) == 1


@pytest.mark.parametrize("bench", ["model", "train"])
def test_the_dense_model_runs_in_every_way(bench: Bench, uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case, names = Case.parse("tiny:32:1:8"), ["dense", "dense compiled"]
    plain, compiled = run_bench(bench, [case], CPU, names, repeats=1).rows
    assert plain.failure is compiled.failure is plain.error is plain.first_call_s is None
    assert compiled.against_dense == 1
    assert compiled.first_call_s
    flops = veca.flops.dense_model_flops(case.config, 32, 32)
    assert plain.gflops == (3 if bench == "train" else 1) * flops / 1e9


def test_contenders_are_chosen_by_name() -> None:
    chosen = contenders.choose_contenders(FORWARD, ["dense-sdpa", "veca"])
    assert list(chosen) == ["veca", "dense SDPA"]
    assert set(contenders.choose_contenders(contenders.MODEL, [])) == {*contenders.MODEL} - {"veca float8"}
    with pytest.raises(ValueError, match="unknown contender 'veca eagre' .did you mean 'veca eager'.*Known: veca, "):
        contenders.choose_contenders(contenders.MODEL, ["veca-eagre"])


def test_the_optimized_model_is_the_same_model(forward_only: None) -> None:
    workload = Workload(CASE, CPU)
    fast = contenders.MODEL["veca"].build(workload).call()
    plain = contenders.MODEL["veca eager"].build(workload).call()
    assert isinstance(fast, veca.VecaOutput)
    assert isinstance(plain, veca.VecaOutput)
    torch.testing.assert_close(fast.patches, plain.patches, rtol=1e-4, atol=1e-4)


# Runs


def test_a_run_has_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"veca eager": [0.004, 0.002, 0.003], "dense": [0.006, 0.006, 0.006]}
    monkeypatch.setattr(
        "veca.bench.run.measure", lambda calls, *rest, **options: {name: seconds[name] for name in calls}
    )
    case = Case.parse("small:32:2:8")
    results = run_bench("model", [case], CPU, ["veca-eager", "dense"], repeats=3, out=tmp_path)
    ours, dense = results.rows
    flops = 2 * veca.flops.model_flops(case.config, 32, 32, 8)
    assert (ours.ms, ours.best_ms, ours.images_per_s) == pytest.approx((3.0, 2.0, 2 / 0.003))
    assert ours.gflops == flops / 2 / 1e9
    assert ours.tflops_per_s == pytest.approx(flops / 0.003 / 1e12)
    assert ours.floor_ms == pytest.approx(1e3 * flops / 1e12)
    assert ours.floor_share == pytest.approx(flops / 1e12 / 0.003)
    assert (ours.against_dense, dense.against_dense) == (2.0, 1.0)
    assert ours.peak_mib is ours.target_ms is ours.first_call_s is ours.failure is None
    assert ours.against_eager == 1


def test_targets_stand_beside_our_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "first_call", lambda contender, workload: (Prepared(int, 1), {}))
    monkeypatch.setattr(run, "empty_cache", lambda device: None)
    monkeypatch.setattr(run, "measure", lambda calls, *rest, **options: {name: [0.1] for name in calls})
    gpu = BenchSetting(torch.device("cuda"), torch.bfloat16)
    chosen = {name: Contender(lambda workload: Prepared(int, 1)) for name in ("veca", "two SDPA")}
    for setting, targets in {gpu: [0.18, None], replace(gpu, dtype=torch.float16): [None] * 2, CPU: [None] * 2}.items():
        workload = Workload(Case.parse("base:1024:16"), setting)
        floors = {"TFLOP/s": 1.0, "GB/s": 1.0}
        rows, _ = run.measure_case("attention forward", chosen, workload, floors, lambda step: None)
        assert [row.target_ms for row in rows] == targets


def test_what_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_memory() -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 EiB.\nmore")

    known = dict(contenders.MODEL)
    known["dense"] = Contender(lambda workload: Prepared(no_memory, 1))
    monkeypatch.setitem(MEASUREMENTS["model"], "model forward", known)
    results = run_bench("model", [CASE, CASE], CPU, ["dense", "products", "veca-float8"], repeats=1)
    assert [row.contender for row in results.rows] == 2 * ["veca float8", "dense", "products"]
    assert [row.failure for row in results.rows[:3]] == [
        "ArgumentError: float8 weights need a CUDA device; this run is on cpu",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 8 EiB.",
        None,
    ]
    assert results.rows[2].ms
    results.show(Console(width=60))
    assert "model forward, tiny:32:2:8, dense: OutOfMemoryError" in capsys.readouterr().out


def test_files_hold_the_results(tmp_path: Path) -> None:
    results = run_bench("attention", [CASE], CPU, ["veca", "two-sdpa"], repeats=1, profile=True, out=tmp_path)
    assert [row.what for row in results.rows] == 2 * ["attention forward"] + 2 * ["attention backward"]
    loaded = Results.load(tmp_path / "results.json")
    assert loaded.rows == results.rows
    assert loaded.machine["torch"] == torch.__version__
    assert loaded.settings["dtype"] == "float32"
    spent = loaded.profile[0]["spent"]
    assert any("scaled_dot_product" in name and count > 0 for name, seconds, count in spent)
    assert spent[-1][0] == "all the rest"
    with (tmp_path / "results.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [{k: "" if v is None else str(v) for k, v in asdict(row).items()} for row in results.rows] == written
    text = (tmp_path / "table.txt").read_text()
    assert "attention backward" in text
    assert f"{results.rows[0].ms:.2f}"[:3] in text.replace(",", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.json", "table.txt"]


def test_tables_are_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    case = ("veca_small_plus", 2048, 1024, 64, 1.0)
    row = BenchRow("model forward", "dense SDPA compiled", *case, 1234.5, 1233.25, 0.8296)
    Results({}, {}, {}, [row]).show(Console(width=40))
    assert "small_plus:2048:1024:64  dense SDPA compiled  1,234  1,233    0.8296" in capsys.readouterr().out


def test_settings_follow_the_device() -> None:
    assert pick_setting("cpu") == CPU
    assert pick_setting("cpu", "bfloat16").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="device 'warp' cannot be used"):
        pick_setting("warp")
    with pytest.raises(ValueError, match="repeats=0: must be at least 1"):
        run_bench("model", [CASE], CPU, [], repeats=0)


def test_the_peak_is_that_of_the_call_that_records(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr("veca.bench.run.synchronize", lambda device: None)
    monkeypatch.setattr("veca.bench.run.peak_device_bytes", lambda call, device: len(calls))
    counted = Contender(lambda workload: Prepared(lambda: calls.append(1), 1))
    _, figures = run.first_call(counted, Workload(CASE, BenchSetting(torch.device("cuda"), torch.bfloat16)))
    assert (
        figures["peak_mib"] == 2**-20
    )  # a graph is recorded in the second call: replays from the third on show no memory


# Errors


def test_weights_are_the_same_each_time_and_every_token_differs() -> None:
    workload = Workload(CASE, CPU)
    first, images = workload.new_veca(), workload.images
    for (name, a), b in zip(first.named_parameters(), workload.new_veca(torch.float64).parameters(), strict=True):
        assert torch.equal(a.double(), b), name
    assert torch.equal(images, Workload(CASE, CPU).images)  # weights are drawn apart from the rest
    out = first.eval()(images, 8)
    assert out.patches.flatten(0, 1).std(dim=0).mean() > 0.3
    assert (out.coordinates[-1] - out.coordinates[0]).abs().mean() > 0.05


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 1e-8, 1e-5), ("bfloat16", 1e-3, 0.05)])
def test_errors_are_those_of_rounding(dtype: FloatDtype, least: float, most: float) -> None:
    benches: dict[Bench, str] = {"model": "products", "train": "veca-eager", "attention": "dense-sdpa"}
    for bench, other in benches.items():
        names = ["two-sdpa" if bench == "attention" else "veca-eager", other]
        for row in run_bench(bench, [CASE], pick_setting("cpu", dtype, cls_only=bench == "model"), names, 1).rows:
            if row.contender in run.EAGER:
                assert least < (row.error or 0) < most
            else:
                assert row.error is row.against_eager is row.failure is None


def test_a_wrong_result_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def change(function: Callable[[VecaOutput], VecaOutput]) -> Contender:
        def build(workload: Workload) -> Prepared:
            prepared = contenders.MODEL["veca eager"].build(workload)
            return prepared._replace(call=lambda: function(cast(VecaOutput, prepared.call())))

        return Contender(build)

    known = {
        "veca": change(lambda out: out._replace(patches=out.patches * 1.1)),
        "veca eager": contenders.MODEL["veca eager"],
        "veca compiled": change(lambda out: out._replace(patches=out.patches / 0)),
    }
    monkeypatch.setitem(MEASUREMENTS["model"], "model forward", known)
    results = run_bench("model", [Case.parse("tiny:64:2:8")], CPU, list(known), repeats=1)
    wrong, plain, infinite = results.rows
    assert 0.05 < (wrong.error or 0) < 0.1
    assert (plain.error or 1) < 1e-5
    assert wrong.against_eager == (wrong.error or 0) / (plain.error or 1)
    assert infinite.ms
    assert infinite.error is infinite.against_eager is None
    results.show(Console(width=200))
    assert f"{wrong.error:.2e}" in (shown := capsys.readouterr().out)
    assert "veca compiled: error not known: ArgumentError: the result has values that are not finite" in shown


def test_exact_gradients_of_parts_are_those_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(Case.parse("tiny:32:3:8"), CPU, torch.float32)
    whole = run.exact_gradients(workload)
    for tokens in (1, 2 * workload.case.tokens):  # one by one, and two and one
        monkeypatch.setattr(run, "TOKENS_AT_ONCE", tokens)
        assert run.relative_error(run.exact_gradients(workload), whole) < 1e-12
    assert run.relative_error([None if g is None else g * 1.5 for g in whole], whole) == pytest.approx(0.5)


def test_times_stand_where_float64_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(workload: Workload) -> run.Tensors:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setitem(run.CHECKS, "model forward", (no_memory, run.CHECKS["model forward"][1]))
    (row,) = run_bench("model", [CASE], CPU, ["veca-eager"], repeats=1).rows
    assert row.ms
    assert row.failure == "error not known: float64: OutOfMemoryError: CUDA out of memory."


# Commands


@pytest.mark.parametrize("bench", ["model", "train", "attention"])
def test_bench_commands_write_their_results(bench: str, tmp_path: Path) -> None:
    name = "two-sdpa" if bench == "attention" else "veca-eager"
    options = ["--model", "tiny", "--size", "32,48", "--batch-size", "1", "--cores", "8", "--repeats", "1"]
    options += ["--contender", name, "--device", "cpu", "--out", str(tmp_path), "--no-errors"]
    result = CliRunner().invoke(app, ["bench", bench, *options])
    assert result.exit_code == 0, result.output
    assert "tiny:48:1:8" in result.output
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {(row["size"], row["cores"]) for row in rows} == {(32, 8), (48, 8)}
    assert all(row["ms"] > 0 and row["error"] is None for row in rows)


@pytest.mark.parametrize("bench", ["model", "train"])
def test_a_case_at_a_width(bench: str, tmp_path: Path) -> None:
    options = ["--case", "tiny:32:1:8,tiny:32:1:8:0.25", "--repeats", "1", "--contender", "veca-eager"]
    result = CliRunner().invoke(app, ["bench", bench, *options, "--device", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "tiny:32:1:8:0.25" in result.output
    whole, narrow = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert (whole["width"], narrow["width"]) == (1, 0.25)
    assert narrow["gflops"] < 0.95 * whole["gflops"], "four patches and eight cores"
    assert narrow["error"] < 1e-5, "against float64 at the same width"
    assert [str(row.case) for row in Results.load(tmp_path / "results.json").rows][1] == "tiny:32:1:8:0.25"


def test_plots_are_written_as_files(tmp_path: Path) -> None:
    rows = [
        BenchRow("model forward", name, "veca_base", size, batch, 64, ms=size * batch * factor)
        for name, factor in (("veca", 1.0), ("dense compiled", 2.0))
        for size, batch in ((256, 1), (512, 1), (512, 4))
    ]
    failed = BenchRow("model forward", "veca", "veca_base", 1024, 1, 64, failure="out of memory")
    Results({"device": "a machine"}, {"dtype": "bfloat16"}, {}, [*rows, failed]).save(tmp_path)
    result = CliRunner().invoke(app, ["bench", "plot", str(tmp_path / "results.json"), "--out", str(tmp_path / "to")])
    assert result.exit_code == 0, result.output
    for name, words in {
        "flops-resolution": ["DINOv3"],
        "latency-resolution": ["batch 1", "a machine"],
        "latency-batch": ["512 px"],
    }.items():
        svg = (tmp_path / "to" / f"{name}.svg").read_text()
        assert "</svg>" in svg
        assert all(word in svg for word in words)
    (lines,) = report.latency_panels([Results.load(tmp_path / "results.json")], "size").values()
    assert lines["veca"] == [(256.0, 256.0), (512.0, 512.0)]


def test_plots_with_nothing_to_compare_show_flops_only(tmp_path: Path) -> None:
    Results({}, {}, {}, [BenchRow("train step", "veca", "veca_base", 256, 1, 64, ms=1.0)]).save(tmp_path)
    written = report.write_plots([tmp_path / "results.json"], tmp_path, "png")
    assert [path.name for path in written] == ["flops-resolution.png"]
    with Image.open(written[0]) as image:
        assert image.format == "PNG"
        assert len(image.getcolors(2**20) or []) > 50, "lines and text in several colours"


def test_plotting_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="other.json is no results.json of `veca bench`"):
        report.write_plots([tmp_path / "other.json"], tmp_path)


def test_plots_need_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for form in ("svg", "png"):
        assert report.write_plots([], tmp_path, form)


def test_without_timm_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    row, other = run_bench("model", [Case.parse("small:32:1:8")], CPU, ["dense", "products"], repeats=1).rows
    assert "pip install 'veca[bench]'" in (row.failure or "")
    assert other.ms


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_with_the_patches(capsys: pytest.CaptureFixture[str]) -> None:
    machine.bench_memory("veca_tiny", sizes=(512, 1024))
    _, small, large = capsys.readouterr().out.splitlines()
    assert small.split()[-2:] == ["1.00", "×"]
    # Four times the patches; what the allocator keeps resident varies, but the square would be sixteen.
    assert 1.5 < float(large.split()[-2]) < 8


@pytest.mark.gpu
def test_gpu_memory_is_linear_in_the_patches() -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    peaks = [machine.forward_peak_bytes("veca_tiny", size, 64, device, dtype) for size in (1024, 2048)]
    assert peaks[1] <= 4.4 * peaks[0]


@pytest.mark.gpu
def test_gpu_peak_counts_what_a_cuda_graph_keeps() -> None:
    device = torch.device("cuda")
    x = torch.zeros(2**24, device=device)
    expected = 2 * x.nbytes  # the result and one step on the way

    def recorded() -> object:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = (x + 1) * 2
        return graph, kept

    assert peak_device_bytes(lambda: (x + 1) * 2, device) == expected
    first = recorded()
    assert peak_device_bytes(recorded, device) == expected  # whatever an earlier graph has kept
    del first


@pytest.mark.gpu
@pytest.mark.parametrize("bench", ["model", "train", "attention"])
def test_every_benchmark_runs_on_a_gpu(bench: Bench, tmp_path: Path) -> None:
    setting = pick_setting("cuda")
    assert setting.dtype == torch.bfloat16
    asked = ["veca", "veca-eager", "veca-checkpointed"] if bench == "train" else []  # a step takes a minute to compile
    results = run_bench(bench, [Case.parse("small:64:2")], setting, asked, repeats=2, profile=True, out=tmp_path)
    assert [row.failure for row in results.rows] == [None] * len(results.rows)
    errors = [row.error for row in results.rows if row.contender.startswith(("veca", "two SDPA"))]
    assert all(error is not None and 0 < error < 0.05 for error in errors)
    assert all(row.peak_mib for row in results.rows if row.contender != "products")
    assert results.profile


def test_a_folder_is_of_one_run_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(InUseError, match="another run is at work in"):
        run_bench("model", [CASE], CPU, ["dense"], repeats=1, out=tmp_path)
