"""Labelled pictures for the probes: the published benchmarks by name, and one's own by path."""

from veca.data.datasets.base import DatasetError, DepthRules, Maps, Places, ProbeData, Split, Task
from veca.data.datasets.layout import Spec
from veca.data.datasets.load import SPECS, limit_splits, load_dataset

__all__ = [
    "SPECS",
    "DatasetError",
    "DepthRules",
    "Maps",
    "Places",
    "ProbeData",
    "Spec",
    "Split",
    "Task",
    "limit_splits",
    "load_dataset",
]
