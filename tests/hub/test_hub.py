"""`import veca.hub`, folders that load by `trust_remote_code`, and torch.hub, which takes the repository as it is."""

from __future__ import annotations

import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import make_tiny
from processes import run_program
from torch import hub

import veca
from veca.hub.__main__ import main as run_script

REMOTE = """
import sys
sys.modules["timm"] = None  # as if it were not installed
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification
sys.modules["veca"] = None
try:
    AutoModel.from_pretrained("saved", trust_remote_code=True)
except ImportError as error:
    assert "this folder is of a VECA" in str(error)
del sys.modules["veca"]
processor = AutoImageProcessor.from_pretrained("saved", trust_remote_code=True)
model = AutoModel.from_pretrained("saved", trust_remote_code=True)
assert type(model).__module__ == "veca.hub.transformers" and type(processor).__name__ == "VecaImageProcessor"
model.save_pretrained("again")
AutoModelForImageClassification.from_pretrained("again", trust_remote_code=True)
"""


def test_a_saved_folder_loads_where_only_transformers_is_imported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("veca.hub.transformers")
    transformers.VecaModel.from_veca(make_tiny(), cores=16).save_pretrained(tmp_path / "saved")
    transformers.VecaImageProcessor(size=32).save_pretrained(tmp_path / "saved")
    run_program(REMOTE, folder=tmp_path)
    again = tmp_path / "again" / "modeling_veca.py"
    assert again.read_bytes() == (tmp_path / "saved" / "modeling_veca.py").read_bytes()
    assert torch.equal(veca.load(tmp_path / "again").cores[0], make_tiny().cores[0])


SCRIPT = """
import sys, timm, transformers, beside
if __name__ == "__main__":
    print(timm.is_model("veca_tiny_patch16"), transformers.AutoConfig.for_model("veca").model_type, sys.argv[1:])
"""


def test_scripts_run_with_veca_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As timm's train.py and transformers' examples, here started by torchrun."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "-m", "veca.hub"]
    command = [*launcher, str(tmp_path / "script.py"), "--lr", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.stdout == "True veca ['--lr', '1']\n", ended.stderr
    monkeypatch.setattr("sys.argv", ["veca.hub", "absent.py"])
    with pytest.raises(SystemExit, match="no file 'absent.py'"):
        run_script()


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
