"""Model names: sizes, and pretrained weights, each a folder `weights/SIZE.TAG` of this package.

SIZE.TAG is how timm names weights. SIZE alone means the first of its tags in alphabetical order.
"""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from veca.config import SIZES

WEIGHTS = Path(str(files("veca"))) / "weights"
"""In each folder: `model.safetensors` in half precision, `config.json`, and `README.md`, the model card."""


def list_models(pretrained: bool = False) -> list[str]:
    """Names that `create_model` takes; with `pretrained`, those of pretrained weights, as `load` takes them.

    >>> list_models()
    ['veca_tiny', 'veca_small', 'veca_small_plus', 'veca_base', 'veca_large']
    >>> list_models(pretrained=True)
    ['veca_tiny.effnetlite2_coco']
    """
    if not pretrained:
        return list(SIZES)
    # Ordered by size, then by tag; folders that begin with another name are not models.
    tagged = sorted(file.parent.name for file in WEIGHTS.glob("*.*/model.safetensors"))
    return [name for size in SIZES for name in tagged if name.partition(".")[0] == size]


def find_pretrained(name: str | os.PathLike[str]) -> Path | None:
    """The folder of pretrained weights, named SIZE.TAG; None: there are none of that name."""
    for full in list_models(pretrained=True):
        if str(name) in (full, full.partition(".")[0]):
            return WEIGHTS / full
    return None


def pretrained_name(source: str) -> str | None:
    """SIZE.TAG of the pretrained weights that `load` takes for `source`; None: it takes a file, or fails."""
    folder = None if Path(source).exists() else find_pretrained(source)
    return folder.name if folder else None
