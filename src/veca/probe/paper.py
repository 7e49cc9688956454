"""The paper's results, each with the table it is from, and the one that is nearest to a result of ours."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from veca.config import VecaConfig, size_name

MODEL_SIZES = ("T", "S", "S+", "B", "L", "H", "g")  # from small to large; the paper has S to L
VECA_SIZES = {"veca_tiny": "T", "veca_small": "S", "veca_small_plus": "S+", "veca_base": "B", "veca_large": "L"}
# Patterns in model names; the first that matches counts.
_SIZE_PATTERNS = (
    ("H", r"huge|vith(?=\d)"),
    ("g", r"giant|vitg(?=\d)|7b"),
    ("S+", r"small[-_]?plus|vits16plus|splus"),
    ("T", r"tiny|vitt(?=\d)"),
    ("S", r"small|vits(?=\d)"),
    ("B", r"base|vitb(?=\d)|b[-_]?16|[-_]b(?=[-_.]|$)"),
    ("L", r"large|vitl(?=\d)|l[-_]?1[46]|[-_]l(?=[-_.]|$)"),
)
_FAMILY_PATTERNS = (
    ("DINOv3", r"dinov3"),
    ("DINOv2-reg", r"reg\d?_dinov2|dinov2.*reg"),
    ("DINOv2", r"dinov2"),
    ("SigLIP2", r"siglip-?2|siglip.*v2_webli"),
    ("C-RADIOv3", r"c-radio_?v3"),
    ("AM-RADIOv2.5", r"(?<!c-)radio_?v2\.5"),
    ("DFN-CLIP", r"dfn"),
    ("OpenCLIP", r"clip.*laion|laion.*clip|openclip"),
    ("CLIP", r"clip.*openai|openai.*clip"),
)
# Models that are not the paper's: another patch size, architecture or training data.
_NOT_IN_PAPER = r"patch32|b[-_]?32|convnext|sat493m"


@dataclass(frozen=True)
class PaperNumber:
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
    def family(self) -> str:
        return self.model.rpartition("-")[0]

    @property
    def model_size(self) -> str:
        return self.model.rpartition("-")[2]


@dataclass(frozen=True)
class Kin:
    """Family and size of a model, in the paper's terms."""

    family: str
    size: str


@functools.cache
def _paper() -> Mapping[str, Any]:
    return json.loads((files("veca.probe") / "paper.json").read_text(encoding="utf-8"))


def name() -> str:
    """The paper's number and title."""
    return str(_paper()["paper"])


@functools.cache
def paper_numbers() -> tuple[PaperNumber, ...]:
    """All numbers, in the order of the tables."""
    paper = _paper()
    return tuple(
        PaperNumber(
            table["table"], task, dataset, metric, paper["models"].get(printed, printed), printed, cores, size, value
        )
        for table in paper["tables"]
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
    wanted = {"task": task, "dataset": same_dataset(dataset)[0], "model": model, "cores": cores, "size": size}
    return [
        n
        for n in paper_numbers()
        if all(value in (None, getattr(n, key)) for key, value in wanted.items())
        and metric in (None, n.metric, n.metric.lower())
    ]


def nearest(task: str, dataset: str, metric: str, kin: Kin, cores: int | None, size: int) -> PaperNumber | None:
    """The number by a model of the same family that is nearest in model size, then in budget and resolution together.

    >>> nearest("segment", "ade20k", "mIoU", Kin("VECA", "T"), 32, 512).value
    43.98
    >>> nearest("segment", "ade20k", "mIoU", Kin("EVA", "B"), None, 512)
    """

    def distance(n: PaperNumber) -> tuple[float, float]:
        model = abs(MODEL_SIZES.index(n.model_size) - MODEL_SIZES.index(kin.size))
        budget = abs(math.log2(n.cores / cores)) if n.cores and cores else 0.0
        return model, budget + abs(math.log2(n.size / size))

    candidates = [n for n in find(task, dataset, metric) if n.family == kin.family]
    return min((n for n in candidates if (n.cores is None) == (cores is None)), key=distance, default=None)


def same_dataset(dataset: str) -> tuple[str, str]:
    """The paper's name of a dataset or of the one it is a variant of, and how a variant differs."""
    near, how = _paper()["near"].get(dataset, (dataset, ""))
    return str(near), str(how)


def caveat(dataset: str) -> str:
    """What is uncertain about the paper's numbers on a dataset."""
    return str(_paper()["caveats"].get(dataset, ""))


def other_settings(task: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings that differ from those the paper states; what either does not state is not compared.

    >>> other_settings("classify", {"batch": 64, "optimizer": "SGD, momentum 0.9"})
    ['batch 64 (paper: 128)']
    """
    differences = []
    for key, stated in _paper()["protocol"].get(task, {}).items():
        value = settings.get(key)
        if isinstance(value, str) and isinstance(stated, str):
            differs = stated.lower()[:4] not in value.lower()  # "poly" and "polynomial" are the same
        else:
            differs = value is not None and value != stated
        if differs and isinstance(value, int | float | str):
            differences.append(f"{key} {value} (paper: {stated})")
    return differences


def kin(name: str, kind: str, about: Mapping[str, Any]) -> Kin | None:
    """Family and size of a model, from its configuration if it is a VECA and has one, else from its name.

    >>> kin("facebook/dinov3-vits16plus-pretrain-lvd1689m", "transformers", {})
    Kin(family='DINOv3', size='S+')
    >>> kin("timm:vit_base_patch14_reg4_dinov2.lvd142m", "timm", {})
    Kin(family='DINOv2-reg', size='B')
    >>> kin("resnet50", "timm", {})
    """
    text = name.lower()
    if kind == "veca":
        config = about.get("config")
        size = _veca_size(config) if isinstance(config, Mapping) and config else _size_in(text)
        return Kin("VECA", size) if size else None
    if re.search(_NOT_IN_PAPER, text):
        return None
    family = next((family for family, pattern in _FAMILY_PATTERNS if re.search(pattern, text)), None)
    size = _size_in(text)
    return Kin(family, size) if family and size else None


def _size_in(text: str) -> str | None:
    return next((size for size, pattern in _SIZE_PATTERNS if re.search(pattern, text)), None)


def _veca_size(config: Mapping[str, Any]) -> str | None:
    try:
        return VECA_SIZES.get(size_name(VecaConfig.from_dict(dict(config))) or "")
    except (ValueError, TypeError):  # a configuration of another version
        return None
