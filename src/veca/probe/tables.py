"""Tables of results beside the paper's numbers, as plain text for both HTML and Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from veca.data.datasets import SPECS
from veca.probe import paper
from veca.probe.results import ProbeResult, as_mapping, flatten_settings, lower_is_better, metric_name, metric_text
from veca.report.page import heat_rows, levels
from veca.utils.text import printable

TASK_ORDER = ("classify", "knn", "segment", "depth")
Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class Comparison(NamedTuple):
    """A result beside a number of the paper."""

    number: paper.PaperNumber
    gap: float
    """Ours less the paper's."""
    better: bool
    """Ours is strictly better."""
    same_size: bool
    """Both models are of one size."""
    notes: Sequence[str]
    """Every known difference between the two."""


class ResultTable(NamedTuple):
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    """Numbered from 1; cells of the column "notes" refer to them."""

    @property
    def word_columns(self) -> list[int]:
        """Columns of text, not of numbers."""
        return [i for i, head in enumerate(self.heads) if head in ("model", "which", "from")]


@dataclass(frozen=True, eq=False)
class Series:
    """Results of one model with equal settings, except budget, resolution and seed."""

    name: str
    rows: Sequence[ProbeResult]

    @property
    def best(self) -> ProbeResult:
        return max(self.rows, key=lambda row: row.goodness)

    def mean(self, cores: int | None, size: int) -> float:
        """The mean over seeds; nan where there is no result."""
        values = [row.value for row in self.rows if (row.cores, row.size) == (cores, size) and math.isfinite(row.value)]
        return math.fsum(values) / len(values) if values else math.nan


@dataclass(frozen=True, eq=False)
class Group:
    """All results of one task, dataset and metric."""

    task: str
    dataset: str
    metric: str
    rows: Sequence[ProbeResult]
    series: Sequence[Series]
    drifting: Sequence[str]
    """Settings that differ within a series, along with the budget or the resolution."""

    @property
    def title(self) -> str:
        return f"{self.dataset} · {self.task}, {self.metric}"

    @property
    def cores(self) -> list[int]:
        return sorted({row.cores for row in self.rows if row.cores is not None})

    @property
    def sizes(self) -> list[int]:
        return sorted({row.size for row in self.rows})


def _group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def group_rows(rows: Sequence[ProbeResult]) -> list[Group]:
    """The results of each task, dataset and metric together."""
    by_key = _group_by(rows, lambda row: (row.task, row.dataset, row.metric))
    order = {task: i for i, task in enumerate(TASK_ORDER)}
    keys = sorted(by_key, key=lambda key: (order.get(key[0], len(order)), key))
    return [Group(*key, by_key[key], *_split_into_series(by_key[key])) for key in keys]


def _split_into_series(rows: Sequence[ProbeResult]) -> tuple[list[Series], list[str]]:
    """Results by model, and apart where one budget and resolution was run with different settings.

    A setting that changes along with the resolution, as the crop does, does not make another series: it is drifting.
    """
    series, drifting = [], set[str]()
    for model, own in _group_by(rows, lambda row: row.model).items():
        # A setting splits a model's results where it differs between two at the same place.
        settings = [(row, _settings_of(row)) for row in own]
        places = _group_by(settings, lambda item: (item[0].cores, item[0].size)).values()
        names = sorted({name for _, values in settings for name in values})
        splitting = [k for k in names if any(len({v.get(k) for _, v in same}) > 1 for same in places)]
        drifting |= {k for k in names if k not in splitting and len({v.get(k) for _, v in settings}) > 1}
        # One series for each combination of the splitting settings, named by the first three of them.
        keyed = [(row, tuple(values.get(k) for k in splitting)) for row, values in settings]
        for key, same in _group_by(keyed, lambda item: item[1]).items():
            parts = [f"{k.rpartition('.')[2]} {(v or 'not set')[:24]}" for k, v in zip(splitting, key, strict=True)]
            more = "" if len(parts) <= 3 else f" and {len(parts) - 3} more"
            name = f"{model} ({', '.join(parts[:3])}{more})" if parts else model
            series.append(Series(name, [row for row, _ in same]))
    return series, sorted(drifting)


