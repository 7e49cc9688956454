"""Export a model to a file that runs without this library: ONNX, torch.export, AOTInductor.

A file has one budget and one width. Its input is `images` (B, 3, height, width), float32 and normalised; its outputs
are float32 whatever the dtype of the weights: `cls` (B, D), `patches` (B, N, D) row by row, and `coordinates`
(L, B, C, 2).
"""

import copy
import importlib
import json
import logging
import os
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

import veca
from veca.attention import use_kernel
from veca.block_ops import is_plain
from veca.checkpoint.loading import load_or_random
from veca.config import VecaConfig, is_budget, size_name
from veca.errors import ArgumentError, needs_extra
from veca.images import MEAN, STD
from veca.inputs import nearest_sizes, resolve_width
from veca.model import SwiGlu, Veca
from veca.optimized import FastVeca
from veca.utils.files import atomic_path, check_writable
from veca.utils.timing import measure

ExportFormat: TypeAlias = Literal["onnx", "export", "aoti"]
ExportDtype: TypeAlias = Literal["float32", "float16", "bfloat16", "int8"]
ImageSize: TypeAlias = tuple[int, int]
RunFile: TypeAlias = Callable[[Tensor], list[Tensor]]

OUTPUTS = ("cls", "patches", "coordinates")
OPSET = 18
"""The exporter's native opset; others it reaches by conversion. It has all operators needed (LayerNormalization since
17), and old runtimes read it. The Attention operator of opset 23 is no gain: with it onnxruntime 1.31 takes 1.05 times
as long on a CPU for veca_small at 512 px and 32 cores, 1.24 times at 8.
"""
TOLERANCE = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 2e-1}
"""Largest error of a file, relative to PyTorch in float32. That of int8 is only reported: weights differ."""
ONNX_BYTES = 2**31
"""A protobuf message is smaller than this."""


class ExportCheck(NamedTuple):
    """One comparison of the file with PyTorch in float32."""

    batch: int
    size: ImageSize
    errors: dict[str, float]
    """Relative error of each output: |file - PyTorch| / |PyTorch|."""
    seconds: float
    """Per image, by the file."""
    torch_seconds: float


class BudgetModel(nn.Module):
    """The model at one budget and width: images in, a tuple of tensors out."""

    def __init__(self, model: Veca, cores: int, width: float | None = None) -> None:
        super().__init__()
        self.model, self.cores, self.width = model, cores, width

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = self.model(images, cores=self.cores, width=self.width)
        return out.cls.float(), out.patches.float(), out.coordinates.float()


class SplitMlp(nn.Module):
    """A `SwiGlu` as two: the first channels, for all tokens, and the rest, for cores. A file then slices no weights."""

    def __init__(self, mlp: SwiGlu, hidden: int) -> None:
        super().__init__()
        self.first, self.rest = copy.deepcopy(mlp), copy.deepcopy(mlp)
        for part, channels in ((self.first, slice(hidden)), (self.rest, slice(hidden, None))):
            weight, bias = (
                each.unflatten(0, (2, -1))[:, channels].flatten(0, 1) for each in (mlp.fc1.weight, mlp.fc1.bias)
            )
            part.fc1.weight, part.fc1.bias = nn.Parameter(weight, False), nn.Parameter(bias, False)
            part.fc2.weight = nn.Parameter(mlp.fc2.weight[:, channels].clone(), False)
        nn.init.zeros_(self.rest.fc2.bias)

    def forward(self, x: Tensor, cores: int, hidden: int) -> Tensor:
        out = self.first(x)
        return torch.cat([out[:, :cores] + self.rest(x[:, :cores]), out[:, cores:]], dim=1)


def split_mlps(model: Veca, hidden: int) -> Veca:
    """A copy of `model` with a `SplitMlp` in each block, but for those whose layers somebody has changed."""
    model = copy.deepcopy(model)
    blocks: Any = model.blocks
    for block in blocks:
        if is_plain(block.mlp.fc1, nn.Linear) and is_plain(block.mlp.fc2, nn.Linear):
            block.mlp = SplitMlp(block.mlp, hidden)
    return model


