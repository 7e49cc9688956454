"""The `veca` command: one thin command per verb."""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.table import Table

import veca
from veca.bench.flops import model_flops
from veca.checkpoint import load_or_random, save_official
from veca.checkpoint.pretrained import shipped_name
from veca.checkpoint.release import HEAD, carry_along, cast, without_paths
from veca.cli.bench import bench_app
from veca.cli.common import (
    MOST_WORKERS,
    AtOnce,
    Commands,
    Cores,
    Device,
    Model,
    Restart,
    Size,
    Source,
    Workers,
    err,
    load_model,
    out,
    say_if_random,
    stoppable,
    warn,
    workers_of,
)
from veca.cli.explore import explore
from veca.cli.figure import figure_app, parse_budgets
from veca.cli.finetune import finetune_app
from veca.cli.probe import probe_app
from veca.config import size_name
from veca.embed.ray_engine import PARTITION, Engine
from veca.embed.ray_engine import embed_on_ray as write_on_ray
from veca.embed.run import EmbedSettings, Precision, SaveDtype
from veca.embed.run import embed as write_features
from veca.errors import ArgumentError, VecaError, needs_extra
from veca.hub.export import OUTPUTS, form_of, parse_size
from veca.hub.export import Dtype as ExportDtype
from veca.hub.export import Format as ExportFormat
from veca.hub.export import export as write_export
from veca.images import MAX_PIXELS, Fit
from veca.inspect import draw_story, measure_cores, story_table, write_figure, write_story
from veca.inspect.demo import write_demo
from veca.inspect.story_report import check_story
from veca.utils.console import as_message
from veca.utils.files import check_writable
from veca.utils.signals import exit_status, terminable
from veca.utils.text import origin, printable, quoted, shorten

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="VECA: a vision backbone with linear cost in the number of patches and a budget of cores chosen at inference.",
    epilog="Start with `veca demo`. Exit status: 0 done, 1 failed, 2 wrong usage, 3 done but some pictures failed, "
    "130 interrupted (Ctrl-C), 143 or 129 stopped by SIGTERM or SIGHUP.",
)
# Where a command stands in `veca --help`.
LOOK, USE, TRAIN, MEASURE = "Look", "Use", "Train", "Measure"


@app.command(rich_help_panel=LOOK)
def demo(
    pictures: Annotated[
        list[Path] | None, typer.Argument(help="Your pictures.", show_default="four sample photos")
    ] = None,
    to: Annotated[Path, typer.Option("--out", "-o", help="The report to write.")] = Path("veca-demo/report.html"),
    model: Model = "veca_tiny",
    size: Size = 512,
    device: Device = "auto",
) -> None:
    """Run a model on a few photos at every budget and write one HTML page that shows what it sees and costs."""
    path = write_demo(pictures, to, model=load_model(model, device), model_name=shipped_name(model) or model, size=size)
    out.print(f"Report: {path.resolve()}", soft_wrap=True)


