"""A block of the fast inference model: its norms folded into the weights behind them, run by Triton kernels.

Shapes: B images, C cores, S = C + N tokens (cores first), H heads, d width of a head, D = H·d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veca.config import SWIGLU_GROUP
from veca.model import Block

Weights: TypeAlias = Literal["float8"]
RotaryInputs: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""What kernels compute rotary tables from: coordinates of cores (B, C, 2) and patches (N, 2), frequencies (d/4)."""
PackedRotaryInputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]
"""The same of a pack, (1, ΣC, 2) and (ΣN, 2), with `spans`, `images` and `max_cores` of its attention kernel."""

FEW_CORES_MAX_RATIO, FEW_CORES_MIN_TOKENS = 0.25, 2**15
"""The few-cores algorithm is used up to this C·H / D, in batches of at least so many tokens B·S."""
FLOAT8 = torch.float8_e4m3fn


class FastBlock(nn.Module):
    """A block whose norms are folded into the weights that follow them."""

    def __init__(self, block: Block, dtype: torch.dtype, weights: Weights | None) -> None:
        super().__init__()
        self.num_heads, attn, mlp = block.attn.num_heads, block.attn, block.mlp
        qkv, qkv_bias = fold_norm(block.norm1, attn.qkv)
        self.qkv = NormLinear(qkv, qkv_bias, block.norm1.eps, dtype, weights)
        self.proj, self.proj_bias = make_buffer(attn.proj.weight, dtype), make_buffer(attn.proj.bias, torch.float32)
        fc1, fc1_bias = interleave_swiglu(*fold_norm(block.norm2, mlp.fc1))
        self.fc1 = NormLinear(fc1, fc1_bias, block.norm2.eps, dtype, weights)
        padding = (0, len(fc1) // 2 - mlp.fc2.in_features)
        self.fc2, self.fc2_bias = (
            make_buffer(F.pad(mlp.fc2.weight, padding), dtype),
            make_buffer(mlp.fc2.bias, torch.float32),
        )

    def forward(
        self, x: Tensor, sums: Tensor, positions: RotaryInputs | PackedRotaryInputs, hidden: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens (B, S, D) and their moments (`veca.kernels.linear`) → the same after this block.

        `hidden` is the number of MLP channels that patches use; None: all. The tokens of a pack are (1, ΣC + ΣN, D).
        """
        from veca.kernels.linear import linear_residual

        cores = positions[0].shape[1]
        if len(positions) == 3 and self.prefers_few_cores(x, cores):
            x, sums = self._few_cores(x, sums, positions)
        else:
            flat = x.flatten(0, 1)
            qkv = self.qkv.run(flat, sums).view(*x.shape[:2], 3, self.num_heads, x.shape[2] // self.num_heads)
            flat, sums = linear_residual(_attend(qkv, positions), self.proj, self.proj_bias, flat)
            x = flat.view(x.shape)
        return self.mlp(x, sums, cores, hidden)

    def prefers_few_cores(self, x: Tensor, cores: int) -> bool:
        """Whether `_few_cores` is faster for tokens (B, S, D)."""
        few = cores * self.num_heads <= FEW_CORES_MAX_RATIO * x.shape[-1]
        return few and x.shape[0] * x.shape[1] >= FEW_CORES_MIN_TOKENS

    def mlp(self, x: Tensor, sums: Tensor, cores: int, hidden: int | None) -> tuple[Tensor, Tensor]:
        """Tokens (B, S, D) + their MLP, and the moments of the sum; overwrites the cores of `x` at some widths."""
        from veca.kernels.core_products import add_core_channels, core_channels
        from veca.kernels.fused_mlp import fused_mlp, prefers_fused
        from veca.kernels.linear import linear_residual

        channels = self.fc2.shape[1]
        hidden = channels if hidden is None else hidden
        if prefers_fused(x.shape[-1], hidden):
            fc1, fc2 = (self.fc1.weight, self.fc1.bias), (self.fc2, self.fc2_bias)
            return fused_mlp(x, sums, fc1, fc2, self.fc1.eps, cores, hidden)
        flat, rest = x.flatten(0, 1), None
        if hidden < channels:
            weight, bias = self.fc1.weight[2 * hidden :], self.fc1.bias[2 * hidden :]
            rest = core_channels(x, sums, weight, bias, self.fc1.eps, cores)
        gated = self.fc1.run(flat, sums, swiglu=True, rows=2 * hidden)
        if rest is not None:  # after the first layer has read the cores
            add_core_channels(rest, self.fc2[:, hidden:], x, cores)
        flat, sums = linear_residual(gated, self.fc2[:, :hidden], self.fc2_bias, flat)
        return flat.view(x.shape), sums

    def mlp_moment_parts(self, hidden: int | None) -> int:
        """In how many parts `mlp` returns its moments."""
        from veca.kernels.fused_mlp import prefers_fused
        from veca.kernels.linear import moment_parts

        used = self.fc2[:, :hidden]
        return 1 if prefers_fused(*used.shape) else moment_parts(used)

    def mlp_calls(self, x: Tensor, sums: Tensor, cores: int, hidden: int | None) -> list[Callable[[], object]]:
        """Calls that launch each kernel of `mlp` once; they overwrite `x`."""
        from veca.kernels.core_products import add_core_channels, core_channels
        from veca.kernels.fused_mlp import prefers_fused
        from veca.kernels.linear import linear_residual

        used, rest = self.fc2[:, :hidden], self.fc2[:, hidden or self.fc2.shape[1] :]
        if prefers_fused(*used.shape):
            return [lambda: self.mlp(x, sums, cores, hidden)]
        flat, rows = x.flatten(0, 1), 2 * used.shape[1]
        gated, of_cores = (
            x.new_zeros(count, part.shape[1]) for count, part in ((len(flat), used), (len(x) * cores, rest))
        )
        calls: list[Callable[[], object]] = [
            lambda: self.fc1.run(flat, sums, swiglu=True, rows=rows),
            lambda: linear_residual(gated, used, self.fc2_bias, flat),
        ]
        if rest.shape[1]:
            calls += [
                lambda: core_channels(x, sums, self.fc1.weight[rows:], self.fc1.bias[rows:], self.fc1.eps, cores),
                lambda: add_core_channels(of_cores, rest, x, cores),
            ]
        return calls

    def _few_cores(self, x: Tensor, sums: Tensor, positions: RotaryInputs) -> tuple[Tensor, Tensor]:
        """`veca.attention.few_cores_attention` with the residual sum, by kernels."""
        from veca.kernels.core_products import core_projection, core_vectors
        from veca.kernels.few_cores import averaging_weights, mix_residual, projected_probabilities

        dim, heads, eps, cores = x.shape[-1], self.num_heads, self.qkv.eps, positions[0].shape[1]
        (w_qk, w_v), (b_qk, b_v) = (part.split([2 * dim, dim]) for part in (self.qkv.weight, self.qkv.bias))
        core_qkv = core_projection(x, sums, self.qkv.weight, self.qkv.bias, eps, cores)
        patch_to_core, logits = projected_probabilities(x, sums, w_qk, b_qk, eps, core_qkv, heads, *positions)
        averages = torch.bmm(averaging_weights(logits, sums, dim, eps, x.dtype), x)  # (B, H·C, D)
        vectors = core_vectors(averages, core_qkv, (w_v, b_v), self.proj, heads)
        return mix_residual(patch_to_core, vectors, self.proj_bias, x, cores)

    def first_core(self, x: Tensor, sums: Tensor, positions: RotaryInputs) -> Tensor:
        """The first core's token (B, 1, D) after this block, which must be the last."""
        from veca.kernels.few_cores import averaging_weights, core_logits
        from veca.kernels.linear import linear

        (batch, tokens, dim), dtype, heads, eps = x.shape, x.dtype, self.num_heads, self.qkv.eps
        (w_q, w_k, w_v), (b_q, b_k, b_v) = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
        first = F.layer_norm(x[:, :1], (dim,), eps=eps)
        q = F.linear(first, w_q, b_q.to(dtype)).unflatten(-1, (heads, -1))
        k = linear(x.flatten(0, 1), w_k, b_k, moments=sums, eps=eps).view(batch, tokens, heads, dim // heads)
        logits = core_logits(q, k, *positions)
        averages = torch.bmm(averaging_weights(logits, sums, dim, eps, dtype), x).transpose(0, 1)  # (H, B, D)
        values = torch.bmm(averages, w_v.view(heads, -1, dim).mT).transpose(0, 1).flatten(1) + b_v.to(dtype)
        x = x[:, :1] + F.linear(values, self.proj, self.proj_bias.to(dtype))[:, None]
        hidden = F.linear(F.layer_norm(x, (dim,), eps=self.fc1.eps), self.fc1.weight, self.fc1.bias.to(dtype))
        u, v = hidden.unflatten(-1, (-1, 2, SWIGLU_GROUP)).unbind(-2)
        return x + F.linear((F.silu(u) * v).flatten(-2), self.fc2, self.fc2_bias.to(dtype))


def _attend(qkv: Tensor, positions: RotaryInputs | PackedRotaryInputs) -> Tensor:
    """Attention (B·S, D) of queries, keys and values (B, S, 3, H, d)."""
    if len(positions) == 3:
        from veca.kernels.core_attention import launch_core_attention

        return launch_core_attention(qkv, *positions)[0].flatten(0, 1)
    from veca.kernels.packed_attention import launch_packed_attention

    return launch_packed_attention(qkv[0], positions[0][0], *positions[1:])[0]


class NormLinear(nn.Module):
    """A linear layer with the norm before it folded in (`fold_norm`), in 8 bits if `weights` says so."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, weights: Weights | None) -> None:
        super().__init__()
        self.eps, self.is_float8 = eps, weights == "float8"
        self.weight, self.bias = make_buffer(weight, dtype), make_buffer(bias, torch.float32)
        if self.is_float8:
            values, scale = to_float8(self.weight)
            self.float8, self.float8_scale = make_buffer(values, FLOAT8), make_buffer(scale, torch.float32)

    def run(self, x: Tensor, sums: Tensor, swiglu: bool = False, rows: int | None = None) -> Tensor:
        """The norm and the layer, or its first `rows`, on x (M, D), whose moments are `sums`."""
        from veca.kernels.linear import linear, quantize_normalized

        bias = self.bias[:rows]
        if not self.is_float8:
            return linear(x, self.weight[:rows], bias, moments=sums, eps=self.eps, swiglu=swiglu)
        values, scale = quantize_normalized(x, self.eps)
        scales = scale, self.float8_scale[:rows]
        return linear(values, self.float8[:rows], bias, scales=scales, swiglu=swiglu, dtype=x.dtype)


class FastNorm(nn.Module):
    """A LayerNorm by the kernel, with weight and bias in float32."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight, self.bias = make_buffer(norm.weight, torch.float32), make_buffer(norm.bias, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        from veca.kernels.linear import layer_norm

        return layer_norm(x.flatten(0, -2), self.weight, self.bias, self.eps).view(x.shape)


def make_buffer(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy as a buffer that is not part of the state dict."""
    return nn.Buffer(tensor.detach().to(dtype, copy=True).contiguous(), persistent=False)


@torch.no_grad()
def fold_norm(norm: nn.LayerNorm, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """Weight W and bias such that `layer(norm(x))` is `(x Wᵀ) / σ(x) + bias`: all of the norm but 1/σ is in them."""
    weight = layer.weight.double() * norm.weight.double()
    bias = layer.bias.double() + layer.weight.double() @ norm.bias.double()
    return weight - weight.mean(dim=1, keepdim=True), bias


@torch.no_grad()
def interleave_swiglu(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [u; v] of a SwiGLU's first layer, interleaved in groups of half a tile, which zeros are padded to."""
    hidden = len(bias) // 2
    padding = -hidden % SWIGLU_GROUP
    weight = F.pad(weight.unflatten(0, (2, hidden)), (0, 0, 0, padding))
    bias = F.pad(bias.unflatten(0, (2, hidden)), (0, padding))
    weight, bias = (part.unflatten(1, (-1, SWIGLU_GROUP)).transpose(0, 1) for part in (weight, bias))
    return weight.flatten(0, 2), bias.flatten()


def to_float8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows scaled to the range of float8, and the scales (rows) that undo it."""
    scale = weight.float().abs().amax(dim=1).clamp_min(1e-12) / torch.finfo(FLOAT8).max
    return (weight.float() / scale[:, None]).to(FLOAT8), scale
