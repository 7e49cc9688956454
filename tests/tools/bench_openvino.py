"""Exported files in OpenVINO beside ONNX Runtime and PyTorch, and 8 bits by NNCF: errors and times.

    pip install openvino nncf                                        # nothing else here needs them
    python tests/tools/bench_openvino.py pets-trainval.tar FOLDER

Scales of 8 bits are calibrated on the first images of the shard, errors are those of the next four. Files are made in
FOLDER, and used again if they are there: `veca probe knn --model FOLDER/nncf.onnx` tells a score. Images come one by
one on one thread, and times are CPU times, in which other programs count less; the rows are printed as CSV.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import torch
from measure_search import read_shard
from torch import Tensor

import veca
from veca.export import OUTPUTS, BudgetModel, export, open_file, output_errors
from veca.images import load_image

RunFile = Callable[[Tensor], list[Tensor]]
REPEATS = 15


def quantise(source: Path, path: Path, images: list[Tensor]) -> None:
    """As in docs/export.md: layers with more outputs than inputs in 8 bits, by scales from `images`."""
    import nncf

    model = onnx.load(source)
    wider = {each.name for each in model.graph.initializer if len(each.dims) == 2 and each.dims[1] > each.dims[0]}
    products = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm", "Conv")]
    quantised = nncf.quantize(
        model,
        nncf.Dataset(images, lambda image: {"images": image.numpy()}),
        subset_size=len(images),
        model_type=nncf.ModelType.TRANSFORMER,
        ignored_scope=nncf.IgnoredScope(names=[node.name for node in products if node.input[1] not in wider]),
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=-1)  # does not take a graph of torch.onnx
        ),
    )
    onnx.save(quantised, path)


def open_in_openvino(path: Path, precision: str, size: int | None = None) -> RunFile:
    """The file, for any size or for one."""
    import openvino

    model = openvino.Core().read_model(path)
    if size:
        model.reshape({"images": [1, 3, size, size]})
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": False}
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    return lambda image: [torch.from_numpy(compiled({"images": image.numpy()})[name].copy()) for name in OUTPUTS]


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
    parser.add_argument("--aoti", action="store_true", help="time a file of AOTInductor too; it takes a C++ compiler")
    options = parser.parse_args()
    import nncf  # here, so that pytest collects the file without it
    import openvino

    nncf.set_log_level(logging.ERROR)  # it prints to where the rows go
    torch.set_num_threads(1)
    model = veca.load(options.model).eval().requires_grad_(False)
    photos = list(read_shard(options.shard, options.calibrate + 4).values())
    calibration = [load_image(photo, options.sizes[0])[None] for photo in photos[: options.calibrate]]
    make_files(model, options.cores, options.folder, calibration, options.aoti)
    print(f"# openvino {openvino.__version__}, nncf {nncf.__version__}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    table = csv.writer(sys.stdout)
    table.writerow(["px", "contender", "ms", "share of PyTorch's", *(f"error of {name}" for name in OUTPUTS)])
    for size in options.sizes:
        images = torch.stack([load_image(photo, size) for photo in photos[options.calibrate :]])
        with torch.inference_mode():
            table.writerows(compare(open_files(BudgetModel(model, options.cores), options.folder, size), images))


def open_files(at_budget: BudgetModel, folder: Path, size: int) -> dict[str, RunFile]:
    runs: dict[str, RunFile] = {"PyTorch": lambda image: list(at_budget(image))}
    if (folder / "aoti.pt2").exists():
        runs["AOTInductor"] = open_file(folder / "aoti.pt2", "aoti")
    for name, about in {"plain": "float32 file", "int8": "--dtype int8", "nncf": "int8 by NNCF"}.items():
        path = folder / f"{name}.onnx"
        runs[f"{about}, ONNX Runtime"] = open_file(path, "onnx")
        for precision in ("f32", "bf16"):
            runs[f"{about}, OpenVINO {precision}"] = open_in_openvino(path, precision)
            runs[f"{about}, OpenVINO {precision}, one size"] = open_in_openvino(path, precision, size)
    return runs


def compare(runs: dict[str, RunFile], images: Tensor) -> Iterator[list[str]]:
    """Rows of the table; the first of `runs` is what the others are held against."""
    outputs = {name: [run(image[None]) for image in images] for name, run in runs.items()}
    joined = {
        name: [torch.cat(each, 1 if i == 2 else 0) for i, each in enumerate(zip(*parts, strict=True))]
        for name, parts in outputs.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            start = time.process_time()
            run(images[:1])
            seconds[name].append(time.process_time() - start)
    base = statistics.median(seconds["PyTorch"])
    for name in runs:
        errors = output_errors(joined[name], joined["PyTorch"])
        median = statistics.median(seconds[name])
        found = [f"{errors[key]:.1e}" for key in OUTPUTS] if name != "PyTorch" else ["", "", ""]
        yield [str(images.shape[-1]), name, f"{1e3 * median:.1f}", f"{median / base:.2f}", *found]


if __name__ == "__main__":
    main()
