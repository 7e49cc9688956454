"""ONNX files beside PyTorch on the CPU: time and error at several sizes and budgets."""

from __future__ import annotations

import os
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from veca.checkpoint.loading import load_or_random
from veca.errors import ArgumentError
from veca.hub.export import OUTPUTS, BudgetModel, ExportDtype, RunFile, export, open_file, output_errors, parse_size
from veca.utils.timing import measure


def bench_onnx(
    model: str, sizes: Sequence[str], cores: Sequence[int], dtype: ExportDtype, threads: int, repeats: int
) -> None:
    """Print the error and the median time of an ONNX file of `model` beside eager float32 PyTorch.

    One file with dynamic sizes is exported for each budget. `sizes` are as 512 or 320x480.
    """
    resolved = {text: parse_size(text) for text in sizes}
    for text, size in resolved.items():
        if size is None:
            raise ArgumentError(f"size {text!r}: name a fixed size, as 512 or 320x480")
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", message=".*was not trained")
    backbone = load_or_random(model, "cpu").eval().requires_grad_(False)
    weights = "random weights" if backbone.provenance.get("weights") == "random" else "its weights"
    print(f"{model}, {weights}, {dtype}, {threads} thread(s), load {os.getloadavg()[0]:.1f}")
    print("     size   C      cls  patches   places  onnxruntime    PyTorch  ratio")
    with tempfile.TemporaryDirectory() as folder:
        for budget in cores:
            file = Path(folder) / f"{budget}.onnx"
            export(backbone, file, cores=budget, dtype=dtype, check=False)
            run, plain = open_file(file, "onnx"), BudgetModel(backbone, budget)
            for text, size in resolved.items():
                assert size is not None
                images = torch.randn(1, backbone.config.in_chans, *size, generator=torch.Generator().manual_seed(0))
                errors, onnx_s, torch_s = compare_outputs(run, plain, images, repeats)
                error_cells = " ".join(f"{errors[key]:8.1e}" for key in OUTPUTS)
                times = f"{1e3 * onnx_s:9,.1f} ms {1e3 * torch_s:7,.1f} ms {torch_s / onnx_s:4.2f} ×"
                print(f"{text:>9} {budget:3} {error_cells} {times}", flush=True)


def compare_outputs(
    run: RunFile, plain: BudgetModel, images: Tensor, repeats: int
) -> tuple[dict[str, float], float, float]:
    """The errors of `run` against `plain`, and the median seconds of both, which take turns."""
    with torch.inference_mode():
        errors = output_errors(run(images), plain(images))
        seconds = measure({"onnx": lambda: run(images), "torch": lambda: plain(images)}, images.device, repeats)
    return errors, statistics.median(seconds["onnx"]), statistics.median(seconds["torch"])
