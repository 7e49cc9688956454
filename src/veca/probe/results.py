"""Rows of a results folder read back: each file is checked, and what is not a row is named and left out."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from veca.errors import ArgumentError
from veca.utils.settings import Positive, Settings
from veca.utils.text import number, printable, quoted

SCHEMA = 1  # of row files; a file of another is not read
MAX_ROW_BYTES = 2**26
SPLITS = ("train", "val", "test")
Unusable: TypeAlias = tuple[str, str]
"""A file that is left out of a report, and the reason."""
Kind = TypeVar("Kind")
_LOWER_IS_BETTER = re.compile(r"rmse|(^|_)rel|err|loss|silog|log10|mae", re.IGNORECASE)
_IN_PERCENT = re.compile(r"top\d|map|miou|iou|acc|delta|mean_per_class", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ProbeResult(Settings):
    """One finished probe, as its row file says. Names are printable."""

    file: str
    task: str
    model: str
    kind: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    dataset: str
    counts: dict[str, int]
    """Images of each split."""
    fingerprint: str = ""
    cores: Positive | None = None
    size: Positive
    seed: int = 0
    scored_on: str = ""
    metric: str
    """The main one of `metrics`."""
    metrics: dict[str, float]
    per_class: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    """Settings of the best head of the sweep."""
    sweep: tuple[dict[str, float], ...] = ()
    curve: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Score of the best head at each validation, on `val`."""
    protocol: dict[str, Any] = field(default_factory=dict)
    gallery: tuple[dict[str, str], ...] = ()
    interval: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95 % confidence intervals of `metrics`, of those that have one."""
    also: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics on further datasets, by the same head."""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    date: str = ""
    grid: tuple[int, ...] = ()

    @property
    def value(self) -> float:
        """The main metric; nan where it is missing."""
        return self.metrics.get(self.metric, math.nan)

    @property
    def goodness(self) -> float:
        """The main metric with the sign that makes higher better; -inf where it is missing."""
        signed = -self.value if lower_is_better(self.metric) else self.value
        return signed if math.isfinite(signed) else -math.inf

    @property
    def native(self) -> bool:
        """Whether images had their own sizes; `size` is then the limit, that of a square."""
        return self.protocol.get("fit") == "native"

    @property
    def resolution(self) -> str:
        """As "512", in pixels, or "native ≤ 1,024 patches"."""
        limit = json_value(self.protocol.get("max_patches"), int)
        return f"native ≤ {limit:,} patches" if self.native else str(self.size)

    @property
    def place(self) -> str:
        """Budget and resolution, as text."""
        return f"{'' if self.cores is None else f'C = {self.cores}, '}{self.resolution}{'' if self.native else ' px'}"

    def on(self, dataset: str | None) -> tuple[str, Mapping[str, float]]:
        """Main metric and all metrics on the row's own dataset (None), or on one of those in `also`.

        On those it is the row's metric, or else the first.
        """
        if dataset is None:
            return self.metric, self.metrics
        metrics = self.also[dataset]
        return self.metric if self.metric in metrics else next(iter(metrics), self.metric), metrics

    def is_published(self, dataset: str | None = None) -> bool:
        """Whether the dataset, or one of those in `also`, is a benchmark; data of the user's may have the same name."""
        about = self.protocol.get("data")
        if dataset is not None:  # rows of earlier versions do not say it of further datasets
            about = json_value(self.protocol.get("also_data"), dict).get(dataset, about)
        return "published" in json_value(about, dict)

    def text(self, metric: str) -> str:
        """A metric as text, with half the width of its confidence interval, if it has one."""
        low, high = self.interval.get(metric, (math.nan, math.nan))
        spread = "" if math.isnan(low) else f" ± {metric_text(metric, (high - low) / 2)}"
        return metric_text(metric, self.metrics.get(metric, math.nan)) + spread

    def sweep_note(self) -> str:
        """Says so if the best rate is at the end of the sweep, where a wider one might do better."""
        rates = {head["rate"] for head in self.sweep if "rate" in head}
        ends = {min(rates): "lowest", max(rates): "highest"} if len(rates) > 1 else {}
        end = ends.get(self.best.get("rate", math.nan))
        return f"the {end} rate of the sweep: others may do better" if end else ""


