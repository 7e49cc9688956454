"""The report of a fine-tune: one page, made of what the run left in its folder, at any time."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from veca.errors import ArgumentError, VecaError
from veca.report.charts import Line, line_chart, smooth
from veca.report.gallery import class_colours
from veca.report.page import details, figure, heat_table, section, table, write_page
from veca.train.csv_log import METRICS, VALIDATION, read_table
from veca.utils.text import duration, number, printable

ASKED, SHOWN = "finetune.json", 12


def is_tuned(folder: Path) -> bool:
    """Whether a folder is one that `veca finetune` writes to."""
    return (folder / ASKED).is_file()


def write_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a fine-tune, of the files that are there; its path comes back."""
    try:
        return _write_report(folder)
    except VecaError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ArgumentError(
            f"{folder}: {ASKED} or result.json is not as `veca finetune` wrote it ({type(error).__name__}: {error}); "
            "the same command writes them again"
        ) from error


def _write_report(folder: Path) -> Path:
    asked, result = (_read(folder / name) for name in (ASKED, "result.json"))
    rows = read_table(folder / METRICS)
    out = folder / "report.html"
    told = [f"<p>{escape(printable(problem))}</p>" for problem in result.get("problems", [])]
    if not result:
        told = ["<p><strong>The run has not come to its end.</strong> The same command continues it.</p>"]
    write_page(
        out,
        name=printable(folder.resolve().name),
        eyebrow="VECA fine-tuning",
        banner="".join(told),
        facts=_facts(asked, result, rows),
        sections=[
            *([section("Scores", _scores(result))] if result else []),
            section("Curves", _curves(folder, rows, result.get("metric", "top1"))),
            *([section("Classes", _classes(result)), section("Pictures", _gallery(folder, result))] if result else []),
            section("What was asked", f"<pre>{escape(json.dumps(asked, indent=1, ensure_ascii=False))}</pre>"),
        ],
        footer=f"Made of the files in the folder on {datetime.now():%d %B %Y}.",
    )
    return out


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _facts(asked: Mapping[str, Any], result: Mapping[str, Any], rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    data = asked.get("data", {})
    counts = ", ".join(f"{name} {data[name]:,}" for name in ("train", "val", "test") if name in data)
    last = rows[-1] if rows else {}
    facts = {
        "Model": str(asked.get("model")),
        "Task": str(asked.get("task")),
        "Data": f"{data.get('name')}: {counts}",
        "Steps": f"{number(last.get('step', math.nan), ',.0f')} of {result['steps']:,}" if result else "under way",
        "Time, training": duration(last.get("seconds", math.nan)),
        "Images per second": number(last.get("images_per_s", math.nan), ",.1f"),
    }
    if result:
        metric, cores = result["metric"], str(result["cores"])
        after, before = result["after"][cores][metric], result["before"].get(cores, {}).get(metric)
        probe = "" if before is None else f"; the linear probe it began from {before:.2f}"
        facts[f"{metric} on {result['scored_on']}, C = {cores}"] = f"{after:.2f} %{probe}"
        facts["Best on val"] = f"{result['best']['score']:.2f} % at step {result['best']['step']:,}, kept"
    return {escape(printable(term)): escape(printable(value)) for term, value in facts.items()}


def _scores(result: Mapping[str, Any]) -> str:
    metric, after, before = result["metric"], result["after"], result["before"]
    names = list(next(iter(after.values())))
    body = [
        [
            escape(cores),
            number(before.get(cores, {}).get(metric, math.nan), ".2f"),
            *(f"{v[name]:.2f}" for name in names),
        ]
        for cores, v in after.items()
    ]
    lines = [
        Line(name, [(float(c), v[metric]) for c, v in found.items()], i, dots=True)
        for i, (name, found) in enumerate((("fine-tuned", after), ("linear probe", before)))
        if found
    ]
    label = f"{metric} against budget"
    where = f"On {escape(result['scored_on'])}, in percent, by the weights that were best on val."
    return figure(
        "Against the budget",
        line_chart(lines, "budget, cores", f"{metric}, %", label, [float(c) for c in after], log=False),
        f"{where} The linear probe is the head at the start, on frozen features: one head for all budgets.",
    ) + table(["cores", f"linear probe, {escape(metric)}", *map(escape, names)], body)


def _curves(folder: Path, rows: Sequence[Mapping[str, float]], metric: str) -> str:
    loss = [(row["step"], row["total"]) for row in rows if "total" in row]
    rate = [(row["step"], row["learning_rate"]) for row in rows if "learning_rate" in row]
    val: dict[str, dict[int, list[tuple[float, float]]]] = {metric: {}, "loss": {}}
    for row in read_table(folder / VALIDATION):
        for name in val:
            if name in row:
                val[name].setdefault(int(row["budget"]), []).append((row["step"], row[name]))
    drawn = {
        name: [Line(f"C = {c}", points, i, dots=True) for i, (c, points) in enumerate(sorted(by.items()))]
        for name, by in val.items()
    }
    train = [Line("raw", loss, 0, faint=True), Line("train, smoothed", smooth(loss, 0.05), 0)]
    moved = [line._replace(name=f"val, {line.name}", colour=line.colour + 1) for line in drawn["loss"]]
    return "\n".join(
        [
            figure(f"{escape(metric)} on val", line_chart(drawn[metric], "step", f"{metric}, %", metric, log=False)),
            figure("Loss", line_chart([*train, *moved], "step", "loss", "loss against steps", log=False)),
            figure(
                "Learning rate",
                line_chart([Line("rate", rate)], "step", "rate", "rate", log=False),
            ),
        ]
    )


def _classes(result: Mapping[str, Any]) -> str:
    classes = [escape(printable(name)) for name in result["classes"]]
    scored = sorted(result["per_class"].items(), key=lambda item: item[1])
    each = table(
        ["class", f"{escape(result['metric'])}, %"], [[escape(printable(k)), f"{v:.2f}"] for k, v in scored], words={0}
    )
    pairs = [[classes[true], classes[said], f"{count:,}"] for true, said, count in result["confusions"]]
    heads = ["class", "taken for", "pixels" if result["metric"] == "mIoU" else "pictures"]
    parts = [figure("Taken for each other", table(heads, pairs[:SHOWN], words={0, 1}))]
    if result["matrix"]:
        shares = [[count / max(1, sum(row)) for count in row] for row in result["matrix"]]
        cells = {
            f"{i} {name}": [(f"{100 * share:.0f}" if share >= 0.005 else "", share) for share in row]
            for i, (name, row) in enumerate(zip(classes, shares, strict=True))
        }
        said = "Rows: the true class. Columns: what was said of it, in percent."
        numbered = [str(i) for i in range(len(classes))]
        parts.append(details("All classes against all", heat_table("class", numbered, cells, said)))
    return "\n".join([*parts, details(f"All {len(classes):,} classes, worst first", each, len(classes) <= 20)])


def _gallery(folder: Path, result: Mapping[str, Any]) -> str:
    strips = []
    for one in result["gallery"]:
        shown = [
            f'<figure><img src="{_picture(folder, one[key])}" alt="{key}" loading="lazy" />'
            f"<figcaption>{escape(printable(one.get('said', key)))}</figcaption></figure>"
            for key in ("image", "label", "prediction")
            if key in one
        ]
        strips.append("".join(shown))
    if result["asked"]["task"] == "classify":  # one picture each: side by side
        return f'<div class="strip">{"".join(strips)}</div>'
    names = result["classes"]
    key = " ".join(
        f'<span style="color:rgb({r},{g},{b})">■</span> {escape(printable(name))}'
        for name, (r, g, b) in zip(names, class_colours(len(names)), strict=True)
    )
    return "".join(f'<div class="strip">{strip}</div>' for strip in strips) + f"<p>{key}</p>"


def _picture(folder: Path, name: str) -> str:
    """One of the gallery, as a data address; nothing else in the file system."""
    place = folder / "gallery" / Path(name).name
    kind = "webp" if place.suffix == ".webp" else "png"
    data = base64.b64encode(place.read_bytes()).decode() if place.is_file() else ""
    return f"data:image/{kind};base64,{data}"
