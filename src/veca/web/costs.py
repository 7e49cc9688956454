"""Costs of one image beside the dense ViT of the same size: FLOPs, tokens, time and memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from veca.config import VecaConfig
from veca.flops import DENSE_PREFIX, dense_model_flops, model_flops
from veca.model import Veca
from veca.teachers.dense_vit import create_dense_vit
from veca.utils.device import peak_device_bytes
from veca.utils.timing import timed
from veca.web.jobs import JobSteps
from veca.web.schemas import CountedCost, CountedCosts, MeasuredCost

MAX_REPEATS = 3
MAX_SECONDS = 1.0
"""No further repeat after this much measuring. The fastest counts: others shared the machine with something else."""


def count_costs(config: VecaConfig, height: int, width: int, cores: int) -> CountedCosts:
    patches = (height // config.patch_size) * (width // config.patch_size)
    return CountedCosts(
        veca=CountedCost(tokens=cores + patches, gflops=model_flops(config, height, width, cores) / 1e9),
        dense=CountedCost(tokens=DENSE_PREFIX + patches, gflops=dense_model_flops(config, height, width) / 1e9),
    )


def measure_veca(model: Veca, images: Tensor, cores: int) -> JobSteps[MeasuredCost]:
    return _measure([lambda: model(images, cores=cores)], images.device)


def measure_dense(config: VecaConfig, images: Tensor) -> JobSteps[MeasuredCost | None]:
    """The cost of timm's dense ViT with random weights; None where timm is not installed."""
    if find_spec("timm") is None:
        return None
    # All layers have the same shapes: a model of one layer is built, and its block called once per further layer.
    dense: Any = create_dense_vit(config, depth=1).to(images.device, images.dtype).eval()
    inputs: list[Any] = []
    hook = dense.blocks[0].register_forward_pre_hook(lambda _, *given: inputs.extend(given), with_kwargs=True)
    with torch.inference_mode():
        dense.forward_features(images)
    hook.remove()
    args, kwargs = inputs
    layers = (config.depth - 1) * [lambda: dense.blocks[0](*args, **kwargs)]
    return (yield from _measure([lambda: dense.forward_features(images), *layers], images.device))


def _measure(calls: list[Callable[[], object]], device: torch.device) -> JobSteps[MeasuredCost]:
    """Time of all calls one after the other, and the peak memory of the first; pauses between any two."""
    runs = [torch.inference_mode()(call) for call in calls]
    peak = peak_device_bytes(runs[0], device)
    peak = peak_tensor_bytes(runs[0]) if peak is None else peak  # this first run also warms up
    totals: list[float] = []
    while len(totals) < MAX_REPEATS and sum(totals) < MAX_SECONDS:
        total = 0.0
        for run in runs:
            yield
            total += timed(run, device)
        totals.append(total)
    return MeasuredCost(seconds=min(totals), mebibytes=peak / 2**20)


def peak_tensor_bytes(call: Callable[[], object]) -> int:
    """Peak bytes of the tensors that operators return during a call; their scratch memory is not seen."""
    with _TensorCounter() as counter:
        call()
    return counter.peak


class _TensorCounter(TorchDispatchMode):
    """Counts the bytes of tensors created while it is active, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage not in inputs and storage not in self._known:  # views and in-place results are not new
                    self._known.add(storage)
                    self.current += storage.nbytes()
                    weakref.finalize(storage, self._release, storage.nbytes())
        self.peak = max(self.peak, self.current)
        return result

    def _release(self, count: int) -> None:
        self.current -= count
