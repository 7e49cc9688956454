"""`veca probe`: linear probes and nearest neighbours on frozen features."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.table import Table

from veca.cli import common
from veca.cli import options as opt
from veca.cli.common import out, print_cost_table
from veca.data.datasets import limit_splits, load_dataset
from veca.errors import ArgumentError
from veca.heads.features import FeatureKind, FrozenBackbone, FrozenPrecision, FrozenVeca
from veca.probe.backbones import load_backbone
from veca.probe.dense_run import DenseSettings, DepthSettings, NormName, ProbeFit, probe_dense
from veca.probe.pareto import make_cost_table, write_cost_table
from veca.probe.run import ClassifySettings, KnnSettings, Row, classify, knn

probe_app = common.make_group(
    "Measure what the features of a frozen model are worth, at all budgets and sizes; rows are added to a folder.\n\n"
    "Example: veca probe knn --model veca_tiny --data pets --cores 8,64. Then `veca report results`.\n\n"
    "Interrupted or killed? Run the same command again: it continues, and the result is the same."
)
INTERRUPTED = "Interrupted. The same command continues after the rows and the parts of features that are finished."

ProbeTask = Literal["classify", "segment", "depth"]
ResultsOut = Annotated[Path, opt.option("probe.out")]
PrecisionOption = Annotated[FrozenPrecision | None, opt.option("probe.precision")]
Compile = Annotated[bool, opt.option("probe.compile")]
AnyBudgets = Annotated[Any, opt.option("budgets", show_default="all in the folder")]
AnyWidths = Annotated[Any, opt.option("widths", show_default="all in the folder")]
AnySizes = Annotated[Any, opt.option("sizes", show_default="all in the folder")]
# The options of the fields that settings have; the fields without one keep their defaults.
ALL_PROBES = {
    "cores": opt.Budgets,
    "sizes": opt.Sizes,
    "rates": Annotated[Any, opt.option("probe.rates")],
    "seed": opt.Seed,
    "workers": opt.Workers,
    "decode": opt.Decoding,
    "skip_bad": opt.SkipBad,
    "progress": opt.ShowProgress,
}
FEATURE_PROBES = ALL_PROBES | {
    "decays": Annotated[Any, opt.option("probe.decays")],
    "epochs": Annotated[int, opt.option("probe.epochs")],
    "batch": Annotated[int, opt.option("probe.batch")],
    "passes": Annotated[int, opt.option("probe.passes")],
    "ks": Annotated[Any, opt.option("probe.ks")],
    "temperature": Annotated[float, opt.option("probe.temperature")],
    "feature": Annotated[FeatureKind, opt.option("probe.feature")],
    "standardize": Annotated[bool, opt.option("probe.standardize")],
    "at_once": opt.AutoBatchSize,
    "also": Annotated[Any, opt.option("probe.also")],
}
DENSE_PROBES = ALL_PROBES | {
    "fit": Annotated[ProbeFit, opt.option("probe.fit")],
    "max_patches": opt.MaxPatches,
    "decay": Annotated[float, opt.option("probe.decay")],
    "steps": Annotated[int, opt.option("probe.steps")],
    "every": Annotated[int | None, opt.option("probe.every")],
    "batch": opt.TrainBatchSize,
    "norm": Annotated[NormName, opt.option("probe.norm")],
    "slide": Annotated[bool, opt.option("probe.slide")],
    "head": Annotated[Literal["bins", "regression"], opt.option("probe.head")],
    "bins": Annotated[int, opt.option("probe.bins")],
    "loss": Annotated[Literal["sig", "l1", "l2"], opt.option("probe.loss")],
}


_DENSE_HELP = (
    "Linear {} the feature map: AdamW, the best rate and step on val, evaluated on test or else val.\n\n"
    "--size is the short side of the image; --fit native keeps the image's own size."
)
_CLASSIFY_HELP = "Linear classifiers on the global feature: SGD, the best rate and decay on val, evaluated on test."
# The function, its settings, the task of its data, and the help of each command.
PROBES: dict[str, tuple[Callable[..., Sequence[Row]], Callable[..., Any], ProbeTask, str]] = {
    "classify": (classify, ClassifySettings, "classify", _CLASSIFY_HELP),
    "knn": (knn, KnnSettings, "classify", "Nearest neighbours by the global feature: nothing is trained."),
    "segment": (probe_dense, DenseSettings, "segment", _DENSE_HELP.format("segmentation of")),
    "depth": (probe_dense, DepthSettings, "depth", _DENSE_HELP.format("depth from")),
}


def _run_probe(
    name: str, data: opt.Data, model: opt.Backbone = "veca_tiny", to: ResultsOut = Path("results"),
    root: opt.DataRoot = None, limit: opt.Limit = None, device: opt.Device = "auto", precision: PrecisionOption = None,
    compile: Compile = False, widths: opt.Widths = None, compute: opt.ComputeShare = None, **values: Any,
) -> None:  # fmt: skip
    probe, kind, task, _ = PROBES[name]
    with common.resumable(INTERRUPTED):
        names = (data, *(values.pop("also", None) or ()))
        dataset, *others = [limit_splits(load_dataset(each, root, task), limit) for each in names]
        common.register_timm_models(model)
        backbone = load_backbone(model, device, precision, compile)
        common.warn_if_random(backbone.about.get("provenance", {}), model)
        if compute is not None:
            widths = _apply_compute(backbone, compute, widths, values)
        values["cores"] = backbone.budgets if values["cores"] == () else values["cores"]
        # On a CPU each worker also runs the model on one core, if it computes global features: use them all.
        every_cpu = backbone.forks and task == "classify"
        values["workers"] = common.count_workers(values["workers"], limit=None if every_cpu else 8)
        also = {"also": others} if others else {}
        if widths == ():
            widths = backbone.about["config"].get("widths", (1,)) if backbone.kind == "veca" else None
        backbones = [backbone] if widths is None else [backbone.at_width(width) for width in widths]
        settings = kind(**values)
        rows = [row for each in backbones for row in probe(each, dataset, to, settings, warn=common.warn, **also)]
        _print_rows(rows, to)


for _name, (_, _settings, _task, _help) in PROBES.items():
    _options = FEATURE_PROBES if _task == "classify" else DENSE_PROBES
    _defaults = {"workers": None} | ({"also": None} if _name == "classify" else {})
    _command = common.with_settings(partial(_run_probe, _name), _options, _settings, **_defaults)
    probe_app.command(_name, cls=common.Command, help=_help)(_command)


def _apply_compute(backbone: FrozenBackbone, compute: float, widths: Any, values: dict[str, Any]) -> tuple[float]:
    """Put what `--compute` stands for into the settings; return the widths."""
    if not isinstance(backbone, FrozenVeca) or len(values["sizes"]) > 1:
        raise ArgumentError("--compute is for a VECA, at one --size; name the settings of others by --cores and --size")
    if values.get("fit") == "native":
        raise ArgumentError("--compute counts square images of --size: leave it out with --fit native, or name --cores")
    choice = common.choose_compute(backbone.model, compute, values["sizes"][0], values["cores"], widths)
    values |= {"cores": (choice.cores,), "sizes": (choice.size[0],)}
    return (choice.width,)


@probe_app.command("pareto", cls=common.Command)
def pareto_command(
    model: opt.Backbone = "veca_tiny", to: ResultsOut = Path("results"),
    probes: Annotated[Any, opt.option("probe.probes")] = None, cores: AnyBudgets = None,
    widths: AnyWidths = None, sizes: AnySizes = None, batch: opt.BatchSize = 16,
    repeats: Annotated[int, opt.option("bench.repeats")] = 20,
    device: opt.Device = "auto", precision: PrecisionOption = None, compile: Compile = False,
) -> None:  # fmt: skip
    """Quality against FLOPs and measured time over budgets, widths and sizes: table, Pareto front, chart.

    Scores are the rows that probes of this model left in --out; times are measured here, settings in turns. Then
    `veca convert --table results/pareto.json` puts the table into the weights, for --compute.
    """
    with common.resumable("Interrupted."):
        backbone = load_backbone(model, device, precision, compile)
        # An empty list is "all".
        table = make_cost_table(backbone, to, probes, cores or None, widths or None, sizes or None, batch, repeats)
        files = write_cost_table(table, to)
    print_cost_table(table)
    for path in files:
        common.print_path("Wrote", path)


def _spread(row: Row, metric: str) -> str:
    """Half the width of the confidence interval, of the main metric alone: the table must fit a terminal."""
    low, high = (row.get("interval") or {}).get(metric, (0, 0))
    return f" ± {(high - low) / 2:.2g}" if high and metric == row["metric"] else ""


def _print_rows(rows: Sequence[Row], folder: Path) -> None:
    """Print the rows as a table with the first three metrics; the files have all of them."""
    first = rows[0]
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))[:3]
    columns = list(dict.fromkeys([*metrics, *(name for row in rows for name in row["also"] or ())]))
    counts = ", ".join(f"{name} {first['data'][name]:,}" for name in ("train", "val", "test") if first["data"][name])
    title = f"{first['task']} · {first['model']['name']} · {first['data']['name']} ({counts}), "
    elastic = any("width" in row for row in rows)
    table = Table(
        "size", "cores", *["width"] * elastic, *columns, "rate", "decay", "seconds",
        title=f"{title}scored on {first['scored_on']}", header_style="bold", title_justify="left",
    )  # fmt: skip
    for row in rows:
        scores = row["metrics"] | {name: each["top1"] for name, each in (row["also"] or {}).items()}
        best, limit = row["best"] or {}, row["protocol"].get("max_patches")
        table.add_row(
            f"native ≤ {limit:,}" if limit else str(row["size"]), "–" if row["cores"] is None else str(row["cores"]),
            *[f"{row.get('width', 1):g}"] * elastic,
            *(f"{scores[name]:.4g}{_spread(row, name)}" if name in scores else "" for name in columns),
            *(f"{best[name]:g}" if best else "–" for name in ("rate", "decay")),
            f"{sum(row['seconds'].values()):.1f}",
        )  # fmt: skip
    out.print(table)
    if any(row.get("interval") for row in rows):
        out.print("± is half of the 95 % confidence interval, from the scored images alone.", soft_wrap=True)
    out.print(f"Rows: {folder / 'rows'}", soft_wrap=True)
