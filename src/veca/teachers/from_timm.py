"""Teachers from timm: any model with a feature map, with timm's weights or a local file's."""

from __future__ import annotations

import hashlib
import pickle
import sys
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from veca.checkpoint.format import join_names, read_safetensors
from veca.checkpoint.torch_file import read_torch_file
from veca.errors import needs_extra
from veca.teachers.protocol import Meet, Teacher, TeacherError
from veca.utils.text import did_you_mean, excerpt


class TimmTeacher(Teacher):
    """A timm model: the map is the patch tokens of a ViT, or the last stage of a convolutional model."""

    library = "timm"

    def __init__(self, model: nn.Module, meet: Meet = "input") -> None:
        from timm.data.config import resolve_data_config

        timm_model, about = cast(Any, model), resolve_data_config({}, model=model)
        prefix = getattr(model, "num_prefix_tokens", None)  # class token and registers; None: not a ViT
        if prefix is not None and hasattr(model, "patch_embed"):
            stride = timm_model.patch_embed.patch_size[0]
        elif getattr(model, "feature_info", None):
            stride = timm_model.feature_info[-1]["reduction"]
        else:
            raise TeacherError(f"{type(model).__name__}: timm does not say how many pixels a cell of its map has")
        super().__init__(timm_model.num_features, stride, about["mean"], about["std"], raw=prefix is None, meet=meet)
        self.prefix, self.pooled = prefix, prefix is None
        # A prefix may be registers alone, without a class token.
        self.class_token = bool(getattr(model, "has_class_token", prefix))
        self.model = model.eval().requires_grad_(False)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        model = cast(Any, self.model)
        out: Tensor = model.forward_features(images)
        if self.prefix is None:
            dense = out if getattr(model, "output_fmt", "NCHW") == "NCHW" else out.permute(0, 3, 1, 2)
            return dense.mean((2, 3)), dense
        cls = out[:, 0] if self.class_token else model.forward_head(out, pre_logits=True)
        return cls, self.to_map(out[:, self.prefix :], images)

    def patch_embedding(self) -> tuple[Tensor, Tensor] | None:
        return None if self.prefix is None else super().patch_embedding()


def timm_teacher(
    name: str, meet: Meet = "input", file: str | Path | None = None, pretrained: bool = True, **options: Any
) -> TimmTeacher:
    """A timm model by name, with timm's weights or those of a local file.

    Our own models are known to timm after `import veca.hub.timm`.
    """
    with needs_extra(f"{name} needs", "train"):
        import timm

    if not timm.is_model(name.split(".")[0]):
        known = timm.list_models()
        raise TeacherError(f"timm has no model {name!r}{did_you_mean(name, known)}; timm.list_models() has them all")
    if file is None and pretrained:
        _check_weights(name)
    tensors = {} if file is None else read_weights(Path(file))
    options = {"pretrained": pretrained and file is None, "num_classes": 0, **options}
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
        teacher.weights = f"timm's {name.split('.')[0]}.{cast(Any, model).pretrained_cfg.get('tag', '')}"
    return teacher


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


def _load_weights(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Load all weights of the model; only those of a classifier, which a teacher has not, may be left over."""
    # timm's filter converts the files of others too, such as those of DINOv2 and OpenCLIP.
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    kind = type(model).__name__
    try:
        converted = dict(convert(tensors, model)) if convert else tensors
        missing, foreign = model.load_state_dict(converted, strict=False)
    except Exception as error:  # the converters fail in any way on files they do not know
        reason = excerpt((str(error).split("\n") or [""])[-1].strip() or type(error).__name__)
        raise TeacherError(f"{where}: not the weights of this {kind}: {reason} Name its own model") from error
    heads = cast(Any, model).pretrained_cfg.get("classifier") or ()
    classifier = tuple(f"{head}." for head in ([heads] if isinstance(heads, str) else heads))
    foreign = [name for name in foreign if not name.startswith(classifier)]
    if missing or foreign:
        problem = f"has no {join_names(missing)}" if missing else f"has also {join_names(foreign)}"
        raise TeacherError(f"{where}: not the weights of this {kind}: it {problem}. Name its own model")
