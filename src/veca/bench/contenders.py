"""What the benchmarks time, and on which cases: ways to run VECA, the dense ViT of the same size, matrix products.

All contenders of a case share one workload: the same images, and the same weights where they are the same model.
Shapes: B images, C cores, N patches, S = C + N tokens (cores first), H heads, d width of a head, D = H·d.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import veca
from veca.attention import Kernel, core_attention, use_kernel
from veca.checkpoint import create_model
from veca.config import SIZES, MlpWidth, VecaConfig
from veca.errors import ArgumentError
from veca.fast_block import Weights
from veca.flops import attention_product_flops, dense_model_flops, model_flops
from veca.model import Veca
from veca.outputs import VecaOutput
from veca.rope import Rotary, make_rotary, rotate
from veca.teachers.from_timm import create_dense_vit
from veca.utils.settings import Positive, Settings
from veca.utils.text import did_you_mean
from veca.utils.timing import Call

Bench: TypeAlias = Literal["attention", "model", "train"]


@dataclass(frozen=True)
class Case(Settings):
    """One point of a sweep.

    >>> Case.parse("base:1024:16")
    Case(model='veca_base', size=1024, batch=16, cores=64, width=1.0)
    >>> str(Case.parse("veca_small:512:96:8")), str(Case.parse("base:1024:16:8:0.25"))
    ('small:512:96:8', 'base:1024:16:8:0.25')
    """

    model: str
    size: int
    """Side of the square images in pixels."""
    batch: Positive
    cores: int
    width: MlpWidth = 1.0
    """Share of the MLP's channels that patches use."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [name.removeprefix("veca_") for name in SIZES]
        hint = did_you_mean(self.model.removeprefix("veca_"), known)
        self.require("model", self.model in SIZES, f"one of {', '.join(known)}{hint}")
        patch, bank = self.config.patch_size, self.config.num_cores
        nearest = max(patch, round(self.size / patch) * patch)
        valid = self.size >= patch and self.size % patch == 0
        self.require("size", valid, f"a positive multiple of {patch}, such as {nearest}")
        self.require("cores", 1 <= self.cores <= bank, f"from 1 to {bank}, the core bank")

    @classmethod
    def parse(cls, text: str) -> Case:
        """A case from MODEL:PIXELS:BATCH, followed by :CORES or :CORES:WIDTH."""
        match = re.fullmatch(r"(.*?):(\d+):(\d+)(?::(\d+)(?::(\d*\.?\d+))?)?", text, re.ASCII)
        if not match:
            raise ArgumentError(f"case {text!r}: must be MODEL:PIXELS:BATCH[:CORES[:WIDTH]], as base:1024:16")
        model, *numbers, width = match.groups()
        size, batch, cores = (int(number or 64) for number in numbers)  # 64: all cores of the named sizes
        return cls(full_model_name(model), size, batch, cores, float(width or 1))

    def __str__(self) -> str:
        width = f":{self.width:g}" if self.width != 1 else ""
        return f"{self.model.removeprefix('veca_')}:{self.size}:{self.batch}:{self.cores}{width}"

    @property
    def config(self) -> VecaConfig:
        return SIZES[self.model]

    @property
    def patches(self) -> int:
        return (self.size // self.config.patch_size) ** 2

    @property
    def tokens(self) -> int:
        """Cores and patches of one image."""
        return self.cores + self.patches


def full_model_name(model: str) -> str:
    """`base` and `veca_base` are the same model."""
    return f"veca_{model}" if f"veca_{model}" in SIZES else model


def choose_cases(bench: Bench, on_cuda: bool, exact: Sequence[str] = (), *sweep: Sequence[Any]) -> list[Case]:
    """The `exact` cases, or every combination of a `sweep`, or the default cases when all are empty.

    A sweep is models, sizes, batch sizes and budgets; for each of these that is empty there is a default.
    """
    if exact and any(sweep):
        raise ArgumentError("--case says it all: leave out --model, --size, --batch-size and --cores, or --case")
    if any(sweep):
        defaults: list[list[Any]] = [["base"], [1024], [16 if on_cuda else 1], [64]]
        product = itertools.product(*(values or default for values, default in zip(sweep, defaults, strict=True)))
        return [Case(full_model_name(model), *numbers) for model, *numbers in product]
    return [Case.parse(text) for text in exact or (TARGETS[bench] if on_cuda else CPU_CASES[bench].split())]


# Milliseconds on one H200 in bfloat16 with 64 cores: the default cases on CUDA. For attention it is the forward pass.
TARGETS: dict[Bench, dict[str, float | None]] = {
    "model": {
        "base:256:64": 8,
        "base:512:32": 13,
        "base:1024:16": 24,
        "base:2048:4": 24,
        "small:1024:16": 9,
        "large:1024:8": 45,
        "base:1024:1": 2,
    },
    "train": {"small:256:384": 48, "small:512:96": 42, "base:256:128": 48, "base:512:32": 42},
    "attention": {"base:1024:16": 0.18, "base:256:64": None},
}
CPU_CASES: dict[Bench, str] = {"model": "small:512:1 base:512:1", "train": "small:256:1", "attention": "base:512:1"}


def target_ms(what: str, case: Case) -> float | None:
    """The target of a measurement, such as `model forward`, if it has one in this case."""
    targets = {} if what == "attention backward" else TARGETS[cast(Bench, what.split()[0])]
    return {Case.parse(text): ms for text, ms in targets.items()}.get(case)


@dataclass(frozen=True)
class BenchSetting:
    """What all cases of a run have in common."""

    device: torch.device
    dtype: torch.dtype
    cls_only: bool = False
    """Compute the global feature alone, in the contenders that can save work by that."""
    names: Sequence[str] = ()
    """Of the contenders; none: all but float8 weights."""
    repeats: int = 10
    profile: bool = False
    errors: bool = True
    """Measure the error against float64 too."""


class Prepared(NamedTuple):
    """A contender ready to run."""

    call: Call
    flops: int
    """Matrix products of one call, 2 per multiply-add."""
    bytes: int | None = None
    """What one call must read and write, where bandwidth rather than FLOPs bounds it."""
    resident: int = 0
    """Bytes of weights that count as memory of the call."""
    built_s: float = 0.0
    """Seconds of one-time work before the first call."""


class Contender(NamedTuple):
    build: Callable[[Workload], Prepared]
    compiled: bool = False


class Workload:
    """Models and inputs of one case, created on first use."""

    def __init__(self, case: Case, setting: BenchSetting, weights: torch.dtype | None = None) -> None:
        self.case, self.setting, self.device = case, setting, setting.device
        self.weights = weights or setting.dtype
        size, config = (case.size, case.size), case.config
        self.veca_flops = case.batch * model_flops(config, *size, case.cores, case.width)
        self.dense_flops = case.batch * dense_model_flops(config, *size)
        torch.manual_seed(0)

    def new_veca(self, dtype: torch.dtype | None = None) -> Veca:
        """A new model, always with the same weights: drawn in float32, then cast."""
        with torch.device("meta"):
            # Training shifts and rescales patch coordinates at random; gradients compare only without that.
            widths = sorted({self.case.width, 1.0})
            model = create_model(self.case.model, coordinate_shift=0.0, coordinate_rescale=1.0, widths=widths)
        model.width = self.case.width
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(1)
            model.to_empty(device=self.device).init_weights()  # drawn on the device: a CPU would take seconds
            randomize_weights(model)
        return model.to(dtype or self.weights)

    @cached_property
    def veca(self) -> Veca:
        return self.new_veca().eval()

    @cached_property
    def dense(self) -> Any:
        dense = create_dense_vit(self.case.config).to(self.device)
        randomize_weights(dense)
        return dense.to(self.weights).eval()

    @cached_property
    def images(self) -> Tensor:
        return self._randn(3, self.case.size, self.case.size, dtype=self.weights)

    @cached_property
    def qkv(self) -> Tensor:
        """(B, S, 3, H, d), the layout that a block's projection gives."""
        return self._randn(self.case.tokens, 3, self.case.config.num_heads, self.case.config.head_dim)

    @cached_property
    def gradient(self) -> Tensor:
        """(B, S, D), of the output of attention."""
        return self._randn(self.case.tokens, self.case.config.embed_dim)

    def _randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(self.case.batch, *shape, device=self.device, dtype=dtype or self.setting.dtype)

    @cached_property
    def rotaries(self) -> tuple[Rotary, Rotary]:
        """Rotary tables of the cores, per image, and of the patches, in float32 as in the model."""
        config, shapes = self.case.config, ((self.case.batch, 1, self.case.cores, 2), (self.case.patches, 2))
        coordinates = (torch.rand(shape, device=self.device) * 2 - 1 for shape in shapes)
        core, patch = (make_rotary(c, config.head_dim, config.rope_zero_fraction) for c in coordinates)
        return core, patch


@torch.no_grad()
def randomize_weights(model: nn.Module) -> None:
    """Draw weights under which every path matters: with freshly initialised ones tokens hardly differ."""
    for name, parameter in model.named_parameters():
        if name == "coordinate_alpha":
            parameter.fill_(0.3)
        elif parameter.ndim == 1:  # biases, and the gains of norms
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        elif not name.startswith("core"):  # cores and their coordinates are spread out already
            parameter.normal_(std=parameter[0].numel() ** -0.5)


def maybe_compile(function: Callable[..., Any], compiled: bool, mode: str | None = None) -> Callable[..., Any]:
    """`function`, compiled for the one shape it is called with if `compiled`."""
    return torch.compile(function, dynamic=False, mode=mode) if compiled else function


# Forward pass of the whole model.


def _forward(model: Callable[..., Any], flops: int, *args: Any, kernel: Kernel = "auto", **options: Any) -> Prepared:
    def call() -> object:
        with torch.inference_mode(), use_kernel(kernel):
            return model(*args, **options)

    return Prepared(call, flops)


def _optimized_forward(workload: Workload, weights: Weights | None = None) -> Prepared:
    """The floor is that of the run's dtype, so faster products of float8 `weights` can beat it."""
    if weights == "float8" and workload.device.type != "cuda":
        raise ArgumentError(f"float8 weights need a CUDA device; this run is on {workload.device}")
    model = workload.new_veca(torch.float32).eval()
    start = time.perf_counter()
    optimized = veca.optimize(model, dtype=workload.setting.dtype, weights=weights)
    built_s = time.perf_counter() - start
    return _veca_forward(workload, optimized, "auto")._replace(built_s=built_s)


def _veca_forward(workload: Workload, model: Callable[..., Any], kernel: Kernel) -> Prepared:
    inputs, cls_only = (workload.images, workload.case.cores), workload.setting.cls_only
    return _forward(model, workload.veca_flops, *inputs, kernel=kernel, cls_only=cls_only)


def _plain_forward(workload: Workload, compiled: bool = False) -> Prepared:
    return _veca_forward(workload, maybe_compile(workload.veca, compiled), "sdpa")


def _dense_forward(workload: Workload, compiled: bool = False) -> Prepared:
    return _forward(maybe_compile(workload.dense.forward_features, compiled), workload.dense_flops, workload.images)


def _matrix_products(workload: Workload) -> Prepared:
    """The linear layers of VECA's blocks and nothing else, by the machine's matrix library; all tokens as patches."""
    config, tokens = workload.case.config, workload.case.batch * workload.case.tokens
    dim, hidden = config.embed_dim, config.hidden_width(workload.case.width)
    new = partial(torch.randn, device=workload.device, dtype=workload.setting.dtype)
    inputs = {width: new(tokens, width) for width in (dim, hidden)}
    # qkv, output projection, gate and value of the MLP, its output: (out, in)
    weights = [new(wide, narrow) for narrow, wide in [(dim, 3 * dim), (dim, dim), (dim, 2 * hidden), (hidden, dim)]]

    def multiply() -> None:
        for weight in config.depth * weights:
            F.linear(inputs[weight.shape[1]], weight)

    return _forward(multiply, config.depth * tokens * (8 * dim**2 + 6 * dim * hidden))


MODEL = {
    "veca": Contender(_optimized_forward, True),
    "veca float8": Contender(partial(_optimized_forward, weights="float8"), True),
    "veca eager": Contender(_plain_forward),
    "veca compiled": Contender(partial(_plain_forward, compiled=True), True),
    "dense": Contender(_dense_forward),
    "dense compiled": Contender(partial(_dense_forward, compiled=True), True),
    "products": Contender(_matrix_products),
}


# Forward and backward pass of the whole model, without the optimizer.


def _train_step(
    workload: Workload, kernel: Kernel = "auto", compiled: bool = True, checkpointed: bool = False, dense: bool = False
) -> Prepared:
    """Gradients of every weight; the loss is compiled with the model, as in training code."""
    model: Any = workload.dense if dense else workload.new_veca() if checkpointed else workload.veca
    if dense:
        features, flops = partial(model.forward_features, workload.images), workload.dense_flops
    else:
        model.set_grad_checkpointing(checkpointed)
        features, flops = partial(model, workload.images, workload.case.cores), workload.veca_flops
    weights = list(model.train().parameters())
    device, dtype = workload.device.type, workload.setting.dtype

    def forward() -> Tensor:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            return batch_loss(features())

    mode = None
    if compiled and device == "cuda":
        # A step of one shape is captured as a CUDA graph, so that the GPU does not wait for Python.
        mode = "reduce-overhead"
        torch._dynamo.mark_static_address(workload.images)  # the graph reads the batch in place
    forward = maybe_compile(forward, compiled, mode)

    def call() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        with use_kernel(kernel):
            return torch.autograd.grad(forward(), weights, allow_unused=True)

    return Prepared(call, 3 * flops, resident=sum(weight.nbytes for weight in weights))


def batch_loss(out: Any) -> Tensor:
    """A loss that reaches every feature: the mean over the batch of one loss per image."""
    features = out[:2] if isinstance(out, VecaOutput) else [out]
    dtype = torch.promote_types(features[0].dtype, torch.float32)
    return torch.stack([feature.to(dtype).square().mean() for feature in features]).sum()


TRAIN = {
    "veca": Contender(_train_step, True),
    "veca eager": Contender(partial(_train_step, kernel="sdpa", compiled=False)),
    "veca compiled": Contender(partial(_train_step, kernel="sdpa"), True),
    "veca checkpointed": Contender(partial(_train_step, checkpointed=True), True),
    "dense": Contender(partial(_train_step, compiled=False, dense=True)),
    "dense compiled": Contender(partial(_train_step, dense=True), True),
}


# Attention of one layer alone: q, k and v in one tensor → output, rotary embedding included.


AttentionFunction: TypeAlias = tuple[Callable[..., Tensor], Sequence[Tensor], int]
"""A function of qkv (B, S, 3, H, d) and positions that gives (B, S, D), the positions, and its FLOPs.

Positions have gradients too: training moves the cores, so their coordinates or the tables made from them.
"""


def _core_attention(workload: Workload, kernel: Kernel, compiled: bool = False) -> AttentionFunction:
    core, patch = workload.rotaries
    case, attend = workload.case, maybe_compile(core_attention, compiled)

    def function(qkv: Tensor, cos: Tensor, sin: Tensor, coordinates: Tensor) -> Tensor:
        with use_kernel(kernel):
            return attend(qkv, core._replace(cos=cos, sin=sin, coordinates=coordinates), patch)

    return function, core[:3], case.batch * attention_product_flops(case.config, case.size, case.size, case.cores)


def _full_attention(workload: Workload, compiled: bool = False) -> AttentionFunction:
    """All tokens attend to all; cores get no rotary embedding, like the class token and registers of DINOv3."""
    case, patch = workload.case, workload.rotaries[1]
    table = F.pad(patch.cos, (0, 0, case.cores, 0), value=1), F.pad(patch.sin, (0, 0, case.cores, 0))

    def function(qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v).transpose(1, 2).flatten(2)

    return maybe_compile(function, compiled), (), case.batch * 4 * case.config.embed_dim * case.tokens**2


def _graphed(call: Call, stream: torch.cuda.Stream | None) -> Call:
    """A call that is captured as a CUDA graph the second time and replayed after: launching takes Python longer.

    Without a stream, which is where there is no CUDA, the call itself.
    """
    if stream is None:
        return call
    graph, calls, results = torch.cuda.CUDAGraph(), itertools.count(), list[object]()

    def replay() -> object:
        if next(calls) == 0:  # runs eagerly, which also compiles
            with _on_stream(stream):
                return call()
        if not results:
            with torch.cuda.graph(graph, stream=stream):
                results.append(call())
        graph.replay()
        return results[0]

    return replay


@contextmanager
def _on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on another stream, ordered after and before the current one: a graph is captured on a stream of its own."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _attention(workload: Workload, make: Callable[[Workload], AttentionFunction], backward: bool) -> Prepared:
    """The forward pass, or the backward pass alone over an autograd graph that is retained."""
    (function, positions, flops), qkv = make(workload), workload.qkv
    stream = torch.cuda.Stream() if qkv.device.type == "cuda" else None
    if not backward:
        call: Call = torch.no_grad()(partial(function, qkv, *positions))
        return Prepared(_graphed(call, stream), flops, bytes=qkv.nbytes + qkv.nbytes // 3)
    start = time.perf_counter()
    inputs = [tensor.detach().requires_grad_() for tensor in (qkv, *positions)]
    # Otherwise compiled code may overwrite buffers that the retained graph needs again.
    with torch._functorch.config.patch(donated_buffer=False), _on_stream(stream):
        out = function(*inputs)
    built = time.perf_counter() - start
    # Unused: a kernel reads either the cores' rotary tables or their coordinates.
    options = {"retain_graph": True, "allow_unused": True}
    call = partial(torch.autograd.grad, out, inputs, workload.gradient, **options)
    # Read q, k, v, the output and its gradient, write the gradient of q, k, v: each once.
    moved = 2 * qkv.nbytes + 2 * out.nbytes
    return Prepared(_graphed(call, stream), 2 * flops, bytes=moved, built_s=built)


_ATTENTION: dict[str, tuple[Callable[[Workload], AttentionFunction], bool]] = {
    "veca": (partial(_core_attention, kernel="auto"), True),
    "two SDPA": (partial(_core_attention, kernel="sdpa"), False),
    "two SDPA compiled": (partial(_core_attention, kernel="sdpa", compiled=True), True),
    "dense SDPA": (_full_attention, False),
    "dense SDPA compiled": (partial(_full_attention, compiled=True), True),
}
MEASUREMENTS: dict[Bench, dict[str, dict[str, Contender]]] = {
    "model": {"model forward": MODEL},
    "train": {"train step": TRAIN},
    "attention": {
        what: {
            name: Contender(partial(_attention, make=make, backward=backward), compiled)
            for name, (make, compiled) in _ATTENTION.items()
        }
        for what, backward in (("attention forward", False), ("attention backward", True))
    },
}
"""What each benchmark measures in every case, and the contenders of each measurement."""


def choose_contenders(known: dict[str, Contender], names: Sequence[str]) -> dict[str, Contender]:
    """The contenders called `names`, in the order of `known`; all but float8 weights when none is named."""
    if not names:
        return {name: contender for name, contender in known.items() if name != "veca float8"}
    by_lower = {name.lower(): name for name in known}
    wanted = [name.lower().replace("-", " ") for name in names]
    for name in wanted:
        if name not in by_lower:
            raise ArgumentError(f"unknown contender {name!r}{did_you_mean(name, by_lower)}. Known: {', '.join(known)}")
    return {name: known[name] for lower, name in by_lower.items() if lower in wanted}
