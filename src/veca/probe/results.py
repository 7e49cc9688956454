"""Rows of a results folder read back: each file is checked, and what is not a row is named and left out."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from veca.errors import ArgumentError
from veca.utils.text import number, printable, quoted

SCHEMA = 1  # of row files; a file of another is not read
MAX_ROW_BYTES = 2**26
Unusable: TypeAlias = tuple[str, str]
"""A file that is left out of a report, and the reason."""
Kind = TypeVar("Kind")
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
    gallery: Sequence[Mapping[str, Any]]
    also: Mapping[str, Mapping[str, float]]
    """Metrics on further datasets, by the same head."""
    versions: Mapping[str, str]
    seconds: Mapping[str, float]
    date: str
    grid: Sequence[int]

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
            rows.append(parse_row(json.loads(path.read_bytes()), name))
        except (ValueError, OSError, RecursionError) as error:
            damage = "" if isinstance(error, ArgumentError | OSError) else "is not whole JSON: "
            unusable.append((name, damage + printable(str(error))))
    rows.sort(key=lambda r: (r.task, r.dataset, r.model, r.size, r.cores or 0, r.seed, r.file))
    return rows, unusable


def parse_row(raw: Any, file: str) -> ProbeResult:
    """A row from the JSON of its file. What identifies it must be right; the rest is left out where it is not."""
    schema = raw.get("schema", SCHEMA) if isinstance(raw, dict) else SCHEMA
    if schema != SCHEMA:
        reads = f"this veca reads version {SCHEMA}: use the veca that wrote it, or one as new"
        raise ArgumentError(f"is of version {quoted(schema)} of the format of rows; {reads}")
    raw = json_value(raw, dict)
    model, data = json_value(raw.get("model"), dict), json_value(raw.get("data"), dict)
    names = {"task": raw.get("task"), "model": model.get("name")}
    names |= {"dataset": data.get("name"), "metric": raw.get("metric")}
    numbers = {"size": raw.get("size"), "cores": 1 if raw.get("cores") is None else raw["cores"]}
    wrong = {key: value for key, value in names.items() if not isinstance(value, str) or not value}
    wrong |= {key: value for key, value in numbers.items() if type(value) is not int or value < 1}
    for key, value in wrong.items():
        expected = "a name" if key in names else "a whole number from 1"
        raise ArgumentError(f"is no row of `veca probe`: its {key} is {quoted(value, 60)}; {expected} was expected")
    texts = {key: raw.get(key) for key in ("scored_on", "date")}
    texts |= {"kind": model.get("kind"), "fingerprint": data.get("fingerprint")}
    fields: dict[str, Any] = {key: _text(value) for key, value in (names | texts).items()}
    fields |= {key: _only_numbers(raw.get(key)) for key in ("metrics", "per_class", "best", "seconds")}
    fields |= {key: json_value(raw.get(key), kind) for key, kind in (("protocol", dict), ("seed", int))}
    curve, also, versions = (json_value(raw.get(key), dict) for key in ("curve", "also", "versions"))
    sweep, gallery, grid = (json_value(raw.get(key), list) for key in ("sweep", "gallery", "grid"))
    return ProbeResult(
        file=file,
        cores=raw.get("cores"),
        size=raw["size"],
        about=json_value(model.get("about"), dict),
        counts={key: n for key in ("train", "val", "test") if type(n := data.get(key)) is int},
        sweep=[_only_numbers(head) for head in sweep],
        curve=[float(value) for value in json_value(curve.get("val"), list) if _is_number(value)],
        gallery=[entry for entry in gallery if isinstance(entry, dict)],
        also={printable(name): _only_numbers(values) for name, values in also.items()},
        versions={printable(name): _text(version) for name, version in versions.items()},
        grid=[n for n in grid if type(n) is int],
        **fields,
    )


def json_value(value: Any, kind: type[Kind]) -> Kind:
    """A value that should be of a kind of JSON; anything else counts as an empty one, or 0."""
    return value if type(value) is kind else kind()


def _text(value: Any) -> str:
    return "" if value is None else printable(str(value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # neither nan nor an integer that no float can hold


def _only_numbers(values: Any) -> dict[str, float]:
    return {printable(name): float(v) for name, v in json_value(values, dict).items() if _is_number(v)}
