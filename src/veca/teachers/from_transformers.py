"""Teachers from transformers: DINOv3, DINOv2 with or without registers, CLIP, SigLIP and SigLIP 2, C-RADIO."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from veca.errors import needs_extra
from veca.teachers.protocol import Meet, Teacher, TeacherError

_VISION_MODELS = {
    **dict.fromkeys(("dinov3_vit", "dinov2", "dinov2_with_registers", "radio"), "AutoModel"),
    **dict.fromkeys(("clip", "clip_vision_model"), "CLIPVisionModel"),
    **dict.fromkeys(("siglip", "siglip_vision_model"), "SiglipVisionModel"),
}
"""By `model_type`: the class that loads the vision tower."""


class HfTeacher(Teacher):
    """A vision transformer from transformers: DINOv3, DINOv2 with or without registers, CLIP, SigLIP (and 2)."""

    library = "transformers"

    def __init__(self, model: Any, mean: Sequence[float], std: Sequence[float], meet: Meet = "input") -> None:
        config = model.config
        super().__init__(config.hidden_size, config.patch_size, mean, std, raw=False, meet=meet)
        self.model = model.eval().requires_grad_(False)
        # SigLIP has no class token: an attention pooling head computes its global feature.
        self.prefix = 0 if config.model_type.startswith("siglip") else 1 + getattr(config, "num_register_tokens", 0)
        # DINO models interpolate their positions without being told.
        takes = inspect.signature(model.forward).parameters
        self.options = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in takes else {}

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(pixel_values=images, **self.options)
        tokens: Tensor = out.last_hidden_state
        if self.model.config.model_type.startswith("clip"):  # CLIP applies its last norm to the class token alone
            tokens = getattr(self.model, "vision_model", self.model).post_layernorm(tokens)
        cls = tokens[:, 0] if self.prefix else out.pooler_output
        return cls, self.to_map(tokens[:, self.prefix :], images)


class RadioTeacher(Teacher):
    """C-RADIO of any version: returns (summary, spatial features), without prefix tokens.

    The summary is a concatenation of class tokens, one for each model that RADIO was distilled from. The global feature
    is their mean, which has the width of the map. RADIO has no final norm, so its features are raw.
    """

    library = "transformers"

    def __init__(self, model: Any, meet: Meet = "input") -> None:
        stride = int(model.patch_size)
        with torch.no_grad():  # its configuration does not have the width, so it is read from an output
            width = model.eval()(torch.zeros(1, 3, 4 * stride, 4 * stride)).features.shape[-1]
        # Move its normalisation out of the model, to have its mean and std like any teacher's.
        conditioner = model.make_preprocessor_external()
        mean, std = (value.float().flatten().tolist() for value in (conditioner.norm_mean, conditioner.norm_std))
        super().__init__(width, stride, mean, std, raw=True, meet=meet)
        self.model = model.requires_grad_(False)

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(images)
        return out.summary.unflatten(1, (-1, self.width)).mean(1), self.to_map(out.features, images)

    def patch_embedding(self) -> tuple[Tensor, Tensor] | None:
        linear = getattr(getattr(self.model, "embeddings", None), "patch_projection", None)
        if not isinstance(linear, nn.Linear):  # older versions bring their own code, which may keep it anywhere
            return None
        kernel = linear.weight.unflatten(1, (3, self.stride, self.stride))
        return kernel, kernel.new_zeros(len(kernel)) if linear.bias is None else linear.bias


def hf_teacher(name: str, meet: Meet = "input", trust_remote_code: bool = False) -> Teacher:
    """A transformers model, by its name on the hub or from a local folder.

    `trust_remote_code` runs Python files that come with the weights, as older versions of C-RADIO need.
    """
    with needs_extra(f"{name} needs", "train"):
        import transformers

    trust = {"trust_remote_code": trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **trust)
    except (OSError, ValueError) as error:
        problem = f"{str(error).splitlines()[0]} Name a model of the hub or a local folder"
        if "trust_remote_code" in str(error):
            way_out = "trust_remote_code=True, in a recipe teacher.trust_remote_code: true"
            problem = f"only code that comes with it can load it. If you trust who wrote that code: {way_out}"
        raise TeacherError(f"{name}: {problem}") from error
    is_radio = "radio" in type(config).__name__.lower()  # the code in its repository sets no model_type
    if not is_radio and config.model_type not in _VISION_MODELS:
        known = f"teachers are {', '.join(_VISION_MODELS)}. Others may be in timm: timm:NAME"
        if config.model_type.startswith("siglip2"):
            others = "google/siglip2-base-patch16-256, or timm:naflexvit_base_patch16_siglip.v2_webli"
            known = f"a NaFlex model of SigLIP 2 has no patch size; take one of a fixed resolution, as {others}"
        raise TeacherError(f"transformers model of type {config.model_type!r}: {known}")
    load = getattr(transformers, _VISION_MODELS.get(config.model_type, "AutoModel")).from_pretrained
    teacher: Teacher
    try:
        if is_radio:
            teacher = RadioTeacher(load(name, **trust), meet)
        else:
            model = load(name)
            processor, _ = transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict(name)
            if not {"image_mean", "image_std"} <= processor.keys():
                raise TeacherError(f"{name}: its preprocessor_config.json has no image_mean and image_std")
            teacher = HfTeacher(model, processor["image_mean"], processor["image_std"], meet)
    except OSError as error:
        raise TeacherError(f"{name}: {str(error).splitlines()[0]}") from error
    revision = getattr(config, "_commit_hash", None)
    teacher.name, teacher.weights = name, f"{name}, revision {revision}" if revision else f"{name}, a local folder"
    return teacher
