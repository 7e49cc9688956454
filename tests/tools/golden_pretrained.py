"""Golden features of the pretrained weights: this script writes them, test_pretrained.py compares with them.

To be written once, when weights are added, and looked at if it must be done again: other numbers are another model.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import veca
from veca.images.samples import sample_images

GOLDEN = Path(__file__).parents[1] / "golden"
PICTURE = "chelsea.png"
SIZE = 256
BUDGETS = (8, 64)
PATCHES = slice(None, None, 37)
"""Of 256 patches, 7: from all rows and columns."""


def golden_path(name: str) -> Path:
    return GOLDEN / f"shipped_{name}.safetensors"


@torch.inference_mode()
def golden_features(model: veca.Veca) -> dict[str, Tensor]:
    """Of one picture at two budgets: `C8.cls` (D), `C8.patches` (7, D), `C8.coordinates` (C, 2) of the last layer."""
    path = next(path for path in sample_images() if path.name == PICTURE)
    weight = model.norm.weight
    image = veca.images.load_image(path, size=SIZE)[None].to(weight.device, weight.dtype)
    found = {}
    for cores in BUDGETS:
        out = model(image, cores=cores)
        found[f"C{cores}.cls"] = out.cls[0]
        found[f"C{cores}.patches"] = out.patches[0, PATCHES]
        found[f"C{cores}.coordinates"] = out.coordinates[-1, 0]
    return {key: tensor.float().cpu().contiguous() for key, tensor in found.items()}


if __name__ == "__main__":
    for each in sys.argv[1:] or veca.list_models(pretrained=True):
        save_file(golden_features(veca.load(each, "cpu")), golden_path(each))
        print(f"{golden_path(each)}: {golden_path(each).stat().st_size:,} bytes")
