"""Names of models: the sizes, and the weights that ship for them, each a folder `weights/SIZE.TAG` of this package.

SIZE.TAG is how timm names weights. SIZE alone means the first of its tags, by the alphabet.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from veca.config import SIZES

WEIGHTS = Path(str(files("veca"))) / "weights"
"""In each folder: `model.safetensors` in half precision, `config.json`, and `README.md`, the model card."""


def list_models(pretrained: bool = False) -> list[str]:
    """Names that `create_model` takes; with `pretrained`, those of weights that ship, as `load` takes them.

    >>> list_models()
    ['veca_tiny', 'veca_small', 'veca_small_plus', 'veca_base', 'veca_large']
    >>> list_models(pretrained=True)
    ['veca_tiny.effnetlite2_coco']
    """
    if not pretrained:
        return list(SIZES)
    tagged = sorted(file.parent.name for file in WEIGHTS.glob("*.*/model.safetensors"))
    return [name for size in SIZES for name in tagged if name.partition(".")[0] == size]


def find_shipped(name: str | os.PathLike[str]) -> Path | None:
    """The folder of shipped weights, whose name is their full one; None: no such weights ship."""
    for full in list_models(pretrained=True):
        if str(name) in (full, full.partition(".")[0]):
            return WEIGHTS / full
    return None


def shipped_name(source: str) -> str | None:
    """SIZE.TAG of the weights that `load` takes from this package for `source`; None: it takes others, or none."""
    folder = None if Path(source).exists() else find_shipped(source)
    return folder.name if folder else None
