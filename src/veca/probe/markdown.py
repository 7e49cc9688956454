"""The report of a results folder as Markdown, and its rows as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape

from veca.probe.curves import Picture
from veca.probe.results import Problem, Row
from veca.probe.tables import (
    Group,
    Table,
    at,
    class_table,
    compare,
    edge_note,
    glance_table,
    grid_table,
    results_table,
)
from veca.utils.text import duration, number

SHOWN_CLASSES, SHOWN_PICTURES = 5, 4
"""The best and the worst classes, where there are many more; examples of a gallery."""


def markdown(
    name: str,
    facts: Mapping[str, str],
    groups: Sequence[Group],
    curves: Mapping[Group, Sequence[Picture]],
    problems: Sequence[Problem],
    reading: Sequence[str],
) -> str:
    """The whole page; pictures are named where they lie, in `curves/` and `gallery/`."""
    parts = [f"# Probes: {md(name)}", "\n".join(f"- {md(term)}: {md(value)}" for term, value in facts.items())]
    if problems:
        parts.append("**Left out:**\n\n" + "\n".join(f"- {md(file)} {md(why)}" for file, why in problems))
    parts += ["## At a glance", table(glance_table(groups)), "\n".join(f"- {md(one)}" for one in reading)]
    for group in groups:
        parts += _group(group, curves[group])
    return "\n\n".join([*parts, *_rows(groups)]) + "\n"


def md(text: str) -> str:
    r"""Text that Markdown shows as it is.

    >>> md("a|b <i> [x](y) *z*")
    'a\\|b &lt;i&gt; \\[x\\](y) \\*z\\*'
    """
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", escape(text, quote=False))


def table(content: Table) -> str:
    head, *body = ("| " + " | ".join(map(md, cells)) + " |" for cells in (content.heads, *content.rows))
    text = "\n".join([head, "|" + " --- |" * len(content.heads), *body])
    notes = "\n".join(f"{i}. {md(note)}" for i, note in enumerate(content.notes, 1))
    return f"{text}\n\n{notes}" if notes else text


def _group(group: Group, curves: Sequence[Picture]) -> list[str]:
    parts = [f"## {md(group.title)}", table(results_table(group))]
    if group.drifting:
        parts.append(f"Also different between rows of one model: {md(', '.join(group.drifting))}.")
    parts += [f"![{md(picture.title)}](curves/{picture.name}.svg)\n\n{picture.caption}" for picture in curves]
    for series in group.series:
        if grid := grid_table(group, series):
            parts += [f"### {md(series.name)}: resolution × budget", table(grid)]
    if classes := class_table(group):
        rows, most = classes.rows, SHOWN_CLASSES
        if len(rows) > 2 * most:
            skipped = ["…", *[f"{len(rows) - 2 * most} more"] * (len(classes.heads) - 1)]
            rows = [*rows[:most], skipped, *rows[-most:]]
        parts += ["### Classes, best and worst", table(Table(classes.heads, rows))]
    for series in group.series:
        shown = [one for one in series.best.gallery if all(map(_plain, one.values()))][:SHOWN_PICTURES]
        if shown:
            kinds = ("image", "label", "prediction")
            cells = [" | ".join(f"![{kind}]({one[kind]})" if kind in one else "" for kind in kinds) for one in shown]
            lines = ["| image | label | prediction |", "| --- | --- | --- |", *(f"| {cell} |" for cell in cells)]
            parts += [f"### Predictions: {md(series.name)}, {at(series.best)}", "\n".join(lines)]
    return parts


def _plain(path: object) -> bool:
    """Whether a path can stand in a link as it is, and leads nowhere else."""
    return isinstance(path, str) and bool(re.fullmatch(r"gallery(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+", path))


def _rows(groups: Sequence[Group]) -> list[str]:
    """What each row is, and the protocols they followed, each once."""
    protocols: dict[str, int] = {}
    heads = ["row", "best rate", "decay", "seed", "scored on", "time", "date", "versions", "protocol", ""]
    lines = []
    for row in (row for group in groups for series in group.series for row in series.rows):
        text = json.dumps(row.protocol, indent=1, ensure_ascii=True, default=str)
        key = protocols.setdefault(text, len(protocols) + 1)
        rate, decay = (number(row.best.get(k, math.nan), "g") for k in ("rate", "decay"))
        took = duration(sum(row.seconds.values())) if row.seconds else "–"
        versions = ", ".join(f"{k} {v}" for k, v in row.versions.items())
        lines.append([row.file, rate, decay, str(row.seed), row.scored_on, took, row.date, versions, str(key)])
        lines[-1].append(edge_note(row))
    parts = ["## Every row", table(Table(heads, lines))]
    for text, key in protocols.items():
        parts.append(f"### Protocol {key}\n\n```json\n{text}\n```")
    return parts


def rows_csv(rows: Sequence[Row]) -> str:
    """One line for each row and, after it, for each further set that its head was scored on."""
    scored: list[tuple[Row, str | None, Mapping[str, float]]] = []
    for row in rows:
        scored += [(row, None, row.metrics), *((row, other, values) for other, values in row.also.items())]
    names = list(dict.fromkeys(name for _, _, values in scored for name in values))
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_csv_line(rows[0], None), *map(_cell, names)])
    for row, other, values in scored:
        cells = [*_csv_line(row, other).values(), *(values.get(name) for name in names)]
        writer.writerow([_cell(cell) for cell in cells])
    return text.getvalue()


def _csv_line(row: Row, other: str | None) -> dict[str, object]:
    found = compare(row, other)
    n = found.number if found else None
    return {
        "task": row.task,
        "dataset": other or row.dataset,
        "head_of": row.dataset if other else None,
        "model": row.model,
        "kind": row.kind,
        "cores": row.cores,
        "size": row.size,
        "seed": row.seed,
        "scored_on": row.scored_on,
        "metric": row.metric,
        "paper": n and n.value,
        "paper_model": n and n.model,
        "paper_cores": n and n.cores,
        "paper_size": n and n.size,
        "paper_table": n and n.table,
        "gap": found and round(found.gap, 6),
        "notes": found and "; ".join(found.notes),
        "rate": row.best.get("rate"),
        "decay": row.best.get("decay"),
        **{split: row.counts.get(split) for split in ("train", "val", "test")},
        "fingerprint": row.fingerprint,
        "seconds": math.fsum(row.seconds.values()) if row.seconds else None,
        "date": row.date,
        "versions": json.dumps(row.versions, sort_keys=True),
        "protocol": json.dumps(row.protocol, sort_keys=True, default=str),
        "file": row.file,
    }


def _cell(value: object) -> object:
    """A text that a spreadsheet would run as a formula gets a quote before it."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value
