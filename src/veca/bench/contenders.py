"""Who takes part: ways to run VECA, the dense ViT of the same size, and what bounds them.

Each contender of a case is built from the same workload: same pictures, same weights where they are the same model.
Shapes: B images, S = C + N tokens (cores first), H heads, d width of a head.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import veca
from veca.attention import Kernel, core_attention, use_kernel
from veca.bench.cases import Case
from veca.checkpoint import create_model
from veca.config import did_you_mean
from veca.errors import ArgumentError
from veca.flops import attention_product_flops, dense_model_flops, model_flops
from veca.model import Veca, VecaOutput
from veca.rope import Rotary, make_rotary, rotate
from veca.utils.timing import Call

DENSE = {
    "veca_small": "vit_small_patch16_dinov3",
    "veca_small_plus": "vit_small_plus_patch16_dinov3",
    "veca_base": "vit_base_patch16_dinov3",
    "veca_large": "vit_large_patch16_dinov3",
}
"""timm's names of the dense ViTs."""


@dataclass(frozen=True)
class Setting:
    """What all cases of a run have in common."""

    device: torch.device
    dtype: torch.dtype
    cls_only: bool = False
    """Ask for the global feature alone, of the contenders that can do less for it."""


class Prepared(NamedTuple):
    """A contender ready to run."""

    call: Call
    flops: int
    """Matrix products of one call, 2 per multiply-add."""
    bytes: int | None = None
    """What one call must read and write, when that is its floor and not the products."""
    resident: int = 0
    """Bytes of weights that count as memory of the call."""
    built_s: float = 0.0
    """Seconds of work done once, before the first call."""


class Contender(NamedTuple):
    build: Callable[[Workload], Prepared]
    compiled: bool = False
    default: Callable[[Case, Setting], bool] = lambda case, setting: True
    """Whether it takes part when nobody names contenders."""


class Workload:
    """What the contenders of one case share, made when first asked for."""

    def __init__(self, case: Case, setting: Setting, weights: torch.dtype | None = None) -> None:
        self.case, self.setting = case, setting
        self.weights = weights or setting.dtype
        torch.manual_seed(0)

    def new_veca(self, dtype: torch.dtype | None = None) -> Veca:
        """Always the same weights, drawn in float32, then cast."""
        device = self.setting.device
        with torch.device("meta"):
            # Training moves patches at random; here all gradients are to be those of the same function.
            model = create_model(self.case.model, coordinate_shift=0.0, coordinate_rescale=1.0)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(1)
            model.to_empty(device=device).init_weights()  # drawn there: a CPU would take seconds
            enliven(model)
        return model.to(dtype or self.weights)

    @cached_property
    def veca(self) -> Veca:
        return self.new_veca().eval()

    @cached_property
    def dense(self) -> Any:
        if self.case.model not in DENSE:
            raise ArgumentError(
                f"there is no dense ViT of the size of {self.case.model}; there is of {', '.join(DENSE)}"
            )
        timm = _import("timm", "the dense ViT comes from timm")
        dense = timm.create_model(DENSE[self.case.model], num_classes=0, dynamic_img_size=True)
        dense.to(self.setting.device)
        enliven(dense)
        return dense.to(self.weights).eval()

    @cached_property
    def images(self) -> Tensor:
        shape = (self.case.batch, 3, self.case.size, self.case.size)
        return torch.randn(*shape, device=self.setting.device, dtype=self.weights)

    @cached_property
    def qkv(self) -> Tensor:
        """(B, S, 3, H, d), as the projection of a block gives it."""
        config = self.case.config
        shape = (self.case.batch, self.case.tokens, 3, config.num_heads, config.head_dim)
        return torch.randn(*shape, device=self.setting.device, dtype=self.setting.dtype)

    @cached_property
    def gradient(self) -> Tensor:
        """(B, S, D), of the output of attention."""
        shape = (self.case.batch, self.case.tokens, self.case.config.embed_dim)
        return torch.randn(*shape, device=self.setting.device, dtype=self.setting.dtype)

    @cached_property
    def rotaries(self) -> tuple[Rotary, Rotary]:
        """Of the cores, per image, and of the patches, in float32 as the model has them."""
        config, device = self.case.config, self.setting.device
        cores = torch.rand(self.case.batch, 1, self.case.cores, 2, device=device) * 2 - 1
        patches = torch.rand(self.case.patches, 2, device=device) * 2 - 1
        core, patch = (make_rotary(c, config.head_dim, config.rope_zero_fraction) for c in (cores, patches))
        return core, patch

    @property
    def veca_flops(self) -> int:
        return self.case.batch * model_flops(self.case.config, self.case.size, self.case.size, self.case.cores)

    @property
    def dense_flops(self) -> int:
        return self.case.batch * dense_model_flops(self.case.config, self.case.size, self.case.size)


