"""Time and FLOPs against resolution, of a VECA at several settings and of the dense ViT, within a bound on CPU time."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from veca.config import VecaConfig
from veca.flops import dense_model_flops, model_flops
from veca.model import Veca
from veca.report.charts import Chart, Line, line_chart
from veca.teachers.from_timm import create_dense_vit
from veca.utils.timing import Call, measure

CPU_SECONDS = 6.0
"""CPU time for all measurements; larger sizes that would take more are counted, not timed."""
REPEATS = 2
DENSE = "dense ViT"
DASHES = ("", "7 4", "2 3")


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
    """Medians; empty: not measured, here and at every larger size."""


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
    config, weight, points = model.config, model.norm.weight, list[ScalingPoint]()
    dense: Any = create_dense_vit(config).to(weight).eval() if find_spec("timm") else None
    spent, last = 0.0, 0.0
    for size in sizes:
        flops = {str(each): model_flops(config, size, size, each.cores, each.width) for each in settings}
        point = ScalingPoint(size, flops | {DENSE: dense_model_flops(config, size, size)}, {})
        # A size costs about as much more than the last as it has more FLOPs.
        growth = sum(point.flops.values()) / sum(points[-1].flops.values()) if points else 0.0
        if spent + last * growth <= CPU_SECONDS and (not points or points[-1].seconds):
            began = time.process_time()
            point = point._replace(seconds=_time_models(model, dense, size, settings))
            last = time.process_time() - began
            spent += last
        points.append(point)
        on_point(1)
    return points


def _time_models(model: Veca, dense: Any, size: int, settings: Sequence[ScalingSetting]) -> dict[str, float]:
    """Median seconds of both models on one image."""
    images = torch.randn(1, model.config.in_chans, size, size).to(model.norm.weight)
    calls: dict[str, Call] = {
        str(each): partial(model, images, cores=each.cores, width=each.width) for each in settings
    }
    if dense is not None:
        calls[DENSE] = partial(dense.forward_features, images)
    with torch.inference_mode():
        seconds = measure(calls, images.device, REPEATS)
    return {name: statistics.median(samples) for name, samples in seconds.items()}


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
