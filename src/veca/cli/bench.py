"""`veca bench`: speed and memory."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from veca.bench.contenders import Bench, choose_cases
from veca.bench.embed import bench_embed
from veca.bench.explorer import bench_explorer_crowd, bench_explorer_page, screenshot_explorer
from veca.bench.machine import bench_data, bench_memory
from veca.bench.report import PlotFormat, write_plots
from veca.bench.run import FloatDtype, pick_setting, run_bench
from veca.bench.serve import bench_serve
from veca.cli import options as opt
from veca.cli.common import Command, check_sources, load_model, make_group, out, with_settings
from veca.embed import EmbedSettings
from veca.errors import ArgumentError
from veca.export import ExportDtype, bench_onnx

bench_app = make_group(
    "Measure speed and memory beside the dense ViT of the same size, and against the limits of this machine.\n\n"
    "Example: veca bench model --case base:1024:16,base:512:32"
)
explorer_app = make_group("Measure the explorer: the page in Chromium, and many clients at once.")
bench_app.add_typer(explorer_app, name="explorer")

Cases = Annotated[Any, opt.option("bench.cases")]
BenchModels = Annotated[Any, opt.option("bench.models")]
BatchSizes = Annotated[Any, opt.option("bench.batch-sizes")]
Contenders = Annotated[Any, opt.option("bench.contenders")]
BenchPrecision = Annotated[FloatDtype | None, opt.option("bench.precision")]
Repeats = Annotated[int, opt.option("bench.repeats")]
Profile = Annotated[bool, opt.option("bench.profile")]
Errors = Annotated[bool, opt.option("bench.errors")]
Seconds = Annotated[float, opt.option("bench.seconds")]
Chromium = Annotated[str | None, opt.option("bench.chromium")]
ClsOnly = Annotated[bool, opt.option("bench.cls-only")]
BenchOut = Annotated[Path | None, opt.option("bench.out")]


def _bench(
    bench: Bench, case: Cases = None, model: BenchModels = None, size: opt.Sizes = None,
    batch_size: BatchSizes = None, cores: opt.Budgets = None, contenders: Contenders = None,
    device: opt.Device = "auto", precision: BenchPrecision = None, repeats: Repeats = 10, profile: Profile = False,
    errors: Errors = True, to: BenchOut = None, **values: Any,
) -> None:  # fmt: skip
    values |= {"names": contenders or (), "repeats": repeats, "profile": profile, "errors": errors}
    setting = pick_setting(device, precision, **values)
    sweep = (each or () for each in (case, model, size, batch_size, cores))
    cases = choose_cases(bench, setting.device.type == "cuda", *sweep)
    run_bench(bench, cases, setting, to).show(out)
    if to is not None:
        out.print(f"Results: {to}", soft_wrap=True)


BENCHES: dict[Bench, str] = {
    "model": "Forward pass of the whole model: all ways to run VECA, the dense ViT, and the matrix products alone.",
    "train": "Forward and backward pass, float32 weights under autocast; memory includes weights and gradients.",
    "attention": "Attention of one layer alone, rotary embedding included: forward, then backward.",
}
for _name, _help in BENCHES.items():
    _defaults: dict[str, Any] = {"cls_only": False} if _name == "model" else {}
    _command = with_settings(partial(_bench, _name), {"cls_only": ClsOnly}, **_defaults)
    bench_app.command(_name, cls=Command, help=_help)(_command)


@bench_app.command("plot", cls=Command)
def bench_plot(
    results: Annotated[list[Path], typer.Argument(help="results.json files that other `veca bench` commands wrote.")],
    to: Annotated[Path, opt.option("bench.plot-out")],
    form: Annotated[PlotFormat, opt.option("bench.plot-format")] = "svg",
) -> None:
    """Plot FLOPs against resolution, and latency against resolution and batch size.

    Latency is plotted where results have several sizes at one batch, or several batches at one size: sweep --size or
    --batch-size.
    """
    for path in write_plots(results, to, form):
        out.print(f"Wrote {path}", soft_wrap=True)


@bench_app.command("memory", cls=Command)
def memory_command(
    model: opt.Model = "veca_base", size: opt.Sizes = (1024, 2048), cores: opt.Cores = None, device: opt.Device = "cpu",
    precision: BenchPrecision = "float32",
) -> None:  # fmt: skip
    """Peak memory of a forward pass of one image at several sizes, weights not counted."""
    bench_memory(model, size, cores or 64, device, precision or "float32")


@bench_app.command("data", cls=Command)
def data_command(
    sources: opt.Sources,
    size: opt.Size = 256,
    batch_size: opt.BatchSize = 128,
    workers: opt.Workers = None,
    seconds: Seconds = 5.0,
) -> None:
    """Images per second that are read, decoded, cropped and augmented for training."""
    bench_data(sources, size, workers or 0, batch_size, seconds)


@bench_app.command("embed", cls=Command)
def bench_embed_command(
    sources: opt.OptionalSources = None,
    model: opt.Model = "veca_tiny",
    size: opt.Size = 256,
    cores: Annotated[int | None, opt.option("cores", show_default="32")] = 32,
    precision: BenchPrecision = None,
    batch_size: Annotated[int | None, opt.option("embed.batch")] = None,
    workers: Annotated[int | None, opt.option("embed.workers", show_default="one per CPU")] = None,
    device: opt.Device = "auto",
    images: Annotated[int | None, opt.option("bench.made-images")] = None,
    image_size: Annotated[Any, opt.option("bench.made-size")] = (640, 480),
    seconds: Seconds = 2.0,
    repeats: Repeats = 3,
    to: BenchOut = None,
) -> None:
    """Images per second of `veca embed`: each stage alone, then whole runs by each decoder.

    Without sources, JPEGs are made on the spot. With them, all their images are embedded several times: name a sample.
    """
    check_sources(sources or [])
    if sources and images:
        raise ArgumentError("--images is for images that are made; leave it out, or name no sources")
    setting = pick_setting(device, precision)
    dtype: Any = str(setting.dtype).removeprefix("torch.")
    settings = EmbedSettings(size=size, cores=cores, precision=dtype, batch=batch_size)
    loaded = load_model(model, str(setting.device))
    bench_embed(
        sources or [], model=loaded, model_name=model, settings=settings, device=setting.device, workers=workers,
        images=images, image_size=image_size, seconds=seconds, repeats=repeats, out=to,
    ).show(out)  # fmt: skip
    if to is not None:
        out.print(f"Results: {to}", soft_wrap=True)


ONNX_SIZES = ("224", "256", "320x480", "512", "768")


@bench_app.command("onnx", cls=Command)
def onnx_command(
    model: opt.Model = "veca_tiny",
    size: Annotated[Any, opt.option("bench.onnx-size")] = ONNX_SIZES,
    cores: opt.Budgets = None,
    dtype: Annotated[ExportDtype, opt.option("bench.onnx-dtype")] = "float32",
    threads: Annotated[int, opt.option("bench.onnx-threads")] = 1,
    repeats: Repeats = 7,
) -> None:
    """Error and time of ONNX files beside PyTorch on the CPU."""
    bench_onnx(model, size, cores or (8, 32, 64), dtype, threads, repeats)


@bench_app.command("serve", cls=Command)
def bench_serve_command(
    model: opt.Model = "veca_tiny",
    clients: Annotated[int, opt.option("bench.crowd-clients")] = 32,
    seconds: Seconds = 20.0,
    hostile: Annotated[bool, opt.option("bench.hostile")] = False,
    kill: Annotated[bool, opt.option("bench.kill")] = False,
) -> None:
    """Throughput of `veca serve` with many clients beside plain batched inference; every answer is checked."""
    bench_serve(model, clients, seconds, hostile, kill)


@explorer_app.command("page", cls=Command)
def page_command(
    model: opt.Model = "veca_tiny",
    images: Annotated[int, opt.option("bench.page-images")] = 6,
    chromium: Chromium = None,
) -> None:
    """Time from a dropped image or a moved slider to the drawn page, in Chromium."""
    bench_explorer_page(model, images, chromium)


@explorer_app.command("crowd", cls=Command)
def crowd_command(
    model: opt.Model = "veca_tiny",
    clients: Annotated[int, opt.option("bench.crowd-clients")] = 50,
    seconds: Seconds = 20.0,
) -> None:
    """Waiting times and answers of the API with many clients."""
    bench_explorer_crowd(model, clients, seconds)


@explorer_app.command("shot", cls=Command)
def screenshot_command(
    to: Annotated[Path, opt.option("bench.screenshot-out")], model: opt.Model = "veca_tiny",
    chromium: Chromium = None,
) -> None:  # fmt: skip
    """Screenshot of the page, as in the README."""
    screenshot_explorer(to, model, chromium)
