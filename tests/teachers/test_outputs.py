"""The output of a student of several teachers: parts that are kept, dropped and replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import veca
from veca.cli.main import app
from veca.errors import ArgumentError
from veca.images import MEAN, STD
from veca.teachers import Standardized, Teacher, keep_output, replace_output
from veca.teachers.outputs import attach_classifier, write_classifier


def student(**options: Any) -> veca.Veca:
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 1, "output_dim": 56}
    model = veca.create_model("veca_tiny", **{**sizes, **options}).eval()
    teachers = [{"name": "first", "width": 40}, {"name": "second", "width": 16}]
    model.provenance = {"weights": "distilled", "teacher": {"name": "first + second", "teachers": teachers}}
    return model


def teacher(name: str, width: int) -> Standardized:
    found = Teacher(width, 16, MEAN, STD, raw=True)
    found.name = name
    return Standardized(found)


@pytest.mark.parametrize(("name", "part"), [("first", slice(0, 40)), ("second", slice(40, 56))])
def test_the_features_of_one_teacher_are_kept(tmp_path: Path, name: str, part: slice) -> None:
    images, model = torch.randn(2, 3, 32, 48), student()
    before = model(images, cores=8)
    veca.save(model, tmp_path / "all")
    asked = ["convert", "--model", str(tmp_path / "all"), "--out", str(tmp_path / "one"), "--output", name]
    assert CliRunner().invoke(app, asked).exit_code == 0
    kept = veca.load(tmp_path / "one").eval()
    after = kept(images, cores=8)
    torch.testing.assert_close(after.cls, before.cls[:, part], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(after.patches, before.patches[..., part], rtol=1e-6, atol=1e-6)
    assert kept.num_features == kept.config.num_features == part.stop - part.start
    keep_output(kept, name)  # once more
    assert kept.num_features == part.stop - part.start
    with pytest.raises(ArgumentError, match=f"no output for 'third': the model learned from {name}; or 'none'"):
        keep_output(kept, "third")


def test_without_an_output_features_are_the_backbones() -> None:
    images, model = torch.randn(1, 3, 32, 32), student()
    expected = model._run(images, 16)[0]
    keep_output(model, "none")
    torch.testing.assert_close(model.forward_features(images, cores=16), expected)
    assert (model.config.output_dim, model.num_features) == (None, 32)
    with pytest.raises(ArgumentError, match=r"has 32 output channels, its teachers \[40, 16\]: nothing to keep"):
        keep_output(model, "second")


def test_a_classifier_on_the_output_is_not_cut_off() -> None:
    with pytest.raises(ArgumentError, match="has a classifier on its output"):
        keep_output(student(num_classes=3), "first")


@pytest.mark.parametrize(("name", "width", "kept"), [("first", 40, True), ("first", 24, False), ("other", 40, False)])
def test_rows_of_a_teacher_it_has_learned_from_stay(name: str, width: int, kept: bool) -> None:
    model, again = student(), student()
    before = model.output_proj.weight.detach().clone()
    replace_output(model, 64, teacher(name, width), seed=3)
    replace_output(again, 64, teacher(name, width), seed=3)
    weight = model.output_proj.weight
    assert (weight.shape, model.config.output_dim, model.num_features) == ((64, 32), 64, 64)
    assert torch.equal(weight[:40], before[:40]) == kept
    assert torch.equal(weight, again.output_proj.weight)
    replace_output(model, None, teacher(name, width))
    assert model(torch.zeros(1, 3, 32, 32)).cls.shape == (1, 32)


@pytest.mark.parametrize("kept", [None, "second"])
def test_a_teachers_classifier_becomes_the_students(tmp_path: Path, kept: str | None) -> None:
    """Of the second teacher: features of the first do not count."""
    model, images = student(), torch.randn(2, 3, 32, 32)
    weight, bias = torch.randn(3, 16), torch.randn(3)
    expected = model(images).cls[:, 40:] @ weight.T + bias
    veca.save(model, tmp_path / "model")
    write_classifier(tmp_path / "c.safetensors", weight, bias, "second", ["cat", "dog", "cow"])
    asked = ["convert", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "classes")]
    asked += ["--classifier", str(tmp_path / "c.safetensors"), *(["--output", kept] if kept else [])]
    assert CliRunner().invoke(app, asked).exit_code == 0
    found = veca.load(tmp_path / "classes").eval()
    torch.testing.assert_close(found(images).logits, expected, rtol=1e-5, atol=1e-5)
    assert found.provenance["classes"] == ["cat", "dog", "cow"]
    described = json.loads((tmp_path / "classes/config.json").read_text())
    assert described["id2label"]["1"] == "dog"


def test_classifiers_that_do_not_fit(tmp_path: Path) -> None:
    model = student()
    write_classifier(tmp_path / "other.safetensors", torch.zeros(3, 16), torch.zeros(3), "third", [])
    with pytest.raises(ArgumentError, match="needs the features learned from third, which the model has not"):
        attach_classifier(model, tmp_path / "other.safetensors")
    keep_output(model, "first")
    write_classifier(tmp_path / "dropped.safetensors", torch.zeros(3, 16), torch.zeros(3), "second", [])
    with pytest.raises(ArgumentError, match="needs the features learned from second"):
        attach_classifier(model, tmp_path / "dropped.safetensors")
    (tmp_path / "no.safetensors").write_bytes(b"nothing")
    for name in ("no.safetensors", "missing.safetensors"):
        with pytest.raises(ArgumentError, match="is no classifier that `veca distill` left"):
            attach_classifier(model, tmp_path / name)
