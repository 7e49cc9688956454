"""`veca probe pareto`: the quality-cost table of a model, from its rows in a folder of results and measured times."""

import csv
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from veca.compute import CostTable, MeasuredSetting
from veca.config import VecaConfig
from veca.errors import ArgumentError
from veca.flops import model_flops
from veca.heads.features import FrozenBackbone, FrozenVeca, digest_of
from veca.probe.results import lower_is_better
from veca.probe.run import Row, read_row
from veca.report.charts import Chart, Line, line_chart, write_chart
from veca.utils.device import describe_versions
from veca.utils.files import atomic_path
from veca.utils.text import did_you_mean
from veca.utils.timing import measure

IN_TURNS = 15
"""Settings timed together, with the full one: an optimized model keeps as many CUDA graphs."""
WARMUP = 3  # calls that compile, record a graph and replay it
_BY_SIZE = ("preprocessing", "train_view", "side", "note")
"""Parts of a row's protocol that differ between sizes."""


class ProbedSetting(NamedTuple):
    """Sorted as full settings are: by size, then by budget and width."""

    size: int
    cores: int
    width: float


Scores = dict[ProbedSetting, dict[str, float]]
"""Scores by probe, named as "knn:pets top1"."""


def make_cost_table(
    backbone: FrozenBackbone, folder: Path, probes: Collection[str] | None = None, cores: Collection[int] | None = None,
    widths: Collection[float] | None = None, sizes: Collection[int] | None = None, batch: int = 16, repeats: int = 20,
) -> CostTable:  # fmt: skip
    """Return the table of the settings that all `probes` ("knn:pets") have rows of this model for in a folder.

    None: all probes, budgets, widths, sizes there are. Times are medians, of settings run in turns.
    """
    if not isinstance(backbone, FrozenVeca):
        raise ArgumentError(f"{backbone.name} has no budgets: pareto is for a VECA")
    scores = collect_scores(folder, backbone.about["sha256"], probes)
    chosen = zip(("size", "cores", "width"), (sizes, cores, widths), strict=True)
    for name, values in ((name, values) for name, values in chosen if values):
        scores = {setting: each for setting, each in scores.items() if getattr(setting, name) in values}
    if not scores:
        way = "run each with --cores, --widths and --size on this model first, with the same --out"
        raise ArgumentError(f"{folder}: no setting has rows of every probe; {way}")
    times = measure_settings(backbone, sorted(scores, reverse=True), batch, repeats)
    versions, qualities = describe_versions(backbone.device), rate_settings(scores)
    how = f"{versions['device']}, batch {batch}, {backbone.precision}{', optimized' * backbone.optimized}"
    config = VecaConfig.from_dict(backbone.about["config"])
    rows = [
        MeasuredSetting(
            cores=setting.cores, width=setting.width, size=setting.size,
            gflops=_digits(model_flops(config, setting.size, setting.size, setting.cores, setting.width) / 1e9),
            ms=_digits(1e3 * times[setting]), quality=_digits(qualities[setting]), scores=scores[setting],
        )
        for setting in sorted(scores, reverse=True)
    ]  # fmt: skip
    return CostTable(device=how, settings=tuple(rows))


