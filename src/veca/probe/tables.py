"""Tables of rows: ours beside the paper's. All text here is plain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from veca.data.datasets import SPECS
from veca.probe import paper
from veca.probe.results import Row, flat, lower_is_better, mapping, metric_name, shown
from veca.utils.text import printable


@dataclass(frozen=True)
class Comparison:
    """A number of ours beside one of the paper's."""

    number: paper.Number
    gap: float
    """Ours less the paper's."""
    better: bool
    """Than the paper's; of equal ones, False."""
    same_size: bool
    """Of model."""
    notes: Sequence[str]
    """What makes them unlike; nothing known: none."""


@dataclass(frozen=True)
class Table:
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    """Cells name them by their number, from 1."""


@dataclass(frozen=True, eq=False)
class Series:
    """Rows of one model, asked for alike but for budget, resolution and seed."""

    name: str
    rows: Sequence[Row]

    @property
    def best(self) -> Row:
        return max(self.rows, key=lambda row: row.goodness)

    def mean(self, cores: int | None, size: int) -> float:
        """Over the seeds."""
        found = [row.value for row in self.rows if (row.cores, row.size) == (cores, size) and math.isfinite(row.value)]
        return math.fsum(found) / len(found) if found else math.nan


@dataclass(frozen=True, eq=False)
class Group:
    """All rows of one task, dataset and metric."""

    task: str
    dataset: str
    metric: str
    rows: Sequence[Row]
    series: Sequence[Series] = field(init=False)
    drifting: Sequence[str] = field(init=False)
    """Settings that differ along a series, with the budget or the resolution."""

    def __post_init__(self) -> None:
        series, drifting = _series(self.rows)
        object.__setattr__(self, "series", series)
        object.__setattr__(self, "drifting", drifting)

    @property
    def title(self) -> str:
        return f"{self.dataset} · {self.task}, {self.metric}"

    @property
    def cores(self) -> list[int]:
        return sorted({row.cores for row in self.rows if row.cores is not None})

    @property
    def sizes(self) -> list[int]:
        return sorted({row.size for row in self.rows})


def _series(rows: Sequence[Row]) -> tuple[list[Series], list[str]]:
    """Rows by model, and apart where the same budget and resolution were run in two ways.

    A setting that goes with the resolution, as the crop does, does not make another series; it is named as drifting.
    """
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row.model, []).append(row)
    found, drifting = [], set[str]()
    for model, own in by_model.items():
        every = {id(row): _settings(row) for row in own}
        cells: dict[tuple[int | None, int], list[dict[str, str]]] = {}
        for row in own:
            cells.setdefault((row.cores, row.size), []).append(every[id(row)])
        names = sorted({name for settings in every.values() for name in settings})
        apart = [k for k in names if any(len({s.get(k) for s in cell}) > 1 for cell in cells.values())]
        drifting |= {k for k in names if k not in apart and len({s.get(k) for s in every.values()}) > 1}
        kinds: dict[tuple[str | None, ...], list[Row]] = {}
        for row in own:
            kinds.setdefault(tuple(every[id(row)].get(k) for k in apart), []).append(row)
        for values, same in kinds.items():
            told = [f"{k.rpartition('.')[2]} {(v or 'not set')[:24]}" for k, v in zip(apart, values, strict=True)]
            more = "" if len(told) <= 3 else f" and {len(told) - 3} more"
            found.append(Series(f"{model} ({', '.join(told[:3])}{more})" if told else model, same))
    return found, sorted(drifting)


def _settings(row: Row) -> dict[str, str]:
    """All that decides a number beside model, budget, resolution and seed."""
    about = {"weights": row.about} if row.about else {}
    settings = flat({**row.protocol, **about, "data fingerprint": row.fingerprint, "scored on": row.scored_on})
    return {name: value for name, value in settings.items() if name.rpartition(".")[2] != "seed"}


