"""The commands of `veca bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from veca.bench.cases import Bench, choose_cases
from veca.bench.plots import Format, write_plots
from veca.bench.run import FloatDtype, pick_setting, run_bench
from veca.cli.common import out

bench_app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed and memory beside the dense ViT of the same size, and against the floor of this machine.\n\n"
    "Example: veca bench model --case base:1024:16",
)

Cases = Annotated[
    list[str] | None,
    typer.Option(
        "--case", help="MODEL:PIXELS:BATCH[:CORES], as base:1024:16; repeat.", show_default="those of our targets"
    ),
]
Models = Annotated[list[str] | None, typer.Option("--model", help="small, small_plus, base, large, tiny; repeat.")]
Sizes = Annotated[list[int] | None, typer.Option("--size", help="Side in pixels, a multiple of 16; repeat.")]
Batches = Annotated[list[int] | None, typer.Option("--batch", help="Images at a time; repeat.")]
Budgets = Annotated[list[int] | None, typer.Option("--cores", help="Budget, 1 to 64; repeat.")]
Contenders = Annotated[
    list[str] | None,
    typer.Option("--contender", help="Who takes part, as veca-eager; repeat.", show_default="all that apply"),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto takes CUDA where there is one.")]
Precision = Annotated[
    FloatDtype | None, typer.Option(help="Of the computation.", show_default="bfloat16 on CUDA, float32 elsewhere")
]
Repeats = Annotated[int, typer.Option(help="Rounds that count; every contender has a turn in each.")]
Profile = Annotated[bool, typer.Option("--profile", help="Also where the time of each contender goes.")]
Errors = Annotated[bool, typer.Option("--errors/--no-errors", help="Also how far results are from float64.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for results.json, results.csv, table.txt.")]


@bench_app.command("model")
def bench_model(
    case: Cases = None, model: Models = None, size: Sizes = None, batch: Batches = None, cores: Budgets = None,
    contender: Contenders = None, device: Device = "auto", dtype: Precision = None,
    cls_only: Annotated[bool, typer.Option("--cls-only", help="Ask for the global feature alone.")] = False,
    repeats: Repeats = 10, profile: Profile = False, errors: Errors = True, to: Out = None,
) -> None:  # fmt: skip
    """Forward pass of the whole model: VECA in every way to run it, the dense ViT, and the products alone."""
    sweep = (case, model, size, batch, cores)
    _bench("model", sweep, contender, device, dtype, repeats, profile, errors, to, cls_only)


@bench_app.command("train")
def bench_train(
    case: Cases = None, model: Models = None, size: Sizes = None, batch: Batches = None, cores: Budgets = None,
    contender: Contenders = None, device: Device = "auto", dtype: Precision = None,
    repeats: Repeats = 10, profile: Profile = False, errors: Errors = True, to: Out = None,
) -> None:  # fmt: skip
    """Forward and backward pass, float32 weights under autocast; memory counts weights and gradients."""
    _bench("train", (case, model, size, batch, cores), contender, device, dtype, repeats, profile, errors, to)


@bench_app.command("attention")
def bench_attention(
    case: Cases = None, model: Models = None, size: Sizes = None, batch: Batches = None, cores: Budgets = None,
    contender: Contenders = None, device: Device = "auto", dtype: Precision = None,
    repeats: Repeats = 10, profile: Profile = False, errors: Errors = True, to: Out = None,
) -> None:  # fmt: skip
    """Attention of one layer alone, rotary embedding included: forward, then backward."""
    _bench("attention", (case, model, size, batch, cores), contender, device, dtype, repeats, profile, errors, to)


@bench_app.command("plot")
def bench_plot(
    results: Annotated[list[Path], typer.Argument(help="results.json files that other `veca bench` commands wrote.")],
    to: Annotated[Path, typer.Option("--out", "-o", help="Folder for the plots.")],
    form: Annotated[Format, typer.Option("--format", help="Of the files.")] = "svg",
) -> None:
    """Plot FLOPs against resolution, and latency against resolution and batch size.

    Latency is plotted where results have several sizes at one batch, or several batches at one size: sweep --size or
    --batch.
    """
    for path in write_plots(results, to, form):
        out.print(f"Wrote {path}", soft_wrap=True)


def _bench(
    bench: Bench, sweep: tuple[Any, ...], contenders: list[str] | None, device: str, dtype: FloatDtype | None,
    repeats: int, profile: bool, errors: bool, to: Path | None, cls_only: bool = False,
) -> None:  # fmt: skip
    setting = pick_setting(device, dtype, cls_only)
    cases = choose_cases(bench, setting.device.type == "cuda", *(values or () for values in sweep))
    run_bench(bench, cases, setting, contenders or (), repeats, profile, to, errors).show(out)
    if to is not None:
        out.print(f"Results: {to}", soft_wrap=True)
