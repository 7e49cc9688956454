"""Costs of one image on this machine: time, memory and FLOPs of a VECA and of the dense ViT of its size, by resolution.

Measurements are generators that pause between any two calls, so that more urgent work can be done there.
"""

import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import Thread
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from veca.config import VecaConfig
from veca.flops import dense_model_flops, model_flops
from veca.model import Veca
from veca.report.charts import Chart, Line, line_chart
from veca.teachers.from_timm import create_dense_vit
from veca.utils.device import peak_device_bytes
from veca.utils.timing import timed

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
CPU_SECONDS = 12.0
"""CPU time for all measurements; larger sizes that would take more are counted, not timed."""
MAX_REPEATS = 3
MAX_SECONDS = 2.0
"""No further repeat after this much measuring. Of each call the fastest counts: others shared the machine with
something else."""
DENSE = "dense ViT"
DASHES = ("", "7 4", "2 3")


class CallCost(NamedTuple):
    seconds: float
    mebibytes: float
    """Peak memory of tensors, without the weights."""


class ScalingSetting(NamedTuple):
    cores: int
    width: float

    def __str__(self) -> str:
        return f"C = {self.cores}" + (f", width {self.width:g}" if self.width != 1 else "")


class ScalingPoint(NamedTuple):
    """What one image of `size` × `size` pixels costs, by setting, and in the dense ViT."""

    size: int
    flops: Mapping[str, int]
    seconds: Mapping[str, float]
    """Empty: not measured, here and at every larger size."""


def choose_settings(config: VecaConfig, budgets: Sequence[int]) -> list[ScalingSetting]:
    """From the dearest to the cheapest: the largest budget, the smallest, and that with the narrowest MLP.

    >>> [str(setting) for setting in choose_settings(VecaConfig(widths=(0.25, 1.0)), [8, 64])]
    ['C = 64', 'C = 8', 'C = 8, width 0.25']
    """
    ends = [(budgets[-1], 1.0), (budgets[0], 1.0), (budgets[0], float(min(config.widths)))]
    return [ScalingSetting(*end) for end in dict.fromkeys(ends)]


def sizes_around(size: int, patch: int) -> list[int]:
    """Half of a size to twice of it, in whole patches.

    >>> sizes_around(512, 16)
    [256, 512, 768, 1024]
    """
    return sorted({max(1, round(share * size / patch)) * patch for share in (0.5, 1, 1.5, 2)})


def measure_scaling(
    model: Veca,
    settings: Sequence[ScalingSetting],
    sizes: Sequence[int],
    on_point: Callable[[int], object] = lambda count: None,
) -> list[ScalingPoint]:
    """Count and time both models at each size, in ascending order, until `CPU_SECONDS` are spent.

    Without timm the dense ViT is counted, not timed. Its weights are random, which changes no time.
    """
    config, points = model.config, list[ScalingPoint]()
    if find_spec("timm") is not None:
        create_dense_vit(config, depth=1)  # imports timm, which takes seconds that are no size's
    spent, last = 0.0, 0.0
    for size in sizes:
        flops = {str(each): model_flops(config, size, size, each.cores, each.width) for each in settings}
        point = ScalingPoint(size, flops | {DENSE: dense_model_flops(config, size, size)}, {})
        # A size costs about as much more than the last as it has more FLOPs.
        growth = sum(point.flops.values()) / sum(points[-1].flops.values()) if points else 0.0
        if spent + last * growth <= CPU_SECONDS and (not points or points[-1].seconds):
            began = time.process_time()
            point = point._replace(seconds=_time_models(model, size, settings))
            last = time.process_time() - began
            spent += last
        points.append(point)
        on_point(1)
    return points


def _time_models(model: Veca, size: int, settings: Sequence[ScalingSetting]) -> dict[str, float]:
    """Seconds of one image in both models, by name of a setting."""
    images, seconds = random_image(model, size), dict[str, float]()
    for each in settings:
        call = partial(model, images, cores=each.cores, width=each.width)
        seconds[str(each)] = finish(measure_calls([call], images.device)).seconds
    dense = finish(measure_dense(model.config, images))
    return seconds if dense is None else {**seconds, DENSE: dense.seconds}


def random_image(model: Veca, size: int) -> Tensor:
    return torch.randn(1, model.config.in_chans, size, size).to(model.norm.weight)


def finish(steps: Steps[T]) -> T:
    """The result of a measurement, without pauses."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def measure_dense(config: VecaConfig, images: Tensor) -> Steps[CallCost | None]:
    """The cost of timm's dense ViT with random weights; None where timm is not installed."""
    if find_spec("timm") is None:
        return None
    loading = Thread(target=import_module, args=("timm",))  # takes seconds, in which others may have their turn
    loading.start()
    while loading.is_alive():
        loading.join(0.02)
        yield
    # All layers have the same shapes: a model of one layer is built, and its block called once per further layer.
    dense: Any = create_dense_vit(config, depth=1).to(images.device, images.dtype).eval()
    inputs: list[Any] = []
    hook = dense.blocks[0].register_forward_pre_hook(lambda _, *given: inputs.extend(given), with_kwargs=True)
    with torch.inference_mode():
        dense.forward_features(images)
    hook.remove()
    args, kwargs = inputs
    layers = (config.depth - 1) * [lambda: dense.blocks[0](*args, **kwargs)]
    return (yield from measure_calls([lambda: dense.forward_features(images), *layers], images.device))


def measure_calls(calls: list[Callable[[], object]], device: torch.device) -> Steps[CallCost]:
    """Time of all calls one after the other, and the peak memory of the first; pauses between any two."""
    runs = [torch.inference_mode()(call) for call in calls]
    peak = peak_device_bytes(runs[0], device)
    peak = peak_tensor_bytes(runs[0]) if peak is None else peak  # this first run also warms up
    samples: list[list[float]] = []  # of all calls, in each repeat
    while len(samples) < MAX_REPEATS and sum(map(sum, samples)) < MAX_SECONDS:
        samples.append([])
        for run in runs:
            yield
            samples[-1].append(timed(run, device))
    return CallCost(seconds=sum(map(min, zip(*samples, strict=True))), mebibytes=peak / 2**20)


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
        # The storages of inputs are not new, so neither are those of views and of in-place results.
        self._known.update(leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        result = func(*args, **(kwargs or {}))
        storages = {leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        for storage in storages.difference(self._known):
            self._known.add(storage)
            self.current += storage.nbytes()
            weakref.finalize(storage, self._release, storage.nbytes())
        self.peak = max(self.peak, self.current)
        return result

    def _release(self, count: int) -> None:
        self.current -= count


def draw_scaling(points: Sequence[ScalingPoint], settings: Sequence[ScalingSetting]) -> Iterator[Chart]:
    """A chart of the times, if there are several, and one of the FLOPs."""
    for values, title, unit in (("seconds", "time, ms", 1e3), ("flops", "GFLOPs", 1e-9)):
        lines = []
        for i, name in enumerate([*map(str, settings), DENSE]):
            own = [(float(p.size), unit * getattr(p, values)[name]) for p in points if name in getattr(p, values)]
            dense = name == DENSE
            label, colour, dash = (DENSE, 0, "") if dense else (f"VECA, {name}", 1, DASHES[i])
            lines.append(Line(label, own, colour, dots=True, dash=dash))
        lines = [line for line in lines if len(line.points) > 1]
        if lines:
            label = f"{title} of one image against resolution: {', '.join(line.name for line in lines)}"
            yield line_chart(lines, "resolution, px", title, label, ticks_at_points=True, include=(0.0,))