def groups(rows: Sequence[Row]) -> list[Group]:
    """The rows of each task, dataset and metric together."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.task, row.dataset, row.metric), []).append(row)
    order = ("classify", "knn", "segment", "depth")
    keys = sorted(found, key=lambda k: (order.index(k[0]) if k[0] in order else len(order), k))
    return [Group(*key, found[key]) for key in keys]


def compare(row: Row, dataset: str | None = None) -> Comparison | None:
    """The row, or its score on one of its further sets, beside the paper's nearest number, if there is one."""
    name, metric, value = row.dataset, row.metric, row.value
    if dataset is not None:
        name, metric, value = dataset, *also_value(row, dataset)
    kin = row.kin
    if kin is None or not math.isfinite(value):
        return None
    found = paper.nearest(row.task, name, metric, kin, row.cores, row.size)
    if found is None:
        return None
    gap = value - found.value
    better = (gap < 0) if lower_is_better(metric) else (gap > 0)
    return Comparison(found, gap, better, found.model_size == kin.size, _notes(row, name, kin, found))


def also_value(row: Row, dataset: str) -> tuple[str, float]:
    """The score on a further set: by the row's own metric, or else by the first."""
    metrics = row.also[dataset]
    name = row.metric if row.metric in metrics else next(iter(metrics), row.metric)
    return name, metrics.get(name, math.nan)


def _notes(row: Row, dataset: str, kin: paper.Kin, found: paper.Number) -> list[str]:
    """Everything known that makes two numbers unlike."""
    notes = [_model_note(row, kin, found)]
    if found.cores != row.cores:
        notes.append(f"the paper's number is at C = {found.cores}")
    if found.size != row.size:
        notes.append(f"the paper's number is at {found.size} px")
    notes.append(paper.same_dataset(dataset)[1])
    notes.append(paper.caveat(dataset))
    if dataset == row.dataset:
        notes += _data_notes(row)
    notes += [f"another protocol: {one}" for one in paper.other_settings(row.task, row.protocol)]
    if row.scored_on == "val" and row.counts.get("test"):
        notes.append("scored on val, not on test")
    same = paper.find(row.task, dataset, found.metric, found.model, found.cores, found.size)
    notes += [f"Table {n.table} of the paper has {n.value:g} for the same" for n in same if n.value != found.value]
    return [note for note in notes if note]


def _model_note(row: Row, kin: paper.Kin, found: paper.Number) -> str:
    other = "" if found.model_size == kin.size else f"; of another size, and {found.model} the paper's nearest"
    if kin.family != "VECA":
        return f"another size; {found.model} is the paper's nearest" if other else ""
    provenance = mapping(row.about.get("provenance"))
    if provenance.get("weights") == "random":
        return f"random weights, not the paper's VECA{other}"
    if "official_config" in provenance:
        return f"weights in the authors' format; that they are the paper's is not checked{other}"
    teacher = provenance.get("teacher")
    teacher = mapping(teacher).get("name", teacher)
    source = f", distilled from {printable(teacher)}" if isinstance(teacher, str) and teacher else ""
    return f"a VECA of our own{source}, not the paper's{other}"


def _data_notes(row: Row) -> list[str]:
    """Where this copy of the dataset is not what was published, as the probe found or by the number of pictures."""
    problems = row.protocol.get("problems")
    if isinstance(problems, list) and problems:
        return [f"{row.dataset}: {printable(str(problem))}" for problem in problems[:4]]
    spec, pictures = SPECS.get(row.dataset), sum(row.counts.values())
    if spec is None or pictures == sum(spec.sizes.values()):
        return []
    return [f"{pictures:,} pictures of {row.dataset}; {sum(spec.sizes.values()):,} were published"]


def results_table(group: Group, best: bool = False) -> Table:
    """Every row of a group beside the paper, or the best of each series."""
    names = list(dict.fromkeys([group.metric, *(name for row in group.rows for name in row.metrics)]))
    seeds = len({row.seed for row in group.rows}) > 1
    beside = any(compare(row) for row in group.rows) or any(compare(row, d) for row in group.rows for d in row.also)
    heads = ["model", "C", "px", *(["seed"] if seeds else []), *names]
    heads += ["paper", "which", "gap", "notes"] if beside else []
    notes: list[str] = []
    rows = []
    for series in group.series:
        for row in [series.best] if best else series.rows:
            where = [series.name, _cores(row.cores), str(row.size), *([str(row.seed)] if seeds else [])]
            rows.append([*where, *(shown(n, row.metrics.get(n, math.nan)) for n in names)])
            rows[-1] += _beside(compare(row), row.metric, notes) if beside else []
            for other in row.also:
                metric, value = also_value(row, other)
                cells = {metric: shown(metric, value), **{n: shown(n, v) for n, v in row.also[other].items()}}
                rows.append([f"↳ {other}, same head", *where[1:], *(cells.get(n, "–") for n in names)])
                rows[-1] += _beside(compare(row, other), metric, notes) if beside else []
    return Table(heads, rows, notes)


