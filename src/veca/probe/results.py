"""Rows of a results folder read back: each file is checked, and what is not a row is named and left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from veca.errors import ArgumentError
from veca.probe import paper
from veca.utils.text import number, printable

SCHEMA = 1  # of row files; a file of another is not read
MAX_ROW_BYTES = 2**26
Unusable: TypeAlias = tuple[str, str]
"""A file that is left out of a report, and the reason."""
_BROKEN_JSON = "is not whole JSON: "
_DAMAGE = {json.JSONDecodeError: _BROKEN_JSON, RecursionError: _BROKEN_JSON, UnicodeDecodeError: "is not UTF-8 text: "}
_LOWER_IS_BETTER = re.compile(r"rmse|(^|_)rel|err|loss|silog|log10|mae", re.IGNORECASE)
_IN_PERCENT = re.compile(r"top\d|map|miou|iou|acc|delta|mean_per_class", re.IGNORECASE)


@dataclass(frozen=True)
class ProbeResult:
    """One finished probe, as its row file says. Names are printable."""

    file: str
    task: str
    model: str
    kind: str
    about: Mapping[str, Any]
    dataset: str
    counts: Mapping[str, int]
    """Images of each split."""
    fingerprint: str
    cores: int | None
    size: int
    seed: int
    scored_on: str
    metric: str
    """The main one of `metrics`."""
    metrics: Mapping[str, float]
    per_class: Mapping[str, float]
    best: Mapping[str, float]
    """Settings of the best head of the sweep."""
    sweep: Sequence[Mapping[str, float]]
    curve: Sequence[float]
    """Score of the best head at each validation."""
    protocol: Mapping[str, Any]
    gallery: Sequence[Mapping[str, str]]
    also: Mapping[str, Mapping[str, float]]
    """Metrics on further datasets, by the same head."""
    versions: Mapping[str, str]
    seconds: Mapping[str, float]
    date: str
    grid: Sequence[int] = ()

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
    def place(self) -> str:
        """Budget and resolution, as text."""
        return f"{'' if self.cores is None else f'C = {self.cores}, '}{self.size} px"

    @property
    def kin(self) -> paper.Kin | None:
        return paper.kin(self.model, self.kind, self.about)

    def on(self, dataset: str | None) -> tuple[str, Mapping[str, float]]:
        """Main metric and all metrics on the row's own dataset (None), or on one of those in `also`.

        On those it is the row's metric, or else the first.
        """
        if dataset is None:
            return self.metric, self.metrics
        metrics = self.also[dataset]
        return self.metric if self.metric in metrics else next(iter(metrics), self.metric), metrics

    def sweep_note(self) -> str:
        """Says so if the best rate is at the end of the sweep, where a wider one might do better."""
        rates = sorted({head["rate"] for head in self.sweep if "rate" in head})
        if len(rates) < 2 or self.best.get("rate") not in (rates[0], rates[-1]):
            return ""
        end = "lowest" if self.best["rate"] == rates[0] else "highest"
        return f"the {end} rate of the sweep: others may do better"


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
            rows.append(parse_row(json.loads(path.read_text(encoding="utf-8")), name))
        except (ValueError, OSError, RecursionError) as error:
            unusable.append((name, _DAMAGE.get(type(error), "") + printable(str(error))))
    rows.sort(key=lambda r: (r.task, r.dataset, r.model, r.size, r.cores or 0, r.seed, r.file))
    return rows, unusable


def parse_row(raw: Any, file: str) -> ProbeResult:
    """A row from the JSON of its file. What identifies it must be right; the rest is left out where it is not."""
    if not isinstance(raw, dict):
        raise ArgumentError("holds no JSON object, and is no row")
    if raw.get("schema", SCHEMA) != SCHEMA:
        reads = f"this veca reads version {SCHEMA}: use the veca that wrote it, or one as new"
        raise ArgumentError(f"is of version {raw['schema']!r} of the format of rows; {reads}")
    if missing := [key for key in ("task", "model", "data", "size", "metric", "metrics") if key not in raw]:
        raise ArgumentError(f"has no {', '.join(missing)}, and is no row of `veca probe`")
    for key in ("model", "data", "metrics"):
        _check_field(key, raw[key], isinstance(raw[key], dict), "an object was expected")
    model, data, cores = raw["model"], raw["data"], raw.get("cores")
    names = {"task": raw["task"], "model": model.get("name"), "dataset": data.get("name"), "metric": raw["metric"]}
    for key, value in names.items():
        _check_field(f"{key} name", value, isinstance(value, str) and bool(value), "a name was expected")
    for key, value in {"size": raw["size"], "cores": 1 if cores is None else cores}.items():
        _check_field(key, value, type(value) is int and value >= 1, "a whole number from 1 was expected")
    texts = {"kind": model.get("kind"), "fingerprint": data.get("fingerprint")}
    texts |= {key: raw.get(key) for key in ("scored_on", "date")}
    fields: dict[str, Any] = {key: _text(value) for key, value in (names | texts).items()}
    fields |= {key: _only_numbers(raw.get(key)) for key in ("metrics", "per_class", "best", "seconds")}
    return ProbeResult(
        file=file,
        about=as_mapping(model.get("about")),
        counts={key: n for key in ("train", "val", "test") if type(n := data.get(key)) is int},
        cores=cores,
        size=raw["size"],
        seed=raw["seed"] if type(raw.get("seed")) is int else 0,
        sweep=[_only_numbers(head) for head in _as_list(raw.get("sweep"))],
        curve=[float(v) for v in _as_list(as_mapping(raw.get("curve")).get("val")) if _is_number(v)],
        protocol=as_mapping(raw.get("protocol")),
        gallery=[entry for entry in _as_list(raw.get("gallery")) if isinstance(entry, dict)],
        also={printable(name): _only_numbers(values) for name, values in as_mapping(raw.get("also")).items()},
        versions={printable(name): _text(version) for name, version in as_mapping(raw.get("versions")).items()},
        grid=[n for n in _as_list(raw.get("grid")) if type(n) is int],
        **fields,
    )


def _check_field(key: str, value: Any, valid: bool, rule: str) -> None:
    if not valid:
        raise ArgumentError(f"has {key}={printable(repr(value))[:60]}; {rule}: it is no row of `veca probe`")


def _text(value: Any) -> str:
    return "" if value is None else printable(str(value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # neither nan nor an integer that no float can hold


def _only_numbers(values: Any) -> dict[str, float]:
    return {printable(name): float(value) for name, value in as_mapping(values).items() if _is_number(value)}


def as_mapping(value: Any) -> Mapping[str, Any]:
    """A value that should be a JSON object; anything else counts as an empty one."""
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as one level, values as JSON.

    >>> flatten_settings({"crop": {"side": 256}, "head": "linear"})
    {'crop.side': '256', 'head': 'linear'}
    """
    settings: dict[str, str] = {}
    for key, value in values.items():
        name = printable(f"{prefix}{key}")
        if isinstance(value, dict) and value:
            settings |= flatten_settings(value, f"{name}.")
        else:
            settings[name] = printable(value if isinstance(value, str) else json.dumps(value, default=str))
    return settings
