"""`veca bench`: speed and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from veca.bench.contenders import Bench, BenchSetting, choose_cases
from veca.bench.explorer import bench_explorer_crowd, bench_explorer_page, screenshot_explorer
from veca.bench.machine import bench_data, bench_memory
from veca.bench.report import PlotFormat, write_plots
from veca.bench.run import FloatDtype, pick_setting, run_bench
from veca.cli.common import Command, make_group, out
from veca.cli.options import (
    BatchSize,
    Budgets,
    Cores,
    Device,
    Ints,
    Model,
    Size,
    Sizes,
    Sources,
    Words,
    Workers,
    parse_ints,
    parse_words,
)
from veca.hub.export import ExportDtype, bench_onnx

bench_app = make_group(
    "Measure speed and memory beside the dense ViT of the same size, and against the limits of this machine.\n\n"
    "Example: veca bench model --case base:1024:16,base:512:32"
)
explorer_app = make_group("Measure the explorer: the page in Chromium, and many clients at once.")
bench_app.add_typer(explorer_app, name="explorer")

Cases = Annotated[
    Words | None,
    typer.Option(
        "--case", parser=parse_words, metavar="MODEL:PX:BATCH[:CORES],…", help="Cases, as base:1024:16,base:512:32.",
        show_default="those with published targets",
    ),
]  # fmt: skip
BenchModels = Annotated[
    Words | None,
    typer.Option("--model", "-m", parser=parse_words, metavar="MODEL,…", help="small, small_plus, base, large, tiny."),
]
BenchSizes = Annotated[
    Ints | None, typer.Option("--size", parser=parse_ints, metavar="PX,…", help="Sides in pixels, multiples of 16.")
]
BatchSizes = Annotated[
    Ints | None, typer.Option("--batch-size", parser=parse_ints, metavar="N,…", help="Images per forward pass.")
]
Contenders = Annotated[
    Words | None,
    typer.Option(
        "--contender", parser=parse_words, metavar="NAME,…", help="What to compare, as veca,veca-eager,dense.",
        show_default="all that apply",
    ),
]  # fmt: skip
BenchPrecision = Annotated[
    FloatDtype | None,
    typer.Option(
        "--precision", help="Precision of the computation.", show_default="bfloat16 on CUDA, float32 elsewhere"
    ),
]
Repeats = Annotated[int, typer.Option(help="Measured rounds; every contender has a turn in each.")]
Profile = Annotated[bool, typer.Option("--profile", help="Also show where the time of each contender goes.")]
Errors = Annotated[bool, typer.Option("--errors/--no-errors", help="Also measure the error against float64.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Seconds of each measurement.")]
Chromium = Annotated[str | None, typer.Option(help="Path of Chromium.", show_default="the one on the PATH")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for results.json, results.csv, table.txt.")]


@bench_app.command("model", cls=Command)
def bench_model(
    case: Cases = None, model: BenchModels = None, size: BenchSizes = None, batch_size: BatchSizes = None,
    cores: Budgets = None, contenders: Contenders = None, device: Device = "auto", precision: BenchPrecision = None,
    cls_only: Annotated[bool, typer.Option("--cls-only", help="Compute the global feature alone.")] = False,
    repeats: Repeats = 10, profile: Profile = False, errors: Errors = True, to: Out = None,
) -> None:  # fmt: skip
    """Forward pass of the whole model: all ways to run VECA, the dense ViT, and the matrix products alone."""
    options = {"names": contenders or (), "repeats": repeats, "profile": profile, "errors": errors}
    setting = pick_setting(device, precision, cls_only=cls_only, **options)
    _bench("model", (case, model, size, batch_size, cores), setting, to)


def _add_bench(bench: Bench, help: str) -> None:
    @bench_app.command(bench, cls=Command, help=help)
    def command(
        case: Cases = None, model: BenchModels = None, size: BenchSizes = None, batch_size: BatchSizes = None,
        cores: Budgets = None, contenders: Contenders = None, device: Device = "auto",
        precision: BenchPrecision = None, repeats: Repeats = 10, profile: Profile = False, errors: Errors = True,
        to: Out = None,
    ) -> None:  # fmt: skip
        options = {"names": contenders or (), "repeats": repeats, "profile": profile, "errors": errors}
        _bench(bench, (case, model, size, batch_size, cores), pick_setting(device, precision, **options), to)


_add_bench("train", "Forward and backward pass, float32 weights under autocast; memory includes weights and gradients.")
_add_bench("attention", "Attention of one layer alone, rotary embedding included: forward, then backward.")


@bench_app.command("plot", cls=Command)
def bench_plot(
    results: Annotated[list[Path], typer.Argument(help="results.json files that other `veca bench` commands wrote.")],
    to: Annotated[Path, typer.Option("--out", "-o", help="Folder for the plots.")],
    form: Annotated[PlotFormat, typer.Option("--format", help="File format.")] = "svg",
) -> None:
    """Plot FLOPs against resolution, and latency against resolution and batch size.

    Latency is plotted where results have several sizes at one batch, or several batches at one size: sweep --size or
    --batch-size.
    """
    for path in write_plots(results, to, form):
        out.print(f"Wrote {path}", soft_wrap=True)


def _bench(bench: Bench, sweep: tuple[Any, ...], setting: BenchSetting, to: Path | None) -> None:
    cases = choose_cases(bench, setting.device.type == "cuda", *(values or () for values in sweep))
    run_bench(bench, cases, setting, to).show(out)
    if to is not None:
        out.print(f"Results: {to}", soft_wrap=True)


@bench_app.command("memory", cls=Command)
def memory_command(
    model: Model = "veca_base", size: Sizes = Ints([1024, 2048]), cores: Cores = None, device: Device = "cpu",
    precision: BenchPrecision = "float32",
) -> None:  # fmt: skip
    """Peak memory of a forward pass of one image at several sizes, weights not counted."""
    bench_memory(model, size, cores or 64, device, precision or "float32")


@bench_app.command("data", cls=Command)
def data_command(
    sources: Sources, size: Size = 256, batch_size: BatchSize = 128, workers: Workers = None, seconds: Seconds = 5.0
) -> None:
    """Images per second that are read, decoded, cropped and augmented for training."""
    bench_data(sources, size, workers or 0, batch_size, seconds)


@bench_app.command("onnx", cls=Command)
def onnx_command(
    model: Model = "veca_tiny",
    size: Annotated[
        Words, typer.Option(parser=parse_words, metavar="PX|HxW,…", help="Sides in pixels, or both as 320x480.")
    ] = Words(["224", "256", "320x480", "512", "768"]),
    cores: Budgets = None,
    dtype: Annotated[ExportDtype, typer.Option(help="Type of the stored weights.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each runtime.")] = 1,
    repeats: Repeats = 7,
) -> None:
    """Error and time of ONNX files beside PyTorch on the CPU."""
    bench_onnx(model, size, cores or (8, 32, 64), dtype, threads, repeats)


@explorer_app.command("page", cls=Command)
def page_command(
    model: Model = "veca_tiny",
    images: Annotated[int, typer.Option(min=1, help="Images to drop on the page.")] = 6,
    chromium: Chromium = None,
) -> None:
    """Time from a dropped image or a moved slider to the drawn page, in Chromium."""
    bench_explorer_page(model, images, chromium)


@explorer_app.command("crowd", cls=Command)
def crowd_command(
    model: Model = "veca_tiny",
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 50,
    seconds: Seconds = 20.0,
) -> None:
    """Waiting times and answers of the API with many clients."""
    bench_explorer_crowd(model, clients, seconds)


@explorer_app.command("shot", cls=Command)
def screenshot_command(
    to: Annotated[Path, typer.Option("--out", "-o", help="Image file to write.")], model: Model = "veca_tiny",
    chromium: Chromium = None,
) -> None:  # fmt: skip
    """Screenshot of the page, as in the README."""
    screenshot_explorer(to, model, chromium)
