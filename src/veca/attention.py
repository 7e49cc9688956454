"""Core-periphery attention: definition, PyTorch and Triton implementations, exact shortcuts, kernel choice.

Cores attend to every token, patches attend to the cores; there is no patch-to-patch term, so nothing of size N × N
is computed and cost is linear in N.

Shapes: B images, C cores, N patches, S = C + N tokens (cores first), H heads, d width of a head, D = H·d.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veca.errors import ArgumentError
from veca.kernels import ops
from veca.kernels.onednn import inference_linear, keep_layer, supports_onednn
from veca.rope import Rotary, rotate

Kernel: TypeAlias = Literal["auto", "triton", "sdpa", "reference"]

MAX_PACKED_CORES = 64
"""Of an image of a pack, for its kernels."""
_kernel: Kernel = "auto"  # set by `use_kernel`


def core_attention(qkv: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> Tensor:
    """Attention of the whole sequence, rotary embedding included: qkv (B, S, 3, H, d) → (B, S, D).

    `core_rotary` has a table per image, (B, 1, C, d/2); that of `patch_rotary` is shared, (N, d/2). The number of cores
    C is read from the first.
    """
    cores = core_rotary.cos.shape[-2]
    if use_triton(qkv, qkv.shape[-1], cores):
        core_points, patch_points = core_rotary.coordinates[:, 0].contiguous(), patch_rotary.coordinates.contiguous()
        return ops.core_attention_op(qkv, core_points, patch_points, patch_rotary.frequencies, ops.KERNELS)[0]
    qkv = qkv.permute(2, 0, 3, 1, 4)  # (3, B, H, S, d), a view
    v = qkv[2]
    q_core, k_core = rotate(qkv[:2, :, :, :cores], core_rotary)
    q_patch, k_patch = rotate(qkv[:2, :, :, cores:], patch_rotary)
    k_all = torch.cat([k_core, k_patch], dim=2)
    if _kernel == "reference":
        out = masked_attention(torch.cat([q_core, q_patch], dim=2), k_all, v, cores).transpose(1, 2)
    else:
        attend = _attend if _on_compiled_cpu(v) else F.scaled_dot_product_attention
        out_core, out_patch = attend(q_core, k_all, v), attend(q_patch, k_core, v[:, :, :cores])
        out = torch.cat([out_core.transpose(1, 2), out_patch.transpose(1, 2)], dim=1)
    return out.flatten(2)


def runs_packed(x: Tensor, head_dim: int, cores: int) -> bool:
    """Whether `veca.kernels.packed_attention` runs on the tokens of a pack.

    Only where kernel "triton" is asked for: "auto" runs `core_attention` for each kind of image.
    """
    return _kernel == "triton" and cores <= MAX_PACKED_CORES and use_triton(x, head_dim, cores)


def _on_compiled_cpu(x: Tensor) -> bool:
    """Whether torch.compile traces CPU inference; torch.export does not count, for exported files keep SDPA."""
    compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return compiling and _kernel == "auto" and x.device.type == "cpu" and not torch.is_grad_enabled()


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain attention for torch.compile on a CPU: with the softmax fused, up to 1/7 faster than PyTorch's kernel."""
    return (_at_least_float32(q @ k.mT) / q.shape[-1] ** 0.5).softmax(dim=-1).to(v.dtype) @ v


MAX_FEW_CORES_RATIO = {"cpu": 0.5}
"""Largest C·H / D at which `few_cores_attention` is used, by device; devices not listed never use it.

FLOPs fall up to a ratio of 1, time does not. One layer in float32 on two cores of an AMD EPYC, relative to the plain
time: base at 512 and 1024 px takes 0.7 at a ratio of 1/8, 0.8 at 1/2, 0.9 at 3/4 and 1.1 at 1; small at 4 × 256 px 0.7,
0.9, 1.05 and 1.2.
"""


def prefers_few_cores(x: Tensor, heads: int, core_rotary: Rotary) -> bool:
    """Whether `few_cores_attention` is faster for tokens `x`. Only in inference, and only with kernel "auto"."""
    limit = MAX_FEW_CORES_RATIO.get(x.device.type, 0.0) * x.shape[-1]
    return _kernel == "auto" and not torch.is_grad_enabled() and heads * core_rotary.cos.shape[-2] <= limit