def _beside(found: Comparison | None, metric: str, notes: list[str]) -> list[str]:
    """Cells of the paper's number, its model, the gap and the numbers of the notes, which are added to `notes`."""
    if found is None:
        return ["–", "–", "–", ""]
    notes += [note for note in found.notes if note not in notes]
    numbers = sorted(notes.index(note) + 1 for note in found.notes)
    n = found.number
    where = f"{n.model}, {'' if n.cores is None else f'C {n.cores}, '}{n.size} px (Table {n.table})"
    return [shown(metric, n.value), where, gap_text(found, metric), ", ".join(map(str, numbers))]


def gap_text(found: Comparison, metric: str) -> str:
    """The gap and what it means; of models of different sizes, the gap alone."""
    if not found.same_size:
        return f"({shown(metric, found.gap, '+')})"
    if shown(metric, abs(found.gap)) == shown(metric, 0.0):
        return f"{shown(metric, 0.0)} equal"
    return f"{shown(metric, found.gap, '+')} {'better' if found.better else 'worse'}"


def glance_table(groups: Iterable[Group]) -> Table:
    """The best row of each series on each dataset, beside the paper."""
    heads = ["dataset", "model", "C", "px", "metric", "best", "paper", "which", "gap", "notes"]
    rows, notes = [], list[str]()
    for group in groups:
        for series in group.series:
            best = series.best
            where = [f"{group.dataset}, {group.task}", series.name, _cores(best.cores), str(best.size)]
            value = [metric_name(group.metric), shown(group.metric, best.value)]
            rows.append([*where, *value, *_beside(compare(best), group.metric, notes)])
    return Table(heads, rows, notes)


def grid_table(group: Group, series: Series) -> Table | None:
    """Resolutions × budgets of one series, where both vary."""
    cores = sorted({row.cores for row in series.rows if row.cores is not None})
    sizes = sorted({row.size for row in series.rows if row.cores is not None})
    if len(cores) < 2 or len(sizes) < 2:
        return None
    rows = [[f"{size} px", *(shown(group.metric, series.mean(c, size)) for c in cores)] for size in sizes]
    return Table(["cores", *map(str, cores)], rows)


def class_table(group: Group) -> Table | None:
    """Every class in the best row of each series, from the first series' best class to its worst."""
    best = [(series, series.best) for series in group.series if series.best.per_class]
    if not best:
        return None
    first = best[0][1].per_class
    names = sorted(first, key=first.__getitem__, reverse=not lower_is_better(group.metric))
    names += sorted({name for _, row in best for name in row.per_class}.difference(first))
    rows = [[name, *(shown(group.metric, row.per_class.get(name, math.nan)) for _, row in best)] for name in names]
    return Table(["class", *(f"{series.name}, {at(row)}" for series, row in best)], rows)


def paper_table(group: Group) -> Table | None:
    """All the paper has on this dataset."""
    found = paper.find(group.task, group.dataset, group.metric)
    rows = [[n.printed, _cores(n.cores), str(n.size), shown(n.metric, n.value), f"Table {n.table}"] for n in found]
    return Table(["model", "C", "px", group.metric, "from"], rows) if rows else None


def at(row: Row) -> str:
    """Where a row stands: its budget and resolution."""
    return f"{'' if row.cores is None else f'C = {row.cores}, '}{row.size} px"


def edge_note(row: Row) -> str:
    """Whether the best of a sweep lies at its end, where a wider one might do better."""
    rates = sorted({one["rate"] for one in row.sweep if "rate" in one})
    if len(rates) > 1 and row.best.get("rate") in (rates[0], rates[-1]):
        return f"the {'lowest' if row.best['rate'] == rates[0] else 'highest'} rate of the sweep: others may do better"
    return ""


def _cores(cores: int | None) -> str:
    return "–" if cores is None else str(cores)
