"""Linear layers for inference on x86 CPUs, by oneDNN: no pass over memory for the bias, and SwiGLU fused in.

The operators are those that torch.compile calls for frozen models. They know no gradient, so they run in
`torch.inference_mode` only, where nobody can ask for one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

AVAILABLE = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def supports_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether the functions of this module run on these tensors."""
    return bool(
        not torch.compiler.is_compiling()
        and AVAILABLE
        and torch.is_inference_mode_enabled()
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() > 0
        and type(x) is Tensor
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
        and torch._C._get_tracing_state() is None
    )


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, by oneDNN where it is supported."""
    if not supports_onednn(x, weight):
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def inference_swiglu(x: Tensor, u: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor]) -> Tensor:
    """`silu(F.linear(x, *u)) * F.linear(x, *v)`, each a weight and a bias, without either product in memory."""
    gate = torch.ops.mkldnn._linear_pointwise(x, *u, "swish", [], "")
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, gate, *v, "mul")
    return out


if AVAILABLE:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _linear_flops(x: tuple[int, ...], *_: Any, out_shape: tuple[int, ...], **__: Any) -> int:
        return 2 * x[-1] * torch.Size(out_shape).numel()