def few_cores_attention(
    x: Tensor, qkv: nn.Linear, proj: nn.Linear, heads: int, core_rotary: Rotary, patch_rotary: Rotary
) -> Tensor:
    """`proj(core_attention(qkv(x)))` of tokens (B, S, D), with less work when C·H < D.

    Patches need no value projection: cores average values, and Σᵢ aᵢ (W_v xᵢ) = W_v (Σᵢ aᵢ xᵢ). Nor do they need an
    output projection: a patch's output is a mixture of the same H·C vectors W_o v.
    """
    cores, dim = core_rotary.cos.shape[-2], x.shape[-1]
    (w_qk, w_v), (b_qk, b_v) = qkv.weight.split([2 * dim, dim]), qkv.bias.split([2 * dim, dim])
    if rotates_in_place(x, qkv):
        # Contiguous, or each product would copy them
        q, k = _rotated(x, w_qk, b_qk, heads, core_rotary, patch_rotary).contiguous()
        core_to_all = _core_to_all(q[:, :, :cores], k)
        patch_to_core = _patch_to_core(q[:, :, cores:], k[:, :, :cores])
    else:
        qk = F.linear(x, w_qk, b_qk).unflatten(-1, (2, heads, -1))
        patch_to_core, core_to_all = core_probabilities(qk, core_rotary, patch_rotary)
    out_core = _out_core(core_to_all, x, qkv, proj, heads)
    v_core = F.linear(x[:, :cores], w_v, b_v).unflatten(-1, (heads, -1))
    vectors = torch.einsum("bchd,ohd->bhco", v_core, proj.weight.unflatten(-1, (heads, -1))).flatten(1, 2)
    # A patch's probabilities sum to H over all heads, so each vector carries 1/H of the bias.
    vectors = vectors + proj.bias / heads
    if not rotates_in_place(x, qkv):
        return torch.cat([out_core, patch_to_core @ vectors], dim=1)
    out = torch.empty_like(x)
    out[:, :cores] = out_core
    torch.bmm(patch_to_core, vectors, out=out[:, cores:])
    return out


def many_cores_attention(
    x: Tensor, qkv: nn.Linear, proj: nn.Linear, heads: int, core_rotary: Rotary, patch_rotary: Rotary
) -> Tensor:
    """`proj(core_attention(qkv(x)))` of tokens (B, S, D), where `rotates_in_place`."""
    cores = core_rotary.cos.shape[-2]
    q, k, v = _rotated(x, qkv.weight, qkv.bias, heads, core_rotary, patch_rotary)
    out_core = F.scaled_dot_product_attention(q[:, :, :cores], k, v)
    out_patch = F.scaled_dot_product_attention(q[:, :, cores:], k[:, :, :cores], v[:, :, :cores])
    out = torch.cat([out_core.transpose(1, 2), out_patch.transpose(1, 2)], dim=1)
    return inference_linear(out.flatten(2), proj.weight, proj.bias)


def rotates_in_place(x: Tensor, qkv: nn.Linear) -> bool:
    """Whether queries and keys of tokens `x` are rotated where the projection has written them: eagerly on a CPU."""
    return _kernel == "auto" and supports_onednn(x, qkv.weight)


