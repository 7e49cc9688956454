"""`veca cores`: statistics of the cores over many images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from veca.cli.common import check_sources, count_workers, display_name, load_model, out, print_path, warn
from veca.cli.figure import trained_budgets
from veca.cli.options import AutoBatchSize, Budgets, Device, Limit, Model, ShowProgress, Size, Sources, Workers
from veca.inspect import draw_story, measure_cores, story_table, write_story
from veca.inspect.story_report import check_story
from veca.report.charts import write_chart


def cores_command(
    sources: Sources,
    to: Annotated[Path, typer.Option("--out", "-o", help="JSON file to write, with all numbers.")] = Path("cores.json"),
    model: Model = "veca_tiny",
    cores: Budgets = None,
    size: Size = 256,
    limit: Limit = None,
    chart: Annotated[
        Path | None, typer.Option(help="Also draw a chart: a .png or .svg file to write.", show_default=False)
    ] = None,
    batch_size: AutoBatchSize = None,
    workers: Workers = None,
    device: Device = "auto",
    progress: ShowProgress = True,
) -> None:
    """Measure what the cores do over many images: how far they move, where they look, which ones patches attend to.

    Example: veca cores photos/ --limit 600 --chart cores.png

    Unreadable images do not stop the run; the exit status is then 3.
    """
    check_sources(sources)
    check_story(to, chart)
    loaded = load_model(model, device)
    story = measure_cores(
        loaded, sources, budgets=trained_budgets(cores, loaded), size=size, limit=limit, batch=batch_size,
        workers=count_workers(workers), progress=progress, name=display_name(model),
    )  # fmt: skip
    out.print(story_table(story))
    print_path("Numbers", write_story(story, to))
    if chart is not None:
        print_path("Chart", write_chart(draw_story(story), chart))
    if failed := story.about["failed"]:
        warn(f"{failed:,} failed: see {to}")
        raise typer.Exit(3)
