"""Would a gate that chooses a setting per image pay? Judged without labels, against random mixing at the same cost.

The regret of an image at a setting is 1 - cosine of its global feature with that of the full setting. The gate runs the
smallest setting first, predicts log regret from its feature by a ridge, and runs the full setting where that is high.
Random mixing of fixed settings reaches every point of the lower convex hull of (measured cost, mean regret); the gate
pays only if it lies below the hull at the same mean cost by more than the deviation over splits into train and test.

    python tools/gate.py --model runs/mine --images photos/ --out gate.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import veca
from veca.data.records import read_item
from veca.data.sources import Item, iter_items
from veca.utils.device import choose_device, describe_versions
from veca.utils.timing import measure

Setting = tuple[int, float]
Point = tuple[float, float]
"""Mean cost and mean regret."""
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)
"""Of the images that the gate sends on to the full setting."""


def lower_hull(points: Sequence[Point]) -> list[Point]:
    """The lower convex hull, by rising cost and falling regret: what random mixing of points reaches.

    >>> lower_hull([(1, 4), (2, 3), (3, 0), (2.5, 5), (4, 1)])
    [(1, 4), (3, 0)]
    """
    hull: list[Point] = []
    for x, y in sorted(points):
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        if not hull or y < hull[-1][1]:
            hull.append((x, y))
    return hull


def mixed_regret(hull: Sequence[Point], cost: float) -> float:
    """The mean regret of random mixing at a mean cost; beyond the ends, of the setting there.

    >>> mixed_regret([(1, 4), (3, 0)], 2), mixed_regret([(1, 4), (3, 0)], 9)
    (2.0, 0)
    """
    for (x0, y0), (x1, y1) in itertools.pairwise(hull):
        if x0 <= cost <= x1:
            return y0 + (y1 - y0) * (cost - x0) / (x1 - x0)
    return hull[0][1] if cost < hull[0][0] else hull[-1][1]


def fit_ridge(features: Tensor, targets: Tensor, strength: float = 1.0) -> Callable[[Tensor], Tensor]:
    """A ridge regression on standardised features (N, D); returns its prediction for others."""
    features, targets = features.double(), targets.double()
    mean, std, bias = features.mean(0), features.std(0).clamp_min(1e-6), targets.mean()
    x = (features - mean) / std
    penalty = strength * len(x) ** 0.5 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights = torch.linalg.solve(x.T @ x + penalty, x.T @ (targets - bias))
    return lambda others: (others.double() - mean) / std @ weights + bias


def judge(
    features: Tensor, regrets: dict[Setting, Tensor], costs: dict[Setting, float], gate_cost: float, seeds: int = 3
) -> dict[str, Any]:
    """Compare the gate with random mixing: `features` (N, D) are those of the cheapest setting, costs are per image."""
    small, full = min(costs, key=lambda s: costs[s]), max(regrets, key=lambda s: s)
    rows: dict[float, list[tuple[float, float, float]]] = {share: [] for share in SHARES}
    correlations = []
    for seed in range(seeds):
        order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
        train, test = order.chunk(2)
        log_regret = regrets[small].clamp_min(1e-6).log()
        predicted = fit_ridge(features[train], log_regret[train])(features[test])
        pair = torch.stack([predicted, log_regret[test].double()])
        correlations.append(float(torch.corrcoef(pair)[0, 1]))
        hull = lower_hull([(costs[s], float(regrets[s][test].mean())) for s in regrets])
        for share in SHARES:
            # Both passes of an image that is sent on are paid for; random mixing pays for one.
            sent = predicted >= predicted.quantile(1 - share)
            cost = costs[small] + gate_cost + float(sent.double().mean()) * costs[full]
            regret = float((regrets[small][test] * ~sent).mean())
            rows[share].append((cost, regret, mixed_regret(hull, cost)))
    table = []
    for share, found in rows.items():
        cost, gate, mixing = (statistics.fmean(values) for values in zip(*found, strict=True))
        gains = [mixed - own for _, own, mixed in found]
        noise = statistics.stdev(gains) if seeds > 1 else 0.0
        table.append(
            {"share": share, "cost": cost / costs[full], "gate": gate, "mixing": mixing, "gain": mixing - gate,
             "noise": noise, "pays": mixing - gate > noise}
        )  # fmt: skip
    return {"small": small, "full": full, "correlation": statistics.fmean(correlations), "table": table}


@torch.inference_mode()
def run_settings(
    model: veca.Veca, items: Sequence[Item], settings: Sequence[Setting], size: int, batch: int
) -> dict[Setting, Tensor]:
    """Global features (N, D) of the images at each setting, on the CPU."""
    device, found = model.norm.weight.device, {setting: list[Tensor]() for setting in settings}
    for start in range(0, len(items), batch):
        sources = map(read_item, items[start : start + batch])
        images = torch.stack([veca.images.load_image(source, size=size) for source in sources])
        for cores, width in settings:
            cls = model(images.to(device), cores, cls_only=True, width=width).cls
            found[cores, width].append(cls.float().cpu())
    return {setting: torch.cat(parts) for setting, parts in found.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="veca_tiny")
    parser.add_argument("--images", required=True, help="folder, glob or shard, as veca.embed takes it")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--limit", type=int, default=5_000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    device = choose_device(given.device)
    model = veca.load(given.model, device=device)
    model = model if device.type == "cpu" else veca.optimize(model)
    items = list(itertools.islice(iter_items([given.images]), given.limit))
    settings = [(cores, width) for cores in model.config.budgets for width in model.config.widths]
    features = run_settings(model, items, settings, given.size, given.batch)
    full = features[max(settings)]
    regrets = {setting: 1 - F.cosine_similarity(own, full) for setting, own in features.items()}
    images = torch.randn(given.batch, 3, given.size, given.size, device=device)
    gate = torch.randn(model.num_features, device=device)
    calls = {str(each): partial(model, images, each[0], True, each[1]) for each in settings}
    calls["gate"] = lambda: images.new_zeros(given.batch, len(gate)) @ gate
    times = measure(calls, device, given.repeats, warmup=3, repeat_short=True)
    seconds = {name: statistics.median(values) / given.batch for name, values in times.items()}
    costs = {setting: seconds[str(setting)] for setting in settings}
    cheapest = min(costs, key=lambda s: costs[s])
    result = judge(features[cheapest], regrets, costs, seconds["gate"])
    about = {"model": given.model, "images": len(items), "size": given.size, "batch": given.batch}
    fixed = [{"setting": s, "ms": 1e3 * costs[s], "regret": float(regrets[s].mean())} for s in settings]
    result = {**about, **describe_versions(device), "fixed": fixed, **result}
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"small {result['small']}, full {result['full']}, correlation {result['correlation']:.2f}")
    for row in result["table"]:
        values = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in row.items()}
        print(", ".join(f"{name} {value}" for name, value in values.items()))


if __name__ == "__main__":
    main()