def export(
    model: Veca,
    path: str | os.PathLike[str],
    *,
    cores: int | None = None,
    width: float | None = None,
    size: ImageSize | None = None,
    form: ExportFormat | None = None,
    dtype: ExportDtype = "float32",
    name: str | None = None,
    check: bool = True,
) -> list[ExportCheck]:
    """Write `model` with a budget of `cores` (default: all) and a `width` to `path`; the model itself is not changed.

    `size` (height, width) fixes the size of images; without it sides are any multiples of the patch size. The batch
    size is always free. `form` follows from the suffix: `.onnx`, or `.pt2` for "export"; "aoti" must be given. A file
    that fails its `check` is not written.
    """
    path, model = Path(path), getattr(model, "_orig_mod", model)
    form = format_of(path, form)
    cores = (model.budget or model.config.num_cores) if cores is None else cores
    width = model.width if width is None else width
    hidden = resolve_width(width, model.config, model._warned)
    if problem := next(_find_problems(model, cores, size, form, dtype), None):
        raise ArgumentError(problem)
    for package in ("onnx", "onnxscript", "onnxruntime") if form == "onnx" else ():
        with needs_extra("ONNX files need", "export"):
            importlib.import_module(package)
    check_writable(path)
    # Files are traced on the CPU, and checked against the model in float32.
    original = BudgetModel(copy.deepcopy(model).to("cpu", torch.float32).eval().requires_grad_(False), cores, width)
    stored = torch.float32 if dtype == "int8" else getattr(torch, dtype)
    model_at_budget = original if stored == torch.float32 else copy.deepcopy(original).to(stored)
    if hidden is not None:
        model_at_budget = BudgetModel(split_mlps(model_at_budget.model, hidden), cores, width)
    metadata_props = describe_export(model, cores, size, dtype, name) | {"width": f"{width or 1:g}"}
    # In a folder of its own beside the target, so that the finished file can be moved there atomically.
    with atomic_path(path) as part, tempfile.TemporaryDirectory(dir=part.parent, prefix=f".{path.name}.") as folder:
        file = Path(folder) / f"model{path.suffix}"  # AOTInductor insists on its suffix
        with warnings.catch_warnings(action="ignore"), ExitStack() as after:
            after.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.WARNING)
            # The few-cores algorithm has fewer products that int8 speeds up, and is slower there.
            program = trace(model_at_budget, size, few_cores=dtype != "int8")
            if form == "onnx":
                write_onnx(to_onnx(program), file, metadata_props, int8=dtype == "int8")
            elif form == "export":
                torch.export.save(program, file, extra_files={"veca.json": json.dumps(metadata_props)})
            else:
                _compile_aoti(program, file, metadata_props)
        patch = model.config.patch_size
        # Files of dynamic size are checked at two sizes that they were not traced at.
        sizes = [size, size] if size else [(14 * patch, 14 * patch), (10 * patch, 18 * patch)]
        checks = list(check_file(file, form, original, zip((1, 2), sizes, strict=True), 3)) if check else []
        # `not <=`: an error of NaN is wrong too.
        limit = TOLERANCE.get(dtype, 1e9)
        for batch, (height, width), errors, *_ in checks:
            for key, error in errors.items():
                if not error <= limit:
                    where = f"at {batch} × {height}×{width} its {key} is {error:.1e} away from PyTorch's"
                    rule = f"more than {limit:.0e} for {dtype}; check=False (--no-check) writes it all the same"
                    raise ArgumentError(f"{path} was not written: {where}, {rule}")
        os.replace(file, part)
    return checks


def format_of(path: Path, form: str | None = None) -> ExportFormat:
    """The format to write to `path`: `form`, or else by its suffix.

    >>> format_of(Path("veca.onnx")), format_of(Path("veca.pt2")), format_of(Path("veca.pt2"), "aoti")
    ('onnx', 'export', 'aoti')
    """
    formats: dict[str, tuple[ExportFormat, ...]] = {".onnx": ("onnx",), ".pt2": ("export", "aoti")}
    for each in formats.get(path.suffix, ()):
        if form in (None, each):
            return each
    rule = "format onnx is written to files that end in .onnx, export and aoti to .pt2"
    raise ArgumentError(f"{path}{f' with format {form!r}' if form else ''}: {rule}")


def parse_size(text: str) -> ImageSize | None:
    """(height, width) from text; None for any size.

    >>> parse_size("512x768"), parse_size("512"), parse_size("dynamic")
    ((512, 768), (512, 512), None)
    """
    if text == "dynamic":
        return None
    match = re.fullmatch(r"(\d{1,6})(?:[x×](\d{1,6}))?", text)
    if not match:
        raise ArgumentError(f"size {text!r}: give HEIGHTxWIDTH as 512x768, one number for a square, or dynamic")
    return int(match[1]), int(match[2] or match[1])