def lower_is_better(metric: str) -> bool:
    """Whether a metric is an error.

    >>> lower_is_better("abs_rel"), lower_is_better("mIoU")
    (True, False)
    """
    return bool(_LOWER_IS_BETTER.search(metric))


def metric_unit(metric: str) -> str:
    """'%', 'm' or nothing."""
    percent = _IN_PERCENT.search(metric) and not lower_is_better(metric)
    return "m" if metric.lower() == "rmse" else "%" if percent else ""


def metric_text(metric: str, value: float, sign: str = "") -> str:
    """A value with as many digits as the paper prints.

    >>> metric_text("mIoU", 44.8249), metric_text("rmse", 0.4, "+"), metric_text("top1", -1.5, "+")
    ('44.82', '+0.4000', '−1.50')
    """
    return number(value, f"{sign}.{2 if metric_unit(metric) == '%' else 4}f").replace("-", "−")


def metric_name(metric: str) -> str:
    """A metric with its unit and, if it is an error, an arrow.

    >>> metric_name("mIoU"), metric_name("rmse")
    ('mIoU, %', 'rmse, m ↓')
    """
    unit = metric_unit(metric)
    return metric + (f", {unit}" if unit else "") + (" ↓" if lower_is_better(metric) else "")


def is_results_folder(folder: Path) -> bool:
    """Whether `veca probe` wrote to a folder."""
    return (folder / "rows").is_dir()


def read_results(folder: Path) -> tuple[list[ProbeResult], list[Unusable]]:
    """All rows of a folder, and the files among them that are not rows."""
    rows, unusable = [], []
    for path in sorted((folder / "rows").glob("*.json")):
        name = printable(f"rows/{path.name}")
        try:
            if path.stat().st_size > MAX_ROW_BYTES:
                raise ArgumentError(f"is larger than {MAX_ROW_BYTES >> 20} MiB, which no row is")
            rows.append(parse_row(json.loads(path.read_bytes()), name))
        except (ValueError, OSError, RecursionError) as error:
            damage = "" if isinstance(error, ArgumentError | OSError) else "is not whole JSON: "
            unusable.append((name, damage + printable(str(error))))
    rows.sort(key=lambda r: (r.task, r.dataset, r.model, r.size, r.cores or 0, r.seed, r.file))
    return rows, unusable


def parse_row(raw: Any, file: str) -> ProbeResult:
    """A row from the JSON of its file."""
    raw = json_value(_clean(raw), dict)
    if (schema := raw.get("schema", SCHEMA)) != SCHEMA:
        reads = f"this veca reads version {SCHEMA}: use the veca that wrote it, or one as new"
        raise ArgumentError(f"is of version {quoted(schema)} of the format of rows; {reads}")
    model, data = (json_value(raw.get(key), dict) for key in ("model", "data"))
    values = {field.name: raw[field.name] for field in fields(ProbeResult) if field.name in raw}
    values |= {key: model[key] for key in ("kind", "about") if key in model}
    values |= {"fingerprint": data.get("fingerprint", ""), "counts": {k: data[k] for k in SPLITS if k in data}}
    required = {"task": None, "size": None, "metric": None, "metrics": None}
    # At another width it is another model: its rows are a line of their own in charts and tables.
    width = f", width {raw['width']:g}" if type(raw.get("width")) in (int, float) else ""
    names = {"file": file, "model": f"{model['name']}{width}" if "name" in model else None, "dataset": data.get("name")}
    try:
        return ProbeResult(**required | values | names)
    except ArgumentError as error:
        raise ArgumentError(f"is no row of `veca probe`: {error}") from error


def json_value(value: Any, kind: type[Kind]) -> Kind:
    """A value that should be of a kind of JSON; anything else counts as an empty one."""
    return value if type(value) is kind else kind()


def _clean(value: Any) -> Any:
    """JSON with printable text, without nulls and numbers that are not finite or that no float can hold."""
    if isinstance(value, dict):
        return {printable(key): clean for key, each in value.items() if (clean := _clean(each)) is not None}
    if isinstance(value, list):
        return [clean for each in value if (clean := _clean(each)) is not None]
    if type(value) in (int, float) and not abs(value) < 1e300:
        return None
    return printable(value) if isinstance(value, str) else value