@torch.no_grad()
def enliven(model: nn.Module) -> None:
    """Weights under which every path matters: new ones are so small that tokens hardly differ."""
    for name, parameter in model.named_parameters():
        if name == "coordinate_alpha":
            parameter.fill_(0.3)
        elif parameter.ndim == 1:  # biases, and the gains of norms
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        elif not name.startswith("core"):  # the cores and where they stand are spread as they are
            parameter.normal_(std=parameter[0].numel() ** -0.5)


def _import(name: str, why: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ArgumentError(f"{why}, which is not installed: pip install 'veca[bench]'") from error


def compiled(function: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
    """Compiled for the one shape it is called with, as a user who knows the shape would."""
    return torch.compile(function, dynamic=False, mode=mode)


def _same(function: Any) -> Any:
    return function


# Forward pass of the whole model.


def _optimized(workload: Workload, **options: Any) -> Prepared:
    model = workload.new_veca(torch.float32).eval()
    start = time.perf_counter()
    fast = veca.optimize(model, dtype=workload.setting.dtype, **options)
    built = time.perf_counter() - start
    images, cores, cls_only = workload.images, workload.case.cores, workload.setting.cls_only

    def call() -> object:
        with torch.inference_mode():
            return fast(images, cores, cls_only=cls_only)

    return Prepared(call, workload.veca_flops, built_s=built)


def _float8(workload: Workload) -> Prepared:
    """The floor it is held against is that of the run's dtype: faster products can pass it."""
    if workload.setting.device.type != "cuda":
        raise ArgumentError(f"float8 weights need a CUDA device; this run is on {workload.setting.device}")
    return _optimized(workload, weights="float8")


def _plain(workload: Workload, wrap: Callable[[Any], Any] = _same) -> Prepared:
    forward, images, cores = wrap(workload.veca), workload.images, workload.case.cores
    cls_only = workload.setting.cls_only

    def call() -> object:
        with torch.inference_mode(), use_kernel("sdpa"):
            return forward(images, cores, cls_only=cls_only)

    return Prepared(call, workload.veca_flops)


def _dense(workload: Workload, wrap: Callable[[Any], Any] = _same) -> Prepared:
    forward, images = wrap(workload.dense.forward_features), workload.images

    def call() -> object:
        with torch.inference_mode():
            return forward(images)

    return Prepared(call, workload.dense_flops)


def _products(workload: Workload) -> Prepared:
    """The linear products of VECA's blocks and nothing else, at the speed of the machine's library."""
    config, tokens = workload.case.config, workload.case.batch * workload.case.tokens
    dim, hidden = config.embed_dim, config.mlp_dim
    new = partial(torch.randn, device=workload.setting.device, dtype=workload.setting.dtype)
    x = {width: new(tokens, width) for width in (dim, hidden)}
    weights = [new(wide, narrow) for narrow, wide in [(dim, 3 * dim), (dim, dim), (dim, 2 * hidden), (hidden, dim)]]

    def call() -> None:
        with torch.inference_mode():
            for _ in range(config.depth):
                for weight in weights:
                    F.linear(x[weight.shape[1]], weight)

    return Prepared(call, config.depth * tokens * (8 * dim**2 + 6 * dim * hidden))


def _has_dense(case: Case, setting: Setting) -> bool:
    return case.model in DENSE


def _never(case: Case, setting: Setting) -> bool:
    return False


MODEL = {
    "veca": Contender(_optimized, compiled=True),
    "veca float8": Contender(_float8, compiled=True, default=_never),
    "veca eager": Contender(_plain),
    "veca compiled": Contender(partial(_plain, wrap=compiled), compiled=True),
    "dense": Contender(_dense, default=_has_dense),
    "dense compiled": Contender(partial(_dense, wrap=compiled), compiled=True, default=_has_dense),
    "products": Contender(_products),
}


# Forward and backward pass of the whole model, without the optimizer.


def _step(
    workload: Workload, model: nn.Module, features: Callable[[], Any], kernel: Kernel, compile_: bool, flops: int
) -> Prepared:
    """Gradients of every weight; the loss is compiled with the model, as training code would."""
    weights = list(model.train().parameters())
    device, dtype = workload.setting.device.type, workload.setting.dtype

    def forward() -> Tensor:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            return loss(features())

    on_gpu = device == "cuda"
    # A step of one shape is recorded as a CUDA graph, so that the GPU does not wait for Python.
    if compile_ and on_gpu:
        torch._dynamo.mark_static_address(workload.images)  # the graph reads the batch where it lies
    forward = compiled(forward, mode="reduce-overhead" if on_gpu else None) if compile_ else forward

    def call() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        with use_kernel(kernel):
            return torch.autograd.grad(forward(), weights, allow_unused=True)

    return Prepared(call, 3 * flops, resident=sum(weight.nbytes for weight in weights))


def loss(out: Any) -> Tensor:
    """The loss of a batch: the mean of those of its images."""
    features = out[:2] if isinstance(out, VecaOutput) else [out]
    better = torch.promote_types(features[0].dtype, torch.float32)
    return torch.stack([feature.to(better).square().mean() for feature in features]).sum()


def _train_veca(workload: Workload, kernel: Kernel, compile_: bool, checkpointed: bool = False) -> Prepared:
    model = workload.new_veca() if checkpointed else workload.veca
    model.set_grad_checkpointing(checkpointed)
    features = partial(model, workload.images, workload.case.cores)
    return _step(workload, model, features, kernel, compile_, workload.veca_flops)


def _train_dense(workload: Workload, compile_: bool) -> Prepared:
    features = partial(workload.dense.forward_features, workload.images)
    return _step(workload, workload.dense, features, "auto", compile_, workload.dense_flops)


TRAIN = {
    "veca": Contender(partial(_train_veca, kernel="auto", compile_=True), compiled=True),
    "veca eager": Contender(partial(_train_veca, kernel="sdpa", compile_=False)),
    "veca compiled": Contender(partial(_train_veca, kernel="sdpa", compile_=True), compiled=True),
    "veca checkpointed": Contender(
        partial(_train_veca, kernel="auto", compile_=True, checkpointed=True), compiled=True
    ),
    "dense": Contender(partial(_train_dense, compile_=False), default=_has_dense),
    "dense compiled": Contender(partial(_train_dense, compile_=True), compiled=True, default=_has_dense),
}


# Attention alone: q, k and v in one tensor → output, rotary embedding included.


class Attend(NamedTuple):
    """One way to compute attention."""

    function: Callable[..., Tensor]
    """qkv (B, S, 3, H, d), *places → (B, S, D)."""
    places: Sequence[Tensor]
    """What has a gradient besides qkv: training moves the cores, so their coordinates, or the tables made of them."""
    flops: int


def _core(workload: Workload, kernel: Kernel, wrap: Callable[[Any], Any] = _same) -> Attend:
    core, patch = workload.rotaries
    case, attend = workload.case, wrap(core_attention)

    def function(qkv: Tensor, cos: Tensor, sin: Tensor, coordinates: Tensor) -> Tensor:
        with use_kernel(kernel):
            return attend(qkv, core._replace(cos=cos, sin=sin, coordinates=coordinates), patch)

    return Attend(
        function, core[:3], case.batch * attention_product_flops(case.config, case.size, case.size, case.cores)
    )


def _full(workload: Workload, turn: bool, wrap: Callable[[Any], Any] = _same) -> Attend:
    """Every token attends to every other; the cores are not turned, as class token and registers are not in DINOv3."""
    case = workload.case
    patch = workload.rotaries[1]
    cos, sin = F.pad(patch.cos, (0, 0, case.cores, 0), value=1), F.pad(patch.sin, (0, 0, case.cores, 0))

    def attend(qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if turn:
            q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    return Attend(wrap(attend), (), case.batch * 4 * case.config.embed_dim * case.tokens**2)


class Replay:
    """A call that is recorded as a CUDA graph the second time: Python takes longer to ask for a kernel than it runs."""

    def __init__(self, call: Callable[[], object], stream: torch.cuda.Stream) -> None:
        self.call, self.stream = call, stream
        self.called, self.graph = False, torch.cuda.CUDAGraph()
        self.result: object = None

    def __call__(self) -> object:
        if not self.called:  # as it comes, which also compiles
            self.called = True
            with _aside(self.stream):
                return self.call()
        if self.result is None:
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.result = self.call()
        self.graph.replay()
        return self.result


@contextmanager
def _aside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on another stream, in its turn: a graph is recorded on one of its own, as must be what it goes back to."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _forward(workload: Workload, make: Callable[[Workload], Attend]) -> Prepared:
    attend, qkv = make(workload), workload.qkv

    def call() -> object:
        with torch.no_grad():
            return attend.function(qkv, *attend.places)

    on_gpu = qkv.device.type == "cuda"
    replay = Replay(call, torch.cuda.Stream()) if on_gpu else call
    return Prepared(replay, attend.flops, bytes=qkv.nbytes + qkv.nbytes // 3)


def _backward(workload: Workload, make: Callable[[Workload], Attend]) -> Prepared:
    """The backward pass alone, over a graph that is kept."""
    attend = make(workload)
    start = time.perf_counter()
    inputs = [tensor.detach().requires_grad_() for tensor in (workload.qkv, *attend.places)]
    stream = torch.cuda.Stream() if workload.qkv.device.type == "cuda" else None
    # Compiled code may else use up what the graph keeps.
    with torch._functorch.config.patch(donated_buffer=False), _aside(stream) if stream else nullcontext():
        out = attend.function(*inputs)
    built = time.perf_counter() - start
    gradient = workload.gradient

    def call() -> object:
        # A path uses the cores' tables or their coordinates.
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True, allow_unused=True)

    # Read q, k, v, the output and its gradient, write the gradient of q, k, v: each once.
    moved = 2 * inputs[0].nbytes + 2 * out.nbytes
    return Prepared(Replay(call, stream) if stream else call, 2 * attend.flops, bytes=moved, built_s=built)


_ATTEND: dict[str, tuple[Callable[[Workload], Attend], bool]] = {
    "veca": (partial(_core, kernel="auto"), True),
    "two SDPA": (partial(_core, kernel="sdpa"), False),
    "two SDPA compiled": (partial(_core, kernel="sdpa", wrap=compiled), True),
    "dense SDPA": (partial(_full, turn=True), False),
    "dense SDPA compiled": (partial(_full, turn=True, wrap=compiled), True),
    "dense SDPA without RoPE": (partial(_full, turn=False), False),
}
ATTENTION_FORWARD, ATTENTION_BACKWARD = (
    {name: Contender(partial(build, make=make), compiled=compiles) for name, (make, compiles) in _ATTEND.items()}
    for build in (_forward, _backward)
)


def choose(known: dict[str, Contender], asked: Sequence[str], case: Case, setting: Setting) -> dict[str, Contender]:
    """The contenders named, in the order of `known`; every one that applies to the case when none is named."""
    if not asked:
        return {name: contender for name, contender in known.items() if contender.default(case, setting)}
    names = {name.lower(): name for name in known}
    wanted = [name.lower().replace("-", " ") for name in asked]
    for name in wanted:
        if name not in names:
            raise ArgumentError(f"unknown contender {name!r}{did_you_mean(name, names)}. Known: {', '.join(known)}")
    return {name: known[name] for lower, name in names.items() if lower in wanted}
