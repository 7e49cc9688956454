"""`veca cores`: statistics of the cores over many images."""

from pathlib import Path
from typing import Annotated

import typer

from veca.cli import common
from veca.cli import options as opt
from veca.cli.common import load_model, print_path
from veca.cli.figure import trained_budgets
from veca.inspect import draw_story, measure_cores, story_table, write_story
from veca.inspect.story_report import check_story
from veca.report.charts import write_chart


def cores_command(
    sources: opt.Sources,
    to: Annotated[Path, opt.option("cores.out")] = Path("cores.json"),
    model: opt.Model = "veca_tiny",
    cores: opt.Budgets = None,
    size: opt.Size = 256,
    limit: opt.Limit = None,
    chart: Annotated[Path | None, opt.option("cores.chart")] = None,
    batch_size: opt.AutoBatchSize = None,
    workers: opt.Workers = None,
    device: opt.Device = "auto",
    progress: opt.ShowProgress = True,
) -> None:
    """Measure what the cores do over many images: how far they move, where they look, which ones patches attend to.

    Example: veca cores photos/ --limit 600 --chart cores.png

    Unreadable images do not stop the run; the exit status is then 3.
    """
    common.check_sources(sources)
    check_story(to, chart)
    loaded = load_model(model, device)
    story = measure_cores(
        loaded, sources, budgets=trained_budgets(cores, loaded), size=size, limit=limit, batch=batch_size,
        workers=common.count_workers(workers), progress=progress, name=common.display_name(model),
    )  # fmt: skip
    common.out.print(story_table(story))
    print_path("Numbers", write_story(story, to))
    if chart is not None:
        print_path("Chart", write_chart(draw_story(story), chart))
    if failed := story.about["failed"]:
        common.warn(f"{failed:,} failed: see {to}")
        raise typer.Exit(3)
