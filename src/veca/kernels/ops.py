"""The kernels as PyTorch operators, for autograd, torch.compile, torch.export and the FLOP counter.

Kernels are imported when an operator first runs, so that this module, and with it the model, loads where there is no
Triton. torch's compiler is not loaded either, which takes nearly as long as torch itself.

Shapes are those of `veca.kernels.core_attention`.
"""

import functools
import hashlib
import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.utils.flop_counter import register_flop_formula

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

HEAD_DIMS = (32, 64, 128)
MAX_CORES = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROW_MULTIPLE = 8
"""Rows of pixels are padded to multiples of this: 16 bytes in half precision, as tensor descriptors need."""
CAPABILITY = (8, 0)
"""The oldest NVIDIA architecture with bfloat16 matrix products: Ampere."""


def source_digest(folder: Path) -> str:
    """A hash of the source of the kernels and of their launches."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


KERNELS = source_digest(Path(__file__).parent)
"""The last argument of every operator, which ignores it.

torch caches compiled graphs on disk, keyed by their text, without looking into our operators. With this argument the
text changes with the kernels; without it those of another version could run.
"""


def register_operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function as an operator that torch.compile traces into, so that its graph launches the kernels.

    It cannot trace kernels of Triton's interpreter: there the operator is opaque.
    """

    def register(function: Any) -> Any:
        if INTERPRETED:
            return torch.library.custom_op(name, function, mutates_args=())
        # torch would load its compiler to search the source of a function for kernels. There are none in ours, and a
        # partial has no source.
        sourceless: Any = functools.partial(function)
        sourceless.__globals__ = function.__globals__  # to resolve annotations, which are strings
        return torch.library.triton_op(name, sourceless, mutates_args=())

    return register


def unsupported_reason(device: torch.device, dtype: torch.dtype, capability: tuple[int, int] = CAPABILITY) -> str:
    """Why the kernels cannot run on a device in a dtype; empty if they can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and not INTERPRETED:
        return "the tensors are on the CPU, where only Triton's interpreter runs (TRITON_INTERPRET=1)"
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and torch.version.hip):
        return f"the device is {device.type}, not an NVIDIA GPU"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < capability:
        return f"the GPU is of architecture {torch.cuda.get_device_capability(device)}, older than {capability}"
    return "" if dtype in DTYPES else f"the tensors are {dtype}, not bfloat16, float16 or float32"


# The same as torch.compiler.assume_constant_result, which would load the compiler.
unsupported_reason._dynamo_marked_constant = True  # type: ignore[attr-defined]


@register_operator("veca::core_attention")
def core_attention_op(
    qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor, kernels: str = ""
) -> tuple[Tensor, Tensor]:
    """Attention of the whole sequence (B, S, H·d), and the log-sum-exp of each row (B, H, S) for the backward."""
    from veca.kernels.core_attention import launch_core_attention

    return launch_core_attention(qkv, core_points, patch_points, frequencies)


@core_attention_op.register_fake
def _(qkv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, tokens, _three, heads, width = qkv.shape
    return qkv.new_empty(batch, tokens, heads * width), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


@register_operator("veca::core_attention_backward")
def core_attention_backward_op(
    d_out: Tensor, qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor, out: Tensor,
    lse: Tensor, kernels: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv and of the cores' coordinates; patches have fixed ones."""
    from veca.kernels.core_attention_backward import launch_core_attention_backward

    return launch_core_attention_backward(d_out, qkv, core_points, patch_points, frequencies, out, lse)


@core_attention_backward_op.register_fake
def _(d_out: Tensor, qkv: Tensor, core_points: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), core_points.new_empty(core_points.shape)


def _save_core_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:4], *output)


