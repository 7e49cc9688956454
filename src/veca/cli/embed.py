"""`veca embed`: features of many images."""

from __future__ import annotations

from typing import Annotated

import typer

from veca.checkpoint.loading import pretrained_name
from veca.cli.common import check_sources, count_workers, err, load_model, out, resumable_command
from veca.cli.options import (
    MAX_WORKERS,
    BatchSize,
    Cores,
    Device,
    FitOption,
    Model,
    Overwrite,
    ShowProgress,
    Size,
    Sources,
)
from veca.embed import EmbedSettings, Precision, SaveDtype, embed
from veca.embed.partitions import PARTITION
from veca.embed.ray_engine import Engine
from veca.errors import ArgumentError
from veca.images import MAX_PIXELS


def embed_command(
    sources: Sources,
    to: Annotated[
        str,
        typer.Option("--out", "-o", help="A .parquet file or a folder to write; with Ray also an address."),
    ],
    model: Model = "veca_tiny",
    cores: Cores = None,
    size: Size = 512,
    fit: FitOption = "crop",
    dense: Annotated[bool, typer.Option("--dense", help="Save all patch features.")] = False,
    with_global: Annotated[bool, typer.Option("--global/--no-global", help="Save the global feature.")] = True,
    device: Device = "auto",
    batch_size: BatchSize = 32,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_WORKERS, help="Processes that decode images; with Ray, of each model.",
            show_default="one per CPU, at most 8; with Ray: the CPUs there are for each GPU, 0 without GPUs",
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="Column of Parquet files that holds the images.", show_default="image, or the only one"),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="plain: this machine, one model; ray: all GPUs or CPUs of a machine or a cluster.")
    ] = "plain",
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster, HOST:PORT or auto.", show_default="$RAY_ADDRESS, or this machine alone"),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(help="With Ray: image files per file of features.", show_default=str(PARTITION)),
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Precision of the computation (autocast).")] = "float32",
    dtype: Annotated[SaveDtype, typer.Option("--dtype", help="Type of the saved features.")] = "float32",
    max_pixels: Annotated[int, typer.Option(help="Refuse to open larger images.")] = MAX_PIXELS,
    overwrite: Overwrite = False,
    skip_nonfinite: Annotated[
        bool,
        typer.Option("--skip-nonfinite", help="List images whose features have NaN or infinity, and go on."),
    ] = False,
    ignore_dates: Annotated[
        bool,
        typer.Option("--ignore-dates", help="Resume although files have other dates, as copies do."),
    ] = False,
    progress: ShowProgress = True,
) -> None:  # fmt: skip
    """Write features of many images to one file, or with Ray to a folder of files.

    Example: veca embed photos/ --out features.parquet --cores 32

    Unreadable images are listed in OUT.failures.csv and do not stop the run; the exit status is then 3.

    Interrupted? Run the same command again: it continues, and the result is the same.
    """
    check_sources(sources)
    settings = EmbedSettings(
        cores=cores, size=size, fit=fit, dense=dense, with_global=with_global, batch=batch_size,
        precision=precision, save_dtype=dtype, max_pixels=max_pixels,
    )  # fmt: skip
    on_ray = engine == "ray"
    if not on_ray and (address is not None or partition is not None):
        raise ArgumentError("--address and --partition are for --engine ray; add it, or leave them out")
    with resumable_command("Interrupted. The same command continues where this one stopped."):
        report = embed(
            sources, to, model=load_model(model, "cpu" if on_ray else device),
            model_name=pretrained_name(model) or model, settings=settings, column=column, engine=engine,
            device=device if on_ray and device != "auto" else None, address=address, partition=partition,
            workers=workers if on_ray else count_workers(workers), overwrite=overwrite,
            skip_nonfinite=skip_nonfinite, ignore_dates=ignore_dates, progress=progress,
        )  # fmt: skip
    resumed = report.resumed - report.resumed_failures
    earlier = f", {resumed:,} of them in an earlier run" if resumed else ""
    count = f"{report.pictures:,} image{'s' * (report.pictures != 1)}"
    out.print(f"{report.out}: {count}{earlier}, {report.seconds:.1f} s", soft_wrap=True)
    if report.failures:
        err.print(f"{report.failures:,} failed: see {report.out}.failures.csv", style="yellow", soft_wrap=True)
        raise typer.Exit(3)
