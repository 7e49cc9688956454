"""Time and FLOPs against resolution, of a VECA and of the dense ViT of its size, within a bound on CPU time."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from veca.flops import dense_model_flops, model_flops
from veca.model import Veca
from veca.report.charts import Chart, Line, line_chart
from veca.teachers.from_timm import create_dense_vit
from veca.utils.timing import Call, measure

CPU_SECONDS = 12.0
"""CPU time for all measurements; larger sizes that would take more are counted, not timed."""
REPEATS = 2


class ScalingPoint(NamedTuple):
    """What one image of `size` × `size` pixels costs."""

    size: int
    veca_flops: int
    dense_flops: int
    veca_seconds: float | None = None
    """Median; None: not measured, here and at every larger size."""
    dense_seconds: float | None = None


def sizes_around(size: int, patch: int) -> list[int]:
    """Half of a size to twice of it, in whole patches.

    >>> sizes_around(512, 16)
    [256, 512, 768, 1024]
    """
    return sorted({max(1, round(share * size / patch)) * patch for share in (0.5, 1, 1.5, 2)})


def measure_scaling(
    model: Veca, cores: int, sizes: Sequence[int], on_point: Callable[[int], object] = lambda count: None
) -> list[ScalingPoint]:
    """Count and time both models at each size, in ascending order, until `CPU_SECONDS` are spent.

    Without timm the dense ViT is counted, not timed. Its weights are random, which changes no time.
    """
    config, weight, points = model.config, model.norm.weight, list[ScalingPoint]()
    dense: Any = create_dense_vit(config).to(weight).eval() if find_spec("timm") else None
    spent, last = 0.0, 0.0
    for size in sizes:
        point = ScalingPoint(size, model_flops(config, size, size, cores), dense_model_flops(config, size, size))
        # A size costs about as much more than the last as it has more FLOPs.
        growth = point.dense_flops / points[-1].dense_flops if points else 0.0
        if spent + last * growth <= CPU_SECONDS and (not points or points[-1].veca_seconds is not None):
            began = time.process_time()
            point = point._replace(**_time_models(model, dense, size, cores))
            last = time.process_time() - began
            spent += last
        points.append(point)
        on_point(1)
    return points


def _time_models(model: Veca, dense: Any, size: int, cores: int) -> dict[str, Any]:
    """Median seconds of both models on one image, by field of a `ScalingPoint`."""
    images = torch.randn(1, model.config.in_chans, size, size).to(model.norm.weight)
    calls: dict[str, Call] = {"veca_seconds": partial(model, images, cores=cores)}
    if dense is not None:
        calls["dense_seconds"] = partial(dense.forward_features, images)
    with torch.inference_mode():
        seconds = measure(calls, images.device, REPEATS)
    return {field: statistics.median(samples) for field, samples in seconds.items()}


def draw_scaling(points: Sequence[ScalingPoint], cores: int) -> Iterator[Chart]:
    """A chart of the times, if there are several, and one of the FLOPs."""
    names = {"veca": f"VECA, C = {cores}", "dense": "dense ViT"}
    for field, title, unit in (("seconds", "time, ms", 1e3), ("flops", "GFLOPs", 1e-9)):
        lines = []
        for colour, (model, name) in enumerate(names.items()):
            values = [(float(point.size), getattr(point, f"{model}_{field}")) for point in points]
            lines.append(Line(name, [(x, unit * y) for x, y in values if y is not None], 1 - colour, dots=True))
        lines = [line for line in lines if len(line.points) > 1]
        if lines:
            label = f"{title} of one image against resolution: {', '.join(line.name for line in lines)}"
            yield line_chart(lines, "resolution, px", title, label, ticks_at_points=True, include=(0.0,))