def collect_scores(folder: Path, sha256: str, probes: Collection[str] | None = None) -> Scores:
    """Scores of the weights with this hash, means over seeds, of the settings that every probe has rows for."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for path in sorted((folder / "rows").glob("*.json")):
        row = read_row(path)
        # At native sizes images differ in cost: such rows have no place in the table.
        if row and row["model"]["about"].get("sha256") == sha256 and row["protocol"].get("fit") != "native":
            rows[f"{row['task']}:{Path(row['data']['name']).name}"].append(row)
    for probe in probes or ():
        if probe not in rows:
            known = f"{did_you_mean(probe, rows)}. There are {', '.join(rows) or 'none'}; a probe is named as knn:pets"
            raise ArgumentError(f"{folder}: no rows of {probe} with these weights{known}")
    scores: dict[ProbedSetting, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    chosen = {probe: each for probe, each in rows.items() if probes is None or probe in probes}
    for probe, own in chosen.items():
        if len({_protocol(row) for row in own}) > 1:
            way = "keep sweeps that differ in more than budget, width, size and seed in folders of their own"
            raise ArgumentError(f"{folder}: rows of {probe} have different protocols; {way}")
        for row in own:
            setting = ProbedSetting(row["size"], row["cores"], float(row.get("width", 1)))
            scores[setting][f"{probe} {row['metric']}"].append(row["metrics"][row["metric"]])
    means = {
        s: {name: round(statistics.fmean(values), 6) for name, values in each.items()} for s, each in scores.items()
    }
    return {setting: each for setting, each in means.items() if len(each) == len(chosen)}


def _protocol(row: Row) -> str:
    about = {key: value for key, value in row["protocol"].items() if key not in _BY_SIZE}
    return digest_of(protocol=about, data=row["data"]["fingerprint"], scored_on=row["scored_on"], metric=row["metric"])


def rate_settings(scores: Scores) -> dict[ProbedSetting, float]:
    """Quality of each setting: the mean over probes of its score over that of the full setting at the largest size."""
    full = scores[max(scores)]
    if wrong := [name for name, value in full.items() if value <= 0]:
        raise ArgumentError(f"{wrong[0]} is {full[wrong[0]]} at the full setting; qualities would be infinite")

    def relative(name: str, value: float) -> float:
        return full[name] / max(value, 1e-9) if lower_is_better(name.split()[-1]) else value / full[name]

    return {s: statistics.fmean(relative(name, value) for name, value in each.items()) for s, each in scores.items()}


def measure_settings(
    backbone: FrozenVeca, settings: Sequence[ProbedSetting], batch: int, repeats: int
) -> dict[ProbedSetting, float]:
    """Seconds per image of each setting, the first being the full one, with which all others take turns."""
    device, full = backbone.device, settings[0]
    images = {size: torch.randn(batch, 3, size, size, device=device) for size in {each.size for each in settings}}
    calls = {
        str(each): functools.partial(backbone.at_width(each.width).features, images[each.size], each.cores)
        for each in settings
    }
    seconds, first = {str(full): 0.0}, 0.0
    others = [str(each) for each in settings[1:]]
    for start in range(0, max(1, len(others)), IN_TURNS):
        group = [str(full), *others[start : start + IN_TURNS]]
        samples = measure({each: calls[each] for each in group}, device, repeats, warmup=WARMUP, repeat_short=True)
        medians = {each: statistics.median(values) for each, values in samples.items()}
        first = first or medians[str(full)]
        seconds |= {each: median * first / medians[str(full)] for each, median in medians.items()}
    return {each: seconds[str(each)] / batch for each in settings}


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def write_cost_table(table: CostTable, folder: Path) -> list[Path]:
    """Write pareto.json, which `veca convert --table` takes, pareto.csv, and the chart pareto.svg."""
    with atomic_path(folder / "pareto.json") as part:
        part.write_text(json.dumps(table.to_dict(), indent=1) + "\n")
    rows = table_rows(table)
    with atomic_path(folder / "pareto.csv") as part, part.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    chart = write_chart(draw_costs(table), folder / "pareto.svg")
    return [folder / "pareto.json", folder / "pareto.csv", chart]


def table_rows(table: CostTable) -> list[Mapping[str, Any]]:
    """Rows of the CSV file: settings with their cost over that of the full setting at the largest size."""
    full = max(table.settings, key=lambda row: (row.size, row.cores, row.width))
    front = table.front()
    return [
        {
            "cores": row.cores, "width": row.width, "size": row.size, "gflops": row.gflops, "ms": row.ms,
            "flops_share": _digits(row.gflops / full.gflops),
            "time_share": _digits(row.ms / full.ms) if row.ms and full.ms else None,
            "quality": row.quality, **row.scores, "front": row in front,
        }
        for row in table.settings
    ]  # fmt: skip


def draw_costs(table: CostTable) -> Chart:
    """Quality against cost: a line for each size, the full setting at all sizes, and the Pareto front."""

    def points(rows: Sequence[MeasuredSetting]) -> list[tuple[float, float]]:
        return sorted((row.ms or row.gflops, 100 * row.quality) for row in rows)

    lines = []
    for i, size in enumerate(table.sizes):
        rows = [row for row in table.settings if row.size == size]
        lines.append(Line(f"{size} px", points(rows), colour=i + 2, faint=True, dots=True))
    full = [row for row in table.settings if (row.cores, row.width) == table.full]
    lines += [Line("size alone", points(full), quoted=True, dots=True)] if len(full) > 1 else []
    lines.append(Line("Pareto front", points(table.front()), colour=1))
    cost = f"ms per image ({table.device})" if table.device else "GFLOPs per image"
    return line_chart(lines, cost, "quality, % of the full setting", f"quality against {cost}", wide=True, log_x=True)
