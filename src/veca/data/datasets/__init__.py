"""Labelled datasets: the published benchmarks by name, and your own folders and shards by path."""

from veca.data.datasets.base import DatasetError, DepthRules, FileList, ProbeData, Split
from veca.data.datasets.load import limit_splits, load_dataset
from veca.data.datasets.specs import SPECS

__all__ = ["SPECS", "DatasetError", "DepthRules", "FileList", "ProbeData", "Split", "limit_splits", "load_dataset"]
