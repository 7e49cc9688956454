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
from transformers import BitsAndBytesConfig

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


WAYS: dict[str, dict[str, Any]] = {"few cores": {"cores": 8}, "all cores": {}, "cls_only": {"cls_only": True}}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_int8_weights_of_torchao(way: str) -> None:
    """As a model whose weights are rounded alike, whatever path computes it."""
    quantization = pytest.importorskip("torchao.quantization")
    model, rounded = make_tiny(num_classes=3), make_tiny(num_classes=3)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "dequantize") and type(parameter) is not torch.nn.Parameter:
            rounded.get_parameter(name).copy_(parameter.dequantize())
    found, expected = model(random_images(), **WAYS[way]), rounded(random_images(), **WAYS[way])
    assert relative_error(found.logits, expected.logits) < 1e-5
    assert relative_error(found.logits, make_tiny(num_classes=3)(random_images(), **WAYS[way]).logits) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_four_bits_of_bitsandbytes(kind: Any, tmp_path: Path) -> None:
    """As a model whose weights are rounded alike. Coordinate heads, with two outputs, are left as they are."""
    bnb = pytest.importorskip("bitsandbytes")
    skipped = ["head"] if kind is VecaForImageClassification else None  # a CPU takes multiples of 32 classes
    settings = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped)
    plain = make_tiny(embed_dim=128, mlp_ratio=2.0, coordinate_rescale=1.0)
    kind.from_veca(plain, cores=8, **KINDS[kind]).save_pretrained(tmp_path)
    model, rounded = kind.from_pretrained(tmp_path, quantization_config=settings), kind.from_pretrained(tmp_path)
    four = {name: layer for name, layer in model.named_modules() if isinstance(layer, bnb.nn.Linear4bit)}
    assert {"veca.blocks.0.attn.qkv", "veca.blocks.2.mlp.fc2"} <= set(four)
    assert not any("coordinate" in name for name in four)
    for name, layer in four.items():
        weight = bnb.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
        rounded.get_submodule(name).weight.copy_(weight)
    for cores in (8, 64):
        found, expected = (first_output(each(random_images(), cores=cores)) for each in (model, rounded))
        assert relative_error(found, expected) < 0.1  # a CPU multiplies in bfloat16