def _settings_of(row: ProbeResult) -> dict[str, str]:
    """Everything that determines a score besides model, budget, resolution and seed."""
    settings = {**row.protocol, "data fingerprint": row.fingerprint, "scored on": row.scored_on}
    settings |= {"weights": row.about} if row.about else {}
    return {name: value for name, value in flatten_settings(settings).items() if name.rpartition(".")[2] != "seed"}


def compare_with_paper(row: ProbeResult, dataset: str | None = None) -> Comparison | None:
    """A result, or its score on one of its further datasets, beside the paper's nearest number, if there is one."""
    name = row.dataset if dataset is None else dataset
    metric, metrics = row.on(dataset)
    value, kin = metrics.get(metric, math.nan), row.kin
    if kin is None or not math.isfinite(value):
        return None
    nearest = paper.nearest(row.task, name, metric, kin, row.cores, row.size)
    if nearest is None:
        return None
    gap = value - nearest.value
    better = (gap < 0) if lower_is_better(metric) else (gap > 0)
    return Comparison(nearest, gap, better, nearest.kin.size == kin.size, _differences_from(row, name, kin, nearest))


def _differences_from(row: ProbeResult, dataset: str, kin: paper.Kin, quoted: paper.PaperNumber) -> list[str]:
    notes = [
        _model_note(row, kin, quoted),
        f"the paper's number is at C = {quoted.cores}" if quoted.cores != row.cores else "",
        f"the paper's number is at {quoted.size} px" if quoted.size != row.size else "",
        *paper.dataset_notes(dataset),
        *(_data_notes(row) if dataset == row.dataset else []),
        *(f"another protocol: {setting}" for setting in paper.other_settings(row.task, row.protocol)),
        "scored on val, not on test" if row.scored_on == "val" and row.counts.get("test") else "",
    ]
    same = paper.find(row.task, dataset, quoted.metric, quoted.model, quoted.cores, quoted.size)
    notes += [f"Table {n.table} of the paper has {n.value:g} for the same" for n in same if n.value != quoted.value]
    return [note for note in notes if note]


def _model_note(row: ProbeResult, kin: paper.Kin, quoted: paper.PaperNumber) -> str:
    other = "" if quoted.kin.size == kin.size else f"; of another size, and {quoted.model} the paper's nearest"
    if kin.family != "VECA":
        return f"another size; {quoted.model} is the paper's nearest" if other else ""
    provenance = as_mapping(row.about.get("provenance"))
    if provenance.get("weights") == "random":
        return f"random weights, not the paper's VECA{other}"
    if "official_config" in provenance:
        return f"weights in the authors' format; that they are the paper's is not checked{other}"
    teacher = provenance.get("teacher")
    teacher = as_mapping(teacher).get("name", teacher)
    source = f", distilled from {printable(teacher)}" if isinstance(teacher, str) and teacher else ""
    return f"a VECA of our own{source}, not the paper's{other}"


def _data_notes(row: ProbeResult) -> list[str]:
    """Where this copy of the dataset differs from the published one: as the probe found, or by its number of images."""
    problems = row.protocol.get("problems")
    if isinstance(problems, list) and problems:
        return [f"{row.dataset}: {printable(str(problem))}" for problem in problems[:4]]
    count = sum(row.counts.values())
    published = sum(SPECS[row.dataset].sizes.values()) if row.dataset in SPECS else count
    return [f"{count:,} pictures of {row.dataset}; {published:,} were published"] if count != published else []


def results_table(group: Group, best: bool = False) -> ResultTable:
    """Every result of a group beside the paper's, or the best of each series."""
    names = list(dict.fromkeys([group.metric, *(name for row in group.rows for name in row.metrics)]))
    seeds = len({row.seed for row in group.rows}) > 1
    compared = any(compare_with_paper(row, dataset) for row in group.rows for dataset in (None, *row.also))
    heads = ["model", "C", "px", *(["seed"] if seeds else []), *names]
    heads += ["paper", "which", "gap", "notes"] if compared else []
    notes, rows = list[str](), list[list[str]]()
    for series in group.series:
        for row in [series.best] if best else series.rows:
            place = [*_place(row), *([str(row.seed)] if seeds else [])]
            for dataset in (None, *row.also):
                metric, metrics = row.on(dataset)
                name = series.name if dataset is None else f"↳ {dataset}, same head"
                rows.append([name, *place, *(metric_text(n, metrics.get(n, math.nan)) for n in names)])
                rows[-1] += _paper_cells(compare_with_paper(row, dataset), metric, notes) if compared else []
    return ResultTable(heads, rows, notes)