def describe_export(model: Veca, cores: int, size: ImageSize | None, dtype: str, name: str | None) -> dict[str, str]:
    """Metadata of the file."""
    config = model.config
    return {
        "model": name or size_name(config) or "custom",
        "cores": str(cores),
        "size": f"{size[0]}x{size[1]}" if size else "dynamic",
        "patch_size": str(config.patch_size),
        "dtype": dtype,
        "mean": json.dumps(MEAN),
        "std": json.dumps(STD),
        "veca_version": veca.__version__,
        "licence": "Apache-2.0 (veca); that of the weights is their author's",
        "config": json.dumps(config.to_dict()),
        "provenance": json.dumps(model.provenance),
    }


def trace(model_at_budget: BudgetModel, size: ImageSize | None, few_cores: bool = True) -> torch.export.ExportedProgram:
    """The traced graph, for any batch size; if `size` is None, for any size of at least two patches a side."""
    config, dim = model_at_budget.model.config, torch.export.Dim
    patch = config.patch_size
    shape: dict[int, Any] = {0: dim("batch")}
    if size is None:
        shape |= {2: patch * dim("rows", min=2), 3: patch * dim("columns", min=2)}
    images = torch.zeros(2, config.in_chans, *(size or (4 * patch, 6 * patch)))
    with torch.no_grad(), use_kernel("auto" if few_cores else "sdpa"):
        # Non-strict tracing would specialise the batch size, through `len(images)`.
        program = torch.export.export(model_at_budget, (images,), dynamic_shapes={"images": shape}, strict=True)
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        node.meta.pop("stack_trace", None)  # it holds local paths
    return program


def to_onnx(program: torch.export.ExportedProgram) -> Any:
    """The graph as an `onnx.ModelProto` with named axes."""
    exported = torch.onnx.export(
        program, dynamo=True, opset_version=OPSET, input_names=["images"], output_names=OUTPUTS, verbose=False
    )
    assert exported is not None
    model = exported.model_proto
    # Drop the origin of nodes, and intermediate shapes, which have the tracer's names and can be inferred.
    del model.graph.value_info[:], model.graph.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]
    names = {"images": ["batch", "", "height", "width"], "patches": ["batch", "patches"], "coordinates": ["", "batch"]}
    for value in (*model.graph.input, *model.graph.output):
        for axis, axis_name in zip(value.type.tensor_type.shape.dim, names.get(value.name, ["batch"]), strict=False):
            if axis_name and not axis.HasField("dim_value"):
                axis.dim_param = axis_name
    return model


def write_onnx(model: Any, path: Path, metadata_props: dict[str, str], int8: bool = False) -> None:
    """Write an ONNX file. With `int8` layers have 8-bit weights, and their inputs are quantised dynamically."""
    import onnx

    onnx.helper.set_model_props(model, metadata_props)
    if not int8:
        path.write_bytes(model.SerializeToString())
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # Not quantised: coordinate heads (two outputs), which need float32, and the second layers of MLPs, whose inputs
    # have outliers that would make most of the error. Per-channel scales were worse on a CPU without VNNI, where sums
    # of two products can saturate.
    config = json.loads(metadata_props["config"])
    whole, first = (VecaConfig.from_dict(config).hidden_width(w) for w in (1, float(metadata_props["width"])))
    hidden = [(channels, config["embed_dim"]) for channels in (whole, first, whole - first)]
    weights = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    shapes = {n.name: weights.get(n.input[1], ()) for n in model.graph.node if n.op_type == "MatMul"}
    excluded = [name for name, shape in shapes.items() if shape[-1:] == (2,) or shape in hidden]
    quantize_dynamic(model, path, weight_type=QuantType.QInt8, nodes_to_exclude=excluded)


def _compile_aoti(program: torch.export.ExportedProgram, path: Path, metadata_props: dict[str, str]) -> None:
    try:
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"aot_inductor.metadata": metadata_props}
        )
    except Exception as error:
        if "compiler" not in str(error).lower():
            raise
        raise ArgumentError("format aoti needs a C++ compiler: install g++, or choose --format export") from error


def open_file(path: Path, form: ExportFormat) -> RunFile:
    """Load the file as a function: images → the three outputs."""
    if form == "onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return lambda x: [torch.from_numpy(each) for each in session.run(OUTPUTS, {"images": x.numpy()})]
    if form == "export":
        module = torch.export.load(path).module()
        return lambda x: list(module(x))
    package = torch._inductor.aoti_load_package(str(path))
    return lambda x: list(package(x))


