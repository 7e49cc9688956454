"""`veca embed`: features of many images."""

from typing import Annotated, Any

import typer

from veca.checkpoint.loading import pretrained_name
from veca.cli import options as opt
from veca.cli.common import check_sources, choose_compute, load_model, out, resumable, warn, with_settings
from veca.embed import EmbedReport, EmbedSettings, Precision, SaveDtype, embed
from veca.embed.partitions import PARTITION
from veca.embed.ray_engine import Engine
from veca.errors import ArgumentError
from veca.images import Fit

SETTINGS_OPTIONS = {
    "cores": opt.Cores,
    "width": opt.Width,
    "size": opt.Size,
    "fit": opt.FitOption,
    "max_patches": opt.MaxPatches,
    "dense": Annotated[bool, opt.option("embed.dense")],
    "cells": Annotated[int | None, opt.option("embed.cells")],
    "with_global": Annotated[bool, opt.option("embed.with-global")],
    "batch": Annotated[int | None, opt.option("embed.batch")],
    "precision": Annotated[Precision, opt.option("embed.precision")],
    "save_dtype": Annotated[SaveDtype | None, opt.option("embed.save-dtype")],
    "fps": Annotated[float | None, opt.option("embed.fps")],
    "max_pixels": Annotated[int, opt.option("embed.max-pixels")],
    "stream_above": Annotated[int | None, opt.option("embed.stream-above")],
    "decode": opt.Decoding,
    "compile": Annotated[bool, opt.option("embed.compile")],
}


def _run_embed(
    sources: opt.Sources,
    to: Annotated[str, opt.option("embed.out")],
    model: opt.Model = "veca_tiny",
    compute: opt.ComputeShare = None,
    device: opt.Device = "auto",
    workers: Annotated[int | None, opt.option("embed.workers")] = None,
    column: opt.Column = None,
    engine: Annotated[Engine, opt.option("embed.engine")] = "plain",
    address: Annotated[str | None, opt.option("embed.address")] = None,
    partition: Annotated[int | None, opt.option("embed.partition", show_default=str(PARTITION))] = None,
    overwrite: opt.Overwrite = False,
    skip_nonfinite: Annotated[bool, opt.option("embed.skip-nonfinite")] = False,
    ignore_dates: Annotated[bool, opt.option("embed.ignore-dates")] = False,
    progress: opt.ShowProgress = True,
    **values: Any,
) -> None:  # fmt: skip
    """Write features of many images to one file, or with Ray to a folder of files.

    Example: veca embed photos/ --out features.parquet --cores 32

    Unreadable images are listed in OUT.failures.csv and do not stop the run; the exit status is then 3.

    Interrupted? Run the same command again: it continues, and the result is the same.
    """
    check_sources(sources)
    on_ray = engine == "ray"
    if not on_ray and (address is not None or partition is not None):
        raise ArgumentError("--address and --partition are for --engine ray; add it, or leave them out")
    with resumable("Interrupted. The same command continues where this one stopped."):
        loaded = load_model(model, "cpu" if on_ray else device)
        if compute is not None:
            choice = choose_compute(loaded, compute, values["size"], values["cores"], values["width"])
            values |= {"cores": choice.cores, "width": choice.width, "size": choice.size[0]}
        report = embed(
            sources, to, model=loaded,
            model_name=pretrained_name(model) or model, settings=EmbedSettings(**values), column=column, engine=engine,
            device=device if on_ray and device != "auto" else None, address=address, partition=partition,
            workers=workers, overwrite=overwrite,
            skip_nonfinite=skip_nonfinite, ignore_dates=ignore_dates, progress=progress,
        )  # fmt: skip
    resumed = report.resumed - report.resumed_failures
    earlier = f", {resumed:,} of them in an earlier run" if resumed else ""
    count = f"{report.pictures:,} image{'s' * (report.pictures != 1)}"
    out.print(f"{report.out}: {count}{earlier}, {report.seconds:.1f} s", soft_wrap=True)
    if report.rates:
        rates = ", ".join(f"{stage} {rate:,.0f}" for stage, rate in report.rates.items())
        out.print(
            f"{report.how}. Images/s of each stage: {rates}; {report.bottleneck} is the bottleneck", soft_wrap=True
        )
    if loss := _describe_loss(report, values["size"], values["fit"]):
        out.print(loss, soft_wrap=True)
    if report.streamed:
        large = f"{report.streamed:,} large image{'s' * (report.streamed != 1)}"
        out.print(f"{large} computed by tiles: {str(report.out).rstrip('/')}.large", soft_wrap=True)
    if report.failures:
        warn(f"{report.failures:,} failed: see {report.out}.failures.csv")
        raise typer.Exit(3)


def _describe_loss(report: EmbedReport, size: int, fit: Fit) -> str:
    """What the model was not shown of the images, and how to show it more; empty if it saw everything."""
    many = report.shrunk != 1
    images = f"{report.shrunk:,} image{'s' * many}"
    if fit == "crop" and report.pictures:
        larger = f"; {report.shrunk:,} of {report.pictures:,} {'were' if many else 'was'} larger" * bool(report.shrunk)
        rule = f"Cropped: the model saw the central square of each image, at {size}×{size}{larger}"
        return f"{rule}. --fit keep or native shows whole images"
    if not report.shrunk:
        return ""
    if fit == "native":
        were = f"and {'were' if many else 'was'} shrunk; --max-patches sets the limit"
        return f"{images} had more than the {report.max_patches:,} patches allowed {were}"
    shown = f"{size}×{size}, the aspect ratio lost" if fit == "stretch" else f"a short side of {size}"
    more = "--fit native keeps it" if fit == "stretch" else "a larger --size shows more"
    return f"{images} of {report.pictures:,} larger than {size} px: the model saw {shown}; {more}"


embed_command = with_settings(_run_embed, SETTINGS_OPTIONS, EmbedSettings)
