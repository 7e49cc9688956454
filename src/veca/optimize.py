"""The fast inference model: the same numbers from fewer, wider steps.

On NVIDIA GPUs from Hopper on, each block is five Triton kernels (q, k and v; attention; output; two for the MLP) with the norms,
SwiGLU and residual sums folded into them, and all that happens to the cores between two blocks is one more. Nothing is traced:
a kernel is compiled for a width and a type when it first runs and serves every batch, resolution and budget. Work too small to
keep the GPU busy is recorded once per shape as a CUDA graph and replayed.

Elsewhere the plain model is handed to `torch.compile` with dynamic shapes.

Shapes: B images, C cores, S = C + N tokens (cores first), H heads, d width of a head, D = H·d.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veca.attention import first_core_attention
from veca.model import Block, Veca, VecaOutput
from veca.rope import Rotary

Weights: TypeAlias = Literal["float8"]

FEW_CORES = 0.3
"""The largest C·H / D at which value and output projections are moved from patches to cores."""
GRAPH_TOKENS = 12_000
"""Up to how many tokens a batch is replayed as a CUDA graph: beyond, the GPU is the slower of the two anyway."""
GRAPHS_KEPT = 16
FLOAT8 = torch.float8_e4m3fn
SWIGLU_TURN = 64
"""How many rows of u, then of v, stand in turns in the first weight of a SwiGLU: half a tile of the kernel."""


class Layer(NamedTuple):
    weight: Tensor
    bias: Tensor



class FastVeca(Veca):
    """A `Veca` for inference on a GPU; made by `optimize`. The public methods are the model's own."""

    def __init__(self, model: Veca, dtype: torch.dtype, weights: Weights | None, cuda_graphs: bool) -> None:
        with torch.device("meta"):
            super().__init__(model.config)
        device = model.coordinate_alpha.device
        if device.type == "meta":
            raise ValueError("the model is on the meta device and has no weights; load them first")
        kept = {k: v.detach() for k, v in model.state_dict().items() if not k.startswith("blocks.")}
        blocks = nn.ModuleList(FastBlock(block, dtype, weights) for block in model.blocks)
        self.blocks = nn.ModuleList()
        self.load_state_dict({k: v.to(dtype) for k, v in kept.items()}, assign=True)
        self.blocks = blocks
        self.provenance = model.provenance
        self.cuda_graphs = cuda_graphs
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        # What stays float32: where cores stand and how they move.
        bank = torch.cat([chunk.detach() for chunk in model.cores])
        self.register_buffer("bank", bank.to(dtype), persistent=False)
        self.register_buffer("states", torch.cat([c.detach().float() for c in model.core_states]), persistent=False)
        self.heads_of_coordinates = [
            (head.weight.detach().float(), head.bias.detach().float(), alpha.detach().float())
            for head, alpha in zip(model.coordinate_heads, model.coordinate_alpha, strict=True)
        ]
        self.eval().requires_grad_(False)

    @torch.compiler.disable
    @torch.inference_mode()
    def forward(self, images: Tensor, cores: int | None = None, cls_only: bool = False) -> VecaOutput:
        """Features of normalised images (B, 3, height, width) with a budget of `cores` (default: all)."""
        rows, columns = self._grid(images)
        budget = self._budget(cores)
        if not self.cuda_graphs or len(images) * (budget + rows * columns) > GRAPH_TOKENS:
            return super().forward(images, budget, cls_only)
        key = (images.shape, images.dtype, budget, cls_only)
        if key not in self._graphs:
            self._graphs[key] = _Graph(lambda x: Veca.forward(self, x, budget, cls_only), images)
            if len(self._graphs) > GRAPHS_KEPT:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._graphs[key](images)

    def _run(
        self,
        images: Tensor,
        cores: int | None,
        take: Sequence[int] = (),
        stop: int | None = None,
        cls_only: bool = False,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        from veca.kernels.coordinates import move
        from veca.kernels.linear import moments

        rows, columns = self._grid(images)
        budget = self._budget(cores)
        x = self._embed(images, budget, rows, columns)
        sums = moments(x.flatten(0, 1))
        patch_rotary = self._patch_rotary(rows, columns, self.states)
        state, coordinates, taken = self.states[:budget], [], []
        for i, block in enumerate(self.blocks[:stop]):
            head = self.heads_of_coordinates[i - 1] if i else None
            state, here, cos, sin = move(x, budget, state, patch_rotary.frequencies, head)
            coordinates.append(here)
            core_rotary = Rotary(cos, sin, here, patch_rotary.frequencies)
            if cls_only and block is self.blocks[-1]:
                x = block.first_core(x, core_rotary, patch_rotary)
            else:
                x, sums = block(x, sums, core_rotary, patch_rotary)
            if i in take:
                taken.append(x)
        return x, torch.stack(coordinates), taken

    def _embed(self, images: Tensor, budget: int, rows: int, columns: int) -> Tensor:
        from veca.kernels.linear import linear

        conv, patch = self.patch_embed.proj, self.config.patch_size
        weight = conv.weight.flatten(1)
        # Rows for the cores too, so that the product writes the sequence as it will be; theirs are then replaced.
        pixels = torch.empty(len(images), budget + rows * columns, weight.shape[1], device=images.device, dtype=weight.dtype)
        pixels[:, :budget] = 0
        grid = images.unflatten(3, (columns, patch)).unflatten(2, (rows, patch)).permute(0, 2, 4, 1, 3, 5)
        pixels[:, budget:].unflatten(1, (rows, columns)).unflatten(-1, (-1, patch, patch)).copy_(grid)
        x = linear(pixels.flatten(0, 1), weight, conv.bias.float()).unflatten(0, (len(images), -1))
        x[:, :budget] = self.bank[:budget]
        return x


class FastBlock(nn.Module):
    """A block with its norms folded into the weights behind them."""

    def __init__(self, block: Block, dtype: torch.dtype, weights: Weights | None) -> None:
        super().__init__()
        self.num_heads = block.attn.num_heads
        self.eps = block.norm1.eps, block.norm2.eps
        qkv, qkv_bias = fold_norm(block.norm1, block.attn.qkv)
        fc1, fc1_bias = pair_swiglu(*fold_norm(block.norm2, block.mlp.fc1))
        hidden = fc1.shape[0] // 2
        fc2 = F.pad(block.mlp.fc2.weight.detach(), (0, hidden - block.mlp.fc2.in_features))
        self.float8 = weights == "float8"
        for name, tensor in {"qkv": qkv, "proj": block.attn.proj.weight, "fc1": fc1, "fc2": fc2}.items():
            self.register_buffer(name, tensor.detach().to(dtype).contiguous(), persistent=False)
        biases = {"qkv": qkv_bias, "proj": block.attn.proj.bias, "fc1": fc1_bias, "fc2": block.mlp.fc2.bias}
        for name, tensor in biases.items():
            self.register_buffer(f"{name}_bias", tensor.detach().float(), persistent=False)
        if self.float8:
            for name in ("qkv", "fc1"):
                values, scale = to_float8(getattr(self, name))
                self.register_buffer(f"{name}_8", values, persistent=False)
                self.register_buffer(f"{name}_scale", scale, persistent=False)

    def forward(self, x: Tensor, sums: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Tokens (B, S, D) and their moments → the next block's."""
        from veca.kernels.core_attention import forward as attention
        from veca.kernels.linear import linear_residual

        batch, tokens, dim = x.shape
        cores = core_rotary.cos.shape[1]
        flat = x.flatten(0, 1)
        if cores * self.num_heads <= FEW_CORES * dim:
            flat, sums = self._few_cores(x, sums, core_rotary, patch_rotary)
        else:
            qkv = self._normed("qkv", flat, sums, self.eps[0]).view(batch, tokens, 3, self.num_heads, -1)
            out, _ = attention(qkv, core_rotary.cos, core_rotary.sin, patch_rotary.coordinates, patch_rotary.frequencies)
            flat, sums = linear_residual(out.flatten(0, 1), self.proj, self.proj_bias, flat)
        hidden = self._normed("fc1", flat, sums, self.eps[1], swiglu=True)
        flat, sums = linear_residual(hidden, self.fc2, self.fc2_bias, flat)
        return flat.view(batch, tokens, dim), sums

    def _normed(self, name: str, x: Tensor, sums: Tensor, eps: float, swiglu: bool = False) -> Tensor:
        """The layer `name` on the norm of x (M, D)."""
        from veca.kernels.linear import linear, quantize

        bias = getattr(self, f"{name}_bias")
        if not self.float8:
            return linear(x, getattr(self, name), bias, moments=sums, eps=eps, swiglu=swiglu)
        values, scale = quantize(x, eps)
        scales = scale, getattr(self, f"{name}_scale")
        return linear(values, getattr(self, f"{name}_8"), bias, scales=scales, swiglu=swiglu, dtype=x.dtype)

    def _few_cores(
        self, x: Tensor, sums: Tensor, core_rotary: Rotary, patch_rotary: Rotary
    ) -> tuple[Tensor, Tensor]:
        """`veca.attention.few_cores_attention` with the residual sum, on kernels."""
        from veca.kernels.few_cores import averaging, mix, probabilities
        from veca.kernels.linear import linear

        batch, tokens, dim = x.shape
        heads, cores = self.num_heads, core_rotary.cos.shape[1]
        w_v, b_v = self.qkv[2 * dim :], self.qkv_bias[2 * dim :].to(x.dtype)
        w_qk, b_qk = self.qkv[: 2 * dim], self.qkv_bias[: 2 * dim]
        qk = linear(x.flatten(0, 1), w_qk, b_qk, moments=sums, eps=self.eps[0]).view(batch, tokens, 2, heads, -1)
        patch_to_core, logits = probabilities(
            qk, core_rotary.cos, core_rotary.sin, patch_rotary.coordinates, patch_rotary.frequencies
        )
        weights = averaging(logits, sums, dim, self.eps[0], x.dtype)
        averages = torch.bmm(weights, x).view(batch, heads, cores, dim).transpose(0, 1).reshape(heads, -1, dim)
        values = torch.baddbmm(b_v.view(heads, 1, -1), averages, w_v.view(heads, -1, dim).mT)  # (H, B·C, d)
        v_core = F.linear(F.layer_norm(x[:, :cores], (dim,), eps=self.eps[0]), w_v, b_v).view(batch * cores, heads, -1)
        vectors = x.new_empty(batch, heads * cores + cores, dim)
        parts = torch.bmm(v_core.transpose(0, 1), self.proj.view(dim, heads, -1).permute(1, 2, 0))  # (H, B·C, D)
        vectors[:, : heads * cores].view(batch, heads, cores, dim).copy_(parts.view(heads, batch, cores, dim).transpose(0, 1))
        vectors[:, heads * cores :] = F.linear(values.transpose(0, 1).flatten(1), self.proj).view(batch, cores, dim)
        out, sums = mix(patch_to_core, vectors, self.proj_bias, x, cores)
        return out.flatten(0, 1), sums

    def first_core(self, x: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> Tensor:
        """The first core alone, (B, 1, D), after this block, which must be the last."""
        dim, dtype = x.shape[-1], x.dtype
        qkv, proj = Layer(self.qkv, self.qkv_bias.to(dtype)), Layer(self.proj, self.proj_bias.to(dtype))
        core_rotary = Rotary(*(part[:, None] for part in core_rotary[:3]), core_rotary.frequencies)
        normed = F.layer_norm(x, (dim,), eps=self.eps[0])
        x = x[:, :1] + first_core_attention(normed, qkv, proj, self.num_heads, core_rotary, patch_rotary)
        hidden = F.linear(F.layer_norm(x, (dim,), eps=self.eps[1]), self.fc1, self.fc1_bias.to(dtype))
        u, v = hidden.unflatten(-1, (-1, 2, SWIGLU_TURN)).unbind(-2)
        return x + F.linear((F.silu(u) * v).flatten(-2), self.fc2, self.fc2_bias.to(dtype))


class _Graph:
    """One call, recorded for inputs of one shape."""

    def __init__(self, call: Any, images: Tensor) -> None:
        self.images = images.clone()
        call(self.images)  # compiles what is not compiled yet
        torch.cuda.synchronize(images.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = call(self.images)

    def __call__(self, images: Tensor) -> VecaOutput:
        self.images.copy_(images)
        self.graph.replay()
        # The next replay writes over these.
        return VecaOutput(*(part.clone() if isinstance(part, Tensor) else part for part in self.output))


@torch.no_grad()
def fold_norm(norm: nn.LayerNorm, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """Weight and bias such that `layer(norm(x))` is `(x Wᵀ) / σ(x) + bias`: gain, shift and centring move into them."""
    weight = layer.weight.double() * norm.weight.double()
    bias = layer.bias.double() + layer.weight.double() @ norm.bias.double()
    return weight - weight.mean(dim=1, keepdim=True), bias


@torch.no_grad()
def pair_swiglu(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [u; v] of a SwiGLU's first layer in turns of half a tile, each half padded with zeros to whole turns."""
    hidden = len(bias) // 2
    padding = -hidden % SWIGLU_TURN
    weight = F.pad(weight.unflatten(0, (2, hidden)), (0, 0, 0, padding))
    bias = F.pad(bias.unflatten(0, (2, hidden)), (0, padding))
    turns = (2, -1, SWIGLU_TURN)
    return weight.unflatten(1, turns[1:]).transpose(0, 1).flatten(0, 2), bias.unflatten(1, turns[1:]).transpose(0, 1).flatten()


def to_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows scaled to the range of float8, and the scales that undo it."""
    scale = weight.float().abs().amax(dim=1).clamp_min(1e-12) / torch.finfo(FLOAT8).max
    return (weight.float() / scale[:, None]).to(FLOAT8), scale


def optimize(
    model: Veca, *, dtype: torch.dtype | None = None, weights: Weights | None = None, cuda_graphs: bool = True
) -> Veca:
    device = model.coordinate_alpha.device
    return FastVeca(model, dtype or torch.bfloat16, weights, cuda_graphs)