def _paper_cells(compared: Comparison | None, metric: str, notes: list[str]) -> list[str]:
    """The paper's number, its model, the gap and the numbers of the notes, which are added to `notes`."""
    if compared is None:
        return ["–", "–", "–", ""]
    notes += [note for note in compared.notes if note not in notes]
    numbers = sorted(notes.index(note) + 1 for note in compared.notes)
    n = compared.number
    which = f"{n.model}, {'' if n.cores is None else f'C {n.cores}, '}{n.size} px (Table {n.table})"
    return [metric_text(metric, n.value), which, gap_text(compared, metric), ", ".join(map(str, numbers))]


def gap_text(compared: Comparison, metric: str) -> str:
    """The gap with its verdict; between models of different sizes, the gap alone in brackets."""
    if not compared.same_size:
        return f"({metric_text(metric, compared.gap, '+')})"
    if metric_text(metric, abs(compared.gap)) == metric_text(metric, 0.0):  # equal as printed
        return f"{metric_text(metric, 0.0)} equal"
    return f"{metric_text(metric, compared.gap, '+')} {'better' if compared.better else 'worse'}"


def overview_table(groups: Iterable[Group]) -> ResultTable:
    """The best result of each series on each dataset, beside the paper's."""
    heads = ["dataset", "model", "C", "px", "metric", "best", "paper", "which", "gap", "notes"]
    rows, notes = [], list[str]()
    for group in groups:
        for series in group.series:
            best = series.best
            value = [metric_name(group.metric), metric_text(group.metric, best.value)]
            compared = _paper_cells(compare_with_paper(best), group.metric, notes)
            rows.append([f"{group.dataset}, {group.task}", series.name, *_place(best), *value, *compared])
    return ResultTable(heads, rows, notes)


def heat_grid(group: Group, series: Series) -> dict[str, Any] | None:
    """Scores of one series by resolution (rows) and budget (columns), where both vary; `plain` is without colours."""
    cores = sorted({row.cores for row in series.rows if row.cores is not None})
    sizes = sorted({row.size for row in series.rows if row.cores is not None})
    if len(cores) < 2 or len(sizes) < 2:
        return None
    values = {(s, c): series.mean(c, s) for s in sizes for c in cores}
    scaled = levels(values, lower_is_better(group.metric))
    rows = heat_rows(values, scaled, {s: f"{s} px" for s in sizes}, cores, partial(metric_text, group.metric))
    plain = [[name, *(text for text, _ in cells)] for name, cells in rows.items()]
    table = ResultTable(["cores", *map(str, cores)], plain)
    return {"series": series.name, "cores": cores, "rows": rows, "plain": table}


def class_table(group: Group) -> ResultTable | None:
    """Scores of all classes in the best result of each series, in the order of the first series, best first."""
    best = [(series, series.best) for series in group.series if series.best.per_class]
    if not best:
        return None
    first = best[0][1].per_class
    names = sorted(first, key=first.__getitem__, reverse=not lower_is_better(group.metric))
    # Classes that only other series have follow by name.
    names += sorted({name for _, row in best for name in row.per_class}.difference(first))
    text = partial(metric_text, group.metric)
    rows = [[name, *(text(row.per_class.get(name, math.nan)) for _, row in best)] for name in names]
    return ResultTable(["class", *(f"{series.name}, {row.place}" for series, row in best)], rows)


def paper_table(group: Group) -> ResultTable | None:
    """All numbers of the paper on the dataset of a group."""
    numbers = paper.find(group.task, group.dataset, group.metric)
    rows = [[n.printed, *_place(n), metric_text(n.metric, n.value), f"Table {n.table}"] for n in numbers]
    return ResultTable(["model", "C", "px", group.metric, "from"], rows) if rows else None


def _place(row: ProbeResult | paper.PaperNumber) -> list[str]:
    return ["–" if row.cores is None else str(row.cores), str(row.size)]
