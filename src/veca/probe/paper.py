"""The paper's results, each with the table it is from, and results of ours beside the nearest of them."""

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from veca.config import VecaConfig, size_name
from veca.data.datasets import SPECS
from veca.probe.results import ProbeResult, json_value, lower_is_better

PAPER: Mapping[str, Any] = json.loads((files("veca.probe") / "paper.json").read_text(encoding="utf-8"))
MODEL_SIZES = ("T", "S", "S+", "B", "L", "H", "g")  # from small to large; the paper has S to L
VECA_SIZES = {"veca_tiny": "T", "veca_small": "S", "veca_small_plus": "S+", "veca_base": "B", "veca_large": "L"}


class Kin(NamedTuple):
    """Family and size of a model, in the paper's terms."""

    family: str
    size: str


class PaperNumber(NamedTuple):
    """One number of the paper."""

    table: str
    """Such as "S10"."""
    task: str
    dataset: str
    metric: str
    model: str
    """One name per model, such as "DINOv2-reg-B", however a table spells it."""
    printed: str
    """The model as the table spells it."""
    cores: int | None
    size: int
    value: float

    @property
    def kin(self) -> Kin:
        family, _, size = self.model.rpartition("-")
        return Kin(family, size)


class Comparison(NamedTuple):
    """A result beside a number of the paper."""

    number: PaperNumber
    gap: float
    """Ours less the paper's."""
    better: bool
    """Ours is strictly better."""
    same_size: bool
    """Both models are of one size."""
    notes: Sequence[str]
    """Every known difference between the two."""


@functools.cache
def paper_numbers() -> tuple[PaperNumber, ...]:
    """All numbers, in the order of the tables."""
    names = PAPER["models"]
    return tuple(
        PaperNumber(table["table"], task, dataset, metric, names.get(printed, printed), printed, cores, size, value)
        for table in PAPER["tables"]
        for printed, cores, size, values in table["rows"]
        for (task, dataset, metric), value in zip(table["columns"], values, strict=True)
    )


def find(
    task: str, dataset: str, metric: str | None = None, model: str | None = None,
    cores: int | None = None, size: int | None = None,
) -> list[PaperNumber]:  # fmt: skip
    """The numbers that agree with every argument that is given.

    >>> [(n.table, n.value) for n in find("segment", "coco-object", model="VECA-B", cores=64, size=512)]
    [('1', 63.58), ('S11', 62.58)]
    """
    same = [n for n in paper_numbers() if (n.task, n.dataset) == (task, PAPER["near"].get(dataset, [dataset])[0])]
    same = [n for n in same if metric in (None, n.metric, n.metric.lower()) and model in (None, n.model)]
    return [n for n in same if cores in (None, n.cores) and size in (None, n.size)]


def nearest(task: str, dataset: str, metric: str, kin: Kin, cores: int | None, size: int) -> PaperNumber | None:
    """The number by a model of the same family that is nearest in model size, then in budget and resolution together.

    >>> nearest("segment", "ade20k", "mIoU", Kin("VECA", "T"), 32, 512).value
    43.98
    >>> nearest("segment", "ade20k", "mIoU", Kin("EVA", "B"), None, 512)
    """

    def distance(n: PaperNumber) -> tuple[float, float]:
        model = abs(MODEL_SIZES.index(n.kin.size) - MODEL_SIZES.index(kin.size))
        budget = abs(math.log2(n.cores / cores)) if n.cores and cores else 0.0
        return model, budget + abs(math.log2(n.size / size))

    candidates = [n for n in find(task, dataset, metric) if n.kin.family == kin.family]
    return min((n for n in candidates if (n.cores is None) == (cores is None)), key=distance, default=None)


def kin(name: str, kind: str, about: Mapping[str, Any]) -> Kin | None:
    """Family and size of a model, from its configuration if it is a VECA and has one, else from its name.

    >>> kin("facebook/dinov3-vits16plus-pretrain-lvd1689m", "transformers", {})
    Kin(family='DINOv3', size='S+')
    >>> kin("timm:vit_base_patch14_reg4_dinov2.lvd142m", "timm", {})
    Kin(family='DINOv2-reg', size='B')
    >>> kin("resnet50", "timm", {})
    """

    def match(patterns: str) -> str | None:
        return next((text for text, pattern in PAPER[patterns] if re.search(pattern, name.lower())), None)

    family, size = "VECA" if kind == "veca" else match("families"), match("sizes")
    if kind == "veca" and (config := json_value(about.get("config"), dict)):
        try:
            size = VECA_SIZES.get(size_name(VecaConfig.from_dict(config)) or "")
        except (ValueError, TypeError):  # a configuration of another version
            size = None
    return Kin(family, size) if family and size else None


