"""Report of a fine-tuning run: `report.html`, from the files in the folder of the run, at any time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from veca.errors import ArgumentError, VecaError
from veca.report.charts import Chart, Line, Point, line_chart, smooth
from veca.report.gallery import class_colours
from veca.report.page import data_uri, write_page
from veca.train.csv_log import METRICS, VALIDATION, read_object, read_table
from veca.utils.text import duration, number

SETTINGS_FILE = "finetune.json"
SHOWN_PAIRS = 12  # of classes that are confused


def is_finetune_run(folder: Path) -> bool:
    """Whether `veca finetune` wrote to a folder."""
    return (folder / SETTINGS_FILE).is_file()


def write_finetune_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a fine-tuning run and return its path."""
    settings, result = (read_object(folder / name) for name in (SETTINGS_FILE, "result.json"))
    rows = read_table(folder / METRICS)
    try:
        metric, problems = result.get("metric", "top1"), result.get("problems", [])
        write_page(
            out := folder / "report.html",
            "finetune.html",
            name=folder.resolve().name,
            finished=bool(result),
            banner=not result or bool(problems),
            problems=problems,
            facts=_finetune_facts(settings, result, rows),
            metric=metric,
            settings=settings,
            **_training_curves(folder, rows, metric),
            **(_scores(result) | _class_tables(result) | _gallery(folder, result) if result else {}),
        )
    except VecaError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        problem = f"{SETTINGS_FILE} or result.json is not as `veca finetune` wrote it ({type(error).__name__}: {error})"
        raise ArgumentError(f"{folder}: {problem}; the same command writes them again") from error
    return out


def _finetune_facts(
    settings: Mapping[str, Any], result: Mapping[str, Any], rows: Sequence[Mapping[str, float]]
) -> dict[str, str]:
    data = settings.get("data", {})
    counts = ", ".join(f"{name} {data[name]:,}" for name in ("train", "val", "test") if name in data)
    last = rows[-1] if rows else {}
    facts = {
        "Model": str(settings.get("model")),
        "Task": str(settings.get("task")),
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
    return facts


def _scores(result: Mapping[str, Any]) -> dict[str, Any]:
    """Scores after fine-tuning and of the linear probe before it, by budget."""
    metric, after, before = result["metric"], result["after"], result["before"]
    names = list(next(iter(after.values())))
    rows, lines = [], []
    for cores, scores in after.items():
        probed = number(before.get(cores, {}).get(metric, math.nan), ".2f")
        rows.append([cores, probed, *(f"{scores[name]:.2f}" for name in names)])
    for i, (name, by_cores) in enumerate({"fine-tuned": after, "linear probe": before}.items()):
        points = [(float(cores), scores[metric]) for cores, scores in by_cores.items()]
        lines.append(Line(name, points, i, dots=True))
    label = f"{metric} against budget"
    chart = line_chart(lines, "budget, cores", f"{metric}, %", label, wide=True, ticks_at_points=True)
    heads = ["cores", f"linear probe, {metric}", *names]
    return {"scored_on": result["scored_on"], "score_chart": chart, "score_heads": heads, "score_rows": rows}


def _training_curves(folder: Path, rows: Sequence[Mapping[str, float]], metric: str) -> dict[str, Chart]:
    loss, rate = ([(row["step"], row[c]) for row in rows if c in row] for c in ("total", "learning_rate"))
    by_budget: dict[str, dict[int, list[Point]]] = {metric: {}, "loss": {}}
    for row in read_table(folder / VALIDATION):
        for name in by_budget.keys() & row.keys():
            by_budget[name].setdefault(int(row["budget"]), []).append((row["step"], row[name]))
    scores = sorted(by_budget[metric].items())
    metric_lines = [Line(f"C = {cores}", points, i, dots=True) for i, (cores, points) in enumerate(scores)]
    loss_lines = [Line("", loss, 0, faint=True), Line("train, smoothed", smooth(loss, 0.05), 0)]
    for i, (cores, points) in enumerate(sorted(by_budget["loss"].items()), 1):
        loss_lines.append(Line(f"val, C = {cores}", points, i, dots=True))
    return {
        "metric_chart": line_chart(metric_lines, "step", f"{metric}, %", metric, wide=True),
        "loss_chart": line_chart(loss_lines, "step", "loss", "loss against steps", wide=True),
        "rate_chart": line_chart([Line("", rate)], "step", "rate", "rate", wide=True),
    }


def _class_tables(result: Mapping[str, Any]) -> dict[str, Any]:
    """Scores of each class, the most confused pairs, and the confusion matrix where the run kept one."""
    classes, matrix = result["classes"], {}
    for i, (name, counts) in enumerate(zip(classes, result["matrix"] or [], strict=bool(result["matrix"]))):
        shares = [count / max(1, sum(counts)) for count in counts]
        matrix[f"{i} {name}"] = [(f"{100 * share:.0f}" if share >= 0.005 else "", share) for share in shares]
    pairs = [(classes[true], classes[said], f"{count:,}") for true, said, count in result["confusions"][:SHOWN_PAIRS]]
    return {
        "class_count": len(classes),
        "class_scores": [(k, f"{v:.2f}") for k, v in sorted(result["per_class"].items(), key=lambda item: item[1])],
        "confusions": pairs,
        "unit": "pixels" if result["metric"] == "mIoU" else "pictures",
        "matrix": matrix,
    }


def _gallery(folder: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Thumbnails in strips: of classification all in one, of segmentation one strip per image, and a colour key."""
    kinds, classes = ("image", "label", "prediction"), result["classes"]
    strips = [
        [(_thumbnail(folder, shown[kind]), kind, shown.get("said", kind)) for kind in kinds if kind in shown]
        for shown in result["gallery"]
    ]
    if result["asked"]["task"] == "classify":
        return {"strips": [[image for strip in strips for image in strip]], "colour_key": []}
    return {"strips": strips, "colour_key": list(zip(classes, class_colours(len(classes)), strict=True))}


def _thumbnail(folder: Path, name: str) -> str:
    """The data URI of a file of the gallery; only the name counts, so that nothing else on the disk can be shown."""
    path = folder / "gallery" / Path(name).name
    return data_uri(path.read_bytes() if path.is_file() else b"", "webp" if path.suffix == ".webp" else "png")
