"""A model as a file that runs without this library: ONNX, a torch.export archive, or an AOTInductor package.

One file is one budget. Its input is `images` (B, 3, height, width), float32 and normalised; its outputs are float32
whatever the weights are: `cls` (B, D), `patches` (B, N, D) row by row, and `coordinates` (L, B, C, 2).
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

import veca
from veca.attention import use_kernel
from veca.config import VecaConfig, is_budget, size_name
from veca.errors import ArgumentError, needs_extra
from veca.images import MEAN, STD, nearest_sizes
from veca.model import Veca
from veca.optimized import FastVeca
from veca.utils.files import atomic_path, check_writable

Format: TypeAlias = Literal["onnx", "export", "aoti"]
Dtype: TypeAlias = Literal["float32", "float16", "bfloat16", "int8"]
Size: TypeAlias = tuple[int, int]
Run: TypeAlias = Callable[[Tensor], list[Tensor]]

OUTPUTS = ("cls", "patches", "coordinates")
OPSET = 18
"""The exporter's own: later ones it reaches by converting. All that is needed is in it (LayerNormalization since 17),
so that old runtimes read the file too. The Attention of opset 23 is no gain: with it onnxruntime 1.31 takes 1.05 of the
time on a CPU for veca_small at 512 px and 32 cores, 1.24 at 8.
"""
TOLERANCE = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 2e-1}
"""Largest error, relative to PyTorch in float32, that a file may have; that of int8 is only told: weights differ."""
ONNX_BYTES = 2**31
CHECK_SIZES = ((224, 224), (160, 288))
"""Where files of any size are checked; neither is the size they are traced at."""
TRACED = (64, 96)


class Check(NamedTuple):
    """One run of the file beside PyTorch in float32."""

    batch: int
    size: Size
    errors: dict[str, float]
    """Of each output: |found - expected| / |expected|."""
    seconds: float
    """Per image, in the file."""
    torch_seconds: float


class Plain(nn.Module):
    """The model at one budget, with tensors only going in and out."""

    def __init__(self, model: Veca, cores: int) -> None:
        super().__init__()
        self.model, self.cores = model, cores

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = self.model(images, cores=self.cores)
        return out.cls.float(), out.patches.float(), out.coordinates.float()


def export(
    model: Veca,
    path: str | os.PathLike[str],
    *,
    cores: int | None = None,
    size: Size | None = None,
    form: Format | None = None,
    dtype: Dtype = "float32",
    name: str | None = None,
    check: bool = True,
) -> list[Check]:
    """Write `model` with a budget of `cores` (default: all) to `path`; the model is left as it is.

    `size` (height, width) fixes the size of the pictures; without it sides are any multiples of the patch size, and the
    batch is free in any case. `form` follows from the suffix: `.onnx`, or `.pt2` for "export"; "aoti" is asked for. A
    file that is checked and fails is not kept.
    """
    path, model = Path(path), getattr(model, "_orig_mod", model)
    form = form_of(path, form)
    cores = model.config.num_cores if cores is None else cores
    _check_request(model, cores, size, form, dtype)
    _check_installed(form)
    check_writable(path)
    original = Plain(copy.deepcopy(model).to("cpu", torch.float32).eval().requires_grad_(False), cores)
    kept = torch.float32 if dtype == "int8" else getattr(torch, dtype)
    plain = original if kept == torch.float32 else copy.deepcopy(original).to(kept)
    facts = metadata(model, cores, size, dtype, name)
    with atomic_path(path) as part, tempfile.TemporaryDirectory(dir=part.parent, prefix=f".{path.name}.") as folder:
        file = Path(folder) / f"model{path.suffix}"  # AOTInductor insists on its suffix
        with _quiet():
            # The few-cores algebra has fewer products that int8 could speed up, and is slower there.
            program = trace(plain, size, few_cores=dtype != "int8")
            if form == "onnx":
                write_onnx(to_onnx(program), file, facts, int8=dtype == "int8")
            elif form == "export":
                torch.export.save(program, file, extra_files={"veca.json": json.dumps(facts)})
            else:
                _compile(program, file, facts)
        checks = check_file(file, form, original, size) if check else []
        wrong = [(each, key) for each in checks for key in OUTPUTS if not each.errors[key] <= TOLERANCE.get(dtype, 1e9)]
        if wrong:
            each, key = wrong[0]
            raise ArgumentError(
                f"{path} was not written: at {each.batch} × {each.size[0]}×{each.size[1]} its {key} is "
                f"{each.errors[key]:.1e} away from PyTorch's, more than {TOLERANCE[dtype]:.0e} for {dtype}; "
                "check=False (--no-check) writes it all the same"
            )
        os.replace(file, part)
    return checks


def form_of(path: Path, form: str | None = None) -> Format:
    """What to write to `path`: what was asked for, or what its suffix says.

    >>> form_of(Path("veca.onnx")), form_of(Path("veca.pt2")), form_of(Path("veca.pt2"), "aoti")
    ('onnx', 'export', 'aoti')
    """
    if form is not None and form not in get_args(Format):
        raise ArgumentError(f"format {form!r} is unknown; choose one of {', '.join(get_args(Format))}")
    suffixes = {"onnx": ".onnx", "export": ".pt2", "aoti": ".pt2"}
    if path.suffix not in suffixes.values():
        raise ArgumentError(f"{path}: suffix {path.suffix!r} is unknown; end it in .onnx, or in .pt2 for torch.export")
    if form is not None and path.suffix != suffixes[form]:
        raise ArgumentError(f"{path}: format {form} is written to files that end in {suffixes[form]}; rename it")
    return form or ("onnx" if path.suffix == ".onnx" else "export")  # type: ignore[return-value]  # checked above


def parse_size(text: str) -> Size | None:
    """Height and width, or None for any.

    >>> parse_size("512x768"), parse_size("512"), parse_size("dynamic")
    ((512, 768), (512, 512), None)
    """
    if text == "dynamic":
        return None
    found = re.fullmatch(r"(\d{1,6})(?:[x×](\d{1,6}))?", text)
    if not found:
        raise ArgumentError(f"size {text!r}: give HEIGHTxWIDTH as 512x768, one number for a square, or dynamic")
    return int(found[1]), int(found[2] or found[1])


def metadata(model: Veca, cores: int, size: Size | None, dtype: str, name: str | None) -> dict[str, str]:
    """What the file tells of itself."""
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


def trace(plain: Plain, size: Size | None, few_cores: bool = True) -> torch.export.ExportedProgram:
    """The graph, for any batch, and for any size of at least two patches a side if `size` is None."""
    config, dim = plain.model.config, torch.export.Dim
    patch = config.patch_size
    shape: dict[int, Any] = {0: dim("batch")}
    if size is None:
        shape |= {2: patch * dim("rows", min=2), 3: patch * dim("columns", min=2)}
    height, width = size or (side // 16 * patch for side in TRACED)
    images = torch.zeros(2, config.in_chans, height, width)
    with torch.no_grad(), use_kernel("auto" if few_cores else "sdpa"):
        # Not strict, `len(images)` would fix the batch.
        program = torch.export.export(plain, (images,), dynamic_shapes={"images": shape}, strict=True)
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def to_onnx(program: torch.export.ExportedProgram) -> Any:
    """The graph in ONNX, an `onnx.ModelProto`, its axes named."""
    made = torch.onnx.export(
        program, dynamo=True, opset_version=OPSET, input_names=["images"], output_names=OUTPUTS, verbose=False
    )
    assert made is not None
    model = made.model_proto
    # Where each node comes from is of no use to a reader; shapes in between have the tracer's names, and follow.
    del model.graph.value_info[:], model.graph.metadata_props[:]
    for node in model.graph.node:
        del node.metadata_props[:]
    names = {"images": ("batch", "", "height", "width"), "cls": ("batch",), "patches": ("batch", "patches")}
    names["coordinates"] = ("", "batch")
    for value in (*model.graph.input, *model.graph.output):
        for axis, known in zip(value.type.tensor_type.shape.dim, names[value.name], strict=False):
            if known and not axis.HasField("dim_value"):
                axis.dim_param = known
    return model


def write_onnx(model: Any, path: Path, facts: dict[str, str], int8: bool = False) -> None:
    """The ONNX file. With `int8` the weights of layers are 8-bit, and their inputs are rounded as they come."""
    import onnx

    onnx.helper.set_model_props(model, facts)
    if not int8:
        path.write_bytes(model.SerializeToString())
        return
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # Where cores go is never computed below float32: the layers with two outputs. Nor are the second layers of MLPs:
    # what SwiGLU gives has outliers, and rounding it makes most of the error. Scales per channel were worse on a CPU
    # without VNNI, where sums of two products can saturate.
    config = json.loads(facts["config"])
    hidden = VecaConfig.from_dict(config).mlp_dim, config["embed_dim"]
    weights = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    shapes = {n.name: weights.get(n.input[1], ()) for n in model.graph.node if n.op_type == "MatMul"}
    kept = [name for name, shape in shapes.items() if shape[-1:] == (2,) or shape == hidden]
    quantize_dynamic(model, path, weight_type=QuantType.QInt8, nodes_to_exclude=kept)


def _compile(program: torch.export.ExportedProgram, path: Path, facts: dict[str, str]) -> None:
    try:
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={"aot_inductor.metadata": facts}
        )
    except Exception as error:
        if "compiler" not in str(error).lower():
            raise
        raise ArgumentError("format aoti needs a C++ compiler: install g++, or choose --format export") from error


def open_file(path: Path, form: Format) -> Run:
    """The file as a function: images → the three outputs."""
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


def check_file(path: Path, form: Format, plain: Plain, size: Size | None) -> list[Check]:
    """The file beside the model itself: at two sizes, or at two batches where the size is fixed."""
    patch = plain.model.config.patch_size
    sizes = [(height // 16 * patch, width // 16 * patch) for height, width in CHECK_SIZES]
    cases = [(1, sizes[0]), (2, sizes[1])] if size is None else [(1, size), (2, size)]
    run = open_file(path, form)
    random = torch.Generator().manual_seed(0)
    checks = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was not trained")
        for batch, (height, width) in cases:
            images = torch.randn(batch, plain.model.config.in_chans, height, width, generator=random)
            found, expected = run(images), plain(images)
            pairs = zip(OUTPUTS, found, expected, strict=True)
            errors = {key: float((f - e).norm() / e.norm().clamp_min(1e-30)) for key, f, e in pairs}
            seconds = [_seconds(each, images) / batch for each in (run, plain)]
            checks.append(Check(batch, (height, width), errors, seconds[0], seconds[1]))
    return checks


def _seconds(call: Callable[[Tensor], Any], images: Tensor) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        call(images)
        best = min(best, time.perf_counter() - start)
    return best


def _check_request(model: Veca, cores: int, size: Size | None, form: Format, dtype: str) -> None:
    config = model.config
    if isinstance(model, FastVeca) or any(module._compiled_call_impl is not None for module in model.modules()):
        raise ArgumentError("an optimized model cannot be exported: export the model it was made from")
    if type(model).forward is not Veca.forward:
        raise ArgumentError(
            f"a {type(model).__name__} is not called as a Veca is; veca.save it, and export what veca.load gives"
        )
    if model.coordinate_alpha.is_meta:
        raise ArgumentError("the model is on the meta device and has no weights; load them first")
    if not is_budget(cores, config.num_cores):
        raise ArgumentError(f"cores={cores!r}; a budget is an integer from 1 to {config.num_cores}")
    if size is not None and (min(size) < config.patch_size or any(side % config.patch_size for side in size)):
        near = "x".join(map(str, nearest_sizes(*size, config.patch_size)))
        raise ArgumentError(
            f"size {size[0]}x{size[1]}: sides must be positive multiples of {config.patch_size}. Nearest: {near}"
        )
    if dtype not in get_args(Dtype):
        raise ArgumentError(f"dtype {dtype!r} is unknown; choose one of {', '.join(get_args(Dtype))}")
    if form == "onnx" and dtype == "bfloat16":
        raise ArgumentError("dtype bfloat16 in an ONNX file: hardly a runtime computes in it; choose float16 or a .pt2")
    if form != "onnx" and dtype == "int8":
        raise ArgumentError(
            f"dtype int8 with format {form}: it is made by onnxruntime; write to a file that ends in .onnx"
        )
    width = 2 if dtype == "float16" else 4
    if form == "onnx" and (weight := width * sum(p.numel() for p in model.parameters())) >= ONNX_BYTES:
        raise ArgumentError(
            f"the weights are {weight / 1e9:.1f} GB; an ONNX file holds at most 2: choose float16 or a .pt2"
        )


def _check_installed(form: Format) -> None:
    needed = ("onnx", "onnxscript", "onnxruntime") if form == "onnx" else ()
    for package in needed:
        with needs_extra("ONNX files need", "export"):
            importlib.import_module(package)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' running commentary to themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
