"""Write the card of a model from what is recorded: its configuration and provenance, its probes, its training run.

`python tools/card.py MODEL --results FOLDER --run RUN --name veca_tiny.TAG --out README.md`

What no file records, such as licences, is in card.toml beside this file. What is recorded nowhere is left out.
"""

from __future__ import annotations

import argparse
import math
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

import veca
from veca.checkpoint.format import weights_hash
from veca.compute import CostTable
from veca.config import size_name
from veca.data.index import ImageIndex
from veca.errors import ArgumentError, VecaError
from veca.probe.pareto import table_rows
from veca.probe.report import Group, group_rows
from veca.probe.results import ProbeResult, lower_is_better, metric_name, metric_unit, read_results
from veca.report.page import escape_markdown, write_text
from veca.train.logger import grid_means, read_object, read_table
from veca.utils.text import duration, number

TOOLS = Path(__file__).resolve().parent
UNSHARED = {"preprocessing", "train_view", "side", "note", "precision", "device", "optimized", "decode", "skipped"}
"""Parts of a probe's protocol that may differ between sizes and backbones."""
OBJECTIVE = {
    "cls_weight": "cosine distance of the first core to the teacher's global feature",
    "dense_weight": "cosine distance of the patches to its feature map",
    "mse_weight": "squared error of the patches",
    "logits_weight": "divergence of the logits that its classifier gives from both global features",
}
Line = tuple[str, dict[Any, str]]
"""Label of a row of a table, and its cells by column."""
Facts = dict[str, Any]


def pivot(corner: str, lines: Iterable[Line]) -> list[list[str]]:
    """A table with all columns, numbers first; empty: there are no lines."""
    lines = list(lines)
    columns = sorted({key for _, cells in lines for key in cells}, key=lambda key: (isinstance(key, str), key))
    rows = [[label, *(cells.get(key, "–") for key in columns)] for label, cells in lines]
    return [[corner, *map(str, columns)], *rows] if rows else []


def show(metric: str, value: float) -> str:
    return number(value, ".1f" if metric_unit(metric) == "%" else ".3f")


def at_width(width: float) -> str:
    return "" if width == 1 else f", width {width:g}"


def find_facts(section: Mapping[str, Facts], name: str, entry: str) -> Facts:
    """What card.toml says of a teacher, by its name, or of images, by a pattern of file names."""
    for key, facts in section.items():
        if fnmatch(Path(name).name, facts["files"]) if "files" in facts else key == name:
            return {"name": name, **facts}
    raise ArgumentError(f"{TOOLS / 'card.toml'} says nothing of {name!r}: add an entry {entry}")


def read_probes(folders: Sequence[Path], sha256: str, teachers: Sequence[str], known: Facts) -> list[Group]:
    """Rows of the weights with this hash, named by their width, and those of teachers with the same settings."""
    rows: list[ProbeResult] = []
    for folder in folders:
        found, unusable = read_results(folder)
        rows += [row for row in found if not row.native]
        for name, reason in unusable:
            print(f"{folder / name} is left out: it {reason}", file=sys.stderr)
        if not any(row.about.get("sha256") == sha256 for row in found):
            raise ArgumentError(f"{folder} has no row of these weights: run `veca probe` on them with --out {folder}")
    own = [row for row in rows if row.about.get("sha256") == sha256]
    of_teachers = [row for row in rows if row.model in teachers and any(same_settings(row, each) for each in own)]
    widths = {row.model: float(row.model.rpartition(", width ")[2]) if ", width " in row.model else 1.0 for row in own}
    own.sort(key=lambda row: (-widths[row.model], row.seed))
    named = [replace(row, model=at_width(widths[row.model])) for row in own]
    return group_rows([each for row in [*named, *of_teachers] for each in split_row(row, known)])


def same_settings(one: ProbeResult, other: ProbeResult) -> bool:
    shared = (one.protocol.keys() & other.protocol.keys()) - UNSHARED
    same = all(one.protocol[key] == other.protocol[key] for key in shared)
    return same and (one.task, one.fingerprint) == (other.task, other.fingerprint)


def split_row(row: ProbeResult, known: Facts) -> Iterator[ProbeResult]:
    """A row with the name of its dataset; before it, of a dense head that was scored on another split, that on val."""
    name = known.get(row.dataset, {}).get("name", escape_markdown(row.dataset))
    if row.task in ("segment", "depth") and row.scored_on != "val":
        best = min if lower_is_better(row.metric) else max
        values = {row.metric: best(head["val"] for head in row.sweep)}
        yield replace(row, dataset=f"{name}, val", scored_on="val", metrics=values)
        name += f", {row.scored_on}"
    yield replace(row, dataset=name)


