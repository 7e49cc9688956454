"""torch.hub takes the repository as it is, with nothing installed from it."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest
import torch
from torch import hub

import veca

ROOT = str(Path(__file__).parents[2])


def load(name: str, **options: object) -> veca.Veca:
    return hub.load(ROOT, name, source="local", **options)


def test_every_size_has_an_entry_point() -> None:
    names = runpy.run_path(f"{ROOT}/hubconf.py")
    entries = {name: entry for name, entry in names.items() if callable(entry) and not name.startswith("_")}
    assert list(entries) == veca.list_models()
    assert all("weights: a file or folder" in entry.__doc__ for entry in entries.values())


def test_without_weights_it_says_so() -> None:
    with pytest.warns(UserWarning, match="veca_tiny has random weights"):
        model = load("veca_tiny", depth=2, num_classes=3)
    assert not model.training
    logits = model(torch.zeros(1, 3, 32, 32), 16).logits
    assert logits is not None
    assert logits.shape == (1, 3)


def test_pretrained_weights_load_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veca.checkpoint.loading.WEIGHTS", tmp_path)
    source = veca.create_model("veca_tiny", output_dim=40).eval()
    veca.save(source, tmp_path / "veca_tiny.cats_coco")
    images = torch.randn(1, 3, 32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in (load("veca_tiny"), load("veca_tiny", weights="veca_tiny.cats_coco")):
            torch.testing.assert_close(found(images, 8).cls, source(images, 8).cls, rtol=0, atol=0)
        assert load("veca_tiny", num_classes=3)(images, 8).logits.shape == (1, 3)
    with pytest.warns(UserWarning, match="veca_small has random weights"):
        load("veca_small", depth=1)


def test_weights_of_a_file(tmp_path: Path) -> None:
    source = veca.create_model("veca_tiny", num_classes=2).eval()
    veca.save(source, tmp_path / "tiny.safetensors")
    model = load("veca_tiny", weights=tmp_path / "tiny.safetensors")
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(model(images, 8).logits, source(images, 8).logits, rtol=0, atol=0)
    with pytest.raises(ValueError, match="holds veca_tiny, not veca_small"):
        load("veca_small", weights=tmp_path / "tiny.safetensors")
    with pytest.raises(ValueError, match="fields num_classes come from"):
        load("veca_tiny", weights=tmp_path / "tiny.safetensors", num_classes=3)
