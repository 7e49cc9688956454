from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from veca.bench import latency, memory
from veca.config import SIZES


def test_measure_takes_turns_and_drops_the_first_round() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = latency.measure(calls, torch.device("cpu"), repeats=3)
    assert order == ["a", "b"] * 4
    assert [len(seconds) for seconds in times.values()] == [3, 3]


def test_latency_prints_both_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "veca_small", "--size", "64", "--cores", "8", "16", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["latency", *arguments])
    latency.main()
    header, dense, first, second = capsys.readouterr().out.splitlines()
    assert "1 × 64 px, float32, eager" in header
    assert dense.startswith("vit_small_patch16_dinov3")
    assert dense.endswith("1.00 ×")
    assert first.startswith("veca_small C=8")
    assert second.startswith("veca_small C=16")


def test_profile_names_operators_and_the_floor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "veca_small", "--size", "64", "--cores", "16", "--repeats", "1", "--profile"]
    monkeypatch.setattr(sys, "argv", ["latency", *arguments])
    latency.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("linear products of VECA alone")
    assert all("addmm" in line for line in lines[4:6])
    assert "mm " in lines[6]


def test_the_floor_counts_the_linear_products() -> None:
    config, tokens = SIZES["veca_tiny"], 80
    with FlopCounterMode(display=False) as counter:
        latency.linear_call(config, tokens, torch.device("cpu"), torch.float32)()
    per_token = 8 * config.embed_dim**2 + 6 * config.embed_dim * config.mlp_dim
    assert counter.get_total_flops() == config.depth * tokens * per_token


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_grows_with_the_patches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["memory", "--model", "veca_tiny", "--sizes", "512", "1024"])
    memory.main()
    _, small, large = capsys.readouterr().out.splitlines()
    assert small.split()[-2:] == ["1.00", "×"]
    # Four times the patches; what the allocator keeps resident varies, but the square would be sixteen.
    assert 1.5 < float(large.split()[-2]) < 8


@pytest.mark.gpu
def test_gpu_memory_is_linear_in_the_patches() -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    peaks = [memory.peak_bytes("veca_tiny", size, 64, device, dtype) for size in (1024, 2048)]
    assert peaks[1] <= 4.4 * peaks[0]