class Probe:
    """The scores of a group: tables have those of the first seed."""

    def __init__(self, group: Group, teachers: Sequence[str], about: Mapping[str, str]) -> None:
        words = {"classify": "linear", "knn": f"{group.rows[0].protocol.get('ks', ['k'])[-1]} nearest neighbours"}
        self.label = f"{group.dataset}, {words[group.task]}" if group.task in words else group.dataset
        self.about = about.get(group.dataset.partition(", ")[0])
        self.own: dict[tuple[int, int | None, str], list[ProbeResult]] = {}
        for row in (row for row in group.rows if row.model not in teachers):
            self.own.setdefault((row.size, row.cores, row.model), []).append(row)
            if not same_settings(row, group.rows[0]):
                raise ArgumentError(f"rows of {self.label} have different settings: keep each in a folder of its own")
        self.first = [rows[0] for rows in self.own.values()]
        self.of_teachers = [row for row in group.rows if row.model in teachers and row.seed == self.first[0].seed]
        sizes = sorted(row.size for row in self.first)
        self.size = max(sizes, key=sizes.count)  # the one with most settings

    def describe(self) -> str:
        row, seeds = self.first[0], [[each.value for each in rows] for rows in self.own.values()]
        metric = metric_name(row.metric).replace(", ", " in ").replace(" ↓", " (lower is better)")
        text = f"{metric} on {row.counts[row.scored_on]:,} images of {row.scored_on}, {self.size} px"
        text += ", where the head's rate was chosen" if row.scored_on == "val" else ""
        if (count := max(map(len, seeds))) > 1:
            spread = show(row.metric, max(max(values) - min(values) for values in seeds))
            text += f"; {count} seeds of the head differ by up to {spread}"
        return f"{self.about}; {text}" if self.about else text

    def by_budget(self, columns: Mapping[str, str]) -> Iterator[Line]:
        # A teacher has no width: it is beside the largest.
        cells = {columns[row.model]: show(row.metric, row.value) for row in self.of_teachers if row.size == self.size}
        for width in dict.fromkeys(row.model for row in self.first):
            rows = [row for row in self.first if (row.size, row.model) == (self.size, width)]
            yield self.label + width, {row.cores: show(row.metric, row.value) for row in rows} | cells
            cells = {}

    def by_size(self, columns: Mapping[str, str]) -> Iterator[Line]:
        """Of the settings that have more than one size."""
        lines: dict[str, dict[Any, str]] = {}
        for row in sorted(self.first, key=lambda row: (row.model, row.cores)) + self.of_teachers:
            ending = f"{row.cores} cores{row.model}" if row.cores else columns[row.model]
            lines.setdefault(f"{self.label}, {ending}", {})[row.size] = show(row.metric, row.value)
        yield from ((label, cells) for label, cells in lines.items() if len(cells) > 1)

    def is_weaker(self) -> bool:
        """Whether a teacher is better than every setting."""
        best = max(row.goodness for row in self.first if row.size == self.size)
        return any(row.goodness > best for row in self.of_teachers if row.size == self.size)


def losses_by_budget(run: Path, recorded: float | None) -> Iterator[Line]:
    """Losses of the last validation of a run, which must be the model's."""
    rows = read_table(run / "validation.csv")
    if not rows:
        raise ArgumentError(f"{run} has no validation.csv: name the folder of a `veca distill` run with validation")
    last = [row for row in rows if row["step"] == max(each["step"] for each in rows)]
    grid = {(int(row["resolution"]), int(row["budget"]), row.get("width", 1.0)): row for row in last}
    mean = grid_means(grid)["total"]
    if recorded is None or not math.isclose(mean, recorded, rel_tol=1e-5):
        raise ArgumentError(f"{run} is another run: its last validation loss is {mean:.6g}, the model's {recorded}")
    lines: dict[str, dict[Any, str]] = {}
    for size, cores, width in sorted(grid, key=lambda key: (key[0], -key[2], key[1])):
        lines.setdefault(f"{size} px{at_width(width)}", {})[cores] = f"{grid[size, cores, width]['total']:.3f}"
    yield from lines.items()


