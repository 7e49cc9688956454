"""Rows as `veca probe` leaves them, made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from veca.config import SIZES

METRICS = {"classify": "top1", "knn": "top1", "segment": "mIoU", "depth": "rmse"}


def row(
    task: str = "classify",
    dataset: str = "pets",
    cores: int | None = 64,
    size: int = 256,
    value: float = 50.0,
    model: str = "runs/small",
    kind: str = "veca",
    published: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """A whole row, by default of a benchmark; `more` replaces keys of it."""
    about: dict[str, Any] = {"sha256": "5" * 64, "width": 384, "patch": 16}
    if kind == "veca":
        provenance = {"weights": "distilled", "teacher": {"name": "facebook/dinov2-small"}, "step": 1000}
        about |= {"config": SIZES["veca_small"].to_dict(), "provenance": provenance}
    rates, decays = (0.01, 0.1, 1.0), (0.0, 1e-4)
    made = {
        "task": task,
        "model": {"name": model, "kind": kind, "about": about},
        "data": {"name": dataset, "train": 3312, "val": 368, "test": 3669, "classes": None, "fingerprint": "f" * 16},
        "cores": cores,
        "size": size,
        "grid": [size // 16, size // 16],
        "seed": 0,
        "scored_on": "test",
        "metric": METRICS.get(task, "top1"),
        "metrics": {METRICS.get(task, "top1"): value},
        "per_class": None,
        "best": {"rate": 0.1, "decay": 0.0, "epoch": 7},
        "sweep": [{"rate": r, "decay": d, "val": 40 + 10 * r - 1000 * d} for r in rates for d in decays],
        "curve": {"val": [30.0, 41.0, 45.5]},
        "protocol": {"preprocessing": {"side": size, "crop": "centre"}, "optimizer": "SGD", "schedule": "cosine",
                     "batch": 128, "epochs": 100, "precision": "float32"},
        "gallery": None,
        "also": None,
        "versions": {"veca": "0.1.0", "torch": "2.11.0", "device": "NVIDIA H200", "python": "3.11.9"},
        "seconds": {"features": 61.5, "head": 8.25},
        "date": "2026-01-02T03:04:05+00:00",
        **more,
    }  # fmt: skip
    return {**made, "protocol": {**(made["protocol"] or {}), "data": {"published": {}} if published else {}}}


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    for i, one in enumerate(rows):
        (folder / "rows" / f"{one.get('task', 'row')}-{i:03}.json").write_text(json.dumps(one))
    return folder
