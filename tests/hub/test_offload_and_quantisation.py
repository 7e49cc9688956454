"""Weights that are kept elsewhere or in few bits: accelerate, torchao and bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from conftest import make_tiny, relative_error
from PIL import Image
from sample_images import random_images
from torch import Tensor
from transformers import AutoModel, BitsAndBytesConfig

import veca
from veca.hub.transformers import VecaBackbone, VecaForImageClassification, VecaImageProcessor, VecaModel

CPU = torch.device("cpu")
KINDS: dict[Any, dict[str, Any]] = {
    VecaModel: {},
    VecaForImageClassification: {"num_labels": 3},
    VecaBackbone: {"pyramid": 32, "out_features": ["stride8", "stride16"]},
}


def first_output(out: Any) -> Tensor:
    found: Tensor = out[0] if isinstance(out[0], Tensor) else out[0][-1]
    return found


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_offloaded_models_give_the_same(kind: Any, tmp_path: Path) -> None:
    """Weights are loaded when their layer is called and are nowhere else."""
    model = kind.from_veca(make_tiny(), cores=8, **KINDS[kind]).eval()
    expected = first_output(model(random_images()))
    model.save_pretrained(tmp_path)
    on_disk = kind.from_pretrained(tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "disk")
    accelerate.cpu_offload(model, execution_device=CPU)
    for offloaded in (model, on_disk):
        torch.testing.assert_close(first_output(offloaded(random_images())), expected, rtol=1e-4, atol=1e-4)
        assert {p.device.type for p in offloaded.parameters()} == {"meta"}


@torch.no_grad()
def test_offloaded_models_take_images_of_any_sizes() -> None:
    photos = [Image.new("RGB", (48, 32), "orange"), Image.new("RGB", (32, 80), "navy")]
    batch = VecaImageProcessor(fit="native", max_num_patches=20)(photos, return_tensors="pt")
    model = VecaModel.from_veca(make_tiny(), cores=8)
    expected = model(**batch).last_hidden_state
    accelerate.cpu_offload(model, execution_device=CPU)
    torch.testing.assert_close(model(**batch).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_plain_and_timm_models_can_be_offloaded() -> None:
    timm = pytest.importorskip("timm")
    options = {"embed_dim": 64, "depth": 3, "num_heads": 2, "num_classes": 3}
    for model in (make_tiny(), timm.create_model("veca_tiny_patch16", **options).eval()):
        out = model(random_images(), cores=8)
        expected = out.cls if isinstance(model, veca.Veca) and hasattr(out, "cls") else out
        accelerate.cpu_offload(model, execution_device=CPU)
        again = model(random_images(), cores=8)
        torch.testing.assert_close(again.cls if hasattr(again, "cls") else again, expected, rtol=1e-4, atol=1e-4)
