"""VECA as the backbone of other libraries' models: they train, are saved, and predict in a fresh process."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import library_models
import pytest
import torch
import transformers
from conftest import make_tiny
from library_models import RECIPES, Recipe, images, save
from processes import run_program
from safetensors.torch import load_file, save_file
from sample_images import random_images

from veca.hub.transformers import VecaBackbone, VecaForImageClassification

INSTALLED = [name for name in RECIPES if name not in library_models.PACKAGES or find_spec(name)]


def train(model: Any, recipe: Recipe) -> None:
    """A few steps, in which the loss is a number and every parameter of the backbone that is not frozen learns."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=1e-2)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        loss = recipe.loss(model)
        assert loss.isfinite()
        loss.backward()
        optimizer.step()
    ours = [name for name in trained if any(word in name for word in ("veca.", "body.", "encoder.model."))]
    assert ours
    still = [name for name in ours if trained[name].grad is None]
    assert not [name for name in still if not any(part in name for part in recipe.unused)]
    model.eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of trained models, and what each predicts."""
    folder, outputs = tmp_path_factory.mktemp("recipes"), {}
    for name in INSTALLED:
        torch.manual_seed(0)
        model = RECIPES[name].make()
        train(model, RECIPES[name])
        save(model, folder / name)
        with torch.no_grad():
            outputs[name] = RECIPES[name].predict(model).contiguous()
    save_file(outputs, folder / "outputs.safetensors")
    return folder


def test_models_train_and_are_saved(saved: Path) -> None:
    outputs = load_file(saved / "outputs.safetensors")
    assert list(outputs) == sorted(INSTALLED)
    assert all(output.isfinite().all() and output.numel() for output in outputs.values())


LOAD = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:]
import torch
from library_models import RECIPES
from safetensors.torch import load_file
for name, expected in load_file("outputs.safetensors").items():
    with torch.no_grad():
        found = RECIPES[name].predict(RECIPES[name].load(Path(name)).eval())
    torch.testing.assert_close(found, expected, msg=lambda text: f"{name}: {text}")
    print(name)
"""


def test_models_predict_in_a_fresh_process(saved: Path) -> None:
    places = [path for path in sys.path if Path(path).name in ("tests", "hub")]
    assert set(INSTALLED) <= set(run_program(LOAD, *places, folder=saved).splitlines())


def test_plain_weights_become_the_backbone() -> None:
    plain = make_tiny()
    backbone = VecaBackbone.from_veca(plain, **library_models.BLOCKS)
    config = library_models.make_upernet()
    config.backbone_config = backbone.config
    model = transformers.UperNetForSemanticSegmentation(config)
    model.backbone = backbone
    model.eval()
    expected = plain.forward_intermediates(images(), norm=True, intermediates_only=True)
    torch.testing.assert_close(list(model.backbone(images()).feature_maps), expected)


def test_detr_takes_batches_of_its_processor() -> None:
    """Padded to sizes that are no multiples of 16, with a mask."""
    model = transformers.DetrForObjectDetection(library_models.make_detr())
    processor = transformers.DetrImageProcessor(size={"shortest_edge": 57, "longest_edge": 90})
    batch = processor([image.numpy() for image in random_images(2, 50, 70).sigmoid()], return_tensors="pt")
    assert batch.pixel_values.shape[-1] % 16
    assert model(**batch).pred_boxes.shape == (2, 5, 4)


@pytest.mark.parametrize("targets", [["qkv", "proj", "fc1", "fc2"], "all-linear"])
def test_low_rank_adapters_of_peft(targets: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = make_tiny(num_classes=3)
    settings = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["head"])
    model = peft.get_peft_model(VecaForImageClassification.from_veca(plain, cores=16), settings)
    labels = torch.tensor([0, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(pixel_values=images(), labels=labels).loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        optimizer.step()
    model.save_pretrained(tmp_path)
    base = VecaForImageClassification.from_veca(plain, cores=16)
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    with torch.no_grad():
        expected = model.eval()(images()).logits
        torch.testing.assert_close(again(images()).logits, expected)
        torch.testing.assert_close(again.merge_and_unload()(images()).logits, expected)
