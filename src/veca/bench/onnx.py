"""ONNX files beside PyTorch on the CPU, at sizes and budgets: `python -m veca.bench.onnx --model veca_tiny`.

A file of any size is exported for each budget. onnxruntime and PyTorch (eager, float32) take turns on the same picture,
with as many threads each; times are medians. An error is |found - expected| / |expected| of an output.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from veca.checkpoint import load_or_random
from veca.hub.export import OUTPUTS, BudgetModel, RunFile, export, open_file, parse_size

SIZES = ("224", "256", "320x480", "512", "768")
BUDGETS = (8, 32, 64)


def compare(run: RunFile, plain: BudgetModel, images: Tensor, repeats: int) -> tuple[dict[str, float], float, float]:
    """Of each output the error; the median seconds of `run` and of `plain`, which take turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    errors = dict.fromkeys(OUTPUTS, 0.0)
    calls: tuple[Callable[..., Sequence[Tensor]], ...] = (run, plain)
    with torch.inference_mode():
        for turn in range(repeats + 1):
            found = []
            for call, times in zip(calls, seconds, strict=True):
                start = time.perf_counter()
                found.append(call(images))
                if turn:  # the first warms up
                    times.append(time.perf_counter() - start)
            for key, a, b in zip(OUTPUTS, *found, strict=True):
                errors[key] = max(errors[key], float((a - b).norm() / b.norm()))
    return errors, statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="veca_tiny", help="a name, file or folder")
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="as 512 or 320x480")
    parser.add_argument("--cores", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "int8"], help="of the file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    sizes = {text: parse_size(text) or parser.error(f"--sizes {text}: give a size") for text in args.sizes}
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message=".*was not trained")
    model = load_or_random(args.model, "cpu").eval().requires_grad_(False)
    weights = "random weights" if model.provenance.get("weights") == "random" else "its weights"
    print(f"{args.model}, {weights}, {args.dtype}, {args.threads} thread(s), load {os.getloadavg()[0]:.1f}")
    print("     size   C      cls  patches   places  onnxruntime    PyTorch  ratio")
    with tempfile.TemporaryDirectory() as folder:
        for cores in args.cores:
            file = Path(folder) / f"{cores}.onnx"
            export(model, file, cores=cores, dtype=args.dtype, check=False)
            run, plain = open_file(file, "onnx"), BudgetModel(model, cores)
            for text, size in sizes.items():
                images = torch.randn(1, model.config.in_chans, *size, generator=torch.Generator().manual_seed(0))
                errors, ours, theirs = compare(run, plain, images, args.repeats)
                far = " ".join(f"{errors[key]:8.1e}" for key in OUTPUTS)
                times = f"{1e3 * ours:9,.1f} ms {1e3 * theirs:7,.1f} ms {theirs / ours:4.2f} ×"
                print(f"{text:>9} {cores:3} {far} {times}", flush=True)


if __name__ == "__main__":
    main()
