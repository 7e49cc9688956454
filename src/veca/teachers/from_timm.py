"""Teachers from timm, with timm's weights or a local file's, and the dense ViTs that costs are compared with."""

import contextlib
import hashlib
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from veca.checkpoint.format import join_names, read_safetensors
from veca.checkpoint.torch_file import read_torch_file
from veca.config import VecaConfig, size_name
from veca.errors import needs_extra
from veca.teachers.protocol import Meet, Teacher, TeacherError
from veca.utils.text import did_you_mean, excerpt

DENSE_VITS = {f"veca_{size}": f"vit_{size}_patch16_dinov3" for size in ("small", "small_plus", "base", "large")}
"""timm's names of the dense ViTs that have the depth, width and heads of a named VECA."""


class TimmTeacher(Teacher):
    """A timm model: the map is the patch tokens of a ViT, or the last stage of a convolutional model."""

    library = "timm"

    def __init__(self, model: Any, meet: Meet = "input") -> None:
        from timm.data.config import resolve_data_config

        about, prefix = resolve_data_config({}, model=model), getattr(model, "num_prefix_tokens", None)
        if prefix is not None and hasattr(model, "patch_embed"):
            stride = model.patch_embed.patch_size[0]
        elif getattr(model, "feature_info", None):
            stride = model.feature_info[-1]["reduction"]
        else:
            raise TeacherError(f"{type(model).__name__}: timm does not say how many pixels a cell of its map has")
        super().__init__(model.num_features, stride, about["mean"], about["std"], prefix is None, meet)
        self.model = model.eval().requires_grad_(False)
        self.prefix: int | None = prefix  # class token and registers; None: not a ViT
        # A prefix may be registers alone, without a class token.
        self.pooled, self.class_token = prefix is None, bool(getattr(model, "has_class_token", prefix))

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        out: Tensor = self.model.forward_features(images)
        if self.prefix is None:
            dense = out if getattr(self.model, "output_fmt", "NCHW") == "NCHW" else out.permute(0, 3, 1, 2)
            return dense.mean((2, 3)), dense
        cls = out[:, 0] if self.class_token else self.model.forward_head(out, pre_logits=True)
        return cls, self.to_map(out[:, self.prefix :], images)


def timm_teacher(
    name: str, meet: Meet = "input", file: str | Path | None = None, pretrained: bool = True, **options: Any
) -> TimmTeacher:
    """A timm model by name, with timm's weights or those of a local file.

    Our own models are known to timm after `import veca.hub`.
    """
    with needs_extra(f"{name} needs", "train"):
        import timm

    architecture, own_weights = name.split(".")[0], pretrained and file is None
    if not timm.is_model(architecture):
        close = did_you_mean(name, timm.list_models())
        raise TeacherError(f"timm has no model {name!r}{close}; timm.list_models() has them all")
    if own_weights:
        _check_weights(name)
    tensors = {} if file is None else read_weights(Path(file))
    classes = _count_classes(name, tensors)
    keep: dict[str, Any] = {} if own_weights else {"num_classes": classes}
    options = {"pretrained": own_weights, **keep, **options}
    try:
        model = timm.create_model(name, dynamic_img_size=True, **options)
    except TypeError:  # only models with position embeddings have this option
        model = timm.create_model(name, **options)
    teacher = TimmTeacher(model, meet)
    teacher.name, teacher.weights = f"timm:{name}", "random"
    if file is not None:
        _load_weights(model, tensors, f"{file}")
        teacher.name, teacher.weights = f"timm:{name}@{file}", describe_file(Path(file))
    elif pretrained:
        teacher.weights = f"timm's {architecture}.{teacher.model.pretrained_cfg.get('tag', '')}"
    if getattr(model, "num_classes", 0):
        from timm.data.imagenet_info import infer_imagenet_subset

        subset = infer_imagenet_subset(model) if own_weights else None
        teacher.classifier = _take_classifier(teacher)
        teacher.classes = imagenet_names(subset) if subset and teacher.classifier is not None else ()
    return teacher


def imagenet_names(subset: str) -> tuple[str, ...]:
    """Names of ImageNet's classes, all different: of a subset that timm knows, as "imagenet-1k"."""
    from timm.data.imagenet_info import ImageNetInfo

    whole = ImageNetInfo(subset).label_descriptions()
    short = [name.split(",")[0] for name in whole]
    names = [one if short.count(one) == 1 else full for one, full in zip(short, whole, strict=True)]
    return tuple(name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names))


def _count_classes(name: str, tensors: Mapping[str, Tensor]) -> int:
    """Classes of the classifier in a file of weights; 0: there is none that timm names so."""
    import timm

    about = timm.get_pretrained_cfg(name, allow_unregistered=True)
    head = about.classifier if about is not None else None
    weight = tensors.get(f"{head}.weight") if isinstance(head, str) else None
    return 0 if weight is None or weight.ndim != 2 else len(weight)


