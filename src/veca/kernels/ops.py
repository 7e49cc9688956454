"""The kernels as PyTorch operators: what autograd, torch.compile, torch.export and the FLOP counter see of them.

Kernels are imported when an operator first runs, so that this module, and with it the model, loads where there is no
Triton. Nor is torch's compiler loaded, which takes nearly as long as torch itself.

Shapes are those of `veca.kernels.core_attention`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

HEAD_DIMS = (32, 64, 128)
MAX_CORES = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROW = 8
"""Rows of pixels are filled up to multiples of so many numbers: whole 16 bytes, as the copy engine wants them."""
CAPABILITY = (8, 0)
"""The oldest NVIDIA architecture with bfloat16 products: Ampere."""


def source_digest(folder: Path) -> str:
    """A hash of the kernels and of how they are launched."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


KERNELS = source_digest(Path(__file__).parent)
"""The last argument of every operator, which does nothing with it.

torch keeps compiled graphs on disk and finds them by their text, without looking into our operators. So the text must
change with the kernels, or those of another version would run.
"""


def operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function as an operator that torch.compile looks into, so that it launches the kernels itself.

    Those of the interpreter it cannot read: there the operator is called as a whole.
    """

    def register(function: Any) -> Any:
        if INTERPRETED:
            return torch.library.custom_op(name, function, mutates_args=())
        # In the source of a function torch would look for kernels, and load its compiler to read it; none are there.
        unread: Any = functools.partial(function)
        unread.__globals__ = function.__globals__  # for the types of the arguments, whose names are strings
        return torch.library.triton_op(name, unread, mutates_args=())

    return register


def unsupported_reason(device: torch.device, dtype: torch.dtype, capability: tuple[int, int] = CAPABILITY) -> str:
    """Why no kernel can run on such a device and type, in words; empty when they can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and not INTERPRETED:
        return "the tensors are on the CPU, where only Triton's interpreter runs (TRITON_INTERPRET=1)"
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and torch.version.hip):
        return f"the device is {device.type}, not an NVIDIA GPU"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < capability:
        return f"the GPU is of architecture {torch.cuda.get_device_capability(device)}, older than {capability}"
    return "" if dtype in DTYPES else f"the tensors are {dtype}, not bfloat16, float16 or float32"


# All that torch.compiler.assume_constant_result does once it has loaded the compiler.
unsupported_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


@operator("veca::core_attention")
def core_attention_op(
    qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor, kernels: str = ""
) -> tuple[Tensor, Tensor]:
    """Attention of the whole sequence (B, S, H·d), and each row's log-sum-exp (B, H, S), which the backward needs."""
    from veca.kernels.core_attention import forward

    return forward(qkv, core_points, patch_points, frequencies)


@core_attention_op.register_fake
def _(qkv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, _three, heads, width = qkv.shape
    return qkv.new_empty(batch, tokens, heads * width), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


@operator("veca::core_attention_backward")
def core_attention_backward_op(
    d_out: Tensor,
    qkv: Tensor,
    core_points: Tensor,
    patch_points: Tensor,
    frequencies: Tensor,
    out: Tensor,
    lse: Tensor,
    kernels: str = "",
) -> tuple[Tensor, Tensor]:
    """Gradients of qkv and of the cores' coordinates; patches do not move."""
    from veca.kernels.core_attention_backward import backward

    return backward(d_out, qkv, core_points, patch_points, frequencies, out, lse)


@core_attention_backward_op.register_fake
def _(d_out: Tensor, qkv: Tensor, core_points: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), core_points.new_empty(core_points.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:4], *output)


