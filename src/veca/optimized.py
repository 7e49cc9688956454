"""`veca.optimize`: a copy of a model for fast inference, by fused kernels or torch.compile.

On NVIDIA GPUs from Hopper on, each block is five Triton kernels (q, k and v; attention; output; two for the MLP) with
the norms, SwiGLU and residual sums fused into them (`veca.fast_block`), and the coordinate update between two blocks is
one more. Nothing is traced: a kernel is compiled for a model's sizes and a dtype when it first runs and serves every
batch, resolution and budget; a new MLP width may compile the MLP's. A shape that comes again is recorded as a CUDA
graph and replayed, so that the GPU never waits for Python; packs are padded to few shapes for that (`veca.fast_pack`).

Elsewhere the plain model is compiled by `torch.compile` with dynamic shapes.

Shapes: B images, C cores, S = C + N tokens (cores first), H heads, d width of a head, D = H·d.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.utils.parametrize import is_parametrized

from veca.attention import runs_packed
from veca.block_ops import has_hooks, is_wrapped
from veca.config import VecaConfig
from veca.errors import ArgumentError
from veca.fast_block import FastBlock, FastNorm, Weights, make_buffer
from veca.fast_pack import PackInputs, PackTensors
from veca.inputs import patch_grid, resolve_budget, resolve_width
from veca.kernels import ops
from veca.model import Block, Veca
from veca.outputs import PackedOutput
from veca.packed import PackedImages, forward_by_kind, plan_pack

HOPPER = (9, 0)
"""The first architecture with the tensor memory accelerator, which `veca.kernels.linear` loads tiles by."""
MAX_GRAPHS, RECENT_CALLS = 16, 64
"""Shapes that are recorded as CUDA graphs at a time; calls after which a shape is no longer in use."""
RECOMPILE_LIMIT = 64
"""Of one block: the first, the last and the others, with gradients and without, few cores and many, a batch of one; a
teacher at each resolution."""


class FastVeca(Veca):
    """A `Veca` for inference on a GPU; made by `optimize`. The public methods are the model's own."""

    def __init__(self, model: Veca, dtype: torch.dtype, weights: Weights | None, cuda_graphs: bool) -> None:
        with torch.device("meta"):
            super().__init__(model.config)
        rest = {k: v.to(dtype, copy=True) for k, v in model.state_dict().items() if not k.startswith("blocks.")}
        self.blocks = nn.ModuleList()
        self.load_state_dict(rest, assign=True)
        self.blocks = nn.ModuleList(FastBlock(cast(Block, block), dtype, weights) for block in model.blocks)
        self.provenance, self.budget, self.width = model.provenance, model.budget, model.width
        self.cuda_graphs = cuda_graphs
        self._graphs = GraphCache()
        self.norm = FastNorm(model.norm)  # type: ignore[assignment]  # called the same way
        # Coordinates and their heads stay float32.
        self.states = make_buffer(torch.cat(list(model.core_states)), torch.float32)
        heads = cast(Sequence[nn.Linear], model.coordinate_heads)
        self.move_weights = make_buffer(
            torch.cat([head.weight[None] for head in heads] or [torch.empty(0)]), torch.float32
        )
        self.move_biases = make_buffer(
            torch.cat([head.bias[None] for head in heads] or [torch.empty(0)]), torch.float32
        )
        self.move_alphas = make_buffer(model.coordinate_alpha[:, None], torch.float32)
        self.bank = make_buffer(torch.cat(list(model.cores)), dtype)
        patch_weight = model.patch_embed.proj.weight.flatten(1)
        padding = (0, -patch_weight.shape[1] % ops.ROW_MULTIPLE)
        self.patch_weight = make_buffer(F.pad(patch_weight, padding), dtype)
        self.patch_bias = make_buffer(cast(Tensor, model.patch_embed.proj.bias), torch.float32)
        self.eval().requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise ArgumentError("an optimized model has no weights to save: save the model it was made from")

    def _forward_packed(self, *args: Any) -> PackedOutput:
        run = self._run_untraced_pack if torch.compiler.is_compiling() else self._run_pack
        return run(*args)

    @_disable_dynamo
    def _run_untraced_pack(self, *args: Any) -> PackedOutput:
        return self._run_pack(*args)

    def _run_pack(self, batch: PackedImages, cores: Any, cls_only: bool, width: Any) -> PackedOutput:
        layout, budgets, _ = plan_pack(self, batch, cores, width)
        single_width = len(layout.patches_by_width) == 1
        if not single_width or not runs_packed(self.bank, self.config.head_dim, max(budgets)):
            return forward_by_kind(self, batch, cores, cls_only, width)
        inputs = PackInputs(batch, budgets, self.bank, self.config)
        bucket = inputs.bucket  # a graph must not keep the batch
        frequencies = self._patch_rotary(1, 1, self.states).frequencies
        (hidden,) = layout.patches_by_width

        def run(tensors: PackTensors) -> tuple[Tensor, Tensor, list[Tensor]]:
            pixels, bank_rows, patch_points, spans, images = tensors
            positions = patch_points, frequencies, spans, images, bucket.max_cores
            return self._blocks(pixels[None], bucket.cores, bank_rows, positions, hidden=hidden)

        x, coordinates, _ = self._run_graph((bucket, hidden), run, inputs.fill)
        by_core, by_patch = x[0, : sum(budgets)], x[0, bucket.cores :][: len(batch.pixels)]
        if cls_only:
            firsts = list(itertools.accumulate(budgets[:-1], initial=0))
            by_core, by_patch = by_core[firsts], by_patch[:0]
        by_core, by_patch = (self.output_proj(self.norm(part)) for part in (by_core, by_patch))
        coordinates = coordinates[:, 0, : sum(budgets)]
        out = PackedOutput(by_core, by_patch, coordinates, batch.grids, tuple(budgets), cls_only=cls_only)
        return replace(out, logits=self.head(out.cls)) if self.config.num_classes else out

    def _run(
        self,
        images: Tensor,
        cores: int | None,
        take: Sequence[int] = (),
        stop: int | None = None,
        cls_only: bool = False,
        width: float | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        # What is not traced does not need the compiler, which takes seconds to load.
        run = self._run_untraced if torch.compiler.is_compiling() else self._run_kernels
        return run(images, cores, take, stop, cls_only, width)

    @_disable_dynamo
    def _run_untraced(self, *args: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        return self._run_kernels(*args)

    def _run_kernels(
        self,
        images: Tensor,
        cores: int | None,
        take: Sequence[int],
        stop: int | None,
        cls_only: bool,
        width: float | None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        from veca.kernels.linear import patchify

        rows, columns = patch_grid(images, self.config)
        budget = resolve_budget(self.budget if cores is None else cores, self.config, self._warned)
        hidden = resolve_width(self.width if width is None else width, self.config, self._warned)
        patch_rotary = self._patch_rotary(rows, columns, self.states)
        # With empty rows for the cores, so that the patch embedding writes the whole sequence in place.
        pixels = functools.partial(patchify, images, self.config.patch_size, budget, self.bank.dtype)
        patch_positions = patch_rotary.coordinates, patch_rotary.frequencies
        run = functools.partial(
            self._blocks,
            num_cores=budget,
            bank_rows=slice(budget),
            patch_positions=patch_positions,
            cls_only=cls_only,
            hidden=hidden,
        )
        if take or stop is not None:
            x, coordinates, taken = run(pixels(), take=take, stop=stop)
        else:
            key = (len(images), rows, columns, budget, cls_only, hidden)
            x, coordinates, taken = self._run_graph(key, run, pixels)
        return self.norm(x), coordinates, taken

    def _run_graph(self, key: Any, run: Callable[[Any], Any], fill: Callable[..., Any]) -> tuple[Tensor, Tensor, Any]:
        """`run(fill())`, by a CUDA graph where `key` comes again; `fill(out=…)` overwrites the inputs of another run.

        The first result is overwritten by the next run.
        """
        graph = self._graphs.find(key, lambda other: Graph(run, fill(), other)) if self.cuda_graphs else None
        if graph is None:
            x, coordinates, taken = run(fill())
            return x, coordinates, taken
        fill(out=graph.inputs)
        x, coordinates, taken = graph.replay()
        return x, coordinates.clone(), taken

    def _blocks(
        self,
        pixels: Tensor,
        num_cores: int,
        bank_rows: slice | Tensor,
        patch_positions: tuple[Any, ...],
        cls_only: bool = False,
        hidden: int | None = None,
        take: Sequence[int] = (),
        stop: int | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Tokens after the blocks, coordinates of the cores, and the tokens after the blocks of `take`.

        Pixels (B, S, …) have empty rows for the cores, which start as `bank_rows` of the bank. `patch_positions` are
        what blocks take beside the coordinates of the cores.
        """
        from veca.kernels.coordinates import move_cores
        from veca.kernels.linear import linear, moments

        x = linear(pixels.flatten(0, 1), self.patch_weight, self.patch_bias)
        x = x.unflatten(0, pixels.shape[:2])
        x[:, :num_cores] = self.bank[bank_rows]
        sums = moments(x.flatten(0, 1))
        state, coordinates, taken = self.states[bank_rows], [], []
        for i, block in enumerate(cast(Iterable[FastBlock], self.blocks[:stop])):
            head = (self.move_weights[i - 1], self.move_biases[i - 1], self.move_alphas[i - 1]) if i else None
            state, core_points = move_cores(x, num_cores, state, head)
            coordinates.append(core_points)
            positions: Any = core_points, *patch_positions
            if cls_only and i == len(self.blocks) - 1:
                x = block.first_core(x, sums, positions)
            else:
                x, sums = block(x, sums, positions, hidden)
            if i in take:
                taken.append(x)
        return x, torch.stack(coordinates), taken

    @torch.inference_mode()
    def compile_kernels(
        self, batch: int, side: int, cores: int | None = None, cls_only: bool = False, width: float | None = None
    ) -> None:
        """Compile the kernels of a pass over (batch, 3, side, side), at once in threads; a pass does one by one.

        It saves time only where Triton's cache does not have them yet.
        """
        from veca.kernels.coordinates import move_cores
        from veca.kernels.core_attention import launch_core_attention
        from veca.kernels.few_cores import averaging_weights, core_logits
        from veca.kernels.linear import linear, linear_residual, moment_parts, moments, patchify

        budget, dim = cores or self.budget or self.config.num_cores, self.config.embed_dim
        hidden = resolve_width(self.width if width is None else width, self.config, self._warned)
        block, grid = cast(FastBlock, self.blocks[0]), side // self.config.patch_size
        heads, tokens = block.num_heads, budget + grid**2
        zeros = functools.partial(torch.zeros, device=self.bank.device, dtype=self.bank.dtype)
        numbers = functools.partial(zeros, dtype=torch.float32)
        x, qkv = zeros(batch, tokens, dim), zeros(batch, tokens, 3, heads, dim // heads)
        flat, images = x.flatten(0, 1), numbers(batch, 3, side, side)
        few = block.prefers_few_cores(x, budget)
        sums = numbers(1, 2, len(flat))  # of the first block
        attention_sums = sums if few else numbers(moment_parts(block.proj), 2, len(flat))
        mlp_sums = numbers(block.mlp_moment_parts(hidden), 2, len(flat))
        state, rotary = numbers(batch, budget, 2), self._patch_rotary(grid, grid, self.states)
        positions = state, rotary.coordinates, rotary.frequencies
        pixels = zeros(len(flat), self.patch_weight.shape[1])
        # Those that take longest come first: threads take turns at Python, and the rest of a compilation needs none.
        calls: list[Callable[[], object]] = block.mlp_calls(x, attention_sums, budget, hidden)
        if few:
            calls += [functools.partial(block._few_cores, x, each, positions) for each in (sums, mlp_sums)]
        else:
            calls += [
                # One image: it is split among programs, whose partial results another kernel combines.
                lambda: launch_core_attention(qkv[:1], state[:1], *positions[1:]),
                *(functools.partial(block.qkv.run, flat, each) for each in (sums, mlp_sums)),
                lambda: linear_residual(flat, block.proj, block.proj_bias, flat),
            ]
        calls += [
            lambda: linear(pixels, self.patch_weight, self.patch_bias),
            lambda: patchify(images, self.config.patch_size, budget, self.bank.dtype),
            lambda: moments(flat),
            lambda: move_cores(x, budget, self.states[:budget], None),
            lambda: self.norm(x),
        ]
        # Kernels depend on how the numbers of a layer are aligned in memory, which repeats after four layers.
        for head in list(zip(self.move_weights, self.move_biases, self.move_alphas, strict=True))[:4]:
            calls.append(functools.partial(move_cores, x, budget, state, head))
        if cls_only:
            key, eps = block.qkv.weight.chunk(3)[1], block.qkv.eps
            calls += [
                lambda: linear(flat, key, block.qkv.bias.chunk(3)[1], moments=mlp_sums, eps=eps),
                lambda: core_logits(zeros(batch, 1, heads, dim // heads), qkv[:, :, 0].contiguous(), *positions),
                lambda: averaging_weights(numbers(batch, heads, tokens), mlp_sums, dim, eps, x.dtype),
            ]

        @torch.inference_mode()
        def run(call: Callable[[], object]) -> None:
            with torch.cuda.device_of(x):
                call()

        with ThreadPoolExecutor(8, "compile") as threads:
            list(threads.map(run, calls))


class GraphCache(OrderedDict[Any, "Graph"]):
    """CUDA graphs by shape, the least recently used first.

    A shape is recorded when it comes again soon: its first call compiles kernels. Where more shapes take turns than are
    kept, the others are run without a graph: to record each anew, time after time, would take longer than running it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls, self._last = 0, dict[Any, int]()

    def find(self, key: Any, record: Callable[[Graph | None], Graph]) -> Graph | None:
        """The graph to replay for a shape, recorded beside another one if need be; None: run the shape as it is."""
        self._calls += 1
        recent = self._is_recent(key)
        self._last[key] = self._calls
        graph = self.pop(key, None)
        if graph is None:
            oldest = next(iter(self)) if len(self) >= MAX_GRAPHS else None
            if not recent or (oldest is not None and self._is_recent(oldest)):
                return None
            self.pop(oldest, None)
            graph = record(next(iter(self.values()), None))
        self[key] = graph
        return graph

    def _is_recent(self, key: Any) -> bool:
        return key in self._last and self._calls - self._last[key] <= RECENT_CALLS


class Graph:
    """A CUDA graph of a call: a replay reads what `inputs` then hold, and overwrites the result of the last one."""

    def __init__(self, call: Callable[[Any], Any], inputs: Any, neighbour: Graph | None) -> None:
        self.inputs, self.call = inputs, call  # the graph reads their memory: they must live as long
        self.graph = torch.cuda.CUDAGraph()
        # Graphs never run at the same time, so they can share memory. Other threads may use the GPU meanwhile.
        pool = neighbour.graph.pool() if neighbour else None
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.output = call(inputs)

    def replay(self) -> Any:
        self.graph.replay()
        return self.output


def supports_fused(config: VecaConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernels support such a model."""
    return (
        device.type == "cuda"
        and not ops.unsupported_reason(device, dtype, HOPPER)
        and dtype != torch.float32
        and config.head_dim in ops.HEAD_DIMS
    )


def optimize(
    model: Veca, *, dtype: torch.dtype | None = None, weights: Weights | None = None, cuda_graphs: bool = True
) -> Veca:
    """A copy of `model` for fast inference, called like the model itself: `fast(images, cores=32, width=0.5)`.

    The model itself is not changed. What the copy is depends on the model's device:

    - On NVIDIA GPUs from Hopper on: fused kernels in `dtype` (default bfloat16, or float16). They are compiled when
      they first run, which takes seconds for all, cached on disk by Triton, and serve every batch, resolution and
      budget; a new MLP width compiles at most the MLP's kernels. With `cuda_graphs`, a shape that comes a second time
      is recorded and replayed from then on, which frees the CPU, up to 16 shapes at a time. `weights="float8"` runs the
      two widest layers of each block in 8 bits, except where the whole MLP is one kernel (narrow models at small
      widths): faster, less exact.
    - Elsewhere: the plain model in `dtype` (default float32 on a CPU, bfloat16 on a GPU) under `torch.compile` with
      dynamic shapes, on a CPU block by block: the first call takes half a minute there, else a minute or two. Another
      batch, resolution or budget does not compile again, except for a few special cases: a batch of one, sizes that
      happen to be a width of the model at the first call, a budget small enough for the few-cores path, `cls_only`.
      A CPU needs a C++ compiler.

    Hooks, parametrizations and replaced layers stay in a compiled copy. Fused kernels do not call layers, so a model
    that has any is refused there.

    >>> import veca
    >>> model = veca.create_model("veca_tiny")
    >>> fast = veca.optimize(model)
    >>> fast.config == model.config
    True
    """
    device = model.coordinate_alpha.device
    if device.type == "meta":
        raise ArgumentError("the model is on the meta device and has no weights; load them first")
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    fused = supports_fused(model.config, device, dtype)
    if weights is not None and (weights not in get_args(Weights) or not fused):
        raise ArgumentError(
            f"weights={weights!r} in {dtype} on {device.type}: the only choice is 'float8', in bfloat16 or float16 on "
            "NVIDIA GPUs from Hopper on"
        )
    if fused:
        if reason := unfusable_reason(model):
            raise ArgumentError(reason)
        return FastVeca(model, dtype, weights, cuda_graphs)
    compiled_model = _copy(model).to(dtype).eval().requires_grad_(False)
    if device.type != "cpu":
        compiled_model.compile(dynamic=True)
        return compiled_model
    # One compiled block serves all. In the whole model the compiler would recompute the patches' rotary table wherever
    # it is used, which in bfloat16 costs more than compiling saves.
    for block in compiled_model.blocks:
        # Without this option it would do so with the cores' table.
        compiled = torch.compile(block._call_impl, dynamic=True, options={"realize_reads_threshold": 1})
        block._compiled_call_impl = _with_recompile_limit(compiled)
    return compiled_model


def unfusable_reason(model: Veca) -> str:
    """Why `model` cannot become a `FastVeca`, and what to do about it; empty if it can.

    `FastVeca` does not call layers, so hooks, parametrizations and replaced layers would have no effect.
    """
    if type(model).forward is not Veca.forward:
        return f"a {type(model).__name__} is not called as a Veca is; veca.save it, and optimize what veca.load gives"
    with torch.device("meta"):
        plain = Veca(model.config)
    kinds = {name: type(module) for name, module in plain.named_modules()} | {"": type(model)}
    for name, module in model.named_modules():
        if is_parametrized(module):
            problem = "is parametrized"
            way = "torch.nn.utils.parametrize.remove_parametrizations makes its weights permanent"
        elif kinds.get(name) is not type(module) or any(map(is_wrapped, module.parameters(recurse=False))):
            problem = f"is a {type(module).__name__} that is not the model's own or is quantised"
            way = "merge adapters into the model, take it unquantised"
        elif has_hooks(module):
            problem = "has hooks"
            way = "remove them (torch.nn.utils.prune.remove and remove_weight_norm make weights permanent)"
        else:
            continue
        label = name or "the model"
        return f"{label} {problem}, and an optimized model does not call its layers: {way}, or use the model as it is"
    missing = sorted(plain.state_dict().keys() - model.state_dict().keys())
    return f"the model has no {missing[0]}, which an optimized one needs; use the model as it is" if missing else ""


def _copy(model: Veca) -> Veca:
    """A deep copy, also of a model whose hooks compute weights, as pruning and weight norm do."""
    computed = (tensor for module in model.modules() for tensor in vars(module).values() if isinstance(tensor, Tensor))
    # deepcopy refuses tensors with a gradient history; the hooks compute them again in each call.
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in computed if not tensor.is_leaf})


def _with_recompile_limit(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled` under a recompile limit of `RECOMPILE_LIMIT`; other compiled functions keep the process's limit."""
    config: Any = torch._dynamo.config

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside another compiled function, which has its own limit
            return compiled(*args, **kwargs)
        limit = config.recompile_limit
        config.recompile_limit = max(limit, RECOMPILE_LIMIT)  # faster than config.patch
        try:
            return compiled(*args, **kwargs)
        finally:
            config.recompile_limit = limit

    return call