def _core_attention_gradients(ctx: Any, d_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *core_attention_backward_op(d_out, *ctx.saved_tensors, KERNELS), None, None, None


core_attention_op.register_autograd(_core_attention_gradients, setup_context=_save_core_attention)


def core_attention_flops(qkv: tuple[int, ...], cores: int) -> int:
    """FLOPs of the attention products, given the shape of qkv: 8DCN + 4DC² per image."""
    batch, tokens, _, heads, width = qkv
    return batch * heads * width * (8 * cores * (tokens - cores) + 4 * cores**2)


@register_flop_formula(torch.ops.veca.core_attention)
def _(qkv: tuple[int, ...], core_points: tuple[int, ...], *_: Any, **__: Any) -> int:
    return core_attention_flops(qkv, core_points[1])


@register_flop_formula(torch.ops.veca.core_attention_backward)
def _(d_out: tuple[int, ...], qkv: tuple[int, ...], core_points: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 5 * core_attention_flops(qkv, core_points[1]) // 2  # ten products of that size against four


@register_operator("veca::packed_attention")
def packed_attention_op(
    qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor, spans: Tensor, images: Tensor,
    max_cores: int, kernels: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed images (S, H·d), and the log-sum-exp of each row (H, S) for the backward."""
    from veca.kernels.packed_attention import launch_packed_attention

    return launch_packed_attention(qkv, core_points, patch_points, frequencies, spans, images, max_cores)


@packed_attention_op.register_fake
def _(qkv: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, _three, heads, width = qkv.shape
    return qkv.new_empty(tokens, heads * width), qkv.new_empty(heads, tokens, dtype=torch.float32)


@register_operator("veca::packed_attention_backward")
def packed_attention_backward_op(
    d_out: Tensor, qkv: Tensor, core_points: Tensor, patch_points: Tensor, frequencies: Tensor, spans: Tensor,
    images: Tensor, out: Tensor, lse: Tensor, max_cores: int, kernels: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv and of the cores' coordinates; patches have fixed ones."""
    from veca.kernels.packed_attention import launch_packed_attention_backward

    inputs = qkv, core_points, patch_points, frequencies, spans, images
    return launch_packed_attention_backward(d_out, *inputs, out, lse, max_cores)


@packed_attention_backward_op.register_fake
def _(d_out: Tensor, qkv: Tensor, core_points: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), core_points.new_empty(core_points.shape)


def _save_packed_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.max_cores = inputs[6]


def _packed_attention_gradients(ctx: Any, d_out: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    gradients = packed_attention_backward_op(d_out, *ctx.saved_tensors, ctx.max_cores, KERNELS)
    return *gradients, None, None, None, None, None, None


packed_attention_op.register_autograd(_packed_attention_gradients, setup_context=_save_packed_attention)


@register_operator("veca::swiglu")
def swiglu_op(h: Tensor, bias: Tensor, kernels: str = "") -> Tensor:
    """`silu(u) * v` of [u, v] = h + bias: (..., 2W) → (..., W)."""
    from veca.kernels.norm_swiglu import launch_swiglu

    return launch_swiglu(h, bias)


@swiglu_op.register_fake
def _(h: Tensor, *_: Any) -> Tensor:
    return h.new_empty(*h.shape[:-1], h.shape[-1] // 2)


@register_operator("veca::swiglu_backward")
def swiglu_backward_op(d_out: Tensor, h: Tensor, bias: Tensor, kernels: str = "") -> tuple[Tensor, Tensor]:
    """Gradients of h and bias."""
    from veca.kernels.norm_swiglu import launch_swiglu_backward

    return launch_swiglu_backward(d_out, h, bias)


@swiglu_backward_op.register_fake
def _(d_out: Tensor, h: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), bias.new_empty(bias.shape)


def _save_first_two(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _swiglu_gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    return *swiglu_backward_op(d_out, *ctx.saved_tensors, KERNELS), None


swiglu_op.register_autograd(_swiglu_gradients, setup_context=_save_first_two)


@register_operator("veca::narrow_linear")
def narrow_linear_op(x: Tensor, weight: Tensor, bias: Tensor, kernels: str = "") -> Tensor:
    """`x Wᵀ + bias` in float32 with a weight (2, D): (..., D) → (..., 2)."""
    from veca.kernels.coordinates import launch_narrow_linear

    return launch_narrow_linear(x, weight, bias)


@narrow_linear_op.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], 2, dtype=torch.float32)


@register_operator("veca::narrow_linear_backward")
def narrow_linear_backward_op(d_out: Tensor, x: Tensor, weight: Tensor, kernels: str = "") -> tuple[Tensor, Tensor]:
    """Gradients of x, and of weight and bias in one row (2·D + 2)."""
    from veca.kernels.coordinates import launch_narrow_linear_backward

    return launch_narrow_linear_backward(d_out, x, weight)


@narrow_linear_backward_op.register_fake
def _(d_out: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(2 * x.shape[-1] + 2)


def _narrow_linear_gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    d_x, d_affine = narrow_linear_backward_op(d_out, *ctx.saved_tensors, KERNELS)
    return d_x, d_affine[:-2].unflatten(0, (2, -1)), d_affine[-2:], None


narrow_linear_op.register_autograd(_narrow_linear_gradients, setup_context=_save_first_two)


@register_flop_formula(torch.ops.veca.narrow_linear)
def _(x: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 4 * math.prod(x)


@register_flop_formula(torch.ops.veca.narrow_linear_backward)
def _(d_out: tuple[int, ...], x: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 8 * math.prod(x)


@register_operator("veca::add_norm")
def add_norm_op(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, cores: int,
    kernels: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum of x and update (B, S, D), and in `dtype` its LayerNorm and the sum's first `cores` tokens.

    Without an update both sums are empty tensors: they would equal x.
    """
    from veca.kernels.norm_swiglu import launch_add_norm

    return launch_add_norm(x, update, weight, bias, eps, dtype, cores)


@add_norm_op.register_fake
def _(
    x: Tensor, update: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype, cores: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    normed = x.new_empty(x.shape, dtype=dtype)
    if update is None:
        return x.new_empty(0), normed, x.new_empty(0, dtype=dtype)
    return x.new_empty(x.shape), normed, x.new_empty(x.shape[0], cores, x.shape[2], dtype=dtype)


@register_operator("veca::add_norm_backward")
def add_norm_backward_op(
    d_total: Tensor | None, d_normed: Tensor, d_cores: Tensor | None, total: Tensor, weight: Tensor, eps: float,
    update: torch.dtype | None, kernels: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, of the update (empty where there was none), and of weight and bias (2, D)."""
    from veca.kernels.norm_swiglu import launch_add_norm_backward

    return launch_add_norm_backward(d_total, d_normed, d_cores, total, weight, eps, update)


@add_norm_backward_op.register_fake
def _(
    d_total: Tensor | None, d_normed: Tensor, d_cores: Tensor | None, total: Tensor, weight: Tensor, eps: float,
    update: torch.dtype | None, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d_update = total.new_empty(0) if update is None else total.new_empty(total.shape, dtype=update)
    return total.new_empty(total.shape), d_update, weight.new_empty(2, *weight.shape)


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, update, weight, _bias, ctx.eps, *_ = inputs
    ctx.update = None if update is None else update.dtype
    ctx.set_materialize_grads(False)  # an output nobody used has gradient None, not a tensor of zeros
    ctx.save_for_backward(x if update is None else output[0], weight)


def _add_norm_gradients(
    ctx: Any, d_total: Tensor | None, d_normed: Tensor | None, d_cores: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    if d_normed is None:
        d_normed = torch.zeros_like(total)
    if ctx.update is None:
        d_total = d_cores = None  # the empty sums have no readers
    gradients = d_total, d_normed, d_cores
    d_x, d_update, d_affine = add_norm_backward_op(*gradients, total, weight, ctx.eps, ctx.update, KERNELS)
    return d_x, None if ctx.update is None else d_update, *d_affine, None, None, None, None


add_norm_op.register_autograd(_add_norm_gradients, setup_context=_save_add_norm)