def _backward(ctx: Any, d_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *core_attention_backward_op(d_out, *ctx.saved_tensors, KERNELS), None, None, None


core_attention_op.register_autograd(_backward, setup_context=_save)


def products(qkv: tuple[int, ...], cores: int) -> int:
    """FLOPs of the attention products: 8DCN + 4DC² per image."""
    batch, tokens, _, heads, width = qkv
    return batch * heads * width * (8 * cores * (tokens - cores) + 4 * cores**2)


@register_flop_formula(torch.ops.veca.core_attention)
def _(qkv: tuple[int, ...], core_points: tuple[int, ...], *_: Any, **__: Any) -> int:
    return products(qkv, core_points[1])


@register_flop_formula(torch.ops.veca.core_attention_backward)
def _(d_out: tuple[int, ...], qkv: tuple[int, ...], core_points: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 5 * products(qkv, core_points[1]) // 2  # ten products of that size against four


@operator("veca::swiglu")
def swiglu_op(h: Tensor, bias: Tensor, kernels: str = "") -> Tensor:
    """`silu(u) * v` of [u, v] = h + bias: (..., 2W) → (..., W)."""
    from veca.kernels.swiglu import forward

    return forward(h, bias)


@swiglu_op.register_fake
def _(h: Tensor, bias: Tensor, *_: Any) -> Tensor:
    return h.new_empty(*h.shape[:-1], h.shape[-1] // 2)


@operator("veca::swiglu_backward")
def swiglu_backward_op(d_out: Tensor, h: Tensor, bias: Tensor, kernels: str = "") -> tuple[Tensor, Tensor]:
    """Gradients of h and bias."""
    from veca.kernels.swiglu import backward

    return backward(d_out, h, bias)


@swiglu_backward_op.register_fake
def _(d_out: Tensor, h: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), bias.new_empty(bias.shape)


def _save_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _swiglu_backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return *swiglu_backward_op(d_out, *ctx.saved_tensors, KERNELS), None


swiglu_op.register_autograd(_swiglu_backward, setup_context=_save_swiglu)


@operator("veca::narrow_linear")
def narrow_linear_op(x: Tensor, weight: Tensor, bias: Tensor, kernels: str = "") -> Tensor:
    """`x Wᵀ + bias` in float32 of a weight (2, D): (..., D) → (..., 2)."""
    from veca.kernels.narrow_linear import forward

    return forward(x, weight, bias)


@narrow_linear_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], 2, dtype=torch.float32)


@operator("veca::narrow_linear_backward")
def narrow_linear_backward_op(d_out: Tensor, x: Tensor, weight: Tensor, kernels: str = "") -> tuple[Tensor, Tensor]:
    """Gradients of x, and of weight and bias in one row (2·D + 2)."""
    from veca.kernels.narrow_linear import backward

    return backward(d_out, x, weight)


@narrow_linear_backward_op.register_fake
def _(d_out: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(2 * x.shape[-1] + 2)


def _save_narrow_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _narrow_linear_backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_affine = narrow_linear_backward_op(d_out, *ctx.saved_tensors, KERNELS)
    return d_x, d_affine[:-2].unflatten(0, (2, -1)), d_affine[-2:], None


narrow_linear_op.register_autograd(_narrow_linear_backward, setup_context=_save_narrow_linear)


@register_flop_formula(torch.ops.veca.narrow_linear)
def _(x: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 4 * math.prod(x)


@register_flop_formula(torch.ops.veca.narrow_linear_backward)
def _(d_out: tuple[int, ...], x: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 8 * math.prod(x)


@operator("veca::add_norm")
def add_norm_op(
    x: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    dtype: torch.dtype,
    cores: int,
    kernels: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of x and update (B, S, D), and in `dtype` its LayerNorm and the sum's first `cores` tokens.

    Without an update both sums are left empty, for they are x.
    """
    from veca.kernels.add_norm import forward

    return forward(x, update, weight, bias, eps, dtype, cores)


@add_norm_op.register_fake
def _(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, cores: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    normed = x.new_empty(x.shape, dtype=dtype)
    if update is None:
        return x.new_empty(0), normed, x.new_empty(0, dtype=dtype)
    return x.new_empty(x.shape), normed, x.new_empty(x.shape[0], cores, x.shape[2], dtype=dtype)


@operator("veca::add_norm_backward")
def add_norm_backward_op(
    d_total: Tensor | None,
    d_normed: Tensor,
    d_cores: Tensor | None,
    total: Tensor,
    weight: Tensor,
    eps: float,
    update: torch.dtype | None,
    kernels: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the update (empty where there was none), and of gain and shift (2, D)."""
    from veca.kernels.add_norm import backward

    return backward(d_total, d_normed, d_cores, total, weight, eps, update)


@add_norm_backward_op.register_fake
def _(
    d_total: Tensor | None,
    d_normed: Tensor,
    d_cores: Tensor | None,
    total: Tensor,
    weight: Tensor,
    eps: float,
    update: torch.dtype | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    d_update = total.new_empty(0) if update is None else total.new_empty(total.shape, dtype=update)
    return total.new_empty(total.shape), d_update, weight.new_empty(2, *weight.shape)


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, update, weight, _bias, ctx.eps, *_ = inputs
    ctx.update = None if update is None else update.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if update is None else output[0], weight)


def _add_norm_backward(
    ctx: Any, d_total: Tensor | None, d_normed: Tensor | None, d_cores: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    if d_normed is None:
        d_normed = torch.zeros_like(total)
    if ctx.update is None:
        d_total = d_cores = None  # nobody takes the empty sums
    d_x, d_update, d_affine = add_norm_backward_op(
        d_total, d_normed, d_cores, total, weight, ctx.eps, ctx.update, KERNELS
    )
    return d_x, None if ctx.update is None else d_update, *d_affine, None, None, None, None


add_norm_op.register_autograd(_add_norm_backward, setup_context=_save_add_norm)
