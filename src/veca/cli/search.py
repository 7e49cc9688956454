"""`veca search`: images like an image, and duplicates, by an index of their features."""

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from veca.checkpoint.loading import load_or_random, pretrained_name
from veca.cli import common
from veca.cli import options as opt
from veca.cli.common import err, out, print_path, warn
from veca.cli.embed import SETTINGS_OPTIONS
from veca.embed import EmbedSettings
from veca.search import Match, SearchIndex, update_index
from veca.search.sheet import write_duplicates_sheet, write_query_sheet
from veca.utils.device import choose_device

search_app = common.make_group(
    "Find images like an image or a region of one, and duplicates, by an index of their features.\n\n"
    "Example: veca search index photos/ --out index, then veca search query photo.jpg index --out result.html"
)

Format = Literal["table", "csv", "json"]
IndexArgument = Annotated[Path, typer.Argument(metavar="INDEX", help="Folder that `veca search index` wrote.")]
SheetOption = Annotated[Path | None, opt.option("search.sheet")]
FormatOption = Annotated[Format, opt.option("search.format")]
_CHOSEN = ("dense", "cells", "with_global", "save_dtype")  # by --regions and by the index
INDEX_OPTIONS = {name: option for name, option in SETTINGS_OPTIONS.items() if name not in _CHOSEN}


def _run_index(
    sources: opt.Sources,
    to: Annotated[Path, opt.option("search.out")],
    model: opt.Model = "veca_tiny",
    regions: Annotated[int | None, opt.option("search.regions")] = None,
    device: opt.Device = "auto",
    workers: Annotated[int | None, opt.option("embed.workers")] = None,
    column: opt.Column = None,
    overwrite: opt.Overwrite = False,
    drop_sources: Annotated[bool, opt.option("search.drop-sources")] = False,
    progress: opt.ShowProgress = True,
    **values: Any,
) -> None:  # fmt: skip
    """Make an index of images, or bring it up to date: what is new or has changed is embedded, what is gone dropped.

    Example: veca search index photos/ shard.tar --out index --size 224 --regions 4

    Unreadable images are listed in INDEX/failures.csv; the exit status is then 3.

    Interrupted? Run the same command again: it continues.
    """
    common.check_sources(sources)
    with common.resumable("Interrupted. The same command continues where this one stopped."):
        settings = EmbedSettings(**values, dense=regions is not None, cells=regions)
        report = update_index(
            sources, to, model=common.load_model(model, device), model_name=pretrained_name(model) or model,
            settings=settings, column=column, workers=workers, overwrite=overwrite, drop_sources=drop_sources,
            progress=progress,
        )  # fmt: skip
    counts = f"{report.added:,} added, {report.changed:,} changed, {report.dropped:,} dropped"
    out.print(f"{report.out}: {report.images:,} images; {counts}, {report.seconds:.1f} s", soft_wrap=True)
    if report.failures:
        warn(f"{report.failures:,} failed: see {report.out / 'failures.csv'}")
        raise typer.Exit(3)


search_app.command("index", cls=common.Command)(common.with_settings(_run_index, INDEX_OPTIONS, EmbedSettings))


@search_app.command("query", cls=common.Command)
def query_command(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="Image file.", show_default=False)],
    folder: IndexArgument,
    top: Annotated[int, opt.option("search.top")] = 20,
    box: Annotated[Any, opt.option("search.box")] = None,
    to: SheetOption = None,
    form: FormatOption = "table",
    model: Annotated[str | None, opt.option("model", show_default="the one that the index names")] = None,
    cores: Annotated[int | None, opt.option("cores", parser=None, show_default="that of the index")] = None,
    width: Annotated[float | None, opt.option("width", show_default="that of the index")] = None,
    device: opt.Device = "auto",
    overwrite: opt.Overwrite = False,
) -> None:
    """Find the images of an index that are most like an image, or like a region of it.

    Example: veca search query photo.jpg index --box 40,60,200,120 --out result.html
    """
    _check_sheet(to, overwrite)
    loaded = None if model is None else load_or_random(model)
    index = SearchIndex.open(folder, model=loaded, device=choose_device(device))
    matches = index.query(image, top, box=box, cores=cores, width=width)
    ours = index.description.settings
    asked = cores or ours.cores, width or ours.width
    if asked != (ours.cores, ours.width):
        query = f"Query at C = {asked[0]}, width {asked[1]:g}"
        err.print(f"{query}; index at C = {ours.cores}, width {ours.width:g}.", soft_wrap=True)
    if box is not None and not index.has_regions:
        warn(
            "The index has no regions: the region is compared with whole images (--regions 4 for `veca search index`)."
        )
    _print_matches([(None, matches)], form)
    if to is not None:
        write_query_sheet(to, index, image, matches, box)
        print_path("Sheet", to)


@search_app.command("duplicates", cls=common.Command)
def duplicates_command(
    folder: IndexArgument,
    threshold: Annotated[float, opt.option("search.threshold")] = 0.95,
    to: SheetOption = None,
    form: FormatOption = "table",
    device: opt.Device = "auto",
    overwrite: opt.Overwrite = False,
) -> None:
    """Find groups of images of an index that are duplicates or nearly so: other encodings, sizes, crops.

    Example: veca search duplicates index --format csv
    """
    _check_sheet(to, overwrite)
    index = SearchIndex.open(folder, device=choose_device(device))
    groups = list(index.duplicates(threshold))
    _print_matches([(number, group.images) for number, group in enumerate(groups, 1)], form)
    if to is not None:
        write_duplicates_sheet(to, index, groups, threshold)
        print_path("Sheet", to)


def _check_sheet(to: Path | None, overwrite: bool) -> None:
    if to is not None:
        common.check_absent(to, overwrite)


def _print_matches(groups: Sequence[tuple[int | None, Sequence[Match]]], form: Format) -> None:
    """Print images by group, or without numbers of groups."""
    rows = [
        {**({} if number is None else {"group": number}), **match._asdict()}
        for number, matches in groups
        for match in matches
    ]
    if form == "json":
        print(json.dumps(rows))
    elif form == "csv":
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else ["path", "score"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"box": ",".join(map(str, row["box"] or ()))} for row in rows)
    else:
        _print_table(rows)


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        out.print("Nothing was found.")
        return
    grouped, boxed = "group" in rows[0], any(row["box"] for row in rows)
    table = Table(*["group"] * grouped, "score", "image", *["region"] * boxed, box=None, header_style="bold")
    for row in rows:
        name = f"{row['path']} (missing)" if row["missing"] else row["path"]
        region = [",".join(map(str, row["box"] or ()))] * boxed
        table.add_row(*[str(row["group"])] * grouped if grouped else [], f"{row['score']:.3f}", name, *region)
    out.print(table, soft_wrap=True)
