"""Labelled datasets: the published benchmarks by name, and your own folders and shards by path."""

from veca.data.datasets.base import DatasetError, DepthRules, ProbeData, Split
from veca.data.datasets.load import SPECS, limit_splits, load_dataset

__all__ = ["SPECS", "DatasetError", "DepthRules", "ProbeData", "Split", "limit_splits", "load_dataset"]
