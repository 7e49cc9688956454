"""Linear layers for inference on x86 CPUs, by oneDNN: no pass over memory for the bias, and SwiGLU fused in.

The operators are those that torch.compile calls for frozen models. They know no gradient, so they run in
`torch.inference_mode` only, where nobody can ask for one.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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


class PackedWeights(AbstractContextManager["PackedWeights"]):
    """Weights of a model in the layout that oneDNN computes with: made once, not in each call, while a block runs.

    The model's weights must not change as long as this is used. Threads may use it at the same time, each in a block of
    its own; blocks are not nested.
    """

    def __init__(self, model: nn.Module) -> None:
        # By address, which is theirs as long as they are kept here. Quantised ones are of other types.
        weights = [weight for weight in model.parameters() if type(weight) is nn.Parameter]
        self._weights: dict[int, Tensor] = {weight.untyped_storage().data_ptr(): weight for weight in weights}
        self._packed: dict[tuple[Any, ...], Tensor] = {}
        self._made: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> "PackedWeights":
        _active_weights.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active_weights.set(None)

    def pack(self, weight: Tensor) -> Tensor:
        """`weight` in oneDNN's layout; as it is if it is none of the model's."""
        if weight.untyped_storage().data_ptr() not in self._weights:
            return weight.contiguous()
        key = weight.data_ptr(), weight.shape, weight.stride()
        if key not in self._packed:
            self._packed[key] = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        return self._packed[key]

    def keep(self, key: Any, weight: Tensor, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The weight and bias that `make` makes of a layer whose weight is `weight`."""
        if weight.untyped_storage().data_ptr() not in self._weights:
            return make()
        place = weight.data_ptr(), weight.shape, key
        if place not in self._made:
            self._made[place] = made = make()
            self._weights[made[0].untyped_storage().data_ptr()] = made[0]
        return self._made[place]


_active_weights: ContextVar[PackedWeights | None] = ContextVar("packed weights", default=None)


def _pack(weight: Tensor) -> Tensor:
    packed = _active_weights.get()
    # For a weight with gaps between its rows oneDNN has no fast kernel: it takes a thousand times as long.
    return weight.contiguous() if packed is None else packed.pack(weight)


def keep_layer(key: Any, weight: Tensor, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`make()`, the weight and bias of a layer made from one with `weight`; made once where there are PackedWeights."""
    packed = _active_weights.get()
    return make() if packed is None else packed.keep(key, weight, make)


def inference_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, by oneDNN where it is supported."""
    if not supports_onednn(x, weight):
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, _pack(weight), bias, "none", [], "")
    return out


def inference_swiglu(x: Tensor, u: tuple[Tensor, Tensor], v: tuple[Tensor, Tensor]) -> Tensor:
    """`silu(F.linear(x, *u)) * F.linear(x, *v)`, each a weight and a bias, without either product in memory."""
    gate = torch.ops.mkldnn._linear_pointwise(x, _pack(u[0]), u[1], "swish", [], "")
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, gate, _pack(v[0]), v[1], "mul")
    return out


if AVAILABLE:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _linear_flops(x: tuple[int, ...], *_: Any, out_shape: tuple[int, ...], **__: Any) -> int:
        return 2 * x[-1] * torch.Size(out_shape).numel()
