"""`veca bench`: speed and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from veca.bench.cases import Bench, choose_cases
from veca.bench.plots import PlotFormat, write_plots
from veca.bench.run import FloatDtype, pick_setting, run_bench
from veca.cli.common import Command, make_group, out
from veca.cli.options import Budgets, Device, Ints, Words, parse_ints, parse_words

bench_app = make_group(
    "Measure speed and memory beside the dense ViT of the same size, and against the limits of this machine.\n\n"
    "Example: veca bench model --case base:1024:16,base:512:32"
)

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
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for results.json, results.csv, table.txt.")]


@bench_app.command("model", cls=Command)
def bench_model(
    case: Cases = None, model: BenchModels = None, size: BenchSizes = None, batch_size: BatchSizes = None,
    cores: Budgets = None, contenders: Contenders = None, device: Device = "auto", precision: BenchPrecision = None,
    cls_only: Annotated[bool, typer.Option("--cls-only", help="Compute the global feature alone.")] = False,
    repeats: Repeats = 10, profile: Profile = False, errors: Errors = True, to: Out = None,
) -> None:  # fmt: skip
    """Forward pass of the whole model: all ways to run VECA, the dense ViT, and the matrix products alone."""
    sweep = (case, model, size, batch_size, cores)
    _bench("model", sweep, contenders, device, precision, repeats, profile, errors, to, cls_only)


@bench_app.command("train", cls=Command)
def bench_train(
    case: Cases = None, model: BenchModels = None, size: BenchSizes = None, batch_size: BatchSizes = None,
    cores: Budgets = None, contenders: Contenders = None, device: Device = "auto", precision: BenchPrecision = None,
    repeats: Repeats = 10, profile: Profile = False, errors: Errors = True, to: Out = None,
) -> None:  # fmt: skip
    """Forward and backward pass, float32 weights under autocast; memory includes weights and gradients."""
    sweep = (case, model, size, batch_size, cores)
    _bench("train", sweep, contenders, device, precision, repeats, profile, errors, to)


@bench_app.command("attention", cls=Command)
def bench_attention(
    case: Cases = None, model: BenchModels = None, size: BenchSizes = None, batch_size: BatchSizes = None,
    cores: Budgets = None, contenders: Contenders = None, device: Device = "auto", precision: BenchPrecision = None,
    repeats: Repeats = 10, profile: Profile = False, errors: Errors = True, to: Out = None,
) -> None:  # fmt: skip
    """Attention of one layer alone, rotary embedding included: forward, then backward."""
    sweep = (case, model, size, batch_size, cores)
    _bench("attention", sweep, contenders, device, precision, repeats, profile, errors, to)


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


def _bench(
    bench: Bench, sweep: tuple[Any, ...], contenders: Words | None, device: str, precision: FloatDtype | None,
    repeats: int, profile: bool, errors: bool, to: Path | None, cls_only: bool = False,
) -> None:  # fmt: skip
    setting = pick_setting(device, precision, cls_only)
    cases = choose_cases(bench, setting.device.type == "cuda", *(values or () for values in sweep))
    run_bench(bench, cases, setting, contenders or (), repeats, profile, to, errors).show(out)
    if to is not None:
        out.print(f"Results: {to}", soft_wrap=True)
