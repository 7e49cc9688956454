"""`veca probe`: linear probes and nearest neighbours on frozen features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from veca.cli.common import (
    Command,
    count_workers,
    make_group,
    out,
    register_timm_models,
    resumable_command,
    warn,
    warn_if_random,
)
from veca.cli.options import (
    AutoBatchSize,
    Backbone,
    Budgets,
    Data,
    DataRoot,
    Device,
    Floats,
    Ints,
    Limit,
    Seed,
    ShowProgress,
    Sizes,
    SkipBad,
    TrainBatchSize,
    Words,
    Workers,
    parse_floats,
    parse_ints,
    parse_words,
)
from veca.data.datasets import ProbeData, limit_splits, load_dataset
from veca.heads.frozen import FeatureKind, FrozenBackbone, FrozenPrecision
from veca.heads.linear import DECAYS, RATES
from veca.probe.backbones import load_backbone
from veca.probe.dense_run import DenseSettings, DepthSettings, NormName, probe_dense
from veca.probe.run import ClassifySettings, KnnSettings, Row, classify, knn

probe_app = make_group(
    "Measure what the features of a frozen model are worth, at all budgets and sizes; rows are added to a folder.\n\n"
    "Example: veca probe knn --model veca_tiny --data pets --cores 8,64. Then `veca report results`.\n\n"
    "Interrupted or killed? Run the same command again: it continues, and the result is the same."
)
INTERRUPTED = "Interrupted. The same command continues after the rows and the parts of features that are finished."

Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of results; it may hold those of other runs.")]
PrecisionOption = Annotated[
    FrozenPrecision | None,
    typer.Option("--precision", help="Precision of the backbone.", show_default="bfloat16 on a GPU, float32 elsewhere"),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compile a VECA first, in a minute or less: for long runs without fused kernels."),
]
Feature = Annotated[
    FeatureKind,
    typer.Option("--feature", help="cls: the global feature, as in the paper; or with the mean of the patches."),
]
Rates = Annotated[
    Floats, typer.Option(parser=parse_floats, metavar="LR,…", help="Learning rates; a head is trained for each.")
]
Decay = Annotated[float, typer.Option(min=0, help="Weight decay.")]
Steps = Annotated[int, typer.Option(min=1, help="Training steps.")]
Every = Annotated[
    int | None, typer.Option(min=1, help="Steps between evaluations on val.", show_default="a tenth of all steps")
]
Norm = Annotated[NormName, typer.Option("--norm", help="Normalisation of the features before the head.")]
Slide = Annotated[bool, typer.Option("--slide", help="Evaluate by sliding square windows, not whole images.")]


@probe_app.command("classify", cls=Command)
def classify_command(
    data: Data, model: Backbone = "veca_tiny", to: Out = Path("results"), cores: Budgets = None,
    size: Sizes = Ints([256]), root: DataRoot = None,
    also: Annotated[
        Words | None,
        typer.Option(parser=parse_words, metavar="NAME,…", help="Evaluate the head on these too, as imagenetv2."),
    ] = None,
    rates: Rates = Floats(RATES),
    decays: Annotated[
        Floats,
        typer.Option(parser=parse_floats, metavar="WD,…", help="Weight decays; a head is trained for every pair."),
    ] = Floats(DECAYS),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs over the features of train.")] = 100,
    head_batch_size: Annotated[int, typer.Option(min=1, help="Features per step of SGD.")] = 128,
    passes: Annotated[
        int, typer.Option(min=0, help="Passes of random crops and flips over train, instead of its centre crops.")
    ] = 0,
    feature: Feature = "cls",
    standardize: Annotated[
        bool, typer.Option("--standardize", help="Standardise the channels of the features.")
    ] = False,
    limit: Limit = None, seed: Seed = 0, device: Device = "auto", precision: PrecisionOption = None,
    compile: Compile = False, workers: Workers = None, batch_size: AutoBatchSize = None, skip_bad: SkipBad = False,
    progress: ShowProgress = True,
) -> None:  # fmt: skip
    """Linear classifiers on the global feature: SGD, the best rate and decay on val, evaluated on test."""
    with resumable_command(INTERRUPTED):
        dataset, backbone = _load_data(data, root, "classify", limit), _load(model, device, precision, compile)
        settings = ClassifySettings(
            cores=_budgets(cores, backbone), sizes=size, seed=seed, at_once=batch_size,
            workers=_worker_count(workers, backbone), skip_bad=skip_bad, progress=progress, rates=rates, decays=decays,
            epochs=epochs, batch=head_batch_size, passes=passes, feature=feature, standardize=standardize,
        )  # fmt: skip
        others = [_load_data(name, root, "classify", limit) for name in also or ()]
        _print_rows(classify(backbone, dataset, to, settings, others, warn), to)


@probe_app.command("knn", cls=Command)
def knn_command(
    data: Data, model: Backbone = "veca_tiny", to: Out = Path("results"), cores: Budgets = None,
    size: Sizes = Ints([256]), root: DataRoot = None,
    k: Annotated[
        Ints, typer.Option("--k", parser=parse_ints, metavar="K,…", help="Neighbours; the last one is the result.")
    ] = Ints([10, 20]),
    temperature: Annotated[float, typer.Option(min=1e-3, help="A neighbour weighs exp(cosine / temperature).")] = 0.07,
    feature: Feature = "cls", limit: Limit = None, seed: Seed = 0, device: Device = "auto",
    precision: PrecisionOption = None, compile: Compile = False, workers: Workers = None,
    batch_size: AutoBatchSize = None, skip_bad: SkipBad = False, progress: ShowProgress = True,
) -> None:  # fmt: skip
    """Nearest neighbours by the global feature: nothing is trained."""
    with resumable_command(INTERRUPTED):
        dataset, backbone = _load_data(data, root, "classify", limit), _load(model, device, precision, compile)
        settings = KnnSettings(
            cores=_budgets(cores, backbone), sizes=size, seed=seed, at_once=batch_size,
            workers=_worker_count(workers, backbone), skip_bad=skip_bad, progress=progress, ks=k,
            temperature=temperature, feature=feature,
        )  # fmt: skip
        _print_rows(knn(backbone, dataset, to, settings, warn), to)


@probe_app.command("segment", cls=Command)
def segment_command(
    data: Data, model: Backbone = "veca_tiny", to: Out = Path("results"), cores: Budgets = None,
    size: Sizes = Ints([512]), root: DataRoot = None, rates: Rates = Floats(DenseSettings.rates), decay: Decay = 1e-4,
    steps: Steps = 10_000, every: Every = None, batch_size: TrainBatchSize = 8, norm: Norm = "none",
    slide: Slide = False, limit: Limit = None, seed: Seed = 0, device: Device = "auto",
    precision: PrecisionOption = None, compile: Compile = False, workers: Workers = None, skip_bad: SkipBad = False,
    progress: ShowProgress = True,
) -> None:  # fmt: skip
    """Linear segmentation of the feature map: AdamW, the best rate and step on val, evaluated on test or else val.

    --size is the short side of the image.
    """
    with resumable_command(INTERRUPTED):
        dataset, backbone = _load_data(data, root, "segment", limit), _load(model, device, precision, compile)
        settings = DenseSettings(
            cores=_budgets(cores, backbone), sizes=size, seed=seed, workers=count_workers(workers), skip_bad=skip_bad,
            progress=progress, rates=rates, decay=decay, steps=steps, every=every, batch=batch_size, norm=norm,
            slide=slide,
        )  # fmt: skip
        _print_rows(probe_dense(backbone, dataset, to, settings, warn), to)


@probe_app.command("depth", cls=Command)
def depth_command(
    data: Data, model: Backbone = "veca_tiny", to: Out = Path("results"), cores: Budgets = None,
    size: Sizes = Ints([512]), root: DataRoot = None,
    head: Annotated[
        Literal["bins", "regression"], typer.Option(help="bins: weights of a set of depths; regression: the depth.")
    ] = "bins",
    bins: Annotated[int, typer.Option(min=2, max=65_536, help="Number of depths.")] = 256,
    loss: Annotated[Literal["sig", "l1", "l2"], typer.Option(help="sig: scale-invariant logarithmic.")] = "sig",
    rates: Rates = Floats(DenseSettings.rates), decay: Decay = 1e-4, steps: Steps = 10_000, every: Every = None,
    batch_size: TrainBatchSize = 8, norm: Norm = "none", slide: Slide = False, limit: Limit = None, seed: Seed = 0,
    device: Device = "auto", precision: PrecisionOption = None, compile: Compile = False, workers: Workers = None,
    skip_bad: SkipBad = False, progress: ShowProgress = True,
) -> None:  # fmt: skip
    """Linear depth from the feature map: AdamW, the best rate and step on val, evaluated on test or else val.

    --size is the short side of the image.
    """
    with resumable_command(INTERRUPTED):
        dataset, backbone = _load_data(data, root, "depth", limit), _load(model, device, precision, compile)
        settings = DepthSettings(
            cores=_budgets(cores, backbone), sizes=size, seed=seed, workers=count_workers(workers), skip_bad=skip_bad,
            progress=progress, rates=rates, decay=decay, steps=steps, every=every, batch=batch_size, norm=norm,
            slide=slide, head=head, bins=bins, loss=loss,
        )  # fmt: skip
        _print_rows(probe_dense(backbone, dataset, to, settings, warn), to)


def _worker_count(workers: int | None, backbone: FrozenBackbone) -> int:
    # On a CPU each worker also runs the model on one core: use them all.
    return count_workers(workers, limit=None if backbone.forks else 8)


def _load(model: str, device: str, precision: FrozenPrecision | None, compile: bool) -> FrozenBackbone:
    register_timm_models(model)
    backbone = load_backbone(model, device, precision, compile)
    warn_if_random(backbone.about.get("provenance", {}), model)
    return backbone


def _load_data(
    data: str, root: Path | None, task: Literal["classify", "segment", "depth"], limit: int | None
) -> ProbeData:
    return limit_splits(load_dataset(data, root, task), limit)


def _budgets(budgets: Ints | None, backbone: FrozenBackbone) -> tuple[int, ...] | None:
    return budgets if budgets or budgets is None else backbone.budgets


def _print_rows(rows: Sequence[Row], folder: Path) -> None:
    """Print the rows as a table with the first three metrics; the files have all of them."""
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
        also: dict[str, Any] = row["also"] or {}
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
