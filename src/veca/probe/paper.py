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


@dataclass(frozen=True)
class Kin:
    """Family and size of a model, in the paper's terms."""

    family: str
    size: str


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
    def kin(self) -> Kin:
        family, _, size = self.model.rpartition("-")
        return Kin(family, size)


@functools.cache
def _paper() -> Mapping[str, Any]:
    return json.loads((files("veca.probe") / "paper.json").read_text(encoding="utf-8"))


def name() -> str:
    """The paper's number and title."""
    return str(_paper()["paper"])


@functools.cache
def paper_numbers() -> tuple[PaperNumber, ...]:
    """All numbers, in the order of the tables."""
    names = _paper()["models"]
    return tuple(
        PaperNumber(table["table"], task, dataset, metric, names.get(printed, printed), printed, cores, size, value)
        for table in _paper()["tables"]
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
    same = [n for n in paper_numbers() if (n.task, n.dataset) == (task, _paper()["near"].get(dataset, [dataset])[0])]
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


def dataset_notes(dataset: str) -> list[str]:
    """How a dataset differs from the paper's that it is a variant of, and what is uncertain about those numbers."""
    near, caveats = _paper()["near"], _paper()["caveats"]
    return [*near.get(dataset, [])[1:], *([caveats[dataset]] if dataset in caveats else [])]


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

    def match(patterns: str) -> str | None:
        return next((text for text, pattern in _paper()[patterns] if re.search(pattern, name.lower())), None)

    config = about.get("config")
    family = "VECA" if kind == "veca" else match("families")
    size = _veca_size(config) if kind == "veca" and isinstance(config, Mapping) and config else match("sizes")
    return Kin(family, size) if family and size else None


def _veca_size(config: Mapping[str, Any]) -> str | None:
    try:
        return VECA_SIZES.get(size_name(VecaConfig.from_dict(dict(config))) or "")
    except (ValueError, TypeError):  # a configuration of another version
        return None
