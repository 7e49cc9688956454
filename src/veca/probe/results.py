"""The rows of a results folder, each checked as it is read; what is no row is named and left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from veca.errors import ArgumentError
from veca.probe import paper
from veca.utils.text import number, printable

SCHEMA = 1
"""Of row files; one that names another is not read."""
MOST_BYTES = 2**26
"""A larger file is no row."""
_LOWER = re.compile(r"rmse|(^|_)rel|err|loss|silog|log10|mae", re.IGNORECASE)
_PERCENT = re.compile(r"top\d|map|miou|iou|acc|delta|mean_per_class", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """One finished probe. Names are printable."""

    file: str
    task: str
    model: str
    kind: str
    about: Mapping[str, Any]
    dataset: str
    counts: Mapping[str, int]
    fingerprint: str
    cores: int | None
    size: int
    seed: int
    scored_on: str
    metric: str
    metrics: Mapping[str, float]
    per_class: Mapping[str, float]
    best: Mapping[str, float]
    sweep: Sequence[Mapping[str, float]]
    curve: Sequence[float]
    protocol: Mapping[str, Any]
    gallery: Sequence[Mapping[str, str]]
    also: Mapping[str, Mapping[str, float]]
    versions: Mapping[str, str]
    seconds: Mapping[str, float]
    date: str
    grid: Sequence[int] = ()

    @property
    def value(self) -> float:
        """Of the main metric; nan where it is missing."""
        return self.metrics.get(self.metric, math.nan)

    @property
    def goodness(self) -> float:
        """The value with the sign that makes more of it better; least of all where there is none."""
        if not math.isfinite(self.value):
            return -math.inf
        return -self.value if lower_is_better(self.metric) else self.value

    @property
    def kin(self) -> paper.Kin | None:
        return paper.kin(self.model, self.kind, self.about)


class Problem(NamedTuple):
    """A file that could not be used, and why."""

    file: str
    why: str


def lower_is_better(metric: str) -> bool:
    """Whether a metric is an error.

    >>> lower_is_better("abs_rel"), lower_is_better("mIoU")
    (True, False)
    """
    return bool(_LOWER.search(metric))


def unit(metric: str) -> str:
    """'%', 'm' or nothing."""
    return "m" if metric.lower() == "rmse" else "%" if _PERCENT.search(metric) and not lower_is_better(metric) else ""


def shown(metric: str, value: float, sign: str = "") -> str:
    """A value as a table has it: as many digits as the paper prints.

    >>> shown("mIoU", 44.8249), shown("rmse", 0.4, "+"), shown("top1", -1.5, "+"), shown("top1", math.nan)
    ('44.82', '+0.4000', '−1.50', '–')
    """
    return number(value, f"{sign}.{2 if unit(metric) == '%' else 4}f").replace("-", "−")


def metric_name(metric: str) -> str:
    """With its unit and, if it is an error, an arrow.

    >>> metric_name("mIoU"), metric_name("rmse")
    ('mIoU, %', 'rmse, m ↓')
    """
    return metric + (f", {unit(metric)}" if unit(metric) else "") + (" ↓" if lower_is_better(metric) else "")


def is_results(folder: Path) -> bool:
    """Whether a folder is one that `veca probe` writes to."""
    return (folder / "rows").is_dir()


def read_rows(folder: Path) -> tuple[list[Row], list[Problem]]:
    """All rows in a folder, and the files there that are none."""
    rows, problems = [], []
    for path in sorted((folder / "rows").glob("*.json")):
        name = printable(f"rows/{path.name}")
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ArgumentError(f"is larger than {MOST_BYTES >> 20} MiB, which no row is")
            rows.append(parse_row(json.loads(path.read_text(encoding="utf-8")), name))
        except UnicodeDecodeError:
            problems.append(Problem(name, "is not UTF-8 text"))
        except (json.JSONDecodeError, RecursionError) as error:
            problems.append(Problem(name, f"is not whole JSON: {printable(str(error))}"))
        except (ValueError, OSError) as error:
            problems.append(Problem(name, printable(str(error))))
    rows.sort(key=lambda r: (r.task, r.dataset, r.model, r.size, r.cores or 0, r.seed, r.file))
    return rows, problems


def parse_row(raw: Any, file: str) -> Row:
    """A row from what its file says; a ValueError that says what is wrong with it."""
    if not isinstance(raw, dict):
        raise ArgumentError("holds no JSON object, and is no row")
    if raw.get("schema", SCHEMA) != SCHEMA:
        raise ArgumentError(
            f"is of version {raw['schema']!r} of the format of rows; this veca reads version {SCHEMA}: use the veca "
            "that wrote it, or one as new"
        )
    if missing := [key for key in ("task", "model", "data", "size", "metric", "metrics") if key not in raw]:
        raise ArgumentError(f"has no {', '.join(missing)}, and is no row of `veca probe`")
    model, data = _typed(raw, "model", dict), _typed(raw, "data", dict)
    cores = raw.get("cores")
    return Row(
        file=file,
        task=_text(raw, "task"),
        model=_text(model, "name", "model "),
        kind=printable(str(model.get("kind", ""))),
        about=mapping(model.get("about")),
        dataset=_text(data, "name", "data "),
        counts={key: n for key in ("train", "val", "test") if type(n := data.get(key)) is int},
        fingerprint=printable(str(data.get("fingerprint", ""))),
        cores=None if cores is None else _count(cores, "cores"),
        size=_count(raw["size"], "size"),
        seed=raw["seed"] if type(raw.get("seed")) is int else 0,
        scored_on=printable(str(raw.get("scored_on", ""))),
        metric=_text(raw, "metric"),
        metrics=_numbers(_typed(raw, "metrics", dict)),
        per_class=_numbers(raw.get("per_class")),
        best=_numbers(raw.get("best")),
        sweep=[_numbers(one) for one in _list(raw.get("sweep"))],
        curve=[float(v) for v in _list(mapping(raw.get("curve")).get("val")) if _is_number(v)],
        protocol=mapping(raw.get("protocol")),
        gallery=[one for one in _list(raw.get("gallery")) if isinstance(one, dict)],
        also={printable(str(name)): _numbers(values) for name, values in mapping(raw.get("also")).items()},
        versions={printable(str(k)): printable(str(v)) for k, v in mapping(raw.get("versions")).items()},
        seconds=_numbers(raw.get("seconds")),
        date=printable(str(raw.get("date", ""))),
        grid=[n for n in _list(raw.get("grid")) if type(n) is int],
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # nan is not, and what no float can hold is not either


def _numbers(values: Any) -> dict[str, float]:
    """What of a mapping is a number, by name."""
    return {printable(str(name)): float(value) for name, value in mapping(values).items() if _is_number(value)}


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _typed(raw: Mapping[str, Any], key: str, kind: type) -> Any:
    if not isinstance(raw[key], kind):
        raise ArgumentError(f"has {key}={printable(repr(raw[key]))[:60]}, and is no row of `veca probe`")
    return raw[key]


def _text(raw: Mapping[str, Any], key: str, of: str = "") -> str:
    if not isinstance(raw.get(key), str) or not raw[key]:
        raise ArgumentError(f"has {of}{key}={printable(repr(raw.get(key)))[:60]}; a name was expected")
    return printable(raw[key])


def _count(value: Any, key: str) -> int:
    if type(value) is not int or value < 1:
        raise ArgumentError(f"has {key}={printable(repr(value))[:60]}; a whole number from 1 was expected")
    return value


def flat(values: Mapping[str, Any], head: str = "") -> dict[str, str]:
    """Nested settings as one level, values as JSON.

    >>> flat({"crop": {"side": 256}, "head": "linear"})
    {'crop.side': '256', 'head': 'linear'}
    """
    found: dict[str, str] = {}
    for key, value in values.items():
        name = printable(f"{head}{key}")
        if isinstance(value, dict) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = printable(value if isinstance(value, str) else json.dumps(value, default=str))
    return found