def check_file(
    path: Path, form: ExportFormat, model_at_budget: BudgetModel, cases: Iterable[tuple[int, ImageSize]], repeats: int
) -> Iterator[ExportCheck]:
    """Compare the file with the model for each batch size and image size; the seconds are medians, taken in turns."""
    run = open_file(path, form)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was not trained")
        for batch, size in cases:
            images = torch.randn(batch, model_at_budget.model.config.in_chans, *size, generator=random)
            errors = output_errors(run(images), model_at_budget(images))
            calls = {"file": partial(run, images), "torch": partial(model_at_budget, images)}
            seconds = measure(calls, images.device, repeats, warmup=0)
            yield ExportCheck(batch, size, errors, *(statistics.median(seconds[name]) / batch for name in calls))


def output_errors(outputs: Iterable[Tensor], expected: Iterable[Tensor]) -> dict[str, float]:
    """‖output − expected‖ / ‖expected‖ by the name of the output."""
    pairs = zip(OUTPUTS, outputs, expected, strict=True)
    return {key: float((a - b).norm() / b.norm().clamp_min(1e-30)) for key, a, b in pairs}


def _find_problems(model: Veca, cores: int, size: ImageSize | None, form: ExportFormat, dtype: str) -> Iterator[str]:
    """Reasons why a model cannot be exported in this way."""
    patch, num_cores = model.config.patch_size, model.config.num_cores
    if isinstance(model, FastVeca) or any(module._compiled_call_impl is not None for module in model.modules()):
        yield "an optimized model cannot be exported: export the model it was made from"
    if type(model).forward is not Veca.forward:
        yield f"a {type(model).__name__} is not called as a Veca is; veca.save it, and export what veca.load gives"
    if model.coordinate_alpha.is_meta:
        yield "the model is on the meta device and has no weights; load them first"
    if not is_budget(cores, num_cores):
        yield f"cores={cores!r}; a budget is an integer from 1 to {num_cores}; leave it out for all {num_cores}"
    if size is not None and (min(size) < patch or any(side % patch for side in size)):
        near = "x".join(map(str, nearest_sizes(*size, patch)))
        yield f"size {size[0]}x{size[1]}: sides must be positive multiples of {patch}. Nearest: {near}"
    if dtype not in get_args(ExportDtype):
        yield f"dtype {dtype!r} is unknown; choose one of {', '.join(get_args(ExportDtype))}"
    if form == "onnx" and dtype == "bfloat16":
        yield "dtype bfloat16 in an ONNX file: hardly a runtime computes in it; choose float16 or a .pt2"
    if form != "onnx" and dtype == "int8":
        yield f"dtype int8 with format {form}: onnxruntime makes it; write to a file that ends in .onnx"
    size_bytes = (2 if dtype == "float16" else 4) * sum(p.numel() for p in model.parameters())
    if form == "onnx" and size_bytes >= ONNX_BYTES:
        yield f"the weights are {size_bytes / 1e9:.1f} GB; an ONNX file holds at most 2: choose float16 or a .pt2"


def bench_onnx(
    model: str, sizes: Sequence[str], cores: Sequence[int], dtype: ExportDtype, threads: int, repeats: int
) -> None:
    """Print the error and the median time of an ONNX file of `model` beside eager float32 PyTorch on the CPU.

    One file with dynamic sizes is exported for each budget. `sizes` are as 512 or 320x480.
    """
    cases = [(1, size) for text in sizes if (size := parse_size(text))]
    if "dynamic" in sizes:
        raise ArgumentError("size 'dynamic': name a fixed size, as 512 or 320x480")
    torch.set_num_threads(threads)
    backbone = load_or_random(model, "cpu").eval().requires_grad_(False)
    weights = "random weights" if backbone.provenance.get("weights") == "random" else "its weights"
    print(f"{model}, {weights}, {dtype}, {threads} thread(s), load {os.getloadavg()[0]:.1f}")
    print("     size   C      cls  patches   places  onnxruntime    PyTorch  ratio")
    with tempfile.TemporaryDirectory() as folder:
        for budget in cores:
            file = Path(folder) / f"{budget}.onnx"
            export(backbone, file, cores=budget, dtype=dtype, check=False)
            checks = check_file(file, "onnx", BudgetModel(backbone, budget), cases, repeats)
            for text, check in zip(sizes, checks, strict=True):
                errors = " ".join(f"{check.errors[key]:8.1e}" for key in OUTPUTS)
                times = f"{1e3 * check.seconds:9,.1f} ms {1e3 * check.torch_seconds:7,.1f} ms"
                print(f"{text:>9} {budget:3} {errors} {times} {check.torch_seconds / check.seconds:4.2f} ×", flush=True)