def cost_lines(table: CostTable) -> Iterator[list[str]]:
    """The Pareto front of a quality-cost table, below its header."""
    names, share = list(table.settings[0].scores), "time_share" if table.device else "flops_share"
    yield ["cores", "width", "pixels", "cost", "quality", *map(escape_markdown, names)]
    for row in sorted((row for row in table_rows(table) if row["front"]), key=lambda row: row["quality"]):
        setting = f"{row['cores']}", f"{row['width']:g}", f"{row['size']}", f"{row[share]:.2f}", f"{row['quality']:.3f}"
        yield [*setting, *(show(name.split()[-1], row[name]) for name in names)]


def list_stages(provenance: Facts) -> list[dict[str, Any]]:
    """The runs that led to the weights, the first one first."""
    earlier = list_stages(provenance["started_from"]) if "started_from" in provenance else []
    if "recipe" not in provenance:
        return earlier
    sizes = {int(size) for phase in provenance["recipe"]["resolutions"] for size in phase["odds"]}
    members = provenance["teacher"].get("teachers", [provenance["teacher"]])
    return [*earlier, {**provenance, "sizes": sorted(sizes), "members": members}]


def join_words(items: Sequence[object]) -> str:
    words = [f"{item:g}" if isinstance(item, float) else str(item) for item in items]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def render_card(folder: Path, name: str, results: Sequence[Path] = (), run: Path | None = None) -> str:
    """The card of a model as Markdown."""
    known = tomllib.loads((TOOLS / "card.toml").read_text("utf-8"))
    model, stored = veca.load(folder, "cpu"), veca.load(folder, "meta", dtype=None)
    about = model.provenance
    if about.get("weights") != "distilled" or "recipe" not in about:
        raise ArgumentError(f"{folder} does not record a distillation: cards are for what `veca distill` trained")
    stages, recipe = list_stages(about), about["recipe"]
    members = {each["name"]: each for stage in stages for each in stage["members"]}
    entry = "under [images] whose `files` match it"
    sources = {source for stage in stages for source in stage["recipe"]["data"]["train"]}
    images = {facts["tag"]: facts for facts in (find_facts(known["images"], s, entry) for s in sorted(sources))}
    teachers = [
        find_facts(known["teachers"], name, f'[teachers."{name}"]')
        | {"weights": str(each.get("weights", "")).partition(" (sha256")[0]}
        for name, each in members.items()
    ]
    groups = read_probes(results, weights_hash(model), list(members), known["probes"])
    abouts = {facts["name"]: facts["about"] for facts in known["probes"].values()}
    probes = [Probe(group, list(members), abouts) for group in groups]
    columns = {each: "its teacher" if len(members) == 1 else f"`{each}`" for each in members}
    objectives = [recipe["objective"], *(each.get("objective") or {} for each in recipe.get("teachers", ()))]
    parts = [text for key, text in OBJECTIVE.items() if any(each.get(key, key[0] != "l") for each in objectives)]
    environment = Environment(loader=FileSystemLoader(TOOLS), trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"words": join_words, "md": escape_markdown, "duration": duration, "comma": "{:,}".format}
    return environment.get_template("card.md").render(
        name=name, config=model.config, size=size_name(model.config), about=about, stages=stages, teachers=teachers,
        images=list(images.values()), trained=sorted({size for stage in stages for size in stage["sizes"]}),
        parameters=sum(p.numel() for p in model.parameters()), objective=parts,
        probes=probes, table_of=model.quality_cost,
        counts={kind: len(ImageIndex.load(run / f"{kind}.index")) if run else 0 for kind in ("train", "validation")},
        seconds=read_object(run / "summary.json").get("seconds") if run else None,
        losses=pivot("cores", losses_by_budget(run, about.get("validation")) if run else ()),
        budgets=pivot("cores", (line for each in probes for line in each.by_budget(columns))),
        sizes=pivot("pixels", (line for each in probes for line in each.by_size(columns))),
        costs=list(cost_lines(model.quality_cost)) if model.quality_cost else [],
        dtype=str(stored.norm.weight.dtype).removeprefix("torch."),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--results", type=Path, nargs="+", default=[], help="folders that `veca probe` wrote to")
    parser.add_argument("--run", type=Path, help="folder of the last run, for its validation losses")
    parser.add_argument("--name", required=True, help="name of the weights, as veca_tiny.TAG")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    given = parser.parse_args()
    try:
        write_text(given.out, render_card(given.model, given.name, given.results, given.run))
    except VecaError as error:
        sys.exit(f"card.py: {error}")


if __name__ == "__main__":
    main()
