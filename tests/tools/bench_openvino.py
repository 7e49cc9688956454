"""Exported files in OpenVINO beside ONNX Runtime and PyTorch, and 8 bits by NNCF: errors and times.

    pip install openvino nncf                                        # nothing else here needs them
    python tests/tools/bench_openvino.py pets-trainval.tar FOLDER

Scales of 8 bits are calibrated on the first images of the shard, errors are those of the next four. Files are made in
FOLDER, and used again if they are there: `veca probe knn --model FOLDER/nncf.onnx` tells a score. Images come one by
one, and all contenders take turns on as many threads; the rows are printed as CSV.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nncf
import onnx
import openvino
import torch
from measure_search import read_shard
from torch import Tensor

import veca
from veca.export import OUTPUTS, BudgetModel, export, open_file, output_errors
from veca.images import load_image
from veca.utils.timing import measure

RunFile = Callable[[Tensor], list[Tensor]]


def quantise(source: Path, path: Path, images: list[Tensor]) -> None:
    """Weights and activations in 8 bits, by scales from `images`; also in docs/export.md."""
    model = onnx.load(source)
    calibration = nncf.Dataset(images, lambda image: {"images": image.numpy()})
    options: dict[str, Any] = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": len(images)}
    onnx.save(nncf.quantize(model, calibration, **options), path)


def open_in_openvino(path: Path, threads: int, precision: str) -> RunFile:
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    return lambda image: [torch.from_numpy(compiled({"images": image.numpy()})[name]) for name in OUTPUTS]


def make_files(model: veca.Veca, cores: int, folder: Path, calibration: list[Tensor], compiles: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plain = {"plain.onnx": {}, "int8.onnx": {"dtype": "int8"}, "aoti.pt2": {"form": "aoti"} if compiles else None}
    for name, options in plain.items():
        if options is not None and not (folder / name).exists():
            export(model, folder / name, cores=cores, check=False, **options)  # type: ignore[arg-type]
    if not (folder / "nncf.onnx").exists():
        quantise(folder / "plain.onnx", folder / "nncf.onnx", calibration)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shard", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="veca_tiny")
    parser.add_argument("--cores", type=int, default=32)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 512])
    parser.add_argument("--calibrate", type=int, default=100, help="how many images, at the first of the sizes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--aoti", action="store_true", help="time a file of AOTInductor too; it takes a C++ compiler")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = veca.load(options.model).eval().requires_grad_(False)
    photos = list(read_shard(options.shard, options.calibrate + 4).values())
    first = options.sizes[0]
    calibration = [load_image(photo, first)[None] for photo in photos[: options.calibrate]]
    make_files(model, options.cores, options.folder, calibration, options.aoti)

    here, at_budget = options.folder, BudgetModel(model, options.cores)
    runs: dict[str, RunFile] = {"PyTorch float32": lambda image: list(at_budget(image))}
    runs |= {f"ONNX Runtime {name}": open_file(here / f"{name}.onnx", "onnx") for name in ("plain", "int8", "nncf")}
    for name, precision in (("plain", "f32"), ("plain", "bf16"), ("int8", "f32"), ("nncf", "f32"), ("nncf", "bf16")):
        runs[f"OpenVINO {name} {precision}"] = open_in_openvino(here / f"{name}.onnx", options.threads, precision)
    if (here / "aoti.pt2").exists():
        runs["AOTInductor float32"] = open_file(here / "aoti.pt2", "aoti")
    print(f"# openvino {openvino.__version__}, nncf {nncf.__version__}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    table = csv.writer(sys.stdout)
    table.writerow(["px", "contender", "ms", "against PyTorch", *(f"error of {name}" for name in OUTPUTS)])
    for size in options.sizes:
        images = torch.stack([load_image(photo, size) for photo in photos[options.calibrate :]])
        with torch.inference_mode():
            expected = at_budget(images)
            errors = {name: [run(image[None]) for image in images] for name, run in runs.items()}
            seconds = measure(
                {name: partial(run, images[:1]) for name, run in runs.items()}, images.device, options.repeats
            )
        base = statistics.median(seconds["PyTorch float32"])
        for name, outputs in errors.items():
            joined = [torch.cat(each, 1 if i == 2 else 0) for i, each in enumerate(zip(*outputs, strict=True))]
            found = output_errors(joined, expected)
            median = statistics.median(seconds[name])
            table.writerow(
                [size, name, f"{1e3 * median:.1f}", f"{median / base:.2f}", *(f"{found[key]:.1e}" for key in OUTPUTS)]
            )


if __name__ == "__main__":
    main()