def compare_with_paper(row: ProbeResult, dataset: str | None = None) -> Comparison | None:
    """A result, or its score on one of its further datasets, beside the paper's nearest number, if there is one.

    Data of the user's is not compared, whatever its name, nor a result at native sizes, of which the paper has none.
    """
    if row.native:
        return None
    name = row.dataset if dataset is None else dataset
    metric, metrics = row.on(dataset)
    value, own = metrics.get(metric, math.nan), kin(row.model, row.kind, row.about)
    comparable = math.isfinite(value) and row.is_published(dataset)
    quoted = nearest(row.task, name, metric, own, row.cores, row.size) if own and comparable else None
    if own is None or quoted is None:
        return None
    gap = value - quoted.value
    better = (gap < 0) if lower_is_better(metric) else (gap > 0)
    same = find(row.task, name, quoted.metric, quoted.model, quoted.cores, quoted.size)
    notes = [
        _model_note(row, own, quoted),
        f"the paper's number is at C = {quoted.cores}" if quoted.cores != row.cores else "",
        f"the paper's number is at {quoted.size} px" if quoted.size != row.size else "",
        # How a dataset differs from the paper's that it is a variant of, and what is uncertain about those numbers.
        *PAPER["near"].get(name, [])[1:],
        PAPER["caveats"].get(name, ""),
        *(_data_notes(row) if name == row.dataset else []),
        *(f"another protocol: {setting}" for setting in other_settings(row.task, row.protocol)),
        "scored on val, not on test" if row.scored_on == "val" and row.counts.get("test") else "",
        *(f"Table {n.table} of the paper has {n.value:g} for the same" for n in same if n.value != quoted.value),
    ]
    return Comparison(quoted, gap, better, quoted.kin.size == own.size, [note for note in notes if note])


def _model_note(row: ProbeResult, own: Kin, quoted: PaperNumber) -> str:
    other = "" if quoted.kin.size == own.size else f"; of another size, and {quoted.model} the paper's nearest"
    if own.family != "VECA":
        return f"another size; {quoted.model} is the paper's nearest" if other else ""
    provenance = json_value(row.about.get("provenance"), dict)
    if provenance.get("weights") == "random":
        return f"random weights, not the paper's VECA{other}"
    if "official_config" in provenance:
        return f"weights in the authors' format; that they are the paper's is not checked{other}"
    teacher = provenance.get("teacher")
    teacher = json_value(json_value(teacher, dict).get("name", teacher), str)
    return f"a VECA of our own{f', distilled from {teacher}' if teacher else ''}, not the paper's{other}"


def _data_notes(row: ProbeResult) -> list[str]:
    """Where this copy of the dataset differs from the published one: as the probe found, or by its number of images."""
    if problems := json_value(row.protocol.get("problems"), list):
        return [f"{row.dataset}: {problem}" for problem in problems[:4]]
    count = sum(row.counts.values())
    published = sum(SPECS[row.dataset].sizes.values()) if row.dataset in SPECS else count
    return [f"{count:,} pictures of {row.dataset}; {published:,} were published"] if count != published else []


def other_settings(task: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings that differ from those the paper states; what either does not state is not compared.

    >>> other_settings("classify", {"batch": 64, "optimizer": "SGD, momentum 0.9"})
    ['batch 64 (paper: 128)']
    """
    differences = []
    for key, stated in PAPER["protocol"].get(task, {}).items():
        value = settings.get(key)
        # "poly" and "polynomial" are the same.
        same = (
            stated.lower()[:4] in value.lower()
            if isinstance(value, str) and isinstance(stated, str)
            else value == stated
        )
        if not same and isinstance(value, int | float | str):
            differences.append(f"{key} {value} (paper: {stated})")
    return differences