@app.command(rich_help_panel=USE)
def embed(
    paths: Annotated[
        list[str],
        typer.Argument(
            help="Files, folders (recursive), quoted globs, tar shards, Parquet files; addresses as s3://… too."
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--out", "-o", help="File to write: .parquet, .safetensors or .npz. Ray: a folder, or an address."
        ),
    ],
    model: Model = "veca_tiny",
    cores: Cores = None,
    size: Size = 512,
    fit: Annotated[
        Fit,
        typer.Option(
            help="crop: the centre, as in the paper; stretch: all of it, squeezed to a "
            "square; keep: all of it, short side = size; pad: as keep, edges repeated "
            "to full patches."
        ),
    ] = "crop",
    dense: Annotated[bool, typer.Option("--dense", help="Save all patch features.")] = False,
    with_global: Annotated[bool, typer.Option("--global/--no-global", help="Save the global feature.")] = True,
    device: Device = "auto",
    batch: Annotated[int, typer.Option(help="Pictures per forward pass.")] = 32,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MOST_WORKERS,
            help="Decoding processes; with Ray, of each model.",
            show_default="one per CPU, at most 8; with Ray: the CPUs there are for each GPU, 0 without GPUs",
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="Of Parquet files, where the pictures are.", show_default="image, or the only one"),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="plain: this machine, one model; ray: all GPUs or CPUs of a machine or a cluster.")
    ] = "plain",
    address: Annotated[
        str | None,
        typer.Option(help="Of a Ray cluster, HOST:PORT or auto.", show_default="$RAY_ADDRESS, or this machine alone"),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(help="With Ray: pictures that are files, to a file of features.", show_default=str(PARTITION)),
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Of the computation (autocast).")] = "float32",
    save_dtype: Annotated[SaveDtype, typer.Option(help="Of the saved features.")] = "float32",
    max_pixels: Annotated[int, typer.Option(help="Larger pictures are not opened.")] = MAX_PIXELS,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew, replacing what is there.")] = False,
    skip_nonfinite: Annotated[
        bool,
        typer.Option("--skip-nonfinite", help="Pictures whose features have NaN or infinity fail, not the run."),
    ] = False,
    ignore_dates: Annotated[
        bool,
        typer.Option("--ignore-dates", help="Continue a run although its files have other dates, as copies do."),
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Write features of many pictures to one file, or with Ray to a folder of files.

    Example: veca embed photos/ --out features.parquet --cores 32

    Bad pictures are listed in OUT.failures.csv and do not stop the run; the exit status is then 3.

    Interrupted? Run the same command again: it continues, and the result is the same.
    """
    settings = EmbedSettings(
        cores=cores, size=size, fit=fit, dense=dense, with_global=with_global, batch=batch,
        precision=precision, save_dtype=save_dtype, max_pixels=max_pixels,
    )  # fmt: skip
    if engine == "plain" and (address is not None or partition is not None):
        raise ArgumentError("--address and --partition are for --engine ray; add it, or leave them out")
    how: dict[str, Any] = {"settings": settings, "column": column, "overwrite": overwrite, "progress": progress}
    how |= {"model_name": shipped_name(model) or model, "skip_nonfinite": skip_nonfinite, "ignore_dates": ignore_dates}
    try:
        if engine == "ray":
            report = write_on_ray(
                paths, to, model=load_model(model, "cpu"), address=address, workers=workers,
                device=None if device == "auto" else device, partition=partition or PARTITION, **how,
            )  # fmt: skip
        else:
            report = write_features(paths, to, model=load_model(model, device), workers=workers_of(workers), **how)
    except KeyboardInterrupt as stop:
        err.print("Interrupted. The same command continues where this one stopped.")
        raise typer.Exit(exit_status(stop)) from None
    resumed = report.resumed - report.resumed_failures
    again = f", {resumed:,} of them in an earlier run" if resumed else ""
    count = f"{report.pictures:,} picture{'s' * (report.pictures != 1)}"
    out.print(f"{report.out}: {count}{again}, {report.seconds:.1f} s", soft_wrap=True)
    if report.failures:
        err.print(f"{report.failures:,} failed: see {report.out}.failures.csv", style="yellow", soft_wrap=True)
        raise typer.Exit(3)


@app.command(rich_help_panel=TRAIN)
def distill(
    recipe: Annotated[Path, typer.Argument(help="A recipe, as recipes/small-stage1.yaml.")],
    to: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder.", show_default="runs/RECIPE")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value in place of the recipe's, as batch=64; repeat.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; auto takes CUDA where there is one.")] = "auto",
    restart: Restart = False,
    wandb: Annotated[str | None, typer.Option(help="A project of Weights & Biases to report to.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and leave; nothing is loaded.")] = False,
    pictures: Annotated[int | None, typer.Option(help="With --dry-run: so many, instead of counting them.")] = None,
    processes: Annotated[int, typer.Option(help="With --dry-run: as many as torchrun will start.")] = 1,
) -> None:
    """Train a VECA to give its teacher's features, as a recipe says.

    Example: veca distill recipes/quick.yaml --set data.train=photos/ --set data.validation=others/

    Several GPUs or machines: torchrun --nproc-per-node=gpu -m veca distill …

    Interrupted or killed? Run the same command again: it continues, and the result is the same.
    """
    with needs_extra("training needs", "train"):
        from veca.train.recipe import load_recipe
        from veca.train.run import distill as train
        from veca.train.run import show_plan

    asked = load_recipe(recipe, changes or [])
    folder = to or Path("runs") / recipe.stem
    if dry_run:
        out.print(show_plan(asked, pictures, processes))
        return
    if pictures is not None or processes != 1:
        raise ArgumentError("--pictures and --processes are for --dry-run; a run counts its own: leave them out")
    with stoppable(folder, _say, restart):
        report = train(asked, folder, device=device, restart=restart, wandb=wandb, say=_say)
    if report is not None:
        out.print(f"Report: {report.resolve()}", soft_wrap=True)


@app.command(rich_help_panel=MEASURE)
def report(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or of probes, as runs/small-stage1 or results.")],
) -> None:
    """Write report.html anew, of what `veca distill`, `veca finetune` or `veca probe` left in a folder.

    Of probes also report.md, rows.csv and the curves.
    """
    from veca.probe.results import is_results_folder
    from veca.train.finetune.report import is_finetune_run, write_finetune_report
    from veca.train.tables import is_run

    tuned, results = is_finetune_run(folder), is_results_folder(folder)
    run = is_run(folder) and not tuned
    if not folder.is_dir():
        raise ArgumentError(f"{folder} is no folder; name one that `veca distill` or `veca probe` wrote to")
    if run and results:
        raise ArgumentError(f"{folder} holds a run of `veca distill` and rows of `veca probe`: move rows/ elsewhere")
    if not (run or results or tuned):
        raise ArgumentError(
            f"{folder} is neither the folder of a run of `veca distill`, which has a recipe.yaml, nor of results of "
            "`veca probe`, which has rows/, nor of `veca finetune`, which has a finetune.json: name one of these"
        )
    if tuned:
        path = write_finetune_report(folder)
    elif results:
        from veca.probe.report import write_probe_report

        path, left_out = write_probe_report(folder)
        for problem in left_out:
            warn(f"left out: {problem}")
    else:
        with needs_extra("reports need", "train"):
            from veca.train.report import write_distill_report
        path = write_distill_report(folder)
    out.print(f"Report: {path.resolve()}", soft_wrap=True)


@app.command(rich_help_panel=LOOK)
def cores(
    model: Source,
    pictures: Annotated[
        list[str],
        typer.Argument(help="Files, folders (recursive), quoted globs, tar shards, Parquet files; addresses too."),
    ],
    budgets: Annotated[
        str | None,
        typer.Option("--cores", help="Budgets, as 8,16,64; all: every trained one.", show_default="four of these"),
    ] = None,
    size: Annotated[int, typer.Option(help="Side in pixels, a multiple of 16: of the centre that is seen.")] = 256,
    limit: Annotated[
        int | None, typer.Option(min=1, help="So many pictures, evenly spread over all.", show_default="all")
    ] = None,
    device: Device = "auto",
    to: Annotated[Path, typer.Option("--out", "-o", help="JSON file to write, with all numbers.")] = Path("cores.json"),
    chart: Annotated[
        Path | None, typer.Option(help="Also draw them: a .png or .svg file to write.", show_default=False)
    ] = None,
    batch: AtOnce = None,
    workers: Workers = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Measure what the cores do, over many pictures: how far they move, where they look, who is heard, what is kept.

    Example: veca cores veca_tiny photos/ --limit 600 --chart cores.png

    Bad pictures do not stop the run; the exit status is then 3.
    """
    check_story(to, chart)
    loaded = load_model(model, device)
    story = measure_cores(
        loaded, pictures, budgets=parse_budgets(budgets, loaded), size=size, limit=limit, batch=batch,
        workers=workers_of(workers), progress=progress,
        name=shipped_name(model) or Path(model).name or model,
    )  # fmt: skip
    out.print(story_table(story))
    out.print(f"Numbers: {write_story(story, to).resolve()}", soft_wrap=True)
    if chart is not None:
        out.print(f"Chart: {write_figure(draw_story(story), chart).resolve()}", soft_wrap=True)
    if failed := story.about["failed"]:
        warn(f"{failed:,} failed: see {to}")
        raise typer.Exit(3)


_LARGEST = 2**20  # pixels of a side: beyond it, no cost is worth telling


@app.command(rich_help_panel=USE)
def info(
    source: Source,
    size: Annotated[int, typer.Option(help="Side in pixels at which FLOPs are counted.")] = 512,
    cores: Annotated[
        int | None, typer.Option(help="Budget at which FLOPs are counted.", show_default="every trained one")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a model is: sizes, budgets, provenance, parameters, and its cost at a resolution.

    Example: veca info veca_base --size 1024
    """
    model = load_or_random(source, device="meta", dtype=None)  # what it is does not depend on the numbers in it
    config = model.config
    if not config.patch_size <= size <= _LARGEST or size % config.patch_size:
        raise ArgumentError(f"size={quoted(size)}: must be a multiple of {config.patch_size} up to {_LARGEST:,}")
    if cores is not None and not 1 <= cores <= config.num_cores:
        raise ArgumentError(f"cores={quoted(cores)}; a budget is an integer from 1 to {config.num_cores}")
    budgets = [cores] if cores else list(config.budgets)
    facts: dict[str, Any] = {
        "size": size_name(config) or "custom",
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "provenance": model.provenance,
        "config": config.to_dict(),
        "gflops": {str(c): model_flops(config, size, size, c) / 1e9 for c in budgets},
    }
    if as_json:
        print(json.dumps({**facts, "pixels": size}))
        return
    table = Table("", _cell(shipped_name(source) or source), box=None, header_style="bold")
    table.add_row("size", facts["size"])
    table.add_row("parameters", f"{facts['parameters']:,} ({facts['dtype']})")
    told = {"weights": phrase} if (phrase := origin(model.provenance)) else {}
    for key, value in {**config.to_dict(), **model.provenance, **told}.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        shown = shown if len(shown) <= 100 else f"{shown[:80]}… (all of it: --json)"
        table.add_row(_cell(key.replace("_", " ")), printable(shown))
    for budget, gflops in facts["gflops"].items():
        table.add_row(f"GFLOPs, {size} px, C = {budget}", f"{gflops:,.2f}")
    out.print(table)
    say_if_random(model, source)


def _cell(text: str) -> str:
    return shorten(printable(text), 100)


StoredDtype = Literal["float32", "float16", "bfloat16"]


@app.command(rich_help_panel=USE)
def convert(
    source: Annotated[str, typer.Argument(help="A released .pt checkpoint, or a file or folder of ours.")],
    to: Annotated[Path, typer.Argument(help="A folder or .safetensors file of ours, or a .pt in the released format.")],
    dtype: Annotated[
        StoredDtype | None, typer.Option(help="Of the weights in the file.", show_default="as it is, bit for bit")
    ] = None,
    paths: Annotated[
        bool, typer.Option("--paths/--no-paths", help="Keep paths of this machine in the provenance, or names only.")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Convert released checkpoints to ours and back; tensors stay the same bit for bit.

    Example: veca convert released.pt my-model/

    To hand out weights of a run: veca convert runs/mine mine --dtype float16 --no-paths
    """
    target = to if to.suffix in (".pt", ".pth", ".safetensors") else to / "model.safetensors"
    if target.exists() and not overwrite:
        raise ArgumentError(f"{target} exists; choose another name, or pass --overwrite")
    check_writable(target)
    model = veca.load(source, dtype=None)
    stored = getattr(torch, dtype) if dtype else None
    model = cast(model, stored) if stored else model
    model.provenance = model.provenance if paths else without_paths(model.provenance)
    if (folder := Path(source)).is_dir() and target != to:
        carry_along(folder, to, stored)
    elif folder.exists() and (head := (folder if folder.is_dir() else folder.parent) / HEAD).is_file():
        warn(f"{head} stays behind: it is taken along from folder to folder")
    if to.suffix in (".pt", ".pth"):
        save_official(model, to)
    else:
        veca.save(model, to)
    out.print(f"Wrote {to}", soft_wrap=True)


@app.command(rich_help_panel=USE)
def export(
    source: Source,
    to: Annotated[Path, typer.Argument(help="File to write: .onnx, or .pt2 for torch.export and AOTInductor.")],
    cores: Cores = None,
    size: Annotated[str, typer.Option(help="HEIGHTxWIDTH in pixels, as 512x768; dynamic: any.")] = "dynamic",
    dtype: Annotated[ExportDtype, typer.Option(help="Of the weights; int8: ONNX only.")] = "float32",
    form: Annotated[
        ExportFormat | None, typer.Option("--format", help="Of the file.", show_default="onnx or export, by its name")
    ] = None,
    check: Annotated[bool, typer.Option(help="Run the file beside PyTorch; one that is wrong is not kept.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Write a model at one budget as a file that runs without veca: ONNX, torch.export or AOTInductor.

    Example: veca export veca_tiny veca.onnx --cores 32
    """
    chosen, pixels = form_of(to, form), parse_size(size)
    if to.exists() and not overwrite:
        raise ArgumentError(f"{to} exists; choose another name, or pass --overwrite")
    model, name = load_model(source, "cpu"), shipped_name(source) or Path(source).stem
    if classes := model.config.num_classes:
        warn(f"The classifier of {classes:,} classes will not be in the file, which gives {', '.join(OUTPUTS)}.")
    with err.status(f"Exporting {source} ({chosen}, {dtype}): from seconds to minutes"):
        checks = write_export(model, to, cores=cores, size=pixels, form=chosen, dtype=dtype, name=name, check=check)
    out.print(f"Wrote {to}, {to.stat().st_size / 1e6:,.1f} MB", soft_wrap=True)
    if not check:
        return
    runtime = "onnxruntime" if chosen == "onnx" else chosen
    table = Table("images", *(f"error of {key}" for key in OUTPUTS), runtime, "PyTorch", box=None)
    for each in checks:
        errors = (f"{each.errors[key]:.1e}" for key in OUTPUTS)
        times = (f"{1e3 * seconds:,.1f} ms" for seconds in (each.seconds, each.torch_seconds))
        table.add_row(f"{each.batch} × {each.size[0]}×{each.size[1]}", *errors, *times)
    out.print(table)
    out.print("Errors are relative to PyTorch in float32; times are per image, here, on the CPU.")


app.add_typer(figure_app, name="figure", rich_help_panel=LOOK)
app.add_typer(probe_app, name="probe", rich_help_panel=MEASURE)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)
app.add_typer(finetune_app, name="finetune", rich_help_panel=TRAIN)
app.command(rich_help_panel=LOOK)(explore)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    if version:
        out.print(f"veca {veca.__version__}, torch {torch.__version__}")
        raise typer.Exit


def _say(text: str) -> None:
    err.print(text, soft_wrap=True)  # a path may have brackets in it, and is to be copied whole


def main() -> None:
    """Run the command line; what a user can mend is one line, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        # Where a terminal takes ASCII alone, the rest is escaped. Not every descriptor lets a stream be changed.
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = lambda message, *_: warn(f"warning: {message}")
    try:
        try:
            with terminable():
                app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader went away, as `head` does: nothing is left to tell it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again at its end
        sys.exit(1)
    except (VecaError, OSError, MemoryError, RuntimeError) as error:
        if os.environ.get("VECA_DEBUG") or not (told := _message(error)):
            raise
        err.print(f"error: {as_message(told)}", style="red", soft_wrap=True)
        sys.exit(1)


def _message(error: Exception) -> str:
    """What to tell a user of an error that is no defect; empty for one that is."""
    if isinstance(error, VecaError | OSError):
        return str(error)
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    if not memory:
        return ""
    said = str(error).partition("\n")[0]
    return f"out of memory{f' ({said})' if said else ''}. Use a smaller size or batch, fewer workers, or another device"


if __name__ == "__main__":
    main()
