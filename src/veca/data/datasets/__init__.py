"""Labelled datasets: the published benchmarks by name, and your own folders and shards by path."""

from veca.data.datasets.base import DatasetError, DepthRules, FileList, LabelMaps, LabelTask, ProbeData, Split
from veca.data.datasets.load import limit_splits, load_dataset
from veca.data.datasets.specs import SPECS, Spec

__all__ = [
    "SPECS",
    "DatasetError",
    "DepthRules",
    "FileList",
    "LabelMaps",
    "LabelTask",
    "ProbeData",
    "Spec",
    "Split",
    "limit_splits",
    "load_dataset",
]