@torch.no_grad()
def _take_classifier(teacher: TimmTeacher) -> nn.Linear | None:
    """Take the classifier off a model. It is kept if it is one layer on the global feature: some have a norm before."""
    model, side = teacher.model, teacher.stride * max(2, round(224 / teacher.stride))
    head = model.get_classifier()
    images = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    usable = False
    if isinstance(head, nn.Linear) and head.in_features == teacher.width:
        with contextlib.suppress(AssertionError, RuntimeError):  # a model for another size only
            expected: Tensor = model(images)
            usable = torch.allclose(head(teacher.features(images)[0]), expected, rtol=1e-3, atol=1e-3)
    model.reset_classifier(0)
    return head if usable else None


def _check_weights(name: str) -> None:
    """Raise unless timm has the weights, for the activation function that the model has."""
    import timm

    tags = timm.list_pretrained(f"{name.split('.')[0]}.*")
    try:
        about = timm.get_pretrained_cfg(name)
    except RuntimeError:  # no such tag
        about = None
    if about is None or not about.has_weights:
        has = f"it has {', '.join(tags)}" if tags else f"give a local file: timm:{name}@weights.safetensors"
        raise TeacherError(f"timm has no weights {name!r}{did_you_mean(name, tags)}; {has}")
    if any("QuickGELU" in str(note) for note in about.notes or ()) and "quickgelu" not in name:
        exact = name.replace("_clip_", "_clip_quickgelu_")
        raise TeacherError(f"{name}: its weights were trained with QuickGELU, not its activation; take timm:{exact}")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a safetensors file or a PyTorch checkpoint; nothing in the file is executed."""
    if not path.is_file():
        raise TeacherError(f"{path}: no such file; a teacher's weights are a .safetensors or a PyTorch checkpoint")
    try:
        if path.suffix == ".safetensors":
            return read_safetensors(path)[0]
        contents = read_torch_file(path)
    except pickle.UnpicklingError as error:
        problem = "refused, it holds more than tensors and plain data, or is no checkpoint"
        raise TeacherError(f"{path}: {problem}. Save its state_dict, as safetensors or with torch.save") from error
    except ValueError as error:
        raise TeacherError(f"{path}: damaged, or no file of weights: {error}") from error
    contents = contents if isinstance(contents, dict) else {}
    for key in ("state_dict", "model"):
        if isinstance(contents.get(key), dict):
            contents = contents[key]
    tensors = {str(name).removeprefix("module."): t for name, t in contents.items() if isinstance(t, Tensor)}
    if not tensors:
        raise TeacherError(f"{path}: holds no tensors by name; a teacher's weights are a state_dict")
    return tensors


def describe_file(path: Path) -> str:
    """Name and digest of a file of weights, without its folder."""
    with open(path, "rb") as file:
        return f"{path.name} (sha256 {hashlib.file_digest(file, 'sha256').hexdigest()})"


def _load_weights(model: Any, tensors: dict[str, Tensor], where: str) -> None:
    """Load all weights of the model; only those of a classifier, which a teacher has not, may be left over."""
    # timm's filter converts the files of others too, such as those of DINOv2 and OpenCLIP.
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    heads = model.pretrained_cfg.get("classifier") or ()
    classifier = tuple(f"{head}." for head in ([heads] if isinstance(heads, str) else heads))
    problem = ""
    try:
        missing, extra = model.load_state_dict(dict(convert(tensors, model)) if convert else tensors, strict=False)
    except Exception as error:  # the converters fail in any way on files they do not know
        problem = excerpt(str(error).split("\n")[-1].strip() or type(error).__name__)
    else:
        foreign = [name for name in extra if not name.startswith(classifier)]
        if missing or foreign:
            problem = f"it has no {join_names(missing)}." if missing else f"it has also {join_names(foreign)}."
    if problem:
        raise TeacherError(f"{where}: not the weights of this {type(model).__name__}: {problem} Name its own model")


def create_dense_vit(config: VecaConfig, **options: Any) -> nn.Module:
    """A randomly initialised dense ViT with the depth, width and heads of `config`; `options` go to timm.

    Sizes that DINOv3 does not have are DINOv3's small ViT with another width, depth and number of heads.
    """
    with needs_extra("the dense ViT needs", "bench"):
        import timm
    name = DENSE_VITS.get(size_name(config) or "")
    if name is None:
        # The MLP is gated in small+ alone, as `dense_model_flops` counts it.
        name = DENSE_VITS["veca_small_plus" if config.mlp_dim == 4 * config.embed_dim else "veca_small"]
        shared = ("embed_dim", "depth", "num_heads", "patch_size", "in_chans")
        options = {key: getattr(config, key) for key in shared} | options
    model: nn.Module = timm.create_model(name, num_classes=0, dynamic_img_size=True, **options)
    return model