def _rotated(x: Tensor, weight: Tensor, bias: Tensor, heads: int, core_rotary: Rotary, patch_rotary: Rotary) -> Tensor:
    """Rotated q and k, and v if `weight` has it, of tokens (B, S, D): (2 or 3, B, H, S, d), a view.

    Channels j and j + d/2 of a head rotate together. They are computed next to each other here, as one complex number,
    so that a rotation is one product in place. In this order queries and keys have the same products.
    """
    dim, cores = x.shape[-1], core_rotary.cos.shape[-2]

    def pair_channels() -> tuple[Tensor, Tensor]:
        order = torch.arange(len(weight))
        order[: 2 * dim] = order[: 2 * dim].view(2 * heads, 2, -1).mT.flatten()
        return weight[order], bias[order]

    out = inference_linear(x, *keep_layer(("pairs", heads), weight, pair_channels))
    out = out.unflatten(-1, (-1, heads, dim // heads))  # (B, S, 2 or 3, H, d)
    pairs = torch.view_as_complex(out[:, :, :2].unflatten(-1, (-1, 2)))  # (B, S, 2, H, d/2)
    pairs[:, :cores] *= torch.complex(*core_rotary[:2]).transpose(1, 2)[:, :, None]
    pairs[:, cores:] *= torch.complex(*patch_rotary[:2])[:, None, None]
    return out.permute(2, 0, 3, 1, 4)


def first_core_attention(
    x: Tensor, qkv: nn.Linear, proj: nn.Linear, heads: int, core_rotary: Rotary, patch_rotary: Rotary
) -> Tensor:
    """The first core's row of `proj(core_attention(qkv(x)))`, (B, 1, D): one query, and keys alone of all tokens."""
    (w_q, w_k, _), (b_q, b_k, _) = qkv.weight.chunk(3), qkv.bias.chunk(3)
    q = F.linear(x[:, :1], w_q, b_q).unflatten(-1, (heads, -1)).transpose(1, 2)
    k = inference_linear(x, w_k, b_k).unflatten(-1, (heads, -1)).transpose(1, 2)
    cos, sin, cores = core_rotary.cos, core_rotary.sin, core_rotary.cos.shape[-2]
    with _no_autocast(x):
        q_core = rotate(_at_least_float32(q), (cos[:, :, :1], sin[:, :, :1]))
        k_core = rotate(_at_least_float32(k[:, :, :cores]), core_rotary)
        k_patch = rotate(_at_least_float32(k[:, :, cores:]), patch_rotary)
        core_to_all = _core_to_all(q_core, k_core, k_patch)
    return _out_core(core_to_all.to(q.dtype), x, qkv, proj, heads)


def core_probabilities(qk: Tensor, core_rotary: Rotary, patch_rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Softmax weights of `core_attention`: qk (B, S, 2, H, d) → patch_to_core (B, N, H·C), core_to_all (B, H·C, S).

    In each head the C weights of a patch sum to 1, and so do the S of a core. The H·C axis is head-major: h·C + c.
    """
    cores = core_rotary.cos.shape[-2]
    with _no_autocast(qk):
        q_and_k = _at_least_float32(qk).permute(2, 0, 3, 1, 4)  # (2, B, H, S, d), a view
        q_core, k_core = rotate(q_and_k[:, :, :, :cores], core_rotary)
        q_patch, k_patch = rotate(q_and_k[:, :, :, cores:], patch_rotary)
        core_to_all, patch_to_core = _core_to_all(q_core, k_core, k_patch), _patch_to_core(q_patch, k_core)
    return patch_to_core.to(qk.dtype), core_to_all.to(qk.dtype)


def _core_to_all(q_core: Tensor, *keys: Tensor) -> Tensor:
    q_core = q_core / q_core.shape[-1] ** 0.5
    logits = [q_core @ k.mT for k in keys]
    return (torch.cat(logits, dim=-1) if len(keys) > 1 else logits[0]).softmax(dim=-1).flatten(1, 2)


def _patch_to_core(q_patch: Tensor, k_core: Tensor) -> Tensor:
    logits = q_patch @ (k_core.mT / k_core.shape[-1] ** 0.5)
    return logits.softmax(dim=-1).transpose(1, 2).flatten(2)


def _out_core(core_to_all: Tensor, x: Tensor, qkv: nn.Linear, proj: nn.Linear, heads: int) -> Tensor:
    """Output of the cores (B, C, D): tokens are averaged first, (B, H·C, D), then projected to values and output."""
    w_v, b_v = qkv.weight.chunk(3)[2], qkv.bias.chunk(3)[2]
    averages = (core_to_all @ x).unflatten(1, (heads, -1))
    values = torch.einsum("bhcx,hdx->bchd", averages, w_v.unflatten(0, (heads, -1))).flatten(2)
    return inference_linear(values + b_v, proj.weight, proj.bias)


def _no_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)  # autocast does not know meta


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def use_triton(x: Tensor, head_dim: int | None = None, cores: int = 1) -> bool:
    """Whether Triton kernels run on these inputs; under `use_kernel("triton")` an error if they cannot."""
    if _kernel not in ("auto", "triton"):
        return False
    reason = ops.unsupported_reason(x.device, x.dtype)
    if head_dim is not None and head_dim not in ops.HEAD_DIMS:
        reason = f"heads are {head_dim} wide, not 32, 64 or 128"
    if cores > ops.MAX_CORES:
        reason = f"there are {cores} cores, more than {ops.MAX_CORES}"
    if reason and _kernel == "triton":
        raise ArgumentError(f"kernel 'triton' cannot run: {reason}; choose 'auto'")
    return not reason


def masked_attention(q: Tensor, k: Tensor, v: Tensor, cores: int) -> Tensor:
    """Reference, S × S and slow: dense attention with patch-to-patch logits at -inf. q, k, v (B, H, S, d)."""
    seq = q.shape[-2]
    patch = torch.arange(seq, device=q.device) >= cores
    logits = (q @ k.mT) / q.shape[-1] ** 0.5
    logits = logits.masked_fill(patch[:, None] & patch, -torch.inf)
    return logits.softmax(dim=-1) @ v


@contextmanager
def use_kernel(kernel: Kernel) -> Iterator[None]:
    """Context manager that sets the attention implementation; "auto" is the fastest that supports the inputs.

    >>> with use_kernel("reference"):
    ...     pass
    """
    if kernel not in get_args(Kernel):
        raise ArgumentError(f"kernel {kernel!r} is unknown; choose one of {', '.join(get_args(Kernel))}")
    global _kernel
    before, _kernel = _kernel, kernel
    try:
        yield
    finally:
        _kernel = before
